"""Calls from threads, from forks, and from an interpreter that is about to end."""

import subprocess
import sys
import textwrap
import threading

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from lowrank_expm import _linear, _threads, derivatives, skew_expm_multiply
from lowrank_expm.core import compiled, compiled_derivative

from . import generators as gen

PROBLEM = """
import os, sys, threading, time
import numpy as np
import lowrank_expm
n = 300_000
U, V = np.random.default_rng(0).standard_normal((2, n, 4)) / n**0.5
def call():
    y = lowrank_expm.skew_expm_multiply(U, V, U[:, 0])
    assert abs(np.linalg.norm(y) / np.linalg.norm(U[:, 0]) - 1) < 1e-12
    os.write(1, b"right\\n")
"""


def run(program):
    """What a program prints, with a limit on its time."""
    code = PROBLEM + textwrap.dedent(program)
    command = [sys.executable, "-W", "ignore::DeprecationWarning", "-c", code]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def test_a_call_after_the_main_thread_has_ended():
    assert run("threading.Thread(target=lambda: (time.sleep(0.3), call())).start()") == ["right"]


def test_a_call_at_exit():
    assert run("import atexit; atexit.register(call)") == ["right"]


@pytest.mark.parametrize("delay", [0.0, 0.1, 0.3, 1.0])
def test_a_fork_during_the_first_call_of_another_thread(delay):
    program = f"""
    first = threading.Thread(target=call)
    first.start()
    time.sleep({delay})
    child = os.fork()
    if child == 0:
        call()
        os._exit(0)
    _, status = os.waitpid(child, 0)
    first.join()
    assert status == 0
    """
    assert run(program) == ["right", "right"]


def test_a_fork_while_another_thread_keeps_blas_to_one():
    """The child has as many BLAS threads as the parent, though nobody in it will put them back."""
    program = """
    from lowrank_expm import _threads
    def blas_threads():
        return [pool.num_threads for pool in _threads._thread_pools().lib_controllers]
    before, inside, done = blas_threads(), threading.Event(), threading.Event()
    def keep():
        with _threads.one_blas_thread():
            inside.set()
            done.wait()
    keeper = threading.Thread(target=keep)
    keeper.start()
    inside.wait()
    child = os.fork()
    if child == 0:
        right = blas_threads() == before
        with _threads.one_blas_thread():
            right = right and set(blas_threads()) <= {1}
        os._exit(0 if right and blas_threads() == before else 1)
    _, status = os.waitpid(child, 0)
    done.set()
    keeper.join()
    assert status == 0
    assert blas_threads() == before
    """
    assert run(program) == []


@pytest.fixture
def two_threads():
    before = _threads.threads()
    _threads.set_threads(2)
    yield
    _threads.set_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_nothing_goes_on_after_an_exception():
    finished = []

    def work(first, last):
        if first == 0:
            raise KeyboardInterrupt
        np.linalg.eigvalsh(np.ones((200, 200)))
        finished.append(last)

    with pytest.raises(KeyboardInterrupt):
        _threads.share(2, 10**9, work)
    assert finished == [2]


@pytest.mark.usefixtures("two_threads")
def test_an_exception_on_the_pool_reaches_the_caller():
    def work(first, last):
        if first:
            raise RuntimeError("from the pool")

    with pytest.raises(RuntimeError, match="from the pool"):
        _threads.share(2, 10**9, work)


def blas_threads():
    """The threads of each BLAS library that is loaded."""
    from threadpoolctl import threadpool_info

    _threads._thread_pools()  # loads the libraries
    return [pool["num_threads"] for pool in threadpool_info() if pool["user_api"] == "blas"]


def test_blas_keeps_to_one_thread_only_while_somebody_shares_it():
    before = blas_threads()
    with _threads.one_blas_thread():
        with _threads.one_blas_thread():
            assert set(blas_threads()) <= {1}
        assert set(blas_threads()) <= {1}
    assert blas_threads() == before


