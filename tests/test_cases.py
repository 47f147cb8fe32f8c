"""Inputs that broke neighbouring libraries, and what has to happen to them here.

The docstrings name the public report where one member of a kind was seen; the other tests of a
group are its siblings.

Tolerances are C·u·max(1, ρ). C is 40 where the accuracy contract is the reason and smaller
where one rounding is all that may happen; the smaller ones say why.
"""

import gc
import os
import shutil
import subprocess
import sys
import textwrap
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import lowrank_expm
from lowrank_expm import LowRankSkew, expm_multiply, skew_expm_multiply

from . import generators as gen
from . import naive

FORWARD = 40
METHODS = ("auto", "gram", "qr", "direct")


def generic(n, r, k, dtype="float64", seed=0):
    rng = np.random.default_rng(seed)
    return *gen.generic(rng, n, r, dtype), gen.normal(rng, (n, k), dtype)


def bound(U, V, t=1.0, factor=FORWARD):
    return factor * gen.unit(np.result_type(U, V)) * max(1.0, gen.rho(U, V, t))


def distance(Y, Z, B):
    """The worst relative distance of two results among all columns."""
    size = np.broadcast_to(np.linalg.norm(B, axis=-2), Y.shape[:-2] + Y.shape[-1:])
    return naive.relative(np.linalg.norm(Y - Z, axis=-2), size).max(initial=0.0)


PACKAGE = Path(lowrank_expm.__file__).parent


