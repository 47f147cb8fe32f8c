"""passes/: the two passes over the long axis.

Where inputs are small integers every sum is exact in any order, so that results are compared
bit for bit with integer arithmetic: a row read twice, skipped or misplaced cannot hide. Rounding
is judged apart, against sums that are exact.
"""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
import textwrap
from collections import Counter

import numpy as np
import pytest

from lowrank_expm import LowRankSkew, expm_multiply, skew_expm_multiply
from lowrank_expm.passes import Frame, numpy_passes, watching
from lowrank_expm.passes.numpy_passes import (
    accumulate,
    block_rows,
    combine,
    gram,
    new,
    project,
    update,
)

from . import generators as gen
from . import naive

# One row, panels and runs, groups, flushes, several blocks, a ragged last one.
ROWS = (1, 2, 7, 8, 9, 31, 32, 33, 63, 64, 65, 511, 512, 513, 4095, 4096, 4097, 8193, 70_000)
WIDTHS = (0, 1, 3, 4, 5, 17)


def whole(rng, shape, dtype, top=4):
    """Integers (complex ones with integer parts) of a dtype."""
    a = rng.integers(-top, top + 1, shape).astype(np.float64)
    if np.issubdtype(dtype, np.complexfloating):
        a = a + 1j * rng.integers(-top, top + 1, shape)
    return a.astype(dtype)


def adjoint(a):
    return np.conj(np.swapaxes(a, -1, -2))


def wide(a):
    return a.astype(np.complex128 if np.iscomplexobj(a) else np.float64)


def columns(frame):
    """[columns] of a frame in double precision, its batch broadcast."""
    parts = [np.broadcast_to(wide(a), (*frame.batch, *a.shape[-2:])) for a in frame.columns]
    return np.concatenate(parts, axis=-1)


def check_sums(frame, B, dtype):
    """Both sums of integer operands, exactly; alone and together."""
    X = columns(frame)
    result = np.result_type(dtype, np.complex64) if B.dtype.kind == "c" else dtype
    exact_G, exact_T = adjoint(X) @ X, adjoint(X) @ wide(B)
    G, T = accumulate(frame, B, np.dtype(dtype))
    assert G.dtype == dtype
    assert T.dtype == result
    assert np.array_equal(G, exact_G.astype(dtype))
    assert np.array_equal(T, exact_T.astype(result))
    assert np.array_equal(gram(frame, np.dtype(dtype)), G)
    assert np.array_equal(project(frame, B, np.dtype(dtype)), T)


def check_update(frame, Z, B, dtype, out):
    """B + F Z of integer operands, exactly, written to `out`."""
    expected = columns(frame) @ wide(Z) + (0 if B is None else wide(B))
    returned = update(frame, Z, B, np.dtype(dtype), out)
    assert returned is out
    assert np.array_equal(out, np.broadcast_to(expected, out.shape).astype(out.dtype))


def exact_product(A, B):
    """AᴴB without rounding before the last one."""
    kind = np.result_type(A, B, np.float64)
    a, b = naive.embed(A.astype(kind)), naive.embed(B.astype(kind))
    return naive.Exact(a.transposed @ b, kind.kind == "c").round()


# --- every row once --------------------------------------------------------------------------


@pytest.mark.parametrize("n", ROWS)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_every_row_counts_once_at_any_length(n, dtype):
    rng = np.random.default_rng(n)
    # In single precision sums of 70,000 squares must stay below 2**24.
    U, V, B = (whole(rng, (n, width), dtype, 2) for width in (3, 3, 2))
    frame = Frame((U, V))
    check_sums(frame, B, dtype)
    check_update(frame, whole(rng, (6, 2), dtype), B, dtype, np.empty_like(B))


@pytest.mark.parametrize("r", range(1, 10))
@pytest.mark.parametrize("k", WIDTHS)
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_any_number_of_columns(r, k, dtype):
    """Sums and products come in tiles of four: all remainders, in both directions."""
    rng = np.random.default_rng(r)
    U, V, B = (whole(rng, (131, width), dtype) for width in (r, r, k))
    check_sums(Frame((U, V)), B, dtype)
    check_update(Frame((U, V)), whole(rng, (2 * r, k), dtype), B, dtype, np.empty_like(B))
    check_sums(Frame((U,)), B, dtype)
    check_update(Frame((U,)), whole(rng, (r, k), dtype), None, dtype, np.empty_like(B))


