"""Compiled passes over rows, in real arithmetic: complex arrays come in as interleaved reals.

A task is one block of rows of one batch element. Inside it, rows are packed transposed into a
panel that stays in the first-level cache, where every product is a long vector operation. Sums
are formed over one panel in the working precision, over panels and blocks in double precision.
"""

from __future__ import annotations

import numpy as np

from .._numba import inner, jit

# Rows of a narrow panel are short, so that reading the inputs does not push it out of the
# first-level cache; rows of a wide one are long, for there the sums at their ends would count.
# The padding keeps rows out of one cache set.
NARROW_PANEL, SHORT_BYTES, LONG_BYTES = 24, 512, 1024
PAD = 8
# Rows of a panel that a grid writes to many results.
GRID_BYTES = 2048
# Rows after which sums go from a panel's precision to double; divides FLUSH_ROWS of the passes.
FLUSH = 4096
# From NARROW columns on, the update works on WIDE columns at once.
NARROW, WIDE = 4, 8


@inner
def _pack(a, e, lo, rows, P, at):
    """P[at + j, q] = a[e, lo + q, j], eight rows at a time."""
    x = a[e]
    even = rows - rows % 8
    for q in range(0, even, 8):
        x0, x1, x2, x3 = x[lo + q], x[lo + q + 1], x[lo + q + 2], x[lo + q + 3]
        x4, x5, x6, x7 = x[lo + q + 4], x[lo + q + 5], x[lo + q + 6], x[lo + q + 7]
        for j in range(x.shape[1]):
            y = P[at + j]
            y[q], y[q + 1], y[q + 2], y[q + 3] = x0[j], x1[j], x2[j], x3[j]
            y[q + 4], y[q + 5], y[q + 6], y[q + 7] = x4[j], x5[j], x6[j], x7[j]
    for q in range(even, rows):
        for j in range(x.shape[1]):
            P[at + j, q] = x[lo + q, j]


@inner
def _frame_rows(U, V, scale, factors, e, lo, rows, P):
    """Rows of F = [U V] diag(scale) R₁⁻¹R₂⁻¹… into the first rows of P, transposed."""
    r = U.shape[2]
    m = r + V.shape[2]
    _pack(U, min(e, U.shape[0] - 1), lo, rows, P, 0)
    _pack(V, min(e, V.shape[0] - 1), lo, rows, P, r)
    if scale.shape[0] > 0:
        s = scale[min(e, scale.shape[0] - 1)]
        for j in range(m):
            for q in range(rows):
                P[j, q] *= s[j]
    for stage in range(factors.shape[0]):
        R = factors[stage, min(e, factors.shape[1] - 1)]
        for j in range(m):
            y = P[j]
            for i in range(j):
                f, x = R[i, j], P[i]
                for q in range(rows):
                    y[q] -= f * x[q]
            d = R[j, j]
            for q in range(rows):
                y[q] /= d


@inner
def _tile(P, i, j, rows, H):
    """H[i:i+4, j:j+4] += P[i:i+4] @ P[j:j+4]ᵀ over one panel."""
    a0, a1, a2, a3 = P[i], P[i + 1], P[i + 2], P[i + 3]
    b0, b1, b2, b3 = P[j], P[j + 1], P[j + 2], P[j + 3]
    z = P.dtype.type(0)
    s00 = s01 = s02 = s03 = s10 = s11 = s12 = s13 = z
    s20 = s21 = s22 = s23 = s30 = s31 = s32 = s33 = z
    for q in range(rows):
        s00 += a0[q] * b0[q]
        s01 += a0[q] * b1[q]
        s02 += a0[q] * b2[q]
        s03 += a0[q] * b3[q]
        s10 += a1[q] * b0[q]
        s11 += a1[q] * b1[q]
        s12 += a1[q] * b2[q]
        s13 += a1[q] * b3[q]
        s20 += a2[q] * b0[q]
        s21 += a2[q] * b1[q]
        s22 += a2[q] * b2[q]
        s23 += a2[q] * b3[q]
        s30 += a3[q] * b0[q]
        s31 += a3[q] * b1[q]
        s32 += a3[q] * b2[q]
        s33 += a3[q] * b3[q]
    for row, sums in (
        (H[i], (s00, s01, s02, s03)),
        (H[i + 1], (s10, s11, s12, s13)),
        (H[i + 2], (s20, s21, s22, s23)),
        (H[i + 3], (s30, s31, s32, s33)),
    ):
        row[j] += sums[0]
        row[j + 1] += sums[1]
        row[j + 2] += sums[2]
        row[j + 3] += sums[3]


@inner
def _clear(a):
    """a = 0."""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            a[i, j] = 0


@inner
def _transposed(a, out):
    """out[:, :] = aᵀ in the leading corner: loops, for slice assignments compile to far more."""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[j, i] = a[i, j]


