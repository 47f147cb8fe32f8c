"""The measures: what they measure, how well, and that they fail when they should."""

from __future__ import annotations

import dataclasses
import json
from importlib import import_module
from importlib.util import find_spec

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.linalg as sparse

from lowrank_expm import LowRankSkew, _exact, derivatives, verify

from . import generators as gen
from . import naive

FIELDS = {
    "passed": bool,
    "defect": float,
    "defect_bound": float,
    "norm_drift": float,
    "inverse_error": float,
    "angle": float,
    "basis_condition": float,
    "expm_condition": float,
    "route": str,
    "limit": float,
    "n": int,
    "r": int,
    "dtype": str,
    "adjoint_error": type(None),
    "difference_error": type(None),
    "adjoint_limit": type(None),
    "difference_limit": type(None),
}


def pair(dtype="float64", n=20, r=2, seed=0, kind="generic"):
    return gen.MAKERS[kind](np.random.default_rng(seed), n, r, dtype)


def untrusted(n=30, r=2, dtype="float64"):
    """Nearly parallel and long: the case in which the Gram route loses orthogonality.

    Shorter in single precision, where the Gram route would refuse this length altogether.
    """
    rng = np.random.default_rng(7)
    size = 30.0 if gen.unit(dtype) < 1e-10 else 10.0
    return gen.nearly_parallel(rng, n, r, dtype, 1e3 * gen.unit(dtype), size)


# --- exact products --------------------------------------------------------------------------


def exact_distance(pair, a, b):
    """|high + low − a b|, elementwise, the difference taken exactly."""
    found = naive.Fixed.exact(pair[0]) + naive.Fixed.exact(pair[1])
    return np.abs((found - naive.Fixed.exact(a) @ naive.Fixed.exact(b)).round())


@pytest.mark.parametrize("inner", [1, 2, 31, 1000, 4096, 4097, 9000])
def test_exact_product_has_twice_the_precision(inner):
    rng = np.random.default_rng(inner)
    a, b = rng.standard_normal((3, inner)), rng.standard_normal((inner, 2))
    error = exact_distance(_exact.product(a, b), a, b)
    assert (error <= 2.0**-58 * (np.abs(a) @ np.abs(b))).all()


@pytest.mark.parametrize("exponent", [-100, 100])
def test_exact_product_of_rows_and_columns_of_unlike_sizes(exponent):
    rng = np.random.default_rng(1)
    scale = 10.0 ** np.array([[0.0], [exponent], [exponent / 2]])
    a, b = rng.standard_normal((3, 500)) * scale, rng.standard_normal((500, 3)) / scale.T
    error = exact_distance(_exact.product(a, b), a, b)
    assert (error <= 2.0**-58 * (np.abs(a) @ np.abs(b))).all()


def test_exact_product_sees_through_cancellation():
    """The scalar product of x and a vector made orthogonal to it: rounding is all there is."""
    rng = np.random.default_rng(2)
    x = rng.standard_normal((1, 300))
    y = rng.standard_normal((300, 1))
    y -= x.T * (x @ y) / (x @ x.T)
    error = exact_distance(_exact.product(x, y), x, y)
    assert error <= 2.0**-58 * (np.abs(x) @ np.abs(y))


def test_exact_product_of_zeros_and_of_nothing():
    for shape in ((2, 3), (0, 3), (2, 0)):
        high, low = _exact.product(np.zeros(shape), np.zeros((shape[1], 4)))
        assert high.shape == low.shape == (shape[0], 4)
        assert not high.any()


def test_sum_of_pairs_keeps_what_rounding_drops():
    one, tiny = (_exact.pair(np.array([v])) for v in (1.0, 2.0**-80))
    total = _exact.add(_exact.add(one, tiny), _exact.pair(np.array([-1.0])))
    assert total[0] + total[1] == 2.0**-80


