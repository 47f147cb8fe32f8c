"""The front door: LowRankSkew, skew_expm_multiply, expm_multiply."""

from __future__ import annotations

import re
import threading
from concurrent.futures import ThreadPoolExecutor

import mpmath
import numpy as np
import pytest
import scipy.linalg

from lowrank_expm import (
    LowRankSkew,
    LowRankUnitary,
    _linear,
    expm_multiply,
    skew_expm_multiply,
)
from lowrank_expm.passes import watching

from . import generators as gen
from . import naive

ROUTES = ("auto", "gram", "qr", "direct")


def pair(dtype="float64", n=20, r=2, seed=0, kind="generic"):
    return gen.MAKERS[kind](np.random.default_rng(seed), n, r, dtype)


def vectors(dtype="float64", n=20, k=3, seed=1):
    return gen.normal(np.random.default_rng(seed), (n, k), dtype)


def rounding(U, V, t=1.0, factor=40):
    return factor * gen.unit(U.dtype) * max(1.0, gen.rho(U, V, t))


def reference_angles(U, V):
    """Eigenvalues of −iS, dense and in double precision, padded with zeros to 2r or cut to it."""
    values = np.linalg.eigvalsh(-1j * naive.dense_skew(U, V))
    m = 2 * U.shape[-1]
    largest = np.sort(values[np.argsort(-np.abs(values))[:m]])
    return np.sort(np.concatenate([largest, np.zeros(m - len(largest))]))


# --- the generator ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_generator_knows_its_factors(dtype):
    U, V = pair(dtype)
    S = LowRankSkew(U, V)
    assert S.U is U
    assert S.V is V
    assert S.shape == (20, 20)
    assert S.ndim == 2
    assert S.dtype == dtype
    assert repr(S) == f"LowRankSkew(shape=(20, 20), r=2, dtype={dtype})"


def test_generator_of_vectors_and_batches():
    assert LowRankSkew(np.ones(5), np.ones(5)).shape == (5, 5)
    S = LowRankSkew(np.ones((4, 1, 5, 2)), np.ones((3, 5, 2), "complex64"))
    assert S.shape == (4, 3, 5, 5)
    assert S.dtype == np.complex128
    assert S.angles().shape == (4, 3, 4)
    assert S.norm().shape == (4, 3)
    assert S.to_dense().shape == (4, 3, 5, 5)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_dense_generator_is_the_definition_and_exactly_skew(dtype):
    U, V = pair(dtype)
    D = LowRankSkew(U, V).to_dense()
    assert D.dtype == dtype
    assert np.array_equal(D, -np.conj(D.T))
    assert np.abs(D - naive.dense_skew(U, V)).max() <= rounding(U, V, factor=4)


@pytest.mark.parametrize("kind", ["int64", "bool", "uint8"])
def test_dense_generator_of_integers_does_not_wrap(kind):
    U, V = np.array([[1], [0], [1]], kind), np.array([[0], [1], [0]], kind)
    S = LowRankSkew(U, V)
    expected = naive.dense_skew(U, V)
    assert np.array_equal(S.to_dense(), expected)
    assert np.array_equal(S @ np.eye(3), expected)
    assert np.array_equal(S.H.to_dense(), expected.T)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("other", gen.DTYPES)
def test_matrix_product(dtype, other):
    U, V = pair(dtype)
    B = vectors(other)
    S = LowRankSkew(U, V)
    Y = S @ B
    assert Y.dtype == np.result_type(dtype, other)
    limit = 20 * max(gen.unit(dtype), gen.unit(other)) if dtype != other else 20 * gen.unit(dtype)
    size = np.linalg.norm(U) * np.linalg.norm(V) * np.linalg.norm(B)
    assert np.linalg.norm(Y - naive.dense_skew(U, V) @ B) <= limit * size
    assert np.array_equal(S @ B[:, :1], (S @ B[:, 0])[:, None])
    assert (S @ B[:, 0]).shape == (20,)


