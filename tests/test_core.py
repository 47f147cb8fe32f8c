"""core/: m × m mathematics. Nothing here has a long axis.

Tolerances are C·u·max(1, θ): forming exp(tS) from rounded data already costs u·θ.
"""

from __future__ import annotations

import itertools
import math

import array_api_strict
import mpmath
import numpy as np
import pytest
import scipy.linalg

from lowrank_expm import core
from lowrank_expm.core import certificate, exponential, pade, selection, taylor
from lowrank_expm.core.compiled import skew_batch, skew_cores

from . import generators as gen
from . import naive

EPS = {"float32": 2.0**-23, "float64": 2.0**-52}
TABLES = {
    "float32": (selection.ORDERS_32, selection.THETAS_32),
    "float64": (selection.ORDERS_64, selection.THETAS_64),
}
PADE = {"float32": selection.PADE_32, "float64": selection.PADE_64}
PADE_ORDERS = {7, 13}
THRESHOLDS = [
    (precision, i, order, theta)
    for precision, (orders, thetas) in TABLES.items()
    for i, (order, theta) in enumerate(zip(orders, thetas, strict=True))
]
# The threshold that half of the last one falls below.
HALF_OF_THE_LAST = {"float32": 4, "float64": 6}
FORMS = ("J", "W", "W and G")


def last_exponent(dtype):
    """The contract's largest angle, 0.01/u, as a power of ten."""
    return 13 if dtype in gen.DOUBLES else 5


def skew_matrix(rng, m, dtype, batch=()):
    """A skew-Hermitian matrix of 2-norm one."""
    a = gen.normal(rng, (*batch, m, m), np.result_type(dtype, np.float64))
    a = a - np.conj(np.swapaxes(a, -1, -2))
    return (a / np.linalg.norm(a, 2, axis=(-2, -1), keepdims=True)).astype(dtype)


def gram_matrix(rng, m, dtype, batch=()):
    """A well-conditioned Gram matrix with eigenvalues around one."""
    X = gen.normal(rng, (*batch, 12 * m, m), np.result_type(dtype, np.float64)) / math.sqrt(12 * m)
    return (np.conj(np.swapaxes(X, -1, -2)) @ X).astype(dtype)


def operands(rng, m, dtype, form, batch=()):
    """(G, W) of one of the three forms that the routes use."""
    G = None if form == "W" else gram_matrix(rng, m, dtype, batch)
    W = None if form == "J" else skew_matrix(rng, m, dtype, batch)
    return G, W


def real(dtype, value):
    return np.asarray(value, np.empty(0, dtype).real.dtype)


def generic_core(G, t, W):
    """The array-API core with t as `core.skew` takes it."""
    return exponential.skew_core(G, t[..., None, None], W)


def agree_in_choice(compiled, generic):
    """The same order and squarings, or the Padé approximant with no more squarings."""
    if compiled.order in PADE_ORDERS:
        return compiled.squarings <= generic.squarings
    return (compiled.order, compiled.squarings) == (generic.order, generic.squarings)


def mp_phi1(A):
    """φ₁(A) of a small matrix, from the exponential of [[A, I], [0, 0]] with 60 digits."""
    m = A.shape[0]
    with mpmath.workdps(60):
        block = mpmath.zeros(2 * m)
        for i, j in itertools.product(range(m), range(m)):
            block[i, j] = mpmath.mpmathify(complex(A[i, j]))
        for i in range(m):
            block[i, m + i] = 1
        E = mpmath.expm(block)
        return [[E[i, m + j] for j in range(m)] for i in range(m)]


def mp_distance(A, exact):
    """‖A − exact‖_F, the difference taken with 60 digits."""
    with mpmath.workdps(60):
        squares = (
            abs(mpmath.mpmathify(complex(A[i, j])) - exact[i][j]) ** 2
            for i, j in itertools.product(range(len(exact)), range(len(exact)))
        )
        return float(mpmath.sqrt(mpmath.fsum(squares)))


# --- selection -------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "i", "order", "theta"), THRESHOLDS)
@pytest.mark.parametrize("factor", [1 - 1e-15, 1.0, 1 + 1e-15])
def test_selected_branch_at_each_threshold(precision, i, order, theta, factor):
    orders, thetas = TABLES[precision]
    alpha = theta * factor
    if alpha <= theta:
        expected = (order, 0)
    elif i + 1 < len(orders):
        expected = (orders[i + 1], 0)
    else:
        expected = (orders[HALF_OF_THE_LAST[precision]], 1)
    assert selection.select(alpha, orders, thetas) == expected


@pytest.mark.parametrize("precision", TABLES)
def test_selected_branch_between_adjacent_thresholds(precision):
    orders, thetas = TABLES[precision]
    for order, low, high in zip(orders, (0.0, *thetas[:-1]), thetas, strict=True):
        assert selection.select((low + high) / 2, orders, thetas) == (order, 0)
        assert selection.select(math.nextafter(low, 1e9), orders, thetas) == (order, 0)


@pytest.mark.parametrize("precision", TABLES)
@pytest.mark.parametrize("s", [1, 2, 3, 8, 40])
def test_every_doubling_of_the_last_threshold_adds_one_squaring(precision, s):
    orders, thetas = TABLES[precision]
    top = thetas[-1] * 2.0**s
    fewer = orders[HALF_OF_THE_LAST[precision]]
    assert selection.select(top, orders, thetas) == (orders[-1], s)
    assert selection.select(math.nextafter(top, math.inf), orders, thetas) == (fewer, s + 1)
    assert selection.select(0.75 * top, orders, thetas) == (orders[-1], s)


