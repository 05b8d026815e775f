"""The kernels of reorders, and of copies of parts: copies of contiguous extents, and transposes."""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, address, group, in_bytes, in_elements, word
from blockconv.jit.ir import digits, fill_memory, move, prefetch, store_bits
from blockconv.kernels.common.conversion import ConversionArguments, ConvertedExtents, Moved, convert_extents
from blockconv.kernels.common.copies import copy_pixels
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.common.transposed_tile import (
    BOUNCE,
    LINE,
    TABLED,
    TABLED_SRC,
    TileAddresses,
    TransposeShape,
    transpose_tile,
)
from blockconv.kernels.common.vectors import fill_elements

SCRATCH = 3 * LINE  # bytes that `reorder_transpose` needs, without a tile of its own


# ---------------------------------------------------------------- copies

COPY, FILL, ZERO = range(3)  # what is done with a part


class CopyPart(Arguments):
    """An extent that is contiguous on both sides, or that is filled; or a row of such."""

    src = in_bytes("from the first element of the source")
    dst = in_bytes("from the first element of the destination")
    size = in_elements("of the extent")
    action = word("COPY, FILL, or ZERO; of a row and an extent the larger one counts")


class CopyArgs(Operands):
    """A copy of all extents of each column of each row. A task is some extents of some columns of a row.

    Some columns are copied, and the others, around these, are filled. The source begins with the first that is copied.
    """

    parts = address("a `CopyPart` for each extent, then one for each row")
    fill = word("what filled elements are", "bits of an element")
    zero = word("what elements are that do not exist in the destination", "bits of an element")
    conversion = group(ConversionArguments, "where elements are converted")
    extents = word("extents of a column")
    cols = word("columns of a row")
    begin = word("the first that is copied")
    end = word("the first after it that is not")
    src_col = in_bytes("from a column to the next in the source")
    dst_col = in_bytes("from a column to the next in the destination")
    contiguous = in_elements("an extent of this size is one with those of the columns beside it; 0 where none is")
    task_cols = word("columns in a task")
    task_extents = word("extents in a task")
    col_tasks = word("tasks that the columns of a row make")
    extent_tasks = word("tasks that the extents of a column make")


@jit.unrolled_kernel
def reorder_copy(moved: Moved, lanes, one_vector, stream):
    """Copy bits, or convert elements by vectors of `lanes`: one for an extent, or more.

    stream: all addresses in the destination are of whole cache lines, which pass the caches by.
    """
    src_bytes, dst_bytes = moved.src_bytes, moved.dst_bytes

    def kernel(a: CopyArgs, first, last, scratch):
        extent_tasks, col_tasks, cols, begin = a.extent_tasks, a.col_tasks, a.task_cols, a.begin
        s_col, d_col, contiguous = a.src_col, a.dst_col, a.contiguous
        extents = CopyPart(a.parts)
        rows = extents[a.extents]
        for task in range(first, last):
            part, chunk, number = digits(task, extent_tasks, col_tasks)
            row, col, end = rows[number], chunk * cols, min(a.cols, chunk * cols + cols)
            left, right = min(max(begin, col), end), min(max(a.end, col), end)
            src, dst = a.src + row.src + (left - begin) * s_col, a.dst + row.dst
            for k in range(part * a.task_extents, min(a.extents, (part + 1) * a.task_extents)):
                extent = extents[k]
                size, action = extent.size, max(extent.action, row.action)
                s, d = src + extent.src, dst + extent.dst
                copied, until = (left, right) if action == COPY else (end, end)
                value = a.zero if action == ZERO else a.fill
                for c in range(col, copied):
                    for at in range(0, size * dst_bytes, dst_bytes):
                        store_bits(d + c * d_col + at, value, dst_bytes)
                for c in range(until, end):
                    for at in range(0, size * dst_bytes, dst_bytes):
                        store_bits(d + c * d_col + at, value, dst_bytes)
                if until > copied:
                    to, count = d + copied * d_col, until - copied
                    if contiguous == size:
                        count, size = 1, count * size
                    if moved.is_converted:
                        one = ConvertedExtents(s, to, size, count, s_col, d_col, a.conversion.address)
                        convert_extents(moved, lanes, one_vector, one)
                    elif stream:
                        for c in range(count):
                            for at in range(0, size * src_bytes, LINE):
                                move(to + c * d_col + at, s + c * s_col + at, LINE, 1)
                    else:
                        copy_pixels(to, s, count, d_col, s_col, size * src_bytes)

    return kernel


