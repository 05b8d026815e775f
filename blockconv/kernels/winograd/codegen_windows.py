"""How rows of pixels become vectors of channels, as LLVM vector IR: planes, and blocks of few channels, transposed."""

import functools
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core.types import ElementType, element
from blockconv.jit.ir import I64, const, emitted, join, shuffle, transpose
from blockconv.jit.values import alloca_once
from blockconv.kernels.common.vectors import Vectors


class ChannelBlocks(NamedTuple):
    """Neighbouring pixels of blocks of channels, and where they go as vectors of all of these."""

    src: int  # the address of the first pixel in the first block
    src_block: int
    valid: int  # blocks that exist; the last of them takes the place of others
    dst: int


@functools.cache
def gather_blocks(width: int, pixels: int, lanes: int, type: int):
    """Code that gathers so many pixels of blocks of `width` channels: vectors of channels, one behind the other.

    type: the code of their elements' type.
    """

    @emitted
    def gather(builder, blocks) -> None:
        v, row = (Vectors(builder, ElementType.of(type), count) for count in (lanes, width * pixels))
        rows = [row.load(_block(builder, blocks.src, blocks.src_block, k, blocks.valid)) for k in range(lanes // width)]
        _store_pixels(v, rows, blocks.dst, pixels, width)

    return gather


class Planes(NamedTuple):
    """The begin of a row of pixels whose channels are planes (NCHW), and where it goes as vectors of channels."""

    src: int  # the address of the first pixel in the first channel
    src_channel: int
    src_end: int  # of the array
    pixels: int  # of the row
    valid: int  # channels that exist
    border: int  # the address of what stands behind the row
    dst: int


@functools.cache
def gather_planes(pixels: int, lanes: int, type: int):
    """Code that gathers so many pixels of `Planes`: a vector of channels each, one behind the other.

    type: the code of their elements' type. Pixels behind the row become zero, as do channels that do not exist; neither
    is read.
    """

    @emitted
    def gather(builder, planes) -> None:
        v, row = (Vectors(builder, ElementType.of(type), count) for count in (lanes, _power(pixels)))
        in_bounds = row.below(planes.pixels)
        nowhere = in_bounds.type(None)
        rows = []
        for c in range(lanes):
            at = _block(builder, planes.src, planes.src_channel, c, planes.valid)
            exists = c < planes.valid
            rows.append(row.load(at, builder.select(exists, in_bounds, nowhere)))
        _store_pixels(v, rows, planes.dst, pixels)

    return gather


@functools.cache
def copy_vectors(count: int, lanes: int):
    """Code that copies so many vectors of float32, `step` bytes apart, one behind the other. Channels that do not exist
    become zero."""

    @emitted
    def copy(builder, src, step, exist, dst) -> None:
        v = Vectors(builder, element("float32"), lanes)
        mask = v.below(exist)
        for k in range(count):
            found = v.load(src + step * k, mask, 0.0)
            v.store(found, dst + k * v.bytes)

    return copy


@functools.cache
def gather_few_planes(pixels: int, lanes: int, type: int):
    """`gather_planes` of elements that may have no masks. Missing channels repeat the last one.

    Pixels behind the row are the border's. A vector is read from where the row begins, or further left if the array
    ends too early. It is stored, and read again from where its first column is.
    """

    @emitted
    def gather(builder, planes) -> None:
        v, row = (Vectors(builder, ElementType.of(type), count) for count in (lanes, _power(pixels)))
        last, wide = planes.src_end - row.bytes, 2 * row.bytes
        kept = builder.ptrtoint(alloca_once(builder, ir.ArrayType(ir.IntType(8), lanes * wide)), I64)
        for c in range(lanes):
            at = _block(builder, planes.src, planes.src_channel, c, planes.valid)
            first = builder.select(at < last, at, last)
            offset = first - at + (c * wide + row.bytes)
            row.store(row.load(first), kept + offset)
        in_bounds, border = row.below(planes.pixels), row.load(planes.border)
        found = [row.load(kept + (c * wide + row.bytes)) for c in range(lanes)]
        _store_pixels(v, [builder.select(in_bounds, x, border) for x in found], planes.dst, pixels)

    return gather


def _power(pixels: int) -> int:
    """The pixels that a row of so many is read as: a power of two."""
    return 1 << (pixels - 1).bit_length()


def _block(builder, src, step, k: int, valid):
    """The address of block k; the last existing block's if k does not exist."""
    exists = k < valid
    return src + step * builder.select(exists, const(k), valid - 1)


def _store_pixels(v: Vectors, rows: list[Any], dst, pixels: int, width: int = 1) -> None:
    """The first pixels of rows of `width` channels each, which together are as many as a vector has lanes."""
    vectors, columns = _regrouped(v.b, rows, v.lanes), rows[0].type.count // width
    for k, value in enumerate(transpose(v.b, vectors, len(rows), columns, width)[:pixels]):
        v.store(value, dst + k * v.bytes)


def _regrouped(builder, rows: list[Any], lanes: int) -> list[Any]:
    """Rows of a matrix as vectors of `lanes`: several in each, or each in several."""
    columns = rows[0].type.count
    if columns <= lanes:
        each = lanes // columns
        return [join(builder, rows[k : k + each]) for k in range(0, len(rows), each)]
    starts = range(0, columns, lanes)
    return [shuffle(builder, row, row, list(range(k, k + lanes))) for row in rows for k in starts]
