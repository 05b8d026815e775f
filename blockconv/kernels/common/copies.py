"""Copies of bytes inside kernels."""

from blockconv import jit
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import fill_memory, load_bits, load_i64, move, store_bits, store_repeated
from blockconv.kernels.common.tile import LINE


def copy_bytes(dst, src, size):
    """Copy `size` bytes."""
    if size >= 64:
        for at in range(0, size - 63, 64):
            move(dst + at, src + at, 64, 0)
        if size % 64:
            move(dst + size - 64, src + size - 64, 64, 0)
    elif size >= 16:
        for at in range(0, size - 15, 16):
            move(dst + at, src + at, 16, 0)
        if size % 16:
            move(dst + size - 16, src + size - 16, 16, 0)
    elif size >= 4:
        for at in range(0, size - 3, 4):
            move(dst + at, src + at, 4, 0)
        if size % 4:
            move(dst + size - 4, src + size - 4, 4, 0)
    else:
        for at in range(size):
            move(dst + at, src + at, 1, 0)


def copy_pixels(dst, src, pixels, d_col, s_col, size):
    """`size` bytes of each pixel; the sizes that layouts make are one move."""
    if size == 4:
        for _ in range(pixels):
            store_bits(dst, load_bits(src, 4), 4)
            dst, src = dst + d_col, src + s_col
    elif size == 1:
        for _ in range(pixels):
            store_bits(dst, load_bits(src, 1), 1)
            dst, src = dst + d_col, src + s_col
    elif size == 8:
        for _ in range(pixels):
            store_bits(dst, load_bits(src, 8), 8)
            dst, src = dst + d_col, src + s_col
    elif size == 16:
        for _ in range(pixels):
            move(dst, src, 16, 0)
            dst, src = dst + d_col, src + s_col
    elif size == 32:
        for _ in range(pixels):
            move(dst, src, 32, 0)
            dst, src = dst + d_col, src + s_col
    elif size == 64:
        for _ in range(pixels):
            move(dst, src, 64, 0)
            dst, src = dst + d_col, src + s_col
    elif size == 48:
        for _ in range(pixels):
            move(dst, src, 32, 0)
            move(dst + 32, src + 32, 16, 0)
            dst, src = dst + d_col, src + s_col
    elif size > 64:
        for _ in range(pixels):
            for at in range(0, size - 63, 64):
                move(dst + at, src + at, 64, 0)
            move(dst + size - 64, src + size - 64, 64, 0)
            dst, src = dst + d_col, src + s_col
    else:
        for _ in range(pixels):
            copy_bytes(dst, src, size)
            dst, src = dst + d_col, src + s_col


def gather_blocks(dst, src, size, block, stride):
    """Copy `size` bytes from blocks of `block` bytes, which are `stride` bytes apart, to a contiguous extent."""
    if stride == block:
        copy_bytes(dst, src, size)
        return
    whole = size // block
    copy_pixels(dst, src, whole, block, stride, block)
    copy_bytes(dst + whole * block, src + whole * stride, size - whole * block)


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


def scatter_blocks(dst, src, size, block, stride):
    """The inverse: copy a contiguous extent of `size` bytes to blocks."""
    whole = size // block
    copy_pixels(dst, src, whole, stride, block, block)
    copy_bytes(dst + whole * stride, src + whole * block, size - whole * block)


def fill_bytes(dst, size, fill):
    """Write `size` bytes, each as the low byte of `fill`, whose four low bytes are equal."""
    whole = size & ~3
    for at in range(0, whole, 4):
        store_bits(dst + at, fill, 4)
    for at in range(whole, size):
        store_bits(dst + at, fill, 1)


def fill_pixels(dst, pixels, size, fill):
    """Fill `size` bytes of each of so many pixels that are neighbours, as `fill_bytes` does."""
    if size == 16:
        for k in range(pixels):
            store_repeated(dst + 16 * k, fill, 16)
    elif size == 32:
        for k in range(pixels):
            store_repeated(dst + 32 * k, fill, 32)
    elif size == 64:
        for k in range(pixels):
            store_repeated(dst + 64 * k, fill, 64)
    else:
        fill_bytes(dst, pixels * size, fill)


class FillArgs(Arguments):
    """Extents of equal size, as far from each other."""

    dst = word("the first extent", "address")
    size = word("of an extent", "bytes")
    step = word("from an extent to the next", "bytes")
    fill = word("whose low byte is written; 0 where `given` says it", "a word")
    given = word("the address of such a word, or 0")


@jit.kernel
def fill_extents():
    """A task is an extent."""

    def kernel(args, first, last, scratch):
        a = FillArgs(args)
        size, fill = a.size, a.fill
        if a.given != 0:
            fill = load_i64(a.given, 0)
        for task in range(first, last):
            fill_memory(a.dst + task * a.step, size, fill)

    return kernel