@inner
def _tile_column(P, i, j, rows, H):
    """H[i:i+4, j] += P[i:i+4] @ P[j] over one panel."""
    a0, a1, a2, a3, b = P[i], P[i + 1], P[i + 2], P[i + 3], P[j]
    s0 = s1 = s2 = s3 = P.dtype.type(0)
    for q in range(rows):
        s0 += a0[q] * b[q]
        s1 += a1[q] * b[q]
        s2 += a2[q] * b[q]
        s3 += a3[q] * b[q]
    H[i, j] += s0
    H[i + 1, j] += s1
    H[i + 2, j] += s2
    H[i + 3, j] += s3


@inner
def _panel_rows(width, itemsize):
    """How many rows of the inputs a panel holds for a frame of that width.

    Not for that of B too, so that sums over the frame are the same whatever comes beside it.
    """
    return (SHORT_BYTES if width <= NARROW_PANEL else LONG_BYTES) // itemsize


@jit
def accumulate_tasks(first, last, blocks, size, gram, U, V, scale, factors, B, partial):
    """partial[task] += Fᵀ[F B] over the task's rows, or [0 FᵀB] unless `gram`."""
    n, m, k = U.shape[1], U.shape[2] + V.shape[2], B.shape[2]
    m4 = -(-m // 4) * 4
    tiled = m4 + k - k % 4
    panel = _panel_rows(m4, U.itemsize)
    P = np.zeros((m4 + k, min(panel, n) + PAD), U.dtype)
    H = np.zeros((m4, m4 + k))
    for task in range(first, last):
        e, lo = task // blocks, (task % blocks) * size
        hi = min(lo + size, n)
        out = partial[task]
        while lo < hi:
            flush = min(lo + FLUSH, hi)
            _clear(H)
            while lo < flush:
                rows = min(panel, flush - lo)
                _frame_rows(U, V, scale, factors, e, lo, rows, P)
                if k > 0:
                    _pack(B, min(e, B.shape[0] - 1), lo, rows, P, m4)
                for i in range(0, m4, 4):
                    for j in range(i if gram else m4, tiled, 4):
                        _tile(P, i, j, rows, H)
                    for j in range(tiled, m4 + k):
                        _tile_column(P, i, j, rows, H)
                lo += rows
            for i in range(m):
                if gram:
                    out[i, i] += H[i, i]
                    for j in range(i + 1, m):
                        out[i, j] += H[i, j]
                        out[j, i] += H[i, j]
                for j in range(k):
                    out[i, m + j] += H[i, m4 + j]


@jit
def update_tasks(first, last, blocks, size, add, U, V, scale, factors, Z, B, out):
    """out[g] = B + F Z[g] (F Z[g] unless add) over the rows of each task, for each g of a grid.

    Few columns are taken one at a time, unless a grid has many of few: then eight of those.
    """
    n, m, k = U.shape[1], U.shape[2] + V.shape[2], Z.shape[3]
    columns = k * Z.shape[0]
    m4, c8 = -(-m // 4) * 4, -(-columns // WIDE) * WIDE
    panel = GRID_BYTES // U.itemsize if Z.shape[0] > 1 else _panel_rows(m4, U.itemsize)
    P = np.zeros((m4, min(panel, n) + PAD), U.dtype)
    Y = np.zeros((c8, min(panel, n) + PAD), U.dtype)
    z = np.zeros((c8, m4), U.dtype)
    for task in range(first, last):
        e, start = task // blocks, (task % blocks) * size
        b = min(e, B.shape[0] - 1)
        for g in range(Z.shape[0]):
            _transposed(Z[g, e], z[g * k :])
        for lo in range(start, min(start + size, n), panel):
            rows = min(panel, min(start + size, n) - lo)
            _frame_rows(U, V, scale, factors, e, lo, rows, P)
            _products(P, z, columns, rows, Y)
            for g in range(Z.shape[0]):
                if add:
                    _write(B[b], out[g, e], Y[g * k :], lo, rows)
                else:
                    _unpack(Y, g * k, out[g, e], lo, rows)


@jit
def combine_tasks(first, last, blocks, size, U, V, Yb, B, M, Uo, Vo, Bo):
    """[Uo Vo Bo] = [U V Yb B] M over the rows of each task."""
    n, r, k = U.shape[1], U.shape[2], Yb.shape[2]
    w, c = 2 * r + 2 * k, 2 * r + k
    w4, c8 = -(-w // 4) * 4, -(-c // WIDE) * WIDE
    panel = _panel_rows(w4, U.itemsize)
    P = np.zeros((w4, min(panel, n) + PAD), U.dtype)
    Y = np.zeros((c8, min(panel, n) + PAD), U.dtype)
    z = np.zeros((c8, w4), U.dtype)
    for task in range(first, last):
        e, start = task // blocks, (task % blocks) * size
        _transposed(M[e], z)
        for lo in range(start, min(start + size, n), panel):
            rows = min(panel, min(start + size, n) - lo)
            _pack(U, min(e, U.shape[0] - 1), lo, rows, P, 0)
            _pack(V, min(e, V.shape[0] - 1), lo, rows, P, r)
            _pack(Yb, min(e, Yb.shape[0] - 1), lo, rows, P, 2 * r)
            _pack(B, min(e, B.shape[0] - 1), lo, rows, P, 2 * r + k)
            _products(P, z, c, rows, Y)
            _unpack(Y, 0, Uo[e], lo, rows)
            _unpack(Y, r, Vo[e], lo, rows)
            _unpack(Y, 2 * r, Bo[e], lo, rows)


@inner
def _unpack(Y, at, out, lo, rows):
    """out[lo + q, j] = Y[at + j, q]."""
    for q in range(rows):
        for j in range(out.shape[1]):
            out[lo + q, j] = Y[at + j, q]


@inner
def _products(P, z, columns, rows, Y):
    """Y[:columns] = z[:columns] P over one panel: by eights, and a few that remain by ones."""
    eights = columns - columns % WIDE
    if columns % WIDE >= NARROW:
        eights += WIDE
    for c in range(0, eights, WIDE):
        _eight_columns(P, z, c, rows, Y)
    for c in range(eights, columns):
        _one_column(P, z[c], rows, Y[c])


@inner
def _one_column(P, z, rows, y):
    """y = Pᵀ z over one panel."""
    for q in range(rows):
        y[q] = 0
    for j in range(0, P.shape[0], 4):
        p0, p1, p2, p3 = P[j], P[j + 1], P[j + 2], P[j + 3]
        a0, a1, a2, a3 = z[j], z[j + 1], z[j + 2], z[j + 3]
        for q in range(rows):
            y[q] += a0 * p0[q] + a1 * p1[q] + a2 * p2[q] + a3 * p3[q]


@inner
def _eight_columns(P, z, c, rows, Y):
    """Y[c:c+8] = z[c:c+8] P over one panel; operands are loaded once, before any store."""
    y0, y1, y2, y3 = Y[c], Y[c + 1], Y[c + 2], Y[c + 3]
    y4, y5, y6, y7 = Y[c + 4], Y[c + 5], Y[c + 6], Y[c + 7]
    for q in range(rows):
        y0[q] = y1[q] = y2[q] = y3[q] = y4[q] = y5[q] = y6[q] = y7[q] = 0
    for j in range(0, P.shape[0], 4):
        p0, p1, p2, p3 = P[j], P[j + 1], P[j + 2], P[j + 3]
        a0, a1, a2, a3 = z[c, j], z[c, j + 1], z[c, j + 2], z[c, j + 3]
        b0, b1, b2, b3 = z[c + 1, j], z[c + 1, j + 1], z[c + 1, j + 2], z[c + 1, j + 3]
        c0, c1, c2, c3 = z[c + 2, j], z[c + 2, j + 1], z[c + 2, j + 2], z[c + 2, j + 3]
        d0, d1, d2, d3 = z[c + 3, j], z[c + 3, j + 1], z[c + 3, j + 2], z[c + 3, j + 3]
        e0, e1, e2, e3 = z[c + 4, j], z[c + 4, j + 1], z[c + 4, j + 2], z[c + 4, j + 3]
        f0, f1, f2, f3 = z[c + 5, j], z[c + 5, j + 1], z[c + 5, j + 2], z[c + 5, j + 3]
        g0, g1, g2, g3 = z[c + 6, j], z[c + 6, j + 1], z[c + 6, j + 2], z[c + 6, j + 3]
        h0, h1, h2, h3 = z[c + 7, j], z[c + 7, j + 1], z[c + 7, j + 2], z[c + 7, j + 3]
        for q in range(rows):
            x0, x1, x2, x3 = p0[q], p1[q], p2[q], p3[q]
            y0[q] += a0 * x0 + a1 * x1 + a2 * x2 + a3 * x3
            y1[q] += b0 * x0 + b1 * x1 + b2 * x2 + b3 * x3
            y2[q] += c0 * x0 + c1 * x1 + c2 * x2 + c3 * x3
            y3[q] += d0 * x0 + d1 * x1 + d2 * x2 + d3 * x3
            y4[q] += e0 * x0 + e1 * x1 + e2 * x2 + e3 * x3
            y5[q] += f0 * x0 + f1 * x1 + f2 * x2 + f3 * x3
            y6[q] += g0 * x0 + g1 * x1 + g2 * x2 + g3 * x3
            y7[q] += h0 * x0 + h1 * x1 + h2 * x2 + h3 * x3


@inner
def _write(b, out, Y, lo, rows):
    """out[lo:lo+rows] = b[lo:lo+rows] + Yᵀ; out may be b."""
    k = out.shape[1]
    if k == 1:
        y = Y[0]
        for q in range(rows):
            out[lo + q, 0] = b[lo + q, 0] + y[q]
        return
    for q in range(rows):
        for c in range(k):
            out[lo + q, c] = b[lo + q, c] + Y[c, q]
