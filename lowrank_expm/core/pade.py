"""φ₁ from the diagonal Padé approximant of exp, without a division by A.

With numerator V + U and U = A·P (P and V even in A), exp(A) − 1 ≈ 2 A (V − U)⁻¹ P, so
φ₁(A) = (exp(A) − 1)/A ≈ 2 (V − U)⁻¹ P (Higham, Functions of Matrices, section 10.3,
doi:10.1137/1.9780898717778).
"""

from .._array import Array, eye

COEFFICIENTS: dict[int, tuple[float, ...]] = {
    3: (120.0, 60.0, 12.0, 1.0),
    5: (30240.0, 15120.0, 3360.0, 420.0, 30.0, 1.0),
    7: (17297280.0, 8648640.0, 1995840.0, 277200.0, 25200.0, 1512.0, 56.0, 1.0),
    9: (
        17643225600.0,
        8821612800.0,
        2075673600.0,
        302702400.0,
        30270240.0,
        2162160.0,
        110880.0,
        3960.0,
        90.0,
        1.0,
    ),
    13: (
        64764752532480000.0,
        32382376266240000.0,
        7771770303897600.0,
        1187353796428800.0,
        129060195264000.0,
        10559470521600.0,
        670442572800.0,
        33522128640.0,
        1323241920.0,
        40840800.0,
        960960.0,
        16380.0,
        182.0,
        1.0,
    ),
}


# How many of A², A⁴, A⁶, A⁸ an order needs.
POWERS = {3: 1, 5: 2, 7: 3, 9: 4, 13: 3}


def numerator_parts(powers: list[Array], order: int) -> tuple[Array, Array]:
    """P and V of the approximant from A², A⁴, …."""
    b = COEFFICIENTS[order]
    one = eye(powers[0])
    if order == 13:
        A6 = powers[2]
        P = b[1] * one + _combination(b[3:9:2], powers) + A6 @ _combination(b[9::2], powers)
        V = b[0] * one + _combination(b[2:8:2], powers) + A6 @ _combination(b[8::2], powers)
        return P, V
    P = b[1] * one + _combination(b[3::2], powers)
    V = b[0] * one + _combination(b[2::2], powers)
    return P, V


def numerator_derivatives(
    powers: list[Array], dpowers: list[Array], order: int
) -> tuple[Array, Array]:
    """The derivatives of P and V from those of the powers."""
    b = COEFFICIENTS[order]
    if order == 13:
        dP, dV = _combination(b[3:9:2], dpowers), _combination(b[2:8:2], dpowers)
        A6, dA6 = powers[2], dpowers[2]
        dP = dP + dA6 @ _combination(b[9::2], powers) + A6 @ _combination(b[9::2], dpowers)
        dV = dV + dA6 @ _combination(b[8::2], powers) + A6 @ _combination(b[8::2], dpowers)
        return dP, dV
    return _combination(b[3::2], dpowers), _combination(b[2::2], dpowers)


def _combination(coefficients: tuple[float, ...], powers: list[Array]) -> Array:
    """Σ cᵢ powers[i] over the powers there are."""
    total = coefficients[0] * powers[0]
    for c, power in zip(coefficients[1:], powers[1:], strict=True):
        total = total + c * power
    return total
