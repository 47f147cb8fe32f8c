"""The two passes for NumPy arrays: accumulate and update, streamed over blocks of rows.

The blocks depend on the shapes alone, never on the number of threads, and their sums are added
in one fixed order: results have the same bits on any number of threads.
"""

from __future__ import annotations

import math
import mmap
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from .._threads import compiling, share
from .frame import Frame
from .watch import done, watched

# A block is a multiple of the rows after which the kernels flush their sums, so that cutting a
# block into such pieces does not change a bit of its sum.
FLUSH_ROWS = 8192
# Partial sums of all blocks together take at most this much memory, or there are this few blocks.
SUM_BYTES = 1 << 24
FEW_BLOCKS = 16
# Arrays that a kernel cannot read as they are get copied, and mapped files get read, this much
# at a time.
STAGE_BYTES = 1 << 23
STREAM_BYTES = 1 << 25
# A longer grid is updated in parts of so many columns: kernels hold a panel of all of them.
GRID_COLUMNS = 4096

# Long arrays start at one place of a page, and the same rows of all then meet in one cache set:
# new ones with more bytes than this start elsewhere.
PAGE = 4096
SPREAD_BYTES = 1 << 20
# Those with more bytes than this start a little after a huge page, where the system has them: it
# clears new memory faster in whole ones.
HUGE_PAGE = 1 << 21
HUGE_BYTES = 1 << 25

Bars = tuple[np.ndarray, np.ndarray, np.ndarray]