def test_any_thread_may_be_the_last_to_share_blas():
    """Some versions of threadpoolctl heed the first thread alone."""
    before = blas_threads()
    inside, left = threading.Event(), threading.Event()

    def other():
        with _threads.one_blas_thread():
            inside.set()
            left.wait()

    thread = threading.Thread(target=other)
    with _threads.one_blas_thread():
        thread.start()
        inside.wait()
    assert set(blas_threads()) <= {1}
    left.set()
    thread.join()
    assert blas_threads() == before


def test_any_thread_may_be_the_first_to_share_blas():
    before, stop = blas_threads(), threading.Event()
    first = threading.Thread(target=lambda: (one_call(), stop.wait()))
    first.start()  # and alive, as a server's threads are
    with _threads.one_blas_thread():
        assert set(blas_threads()) <= {1}
    stop.set()
    first.join()
    assert blas_threads() == before


def one_call():
    """A call whose products BLAS would share between its threads."""
    rng = np.random.default_rng(3)
    U, V, B = (gen.normal(rng, (500, k), "complex128") / 500**0.5 for k in (33, 33, 17))
    return skew_expm_multiply(U, V, B, 1.7)


def test_the_bits_are_the_same_on_every_thread_of_the_caller():
    found = []
    threads = [threading.Thread(target=lambda: found.append(one_call())) for _ in range(3)]
    for thread in threads:
        thread.start()
    expected = one_call()
    for thread in threads:
        thread.join()
    assert len(found) == 3
    assert all(np.array_equal(Y, expected) for Y in found)


@pytest.mark.parametrize(
    ("count", "m", "quiet"),
    [(96, 128, True), (1, 128, True), (1, 400, False), (2, 400, True), (96, 4, False)],
)
def test_blas_keeps_to_one_thread_where_its_products_are_small_or_many(count, m, quiet):
    with _threads.one_blas_thread():
        one = blas_threads()
    free = blas_threads()
    with _threads.quiet_blas(count, m**3):
        assert blas_threads() == (one if quiet else free)


@pytest.mark.usefixtures("two_threads")
def test_every_product_of_a_call_is_quiet(monkeypatch):
    """None wakes BLAS threads, which would then spin beside the passes' own."""
    products = []
    quiet = _threads.quiet_blas

    def seen(count, cost):
        products.append((count, cost))
        return quiet(count, cost)

    for module in (_linear, _threads, compiled, compiled_derivative):
        monkeypatch.setattr(module, "quiet_blas", seen)
    U, V, B = np.random.default_rng(0).standard_normal((3, 3, 200, 32)) / 10
    skew_expm_multiply(U, V, B)
    assert products == [(3, 64**3)]
    products.clear()
    skew_expm_multiply(U, V, B, method="gram")
    assert products == [(3, 64**3), (3, 64**2 * 32)]
    derivatives.vjp(U, V, B)[1](B)
    assert products[2:] == [(3, 64**3), (3, 64**2 * 32), (3, 64**3), (3, 64**3)]


@pytest.mark.usefixtures("two_threads")
@pytest.mark.parametrize("shape", [(150, 31), (3, 150, 31), (2, 61, 31)])
def test_no_bit_depends_on_our_threads_or_on_a_layout_where_blas_has_threads(shape):
    """Products of 62 columns are large enough for BLAS to use several, which round otherwise."""
    rng = np.random.default_rng(0)
    U, V, B = (rng.standard_normal((3, *shape)) + 1j * rng.standard_normal((3, *shape))) / 3
    results = []
    with threadpool_limits(2, "blas"):
        for count in (1, 2):
            _threads.set_threads(count)
            Y, pullback = derivatives.vjp(U, V, B)
            results.append([skew_expm_multiply(U, V, B), Y, *pullback(B)])
    for one, two in zip(*results, strict=True):
        np.testing.assert_array_equal(one, two)
    np.testing.assert_array_equal(results[0][0], results[0][1])
