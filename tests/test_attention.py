"""Orthogonal attention against its dense definition, and the weights it starts with."""

import math

import array_api_strict
import numpy as np
import pytest
from scipy.linalg import expm

from lowrank_expm.attention import (
    orthogonal_attention,
    orthogonal_attention_packed,
    orthogonal_initialization,
)

from . import generators as gen
from . import naive

DTYPES = ("float32", "float64", "complex64", "complex128")
# exp is the reference's, whose own error grows with the angle; the contract's 40 u comes on top.
TOLERANCE = 200


def tokens(*shape, dtype="float64", seed=0, count=3):
    rng = np.random.default_rng(seed)
    parts = [rng.standard_normal(shape) for _ in range(count)]
    if np.dtype(dtype).kind == "c":
        parts = [a + 1j * rng.standard_normal(shape) for a in parts]
    return [a.astype(dtype) for a in parts]


def adjoint(a):
    return np.conj(np.matrix_transpose(a))


def dense(q, k, v, factor):
    """The definition: exp(factor (q kᴴ - k qᴴ)) v with n × n matrices in double precision."""
    q, k, v = (a.astype(np.result_type(a, np.float64)) for a in (q, k, v))
    M = np.asarray(factor)[..., None, None] * (q @ adjoint(k))
    return expm(M - adjoint(M)) @ v


