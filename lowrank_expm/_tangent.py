"""The derivatives of exp(tS)B at one t, by each of the three routes; arguments are checked.

exp(tS) = I + F C Fᴴ moves, with X = [U V], by L = dX P Fᴴ + F N Fᴴ + F R dXᴴ: the routes differ
in their frame F and in the m × m matrices. Every class holds such matrices, and references to
arrays of its caller.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from . import _linear, core
from ._array import adjoint, eye, is_complex, library, namespace
from .core import spectral
from .core.exponential import apply_j, skew_of
from .passes import Frame, passes_for
from .passes.portable_passes import beside

Bars = tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]
Targets = tuple[np.ndarray, np.ndarray, np.ndarray] | None


class Tangent(NamedTuple):
    """L = dX P Fᴴ + F N Fᴴ + F R dXᴴ; without a frame, L = N."""

    moved: Frame | None
    F: Frame | None
    P: np.ndarray
    N: np.ndarray
    R: np.ndarray

    @property
    def adjoint(self) -> Tangent:
        """Lᴴ."""
        return self._replace(P=adjoint(self.R), N=adjoint(self.N), R=adjoint(self.P))

    def astype(self, dtype: np.dtype) -> Tangent:
        """The same with small matrices of another dtype, in which it then computes."""
        P, N, R = (a.astype(dtype, copy=False) for a in (self.P, self.N, self.R))
        return self._replace(P=P, N=N, R=R)

    def __matmul__(self, B: np.ndarray) -> np.ndarray:
        """L @ B."""
        if self.F is None or self.moved is None:
            return self.N @ B
        dtype = self.N.dtype
        T = project(self.F, B, dtype)
        Z = self.N @ T + self.R @ project(self.moved, B, dtype)
        Y = update(self.F, Z, None, dtype)
        return update(self.moved, self.P @ T, Y, dtype, Y)


class Gram(NamedTuple):
    """F = X with Gram matrix G and T = XᴴB, where G can be trusted.

    `within` bounds the squarings where no value may be looked at.

    C is a function of G, P = R = C and N = dC. In reverse, with P = XᴴȲ, Z = C T and T̄ = CᴴP:
    B̄ = Ȳ + X T̄ and X̄ = Ȳ Zᴴ + B T̄ᴴ + X (Ḡ + Ḡᴴ), where Ḡ, the adjoint of G ↦ C applied to
    P Tᴴ, is the forward derivative of the core at −t.
    """

    X: Frame
    G: np.ndarray
    T: np.ndarray
    t: np.ndarray
    B: np.ndarray
    within: int | None = None

    def tangent(self, dU: np.ndarray, dV: np.ndarray) -> Tangent:
        """L in a direction."""
        inner = _project_both(self.X, dU, dV, self.G.dtype)
        C, dC = core.skew_derivative(self.G, self.t, inner + adjoint(inner), self.within)
        return Tangent(Frame((dU, dV)), self.X, C, dC, C)

    def jvp(self, dU: np.ndarray, dV: np.ndarray, dB: np.ndarray, dt: np.ndarray) -> np.ndarray:
        """The derivative of exp(tS)B."""
        L = self.tangent(dU, dV)
        Z = L.P @ project(self.X, dB, self.G.dtype)
        Z = Z + dt * apply_j(self.T + self.G @ (L.P @ self.T))
        return _moved(L, self.B, self.T, Z, dB)

    def vjp(self, Ybar: np.ndarray, out: Targets = None) -> Bars:
        """The cotangents of U, V, B and t, the first three in `out` if that is given."""
        return self.pulled(Ybar, project(self.X, Ybar, self.G.dtype), out)

    def pulled(self, Ybar: np.ndarray, P: np.ndarray, out: Targets = None) -> Bars:
        """The same with P = XᴴȲ; nothing else here is a sum over the rows."""
        dtype, T = self.G.dtype, self.T
        back, Gbar = core.skew_derivative(self.G, -self.t, P @ adjoint(T), self.within)
        Z, Tbar = adjoint(back) @ T, back @ P
        require_range(Gbar, Z, Tbar)
        tbar = _inner(P, apply_j(T + self.G @ Z))
        given = {} if out is None else {"out": out}
        bars = passes_for(self.T).combine(
            self.X, Ybar, self.B, Gbar + adjoint(Gbar), Z, Tbar, dtype, **given
        )
        return *bars, tbar


class Framed(NamedTuple):
    """Q = F root with orthonormal (or zero) columns and X = Q R, where G cannot be trusted.

    With K = R J Rᴴ, b = QᴴB and D = QᴴdX, the part of dX outside range(Q) meets φ₁(tK) and the
    part inside the derivative of exp at tK, both of them from the eigenvalues of K:
    dY = t dX J Rᴴφ₁b + Q [exp'(tDJRᴴ + tRJDᴴ) b − tDJRᴴφ₁b + tφ₁RJ(dXᴴB − Dᴴb)] + exp(tS) dB.
    Q is not differentiated, so the result does not depend on which Q it is.
    """

    X: Frame
    F: Frame
    root: np.ndarray
    JRh: np.ndarray
    spectrum: spectral.Spectrum
    T: np.ndarray
    t: np.ndarray
    B: np.ndarray

    @classmethod
    def of(cls, X: Frame, s: _linear.Solution, t: np.ndarray, B: np.ndarray) -> Framed:
        """From a solution by the route "qr"."""
        assert s.frame is not None
        assert s.G is not None
        root, R = spectral.orthonormaliser(s.G)
        R = R @ _triangular(s.frame)
        spectrum = spectral.spectrum(skew_of(R))
        return cls(X, s.frame, root, apply_j(adjoint(R)), spectrum, s.T, t, B)

    def tangent(self, dU: np.ndarray, dV: np.ndarray) -> Tangent:
        """L in a direction."""
        t, JRh, root = self.t, self.JRh, self.root
        phi = spectral.phi1(self.spectrum, t)
        D = adjoint(root) @ _project_both(self.F, dU, dV, root.dtype)
        ahead, back = t * JRh @ phi, -t * phi @ adjoint(JRh)
        E = t * D @ JRh
        N = spectral.exp_derivative(self.spectrum, t, E - adjoint(E))
        N = root @ (N - D @ ahead - back @ adjoint(D)) @ adjoint(root)
        return Tangent(Frame((dU, dV)), self.F, ahead @ adjoint(root), N, root @ back)

    def jvp(self, dU: np.ndarray, dV: np.ndarray, dB: np.ndarray, dt: np.ndarray) -> np.ndarray:
        """The derivative of exp(tS)B."""
        turn, motion = self._turn(self.t), dt * spectral.generator_exp(self.spectrum, self.t)
        Z = turn @ self._inside(project(self.F, dB, self.root.dtype))
        Z = self.root @ (Z + motion @ self._inside(self.T))
        return _moved(self.tangent(dU, dV), self.B, self.T, Z, dB)

    def vjp(self, Ybar: np.ndarray, out: Targets = None) -> Bars:
        """The cotangents of U, V, B and t, in new memory."""
        return self.pulled(Ybar, project(self.F, Ybar, self.root.dtype))

    def pulled(self, Ybar: np.ndarray, P: np.ndarray) -> Bars:
        """The same with P = FᴴȲ; nothing else here is a sum over the rows."""
        t, JRh, dtype = self.t, self.JRh, self.root.dtype
        P, b = self._inside(P), self._inside(self.T)
        phi = spectral.phi1(self.spectrum, t)
        Z, Tbar = t * JRh @ phi @ b, -t * JRh @ adjoint(phi) @ P
        E = spectral.exp_derivative(self.spectrum, -t, t * P @ adjoint(b))
        D = (E - adjoint(E)) @ adjoint(JRh) - P @ adjoint(Z) - b @ adjoint(Tbar)
        require_range(D, Z, Tbar)
        U, V, _ = passes_for(b).combine(self.X, Ybar, self.B, 0 * (JRh @ D), Z, Tbar, dtype)
        K, r = self.root @ D, U.shape[-1]
        U = update(self.F, K[..., :r], U, dtype, U)
        V = update(self.F, K[..., r:], V, dtype, V)
        B = update(self.F, self.root @ (self._turn(-t) @ P), Ybar, dtype)
        return U, V, B, _inner(P, spectral.generator_exp(self.spectrum, t) @ b)

    def _inside(self, T: np.ndarray) -> np.ndarray:
        """Qᴴa from Fᴴa."""
        return adjoint(self.root) @ T

    def _turn(self, t: np.ndarray) -> np.ndarray:
        """exp(tK) − I."""
        values = spectral.exp(self.spectrum, t)
        return values - eye(values)


class Direct(NamedTuple):
    """No frame: K = S itself, n × n, where n ≤ 2r.

    With E ↦ L(tK, tE) the derivative of exp(tK), its adjoint is E ↦ −L(−tK, −tE).
    """

    U: np.ndarray
    V: np.ndarray
    K: np.ndarray
    t: np.ndarray
    B: np.ndarray
    within: int | None = None

    @classmethod
    def of(
        cls, U: np.ndarray, V: np.ndarray, t: np.ndarray, B: np.ndarray, within: int | None = None
    ) -> Direct:
        """From factors of one dtype."""
        M = U @ adjoint(V)
        return cls(U, V, M - adjoint(M), t, B, within)

    def _derivative(self, M: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """exp(tK) − I and its derivative in the direction M − Mᴴ."""
        return core.exp_derivative(self.K, self.t, M - adjoint(M), self.within)

    def tangent(self, dU: np.ndarray, dV: np.ndarray) -> Tangent:
        """L in a direction."""
        _, N = self._derivative(dU @ adjoint(self.V) + self.U @ adjoint(dV))
        return Tangent(None, None, N, N, N)

    def jvp(self, dU: np.ndarray, dV: np.ndarray, dB: np.ndarray, dt: np.ndarray) -> np.ndarray:
        """The derivative of exp(tS)B."""
        C, N = self._derivative(dU @ adjoint(self.V) + self.U @ adjoint(dV))
        return N @ self.B + dt * (self.K @ (self.B + C @ self.B)) + (dB + C @ dB)

    def vjp(self, Ybar: np.ndarray, out: Targets = None) -> Bars:
        """The cotangents of U, V, B and t, in new memory."""
        C, E = core.exp_derivative(self.K, -self.t, -Ybar @ adjoint(self.B), self.within)
        E = E - adjoint(E)
        B = Ybar + C @ Ybar
        return E @ self.V, -E @ self.U, B, -_inner(self.K @ B, self.B)


Linearised = Gram | Framed | Direct


def linearise(
    X: Frame, G: np.ndarray, T: np.ndarray, t: np.ndarray, B: np.ndarray, real: np.dtype
) -> tuple[np.ndarray, Linearised]:
    """exp(tS)B by the route that "auto" takes, and its derivatives by that route.

    Where the Gram matrix cannot be trusted for the one it cannot be for the other. A batch takes
    one route for the derivatives.
    """
    U, V = X.columns
    s = _linear.solve(U, V, B, t, "auto", real, G, T)
    batch = np.broadcast_shapes(X.batch, B.shape[:-2])
    Y = np.empty((*batch, *B.shape[-2:]), np.result_type(G, T))
    _linear.apply(s, s.C, B, Y, s.T)
    if s.frame is None:
        U, V = (a.astype(G.dtype, copy=False) for a in (U, V))
        return Y, Direct.of(U, V, t, B)
    if (s.route == "gram").all():
        return Y, Gram(X, G, T, t, B)
    if not (s.route == "qr").all():
        s = _linear.solve(U, V, B, t, "qr", real, G, T)
    return Y, Framed.of(X, s, t, B)


def project(F: Frame, B: np.ndarray, dtype: Any) -> np.ndarray:
    """FᴴB, by the library that holds F."""
    return passes_for(F.columns[0]).project(F, B, dtype)


def update(
    F: Frame, Z: np.ndarray, B: np.ndarray | None, dtype: Any, out: np.ndarray | None = None
) -> np.ndarray:
    """B + F Z, in `out` where that is given and can be."""
    if out is None and library(Z) is None:
        kind = np.result_type(dtype, Z)
        out = np.empty((*Z.shape[:-2], F.rows, Z.shape[-1]), kind)
        Z = np.ascontiguousarray(Z)
    return passes_for(F.columns[0]).update(F, Z, B, dtype, out)


def _project_both(F: Frame, dU: np.ndarray, dV: np.ndarray, dtype: Any) -> np.ndarray:
    """FᴴdX."""
    return beside(*(project(F, d, dtype) for d in (dU, dV)))


def _moved(L: Tangent, B: np.ndarray, T: np.ndarray, Z: np.ndarray, dB: np.ndarray) -> np.ndarray:
    """L B + F Z + dB, with T = FᴴB."""
    assert L.moved is not None
    assert L.F is not None
    dtype = L.N.dtype
    Z = Z + L.N @ T + L.R @ project(L.moved, B, dtype)
    require_range(Z, L.P)
    dY = update(L.F, Z, dB, dtype)
    return update(L.moved, L.P @ T, dY, dtype, dY)


def require_range(*arrays: np.ndarray) -> None:
    """Raise where the small matrices of a derivative have overflowed; NumPy only."""
    if library(arrays[0]) is None and not all(np.isfinite(a).all() for a in arrays):
        raise ValueError("the derivative overflows; scale its direction or cotangent down")


def _inner(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Re ⟨a, b⟩ over the whole batch."""
    xp = namespace(a)
    if is_complex(a):
        return xp.sum(xp.real(a) * xp.real(b) + xp.imag(a) * xp.imag(b))
    return xp.sum(a * b)


def _triangular(frame: Frame) -> np.ndarray:
    """R with X = F R."""
    first, *rest = frame.factors
    for R in rest:
        first = R @ first
    return first
