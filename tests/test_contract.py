"""The accuracy contract, against the exact oracle.

u is the unit roundoff of the real dtype and ρ = |t| ‖U‖₂ ‖V‖₂ after balancing. The constants
40, 32 and 80 are the promise to users, so no test here loosens them.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowrank_expm import LowRankSkew, skew_expm_multiply

from . import generators as gen
from . import naive

ROUTES = ("auto", "gram", "qr")
FORWARD = 40
DEFECT = {"qr": 32, "direct": 32, "auto": 80}


def draw(name, dtype, n=14, r=2, k=2, seed=0):
    rng = np.random.default_rng([seed, len(name), len(dtype)])
    U, V = gen.MAKERS[name](rng, n, r, dtype)
    return U, V, gen.normal(rng, (n, k), dtype)


def forward_bound(U, V, t=1.0, method="auto"):
    """The promise; where "gram" was asked for by name, also what its certificate admits.

    The Gram matrix of nearly parallel factors cannot tell them apart: no bound in u·ρ holds
    there, which is why "auto" leaves the route.
    """
    limit = FORWARD * gen.unit(U.dtype) * max(1.0, gen.rho(U, V, t))
    if method != "gram":
        return limit
    return limit + float(LowRankSkew(U, V, method="gram").expm(t).certificate.defect_bound)


def defect_limit(U, method):
    return DEFECT[method] * np.sqrt(2 * U.shape[-1]) * gen.unit(U.dtype)


def dense(Q):
    """I + F C Fᴴ of the object's own factors, formed exactly and rounded once."""
    return naive.operator_mp(Q.frame(), Q.core).round()


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("name", sorted(gen.MAKERS))
def test_forward_error(name, dtype, method):
    for seed in range(3):
        U, V, B = draw(name, dtype, seed=seed)
        try:
            Y = skew_expm_multiply(U, V, B, method=method)
        except ValueError:  # "gram" by name, where it is nowhere near unitary
            assert method == "gram"
            continue
        assert Y.dtype == dtype
        assert naive.forward_errors(Y, U, V, B) <= forward_bound(U, V, method=method)


@pytest.mark.parametrize("method", ["auto", "qr"])
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("name", sorted(gen.MAKERS))
def test_operator_defect_and_norm_drift(name, dtype, method):
    for seed in range(3):
        U, V, B = draw(name, dtype, seed=seed)
        Q = LowRankSkew(U, V, method=method).expm()
        assert naive.defects(Q) <= defect_limit(U, method)
        assert naive.norm_drifts(Q @ B, B).max() <= defect_limit(U, method)


@pytest.mark.parametrize("method", ["auto", "direct"])
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("name", sorted(gen.MAKERS))
@pytest.mark.parametrize(("n", "r"), [(4, 3), (6, 3), (1, 2)])
def test_short_axis_goes_direct_and_keeps_the_contract(n, r, name, dtype, method):
    U, V, B = draw(name, dtype, n, r)
    Q = LowRankSkew(U, V, method=method).expm()
    assert Q.certificate.route == "direct"
    assert naive.forward_errors(Q @ B, U, V, B) <= forward_bound(U, V)
    assert naive.defects(Q) <= defect_limit(U, method)
    assert naive.norm_drifts(Q @ B, B).max() <= defect_limit(U, method)


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "direct"])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_any_route_may_be_asked_for_at_any_shape(dtype, method):
    """Also "direct" for n far above m and the others for n below m."""
    for n, r in [(14, 2), (3, 2), (1, 1), (5, 4)]:
        U, V, B = draw("generic", dtype, n, r)
        Y = skew_expm_multiply(U, V, B, 0.7, method=method)
        assert naive.forward_errors(Y, U, V, B, 0.7) <= forward_bound(U, V, 0.7)


