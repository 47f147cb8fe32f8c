"""How far rounding in the Gram matrix and in the core can push I + F C Fᴴ from unitary, and
from the exponential that it stands for."""

import math
from typing import Any

from .._array import Array, adjoint, diagonal, eps, eye, frobenius, namespace

# Rounding constants, see `defect_bound` and `error_bound`: the first leaves a factor of 1.7 below
# the bound in thousands of random cases. The compiled core raises it where it does not polish.
DEFECT_FACTOR = 4.5
ERROR_FACTOR = 8.0
# By how much columns that are alike, and how many columns at most, see `amplification`.
ALIKE, MANY = 1 / 48, 18
# The least ‖Ĉ + Ĉᴴ‖ that counts after doublings, which round the core where it is not small.
LEAST_TURN = 1 / 2
# The bound up to which a Gram matrix is trusted, in units of √m u.
TRUST = 64.0
# A larger bound says nothing: it is of first order in the rounding.
MEANINGFUL = 0.01


def defect_bound(C: Array, G: Array | None, left: Any = 0.0, doubled: Any = False) -> Array:
    """Bound the defect ‖QᴴQ − I‖₂ of Q = I + F C Fᴴ with Gram matrix G (None: identity).

    With columns scaled to unit length, an error of relative size u in G moves QᴴQ by F̂ĈᴴΔĜĈF̂ᴴ,
    and rounding in the core by F̂ΔF̂ᴴ with ‖Δ‖ ≤ u ‖Ĉ‖ ‖ĜĈ‖: both are below
    u (1 + ‖Ĝ‖^(3/2) ‖ĈĜĈᴴ‖^½ ‖Ĉ‖) up to a modest factor. Q is unitary to first order, so that
    ĈĜĈᴴ = −(Ĉ + Ĉᴴ) costs no product. The 2-norms of the two positive semidefinite matrices are
    replaced by Frobenius norms, which need no iteration, and ‖ĈĈᴴ‖_F by ‖Ĉ‖_F², which needs no
    product, where that makes the bound at most twice as large; ‖Ĝ‖^(3/2) by `amplification`.
    `left` is what the last polish could not remove, where the defect before it was not small.
    Where the core was doubled, Ĉ + Ĉᴴ does not count as less than at 0.7 radians from a whole turn:
    directions in which F is singular keep rounding errors of the core that it hides.
    """
    xp = namespace(C)
    u = 0.5 * eps(C)
    if G is None:
        return _first_order(DEFECT_FACTOR * u * (1.0 + frobenius(C + adjoint(C))) + left)
    Ch, more = _unit_columns(C, G), amplification(G)
    inner, outer = (frobenius(a) for a in _perturbed(Ch))
    inner = xp.where(doubled & (inner < LEAST_TURN), xp.full_like(inner, LEAST_TURN), inner)
    most = frobenius(Ch) ** 2
    outer = xp.where(more * more * inner * most <= 1.0, most, outer)
    size = 1.0 + more * xp.sqrt(inner) * xp.sqrt(outer)
    return _first_order(DEFECT_FACTOR * u * size + left)


def sharper_bound(C: Array, G: Array) -> Array:
    """The same with ‖A²‖_F^½ in place of ‖A‖_F: nearer to ‖A‖₂, for two products more.

    The difference counts where there are many columns: ‖A‖_F is up to m^½ times ‖A‖₂, and
    ‖A²‖_F^½ up to m^¼ times.
    """
    xp = namespace(C)
    inner, outer = (xp.sqrt(xp.sqrt(frobenius(a @ a))) for a in _perturbed(_unit_columns(C, G)))
    return _first_order(DEFECT_FACTOR * 0.5 * eps(C) * (1.0 + amplification(G) * inner * outer))


def amplification(G: Array) -> Array:
    """By how much errors may grow between F̂ and F̂ᴴ, the columns of F scaled to unit length.

    Independent errors do not, whatever Ĝ, but those of columns that are alike are alike, and then
    they grow with ‖Ĝ‖, which many columns in one direction make large, in about the power 3/2.
    maxⱼ ‖ĝⱼ‖² ≤ ‖Ĝ‖ is near ‖Ĝ‖ then, and near one for columns that point anywhere. The rest is
    measured, for copies of columns are the worst case known: its square, and a factor that grows
    with the number of columns where these are few.
    """
    xp = namespace(G)
    d = xp.sqrt(diagonal(G))
    unit = xp.where(d > 0, d, xp.ones_like(d))
    cosines = xp.abs(G / unit[..., :, None] / unit[..., None, :])
    aligned = xp.max(xp.sum(cosines * cosines, axis=-1), axis=-1)
    more = ALIKE * min(G.shape[-1], MANY) * aligned * aligned
    return xp.where(more > 1.0, more, xp.ones_like(more))


