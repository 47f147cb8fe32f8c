"""The core's compiled twin for NumPy arrays: products by BLAS, and fused loops between them.

It follows `exponential.py` step by step, one matrix at a time, and calls the same `select`, but
where a solve is cheap the Padé approximant of `pade.py` takes the place of the polynomial.
Kernels release the GIL, so the batch runs on ordinary threads: no threading layer that a fork
could break is ever started.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import numpy as np

from .._array import Array
from .._numba import inner, jit
from .._threads import quiet_blas, share
from .certificate import ALIKE, DEFECT_FACTOR, LEAST_TURN, MANY, MEANINGFUL, trusted_up_to
from .compiled_loops import add_block, identity, mm, one_norm, scaled
from .exponential import DOUBLINGS_PER_POLISH, SAFE_EXPONENT, Core
from .pade import approximant, order_of, pade_scale_down, parts
from .selection import PLAIN, SMALL, pade_sizes, pade_table, select, table
from .taylor import COEFFICIENTS, width

_select, width_of, _trusted_up_to = inner(select), inner(width), inner(trusted_up_to)
_WORK = 10
# By how much the bound is raised of a Padé approximant that is not doubled, for the errors of its
# system, and of the half that a single doubling makes larger and nothing polishes.
UNPOLISHED, HALF = 2.25, 4.0
# A polish leaves ¾E² of a defect E: it is repeated where that is not small beside u, so many times.
POLISHES = 4


def _tables(char: str) -> tuple[float, np.ndarray, tuple[int, ...], tuple[float, ...]]:
    """Machine epsilon, coefficients of both schemes, Taylor's orders and thresholds of a dtype."""
    eps = float(np.finfo(np.dtype(char)).eps)
    (order,), _ = pade_table(eps)
    return eps, np.array([*COEFFICIENTS, *parts(order)], char), *table(eps)


TABLES = {char: _tables(char) for char in "df"}


@inner
def _adjoint(a, out):
    """out = aᴴ."""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[j, i] = np.conj(a[i, j])


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
def polynomial(order, c, start, w, flat):
    """φ₁(A) (`start` 0) or exp(A) − I (1) from I, A, … in w, as `taylor.py`; returns its slot."""
    k = width_of(order)
    terms = flat[start:]
    x, y = 6, 7
    scaled(0, flat[0], flat[x])
    add_block(c, order - k, k, terms, flat[x])
    for first in range(order - 2 * k, -1, -k):
        mm(w[k], w[x], w[y])
        add_block(c, first, k, terms, flat[y])
        x, y = y, x
    return x


@inner
def double(C, G, gram, x, y):
    """C ← 2C + CGC, in place; x and y are scratch."""
    if gram:
        mm(G, C, x)
        mm(C, x, y)
    else:
        mm(C, C, y)
    for i in range(C.shape[0]):
        for j in range(C.shape[1]):
            C[i, j] += C[i, j] + y[i, j]


@inner
def polish(C, G, gram, w):
    """One Newton–Schulz step towards the nearest unitary, in place; returns ¾‖E‖². w is scratch."""
    GC, H, D = w[0], w[1], w[2]
    _adjoint(C, H)
    if gram:
        mm(G, C, GC)
        mm(H, GC, D)
    else:
        mm(H, C, D)
    for i in range(C.shape[0]):
        for j in range(C.shape[1]):
            D[i, j] += C[i, j] + H[i, j]
    if gram:
        mm(G, D, GC)
        mm(C, GC, H)
    else:
        mm(C, D, H)
    GD = GC if gram else D
    half, total = C.real.dtype.type(0.5), 0.0
    for i in range(C.shape[0]):
        for j in range(C.shape[1]):
            C[i, j] -= half * (D[i, j] + H[i, j])
            total += (GD[i, j] * GD[j, i]).real
    return 0.75 * abs(total)


@inner
def _polished(C, G, gram, eps, w):
    """Polish until what is left of the defect is small; returns that."""
    left = polish(C, G, gram, w)
    for _ in range(1, POLISHES):
        if not 0.125 * eps < left < 0.5:  # done, or too far from unitary for it to converge
            break
        left = polish(C, G, gram, w)
    return left if left > 0.5 * eps else 0.0


