"""torch tensors: values, derivatives of any order, transforms, half precision, and what is kept."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from torch.autograd import gradcheck, gradgradcheck
from torch.utils.flop_counter import FlopCounterMode

from lowrank_expm import LowRankSkew, _foreign, _portable, derivatives, skew_expm_multiply

from . import generators as gen
from . import naive
from .derivative_accuracy import Problem, _ratio

# torch itself uses what it has deprecated when it sets up forward mode, and when it compiles.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
]
HARD = ("equal", "zero_columns", "duplicate_columns", "nearly_parallel", "one_zero", "far_columns")
DTYPES = {str(d).removeprefix("torch."): d for d in (torch.float64, torch.complex128)}


def tensors(*arrays, grad=False):
    """NumPy arrays as tensors."""
    return [torch.tensor(a).requires_grad_(grad) for a in arrays]


def hard(kind, n, r, dtype, k=2):
    """U, V and B of a hard kind, as tensors that want gradients."""
    rng = np.random.default_rng(3)
    U, V = gen.MAKERS[kind](rng, n, r, dtype)
    return tensors(U, V, gen.normal(rng, (n, k), dtype), grad=True)


def generic(*shapes, dtype=torch.float64):
    """Tensors of moderate size that want gradients."""
    torch.manual_seed(1)
    return [(0.5 * torch.randn(s, dtype=dtype)).requires_grad_() for s in shapes]


def time(*values):
    """A t that wants a gradient: a number, or a grid."""
    t = torch.tensor(values if len(values) > 1 else values[0], dtype=torch.float64)
    return t.requires_grad_()


# Accuracy.


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize(
    "kind", ["generic", "nearly_parallel", "zero_columns", "huge", "far_columns"]
)
@pytest.mark.parametrize("portably", [False, True])
def test_values_keep_the_contract(kind, dtype, portably):
    """40 u max(1, ρ), on NumPy's side and in array-API form."""
    rng = np.random.default_rng(5)
    U, V = {**gen.MAKERS, **gen.DERIVATIVE_MAKERS}[kind](rng, 9, 2, dtype)
    B = gen.normal(rng, (9, 2), dtype)
    a = tensors(U, V, B)
    if portably:
        with FlopCounterMode(display=False):
            Y = skew_expm_multiply(*a, 0.5)
    else:
        Y = skew_expm_multiply(*a, 0.5)
    assert Y.dtype == a[0].dtype
    error = naive.forward_errors(Y.numpy(), U, V, B, 0.5).max()
    assert error <= 40 * gen.unit(dtype) * max(1.0, gen.rho(U, V, 0.5))


@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("kind", HARD)
@pytest.mark.parametrize("smooth", [False, True])
def test_gradients_keep_the_contract(kind, dtype, smooth):
    """1e3 u max(1, ρ); under vmap it is the form that autograd can differentiate again."""
    p = Problem(np.random.default_rng(7), kind, dtype, 8, 2)
    U, V, B, Y = tensors(p.U, p.V, p.B, p.Y)
    t = torch.tensor(p.t, dtype=U.real.dtype)
    _, pullback = torch.func.vjp(skew_expm_multiply, U, V, B, t)
    bars = [b[0] for b in torch.func.vmap(pullback)(Y[None])] if smooth else pullback(Y)
    exact = naive.exact_vjp(p.U, p.V, p.B, p.Y, p.t)
    for e, bar, c in zip(exact, bars, (-p.exponents, p.exponents, 0.0), strict=False):
        scale = np.exp2(c)
        distance = e.distance(bar.numpy()) * scale
        assert _ratio(distance, float(np.linalg.norm(e.round() * scale))) <= 1e3 * p.unit


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("kind", ["generic", "nearly_parallel", "one_zero"])
def test_tangents_keep_the_contract(kind, dtype):
    p = Problem(np.random.default_rng(9), kind, dtype, 8, 2)
    U, V, B, dU, dV, dB = tensors(p.U, p.V, p.B, p.dU, p.dV, p.dB)
    t, dt = torch.tensor([p.t, p.dt], dtype=U.real.dtype).unbind()
    _, dY = torch.func.jvp(skew_expm_multiply, (U, V, B, t), (dU, dV, dB, dt))
    _, exact = naive.exact_jvp(p.U, p.V, p.B, p.dU, p.dV, p.dB, p.t, float(dt))
    size = max(float(np.linalg.norm(exact.round())), abs(p.dt) * p.speed)
    assert _ratio(exact.distance(dY.numpy()), size) <= 1e3 * p.unit


