"""The core's compiled twin for NumPy arrays: loops over small matrices, one element at a time.

It follows `exponential.py` step by step and calls the same `select`. Kernels release the GIL, so
the batch runs on ordinary threads: no threading layer that a fork could break is ever started.
"""

from __future__ import annotations

import math

import numpy as np

from .._array import Array
from .._numba import inner, jit
from .._threads import share
from .certificate import DEFECT_FACTOR, MEANINGFUL
from .exponential import DOUBLINGS_PER_POLISH, Core
from .pade import COEFFICIENTS
from .selection import PLAIN, select, table

_select = inner(select)
_WORK = 11


def _table(start: int) -> np.ndarray:
    """Every other Padé coefficient from `start` on, a row for each order; 0 where there is none."""
    table = np.zeros((14, 8))
    for order, b in COEFFICIENTS.items():
        table[order, : len(b[start::2])] = b[start::2]
    # Order 13 has A⁶ in front of its last three, which follow the slot of A⁸.
    table[13, 4:] = [0, *table[13, 4:7]]
    return table


_EVEN, _ODD = _table(0), _table(1)


@inner
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


@inner
def _copy(a, out):
    """out = a: a loop, for a slice assignment compiles to very much more."""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[i, j] = a[i, j]


@inner
def _adjoint(a, out):
    """out = aᴴ."""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[j, i] = np.conj(a[i, j])


@inner
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


@inner
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


@inner
def _balance(G, scale):
    """Powers of two that give uⱼ and vⱼ equal lengths, 0 where either is zero."""
    r = G.shape[0] // 2
    for j in range(r):
        u, v = G[j, j].real, G[r + j, r + j].real
        scale[j] = scale[r + j] = 0
        if u > 0 and v > 0:
            c = 2.0 ** np.rint(0.25 * (math.log2(v) - math.log2(u)))
            scale[j], scale[r + j] = c, 1 / c


@inner
def _even_polynomials(order, w, P, V, scratch):
    """P and V of the Padé approximant from A², A⁴, A⁶, A⁸ in w[1:5]."""
    m = P.shape[0]
    odd, even = _ODD[order], _EVEN[order]
    A2, A4, A6, A8 = w[1], w[2], w[3], w[4]
    if order == 13:
        for i in range(m):
            for j in range(m):
                P[i, j] = odd[5] * A2[i, j] + odd[6] * A4[i, j] + odd[7] * A6[i, j]
                V[i, j] = even[5] * A2[i, j] + even[6] * A4[i, j] + even[7] * A6[i, j]
        _mm(A6, P, A8)
        _mm(A6, V, scratch)
    else:
        for i in range(m):
            for j in range(m):
                scratch[i, j] = even[4] * A8[i, j]
                A8[i, j] *= odd[4]
    for i in range(m):
        for j in range(m):
            a2, a4, a6 = A2[i, j], A4[i, j], A6[i, j]
            P[i, j] = A8[i, j] + (odd[1] * a2 + odd[2] * a4 + odd[3] * a6)
            V[i, j] = scratch[i, j] + (even[1] * a2 + even[2] * a4 + even[3] * a6)
        P[i, i] += odd[0]
        V[i, i] += even[0]


@inner
def _polish(C, G, gram, w):
    """One Newton–Schulz step towards the nearest unitary, in place."""
    m = C.shape[0]
    GC, H, D = w[0], w[1], w[2]
    if gram:
        _mm(G, C, GC)
    else:
        _copy(C, GC)
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


@inner
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
    bound = DEFECT_FACTOR * 0.5 * eps * (1.0 + math.sqrt(inner) * math.sqrt(outer))
    return bound if bound <= MEANINGFUL else np.inf


@inner
def _frobenius(a):
    """The Frobenius norm."""
    total = 0.0
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            total += a[i, j].real ** 2 + a[i, j].imag ** 2
    return math.sqrt(total)


