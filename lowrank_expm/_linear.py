"""From factors to a solved exponential: the route, the passes, the core; nothing checks here
what callers pass except what only the passes can see (NaN, infinity, overflow)."""

from __future__ import annotations

import math
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from . import _inputs, core
from ._threads import compiling, quiet_blas, share
from .core import certificate
from .core.exponential import skew_of
from .passes import Frame, plain
from .passes.basis import balanced, cholesky, first_nonfinite, length, robust_basis
from .passes.numpy_passes import accumulate, no_vectors, project, update

# Pivot of the Gram matrix scaled to unit diagonal above which its Cholesky factor serves as R.
WELL_CONDITIONED = 1e-4


class Solution(NamedTuple):
    """A solved exponential I + F C Fᴴ; `frame` None is the identity, G None its Gram matrix."""

    frame: Frame | None
    G: np.ndarray | None
    C: np.ndarray
    T: np.ndarray
    route: np.ndarray
    order: int
    squarings: int
    bound: np.ndarray
    size: np.ndarray


def solve(
    U: np.ndarray,
    V: np.ndarray,
    B: np.ndarray | None,
    t: np.ndarray,
    method: str,
    real: np.dtype,
    G: np.ndarray | None = None,
    T: np.ndarray | None = None,
) -> Solution:
    """The exponential of t(U Vᴴ − V Uᴴ) in precision `real`, with T = FᴴB if B is given.

    `t` has no batch axes; a grid leads.
    """
    n, r = U.shape[-2:]
    dtype = _inputs.with_kind(real, U, V)
    with np.errstate(over="ignore"):
        ts = t.astype(real)
    if method in ("auto", "qr", "direct") and (n <= 2 * r or method == "direct"):
        return _direct(U, V, B, ts, "direct" if method == "auto" else method, dtype)
    frame = Frame((U, V))
    if B is None:
        B = no_vectors(n, dtype)
    if T is None or G is None:
        frame, G, T = gram_in_range(frame, B, ts, dtype, G)
    ts = ts.reshape(ts.shape + (1,) * (G.ndim - 2)) if ts.ndim else ts
    size = _size(np.sqrt(np.diagonal(G, axis1=-2, axis2=-1).real))
    if method == "qr":
        return _by_qr(frame, G, B, ts, dtype, size, np.ones(G.shape[:-2], bool))
    with np.errstate(over="ignore", invalid="ignore"):
        c = core.skew(G, ts)
    gram = Solution(frame, G, c.C, T, np.asarray("gram"), c.order, c.squarings, c.bound, size)
    if method == "gram":
        require_unitary(c.C, G, c.bound)
        return gram
    with np.errstate(over="ignore", invalid="ignore"):
        bound = certificate.settled(c.bound, c.C, G)
    doubtful = ~(bound <= certificate.trusted_up_to(2 * r, np.finfo(real).eps / 2))
    if ts.ndim:
        doubtful = doubtful.any(axis=0)
    if doubtful.any():
        return _by_qr(frame, G, B, ts, dtype, size, doubtful)
    return gram._replace(bound=bound)


def require_unitary(C: np.ndarray, G: np.ndarray, bound: np.ndarray) -> None:
    """Raise where the route "gram" broke down."""
    if _broken_down(C, G, bound):
        raise ValueError(
            "method 'gram' breaks down: U and V nearly span the same directions; "
            "use method 'auto' or 'qr'"
        )


def _broken_down(C: np.ndarray, G: np.ndarray, bound: np.ndarray) -> bool:
    """Whether some I + F C Fᴴ without a certificate is nowhere near unitary.

    The eigenvalues of CG are those of a unitary matrix less one: at most two in modulus.
    """
    if np.isfinite(bound).all():
        return False
    wide = np.complex128 if C.dtype.kind == "c" else np.float64
    with np.errstate(over="ignore", invalid="ignore"):
        CG = C.astype(wide) @ G.astype(wide)
        eigenvalues_squared = np.einsum("...ij,...ji->...", CG, CG)
    return not (np.abs(eigenvalues_squared) <= 8 * G.shape[-1]).all()


def solve_plain(U: Any, V: Any, B: Any, t: Any, out: Any = None) -> np.ndarray | None:
    """The result for one small problem of plain arguments, or None: then `solve` must look closer.

    It is "auto" on the route "gram", for numbers of ordinary size and with a certificate to trust.
    """
    if type(t) not in (float, int) or not plain.is_plain(U, V, B) or len(U) <= 2 * U.shape[1]:
        return None
    if out is not None and not plain.is_plain_output(out, U, V, B):
        return None
    with compiling("plain", U.dtype.char):
        return _solve_plain(U, V, B, t, out)


