"""The CUDA kernels without a device: compiled for the host and run there, and compiled by NVRTC.

CuPy's part is played by NumPy and a driver that loops over blocks and threads: what is tested is
the source of the kernels, their launches, and the way to them, but not a device.
"""

from __future__ import annotations

import ctypes
import subprocess
import sys
import types

import numpy as np
import pytest
from cuda.bindings import nvrtc

from lowrank_expm.passes import Frame, cuda_kernels, portable_passes

from . import generators as gen

DRIVER = r"""
#include <vector>
template <typename T>
void accumulate(const T* U, const T* V, const T* B, long long n, int r, int k, long long piece,
                int us, int vs, int bs, T* parts, int blocks, int count, int threads) {
    const int m = 2 * r, width = m + k;
    std::vector<T> sums(m * width), tile(TILE_ROWS * width);
    for (int e = 0; e < count; ++e)
        for (int block = 0; block < blocks; ++block) {
            const T *u = U + (e % us) * n * r, *v = V + (e % vs) * n * r, *b = B + (e % bs) * n * k;
            for (int x = 0; x < threads; ++x) clear(sums.data(), m * width, x, threads);
            const long long first = block * piece;
            const long long last = first + piece < n ? first + piece : n;
            for (long long row = first; row < last; row += TILE_ROWS) {
                const int rows = (int)(last - row < TILE_ROWS ? last - row : TILE_ROWS);
                for (int x = 0; x < threads; ++x)
                    load_tile(tile.data(), u, v, b, row, rows, r, k, x, threads);
                for (int x = 0; x < threads; ++x)
                    add_tile(sums.data(), tile.data(), rows, m, width, x, threads);
            }
            T* part = parts + ((long long)e * blocks + block) * m * width;
            for (int x = 0; x < threads; ++x) store_sums(part, sums.data(), m, width, x, threads);
        }
}
template <typename T>
void update(const T* B, const T* U, const T* V, const T* Z, long long n, int r, int k, int us,
            int vs, int bs, T* Y, int count) {
    for (int e = 0; e < count; ++e)
        for (long long i = 0; i < n * k; ++i)
            Y[e * n * k + i] = updated(B ? B + (e % bs) * n * k : B, U + (e % us) * n * r,
                                       V + (e % vs) * n * r, Z + (long long)e * 2 * r * k, r, k, i);
}
#define DRIVE(T)                                                                              \
    extern "C" void accumulate_##T(const T* U, const T* V, const T* B, long long n, int r,    \
                                   int k, long long piece, int us, int vs, int bs, T* parts,  \
                                   int blocks, int count, int threads) {                      \
        accumulate(U, V, B, n, r, k, piece, us, vs, bs, parts, blocks, count, threads);       \
    }                                                                                         \
    extern "C" void update_##T(const T* B, const T* U, const T* V, const T* Z, long long n,   \
                               int r, int k, int us, int vs, int bs, T* Y, int, int count,    \
                               int) {                                                         \
        update(B, U, V, Z, n, r, k, us, vs, bs, Y, count);                                    \
    }
DRIVE(float)
DRIVE(double)
"""


