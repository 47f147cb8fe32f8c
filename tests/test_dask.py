"""Dask arrays: lazy, in blocks of rows, each loaded twice at most, on one machine or a cluster."""

import os
import signal
import time
from collections import Counter

import dask
import dask.array as da
import numpy as np
import pytest
from distributed import Client, LocalCluster

from lowrank_expm import _dask, expm_multiply, skew_expm_multiply
from lowrank_expm.attention import orthogonal_attention

from . import generators as gen

N, R, K = 120, 3, 2
ROWS = (50, 30, 0, 38, 2)


@pytest.fixture(autouse=True)
def _in_this_thread():
    with dask.config.set(scheduler="sync"):
        yield


def draw(name, dtype, n=N, r=R, k=K):
    rng = np.random.default_rng([3, len(name)])
    U, V = gen.MAKERS[name](rng, n, r, dtype)
    return U, V, gen.normal(rng, (n, k), dtype)


def lazy(*arrays, rows=ROWS):
    return [da.from_array(a, chunks=(*a.shape[:-2], rows, -1)) for a in arrays]


def wide(*arrays):
    return [a.astype(np.result_type(a, np.float64)) for a in arrays]


def error(Y, U, V, B, t=1.0):
    """‖Y − exp(tS)B‖ in units of u max(1, ρ) ‖B‖, against the basis of NumPy in double."""
    exact = skew_expm_multiply(*wide(U, V, B), t, method="qr")
    scale = gen.unit(U.dtype) * max(1.0, gen.rho(U, V, t)) * np.linalg.norm(B)
    return np.linalg.norm(Y - exact) / scale


# Results


@pytest.mark.parametrize("method", ["auto", "qr"])
@pytest.mark.parametrize("dtype", gen.DTYPES)
@pytest.mark.parametrize("name", sorted(gen.MAKERS))
def test_forward_error_and_defect_keep_the_contract(name, dtype, method):
    U, V, _ = draw(name, dtype)
    eye = np.eye(N, dtype=dtype)
    Y = skew_expm_multiply(*lazy(U, V, eye), 0.7, method=method)
    Q = Y.compute()
    assert (Y.shape, Y.dtype, Y.chunks[0]) == (Q.shape, Q.dtype, ROWS) == (eye.shape, dtype, ROWS)
    assert error(Q, U, V, eye, 0.7) <= 40
    (Q,) = wide(Q)
    limit = {"auto": 80, "qr": 32}[method] * np.sqrt(2 * R) * gen.unit(dtype)
    assert np.linalg.norm(Q.conj().T @ Q - eye, 2) <= limit


@pytest.mark.parametrize("size", [1e-8, 1.0, 1e8])
def test_blocks_may_differ_in_size_and_condition(size):
    """Nearly parallel rows decide, however small and well-conditioned the others are."""
    U, V, _ = draw("nearly_parallel", "float64", r=4)
    rng = np.random.default_rng(0)
    U[50:80], V[50:80] = 1e-7 * rng.standard_normal((2, 30, 4))
    U, V = size * U, V / size
    eye = np.eye(N)
    for method in ("auto", "qr"):
        Q = skew_expm_multiply(*lazy(U, V, eye), method=method).compute()
        assert error(Q, U, V, eye) <= 40
        assert np.linalg.norm(Q.T @ Q - eye, 2) <= 32 * np.sqrt(8) * gen.unit("float64")


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_squares_may_leave_the_range(dtype):
    U, V, B = draw("generic", dtype)
    size = np.finfo(dtype).max ** 0.8
    Y = skew_expm_multiply(*lazy(U * size, V / size, B)).compute()
    exact = skew_expm_multiply(U, V, B, method="qr")
    assert np.abs(Y - exact).max() <= 200 * gen.unit(dtype)