# --- the defect ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("n", [1, 7, 60])
def test_defect_of_a_dense_array(n, dtype):
    Q = gen.frame(np.random.default_rng(3), n, n, dtype)
    exact = naive.dense_defect_mp(Q)
    assert verify.orthogonality_defect(Q) == pytest.approx(exact, rel=1e-3, abs=1e-25)


def test_defect_of_dense_arrays_that_are_known():
    assert verify.orthogonality_defect(np.eye(3)) == 0
    assert verify.orthogonality_defect(np.diag([1.0, 3.0])) == 8
    assert verify.orthogonality_defect(np.array([[0, 1j], [1, 0]])) == 0
    assert verify.orthogonality_defect([[0, 1], [-1, 0]]) == 0
    assert verify.orthogonality_defect(np.zeros((0, 0))) == 0
    assert isinstance(verify.orthogonality_defect(np.eye(3)), float)


def test_defect_of_a_batch_of_dense_arrays():
    found = verify.orthogonality_defect(np.stack([np.eye(2), 2 * np.eye(2)])[:, None])
    assert found.tolist() == [[0.0], [3.0]]


def test_defect_of_a_tall_array_is_that_of_its_columns():
    """‖QᴴQ − I‖ is defined for orthonormal columns too."""
    assert verify.orthogonality_defect(np.eye(4)[:, :2]) == 0


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("method", ["auto", "gram", "qr", "direct"])
@pytest.mark.parametrize("kind", ["generic", "nearly_parallel", "scaled_columns", "equal", "huge"])
def test_defect_of_an_operator_is_the_exact_one(kind, method, dtype):
    Q = LowRankSkew(*pair(dtype, 14, kind=kind), method=method).expm(0.9)
    found, exact = Q.orthogonality_defect(), float(naive.defects(Q))
    assert isinstance(found, float)
    # Measured with about twice the working precision: far below u.
    assert abs(found - exact) <= 1e-2 * exact + 1e-4 * gen.unit(dtype)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_defect_of_an_untrusted_gram_operator_is_the_exact_one(dtype):
    """A frame of condition 1/(1e3 u) neither hides the defect nor invents one."""
    Q = LowRankSkew(*untrusted(dtype=dtype), method="gram").expm()
    exact = float(naive.defects(Q))
    assert exact > 1e3 * gen.unit(dtype)
    assert Q.orthogonality_defect() == pytest.approx(exact, rel=1e-2)


def test_defect_of_a_batch_and_a_grid():
    U, V = (np.stack([a, 2 * a, 3 * a]) for a in pair(n=12))
    Q = LowRankSkew(U, V).expm([0.5, 1.0])
    found = verify.orthogonality_defect(Q)
    assert found.shape == (2, 3)
    assert np.abs(found - naive.defects(Q)).max() <= 1e-4 * 2.0**-53


def test_defect_of_broadcast_frames():
    """One U for all V."""
    rng = np.random.default_rng(4)
    Q = LowRankSkew(rng.standard_normal((12, 1)), rng.standard_normal((3, 1, 12, 1))).expm()
    found = verify.orthogonality_defect(Q)
    assert found.shape == (3, 1)
    assert np.abs(found - naive.defects(Q)).max() <= 1e-4 * 2.0**-53


def test_defect_over_many_row_blocks():
    Q = LowRankSkew(*pair(n=9000)).expm()
    E = Q.frame() @ Q.core
    # QᴴQ − I = F D Fᴴ in long double, for want of an oracle at this length.
    F, C = Q.frame().astype("g"), Q.core.astype("g")
    D = C + C.T + C.T @ (F.T @ F) @ C
    R = np.linalg.qr(Q.frame(), mode="r")
    exact = np.linalg.norm(R @ D.astype(float) @ R.T, 2)
    assert Q.orthogonality_defect() == pytest.approx(exact, rel=0.2, abs=0.05 * 2.0**-53)
    assert E.shape == (9000, 4)