# ---------------------------------------------------------------- transposes


class TileRow(Arguments):
    """Tiles that have their ends in common: an index of all loops but those of tiles and `MoreTiles`."""

    src = in_bytes("from the first element of the source")
    dst = in_bytes("from the first element of the destination")
    u_copied = word("elements along u that are copied")
    u_written = word("elements along u that are written; the others of these are filled")
    v_valid = word("elements along v that exist in the source")


class MoreTiles(Arguments):
    """The longest other loop without ends."""

    size = word("steps")
    src = in_bytes("from a step to the next in the source")
    dst = in_bytes("from a step to the next in the destination")


class TileLoop(Arguments):
    """A loop over tiles: contiguous on one side; with two strides on the other, the inner one an element's."""

    size = word("elements")
    strip = word("elements in a task")
    outer = in_bytes("stride of what does not lie in one inner loop")
    inner = in_bytes("stride of an element of the inner loop")


class TransposeArgs(Arguments):
    """Tiles of u by v: u is contiguous in the source, v in the destination."""

    src = address("the source's first element")
    dst = address("the destination's first element")
    fill = word("what filled elements are", "bits of an element")
    src_fill = word("what elements of the source would become them", "bits of an element")
    conversion = group(ConversionArguments, "where elements are converted")
    table = word(
        "a `TileRow` for each row, then with `TABLED` the destination's offset of each element of u", "address"
    )
    rows = word("rows")
    more = group(MoreTiles)
    u = group(TileLoop, "its strides are the destination's")
    v = group(TileLoop, "its strides are the source's")
    ahead = in_bytes("of a source row, to be prefetched")


