"""Derivatives of (U, V, B, t) ↦ exp(t(U Vᴴ − V Uᴴ)) B, forward and reverse.

Both need a few passes over the rows and one derivative of an m × m function; nothing of size
n × n, and nothing of length n for each doubling. The result does not depend on a basis, and
nothing is divided by a gap between eigenvalues: repeated and zero angles are harmless.

Complex arrays follow the real inner product ⟨A, B⟩ = Re tr(AᴴB): a cotangent Ȳ stands for the
real-linear functional dY ↦ ⟨Ȳ, dY⟩. A real argument gets a real cotangent.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from . import _inputs, _range
from ._array import is_foreign
from ._problem import Problem, direction, problem, size, summed_to, time_direction
from ._tangent import Linearised, Targets, require_range

__all__ = ["jvp", "vjp"]

Arrays = tuple[np.ndarray, np.ndarray, np.ndarray]
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
        The direction, in the shapes of U, V and B; None stands for zero. The result has the dtype
        of Y, so that a wider direction is rounded to that.
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
        As `skew_expm_multiply`; also for a direction that does not fit its argument, and a result
        that overflows.

    Notes
    -----
    With X = [U V], T = XᴴB and the core C, dY = dB + dX C T + X (dC T + C dT). The derivative dC
    follows the steps that made C. Where U and V nearly span the same directions, an orthonormal
    basis and the eigenvalues of a small matrix take the place of the core, as exact for repeated
    eigenvalues as for distant ones. O(n m² + n m k + m³).

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
    if is_foreign(U, V, B, t):
        from ._portable_derivatives import jvp

        return jvp(U, V, B, dU, dV, dB, t, dt)
    p = problem(U, V, B, t)
    dts = time_direction(dt, p.t)
    given = ("dU", dU, p.U, np.shape(U)), ("dV", dV, p.V, np.shape(V)), ("dB", dB, p.B, np.shape(B))
    (dU, dV, dB), sizes = zip(*(direction(*g) for g in given), strict=True)
    quiet = _range.ordinary(p, [p.dtype], size(p.folded), *sizes, size(dts))
    dU, dV = p.scaled(dU, dV)
    dB = p.fold(dB)
    moved = dU, dV, dB, dts
    b, d = (0, 0) if quiet else (_range.excess(p.work, p.folded), _range.excess(p.work, *moved))
    dU, dV, dts = (_range.times_powers(a, -d) for a in (dU, dV, dts))
    dB = _range.times_powers(dB, -d, -b)
    pairs = [_one_jvp(p, t, dt, dU, dV, dB, b) for t, dt in zip(p.times, dts.ravel(), strict=True)]
    with np.errstate(over="ignore", invalid="ignore"):
        dY = p.stack([_range.times_powers(dY, d, b) for _, dY in pairs])
    if not quiet:
        require_range(dY)
    return p.stack([Y for Y, _ in pairs]), dY


def vjp(U: Any, V: Any, B: Any, *, t: Any = 1.0) -> tuple[np.ndarray, Callable[..., Cotangents]]:
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
        ``pullback(Ybar, out=None)`` returns (Ubar, Vbar, Bbar, tbar) in the shapes of U, V, B and
        t, real where those are real. It may be called any number of times, as long as U, V and B
        are not changed. ``out`` is three NumPy arrays for Ubar, Vbar and Bbar, in their shapes
        and the floating dtypes of U, V and B, that overlap neither each other nor the arguments:
        for long arrays new memory costs as much as the arithmetic. Each cotangent has the dtype
        of its argument, integers counting as float64: a wider Ybar is rounded to that.

    Raises
    ------
    ValueError, TypeError
        As `skew_expm_multiply`; the pullback for a Ybar that does not fit Y, an `out` that does not
        fit U, V and B, or a result that overflows.

    Notes
    -----
    With P = XᴴȲ, Z = C T and T̄ = CᴴP: B̄ = Ȳ + X T̄ and X̄ = Ȳ Zᴴ + B T̄ᴴ + X (Ḡ + Ḡᴴ), where Ḡ,
    the adjoint of G ↦ C applied to P Tᴴ, is the forward derivative of the core at −t. One pass
    forms P, a second one all three cotangents: O(n m² + n m k + m³) time, and m × m arrays are
    all that is kept. Where U and V nearly span the same directions it goes through an orthonormal
    basis, as in `jvp`, with three more passes.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm import derivatives
    >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    >>> Y, pullback = derivatives.vjp(x, y, x, t=0.5)
    >>> Ubar, Vbar, Bbar, tbar = pullback(np.array([0.0, 1.0]))
    >>> bool(abs(tbar + np.cos(0.5)) < 1e-12)
    True
    """
    if is_foreign(U, V, B, t):
        from ._portable_derivatives import vjp

        return vjp(U, V, B, t)
    p = problem(U, V, B, t)
    shapes = np.shape(U), np.shape(V), np.shape(B)
    results, linears = zip(*map(p.linearised, p.times), strict=True) if p.t.size else ((), ())
    Y = p.stack(results)

    def pullback(Ybar: Any, *, out: Any = None) -> Cotangents:
        Ybar, length = direction("Ybar", Ybar, Y, Y.shape)
        targets = None
        if out is not None:
            _check_out(out, (p.U, p.V, p.B), shapes, Ybar)
            targets = _targets(p, out)
        *bars, tbar = _pulled_back(p, linears, Ybar, length, targets)
        Ubar, Vbar, Bbar = (a.reshape(s) for a, s in zip(bars, shapes, strict=True))
        if out is not None:
            for target, bar in zip(out, (Ubar, Vbar, Bbar), strict=True):
                if not np.may_share_memory(target, bar):
                    target[...] = bar
            Ubar, Vbar, Bbar = out
        return Ubar, Vbar, Bbar, tbar if p.t.ndim else float(tbar)

    return Y, pullback


