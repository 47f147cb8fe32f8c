"""A sequence split over processes against the same sequence in one."""

import copy
import itertools
import tempfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
split = pytest.importorskip("lowrank_expm.distributed")

from torch import distributed, multiprocessing  # noqa: E402

from lowrank_expm import nn  # noqa: E402
from lowrank_expm.attention import orthogonal_attention  # noqa: E402

UNIT = {torch.float32: 2.0**-24, torch.float64: 2.0**-53}


def case(name):
    """q, k, v, weights of a loss, and options, of the whole sequence."""
    generator = torch.Generator().manual_seed(0)
    dtype = torch.float32 if "single" in name else torch.float64
    q, k, v, w = torch.randn(4, 2, 3, 41, 5, generator=generator, dtype=dtype)
    options = {"alpha": 0.01 if "single" in name else 0.3}
    if "mask" in name:
        options["mask"] = torch.rand(41, generator=generator) < 0.7
    if "heads" in name:
        options["alpha"] = torch.tensor([0.1, 0.0, -0.5], dtype=dtype, requires_grad=True)
    if "parallel" in name:
        k = q + 1e-4 * k
        options["alpha"] = 3.0
    if "range" in name:  # squares overflow and underflow, S does not
        size = 1e25 if "single" in name else 1e200
        q, k = size * q, k / size
    if "few rows" in name:
        q, k, v, w = (a[..., :7, :] for a in (q, k, v, w))
    return [a.requires_grad_() for a in (q, k, v)], w, options


ONE_REDUCTION = ("double", "single", "mask", "heads", "few rows single")
BY_BASIS = ("parallel single", "parallel double", "parallel range double", "range single")
CASES = (*ONE_REDUCTION, *BY_BASIS)


def cuts(size):
    """Where the sequence is split: unevenly, and one process has nothing."""
    return {2: [0, 17, 41], 4: [0, 3, 3, 30, 41]}[size]


def modules():
    """A layer and a block away from their symmetric start, and tokens with padding."""
    torch.manual_seed(0)
    layer = nn.OrthogonalSelfAttention(12, 3, alpha=0.3, dtype=torch.float64)
    block = nn.OrthogonalTransformerBlock(12, 3, alpha=0.3, dtype=torch.float64)
    for p in (*layer.parameters(), *block.parameters()):
        p.data += 0.05 * torch.randn_like(p)
    x, w = torch.randn(2, 2, 41, 12, dtype=torch.float64)
    return {"layer": layer, "block": block}, x, w, torch.arange(41) > torch.tensor([[30], [41]])


def trained(module, x, w, padding, rows):
    """The result, the gradient of x and those of all parameters, for some rows."""
    part = x[..., rows, :].requires_grad_()
    y = module(part, padding[..., rows])
    inputs = [part, *module.parameters()]
    return [y.detach(), *torch.autograd.grad((y * w[..., rows, :]).sum(), inputs)]


def with_group(module):
    """A copy whose attention is split over the processes."""
    for one in module.modules():
        if isinstance(one, nn.OrthogonalSelfAttention):
            one.process_group = distributed.group.WORLD
    return copy.deepcopy(module)


def on_rows(attend, arrays, w, options, rows):
    """The result and the gradients, for some rows."""
    parts = [a.detach()[..., rows, :].requires_grad_() for a in arrays]
    options = dict(options)
    if "mask" in options:
        options["mask"] = options["mask"][rows]
    y = attend(*parts, **options)
    learned = [options["alpha"]] if torch.is_tensor(options["alpha"]) else []
    gradients = torch.autograd.grad((y * w[..., rows, :]).sum(), [*parts, *learned])
    return [y.detach(), *gradients]


