"""The derivative of the core, in array-API operations, batched.

For Φ(G, t) = φ₁(tWG) tW with W skew-Hermitian and G Hermitian, the adjoint of G ↦ DΦ(G, t)[·]
with respect to Re tr(XᴴY) is DΦ(G, −t)[·]: each term (tWG)ⁱtW has the adjoint ((−t)WG)ⁱ(−t)W.
So one forward derivative serves jvp and vjp alike. It differentiates the scaled polynomial
and follows the doublings; polishing moves C by rounding only and has no derivative of its own.
Nothing is divided by a gap between eigenvalues.
"""

from __future__ import annotations

from .._array import Array, constant, diagonal, namespace
from . import taylor
from .exponential import apply_j, polish, scale_down, times_j


def skew_core_derivative(
    G: Array, t: Array, dG: Array, within: int | None = None
) -> tuple[Array, Array]:
    """C = φ₁(tJG) tJ and its derivative in the direction dG, which may be any matrix.

    `t` is real and broadcasts against the matrices; `within` bounds the squarings.
    """
    D = lengths_evened(G)
    G = D[..., :, None] * G * D[..., None, :]
    dG = D[..., :, None] * dG * D[..., None, :]
    A = scale_down(t * apply_j(G), within)

    # dG goes along: before 0.10, JAX cannot transpose a loop whose body closes over a direction.
    def double(state: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        C, dC, dG = state
        GC = G @ C
        return 2.0 * C + C @ GC, 2.0 * dC + dC @ GC + C @ (dG @ C + G @ dC), dG

    dpowers = _power_derivatives(A.powers, A.half() * t * apply_j(dG))
    P, dP = taylor.phi1_derivative(A.powers, dpowers, A.order)
    C, dC = A.half() * t * times_j(P), A.half() * t * times_j(dP)
    state = C, dC, namespace(G).broadcast_to(dG, C.shape)
    C, dC, _ = A.doubled(state, double, lambda state: (polish(state[0], G), *state[1:]))
    if A.within is not None or A.squarings > 0:
        C = polish(C, G)
    scale = D[..., :, None] * D[..., None, :]
    return scale * C, scale * dC


def exp_derivative(K: Array, t: Array, E: Array, within: int | None = None) -> tuple[Array, Array]:
    """exp(tK) − I for a skew-Hermitian K, and its derivative in the direction tE, E any matrix."""
    A = scale_down(t * K, within)
    E = namespace(K).astype(E, K.dtype)

    def double(pair: tuple[Array, Array]) -> tuple[Array, Array]:
        C, dC = pair
        return 2.0 * C + C @ C, 2.0 * dC + dC @ C + C @ dC

    dpowers = _power_derivatives(A.powers, A.half() * t * E)
    pair = taylor.expm1_derivative(A.powers, dpowers, A.order)
    C, dC = A.doubled(pair, double, lambda pair: (polish(pair[0], None), pair[1]))
    return polish(C, None), dC


def lengths_evened(G: Array) -> Array:
    """Powers of two (c, 1/c) that give uⱼ and vⱼ equal lengths, or one of them length one.

    Unlike `exponential.balance` a pair with a zero column is kept: its derivative is not zero.
    """
    xp = namespace(G)
    d = constant(diagonal(G))
    one = xp.ones_like(d)
    d = xp.where(d > 0, d, one)
    r = d.shape[-1] // 2
    gap = xp.log2(d[..., r:]) - xp.log2(d[..., :r])
    c = xp.pow(2.0 * one[..., :r], xp.round(0.25 * gap))
    return xp.concat([c, 1.0 / c], axis=-1)


def _power_derivatives(powers: list[Array], dA: Array) -> list[Array]:
    """The derivatives of A, A², …."""
    derivatives = [dA]
    for power in powers[:-1]:
        derivatives.append(derivatives[-1] @ powers[0] + power @ dA)
    return derivatives
