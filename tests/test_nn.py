"""The torch modules: against the dense definition, and as torch modules behave."""

import copy
import io
import pickle

import numpy as np
import pytest

from lowrank_expm import verify

torch = pytest.importorskip("torch")
nn = pytest.importorskip("lowrank_expm.nn")

ACTIVATIONS = (torch.nn.functional.gelu, torch.relu, torch.nn.functional.silu)


def attention(embed_dim=12, num_heads=3, alpha=0.5, seed=0, **kind):
    """A layer away from its symmetric start."""
    torch.manual_seed(seed)
    layer = nn.OrthogonalSelfAttention(embed_dim, num_heads, alpha=alpha, **kind)
    with torch.no_grad():
        for bias in (layer.in_proj_bias, layer.out_proj.bias):
            if bias is not None:
                bias.normal_(std=0.1)
        layer.alpha.mul_(torch.linspace(-1, 1, num_heads))
    return layer


def tokens(*shape, seed=0, dtype=torch.float32):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def dense(layer, x):
    """The definition with n × n matrices, by torch's own exponential."""
    heads, d = layer.num_heads, layer.head_dim
    rows = layer.in_proj_weight.reshape(heads, 3, d, -1)
    bias = torch.zeros(heads, 3, d, dtype=x.dtype)
    if layer.in_proj_bias is not None:
        bias = layer.in_proj_bias.reshape(heads, 3, d)
    q, k, v = (
        x[..., None, :, :] @ rows[:, i].transpose(-1, -2) + bias[:, i, None] for i in range(3)
    )
    M = (layer.alpha / d**0.5)[:, None, None] * (q @ k.transpose(-1, -2))
    y = torch.linalg.matrix_exp(M - M.transpose(-1, -2)) @ v
    return layer.out_proj(y.transpose(-3, -2).flatten(-2))


def close(a, b, atol):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


# ------------------------------------------------------------------------- the layer


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("n", [1, 5, 30], ids=lambda n: f"n={n}")
@pytest.mark.parametrize(("dtype", "atol"), [(torch.float32, 1e-4), (torch.float64, 1e-12)])
def test_is_the_definition(n, bias, dtype, atol):
    layer = attention(bias=bias, dtype=dtype)
    x = tokens(2, n, 12, dtype=dtype)
    y = layer(x)
    assert y.dtype == dtype
    close(y, dense(layer, x), atol)


def test_leading_axes():
    layer, x = attention(), tokens(2, 3, 20, 12)
    y = layer(x)
    assert y.shape == x.shape
    close(layer(x[1, 2]), y[1, 2], 1e-5)


def test_starts_as_documented():
    torch.manual_seed(0)
    layer = nn.OrthogonalSelfAttention(32, 4, alpha=0.02)
    assert torch.equal(layer.alpha, torch.full((4,), 0.02))
    assert not layer.in_proj_bias.any()
    assert not layer.out_proj.bias.any()
    together = layer.in_proj_weight.detach().reshape(4, 24, 32)[:, :16]
    close(together @ together.mT, torch.eye(16).expand(4, 16, 16), 1e-5)
    close(layer.out_proj.weight @ layer.out_proj.weight.mT, torch.eye(32), 1e-5)


def test_torch_seeds_the_weights():
    first, again, other = (attention(seed=seed) for seed in (0, 0, 1))
    assert torch.equal(first.in_proj_weight, again.in_proj_weight)
    assert not torch.equal(first.in_proj_weight, other.in_proj_weight)
    torch.manual_seed(0)
    two = [nn.OrthogonalSelfAttention(12, 3) for _ in range(2)]
    assert not torch.equal(two[0].in_proj_weight, two[1].in_proj_weight)


def test_padding_influences_no_other_token():
    layer = attention()
    x = tokens(2, 20, 12)
    padding = torch.arange(20) >= torch.tensor([[13], [20]])
    y = layer(x, key_padding_mask=padding)
    close(y[0, :13], layer(x[0, :13]), 1e-5)
    close(y[1], layer(x[1]), 1e-5)
    moved = torch.where(padding[..., None], 7.0, x)
    close(layer(moved, key_padding_mask=padding)[0, :13], y[0, :13], 0)


def test_the_tokens_keep_their_norm_at_any_alpha():
    layer = attention(32, 4, alpha=100.0, bias=False)
    x = tokens(3, 50, 32)
    close(layer(x).norm(), x.norm(), 1e-4 * float(x.norm()))