@pytest.mark.parametrize(("n", "r", "k"), [(0, 2, 3), (5, 0, 3), (5, 2, 0), (0, 0, 0)])
@pytest.mark.parametrize("batch", [(), (2,), (0,), (2, 0)])
def test_empty_operands_give_zero_sums(n, r, k, batch):
    rng = np.random.default_rng(0)
    U, B = whole(rng, (*batch, n, r), "float64"), whole(rng, (*batch, n, k), "float64")
    check_sums(Frame((U, U)), B, "float64")
    if r:
        Z = whole(rng, (*batch, 2 * r, k), "float64")
        check_update(Frame((U, U)), Z, B, "float64", np.empty_like(B))


@pytest.mark.parametrize(("dtype", "other"), list(itertools.product(gen.DTYPES, repeat=2)))
def test_b_of_another_dtype(dtype, other):
    """The frame's dtype and precision rule; a complex B keeps its imaginary part."""
    rng = np.random.default_rng(1)
    U, V = (whole(rng, (300, 2), dtype) for _ in range(2))
    B = whole(rng, (300, 3), other)
    check_sums(Frame((U, V)), B, dtype)
    Z = whole(rng, (4, 3), dtype)
    result = np.result_type(dtype, np.complex64 if B.dtype.kind == "c" else dtype)
    check_update(Frame((U, V)), Z, B, dtype, np.empty((300, 3), result))


@pytest.mark.parametrize("kind", ["i1", "u2", "i8", "?", "f2", "f4"])
def test_columns_are_converted_as_they_are_read(kind):
    rng = np.random.default_rng(2)
    U, V, B = (rng.integers(0, 2, (5000, width)).astype(kind) for width in (2, 2, 1))
    check_sums(Frame((U, V)), B, "float64")
    check_update(Frame((U, V)), np.ones((4, 1)), B, "float64", np.empty((5000, 1)))


def test_real_columns_beside_complex_ones():
    rng = np.random.default_rng(3)
    U, V = whole(rng, (300, 2), "float64"), whole(rng, (300, 2), "complex128")
    B = whole(rng, (300, 3), "float64")
    check_sums(Frame((U, V)), B, "complex128")
    Z = whole(rng, (4, 3), "complex128")
    check_update(Frame((U, V)), Z, B, "complex128", np.empty((300, 3), complex))


# --- layouts ---------------------------------------------------------------------------------


def big_endian(a):
    return a.astype(a.dtype.newbyteorder(">"))


def transposed(a):
    return np.ascontiguousarray(np.swapaxes(a, -1, -2)).swapaxes(-1, -2)


LAYOUTS = {
    **{name: make for name, make in gen.LAYOUTS.items() if name != "repeated"},
    "big-endian": big_endian,
    "transposed": transposed,
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("n", [9, 5000])
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_any_layout_is_read(layout, n, dtype):
    rng = np.random.default_rng(4)
    plain = [whole(rng, (n, width), dtype) for width in (3, 3, 5)]
    U, V, B = (LAYOUTS[layout](a) for a in plain)
    check_sums(Frame((U, V)), B, dtype)
    check_update(Frame((U, V)), whole(rng, (6, 5), dtype), B, dtype, np.empty_like(plain[2]))
    assert all(np.array_equal(a, b) for a, b in zip((U, V, B), plain, strict=True))


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "read-only"])
@pytest.mark.parametrize("n", [9, 5000])
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_any_layout_is_written(layout, n, dtype):
    rng = np.random.default_rng(5)
    U, V, B = (whole(rng, (n, width), dtype) for width in (3, 3, 5))
    out = LAYOUTS[layout](np.zeros((n, 5), dtype))
    check_update(Frame((U, V)), whole(rng, (6, 5), dtype), B, dtype, out)


@pytest.mark.parametrize("layout", [name for name in LAYOUTS if name != "read-only"])
@pytest.mark.parametrize("n", [9, 5000])
def test_update_in_place(layout, n):
    rng = np.random.default_rng(6)
    U, V, B = (whole(rng, (n, width), "float64") for width in (3, 3, 5))
    Z = whole(rng, (6, 5), "float64")
    out = LAYOUTS[layout](B.copy())
    update(Frame((U, V)), Z, out, np.dtype(float), out)
    assert np.array_equal(out, B + U @ Z[:3] + V @ Z[3:])