def test_matrix_product_broadcasts_over_the_batch():
    U, V = (np.stack([a, 2 * a]) for a in pair())
    S = LowRankSkew(U, V)
    B = vectors()
    assert (S @ B).shape == (2, 20, 3)
    assert (S @ B[:, 0]).shape == (2, 20)
    assert (S @ np.stack([B, B, B])[:, None]).shape == (3, 2, 20, 3)
    assert (S @ B[:, :0]).shape == (2, 20, 0)
    assert not (LowRankSkew(U[..., :0], V[..., :0]) @ B).any()


def test_matrix_product_refuses_what_does_not_fit_or_is_not_finite():
    S = LowRankSkew(*pair())
    with pytest.raises(ValueError, match=r"B has shape \(19,\); with n = 20"):
        S @ np.ones(19)
    with pytest.raises(ValueError, match=r"B\[3, 0\] is nan"):
        S @ np.where(np.arange(20) == 3, np.nan, 1.0)


def test_array_times_operator_multiplies_from_the_right_instead_of_making_objects():
    S = LowRankSkew(*pair())
    for operator in (S, S.expm()):
        np.testing.assert_allclose(np.eye(20) @ operator, operator.to_dense(), atol=1e-14)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_adjoint_and_transpose_of_the_generator(dtype):
    S = LowRankSkew(*pair(dtype))
    D = S.to_dense()
    # v·uᴴ is the adjoint of u·vᴴ, up to the order of a complex product's sums.
    limit = 4 * gen.unit(dtype) * np.abs(D).max()
    for dense, expected in (
        (S.H.to_dense(), np.conj(D.T)),
        (S.H.to_dense(), -D),
        (S.T.to_dense(), D.T),
        (S.T.T.to_dense(), D),
    ):
        assert np.abs(dense - expected).max() <= limit
    for twin in (S.H, S.T):
        assert isinstance(twin, LowRankSkew)
        assert twin.dtype == dtype
        assert twin.method == S.method
    E = S.expm(0.3).to_dense()
    tolerance = rounding(S.U, S.V, 0.3)
    assert np.linalg.norm(S.H.expm(0.3).to_dense() - np.conj(E.T), 2) <= tolerance
    assert np.linalg.norm(S.T.expm(0.3).to_dense() - E.T, 2) <= tolerance


# --- angles and norms ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", [k for k in sorted(gen.MAKERS) if k != "huge"])
@pytest.mark.parametrize(("n", "r"), [(20, 3), (3, 2), (4, 2), (1, 1), (2, 3)])
def test_angles_are_the_eigenvalues_on_the_range(n, r, kind, dtype):
    """m of them, ascending, zeros where the range is smaller; also where n < 2r."""
    U, V = pair(dtype, n, r, kind=kind)
    S = LowRankSkew(U, V)
    angles = S.angles()
    assert angles.shape == (2 * r,)
    assert angles.dtype == np.empty(0, dtype).real.dtype
    assert np.array_equal(angles, np.sort(angles))
    # "A few u ‖U‖ ‖V‖": of the balanced factors, which S does not distinguish.
    limit = 10 * 2 * r * gen.unit(dtype) * gen.rho(U, V)
    assert np.abs(angles - reference_angles(U, V)).max() <= limit


@pytest.mark.parametrize("method", ROUTES)
def test_angles_that_are_prescribed(method):
    U, V = gen.with_angles(np.random.default_rng(2), 20, [2.0, 0.5, 1e-6], "float64")
    angles = LowRankSkew(U, V, method=method).angles()
    assert np.abs(angles - [-2.0, -0.5, -1e-6, 1e-6, 0.5, 2.0]).max() <= 20 * 2.0**-53 * 2


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_angles_of_equal_factors_are_zero(dtype):
    for n, r in ((20, 2), (20, 1), (3, 2)):
        U, V = pair(dtype, n, r, kind="equal")
        S = LowRankSkew(U, V)
        assert np.abs(S.angles()).max() <= 40 * gen.unit(dtype) * gen.rho(U, V)
        assert S.norm() <= 40 * gen.unit(dtype) * gen.rho(U, V)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("r", [1, 2, 3])
