"""The contract, over every array library that is installed; NumPy is one of them.

Results are compared with the exact oracle on the host. A feature that a library does not declare
must be refused: then the test is expected to fail, and an unexpected pass fails the run.
"""

from __future__ import annotations

import copy
import pickle
from pathlib import Path

import numpy as np
import pytest

from lowrank_expm import LowRankSkew, _array, derivatives, expm_multiply, skew_expm_multiply
from lowrank_expm.attention import orthogonal_attention

from . import generators as gen
from . import naive
from .conftest import INSTALLED
from .libraries import LIBRARIES, ready, table

FORWARD, DERIVATIVE = 40, 1000
DEFECT = {"qr": 32, "direct": 32, "auto": 80}
METHODS = ("auto", "gram", "qr", "direct")
DEVICES = [name for name in LIBRARIES if name not in ("numpy", "dask")]


@pytest.fixture(params=INSTALLED)
def library(request):
    """Every installed array library in turn, Dask among them."""
    with ready(request.param) as library:
        yield library


@pytest.fixture
def needs(library, request):
    """Declare what a test needs; where the library lacks it, the test must fail."""

    def declare(*features):
        missing = set(features) - library.features
        if missing:
            kinds = (TypeError, ValueError, AttributeError)
            request.applymarker(pytest.mark.xfail(raises=kinds, strict=True))

    return declare


def draw(name, dtype, n=14, r=2, k=2, seed=0):
    rng = np.random.default_rng([seed, len(name), len(dtype)])
    U, V = gen.MAKERS[name](rng, n, r, dtype)
    return U, V, gen.normal(rng, (n, k), dtype)


def limit(U, V, t=1.0, factor=FORWARD):
    return factor * gen.unit(U.dtype) * max(1.0, gen.rho(U, V, t))


class OnHost:
    """A LowRankUnitary of any library, for the oracle."""

    def __init__(self, library, Q):
        self.core = library.numpy(Q.core)
        self._frame = np.broadcast_to(
            F := library.numpy(Q.frame()), (*self.core.shape[:-2], *F.shape[-2:])
        )
        self.shape = Q.shape
        self.dtype = self.core.dtype

    def frame(self):
        return self._frame


def defect_limit(U, method):
    return DEFECT[method] * np.sqrt(2 * U.shape[-1]) * gen.unit(U.dtype)


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("name", sorted(gen.MAKERS))
def test_forward_error(library, name, dtype):
    U, V, B = draw(name, dtype)
    Y = skew_expm_multiply(*map(library.asarray, (U, V, B)))
    assert _array.library(Y) == (None if library.name == "numpy" else library.name)
    Y = library.numpy(Y)
    assert Y.dtype == dtype
    assert naive.forward_errors(Y, U, V, B) <= limit(U, V)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("n", [14, 3])
def test_every_route(library, needs, method, n):
    if method != "gram":
        needs("routes")
    for dtype in ("float32", "complex128"):
        U, V, B = draw("generic", dtype, n)
        Y = skew_expm_multiply(*map(library.asarray, (U, V, B)), -0.7, method=method)
        assert naive.forward_errors(library.numpy(Y), U, V, B, -0.7) <= limit(U, V, 0.7)


@pytest.mark.parametrize("method", ["auto", "qr"])
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("name", sorted(gen.MAKERS))
def test_defect_drift_and_certificate(library, needs, name, dtype, method):
    needs("objects")
    U, V, B = draw(name, dtype)
    Q = LowRankSkew(library.asarray(U), library.asarray(V), method=method).expm()
    defect = naive.defects(OnHost(library, Q))
    assert defect <= defect_limit(U, method)
    bound = Q.certificate.defect_bound
    bound = bound if isinstance(bound, float) else library.numpy(bound)
    # The qr route rests on a basis that is orthonormal to rounding, whatever its certificate.
    assert defect <= max(float(bound), defect_limit(U, "qr"))
    Y = library.numpy(Q @ library.asarray(B))
    assert naive.norm_drifts(Y, B).max() <= defect_limit(U, method)


