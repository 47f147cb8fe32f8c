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


def numerator_parts(powers: list[Array], order: int) -> tuple[Array, Array]:
    """P and V of the order-`order` approximant; `powers` holds A², A⁴, A⁶ as far as needed."""
    b = COEFFICIENTS[order]
    one = eye(powers[0])
    P, V = b[1] * one, b[0] * one
    if order == 13:
        A2, A4, A6 = powers
        P = P + b[3] * A2 + b[5] * A4 + b[7] * A6 + A6 @ (b[9] * A2 + b[11] * A4 + b[13] * A6)
        V = V + b[2] * A2 + b[4] * A4 + b[6] * A6 + A6 @ (b[8] * A2 + b[10] * A4 + b[12] * A6)
        return P, V
    if order == 9:
        powers = [*powers, powers[2] @ powers[0]]
    for i in range(order // 2):
        P = P + b[2 * i + 3] * powers[i]
        V = V + b[2 * i + 2] * powers[i]
    return P, V