@pytest.mark.parametrize("factor", [1, 2, -0.3])
def test_angles_where_all_columns_are_one(dtype, r, factor):
    """A frame of which all columns but one are made of rounding, or zero."""
    for seed in range(10):
        column = gen.normal(np.random.default_rng(seed), (40, 1), dtype)
        U = np.repeat(column, r, axis=1)
        V = (factor * U).astype(dtype)
        S = LowRankSkew(U, V)
        limit = 40 * gen.unit(dtype) * gen.rho(U, V)
        assert np.abs(S.angles()).max() <= limit
        assert S.expm().certificate.angle <= limit


def test_angles_of_real_factors_come_in_pairs():
    for kind in ("generic", "nearly_parallel", "rank_deficient", "scaled_columns"):
        U, V = pair(r=3, kind=kind)
        angles = LowRankSkew(U, V).angles()
        assert np.abs(angles + angles[::-1]).max() <= 60 * 2.0**-53 * gen.rho(U, V)


@pytest.mark.parametrize("exponent", [150, -150])
def test_angles_of_factors_whose_squares_leave_the_range(exponent):
    U, V = pair()
    c = 10.0**exponent
    angles = LowRankSkew(U * c, V / c).angles()
    assert np.abs(angles - LowRankSkew(U, V).angles()).max() <= rounding(U, V)


def test_angles_are_computed_once_and_handed_out_as_copies():
    S = LowRankSkew(*pair(n=5000))
    first = S.angles()
    first[:] = 7
    with watching(lambda *_: pytest.fail("a further pass")):
        assert not (S.angles() == 7).any()


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize(("n", "r"), [(20, 3), (3, 2)])
def test_norms(n, r, dtype):
    U, V = pair(dtype, n, r)
    S, D = LowRankSkew(U, V), naive.dense_skew(U, V)
    for given, ord_ in ((S.norm(), 2), (S.norm(2), 2), (S.norm("fro"), "fro")):
        assert isinstance(given, float)
        assert abs(given - np.linalg.norm(D, ord_)) <= rounding(U, V)
    with pytest.raises(ValueError, match='ord is 1; it must be 2 or "fro"'):
        S.norm(1)


def test_norms_of_a_batch_and_of_nothing():
    U, V = (np.stack([a, 2 * a]) for a in pair())
    norms = LowRankSkew(U, V).norm("fro")
    assert norms[1] == pytest.approx(4 * norms[0], rel=1e-14)
    assert LowRankSkew(np.zeros((5, 0)), np.zeros((5, 0))).norm() == 0
    assert LowRankSkew(np.zeros((0, 2)), np.zeros((0, 2))).norm("fro") == 0
    assert LowRankSkew(np.zeros((0, 5, 2)), np.zeros((5, 2))).norm().shape == (0,)


@pytest.mark.parametrize("argument", [0, 1])
@pytest.mark.parametrize("n", [3, 20])
def test_values_that_are_not_finite_are_named_by_every_method(argument, n):
    factors = list(pair(n=n))
    factors[argument][1, 0] = np.inf
    name = "UV"[argument]
    for method in ("angles", "norm", "expm"):
        with pytest.raises(ValueError, match=rf"{name}\[1, 0\] is inf"):
            getattr(LowRankSkew(*factors), method)()
    with pytest.raises(ValueError, match=rf"{name}\[1, 0\] is inf"):
        LowRankSkew(*factors) @ np.ones(n)
    with pytest.raises(ValueError, match=rf"{name}\[1, 0\] is inf"):
        LowRankSkew(*factors).expm_multiply(np.ones(n))


