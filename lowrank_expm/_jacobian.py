"""Singular values of a Jacobian that is known by its products with vectors; see `verify`."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal, NamedTuple

import numpy as np

from . import _inputs
from ._problem import problem
from .derivatives import vjp

Map = Callable[[np.ndarray], Any]
Argument = Literal["all", "U", "V", "B"]

# Up to this many products, and numbers in the matrix, the Jacobian is formed and decomposed.
DENSE_SIDE = 600
DENSE_SIZE = 1 << 24
# Seconds before a progress bar shows.
PATIENCE = 2.0
# Vectors that the iteration holds, and how often it may restart.
BASIS = 40
RESTARTS = 1000


@dataclass(frozen=True)
class JacobianSpectrum:
    """The extreme singular values of a Jacobian; `str` of it is a table.

    Attributes
    ----------
    largest : tuple of float
        The largest singular values, descending.
    smallest : tuple of float
        The smallest of the min(rows, columns) singular values, ascending.
    condition : float
        The largest over the smallest, infinite where that is zero; only a lower bound where the
        smallest is at most `error`.
    error : float
        Estimate of the largest absolute error of these values: residuals of the singular vectors
        (for an exact result, of the matrix against `vjp`) and rounding.
    exact : bool
        True where the Jacobian was formed and decomposed, so that no value can be missing; False
        for values from an iteration, which have small residuals but might not be all there is.
    shape : tuple of int
        Rows and columns; a complex number counts as two real ones.
    products : int
        How often `jvp` and `vjp` were called.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm import verify
    >>> A = np.diag([3.0, 1.0])
    >>> spectrum = verify.jacobian_singular_values(lambda x: A @ x, lambda y: A.T @ y, (2,))
    >>> print(f"{spectrum.largest[0]:.6f}, {spectrum.condition:.6f}, {spectrum.exact}")
    3.000000, 3.000000, True
    """

    largest: tuple[float, ...]
    smallest: tuple[float, ...]
    condition: float
    error: float
    exact: bool
    shape: tuple[int, int]
    products: int

    def to_dict(self) -> dict[str, Any]:
        """The fields as a dictionary of Python scalars and tuples.

        Returns
        -------
        dict

        Examples
        --------
        >>> import numpy as np
        >>> from lowrank_expm import verify
        >>> spectrum = verify.jacobian_singular_values(lambda x: 2 * x, lambda y: 2 * y, (3,))
        >>> spectrum.to_dict()["shape"]
        (3, 3)
        """
        return asdict(self)

    def __str__(self) -> str:
        rows, columns = self.shape
        how = "decomposed" if self.exact else "iterated"
        lines = [f"Jacobian of {rows} × {columns}, {how}, {self.products} products"]
        for name, values in (("largest", self.largest), ("smallest", self.smallest)):
            lines.append(f"  {name:<10}" + "  ".join(f"{v:.6e}" for v in values))
        lines.append(f"  {'condition':<10}{self.condition:.6e}")
        lines.append(f"  {'error':<10}{self.error:.1e}")
        return "\n".join(lines)


def jacobian_singular_values(
    jvp: Map, vjp: Map, shape: int | tuple[int, ...], *, k: int = 3, dtype: Any = float
) -> JacobianSpectrum:
    """The extreme singular values and the condition number of a map given by its jvp and vjp.

    Parameters
    ----------
    jvp : callable
        Takes a tangent of the given shape and dtype and returns an array: the derivative.
    vjp : callable
        Takes a cotangent of that array's shape and dtype and returns one of the given shape: the
        adjoint of `jvp` in the real inner product Re tr(AᴴB).
    shape : int or tuple of int
        The shape of a tangent.
    k : int, optional
        How many of the largest and of the smallest to find, at least 1.
    dtype : dtype, optional
        The dtype of a tangent. Complex ones count as pairs of real numbers: a derivative need
        only be real-linear.

    Returns
    -------
    JacobianSpectrum

    Raises
    ------
    ValueError
        For a map of nothing, results of the wrong shape or not finite, a `vjp` that is not the
        adjoint of `jvp`, and a k that is not a positive integer.
    numpy.linalg.LinAlgError
        Where the iteration does not converge.

    Notes
    -----
    Up to 600 products the Jacobian is formed, by `jvp` or `vjp` on unit vectors, and decomposed.
    Beyond, `scipy.sparse.linalg.eigsh` (Lehoucq, Sorensen and Yang 1998,
    doi:10.1137/1.9780898719628) finds both ends of the spectrum of JᵀJ or JJᵀ, whichever is
    smaller, from products alone. There a singular value below √u of the largest cannot be
    resolved; `error` says what the values are worth. A progress bar shows in a terminal after two
    seconds.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm import verify
    >>> J = np.diag([5.0, 3.0, 1.0])
    >>> spectrum = verify.jacobian_singular_values(lambda x: J @ x, lambda y: J.T @ y, 3, k=1)
    >>> spectrum.exact, round(spectrum.condition, 12)
    (True, 5.0)
    """
    _require_count(k)
    J = _Jacobian.of(jvp, vjp, shape, np.dtype(dtype))
    side = min(J.rows, J.columns)
    k = min(int(k), side)
    with J.progress():
        J = J.scaled(J.require_adjoint())
        if J.exponent is None:
            return _spectrum(J, np.zeros(k), np.zeros(k), 0.0, False)
        small = side <= DENSE_SIDE and J.rows * J.columns <= DENSE_SIZE
        if small or 4 * k >= side:
            return _decomposed(J, k)
        return _iterated(J, k)


def exponential_jacobian(
    U: Any, V: Any, B: Any, t: float = 1.0, *, wrt: Argument = "all", k: int = 3
) -> JacobianSpectrum:
    """The extreme singular values of the derivative of (U, V, B) ↦ exp(t(U Vᴴ − V Uᴴ)) B.

    Parameters
    ----------
    U, V : array_like, (n,) or (…, n, r)
    B : array_like, (n,) or (…, n, k)
    t : float, optional
    wrt : {"all", "U", "V", "B"}, optional
        The arguments that vary.
    k : int, optional
        How many of the largest and of the smallest to find, at least 1.

    Returns
    -------
    JacobianSpectrum

    Raises
    ------
    ValueError, TypeError
        As `derivatives.jvp` and `jacobian_singular_values`; for a t that is a grid.

    Notes
    -----
    Of `wrt="B"` all singular values are 1, since the map is unitary. Others are zero for
    directions of U and V that leave S as it is, or do not meet B: the smallest of the
    min(rows, columns) singular values tells whether the map is onto.

    Examples
    --------
    >>> from lowrank_expm import verify
    >>> spectrum = verify.exponential_jacobian([1.0, 0.0, 0.0], [0.0, 1.0, 0.0], [1.0, 2.0, 3.0],
    ...                                        wrt="B")
    >>> round(spectrum.condition, 12)
    1.0
    """
    if wrt not in ("all", "U", "V", "B"):
        raise ValueError(f'wrt is {wrt!r}; it must be "all", "U", "V" or "B"')
    if np.ndim(t):
        raise ValueError(f"t has shape {np.shape(t)}; a Jacobian is taken at one t")
    _require_count(k)
    p = problem(U, V, B, t)
    pullback = vjp(U, V, B, t=t)[1]
    given = [_inputs.array(name, a) for name, a in zip("UVB", (U, V, B), strict=True)]
    given = [a.astype(_inputs.floating(a.dtype), copy=False) for a in given]
    chosen = [i for i, name in enumerate("UVB") if wrt in ("all", name)]
    sizes = [_real_size(given[i].shape, given[i].dtype) for i in chosen]
    linear = p.linearised(p.t)[1] if p.frame.width and p.frame.rows else None

    def forward(x: np.ndarray) -> np.ndarray:
        parts = [np.zeros_like(a) for a in given]
        for i, part in zip(chosen, np.split(x, np.cumsum(sizes)[:-1]), strict=True):
            parts[i] = _unpacked(part, given[i].shape, given[i].dtype)
        dU, dV, dB = (a.reshape(b.shape) for a, b in zip(parts, (p.U, p.V, p.B), strict=True))
        dB = p.fold(dB)
        dY = dB if linear is None else linear.jvp(*p.scaled(dU, dV), dB, np.zeros((), p.t.dtype))
        dY = np.broadcast_to(dY, np.broadcast_shapes(dY.shape, p.folded.shape))
        return p.stack([dY])

    def back(y: np.ndarray) -> np.ndarray:
        bars = pullback(y)
        return np.concatenate([_packed(bars[i]) for i in chosen])

    real = np.float64 if np.result_type(*given).char in "dD" else np.float32
    return jacobian_singular_values(forward, back, sum(sizes), k=k, dtype=real)


class _Jacobian(NamedTuple):
    """A Jacobian as a real matrix that is known by its products, which `watch` counts.

    Its products are divided by 2^exponent, and so are of ordinary size; None for a zero map.
    """

    jvp: Map
    vjp: Map
    inner: tuple[tuple[int, ...], np.dtype]
    outer: tuple[tuple[int, ...], np.dtype]
    watch: _Watch
    exponent: int | None = 0

    @classmethod
    def of(cls, jvp: Map, vjp: Map, shape: int | tuple[int, ...], dtype: np.dtype) -> _Jacobian:
        """Find the shape and dtype of the results by one product."""
        shape = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
        if dtype.kind not in "fc":
            raise TypeError(f"dtype is {dtype}; tangents must be real or complex floating numbers")
        Y = np.asarray(jvp(np.zeros(shape, dtype)))
        Y = Y if Y.dtype.kind in "fc" else Y.astype(float)
        J = cls(jvp, vjp, (shape, dtype), (Y.shape, Y.dtype), _Watch())
        if not J.rows or not J.columns:
            raise ValueError(f"the map from {shape} to {Y.shape} has no entries")
        return J

    @property
    def rows(self) -> int:
        """Real numbers in a result."""
        return _real_size(*self.outer)

    @property
    def columns(self) -> int:
        """Real numbers in a tangent."""
        return _real_size(*self.inner)

    @property
    def eps(self) -> float:
        """The machine epsilon of what the maps compute in."""
        return max(float(np.finfo(dtype).eps) for _, dtype in (self.inner, self.outer))

    def ahead(self, x: np.ndarray) -> np.ndarray:
        """J x."""
        return self._product("jvp", self.jvp, x, self.inner, self.outer)

    def back(self, y: np.ndarray) -> np.ndarray:
        """Jᵀ y."""
        return self._product("vjp", self.vjp, y, self.outer, self.inner)

    def _product(self, name: str, function: Map, x: np.ndarray, given: Any, wanted: Any) -> Any:
        self.watch.tick()
        result = np.asarray(function(_unpacked(x, *given)))
        if result.shape != wanted[0]:
            raise ValueError(f"{name} returned shape {result.shape}, not {wanted[0]}")
        if result.dtype.kind == "c" != wanted[1].kind:
            raise ValueError(f"{name} returned {result.dtype}, not {wanted[1]}")
        if not np.isfinite(result).all():
            raise ValueError(f"{name} returned NaN or infinity")
        packed = _packed(result.astype(wanted[1], copy=False)).astype(np.float64)
        return packed * 2.0 ** -(self.exponent or 0)

    def scaled(self, size: float) -> _Jacobian:
        """The same in units of a power of two near a size of its products."""
        exponent = max(-1000, math.frexp(size)[1]) if size else None
        return self._replace(exponent=exponent)

    def require_adjoint(self) -> float:
        """Raise unless the two maps belong together; the largest entry of two products of them."""
        rng = np.random.default_rng(0)
        x, y = rng.standard_normal(self.columns), rng.standard_normal(self.rows)
        ahead, back = self.ahead(x), self.back(y)
        largest = float(max(np.abs(ahead).max(), np.abs(back).max()))
        unit = largest or 1.0
        ahead, back = ahead / unit, back / unit
        size = np.linalg.norm(ahead) * np.linalg.norm(y) + np.linalg.norm(back) * np.linalg.norm(x)
        if abs(ahead @ y - x @ back) > math.sqrt(self.eps) * size:
            raise ValueError(
                "vjp is not the adjoint of jvp: "
                f"⟨jvp(x), y⟩ = {unit * (ahead @ y):.6g} and "
                f"⟨x, vjp(y)⟩ = {unit * (x @ back):.6g}"
            )
        return largest

    @contextmanager
    def progress(self) -> Iterator[None]:
        """Show the work in a terminal, once it has taken long."""
        try:
            yield
        finally:
            self.watch.close()


class _Watch:
    """Counts products, and shows them on standard error when that is a terminal."""

    def __init__(self) -> None:
        self.products = 0
        self.total: int | None = None
        self._start = time.monotonic()
        self._bar: Any = None
        self._wanted = sys.stderr is not None and sys.stderr.isatty()

    def tick(self) -> None:
        """One more product."""
        self.products += 1
        if self._wanted and self._bar is None and time.monotonic() - self._start > PATIENCE:
            self._bar = self._open()
        if self._bar is not None:
            self._bar.update(0, completed=self.products)

    def expect(self, products: int) -> None:
        """Say how many products it will be."""
        self.total = self.products + products

    def _open(self) -> Any:
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

        columns = ("singular values", BarColumn(), MofNCompleteColumn(), "products")
        console = Console(stderr=True)
        bar = Progress(*columns, TimeElapsedColumn(), console=console, transient=True)
        bar.add_task("", total=self.total)
        bar.start()
        return bar

    def close(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None


def _decomposed(J: _Jacobian, k: int) -> JacobianSpectrum:
    """From the dense matrix."""
    side = min(J.rows, J.columns)
    J.watch.expect(side)
    product = J.ahead if side == J.columns else J.back
    M = np.stack([product(e) for e in np.eye(side)])
    rng = np.random.default_rng(1)
    if side == J.columns:
        y = rng.standard_normal(J.rows)
        gap = np.linalg.norm(M @ y - J.back(y)) / np.linalg.norm(y)
    else:
        x = rng.standard_normal(J.columns)
        gap = np.linalg.norm(M @ x - J.ahead(x)) / np.linalg.norm(x)
    values = np.linalg.svd(M, compute_uv=False)
    error = float(gap) + J.eps * float(np.linalg.norm(values))
    return _spectrum(J, values[:k], values[::-1][:k], error, True)


def _iterated(J: _Jacobian, k: int) -> JacobianSpectrum:
    """From a Lanczos iteration for both ends of JᵀJ, or of JJᵀ."""
    from scipy.sparse.linalg import ArpackError, LinearOperator, eigsh

    first, second = (J.ahead, J.back) if J.columns <= J.rows else (J.back, J.ahead)
    side = min(J.rows, J.columns)
    A = LinearOperator(
        (side, side), matvec=lambda x: second(first(np.ravel(x))), dtype=np.dtype(float)
    )
    basis = min(side, max(BASIS, 4 * k + 2))
    start = np.random.default_rng(0).standard_normal(side)
    try:
        _, vectors = eigsh(A, 2 * k, which="BE", ncv=basis, v0=start, maxiter=RESTARTS, tol=J.eps)
    except ArpackError:
        raise np.linalg.LinAlgError(
            "the iteration for singular values did not converge; ask for a smaller k, or for a "
            "smaller problem, which is decomposed"
        ) from None
    triplets = sorted(_triplet(first, second, v) for v in vectors.T)
    error = max(residual for _, residual in triplets)
    values = [value for value, _ in triplets]
    error += 4 * J.eps * values[-1]
    return _spectrum(J, values[::-1][:k], values[:k], error, False)


def _require_count(k: Any) -> None:
    """Refuse a k that does not count."""
    if isinstance(k, bool) or not isinstance(k, int | np.integer) or k < 1:
        raise ValueError(f"k is {k!r}; it must be a positive integer")


def _triplet(first: Map, second: Map, v: np.ndarray) -> tuple[float, float]:
    """The singular value σ that belongs to a vector, and how near to one it is.

    With d = ‖JᵀJv − σ²v‖ there is an eigenvalue λ² of JᵀJ with |λ² − σ²| ≤ d, so that
    |λ − σ| ≤ d/(λ + σ) ≤ d/σ, and |λ − σ|² ≤ d.
    """
    v = v / np.linalg.norm(v)
    image = first(v)
    value = float(np.linalg.norm(image))
    distance = float(np.linalg.norm(second(image) - value**2 * v))
    return value, min(math.sqrt(distance), distance / value if value else math.inf)


def _spectrum(J: _Jacobian, largest: Any, smallest: Any, error: float, exact: bool) -> Any:
    """The result as plain numbers."""
    unit = 2.0 ** (J.exponent or 0)
    high, low = (tuple(float(v) for v in values) for values in (largest, smallest))
    condition = high[0] / low[0] if low[0] > 0 else math.inf
    high, low = (tuple(unit * v for v in values) for values in (high, low))
    return JacobianSpectrum(
        high, low, condition, unit * error, exact, (J.rows, J.columns), J.watch.products
    )


def _real_size(shape: tuple[int, ...], dtype: np.dtype) -> int:
    """How many real numbers an array holds."""
    return math.prod(shape) * (2 if dtype.kind == "c" else 1)


def _packed(a: np.ndarray) -> np.ndarray:
    """An array as a vector of real numbers."""
    a = np.ascontiguousarray(a)
    return (a.view(a.real.dtype) if a.dtype.kind == "c" else a).reshape(-1)


def _unpacked(x: np.ndarray, shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """The inverse of `_packed`."""
    real = np.empty(0, dtype).real.dtype
    return np.ascontiguousarray(x, real).view(dtype).reshape(shape)


# They belong to `verify`, where they are public.
for _public in (JacobianSpectrum, jacobian_singular_values, exponential_jacobian):
    _public.__module__ = "lowrank_expm.verify"
