"""A real problem: the geodesic between the subspaces of two handwritten digits.

The subspaces are the top eight principal directions of the images of 0 and of 1 (64 pixels)
in scikit-learn's digits. The geodesic on the Grassmann manifold that leaves span(X0) with
velocity H is exp(t(H X0ᴴ - X0 Hᴴ)) X0, and the log map gives the H that arrives at span(X1).
"""

import numpy as np
import pytest
from sklearn import datasets

from lowrank_expm import LowRankSkew, skew_expm_multiply, verify

from . import generators as gen
from . import naive

RANK = 8
# The log map (an SVD and a QR) and the measure below contribute a few u each beside exp.
TOLERANCE = 100


def subspace(digit, dtype="float64"):
    images, labels = datasets.load_digits(return_X_y=True)
    _, _, directions = np.linalg.svd(images[labels == digit], full_matrices=False)
    return np.ascontiguousarray(directions[:RANK].T).astype(dtype)


def log_map(X0, X1):
    """The velocity H, orthogonal to X0, and the principal angles: Edelman, Arias, Smith 1998.

    DOI 10.1137/S0895479895290954.
    """
    P, cosines, Rt = np.linalg.svd(X0.T @ X1)
    # X1 R - X0 P cos = W sin: the angles from their sines and cosines together.
    rest = X1 @ Rt.T - X0 @ (P * cosines)
    rest -= X0 @ (X0.T @ rest)
    sines = np.linalg.norm(rest, axis=0)
    angles = np.arctan2(sines, cosines)
    return (rest / sines * angles) @ P.T, angles


def sines_between(X, Y):
    """The largest principal angle's sine: accurate for small angles, where a cosine is blind."""
    return np.linalg.norm(Y - X @ (X.T @ Y), 2)


@pytest.fixture(scope="module")
def digits():
    X0, X1 = subspace(0), subspace(1)
    H, angles = log_map(X0, X1)
    return X0, X1, H, angles


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "direct"])
def test_geodesic_arrives(digits, method):
    X0, X1, H, angles = digits
    assert angles.max() > 1  # far apart, so that arriving says something
    Y = skew_expm_multiply(H, X0, X0, method=method)
    assert sines_between(X1, Y) <= TOLERANCE * gen.unit("float64")
    assert np.linalg.norm(Y.T @ Y - np.eye(RANK), 2) <= TOLERANCE * gen.unit("float64")


def test_geodesic_is_walked_at_constant_speed(digits):
    X0, X1, H, angles = digits
    grid = np.linspace(0.0, 1.0, 5)
    path = skew_expm_multiply(H, X0, X0, grid)
    np.testing.assert_array_equal(path[0], X0)
    for t, Y in zip(grid.tolist(), path, strict=True):
        _, behind = log_map(X0, Y) if t else (None, np.zeros(RANK))
        np.testing.assert_allclose(
            np.sort(behind), np.sort(t * angles), rtol=0, atol=TOLERANCE * gen.unit("float64")
        )
    midpoint = path[2]
    _, before = log_map(X0, midpoint)
    _, after = log_map(midpoint, X1)
    np.testing.assert_allclose(
        np.linalg.norm(before),
        np.linalg.norm(after),
        rtol=TOLERANCE * gen.unit("float64"),
    )


def test_angles_of_the_generator_are_the_principal_angles(digits):
    """H X0ᴴ - X0 Hᴴ has the eigenvalues ±i θⱼ."""
    X0, _, H, angles = digits
    S = LowRankSkew(H, X0)
    both = np.sort(np.concatenate([angles, -angles]))
    np.testing.assert_allclose(S.angles(), both, rtol=0, atol=TOLERANCE * gen.unit("float64"))
    np.testing.assert_allclose(S.norm(), angles.max(), rtol=TOLERANCE * gen.unit("float64"))


def test_geodesic_back_is_the_adjoint(digits):
    X0, X1, H, _ = digits
    Q = LowRankSkew(H, X0).expm()
    Y = Q @ X0
    np.testing.assert_allclose(Q.H @ Y, X0, rtol=0, atol=TOLERANCE * gen.unit("float64"))
    assert sines_between(X0, Q.H @ X1) <= TOLERANCE * gen.unit("float64")


def test_images_keep_their_norm_and_the_certificate_holds(digits):
    """The rotation carries the images of 0 along: each keeps its brightness."""
    X0, _, H, _ = digits
    images, labels = datasets.load_digits(return_X_y=True)
    B = images[labels == 0].T
    Q = LowRankSkew(H, X0).expm()
    rotated = Q @ B
    assert naive.norm_drifts(rotated, B).max() <= 80 * np.sqrt(2 * RANK) * gen.unit("float64")
    assert naive.defects(Q).item() <= float(Q.certificate.defect_bound)
    report = verify.check(H, X0, B)
    assert report.passed


def test_geodesic_against_the_oracle(digits):
    X0, _, H, _ = digits
    Y = skew_expm_multiply(H, X0, X0[:, :2], 0.5)
    limit = 40 * gen.unit("float64") * max(1.0, gen.rho(H, X0, 0.5))
    assert naive.forward_errors(Y, H, X0, X0[:, :2], 0.5) <= limit


def test_geodesic_in_single_precision():
    X0, X1 = subspace(0, "float32"), subspace(1, "float32")
    H, _ = log_map(X0, X1)
    assert H.dtype == np.float32
    Y = skew_expm_multiply(H, X0, X0)
    assert Y.dtype == np.float32
    assert sines_between(X1, Y) <= TOLERANCE * gen.unit("float32")
