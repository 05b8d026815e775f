"""Winograd convolution's first stage where channels are planes (NCHW): windows are transposed, then transformed.

Tiles overlap: a pixel is in up to nine of them. So a window of pixels that neighbouring tiles read is transposed once,
to vectors of channels with what stands out of bounds around them, and all its tiles are read from there.
"""

from __future__ import annotations

import functools

from blockconv import jit
from blockconv.core import target
from blockconv.core.types import ElementType
from blockconv.jit.compiler import inline
from blockconv.jit.ir import move
from blockconv.kernels.winograd.arguments import Header, WinogradArgs
from blockconv.kernels.winograd.codegen import (
    ELEMENT,
    WORD,
    Planes,
    SourceTile,
    gather_planes,
    gather_planes_unmasked,
    gather_planes_whole,
    source_transform,
)
from blockconv.kernels.winograd.source import tile_at
from blockconv.kernels.winograd.transforms import Form


@functools.cache
def _gather_row(columns, lanes, src_type):
    """gather_row: transposes a row of pixels of so many planes, `columns` at a time."""
    itemsize = ElementType.of(src_type).itemsize
    pixel, whole = lanes * itemsize, gather_planes_whole(columns, lanes, src_type)
    masked = itemsize == ELEMENT.itemsize or (itemsize > 1 and target.isa().name == "avx512")
    few = (gather_planes if masked else gather_planes_unmasked)(columns, lanes, src_type)

    @inline
    def gather_row(a, src, dst, pixels, valid, border):
        """The `pixels` from `src` on, of `valid` channels. Of fewer than `columns`, borders follow them at `dst`."""
        channel = a.src_strides.channel
        if pixels < columns:
            few(Planes(src, channel, a.src_end, 0, pixels, valid, border, dst))
            return
        for col in range(0, pixels - columns + 1, columns):
            whole(Planes(src + col * itemsize, channel, 0, 0, columns, valid, border, dst + col * pixel))
        if pixels % columns:
            col = pixels - columns
            whole(Planes(src + col * itemsize, channel, 0, 0, columns, valid, border, dst + col * pixel))

    return gather_row


@inline
def _fill_border(dst, border, count, pixel):
    """So many pixels that are out of bounds."""
    for k in range(count):
        move(dst + k * pixel, border, pixel, 0)


@jit.kernel
def winograd_source_planes(m, stride, lanes, part, fma, columns, src_type):
    """Transform tiles first to last - 1 of the header's set, all its channels, from the source into the scratch.

    lanes: channels of a vector. part: lanes that are transformed together. columns: pixels of a row that are transposed
    together. src_type: the code of the source's type.
    """
    src_itemsize = ElementType.of(src_type).itemsize
    exact = src_itemsize == 1
    form, itemsize = Form(m, stride, exact), (WORD if exact else ELEMENT).itemsize
    vector, pixel = lanes * itemsize, lanes * src_itemsize
    gather_row = _gather_row(columns, lanes, src_type)
    transform = source_transform(form, part, part, fma, 0, src_type)

    def kernel(args, first, last, scratch):
        a, header = WinogradArgs(args), Header(scratch)
        window, v_position, border = scratch + a.patch, a.v_position, header.border.address
        src_row, channels, pitch = a.src_strides.row, a.vector_channels, a.window_pitch * pixel
        side, step = a.side, a.step
        tile = first
        while tile < last:
            row, col, n = tile_at(a, tile)
            rows, cols = 1, min(last - tile, a.tile_cols - col)
            if cols == a.tile_cols:
                rows = max(1, min(min((last - tile) // cols, a.tile_rows - row), a.window_rows))
            cols = min(cols, a.window_cols)
            ih, iw = row * step - a.ph, col * step - a.pw
            height, width = (rows - 1) * step + side, (cols - 1) * step + side
            left = min(width, max(0, -iw))
            right = max(left, min(width, a.iw - iw))
            for r in range(height):
                to = window + r * pitch
                if ih + r < 0 or ih + r >= a.ih:
                    _fill_border(to, border, width, pixel)
                else:
                    _fill_border(to, border, left, pixel)
                    _fill_border(to + right * pixel, border, width - right, pixel)
            top, bottom = max(0, -ih), min(height, a.ih - ih)
            image = a.src + n * a.src_strides.n + ih * src_row + (iw + left) * src_itemsize
            out = scratch + a.v + (tile - first) * vector
            for block in range(a.set_vectors):
                c = header.set_index * a.set_ic + block * channels
                valid = min(channels, a.ic - c)
                if valid <= 0:
                    break  # the last set has fewer groups
                src, to = image + c * a.src_strides.channel, window + left * pixel
                for r in range(top, bottom):
                    gather_row(a, src + r * src_row, to + r * pitch, right - left, valid, border)
                for k in range(rows * cols):
                    at = window + k // cols * step * pitch + k % cols * step * pixel
                    for lane in range(0, lanes, part):
                        to_lane = out + k * vector + lane * itemsize
                        transform(SourceTile(at + lane * src_itemsize, pitch, pixel, 0, to_lane, v_position))
                out += a.block_tiles * vector
            tile += rows * cols

    return kernel