def worker(rank, size, folder):
    """One process: every case in turn, and how many all-reduces it took."""
    torch.set_num_threads(1)
    where = f"file://{folder}/meeting"
    distributed.init_process_group("gloo", init_method=where, rank=rank, world_size=size)
    calls, reduce = [], distributed.all_reduce

    def counted(a, **options):
        calls.append(tuple(a.shape))
        return reduce(a, **options)

    distributed.all_reduce = counted
    rows = slice(*cuts(size)[rank : rank + 2])
    results = {}
    for name in CASES:
        calls.clear()
        results[name] = on_rows(split.orthogonal_attention, *case(name), rows), list(calls)
    made, x, w, padding = modules()
    for name, module in made.items():
        calls.clear()
        results[name] = trained(with_group(module), x, w, padding, rows), list(calls)
    bad = [a.detach().clone() for a in case("double")[0]]
    bad[1][0, 0, 40, 0] = float("nan")
    try:
        split.orthogonal_attention(*(a[..., rows, :] for a in bad))
    except ValueError as error:
        results["error"] = str(error)
    torch.save(results, Path(folder, f"{rank}.pt"))
    distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[2, 4])
def ranks(request):
    """What every process of a group found."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = request.param, folder
        multiprocessing.start_processes(worker, arguments, request.param, start_method="spawn")
        yield [torch.load(Path(folder, f"{rank}.pt")) for rank in range(request.param)]


@pytest.mark.parametrize("name", CASES)
def test_is_the_whole_sequence_to_rounding(ranks, name):
    arrays, w, options = case(name)
    whole = on_rows(orthogonal_attention, arrays, w, options, slice(None))
    parts = [rank[name][0] for rank in ranks]
    rho = float(arrays[0].detach().norm() * arrays[1].detach().norm())
    for i, expected in enumerate(whole):
        pieces = [part[i] for part in parts]
        joined = torch.cat(pieces, dim=-2) if i < 4 else sum(pieces)
        size = float(expected.abs().max()) + ("range" not in name)
        atol = 1000 * UNIT[w.dtype] * max(1.0, rho) * size
        torch.testing.assert_close(joined, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["layer", "block"])
def test_modules_are_the_whole_sequence_and_sum_the_gradients_of_parameters(ranks, name):
    made, x, w, padding = modules()
    whole = trained(made[name], x, w, padding, slice(None))
    parts = [rank[name][0] for rank in ranks]
    for i, expected in enumerate(whole):
        pieces = [part[i] for part in parts]
        joined = torch.cat(pieces, dim=-2) if i < 2 else sum(pieces)
        atol = 1000 * UNIT[x.dtype] * (1 + float(expected.norm()))
        torch.testing.assert_close(joined, expected, rtol=0, atol=atol)
    assert all(rank[name][1] == [(2, 3, 8, 12), (2, 3, 8, 4)] for rank in ranks)


@pytest.mark.parametrize("name", ONE_REDUCTION)
def test_one_reduction_forward_and_one_backward(ranks, name):
    """Of m × (m + e) and of m × e, whatever the length."""
    for rank in ranks:
        assert rank[name][1] == [(2, 3, 10, 15), (2, 3, 10, 5)]


@pytest.mark.parametrize("name", BY_BASIS)
def test_what_is_not_trusted_is_done_again_by_a_basis(ranks, name):
    """Two more all-reduces: of the sizes of the columns, and of m × e."""
    first, sizes, *others = [(2, 3, 10, 15), (2, 3, 1, 15), (2, 3, 10, 5), (2, 3, 10, 5)]
    for rank in ranks:
        assert rank[name][1] == [first, sizes, *others]


def test_orthogonal_to_rounding_where_q_and_k_are_nearly_parallel(ranks):
    """As in one process: 80 √m u."""
    for name in BY_BASIS:
        (*_, v), w, _ = case(name)
        y = torch.cat([rank[name][0][0] for rank in ranks], dim=-2).double()
        gram, expected = (a.mT @ a for a in (y, v.detach().double()))
        atol = 80 * 10**0.5 * UNIT[w.dtype] * float(expected.norm())
        torch.testing.assert_close(gram, expected, rtol=0, atol=atol)


def test_all_processes_refuse_bad_numbers(ranks):
    for rank in ranks:
        assert "q, k, v or alpha contains NaN or infinity" in rank["error"]


def test_the_cuts_cover_the_sequence():
    for size in (2, 4):
        assert cuts(size)[0] == 0
        assert cuts(size)[-1] == 41
        assert all(a <= b for a, b in itertools.pairwise(cuts(size)))


@pytest.fixture
def alone(tmp_path):
    """A group of this process alone."""
    where = f"file://{tmp_path}/meeting"
    distributed.init_process_group("gloo", init_method=where, rank=0, world_size=1)
    yield distributed.group.WORLD
    distributed.destroy_process_group()


@pytest.mark.parametrize("size", [1.0, 1e160])
def test_gradients_by_either_route(alone, size):
    arrays = [torch.randn(2, 9, 2, dtype=torch.float64, requires_grad=True) for _ in range(3)]

    def function(q, k, v):
        return split.orthogonal_attention(size * q, k / size, v, alpha=0.3)

    assert torch.autograd.gradcheck(function, arrays)


def test_dtypes_are_those_of_one_process(alone):
    for dtype in (torch.int64, torch.float16, torch.bfloat16, torch.float64, torch.complex64):
        q, k, v = (torch.arange(24).reshape(12, 2).to(dtype) + i for i in range(3))
        found = split.orthogonal_attention(q, k, v, alpha=1e-3)
        expected = orthogonal_attention(q, k, v, alpha=1e-3)
        assert found.dtype == expected.dtype
        unit = max(1e-5, torch.finfo(expected.dtype).eps)
        torch.testing.assert_close(found, expected, rtol=0, atol=36 * unit)
    assert split.orthogonal_attention(q.real, k.real, v).dtype == torch.complex64


@pytest.mark.parametrize("alpha", [100.0, torch.tensor([50.0, 100.0])])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_multiplied_in_single(alone, dtype, alpha):
    """1000 q alone is near the end of float16's range, and alpha q beyond it."""
    q, k, v = torch.randn(3, 2, 30, 4, generator=torch.Generator().manual_seed(0))
    q, k, v = (1000 * q).to(dtype), (k / 1e5).to(dtype), v.to(dtype)
    if isinstance(alpha, torch.Tensor):
        alpha = alpha.to(dtype)
    found = split.orthogonal_attention(q, k, v, alpha=alpha)
    expected = orthogonal_attention(q.double(), k.double(), v.double(), alpha=alpha)
    assert found.dtype == dtype
    unit = torch.finfo(dtype).eps / 2
    torch.testing.assert_close(found.double(), expected, rtol=0, atol=unit * float(v.norm()))
    one = orthogonal_attention(q, k, v, alpha=alpha)
    torch.testing.assert_close(one.double(), expected, rtol=0, atol=unit * float(v.norm()))


