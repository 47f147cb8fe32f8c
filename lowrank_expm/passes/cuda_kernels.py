"""CUDA source of the passes for skinny problems, and how it is to be launched; needs no CUDA.

Every kernel is a few phases with barriers in between, and a phase is a function of the number of
its thread. So the same source also compiles for a host, where loops over threads take the place
of a device: that is how it is tested where there is none.
"""

from __future__ import annotations

from typing import NamedTuple

# Threads of a block, rows of a tile, and rows that one block sums before it writes its part.
THREADS = 256
TILE_ROWS = 64
BLOCKS = 1024
# Shared memory that every device has.
SHARED_BYTES = 48 * 1024
# Columns of [U V B] up to which one read of the rows beats a library's matrix products: beyond,
# a product has work enough for every number that it reads.
WIDEST = 48

SOURCE = r"""
#ifndef HOST_DEVICE
#define HOST_DEVICE __host__ __device__
#endif

// Rows [first, first + rows) of [U V B], which have r, r and k columns, side by side.
template <typename T>
HOST_DEVICE void load_tile(T* tile, const T* U, const T* V, const T* B, long long first, int rows,
                           int r, int k, int thread, int threads) {
    const int width = 2 * r + k;
    for (int i = thread; i < rows * width; i += threads) {
        const long long row = first + i / width;
        const int c = i % width;
        tile[i] = c < r       ? U[row * r + c]
                  : c < 2 * r ? V[row * r + (c - r)]
                              : B[row * k + (c - 2 * r)];
    }
}

// sums += tile[:, :m]' tile, but for what is known from symmetry.
template <typename T>
HOST_DEVICE void add_tile(T* sums, const T* tile, int rows, int m, int width, int thread,
                          int threads) {
    for (int o = thread; o < m * width; o += threads) {
        const int a = o / width, b = o % width;
        if (b < a) continue;
        T sum = 0;
        for (int row = 0; row < rows; ++row)
            sum += tile[row * width + a] * tile[row * width + b];
        sums[o] += sum;
    }
}

template <typename T>
HOST_DEVICE void clear(T* sums, int count, int thread, int threads) {
    for (int o = thread; o < count; o += threads) sums[o] = 0;
}

// The sums with their symmetric half.
template <typename T>
HOST_DEVICE void store_sums(T* part, const T* sums, int m, int width, int thread, int threads) {
    for (int o = thread; o < m * width; o += threads) {
        const int a = o / width, b = o % width;
        part[o] = b < a ? sums[b * width + a] : sums[o];
    }
}

// Entry i of B + U Z[:r] + V Z[r:].
template <typename T>
HOST_DEVICE T updated(const T* B, const T* U, const T* V, const T* Z, int r, int k, long long i) {
    const long long row = i / k;
    const int c = (int)(i % k);
    T sum = 0;
    for (int a = 0; a < r; ++a)
        sum += U[row * r + a] * Z[a * k + c] + V[row * r + a] * Z[(r + a) * k + c];
    return (B ? B[i] : (T)0) + sum;
}

#ifdef __CUDACC__
// One block sums `piece` rows of one element of the batch; elements are counted modulo those of
// an operand, so that an operand can be broadcast.
template <typename T>
__device__ void accumulate(const T* U, const T* V, const T* B, long long n, int r, int k,
                           long long piece, int us, int vs, int bs, T* parts, T* shared) {
    const int m = 2 * r, width = m + k, e = blockIdx.y;
    T* sums = shared;
    T* tile = shared + m * width;
    U += (e % us) * n * r;
    V += (e % vs) * n * r;
    B += (e % bs) * n * k;
    clear(sums, m * width, threadIdx.x, blockDim.x);
    const long long first = blockIdx.x * piece;
    const long long last = first + piece < n ? first + piece : n;
    for (long long row = first; row < last; row += TILE_ROWS) {
        const int rows = (int)(last - row < TILE_ROWS ? last - row : TILE_ROWS);
        __syncthreads();
        load_tile(tile, U, V, B, row, rows, r, k, threadIdx.x, blockDim.x);
        __syncthreads();
        add_tile(sums, tile, rows, m, width, threadIdx.x, blockDim.x);
    }
    __syncthreads();
    T* part = parts + ((long long)e * gridDim.x + blockIdx.x) * m * width;
    store_sums(part, sums, m, width, threadIdx.x, blockDim.x);
}

template <typename T>
__device__ void update(const T* B, const T* U, const T* V, const T* Z, long long n, int r, int k,
                       int us, int vs, int bs, T* Y) {
    const int e = blockIdx.y;
    const T* own = B ? B + (e % bs) * n * k : B;
    U += (e % us) * n * r;
    V += (e % vs) * n * r;
    Z += (long long)e * 2 * r * k;
    Y += (long long)e * n * k;
    const long long step = (long long)gridDim.x * blockDim.x;
    for (long long i = (long long)blockIdx.x * blockDim.x + threadIdx.x; i < n * k; i += step)
        Y[i] = updated(own, U, V, Z, r, k, i);
}

#define KERNELS(T)                                                                            \
    extern "C" __global__ void accumulate_##T(                                                \
        const T* U, const T* V, const T* B, long long n, int r, int k, long long piece,       \
        int us, int vs, int bs, T* parts) {                                                   \
        extern __shared__ char memory[];                                                      \
        accumulate(U, V, B, n, r, k, piece, us, vs, bs, parts, (T*)memory);                   \
    }                                                                                         \
    extern "C" __global__ void update_##T(const T* B, const T* U, const T* V, const T* Z,     \
                                          long long n, int r, int k, int us, int vs, int bs,  \
                                          T* Y) {                                             \
        update(B, U, V, Z, n, r, k, us, vs, bs, Y);                                           \
    }
KERNELS(float)
KERNELS(double)
#endif
"""
OPTIONS = (f"-DTILE_ROWS={TILE_ROWS}", "--std=c++14")


class Launch(NamedTuple):
    """How the sums over n rows are split: blocks, rows of each, and bytes of shared memory."""

    blocks: int
    piece: int
    shared: int


def launch(n: int, m: int, k: int, itemsize: int) -> Launch:
    """The launch of the sums; it depends on the shape alone, and so do the bits of the result."""
    tiles = max(1, -(-n // TILE_ROWS))
    piece = -(-tiles // BLOCKS) * TILE_ROWS
    width = m + k
    return Launch(-(-max(1, n) // piece), piece, (m * width + TILE_ROWS * width) * itemsize)


def fits(m: int, k: int, itemsize: int) -> bool:
    """Whether a problem is skinny enough for these kernels."""
    return m > 0 and k > 0 and m + k <= WIDEST and launch(1, m, k, itemsize).shared <= SHARED_BYTES
