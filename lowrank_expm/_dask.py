"""The main job on dask arrays in blocks of rows: one lazy graph, each block loaded twice at most.

The graph: sums of each block, a tree that merges them in one fixed order, one core, the update
of each block. The second half has its own copy of the tasks that load the blocks, which wait for
the core: no worker holds a block longer than a task takes. What the core needs is in the merged
sums by every route (see `passes.blocks`), so that no value decides the shape of the graph.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np

from . import _inputs, _linear, core
from ._array import library, spread
from ._foreign import same_place
from ._threads import alone
from .core.certificate import settled, trusted_up_to
from .core.exponential import skew_of
from .passes import Frame, blocks
from .passes.basis import first_nonfinite
from .passes.numpy_passes import project, update

# How many sums one task of the tree merges.
FAN_IN = 16


class Arguments(NamedTuple):
    """Checked dask arrays with common row blocks, each with a column axis and whole columns."""

    U: Any
    V: Any
    B: Any
    t: Any
    dtype: np.dtype
    work: np.dtype
    grid: tuple[int, ...]
    batch: tuple[int, ...]
    vector: bool

    @property
    def chunks(self) -> tuple[tuple[int, ...], ...]:
        """The chunks of the result, with a column axis."""
        lead = tuple((n,) for n in (*self.grid, *self.batch))
        return (*lead, self.U.chunks[-2], self.B.chunks[-1])


class Solved(NamedTuple):
    """What updates need: the end, the frame and Z of each run of rows; whether Y may overflow."""

    ends: list[int]
    frames: list[tuple[np.ndarray | None, tuple[np.ndarray, ...]]]
    Z: list[np.ndarray]
    may_overflow: bool


def multiply(U: Any, V: Any, B: Any, t: Any, method: str, out: Any = None) -> Any:
    """exp(t(U Vᴴ − V Uᴴ)) B."""
    a = _arguments({"U": U, "V": V, "B": B}, t, out)
    n, r = a.U.shape[-2:]
    if not r or n <= 2 * r or method == "direct":
        return _in_one_task(a, method)
    sums = _tree(_for_each_block(_block_sums, a.U, a.V, a.B, work=a.work), blocks.merged)
    solved = _small(_skew_solved, sums, a.t, method=method, work=a.work)
    return _updated(a, solved, a.U, a.V)


def general_multiply(L: Any, R: Any, B: Any, t: Any, out: Any = None) -> Any:
    """exp(t L Rᴴ) B."""
    a = _arguments({"L": L, "R": R, "B": B}, t, out, real_t=False)
    if not a.U.shape[-1]:
        return _in_one_task(a._replace(t=np.zeros(a.grid)), "auto")
    sums = _tree(_for_each_block(_block_products, a.U, a.V, a.B, work=a.work), _added)
    return _updated(a, _small(_general_solved, sums, a.t, work=a.work), a.U)


# Arguments


def _arguments(given: dict[str, Any], t: Any, out: Any, real_t: bool = True) -> Arguments:
    """Check everything that can be known without computing anything."""
    if out is not None:
        raise TypeError("out is not for dask arrays; store the result, as with Y.to_zarr(…)")
    for name, a in given.items():
        _check(name, a)
    same_place(given, t)
    first, second, _ = given
    U, V = _inputs.paired((first, given[first]), (second, given[second]))
    vector = given["B"].ndim == 1
    B, _ = _inputs.columns(_column(given["B"]) if vector else given["B"], U.shape[-2])
    batch = _inputs.batch(f"{first}, {second} and B", U, V, B)
    t, shape, promotes = _time(t, real_t)
    U, V, B = _aligned(dict(zip(given, (U, V, B), strict=True)))
    dtype = _inputs.floating(U.dtype, V.dtype, B.dtype, promotes)
    work = _inputs.with_kind(_inputs.real_part(dtype), U, V)
    return Arguments(U, V, B, t, dtype, work, shape, batch, vector)


def _check(name: str, a: Any) -> None:
    """Refuse what is no dask array of NumPy blocks of known sizes."""
    if library(a) != "dask":
        raise TypeError(
            f"{name} is a {type(a).__module__}.{type(a).__qualname__} beside dask arrays; "
            f"wrap it with dask.array.from_array({name}, chunks=…)"
        )
    _inputs.array(name, np.empty(0, a.dtype) if type(a._meta) is np.ndarray else a._meta)
    if any(math.isnan(n) for n in a.shape):
        raise ValueError(f"{name} has unknown chunk sizes; call {name}.compute_chunk_sizes() first")


def _column(a: Any) -> Any:
    """A vector as one column."""
    return a.map_blocks(_as_column, new_axis=1, dtype=a.dtype, meta=np.empty((0, 0), a.dtype))


def _as_column(a: np.ndarray) -> np.ndarray:
    """The same for a block."""
    return a[:, None]


def _time(t: Any, real: bool) -> tuple[Any, tuple[int, ...], Any]:
    """t in one block or as NumPy's, the shape of its grid, and what it adds to the dtype."""
    if library(t) is None:
        times = _inputs.times(t, real=real)
        return times.values, times.values.shape, times.promotes
    _check("t", t)
    if t.dtype.kind == "c" and real:
        raise TypeError("t is complex, so the result would not be unitary; pass a real t")
    if t.ndim > 1:
        raise ValueError(f"t has shape {t.shape}; it must be a number or one-dimensional")
    return t.rechunk(-1), t.shape, t.dtype


