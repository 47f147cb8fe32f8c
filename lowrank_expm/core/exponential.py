"""The core C with exp(t F W Fᴴ) = I + F C Fᴴ, in array-API operations, batched.

C depends on the long axis only through the Gram matrix G = FᴴF:
C = φ₁(tWG) tW, built by scaling, a Padé approximant, and the doubling C ← 2C + C G C, which is
the square of I + F C Fᴴ. A polish (one Newton–Schulz step towards the nearest unitary, in m × m
arithmetic) keeps rounding from growing with the number of doublings.

The number of doublings follows from the values. Where nobody may look at these, because they lie
on a device or are traced, a bound on it is given instead: every element then takes the highest
order and its own number of doublings, up to the bound, and is NaN beyond.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from .._array import Array, adjoint, diagonal, eps, eye, largest, namespace, one_norm, repeat
from . import pade
from .certificate import defect_bound
from .selection import PLAIN, select, table

# Each doubling doubles the defect: after eight it is still far below one, where polishing squares.
DOUBLINGS_PER_POLISH = 8


class Core(NamedTuple):
    """A core with the choices made on the way; `bound` is its certified defect."""

    C: Array
    order: int
    squarings: Any
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


def skew_core(G: Array | None, t: Array, W: Array | None = None, within: int | None = None) -> Core:
    """The core of exp(t F W Fᴴ), W skew-Hermitian (None: J) and G Hermitian (None: identity).

    `t` is real and broadcasts against the matrices. The batch shares one order and one number of
    squarings: in this form a small element loses nothing by it. With `within`, a bound on the
    squarings, no value is looked at.
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
    A = scale_down(A, within)
    C = _double(_scaled_phi1(A, right, t), G, A)
    bound = defect_bound(C, G)
    if D is not None:
        C = D[..., :, None] * C * D[..., None, :]
    return Core(C, A.order, A.squarings, bound)


def general_core(M: Array, t: Array, within: int | None = None) -> Core:
    """The core of exp(t L Rᴴ) = I + L C Rᴴ, where M = RᴴL is any square matrix."""
    xp = namespace(M)
    A = scale_down(t * M, within)
    C = A.doubled(_scaled_phi1(A, t * eye(M), t), lambda C: 2.0 * C + C @ (M @ C))
    return Core(C, A.order, A.squarings, xp.full_like(one_norm(A.A), xp.nan))


class Scaled(NamedTuple):
    """A/2ˢ with the even powers that its Padé approximant needs.

    Without a bound on them the squarings are one number; with one, an array of whole numbers.
    """

    A: Array
    powers: list[Array]
    order: int
    squarings: Any
    within: int | None

    def half(self, steps: int = 0) -> Any:
        """2^(steps − s), to multiply matrices by."""
        if self.within is None:
            return 0.5 ** (self.squarings - steps)
        return _half_power(self.squarings - steps)[..., None, None]

    def doubled(
        self, C: Any, double: Callable[[Any], Any], polish: Callable[[Any], Any] = lambda C: C
    ) -> Any:
        """C doubled s times and polished in between; NaN where s is beyond the bound."""
        count = self.squarings if self.within is None else self.within
        for start in range(0, count, DOUBLINGS_PER_POLISH):
            C = polish(C) if start else C
            C = self._steps(start, min(start + DOUBLINGS_PER_POLISH, count), double, C)
        return C if self.within is None else _map(lambda a: a + self._nan_beyond(), C)

    def _steps(self, start: int, stop: int, double: Callable[[Any], Any], C: Any) -> Any:
        """Doublings start to stop, for the elements that want them."""
        if self.within is None:
            for _ in range(start, stop):
                C = double(C)
            return C
        xp, s = namespace(self.A), self.squarings[..., None, None]

        def step(i: Any, C: Any) -> Any:
            return _map(lambda new, old: xp.where(start + i < s, new, old), double(C), C)

        return repeat(stop - start, s - start, step, C)

    def _nan_beyond(self) -> Array:
        """NaN for elements that need more squarings than the bound, else zero."""
        xp, s = namespace(self.A), self.squarings
        nan = xp.full_like(s, xp.nan)
        return xp.where(s <= self.within, xp.zeros_like(s), nan)[..., None, None]