@pytest.mark.parametrize("n", [3, 7], ids=lambda n: f"n={n}")
@pytest.mark.parametrize("learn_alpha", [True, False])
def test_gradients(n, learn_alpha):
    """Of the tokens and of every parameter, by finite differences."""
    layer = attention(4, 2, dtype=torch.float64, learn_alpha=learn_alpha)
    names, parameters = zip(*layer.named_parameters(), strict=True)
    assert ("alpha" in names) == learn_alpha
    x = tokens(2, n, 4, dtype=torch.float64).requires_grad_()

    def function(x, *parameters):
        return torch.func.functional_call(layer, dict(zip(names, parameters, strict=True)), (x,))

    assert torch.autograd.gradcheck(function, (x, *parameters))


def test_gradients_under_a_mask():
    layer = attention(4, 2, dtype=torch.float64)
    x = tokens(2, 9, 4, dtype=torch.float64).requires_grad_()
    padding = torch.arange(9) >= torch.tensor([[6], [9]])
    assert torch.autograd.gradcheck(lambda x: layer(x, padding), (x,))


def test_gradients_are_those_of_the_definition():
    """At a size where finite differences would take long."""
    layer = attention(24, 3, alpha=0.1, dtype=torch.float64)
    x = tokens(40, 24, dtype=torch.float64).requires_grad_()
    inputs, weight = (x, *layer.parameters()), tokens(40, 24, seed=1, dtype=torch.float64)
    ours, exact = (
        torch.autograd.grad((f * weight).sum(), inputs) for f in (layer(x), dense(layer, x))
    )
    for a, b in zip(ours, exact, strict=True):
        close(a, b, 1e-10 * (1 + float(b.norm())))


# --------------------------------------------------------------- as torch modules behave


def test_state_dict_makes_an_equal_layer(tmp_path):
    layer, other = attention(seed=0), attention(seed=1)
    expected = {"alpha", "in_proj_weight", "in_proj_bias", "out_proj.weight", "out_proj.bias"}
    assert set(layer.state_dict()) == expected
    torch.save(layer.state_dict(), tmp_path / "layer.pt")
    other.load_state_dict(torch.load(tmp_path / "layer.pt"))
    x = tokens(9, 12)
    assert torch.equal(layer(x), other(x))


def test_fixed_alpha_is_saved_and_not_learned():
    layer = attention(learn_alpha=False)
    assert "alpha" in layer.state_dict()
    assert "alpha" not in dict(layer.named_parameters())


@pytest.mark.parametrize("block", [False, True])
def test_copies_and_pickles(block):
    layer = nn.OrthogonalTransformerBlock(12, 3) if block else attention()
    x = tokens(9, 12)
    stored = io.BytesIO()
    torch.save(layer, stored)
    stored.seek(0)
    for other in (copy.deepcopy(layer), torch.load(stored, weights_only=False)):
        assert torch.equal(layer(x), other(x))
        with torch.no_grad():
            other.reset_parameters()
        assert not torch.equal(layer(x), other(x))


@pytest.mark.parametrize("how", ["argument", "context"])
def test_made_without_memory_and_filled_later(how):
    if how == "argument":
        block = nn.OrthogonalTransformerBlock(12, 3, device="meta")
    else:
        with torch.device("meta"):
            block = nn.OrthogonalTransformerBlock(12, 3)
    assert {p.device.type for p in block.parameters()} == {"meta"}
    assert block(torch.empty(2, 30, 12, device="meta")).shape == (2, 30, 12)
    block.to_empty(device="cpu").reset_parameters()
    x = tokens(30, 12)
    close(block(x).norm(), x.norm(), 1e-4 * float(x.norm()))


def reset_all(block):
    """Every module that can be, from the outside in."""
    block.to_empty(device="cpu")
    for module in block.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()


def reset_all_inside_out(block):
    block.to_empty(device="cpu")
    block.apply(lambda module: getattr(module, "reset_parameters", lambda: None)())


def filled_and_reset_one_by_one(block):
    """Modules that own parameters are given memory and reset, each for itself."""
    for module in block.modules():
        if [*module.parameters(recurse=False)]:
            module.to_empty(device="cpu", recurse=False)
            module.reset_parameters()


