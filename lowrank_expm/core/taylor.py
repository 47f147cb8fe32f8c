"""Polynomials in a matrix by products alone, after Paterson and Stockmeyer (1973).

The Taylor polynomial of φ₁(z) = (eᶻ − 1)/z = Σ zⁱ/(i+1)! is cut into blocks of k terms, and
blocks are joined by products with Aᵏ (doi:10.1137/0202007). Where A is all there is to the
exponential, the powers A, …, Aᵏ in place of I, …, Aᵏ⁻¹ give exp(A) − I with no further product.
"""

from __future__ import annotations

import math

from .._array import Array, device, eye, namespace

# Of φ₁, as many as the highest order needs.
COEFFICIENTS = tuple(1.0 / math.factorial(i + 1) for i in range(30))


def width(order):  # type: ignore[no-untyped-def]
    """The number k of powers for `order` terms: the root of the order, rounded up, at most five."""
    k = 1
    while k * k < order and k < 5:  # order 30 takes as many products with five as with six
        k += 1
    return k


def products(order: int) -> int:
    """The number of matrix products: k − 1 for the powers, one between each two blocks."""
    k = width(order)
    return k - 1 + order // k - 1


def phi1(powers: list[Array], order: int) -> Array:
    """φ₁(A), to degree order − 1, from A, …, Aᵏ."""
    xp = namespace(powers[0])
    one = xp.broadcast_to(eye(powers[0]), powers[0].shape)
    return _join([one, *powers[:-1]], powers[-1], order)


def expm1(powers: list[Array], order: int) -> Array:
    """exp(A) − I, to degree `order`, from A, …, Aᵏ."""
    return _join(powers, powers[-1], order)


def phi1_derivative(powers: list[Array], dpowers: list[Array], order: int) -> tuple[Array, Array]:
    """φ₁(A) and its derivative from the powers of A and theirs."""
    xp = namespace(powers[0])
    one, zero = xp.broadcast_to(eye(powers[0]), powers[0].shape), xp.zeros_like(dpowers[0])
    pairs = [one, *powers[:-1]], [zero, *dpowers[:-1]]
    return _join_derivative(*pairs, powers[-1], dpowers[-1], order)


def expm1_derivative(powers: list[Array], dpowers: list[Array], order: int) -> tuple[Array, Array]:
    """exp(A) − I and its derivative from the powers of A and theirs."""
    return _join_derivative(powers, dpowers, powers[-1], dpowers[-1], order)


def _join_derivative(
    terms: list[Array], dterms: list[Array], top: Array, dtop: Array, order: int
) -> tuple[Array, Array]:
    """The value of `_join` and its derivative."""
    *lower, total = combinations(terms, order)
    *dlower, dtotal = combinations(dterms, order)
    for block, dblock in zip(reversed(lower), reversed(dlower), strict=True):
        dtotal = dblock + dtop @ total + top @ dtotal
        total = block + top @ total
    return total, dtotal


def _join(terms: list[Array], top: Array, order: int) -> Array:
    """Σ cᵢ Aⁱ terms[0] from k terms, each A times the one before, and Aᵏ on top."""
    *lower, total = combinations(terms, order)
    for block in reversed(lower):
        total = block + top @ total
    return total


def combinations(terms: list[Array], order: int) -> list[Array]:
    """The blocks c₀ terms[0] + … + cₖ₋₁ terms[k−1], cₖ terms[0] + …, all in one product."""
    xp = namespace(terms[0])
    k = len(terms)
    rows = [list(COEFFICIENTS[i : i + k]) for i in range(0, order, k)]
    stacked = xp.stack(terms)
    matrix = xp.asarray(rows, dtype=stacked.dtype, device=device(stacked))
    blocks = xp.tensordot(matrix, stacked, axes=1)
    return [blocks[i, ...] for i in range(len(rows))]