@pytest.mark.parametrize("precision", TABLES)
def test_selection_is_monotone_and_pure(precision):
    orders, thetas = TABLES[precision]
    alphas = [0.0, *np.geomspace(1e-300, 1e300, 4001).tolist()]
    chosen = [selection.select(a, orders, thetas) for a in alphas]
    assert chosen == [selection.select(a, orders, thetas) for a in alphas]
    effort = [(s, order) for order, s in chosen]
    assert effort == sorted(effort)
    assert {order for order, _ in chosen} == set(orders)


def backward_error(numerator, denominator, exact, theta):
    """The bound on ‖ΔA‖/‖A‖ with exp(A + ΔA) the rational function r of A, for ‖A‖ ≤ θ.

    ΔA = log(exp(−A) r(A)): the series of its coefficients' moduli, from a'/a = (log a)'. r has the
    first `exact` + 1 coefficients of exp.
    """
    count = exact + 80
    with mpmath.workdps(80):
        inverse = [mpmath.mpf(1) / mpmath.factorial(i) for i in range(count)]
        r = []
        for n in range(count):
            rest = mpmath.fsum(d * r[n - k] for k, d in enumerate(denominator[: n + 1]) if k)
            r.append(((numerator[n] if n < len(numerator) else 0) - rest) / denominator[0])
        a = [
            mpmath.fsum((-1) ** (n - k) * inverse[n - k] * r[k] for k in range(n + 1))
            if n > exact
            else mpmath.mpf(n == 0)
            for n in range(count)
        ]
        log = [mpmath.mpf(0)] * count
        for n in range(exact + 1, count):
            log[n] = a[n] - mpmath.fsum(k * log[k] * a[n - k] for k in range(exact + 1, n)) / n
        return mpmath.fsum(abs(log[n]) * mpmath.mpf(theta) ** (n - 1) for n in range(1, count))


@pytest.mark.parametrize(("precision", "i", "order", "theta"), THRESHOLDS)
def test_each_threshold_is_where_the_backward_error_reaches_the_unit_roundoff(
    precision, i, order, theta
):
    with mpmath.workdps(80):
        numerator = [mpmath.mpf(1) / mpmath.factorial(i) for i in range(order + 1)]
    error = backward_error(numerator, [mpmath.mpf(1)], order, theta)
    assert error * 2 / EPS[precision] == pytest.approx(1, rel=1e-12)


@pytest.mark.parametrize("precision", PADE)
def test_the_threshold_of_the_pade_approximant_is_where_its_backward_error_is_one_roundoff(
    precision,
):
    (order,), (theta,) = PADE[precision]
    b = [mpmath.mpf(c) for c in pade.COEFFICIENTS[order]]
    mirrored = [(-1) ** i * c for i, c in enumerate(b)]
    error = backward_error(b, mirrored, 2 * order, theta)
    # The published one for single precision takes u to seven digits.
    assert error * 2 / EPS[precision] == pytest.approx(1, rel=1e-6)


