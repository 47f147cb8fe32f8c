"""Derivatives of large arguments: where they may overflow, and how they are kept from it.

A derivative is bounded by the product of the sizes of what it is linear in. Where that is ordinary
nothing is looked at twice; elsewhere B and the direction or cotangent are made smaller by powers of
two, and the result is checked.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from ._problem import Problem
from ._tangent import Direct, Linearised


def ordinary(p: Problem, dtypes: Any, *sizes: float) -> bool:
    """Whether no derivative for B and a direction or cotangent of these sizes can overflow."""
    if p.scale is not None:
        return False
    squared = float(np.trace(p.G, axis1=-2, axis2=-1).real.max(initial=0.0))
    longest = float(np.abs(p.t).max(initial=0.0))
    product = math.prod(1.0 if s < 1 else s for s in (squared, longest, *sizes))
    return product < 2.0 ** (0.75 * min(int(np.finfo(dtype).maxexp) for dtype in dtypes))


def excess(dtype: np.dtype, *arrays: np.ndarray) -> int:
    """By which power of two arrays are longer than the fourth root of the largest number."""
    exponents = [_exponent(a) for a in arrays if a.size]
    return max(0, max(exponents, default=0) - int(np.finfo(dtype).maxexp) // 4)


def _exponent(a: np.ndarray) -> int:
    """A power of two that the Frobenius norm does not exceed."""
    largest = max(float(np.abs(part).max()) for part in (np.real(a), np.imag(a)))
    return math.frexp(largest)[1] + a.size.bit_length() // 2 + 1


def times_powers(a: np.ndarray, *powers: int) -> np.ndarray:
    """The array times 2^power for each power, none of which leaves the range of its dtype."""
    for power in powers:
        a = a * 2.0**power if power else a
    return a


def for_smaller(linear: Linearised, power: int) -> Linearised:
    """The derivatives for B/2^power."""
    if not power:
        return linear
    B = times_powers(linear.B, -power)
    if isinstance(linear, Direct):
        return linear._replace(B=B)
    return linear._replace(B=B, T=times_powers(linear.T, -power))
