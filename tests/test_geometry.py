"""Geodesics and parallel transport beside dense formulas, differential equations and pymanopt.

With exact arithmetic in 30 digits the geodesics are those of Edelman, Arias and Smith 1998 in
[X K] and [X D]; the differential equations know no closed form at all.
"""

from __future__ import annotations

import mpmath
import numpy as np
import pymanopt.manifolds
import pytest
import scipy.linalg
from scipy.integrate import solve_ivp

from lowrank_expm import geometry
from lowrank_expm.geometry import (
    grassmann_geodesic,
    grassmann_log,
    grassmann_transport,
    stiefel_geodesic,
    stiefel_transport,
)

from . import generators as gen

METRICS = ("canonical", "euclidean")
SHAPES = [(12, 3), (7, 1), (5, 4), (4, 4), (6, 3), (40, 5)]
# Projections, exponentials and a product with a small unitary: a few u each.
TOLERANCE = 100
# What DOP853 leaves at rtol = 1e-12 over an angle of about 6.
BY_EQUATION = 1e-9


def bound(dtype, *, t=1.0, D=None, factor=TOLERANCE):
    """C·u·max(1, |t| ‖D‖)."""
    angle = 0.0 if D is None else abs(t) * np.linalg.norm(D, 2)
    return factor * gen.unit(dtype) * max(1.0, angle)


def project(X, Z):
    """The tangent of the Stiefel manifold nearest to Z."""
    M = X.conj().T @ Z
    return Z - X @ (M + M.conj().T) / 2


def horizontal(X, Z):
    return Z - X @ (X.conj().T @ Z)


def point(seed, n, p, dtype, tangents=1, size=2.0):
    """A point and tangents of 2-norm `size`."""
    rng = np.random.default_rng(seed)
    X = gen.frame(rng, n, p, dtype)
    found = []
    for _ in range(tangents):
        D = project(X, gen.normal(rng, (n, p), dtype))
        found.append((D * (size / max(np.linalg.norm(D, 2), 1e-300))).astype(dtype))
    return X, *found


def exact_geodesic(X, D, t, metric):
    """[X K] exp(t [[A, -KᴴK], [I, 0]]) or [X D] exp(t [[A, -DᴴD], [I, A]]) exp(-tA)."""
    with mpmath.workdps(30):
        X, D, t = mpmath.matrix(X.tolist()), mpmath.matrix(D.tolist()), mpmath.mpf(t)
        p = X.cols
        A = X.H * D
        one, zero = mpmath.eye(p), mpmath.zeros(p)
        K = D - X * A if metric == "canonical" else D
        corner = zero if metric == "canonical" else A
        E = mpmath.expm(t * blocks([[A, -K.H * K], [one, corner]]))
        Y = X * E[:p, :p] + K * E[p:, :p]
        if metric == "euclidean":
            Y = Y * mpmath.expm(-t * A)
        return np.array([[complex(y) for y in row] for row in Y.tolist()])


def blocks(rows):
    """One matrix of four."""
    (a, b), (c, d) = rows
    p = a.rows
    M = mpmath.zeros(2 * p)
    M[:p, :p], M[:p, p:], M[p:, :p], M[p:, p:] = a, b, c, d
    return M


def christoffel(Y, a, b):
    """Γ(a, b) of the canonical metric: Edelman, Arias and Smith 1998, equation 2.49."""
    H = np.conj(Y.T), np.conj(a.T), np.conj(b.T)
    normal = np.eye(len(Y)) - Y @ H[0]
    return (a @ H[2] + b @ H[1]) @ Y / 2 + Y @ (H[2] @ normal @ a + H[1] @ normal @ b) / 2


def by_equation(equation, *start, t):
    """The solution of a first-order system of arrays of one shape."""
    shape = (len(start), *start[0].shape)

    def right(_, z):
        return np.stack(equation(*z.reshape(shape))).ravel()

    solved = solve_ivp(right, (0, t), np.stack(start).ravel(), "DOP853", rtol=1e-12, atol=1e-13)
    return solved.y[:, -1].reshape(shape)


def canonical_equation(Y, V, W):
    return V, -christoffel(Y, V, V), -christoffel(Y, V, W)


def euclidean_equation(Y, V):
    return V, -Y @ (V.conj().T @ V)


def canonical_product(Y, a, b):
    return np.vdot(a, b - Y @ (Y.conj().T @ b) / 2).real


