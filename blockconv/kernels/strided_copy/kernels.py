"""The kernel of strided copies."""

from blockconv import jit
from blockconv.jit.arguments import Arguments, group, table, word
from blockconv.jit.ir import store_bits
from blockconv.kernels.common.conversion import (
    CONVERTED_LANES,
    ConversionArguments,
    ConvertedExtents,
    Moved,
    convert_extents,
)
from blockconv.kernels.common.copies import copy_bytes, copy_pixels
from blockconv.kernels.common.operands import Operands

COPY, FILL, ZERO = range(3)  # what is done with an extent


class CopyExtent(Arguments):
    """Channels that are contiguous on both sides, or that are filled."""

    src = word("from the pixel's first channel in the source", "bytes")
    dst = word("from the pixel's first channel in the destination", "bytes")
    size = word("of the extent", "bytes")
    action = word("COPY, FILL, or ZERO")


class PixelLoop(Arguments):
    """A loop over pixels of the destination: some are copied, and the others, around these, are filled."""

    size = word("pixels of the destination")
    begin = word("the first that is copied")
    count = word("pixels that are copied")
    src_stride = word("from a pixel to the next in the source", "bytes")
    dst_stride = word("from a pixel to the next in the destination", "bytes")


class StridedCopyArgs(Operands):
    """A copy of all extents of all pixels of a loop nest. A task is some extents of some columns of one row."""

    extents = word("a `CopyExtent` for each of a pixel", "address")
    fill = word("what filled elements are", "bits of an element")
    zero = word("what elements are of channels that do not exist", "bits of an element")
    conversion = group(ConversionArguments, "where elements are converted")
    count = word("extents of a pixel")
    task_extents = word("extents in a task")
    extent_tasks = word("tasks that the extents of a pixel make")
    task_cols = word("columns in a task")
    col_tasks = word("tasks that the columns of a row make")
    contiguous = word("an extent of this size is one with those of the pixels beside it; 0 where none is", "bytes")
    loops = table(PixelLoop, 3, "images, rows and columns, in the order of the destination, or fewer and wider")


@jit.unrolled_kernel
def strided_copy(moved: Moved):
    """A task reads and writes some extents of some columns of one row.

    Elements are bits that are copied, or 8-bit integers on both sides that are converted.
    """
    itemsize = moved.src_bytes

    def kernel(args, first, last, scratch):
        a = StridedCopyArgs(args)
        extent_tasks, col_tasks, cols = a.extent_tasks, a.col_tasks, a.task_cols
        outer, middle, inner = a.loops[0], a.loops[1], a.loops[2]
        s_col, d_col, contiguous = inner.src_stride, inner.dst_stride, a.contiguous
        for task in range(first, last):
            part, rest = task % extent_tasks, task // extent_tasks
            chunk, rest = rest % col_tasks, rest // col_tasks
            i, j = rest // middle.size, rest % middle.size
            col, end = chunk * cols, min(inner.size, chunk * cols + cols)
            image, row, begin = i - outer.begin, j - middle.begin, inner.begin
            # Columns that are copied: the others are filled.
            left, right = min(max(begin, col), end), min(max(begin + inner.count, col), end)
            if image < 0 or image >= outer.count or row < 0 or row >= middle.count:
                left, right = end, end
            src = a.src + image * outer.src_stride + row * middle.src_stride + (left - begin) * s_col
            dst = a.dst + i * outer.dst_stride + j * middle.dst_stride
            last_extent = min(a.count, (part + 1) * a.task_extents)
            for k in range(part * a.task_extents, last_extent):
                extent = CopyExtent(a.extents + k * CopyExtent.nbytes)
                size, action = extent.size, extent.action
                s, d = src + extent.src, dst + extent.dst
                copied, until = (left, right) if action == COPY else (end, end)
                value = a.zero if action == ZERO else a.fill
                for c in range(col, copied):
                    for at in range(0, size, itemsize):
                        store_bits(d + c * d_col + at, value, itemsize)
                for c in range(until, end):
                    for at in range(0, size, itemsize):
                        store_bits(d + c * d_col + at, value, itemsize)
                if until > copied and moved.is_converted:
                    pixels, to, words = until - copied, d + copied * d_col, a.conversion.address
                    extents = ConvertedExtents(s, to, size, pixels, s_col, d_col, words)
                    if contiguous == size:
                        extents = ConvertedExtents(s, to, pixels * size, 1, 0, 0, words)
                    convert_extents(moved, CONVERTED_LANES, 0, extents)
                elif until > copied:
                    if contiguous == size:
                        copy_bytes(d + copied * d_col, s, (until - copied) * size)
                    else:
                        copy_pixels(d + copied * d_col, s, until - copied, d_col, s_col, size)

    return kernel