def test_gram_by_name_refuses_where_numpy_does():
    U, V, B = draw("nearly_parallel", "float32")
    V = U @ np.diag([1.0, 2.0, 3.0]).astype("float32")
    with pytest.raises(ValueError, match="use method 'auto' or 'qr'"):
        skew_expm_multiply(*lazy(100 * U, 100 * V, B), method="gram").compute()
    U, V, B = draw("generic", "float64")
    assert error(skew_expm_multiply(*lazy(U, V, B), method="gram").compute(), U, V, B) <= 40


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_general_low_rank(dtype):
    L, F, B = draw("generic", dtype)
    for t in (0.5, [0.5, -1.0], 0.3 + 0.4j):
        Y = expm_multiply(*lazy(L, F, B), t)
        exact = expm_multiply(*wide(L, F, B), t)
        y = Y.compute()
        assert y.dtype == Y.dtype == expm_multiply(L, F, B, t).dtype
        assert np.abs(y - exact).max() <= 100 * gen.unit(dtype) * np.abs(exact).max()


@pytest.mark.parametrize("t", [0, 0.5, np.float32(0.5), [0.0, 0.5, -2.0], []])
def test_times_vectors_and_mixed_kinds(t):
    U, V, _ = draw("generic", "float32")
    b = np.arange(N) * 1j
    Y = skew_expm_multiply(*lazy(U, V), da.from_array(b, chunks=25), t)
    exact = skew_expm_multiply(U, V, b, t)
    y = Y.compute()
    assert (y.shape, y.dtype) == (Y.shape, Y.dtype) == (exact.shape, exact.dtype)
    np.testing.assert_allclose(y, exact, atol=1e-3)
    if t == 0:
        np.testing.assert_array_equal(y, b.astype(y.dtype))


@pytest.mark.parametrize("t", [0.5, [0.5, 1.0]])
def test_a_lazy_time_is_one_more_argument_of_the_core(t):
    U, V, B = draw("generic", "float64")
    lazy_t = da.from_array(np.asarray(t), chunks=-1)
    for method in ("auto", "direct"):
        Y = skew_expm_multiply(*lazy(U, V, B), lazy_t, method=method)
        exact = skew_expm_multiply(U, V, B, t)
        assert Y.shape == exact.shape
        np.testing.assert_allclose(Y.compute(), exact, atol=1e-13)
    with pytest.raises(ValueError, match="t contains NaN"):
        skew_expm_multiply(*lazy(U, V, B), lazy_t * np.nan).compute()


def test_leading_axes_broadcast():
    rng = np.random.default_rng(0)
    U, V = rng.standard_normal((2, 2, 1, N, R)) / 4
    B = rng.standard_normal((3, N, K))
    for t in (0.5, [0.5, 1.0]):
        for method in ("auto", "qr"):
            Y = skew_expm_multiply(*lazy(U, V, B), t, method=method)
            assert Y.chunks[-2] == ROWS
            np.testing.assert_allclose(Y.compute(), skew_expm_multiply(U, V, B, t), atol=1e-12)
    q, k, v = lazy(U[:, 0], V[:, 0], B[:2])
    exact = orthogonal_attention(U[:, 0], V[:, 0], B[:2], alpha=2.0)
    np.testing.assert_allclose(
        orthogonal_attention(q, k, v, alpha=2.0).compute(), exact, atol=1e-12
    )


@pytest.mark.parametrize(("n", "r", "k"), [(5, 3, 2), (7, 0, 2), (7, 2, 0), (0, 2, 2), (1, 1, 1)])
def test_few_rows_and_no_columns(n, r, k):
    U, V, B = np.ones((n, r)), np.arange(n * r).reshape(n, r) / 10, np.ones((n, k))
    for apply in (skew_expm_multiply, expm_multiply):
        arrays = [da.from_array(a, chunks=(2, -1)) for a in (U, V, B)]
        for t in (0.5, [0.5, 1.0]):
            Y = apply(*arrays, t)
            assert Y.chunks[-2] == arrays[0].chunks[0]
            np.testing.assert_allclose(Y.compute(), apply(U, V, B, t), atol=1e-13)


# The graph


