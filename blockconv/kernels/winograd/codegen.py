"""Loads, transforms and stores of Winograd's kernels, as LLVM vector IR: a vector is channels of one tile.

Each function here takes compile-time parameters and returns code. The kernel calls this code with a named tuple of
addresses and strides in bytes. `blockconv.kernels.winograd.transforms` has the arithmetic of the transforms.

Sources of bytes become integers of 16 bits, which hold all that their transform can be: ten times ten times 255.
"""

import functools
from collections.abc import Callable
from typing import Any

from blockconv.core.python import zipped
from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.ir import const, counted, emitted, shuffle
from blockconv.jit.values import build
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.winograd.transforms import TAPS, Form, source_1d, transform_2d

ELEMENT = element("float32")  # what kernels of floats compute with
TRANSFORMED, PRODUCT = element("int16"), element("int32")  # what a source of bytes is transformed to, and products are


def multiples(start, step, count: int) -> list[Any]:
    """start, start + step, ..."""
    return [start, *(start + step * k for k in range(1, count))]


# ---------------------------------------------------------------- source


@functools.cache
def source_transform(form: Form, lanes: int, fma: bool, type: ElementType):
    """transform(at, row, col, dst, apart): `lanes` channels of a tile, from the address of its first pixel on.

    row, col: to the next row and the next column. apart: from a position of the transform to the next. type: of
    the elements: float32, one of floats of 16 bits, which become float32, or one of bytes, which become int16.
    """

    @emitted
    def transform(at, row, col, dst, apart) -> None:
        memory = (Vectors if form.exact else Floats)(type, lanes)
        v = Vectors(TRANSFORMED if form.exact else ELEMENT, lanes, fma)
        rows = multiples(at, row, form.side)

        def load(at):
            found = memory.load(at)
            if not form.exact:
                return found
            return (build.sext if type.kind == SIGNED else build.zext)(found, v.kind)

        def column(k: int) -> list[Any]:
            offset = col * k
            return [load(line + offset) for line in rows]

        for values in transform_2d(v, source_1d, form, column, form.side):
            for value in values:
                v.store(value, dst)
                dst = dst + apart

    return transform


# ---------------------------------------------------------------- products


@functools.cache
def multiply_shared(lanes: int, fma: bool, channels: int):
    """multiply(tiles, src, src_tile, dst, dst_tile, wei, wei_group): a position's products with groups' weights.

    A vector is several groups of so many channels, whose weights, [input channel][output channel], stay in registers.
    src_tile, dst_tile, wei_group: from a tile's transformed source, its products, a group's weights to the next's.
    """

    @emitted
    def multiply(tiles, src, src_tile, dst, dst_tile, wei, wei_group) -> None:
        v = Vectors(ELEMENT, lanes, fma)
        row = channels * v.itemsize
        rows = [wei + k * row for k in range(channels)]
        weights = [v.load_parts(at, channels, wei_group) for at in rows]

        def each_groups(at, k: int):
            """Channel k of each lane's group; a broadcast load if there is a single group."""
            if channels == lanes:
                return v.broadcast(at + k * v.itemsize)
            x = v.load(at)
            return shuffle(x, x, [lane // channels * channels + k for lane in range(lanes)])

        with counted(tiles) as n:
            at = src + n * src_tile
            total = each_groups(at, 0) * weights[0]
            for k in range(1, channels):
                total = v.multiply_add(each_groups(at, k), weights[k], total)
            v.store(total, dst + n * dst_tile)

    return multiply


# ---------------------------------------------------------------- weights


@functools.cache
def weight_transform(exact: bool, lanes: int):
    """transform(src, tap, dst, apart, factors, side, odd): the nine taps of an input channel, or of a pair.

    They are vectors of so many elements, `tap` bytes apart. apart: from a position of the transform to the next.
    Floats are transformed in float64, and rounded once; integers of 16 bits as they are.
    """

    @emitted
    def transform(src, tap, dst, apart, factors, side, odd) -> None:
        memory = Vectors(TRANSFORMED if exact else ELEMENT, lanes)
        v = memory if exact else Vectors(element("float64"), lanes)
        order = const(0), odd, TAPS - odd

        def load(row, column):
            found = memory.load(src + (row * TAPS + column) * tap)
            return found if exact else build.fpext(found, v.kind)

        def each_value(lines, found: Callable[[Any, list[Any]], None]) -> None:
            """Call `found` with the number of each value that a line's taps become, and these values of all lines."""

            def sums(number):
                each = [v.broadcast(factors + (number * TAPS + t) * 8) for t in range(TAPS)]
                products = [[factor * x for factor, x in zipped(each, line)] for line in lines]
                return [(first + last, middle) for first, middle, last in products]

            for number in (const(0), side - 1):
                found(number, [even + odd for even, odd in sums(number)])
            with counted(build.udiv(side - 2, const(2))) as pair:
                number = 2 * pair + 1
                both = sums(number)
                found(number, [even + odd for even, odd in both])
                found(number + 1, [even - odd for even, odd in both])

        def store(row, column, value) -> None:
            at = dst + (row * side + column) * apart
            memory.store(value if exact else build.fptrunc(value, memory.kind), at)

        columns = [[load(row, column) for row in order] for column in order]
        each_value(columns, lambda row, x: each_value([x], lambda column, x: store(row, column, *x)))

    return transform