@pytest.mark.parametrize("name", ["generic", "nearly_parallel"])
@pytest.mark.parametrize("dtype", ["float32", "complex128"])
def test_grid_is_its_single_calls(library, needs, name, dtype):
    needs("grid")
    U, V, B = draw(name, dtype)
    grid = np.array([-3.0, 0.0, 1.0]).astype(np.zeros(0, dtype).real.dtype)
    U_, V_, B_ = map(library.asarray, (U, V, B))
    Y = library.numpy(skew_expm_multiply(U_, V_, B_, library.asarray(grid)))
    assert Y.shape == (3, *B.shape)
    for t, y in zip(grid.tolist(), Y, strict=True):
        assert naive.forward_errors(y, U, V, B, t) <= limit(U, V, t)
    listed = skew_expm_multiply(U_, V_, B_, grid.tolist())
    assert library.numpy(listed).shape == Y.shape


def test_time_zero_returns_b_and_backwards_is_the_adjoint(library, needs):
    U, V, B = draw("generic", "float64")
    U_, V_, B_ = map(library.asarray, (U, V, B))
    np.testing.assert_array_equal(library.numpy(skew_expm_multiply(U_, V_, B_, 0.0)), B)
    there = skew_expm_multiply(U_, V_, B_, 2.0)
    back = library.numpy(skew_expm_multiply(U_, V_, there, -2.0))
    assert naive.relative(np.linalg.norm(back - B), np.linalg.norm(B)) <= 2 * limit(U, V, 2.0)


@pytest.mark.parametrize("shapes", [((3,), (3,), ()), ((2, 1), (3,), (2, 3)), ((), (), (4,))])
def test_batches_broadcast(library, needs, shapes):
    needs("batch")
    rng = np.random.default_rng(0)
    for dtype in ("float64", "complex64"):
        U, V, B = (
            (gen.normal(rng, (*s, 14, w), dtype) / 3).astype(dtype)
            for s, w in zip(shapes, (2, 2, 3), strict=True)
        )
        Y = library.numpy(skew_expm_multiply(*map(library.asarray, (U, V, B))))
        expected = skew_expm_multiply(U, V, B)
        assert Y.shape == expected.shape
        assert np.abs(Y - expected).max() <= 400 * gen.unit(dtype)


@pytest.mark.parametrize("shape", [(0, 5, 2, 3), (2, 0, 2, 3), (2, 5, 0, 3), (2, 5, 2, 0)])
def test_empty_axes(library, needs, shape):
    needs("batch")
    batch, n, r, k = shape
    U, B = np.ones((batch, n, r)), np.ones((batch, n, k))
    Y = library.numpy(skew_expm_multiply(*map(library.asarray, (U, U, B))))
    np.testing.assert_array_equal(Y, B)


def test_vectors_and_integers(library):
    U, V, B = draw("generic", "float64", 14, 1, 1)
    u, v, b = (library.asarray(a[:, 0]) for a in (U, V, B))
    y = library.numpy(skew_expm_multiply(u, v, b))
    assert y.shape == (14,)
    assert naive.forward_errors(y[:, None], U, V, B) <= limit(U, V)
    whole = library.asarray(np.arange(14) % 3)
    y = library.numpy(skew_expm_multiply(whole, library.asarray(np.arange(14) % 2), whole, 0.1))
    assert y.dtype.kind == "f"


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_imaginary_part_of_b_survives(library, needs, dtype):
    needs("complex")
    U, V, B = draw("generic", dtype)
    B = (B + 1j * B[::-1]).astype(np.result_type(dtype, np.complex64))
    Y = library.numpy(skew_expm_multiply(*map(library.asarray, (U, V, B))))
    assert Y.dtype == B.dtype
    assert naive.forward_errors(Y, U, V, B) <= limit(U, V)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
