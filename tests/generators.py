"""Inputs with prescribed properties: every maker takes a NumPy Generator and a dtype.

The hypothesis strategies at the end draw shapes, dtypes, memory layouts and times; the numbers
themselves come from a seeded Generator, which shrinks better than arrays of floats.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from hypothesis import strategies as st
from numpy.typing import DTypeLike, NDArray

from .naive import balance

Array = NDArray[Any]
Pair = tuple[Array, Array]
Maker = Callable[[np.random.Generator, int, int, Any], Pair]

DTYPES = ("float32", "float64", "complex64", "complex128")
DOUBLES = ("float64", "complex128")


def unit(dtype: DTypeLike) -> float:
    """The unit roundoff of the real dtype that belongs to `dtype`."""
    return float(np.finfo(dtype).eps) / 2


def rho(U: Array, V: Array, t: complex = 1.0) -> float:
    """|t| ‖U‖₂ ‖V‖₂ of two-dimensional U and V, paired columns brought to equal norms."""
    U, V = balance(U, V)
    if not U.size:
        return 0.0
    return float(abs(t) * np.linalg.norm(U, 2) * np.linalg.norm(V, 2))


def theta(U: Array, V: Array, t: complex = 1.0) -> float:
    """|t| ‖S‖₂ of two-dimensional U and V."""
    U, V = balance(U, V)
    if not U.size:
        return 0.0
    r = U.shape[1]
    R = np.linalg.qr(np.concatenate([U, V], -1), mode="r")
    return float(abs(t) * np.linalg.norm(_wedge(R[:, :r], R[:, r:]), 2))


def _wedge(U: Array, V: Array) -> Array:
    return U @ V.conj().T - V @ U.conj().T


def normal(rng: np.random.Generator, shape: tuple[int, ...], dtype: DTypeLike) -> Array:
    """Standard normal numbers, with a normal imaginary part where the dtype has one."""
    a = rng.standard_normal(shape)
    if np.issubdtype(dtype, np.complexfloating):
        a = (a + 1j * rng.standard_normal(shape)) / np.sqrt(2)
    return a.astype(dtype)


def _double(dtype: DTypeLike) -> Any:
    return np.result_type(dtype, np.float64)


def frame(rng: np.random.Generator, n: int, m: int, dtype: DTypeLike) -> Array:
    """Orthonormal columns (rows, where m > n)."""
    a = normal(rng, (max(n, m), min(n, m)), _double(dtype))
    q = np.linalg.qr(a)[0] if a.size else a
    return (q if n >= m else q.conj().T).astype(dtype)


def generic(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """Normal numbers, ‖S‖ of about 3."""
    scale = (max(n, 1)) ** -0.25
    U, V = (normal(rng, (n, r), _double(dtype)) * scale for _ in range(2))
    return U.astype(dtype), V.astype(dtype)


def with_angles(
    rng: np.random.Generator, n: int, angles: Array | list[float], dtype: DTypeLike
) -> Pair:
    """S with eigenvalues ±i θⱼ (n at least 2r), U and V orthogonal to each other."""
    r = len(angles)
    E = frame(rng, n, 2 * r, _double(dtype))
    root = np.sqrt(np.asarray(angles, dtype=np.float64))
    return (E[:, :r] * root).astype(dtype), (E[:, r:] * root).astype(dtype)


def with_norm(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike, norm: float) -> Pair:
    """Normal numbers scaled to ‖S‖₂ = norm, half of it in either factor."""
    U, V = generic(rng, n, r, _double(dtype))
    size = theta(U, V)
    scale = np.sqrt(norm / size) if size else 1.0
    return (U * scale).astype(dtype), (V * scale).astype(dtype)


def nearly_parallel(
    rng: np.random.Generator,
    n: int,
    r: int,
    dtype: DTypeLike,
    eps: float = 1e-4,
    size: float = 5.0,
) -> Pair:
    """V = U·(Hermitian) + eps·noise with ‖U‖ about `size`: ‖S‖ far below ‖U‖‖V‖.

    Rounding to `dtype` is a second noise, of size u.
    """
    wide = _double(dtype)
    U = size * normal(rng, (n, r), wide) / np.sqrt(max(n, 1))
    H = normal(rng, (r, r), wide)
    V = U @ (H + H.conj().T) / 2 + eps * size * normal(rng, (n, r), wide) / np.sqrt(max(n, 1))
    return U.astype(dtype), V.astype(dtype)


def rank_deficient(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """The last column of U is the sum of the others (zero when it is the only one)."""
    U, V = generic(rng, n, r, dtype)
    if r:
        U[:, -1] = U[:, :-1].sum(-1)
    return U, V


def zero_columns(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    U, V = generic(rng, n, r, dtype)
    U[:, ::2] = 0
    V[:, -1:] = 0
    return U, V


def duplicate_columns(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    U, V = generic(rng, n, r, dtype)
    U[:, :] = U[:, :1]
    return U, V


def repeated_pairs(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """One pair r times, with either sign: errors of all are the same, and add up."""
    U, V = generic(rng, n, 1, dtype)
    signs = rng.choice([-1, 1], r)
    return (U * signs).astype(dtype), (V * signs).astype(dtype)


def positive(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """Columns of positive numbers, which all point one way."""
    U, V = rng.uniform(size=(2, n, r)) * max(n, 1) ** -0.25
    return U.astype(dtype), V.astype(dtype)


def scaled_columns(
    rng: np.random.Generator, n: int, r: int, dtype: DTypeLike, exponent: float | None = None
) -> Pair:
    """uⱼ·c and vⱼ/c with c from 10**-exponent to 10**exponent: S is that of a generic pair."""
    if exponent is None:
        exponent = 8.0 if unit(dtype) < 1e-10 else 4.0
    U, V = generic(rng, n, r, _double(dtype))
    c = 10.0 ** np.linspace(-exponent, exponent, r) if r > 1 else np.full(r, 10.0**exponent)
    return (U * c).astype(dtype), (V / c).astype(dtype)


def equal(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """U = V, so that S = 0 and exp(tS) = I."""
    U, _ = generic(rng, n, r, dtype)
    return U, U.copy()


def one_zero(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """U = 0: the small matrix J G is nilpotent, not zero."""
    U, V = generic(rng, n, r, dtype)
    return np.zeros_like(U), V


def both_zero(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    return np.zeros((n, r), dtype), np.zeros((n, r), dtype)


def nilpotent(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """L and R for the general case: Rᴴ L, and with it L Rᴴ, is a shift (n above r)."""
    E = frame(rng, n, r + 1, _double(dtype))
    weights = rng.uniform(0.5, 2.0, r)
    return (E[:, :r] * weights).astype(dtype), E[:, 1:].astype(dtype)


def huge(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """An angle of up to 1e13 (1e5 in single precision), the contract's last."""
    most = 13.0 if unit(dtype) < 1e-10 else 5.0
    return with_norm(rng, n, r, dtype, 10.0 ** rng.uniform(2.0, most))


