"""What callers may pass, and what they are told when they may not."""

from __future__ import annotations

import itertools
from decimal import Decimal

import array_api_strict
import numpy as np
import pytest

from lowrank_expm import LowRankSkew, _linear, expm_multiply, skew_expm_multiply
from lowrank_expm import _inputs as inputs

from . import generators as gen
from . import naive

FLOATS = ("float16", *gen.DTYPES)
WHOLE = ("bool", "int8", "uint8", "int32", "uint64", "int64")
N, R, K = 7, 2, 3
CALLS = {"skew": skew_expm_multiply, "general": expm_multiply}
NAMES = {"skew": ("U", "V", "B"), "general": ("L", "R", "B")}


@pytest.fixture(params=list(CALLS))
def call(request):
    """Both functions have the same rules."""
    return CALLS[request.param]


def problem(*kinds, seed=0):
    """U, V and B of small whole numbers, exact in every dtype."""
    rng = np.random.default_rng(seed)
    shapes = ((N, R), (N, R), (N, K))
    return [rng.integers(0, 2, s).astype(k) for s, k in zip(shapes, kinds, strict=True)]


def bound(U, V, t=1.0):
    return 40 * gen.unit(np.float32 if U.dtype.char == "e" else U.dtype) * max(1, gen.rho(U, V, t))


# --- dtypes ----------------------------------------------------------------------------------


@pytest.mark.parametrize("kinds", list(itertools.product(FLOATS, repeat=2)), ids="-".join)
def test_result_is_promoted_like_an_array_operation(call, kinds):
    U, V, B = problem(kinds[0], kinds[0], kinds[1])
    assert call(U, V, B, 0.1).dtype == np.result_type(*kinds)
    U, V, B = problem(kinds[0], kinds[1], kinds[0])
    assert call(U, V, B, 0.1).dtype == np.result_type(*kinds)


@pytest.mark.parametrize("kind", WHOLE)
def test_integers_and_booleans_become_double_precision(call, kind):
    assert call(*problem(kind, kind, kind), 0.1).dtype == np.float64
    assert LowRankSkew(*problem(kind, kind, kind)[:2]).dtype == np.float64


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("t", [0.5, 1, True], ids=["float", "int", "bool"])
def test_python_numbers_are_weak(call, dtype, t):
    assert call(*problem(dtype, dtype, dtype), t).dtype == dtype


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("t", [np.float64(0.5), np.float32(0.5), np.array(0.5), np.array([0.5])])
def test_numpy_numbers_are_strong(call, dtype, t):
    assert call(*problem(dtype, dtype, dtype), t).dtype == np.result_type(dtype, t.dtype)
    U, V, _ = problem(dtype, dtype, dtype)
    assert LowRankSkew(U, V).expm(t).dtype == np.result_type(dtype, t.dtype)


@pytest.mark.parametrize(("t", "expected"), [(1j, "complex64"), (np.complex128(1j), "complex128")])
def test_complex_t_of_the_general_function_promotes(t, expected):
    assert expm_multiply(*problem("float32", "float32", "float32"), t).dtype == expected


def test_double_precision_in_any_argument_is_computed_in_double_precision(call):
    """Not computed in single precision and then widened."""
    U, V, B = problem("float32", "float32", "float32")
    exact = call(U.astype(float), V.astype(float), B.astype(float), 0.3)
    for mixed in ((U.astype(float), V, B), (U, V.astype(float), B), (U, V, B.astype(float))):
        Y = call(*mixed, 0.3)
        assert Y.dtype == np.float64
        assert np.abs(Y - exact).max() <= 1e-13
    assert np.abs(call(U, V, B, np.float64(0.3)) - exact).max() <= 1e-13


def test_half_precision_is_computed_in_single_precision(call):
    U, V, B = problem("float16", "float16", "float16")
    Y = call(U, V, B, 0.3)
    exact = call(U.astype(float), V.astype(float), B.astype(float), 0.3)
    assert Y.dtype == np.float16
    # One rounding to half precision, of numbers far from its limits.
    assert (np.abs(Y - exact) <= 2.0**-11 * np.abs(exact) + 1e-5).all()