def python(script, env=None):
    """A script in a new interpreter that finds the package where this one found it."""
    environment = {**os.environ, "PYTHONPATH": str(PACKAGE.parent), **(env or {})}
    done = subprocess.run(
        [sys.executable, "-P", "-c", textwrap.dedent(script)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


# --- grids of t ------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("start", "stop"), [(10, 11), (100, 101), (-101, -100), (0, 1), (-1, 1)])
def test_grid_away_from_zero(start, stop, method):
    """scipy #16311 and #16363: a grid that starts away from 0."""
    rng = np.random.default_rng(1)
    U, V = gen.with_norm(rng, 9, 2, "float64", 8.0)
    B = rng.standard_normal((9, 2))
    grid = np.linspace(start, stop, 5)
    Y = skew_expm_multiply(U, V, B, grid, method=method)
    for t, y in zip(grid.tolist(), Y, strict=True):
        single = skew_expm_multiply(U, V, B, t, method=method)
        assert distance(y, single, B) <= bound(U, V, t)
        assert naive.forward_errors(y, U, V, B, t) <= bound(U, V, t)


@pytest.mark.parametrize(
    "grid",
    [[3.0], [2.0, 2.0, 2.0], [5.0, -1.0, 0.0, 1e-9, 40.0], [-0.0, 0.0], np.arange(4), []],
    ids=str,
)
def test_grid_of_any_kind(grid):
    """One point, repeated, unsorted, of unlike sizes, of integers, empty."""
    U, V, B = generic(9, 2, 2)
    grid = np.asarray(grid, dtype=None if len(grid) else float)
    Y = skew_expm_multiply(U, V, B, grid)
    assert Y.shape == (len(grid), 9, 2)
    assert (naive.forward_errors(Y, U, V, B, grid) <= bound(U, V, 40.0)).all()


def test_grid_in_a_batch_leads():
    U, V, B = generic(9, 2, 2)
    batch = np.stack([B, -B, 2 * B])
    Y = skew_expm_multiply(U, V, batch, np.array([1.0, 2.0]))
    assert Y.shape == (2, 3, 9, 2)
    assert (naive.forward_errors(Y, U, V, batch, np.array([1.0, 2.0])) <= bound(U, V, 2)).all()


def test_grid_of_general_low_rank():
    L, R, B = generic(9, 2, 2)
    grid = np.linspace(5, 6, 3)
    Y = expm_multiply(L, R, B, grid)
    for t, y in zip(grid.tolist(), Y, strict=True):
        exact = naive.general_multiply_mp(L, R, B, t)
        # exp(t L Rᴴ) may be large: its condition enters through ρ and its own norm.
        scale = np.linalg.norm(naive.general_multiply_mp(L, R, np.eye(9), t), 2)
        assert np.linalg.norm(y - exact) <= bound(L, R, t) * scale * np.linalg.norm(B)


def test_grid_of_two_dimensions_is_refused():
    U, V, B = generic(9, 2, 2)
    with pytest.raises(ValueError, match="t"):
        skew_expm_multiply(U, V, B, np.ones((2, 2)))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [2, 5])
def test_grid_that_runs_backwards(n, method):
    """scipy #16375: rotation by one angle, from 50 down to 0, in closed form."""
    U, V = np.zeros(n), np.zeros(n)
    U[0] = V[1] = 1.0
    grid = np.linspace(50.0, 0.0, 11)
    Y = skew_expm_multiply(U, V, np.eye(n), grid, method=method)
    for t, y in zip(grid.tolist(), Y, strict=True):
        c, s = np.cos(t), np.sin(t)
        np.testing.assert_allclose(y[:2, :2], [[c, s], [-s, c]], atol=bound(U, V, t), rtol=0)
    np.testing.assert_array_equal(Y[:, 2:, 2:], np.broadcast_to(np.eye(n - 2), (11, n - 2, n - 2)))
    np.testing.assert_array_equal(Y[-1], np.eye(n))


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_backwards_is_the_adjoint_of_forwards(dtype):
    U, V, _ = generic(9, 2, 1, dtype)
    grid = np.linspace(5.0, 0.0, 4).astype(U.real.dtype)
    identity = np.eye(9, dtype=dtype)
    forth = skew_expm_multiply(U, V, identity, grid)
    back = skew_expm_multiply(U, V, identity, -grid)
    for t, a, b in zip(grid.tolist(), forth, back, strict=True):
        assert np.linalg.norm(a - b.conj().T, 2) <= 2 * bound(U, V, t)


# --- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [0.5, np.array([0.5, 1.0])], ids=["single", "grid"])
def test_imaginary_part_of_b_survives(t):
    """scipy #6377: real U and V, complex B, a grid."""
    U, V, B = generic(9, 2, 2)
    z = B + 1j * B[::-1]
    Y = skew_expm_multiply(U, V, z, t)
    assert Y.dtype == np.complex128
    assert (naive.forward_errors(Y, U, V, z, t) <= bound(U, V)).all()
    S = LowRankSkew(U, V)
    assert (S @ z).dtype == np.complex128
    np.testing.assert_allclose(S.expm(0.5) @ z, skew_expm_multiply(U, V, z, 0.5), rtol=1e-13)
    assert (S.expm(0.5).H @ z).dtype == np.complex128


MIXED = [
    ("float32", "float32", "float64"),
    ("float64", "float32", "float32"),
    ("float32", "complex64", "float32"),
    ("complex64", "float32", "float32"),
    ("float32", "float32", "complex64"),
    ("complex64", "complex64", "float64"),
    ("float64", "float64", "complex64"),
    ("int64", "float64", "complex128"),
    ("float64", "bool", "float64"),
    ("float64", "float64", "int8"),
]


@pytest.mark.parametrize("grid", [False, True])
@pytest.mark.parametrize("kinds", MIXED, ids="-".join)
def test_result_has_the_promoted_dtype(kinds, grid):
    rng = np.random.default_rng(3)
    U, V, B = (
        (rng.standard_normal(s) * (1 + (1j if kind.startswith("c") else 0))).astype(kind)
        for s, kind in zip([(9, 2), (9, 2), (9, 3)], kinds, strict=True)
    )
    t = np.array([0.25, 0.5], "float32") if grid else 0.5
    Y = skew_expm_multiply(U, V, B, t)
    assert Y.dtype == np.result_type(U, V, B)
    # Factors in single precision are not turned in double: their own u counts.
    u = max(gen.unit(a.dtype) for a in (U, V, B) if a.dtype.kind in "fc")
    tolerance = FORWARD * u * max(1.0, gen.rho(U, V, 0.5))
    assert (naive.forward_errors(Y, U, V, B, t) <= tolerance).all()


def test_an_array_t_takes_part_in_promotion():
    U, V, B = generic(9, 2, 2, "float32")
    assert skew_expm_multiply(U, V, B, 0.5).dtype == np.float32
    assert skew_expm_multiply(U, V, B, 1).dtype == np.float32
    assert skew_expm_multiply(U, V, B, np.asarray(0.5)).dtype == np.float64
    assert skew_expm_multiply(U, V, B, np.array([0.5])).dtype == np.float64
    assert expm_multiply(U, V, B, 0.5j).dtype == np.complex64


def test_complex_t_with_real_factors():
    L, R, B = generic(9, 2, 2)
    t = 0.5 - 0.25j
    Y = expm_multiply(L, R, B, t)
    assert Y.dtype == np.complex128
    assert naive.general_errors(Y, L, R, B, t) <= 2 * bound(L, R, t)  # ‖exp(t L Rᴴ)‖ is 2 here


@pytest.mark.parametrize(
    "kind", ["int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
)
def test_integers_become_floats_before_any_product(kind):
    """scipy #8981: products of these overflow in their own type, and 0 - 1 is 255 in uint8."""
    rng = np.random.default_rng(4)
    top = 120
    U, V, B = (rng.integers(0, top, s).astype(kind) for s in [(9, 2), (9, 2), (9, 2)])
    t = 1e-4
    Y = skew_expm_multiply(U, V, B, t)
    assert Y.dtype == np.float64
    assert naive.forward_errors(Y, U, V, B, t) <= FORWARD * gen.unit("float64") * gen.rho(U, V, t)
    Z = expm_multiply(U, V, B, -t)
    assert Z.dtype == np.float64
    scale = np.linalg.norm(naive.general_multiply_mp(U, V, np.eye(9), -t), 2)
    tolerance = FORWARD * gen.unit("float64") * gen.rho(U, V, t) * scale
    assert naive.general_errors(Z, U, V, B, -t) <= tolerance


def test_large_integers():
    U = np.full((9, 1), 2**40)
    V = (np.arange(9)[:, None] - 4) * 2**40
    B = np.arange(18).reshape(9, 2)
    t = 2.0**-82
    assert naive.forward_errors(skew_expm_multiply(U, V, B, t), U, V, B, t) <= FORWARD * 2e-16 * (
        max(1.0, gen.rho(U, V, t))
    )


def test_booleans():
    rng = np.random.default_rng(5)
    U, V, B = (rng.integers(0, 2, s).astype(bool) for s in [(9, 2), (9, 2), (9, 2)])
    Y = skew_expm_multiply(U, V, B)
    assert Y.dtype == np.float64
    tolerance = FORWARD * gen.unit("float64") * max(1.0, gen.rho(U, V))
    assert naive.forward_errors(Y, U, V, B) <= tolerance


def test_half_precision_computes_in_single_and_comes_back():
    U, V, B = generic(9, 2, 2, "float16")
    Y = skew_expm_multiply(U, V, B)
    assert Y.dtype == np.float16
    # The final rounding to half precision is nearly all of the error.
    assert naive.forward_errors(Y, U, V, B) <= 2 * gen.unit("float16")


@pytest.mark.parametrize("kind", ["longdouble", "clongdouble", "object", "U5", "M8[s]"])
@pytest.mark.parametrize("argument", ["U", "V", "B"])
def test_other_dtypes_are_refused(argument, kind):
    inputs = dict(zip("UVB", generic(9, 2, 2), strict=True))
    inputs[argument] = np.zeros((9, 2), dtype=kind)
    with pytest.raises(TypeError):
        skew_expm_multiply(**inputs)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("size", [1e-4, 1e-8, 1e-12, 1e-16])
@pytest.mark.parametrize("method", METHODS)
def test_identity_term_of_a_small_problem(dtype, size, method):
    """scipy #21584: complex64 and a norm of 1e-4. Y rounds once, and S B itself loses little."""
    rng = np.random.default_rng(6)
    U, V = gen.with_norm(rng, 9, 2, dtype, size)
    B = U / np.linalg.norm(U, axis=0)  # inside the range, where S acts
    Y = skew_expm_multiply(U, V, B, method=method)
    assert naive.forward_errors(Y, U, V, B) <= 4 * gen.unit(dtype)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_small_problem_through_a_small_t(dtype):
    U, V, _ = generic(9, 2, 2, dtype)
    B = U / np.linalg.norm(U, axis=0)
    for t in (1e-4, 1e-9, 1e-30):
        Y = skew_expm_multiply(U, V, B, t)
        assert naive.forward_errors(Y, U, V, B, t) <= 4 * gen.unit(dtype)


# --- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_unlike_norms_in_one_batch(dtype, method):
    """scipy #25924: norms from 1e-12 to 3e3, each element as good as on its own."""
    rng = np.random.default_rng(7)
    norms = [1e-12, 1e-6, 0.0, 1e-3, 1.0, 30.0, 3e3]
    pairs = [gen.with_norm(rng, 9, 2, dtype, norm) for norm in norms]
    U, V = (np.stack(side) for side in zip(*pairs, strict=True))
    B = gen.normal(rng, (9, 2), dtype)
    Y = skew_expm_multiply(U, V, B, method=method)
    for u, v, y in zip(U, V, Y, strict=True):
        single = skew_expm_multiply(u, v, B, method=method)
        assert distance(y, single, B) <= bound(u, v)
        assert naive.forward_errors(y, u, v, B) <= bound(u, v)
    # The small elements lose nothing to the large ones they share a batch with.
    assert (naive.forward_errors(Y, U, V, B)[:4] <= 5 * gen.unit(dtype)).all()


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_unlike_kinds_in_one_batch(dtype):
    """Of every element the operator is orthogonal, though a few of them need another route."""
    rng = np.random.default_rng(8)
    pairs = [make(rng, 9, 2, dtype) for make in gen.MAKERS.values()]
    U, V = (np.stack(side) for side in zip(*pairs, strict=True))
    Q = LowRankSkew(U, V).expm()
    assert (naive.defects(Q) <= 80 * 2 * gen.unit(dtype)).all()  # √m = 2
    B = gen.normal(rng, (9, 2), dtype)
    Y = Q @ B
    for u, v, y in zip(U, V, Y, strict=True):
        assert naive.forward_errors(y, u, v, B) <= bound(u, v)


@pytest.mark.parametrize("rank", [0, 1, 2, 3, 4])
@pytest.mark.parametrize("n", [4, 9])
def test_batch_of_any_rank(rank, n):
    """pytorch #85001: shape (7, 3) and its like. Warnings are errors in this test run."""
    shape = (7, 3, 2, 1)[:rank]
    rng = np.random.default_rng(9)
    U, V, B = (rng.standard_normal((*shape, n, 2)) / 2 for _ in range(3))
    Y = skew_expm_multiply(U, V, B)
    assert Y.shape == B.shape
    errors = naive.forward_errors(Y, U, V, B)
    rhos = [gen.rho(u, v) for _, u, v, _, _ in naive.elements(U, V, B)]
    assert (errors.ravel() <= FORWARD * gen.unit("float64") * np.maximum(1, rhos)).all()
    Q = LowRankSkew(U, V).expm()
    assert (Q @ B).shape == B.shape
    assert Q.to_dense().shape == (*shape, n, n)
    assert (expm_multiply(U, V, B)).shape == B.shape


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_empty_batch_keeps_its_shape(dtype, method):
    """pytorch #50576: shape (1, 0, 2, 4, 5)."""
    for n, r in [(4, 5), (12, 2)]:
        U = np.zeros((1, 0, 2, n, r), dtype)
        B = np.zeros((1, 0, 2, n, 3), dtype)
        Y = skew_expm_multiply(U, U, B, method=method)
        assert (Y.shape, Y.dtype) == (B.shape, np.dtype(dtype))
        grid = np.ones(2, U.real.dtype)
        assert skew_expm_multiply(U, U, B, grid, method=method).shape == (2, *B.shape)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("batch", [(), (3,), (0,), (2, 0, 1)])
@pytest.mark.parametrize(
    ("n", "r", "k"),
    [(0, 2, 3), (5, 0, 3), (5, 2, 0), (0, 0, 3), (0, 2, 0), (5, 0, 0), (0, 0, 0)],
)
def test_empty_axes(n, r, k, batch, method):
    """dask #3659: blocks of height zero; and no columns in U, in B, or anywhere."""
    U, B = np.ones((*batch, n, r)), np.ones((*batch, n, k))
    Y = skew_expm_multiply(U, U, B, method=method)
    assert (Y.shape, Y.dtype) == (B.shape, B.dtype)
    np.testing.assert_array_equal(expm_multiply(U, U, B).shape, B.shape)
    if r == 0:
        np.testing.assert_array_equal(Y, B)
        np.testing.assert_array_equal(expm_multiply(U, U, B), B)
    assert skew_expm_multiply(U, U, B, np.ones(2), method=method).shape == (2, *B.shape)
    assert skew_expm_multiply(U, U, B, np.ones(0), method=method).shape == (0, *B.shape)


@pytest.mark.parametrize(("n", "r"), [(0, 2), (5, 0), (0, 0)])
def test_objects_of_empty_axes(n, r):
    S = LowRankSkew(np.ones((n, r)), np.ones((n, r)))
    assert S.shape == (n, n)
    assert S.norm() == 0
    assert S.norm("fro") == 0
    Q = S.expm()
    np.testing.assert_array_equal(Q.to_dense(), np.eye(n))
    np.testing.assert_array_equal(S.to_dense(), np.zeros((n, n)))
    assert Q.orthogonality_defect() == 0
    assert (Q.H @ np.ones((n, 2))).shape == (n, 2)


def test_empty_vectors():
    assert skew_expm_multiply(np.ones(0), np.ones(0), np.ones(0)).shape == (0,)
    assert skew_expm_multiply(np.ones((0, 2)), np.ones((0, 2)), np.ones(0)).shape == (0,)


def test_general_of_an_empty_batch():
    Y = expm_multiply(np.zeros((1, 0, 4, 5)), np.zeros((2, 0, 4, 5)), np.zeros((4, 3)), 2j)
    assert (Y.shape, Y.dtype) == ((2, 0, 4, 3), np.dtype(complex))


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(
    "shapes",
    [
        ((1,), (3,), (3,)),
        ((3,), (1,), (1,)),
        ((), (3,), ()),
        ((), (), (3,)),
        ((3,), (), ()),
        ((2, 1), (3,), ()),
        ((2, 1), (1, 3), (3,)),
        ((1, 1, 1), (), (2, 1, 3)),
        ((1,), (0,), (1,)),
    ],
    ids=str,
)
def test_batch_axes_broadcast(shapes, method):
    """cupy #8173: a batch (1, ...) against a batch (3, ...)."""
    rng = np.random.default_rng(10)
    U, V, B = (rng.standard_normal((*shape, 7, 2)) / 2 for shape in shapes)
    Y = skew_expm_multiply(U, V, B, method=method)
    assert (naive.forward_errors(Y, U, V, B) <= 3 * FORWARD * gen.unit("float64")).all()
    Z = expm_multiply(U, V, B)
    assert Z.shape == Y.shape
    assert (naive.general_errors(Z, U, V, B) <= 1e-12).all()


@pytest.mark.parametrize("shapes", [((2,), (3,), ()), ((2,), (), (3,)), ((2, 1), (2, 2), (3,))])
def test_batch_axes_that_do_not_broadcast(shapes):
    U, V, B = (np.ones((*shape, 7, 2)) for shape in shapes)
    with pytest.raises(ValueError, match=r"\d"):
        skew_expm_multiply(U, V, B)


@settings(deadline=None, max_examples=60)
@given(size=gen.sizes, shapes=gen.batches(), dtype=gen.dtypes, t=gen.times, seed=gen.seeds)
def test_any_shape_gives_the_right_shape_and_norm(size, shapes, dtype, t, seed):
    n, r, k = size
    rng = np.random.default_rng(seed)
    scale = 1 / np.sqrt(max(n, 1))
    U, V, B = (
        gen.normal(rng, (*shape, n, width), dtype) * np.asarray(scale, dtype)
        for shape, width in zip(shapes, (r, r, k), strict=True)
    )
    Y = skew_expm_multiply(U, V, B, t)
    assert Y.shape == naive.result_shape(U, V, B, t)
    assert Y.dtype == dtype
    drifts = naive.norm_drifts(Y, B)
    assert drifts.max(initial=0.0) <= 80 * np.sqrt(max(1, 2 * r)) * gen.unit(dtype)


# --- nothing to turn -------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("make", [gen.both_zero, gen.one_zero])
def test_zero_generator_returns_b_exactly(make, dtype, method):
    """scipy #21618, jax #2131: U = V = 0, and U = 0 alone, where J G is nilpotent."""
    rng = np.random.default_rng(11)
    U, V = make(rng, 9, 2, dtype)
    B = gen.normal(rng, (9, 2), dtype)
    np.testing.assert_array_equal(skew_expm_multiply(U, V, B, method=method), B)
    np.testing.assert_array_equal(skew_expm_multiply(V, U, B, -3.0, method=method), B)
    S = LowRankSkew(U, V, method=method)
    assert S.norm() <= bound(U, V)
    assert not S.to_dense().any()


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("name", sorted(gen.MAKERS))
def test_time_zero_returns_b_exactly(name, dtype, method):
    rng = np.random.default_rng(12)
    U, V = gen.MAKERS[name](rng, 9, 2, dtype)
    B = gen.normal(rng, (9, 2), dtype)
    for t in (0.0, -0.0, 0, np.zeros((), U.real.dtype)):
        Y = skew_expm_multiply(U, V, B, t, method=method)
        assert Y is not B
        np.testing.assert_array_equal(Y, B)
    np.testing.assert_array_equal(LowRankSkew(U, V, method=method).expm(0.0) @ B, B)
    np.testing.assert_array_equal(expm_multiply(U, V, B, 0.0), B)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_equal_factors_cancel_to_rounding(dtype, method):
    """S = 0 through cancellation."""
    rng = np.random.default_rng(13)
    U, V = gen.equal(rng, 9, 2, dtype)
    B = gen.normal(rng, (9, 2), dtype)
    Y = skew_expm_multiply(U, V, B, method=method)
    assert distance(Y, B, B) <= bound(U, V)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_nilpotent_general_problem(dtype):
    """exp of a nilpotent matrix is a polynomial: I + t M + t² M²/2 + ..., exactly as many terms."""
    rng = np.random.default_rng(14)
    L, R = gen.nilpotent(rng, 9, 3, dtype)
    B = gen.normal(rng, (9, 2), dtype)
    for t in (1.0, -2.5):
        scale = np.linalg.norm(naive.general_multiply_mp(L, R, np.eye(9), t), 2)
        assert naive.general_errors(expm_multiply(L, R, B, t), L, R, B, t) <= bound(L, R, t) * scale


@pytest.mark.parametrize("zero", ["L", "R", "both"])
def test_general_problem_with_a_zero_factor(zero):
    L, R, B = generic(9, 2, 2)
    L, R = (L * (zero == "R"), R * (zero == "L"))
    np.testing.assert_array_equal(expm_multiply(L, R, B), B)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_b_beside_the_support_comes_back_bit_for_bit(dtype, method):
    """CriticalTransitions.jl #387: B orthogonal to the range of [U V], here with no rounding."""
    rng = np.random.default_rng(15)
    U, V = gen.generic(rng, 12, 2, dtype)
    B = gen.normal(rng, (12, 2), dtype)
    U[7:], V[7:], B[:7] = 0, 0, 0
    np.testing.assert_array_equal(skew_expm_multiply(U, V, B, method=method), B)
    np.testing.assert_array_equal(expm_multiply(U, V, B), B)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_b_orthogonal_to_the_range_comes_back(dtype, method):
    rng = np.random.default_rng(16)
    E = gen.frame(rng, 12, 6, dtype)
    U, V, B = 3 * E[:, :2], 3 * E[:, 2:4], E[:, 4:]
    Y = skew_expm_multiply(U, V, B, method=method)
    assert distance(Y, B, B) <= bound(U, V)


# --- values that are not numbers ---------------------------------------------------------------

BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("argument", ["U", "V", "B"])
@pytest.mark.parametrize("method", METHODS)
def test_a_value_that_is_not_finite_is_named(argument, bad, method):
    """pytorch #82282: NaN or infinity in one element of a batch, never a finite answer."""
    rng = np.random.default_rng(17)
    inputs = {name: rng.standard_normal((3, 9, 2)) for name in "UVB"}
    inputs[argument][1, 4, 1] = bad
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        skew_expm_multiply(**inputs, method=method)
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        skew_expm_multiply(**inputs, t=np.array([1.0, 2.0]), method=method)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize(
    ("argument", "n", "r", "k"),
    [
        *((name, *size) for name in "UVB" for size in [(9, 2, 2), (3, 2, 2), (9, 1, 1)]),
        ("U", 9, 2, 0),
        ("V", 9, 2, 0),
        ("B", 9, 0, 2),
    ],
)
def test_a_value_that_is_not_finite_in_any_dtype_and_shape(argument, dtype, n, r, k):
    inputs = dict(zip("UVB", generic(n, r, k, dtype), strict=True))
    inputs[argument].real[-1, -1] = np.nan
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        skew_expm_multiply(**inputs)


@pytest.mark.parametrize("argument", ["U", "V", "B"])
@pytest.mark.parametrize("bad", BAD)
def test_imaginary_part_that_is_not_finite(argument, bad):
    inputs = dict(zip("UVB", generic(9, 2, 2, "complex128"), strict=True))
    inputs[argument].imag[3, 0] = bad
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        skew_expm_multiply(**inputs)


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize("argument", ["U", "V"])
def test_a_value_that_is_not_finite_beside_zeros(argument, bad):
    """Where the other factor is zero, and where t is: 0·NaN must not pass as 0."""
    inputs = {"U": np.zeros((9, 2)), "V": np.zeros((9, 2)), "B": np.zeros((9, 2))}
    inputs[argument][3, 1] = bad
    for t in (1.0, 0.0):
        with pytest.raises(ValueError, match=rf"\b{argument}\b"):
            skew_expm_multiply(**inputs, t=t)


@pytest.mark.parametrize("argument", ["L", "R", "B"])
@pytest.mark.parametrize("bad", BAD)
def test_a_value_that_is_not_finite_in_a_general_problem(argument, bad):
    inputs = dict(zip("LRB", generic(9, 2, 2), strict=True))
    inputs[argument][3, 1] = bad
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        expm_multiply(**inputs)


@pytest.mark.parametrize("argument", ["U", "V"])
def test_a_generator_that_is_not_finite(argument):
    inputs = dict(zip("UV", generic(9, 2, 2)[:2], strict=True))
    inputs[argument][3, 1] = np.nan
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        LowRankSkew(**inputs).expm()


def test_an_operator_meets_a_b_that_is_not_finite():
    U, V, B = generic(9, 2, 2)
    B[3, 1] = np.inf
    S = LowRankSkew(U, V)
    with pytest.raises(ValueError, match=r"\bB\b"):
        S.expm_multiply(B)
    with pytest.raises(ValueError, match=r"\bB\b"):
        S.expm() @ B


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_factors_whose_products_overflow(dtype):
    big = 1e200 if dtype in gen.DOUBLES else 1e30
    U, V, B = generic(9, 2, 2, dtype)
    with pytest.raises(ValueError, match=r"overflow"):
        skew_expm_multiply(U * big, V * big, B)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_extreme_factors_that_balance_out(dtype):
    """Refused or right, but never wrong in silence: the Gram matrix itself may overflow."""
    big = 1e200 if dtype in gen.DOUBLES else 1e30
    U, V, B = generic(9, 2, 2, dtype)
    U, V = (U * big).astype(dtype), (V / big).astype(dtype)
    try:
        Y = skew_expm_multiply(U, V, B)
    except ValueError:
        return
    assert naive.forward_errors(Y, U, V, B) <= bound(U, V)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_a_general_result_that_overflows(dtype):
    E = np.ones((9, 1), dtype)
    with pytest.raises(ValueError, match=r"overflow"):
        expm_multiply(E, E, E, 1000.0)


@pytest.mark.parametrize("t", [np.inf, -np.inf, np.nan, [1.0, np.inf], [np.nan, 0.0]], ids=str)
@pytest.mark.parametrize("method", METHODS)
def test_a_time_that_is_not_finite(t, method):
    """multicalc-rust #202: an infinite norm must not be halved until it is small."""
    U, V, B = generic(9, 2, 2)
    t = np.asarray(t) if isinstance(t, list) else t
    for u in (U, 0 * U):
        with pytest.raises(ValueError, match=r"\bt\b"):
            skew_expm_multiply(u, V, B, t, method=method)
        with pytest.raises(ValueError, match=r"\bt\b"):
            LowRankSkew(u, V, method=method).expm(t)
    with pytest.raises(ValueError, match=r"\bt\b"):
        expm_multiply(U, V, B, t)


@pytest.mark.parametrize("t", [complex(np.inf, 0), complex(0, np.nan)], ids=str)
def test_a_complex_time_that_is_not_finite(t):
    U, V, B = generic(9, 2, 2)
    with pytest.raises(ValueError, match=r"\bt\b"):
        expm_multiply(U, V, B, t)


@pytest.mark.parametrize("t", [1j, 1 + 0j, np.array([1j]), np.array(1j)], ids=str)
def test_a_complex_time_would_not_be_unitary(t):
    U, V, B = generic(9, 2, 2, "complex128")
    with pytest.raises(TypeError, match=r"\bt\b"):
        skew_expm_multiply(U, V, B, t)
    with pytest.raises(TypeError, match=r"\bt\b"):
        LowRankSkew(U, V).expm(t)


@pytest.mark.parametrize("t", [1e300, -1e300, 1e20])
def test_a_time_beyond_all_digits(t):
    """Finite but senseless: refused, or orthogonal still; no endless loop, nothing non-finite."""
    U, V, B = generic(9, 2, 2)
    try:
        Y = skew_expm_multiply(U, V, B, t)
    except ValueError:
        return
    assert naive.norm_drifts(Y, B).max() <= 80 * 2 * gen.unit("float64")  # √m = 2


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_gram_by_name_where_it_breaks_down(dtype):
    """The Gram matrix of these has no digit of S left: refused or certified, never in silence."""
    rng = np.random.default_rng(0)
    U = 300 * gen.normal(rng, (12, 2), dtype)
    V = U @ np.array([[1, 0.3], [0.3, -1]], dtype) + 1e-4 * gen.normal(rng, (12, 2), dtype)
    try:
        Q = LowRankSkew(U, V, method="gram").expm()
        Y = Q @ U
    except ValueError:
        return
    assert np.isfinite(Y).all()
    assert naive.defects(Q) <= Q.certificate.defect_bound


# --- shapes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [2, 3])
def test_b_is_a_vector_only_when_it_has_one_dimension(n):
    """numpy #28709: B of shape (2, 2) with U of shape (2, 2, 1)."""
    rng = np.random.default_rng(18)
    U, V, B = (rng.standard_normal(s) for s in [(n, n, 1), (n, n, 1), (n, n)])
    Y = skew_expm_multiply(U, V, B)
    assert Y.shape == (n, n, n)
    tolerance = [bound(u, v) for u, v in zip(U, V, strict=True)]
    assert (naive.forward_errors(Y, U, V, B) <= tolerance).all()
    assert expm_multiply(U, V, B).shape == (n, n, n)
    assert (LowRankSkew(U, V).expm() @ B).shape == (n, n, n)


@pytest.mark.parametrize("width", [None, 3])
def test_one_dimensional_factors_are_one_column(width):
    rng = np.random.default_rng(19)
    u, v = rng.standard_normal((9, 1)), rng.standard_normal((9, 1))
    B = rng.standard_normal(9 if width is None else (9, width))
    Y = skew_expm_multiply(u[:, 0], v[:, 0], B)
    assert Y.shape == B.shape
    np.testing.assert_array_equal(Y, skew_expm_multiply(u, v, B))
    np.testing.assert_array_equal(expm_multiply(u[:, 0], v[:, 0], B), expm_multiply(u, v, B))


def test_a_vector_meets_a_batch_and_a_grid():
    rng = np.random.default_rng(20)
    U, V, b = (rng.standard_normal(s) / 2 for s in [(4, 9, 2), (9, 2), (9,)])
    grid = np.array([0.5, 1.0])
    Y = skew_expm_multiply(U, V, b, grid)
    assert Y.shape == (2, 4, 9)
    tall = skew_expm_multiply(U, V, b[:, None], grid)
    np.testing.assert_allclose(Y, tall[..., 0], rtol=0, atol=1e-14)
    assert (LowRankSkew(U, V).expm() @ b).shape == (4, 9)


@pytest.mark.parametrize(
    ("shape_u", "shape_v", "shape_b"),
    [
        ((9, 2), (9, 3), (9, 1)),
        ((9, 2), (8, 2), (9, 1)),
        ((9, 2), (9, 2), (8, 1)),
        ((9, 2), (9, 2), (8,)),
        ((9,), (8,), (9,)),
        ((9,), (9, 2), (9,)),
        ((9, 1), (9, 1), (1, 9)),
        ((2, 9, 2), (9, 2), (2, 9)),
    ],
)
def test_shapes_that_do_not_fit_are_both_shown(shape_u, shape_v, shape_b):
    U, V, B = (np.ones(shape) for shape in (shape_u, shape_v, shape_b))
    wrong = shape_b if shape_u[-2:] == shape_v[-2:] else shape_v
    with pytest.raises(ValueError, match=r"\d") as failure:
        skew_expm_multiply(U, V, B)
    assert str(wrong) in str(failure.value)
    assert str(shape_u) in str(failure.value) or "9" in str(failure.value)


@pytest.mark.parametrize("argument", ["U", "V", "B"])
def test_scalars_are_refused(argument):
    inputs = dict(zip("UVB", generic(9, 2, 2), strict=True))
    inputs[argument] = np.array(1.0)
    with pytest.raises(ValueError, match=rf"\b{argument}\b"):
        skew_expm_multiply(**inputs)


def test_an_unknown_method_is_refused():
    with pytest.raises(ValueError, match=r"gram"):
        skew_expm_multiply(*generic(9, 2, 2), method="padé")


# --- memory layouts ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("layout", sorted(gen.LAYOUTS))
@pytest.mark.parametrize("argument", ["U", "V", "B", "all"])
@pytest.mark.parametrize(("n", "method"), [(9, "auto"), (9, "gram"), (9, "qr"), (3, "direct")])
def test_layouts_are_accepted_and_inputs_untouched(argument, layout, dtype, n, method):
    """numba #4519, #5933, #4511: read-only, non-contiguous, negative strides, Fortran order."""
    inputs = dict(zip("UVB", generic(n, 2, 3, dtype), strict=True))
    for name in "UVB" if argument == "all" else argument:
        inputs[name] = gen.LAYOUTS[layout](inputs[name])
    before = {name: a.tobytes() for name, a in inputs.items()}
    Y = skew_expm_multiply(**inputs, method=method)
    assert {name: a.tobytes() for name, a in inputs.items()} == before
    assert naive.forward_errors(Y, **inputs) <= bound(inputs["U"], inputs["V"])


@settings(deadline=None, max_examples=60)
@given(
    layouts=st.tuples(gen.layouts, gen.layouts, gen.layouts),
    batch=st.sampled_from([(), (2,), (2, 3)]),
    vector=st.booleans(),
    dtype=gen.dtypes,
    grid=st.booleans(),
    seed=gen.seeds,
)
def test_layouts_of_batches_and_grids(layouts, batch, vector, dtype, grid, seed):
    rng = np.random.default_rng(seed)
    shapes = [(*batch, 8, 2), (*batch, 8, 2), (8,) if vector else (*batch, 8, 2)]
    U, V, B = (
        gen.LAYOUTS[layout](gen.normal(rng, shape, dtype) / 2)
        for layout, shape in zip(layouts, shapes, strict=True)
    )
    t = gen.LAYOUTS[layouts[0]](np.linspace(0, 1, 3, dtype=U.real.dtype)) if grid else 0.5
    before = [a.tobytes() for a in (U, V, B)]
    Y = skew_expm_multiply(U, V, B, t)
    assert [a.tobytes() for a in (U, V, B)] == before
    errors = naive.forward_errors(Y, U, V, B, t)
    for index, u, v, _, s in naive.elements(U, V, B, t):
        assert errors[index] <= bound(u, v, s)


@pytest.mark.parametrize("layout", sorted(gen.LAYOUTS))
def test_layouts_of_a_general_problem_and_of_objects(layout):
    L, R, B = (gen.LAYOUTS[layout](a) for a in generic(9, 2, 3))
    before = [a.tobytes() for a in (L, R, B)]
    scale = np.linalg.norm(naive.general_multiply_mp(L, R, np.eye(9)), 2)
    assert naive.general_errors(expm_multiply(L, R, B), L, R, B) <= bound(L, R) * scale
    Q = LowRankSkew(L, R).expm()
    assert naive.forward_errors(Q @ B, L, R, B) <= bound(L, R)
    assert [a.tobytes() for a in (L, R, B)] == before


def test_memory_mapped_inputs(tmp_path):
    U, V, B = generic(40, 2, 3)
    mapped = []
    for name, a in zip("UVB", (U, V, B), strict=True):
        np.save(tmp_path / f"{name}.npy", a)
        mapped.append(np.load(tmp_path / f"{name}.npy", mmap_mode="r"))
    Y = skew_expm_multiply(*mapped)
    np.testing.assert_array_equal(Y, skew_expm_multiply(U, V, B))


def test_nested_lists_and_foreign_byte_order_never_give_a_wrong_answer():
    U, V, B = generic(9, 2, 3)
    expected = skew_expm_multiply(U, V, B)
    for inputs in [
        [a.tolist() for a in (U, V, B)],
        [a.astype(a.dtype.newbyteorder()) for a in (U, V, B)],
    ]:
        try:
            Y = skew_expm_multiply(*inputs)
        except TypeError:
            continue
        np.testing.assert_array_equal(Y, expected)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_out_takes_the_result_and_may_be_b(dtype, method):
    U, V, B = generic(9, 2, 3, dtype)
    expected = skew_expm_multiply(U, V, B, 0.7, method=method)
    out = np.full_like(B, np.nan)
    assert skew_expm_multiply(U, V, B, 0.7, method=method, out=out) is out
    np.testing.assert_array_equal(out, expected)
    assert skew_expm_multiply(U, V, B, 0.7, method=method, out=B) is B
    np.testing.assert_array_equal(B, expected)


@pytest.mark.parametrize("layout", ["Fortran", "reversed", "sliced"])
def test_out_of_any_layout(layout):
    U, V, B = generic(9, 2, 3)
    out = gen.LAYOUTS[layout](np.zeros((9, 3)))
    assert skew_expm_multiply(U, V, B, out=out) is out
    tolerance = bound(U, V) * np.linalg.norm(B)
    np.testing.assert_allclose(out, skew_expm_multiply(U, V, B), rtol=0, atol=tolerance)
    same = gen.LAYOUTS[layout](B)
    assert skew_expm_multiply(U, V, same, out=same) is same
    np.testing.assert_allclose(same, out, rtol=0, atol=tolerance)


def test_out_for_vectors_grids_and_batches():
    U, V, B = generic(9, 2, 1)
    b = B[:, 0].copy()
    for right, t, shape in [
        (b, 0.5, (9,)),
        (b, np.array([0.5, 1.0]), (2, 9)),
        (np.stack([B, 2 * B]), 0.5, (2, 9, 1)),
        (np.stack([B, 2 * B]), np.array([0.5, 1.0]), (2, 2, 9, 1)),
    ]:
        out = np.zeros(shape)
        assert skew_expm_multiply(U, V, right, t, out=out) is out
        np.testing.assert_array_equal(out, skew_expm_multiply(U, V, right, t))
        other = np.zeros(shape)
        assert expm_multiply(U, V, right, t, out=other) is other
        np.testing.assert_array_equal(other, expm_multiply(U, V, right, t))


@pytest.mark.parametrize(
    ("out", "error"),
    [
        (np.zeros((9, 2)), ValueError),
        (np.zeros((2, 9, 3)), ValueError),
        (np.zeros((9, 3), "float32"), (TypeError, ValueError)),
        (np.zeros((9, 3), "int64"), (TypeError, ValueError)),
    ],
    ids=["narrow", "batch", "float32", "int64"],
)
def test_out_that_does_not_fit(out, error):
    with pytest.raises(error, match=r"\bout\b"):
        skew_expm_multiply(*generic(9, 2, 3), out=out)


def test_out_that_is_read_only():
    out = np.zeros((9, 3))
    out.flags.writeable = False
    with pytest.raises(ValueError, match=r"\bout\b"):
        skew_expm_multiply(*generic(9, 2, 3), out=out)


@pytest.mark.parametrize("argument", ["U", "V", "B"])
def test_out_that_overlaps_an_input(argument):
    rng = np.random.default_rng(21)
    store = rng.standard_normal((20, 2))
    inputs = {name: rng.standard_normal((9, 2)) for name in "UVB"}
    inputs[argument] = store[:9]
    with pytest.raises(ValueError, match=r"\bout\b"):
        skew_expm_multiply(**inputs, out=store[3:12])


# --- repetition --------------------------------------------------------------------------------


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_the_same_problem_again_gives_the_same_bits(dtype, method):
    """Expokit.jl #24: one 9 x 9 problem over and over, other sizes in between."""
    U, V, B = generic(9, 2, 2, dtype)
    S = LowRankSkew(U, V, method=method)
    first, object_first = skew_expm_multiply(U, V, B, method=method), S.expm_multiply(B)
    assert naive.norm_drifts(first, B).max() <= 40 * gen.unit(dtype)
    for size in range(1, 6):
        other = generic(4 * size + 1, size, 3, gen.DTYPES[size % 4], seed=size)
        skew_expm_multiply(*other, method=method)
        again = skew_expm_multiply(U, V, B, method=method)
        assert again.tobytes() == first.tobytes()
        assert S.expm_multiply(B).tobytes() == object_first.tobytes()


def test_a_loop_over_a_tall_problem_is_linear_in_memory():
    """geotorch #30: n = 30,000 and r = 25; an n x n array alone would be 7 GB."""
    U, V, B = generic(30_000, 25, 4)
    skew_expm_multiply(U, V, B)  # what is set up once is not growth
    tracemalloc.start()
    try:
        after = []
        for _ in range(6):
            B = skew_expm_multiply(U, V, B, 0.1)
            gc.collect()
            after.append(tracemalloc.get_traced_memory()[0])
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # Two results of 1 MB are alive at once; the rest is at most a few copies of X (12 MB each).
    assert peak <= 64 * 2**20
    assert after[-1] - after[1] <= 2**16


def test_a_loop_with_one_operator_is_linear_in_memory():
    U, V, B = generic(30_000, 25, 4)
    S = LowRankSkew(U, V)
    tracemalloc.start()
    try:
        for t in np.linspace(0.0, 1.0, 5).tolist():
            S.expm_multiply(B, t, out=B)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= 64 * 2**20


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("method", ["auto", "qr", "direct"])
def test_a_thousand_applications_keep_the_norm(dtype, method):
    """OneTrainer #1512: float32, the same operator a thousand times over."""
    U, V, B = generic(12, 2, 2, dtype)
    Q = LowRankSkew(U, V, method=method).expm(0.7)
    Y = B
    for _ in range(1000):
        Y = Q @ Y
    # A step rounds the norm by at most a few u, and these add up.
    assert naive.norm_drifts(Y, B).max() <= 1000 * 4 * gen.unit(dtype)


@pytest.mark.parametrize("dtype", ["float32", "complex64"])
def test_a_thousand_different_rotations_keep_the_norm(dtype):
    rng = np.random.default_rng(22)
    B = gen.normal(rng, (12, 1), dtype)
    Y = B
    for _ in range(1000):
        Y = skew_expm_multiply(*gen.generic(rng, 12, 2, dtype), Y)
    # The errors of unlike steps partly cancel: far below 1000 times one of them.
    assert naive.norm_drifts(Y, B).max() <= 1000 * gen.unit(dtype)


def test_a_thousand_steps_there_and_back():
    U, V, B = generic(12, 2, 2, "float32")
    S = LowRankSkew(U, V)
    forth, back = S.expm(0.7), S.expm(-0.7)
    Y = B
    for _ in range(500):
        Y = back @ (forth @ Y)
    assert distance(Y, B, B) <= 1000 * bound(U, V, 0.7, factor=4)


# --- threads, processes, installations -----------------------------------------------------------


def test_threads_give_the_bits_of_one_thread():
    """numba #7872: several Python threads at once."""
    problems = [generic(20 + i, 1 + i % 4, 3, gen.DTYPES[i % 4], seed=i) for i in range(24)]
    alone = [skew_expm_multiply(*problem).tobytes() for problem in problems]
    with ThreadPoolExecutor(8) as pool:
        together = list(pool.map(lambda p: skew_expm_multiply(*p).tobytes(), problems * 4))
    assert together == alone * 4


def test_threads_on_tall_problems():
    """Long enough for a library's own threads, which must not be shared between callers."""
    problems = [generic(60_000, 2, 2, seed=i) for i in range(4)]
    alone = [skew_expm_multiply(*problem).tobytes() for problem in problems]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda p: skew_expm_multiply(*p).tobytes(), problems * 3))
    assert together == alone * 3


