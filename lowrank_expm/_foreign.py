"""What callers may pass in arrays of other libraries than NumPy: one library, one device."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from . import _inputs
from ._array import (
    Array,
    device,
    is_complex,
    is_on_host,
    is_traced,
    library,
    namespace,
    to_host,
)


class Arguments(NamedTuple):
    """Checked arguments, cast to the precision to compute in.

    U and V have one dtype and B the same: where they are real, a complex B is folded into twice
    as many real columns. `t` is real, on the device, and has no axis or, for a grid, one.
    """

    U: Array
    V: Array
    B: Array
    t: Array
    dtype: Any
    shape: tuple[int, ...]
    vector: bool
    folded: bool

    @property
    def blind(self) -> bool:
        """Whether there may be no values to look at."""
        return any(is_traced(a) for a in (self.U, self.V, self.B, self.t))

    @property
    def on_host(self) -> bool:
        """Whether values can be looked at without waiting for a device."""
        return is_on_host(self.U)

    def unfold(self, Y: Array) -> Array:
        """A result in the shape and dtype that the caller expects."""
        return unfolded(Y, self.dtype, self.folded, self.vector)


class Checked(NamedTuple):
    """Checked arguments with column axes, in their own dtypes; `dtype` is the result's."""

    U: Array
    V: Array
    B: Array
    t: Array
    dtype: Any
    vector: bool

    @property
    def shape(self) -> tuple[int, ...]:
        """The result's, with a column axis."""
        batch = _inputs.batch("U, V and B", self.U, self.V, self.B)
        return (*self.t.shape, *batch, *self.B.shape[-2:])


def arguments(
    U: Any, V: Any, B: Any, t: Any, names: tuple[str, str] = ("U", "V"), real_t: bool = True
) -> Arguments:
    """Check U, V, B and t, of which at least one is an array of another library, and cast them."""
    return cast(checked(U, V, B, t, names, real_t))


def checked(
    U: Any, V: Any, B: Any, t: Any, names: tuple[str, str] = ("U", "V"), real_t: bool = True
) -> Checked:
    """Check U, V, B and t, of which at least one is an array of another library."""
    given = dict(zip((*names, "B"), (U, V, B), strict=True))
    given = {name: a for name, a in given.items() if a is not None}
    xp, where = same_place(given, t)
    _refuse_lazy(given)
    U, V = _inputs.paired((names[0], U), (names[1], V))
    n = int(U.shape[-2])
    B = xp.zeros((n, 0), dtype=U.dtype, device=where) if B is None else B
    B, vector = _inputs.columns(B, n)
    shapes = " and ".join(f"{name} of shape {tuple(a.shape)}" for name, a in given.items())
    _inputs.batch(shapes, U, V, B)
    t = time(t, real_t)
    dtype = promoted(xp, U, V, B, t)
    t = _placed(t, with_kind(xp, working(xp, dtype), t), xp, where)
    return Checked(U, V, B, t, dtype, vector)


def cast(c: Checked, folding: bool = True) -> Arguments:
    """Checked arguments in the precision to compute in."""
    xp = namespace(c.U)
    work = working(xp, c.dtype)
    # A complex t, which only general factors admit, makes these complex.
    factors = with_kind(xp, work, c.U, c.V, c.t)
    U, V = (xp.astype(a, factors, copy=False) for a in (c.U, c.V))
    folded = folding and is_complex(c.B) and not is_complex(U)
    B = xp.astype(c.B, with_kind(xp, work, c.B, U), copy=False)
    B = fold(B) if folded else B
    return Arguments(U, V, B, c.t, c.dtype, c.shape, c.vector, folded)


def _refuse_lazy(given: dict[str, Any]) -> None:
    """Dask's graphs are built for one call; what keeps values in between wants them in memory."""
    lazy = [name for name, a in given.items() if library(a) == "dask"]
    if lazy:
        raise TypeError(
            f"{lazy[0]} is a dask array: skew_expm_multiply, expm_multiply and "
            "orthogonal_attention take these; for operators and derivatives compute() it first"
        )


def same_place(given: dict[str, Any], t: Any = None) -> tuple[Any, Any]:
    """The namespace and the device of all arrays; TypeError for a mixture."""
    arrays = dict(given)
    if (hasattr(t, "shape") and getattr(t, "shape", ()) != ()) or library(t) is not None:
        arrays["t"] = t
    (first, a), *others = sorted(arrays.items(), key=lambda item: library(item[1]) is None)
    for name, b in others:
        if library(b) != library(a):
            advice = ", or t.tolist()" if name == "t" else ""
            raise TypeError(
                f"{first} is a {_kind(a)} and {name} is a {_kind(b)}; "
                f"pass arrays of one library{advice}: nothing is converted silently"
            )
        if not _placeless(a, b) and device(a) != device(b):
            raise TypeError(
                f"{first} is on {device(a)} and {name} is on {device(b)}; move them to one device"
            )
    for name, b in arrays.items():
        _check_dtype(name, b)
    return namespace(a), device(a)