@pytest.mark.parametrize("n", [2, 3])
def test_angles_in_half_precision_are_computed_in_single_precision(n):
    """On every route: S itself may be out of its range, and has fewer digits."""
    U, V = np.zeros((2, n, 1), np.float16)
    U[:2, 0], V[:2, 0] = (300, 1), (1, 301)
    S = LowRankSkew(U, V)
    angle = 300 * 301 - 1
    np.testing.assert_allclose(S.angles(), [-angle, angle], rtol=1e-6)
    np.testing.assert_allclose(S.expm(1e-4).certificate.angle, 1e-4 * angle, rtol=1e-6)


def test_lists_are_arrays(call):
    Y = call([[1, 0], [0, 1], [0, 0]], [[0, 1], [0, 0], [1, 0]], [1.0, 2.0, 3.0], 0.3)
    assert Y.shape == (3,)
    assert Y.dtype == np.float64


BAD_DTYPES = {
    # "g" and "G" are types of their own, also where they are no longer than a double.
    "longdouble": lambda a: a.astype("g"),
    "clongdouble": lambda a: a.astype("G"),
    "object": lambda a: a.astype(object),
    "decimal": lambda a: np.vectorize(Decimal, otypes=[object])(a),
    "str": lambda a: a.astype(str),
    "bytes": lambda a: a.astype(bytes),
    "datetime": lambda a: a.astype("i8").astype("M8[s]"),
    "structured": lambda a: a.astype([("x", float)]),
}


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("argument", range(3))
@pytest.mark.parametrize("kind", BAD_DTYPES)
def test_other_dtypes_are_refused_by_name(function, argument, kind):
    operands = problem("float64", "float64", "float64")
    operands[argument] = BAD_DTYPES[kind](operands[argument])
    name = NAMES[function][argument]
    with pytest.raises(TypeError, match=rf"^{name} has dtype .*; convert it to float32"):
        CALLS[function](*operands)


@pytest.mark.parametrize("t", ["1", None, [1.0, None], np.longdouble(1) + 0, Decimal(1)])
def test_other_kinds_of_t_are_refused(call, t):
    with pytest.raises(TypeError, match=r"^t "):
        call(*problem("float64", "float64", "float64"), t)


def test_arrays_of_another_library_are_refused_by_name(call):
    U, V, B = problem("float64", "float64", "float64")
    foreign = array_api_strict.asarray(B)
    with pytest.raises(
        TypeError, match=r"^B is a array_api_strict\..*(convert it first|one library)"
    ):
        call(U, V, foreign)


def test_masked_arrays_are_refused(call):
    """The mask would be dropped silently."""
    U, V, B = problem("float64", "float64", "float64")
    with pytest.raises(TypeError, match="masked"):
        call(U, V, np.ma.masked_array(B, B > 0))


def test_matrix_subclass_is_read_as_an_array(call):
    U, V, B = problem("float64", "float64", "float64")

    class Labelled(np.ndarray):
        pass

    Y = call(U.view(Labelled), V, B.view(Labelled), 0.3)
    assert np.array_equal(Y, call(U, V, B, 0.3))


# --- t ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("t", [1j, np.complex64(1), np.array([1j]), 1 + 0j])
def test_complex_t_is_refused_where_the_result_would_not_be_unitary(t):
    U, V, B = problem("complex128", "complex128", "complex128")
    for attempt in (
        lambda: skew_expm_multiply(U, V, B, t),
        lambda: LowRankSkew(U, V).expm(t),
        lambda: LowRankSkew(U, V).expm_multiply(B, t),
    ):
        with pytest.raises(TypeError, match="use expm_multiply, where t may be complex"):
            attempt()


@pytest.mark.parametrize("t", [np.nan, np.inf, -np.inf, [0.0, np.nan]])
def test_t_that_is_not_finite_is_refused(call, t):
    with pytest.raises(ValueError, match="t contains NaN or infinity; it must be finite"):
        call(*problem("float64", "float64", "float64"), t)


def test_t_of_two_dimensions_is_refused(call):
    with pytest.raises(ValueError, match=r"t has shape \(1, 1\); it must be a number or"):
        call(*problem("float64", "float64", "float64"), [[1.0]])


def test_an_enormous_integer_t_is_refused_or_overflows(call):
    with pytest.raises((ValueError, TypeError, OverflowError)):
        call(*problem("float64", "float64", "float64"), 10**400)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("t", [0, 0.0, -0.0, np.float32(0)])