@pytest.mark.parametrize("order", pade.COEFFICIENTS)
def test_coefficients_of_the_pade_approximant(order):
    """(2q − i)! / ((q − i)! i!), times the q!/q! that makes the last one 1."""
    f, q = math.factorial, order
    assert pade.COEFFICIENTS[q] == tuple(f(2 * q - i) // (f(q - i) * f(i)) for i in range(q + 1))


def test_an_order_tells_the_scheme():
    orders = {order for (order,), _ in PADE.values()}
    assert orders == PADE_ORDERS
    assert orders.isdisjoint({*selection.ORDERS_32, *selection.ORDERS_64})


@pytest.mark.parametrize(
    ("precision", "m", "expected"),
    [
        ("float64", 2, (2.4285825244428264, math.inf)),
        ("float64", 4, (2.4285825244428264, math.inf)),
        ("float64", 5, (2.4285825244428264, 5.371920351148152)),
        ("float64", 32, (2.4285825244428264, 5.371920351148152)),
        ("float64", 33, (2.4285825244428264, 2.4285825244428264)),
        ("float32", 4, (2.4782808775219714, math.inf)),
        ("float32", 5, (2.4782808775219714, 3.92572478313866)),
        ("float32", 12, (2.4782808775219714, 3.92572478313866)),
        ("float32", 13, (2.4782808775219714, 2.4782808775219714)),
    ],
)
def test_sizes_that_the_pade_approximant_serves(precision, m, expected):
    assert selection.pade_sizes(m, EPS[precision]) == expected


def planes(m, precision):
    """A matrix whose powers all have the norm one: m/2 planes turned by the same angle."""
    one, zero = np.eye(m // 2), np.zeros((m // 2, m // 2))
    return np.block([[zero, one], [-one, zero]]).astype(precision)


@pytest.mark.parametrize("form", ["J", "W", "W and G"])
@pytest.mark.parametrize("precision", PADE)
@pytest.mark.parametrize("m", [2, 4, 6, 12, 14, 32, 34])
def test_selected_scheme_on_both_sides_of_its_thresholds(m, precision, form):
    taylor_ends, (order,), (pade_ends,) = TABLES[precision][1][-2], *PADE[precision]
    wide = {"float64": 32, "float32": 12}[precision]

    def chosen(size):
        G, W = _form(form, np.eye(m, dtype=precision), planes(m, precision))
        core = skew_cores(G, real(precision, size), W)
        return core.order, core.squarings

    def by_taylor(size):
        return selection.select(size, *TABLES[precision])

    for size in (0.5 * taylor_ends, 0.999 * taylor_ends):
        assert chosen(size) == by_taylor(size)
    for size in (1.001 * taylor_ends, (taylor_ends + pade_ends) / 2, 0.999 * pade_ends):
        assert chosen(size) == ((order, 0) if m <= wide else by_taylor(size))
    for s, size in ((1, 1.001 * pade_ends), (1, 1.9 * pade_ends), (2, 2.1 * pade_ends)):
        assert chosen(size) == ((order, s) if m <= 4 else by_taylor(size))


def test_scheme_of_a_batch_is_that_of_its_largest_element():
    """Order 13 of the approximant comes after degree 25 of the polynomial."""
    W = np.array([[0.0, 1.0], [-1.0, 0.0]])
    found = skew_cores(None, real("float64", [2.4, 2.5]), np.stack([W, W]))
    assert (found.order, found.squarings) == (13, 0)


def test_degrees_are_the_largest_for_their_number_of_products():
    orders = sorted({*selection.ORDERS_32, *selection.ORDERS_64})
    counts = [taylor.products(order) for order in orders]
    assert counts == list(range(2, 2 + len(orders)))
    # One power more or one block more than the square root asks for reaches no further.
    for order, count in zip(orders, counts, strict=True):
        assert order == max(k * (count + 2 - k) for k in range(1, count + 2))


@pytest.mark.parametrize("precision", TABLES)
@pytest.mark.parametrize("alpha", [math.nan, math.inf])
def test_a_size_that_is_not_finite_selects_minus_one(precision, alpha):
    assert selection.select(alpha, *TABLES[precision])[1] == -1


@pytest.mark.parametrize("precision", TABLES)
def test_table_belongs_to_the_precision(precision):
    assert selection.table(EPS[precision]) == TABLES[precision]


@pytest.mark.parametrize(("precision", "i", "order", "theta"), THRESHOLDS)
@pytest.mark.parametrize("factor", [0.999, 1.001])
@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_cores_take_the_branch_that_their_angle_selects(precision, i, order, theta, factor, twin):
    """One plane: every norm that the selection looks at is the angle itself."""
    W = np.array([[0.0, 1.0], [-1.0, 0.0]], precision)
    found = twin(None, real(precision, theta * factor), W)
    scheme = TABLES[precision]
    if twin is skew_cores and theta * factor > selection.pade_sizes(2, EPS[precision])[0]:
        scheme = PADE[precision]
    assert (found.order, found.squarings) == selection.select(theta * factor, *scheme)


@pytest.mark.parametrize("precision", PADE)
@pytest.mark.parametrize("short_of", [0.0, 1e-3, 0.1, 0.5])
def test_the_certificate_of_a_single_doubling_holds_near_a_whole_turn(precision, short_of):
    """There the core is small, and the defect that of half the turn."""
    for angle in np.linspace(0.05, 0.3, 8):
        c, s = math.cos(angle), math.sin(angle)
        R = np.kron(np.eye(4), [[c, -s], [s, c]])
        W = np.block([[np.zeros((8, 8)), R], [-R.T, np.zeros((8, 8))]]).astype(precision)
        found = skew_cores(None, real(precision, 2 * math.pi - short_of), W)
        assert (found.order, found.squarings) == (TABLES[precision][0][-1], 1)
        assert naive.defect_mp(np.eye(16), found.C) <= found.bound


def test_a_basis_with_a_large_norm_is_not_overscaled():
    """‖A⁴‖^¼ decides: a nilpotent A of norm 1e6 has no eigenvalue that needs a squaring."""
    G = np.diag([1e6, 0.0])
    for twin in (skew_cores, generic_core):
        # As W, for the J form would drop the pair with a zero column.
        J = np.array([[0.0, 1.0], [-1.0, 0.0]])
        found = twin(G, real("float64", 1.0), J)
        assert found.squarings == 0
        assert np.allclose(found.C @ G, [[0.0, 0.0], [-1e6, 0.0]], rtol=1e-15, atol=0)


# --- φ₁ --------------------------------------------------------------------------------------


@pytest.mark.parametrize(("precision", "i", "order", "theta"), THRESHOLDS)
@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_each_order_is_accurate_up_to_its_threshold(precision, i, order, theta, twin):
    """Two planes, the larger angle just below θ, so that the order is known.

    Others rest: with all of them the matrix is too large for the Padé approximant.
    """
    u = EPS[precision] / 2
    wide = np.zeros((34, 34), precision)
    A = wide[:4, :4]
    A[[0, 1], [2, 3]] = [0.9999 * theta, 0.3 * theta]
    A -= A.T.copy()
    found = twin(None, real(precision, 1.0), wide)
    assert (found.order, found.squarings) == (order, 0)
    assert np.abs(found.C[4:]).max() == np.abs(found.C[:, 4:]).max() == 0
    with mpmath.workdps(60):
        E = mpmath.expm(mpmath.matrix(A.astype(float).tolist())) - mpmath.eye(4)
        exact = [[E[i, j] for j in range(4)] for i in range(4)]
    # |φ₁| ≤ 1 on the imaginary axis, and the terms that cancel grow to θᵏ/k! ≤ 8: a few roundings.
    assert mp_distance(found.C[:4, :4], exact) <= 20 * u
    general = core.general(A, real(precision, 1.0))
    assert (general.order, general.squarings) == (order, 0)
    assert mp_distance(general.C, mp_phi1(A)) <= 20 * u


@pytest.mark.parametrize("m", [2, 8])
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("form", FORMS)
def test_the_pade_approximant_is_accurate_up_to_its_threshold(m, dtype, form):
    """Beyond π its denominator V − U is no longer positive definite, and pivots must be chosen."""
    precision = "float64" if dtype in gen.DOUBLES else "float32"
    rng = np.random.default_rng(m)
    theta = PADE[precision][1][0]
    G, W = operands(rng, m, dtype, form)
    A = (planes(m, dtype) if W is None else W) @ (np.eye(m) if G is None else G)
    for size in np.linspace(TABLES[precision][1][-2], theta, 3)[1:]:
        t = real(dtype, 0.9999 * size / math.sqrt(np.linalg.norm(A @ A, 1)))
        found = skew_cores(G, t, W)
        assert (found.order, found.squarings) == (PADE[precision][0][0], 0)
        exact = naive_core(G, W, m, t)
        # G is within a factor of two of the identity: as for the twins, √m for m sums.
        assert mp_distance(found.C, exact) <= 20 * gen.unit(dtype) * math.sqrt(m) * size


def naive_core(G, W, m, t):
    """φ₁(tWG) tW with 60 digits."""
    G = np.eye(m) if G is None else G
    W = planes(m, "float64") if W is None else W
    with mpmath.workdps(60):
        G, W = (
            mpmath.matrix([[mpmath.mpmathify(complex(x)) for x in row] for row in a])
            for a in (G, W)
        )
        W *= mpmath.mpf(float(t))
        block = mpmath.zeros(2 * m)
        block[:m, :m], block[:m, m:] = W * G, W
        E = mpmath.expm(block)
        return [[E[i, m + j] for j in range(m)] for i in range(m)]


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("factor", [0.999, 1.001])
def test_general_core_is_phi1_on_both_sides_of_each_threshold(dtype, factor):
    rng = np.random.default_rng(3)
    orders, thetas = selection.table(float(np.finfo(dtype).eps))
    for theta in thetas:
        M = gen.normal(rng, (3, 3), dtype)
        M = (M * (factor * theta / np.abs(M).sum(0).max())).astype(dtype)
        found = core.general(M, real(dtype, 1.0))
        exact = mp_phi1(M)
        # The eigenvalues reach to the right half plane: exp(‖M‖) bounds what rounding can grow to.
        tolerance = 20 * gen.unit(dtype) * math.exp(np.linalg.norm(M, 2))
        assert found.order in orders
        assert mp_distance(found.C, exact) <= tolerance


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_general_core_with_complex_t(dtype):
    rng = np.random.default_rng(4)
    M = gen.normal(rng, (3, 3), dtype).astype(complex)
    t = 0.3 + 2.0j
    found = core.general(M, np.asarray(t))
    exact = mp_phi1(t * M)
    C = found.C / t
    size = math.exp(abs(t) * np.linalg.norm(M, 2))
    assert mp_distance(C, exact) <= 20 * gen.unit(dtype) * size


# --- the two twins ---------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_twins_agree(dtype, form):
    rng = np.random.default_rng(1)
    u = gen.unit(dtype)
    for m in range(2, 33, 2 if form == "J" else 1):
        G, W = operands(rng, m, dtype, form)
        for exponent in range(-12, last_exponent(dtype) + 1, 3):
            t = real(dtype, 10.0**exponent)
            one, two = skew_cores(G, t, W), generic_core(G, t, W)
            assert agree_in_choice(one, two)
            assert one.C.dtype == two.C.dtype == dtype
            # G is within a factor of two of the identity, so ‖C‖ is that of exp(tS) − I, and
            # both are within u·θ of it; √m for m sums.
            size = np.linalg.norm(two.C)
            assert np.linalg.norm(one.C - two.C) <= (
                20 * u * math.sqrt(m) * max(size, 10.0**exponent)
            )
            # The compiled core polishes again where a polish left more than u.
            spread = 100 * m * u * max(1.0, 10.0**exponent)
            assert one.bound == pytest.approx(two.bound, rel=spread, abs=4 * u)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_twins_agree_on_a_batch_and_a_grid(dtype, form):
    rng = np.random.default_rng(2)
    G, W = operands(rng, 6, dtype, form, (2, 3))
    t = real(dtype, [[[1e-6]], [[0.3]], [[40.0]], [[-2.0]]])
    one, two = skew_cores(G, t, W), generic_core(G, t, W)
    assert one.C.shape == two.C.shape == (4, 2, 3, 6, 6)
    assert one.bound.shape == two.bound.shape == (4, 2, 3)
    assert agree_in_choice(one, two)
    scale = np.maximum(np.linalg.norm(two.C, axis=(-2, -1)), np.abs(t))
    error = np.linalg.norm(one.C - two.C, axis=(-2, -1))
    assert (error <= 20 * gen.unit(dtype) * math.sqrt(6) * scale).all()


def test_t_broadcasts_against_the_batch():
    """One t for each element, and several for an element whose own axis has length one."""
    rng = np.random.default_rng(2)
    G, _ = operands(rng, 4, "float64", "J", (2, 1))
    t = real("float64", [[[1e-6, 0.3, 4.0]], [[0.0, -2.0, 1.0]]])
    for times in (t[0, 0, :2, None], t):
        one, two = core.skew(G, times), generic_core(G, times, None)
        assert one.C.shape == two.C.shape
        assert np.abs(one.C - two.C).max() <= 100 * 2.0**-53


def test_twins_agree_on_a_batch_whose_largest_norm_is_not_its_largest_size():
    """One element's ‖A‖ is large but its ‖A⁴‖^¼ is not; the other's is plainly small."""
    J = np.array([[0.0, 1.0], [-1.0, 0.0]])
    G = np.stack([np.diag([4.0, 1e-12]), np.diag([0.2, 1e-12])])
    W = np.broadcast_to(J, (2, 2, 2))
    t = real("float64", 1.0)
    one, two = skew_cores(G, t, W), generic_core(G, t, W)
    assert agree_in_choice(one, two)


def test_one_compiled_version_of_a_dtype_serves_every_call():
    """Read-only memory has a type of its own to the compiler, which takes seconds to meet it."""
    G = np.eye(4)
    locked = np.eye(4)
    locked.flags.writeable = False
    for given in (G, locked, np.broadcast_to(G, (3, 4, 4)), np.asfortranarray(G), G[None][:0]):
        for t in (np.asarray(0.5), np.full((2, *(1,) * (given.ndim - 2)), 0.5)):
            core.skew(given, t)
            core.skew(given, t, 0 * given)
            core.skew(None, t, 0 * given)
    dtypes = [signature[2].dtype for signature in skew_batch.signatures]
    assert len(dtypes) == len(set(dtypes))


@pytest.mark.parametrize("m", [2, 32, 64, 66, 80])
def test_either_twin_serves_the_same_function(m):
    """`core.skew` chooses by size; the largest here are beyond the compiled loops."""
    rng = np.random.default_rng(m)
    G, _ = operands(rng, m, "float64", "J", (2,))
    t = real("float64", 0.7)
    found, other = core.skew(G, t), generic_core(G, t, None)
    assert (found.order, found.squarings) == (other.order, other.squarings)
    assert np.linalg.norm(found.C - other.C) <= 20 * m * 2.0**-53


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_core_needs_only_the_array_api_standard(library, dtype, form):
    """The strict library has nothing else, and mixes no devices."""
    rng = np.random.default_rng(5)
    G, W = operands(rng, 4, dtype, form, (3,))
    t = real(dtype, [[[[1e-3]]], [[[0.2]]], [[[1.5]]], [[[500.0]]]])
    given = [None if a is None else library.asarray(a) for a in (G, W)]
    found = exponential.skew_core(given[0], library.asarray(t), given[1])
    expected = exponential.skew_core(G, t, W)
    assert (found.order, found.squarings) == (expected.order, expected.squarings)
    C = library.numpy(found.C)
    assert C.dtype == dtype
    # The same operations: only the order inside a product may differ.
    assert np.abs(C - expected.C).max() <= 20 * gen.unit(dtype) * 500
    assert library.numpy(found.bound) == pytest.approx(expected.bound, rel=1e-3)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_general_core_needs_only_the_array_api_standard(library, dtype):
    M = gen.normal(np.random.default_rng(6), (2, 3, 3), dtype)
    t = real(dtype, [[[[0.1]]], [[[3.0]]]])
    found = exponential.general_core(library.asarray(M), library.asarray(t))
    expected = exponential.general_core(M, t)
    assert (found.order, found.squarings) == (expected.order, expected.squarings)
    size = np.abs(expected.C).max()
    assert np.abs(library.numpy(found.C) - expected.C).max() <= 100 * gen.unit(dtype) * size


def test_dispatch_takes_any_library(library):
    G = gram_matrix(np.random.default_rng(7), 4, "float64")
    found = core.skew(library.asarray(G), library.asarray(np.asarray(0.5)))
    expected = core.skew(G, np.asarray(0.5))
    assert np.abs(library.numpy(found.C) - expected.C).max() <= 20 * 2.0**-53


# --- products --------------------------------------------------------------------------------


@pytest.fixture
def products(monkeypatch):
    """The shapes of the matrix products that arrays of the strict library have made so far."""
    kind, made = type(array_api_strict.zeros(1)), []
    plain = kind.__matmul__

    def counting(a, b):
        made.append(a.shape)
        return plain(a, b)

    monkeypatch.setattr(kind, "__matmul__", counting)
    return made


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(("precision", "i", "order", "theta"), THRESHOLDS)
@pytest.mark.parametrize("doublings", [0, 1, 8, 9])
def test_products_of_each_order(products, precision, i, order, theta, doublings, form):
    """One plane: every norm that the selection looks at is the angle itself."""
    if doublings and 2 * theta <= TABLES[precision][1][-1]:
        theta = TABLES[precision][1][-1]
    one, J = np.eye(2, dtype=precision), np.array([[0.0, 1.0], [-1.0, 0.0]], precision)
    given = [None if a is None else array_api_strict.asarray(a) for a in _form(form, one, J)]
    t = real(precision, [[0.999 * theta * 2.0**doublings]])
    found = exponential.skew_core(given[0], array_api_strict.asarray(t), given[1])
    assert found.squarings == doublings
    assert doublings or found.order == order
    chosen = (found.order, found.squarings)
    assert len(products) == exponential.products(*chosen, *(a is not None for a in given))


def _form(form, G, W):
    """(G, W) of one of the three forms."""
    return (None if form == "W" else G), (None if form == "J" else W)


@pytest.mark.parametrize(
    ("order", "squarings", "expected"),
    [
        # Without a Gram matrix, of W = J, and with both: polynomial, doublings, polish, bound.
        (9, 0, (4, 4 + 1, 4 + 1 + 2)),
        (16, 0, (6, 6 + 1, 6 + 1 + 2)),
        (20, 0, (7, 7 + 1, 7 + 1 + 2)),
        (30, 1, (9 + 1 + 2, 9 + 2 + 4 + 1, 9 + 2 + 4 + 1 + 2)),
        (25, 2, (8 + 2 + 2, 8 + 4 + 4 + 1, 8 + 4 + 4 + 1 + 2)),
        (25, 8, (8 + 8 + 2, 8 + 16 + 4 + 1, 8 + 16 + 4 + 1 + 2)),
        (25, 9, (8 + 9 + 4, 8 + 18 + 8 + 1, 8 + 18 + 8 + 1 + 2)),
    ],
)
def test_number_of_products(order, squarings, expected):
    forms = ((False, True), (True, False), (True, True))
    assert tuple(exponential.products(order, squarings, *form) for form in forms) == expected


# --- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_small_elements_of_a_batch_lose_nothing(twin):
    """Norms from 1e-12 to 3e3 share one number of squarings; errors are relative to ‖C‖."""
    W = skew_matrix(np.random.default_rng(8), 4, "float64")
    sizes = np.array([1e-12, 1e-8, 1e-3, 1.0, 30.0, 3e3])
    batch = sizes[:, None, None] * W
    found = twin(None, real("float64", 1.0), batch)
    assert found.squarings >= 8
    for size, A, C in zip(sizes.tolist(), batch, found.C, strict=True):
        with mpmath.workdps(60):
            exact = mpmath.expm(mpmath.matrix(A.tolist())) - mpmath.eye(4)
            rows = [[exact[i, j] for j in range(4)] for i in range(4)]
        assert mp_distance(C, rows) <= 40 * 2.0**-53 * max(np.linalg.norm(C), size)


@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_a_grid_of_t_runs_over_the_batch(twin):
    rng = np.random.default_rng(9)
    G = gram_matrix(rng, 4, "float64", (3,))
    t = np.array([[0.1], [2.0]])
    C = twin(G, t, None).C
    assert C.shape == (2, 3, 4, 4)
    for i, j in np.ndindex(2, 3):
        single = twin(G[j], t[i, 0], None).C
        assert np.linalg.norm(C[i, j] - single) <= 20 * 2.0**-53 * max(1, np.linalg.norm(single))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("m", [0, 2, 70])
@pytest.mark.parametrize("batch", [(), (0,), (2, 0), (3,)])
def test_empty_matrices_and_empty_batches_keep_their_shape(batch, m, form):
    G = np.broadcast_to(np.eye(m), (*batch, m, m))
    W = None if form == "J" else np.zeros((*batch, m, m))
    found = core.skew(None if form == "W" else G, real("float64", 0.5), W)
    assert found.C.shape == (*batch, m, m)
    assert found.bound.shape == batch
    assert found.squarings == 0
    grid = core.skew(None if form == "W" else G, np.ones((4, *(1,) * len(batch))), W)
    assert grid.C.shape == (4, *batch, m, m)
    assert grid.bound.shape == (4, *batch)


def test_general_core_of_an_empty_matrix():
    assert core.general(np.zeros((2, 0, 0)), np.asarray(1.0)).C.shape == (2, 0, 0)
    assert core.general(np.zeros((0, 3, 3)), np.asarray(1.0)).C.shape == (0, 3, 3)


# --- unitarity -------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_defect_stays_at_rounding_level_up_to_the_largest_angle(dtype, twin):
    """25 u √m, at 1e13 in double precision and 1e5 in single; a squaring alone doubles it."""
    for m, exponent in itertools.product((2, 4, 16), range(0, last_exponent(dtype) + 1, 4)):
        W = skew_matrix(np.random.default_rng(m), m, dtype)
        for e in {exponent, last_exponent(dtype)}:
            C = twin(None, real(dtype, 10.0**e), W).C
            defect = naive.defect_mp(np.eye(m), C)
            assert defect <= 25 * gen.unit(dtype) * math.sqrt(m)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_defect_of_the_gram_form_at_the_largest_angle(dtype, twin):
    rng = np.random.default_rng(11)
    X = np.concatenate(gen.with_norm(rng, 30, 3, dtype, 1.0), axis=-1)
    G = naive.embed(X).transposed @ naive.embed(X)
    G = naive.Exact(G, np.iscomplexobj(X)).round().astype(dtype)
    C = twin(G, real(dtype, 10.0 ** last_exponent(dtype)), None).C
    assert naive.defect_mp(X, C) <= 25 * gen.unit(dtype) * math.sqrt(6)


@pytest.mark.parametrize("gram", [True, False])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_polish_squares_the_defect(dtype, gram):
    rng = np.random.default_rng(12)
    m, u = 6, gen.unit(dtype)
    F = gen.normal(rng, (20, m), np.result_type(dtype, float)) / 5 if gram else np.eye(m)
    F = F.astype(dtype)
    G = np.conj(F.T) @ F if gram else None
    C = exponential.skew_core(G, real(dtype, 1.3), skew_matrix(rng, m, dtype)).C
    size = math.sqrt(u) / 10
    rough = C + (size * gen.normal(rng, (m, m), dtype)).astype(dtype)
    before, after = (naive.defect_mp(F, c) for c in (rough, exponential.polish(rough, G)))
    assert before > 100 * u
    # One Newton–Schulz step leaves 3/4 of the square, and rounding.
    assert after <= before**2 + 25 * u * math.sqrt(m)


@pytest.mark.parametrize("precision", PADE)
@pytest.mark.parametrize("r", [1, 3, 17])
@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_the_certificate_holds_where_a_core_is_smaller_than_its_half(precision, r, twin):
    """Every angle near a full turn: the core and its bound are small, those of the half are not."""
    rng = np.random.default_rng(r)
    for angle in (5.4, 6.0, 6.3, 6.6, 7.0, 12.5):
        F = np.concatenate(gen.with_angles(rng, 2 * r + 1, [angle] * r, precision), axis=-1)
        G = (F.astype(float).T @ F.astype(float)).astype(precision)
        found = twin(G, real(precision, 1.0), None)
        assert naive.defect_mp(F, found.C) <= found.bound


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_the_certificate_holds_at_whole_turns_of_oblique_frames(dtype, twin):
    """Before the last polish the defect is not small there, and a polish leaves its square."""
    rng = np.random.default_rng(21)
    for turns in (1, 4, 8, 16):
        for r in (1, 3, 4):
            U, V = gen.with_angles(rng, 2 * r + 1, [2 * math.pi * turns] * r, dtype)
            M = rng.standard_normal((r, r)) + 2 * np.eye(r)
            F = np.concatenate([U @ M, V @ np.linalg.inv(M).T], axis=-1)
            G = (np.conj(F.T) @ F).astype(dtype)
            found = twin(G, real(dtype, 1.0), None)
            assert naive.defect_mp(F.astype(dtype), found.C) <= found.bound


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("angle", [2.4, 3.5, 3.92, 4.3, 5.3, 5.36, 6.5])
def test_the_certificate_of_a_core_without_a_polish_holds(dtype, angle):
    """A Padé approximant, and a single doubling beside pairs that are nearly parallel."""
    rng = np.random.default_rng(22)
    for r in (3, 4, 12):
        for length in (0.0, 1.5, 8.0):
            U, V = gen.with_angles(rng, 2 * r + 1, [angle] * r, dtype)
            if length:
                unit = U[:, 1:] / np.linalg.norm(U[:, 1:], axis=0)
                turn = 0.01 * V[:, 1:] / np.linalg.norm(V[:, 1:], axis=0)
                U[:, 1:], V[:, 1:] = length**0.5 * unit, length**0.5 * (unit + turn)
            F = np.concatenate([U, V], axis=-1)
            wide = F.astype(np.result_type(dtype, np.float64))
            G = (np.conj(wide.T) @ wide).astype(dtype)
            found = skew_cores(G, real(dtype, 1.0), None)
            assert naive.defect_mp(F, found.C) <= found.bound


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
@pytest.mark.parametrize("kind", ["repeated_pairs", "positive", "generic"])
@pytest.mark.parametrize("r", [2, 8, 32])
@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_the_certificate_holds_where_many_columns_point_one_way(dtype, kind, r, twin):
    """Errors of columns that are alike add up; in single precision, against double."""
    rng = np.random.default_rng(r)
    for turns in (0.05, 0.3, 0.55, 0.9, 1.0, 40.01):
        U, V = gen.MAKERS[kind](rng, 2 * r + 40, r, dtype)
        F = np.concatenate([U, V], axis=-1)
        wide = F.astype(np.result_type(dtype, "float64"))
        t = 2 * math.pi * turns / gen.theta(U, V)
        found = twin((np.conj(wide.T) @ wide).astype(dtype), real(dtype, t), None)
        R, C = np.linalg.qr(wide, mode="r"), found.C.astype(wide.dtype)
        D = C + np.conj(C.T) + np.conj(C.T) @ (np.conj(wide.T) @ (wide @ C))
        assert np.linalg.norm(R @ D @ np.conj(R.T), 2) <= found.bound


def test_columns_that_point_anywhere_amplify_next_to_nothing():
    """So that attention on inputs of twice as many rows as columns keeps its fast route."""
    rng = np.random.default_rng(5)
    for m, n in ((2, 4), (16, 48), (128, 256), (128, 1024)):
        X = rng.standard_normal((n, m))
        assert 1.0 <= certificate.amplification(X.T @ X) <= 1.1
    for m in (6, 64):
        copies = np.ones((3, 1)) @ X[:1, :m]
        expected = m**2 * min(m, 18) / 48
        assert certificate.amplification(copies.T @ copies) == pytest.approx(expected)
    assert certificate.amplification(np.zeros((4, 4))) == 1.0


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", ["generic", "nearly_parallel", "parallel_at_random", "huge"])
def test_certificate_lies_above_the_defect(dtype, kind):
    rng = np.random.default_rng(13)
    for _ in range(8):
        X = np.concatenate(gen.MAKERS[kind](rng, 12, 2, dtype), axis=-1)
        G = (
            naive.Exact(naive.embed(X).transposed @ naive.embed(X), np.iscomplexobj(X))
            .round()
            .astype(dtype)
        )
        for twin in (skew_cores, generic_core):
            # Rounding in G can make a core run away, and the certificate has to say so.
            with np.errstate(all="ignore"):
                found = twin(G, real(dtype, 1.0), None)
            runaway = not np.isfinite(found.C).all()
            defect = np.inf if runaway else naive.defect_mp(X, found.C)
            assert defect <= float(found.bound)


@pytest.mark.parametrize("kind", ["attention", "parallel_at_random"])
@pytest.mark.parametrize("m", [16, 32, 128])
def test_sharper_certificate_lies_above_the_defect_and_nearer(m, kind):
    """In single precision, against double: where the first bound alone would not be trusted."""
    doubtful, rng = 0, np.random.default_rng(17)
    for n in (m + 1, 5 * m // 4, 3 * m // 2, 2 * m, 3 * m):
        U, V = rng.standard_normal((2, n, m // 2)).astype("f") * (2 / m) ** 0.25
        if kind != "attention":
            U, V = gen.MAKERS[kind](rng, n, m // 2, "float32")
        X = np.concatenate([U, V], axis=-1)
        found = skew_cores(X.T @ X, real("float32", 1.0), None)
        if not np.isfinite(found.bound):
            continue
        sharp = certificate.sharper_bound(found.C, X.T @ X)
        assert sharp <= found.bound
        settled = certificate.settled(found.bound, found.C, X.T @ X)
        trusted = found.bound <= certificate.trusted_up_to(m, 2.0**-24)
        # Between them is what a polish left, and how the two cores round.
        assert settled == pytest.approx(float(found.bound if trusted else sharp), rel=0.01)
        doubtful += not trusted
        R = np.linalg.qr(X.astype(float), mode="r")
        C, G = found.C.astype(float), R.T @ R
        defect = np.linalg.norm(R @ (C + C.T + C.T @ G @ C) @ R.T, 2)
        assert defect <= sharp
    assert doubtful or kind != "attention"


def test_certificate_without_a_gram_matrix_is_that_of_the_identity():
    C = gen.normal(np.random.default_rng(14), (3, 4, 4), "complex128")
    given = np.broadcast_to(np.eye(4, dtype=complex), (3, 4, 4))
    assert certificate.defect_bound(C, None) == pytest.approx(certificate.defect_bound(C, given))
    # Never below a few roundings, whatever the core.
    assert certificate.defect_bound(np.zeros((2, 2)), None) == certificate.DEFECT_FACTOR * 2.0**-53


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_certificate_of_a_small_core_needs_no_product(dtype):
    """There ‖Ĉ‖_F² is in place of ‖ĈĈᴴ‖_F: never less, and at most twice what that would give."""
    rng = np.random.default_rng(18)
    for size in (1e-3, 0.03, 0.3, 1.0, 3.0):
        X = gen.normal(rng, (64, 16), dtype)
        G = (np.conj(X.T) @ X) * size / 64
        found = core.skew(G, real(dtype, 1.0))
        d = np.sqrt(np.diagonal(G).real)
        Ch = d[:, None] * found.C * d
        inner, outer = (np.linalg.norm(a) for a in (Ch + np.conj(Ch.T), Ch @ np.conj(Ch.T)))
        u = np.finfo(dtype).eps / 2
        full = certificate.DEFECT_FACTOR * u * (1.0 + np.sqrt(inner * outer))
        assert 0.999 * full <= found.bound <= 2.001 * full * certificate_slack(found)
        assert certificate.defect_bound(found.C, G) == pytest.approx(float(found.bound), rel=0.5)


def certificate_slack(found):
    """How much larger the bound may be where a core is not polished."""
    return 2.0 if found.squarings <= 1 else 1.0


@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_the_square_decides_where_the_norm_sees_only_many_columns(twin, dtype):
    """‖A‖₁ is above the second threshold, ‖A²‖₁^½ and ‖A³‖₁^⅓ are below: order six is enough."""
    W = skew_matrix(np.random.default_rng(19), 64, dtype)
    theta = selection.table(float(np.finfo(dtype).eps))[1][1]
    W = (1.5 * theta / np.abs(W).sum(axis=0).max() * W).astype(dtype)
    found = twin(None, real(dtype, 1.0), W)
    assert (found.order, found.squarings) == (6, 0)
    wide = np.complex128 if np.iscomplexobj(W) else np.float64
    exact = scipy.linalg.expm(W.astype(wide)) - np.eye(64)
    u = np.finfo(dtype).eps / 2
    assert np.linalg.norm(found.C - exact, 2) <= 20 * u


# --- balancing -------------------------------------------------------------------------------


def balanced_pair(rng, dtype):
    X = gen.normal(rng, (20, 6), dtype)
    return np.conj(X.T) @ X


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_balance_gives_reciprocal_powers_of_two(dtype):
    G = balanced_pair(np.random.default_rng(15), dtype)
    scale = real(dtype, [1.0, 1e4, 1e-5, 1e3, 1.0, 1e5])
    D = exponential.balance(scale[:, None] * G * scale)
    assert (np.frexp(D)[0] == 0.5).all()
    assert (D[:3] * D[3:] == 1).all()
    lengths = D * scale * np.sqrt(np.diagonal(G).real)
    ratio = lengths[:3] / lengths[3:]
    # The best power of two leaves a ratio between 1/2 and 2.
    assert ((ratio >= 0.499) & (ratio <= 2.001)).all()


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_balancing_is_exact(dtype, twin):
    """Columns scaled by powers of two: the core is the same bits, scaled back."""
    G = balanced_pair(np.random.default_rng(16), dtype) / 16
    c = 2.0 ** np.array([12.0, -9.0, 0.0])
    D = real(dtype, np.concatenate([c, 1 / c]))
    t = real(dtype, 0.8)
    plain = twin(G, t, None)
    scaled = twin((D[:, None] * G * D).astype(dtype), t, None)
    assert (scaled.order, scaled.squarings) == (plain.order, plain.squarings)
    assert (D[:, None] * scaled.C * D == plain.C).all()
    assert scaled.bound == plain.bound


@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_a_pair_with_a_zero_column_adds_nothing(twin):
    rng = np.random.default_rng(17)
    X = gen.normal(rng, (20, 6), "complex128") / 4
    X[:, 1] = 0
    G = np.conj(X.T) @ X
    t = real("complex128", 1.1)
    C = twin(G, t, None).C
    live = [0, 2, 3, 5]
    assert np.isfinite(C).all()
    assert not C[[1, 4]].any()
    assert not C[:, [1, 4]].any()
    less = twin(np.ascontiguousarray(G[np.ix_(live, live)]), t, None).C
    assert np.linalg.norm(C[np.ix_(live, live)] - less) <= 40 * 2.0**-53 * np.linalg.norm(less)


@pytest.mark.parametrize("twin", [skew_cores, generic_core], ids=["compiled", "array API"])
def test_zero_matrices_give_zero_cores(twin):
    for dtype in gen.DTYPES:
        found = twin(np.zeros((2, 4, 4), dtype), real(dtype, 3.0), None)
        assert not found.C.any()
        assert (found.order, found.squarings) == (4, 0)


# --- overflow --------------------------------------------------------------------------------


@pytest.mark.parametrize("m", [2, 80])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_matrix_that_overflows_is_refused(dtype, m):
    W = skew_matrix(np.random.default_rng(18), m, dtype) * np.finfo(dtype).max ** 0.9
    W = W.astype(dtype)
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="overflows the dtype"):
        core.skew(None, real(dtype, np.finfo(dtype).max ** 0.5), W)


def test_one_element_that_overflows_refuses_the_batch():
    W = np.stack([np.eye(2), np.eye(2)])[..., ::-1] * np.array([1.0, -1.0])
    t = np.array([1.0, 1e200])
    W[1] *= 1e200
    with pytest.raises(ValueError, match="scale t, U or V down"):
        core.skew(None, t, W)


def test_general_core_that_overflows_is_refused():
    with np.errstate(all="ignore"), pytest.raises(ValueError, match="overflows the dtype"):
        core.general(np.full((2, 2), 1e200), np.asarray(1e200))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_squares_of_a_large_matrix_do_not_overflow(dtype):
    """A², A⁴ and A⁶ are formed from A divided by its size."""
    size = np.finfo(dtype).max ** 0.75
    W = np.array([[0.0, size], [-size, 0.0]], dtype)
    for twin in (skew_cores, generic_core):
        C = twin(None, real(dtype, 1.0), W).C
        assert np.isfinite(C).all()
        # The angle has no digits left, but the matrix is still a rotation.
        assert naive.defect_mp(np.eye(2), C) <= 25 * gen.unit(dtype) * math.sqrt(2)