# --- exponentials ----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_three_ways_to_the_same_exponential(dtype, method):
    U, V = pair(dtype)
    B = vectors(dtype)
    S = LowRankSkew(U, V, method=method)
    for t in (0.7, -3, 0.0):
        Y = skew_expm_multiply(U, V, B, t, method=method)
        limit = rounding(U, V, t)
        assert naive.forward_errors(Y, U, V, B, t) <= limit
        for other in (S.expm_multiply(B, t), S.expm(t) @ B):
            assert other.dtype == dtype
            assert np.linalg.norm(other - Y) <= limit * np.linalg.norm(B)


def test_expm_multiply_of_the_generator_takes_out():
    U, V = pair()
    B = vectors()
    S = LowRankSkew(U, V)
    expected = S.expm_multiply(B, 0.3)
    out = np.empty_like(B)
    assert S.expm_multiply(B, 0.3, out=out) is out
    assert np.array_equal(out, expected)
    assert S.expm_multiply(B, 0.3, out=B) is B
    assert np.array_equal(B, expected)
    with pytest.raises(ValueError, match="out overlaps"):
        S.expm_multiply(np.ones(20), out=S.U[:, 0])


def test_generator_object_and_function_give_the_same_bits():
    """The kept Gram matrix is that which a single call accumulates."""
    U, V = pair(n=9000)
    B = vectors(n=9000)
    S = LowRankSkew(U, V)
    assert np.array_equal(S.expm_multiply(B, 0.4), skew_expm_multiply(U, V, B, 0.4))
    assert np.array_equal(S.expm(0.4) @ B, skew_expm_multiply(U, V, B, 0.4))


def test_single_and_double_precision_grams_are_kept_apart():
    U, V = pair("float32")
    S = LowRankSkew(U, V)
    S.expm_multiply(vectors("float32"))
    B = vectors("float64")
    Y = S.expm_multiply(B)
    assert Y.dtype == np.float64
    assert naive.forward_errors(Y, U, V, B) <= rounding(U.astype(float), V.astype(float))


@pytest.mark.parametrize("n", [20, 5000])
def test_lazily_kept_gram_matrix_is_thread_safe(n):
    """Eight threads meet a fresh generator at once; all get the bits of a single one."""
    U, V = pair(n=n)
    B = vectors(n=n)
    expected = skew_expm_multiply(U, V, B, 0.4)
    expected_angles = LowRankSkew(U, V).angles()
    for _ in range(5):
        S = LowRankSkew(U, V)
        gate = threading.Barrier(8)

        def work(i, S=S, gate=gate):
            gate.wait()
            return S.expm_multiply(B, 0.4) if i % 2 else S.angles()

        with ThreadPoolExecutor(8) as pool:
            results = list(pool.map(work, range(8)))
        for i, result in enumerate(results):
            assert np.array_equal(result, expected if i % 2 else expected_angles)


def test_expm_gives_a_unitary_and_broadcasts_a_grid():
    S = LowRankSkew(*(np.stack([a, a, a]) for a in pair()))
    assert isinstance(S.expm(), LowRankUnitary)
    assert S.expm().shape == (3, 20, 20)
    assert S.expm([0.1, 0.2]).shape == (2, 3, 20, 20)
    assert S.expm([]).shape == (0, 3, 20, 20)


