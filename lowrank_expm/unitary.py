"""LowRankUnitary: the unitary I + F C Fᴴ and what is known about it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from . import _inputs, _linear
from ._array import adjoint, from_the_left
from ._scipy import aslinearoperator

if TYPE_CHECKING:
    from .skew import LowRankSkew

__all__ = ["Certificate", "LowRankUnitary"]


@dataclass(frozen=True, eq=False)
class Certificate:
    """What the library knows about a computed exponential; arrays where the operator is a batch.

    Attributes
    ----------
    route : str or ndarray of str
        "gram", "qr" or "direct": the frame that was used.
    angle : float or ndarray
        |t| ‖S‖₂, the largest rotation angle in radians.
    order : int
        Degree of the Taylor polynomial or, where it is 7 or 13, which no polynomial has here, order
        of the Padé approximant (that of the largest angle of a batch).
    squarings : int
        Number of doublings (the largest of a batch).
    defect_bound : float or ndarray
        Bound on ‖QᴴQ − I‖₂, from m × m arithmetic alone.
    error_bound : float or ndarray
        Bound on the forward error ‖Q − exp(tS)‖₂.

    Examples
    --------
    >>> from lowrank_expm import LowRankSkew
    >>> certificate = LowRankSkew([0.0, 3.0, 0.0], [1.0, 0.0, 0.0]).expm().certificate
    >>> certificate.route, certificate.angle, certificate.defect_bound < 1e-14
    ('gram', 3.0, True)
    """

    route: Any
    angle: Any
    order: int
    squarings: int
    defect_bound: Any
    error_bound: Any


class LowRankUnitary:
    """The unitary exp(tS) = I + F C Fᴴ, made by `LowRankSkew.expm`.

    Attributes
    ----------
    shape : tuple of int
        (…, n, n), with the batch and grid axes in front.
    dtype : numpy.dtype
        The dtype of the operator's entries.
    ndim : int
        ``len(shape)``.

    Notes
    -----
    Applying it costs O(n m k + m² k) time: one pass that reads rows for FᴴB and one that adds
    F C FᴴB. Nothing of size n × m beyond U and V is held.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm import LowRankSkew
    >>> Q = LowRankSkew([1.0, 0.0, 0.0], [0.0, 1.0, 0.0]).expm(-np.pi / 2)
    >>> (Q @ np.array([1.0, 0.0, 2.0])).round(12) + 0.0
    array([0., 1., 2.])
    >>> Q.orthogonality_defect() < 1e-15
    True
    """

    # NumPy then leaves `array @ Q` to `__rmatmul__` instead of treating Q as an object array.
    __array_ufunc__ = None

    def __init__(
        self,
        generator: LowRankSkew,
        t: np.ndarray,
        solution: _linear.Solution | Any,
        dtype: np.dtype,
        *,
        adjoint: bool = False,
        conjugate: bool = False,
    ) -> None:
        self._generator = generator
        self._t = t
        self._solution = solution
        self._adjoint = adjoint
        self._conjugate = conjugate
        self.dtype = dtype
        n = generator.shape[-1]
        self.shape: tuple[int, ...] = (*solution.C.shape[:-2], n, n)
        self._certificate: Certificate | None = None

    @property
    def ndim(self) -> int:
        """The number of axes of `shape`."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"LowRankUnitary(shape={self.shape}, dtype={self.dtype})"

    @property
    def core(self) -> np.ndarray:
        """C of I + F C Fᴴ, (…, p, p): p = 2r, or n on the direct route."""
        C = self._solution.C
        if self._adjoint:
            C = adjoint(C)
        return C.conj() if self._conjugate else C

    def frame(self, start: int = 0, stop: int | None = None) -> np.ndarray:
        """Rows start to stop of F in I + F C Fᴴ as a dense array (…, rows, p).

        Parameters
        ----------
        start, stop : int, optional
            A range of rows, as in a slice; all of them by default.

        Returns
        -------
        ndarray
            The identity on the direct route; [U V] on the gram route; on the qr route a
            well-conditioned frame of the same range.

        Examples
        --------
        >>> from lowrank_expm import LowRankSkew
        >>> Q = LowRankSkew([0.0, 2.0, 0.0], [1.0, 0.0, 0.0]).expm()
        >>> Q.frame(stop=2)
        array([[0., 1.],
               [2., 0.]])
        """
        F = _linear.dense_frame(self._solution, range(self.shape[-1])[start:stop])
        return F.conj() if self._conjugate else F

    @property
    def H(self) -> LowRankUnitary:
        """The adjoint, which is the inverse."""
        return self._twin(adjoint=not self._adjoint)

    @property
    def T(self) -> LowRankUnitary:
        """The transpose."""
        return self._twin(adjoint=not self._adjoint, conjugate=not self._conjugate)

    def _twin(self, **flags: bool) -> LowRankUnitary:
        """The same operator with other flags."""
        flags = {"adjoint": self._adjoint, "conjugate": self._conjugate, **flags}
        if self.dtype.kind != "c":
            flags["conjugate"] = False
        return LowRankUnitary(self._generator, self._t, self._solution, self.dtype, **flags)

    def __matmul__(self, B: Any) -> np.ndarray:
        """Q @ B for B of shape (n,) or (…, n, k), broadcast over the batch."""
        if isinstance(B, LowRankUnitary):
            raise TypeError("Q1 @ Q2 is not formed; apply one after the other: Q1 @ (Q2 @ B)")
        B, vector = _inputs.vectors(B, self.shape[-1])
        shape = _inputs.batch(
            f"an operator of shape {self.shape} and B of shape {B.shape}", self._solution.C, B
        )
        dtype = _inputs.floating(self.dtype, B.dtype)
        if self._conjugate and B.dtype.kind == "c":
            B = B.conj()
        C = self._solution.C
        Y = np.empty((*shape, *B.shape[-2:]), dtype)
        _linear.apply(self._solution, adjoint(C) if self._adjoint else C, B, Y)
        if self._conjugate:
            np.conj(Y, out=Y)
        return Y[..., 0] if vector else Y

    def __rmatmul__(self, B: Any) -> np.ndarray:
        """B @ Q for B of shape (n,) or (…, k, n)."""
        return from_the_left(self.T, _inputs.array("B", B))

    def to_dense(self) -> np.ndarray:
        """The operator as an (…, n, n) array; O(n² m) time.

        Returns
        -------
        ndarray

        Examples
        --------
        >>> import numpy as np
        >>> from lowrank_expm import LowRankSkew
        >>> Q = LowRankSkew([0.0, 1.0, 0.0], [1.0, 0.0, 0.0]).expm(np.pi / 2)
        >>> Q.to_dense().round(12) + 0.0
        array([[ 0., -1.,  0.],
               [ 1.,  0.,  0.],
               [ 0.,  0.,  1.]])
        """
        return self @ np.eye(self.shape[-1], dtype=self.dtype)

    def aslinearoperator(self) -> Any:
        """The operator as a `scipy.sparse.linalg.LinearOperator`.

        Returns
        -------
        scipy.sparse.linalg.LinearOperator

        Raises
        ------
        ValueError
            For a batch: SciPy's operators are single matrices.

        Examples
        --------
        >>> import numpy as np
        >>> from lowrank_expm import LowRankSkew
        >>> A = LowRankSkew([0.0, 1.0, 0.0], [1.0, 0.0, 0.0]).expm(np.pi).aslinearoperator()
        >>> A.shape, A.matvec(np.array([1.0, 0.0, 2.0])).round(12) + 0.0
        ((3, 3), array([-1.,  0.,  2.]))
        """
        return aslinearoperator(self)

    def logm(self) -> LowRankSkew:
        """The principal logarithm: a generator S with exp(S) = Q and angles in [−π, π].

        Returns
        -------
        LowRankSkew
            Real for a real operator. For exp(tS) with |t| ‖S‖₂ below π it is tS.

        Raises
        ------
        ValueError
            For a real operator of determinant −1, which no exponential has.

        Notes
        -----
        O(n m² + m³) time and a result of n × m numbers: the small unitary matrix in an
        orthonormal basis is reduced to Schur form (Higham, Functions of Matrices, section 11.1,
        doi:10.1137/1.9780898717778). Where ‖Q − I‖ is far below 1, the result has small relative
        errors too, except that the routes "auto" and "gram" take columns of U and V for zero whose
        squares underflow, below 10⁻¹⁵⁴ in double precision. Near π a logarithm is ill-conditioned:
        an error u in Q turns the plane of an angle π − ε by u/ε, and exp of the result is still Q
        to rounding. For an angle of exactly π there are many: a real operator turns a plane by π in
        either sense, and any plane will do where −1 is a multiple eigenvalue. The result is one of
        them, and its exp is Q; raising an error instead would make the answer depend on the last
        bit.

        Examples
        --------
        >>> import numpy as np
        >>> from lowrank_expm import LowRankSkew
        >>> S = LowRankSkew([0.0, 2.0, 0.0], [1.0, 0.0, 0.0])
        >>> S.expm().logm().to_dense().round(12) + 0.0
        array([[ 0., -2.,  0.],
               [ 2.,  0.,  0.],
               [ 0.,  0.,  0.]])
        """
        from ._logarithm import factors
        from .skew import LowRankSkew

        U, V = (a.astype(self.dtype, copy=False) for a in factors(self._solution))
        if self._conjugate:
            U, V = U.conj(), V.conj()
        S = LowRankSkew(U, V, method=self._generator.method)
        return S.H if self._adjoint else S

    def orthogonality_defect(self) -> Any:
        """The true defect ‖QᴴQ − I‖₂ of this operator; see `verify.orthogonality_defect`.

        Returns
        -------
        float or ndarray

        Examples
        --------
        >>> from lowrank_expm import LowRankSkew
        >>> LowRankSkew([0.0, 1e8, 0.0], [1.0, 0.0, 0.0]).expm().orthogonality_defect() < 1e-14
        True
        """
        from .verify import orthogonality_defect

        return orthogonality_defect(self)

    @property
    def certificate(self) -> Certificate:
        """What is known about this operator, computed when first asked for and then kept."""
        if self._certificate is None:
            s, t = self._solution, np.abs(self._t)
            norm = np.asarray(self._generator.norm())
            angle = t.reshape(t.shape + (1,) * norm.ndim) * norm
            error = _linear.error_bound(s, t)
            route = np.broadcast_to(s.route, s.bound.shape)
            self._certificate = Certificate(
                route=_plain(route),
                angle=_plain(np.broadcast_to(angle, s.bound.shape)),
                order=s.order,
                squarings=s.squarings,
                defect_bound=_plain(s.bound),
                error_bound=_plain(error),
            )
        return self._certificate


def _plain(a: np.ndarray) -> Any:
    """A Python scalar for one operator, an array for a batch."""
    return a.item() if a.ndim == 0 else a
