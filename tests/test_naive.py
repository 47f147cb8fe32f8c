"""The oracle and the generators themselves, against a dense mpmath.expm and NumPy."""

import mpmath
import numpy as np
import pytest

from . import generators as gen
from . import naive


def mp_matrix(a):
    return mpmath.matrix([[mpmath.mpmathify(x) for x in row] for row in a.tolist()])


def dense_mp(M, B, t):
    """exp(tM) B by mpmath's own Taylor series on the dense matrix, in 80 digits."""
    with mpmath.workdps(80):
        Y = mpmath.expm(mpmath.mpmathify(t) * M, method="taylor") * mp_matrix(B)
        return np.array([[complex(x) for x in row] for row in Y.tolist()])


@pytest.mark.parametrize("dtype", gen.DOUBLES)
@pytest.mark.parametrize("make", ["generic", "nearly_parallel", "scaled_columns"])
def test_skew_oracle_is_the_dense_exponential(dtype, make):
    rng = np.random.default_rng(1)
    U, V = gen.MAKERS[make](rng, 6, 2, dtype)
    B = gen.normal(rng, (6, 2), dtype)
    with mpmath.workdps(80):
        u, v = mp_matrix(U), mp_matrix(V)
        expected = dense_mp(u * v.H - v * u.H, B, 0.7)
    Y = naive.expm_multiply_mp(U, V, B, 0.7)
    # Both are rounded to double at the end, so they agree but for a tie.
    np.testing.assert_allclose(Y, expected, rtol=3e-16, atol=1e-30)
    kept = expected if dtype == "complex128" else expected.real
    assert naive.forward_errors(kept, U, V, B, 0.7) < 3e-16


@pytest.mark.parametrize("t", [0.7, 0.3 - 1.1j])
@pytest.mark.parametrize("make", ["generic", "nilpotent", "equal"])
def test_general_oracle_is_the_dense_exponential(make, t):
    rng = np.random.default_rng(2)
    L, R = getattr(gen, make)(rng, 5, 2, "complex128")
    B = gen.normal(rng, (5, 2), "complex128")
    with mpmath.workdps(80):
        expected = dense_mp(mp_matrix(L) * mp_matrix(R).H, B, t)
    np.testing.assert_allclose(naive.general_multiply_mp(L, R, B, t), expected, rtol=3e-16)


@pytest.mark.parametrize("dtype", gen.DOUBLES)
@pytest.mark.parametrize("make", sorted(gen.MAKERS))
def test_oracle_has_digits_to_spare(dtype, make):
    """More digits change nothing, and the result has the norm of B, at every angle."""
    rng = np.random.default_rng(3)
    U, V = gen.MAKERS[make](rng, 10, 2, dtype)
    B = gen.normal(rng, (10, 2), dtype)
    Y = naive.expm_multiply_mp(U, V, B, 1.3)
    np.testing.assert_array_equal(Y, naive.expm_multiply_mp(U, V, B, 1.3, digits=120))
    np.testing.assert_array_equal(Y, naive.expm_multiply_mp(U, V, B, 1.3, digits=30))
    assert naive.norm_drifts(Y, B).max() < 5e-16


def test_oracle_at_the_largest_angle_turns_by_it():
    """A single plane: the rotation is known in closed form, sin and cos taken in mpmath."""
    angle = 1e13 + 0.5
    U, V = np.array([[angle], [0.0], [0.0]]), np.array([[0.0], [1.0], [0.0]])
    Q = naive.expm_mp(U, V)
    with mpmath.workdps(40):
        c, s = float(mpmath.cos(angle)), float(mpmath.sin(angle))
    np.testing.assert_allclose(Q, [[c, s, 0], [-s, c, 0], [0, 0, 1]], rtol=3e-16)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_exact_defect_is_the_dense_one(dtype):
    rng = np.random.default_rng(4)
    F, C = gen.normal(rng, (9, 4), dtype), gen.normal(rng, (4, 4), dtype) * 0.1
    Q = naive.operator_mp(F, C).round()
    np.testing.assert_allclose(Q, np.eye(9) + naive._wide(F) @ C @ F.conj().T, atol=1e-5)
    dense = np.linalg.norm(Q.conj().T @ Q - np.eye(9), 2)
    np.testing.assert_allclose(naive.defect_mp(F, C), dense, rtol=1e-12)
    np.testing.assert_allclose(naive.dense_defect_mp(Q), dense, rtol=1e-12)


def test_exact_defect_sees_through_a_frame_that_hides_it():
    """F annihilates what C holds: a float64 QR of F would show 1e-9 here."""
    x = np.random.default_rng(5).standard_normal(8)
    F = np.stack([x, x], -1)
    C = 1e7 * np.array([[1.0, -1.0], [-1.0, 1.0]])
    assert naive.defect_mp(F, C) == 0.0


def test_batches_and_grids_of_the_oracle_are_its_single_results():
    rng = np.random.default_rng(6)
    U, V, B = (rng.standard_normal(s) for s in [(3, 1, 5, 2), (2, 5, 2), (5, 3)])
    Y = naive.expm_multiply_mp(U, V, B, np.array([0.5, -2.0]))
    assert Y.shape == (2, 3, 2, 5, 3)
    np.testing.assert_array_equal(Y[1, 2, 0], naive.expm_multiply_mp(U[2, 0], V[0], B, -2.0))
    assert naive.expm_multiply_mp(U, V, B[:, 0]).shape == (3, 2, 5)
    assert naive.forward_errors(Y, U, V, B, np.array([0.5, -2.0])).shape == (2, 3, 2)


def test_empty_inputs_of_the_oracle():
    assert naive.expm_multiply_mp(np.ones((0, 2)), np.ones((0, 2)), np.ones((0, 3))).shape == (0, 3)
    B = np.arange(8.0).reshape(4, 2)
    np.testing.assert_array_equal(naive.expm_multiply_mp(np.ones((4, 0)), np.ones((4, 0)), B), B)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_generators_have_the_angles_that_they_promise(dtype):
    rng = np.random.default_rng(7)
    tolerance = 20 * gen.unit(dtype)  # the factors are rounded to dtype
    U, V = gen.with_angles(rng, 12, [3.0, 0.5], dtype)
    assert U.dtype == dtype
    values = np.linalg.eigvals(naive.dense_skew(U, V))
    sizes = np.sort(np.abs(values))[-4:]
    np.testing.assert_allclose(sizes, [0.5, 0.5, 3.0, 3.0], rtol=tolerance)
    assert gen.theta(*gen.with_norm(rng, 12, 3, dtype, 1e4)) == pytest.approx(1e4, rel=tolerance)
    U, V = gen.nearly_parallel(rng, 12, 3, dtype, eps=1e-3)
    assert gen.theta(U, V) < 0.02 * gen.rho(U, V)
    assert gen.theta(*gen.equal(rng, 12, 3, dtype)) <= tolerance


@pytest.mark.parametrize("name", sorted(gen.LAYOUTS))
@pytest.mark.parametrize("shape", [(4,), (4, 3), (2, 4, 3), (0, 3)])
def test_layouts_keep_shape_and_dtype(name, shape):
    a = np.random.default_rng(8).standard_normal(shape).astype(np.complex64)
    b = gen.LAYOUTS[name](a)
    assert (b.shape, b.dtype.newbyteorder("=")) == (a.shape, a.dtype)
    if name != "repeated":
        np.testing.assert_array_equal(b, a)