# Derivatives of all orders and modes, against finite differences.


def check(*arguments, order=2):
    """The first derivatives in both modes, and the second."""
    assert gradcheck(skew_expm_multiply, arguments, check_forward_ad=True)
    if order > 1:
        assert gradgradcheck(skew_expm_multiply, arguments, check_fwd_over_rev=True)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("n", [2, 6])
def test_gradcheck(dtype, n):
    """By the Gram matrix, and for n ≤ 2r."""
    check(*generic((n, 1), (n, 1), (n, 1), dtype=DTYPES[dtype]), time(0.7))


@pytest.mark.parametrize("kind", ["equal", "zero_columns", "duplicate_columns"])
def test_gradcheck_of_degenerate_factors(kind):
    check(*hard(kind, 5, 2, "float64", k=1), 0.3)


@pytest.mark.parametrize("dtype", DTYPES)
def test_gradcheck_of_nearly_parallel_factors(dtype):
    """The route is "qr"; second derivatives go through the Gram matrix all the same."""
    U, V, B = hard("nearly_parallel", 5, 1, dtype, k=1)
    a = _foreign.arguments(U.detach(), V.detach(), B.detach(), 1.0)
    assert _portable.solve(a, "auto").route == "qr"
    check(U, V, B, 1.0)


def test_gradcheck_of_rows_that_a_mask_has_cleared():
    torch.manual_seed(0)
    keep = torch.tensor([1.0, 0.0, 1.0, 0.0, 1.0, 1.0], dtype=torch.float64)[:, None]
    U, V, B = generic((6, 2), (6, 2), (6, 1))
    assert gradcheck(lambda U, V, B: skew_expm_multiply(keep * U, keep * V, keep * B), (U, V, B))


@pytest.mark.parametrize("shapes", [((2, 1, 5, 1), (5, 1), (3, 5, 1)), ((5, 1), (5, 1), (3, 5, 2))])
def test_gradcheck_of_batches_and_grids(shapes):
    """Cotangents are summed over the axes along which an argument was broadcast."""
    check(*generic(*shapes), time(0.7, 0.0, -0.3), order=1)
    U, V, B = generic(*shapes)
    g = torch.autograd.grad(skew_expm_multiply(U, V, B, [0.5, 1.0]).sum(), (U, V, B))
    assert [a.shape for a in g] == [torch.Size(s) for s in shapes]


def test_gradcheck_of_vectors_and_of_a_complex_B():
    U, V = generic((5,), (5,))
    (B,) = generic((5,), dtype=torch.complex128)
    check(U, V, B, time(0.7))


def test_third_derivatives():
    U, V, B = generic((4, 1), (4, 1), (4, 1))

    def second(U):
        (g,) = torch.autograd.grad(skew_expm_multiply(U, V, B).sin().sum(), U, create_graph=True)
        return torch.autograd.grad(g.square().sum(), U, create_graph=True)[0]

    assert gradcheck(second, (U,))


@pytest.mark.parametrize("method", ["gram", "qr", "direct"])
def test_every_method_has_the_same_gradient(method):
    a = generic((6, 2), (6, 2), (6, 2))
    grads = [
        torch.autograd.grad(skew_expm_multiply(*a, 0.7, method=m).square().sum(), a)
        for m in ("auto", method)
    ]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


# What the CPU shares with NumPy, and what the graph keeps.


def test_the_cpu_computes_what_numpy_computes():
    """The same bits, from the same memory: values, and cotangents."""
    U, V, B, Ybar = (a.detach() for a in generic((3, 40, 2), (3, 40, 2), (3, 40, 5), (3, 40, 5)))
    arrays = [a.numpy() for a in (U, V, B)]
    assert np.array_equal(skew_expm_multiply(U, V, B, 0.7), skew_expm_multiply(*arrays, 0.7))
    Y, pullback = derivatives.vjp(*arrays, t=0.7)
    value, back = torch.func.vjp(lambda *a: skew_expm_multiply(*a, 0.7), U, V, B)
    assert np.array_equal(value, Y)
    for bar, expected in zip(back(Ybar), pullback(Ybar.numpy()), strict=False):
        assert np.array_equal(bar, expected)


