"""The directional derivative of the operator, as an operator."""

import numpy as np
import pytest
import scipy.linalg
import scipy.sparse.linalg as sparse

import lowrank_expm
from lowrank_expm import LowRankSkew
from lowrank_expm.passes import watching

from . import derivative_accuracy as accuracy
from . import generators as gen
from . import naive

norm = np.linalg.norm


def problem(dtype="float64", n=12, r=2, kind="generic", seed=0):
    return accuracy.Problem(np.random.default_rng(seed), kind, dtype, n, r)


def operator(p):
    return LowRankSkew(p.U, p.V).expm_frechet(p.dU, p.dV, p.t)


def scipys(p):
    """The same from the dense matrices."""
    wide = np.result_type(p.dtype, np.float64)
    U, V, dU, dV = (a.astype(wide) for a in (p.U, p.V, p.dU, p.dV))
    M = dU @ V.conj().T + U @ dV.conj().T
    S, dS = naive.dense_skew(U, V), M - M.conj().T
    return scipy.linalg.expm_frechet(p.t * S, p.t * dS, compute_expm=False)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize(("n", "r"), [(12, 2), (3, 2), (1, 1), (7, 3)])
@pytest.mark.parametrize("kind", ["generic", "rank_deficient", "zero_columns", "one_zero", "equal"])
def test_it_is_the_derivative_that_scipy_finds(kind, n, r, dtype):
    p = problem(dtype, n, r, kind)
    L, expected = operator(p), scipys(p)
    assert L.shape == (n, n)
    assert L.dtype == dtype
    assert L.ndim == 2
    assert repr(L) == f"LowRankFrechet(shape=({n}, {n}), dtype={dtype})"
    assert norm(L.to_dense() - expected) <= 1e3 * p.unit * norm(expected)


@pytest.mark.parametrize("dtype", gen.DOUBLES)
@pytest.mark.parametrize("kind", sorted(accuracy.MAKERS))
def test_it_is_exact_on_hard_inputs(kind, dtype):
    p = problem(dtype, 9, 2, kind)
    zero = np.zeros_like(p.B)
    _, exact = naive.exact_jvp(p.U, p.V, p.B, p.dU, p.dV, zero, p.t, 0.0)
    assert norm(exact.distance(operator(p) @ p.B)) <= 1e3 * p.unit * norm(exact.round())


@pytest.mark.parametrize("kind", ["generic", "nearly_parallel"])
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("n", [3, 9])
def test_adjoint_and_transpose(n, dtype, kind):
    L = operator(problem(dtype, n, 2, kind))
    dense = L.to_dense()
    limit = 1e3 * problem(dtype, n, 2, kind).unit * norm(dense)
    for twin, expected in (
        (L.H, dense.conj().T),
        (L.T, dense.T),
        (L.H.T, dense.conj()),
        (L.T.T, dense),
        (L.H.H, dense),
    ):
        assert twin.dtype == dtype
        assert norm(twin.to_dense() - expected) <= limit


def test_products_shapes_and_dtypes():
    L = operator(problem("float32", 9))
    B = np.random.default_rng(1).standard_normal((2, 9, 3))
    expected = L.to_dense().astype(float) @ B
    assert (L @ B).dtype == np.float64
    assert norm(L @ B - expected) <= 1e-5 * norm(expected)
    assert (L @ B[0, :, 0]).shape == (9,)
    assert norm(L @ (B + 1j * B) - (1 + 1j) * (L @ B)) <= 1e-12 * norm(expected)
    assert (L @ np.zeros((9, 0))).shape == (9, 0)
    with pytest.raises(ValueError, match="B has shape"):
        L @ B[:, 1:]
    with pytest.raises(TypeError):
        B @ L


def test_batches_equal_single_operators():
    rng = np.random.default_rng(2)
    U, dU = rng.standard_normal((2, 3, 8, 2))
    V, dV = rng.standard_normal((2, 8, 2))
    L = LowRankSkew(U, V).expm_frechet(dU, dV, 0.4)
    assert L.shape == (3, 8, 8)
    B = rng.standard_normal((2, 1, 8, 1))
    assert (L @ B).shape == (2, 3, 8, 1)
    assert L.H.to_dense().shape == (3, 8, 8)
    for i in range(3):
        single = LowRankSkew(U[i], V).expm_frechet(dU[i], dV, 0.4)
        assert norm(L.to_dense()[i] - single.to_dense()) <= 1e-13
    with pytest.raises(ValueError, match="one matrix"):
        L.aslinearoperator()


