"""Winograd convolution's first stage by windows: pixels of neighbouring tiles become vectors of channels first.

Tiles overlap: a pixel is in up to nine of them. So the window of pixels that neighbouring tiles read is gathered once,
with the border around the image. All its tiles are transformed from there. Planes (NCHW) and small blocks of channels
are transposed on the way. A large image whose pixels are vectors anyway has few edges: its tiles are better read in
place (`source.py`).
"""

import functools

from blockconv import jit
from blockconv.core import target
from blockconv.core.types import ElementType
from blockconv.jit.ir import move
from blockconv.kernels.common.geometry import NO_BLOCK
from blockconv.kernels.winograd.arguments import Header, WinogradArgs
from blockconv.kernels.winograd.codegen import ELEMENT, TRANSFORMED, SourceTile, source_transform
from blockconv.kernels.winograd.codegen_windows import (
    ChannelBlocks,
    Planes,
    gather_blocks,
    gather_few_planes,
    gather_planes,
)
from blockconv.kernels.winograd.source import part_of_pixel, tile_at
from blockconv.kernels.winograd.transforms import Form


@functools.cache
def _row_of_planes(columns, lanes, src_type):
    """gather: a row of pixels of planes, `columns` at a time."""
    itemsize = ElementType.of(src_type).itemsize
    masked = itemsize == ELEMENT.itemsize or (itemsize > 1 and target.isa().name == "avx512")
    pixel, whole = lanes * itemsize, gather_blocks(1, columns, lanes, src_type)
    few = (gather_planes if masked else gather_few_planes)(columns, lanes, src_type)

    def gather(a, src, dst, pixels, valid, border):
        """The `pixels` from `src` on, of `valid` channels; borders follow fewer than `columns` of them at `dst`."""
        channel = a.src_strides.channel
        if pixels < columns:
            few(Planes(src, channel, a.src_end, pixels, valid, border, dst))
            return
        for col in range(0, pixels, columns):
            at = min(col, pixels - columns)  # the last ones are moved back to be as many
            whole(ChannelBlocks(src + at * itemsize, channel, valid, dst + at * pixel))

    return gather


@functools.cache
def _row_of_blocks(width, lanes, src_type):
    """gather: a row of pixels of blocks of `width` channels; see `_row_of_planes`."""
    itemsize = ElementType.of(src_type).itemsize
    columns, nbytes, pixel = lanes // width, width * itemsize, lanes * itemsize
    whole, part = gather_blocks(width, columns, lanes, src_type), part_of_pixel(width, itemsize)

    def gather(a, src, dst, pixels, valid, border):
        by_block, by_col = a.src_strides.block, a.src_strides.col
        blocks, together = (valid + width - 1) // width, by_col == nbytes and columns > 1
        first = pixels // columns * columns if together else 0
        for col in range(0, first, columns):
            whole(ChannelBlocks(src + col * nbytes, by_block, blocks, dst + col * pixel))
        partly = valid < width and a.src_strides.length == NO_BLOCK  # else a block's padding may be read
        for k in range(columns):
            at = src + min(k, blocks - 1) * by_block  # of blocks that do not exist, the last that does
            for col in range(first, pixels):
                if partly:
                    part(a, dst + col * pixel, at + col * by_col, border, valid)
                else:
                    move(dst + col * pixel + k * nbytes, at + col * by_col, nbytes, 0)

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


def _tiles_of_window(a, tile, last):
    """(rows, columns) of tiles of the window that begins with a tile: several rows only where these are whole."""
    col = tile % a.tile_cols
    cols = min(last - tile, a.tile_cols - col)
    if cols < a.tile_cols or a.window_cols < cols:
        return 1, min(cols, a.window_cols)
    row = tile // a.tile_cols % a.tile_rows
    return min(min((last - tile) // cols, a.tile_rows - row), a.window_rows), cols


@jit.unrolled_kernel
def winograd_source_windows(m, stride, lanes, part, fma, load_width, columns, src_type):
    """Transform tiles first to last - 1 of the header's set, all its channels, from the source into the scratch.

    lanes, part, load_width, src_type: as `winograd_source` has them. columns: pixels of planes that are transposed
    together; 0 where the source has none.
    """
    src_itemsize = ElementType.of(src_type).itemsize
    exact = src_itemsize == 1
    form, itemsize = Form(m, stride, exact), (TRANSFORMED if exact else ELEMENT).itemsize
    vector, pixel = lanes * itemsize, lanes * src_itemsize
    row_of, together = (_row_of_planes, columns) if load_width == 1 else (_row_of_blocks, load_width)
    gather = row_of(together, lanes, src_type)
    transform = source_transform(form, part, lanes, fma, 0, src_type)

    def kernel(args, first, last, scratch):
        a, header = WinogradArgs(args), Header(scratch)
        window, v_position, border = scratch + a.patch, a.v_position, header.border.address
        src_row, src_col, length = a.src_strides.row, a.src_strides.col, a.src_strides.length
        side, step, leading, channels = a.side, a.step, a.window_leading * pixel, a.src_channels
        tile = first
        while tile < last:
            row, col, n = tile_at(a, tile)
            rows, cols = _tiles_of_window(a, tile, last)
            ih, iw = row * step - a.ph, col * step - a.pw
            height, width = (rows - 1) * step + side, (cols - 1) * step + side
            left, right = _columns_in(a, iw, width)
            _fill_borders(a, window, border, pixel, ih, iw, height, width)
            image = a.src + n * a.src_strides.n + ih * src_row + (iw + left) * src_col
            out = scratch + a.v + (tile - first) * vector
            for block in range(a.set_vectors):
                c = header.set_index * a.set_ic + block * channels
                valid = min(channels, a.ic - c)
                if valid <= 0:
                    break  # the last set has fewer groups
                src = image + (c // length) * a.src_strides.block + (c % length) * a.src_strides.channel
                for r in range(max(0, -ih), min(height, a.ih - ih)):
                    gather(a, src + r * src_row, window + r * leading + left * pixel, right - left, valid, border)
                for k in range(rows * cols):
                    at = window + k // cols * step * leading + k % cols * step * pixel
                    for lane in range(0, lanes, part):
                        to = out + k * vector + lane * itemsize
                        transform(SourceTile(at + lane * src_itemsize, leading, pixel, 0, to, v_position))
                out += a.block_tiles * vector
            tile += rows * cols

    return kernel