@jit.kernel
def reorder_transpose(shape: TransposeShape):
    """A task transposes a strip of u by a strip of v, in tiles of a x b elements (see `TransposeShape`).

    A last tile that would hang over is moved back. Scratch: a line of fill values of each side, a line for rows that
    must not be written, and a tile, if it may be longer than the source.
    """
    _, _, a, b, va, ub, flags = shape
    itemsize, dst_bytes = shape.moved.src_bytes, shape.moved.dst_bytes
    whole_u, whole_v = int(ub == b), int(va == a)  # a loop of its own, not an inner block and the loop around it
    bounce, tabled = flags & BOUNCE, flags & TABLED

    def kernel(w: TransposeArgs, first, last, scratch):
        fill_elements(itemsize, scratch, LINE // itemsize, w.src_fill)
        fill_elements(dst_bytes, scratch + LINE, LINE // dst_bytes, w.fill)
        us, u_strip, d1, d0 = w.u.size, w.u.strip, w.u.outer, w.u.inner
        vs, v_strip, s1, s0 = w.v.size, w.v.strip, w.v.outer, w.v.inner
        more, rows = w.more, TileRow(w.table)
        offsets = rows[w.rows].address
        u_strips, v_strips = (us + u_strip - 1) // u_strip, (vs + v_strip - 1) // v_strip
        for task in range(first, last):
            u_task, v_task, step, number = digits(task, u_strips, v_strips, more.size)
            row = rows[number]
            src, dst = w.src + row.src + step * more.src, w.dst + row.dst + step * more.dst
            u_copied, u_written, v_valid = row.u_copied, row.u_written, row.v_valid
            u_first, v_first = u_task * u_strip, v_task * v_strip
            ahead = w.ahead
            if ahead:
                # Rows are read in parts later: prefetch them in order, once.
                for v in range(v_first, min(vs, v_first + v_strip)):
                    line = src + (v // va) * s1 + (v % va) * s0 + u_first * itemsize
                    for at in range(0, min(ahead, (us - u_first) * itemsize), 64):
                        prefetch(line + at)
            for u_at in range(u_first, min(us, u_first + u_strip), b):
                u = min(u_at, us - b)
                u_src, u_dst, apart = src + u * itemsize, dst + (u // ub) * d1 + (u % ub) * d0, d1
                if tabled:
                    u_dst, apart = dst, offsets + 8 * u
                copied, written = u_copied - u * whole_u, u_written - u * whole_u
                for v_at in range(v_first, min(vs, v_first + v_strip), a):
                    v = min(v_at, vs - a)
                    v_src, valid = u_src + (v // va) * s1 + (v % va) * s0, v_valid - v * whole_v
                    outer, inner = s1, s0
                    if bounce and copied < ub:
                        held = scratch + SCRATCH
                        for r in range(a):
                            line, count = v_src + (r // va) * s1 + (r % va) * s0, copied if r % va < valid else 0
                            for k in range(b):  # the first ones of each loop of u
                                if k % ub < count:
                                    move(held + (r * b + k) * itemsize, line + k * itemsize, itemsize, 0)
                        v_src, outer, inner = held, va * b * itemsize, b * itemsize
                    v_dst, words = u_dst + v * dst_bytes, w.conversion.address
                    tile = TileAddresses(v_src, outer, inner, valid, v_dst, apart, d0, copied, written, scratch, words)
                    transpose_tile(shape, tile)

    return kernel


# ---------------------------------------------------------------- channel shuffles


class ShuffleSource(Arguments):
    """Neighbouring channels of the source, as many as a tile has."""

    offset = in_bytes("from the pixel's first channel")
    plane = in_bytes("where the first of them goes in the scratch")


class ShuffleResult(Arguments):
    """Neighbouring channels of the destination. As many offsets of planes follow."""

    offset = in_bytes("from the pixel's first channel")


class ShuffleArgs(Operands):
    """A permutation of the channels of every pixel, where neighbouring channels, a tile's at least, are contiguous."""

    table = address("a `ShuffleSource` for each vector of these; then a `ShuffleResult` for each")
    image = in_bytes("from an image, or a row of pixels that are equally far apart, to the next")
    pixels = word("in an image, or in such a row")
    col = in_bytes("from a pixel to the next")
    tiles = word("that these pixels make")
    sources = word("tiles of the source's channels")
    results = word("tiles of the destination's channels")
    zero = in_bytes("where the scratch has a plane of zeros, for channels that do not exist")


@jit.kernel
def permute_channels(type: ElementType, pixels, width):
    """A task is a tile of pixels, all channels, `width` at a time. Scratch: a vector of the pixels for each channel.

    type: of the elements, which are bits.
    """
    to_planes = TransposeShape(type, type, pixels, width, pixels, width, 0)
    to_tile = TransposeShape(type, type, width, pixels, width, pixels, TABLED_SRC)
    plane = pixels * type.itemsize

    def kernel(a: ShuffleArgs, first, last, scratch):
        col, tiles, sources, results = a.col, a.tiles, a.sources, a.results
        zero = scratch + a.zero
        fill_memory(zero, plane, 0)
        for task in range(first, last):
            pixel = min(task % tiles * pixels, a.pixels - pixels)
            at = task // tiles * a.image + pixel * col
            src, dst = a.src + at, a.dst + at
            row = a.table
            for _ in range(sources):
                source = ShuffleSource(row)
                at, to = src + source.offset, scratch + source.plane
                transpose_tile(to_planes, TileAddresses(at, 0, col, pixels, to, 0, plane, width, width, 0, 0))
                row += ShuffleSource.nbytes
            for _ in range(results):
                result = ShuffleResult(row)
                offsets, to = row + ShuffleResult.nbytes, dst + result.offset
                tile = TileAddresses(scratch, offsets, 0, width, to, 0, col, pixels, pixels, 0, 0)
                transpose_tile(to_tile, tile)
                row += ShuffleResult.nbytes + 8 * width

    return kernel
