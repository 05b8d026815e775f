"""Winograd convolution's first stage: tiles of the source as vectors of channels, transformed.

Tiles overlap: a pixel is in up to nine of them. So the window of pixels that neighbouring tiles read is gathered once,
with the border around the image. All its tiles are transformed from there. Planes (NCHW) are transposed on the way.
Where pixels are vectors anyway, a window inside the image is read in place. A large image has few edges, so there a
window is a single tile.
"""

from typing import NamedTuple

from blockconv import jit
from blockconv.core.types import ElementType, Types
from blockconv.jit.ir import load_bits, move, prefetch, store_bits
from blockconv.kernels.common.geometry import NO_BLOCK
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.transposed_tile import TileAddresses, TransposeShape, transpose_tile
from blockconv.kernels.winograd.arguments import Header, WinogradArgs
from blockconv.kernels.winograd.codegen import ELEMENT, TRANSFORMED, SourceTile, source_transform
from blockconv.kernels.winograd.transforms import Form


def transposed_planes(columns, lanes, itemsize):
    """The tile of so many pixels of planes that become vectors of `lanes` channels."""
    code = Types.bits(itemsize).src.code
    return TransposeShape(code, code, lanes, columns, lanes, columns, 0)


def _copy_elements(dst, pixel, src, src_col, src_channel, pixels, channels, itemsize):
    """Copy some channels of pixels, one element at a time, and read nothing else. pixel: bytes of one at `dst`."""
    for p in range(pixels):
        for k in range(channels):
            value = load_bits(src + p * src_col + k * src_channel, itemsize)
            store_bits(dst + p * pixel + k * itemsize, value, itemsize)


def _row_of_planes(columns, lanes, itemsize):
    """gather: a row of pixels of planes, `columns` at a time; see `_row_of_blocks`."""
    shape, pixel = transposed_planes(columns, lanes, itemsize), lanes * itemsize

    def gather(a, lines, src, dst, pixels, c, valid):
        channel, wide = a.src_strides.channel, columns * itemsize
        if pixels >= columns:
            for col in range(0, pixels, columns):
                at = min(col, pixels - columns)  # the last ones are moved back to be as many
                first, to = src + at * itemsize, dst + at * pixel
                transpose_tile(shape, TileAddresses(first, 0, channel, valid, to, 0, pixel, columns, columns, lines, 0))
        elif pixels > 0 and src + (valid - 1) * channel + wide <= a.src_end:  # what follows a row is read, not written
            transpose_tile(shape, TileAddresses(src, 0, channel, valid, dst, 0, pixel, columns, pixels, lines, 0))
        else:
            _copy_elements(dst, pixel, src, itemsize, channel, pixels, valid, itemsize)

    return gather


def _channel_offset(a, c):
    """From the source's first channel to channel `c`, in bytes."""
    length = a.src_strides.length
    return c // length * a.src_strides.block + c % length * a.src_strides.channel