@pytest.fixture(scope="session")
def host(tmp_path_factory):
    """The kernels' source, compiled for the host."""
    folder = tmp_path_factory.mktemp("cuda")
    source, target = folder / "kernels.cpp", folder / "kernels.so"
    source.write_text(cuda_kernels.SOURCE + DRIVER)
    flags = ["-DHOST_DEVICE=", f"-DTILE_ROWS={cuda_kernels.TILE_ROWS}", "-Wall", "-Werror"]
    command = ["g++", "-std=c++14", "-O1", "-shared", "-fPIC", *flags, source, "-o", target]
    subprocess.run([str(part) for part in command], check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture
def passes(host, monkeypatch):
    """`cupy_passes` with NumPy's arrays and the host's kernels in the place of CuPy's."""

    class RawModule:
        def __init__(self, code, options):
            assert code == cuda_kernels.SOURCE
            assert options == cuda_kernels.OPTIONS

        def get_function(self, name):
            function = getattr(host, name)

            def launched(grid, block, arguments, shared_mem=0):
                assert shared_mem <= cuda_kernels.SHARED_BYTES
                function(*map(_as_c, arguments), *map(ctypes.c_int, (*grid, *block)))

            return launched

    names = ("ascontiguousarray", "empty", "int32", "int64", "float64")
    cupy = types.SimpleNamespace(RawModule=RawModule, **{name: getattr(np, name) for name in names})
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    from lowrank_expm.passes import cupy_passes

    cupy_passes._kernel.cache_clear()
    yield cupy_passes
    cupy_passes._kernel.cache_clear()


def _as_c(argument):
    """An argument as the kernels' signature has it."""
    if isinstance(argument, np.ndarray):
        return argument.ctypes.data_as(ctypes.c_void_p)
    if isinstance(argument, np.int32):
        return ctypes.c_int(int(argument))
    return ctypes.c_longlong(int(argument))


SHAPES = [((), (), ()), ((3,), (3,), (3,)), ((2, 3), (), (2, 3)), ((), (), (4,))]


@pytest.mark.parametrize("dtype", ["float32", "float64"])
@pytest.mark.parametrize("shapes", SHAPES)
@pytest.mark.parametrize(("n", "r", "k"), [(1, 1, 1), (63, 2, 3), (65, 8, 1), (70_000, 2, 1)])
def test_kernels_make_the_sums_and_the_update(passes, dtype, shapes, n, r, k):
    rng = np.random.default_rng(n)
    widths = (r, r, k)
    U, V, B = (gen.normal(rng, (*s, n, w), dtype) for s, w in zip(shapes, widths, strict=True))
    frame = Frame((U, V))
    assert passes._skinny(frame, B)
    G, T = passes.accumulate(frame, B)
    wide = Frame(tuple(a.astype(np.float64) for a in (U, V)))
    exact = portable_passes.accumulate(wide, B.astype(np.float64))
    # Sums of 64 rows, then of up to 64 such sums: about 80 roundings of the largest term.
    for found, right in zip((G, T), exact, strict=True):
        assert found.shape == right.shape
        assert found.dtype == dtype
        assert np.abs(found - right).max() <= 80 * gen.unit(dtype) * n
    np.testing.assert_array_equal(G, np.matrix_transpose(G))
    for grid in ((), (2,)):
        batch = np.broadcast_shapes(*(a.shape[:-2] for a in (U, V, B)))
        Z = gen.normal(rng, (*grid, *batch, 2 * r, k), dtype)
        Y = passes.update(frame, Z, B)
        right = portable_passes.update(wide, Z.astype(np.float64), B.astype(np.float64))
        assert Y.shape == right.shape
        assert np.abs(Y - right).max() <= 8 * (2 * r + 1) * gen.unit(dtype) * np.abs(right).max()
        assert passes.update(frame, Z, None).shape == right.shape


def test_two_runs_give_the_same_bits(passes):
    rng = np.random.default_rng(0)
    U, V, B = (gen.normal(rng, (5000, w), "float32") for w in (3, 3, 2))
    first, second = (passes.accumulate(Frame((U, V)), B) for _ in range(2))
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def test_problems_that_are_not_skinny_go_by_matrix_products(passes):
    rng = np.random.default_rng(0)
    for n, r, k, dtype in ((9, 30, 2, "float64"), (9, 2, 2, "complex128"), (9, 2, 60, "float32")):
        U, V, B = (gen.normal(rng, (n, w), dtype) for w in (r, r, k))
        assert not passes._skinny(Frame((U, V)), B)
        _, T = passes.accumulate(Frame((U, V)), B)
        np.testing.assert_allclose(T[:r], U.conj().T @ B, rtol=1e-4, atol=1e-4)


def test_shared_memory_is_within_what_every_device_has():
    for itemsize in (4, 8):
        for m in range(2, cuda_kernels.WIDEST, 2):
            for k in range(1, cuda_kernels.WIDEST):
                if cuda_kernels.fits(m, k, itemsize):
                    how = cuda_kernels.launch(10**9, m, k, itemsize)
                    assert how.shared <= cuda_kernels.SHARED_BYTES
                    assert how.blocks * how.piece >= 10**9
    assert cuda_kernels.fits(16, 1, 8)
    assert cuda_kernels.fits(32, 8, 8)


@pytest.mark.parametrize("architecture", ["compute_75", "compute_90"])
def test_nvrtc_compiles_every_kernel(architecture):
    """Without a device; NVRTC is what CuPy compiles with."""
    source = cuda_kernels.SOURCE.encode()
    _, program = nvrtc.nvrtcCreateProgram(source, b"kernels.cu", 0, [], [])
    options = [o.encode() for o in (*cuda_kernels.OPTIONS, f"--gpu-architecture={architecture}")]
    (status,) = nvrtc.nvrtcCompileProgram(program, len(options), options)
    _, size = nvrtc.nvrtcGetProgramLogSize(program)
    log = b" " * size
    nvrtc.nvrtcGetProgramLog(program, log)
    assert status == nvrtc.nvrtcResult.NVRTC_SUCCESS, log.decode()
    _, size = nvrtc.nvrtcGetPTXSize(program)
    ptx = b" " * size
    nvrtc.nvrtcGetPTX(program, ptx)
    for kernel in ("accumulate", "update"):
        for kind in ("float", "double"):
            assert f"{kernel}_{kind}(".encode() in ptx