def test_threads_share_one_operator():
    U, V, B = generic(30, 3, 2)
    S = LowRankSkew(U, V)
    times = np.linspace(-2, 2, 16).tolist()
    alone = [LowRankSkew(U, V).expm_multiply(B, t).tobytes() for t in times]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(lambda t: S.expm_multiply(B, t).tobytes(), times)) == alone


def test_threads_that_are_the_first_to_call():
    """Compilation and every other first use, from eight threads at once."""
    script = """
        import threading
        import numpy as np
        from lowrank_expm import skew_expm_multiply
        rng = np.random.default_rng(0)
        U, V, B = (rng.standard_normal((50, 3)) for _ in range(3))
        results = [None] * 8
        start = threading.Barrier(8)
        def work(i):
            start.wait()
            results[i] = skew_expm_multiply(U, V, B)
        threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
        for t in threads: t.start()
        for t in threads: t.join()
        for r in results:
            assert r.tobytes() == results[0].tobytes()
        print("done")
    """
    assert python(script).strip() == "done"


FORKED = """
    import os, signal, sys, warnings
    import numpy as np
    from lowrank_expm import skew_expm_multiply
    warnings.simplefilter("ignore", DeprecationWarning)  # fork with threads alive: the point
    rng = np.random.default_rng(0)
    problems = [[rng.standard_normal((n, 2)) for _ in range(3)] for n in (9, 200_000)]
    before = [skew_expm_multiply(*p).tobytes() for p in problems]
"""


