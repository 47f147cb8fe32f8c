"""The principal logarithm of a unitary, and back."""

import numpy as np
import pytest
import scipy.linalg

from lowrank_expm import LowRankSkew
from lowrank_expm.passes import watching

from . import derivative_accuracy as accuracy
from . import generators as gen

norm = np.linalg.norm
MAKERS = accuracy.MAKERS
ROUTES = ("auto", "gram", "qr", "direct")


def pair(kind, n, dtype, r=2, seed=0):
    return MAKERS[kind](np.random.default_rng(seed), n, r, dtype)


def gap(P, Q):
    """‖P − Q‖₂ in units of u."""
    return norm(P.to_dense() - Q.to_dense(), 2) / gen.unit(P.dtype)


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("angle", [1e-9, 0.1, 1.0, 3.0])
def test_logm_undoes_expm_below_pi(angle, dtype, method):
    U, V = gen.with_norm(np.random.default_rng(1), 12, 2, dtype, angle)
    S = LowRankSkew(U, V, method=method)
    L = S.expm().logm()
    assert isinstance(L, LowRankSkew)
    assert L.dtype == dtype
    assert L.shape == S.shape
    assert L.method == method
    B = gen.normal(np.random.default_rng(2), (12, 3), dtype)
    limit = 200 * gen.unit(dtype) * max(angle, gen.rho(U, V))
    assert norm(L @ B - S @ B) <= limit * norm(B)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", sorted(MAKERS))
def test_expm_undoes_logm(kind, dtype):
    """For any angles: those of the logarithm lie in [−π, π]."""
    for n in (4, 11):
        Q = LowRankSkew(*pair(kind, n, dtype)).expm()
        S = Q.logm()
        assert gap(S.expm(), Q) <= 200
        assert S.norm() <= np.pi * (1 + 100 * gen.unit(dtype))
        for twin in (Q.H, Q.T, Q.T.H):
            assert gap(twin.logm().expm(), twin) <= 200


@pytest.mark.parametrize("dtype", gen.DOUBLES)
def test_it_is_the_logarithm_of_scipy(dtype):
    for angles in ([0.3, 2.0], [2.5, 4.0], [7.0, 0.0]):
        Q = LowRankSkew(*gen.with_angles(np.random.default_rng(3), 9, angles, dtype)).expm()
        expected = scipy.linalg.logm(Q.to_dense())
        assert norm(Q.logm().to_dense() - expected) <= 1e-12


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_small_angles_keep_their_digits(dtype):
    """An error relative to S, which a logarithm of Q itself could not have."""
    S = LowRankSkew(*gen.with_norm(np.random.default_rng(1), 12, 2, dtype, 1e-12))
    error = norm(S.expm().logm().to_dense() - S.to_dense())
    assert error <= 1e3 * gen.unit(dtype) * norm(S.to_dense())


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("r", [1, 2])
def test_tiny_operators_are_not_the_identity(r, dtype, method):
    """Far below where LAPACK takes a matrix for zero."""
    U, V = gen.with_norm(np.random.default_rng(1), 12, r, dtype, 1.0)
    for power in (0.3, 0.5, 0.6):
        t = 2.0 ** -int(power * np.finfo(dtype).maxexp)
        S = LowRankSkew(U, V, method=method)
        back = S.expm(t).logm().to_dense() / t
        assert norm(back - S.to_dense()) <= 1e3 * gen.unit(dtype) * norm(S.to_dense())


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("distance", [1e-3, 1e-6, 1e-12, 0.0, -1e-12, -1e-6])
def test_near_pi_the_result_is_real_where_the_operator_is(distance, dtype):
    """And its exponential is the operator, although the logarithm is ill-conditioned there."""
    angles = [np.pi - distance, np.pi - 2 * distance]
    Q = LowRankSkew(*gen.with_angles(np.random.default_rng(4), 9, angles, dtype)).expm()
    S = Q.logm()
    assert S.U.dtype == S.V.dtype == dtype
    assert gap(S.expm(), Q) <= 100
    expected = np.pi - abs(distance)
    assert abs(S.norm() - expected) <= abs(distance) + 100 * gen.unit(dtype)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_an_angle_of_exactly_pi_gives_one_of_the_logarithms(dtype):
    """diag(−1, −1, 1) is a half turn; either sense will do."""
    e = np.eye(3, dtype=dtype)
    Q = LowRankSkew(e[:, :1], e[:, 1:2]).expm(np.pi)
    S = Q.logm()
    assert np.allclose(Q.to_dense(), np.diag([-1, -1, 1]), atol=1e-6)
    assert S.norm() == pytest.approx(np.pi)
    assert gap(S.expm(), Q) <= 20
    if dtype in ("float32", "float64"):
        plane = np.array([[0, 1, 0], [1, 0, 0], [0, 0, 0]])
        assert np.allclose(abs(S.to_dense()), np.pi * plane)


def test_the_identity_has_the_logarithm_zero():
    for n, r in ((5, 2), (2, 2), (5, 0), (0, 0), (0, 2)):
        a = np.zeros((n, r))
        S = LowRankSkew(a, a).expm().logm()
        assert S.shape == (n, n)
        assert not S.to_dense().any()


@pytest.mark.parametrize("dtype", gen.DOUBLES)
@pytest.mark.parametrize("n", [3, 10])
def test_batches_and_grids(n, dtype):
    rng = np.random.default_rng(5)
    U, V = gen.normal(rng, (2, n, 2), dtype) / 2, gen.normal(rng, (n, 2), dtype) / 2
    times = [0.2, -0.1, 9.0]
    Q = LowRankSkew(U, V).expm(times)
    S = Q.logm()
    assert S.shape == Q.shape == (3, 2, n, n)
    assert gap_of_all(S.expm(), Q) <= 200
    for i, t in enumerate(times):
        for j in range(2):
            single = LowRankSkew(U[j], V).expm(t).logm().to_dense()
            assert norm(S.to_dense()[i, j] - single) <= 1e-12


def gap_of_all(P, Q):
    return norm(P.to_dense() - Q.to_dense(), axis=(-2, -1)).max() / gen.unit(P.dtype)


def test_a_batch_that_takes_two_routes():
    parallel = gen.nearly_parallel(np.random.default_rng(0), 12, 2, "float64", 1e-8, 30.0)
    generic = gen.generic(np.random.default_rng(1), 12, 2, "float64")
    U, V = (np.stack(side) for side in zip(parallel, generic, strict=True))
    Q = LowRankSkew(U, V).expm()
    assert sorted(Q.certificate.route) == ["gram", "qr"]
    assert gap_of_all(Q.logm().expm(), Q) <= 200


def test_a_reflection_has_no_real_logarithm():
    Q = LowRankSkew([1.0, 0.0], [0.0, 1.0]).expm()
    Q._solution.C[...] = np.diag([-2.0, 0.0])
    with pytest.raises(ValueError, match="determinant −1"):
        Q.logm()


def test_it_costs_a_few_passes_and_linear_memory():
    n = 30_000
    U, V = np.random.default_rng(0).standard_normal((2, n, 2)) / np.sqrt(n)
    Q = LowRankSkew(U, V).expm()
    rows = []
    with watching(lambda _, count: rows.append(count)):
        S = Q.logm()
    assert S.U.shape == (n, 2)
    assert sum(rows) <= 3 * n
