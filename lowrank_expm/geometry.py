"""Geodesics and parallel transport on the Stiefel and Grassmann manifolds, real and complex.

A point of the Stiefel manifold is an n × p array X of orthonormal columns, XᴴX = I; its tangents
are the D with skew-Hermitian XᴴD. A point of the Grassmann manifold is the range of such an X,
and its tangents at X are the D with XᴴD = 0. Every geodesic below is exp(tS) applied to X with a
low-rank S, so that it stays on the manifold to rounding however far it goes.

Wherever a tangent is asked for, any array of its shape will do: what counts is its orthogonal
projection to the tangents, X skew(XᴴD) + (I − XXᴴ)D or (I − XXᴴ)D.
"""

from __future__ import annotations

import functools
import math
from typing import Any, Literal, NamedTuple

import numpy as np

from . import _inputs
from ._array import adjoint
from .skew import LowRankSkew, skew_expm_multiply

__all__ = [
    "grassmann_geodesic",
    "grassmann_log",
    "grassmann_transport",
    "stiefel_geodesic",
    "stiefel_transport",
]

Metric = Literal["canonical", "euclidean"]
METRICS = ("canonical", "euclidean")
# Terms of a Taylor polynomial that is exact to double precision for a norm of at most 1.
TERMS = 20
# The angle of a transport beyond which squaring loses more than the angle explains, and how many
# numbers the coordinates may be for it.
FARTHEST = 1e5
WIDE = 4096


def stiefel_geodesic(X: Any, D: Any, t: Any = 1.0, *, metric: Metric = "canonical") -> np.ndarray:
    """Follow the geodesic of the Stiefel manifold that leaves X with velocity D.

    Parameters
    ----------
    X : array_like, (n,) or (…, n, p)
        Points: orthonormal columns. Batch axes broadcast.
    D : array_like, (n,) or (…, n, p)
        Tangents at X.
    t : float or 1-D array_like, optional
        How far to go; a one-dimensional t is a grid and adds a leading axis.
    metric : {"canonical", "euclidean"}, optional
        The canonical metric ⟨D, W⟩ = Re tr(Dᴴ(I − ½XXᴴ)W) of the quotient of the orthogonal
        group, or the metric Re tr(DᴴW) of the surrounding space.

    Returns
    -------
    ndarray, (n,) or (…, n, p)
        Orthonormal columns, with a grid axis and the broadcast batch axes in front.

    Raises
    ------
    ValueError
        Shapes that do not fit, columns of X that are not orthonormal, an unknown metric, NaN or
        infinity.
    TypeError
        As `skew_expm_multiply`.

    See Also
    --------
    grassmann_geodesic : where only the range of X counts.
    stiefel_transport : parallel transport in the canonical metric.

    Notes
    -----
    With A = XᴴD, the canonical geodesic is exp(t(P Xᴴ − X Pᴴ)) X with P = D − ½XA, and the
    Euclidean one is exp(t(D Xᴴ − X Dᴴ)) X exp(−tA): both start at X with the velocity D. The
    columns stay orthonormal to rounding at any t. O(n p² + p³) time. Edelman, Arias and Smith
    1998, doi:10.1137/S0895479895290954, sections 2.2 and 2.4; Zimmermann and Hüper 2022,
    doi:10.1137/21M1425426.

    Examples
    --------
    On the sphere, p = 1, both are great circles:

    >>> import numpy as np
    >>> from lowrank_expm.geometry import stiefel_geodesic
    >>> x, d = np.array([1.0, 0.0, 0.0]), np.array([0.0, 0.0, 2.0])
    >>> stiefel_geodesic(x, d, np.pi / 4).round(12) + 0.0
    array([0., 0., 1.])
    """
    if metric not in METRICS:
        raise ValueError(f"metric is {metric!r}; it must be one of {', '.join(METRICS)}")
    X, (D,), shape = _arguments(X, D=D)
    M = _coefficients("D", X, D)
    A = _skew(M)
    if metric == "canonical":
        return shape(skew_expm_multiply(D - X @ (M - A / 2), X, X, t))
    one = np.eye(A.shape[-1], dtype=A.dtype)
    return shape(skew_expm_multiply(D, X, X, t) @ skew_expm_multiply(one, A / 2, one, t))


