"""Reorders' kernels: copies of contiguous extents, transposes, element by element."""

from blockconv import jit
from blockconv.jit.arguments import Arguments, group, table, word
from blockconv.jit.ir import load_bits, move, prefetch, store_bits
from blockconv.kernels.common.conversion import ConversionArguments, ConvertedExtents, Moved, convert_extents
from blockconv.kernels.common.transposed_tile import (
    BOUNCE,
    LINE,
    TABLED,
    TileAddresses,
    TransposeShape,
    transpose_tile,
)

SCRATCH = 3 * LINE  # bytes that `reorder_transpose` needs, without a tile of its own


# ---------------------------------------------------------------- loop nests


class Limit(Arguments):
    """A dimension with indices that have no element in the source."""

    copied = word("indices below this are copied")
    written = word("from there to below this, filled; from here on, left alone")


class OuterLoop(Arguments):
    """A loop around the loops of a task. index0 to index3: of the dimensions of the four limits."""

    size = word("steps")
    src = word("from a step to the next in the source", "bytes")
    dst = word("from a step to the next in the destination", "bytes")
    index0 = word("what a step adds to the first limited index")
    index1 = word("to the second")
    index2 = word("to the third")
    index3 = word("to the fourth")


class NestArgs(Arguments):
    """A loop nest from a source to a destination; at the end of the block are its outer loops."""

    src = word("the source's first element", "address")
    dst = word("the destination's first element", "address")
    fill = word("what filled elements are", "bits of an element")
    src_fill = word("what elements of the source would become them", "bits of an element")
    conversion = group(ConversionArguments, "where elements are converted")
    depth = word("outer loops")
    limits = table(
        Limit, 4, "of the dimension of the source's contiguous loop, of the destination's, and of two others"
    )


def outer_position(a, task):
    """The outer loops' position: (source offset, destination offset, four limited indices); innermost loop first."""
    src, dst, i0, i1, i2, i3 = 0, 0, 0, 0, 0, 0
    loop = a.loops
    for _ in range(a.depth):
        size = loop.size
        above = task // size
        i = task - above * size
        src += i * loop.src
        dst += i * loop.dst
        i0 += i * loop.index0
        i1 += i * loop.index1
        i2 += i * loop.index2
        i3 += i * loop.index3
        task = above
        loop = loop[1]
    return src, dst, i0, i1, i2, i3


# ---------------------------------------------------------------- copies


class CopyLoop(Arguments):
    """A loop over contiguous extents inside a task."""

    size = word("steps")
    src = word("from a step to the next in the source", "bytes")
    dst = word("from a step to the next in the destination", "bytes")
    index = word("what a step adds to the first limited index")
    strip = word("steps in a task")


class CopyArgs(NestArgs):
    """Extents that are contiguous on both sides, in two loops, x inside y, and the outer loops."""

    extent = word("in an extent", "elements")
    x = group(CopyLoop)
    y = group(CopyLoop)
    loops = table(OuterLoop, None, "innermost first")


