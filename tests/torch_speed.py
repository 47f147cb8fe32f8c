"""Time and memory of orthogonal attention on torch tensors, side by side.

    python -m tests.torch_speed [--tokens N …] [--batch B] [--alpha A] [--repeats R]
                                [--threads T] [--cpu] [--json]

Float32, 12 heads, d = 64, on the CPU: `skew_expm_multiply`, softmax attention
(`scaled_dot_product_attention`), and QR followed by `torch.matrix_exp`, forward, and forward with
backward. Times are medians of interleaved runs, each after one that is not timed; memory is what
one forward and backward adds to the resident size of a process of its own, at most (Linux).

On a machine that does other things too, `--threads 1 --cpu` gives ratios that mean something.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from time import perf_counter, process_time, sleep
from typing import Any

import torch

from lowrank_expm import _threads, skew_expm_multiply

HEADS, WIDTH = 12, 64
PAUSE = 0.0  # seconds in which the threads of one library go to sleep before another is timed
Operation = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def ours(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """exp((q kᵀ − k qᵀ)/√d) v."""
    return skew_expm_multiply(q, k, v, WIDTH**-0.5)


def by_qr(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The same through an orthonormal basis Q of [q k] and the exponential of QᵀSQ."""
    Q, R = torch.linalg.qr(torch.cat([q, k], -1))
    M = R[..., :WIDTH] @ R[..., WIDTH:].mT * WIDTH**-0.5
    T = Q.mT @ v
    return v + Q @ (torch.matrix_exp(M - M.mT) @ T - T)


def softmax(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """Softmax attention."""
    return torch.nn.functional.scaled_dot_product_attention(q, k, v)


OPERATIONS: dict[str, Operation] = {"lowrank_expm": ours, "softmax": softmax, "QR + expm": by_qr}


def arguments(n: int, gradients: bool, batch: int = 1, alpha: float = 1.0) -> list[torch.Tensor]:
    """Queries, keys and values; with entries as large as this the angle is about 7 alpha."""
    torch.manual_seed(0)
    parts = [torch.randn(batch, HEADS, n, WIDTH) / n**0.25 for _ in range(3)]
    parts[0] *= alpha
    return [a.requires_grad_(gradients) for a in parts]


def run(operation: Operation, given: list[torch.Tensor]) -> None:
    """Forward, and backward where gradients are wanted."""
    Y = operation(*given)
    if Y.requires_grad:
        torch.autograd.grad(Y, given, torch.ones_like(Y))


def times(
    n: int, gradients: bool, repeats: int, batch: int, alpha: float, clock: Callable[[], float]
) -> dict[str, float]:
    """Median milliseconds of each operation."""
    given = arguments(n, gradients, batch, alpha)
    found: dict[str, list[float]] = {name: [] for name in OPERATIONS}
    for i in range(repeats + 1):
        for name, operation in OPERATIONS.items():
            sleep(PAUSE)
            run(operation, given)  # wakes its threads
            start = clock()
            run(operation, given)
            if i:
                found[name].append(1e3 * (clock() - start))
    return {name: statistics.median(values) for name, values in found.items()}


def memory(n: int) -> dict[str, float]:
    """MiB that forward and backward of each operation add, in a process of its own."""
    command = [sys.executable, "-m", "tests.torch_speed", "--tokens", str(n), "--peak-of"]
    return {
        name: float(subprocess.run([*command, name], capture_output=True, check=True).stdout)
        for name in OPERATIONS
    }


def peak(name: str, n: int) -> float:
    """MiB by which one forward and backward raises the largest resident size."""
    run(OPERATIONS[name], arguments(256, True))  # compiles, and loads libraries
    given = arguments(n, True)
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far counts no more
    before = resident("VmRSS")
    run(OPERATIONS[name], given)
    return resident("VmHWM") - before


def resident(field: str) -> float:
    """A resident size of this process, MiB."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith(field))


def measured(n: int, options: argparse.Namespace) -> list[dict[str, Any]]:
    """The rows of one length."""
    clock = process_time if options.cpu else perf_counter
    how = options.repeats, options.batch, options.alpha, clock
    rows: list[dict[str, Any]] = [
        {"n": n, "what": "forward, ms", **times(n, False, *how)},
        {"n": n, "what": "forward and backward, ms", **times(n, True, *how)},
    ]
    return rows + ([{"n": n, "what": "memory, MiB", **memory(n)}] if options.batch == 1 else [])


def main(argv: list[str] | None = None) -> int:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, nargs="+", default=[1024, 4096])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--batch", type=int, default=1, help="sequences (default: 1)")
    parser.add_argument("--alpha", type=float, default=1.0, help="how far to turn (default: 1)")
    parser.add_argument("--cpu", action="store_true", help="CPU time of all threads, not elapsed")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead")
    parser.add_argument("--peak-of", choices=list(OPERATIONS), help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    if options.peak_of:
        print(peak(options.peak_of, options.tokens[0]))
        return 0
    torch.set_num_threads(options.threads)
    _threads.set_threads(options.threads)
    with _threads._thread_pools().limit(limits=options.threads):
        rows = [row for n in options.tokens for row in measured(n, options)]
    if options.json:
        print(json.dumps(rows))
        return 0
    for row in rows:
        cells = "  ".join(f"{name} {row[name]:8.1f}" for name in OPERATIONS)
        print(f"n = {row['n']:5d}  {row['what']:24s}  {cells}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