def test_time_zero_returns_b_exactly(call, dtype, t):
    rng = np.random.default_rng(1)
    U, V, _ = problem(dtype, dtype, dtype)
    B = gen.normal(rng, (N, K), dtype)
    Y = call(U, V, B, t)
    assert np.array_equal(Y, B)
    assert not np.shares_memory(Y, B)


def test_a_grid_adds_a_leading_axis_and_equals_single_calls(call):
    U, V, B = problem("float64", "float64", "float64")
    U = np.stack([U, 2 * U])
    grid = np.array([0.0, 0.4, -1.0])
    Y = call(U, V, B, grid)
    assert Y.shape == (3, 2, N, K)
    assert np.array_equal(Y[0], np.broadcast_to(B, (2, N, K)))
    for t, y in zip(grid, Y, strict=True):
        assert np.abs(y - call(U, V, B, t)).max() <= 1e3 * bound(U[1], V, t)
    assert call(U, V, B, []).shape == (0, 2, N, K)
    assert call(U, V, B[:, 0], grid).shape == (3, 2, N)


# --- shapes ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("u", "v", "b", "shape"),
    [
        ((7,), (7,), (7,), (7,)),
        ((7,), (7,), (7, 1), (7, 1)),
        ((7, 1), (7, 1), (7,), (7,)),
        ((7, 2), (7, 2), (7, 3), (7, 3)),
        ((5, 7, 2), (7, 2), (7,), (5, 7)),
        ((7, 2), (5, 7, 2), (7, 3), (5, 7, 3)),
        ((7, 2), (7, 2), (4, 5, 7, 3), (4, 5, 7, 3)),
        ((4, 1, 7, 2), (5, 7, 2), (7, 3), (4, 5, 7, 3)),
        ((1, 7, 2), (7, 2), (7, 3), (1, 7, 3)),
        ((0, 7, 2), (7, 2), (7, 3), (0, 7, 3)),
        ((0, 7, 2), (7, 2), (7,), (0, 7)),
        ((0, 2), (0, 2), (0, 3), (0, 3)),
        ((0,), (0,), (0,), (0,)),
        ((7, 0), (7, 0), (7, 3), (7, 3)),
        ((7, 2), (7, 2), (7, 0), (7, 0)),
        ((3, 7, 0), (7, 0), (7, 3), (3, 7, 3)),
    ],
)
def test_shapes_broadcast(call, u, v, b, shape):
    rng = np.random.default_rng(2)
    U, V, B = (rng.standard_normal(s) / 4 for s in (u, v, b))
    Y = call(U, V, B)
    assert Y.shape == shape
    assert call(U, V, B, [1.0, 2.0]).shape == (2, *shape)
    if U.size == 0 and B.size:
        assert np.array_equal(Y, np.broadcast_to(B, shape))


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize(
    ("u", "v"),
    [((7, 2), (7, 3)), ((7, 2), (6, 2)), ((7,), (7, 1)), ((7,), (6,)), ((), (7,)), ((), ())],
)
def test_factors_that_do_not_match_show_both_shapes(function, u, v):
    first, second, _ = NAMES[function]
    with pytest.raises(ValueError, match="has shape") as error:
        CALLS[function](np.ones(u), np.ones(v), np.ones((7, 3)))
    assert f"{first} has shape {u} and {second} has shape {v}" in str(error.value)
    assert "both must be (n,) or (…, n, r) with the same n and r" in str(error.value)


@pytest.mark.parametrize("b", [(6,), (6, 3), (3, 7), (5, 6, 3), ()])
def test_b_that_does_not_match_shows_its_shape_and_the_right_one(call, b):
    with pytest.raises(ValueError, match="B has shape") as error:
        call(np.ones((7, 2)), np.ones((7, 2)), np.ones(b))
    message = str(error.value)
    assert f"B has shape {b}" in message
    assert "(7,) or (…, 7, k)" in message


@pytest.mark.parametrize(
    ("u", "v", "b"),
    [((2, 7, 2), (3, 7, 2), (7, 3)), ((2, 7, 2), (7, 2), (3, 7, 3))],
)
def test_batch_axes_that_do_not_broadcast_are_shown(call, u, v, b):
    with pytest.raises(ValueError, match=r"batch axes of .* do not broadcast") as error:
        call(np.ones(u), np.ones(v), np.ones(b))
    assert str(u) in str(error.value)