def _aligned(arrays: dict[str, Any]) -> list[Any]:
    """The arrays in common blocks of rows, with all columns and all of the batch in each."""
    from dask.array.core import unify_chunks

    pairs = []
    for name, a in arrays.items():
        if any(count > 1 for count in a.numblocks[:-2]):
            whole = ", ".join(f"{axis}: -1" for axis in range(a.ndim - 2))
            raise ValueError(
                f"{name} is cut along its leading axes, into {a.chunks[:-2]}; "
                f"cut it along its rows alone: {name}.rechunk({{{whole}}})"
            )
        a = a.rechunk({a.ndim - 1: -1})
        pairs += [a, (*((name, i) for i in range(a.ndim - 2)), "row", (name, "column"))]
    return list(unify_chunks(*pairs)[1])


# The graph: small objects are arrays of one object a block of rows, with as many axes as B or U.


def _for_each_block(function: Callable[..., Any], *arrays: Any, **given: Any) -> Any:
    """function(blocks) as one object for each block of rows."""
    import dask.array as da

    axes = max(a.ndim for a in arrays)
    ones = ((1,),) * (axes - 2) + ((1,) * arrays[0].numblocks[-2], (1,))
    return da.map_blocks(
        function, *arrays, **given, chunks=ones, dtype=object, meta=_boxed(None, axes)[:0]
    )


def _tree(objects: Any, merge: Callable[[list[Any]], Any]) -> Any:
    """All objects merged, FAN_IN at a time and in their order."""
    import dask.array as da

    step = partial(_merged_boxes, merge)
    return da.reduction(
        objects,
        chunk=_unchanged,
        combine=step,
        aggregate=step,
        axis=objects.ndim - 2,
        keepdims=True,
        concatenate=False,
        split_every=FAN_IN,
        dtype=object,
        meta=_boxed(None, objects.ndim)[:0],
    )


def _small(function: Callable[..., Any], sums: Any, t: Any, **given: Any) -> Any:
    """function(sums, t) as one task."""
    import dask.array as da

    arrays = (sums,) if library(t) is None else (sums, t)
    given = given if len(arrays) > 1 else {"t": t, **given}
    return da.map_blocks(
        function, *arrays, **given, chunks=sums.chunks, dtype=object, meta=sums._meta
    )


def _updated(a: Arguments, solved: Any, *columns: Any) -> Any:
    """The updates of all blocks, which are loaded anew once the core is there."""
    from dask.graph_manipulation import bind

    again = bind([*columns, a.B], solved, seed=solved.name)
    return _result(a, _block_update, *again, solved)


def _in_one_task(a: Arguments, method: str) -> Any:
    """The result by way of NumPy: of few rows in one task, of no columns block by block."""
    arrays = [a.U, a.V, a.B]
    rows = a.U.chunks[-2]
    if a.U.shape[-1]:
        arrays = [x.rechunk({x.ndim - 2: -1}) for x in arrays]
    whole = a._replace(U=arrays[0], B=arrays[2])
    extra, t = ((), a.t) if library(a.t) is None else ((a.t,), None)
    Y = _result(whole, _whole, *arrays, *extra, t=t, method=method)
    return Y.rechunk({len(a.grid) + len(a.batch): rows})


