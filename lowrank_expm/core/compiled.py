"""The core's compiled twin for NumPy arrays: loops over small matrices, one element at a time.

It follows `exponential.py` step by step and calls the same `select`. Kernels release the GIL, so
the batch runs on ordinary threads: no threading layer that a fork could break is ever started.
"""

from __future__ import annotations

import math

import numpy as np

from .._array import Array
from .._numba import jit
from .._threads import share
from .exponential import Core
from .pade import COEFFICIENTS
from .selection import PLAIN, select, table

_select = jit(select)
_B3 = COEFFICIENTS[3]
_B5 = COEFFICIENTS[5]
_B7 = COEFFICIENTS[7]
_B9 = COEFFICIENTS[9]
_B13 = COEFFICIENTS[13]
_POLISH = 8
_FACTOR = 8.0
_WORK = 11


@jit
def _mm(a, b, out):
    """out = a @ b, four rows of b at a time."""
    m, inner, n = a.shape[0], a.shape[1], b.shape[1]
    even = inner - inner % 4
    for i in range(m):
        for j in range(n):
            out[i, j] = 0
        for k in range(0, even, 4):
            a0, a1, a2, a3 = a[i, k], a[i, k + 1], a[i, k + 2], a[i, k + 3]
            for j in range(n):
                out[i, j] += a0 * b[k, j] + a1 * b[k + 1, j] + a2 * b[k + 2, j] + a3 * b[k + 3, j]
        for k in range(even, inner):
            a0 = a[i, k]
            for j in range(n):
                out[i, j] += a0 * b[k, j]


@jit
def _adjoint(a, out):
    """out = aᴴ."""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[j, i] = np.conj(a[i, j])


@jit
def _one_norm(a):
    """The largest absolute column sum."""
    best = 0.0
    for j in range(a.shape[1]):
        total = 0.0
        for i in range(a.shape[0]):
            total += abs(a[i, j])
        if not total <= best:
            best = total
    return best


@jit
def _solve(a, x):
    """Overwrite x by a⁻¹x and a by its factors: elimination with partial pivoting."""
    m, n = a.shape[0], x.shape[1]
    for c in range(m):
        p, best = c, abs(a[c, c])
        for i in range(c + 1, m):
            if abs(a[i, c]) > best:
                p, best = i, abs(a[i, c])
        if p != c:
            for j in range(m):
                a[c, j], a[p, j] = a[p, j], a[c, j]
            for j in range(n):
                x[c, j], x[p, j] = x[p, j], x[c, j]
        inverse = 1 / a[c, c]
        for i in range(c + 1, m):
            f = a[i, c] * inverse
            for j in range(c + 1, m):
                a[i, j] -= f * a[c, j]
            for j in range(n):
                x[i, j] -= f * x[c, j]
    for c in range(m - 1, -1, -1):
        inverse = 1 / a[c, c]
        for j in range(n):
            x[c, j] *= inverse
        for i in range(c):
            f = a[i, c]
            for j in range(n):
                x[i, j] -= f * x[c, j]


@jit
def _balance(G, scale):
    """Powers of two that give uⱼ and vⱼ equal lengths, 0 where either is zero."""
    r = G.shape[0] // 2
    for j in range(r):
        u, v = G[j, j].real, G[r + j, r + j].real
        scale[j] = scale[r + j] = 0
        if u > 0 and v > 0:
            c = 2.0 ** np.rint(0.25 * (math.log2(v) - math.log2(u)))
            scale[j], scale[r + j] = c, 1 / c


