"""JAX: compiled attempts, one look at what they say, and derivatives of both modes.

Concrete arrays take the routes and the look of `_portable`, each attempt compiled once for its
shapes. Traced arrays cannot be looked at: they take the route "gram" (or "direct"), with up to
`_portable.STATIC` squarings, beyond which the result is NaN.

Derivatives are JAX's own, through the passes, with the core's rule in `core.differentiable`; only
the route "qr", whose basis need not have a derivative, has its own algebra, once differentiable.
Nothing of length n is kept for a squaring. Products ask for the highest precision, which devices
other than CPUs do not give by default.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np

from . import _portable
from ._array import Array, full_precision
from ._foreign import Arguments, require_finite
from ._portable import STATIC, Examined

Arrays = tuple[Array, Array, Array, Array]


@partial(jax.custom_jvp, nondiff_argnums=(0,))
def exponential(method: str, U: Array, V: Array, B: Array, t: Array) -> Array:
    """exp(t(U Vᴴ − V Uᴴ)) B for checked arguments of one precision, folded."""
    return _solved(method, U, V, B, t)[0]


@exponential.defjvp
def _exponential_jvp(method: str, primals: Arrays, tangents: Arrays) -> tuple[Array, Array]:
    """The same and its derivative, by the route that the values themselves take."""
    Y, route, within = _solved(method, *primals)
    if _arguments(*primals).blind:
        Y = exponential(method, *primals)
    return Y, _moved(route, within, primals, tangents)


def _solved(method: str, *arrays: Array) -> tuple[Array, str, int]:
    """exp(tS)B, its route, and the bound on the squarings that it was computed within."""
    a = _arguments(*arrays)
    route, _ = _portable.choice(a, method)
    if not _portable.looks(a, method):
        return _attempt(route, STATIC, *arrays)[0], route, STATIC

    def attempted(route: str, within: int) -> tuple[Any, Callable[[], Examined]]:
        Y, evidence = _attempt(route, within, *arrays)
        return (Y, route, within), lambda: _read(evidence)

    return _portable.looked_at(a, route, STATIC, attempted)


def _arguments(U: Array, V: Array, B: Array, t: Array) -> Arguments:
    """Arguments that were checked before."""
    batch = np.broadcast_shapes(U.shape[:-2], V.shape[:-2], B.shape[:-2])
    return Arguments(U, V, B, t, B.dtype, (*t.shape, *batch, *B.shape[-2:]), False, False)


def _read(evidence: Array) -> Examined:
    """An examination's result; waits for the device."""
    passed, finite, squarings = np.asarray(evidence)
    return bool(passed), bool(finite), float(squarings)


@partial(jax.jit, static_argnums=(0, 1))
def _attempt(route: str, within: int, *arrays: Array) -> tuple[Array, Array]:
    """exp(tS)B by one route, and what an examination of it looks at."""
    a = _arguments(*arrays)
    with full_precision(a.U):
        s = _portable.attempt(a, route, within)
        Y = _portable.applied(s, s.core.C, s.T, a.B, a.t.ndim)
        return Y, _portable.evidence(a, s)


@partial(jax.jit, static_argnums=(0, 1))
def _moved(route: str, within: int, primals: Arrays, tangents: Arrays) -> Array:
    """The derivative of exp(tS)B by one route."""
    if route != "qr":
        return jax.jvp(lambda *x: _attempt(route, within, *x)[0], primals, tangents)[1]
    if primals[3].ndim:
        each = partial(_framed, within)
        axes = (None, None, None, 0)
        return jax.vmap(each, in_axes=(axes, axes))(primals, tangents)
    return _framed(within, primals, tangents)


def _framed(within: int, primals: Arrays, tangents: Arrays) -> Array:
    """The derivative through an orthonormal basis that is not differentiated, for one t."""
    a = _arguments(*primals)
    with full_precision(a.U):
        s = _portable.attempt(a, "qr", within)
        assert s.frame is not None
        (Q,), R = _once((s.frame.columns, s.R))
        s = s._replace(frame=_portable.Frame((Q,)), R=R)
        dY = _portable.derivative(a, s).jvp(*tangents)
    return jax.numpy.broadcast_to(dY, a.shape)


@jax.custom_jvp
def _once(basis: Any) -> Any:
    """A basis as it is; it has no derivative."""
    return basis


@_once.defjvp
def _once_jvp(primals: Any, tangents: Any) -> Any:
    raise NotImplementedError(
        'method="qr" can be differentiated once; for second derivatives use "auto" or "gram"'
    )


def general(L: Array, R: Array, B: Array, t: Array) -> Array:
    """exp(t L Rᴴ) B for checked arguments of one precision."""
    a = _arguments(L, R, B, t)
    Y = _general(L, R, B, t)
    if not a.blind and not bool(jax.numpy.isfinite(Y).all()):
        require_finite(L=L, R=R, B=B, t=t)
        Y = _portable.general(a, None)
        _portable.require_range(a, Y)
    return Y


@jax.jit
def _general(*arrays: Array) -> Array:
    """The same within the static bound."""
    with full_precision(arrays[0]):
        return _portable.general(_arguments(*arrays), STATIC)
