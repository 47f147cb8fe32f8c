"""The two passes for contiguous arrays of one dtype, one small problem or a range of a batch.

The same kernels as `numpy_passes` with next to no Python around them, and so the same bits.
"""

from __future__ import annotations

import math

import numpy as np

from .numpy_passes import (
    FLUSH_ROWS,
    block_rows,
    combined,
    real_factor,
    real_view,
    tree_sum,
    writable_alias,
)
from .watch import done, watched

# Entries of U and B up to which waking a second thread takes longer than it saves.
LARGEST = 1 << 17

_NO_SCALE = {char: np.empty((0, 0), char) for char in "df"}
_NO_FACTORS = {char: np.empty((0, 1, 0, 0), char) for char in "df"}


def is_plain(U: np.ndarray, V: np.ndarray, B: np.ndarray) -> bool:
    """Whether these functions take the arrays."""
    return (
        _are_alike(U, V, B)
        and U.ndim == 2
        and 1 <= B.ndim <= 2
        and len(B) == len(U)
        and U.size + B.size <= LARGEST
    )


def is_plain_batch(U: np.ndarray, V: np.ndarray, B: np.ndarray) -> bool:
    """Whether `Batch` takes the arrays: elements of one block of rows, and no progress to show."""
    return (
        _are_alike(U, V, B)
        and U.ndim == B.ndim > 2
        and U.shape[:-1] == B.shape[:-1]
        and U.shape[-2] <= FLUSH_ROWS
        and not (watched() and math.prod(U.shape[:-1]) > 4 * FLUSH_ROWS)
    )


def _are_alike(U: np.ndarray, V: np.ndarray, B: np.ndarray) -> bool:
    """Whether there are entries, of one dtype and in the order that kernels want."""
    return (
        type(U) is type(V) is type(B) is np.ndarray
        and U.dtype is V.dtype is B.dtype
        and U.dtype.char in "dDfF"
        and U.dtype.isnative
        and U.shape == V.shape
        and U.size * B.size > 0
        and all(a.flags.c_contiguous and a.flags.aligned for a in (U, V, B))
    )


def is_plain_output(out: np.ndarray, U: np.ndarray, V: np.ndarray, B: np.ndarray) -> bool:
    """Whether the result for plain arrays can be written to `out`: B itself, or far from all."""
    inputs = (U, V) if out is B else (U, V, B)
    return (
        type(out) is np.ndarray
        and out.dtype is B.dtype
        and out.shape == B.shape
        and out.flags.c_contiguous
        and out.flags.aligned
        and out.flags.writeable
        and not any(np.may_share_memory(out, a) for a in inputs)
    )


def accumulate(U: np.ndarray, V: np.ndarray, B: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """G = XᴴX and T = XᴴB for X = [U V]."""
    from .kernels import accumulate_tasks

    u, v, b = _rows(U), _rows(V), _rows(B)
    n, m, char = len(U), 2 * u.shape[2], u.dtype.char
    size = block_rows(n, m * (m + b.shape[2]))
    blocks = -(-n // size)
    partial = np.zeros((1, blocks, m, m + b.shape[2]))
    none = _NO_SCALE[char], _NO_FACTORS[char]
    accumulate_tasks(0, blocks, blocks, size, True, u, v, *none, b, partial[0])
    done("accumulate", n)
    return _parts(tree_sum(partial)[0], U.dtype)


def _parts(H: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """G and T from their real sums."""
    sums = combined(H, dtype) if dtype.kind == "c" else H.astype(dtype, copy=False)
    m = sums.shape[-2]
    return np.ascontiguousarray(sums[..., :m]), sums[..., m:]


def update(
    U: np.ndarray, V: np.ndarray, Z: np.ndarray, B: np.ndarray, out: np.ndarray | None
) -> np.ndarray:
    """B + X Z, in `out` if that is given."""
    from .kernels import update_tasks

    u, v, b = _rows(U), _rows(V), _rows(B)
    Y = np.empty_like(B) if out is None else out
    none = _NO_SCALE[u.dtype.char], _NO_FACTORS[u.dtype.char]
    z = real_factor(Z, U.dtype)[None, None]
    update_tasks(0, 1, 1, len(U), True, u, v, *none, z, b, _rows(Y)[None])
    done("update", len(U))
    return Y


def _rows(a: np.ndarray) -> np.ndarray:
    """An array as the kernels read it: (1, n, real columns)."""
    return writable_alias(real_view(a)).reshape(1, len(a), -1)


class Batch:
    """Both passes over ranges of the elements of a batch, which threads may share out."""

    def __init__(self, U: np.ndarray, V: np.ndarray, B: np.ndarray, out: np.ndarray) -> None:
        self.dtype = U.dtype
        self.u, self.v, self.b, self.out = (_elements(a) for a in (U, V, B, out))
        self.count, self.rows, r = self.u.shape
        m = 2 * r
        self.sums = np.zeros((self.count, m, m + self.b.shape[2]))
        char = self.u.dtype.char
        self.operands = self.u, self.v, _NO_SCALE[char], _NO_FACTORS[char]

    def accumulate(self, first: int, last: int) -> tuple[np.ndarray, np.ndarray]:
        """G and T of these elements."""
        from .kernels import accumulate_tasks

        accumulate_tasks(first, last, 1, self.rows, True, *self.operands, self.b, self.sums)
        return _parts(self.sums[first:last], self.dtype)

    def update(self, first: int, last: int, Z: np.ndarray) -> None:
        """B + X Z of these elements, Z being theirs."""
        from .kernels import update_tasks

        own = slice(first, last)
        u, v, *none = self.operands
        parts = u[own], v[own], *none, real_factor(Z, self.dtype)[None], self.b[own]
        update_tasks(0, last - first, 1, self.rows, True, *parts, self.out[None, own])

    def done(self) -> None:
        """Tell the observer, on the thread that has one."""
        for name in "accumulate", "update":
            done(name, self.count * self.rows)


def _elements(a: np.ndarray) -> np.ndarray:
    """A batch as the kernels read it: (count, n, real columns)."""
    return writable_alias(real_view(a)).reshape(-1, a.shape[-2], real_view(a).shape[-1])