def _solve_plain(
    U: np.ndarray, V: np.ndarray, B: np.ndarray, t: float, out: np.ndarray | None
) -> np.ndarray | None:
    """The same for arguments that are plain."""
    from .core.compiled import skew_core

    G, T = plain.accumulate(U, V, B)
    d = G.diagonal().real
    info = _limits(G.dtype.char)
    ordinary = info.low < d.min() and d.max() < info.high and abs(t) < info.high
    if not (ordinary and np.isfinite(T).all()):
        return None
    C, bound = skew_core(G, t)
    if not bound <= certificate.trusted_up_to(len(d), info.unit):
        return None
    with quiet_blas(1, C.size * T.shape[1]):
        Z = C @ T
    if not np.abs(Z).max() < info.high:
        return None
    return plain.update(U, V, Z, B, out)


def solve_batch(
    U: np.ndarray, V: np.ndarray, B: np.ndarray, t: Any, out: np.ndarray | None
) -> np.ndarray | None:
    """The same for a batch: each thread takes its elements from the first pass to the last.

    It wakes once, and does not wait for others between the passes.
    """
    if type(t) not in (float, int) or not plain.is_plain_batch(U, V, B):
        return None
    if U.shape[-2] <= 2 * U.shape[-1] or out is B:
        return None
    if out is not None and not plain.is_plain_output(out, U, V, B):
        return None
    Y = np.empty_like(B) if out is None else out
    n, m, k = U.shape[-2], 2 * U.shape[-1], B.shape[-1]
    batch = plain.Batch(U, V, B, Y)
    doubtful: list[int] = []

    def work(first: int, last: int) -> None:
        with np.errstate(all="ignore"):
            if not _solve_elements(batch, t, first, last):
                doubtful.append(first)

    cost = n * m * (m + 2 * k) + 10 * m**3
    with compiling("batch", U.dtype.char), quiet_blas(batch.count, m * m * max(m, k)):
        share(batch.count, cost, work)
    if doubtful:
        return None
    batch.done()
    return Y


def _solve_elements(batch: plain.Batch, t: float, first: int, last: int) -> bool:
    """Write the results of some elements, if all are ordinary and can be trusted."""
    from .core.compiled import skew_elements

    G, T = batch.accumulate(first, last)
    d = np.diagonal(G, 0, -2, -1).real
    info = _limits(G.dtype.char)
    ordinary = info.low < d.min() and d.max() < info.high and abs(t) < info.high
    if not (ordinary and np.isfinite(T).all()):
        return False
    C, bound = skew_elements(G, t)
    if not (bound <= certificate.trusted_up_to(d.shape[-1], info.unit)).all():
        return False
    Z = C @ T
    if not np.abs(Z).max() < info.high:
        return False
    batch.update(first, last, Z)
    return True


class _Limits(NamedTuple):
    """Between which values squares are harmless, and the unit roundoff."""

    low: float
    high: float
    unit: float


@lru_cache
def _limits(char: str) -> _Limits:
    """The limits of a dtype."""
    info = np.finfo(char)
    reach = 0.75 * float(info.maxexp)
    return _Limits(2.0**-reach, 2.0**reach, float(info.eps) / 2)


def _direct(
    U: np.ndarray, V: np.ndarray, B: np.ndarray | None, t: np.ndarray, route: str, dtype: np.dtype
) -> Solution:
    """The route without a frame: the n × n matrix itself."""
    U, V = U.astype(dtype, copy=False), V.astype(dtype, copy=False)
    with np.errstate(over="ignore", invalid="ignore"):
        M = U @ np.conj(np.matrix_transpose(V))
        W = M - np.conj(np.matrix_transpose(M))
    if not np.isfinite(W).all():
        explain(("U", U), ("V", V))
    B = no_vectors(len(W), dtype) if B is None else B
    _check(("B", B))
    size = _size(_lengths(U, V))
    ts = t.reshape(t.shape + (1,) * (W.ndim - 2)) if t.ndim else t
    with np.errstate(over="ignore", invalid="ignore"):
        c = core.skew(None, ts, W)
    return Solution(None, None, c.C, B, np.asarray(route), c.order, c.squarings, c.bound, size)


