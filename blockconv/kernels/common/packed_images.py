"""Windows of an image whose pixels are packed, for Winograd convolution and for gradients of weights."""

from blockconv import jit
from blockconv.core.types import element
from blockconv.jit.arguments import Arguments, address, in_bytes, in_channels, in_columns, in_rows, word
from blockconv.jit.ir import const, emitted, fill_memory
from blockconv.jit.values import build
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.packed_pixels import PixelPacking, Pixels, pixel_packer
from blockconv.kernels.common.vectors import Vectors


class PackRecord(Arguments):
    """Pixels of an image that are packed, as [row][column][channel], `border` where there is none.

    Floats of 16 bits may be packed in pairs, of a channel of two pixels: an element that dot products take at once.
    """

    dst = address("where they go")
    image = address("the image, at the first channel")
    strides = word("the image's strides", "address of a `Geometry`")
    inside = in_channels("the first channel's number in its block")
    channels = in_channels("channels that exist")
    width = in_channels("channels of a packed pixel")
    ih = in_rows("the first row; may be outside")
    iw = in_columns("the first column; may be outside")
    rows = in_rows("packed rows")
    cols = in_columns("packed columns of a row")
    row_bytes = in_bytes("from a packed row to the next")
    row_step = word("from a row to the next", "rows of the image")
    col_step = word("from a column to the next", "columns of the image")
    border = word("what each byte outside the image is; -1: such pixels are not written")
    height = in_rows("of the image")
    length = in_columns("of a row of the image")
    row = address("where a row is packed before its pixels become pairs")
    pair_step = word("from a pair to the next", "packed columns")
    second = word("from the first pixel of a pair to the second", "packed columns")
    singles = in_columns("columns at the end that are packed once more, each with zeros as its second")


@jit.kernel
def pack_image(how: PixelPacking):
    """Pack pixels as a `PackRecord` says. Packed floats of 16 bits are in pairs."""
    itemsize, in_pairs = how.packed.itemsize, how.packed.is_half
    pack_row, pair_row = pixel_packer(how), _row_pairer(how.lanes)

    def kernel(a: PackRecord):
        strides = Geometry(a.strides)
        rows, cols, ih, iw, height, length, border = a.rows, a.cols, a.ih, a.iw, a.height, a.length, a.border
        step, pixel = a.col_step, a.width * itemsize
        is_whole = iw == 0 and cols == length and ih >= 0 and ih + rows <= height and step == a.row_step == 1
        if not in_pairs and is_whole and strides.row == cols * strides.col and a.row_bytes == cols * pixel:
            # Rows that follow one another, in the image and packed, are one.
            rows, cols, ih, iw, height, length = 1, rows * cols, 0, ih * cols, 1, height * length
        left = min(cols, max(0, (-iw + step - 1) // step))
        right = max(left, min(cols, (length - iw + step - 1) // step))
        for r in range(rows):
            h, dst = ih + r * a.row_step, a.dst + r * a.row_bytes
            is_outside = h < 0 or h >= height or left == right
            if is_outside and border >= 0:
                fill_memory(dst, a.row_bytes, border)
            if is_outside:
                continue
            if in_pairs:
                dst = a.row
            if border >= 0:
                fill_memory(dst, left * pixel, border)
                fill_memory(dst + right * pixel, (cols - right) * pixel, border)
            pack_row(
                Pixels(
                    src=a.image + h * strides.row + (iw + left * step) * strides.col,
                    step=step * strides.col,
                    block=strides.block,
                    length=strides.length,
                    channel=strides.channel,
                    inside=a.inside,
                    channels=a.channels,
                    dst=dst + left * pixel,
                    apart=how.lanes * itemsize,
                    width=a.width,
                    pixels=right - left,
                )
            )
            if in_pairs:
                pair_row(a.dst + r * a.row_bytes, a)

    return kernel


def _row_pairer(lanes: int):
    """pair_row(dst, record): makes pairs of the pixels of a packed row. The first of a pair is lower in memory."""

    @emitted
    def pair(dst, first, second, count) -> None:
        v, halves = Vectors(element("int32"), lanes), Vectors(element("bfloat16"), lanes)

        def body(at, mask) -> None:
            offset = build.lshr(at, const(1))
            lower, upper = (build.zext(halves.load(of + offset, mask), v.kind) for of in (first, second))
            v.store(lower | upper << 16, dst + at, mask)

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
