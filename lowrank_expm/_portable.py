"""exp(t(U Vᴴ − V Uᴴ)) B on arrays of other libraries: the same passes, core and routes as for
NumPy, in array-API operations, with one look at the values at most.

Where values may be looked at freely (a library on the CPU) the core takes the order and the
squarings that it needs. On a device the route "auto" works within a bound on the squarings and
then looks once, at its certificate and all that can go wrong; what does not pass is done again
by "qr". The route "gram" by name never looks: it works within a larger bound, beyond which, as
for values that are not finite, the result is NaN. So does "auto" under tracing.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from . import core
from ._array import (
    Array,
    adjoint,
    device,
    diagonal,
    eps,
    eye,
    is_complex,
    library,
    namespace,
    spread,
    to_host,
)
from ._foreign import Arguments, arguments, require_finite, size
from ._tangent import Direct, Framed, Gram, Linearised
from .core import spectral
from .core.certificate import settled, trusted_up_to
from .core.exponential import Core, apply_j, skew_of
from .passes import Frame, passes_for

# Bounds on the squarings: where nothing is looked at, and where one look decides afterwards.
STATIC = 16
SPECULATIVE = 4


# Whether a solution is certified, whether it is finite, and the squarings that it needed.
Examined = tuple[bool, bool, float]


class Solved(NamedTuple):
    """A solved exponential I + F C Fᴴ with T = FᴴB; `R` gives X = F R where F is not X itself."""

    frame: Frame | None
    G: Array | None
    T: Array
    core: Core
    route: str
    R: Array | None
    within: int | None

    @property
    def C(self) -> Array:
        """The core's matrix."""
        return self.core.C


def multiply(U: Any, V: Any, B: Any, t: Any, method: str, out: Any = None) -> Any:
    """exp(t(U Vᴴ − V Uᴴ)) B."""
    if _is_lazy(U, V, B, t):
        from . import _dask

        return _dask.multiply(U, V, B, t, method, out)
    if "torch" in map(library, (U, V, B, t)):
        from . import _torch

        return _torch.multiply(U, V, B, t, method, out)
    a = arguments(U, V, B, t)
    Y = a.unfold(forward(a, method))
    return Y if out is None else written(out, Y)


def _is_lazy(*given: Any) -> bool:
    """Whether dask arrays are among the arguments: these have passes, and a graph, of their own."""
    return any(library(a) == "dask" for a in given)


def forward(a: Arguments, method: str) -> Array:
    """The same for checked arguments, folded."""
    if not size(a.shape) or not a.U.shape[-1]:
        return unchanged(a)
    if library(a.U) == "jax":
        from . import _jax

        return _jax.exponential(method, a.U, a.V, a.B, a.t)
    s = solve(a, method)
    return applied(s, s.core.C, s.T, a.B, a.t.ndim)


def unchanged(a: Arguments) -> Array:
    """B in the shape of the result."""
    xp, k = namespace(a.U), a.B.shape[-1]
    return xp.broadcast_to(a.B, (*a.shape[:-1], k)) + xp.zeros(
        (), dtype=a.B.dtype, device=device(a.B)
    )


def applied(s: Solved, C: Array, T: Array, B: Array, grid: int = 0) -> Array:
    """(I + F C Fᴴ) B with T = FᴴB; `grid` leading axes of C are a grid."""
    C = spread(C, grid, max(T.ndim, B.ndim))
    if s.frame is None:
        return B + C @ B
    return passes_for(B).update(s.frame, C @ T, B)


def written(out: Any, Y: Array) -> Array:
    """`out` with a result in it, where the library lets one write."""
    if library(out) != library(Y) or library(Y) not in ("torch", "cupy", "array_api_strict"):
        raise TypeError("out must be an array of the same library, and one that can be written to")
    if tuple(out.shape) != tuple(Y.shape) or out.dtype != Y.dtype:
        raise ValueError(
            f"out has shape {tuple(out.shape)} and dtype {out.dtype}; "
            f"the result has shape {tuple(Y.shape)} and dtype {Y.dtype}"
        )
    out[...] = Y
    return out


