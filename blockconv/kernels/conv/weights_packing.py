"""Packing of pixels for the gradient of a convolution's weights; see `blockconv.kernels.conv.weights_kernels`."""

from typing import Any

from blockconv import jit
from blockconv.core.types import ElementType, element
from blockconv.jit.arguments import Arguments, group, word
from blockconv.jit.ir import const, counted, emitted, fill_memory, shuffle, transpose
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.vectors import Vectors


class PackRecord(Arguments):
    """Pixels of an image that are packed, as [row][column][channel], zeros where there is none.

    Floats of 16 bits may be packed in pairs, of a channel of two pixels: an element that dot products take at once.
    """

    dst = word("where they go", "address")
    image = word("the image", "address")
    strides = group(Geometry, "the image's strides")
    channel = word("the first channel", "channels")
    channels = word("channels that exist", "channels")
    width = word("channels of a packed pixel", "channels")
    ih = word("the first row; may be outside", "rows")
    iw = word("the first column; may be outside", "columns")
    rows = word("packed rows", "rows")
    cols = word("packed columns of a row", "columns")
    row_bytes = word("from a packed row to the next", "bytes")
    row_step = word("from a row to the next", "rows of the image")
    col_step = word("from a column to the next", "columns of the image")
    height = word("of the image", "rows")
    length = word("of a row of the image", "columns")
    row = word("where a row is packed before its pixels become pairs", "address")
    pair_step = word("from a pair to the next", "packed columns")
    second = word("from the first pixel of a pair to the second", "packed columns")
    singles = word("columns at the end that are packed once more, each with zeros as its second", "columns")


def _channel_offset(strides, c):
    return c // strides.length * strides.block + c % strides.length * strides.channel


