"""The only module that knows array libraries: namespaces, dtypes, small shared idioms."""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import numpy as np

Array = Any

_PLAIN = (np.ndarray, np.generic, list, tuple, bool, int, float, complex)


def library(a: Any) -> str | None:
    """The name of the array library of an array; None for NumPy's and for what is no array."""
    if isinstance(a, _PLAIN) or a is None:
        return None
    if _is_torch(a):
        return "torch"
    from array_api_compat import is_array_api_obj

    if not is_array_api_obj(a):
        return None
    name = str(namespace(a).__name__)
    return name.removeprefix("array_api_compat.").partition(".")[0]


def _is_torch(a: Any) -> bool:
    """Whether an array is a torch tensor, found in a way that torch.compile can trace."""
    if type(a).__module__.partition(".")[0] != "torch":
        return False
    import torch

    return isinstance(a, torch.Tensor)


def is_foreign(*arrays: Any) -> bool:
    """Whether any is an array of another library than NumPy."""
    return any(library(a) is not None for a in arrays)


def namespace(*arrays: Array) -> Any:
    """The array-API namespace that all arrays share."""
    if all(type(a) is np.ndarray for a in arrays):
        return np
    if all(_is_torch(a) for a in arrays):
        from array_api_compat import torch

        return torch
    from array_api_compat import array_namespace

    return array_namespace(*arrays)


def is_numpy(xp: Any) -> bool:
    """Whether a namespace is NumPy's own."""
    return xp is np or getattr(xp, "__name__", "") == "array_api_compat.numpy"


def device(a: Array) -> Any:
    """Where an array lies."""
    if type(a) is np.ndarray:
        return "cpu"
    if _is_torch(a):
        return a.device
    if library(a) == "jax":
        return _jax_device(a)
    from array_api_compat import device

    return device(a)


def _jax_device(a: Array) -> Any:
    """The device of a JAX array; None for one that has several or, being traced, none."""
    devices = [] if is_traced(a) else list(a.devices())
    return devices[0] if len(devices) == 1 else None


def is_traced(a: Array) -> bool:
    """Whether an array may have no values to look at: inside jit, vmap, or on a meta device."""
    name = library(a)
    if name == "jax":
        import jax

        return isinstance(a, jax.core.Tracer)
    if name == "torch":
        import torch

        return bool(
            torch.compiler.is_compiling()
            or a.device.type == "meta"
            or isinstance(a, torch._subclasses.FakeTensor)
            or torch._C._functorch.is_functorch_wrapped_tensor(a)
        )
    return False


def is_on_host(a: Array) -> bool:
    """Whether looking at an array's values waits for no device."""
    if library(a) == "jax":
        return not is_traced(a) and all(d.platform == "cpu" for d in a.devices())
    where = device(a)
    return is_numpy(namespace(a)) or getattr(where, "type", str(where)).lower().startswith("cpu")


def to_host(a: Array) -> np.ndarray:
    """An array's values in NumPy; waits for the device."""
    name = library(a)
    if name == "torch":
        return np.asarray(a.detach().cpu())
    if name == "cupy":
        return np.asarray(a.get())
    if name == "array_api_strict":
        return np.asarray(a.to_device(namespace(a).Device("CPU_DEVICE")))
    return np.asarray(a)


def constant(a: Array) -> Array:
    """An array that derivatives pass by."""
    return a.detach() if library(a) == "torch" else a


def full_precision(a: Array) -> AbstractContextManager[Any]:
    """Products of an array in its own precision: JAX multiplies in less on some devices."""
    if library(a) != "jax":
        return nullcontext()
    import jax

    return jax.default_matmul_precision("highest")


def repeat(count: int, wanted: Array, body: Callable[[Any, Any], Any], x: Any) -> Any:
    """x after body(i, x) for i < count, where `wanted` is how many of them change anything.

    In JAX a loop of a fixed length, which has derivatives of both modes; it skips what no element
    of a batch wants.
    """
    if library(wanted) == "jax":
        from jax import lax

        most = wanted.max()
        return lax.fori_loop(
            0, count, lambda i, x: lax.cond(i < most, lambda x: body(i, x), lambda x: x, x), x
        )
    for i in range(count):
        x = body(i, x)
    return x


def is_complex(a: Array) -> bool:
    """Whether an array has a complex dtype."""
    return bool(namespace(a).isdtype(a.dtype, "complex floating"))


def eps(a: Array) -> float:
    """The machine epsilon of an array's real dtype, twice the unit roundoff."""
    return float(namespace(a).finfo(a.dtype).eps)


def transpose(a: Array) -> Array:
    """The last two axes swapped."""
    return namespace(a).matrix_transpose(a)


def adjoint(a: Array) -> Array:
    """The conjugate transpose of the last two axes."""
    return conj(transpose(a)) if is_complex(a) else transpose(a)


def conj(a: Array) -> Array:
    """The complex conjugate; torch.func.vmap has no rule for torch's own."""
    if _is_torch(a):
        import torch

        if not torch.compiler.is_compiling() and torch._C._functorch.is_functorch_wrapped_tensor(a):
            return torch.complex(a.real, -a.imag)
    return namespace(a).conj(a)


def diagonal(a: Array) -> Array:
    """The real part of the diagonal of the last two axes."""
    xp = namespace(a)
    d = xp.linalg.diagonal(a)
    return xp.real(d) if is_complex(a) else d


def spread(C: Array, grid: int, ndim: int) -> Array:
    """Matrices of a grid with axes enough for a batch of `ndim` − 2 axes behind the grid's."""
    missing = ndim - (C.ndim - grid)
    if grid and missing > 0:
        return namespace(C).reshape(C, (*C.shape[:grid], *(1,) * missing, *C.shape[grid:]))
    return C


def from_the_left(turned: Any, B: Array) -> Any:
    """B @ A, given the operator Aᵀ: (Aᵀ Bᵀ)ᵀ."""
    return turned @ B if B.ndim == 1 else transpose(turned @ transpose(B))


def eye(like: Array) -> Array:
    """The identity of a square matrix's size, dtype and device."""
    xp = namespace(like)
    if xp is np:
        return np.eye(like.shape[-1], dtype=like.dtype)
    return xp.eye(like.shape[-1], dtype=like.dtype, device=device(like))


def one_norm(a: Array) -> Array:
    """The largest absolute column sum over the last two axes."""
    xp = namespace(a)
    return xp.max(xp.sum(xp.abs(a), axis=-2), axis=-1)


def frobenius(a: Array) -> Array:
    """The Frobenius norm over the last two axes."""
    xp = namespace(a)
    return xp.sqrt(xp.sum(xp.abs(a) ** 2, axis=(-2, -1)))


def largest(a: Array) -> float:
    """The largest entry as a Python float (0 for an empty array); waits for the device."""
    return float(to_host(namespace(a).max(a))) if math.prod(a.shape) else 0.0
