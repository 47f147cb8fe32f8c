"""Compiled passes over rows, in real arithmetic: complex arrays come in as interleaved reals.

A task is one block of rows of one batch element. Inside it, rows of all operands are laid side by
side in a panel that stays in the first-level cache, and multiplied tile by tile. Sums are formed
over one panel in the working precision, over panels and blocks in double precision.
"""

from __future__ import annotations

import numpy as np

from .._numba import inner, jit
from .tiles import (
    HEIGHT,
    VECTOR_BYTES,
    WIDTH,
    add,
    dots,
    dots_onto,
    fetch,
    move,
    pair_of_sums,
    pair_of_tiles,
    settle,
    tile,
    tile_of_parts,
    tile_of_sums,
    turn,
)

# Rows of a panel: half a page of an operand, for processors then read ahead into the other half,
# but neither too few nor more than the cache holds; of one that is also held transposed, more.
HALF_PAGE = 2048
TOO_FEW, MOST, LONG = 16, 64, 256
# Rows that are added up one after the other.
RUN = 32
# Rows after which sums move on: a sum of sums of a few numbers is rounded less.
GROUP = 512
# Rows after which they leave the task's own memory; divides FLUSH_ROWS of the passes.
FLUSH = 4096
# Below FEW columns, products are taken one column at a time.
FEW = 4
# Rows of a tile where no more are left.
LOW = 4
# Rows of at most so many bytes are summed up where they lie, without a panel, and come into the
# cache by themselves, because processors notice runs of lines; longer ones are asked for.
SHORT = 128
# Rows of at most so many bytes are updated where they lie; long ones are asked for so far ahead.
MEDIUM, AHEAD = 256, 16
# Curves of at least so many bytes are written past the caches.
HUGE = 1 << 25
# Room for the last tile, which also keeps rows out of one cache set.
PAD = 8

_sums, _narrow_sums = tile_of_sums(HEIGHT, WIDTH), tile_of_sums(HEIGHT, 1)
_low_sums, _low_narrow_sums = tile_of_sums(LOW, WIDTH), tile_of_sums(LOW, 1)
_row_sums, _narrow_row_sums = tile_of_sums(1, WIDTH), tile_of_sums(1, 1)
_move_two, _move_four, _add_two, _add_four = move(2), move(4), add(2), add(4)
# A tile's rows where it has a vector of each of two products.
PAIR = HEIGHT * WIDTH // 2
_pair, _pair_of_rows = pair_of_tiles(PAIR), pair_of_tiles(1)
_pair_sums, _pair_sums_of_row = pair_of_sums(PAIR), pair_of_sums(1)
_onto, _row_onto = tile(HEIGHT, WIDTH, onto=True), tile(1, WIDTH, onto=True)
_onto_memory = tile(HEIGHT, WIDTH, onto=True, past_caches=True)
_row_onto_memory = tile(1, WIDTH, onto=True, past_caches=True)
_settle = settle()
_tile, _narrow_tile = tile(HEIGHT, WIDTH), tile(HEIGHT, 1)
_tile_of_parts, _narrow_tile_of_parts = tile_of_parts(HEIGHT, WIDTH), tile_of_parts(HEIGHT, 1)
_dots, _dots_onto = dots(), dots_onto()
_fetch, _turn = fetch(), turn()


