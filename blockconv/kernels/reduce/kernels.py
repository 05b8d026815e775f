"""The kernels of means over axes, and of sums, products, maxima and minima."""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, table, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import store_bits
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.reduce.codegen import Summands, begin_sums, divide, sum_of_rows, summed_type

LOOPS = 3  # of one sort, kept or reduced, that six dimensions make
WIDE = 8  # vectors of folded rows that are summed at once


class MeanLoop(Arguments):
    """Neighbouring axes of one sort."""

    size = word("elements")
    stride = word("from one to the next in the source", "bytes")


class Means(Operands):
    """The words that kernels of means share. The innermost kept axes are contiguous, and no loop."""

    inner = word("contiguous elements whose means are results", "elements")
    partial = word("rows of a partial sum, which is then added to the total")
    row_steps = word("steps of the innermost summed axis that are a row of elements")
    count = word("what a mean is made of, elements; 1 for results that are no means")
    channels = word("that exist, in a layout with blocks of channels; means of others are written as zero")
    block = word("channels in a block")
    blocks = word("blocks of channels")
    block_stride = word("from a block of channels to the next in the destination", "elements")


class MeanArgs(Means):
    """Means of a storage."""

    segment = word("of the inner elements in a task", "elements")
    run = word("steps of the innermost kept loop in a task")
    kept = table(MeanLoop, LOOPS, "other axes whose means are results, outermost first")
    reduced = table(MeanLoop, LOOPS, "axes that are summed, outermost first")


class FoldedMeanArgs(Means):
    """Means of rows that hold several kept lines, each of a summed axis: rows are summed first, then each line.

    A storage is [outer][rows][lines][summed][inner].
    """

    outer_stride = word("from a step of the outer loop to the next in the source", "bytes")
    rows = word("that are summed")
    row_stride = word("from a row to the next", "bytes")
    lines = word("in a row")
    line = word("in a line", "elements")
    run = word("lines in a task")
    totals = word("where in the scratch the sums of a line lie", "bytes")


@inline
def _zero_missing(a, first, count, itemsize):
    """Zero the means of channels that do not exist, among `count` means from number `first` on."""
    for index in range(first, first + count):
        if index // a.block_stride % a.blocks * a.block + index % a.block >= a.channels:
            store_bits(a.dst + index * itemsize, 0, itemsize)


@jit.kernel
def reduce_mean(element, lanes, vectors, period, ragged, how):
    """A task is a segment of neighbouring means, of one step of the kept loops after another. Scratch: their sums.

    vectors: of a row that are summed at once. period: elements of a row, where several rows make a vector; else 0.
    ragged: some results are of channels that do not exist. how: a `Combine`.
    """
    kind = ElementType.of(element)
    itemsize, held, width = kind.itemsize, summed_type(kind).itemsize, vectors * lanes
    add_rows, quotients = sum_of_rows(kind, lanes, vectors, how), divide(kind, lanes, period, how)
    begin = begin_sums(kind, lanes, how)

    def kernel(args, first, last, scratch):
        a = MeanArgs(args)
        inner, run, outer, middle, innermost = a.inner, a.run, a.reduced[0], a.reduced[1], a.reduced[2]
        rows, stride = innermost.size // a.row_steps, a.row_steps * innermost.stride
        segments, line = (inner + a.segment - 1) // a.segment, a.kept[2]
        runs, parts = (line.size + run - 1) // run, max(1, (rows + a.partial - 1) // a.partial)
        for task in range(first, last):
            at, above = task % segments * a.segment, task // segments
            start, lines = above % runs * run, above // runs
            count, end = min(a.segment, inner - at), min(start + run, line.size)
            row, left = a.row_steps * count, innermost.size % a.row_steps * count
            origin = a.src + at * itemsize
            origin += lines % a.kept[1].size * a.kept[1].stride + lines // a.kept[1].size * a.kept[0].stride
            for step in range(start, end):
                src, result = origin + step * line.stride, (lines * line.size + step) * inner + at
                begin(scratch, (row + width - 1) // width * width)
                for i in range(outer.size):
                    for j in range(middle.size):
                        here = src + i * outer.stride + j * middle.stride
                        for part in range(parts):
                            k = part * a.partial
                            some, more = min(a.partial, rows - k), left if k + a.partial >= rows else 0
                            for column in range(0, row, width):
                                x, total = here + k * stride + column * itemsize, scratch + column * held
                                add_rows(Summands(x, some, stride, row - column, more, total))
                quotients(scratch, float(a.count), a.dst + result * itemsize, count)
                if ragged:
                    _zero_missing(a, result, count, itemsize)

    return kernel


@jit.kernel
def reduce_folded(element, lanes, vectors, period, ragged, how):
    """A task is some lines of each row of one step of the outer loop. Scratch: the sums of the rows, and of a line.

    Options as in `reduce_mean`; a row of a line's elements is no longer than `vectors`.
    """
    kind = ElementType.of(element)
    itemsize, held, width, wide = kind.itemsize, summed_type(kind).itemsize, vectors * lanes, WIDE * lanes
    add_rows, add_steps = sum_of_rows(kind, lanes, WIDE, how), sum_of_rows(summed_type(kind), lanes, vectors, how)
    quotients, begin = divide(kind, lanes, period, how), begin_sums(kind, lanes, how)

    def kernel(args, first, last, scratch):
        a = FoldedMeanArgs(args)
        inner, line, totals = a.inner, a.line, scratch + a.totals
        runs, row = (a.lines + a.run - 1) // a.run, a.row_steps * inner
        steps, left = line // row, line % row
        for task in range(first, last):
            start, outer = task % runs * a.run, task // runs
            lines = min(a.run, a.lines - start)
            src, elements = a.src + outer * a.outer_stride + start * line * itemsize, lines * line
            begin(scratch, (elements + wide - 1) // wide * wide)
            for part in range((a.rows + a.partial - 1) // a.partial):
                k = part * a.partial
                some, here = min(a.partial, a.rows - k), src + k * a.row_stride
                for column in range(0, elements, wide):
                    at, total = here + column * itemsize, scratch + column * held
                    add_rows(Summands(at, some, a.row_stride, elements - column, 0, total))
            for k in range(lines):
                begin(totals, width)
                add_steps(Summands(scratch + k * line * held, steps, row * held, row, left, totals))
                result = (outer * a.lines + start + k) * inner
                quotients(totals, float(a.count), a.dst + result * itemsize, inner)
                if ragged:
                    _zero_missing(a, result, inner, itemsize)

    return kernel