@pytest.mark.parametrize("mode", ["r", "r+", "c"])
def test_memory_maps_are_read(tmp_path, mode):
    rng = np.random.default_rng(7)
    plain = [whole(rng, (9000, width), "float64") for width in (3, 3, 2)]
    for name, a in zip("UVB", plain, strict=True):
        np.save(tmp_path / f"{name}.npy", a)
    U, V, B = (np.load(tmp_path / f"{name}.npy", mmap_mode=mode) for name in "UVB")
    check_sums(Frame((U, V)), B, "float64")
    check_update(Frame((U, V)), np.ones((6, 2)), B, "float64", np.empty((9000, 2)))
    check_sums(Frame((U[::2], V[::-2])), B[:4500], "float64")


@pytest.mark.parametrize("view", [lambda a: a, np.asarray, lambda a: a[:], lambda a: a.T.T])
def test_private_changes_of_a_copy_on_write_map_survive(tmp_path, view):
    """mode="c" changes live in memory alone: giving their pages back would undo them."""
    rng = np.random.default_rng(8)
    plain = [whole(rng, (9000, width), "float64") for width in (3, 3, 2)]
    maps = []
    for name, a in zip("UVB", plain, strict=True):
        np.save(tmp_path / f"{name}.npy", np.zeros_like(a))
        maps.append(np.load(tmp_path / f"{name}.npy", mmap_mode="c"))
        maps[-1][...] = a
    U, V, B = (view(a) for a in maps)
    for _ in range(2):
        check_sums(Frame((U, V)), B, "float64")
        check_update(Frame((U, V)), np.ones((6, 2)), B, "float64", np.empty((9000, 2)))
    assert all(np.array_equal(a, b) for a, b in zip(maps, plain, strict=True))


def test_unsaved_changes_of_a_writable_map_survive(tmp_path):
    rng = np.random.default_rng(9)
    plain = [whole(rng, (9000, 3), "float64") for _ in range(2)]
    maps = []
    for name, a in zip("UV", plain, strict=True):
        maps.append(np.lib.format.open_memmap(tmp_path / f"{name}.npy", "w+", a.dtype, a.shape))
        maps[-1][...] = a
    check_sums(Frame(tuple(maps)), plain[0], "float64")
    assert all(np.array_equal(a, b) for a, b in zip(maps, plain, strict=True))


def test_update_into_a_memory_map_reaches_the_file(tmp_path):
    rng = np.random.default_rng(10)
    U, V, B = (whole(rng, (9000, width), "float64") for width in (3, 3, 2))
    out = np.lib.format.open_memmap(tmp_path / "Y.npy", "w+", "f8", (9000, 2))
    check_update(Frame((U, V)), np.ones((6, 2)), B, "float64", out)
    out.flush()
    expected = B + U.sum(1, keepdims=True) + V.sum(1, keepdims=True)
    assert np.array_equal(np.load(tmp_path / "Y.npy"), expected)


# --- batches ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("of_u", "of_v", "of_b"),
    [
        ((3,), (3,), (3,)),
        ((3,), (), ()),
        ((), (3,), (3,)),
        ((), (), (3,)),
        ((2, 1), (1, 3), (2, 3)),
        ((2, 1), (3,), ()),
        ((3,), (3,), (2, 3)),
        ((1, 1), (1,), (1,)),
        ((2, 3, 2), (3, 1), (2, 1, 1)),
    ],
)
@pytest.mark.parametrize("n", [11, 4500])
def test_batches_broadcast(of_u, of_v, of_b, n):
    rng = np.random.default_rng(11)
    shapes = zip((of_u, of_v, of_b), (2, 2, 3), strict=True)
    U, V, B = (whole(rng, (*batch, n, width), "float64") for batch, width in shapes)
    frame = Frame((U, V))
    check_sums(frame, B, "float64")
    batch = np.broadcast_shapes(of_u, of_v, of_b)
    Z = whole(rng, (*batch, 4, 3), "float64")
    check_update(frame, Z, B, "float64", np.empty((*batch, n, 3)))


def heads(a):
    """The same numbers with the batch's second axis behind the rows, as attention lays them."""
    return np.ascontiguousarray(np.moveaxis(a, 1, 2)).swapaxes(1, 2)


