"""Times on a CUDA device beside its own limits: `python -m tests.gpu_speed`.

Medians over interleaved repeats, by events on the device: the time of one call, of the same in
plain CuPy operations (`hstack`, `X.T @ X`, the dense core), and of copying the bytes that two
sweeps read and write.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable
from typing import Any

import numpy as np

from lowrank_expm import skew_expm_multiply

SHAPES = (
    ("tall, float64", (), 1_000_000, 8, 1, "float64"),
    ("tall, float32", (), 4_000_000, 8, 1, "float32"),
    ("wide, float64", (), 100_000, 32, 32, "float64"),
    ("attention, float32", (96,), 1024, 64, 64, "float32"),
)


def seconds(cupy: Any, calls: list[Callable[[], Any]], repeats: int) -> list[float]:
    """Median seconds of each call, taken in turn."""
    times: list[list[float]] = [[] for _ in calls]
    for _ in range(repeats):
        for call, spent in zip(calls, times, strict=True):
            start, stop = cupy.cuda.Event(), cupy.cuda.Event()
            start.record()
            call()
            stop.record()
            stop.synchronize()
            spent.append(cupy.cuda.get_elapsed_time(start, stop) / 1e3)
    return [float(np.median(spent[1:])) for spent in times]


def plain(cupy: Any, U: Any, V: Any, B: Any) -> Any:
    """The same map in plain operations: Taylor on the small matrix, nothing certified."""
    X = cupy.concatenate([U, V], axis=-1)
    r = U.shape[-1]
    G, T = X.swapaxes(-1, -2) @ X, X.swapaxes(-1, -2) @ B
    A = cupy.concatenate([G[..., r:, :], -G[..., :r, :]], axis=-2)
    term = cupy.concatenate([T[..., r:, :], -T[..., :r, :]], axis=-2)
    Z = term
    for i in range(2, 20):
        term = A @ term / i
        Z = Z + term
    return B + X @ Z


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--repeats", type=int, default=11, help="calls of each kind (11)")
    repeats = parser.parse_args().repeats
    import cupy

    rng = cupy.random.default_rng(0)
    print(f"{'problem':22}{'auto ms':>10}{'gram ms':>10}{'plain ms':>10}{'two sweeps ms':>15}")
    for title, batch, n, r, k, dtype in SHAPES:
        U, V, B = ((rng.standard_normal((*batch, n, w)) / n**0.5).astype(dtype) for w in (r, r, k))
        moved = cupy.empty((2 * (U.nbytes + V.nbytes + B.nbytes) + B.nbytes) // 2, "u1")
        target = cupy.empty_like(moved)
        calls = [
            lambda a=(U, V, B): skew_expm_multiply(*a),
            lambda a=(U, V, B): skew_expm_multiply(*a, method="gram"),
            lambda a=(U, V, B): plain(cupy, *a),
            lambda a=(target, moved): cupy.copyto(*a),
        ]
        for call in calls:
            call()
        row = "".join(f"{1e3 * t:10.3f}" for t in seconds(cupy, calls, repeats)[:4])
        print(f"{title:22}{row}")


if __name__ == "__main__":
    main()