@pytest.mark.parametrize("kind", ["generic", "nearly_parallel"])
def test_the_graph_keeps_the_inputs_and_small_matrices(kind):
    """No copy of an input, no result, nothing of length n besides the inputs."""
    U, V, B = hard(kind, 50, 2, "float64")
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda a: kept.append(a) or a, lambda a: a):
        skew_expm_multiply(U, V, B)
    inputs = {a.data_ptr() for a in (U, V, B)}
    assert inputs <= {a.data_ptr() for a in kept}
    assert sum(a.numel() for a in kept if a.data_ptr() not in inputs) <= 4 * (4 + 2) + 1


def test_an_input_changed_before_backward_is_noticed():
    U, V, B = generic((6, 1), (6, 1), (6, 1))
    Y = skew_expm_multiply(U, V, B)
    with torch.no_grad():
        U.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        Y.sum().backward()


def test_saved_tensors_may_be_checkpointed():
    from torch.utils.checkpoint import checkpoint

    a = generic((6, 1), (6, 1), (6, 1))
    plain = torch.autograd.grad(skew_expm_multiply(*a).square().sum(), a)
    Y = checkpoint(skew_expm_multiply, *a, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(Y.square().sum(), a), plain, rtol=0, atol=0)


def test_conjugated_and_strided_views():
    U, V, B = generic((4, 6), (4, 6), (6, 3), dtype=torch.complex128)
    got = skew_expm_multiply(U.mH[:, ::2], V.T[:, ::2].conj(), B.conj())
    expected = skew_expm_multiply(
        U.mH[:, ::2].clone().resolve_conj(), V.mH[:, ::2].resolve_conj(), B.conj().resolve_conj()
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=0)


# Bad input, and nothing in between.


def test_a_cotangent_that_is_not_finite_gives_nan_and_no_error():
    """Gradient scalers rely on it."""
    a = generic((6, 1), (6, 1), (6, 1))
    for g in torch.autograd.grad((skew_expm_multiply(*a) * torch.inf).sum(), a):
        assert g.isnan().all()


def test_values_that_are_not_finite_are_refused():
    U, V, B = generic((6, 1), (6, 1), (6, 1))
    with pytest.raises(ValueError, match=r"V\[2, 0\] is nan"):
        skew_expm_multiply(U, torch.where(torch.arange(6)[:, None] == 2, torch.nan, V), B)


def test_out_and_gradients_exclude_each_other():
    U, V, B = generic((6, 1), (6, 1), (6, 1))
    out = torch.empty(6, 1, dtype=torch.float64)
    with pytest.raises(ValueError, match="out cannot be used where gradients are recorded"):
        skew_expm_multiply(U, V, B, out=out)
    with torch.no_grad():
        assert skew_expm_multiply(U, V, B, out=out) is out
    torch.testing.assert_close(out, skew_expm_multiply(U, V, B).detach(), rtol=0, atol=0)


@pytest.mark.parametrize(
    "shapes", [((5, 0), (5, 2)), ((0, 1), (0, 2)), ((5, 1), (5, 0)), ((0, 5, 1), (5, 2))]
)
def test_gradients_of_empty_problems(shapes):
    factors, vectors = shapes
    U, V, B = generic(factors, factors, vectors)
    Y = skew_expm_multiply(U, V, B, [0.5, 1.0])
    grads = torch.autograd.grad(Y.sum(), (U, V, B))
    assert [g.shape for g in grads] == [a.shape for a in (U, V, B)]
    assert not any(g.any() for g in grads[:2])


def test_integers_beside_a_tensor_that_wants_a_gradient():
    (U,) = generic((5, 1))
    V, B = torch.arange(5)[:, None], torch.ones(5, 1, dtype=torch.int64)
    (g,) = torch.autograd.grad(skew_expm_multiply(U, V, B).square().sum(), U)
    assert g.shape == U.shape


