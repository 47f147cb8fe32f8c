"""The only module that knows array libraries: namespaces, dtypes, small shared idioms."""

from __future__ import annotations

from typing import Any

import numpy as np

Array = Any


def namespace(*arrays: Array) -> Any:
    """The array-API namespace that all arrays share."""
    if all(type(a) is np.ndarray for a in arrays):
        return np
    from array_api_compat import array_namespace

    return array_namespace(*arrays)


def is_numpy(xp: Any) -> bool:
    """Whether a namespace is NumPy's own."""
    return xp is np or getattr(xp, "__name__", "") == "array_api_compat.numpy"


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
    return namespace(a).conj(transpose(a)) if is_complex(a) else transpose(a)


def diagonal(a: Array) -> Array:
    """The real part of the diagonal of the last two axes."""
    xp = namespace(a)
    d = xp.linalg.diagonal(a)
    return xp.real(d) if is_complex(a) else d


def eye(like: Array) -> Array:
    """The identity of a square matrix's size, dtype and device."""
    xp = namespace(like)
    if xp is np:
        return np.eye(like.shape[-1], dtype=like.dtype)
    from array_api_compat import device

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
    return float(namespace(a).max(a)) if a.size else 0.0
