"""The kernel of filters: a window over the rows of an image, and perhaps a second one along the rows of its results."""

from __future__ import annotations

from typing import Any, NamedTuple

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.filters.codegen import NONE, Reducing, combination, constant_row, reduction, row_reader
from blockconv.jit.arguments import Arguments, group, held, word
from blockconv.jit.ir import load_bits, load_i64, store_bits, store_i64

VECTOR = 64  # bytes of the longest one
OUTSIDE = -(1 << 63)  # in place of an offset, where a row is outside the image and constant


class FilterSpec(NamedTuple):
    """What a filter's kernel is compiled for.

    src, dst, acc: codes of the element types of the image, the result, and the numbers that are computed with.
    first: the reduction over rows and columns; over rows alone if there is a second one.
    second: the reduction along the results of the first; NONE without.
    """

    src: int
    dst: int
    acc: int
    first: Reducing
    second: Reducing


class FilterWindow(Arguments):
    """The terms of a window."""

    terms = word("terms")
    addresses = word("elements that these read")
    places = word("in the table: for each of them the offsets of its row's pointer and of its column", "bytes")
    weights = word("in the table: for each term its weight's bits", "bytes")
    scale = word("of a mean: 1 / terms", "bits of a float")
    bias = word("of a mean of integers half of that; of a checked sum its error", "bits of a float")
    levels = word("rows are combined with their neighbours, to windows of 2, 4, 8, ...; so many times")
    step = word("elements, or rows, from one to the next")


class FilterArgs(Arguments):
    """A task is some rows and columns of a plane of the result."""

    src = word("the image", "address")
    end = word("of the image from there", "bytes")
    dst = word("the result", "address")
    table = word("the tables", "address")
    planes = word("planes of the image that a result reads")
    rows_at = word("in the table: for each position of a window's row the row of the image", "bytes")
    margin_at = word("in the table: the elements of the image that a row's margins repeat", "bytes")
    rows = word("rows of a plane of the result")
    reach = word("rows of the window")
    columns = word("elements of a row of the result")
    margin = word("elements that a row is extended by on each side")
    row_size = word("rows of a task")
    row_tasks = word("tasks of a column of tasks")
    column_size = word("elements of a row in a task")
    column_tasks = word("tasks of a row")
    dst_row = word("from a row of the result to the next", "bytes")
    constant = word("whether there are constant rows", "0 or 1")
    in_place = word("whether rows are read where they are, if there is a vector more behind them", "0 or 1")
    cval = word("the constant", "bits of a computed number")
    slot = word("of a row in scratch", "bytes")
    pointers = word("in scratch: the addresses of the window's rows", "bytes")
    addresses = word("in scratch: the addresses of a row's terms", "bytes")
    positions = word("pointers for each plane")
    first = group(FilterWindow)
    second = group(FilterWindow)


def extend(a, line, begin, low, high, end, size):
    """Write the elements of a line before column `low` and from `high` on; it goes from `begin` to `end`."""
    margins = a.table + a.margin_at
    for at in range(begin, low):
        _copy(a, line - begin * size, at, load_i64(margins, at + a.margin), size)
    for at in range(high, end):
        _copy(a, line - begin * size, at, load_i64(margins, at - a.columns + a.margin), size)


def _copy(a, line, at, source, size):
    value = a.cval if source < 0 else load_bits(line + source * size, size)
    store_bits(line + at * size, value, size)


def locate(addresses, table, count, pointers, offset):
    """Write the addresses of terms."""
    for k in range(count):
        row = load_i64(pointers + load_i64(table, 2 * k), 0)
        store_i64(addresses, k, row + load_i64(table, 2 * k + 1) + offset)


class TaskColumns(NamedTuple):
    """The columns of a task, in elements.

    column, stop: of the result.
    begin, end: with the margins.
    low, high: those of them that the image has.
    skipped: bytes of the margin before the image, where a second window follows.
    """

    column: Any
    stop: Any
    begin: Any
    end: Any
    low: Any
    high: Any
    skipped: Any


