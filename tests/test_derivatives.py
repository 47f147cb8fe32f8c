"""Derivatives: against exact ones, against other ways to find them, and on hard inputs.

The contract: relative errors of at most 1e3 u max(1, ρ). `derivative_accuracy` measures the same
over thousands of cases.
"""

import tracemalloc

import mpmath
import numpy as np
import pytest
import scipy.linalg

from lowrank_expm import LowRankSkew, derivatives, skew_expm_multiply
from lowrank_expm.core import spectral
from lowrank_expm.derivatives import jvp, vjp
from lowrank_expm.passes import watching

from . import derivative_accuracy as accuracy
from . import generators as gen
from . import naive

CONTRACT = 1e3


def inner(a, b):
    """Re ⟨a, b⟩, in double precision."""
    a, b = (np.asarray(x, dtype=complex) for x in (a, b))
    return float(np.vdot(a, b).real)


def norm(*arrays):
    return float(np.linalg.norm([np.linalg.norm(np.asarray(a, dtype=complex)) for a in arrays]))


def arguments(dtype="float64", n=12, r=2, k=2, seed=0, kind="generic"):
    """U, V, B and a direction of each."""
    rng = np.random.default_rng(seed)
    U, V = accuracy.MAKERS[kind](rng, n, r, dtype)
    rest = (gen.normal(rng, a, dtype) for a in ((n, k), (n, r), (n, r), (n, k)))
    return (U, V, *rest)


# --- the oracle ------------------------------------------------------------------------------


def mp_matrix(a):
    return mpmath.matrix(np.asarray(a, dtype=complex).tolist())


@pytest.mark.parametrize("dtype", gen.DOUBLES)
def test_the_oracle_is_mpmath_on_the_block_matrix(dtype):
    U, V, B, dU, dV, dB = arguments(dtype, n=4, r=1, k=1)
    t, dt = 0.7, 0.4
    Y, dY = naive.exact_jvp(U, V, B, dU, dV, dB, t, dt)
    with mpmath.workdps(40):
        u, v, b, du, dv, db = (mp_matrix(a) for a in (U, V, B, dU, dV, dB))
        S = u * v.H - v * u.H
        dS = du * v.H + u * dv.H - dv * u.H - v * du.H
        block = mpmath.zeros(8, 8)
        for i in range(4):
            for j in range(4):
                block[i, j] = block[4 + i, 4 + j] = t * S[i, j]
                block[i, 4 + j] = t * dS[i, j] + dt * S[i, j]
        E = mpmath.expm(block)
        both = E * mpmath.matrix([*db, *b])
        expected = np.array([complex(x) for x in both])
    assert norm(dY.round()[:, 0] - expected[:4]) <= 1e-15 * norm(expected)
    assert norm(Y.round()[:, 0] - expected[4:]) <= 1e-15 * norm(expected)


@pytest.mark.parametrize("dtype", gen.DOUBLES)
def test_the_oracles_are_adjoint(dtype):
    """To 30 digits before rounding: here to the rounding of the inner products."""
    U, V, B, dU, dV, dB = arguments(dtype, n=5)
    Ybar = gen.normal(np.random.default_rng(9), B.shape, dtype)
    _, dY = naive.exact_jvp(U, V, B, dU, dV, dB, 1.3, 0.0)
    bars = [e.round() for e in naive.exact_vjp(U, V, B, Ybar, 1.3)]
    right = sum(inner(bar, d) for bar, d in zip(bars, (dU, dV, dB), strict=True))
    assert inner(Ybar, dY.round()) == pytest.approx(right, abs=1e-14 * norm(*bars) * 4)


# --- against the oracle ----------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", sorted(accuracy.MAKERS))
def test_derivatives_are_exact(kind, dtype):
    """jvp in all arguments at once and in each, and every cotangent of vjp; n above and below m."""
    rng = np.random.default_rng([len(kind), len(dtype)])
    for n, forward in ((6, ("dU, dV, dB, dt",)), (3, ("dU",))):
        if n == 3 and kind in ("repeated_angles", "multiples_of_pi"):
            continue
        errors = accuracy.measure(accuracy.Problem(rng, kind, dtype, n, 2), forward)
        assert max(errors.values()) <= CONTRACT, errors


@pytest.mark.parametrize("dtype", gen.DOUBLES)
@pytest.mark.parametrize("theta", [1e-12, 1e-6, 1.0, 1e3, 1e8])
def test_derivatives_are_exact_at_any_norm(theta, dtype):
    problem = accuracy.Problem(np.random.default_rng(3), "generic", dtype, 8, 2)
    problem.t *= theta / gen.theta(problem.U, problem.V)
    assert max(accuracy.measure(problem, accuracy.FORWARD).values()) <= CONTRACT


