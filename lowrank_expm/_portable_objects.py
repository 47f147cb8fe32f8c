"""LowRankSkew and LowRankUnitary on arrays of other libraries.

They do what can be done on the device, in the array's own precision; what measures in extended
precision on the host (`verify`, `logm`, `expm_frechet`) says that it wants NumPy arrays.
"""

from __future__ import annotations

from typing import Any, NoReturn

from ._array import Array, adjoint, device, eps, eye, from_the_left, is_complex, namespace
from ._foreign import arguments, working
from ._inputs import batch
from ._portable import Solved, applied, solve, triangular
from .core.certificate import ERROR_FACTOR, error_bound, gram_error
from .core.exponential import skew_of
from .passes import Frame, passes_for
from .skew import LowRankSkew
from .unitary import Certificate, LowRankUnitary


class PortableSkew(LowRankSkew):
    """The generator S = U Vᴴ − V Uᴴ by factors of another array library than NumPy."""

    def __init__(self, U: Any, V: Any, *, method: Any = "auto") -> None:
        a = arguments(U, V, None, 0.0)
        self._U, self._V = ((x[:, None] if x.ndim == 1 else x) for x in (U, V))
        self.method = method
        self.dtype = a.dtype
        self._batch = batch("U and V", a.U, a.V)
        n = int(a.U.shape[-2])
        self.shape = (*self._batch, n, n)

    @property
    def _xp(self) -> Any:
        """The namespace of the factors; a module, which no pickle holds."""
        return namespace(self.U)

    @property
    def T(self) -> LowRankSkew:
        """The transpose."""
        U, V = (self._xp.conj(x) if is_complex(x) else x for x in (self.V, self.U))
        return LowRankSkew(U, V, method=self.method)

    def __matmul__(self, B: Any) -> Any:
        """S @ B for B of shape (n,) or (…, n, k), broadcast over the batch."""
        a = arguments(self.U, self.V, B, 0.0)
        Y = a.U @ (adjoint(a.V) @ a.B) - a.V @ (adjoint(a.U) @ a.B)
        return a.unfold(Y)

    def __rmatmul__(self, B: Any) -> Any:
        """B @ S for B of shape (n,) or (…, k, n)."""
        return from_the_left(self.T, B)

    def to_dense(self) -> Any:
        """S as an (…, n, n) array."""
        a = arguments(self.U, self.V, None, 0.0)
        M = a.U @ adjoint(a.V)
        return self._xp.astype(M - adjoint(M), self.dtype, copy=False)

    def _eigenvalues(self) -> Any:
        """Eigenvalues of −i R J Rᴴ, or of −iS where n ≤ m."""
        a = arguments(self.U, self.V, None, 0.0)
        n, r = a.U.shape[-2:]
        xp, where = self._xp, device(a.U)
        if n <= 2 * r:
            M = a.U @ adjoint(a.V)
            W, rest = M - adjoint(M), 2 * r - n
        else:
            W, rest = skew_of(triangular(a)), 0
        wide = xp.complex128 if working(xp, W.dtype) == xp.float64 else xp.complex64
        found = xp.linalg.eigvalsh(-1j * xp.astype(W, wide))
        if rest:
            zeros = xp.zeros((*found.shape[:-1], rest), dtype=found.dtype, device=where)
            found = xp.sort(xp.concat([found, zeros], axis=-1), axis=-1)
        return found

    def angles(self) -> Any:
        """The eigenvalues of −iS on the range of [U V], ascending."""
        return self._eigenvalues()

    def norm(self, ord: int | str = 2) -> Any:
        """The 2-norm or the Frobenius norm of S, as an array without waiting for a device."""
        xp, angles = self._xp, self.angles()
        if ord == 2:
            return xp.max(xp.abs(angles), axis=-1)
        if ord == "fro":
            return xp.sqrt(xp.sum(angles * angles, axis=-1))
        raise ValueError(f'ord is {ord!r}; it must be 2 or "fro"')

    def expm(self, t: Any = 1.0) -> LowRankUnitary:
        """The unitary exp(tS) as an object that applies to vectors."""
        a = arguments(self.U, self.V, None, t)
        return PortableUnitary(self, a.t, solve(a, self.method), a.dtype)

    def expm_multiply(self, B: Any, t: Any = 1.0, *, out: Any = None) -> Any:
        """Apply exp(tS) to B."""
        from .skew import skew_expm_multiply

        return skew_expm_multiply(self.U, self.V, B, t, method=self.method, out=out)

    def expm_frechet(self, dU: Any, dV: Any, t: Any = 1.0) -> NoReturn:
        """For NumPy arrays only."""
        _only_numpy("expm_frechet", "use derivatives.jvp")


