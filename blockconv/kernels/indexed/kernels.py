"""Kernels of row-major data, one element after the other: by indices, and along an axis."""

from typing import get_args

from blockconv import jit
from blockconv.core.checks import MOST_DIMENSIONS
from blockconv.core.element_problem import ScanKind, ScatterKind
from blockconv.core.types import ElementType, element
from blockconv.jit.arguments import Arguments, address, in_bytes, in_elements, table, word
from blockconv.jit.ir import copy_memory, digits, fetch_add, fill_memory, load_i64, store_i64
from blockconv.kernels.common.numbers import number_at, put_number
from blockconv.kernels.common.operands import Operands

SCATTERS: tuple[ScatterKind, ...] = get_args(ScatterKind)
SCANS: tuple[ScanKind, ...] = get_args(ScanKind)


class IndexedAxis(Arguments):
    """An axis of the data that an index names."""

    least = word("the least index: 0, or minus the size where negative indices count from the end")
    size = in_elements("of the axis")
    stride = in_bytes("from an element to the next")


class IndexLoop(Arguments):
    """A loop over indices, or over tuples of them."""

    size = word("how many")
    data = in_bytes("from one to the next in the data")
    indices = in_bytes("from one to the next in the indices")


class OutsideIndex(Arguments):
    """The report on indices that the data does not have. The tasks of all threads write to it."""

    count = word("indices that the data does not have, so far")
    index = word("the first one that was found")
    component = word("its number in its tuple")


class IndexedArgs(Arguments):
    """Contiguous items of the data, one for each index or tuple of indices, and a dense array of as many."""

    data = address("what is indexed")
    indices = address("the indices")
    items = address("the items: the destination of a gather, the updates of a scatter")
    dst = address("the destination of a scatter")
    outside = address("the `OutsideIndex`")
    whole = in_bytes("the data")
    size = in_bytes("of an item")
    count = word("items")
    components = word("indices in a tuple")
    axes = table(IndexedAxis, MOST_DIMENSIONS, "that the indices of a tuple name")
    depth = word("loops")
    loops = table(IndexLoop, None, "over the indices, innermost first")


def item_of(a, type, k):
    """The offset in the data of the k-th item, in bytes. type: of indices. Negative ones count from the end.

    An index that the data does not have is reported, and gives -1.
    """
    at, index, loop = 0, a.indices, a.loops
    for _ in range(a.depth):
        i, k = digits(k, loop.size)
        at, index = at + i * loop.data, index + i * loop.indices
        loop = loop[1]
    for c in range(a.components):
        axis = a.axes[c]
        j = number_at(type, index + c * type.itemsize)
        if j < axis.least or j >= axis.size:
            outside = OutsideIndex(a.outside)
            if fetch_add(outside.address, 1) == 0:
                outside.index, outside.component = j, c
            return -1
        at += (j + axis.size if j < 0 else j) * axis.stride
    return at


@jit.kernel
def gather_at(index: ElementType):
    """A task reads an item. An index that the data does not have reads zeros."""

    def kernel(a: IndexedArgs, first, last, scratch):
        size = a.size
        for k in range(first, last):
            at = item_of(a, index, k)
            if at < 0:
                fill_memory(a.items + k * size, size, 0)
            else:
                copy_memory(a.items + k * size, a.data + at, size)

    return kernel


@jit.kernel
def scatter_at(index: ElementType, type: ElementType, kind):
    """The only task copies the data and puts the items into the copy, or combines them with its elements, in order.

    An index that the data does not have writes nothing.
    """
    how = SCATTERS[kind]

    def kernel(a: IndexedArgs, first, last, scratch):
        size = a.size
        copy_memory(a.dst, a.data, a.whole)
        for k in range(a.count):
            at = item_of(a, index, k)
            if at >= 0 and how == "none":
                copy_memory(a.dst + at, a.items + k * size, size)
            elif at >= 0:
                for byte in range(0, size, type.itemsize):
                    to = a.dst + at + byte
                    x = number_at(type, a.items + k * size + byte)
                    put_number(type, to, combined(number_at(type, to), x, how))

    return kernel


def combined(total, x, how):
    """The sum ("add"), the product ("mul"), the maximum ("max") or the minimum; a NaN of either stays."""
    if how == "add":
        return total + x
    if how == "mul":
        return total * x
    if x != x:
        return x
    if how == "max":
        return x if x > total else total
    return x if x < total else total


class AxisLinesArgs(Operands):
    """All lines of row-major data along one axis. A task is a line."""

    size = in_elements("of a line")
    inner = in_elements("lines that are inside of the axis: from an element of a line to the next")
    count = word("results of a line")


@jit.unrolled_kernel
def scan(type: ElementType, kind, exclusive, reverse):
    """Sums are float64 or int64 until they are stored."""
    how = SCANS[kind]
    begin = (float if type.is_float else int)(how == "mul")

    def kernel(a: AxisLinesArgs, first, last, scratch):
        size, inner = a.size, a.inner
        step = inner * type.itemsize
        for line in range(first, last):
            at = (line // inner * size * inner + line % inner) * type.itemsize
            value = begin
            if how in ("max", "min"):
                value = number_at(type, a.src + at + (size - 1 if reverse else 0) * step)
            for n in range(size):
                place = at + (size - 1 - n if reverse else n) * step
                x = number_at(type, a.src + place)  # first: the destination may be the source
                if exclusive:
                    put_number(type, a.dst + place, value)
                value = combined(value, x, how)
                if not exclusive:
                    put_number(type, a.dst + place, value)

    return kernel


@jit.unrolled_kernel
def top(type: ElementType, smallest: bool, last_of_equal: bool):
    """Scratch: the keys and the indices that are kept, in order."""
    kept = element("float64" if type.is_float else "int64")

    def kernel(a: AxisLinesArgs, first, last, scratch):
        size, inner, count = a.size, a.inner, a.count
        indices = scratch + 8 * count
        for line in range(first, last):
            outer = line // inner
            at = a.src + (outer * size * inner + line % inner) * type.itemsize
            to = a.dst + 8 * (outer * count * inner + line % inner)
            held = 0
            for n in range(size):
                x = number_at(type, at + n * inner * type.itemsize)
                if held == count and not comes_before(
                    x, number_at(kept, scratch + 8 * (count - 1)), smallest, last_of_equal
                ):
                    continue
                k = min(held, count - 1)
                while k > 0 and comes_before(x, number_at(kept, scratch + 8 * (k - 1)), smallest, last_of_equal):
                    put_number(kept, scratch + 8 * k, number_at(kept, scratch + 8 * (k - 1)))
                    store_i64(indices, k, load_i64(indices, k - 1))
                    k -= 1
                put_number(kept, scratch + 8 * k, x)
                store_i64(indices, k, n)
                held = min(held + 1, count)
            for k in range(count):
                store_i64(to, k * inner, load_i64(indices, k))

    return kernel


def comes_before(x, y, smallest, last_of_equal):
    """Whether x is ahead of y, which has a lower index. A NaN is ahead of all numbers."""
    if x != x:
        return last_of_equal or y == y
    if last_of_equal and x == y:
        return True
    return x < y if smallest else x > y
