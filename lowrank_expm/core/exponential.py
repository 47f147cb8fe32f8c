"""The core C with exp(t F W Fᴴ) = I + F C Fᴴ, in array-API operations, batched.

C depends on the long axis only through the Gram matrix G = FᴴF:
C = φ₁(tWG) tW, built by scaling, a Padé approximant, and the doubling C ← 2C + C G C, which is
the square of I + F C Fᴴ. A polish (one Newton–Schulz step towards the nearest unitary, in m × m
arithmetic) keeps rounding from growing with the number of doublings.
"""

from __future__ import annotations

from typing import NamedTuple

from .._array import Array, adjoint, diagonal, eps, eye, largest, namespace, one_norm
from . import pade
from .certificate import defect_bound
from .selection import PLAIN, select, table

# Each doubling doubles the defect: after eight it is still far below one, where polishing squares.
DOUBLINGS_PER_POLISH = 8


class Core(NamedTuple):
    """A core with the choices made on the way; `bound` is its certified defect."""

    C: Array
    order: int
    squarings: int
    bound: Array


def apply_j(right: Array) -> Array:
    """J @ right with J = [[0, I], [−I, 0]]."""
    r = right.shape[-2] // 2
    return namespace(right).concat([right[..., r:, :], -right[..., :r, :]], axis=-2)


def times_j(left: Array) -> Array:
    """left @ J with J = [[0, I], [−I, 0]]."""
    r = left.shape[-1] // 2
    return namespace(left).concat([-left[..., :, r:], left[..., :, :r]], axis=-1)


def balance(G: Array) -> Array:
    """Powers of two (c, 1/c) that give uⱼ and vⱼ equal lengths; 0 where either is zero.

    S does not change under uⱼ → cⱼuⱼ, vⱼ → vⱼ/cⱼ, and a pair with a zero column adds nothing.
    """
    xp = namespace(G)
    d = diagonal(G)
    r = d.shape[-1] // 2
    u, v = d[..., :r], d[..., r:]
    live = (u > 0) & (v > 0)
    one = xp.ones_like(u)
    gap = xp.log2(xp.where(live, v, one)) - xp.log2(xp.where(live, u, one))
    c = xp.pow(2.0 * one, xp.round(0.25 * gap))
    zero = xp.zeros_like(u)
    return xp.concat([xp.where(live, c, zero), xp.where(live, 1.0 / c, zero)], axis=-1)


def skew_core(G: Array | None, t: Array, W: Array | None = None) -> Core:
    """The core of exp(t F W Fᴴ), W skew-Hermitian (None: J) and G Hermitian (None: identity).

    `t` is real and broadcasts against the matrices. The batch shares one order and one number of
    squarings: in this form a small element loses nothing by it.
    """
    if W is None:
        assert G is not None
        D = balance(G)
        G = D[..., :, None] * G * D[..., None, :]
        A, right = t * apply_j(G), None
    else:
        D = None
        right = t * W
        A = right if G is None else right @ G
    C, order, squarings = _scaled_phi1(A, right, t)
    C = _double(C, G, squarings)
    bound = defect_bound(C, G)
    if D is not None:
        C = D[..., :, None] * C * D[..., None, :]
    return Core(C, order, squarings, bound)


def general_core(M: Array, t: Array) -> Core:
    """The core of exp(t L Rᴴ) = I + L C Rᴴ, where M = RᴴL is any square matrix."""
    xp = namespace(M)
    A = t * M
    C, order, squarings = _scaled_phi1(A, t * eye(M), t)
    for _ in range(squarings):
        C = 2.0 * C + C @ (M @ C)
    return Core(C, order, squarings, xp.full_like(one_norm(A), xp.nan))


class Scaled(NamedTuple):
    """A/2ˢ with the even powers that its Padé approximant needs."""

    A: Array
    powers: list[Array]
    order: int
    squarings: int


def scale_down(A: Array) -> Scaled:
    """Choose order and squarings, one for the whole batch, and scale."""
    orders, thetas = table(eps(A))
    unit, size = _unit_scaled(A)
    powers, alpha = _powers(unit, size, thetas)
    order, squarings = select(largest(alpha), orders, thetas)
    scale = (size * 0.5 ** max(squarings, 0))[..., None, None]
    powers = [p * scale ** (2 * i + 2) for i, p in enumerate(powers)]
    while len(powers) < pade.POWERS[order]:
        powers.append(powers[-1] @ powers[0])
    return Scaled(unit * scale, powers[: pade.POWERS[order]], order, squarings)


def _scaled_phi1(A: Array, right: Array | None, t: Array) -> tuple[Array, int, int]:
    """φ₁(A/2ˢ) right/2ˢ with the order and s; `right` None means tJ."""
    A, powers, order, squarings = scale_down(A)
    P, V = pade.numerator_parts(powers, order)
    half = 0.5 ** (squarings - 1)
    right = (half * t) * times_j(P) if right is None else P @ (half * right)
    return namespace(A).linalg.solve(V - A @ P, right), order, squarings


def _unit_scaled(A: Array) -> tuple[Array, Array]:
    """A divided by a power of two that brings a large 1-norm near one, and that power.

    Then no product can overflow, and small matrices need no scaling.
    """
    xp = namespace(A)
    norm = one_norm(A)
    safe = xp.where(norm > 1, norm, xp.ones_like(norm))
    size = xp.pow(2.0 * xp.ones_like(safe), xp.floor(xp.log2(safe)))
    return A / size[..., None, None], size


def _powers(unit: Array, size: Array, thetas: tuple[float, ...]) -> tuple[list[Array], Array]:
    """Even powers of the unit-scaled matrix and the α that decides its scaling.

    ‖A⁴‖^¼ and ‖A⁶‖^⅙ see the eigenvalues, where the plain norm sees the basis: without them a
    nearly parallel pair is scaled far too often (Al-Mohy and Higham 2009, doi:10.1137/09074721X).
    """
    xp = namespace(unit)
    norm = one_norm(unit) * size
    A2 = unit @ unit
    if largest(norm) <= thetas[PLAIN - 1]:
        return [A2], norm
    A4 = A2 @ A2
    A6 = A4 @ A2
    sharp = xp.maximum(one_norm(A4) ** (1 / 4), one_norm(A6) ** (1 / 6)) * size
    return [A2, A4, A6], xp.where(norm <= thetas[PLAIN - 1], norm, xp.minimum(norm, sharp))


def _double(C: Array, G: Array | None, squarings: int) -> Array:
    """s doublings of a unitary core, polished on the way and at the end."""
    for i in range(squarings):
        GC = C if G is None else G @ C
        C = 2.0 * C + C @ GC
        if (i + 1) % DOUBLINGS_PER_POLISH == 0 and i + 1 < squarings:
            C = polish(C, G)
    return polish(C, G)


def polish(C: Array, G: Array | None) -> Array:
    """One Newton–Schulz step: C − ½(I + CG)D with the defect's core D = C + Cᴴ + CᴴGC."""
    GC = C if G is None else G @ C
    D = C + adjoint(C) + adjoint(C) @ GC
    GD = D if G is None else G @ D
    return C - 0.5 * (D + C @ GD)