@inner
def _scaled_phi1(A, right, t, use_j, orders, thetas, w, C):
    """C = φ₁(A/2ˢ) right/2ˢ (right = tJ if use_j). Returns order and s, −1 for overflow."""
    m = A.shape[0]
    norm = _one_norm(A)
    if not norm < np.inf:
        return 0, -1
    size = 2.0 ** math.floor(math.log2(norm)) if norm > 1 else 1.0
    for i in range(m):
        for j in range(m):
            w[0, i, j] = A[i, j] / size
            w[2, i, j] = w[3, i, j] = w[4, i, j] = 0
    norm = alpha = _one_norm(w[0]) * size
    _mm(w[0], w[0], w[1])
    if norm > thetas[PLAIN - 1]:
        _mm(w[1], w[1], w[2])
        _mm(w[2], w[1], w[3])
        sharp = max(_one_norm(w[2]) ** 0.25, _one_norm(w[3]) ** (1 / 6)) * size
        alpha = min(norm, sharp)
    order, squarings = _select(alpha, orders, thetas)
    if order == 5 and norm <= thetas[PLAIN - 1]:
        _mm(w[1], w[1], w[2])
    if order == 9:
        _mm(w[3], w[1], w[4])
    half = 0.5**squarings
    scale = size * half
    for i in range(m):
        for j in range(m):
            w[0, i, j] *= scale
            w[1, i, j] *= scale**2
            w[2, i, j] *= scale**4
            w[3, i, j] *= scale**6
            w[4, i, j] *= scale**8
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
        for i in range(m):
            for j in range(m):
                right[i, j] *= 2 * half
        _mm(P, right, C)
    _solve(V, C)
    return order, squarings


@inner
def _generator(G, gram, W, use_j, t, scale, Gs, right, A):
    """A = tWG, with the balanced G in Gs and tW in right (not for W = J)."""
    m, r = A.shape[0], A.shape[0] // 2
    if use_j:
        _balance(G, scale)
        for i in range(m):
            for j in range(m):
                Gs[i, j] = scale[i] * G[i, j] * scale[j]
        for i in range(r):
            for j in range(m):
                A[i, j], A[r + i, j] = t * Gs[r + i, j], -t * Gs[i, j]
        return
    for i in range(m):
        for j in range(m):
            right[i, j] = t * W[i, j]
    if gram:
        _copy(G, Gs)
        _mm(right, Gs, A)
    else:
        _copy(right, A)


@jit
def skew_batch(first, last, G, gram, W, use_j, t, eps, orders, thetas, C, chosen, bound):
    """Cores first..last of a batch; a grid of t runs over the batch of G again and again."""
    m = C.shape[1]
    w = np.zeros((_WORK, m, m), C.dtype)
    scale = np.ones(m, t.dtype)
    Gs, X, right = w[8], w[9], w[10]
    for e in range(first, last):
        g = e % G.shape[0]
        _generator(G[g], gram, W[g], use_j, t[e], scale, Gs, right, X)
        order, squarings = _scaled_phi1(X, right, t[e], use_j, orders, thetas, w, C[e])
        chosen[e, 0], chosen[e, 1] = order, squarings
        for s in range(squarings):
            if gram:
                _mm(Gs, C[e], w[0])
                _mm(C[e], w[0], X)
            else:
                _mm(C[e], C[e], X)
            for i in range(m):
                for j in range(m):
                    C[e, i, j] = 2 * C[e, i, j] + X[i, j]
            if (s + 1) % DOUBLINGS_PER_POLISH == 0 and s + 1 < squarings:
                _polish(C[e], Gs, gram, w)
        _polish(C[e], Gs, gram, w)
        bound[e] = _defect_bound(C[e], Gs, gram, eps, w)
        if use_j:
            for i in range(m):
                for j in range(m):
                    C[e, i, j] *= scale[i] * scale[j]


def skew_cores(G: Array | None, t: np.ndarray, W: Array | None) -> Core:
    """The batched cores, as `exponential.skew_core` gives them; t has no matrix axes."""
    given: Array = W if G is None else G
    batch, m = given.shape[:-2], given.shape[-1]
    shape = np.broadcast_shapes(t.shape, batch)
    count = math.prod(shape)
    C = np.empty((count, m, m), given.dtype)
    chosen = np.zeros((count, 2), np.int64)
    bound = np.empty(count, t.dtype)
    grams, generators = (_matrices(given if a is None else a, shape) for a in (G, W))
    ts = np.array(np.broadcast_to(t, shape)).reshape(-1)
    eps = float(np.finfo(given.dtype).eps)
    common = (grams, G is not None, generators, W is None, ts, eps, *table(eps), C, chosen, bound)
    share(count, m**3, lambda first, last: skew_batch(first, last, *common))
    order, squarings = chosen.max(axis=0, initial=0)
    if chosen[:, 1].min(initial=0) < 0:
        squarings = -1
    return Core(C.reshape(*shape, m, m), int(order), int(squarings), bound.reshape(shape))


def _matrices(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A batch as kernels take it, flat unless t varies inside it, and writable.

    A read-only array is another type to numba, and would be compiled for once more.
    """
    m, batch = a.shape[-1], a.shape[:-2]
    if shape[len(shape) - len(batch) :] != batch:
        a = np.broadcast_to(a, (*shape, m, m))
    return np.require(a, requirements=["C", "W"]).reshape(-1, m, m)