@jit.kernel
def filter_rows(spec: FilterSpec):
    """Scratch: the constant row, the row between the windows and its combination, for each plane and each level of
    combined rows a ring of rows, pointers, addresses.
    """
    src, dst, acc = (ElementType.of(code) for code in (spec.src, spec.dst, spec.acc))
    fused, size = spec.second.kind != NONE, acc.itemsize
    fill, take = constant_row(acc), _taker(src, acc, spec.first, fused)
    reduce_first = reduction(spec.first, acc, dst, fused)
    reduce_along = _along(spec.second, acc, dst)

    def kernel(args, first, last, scratch):
        a = held(FilterArgs(args))
        one, pointers, addresses = a.first, scratch + a.pointers, scratch + a.addresses
        if a.constant:
            fill(scratch, a.cval, a.slot // size)
        for task in range(first, last):
            rest = task // a.column_tasks
            column = task % a.column_tasks * a.column_size
            stop = min(column + a.column_size, a.columns)
            begin, end = column - a.margin, stop + a.margin
            low, high = max(0, begin), min(end, a.columns)
            at = TaskColumns(column, stop, begin, end, low, high, (low - begin) * size if fused else 0)
            row = rest % a.row_tasks * a.row_size
            plane = a.table + rest // a.row_tasks * (a.planes + 1) * 8
            to = a.dst + load_i64(plane, 0) + row * a.dst_row + column * dst.itemsize
            slot = 0
            for n in range(min(a.row_size, a.rows - row) + a.reach - 1):
                take(a, at, scratch, plane, row, n, slot)
                slot = slot + 1 if slot + 1 < a.reach else 0
                done = n - a.reach + 1
                if done >= 0:
                    locate(addresses, a.table + one.places, one.addresses, pointers + done * 8, at.skipped)
                    if fused:
                        line = scratch + a.slot
                        reduce_first(addresses, one, a.table + one.weights, line + at.skipped, high - low)
                        reduce_along(a, at, line, addresses, to)
                    else:
                        reduce_first(addresses, one, a.table + one.weights, to, stop - column)
                    to += a.dst_row

    return kernel


def _taker(src: ElementType, acc: ElementType, how: Reducing, fused: bool):
    """take(...): read row number `n` of a task's window, from each plane, and combine it with its neighbours."""
    read, combine, size = row_reader(src, acc), combination(how.kind, acc), acc.itemsize

    def take(a, at, scratch, plane, row, n, slot):
        pointers, ring = scratch + a.pointers, scratch + (3 + slot) * a.slot
        of_row, count = load_i64(a.table + a.rows_at, row + n), at.high - at.low
        for p in range(a.planes):
            of_plane, found = load_i64(plane, 1 + p), scratch
            if of_row != OUTSIDE and of_plane != OUTSIDE:
                found = ring + p * a.reach * a.slot
                source = of_plane + of_row + at.low * src.itemsize
                if src == acc and a.in_place and source + count * size + VECTOR <= a.end:
                    found = a.src + source - (at.low - at.begin) * size
                else:
                    read(found + (at.low - at.begin) * size, a.src + source, count)
                    if not fused:
                        extend(a, found, at.begin, at.low, at.high, at.end, size)
            store_i64(pointers, p * a.positions + n, found)
        for p in range(a.first.levels):
            here, apart = p * a.positions + n, 1 << p
            if n + 1 >= 2 * apart:
                found = ring + (p + 1) * a.reach * a.slot
                x, y = load_i64(pointers, here) + at.skipped, load_i64(pointers, here - apart) + at.skipped
                combine(found + at.skipped, x, y, count)
                store_i64(pointers, here + a.positions, found)

    return take


def _along(how: Reducing, acc: ElementType, dst: ElementType):
    """reduce(...): apply the second window to a row of results, which has no margins yet."""
    combine, reduce_line, size = combination(how.kind, acc), reduction(how, acc, dst, False), acc.itemsize

    def reduce(a, at, line, addresses, to):
        two, combined, boxed = a.second, line + a.slot, line
        extend(a, line, at.begin, at.low, at.high, at.end, size)
        for p in range(two.levels):
            apart = two.step << p
            combine(combined, boxed, boxed + apart * size, at.end - at.begin - apart)
            boxed = combined
        store_i64(addresses, 0, line)
        store_i64(addresses, 1, combined)
        locate(addresses + 16, a.table + two.places, two.addresses, addresses, 0)
        reduce_line(addresses + 16, two, a.table + two.weights, to, at.stop - at.column)

    return reduce