@pytest.mark.parametrize("kind", ["nearly_parallel", "huge", "generic"])
def test_every_route_of_the_derivatives_is_exact(kind):
    """The three of them, each where "auto" would take it."""
    routes = set()
    for seed in range(4):
        for n in (3, 12):
            problem = accuracy.Problem(np.random.default_rng(seed), kind, "float64", n, 2)
            routes.add(LowRankSkew(problem.U, problem.V).expm(problem.t).certificate.route)
            assert max(accuracy.measure(problem).values()) <= CONTRACT
    assert "direct" in routes
    assert len(routes) >= 2


def test_a_zero_column_beside_one_whose_square_overflows():
    """The pair adds nothing to S, but its derivative is not zero."""
    rng = np.random.default_rng(0)
    U, V, B = np.zeros((6, 2)), rng.standard_normal((6, 2)) * [1e200, 1.0], np.ones((6, 1))
    U[:, 1] = 1
    dU = rng.standard_normal((6, 2)) * [1e-200, 1.0]
    _, dY = jvp(U, V, B, dU, None, None)
    _, exact = naive.exact_jvp(U, V, B, dU, np.zeros((6, 2)), np.zeros((6, 1)), 1.0, 0.0)
    assert norm(exact.distance(dY)) <= 1e-13 * norm(exact.round())
    Ubar, Vbar, _, _ = vjp(U, V, B)[1](dY)
    assert inner(Ubar * [1e-200, 1], dU * [1e200, 1]) == pytest.approx(inner(dY, dY))
    assert not Vbar[:, 0].any()


def test_the_gram_form_alone_would_fail_on_nearly_parallel_factors(monkeypatch):
    """What the other form is for; without it these tests have to notice."""
    problem = accuracy.Problem(np.random.default_rng(1), "nearly_parallel", "float64", 12, 2)
    good = max(accuracy.measure(problem).values())
    framed = derivatives.problem.__globals__["linearise"].__globals__["Framed"]
    gram = framed.of.__globals__["Gram"]

    def of(X, s, t, B):
        p = derivatives.problem(problem.U, problem.V, B, t)
        return gram(X, p.G, p.T, t, B)

    monkeypatch.setattr(framed, "of", staticmethod(of))
    assert max(accuracy.measure(problem).values()) > 10 * max(good, 1)


# --- against other ways ----------------------------------------------------------------------


@pytest.mark.parametrize(("n", "r"), [(9, 2), (3, 2), (7, 3), (1, 1)])
def test_complex_step(n, r):
    """Real inputs, the dense definition without conjugation: exp is analytic in U, V, B and t."""
    U, V, B, dU, dV, dB = arguments(n=n, r=r)
    h, t, dt = 1e-30, 1.1, 0.3
    u, v, b = (a + 1j * h * d for a, d in ((U, dU), (V, dV), (B, dB)))
    expected = (scipy.linalg.expm((t + 1j * h * dt) * (u @ v.T - v @ u.T)) @ b).imag / h
    Y, dY = jvp(U, V, B, dU, dV, dB, t=t, dt=dt)
    assert dY.dtype == Y.dtype == np.float64
    assert norm(dY - expected) <= CONTRACT * 2**-53 * gen.rho(U, V, t) * norm(expected)


@pytest.mark.parametrize("dtype", gen.DOUBLES)
def test_central_differences_of_the_exact_map(dtype):
    """The oracle's values are exact; what is left is the rounding of U ± h dU, and h²."""
    U, V, B, dU, dV, dB = arguments(dtype, n=5, r=1, k=1)
    h = 2.0**-18
    ahead, behind = (naive.exact_skew(U + s * dU, V + s * dV, B + s * dB).value for s in (h, -h))
    _, dY = jvp(U, V, B, dU, dV, dB)
    error = (ahead - behind).round() * (0.5 / h) - naive.embed(dY).round()
    scale = (1 + norm(U, V, dU, dV)) ** 3 * norm(B, dB)
    assert norm(error) <= (2.0**-53 / h + h * h) * scale
    assert norm(error) <= 1e-7 * norm(dY)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_scipy_expm_frechet(dtype):
    U, V, B, dU, dV, _ = arguments(dtype)
    M = dU @ V.conj().T + U @ dV.conj().T
    wide = np.result_type(dtype, np.float64)
    L = scipy.linalg.expm_frechet(
        naive.dense_skew(U, V), (M - M.conj().T).astype(wide), compute_expm=False
    )
    _, dY = jvp(U, V, B, dU, dV, None)
    assert norm(dY - L @ B) <= CONTRACT * gen.unit(dtype) * max(1, gen.rho(U, V)) * norm(L @ B)


