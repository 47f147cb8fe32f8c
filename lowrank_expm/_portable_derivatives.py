"""The derivatives of `derivatives` on arrays of other libraries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ._array import Array, is_complex, library, namespace
from ._foreign import Arguments, arguments, fold, same_place, unfolded, with_kind, working
from ._portable import linearise, unchanged


def jvp(U: Any, V: Any, B: Any, dU: Any, dV: Any, dB: Any, t: Any, dt: Any) -> tuple[Array, Array]:
    """Y and its derivative in a direction."""
    a = arguments(U, V, B, t)
    dU, dV = _direction("dU", dU, U, a.U), _direction("dV", dV, V, a.V)
    dB = _direction("dB", dB, B, a.B, a.folded)
    pairs = []
    for i, ti in enumerate(times(a)):
        if not _acts(a):
            one = a._replace(t=ti, shape=a.shape[a.t.ndim :])
            pairs.append((unchanged(one), unchanged(one._replace(B=dB))))
            continue
        Y, linear = linearise(a, ti)
        step = dt[i] if getattr(dt, "ndim", 0) else dt
        pairs.append((Y, linear.jvp(dU, dV, dB, step)))
    Y, dY = (_stacked(a, [pair[i] for pair in pairs]) for i in range(2))
    return Y, dY


def vjp(U: Any, V: Any, B: Any, t: Any) -> tuple[Array, Callable[..., tuple[Any, ...]]]:
    """Y and the map from a cotangent of Y to those of the arguments."""
    a = arguments(U, V, B, t)
    xp = namespace(a.U)
    if not _acts(a):
        Y = a.unfold(unchanged(a))
        parts = None
    else:
        solved = [linearise(a, ti) for ti in times(a)]
        Y = _stacked(a, [y for y, _ in solved])
        parts = [linear for _, linear in solved]

    def pullback(Ybar: Any, *, out: Any = None) -> tuple[Any, ...]:
        if out is not None:
            raise TypeError("out is for NumPy arrays; on arrays of other libraries leave it away")
        if tuple(Ybar.shape) != tuple(Y.shape):
            raise ValueError(f"Ybar has shape {tuple(Ybar.shape)}; Y has shape {tuple(Y.shape)}")
        same_place({"U": a.U, "Ybar": Ybar})
        if is_complex(Ybar) and not is_complex(Y):
            raise TypeError("Ybar is complex and what it belongs to is real; pass a real Ybar")
        bar = Ybar[..., None] if a.vector else Ybar
        bar = xp.astype(bar, with_kind(xp, working(xp, a.dtype), Y), copy=False)
        bar = fold(bar) if a.folded else bar
        bars = pulled_back(a, parts, bar)
        given = (U, V, B)
        sums = [summed_to(b, x) for b, x in zip(bars[:3], given, strict=True)]
        return (*sums, bars[3])

    return Y, pullback


def pulled_back(a: Arguments, parts: list[Any] | None, bar: Array) -> tuple[Array, ...]:
    """The cotangents of the checked arguments, summed over a grid; that of t is not."""
    xp = namespace(bar)
    if not parts:
        B = xp.sum(bar, axis=0) if a.t.ndim else bar
        return xp.zeros_like(a.U), xp.zeros_like(a.V), B, xp.zeros_like(a.t)
    slices = [bar[i, ...] for i in range(len(parts))] if a.t.ndim else [bar]
    results = [part.vjp(one) for part, one in zip(parts, slices, strict=True)]
    sums = [sum((r[i] for r in results[1:]), results[0][i]) for i in range(3)]
    tbar = xp.stack([r[3] for r in results]) if a.t.ndim else results[0][3]
    return *sums, tbar


def _acts(a: Arguments) -> bool:
    """Whether there is anything to rotate."""
    return bool(a.U.shape[-1] and a.U.shape[-2])


def times(a: Arguments) -> list[Array]:
    """Every t as an array without axes."""
    return [a.t[i] for i in range(a.t.shape[0])] if a.t.ndim else [a.t]


def _stacked(a: Arguments, parts: list[Array]) -> Array:
    """Results for each t as the caller expects them."""
    xp = namespace(a.U)
    if a.t.ndim and not parts:
        return a.unfold(unchanged(a))
    return a.unfold(xp.stack(parts) if a.t.ndim else parts[0])


def _direction(name: str, d: Any, given: Any, like: Array, folded: bool = False) -> Array:
    """A tangent in the shape and dtype of its argument; None is zero."""
    xp = namespace(like)
    if d is None:
        return xp.zeros_like(like)
    same_place({"U": like, name: d})
    if tuple(d.shape) != tuple(given.shape):
        raise ValueError(
            f"{name} has shape {tuple(d.shape)}; it must have the shape {tuple(given.shape)}"
        )
    if is_complex(d) and not is_complex(given):
        raise TypeError(f"{name} is complex and what it belongs to is real; pass a real {name}")
    d = d[:, None] if d.ndim == 1 else d
    if folded:
        return fold(xp.astype(d, with_kind(xp, like.dtype, given), copy=False))
    return xp.astype(d, like.dtype, copy=False)


def summed_to(bar: Array, given: Any) -> Array:
    """A cotangent summed over the axes along which its argument was broadcast."""
    xp, shape = namespace(bar), tuple(given.shape)
    bar = unfolded(bar, bar.dtype, False, False)
    column = shape if len(shape) > 1 else (*shape, 1)
    if is_complex(given) and not is_complex(bar):
        bar = unfolded(bar, with_kind(xp, bar.dtype, given), True, False)
    lead = bar.ndim - len(column)
    batch = [i + lead for i in range(len(column) - 2) if column[i] == 1 != bar.shape[i + lead]]
    axes = (*range(lead), *batch)
    bar = xp.sum(bar, axis=axes) if axes else bar
    if is_complex(bar) and not is_complex(given):
        bar = xp.real(bar)
    bar = xp.reshape(bar, shape)
    floating = xp.isdtype(given.dtype, ("real floating", "complex floating"))
    return xp.astype(bar, given.dtype, copy=False) if floating and library(given) else bar