def test_unknown_method_is_refused_with_those_there_are():
    U, V, B = problem("float64", "float64", "float64")
    with pytest.raises(ValueError, match="'best'; it must be one of auto, gram, qr, direct"):
        skew_expm_multiply(U, V, B, method="best")
    with pytest.raises(ValueError, match="auto, gram, qr, direct"):
        LowRankSkew(U, V, method="QR")


# --- values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("function", CALLS)
@pytest.mark.parametrize("argument", range(3))
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_value_that_is_not_finite_is_named_with_its_place(function, argument, bad):
    operands = problem("float64", "float64", "float64")
    operands[argument][4, 1] = bad
    name = NAMES[function][argument]
    with pytest.raises(ValueError, match=rf"^{name}\[4, 1\] is {bad}; all entries must be finite"):
        CALLS[function](*operands)


def test_inputs_are_never_written_to(call):
    for kind in ("float64", "complex64", "int64"):
        operands = problem(kind, kind, kind)
        before = [a.copy() for a in operands]
        for a in operands:
            a.flags.writeable = False
        call(*operands, [0.5, 1.0])
        assert all(np.array_equal(a, b) for a, b in zip(operands, before, strict=True))


@pytest.mark.parametrize("r", [1, 33])
def test_factors_whose_product_overflows_are_refused_without_a_warning(call, r):
    """33: beyond the compiled core. Warnings are errors here."""
    U = np.full((100, r), 1e200)
    with pytest.raises(ValueError, match="overflow"):
        call(U, U[::-1] * np.arange(1, 101)[:, None], np.ones(100))


@pytest.mark.parametrize("r", [1, 2, 33])
def test_t_that_overflows_is_refused_without_a_warning(r):
    U, V = np.random.default_rng(3).standard_normal((2, 100, r))
    for method in ("auto", "gram", "qr", "direct"):
        with pytest.raises(ValueError, match=r"overflows the dtype; scale t, U or V down"):
            skew_expm_multiply(U * 1e5, V, np.ones(100), 1e306, method=method)


def test_t_beyond_single_precision_is_refused_without_a_warning():
    U, V, B = problem("float32", "float32", "float32")
    with pytest.raises(ValueError, match="overflows the dtype"):
        skew_expm_multiply(U, V, B, 1e39)


# --- out -------------------------------------------------------------------------------------


def test_out_is_returned_and_holds_the_result(call):
    for t, shape in ((0.3, (N, K)), ([0.3, 0.4], (2, N, K))):
        U, V, B = problem("float64", "float64", "float64")
        out = np.full(shape, np.nan)
        assert call(U, V, B, t, out=out) is out
        assert np.array_equal(out, call(U, V, B, t))


def test_out_for_a_vector(call):
    U, V, B = problem("float64", "float64", "float64")
    b = B[:, 0].copy()
    expected = call(U, V, b, 0.3)
    out = np.empty(N)
    assert call(U, V, b, 0.3, out=out) is out
    assert np.array_equal(out, expected)
    assert call(U, V, b, 0.3, out=b) is b
    assert np.array_equal(b, expected)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_a_small_problem_with_out_takes_the_short_way(monkeypatch, dtype):
    """The same bits as without it, and nothing that `solve` would have to look at."""
    U, V, B = problem(dtype, dtype, dtype)
    expected = skew_expm_multiply(U, V, B, 0.3)
    monkeypatch.setattr(_linear, "solve", None)
    for out in (np.empty_like(B), B):
        assert skew_expm_multiply(U, V, B, 0.3, out=out) is out
        assert np.array_equal(out, expected)


@pytest.mark.parametrize("layout", ["C", "Fortran", "reversed", "sliced", "unaligned"])
def test_out_may_be_b_itself_in_any_layout(call, layout):
    U, V, B = problem("float64", "float64", "float64")
    expected = call(U, V, B, 0.3)
    B = gen.LAYOUTS[layout](B.copy())
    assert call(U, V, B, 0.3, out=B) is B
    assert np.abs(B - expected).max() <= bound(U, V)