def _map(f: Callable[..., Any], *operands: Any) -> Any:
    """f of arrays, or of tuples of them one by one."""
    if isinstance(operands[0], tuple):
        return tuple(f(*parts) for parts in zip(*operands, strict=True))
    return f(*operands)


def _half_power(s: Array) -> Array:
    """2⁻ˢ for an array of whole numbers."""
    return namespace(s).pow(0.5 * namespace(s).ones_like(s), s)


def scale_down(A: Array, within: int | None = None) -> Scaled:
    """Choose order and squarings, one for the whole batch or within a bound, and scale."""
    orders, thetas = table(eps(A))
    unit, size = _unit_scaled(A)
    if within is not None:
        return _scale_blindly(unit, size, orders[-1], thetas, within)
    powers, alpha = _powers(unit, size, thetas)
    order, squarings = select(largest(alpha), orders, thetas)
    scale = (size * 0.5 ** max(squarings, 0))[..., None, None]
    powers = [p * scale ** (2 * i + 2) for i, p in enumerate(powers)]
    while len(powers) < pade.POWERS[order]:
        powers.append(powers[-1] @ powers[0])
    return Scaled(unit * scale, powers[: pade.POWERS[order]], order, squarings, None)


def _scale_blindly(
    unit: Array, size: Array, order: int, thetas: tuple[float, ...], within: int
) -> Scaled:
    """The highest order and, element by element, the squarings that it needs."""
    xp = namespace(unit)
    A2, A4, A6 = _three_powers(unit)
    alpha = _sharp(one_norm(unit) * size, A4, A6, size, thetas)
    s = xp.ceil(xp.log2(xp.where(alpha > thetas[-1], alpha / thetas[-1], xp.ones_like(alpha))))
    s = xp.where(xp.isfinite(alpha), s, xp.full_like(s, xp.inf))
    scaled = Scaled(unit, [A2, A4, A6], order, s, within)
    scale = size[..., None, None] * scaled.half()
    powers = [p * scale ** (2 * i + 2) for i, p in enumerate(scaled.powers)]
    return scaled._replace(A=unit * scale, powers=powers)


def _scaled_phi1(s: Scaled, right: Array | None, t: Array) -> Array:
    """φ₁(A/2ˢ) right/2ˢ; `right` None means tJ."""
    P, V = pade.numerator_parts(s.powers, s.order)
    half = s.half(1)
    right = (half * t) * times_j(P) if right is None else P @ (half * right)
    return namespace(s.A).linalg.solve(V - s.A @ P, right)


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
    norm = one_norm(unit) * size
    A2 = unit @ unit
    if largest(norm) <= thetas[PLAIN - 1]:
        return [A2], norm
    _, A4, A6 = powers = _three_powers(unit, A2)
    return powers, _sharp(norm, A4, A6, size, thetas)


def _three_powers(unit: Array, A2: Array | None = None) -> list[Array]:
    """A², A⁴ and A⁶."""
    A2 = unit @ unit if A2 is None else A2
    A4 = A2 @ A2
    return [A2, A4, A4 @ A2]


def _sharp(norm: Array, A4: Array, A6: Array, size: Array, thetas: tuple[float, ...]) -> Array:
    """The α of `_powers` from the norm, and powers of the unit-scaled matrix."""
    xp = namespace(norm)
    sharp = xp.maximum(one_norm(A4) ** (1 / 4), one_norm(A6) ** (1 / 6)) * size
    return xp.where(norm <= thetas[PLAIN - 1], norm, xp.minimum(norm, sharp))


def _double(C: Array, G: Array | None, A: Scaled) -> Array:
    """The doublings of a unitary core, polished on the way and at the end."""

    def double(C: Array) -> Array:
        return 2.0 * C + C @ (C if G is None else G @ C)

    return polish(A.doubled(C, double, lambda C: polish(C, G)), G)


def polish(C: Array, G: Array | None) -> Array:
    """One Newton–Schulz step: C − ½(I + CG)D with the defect's core D = C + Cᴴ + CᴴGC."""
    GC = C if G is None else G @ C
    D = C + adjoint(C) + adjoint(C) @ GC
    GD = D if G is None else G @ D
    return C - 0.5 * (D + C @ GD)
