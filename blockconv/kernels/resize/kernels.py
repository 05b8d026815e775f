"""Resampling's kernel: rows of results from one or two rows of the source."""

from __future__ import annotations

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import as_float64, load_bits, load_f, store_bits, store_f
from blockconv.kernels.common.copies import copy_bytes
from blockconv.kernels.resize.codegen import blend

__all__ = ["ResizeArgs", "ResizePartsArgs", "Tap", "resize_parts", "resize_rows"]


class Tap(Arguments):
    """What a row, or a column, of results is made of: two rows, or columns, of the source."""

    first = word("offset of the first in the source's plane, or row", "bytes")
    second = word("offset of the second", "bytes")
    weight = word("of the second; the first has the rest", "bits of a float64")


class ResizeArgs(Arguments):
    """A storage of planes of rows of pixels, which hold `inner` contiguous elements: of channels, or of the batch."""

    src = word("the source's first element", "address")
    dst = word("the destination's first element", "address")
    taps = word("a `Tap` for each row of results, then for each column", "address")
    oh = word("rows of results in a plane")
    ow = word("pixels in a row of results")
    src_plane = word("from a plane of the source to the next", "bytes")
    src_row = word("in a row of the source", "bytes")
    inner = word("in a pixel", "elements")
    blocks = word("planes of an image: blocks of channels")
    block = word("channels in a block")
    valid = word("channels that exist in the last block; the others are zeroed")


class ResizePartsArgs(ResizeArgs):
    """The same of a storage of planes that may be interleaved row by row, of pixels that are cut into parts."""

    between = word("planes whose rows are interleaved")
    parts = word("that a pixel is cut into")
    part = word("in a part, but for the last; a multiple of a block of channels, or the whole pixel", "elements")
    iw = word("pixels in a row of the source")
    block_stride = word("from a block of channels to the next in the destination", "elements")


@jit.kernel
def resize_rows(element, lanes, inner_lanes, linear):
    """A task is a row of results of a plane. Linear: scratch holds a row of the source, blended from two.

    inner_lanes: lanes of the vectors that blend columns; 1 for pixels of one element.
    """
    kind = ElementType.of(element)
    itemsize = kind.itemsize
    blend_rows, blend_pixels = blend(kind, lanes), blend(kind, inner_lanes)

    def kernel(args, first, last, scratch):
        a = ResizeArgs(args)
        oh, ow, inner, taps = a.oh, a.ow, a.inner, a.taps
        blocks, block, valid = a.blocks, a.block, a.valid
        row_bytes, pixel = a.src_row, inner * itemsize
        for task in range(first, last):
            plane, row = task // oh, Tap(taps + task % oh * Tap.nbytes)
            src = a.src + plane * a.src_plane
            dst = a.dst + task * ow * pixel
            col = Tap(taps + oh * Tap.nbytes)
            if linear:
                weight = as_float64(row.weight)
                blend_rows(src + row.first, src + row.second, weight, scratch, row_bytes // itemsize)
                for k in range(ow):
                    x, y, weight = scratch + col.first, scratch + col.second, as_float64(col.weight)
                    if inner_lanes == 1:
                        value = load_f(x, itemsize) * (1.0 - weight) + load_f(y, itemsize) * weight
                        store_f(dst + k * itemsize, value, itemsize)
                    else:
                        blend_pixels(x, y, weight, dst + k * pixel, inner)
                    col = col[1]
            else:
                src += row.first
                for k in range(ow):
                    if inner_lanes == 1:
                        store_bits(dst + k * itemsize, load_bits(src + col.first, itemsize), itemsize)
                    else:
                        copy_bytes(dst + k * pixel, src + col.first, pixel)
                    col = col[1]
            if valid < block and plane % blocks == blocks - 1:
                for k in range(ow * inner // block):
                    for c in range(valid, block):
                        store_bits(dst + (k * block + c) * itemsize, 0, itemsize)

    return kernel


@jit.kernel
def resize_parts(element, lanes, inner_lanes, linear):
    """A task is a part of every pixel of a row of results. Linear: scratch holds that part of a row of the source.

    inner_lanes: lanes of the vectors that blend columns; 1 for pixels of one element.
    """
    kind = ElementType.of(element)
    itemsize = kind.itemsize
    blend_rows, blend_pixels = blend(kind, lanes), blend(kind, inner_lanes)

    def kernel(args, first, last, scratch):
        a = ResizePartsArgs(args)
        oh, ow, inner, taps, parts, between = a.oh, a.ow, a.inner, a.taps, a.parts, a.between
        block, pixel, step = a.block, inner * itemsize, a.part * itemsize
        for task in range(first, last):
            part, line = task % parts, task // parts
            plane, outer = line % between, line // between
            row, col = Tap(taps + outer % oh * Tap.nbytes), Tap(taps + oh * Tap.nbytes)
            count = min(a.part, inner - part * a.part)
            src = a.src + outer // oh * a.src_plane + plane * a.src_row + part * step
            dst = a.dst + line * ow * pixel + part * step
            if linear:
                x, y, weight = src + row.first, src + row.second, as_float64(row.weight)
                blends, size = (1, a.iw * inner) if parts == 1 else (a.iw, count)
                for k in range(blends):
                    blend_rows(x + k * pixel, y + k * pixel, weight, scratch + k * step, size)
            else:
                src += row.first
            for k in range(ow):
                to = dst + k * pixel
                if linear:
                    x, y, weight = scratch + col.first, scratch + col.second, as_float64(col.weight)
                    blend_pixels(x, y, weight, to, count)
                elif inner_lanes == 1:
                    store_bits(to, load_bits(src + col.first, itemsize), itemsize)
                else:
                    copy_bytes(to, src + col.first, count * itemsize)
                col = col[1]
            # A row is of one block of channels, unless the blocks lie inside w.
            is_one = a.block_stride >= ow * inner
            is_last = (dst - a.dst) // itemsize // a.block_stride % a.blocks == a.blocks - 1
            if a.valid < block and (is_last or not is_one):
                for k in range(ow):
                    start = dst + k * pixel
                    for j in range(count // block):
                        at = j * block
                        index = (start - a.dst) // itemsize + at
                        if is_one or index // a.block_stride % a.blocks == a.blocks - 1:
                            for c in range(a.valid, block):
                                store_bits(start + (at + c) * itemsize, 0, itemsize)

    return kernel
