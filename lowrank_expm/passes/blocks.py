"""Blocks of rows that are never in one place: sums and a frame of each, merged as a tree.

A block X of rows gives G = XᴴX and T = XᴴB. Where its Gram matrix is ill-conditioned or leaves
the range of its dtype, the block adds a frame of its own, X = F R, while it is in memory. The
frames of all blocks give one of all rows without another look at them: with [Rᵢ] = Q R for the
Rᵢ on top of each other, diag(Fᵢ) Q is orthonormal because both factors are. This is direct TSQR
(Benson, Gleich and Demmel 2013, doi:10.1109/BigData.2013.6691583), except that the Fᵢ are not
stored: their rows are computed from X wherever they are needed.

Blocks whose Gram matrix is well-conditioned when taken together have its Cholesky factor for R:
their own frames are dropped, and usually none is ever made.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from .basis import cholesky, largest_entries, robust_basis
from .frame import Frame
from .numpy_passes import accumulate, gram

# The smallest eigenvalue of a Gram matrix scaled to unit diagonal with which its Cholesky factor
# leaves an error of a few u in the frame.
SOUND = 0.1


class Piece(NamedTuple):
    """A run of rows with one frame F = X diag(scale) R₁⁻¹…: X = F R, G = FᴴF, T = FᴴB."""

    rows: int
    scale: np.ndarray | None
    factors: tuple[np.ndarray, ...]
    R: np.ndarray
    G: np.ndarray
    T: np.ndarray


class Sums(NamedTuple):
    """G = XᴴX and T = XᴴB of a run of rows, in double precision.

    `pieces` are empty where G is well-conditioned and in the range of `dtype`.
    """

    rows: int
    G: np.ndarray
    T: np.ndarray
    dtype: np.dtype
    pieces: tuple[Piece, ...] = ()

    @property
    def finite(self) -> bool:
        """Whether nothing overflowed and no operand was NaN or infinite."""
        return bool(np.isfinite(self.G).all() and np.isfinite(self.T).all())


class Joint(NamedTuple):
    """The frame diag(Fᵢ Mᵢ) of all rows: X = F R, G = FᴴF, T = FᴴB, and the Mᵢ."""

    R: np.ndarray
    G: np.ndarray
    T: np.ndarray
    mixes: list[np.ndarray]


def block_sums(frame: Frame, B: np.ndarray, dtype: np.dtype) -> Sums:
    """The sums of one block, without a piece."""
    with np.errstate(over="ignore", invalid="ignore"):
        G, T = accumulate(frame, B, dtype)
    return Sums(frame.rows, wide(G), wide(T), dtype)


def with_piece(sums: Sums, frame: Frame, B: np.ndarray) -> Sums:
    """The sums of one block of finite numbers, with its own frame where they do not suffice."""
    if _sound(sums, zeros=_no_column_underflows(frame, sums.G)):
        return sums
    dtype = sums.dtype
    scale = _unit_scale(frame, dtype)
    frame = Frame(frame.columns, scale)
    basis = robust_basis(frame, gram(frame, dtype), B, dtype)
    R = wide(basis.R) / scale[..., None, :]
    return sums._replace(
        pieces=(Piece(sums.rows, scale, basis.frame.factors, R, wide(basis.G), wide(basis.T)),)
    )


def merged(parts: Sequence[Sums]) -> Sums:
    """The sums of consecutive runs of blocks, added in their order."""
    with np.errstate(over="ignore", invalid="ignore"):
        G = sum((s.G for s in parts[1:]), parts[0].G)
        T = sum((s.T for s in parts[1:]), parts[0].T)
    total = Sums(sum(s.rows for s in parts), G, T, parts[0].dtype)
    if _sound(total):
        return total
    return total._replace(pieces=tuple(p for s in parts for p in _pieces(s)))


def joined(sums: Sums) -> tuple[tuple[Piece, ...], Joint]:
    """The pieces of all blocks and the frame that they make together, close to orthonormal."""
    pieces = _pieces(sums)
    lengths = [np.sqrt(np.maximum(diagonal(p.G), 0)) for p in pieces]
    stack = [w[..., :, None] * p.R for p, w in zip(pieces, lengths, strict=True)]
    Q, R = np.linalg.qr(np.concatenate(stack, axis=-2))
    parts = np.split(Q, len(pieces), axis=-2)
    mixes = [
        np.where(w > 0, 1 / np.where(w > 0, w, 1), 0)[..., :, None] * part
        for part, w in zip(parts, lengths, strict=True)
    ]
    G = sum(_adjoint(M) @ p.G @ M for p, M in zip(pieces, mixes, strict=True))
    T = sum(_adjoint(M) @ p.T for p, M in zip(pieces, mixes, strict=True))
    return pieces, Joint(R, G, T, mixes)


def _pieces(sums: Sums) -> tuple[Piece, ...]:
    """The pieces of a run of blocks; a well-conditioned Gram matrix makes one."""
    if sums.pieces:
        return sums.pieces
    factor = cholesky(sums.G)[0].astype(sums.dtype)
    R = wide(factor)
    half = _substituted(R, sums.G)
    G = _substituted(R, _adjoint(half))
    return (Piece(sums.rows, None, (factor,), R, G, _substituted(R, sums.T)),)


def _substituted(R: np.ndarray, right: np.ndarray) -> np.ndarray:
    """R⁻ᴴ right, with the columns of R scaled to one size first."""
    size = np.abs(R).max(axis=-2)[..., None]
    return np.linalg.solve(_adjoint(R) / size, right / size)


def _sound(sums: Sums, zeros: bool = True) -> bool:
    """Whether a Gram matrix is well-conditioned and its squares are far from the range's ends.

    A zero on its diagonal is a column of zeros, unless `zeros` is false: then one underflowed.
    """
    if not (zeros and sums.finite):
        return False
    d = diagonal(sums.G)
    reach = 0.75 * np.finfo(sums.dtype).maxexp
    if not ((d == 0) | (d > 2.0**-reach)).all() or not (d < 2.0**reach).all():
        return False
    root = np.sqrt(np.where(d > 0, d, 1))
    scaled = sums.G / root[..., :, None] / root[..., None, :] + (d == 0)[..., None] * np.eye(
        d.shape[-1]
    )
    return bool((np.linalg.eigvalsh(scaled) > SOUND).all())


def _no_column_underflows(frame: Frame, G: np.ndarray) -> bool:
    """Whether zeros on the diagonal of a Gram matrix are columns of zeros."""
    zero = diagonal(G) == 0
    return not zero.any() or not (_largest(frame)[zero] > 0).any()


def _unit_scale(frame: Frame, dtype: np.dtype) -> np.ndarray:
    """Powers of two that bring the largest entry of each column to about one."""
    top = np.finfo(dtype).maxexp - 2
    _, exponent = np.frexp(_largest(frame))
    return np.ldexp(1.0, np.clip(-exponent, -top, top)).astype(np.empty(0, dtype).real.dtype)


def _largest(frame: Frame) -> np.ndarray:
    """The largest absolute entry of each column of [U V], (…, m)."""
    batch = frame.batch
    parts = [largest_entries(a) for a in frame.columns]
    return np.concatenate([np.broadcast_to(a, (*batch, a.shape[-1])) for a in parts], axis=-1)


def diagonal(G: np.ndarray) -> np.ndarray:
    """The real diagonal of the last two axes."""
    return np.diagonal(G, axis1=-2, axis2=-1).real


def wide(a: np.ndarray) -> np.ndarray:
    """The array in double precision."""
    return a.astype(np.complex128 if a.dtype.kind == "c" else np.float64)


def _adjoint(a: np.ndarray) -> np.ndarray:
    """The conjugate transpose of the last two axes."""
    return np.conj(np.matrix_transpose(a))
