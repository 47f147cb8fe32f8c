"""The compiled twin of `derivative.py`, one element at a time; see `compiled.py`."""

from __future__ import annotations

import math

import numpy as np

from .._numba import inner, jit
from .._threads import quiet_blas, share
from .compiled import (
    TABLES,
    generator_of,
    matrices,
    polish,
    scale_down,
    scaled_back,
    square,
    times_j,
    width_of,
)
from .compiled_loops import add_block, identity, mm, scaled
from .exponential import DOUBLINGS_PER_POLISH

_WORK = 22


@inner
def _evened(G, scale):
    """Powers of two that give uⱼ and vⱼ equal lengths, or one of them length one."""
    r = G.shape[0] // 2
    for j in range(r):
        u, v = G[j, j].real, G[r + j, r + j].real
        gap = (math.log2(v) if v > 0 else 0.0) - (math.log2(u) if u > 0 else 0.0)
        c = 2.0 ** np.rint(0.25 * gap)
        scale[j], scale[r + j] = c, 1 / c


@inner
def _mm2(a, b, c, d, out, scratch):
    """out = a @ b + c @ d."""
    mm(a, b, out)
    mm(c, d, scratch)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] += scratch[i, j]


@inner
def _phi1(order, c, w, d, x, flat):
    """φ₁(A) into x[4] and its derivative into x[5], from powers in w and their derivatives in d."""
    k = width_of(order)
    P, dP = flat[18], flat[19]
    scaled(0, flat[0], P)
    scaled(0, flat[0], dP)
    for first in range(order - k, -1, -k):
        if first < order - k:
            _mm2(d[k], x[4], w[k], x[5], x[1], x[0])
            mm(w[k], x[4], x[0])
            scaled(1, flat[14], P)
            scaled(1, flat[15], dP)
        add_block(c, first, k, flat, P)
        add_block(c, first, k, flat[8:], dP)


@inner
def _double(C, dC, G, dG, x):
    """C ← 2C + CGC and dC ← 2dC + dC GC + C(dG C + G dC), in place."""
    mm(G, C, x[0])
    _mm2(dG, C, G, dC, x[1], x[2])
    _mm2(dC, x[0], C, x[1], x[3], x[2])
    mm(C, x[0], x[1])
    for i in range(C.shape[0]):
        for j in range(C.shape[1]):
            dC[i, j] += dC[i, j] + x[3, i, j]
            C[i, j] += C[i, j] + x[1, i, j]


@jit
def derivative_batch(first, last, G, dG, t, c, orders, thetas, C, dC, squarings):
    """Cores first..last and their derivatives."""
    m = C.shape[1]
    work = np.zeros((_WORK, m, m), C.dtype)
    flat = work.reshape(_WORK, m * m)
    w, d, x, Gs, dGs = work[:8], work[8:14], work[14:20], work[20], work[21]
    scale, sums = np.ones(m, t.dtype), np.empty(m, t.dtype)
    identity(w[0])
    for e in range(first, last):
        Ce, dCe = C[e], dC[e]
        _evened(G[e], scale)
        generator_of(t[e], scale, G[e], Gs, w[1])
        generator_of(t[e], scale, dG[e], dGs, d[1])
        norm, halvings = square(w, flat, sums)
        if halvings < 0:
            squarings[e] = -1
            continue
        order, s = scale_down(norm, halvings, w, flat, orders, thetas, sums)
        squarings[e] = s
        half = 0.5**s
        scaled(half, flat[9], flat[9])
        for p in range(2, width_of(order) + 1):
            _mm2(d[p - 1], w[1], w[p - 1], d[1], d[p], x[0])
        _phi1(order, c, w, d, x, flat)
        times_j(half * t[e], x[4], Ce)
        times_j(half * t[e], x[5], dCe)
        for i in range(s):
            _double(Ce, dCe, Gs, dGs, x)
            if (i + 1) % DOUBLINGS_PER_POLISH == 0 or i + 1 == s:
                polish(Ce, Gs, True, x)
        scaled_back(scale, Ce)
        scaled_back(scale, dCe)


def skew_derivatives(
    G: np.ndarray, t: np.ndarray, dG: np.ndarray
) -> tuple[np.ndarray, np.ndarray, int]:
    """C, its derivative and the most squarings (−1 for overflow); t has no matrix axes."""
    m = G.shape[-1]
    shape = np.broadcast_shapes(t.shape, G.shape[:-2], dG.shape[:-2])
    count = math.prod(shape)
    flat = [matrices(np.broadcast_to(a, (*shape, m, m)), shape) for a in (G, dG)]
    C, dC = (np.empty((count, m, m), G.dtype) for _ in range(2))
    squarings = np.zeros(count, np.int64)
    ts = np.array(np.broadcast_to(t, shape)).reshape(-1)
    common = (*flat, ts, *TABLES[t.dtype.char][1:], C, dC, squarings)
    with quiet_blas(count, m**3):
        share(count, 3 * m**3, lambda i, j: derivative_batch(i, j, *common))
    worst = -1 if squarings.min(initial=0) < 0 else int(squarings.max(initial=0))
    return C.reshape(*shape, m, m), dC.reshape(*shape, m, m), worst