def stiefel_transport(X: Any, D: Any, W: Any, t: Any = 1.0) -> np.ndarray:
    """Transport W parallel along a geodesic of the Stiefel manifold with the canonical metric.

    Parameters
    ----------
    X : array_like, (n,) or (…, n, p)
        Points: orthonormal columns. Batch axes broadcast.
    D : array_like, (n,) or (…, n, p)
        Tangents at X, the velocities of the geodesics.
    W : array_like, (n,) or (…, n, p)
        Tangents at X to transport.
    t : float or 1-D array_like, optional
        How far to go; a one-dimensional t is a grid and adds a leading axis.

    Returns
    -------
    ndarray, (n,) or (…, n, p)
        Tangents at ``stiefel_geodesic(X, D, t)``.

    Raises
    ------
    ValueError, TypeError
        As `stiefel_geodesic`; ValueError also for an angle that is too large, see below.

    See Also
    --------
    stiefel_geodesic : the curve.
    grassmann_transport : where only the range of X counts.

    Notes
    -----
    The manifold is the reductive homogeneous space of the (special) orthogonal or unitary group,
    on which the canonical metric is normal. So W is carried along by exp(tS), as the tangent
    itself is, while its coordinates w in the tangent space at X follow w′ = −½[S, w] projected
    there. With H = (I − XXᴴ)D, w = X B + H Z + (I − XXᴴ)W exp(½tA), and (B, Z) solve a linear
    equation with constant coefficients of size p × p, here by Taylor polynomials to rounding:
    O(n p² + τ p³) time with an angle τ = |t| ‖D‖, or O(n p² + p⁶ log τ) by squaring where that is
    less (for p up to 36, or 26 where X is complex). Lengths and inner products are kept, with
    errors that grow as u τ; an angle of more than 10⁵ is refused. The metric of the surrounding
    space has no such form and is not offered. Kobayashi and Nomizu, Foundations of Differential
    Geometry II, section X.2; Edelman, Arias and Smith 1998, doi:10.1137/S0895479895290954.

    Examples
    --------
    The velocity of a geodesic is parallel along it:

    >>> import numpy as np
    >>> from lowrank_expm.geometry import stiefel_geodesic, stiefel_transport
    >>> X, D = np.eye(4)[:, :2], np.array([[0.0, -1.0], [1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])
    >>> ahead, behind = stiefel_geodesic(X, D, [0.5 + 1e-5, 0.5 - 1e-5])
    >>> bool(np.allclose(stiefel_transport(X, D, D, 0.5), (ahead - behind) / 2e-5))
    True
    """
    X, (D, W), shape = _arguments(X, D=D, W=W)
    M, N = _coefficients("D", X, D), _coefficients("W", X, W)
    A, H, K = _skew(M), D - X @ M, W - X @ N
    B, Z, E = _coordinates(A, _skew(N), H, K, _inputs.times(t).values)
    return shape(LowRankSkew(H + X @ (A / 2), X).expm(t) @ (X @ B + H @ Z + K @ E))


class _State(NamedTuple):
    """Coordinates of a tangent X B + H Z + K E; K E alone does not depend on B and Z."""

    B: np.ndarray
    Z: np.ndarray
    E: np.ndarray


