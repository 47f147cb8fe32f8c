"""JAX: the contract traced and untraced, every transformation, the static bound, precision."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import lowrank_expm
from lowrank_expm import _portable, derivatives, expm_multiply, skew_expm_multiply
from lowrank_expm.core import selection

from . import derivative_accuracy as accuracy
from . import generators as gen
from . import naive
from .libraries import ready
from .test_contract import forward_bound

DERIVATIVES = 1e3
# Where the Gram matrix cannot tell U from V, and what is beyond the static bound.
PARALLEL = ("nearly_parallel", "parallel_at_random")
FAR = ("huge", "any_norm", "far_columns")


@pytest.fixture(autouse=True)
def double_precision() -> Iterator[None]:
    """JAX with 64-bit numbers, and as it was before afterwards."""
    with ready("jax"):
        yield


def draw(name, dtype, n=14, r=2, k=2, seed=0):
    rng = np.random.default_rng([seed, len(name), len(dtype)])
    U, V = gen.MAKERS[name](rng, n, r, dtype)
    return U, V, gen.normal(rng, (n, k), dtype)


def arrays(*given):
    return [jnp.asarray(a) for a in given]


def relative(a, b):
    """‖a − b‖ / ‖b‖."""
    return float(np.linalg.norm(np.asarray(a) - b) / np.linalg.norm(b))


# --- the contract ----------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("n", [14, 3])
def test_forward_error_traced_and_untraced(n, dtype):
    """All hard inputs as one batch, so that they are compiled once."""
    cases = [(name, draw(name, dtype, n, seed=s)) for name in sorted(gen.MAKERS) for s in range(2)]
    stacked = arrays(*(np.stack(part) for part in zip(*(c for _, c in cases), strict=True)))
    traced = np.asarray(jax.jit(skew_expm_multiply)(*stacked))
    assert traced.dtype == dtype
    for (name, (U, V, B)), Y in zip(cases, traced, strict=True):
        if name in ("huge", *PARALLEL) and not np.isfinite(Y).all():
            assert np.isnan(Y).all()
            continue
        if n > 4 and name in PARALLEL:
            continue
        assert naive.forward_errors(Y, U, V, B) <= forward_bound(U, V), name


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_untraced_arrays_keep_the_contract_where_the_gram_matrix_cannot(dtype):
    """Also at angles for which the static bound does not suffice."""
    for name in ("generic", "huge", *PARALLEL):
        for seed in range(2):
            U, V, B = draw(name, dtype, seed=seed)
            Y = skew_expm_multiply(*arrays(U, V, B))
            assert naive.forward_errors(np.asarray(Y), U, V, B) <= forward_bound(U, V)


def known(a):
    """An array in NumPy; FloatingPointError where JAX says that it does not know."""
    if np.isnan(a).any():
        raise FloatingPointError
    return np.asarray(a)


class Traced:
    """`derivatives` by JAX's own transformations, compiled; complex cotangents as there."""

    @staticmethod
    def jvp(U, V, B, dU, dV, dB, *, t, dt):
        directions = [
            np.zeros_like(a) if d is None else d
            for a, d in zip((U, V, B), (dU, dV, dB), strict=True)
        ]
        Y, dY = _jvp((U, V, B, float(t)), (*directions, float(dt)))
        return known(Y), known(dY)

    @staticmethod
    def vjp(U, V, B, *, t):
        def pullback(Ybar):
            *bars, tbar = _vjp((U, V, B, float(t)), np.conj(Ybar))
            return *(np.conj(known(a)) for a in bars), float(tbar)

        return None, pullback


@jax.jit
def _jvp(primals, tangents):
    return jax.jvp(skew_expm_multiply, *_typed(primals, tangents))


@jax.jit
def _vjp(primals, Ybar):
    (primals,) = _typed(primals)
    return jax.vjp(skew_expm_multiply, *primals)[1](Ybar)


def _typed(*groups):
    """Arrays of JAX, t in the precision of the others."""
    kind = jnp.finfo(groups[0][0].dtype).dtype
    return [(*map(jnp.asarray, group[:3]), jnp.asarray(group[3], kind)) for group in groups]


