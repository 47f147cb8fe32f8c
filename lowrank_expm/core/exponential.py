"""The core C with exp(t F W Fᴴ) = I + F C Fᴴ, in array-API operations, batched.

C depends on the long axis only through the Gram matrix G = FᴴF:
C = φ₁(tWG) tW, built by scaling, a Taylor polynomial, and the doubling C ← 2C + C G C, which is
the square of I + F C Fᴴ. A polish (one Newton–Schulz step towards the nearest unitary, in m × m
arithmetic) keeps rounding from growing with the number of doublings. There are only products:
solving a batch of small systems, as the Padé approximant wants, is slow in most libraries.

The number of doublings follows from the values. Where nobody may look at these, because they lie
on a device or are traced, a bound on it is given instead: every element then takes the highest
order and its own number of doublings, up to the bound, and is NaN beyond.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from .._array import Array, adjoint, constant, diagonal, eps, largest, namespace, one_norm, repeat
from . import taylor
from .certificate import defect_bound
from .selection import PLAIN, SMALL, select, table

# Each doubling doubles the defect: after eight it is still far below one, where polishing squares.
DOUBLINGS_PER_POLISH = 8
# The sixth power of a matrix with a norm below two to this power does not overflow in any dtype.
SAFE_EXPONENT = 20


class Core(NamedTuple):
    """A core with the choices made on the way; `bound` is its certified defect."""

    C: Array
    order: int
    squarings: Any
    bound: Array


def products(order: int, squarings: int, gram: bool, given: bool) -> int:
    """The number of m × m products of `skew_core`; there is nothing else of order m³.

    `gram` tells whether there is a Gram matrix, and `given` whether W is another than J. The
    compiled twin does without the certificate's where the core is small.
    """
    polishes = -(-squarings // DOUBLINGS_PER_POLISH)
    around = gram + 2 * (gram and given)  # the certificate; tWG and φ₁ tW
    return taylor.products(order) + (1 + gram) * (squarings + 2 * polishes) + around


def apply_j(right: Array) -> Array:
    """J @ right with J = [[0, I], [−I, 0]]."""
    r = right.shape[-2] // 2
    return namespace(right).concat([right[..., r:, :], -right[..., :r, :]], axis=-2)


def times_j(left: Array) -> Array:
    """left @ J with J = [[0, I], [−I, 0]]."""
    r = left.shape[-1] // 2
    return namespace(left).concat([-left[..., :, r:], left[..., :, :r]], axis=-1)


def skew_of(R: Array) -> Array:
    """R J Rᴴ with J = [[0, I], [−I, 0]]."""
    r = R.shape[-1] // 2
    M = R[..., :r] @ adjoint(R[..., r:])
    return M - adjoint(M)


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


def skew_core(
    G: Array | None,
    t: Array,
    W: Array | None = None,
    within: int | None = None,
    balanced: Callable[[Array], Array] = balance,
) -> Core:
    """The core of exp(t F W Fᴴ), W skew-Hermitian (None: J) and G Hermitian (None: identity).

    `t` is real and broadcasts against the matrices. The batch shares one order and one number of
    squarings: in this form a small element loses nothing by it. With `within`, a bound on the
    squarings, no value is looked at. `balanced` gives the scaling of the columns.
    """
    if W is None:
        assert G is not None
        D = balanced(G)
        G = D[..., :, None] * G * D[..., None, :]
        A, right = t * apply_j(G), None
    else:
        D = None
        right = t * W
        A = right if G is None else right @ G
    scaled = scale_down(A, within)
    C, left = _double(_scaled_phi1(scaled, G, t, W, right), G, scaled)
    bound = defect_bound(C, G, left, scaled.squarings > 0)
    if D is not None:
        C = D[..., :, None] * C * D[..., None, :]
    return Core(C, scaled.order, scaled.squarings, bound)


def general_core(M: Array, t: Array, within: int | None = None) -> Core:
    """The core of exp(t L Rᴴ) = I + L C Rᴴ, where M = RᴴL is any square matrix."""
    xp = namespace(M)
    scaled = scale_down(t * M, within)
    C = scaled.half() * t * taylor.phi1(scaled.powers, scaled.order)
    C = scaled.doubled(C, lambda C: 2.0 * C + C @ (M @ C))
    return Core(C, scaled.order, scaled.squarings, xp.full_like(one_norm(C), xp.nan))


class Scaled(NamedTuple):
    """The powers of A/2ˢ that its Taylor polynomial needs.

    Without a bound on them the squarings are one number; with one, an array of whole numbers.
    """

    powers: list[Array]
    order: int
    squarings: Any
    within: int | None

    def half(self) -> Any:
        """2⁻ˢ, to multiply matrices by."""
        if self.within is None:
            return 0.5**self.squarings
        return _half_power(self.squarings)[..., None, None]

    def doubled(
        self, C: Any, double: Callable[[Any], Any], polish: Callable[[Any], Any] = lambda C: C
    ) -> Any:
        """C doubled s times and polished in between; NaN where s is beyond the bound."""
        count = self.squarings if self.within is None else self.within
        for start in range(0, count, DOUBLINGS_PER_POLISH):
            C = polish(C) if start else C
            C = self._steps(start, min(start + DOUBLINGS_PER_POLISH, count), double, C)
        return C if self.within is None else _map(lambda a: a * self._nan_beyond(), C)

    def _steps(self, start: int, stop: int, double: Callable[[Any], Any], C: Any) -> Any:
        """Doublings start to stop, for the elements that want them."""
        if self.within is None:
            for _ in range(start, stop):
                C = double(C)
            return C
        xp, s = namespace(self.powers[0]), self.squarings[..., None, None]

        def step(i: Any, C: Any) -> Any:
            return _map(lambda new, old: xp.where(start + i < s, new, old), double(C), C)

        return repeat(stop - start, s - start, step, C)

    def _nan_beyond(self) -> Array:
        """NaN for elements that need more squarings than the bound, else one."""
        xp, s = namespace(self.powers[0]), self.squarings
        nan = xp.full_like(s, xp.nan)
        return xp.where(s <= self.within, xp.ones_like(s), nan)[..., None, None]


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
    norm = constant(one_norm(A))
    if within is not None:
        return _scale_blindly(A, norm, orders[-1], thetas, within)
    alpha = largest(norm)
    halvings = max(math.frexp(alpha)[1] - SAFE_EXPONENT, 0)
    powers = _powers(0.5**halvings * A if halvings else A, 2)
    for limit in thetas[SMALL], thetas[PLAIN]:
        if alpha > limit:
            powers = _powers(powers[0], len(powers) + 1, powers)
            norm = _sharper(norm, powers, 2.0**halvings, thetas)
            alpha = largest(norm)
    order, squarings = select(alpha, orders, thetas)
    powers = _powers(powers[0], taylor.width(order), powers)
    if squarings >= 0:
        powers = _multiplied(powers, 0.5 ** max(squarings - halvings, 0))
        squarings = max(squarings, halvings)
    return Scaled(powers, order, squarings, None)


def _scale_blindly(
    A: Array, norm: Array, order: int, thetas: tuple[float, ...], within: int
) -> Scaled:
    """The highest order and, element by element, the squarings that it needs."""
    xp = namespace(A)
    safe = xp.where(norm > 1, norm, xp.ones_like(norm))
    size = xp.pow(2.0 * xp.ones_like(safe), xp.floor(xp.log2(safe)))
    powers = _powers(A / size[..., None, None], taylor.width(order))
    alpha = constant(_sharper(norm, powers[:4], size, thetas))
    s = xp.ceil(xp.log2(xp.where(alpha > thetas[-1], alpha / thetas[-1], xp.ones_like(alpha))))
    s = xp.where(xp.isfinite(alpha), s, xp.full_like(s, xp.inf))
    scaled = Scaled(powers, order, s, within)
    return scaled._replace(powers=_multiplied(powers, size[..., None, None] * scaled.half()))


def _powers(A: Array, count: int, known: list[Array] | None = None) -> list[Array]:
    """A, A², …, `count` of them."""
    powers = [A, A @ A] if known is None else known[:count]
    while len(powers) < count:
        powers.append(powers[1] @ powers[1] if len(powers) == 3 else powers[-1] @ A)
    return powers


def _multiplied(powers: list[Array], scale: Any) -> list[Array]:
    """The powers of `scale` times the matrix."""
    if isinstance(scale, float) and scale == 1.0:
        return powers
    return [scale ** (i + 1) * power for i, power in enumerate(powers)]


def _sharper(norm: Array, powers: list[Array], size: Any, thetas: tuple[float, ...]) -> Array:
    """The norm, or what the last two powers of A divided by `size` say where that is less.

    ‖Aᵖ‖^(1/p) sees the eigenvalues, where the plain norm sees the basis: without it a nearly
    parallel pair is scaled far too often (Al-Mohy and Higham 2009, doi:10.1137/09074721X). With
    p − 1 and p it bounds every power from (p − 1)(p − 2) on: with the fourth from the sixth on, so
    that the second order is the least it can choose.
    """
    xp, p = namespace(norm), len(powers)
    roots = (one_norm(powers[i - 1]) ** (1 / i) for i in (p - 1, p))
    sharp = xp.maximum(*roots) * size
    sharp = xp.maximum(sharp, xp.full_like(sharp, thetas[SMALL]))
    return xp.where(sharp < norm, sharp, norm)


def _scaled_phi1(s: Scaled, G: Array | None, t: Array, W: Array | None, right: Array) -> Array:
    """φ₁(A/2ˢ) tW/2ˢ, where `right` is tW unless W is J; without a Gram matrix A is tW."""
    if G is None:
        return taylor.expm1(s.powers, s.order)
    P = taylor.phi1(s.powers, s.order)
    return (s.half() * t) * times_j(P) if W is None else P @ (s.half() * right)


def _double(C: Array, G: Array | None, A: Scaled) -> tuple[Array, Any]:
    """The doublings of a unitary core, polished on the way and, if there are any, at the end.

    Also the defect that this last polish cannot remove.
    """

    def double(C: Array) -> Array:
        return 2.0 * C + C @ (C if G is None else G @ C)

    if A.within is None and A.squarings <= 0:
        return C, 0.0
    return _polished(A.doubled(C, double, lambda C: polish(C, G)), G)


def polish(C: Array, G: Array | None) -> Array:
    """One Newton–Schulz step: C − ½(I + CG)D with the defect's core D = C + Cᴴ + CᴴGC."""
    return _polished(C, G)[0]


def _polished(C: Array, G: Array | None) -> tuple[Array, Array]:
    """The step and ¾‖E‖_F², which it leaves of a defect E, if above u: tr E² = tr (GD)²."""
    GC = C if G is None else G @ C
    D = C + adjoint(C) + adjoint(C) @ GC
    GD = D if G is None else G @ D
    xp = namespace(C)
    left = 0.75 * xp.abs(xp.sum(GD * xp.matrix_transpose(GD), axis=(-2, -1)))
    left = xp.where(left > 0.5 * eps(C), left, xp.zeros_like(left))  # else it is all rounding
    return C - 0.5 * (D + C @ GD), left