def block_rows(n: int, sums: int = 1) -> int:
    """How many of n rows a block has, when each block's sum is `sums` numbers."""
    blocks = max(FEW_BLOCKS, SUM_BYTES // (8 * max(1, sums)))
    return -(-max(1, -(-n // blocks)) // FLUSH_ROWS) * FLUSH_ROWS


def accumulate(frame: Frame, B: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """G = FᴴF and T = FᴴB, reading every row once.

    `dtype` is the dtype of F to compute in; G has the frame's batch shape and T the broadcast one.
    """
    batch = np.broadcast_shapes(frame.batch, B.shape[:-2])
    if math.prod(batch) != frame.count:
        return gram(frame, dtype), project(frame, B, dtype)
    G, T = _accumulate(frame, B, batch, dtype, True)
    return G.reshape(*frame.batch, *G.shape[-2:]), T


def gram(frame: Frame, dtype: np.dtype) -> np.ndarray:
    """G = FᴴF."""
    return _accumulate(frame, no_vectors(frame.rows, dtype), frame.batch, dtype, True)[0]


def project(frame: Frame, B: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """T = FᴴB."""
    batch = np.broadcast_shapes(frame.batch, B.shape[:-2])
    return _accumulate(frame, B, batch, dtype, False)[1]


def no_vectors(n: int, dtype: np.dtype) -> np.ndarray:
    """A B without columns."""
    return np.zeros((n, 0), dtype)


def _accumulate(
    frame: Frame, B: np.ndarray, batch: tuple[int, ...], dtype: np.dtype, gram: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Both sums for operands of one batch shape; G is empty unless `gram`."""
    n, m, k = frame.rows, frame.width, B.shape[-1]
    G = np.zeros((*batch, m, m) if gram else (*batch, 0, 0), dtype)
    T = np.zeros((*batch, m, k), _wide(B, dtype))
    if not (math.prod(batch) and m and n and (gram or k)):
        return G, T
    if _must_split(batch, [*frame.columns, B]):
        for i in range(batch[0]):
            part, b = _element(frame, batch, i), _at(B, batch, i)
            G[i], T[i] = _accumulate(part, b, batch[1:], dtype, gram)
        return G, T
    with compiling("accumulate", dtype.char):
        H = _sums(frame, B, batch, dtype, gram)
    if gram:
        G[...] = _gram_of(H, m, dtype).reshape(G.shape)
    T[...] = _projection_of(H, dtype, T.dtype).reshape(T.shape)
    return G, T


def _sums(
    frame: Frame,
    B: np.ndarray,
    batch: tuple[int, ...],
    dtype: np.dtype,
    gram: bool,
) -> np.ndarray:
    """The real sums [FᵀF FᵀB] of every batch element, block by block and then as a tree."""
    from . import kernels  # loads numba, which importing the package must not

    n, count = frame.rows, math.prod(batch)
    work = _Work(frame, batch, dtype)
    right = _Operand(B, batch, _wide(B, dtype))
    m, k = work.width, right.width
    size = block_rows(n, count * m * (m + k))
    blocks = -(-n // size)
    partial = np.zeros((count, blocks, m, m + k))
    for e0, e1, lo, hi in _pieces(count, n, size, [*work.operands, right]):
        u, v = work.columns(e0, e1, lo, hi)
        scale, factors = work.shape_of(e0, e1)
        b = right.take(e0, e1, lo, hi)
        first, pieces = lo // size, -(-(hi - lo) // size)
        sums = partial[e0:e1, first : first + pieces].reshape(-1, m, m + k)
        common = (pieces, size, gram, u, v, scale, factors, b, sums)
        cost = min(size, n) * m * (m + k)
        share((e1 - e0) * pieces, cost, _over(kernels.accumulate_tasks, common))
        release(*work.operands, right)
        done("accumulate", (e1 - e0) * (hi - lo))
    return tree_sum(partial)


def tree_sum(partial: np.ndarray) -> np.ndarray:
    """The sum over the second axis, by halves in one fixed order."""
    while partial.shape[1] > 1:
        half = partial.shape[1] // 2
        rest = partial[:, 2 * half :]
        partial = np.concatenate([partial[:, :half] + partial[:, half : 2 * half], rest], axis=1)
    return partial[:, 0]


def update(
    frame: Frame,
    Z: np.ndarray,
    B: np.ndarray | None,
    dtype: np.dtype,
    out: np.ndarray,
) -> np.ndarray:
    """out = B + F Z (F Z where B is None), reading every row once; Z may lead with a grid axis.

    `out` has Z's batch shape and may be B itself.
    """
    if not out.size:
        return out
    batch = np.broadcast_shapes(frame.batch, () if B is None else B.shape[:-2])
    given = Z.shape[:-2]
    with compiling("update", dtype.char):
        if len(given) == len(batch) + 1 and given[1:] == batch:
            _update(frame, Z, B, dtype, out, batch)
        else:
            _update(frame, Z[None], B, dtype, out[None], given)
    return out


def _update(
    frame: Frame,
    Z: np.ndarray,
    B: np.ndarray | None,
    dtype: np.dtype,
    out: np.ndarray,
    batch: tuple[int, ...],
) -> None:
    """The update with a grid axis in front of Z and out."""
    from . import kernels

    step = max(1, GRID_COLUMNS // max(1, Z.shape[-1]))
    if len(Z) > step:
        for g in range(0, len(Z), step):
            _update(frame, Z[g : g + step], B, dtype, out[g : g + step], batch)
        return
    operands = [*frame.columns, *([] if B is None else [B])]
    if batch and (_must_split(batch, operands) or not _mergeable(out.shape[1:-2], out[0])):
        for i in range(batch[0]):
            b = None if B is None else _at(B, batch, i)
            _update(_element(frame, batch, i), Z[:, i], b, dtype, out[:, i], batch[1:])
        return
    n, count = frame.rows, math.prod(batch)
    work = _Work(frame, batch, dtype)
    wide = np.result_type(Z.dtype, dtype)
    if B is not None:
        wide = np.result_type(wide, _wide(B, dtype))
    z = real_factor(Z.reshape(len(Z), count, *Z.shape[-2:]).astype(wide, copy=False), dtype)
    right = _Operand(B, batch, wide)
    size = block_rows(n)
    flat = np.asarray(out).reshape(len(Z), count, *out.shape[-2:])
    real_out = real_view(flat) if _kernel_ready(flat, wide) else None
    read = [*work.operands, right]
    for e0, e1, lo, hi in _pieces(count, n, size, read, force=real_out is None):
        u, v = work.columns(e0, e1, lo, hi)
        scale, factors = work.shape_of(e0, e1)
        b = right.take(e0, e1, lo, hi)
        whole = len(Z) == 1 or (e1 - e0, hi - lo) == (count, n)
        if real_out is not None and whole:
            target = real_out[:, e0:e1, lo:hi]
        else:
            target = np.empty((len(Z), e1 - e0, hi - lo, z.shape[-1]), work.real)
        zz = np.ascontiguousarray(z[:, e0:e1])
        pieces = -(-(hi - lo) // size)
        common = (pieces, size, B is not None, u, v, scale, factors, zz, b, target)
        cost = min(size, n) * work.width * z.shape[-1] * len(Z)
        share((e1 - e0) * pieces, cost, _over(kernels.update_tasks, common))
        if real_out is None or not whole:
            flat[:, e0:e1, lo:hi] = target.view(wide)
        release(*read, out)
        done("update", (e1 - e0) * (hi - lo))


def combine(
    frame: Frame,
    Ybar: np.ndarray,
    B: np.ndarray,
    K: np.ndarray,
    Z: np.ndarray,
    Tbar: np.ndarray,
    dtype: np.dtype,
    out: Bars | None = None,
) -> Bars:
    """[Ū V̄] = F K + Ȳ Zᴴ + B T̄ᴴ and B̄ = Ȳ + F T̄ in one pass over the rows.

    For a frame of two unscaled column blocks; all three come in the broadcast batch shape, in the
    memory of `out` if that is given, C-contiguous and of the right dtype.
    """
    batch = np.broadcast_shapes(frame.batch, Ybar.shape[:-2], B.shape[:-2])
    r, k = frame.width // 2, Ybar.shape[-1]
    if out is None:
        widths = (r, 1024), (r, 2048), (k, 3072)
        U, V, Y = (new((*batch, frame.rows, w), dtype, offset) for w, offset in widths)
        out = U, V, Y
    if math.prod(batch) and frame.rows:
        with compiling("combine", dtype.char):
            _combine(frame, Ybar, B, _combination(K, Z, Tbar), Tbar, dtype, batch, out)
    return out


def new(shape: tuple[int, ...], dtype: np.dtype, offset: int = 0) -> np.ndarray:
    """A new array; a long one starts at this offset in a page, and so at a whole vector."""
    size = math.prod(shape) * dtype.itemsize
    if size < SPREAD_BYTES:
        return np.empty(shape, dtype)
    page = PAGE if size < HUGE_BYTES else HUGE_PAGE
    memory = np.empty(size + 2 * page, np.uint8)  # room for the page of the last bytes
    start = (offset - memory.ctypes.data) % page
    return memory[start : start + size].view(dtype).reshape(shape)


def _combine(
    frame: Frame,
    Ybar: np.ndarray,
    B: np.ndarray,
    M: np.ndarray,
    Tbar: np.ndarray,
    dtype: np.dtype,
    batch: tuple[int, ...],
    out: Bars,
) -> None:
    """[Ū V̄] = [F Ȳ B] M and B̄ = Ȳ + F T̄."""
    from . import kernels

    n, count = frame.rows, math.prod(batch)
    operands = [_Operand(a, batch, dtype) for a in (*frame.columns, Ybar, B)]
    flat = [real_view(a.reshape(count, n, a.shape[-1])) for a in out]
    M, T = (real_factor(_broadcast_flat(a, batch), dtype) for a in (M, Tbar))
    size = block_rows(n)
    for e0, e1, lo, hi in _pieces(count, n, size, operands):
        taken = [o.take(e0, e1, lo, hi) for o in operands]
        pieces = -(-(hi - lo) // size)
        targets = [a[e0:e1, lo:hi] for a in flat]
        factors = (np.ascontiguousarray(a[e0:e1]) for a in (M, T))
        common = (pieces, size, *taken, *factors, *targets)
        cost = min(size, n) * M.shape[-2] * M.shape[-1]
        share((e1 - e0) * pieces, cost, _over(kernels.combine_tasks, common))
        release(*operands)
        done("combine", (e1 - e0) * (hi - lo))


def _combination(K: np.ndarray, Z: np.ndarray, Tbar: np.ndarray) -> np.ndarray:
    """The matrix M with [Ū V̄] = [U V Ȳ B] M."""
    batch = np.broadcast_shapes(K.shape[:-2], Z.shape[:-2], Tbar.shape[:-2])
    rows = [K, *(np.conj(np.matrix_transpose(a)) for a in (Z, Tbar))]
    return np.concatenate([np.broadcast_to(a, (*batch, *a.shape[-2:])) for a in rows], axis=-2)


def _broadcast_flat(a: np.ndarray, batch: tuple[int, ...]) -> np.ndarray:
    """Matrices broadcast to a batch that is then flattened."""
    return np.broadcast_to(a, (*batch, *a.shape[-2:])).reshape(math.prod(batch), *a.shape[-2:])


def real_columns(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A complex array as an array of real columns, twice as many, of the real dtype."""
    if a.dtype.kind != "c":
        return a
    return real_view(np.ascontiguousarray(a, np.result_type(dtype, np.complex64)))


class _Operand:
    """One array as kernels read it: (1 or count, rows, width), real, C-contiguous, of one dtype."""

    def __init__(self, a: np.ndarray | None, batch: tuple[int, ...], dtype: np.dtype) -> None:
        self.dtype = dtype
        self.real = np.empty(0, self.dtype).real.dtype
        self.mapped = _mapping(a)
        if a is None:
            self.array = np.zeros((1, 0, 0), self.dtype)
            self.width = 0
            return
        n, r = a.shape[-2:]
        one = math.prod(a.shape[:-2]) == 1
        full = a if one else np.broadcast_to(a, (*batch, n, r))
        self.array = np.asarray(full).reshape(1 if one else math.prod(batch), n, r)
        self.width = r * (2 if self.dtype.kind == "c" else 1)

    @property
    def ready(self) -> bool:
        """Whether kernels can read the whole array as it is."""
        return _kernel_ready(self.array, self.dtype) and self.mapped is None

    def take(self, e0: int, e1: int, lo: int, hi: int) -> np.ndarray:
        """The rows lo..hi of elements e0..e1 as a kernel reads them; a view where that is one."""
        a = self.array
        if a.shape[1]:
            a = a[:, lo:hi] if a.shape[0] == 1 else a[e0:e1, lo:hi]
        return writable_alias(real_view(np.ascontiguousarray(a, self.dtype)))


class _Work:
    """A frame as kernels read it."""

    def __init__(self, frame: Frame, batch: tuple[int, ...], dtype: np.dtype) -> None:
        self.operands = [_Operand(a, batch, dtype) for a in frame.columns]
        self.real = self.operands[0].real
        self.width = sum(o.width for o in self.operands)
        m = frame.width
        twice = dtype.kind == "c"
        if frame.scale is None:
            self._scale = np.empty((0, 0), self.real)
        else:
            scale = _flat(frame.scale, batch, 1).astype(self.real)
            self._scale = np.repeat(scale, 2, axis=-1) if twice else scale
        factors = [_flat(R, batch, 2) for R in frame.factors]
        stack = np.stack(factors) if factors else np.empty((0, 1, m, m), dtype)
        self._factors = np.ascontiguousarray(real_factor(stack, dtype))

    def columns(self, e0: int, e1: int, lo: int, hi: int) -> tuple[np.ndarray, np.ndarray]:
        """The kernels' two column blocks; the second is empty where the frame has one."""
        taken = [o.take(e0, e1, lo, hi) for o in self.operands]
        if len(taken) == 1:
            taken.append(np.empty((1, taken[0].shape[1], 0), self.real))
        return taken[0], taken[1]

    def shape_of(self, e0: int, e1: int) -> tuple[np.ndarray, np.ndarray]:
        """Scale and factors of elements e0..e1."""
        scale = self._scale if len(self._scale) <= 1 else self._scale[e0:e1]
        factors = self._factors
        if factors.shape[1] > 1:
            factors = np.ascontiguousarray(factors[:, e0:e1])
        return scale, factors


def _flat(a: np.ndarray, batch: tuple[int, ...], axes: int) -> np.ndarray:
    """A small array with its batch axes broadcast and flattened, or of length one."""
    own = a.shape[a.ndim - axes :]
    if math.prod(a.shape[: a.ndim - axes]) == 1:
        return a.reshape(1, *own)
    return np.broadcast_to(a, (*batch, *own)).reshape(-1, *own)


def _pieces(
    count: int, n: int, size: int, operands: list[_Operand], force: bool = False
) -> Iterator[tuple[int, int, int, int]]:
    """Ranges (e0, e1, lo, hi) of elements and rows to hand to a kernel at once.

    All at once where kernels can read every operand as it is; else, or where somebody watches,
    as many elements, blocks or parts of a block as fit the staging memory.
    """
    ready = not force and all(o.ready for o in operands)
    if ready and not (watched() and n * count > 4 * size):
        yield 0, count, 0, n
        return
    copied = force or not all(o.ready or o.mapped for o in operands)
    memory = STAGE_BYTES if copied else STREAM_BYTES
    row_bytes = sum(o.width * o.real.itemsize for o in operands) or 1
    elements = min(count, memory // (n * row_bytes))
    if elements:
        for e in range(0, count, elements):
            yield e, min(e + elements, count), 0, n
        return
    step = max(memory // row_bytes // size * size, size)
    if size * row_bytes > memory:
        step = max(memory // row_bytes // FLUSH_ROWS, 1) * FLUSH_ROWS
    for e in range(count):
        for start in range(0, n, max(step, size)):
            for lo in range(start, min(start + max(step, size), n), step):
                yield e, e + 1, lo, min(lo + step, start + max(step, size), n)


def _over(kernel: Any, common: tuple[Any, ...]) -> Callable[[int, int], object]:
    """A kernel as a function of its range of tasks."""
    return lambda first, last: kernel(first, last, *common)


def _wide(B: np.ndarray, dtype: np.dtype) -> np.dtype:
    """The dtype of FᴴB: that of F, complex if B is."""
    return np.result_type(dtype, np.complex64) if B.dtype.kind == "c" else dtype


def _kernel_ready(a: np.ndarray, dtype: Any) -> bool:
    """Whether a kernel can read or write an array as it is."""
    return bool(a.dtype == dtype and a.flags.c_contiguous and a.flags.aligned)


def real_view(a: np.ndarray) -> np.ndarray:
    """A contiguous array with complex entries seen as interleaved real columns."""
    return a.view(a.real.dtype) if a.dtype.kind == "c" else a


class _Alias:
    """An array's memory without its read-only flag, for kernels that only read it."""

    def __init__(self, a: np.ndarray) -> None:
        pointer, _ = a.__array_interface__["data"]
        self.__array_interface__ = {**a.__array_interface__, "data": (pointer, False)}
        self.owner = a


def writable_alias(a: np.ndarray) -> np.ndarray:
    """The same memory, flagged writable: one compiled version then serves both kinds."""
    return a if a.flags.writeable or not a.size else np.asarray(_Alias(a))


def real_factor(z: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """A right factor for interleaved real columns: F·z becomes (real F)·(real z)."""
    real = np.empty(0, dtype).real.dtype
    if dtype.kind != "c":
        wide = np.result_type(z.dtype, dtype)
        return real_view(np.ascontiguousarray(z, wide))
    *lead, m, k = z.shape
    out = np.empty((*lead, m, 2, k, 2), real)
    out[..., 0, :, 0] = out[..., 1, :, 1] = z.real
    out[..., 0, :, 1] = z.imag
    out[..., 1, :, 0] = -z.imag
    return out.reshape(*lead, 2 * m, 2 * k)


def _gram_of(H: np.ndarray, m: int, dtype: np.dtype) -> np.ndarray:
    """The Hermitian Gram matrix from its real sums."""
    full = H[..., : m * (2 if dtype.kind == "c" else 1)]
    return combined(full, dtype) if dtype.kind == "c" else full.astype(dtype)


def _projection_of(H: np.ndarray, dtype: np.dtype, wide: np.dtype) -> np.ndarray:
    """T from its real sums, for a frame of `dtype` and a result of dtype `wide`."""
    m = H.shape[-2]
    right = H[..., m:]
    if dtype.kind == "c":
        return combined(right, wide)
    real = np.empty(0, wide).real.dtype
    return np.ascontiguousarray(right, real).view(wide)


def combined(H: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """xᴴy from the real products of interleaved real and imaginary parts."""
    *lead, m, k = H.shape
    h = H.reshape(*lead, m // 2, 2, k // 2, 2)
    out = np.empty((*lead, m // 2, k // 2), dtype)
    with np.errstate(invalid="ignore", over="ignore"):
        out.real = h[..., 0, :, 0] + h[..., 1, :, 1]
        out.imag = h[..., 0, :, 1] - h[..., 1, :, 0]
    return out


def _must_split(batch: tuple[int, ...], operands: list[np.ndarray]) -> bool:
    """Whether flattening the batch would copy a large operand."""
    if len(batch) < 2:
        return False
    for a in operands:
        if math.prod(a.shape[:-2]) == 1:
            continue
        full = np.broadcast_to(a, (*batch, *a.shape[-2:]))
        if full.nbytes > STAGE_BYTES and not _mergeable(batch, full):
            return True
    return False


def _mergeable(batch: tuple[int, ...], a: np.ndarray) -> bool:
    """Whether an array's leading axes can be flattened without a copy."""
    axes = [(n, s) for n, s in zip(batch, a.strides, strict=False) if n > 1]
    return all(s == n_inner * s_inner for (_, s), (n_inner, s_inner) in pairwise(axes))


def _at(a: np.ndarray, batch: tuple[int, ...], i: int, axes: int = 2) -> np.ndarray:
    """Element i along the first batch axis of an array that broadcasts to the batch."""
    if a.ndim - axes < len(batch):
        return a
    return a[0] if a.shape[0] == 1 else a[i]


def _element(frame: Frame, batch: tuple[int, ...], i: int) -> Frame:
    """The frame of element i along the first batch axis."""
    return Frame(
        tuple(_at(a, batch, i) for a in frame.columns),
        None if frame.scale is None else _at(frame.scale, batch, i, 1),
        tuple(_at(R, batch, i) for R in frame.factors),
    )


def _mapping(a: Any) -> mmap.mmap | None:
    """The memory map behind an array whose pages the file can bring back, if it has one."""
    while isinstance(a, np.ndarray):
        if isinstance(a, np.memmap) and a.mode != "c":
            return getattr(a, "_mmap", None)
        a = a.base
    return None


def release(*arrays: Any) -> None:
    """Give the pages of memory-mapped arrays back: they stay in the system's file cache."""
    if not hasattr(mmap, "MADV_DONTNEED"):
        return
    for a in arrays:
        mapped = a.mapped if isinstance(a, _Operand) else _mapping(a)
        if mapped is not None:
            mapped.madvise(mmap.MADV_DONTNEED)