@pytest.mark.parametrize(
    ("n", "dtype"), [*((8, d) for d in gen.DTYPES), (3, "float32"), (3, "complex128")]
)
def test_derivatives_traced(n, dtype, monkeypatch):
    """Every direction and cotangent on every hard input: right, or NaN where that is announced."""
    monkeypatch.setattr(accuracy, "derivatives", Traced)
    for kind in sorted(accuracy.MAKERS):
        if n == 3 and kind in ("repeated_angles", "multiples_of_pi"):
            continue
        problem = accuracy.Problem(np.random.default_rng(len(kind)), kind, dtype, n, 2)
        try:
            errors = accuracy.measure(problem, ("dU, dV, dB, dt", "dU"))
        except FloatingPointError:
            assert kind in FAR
            continue
        if n == 3 or kind not in PARALLEL:
            assert max(errors.values()) <= DERIVATIVES, (kind, errors)


def test_derivatives_untraced_where_the_gram_matrix_cannot(monkeypatch):
    """jax.vjp of concrete arrays looks at their values, and takes the other route."""
    monkeypatch.setattr(accuracy, "derivatives", Traced)
    monkeypatch.setitem(globals(), "_jvp", _jvp.__wrapped__)
    monkeypatch.setitem(globals(), "_vjp", _vjp.__wrapped__)
    for seed in range(3):
        problem = accuracy.Problem(np.random.default_rng(seed), PARALLEL[0], "float64", 8, 2)
        errors = accuracy.measure(problem, ("dU, dV, dB, dt",))
        assert max(errors.values()) <= DERIVATIVES, errors


# --- transformations -------------------------------------------------------------------------


def loss(U, V, B, t):
    """A real function of everything."""
    return jnp.sum(jnp.abs(skew_expm_multiply(U, V, B, t)) ** 4)


ALL = (0, 1, 2, 3)


def with_a_zero_column(n):
    """Two pairs, one of which adds nothing but has a derivative."""
    U, V, B = draw("generic", "float64", n=n)
    U[:, 0] = 0
    return arrays(U, V, B)


def test_reverse_and_forward_mode_agree_in_any_nesting():
    U, V, B = with_a_zero_column(7)
    t = jnp.asarray(0.7)
    forward = jax.jacfwd(loss, ALL)(U, V, B, t)
    for reverse in (
        jax.grad(loss, ALL),
        jax.jit(jax.grad(loss, ALL)),
        jax.grad(jax.jit(loss), ALL),
        jax.checkpoint(jax.jacrev(loss, ALL)),
        lambda *a: jax.value_and_grad(loss, ALL)(*a)[1],
    ):
        for a, b in zip(reverse(U, V, B, t), forward, strict=True):
            assert relative(a, b) <= 1e-13
    assert forward[0][:, 0].any(), "a pair with a zero column has a derivative"


@pytest.mark.parametrize("n", [7, 3])
def test_second_derivatives(n):
    """Against differences of first ones, U and V at once; direct for n of 3."""
    U, V, B = with_a_zero_column(n)
    D, t, h = jnp.cos(jnp.arange(2.0 * n).reshape(n, 2)), jnp.asarray(0.7), 1e-5
    first = jax.jit(jax.grad(loss, ALL))

    def along(x):
        return loss(U + x * D, V - x * D, B, t + x)

    def slope(x):
        return sum(
            jnp.vdot(bar, d)
            for bar, d in zip(
                first(U + x * D, V - x * D, B, t + x), (D, -D, 0 * B, 1.0), strict=True
            )
        )

    difference = (slope(h) - slope(-h)) / (2 * h)
    for second in (jax.grad(jax.grad(along)), jax.hessian(along), jax.jit(jax.hessian(along))):
        assert float(second(0.0)) == pytest.approx(float(difference), rel=1e-7)


