"""Pooling's vector code: a maximum or a sum of elements, by vectors and one by one, as LLVM IR.

Every function reduces vectors at run-time strides, in several accumulators, so that no operation waits for the one
before it.

A `PoolReduction` and a tile or ``...Spec`` hold the parameters that a kernel is built for, a `PoolRun` the arguments
of a call.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import I32, I64, const, emitted, pointer, shuffle, splat
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.pool.reduction import PoolReduction, PoolRun, Reducer

_Vectors = list[Any]


# ---------------------------------------------------------------- one element at a time


def filler(reduction: PoolReduction, in_memory: bool = False) -> Any:
    """``fill(to, count)``: elements that change no result, of the held type or as memory has them."""

    @emitted
    def fill(builder: Any, to: Any, count: Any) -> None:
        e = Reducer(builder, reduction._replace(lanes=1))
        value, v = (e.in_memory(e.c(e.identity)), e.memory) if in_memory else (e.c(e.identity), e)
        with cgutils.for_range(builder, count) as loop:
            v.store(value, builder.add(to, builder.mul(loop.index, const(v.itemsize))))

    return fill


def reduce_element(reduction: PoolReduction) -> Any:
    """Code for one element of outputs, whose window is reduced in its order: see `PoolRun`."""

    @emitted
    def window(builder: Any, run: PoolRun) -> None:
        e = Reducer(builder, reduction._replace(lanes=1, masked=0), run.integers)
        slot = e.accumulators(1)[0]
        with cgutils.for_range(builder, run.rows) as row, cgutils.for_range(builder, run.cols) as col:
            at = builder.add(run.src, builder.mul(row.index, run.row_step))
            e.accumulate(slot, e.read(builder.add(at, builder.mul(col.index, run.step))))
        e.store_result(builder.load(slot), run.dst, e.scale(run.scales), run.mask)

    return window


# ---------------------------------------------------------------- tiles


class PoolTile(NamedTuple):
    """A tile of neighbouring outputs of a row, in vectors of one pixel each, or of whole pixels that are neighbours."""

    vectors: int  # of outputs
    inner: int  # elements of a pixel; a vector's where it is of one pixel
    kh: int  # rows of a window that are few enough to be unrolled, or 0
    kw: int
    stride: int
    dilation: int
    gathered: int = 0  # 1: a task gathers its source first
    shift: int = 0  # elements read before the first column: so vectors of columns begin at multiples of vectors
    partial: int = 0  # 1: the tile is a whole row, whose last vector has fewer elements
    left: int = 0  # first vectors of columns that some tile has outside the image, or in part
    right: int = 0  # last vectors of columns that some tile has outside the image, or in part

    def picked(self, tap: int, output: int) -> int:
        """The number of the read element that is this tap of an output's window."""
        column = output // self.inner * self.stride + tap * self.dilation
        return self.shift + column * self.inner + output % self.inner

    def span(self, lanes: int) -> int:
        """Vectors from the first that a tile reads to the last."""
        return self.picked(self.kw - 1, self.vectors * lanes - 1) // lanes + 1


