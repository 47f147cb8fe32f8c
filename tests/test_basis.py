"""The robust basis: a well-conditioned frame of range([U V]) for any U and V."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lowrank_expm.passes import Frame, watching
from lowrank_expm.passes.basis import (
    balanced,
    cholesky,
    first_nonfinite,
    robust_basis,
    triangular_factor,
)
from lowrank_expm.passes.numpy_passes import accumulate, no_vectors, update

from . import generators as gen
from . import naive


def graded(rng, n, r, dtype):
    """Columns from 1e-150 to 1e150 (1e-15 to 1e15 in single precision)."""
    top = 150 if dtype in gen.DOUBLES else 15
    X = gen.normal(rng, (n, 2 * r), dtype).astype(np.result_type(dtype, float))
    X = (X * 10.0 ** np.linspace(-top, top, 2 * r)).astype(dtype)
    return X[:, :r].copy(), X[:, r:].copy()


def all_duplicates(rng, n, r, dtype):
    column = gen.normal(rng, (n, 1), dtype)
    return np.repeat(column, r, axis=1), np.repeat(column, r, axis=1)


KINDS = {
    **{
        name: gen.MAKERS[name]
        for name in (
            "generic",
            "rank_deficient",
            "zero_columns",
            "duplicate_columns",
            "nearly_parallel",
            "scaled_columns",
            "equal",
            "one_zero",
            "both_zero",
        )
    },
    "graded": graded,
    "all_duplicates": all_duplicates,
}


def rows_of(frame, dtype):
    m = frame.width
    eye = np.broadcast_to(np.eye(m, dtype=dtype), (*frame.batch, m, m))
    return update(frame, eye, None, np.dtype(dtype), np.empty((*frame.batch, frame.rows, m), dtype))


def basis_of(U, V, wanted=None, B=None):
    dtype = U.dtype
    frame = Frame((U, V))
    B = no_vectors(U.shape[-2], dtype) if B is None else B
    G, _ = accumulate(frame, B, dtype)
    return robust_basis(frame, G, B, dtype, wanted)


def exactly(a, b):
    """The product a b of two-dimensional arrays, exact before one last rounding."""
    kind = np.result_type(a, b, np.float64)
    return naive.embed(a.astype(kind)) @ naive.embed(b.astype(kind))


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "r"), [(40, 1), (40, 3), (5, 2), (300, 4)])
def test_frame_times_factor_is_the_input_column_by_column(n, r, kind, dtype):
    U, V = KINDS[kind](np.random.default_rng(1), n, r, dtype)
    X = np.concatenate([U, V], axis=-1)
    basis = basis_of(U, V)
    F, m = rows_of(basis.frame, dtype), 2 * r
    is_complex = np.iscomplexobj(X)
    residual = naive.Exact(exactly(F, basis.R) - naive.embed(X), is_complex).round()
    # Two substitutions of m terms each, on columns no longer than the input's.
    limit = 20 * m * gen.unit(dtype) * np.abs(X.astype(complex)).max(0) * math.sqrt(n)
    assert (np.abs(residual).max(0) <= limit).all()


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("n", "r"), [(40, 1), (40, 3), (300, 4)])
def test_frame_is_bounded_and_orthonormal_in_every_direction_of_the_input(n, r, kind, dtype):
    """Beside the range of X there may be columns made of rounding, but none that are large."""
    U, V = KINDS[kind](np.random.default_rng(2), n, r, dtype)
    F = rows_of(basis_of(U, V).frame, dtype)
    s = np.linalg.svd(F.astype(np.result_type(dtype, float)), compute_uv=False)
    X = np.concatenate([U, V], axis=-1).astype(np.result_type(dtype, float))
    lengths = np.linalg.norm(X, axis=0)
    X = X / np.where(lengths > 0, lengths, 1)
    rank = np.linalg.matrix_rank(X, tol=1e3 * gen.unit(dtype))
    assert s.max() <= 1.2
    assert (s >= 0.8).sum() >= rank


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_gram_matrix_and_projection_are_those_of_the_frame(kind, dtype):
    rng = np.random.default_rng(3)
    U, V = KINDS[kind](rng, 60, 2, dtype)
    B = gen.normal(rng, (60, 3), dtype)
    basis = basis_of(U, V, B=B)
    F = rows_of(basis.frame, dtype)
    u, is_complex = gen.unit(dtype), np.iscomplexobj(F)
    G = naive.Exact(exactly(np.conj(F.T), F), is_complex).round()
    T = naive.Exact(exactly(np.conj(F.T), B), is_complex).round()
    # Sums of 60 products of unit vectors.
    assert np.abs(basis.G - G).max() <= 10 * u
    assert np.abs(basis.T - T).max() <= 10 * u * np.linalg.norm(B, axis=0).max()


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_factor_is_upper_triangular_with_a_positive_diagonal(dtype):
    for kind in KINDS:
        U, V = KINDS[kind](np.random.default_rng(4), 40, 2, dtype)
        R = basis_of(U, V).R
        assert not np.tril(R, -1).any()
        assert np.isfinite(R).all()
        diagonal = np.diagonal(R)
        assert (diagonal.real > 0).all()
        assert not diagonal.imag.any()


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_only_wanted_elements_change(dtype):
    rng = np.random.default_rng(5)
    pairs = [gen.nearly_parallel(rng, 50, 2, dtype, eps=0.0) for _ in range(4)]
    U, V = (np.stack(side) for side in zip(*pairs, strict=True))
    wanted = np.array([True, False, False, True])
    basis = basis_of(U, V, wanted)
    F = rows_of(basis.frame, dtype)
    X = np.concatenate([U, V], axis=-1)
    for e in (1, 2):
        assert np.array_equal(F[e], X[e])
        assert np.array_equal(basis.R[e], np.eye(4))
    for e in (0, 3):
        alone = basis_of(U[e], V[e])
        # The wanted elements may be refined once more where one of them asks for it.
        eye = np.broadcast_to(np.eye(4), basis.G[e].shape)
        live = np.diagonal(basis.G[e]).real > 0
        assert np.abs(basis.G[e] - eye * live).max() <= 0.2
        assert np.abs(alone.G - basis.G[e]).max() <= 0.2


def test_only_bad_elements_pay_for_householder():
    """Rows are folded for the one element that Cholesky cannot serve."""
    rng = np.random.default_rng(6)
    U, V = (gen.normal(rng, (3, 500, 2), "float64") for _ in range(2))
    V[1] = U[1]
    folded = []
    with watching(lambda name, rows: folded.append(rows) if name == "basis" else None):
        basis_of(U, V)
    assert sum(folded) == 500


def test_broadcast_factors_share_their_columns():
    rng = np.random.default_rng(7)
    U, V = gen.normal(rng, (50, 2), "float64"), gen.normal(rng, (3, 1, 50, 2), "float64")
    basis = basis_of(U, V)
    F = rows_of(basis.frame, "float64")
    X = np.concatenate([np.broadcast_to(U, V.shape), V], axis=-1)
    assert F.shape == X.shape
    assert np.abs(F @ basis.R - X).max() <= 100 * 2.0**-53 * np.abs(X).max()


@pytest.mark.parametrize("n", [1, 3, 4, 50, 200_000])
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_triangular_factor_has_the_singular_values_of_the_input(n, dtype):
    """Also over many row blocks, and where n is below the number of columns."""
    U, V = (gen.normal(np.random.default_rng(seed), (n, 2), dtype) for seed in (8, 9))
    V[:, 0] = U[:, 0] + (1e-3 * V[:, 0]).astype(dtype)
    X = np.concatenate([U, V], axis=-1)
    R = triangular_factor(Frame((U, V)), np.dtype(dtype))
    assert R.shape == (min(n, 4), 4)
    found, expected = (np.linalg.svd(a, compute_uv=False) for a in (R, X))
    # Householder QR and the SVD are backward stable in the norm: a few u·‖X‖.
    assert np.abs(found - expected).max() <= 40 * gen.unit(dtype) * expected[0]


def test_triangular_factor_of_a_batch_and_a_scaled_frame():
    rng = np.random.default_rng(10)
    U, V = gen.normal(rng, (2, 30, 2), "float64"), gen.normal(rng, (30, 2), "float64")
    scale = np.array([1.0, 2.0, 0.5, 4.0])
    R = triangular_factor(Frame((U, V), scale), np.dtype(float))
    assert R.shape == (2, 4, 4)
    X = np.concatenate([U, np.broadcast_to(V, U.shape)], axis=-1) * scale
    gram = np.swapaxes(X, -1, -2) @ X
    assert np.abs(np.swapaxes(R, -1, -2) @ R - gram).max() <= 100 * 2.0**-53 * np.abs(gram).max()


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_cholesky_factors_a_graded_matrix(dtype):
    rng = np.random.default_rng(11)
    X = gen.normal(rng, (50, 4), dtype)
    scale = np.array([1e-12, 1.0, 1e12, 1e3]).astype(X.real.dtype)
    X = X * scale
    G = np.conj(X.T) @ X
    R, pivot = cholesky(G)
    d = np.sqrt(np.diagonal(G).real)
    # Relative to each pair of columns: grading costs nothing.
    assert (np.abs(np.conj(R.T) @ R - G) <= 20 * gen.unit(dtype) * d[:, None] * d).all()
    assert 0.3 < pivot <= 1


def test_cholesky_reports_the_smallest_pivot_of_each_element():
    good = np.eye(3)
    bad = np.ones((3, 3))
    R, pivot = cholesky(np.stack([good, bad]))
    assert pivot[0] == 1
    assert abs(pivot[1]) <= 4 * 2.0**-53
    assert np.isfinite(R).all()
    assert (np.diagonal(R, axis1=-2, axis2=-1) > 0).all()


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_balanced_frames_have_reciprocal_powers_of_two(dtype):
    U, V = graded(np.random.default_rng(12), 40, 3, dtype)
    scale = balanced(Frame((U, V)), np.dtype(dtype)).scale
    assert (np.frexp(scale)[0] == 0.5).all()
    assert (scale[:3] * scale[3:] == 1).all()
    u, v = np.abs(U).max(0) * scale[:3], np.abs(V).max(0) * scale[3:]
    assert (np.abs(np.log2(u) - np.log2(v)) <= 1 + 1e-6).all()


def test_balanced_frames_drop_pairs_with_a_zero_column():
    U, V = gen.normal(np.random.default_rng(13), (2, 40, 3), "float64")
    U[:, 1] = 0
    V[:, 2] = 0
    scale = balanced(Frame((U, V)), np.dtype(float)).scale
    assert ((scale == 0) == np.array([0, 1, 1, 0, 1, 1], bool)).all()


@pytest.mark.parametrize("exponent", [-300.0, 300.0])
def test_balanced_frames_of_factors_whose_squares_leave_the_range(exponent):
    U, V = gen.normal(np.random.default_rng(14), (2, 40, 2), "float64")
    U, V = U * 10.0**exponent, V * 10.0**-exponent
    frame = balanced(Frame((U, V)), np.dtype(float))
    G, _ = accumulate(frame, no_vectors(40, np.dtype(float)), np.dtype(float))
    assert np.isfinite(G).all()
    d = np.diagonal(G)
    assert (np.abs(np.log2(d[:2] / d[2:])) <= 4).all()


@pytest.mark.parametrize("shape", [(7, 3), (2, 7, 3), (2, 3, 7, 1)])
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_first_entry_that_is_not_finite_is_found(shape, bad):
    a = np.zeros(shape)
    assert first_nonfinite(a) is None
    index = tuple(s - 1 for s in shape)
    a[index] = bad
    assert first_nonfinite(a) == index
    a[(*index[:-2], 2, 0)] = bad
    assert first_nonfinite(a) == (*index[:-2], 2, 0)


def test_first_entry_that_is_not_finite_far_down_and_imaginary():
    a = np.zeros((200_000, 5), complex)
    a[150_000, 3] = complex(0, np.inf)
    a[190_000, 0] = np.nan
    assert first_nonfinite(a) == (150_000, 3)
    assert first_nonfinite(np.zeros((0, 3))) is None
    assert first_nonfinite(np.zeros((3, 0))) is None
