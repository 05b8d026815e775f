"""Pixels whose channels become neighbours, from any memory order: packed as [pixel][channel], zeros after the last.

Floats may change their type on the way. Contiguous channels are moved as vectors, planes of contiguous pixels are
transposed in registers, and other elements are moved one by one.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from blockconv.core.python import zipped
from blockconv.core.types import ElementType, Types
from blockconv.jit.ir import const, counted, emitted, join, shuffle, store_bits, transpose
from blockconv.jit.values import build
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry
from blockconv.kernels.common.vectors import Vectors, lanes_below

TOGETHER = 4  # vectors of a pixel that are moved at once


class PixelPacking(NamedTuple):
    """The parameters of code that packs pixels.

    src, packed: the element types; equal ones are moved as bits.
    lanes: of a vector.
    contiguous: 1: channels of a pixel, or of a block of them, are contiguous; 2: pixels of a row are; 3: they are, and
        every second one is packed; 0: neither.
    unit: channels of a block, where several blocks make a vector; else 0.
    narrow: channels of a packed pixel, if these are known to be a power of two less than `lanes`; else 0.
    columns: pixels of planes that are transposed together, a power of two; 0: `lanes`.
    """

    src: ElementType
    packed: ElementType
    lanes: int
    contiguous: int
    unit: int = 0
    narrow: int = 0
    columns: int = 0


class Pixels(NamedTuple):
    """Pixels, at even distances, that are packed; strides in bytes.

    src, step: the address of the first pixel's first channel; from a pixel to the next.
    block, length, channel: the strides of channels, as in `Geometry`.
    inside: the first channel's number in its block.
    channels: how many exist from there on.
    dst, apart: where they go; from a vector of a packed pixel to the next.
    width: channels of a packed pixel.
    pixels: how many there are.
    """

    src: int
    step: int
    block: int
    length: int
    channel: int
    inside: int
    channels: int
    dst: int
    apart: int
    width: int
    pixels: int


def packing_of(strides: Geometry, src: ElementType, packed: ElementType, lanes: int, step: int) -> PixelPacking:
    """The packing of an array with these strides, by at most so many lanes.

    step: columns from a packed pixel to the next.
    """
    contiguous = int(strides.channel == src.itemsize and strides.length > 1)
    if strides.length == 1 and strides.col == src.itemsize and step <= 2:
        contiguous = 1 + step
    # Vectors are made of blocks, where these are smaller.
    joins = contiguous == 1 and strides.length < lanes and lanes % strides.length == 0
    return PixelPacking(src, packed, lanes, contiguous, strides.length if joins else 0)


def pixel_packer(how: PixelPacking):
    """pack(pixels): code that packs `Pixels`. Where vectors of a pixel are not neighbours, its channels have no blocks.

    The packed pixels of a vector follow one another.
    """
    return (_one_by_one, _by_channels, _by_planes, _by_planes)[how.contiguous](how)


def matrix_packer(kind: ElementType, lanes: int, turned):
    """pack(src, stride, dst, apart, width, rows, columns): packs rows of `width` elements, as they are computed with.

    turned: the elements of a column are contiguous, and not of a row. stride: from a row to the next, or then from a
    column to the next, in bytes. apart: from a vector of a packed row to the next. rows, columns: that exist.
    """
    pack = pixel_packer(PixelPacking(kind, kind.computed, lanes, 2 if turned else 1))

    def packed(src, stride, dst, apart, width, rows, columns):
        step, block, length = (kind.itemsize, stride, 1) if turned else (stride, 0, NO_BLOCK)
        pack(Pixels(src, step, block, length, kind.itemsize, 0, columns, dst, apart, width, rows))

    return packed


def _by_channels(how: PixelPacking):
    lanes, unit = how.lanes, how.unit
    src_bytes, itemsize = how.src.itemsize, how.packed.itemsize
    whole, several, part = _vector_mover(how), _vector_mover(how, TOGETHER), _mover(how)
    join_blocks = _joiner(how)

    def pack(x):
        pixel = x.width * itemsize if x.apart == lanes * itemsize else lanes * itemsize
        has_gaps = x.channels < x.width or x.inside + x.channels > x.length or x.apart != lanes * itemsize
        if not has_gaps and x.step == x.channels * src_bytes:  # pixels follow one another too
            end, k = x.pixels * x.channels, 0
            while k + lanes <= end:
                whole(x.dst + k * itemsize, 0, x.src + k * src_bytes)
                k += lanes
            if k < end:
                part(x.dst + k * itemsize, x.src + k * src_bytes, end - k, end - k)
            return
        if not has_gaps and x.width <= TOGETHER * lanes and x.width % lanes == 0:
            for p in range(x.pixels):
                for k in range(0, x.width, lanes):
                    whole(x.dst + p * pixel + k * itemsize, 0, x.src + p * x.step + k * src_bytes)
            return
        c, at, to, room = 0, x.src, x.dst, x.length - x.inside
        while unit and x.inside == 0 and c + lanes <= x.channels:
            join_blocks(to, pixel, at, x.block, x.step, x.pixels)
            c, at, to = c + lanes, at + lanes // unit * x.block, to + x.apart
        while c < x.channels:
            count, k = min(x.channels - c, room), 0
            # Zeros follow the last channel that exists.
            stored = x.width - c if c + count == x.channels else count
            while k + lanes <= count:
                moved = TOGETHER * lanes if k + TOGETHER * lanes <= count else lanes
                for p in range(x.pixels):
                    if moved == lanes:
                        whole(to + p * pixel + k // lanes * x.apart, 0, at + p * x.step + k * src_bytes)
                    else:
                        several(to + p * pixel + k // lanes * x.apart, x.apart, at + p * x.step + k * src_bytes)
                k += moved
            for p in range(x.pixels if stored > k else 0):
                j, packed = k, to + p * pixel
                if k < count:
                    src = at + p * x.step + k * src_bytes
                    part(packed + k // lanes * x.apart, src, count - k, stored - k)
                    j += lanes
                while j < stored:
                    part(packed + j // lanes * x.apart, at, 0, stored - j)
                    j += lanes
            c, to, at, room = c + count, to + count * itemsize, at + (room - x.length) * x.channel + x.block, x.length

    return pack


def _by_planes(how: PixelPacking):
    lanes, src_bytes, itemsize = how.lanes, how.src.itemsize, how.packed.itemsize
    each, most, columns = how.contiguous - 1, how.narrow or lanes, how.columns or lanes
    square, rest = _transposer(how), _one_by_one(how)

    def pack(x):
        if x.step != each * src_bytes:
            rest(x)
            return
        pixel = x.width * itemsize if x.apart == lanes * itemsize else lanes * itemsize
        for k in range(0, x.width, most):
            at, to = x.src + k * x.block, x.dst + k // lanes * x.apart
            for p in range(0, x.pixels, columns):
                p = max(0, min(p, x.pixels - columns))  # the last ones are moved back, to be as many
                square(to + p * pixel, pixel, at + p * x.step, x.block, x.pixels - p, x.channels - k, x.width - k)

    return pack


def _one_by_one(how: PixelPacking):
    itemsize, one = how.packed.itemsize, _vector_mover(how._replace(lanes=1))

    def pack(x):
        pixel, at, room = x.width * itemsize, x.src, x.length - x.inside
        for k in range(x.width):
            to = x.dst + k * itemsize
            for p in range(x.pixels):
                if k < x.channels:
                    one(to + p * pixel, 0, at + p * x.step)
                else:
                    store_bits(to + p * pixel, 0, itemsize)
            at, room = at + x.channel, room - 1
            if room == 0:
                at, room = at + x.block - x.length * x.channel, x.length

    return pack


def _held_and_packed(how: PixelPacking) -> tuple[Vectors, Vectors]:
    """Code for elements in memory, and for packed ones: floats of the type of computation, or the same bits."""
    if how.packed == how.src:
        return Vectors(how.src, how.lanes), Vectors(how.src, how.lanes)
    floats = Floats(how.src, how.lanes)
    return floats, floats.computed


def _joiner(how: PixelPacking):
    """join_blocks(dst, pixel, src, block, step, count): a vector of each of `count` pixels, of blocks of channels.

    pixel, step: bytes from a pixel to the next in the destination, and in the source. block: from a block to the next.
    """

    @emitted
    def join_blocks(dst, pixel, src, block, step, count) -> None:
        (v, to) = _held_and_packed(how)
        with counted(count if how.unit else const(0)) as loop:
            at = src + loop * step
            to.store(v.load_parts(at, max(1, how.unit), block), dst + loop * pixel)

    return join_blocks


def _vector_mover(how: PixelPacking, count: int = 1):
    """move(dst, apart, src): so many vectors, all of whose lanes exist."""

    @emitted
    def move(dst, apart, src) -> None:
        v, to = _held_and_packed(how)
        values = [v.load(src + k * v.bytes) for k in range(count)]
        for k, value in enumerate(values):
            to.store(value, dst + k * apart if k else dst)

    return move


def _mover(how: PixelPacking):
    """move(dst, src, count, stored): moves a vector whose `count` lanes exist; `stored` are stored, others as zero."""

    @emitted
    def move(dst, src, count, stored) -> None:
        (v, to) = _held_and_packed(how)
        with build.if_else(count >= how.lanes) as (all_lanes, some):
            with all_lanes:
                to.store(v.load(src), dst)
            with some:
                to.store_below(v.load(src, to.below(count)), dst, stored)

    return move


def bits_transposer(
    itemsize: int, lanes: int, narrow: int = 0, columns: int = 0, is_dense: bool = False, spills: bool = False
):
    """`_transposer` of elements of so many bytes, which are moved as they are."""
    type = Types.bits(itemsize).src
    return _transposer(PixelPacking(type, type, lanes, 2, 0, narrow, columns), is_dense, spills)


def _transposer(how: PixelPacking, is_dense: bool = False, spills: bool = False):
    """transpose_square(dst, pixel, src, plane, pixels, channels, stored): planes of pixels to pixels of channels.

    pixel, plane: bytes from a pixel to the next in the destination, from a channel to the next in the source. pixels,
    channels: that exist, of `columns` and of a vector's lanes. stored: channels that are stored, as zero where they do
    not exist. is_dense: planes of `columns` pixels follow one another. spills: all pixels and channels are stored, as
    zero where they do not exist.
    """
    lanes, rows, columns, each = how.lanes, how.narrow or how.lanes, how.columns or how.lanes, how.contiguous - 1
    most = max(rows, columns)  # lanes of a vector that is transposed

    @emitted
    def transpose_square(dst, pixel, src, plane, pixels, channels, stored) -> None:
        (v, to) = _held_and_packed(how)
        is_whole = (pixels >= columns) & (channels >= rows)

        def loaded(at, count: Any | None):
            """So many pixels of a plane, or all of `columns`."""
            if each == 1:
                return v.load(at, None if count is None else lanes_below(columns, count), lanes=columns)
            later = at + (lanes - 1) * v.itemsize  # the second vector begins with the first one's end
            if count is None:
                both = v.load(at), v.load(later)
            else:
                reach = each * count - 1
                both = v.load(at, to.below(reach)), v.load(later, to.below(reach - (lanes - 1)))
            return shuffle(*both, [*range(0, lanes, 2), *range(lanes + 1, 2 * lanes, 2)])

        def limited(index: int, count, limit):
            return build.select(index < count, limit, const(0))

        def planes(whole: bool) -> list[Any]:
            if whole and is_dense:
                return [v.load(src + k * most * v.itemsize, lanes=most) for k in range(rows * columns // most)]
            found = []
            for k in range(rows):
                at = src + k * plane
                if whole:
                    found.append(loaded(at, None))
                else:  # no address behind the array: to read nothing there takes some processors hundreds of cycles
                    found.append(loaded(build.select(k < channels, at, src), limited(k, channels, pixels)))
            return [join(found[k : k + most // columns]) for k in range(0, rows, most // columns)]

        def store(p: int, value, whole: bool) -> None:
            at = dst + p * (pixel if rows == most else most * to.itemsize)
            if whole or spills:
                to.store(value, at)
            else:  # of narrow pixels, a vector has several; no address behind the array, as for loads
                count = limited(p, pixels, stored) if rows == most else pixels * rows - p * most
                to.store_below(value, build.select(count > 0, at, dst), count)

        emit_transposed(is_whole, planes, store, rows, columns)

    return transpose_square


def emit_transposed(
    is_whole, loaded: Callable[[bool], list[Any]], store: Callable[[int, Any, bool], None], rows: int, columns: int
) -> None:
    """Transpose in registers, with code for whole rectangles and for parts of one.

    loaded(whole): the vectors of a matrix of so many rows and columns. store(k, vector, whole): stores the transpose's.
    """
    with build.if_else(is_whole) as branches:
        for whole, branch in zipped((True, False), branches):
            with branch:
                for k, value in enumerate(transpose(loaded(whole), rows, columns)):
                    store(k, value, whole)