@jit.kernel
def pack_channels(src, packed, lanes, contiguous, unit):
    """Pack pixels as a `PackRecord` says.

    src, packed: codes of the element types; packed floats of 16 bits are in pairs. contiguous: 1: channels of a pixel,
    or of a block of them, are contiguous in the image; 2: pixels of a row are; 3: they are, and every second one is
    packed; 0: neither. unit: channels of a block, where several blocks make a vector; else 0.
    """
    itemsize, in_pairs = ElementType.of(packed).itemsize, ElementType.of(packed).is_half
    pack_row = _row_packer(ElementType.of(src), ElementType.of(packed), lanes, contiguous, unit)
    pair_row = _row_pairer(lanes)

    def kernel(record, unused_first, unused_last, unused_scratch):
        a = PackRecord(record)
        rows, cols, ih, iw, height, length = a.rows, a.cols, a.ih, a.iw, a.height, a.length
        step, pixel = a.col_step, a.width * itemsize
        is_whole = iw == 0 and cols == length and ih >= 0 and ih + rows <= height and step == a.row_step == 1
        if not in_pairs and is_whole and a.strides.row == cols * a.strides.col and a.row_bytes == cols * pixel:
            # Rows that follow one another, in the image and packed, are one.
            rows, cols, ih, iw, height, length = 1, rows * cols, 0, ih * cols, 1, height * length
        left = min(cols, max(0, (-iw + step - 1) // step))
        right = max(left, min(cols, (length - iw + step - 1) // step))
        for r in range(rows):
            h, dst = ih + r * a.row_step, a.dst + r * a.row_bytes
            if h < 0 or h >= height or left == right:
                fill_memory(dst, a.row_bytes, 0)
                continue
            if in_pairs:
                dst = a.row
            fill_memory(dst, left * pixel, 0)
            fill_memory(dst + right * pixel, (cols - right) * pixel, 0)
            image = a.image + h * a.strides.row + (iw + left * step) * a.strides.col
            pack_row(dst + left * pixel, image, a, right - left, step * a.strides.col)
            if in_pairs:
                pair_row(a.dst + r * a.row_bytes, a)

    return kernel


def _row_pairer(lanes: int):
    """pair_row(dst, record): makes pairs of the pixels of a packed row. The first of a pair is lower in memory."""

    @emitted
    def pair(builder, dst, first, second, count) -> None:
        b, v, halves = builder, Vectors(builder, element("int32"), lanes), Vectors(builder, element("bfloat16"), lanes)

        def body(at, mask) -> None:
            offset = b.lshr(at, const(1))
            lower, upper = (b.zext(halves.load(of + offset, mask), v.kind) for of in (first, second))
            v.store(lower | upper << v.c(16), dst + at, mask)

        v.each(count, body)

    def pair_row(dst, a):
        row, cols, pixel = a.row, a.cols, a.width * 2
        fill_memory(row + cols * pixel, max(a.second, a.singles) * pixel, 0)
        if a.pair_step == 1:  # each column begins a pair: all elements are neighbours
            pair(dst, row, row + a.second * pixel, cols * a.width)
            pair(dst + cols * 2 * pixel, row + (cols - a.singles) * pixel, row + cols * pixel, a.singles * a.width)
        else:
            for p in range((cols + a.pair_step - 1) // a.pair_step):
                at = row + p * a.pair_step * pixel
                pair(dst + p * 2 * pixel, at, at + a.second * pixel, a.width)

    return pair_row


def _held_and_packed(builder, held: ElementType, packed: ElementType, lanes: int) -> tuple[Vectors, Vectors]:
    """Code for elements in memory, and for packed ones: floats of the type of computation, or the same bits."""
    if packed == held:
        return Vectors(builder, held, lanes), Vectors(builder, held, lanes)
    floats = Floats(builder, held, lanes)
    return floats, floats.computed


def _row_packer(held: ElementType, packed: ElementType, lanes: int, contiguous: int, unit: int):
    """pack_row(dst, image, record, cols, step): columns of a row that exist, `step` bytes apart in the image."""
    src_bytes, itemsize = held.itemsize, packed.itemsize
    one, run, vector = _mover(held, packed, 1), _mover(held, packed, lanes), _vector_mover(held, packed, lanes)
    several, vectors = 4, _vector_mover(held, packed, lanes, 4)
    block = _transposer(held, packed, lanes, 2 if contiguous == 3 else 1)
    blocks = _joiner(held, packed, lanes, unit)
    apart = src_bytes * (2 if contiguous == 3 else 1)

    def pack_row(dst, image, a, cols, step):
        pixel, c, last = a.width * itemsize, 0, a.channels
        together = a.channel % a.strides.length + last <= a.strides.length and last == a.width
        if contiguous == 1 and together and step == last * src_bytes:  # pixels are contiguous too
            at = image + _channel_offset(a.strides, a.channel)
            end = cols * last
            for k in range(0, end // lanes * lanes, lanes):
                vector(dst + k * itemsize, at + k * src_bytes)
            if end % lanes:
                k = end // lanes * lanes
                run(dst + k * itemsize, at + k * src_bytes, end - k, end - k)
        elif contiguous == 1:
            while unit and a.channel % unit == 0 and c + lanes <= last:
                at = image + _channel_offset(a.strides, a.channel + c)
                blocks(dst + c * itemsize, pixel, at, a.strides.block, step, cols)
                c += lanes
            while c < last:
                first = a.channel + c
                count = min(last - c, a.strides.length - first % a.strides.length)
                # Zeros follow the last channel that exists.
                stored = a.width - c if c + count == last else count
                at = image + _channel_offset(a.strides, first)
                to, whole = dst + c * itemsize, count // lanes * lanes
                k = 0
                while k < whole:
                    some = k + several * lanes <= whole
                    for p in range(cols):
                        if some:
                            vectors(to + p * pixel + k * itemsize, at + p * step + k * src_bytes)
                        else:
                            vector(to + p * pixel + k * itemsize, at + p * step + k * src_bytes)
                    k += several * lanes if some else lanes
                for p in range(cols if stored > whole else 0):
                    for k in range(whole, stored, lanes):
                        run(to + p * pixel + k * itemsize, at + p * step + k * src_bytes, count - k, stored - k)
                c += count
        elif contiguous > 1 and step == apart:
            for k in range(0, a.width, lanes):
                at = image + (a.channel + k) * a.strides.block
                for p in range(0, cols, lanes):
                    to = dst + p * pixel + k * itemsize
                    block(to, pixel, at + p * step, a.strides.block, cols - p, last - k, a.width - k)
        else:
            for k in range(a.width):
                at = image + _channel_offset(a.strides, a.channel + min(k, last - 1))
                for p in range(cols):
                    one(dst + p * pixel + k * itemsize, at + p * step, 1 if k < last else 0, 1)

    return pack_row


def _joiner(held: ElementType, packed: ElementType, lanes: int, unit: int):
    """join_blocks(dst, pixel, src, block, step, cols): a vector of each of `cols` pixels, of blocks of `unit` channels.

    pixel, step: bytes from a pixel to the next in the destination, and in the source. block: from a block to the next.
    """

    @emitted
    def join_blocks(builder, dst, pixel, src, block, step, cols) -> None:
        b, each, (v, to) = builder, max(1, unit), _held_and_packed(builder, held, packed, lanes)
        with counted(b, cols if unit else const(0)) as loop:
            at = src + loop * step
            to.store(v.load_parts(at, each, block), dst + loop * pixel)

    return join_blocks


def _vector_mover(held: ElementType, packed: ElementType, lanes: int, count: int = 1):
    """move(dst, src): so many vectors, all of whose lanes exist."""

    @emitted
    def move(builder, dst, src) -> None:
        v, to = _held_and_packed(builder, held, packed, lanes)
        values = [v.load(src + k * v.bytes) for k in range(count)]
        for k, value in enumerate(values):
            to.store(value, dst + k * to.bytes)

    return move


def _mover(held: ElementType, packed: ElementType, lanes: int):
    """move(dst, src, count, stored): moves a vector. `count` lanes exist, `stored` are stored, the others as zero."""

    @emitted
    def move(builder, dst, src, count, stored) -> None:
        v, to = _held_and_packed(builder, held, packed, lanes)
        whole = count >= lanes
        with builder.if_else(whole) as (all_lanes, some):
            with all_lanes:
                to.store(v.load(src), dst)
            with some:
                to.store(v.load(src, to.below(count)), dst, to.below(stored))

    return move


def _transposer(held: ElementType, packed: ElementType, lanes: int, each: int):
    """transpose_block(dst, pixel, src, plane, pixels, channels, stored): planes of pixels to pixels of channels.

    each: 1, or 2 for every second pixel; nothing past the last is read. pixel, plane: bytes from a pixel to the next in
    the destination, from a channel to the next in the source. pixels, channels: that exist, of a vector's lanes.
    stored: channels that are stored, as zero where they do not exist.
    """

    @emitted
    def transpose_block(builder, dst, pixel, src, plane, pixels, channels, stored) -> None:
        v, to = _held_and_packed(builder, held, packed, lanes)
        full = const(lanes)
        whole = (pixels >= full) & (channels >= full)

        def moved(load, store) -> None:
            vectors = [load(k, src + k * plane) for k in range(lanes)]
            for p, value in enumerate(transpose(builder, vectors, lanes, lanes)):
                store(p, value, dst + p * pixel)

        def loaded(at, count: Any | None):
            """So many pixels of a plane, a vector, or all of its lanes."""
            if each == 1:
                return v.load(at) if count is None else v.load(at, to.below(count))
            reach = full if count is None else each * count - 1
            later = at + (lanes - 1) * v.itemsize  # the second vector begins with the first one's end
            if count is None:
                both = v.load(at), v.load(later)
            else:
                limits = reach, reach - (lanes - 1)
                both = tuple(v.load(of, to.below(limit)) for of, limit in zip((at, later), limits, strict=True))
            chosen = [*range(0, lanes, 2), *range(lanes + 1, 2 * lanes, 2)]
            return shuffle(builder, *both, chosen)

        def limited(index: int, count, lanes_of_it):
            exists = index < count
            return builder.select(exists, lanes_of_it, const(0))

        with builder.if_else(whole) as (all_lanes, some):
            with all_lanes:
                moved(lambda k, at: loaded(at, None), lambda p, value, at: to.store(value, at))
            with some:
                moved(
                    lambda k, at: loaded(at, limited(k, channels, pixels)),
                    lambda p, value, at: to.store(value, at, to.below(limited(p, pixels, stored))),
                )

    return transpose_block
