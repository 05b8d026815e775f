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

from blockconv.jit.ir import I32, I64, const, emitted, shuffle, splat
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