@inner
def _defect_bound(C, G, gram, doubled, eps, w, d):
    """The certified defect: see `certificate.defect_bound`; w and d are scratch."""
    m, more = d.shape[0], 1.0
    Ch, H, X = w[0], w[1], w[2]
    if gram:
        more = _amplification(G, d)
    else:
        d[:] = 1
    for i in range(m):
        for j in range(m):
            Ch[i, j] = d[i] * C[i, j] * d[j]
    _adjoint(Ch, H)
    for i in range(m):
        for j in range(m):
            X[i, j] = Ch[i, j] + H[i, j]
    within = across = _frobenius(X)
    if doubled:
        within = max(within, LEAST_TURN)
    if gram:
        across = _frobenius(Ch) ** 2
        if more * more * within * across > 1:
            mm(Ch, H, X)
            across = _frobenius(X)
    bound = DEFECT_FACTOR * 0.5 * eps * (1.0 + more * math.sqrt(within) * math.sqrt(across))
    return bound if bound <= MEANINGFUL else np.inf


@inner
def _amplification(G, d):
    """See `certificate.amplification`; d becomes the column lengths."""
    m, most = d.shape[0], 1.0
    for i in range(m):
        d[i] = math.sqrt(G[i, i].real)
    for i in range(m):
        total = 0.0
        for j in range(m):
            if d[i] > 0 and d[j] > 0:
                cosine = G[i, j] / d[i] / d[j]
                total += cosine.real**2 + cosine.imag**2
        most = max(most, total)
    return max(1.0, ALIKE * min(m, MANY) * most * most)


@inner
def _frobenius(a):
    """The Frobenius norm."""
    total = 0.0
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            total += a[i, j].real ** 2 + a[i, j].imag ** 2
    return math.sqrt(total)


@inner
def square(w, flat, sums):
    """A/2ʰ, whose powers do not overflow, and its square after I in w; returns ‖A‖ and h.

    h is −1 where A is not finite. `sums` is scratch.
    """
    norm = one_norm(w[1], sums)
    if not norm < np.inf:
        return norm, -1
    halvings = max(math.frexp(norm)[1] - SAFE_EXPONENT, 0)
    if halvings:
        scaled(0.5**halvings, flat[1], flat[1])
    mm(w[1], w[1], w[2])
    return norm, halvings


@inner
def scale_down(norm, halvings, w, flat, orders, thetas, sums):
    """The powers of A/2ˢ that its polynomial needs from what `square` left; returns order and s."""
    alpha, ready, size = norm, 2, 2.0**halvings
    if norm > thetas[SMALL]:
        ready = 3
        mm(w[2], w[1], w[3])
        third = one_norm(w[3], sums) ** (1 / 3)
        alpha = min(norm, size * max(math.sqrt(one_norm(w[2], sums)), third))
        if alpha > thetas[PLAIN]:
            ready = 4
            mm(w[2], w[2], w[4])
            alpha = min(alpha, size * max(third, one_norm(w[4], sums) ** (1 / 4)))
        alpha = max(alpha, thetas[SMALL])
    order, squarings = _select(alpha, orders, thetas)
    k = width_of(order)
    for i in range(ready, k):
        mm(w[i], w[1], w[i + 1])
    if squarings > halvings:
        for i in range(1, k + 1):
            scaled(0.5 ** ((squarings - halvings) * i), flat[i], flat[i])
    return order, max(squarings, halvings)


@inner
def times_j(f, P, out):
    """out = f P J."""
    r = P.shape[0] // 2
    g = out.real.dtype.type(f)
    for i in range(P.shape[0]):
        for j in range(r):
            out[i, j] = -g * P[i, r + j]
            out[i, r + j] = g * P[i, j]


