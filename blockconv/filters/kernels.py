"""The kernel of filters: rows of an image go through steps, each of which makes a row of rows of earlier ones."""

from __future__ import annotations

from typing import Any, NamedTuple

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.filters.codegen import Reducing, reduction, row_reader
from blockconv.jit.arguments import Arguments, held, table, word
from blockconv.jit.ir import load_bits, load_i64, store_bits, store_i64

OUTSIDE = -(1 << 63)  # in place of an offset, where a row is outside the image and constant


class FilterStep(Arguments):
    """A step of a filter. Row i of its results is made of rows i, i + 1, ... of earlier steps, or of the image."""

    lag = word("of its rows behind those of the image", "rows")
    terms = word("elements that a result reads")
    places = word("in the table: for each of them the offsets of its row's pointer and of its column", "bytes")
    weights = word("in the table: their weights' bits", "bytes")
    scale = word("of a mean: 1 / terms", "bits of a number")
    bias = word("of a mean of integers half of that; of an ordered sum its error", "bits of a number")
    shifted = word("whether a tile's margins have no result", "0 or 1")
    rows = word("rows of results that scratch holds")
    ring = word("in scratch: these rows", "bytes")
    outputs = word("rows in scratch of a row of results")


class FilterArgs(Arguments):
    """A task is some rows and columns of a plane of the result."""

    src = word("the image", "address")
    dst = word("the result", "address")
    tables = word("the tables", "address")
    planes = word("planes of the image that a result reads")
    planes_at = word("in the table: for each plane of the result its offset, and the offsets of those planes", "bytes")
    rows_at = word("in the table: for each row that results read, the offset of a row of the image", "bytes")
    columns_at = word("in the table: for each column of tasks its first column and the one behind it", "bytes")
    margin_at = word("in the table: the elements of the image that a row's margins repeat", "bytes")
    groups_at = word("in the table: where equal steps begin", "bytes")
    constant_at = word("in the table: a row of the constant", "bytes")
    rows = word("rows of a plane of the result")
    lag = word("rows that a result reads, but the first")
    columns = word("elements of a row of the image")
    before = word("elements that a tile's rows are extended by at their beginning")
    after = word("elements that they are extended by at their end")
    row_size = word("rows of a task")
    row_tasks = word("tasks of a column of tasks")
    column_tasks = word("tasks of a row")
    dst_row = word("from a row of the result to the next", "bytes")
    cval = word("the constant", "bits of a computed number")
    slot = word("of a row in scratch", "bytes")
    pointers = word("in scratch: for each plane and step the addresses of its rows", "bytes")
    positions = word("such addresses")
    ring = word("rows of the image that scratch holds of a plane")
    rings = word("in scratch: these rows", "bytes")
    last = word("which step is the last")
    steps = table(FilterStep)


class TaskColumns(NamedTuple):
    """The columns of a task, in elements: from `begin` to `end` with its margins; the image has `low` to `high`."""

    begin: Any
    end: Any
    low: Any
    high: Any


def _extend(a, at, line, size):
    """Write the elements of a tile's row that the image does not have."""
    for side in range(2):
        numbers = a.tables + a.margin_at + (a.before - side * a.columns) * 8
        for column in range(at.high if side else at.begin, at.end if side else at.low):
            source = load_i64(numbers, column)
            value = a.cval if source < 0 else load_bits(line + (source - at.begin) * size, size)
            store_bits(line + (column - at.begin) * size, value, size)


def _locate(a, step, addresses, pointers):
    """Write the addresses of a step's terms."""
    places = a.tables + step.places
    for k in range(step.terms):
        row = load_i64(pointers + load_i64(places, 2 * k), 0)
        store_i64(addresses, k, row + load_i64(places, 2 * k + 1))


@jit.kernel
def filter_rows(src, dst, acc, *steps):
    """src, dst, acc: codes of the element types of the image, the result, and the numbers that are computed with.

    steps: the different ones, in order. Scratch: addresses of terms, pointers to rows, and a ring of rows for each
    plane of the image and each step.
    """
    src, dst, acc = map(ElementType.of, (src, dst, acc))
    *inner, how = [Reducing(*steps[k : k + len(Reducing._fields)]) for k in range(0, len(steps), len(Reducing._fields))]
    read, size, finish = row_reader(src, acc), acc.itemsize, reduction(how, acc, dst, True)
    compute = _inner([reduction(how, acc, dst, False) for how in inner], size)

    def take(a, at, scratch, plane, row, n):
        of_row = load_i64(a.tables + a.rows_at, row + n)
        for p in range(a.planes):
            of_plane = load_i64(plane, 1 + p)
            found = a.tables + a.constant_at
            if of_row != OUTSIDE and of_plane != OUTSIDE:
                found = scratch + a.rings + (p * a.ring + n % a.ring) * a.slot
                source = a.src + of_plane + of_row + at.low * src.itemsize
                read(found + (at.low - at.begin) * size, source, at.high - at.low)
                _extend(a, at, found, size)
            store_i64(scratch + a.pointers, p * a.positions + n, found)

    def kernel(args, first, last, scratch):
        a = held(FilterArgs(args))
        steps = FilterArgs(args).steps
        final = held(steps[a.last])
        for task in range(first, last):
            rest = task // a.column_tasks
            columns = a.tables + a.columns_at + task % a.column_tasks * 16
            column, stop = load_i64(columns, 0), load_i64(columns, 1)
            begin, end = column - a.before, stop + a.after
            low = max(0, begin)
            at = TaskColumns(begin, end, low, max(low, min(end, a.columns)))
            row = rest % a.row_tasks * a.row_size
            plane = a.tables + a.planes_at + rest // a.row_tasks * (a.planes + 1) * 8
            to = a.dst + load_i64(plane, 0) + row * a.dst_row + column * dst.itemsize
            for n in range(min(a.row_size, a.rows - row) + a.lag):
                take(a, at, scratch, plane, row, n)
                compute(a, steps, end - begin, scratch, n, a.tables + a.groups_at)
                if n >= a.lag:
                    _locate(a, final, scratch, scratch + a.pointers + (n - a.lag) * 8)
                    finish(scratch, final, a.tables + final.weights, to, stop - column, 0)
                    to += a.dst_row

    return kernel


def _inner(reductions: list[Any], size: int):
    """compute(...): the steps before the last one, for a row of the image; equal steps share their code."""
    if not reductions:
        return lambda a, steps, width, scratch, n, groups: None
    reduce, rest = reductions[0], _inner(reductions[1:], size)

    def compute(a, steps, width, scratch, n, groups):
        for k in range(load_i64(groups, 0), load_i64(groups, 1)):
            step = held(steps[k])
            row = n - step.lag
            if row >= 0:
                to = scratch + step.ring + row % step.rows * step.outputs * a.slot
                _locate(a, step, scratch, scratch + a.pointers + row * 8)
                begin, count = step.shifted * a.before * size, width - step.shifted * (a.before + a.after)
                reduce(scratch, step, a.tables + step.weights, to + begin, count, a.slot)
                store_i64(scratch + a.pointers, (a.planes + k) * a.positions + row, to)
        rest(a, steps, width, scratch, n, groups + 8)

    return compute
