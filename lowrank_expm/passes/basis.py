"""A well-conditioned frame of range([U V]) for any U and V, never stored.

For any upper triangular R, the rows of F = X R⁻¹ found by substitution satisfy F R = X to
rounding. So R need not be the exact factor: whatever it is, F with its own Gram matrix describes
the same operator, and only the conditioning of F depends on R. CholeskyQR (Yamamoto et al. 2015,
Fukaya et al. 2014, doi:10.1109/ScalA.2014.11) finds R from the Gram matrix when X is
well-conditioned; otherwise R comes from Householder QR, row block by row block. A pivot below
rounding level is lifted to it, which is all that rank-deficient X needs.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from .frame import Frame
from .numpy_passes import accumulate, release
from .watch import done

# Below 900 m u a pivot of the scaled Gram matrix no longer determines its direction.
SAFE_PIVOT = 30.0
# ‖G − I‖ above which a frame is refined once more.
ORTHONORMAL = 0.1
BLOCK_BYTES = 1 << 22


class Basis(NamedTuple):
    """A frame F, its Gram matrix G, the factor R with X = F R, and T = FᴴB."""

    frame: Frame
    G: np.ndarray
    R: np.ndarray
    T: np.ndarray


def robust_basis(
    frame: Frame,
    G: np.ndarray,
    B: np.ndarray,
    dtype: np.dtype,
    wanted: np.ndarray | None = None,
) -> Basis:
    """A well-conditioned frame of the same range, where `wanted`; elsewhere the frame as it is."""
    if wanted is None:
        wanted = np.ones(G.shape[:-2], bool)
    eye = np.broadcast_to(np.eye(G.shape[-1], dtype=dtype), G.shape)
    factor, pivot = cholesky(G)
    good = pivot > SAFE_PIVOT**2 * G.shape[-1] * np.finfo(dtype).eps
    for index in np.argwhere(wanted & ~good):
        factor[tuple(index)] = _householder(_pick(frame, tuple(index)), dtype)
    R = np.where(wanted[..., None, None], factor, eye)
    frame = Frame(frame.columns, frame.scale, (*frame.factors, R))
    G, T = accumulate(frame, B, dtype)
    rough = wanted & (np.abs(G - eye).sum(axis=-1).max(axis=-1, initial=0) > ORTHONORMAL)
    if rough.any():
        second, _ = cholesky(G)
        second = np.where(rough[..., None, None], second, eye)
        frame = Frame(frame.columns, frame.scale, (*frame.factors, second))
        R = second @ R
        G, T = accumulate(frame, B, dtype)
    return Basis(frame, G, R, T)


def balanced(frame: Frame, dtype: np.dtype) -> Frame:
    """The frame with uⱼ and vⱼ scaled by reciprocal powers of two to about equal size.

    Sizes are largest entries, which cannot over- or underflow; a pair with a zero column becomes
    zero, for it adds nothing.
    """
    u, v = (largest_entries(a) for a in frame.columns)
    live = (u > 0) & (v > 0)
    with np.errstate(invalid="ignore"):
        gap = np.log2(np.where(live, v, 1.0)) - np.log2(np.where(live, u, 1.0))
    top = np.finfo(dtype).maxexp - 2
    exponent = np.clip(np.rint(0.5 * np.nan_to_num(gap)), -top, top).astype(int)
    one = np.where(live, 1.0, 0.0)
    scale = np.concatenate([np.ldexp(one, exponent), np.ldexp(one, -exponent)], axis=-1)
    return Frame(frame.columns, scale)


def largest_entries(a: np.ndarray) -> np.ndarray:
    """The largest absolute entry of each column; not finite where the column is not."""
    step = max(1, BLOCK_BYTES // max(1, a.nbytes // max(1, a.shape[-2])))
    best = np.zeros((*a.shape[:-2], a.shape[-1]))
    for lo in range(0, a.shape[-2], step):
        part = a[..., lo : lo + step, :]
        best = np.maximum(best, np.abs(part.astype(inexact(part))).max(axis=-2, initial=0))
        done("scale", min(step, a.shape[-2] - lo))
    return best


def inexact(a: np.ndarray) -> np.dtype:
    """A dtype in which absolute values are right: that of the smallest integer is not its own."""
    return a.dtype if a.dtype.kind in "fc" else np.dtype(np.float64)


def length(a: np.ndarray, axis: int) -> np.ndarray:
    """Euclidean lengths in double precision, of vectors whose squares may leave its range."""
    if a.dtype.char == "f":  # whose squares cannot
        return np.sqrt(np.square(a, dtype=np.float64).sum(axis=axis))
    size = np.abs(a.astype(np.complex128 if a.dtype.kind == "c" else np.float64))
    top = size.max(axis=axis, initial=0, keepdims=True)
    scale = np.where((top > 0) & np.isfinite(top), top, 1)
    lengths = np.sqrt(((size / scale) ** 2).sum(axis=axis, keepdims=True)) * scale
    return np.squeeze(lengths, axis)


def first_nonfinite(a: np.ndarray) -> tuple[int, ...] | None:
    """The index of the first entry that is NaN or infinite, along the rows."""
    step = max(1, BLOCK_BYTES // max(1, a.nbytes // max(1, a.shape[-2])))
    for lo in range(0, a.shape[-2], step):
        bad = np.argwhere(~np.isfinite(a[..., lo : lo + step, :]))
        if len(bad):
            *batch, row, column = (int(i) for i in bad[0])
            return (*batch, lo + row, column)
    return None


def triangular_factor(frame: Frame, dtype: np.dtype) -> np.ndarray:
    """The Householder factor R of F = QR, (…, min(n, m), m), without squaring the condition."""
    m = frame.width
    R = np.zeros((*frame.batch, min(frame.rows, m), m), dtype)
    for index in np.ndindex(*frame.batch):
        R[index] = _stacked_qr(_pick(frame, index), dtype)
    return R


def cholesky(G: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Upper factors with pivots lifted to rounding level, and each element's smallest pivot.

    Works on the matrix scaled to unit diagonal, so that graded columns are no obstacle.
    """
    m = G.shape[-1]
    u = np.finfo(G.dtype).eps / 2
    d = np.sqrt(np.diagonal(G, axis1=-2, axis2=-1).real)
    d = np.where(d > 0, d, 1)
    A = G / d[..., :, None] / d[..., None, :]
    R = _plain_cholesky(A)
    if R is not None:
        pivots = np.diagonal(R, axis1=-2, axis2=-1).real
        return R * d[..., None, :], pivots.min(axis=-1, initial=1) ** 2
    R = np.zeros_like(A)
    smallest = np.ones(G.shape[:-2])
    for j in range(m):
        pivot = A[..., j, j].real
        smallest = np.minimum(smallest, pivot)
        root = np.sqrt(np.maximum(pivot, m * u))
        # Beyond a lifted pivot there is only rounding noise, which must not be blown up.
        row = np.where((pivot < m * u)[..., None], 0, A[..., j, :] / root[..., None])
        row[..., j] = root
        row[..., :j] = 0
        R[..., j, :] = row
        A = A - row[..., :, None].conj() * row[..., None, :]
    return R * d[..., None, :], smallest