@pytest.mark.parametrize("argument", range(3))
@pytest.mark.parametrize("n", [14, 3])
def test_a_value_that_is_not_finite_is_named(library, argument, bad, n):
    operands = list(draw("generic", "float64", n))
    operands[argument][1, 1] = bad
    with pytest.raises(ValueError, match="UVB"[argument]):
        library.numpy(skew_expm_multiply(*map(library.asarray, operands)))


def test_extreme_factors(library, needs):
    """Squares that leave the range of the dtype where the problem does not."""
    needs("routes")
    for dtype, size in (("float32", 1e25), ("float64", 1e200)):
        U, V, B = draw("generic", dtype)
        wide = (U * np.asarray(size, dtype), V / np.asarray(size, dtype))
        Y = skew_expm_multiply(*map(library.asarray, (*wide, B)))
        assert naive.forward_errors(library.numpy(Y), U, V, B) <= 2 * limit(U, V)


def test_general_low_rank(library):
    for dtype in ("float32", "complex128"):
        L, R, B = draw("generic", dtype)
        for t in (0.5, -1.0):
            Y = library.numpy(expm_multiply(*map(library.asarray, (L, R, B)), t))
            error = naive.general_errors(Y, L, R, B, t)
            size = np.linalg.norm(L, 2) * np.linalg.norm(R, 2)
            assert error <= FORWARD * gen.unit(dtype) * max(1.0, size) * np.exp(abs(t) * size)


@pytest.mark.parametrize("argument", range(3))
def test_a_value_that_is_not_finite_in_a_general_problem(library, argument):
    operands = list(draw("generic", "float64"))
    operands[argument][1, 1] = np.nan
    with pytest.raises(ValueError, match="LRB"[argument]):
        library.numpy(expm_multiply(*map(library.asarray, operands)))


def test_general_low_rank_at_a_complex_time(library, needs):
    needs("complex")
    L, R, B = draw("generic", "float64")
    Y = library.numpy(expm_multiply(*map(library.asarray, (L, R, B)), 0.3 + 0.2j))
    assert naive.general_errors(Y, L, R, B, 0.3 + 0.2j) <= 1000 * gen.unit("float64")


def test_a_complex_time_is_refused(library):
    with pytest.raises(TypeError, match="t is complex"):
        skew_expm_multiply(*map(library.asarray, draw("generic", "float64")), 1j)


def test_shapes_that_do_not_fit_are_named(library):
    U, V, B = map(library.asarray, draw("generic", "float64"))
    with pytest.raises(ValueError, match="same n and r"):
        skew_expm_multiply(U, V[:, :1], B)
    with pytest.raises(ValueError, match="B has shape"):
        skew_expm_multiply(U, V, B[:5, :])
    with pytest.raises(ValueError, match="method"):
        skew_expm_multiply(U, V, B, method="best")


@pytest.mark.parametrize("argument", range(4))
def test_mixing_libraries_is_an_error(library, argument):
    other = LIBRARIES["array_api_strict" if library.name == "numpy" else "numpy"]
    operands = [library.asarray(a) for a in (*draw("generic", "float64"), np.ones(2))]
    operands[argument] = other.asarray(library.numpy(operands[argument]))
    with pytest.raises(TypeError, match=r"one library|beside dask"):
        skew_expm_multiply(*operands)


def test_mixing_devices_is_an_error():
    strict = LIBRARIES["array_api_strict"]
    U, V, B = draw("generic", "float64")
    with pytest.raises(TypeError, match="one device"):
        skew_expm_multiply(strict.asarray(U), strict.asarray(V), strict.xp.asarray(B))


