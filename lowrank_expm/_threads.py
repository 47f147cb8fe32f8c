"""Plain threads for compiled kernels that release the GIL: no runtime that a fork could break."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

# Below this many scalar products a second thread costs more than it saves (about 0.2 ms).
WORTH_A_THREAD = 300_000

_pool: ThreadPoolExecutor | None = None
_threads: int | None = None


def threads() -> int:
    """How many threads kernels use: LOWRANK_EXPM_NUM_THREADS, or the CPUs this process may use."""
    global _threads
    if _threads is None:
        given = os.environ.get("LOWRANK_EXPM_NUM_THREADS", "")
        if given and not (given.isdigit() and int(given) > 0):
            raise ValueError(
                f"LOWRANK_EXPM_NUM_THREADS is {given!r}; set it to a positive integer or unset it"
            )
        affinity = getattr(os, "sched_getaffinity", None)
        _threads = int(given) if given else len(affinity(0)) if affinity else os.cpu_count() or 1
    return _threads


def set_threads(count: int) -> None:
    """Use `count` threads from now on."""
    global _threads
    _forget_pool()
    _threads = count


def share(count: int, cost: int, work: Callable[[int, int], object]) -> None:
    """Run work(first, last) over count items of `cost` scalar products, split between threads."""
    parts = min(threads(), count, 1 + count * cost // WORTH_A_THREAD)
    if parts <= 1:
        if count:
            work(0, count)
        return
    bounds = [count * i // parts for i in range(parts + 1)]
    rest = [_executor().submit(work, bounds[i], bounds[i + 1]) for i in range(1, parts)]
    work(0, bounds[1])
    for job in rest:
        job.result()


def _executor() -> ThreadPoolExecutor:
    """The pool, made at first use."""
    global _pool
    if _pool is None:
        _pool = ThreadPoolExecutor(max(1, threads() - 1), thread_name_prefix="lowrank_expm")
    return _pool


def _forget_pool() -> None:
    """Drop the pool: a forked child has its object but not its threads."""
    global _pool
    _pool = None


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_forget_pool)
