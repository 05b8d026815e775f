"""What Winograd's kernels load, transform and store, as LLVM vector IR: a vector is channels of one tile.

Each function here takes what is known when a kernel is built, and returns code that the kernel calls with a named
tuple of addresses and strides in bytes. The arithmetic of the transforms is that of
`blockconv.kernels.winograd.transforms`.

Sources of bytes become integers of 16 bits, which hold all that their transform can be: ten times ten times 255.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.ir import I64, const, emitted, join, pointer, shuffle, transpose
from blockconv.kernels.common.halves import widened
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.winograd.transforms import TAPS, Form, source_1d, transform_2d, weights_1d

__all__ = [
    "ELEMENT",
    "SUM",
    "WORD",
    "Planes",
    "SharedProducts",
    "SourceTile",
    "Taps",
    "gather_planes",
    "gather_planes_unmasked",
    "gather_planes_whole",
    "multiples",
    "multiply_shared",
    "source_transform",
    "weight_transform",
]

ELEMENT = element("float32")  # what kernels of floats compute with
WORD, SUM = element("int16"), element("int32")  # what a source of bytes is transformed to, and products are


def multiples(builder: Any, start: Any, step: Any, count: int) -> list[Any]:
    """start, start + step, ..."""
    return [start, *(builder.add(start, builder.mul(step, const(k))) for k in range(1, count))]


def _table(builder: Any, address: Any, count: int) -> list[Any]:
    """So many int64s at an address."""
    first = pointer(builder, address, I64)
    return [builder.load(builder.gep(first, [const(k)]), align=8) for k in range(count)]


# ---------------------------------------------------------------- source


class SourceTile(NamedTuple):
    """A tile of the source, and where its transform goes."""

    src: int  # the address of the tile's first pixel
    src_row: int
    src_col: int
    src_part: int  # from the channels that one load takes to the next such; or the address of a table (`has_parts`)
    dst: int  # the address of the transform's first position
    dst_position: int  # from a position to the next


@functools.cache
def source_transform(form: Form, lanes: int, load_width: int, fma: int, has_parts: int, src: int) -> Any:
    """Code that transforms `lanes` channels of a `SourceTile`, of which each load takes `load_width`.

    src: the code of its elements' type, float32, one of floats of 16 bits, which become float32, or one of bytes, which
    become int16.
    has_parts: what a load takes is not evenly far from the next, and a table has how far each is from the first.
    """

    @emitted
    def transform(builder: Any, tile: Any) -> None:
        type = ElementType.of(src)
        memory = Vectors(builder, type, lanes, bool(fma))
        v = Vectors(builder, WORD if form.exact else ELEMENT, lanes, bool(fma))
        rows = multiples(builder, tile.src, tile.src_row, form.side)
        parts = _table(builder, tile.src_part, lanes // load_width) if has_parts else []

        def load(at: Any) -> Any:
            if has_parts:
                found = join(builder, [memory.load(builder.add(at, part), lanes=load_width) for part in parts])
            else:
                found = memory.load_parts(at, load_width, tile.src_part)
            if type.is_half:
                return widened(v, type, found)
            if not form.exact:
                return found
            return (builder.sext if type.kind == SIGNED else builder.zext)(found, v.kind)

        def column(k: int) -> list[Any]:
            offset = builder.mul(tile.src_col, const(k))
            return [load(builder.add(row, offset)) for row in rows]

        positions = transform_2d(v, source_1d, form, column, form.side)
        _store_positions(v, (value for row in positions for value in row), tile)

    return transform


class Planes(NamedTuple):
    """A row of pixels of a source whose channels are planes (NCHW), and where they go as vectors of channels."""

    src: int  # the address of the row's first pixel in the first channel; of any pixel where none is in bounds
    src_channel: int
    src_end: int  # of the array
    left: int  # the first column that is in bounds
    right: int  # the one after the last
    valid: int  # channels that exist
    border: int  # the address of what stands out of bounds
    dst: int


@functools.cache
def gather_planes(pixels: int, lanes: int, type: int) -> Any:
    """Code that gathers a row of so many pixels of `Planes`: a vector of channels each, one behind the other.

    type: the code of their elements' type. Pixels out of bounds become zero, as do channels that do not exist; neither
    is read.
    """
    columns = 1 << (pixels - 1).bit_length()

    @emitted
    def gather(builder: Any, planes: Any) -> None:
        channels, row = (Vectors(builder, ElementType.of(type), count) for count in (lanes, columns))
        in_bounds = builder.and_(builder.not_(row.below(planes.left)), row.below(planes.right))
        nowhere = in_bounds.type(None)
        rows = []
        for c in range(lanes):
            at = builder.add(planes.src, builder.mul(planes.src_channel, const(c)))
            exists = builder.icmp_signed("<", const(c), planes.valid)
            rows.append(row.load(at, builder.select(exists, in_bounds, nowhere)))
        _store_pixels(channels, rows, planes.dst, pixels)

    return gather


@functools.cache
def gather_planes_unmasked(pixels: int, lanes: int, type: int) -> Any:
    """`gather_planes` of elements that there may be no masks of; channels that do not exist are the last that does.

    Pixels out of bounds are the border's. A vector is read from where a row is in bounds, or further left where the
    array ends before; stored; and read again from where its first column would be.
    """
    columns = 1 << (pixels - 1).bit_length()

    @emitted
    def gather(builder: Any, planes: Any) -> None:
        channels, row = (Vectors(builder, ElementType.of(type), count) for count in (lanes, columns))
        last, wide = builder.sub(planes.src_end, const(row.bytes)), 3 * row.bytes
        kept = builder.ptrtoint(cgutils.alloca_once(builder, ir.ArrayType(ir.IntType(8), lanes * wide)), I64)
        left = builder.mul(planes.left, const(row.itemsize))
        for c in range(lanes):
            exists = builder.icmp_signed("<", const(c), planes.valid)
            channel = builder.select(exists, const(c), builder.sub(planes.valid, const(1)))
            at = builder.add(planes.src, builder.mul(planes.src_channel, channel))
            first = builder.add(at, left)
            first = builder.select(builder.icmp_signed("<", first, last), first, last)
            offset = builder.add(builder.sub(first, at), const(c * wide + row.bytes))
            row.store(row.load(first), builder.add(kept, offset))
        in_bounds = builder.and_(builder.not_(row.below(planes.left)), row.below(planes.right))
        border = row.load(planes.border)
        found = [row.load(builder.add(kept, const(c * wide + row.bytes))) for c in range(lanes)]
        rows = [builder.select(in_bounds, x, border) for x in found]
        _store_pixels(channels, rows, planes.dst, pixels)

    return gather


@functools.cache
def gather_planes_whole(pixels: int, lanes: int, type: int) -> Any:
    """`gather_planes` of pixels that are all in bounds; channels that do not exist are the last that does."""

    @emitted
    def gather(builder: Any, planes: Any) -> None:
        channels, row = (Vectors(builder, ElementType.of(type), count) for count in (lanes, pixels))
        rows = []
        for c in range(lanes):
            exists = builder.icmp_signed("<", const(c), planes.valid)
            channel = builder.select(exists, const(c), builder.sub(planes.valid, const(1)))
            rows.append(row.load(builder.add(planes.src, builder.mul(planes.src_channel, channel))))
        _store_pixels(channels, rows, planes.dst, pixels)

    return gather


def _store_pixels(v: Vectors, rows: list[Any], dst: Any, pixels: int) -> None:
    """The first pixels of as many rows of a channel each as a vector has lanes, one behind the other."""
    values = transpose(v.b, _regrouped(v.b, rows, v.lanes), v.lanes, rows[0].type.count)
    for k, value in enumerate(values[:pixels]):
        v.store(value, v.b.add(dst, const(k * v.bytes)))


def _regrouped(builder: Any, rows: list[Any], lanes: int) -> list[Any]:
    """Rows of a matrix as vectors of `lanes`: several in each, or each in several."""
    columns = rows[0].type.count
    if columns <= lanes:
        each = lanes // columns
        return [join(builder, rows[k : k + each]) for k in range(0, len(rows), each)]
    starts = range(0, columns, lanes)
    return [shuffle(builder, row, row, list(range(k, k + lanes))) for row in rows for k in starts]


# ---------------------------------------------------------------- products


class SharedProducts(NamedTuple):
    """The products of a position's tiles, of a vector that several groups share, with their weights."""

    tiles: int  # how many
    src: int  # the address of the first tile's transformed source
    src_tile: int
    dst: int  # the address of the first tile's products
    dst_tile: int
    wei: int  # the address of the first group's weights, [input channel][output channel]
    wei_group: int