def test_defect_of_a_linear_operator_is_an_estimate_that_says_so():
    A = sparse.aslinearoperator(np.diag([1.0, 1.0, 2.0]))
    found = verify.orthogonality_defect(A)
    assert isinstance(found, float)
    assert isinstance(found, verify.Estimate)
    assert "estimate" in repr(found)
    # From below, by a power iteration.
    assert 2.9 <= found <= 3 * (1 + 1e-14)


def test_estimate_finds_a_complex_defect_and_none_in_a_good_operator():
    A = sparse.aslinearoperator(np.diag([1j, 1.5, 1.0]))
    assert verify.orthogonality_defect(A) == pytest.approx(1.25, rel=0.1)
    Q = LowRankSkew(*pair("complex128")).expm()
    found = verify.orthogonality_defect(Q.aslinearoperator())
    assert found <= 80 * 2 * 2.0**-53


@pytest.mark.parametrize("Q", [3.0, np.ones(3), "Q", None, np.array([["a"]]), object()])
def test_defect_of_anything_else_is_refused(Q):
    with pytest.raises(TypeError, match="pass a LowRankUnitary"):
        verify.orthogonality_defect(Q)


# --- conditions ------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", ["generic", "scaled_columns", "nearly_parallel"])
@pytest.mark.parametrize("n", [3, 4, 20, 5000])
def test_basis_condition_is_that_of_numpy(n, kind, dtype):
    U, V = pair(dtype, n, kind=kind)
    if kind == "scaled_columns":
        U, V = pair(dtype, n)
        U = U * np.array([1, 1e3], U.real.dtype)
    X = np.concatenate([U, V], axis=-1).astype(np.result_type(dtype, float))
    s = np.linalg.svd(X, compute_uv=False)
    condition = s[0] / s[-1]
    found = verify.basis_condition(U, V)
    assert isinstance(found, float)
    # The smallest singular value is known to a few u·‖X‖.
    assert found == pytest.approx(condition, rel=40 * gen.unit(dtype) * condition)


def test_basis_condition_does_not_square_the_condition():
    U, V = untrusted()
    found = verify.basis_condition(U, V)
    assert found == pytest.approx(np.linalg.cond(np.concatenate([U, V], -1)), rel=1e-2)
    assert found > 1e10


def test_basis_condition_of_singular_and_empty_bases():
    one = np.array([[1.0], [0.0], [0.0]])
    assert verify.basis_condition(one, 0 * one) == np.inf
    assert verify.basis_condition(one, one) > 1e15
    assert verify.basis_condition(np.zeros((5, 0)), np.zeros((5, 0))) == 1
    U, V = pair()
    found = verify.basis_condition(np.stack([U, U]), np.stack([V, U]))
    assert found.shape == (2,)
    assert found[0] == pytest.approx(np.linalg.cond(np.concatenate([U, V], -1)))
    with pytest.raises(ValueError, match=r"U\[0, 0\] is nan"):
        verify.basis_condition(U * np.nan, V)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize(("n", "r", "t"), [(2, 1, 1.0), (6, 1, 0.3), (6, 2, -1.5), (3, 2, 20.0)])
def test_expm_condition_is_that_of_the_dense_matrix(n, r, t, dtype):
    """scipy.linalg.expm_cond forms the n² × n² Fréchet derivative; ours is a closed form."""
    S = LowRankSkew(*pair(dtype, n, r))
    found = verify.expm_condition(S, t)
    assert isinstance(found, float)
    assert found == pytest.approx(scipy.linalg.expm_cond(t * S.to_dense()), rel=1e-8)


def test_expm_condition_of_a_batch_and_a_grid():
    U, V = (np.stack([a, 2 * a, 3 * a]) for a in pair())
    S = LowRankSkew(U, V)
    found = verify.expm_condition(S, [1.0, -2.0])
    assert found.shape == (2, 3)
    assert found[1] == pytest.approx(2 * found[0])
    assert found[0] == pytest.approx(found[0, 0] * np.array([1.0, 4.0, 9.0]))
    assert verify.expm_condition(LowRankSkew(np.zeros((0, 2)), np.zeros((0, 2)))) == 0
    with pytest.raises(TypeError, match="pass a LowRankSkew"):
        verify.expm_condition(S.to_dense())