@pytest.mark.parametrize("n", [20, 40_000])
def test_batches_that_do_not_flatten(n):
    """Transposed heads; 40,000 rows are beyond what may be copied at once."""
    rng = np.random.default_rng(12)
    shapes = [(2, 3, n, width) for width in (5, 5, 5)]
    U, V, B = (heads(whole(rng, shape, "float64")) for shape in shapes)
    frame = Frame((U, V))
    check_sums(frame, B, "float64")
    Z = whole(rng, (2, 3, 10, 5), "float64")
    check_update(frame, Z, B, "float64", heads(np.zeros((2, 3, n, 5))))
    check_update(frame, np.stack([Z, -Z]), B, "float64", np.empty((2, 2, 3, n, 5)))


@pytest.mark.parametrize("batch", [(), (2,), (2, 3)])
@pytest.mark.parametrize("n", [11, 4500])
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_update_along_a_grid(batch, n, dtype):
    """Z leads with a grid axis and the rows are read once for all of it."""
    rng = np.random.default_rng(13)
    U, V, B = (whole(rng, (*batch, n, width), dtype) for width in (2, 2, 3))
    Z = whole(rng, (5, *batch, 4, 3), dtype)
    check_update(Frame((U, V)), Z, B, dtype, np.empty((5, *batch, n, 3), dtype))
    check_update(Frame((U, V)), Z, None, dtype, np.empty((5, *batch, n, 3), dtype))
    sliced = np.empty((5, *batch, n, 6), dtype)[..., ::2]
    check_update(Frame((U, V)), Z, B, dtype, sliced)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("n", [7, 16, 300, 4501])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_one_column_along_a_grid(batch, n, dtype):
    """Whole tiles of many t and rows go straight to the result; these shapes leave some over."""
    rng = np.random.default_rng(14)
    U, V, B = (whole(rng, (*batch, n, width), dtype) for width in (2, 2, 1))
    Z = whole(rng, (19, *batch, 4, 1), dtype)
    check_update(Frame((U, V)), Z, B, dtype, np.empty((19, *batch, n, 1), dtype))
    check_update(Frame((U, V)), Z, None, dtype, np.empty((19, *batch, n, 1), dtype))
    sliced = np.empty((19, *batch, n, 2), dtype)[..., ::2]
    check_update(Frame((U, V)), Z, B, dtype, sliced)


@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("dtype", ["float64", "complex64"])
def test_a_long_grid_in_parts_has_the_same_bits(k, dtype, monkeypatch):
    U, V, B = problem(n=41, k=k, dtype=dtype)
    t = np.linspace(-3, 3, 50)
    whole = skew_expm_multiply(U, V, B, t)
    for columns in (16, 60):  # a part of one t would be summed as a single call is
        monkeypatch.setattr(numpy_passes, "GRID_COLUMNS", columns)
        assert np.array_equal(skew_expm_multiply(U, V, B, t), whole)