def solve(a: Arguments, method: str) -> Solved:
    """The exponential by the route that the method, or the certificate, asks for."""
    if a.blind:  # a compiler that traces this knows no np.errstate
        return _solve(a, method)
    with np.errstate(over="ignore", invalid="ignore", divide="ignore"):
        return _solve(a, method)


def _solve(a: Arguments, method: str) -> Solved:
    """The same, whatever NumPy warns of underneath a library."""
    route, within = choice(a, method)
    if not looks(a, method):
        return attempt(a, route, within)

    def attempted(route: str, within: int | None) -> tuple[Solved, Callable[[], Examined]]:
        s = attempt(a, route, within)
        return s, lambda: examined(a, s)

    s: Solved = looked_at(a, route, within, attempted)
    return s


def looks(a: Arguments, method: str) -> bool:
    """Whether the values may be looked at."""
    return not (a.blind or method == "gram")


def choice(a: Arguments, method: str) -> tuple[str, int | None]:
    """The route to try first, and the bound on the squarings to work within."""
    n, r = a.U.shape[-2:]
    route = "gram" if method == "auto" else method
    if n <= 2 * r and method != "gram":
        route = "direct"
    return route, bound(a, not looks(a, method))


def bound(a: Arguments, blind: bool) -> int | None:
    """The bound on the squarings to work within."""
    if blind:
        return STATIC
    return None if a.on_host else SPECULATIVE


def attempt(a: Arguments, route: str, within: int | None) -> Solved:
    """The exponential by one route; NaN where `within` does not suffice or squares do not fit."""
    if route == "direct":
        return _by_direct(a, within)
    if route == "qr":
        return _by_qr(a, within)
    G, T = passes_for(a.B).accumulate(Frame((a.U, a.V)), a.B)
    return by_gram(a, G, T, within)


def by_gram(a: Arguments, G: Array, T: Array, within: int | None) -> Solved:
    """The route through the Gram matrix G = XᴴX, with T = XᴴB."""
    c = _core(G, a.t, None, within)
    if within is None:
        c = c._replace(bound=settled(c.bound, c.C, G))
    c = c._replace(C=_kept(c.C, _squares_fit(diagonal(G), a.t)))
    return Solved(Frame((a.U, a.V)), G, T, c, "gram", None, within)


def _kept(C: Array, where: Array) -> Array:
    """The elements of a batch of matrices where a condition holds; NaN elsewhere."""
    xp = namespace(C)
    one = xp.ones(where.shape, dtype=C.dtype, device=device(C))
    return C * xp.where(where, one, one * xp.nan)[..., None, None]


def _core(G: Array | None, t: Array, W: Array | None, within: int | None) -> Core:
    """The core, with a grid's axis in front of the batch's."""
    ndim = (W if G is None else G).ndim - 2  # type: ignore[union-attr]
    if t.ndim:
        t = namespace(t).reshape(t, (*t.shape, *(1,) * ndim))
    return core.skew_unchecked(G, t, W, within)


def looked_at(
    a: Arguments,
    route: str,
    within: int | None,
    attempted: Callable[[str, Any], tuple[Any, Callable[[], Examined]]],
) -> Any:
    """The result of an attempt that passed its examination, or else that of another one."""
    result, examine = attempted(route, within)
    passed, finite, squarings = examine()
    if passed:
        return result
    if not finite:
        require_finite(U=a.U, V=a.V, B=a.B, t=a.t)
    route = "direct" if route == "direct" else "qr"
    result, examine = attempted(route, None if within is None else _enough(squarings, a))
    if not (finite or examine()[0]):
        raise ValueError("the result overflows; scale t, U, V or B down, or use a wider dtype")
    return result


def _enough(squarings: float, a: Arguments) -> int:
    """A bound for RJRᴴ from what JG needed: its 1-norm is at most √m times its 2-norm."""
    known = squarings if math.isfinite(squarings) else float(STATIC)
    return int(known) + math.ceil(0.5 * math.log2(2 * a.U.shape[-1])) + 1


