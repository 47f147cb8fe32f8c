"""How far rounding in the Gram matrix and in the core can push I + F C Fᴴ from unitary."""

from .._array import Array, adjoint, diagonal, eps, frobenius, namespace

# Rounding constants: see `defect_bound` and `error_bound`.
DEFECT_FACTOR = 8.0
ERROR_FACTOR = 8.0
# A larger bound says nothing: it is of first order in the rounding.
MEANINGFUL = 0.01


def defect_bound(C: Array, G: Array | None) -> Array:
    """Bound the defect ‖QᴴQ − I‖₂ of Q = I + F C Fᴴ with Gram matrix G (None: identity).

    With columns scaled to unit length, an error of relative size u in G moves QᴴQ by Ĉᴴ ΔĜ Ĉ,
    and rounding in the core by Ĉ Ĝ ΔĈ: both are below u (1 + ‖ĈĜĈᴴ‖^½ ‖Ĉ‖) up to a modest
    factor. Q is unitary to first order, so that ĈĜĈᴴ = −(Ĉ + Ĉᴴ) costs no product. The 2-norms of
    the positive semidefinite matrices are replaced by Frobenius norms, which need no iteration.
    """
    xp = namespace(C)
    u = 0.5 * eps(C)
    if G is None:
        return _first_order(DEFECT_FACTOR * u * (1.0 + frobenius(C + adjoint(C))))
    d = xp.sqrt(diagonal(G))
    Ch = d[..., :, None] * C * d[..., None, :]
    inner = frobenius(Ch + adjoint(Ch))
    outer = frobenius(Ch @ adjoint(Ch))
    return _first_order(DEFECT_FACTOR * u * (1.0 + xp.sqrt(inner) * xp.sqrt(outer)))


def _first_order(bound: Array) -> Array:
    """A bound where it is small; infinity where terms of second order would count."""
    xp = namespace(bound)
    return xp.where(bound <= MEANINGFUL, bound, xp.full_like(bound, xp.inf))
