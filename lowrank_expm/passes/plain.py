"""The two passes for one small problem of contiguous arrays of one dtype: next to no Python.

The same kernels as `numpy_passes`, called once, and so the same bits.
"""

from __future__ import annotations

import numpy as np

from .numpy_passes import (
    block_rows,
    combined,
    real_factor,
    real_view,
    tree_sum,
    writable_alias,
)
from .watch import done

# Entries of U and B up to which waking a second thread takes longer than it saves.
LARGEST = 1 << 17

_NO_SCALE = {char: np.empty((0, 0), char) for char in "df"}
_NO_FACTORS = {char: np.empty((0, 1, 0, 0), char) for char in "df"}


def is_plain(U: np.ndarray, V: np.ndarray, B: np.ndarray) -> bool:
    """Whether these functions take the arrays."""
    return (
        type(U) is type(V) is type(B) is np.ndarray
        and U.dtype is V.dtype is B.dtype
        and U.dtype.char in "dDfF"
        and U.ndim == 2
        and U.shape == V.shape
        and 1 <= B.ndim <= 2
        and len(B) == len(U)
        and 0 < U.size + B.size <= LARGEST
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
    H = tree_sum(partial)[0]
    sums = combined(H, U.dtype) if U.dtype.kind == "c" else H.astype(U.dtype, copy=False)
    m = len(sums)
    return np.ascontiguousarray(sums[:, :m]), sums[:, m:]


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