# --- check -----------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", [k for k in sorted(gen.MAKERS) if k != "parallel_at_random"])
def test_check_passes_on_every_kind_of_input(kind, dtype):
    """Also where the basis is singular and the angle at the contract's end."""
    U, V = pair(dtype, kind=kind)
    report = verify.check(U, V)
    assert report.passed, str(report)
    assert report.defect <= report.defect_bound
    assert report.dtype == dtype


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_check_fails_where_the_gram_route_is_forced_on_parallel_columns(dtype):
    U, V = untrusted(dtype=dtype)
    forced = verify.check(U, V, method="gram")
    assert not forced.passed
    assert forced.route == "gram"
    assert forced.defect > forced.limit
    assert forced.defect_bound >= forced.defect
    assert "FAILED" in str(forced)
    assert "TOO LARGE" in str(forced)
    assert verify.check(U, V).passed


def test_gram_by_name_refuses_what_is_nowhere_near_unitary():
    rng = np.random.default_rng(190)
    U, A = rng.standard_normal((9, 3)), rng.standard_normal((3, 3))
    V = U @ (A + A.T)
    with pytest.raises(ValueError, match=r"'gram' breaks down.*use method 'auto' or 'qr'"):
        LowRankSkew(U, V, method="gram").expm(1e7)
    assert verify.check(U, V, t=1e7).passed


@pytest.mark.parametrize("size", [1e200, 1e-200])
def test_check_measures_vectors_whose_squares_leave_the_range(size):
    U, V = pair()
    b = size * np.random.default_rng(3).standard_normal(20)
    report = verify.check(U, V, b)
    assert report.passed
    assert 0 < report.inverse_error < 1e-15


def test_check_reports_what_the_measures_say():
    U, V = pair()
    report = verify.check(U, V, t=0.7)
    S = LowRankSkew(U, V)
    Q = S.expm(0.7)
    assert report.route == "gram"
    assert report.defect == verify.orthogonality_defect(Q)
    assert report.defect_bound == Q.certificate.defect_bound
    assert report.angle == Q.certificate.angle
    assert report.basis_condition == verify.basis_condition(U, V)
    assert report.expm_condition == verify.expm_condition(S, 0.7)
    assert (report.n, report.r, report.dtype) == (20, 2, "float64")
    # What "auto" promises: 80 √m u.
    assert report.limit == 80 * 2 * 2.0**-53


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_norm_drift_and_inverse_error_are_those_of_the_columns(dtype):
    U, V = pair(dtype)
    B = gen.normal(np.random.default_rng(5), (20, 3), dtype)
    report = verify.check(U, V, B)
    Q = LowRankSkew(U, V).expm()
    Y = Q @ B
    u = gen.unit(dtype)
    assert report.norm_drift == pytest.approx(naive.norm_drifts(Y, B).max(), abs=4 * 2.0**-53)
    inverse = np.linalg.norm((Q.H @ Y - B).astype(complex), axis=0) / np.linalg.norm(B, axis=0)
    assert report.inverse_error == pytest.approx(inverse.max(), rel=1e-3, abs=u / 100)


def test_check_of_zero_vectors_and_of_one_vector():
    U, V = pair()
    assert verify.check(U, V, np.zeros(20)).norm_drift == 0
    assert verify.check(U, V, np.ones(20)).passed
    assert verify.check(U, V, np.ones((20, 0))).passed
    assert verify.check(U, V, np.ones(20).tolist()).passed