def test_every_block_is_loaded_twice_and_the_core_computed_once(monkeypatch):
    loads, calls = Counter(), Counter()

    def source(name, a):
        def load(block_id):
            loads[name, block_id[0]] += 1
            return a[30 * block_id[0] : 30 * block_id[0] + 30]

        return da.map_blocks(load, chunks=((30,) * 4, a.shape[1]), dtype=a.dtype, meta=a[:0])

    def counted(*args, **given):
        calls["core"] += 1
        return solved(*args, **given)

    solved = _dask._skew_solved
    monkeypatch.setattr(_dask, "_skew_solved", counted)
    for name in ("generic", "nearly_parallel"):
        for method in ("auto", "qr"):
            U, V, B = draw(name, "float64")
            loads.clear()
            calls.clear()
            Y = skew_expm_multiply(source("U", U), source("V", V), source("B", B), method=method)
            assert not loads
            assert error(Y.compute(), U, V, B) <= 40
            assert len(loads) == 12
            assert set(loads.values()) == {2}
            assert calls["core"] == 1


def test_two_tasks_a_block():
    arrays = [da.ones((6400, w), chunks=(100, -1)) for w in (R, R, K)]
    (Y,) = dask.optimize(skew_expm_multiply(*arrays))
    assert len(dict(Y.__dask_graph__())) <= 2 * 64 + 64 // 16 + 4


def test_the_same_bits_and_names_each_time():
    arrays = lazy(*draw("generic", "float64"))
    first, second = (skew_expm_multiply(*arrays) for _ in range(2))
    assert first.name == second.name
    a = first.compute(scheduler="threads", num_workers=3)
    np.testing.assert_array_equal(a, second.compute(scheduler="sync"))


def test_column_chunks_and_differing_rows_are_brought_together():
    U, V, B = draw("generic", "float64")
    X = da.concatenate([da.from_array(U, chunks=(40, 2)), da.from_array(V, chunks=(40, 1))], axis=1)
    Y = skew_expm_multiply(X[:, :R], X[:, R:], da.from_array(B, chunks=(60, 1)))
    assert Y.chunks == ((40, 20, 20, 40), (K,))
    assert error(Y.compute(), U, V, B) <= 40


def test_persisted_arrays_and_storing(tmp_path):
    U, V, B = draw("generic", "float64")
    Y = skew_expm_multiply(*dask.persist(*lazy(U, V, B)))
    out = np.lib.format.open_memmap(tmp_path / "y.npy", "w+", float, (N, K))
    da.store(Y, out)
    assert error(np.asarray(out), U, V, B) <= 40
    assert error(Y.persist().compute(), U, V, B) <= 40
    np.testing.assert_allclose(Y.sum().compute(), out.sum())


# What is refused


def test_values_that_are_not_finite_surface_with_their_place():
    for i, name in enumerate("UVB"):
        arrays = draw("generic", "float64")
        arrays[i][83, 1] = np.nan
        Y = skew_expm_multiply(*lazy(*arrays))
        with pytest.raises(ValueError, match=rf"{name}\[83, 1\] is nan; all entries must"):
            Y.compute()
    arrays[2][83, 1] = np.inf
    with pytest.raises(ValueError, match=r"B\[83, 1\] is inf"):
        expm_multiply(*lazy(*arrays)).compute()


def test_overflow_surfaces():
    U, V, B = draw("generic", "float32")
    with pytest.raises(ValueError, match="overflows"):
        skew_expm_multiply(*lazy(U, V, B), 1e38).compute()
    with pytest.raises(ValueError, match="overflows"):
        expm_multiply(*lazy(U, U, B), 1e4).compute()
    big = np.full((N, 1), np.finfo("float32").max)
    with pytest.raises(ValueError, match="the result overflows"):
        skew_expm_multiply(*lazy(U, V, big)).compute()


def test_other_libraries_are_refused_with_advice():
    U, V, B = draw("generic", "float64")
    u, v, b = lazy(U, V, B)
    for given in ((U, v, b), (u, v, B)):
        with pytest.raises(TypeError, match=r"wrap it with dask\.array\.from_array"):
            skew_expm_multiply(*given)
    with pytest.raises(TypeError, match="out is not for dask arrays"):
        skew_expm_multiply(u, v, b, out=np.empty((N, K)))
    with pytest.raises(TypeError, match="masked"):
        skew_expm_multiply(u, v, da.ma.masked_array(b))
    with pytest.raises(TypeError, match="complex"):
        skew_expm_multiply(u, v, b, da.ones((), dtype=complex))
    with pytest.raises(TypeError, match="dtype"):
        skew_expm_multiply(u, v, b.astype(object))


