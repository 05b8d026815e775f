"""Planes of a workspace that are interleaved into the rows of a destination: columns of a stride, computed apart."""

from blockconv import jit
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import load_bits, store_bits
from blockconv.kernels.common.packed_pixels import bits_transposer

FEW = 4  # elements of a vector of few


class InterleavedPlanes(Arguments):
    """Columns of the destination that were computed together, in rows that were; planes of the workspace."""

    at = word("the first plane, from the workspace", "bytes")
    n = word("from an image to the next", "bytes")
    channel = word("from a plane to the next", "bytes")
    row = word("from a row to the next", "bytes")
    first = word("their first column", "columns")
    size = word("how many columns; 0: these rows are in the destination", "columns")


class InterleaveArgs(Arguments):
    """Planes that are interleaved. A task is some rows of a channel of an image."""

    src = word("the workspace", "address")
    dst = word("the destination", "address")
    planes = word("`InterleavedPlanes` by the first row and the first column of each remainder", "address")
    channels = word("channels")
    parts = word("tasks that share the rows of a channel")
    rows = word("rows of the destination", "rows")
    n = word("from an image of the destination to the next", "bytes")
    channel = word("from a channel to the next", "bytes")
    row = word("from a row to the next", "bytes")
    sh = word("vertical stride", "rows")
    sw = word("horizontal stride", "columns")
    begins = word("remainders of rows", "rows")
    columns = word("remainders of columns", "columns")


def _pairs_of(itemsize: int, lanes: int):
    """pair(dst, a, b, count): two rows of so many elements, at least `lanes`, interleaved."""
    transpose = bits_transposer(itemsize, lanes, narrow=2)

    def pair(dst, a, b, count):
        for k in range(0, count, lanes):
            at = min(k, count - lanes) * itemsize  # the last ones are moved back, to be as many
            transpose(dst + 2 * at, 2 * itemsize, a + at, b - a, lanes, 2, 2)

    return pair


@jit.kernel
def interleave_rows(itemsize, lanes):
    """Interleave columns: two by vectors of `lanes`, or of fewer where there are fewer, or else element by element."""
    many, some = (_pairs_of(itemsize, count) for count in (lanes, FEW))

    def kernel(a: InterleaveArgs, first, last, scratch):
        sh, sw, columns, parts = a.sh, a.sw, a.columns, InterleavedPlanes(a.planes)
        for task in range(first, last):
            part, plane = task % a.parts, task // a.parts
            c, n = plane % a.channels, plane // a.channels
            dst_plane = a.dst + n * a.n + c * a.channel
            for begin in range(a.begins):
                of_row = parts[begin * columns]
                even, odd = of_row, of_row[min(1, columns - 1)]
                x, y = a.src + even.at + n * even.n + c * even.channel, a.src + odd.at + n * odd.n + c * odd.channel
                pairs = odd.size if sw == 2 and even.size > 0 and odd.size >= FEW else 0
                rows = (a.rows - begin + sh - 1) // sh
                for row in range(rows * part // a.parts, rows * (part + 1) // a.parts):
                    dst = dst_plane + (begin + row * sh) * a.row
                    if pairs >= lanes:
                        many(dst, x + row * even.row, y + row * odd.row, pairs)
                    elif pairs > 0:
                        some(dst, x + row * even.row, y + row * odd.row, pairs)
                    for j in range(columns):
                        of = of_row[j]
                        src = a.src + of.at + n * of.n + c * of.channel + row * of.row
                        for k in range(pairs, of.size):
                            to = dst + (of.first + k * sw) * itemsize
                            store_bits(to, load_bits(src + k * itemsize, itemsize), itemsize)

    return kernel
