"""The arguments of a derivative: checked, folded as the passes take them, and read once."""

from __future__ import annotations

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np

from . import _inputs, _linear, _threads
from ._tangent import Linearised, linearise
from .passes import Frame
from .passes.basis import inexact
from .passes.numpy_passes import accumulate, no_vectors, real_columns


class Problem(NamedTuple):
    """An exponential with what its derivatives share.

    `B` is as given, with a column axis. Folded, it is as the passes take it: real columns where U
    and V are real, and a batch of B against one U and V side by side as columns. `T` is XᴴB for
    the folded B, and `G` the Gram matrix; `frame` has its columns scaled by `scale` if that was
    needed to keep squares in range.
    """

    U: np.ndarray
    V: np.ndarray
    B: np.ndarray
    vector: bool
    t: np.ndarray
    shape: tuple[int, ...]
    dtype: np.dtype
    work: np.dtype
    frame: Frame
    scale: np.ndarray | None
    folded: np.ndarray
    G: np.ndarray
    T: np.ndarray

    @property
    def times(self) -> list[np.ndarray]:
        """Every t as a zero-dimensional array."""
        return [np.asarray(t) for t in self.t.ravel()]

    @property
    def side_by_side(self) -> bool:
        """Whether a batch of B is folded into columns."""
        return self.U.ndim == self.V.ndim == 2 and self.B.ndim > 2

    def fold(self, a: np.ndarray) -> np.ndarray:
        """An array of B's shape, or of Y's without a grid, as the passes take it."""
        if self.work.kind != "c":
            a = real_columns(a, self.work)
        if self.side_by_side:
            n, k = a.shape[-2:]
            count = math.prod(a.shape[:-2])
            a = np.moveaxis(a.reshape(count, n, k), 0, 1).reshape(n, count * k)
        return a

    def unfold(self, a: np.ndarray) -> np.ndarray:
        """The inverse of `fold`, for an array of Y's shape without a grid."""
        kind = _inputs.with_kind(_inputs.real_part(self.dtype), self.B, self.U, self.V)
        if self.side_by_side:
            *batch, n, k = self.shape
            k *= 2 if kind.kind == "c" != a.dtype.kind else 1
            a = np.moveaxis(a.reshape(n, math.prod(batch), k), 1, 0)
        return np.ascontiguousarray(a).view(kind).reshape(self.shape)

    def scaled(self, U: np.ndarray, V: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """A direction or cotangent of U and V, as it is for the scaled columns and back."""
        if self.scale is None:
            return U, V
        r = U.shape[-1]
        return U * self.scale[..., None, :r], V * self.scale[..., None, r:]

    def quiet_blas(self) -> AbstractContextManager[None]:
        """Keep BLAS to one thread where the m × m products of derivatives are small."""
        return _threads.quiet_blas(math.prod(self.shape[:-2]), self.frame.width**3)

    def linearised(self, t: np.ndarray) -> tuple[np.ndarray, Linearised]:
        """Y for one t, folded, and its derivatives."""
        real = _inputs.real_part(self.dtype)
        return linearise(self.frame, self.G, self.T, t, self.folded, real)

    def stack(self, parts: Sequence[np.ndarray]) -> np.ndarray:
        """Results for each t as one array in the shape and dtype of Y."""
        if self.t.ndim:
            Y = np.empty((len(parts), *self.shape), self.dtype)
            for target, part in zip(Y, parts, strict=True):
                target[...] = self.unfold(part)
        else:
            Y = self.unfold(parts[0]).astype(self.dtype, copy=False)
        return Y[..., 0] if self.vector else Y


def problem(
    U: Any, V: Any, B: Any, t: Any, known: tuple[np.ndarray, np.ndarray] | None = None
) -> Problem:
    """Check the arguments and make the one pass that all derivatives need.

    `known` are the G and T of an earlier call with the same arguments, without scaled columns.
    """
    U, V = _inputs.factors(("U", U), ("V", V))
    B, vector = _inputs.vectors(B, U.shape[-2])
    times = _inputs.times(t)
    batch = _inputs.batch(f"U, V and B of shapes {U.shape}, {V.shape} and {B.shape}", U, V, B)
    dtype = _inputs.floating(U.dtype, V.dtype, B.dtype, times.promotes)
    real = _inputs.real_part(dtype)
    work = _inputs.with_kind(real, U, V)
    shape = (*batch, *B.shape[-2:])
    with np.errstate(over="ignore"):
        values = times.values.astype(real)
    frame = Frame((U, V))
    nothing = no_vectors(0, work)
    draft = Problem(U, V, B, vector, values, shape, dtype, work, frame, None, B, nothing, nothing)
    folded = draft.fold(B)
    if known is not None:
        return draft._replace(folded=folded, G=known[0], T=known[1])
    frame, G, T = _linear.gram_in_range(frame, folded, values, work)
    if frame.scale is None:
        return draft._replace(folded=folded, G=G, T=T)
    draft = draft._replace(scale=_revived(U, V, frame.scale), folded=folded)
    frame = Frame(draft.scaled(U, V))
    G, T = accumulate(frame, folded, work)
    return draft._replace(frame=frame, G=G, T=T)


def _revived(U: np.ndarray, V: np.ndarray, scale: np.ndarray) -> np.ndarray:
    """The scale with a factor for pairs with a zero column too: their derivative is not zero."""
    sizes = [np.abs(a.astype(inexact(a))).max(axis=-2, initial=0).astype(float) for a in (U, V)]
    sizes = [np.broadcast_to(a, (*scale.shape[:-1], a.shape[-1])) for a in sizes]
    u, v = (np.where(a > 0, np.rint(np.log2(np.where(a > 0, a, 1.0))), 0.0) for a in sizes)
    factor = np.exp2(np.clip(v - u, -1000, 1000)).astype(scale.dtype)
    factors = np.concatenate([factor, 1 / factor], axis=-1)
    return np.where(scale > 0, scale, factors)


def direction(
    name: str, d: Any, like: np.ndarray, shape: tuple[int, ...]
) -> tuple[np.ndarray, float]:
    """A tangent or cotangent in the shape of its argument, with a column axis, and its size.

    None is zero.
    """
    if d is None:
        return np.zeros(like.shape, like.dtype if like.dtype.kind in "fc" else float), 0.0
    d = _inputs.array(name, d)
    if d.shape != tuple(shape):
        raise ValueError(f"{name} has shape {d.shape}; it must have the shape {tuple(shape)}")
    if d.dtype.kind == "c" and like.dtype.kind != "c":
        raise TypeError(f"{name} is complex and what it belongs to is real; pass a real {name}")
    length = size(d)
    if not math.isfinite(length) and not np.isfinite(d).all():
        raise ValueError(f"{name} contains NaN or infinity; it must be finite")
    d = d.astype(np.result_type(d, np.complex64)) if like.dtype.kind == "c" != d.dtype.kind else d
    return d.reshape(like.shape), length


def size(a: np.ndarray) -> float:
    """The Frobenius norm; not finite where an entry is not, or where the squares overflow."""
    if a.dtype.char not in "fdFD":
        a = a.astype(np.result_type(a, np.float32))
    a = a.ravel(order="K") if a.flags.forc else a
    parts = (a.real, a.imag) if a.dtype.kind == "c" else (a,)
    axes = list(range(a.ndim))
    with np.errstate(over="ignore", invalid="ignore"):
        return math.sqrt(sum(float(np.einsum(x, axes, x, axes, [])) for x in parts))


def time_direction(dt: Any, t: np.ndarray) -> np.ndarray:
    """The direction of t, one number or one for each t of a grid."""
    dt = _inputs.array("dt", dt)
    if dt.dtype.kind == "c":
        raise TypeError("dt is complex and t is real; pass a real dt")
    if dt.shape not in ((), t.shape):
        raise ValueError(
            f"dt has shape {dt.shape}; it must be a number or have the shape {t.shape}"
        )
    if not np.isfinite(dt).all():
        raise ValueError("dt contains NaN or infinity; it must be finite")
    return np.broadcast_to(dt, t.shape).astype(t.dtype)


def summed_to(a: np.ndarray, like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A cotangent summed over the axes along which its argument was broadcast, real if that is."""
    extra = a.ndim - like.ndim
    axes = tuple(range(extra)) + tuple(
        extra + i for i in range(like.ndim - 2) if like.shape[i] == 1 != a.shape[extra + i]
    )
    if axes:
        a = a.sum(axis=axes, keepdims=False)
    a = a.real if a.dtype.kind == "c" and like.dtype.kind != "c" else a
    return a.reshape(shape).astype(_inputs.floating(like.dtype), copy=False)