def _coordinates(
    A: np.ndarray, B: np.ndarray, H: np.ndarray, K: np.ndarray, t: np.ndarray
) -> _State:
    """The solution of w′ = −½[S, w] at t, from w = X B + K."""
    one = np.broadcast_to(np.eye(A.shape[-1], dtype=A.dtype), B.shape)
    HH, HK = adjoint(H) @ H, adjoint(H) @ K
    # The unit in which Z is measured, so that both halves of the equation have the norm of D.
    speed = np.linalg.norm(H, axis=(-2, -1), keepdims=True)
    unit = np.where(speed > 0, speed, 1)
    parts = A, HH / unit**2, HK / unit, unit
    steps = _steps(np.abs(t).max(initial=0), np.linalg.norm(A, axis=(-2, -1)), speed)
    start = _State(B, 0 * B, one)
    follow = _squared if _worth_squaring(steps, t.size, B) else _stepped
    state = follow(parts, start, t, steps)
    return state._replace(Z=state.Z / unit)


def _derivative(parts: tuple[np.ndarray, ...], B: Any, Z: Any, E: Any) -> _State:
    """What the equation says of a state."""
    A, HH, HK, unit = parts
    commutator = B @ A - A @ B
    turned = unit * (HH @ Z + HK @ E)
    return _State((commutator + turned - adjoint(turned)) / 2, (Z @ A - unit * B) / 2, E @ A / 2)


def _stepped(parts: Any, start: _State, t: np.ndarray, steps: int) -> _State:
    """The state at t, by steps."""
    h = t.reshape(t.shape + (1,) * start.B.ndim) / steps
    state = _State(*(a + 0 * h for a in start))
    for _ in range(steps):
        state = _taylor(functools.partial(_derivative, parts), state, h)
    return state


def _squared(parts: Any, start: _State, t: np.ndarray, steps: int) -> _State:
    """The state at t, by the exponential of the equation as one matrix."""
    from scipy.linalg import expm

    batch, p = start.B.shape[:-2], start.B.shape[-1]
    double = np.result_type(start.B, np.float64)
    out = np.empty((*t.shape, *batch, 3, p, p), double)
    parts = [np.broadcast_to(a, (*batch, *a.shape[-2:])).astype(double) for a in parts]
    states = np.stack(start, axis=-3).astype(double)
    for index in np.ndindex(*batch):
        M = _matrix(tuple(a[index] for a in parts), p, double)
        first = states[index].reshape(-1).view(float)
        for i in np.ndindex(*t.shape):
            out[i + index] = (expm(t[i] * M) @ first).view(double).reshape(3, p, p)
    return _State(*np.moveaxis(out.astype(start.B.dtype), -3, 0))


def _matrix(parts: tuple[np.ndarray, ...], p: int, dtype: np.dtype) -> np.ndarray:
    """The equation for one point as a matrix of real numbers, in double precision."""
    size = 3 * p * p * (2 if dtype.kind == "c" else 1)
    units = np.eye(size).view(dtype).reshape(size, 3, p, p)
    images = np.stack(_derivative(parts, *np.moveaxis(units, 1, 0)), axis=1)
    return np.ascontiguousarray(images).reshape(size, -1).view(float).T


def _worth_squaring(steps: int, times: int, B: np.ndarray) -> bool:
    """Whether to square, by rough counts of operations."""
    p, kind = B.shape[-1], 2 if B.dtype.kind == "c" else 1
    size = 3 * p * p * kind
    problems = times * math.prod(B.shape[:-2])
    squaring = problems * 40 * size**3
    stepping = steps * (problems * 320 * kind * p**3 + 1e7)
    return steps > 64 and size <= WIDE and squaring < stepping


def _steps(t: Any, *speeds: np.ndarray) -> int:
    """How many steps of a norm of at most 1."""
    angle = float(t) * sum(float(s.max(initial=0)) for s in speeds)
    if not angle <= FARTHEST:
        raise ValueError(
            f"an angle |t|·‖D‖ of about {angle:.1e} is too large to follow; "
            f"it may be at most {FARTHEST:.0e}: go in several parts"
        )
    return max(1, math.ceil(angle))


def _taylor(derivative: Any, state: _State, h: np.ndarray) -> _State:
    """One step of a linear equation with constant coefficients."""
    term, total = state, state
    for k in range(1, TERMS + 1):
        term = _State(*(a * (h / k) for a in derivative(*term)))
        total = _State(*(a + b for a, b in zip(total, term, strict=True)))
    return total


