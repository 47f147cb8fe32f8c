"""LowRankUnitary, its certificate, and its life inside SciPy."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
import scipy.sparse.linalg as sparse

from lowrank_expm import Certificate, LowRankSkew, LowRankUnitary, verify
from lowrank_expm.passes import watching

from . import generators as gen
from . import naive

ROUTES = ("gram", "qr", "direct")


def operator(dtype="float64", n=20, r=2, t=0.8, method="auto", seed=0):
    U, V = gen.generic(np.random.default_rng(seed), n, r, dtype)
    return LowRankSkew(U, V, method=method).expm(t)


def vectors(dtype="float64", n=20, k=3, seed=1):
    return gen.normal(np.random.default_rng(seed), (n, k), dtype)


def u_of(dtype):
    return gen.unit(dtype)


# --- as a matrix -----------------------------------------------------------------------------


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_operator_is_identity_plus_frame_core_frame(dtype, method):
    Q = operator(dtype, method=method)
    F, C = Q.frame(), Q.core
    width = 20 if method == "direct" else 4
    assert F.shape == (20, width)
    assert C.shape == (width, width)
    assert F.dtype == C.dtype == dtype
    dense = naive.operator_mp(F, C).round()
    assert Q.to_dense().dtype == dtype
    # The same sum with its terms rounded; no term is longer than two.
    assert np.linalg.norm(Q.to_dense() - dense, 2) <= 40 * u_of(dtype)


@pytest.mark.parametrize("method", ROUTES)
def test_frame_comes_in_ranges_of_rows(method):
    Q = operator(n=300, method=method)
    F = Q.frame()
    for start, stop in ((0, 300), (0, 1), (10, 200), (299, 300), (7, 7), (290, 1000)):
        assert np.array_equal(Q.frame(start, stop), F[start:stop])
    assert np.array_equal(Q.frame(100), F[100:])
    assert np.array_equal(Q.frame(-5), F[-5:])


def test_frame_of_each_route_is_what_it_says():
    U, V = gen.generic(np.random.default_rng(0), 20, 2, "float64")
    assert np.array_equal(operator(method="gram").frame(), np.concatenate([U, V], axis=-1))
    assert np.array_equal(operator(method="direct").frame(), np.eye(20))
    F = operator(method="qr").frame()
    assert np.abs(F.T @ F - np.eye(4)).max() <= 0.1


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_adjoint_and_transpose(dtype, method):
    Q = operator(dtype, method=method)
    E = Q.to_dense()
    B = vectors(dtype)
    tolerance = 40 * u_of(dtype)
    cases = {
        "H": (Q.H, np.conj(E.T)),
        "T": (Q.T, E.T),
        "HH": (Q.H.H, E),
        "TT": (Q.T.T, E),
        "HT": (Q.H.T, np.conj(E)),
        "TH": (Q.T.H, np.conj(E)),
    }
    for twin, dense in cases.values():
        assert isinstance(twin, LowRankUnitary)
        assert twin.shape == Q.shape
        assert twin.dtype == Q.dtype
        assert np.linalg.norm(twin.to_dense() - dense, 2) <= tolerance
        assert np.linalg.norm(twin @ B - dense @ B) <= tolerance * np.linalg.norm(B)
        rebuilt = naive.operator_mp(twin.frame(), twin.core).round()
        assert np.linalg.norm(rebuilt - dense, 2) <= tolerance
        assert twin.orthogonality_defect() <= 80 * 2 * u_of(dtype)


@pytest.mark.parametrize("flag", ["H", "T"])
def test_a_complex_b_meets_a_real_or_complex_twin(flag):
    for dtype in ("float64", "complex128"):
        Q = operator(dtype)
        E = Q.to_dense()
        B = vectors("complex128")
        dense = np.conj(E.T) if flag == "H" else E.T
        Y = getattr(Q, flag) @ B
        assert Y.dtype == np.complex128
        assert np.linalg.norm(Y - dense @ B) <= 40 * 2.0**-53 * np.linalg.norm(B)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_adjoint_is_the_inverse(dtype):
    Q, B = operator(dtype), vectors(dtype)
    assert np.linalg.norm(Q.H @ (Q @ B) - B) <= 80 * 2 * u_of(dtype) * np.linalg.norm(B)


def test_products_and_shapes():
    Q = operator()
    B = vectors()
    assert (Q @ B).shape == (20, 3)
    assert (Q @ B[:, 0]).shape == (20,)
    assert (Q @ np.stack([B, B])).shape == (2, 20, 3)
    assert (Q @ B[:, :0]).shape == (20, 0)
    assert (Q @ B.tolist()).shape == (20, 3)
    batch = LowRankSkew(*np.ones((2, 3, 20, 1))).expm([0.1, 0.2])
    assert batch.shape == (2, 3, 20, 20)
    assert batch.ndim == 4
    assert (batch @ B).shape == (2, 3, 20, 3)
    assert (batch @ B[:, 0]).shape == (2, 3, 20)
    assert batch.to_dense().shape == (2, 3, 20, 20)
    assert batch.core.shape == (2, 3, 2, 2)
    assert repr(Q) == "LowRankUnitary(shape=(20, 20), dtype=float64)"


def test_products_promote():
    assert (operator("float32") @ vectors("float64")).dtype == np.float64
    assert (operator("float32") @ vectors("complex64")).dtype == np.complex64
    assert (operator("float32") @ np.ones(20, int)).dtype == np.float64
    assert (operator("float64") @ vectors("float32")).dtype == np.float64


def test_products_that_do_not_fit_are_refused():
    Q = operator()
    with pytest.raises(ValueError, match=r"B has shape \(19,\); with n = 20 it must be \(20,\)"):
        Q @ np.ones(19)
    with pytest.raises(ValueError, match=r"B\[2, 0\] is inf; all entries must be finite"):
        Q @ np.where(np.arange(20) == 2, np.inf, 0.0)
    with pytest.raises(TypeError, match=r"apply one after the other: Q1 @ \(Q2 @ B\)"):
        Q @ Q
    with pytest.raises(ValueError, match="do not broadcast"):
        LowRankSkew(*np.ones((2, 3, 20, 1))).expm() @ np.ones((2, 20, 1))


@pytest.mark.parametrize(("n", "r"), [(0, 2), (5, 0), (0, 0)])
def test_empty_operators_are_the_identity(n, r):
    for batch in ((), (2,), (0,)):
        Q = LowRankSkew(*np.zeros((2, *batch, n, r))).expm()
        B = np.ones((n, 3))
        assert np.array_equal(Q @ B, np.ones((*batch, n, 3)))
        assert np.array_equal(Q.to_dense(), np.broadcast_to(np.eye(n), (*batch, n, n)))
        assert np.max(Q.orthogonality_defect(), initial=0.0) == 0
        assert np.shape(Q.certificate.defect_bound) == batch


# --- the certificate -------------------------------------------------------------------------


def test_certificate_of_one_operator_has_python_scalars():
    c = operator().certificate
    assert isinstance(c, Certificate)
    assert [f.name for f in dataclasses.fields(c)] == [
        "route",
        "angle",
        "order",
        "squarings",
        "defect_bound",
        "error_bound",
    ]
    assert c.route == "gram"
    assert type(c.route) is str
    assert all(type(v) is float for v in (c.angle, c.defect_bound, c.error_bound))
    assert all(type(v) is int for v in (c.order, c.squarings))


def test_certificate_of_a_batch_and_a_grid_has_arrays():
    U, V = (np.stack([a, 2 * a, 3 * a]) for a in gen.generic(np.random.default_rng(0), 20, 2, "f8"))
    c = LowRankSkew(U, V).expm([0.5, 1.0]).certificate
    for value in (c.route, c.angle, c.defect_bound, c.error_bound):
        assert isinstance(value, np.ndarray)
        assert value.shape == (2, 3)
    assert type(c.order) is int
    assert type(c.squarings) is int
    assert c.angle[1] == pytest.approx(2 * c.angle[0])
    assert c.angle[0] == pytest.approx(c.angle[0, 0] * np.array([1.0, 4.0, 9.0]))


def test_certificate_of_a_grid_as_long_as_the_batch_multiplies_no_wrong_pairs():
    U, V = (np.stack([a, 2 * a]) for a in gen.generic(np.random.default_rng(0), 20, 2, "f8"))
    c = LowRankSkew(U, V).expm([0.5, 1.0]).certificate
    assert c.angle / c.angle[0, 0] == pytest.approx(np.array([[1.0, 4.0], [2.0, 8.0]]))
    single = LowRankSkew(U[1], V[1]).expm(1.0).certificate
    assert c.angle[1, 1] == pytest.approx(single.angle)
    assert c.error_bound[1, 1] == pytest.approx(single.error_bound, rel=0.1)


def test_certificate_is_frozen_and_kept():
    Q = operator(n=5000)
    c = Q.certificate
    with pytest.raises(dataclasses.FrozenInstanceError):
        c.defect_bound = 0.0
    with watching(lambda *_: pytest.fail("a pass over the rows")):
        assert Q.certificate is c


@pytest.mark.parametrize("method", ["auto", *ROUTES])
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("t", [0.0, 0.3, -2.0, 1e3])
def test_certificate_states_angle_and_bounds(t, dtype, method):
    U, V = gen.generic(np.random.default_rng(3), 14, 2, dtype)
    Q = LowRankSkew(U, V, method=method).expm(t)
    c = Q.certificate
    assert c.route == ("gram" if method == "auto" else method)
    # "A few u ‖U‖ ‖V‖" for each unit of time.
    assert abs(c.angle - gen.theta(U, V, t)) <= 40 * u_of(dtype) * gen.rho(U, V, t)
    assert naive.defects(Q) <= c.defect_bound
    B = gen.normal(np.random.default_rng(4), (14, 2), dtype)
    rounding = 10 * u_of(dtype)
    assert naive.forward_errors(Q @ B, U, V, B, t) <= c.error_bound + rounding


def test_error_bound_does_not_depend_on_the_sign_of_t():
    forward, back = (operator(t=t).certificate for t in (2.5, -2.5))
    assert forward.error_bound == pytest.approx(back.error_bound, rel=1e-6)
    assert forward.angle == back.angle


def test_order_and_squarings_grow_with_the_angle():
    S = LowRankSkew(*gen.with_norm(np.random.default_rng(5), 20, 2, "float64", 1.0))
    chosen = [S.expm(t).certificate for t in np.logspace(-4, 4)]
    # The Padé approximant, of order 13, comes after all polynomials.
    effort = [(c.squarings, c.order == 13, c.order) for c in chosen]
    assert effort == sorted(effort)
    assert effort[0] == (0, False, 4)
    assert effort[-1][1]
    assert effort[-1][0] >= 10


def test_twins_share_the_bounds():
    Q = operator("complex128")
    c = Q.certificate
    for twin in (Q.H, Q.T, Q.H.T):
        assert twin.certificate.defect_bound == c.defect_bound
        assert twin.certificate.angle == c.angle


# --- the defect ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_defect_method_is_the_verified_defect(dtype, method):
    Q = operator(dtype, method=method)
    assert Q.orthogonality_defect() == verify.orthogonality_defect(Q)
    assert Q.orthogonality_defect() == pytest.approx(naive.defects(Q)[()], rel=1e-3, abs=1e-18)


# --- inside SciPy ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_linear_operator_has_all_products(dtype):
    Q = operator(dtype)
    A, E, B = Q.aslinearoperator(), Q.to_dense(), vectors(dtype)
    assert isinstance(A, sparse.LinearOperator)
    assert A.shape == (20, 20)
    assert A.dtype == dtype
    tolerance = 40 * u_of(dtype) * np.linalg.norm(B)
    pairs = [
        (A.matvec(B[:, 0]), E @ B[:, 0]),
        (A.matmat(B[:, :1]), E @ B[:, :1]),
        (A.rmatvec(B[:, 0]), E.conj().T @ B[:, 0]),
        (A.matmat(B), E @ B),
        (A.rmatmat(B), E.conj().T @ B),
        (A @ B, E @ B),
        (A.H @ B, E.conj().T @ B),
        (A.adjoint() @ B[:, 0], E.conj().T @ B[:, 0]),
        (A.T @ B, E.T @ B),
        (A.transpose().matvec(B[:, 0]), E.T @ B[:, 0]),
        ((A * 2) @ B, 2 * E @ B),
        ((A @ A.H) @ B, B),
    ]
    for found, expected in pairs:
        assert found.shape == expected.shape
        assert found.dtype == dtype
        assert np.linalg.norm(found - expected) <= 2 * tolerance


def test_linear_operator_of_a_twin():
    Q = operator("complex128")
    x = vectors("complex128")[:, 0]
    assert np.array_equal(Q.H.aslinearoperator() @ x, Q.H @ x)
    assert np.array_equal(Q.H.aslinearoperator().rmatvec(x), Q @ x)


def test_linear_operator_of_a_batch_is_refused():
    Q = LowRankSkew(*np.ones((2, 3, 20, 1))).expm()
    with pytest.raises(ValueError, match="make one generator for each element"):
        Q.aslinearoperator()


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_eigenvalues_by_arnoldi_lie_on_the_unit_circle_at_the_angles(dtype):
    """The eigenvalue with the smallest real part has turned furthest (by less than π)."""
    Q = operator(dtype, n=40, t=0.4)
    start = np.random.default_rng(0).standard_normal(40)
    found = sparse.eigs(Q.aslinearoperator(), k=1, which="SR", v0=start, return_eigenvectors=False)
    assert Q.certificate.angle < np.pi
    assert abs(np.abs(found) - 1).max() <= 1e3 * 2.0**-53
    assert np.abs(np.angle(found)).max() == pytest.approx(Q.certificate.angle, rel=1e-12)


def test_singular_values_by_lanczos_are_one():
    A = operator(n=40).aslinearoperator()
    s = sparse.svds(
        A,
        k=2,
        return_singular_vectors=False,
        solver="arpack",
        v0=np.random.default_rng(0).standard_normal(40),
    )
    assert np.abs(s - 1).max() <= 1e3 * 2.0**-53


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
def test_gmres_inverts_it_in_as_many_steps_as_it_has_eigenvalues(dtype):
    Q = operator(dtype, n=40)
    b = vectors(dtype, n=40)[:, 0]
    steps = []
    x, info = sparse.gmres(
        Q.aslinearoperator(),
        b,
        rtol=1e-13,
        atol=0,
        restart=10,
        callback=steps.append,
        callback_type="pr_norm",
    )
    assert info == 0
    assert len(steps) <= 6
    assert np.linalg.norm(x - Q.H @ b) <= 1e-11 * np.linalg.norm(b)


def test_one_norm_estimate():
    Q = operator(n=40)
    found = sparse.onenormest(Q.aslinearoperator())
    exact = np.linalg.norm(Q.to_dense(), 1)
    assert exact / 3 <= found <= exact * (1 + 1e-14)