class PortableUnitary(LowRankUnitary):
    """The unitary exp(tS) on the device of its generator."""

    _solution: Any

    def __init__(self, generator: LowRankSkew, *given: Any, **flags: Any) -> None:
        super().__init__(generator, *given, **flags)
        self._versions = _versions(generator)

    def __setstate__(self, state: dict[str, Any]) -> None:
        """A copy has tensors of its own, whose changes are counted anew."""
        self.__dict__.update(state)
        self._versions = _versions(self._generator)

    def _twin(self, **flags: bool) -> LowRankUnitary:
        """The same operator with other flags."""
        flags = {"adjoint": self._adjoint, "conjugate": self._conjugate, **flags}
        if not is_complex(self._solution.core.C):
            flags["conjugate"] = False
        twin = PortableUnitary(self._generator, self._t, self._solution, self.dtype, **flags)
        twin._versions = self._versions
        return twin

    @property
    def core(self) -> Any:
        """C of I + F C Fᴴ."""
        C = self._solution.core.C
        C = adjoint(C) if self._adjoint else C
        return namespace(C).conj(C) if self._conjugate else C

    def frame(self, start: int = 0, stop: int | None = None) -> Any:
        """Rows start to stop of F in I + F C Fᴴ."""
        rows, C = slice(start, stop), self._solution.core.C
        if self._solution.frame is None:
            return eye(C)[rows, :]
        columns = self._solution.frame.columns
        F = passes_for(C).beside(*(a[..., rows, :] for a in columns))
        return namespace(F).conj(F) if self._conjugate else F

    def __matmul__(self, B: Any) -> Any:
        """Q @ B for B of shape (n,) or (…, n, k), broadcast over the batch."""
        if isinstance(B, LowRankUnitary):
            raise TypeError("Q1 @ Q2 is not formed; apply one after the other: Q1 @ (Q2 @ B)")
        if _versions(self._generator) != self._versions:
            raise ValueError(
                "U or V was changed in place since this operator was made; call expm again"
            )
        a = arguments(self._generator.U, self._generator.V, B, 0.0)
        batch(f"an operator of shape {self.shape} and B of shape {tuple(B.shape)}", self.core, a.B)
        xp, C = namespace(a.B), self._solution.core.C
        C = xp.astype(adjoint(C) if self._adjoint else C, a.U.dtype, copy=False)
        b = xp.conj(a.B) if self._conjugate else a.B
        s = self._solution._replace(frame=self._frame_in(a.U.dtype))
        T = b if s.frame is None else passes_for(b).project(s.frame, b)
        Y = applied(s, C, T, b, self._t.ndim)
        return a.unfold(xp.conj(Y) if self._conjugate else Y)

    def __rmatmul__(self, B: Any) -> Any:
        """B @ Q for B of shape (n,) or (…, k, n)."""
        return from_the_left(self.T, B)

    def _frame_in(self, dtype: Any) -> Frame | None:
        """The frame in a dtype."""
        if self._solution.frame is None:
            return None
        columns = self._solution.frame.columns
        return Frame(tuple(namespace(c).astype(c, dtype, copy=False) for c in columns))

    def to_dense(self) -> Any:
        """The operator as an (…, n, n) array."""
        U = self._generator.U
        xp = namespace(U)
        return self @ xp.eye(self.shape[-1], dtype=self.dtype, device=device(U))

    @property
    def certificate(self) -> Certificate:
        """What is known about this operator, in arrays on its device; nothing waits for it."""
        if self._certificate is None:
            self._certificate = _certificate(self._generator, self._t, self._solution)
        return self._certificate

    def aslinearoperator(self) -> NoReturn:
        """For NumPy arrays only."""
        _only_numpy("aslinearoperator", "SciPy's operators hold NumPy arrays")

    def logm(self) -> NoReturn:
        """For NumPy arrays only."""
        _only_numpy("logm")

    def orthogonality_defect(self) -> NoReturn:
        """For NumPy arrays only."""
        _only_numpy("orthogonality_defect", "certificate.defect_bound bounds it on the device")


def _versions(S: LowRankSkew) -> tuple[Any, ...]:
    """How often the factors were changed in place, where the library counts that."""
    try:
        return tuple(getattr(a, "_version", None) for a in (S.U, S.V))
    except RuntimeError:  # torch counts no changes in inference mode
        return ()


def _certificate(S: LowRankSkew, t: Array, s: Solved) -> Certificate:
    """The certificate of a solution."""
    xp = namespace(t)
    a = arguments(S.U, S.V, None, 0.0)
    u, v = (xp.linalg.vector_norm(x, axis=-2) for x in (a.U, a.V))
    size = xp.linalg.vector_norm(u * v, axis=-1)
    norm = S.norm()
    t = xp.abs(xp.reshape(t, (*t.shape, *(1,) * norm.ndim)) if t.ndim else t)
    unit = eps(s.core.C) / 2
    error = error_bound(s.core.bound, s.core.squarings, t * size, unit)
    if s.G is not None:
        moved = gram_error(s.G, t * size, 4 * unit * s.G.shape[-1])
        error = error + ERROR_FACTOR * unit * moved
    return Certificate(s.route, t * norm, s.core.order, s.core.squarings, s.core.bound, error)


def _only_numpy(what: str, instead: str = "") -> NoReturn:
    """Refuse what is computed on the host in extended precision."""
    advice = f"; {instead}" if instead else ""
    raise TypeError(f"{what} is for NumPy arrays: convert U and V first{advice}")