def _pulled_back(
    p: Problem, linears: Sequence[Linearised], Ybar: np.ndarray, length: float, out: Targets = None
) -> tuple[np.ndarray, ...]:
    """The cotangents of p.U, p.V, p.B and p.t; `length` is the size of Ȳ, `linears` for every t."""
    likes = p.U, p.V, p.B
    dtypes = [_inputs.floating(a.dtype) for a in likes]
    quiet = _range.ordinary(p, dtypes, size(p.folded), length)
    parts = (_parts if quiet else _scaled_parts)(p, linears, Ybar, out)
    tbar = np.array([part[3] for part in parts], p.t.dtype).reshape(p.t.shape)
    with np.errstate(over="ignore", invalid="ignore"):
        sums = zip(_sum_parts(p, parts), likes, strict=True)
        bars = *(summed_to(a, like, like.shape) for a, like in sums), tbar
    if not quiet:
        require_range(*bars)
    return bars


def _scaled_parts(
    p: Problem, linears: Sequence[Linearised], Ybar: np.ndarray, out: Targets
) -> list[tuple[np.ndarray, ...]]:
    """`_parts` by way of a smaller Ȳ and B, where these are so large that products overflow."""
    y, b = _range.excess(p.work, Ybar), _range.excess(p.work, p.folded)
    if not (y or b):
        return _parts(p, linears, Ybar, out)
    smaller = [_range.for_smaller(linear, b) for linear in linears]
    parts = _parts(p, smaller, _range.times_powers(Ybar, -y), None)
    powers = (y, b), (y, b), (y,), (y, b)
    with np.errstate(over="ignore", invalid="ignore"):
        return [
            tuple(_range.times_powers(a, *e) for a, e in zip(part, powers, strict=True))
            for part in parts
        ]


