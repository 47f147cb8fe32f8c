"""Matrix products with about twice the working precision, for measuring rounding itself.

The factors are cut into slices so short that every product of two slices is exact in double
precision; what is left is a handful of exact products, added as pairs (high, low). Ozaki, Ogita,
Oishi and Rump 2012, doi:10.1007/s11075-011-9478-1.
"""

from __future__ import annotations

import numpy as np

Pair = tuple[np.ndarray, np.ndarray]

SLICES = 3
# Rows an exact product may sum over at once: slices of (53 − log₂ rows)/2 bits.
LONGEST = 4096


def add(a: Pair, b: Pair) -> Pair:
    """The sum of two pairs."""
    s = a[0] + b[0]
    v = s - a[0]
    error = (a[0] - (s - v)) + (b[0] - v) + (a[1] + b[1])
    high = s + error
    return high, error - (high - s)


def pair(a: np.ndarray) -> Pair:
    """An array as a pair."""
    return a, np.zeros_like(a)


def product(a: np.ndarray, b: np.ndarray) -> Pair:
    """a @ b for real double-precision matrices, to about 2⁻⁶⁰ of |a| |b|."""
    if a.shape[1] > LONGEST:
        total = pair(np.zeros((a.shape[0], b.shape[1])))
        for lo in range(0, a.shape[1], LONGEST):
            total = add(total, product(a[:, lo : lo + LONGEST], b[lo : lo + LONGEST]))
        return total
    left, right = _slices(a, 1), _slices(b, 0)
    total = pair(np.zeros((a.shape[0], b.shape[1])))
    for order in range(SLICES - 1, -1, -1):
        for i in range(order + 1):
            total = add(total, pair(left[i] @ right[order - i]))
    return total


def _slices(a: np.ndarray, axis: int) -> list[np.ndarray]:
    """Slices whose sum is a, each short enough for exact products over `axis`."""
    bits = (53 - int(np.ceil(np.log2(max(a.shape[axis], 2))))) // 2
    top = np.abs(a).max(axis=axis, keepdims=True, initial=0.0)
    _, exponent = np.frexp(top)
    slices = []
    for i in range(SLICES):
        unit = np.ldexp(1.0, exponent - (i + 1) * bits)
        unit = np.where(unit > 0, unit, 1.0)
        piece = np.rint(a / unit) * unit
        slices.append(piece)
        a = a - piece
    return slices
