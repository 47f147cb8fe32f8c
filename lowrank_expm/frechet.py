"""LowRankFrechet: the directional derivative of exp(tS) as an operator."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from . import _inputs, _linear
from ._problem import direction, problem
from ._scipy import aslinearoperator
from ._tangent import Tangent, require_range

if TYPE_CHECKING:
    from .skew import LowRankSkew

__all__ = ["LowRankFrechet"]


class LowRankFrechet:
    """The derivative of exp at tS in the direction t dS, made by `LowRankSkew.expm_frechet`.

    With X = [U V] it is L = dX P Fᴴ + F N Fᴴ + F R dXᴴ, of rank at most 4r; it is never formed.

    Attributes
    ----------
    shape : tuple of int
        (…, n, n), with the batch axes in front.
    dtype : numpy.dtype
        The dtype of the operator's entries.
    ndim : int
        ``len(shape)``.

    Notes
    -----
    Applying it costs O(n m k) time and two passes over the rows, with m = 2r.

    Examples
    --------
    >>> import numpy as np
    >>> from lowrank_expm import LowRankSkew
    >>> x, y = np.array([1.0, 0.0]), np.array([0.0, 1.0])
    >>> L = LowRankSkew(x, y).expm_frechet(x, None, t=0.0)
    >>> L.shape, L @ x
    ((2, 2), array([0., 0.]))
    >>> L = LowRankSkew(x, y).expm_frechet(x, None, t=np.pi)
    >>> (L @ x).round(12) + 0.0
    array([0.        , 3.14159265])
    """

    # NumPy then leaves `array @ L` to us instead of treating L as an object array.
    __array_ufunc__ = None

    def __init__(
        self,
        tangent: Tangent,
        shape: tuple[int, ...],
        dtype: np.dtype,
        *,
        conjugate: bool = False,
    ) -> None:
        self._tangent = tangent
        self._conjugate = conjugate
        self.shape = shape
        self.dtype = dtype

    @property
    def ndim(self) -> int:
        """The number of axes of `shape`."""
        return len(self.shape)

    def __repr__(self) -> str:
        return f"LowRankFrechet(shape={self.shape}, dtype={self.dtype})"

    @property
    def H(self) -> LowRankFrechet:
        """The adjoint."""
        return LowRankFrechet(
            self._tangent.adjoint, self.shape, self.dtype, conjugate=self._conjugate
        )

    @property
    def T(self) -> LowRankFrechet:
        """The transpose."""
        conjugate = self.dtype.kind == "c" and not self._conjugate
        return LowRankFrechet(self._tangent.adjoint, self.shape, self.dtype, conjugate=conjugate)

    def __matmul__(self, B: Any) -> np.ndarray:
        """L @ B for B of shape (n,) or (…, n, k), broadcast over the batch."""
        B, vector = _inputs.vectors(B, self.shape[-1])
        batch = np.empty((*self.shape[:-2], 0, 0))
        shape = _inputs.batch(f"L of shape {self.shape} and B of shape {B.shape}", batch, B)
        dtype = _inputs.floating(self.dtype, B.dtype)
        real, N = _inputs.real_part(dtype), self._tangent.N
        L = self._tangent.astype(_inputs.with_kind(real, N))
        B = B.astype(_inputs.with_kind(real, N, B), copy=False)
        with np.errstate(over="ignore", invalid="ignore"):
            Y = (L @ (B.conj() if self._conjugate else B)).astype(dtype, copy=False)
        if not np.isfinite(Y).all():
            _linear._check(("B", B))
            require_range(Y)
        Y = Y.conj() if self._conjugate else Y
        Y = np.broadcast_to(Y, (*shape, *B.shape[-2:]))
        return Y[..., 0] if vector else Y

    def to_dense(self) -> np.ndarray:
        """The operator as an (…, n, n) array; O(n² m) time.

        Returns
        -------
        ndarray

        Examples
        --------
        >>> from lowrank_expm import LowRankSkew
        >>> S = LowRankSkew([1.0, 0.0], [0.0, 1.0])
        >>> S.expm_frechet([1.0, 0.0], None, t=0.0).to_dense() + 0.0
        array([[0., 0.],
               [0., 0.]])
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
        >>> L = LowRankSkew([1.0, 0.0], [0.0, 1.0]).expm_frechet([1.0, 0.0], None, t=np.pi)
        >>> L.aslinearoperator().matvec(np.array([1.0, 0.0])).round(12) + 0.0
        array([0.        , 3.14159265])
        """
        return aslinearoperator(self)


def _frechet(S: LowRankSkew, dU: Any, dV: Any, t: Any) -> LowRankFrechet:
    """The operator behind `LowRankSkew.expm_frechet`."""
    times = _inputs.times(t)
    if times.values.ndim:
        raise ValueError(
            f"t has shape {times.values.shape}; a derivative is taken at one t: "
            "call expm_frechet once for each"
        )
    n = S.shape[-1]
    dtype = _inputs.floating(S.dtype, times.promotes)
    p = problem(S.U, S.V, np.zeros((n, 0), S.dtype), t)
    dU, dV = (
        direction(name, d, a, a.shape[:-1] if np.ndim(d) == 1 and a.shape[-1] == 1 else a.shape)[0]
        for name, d, a in (("dU", dU, S.U), ("dV", dV, S.V))
    )
    if not p.frame.width or not n:
        zero = np.zeros(S.shape, p.work)
        return LowRankFrechet(Tangent(None, None, zero, zero, zero), S.shape, dtype)
    _, linear = p.linearised(p.t)
    with np.errstate(over="ignore", invalid="ignore"):
        L = linear.tangent(*p.scaled(dU, dV))
    require_range(L.P, L.N, L.R)
    return LowRankFrechet(L, S.shape, dtype)
