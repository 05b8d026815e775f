"""Pooling's vector code: a maximum or a sum of elements, by vectors and one by one.

Every function reduces vectors at run-time strides, in several accumulators, so that no operation waits for the one
before it. `e` is the `Reducer` of a kernel. A tile or `LineSpec` holds what is known of a kernel, a `PoolRun` the rest.
"""

import functools
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core.types import element
from blockconv.jit.ir import I32, I64, const, emitted, picked, pointer, shuffle, splat
from blockconv.jit.values import build, truth
from blockconv.kernels.common.vectors import Vectors, lanes_inside
from blockconv.kernels.pool.reduction import Reducer

_Vectors = list[Any]


class PoolRun(NamedTuple):
    """The arguments of a tile or a line: addresses, and steps between elements in bytes. Each reads some of them."""

    src: Any  # the first element that is read
    step: Any  # from a vector that is read, or a column, to the next
    rows: Any  # of the windows, or columns of a line
    row_step: Any
    dst: Any
    d_step: Any  # from a vector of outputs to the next
    scales: Any = 0  # address of the scales of sums
    mask: Any = 0  # address of zero bits for channels that do not exist
    count: Any = 0  # elements that are read or stored
    # Address of a vector that columns outside read, or of a byte for each element: whether it is read.
    edge: Any = 0
    edge_step: Any = 0  # from a tap's such bytes to the next's
    column: Any = 0  # the first column's number
    width: Any = 0  # columns of the image
    cols: Any = 0  # of the windows
    index: Any = 0  # the index of the first element that is read
    idx: Any = 0  # where indices are stored, int64s


# ---------------------------------------------------------------- one element at a time


def reduce_element(one, run, cols):
    """One element of outputs, whose window is reduced in its order."""
    total = one.neutral
    for row in range(run.rows):
        for col in range(cols):
            total = one.combine(total, one.read(run.src + row * run.row_step + col * run.step))
    one.store_result(total, run.dst, one.scale(run.scales), run.mask)


# ---------------------------------------------------------------- tiles


@dataclass(frozen=True)
class PoolTile:
    """A tile of neighbouring outputs of a row, in vectors of one pixel each, or of whole pixels that are neighbours."""

    vectors: int  # of outputs
    inner: int  # elements of a pixel; a vector's where it is of one pixel
    kh: int  # rows of a window that are few enough to be unrolled, or 0
    kw: int
    stride: int
    dilation: int
    shift: int = 0  # elements read before the first column: so vectors of columns begin at multiples of vectors
    partial: int = 0  # 1: the tile is a whole row, whose last vector has fewer elements
    left: int = 0  # first vectors of columns that some tile has outside the image, or in part
    right: int = 0  # last vectors of columns that some tile may have outside the image, or in part

    def picked(self, tap: int, output: int) -> int:
        """The number of the read element that is this tap of an output's window."""
        column = output // self.inner * self.stride + tap * self.dilation
        return self.shift + column * self.inner + output % self.inner

    def span(self, lanes: int) -> int:
        """Vectors from the first that a tile reads to the last."""
        return self.picked(self.kw - 1, self.vectors * lanes - 1) // lanes + 1


