"""The core of G and t with its own derivative, for JAX.

Pairs with a zero column, which add nothing, have a derivative, so here they stay in the core.
The derivative is linear in the directions, so that reverse mode follows from it, and keeps m × m
matrices only.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import jax

from .._array import Array, eps, eye, full_precision
from . import derivative, exponential
from .exponential import Core, apply_j
from .selection import table


def skew_core(G: Array, t: Array, within: int) -> Core:
    """The core of exp(t F J Fᴴ) within a bound on its squarings."""
    C, squarings, bound = _parts(within, G, t)
    orders, _ = table(eps(G))
    return Core(C, orders[-1], squarings, bound)


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def _parts(within: int, G: Array, t: Array) -> tuple[Array, Array, Array]:
    """C, the squarings and the certified defect."""
    with full_precision(G):
        core = exponential.skew_core(
            G, t[..., None, None], within=within, balanced=derivative.lengths_evened
        )
    return core.C, core.squarings, core.bound


@_parts.defjvp
def _parts_jvp(within: int, primals: tuple[Array, ...], tangents: tuple[Array, ...]) -> Any:
    """The same and its derivative; dC/dt = J(I + GC)."""
    (G, t), (dG, dt) = primals, tangents
    C, squarings, bound = _parts(within, G, t)
    with full_precision(G):
        _, dC = derivative.skew_core_derivative(G, t[..., None, None], dG, within)
        dC = dC + dt[..., None, None] * apply_j(eye(G) + G @ C)
    still = jax.numpy.zeros_like
    return (C, squarings, bound), (dC, still(squarings), still(bound))
