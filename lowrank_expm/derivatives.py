"""Derivatives of (U, V, B, t) ↦ exp(t(U Vᴴ − V Uᴴ)) B, forward and reverse.

Both need a few passes over the rows and one derivative of the m × m core; nothing of size n × n,
and nothing of length n for each doubling. No basis enters, so the result does not depend on one,
and nothing is divided by a gap between eigenvalues: repeated and zero angles are harmless.

Complex arrays follow the real inner product ⟨A, B⟩ = Re tr(AᴴB): a cotangent Ȳ stands for the
real-linear functional dY ↦ ⟨Ȳ, dY⟩. A real argument gets a real cotangent.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import _inputs, _linear, core
from ._array import adjoint
from .passes import Frame
from .passes.numpy_passes import combine, no_vectors, project, real_columns, update

__all__ = ["jvp", "vjp"]

Cotangents = tuple[np.ndarray, np.ndarray, np.ndarray, Any]


def jvp(
    U: Any, V: Any, B: Any, dU: Any, dV: Any, dB: Any, *, t: Any = 1.0, dt: Any = 0.0
) -> tuple[np.ndarray, np.ndarray]:
    """Y = exp(t(U Vᴴ − V Uᴴ)) B and its derivative in a direction.

    Parameters
    ----------
    U, V : array_like, (n,) or (…, n, r)
    B : array_like, (n,) or (…, n, k)
    dU, dV, dB : array_like or None
        The direction, in the shapes of U, V and B; None stands for zero.
    t : float or 1-D array_like, optional
    dt : float or 1-D array_like, optional
        The direction of t.

    Returns
    -------
    Y, dY : ndarray
        In the shape and dtype of `skew_expm_multiply`.

    Raises
    ------
    ValueError, TypeError
        As `skew_expm_multiply`; also for a direction that does not fit its argument.

    Notes
    -----
    With X = [U V], T = XᴴB and the core C, dY = dB + dX C T + X (dC T + C dT). The derivative dC
    follows the steps that made C. O(n m² + n m k + m³).

    Examples
    --------
    The derivative with respect to t is S Y:

    >>> import numpy as np
    >>> from lowrank_expm import derivatives
    >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    >>> Y, dY = derivatives.jvp(x, y, x, None, None, None, t=0.0, dt=1.0)
    >>> Y, dY + 0.0
    (array([1., 0.]), array([ 0., -1.]))
    """
    p = _problem(U, V, B, t)
    dts = np.broadcast_to(_inputs.times(dt).values, p.t.shape).astype(p.t.dtype)
    dU = _direction("dU", dU, p.U, np.shape(U))
    dV = _direction("dV", dV, p.V, np.shape(V))
    dB = p.fold(_direction("dB", dB, p.B, np.shape(B)))
    pairs = [
        _one_jvp(p, t, dt, dU, dV, dB) for t, dt in zip(np.ravel(p.t), dts.ravel(), strict=True)
    ]
    return p.stack([Y for Y, _ in pairs]), p.stack([dY for _, dY in pairs])


def vjp(U: Any, V: Any, B: Any, *, t: Any = 1.0) -> tuple[np.ndarray, Callable[[Any], Cotangents]]:
    """Y = exp(t(U Vᴴ − V Uᴴ)) B and the map from a cotangent of Y to those of the arguments.

    Parameters
    ----------
    U, V : array_like, (n,) or (…, n, r)
    B : array_like, (n,) or (…, n, k)
    t : float or 1-D array_like, optional

    Returns
    -------
    Y : ndarray
        In the shape and dtype of `skew_expm_multiply`.
    pullback : callable
        ``pullback(Ybar)`` returns (Ubar, Vbar, Bbar, tbar) in the shapes of U, V, B and t, real
        where those are real. It may be called any number of times, as long as U, V and B are
        not changed.

    Raises
    ------
    ValueError, TypeError
        As `skew_expm_multiply`; the pullback for a Ybar that does not fit Y.

    Notes
    -----
    With P = XᴴȲ, Z = C T and T̄ = CᴴP: B̄ = Ȳ + X T̄ and X̄ = Ȳ Zᴴ + B T̄ᴴ + X (Ḡ + Ḡᴴ), where Ḡ,
    the adjoint of G ↦ C applied to P Tᴴ, is the forward derivative of the core at −t. One pass
    forms P, a second one all three cotangents: O(n m² + n m k + m³) time, and m × m arrays are
    all that is kept.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm import derivatives
    >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    >>> Y, pullback = derivatives.vjp(x, y, x, t=0.5)
    >>> Ubar, Vbar, Bbar, tbar = pullback(np.array([0.0, 1.0]))
    >>> round(tbar, 12) == round(-np.cos(0.5), 12)
    True
    """
    p = _problem(U, V, B, t)
    shapes = np.shape(U), np.shape(V), np.shape(B)
    Y = p.stack([_forward(p, t) for t in np.ravel(p.t)])

    def pullback(Ybar: Any) -> Cotangents:
        Ybar = _direction("Ybar", Ybar, Y, Y.shape)
        slices = Ybar if p.t.ndim else Ybar[None]
        parts = [
            _one_vjp(p, t, p.fold(Yi if p.vector is False else Yi[..., None]))
            for t, Yi in zip(np.ravel(p.t), slices, strict=True)
        ]
        sums = _sum_parts(p, parts)
        Ubar, Vbar, Bbar = (
            _summed_to(a, like, shape)
            for a, like, shape in zip(sums, (p.U, p.V, p.B), shapes, strict=True)
        )
        tbar = np.array([part[3] for part in parts], p.t.dtype)
        return Ubar, Vbar, Bbar, tbar if p.t.ndim else float(tbar[0])

    return Y, pullback


class _Problem(NamedTuple):
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
    def side_by_side(self) -> bool:
        """Whether a batch of B is folded into columns."""
        return self.U.ndim == self.V.ndim == 2 and self.B.ndim > 2

    def fold(self, a: np.ndarray) -> np.ndarray:
        """An array of B's shape, or of Y's without a grid, as the passes take it."""
        if self.work.kind != "c":
            a = real_columns(a, self.work)
        if self.side_by_side:
            n, k = a.shape[-2:]
            a = np.moveaxis(a.reshape(-1, n, k), 0, 1).reshape(n, -1)
        return a

    def unfold(self, a: np.ndarray) -> np.ndarray:
        """The inverse of `fold`, for an array of Y's shape without a grid."""
        kind = _inputs.with_kind(_inputs.real_part(self.dtype), self.B, self.U, self.V)
        if self.side_by_side:
            *batch, n, _ = self.shape
            a = np.moveaxis(a.reshape(n, -1, a.size // max(1, n * math.prod(batch))), 1, 0)
        return np.ascontiguousarray(a).view(kind).reshape(self.shape)

    def stack(self, parts: list[np.ndarray]) -> np.ndarray:
        """Results for each t as one array in the shape and dtype of Y."""
        grid = (len(parts),) if self.t.ndim else ()
        Y = np.empty((*grid, *self.shape), self.dtype)
        for target, part in zip(Y if grid else [Y], parts, strict=True):
            target[...] = self.unfold(part)
        return Y[..., 0] if self.vector else Y


def _problem(U: Any, V: Any, B: Any, t: Any) -> _Problem:
    """Check the arguments and make the one pass that all derivatives need."""
    U, V = _inputs.factors(("U", U), ("V", V))
    B, vector = _inputs.vectors(B, U.shape[-2])
    times = _inputs.times(t)
    batch = _inputs.batch(f"U, V and B of shapes {U.shape}, {V.shape} and {B.shape}", U, V, B)
    dtype = _inputs.floating(U.dtype, V.dtype, B.dtype, times.promotes)
    real = _inputs.real_part(dtype)
    work = _inputs.with_kind(real, U, V)
    shape = (*batch, *B.shape[-2:])
    values = times.values.astype(real)
    frame = Frame((U, V))
    nothing = no_vectors(0, work)
    draft = _Problem(U, V, B, vector, values, shape, dtype, work, frame, None, B, nothing, nothing)
    folded = draft.fold(B)
    frame, G, T = _linear.gram_in_range(frame, folded, values, work)
    scale = frame.scale
    if scale is not None:
        r = U.shape[-1]
        frame = Frame((U * scale[..., None, :r], V * scale[..., None, r:]))
    return draft._replace(frame=frame, scale=scale, folded=folded, G=G, T=T)


def _forward(p: _Problem, t: np.ndarray) -> np.ndarray:
    """Y for one t, folded, by the route that "auto" takes."""
    U, V = p.frame.columns
    real = _inputs.real_part(p.dtype)
    s = _linear.solve(U, V, p.folded, np.asarray(t), "auto", real, p.G, p.T)
    batch = np.broadcast_shapes(p.frame.batch, p.folded.shape[:-2])
    Y = np.empty((*batch, *p.folded.shape[-2:]), np.result_type(p.work, p.T))
    _linear.apply(s, s.C, p.folded, Y, s.T)
    return Y


def _one_jvp(
    p: _Problem, t: np.ndarray, dt: np.ndarray, dU: np.ndarray, dV: np.ndarray, dB: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Y and dY for one t, folded."""
    Y = _forward(p, t)
    dY = np.empty_like(Y)
    if not p.frame.width:
        dY[...] = dB
        return Y, dY
    if p.scale is not None:
        r = dU.shape[-1]
        dU, dV = dU * p.scale[..., None, :r], dV * p.scale[..., None, r:]
    moved = Frame((dU, dV))
    inner = np.concatenate([project(p.frame, d, p.work) for d in (dU, dV)], axis=-1)
    dT = project(moved, p.folded, p.work) + project(p.frame, dB, p.work)
    C, dC = core.skew_derivative(p.G, np.asarray(t), inner + adjoint(inner))
    CT = C @ p.T
    update(p.frame, dC @ p.T + C @ dT + dt * _apply_j(p.T + p.G @ CT), dB, p.work, dY)
    return Y, update(moved, CT, dY, p.work, dY)


def _one_vjp(p: _Problem, t: np.ndarray, Ybar: np.ndarray) -> tuple[np.ndarray, ...]:
    """The cotangents of U, V, the folded B, and t, for one t and a folded Ȳ."""
    P = project(p.frame, Ybar, p.work)
    back, Gbar = core.skew_derivative(p.G, -np.asarray(t), P @ adjoint(p.T))
    Z, Tbar = adjoint(back) @ p.T, back @ P
    tbar = np.real(np.conj(P) * _apply_j(p.T + p.G @ Z)).sum()
    U, V, B = combine(p.frame, Ybar, p.folded, Gbar + adjoint(Gbar), Z, Tbar, p.work)
    if p.scale is not None:
        r = U.shape[-1]
        U, V = U * p.scale[..., None, :r], V * p.scale[..., None, r:]
    return U, V, p.unfold(B), tbar


def _sum_parts(p: _Problem, parts: list[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """The cotangents of U, V and B, summed over a grid of t."""
    if len(parts) == 1:
        return list(parts[0][:3])
    if parts:
        return [np.sum([part[i] for part in parts], axis=0) for i in range(3)]
    return [np.zeros(a.shape, p.work) for a in (p.U, p.V, p.B)]


def _apply_j(right: np.ndarray) -> np.ndarray:
    """J @ right."""
    r = right.shape[-2] // 2
    return np.concatenate([right[..., r:, :], -right[..., :r, :]], axis=-2)


def _direction(name: str, d: Any, like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A tangent or cotangent in the shape of its argument, with a column axis; None is zero."""
    if d is None:
        return np.zeros(like.shape, like.dtype if like.dtype.kind in "fc" else float)
    d = _inputs.array(name, d)
    if d.shape != tuple(shape):
        raise ValueError(f"{name} has shape {d.shape}; it must have the shape {tuple(shape)}")
    if d.dtype.kind == "c" and like.dtype.kind != "c":
        raise TypeError(f"{name} is complex and what it belongs to is real; pass a real {name}")
    if not np.isfinite(d).all():
        raise ValueError(f"{name} contains NaN or infinity; it must be finite")
    return d.reshape(like.shape)


def _summed_to(a: np.ndarray, like: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """A cotangent summed over the axes along which its argument was broadcast, real if that is."""
    extra = a.ndim - like.ndim
    axes = tuple(range(extra)) + tuple(
        extra + i for i in range(like.ndim - 2) if like.shape[i] == 1 != a.shape[extra + i]
    )
    if axes:
        a = a.sum(axis=axes, keepdims=False)
    a = a.real if a.dtype.kind == "c" and like.dtype.kind != "c" else a
    return a.reshape(shape).astype(_inputs.floating(like.dtype), copy=False)
