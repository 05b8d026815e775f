"""Loads, transforms and stores of Winograd's kernels, as LLVM vector IR: a vector is channels of one tile.

Each function here takes compile-time parameters and returns code. The kernel calls this code with a named tuple of
addresses and strides in bytes. `blockconv.kernels.winograd.transforms` has the arithmetic of the transforms.

Sources of bytes become integers of 16 bits, which hold all that their transform can be: ten times ten times 255.
"""

import functools
from collections.abc import Iterable
from typing import Any, NamedTuple

from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.ir import I64, const, counted, emitted, pointer, shuffle
from blockconv.kernels.common.halves import widened
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.winograd.transforms import TAPS, Form, source_1d, transform_2d, weights_1d

ELEMENT = element("float32")  # what kernels of floats compute with
TRANSFORMED, PRODUCT = element("int16"), element("int32")  # what a source of bytes is transformed to, and products are


def multiples(builder, start, step, count: int) -> list[Any]:
    """start, start + step, ..."""
    return [start, *(start + step * k for k in range(1, count))]


def _table(builder, address, count: int) -> list[Any]:
    """So many int64s at an address."""
    first = pointer(builder, address, I64)
    return [builder.load(builder.gep(first, [const(k)]), align=8) for k in range(count)]


# ---------------------------------------------------------------- source


class SourceTile(NamedTuple):
    """A tile of the source, and where its transform goes."""

    src: int  # the address of the tile's first pixel
    src_row: int
    src_col: int
    src_parts: int  # the address of a table, with `has_parts`
    dst: int  # the address of the transform's first position
    dst_position: int  # from a position to the next


@functools.cache
def source_transform(form: Form, lanes: int, load_width: int, fma: int, has_parts: int, src: int):
    """Code that transforms `lanes` channels of a `SourceTile`.

    src: the code of its elements' type, float32, one of floats of 16 bits, which become float32, or one of bytes, which
    become int16.
    has_parts: a load takes `load_width` of the lanes, and a table has how far each such part is from the first.
    """

    @emitted
    def transform(builder, tile) -> None:
        type = ElementType.of(src)
        memory = Vectors(builder, type, lanes, bool(fma))
        v = Vectors(builder, TRANSFORMED if form.exact else ELEMENT, lanes, bool(fma))
        rows = multiples(builder, tile.src, tile.src_row, form.side)
        parts = _table(builder, tile.src_parts, lanes // load_width) if has_parts else [const(0)]

        def load(at):
            found = memory.gathered([at + part for part in parts])
            if type.is_half:
                return widened(v, type, found)
            if not form.exact:
                return found
            return (builder.sext if type.kind == SIGNED else builder.zext)(found, v.kind)

        def column(k: int) -> list[Any]:
            offset = tile.src_col * k
            return [load(row + offset) for row in rows]

        positions = transform_2d(v, source_1d, form, column, form.side)
        _store_positions(v, (value for row in positions for value in row), tile)

    return transform


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
def multiply_shared(lanes: int, fma: int, channels: int):
    """Code that computes `SharedProducts` of groups of so many channels; their weights stay in registers."""

    @emitted
    def multiply(builder, run) -> None:
        v = Vectors(builder, ELEMENT, lanes, bool(fma))
        row = channels * v.itemsize
        rows = [run.wei + k * row for k in range(channels)]
        weights = [v.load_parts(at, channels, run.wei_group) for at in rows]

        def each_groups(at, k: int):
            """Channel k of each lane's group; a broadcast load if there is a single group."""
            if channels == lanes:
                return v.broadcast(at + k * v.itemsize)
            x = v.load(at)
            return shuffle(builder, x, x, [lane // channels * channels + k for lane in range(lanes)])

        with counted(builder, run.tiles) as n:
            at = run.src + n * run.src_tile
            total = each_groups(at, 0) * weights[0]
            for k in range(1, channels):
                total = v.multiply_add(each_groups(at, k), weights[k], total)
            v.store(total, run.dst + n * run.dst_tile)

    return multiply


# ---------------------------------------------------------------- weights


class Taps(NamedTuple):
    """The nine taps of an input channel, or of a pair, for a vector of output channels, and where they go."""

    src: int  # the address of the first tap
    dst: int  # the address of the transform's first position
    dst_position: int  # from a position to the next


@functools.cache
def weight_transform(form: Form, lanes: int, tap: int):
    """Code that transforms `Taps`, vectors of so many elements that are `tap` bytes apart.

    Floats are transformed in float64, and rounded once; integers of 16 bits as they are.
    """

    @emitted
    def transform(builder, taps) -> None:
        memory = Vectors(builder, TRANSFORMED if form.exact else ELEMENT, lanes)
        v = memory if form.exact else Vectors(builder, element("float64"), lanes)

        def load(at):
            found = memory.load(at)
            return found if form.exact else builder.fpext(found, v.kind)

        def column(k: int) -> list[Any]:
            places = [const((TAPS * row + k) * tap) for row in range(TAPS)]
            return [load(taps.src + at) for at in places]

        rows = transform_2d(v, weights_1d, form, column, TAPS)
        stored = (value if form.exact else builder.fptrunc(value, memory.kind) for row in rows for value in row)
        _store_positions(memory, stored, taps)

    return transform


def _store_positions(v: Vectors, values: Iterable[Any], to) -> None:
    """The positions of a transform, in order: `to` has the address of the first, and how far the next is."""
    dst = to.dst
    for value in values:
        v.store(value, dst)
        dst = dst + to.dst_position
