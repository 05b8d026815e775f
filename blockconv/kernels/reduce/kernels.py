"""The kernel of means over axes."""

from __future__ import annotations

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, table, word
from blockconv.jit.ir import store_bits
from blockconv.kernels.reduce.codegen import Summands, divide, sum_of_rows

__all__ = ["LOOPS", "MeanArgs", "MeanLoop", "reduce_mean"]

LOOPS = 3  # of one sort, kept or reduced, that six dimensions make


class MeanLoop(Arguments):
    """Neighbouring axes of one sort."""

    size = word("elements")
    stride = word("from one to the next in the source", "bytes")


class MeanArgs(Arguments):
    """Means of a storage. The innermost axes that are kept are contiguous, and no loop."""

    src = word("the source's first element", "address")
    dst = word("the first mean", "address")
    inner = word("contiguous elements whose means are results", "elements")
    segment = word("of these in a task", "elements")
    run = word("steps of the innermost kept loop in a task")
    partial = word("rows of a partial sum, which is then added to the total")
    together = word("steps of the innermost summed loop that are a row of elements")
    count = word("what a mean is made of", "elements")
    kept = table(MeanLoop, LOOPS, "other axes whose means are results, outermost first")
    reduced = table(MeanLoop, LOOPS, "axes that are summed, outermost first")
    channels = word("that exist, in a layout with blocks of channels; means of others are written as zero")
    block = word("channels in a block")
    blocks = word("blocks of channels")
    block_stride = word("from a block of channels to the next in the destination", "elements")


@jit.kernel
def reduce_mean(element, lanes, vectors, period, ragged):
    """A task is a segment of neighbouring means, of one step of the kept loops after another. Scratch: their sums.

    vectors: of a row that are summed at once. period: if not 0, elements of which several make a vector, a row.
    ragged: some results are of channels that do not exist.
    """
    kind = ElementType.of(element)
    itemsize, held, width = kind.itemsize, kind.computed.itemsize, vectors * lanes
    add_rows, quotients = sum_of_rows(kind, lanes, vectors), divide(kind, lanes, period)

    def kernel(args, first, last, scratch):
        a = MeanArgs(args)
        inner, run, outer, middle, innermost = a.inner, a.run, a.reduced[0], a.reduced[1], a.reduced[2]
        rows, stride = innermost.size // a.together, a.together * innermost.stride
        segments, line = (inner + a.segment - 1) // a.segment, a.kept[2]
        runs, parts = (line.size + run - 1) // run, max(1, (rows + a.partial - 1) // a.partial)
        for task in range(first, last):
            at, above = task % segments * a.segment, task // segments
            start, lines = above % runs * run, above // runs
            count, end = min(a.segment, inner - at), min(start + run, line.size)
            row, left = a.together * count, innermost.size % a.together * count
            origin = a.src + at * itemsize
            origin += lines % a.kept[1].size * a.kept[1].stride + lines // a.kept[1].size * a.kept[0].stride
            for step in range(start, end):
                src, result = origin + step * line.stride, (lines * line.size + step) * inner + at
                for k in range(0, row, width):
                    for lane in range(width):
                        store_bits(scratch + (k + lane) * held, 0, held)
                for i in range(outer.size):
                    for j in range(middle.size):
                        here = src + i * outer.stride + j * middle.stride
                        for part in range(parts):
                            k = part * a.partial
                            some, more = min(a.partial, rows - k), left if k + a.partial >= rows else 0
                            for column in range(0, row, width):
                                x, total = here + k * stride + column * itemsize, scratch + column * held
                                add_rows(Summands(x, some, stride, row - column, more, total))
                dst = a.dst + result * itemsize
                quotients(scratch, float(a.count), dst, count)
                if ragged:
                    for k in range(count):
                        index = result + k
                        if index // a.block_stride % a.blocks * a.block + index % a.block >= a.channels:
                            store_bits(dst + k * itemsize, 0, itemsize)

    return kernel