# --- routes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(("n", "route"), [(1, "direct"), (4, "direct"), (5, "gram"), (50, "gram")])
def test_auto_is_direct_while_low_rank_saves_nothing(n, route):
    assert LowRankSkew(*pair(n=n, r=2)).expm().certificate.route == route


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_auto_falls_back_where_the_certificate_asks_for_it(dtype):
    """And only there: route by route, in a batch of unlike elements."""
    rng = np.random.default_rng(5)
    eps, size = 100 * gen.unit(dtype), 30.0 if gen.unit(dtype) < 1e-10 else 3.0
    pairs = [
        gen.generic(rng, 30, 2, dtype),
        gen.nearly_parallel(rng, 30, 2, dtype, eps, size),
        gen.generic(rng, 30, 2, dtype),
        gen.nearly_parallel(rng, 30, 2, dtype, eps, size),
    ]
    U, V = (np.stack(side) for side in zip(*pairs, strict=True))
    Q = LowRankSkew(U, V).expm()
    assert Q.certificate.route.tolist() == ["gram", "qr", "gram", "qr"]
    gram = LowRankSkew(U, V, method="gram").expm().certificate
    limit = 64 * 2 * gen.unit(dtype)
    trusted = gram.defect_bound <= limit
    assert trusted.tolist() == [True, False, True, False]
    assert (Q.certificate.defect_bound <= limit).all()
    assert (naive.defects(Q) <= 80 * 2 * gen.unit(dtype)).all()
    B = gen.normal(rng, (30, 2), dtype)
    Y = Q @ B
    for e in range(4):
        assert naive.forward_errors(Y[e], U[e], V[e], B) <= rounding(U[e], V[e])


def test_auto_leaves_trusted_elements_untouched():
    """Their frame stays [U V] itself."""
    rng = np.random.default_rng(6)
    pairs = [gen.generic(rng, 30, 2, "float64"), gen.nearly_parallel(rng, 30, 2, "float64", 1e-14)]
    U, V = (np.stack(side) for side in zip(*pairs, strict=True))
    Q = LowRankSkew(U, V).expm()
    assert Q.certificate.route.tolist() == ["gram", "qr"]
    F = Q.frame()
    assert np.array_equal(F[0], np.concatenate([U[0], V[0]], axis=-1))
    assert not np.array_equal(F[1], np.concatenate([U[1], V[1]], axis=-1))


def test_auto_falls_back_for_a_whole_grid_at_once():
    rng = np.random.default_rng(7)
    U, V = gen.nearly_parallel(rng, 30, 2, "float64", 1e-13, 30.0)
    Q = LowRankSkew(U, V).expm([0.0, 1.0])
    assert Q.certificate.route.tolist() == ["qr", "qr"]
    assert np.array_equal(Q.to_dense()[0], np.eye(30))


@pytest.mark.parametrize("dtype", ["float32", "complex64", "float64"])
def test_a_gram_core_that_runs_away_is_caught_without_a_warning(dtype):
    """m = 66 is beyond the compiled core; warnings are errors here."""
    rng = np.random.default_rng(8)
    U, V = gen.nearly_parallel(rng, 200, 33, dtype, gen.unit(dtype), 100.0)
    B = gen.normal(rng, (200, 1), dtype)
    S = LowRankSkew(U, V)
    Q = S.expm()
    assert Q.certificate.route == "qr"
    assert Q.orthogonality_defect() <= 80 * np.sqrt(66) * gen.unit(dtype)
    assert naive.norm_drifts(Q @ B, B).max() <= 80 * np.sqrt(66) * gen.unit(dtype)


# --- general low rank ------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_general_low_rank_matches_the_oracle(dtype):
    rng = np.random.default_rng(9)
    L, R = gen.generic(rng, 15, 3, dtype)
    B = gen.normal(rng, (15, 2), dtype)
    times = [0.7, -1.0] + ([0.3 + 0.4j] if dtype == "complex128" else [])
    for t in times:
        Y = expm_multiply(L, R, B, t)
        assert Y.dtype == dtype
        size = np.linalg.norm(naive.general_multiply_mp(L, R, np.eye(15), t), 2)
        assert naive.general_errors(Y, L, R, B, t) <= rounding(L, R, abs(t)) * size


def test_general_low_rank_with_complex_t_and_real_factors():
    rng = np.random.default_rng(10)
    L, R = gen.generic(rng, 15, 2, "float64")
    B = gen.normal(rng, (15, 2), "float64")
    Y = expm_multiply(L, R, B, 0.5j)
    assert Y.dtype == np.complex128
    assert naive.general_errors(Y, L, R, B, 0.5j) <= 4 * rounding(L, R)


