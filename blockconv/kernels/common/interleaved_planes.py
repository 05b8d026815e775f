"""Planes of a workspace are interleaved into the rows of a destination.

Each plane has every s-th column, for a stride s, and was computed separately.
"""

from blockconv import jit
from blockconv.jit.arguments import Arguments, address, in_bytes, in_columns, in_rows, word
from blockconv.jit.ir import digits, load_bits, store_bits
from blockconv.kernels.common.packed_pixels import bits_transposer

FEW = 4  # elements of a vector of few


class InterleavedPlanes(Arguments):
    """Columns of the destination that were computed together, in rows that were; planes of the workspace."""

    at = in_bytes("the first plane, from the workspace")
    n = in_bytes("from an image to the next")
    channel = in_bytes("from a plane to the next")
    row = in_bytes("from a row to the next")
    first = in_columns("their first column")
    size = in_columns("how many columns; 0: these rows are in the destination")


class InterleaveArgs(Arguments):
    """Planes that are interleaved. A task is some rows of a channel of an image."""

    src = address("the workspace")
    dst = address("the destination")
    planes = address("`InterleavedPlanes` by the first row and the first column of each remainder")
    channels = word("channels")
    parts = word("tasks that share the rows of a channel")
    rows = in_rows("rows of the destination")
    n = in_bytes("from an image of the destination to the next")
    channel = in_bytes("from a channel to the next")
    row = in_bytes("from a row to the next")
    sh = in_rows("vertical stride")
    sw = in_columns("horizontal stride")
    begins = in_rows("remainders of rows")
    columns = in_columns("remainders of columns")


def _pairs_of(itemsize: int, lanes: int):
    """pair(dst, a, b, count): two rows of so many elements, at least `lanes`, interleaved."""
    transpose = bits_transposer(itemsize, lanes, narrow=2)

    def pair(dst, a, b, count):
        for k in range(0, count, lanes):
            at = min(k, count - lanes) * itemsize  # the last step begins earlier: it has `lanes` elements too
            transpose(dst + 2 * at, 2 * itemsize, a + at, b - a, lanes, 2, 2)

    return pair


@jit.kernel
def interleave_rows(itemsize, lanes):
    """Interleave columns: two by vectors of `lanes`, or of fewer where there are fewer, or else element by element."""
    many, some = (_pairs_of(itemsize, count) for count in (lanes, FEW))

    def kernel(a: InterleaveArgs, first, last, scratch):
        sh, sw, columns, parts = a.sh, a.sw, a.columns, InterleavedPlanes(a.planes)
        for task in range(first, last):
            part, c, n = digits(task, a.parts, a.channels)
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
