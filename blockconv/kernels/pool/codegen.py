"""Pooling's vector code: a maximum or a sum of elements, by vectors and one by one, as LLVM IR.

Every function reduces vectors at run-time strides, in several accumulators, so that no operation waits for the one
before it.

A `PoolReduction` and a ``...Spec`` hold the parameters that a kernel is built for, a ``...Run`` the arguments of a
call. Addresses and steps between elements of memory are in bytes.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv.jit.ir import I64, const, emitted
from blockconv.kernels.pool.reduction import PoolReduction, Reducer

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
    """Code for one element of outputs, whose window is reduced in its order: see `WindowRun`."""

    @emitted
    def window(builder: Any, run: WindowRun) -> None:
        e = Reducer(builder, reduction._replace(lanes=1, masked=0), run.integers)
        slot = e.accumulators(1)[0]
        with cgutils.for_range(builder, run.rows) as row, cgutils.for_range(builder, run.cols) as col:
            at = builder.add(run.src, builder.mul(row.index, run.row_step))
            e.accumulate(slot, e.read(builder.add(at, builder.mul(col.index, run.col_step))))
        e.store_result(builder.load(slot), run.dst, e.scale(run.scale), run.mask)

    return window


# ---------------------------------------------------------------- wide pixels


class PoolTileSpec(NamedTuple):
    """A tile of neighbouring outputs of one row, a vector of channels each."""

    pixels: int  # outputs
    taps: int  # columns of a window
    stride: int  # columns between windows
    dilation: int  # columns between taps
    border: int  # 1: columns outside the image are met, and read from `PoolTileRun.fill`
    rows: int  # of a window, if known, or 0


class PoolTileRun(NamedTuple):
    """The arguments of `pool_tile`."""

    src: Any  # the channel of the first column, in the first row that exists
    rows: Any  # of the windows
    row_step: Any
    col_step: Any
    column: Any  # the first column's number
    width: Any  # columns of the image
    fill: Any  # address of a vector that changes no result
    dst: Any  # the first output
    d_step: Any  # from an output to the next
    scales: Any  # address of the scale of each output's sum
    mask: Any  # address of zero bits for channels that do not exist
    integers: Any  # address of the `PoolQuantization`


def pool_tile(reduction: PoolReduction, spec: PoolTileSpec) -> Any:
    """Code for a tile: the windows' rows are reduced into a vector a column, then the columns of each window.

    Each column is loaded once, whatever the number of windows that it is in.
    """
    windows = [[p * spec.stride + t * spec.dilation for t in range(spec.taps)] for p in range(spec.pixels)]
    columns = sorted({c for window in windows for c in window})

    @emitted
    def tile(builder: Any, run: PoolTileRun) -> None:
        e = Reducer(builder, reduction, run.integers)
        inside = {}
        for c in columns if spec.border else ():
            inside[c] = builder.icmp_unsigned("<", builder.add(run.column, const(c)), run.width)

        def read(row: Any, v: int) -> Any:
            c = columns[v]
            at = e.after(builder.add(run.src, builder.mul(row, run.row_step)), c, run.col_step)
            return e.read(builder.select(inside[c], at, run.fill) if spec.border else at)

        def compute() -> _Vectors:
            reduced = dict(zip(columns, e.reduced(len(columns), spec.rows, run.rows, read), strict=True))
            values = []
            for window in windows:
                value = reduced[window[0]]
                for c in window[1:]:
                    value = e.combine(value, reduced[c])
                values.append(value)
            return values

        def store(values: _Vectors) -> None:
            for p, value in enumerate(values):
                scale = e.scale(e.plus_held(run.scales, p))
                e.store_result(value, e.after(run.dst, p, run.d_step), scale, run.mask)

        e.guarded(compute, store)

    return tile


class WindowRun(NamedTuple):
    """The arguments of `reduce_window`."""

    src: Any  # the window's first pixel that exists
    rows: Any
    row_step: Any
    cols: Any
    col_step: Any
    dst: Any
    scale: Any  # address of a sum's scale
    mask: Any  # address of zero bits for channels that do not exist
    last: Any  # from the first vector to the last, which may overlap the one before, in bytes
    integers: Any  # address of the `PoolQuantization`


def reduce_window(reduction: PoolReduction, vectors: int, unroll: int) -> Any:
    """Code for one window of any size: `vectors` vectors of its channels, `unroll` columns at a time.

    Each row has accumulators of its own: a sum's rounding errors grow with rows plus columns, not with their product.
    """

    @emitted
    def window(builder: Any, run: WindowRun) -> None:
        e = Reducer(builder, reduction, run.integers)
        at = cgutils.alloca_once(builder, I64)
        offsets = [*(const(v * e.memory.bytes) for v in range(vectors - 1)), run.last]
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
                                address = builder.add(e.after(here, c, run.col_step), offset)
                                e.accumulate(slots[c * vectors + v], e.read(address))
                        builder.store(e.after(here, width, run.col_step), at)
                for i, slot in enumerate(slots):
                    e.accumulate(totals[i % vectors], builder.load(slot))
            return [builder.load(slot) for slot in totals]

        def store(values: _Vectors) -> None:
            for offset, value in zip(offsets, values, strict=True):
                dst, mask = (builder.add(x, offset) for x in (run.dst, run.mask))
                e.store_result(value, dst, e.scale(run.scale), mask)

        e.guarded(compute, store)

    return window