@pytest.mark.parametrize("dtype", ["float64", "complex64"])
@pytest.mark.parametrize("name", ["generic", "nearly_parallel", "equal", "both_zero", "huge"])
@pytest.mark.parametrize("n", [14, 3])
def test_derivatives_are_those_of_numpy(library, needs, name, dtype, n):
    """Those of NumPy are tested against exact ones."""
    needs("derivatives")
    U, V, B = draw(name, dtype, n)
    dU, dV, dB = (a[::-1].copy() for a in (U, V, B))
    given = [library.asarray(a) for a in (U, V, B, dU, dV, dB)]
    Y, dY = derivatives.jvp(*given, dt=0.3)
    _, exact = derivatives.jvp(U, V, B, dU, dV, dB, dt=0.3)
    size = np.linalg.norm(exact) + np.linalg.norm(B)
    tolerance = 2 * limit(U, V, factor=DERIVATIVE)
    assert np.linalg.norm(library.numpy(dY) - exact) <= tolerance * size
    Y, pullback = derivatives.vjp(*given[:3])
    bars = pullback(given[5])
    expected = derivatives.vjp(U, V, B)[1](dB)
    assert library.numpy(Y).shape == B.shape
    for found, right in zip(bars, expected, strict=True):
        found = found if isinstance(found, float) else library.numpy(found)
        scale = np.linalg.norm(right) + np.linalg.norm(B) ** 2
        assert np.linalg.norm(found - right) <= tolerance * scale


def test_objects(library, needs):
    needs("objects")
    U, V, B = draw("generic", "complex128")
    S, S_ = LowRankSkew(U, V), LowRankSkew(library.asarray(U), library.asarray(V))
    B_ = library.asarray(B)
    tolerance = 10 * limit(U, V)
    for found, right in (
        (S_ @ B_, S @ B),
        (S_.T @ B_, S.T @ B),
        (S_.H @ B_, S.H @ B),
        (S_.to_dense(), S.to_dense()),
        (S_.angles(), S.angles()),
        (S_.expm_multiply(B_, 0.5), S.expm_multiply(B, 0.5)),
        (S_.expm(0.5) @ B_, S.expm(0.5) @ B),
        (S_.expm(0.5).H @ B_, S.expm(0.5).H @ B),
        (S_.expm(0.5).T @ B_, S.expm(0.5).T @ B),
        (S_.expm([0.5, 2.0]) @ B_, S.expm([0.5, 2.0]) @ B),
        (S_.expm(0.5).to_dense(), S.expm(0.5).to_dense()),
    ):
        assert np.abs(library.numpy(found) - right).max() <= tolerance


def test_the_error_bound_holds(library, needs):
    needs("objects")
    for name in ("generic", "tiny", "nearly_parallel", "huge"):
        for dtype in ("float32", "float64"):
            U, V, B = draw(name, dtype)
            Q = LowRankSkew(library.asarray(U), library.asarray(V)).expm()
            bound = Q.certificate.error_bound
            bound = bound if isinstance(bound, float) else float(library.numpy(bound))
            Y = library.numpy(Q @ library.asarray(B))
            assert naive.forward_errors(Y, U, V, B).max() <= bound + 4 * gen.unit(dtype)


def test_out(library, needs):
    needs("out")
    U, V, B = map(library.asarray, draw("generic", "float64"))
    out = library.asarray(np.zeros(B.shape))
    Y = skew_expm_multiply(U, V, B, out=out)
    assert Y is out
    right = library.numpy(skew_expm_multiply(U, V, B))
    np.testing.assert_array_equal(library.numpy(out), right)
    with pytest.raises(ValueError, match="out has shape"):
        skew_expm_multiply(U, V, B, out=out[:3, :])


def test_half_precision_computes_in_single_and_comes_back(library, needs):
    needs("half")
    U, V, B = draw("generic", "float32")
    half = [library.asarray(a.astype(np.float16)) for a in (U, V, B)]
    Y = library.numpy(skew_expm_multiply(*half))
    assert Y.dtype == np.float16
    exact = skew_expm_multiply(*(a.astype(np.float16).astype(np.float64) for a in (U, V, B)))
    assert np.abs(Y - exact).max() <= 2**-10 * np.abs(exact).max()


def test_the_table_of_the_documentation_names_every_library():
    rows = table().splitlines()
    assert all(library.title in rows[0] for library in LIBRARIES.values())
    assert len(rows) > 10


