"""Winograd convolution's first stage: tiles of the source, gathered if they are not contiguous, and transformed.

It is for vectors whose lanes are contiguous, or whose parts are in a table; see also `source_windows.py`.
"""

import functools

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.ir import load_bits, load_i64, move, move_part, prefetch, store_bits
from blockconv.kernels.common.geometry import NO_BLOCK
from blockconv.kernels.winograd.arguments import Header, WinogradArgs
from blockconv.kernels.winograd.codegen import ELEMENT, TRANSFORMED, SourceTile, source_transform
from blockconv.kernels.winograd.transforms import Form


def _src_parts(a, c, lanes, load_width):
    """The address of the table of channel c's vector; the table of patches follows the last one."""
    return a.offsets + a.src_parts + c // lanes * (8 * (lanes // load_width))


@functools.cache
def part_of_pixel(columns, itemsize):
    """part: copies the first `valid` of so many elements; those after them are read where the array goes on."""
    if itemsize > 1:
        return lambda a, dst, src, border, valid: move_part(dst, src, columns, itemsize, valid)

    def part(a, dst, src, border, valid):
        if src == border or src + columns <= a.src_end:
            move(dst, src, columns, 0)
        else:
            for k in range(valid):
                store_bits(dst + k, load_bits(src + k, 1), 1)

    return part


@functools.cache
def _gather(side, lanes, load_width, has_parts, src_type):
    """gather for `side` rows of as many pixels of a source, of whose channels a load takes `load_width`."""
    itemsize = ElementType.of(src_type).itemsize
    columns, pixel = load_width, load_width * itemsize
    plane, part = side * side * pixel, part_of_pixel(columns, itemsize)

    def gather(a, patch, zeros, src, ih, iw, valid, c_first):
        """Gather the pixels from (ih, iw) on, `valid` channels each; out of bounds, the values at `zeros`.

        They become [part][row][column][channels of a part]; a part is what a load takes.
        """
        height, width, rows = a.ih, a.iw, a.side
        src_row, src_col = a.src_strides.row, a.src_strides.col
        left, right = min(side, max(0, -iw)), max(0, min(side, width - iw))
        partly = valid < lanes and a.src_strides.length == NO_BLOCK  # else a block's padding may be read
        for r in range(rows):
            in_bounds = ih + r >= 0 and ih + r < height
            here, out = src + (ih + r) * src_row + iw * src_col, patch + r * (side * pixel)
            for k in range((valid + columns - 1) // columns):
                at = out + k * plane
                for c in range(rows):
                    # Not a branch: what is out of bounds changes from tile to tile.
                    there = here + c * src_col if in_bounds and c >= left and c < right else zeros
                    if has_parts and there != zeros:
                        there += load_i64(_src_parts(a, c_first, lanes, load_width), k)
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

    def is_whole(a, valid, room):
        return valid == lanes or (load_width == lanes and (a.src_strides.length < NO_BLOCK or nbytes <= room))

    return is_whole


def tile_at(a, tile):
    """(row, column, first image) of a tile."""
    above, cols, rows = tile // a.tile_cols, a.tile_cols, a.tile_rows
    return above % rows, tile % cols, min(above // rows * a.tile_images, a.last_image)


def _prefetch_next(a, src):
    """Prefetch the pixels that the tile to the right adds: the processor does not foresee so few lines in a row."""
    for r in range(a.prefetch_rows):
        for k in range(a.side, a.side + a.step):
            prefetch(src + r * a.src_strides.row + k * a.src_strides.col)


@jit.kernel
def winograd_source(m, stride, lanes, part, fma, load_width, has_parts, src_type):
    """Transform tiles first to last - 1 of the header's set, all its channels, from the source into the scratch.

    lanes: of a vector, channels or images of one. part: lanes that are transformed together. load_width: contiguous
    lanes that a load takes: all, unless `has_parts`. Then blocks end within vectors, a table has the offsets of a
    vector's parts, and `part` is `lanes`. src_type: the code of the source's type.
    """
    src_itemsize = ElementType.of(src_type).itemsize
    exact = src_itemsize == 1
    form, itemsize, pixel = (
        Form(m, stride, exact),
        (TRANSFORMED if exact else ELEMENT).itemsize,
        load_width * src_itemsize,
    )
    vector, is_whole = lanes * itemsize, _is_whole(lanes, load_width, lanes * src_itemsize)
    patch_row = form.side * pixel
    gather = _gather(form.side, lanes, load_width, has_parts, src_type)
    transform = source_transform(form, part, load_width, fma, has_parts, src_type)

    def kernel(args, first, last, scratch):
        a, header = WinogradArgs(args), Header(scratch)
        patch, v_position, length = scratch + a.patch, a.v_position, a.src_strides.length
        src_row, src_col, channels = a.src_strides.row, a.src_strides.col, a.src_channels
        side, step = a.side, a.step  # not the form's, which are known: no loop over pixels is unrolled
        for tile in range(first, last):
            row, col, n = tile_at(a, tile)
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
                src, parts = plane + ih * src_row + iw * src_col, _src_parts(a, c, lanes, load_width)
                by_row, by_col = src_row, src_col
                if inside and is_whole(a, valid, room - c * src_itemsize):
                    _prefetch_next(a, src)
                else:
                    gather(a, patch, header.border.address, plane, ih, iw, valid, c)
                    src, by_row, by_col = patch, patch_row, pixel
                    parts = _src_parts(a, a.ic + lanes - 1, lanes, load_width)
                for c in range(0, lanes, part):
                    to = out + c * itemsize
                    transform(SourceTile(src + c * src_itemsize, by_row, by_col, parts, to, v_position))
                out += a.block_tiles * vector

    return kernel
