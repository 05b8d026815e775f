"""The kernel of element-wise ops whose operands have types of their own."""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, group, table, word
from blockconv.jit.ir import store_bits
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.pointwise.codegen import KINDS, PointwiseRun, pointwise_extent


class PointwiseLoop(Arguments):
    """A loop over contiguous extents of the destination, or over such loops."""

    size = word("how many")
    dst = word("from one to the next in the destination", "bytes")
    first = word("from one to the next in the first operand", "bytes")
    second = word("from one to the next in the second operand", "bytes")
    third = word("from one to the next in the third operand", "bytes")
    channels = word("from one to the next, where the last block of channels has a tail", "channels")


class PointwiseArgs(Operands):
    """dst = kind(operands). A task is a piece of each of several neighbouring extents."""

    second = word("the second operand", "address")
    third = word("the third operand", "address")
    extent = word("in an extent", "elements")
    piece = word("of an extent in a task", "elements")
    pieces = word("tasks that an extent makes")
    rows = group(PointwiseLoop, "the innermost loop over extents")
    task_rows = word("extents in a task")
    row_tasks = word("tasks that the innermost loop makes")
    valid = word("channels that exist, where a block has a tail")
    depth = word("loops around the innermost")
    loops = table(PointwiseLoop, None, "loops around it, innermost first")


@jit.kernel
def pointwise(kind, src, dst, full, lanes):
    """A task reads and writes a piece of each of several extents; an extent's channels that do not exist are zeros."""
    source, target = ElementType.of(src), ElementType.of(dst)
    compute = pointwise_extent(KINDS[kind], source, target, full, lanes)
    itemsize, first_size, size = target.itemsize, 1 if KINDS[kind] == "where" else source.itemsize, source.itemsize
    one, two, three = (full >> k & 1 for k in range(3))

    def kernel(args, first, last, scratch):
        a = PointwiseArgs(args)
        rows = a.rows
        for task in range(first, last):
            start, rest = (task % a.pieces) * a.piece, task // a.pieces
            begin, rest = (rest % a.row_tasks) * a.task_rows, rest // a.row_tasks
            d, channel = a.dst + start * itemsize, 0
            x, y, z = a.src + one * start * first_size, a.second + two * start * size, a.third + three * start * size
            loop = a.loops
            for _ in range(a.depth):
                i, rest = rest % loop.size, rest // loop.size
                d, channel = d + i * loop.dst, channel + i * loop.channels
                x, y, z = x + i * loop.first, y + i * loop.second, z + i * loop.third
                loop = loop[1]
            count = min(a.piece, a.extent - start)
            for row in range(begin, min(rows.size, begin + a.task_rows)):
                exist = min(count, a.valid - channel - row * rows.channels)
                to = d + row * rows.dst
                compute(PointwiseRun(exist, to, x + row * rows.first, y + row * rows.second, z + row * rows.third))
                for k in range(exist, count):
                    store_bits(to + k * itemsize, 0, itemsize)

    return kernel