@pytest.fixture
def looks(monkeypatch):
    """How often anybody waited for the device of the strict library, which refuses other ways."""
    import array_api_strict

    count = []

    def refuse(*args):
        raise AssertionError("a value was looked at behind the library's back")

    for name in ("__bool__", "__float__", "__int__", "__complex__", "__index__"):
        monkeypatch.setattr(array_api_strict._array_object.Array, name, refuse)
    monkeypatch.setattr(_array, "to_host", _counted(_array.to_host, count))
    for module in ("_portable", "_foreign"):
        monkeypatch.setattr(f"lowrank_expm.{module}.to_host", _array.to_host)
    return count


def _counted(function, count):
    """A function that keeps count of its calls."""

    def counted(*args):
        count.append(args)
        return function(*args)

    return counted


@pytest.mark.parametrize("name", ["generic", "nearly_parallel", "huge", "both_zero"])
@pytest.mark.parametrize(
    ("n", "method", "most"), [(14, "auto", 1), (3, "auto", 1), (14, "gram", 0)]
)
def test_how_often_a_call_waits_for_the_device(looks, name, n, method, most):
    """Once for "auto", never for "gram": the certificate stays on the device."""
    strict = LIBRARIES["array_api_strict"]
    operands = [strict.asarray(a) for a in draw(name, "float64", n)]
    skew_expm_multiply(*operands, 0.7, method=method)
    Q = LowRankSkew(*operands[:2], method=method).expm(0.7)
    assert Q.certificate.defect_bound is not None
    assert len(looks) <= 2 * most


def test_gram_is_nan_beyond_its_bound_and_never_wrong():
    strict = LIBRARIES["array_api_strict"]
    rng = np.random.default_rng(0)
    U, V = gen.with_norm(rng, 14, 2, "float64", 1.0)
    B = gen.normal(rng, (14, 2), "float64")
    given = [strict.asarray(a) for a in (U, V, B)]
    for exponent in range(0, 10):
        t = 10.0**exponent
        Y = strict.numpy(skew_expm_multiply(*given, t, method="gram"))
        if np.isnan(Y).any():
            assert np.isnan(Y).all()
            assert t > 1e5
        else:
            assert naive.forward_errors(Y, U, V, B, t).max() <= limit(U, V, t)
            assert t < 1e6


def test_operators_can_be_copied_and_pickled(library, needs):
    needs("objects")
    U, V, B = draw("generic", "float64")
    U_, V_, B_ = map(library.asarray, (U, V, B))
    S = LowRankSkew(U_, V_)
    right = library.numpy(S.expm() @ B_)
    for made in (copy.copy(S), copy.deepcopy(S)):
        np.testing.assert_array_equal(library.numpy(made.expm() @ B_), right)
    for made in (copy.copy(S.expm()), copy.deepcopy(S.expm())):
        np.testing.assert_array_equal(library.numpy(made @ B_), right)
    if library.name != "array_api_strict":  # whose devices cannot be pickled
        Q = pickle.loads(pickle.dumps(S.expm()))
        np.testing.assert_array_equal(library.numpy(Q @ B_), right)


def test_the_page_on_libraries_has_the_declared_table():
    page = Path(__file__).parent.parent / "docs" / "guide" / "libraries.md"
    assert table() in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("shape", [(), (3,)])
def test_an_alpha_in_less_precision_costs_none(library, shape):
    q, k, v = gen.normal(np.random.default_rng(4), (3, 3, 30, 4), "float64")
    given = [library.asarray(a) for a in (q, k, v)]
    expected = library.numpy(orthogonal_attention(*given, alpha=0.5))
    alpha = library.asarray(np.full(shape, 0.5, "float32"))
    alpha = alpha.rechunk(-1) if hasattr(alpha, "rechunk") else alpha
    found = orthogonal_attention(*given, alpha=alpha)
    assert library.numpy(found).dtype == np.float64
    assert np.abs(library.numpy(found) - expected).max() <= 200 * gen.unit("float64")
