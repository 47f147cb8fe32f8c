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
# From this many columns on, products work on tiles.
WIDE = 32


def _table(start: int) -> np.ndarray:
    """Every other Padé coefficient from `start` on, a row for each order; 0 where there is none."""
    table = np.zeros((14, 8))
    for order, b in COEFFICIENTS.items():
        table[order, : len(b[start::2])] = b[start::2]
    # Order 13 has A⁶ in front of its last three, which follow the slot of A⁸.
    table[13, 4:] = [0, *table[13, 4:7]]
    return table


EVEN, ODD = _table(0), _table(1)
_TABLES = {
    char: (eps, *table(eps)) for char in "df" for eps in [float(np.finfo(np.dtype(char)).eps)]
}


@inner
def mm(a, b, out):
    """out = a @ b, as many rows of b at a time as there are registers for."""
    m, depth, n = a.shape[0], a.shape[1], b.shape[1]
    for i in range(m):
        for j in range(n):
            out[i, j] = 0
    tiled = m - m % 4 if n >= WIDE and not np.iscomplexobj(a) else 0
    even = depth - depth % 4
    for i in range(0, tiled, 4):
        for k in range(0, even, 4):
            _tile(a, b, i, k, out)
    for i in range(tiled, m):
        y = out[i]
        for k in range(0, even, 4):
            z0, z1, z2, z3 = b[k], b[k + 1], b[k + 2], b[k + 3]
            a0, a1, a2, a3 = a[i, k], a[i, k + 1], a[i, k + 2], a[i, k + 3]
            for j in range(n):
                y[j] += a0 * z0[j] + a1 * z1[j] + a2 * z2[j] + a3 * z3[j]
    for i in range(m):
        y = out[i]
        for k in range(even, depth):
            f, z = a[i, k], b[k]
            for j in range(n):
                y[j] += f * z[j]