@pytest.mark.parametrize("metric", METRICS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize(("n", "p"), SHAPES)
def test_stiefel_geodesic_is_that_of_the_paper(n, p, dtype, metric):
    X, D = point(n + p, n, p, dtype)
    t = np.float32(1.25)
    Y = stiefel_geodesic(X, D, t, metric=metric)
    assert Y.dtype == dtype
    error = np.linalg.norm(Y - exact_geodesic(X, D, float(t), metric), 2)
    assert error <= bound(dtype, t=t, D=D)


@pytest.mark.parametrize("dtype", gen.DOUBLES)
def test_canonical_geodesic_is_a_column_of_the_dense_group(dtype):
    """[X X⊥] exp(t [[A, -Rᴴ], [R, 0]]) [I; 0], with the n x n exponential."""
    X, D = point(0, 12, 3, dtype)
    Q, _ = np.linalg.qr(np.hstack([X, gen.normal(np.random.default_rng(1), (12, 9), dtype)]))
    Q[:, :3] = X
    M = Q.conj().T @ D
    S = np.hstack([M, np.vstack([-M[3:].conj().T, np.zeros((9, 9))])])
    Y = (Q @ scipy.linalg.expm(0.75 * S))[:, :3]
    assert np.linalg.norm(stiefel_geodesic(X, D, 0.75) - Y, 2) <= bound(dtype, D=D)


@pytest.mark.parametrize("dtype", gen.DOUBLES)
@pytest.mark.parametrize(("n", "p"), [(9, 3), (6, 4), (7, 1), (3, 3)])
def test_curves_solve_their_differential_equations(n, p, dtype):
    X, D, W = point(n, n, p, dtype, tangents=2)
    Y, V, moved = by_equation(canonical_equation, X, D, W, t=3.0)
    assert np.linalg.norm(stiefel_geodesic(X, D, 3.0) - Y) <= BY_EQUATION
    assert np.linalg.norm(stiefel_transport(X, D, D, 3.0) - V) <= BY_EQUATION
    assert np.linalg.norm(stiefel_transport(X, D, W, 3.0) - moved) <= BY_EQUATION
    Y, _ = by_equation(euclidean_equation, X, D, t=3.0)
    assert np.linalg.norm(stiefel_geodesic(X, D, 3.0, metric="euclidean") - Y) <= BY_EQUATION


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("angle", [1e-3, 1.0, 1e3])
def test_geodesics_stay_on_the_manifold(dtype, angle):
    n, p = 300, 6
    X, D = point(3, n, p, dtype, size=angle)
    for Y in (
        stiefel_geodesic(X, D),
        stiefel_geodesic(X, D, metric="euclidean"),
        grassmann_geodesic(X, D),
    ):
        wide = Y.astype(np.result_type(dtype, np.float64))
        assert np.linalg.norm(wide.conj().T @ wide - np.eye(p), 2) <= bound(dtype)


@pytest.mark.parametrize("metric", METRICS)
def test_a_thousand_steps_stay_on_the_manifold(metric):
    """Every step rounds: at random, so that errors add up like a root and not like a sum."""
    X, D = point(4, 60, 4, "float64")
    rng = np.random.default_rng(4)
    for _ in range(1000):
        X = stiefel_geodesic(X, rng.standard_normal(D.shape), metric=metric)
    assert np.linalg.norm(X.T @ X - np.eye(4), 2) <= 1000 * gen.unit("float64")


@pytest.mark.parametrize("dtype", gen.DOUBLES)
@pytest.mark.parametrize("angle", [1.0, 50.0])
def test_transport_is_an_isometry_of_tangent_spaces(dtype, angle):
    X, D, W, Z = point(5, 30, 4, dtype, tangents=3)
    D = D * (angle / 2)
    Y = stiefel_geodesic(X, D)
    moved, other = stiefel_transport(X, D, W), stiefel_transport(X, D, Z)
    assert np.linalg.norm(project(Y, moved) - moved, 2) <= bound(dtype, D=D)
    before, after = canonical_product(X, W, Z), canonical_product(Y, moved, other)
    size = np.linalg.norm(W) * np.linalg.norm(Z)
    assert abs(after - before) <= size * bound(dtype, D=D)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("angle", [60.0, 200.0, 1e4, 4e4])
def test_long_transports_are_isometries_too(dtype, angle):
    """By squaring: the cost grows with the logarithm of the angle."""
    X, D, W, Z = point(5, 30, 4, np.result_type(dtype, np.float64), tangents=3)
    X, D, W, Z = (a.astype(dtype) for a in (X, D * (angle / 2), W, Z))
    Y = stiefel_geodesic(X, D)
    moved, other = stiefel_transport(X, D, W), stiefel_transport(X, D, Z)
    assert moved.dtype == dtype
    size = np.linalg.norm(W) * np.linalg.norm(Z)
    assert np.linalg.norm(project(Y, moved) - moved, 2) <= bound(dtype, D=D)
    before, after = canonical_product(X, W, Z), canonical_product(Y, moved, other)
    assert abs(after - before) <= size * bound(dtype, D=D)


@pytest.mark.parametrize("dtype", gen.DOUBLES)
def test_squaring_and_stepping_agree(dtype, monkeypatch):
    X, D, W = point(8, 12, 3, dtype, tangents=2)
    X, D, W = np.stack([X, X]), np.stack([D, -D / 2]), np.stack([W, W])
    t = np.array([3.0, -90.0])
    squared = stiefel_transport(X, D, W, t)
    monkeypatch.setattr(geometry, "_worth_squaring", lambda *_: False)
    stepped = stiefel_transport(X, D, W, t)
    assert np.linalg.norm(squared - stepped) <= bound(dtype, t=90.0, D=D[0]) * np.linalg.norm(W)


def test_what_is_too_far_is_refused():
    x, d = np.eye(3, 2), np.eye(3, 2, -1)
    for t in (1e6, 1e300):
        with pytest.raises(ValueError, match="too large to follow"):
            stiefel_transport(x, d, d, t)


@pytest.mark.parametrize("dtype", gen.DOUBLES)
def test_transport_there_and_back(dtype):
    X, D, W = point(6, 30, 4, dtype, tangents=2)
    Y, velocity = stiefel_geodesic(X, D, 2.0), stiefel_transport(X, D, D, 2.0)
    moved = stiefel_transport(X, D, W, 2.0)
    error = stiefel_transport(Y, velocity, moved, -2.0) - W
    assert np.linalg.norm(error, 2) <= bound(dtype, t=4.0, D=D)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_transport_of_single_precision_and_of_the_direction_itself(dtype):
    X, D = point(7, 20, 3, dtype)
    A = X.conj().T @ D
    P = D - X @ A / 2
    Y = stiefel_geodesic(X, D, np.float32(1.5))
    velocity = P @ (X.conj().T @ Y) - X @ (P.conj().T @ Y)
    moved = stiefel_transport(X, D, D, np.float32(1.5))
    assert moved.dtype == dtype
    assert np.linalg.norm(moved - velocity, 2) <= bound(dtype, t=1.5, D=D) * np.linalg.norm(D, 2)


def edelman_transport(X, D, W, t):
    """(-X V sin Σt + U cos Σt) Uᴴ W + (I - UUᴴ) W with D = U Σ Vᴴ."""
    U, angles, Vh = np.linalg.svd(D, full_matrices=False)
    turned = U * np.cos(t * angles) - X @ Vh.conj().T * np.sin(t * angles)
    return turned @ (U.conj().T @ W) + W - U @ (U.conj().T @ W)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize(("n", "p"), [(12, 3), (7, 1), (6, 4), (40, 5)])
def test_grassmann_geodesic_and_transport_are_those_of_the_paper(n, p, dtype):
    X, D, W = point(n, n, p, dtype, tangents=2)
    D, W = horizontal(X, D), horizontal(X, W)
    t = np.float32(1.5)
    U, angles, Vh = np.linalg.svd(D, full_matrices=False)
    Y = (X @ Vh.conj().T * np.cos(t * angles) + U * np.sin(t * angles)) @ Vh
    assert np.linalg.norm(grassmann_geodesic(X, D, t) - Y, 2) <= bound(dtype, t=t, D=D)
    moved = grassmann_transport(X, D, W, t)
    assert moved.dtype == dtype
    assert np.linalg.norm(moved - edelman_transport(X, D, W, t), 2) <= bound(
        dtype, t=t, D=D, factor=300
    )
    assert np.linalg.norm(grassmann_geodesic(X, D, t).conj().T @ moved, 2) <= bound(
        dtype, t=t, D=D, factor=300
    )


def principal_angles(X, Y):
    """From sines and cosines; scipy.linalg.subspace_angles is blind to small complex ones."""
    sines = np.linalg.svd(horizontal(X, Y), compute_uv=False)
    cosines = np.linalg.svd(X.conj().T @ Y, compute_uv=False)
    return np.arctan2(sines, cosines[::-1])


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize(("n", "p"), [(12, 3), (7, 1), (6, 4), (40, 5), (4, 4)])
def test_log_arrives_with_the_principal_angles(n, p, dtype):
    rng = np.random.default_rng(n)
    X, Y = gen.frame(rng, n, p, dtype), gen.frame(rng, n, p, dtype)
    D = grassmann_log(X, Y)
    assert D.dtype == dtype
    assert np.linalg.norm(X.conj().T @ D, 2) <= bound(dtype)
    arrived = grassmann_geodesic(X, D)
    assert np.linalg.norm(horizontal(arrived, Y), 2) <= bound(dtype)
    found = np.linalg.svd(D, compute_uv=False)
    assert np.abs(found - principal_angles(X, Y)).max() <= bound(dtype)


@pytest.mark.parametrize("size", [0.0, 1e-12, 1e-6, 1.0, 1.5, np.pi / 2])
def test_log_inverts_the_geodesic(size):
    """Up to the cut locus, where the length is still right."""
    X, D = point(8, 20, 3, "float64", size=1.0)
    D = horizontal(X, D)
    D *= size / np.linalg.norm(D, 2)
    found = grassmann_log(X, grassmann_geodesic(X, D))
    assert abs(np.linalg.norm(found) - np.linalg.norm(D)) <= bound("float64")
    if size < 1.51:
        assert np.linalg.norm(found - D, 2) <= bound("float64", factor=20 * TOLERANCE)


def test_log_of_equal_and_of_orthogonal_subspaces():
    X = np.eye(6)[:, :3]
    assert not grassmann_log(X, X).any()
    assert not grassmann_log(X, X[:, ::-1]).any()
    D = grassmann_log(X, np.eye(6)[:, 3:])
    assert np.linalg.svd(D)[1] == pytest.approx([np.pi / 2] * 3, rel=4e-16)


def test_batches_and_grids_equal_the_single_calls():
    rng = np.random.default_rng(9)
    X = np.stack([gen.frame(rng, 10, 2, "float64") for _ in range(3)])[:, None]
    D, W = rng.standard_normal((2, 4, 10, 2))
    ts = [-0.5, 0.0, 2.0]
    curves = {
        stiefel_geodesic: (D,),
        lambda *a: stiefel_geodesic(*a, metric="euclidean"): (D,),
        stiefel_transport: (D, W),
        grassmann_geodesic: (D,),
        grassmann_transport: (D, W),
    }
    for curve, tangents in curves.items():
        together = curve(X, *tangents, ts)
        assert together.shape == (3, 3, 4, 10, 2)
        for i, j, k in np.ndindex(3, 3, 4):
            single = curve(X[j, 0], *(a[k] for a in tangents), ts[i])
            assert np.linalg.norm(together[i, j, k] - single) <= bound("float64", D=D[k])
    Y = np.stack([gen.frame(rng, 10, 2, "float64") for _ in range(4)])
    assert grassmann_log(X, Y).shape == (3, 4, 10, 2)
    single = grassmann_log(X[2, 0], Y[1])
    assert np.linalg.norm(grassmann_log(X, Y)[2, 1] - single) <= bound("float64")


def test_at_zero_everything_stays_where_it_is():
    X, D, W = point(10, 9, 2, "complex128", tangents=2)
    assert np.array_equal(stiefel_geodesic(X, D, 0.0), X)
    assert np.array_equal(grassmann_geodesic(X, D, 0.0), X)
    assert np.linalg.norm(stiefel_transport(X, D, W, 0.0) - W) <= bound("float64")
    assert np.linalg.norm(stiefel_transport(X, 0 * D, W) - W) <= bound("float64")
    H = horizontal(X, W)
    assert np.linalg.norm(grassmann_transport(X, D, W, 0.0) - H) <= bound("float64")


def test_only_the_tangent_part_counts():
    """Of a gradient, say: normal parts are as large as tangent ones here."""
    rng = np.random.default_rng(11)
    X = gen.frame(rng, 15, 3, "complex128")
    Z, W = (gen.normal(rng, (15, 3), "complex128") for _ in range(2))
    D, flat = project(X, Z), horizontal(X, Z)
    pairs = [
        (stiefel_geodesic(X, Z), stiefel_geodesic(X, D)),
        (
            stiefel_geodesic(X, Z, metric="euclidean"),
            stiefel_geodesic(X, D, metric="euclidean"),
        ),
        (stiefel_transport(X, Z, W), stiefel_transport(X, D, project(X, W))),
        (grassmann_geodesic(X, Z), grassmann_geodesic(X, flat)),
        (grassmann_transport(X, Z, W), grassmann_transport(X, flat, horizontal(X, W))),
    ]
    for given, projected in pairs:
        assert np.linalg.norm(given - projected) <= bound("float64", D=Z)


def test_vectors_lists_integers_and_half_precision():
    x, d = [1, 0, 0], [0, 0, 2]
    for curve in (stiefel_geodesic, grassmann_geodesic):
        assert curve(x, d, [0.0, 0.5]).shape == (2, 3)
        assert curve(x, d, 0.5) == pytest.approx([np.cos(1), 0, np.sin(1)], abs=1e-15)
    assert stiefel_transport(x, d, [0, 3, 0]) == pytest.approx([0, 3, 0], abs=1e-15)
    assert grassmann_log(x, [0, 0, 1]) == pytest.approx([0, 0, np.pi / 2])
    half = np.eye(4, 2, dtype=np.float16)
    assert stiefel_geodesic(half, half[::-1]).dtype == np.float16
    assert grassmann_log(half, half[::-1]).dtype == np.float16


def test_empty_batches_and_no_columns():
    for shape in ((0, 5, 2), (5, 0), (0, 0)):
        X = np.zeros(shape)
        assert stiefel_geodesic(X, X, [0.0, 1.0]).shape == (2, *shape)
        assert stiefel_geodesic(X, X, metric="euclidean").shape == shape
        assert stiefel_transport(X, X, X).shape == shape
        assert grassmann_geodesic(X, X).shape == shape
        assert grassmann_log(X, X).shape == shape


def test_inputs_are_not_written_to():
    X, D, W = point(12, 10, 2, "float64", tangents=2)
    for a in (X, D, W):
        a.flags.writeable = False
    stiefel_geodesic(X, D)
    stiefel_transport(X, D, W)
    grassmann_transport(X, D, W)
    grassmann_log(X, X)


@pytest.mark.parametrize("name", sorted(geometry.__all__))
def test_bad_points_and_tangents_are_refused(name):
    function = getattr(geometry, name)
    X = np.eye(5, 2)
    others = [X] * (2 if name.endswith("transport") else 1)
    with pytest.raises(ValueError, match="columns of X are not orthonormal"):
        function(2 * X, *others)
    for bad in (np.nan, np.inf):
        with pytest.raises(ValueError, match="X contains NaN or infinity"):
            function(X * bad if bad != bad else np.where(X == 1, bad, X), *others)
    with pytest.raises(ValueError, match=r"has shape \(4, 2\)"):
        function(X, *([np.eye(4, 2)] * len(others)))
    bad = X.copy()
    bad[4, 1] = np.inf
    with pytest.raises(ValueError, match=r"^[DY] contains NaN or infinity|columns of Y"):
        function(X, bad, *others[1:])
    with pytest.raises(TypeError, match="dtype"):
        function(X, *([X.astype(object)] * len(others)))


def test_other_arguments_are_refused():
    X = np.eye(5, 2)
    with pytest.raises(ValueError, match="canonical, euclidean"):
        stiefel_geodesic(X, X, metric="flat")
    with pytest.raises(TypeError, match="t is complex"):
        stiefel_geodesic(X, X, 1j)
    with pytest.raises(ValueError, match="columns of Y are not orthonormal"):
        grassmann_log(X, 2 * X)
    with pytest.raises(ValueError, match=r"^W contains NaN"):
        stiefel_transport(X, X, X * np.nan)


@pytest.mark.parametrize("k", [1, 3])
def test_pymanopt_agrees_on_the_stiefel_manifold(k):
    """Its metric is the Euclidean one."""
    n, p = 30, 4
    manifold = pymanopt.manifolds.Stiefel(n, p, k=k)
    rng = np.random.default_rng(13)
    X = np.stack([gen.frame(rng, n, p, "float64") for _ in range(k)])
    D = np.stack([project(x, rng.standard_normal((n, p))) for x in X])
    X, D = (X[0], D[0]) if k == 1 else (X, D)
    Y = stiefel_geodesic(X, D, metric="euclidean")
    assert np.linalg.norm(Y - manifold.exp(X, D)) <= bound("float64") * np.linalg.norm(D)


def test_pymanopt_agrees_on_the_grassmann_manifold():
    """Its exponential gives another basis of the same subspace."""
    manifold = pymanopt.manifolds.Grassmann(30, 4)
    rng = np.random.default_rng(14)
    X, Y = (gen.frame(rng, 30, 4, "float64") for _ in range(2))
    D = grassmann_log(X, Y)
    assert np.linalg.norm(D - manifold.log(X, Y)) <= bound("float64", factor=10 * TOLERANCE)
    assert np.linalg.norm(D) == pytest.approx(manifold.dist(X, Y), rel=1e-13)
    W = rng.standard_normal((30, 4))
    arrived = horizontal(manifold.exp(X, horizontal(X, W)), grassmann_geodesic(X, W))
    assert np.linalg.norm(arrived, 2) <= bound("float64", D=W)