def grassmann_geodesic(X: Any, D: Any, t: Any = 1.0) -> np.ndarray:
    """Follow the geodesic of the Grassmann manifold that leaves the range of X with velocity D.

    Parameters
    ----------
    X : array_like, (n,) or (…, n, p)
        Orthonormal bases of subspaces. Batch axes broadcast.
    D : array_like, (n,) or (…, n, p)
        Tangents at X.
    t : float or 1-D array_like, optional
        How far to go; a one-dimensional t is a grid and adds a leading axis.

    Returns
    -------
    ndarray, (n,) or (…, n, p)
        Orthonormal bases, the horizontal lift of the geodesic that starts at X.

    Raises
    ------
    ValueError, TypeError
        As `stiefel_geodesic`.

    See Also
    --------
    grassmann_log : the velocity that leads from one subspace to another.
    grassmann_transport : parallel transport along the geodesic.

    Notes
    -----
    exp(t(H Xᴴ − X Hᴴ)) X with H = (I − XXᴴ)D: the singular values of H are the angular
    velocities. O(n p² + p³) time and no singular value decomposition. Edelman, Arias and Smith
    1998, doi:10.1137/S0895479895290954, section 2.5.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm.geometry import grassmann_geodesic
    >>> X, D = np.eye(4)[:, :2], np.zeros((4, 2))
    >>> D[2, 0] = 1.0                                 # the first axis turns to the third
    >>> grassmann_geodesic(X, D, np.pi / 2).round(12) + 0.0
    array([[0., 0.],
           [0., 1.],
           [1., 0.],
           [0., 0.]])
    """
    X, (D,), shape = _arguments(X, D=D)
    return shape(skew_expm_multiply(_horizontal("D", X, D), X, X, t))


def grassmann_transport(X: Any, D: Any, W: Any, t: Any = 1.0) -> np.ndarray:
    """Transport W parallel along a geodesic of the Grassmann manifold.

    Parameters
    ----------
    X : array_like, (n,) or (…, n, p)
        Orthonormal bases of subspaces. Batch axes broadcast.
    D : array_like, (n,) or (…, n, p)
        Tangents at X, the velocities of the geodesics.
    W : array_like, (n,) or (…, n, p)
        Tangents at X to transport.
    t : float or 1-D array_like, optional
        How far to go; a one-dimensional t is a grid and adds a leading axis.

    Returns
    -------
    ndarray, (n,) or (…, n, p)
        Tangents at ``grassmann_geodesic(X, D, t)``.

    Raises
    ------
    ValueError, TypeError
        As `stiefel_geodesic`.

    See Also
    --------
    grassmann_geodesic : the curve.

    Notes
    -----
    exp(t(H Xᴴ − X Hᴴ)) W with H = (I − XXᴴ)D and horizontal W: the Grassmann manifold is a
    symmetric space, and transport is the rotation that moves X itself. Exact; O(n p² + p³)
    time. Edelman, Arias and Smith 1998, doi:10.1137/S0895479895290954, section 2.5.

    Examples
    --------
    What is orthogonal to the motion stays as it is:

    >>> import numpy as np
    >>> from lowrank_expm.geometry import grassmann_transport
    >>> x, d, w = np.eye(3)
    >>> grassmann_transport(x, d, np.stack([d, w]).T @ [2.0, 5.0], np.pi / 2).round(12) + 0.0
    array([-2.,  0.,  5.])
    """
    X, (D, W), shape = _arguments(X, D=D, W=W)
    H, W = _horizontal("D", X, D), _horizontal("W", X, W)
    return shape(skew_expm_multiply(H, X, W, t))