def _row_of_blocks(width, has_parts, lanes, itemsize):
    """gather: a row of pixels, from channel `c` on, of which `valid` exist, `width` at a time contiguous.

    has_parts: blocks end within vectors. lines: the address of a line of zeros; the line after the next is overwritten.
    """
    nbytes, pixel = width * itemsize, lanes * itemsize

    def gather(a, lines, src, dst, pixels, c, valid):
        by_block, by_col = a.src_strides.block, a.src_strides.col
        for k in range(lanes // width):
            number = min(k, (valid - 1) // width)  # of parts that do not exist, the last that does
            at = src + number * by_block
            if has_parts:
                at = src + _channel_offset(a, c + number * width) - _channel_offset(a, c)
            to, end = dst + k * nbytes, at + (pixels - 1) * by_col + nbytes
            # A block's padding may be read, and what follows a pixel in the array: it is not multiplied.
            if a.src_strides.length < NO_BLOCK or end <= a.src_end:
                for p in range(pixels):
                    move(to + p * pixel, at + p * by_col, nbytes, 0)
            else:
                _copy_elements(to, pixel, at, by_col, itemsize, pixels, valid - k * width, itemsize)

    return gather


def _fill_border(dst, border, count, pixel):
    """Write so many pixels that are out of bounds."""
    for k in range(count):
        move(dst + k * pixel, border, pixel, 0)


def _columns_in(a, iw, width):
    """(first, one after the last) of a window's columns that are in bounds."""
    left = min(width, max(0, -iw))
    return left, max(left, min(width, a.iw - iw))


def _fill_borders(a, window, border, pixel, ih, iw, height, width):
    """Write the pixels out of bounds of a window that begins with the source's pixel (ih, iw)."""
    left, right = _columns_in(a, iw, width)
    for r in range(height):
        row = window + r * a.window_leading * pixel
        if ih + r < 0 or ih + r >= a.ih:
            _fill_border(row, border, width, pixel)
        else:
            _fill_border(row, border, left, pixel)
            _fill_border(row + right * pixel, border, width - right, pixel)


def tile_at(a, tile):
    """(row, column, first image) of a tile."""
    above, cols, rows = tile // a.tile_cols, a.tile_cols, a.tile_rows
    return above % rows, tile % cols, min(above // rows * a.tile_images, a.last_image)


def _tiles_of_window(a, row, col, count):
    """(rows, columns) of tiles of a window, of the next `count` tiles: several rows only where these are whole."""
    cols = min(count, a.tile_cols - col)
    if cols < a.tile_cols or a.window_cols < cols:
        return 1, min(cols, a.window_cols)
    return min(min(count // cols, a.tile_rows - row), a.window_rows), cols


def _prefetch_next(a, src):
    """Prefetch the pixels that the tile to the right adds: the processor does not foresee so few lines in a row."""
    for r in range(a.prefetch_rows):
        for k in range(a.side, a.side + a.step):
            prefetch(src + r * a.src_strides.row + k * a.src_strides.col)


class Source(NamedTuple):
    """How a source is read.

    lanes: of a vector, channels or images of one; `part` of them are transformed together.
    load_width: contiguous lanes; 1 is planes, of which `columns` pixels are transposed together.
    has_parts: whether blocks end within vectors.
    in_place: whether a window is a tile, which is read in place inside the image; only with `load_width` as `lanes`.
    type: the code of the source's type.
    """

    form: Form
    lanes: int
    part: int
    fma: int
    load_width: int
    columns: int
    has_parts: int
    in_place: int
    type: int

    @property
    def pixel(self) -> int:
        """Bytes of a vector of the source."""
        return self.lanes * ElementType.of(self.type).itemsize

    @property
    def vector(self) -> int:
        """Bytes of a transformed one."""
        return self.lanes * (TRANSFORMED if self.form.exact else ELEMENT).itemsize


def _transform_tiles(how):
    """transform: the tiles of a window that begins at `src`, to vectors from `dst` on."""
    code, parts = source_transform(how.form, how.part, how.fma, how.type), how.lanes // how.part

    def transform(a, src, by_row, by_col, rows, cols, dst):
        for r in range(rows):
            for k in range(cols):
                at = src + r * a.step * by_row + k * a.step * by_col
                for part in range(parts):
                    here, to = at + part * (how.pixel // parts), dst + part * (how.vector // parts)
                    code(SourceTile(here, by_row, by_col, to, a.v_position))
                dst += how.vector

    return transform


@jit.kernel
def winograd_source(how: Source):
    """Transform tiles first to last - 1 of the header's set, all its channels, from the source into the scratch."""
    lanes, pixel, vector, itemsize = how.lanes, how.pixel, how.vector, how.pixel // how.lanes
    transform, gather = _transform_tiles(how), _row_of_planes(how.columns, lanes, itemsize)
    if how.load_width > 1:
        gather = _row_of_blocks(how.load_width, how.has_parts, lanes, itemsize)

    def kernel(args, first, last, scratch):
        a, header = WinogradArgs(args), Header(scratch)
        window, lines, v = scratch + a.patch, header.overwritten.address - 2 * LINE, scratch + a.v
        src_row, src_col = a.src_strides.row, a.src_strides.col
        side, step, leading, channels = a.side, a.step, a.window_leading * pixel, a.src_channels
        tile = first
        while tile < last:
            row, col, n = tile_at(a, tile)
            rows, cols = (1, 1) if how.in_place else _tiles_of_window(a, row, col, last - tile)
            ih, iw = row * step - a.ph, col * step - a.pw
            height, width = (rows - 1) * step + side, (cols - 1) * step + side
            image = a.src + n * a.src_strides.n + ih * src_row + iw * src_col
            room = a.src_end - image - (height - 1) * src_row - (width - 1) * src_col - pixel
            inside = how.in_place and ih >= 0 and iw >= 0 and ih + height <= a.ih and iw + width <= a.iw
            if not inside:
                _fill_borders(a, window, header.border.address, pixel, ih, iw, height, width)
            left, right = _columns_in(a, iw, width)
            out = v + (tile - first) * vector
            for block in range(a.set_vectors):
                c = header.set_index * a.set_ic + block * channels
                valid = min(channels, a.ic - c) * (lanes // channels)
                if valid <= 0:
                    break  # the last set has fewer groups
                offset = _channel_offset(a, c)
                at, by_row, by_col = image + offset, src_row, src_col
                # What follows the channels that exist is read too, and not multiplied.
                if inside and (valid == lanes or a.src_strides.length < NO_BLOCK or offset <= room):
                    _prefetch_next(a, at)
                else:
                    for r in range(max(0, -ih), min(height, a.ih - ih)):
                        begin, to = at + r * src_row + left * src_col, window + r * leading + left * pixel
                        gather(a, lines, begin, to, right - left, c, valid)
                    at, by_row, by_col = window, leading, pixel
                transform(a, at, by_row, by_col, rows, cols, out)
                out += a.block_tiles * vector
            tile += rows * cols

    return kernel
