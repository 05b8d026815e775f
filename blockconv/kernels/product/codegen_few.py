"""A few rows by a matrix that is read where it is, once, as vector code.

Rows and sums are [block of lanes][row][lane], of the type that is computed with. So sums can be the rows of another
product.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from blockconv.core import target
from blockconv.core.python import zipped
from blockconv.core.types import ElementType
from blockconv.jit.ir import const, counted, emitted, pointer
from blockconv.jit.values import build
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import Vectors


class FewRows(NamedTuple):
    """Rows, the columns of a matrix that they are multiplied by, and their sums.

    src: address of the rows.
    wei: address of the first of these columns.
    stride: from a row of the matrix to the next, as it is in memory, in bytes.
    depth: products in each sum.
    columns: how many there are.
    sums: address of the sums, which take whole vectors.
    """

    src: int
    wei: int
    stride: int
    depth: int
    columns: int
    sums: int


def multiply_few_rows(element: ElementType, lanes: int, rows: int, turned: bool):
    """Code that makes the sums of `FewRows`. turned: the rows of the matrix in memory are its columns."""
    emit = _along_depth if turned else _along_columns

    @emitted
    def multiply(x: FewRows) -> None:
        f = Floats(element, lanes)
        emit(f, Vectors(element.computed, lanes, fma=target.isa().fma), rows, x)

    return multiply


def _grouped(count, most: int, body: Callable[[Any, int], None]) -> None:
    """body(first, size) for groups of `most`, then for each that is left."""
    groups = count // most
    with counted(groups) as n:
        body(n * most, most)
    done = groups * most
    with counted(count - done) as n:
        body(done + n, 1)


def _lane_at(v: Vectors, base, index, rows: int):
    """The address of the lane of this number in the first of `rows` rows."""
    block, lane = index // v.lanes, index % v.lanes
    offset = block * (rows * v.bytes) + lane * v.itemsize
    return base + offset


def _along_columns(f: Floats, v: Vectors, rows: int, x: FewRows) -> None:
    """Several rows of the matrix at a time, from end to end: each is one stream of reads. Sums stay in the cache."""

    def sums_at(offset, row: int):
        return x.sums + (f.in_computed(offset) * rows + row * v.bytes)

    def clear(offset, _) -> None:
        for row in range(rows):
            v.store(v.zero, sums_at(offset, row))

    def some(first, count: int) -> None:
        at, wei = _lane_at(v, x.src, first, rows), x.wei + first * x.stride
        streams = [wei + k * x.stride for k in range(count)]
        factors = [[v.broadcast(at + (row * v.bytes + k * v.itemsize)) for k in range(count)] for row in range(rows)]

        def vector(offset, mask) -> None:
            loaded = [f.load(stream + offset, mask) for stream in streams]
            for row in range(rows):
                total = v.load(sums_at(offset, row))
                for factor, value in zipped(factors[row], loaded):
                    total = v.multiply_add(factor, value, total)
                v.store(total, sums_at(offset, row))

        f.each(x.columns, vector)

    f.each(x.columns, clear)
    _grouped(x.depth, min(v.lanes, 8 if rows <= 4 else 4), some)


def _along_depth(f: Floats, v: Vectors, rows: int, x: FewRows) -> None:
    """Several columns at a time, each one stream of reads."""
    most = target.isa().tile_registers // 2
    together = 1 << max(0, min(8, v.lanes, most // rows).bit_length() - 1)  # divides the lanes

    def some(first, count: int) -> None:
        wei = x.wei + first * x.stride
        streams = [wei + k * x.stride for k in range(count)]
        sums = [v.slots(count, v.zero) for _ in range(rows)]

        def vector(offset, mask) -> None:
            src = x.src + f.in_computed(offset) * rows
            left = [v.load(src + row * v.bytes) for row in range(rows)]
            for k, stream in enumerate(streams):
                right = f.load(stream + offset, mask)
                for row in range(rows):
                    sums[row][k].held = v.multiply_add(left[row], right, sums[row][k].held)

        f.each(x.depth, vector)
        at = _lane_at(v, x.sums, first, rows)
        for row in range(rows):
            for k in range(count):
                total = build.extract_element(v.fold(sums[row][k].held), const(0))
                to = at + (row * v.bytes + k * v.itemsize)
                build.store(total, pointer(to, v.element), align=v.itemsize)

    _grouped(x.columns, together, some)


def store_few_rows(element: ElementType, lanes: int, rows: int):
    """Code that stores sums in a destination, whose rows are `dst_row` bytes apart."""

    @emitted
    def store(sums, dst, dst_row, columns) -> None:
        f = Floats(element, lanes)
        for row in range(rows):
            src = sums + row * f.computed.bytes
            to = dst + row * dst_row

            def vector(offset, mask, src=src, to=to) -> None:
                at = src + f.in_computed(offset) * rows
                f.store(f.computed.load(at), to + offset, mask)

            f.each(columns, vector)

    return store