def pool_tile(reduction: PoolReduction, tile: PoolTile, border: bool, rows: int = 0) -> Any:
    """Code for a tile: the windows' rows are reduced into vectors of columns, then the columns of each window.

    Each column is loaded once, whatever the number of windows that it is in. Constant shuffles pick columns from
    vectors of several pixels. border: columns outside the image are met; they are masked off, or read from
    `PoolRun.edge`. rows: of a window, if known.
    """
    lanes, span = reduction.lanes, tile.span(reduction.lanes)
    is_wide = tile.inner == lanes
    windows = [
        [[tile.picked(t, k) for k in range(first, first + lanes)] for t in range(tile.kw)]
        for first in range(0, tile.vectors * lanes, lanes)
    ]
    columns = sorted({k // lanes for taps in windows for elements in taps for k in elements})

    @emitted
    def code(builder: Any, run: PoolRun) -> None:
        e = Reducer(builder, reduction, run.integers)
        inside = {}
        for c in columns if border else ():
            if is_wide:
                inside[c] = builder.icmp_unsigned("<", builder.add(run.column, const(c)), run.width)
            elif c < tile.left or c >= span - tile.right:
                inside[c] = _inside(e, run, c * lanes)

        def read(row: Any, v: int) -> Any:
            c = columns[v]
            at = e.after(builder.add(run.src, builder.mul(row, run.row_step)), c, run.step)
            if is_wide:
                return e.read(builder.select(inside[c], at, run.edge) if border else at)
            return e.read(at, inside.get(c))

        def compute() -> _Vectors:
            reduced = dict(zip(columns, e.reduced(len(columns), rows, run.rows, read), strict=True))
            values = []
            for taps in windows:
                value = _pick(e, reduced, taps[0])
                for elements in taps[1:]:
                    value = e.combine(value, _pick(e, reduced, elements))
                values.append(value)
            return values

        def store(values: _Vectors) -> None:
            for k, value in enumerate(values):
                first = 0 if is_wide else k * lanes
                scale = e.scale(e.plus_held(run.scales, k if is_wide else first), is_wide)
                count = builder.sub(run.count, const(first)) if tile.partial and k + 1 == tile.vectors else None
                e.store_result(value, e.after(run.dst, k, run.d_step), scale, e.plus(run.mask, first), count)

        e.guarded(compute, store)

    return code


def _inside(e: Reducer, run: PoolRun, first: int) -> Any:
    """The mask of a vector's elements that are in the image's row; first: its number of elements from the tile's."""
    numbers = ir.Constant(ir.VectorType(I32, e.lanes), [first + lane for lane in range(e.lanes)])
    before, elements = (splat(e.b, e.b.trunc(value, I32), e.lanes) for value in (run.column, run.width))
    return e.b.icmp_unsigned("<", e.b.add(before, numbers), elements)


def _pick(e: Reducer, vectors: dict[int, Any], elements: list[int]) -> Any:
    """A vector of elements of others that follow one another."""
    value, have = None, [0] * e.lanes
    for number in dict.fromkeys(k // e.lanes for k in elements):
        here = [k // e.lanes == number for k in elements]
        if value is None:
            have = [k % e.lanes if mine else -1 for k, mine in zip(elements, here, strict=True)]
            value = vectors[number]
            continue
        chosen = [e.lanes + k % e.lanes if mine else h for k, mine, h in zip(elements, here, have, strict=True)]
        value = shuffle(e.b, value, vectors[number], [0 if k < 0 else k for k in chosen])
        have = [lane if k >= 0 else -1 for lane, k in enumerate(chosen)]
    return value if have == list(range(e.lanes)) else shuffle(e.b, value, value, have)


# ---------------------------------------------------------------- windows


def reduce_window(reduction: PoolReduction, vectors: int, unroll: int) -> Any:
    """Code for one window of any size: `vectors` vectors of `PoolRun.count` channels, `unroll` columns at a time.

    The last vector is moved back to be whole.
    Each row has accumulators of its own: a sum's rounding errors grow with rows plus columns, not with their product.
    """

    @emitted
    def window(builder: Any, run: PoolRun) -> None:
        e = Reducer(builder, reduction, run.integers)
        at = cgutils.alloca_once(builder, I64)
        last = builder.mul(builder.sub(run.count, const(reduction.lanes)), const(e.memory.itemsize))
        offsets = [*(const(v * e.memory.bytes) for v in range(vectors - 1)), last]
        parts = (unroll, builder.sdiv(run.cols, const(unroll))), (1, builder.srem(run.cols, const(unroll)))

        def compute() -> _Vectors:
            totals = e.accumulators(vectors)
            with cgutils.for_range(builder, run.rows) as loop:
                builder.store(builder.add(run.src, builder.mul(loop.index, run.row_step)), at)
                slots = e.accumulators(unroll * vectors)
                for width, count in parts:
                    with cgutils.for_range(builder, count):
                        here = builder.load(at)
                        for c in range(width):
                            for v, offset in enumerate(offsets):
                                address = builder.add(e.after(here, c, run.step), offset)
                                e.accumulate(slots[c * vectors + v], e.read(address))
                        builder.store(e.after(here, width, run.step), at)
                for i, slot in enumerate(slots):
                    e.accumulate(totals[i % vectors], builder.load(slot))
            return [builder.load(slot) for slot in totals]

        def store(values: _Vectors) -> None:
            for offset, value in zip(offsets, values, strict=True):
                dst, mask = (builder.add(x, offset) for x in (run.dst, run.mask))
                e.store_result(value, dst, e.scale(run.scales), mask)

        e.guarded(compute, store)

    return window


# ---------------------------------------------------------------- lines


class LineSpec(NamedTuple):
    """Code for neighbouring vectors, each reduced with the vectors a few `PoolRun.row_step` after it."""

    vectors: int = 1
    taps: int = 0  # if known
    held: int = 0  # 1: of a line in the scratch, of the held type; 0: of the image
    inner: int = 0  # elements of a pixel, if the pixels of a vector are not neighbours in the line
    stride: int = 1  # such pixels' distance; 1: a vector's elements are neighbours
    partial: int = 0  # 1: only `PoolRun.count` elements of one vector exist
    result: int = 0  # 1: results are stored, scaled and masked; 0: they are a line
    spread: int = 0  # 1: a vector has one scale; else each lane has its own
    checked: int = 0  # bit t: tap t is read only where its flags are not zero
    guarded: int = 0  # 1: see `Reducer.guarded`


def reduce_line(reduction: PoolReduction, spec: LineSpec) -> Any:
    """Code for the rows of windows, which become a line of scratch, or for columns, of the image or of a line."""
    used = reduction.lanes if spec.stride == 1 else reduction.lanes // spec.inner * spec.inner

    @emitted
    def line(builder: Any, run: PoolRun) -> None:
        e = Reducer(builder, reduction, run.integers)
        flags_kind = ir.VectorType(ir.IntType(8), e.lanes)
        count = run.count if spec.partial else None
        keep = e.below(count) if spec.partial and not spec.held else None

        def read(tap: Any, v: int) -> Any:
            at = e.after(builder.add(run.src, builder.mul(tap, run.row_step)), v, run.step)
            if spec.held:
                return e.read_pixels(at, spec.inner, spec.stride)
            mask = keep
            if spec.checked and spec.checked >> tap.constant & 1:
                flags = builder.add(builder.add(run.edge, builder.mul(tap, run.edge_step)), const(v * e.lanes))
                flags = builder.load(pointer(builder, flags, flags_kind), align=1)
                inside = builder.icmp_unsigned("!=", flags, ir.Constant(flags_kind, None))
                mask = inside if keep is None else builder.and_(inside, keep)
            return e.read(at, mask)

        def store(values: _Vectors) -> None:
            for v, value in enumerate(values):
                to, first = e.after(run.dst, v, run.d_step), 0 if spec.spread else v * used
                if not spec.result:
                    e.store(value, to, keep)
                    continue
                scale = e.scale(e.plus_held(run.scales, v if spec.spread else first), bool(spec.spread))
                e.store_result(value, to, scale, e.plus(run.mask, first), count)

        def compute() -> _Vectors:
            return e.reduced(spec.vectors, spec.taps, run.rows, read)

        if spec.guarded:
            e.guarded(compute, store)
        else:
            store(compute())

    return line


# ---------------------------------------------------------------- whole planes


def reduce_plane(reduction: PoolReduction, inner: int) -> Any:
    """Code for all pixels of a plane of narrow pixels (`inner` elements, at most a vector's), into one vector.

    The plane is `runs` times `run` groups of four vectors, then `left` elements.

    Vectors start at whole pixels, so that a lane holds one channel (and lanes past the last whole pixel of a vector
    nothing of use).
    """
    lanes = reduction.lanes
    used = lanes // inner * inner

    @emitted
    def plane(builder: Any, src: Any, runs: Any, run: Any, left: Any, dst: Any, integers: Any) -> None:
        e = Reducer(builder, reduction, integers)
        at = cgutils.alloca_once(builder, I64)
        slots = [cgutils.alloca_once(builder, e.kind) for _ in range(4)]
        # A vector with lanes to spare may not read past the plane.
        whole = builder.sdiv(builder.sub(left, const(lanes - used)), const(used))
        rest = builder.sub(left, builder.mul(whole, const(used)))
        rests = [builder.sub(rest, const(first)) for first in range(0, lanes - 1, used)]
        masks = [e.below(builder.select(builder.icmp_signed("<", n, const(used)), n, const(used))) for n in rests]

        def advance(vectors: int) -> _Vectors:
            here = builder.load(at)
            builder.store(e.plus(here, vectors * used), at)
            return [e.read(e.plus(here, v * used)) for v in range(vectors)]

        def compute() -> _Vectors:
            builder.store(src, at)
            total = e.accumulators(1)[0]
            with cgutils.for_range(builder, runs):
                for slot in slots:
                    builder.store(e.c(e.identity), slot)
                with cgutils.for_range(builder, run):
                    for slot, value in zip(slots, advance(4), strict=True):
                        e.accumulate(slot, value)
                for slot in slots:
                    e.accumulate(total, builder.load(slot))
            with cgutils.for_range(builder, whole):
                e.accumulate(total, advance(1)[0])
            for k, (count, mask) in enumerate(zip(rests, masks, strict=True)):
                with builder.if_then(builder.icmp_signed(">", count, const(0))):
                    e.accumulate(total, e.read(e.plus(builder.load(at), k * used), mask))
            return [builder.load(total)]

        e.guarded(compute, lambda values: e.store(values[0], dst))

    return plane


def fold_planes(reduction: PoolReduction, planes: int) -> Any:
    """Code for vectors of `planes` planes (a power of two), each folded onto its first lanes, which become one vector.

    Two vectors are folded at a time: their lower halves, side by side, with their upper halves.
    """
    lanes = reduction.lanes

    @emitted
    def fold(builder: Any, src: Any, dst: Any, scale: Any, integers: Any) -> None:
        e = Reducer(builder, reduction, integers)

        def compute() -> _Vectors:
            vectors = [e.read_held(e.plus_held(src, k * lanes)) for k in range(planes)]
            part = lanes
            while len(vectors) > 1:
                part //= 2
                halves = [[k for k in range(2 * lanes) if k // part % 2 == half] for half in (0, 1)]
                pairs = zip(vectors[::2], vectors[1::2], strict=True)
                vectors = [e.combine(*(shuffle(builder, a, b, half) for half in halves)) for a, b in pairs]
            return vectors

        def store(values: _Vectors) -> None:
            e.store_result(values[0], dst, e.scale(scale), None)

        e.guarded(compute, store)

    return fold


# ---------------------------------------------------------------- maxima and their indices


class IndexRun(NamedTuple):
    """The arguments of `max_with_index`."""

    src: Any  # the first window's first pixel; columns before the image can be read, and no maximum is in them
    rows: Any
    row_step: Any
    cols: Any
    col_step: Any
    index: Any  # the index of that pixel
    index_row: Any  # from an index to the index one row below
    index_col: Any  # and of the next column
    column: Any  # that pixel's column
    dst: Any
    idx: Any  # where indices are stored, int64s
    mask: Any  # address of zero bits for channels that do not exist
    count: Any  # elements of the vector that are stored


def max_with_index(reduction: PoolReduction, inner: int = 0, stride: int = 0, dilation: int = 1) -> Any:
    """Code for a vector of windows: their maxima and where these are; the first of equals, the last of NaNs.

    inner: elements of a pixel, if a vector holds several pixels, whose windows begin `stride` columns apart, or 0.
    dilation: columns between taps of such a window. Indices of vectors are counted in 32 bits.
    """
    lanes = reduction.lanes
    indices = ir.VectorType(I64 if lanes == 1 else I32, lanes)
    zero, apart = ir.Constant(indices, None), ir.Constant(indices, [dilation] * lanes)
    columns = ir.Constant(indices, [lane // inner * stride if inner else 0 for lane in range(lanes)])

    @emitted
    def maxima(builder: Any, run: IndexRun) -> None:
        e, wide = Reducer(builder, reduction), Vectors(builder, ElementType.of(8 + 16), lanes)

        def of_lanes(first: Any) -> Any:
            return builder.add(splat(builder, builder.trunc(first, indices.element), lanes), columns)

        most, where = e.accumulators(1)[0], cgutils.alloca_once(builder, indices)
        # If no element is more than the least value, the index is the window's first column inside the image.
        outside = builder.sub(ir.Constant(indices, [dilation - 1] * lanes), of_lanes(run.column))
        outside = builder.mul(builder.sdiv(outside, apart), apart)
        outside = builder.select(builder.icmp_signed(">", outside, zero), outside, zero)
        builder.store(builder.add(of_lanes(run.index), outside), where)
        with cgutils.for_range(builder, run.rows) as y, cgutils.for_range(builder, run.cols) as x:
            at = builder.add(run.src, builder.mul(y.index, run.row_step))
            at = builder.add(at, builder.mul(x.index, run.col_step))
            index = builder.add(run.index, builder.mul(y.index, run.index_row))
            index = builder.add(index, builder.mul(x.index, run.index_col))
            value = e.read_pixels(at, inner, stride) if inner else e.read(at)
            more = e.more(value, held := builder.load(most))
            if e.type.is_float:
                more = builder.or_(more, builder.fcmp_unordered("uno", value, value))
            builder.store(builder.select(more, value, held), most)
            builder.store(builder.select(more, of_lanes(index), builder.load(where)), where)
        value, index = e.in_memory(builder.load(most)), builder.load(where)
        if e.is_masked:
            bits = ir.VectorType(ir.IntType(8 * e.memory.itemsize), lanes)
            exist = builder.load(pointer(builder, run.mask, bits), align=1)
            exist = builder.icmp_signed("!=", exist, ir.Constant(bits, None))
            value, index = e.memory.with_zero_bits(value, run.mask), builder.select(exist, index, zero)
        e.memory.store(value, run.dst, e.below(run.count))
        wide.store(builder.sext(index, wide.kind), run.idx, wide.below(run.count))

    return maxima