def _plain_cholesky(A: np.ndarray) -> np.ndarray | None:
    """Upper factors by LAPACK, or None where a pivot is near rounding level."""
    m, eps = A.shape[-1], float(np.finfo(A.dtype).eps)
    try:
        R = np.conj(np.matrix_transpose(np.linalg.cholesky(A)))
    except np.linalg.LinAlgError:
        return None
    pivots = np.diagonal(R, axis1=-2, axis2=-1).real
    return R if (pivots > SAFE_PIVOT * math.sqrt(m * eps)).all() else None


def _householder(frame: Frame, dtype: np.dtype) -> np.ndarray:
    """The m × m factor of one element by Householder QR, with pivots lifted to rounding level."""
    m = frame.width
    R = np.zeros((m, m), dtype)
    R[: min(frame.rows, m)] = _stacked_qr(frame, dtype)
    length = np.linalg.norm(R, axis=0)
    length = np.where(length > 0, length, 1)
    pivot = np.diagonal(R)
    size = np.abs(pivot)
    floor = m * np.finfo(dtype).eps / 2 * length
    phase = np.where(size > floor, pivot, 1) / np.where(size > floor, size, 1)
    R = phase.conj()[:, None] * R
    np.fill_diagonal(R, np.maximum(size, floor))
    return R


def _stacked_qr(frame: Frame, dtype: np.dtype) -> np.ndarray:
    """The R of one element's rows, folded block by block."""
    n, m = frame.rows, frame.width
    step = max(4 * m, BLOCK_BYTES // (max(m, 1) * dtype.itemsize))
    R = np.zeros((0, m), dtype)
    for lo in range(0, n, step):
        rows = np.concatenate([a[lo : lo + step] for a in frame.columns], axis=-1).astype(dtype)
        if frame.scale is not None:
            rows *= frame.scale
        R = np.asarray(np.linalg.qr(np.concatenate([R, rows]), mode="r"))
        release(*frame.columns)
        done("basis", len(rows))
    return R


def _pick(frame: Frame, index: tuple[int, ...]) -> Frame:
    """One batch element, which has no factors yet."""
    batch = frame.batch
    columns = tuple(np.broadcast_to(a, (*batch, *a.shape[-2:]))[index] for a in frame.columns)
    scale = frame.scale
    if scale is not None:
        scale = np.broadcast_to(scale, (*batch, scale.shape[-1]))[index]
    return Frame(columns, scale)
