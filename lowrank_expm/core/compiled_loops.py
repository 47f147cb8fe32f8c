"""What the compiled core does with small matrices between its products, and the products."""

from __future__ import annotations

import numpy as np

from .._numba import inner

# From this many columns on, calling BLAS costs less than loops.
BLAS = 6


@inner
def mm(a, b, out):
    """out = a @ b."""
    m = a.shape[0]
    if m >= BLAS:
        np.dot(a, b, out)
        return
    for i in range(m):
        for j in range(m):
            out[i, j] = a[i, 0] * b[0, j]
        for k in range(1, m):
            f = a[i, k]
            for j in range(m):
                out[i, j] += f * b[k, j]


@inner
def scaled(f, a, out):
    """out = f a, for matrices seen as vectors: rows may be too short for a loop of their own."""
    g = out.real.dtype.type(f)
    for i in range(a.shape[0]):
        out[i] = g * a[i]


@inner
def add_block(c, first, k, terms, out):
    """out += c[first] terms[0] + … of k terms, two to five, for matrices seen as vectors."""
    last, zero = k - 1, 0 * c[0]
    c0, c1 = c[first], c[first + 1]
    c2 = c[first + 2] if k > 2 else zero
    c3 = c[first + 3] if k > 3 else zero
    c4 = c[first + 4] if k > 4 else zero
    z0, z1 = terms[0], terms[1]
    z2, z3, z4 = terms[min(2, last)], terms[min(3, last)], terms[min(4, last)]
    for i in range(out.shape[0]):
        out[i] += c0 * z0[i] + c1 * z1[i] + c2 * z2[i] + c3 * z3[i] + c4 * z4[i]


@inner
def identity(out):
    """out = I, if it was zero."""
    for i in range(out.shape[0]):
        out[i, i] = 1


@inner
def one_norm(a, sums):
    """The largest absolute column sum; `sums` is scratch."""
    for j in range(sums.shape[0]):
        sums[j] = 0
    for i in range(a.shape[0]):
        for j in range(sums.shape[0]):
            sums[j] += abs(a[i, j])
    best = 0.0
    for j in range(sums.shape[0]):
        if not sums[j] <= best:
            best = sums[j]
    return best
