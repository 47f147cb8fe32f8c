"""Compile and run times in JAX beside jax.scipy.linalg.expm: `python -m tests.jax_speed`.

float32, r = 4, one vector, exp(S)B and its gradient in U, V and B. Seconds of CPU time to trace
and compile; medians of interleaved calls; and the memory that the compiled code wants beside its
arguments and results, as XLA reports it.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from lowrank_expm import skew_expm_multiply

RANK = 4


def dense(U: Any, V: Any, B: Any) -> Any:
    """The same map by the exponential of the n × n matrix."""
    with jax.default_matmul_precision("highest"):
        return jax.scipy.linalg.expm(U @ V.T - V @ U.T) @ B


def gradient(f: Callable[..., Any]) -> Callable[..., Any]:
    """The derivative of Σ f⁴ in all arguments."""
    return jax.grad(lambda *a: jnp.sum(f(*a) ** 4), (0, 1, 2))


def compiled(f: Callable[..., Any], given: list[Any]) -> tuple[Any, float, float]:
    """A compiled function, the CPU seconds that this took, and the MiB that it works in."""
    start = time.process_time()
    ready = jax.jit(f).lower(*given).compile()
    spent = time.process_time() - start
    return ready, spent, ready.memory_analysis().temp_size_in_bytes / 2**20


def seconds(calls: list[Callable[..., Any]], given: list[Any], repeats: int) -> list[float]:
    """Median seconds of each call, taken in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats + 1):
        for call, spent in zip(calls, times, strict=True):
            start = time.perf_counter()
            jax.block_until_ready(call(*given))
            spent.append(time.perf_counter() - start)
    return [float(np.median(spent[1:])) for spent in times]


def main() -> None:
    """Print the table, a line for every n."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="calls of each kind (11)")
    parser.add_argument("--sizes", type=int, nargs="+", default=[64, 256, 512, 1024, 2048])
    options = parser.parse_args()
    print("what       n    compile s: own dense   run ms: own     dense   ratio   MiB: own dense")
    for n in options.sizes:
        rng = np.random.default_rng(n)
        shapes = ((n, RANK), (n, RANK), (n, 1))
        given = [jnp.asarray(rng.standard_normal(s) / n**0.25, jnp.float32) for s in shapes]
        for name, change in (("forward", lambda f: f), ("gradient", gradient)):
            parts = [compiled(change(f), given) for f in (skew_expm_multiply, dense)]
            (own, own_s, own_mib), (other, other_s, other_mib) = parts
            fast, slow = seconds([own, other], given, options.repeats)
            print(
                f"{name:9} {n:4d} {own_s:15.2f} {other_s:5.2f} {fast * 1e3:13.3f} "
                f"{slow * 1e3:9.2f} {slow / fast:7.0f} {own_mib:10.2f} {other_mib:6.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
