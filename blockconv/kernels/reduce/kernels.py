"""The kernels of means over axes, and of sums, products, maxima and minima."""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, group, in_bytes, in_elements, table, word
from blockconv.jit.ir import digits
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.common.walk import PaddedChannels, zero_missing
from blockconv.kernels.reduce.codegen import Summands, begin_sums, divide, sum_of_rows, summed_type

LOOPS = 3  # of one sort, kept or reduced, that six dimensions make
WIDE = 8  # vectors of folded rows that are summed at once


class MeanLoop(Arguments):
    """Neighbouring axes of one sort."""

    size = word("elements")
    stride = in_bytes("from one to the next in the source")


class MeanArgs(Operands):
    """Means of a storage. The innermost kept axes are contiguous, and no loop."""

    inner = in_elements("contiguous elements whose means are results, or lines of these")
    partial = word("rows of a partial sum, which is then added to the total")
    count = word("what a mean is made of, elements; 1 for results that are no means")
    blocks = group(PaddedChannels, "of the destination; means of channels that do not exist are zero")
    segment = in_elements("of the inner elements in a task")
    run = word("steps of the innermost kept loop in a task")
    line = in_elements("inner elements of a line, where each line of the rows' sum is summed too", 0)
    means = in_elements("of a line that are results", 0)
    kept = table(MeanLoop, LOOPS, "other axes whose means are results, outermost first")
    reduced = table(MeanLoop, LOOPS, "axes that are summed, outermost first")


@jit.kernel
def reduce_mean(kind: ElementType, lanes, vectors, period, ragged, how, folds):
    """A task is a segment of neighbouring means, of one step of the kept loops after another. Scratch: their sums.

    vectors: of a row that are summed at once. period: elements of a row, where several rows make a vector; else 0.
    ragged: some results are of channels that do not exist. how: a number of `HOW`.
    folds: a row holds lines, each of another summed axis. Rows are summed first, `WIDE` vectors at once, then each line
        of their sum, which `vectors` and `period` are for. Scratch: the sums of a line, then of the rows.
    """
    sums, at_once, line_width = summed_type(kind), WIDE if folds else vectors, vectors * lanes
    itemsize, held, width = kind.itemsize, sums.itemsize, at_once * lanes
    quotients, row_steps = divide(kind, lanes, period, how), lanes // period if period and not folds else 1

    def kernel(a: MeanArgs, first, last, scratch):
        inner, run, outer, middle, innermost = a.inner, a.run, a.reduced[0], a.reduced[1], a.reduced[2]
        rows, stride = innermost.size // row_steps, row_steps * innermost.stride
        segments, line = (inner + a.segment - 1) // a.segment, a.kept[2]
        runs, totals = (line.size + run - 1) // run, scratch + line_width * held if folds else scratch
        of_line, of_means, line_row = a.line, a.means, lanes if period else a.means
        for task in range(first, last):
            segment, part, lines = digits(task, segments, runs)
            middle_line, outer_line = digits(lines, a.kept[1].size)
            at, start = segment * a.segment, part * run
            count, end = min(a.segment, inner - at), min(start + run, line.size)
            row, left = row_steps * count, innermost.size % row_steps * count
            origin = a.src + at * itemsize
            origin += middle_line * a.kept[1].stride + outer_line * a.kept[0].stride
            for step in range(start, end):
                src, result = origin + step * line.stride, (lines * line.size + step) * inner + at
                begin_sums(kind, lanes, how, totals, (row + width - 1) // width * width)
                for i in range(outer.size):
                    for j in range(middle.size):
                        here = src + i * outer.stride + j * middle.stride
                        for k in range(0, max(1, rows), a.partial):
                            some, more = min(a.partial, rows - k), left if k + a.partial >= rows else 0
                            for column in range(0, row, width):
                                x, total = here + k * stride + column * itemsize, totals + column * held
                                sum_of_rows(
                                    kind, lanes, at_once, how, Summands(x, some, stride, row - column, more, total)
                                )
                means = count // of_line if folds else count
                if folds:
                    result = result // of_line * of_means
                    for k in range(means):
                        begin_sums(kind, lanes, how, scratch, line_width)
                        at_line = totals + k * of_line * held
                        rest, steps = digits(of_line, line_row)
                        each = Summands(at_line, steps, line_row * held, line_row, rest, scratch)
                        sum_of_rows(sums, lanes, vectors, how, each)
                        quotients(scratch, float(a.count), a.dst + (result + k * of_means) * itemsize, of_means)
                    means *= of_means
                else:
                    quotients(scratch, float(a.count), a.dst + result * itemsize, count)
                if ragged:
                    zero_missing(a.blocks, a.dst, result, means, itemsize)

    return kernel