@pytest.mark.parametrize("how", [reset_all, reset_all_inside_out, filled_and_reset_one_by_one])
def test_modules_may_be_reset_in_any_order(how):
    torch.manual_seed(0)
    block = nn.OrthogonalTransformerBlock(32, 4, device="meta", dtype=torch.float64)
    with torch.no_grad():
        how(block)
    assert jacobian_condition(block, tokens(9, 32, dtype=torch.float64)) < 4
    assert not block.linear1.bias.any()
    assert not block.attention.out_proj.bias.any()


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda made: pickle.loads(pickle.dumps(made))])
def test_a_copy_resets_itself(copied):
    block = nn.OrthogonalTransformerBlock(12, 3)
    before = [p.clone() for p in block.parameters()]
    other = copied(block)
    other.linear2.reset_parameters()
    other.attention.out_proj.reset_parameters()
    assert all(map(torch.equal, block.parameters(), before))
    assert not torch.equal(other.linear1.weight, block.linear1.weight)
    assert not torch.equal(other.attention.in_proj_weight, block.attention.in_proj_weight)


def test_made_without_memory_takes_no_time_for_weights(monkeypatch):
    monkeypatch.setattr(nn, "orthogonal_initialization", None)
    monkeypatch.setattr(nn, "_generator", None)
    nn.OrthogonalTransformerBlock(12, 3, device="meta")
    with torch._subclasses.fake_tensor.FakeTensorMode():
        block = nn.OrthogonalTransformerBlock(12, 3)
        y = block(torch.randn(2, 30, 12))
        y.sum().backward()
    assert y.shape == (2, 30, 12)


@pytest.mark.parametrize("shape", [(0, 5, 12), (2, 0, 12), (2, 1, 12)], ids=str)
def test_few_tokens_or_none(shape):
    block = nn.OrthogonalTransformerBlock(12, 3)
    x = torch.randn(shape, requires_grad=True)
    y = block(x)
    y.sum().backward()
    assert y.shape == x.grad.shape == shape


# torch uses what it has deprecated when it compiles.
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.parametrize("masked", [False, True])
def test_compiled_in_one_graph(masked):
    block, x = nn.OrthogonalTransformerBlock(12, 3, alpha=0.3), tokens(2, 20, 12)
    padding = torch.arange(20) >= torch.tensor([[13], [20]]) if masked else None
    compiled = torch.compile(block, backend="aot_eager", fullgraph=True)
    close(compiled(x, padding), block(x, padding), 1e-5)
    inputs, weight = tuple(block.parameters()), tokens(2, 20, 12, seed=1)
    found, expected = (
        torch.autograd.grad((f(x, padding) * weight).sum(), inputs) for f in (compiled, block)
    )
    for a, b in zip(found, expected, strict=True):
        close(a, b, 1e-4 * (1 + float(b.norm())))