def tiny(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    return with_norm(rng, n, r, dtype, 10.0 ** rng.uniform(-12.0, -1.0))


def parallel_at_random(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """Nearly parallel, with everything about it drawn too."""
    eps = unit(dtype) ** rng.uniform(0.1, 1.0)
    return nearly_parallel(rng, n, r, dtype, eps, 10.0 ** rng.uniform(-1.0, 2.0))


MAKERS: dict[str, Maker] = {
    "generic": generic,
    "tiny": tiny,
    "huge": huge,
    "nearly_parallel": nearly_parallel,
    "parallel_at_random": parallel_at_random,
    "rank_deficient": rank_deficient,
    "zero_columns": zero_columns,
    "duplicate_columns": duplicate_columns,
    "repeated_pairs": repeated_pairs,
    "positive": positive,
    "scaled_columns": scaled_columns,
    "equal": equal,
    "one_zero": one_zero,
    "both_zero": both_zero,
}


def batch(
    rng: np.random.Generator, shape: tuple[int, ...], make: Callable[[], Pair], n: int, r: int
) -> Pair:
    """Stacks of independent pairs (n and r say the shape when the batch is empty)."""
    pairs = [make() for _ in range(int(np.prod(shape)))]
    if not pairs:
        U, V = make()
        return np.zeros((*shape, n, r), U.dtype), np.zeros((*shape, n, r), V.dtype)
    U, V = (np.stack(side).reshape(*shape, n, r) for side in zip(*pairs, strict=True))
    return U, V


def _sliced(a: Array) -> Array:
    big = np.full((*(2 * n for n in a.shape),), np.nan, a.dtype)
    view = big[(slice(None, None, 2),) * a.ndim]
    view[...] = a
    return view


def _reversed(a: Array) -> Array:
    backwards = (slice(None, None, -1),) * a.ndim
    return a[backwards].copy()[backwards]


def _read_only(a: Array) -> Array:
    a = a.copy()
    a.flags.writeable = False
    return a


def _repeated(a: Array) -> Array:
    """Stride 0 along the first axis: the first entry stands for all of them."""
    return np.broadcast_to(a[:1], a.shape)


def _unaligned(a: Array) -> Array:
    raw = np.zeros(a.nbytes + 1, np.uint8)[1:]
    b = raw.view(a.dtype) if a.ndim == 0 else raw[: a.nbytes].view(a.dtype).reshape(a.shape)
    b[...] = a
    return b


def _swapped(a: Array) -> Array:
    """Bytes in the other order; all arrays of a kind share one dtype object, as from one file."""
    return a.astype(_OTHER_ORDER[a.dtype.char]) if a.dtype.char in _OTHER_ORDER else a


_OTHER_ORDER = {char: np.dtype(char).newbyteorder() for char in "fdFD"}

# Each returns the same numbers in another layout, but for "repeated".
LAYOUTS: dict[str, Callable[[Array], Array]] = {
    "C": np.ascontiguousarray,
    "Fortran": np.asfortranarray,
    "reversed": _reversed,
    "sliced": _sliced,
    "read-only": _read_only,
    "repeated": _repeated,
    "unaligned": _unaligned,
    "swapped": _swapped,
}

seeds = st.integers(0, 2**32 - 1)
dtypes = st.sampled_from(DTYPES)
layouts = st.sampled_from(sorted(LAYOUTS))
makers = st.sampled_from(sorted(MAKERS))
times = st.one_of(
    st.sampled_from([0.0, 1.0, -1.0, 0.5]),
    st.floats(-4.0, 4.0, allow_subnormal=False),
)
sizes = st.tuples(st.integers(0, 40), st.integers(0, 6), st.integers(0, 5))


@st.composite
def batches(draw: st.DrawFn, count: int = 3) -> tuple[tuple[int, ...], ...]:
    """Batch shapes of rank 0 to 3 that broadcast with each other, empty ones included."""
    whole = tuple(draw(st.lists(st.integers(0, 3), max_size=3)))

    def part() -> tuple[int, ...]:
        kept = whole[draw(st.integers(0, len(whole))) :]
        return tuple(1 if draw(st.booleans()) else size for size in kept)

    parts = [part() for _ in range(count)]
    return tuple(parts)


def repeated_angles(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """One angle, r times (n at least 2r)."""
    return with_angles(rng, n, [1.3] * r, dtype)


def multiples_of_pi(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """Angles π, 2π, … up to rounding (n at least 2r)."""
    return with_angles(rng, n, np.pi * np.arange(1, r + 1), dtype)


def far_columns(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """Columns so far apart in size that their squares leave the range of the dtype."""
    return scaled_columns(rng, n, r, dtype, 150.0 if unit(dtype) < 1e-10 else 18.0)


def any_norm(rng: np.random.Generator, n: int, r: int, dtype: DTypeLike) -> Pair:
    """‖S‖ from 1e-12 to 1e8 (1e5 in single precision)."""
    most = 8.0 if unit(dtype) < 1e-10 else 5.0
    return with_norm(rng, n, r, dtype, 10.0 ** rng.uniform(-12.0, most))


# What breaks derivatives, beside MAKERS; the first two need n of at least 2r.
DERIVATIVE_MAKERS: dict[str, Maker] = {
    "repeated_angles": repeated_angles,
    "multiples_of_pi": multiples_of_pi,
    "far_columns": far_columns,
    "any_norm": any_norm,
}
