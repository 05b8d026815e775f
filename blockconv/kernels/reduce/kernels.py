"""The kernels of means over axes, and of sums, products, maxima and minima."""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, group, in_bytes, in_elements, table, word
from blockconv.jit.ir import digits
from blockconv.kernels.common.walk import PaddedChannels, WalkArgs, WalkLoop, begin_of, some_places, zero_missing
from blockconv.kernels.reduce.codegen import Summands, begin_sums, divide, sum_of_rows, summed_type

LOOPS = 3  # over summed axes, that six dimensions make
WIDE = 8  # vectors of folded rows that are summed at once


class SummedLoop(Arguments):
    """Neighbouring axes that are summed."""

    size = word("elements")
    stride = in_bytes("from one to the next in the source")


class ReduceArgs(WalkArgs):
    """A walk over results, with a loop nest of summands at each. Extents are contiguous in the source too."""

    partial = word("rows of a partial sum, which is then added to the total")
    count = word("what a mean is made of, elements; 1 for results that are no means")
    blocks = group(PaddedChannels, "of the destination; means of channels that do not exist are zero")
    line = in_elements("of the source at an extent, where each is a line of the rows' sum that is summed too")
    reduced = table(SummedLoop, LOOPS, "axes that are summed, outermost first; with lines, but for these")
    loops = table(WalkLoop, None, "around the extents, innermost first")


@jit.kernel
def reduce_mean(kind: ElementType, lanes, vectors, period, ragged, how, folds):
    """A task is a part of an extent, or of each of several. Scratch: the sums of an extent.

    vectors: of a row that are summed at once. period: elements of a row, where several rows make a vector; else 0.
    ragged: some results are of channels that do not exist. how: a number of `HOW`.
    folds: a row holds the lines of all extents of a task. Rows are summed first, `WIDE` vectors at once, then each line
        of their sum, which `vectors` and `period` are for. Scratch: the sums of a line, then of the rows.
    """
    sums, at_once, line_width = summed_type(kind), WIDE if folds else vectors, vectors * lanes
    itemsize, held, width = kind.itemsize, sums.itemsize, at_once * lanes
    quotients, row_steps = divide(kind, lanes, period, how), lanes // period if period and not folds else 1

    def kernel(a: ReduceArgs, first, last, scratch):
        here, line, divisor = some_places(), a.line, float(a.count)
        outer, middle, innermost, partial = a.reduced[0], a.reduced[1], a.reduced[2], a.partial
        rows, stride = innermost.size // row_steps, row_steps * innermost.stride
        totals = scratch + line_width * held if folds else scratch
        for task in range(first, last):
            size, extents, _ = begin_of(a, task, 2, here)
            times, row = (1, extents * line) if folds else (extents, row_steps * size)
            left, line_row = innermost.size % row_steps * size, lanes if period else size
            dst, origin, dst_step, step = here[0].at, here[1].at, here[0].step, here[1].step
            for n in range(times):
                src, result = origin + n * step, dst + n * dst_step
                begin_sums(kind, lanes, how, totals, (row + width - 1) // width * width)
                for i in range(outer.size):
                    for j in range(middle.size):
                        at = src + i * outer.stride + j * middle.stride
                        for k in range(0, max(1, rows), partial):
                            some, more = min(partial, rows - k), left if k + partial >= rows else 0
                            for column in range(0, row, width):
                                x, total = at + k * stride + column * itemsize, totals + column * held
                                summands = Summands(x, some, stride, row - column, more, total)
                                sum_of_rows(kind, lanes, at_once, how, summands)
                for k in range(extents if folds else 1):
                    if folds:
                        begin_sums(kind, lanes, how, scratch, line_width)
                        rest, steps = digits(line, line_row)
                        at_line = totals + k * line * held
                        each = Summands(at_line, steps, line_row * held, line_row, rest, scratch)
                        sum_of_rows(sums, lanes, vectors, how, each)
                    quotients(scratch, divisor, result + k * size * itemsize, size)
                if ragged:
                    number = (result - a.arrays[0].at) // itemsize
                    zero_missing(a.blocks, a.arrays[0].at, number, extents // times * size, itemsize)

    return kernel
