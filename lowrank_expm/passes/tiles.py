"""Vector code for the kernels: products of small tiles that stay in registers.

Each maker returns a function for compiled code whose body is written in LLVM's vectors of 64
bytes; a target without such registers splits them. Indices are not checked: vectors are read and
written whole, also beyond the last column, where callers leave room.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

VECTOR_BYTES = 64
# A product and a sum may become one instruction, where there is one.
FUSE = ("contract",)


def _tile_shape() -> tuple[int, int]:
    """Rows and vectors of a tile whose sums and operands fit the registers."""
    try:
        wide = binding.get_host_cpu_features().get("avx512f", False)
    except RuntimeError:
        wide = False
    return (8, 2) if wide else (4, 1)


HEIGHT, WIDTH = _tile_shape()


class _Matrix:
    """A two-dimensional array in code being generated, read and written in vectors."""

    def __init__(self, context: Any, builder: Any, kind: Any, value: Any) -> None:
        self.context, self.builder, self.kind = context, builder, kind
        self.array = context.make_array(kind)(context, builder, value)
        self.real = context.get_value_type(kind.dtype)
        self.size = context.get_abi_sizeof(self.real)

    @property
    def lanes(self) -> int:
        """How many entries a vector holds."""
        return int(VECTOR_BYTES // self.size)

    @property
    def columns(self) -> Any:
        """The length of a row."""
        return cgutils.unpack_tuple(self.builder, self.array.shape)[1]

    def load(self, i: Any, j: Any, lanes: int) -> Any:
        return self.builder.load(self.place(i, j, lanes), align=self.size)

    def store(self, value: Any, i: Any, j: Any, past_caches: bool = False) -> None:
        place = self.place(i, j, value.type.count)
        if not past_caches:
            self.builder.store(value, place, align=self.size)
            return
        done = self.builder.store(value, place, align=VECTOR_BYTES)
        once = ir.Constant(ir.IntType(32), 1)
        done.set_metadata("nontemporal", self.builder.module.add_metadata([once]))

    def sums(self, rows: int, columns: int) -> list[list[Any]]:
        """Vectors that start at zero, for registers."""
        zero = ir.Constant(ir.VectorType(self.real, self.lanes), [0.0] * self.lanes)
        one = self.builder, zero
        return [[cgutils.alloca_once_value(*one) for _ in range(columns)] for _ in range(rows)]

    def place(self, i: Any, j: Any, lanes: int) -> Any:
        entry = self.context, self.builder, self.kind, self.array, [i, j]
        p = cgutils.get_item_pointer(*entry, wraparound=False)
        return self.builder.bitcast(p, ir.VectorType(self.real, lanes).as_pointer())


def _made(kinds: str, generate: Callable[..., None]) -> Any:
    """A function of matrices (m) and indices (i) with the code that `generate` emits."""

    def build(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        made = [
            _Matrix(context, builder, kind, a) if of == "m" else a
            for of, kind, a in zip(kinds, signature.args, args, strict=True)
        ]
        generate(builder, *made)
        return context.get_dummy_value()

    def typed(arrays: tuple[Any, ...]) -> tuple[Any, Any]:
        given = iter(arrays)
        signature = types.void(*(next(given) if of == "m" else types.intp for of in kinds))
        return signature, build

    return typed


def tile(height: int, width: int, onto: bool = False, past_caches: bool = False) -> Any:
    """C[i:i+height, at:] = [b[0, at:] +] A[i:i+height, :count] B[:count, j:], width in vectors.

    What is written past the caches must lie in whole vectors of memory.
    """

    def generate(builder: Any, *given: Any) -> None:
        A, i, B, j, count, b, C, at = given
        sums = B.sums(height, width)
        with cgutils.for_range(builder, count, intp=i.type) as loop:
            row = _vectors(builder, B, loop.index, j, width)
            for x in range(height):
                _add_multiple(builder, A.load(_plus(builder, i, x), loop.index, 1), row, sums[x])
        start = _vectors(builder, b, ir.Constant(i.type, 0), at, width) if onto else []
        for x in range(height):
            for v in range(width):
                value = builder.load(sums[x][v])
                value = builder.fadd(start[v], value) if onto else value
                C.store(value, _plus(builder, i, x), _plus(builder, at, v * B.lanes), past_caches)

    make = _made("mimiimmi", generate)

    @intrinsic
    def run(
        typing: Any, A: Any, i: Any, B: Any, j: Any, count: Any, b: Any, C: Any, at: Any
    ) -> Any:
        return make((A, B, b, C))

    return run


def tile_of_parts(height: int, width: int) -> Any:
    """out[i:i+height, j:] = b[i:i+height, j:] + [A₁ A₂][i:i+height] Z[:, j:], width in vectors."""

    def generate(builder: Any, *given: Any) -> None:
        *parts, i, Z, j, b, out = given
        sums, at = Z.sums(height, width), ir.Constant(i.type, 0)
        for A in parts:
            with cgutils.for_range(builder, A.columns, intp=i.type) as loop:
                row = _vectors(builder, Z, builder.add(at, loop.index), j, width)
                for x in range(height):
                    a = A.load(_plus(builder, i, x), loop.index, 1)
                    _add_multiple(builder, a, row, sums[x])
            at = builder.add(at, A.columns)
        for x in range(height):
            place = _plus(builder, i, x)
            for v, start in enumerate(_vectors(builder, b, place, j, width)):
                total = builder.fadd(start, builder.load(sums[x][v]))
                out.store(total, place, _plus(builder, j, v * Z.lanes))

    make = _made("mmimimm", generate)

    @intrinsic
    def run(typing: Any, A1: Any, A2: Any, i: Any, Z: Any, j: Any, b: Any, out: Any) -> Any:
        return make((A1, A2, Z, b, out))

    return run


def pair_of_tiles(height: int) -> Any:
    """One vector of columns of C and D: [A₁ A₂ A₃ A₄][p:p+height] times those of W and X."""

    def generate(builder: Any, *given: Any) -> None:
        *parts, p, W, X, j, C, D, i = given
        sums, at = W.sums(height, 2), ir.Constant(p.type, 0)
        for A in parts:
            with cgutils.for_range(builder, A.columns, intp=p.type) as loop:
                place = builder.add(at, loop.index)
                row = [a.load(place, j, a.lanes) for a in (W, X)]
                for x in range(height):
                    _add_multiple(
                        builder, A.load(_plus(builder, p, x), loop.index, 1), row, sums[x]
                    )
            at = builder.add(at, A.columns)
        for x in range(height):
            for target, s in zip((C, D), sums[x], strict=True):
                target.store(builder.load(s), _plus(builder, i, x), j)

    make = _made("mmmmimmimmi", generate)

    @intrinsic
    def run(
        typing: Any,
        A1: Any,
        A2: Any,
        A3: Any,
        A4: Any,
        p: Any,
        W: Any,
        X: Any,
        j: Any,
        C: Any,
        D: Any,
        i: Any,
    ) -> Any:
        return make((A1, A2, A3, A4, W, X, C, D))

    return run


def tile_of_sums(height: int, width: int) -> Any:
    """C[i:i+height, j:j+width] += A[p:q, i:i+height]ᵀ A[p:q, j:j+width]."""

    def generate(builder: Any, A: _Matrix, p: Any, q: Any, i: Any, j: Any, C: _Matrix) -> None:
        columns = [_plus(builder, j, v * A.lanes) for v in range(width)]
        right = [(A, column) for column in columns]
        _add_sums(builder, p, q, A, i, height, right, C, i, columns)

    make = _made("miiiim", generate)

    @intrinsic
    def run(typing: Any, A: Any, p: Any, q: Any, i: Any, j: Any, C: Any) -> Any:
        return make((A, C))

    return run


def pair_of_sums(height: int) -> Any:
    """C[i:i+height] += L[p:q, l:l+height]ᵀ [A₁ A₂][p:q], in the columns j:j+lanes of each part."""

    def generate(builder: Any, *given: Any) -> None:
        L, p, q, column, first, second, j, C, i = given
        right = [(first, j), (second, j)]
        columns = [j, builder.add(first.columns, j)]
        _add_sums(builder, p, q, L, column, height, right, C, i, columns)

    make = _made("miiimmimi", generate)

    @intrinsic
    def run(
        typing: Any, L: Any, p: Any, q: Any, column: Any, A1: Any, A2: Any, j: Any, C: Any, i: Any
    ) -> Any:
        return make((L, A1, A2, C))

    return run


def dots() -> Any:
    """y[c, i:i+lanes] = A[i:i+lanes] z[c] over so many vectors of columns."""

    def generate(
        builder: Any, A: _Matrix, i: Any, z: _Matrix, c: Any, vectors: Any, y: _Matrix
    ) -> None:
        y.store(_dots(builder, [(A, vectors)], i, z, c), c, i)

    make = _made("mimiim", generate)

    @intrinsic
    def run(typing: Any, A: Any, i: Any, z: Any, c: Any, vectors: Any, y: Any) -> Any:
        return make((A, z, y))

    return run


def dots_onto() -> Any:
    """out[i:i+lanes, c] = b[i:i+lanes, c] + [A₁ A₂][i:i+lanes] z[c], in whole vectors of A₁, A₂."""

    def generate(builder: Any, *given: Any) -> None:
        *parts, i, z, c, b, out = given
        lanes = ir.Constant(i.type, z.lanes)
        counted = [(A, builder.udiv(_plus(builder, A.columns, z.lanes - 1), lanes)) for A in parts]
        _add_to_column(builder, _dots(builder, counted, i, z, c), b, out, i, c)

    make = _made("mmimimm", generate)

    @intrinsic
    def run(typing: Any, A1: Any, A2: Any, i: Any, z: Any, c: Any, b: Any, out: Any) -> Any:
        return make((A1, A2, z, b, out))

    return run


def settle() -> Any:
    """Let other threads see what was written past the caches."""

    @intrinsic
    def run(typing: Any) -> Any:
        def build(context: Any, builder: Any, *_: Any) -> Any:
            builder.fence("seq_cst")
            return context.get_dummy_value()

        return types.void(), build

    return run


def move(lanes: int) -> Any:
    """out[row, column:column+lanes] = a[i, j:j+lanes]."""

    def generate(_: Any, a: _Matrix, i: Any, j: Any, out: _Matrix, row: Any, column: Any) -> None:
        out.store(a.load(i, j, lanes), row, column)

    make = _made("miimii", generate)

    @intrinsic
    def run(typing: Any, a: Any, i: Any, j: Any, out: Any, row: Any, column: Any) -> Any:
        return make((a, out))

    return run


def turn() -> Any:
    """out[row:row+lanes, column:column+lanes] = a[i:i+lanes, j:j+lanes]ᵀ."""

    def generate(
        builder: Any, a: _Matrix, i: Any, j: Any, out: _Matrix, row: Any, column: Any
    ) -> None:
        values = [a.load(_plus(builder, i, x), j, a.lanes) for x in range(a.lanes)]
        for x, value in enumerate(_turned(builder, values)):
            out.store(value, _plus(builder, row, x), column)

    make = _made("miimii", generate)

    @intrinsic
    def run(typing: Any, a: Any, i: Any, j: Any, out: Any, row: Any, column: Any) -> Any:
        return make((a, out))

    return run


def add(lanes: int) -> Any:
    """out[row, column:] = b[row, column:] + a[i, j:j+lanes]; out may be b."""

    def generate(
        builder: Any, a: _Matrix, i: Any, j: Any, b: _Matrix, out: _Matrix, row: Any, column: Any
    ) -> None:
        total = builder.fadd(b.load(row, column, lanes), a.load(i, j, lanes))
        out.store(total, row, column)

    make = _made("miimmii", generate)

    @intrinsic
    def run(typing: Any, a: Any, i: Any, j: Any, b: Any, out: Any, row: Any, column: Any) -> Any:
        return make((a, b, out))

    return run


def fetch() -> Any:
    """Ask for row i of A, which is about to be read, to come into the cache."""

    def generate(builder: Any, A: _Matrix, i: Any) -> None:
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag])
        prefetch = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        start, step = ir.Constant(i.type, 0), ir.Constant(i.type, A.lanes)
        with cgutils.for_range_slice(builder, start, A.columns, step, i.type) as (j, _):
            place = builder.bitcast(A.place(i, j, 1), byte)
            builder.call(prefetch, [place, *map(flag, (0, 3, 1))])  # to read, often, as data

    make = _made("mi", generate)

    @intrinsic
    def run(typing: Any, A: Any, i: Any) -> Any:
        return make((A,))

    return run


def _plus(builder: Any, index: Any, offset: int) -> Any:
    return builder.add(index, ir.Constant(index.type, offset)) if offset else index


def _vectors(builder: Any, A: _Matrix, i: Any, j: Any, count: int) -> list[Any]:
    """Some vectors of one row."""
    return [A.load(i, _plus(builder, j, v * A.lanes), A.lanes) for v in range(count)]


def _add_multiple(builder: Any, a: Any, row: list[Any], sums: list[Any]) -> None:
    """sums += a row."""
    lanes = row[0].type.count
    everywhere = _shuffle(builder, a, a, [0] * lanes)
    for v, s in zip(row, sums, strict=True):
        _add_product(builder, everywhere, v, s)


def _add_product(builder: Any, a: Any, b: Any, s: Any) -> None:
    """s += a b."""
    product = builder.fmul(a, b, flags=FUSE)
    builder.store(builder.fadd(builder.load(s), product, flags=FUSE), s)


def _add_sums(
    builder: Any,
    p: Any,
    q: Any,
    L: _Matrix,
    column: Any,
    height: int,
    right: list[tuple[_Matrix, Any]],
    C: _Matrix,
    i: Any,
    columns: list[Any],
) -> None:
    """C[i:i+height, columns] += L[p:q, column:column+height]ᵀ times vectors of rows p:q."""
    sums = C.sums(height, len(right))
    with cgutils.for_range_slice(builder, p, q, ir.Constant(p.type, 1), p.type) as (at, _):
        row = [A.load(at, j, A.lanes) for A, j in right]
        for x in range(height):
            _add_multiple(builder, L.load(at, _plus(builder, column, x), 1), row, sums[x])
    for x in range(height):
        row = _plus(builder, i, x)
        for j, s in zip(columns, sums[x], strict=True):
            C.store(builder.fadd(C.load(row, j, C.lanes), builder.load(s)), row, j)


def _dots(builder: Any, parts: list[tuple[_Matrix, Any]], i: Any, z: _Matrix, c: Any) -> Any:
    """A vector of products of rows i, i + 1, … of matrices side by side with row c of z."""
    at, lanes = ir.Constant(i.type, 0), ir.Constant(i.type, z.lanes)
    sums = [s for (s,) in z.sums(z.lanes, 1)]
    for A, vectors in parts:
        with cgutils.for_range(builder, vectors, intp=i.type) as loop:
            j = builder.mul(loop.index, lanes)
            factor = z.load(c, builder.add(at, j), z.lanes)
            for x, s in enumerate(sums):
                _add_product(builder, factor, A.load(_plus(builder, i, x), j, z.lanes), s)
        at = builder.add(at, builder.mul(vectors, lanes))
    return _sum_of_each(builder, [builder.load(s) for s in sums])


def _add_to_column(builder: Any, value: Any, b: _Matrix, out: _Matrix, i: Any, c: Any) -> None:
    """out[i:, c] = b[i:, c] + value: a vector at once where the only column is contiguous."""
    one, lanes = ir.Constant(i.type, 1), value.type.count
    with builder.if_else(builder.icmp_signed("==", out.columns, one)) as (only, several):
        with only:
            out.store(builder.fadd(b.load(i, c, lanes), value), i, c)
        with several:
            for x in range(lanes):
                row = _plus(builder, i, x)
                entry = _shuffle(builder, value, value, [x])
                out.store(builder.fadd(b.load(row, c, 1), entry), row, c)


def _shuffle(builder: Any, a: Any, b: Any, picks: list[int]) -> Any:
    mask = ir.Constant(ir.VectorType(ir.IntType(32), len(picks)), picks)
    return builder.shuffle_vector(a, b, mask)


def _turned(builder: Any, values: list[Any]) -> list[Any]:
    """The transpose of as many vectors as each has lanes: blocks off the diagonal change places."""
    lanes = len(values)
    d = lanes // 2
    while d:
        low = [x + lanes - d if x & d else x for x in range(lanes)]
        high = [x + lanes if x & d else x + d for x in range(lanes)]
        for x in range(lanes):
            if not x & d:
                a, b = values[x], values[x + d]
                values[x], values[x + d] = (_shuffle(builder, a, b, m) for m in (low, high))
        d //= 2
    return values


def _sum_of_each(builder: Any, values: list[Any]) -> Any:
    """A vector with the sum of each of as many vectors as it has lanes, added in pairs."""
    lanes, d = len(values), 1
    while d < lanes:
        low = [x + lanes - d if x & d else x for x in range(lanes)]
        high = [x + lanes if x & d else x + d for x in range(lanes)]
        pairs = zip(values[::2], values[1::2], strict=True)
        values = [
            builder.fadd(_shuffle(builder, a, b, low), _shuffle(builder, a, b, high))
            for a, b in pairs
        ]
        d *= 2
    return values[0]
