"""Mathematics of m × m matrices: selection, φ₁, doubling, polish, certificate.

Nothing in here knows the long axis.
"""

from __future__ import annotations

from .._array import Array, device, is_numpy, library, namespace
from .._threads import compiling
from . import derivative, exponential
from .exponential import Core

__all__ = ["Core", "exp_derivative", "general", "skew", "skew_derivative", "skew_unchecked"]


def skew(G: Array | None, t: Array, W: Array | None = None) -> Core:
    """The core of exp(t F W Fᴴ); t broadcasts against the batch and has no matrix axes."""
    given: Array = W if G is None else G
    if is_numpy(namespace(given)) and given.shape[-1]:
        with compiling("core", given.dtype.char):
            from .compiled import skew_cores

            return _finite(skew_cores(G, t, W))
    return _finite(skew_unchecked(G, t, W))


def skew_unchecked(
    G: Array | None, t: Array, W: Array | None = None, within: int | None = None
) -> Core:
    """The same for any library, NaN where the matrix is not finite.

    With `within`, a bound on the squarings, no value is looked at: what needs more is NaN.
    """
    given: Array = W if G is None else G
    if given.shape[-1] == 0:
        return _empty(given, t)
    if library(given) == "jax" and W is None and within is not None:
        from .differentiable import skew_core

        return skew_core(G, t, within)
    return exponential.skew_core(G, t[..., None, None], W, within)


def general(M: Array, t: Array, within: int | None = None) -> Core:
    """The core of exp(t L Rᴴ) with M = RᴴL."""
    if M.shape[-1] == 0:
        return _empty(M, t)
    core = exponential.general_core(M, t[..., None, None], within)
    return _finite(core) if within is None else core


def skew_derivative(
    G: Array, t: Array, dG: Array, within: int | None = None
) -> tuple[Array, Array]:
    """C = φ₁(tJG) tJ and its derivative in the direction dG; at −t this is the adjoint map."""
    if is_numpy(namespace(G)) and G.shape[-1]:
        with compiling("derivative", G.dtype.char):
            from .compiled_derivative import skew_derivatives

            C, dC, squarings = skew_derivatives(G, t, dG)
        if squarings >= 0:
            return C, dC
    return derivative.skew_core_derivative(G, t[..., None, None], dG, within)


def exp_derivative(K: Array, t: Array, E: Array, within: int | None = None) -> tuple[Array, Array]:
    """exp(tK) − I for a skew-Hermitian K, and its derivative in the direction tE."""
    return derivative.exp_derivative(K, t[..., None, None], E, within)


def _empty(given: Array, t: Array) -> Core:
    """The core of a frame without columns."""
    xp, where = namespace(given), device(given)
    zero = xp.zeros(given.shape[:-2], dtype=t.dtype, device=where)
    shape = xp.broadcast_arrays(t, zero)[0].shape
    C = xp.zeros((*shape, 0, 0), dtype=given.dtype, device=where)
    return Core(C, 4, 0, xp.zeros(shape, dtype=t.dtype, device=where))


def _finite(core: Core) -> Core:
    """The core, unless its matrix was too large for its dtype."""
    if core.squarings < 0:
        raise ValueError("t·S overflows the dtype; scale t, U or V down, or use a wider dtype")
    return core