# --- invariants ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", sorted(accuracy.MAKERS))
def test_jvp_and_vjp_are_adjoint(kind, dtype):
    p = accuracy.Problem(np.random.default_rng(5), kind, dtype, 9, 2)
    _, dY = jvp(p.U, p.V, p.B, p.dU, p.dV, p.dB, t=p.t, dt=p.dt)
    _, pullback = vjp(p.U, p.V, p.B, t=p.t)
    bars, directions = pullback(p.Y), (p.dU, p.dV, p.dB, p.dt)
    right = sum(inner(bar, d) for bar, d in zip(bars, directions, strict=True))
    scale = np.exp2(p.exponents)
    balanced = (bars[0] / scale, bars[1] * scale, bars[2])
    size = norm(*balanced) * norm(p.dU * scale, p.dV / scale, p.dB) + abs(p.dt) * p.speed
    assert abs(inner(p.Y, dY) - right) <= 100 * p.unit * size


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", sorted(accuracy.MAKERS))
def test_the_norm_is_preserved_to_first_order(kind, dtype):
    """Re⟨Y, dY⟩ = Re⟨B, dB⟩, column by column."""
    p = accuracy.Problem(np.random.default_rng(6), kind, dtype, 9, 2)
    Y, dY = jvp(p.U, p.V, p.B, p.dU, p.dV, p.dB, t=p.t, dt=p.dt)
    size = norm(dY) + abs(p.dt) * p.speed
    for j in range(2):
        gap = inner(Y[:, j], dY[:, j]) - inner(p.B[:, j], p.dB[:, j])
        assert abs(gap) <= CONTRACT * p.unit * size * norm(p.B)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_derivative_in_t_is_the_generator(dtype):
    U, V, B, *_ = arguments(dtype)
    Y, dY = jvp(U, V, B, None, None, None, t=0.8, dt=1.0)
    assert norm(dY - LowRankSkew(U, V) @ Y) <= 100 * gen.unit(dtype) * norm(dY)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_the_basis_of_a_factor_does_not_matter(dtype):
    """(U A, V A⁻ᴴ) has the same S, so the derivative in that direction is zero."""
    U, V, B, *_ = arguments(dtype, n=14)
    A = gen.normal(np.random.default_rng(8), (2, 2), dtype)
    _, dY = jvp(U, V, B, U @ A, -V @ A.conj().T, None)
    assert norm(dY) <= CONTRACT * gen.unit(dtype) * gen.rho(U, V) * norm(A) * norm(B)


def test_values_are_those_of_the_forward_call():
    for kind in ("generic", "nearly_parallel", "far_columns", "huge"):
        U, V, B, _, _, dB = arguments(kind=kind)
        expected = skew_expm_multiply(U, V, B, 0.7)
        limit = 80 * gen.unit("f8") * max(1, gen.rho(U, V, 0.7)) * norm(B)
        assert norm(jvp(U, V, B, None, None, dB, t=0.7)[0] - expected) <= limit
        assert norm(vjp(U, V, B, t=0.7)[0] - expected) <= limit


# --- shapes ----------------------------------------------------------------------------------

SHAPES = [
    ((7, 2), (7, 2), (7,)),
    ((7,), (7,), (7,)),
    ((7,), (7,), (7, 3)),
    ((7, 2), (7, 2), (3, 7, 2)),
    ((3, 7, 2), (7, 2), (7, 2)),
    ((7, 2), (3, 7, 2), (2, 1, 7, 1)),
    ((2, 1, 7, 2), (3, 7, 2), (7,)),
    ((1, 7, 2), (3, 7, 2), (2, 3, 7, 2)),
    ((2, 3, 2), (3, 2), (3, 1)),
    ((2, 3, 2), (1, 3, 2), (4, 1, 3, 1)),
]


@pytest.mark.parametrize("t", [0.6, [0.6, -1.1, 0.0]])
@pytest.mark.parametrize("kinds", ["ddd", "ddD", "dDd", "DDD"])
@pytest.mark.parametrize("shapes", SHAPES, ids=str)
def test_batches_grids_and_mixed_dtypes_equal_single_calls(shapes, kinds, t):
    """And broadcast arguments gather the cotangents of all that they take part in."""
    rng = np.random.default_rng(1)
    draw = [gen.normal(rng, s, np.dtype(c)) for s, c in zip(shapes, kinds, strict=True)]
    moved = [gen.normal(rng, s, np.dtype(c)) for s, c in zip(shapes, kinds, strict=True)]
    Y, dY = jvp(*draw, *moved, t=t, dt=0.5)
    value, pullback = vjp(*draw, t=t)
    assert Y.shape == dY.shape == value.shape == skew_expm_multiply(*draw, t).shape
    Ybar = gen.normal(rng, Y.shape, Y.dtype)
    bars = pullback(Ybar)
    for bar, a in zip(bars, draw, strict=False):
        assert bar.shape == a.shape
        assert bar.dtype == a.dtype
    assert np.shape(bars[3]) == np.shape(t)
    dts = np.full(np.shape(t), 0.5)
    right = sum(inner(bar, d) for bar, d in zip(bars, (*moved, dts), strict=True))
    assert inner(Ybar, dY) == pytest.approx(right, abs=1e-12 * norm(Ybar) * norm(dY))
    assert norm(dY - singles(draw, moved, t)) <= 1e-12 * norm(dY)