def test_a_second_derivative_is_refused(alone):
    q, k, v = torch.randn(3, 9, 2, dtype=torch.float64)
    q.requires_grad_()
    y = split.orthogonal_attention(q, k, v)
    with pytest.raises(NotImplementedError, match="no second derivatives"):
        torch.autograd.grad(y.sum(), q, create_graph=True)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # torch's, where graphs end
def test_compiled_blocks_communicate_outside_of_the_graph(alone):
    block = nn.OrthogonalTransformerBlock(12, 3, process_group=alone)
    x = torch.randn(2, 20, 12)
    expected = block(x)
    found = torch.compile(block, backend="aot_eager")(x)
    torch.testing.assert_close(found, expected)
    found.sum().backward()
    assert block.attention.alpha.grad.any()


def test_arguments_that_do_not_fit(alone):
    q = torch.ones(5, 2, dtype=torch.float64)
    with pytest.raises(TypeError, match="q is a ndarray; pass a torch tensor"):
        split.orthogonal_attention(q.numpy(), q, q)
    with pytest.raises(ValueError, match=r"q, k, v or alpha contains NaN"):
        split.orthogonal_attention(q, q, q, alpha=torch.tensor(float("inf")))
    with pytest.raises(ValueError, match="the result overflows"):
        split.orthogonal_attention(1e200 * q, 1e200 * q.cumsum(0), q)


def test_nothing_to_turn():
    """Without columns or elements no process has to be asked."""
    for shape in ((5, 0), (0, 5, 2)):
        q, v = torch.ones(shape), torch.ones(*shape[:-1], 3)
        assert torch.equal(split.orthogonal_attention(q, q, v), v)