def limit(dtype, q, k, factor=1.0):
    """C·u·max(1, ρ), with ρ the largest |factor| ‖q‖ ‖k‖."""
    norms = np.linalg.norm(q, axis=(-2, -1)) * np.linalg.norm(k, axis=(-2, -1))
    return TOLERANCE * gen.unit(dtype) * max(1.0, float(np.max(np.abs(factor) * norms)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [1, 5, 12, 40], ids=lambda n: f"n={n}")
def test_is_the_definition(n, dtype):
    q, k, v = tokens(2, 3, n, 6, dtype=dtype)
    y = orthogonal_attention(q, k, v, alpha=0.3)
    assert y.dtype == v.dtype
    expected = dense(q, k, v, 0.3 / math.sqrt(6))
    np.testing.assert_allclose(y, expected, rtol=0, atol=limit(dtype, q, k, 0.3 / 6**0.5) * 10)


def test_against_the_oracle():
    """In 60 digits, at a large angle."""
    q, k, v = tokens(20, 3)
    y = orthogonal_attention(q, k, v, alpha=5.0, scale=1.0)
    rho = 5 * np.linalg.norm(q, 2) * np.linalg.norm(k, 2)
    assert naive.forward_errors(y, q, k, v, 5.0) <= 40 * gen.unit("float64") * rho


def test_defaults_are_alpha_one_and_scale_of_softmax_attention():
    q, k, v = tokens(9, 4)
    given = orthogonal_attention(q, k, v, alpha=1.0, scale=0.5)
    np.testing.assert_array_equal(orthogonal_attention(q, k, v), given)


@pytest.mark.parametrize("alpha", [0.0, -0.7, np.float64(0.4), np.asarray(0.4), 2])
def test_alpha_is_a_number(alpha):
    q, k, v = tokens(2, 15, 3)
    y = orthogonal_attention(q, k, v, alpha=alpha, scale=0.2)
    np.testing.assert_allclose(y, dense(q, k, v, 0.2 * float(alpha)), rtol=0, atol=1e-12)


def test_alpha_zero_is_the_identity():
    q, k, v = tokens(15, 3)
    np.testing.assert_array_equal(orthogonal_attention(q, k, v, alpha=0.0), v)
    np.testing.assert_array_equal(orthogonal_attention(q, k, v, alpha=np.zeros(())), v)


def test_alpha_is_one_number_a_head():
    q, k, v = tokens(2, 4, 20, 3)
    alpha = np.array([0.0, 0.1, -0.5, 1.0])
    y = orthogonal_attention(q, k, v, alpha=alpha)
    for i, a in enumerate(alpha.tolist()):
        head = orthogonal_attention(q[:, i], k[:, i], v[:, i], alpha=a)
        np.testing.assert_allclose(y[:, i], head, rtol=0, atol=limit("float64", q, k))


def test_a_number_does_not_promote_and_an_array_does():
    q, k, v = tokens(2, 15, 3, dtype="float32")
    assert orthogonal_attention(q, k, v, alpha=0.5).dtype == np.float32
    assert orthogonal_attention(q, k, v, alpha=np.full(2, 0.5, "f")).dtype == np.float32
    assert orthogonal_attention(q, k, v, alpha=np.full(2, 0.5)).dtype == np.float64


@pytest.mark.parametrize("kind", ["float16", "float32", "int64"])
@pytest.mark.parametrize("shape", [(), (3,)])
def test_an_array_alpha_counts_in_the_precision_of_the_result(shape, kind):
    q, k, v = tokens(3, 30, 8)
    value = 2 if kind == "int64" else 0.5
    expected = orthogonal_attention(q, k, v, alpha=value)
    found = orthogonal_attention(q, k, v, alpha=np.full(shape, value, kind))
    assert found.dtype == np.float64
    np.testing.assert_allclose(found, expected, rtol=0, atol=limit("float64", q, k, value))


def test_an_array_alpha_does_not_round_half_precision():
    """Products of q are formed in single precision, and may leave the range of the half one."""
    q, k, v = tokens(3, 30, 8, dtype="float16")
    for size in (1, 1000):
        given = size * q, (k / size).astype("float16"), v
        expected = orthogonal_attention(*given, alpha=100.0 / size)
        found = orthogonal_attention(*given, alpha=np.full(3, 100.0 / size, "float16"))
        assert found.dtype == np.float16
        scale = np.linalg.norm(v, axis=-2).max()
        assert np.abs(found - expected).max() <= gen.unit("float16") * scale


def test_values_may_be_wider_and_batches_broadcast():
    (q,), (k,), (v,) = (
        tokens(*shape, seed=seed, count=1)
        for seed, shape in enumerate([(1, 4, 30, 5), (4, 30, 5), (3, 1, 30, 7)])
    )
    y = orthogonal_attention(q, k, v, alpha=0.2)
    assert y.shape == (3, 4, 30, 7)
    single = orthogonal_attention(q[0, 2], k[2], v[1, 0], alpha=0.2)
    np.testing.assert_allclose(y[1, 2], single, rtol=0, atol=limit("float64", q, k))


@pytest.mark.parametrize("shape", [(0, 4), (7, 0), (0, 7, 4), (2, 0, 4)])
def test_empty(shape):
    q, k, v = tokens(*shape)
    y = orthogonal_attention(q, k, v)
    np.testing.assert_array_equal(y, v)


def test_orthogonal_at_any_angle():
    q, k, v = tokens(4, 50, 8)
    y = orthogonal_attention(q, k, v, alpha=1e3)
    gram, before = (adjoint(a) @ a for a in (y, v))
    bound = 80 * 4 * gen.unit("float64") * np.linalg.norm(v, axis=(-2, -1)).max() ** 2
    np.testing.assert_allclose(gram, before, rtol=0, atol=bound)


# ------------------------------------------------------------------------------- masks


@pytest.mark.parametrize("garbage", [3.0, np.nan, np.inf])
@pytest.mark.parametrize("n", [7, 40], ids=lambda n: f"n={n}")
def test_left_out_tokens_are_unchanged_and_influence_none(n, garbage):
    q, k, v = tokens(2, 3, n, 6)
    keep = np.random.default_rng(1).random(n) < 0.6
    for a in (q, k, v):
        a[..., ~keep, :] *= garbage
    y = orthogonal_attention(q, k, v, alpha=0.5, mask=keep)
    rest = orthogonal_attention(*(a[..., keep, :] for a in (q, k, v)), alpha=0.5)
    np.testing.assert_array_equal(y[..., ~keep, :], v[..., ~keep, :])
    atol = limit("float64", q[..., keep, :], k[..., keep, :])
    np.testing.assert_allclose(y[..., keep, :], rest, rtol=0, atol=atol)


def test_mask_of_each_sequence():
    """(b, 1, n): one mask a sequence for all heads, as padding has it."""
    q, k, v = tokens(3, 2, 20, 4)
    lengths = np.array([20, 13, 0])
    keep = np.arange(20) < lengths[:, None]
    y = orthogonal_attention(q, k, v, mask=keep[:, None])
    for i, length in enumerate(lengths):
        alone = orthogonal_attention(*(a[i, :, :length] for a in (q, k, v)))
        np.testing.assert_allclose(y[i, :, :length], alone, rtol=0, atol=limit("float64", q, k))
        np.testing.assert_array_equal(y[i, :, length:], v[i, :, length:])


def test_mask_of_all_and_of_none():
    q, k, v = tokens(20, 4)
    every = orthogonal_attention(q, k, v, mask=np.ones(20, bool))
    np.testing.assert_array_equal(every, orthogonal_attention(q, k, v))
    none = orthogonal_attention(q, k, v, mask=np.zeros(20, bool))
    np.testing.assert_array_equal(none, v)


def test_mask_may_have_more_axes_than_the_tokens():
    q, k, v = tokens(20, 4)
    keep = np.random.default_rng(0).random((3, 20)) < 0.5
    y = orthogonal_attention(q, k, v, mask=keep)
    assert y.shape == (3, 20, 4)
    for i in range(3):
        one = orthogonal_attention(q, k, v, mask=keep[i])
        np.testing.assert_allclose(y[i], one, rtol=0, atol=limit("float64", q, k))


def test_inputs_are_not_written_to():
    q, k, v = tokens(3, 20, 4)
    before = [a.tobytes() for a in (q, k, v)]
    orthogonal_attention(q, k, v, alpha=np.ones(3), mask=np.arange(20) < 9)
    assert [a.tobytes() for a in (q, k, v)] == before


# ------------------------------------------------------------------------------ packed


@pytest.mark.parametrize("columns", [(6, 6, 6), (6, 6, 9), (6, 6, 0)])
def test_packed_is_the_same(columns):
    d = columns[0]
    qkv = np.random.default_rng(0).standard_normal((2, 3, 40, sum(columns)))
    q, k, v = np.split(qkv, np.cumsum(columns)[:-1], axis=-1)
    options = {"alpha": np.array([0.1, 0.2, 0.3]), "mask": np.arange(40) < 31}
    y = orthogonal_attention_packed(qkv, head_dim=d, **options)
    np.testing.assert_array_equal(y, orthogonal_attention(q, k, v, **options))


def test_packed_heads_of_a_fused_projection():
    """(b, n, h·3d) as a projection leaves it, seen as (b, h, n, 3d)."""
    b, n, h, d = 2, 30, 3, 4
    projected = np.random.default_rng(0).standard_normal((b, n, h * 3 * d))
    heads = projected.reshape(b, n, h, 3 * d).swapaxes(1, 2)
    y = orthogonal_attention_packed(heads, alpha=0.2)
    q, k, v = (heads[1, 2, :, i * d : (i + 1) * d].copy() for i in range(3))
    expected = orthogonal_attention(q, k, v, alpha=0.2)
    np.testing.assert_allclose(y[1, 2], expected, rtol=0, atol=limit("float64", q, k))


# ------------------------------------------------------------------------------ errors


def shapes(*given):
    return [np.zeros(s) for s in given]


@pytest.mark.parametrize(
    ("arrays", "message"),
    [
        (shapes((5, 3), (6, 3), (5, 3)), "self-attention"),
        (shapes((5, 3), (5, 4), (5, 3)), "same n and d"),
        (shapes((5, 3), (5, 3), (6, 3)), "v has shape"),
        (shapes((5,), (5, 3), (5, 3)), "q has shape"),
        (shapes((2, 5, 3), (3, 5, 3), (5, 3)), "do not broadcast"),
    ],
)
def test_shapes_that_do_not_fit(arrays, message):
    with pytest.raises(ValueError, match=message):
        orthogonal_attention(*arrays)


@pytest.mark.parametrize(("place", "name"), [(0, "q"), (1, "k"), (2, "v")])
@pytest.mark.parametrize("n", [4, 30])
def test_bad_numbers_name_the_argument(place, name, n):
    arrays = tokens(n, 3)
    arrays[place][2, 1] = np.nan
    with pytest.raises(ValueError, match=rf"{name}\[2, 1\] is nan"):
        orthogonal_attention(*arrays)


@pytest.mark.parametrize(
    ("alpha", "error", "message"),
    [
        (np.nan, ValueError, "alpha is nan"),
        (np.asarray(np.inf), ValueError, "alpha contains NaN or infinity"),
        (1j, TypeError, "alpha is complex"),
        (np.ones(3, complex), TypeError, "alpha is complex"),
        (np.ones(5), ValueError, "alpha of shape"),
        ([0.1, 0.2, 0.3], TypeError, "alpha is a list"),
    ],
)
def test_alpha_that_does_not_fit(alpha, error, message):
    with pytest.raises(error, match=message):
        orthogonal_attention(*tokens(3, 9, 2), alpha=alpha)


@pytest.mark.parametrize(
    ("scale", "error", "message"),
    [
        ("half", TypeError, "scale is a str"),
        (np.ones(2), TypeError, "scale is a ndarray"),
        (np.nan, ValueError, "scale is nan"),
    ],
)
@pytest.mark.parametrize("alpha", [1.0, np.ones(3)], ids=["number", "array"])
def test_scale_that_does_not_fit(alpha, scale, error, message):
    with pytest.raises(error, match=message):
        orthogonal_attention(*tokens(3, 9, 2), alpha=alpha, scale=scale)


@pytest.mark.parametrize("name", ["alpha", "mask"])
def test_arrays_of_two_libraries(name):
    given = np.ones(9, bool) if name == "mask" else np.ones(3)
    with pytest.raises(TypeError, match=f"{name} is a array_api_strict.* and q is a numpy.ndarray"):
        orthogonal_attention(*tokens(3, 9, 2), **{name: array_api_strict.asarray(given)})
    q, k, v = map(array_api_strict.asarray, tokens(3, 9, 2))
    with pytest.raises(TypeError, match=f"{name} is a numpy.ndarray and q is a array_api_strict"):
        orthogonal_attention(q, k, v, **{name: given})


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.ones(9), TypeError, "must be a boolean array"),
        ([True] * 9, TypeError, "must be a boolean array"),
        (True, TypeError, "must be a boolean array"),
        (np.ones((9, 9, 9), bool), ValueError, "do not broadcast"),
        (np.ones(8, bool), ValueError, "with n = 9 tokens"),
        (np.ones((), bool), ValueError, "with n = 9 tokens"),
    ],
)
def test_mask_that_does_not_fit(mask, error, message):
    with pytest.raises(error, match=message):
        orthogonal_attention(*tokens(3, 9, 2), mask=mask)