def test_chunks_that_cannot_be_used_are_refused_with_advice():
    U, V, B = draw("generic", "float64")
    u, v, b = lazy(U, V, B)
    with pytest.raises(ValueError, match=r"U\.compute_chunk_sizes\(\)"):
        skew_expm_multiply(u[u[:, 0] > 0], v, b)
    cut = da.ones((2, N, K), chunks=(1, 50, K))
    with pytest.raises(ValueError, match=r"B\.rechunk\(\{0: -1\}\)"):
        skew_expm_multiply(u, v, cut)
    with pytest.raises(ValueError, match="both must be"):
        skew_expm_multiply(u, v[:-1], b)
    with pytest.raises(ValueError, match="B has shape"):
        skew_expm_multiply(u, v, b[:-1])
    with pytest.raises(ValueError, match="one-dimensional"):
        skew_expm_multiply(u, v, b, da.ones((2, 2)))


# Clusters

BLOCK, BLOCKS = 500, 24


def slow_block(width, seed, directory, block_id=None):
    """A block of rows that leaves a trace of having been loaded, and takes its time."""
    name = f"{seed}-{block_id[0]}-{os.getpid()}-{time.monotonic_ns()}"
    open(os.path.join(directory, name), "x").close()
    time.sleep(0.02)
    return np.random.default_rng([seed, block_id[0]]).standard_normal((BLOCK, width)) / 60


def sources(directory):
    return [
        da.map_blocks(
            slow_block,
            width,
            seed,
            os.fspath(directory),
            chunks=((BLOCK,) * BLOCKS, (width,)),
            dtype=float,
            meta=np.empty((0, 0)),
        )
        for seed, width in enumerate((R, R, K))
    ]


@pytest.fixture
def cluster(request):
    with (
        LocalCluster(
            n_workers=request.param,
            threads_per_worker=1,
            processes=True,
            dashboard_address=None,
            memory_limit="512MiB",
        ) as cluster,
        Client(cluster) as client,
        dask.config.set(scheduler=None),
    ):
        yield client


def exact_of(directory):
    U, V, B = (a.compute() for a in sources(directory))
    return U, V, B


@pytest.mark.parametrize("cluster", [2, 4], indirect=True)
def test_on_worker_processes(cluster, tmp_path):
    Y = skew_expm_multiply(*sources(tmp_path), 0.5).compute()
    loads = Counter(name.rsplit("-", 2)[0] for name in os.listdir(tmp_path))
    assert len(loads) == 3 * BLOCKS
    assert max(loads.values()) == 2
    assert len({name.split("-")[2] for name in os.listdir(tmp_path)}) > 1
    assert error(Y, *exact_of(tmp_path), 0.5) <= 40


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_a_worker_that_dies_loses_nothing(cluster, tmp_path):
    pids = list(cluster.run(os.getpid).values())
    job = cluster.compute(skew_expm_multiply(*sources(tmp_path), 0.5))
    while len(os.listdir(tmp_path)) < 4 * BLOCKS:  # half of the blocks of the second pass
        time.sleep(0.01)
    os.kill(pids[0], signal.SIGKILL)
    assert error(job.result(), *exact_of(tmp_path), 0.5) <= 40


@pytest.mark.parametrize("cluster", [2], indirect=True)
def test_errors_and_persisted_arrays_on_a_cluster(cluster, tmp_path):
    U, V, B = cluster.persist(sources(tmp_path))
    Y = skew_expm_multiply(U, V, B).compute()
    assert len(os.listdir(tmp_path)) == 3 * BLOCKS
    assert error(Y, *exact_of(tmp_path)) <= 40
    with pytest.raises(ValueError, match=r"B\[\d+, 0\] is nan"):
        skew_expm_multiply(U, V, B * np.nan).compute()