def _unit_columns(C: Array, G: Array) -> Array:
    """Ĉ, the core for columns of unit length."""
    d = namespace(C).sqrt(diagonal(G))
    return d[..., :, None] * C * d[..., None, :]


def _perturbed(Ch: Array) -> tuple[Array, Array]:
    """The Hermitian matrices Ĉ + Ĉᴴ and ĈĈᴴ."""
    return Ch + adjoint(Ch), Ch @ adjoint(Ch)


def trusted_up_to(m: int, u: float) -> float:
    """The largest bound with which a core of m columns is trusted, u being the unit roundoff."""
    return TRUST * math.sqrt(m) * u


def settled(bound: Array, C: Array, G: Array) -> Array:
    """The bound, or the sharper one where it alone would not be trusted: looks at the values."""
    xp = namespace(C)
    trusted = bound <= trusted_up_to(C.shape[-1], 0.5 * eps(C))
    if bool(xp.all(trusted)):
        return bound
    # Of a bound with other parts only the first becomes sharper; infinity remains.
    rest = bound - defect_bound(C, G)
    sharper = sharper_bound(C, G) + xp.where(rest > 0, rest, xp.zeros_like(rest))
    return xp.where(trusted | ~xp.isfinite(bound), bound, xp.minimum(bound, sharper))


def _first_order(bound: Array) -> Array:
    """A bound where it is small; infinity where terms of second order would count."""
    xp = namespace(bound)
    return xp.where(bound <= MEANINGFUL, bound, xp.full_like(bound, xp.inf))


def error_bound(bound: Array, squarings: Array, reach: Array, u: float) -> Array:
    """Bound the forward error ‖Q − exp(tS)‖₂ but for the part of the Gram matrix.

    Two parts, of first order in u, with constants that tests hold against exact results:

    - The data. What is exponentiated is S + ΔS, from rounding in F W Fᴴ (in V Uᴴ, on the direct
      route): column by column ‖ΔS‖ is at most a few u (Σ ‖uⱼ‖²‖vⱼ‖²)^½. As exp is non-expansive
      on skew-Hermitian matrices, exp(A + E) − exp(A) = ∫ exp(xA) E exp((1−x)(A + E)) dx, the
      error that it makes is at most |t| ‖ΔS‖: `reach` is |t| (Σ ‖uⱼ‖²‖vⱼ‖²)^½.
    - The core. Rounding in the scaled core puts I + F C Fᴴ at most β from the exact exponential,
      β being the certificate's bound of the same perturbations (the defect is the Hermitian part
      of QᴴΔQ). A doubling is a square, ‖Q² − E²‖ ≤ (‖Q‖ + ‖E‖) ‖Q − E‖, and so doubles what
      came before; polishing removes the defect, but not a turn. After s doublings 2ˢβ.

    The Gram matrix adds a third part, see `gram_error`, on the route "gram".
    """
    return bound * 2.0**squarings + ERROR_FACTOR * u * reach


def gram_error(G: Array, reach: Array, rounding: float) -> Array:
    """How far an error ΔG with |ΔGᵢⱼ| ≤ γ ‖fᵢ‖ ‖fⱼ‖ moves the exponential, over γ.

    The derivative of the core gives F ΔC Fᴴ = ∫ exp((1−x)tS) F tJ ΔG C(xt) Fᴴ dx. With
    D = diag(‖fᵢ‖), ‖F tJ D‖ ≤ ρ = √2 |t| (Σ ‖uⱼ‖²‖vⱼ‖²)^½ =: √2 reach, and D C(xt) Fᴴ, which is
    both ∫ D tJ Fᴴ exp(ytS) dy over y ≤ x and (F D⁻¹)⁺ (exp(xtS) − I), has at most the norm
    min(xρ, 2/σ), σ being the smallest singular value of F D⁻¹: together ρ min(ρ/2, 2/σ).
    `rounding` is how far the smallest eigenvalue of the scaled G may be wrong.
    """
    xp = namespace(G)
    d = xp.sqrt(diagonal(G))
    one = xp.ones_like(d)
    unit = xp.where(d > 0, d, one)
    scaled = G / unit[..., :, None] / unit[..., None, :]
    scaled = scaled + xp.astype(d <= 0, d.dtype)[..., None] * eye(G)
    smallest = xp.linalg.eigvalsh(scaled)[..., 0] - rounding
    sigma = xp.sqrt(xp.where(smallest > 0, smallest, 0 * smallest))
    rho = math.sqrt(2) * reach
    # min(ρ/2, 2/σ) without a division by zero.
    return rho * xp.where(sigma * rho > 4.0, 2.0 / xp.where(sigma > 0, sigma, sigma + 1), rho / 2)