def test_a_batch_that_takes_two_routes():
    parallel = gen.nearly_parallel(np.random.default_rng(0), 12, 2, "float64", 1e-8, 30.0)
    generic = gen.generic(np.random.default_rng(1), 12, 2, "float64")
    U, V = (np.stack(side) for side in zip(parallel, generic, strict=True))
    dU, dV = np.random.default_rng(2).standard_normal((2, *U.shape))
    L = LowRankSkew(U, V).expm_frechet(dU, dV)
    for i in range(2):
        zero = np.zeros((12, 12))
        _, exact = naive.exact_jvp(U[i], V[i], np.eye(12), dU[i], dV[i], zero, 1.0, 0.0)
        limit = 1e3 * gen.unit("f8") * gen.rho(U[i], V[i]) * norm(exact.round())
        assert norm(exact.distance(L.to_dense()[i])) <= limit


@pytest.mark.parametrize(("n", "r"), [(0, 2), (4, 0), (0, 0)])
def test_empty_operators_are_zero(n, r):
    a = np.zeros((n, r))
    L = LowRankSkew(a, a).expm_frechet(a, a)
    assert L.shape == (n, n)
    assert not (L @ np.ones((n, 2))).any()


def test_vectors_and_missing_directions():
    x, y = np.array([1.0, 0.0, 0.0]), np.array([0.0, 1.0, 0.0])
    S = LowRankSkew(x, y)
    # S turns from x towards −y: twice as fast along the direction dU = x.
    expected = scipy.linalg.expm_frechet(S.to_dense(), S.to_dense(), compute_expm=False)
    assert norm(S.expm_frechet(x, None).to_dense() - expected) <= 1e-15
    assert norm(S.expm_frechet(x[:, None], None).to_dense() - expected) <= 1e-15
    assert not S.expm_frechet(None, None).to_dense().any()


def test_it_is_linear_in_the_direction():
    p = problem()
    S = LowRankSkew(p.U, p.V)
    both = S.expm_frechet(p.dU, p.dV).to_dense()
    parts = S.expm_frechet(p.dU, None).to_dense() + S.expm_frechet(None, p.dV).to_dense()
    assert norm(both - parts) <= 1e-13 * norm(both)
    assert norm(S.expm_frechet(2 * p.dU, 2 * p.dV).to_dense() - 2 * both) <= 1e-13 * norm(both)


def test_inside_scipy():
    p = problem("complex128", 30)
    L = operator(p)
    A = L.aslinearoperator()
    dense = L.to_dense()
    x = gen.normal(np.random.default_rng(3), (30,), "complex128")
    assert norm(A @ x - dense @ x) <= 1e-13 * norm(dense) * norm(x)
    assert norm(A.H @ x - dense.conj().T @ x) <= 1e-13 * norm(dense) * norm(x)
    assert norm(A.rmatmat(np.eye(30)) - dense.conj().T) <= 1e-13 * norm(dense)
    values = sparse.svds(A, k=2, return_singular_vectors=False)
    assert np.allclose(sorted(values), sorted(np.linalg.svd(dense)[1])[-2:])


def test_it_takes_two_passes_over_the_rows_and_forms_nothing():
    n = 30_000
    rng = np.random.default_rng(0)
    U, V, dU, dV = rng.standard_normal((4, n, 2)) / np.sqrt(n)
    L = LowRankSkew(U, V).expm_frechet(dU, dV)
    rows = []
    with watching(lambda _, count: rows.append(count)):
        L @ np.ones(n)
    # U, V and dU, dV are read once for products and once for the sum.
    assert sum(rows) == 4 * n


def test_refusals():
    p = problem()
    S = LowRankSkew(p.U, p.V)
    with pytest.raises(ValueError, match="dU has shape"):
        S.expm_frechet(p.dU[1:], p.dV)
    with pytest.raises(TypeError, match="dV is complex"):
        S.expm_frechet(p.dU, 1j * p.dV)
    with pytest.raises(ValueError, match="dU contains NaN"):
        S.expm_frechet(np.nan * p.dU, p.dV)
    with pytest.raises(ValueError, match="one t"):
        S.expm_frechet(p.dU, p.dV, [1.0, 2.0])
    with pytest.raises(TypeError, match="t is complex"):
        S.expm_frechet(p.dU, p.dV, 1j)
    with pytest.raises(ValueError, match="overflows"):
        S.expm_frechet(1e200 * p.dU, p.dV) @ np.full(12, 1e200)
    L = S.expm_frechet(p.dU, None)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match=r"^B\[0, 0\] is (nan|inf)"):
            L @ (bad * np.ones((12, 2)))


def test_a_narrow_result_does_not_overflow_in_silence():
    x, y = np.eye(2, dtype=np.float16)
    L = LowRankSkew(x, y).expm_frechet(np.float16([1e2, 1e2]), None)
    assert L.dtype == np.float16
    with pytest.raises(ValueError, match="the derivative overflows"):
        L @ np.float16([3e4, 1e4])


def test_it_is_exported():
    assert isinstance(operator(problem()), lowrank_expm.LowRankFrechet)