def _result(a: Arguments, function: Any, *arrays: Any, **given: Any) -> Any:
    """Blocks of the result, in the caller's shape."""
    import dask.array as da

    Y = da.map_blocks(
        function,
        *arrays,
        **given,
        work=a.work,
        to=a.dtype,
        chunks=a.chunks,
        new_axis=[0] if a.grid else None,
        dtype=a.dtype,
        meta=np.empty((0,) * len(a.chunks), a.dtype),
    )
    if not a.vector:
        return Y
    meta = np.empty((0,) * (Y.ndim - 1), a.dtype)
    return Y.map_blocks(_first_column, drop_axis=Y.ndim - 1, dtype=a.dtype, meta=meta)


# Tasks


def _block_sums(
    U: np.ndarray, V: np.ndarray, B: np.ndarray, *, work: np.dtype, block_info: Any
) -> np.ndarray:
    """The sums of a block of rows of [U V] and B."""
    frame = Frame((U, V))
    with alone():
        sums = blocks.block_sums(frame, B, work)
        if not sums.finite:
            _require_finite(block_info, U=U, V=V, B=B)
        return _boxed(blocks.with_piece(sums, frame, B), max(U.ndim, V.ndim, B.ndim))


def _block_products(
    L: np.ndarray, R: np.ndarray, B: np.ndarray, *, work: np.dtype, block_info: Any
) -> np.ndarray:
    """RᴴL and RᴴB of a block of rows, in double precision."""
    frame = Frame((R,))
    with alone(), np.errstate(over="ignore", invalid="ignore"):
        M, T = (blocks.wide(project(frame, a, work)) for a in (L, B))
    if not (np.isfinite(M).all() and np.isfinite(T).all()):
        _require_finite(block_info, L=L, R=R, B=B)
    return _boxed((M, T), max(L.ndim, R.ndim, B.ndim))


def _added(parts: list[Any]) -> tuple[np.ndarray, np.ndarray]:
    """Products of runs of rows, added in their order."""
    with np.errstate(over="ignore", invalid="ignore"):
        M, T = (sum(arrays) for arrays in zip(*parts, strict=True))
    return M, T


def _require_finite(block_info: Any, **arrays: np.ndarray) -> None:
    """Raise for the first entry of a block that is not finite, by its place among all rows."""
    first = block_info[0]["array-location"][-2][0]
    for name, a in arrays.items():
        index = first_nonfinite(a)
        if index is not None:
            *batch, row, column = index
            where = ", ".join(str(i) for i in (*batch, first + row, column))
            raise ValueError(f"{name}[{where}] is {a[index]}; all entries must be finite")


def _skew_solved(sums: np.ndarray, t: np.ndarray, *, method: str, work: np.dtype) -> np.ndarray:
    """The core and what the updates make of it, by the route that its values ask for."""
    s = sums.item()
    t = _finite_time(t, _inputs.real_part(work))
    with np.errstate(over="ignore", invalid="ignore"):
        solved = None if method == "qr" else _by_gram(s, t, method)
        return _boxed(solved or _by_pieces(s, t), sums.ndim)


