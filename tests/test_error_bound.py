"""The certificate's forward bound: above the true error, and not far above."""

import numpy as np
import pytest

from lowrank_expm import LowRankSkew

from . import derivative_accuracy as accuracy
from . import generators as gen
from . import naive

ROUTES = ("auto", "gram", "qr", "direct")
KINDS = sorted(set(accuracy.MAKERS) - {"both_zero"})


def true_error(Q, U, V, t):
    """‖Q − exp(tS)‖₂ of the operator whose floats are given, the difference taken exactly."""
    exact = naive.exact_skew(U, V, np.eye(len(U)), t, digits=30)
    found = naive.operator_mp(Q.frame(), Q.core)
    return float(np.linalg.norm((found.value - exact.value).round(), 2))


def draw(index):
    """Every second problem nearly parallel."""
    rng = np.random.default_rng([21, index])
    kind = "parallel_at_random" if index // 4 % 2 else KINDS[index // 8 % len(KINDS)]
    r = int(rng.integers(1, 4))
    n = int(rng.integers(2 * r, 12))
    U, V = accuracy.MAKERS[kind](rng, n, r, gen.DTYPES[index % 4])
    return U, V, float(rng.choice([1.0, -0.3]))


@pytest.mark.parametrize("method", ROUTES)
def test_the_bound_holds_and_is_near(method):
    """On every case, and within two orders of magnitude in the median where the error is above u.

    Where "gram" was asked for by name and breaks down there is no bound, which is infinite.
    """
    ratios = []
    for index in range(240):
        U, V, t = draw(index)
        try:
            Q = LowRankSkew(U, V, method=method).expm(t)
        except ValueError:
            assert method == "gram"
            continue
        bound = Q.certificate.error_bound
        assert bound > 0
        if method == "gram" and not np.isfinite(bound):
            continue
        assert np.isfinite(bound)
        error = true_error(Q, U, V, t)
        assert error <= bound, index
        if error > gen.unit(U.dtype):
            ratios.append(bound / error)
    assert len(ratios) > 100
    assert np.median(ratios) <= 100


@pytest.mark.parametrize("method", ["auto", "qr"])
def test_a_bound_without_its_parts_would_not_hold(method):
    """Neither part alone is one: the test above would notice."""
    data = core = 0
    for index in range(240):
        U, V, t = draw(index)
        Q = LowRankSkew(U, V, method=method).expm(t)
        c, error = Q.certificate, true_error(Q, U, V, t)
        core += error > 0.125 * c.defect_bound
        data += error > 0.125 * (c.error_bound - c.defect_bound * 2.0**c.squarings)
    assert core
    assert data


@pytest.mark.parametrize("m", [16, 48])
def test_the_bound_holds_for_many_columns(m):
    """Single precision against double, where the exact oracle would take too long."""
    for kind in ("generic", "nearly_parallel", "any_norm"):
        U, V = accuracy.MAKERS[kind](np.random.default_rng(1), 2 * m, m // 2, "float32")
        expected = LowRankSkew(U.astype(float), V.astype(float), method="direct").expm().to_dense()
        for method in ("qr", "direct", "auto"):
            Q = LowRankSkew(U, V, method=method).expm()
            F = Q.frame().astype(float)
            found = np.eye(2 * m) + F @ Q.core.astype(float) @ F.T
            error = np.linalg.norm(found - expected, 2)
            assert error <= Q.certificate.error_bound
