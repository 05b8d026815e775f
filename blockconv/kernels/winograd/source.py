"""Winograd convolution's first stage: tiles of the source, gathered where they lie apart, and transformed."""

from __future__ import annotations

import functools

from blockconv import jit
from blockconv.core import target
from blockconv.core.types import ElementType
from blockconv.jit.compiler import inline
from blockconv.jit.ir import load_bits, load_i64, move, move_part, prefetch, store_bits
from blockconv.kernels.common.geometry import NO_BLOCK
from blockconv.kernels.winograd.arguments import PLANE_BYTES, Header, WinogradArgs
from blockconv.kernels.winograd.codegen import (
    ELEMENT,
    WORD,
    Planes,
    SourceTile,
    gather_planes,
    gather_planes_unmasked,
    source_transform,
)
from blockconv.kernels.winograd.transforms import Form


@inline
def _src_parts(a, c, lanes, load_width):
    """The address of the table of channel c's vector; behind the last lies that of patches."""
    return a.offsets + a.src_parts + c // lanes * (8 * (lanes // load_width))


@functools.cache
def _part(columns, itemsize):
    """part: copies the first `valid` of so many elements; those after them are read where the array goes on."""
    if itemsize > 1:
        return inline(lambda a, dst, src, border, valid: move_part(dst, src, columns, itemsize, valid))

    @inline
    def part(a, dst, src, border, valid):
        if src == border or src + columns <= a.src_end:
            move(dst, src, columns, 0)
        else:
            for k in range(valid):
                store_bits(dst + k, load_bits(src + k, 1), 1)

    return part


@functools.cache
def _row_of_planes(cols, lanes, src_type):
    """planes: gathers a row of so many pixels of `Planes`, which may be out of bounds. src: of any pixel that is in."""
    itemsize = ElementType.of(src_type).itemsize
    if itemsize == ELEMENT.itemsize or (itemsize > 1 and target.isa().name == "avx512"):
        gather = gather_planes(cols, lanes, src_type)

        @inline
        def planes(p, src, in_bounds):
            exist = p.valid if in_bounds else 0
            gather(Planes(p.src, p.src_channel, p.src_end, p.left, p.right, exist, p.border, p.dst))

        return planes

    gather_unmasked = gather_planes_unmasked(cols, lanes, src_type)

    @inline
    def planes_unmasked(p, src, in_bounds):
        first, left, right = (p.src, p.left, p.right) if in_bounds else (src, 0, 0)
        gather_unmasked(Planes(first, p.src_channel, p.src_end, left, right, p.valid, p.border, p.dst))

    return planes_unmasked