@jit
def _even_polynomials(order, w, p, v, out):
    """P and V of the Padé approximant from A², A⁴, A⁶ in w[1:4]; w[4] is scratch for A⁸."""
    m = p.shape[0]
    A2, A4, A6, A8 = w[1], w[2], w[3], w[4]
    if order == 13:
        for i in range(m):
            for j in range(m):
                p[i, j] = _B13[9] * A2[i, j] + _B13[11] * A4[i, j] + _B13[13] * A6[i, j]
                v[i, j] = _B13[8] * A2[i, j] + _B13[10] * A4[i, j] + _B13[12] * A6[i, j]
        _mm(A6, p, A8)
        _mm(A6, v, out)
        for i in range(m):
            for j in range(m):
                p[i, j] = A8[i, j] + (_B13[3] * A2[i, j] + _B13[5] * A4[i, j] + _B13[7] * A6[i, j])
                v[i, j] = out[i, j] + (_B13[2] * A2[i, j] + _B13[4] * A4[i, j] + _B13[6] * A6[i, j])
            p[i, i] += _B13[1]
            v[i, i] += _B13[0]
        return
    if order == 9:
        _mm(A6, A2, A8)
    for i in range(m):
        for j in range(m):
            if order == 3:
                p[i, j], v[i, j] = _B3[3] * A2[i, j], _B3[2] * A2[i, j]
            elif order == 5:
                p[i, j] = _B5[3] * A2[i, j] + _B5[5] * A4[i, j]
                v[i, j] = _B5[2] * A2[i, j] + _B5[4] * A4[i, j]
            elif order == 7:
                p[i, j] = _B7[3] * A2[i, j] + _B7[5] * A4[i, j] + _B7[7] * A6[i, j]
                v[i, j] = _B7[2] * A2[i, j] + _B7[4] * A4[i, j] + _B7[6] * A6[i, j]
            else:
                p[i, j] = (
                    _B9[3] * A2[i, j] + _B9[5] * A4[i, j] + _B9[7] * A6[i, j] + _B9[9] * A8[i, j]
                )
                v[i, j] = (
                    _B9[2] * A2[i, j] + _B9[4] * A4[i, j] + _B9[6] * A6[i, j] + _B9[8] * A8[i, j]
                )
        if order == 3:
            p[i, i] += _B3[1]
            v[i, i] += _B3[0]
        elif order == 5:
            p[i, i] += _B5[1]
            v[i, i] += _B5[0]
        elif order == 7:
            p[i, i] += _B7[1]
            v[i, i] += _B7[0]
        else:
            p[i, i] += _B9[1]
            v[i, i] += _B9[0]


@jit
def _powers(w, size, thetas):
    """Even powers of w[0] (1-norm near one) into w[1:4]; returns the α that decides scaling."""
    norm = _one_norm(w[0]) * size
    _mm(w[0], w[0], w[1])
    if norm <= thetas[PLAIN - 1]:
        return norm
    _mm(w[1], w[1], w[2])
    _mm(w[2], w[1], w[3])
    sharp = max(_one_norm(w[2]) ** 0.25, _one_norm(w[3]) ** (1 / 6)) * size
    return min(norm, sharp)


@jit
def _polish(C, G, gram, w):
    """One Newton–Schulz step towards the nearest unitary, in place."""
    m = C.shape[0]
    GC, H, D = w[0], w[1], w[2]
    if gram:
        _mm(G, C, GC)
    else:
        GC[:] = C
    _adjoint(C, H)
    _mm(H, GC, D)
    for i in range(m):
        for j in range(m):
            D[i, j] += C[i, j] + H[i, j]
    if gram:
        _mm(G, D, GC)
        _mm(C, GC, H)
    else:
        _mm(C, D, H)
    for i in range(m):
        for j in range(m):
            C[i, j] -= 0.5 * (D[i, j] + H[i, j])


@jit
def _defect_bound(C, G, gram, eps, w):
    """The certified defect: see `certificate.defect_bound`."""
    m = C.shape[0]
    Ch, Gh, H, X = w[0], w[1], w[2], w[3]
    for i in range(m):
        di = math.sqrt(G[i, i].real) if gram else 1.0
        for j in range(m):
            dj = math.sqrt(G[j, j].real) if gram else 1.0
            Ch[i, j] = di * C[i, j] * dj
            if gram:
                Gh[i, j] = G[i, j] / (di if di > 0 else 1.0) / (dj if dj > 0 else 1.0)
    _adjoint(Ch, H)
    _mm(Ch, H, X)
    outer = _frobenius(X)
    inner = outer
    if gram:
        _mm(Gh, H, X)
        _mm(Ch, X, H)
        inner = _frobenius(H)
    return _FACTOR * 0.5 * eps * (1.0 + math.sqrt(inner) * math.sqrt(outer))


@jit
def _frobenius(a):
    """The Frobenius norm."""
    total = 0.0
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            total += a[i, j].real ** 2 + a[i, j].imag ** 2
    return math.sqrt(total)