@inner
def _tile(a, b, i, k, out):
    """out[i:i+4] += a[i:i+4, k:k+4] @ b[k:k+4]; operands are loaded once, before any store."""
    y0, y1, y2, y3 = out[i], out[i + 1], out[i + 2], out[i + 3]
    z0, z1, z2, z3 = b[k], b[k + 1], b[k + 2], b[k + 3]
    a0, a1, a2, a3 = a[i, k], a[i, k + 1], a[i, k + 2], a[i, k + 3]
    b0, b1, b2, b3 = a[i + 1, k], a[i + 1, k + 1], a[i + 1, k + 2], a[i + 1, k + 3]
    c0, c1, c2, c3 = a[i + 2, k], a[i + 2, k + 1], a[i + 2, k + 2], a[i + 2, k + 3]
    d0, d1, d2, d3 = a[i + 3, k], a[i + 3, k + 1], a[i + 3, k + 2], a[i + 3, k + 3]
    for j in range(out.shape[1]):
        x0, x1, x2, x3 = z0[j], z1[j], z2[j], z3[j]
        y0[j] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
        y1[j] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
        y2[j] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
        y3[j] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3


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
def _solve_small(a, x):
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
def _solve_panels(a, x):
    """The same by panels of four columns, so that each row is read a quarter as often."""
    m = a.shape[0]
    for c in range(0, m, 4):
        end = min(c + 4, m)
        for p in range(c, end):
            _pivot(a, x, p, end)
        for p in range(c, end):
            for i in range(p + 1, end):
                _subtract(a[i, p], a[p], a[i], end)
                _subtract(a[i, p], x[p], x[i], 0)
        for i in range(end, m):
            if end - c == 4:
                _subtract_four(c, a[i], a, a[i], end)
                _subtract_four(c, a[i], x, x[i], 0)
    for c in range((m - 1) // 4 * 4, -1, -4):
        end = min(c + 4, m)
        for p in range(end - 1, c - 1, -1):
            inverse = 1 / a[p, p]
            for j in range(x.shape[1]):
                x[p, j] *= inverse
            for i in range(c, p):
                _subtract(a[i, p], x[p], x[i], 0)
        for i in range(c):
            if end - c == 4:
                _subtract_four(c, a[i], x, x[i], 0)
            else:
                for p in range(c, end):
                    _subtract(a[i, p], x[p], x[i], 0)


@inner
def _pivot(a, x, p, end):
    """Bring the largest entry of column p to row p, and eliminate in the columns before `end`."""
    m = a.shape[0]
    best = p
    for i in range(p + 1, m):
        if abs(a[i, p]) > abs(a[best, p]):
            best = i
    if best != p:
        for j in range(m):
            a[p, j], a[best, j] = a[best, j], a[p, j]
        for j in range(x.shape[1]):
            x[p, j], x[best, j] = x[best, j], x[p, j]
    inverse = 1 / a[p, p]
    for i in range(p + 1, m):
        a[i, p] *= inverse
        for j in range(p + 1, end):
            a[i, j] -= a[i, p] * a[p, j]


@inner
def _subtract(f, row, out, start):
    """out[start:] −= f row[start:]."""
    for j in range(start, out.shape[0]):
        out[j] -= f * row[j]


@inner
def _subtract_four(c, factors, rows, out, start):
    """out[start:] −= factors[c:c+4] @ rows[c:c+4, start:]."""
    f0, f1, f2, f3 = factors[c], factors[c + 1], factors[c + 2], factors[c + 3]
    r0, r1, r2, r3 = rows[c], rows[c + 1], rows[c + 2], rows[c + 3]
    for j in range(start, out.shape[0]):
        out[j] -= f0 * r0[j] + f1 * r1[j] + f2 * r2[j] + f3 * r3[j]


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
def even_polynomials(order, w, P, V, scratch):
    """P and V of the Padé approximant from A², A⁴, A⁶, A⁸ in w[1:5]."""
    m = P.shape[0]
    odd, even = ODD[order], EVEN[order]
    A2, A4, A6, A8 = w[1], w[2], w[3], w[4]
    if order == 13:
        for i in range(m):
            for j in range(m):
                P[i, j] = odd[5] * A2[i, j] + odd[6] * A4[i, j] + odd[7] * A6[i, j]
                V[i, j] = even[5] * A2[i, j] + even[6] * A4[i, j] + even[7] * A6[i, j]
        mm(A6, P, A8)
        mm(A6, V, scratch)
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
def polish(C, G, gram, w):
    """One Newton–Schulz step towards the nearest unitary, in place."""
    m = C.shape[0]
    GC, H, D = w[0], w[1], w[2]
    if gram:
        mm(G, C, GC)
    else:
        _copy(C, GC)
    _adjoint(C, H)
    mm(H, GC, D)
    for i in range(m):
        for j in range(m):
            D[i, j] += C[i, j] + H[i, j]
    if gram:
        mm(G, D, GC)
        mm(C, GC, H)
    else:
        mm(C, D, H)
    for i in range(m):
        for j in range(m):
            C[i, j] -= 0.5 * (D[i, j] + H[i, j])


@inner
def _defect_bound(C, G, gram, eps, w):
    """The certified defect: see `certificate.defect_bound`."""
    m = C.shape[0]
    Ch, H, X = w[0], w[1], w[2]
    for i in range(m):
        di = math.sqrt(G[i, i].real) if gram else 1.0
        for j in range(m):
            dj = math.sqrt(G[j, j].real) if gram else 1.0
            Ch[i, j] = di * C[i, j] * dj
    _adjoint(Ch, H)
    for i in range(m):
        for j in range(m):
            X[i, j] = Ch[i, j] + H[i, j]
    within = across = _frobenius(X)
    if gram:
        mm(Ch, H, X)
        across = _frobenius(X)
    bound = DEFECT_FACTOR * 0.5 * eps * (1.0 + math.sqrt(within) * math.sqrt(across))
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
def scale_down(A, orders, thetas, w):
    """A/2ˢ and its even powers into w[:5] (0 where not needed); returns order and s.

    s is −1 where A is not finite.
    """
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
    mm(w[0], w[0], w[1])
    if norm > thetas[PLAIN - 1]:
        mm(w[1], w[1], w[2])
        mm(w[2], w[1], w[3])
        sharp = max(_one_norm(w[2]) ** 0.25, _one_norm(w[3]) ** (1 / 6)) * size
        alpha = min(norm, sharp)
    order, squarings = _select(alpha, orders, thetas)
    if order == 5 and norm <= thetas[PLAIN - 1]:
        mm(w[1], w[1], w[2])
    if order == 9:
        mm(w[3], w[1], w[4])
    scale = size * 0.5**squarings
    for i in range(m):
        for j in range(m):
            w[0, i, j] *= scale
            w[1, i, j] *= scale**2
            w[2, i, j] *= scale**4
            w[3, i, j] *= scale**6
            w[4, i, j] *= scale**8
    return order, squarings


@inner
def times_j(f, P, out):
    """out = f P J."""
    m, r = P.shape[0], P.shape[0] // 2
    for i in range(m):
        for j in range(r):
            out[i, j] = -f * P[i, r + j]
            out[i, r + j] = f * P[i, j]


@inner
def solve(a, x):
    """Overwrite x by a⁻¹x and a by its factors."""
    if a.shape[0] < WIDE:
        _solve_small(a, x)
    else:
        _solve_panels(a, x)


@inner
def _scaled_phi1(A, right, t, use_j, orders, thetas, w, C):
    """C = φ₁(A/2ˢ) right/2ˢ (right = tJ if use_j). Returns order and s, −1 for overflow."""
    m = A.shape[0]
    order, squarings = scale_down(A, orders, thetas, w)
    if squarings < 0:
        return order, squarings
    P, V, X = w[5], w[6], w[7]
    even_polynomials(order, w, P, V, X)
    mm(w[0], P, X)
    for i in range(m):
        for j in range(m):
            V[i, j] -= X[i, j]
    half = 0.5 ** (squarings - 1)
    if use_j:
        times_j(half * t, P, C)
    else:
        for i in range(m):
            for j in range(m):
                right[i, j] *= half
        mm(P, right, C)
    solve(V, C)
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
        mm(right, Gs, A)
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
                mm(Gs, C[e], w[0])
                mm(C[e], w[0], X)
            else:
                mm(C[e], C[e], X)
            for i in range(m):
                for j in range(m):
                    C[e, i, j] = 2 * C[e, i, j] + X[i, j]
            if (s + 1) % DOUBLINGS_PER_POLISH == 0 and s + 1 < squarings:
                polish(C[e], Gs, gram, w)
        polish(C[e], Gs, gram, w)
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
    grams, generators = (matrices(given if a is None else a, shape) for a in (G, W))
    ts = np.array(np.broadcast_to(t, shape)).reshape(-1)
    eps = float(np.finfo(given.dtype).eps)
    common = (grams, G is not None, generators, W is None, ts, eps, *table(eps), C, chosen, bound)
    share(count, m**3, lambda first, last: skew_batch(first, last, *common))
    order, squarings = chosen.max(axis=0, initial=0)
    if chosen[:, 1].min(initial=0) < 0:
        squarings = -1
    return Core(C.reshape(*shape, m, m), int(order), int(squarings), bound.reshape(shape))


def skew_core(G: np.ndarray, t: float) -> tuple[np.ndarray, float]:
    """One core and its certified defect (NaN or infinite where the general way must look)."""
    C = np.empty((1, *G.shape), G.dtype)
    real = G.real.dtype
    chosen, bound = np.empty((1, 2), np.int64), np.empty(1, real)
    eps, orders, thetas = _TABLES[real.char]
    ts = np.array([t], real)
    G = G[None]
    skew_batch(0, 1, G, True, G, True, ts, eps, orders, thetas, C, chosen, bound)
    return C[0], float(bound[0]) if chosen[0, 1] >= 0 else math.inf


def matrices(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A batch as kernels take it, flat unless t varies inside it, and writable.

    A read-only array is another type to numba, and would be compiled for once more.
    """
    m, batch = a.shape[-1], a.shape[:-2]
    if shape[len(shape) - len(batch) :] != batch:
        a = np.broadcast_to(a, (*shape, m, m))
    return np.require(a, requirements=["C", "W"]).reshape(-1, m, m)
