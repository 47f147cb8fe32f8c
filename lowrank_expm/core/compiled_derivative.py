"""The compiled twin of `derivative.py`, one element at a time; see `compiled.py`."""

from __future__ import annotations

import math

import numpy as np

from .._numba import inner, jit
from .._threads import share
from .compiled import (
    EVEN,
    ODD,
    even_polynomials,
    matrices,
    mm,
    polish,
    scale_down,
    solve,
    times_j,
)
from .exponential import DOUBLINGS_PER_POLISH
from .selection import table

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
def _generator(t, scale, G, Gs, A):
    """Gs, the scaled G, and A = tJGs."""
    m, r = G.shape[0], G.shape[0] // 2
    for i in range(m):
        for j in range(m):
            Gs[i, j] = scale[i] * G[i, j] * scale[j]
    for i in range(r):
        for j in range(m):
            A[i, j], A[r + i, j] = t * Gs[r + i, j], -t * Gs[i, j]


@inner
def _mm2(a, b, c, d, out, scratch):
    """out = a @ b + c @ d."""
    mm(a, b, out)
    mm(c, d, scratch)
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] += scratch[i, j]


@inner
def _power_derivatives(order, w, d, scratch):
    """The derivatives of A², A⁴, A⁶, A⁸ into d[1:5] from that of A in d[0]; 0 where not needed."""
    for slot in range(1, 5):
        for i in range(d.shape[1]):
            for j in range(d.shape[1]):
                d[slot, i, j] = 0
    _mm2(w[0], d[0], d[0], w[0], d[1], scratch)
    if order >= 5:
        _mm2(d[1], w[1], w[1], d[1], d[2], scratch)
    if order >= 7:
        _mm2(d[2], w[1], w[2], d[1], d[3], scratch)
    if order == 9:
        _mm2(d[3], w[1], w[3], d[1], d[4], scratch)


@inner
def _combine(c, start, w, out):
    """out = c[start] w[1] + c[start+1] w[2] + c[start+2] w[3]."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] = (
                c[start] * w[1, i, j] + c[start + 1] * w[2, i, j] + c[start + 2] * w[3, i, j]
            )


@inner
def _polynomial_derivative(order, c, w, d, out, x, y):
    """The derivative of one of the even polynomials; x and y are scratch."""
    _combine(c, 1, d, out)
    if order == 13:
        _combine(c, 5, w, x)
        mm(d[3], x, y)
        _add(1.0, y, out)
        _combine(c, 5, d, x)
        mm(w[3], x, y)
        _add(1.0, y, out)
    else:
        _add(c[4], d[4], out)


@inner
def _add(f, a, out):
    """out += f a."""
    for i in range(out.shape[0]):
        for j in range(out.shape[1]):
            out[i, j] += f * a[i, j]


@inner
def _scaled_phi1(t, orders, thetas, A, dA, w, d, x, C, dC):
    """C = φ₁(A/2ˢ) tJ/2ˢ and its derivative; returns s."""
    m = A.shape[0]
    order, squarings = scale_down(A, orders, thetas, w)
    if squarings < 0:
        return squarings
    half = 0.5**squarings
    for i in range(m):
        for j in range(m):
            d[0, i, j] = half * dA[i, j]
    _power_derivatives(order, w, d, x[0])
    P, V, dP, dV = w[5], w[6], d[5], d[6]
    # Before the polynomials, which overwrite A⁸.
    _polynomial_derivative(order, ODD[order], w, d, dP, x[0], x[1])
    _polynomial_derivative(order, EVEN[order], w, d, dV, x[0], x[1])
    even_polynomials(order, w, P, V, x[0])
    mm(w[0], P, x[0])
    _add(-1.0, x[0], V)
    _mm2(d[0], P, w[0], dP, x[0], x[1])
    _add(-1.0, x[0], dV)
    times_j(2 * half * t, P, C)
    times_j(2 * half * t, dP, dC)
    for i in range(m):
        for j in range(m):
            x[0, i, j] = V[i, j]
    solve(x[0], C)
    mm(dV, C, x[0])
    _add(-1.0, x[0], dC)
    solve(V, dC)
    return squarings


@jit
def derivative_batch(first, last, G, dG, t, orders, thetas, C, dC, squarings):
    """Cores first..last and their derivatives."""
    m = C.shape[1]
    work = np.zeros((_WORK, m, m), C.dtype)
    w, d, x = work[:7], work[7:14], work[14:18]
    Gs, dGs, A, dA = work[18], work[19], work[20], work[21]
    scale = np.ones(m, t.dtype)
    for e in range(first, last):
        _evened(G[e], scale)
        _generator(t[e], scale, G[e], Gs, A)
        _generator(t[e], scale, dG[e], dGs, dA)
        c, dc = C[e], dC[e]
        squarings[e] = _scaled_phi1(t[e], orders, thetas, A, dA, w, d, x, c, dc)
        for s in range(squarings[e]):
            mm(Gs, c, x[0])
            _mm2(dGs, c, Gs, dc, x[1], x[2])
            _mm2(dc, x[0], c, x[1], x[3], x[2])
            mm(c, x[0], x[1])
            for i in range(m):
                for j in range(m):
                    dc[i, j] = 2 * dc[i, j] + x[3, i, j]
                    c[i, j] = 2 * c[i, j] + x[1, i, j]
            if (s + 1) % DOUBLINGS_PER_POLISH == 0:
                polish(c, Gs, True, x)
        polish(c, Gs, True, x)
        for i in range(m):
            for j in range(m):
                c[i, j] *= scale[i] * scale[j]
                dc[i, j] *= scale[i] * scale[j]


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
    common = (*flat, ts, *table(float(np.finfo(G.dtype).eps)), C, dC, squarings)
    share(count, 3 * m**3, lambda first, last: derivative_batch(first, last, *common))
    worst = -1 if squarings.min(initial=0) < 0 else int(squarings.max(initial=0))
    return C.reshape(*shape, m, m), dC.reshape(*shape, m, m), worst
