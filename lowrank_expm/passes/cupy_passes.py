"""The passes on CuPy arrays: fused kernels for skinny real problems, matrix products for others.

A skinny problem is bound by memory: one kernel reads every row of U, V and B once for the sums,
another once for the update, where products would read them three times and CuPy's batched
`matmul` would copy a transposed operand. Everything runs on the current stream and nothing waits.
"""

from __future__ import annotations

import math
from functools import cache
from typing import Any

from .._array import Array
from . import portable_passes
from .cuda_kernels import BLOCKS, OPTIONS, SOURCE, THREADS, fits, launch
from .frame import Frame
from .portable_passes import beside, combine, gram

__all__ = ["accumulate", "beside", "combine", "gram", "project", "update"]

# The largest second extent of a CUDA grid.
MOST_ELEMENTS = 65535
_NAMES = {"f": "float", "d": "double"}


def accumulate(frame: Frame, B: Array, dtype: Any = None) -> tuple[Array, Array]:
    """G = FᴴF and T = FᴴB, from one read of the rows where the problem is skinny."""
    if not _skinny(frame, B):
        return portable_passes.accumulate(frame, B)
    sums, m = _sums(frame, B), frame.width
    return _own_batch(sums[..., :m], frame), sums[..., m:]


def project(frame: Frame, B: Array, dtype: Any = None) -> Array:
    """T = FᴴB."""
    return portable_passes.project(frame, B)


def update(
    frame: Frame, Z: Array, B: Array | None, dtype: Any = None, out: Array | None = None
) -> Array:
    """B + F Z."""
    like = Z if B is None else B
    if not _skinny(frame, like) or not _matches(Z.shape[:-2], frame, B):
        return portable_passes.update(frame, Z, B)
    return _updated(frame, Z, B)


def _skinny(frame: Frame, B: Array) -> bool:
    """Whether the kernels take a problem: two real blocks of columns, and few of them."""
    if len(frame.columns) != 2 or B.dtype.char not in _NAMES:
        return False
    batches = [tuple(a.shape[:-2]) for a in (*frame.columns, B)]
    whole = max(batches, key=math.prod)
    alike = all(b in (whole, ()) for b in batches) and 0 < math.prod(whole) <= MOST_ELEMENTS
    return alike and frame.rows > 0 and fits(frame.width, B.shape[-1], B.dtype.itemsize)


def _matches(batch: tuple[int, ...], frame: Frame, B: Array) -> bool:
    """Whether an element's number modulo those of an operand is its number in the operand."""
    own = [tuple(a.shape[:-2]) for a in frame.columns]
    own += [] if B is None else [tuple(B.shape[:-2])]
    return math.prod(batch) <= MOST_ELEMENTS and all(batch[len(batch) - len(b) :] == b for b in own)


def _own_batch(G: Array, frame: Frame) -> Array:
    """G for the frame's batch, where B's is larger: its elements repeat."""
    extra = G.ndim - 2 - len(frame.batch)
    return G[(0,) * extra] if extra > 0 else G


@cache
def _kernel(name: str, char: str) -> Any:
    """A compiled kernel."""
    import cupy

    module = cupy.RawModule(code=SOURCE, options=OPTIONS)
    return module.get_function(f"{name}_{_NAMES[char]}")


def _sums(frame: Frame, B: Array) -> Array:
    """Fᴴ[F B], summed in blocks and then over them in one fixed order."""
    import cupy

    U, V, B = (cupy.ascontiguousarray(a) for a in (*frame.columns, B))
    batch = max((a.shape[:-2] for a in (U, V, B)), key=math.prod)
    n, r, k = frame.rows, U.shape[-1], B.shape[-1]
    count = math.prod(batch)
    how = launch(n, 2 * r, k, B.dtype.itemsize)
    parts = cupy.empty((*batch, how.blocks, 2 * r, 2 * r + k), B.dtype)
    counts = [math.prod(a.shape[:-2]) for a in (U, V, B)]
    arguments = (
        U,
        V,
        B,
        cupy.int64(n),
        *_ints(r, k),
        cupy.int64(how.piece),
        *_ints(*counts),
        parts,
    )
    kernel = _kernel("accumulate", B.dtype.char)
    kernel((how.blocks, count), (THREADS,), arguments, shared_mem=how.shared)
    return parts.sum(axis=-3, dtype=cupy.float64).astype(B.dtype)


def _updated(frame: Frame, Z: Array, B: Array | None) -> Array:
    """B + F Z by the kernel."""
    import cupy

    U, V, Z = (cupy.ascontiguousarray(a) for a in (*frame.columns, Z))
    B = None if B is None else cupy.ascontiguousarray(B)
    n, r, k = frame.rows, U.shape[-1], Z.shape[-1]
    batch = Z.shape[:-2]
    Y = cupy.empty((*batch, n, k), Z.dtype)
    given = 0 if B is None else B
    counts = [math.prod(a.shape[:-2]) for a in (U, V, *([] if B is None else [B]))]
    counts += [1] * (3 - len(counts))
    blocks = min(BLOCKS, -(-n * k // THREADS))
    arguments = (given, U, V, Z, cupy.int64(n), *_ints(r, k, *counts), Y)
    _kernel("update", Z.dtype.char)((blocks, math.prod(batch)), (THREADS,), arguments)
    return Y


def _ints(*numbers: int) -> list[Any]:
    """Numbers as the kernels' int arguments."""
    import cupy

    return [cupy.int32(number) for number in numbers]