@functools.cache
def _gather(side, cols, lanes, load_width, has_parts, src_type):
    """gather for `side` rows of `cols` pixels of a source, of whose channels a load takes `load_width`."""
    by_planes, itemsize = load_width == 1, ElementType.of(src_type).itemsize
    columns = lanes if by_planes else load_width
    pixel = columns * itemsize
    plane, part = side * cols * pixel, _part(columns, itemsize)
    planes = _row_of_planes(cols, lanes, src_type)

    @inline
    def gather(a, patch, zeros, src, ih, iw, valid, c_first):
        """The pixels from (ih, iw) on, `valid` channels each; out of bounds what is at `zeros`.

        They become [part][row][column][channels of a part]; a part is what a load takes, or a vector where that is one.
        """
        height, width, rows = a.ih, a.iw, a.side
        src_row, src_col, src_block = a.src_strides.row, a.src_strides.col, a.src_strides.block
        left, right = min(cols, max(0, -iw)), max(0, min(cols, width - iw))
        partly = valid < lanes and a.src_strides.length == NO_BLOCK  # else a block's padding may be read
        for r in range(rows):
            in_bounds = ih + r >= 0 and ih + r < height
            here, out = src + (ih + r) * src_row + iw * src_col, patch + r * (cols * pixel)
            if by_planes:
                row = Planes(here, a.src_strides.channel, a.src_end, left, right, valid, zeros, out)
                planes(row, src, in_bounds)
                continue
            for k in range((valid + columns - 1) // columns):
                at = out + k * plane
                for c in range(rows):
                    # Not a branch: what is out of bounds changes from tile to tile.
                    there = here + c * src_col + k * src_block if in_bounds and c >= left and c < right else zeros
                    if has_parts and there != zeros:
                        there += load_i64(_src_parts(a, c_first, lanes, load_width), k) - k * src_block
                    if partly:
                        part(a, at + c * pixel, there, zeros, valid)
                    else:
                        move(at + c * pixel, there, pixel, 0)

    return gather


@functools.cache
def _is_whole(lanes, load_width, nbytes):
    """is_whole: whether a vector may be read where it is, with what follows its `valid` channels, not multiplied.

    room: to the end of the array, of the last pixel.
    """

    @inline
    def is_whole(a, valid, room):
        return valid == lanes or (load_width == lanes and (a.src_strides.length < NO_BLOCK or nbytes <= room))

    return is_whole


@inline
def tile_at(a, tile):
    """(row, column, first image) of a tile."""
    above, cols, rows = tile // a.tile_cols, a.tile_cols, a.tile_rows
    return above % rows, tile % cols, min(above // rows * a.tile_images, a.last_image)


@inline
def _prefetch_next(a, src):
    """Fetch what the tile to the right adds to this one: too few lines in a row to be foreseen."""
    for r in range(a.prefetch_rows):
        for k in range(a.side, a.side + a.step):
            prefetch(src + r * a.src_strides.row + k * a.src_strides.col)


@inline
def _prefetch_planes(a, src, valid, ahead):
    """Fetch the line that is `ahead` of each row of each plane: of so many, no processor foresees the next."""
    for c in range(valid if a.prefetch_rows else 0):
        at = src + c * a.src_strides.channel + ahead
        for _ in range(a.prefetch_rows):
            prefetch(at)
            at += a.src_strides.row


@jit.kernel
def winograd_source(m, stride, lanes, part, fma, load_width, has_parts, src_type):
    """Transform tiles first to last - 1 of the header's set, all its channels, from the source into the scratch.

    lanes: of a vector, channels or images of one. part: lanes that are transformed together. load_width: contiguous
    lanes that a load takes; 1 is NCHW, whose planes are gathered for as many tiles of a row as a vector of their pixels
    covers. src_type: the code of the source's type. has_parts: blocks end within vectors, so a table has where
    the parts of one lie; `part` is `lanes`.
    """
    src_itemsize = ElementType.of(src_type).itemsize
    exact = src_itemsize == 1
    form, by_planes, itemsize = Form(m, stride, exact), load_width == 1, (WORD if exact else ELEMENT).itemsize
    vector, is_whole = lanes * itemsize, _is_whole(lanes, load_width, lanes * src_itemsize)
    columns, most = (lanes, form.tiles_per_vector(PLANE_BYTES if exact else lanes)) if by_planes else (load_width, 1)
    pixel, wide = columns * src_itemsize, (most - 1) * form.step + form.side
    patch_row, patch_part = wide * pixel, form.side * wide * pixel
    gather = _gather(form.side, wide, lanes, load_width, has_parts, src_type)
    transform = source_transform(form, part, min(columns, part), fma, has_parts, src_type)

    def kernel(args, first, last, scratch):
        a, header = WinogradArgs(args), Header(scratch)
        patch, v_position, length = scratch + a.patch, a.v_position, a.src_strides.length
        src_row, src_col, channels = a.src_strides.row, a.src_strides.col, a.vector_channels
        side, step = a.side, a.step  # not the form's, which are known: no loop over pixels is unrolled
        tile = first
        while tile < last:
            row, col, n = tile_at(a, tile)
            count = min(most, last - tile, a.tile_cols - col)
            ih, iw = row * step - a.ph, col * step - a.pw
            image = a.src + n * a.src_strides.n
            inside = ih >= 0 and iw >= 0 and ih + side <= a.ih and iw + side <= a.iw
            out = scratch + a.v + (tile - first) * vector
            room = a.src_end - image - (ih + side - 1) * src_row - (iw + side - 1) * src_col
            for block in range(a.set_vectors):
                c = header.set_index * a.set_ic + block * channels
                valid = min(channels, a.ic - c) * (lanes // channels)
                if valid <= 0:
                    break  # the last set has fewer groups
                plane = image + (c // length) * a.src_strides.block + (c % length) * a.src_strides.channel
                src, by_part = plane + ih * src_row + iw * src_col, a.src_strides.block
                by_row, by_col = src_row, src_col
                if has_parts:
                    by_part = _src_parts(a, c, lanes, load_width)
                if by_planes or not inside or not is_whole(a, valid, room - c * src_itemsize):
                    if by_planes:
                        _prefetch_planes(a, src, valid, (wide - 1 + most * step) * src_itemsize)
                    gather(a, patch, header.border.address, plane, ih, iw, valid, c)
                    src, by_row, by_col, by_part = patch, patch_row, pixel, patch_part
                    if has_parts:
                        by_part = _src_parts(a, a.ic + lanes - 1, lanes, load_width)
                else:
                    _prefetch_next(a, src)
                for k in range(count):
                    for c in range(0, lanes, part):
                        from_c = src + k * step * by_col + c // columns * by_part + c % columns * src_itemsize
                        to_c = out + k * vector + c * itemsize
                        transform(SourceTile(from_c, by_row, by_col, by_part, to_c, v_position))
                out += a.block_tiles * vector
            tile += count

    return kernel