def examined(a: Arguments, s: Solved) -> Examined:
    """Whether a solution is certified, whether all is finite, and the squarings: one look."""
    if not size(s.core.C.shape):
        return True, True, 0.0
    if s.within is None:
        passed, finite = verdict(a, s)
        return bool(to_host(passed)), bool(to_host(finite)), float(s.core.squarings)
    passed, finite, squarings = to_host(evidence(a, s))
    return bool(passed), bool(finite), float(squarings)


def evidence(a: Arguments, s: Solved) -> Array:
    """What `examined` looks at, in one array."""
    xp = namespace(s.T)
    flags = [xp.astype(flag, a.t.dtype) for flag in verdict(a, s)]
    return xp.stack([*flags, xp.max(s.core.squarings)])


def verdict(a: Arguments, s: Solved) -> tuple[Array, Array]:
    """Whether a solution is certified, and whether all is finite."""
    xp, m = namespace(s.T), s.core.C.shape[-1]
    finite = xp.all(xp.isfinite(a.t)) & xp.all(xp.isfinite(s.T))
    squarings = s.core.squarings
    if s.within is None:
        finite = finite & (squarings >= 0)
    else:
        finite = finite & xp.all(xp.isfinite(squarings))
    passed = xp.all(s.core.bound <= trusted_up_to(m, eps(s.T) / 2))
    passed = passed & xp.all(xp.isfinite(s.core.C))
    longest = 1.0
    if s.G is not None:
        longest = xp.sqrt(xp.max(diagonal(s.G)))
        finite = finite & xp.all(xp.isfinite(s.G))
    if size(s.T.shape):
        reach = xp.max(xp.abs(s.core.C)) * xp.max(xp.abs(s.T)) * longest
        passed = passed & (reach * float(m * m) < float(xp.finfo(s.T.dtype).max) / 1024)
    return passed & finite, finite


def _squares_fit(d: Array, t: Array) -> Array:
    """Whether squared column lengths are not huge, and small only where their pair is harmless."""
    xp = namespace(d)
    info = xp.finfo(d.dtype)
    top, digits, r = math.log2(float(info.max)), -math.log2(float(info.eps)), d.shape[-1] // 2
    high, low = 2.0 ** (0.75 * top), 2.0 ** (-0.75 * top)
    reach = xp.max(xp.abs(t))
    partner = xp.concat([d[..., r:], d[..., :r]], axis=-1)
    harmless = (partner + 2.0 ** (-top)) * reach * reach <= 2.0 ** (0.75 * top - 2 * digits - 14)
    return xp.all((d < high) & ((d > low) | harmless), axis=-1)


def _by_direct(a: Arguments, within: int | None) -> Solved:
    """The route without a frame."""
    M = a.U @ adjoint(a.V)
    return Solved(None, None, a.B, _core(None, a.t, M - adjoint(M), within), "direct", None, within)


def _by_qr(a: Arguments, within: int | None) -> Solved:
    """The route through an orthonormal basis of balanced columns."""
    Q, R = _basis(a)
    return by_basis(a, Q, R, adjoint(Q) @ a.B, within)


def by_basis(a: Arguments, Q: Array, R: Array, T: Array, within: int | None) -> Solved:
    """The same with the basis given: Q R = [U V] but for the scaling, and T = QᴴB."""
    c = _core(None, a.t, skew_of(R), within)
    return Solved(Frame((Q,)), None, T, c, "qr", R, within)


def _basis(a: Arguments) -> tuple[Array, Array]:
    """An orthonormal Q and a triangular R with balanced columns [U V] = Q R."""
    U, V = balanced(a.U, a.V)
    basis = namespace(U).linalg.qr(passes_for(U).beside(U, V))
    return basis[0], basis[1]


def triangular(a: Arguments) -> Array:
    """The R of balanced columns."""
    return _basis(a)[1]