@pytest.mark.parametrize("method", ["auto", "qr"])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_defect_does_not_grow_with_the_angle(dtype, method):
    """Up to 1e13 in double precision and 1e5 in single: just below 0.01/u."""
    last = 13 if dtype in gen.DOUBLES else 5
    for exponent in range(last + 1):
        rng = np.random.default_rng(exponent)
        U, V = gen.with_norm(rng, 14, 2, dtype, 10.0**exponent)
        Q = LowRankSkew(U, V, method=method).expm()
        assert naive.defects(Q) <= defect_limit(U, method)


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_a_large_t_is_a_large_norm(dtype, method):
    """The angle may come from t as well as from the factors."""
    last = 13 if dtype in gen.DOUBLES else 5
    rng = np.random.default_rng(0)
    U, V = gen.with_norm(rng, 14, 2, dtype, 1.0)
    S = LowRankSkew(U, V, method=method)
    for exponent in range(0, last + 1, 4):
        Q = S.expm(10.0**exponent)
        assert naive.defects(Q) <= defect_limit(U, "qr" if method == "qr" else "auto")


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_angles_that_are_prescribed_turn_a_plane_by_them(dtype, method):
    """exp(tS) u₁ = cos(tθ) u₁ - sin(tθ) v₁ where u₁ and v₁ are orthogonal, of equal norm."""
    angles = [2.0, 1e-3]
    U, V = gen.with_angles(np.random.default_rng(1), 14, angles, dtype)
    Y = skew_expm_multiply(U, V, U, 0.5, method=method)
    half = 0.5 * np.array(angles)
    expected = np.cos(half) * U - np.sin(half) * V
    # Rounding the factors to dtype moves their angles by a few u too.
    size = np.linalg.norm(U, axis=0)
    assert (np.linalg.norm(Y - expected, axis=0) / size).max() <= 60 * gen.unit(dtype)


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("name", ["generic", "huge", "nearly_parallel", "scaled_columns"])
def test_two_runs_give_the_same_bits(name, dtype, method):
    U, V, B = draw(name, dtype)
    first = skew_expm_multiply(U, V, B, 0.7, method=method)
    skew_expm_multiply(*draw("generic", "float64", 30, 3), method=method)
    copies = (a.copy() for a in (U, V, B))
    second = skew_expm_multiply(*copies, 0.7, method=method)
    assert first.tobytes() == second.tobytes()


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("name", ["generic", "tiny", "nearly_parallel", "rank_deficient", "huge"])
def test_grid_is_its_single_calls(name, dtype, method):
    U, V, B = draw(name, dtype)
    grid = np.array([-3.0, 0.0, 1e-3, 1.0, 7.0]).astype(np.zeros(0, dtype).real.dtype)
    Y = skew_expm_multiply(U, V, B, grid, method=method)
    assert Y.dtype == dtype
    np.testing.assert_array_equal(Y[1], B)
    for t, y in zip(grid.tolist(), Y, strict=True):
        single = skew_expm_multiply(U, V, B, t, method=method)
        difference = naive.relative(
            np.linalg.norm(y - single, axis=0), np.linalg.norm(B, axis=0)
        ).max()
        # Both sides may be off by the contract, in unlike directions.
        limit = forward_bound(U, V, t, method)
        assert difference <= 2 * limit
        assert naive.forward_errors(y, U, V, B, t) <= limit


@pytest.mark.parametrize("method", [*ROUTES, "direct"])
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("name", sorted(gen.MAKERS))
def test_minus_t_is_the_adjoint_and_the_inverse(name, dtype, method):
    U, V, B = draw(name, dtype)
    S = LowRankSkew(U, V, method=method)
    forth, back = S.expm(0.7), S.expm(-0.7)
    bound = 2 * forward_bound(U, V, 0.7, method)  # one for each of the two operators
    assert np.linalg.norm(dense(forth) - dense(back).conj().T, 2) <= bound
    returned = back @ (forth @ B)
    assert np.linalg.norm(returned - B) <= bound * np.linalg.norm(B)
    adjoint = forth.H @ (forth @ B)
    assert np.linalg.norm(adjoint - B) <= bound * np.linalg.norm(B)


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_certificate_lies_above_the_true_defect(dtype, method):
    """Here without an exception; the contract allows one in a thousand (see accuracy.py)."""
    rng = np.random.default_rng(11)
    ratios = []
    for index in range(60):
        n, r = int(rng.integers(8, 16)), int(rng.integers(1, 4))
        name = "parallel_at_random" if index % 2 else list(gen.MAKERS)[index % len(gen.MAKERS)]
        U, V = gen.MAKERS[name](rng, n, r, dtype)
        try:
            Q = LowRankSkew(U, V, method=method).expm()
        except ValueError:  # "gram" by name may refuse, where its Gram matrix says nothing about S
            assert method == "gram"
            continue
        true, bound = naive.defects(Q).item(), float(Q.certificate.defect_bound)
        assert true <= bound, (name, n, r, index)
        if true > 20 * gen.unit(dtype) and np.isfinite(bound):
            ratios.append(bound / true)
    assert not ratios or np.median(ratios) <= 30


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_gram_loses_what_qr_keeps_and_auto_notices(dtype):
    """The case that the certificate exists for: large factors that span the same directions."""
    rng = np.random.default_rng(12)
    size = 30.0 if gen.unit(dtype) < 1e-10 else 5.0
    U, V = gen.nearly_parallel(rng, 14, 2, dtype, eps=1e-3, size=size)
    gram, auto = (LowRankSkew(U, V, method=method).expm() for method in ("gram", "auto"))
    assert naive.defects(gram) > defect_limit(U, "auto")
    assert gram.certificate.route == "gram"
    assert auto.certificate.route == "qr"
    assert naive.defects(auto) <= defect_limit(U, "auto")


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_auto_stays_with_gram_on_generic_problems(dtype):
    for r in (1, 4, 16, 32):
        U, V = gen.generic(np.random.default_rng(r), 200, r, dtype)
        assert LowRankSkew(U, V).expm().certificate.route == "gram"