def test_vmap_is_a_batch():
    U, V, B = (
        np.stack(p)
        for p in zip(*(draw("generic", "float64", seed=s) for s in range(3)), strict=True)
    )
    ts = np.array([0.3, -1.0, 50.0])
    Y = np.asarray(jax.vmap(skew_expm_multiply)(*arrays(U, V, B, ts)))
    bars = jax.vmap(jax.grad(loss, ALL))(*arrays(U, V, B, ts))
    for i, t in enumerate(ts):
        expected = skew_expm_multiply(U[i], V[i], B[i], t)
        rho = max(1.0, gen.rho(U[i], V[i], t))
        assert relative(Y[i], expected) <= 80 * gen.unit("float64") * rho
        one = jax.grad(loss, ALL)(*arrays(U[i], V[i], B[i]), t)
        for a, b in zip(bars, one, strict=True):
            assert relative(a[i], b) <= DERIVATIVES * gen.unit("float64") * rho
    batch = skew_expm_multiply(*arrays(U, V, B), 0.3)
    over_columns = jax.vmap(skew_expm_multiply, (None, None, 2, None), 2)
    np.testing.assert_allclose(
        over_columns(*arrays(U[0], V[0], B[0][..., None]), 0.3)[..., 0], batch[0], atol=1e-13
    )


def test_a_grid_of_times_and_its_derivative():
    U, V, B = draw("generic", "float64")
    ts = np.array([0.0, 0.5, -2.0])
    Y, pullback = jax.vjp(lambda t: skew_expm_multiply(*arrays(U, V, B), t), jnp.asarray(ts))
    expected, reference = derivatives.vjp(U, V, B, t=ts)
    assert relative(Y, expected) <= 1e-14
    assert (
        relative(
            pullback(Y * jnp.arange(14.0)[:, None])[0],
            reference(expected * np.arange(14.0)[:, None])[3],
        )
        <= 1e-13
    )
    _, back = derivatives.vjp(U, V, B, t=ts)
    for method in ("auto", "qr"):
        f = partial(skew_expm_multiply, method=method)
        gradient = jax.grad(lambda *a, f=f: jnp.sum(f(*a) ** 3), ALL)
        for a, b in zip(gradient(*arrays(U, V, B, ts)), back(3 * expected**2), strict=True):
            assert relative(a, b) <= 1e-13


def test_at_zero_time_the_result_is_b_and_the_gradient_is_right():
    U, V, B = draw("generic", "float32")
    Y, pullback = derivatives.vjp(U, V, B, t=0.0)
    value, bars = jax.jit(jax.value_and_grad(loss, ALL))(*arrays(U, V, B), 0.0)
    assert float(value) == pytest.approx(float(np.sum(Y**4)))
    for a, b in zip(bars, pullback(4 * Y**3), strict=True):
        assert np.linalg.norm(np.asarray(a) - b) <= 1e-5 * np.linalg.norm(b)
    assert np.array_equal(jax.jit(skew_expm_multiply)(*arrays(U, V, B), 0.0), B)


def test_the_route_qr_by_name_traced():
    """Accurate and differentiable once for nearly parallel factors; twice is refused."""
    U, V, B = draw("nearly_parallel", "float64")

    def f(*a):
        return skew_expm_multiply(*a, method="qr")

    Y, pullback = jax.vjp(jax.jit(f), *arrays(U, V, B))
    assert naive.forward_errors(np.asarray(Y), U, V, B) <= forward_bound(U, V)
    Ybar = draw("generic", "float64", seed=1)[2]
    exact = naive.exact_vjp(U, V, B, Ybar, 1.0)
    for bar, e in zip(pullback(jnp.asarray(Ybar)), exact, strict=True):
        assert relative(bar, e.round()) <= DERIVATIVES * gen.unit("float64") * gen.rho(U, V)
    with pytest.raises(NotImplementedError, match="differentiated once"):
        jax.hessian(lambda U: f(U, *arrays(V, B)).sum())(jnp.asarray(U))