@emitted
def reduce_tile(e: Reducer, tile: PoolTile, border: bool, rows: int, run: PoolRun) -> None:
    """A tile: the windows' rows are reduced into vectors of columns, then the columns of each window.

    Each column is loaded once, whatever the number of windows that it is in. Constant shuffles pick columns from
    vectors of several pixels. border: columns outside the image are met; they are masked off, or read from
    `PoolRun.edge`. rows: of a window, if known.
    """
    lanes, span = e.memory.lanes, tile.span(e.memory.lanes)
    is_wide = tile.inner == lanes
    windows = [
        [[tile.picked(t, k) for k in range(first, first + lanes)] for t in range(tile.kw)]
        for first in range(0, tile.vectors * lanes, lanes)
    ]
    columns = sorted({k // lanes for taps in windows for elements in taps for k in elements})
    inside = {}
    for c in columns if border else ():
        if is_wide:
            inside[c] = build.icmp_unsigned("<", run.column + c, run.width)
        elif c < tile.left or c >= span - tile.right:
            inside[c] = lanes_inside(lanes, run.column, run.width, c * lanes)

    def read(row, v: int):
        c = columns[v]
        at = run.src + row * run.row_step + c * run.step
        if is_wide:
            return e.read(build.select(inside[c], at, run.edge) if border else at)
        return e.read(at, inside.get(c))

    def compute() -> _Vectors:
        reduced = dict(zip(columns, e.reduced(len(columns), rows, run.rows, read), strict=True))
        values = []
        for taps in windows:
            found = (picked(e.kind, elements, reduced.__getitem__) for elements in taps)
            values.append(functools.reduce(e.combine, found))
        return values

    def store(values: _Vectors) -> None:
        for k, value in enumerate(values):
            first = 0 if is_wide else k * lanes
            scale = e.scale(e.plus_held(run.scales, k if is_wide else first), is_wide)
            count = run.count - first if tile.partial and k + 1 == tile.vectors else None
            e.store_result(value, run.dst + k * run.d_step, scale, e.plus(run.mask, first), count)

    e.guarded(compute, store)


# ---------------------------------------------------------------- windows


def reduce_window(e, vectors, unroll, run, cols, last):
    """One window of any size: `vectors` vectors of channels, `unroll` columns at a time.

    The last vector is moved back to be whole. last: bytes to it.
    Each row has accumulators of its own: a sum's rounding errors grow with rows plus columns, not with their product.
    """
    totals = e.accumulators(vectors)
    for row in range(run.rows):
        at, slots = run.src + row * run.row_step, e.accumulators(unroll * vectors)
        for _ in range(cols // unroll):
            for_columns(e, slots, vectors, at, run.step, last)
            at += unroll * run.step
        for _ in range(cols % unroll):
            for_columns(e, slots[:vectors], vectors, at, run.step, last)
            at += run.step
        e.fold_into(totals, slots)
    return e.loaded(totals)


@emitted
def for_columns(e: Reducer, slots: _Vectors, vectors: int, at, step, last) -> None:
    """Reduce the vectors of neighbouring columns into slots, one for each. last: bytes to a column's last vector."""
    for k, slot in enumerate(slots):
        c, v = divmod(k, vectors)
        e.accumulate(slot, e.read(at + c * step + (last if v + 1 == vectors else const(v * e.memory.bytes))))


@emitted
def store_window(e: Reducer, values: _Vectors, run: PoolRun, last) -> None:
    """Store the vectors of a window. last: bytes to the last one."""
    for v, value in enumerate(values):
        offset = last if v + 1 == len(values) else const(v * e.memory.bytes)
        e.store_result(value, run.dst + offset, e.scale(run.scales), run.mask + offset)


# ---------------------------------------------------------------- lines


@dataclass(frozen=True)
class LineSpec:
    """Neighbouring vectors, each reduced with the vectors a few `PoolRun.row_step` after it."""

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


@emitted
def reduce_line(e: Reducer, spec: LineSpec, run: PoolRun) -> None:
    """The rows of windows, which become a line of scratch, or the columns of windows, of the image or of a line."""
    used = e.memory.lanes if spec.stride == 1 else e.memory.lanes // spec.inner * spec.inner
    flags_kind = ir.VectorType(ir.IntType(8), e.lanes)
    count = run.count if spec.partial else None
    keep = e.below(count) if spec.partial and not spec.held else None

    def read(tap, v: int):
        at = run.src + tap * run.row_step + v * run.step
        if spec.held:
            return e.read_pixels(at, spec.inner, spec.stride)
        mask = keep
        if spec.checked and spec.checked >> tap.constant & 1:
            flags = run.edge + tap * run.edge_step + v * e.lanes
            flags = build.load(pointer(flags, flags_kind), align=1)
            inside = truth(flags)
            mask = inside if keep is None else inside & keep
        return e.read(at, mask)

    def store(values: _Vectors) -> None:
        for v, value in enumerate(values):
            to, first = run.dst + v * run.d_step, 0 if spec.spread else v * used
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


# ---------------------------------------------------------------- whole planes


def reduce_plane(e, used, at, elements):
    """All pixels of a plane, whose elements are contiguous, into one vector.

    A vector holds `used` elements of whole pixels, so that a lane holds one channel. The other lanes hold nothing of
    use, and no vector reads past the plane. A sum's accumulators begin anew after 16 groups of four vectors.
    """
    spare, group, size, total = e.lanes - used, 4 * used, used * e.memory.itemsize, e.accumulators(1)
    groups = max(0, elements - spare) // group
    each = min(groups, 16)
    runs = max(min(groups, 1), groups // 16)
    for _ in range(runs):
        slots = e.accumulators(4)
        for _ in range(each):
            e.feed(slots, at, size)
            at += 4 * size
        e.fold_into(total, slots)
    left = elements - runs * each * group
    whole = max(0, left - spare) // used
    for _ in range(whole):
        e.feed(total, at, size)
        at += size
    left -= whole * used
    for first in range(0, e.lanes - 1, used):
        if left > first:
            e.feed(total, at + first * e.memory.itemsize, size, min(left - first, used))
    return e.loaded(total)


@emitted
def fold_pixels(e: Reducer, outputs: int, inner: int, used: int, partial: int, run: PoolRun) -> None:
    """Store the pixels of `outputs` planes, a power of two. The scratch has a vector of `reduce_plane` for each.

    Two vectors are folded at a time: their lower halves, side by side, with their upper halves.
    """
    lanes = e.lanes

    def compute() -> _Vectors:
        vectors, part = [e.read_held(e.plus_held(run.src, k * lanes)) for k in range(outputs)], used
        while part > inner:
            part //= 2
            halves = [
                [first + k for first in (0, lanes) for k in range(used) if k // part % 2 == half] + [0] * (lanes - used)
                for half in (0, 1)
            ]
            pairs = zip(vectors[::2], vectors[1::2] or vectors, strict=True)
            vectors = [e.combine(*(shuffle(x, y, half) for half in halves)) for x, y in pairs]
        return vectors

    count = run.count if partial else None
    e.guarded(compute, lambda values: e.store_result(values[0], run.dst, e.scale(run.scales), run.mask, count))


# ---------------------------------------------------------------- maxima and their indices


def max_with_index(e, a, run, inner, stride, dilation):
    """A vector of windows: their maxima and where these are; the first of equals, the last of NaNs.

    run: columns before the image can be read, and no maximum is in them. inner: elements of a pixel, if a vector holds
    several pixels, whose windows begin `stride` columns apart, or 0. dilation: columns between taps of such a window.
    If no element is more than the least value, the index is the window's first column inside the image.
    """
    most, where = e.neutral, indices(e, run.index, inner, stride)
    if inner:
        where = where + columns_outside(indices(e, run.column, inner, stride), dilation)
    for y in range(run.rows):
        for x in range(run.cols):
            at = run.src + y * run.row_step + x * run.step
            value = e.read_pixels(at, inner, stride) if inner else e.read(at)
            index = indices(e, run.index + y * (a.dh * a.iw) + x * a.dw, inner, stride)
            more = e.is_taken(value, most)
            most, where = build.select(more, value, most), build.select(more, index, where)
    store_maxima(e, most, where, run)


@emitted
def indices(e: Reducer, first, inner: int, stride: int):
    """The index of each lane's window. first: the index of the first window. Vectors have indices of 32 bits."""
    kind = ir.VectorType(I64 if e.lanes == 1 else I32, e.lanes)
    columns = [lane // inner * stride if inner else 0 for lane in range(e.lanes)]
    return splat(build.trunc(first, kind.element), e.lanes) + ir.Constant(kind, columns)


@emitted
def columns_outside(column, dilation: int):
    """Columns of each window before the image. column: the number of its first one."""
    outside = build.sdiv(dilation - 1 - column, ir.Constant(column.type, dilation)) * dilation
    return build.select(outside > 0, outside, ir.Constant(column.type, None))


@emitted
def store_maxima(e: Reducer, most, where, run: PoolRun) -> None:
    """Store maxima and their indices."""
    value, wide = e.in_memory(most), Vectors(element("int64"), e.lanes)
    if e.is_masked:
        bits = ir.VectorType(ir.IntType(8 * e.memory.itemsize), e.lanes)
        exist = truth(build.load(pointer(run.mask, bits), align=1))
        value, where = (
            e.memory.with_zero_bits(value, run.mask),
            build.select(exist, where, ir.Constant(where.type, None)),
        )
    e.memory.store(value, run.dst, e.below(run.count))
    wide.store(build.sext(where, wide.kind), run.idx, wide.below(run.count))