# Half precision.


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_in_and_out(dtype):
    """Computed in float32: the result is the right one, rounded once, and so is each gradient."""
    given = [a.detach().to(dtype).requires_grad_() for a in generic((40, 2), (40, 2), (40, 3))]
    wide = [a.detach().double().requires_grad_() for a in given]
    Y, exact = skew_expm_multiply(*given, 0.5), skew_expm_multiply(*wide, 0.5)
    assert Y.dtype == dtype
    # Half a unit in the last place, and what float32 loses.
    unit = torch.finfo(dtype).eps / 2 * 1.01
    assert ((Y.double() - exact).abs() <= unit * exact.abs() + 1e-5).all()
    for g, e in zip(
        torch.autograd.grad(Y.sum(), given), torch.autograd.grad(exact.sum(), wide), strict=True
    ):
        assert g.dtype == dtype
        assert ((g.double() - e).abs() <= unit * e.abs() + 1e-5 * e.abs().max()).all()


def test_autocast_does_not_reach_inside():
    """Products within would lose half their digits."""
    a = generic((40, 2), (40, 2), (40, 3))
    singles = [x.detach().float().requires_grad_() for x in a]

    def both():
        with FlopCounterMode(display=False):  # keeps the CPU from NumPy's passes
            Y = skew_expm_multiply(*singles, 0.5)
            return Y, *torch.autograd.grad(Y.square().sum(), singles)

    with torch.autocast("cpu", dtype=torch.bfloat16):
        inside = both()
    torch.testing.assert_close(inside, both(), rtol=1e-6, atol=1e-6)


# Transforms.

U3, V3, B3 = (5, 2), (5, 2), (5, 3)


@pytest.mark.parametrize(
    "dims",
    [
        (0, None, None, None),
        (0, 0, 0, None),
        (None, None, 2, None),
        (None, None, None, 0),
        (1, None, 0, 0),
    ],
)
@pytest.mark.parametrize("grid", [False, True])
def test_vmap(dims, grid):
    """Any axis of any argument."""
    shapes = [*(U3, V3, B3), (2,) if grid else ()]
    full = [s if d is None else (*s[:d], 4, *s[d:]) for s, d in zip(shapes, dims, strict=True)]
    given = [a.detach() for a in generic(*full)]
    got = torch.func.vmap(skew_expm_multiply, dims)(*given)
    for i in range(4):
        one = [a if d is None else a.select(d, i) for a, d in zip(given, dims, strict=True)]
        torch.testing.assert_close(got[i], skew_expm_multiply(*one), rtol=1e-14, atol=1e-14)


def loss(U, V, B, t=0.5):
    return skew_expm_multiply(U, V, B, t).sin().sum()


