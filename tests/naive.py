"""The oracle: exp(tS)B from the definition, in integers of any length.

A float is an integer times a power of two, and NumPy multiplies arrays of Python integers, so
sums and products below are exact, and the few places that round say so. A complex matrix is
the real matrix [[Re, -Im], [Im, Re]]. ``test_naive.py`` checks the oracle against a dense
``mpmath.expm``.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


@dataclass(frozen=True)
class Fixed:
    """A real matrix: integers divided by 2**bits."""

    ints: Array
    bits: int

    @classmethod
    def exact(cls, a: Array) -> Fixed:
        """Every float64 is representable; `bits` follows from the smallest element."""
        mantissa, exponent = np.frexp(np.asarray(a, dtype=np.float64))
        bits = 53 - min(0, int(exponent.min(initial=0, where=mantissa != 0)))
        digits = np.ldexp(mantissa, 53).astype(np.int64).astype(object)
        return cls(digits << (exponent + (bits - 53)).clip(0).astype(object), bits)

    @classmethod
    def eye(cls, m: int) -> Fixed:
        return cls(np.eye(m, dtype=np.int64).astype(object), 0)

    @property
    def transposed(self) -> Fixed:
        return Fixed(self.ints.T, self.bits)

    def __matmul__(self, other: Fixed) -> Fixed:
        if self.ints.shape[-1] == 0:
            shape = self.ints.shape[0], other.ints.shape[1]
            return Fixed(np.zeros(shape, dtype=np.int64).astype(object), 0)
        return Fixed(self.ints @ other.ints, self.bits + other.bits)

    def __add__(self, other: Fixed) -> Fixed:
        bits = max(self.bits, other.bits)
        return Fixed(self.to(bits).ints + other.to(bits).ints, bits)

    def __sub__(self, other: Fixed) -> Fixed:
        return self + Fixed(-other.ints, other.bits)

    def to(self, bits: int) -> Fixed:
        """The same matrix with `bits` bits after the point: rounds if there were more."""
        extra = self.bits - bits
        if extra <= 0:
            return Fixed(self.ints << -extra, bits)
        return Fixed((self.ints + (1 << (extra - 1))) >> extra, bits)

    def halved(self, times: int) -> Fixed:
        return Fixed(self.ints, self.bits + times)

    def divided(self, by: int) -> Fixed:
        """Rounds."""
        return Fixed(self.ints // by, self.bits)

    def round(self) -> NDArray[np.float64]:
        """The nearest float64 array."""
        if self.ints.size == 0:
            return np.zeros(self.ints.shape)
        return (self.ints / (1 << self.bits)).astype(np.float64)


def embed(a: Array) -> Fixed:
    """A complex matrix as a real one of twice the size; a real matrix as it is."""
    if np.iscomplexobj(a):
        a = np.concatenate(
            [np.concatenate([a.real, -a.imag], -1), np.concatenate([a.imag, a.real], -1)], -2
        )
    return Fixed.exact(a)


def _phi1(A: Fixed, bits: int) -> Fixed:
    """phi_1(A) by Taylor, for a matrix of norm at most 2**-8."""
    one = Fixed.eye(A.ints.shape[0]).to(bits)
    phi = one
    for k in range(_terms(bits), 1, -1):
        phi = one + (A @ phi).to(bits).divided(k)
    return phi


def _terms(bits: int) -> int:
    k, gained = 1, 0.0
    while gained < bits:
        k += 1
        gained += 8 + math.log2(k)
    return k


def _core(A: Fixed, growth: float, digits: int) -> Fixed:
    """phi_1(A), with `digits` digits left after the doublings."""
    norm = float(np.abs(A.round()).sum(0).max(initial=0.0))
    steps = max(0, math.ceil(math.log2(norm)) + 8) if norm else 0
    # Doublings carry an error on as E1 e E2, where E1 and E2 are exponentials of parts of A:
    # these grow with the norm of A (a Jordan block at 0) and with e**growth.
    guard = 4 * math.log2(2 + norm) + steps + 4 * growth + 40
    bits = int(3.33 * digits + guard)
    A = A.to(bits)
    C = _phi1(A.halved(steps).to(bits), bits).halved(steps).to(bits)
    for _ in range(steps):
        C = C + C + ((C @ A).to(bits) @ C).to(bits)
    return C


@dataclass(frozen=True)
class Exact:
    """A result of the oracle."""

    value: Fixed
    is_complex: bool

    def round(self) -> Array:
        """The nearest float64 or complex128 array."""
        rounded = self.value.round()
        if not self.is_complex:
            return rounded
        n, k = rounded.shape[0] // 2, rounded.shape[1] // 2
        return rounded[:n, :k] + 1j * rounded[n:, :k]

    def distance(self, Y: Array) -> NDArray[np.float64]:
        """The norm of every column of Y - self, the difference taken exactly."""
        Y = np.asarray(Y)
        Y = Y.astype(np.complex128 if self.is_complex else np.float64)
        error = (embed(Y) - self.value).round()[:, : Y.shape[1]]
        return np.linalg.norm(error, axis=0)


def _low_rank_mp(L: Array, R: Array, B: Array, t: complex, growth: float, digits: int) -> Exact:
    kind = np.result_type(L, R, B, np.asarray(t), np.float64)
    L, R, B = (np.asarray(a).astype(kind) for a in (L, R, B))
    left, right = embed(L), embed(R).transposed
    times = embed(np.asarray(t, dtype=kind) * np.eye(L.shape[1], dtype=kind))
    K = times @ (right @ left)
    C = _core(K, growth, digits)
    right_hand_side = embed(B)
    Y = right_hand_side + left @ (times @ (C @ (right @ right_hand_side)))
    return Exact(Y, np.issubdtype(kind, np.complexfloating))


def balance(U: Array, V: Array) -> tuple[Array, Array]:
    """Powers of two between paired columns make their norms equal; pairs with a zero go."""
    U, V = _wide(U), _wide(V)
    keep = (U != 0).any(0) & (V != 0).any(0)
    U, V = U[:, keep], V[:, keep]
    shift = np.rint((_log2_norms(V) - _log2_norms(U)) / 2)
    return U * np.exp2(shift), V * np.exp2(-shift)


def _log2_norms(a: Array) -> Array:
    largest = np.abs(a).max(0, initial=0.0)
    return np.log2(largest) + np.log2(np.linalg.norm(a / largest, axis=0))


def _wide(a: Array) -> Array:
    a = np.asarray(a)
    return a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)


def exact_skew(U: Array, V: Array, B: Array, t: float = 1.0, digits: int = 60) -> Exact:
    """exp(t(U Vᴴ - V Uᴴ)) B of two-dimensional U, V and B, to `digits` digits."""
    U, V = balance(U, V)
    L, R = np.concatenate([U, -V], -1), np.concatenate([V, U], -1)
    return _low_rank_mp(L, R, B, t, 0.0, digits)


def exact_general(L: Array, R: Array, B: Array, t: complex = 1.0, digits: int = 60) -> Exact:
    """exp(t L Rᴴ) B of two-dimensional L, R and B; |t| ‖L‖ ‖R‖ up to a few hundred."""
    L, R = balance(L, R)
    growth = abs(t) * float(np.linalg.norm(L) * np.linalg.norm(R))
    if growth > 1e3:
        raise ValueError(f"the oracle's exponential may reach exp({growth:.0f}): use less")
    return _low_rank_mp(L, R, B, t, growth, digits)


Element = tuple[tuple[int, ...], Array, Array, Array, Any]


def elements(U: Array, V: Array, B: Array, t: Any = 1.0) -> Iterator[Element]:
    """Index in the result, u, v, b and t of every element of a broadcast batch and grid."""
    U, V, B = (np.asarray(a) for a in (U, V, B))
    U, V = (a[:, None] if a.ndim == 1 else a for a in (U, V))
    B = B[:, None] if B.ndim == 1 else B
    batch = np.broadcast_shapes(U.shape[:-2], V.shape[:-2], B.shape[:-2])
    U, V, B = (np.broadcast_to(a, batch + a.shape[-2:]) for a in (U, V, B))
    times = np.asarray(t)
    for index in np.ndindex(*times.shape, *batch):
        here, where = index[: times.ndim], index[times.ndim :]
        yield index, U[where], V[where], B[where], times[here].item()


def result_shape(U: Array, V: Array, B: Array, t: Any = 1.0) -> tuple[int, ...]:
    U, V, B = (np.asarray(a) for a in (U, V, B))
    batches = (a.shape[:-2] for a in (U, V, B))
    return np.shape(t) + np.broadcast_shapes(*batches) + (B.shape[-2:] if B.ndim > 1 else B.shape)


def _batched(exact: Any, U: Array, V: Array, B: Array, t: Any, digits: int) -> Array:
    shape = result_shape(U, V, B, t)
    vector = np.ndim(B) == 1
    Y = np.zeros(shape + (1,) * vector, dtype=np.result_type(U, V, B, np.asarray(t), np.float64))
    for index, u, v, b, s in elements(U, V, B, t):
        Y[index] = exact(u, v, b, s, digits).round()
    return Y[..., 0] if vector else Y


def expm_multiply_mp(U: Array, V: Array, B: Array, t: Any = 1.0, digits: int = 60) -> Array:
    """exp(t(U Vᴴ - V Uᴴ)) B, batches and grids included, rounded to float64 or complex128."""
    return _batched(exact_skew, U, V, B, t, digits)


def general_multiply_mp(L: Array, R: Array, B: Array, t: Any = 1.0, digits: int = 60) -> Array:
    """exp(t L Rᴴ) B, batches and grids included, rounded to float64 or complex128."""
    return _batched(exact_general, L, R, B, t, digits)


def dense_skew(U: Array, V: Array) -> Array:
    """S = U Vᴴ - V Uᴴ, by the definition."""
    U, V = (a[:, None] if a.ndim == 1 else a for a in (_wide(U), _wide(V)))
    return U @ V.conj().mT - V @ U.conj().mT


def expm_mp(U: Array, V: Array, t: Any = 1.0, digits: int = 60) -> Array:
    """exp(t(U Vᴴ - V Uᴴ)) as a dense array, rounded to float64 or complex128."""
    return expm_multiply_mp(U, V, np.eye(np.shape(U)[-2 if np.ndim(U) > 1 else 0]), t, digits)


def forward_errors(Y: Array, U: Array, V: Array, B: Array, t: Any = 1.0) -> Array:
    """‖y - exp(tS)b‖ / ‖b‖ of the worst column of every element of a batch or grid."""
    return _errors(exact_skew, Y, U, V, B, t)


def general_errors(Y: Array, L: Array, R: Array, B: Array, t: Any = 1.0) -> Array:
    """‖y - exp(t L Rᴴ)b‖ / ‖b‖ of the worst column of every element of a batch or grid."""
    return _errors(exact_general, Y, L, R, B, t)


def _errors(exact: Any, Y: Array, U: Array, V: Array, B: Array, t: Any) -> Array:
    Y = np.asarray(Y)
    assert Y.shape == result_shape(U, V, B, t), (Y.shape, result_shape(U, V, B, t))
    Y = Y[..., None] if np.ndim(B) == 1 else Y
    errors = np.zeros(Y.shape[:-2])
    for index, u, v, b, s in elements(U, V, B, t):
        distance = exact(u, v, b, s).distance(Y[index])
        errors[index] = relative(distance, np.linalg.norm(_wide(b), axis=0)).max(initial=0.0)
    return errors


def relative(distance: Array, size: Array) -> Array:
    """distance / size, where 0/0 is 0."""
    scale = np.where(size > 0, size, 1.0)
    return np.where(size > 0, distance / scale, np.where(distance > 0, np.inf, 0.0))


def norm_drifts(Y: Array, B: Array) -> Array:
    """| ‖y‖/‖b‖ - 1 | of every column, with sums that round once."""
    if not np.size(Y):
        return np.zeros(0)
    B = np.broadcast_to(B, np.shape(Y))
    columns = zip(_columns(Y), _columns(B), strict=True)
    return np.array([abs(_norm(y) / _norm(b) - 1) for y, b in columns if _norm(b) > 0])


def _columns(a: Array) -> Array:
    a = np.asarray(a)
    return a[None] if a.ndim == 1 else np.moveaxis(a, -1, -2).reshape(-1, a.shape[-2])


def _norm(x: Array) -> float:
    x = _wide(x)
    scale = float(np.abs(x).max(initial=0.0))
    parts = np.concatenate([x.real, x.imag]) / (scale or 1.0)
    return scale * math.sqrt(math.fsum((parts * parts).tolist()))


def operator_mp(F: Array, C: Array) -> Exact:
    """I + F C Fᴴ, exactly."""
    F, C = _same_kind(F, C)
    f, c = embed(F), embed(C)
    return Exact(Fixed.eye(f.ints.shape[0]) + f @ (c @ f.transposed), np.iscomplexobj(F))


def defect_mp(F: Array, C: Array) -> float:
    """‖QᴴQ - I‖₂ of the operator Q = I + F C Fᴴ whose floats are given, for n up to 200 or so.

    Q is exact, and so is the n x n matrix QᴴQ - I = F D Fᴴ that is rounded once at the end. A
    float64 QR of F would not do: D can be large where an ill-conditioned F annihilates it.
    """
    F, C = _same_kind(F, C)
    f, c = embed(F), embed(C)
    adjoint = c.transposed
    D = c + adjoint + adjoint @ ((f.transposed @ f) @ c)
    E = (f @ (D @ f.transposed)).round()
    return float(np.abs(np.linalg.eigvalsh((E + E.T) / 2)).max(initial=0.0))


def dense_defect_mp(Q: Array) -> float:
    """‖QᴴQ - I‖₂ of a dense array of floats, QᴴQ - I exact before its norm is taken."""
    q = embed(_wide(Q))
    E = (q.transposed @ q - Fixed.eye(q.ints.shape[0])).round()
    return float(np.abs(np.linalg.eigvalsh(E)).max(initial=0.0))


def _same_kind(*arrays: Array) -> list[Array]:
    kind = np.result_type(*arrays, np.float64)
    return [np.asarray(a).astype(kind) for a in arrays]


def defects(Q: Any) -> Array:
    """The exact defect of every element of a LowRankUnitary."""
    F, C = np.asarray(Q.frame()), np.asarray(Q.core)
    batch = np.broadcast_shapes(F.shape[:-2], C.shape[:-2])
    F, C = (np.broadcast_to(a, batch + a.shape[-2:]) for a in (F, C))
    result = np.zeros(batch)
    for index in np.ndindex(*batch):
        result[index] = defect_mp(F[index], C[index])
    return result


# ---------------------------------------------------------------------------- derivatives
#
# exp([[S, D], [0, S]]) has the Fréchet derivative of exp at S in the direction D above its
# diagonal, and where S = L Rᴴ and D = E Fᴴ are of low rank, so is the block matrix.


def exact_jvp(
    U: Array, V: Array, B: Array, dU: Array, dV: Array, dB: Array, t: float, dt: float
) -> tuple[Exact, Exact]:
    """exp(t(U Vᴴ - V Uᴴ)) B and its derivative, for two-dimensional arrays."""
    U, V, dU, dV = balance_pairs(U, V, dU, dV)
    L, R = _sides(U, V)
    dL, dR = _sides(dU, dV)
    zero = np.zeros_like(L)
    left, right = np.block([[L, dL], [zero, L]]), np.block([[R, zero], [dR, R]])
    both = _low_rank_mp(left, right, np.concatenate([_wide(dB), _wide(B)]), t, GROWTH, DIGITS)
    dY, Y = _halves(both)
    moved = embed(_like(L, both)) @ (embed(_like(R, both)).transposed @ Y.value)
    factor = embed(_like(np.asarray([[dt]]), both))
    moved = Fixed(moved.ints * factor.ints[0, 0], moved.bits + factor.bits)
    return Y, Exact(dY.value + moved, dY.is_complex)


def exact_vjp(U: Array, V: Array, B: Array, Y: Array, t: float) -> tuple[Exact, Exact, Exact]:
    """The cotangents of U, V and B that belong to a cotangent Y of exp(t(U Vᴴ - V Uᴴ)) B.

    With S̄ = L(-tS, t Y Bᴴ), which has the adjoint L(tS, t B Yᴴ), they are (S̄ - S̄ᴴ) V,
    (S̄ᴴ - S̄) U and exp(-tS) Y.
    """
    c = balance_pairs(U, V, U, V, exponents=True)
    u, v = _wide(U) * np.exp2(c), _wide(V) * np.exp2(-c)
    return (
        _unscaled(_two_sided(u, v, B, Y, v, t), c),
        _unscaled(_negated(_two_sided(u, v, B, Y, u, t)), -c),
        exact_skew(U, V, Y, -t),
    )


# Digits of the derivatives, and bits (a quarter of them) that the block form may lose.
DIGITS = 40
GROWTH = 20.0


def balance_pairs(U: Array, V: Array, dU: Array, dV: Array, exponents: bool = False) -> Any:
    """Powers of two between the columns of (U, dU) and (V, dV); a zero column stays."""
    U, V = _wide(U), _wide(V)
    with np.errstate(divide="ignore"):
        u, v = (np.where((a != 0).any(0), _log2_or_zero(a), 0.0) for a in (U, V))
    c = np.rint((v - u) / 2)
    if exponents:
        return c
    return U * np.exp2(c), V * np.exp2(-c), _wide(dU) * np.exp2(c), _wide(dV) * np.exp2(-c)


def _log2_or_zero(a: Array) -> Array:
    largest = np.abs(a).max(0, initial=0.0)
    safe = np.where(largest > 0, largest, 1.0)
    return np.log2(safe) + np.log2(np.maximum(np.linalg.norm(a / safe, axis=0), 1e-300))


def _sides(U: Array, V: Array) -> tuple[Array, Array]:
    return np.concatenate([U, -V], -1), np.concatenate([V, U], -1)


def _like(a: Array, exact: Exact) -> Array:
    return _wide(a).astype(np.complex128) if exact.is_complex else _wide(a)


def _halves(both: Exact) -> tuple[Exact, Exact]:
    """The upper and the lower half of the rows."""
    ints, bits = both.value.ints, both.value.bits
    parts = 2 if both.is_complex else 1
    n = len(ints) // (2 * parts)
    rows = np.arange(len(ints)).reshape(parts, 2, n)
    return tuple(  # type: ignore[return-value]
        Exact(Fixed(ints[rows[:, i].ravel()], bits), both.is_complex) for i in (0, 1)
    )


def _two_sided(U: Array, V: Array, B: Array, Y: Array, A: Array, t: float) -> Exact:
    """(S̄ - S̄ᴴ) A."""
    L, R = _sides(U, V)
    first = _frechet_of_product(-L, R, Y, B, A, t)
    second = _frechet_of_product(L, R, B, Y, A, t)
    return Exact(first.value - second.value, first.is_complex)


def _frechet_of_product(L: Array, R: Array, E: Array, F: Array, A: Array, t: float) -> Exact:
    """The derivative of exp at t L Rᴴ in the direction t E Fᴴ, applied to A."""
    E, F = _wide(E), _wide(F)
    shift = float(np.rint((_size(F) - _size(E)) / 2))
    E, F = E * np.exp2(shift), F * np.exp2(-shift)
    none, nil = np.zeros_like(L), np.zeros_like(E)
    left = np.block([[L, E, none], [none, nil, L]])
    right = np.block([[R, nil, none], [none, F, R]])
    kind = np.result_type(L, R, E, F, A)
    below = np.concatenate([np.zeros_like(A), _wide(A)]).astype(kind)
    return _halves(_low_rank_mp(left, right, below, t, GROWTH, DIGITS))[0]


def _size(a: Array) -> float:
    return float(np.log2(np.abs(a).max())) if np.any(a) else 0.0


def _negated(a: Exact) -> Exact:
    return Exact(Fixed(-a.value.ints, a.value.bits), a.is_complex)


def _unscaled(a: Exact, exponents: Array) -> Exact:
    """The columns times powers of two."""
    exponents = np.tile(exponents, 2 if a.is_complex else 1).astype(int)
    low = int(exponents.min(initial=0))
    return Exact(
        Fixed(a.value.ints << (exponents - low).astype(object), a.value.bits - low), a.is_complex
    )