def _placeless(*arrays: Array) -> bool:
    """Whether any is traced by JAX, which knows no device yet."""
    return any(library(a) == "jax" and is_traced(a) for a in arrays)


def _kind(a: Any) -> str:
    """The type of an argument, as a reader knows it."""
    return f"{type(a).__module__}.{type(a).__qualname__}".removeprefix("builtins.")


def _check_dtype(name: str, a: Array) -> None:
    """Refuse dtypes that are no numbers of single or double precision, or less; and sparse ones."""
    xp = namespace(a)
    if "sparse" in str(getattr(a, "layout", "")):
        raise TypeError(f"{name} is sparse; pass {name}.to_dense()")
    known = xp.isdtype(a.dtype, ("bool", "integral", "real floating", "complex floating"))
    if not known or any(kind in str(a.dtype) for kind in ("float8", "complex32")):
        raise TypeError(
            f"{name} has dtype {a.dtype}; convert it to float32, float64, complex64 or complex128"
        )


def time(t: Any, real: bool = True) -> Any:
    """t as a number, a list of numbers, or an array without an axis or with one."""
    if type(t) is float and math.isfinite(t):  # what a compiler can trace
        return t
    if not library(t):
        return _inputs.times(t, real=real).values.tolist()
    if is_complex(t) and real:
        raise TypeError(_inputs.COMPLEX_TIME)
    if t.ndim > 1:
        raise ValueError(f"t has shape {tuple(t.shape)}; it must be a number or one-dimensional")
    return t


def _placed(t: Any, dtype: Any, xp: Any, where: Any) -> Array:
    """t as an array in the given place; a number needs no transfer."""
    if library(t):
        return xp.astype(t, dtype, copy=False)
    if isinstance(t, list):
        return xp.asarray(t, dtype=dtype, device=where)
    return xp.full((), t, dtype=dtype, device=where)


def promoted(xp: Any, *operands: Any) -> Any:
    """The promoted floating dtype; numbers do not promote, integers count as the default.

    What JAX calls weakly typed was a number before it was traced.
    """
    default = xp.asarray(0.0).dtype
    arrays = [a for a in operands if library(a) is not None]
    arrays = [a for a in arrays if not getattr(a, "weak_type", False)] or arrays
    dtypes = [a.dtype if _is_inexact(xp, a.dtype) else default for a in arrays]
    dtype = xp.result_type(*dtypes) if len(dtypes) > 1 else dtypes[0]
    return with_complex(xp, dtype) if any(_is_complex(a) for a in operands) else dtype


def _is_complex(a: Any) -> bool:
    """Whether an array, a number or a list of numbers is complex."""
    if library(a):
        return is_complex(a)
    return isinstance(a, complex) or (isinstance(a, list) and any(map(_is_complex, a)))


def _is_inexact(xp: Any, dtype: Any) -> bool:
    """Whether a dtype is floating."""
    return bool(xp.isdtype(dtype, ("real floating", "complex floating")))


def working(xp: Any, dtype: Any) -> Any:
    """The real dtype to compute in: at least single precision."""
    wide = dtype in (getattr(xp, "float64", None), getattr(xp, "complex128", None))
    return xp.float64 if wide else xp.float32


def with_complex(xp: Any, real: Any) -> Any:
    """The complex dtype of a precision."""
    return xp.complex128 if working(xp, real) == xp.float64 else xp.complex64


def with_kind(xp: Any, real: Any, *operands: Any) -> Any:
    """The dtype of precision `real`, complex if any operand is."""
    return with_complex(xp, real) if any(map(_is_complex, operands)) else real


def fold(B: Array) -> Array:
    """Complex columns as twice as many real ones."""
    xp = namespace(B)
    return xp.concat([xp.real(B), xp.imag(B)], axis=-1)


def unfolded(Y: Array, dtype: Any, folded: bool, vector: bool) -> Array:
    """The inverse, in the caller's dtype and shape."""
    xp = namespace(Y)
    if folded:
        k = Y.shape[-1] // 2
        complex_dtype = with_complex(xp, Y.dtype)
        Y = xp.astype(Y[..., :k], complex_dtype) + 1j * xp.astype(Y[..., k:], complex_dtype)
    Y = Y[..., 0] if vector else Y
    return xp.astype(Y, dtype, copy=False)


def require_finite(**arrays: Array) -> None:
    """Raise for the first array with NaN or infinity; waits for the device."""
    for name, a in arrays.items():
        if not bool(to_host(namespace(a).all(namespace(a).isfinite(a)))):
            raise ValueError(f"{name} contains NaN or infinity; all entries must be finite")


def size(shape: tuple[int, ...]) -> int:
    """How many entries an array of a shape has."""
    return math.prod(shape)
