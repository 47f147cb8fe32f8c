"""exp, φ₁ and the derivative of exp at tK for a small skew-Hermitian K, from its eigenvalues.

With K = Z iΛ Zᴴ the derivative of exp multiplies ZᴴEZ by the divided differences
(e^{ia} − e^{ib})/(ia − ib) = e^{i(a+b)/2} sinc((a−b)/2), which divide by no gap and are accurate
for equal and for distant eigenvalues alike (Higham, Functions of Matrices, section 3.2,
doi:10.1137/1.9780898717778). Errors are a few u |t| ‖K‖ for K of any norm.
"""

from __future__ import annotations

from typing import NamedTuple

from .._array import Array, adjoint, is_complex, namespace

# Eigenvalues of the Gram matrix of a frame that is orthonormal but for columns of rounding noise:
# what lies below belongs to a direction in which F R is of the size of rounding.
NOISE = 0.25


class Spectrum(NamedTuple):
    """The eigenvalues iλ of a skew-Hermitian matrix, its eigenvectors, and whether it is real."""

    angles: Array
    vectors: Array
    real: bool


def orthonormaliser(G: Array) -> tuple[Array, Array]:
    """Matrices `root` and R with F = (F root) R and F root orthonormal, or zero, columns.

    For a frame F whose Gram matrix G is near the identity but for columns of rounding noise.
    """
    xp = namespace(G)
    values, vectors = xp.linalg.eigh(G)
    signal = values > NOISE
    size = xp.sqrt(xp.where(signal, values, xp.ones_like(values)))
    kept = xp.astype(signal, values.dtype)
    return vectors * (kept / size)[..., None, :], (kept * size)[..., :, None] * adjoint(vectors)


def spectrum(K: Array) -> Spectrum:
    """Eigenvalues and eigenvectors of a skew-Hermitian matrix."""
    xp = namespace(K)
    angles, vectors = xp.linalg.eigh(_complex(K) * -1j)
    return Spectrum(angles, vectors, not is_complex(K))


def exp(s: Spectrum, t: Array) -> Array:
    """exp(tK); `t` is real, has no matrix axes and broadcasts against the batch."""
    return _function(s, _cis(t[..., None] * s.angles))


def generator_exp(s: Spectrum, t: Array) -> Array:
    """K exp(tK), the derivative of exp(tK) with respect to t."""
    return _function(s, 1j * _complex(s.angles) * _cis(t[..., None] * s.angles))


def phi1(s: Spectrum, t: Array) -> Array:
    """φ₁(tK) = ∫ exp(xtK) dx over 0 ≤ x ≤ 1."""
    half = 0.5 * t[..., None] * s.angles
    return _function(s, _cis(half) * _sinc(half))


def exp_derivative(s: Spectrum, t: Array, E: Array) -> Array:
    """The derivative of exp at tK in the direction E; at −t this is the adjoint map."""
    half = 0.5 * t[..., None] * s.angles
    a, b = half[..., :, None], half[..., None, :]
    factors = _cis(a + b) * _sinc(a - b)
    Z = s.vectors
    inner = adjoint(Z) @ namespace(Z).astype(E, Z.dtype) @ Z
    return _kind(s, Z @ (factors * inner) @ adjoint(Z), E)


def _function(s: Spectrum, values: Array) -> Array:
    """Z diag(values) Zᴴ."""
    return _kind(s, (s.vectors * values[..., None, :]) @ adjoint(s.vectors), None)


def _kind(s: Spectrum, a: Array, E: Array | None) -> Array:
    """The real part, where the matrices that it was made from are real."""
    real = s.real and (E is None or not is_complex(E))
    return namespace(a).real(a) if real else a


def _cis(a: Array) -> Array:
    """exp(ia)."""
    xp = namespace(a)
    return _complex(xp.cos(a)) + 1j * _complex(xp.sin(a))


def _complex(a: Array) -> Array:
    """An array as a complex one of its precision."""
    xp = namespace(a)
    if is_complex(a):
        return a
    return xp.astype(a, xp.complex64 if a.dtype == xp.float32 else xp.complex128)


def _sinc(a: Array) -> Array:
    """sin(a)/a."""
    xp = namespace(a)
    safe = xp.where(a == 0, xp.ones_like(a), a)
    return xp.where(a == 0, xp.ones_like(a), xp.sin(safe) / safe)