@pytest.mark.skipif(sys.platform != "linux", reason="reads Linux's /proc")
def test_a_long_grid_takes_memory_by_its_result():
    program = """
    import re
    from pathlib import Path
    import numpy as np
    from lowrank_expm import skew_expm_multiply
    def resident(what):
        status = Path("/proc/self/status").read_text()
        return 1024 * int(re.search(what + ":\\s+(\\d+) kB", status)[1])
    U, V, b = np.random.default_rng(0).standard_normal((3, 250, 1))
    skew_expm_multiply(U, V, b, np.linspace(0, 1, 10))
    Path("/proc/self/clear_refs").write_text("5")  # the largest size so far counts no more
    before = resident("VmRSS")
    Y = skew_expm_multiply(U, V, b, np.linspace(0, 1, 40_000))
    print((resident("VmHWM") - before) / Y.nbytes)
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    # The cores and the panels of a part are little beside it; a panel of all would be as large.
    assert float(done.stdout) < 1.5


@pytest.mark.parametrize("skipped", [0, 1])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_long_curves_are_whole_wherever_they_begin(dtype, skipped):
    """From 32 MiB on they are written past the caches, where their vectors are lines of memory."""
    rng = np.random.default_rng(16)
    n, grid = (1 << 22) // np.dtype(dtype).itemsize + 64 - skipped, 9
    U, V, B = (whole(rng, (n, width), dtype) for width in (2, 2, 1))
    Z = whole(rng, (grid, 4, 1), dtype)
    memory = new((grid * n + skipped,), np.dtype(dtype))
    assert memory.ctypes.data % 64 == 0
    assert memory.nbytes > 1 << 25
    out = memory[skipped:].reshape(grid, n, 1)
    update(Frame((U, V)), Z, B, np.dtype(dtype), out)
    assert np.array_equal(out, B + np.concatenate([U, V], axis=-1) @ Z)


# --- rows where they lie, and in panels -----------------------------------------------------------


@pytest.mark.parametrize("r", [8, 16, 24, 32, 64])
@pytest.mark.parametrize("k", [1, 3, 4, 8, 16, 24, 32, 64])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_rows_give_the_same_bits_with_and_without_a_panel(r, k, dtype):
    """A scale of ones changes no entry, but has the rows laid into a panel."""
    rng = np.random.default_rng(17)
    n = 4621
    U, V, B = (rng.standard_normal((n, width)).astype(dtype) for width in (r, r, k))
    Z = rng.standard_normal((2 * r, k)).astype(dtype)
    plain, scaled = Frame((U, V)), Frame((U, V), np.ones(2 * r, dtype))
    for one, other in zip(*(accumulate(f, B, B.dtype) for f in (plain, scaled)), strict=True):
        assert np.array_equal(one, other)
    assert np.array_equal(project(plain, B, B.dtype), project(scaled, B, B.dtype))
    results = (update(f, Z, B, B.dtype, np.empty_like(B)) for f in (plain, scaled))
    assert np.array_equal(*results)


# --- combine ---------------------------------------------------------------------------------


@pytest.mark.parametrize("given", [False, True])
@pytest.mark.parametrize("shape", [(7, 3), (37, 8), (41, 1), (300, 16), (300, 12), (20_003, 5)])
@pytest.mark.parametrize("k", [1, 3, 5])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_combine(given, shape, k, dtype):
    """All three exactly and nothing beside: r with and without whole vectors, and few rows."""
    rng = np.random.default_rng(15)
    n, r = shape
    m = 2 * r
    batch = (2,) if n < 1000 else ()
    U, V, Ybar, B = (whole(rng, (*batch, n, width), dtype) for width in (r, r, k, k))
    K, Z, Tbar = (whole(rng, (*batch, m, width), dtype) for width in (m, k, k))
    memory = [np.full(a.size + 64, 7, dtype) for a in (U, V, B)]
    out = tuple(place[32:-32].reshape(a.shape) for place, a in zip(memory, (U, V, B), strict=True))
    out = out if given else None
    bars = combine(Frame((U, V)), Ybar, B, K, Z, Tbar, np.dtype(dtype), out)
    F, y, b = np.concatenate([wide(U), wide(V)], -1), wide(Ybar), wide(B)
    both = F @ wide(K) + y @ adjoint(wide(Z)) + b @ adjoint(wide(Tbar))
    expected = both[..., :r], both[..., r:], y + F @ wide(Tbar)
    for bar, exact in zip(bars, expected, strict=True):
        assert bar.dtype == dtype
        assert np.array_equal(bar, exact)
    assert not given or all(a is b for a, b in zip(bars, out, strict=True))
    assert all((place[:32] == 7).all() and (place[-32:] == 7).all() for place in memory)


# --- frames ----------------------------------------------------------------------------------


def triangular(rng, m, dtype, batch=(), smallest=0.5):
    """An upper triangular factor with a real positive diagonal."""
    R = np.triu(gen.normal(rng, (*batch, m, m), np.result_type(dtype, float))) / math.sqrt(m)
    diagonal = rng.uniform(smallest, 2, (*batch, m))
    R[..., range(m), range(m)] = diagonal
    return R.astype(dtype)


def rows_of(frame, dtype):
    m = frame.width
    out = np.empty((*frame.batch, frame.rows, m), dtype)
    return update(
        frame,
        np.broadcast_to(np.eye(m, dtype=dtype), (*frame.batch, m, m)),
        None,
        np.dtype(dtype),
        out,
    )


@pytest.mark.parametrize("stages", [0, 1, 2])
@pytest.mark.parametrize("scaled", [False, True])
@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_rows_of_a_frame_are_its_definition(dtype, batch, scaled, stages):
    """F R₂ R₁ = X diag(scale) to rounding: what substitution promises."""
    rng = np.random.default_rng(14)
    U, V = (gen.normal(rng, (*batch, 300, 3), dtype) for _ in range(2))
    powers = 2.0 ** rng.integers(-20, 20, (*batch, 6))
    scale = powers.astype(np.empty(0, dtype).real.dtype) if scaled else None
    factors = tuple(triangular(rng, 6, dtype, batch) for _ in range(stages))
    frame = Frame((U, V), scale, factors)
    F = wide(rows_of(frame, dtype))
    X = columns(frame) * (1 if scale is None else wide(scale)[..., None, :])
    product, size = F, np.abs(F)
    for R in reversed(factors):
        product, size = product @ wide(R), size @ np.abs(R)
    # Six terms a substitution.
    assert (np.abs(product - X) <= 20 * gen.unit(dtype) * size).all()
    if not factors:
        assert np.array_equal(F, X)


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_all_passes_see_the_same_rows_of_a_frame(dtype):
    """Also where the rows are far from exact: G is that of the rows, not of the definition."""
    rng = np.random.default_rng(15)
    U, V = (gen.normal(rng, (300, 2), dtype) for _ in range(2))
    V[:, 1] = U[:, 0]
    R = triangular(rng, 4, dtype, smallest=1.0)
    R[3, 3] = 10 * gen.unit(dtype)
    frame = Frame((U, V), None, (R,))
    B = gen.normal(rng, (300, 3), dtype)
    F = rows_of(frame, dtype)
    G, T = accumulate(frame, B, np.dtype(dtype))
    lengths = np.linalg.norm(wide(F), axis=0)
    u = gen.unit(dtype)
    bound = lengths[:, None] * lengths
    assert (np.abs(G - exact_product(F, F)) <= 20 * u * bound).all()
    bound = lengths[:, None] * np.linalg.norm(wide(B), axis=0)
    assert (np.abs(T - exact_product(F, B)) <= 20 * u * bound).all()


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_an_identity_factor_changes_no_bit(dtype):
    rng = np.random.default_rng(16)
    U, V = (gen.normal(rng, (300, 2), dtype) for _ in range(2))
    frame = Frame((U, V), None, (np.eye(4, dtype=dtype),))
    assert np.array_equal(rows_of(frame, dtype), np.concatenate([U, V], axis=-1))


def test_frame_knows_its_shape():
    frame = Frame((np.zeros((2, 1, 7, 3)), np.zeros((5, 7, 2))))
    assert (frame.rows, frame.width, frame.batch, frame.count) == (7, 5, (2, 5), 10)


# --- rounding --------------------------------------------------------------------------------


@pytest.mark.parametrize("n", [100, 4097])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_sums_are_rounded_a_few_times_only(n, dtype):
    rng = np.random.default_rng(17)
    U, V, B = (gen.normal(rng, (n, 2), dtype) for _ in range(3))
    X = np.concatenate([U, V], axis=-1)
    G, T = accumulate(Frame((U, V)), B, np.dtype(dtype))
    # Runs of 32 rows are summed one after the other, and then their sums.
    for found, right in ((G, X), (T, B)):
        size = np.abs(X).T @ np.abs(right)
        assert (np.abs(found - exact_product(X, right)) <= 8 * gen.unit(dtype) * size).all()


def test_single_precision_sums_over_a_million_rows():
    """Panels are added in double precision: the error does not grow with n."""
    rng = np.random.default_rng(18)
    n = 1_000_000
    X = rng.standard_normal((n, 2), dtype=np.float32)
    B = rng.uniform(0.5, 1.5, (n, 1)).astype(np.float32)
    G, T = accumulate(Frame((X[:, :1].copy(), X[:, 1:].copy())), B, np.dtype("f4"))
    # Products of floats are exact in double precision, and a million roundings there are small.
    wide_x = X.astype(float)
    size = np.abs(wide_x).T @ np.concatenate([np.abs(wide_x), B], axis=1)
    exact = wide_x.T @ np.concatenate([wide_x, B.astype(float)], axis=1)
    error = np.abs(np.concatenate([G, T], axis=1) - exact)
    assert (error <= 4 * gen.unit("float32") * size).all()


@pytest.mark.parametrize("value", [0.1, 0.3, 0.7, 1.1, 1.7])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_errors_of_equal_terms_do_not_pile_up(dtype, value):
    """Every sum of a run is rounded in the same direction: what cuts this down are short runs."""
    n = 100_000
    X = np.full((n, 1), value, dtype)
    found = gram(Frame((X, X[:, :0])), np.dtype(dtype))[0, 0].real
    exact = n * float(X[0, 0].real) ** 2
    # A run of k equal terms errs by up to k/3 u: runs of 32, 16, 8, 2 and the tree of blocks.
    assert abs(float(found) - exact) <= 20 * gen.unit(dtype) * exact


@pytest.mark.parametrize(
    ("r", "k"), [(8, 8), (16, 9), (16, 16), (17, 31), (32, 32), (40, 1), (64, 64)]
)
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_wide_operands(r, k, dtype):
    """Tiles of all shapes, and panels of all lengths."""
    rng = np.random.default_rng(24)
    U, V, B = (whole(rng, (600, width), dtype, 2) for width in (r, r, k))
    check_sums(Frame((U, V)), B, dtype)
    check_update(Frame((U, V)), whole(rng, (2 * r, k), dtype, 2), B, dtype, np.empty_like(B))


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_update_rounds_a_few_times_only(dtype):
    rng = np.random.default_rng(19)
    U, V, B = (gen.normal(rng, (300, 3), dtype) for _ in range(3))
    Z = gen.normal(rng, (6, 3), dtype)
    Y = update(Frame((U, V)), Z, B, np.dtype(dtype), np.empty_like(B))
    X = np.concatenate([U, V], axis=-1)
    exact = exact_product(np.concatenate([X, B], -1).conj().T, np.concatenate([Z, np.eye(3)]))
    size = np.abs(X) @ np.abs(Z) + np.abs(B)
    # Six products and sums.
    assert (np.abs(Y - exact) <= 10 * gen.unit(dtype) * size).all()


@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_gram_is_hermitian_to_the_bit(dtype):
    rng = np.random.default_rng(20)
    U, V = (gen.normal(rng, (2, 500, 3), dtype) for _ in range(2))
    G = gram(Frame((U, V)), np.dtype(dtype))
    assert np.array_equal(G, adjoint(G))
    assert not np.diagonal(G, axis1=-2, axis2=-1).imag.any()


# --- the same bits ---------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", ["float32", "complex128"])
@pytest.mark.parametrize("shape", [(70_000,), (40, 3000)])
@pytest.mark.parametrize("r", [4, 8])
def test_same_bits_on_any_number_of_threads_and_in_every_run(set_threads, dtype, shape, r):
    rng = np.random.default_rng(21)
    *batch, n = shape
    U, V, B = (gen.normal(rng, (*batch, n, width), dtype) for width in (r, r, 3))
    Z = gen.normal(rng, (*batch, 2 * r, 3), dtype)
    frame = Frame((U, V))
    results = []
    for count in (1, 2, 3, 2, 1):
        set_threads(count)
        G, T = accumulate(frame, B, np.dtype(dtype))
        Y = update(frame, Z, B, np.dtype(dtype), np.empty_like(B))
        results.append((G, T, Y, *combine(frame, Y, B, G, Z, T, np.dtype(dtype))))
    for other in results[1:]:
        assert all(np.array_equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_same_bits_when_somebody_watches_and_in_any_layout(set_threads):
    """Progress and staging cut the work into other pieces, never into other sums."""
    rng = np.random.default_rng(22)
    U, V, B = (gen.normal(rng, (70_000, 3), "float64") for _ in range(3))
    plain = accumulate(Frame((U, V)), B, np.dtype(float))
    for count in (1, 3):
        set_threads(count)
        with watching(lambda *_: None):
            seen = accumulate(Frame((U, V)), B, np.dtype(float))
        staged = accumulate(Frame(tuple(np.asfortranarray(a) for a in (U, V))), B, np.dtype(float))
        for other in (seen, staged):
            assert all(np.array_equal(a, b) for a, b in zip(plain, other, strict=True))


def test_blocks_do_not_depend_on_the_number_of_threads(set_threads):
    """Whole panels, and few enough that their sums stay small beside any input."""
    sizes = []
    for count in (1, 3):
        set_threads(count)
        sizes.append([block_rows(n) for n in (0, 1, 4096, 8193, 10**6, 10**8)])
    assert sizes[0] == sizes[1] == sorted(sizes[0])
    assert all(size > 0 and size % 256 == 0 for size in sizes[0])


# --- how many passes -------------------------------------------------------------------------


def counted(call):
    """Rows that each pass read during a call."""
    rows = Counter()
    with watching(lambda name, count: rows.update({name: count})):
        call()
    return dict(rows)


def problem(n=9000, r=2, k=1, batch=(), dtype="float64"):
    rng = np.random.default_rng(23)
    return [gen.normal(rng, (*batch, n, width), dtype) / n**0.25 for width in (r, r, k)]


@pytest.mark.parametrize("method", ["auto", "gram"])
@pytest.mark.parametrize("dtype", gen.DTYPES)
def test_one_call_reads_every_row_twice(method, dtype):
    U, V, B = problem(dtype=dtype)
    rows = counted(lambda: skew_expm_multiply(U, V, B, method=method))
    assert rows == {"accumulate": 9000, "update": 9000}


def test_a_grid_costs_no_further_pass():
    U, V, B = problem()
    rows = counted(lambda: skew_expm_multiply(U, V, B, np.linspace(0, 1, 7)))
    assert rows == {"accumulate": 9000, "update": 9000}


def test_a_batch_reads_every_row_of_every_element_twice():
    U, V, B = problem(batch=(2, 3))
    rows = counted(lambda: skew_expm_multiply(U, V, B))
    assert rows == {"accumulate": 54_000, "update": 54_000}


def test_the_qr_route_of_a_good_basis_reads_one_time_more():
    """Cholesky of G, then the new frame's own G: no Householder QR, no copy."""
    U, V, B = problem()
    rows = counted(lambda: skew_expm_multiply(U, V, B, method="qr"))
    assert rows == {"accumulate": 18_000, "update": 9000}