def grassmann_log(X: Any, Y: Any) -> np.ndarray:
    """Find the shortest geodesic from the range of X to the range of Y.

    Parameters
    ----------
    X, Y : array_like, (n,) or (…, n, p)
        Orthonormal bases of subspaces. Batch axes broadcast.

    Returns
    -------
    ndarray, (n,) or (…, n, p)
        The tangent D at X for which ``grassmann_geodesic(X, D)`` spans the range of Y. Its
        singular values are the principal angles, and its Frobenius norm is the distance.

    Raises
    ------
    ValueError, TypeError
        As `stiefel_geodesic`.

    See Also
    --------
    grassmann_geodesic : the inverse.

    Notes
    -----
    With the singular value decomposition XᴴY = P cos(Θ) Rᴴ, the columns of YR − XP cos(Θ) have
    the lengths sin(Θ); angles are found from both, so that small ones and those near π/2 are
    accurate. Where an angle is π/2 there are several shortest geodesics, and one is returned.
    O(n p² + p³) time. Björck and Golub 1973, doi:10.1090/S0025-5718-1973-0348991-3; Bendokat,
    Zimmermann and Absil 2024, doi:10.1007/s10444-023-10090-8, section 5.2.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm.geometry import grassmann_log
    >>> X, Y = np.eye(4)[:, [0, 1]], np.eye(4)[:, [1, 2]]
    >>> float(np.linalg.norm(grassmann_log(X, Y))) / np.pi       # one right angle
    0.5
    """
    X, (Y,), shape = _arguments(X, Y=Y)
    _require_orthonormal("Y", Y)
    P, cosines, Rh = np.linalg.svd(adjoint(X) @ Y)
    rest = _horizontal("Y", X, Y @ adjoint(Rh) - X @ (P * cosines[..., None, :]))
    sines = np.linalg.norm(rest, axis=-2)
    stretch = np.arctan2(sines, cosines) / np.where(sines > 0, sines, 1)
    return shape((rest * stretch[..., None, :]) @ adjoint(P))


def _arguments(X: Any, **others: Any) -> tuple[np.ndarray, list[np.ndarray], Any]:
    """X and the others as (…, n, p) in one dtype, and how to give a result the caller's shape."""
    vector = np.ndim(X) == 1
    pairs = [_inputs.factors(("X", X), (name, a)) for name, a in others.items()]
    dtype = _inputs.floating(*(a.dtype for pair in pairs for a in pair))
    work = np.result_type(dtype, np.float32)
    X, *rest = (a.astype(work, copy=False) for a in (pairs[0][0], *(a for _, a in pairs)))
    _require_orthonormal("X", X)

    def shape(Y: np.ndarray) -> np.ndarray:
        Y = Y[..., 0] if vector else Y
        return Y.astype(dtype) if dtype.char == "e" else Y

    return X, rest, shape


def _require_orthonormal(name: str, X: np.ndarray) -> None:
    """Refuse columns that are not orthonormal to half of the digits."""
    with np.errstate(over="ignore", invalid="ignore"):
        defect = np.abs(adjoint(X) @ X - np.eye(X.shape[-1])).max(initial=0)
    if np.isnan(defect):
        raise ValueError(f"{name} contains NaN or infinity; it must be finite")
    if not defect <= math.sqrt(np.finfo(X.dtype).eps):
        raise ValueError(
            f"the columns of {name} are not orthonormal: {name}ᴴ{name} differs from the identity "
            f"by {defect:.1g}; orthonormalise them first, for instance by numpy.linalg.qr"
        )


def _skew(M: np.ndarray) -> np.ndarray:
    """The skew-Hermitian part."""
    return (M - adjoint(M)) / 2


def _coefficients(name: str, X: np.ndarray, D: np.ndarray) -> np.ndarray:
    """XᴴD, which tells whether D is finite."""
    with np.errstate(over="ignore", invalid="ignore"):
        M = adjoint(X) @ D
    if not np.isfinite(M).all():
        raise ValueError(f"{name} contains NaN or infinity, or is too large; it must be finite")
    return M


def _horizontal(name: str, X: np.ndarray, D: np.ndarray) -> np.ndarray:
    """The part of D that is orthogonal to the columns of X."""
    return D - X @ _coefficients(name, X, D)
