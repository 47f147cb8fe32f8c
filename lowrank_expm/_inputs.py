"""What callers may pass: checks of shapes, dtypes and t, with messages that say what to do."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

Shape = tuple[int, ...]

# How hard to look for overlapping memory before calling it overlapping.
SEARCH = 100_000

COMPLEX_TIME = (
    "t is complex, so the result would not be unitary; pass a real t, "
    "or use expm_multiply, where t may be complex"
)

_SUPPORTED = frozenset("?bBhHiIlLqQefdFD")


def array(name: str, a: Any) -> np.ndarray:
    """The argument as a NumPy array of a supported dtype."""
    if type(a) is not np.ndarray:
        _refuse_foreign(name, a)
        a = np.asarray(a)
    if a.dtype.char not in _SUPPORTED:
        raise TypeError(
            f"{name} has dtype {a.dtype}; convert it to float32, float64, complex64 or complex128"
        )
    return a


def _refuse_foreign(name: str, a: Any) -> None:
    """Refuse what NumPy would convert silently and wrongly."""
    if isinstance(a, np.ma.MaskedArray):
        raise TypeError(f"{name} is a masked array; fill or drop the masked entries first")
    if isinstance(a, np.ndarray | np.generic | list | tuple | int | float | complex):
        return
    module = type(a).__module__.partition(".")[0]
    if hasattr(a, "__array_namespace__") or module in {"torch", "jax", "jaxlib", "dask", "cupy"}:
        raise TypeError(
            f"{name} is a {type(a).__module__}.{type(a).__qualname__}; "
            "this version computes with NumPy arrays: convert it first"
        )


def factors(first: tuple[str, Any], second: tuple[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Two tall factors (…, n, r), equal in their last two axes; vectors become one column."""
    (name_u, U), (name_v, V) = first, second
    return paired((name_u, array(name_u, U)), (name_v, array(name_v, V)))


def paired(first: tuple[str, Any], second: tuple[str, Any]) -> tuple[Any, Any]:
    """The same for arrays of any library."""
    (name_u, U), (name_v, V) = first, second
    given = tuple(U.shape), tuple(V.shape)
    if U.ndim == 1 and V.ndim == 1:
        U, V = U[:, None], V[:, None]
    if U.ndim < 2 or V.ndim < 2 or U.shape[-2:] != V.shape[-2:]:
        raise ValueError(
            f"{name_u} has shape {given[0]} and {name_v} has shape {given[1]}; "
            "both must be (n,) or (…, n, r) with the same n and r"
        )
    batch(f"{name_u} of shape {tuple(U.shape)} and {name_v} of shape {tuple(V.shape)}", U, V)
    return U, V


def batch(what: str, *arrays: np.ndarray) -> Shape:
    """The broadcast batch shape of matrices."""
    shapes = [tuple(a.shape[:-2]) for a in arrays]
    if all(s == shapes[0] for s in shapes):
        return shapes[0]
    try:
        return np.broadcast_shapes(*shapes)
    except ValueError:
        raise ValueError(f"the batch axes of {what} do not broadcast") from None


def vectors(B: Any, n: int) -> tuple[np.ndarray, bool]:
    """B as (…, n, k), and whether it was one vector (n,)."""
    return columns(array("B", B), n)


def columns(B: Any, n: int) -> tuple[Any, bool]:
    """The same for an array of any library."""
    vector = B.ndim == 1
    if vector:
        B = B[:, None]
    if B.ndim < 2 or B.shape[-2] != n:
        shape = tuple(B.shape[:1] if vector else B.shape)
        raise ValueError(f"B has shape {shape}; with n = {n} it must be ({n},) or (…, {n}, k)")
    return B, vector


class Times(NamedTuple):
    """t as an array, whether it was a grid, and what it contributes to the dtype."""

    values: np.ndarray
    grid: bool
    promotes: Any


def times(t: Any, *, real: bool = True) -> Times:
    """t as a zero-dimensional or one-dimensional array of finite numbers."""
    promotes: Any = 0.0
    if type(t) is float or type(t) is int:
        values = np.asarray(_number(t))
    else:
        weak = isinstance(t, int | float | complex) and not isinstance(t, np.generic)
        values = array("t", t)
        promotes = (0j if values.dtype.kind == "c" else 0.0) if weak else values.dtype
    if values.dtype.kind == "c" and real:
        raise TypeError(COMPLEX_TIME)
    if values.ndim > 1:
        raise ValueError(f"t has shape {values.shape}; it must be a number or one-dimensional")
    if not np.isfinite(values).all():
        raise ValueError("t contains NaN or infinity; it must be finite")
    return Times(values, values.ndim == 1, promotes)


def _number(t: float) -> float:
    """A Python number as a float, infinite where it is too large for one."""
    try:
        return float(t)
    except OverflowError:
        return np.inf


def floating(*operands: Any) -> np.dtype:
    """The promoted dtype of arrays, dtypes and Python numbers; integers count as float64."""
    return np.result_type(*(_inexact(a) for a in operands))


def _inexact(a: Any) -> Any:
    """What an operand contributes to a promotion."""
    dtype = a if isinstance(a, np.dtype) else getattr(a, "dtype", None)
    return a if dtype is None or dtype.kind in "fc" else np.dtype(np.float64)


def real_part(dtype: np.dtype) -> np.dtype:
    """The real dtype to compute in: that of `dtype`, at least single precision."""
    return np.dtype(np.float64 if dtype.char in "dD" else np.float32)


def with_kind(real: np.dtype, *arrays: np.ndarray) -> np.dtype:
    """The dtype of precision `real`, complex if any array is."""
    if any(a.dtype.kind == "c" for a in arrays):
        return np.dtype(np.complex128 if real.char == "d" else np.complex64)
    return real


def output(out: Any, shape: Shape, dtype: np.dtype, B: np.ndarray, *inputs: np.ndarray) -> None:
    """Check `out`: right shape and dtype, writable, B itself or apart from all inputs."""
    if type(out) is not np.ndarray and not isinstance(out, np.memmap):
        raise TypeError(f"out is a {type(out).__name__}; pass a NumPy array")
    if out.shape != shape or out.dtype != dtype:
        raise ValueError(
            f"out has shape {out.shape} and dtype {out.dtype}; "
            f"the result has shape {shape} and dtype {dtype}"
        )
    if not out.flags.writeable:
        raise ValueError("out is read-only; pass a writable array")
    others = inputs if _same(out, B) else (B, *inputs)
    if any(overlap(out, a) for a in others):
        raise ValueError("out overlaps an input; pass B itself or an array of its own memory")


def _same(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays are the same elements in the same places."""
    column = a[:, None] if a.ndim == 1 and b.ndim == 2 else a
    return (
        column.shape == b.shape
        and column.dtype == b.dtype
        and column.__array_interface__["data"][0] == b.__array_interface__["data"][0]
        and _steps(column) == _steps(b)
    )


def _steps(a: np.ndarray) -> list[int]:
    """The strides of the axes that have any."""
    return [s for n, s in zip(a.shape, a.strides, strict=True) if n > 1]


def overlap(a: np.ndarray, b: np.ndarray) -> bool:
    """Whether two arrays share memory; undecided counts as shared."""
    if not np.may_share_memory(a, b):
        return False
    try:
        return bool(np.shares_memory(a, b, max_work=SEARCH))  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True