@inner
def _up(a, b):
    """The next multiple of b."""
    return -(-a // b) * b


@inner
def _place(a, e, lo, rows, P, at):
    """P[q, at + j] = a[e, lo + q, j]: by fours along rows, what remains along columns."""
    x = a[min(e, a.shape[0] - 1)]
    width = x.shape[1]
    fours, twos = width - width % 4, width - width % 2
    if fours > 0:
        for q in range(rows):
            for j in range(0, fours, 4):
                _move_four(x, lo + q, j, P, q, at + j)
    if twos > fours:
        for q in range(rows):
            _move_two(x, lo + q, fours, P, q, at + fours)
    if width > twos:
        for q in range(rows):
            P[q, at + twos] = x[lo + q, twos]


@inner
def _frame_rows(U, V, scale, factors, e, lo, rows, P, S):
    """Rows of F = [U V] diag(scale) R₁⁻¹R₂⁻¹… into the first columns of P; S is for working."""
    r = U.shape[2]
    m = r + V.shape[2]
    if factors.shape[0] > 0:
        _frame_columns(U, V, scale, factors, e, lo, rows, S)
        _transpose(S, m, rows, P)
        return
    _place(U, e, lo, rows, P, 0)
    _place(V, e, lo, rows, P, r)
    if scale.shape[0] > 0:
        s = scale[min(e, scale.shape[0] - 1)]
        for q in range(rows):
            for j in range(m):
                P[q, j] *= s[j]


@inner
def _frame_columns(U, V, scale, factors, e, lo, rows, S):
    """The same rows as the first columns of Sᵀ."""
    r = U.shape[2]
    _transpose(U[min(e, U.shape[0] - 1), lo:], rows, r, S)
    _transpose(V[min(e, V.shape[0] - 1), lo:], rows, V.shape[2], S[r:])
    if scale.shape[0] > 0:
        s = scale[min(e, scale.shape[0] - 1)]
        for j in range(s.shape[0]):
            for q in range(rows):
                S[j, q] *= s[j]
    for stage in range(factors.shape[0]):
        _substitute(factors[stage, min(e, factors.shape[1] - 1)], rows, S)


@inner
def _substitute(R, rows, S):
    """S = R⁻ᵀ S in its first rows."""
    for j in range(R.shape[0]):
        y = S[j]
        for i in range(j):
            f, x = R[i, j], S[i]
            for q in range(rows):
                y[q] -= f * x[q]
        d = R[j, j]
        for q in range(rows):
            y[q] /= d


@inner
def _transpose(a, rows, columns, out):
    """out = aᵀ in the leading corner, whole vectors both ways as far as they go."""
    lanes = VECTOR_BYTES // a.itemsize
    down, along = rows - rows % lanes, columns - columns % lanes
    for q in range(0, down, lanes):
        for j in range(0, along, lanes):
            _turn(a, q, j, out, j, q)
    for q in range(rows):
        for j in range(along if q < down else 0, columns):
            out[j, q] = a[q, j]


@inner
def _rows_of_half_a_page(U, V):
    """How many of the longer part's."""
    return HALF_PAGE // max(1, max(U.shape[2], V.shape[2]) * U.itemsize)


@inner
def _panel_rows(U, V):
    """Rows of a panel: for the frame alone, so that its sums do not depend on what is beside it."""
    rows = _rows_of_half_a_page(U, V)
    return min(rows, MOST) if rows > TOO_FEW else MOST


@inner
def _panel(rows, columns, lanes, like):
    """Zeros with room for whole tiles, and for vectors that begin in any column."""
    return np.zeros((_up(rows, max(HEIGHT, lanes)), _up(columns, lanes) + PAD), like.dtype)


@inner
def _add_up(P, p, q, first, last, m, lanes, H):
    """H[i, j] += P[p:q, i]ᵀ P[p:q, j] for first ≤ i < last and j ≤ min(i, m), and some beyond."""
    i = first
    while i < last:
        height, j = _height(last - i), 0
        end = min(m, i + height)
        while j < end:
            j += _add_up_tile(P, p, q, i, j, height, end, lanes, H)
        i += height


@inner
def _add_up_fetching(P, p, q, first, last, m, lanes, U, V, B, start, stop, H):
    """The same; between tiles, rows start..stop of [U V B] come into the cache."""
    i = first
    while i < last:
        height, j = _height(last - i), 0
        end = min(m, i + height)
        while j < end:
            j += _add_up_tile(P, p, q, i, j, height, end, lanes, H)
            if start < stop:
                _fetch_row(U, V, B, start)
                start += 1
        i += height


@inner
def _height(rows):
    """How many of so many rows the next tile has."""
    return 1 if rows == 1 else LOW if rows <= LOW else HEIGHT


@inner
def _add_up_tile(P, p, q, i, j, height, end, lanes, H):
    """H += P[p:q]ᵀ P[p:q] in the tile at i and j, not wider than `end` needs; returns its width."""
    both = WIDTH > 1 and j + lanes < end
    if height == HEIGHT:
        if both:
            _sums(P, p, q, i, j, H)
        else:
            _narrow_sums(P, p, q, i, j, H)
    elif height == LOW:
        if both:
            _low_sums(P, p, q, i, j, H)
        else:
            _low_narrow_sums(P, p, q, i, j, H)
    elif both:
        _row_sums(P, p, q, i, j, H)
    else:
        _narrow_row_sums(P, p, q, i, j, H)
    return WIDTH * lanes if both else lanes


@inner
def _fetch_row(U, V, B, q):
    """Ask for row q of [U V B]."""
    _fetch(U, q)
    _fetch(V, q)
    _fetch(B, q)


@inner
def _whole(U, V):
    """Whether both parts of a row are as many whole vectors, so that no panel needs them."""
    lanes = VECTOR_BYTES // U.itemsize
    return U.shape[2] == V.shape[2] and U.shape[2] % lanes == 0


@inner
def _carry(a, out):
    """out += a; a = 0."""
    for i in range(a.shape[0]):
        for j in range(a.shape[1]):
            out[i, j] += a[i, j]
            a[i, j] = 0


@inner
def _carry_out(H, gram, m, out):
    """out[:, i] += H[i], both triangles of the first m if `gram`; H = 0."""
    for i in range(m if gram else 0):
        out[i, i] += H[i, i]
        for j in range(i):
            out[i, j] += H[i, j]
            out[j, i] += H[i, j]
    for i in range(m, out.shape[1]):
        for j in range(m):
            out[j, i] += H[i, j]
    for i in range(H.shape[0]):
        for j in range(H.shape[1]):
            H[i, j] = 0


@inner
def _sum_in_place(U, V, B, lo, hi, gram, run, H, K, out):
    """The sums of accumulate_tasks over rows of whole vectors, in the same order."""
    m = 2 * U.shape[1]
    for flush in range(lo, hi, FLUSH):
        end = min(flush + FLUSH, hi)
        for group in range(flush, end, GROUP):
            stop = min(group + GROUP, end)
            for p in range(group, stop, run):
                q = min(p + run, stop)
                if gram:
                    _gram_run(U, V, p, q, H)
                _project_run(U, V, B, p, q, m, H)
            _carry(H, K)
        _carry_out(K, gram, m, out)


@inner
def _gram_run(U, V, p, q, H):
    """H += [U V][p:q]ᵀ [U V][p:q] on and below the diagonal, and some above."""
    r, lanes = U.shape[1], VECTOR_BYTES // U.itemsize
    for i in range(0, r, HEIGHT):
        for j in range(0, i + HEIGHT, lanes):
            _narrow_sums(U, p, q, i, j, H)
    for i in range(0, r, PAIR):
        for j in range(0, r, lanes):
            _pair_sums(V, p, q, i, U, V, j, H, r + i)


@inner
def _project_run(U, V, B, p, q, m, H):
    """H[m + c] += B[p:q, c]ᵀ [U V][p:q]."""
    c, k = 0, B.shape[1]
    while c < k:
        tall = c + PAIR <= k
        for j in range(0, U.shape[1], VECTOR_BYTES // U.itemsize):
            if tall:
                _pair_sums(B, p, q, c, U, V, j, H, m + c)
            else:
                _pair_sums_of_row(B, p, q, c, U, V, j, H, m + c)
        c += PAIR if tall else 1


@jit
def accumulate_tasks(first, last, blocks, size, gram, U, V, scale, factors, B, partial):
    """partial[task] += Fᵀ[F B] over the task's rows, or [0 FᵀB] unless `gram`."""
    n, m, k = U.shape[1], U.shape[2] + V.shape[2], B.shape[2]
    lanes = VECTOR_BYTES // U.itemsize
    panel = LONG if factors.shape[0] > 0 else _panel_rows(U, V)
    P, S = _panel(panel, m + k, lanes, U), _panel(m, panel, lanes, U)
    H = np.zeros((m + k + HEIGHT, _up(m, lanes)), U.dtype)
    K = np.zeros(H.shape)
    top, long = 0 if gram else m, _rows_of_half_a_page(U, V) <= TOO_FEW
    short = not gram or U.shape[2] * U.itemsize <= SHORT
    direct = short and scale.shape[0] == 0 == factors.shape[0] and _whole(U, V)
    for task in range(first, last):
        e, lo = task // blocks, (task % blocks) * size
        u, v, b = U[min(e, U.shape[0] - 1)], V[min(e, V.shape[0] - 1)], B[min(e, B.shape[0] - 1)]
        hi = min(lo + size, n)
        if direct:
            _sum_in_place(u, v, b, lo, hi, gram, min(RUN, panel), H, K, partial[task])
            continue
        while lo < hi:
            flush = min(lo + FLUSH, hi)
            while lo < flush:
                group = min(lo + GROUP, flush)
                while lo < group:
                    rows = min(panel, group - lo)
                    _frame_rows(U, V, scale, factors, e, lo, rows, P, S)
                    if k > 0:
                        _place(B, e, lo, rows, P, m)
                    for p in range(0, rows, RUN):
                        q = min(p + RUN, rows)
                        if long:
                            next = lo + rows + p, min(lo + rows + q, hi)
                            _add_up_fetching(P, p, q, top, m + k, m, lanes, u, v, b, *next, H)
                        else:
                            _add_up(P, p, q, top, m + k, m, lanes, H)
                    lo += rows
                _carry(H, K)
            _carry_out(K, gram, m, partial[task])


@inner
def _multiply(P, z, columns, rows, lanes, Y):
    """Y = P z for so many columns, all of z's rows."""
    count, j = z.shape[0], 0
    while j < columns:
        both = j + (WIDTH - 1) * lanes < columns
        for q in range(0, rows, HEIGHT):
            if both:
                _tile(P, q, z, j, count, Y, Y, j)
            else:
                _narrow_tile(P, q, z, j, count, Y, Y, j)
        j += WIDTH * lanes if both else lanes


@inner
def _multiply_few(P, zt, rows, lanes, Y):
    """Y = (P ztᵀ)ᵀ, a column of the product at a time."""
    for c in range(zt.shape[0]):
        for q in range(0, rows, lanes):
            _dots(P, q, zt, c, zt.shape[1] // lanes, Y)


@inner
def _write(Y, at, b, adds, out, lo, rows):
    """out[lo + q, c] = b[lo + q, c] + Y[q, at + c], without b unless `adds`; out may be b."""
    width = out.shape[1]
    fours, twos = width - width % 4, width - width % 2
    for q in range(rows):
        for c in range(0, fours, 4):
            if adds:
                _add_four(Y, q, at + c, b, out, lo + q, c)
            else:
                _move_four(Y, q, at + c, out, lo + q, c)
        if twos > fours:
            if adds:
                _add_two(Y, q, at + fours, b, out, lo + q, fours)
            else:
                _move_two(Y, q, at + fours, out, lo + q, fours)
        if width > twos:
            y = Y[q, at + twos]
            out[lo + q, twos] = b[lo + q, twos] + y if adds else y


@inner
def _write_transposed(Y, at, b, adds, out, lo, rows):
    """out[lo + q, c] = b[lo + q, c] + Y[at + c, q], without b unless `adds`; out may be b."""
    for c in range(out.shape[1]):
        y = Y[at + c]
        if adds:
            for q in range(rows):
                out[lo + q, c] = b[lo + q, c] + y[q]
        else:
            for q in range(rows):
                out[lo + q, c] = y[q]


@inner
def _curves(zt, S, rows, lanes, b, past_caches, out):
    """out[g, q] = b[0, q] + (zt S)[g, q] for whole vectors of rows q."""
    count, grid = S.shape[0], out.shape[0]
    whole = grid - grid % HEIGHT
    for g in range(0, whole, HEIGHT):
        for q in range(0, rows, WIDTH * lanes):
            if past_caches:
                _onto_memory(zt, g, S, q, count, b, out, q)
            else:
                _onto(zt, g, S, q, count, b, out, q)
    for g in range(whole, grid):
        for q in range(0, rows, WIDTH * lanes):
            if past_caches:
                _row_onto_memory(zt, g, S, q, count, b, out, q)
            else:
                _row_onto(zt, g, S, q, count, b, out, q)
    if past_caches:
        _settle()


@inner
def _passes_caches(out):
    """Whether curves are too much for the caches, and their vectors whole lines of memory."""
    apart = out.ctypes.data % VECTOR_BYTES + out.strides[0] % VECTOR_BYTES
    apart += out.strides[1] % VECTOR_BYTES
    return apart == 0 and out.size * out.itemsize >= HUGE


@inner
def _update(U, V, zt, B, lo, hi, out):
    """out = B + [U V] ztᵀ in rows of whole vectors, for as many of them as a vector has lanes."""
    for q in range(lo, hi, VECTOR_BYTES // U.itemsize):
        for c in range(zt.shape[0]):
            _dots_onto(U, V, q, zt, c, B, out)


@inner
def _update_in_tiles(U, V, z, B, lo, hi, out):
    """The same for whole vectors of columns, and for as many rows at a time as a tile has."""
    lanes, k = VECTOR_BYTES // U.itemsize, B.shape[1]
    tiles = _up(k, WIDTH * lanes) // (WIDTH * lanes)
    fetched = _up(HEIGHT, tiles) // tiles if k * B.itemsize > SHORT else 0
    for q in range(lo, hi, HEIGHT):
        start, stop = q + AHEAD, min(q + AHEAD + HEIGHT, hi)
        for j in range(0, k, WIDTH * lanes):
            if j + (WIDTH - 1) * lanes < k:
                _tile_of_parts(U, V, q, z, j, B, out)
            else:
                _narrow_tile_of_parts(U, V, q, z, j, B, out)
            for p in range(start, min(start + fetched, stop)):
                _fetch_row(U, V, B, p)
            start += fetched


@jit
def update_tasks(first, last, blocks, size, adds, U, V, scale, factors, Z, B, out):
    """out[g] = B + F Z[g] (F Z[g] unless adds) over the rows of each task, for each g of a grid."""
    n, m, grid, k = U.shape[1], U.shape[2] + V.shape[2], Z.shape[0], Z.shape[3]
    lanes = VECTOR_BYTES // U.itemsize
    few, many = k < FEW, grid > 1 and k < FEW
    plain = scale.shape[0] == 0 == factors.shape[0] and adds
    if few:
        direct = plain and grid == 1 and U.shape[2] % lanes == 0 == V.shape[2] % lanes
    else:
        row = max(U.shape[2], V.shape[2], k) * U.itemsize
        direct = plain and grid == 1 and k % lanes == 0 and row <= MEDIUM
    past_caches = many and _passes_caches(out)
    panel = LONG if grid > 1 or factors.shape[0] > 0 else _panel_rows(U, V)
    columns = grid * k
    P, S = _panel(panel, m, lanes, U), _panel(m, panel, lanes, U)
    Y = _panel(columns, panel, lanes, U) if few else _panel(panel, columns, lanes, U)
    z, zt = np.zeros((m, _up(columns, lanes)), U.dtype), np.zeros((0, 0), U.dtype)
    if few:
        zt = np.zeros((_up(columns, HEIGHT) if many else k, _up(m, lanes)), U.dtype)
    for task in range(first, last):
        e, start = task // blocks, (task % blocks) * size
        b = B[min(e, B.shape[0] - 1)]
        _side_by_side(Z, e, z, zt)
        end = min(start + size, n)
        if direct:
            u, v = U[min(e, U.shape[0] - 1)], V[min(e, V.shape[0] - 1)]
            whole = end - (end - start) % (lanes if few else HEIGHT)
            if few:
                _update(u, v, zt, b, start, whole, out[0, e])
            else:
                _update_in_tiles(u, v, z, b, start, whole, out[0, e])
            start = whole
        for lo in range(start, end, panel):
            rows = min(panel, end - lo)
            done = 0
            if many:
                _frame_columns(U, V, scale, factors, e, lo, rows, S)
                if adds and k == 1:
                    done = rows - rows % (WIDTH * lanes)
                    _curves(zt, S[:m], done, lanes, b[lo:].T, past_caches, out[:, e, lo:, 0])
                _multiply(zt, S[:m, done:], rows - done, columns, lanes, Y)
            else:
                _frame_rows(U, V, scale, factors, e, lo, rows, P, S)
                if few:
                    _multiply_few(P, zt, rows, lanes, Y)
                else:
                    _multiply(P, z, columns, rows, lanes, Y)
            for g in range(grid):
                if few:
                    _write_transposed(Y, g * k, b, adds, out[g, e], lo + done, rows - done)
                else:
                    _write(Y, g * k, b, adds, out[g, e], lo, rows)


@inner
def _side_by_side(Z, e, z, zt):
    """z = [Z[0, e] Z[1, e] …], and its transpose where that has room."""
    for g in range(Z.shape[0]):
        for i in range(Z.shape[2]):
            for c in range(Z.shape[3]):
                z[i, g * Z.shape[3] + c] = Z[g, e, i, c]
                if zt.shape[0] > 0:
                    zt[g * Z.shape[3] + c, i] = Z[g, e, i, c]


@inner
def _bars(U, V, Yb, B, lo, rows, w, x, C, D):
    """Rows of C = [U V Yb B] w and D = [U V Yb B] x."""
    whole = rows - rows % PAIR
    for j in range(0, U.shape[1], VECTOR_BYTES // U.itemsize):
        for q in range(0, whole, PAIR):
            _pair(U, V, Yb, B, lo + q, w, x, j, C, D, q)
        for q in range(whole, rows):
            _pair_of_rows(U, V, Yb, B, lo + q, w, x, j, C, D, q)


@inner
def _combine(U, V, Yb, B, lo, hi, w, x, zt, Uo, Vo, Bo):
    """The combination in whole vectors, for as many rows at a time as a vector has lanes.

    What a vector writes beyond the end of its row, later ones overwrite.
    """
    lanes = VECTOR_BYTES // U.itemsize
    vectors = -(-U.shape[1] // lanes)
    for q in range(lo, hi, lanes):
        for p in range(q, q + lanes, PAIR):
            for j in range(vectors):
                _pair(U, V, Yb, B, p, w, x, (vectors - 1 - j) * lanes, Uo, Vo, p)
        for c in range(zt.shape[0]):
            _dots_onto(U, V, q, zt, c, Yb, Bo)


@jit
def combine_tasks(first, last, blocks, size, U, V, Yb, B, M, T, Uo, Vo, Bo):
    """[Uo Vo] = [U V Yb B] M and Bo = Yb + [U V] T over the rows of each task."""
    n, r, k = U.shape[1], U.shape[2], Yb.shape[2]
    lanes = VECTOR_BYTES // U.itemsize
    few, wide = k < FEW, _up(r, lanes)
    # Where the second part begins, and how many rows a vector can reach beyond its own.
    middle, reach = wide if few else r, -(-(wide - r) // max(1, r))
    P = _panel(MOST, 2 * wide, lanes, U)
    C, D = _panel(MOST, r, lanes, U), _panel(MOST, r, lanes, U)
    Y = _panel(k, MOST, lanes, U) if few else _panel(MOST, k, lanes, U)
    z, zt = np.zeros((2 * middle, _up(k, lanes)), U.dtype), np.zeros((0, 0), U.dtype)
    if few:
        zt = np.zeros((k, 2 * wide), U.dtype)
    w, x = _panel(2 * (r + k), r, lanes, U), _panel(2 * (r + k), r, lanes, U)
    for task in range(first, last):
        e, start = task // blocks, (task % blocks) * size
        u, v = U[min(e, U.shape[0] - 1)], V[min(e, V.shape[0] - 1)]
        yb, b = Yb[min(e, Yb.shape[0] - 1)], B[min(e, B.shape[0] - 1)]
        uo, vo, bo = Uo[e], Vo[e], Bo[e]
        _side_by_side(T[None, :, :r], e, z, zt)
        _side_by_side(T[None, :, r:], e, z[middle:], zt[:, middle:])
        _side_by_side(M[None, :, :, :r], e, w, zt[:0])
        _side_by_side(M[None, :, :, r:], e, x, zt[:0])
        end = min(start + size, n)
        whole = start + max(0, end - reach - start) // lanes * lanes
        if few:
            _combine(u, v, yb, b, start, whole, w, x, zt, uo, vo, bo)
            start = whole
        for lo in range(start, end, MOST):
            rows = min(MOST, end - lo)
            if lo + rows <= whole:
                _combine(u, v, yb, b, lo, lo + rows, w, x, zt, uo, vo, bo)
            else:
                _bars(u, v, yb, b, lo, rows, w, x, C, D)
                _write(C, 0, uo, False, uo, lo, rows)
                _write(D, 0, vo, False, vo, lo, rows)
            _place(U, e, lo, rows, P, 0)
            _place(V, e, lo, rows, P, middle)
            if few:
                _multiply_few(P, zt, rows, lanes, Y)
                _write_transposed(Y, 0, yb, True, bo, lo, rows)
            else:
                _multiply(P, z, k, rows, lanes, Y)
                _write(Y, 0, yb, True, bo, lo, rows)