@jit
def _scaled_phi1(A, right, t, use_j, orders, thetas, w, C):
    """C = φ₁(A/2ˢ) right/2ˢ (right = tJ if use_j); A is overwritten. Returns order and s."""
    m = A.shape[0]
    norm = _one_norm(A)
    if not norm < np.inf:
        return 0, -1
    size = 2.0 ** math.floor(math.log2(norm)) if norm > 0 else 1.0
    for i in range(m):
        for j in range(m):
            w[0, i, j] = A[i, j] / size
    order, squarings = _select(_powers(w, size, thetas), orders, thetas)
    if order == 5 and norm <= thetas[PLAIN - 1]:
        _mm(w[1], w[1], w[2])
    half = 0.5**squarings
    scale = size * half
    for i in range(m):
        for j in range(m):
            w[0, i, j] *= scale
            w[1, i, j] *= scale**2
            w[2, i, j] *= scale**4
            w[3, i, j] *= scale**6
    P, V, X = w[5], w[6], w[7]
    _even_polynomials(order, w, P, V, X)
    _mm(w[0], P, X)
    for i in range(m):
        for j in range(m):
            V[i, j] -= X[i, j]
    if use_j:
        r = m // 2
        for i in range(m):
            for j in range(r):
                C[i, j] = -2 * half * t * P[i, r + j]
                C[i, r + j] = 2 * half * t * P[i, j]
    else:
        _mm(P, right, C)
        for i in range(m):
            for j in range(m):
                C[i, j] *= 2 * half
    _solve(V, C)
    return order, squarings


@jit
def _skew_one(G, gram, W, use_j, t, eps, orders, thetas, w, scale, C):
    """One core with its order, squarings (−1: overflow) and certificate."""
    m = C.shape[0]
    Gs, A, right = w[8], w[9], w[10]
    if use_j:
        _balance(G, scale)
        for i in range(m):
            for j in range(m):
                Gs[i, j] = scale[i] * G[i, j] * scale[j]
        r = m // 2
        for i in range(r):
            for j in range(m):
                A[i, j], A[r + i, j] = t * Gs[r + i, j], -t * Gs[i, j]
    else:
        for i in range(m):
            for j in range(m):
                right[i, j] = t * W[i, j]
        if gram:
            Gs[:] = G
            _mm(right, Gs, A)
        else:
            A[:] = right
    order, squarings = _scaled_phi1(A, right, t, use_j, orders, thetas, w, C)
    if squarings < 0:
        return order, squarings, np.inf
    X = w[9]
    for s in range(squarings):
        if gram:
            _mm(Gs, C, w[0])
            _mm(C, w[0], X)
        else:
            _mm(C, C, X)
        for i in range(m):
            for j in range(m):
                C[i, j] = 2 * C[i, j] + X[i, j]
        if (s + 1) % _POLISH == 0 and s + 1 < squarings:
            _polish(C, Gs, gram, w)
    _polish(C, Gs, gram, w)
    bound = _defect_bound(C, Gs, gram, eps, w)
    if use_j:
        for i in range(m):
            for j in range(m):
                C[i, j] *= scale[i] * scale[j]
    return order, squarings, bound


@jit
def skew_batch(first, last, G, gram, W, use_j, t, eps, orders, thetas, C, chosen, bound):
    """Cores first..last of a batch; a grid of t runs over the batch of G again and again."""
    m = C.shape[1]
    w = np.empty((_WORK, m, m), C.dtype)
    scale = np.ones(m, t.dtype)
    for e in range(first, last):
        g = e % G.shape[0]
        order, squarings, bound[e] = _skew_one(
            G[g], gram, W[g], use_j, t[e], eps, orders, thetas, w, scale, C[e]
        )
        chosen[e, 0], chosen[e, 1] = order, squarings


def skew_cores(G: Array | None, t: np.ndarray, W: Array | None) -> Core:
    """The batched cores, as `exponential.skew_core` gives them; t has no matrix axes."""
    given = G if G is not None else W
    assert given is not None
    m = given.shape[-1]
    batch = given.shape[:-2]
    shape = np.broadcast_shapes(t.shape, batch)
    count = math.prod(shape)
    C = np.empty((count, m, m), given.dtype)
    chosen = np.zeros((count, 2), np.int64)
    bound = np.empty(count, t.dtype)
    flat = [np.ascontiguousarray(given if a is None else a).reshape(-1, m, m) for a in (G, W)]
    ts = np.ascontiguousarray(np.broadcast_to(t, shape)).reshape(-1)
    eps = float(np.finfo(given.dtype).eps)
    common = (flat[0], G is not None, flat[1], W is None, ts, eps, *table(eps), C, chosen, bound)
    share(count, m**3, lambda first, last: skew_batch(first, last, *common))
    order, squarings = (int(chosen[:, 0].max()), int(chosen[:, 1].max())) if count else (3, 0)
    if count and chosen[:, 1].min() < 0:
        squarings = -1
    return Core(C.reshape(*shape, m, m), order, squarings, bound.reshape(shape))