@jit.unrolled_kernel
def reorder_copy(moved: Moved, vector_bytes, one_vector, stream):
    """A task copies a strip of x by a strip of y, by vectors of `vector_bytes`: one for an extent, or more.

    Bytes of the source; and of the destination, but where elements are converted.
    """
    converted, itemsize, dst_bytes = int(moved.is_converted), moved.src_bytes, moved.dst_bytes
    lanes = vector_bytes // itemsize
    whole = int(one_vector or converted)  # extents that exist are moved one like the other

    def kernel(args, first, last, scratch):
        a = CopyArgs(args)
        fill, extent = a.fill, a.extent
        x_size, x_src, x_dst, x_index, x_strip = a.x.size, a.x.src, a.x.dst, a.x.index, a.x.strip
        y_size, y_src, y_dst, y_index, y_strip = a.y.size, a.y.src, a.y.dst, a.y.index, a.y.strip
        x_strips, y_strips = (x_size + x_strip - 1) // x_strip, (y_size + y_strip - 1) // y_strip
        own, third, fourth = a.limits[0], a.limits[2], a.limits[3]
        for task in range(first, last):
            x_task, rest = task % x_strips, task // x_strips
            src, dst, i0, _, i2, i3 = outer_position(a, rest // y_strips)
            if i2 >= third.written or i3 >= fourth.written:
                continue
            exists = i2 < third.copied and i3 < fourth.copied
            src, dst = src + a.src, dst + a.dst
            y_first, x_first = (rest % y_strips) * y_strip, x_task * x_strip
            for y in range(y_first, min(y_size, y_first + y_strip)):
                x_last = min(x_size, x_first + x_strip)
                index_y = i0 + y * y_index
                furthest = index_y + (x_last - 1) * x_index + extent
                s, d = src + y * y_src + x_first * x_src, dst + y * y_dst + x_first * x_dst
                if whole and exists and furthest <= own.copied:
                    if converted:
                        extents = ConvertedExtents(s, d, extent, x_last - x_first, x_src, x_dst, a.conversion.address)
                        convert_extents(moved, lanes, one_vector, extents)
                        continue
                    for _ in range(x_first, x_last):
                        move(d, s, vector_bytes, stream)
                        s, d = s + x_src, d + x_dst
                    continue
                for x in range(x_first, x_last):
                    index = index_y + x * x_index
                    valid = min(extent, own.copied - index) if exists else 0
                    size = valid * itemsize
                    if converted:
                        convert_extents(moved, lanes, 0, ConvertedExtents(s, d, valid, 1, 0, 0, a.conversion.address))
                    elif size >= vector_bytes:
                        for at in range(0, size - vector_bytes + 1, vector_bytes):
                            move(d + at, s + at, vector_bytes, stream)
                        if size % vector_bytes:
                            move(d + size - vector_bytes, s + size - vector_bytes, vector_bytes, 0)
                    else:
                        for k in range(valid):
                            store_bits(d + k * itemsize, load_bits(s + k * itemsize, itemsize), itemsize)
                    for k in range(max(valid, 0), min(extent, own.written - index)):
                        store_bits(d + k * dst_bytes, fill, dst_bytes)
                    s, d = s + x_src, d + x_dst

    return kernel


# ---------------------------------------------------------------- transposes


class TileLoop(Arguments):
    """A loop over tiles: contiguous on one side; with two strides on the other, the inner one an element's."""

    size = word("elements")
    strip = word("elements in a task")
    outer = word("stride of what does not lie in one inner loop; or the address of a table of offsets", "bytes")
    inner = word("stride of an element of the inner loop", "bytes")
    index = word("what an element adds to its limited index")


class TransposeArgs(NestArgs):
    """Tiles of u by v: u is contiguous in the source, v in the destination; and the outer loops."""

    u = group(TileLoop, "its strides are the destination's")
    v = group(TileLoop, "its strides are the source's")
    ahead = word("of a source row, to be prefetched", "bytes")
    loops = table(OuterLoop, None, "innermost first")


def fill_line(line, value, itemsize):
    """Fill a line of scratch with elements of these bits."""
    for at in range(0, LINE, itemsize):
        store_bits(line + at, value, itemsize)


def copy_first(dst, src, elements, inner, count, itemsize):
    """Copy elements in groups of `inner`, the first `count` of each group; `elements` in all groups."""
    for k in range(elements):
        if k % inner < count:
            store_bits(dst + k * itemsize, load_bits(src + k * itemsize, itemsize), itemsize)


@jit.kernel
def reorder_transpose(shape: TransposeShape):
    """A task transposes a strip of u by a strip of v, in tiles of a x b elements (see `TransposeShape`).

    A last tile that would hang over is moved back. Scratch: a line of fill values of each side, a line for rows that
    must not be written, and a tile, if it may be longer than the source.
    """
    _, _, a, b, va, ub, flags = shape
    itemsize, dst_bytes = shape.moved.src_bytes, shape.moved.dst_bytes
    whole_u, whole_v = int(ub == b), int(va == a)  # a loop of its own, not an inner block and the loop around it
    bounce, tabled = int(bool(flags & BOUNCE)), int(bool(flags & TABLED))

    def kernel(args, first, last, scratch):
        w = TransposeArgs(args)
        fill_line(scratch, w.src_fill, itemsize)
        fill_line(scratch + LINE, w.fill, dst_bytes)
        us, u_strip, d1, d0, u_index = w.u.size, w.u.strip, w.u.outer, w.u.inner, w.u.index
        vs, v_strip, s1, s0, v_index = w.v.size, w.v.strip, w.v.outer, w.v.inner, w.v.index
        of_u, of_v, third, fourth = w.limits[0], w.limits[1], w.limits[2], w.limits[3]
        u_strips, v_strips = (us + u_strip - 1) // u_strip, (vs + v_strip - 1) // v_strip
        for task in range(first, last):
            u_task, rest = task % u_strips, task // u_strips
            src, dst, i0, i1, i2, i3 = outer_position(w, rest // v_strips)
            if i2 >= third.written or i3 >= fourth.written or i1 >= of_v.written:
                continue
            exists = i2 < third.copied and i3 < fourth.copied
            src, dst = src + w.src, dst + w.dst
            # How many elements of u and v exist, and up to which element of u is written.
            u_copied = (of_u.copied - i0 + u_index - 1) // u_index
            u_written = (of_u.written - i0 + u_index - 1) // u_index
            v_valid = (of_v.copied - i1 + v_index - 1) // v_index if exists else 0
            u_first, v_first = u_task * u_strip, (rest % v_strips) * v_strip
            ahead = w.ahead
            if ahead:
                # Rows are read in parts later: prefetch them in order, once.
                for v in range(v_first, min(vs, v_first + v_strip)):
                    row = src + (v // va) * s1 + (v % va) * s0 + u_first * itemsize
                    for at in range(0, min(ahead, (us - u_first) * itemsize), 64):
                        prefetch(row + at)
            for u_at in range(u_first, min(us, u_first + u_strip), b):
                u = min(u_at, us - b)
                u_src, u_dst, rows = src + u * itemsize, dst + (u // ub) * d1 + (u % ub) * d0, d1
                if tabled:
                    u_dst, rows = dst, d1 + 8 * u
                copied, written = u_copied - u * whole_u, u_written - u * whole_u
                for v_at in range(v_first, min(vs, v_first + v_strip), a):
                    v = min(v_at, vs - a)
                    v_src, valid = u_src + (v // va) * s1 + (v % va) * s0, v_valid - v * whole_v
                    outer, inner = s1, s0
                    if bounce and copied < ub:
                        held = scratch + SCRATCH
                        for r in range(a):
                            row, count = v_src + (r // va) * s1 + (r % va) * s0, copied if r % va < valid else 0
                            copy_first(held + r * b * itemsize, row, b, ub, count, itemsize)
                        v_src, outer, inner = held, va * b * itemsize, b * itemsize
                    v_dst, words = u_dst + v * dst_bytes, w.conversion.address
                    tile = TileAddresses(v_src, outer, inner, valid, v_dst, rows, d0, copied, written, scratch, words)
                    transpose_tile(shape, tile)

    return kernel


# ---------------------------------------------------------------- element by element


class Offset(Arguments):
    """The number that an index adds to the offset of an element."""

    src = word("in the source; negative where it has no such element", "elements")
    dst = word("in the destination", "elements")


class ElementArgs(Arguments):
    """Any two layouts. A task is an index of the outer dimensions."""

    src = word("the source's first element", "address")
    dst = word("the destination's first element", "address")
    fill = word("what elements are that the source does not have", "bits of an element")
    conversion = group(ConversionArguments, "where elements are converted")
    offsets = word("an `Offset` for each index of the outer dimensions, then of the inner ones", "address")
    outer = word("indices of the outer dimensions")
    inner = word("indices of the inner dimensions")


@jit.unrolled_kernel
def reorder_elements(moved: Moved):
    """A task writes all elements of an index of the outer dimensions, one by one."""
    itemsize, dst_bytes = moved.src_bytes, moved.dst_bytes

    def kernel(args, first, last, scratch):
        a = ElementArgs(args)
        src, dst, fill, inner, words = a.src, a.dst, a.fill, a.inner, a.conversion.address
        outer = Offset(a.offsets)
        inside = outer[a.outer]
        for task in range(first, last):
            read, written = outer[task].src, outer[task].dst
            for k in range(inner):
                at, to = read + inside[k].src, dst + (written + inside[k].dst) * dst_bytes
                if at < 0:
                    store_bits(to, fill, dst_bytes)
                elif moved.is_converted:
                    convert_extents(moved, 1, 1, ConvertedExtents(src + at * itemsize, to, 1, 1, 0, 0, words))
                else:
                    store_bits(to, load_bits(src + at * itemsize, itemsize), dst_bytes)

    return kernel
