"""Copies of bytes inside kernels."""

from blockconv import jit
from blockconv.jit.arguments import Arguments, address, in_bytes, word
from blockconv.jit.ir import fill_memory, load_i64, move, store_repeated
from blockconv.kernels.common.tile import LINE


def copy_bytes(dst, src, size, widths=(64, 16, 4)):
    """Copy `size` bytes, by the widest moves of these that fit. The last one is moved back to be whole."""
    if not widths:
        for at in range(size):
            move(dst + at, src + at, 1, 0)
    elif size >= widths[0]:
        for at in range(0, size - widths[0] + 1, widths[0]):
            move(dst + at, src + at, widths[0], 0)
        if size % widths[0]:
            move(dst + size - widths[0], src + size - widths[0], widths[0], 0)
    else:
        copy_bytes(dst, src, size, widths[1:])


def copy_pixels(dst, src, pixels, d_col, s_col, size, sizes=(4, 1, 2, 8, 16, 32, 64, 48)):
    """`size` bytes of each pixel; the sizes that layouts make are one move, or two."""
    if not sizes:
        for _ in range(pixels):
            copy_bytes(dst, src, size)
            dst, src = dst + d_col, src + s_col
    elif size == sizes[0]:
        last = sizes[0] & -sizes[0]
        for _ in range(pixels):
            if sizes[0] > last:
                move(dst, src, sizes[0] - last, 0)
            move(dst + sizes[0] - last, src + sizes[0] - last, last, 0)
            dst, src = dst + d_col, src + s_col
    else:
        copy_pixels(dst, src, pixels, d_col, s_col, size, sizes[1:])


def copy_blocks(dst, dst_step, src, src_step, size, block):
    """Copy `size` bytes in blocks of `block` bytes, which are so many bytes apart on either side."""
    whole = size // block
    copy_pixels(dst, src, whole, dst_step, src_step, block)
    copy_bytes(dst + whole * dst_step, src + whole * src_step, size - whole * block)


def gather_blocks(dst, src, size, block, stride):
    """Copy `size` bytes from blocks of `block` bytes, which are `stride` bytes apart, to a contiguous extent."""
    if stride == block:
        copy_bytes(dst, src, size)
        return
    copy_blocks(dst, block, src, stride, size, block)


def gather_window(dst, dst_col, src, src_row, src_col, rows, columns, size):
    """Copy `size` bytes, whole cache lines, of each pixel of so many rows.

    dst_col: from a pixel to the next where they are gathered, also from a row's last one to the next row's first.
    src_row, src_col: likewise from a row to the next and from a pixel to the next of the source.
    """
    for r in range(rows):
        pixel = src + r * src_row
        for _ in range(columns):
            for at in range(0, size, LINE):
                move(dst + at, pixel + at, LINE, 0)
            dst, pixel = dst + dst_col, pixel + src_col


def fill_pixels(dst, pixels, size, fill):
    """Write `size` bytes of each of so many pixels that are neighbours, each as the low byte of `fill`.

    Few of them: the widest stores that divide a pixel take less than a masked one.
    """
    width = min(64, size & -size)
    for at in range(0, pixels * size, width):
        store_repeated(dst + at, fill, width)


class FillArgs(Arguments):
    """Extents of equal size, as far from each other."""

    dst = address("the first extent")
    size = in_bytes("of an extent")
    step = in_bytes("from an extent to the next")
    fill = word("whose low byte is written; 0 where `given` says it", "a word")
    given = word("the address of such a word, or 0")


@jit.kernel
def fill_extents():
    """A task is an extent."""

    def kernel(a: FillArgs, first, last, scratch):
        size, fill = a.size, a.fill
        if a.given != 0:
            fill = load_i64(a.given, 0)
        for task in range(first, last):
            fill_memory(a.dst + task * a.step, size, fill)

    return kernel


class SpreadArgs(Arguments):
    """Elements of the source at positions of the destination."""

    dst = address("the destination")
    src = address("the source")
    table = address("for each element of the destination, the source's by a number from 1 on; 0 for a zero")


@jit.kernel
def spread_elements(itemsize: int):
    """A task is an element of the destination."""

    def kernel(a: SpreadArgs, first, last, scratch):
        for task in range(first, last):
            number, at = load_i64(a.table, task), a.dst + task * itemsize
            if number == 0:
                fill_memory(at, itemsize, 0)
            else:
                move(at, a.src + (number - 1) * itemsize, itemsize, 0)

    return kernel