def _parts(
    p: Problem, linears: Sequence[Linearised], Ybar: np.ndarray, out: Targets
) -> list[tuple[np.ndarray, ...]]:
    """The cotangents of U, V, B and t for every t."""
    slices = Ybar if p.t.ndim else Ybar[None]
    return [
        _one_vjp(p, linear, p.fold(Yi[..., None] if p.vector else Yi), out)
        for linear, Yi in zip(linears, slices, strict=True)
    ]


def _one_jvp(
    p: Problem,
    t: np.ndarray,
    dt: np.ndarray,
    dU: np.ndarray,
    dV: np.ndarray,
    dB: np.ndarray,
    power: int,
) -> tuple[np.ndarray, np.ndarray]:
    """Y for one t, and dY for B/2^power, folded; the direction is that of the scaled columns."""
    Y, linear = p.linearised(t)
    if not p.frame.width or not p.frame.rows:
        return Y, dB + np.zeros_like(Y)
    with p.quiet_blas(), np.errstate(over="ignore", invalid="ignore"):
        return Y, _range.for_smaller(linear, power).jvp(dU, dV, dB, dt)


def _check_out(out: Any, like: Arrays, shapes: tuple[tuple[int, ...], ...], Ybar: Any) -> None:
    """Refuse memory that is not right for Ubar, Vbar and Bbar."""
    if not isinstance(out, tuple | list) or len(out) != 3:
        raise TypeError("out must be three arrays, for Ubar, Vbar and Bbar")
    for i, (target, a, shape) in enumerate(zip(out, like, shapes, strict=True)):
        if type(target) is not np.ndarray:
            raise TypeError(f"out[{i}] is a {type(target).__name__}; pass a NumPy array")
        dtype = _inputs.floating(a.dtype)
        if target.shape != shape or target.dtype != dtype:
            raise ValueError(
                f"out[{i}] has shape {target.shape} and dtype {target.dtype}; "
                f"it must have shape {shape} and dtype {dtype}"
            )
        if not target.flags.writeable:
            raise ValueError(f"out[{i}] is read-only; pass a writable array")
        if any(_inputs.overlap(target, other) for other in (*like, Ybar, *out[:i])):
            raise ValueError(
                f"out[{i}] overlaps an argument or an earlier array of out; "
                "pass arrays of their own memory"
            )


def _targets(p: Problem, out: Arrays) -> Targets:
    """`out` as the last pass writes it, or None where that needs other shapes or dtypes."""
    whole = p.t.size == 1 and p.scale is None and not p.side_by_side
    batch = p.shape[:-2]
    U, V, B = p.U, p.V, p.B
    if not (whole and U.shape[:-2] == V.shape[:-2] == B.shape[:-2] == batch):
        return None
    if not all(a.dtype == p.work and a.flags.c_contiguous and a.flags.aligned for a in out):
        return None
    u, v, b = (a.reshape(like.shape) for a, like in zip(out, (U, V, B), strict=True))
    return u, v, b


def _one_vjp(
    p: Problem, linear: Linearised, Ybar: np.ndarray, out: Targets
) -> tuple[np.ndarray, ...]:
    """The cotangents of U, V, B, and t, for one t and a folded Ȳ."""
    if not p.frame.width or not p.frame.rows:
        U, V = (np.zeros(a.shape, p.work) for a in (p.U, p.V))
        B = Ybar.astype(np.result_type(p.G, p.T))  # a copy, also where nothing changes
        return U, V, p.unfold(B), np.zeros(())
    with p.quiet_blas(), np.errstate(over="ignore", invalid="ignore"):
        U, V, B, tbar = linear.vjp(Ybar, out)
    return *p.scaled(U, V), p.unfold(B), tbar


def _sum_parts(p: Problem, parts: list[tuple[np.ndarray, ...]]) -> list[np.ndarray]:
    """The cotangents of U, V and B, summed over a grid of t."""
    if len(parts) == 1:
        return list(parts[0][:3])
    if parts:
        return [np.sum([part[i] for part in parts], axis=0) for i in range(3)]
    return [np.zeros(a.shape, p.work) for a in (p.U, p.V, p.B)]