def test_gradients_and_vmap_compose():
    U, V, B = (a.detach() for a in generic((4, *U3), (4, *V3), (4, *B3)))
    grad = torch.func.grad(loss, (0, 1, 2))
    expected = [torch.stack(g) for g in zip(*map(grad, U, V, B), strict=True)]
    inner = torch.func.vmap(grad)(U, V, B)
    outer = torch.func.grad(lambda *a: torch.func.vmap(loss)(*a).sum(), (0, 1, 2))(U, V, B)
    for one, other, e in zip(inner, outer, expected, strict=True):
        torch.testing.assert_close(one, e, rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(other, e, rtol=1e-12, atol=1e-12)


def test_jacobians_of_both_modes_and_the_hessian():
    a = [x.detach() for x in generic((4, 1), (4, 1), (4, 1))]
    reverse, forward = (j(skew_expm_multiply)(*a) for j in (torch.func.jacrev, torch.func.jacfwd))
    torch.testing.assert_close(reverse, forward, rtol=1e-12, atol=1e-12)
    twice = torch.func.jacrev(torch.func.jacrev(loss))(*a)
    torch.testing.assert_close(torch.func.hessian(loss)(*a), twice, rtol=1e-12, atol=1e-12)


def test_the_old_vmap_is_refused():
    U, V, B = generic(U3, V3, B3)
    Y = skew_expm_multiply(U, V, B)
    with pytest.raises(NotImplementedError, match=r"use torch.func.vmap or jacrev"):
        torch.autograd.grad(Y, U, torch.ones(2, *Y.shape, dtype=Y.dtype), is_grads_batched=True)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_without_a_break_in_the_graph(backend):
    """Values by the route "gram", as everywhere under tracing, and gradients."""
    torch._dynamo.reset()
    compiled = torch.compile(loss, backend=backend, fullgraph=True)
    a = generic((6, 2), (6, 2), (6, 2))
    with torch.no_grad():
        torch.testing.assert_close(compiled(*a), loss(*a), rtol=1e-13, atol=1e-13)
    grads = [torch.autograd.grad(f(*a), a) for f in (compiled, loss)]
    torch.testing.assert_close(*grads, rtol=1e-12, atol=1e-12)


# No look at values.


@pytest.mark.parametrize("dtype", [torch.float32, torch.complex64, torch.bfloat16])
@pytest.mark.parametrize("n", [3, 40])
def test_gram_never_looks_at_a_value(dtype, n, monkeypatch):
    """A meta tensor has none: whoever asks it for one fails."""
    for module in (_foreign, _portable):
        monkeypatch.setattr(module, "is_traced", lambda a: False, raising=False)
    a = [torch.empty(3, n, 2, dtype=dtype, device="meta", requires_grad=True) for _ in range(3)]
    real = dtype.to_real() if dtype.is_complex else dtype
    t = torch.empty(4, dtype=real, device="meta", requires_grad=True)
    Y = skew_expm_multiply(*a, t, method="gram")
    assert (Y.shape, Y.dtype) == ((4, 3, n, 2), dtype)
    grads = torch.autograd.grad(Y.abs().sum(), [*a, t])
    assert [g.shape for g in grads] == [x.shape for x in (*a, t)]


@pytest.mark.parametrize("method", ["auto", "gram", "qr", "direct"])
def test_tensors_without_values(method):
    """Meta and fake tensors give the shapes, and cost nothing."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    def shapes(**kwargs):
        a = [torch.empty(2, 9, 2, requires_grad=True, **kwargs) for _ in range(3)]
        Y = skew_expm_multiply(*a, 0.5, method=method)
        assert [g.shape for g in torch.autograd.grad(Y.sum(), a)] == [x.shape for x in a]
        return Y.shape

    assert shapes(device="meta") == (2, 9, 2)
    with FakeTensorMode():
        assert shapes() == (2, 9, 2)


def test_auto_looks_once_where_values_lie_on_a_device(monkeypatch):
    looks = []
    original = _portable.to_host
    monkeypatch.setattr(_portable, "to_host", lambda a: looks.append(a.shape) or original(a))
    monkeypatch.setattr(_foreign, "is_on_host", lambda a: False)
    a = generic((40, 2), (40, 2), (40, 2))
    with FlopCounterMode(display=False):
        Y = skew_expm_multiply(*a)
        torch.autograd.grad(Y.sum(), a)
    assert looks == [(3,)]


def test_no_warning_is_left_for_the_caller():
    """Not even the first time, in an interpreter of its own settings."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        a = generic((6, 2), (6, 2), (6, 2))
        skew_expm_multiply(*a, time(0.5)).sum().backward()
    assert not caught


def test_an_operator_refuses_factors_that_were_changed_in_place():
    U, V, B = (torch.randn(20, w, dtype=torch.float64) for w in (2, 2, 1))
    Q = LowRankSkew(U, V).expm()
    with torch.no_grad():
        U.mul_(1.5)
    for operator in (Q, Q.H):
        with pytest.raises(ValueError, match="changed in place"):
            operator @ B


def test_sparse_tensors_and_other_devices_are_named():
    U, V, B = (torch.randn(20, w) for w in (2, 2, 1))
    with pytest.raises(TypeError, match="V is sparse"):
        skew_expm_multiply(U, V.to_sparse(), B)
    with pytest.raises(TypeError, match="V is on meta"):
        skew_expm_multiply(U, V.to("meta"), B)


def test_complex_beside_real_factors_warn_about_nothing():
    U = torch.randn(6, 2, dtype=torch.complex128, requires_grad=True)
    V = torch.randn(6, 2, dtype=torch.float64, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        skew_expm_multiply(U, V, V.detach(), 0.3).abs().sum().backward()
    assert V.grad.dtype == torch.float64
