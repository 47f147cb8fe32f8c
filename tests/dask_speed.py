"""What a Dask cluster on this machine takes: `python -m tests.dask_speed [rows]`.

Prints the tasks a block, the bytes loaded for each byte of the sources, the time for 1, 2 and 4
worker processes of one thread, and the largest resident memory of a worker beside its limit. The
sources are files of one block each; only the column norms of the result come back.
"""

from __future__ import annotations

import os
import resource
import sys
import tempfile
import time
from pathlib import Path

import dask
import dask.array as da
import numpy as np
from dask.utils import format_bytes
from distributed import Client, LocalCluster

from lowrank_expm import _threads, skew_expm_multiply

RANK, COLUMNS, BLOCK = 8, 1, 1 << 17
LIMIT = 450 << 20
loaded = 0


def write(folder: Path, blocks: int) -> int:
    """Files of U, V and B, a block each, and how many bytes they have."""
    rng = np.random.default_rng(0)
    for name, width in (("U", RANK), ("V", RANK), ("B", COLUMNS)):
        for i in range(blocks):
            rows = rng.standard_normal((BLOCK, width)) / (BLOCK * blocks) ** 0.25
            np.save(folder / f"{name}{i}.npy", rows)
    return blocks * BLOCK * (2 * RANK + COLUMNS) * 8


def load(folder: str, name: str, block_id: tuple[int, ...] = (0, 0)) -> np.ndarray:
    """One block from its file, counted."""
    global loaded
    a = np.load(f"{folder}/{name}{block_id[0]}.npy")
    loaded += a.nbytes
    return a


def source(folder: Path, name: str, width: int, blocks: int) -> da.Array:
    """One of the arrays."""
    chunks = ((BLOCK,) * blocks, (width,))
    meta = np.empty((0, 0))
    return da.map_blocks(load, os.fspath(folder), name, chunks=chunks, dtype=float, meta=meta)


def state() -> tuple[int, int]:
    """Bytes that this worker loaded, and its largest resident memory."""
    return loaded, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def warm_up() -> None:
    """Let this worker import and compile."""
    arrays = [np.ones((50, width)) for width in (RANK, RANK, COLUMNS)]
    skew_expm_multiply(*(da.from_array(a, chunks=(25, -1)) for a in arrays)).compute(
        scheduler="sync"
    )


def run(norms: da.Array, workers: int) -> tuple[float, np.ndarray, int, int, int]:
    """The time, the result, the bytes loaded, and a worker's memory before and at its peak."""
    with (
        LocalCluster(
            workers, threads_per_worker=1, dashboard_address=None, memory_limit=LIMIT
        ) as c,
        Client(c) as client,
    ):
        client.run(warm_up)
        before = max(memory for _, memory in client.run(state).values())
        start = time.perf_counter()
        result = norms.compute()
        seconds = time.perf_counter() - start
        states = client.run(state).values()
    return seconds, result, sum(n for n, _ in states), before, max(m for _, m in states)


def main() -> None:
    """Measure and print."""
    rows = int(float(sys.argv[1])) if len(sys.argv) > 1 else 1 << 22
    blocks = max(1, rows // BLOCK)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        total = write(folder, blocks)
        U, V, B = (
            source(folder, a, width, blocks)
            for a, width in (("U", RANK), ("V", RANK), ("B", COLUMNS))
        )
        Y = skew_expm_multiply(U, V, B)
        tasks = len(dict(dask.optimize(Y)[0].__dask_graph__()))
        print(f"{blocks * BLOCK:,} rows, r = {RANK}, k = {COLUMNS}: {format_bytes(total)} in files")
        print(f"{blocks} blocks, {tasks} tasks: {tasks / blocks:.2f} a block")
        print(f"{_threads.threads()} CPUs; a worker's memory limit is {format_bytes(LIMIT)}")
        print("workers  seconds  loaded/source  memory before  at its peak  norm drift")
        norms = da.stack([(Y**2).sum(), (B**2).sum()])
        for workers in (1, 2, 4):
            seconds, (after, given), count, before, peak = run(norms, workers)
            drift = abs(np.sqrt(after / given) - 1)
            sizes = f"{format_bytes(before):>13}  {format_bytes(peak):>11}"
            print(f"{workers:>7}  {seconds:>7.2f}  {count / total:>13.3f}  {sizes}  {drift:>10.1e}")


if __name__ == "__main__":
    from tests import dask_speed  # so that workers count in a module that they can import

    dask_speed.main()