def test_after_a_fork():
    """numba #7872: the child calls what the parent has called; a hang ends by alarm."""
    script = """
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        after = [skew_expm_multiply(*p).tobytes() for p in problems]
        os._exit(0 if after == before else 3)
    _, status = os.waitpid(child, 0)
    assert [skew_expm_multiply(*p).tobytes() for p in problems] == before
    print(os.waitstatus_to_exitcode(status))
    """
    assert python(textwrap.dedent(FORKED) + textwrap.dedent(script)).strip() == "0"


def test_in_forked_workers():
    script = """
    import multiprocessing
    signal.alarm(90)
    def work(i):
        return skew_expm_multiply(*problems[i]).tobytes()
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map(work, [0, 1, 0, 1]) == before * 2
    print("done")
    """
    assert python(textwrap.dedent(FORKED) + textwrap.dedent(script)).strip() == "done"


def test_fork_while_other_threads_compute():
    script = """
    import threading
    stop = threading.Event()
    def busy():
        while not stop.is_set():
            skew_expm_multiply(*problems[1])
    threads = [threading.Thread(target=busy) for _ in range(2)]
    for t in threads: t.start()
    codes = []
    for _ in range(3):
        child = os.fork()
        if child == 0:
            signal.alarm(60)
            after = [skew_expm_multiply(*p).tobytes() for p in problems]
            os._exit(0 if after == before else 3)
        codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
    stop.set()
    for t in threads: t.join()
    print(codes)
    """
    assert python(textwrap.dedent(FORKED) + textwrap.dedent(script)).strip() == "[0, 0, 0]"


