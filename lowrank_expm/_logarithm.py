"""The principal logarithm of I + F C Fᴴ as a generator U Vᴴ − V Uᴴ, in linear cost.

In an orthonormal basis E of range(F) the operator is I + E M Eᴴ with I + M unitary, p × p. The
Schur form of M, not of I + M, gives small angles with all their digits; for a real M it is the
real one, whose 2 × 2 blocks are rotations, so that the result is real whatever the angles.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

from . import _linear
from ._array import adjoint
from .core import spectral
from .passes import Frame
from .passes.basis import robust_basis
from .passes.numpy_passes import no_vectors, update

Pair = tuple[np.ndarray, np.ndarray]


def factors(s: _linear.Solution) -> Pair:
    """U and V, (…, n, q), with exp(U Vᴴ − V Uᴴ) = I + F C Fᴴ and angles in [−π, π]."""
    if s.frame is None:
        return _small_factors(s.C)
    frame, R, root = _orthonormal(s)
    Z = np.concatenate(_small_factors(R @ s.C @ adjoint(R)), axis=-1)
    Z = root @ Z
    batch = np.broadcast_shapes(frame.batch, Z.shape[:-2])
    out = np.empty((*batch, frame.rows, Z.shape[-1]), Z.dtype)
    update(frame, Z, None, Z.dtype, out)
    U, V = np.split(out, 2, axis=-1)
    return np.ascontiguousarray(U), np.ascontiguousarray(V)


def _orthonormal(s: _linear.Solution) -> tuple[Frame, np.ndarray, np.ndarray]:
    """A frame, R and root such that F = E R with E = frame · root orthonormal, or zero columns."""
    assert s.frame is not None
    assert s.G is not None
    frame, G = s.frame, s.G
    triangle = np.broadcast_to(np.eye(G.shape[-1], dtype=G.dtype), G.shape)
    if not (s.route == "qr").all():
        frame, G, triangle, _ = robust_basis(frame, G, no_vectors(frame.rows, G.dtype), G.dtype)
    root, R = spectral.orthonormaliser(G)
    return frame, R @ triangle, root


def _small_factors(M: np.ndarray) -> Pair:
    """The factors of log(I + M) for a batch of small matrices, as wide as the widest needs."""
    batch, p = M.shape[:-2], M.shape[-1]
    single = _real_planes if M.dtype.kind != "c" else _complex_planes
    pairs = {index: single(M[index]) for index in np.ndindex(*batch)}
    width = max((u.shape[-1] for u, _ in pairs.values()), default=0)
    U, V = (np.zeros((*batch, p, width), M.dtype) for _ in range(2))
    for index, (u, v) in pairs.items():
        U[index][:, : u.shape[-1]], V[index][:, : v.shape[-1]] = u, v
    return U, V


def _real_planes(M: np.ndarray) -> Pair:
    """Σ θ (z₂z₁ᵀ − z₁z₂ᵀ) over the planes that I + M turns, from z₁ towards z₂ by θ."""
    planes = _planes(M)
    U, V = (np.zeros((len(M), len(planes)), M.dtype) for _ in range(2))
    for j, (first, second, angle) in enumerate(planes):
        root = np.sqrt(abs(angle))
        U[:, j], V[:, j] = root * np.sign(angle) * second, root * first
    return U, V


def _planes(M: np.ndarray) -> list[tuple[np.ndarray, np.ndarray, float]]:
    """Pairs of orthonormal vectors with the angle from the first to the second."""
    T, Z = _schur(M, "real")
    planes, flipped, j = [], [], 0
    while j < len(T):
        if j + 1 < len(T) and T[j + 1, j] != 0:
            (a, b), (c, d) = T[j : j + 2, j : j + 2]
            planes.append((Z[:, j], Z[:, j + 1], float(np.arctan2((c - b) / 2, 1 + (a + d) / 2))))
            j += 2
            continue
        if T[j, j] < -1:
            flipped.append(Z[:, j])
        j += 1
    if len(flipped) % 2:
        raise ValueError("the operator has determinant −1, so it has no real logarithm")
    halves = zip(flipped[::2], flipped[1::2], strict=True)
    return planes + [(first, second, np.pi) for first, second in halves]


def _schur(M: np.ndarray, output: Literal["real", "complex"]) -> Pair:
    """The Schur form and vectors of a matrix of any size: LAPACK takes tiny ones for zero."""
    from scipy.linalg import schur

    if not M.size:
        return M, M
    largest = float(np.abs(M).max())
    exponent = max(int(np.frexp(largest)[1]), -int(np.finfo(M.dtype).maxexp) + 8)
    T, Z = schur(M * 2.0**-exponent, output=output)
    return T * 2.0**exponent, Z


def _complex_planes(M: np.ndarray) -> Pair:
    """Σ iλ z zᴴ, a positive and a negative λ to a column, largest with largest."""
    T, Z = _schur(M, "complex")
    value = np.diagonal(T)
    angles = np.arctan2(value.imag, 1 + value.real)
    order = np.argsort(angles)
    roots = Z * np.sqrt(np.abs(angles))
    positive = roots[:, order[::-1][: int((angles > 0).sum())]]
    negative = roots[:, order[: int((angles < 0).sum())]]
    width = max(positive.shape[1], negative.shape[1])
    p, q = (np.pad(a, ((0, 0), (0, width - a.shape[1]))) for a in (positive, negative))
    half = np.sqrt(0.5)
    return (half * (p + q)).astype(M.dtype), (-1j * half * (p - q)).astype(M.dtype)