def test_out_may_be_another_view_of_b(call):
    U, V, B = problem("float64", "float64", "float64")
    expected = call(U, V, B, 0.3)
    view = B[:, :]
    assert call(U, V, B, 0.3, out=view) is view
    assert np.array_equal(B, expected)


@pytest.mark.parametrize(
    "part",
    [
        lambda B: B[::-1],
        lambda B: B[:, ::-1],
        lambda B: B.T.reshape(N, K) if B.flags.f_contiguous else B[::-1, ::-1],
    ],
)
def test_out_that_overlaps_b_in_another_order_is_refused(call, part):
    U, V, B = problem("float64", "float64", "float64")
    with pytest.raises(ValueError, match="out overlaps an input; pass B itself or an array"):
        call(U, V, B, 0.3, out=part(B))


@pytest.mark.parametrize("argument", range(3))
def test_out_that_overlaps_an_input_partly_is_refused(call, argument):
    operands = problem("float64", "float64", "float64")
    memory = np.zeros((N + 1, K))
    operands[argument] = memory[1:, : operands[argument].shape[1]]
    with pytest.raises(ValueError, match="out overlaps an input"):
        call(*operands, 0.3, out=memory[:-1])


def test_out_beside_an_input_in_one_buffer_is_allowed(call):
    """Interleaved columns share no element."""
    U, V, B = problem("float64", "float64", "float64")
    memory = np.zeros((N, 2 * K))
    memory[:, ::2] = B
    call(U, V, memory[:, ::2], 0.3, out=memory[:, 1::2])
    assert np.array_equal(memory[:, ::2], B)
    assert np.abs(memory[:, 1::2] - call(U, V, B, 0.3)).max() <= bound(U, V)


def test_out_of_a_grid_may_not_be_b(call):
    U, V, _ = problem("float64", "float64", "float64")
    memory = np.zeros((1, N, K))
    with pytest.raises(ValueError, match="out overlaps"):
        call(U, V, memory[0], [0.3], out=memory)


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        (np.empty((N, K + 1)), ValueError, r"\(7, 4\) .* the result has shape \(7, 3\)"),
        (np.empty((1, N, K)), ValueError, "the result has shape"),
        (np.empty(N * K), ValueError, "the result has shape"),
        (np.empty((N, K), "float32"), ValueError, "dtype float32; .* dtype float64"),
        (np.empty((N, K), complex), ValueError, "dtype complex128; .* dtype float64"),
        (np.empty((N, K), ">f8"), ValueError, "dtype"),
        ([[0.0] * K] * N, TypeError, "out is a list; pass a NumPy array"),
        (np.broadcast_to(np.zeros(K), (N, K)), ValueError, "read-only; pass a writable"),
    ],
)
def test_out_that_does_not_fit_is_refused(call, out, error, message):
    with pytest.raises(error, match=message):
        call(*problem("float64", "float64", "float64"), 0.3, out=out)


def test_a_failed_call_leaves_a_valid_b_in_place(call):
    """B as its own output is written in the last pass, after everything that can fail."""
    U, V, B = problem("float64", "float64", "float64")
    before = B.copy()
    V[3, 1] = np.nan
    with pytest.raises(ValueError, match="finite"):
        call(U, V, B, out=B)
    assert np.array_equal(B, before)


def test_overlap_that_is_too_hard_to_decide_counts_as_overlap(monkeypatch):
    """The exact answer is a hard problem in general; the search for it is bounded."""
    a = np.zeros(100)
    monkeypatch.setattr(
        np, "shares_memory", lambda *_, **__: (_ for _ in ()).throw(np.exceptions.TooHardError())
    )
    assert inputs.overlap(a[:50], a[49:])
    assert not inputs.overlap(a[:50], a[50:])


# --- adjoints --------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("method", ["gram", "qr", "direct"])
def test_t_and_minus_t_are_mutually_adjoint(dtype, method):
    rng = np.random.default_rng(4)
    U, V = gen.generic(rng, 12, 2, dtype)
    eye = np.eye(12, dtype=dtype)
    forward, back = (skew_expm_multiply(U, V, eye, t, method=method) for t in (0.7, -0.7))
    error = np.linalg.norm(forward - np.conj(back.T), 2)
    assert error <= bound(U, V, 0.7)
    assert (naive.forward_errors(forward, U, V, eye, 0.7) <= bound(U, V, 0.7)).all()