USE_IT = """
    import warnings
    warnings.simplefilter("error")
    import numpy as np
    from lowrank_expm import skew_expm_multiply
    u, v = np.eye(3)[:, :1], np.eye(3)[:, 1:2]
    c, s = np.cos(0.5), np.sin(0.5)
    Q = skew_expm_multiply(u, v, np.eye(3), 0.5)
    assert np.abs(Q - [[c, s, 0], [-s, c, 0], [0, 0, 1]]).max() < 1e-14
    print("done")
"""


@pytest.fixture
def nowhere(tmp_path):
    """An environment whose home and caches are inside a plain file: not even root can write."""
    wall = tmp_path / "file"
    wall.write_text("")
    names = ("HOME", "XDG_CACHE_HOME", "NUMBA_CACHE_DIR", "IPYTHONDIR", "LOCALAPPDATA")
    return {name: str(wall / "below") for name in names}


def test_import_without_a_place_for_the_compilers_cache():
    """numba finds no locator, and says so when a function is decorated: at import."""
    script = """
        import importlib, pkgutil
        import numba.core.caching as caching
        for cls in (caching.CacheImpl, *caching.CacheImpl.__subclasses__()):
            for locator in cls._locator_classes:
                locator.from_function = classmethod(lambda cls, function, path: None)
        import lowrank_expm
        for module in pkgutil.walk_packages(lowrank_expm.__path__, "lowrank_expm."):
            if not module.name.endswith("__main__"):
                try:
                    importlib.import_module(module.name)
                except ImportError as missing:
                    optional = ("torch", "jax", "dask", "cupy")
                    assert missing.name in optional or "PyTorch" in str(missing), missing
        print("done")
    """
    assert python(script).strip() == "done"