@functools.cache
def multiply_shared(lanes: int, fma: int, channels: int) -> Any:
    """Code that computes `SharedProducts` of groups of so many channels; their weights stay in registers."""

    @emitted
    def multiply(builder: Any, run: Any) -> None:
        v = Vectors(builder, ELEMENT, lanes, bool(fma))
        row = channels * v.itemsize
        rows = [builder.add(run.wei, const(k * row)) for k in range(channels)]
        weights = [v.load_parts(at, channels, run.wei_group) for at in rows]

        def each_groups(at: Any, k: int) -> Any:
            """Channel k of each lane's group. Of a single group, one load."""
            if channels == lanes:
                return v.broadcast(builder.add(at, const(k * v.itemsize)))
            x = v.load(at)
            return shuffle(builder, x, x, [lane // channels * channels + k for lane in range(lanes)])

        with cgutils.for_range(builder, run.tiles) as loop:
            at = builder.add(run.src, builder.mul(loop.index, run.src_tile))
            total = v.mul(each_groups(at, 0), weights[0])
            for k in range(1, channels):
                total = v.multiply_add(each_groups(at, k), weights[k], total)
            v.store(total, builder.add(run.dst, builder.mul(loop.index, run.dst_tile)))

    return multiply


# ---------------------------------------------------------------- weights


class Taps(NamedTuple):
    """The nine taps of an input channel, or of a pair, for a vector of output channels, and where they go."""

    src: int  # the address of the first tap
    dst: int  # the address of the transform's first position
    dst_position: int  # from a position to the next


@functools.cache
def weight_transform(form: Form, lanes: int, tap: int) -> Any:
    """Code that transforms `Taps`, vectors of so many elements that are `tap` bytes apart.

    Floats are transformed in float64, and rounded once; integers of 16 bits as they are.
    """

    @emitted
    def transform(builder: Any, taps: Any) -> None:
        memory = Vectors(builder, WORD if form.exact else ELEMENT, lanes)
        v = memory if form.exact else Vectors(builder, element("float64"), lanes)

        def load(at: Any) -> Any:
            found = memory.load(at)
            return found if form.exact else builder.fpext(found, v.kind)

        def column(k: int) -> list[Any]:
            places = [const((TAPS * row + k) * tap) for row in range(TAPS)]
            return [load(builder.add(taps.src, at)) for at in places]

        rows = transform_2d(v, weights_1d, form, column, TAPS)
        stored = (value if form.exact else builder.fptrunc(value, memory.kind) for row in rows for value in row)
        _store_positions(memory, stored, taps)

    return transform


def _store_positions(v: Vectors, values: Iterable[Any], to: Any) -> None:
    """The positions of a transform, in order: `to` has the address of the first, and how far the next is."""
    dst = to.dst
    for value in values:
        v.store(value, dst)
        dst = v.b.add(dst, to.dst_position)
