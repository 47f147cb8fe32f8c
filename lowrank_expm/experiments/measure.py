"""Time and peak memory of one kind of attention at one length, in a process of its own.

Prints JSON. Started by the study "cost": ``python -m lowrank_expm.experiments.measure KIND N``.
"""

from __future__ import annotations

import json
import resource
import statistics
import sys
import time
from collections.abc import Callable

import torch

from ..attention import orthogonal_attention

HEADS, DIM = 4, 64
REPEATS, ENOUGH = 5, 2.0


def by_definition(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """softmax(q kᵀ/√d) v with the matrix formed."""
    return torch.softmax(q @ k.mT / q.shape[-1] ** 0.5, dim=-1) @ v


KINDS: dict[str, Callable[..., torch.Tensor]] = {
    "orthogonal": lambda q, k, v: orthogonal_attention(q, k, v, alpha=1 / q.shape[-2]),
    "softmax, fused": torch.nn.functional.scaled_dot_product_attention,
    "softmax, by its definition": by_definition,
}


def measure(kind: str, n: int) -> dict[str, float]:
    """Median seconds of a forward and backward pass, and MiB beyond the inputs.

    CPU seconds, of all threads together, are what a busy machine does not disturb.
    """
    q, k, v = (torch.randn(1, HEADS, n, DIM, requires_grad=True) for _ in range(3))
    for few in (2 * DIM, 2 * DIM + 2):  # loads what the ways of short and long sequences need
        KINDS[kind](
            *(torch.randn(1, HEADS, few, DIM, requires_grad=True) for _ in range(3))
        ).sum().backward()
    before = peak()
    walls: list[float] = []
    works: list[float] = []
    while len(walls) < REPEATS and sum(walls) < ENOUGH:
        q.grad = k.grad = v.grad = None
        wall, work = time.perf_counter(), time.process_time()
        KINDS[kind](q, k, v).sum().backward()
        walls.append(time.perf_counter() - wall)
        works.append(time.process_time() - work)
    return {
        "seconds": statistics.median(walls),
        "CPU seconds": statistics.median(works),
        "MiB": peak() - before,
    }


def peak() -> float:
    """The largest memory of this process so far, in MiB."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


if __name__ == "__main__":
    torch.manual_seed(0)
    torch.set_num_threads(int(sys.argv[3]) if len(sys.argv) > 3 else torch.get_num_threads())
    print(json.dumps(measure(sys.argv[1], int(sys.argv[2]))))