def singles(draw, moved, t):
    """The derivative, one element at a time."""
    U, V, B, dU, dV, dB = (a[..., None] if a.ndim == 1 else a for a in (*draw, *moved))
    shape = naive.result_shape(U, V, B, t)
    dY = np.zeros(shape, np.result_type(U, V, B))
    for (index, u, v, b, s), (_, du, dv, db, _) in zip(
        naive.elements(U, V, B, t), naive.elements(dU, dV, dB, t), strict=True
    ):
        dY[index] = jvp(u, v, b, du, dv, db, t=s, dt=0.5)[1]
    return dY[..., 0] if draw[2].ndim == 1 else dY


def test_a_batch_that_takes_two_routes():
    """One element nearly parallel, one not: both as exact as alone."""
    parts = [
        accuracy.Problem(np.random.default_rng(3), kind, "float64", 12, 2)
        for kind in ("nearly_parallel", "tiny")
    ]
    U, V, B, dU, dV, dB, Y = (
        np.stack([getattr(p, name) for p in parts])
        for name in ("U", "V", "B", "dU", "dV", "dB", "Y")
    )
    assert sorted(LowRankSkew(U, V).expm().certificate.route) == ["gram", "qr"]
    _, dY = jvp(U, V, B, dU, dV, dB)
    bars = vjp(U, V, B)[1](Y)[:3]
    for i, p in enumerate(parts):
        _, exact = naive.exact_jvp(p.U, p.V, p.B, p.dU, p.dV, p.dB, 1.0, 0.0)
        limit = CONTRACT * 2**-53 * max(1, gen.rho(p.U, p.V))
        assert norm(exact.distance(dY[i])) <= limit * norm(exact.round())
        for bar, e in zip(bars, naive.exact_vjp(p.U, p.V, p.B, p.Y, 1.0), strict=True):
            assert norm(e.distance(bar[i])) <= limit * norm(e.round())


def test_each_cotangent_has_the_dtype_of_its_argument():
    rng = np.random.default_rng(0)
    U, V, B = (gen.normal(rng, (6, 2), c) for c in ("float32", "complex64", "float64"))
    Y, pullback = vjp(U, V, B)
    assert Y.dtype == np.complex128
    assert [bar.dtype for bar in pullback(Y)[:3]] == [U.dtype, V.dtype, B.dtype]
    assert jvp(U, V, B, U, V, B, t=np.float64(0.5))[1].dtype == np.complex128


@pytest.mark.parametrize("n", [0, 1, 5])
@pytest.mark.parametrize("r", [0, 1, 2])
@pytest.mark.parametrize("k", [0, 1])
@pytest.mark.parametrize("t", [1.0, [], [1.0, 2.0]])
def test_empty_problems(n, r, k, t):
    U, V, B, dU, dV, dB = arguments(n=n, r=r, k=k)
    Y, dY = jvp(U, V, B, dU, dV, dB, t=t, dt=1.0)
    assert Y.shape == dY.shape == (*np.shape(t), n, k)
    bars = vjp(U, V, B, t=t)[1](np.ones(Y.shape))
    assert [np.shape(bar) for bar in bars] == [(n, r), (n, r), (n, k), np.shape(t)]
    if not r:
        assert (dY == dB).all()


def test_empty_batches():
    U = V = B = np.zeros((0, 5, 1))
    assert jvp(U, V, B, U, V, B)[1].shape == (0, 5, 1)
    assert [np.shape(bar) for bar in vjp(U, V, B)[1](B)] == [(0, 5, 1)] * 3 + [()]


@pytest.mark.parametrize("kind", [float, complex])
@pytest.mark.parametrize("shape", [(0, 5, 2), (2, 0, 5, 2), (3, 0, 2), (3, 5, 0)])
def test_empty_batches_of_vectors(shape, kind):
    """They go through the passes side by side, as columns."""
    for U in (np.ones((shape[-2], 1)), np.zeros((shape[-2], 0))):
        B = np.ones(shape, kind)
        Y, dY = jvp(U, U, B, U, U, B)
        assert Y.shape == dY.shape == shape
        bars = vjp(U, U, B)[1](Y)
        assert [np.shape(bar) for bar in bars] == [U.shape, U.shape, shape, ()]


def test_cotangents_without_columns_have_their_own_memory_and_dtype():
    U = np.zeros((5, 0), np.float16)
    for kind in (np.float16, np.float32, np.complex64):
        B = np.ones((5, 2), kind)
        for Ybar in (B, B.astype(np.result_type(kind, float))):
            Bbar = vjp(U, U, B)[1](Ybar)[2]
            assert Bbar.dtype == kind
            assert np.array_equal(Bbar, Ybar)
            assert not np.shares_memory(Bbar, Ybar)