@inner
def generator_of(t, scale, G, Gs, A):
    """Gs, the scaled G, and A = tJGs."""
    m, r = G.shape[0], G.shape[0] // 2
    for i in range(m):
        for j in range(m):
            Gs[i, j] = scale[i] * G[i, j] * scale[j]
    for i in range(r):
        for j in range(m):
            A[i, j], A[r + i, j] = t * Gs[r + i, j], -t * Gs[i, j]


@inner
def scaled_back(scale, C):
    """C ← DCD with D = diag(scale)."""
    for i in range(C.shape[0]):
        for j in range(C.shape[1]):
            C[i, j] *= scale[i] * scale[j]


@inner
def _product(t, G, gram, W, Gs, tW, A):
    """A = tWG, with tW and G copied."""
    m = A.shape[0]
    for i in range(m):
        for j in range(m):
            A[i, j] = tW[i, j] = t * W[i, j]
            Gs[i, j] = G[i, j]
    if gram:
        mm(tW, Gs, A)


@inner
def _times_w(P, half, t, gram, use_j, tW, C):
    """C = half P tW; half is 1/2ˢ, and W is in P where there is no Gram matrix."""
    if use_j:
        times_j(half * t, P, C)
        return
    if gram:
        mm(P, tW, C)
    f = C.real.dtype.type(half)
    for i in range(C.shape[0]):
        for j in range(C.shape[1]):
            C[i, j] = f * C[i, j] if gram else P[i, j]


@inner
def _phi1(start, tables, w, flat, sums, chosen):
    """φ₁(A/2ˢ) (`start` 0) or exp(A/2ˢ) − I (1) as selected; returns its slot and s, −1: overflow.

    ‖A²‖^½ selects: the powers that decide about scaling are not the same for the two schemes.
    """
    c, orders, thetas, theta, (smallest, largest) = tables
    norm, h = square(w, flat, sums)
    if h < 0:
        chosen[:] = -1
        return 0, -1
    size = norm
    if norm > smallest:
        size = 2.0**h * math.sqrt(one_norm(w[2], sums))
    by_pade = smallest < size <= largest
    if by_pade:
        order, squarings = pade_scale_down(norm, h, w, flat, order_of(c), theta, sums)
        slot = approximant(order, c, start, w, flat)
    else:
        order, squarings = scale_down(norm, h, w, flat, orders, thetas, sums)
        slot = polynomial(order, c, start, w, flat)
    chosen[0], chosen[1], chosen[2] = squarings, by_pade, order
    return slot, squarings


@inner
def _finished(C, G, gram, squarings, by_pade, alike, eps, w, d):
    """Double and polish C, in place; returns the certified defect. w and d are scratch.

    What was doubled is polished, and what has columns that are alike and was no easy polynomial. A
    single doubling of the polynomial is certified by what it doubles, too, and only polished where
    that is in doubt, as is a Padé approximant by itself.
    """
    once, alone = squarings == 1 and not (by_pade or alike), squarings == 0 and by_pade
    before, left = 0.0, 0.0
    if once:
        before = HALF * _defect_bound(C, G, gram, False, eps, w, d)
    for s in range(1, squarings + 1):
        double(C, G, gram, w[0], w[1])
        if s % DOUBLINGS_PER_POLISH == 0 and s < squarings:
            _polished(C, G, gram, eps, w)
    if alone:
        before = UNPOLISHED * _defect_bound(C, G, gram, False, eps, w, d)
    doubtful = not before <= _trusted_up_to(d.shape[0], 0.5 * eps)
    if alike or doubtful or (squarings > 0 and not once):
        left, alone = _polished(C, G, gram, eps, w), False
        before = before if alike else 0.0
    after = before
    if not alone:
        after = left + _defect_bound(C, G, gram, squarings > 0, eps, w, d)
    return max(before, after) if after <= MEANINGFUL else np.inf