def balanced(U: Array, V: Array) -> tuple[Array, Array]:
    """U and V with the columns of each pair scaled by powers of two to one size."""
    xp = namespace(U)
    scales = scale_of(U, V)
    return tuple(a * xp.astype(c, a.dtype) for a, c in zip((U, V), scales, strict=True))


def scale_of(U: Array, V: Array) -> tuple[Array, Array]:
    """Powers of two c and 1/c, (…, 1, r), that bring the columns of U c and V/c to one size."""
    xp = namespace(U)
    u, v = (xp.max(xp.abs(a), axis=-2, keepdims=True) for a in (U, V))
    one = xp.ones_like(u + v)
    live = (u > 0) & (v > 0)
    gap = xp.log2(xp.where(live, v, one)) - xp.log2(xp.where(live, u, one))
    c = xp.pow(2.0 * one, xp.round(0.5 * gap))
    return c, 1.0 / c


def linearise(a: Arguments, t: Array) -> tuple[Array, Linearised]:
    """exp(tS)B for one t, folded, and its derivatives by the same route."""
    a = a._replace(t=t)
    s = solve(a, "auto")
    return applied(s, s.core.C, s.T, a.B), derivative(a, s)


def derivative(a: Arguments, s: Solved) -> Linearised:
    """The derivatives of a solved exponential, for one t."""
    if s.route == "direct":
        return Direct.of(a.U, a.V, a.t, a.B, s.within)
    X = Frame((a.U, a.V))
    if s.route == "gram":
        assert s.G is not None
        return Gram(X, s.G, s.T, a.t, a.B, s.within)
    assert s.R is not None
    assert s.frame is not None
    R = s.R / passes_for(a.U).beside(*scale_of(a.U, a.V))
    spectrum = spectral.spectrum(skew_of(s.R))
    return Framed(X, s.frame, eye(R), apply_j(adjoint(R)), spectrum, s.T, a.t, a.B)


def general_multiply(L: Any, R: Any, B: Any, t: Any, out: Any = None) -> Any:
    """exp(t L Rᴴ) B."""
    if _is_lazy(L, R, B, t):
        from . import _dask

        return _dask.general_multiply(L, R, B, t, out)
    a = arguments(L, R, B, t, names=("L", "R"), real_t=False)
    if not size(a.shape) or not a.U.shape[-1]:
        return a.unfold(unchanged(a))
    Y = a.unfold(_general_forward(a))
    return Y if out is None else written(out, Y)


def _general_forward(a: Arguments) -> Array:
    """The same for checked arguments."""
    if library(a.U) == "jax":
        from . import _jax

        return _jax.general(a.U, a.V, a.B, a.t)
    try:
        Y = general(a, STATIC if a.blind or not a.on_host else None)
    except ValueError:
        require_finite(L=a.U, R=a.V, B=a.B, t=a.t)
        raise
    if not a.blind:
        require_range(a, Y)
    return Y


def general(a: Arguments, within: int | None) -> Array:
    """The same within a bound on the squarings."""
    L, R, B, t = a.U, a.V, a.B, a.t
    xp = namespace(L)
    M = adjoint(R) @ L
    if is_complex(t) and not is_complex(M):
        M = xp.astype(M, t.dtype)
    if t.ndim:
        t = xp.reshape(t, (*t.shape, *(1,) * (M.ndim - 2)))
    C = spread(core.general(M, t, within).C, a.t.ndim, max(L.ndim, R.ndim, B.ndim))
    if is_complex(C) and not is_complex(B):
        L, R, B = (xp.astype(x, C.dtype) for x in (L, R, B))
    return B + L @ (C @ (adjoint(R) @ B))


def require_range(a: Arguments, Y: Array) -> None:
    """Raise, with the reason, unless a result is finite: one look."""
    xp = namespace(Y)
    if bool(to_host(xp.all(xp.isfinite(Y)))):
        return
    require_finite(L=a.U, R=a.V, B=a.B, t=a.t)
    raise ValueError("exp(t L Rᴴ) B overflows; scale t, L or R down")