def test_no_direction_is_zero():
    U, V, B, dU, *_ = arguments()
    zero = np.zeros_like
    expected = jvp(U, V, B, dU, zero(V), zero(B))[1]
    assert (jvp(U, V, B, dU, None, None)[1] == expected).all()
    assert not jvp(U, V, B, None, None, None)[1].any()


def test_a_real_direction_of_a_complex_argument_is_complex():
    """A real tangent or cotangent is one with zero imaginary part."""
    for dtypes in ("DDD", "ddD"):
        rng = np.random.default_rng(2)
        U, V, B = (gen.normal(rng, (8, 2), np.dtype(c)) for c in dtypes)
        d = gen.normal(rng, (8, 2), float)
        args = (None, None)
        expected = jvp(U, V, B, *args, d + 0j)[1]
        assert (jvp(U, V, B, *args, d)[1] == expected).all()
        pullback = vjp(U, V, B)[1]
        for a, b in zip(pullback(d), pullback(d + 0j), strict=True):
            assert np.array_equal(a, b)


def test_integers_and_lists_are_arguments():
    Y, dY = jvp([1, 0], [0, 1], [1, 2], [0, 1], None, [1, 1])
    assert Y.dtype == dY.dtype == np.float64
    assert vjp([1, 0], [0, 1], [1, 2])[1]([1, 1])[0].dtype == np.float64


def test_the_pullback_may_be_called_again_and_is_linear():
    U, V, B, *_ = arguments()
    Y, pullback = vjp(U, V, B)
    first, twice, again = pullback(Y), pullback(2 * Y), pullback(Y)
    for a, b, c in zip(first, twice, again, strict=True):
        assert np.array_equal(a, c)
        assert np.allclose(2 * np.asarray(a), b, rtol=1e-14)


def test_layouts_and_read_only_arrays():
    args = arguments(n=9)
    expected = jvp(*args)[1]
    Ybar = args[5]
    bars = vjp(*args[:3])[1](Ybar)
    for name, layout in gen.LAYOUTS.items():
        if name == "repeated":
            continue
        moved = [layout(a) for a in args]
        assert np.allclose(jvp(*moved)[1], expected, rtol=1e-13, atol=1e-13)
        for a, b in zip(vjp(*moved[:3])[1](layout(Ybar)), bars, strict=True):
            assert np.allclose(a, b, rtol=1e-13, atol=1e-13)


def test_inputs_are_not_written_to():
    args = arguments(kind="nearly_parallel")
    kept = [a.copy() for a in args]
    jvp(*args)
    vjp(*args[:3])[1](args[5])
    assert all(np.array_equal(a, b) for a, b in zip(args, kept, strict=True))


# --- memory ----------------------------------------------------------------------------------


def peak(function):
    """Bytes allocated at the highest point, beyond what was there."""
    tracemalloc.start()
    try:
        before = tracemalloc.get_traced_memory()[0]
        function()
        return tracemalloc.get_traced_memory()[1] - before
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("t", [1.0, 1e6])
def test_memory_is_that_of_the_results_at_any_number_of_squarings(t):
    n, r = 200_000, 2
    rng = np.random.default_rng(0)
    U, V, dU, dV = rng.standard_normal((4, n, r)) / np.sqrt(n)
    B, dB, Ybar = rng.standard_normal((3, n, 1))
    extra = 4 << 20
    vector = B.nbytes

    def reverse():
        _, pullback = vjp(U, V, B, t=t)
        pullback(Ybar)

    reverse()
    # Forward: Y and dY, folded and not. Reverse: Y, the three cotangents, and B̄ unfolded.
    assert peak(lambda: jvp(U, V, B, dU, dV, dB, t=t)) <= 5 * vector + extra
    assert peak(reverse) <= 2 * U.nbytes + 5 * vector + extra


def test_the_pullback_keeps_nothing_long():
    n = 200_000
    U, V, B = np.random.default_rng(0).standard_normal((3, n, 1)) / np.sqrt(n)
    vjp(U, V, B)
    tracemalloc.start()
    try:
        Y, pullback = vjp(U, V, B)
        held = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert callable(pullback)
    assert held <= Y.nbytes + (1 << 18)


def test_rows_are_read_a_few_times():
    """Forward for the value and the derivative, reverse for each pullback."""
    n = 50_000
    U, V = np.random.default_rng(0).standard_normal((2, n, 2)) / np.sqrt(n)
    B = np.ones((n, 1))
    rows = []
    with watching(lambda _, count: rows.append(count)):
        pullback = vjp(U, V, B)[1]
        assert sum(rows) == 2 * n
        rows.clear()
        pullback(B)
        assert sum(rows) == 2 * n


# --- refusals --------------------------------------------------------------------------------