def test_general_low_rank_contains_the_skew_case():
    U, V = pair()
    B = vectors()
    L, R = np.concatenate([U, V], -1), np.concatenate([V, -U], -1)
    Y, Z = expm_multiply(L, R, B, 0.5), skew_expm_multiply(U, V, B, 0.5)
    assert np.linalg.norm(Y - Z) <= 4 * rounding(U, V) * np.linalg.norm(B)


def test_general_low_rank_is_the_dense_exponential():
    L, R = pair(n=8)
    dense = scipy.linalg.expm(0.4 * L @ R.T)
    size = np.linalg.norm(dense, 2)
    assert np.linalg.norm(expm_multiply(L, R, np.eye(8), 0.4) - dense, 2) <= rounding(L, R) * size


def test_a_large_decay_is_computed_and_a_large_growth_refused():
    one = np.array([1.0, 0.0])
    Y = expm_multiply(one, one, np.array([2.0, 3.0]), -700.0)
    with mpmath.workdps(30):
        assert abs(Y[0] - float(2 * mpmath.exp(-700))) <= 2.0**-53 * 1e3
    with pytest.raises(ValueError, match="overflows; scale t, L or R down"):
        expm_multiply(one, one, one, 1000.0)


# --- batches that go from the first pass to the last on each thread -------------------------------


def batch_of(rng, dtype, batch=(7,), n=40, r=3, k=2):
    return tuple(gen.normal(rng, (*batch, n, width), dtype) / n**0.5 for width in (r, r, k))


@pytest.fixture
def the_long_way(monkeypatch):
    """`skew_expm_multiply` without its short ways."""

    def run(*args, **kwargs):
        with monkeypatch.context() as patch:
            for name in "solve_plain", "solve_batch":
                patch.setattr(_linear, name, lambda *_: None)
            return skew_expm_multiply(*args, **kwargs)

    return run


@pytest.mark.parametrize("batch", [(1,), (2, 3), (40,)])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_a_batch_has_the_same_bits_by_the_short_way(the_long_way, dtype, batch):
    U, V, B = batch_of(np.random.default_rng(31), dtype, batch)
    short = _linear.solve_batch(U, V, B, 0.7, None)
    assert np.array_equal(short, the_long_way(U, V, B, 0.7))
    out = np.full_like(B, np.nan)
    assert skew_expm_multiply(U, V, B, 0.7, out=out) is out
    assert np.array_equal(out, short)
    assert skew_expm_multiply(U, V, B, 0.7, out=B) is B
    assert np.array_equal(B, short)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_one_doubtful_element_sends_the_batch_the_long_way(the_long_way, dtype):
    rng = np.random.default_rng(32)
    U, V, B = batch_of(rng, dtype)
    V[3] = U[3] + 1e-5 * V[3]
    U[3], V[3] = 1e3 * U[3], 1e3 * V[3]
    assert _linear.solve_batch(U, V, B, 1.0, None) is None
    out = np.empty_like(B)
    skew_expm_multiply(U, V, B, 1.0, out=out)
    assert np.array_equal(out, the_long_way(U, V, B, 1.0))


@pytest.mark.parametrize("value", [np.nan, np.inf, 1e30, 1e-30])
@pytest.mark.parametrize("which", range(3))
def test_extreme_elements_of_a_batch(the_long_way, which, value):
    arrays = batch_of(np.random.default_rng(33), "float32")
    arrays[which][4] *= value
    try:
        expected = the_long_way(*arrays)
    except ValueError as error:
        with pytest.raises(ValueError, match=re.escape(str(error))):
            skew_expm_multiply(*arrays)
    else:
        assert np.array_equal(skew_expm_multiply(*arrays), expected)


@pytest.mark.parametrize("t", [np.float64(0.5), np.array(0.5), [0.5, 1.0], np.nan])
def test_only_a_plain_number_goes_the_short_way(t):
    assert _linear.solve_batch(*batch_of(np.random.default_rng(34), "float64"), t, None) is None