def test_check_reports_the_worst_of_a_batch_and_a_grid():
    good, bad = pair(n=30), untrusted()
    U, V = (np.stack(side) for side in zip(good, bad, strict=True))
    report = verify.check(U, V, t=[0.5, 1.0])
    assert report.passed
    assert report.route == "gram, qr"
    assert report.basis_condition == verify.basis_condition(*bad)
    assert not verify.check(U, V, method="gram").passed


@pytest.mark.parametrize(("n", "r"), [(0, 2), (5, 0), (0, 0), (1, 1), (3, 2)])
def test_check_of_small_and_empty_problems(n, r):
    U, V = gen.generic(np.random.default_rng(6), n, r, "float64")
    report = verify.check(U, V)
    assert report.passed
    assert json.dumps(report.to_dict(), allow_nan=True)


def test_check_refuses_what_the_operators_refuse():
    U, V = pair()
    with pytest.raises(ValueError, match="B has shape"):
        verify.check(U, V, np.ones(19))
    with pytest.raises(ValueError, match=r"V\[2, 1\] is inf"):
        verify.check(U, np.where(np.arange(40).reshape(20, 2) == 5, np.inf, V))
    with pytest.raises(ValueError, match="method is 'fast'"):
        verify.check(U, V, method="fast")
    with pytest.raises(TypeError, match="t is complex"):
        verify.check(U, V, t=1j)


def test_report_is_frozen_and_has_its_fields():
    report = verify.check(*pair())
    assert {f.name: type(getattr(report, f.name)) for f in dataclasses.fields(report)} == FIELDS
    with pytest.raises(dataclasses.FrozenInstanceError):
        report.passed = False


@pytest.mark.parametrize("t", [1.0, np.float64(1.0), [0.5, 1.0]])
def test_report_is_json(t):
    report = verify.check(*pair(), t=t)
    assert json.loads(json.dumps(report.to_dict())) == report.to_dict()
    assert set(report.to_dict()) == set(FIELDS)


def test_report_is_a_table():
    lines = str(verify.check(*pair())).splitlines()
    assert lines[0] == "exp(tS) with n = 20, r = 2, float64, route gram: passed"
    names = [line.strip() for line in lines[1:]]
    for name in ("measured", "orthogonality defect", "norm drift", "inverse error"):
        assert any(line.startswith(name) for line in names)
    for name in ("defect bound", "largest angle", "condition of the basis", "condition of exp"):
        assert any(line.startswith(name) for line in names)
    # The numbers of a column end in the same place.
    rows = [line for line in lines[2:] if line.endswith("ok")]
    assert len(rows) == 3
    assert len({len(line) for line in rows}) == 1
    assert all("TOO LARGE" not in line for line in lines)


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_a_report_calls_a_basis_singular_where_its_condition_says_no_more(dtype):
    report = verify.check(*pair(dtype, kind="repeated_pairs"))
    assert report.passed
    assert report.basis_condition > 2 / np.finfo(dtype).eps
    assert any(
        line.split() == [*["condition", "of", "the", "basis", "[U", "V]", "singular"]]
        for line in str(report).splitlines()
    )


def test_measures_print_nothing(capsys):
    verify.check(*pair())
    verify.orthogonality_defect(np.eye(2))
    captured = capsys.readouterr()
    assert captured.out == captured.err == ""


@pytest.mark.parametrize("name", [n for n in ("array_api_strict", "torch") if find_spec(n)])
def test_arrays_of_other_libraries_are_refused(name):
    library = import_module(name)
    U, V = (library.asarray(a) for a in pair())
    for call in (
        lambda: verify.check(U, V, derivatives=True),
        lambda: verify.check(*pair(), U),
        lambda: verify.basis_condition(U, V),
        lambda: verify.exponential_jacobian(U, V, U),
        lambda: verify.orthogonality_defect(LowRankSkew(U, V).expm()),
    ):
        with pytest.raises(TypeError, match=r"convert it first"):
            call()
    with pytest.raises(TypeError, match="out is for NumPy arrays"):
        derivatives.vjp(U, V, U)[1](U, out=(U, V, U))