def test_directions_that_do_not_fit_are_refused():
    U, V, B, dU, dV, dB = arguments()
    with pytest.raises(ValueError, match=r"dU has shape \(12, 1\); .* \(12, 2\)"):
        jvp(U, V, B, dU[:, :1], dV, dB)
    with pytest.raises(ValueError, match=r"dV has shape \(11, 2\); .* \(12, 2\)"):
        jvp(U, V, B, dU, dV[1:], dB)
    with pytest.raises(ValueError, match=r"dB has shape \(12,\)"):
        jvp(U, V, B, dU, dV, dB[:, 0])
    with pytest.raises(ValueError, match=r"Ybar has shape \(2, 12\)"):
        vjp(U, V, B)[1](B.T)
    with pytest.raises(ValueError, match=r"dt has shape \(2,\)"):
        jvp(U, V, B, dU, dV, dB, dt=[1.0, 2.0])
    with pytest.raises(ValueError, match=r"dt has shape \(2,\)"):
        jvp(U, V, B, dU, dV, dB, t=[1.0, 2.0, 3.0], dt=[1.0, 2.0])


def test_complex_directions_of_real_arguments_are_refused():
    U, V, B, dU, dV, dB = arguments()
    with pytest.raises(TypeError, match="dU is complex"):
        jvp(U, V, B, dU + 1j, dV, dB)
    with pytest.raises(TypeError, match="dB is complex"):
        jvp(U, V, B, dU, dV, 1j * dB)
    with pytest.raises(TypeError, match="dt is complex"):
        jvp(U, V, B, dU, dV, dB, dt=1j)
    with pytest.raises(TypeError, match="Ybar is complex"):
        vjp(U, V, B)[1](1j * B)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_what_is_not_finite_is_refused(bad):
    args = list(arguments())
    for i, name in enumerate(("U", "V", "B", "dU", "dV", "dB")):
        spoilt = [a.copy() for a in args]
        spoilt[i][3, 1] = bad
        with pytest.raises(ValueError, match=rf"^{name}[\[ ]"):
            jvp(*spoilt)
    with pytest.raises(ValueError, match="Ybar"):
        vjp(*args[:3])[1](np.full_like(args[2], bad))
    with pytest.raises(ValueError, match="dt contains"):
        jvp(*args, dt=bad)
    with pytest.raises(ValueError, match="t contains"):
        vjp(*args[:3], t=bad)


def test_overflow_is_refused():
    U, V, B, dU, dV, dB = arguments()
    with pytest.raises(ValueError, match="the derivative overflows"):
        jvp(U, V, 1e200 * B, 1e200 * dU, dV, dB)
    with pytest.raises(ValueError, match="the derivative overflows"):
        vjp(U, V, 1e200 * B)[1](1e200 * dB)


def test_arguments_that_do_not_fit_are_refused_as_by_the_forward_call():
    U, V, B, *_ = arguments()
    with pytest.raises(ValueError, match="U has shape"):
        vjp(U[:, :1], V, B)
    with pytest.raises(ValueError, match="B has shape"):
        vjp(U, V, B[1:])
    with pytest.raises(TypeError, match="t is complex"):
        vjp(U, V, B, t=1j)
    with pytest.raises(TypeError, match="dtype"):
        jvp(U, V, B, U.astype(object), None, None)


# --- functions of a small skew-Hermitian matrix ----------------------------------------------


def skew(dtype, n=5, size=1.0):
    a = gen.normal(np.random.default_rng(4), (n, n), dtype)
    return size * (a - a.conj().T)


@pytest.mark.parametrize("size", [0.0, 1e-9, 1.0, 30.0])
@pytest.mark.parametrize("dtype", gen.DOUBLES)
def test_spectral_functions_are_those_of_scipy(dtype, size):
    K, t = skew(dtype, size=size), np.asarray(0.7)
    E = gen.normal(np.random.default_rng(5), K.shape, dtype)
    s = spectral.spectrum(K)
    expected, derivative = scipy.linalg.expm_frechet(t * K, E)
    limit = 1e-14 * (1 + size)
    assert norm(spectral.exp(s, t) - expected) <= limit * 10
    assert norm(spectral.exp_derivative(s, t, E) - derivative) <= 10 * limit * norm(E)
    assert norm(spectral.generator_exp(s, t) - K @ expected) <= 10 * limit * norm(K)
    phi = spectral.phi1(s, t)
    assert norm(t * K @ phi + np.eye(5) - expected) <= 10 * limit
    assert phi.dtype == K.dtype


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_spectral_functions_in_the_array_api(library, dtype):
    K = np.stack([skew(dtype), skew(dtype, size=3.0)])
    E = gen.normal(np.random.default_rng(5), K.shape, dtype)
    t = np.asarray(0.3, gen.normal(np.random.default_rng(0), (), dtype).real.dtype)
    s = spectral.spectrum(library.asarray(K))
    plain = spectral.spectrum(K)
    for function in (spectral.exp, spectral.phi1, spectral.generator_exp):
        found = library.numpy(function(s, library.asarray(t)))
        assert found.dtype == dtype
        assert norm(found - function(plain, t)) <= 100 * gen.unit(dtype) * norm(K)
    found = library.numpy(spectral.exp_derivative(s, library.asarray(t), library.asarray(E)))
    assert found.dtype == dtype
    assert norm(found - spectral.exp_derivative(plain, t, E)) <= 100 * gen.unit(dtype) * norm(E)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_columns_of_noise_are_left_out_of_an_orthonormal_frame(library, dtype):
    """F with a column of noise and one of zeros: Q has rank 2, and F = Q R but for them."""
    E = gen.frame(np.random.default_rng(6), 8, 4, dtype)
    F = E * np.array([1.02, 0.98, 0.3, 0.0]).astype(E.real.dtype)
    root, R = (library.numpy(a) for a in spectral.orthonormaliser(library.asarray(F.conj().T @ F)))
    assert root.dtype == R.dtype == dtype
    Q = F @ root
    limit = 20 * gen.unit(dtype)
    assert norm(Q.conj().T @ Q - np.diag([0, 0, 1, 1])) <= limit
    assert norm((Q @ R - F)[:, :2]) <= limit
    assert norm(root[:, :2]) <= limit


