"""LowRankSkew, skew_expm_multiply, expm_multiply: the front door."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from . import _inputs, _linear, core
from ._array import from_the_left, is_foreign, spread
from .core.exponential import apply_j, skew_of
from .passes import Frame
from .passes.basis import length
from .passes.numpy_passes import gram, new, no_vectors, project, update
from .unitary import LowRankUnitary

if TYPE_CHECKING:
    from .frechet import LowRankFrechet

__all__ = ["LowRankSkew", "expm_multiply", "skew_expm_multiply"]

Method = Literal["auto", "gram", "qr", "direct"]
METHODS = ("auto", "gram", "qr", "direct")


def skew_expm_multiply(
    U: Any, V: Any, B: Any, t: Any = 1.0, *, method: Method = "auto", out: Any = None
) -> np.ndarray:
    """Apply the orthogonal (unitary) matrix exp(t(U Vᴴ − V Uᴴ)) to B.

    Parameters
    ----------
    U, V : array_like, (n,) or (…, n, r)
        Tall factors, equal in their last two axes; batch axes broadcast. A pair of vectors is
        one column.
    B : array_like, (n,) or (…, n, k)
        What to apply to; a vector only when it has one dimension.
    t : float or 1-D array_like, optional
        Time, in radians per unit of U Vᴴ; a one-dimensional t is a grid and adds a leading axis.
    method : {"auto", "gram", "qr", "direct"}, optional
        "gram" works with the Gram matrix of [U V]; "qr" with a well-conditioned basis; "direct"
        with the n × n matrix. "auto" is "direct" for n ≤ 2r and otherwise "gram", except for
        elements whose certificate asks for "qr".
    out : ndarray, optional
        Where to put the result: an array of its shape and dtype, which may be B itself and
        otherwise must not overlap the inputs.

    Returns
    -------
    ndarray
        The broadcast batch shape, B's trailing shape, and the promoted dtype of U, V, B and t.

    Raises
    ------
    ValueError
        Shapes that do not fit, an unknown method, NaN or infinity in an argument, overflow.
    TypeError
        A complex t, a dtype that is not supported, an array of another library.

    See Also
    --------
    LowRankSkew : the same with the Gram matrix kept, for many t or many B.
    expm_multiply : exp(t L Rᴴ) B for any low-rank matrix.

    Notes
    -----
    Writing X = [U V] and m = 2r, exp(tS) = I + X C Xᴴ with an m × m core C that depends on X
    only through XᴴX. One pass over the rows forms XᴴX and XᴴB, a second one adds X (C XᴴB):
    O(n m² + n m k + m³) time and O(m² + m k) memory beyond inputs and result. Orthogonality
    holds to rounding at any angle. The identity behind it: exp(L Rᴴ) = I + L φ₁(RᴴL) Rᴴ
    (Higham, Functions of Matrices, 2008, doi:10.1137/1.9780898717778).

    Examples
    --------
    A quarter turn in the plane of the first two axes:

    >>> import numpy as np
    >>> from lowrank_expm import skew_expm_multiply
    >>> U, V = np.array([0.0, 1.0, 0.0]), np.array([1.0, 0.0, 0.0])
    >>> skew_expm_multiply(U, V, np.array([3.0, 0.0, 5.0]), np.pi / 2).round(12) + 0.0
    array([0., 3., 5.])
    """
    _method(method)
    Y = _shortly(U, V, B, t, method, out)
    if Y is not None:
        return Y
    if is_foreign(U, V, B, t):
        from ._portable import multiply

        return multiply(U, V, B, t, method, out)
    U, V = _inputs.factors(("U", U), ("V", V))
    return _multiply(U, V, B, t, method, out, None)


def _multiply_arrays(
    U: np.ndarray, V: np.ndarray, B: np.ndarray, t: Any, method: str
) -> np.ndarray:
    """The same for factors that were checked."""
    Y = _shortly(U, V, B, t, method, None)
    return _multiply(U, V, B, t, method, None, None) if Y is None else Y


def _shortly(U: Any, V: Any, B: Any, t: Any, method: str, out: Any) -> np.ndarray | None:
    """The result where a short way leads to it."""
    if method != "auto":
        return None
    Y = _linear.solve_plain(U, V, B, t, out)
    return _linear.solve_batch(U, V, B, t, out) if Y is None else Y


def _method(method: str) -> None:
    """Refuse an unknown method."""
    if method not in METHODS:
        raise ValueError(f"method is {method!r}; it must be one of {', '.join(METHODS)}")


def _multiply(
    U: np.ndarray, V: np.ndarray, B: Any, t: Any, method: str, out: Any, G: Any
) -> np.ndarray:
    """exp(t(U Vᴴ − V Uᴴ)) B for checked factors."""
    n = U.shape[-2]
    times = _inputs.times(t)
    B, vector = _inputs.vectors(B, n)
    batch = _inputs.batch(f"U, V and B of shapes {U.shape}, {V.shape} and {B.shape}", U, V, B)
    dtype = _inputs.floating(U.dtype, V.dtype, B.dtype, times.promotes)
    shape = times.values.shape + batch + B.shape[-2:]
    Y = _result(out, shape, vector, dtype, B, U, V)
    real = _inputs.real_part(dtype)
    s = _linear.solve(U, V, B, times.values, method, real, None if G is None else G(real))
    C = spread(s.C, times.values.ndim, max(U.ndim, V.ndim, B.ndim))
    _linear.apply(s, C, B, Y, s.T)
    if out is not None:
        return out
    return Y[..., 0] if vector else Y


def _result(
    out: Any, shape: tuple[int, ...], vector: bool, dtype: np.dtype, B: np.ndarray, *inputs: Any
) -> np.ndarray:
    """The array to write to, with a column axis."""
    if out is None:
        return new(shape, dtype) if len(shape) > 2 else np.empty(shape, dtype)
    _inputs.output(out, shape[:-1] if vector else shape, dtype, B, *inputs)
    return out[..., None] if vector else out


def expm_multiply(L: Any, R: Any, B: Any, t: Any = 1.0, *, out: Any = None) -> np.ndarray:
    """Apply exp(t L Rᴴ) to B for tall L and R: any low-rank matrix, any real or complex t.

    Parameters
    ----------
    L, R : array_like, (n,) or (…, n, r)
        Tall factors, equal in their last two axes; batch axes broadcast.
    B : array_like, (n,) or (…, n, k)
        What to apply to.
    t : float, complex or 1-D array_like, optional
        A one-dimensional t is a grid and adds a leading axis.
    out : ndarray, optional
        As in `skew_expm_multiply`.

    Returns
    -------
    ndarray
        The broadcast batch shape, B's trailing shape, the promoted dtype of L, R, B and t.

    Raises
    ------
    ValueError, TypeError
        As `skew_expm_multiply`; also where the result overflows.

    Notes
    -----
    exp(t L Rᴴ) = I + L φ₁(t RᴴL) t Rᴴ with φ₁(z) = (eᶻ − 1)/z; O(n r² + n r k + r³) time. The
    relative error grows with |t| ‖L‖ ‖R‖ like that of any method for a matrix that is not normal.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm import expm_multiply
    >>> one = np.array([1.0, 0.0])
    >>> expm_multiply(one, one, np.array([1.0, 5.0]), np.log(3.0)).round(12)
    array([3., 5.])
    """
    if is_foreign(L, R, B, t):
        from ._portable import general_multiply

        return general_multiply(L, R, B, t, out)
    L, R = _inputs.factors(("L", L), ("R", R))
    n = L.shape[-2]
    times = _inputs.times(t, real=False)
    B, vector = _inputs.vectors(B, n)
    batch = _inputs.batch(f"L, R and B of shapes {L.shape}, {R.shape} and {B.shape}", L, R, B)
    dtype = _inputs.floating(L.dtype, R.dtype, B.dtype, times.promotes)
    shape = times.values.shape + batch + B.shape[-2:]
    Y = _result(out, shape, vector, dtype, B, L, R)
    work = _inputs.with_kind(_inputs.real_part(dtype), L, R)
    left, right = Frame((L,)), Frame((R,))
    with np.errstate(over="ignore", invalid="ignore"):
        M, T = project(right, L, work), project(right, B, work)
        _linear.require_finite(M, ("L", L), ("R", R))
        _linear.require_finite(T, ("B", B), ("R", R))
        ts = times.values.astype(_inputs.with_kind(_inputs.real_part(dtype), times.values))
        M = M.astype(np.result_type(M, ts), copy=False)
        C = core.general(M, ts.reshape(ts.shape + (1,) * (M.ndim - 2)) if ts.ndim else ts).C
        Z = _linear.product(spread(C, times.values.ndim, max(L.ndim, R.ndim, B.ndim)), T)
        if not np.isfinite(Z).all():
            raise ValueError("exp(t L Rᴴ) B overflows; scale t, L or R down")
        if L.shape[-1]:
            update(left, Z, B, work, Y)
        else:
            Y[...] = B
    _linear.require_range(Y, "t", "L", "R", "B")
    if out is not None:
        return out
    return Y[..., 0] if vector else Y


class LowRankSkew:
    """The skew-Hermitian generator S = U Vᴴ − V Uᴴ, held by its factors.

    Parameters
    ----------
    U, V : array_like, (n,) or (…, n, r)
        Tall factors, equal in their last two axes; batch axes broadcast. They are not copied:
        do not change them while the generator is in use.
    method : {"auto", "gram", "qr", "direct"}, optional
        The route of its exponentials; see `skew_expm_multiply`.

    Attributes
    ----------
    U, V : ndarray, (…, n, r)
        The factors.
    shape : tuple of int
        (…, n, n).
    dtype : numpy.dtype
        The promoted dtype of the factors.

    Raises
    ------
    ValueError, TypeError
        As `skew_expm_multiply`.

    Notes
    -----
    The Gram matrix of [U V] is accumulated once, in O(n m²) with m = 2r, and kept: a further t
    costs O(m³) and one pass for each B.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm import LowRankSkew
    >>> S = LowRankSkew([[0.0], [2.0], [0.0]], [[1.0], [0.0], [0.0]])
    >>> S.to_dense()
    array([[ 0., -2.,  0.],
           [ 2.,  0.,  0.],
           [ 0.,  0.,  0.]])
    >>> S.angles()
    array([-2.,  2.])
    >>> (S.expm(np.pi / 4) @ [1.0, 0.0, 0.0]).round(12) + 0.0
    array([0., 1., 0.])
    """

    # NumPy then leaves `array @ S` to `__rmatmul__` instead of treating S as an object array.
    __array_ufunc__ = None

    def __new__(cls, U: Any = None, V: Any = None, *, method: Method = "auto") -> LowRankSkew:
        """The class for NumPy arrays, or the one for arrays of other libraries.

        Copies and pickles are made without arguments.
        """
        _method(method)
        if cls is LowRankSkew and is_foreign(U, V):
            from ._portable_objects import PortableSkew

            return object.__new__(PortableSkew)
        return object.__new__(cls)

    def __init__(self, U: Any, V: Any, *, method: Method = "auto") -> None:
        self._U, self._V = _inputs.factors(("U", U), ("V", V))
        self.method: Method = method
        self.dtype = _inputs.floating(self.U.dtype, self.V.dtype)
        n = self.U.shape[-2]
        self._batch = _inputs.batch("U and V", self.U, self.V)
        self.shape: tuple[int, ...] = (*self._batch, n, n)
        self._grams: dict[np.dtype, np.ndarray] = {}
        self._angles: np.ndarray | None = None

    @property
    def U(self) -> np.ndarray:
        """The factor U, (…, n, r)."""
        return self._U

    @property
    def V(self) -> np.ndarray:
        """The factor V, (…, n, r)."""
        return self._V

    @property
    def ndim(self) -> int:
        """The number of axes of `shape`."""
        return len(self.shape)

    def __repr__(self) -> str:
        rank = self.U.shape[-1]
        return f"LowRankSkew(shape={self.shape}, r={rank}, dtype={self.dtype})"

    @property
    def H(self) -> LowRankSkew:
        """The adjoint, −S."""
        return LowRankSkew(self.V, self.U, method=self.method)

    @property
    def T(self) -> LowRankSkew:
        """The transpose."""
        return LowRankSkew(np.conj(self.V), np.conj(self.U), method=self.method)

    def __matmul__(self, B: Any) -> np.ndarray:
        """S @ B for B of shape (n,) or (…, n, k), broadcast over the batch."""
        B, vector = _inputs.vectors(B, self.shape[-1])
        batch = _inputs.batch(f"U, V and B of shape {B.shape}", self.U, self.V, B)
        dtype = _inputs.floating(self.dtype, B.dtype)
        work = _inputs.with_kind(_inputs.real_part(dtype), self.U, self.V)
        frame = Frame((self.U, self.V))
        T = project(frame, B, work)
        _linear.require_finite(T, ("U", self.U), ("V", self.V), ("B", B))
        Y = np.zeros((*batch, *B.shape[-2:]), dtype)
        if frame.width:
            with np.errstate(over="ignore", invalid="ignore"):
                update(frame, apply_j(T), None, work, Y)
            _linear.require_range(Y, "U", "V", "B")
        return Y[..., 0] if vector else Y

    def __rmatmul__(self, B: Any) -> np.ndarray:
        """B @ S for B of shape (n,) or (…, k, n)."""
        return from_the_left(self.T, _inputs.array("B", B))

    def to_dense(self) -> np.ndarray:
        """S as an (…, n, n) array; O(n² r) time.

        Returns
        -------
        ndarray

        Examples
        --------
        >>> from lowrank_expm import LowRankSkew
        >>> LowRankSkew([0.0, 2.0], [1.0, 0.0]).to_dense()
        array([[ 0., -2.],
               [ 2.,  0.]])
        """
        return self._dense(self.dtype)

    def _dense(self, dtype: np.dtype) -> np.ndarray:
        """S, computed in one dtype."""
        U, V = (a.astype(dtype, copy=False) for a in (self.U, self.V))
        M = U @ np.conj(np.matrix_transpose(V))
        return M - np.conj(np.matrix_transpose(M))

    def angles(self) -> np.ndarray:
        """The eigenvalues of −iS on the range of [U V]: rotation angles per unit of t.

        Returns
        -------
        ndarray, (…, m)
            Ascending, m = 2r; zeros make up the number where the range is smaller. For real
            factors they come in pairs ±θ. The absolute error is a few u ‖U‖ ‖V‖.

        Notes
        -----
        O(n m² + m³). Where the Gram matrix is too ill-conditioned to be trusted, a robust basis is
        built, with two more passes over the rows.

        Examples
        --------
        >>> from lowrank_expm import LowRankSkew
        >>> LowRankSkew([[0, 0], [2, 0], [0, 0], [0, 3]], [[1, 0], [0, 0], [0, 1], [0, 0]]).angles()
        array([-3., -2.,  2.,  3.])
        """
        if self._angles is None:
            self._angles = self._eigenvalues()
        return self._angles.copy()

    def _eigenvalues(self) -> np.ndarray:
        """Eigenvalues of −i R J Rᴴ for a triangular factor R of [U V]."""
        real = _inputs.real_part(self.dtype)
        dtype = _inputs.with_kind(real, self.U, self.V)
        n, r = self.U.shape[-2:]
        if n <= 2 * r:
            with np.errstate(over="ignore", invalid="ignore"):
                W = self._dense(dtype)
            if not np.isfinite(W).all():
                _linear.explain(("U", self.U), ("V", self.V))
            found = np.linalg.eigvalsh(-1j * W) if n else np.zeros((*self._batch, 0))
            rest = np.zeros((*self._batch, 2 * r - n), found.dtype)
            return np.sort(np.concatenate([found, rest], axis=-1), axis=-1)
        if not r:
            return np.zeros((*self._batch, 0), real)
        frame, G, _ = _linear.gram_in_range(
            Frame((self.U, self.V)),
            no_vectors(n, dtype),
            np.asarray(np.finfo(real).max),  # any t may follow: small columns count
            dtype,
            self._gram(real),
        )
        G, R = _linear.orthonormal(frame, G, dtype)
        values, vectors = np.linalg.eigh(G)
        root = np.sqrt(np.maximum(values, 0))[..., None] * np.conj(np.matrix_transpose(vectors))
        K = root @ R
        return np.linalg.eigvalsh(-1j * skew_of(K))

    def norm(self, ord: int | str = 2) -> Any:
        """The 2-norm or the Frobenius norm of S.

        Parameters
        ----------
        ord : {2, "fro"}, optional

        Returns
        -------
        float or ndarray
            One number for each batch element.

        Raises
        ------
        ValueError
            For any other ord.

        Examples
        --------
        >>> import math
        >>> from lowrank_expm import LowRankSkew
        >>> S = LowRankSkew([0.0, 2.0, 0.0], [1.0, 0.0, 0.0])
        >>> S.norm(), math.isclose(S.norm("fro"), math.sqrt(8))
        (2.0, True)
        """
        angles = np.abs(self.angles())
        if ord == 2:
            norm = angles.max(axis=-1, initial=0)
        elif ord == "fro":
            norm = length(angles, axis=-1)
        else:
            raise ValueError(f'ord is {ord!r}; it must be 2 or "fro"')
        return norm.item() if norm.ndim == 0 else norm

    def expm(self, t: Any = 1.0) -> LowRankUnitary:
        """The unitary exp(tS) as an object that applies to vectors.

        Parameters
        ----------
        t : float or 1-D array_like, optional
            A one-dimensional t adds a leading batch axis.

        Returns
        -------
        LowRankUnitary

        Raises
        ------
        ValueError, TypeError
            For a t that is not finite or not real, and for factors that are not finite.

        Examples
        --------
        >>> import numpy as np
        >>> from lowrank_expm import LowRankSkew
        >>> S = LowRankSkew([0.0, 1.0, 0.0], [1.0, 0.0, 0.0])
        >>> Q = S.expm(np.pi / 2)
        >>> (Q @ [1.0, 0.0, 5.0]).round(12) + 0.0
        array([0., 1., 5.])
        >>> S.expm(np.linspace(0, 1, 11)).shape
        (11, 3, 3)
        """
        times = _inputs.times(t)
        dtype = _inputs.floating(self.dtype, times.promotes)
        real = _inputs.real_part(dtype)
        G = None if self._is_direct() else self._gram(real)
        s = _linear.solve(self.U, self.V, None, times.values, self.method, real, G)
        return LowRankUnitary(self, times.values, s, dtype)

    def expm_multiply(self, B: Any, t: Any = 1.0, *, out: Any = None) -> np.ndarray:
        """Apply exp(tS) to B; the same as `skew_expm_multiply` with the Gram matrix kept.

        Parameters
        ----------
        B : array_like, (n,) or (…, n, k)
        t : float or 1-D array_like, optional
        out : ndarray, optional

        Returns
        -------
        ndarray

        Raises
        ------
        ValueError, TypeError
            As `skew_expm_multiply`.

        Examples
        --------
        >>> import numpy as np
        >>> from lowrank_expm import LowRankSkew
        >>> S = LowRankSkew([0.0, 1.0, 0.0], [1.0, 0.0, 0.0])
        >>> S.expm_multiply(np.array([1.0, 0.0, 5.0]), [0.0, np.pi / 2]).round(12) + 0.0
        array([[1., 0., 5.],
               [0., 1., 5.]])
        """
        G = None if self._is_direct() else self._gram
        return _multiply(self.U, self.V, B, t, self.method, out, G)

    def expm_frechet(self, dU: Any, dV: Any, t: Any = 1.0) -> LowRankFrechet:
        """The derivative of exp(tS) in a direction of U and V, as an operator.

        Parameters
        ----------
        dU, dV : array_like or None
            The direction, in the shapes of U and V; None stands for zero.
        t : float, optional
            One number: for a grid, make one operator for each t.

        Returns
        -------
        LowRankFrechet
            The Fréchet derivative of exp at tS in the direction t dS, where
            dS = dU Vᴴ + U dVᴴ − V dUᴴ − dV Uᴴ; it applies to vectors and is never formed.

        Raises
        ------
        ValueError, TypeError
            For a direction that does not fit, a t that is not one finite real number.

        See Also
        --------
        lowrank_expm.derivatives.jvp : the derivative of exp(tS)B, with B and t in the direction.

        Notes
        -----
        The same as ``scipy.linalg.expm_frechet(t * S, t * dS)``, in O(n m² + m³).

        Examples
        --------
        >>> import numpy as np
        >>> from lowrank_expm import LowRankSkew
        >>> rng = np.random.default_rng(0)
        >>> U, V, dU, dV = rng.standard_normal((4, 100, 2)) / 10
        >>> L = LowRankSkew(U, V).expm_frechet(dU, dV)
        >>> h = 1e-6
        >>> ahead, behind = (LowRankSkew(U + s * dU, V + s * dV).expm() for s in (h, -h))
        >>> b = rng.standard_normal(100)
        >>> bool(np.linalg.norm(L @ b - (ahead @ b - behind @ b) / (2 * h)) < 1e-8)
        True
        """
        from .frechet import _frechet

        return _frechet(self, dU, dV, t)

    def _is_direct(self) -> bool:
        """Whether exponentials take the direct route."""
        n, r = self.U.shape[-2:]
        return self.method == "direct" or (n <= 2 * r and self.method != "gram")

    def _gram(self, real: np.dtype) -> np.ndarray:
        """The Gram matrix of [U V] in a precision, accumulated at first use."""
        if real not in self._grams:
            dtype = _inputs.with_kind(real, self.U, self.V)
            self._grams[real] = gram(Frame((self.U, self.V)), dtype)
        return self._grams[real]
