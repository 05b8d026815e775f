"""Pools of rows of pixels that are no whole vectors: tiles of contiguous outputs, whose taps are shuffled in registers.

Vectors hold whole rows' elements, whatever pixel they are of, so that no lane is idle (blocks of 4, 12, 24 channels).
The rows of windows are reduced first, by vectors of neighbouring elements. Constant shuffles then pick each tap of the
windows' columns from these vectors.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir

from blockconv import jit
from blockconv.jit.arguments import word
from blockconv.jit.ir import I32, const, emitted, shuffle, splat
from blockconv.kernels.pool.kernels import PoolArgs, output_row, start
from blockconv.kernels.pool.reduction import PoolReduction, Reducer


class ShuffledTile(NamedTuple):
    """The shape of a tile: vectors of outputs, of the pixels of one row."""

    vectors: int
    inner: int  # elements of a pixel
    kh: int  # rows of a window that are few enough to be unrolled, or 0
    kw: int
    stride: int
    dilation: int
    shift: int  # elements read before the first column: so vectors of columns begin at multiples of vectors of the row
    partial: int  # 1: the tile is a whole row, whose last vector has fewer elements
    left: int = 0  # first vectors of columns that some tile has outside the image, or in part
    right: int = 0  # last vectors of columns that some tile has outside the image, or in part

    def picked(self, tap: int, output: int) -> int:
        """The number of the read element that is this tap of an output's window."""
        column = output // self.inner * self.stride + tap * self.dilation
        return self.shift + column * self.inner + output % self.inner

    def columns(self, lanes: int) -> int:
        """How many vectors are read: of neighbouring elements, which include all windows of a tile."""
        return self.picked(self.kw - 1, self.vectors * lanes - 1) // lanes + 1


class ShufflesArgs(PoolArgs):
    """Tiles of contiguous outputs."""

    part = word("of a row of outputs, which is computed for all rows of a task before the next", "elements")
    parts = word("of a row")


class ShuffledRun(NamedTuple):
    """The arguments of `pool_shuffled`. Addresses and steps are in bytes."""

    src: Any  # the first element that is read, in the first row that exists
    rows: Any  # of the windows
    row_step: Any
    before: Any  # elements of the row before that, negative where it is outside
    elements: Any  # of a row of the image
    dst: Any
    scales: Any  # address of the scale of each element's sum
    mask: Any  # address of zero bits for channels that do not exist
    count: Any  # elements that are stored, of a partial tile


def pool_shuffled(reduction: PoolReduction, tile: ShuffledTile, border: bool, rows: int = 0) -> Any:
    """Code for a tile. border: columns outside the image are met. rows: of a window, if known."""
    lanes = reduction.lanes
    columns = tile.columns(lanes)

    @emitted
    def shuffled(builder: Any, run: ShuffledRun) -> None:
        e = Reducer(builder, reduction)
        borders = [*range(tile.left), *range(columns - tile.right, columns)] if border else []
        inside = {k: _inside(e, run, k * lanes) for k in borders}

        def read(row: Any, k: int) -> Any:
            at = e.plus(builder.add(run.src, builder.mul(row, run.row_step)), k * lanes)
            return e.read(at, inside.get(k))

        def compute() -> list[Any]:
            reduced = e.reduced(columns, rows, run.rows, read)
            values = []
            for first in range(0, tile.vectors * lanes, lanes):
                taps = [[tile.picked(t, k) for k in range(first, first + lanes)] for t in range(tile.kw)]
                value = _pick(e, reduced, taps[0])
                for tap in taps[1:]:
                    value = e.combine(value, _pick(e, reduced, tap))
                values.append(value)
            return values

        def store(values: list[Any]) -> None:
            for k, value in enumerate(values):
                scale = e.load(e.plus(run.scales, k * lanes)) if e.is_sum else None
                count = None
                if tile.partial and k + 1 == tile.vectors:
                    count = builder.sub(run.count, const(k * lanes))
                e.store_result(value, e.plus(run.dst, k * lanes), scale, e.plus(run.mask, k * lanes), count)

        e.guarded(compute, store)

    return shuffled


def _inside(e: Reducer, run: ShuffledRun, first: int) -> Any:
    """The mask of a vector's elements that are in the image's row; first: its number of elements from the tile's."""
    numbers = ir.Constant(ir.VectorType(I32, e.lanes), [first + lane for lane in range(e.lanes)])
    before, elements = (splat(e.b, e.b.trunc(value, I32), e.lanes) for value in (run.before, run.elements))
    return e.b.icmp_unsigned("<", e.b.add(before, numbers), elements)


def _pick(e: Reducer, vectors: list[Any], elements: list[int]) -> Any:
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


@jit.kernel
def pool_shuffles(reduction: PoolReduction, shape: ShuffledTile):
    """A task is rows of outputs, by tiles of vectors of them. A row's last tile is moved back to be whole."""
    lanes, masked, itemsize = reduction.lanes, reduction.masked, reduction.itemsize
    inner, kh, stride, shift, width = shape.inner, shape.kh, shape.stride, shape.shift, shape.vectors * lanes
    span = shape.columns(lanes) * lanes
    inner_tile, border_tile = (pool_shuffled(reduction, shape, border, kh) for border in (False, True))
    any_tile = pool_shuffled(reduction, shape, True)

    def kernel(args, first, last, scratch):
        a = ShufflesArgs(args)
        elements, outputs, pw, row_step, period = a.iw * inner, a.ow * inner, a.pw, a.row_step, a.mask_period
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for number in range(a.parts):
                part = number * a.part
                for oh in range(oh_first, oh_last):
                    row = output_row(a, plane, oh)
                    for at in range(part, min(outputs, part + a.part), width):
                        done = max(0, min(at, outputs - width))
                        before = done * stride - pw * inner - shift
                        here = done * itemsize
                        run = ShuffledRun(
                            src=row.src + before * itemsize,
                            rows=row.rows,
                            row_step=row_step,
                            before=before,
                            elements=elements,
                            dst=row.dst + here,
                            scales=row.scales + here,
                            mask=plane.mask + here % period if masked else 0,
                            count=outputs,
                        )
                        if kh == 0 or row.rows != kh:
                            any_tile(run)
                        elif before >= 0 and before + span <= elements:
                            inner_tile(run)
                        else:
                            border_tile(run)

    return kernel