@jit
def skew_batch(
    first, last, G, gram, W, use_j, t, eps, c, orders, thetas, theta, sizes, C, chosen, bound
):
    """Cores first..last of a batch; a grid of t runs over the batch of G again and again."""
    m = C.shape[1]
    w = np.zeros((_WORK, m, m), C.dtype)
    flat = w.reshape(_WORK, m * m)
    scale, sums = np.ones(m, t.dtype), np.empty(m, t.dtype)
    identity(w[0])
    Gs, tW = w[8], w[9]
    tables = c, orders, thetas, theta, sizes
    for e in range(first, last):
        g, Ce = e % G.shape[0], C[e]
        if use_j:
            _balance(G[g], scale)
            generator_of(t[e], scale, G[g], Gs, w[1])
        else:
            _product(t[e], G[g], gram, W[g], Gs, tW, w[1])
        slot, squarings = _phi1(0 if gram else 1, tables, w, flat, sums, chosen[e])
        if squarings < 0:
            continue
        _times_w(w[slot], 0.5**squarings, t[e], gram, use_j, tW, Ce)
        far = squarings > 0 or chosen[e, 1] == 1 or chosen[e, 2] >= orders[-1]
        alike = gram and far and _amplification(Gs, sums) > 1
        bound[e] = _finished(Ce, Gs, gram, squarings, chosen[e, 1], alike, eps, w[1:4], sums)
        if use_j:
            scaled_back(scale, Ce)


def skew_cores(G: Array | None, t: np.ndarray, W: Array | None) -> Core:
    """The batched cores, as `exponential.skew_core` gives them; t has no matrix axes."""
    given: Array = W if G is None else G
    batch, m = given.shape[:-2], given.shape[-1]
    shape = np.broadcast_shapes(t.shape, batch)
    count = math.prod(shape)
    C = np.empty((count, m, m), given.dtype)
    chosen = np.zeros((count, 3), np.int64)
    bound = np.empty(count, t.dtype)
    grams, generators = (matrices(given if a is None else a, shape) for a in (G, W))
    ts = np.array(np.broadcast_to(t, shape)).reshape(-1)
    tables = _schemes(m, t.dtype.char)
    common = (grams, G is not None, generators, W is None, ts, *tables, C, chosen, bound)
    with quiet_blas(count, m**3):
        share(count, m**3, lambda i, j: skew_batch(i, j, *common))
    order, squarings = worst(chosen)
    return Core(C.reshape(*shape, m, m), order, squarings, bound.reshape(shape))


@cache
def _schemes(m: int, char: str) -> tuple[Any, ...]:
    """The tables for matrices with m columns, with Padé's threshold and the sizes it serves."""
    eps = TABLES[char][0]
    return *TABLES[char], pade_table(eps)[1][0], pade_sizes(m, eps)


def worst(chosen: np.ndarray) -> tuple[int, int]:
    """The order and squarings of the element with the largest angle; −1 if one overflowed."""
    if not len(chosen):
        return 4, 0
    squarings, _, order = max(chosen.tolist())
    return order, squarings if chosen[:, 0].min() >= 0 else -1


def skew_core(G: np.ndarray, t: float) -> tuple[np.ndarray, float]:
    """One core and its certified defect (NaN or infinite where the general way must look)."""
    with quiet_blas(1, len(G) ** 3):
        C, bound = skew_elements(G[None], t)
    return C[0], float(bound[0])


def skew_elements(G: np.ndarray, t: float) -> tuple[np.ndarray, np.ndarray]:
    """The same for a flat batch, on this thread."""
    real, count, m = G.real.dtype, len(G), G.shape[-1]
    C, ts = np.empty(G.shape, G.dtype), np.full(count, t, real)
    chosen, bound = np.empty((count, 3), np.int64), np.full(count, np.inf, real)
    skew_batch(0, count, G, True, G, True, ts, *_schemes(m, real.char), C, chosen, bound)
    return C, bound


def matrices(a: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A batch as kernels take it, flat unless t varies inside it, and writable.

    A read-only array is another type to numba, and would be compiled for once more.
    """
    m, batch = a.shape[-1], a.shape[:-2]
    if shape[len(shape) - len(batch) :] != batch:
        a = np.broadcast_to(a, (*shape, m, m))
    return np.require(a, requirements=["C", "W"]).reshape(-1, m, m)