def _finite_time(t: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """t in the precision to compute in."""
    if not np.isfinite(t).all():
        raise ValueError("t contains NaN or infinity; it must be finite")
    with np.errstate(over="ignore"):
        return t.astype(dtype)


def _by_gram(s: blocks.Sums, t: np.ndarray, method: str) -> Solved | None:
    """By the Gram matrix, if its squares are in range and its certificate is to be trusted."""
    G, T = s.G.astype(s.dtype), _narrow(s.T, s.dtype)
    if not (s.finite and _linear.squares_fit(G, t)):
        if method == "gram":
            raise _linear.overflow("U", "V", "B")
        return None
    c = core.skew(G, _beside_batch(t, G))
    if method == "gram":
        _linear.require_unitary(c.C, G, c.bound)
    elif not _trusted(c, G):
        return None
    Z = spread(c.C, t.ndim, T.ndim) @ T
    longest = math.sqrt(float(blocks.diagonal(G).max(initial=0.0)))
    return _solution([s.rows], [(None, ())], [Z], longest)


def _trusted(c: core.Core, G: np.ndarray) -> bool:
    """Whether every certificate is to be trusted."""
    with np.errstate(over="ignore", invalid="ignore"):
        bound = settled(c.bound, c.C, G)
    return bool((bound <= trusted_up_to(G.shape[-1], np.finfo(G.dtype).eps / 2)).all())


def _by_pieces(s: blocks.Sums, t: np.ndarray) -> Solved:
    """By the frame that the blocks' own frames make together."""
    pieces, joint = blocks.joined(s)
    G = joint.G.astype(s.dtype)
    c = core.skew(G, _beside_batch(t, G), skew_of(joint.R).astype(s.dtype))
    CT = spread(c.C, t.ndim, joint.T.ndim) @ joint.T
    ends = list(accumulate(p.rows for p in pieces))
    Z = [_narrow(M @ CT, s.dtype) for M in joint.mixes]
    return _solution(ends, [(p.scale, p.factors) for p in pieces], Z, 1.0)


def _general_solved(products: np.ndarray, t: np.ndarray, *, work: np.dtype) -> np.ndarray:
    """The core of exp(t L Rᴴ) applied to RᴴB."""
    M, T = (_narrow(a, work) for a in products.item())
    t = _finite_time(t, _inputs.with_kind(_inputs.real_part(work), t))
    for product, name in ((M, "L"), (T, "B")):
        if not np.isfinite(product).all():
            raise _linear.overflow(name, "R")
    with np.errstate(over="ignore", invalid="ignore"):
        C = core.general(M.astype(np.result_type(M, t)), _beside_batch(t, M)).C
        Z = spread(C, t.ndim, T.ndim) @ T
    if not np.isfinite(Z).all():
        raise ValueError("exp(t L Rᴴ) B overflows; scale t, L or R down")
    return _boxed(Solved([0], [(None, ())], [Z], True), products.ndim)


def _beside_batch(t: np.ndarray, G: np.ndarray) -> np.ndarray:
    """A grid with axes for the batch behind it."""
    return t.reshape(t.shape + (1,) * (G.ndim - 2)) if t.ndim else t


def _narrow(a: np.ndarray, dtype: np.dtype) -> np.ndarray:
    """An array in the precision of a dtype, complex if it is."""
    with np.errstate(over="ignore"):
        return a.astype(_inputs.with_kind(_inputs.real_part(dtype), a))


def _solution(ends: list[int], frames: list[Any], Z: list[np.ndarray], longest: float) -> Solved:
    """What updates need, for columns of F of at most a length."""
    largest = max(float(np.abs(z).max(initial=0)) for z in Z)
    top = float(np.finfo(Z[0].dtype).max)
    return Solved(ends, frames, Z, not largest * longest * Z[0].shape[-2] < top / 1024)


def _block_update(*given: Any, work: np.dtype, to: np.dtype, block_info: Any) -> np.ndarray:
    """B + F Z of a block of rows."""
    *columns, B, solved = given
    s: Solved = solved.item()
    first = block_info[0]["array-location"][-2][0]
    i = min(bisect_right(s.ends, first), len(s.ends) - 1)
    Y = np.empty((*s.Z[i].shape[:-2], *B.shape[-2:]), to)
    with alone(), np.errstate(over="ignore", invalid="ignore"):
        update(Frame(tuple(columns), *s.frames[i]), s.Z[i], B, work, Y)
    if s.may_overflow or to.char == "e":
        _linear.require_range(Y, "B")
    return Y


def _whole(
    U: np.ndarray,
    V: np.ndarray,
    B: np.ndarray,
    *given: np.ndarray,
    t: Any,
    method: str,
    work: np.dtype,
    to: np.dtype,
) -> np.ndarray:
    """The result of all rows, or of rows without columns of U and V, as for NumPy."""
    t = _finite_time(given[0] if given else t, _inputs.real_part(work))
    s = _linear.solve(U, V, B, t, method, t.dtype)
    ndim = max(U.ndim, V.ndim, B.ndim)
    batch = np.broadcast_shapes(U.shape[:-2], V.shape[:-2], B.shape[:-2])
    Y = np.empty((*t.shape, *batch, *B.shape[-2:]), to)
    _linear.apply(s, spread(s.C, t.ndim, ndim), B, Y, s.T)
    return Y


def _first_column(Y: np.ndarray) -> np.ndarray:
    """A block of one column as a vector."""
    return Y[..., 0]


def _boxed(a: Any, axes: int) -> np.ndarray:
    """One object as an array of one entry."""
    box = np.empty((1,) * axes, object)
    box.flat[0] = a
    return box


def _merged_boxes(merge: Any, boxes: Any, axis: Any = None, keepdims: Any = None) -> np.ndarray:
    """The objects in boxes merged into one."""
    boxes = boxes if isinstance(boxes, list) else [boxes]
    return _boxed(merge([box.item() for box in boxes]), boxes[0].ndim)


def _unchanged(box: Any, axis: Any = None, keepdims: Any = None) -> Any:
    """The same."""
    return box