def test_errors_of_any_kind_name_the_arguments_of_attention():
    q, k, v = tokens(3, 9, 2)
    with pytest.raises(TypeError, match=f"k has dtype {np.dtype(np.longdouble)}"):
        orthogonal_attention(q, k.astype(np.longdouble), v)
    with pytest.raises(TypeError, match="q is a masked array"):
        orthogonal_attention(np.ma.masked_array(q), k, v, alpha=np.ones(3))


def test_what_is_no_array():
    with pytest.raises(TypeError, match="q is a list"):
        orthogonal_attention([[1.0]], *shapes((1, 1), (1, 1)))
    with pytest.raises(TypeError, match="qkv is a list"):
        orthogonal_attention_packed([[1.0, 2.0, 3.0]])


@pytest.mark.parametrize(("head_dim", "message"), [(None, "three times"), (4, "too few")])
def test_packed_columns_that_do_not_fit(head_dim, message):
    with pytest.raises(ValueError, match=message):
        orthogonal_attention_packed(np.zeros((5, 7)), head_dim=head_dim)


# ---------------------------------------------------------------------- initialization


@pytest.mark.parametrize(("width", "heads"), [(32, 4), (32, 2), (32, 1), (15, 5), (1, 1)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_initial_weights_are_orthonormal(width, heads, dtype):
    weights = orthogonal_initialization(width, heads, rng=0, dtype=dtype)
    d, atol = width // heads, 10 * width * gen.unit(dtype)
    assert {a.dtype for a in weights} == {np.dtype(dtype)}
    qkv = weights.in_proj_weight.reshape(heads, 3, d, width)
    together = qkv[:, :2].reshape(heads, 2 * d, width)
    parts = [together] if 2 * d <= width else [qkv[:, 0], qkv[:, 1]]
    for rows in [*parts, qkv[:, 2].reshape(1, width, width), weights.out_proj_weight[None]]:
        eye = np.broadcast_to(np.eye(rows.shape[-2]), (len(rows), *[rows.shape[-2]] * 2))
        np.testing.assert_allclose(rows @ adjoint(rows), eye, rtol=0, atol=atol)


def test_initial_weights_are_random_and_reproducible():
    first, again, other = (orthogonal_initialization(8, 2, rng=seed) for seed in (0, 0, 1))
    np.testing.assert_array_equal(first.in_proj_weight, again.in_proj_weight)
    assert not np.allclose(first.in_proj_weight, other.in_proj_weight)
    heads = first.in_proj_weight.reshape(2, -1)
    assert not np.allclose(heads[0], heads[1])


def test_initial_weights_of_heads_that_do_not_divide_the_width():
    with pytest.raises(ValueError, match="must divide"):
        orthogonal_initialization(32, 5)


@pytest.mark.parametrize("heads", [1, 4])
def test_the_jacobian_stays_as_close_to_orthogonal_as_documented(heads):
    """The second term of the derivative, in random directions, against its bound."""
    rng = np.random.default_rng(0)
    width, n, alpha = 32, 9, 0.05
    weights = orthogonal_initialization(width, heads, rng=rng)
    X, dX = rng.standard_normal((2, n, width))

    def layer(X, values):
        qkv, vs = (
            (a @ weights.in_proj_weight.T).reshape(n, heads, -1).swapaxes(0, 1) for a in (X, values)
        )
        d = width // heads
        y = orthogonal_attention(qkv[..., :d], qkv[..., d : 2 * d], vs[..., 2 * d :], alpha=alpha)
        return y.swapaxes(0, 1).reshape(n, width) @ weights.out_proj_weight.T

    step = 1e-6
    moved = (layer(X + step * dX, X) - layer(X - step * dX, X)) / (2 * step)
    d = width // heads
    qk = weights.in_proj_weight.reshape(heads, 3 * d, width)[:, : 2 * d].reshape(-1, width)
    bound = 2 * np.linalg.norm(qk, 2) * alpha / d**0.5 * np.linalg.norm(X, 2) ** 2
    bound *= 1 if 2 * d <= width else 2**0.5
    assert 0 < np.linalg.norm(moved) <= bound * np.linalg.norm(dX)
    # The other term is an isometry.
    still = layer(X, dX)
    np.testing.assert_allclose(np.linalg.norm(still), np.linalg.norm(dX), rtol=1e-12)
