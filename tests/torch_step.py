"""A training step on a long sequence, and what bfloat16 loses over depth.

    python -m tests.torch_step [--tokens N] [--threads T]

One block of width 256 with 4 heads, float32, AdamW, one sequence on the CPU: seconds of a step, and
what the process takes beyond its size before the first one, at most (Linux). Then stacks of 24
layers of the same width under autocast, on 512 tokens: how far the norm of the tokens is from that
at the start, and their distance from the same stack in single precision.
"""

from __future__ import annotations

import argparse
import statistics
from pathlib import Path
from time import perf_counter, process_time

import torch

from lowrank_expm import _threads
from lowrank_expm.nn import (
    ALPHA,
    OrthogonalSelfAttention,
    OrthogonalTransformerBlock,
    parameter_groups,
)

from .torch_speed import resident

WIDTH, HEADS, DEPTH, SHORT = 256, 4, 24, 512


def step(n: int, repeats: int = 5) -> tuple[float, float, float]:
    """Elapsed and CPU seconds of a step on n tokens, and its memory in MiB."""
    torch.manual_seed(0)
    block = OrthogonalTransformerBlock(WIDTH, HEADS, alpha=1 / n)
    optimiser = torch.optim.AdamW(parameter_groups(block, lr=1e-3))

    def train(tokens: int) -> None:
        x, target = torch.randn(2, 1, tokens, WIDTH)
        optimiser.zero_grad()
        torch.nn.functional.mse_loss(block(x), target).backward()
        optimiser.step()

    train(2 * WIDTH)  # compiles
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far counts no more
    before = resident("VmRSS")
    times = []
    for _ in range(repeats):
        wall, work = perf_counter(), process_time()
        train(n)
        times.append((perf_counter() - wall, process_time() - work))
    elapsed, spent = (statistics.median(one) for one in zip(*times, strict=True))
    return elapsed, spent, resident("VmHWM") - before


@torch.no_grad()
def drift(alpha: float) -> tuple[float, float]:
    """How far the norm is from that at the start, and the result from that in single precision."""
    torch.manual_seed(0)
    layers = [OrthogonalSelfAttention(WIDTH, HEADS, alpha=alpha) for _ in range(DEPTH)]
    stack = torch.nn.Sequential(*layers)
    x = torch.randn(1, SHORT, WIDTH)
    single = stack(x)
    with torch.autocast("cpu", torch.bfloat16):
        half = stack(x).float()
    distance = torch.linalg.norm(half - single) / torch.linalg.norm(single)
    return abs(float(torch.linalg.norm(half) / torch.linalg.norm(x)) - 1), float(distance)


def main() -> None:
    """Print both tables."""
    parser = argparse.ArgumentParser("python -m tests.torch_step", description=__doc__)
    parser.add_argument("--tokens", type=int, default=16384, help="default: 16384")
    parser.add_argument("--threads", type=int, default=1, help="default: 1")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    _threads.set_threads(options.threads)
    elapsed, spent, memory = step(options.tokens)
    print(f"a training step of one block, width {WIDTH}, {options.tokens:,} tokens:")
    print(f"  {elapsed:.2f} s, {spent:.2f} s of CPU time, {memory:.0f} MiB")
    print(f"bfloat16 after {DEPTH} layers of width {WIDTH}, {SHORT} tokens:")
    for alpha in (3e-4, ALPHA / DEPTH**0.5, ALPHA):
        norm, distance = drift(alpha)
        print(f"  alpha {alpha:.2g}: norm drift {norm:.1e}, distance {distance:.1e}")


if __name__ == "__main__":
    main()
