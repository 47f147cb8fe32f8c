"""A sequence split over processes against the same sequence in one."""

import itertools
import tempfile
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
split = pytest.importorskip("lowrank_expm.distributed")

from torch import distributed, multiprocessing  # noqa: E402

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
    return [a.requires_grad_() for a in (q, k, v)], w, options


CASES = ("double", "single", "mask", "heads", "parallel single")


def cuts(size):
    """Where the sequence is split: unevenly, and one process has nothing."""
    return {1: [0, 41], 2: [0, 17, 41], 4: [0, 3, 3, 30, 41]}[size]


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
    bad = [a.detach().clone() for a in case("double")[0]]
    bad[1][0, 0, 40, 0] = float("nan")
    try:
        split.orthogonal_attention(*(a[..., rows, :] for a in bad))
    except ValueError as error:
        results["error"] = str(error)
    torch.save(results, Path(folder, f"{rank}.pt"))
    distributed.destroy_process_group()


@pytest.fixture(scope="module", params=[1, 2, 4])
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
        atol = 1000 * UNIT[w.dtype] * max(1.0, rho) * (1 + float(expected.abs().max()))
        torch.testing.assert_close(joined, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("name", ["double", "single", "mask", "heads"])
def test_one_reduction_forward_and_one_backward(ranks, name):
    """Of m × (m + e) and of m × e, whatever the length."""
    for rank in ranks:
        assert rank[name][1] == [(2, 3, 10, 15), (2, 3, 10, 5)]


def test_single_precision_that_is_not_trusted_is_done_again_in_double(ranks):
    for rank in ranks:
        assert rank["parallel single"][1] == [(2, 3, 10, 15), (2, 3, 10, 15), (2, 3, 10, 5)]


def test_all_processes_refuse_bad_numbers(ranks):
    for rank in ranks:
        assert "contains NaN or infinity" in rank["error"]


def test_the_cuts_cover_the_sequence():
    for size in (1, 2, 4):
        assert cuts(size)[0] == 0
        assert cuts(size)[-1] == 41
        assert all(a <= b for a, b in itertools.pairwise(cuts(size)))