def test_calling_again_traces_nothing():
    """Neither under jit nor, where everything is compiled inside, without."""
    traces = []

    @jax.jit
    def f(U, V, B, t):
        traces.append(1)
        return skew_expm_multiply(U, V, B, t)

    U, V, B = arrays(*draw("generic", "float64"))
    for t in (0.1, 0.2, 300.0):
        f(U * t, V, B, t)
    assert len(traces) == 1
    skew_expm_multiply(U, V, B, 0.5)
    with jax.log_compiles(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(_portable, "attempt", None)
        skew_expm_multiply(U, V, B, 0.6)


# --- the static bound and values that are not finite -------------------------------------------


@pytest.mark.parametrize(("dtype", "n"), [("float64", 14), ("float32", 14), ("float64", 4)])
def test_beyond_the_static_bound_the_result_is_nan_and_below_it_is_right(dtype, n):
    """16 squarings of the largest threshold; an angle a little above needs a 17th.

    Of S itself, which is not diagonal, the 1-norm says a little more than the angle.
    """
    _, thetas = selection.table(float(np.finfo(dtype).eps))
    U, V = gen.with_angles(np.random.default_rng(0), n, [1.0, 0.5], dtype)
    B = gen.normal(np.random.default_rng(1), (n, 2), dtype)
    below, above = (0.999, 1.001) if n > 4 else (0.6, 1.001)
    most = thetas[-1] * 2.0**_portable.STATIC
    f = jax.jit(skew_expm_multiply)
    g = jax.jit(jax.grad(loss, ALL))
    Y = np.asarray(f(*arrays(U, V, B), below * most))
    t = float(np.asarray(below * most, dtype))
    assert naive.forward_errors(Y, U, V, B, t) <= forward_bound(U, V, t)
    assert all(np.isfinite(a).all() for a in g(*arrays(U, V, B), below * most))
    assert np.isnan(f(*arrays(U, V, B), above * most)).all()
    assert all(np.isnan(a).any() for a in g(*arrays(U, V, B), above * most))
    t = float(np.asarray(above * most, dtype))
    Y = np.asarray(skew_expm_multiply(*arrays(U, V, B), t))
    assert naive.forward_errors(Y, U, V, B, t) <= forward_bound(U, V, t)
    assert np.isnan(skew_expm_multiply(*arrays(U, V, B), t, method="gram")).all() or n == 4


def test_an_element_beyond_the_bound_spoils_no_other():
    U, V, B = draw("generic", "float64")
    Y = jax.jit(skew_expm_multiply)(*arrays(np.stack([U, 1e9 * U, U * np.nan]), V, B))
    assert relative(Y[0], skew_expm_multiply(U, V, B)) <= 1e-14
    assert np.isnan(Y[1:]).all()


def test_squares_out_of_range_give_nan_and_not_a_wrong_result():
    """Traced, columns cannot be scaled first: where u² is lost but u v matters."""
    U, V = np.full((8, 1), 1e-23, np.float32), np.full((8, 1), 1e15, np.float32)
    U[::2], B = 0, np.ones((8, 1), np.float32)
    assert np.isnan(jax.jit(skew_expm_multiply)(*arrays(U, V, B), 1e8)).all()
    Y = np.asarray(skew_expm_multiply(*arrays(U, V, B), 1e8))
    assert naive.forward_errors(Y, U, V, B, 1e8) <= forward_bound(U, V, 1e8)


def test_untraced_values_that_are_not_finite_are_named():
    U, V, B = draw("generic", "float64")
    for name, given in {"U": (U * np.nan, V, B), "B": (U, V, B * np.inf)}.items():
        with pytest.raises(ValueError, match=f"{name} contains NaN or infinity"):
            skew_expm_multiply(*arrays(*given))
    with pytest.raises(ValueError, match="L contains NaN"):
        expm_multiply(*arrays(U * np.nan, V, B))
    with pytest.raises(ValueError, match="overflows"):
        expm_multiply(*arrays(U, U, B), 1e4)


# --- dtypes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_comes_back_as_it_came(dtype):
    """Computed in single precision and rounded once."""
    U, V, B = (jnp.asarray(a).astype(dtype) for a in draw("generic", "float32"))
    wide = [np.asarray(a.astype("float32")) for a in (U, V, B)]
    Y = jax.jit(skew_expm_multiply)(U, V, B)
    assert Y.dtype == dtype
    unit = float(jnp.finfo(dtype).eps) / 2
    assert relative(Y.astype("float32"), skew_expm_multiply(*wide)) <= 1.1 * unit
    bars = jax.grad(lambda *a: loss(*a, 1.0).astype("float32"), (0, 1, 2))(U, V, B)
    assert [bar.dtype for bar in bars] == [dtype] * 3


def test_products_ask_for_the_highest_precision():
    """Forward and backward; this computer's own products are exact to the dtype anyway."""
    U, V, B = arrays(*draw("generic", "float32"))
    for f in (loss, jax.grad(loss, ALL), jax.jit(jax.jacfwd(loss, ALL)), jax.hessian(loss)):
        text = str(jax.make_jaxpr(f)(U, V, B, 0.5))
        products, exact = text.count("dot_general["), text.count("precision=(HIGHEST, HIGHEST)")
        exact += text.count("precision=(Precision.HIGHEST, Precision.HIGHEST)")
        assert products == exact > 10
    general = str(jax.make_jaxpr(jax.grad(lambda U: expm_multiply(U, V, B).sum()))(U))
    assert "HIGHEST" in general
    assert "precision=None" not in general


def test_real_factors_and_complex_vectors():
    U, V, B = *draw("generic", "float64")[:2], draw("generic", "complex128")[2]
    Y = jax.jit(skew_expm_multiply)(*arrays(U, V, B))
    assert relative(Y, skew_expm_multiply(U, V, B)) <= 1e-14
    bar = jax.grad(loss)(*arrays(U, V, B), 1.0)
    assert bar.dtype == "float64"


# --- the general exponential -------------------------------------------------------------------


@pytest.mark.parametrize("t", [0.7, 0.3 - 0.4j, 0.0])
def test_general_traced_and_untraced(t):
    rng = np.random.default_rng(5)
    for L, R in (gen.generic(rng, 12, 2, "float64"), gen.nilpotent(rng, 12, 2, "float64")):
        B = gen.normal(rng, (12, 2), "float64")
        bound = 40 * gen.unit("float64") * max(1.0, gen.rho(L, R, t)) * np.exp(gen.rho(L, R, t))
        for f in (expm_multiply, jax.jit(expm_multiply)):
            assert naive.general_errors(np.asarray(f(*arrays(L, R, B), t)), L, R, B, t) <= bound


def test_general_derivatives():
    """Against the block form: the derivative in L, R, B and t at once."""
    rng = np.random.default_rng(6)
    (L, R), (dL, dR) = (gen.generic(rng, 9, 2, "float64") for _ in range(2))
    B, dB = gen.normal(rng, (9, 1), "float64"), gen.normal(rng, (9, 1), "float64")

    def at(x):
        return expm_multiply(L + x * dL, R + x * dR, B + x * dB, 0.7 + x)

    def traced(x):
        moved = (a + x * d for a, d in zip(arrays(L, R, B), (dL, dR, dB), strict=True))
        return expm_multiply(*moved, 0.7 + x)

    expected = (at(1e-5) - at(-1e-5)) / 2e-5
    for jacobian in (jax.jacfwd, jax.jacrev):
        assert relative(jax.jit(jacobian(traced))(0.0), expected) <= 1e-8
    bars = jax.grad(lambda L: expm_multiply(L, *arrays(R, B), 0.0).sum())(jnp.asarray(L))
    assert not np.asarray(bars).any()
    assert np.isnan(jax.jit(expm_multiply)(*arrays(L, -R, B), 1e9)).all()


# --- as it is set up by default ----------------------------------------------------------------


def test_single_precision_is_jax_s_default():
    """Without 64-bit numbers: float32 in and out, no warning, NumPy arrays refused."""
    script = f"""
import sys; sys.path[:0] = [{str(Path(lowrank_expm.__file__).parents[1])!r}]
import warnings; warnings.simplefilter("error")
import jax, jax.numpy as jnp, numpy as np
from lowrank_expm import skew_expm_multiply
assert not jax.config.jax_enable_x64
rng = np.random.default_rng(0)
wide = [rng.standard_normal((9, 2)) / 2 for _ in range(3)]
U, V, B = (jnp.asarray(a, jnp.float32) for a in wide)
expected = skew_expm_multiply(*(np.asarray(a, float) for a in (U, V, B)), 0.5)
for f in (skew_expm_multiply, jax.jit(skew_expm_multiply)):
    for t in (0.5, np.float64(0.5), jnp.asarray(0.5)):
        Y = f(U, V, B, t)
        assert Y.dtype == jnp.float32
        assert abs(np.asarray(Y) - expected).max() < 1e-5
Y = jax.grad(lambda t: skew_expm_multiply(U, V, B, t).sum())(0.5)
assert Y.dtype == jnp.float32
try:
    skew_expm_multiply(U, V, wide[2])
except TypeError as error:
    assert "one library" in str(error)
    print("refused")
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["refused"]