def _lengths(U: np.ndarray, V: np.ndarray) -> np.ndarray:
    """The column lengths of [U V] in double precision."""
    parts = [length(a, axis=-2) for a in (U, V)]
    batch = np.broadcast_shapes(parts[0].shape, parts[1].shape)
    return np.concatenate([np.broadcast_to(a, batch) for a in parts], axis=-1)


def _by_qr(
    frame: Frame,
    G: np.ndarray,
    B: np.ndarray,
    t: np.ndarray,
    dtype: np.dtype,
    size: np.ndarray,
    wanted: np.ndarray,
) -> Solution:
    """The route through a well-conditioned frame, for the wanted elements of the batch."""
    basis = robust_basis(frame, G, B, dtype, wanted)
    with np.errstate(over="ignore", invalid="ignore"):
        c = core.skew(basis.G, t, skew_of(basis.R))
    route = np.where(wanted, "qr", "gram")
    return Solution(basis.frame, basis.G, c.C, basis.T, route, c.order, c.squarings, c.bound, size)


def _size(lengths: np.ndarray) -> np.ndarray:
    """(Σ ‖uⱼ‖²‖vⱼ‖²)^½, which with |t| measures how much rounding in S can matter."""
    r = lengths.shape[-1] // 2
    with np.errstate(over="ignore"):
        return length(lengths[..., :r].astype(np.float64) * lengths[..., r:], axis=-1)


def gram_in_range(
    frame: Frame, B: np.ndarray, t: np.ndarray, dtype: np.dtype, G: np.ndarray | None = None
) -> tuple[Frame, np.ndarray, np.ndarray]:
    """Frame, G and T such that no square over- or underflowed in a way that matters.

    Squares of column lengths leave the exponent range before the columns do; then the columns
    are balanced by powers of two where the passes read them.
    """
    if G is None:
        G, T = accumulate(frame, B, dtype)
    else:
        T = project(frame, B, dtype)
    if not squares_fit(G, t):
        frame = balanced(frame, dtype)
        G, T = accumulate(frame, B, dtype)
        if not np.isfinite(G).all():
            explain(("U", frame.columns[0]), ("V", frame.columns[1]))
    require_finite(T, ("B", B))
    return frame, G, T


def squares_fit(G: np.ndarray, t: np.ndarray) -> bool:
    """Whether the squared column lengths are finite, not huge, and small only where harmless."""
    if not G.size:
        return True
    d = np.diagonal(G, axis1=-2, axis2=-1).real
    top = np.finfo(G.dtype).maxexp
    largest, smallest = float(d.max()), float(d.min())
    if not largest < 2.0 ** (0.75 * top):
        return False
    if smallest > 2.0 ** (-0.75 * top):
        return bool(np.isfinite(G).all())
    longest = float(np.abs(t).max(initial=0.0))
    return max(largest, 2.0**-top) * longest * longest <= 2.0 ** (
        0.75 * top - 2 * np.finfo(G.dtype).nmant - 14
    )


def require_finite(T: np.ndarray, *operands: tuple[str, Any]) -> None:
    """Raise, with a reason, unless a product of the operands is finite and has seen them all."""
    if not T.size:
        _check(*operands)
    elif not np.isfinite(T).all():
        explain(*operands)


def orthonormal(frame: Frame, G: np.ndarray, dtype: np.dtype) -> tuple[np.ndarray, np.ndarray]:
    """A Gram matrix near the identity and R with X = F R, through a new basis where one is needed.

    Where G is well-conditioned its own Cholesky factor serves, without another pass.
    """
    R, pivot = cholesky(G)
    poor = ~(pivot > WELL_CONDITIONED)
    if not poor.any():
        return np.broadcast_to(np.eye(G.shape[-1], dtype=dtype), G.shape), R
    basis = robust_basis(frame, G, no_vectors(frame.rows, dtype), dtype)
    return basis.G, basis.R


def explain(*operands: tuple[str, Any]) -> None:
    """Raise for the operand that is not finite, or for a product that overflows."""
    _check(*operands)
    raise overflow(*(name for name, _ in operands))


def overflow(*names: str) -> ValueError:
    """The error of a product of finite arguments that overflows."""
    what = " and ".join(names)
    return ValueError(f"a product of {what} overflows; scale {what} down or use a wider dtype")


def _check(*operands: tuple[str, Any]) -> None:
    """Raise ValueError for the first operand with an entry that is not finite."""
    for name, a in operands:
        index = first_nonfinite(a)
        if index is not None:
            where = ", ".join(str(i) for i in index)
            raise ValueError(f"{name}[{where}] is {a[index]}; all entries must be finite")


