"""Sums of rows, or their products, maxima and minima, as vector code. Integers wrap around."""

import functools
import math
import operator
from collections.abc import Callable
from typing import Any, NamedTuple

from blockconv.core.types import ElementType
from blockconv.jit.ir import counted, emitted, opaque, shuffle
from blockconv.jit.values import build
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import Vectors

ACCUMULATORS = 4  # so that an addition need not wait for the one before


HOW = "sum", "max", "min", "prod"  # two elements become one; kernels are compiled for its number


def summed_type(element: ElementType) -> ElementType:
    """The type of the sums of elements before they are stored."""
    return element.computed if element.is_float else element


def _numbers(element: ElementType, lanes: int) -> Vectors:
    return (Floats if element.is_float else Vectors)(element, lanes)


def _first(how: int, element: ElementType) -> float:
    """The value that each result begins with."""
    low, high = (-math.inf, math.inf) if element.is_float else element.bounds
    return (0, low, high, 1)[how]


def _combine(v: Vectors, how: int) -> Callable[[Any, Any], Any]:
    return (operator.add, functools.partial(v.extreme, ">"), functools.partial(v.extreme, "<"), operator.mul)[how]


@emitted
def begin_sums(element: ElementType, lanes: int, how: int, at, count) -> None:
    """Write the initial values of `count` contiguous sums, whole vectors of the computed type."""
    v = Vectors(summed_type(element), lanes)
    first = v.c(_first(how, element))
    v.each(count, lambda offset, mask: v.store(first, at + offset, mask))


class Summands(NamedTuple):
    """`rows` rows of `size` contiguous elements, `stride` bytes apart, to be added to the vectors at `total`.

    left: elements of a row after them, which is a part of a vector. Totals are of the type that is computed with.
    """

    src: int
    rows: int
    stride: int
    size: int
    left: int
    total: int


def rows_at_once(vectors: int) -> int:
    """Rows of so many vectors that have accumulators of their own."""
    return 1 << max(1, ACCUMULATORS // vectors).bit_length() - 1


@emitted
def sum_of_rows(element: ElementType, lanes: int, vectors: int, how: int, s: Summands) -> None:
    """Add `Summands` of up to so many vectors, or combine them as `HOW` says."""
    v = _numbers(element, lanes)
    with build.if_else(s.size >= vectors * lanes) as (whole, partly):
        with whole:
            _add(v, s, [None] * vectors, how)
        with partly:
            _add(v, s, [v.below(s.size - k * lanes) for k in range(vectors)], how)


def _add(v: Vectors, s: Summands, masks: list[Any], how: int) -> None:
    vectors, first_value, combine = len(masks), _first(how, v.type), _combine(v, how)
    missing = first_value or None
    unrolled = rows_at_once(vectors)
    slots = v.slots(unrolled * vectors, v.c(first_value))

    def add(first, rows: int, stride) -> None:
        at = s.src + first * stride
        for k in range(rows * vectors):
            row, vector = divmod(k, vectors)
            here = at + stride * row + vector * v.bytes
            slots[k].held = combine(slots[k].held, v.load(here, masks[vector], missing))

    groups = s.rows // unrolled
    with counted(groups) as n:
        add(n * unrolled, unrolled, opaque(s.stride))
    done = groups * unrolled
    while unrolled := unrolled // 2:
        with build.if_then(done + unrolled <= s.rows):
            add(done, unrolled, s.stride)
        done = s.rows & -unrolled
    with build.if_then(s.left > 0):
        last = v.load(s.src + s.rows * s.stride, v.below(s.left), missing)
        slots[-1].held = combine(slots[-1].held, last)
    for vector in range(vectors):
        total, sums = s.total + vector * v.computed.bytes, v.total(slots[vector::vectors], combine)
        v.computed.store(combine(v.computed.load(total), sums), total)


def divide(element: ElementType, lanes: int, period: int, how: int):
    """Code that writes `count` contiguous sums divided by a float64.

    period: if not 0, the sums are `period` ones, each of the lanes of a vector that are so many apart.
    """

    @emitted
    def quotients(src, by, dst, count) -> None:
        v = _numbers(element, lanes)

        def write(v: Vectors, sums, at, mask: Any | None = None) -> None:
            v.store(sums / v.splat_float64(by) if element.is_float else sums, at, mask)

        if period:
            sums = v.fold(v.computed.load(src), _combine(v, how), period)
            write(_numbers(element, period), shuffle(sums, sums, list(range(period))), dst)
        else:
            v.each(count, lambda at, mask: write(v, v.computed.load(src + v.in_computed(at)), dst + at, mask))

    return quotients
