"""Plain threads for compiled kernels that release the GIL: no runtime that a fork could break."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import cache
from typing import Any

# Below this many scalar products a second thread costs more than it saves (about 0.2 ms).
WORTH_A_THREAD = 300_000
# Scalar products in a matrix product from which on BLAS wakes threads, and from which on they pay.
BLAS_WAKES, BLAS_PAYS = 32_000, 3_000_000

# Held while kernels are imported and compiled, and while the pool is made.
first_use = threading.RLock()

_here = threading.local()

_ready: set[tuple[str, str]] = set()
_pool: ThreadPoolExecutor | None = None
_threads: int | None = None


def threads() -> int:
    """How many threads kernels use: LOWRANK_EXPM_NUM_THREADS, or the CPUs this process may use."""
    global _threads
    if _threads is None:
        given = os.environ.get("LOWRANK_EXPM_NUM_THREADS", "")
        if given and not (given.isdecimal() and int(given) > 0):
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


class compiling:  # noqa: N801
    """A context for calls of a kernel that hold `first_use` until it is there for its dtype."""

    def __init__(self, kernel: str, char: str) -> None:
        self.key = (kernel, char)

    def __enter__(self) -> None:
        self.new = self.key not in _ready
        if self.new:
            first_use.acquire()

    def __exit__(self, kind: object, *_: object) -> None:
        if self.new:
            if kind is None:
                _ready.add(self.key)
            first_use.release()


@contextmanager
def alone() -> Iterator[None]:
    """Let kernels called from this thread use no other: a scheduler keeps the others busy."""
    before, _here.alone = getattr(_here, "alone", False), True
    try:
        yield
    finally:
        _here.alone = before


_blas_lock = threading.RLock()
_blas_users = 0
_blas_before: list[int] = []


@cache
def _thread_pools() -> Any:
    """The thread pools of the BLAS libraries that are loaded, SciPy's among them."""
    import scipy.linalg.cython_blas  # noqa: F401  (what numba calls, and loads only then)
    from threadpoolctl import ThreadpoolController

    return ThreadpoolController().select(user_api="blas")


def _limit_blas(limits: list[int] | None = None) -> list[int]:
    """Set how many threads each BLAS library has (one, unless told); returns what it had.

    Some versions of threadpoolctl let the first thread alone set limits, and ignore the others:
    here any may, one after the other.
    """
    pools = _thread_pools().lib_controllers
    before = [pool.num_threads for pool in pools]
    for pool, limit in zip(pools, limits or [1] * len(pools), strict=False):
        let_go = getattr(pool, "clear_controlling_thread", lambda force: None)
        let_go(force=True)
        pool.set_num_threads(limit)
        let_go(force=True)
    return before


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Keep BLAS to one thread, as long as anybody is in here.

    Its threads beside ours are too many: each waits for the other's, spinning.
    """
    global _blas_users, _blas_before
    with _blas_lock:
        if not _blas_users:
            _blas_before = _limit_blas()
        _blas_users += 1
    try:
        yield
    finally:
        with _blas_lock:
            _blas_users = max(0, _blas_users - 1)
            if not _blas_users:
                _limit_blas(_blas_before)


def quiet_blas(count: int, cost: int) -> AbstractContextManager[None]:
    """`one_blas_thread` for so many products of `cost` scalar products, where that is faster.

    Threads that BLAS wakes for small products spin for a while after them, in the way of ours. It
    rounds otherwise with another number of threads, so that this must not depend on ours.
    """
    quiet = cost >= BLAS_WAKES and (count > 1 or cost < BLAS_PAYS)
    return one_blas_thread() if quiet else nullcontext()


def share(count: int, cost: int, work: Callable[[int, int], object]) -> None:
    """Run work(first, last) over count items of `cost` scalar products, split between threads."""
    most = 1 if getattr(_here, "alone", False) else threads()
    parts = min(most, count, 1 + count * cost // WORTH_A_THREAD)
    if parts <= 1:
        if count:
            work(0, count)
        return
    bounds = [count * i // parts for i in range(parts + 1)]
    rest = [_submit(work, bounds[i], bounds[i + 1]) for i in range(1, parts)]
    try:
        work(0, bounds[1])
    finally:  # nothing may go on writing after this returns, whatever happened
        wait(rest)
    for job in rest:
        job.result()


def _submit(work: Callable[[int, int], object], first: int, last: int) -> Future[object]:
    """Run work(first, last) on the pool, or here once the interpreter takes no new threads."""
    try:
        return _executor().submit(work, first, last)
    except RuntimeError:
        done: Future[object] = Future()
        done.set_result(work(first, last))
        return done


def _executor() -> ThreadPoolExecutor:
    """The pool, made at first use."""
    global _pool
    with first_use:
        if _pool is None:
            _pool = ThreadPoolExecutor(max(1, threads() - 1), thread_name_prefix="lowrank_expm")
        return _pool


def _forget_pool() -> None:
    """Drop the pool: a forked child has its object but not its threads."""
    global _pool
    _pool = None


def _before_fork() -> None:
    """Wait until no other thread is in what a child would inherit half done, and keep it so."""
    first_use.acquire()
    _blas_lock.acquire()


def _after_fork() -> None:
    """Let the others go on."""
    _blas_lock.release()
    first_use.release()


def _start_anew() -> None:
    """In a forked child, where no other thread is: no pool, and nobody shares BLAS."""
    global _blas_users
    _forget_pool()
    if _blas_users:
        _blas_users = 0
        _limit_blas(_blas_before)
    _after_fork()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        before=_before_fork, after_in_parent=_after_fork, after_in_child=_start_anew
    )
