"""Geodesics and transport beside geoopt, which needs PyTorch."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch

from lowrank_expm.geometry import grassmann_geodesic, stiefel_geodesic, stiefel_transport

from . import generators as gen

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # geoopt calls torch.jit.script
    import geoopt

TOLERANCE = 100


def problem(seed, n=30, p=4, batch=3):
    """Points and tangents of 2-norm 2."""
    rng = np.random.default_rng(seed)
    X = np.stack([gen.frame(rng, n, p, "float64") for _ in range(batch)])
    tangents = rng.standard_normal((2, batch, n, p))
    M = X.mT @ tangents
    tangents -= X @ (M + M.mT) / 2
    return X, *(2 * tangents / np.linalg.norm(tangents, 2, axis=(-2, -1), keepdims=True))


def tensors(*arrays):
    return [torch.asarray(a) for a in arrays]


def test_euclidean_geodesic_is_that_of_geoopt():
    X, D, _ = problem(0)
    Y = geoopt.EuclideanStiefelExact().expmap(*tensors(X, D)).numpy()
    error = np.abs(stiefel_geodesic(X, D, metric="euclidean") - Y).max()
    assert error <= 2 * TOLERANCE * gen.unit("float64")


def test_transport_keeps_the_canonical_product_of_geoopt():
    X, D, W = problem(1)
    manifold = geoopt.CanonicalStiefel()
    Y = stiefel_geodesic(X, D)
    velocity, moved = stiefel_transport(X, D, D), stiefel_transport(X, D, W)
    before = manifold.inner(*tensors(X, D, W)).numpy()
    after = manifold.inner(*tensors(Y, velocity, moved)).numpy()
    # The norms of D and W are 2 in the 2-norm, at most 4 in that of Frobenius.
    assert np.abs(after - before).max() <= 16 * 2 * TOLERANCE * gen.unit("float64")


def test_cayley_retraction_of_geoopt_follows_the_geodesic_to_second_order():
    """Its canonical `expmap` is this retraction; for XᵀD = 0 its velocity is D."""
    X, D, _ = problem(2)
    D = D - X @ (X.mT @ D)
    retract = geoopt.CanonicalStiefel().retr
    gaps = []
    for t in (0.1, 0.05):
        Y = retract(*tensors(X, t * D)).numpy()
        gaps.append(np.linalg.norm(grassmann_geodesic(X, D, t) - Y))
    assert gaps[0] / gaps[1] == pytest.approx(8, rel=0.02)  # the third power