def apply(
    s: Solution,
    C: np.ndarray,
    B: np.ndarray,
    out: np.ndarray,
    T: np.ndarray | None = None,
) -> None:
    """out = (I + F C Fᴴ) B; out may be B."""
    real = _inputs.real_part(out.dtype)
    C = C.astype(_inputs.with_kind(real, C), copy=False)
    if s.frame is None:
        if T is None:
            _check(("B", B))
        with np.errstate(over="ignore", invalid="ignore"):
            out[...] = B + C @ B.astype(_inputs.with_kind(real, B), copy=False)
        require_range(out, "B")
        return
    dtype = _inputs.with_kind(real, *s.frame.columns)
    if T is None:
        T = project(s.frame, B, dtype)
        require_finite(T, ("B", B))
    if not s.frame.width:
        out[...] = B
        return
    with np.errstate(over="ignore", invalid="ignore"):
        Z = product(C, T)
        update(s.frame, Z, B, dtype, out)
    if out.dtype.char == "e" or _may_overflow(s, Z):
        require_range(out, "B")


def product(C: np.ndarray, T: np.ndarray) -> np.ndarray:
    """C T between passes, whose threads share a batch and do not wait for those of BLAS."""
    count, cost = math.prod(T.shape[:-2]), math.prod(C.shape[-2:]) * T.shape[-1]
    with quiet_blas(count, cost):
        if count == 1 or C.shape[:-2] != T.shape[:-2]:
            return C @ T
        c, x = (a.reshape(count, *a.shape[-2:]) for a in (C, T))
        z = np.empty((count, C.shape[-2], T.shape[-1]), np.result_type(C, T))

        def multiply(first: int, last: int) -> None:
            with np.errstate(over="ignore", invalid="ignore"):
                np.matmul(c[first:last], x[first:last], out=z[first:last])

        share(count, cost, multiply)
        return z.reshape(*T.shape[:-2], *z.shape[-2:])


def _may_overflow(s: Solution, Z: np.ndarray) -> bool:
    """Whether F Z can come near the largest number."""
    if not Z.size:
        return False
    longest = 1.0 if s.G is None else math.sqrt(float(np.diagonal(s.G, 0, -2, -1).real.max()))
    top = float(np.finfo(Z.dtype).max)
    return not float(np.abs(Z).max()) * longest * Z.shape[-2] < top / 1024


def require_range(result: np.ndarray, *names: str) -> None:
    """Raise unless a result of finite arguments is finite."""
    if not np.isfinite(result).all():
        what = " and ".join(names)
        raise ValueError(f"the result overflows; scale {what} down or use a wider dtype")


def dense_frame(s: Solution, rows: range) -> np.ndarray:
    """Some rows of F as a dense array."""
    dtype, p = s.C.dtype, s.C.shape[-1]
    if s.frame is None:
        F = np.eye(p, dtype=dtype)[rows.start : rows.stop]
        return np.broadcast_to(F, (*s.C.shape[:-2], *F.shape)).copy()
    columns = tuple(a[..., rows.start : rows.stop, :] for a in s.frame.columns)
    part = Frame(columns, s.frame.scale, s.frame.factors)
    eye = np.broadcast_to(np.eye(p, dtype=dtype), (*part.batch, p, p))
    return update(part, eye, None, dtype, np.empty((*part.batch, len(rows), p), dtype))


def error_bound(s: Solution, t: np.ndarray) -> np.ndarray:
    """Bound the forward error ‖Q − exp(tS)‖₂ of a solution Q = I + F C Fᴴ; see `core.certificate`.

    All in double precision.
    """
    eps = float(np.finfo(s.C.dtype).eps)
    ts = t.reshape(t.shape + (1,) * s.size.ndim) if t.ndim else t
    reach = ts.astype(np.float64) * s.size
    bound = certificate.error_bound(s.bound, s.squarings, reach, eps / 2)
    by_gram = s.route == "gram"
    if not by_gram.any() or not s.C.shape[-1]:
        return bound
    assert s.G is not None
    G = s.G.astype(np.complex128 if s.G.dtype.kind == "c" else np.float64)
    moved = certificate.gram_error(G, reach, G.shape[-1] * eps)
    return bound + np.where(by_gram, certificate.ERROR_FACTOR * eps / 2 * moved, 0)
