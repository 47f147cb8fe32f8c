"""φ₁ from the diagonal Padé approximant of exp, compiled, for matrices where a solve is cheap.

With numerator V + U and U = A·P (P and V even in A), exp(A) − 1 ≈ 2 (V − U)⁻¹ U, so
φ₁(A) = (exp(A) − 1)/A ≈ 2 (V − U)⁻¹ P (Higham, Functions of Matrices, section 10.3,
doi:10.1137/1.9780898717778).
"""

from __future__ import annotations

from .._numba import inner
from . import taylor
from .compiled_loops import add_block, mm, one_norm, scaled
from .selection import select

_select = inner(select)

COEFFICIENTS: dict[int, tuple[float, ...]] = {
    7: (17297280.0, 8648640.0, 1995840.0, 277200.0, 25200.0, 1512.0, 56.0, 1.0),
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


# Where those of V begin, which P's follow, in the array that begins with Taylor's.
FIRST = len(taylor.COEFFICIENTS)


def parts(order: int) -> tuple[float, ...]:
    """The coefficients of V and of P."""
    return COEFFICIENTS[order][0::2] + COEFFICIENTS[order][1::2]


@inner
def order_of(c):
    """The order of the approximant whose coefficients end the array."""
    return c.shape[0] - FIRST - 1


@inner
def pade_scale_down(norm, halvings, w, flat, order, theta, sums):
    """A, A², A⁴ and A⁶ of A/2ˢ from the first two of A/2ʰ; returns order and s.

    Backward error is A times a series in A² that begins with A²ᑫ, and the last two bound its terms.
    """
    mm(w[2], w[2], w[3])
    mm(w[3], w[2], w[4])
    sharp = max(one_norm(w[3], sums) ** (1 / 4), one_norm(w[4], sums) ** (1 / 6))
    _, squarings = _select(min(norm, 2.0**halvings * sharp), (order,), (theta,))
    if squarings > halvings:
        f = 0.5 ** (squarings - halvings)
        scaled(f, flat[1], flat[1])
        for i in range(1, 4):
            scaled(f ** (2 * i), flat[i + 1], flat[i + 1])
    return order, max(squarings, halvings)


@inner
def approximant(order, c, start, w, flat):
    """φ₁(A) (`start` 0) or exp(A) − I (1) from A, A², A⁴, A⁶ in w[1:5]; returns its slot."""
    P, V, U = 5, 6, 7
    for odd in range(2):
        _even_part(order, c, FIRST + odd * (order + 1) // 2, w, flat, V - odd)
    mm(w[1], w[P], w[U])
    half = flat.real.dtype.type(0.5)
    for i in range(flat.shape[1]):
        flat[V, i] = half * (flat[V, i] - flat[U, i])
    x = U if start else P
    _solve(w[V], w[x])
    return x


@inner
def _even_part(order, c, first, w, flat, out):
    """c₀ + c₁A² + c₂A⁴ + … into slot `out`, c from `first` on; beyond A⁶ that is a factor."""
    powers = flat[2:]
    if order == 13:
        scaled(0, flat[0], flat[7])
        add_block(c, first + 4, 3, powers, flat[7])
        mm(w[4], w[7], w[out])
    else:
        scaled(0, flat[0], flat[out])
    add_block(c, first + 1, 3, powers, flat[out])
    for i in range(w.shape[1]):
        w[out, i, i] += c[first]


@inner
def _modulus(z):
    """|z| up to a factor of √2, without a root."""
    return abs(z.real) + abs(z.imag)


@inner
def _solve(a, x):
    """Overwrite x by a⁻¹x, and a: elimination with partial pivoting."""
    m = a.shape[0]
    for c in range(m):
        p = c
        for i in range(c + 1, m):
            if _modulus(a[i, c]) > _modulus(a[p, c]):
                p = i
        if p != c:
            for j in range(m):
                a[c, j], a[p, j] = a[p, j], a[c, j]
                x[c, j], x[p, j] = x[p, j], x[c, j]
        inverse = 1 / a[c, c]
        for i in range(c + 1, m):
            f = a[i, c] * inverse
            for j in range(c + 1, m):
                a[i, j] -= f * a[c, j]
            for j in range(m):
                x[i, j] -= f * x[c, j]
    for c in range(m - 1, -1, -1):
        inverse = 1 / a[c, c]
        for j in range(m):
            x[c, j] *= inverse
        for i in range(c):
            f = a[i, c]
            for j in range(m):
                x[i, j] -= f * x[c, j]
