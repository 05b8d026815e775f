"""The kernel of filters: it runs the rows of an image through steps. A step makes a row from rows of earlier steps."""

from __future__ import annotations

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.filters.codegen import Reducing, reductions, row_reader
from blockconv.jit.arguments import Arguments, held, table, word
from blockconv.jit.ir import digits, load_bits, load_i64, store_bits, store_i64

AHEAD = 2  # rows that a row is prefetched before it is read
BEYOND = -(1 << 58)  # in place of an offset along an axis, where it is outside the image and constant


class FilterStep(Arguments):
    """A source of rows: a plane of the image, or a step, whose row i is made of rows i, i + 1, ... of other sources."""

    rows = word("that scratch holds")
    ring = word("in scratch: these rows", "bytes")
    how = word("number of its reduction")
    lag = word("of its rows behind those of the image", "rows")
    terms = word("elements that a result reads")
    places = word("in the table: for each of them its source, its row, and the offset of its column", "bytes")
    weights = word("in the table: weights and other numbers of the reduction", "bytes")
    ordered = word("terms of an ordered sum")


class FilterArgs(Arguments):
    """A task is some rows and columns of a plane of the result."""

    src = word("the image", "address")
    dst = word("the result", "address")
    tables = word("the tables", "address")
    planes = word("planes of the image that a result reads")
    planes_at = word("in the table: for each plane of the result its offset, and the offsets of those planes", "bytes")
    rows_at = word("in the table: for each row that results read, the offset of a row of the image", "bytes")
    margin_at = word("in the table: each column around a row, and the column that it repeats or -1", "bytes")
    margins = word("such columns", "elements")
    constant_at = word("in the table: a row of the constant", "bytes")
    rows = word("rows of a plane of the result")
    lag = word("rows that a result reads, but the first")
    columns = word("elements of a row of the image")
    made = word("elements of a row of the result")
    before = word("elements that a tile's rows are extended by at their beginning")
    after = word("elements that they are extended by at their end")
    row_size = word("rows of a task")
    row_tasks = word("tasks of a column of tasks")
    column_tasks = word("tasks of a row")
    dst_row = word("from a row of the result to the next", "bytes")
    slot = word("of a row in scratch", "bytes")
    pointers = word("in scratch: for each source the addresses of its rows", "bytes")
    positions = word("such addresses")
    sources = word("planes and steps")
    steps = table(FilterStep)


def _extend(a, begin, end, line, size):
    """Write the elements of a tile's row, from `begin` to `end`, that the image does not have."""
    for k in range(a.margins):
        column, source = load_i64(a.tables + a.margin_at, 2 * k), load_i64(a.tables + a.margin_at, 2 * k + 1)
        if column >= begin and column < end:
            found = a.tables + a.constant_at if source < 0 else line + (source - begin) * size
            store_bits(line + (column - begin) * size, load_bits(found, size), size)


def _locate(a, step, addresses, pointers, begin):
    """Write the addresses of a step's terms. begin: of its first result behind the tile's, in bytes."""
    places = a.tables + step.places
    for k in range(step.terms):
        row = load_i64(pointers, load_i64(places, 3 * k) * a.positions + load_i64(places, 3 * k + 1))
        store_i64(addresses, k, row + load_i64(places, 3 * k + 2) + begin)


@jit.kernel
def filter_rows(src, dst, acc, *hows):
    """src, dst, acc: codes of the element types of the image, the result, and the numbers that are computed with.

    hows: the different reductions; the first makes results. Scratch: addresses of terms, pointers to rows, a ring of
    rows for each source. A step computes a tile's margins too, though it may read anything there: no result needs them.
    """
    src, dst, acc = map(ElementType.of, (src, dst, acc))
    size, read = acc.itemsize, row_reader(src, acc)
    reduce = reductions([*map(Reducing, *[iter(hows)] * len(Reducing._fields))], src, acc, dst)

    def take(a, steps, begin, end, scratch, plane, row, n):
        low, of_row = max(0, begin), load_i64(a.tables + a.rows_at, row + n)
        for p in range(a.planes):
            offset = of_row + load_i64(plane, 1 + p)
            found = a.tables + a.constant_at
            if offset > BEYOND // 2:
                found = scratch + steps[p].ring + n % steps[p].rows * a.slot
                source = a.src + offset + low * src.itemsize
                read(found + (low - begin) * size, source, max(low, min(end, a.columns)) - low)
                _extend(a, begin, end, found, size)
            store_i64(scratch + a.pointers, p * a.positions + n, found)

    def kernel(args, first, last, scratch):
        a = held(FilterArgs(args))
        steps = FilterArgs(args).steps
        for task in range(first, last):
            tile, part, number = digits(task, a.column_tasks, a.row_tasks)
            column, stop = a.made * tile // a.column_tasks, a.made * (tile + 1) // a.column_tasks
            begin, end = column - a.before, stop + a.after
            row = part * a.row_size
            plane = a.tables + a.planes_at + number * (a.planes + 1) * 8
            out = a.dst + load_i64(plane, 0) + row * a.dst_row + column * dst.itemsize
            for n in range(min(a.row_size, a.rows - row) + a.lag):
                take(a, steps, begin, end, scratch, plane, row, n)
                later = load_i64(a.tables + a.rows_at, min(row + n + AHEAD, a.rows + a.lag - 1))
                ahead = a.src + later + load_i64(plane, 1) + column * src.itemsize
                for k in range(a.planes, a.sources):
                    step = held(steps[k])
                    i = n - step.lag
                    if i >= 0:
                        pointers = scratch + a.pointers + i * 8
                        skipped, to, count = 0, scratch + step.ring + i % step.rows * a.slot, end - begin
                        if step.how == 0:
                            skipped, to, count = a.before * size, out + i * a.dst_row, stop - column
                        _locate(a, step, scratch, pointers, skipped)
                        reduce(step.how, scratch, step, a.tables + step.weights, to, count, ahead)
                        store_i64(pointers, k * a.positions, to)

    return kernel