def test_with_a_home_that_cannot_be_written(nowhere):
    del nowhere["NUMBA_CACHE_DIR"]
    assert python(USE_IT, env=nowhere).strip() == "done"


def test_with_a_cache_directory_that_cannot_be_made(nowhere):
    assert python(USE_IT, env=nowhere).strip() == "done"


def test_from_an_installation_that_cannot_be_written(nowhere, tmp_path):
    """numba's read-only install: no cache beside the modules nor at home, so all is compiled.

    A file stands where each directory of caches would be: that stops root too.
    """
    copy = tmp_path / "site" / "lowrank_expm"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for directory in (copy, *(p for p in copy.rglob("*") if p.is_dir())):
        (directory / "__pycache__").write_text("")
    del nowhere["NUMBA_CACHE_DIR"]
    environment = {**nowhere, "PYTHONPATH": str(copy.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    assert python(USE_IT, env=environment).strip() == "done"


# --- numbers at the ends of their ranges


def test_the_smallest_integer_is_not_its_own_absolute_value():
    U, V = np.zeros((12, 1), np.int8), np.zeros((12, 1))
    U[0], V[1] = -128, 1e150
    Y = skew_expm_multiply(U, V, np.eye(12)[1], t=np.pi / 256 * 1e-150)
    expected = skew_expm_multiply(U.astype(float), V, np.eye(12)[1], t=np.pi / 256 * 1e-150)
    np.testing.assert_array_equal(Y, expected)
    np.testing.assert_allclose(Y[:2], [-1, 0], atol=1e-15)


@pytest.mark.parametrize("method", ["auto", "qr", "direct"])
def test_a_huge_time_with_tiny_factors(method):
    U, V, b = np.random.default_rng(0).standard_normal((3, 12, 2))
    Y = skew_expm_multiply(U * 1e-150, V * 1e-150, b, t=1e300, method=method)
    expected = skew_expm_multiply(U, V, b, t=1.0, method="direct")
    np.testing.assert_allclose(Y, expected, atol=1e-12)


@pytest.mark.parametrize("scale", [1e-200, 1e-100, 1.0, 1e100, 1e150])
def test_norms_and_bounds_at_any_scale(scale):
    U, V = np.random.default_rng(0).standard_normal((2, 12, 2))
    plain, S = LowRankSkew(U, V), LowRankSkew(U * scale, V)
    for ord in (2, "fro"):
        assert S.norm(ord) == pytest.approx(scale * plain.norm(ord), rel=1e-13)
    certificate = S.expm(1 / scale).certificate
    expected = plain.expm().certificate
    assert certificate.error_bound == pytest.approx(expected.error_bound, rel=1e-2)
    assert certificate.angle == pytest.approx(expected.angle, rel=1e-13)


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "direct"])
@pytest.mark.parametrize(("dtype", "big"), [("f2", 6e4), ("f4", 3e38), ("f8", 1.7e308)])
def test_a_result_that_overflows_is_an_error(dtype, big, method):
    """A turn by an eighth makes √2 of two equal components."""
    e1, e2 = np.eye(9, dtype=dtype)[:2]
    B = (e1 + e2) * np.asarray(big, dtype)
    with pytest.raises(ValueError, match=r"overflows; scale .* down"):
        skew_expm_multiply(e1, e2, B, float(np.pi / 4), method=method)
    with pytest.raises(ValueError, match=r"overflows; scale .* down"):
        LowRankSkew(e1, e2, method=method).expm(float(np.pi / 4)) @ B