def test_checkpointing_recomputes_the_same():
    from torch.utils.checkpoint import checkpoint

    block, x = nn.OrthogonalTransformerBlock(12, 3), tokens(2, 20, 12).requires_grad_()
    found, expected = (
        torch.autograd.grad(y.square().sum(), tuple(block.parameters()))
        for y in (checkpoint(block, x, use_reentrant=False), block(x))
    )
    for a, b in zip(found, expected, strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_masks_that_are_not_boolean(dtype):
    with pytest.raises(TypeError, match="key_padding_mask is of type"):
        attention()(tokens(2, 9, 12), torch.zeros(2, 9, dtype=dtype))


def test_padding_alone_is_projected_only():
    layer, x = attention(), tokens(2, 9, 12)
    v = layer._project(x)[..., 8:]
    expected = layer.out_proj(v.transpose(-3, -2).flatten(-2))
    close(layer(x, torch.ones(2, 9, dtype=torch.bool)), expected, 1e-6)


def test_double_precision_and_back():
    layer = attention().double()
    x = tokens(30, 12, dtype=torch.float64)
    close(layer(x), dense(layer, x), 1e-12)
    assert layer.float()(x.float()).dtype == torch.float32


# A bfloat16 has 8 bits: every projection rounds its result by up to 2⁻⁹ of it.
BFLOAT16 = 2.0**-7


def test_bfloat16_weights():
    layer = attention()
    exact = layer(tokens(2, 30, 12))
    y = layer.to(torch.bfloat16)(tokens(2, 30, 12).to(torch.bfloat16))
    assert y.dtype == torch.bfloat16
    close(y.float(), exact, 6 * BFLOAT16 * float(exact.detach().abs().max()))


def test_bfloat16_autocast_and_its_gradients():
    layer, x = attention(), tokens(2, 30, 12).requires_grad_()
    inputs, weight = (x, *layer.parameters()), tokens(2, 30, 12, seed=1)
    exact = layer(x)
    expected = torch.autograd.grad((exact * weight).sum(), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = layer(x)
        loss = (y.float() * weight).sum()
    assert y.dtype == torch.bfloat16
    close(y.float(), exact, 6 * BFLOAT16 * float(exact.detach().abs().max()))
    for found, grad, parameter in zip(
        torch.autograd.grad(loss, inputs), expected, inputs, strict=True
    ):
        assert found.dtype == parameter.dtype
        close(found, grad, 8 * BFLOAT16 * float(grad.norm()))


def test_bfloat16_drifts_by_rounding_only():
    """The norm after 24 layers: each rounds twice, by 2⁻⁹ of an entry and at random."""
    torch.manual_seed(0)
    layers = [nn.OrthogonalSelfAttention(64, 4, bias=False) for _ in range(24)]
    x = y = tokens(100, 64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        for layer in layers:
            y = layer(y)
    assert abs(float(y.detach().float().norm() / x.norm()) - 1) <= 24 * 2 * 2.0**-9


# ------------------------------------------------------------------------- the block


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("width", [24, 48])
def test_the_mlp_starts_as_an_orthogonal_map(activation, width):
    torch.manual_seed(0)
    block = nn.OrthogonalTransformerBlock(12, 3, width, activation=activation, dtype=torch.float64)
    eye = torch.eye(12, dtype=torch.float64)
    Q = block.linear2(block.activation(block.linear1(eye)))
    close(Q @ Q.mT, eye, 1e-12)
    x = tokens(5, 12, dtype=torch.float64)
    close(block.linear2(block.activation(block.linear1(x))), x @ Q, 1e-12)


def test_block_passes_the_mask_on():
    torch.manual_seed(0)
    block = nn.OrthogonalTransformerBlock(12, 3, alpha=0.5)
    x, padding = tokens(20, 12), torch.arange(20) >= 13
    close(block(x, padding)[:13], block(x[:13]), 1e-5)


def jacobian_condition(function, x):
    """By the library's own judge."""
    matrix = torch.autograd.functional.jacobian(function, x)
    J = matrix.reshape(x.numel(), x.numel()).numpy()
    return verify.jacobian_singular_values(
        lambda v: J @ v, lambda v: J.T @ v, x.numel(), k=1
    ).condition


@pytest.mark.parametrize("seed", range(3))
def test_the_layer_starts_well_conditioned(seed):
    torch.manual_seed(seed)
    layer = nn.OrthogonalSelfAttention(32, 4, dtype=torch.float64)
    assert jacobian_condition(layer, tokens(9, 32, seed=seed, dtype=torch.float64)) < 4


@pytest.mark.parametrize("depth", [4, 12])
def test_a_stack_starts_as_well_conditioned_as_a_layer(depth):
    torch.manual_seed(0)
    blocks = [
        nn.OrthogonalTransformerBlock(8, 2, alpha=nn.ALPHA / depth**0.5, dtype=torch.float64)
        for _ in range(depth)
    ]
    stack = torch.nn.Sequential(*blocks)
    assert jacobian_condition(stack, tokens(9, 8, dtype=torch.float64)) < 4


def test_learns():
    """A few steps take the loss down, alpha included."""
    torch.manual_seed(0)
    blocks = [nn.OrthogonalTransformerBlock(16, 2) for _ in range(4)]
    model = torch.nn.Sequential(*blocks, torch.nn.Linear(16, 1))
    optimiser = torch.optim.Adam(nn.parameter_groups(model, lr=1e-3))
    x = tokens(32, 10, 16)
    target = x[:, 0, 0] * x[:, 1, 1]  # two tokens have to meet
    losses = []
    for _ in range(30):
        loss = (model(x).mean(dim=(-2, -1)) - target).square().mean()
        losses.append(float(loss.detach()))
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    assert losses[-1] < 0.5 * losses[0]
    assert all((block.attention.alpha != nn.ALPHA).all() for block in blocks)


# ------------------------------------------------------------------ groups and errors


def test_parameter_groups_hold_every_parameter_once():
    model = torch.nn.Sequential(
        *[nn.OrthogonalTransformerBlock(8, 2) for _ in range(2)],
        nn.OrthogonalSelfAttention(8, 2, learn_alpha=False),
        torch.nn.Linear(8, 1),
    )
    rest, alphas = nn.parameter_groups(model, 0.1, alpha_rate=5.0)
    assert (rest["lr"], alphas["lr"], alphas["weight_decay"]) == (0.1, 0.5, 0.0)
    assert len(alphas["params"]) == 2
    ids = [id(p) for group in (rest, alphas) for p in group["params"]]
    assert sorted(ids) == sorted(id(p) for p in model.parameters())


def test_parameter_groups_of_a_model_without_attention():
    (group,) = nn.parameter_groups(torch.nn.Linear(2, 2), 0.1)
    assert len(group["params"]) == 2


def test_a_shared_alpha_and_a_parametrised_one_are_in_their_group_once():
    first, second, third = (nn.OrthogonalSelfAttention(8, 2) for _ in range(3))
    second.alpha = first.alpha
    torch.nn.utils.parametrize.register_parametrization(third, "alpha", torch.nn.Tanh())
    model = torch.nn.ModuleList([first, second, third])
    rest, alphas = nn.parameter_groups(model, 0.1)
    assert [id(p) for p in alphas["params"]] == [
        id(first.alpha),
        id(third.parametrizations.alpha.original),
    ]
    assert len(rest["params"]) + 2 == len([*model.parameters()])


@pytest.mark.parametrize(
    ("arguments", "options", "error", "message"),
    [
        ((12.0, 3), {}, TypeError, r"embed_dim is 12\.0; it must be an integer"),
        ((12, "3"), {}, TypeError, "num_heads is '3'"),
        ((12, 0), {}, ValueError, "num_heads is 0; it must be positive"),
        ((12, 3, 24.0), {}, TypeError, "dim_feedforward is 24.0"),
        ((12, 3), {"alpha": float("nan")}, ValueError, "alpha is nan; it must be a finite number"),
        ((12, 3), {"alpha": 10**400}, ValueError, "alpha is 1000"),
        ((12, 3), {"alpha": "big"}, ValueError, "alpha is 'big'"),
        ((12, 3), {"activation": torch.nn.SiLU}, TypeError, "activation is <class"),
        ((12, 3), {"activation": "tanh"}, TypeError, "activation is 'tanh'; .* 'gelu' or 'relu'"),
        ((12, 3), {"activation": 0.1}, TypeError, r"activation is 0\.1"),
    ],
)
def test_numbers_and_functions_that_do_not_fit(arguments, options, error, message):
    with pytest.raises(error, match=message):
        nn.OrthogonalTransformerBlock(*arguments, **options)


def test_what_torch_has_in_other_places_is_passed_by_name():
    """A third positional argument is dropout in torch's layer."""
    with pytest.raises(TypeError, match="positional"):
        nn.OrthogonalSelfAttention(16, 4, 0.0)
    with pytest.raises(TypeError, match="positional"):
        nn.OrthogonalTransformerBlock(16, 4, 32, 0.1)


def test_activations_have_names():
    block = nn.OrthogonalTransformerBlock(12, 3, activation="relu")
    assert block.activation is torch.nn.functional.relu


def test_a_layer_with_a_process_group_says_how_to_save_it():
    layer = nn.OrthogonalSelfAttention(12, 3, process_group=object())
    with pytest.raises(TypeError, match="state_dict"):
        pickle.dumps(torch.nn.Sequential(layer))
    assert copy.copy(layer).process_group is layer.process_group
    assert copy.copy(layer).alpha is layer.alpha


@pytest.mark.parametrize(
    ("mask", "error", "message"),
    [
        (np.zeros((2, 9), bool), TypeError, "is a numpy.ndarray; pass a boolean tensor"),
        (torch.tensor(True), ValueError, "has no axis"),
    ],
)
def test_masks_that_are_no_boolean_tensors(mask, error, message):
    with pytest.raises(error, match=message):
        attention()(tokens(2, 9, 12), mask)


def test_arguments_that_do_not_fit():
    with pytest.raises(ValueError, match="must divide"):
        nn.OrthogonalSelfAttention(12, 5)
    with pytest.raises(ValueError, match="dim_feedforward is 13"):
        nn.OrthogonalTransformerBlock(12, 3, 13)
    with pytest.raises(ValueError, match="at least 24"):
        nn.OrthogonalTransformerBlock(12, 3, 20)


def test_bad_tokens():
    layer, x = attention(), tokens(30, 12)
    x[3, 4] = float("nan")
    with pytest.raises(ValueError, match=r"q.* is nan"):
        layer(x)


def test_prints():
    assert "embed_dim=12, num_heads=3" in repr(attention())