def test_the_qr_route_of_a_bad_basis_folds_the_rows_once():
    U, _, B = problem()
    rows = counted(lambda: skew_expm_multiply(U, U[:, ::-1].copy(), B, method="qr"))
    assert rows.pop("basis") == 9000
    assert rows.pop("update") == 9000
    assert rows.pop("accumulate") <= 27_000
    assert not rows


def test_the_direct_route_makes_no_pass():
    U, V, B = problem(n=4, r=2)
    assert counted(lambda: skew_expm_multiply(U, V, B)) == {}


def test_general_low_rank_reads_right_factor_once_for_each_product():
    L, R, B = problem()
    rows = counted(lambda: expm_multiply(L, R, B))
    assert rows == {"accumulate": 18_000, "update": 9000}


def test_a_generator_accumulates_its_gram_matrix_once():
    U, V, B = problem()
    S = LowRankSkew(U, V)
    first = counted(lambda: S.expm_multiply(B, 0.5))
    assert first == {"accumulate": 18_000, "update": 9000}
    assert counted(lambda: S.expm_multiply(B, 0.7)) == {"accumulate": 9000, "update": 9000}
    assert counted(lambda: S.expm(0.9)) == {}
    assert counted(S.angles) == {}
    Q = S.expm(0.9)
    assert counted(lambda: Q @ B) == {"accumulate": 9000, "update": 9000}
    assert counted(lambda: Q.certificate) == {}


def test_watching_ends_with_its_block():
    U, V, B = problem()
    rows = []
    with watching(lambda name, count: rows.append((name, count))):
        skew_expm_multiply(U, V, B)
        skew_expm_multiply(U, V, B)
    seen = len(rows)
    skew_expm_multiply(U, V, B)
    assert len(rows) == seen
    assert sum(count for name, count in rows if name == "update") == 18_000


def test_a_long_pass_reports_as_it_goes():
    """A progress bar needs more than the end."""
    n = 2_000_000
    U, V, B = (np.ones((n, width)) * 1e-4 for width in (2, 2, 1))
    rows = []
    with watching(lambda name, count: rows.append((name, count))):
        skew_expm_multiply(U, V, B, method="gram")
    for name in ("accumulate", "update"):
        counts = [count for which, count in rows if which == name]
        assert sum(counts) == n
        assert max(counts) <= n / 2