def test_other_products_that_overflow_are_errors():
    e1, e2 = np.eye(9)[:2]
    with pytest.raises(ValueError, match="overflows"):
        LowRankSkew(e1 * 1e150, e2 * 1e150) @ (1e100 * np.ones(9))
    with pytest.raises(ValueError, match="overflows"):
        expm_multiply(e1 * 1e200, e2, 1e150 * np.ones(9))


def test_operators_multiply_from_the_right():
    U, V = np.random.default_rng(0).standard_normal((2, 12, 2)) + 1j
    S = LowRankSkew(U, V)
    B = np.random.default_rng(1).standard_normal((3, 12))
    for A in (S, S.expm(0.3)):
        np.testing.assert_allclose(B @ A, B @ A.to_dense(), atol=1e-13)
        np.testing.assert_allclose(B[0] @ A, B[0] @ A.to_dense(), atol=1e-13)


def test_graded_rows_in_single_precision_without_a_warning():
    scale = np.logspace(2, -8, 15)[:, None]
    A, B = (np.random.default_rng(3).standard_normal((2, 15, 7)) * scale).astype("f4")
    Y = skew_expm_multiply(A, B, A[:, 0])
    np.testing.assert_allclose(np.linalg.norm(Y), np.linalg.norm(A[:, 0]), rtol=1e-5)


def test_factors_of_a_generator_cannot_be_replaced():
    S = LowRankSkew(np.ones(4), np.arange(4.0))
    with pytest.raises(AttributeError):
        S.U = np.zeros(4)