def test_measuring_the_derivatives(capsys):
    """The command that prints the worst errors."""
    assert accuracy.main(["--cases", "4", "--json"]) == 0
    assert "float32" in capsys.readouterr().out
    assert accuracy.main(["--cases", "4"]) == 0
    assert "complex128" in capsys.readouterr().out


# --- memory of the caller --------------------------------------------------------------------


def fresh_like(*arrays):
    return tuple(np.full_like(a, np.nan) for a in arrays)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", ["generic", "nearly_parallel"])
@pytest.mark.parametrize("n", [3, 12, 5000])
def test_the_pullback_writes_the_same_bits_where_it_is_told_to(dtype, kind, n):
    U, V, B, *_, Y = arguments(dtype, n=n, kind=kind)
    pullback = vjp(U, V, B)[1]
    plain, out = pullback(Y), fresh_like(U, V, B)
    given = pullback(Y, out=out)
    assert all(a is b for a, b in zip(given[:3], out, strict=True))
    assert given[3] == plain[3]
    assert all(np.array_equal(a, b) for a, b in zip(plain[:3], out, strict=True))


def shaped(*shapes, dtypes=("f8", "f8", "f8")):
    rng = np.random.default_rng(1)
    return [gen.normal(rng, shape, d) for shape, d in zip(shapes, dtypes, strict=True)]


@pytest.mark.parametrize(
    ("operands", "t"),
    [
        (shaped((9,), (9,), (9,)), 0.5),
        (shaped((9, 2), (9, 2), (9, 3)), [0.5, -1.0]),
        (shaped((9, 2), (9, 2), (9, 3)), []),
        (shaped((4, 9, 2), (4, 9, 2), (4, 9, 3)), 0.5),
        (shaped((4, 9, 2), (9, 2), (9, 3)), 0.5),
        (shaped((9, 2), (9, 2), (4, 9, 3)), 0.5),
        (shaped((9, 2), (9, 2), (9, 3), dtypes=("f4", "f8", "f8")), 0.5),
        (shaped((9, 2), (9, 2), (9, 3), dtypes=("f8", "f8", "c16")), 0.5),
        (shaped((9, 0), (9, 0), (9, 3)), 0.5),
        (shaped((0, 2), (0, 2), (0, 3)), 0.5),
    ],
)
def test_memory_of_the_caller_in_every_shape(operands, t):
    Y, pullback = vjp(*operands, t=np.array(t))
    plain, out = pullback(Y), fresh_like(*operands)
    for bar, target in zip(plain, pullback(Y, out=out), strict=True):
        assert np.array_equal(bar, target)
    strided = tuple(np.empty((*a.shape, 2), a.dtype)[..., 0] for a in operands)
    for bar, target in zip(plain, pullback(Y, out=strided), strict=True):
        assert np.array_equal(bar, target)


def test_memory_that_does_not_fit_is_refused():
    U, V, B, *_, Y = arguments()
    pullback = vjp(U, V, B)[1]
    good = fresh_like(U, V, B)
    locked = good[2].copy()
    locked.flags.writeable = False
    for out, kind, what in (
        (good[:2], TypeError, "three arrays"),
        (good[0], TypeError, "three arrays"),
        ((*good[:2], [1.0]), TypeError, r"out\[2\] is a list"),
        ((good[0][:3], *good[1:]), ValueError, r"out\[0\] has shape \(3, 2\)"),
        ((good[0], good[1].astype("f4"), good[2]), ValueError, r"out\[1\].*float32"),
        ((*good[:2], locked), ValueError, r"out\[2\] is read-only"),
        ((U, *good[1:]), ValueError, r"out\[0\] overlaps"),
        ((*good[:2], Y), ValueError, r"out\[2\] overlaps"),
        ((good[0], good[0], good[2]), ValueError, r"out\[1\] overlaps"),
    ):
        with pytest.raises(kind, match=what):
            pullback(Y, out=out)