@pytest.mark.parametrize("method", ROUTES)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_wide_factors(dtype, method):
    """m = 32, and in real arithmetic 80: beyond the sizes that are compiled."""
    for n, r in [(40, 16)] if dtype.startswith("c") else [(40, 16), (90, 40)]:
        U, V = gen.generic(np.random.default_rng(r), n, r, dtype)
        Q = LowRankSkew(U, V, method=method).expm(0.3)
        assert naive.defects(Q) <= defect_limit(U, "qr" if method == "qr" else "auto")


def test_wide_factors_forward():
    rng = np.random.default_rng(13)
    for dtype, method in [("float64", "gram"), ("complex64", "qr")]:
        U, V = gen.generic(rng, 40, 12, dtype)
        B = gen.normal(rng, (40, 1), dtype)
        Y = skew_expm_multiply(U, V, B, 0.3, method=method)
        assert naive.forward_errors(Y, U, V, B, 0.3) <= forward_bound(U, V, 0.3)


@settings(deadline=None, max_examples=60)
@given(
    size=gen.sizes,
    dtype=gen.dtypes,
    name=gen.makers,
    t=gen.times,
    method=st.sampled_from(ROUTES),
    seed=gen.seeds,
)
def test_contract_on_drawn_problems(size, dtype, name, t, method, seed):
    n, r, k = size
    n, r = n % 13, r % 4
    rng = np.random.default_rng(seed)
    U, V = gen.MAKERS[name](rng, n, r, dtype) if n and r else gen.both_zero(rng, n, r, dtype)
    B = gen.normal(rng, (n, k), dtype)
    try:
        Q = LowRankSkew(U, V, method=method).expm(t)
    except ValueError:  # "gram" by name, where it is nowhere near unitary
        assert method == "gram"
        return
    Y = Q @ B
    assert Y.shape == B.shape
    assert Y.dtype == dtype
    assert naive.forward_errors(Y, U, V, B, t) <= forward_bound(U, V, t, method)
    assert naive.defects(Q) <= max(float(Q.certificate.defect_bound), 0.0)
    if method != "gram" and gen.theta(U, V, t) <= 0.01 / gen.unit(dtype):
        limit = DEFECT[method] * np.sqrt(max(2 * r, 1)) * gen.unit(dtype)
        assert naive.defects(Q) <= limit
        assert naive.norm_drifts(Y, B).max(initial=0.0) <= limit


@settings(deadline=None, max_examples=40)
@given(shapes=gen.batches(), dtype=gen.dtypes, grid=st.integers(0, 2), seed=gen.seeds)
def test_batches_are_their_elements(shapes, dtype, grid, seed):
    rng = np.random.default_rng(seed)
    n, r, k = 7, 2, 2
    U, V, B = (
        gen.normal(rng, (*shape, n, width), dtype) / 2
        for shape, width in zip(shapes, (r, r, k), strict=True)
    )
    t = rng.standard_normal(grid).astype(U.real.dtype) if grid else 0.5
    Y = skew_expm_multiply(U, V, B, t)
    assert Y.shape == naive.result_shape(U, V, B, t)
    for index, u, v, b, s in naive.elements(U, V, B, t):
        single = skew_expm_multiply(u, v, b, s)
        difference = np.linalg.norm(Y[index] - single) / np.linalg.norm(b)
        assert difference <= 2 * forward_bound(u, v, s)