# --- results near the largest number ---------------------------------------------------------


def finite_or_refused(derivative):
    """The results where they fit the dtype, None where that is said to be impossible."""
    try:
        results = derivative()
    except ValueError as error:
        if "the derivative overflows" not in str(error):
            raise
        return None
    assert all(np.isfinite(a).all() for a in results)
    return results


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", ["generic", "duplicate_columns", "nearly_parallel"])
@pytest.mark.parametrize("n", [4, 12])
def test_large_arguments_give_what_fits_and_no_infinity(kind, dtype, n):
    """Every route, against the same in which powers of two make everything ordinary."""
    U, V, B, *_, dB = arguments(dtype, n=n, kind=kind)
    half = np.finfo(dtype).maxexp // 2
    for e in (half - 8, half - 2, half - 1, half, half + 8, 2 * half - 4):
        for size, b in ((1.0, e), (2.0 ** -(half // 2), e), (1.0, half - 20)):
            small = (U * size).astype(dtype), (V * size).astype(dtype)
            _, pullback = vjp(*small, B * 2.0**b)
            bars = finite_or_refused(lambda: pullback(dB * 2.0**e))  # noqa: B023
            ones = vjp(*small, B)[1](dB)
            powers = (e + b, e + b, e, e + b)
            scaled = [np.ldexp(1.0, p - 2 * half) for p in powers]
            fits = all(norm(a) * s < 1e-3 for a, s in zip(ones, scaled, strict=True))
            assert bars is not None or not fits
            if bars is None:
                continue
            for bar, one, power in zip(bars, ones, powers, strict=True):
                back = np.asarray(bar) * 2.0 ** -(power // 2) * 2.0 ** -(power - power // 2)
                assert norm(back - one) <= CONTRACT * gen.unit(dtype) * norm(*ones)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("n", [4, 12])
def test_large_directions_give_what_fits_and_no_infinity(dtype, n):
    U, V, B, dU, dV, dB = arguments(dtype, n=n)
    half = np.finfo(dtype).maxexp // 2
    expected = jvp(U, V, B, dU, dV, dB, dt=0.5)[1]
    for b, d in ((0, 0), (half, half - 16), (2 * half - 20, 4), (4, 2 * half - 20)):
        moved = (a * 2.0**d for a in (dU, dV))
        _, dY = jvp(U, V, B * 2.0**b, *moved, dB * 2.0**d * 2.0**b, dt=0.5 * 2.0**d)
        assert norm(dY * 2.0**-b * 2.0**-d - expected) <= 1e3 * gen.unit(dtype) * norm(expected)
    for dt in (1e3, 2.0**half):
        big = np.full_like(B, 0.4 * np.finfo(dtype).max / B.size)
        finite_or_refused(lambda: jvp(U, V, big, None, None, None, dt=dt))  # noqa: B023
    with pytest.raises(ValueError, match="the derivative overflows"):
        jvp(U, V, B * 2.0 ** (half + 8), dU * 2.0**half, dV, dB)


def test_the_smallest_cases_of_overflow():
    x, y = np.float32([1e-5, 0]), np.float32([0, 1e-5])
    bars = vjp(x, y, np.float32([1e20, 1e20]))[1](np.float32([1e20, 3e20]))
    assert bars[0] == pytest.approx([-2e35, 0], rel=1e-5)
    x, y = np.eye(2)
    with pytest.raises(ValueError, match="the derivative overflows"):
        vjp(x, y, np.full(2, 1e160))[1](np.array([1e160, -1e160]))
    with pytest.raises(ValueError, match="the derivative overflows"):
        jvp(x, y, np.array([1e308, 1e307]), None, None, None, dt=1e3)


def test_results_in_a_narrow_dtype_do_not_overflow_in_silence():
    x, y = np.eye(2, dtype=np.float16)
    with pytest.raises(ValueError, match="the derivative overflows"):
        vjp(x, y, np.float16([3e3, 1e3]))[1](np.float16([1e4, -6e3]))
    with pytest.raises(ValueError, match="the derivative overflows"):
        jvp(x, y, np.float16([3e3, 1e3]), np.float16([1e2, 1e2]), None, None)
    U, V, B, _, _, dB = arguments()
    with pytest.raises(ValueError, match="the derivative overflows"):
        vjp(U.astype("f"), V, 1e20 * B)[1](1e20 * dB)


@pytest.mark.parametrize("seed", range(10))
def test_the_last_pass_alone_does_not_overflow_in_silence(seed):
    rng = np.random.default_rng(seed)
    U, V = gen.normal(rng, (2, 12, 1), "float32")
    B, Ybar = 1.5e19 * gen.normal(rng, (2, 12, 1), "float32")
    finite_or_refused(lambda: vjp(U, V, B)[1](Ybar))
