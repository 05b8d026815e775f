"""Softmax as vector code.

The softmax of x is e^(x - most) / total. Here most is the largest of all x, so no power overflows, and total is the sum
of these powers. Its logarithm is x - (most + log(total)). A loop over the axis finds each of these.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import const, emitted
from blockconv.kernels.common.conversion import both_ends
from blockconv.kernels.common.floats import Floats


class SoftmaxRun(NamedTuple):
    """The elements of an axis at one position, in contiguous extents.

    src, dst: addresses.
    stride: bytes from an extent to the next.
    extent, size: elements of an extent, and of the axis.
    powers: memory for `size` powers, where elements are narrower than these.
    integers: the address of the elements' `ConversionArguments`.
    """

    src: int
    dst: int
    stride: int
    extent: int
    size: int
    powers: int
    integers: int


class Neighbours(NamedTuple):
    """Contiguous positions.

    src, dst: addresses of their first elements.
    size, stride: elements of the axis, and bytes from one to the next.
    positions: how many there are; only a vector's lanes of them are computed.
    powers: memory for `size` vectors of powers, where elements are narrower than these.
    integers: the address of the elements' `ConversionArguments`.
    """

    src: int
    dst: int
    size: int
    stride: int
    positions: int
    powers: int
    integers: int


def contiguous_softmax(element: ElementType, lanes: int, log: int, zero_rows: int) -> Any:
    """Code that computes the softmax (log: its logarithm) of one position of a contiguous axis."""

    @emitted
    def softmax(builder: Any, x: SoftmaxRun) -> None:
        v, out = both_ends(builder, element, lanes, x.integers)
        most, total = v.slots(1, v.c(-math.inf)) + v.slots(1, v.zero)
        count = builder.sdiv(builder.add(x.size, builder.sub(x.extent, const(1))), x.extent)

        def each(body: Callable[[Any, Any, Any, Any | None], None]) -> None:
            """body(addresses of the source, of the destination, of powers, mask) for each vector."""
            with cgutils.for_range(builder, count) as loop:
                left = builder.sub(x.size, builder.mul(loop.index, x.extent))
                n = builder.select(builder.icmp_signed("<", left, x.extent), left, x.extent)
                at = builder.mul(loop.index, x.stride)
                src, dst, powers = builder.add(x.src, at), builder.add(x.dst, at), builder.add(x.dst, at)
                if v.is_narrow:
                    first = builder.mul(builder.mul(loop.index, x.extent), const(v.itemsize))
                    powers = builder.add(x.powers, v.in_computed(first))

                def vector(offset: Any, mask: Any | None) -> None:
                    held = builder.add(powers, v.in_computed(offset))
                    body(builder.add(src, offset), builder.add(dst, offset), held, mask)

                v.each(n, vector)

        def find_most(src: Any, dst: Any, powers: Any, mask: Any | None) -> None:
            builder.store(v.larger(v.load(src, mask, -math.inf), builder.load(most)), most)

        each(find_most)
        largest = v.fold(builder.load(most), v.larger)
        if zero_rows:
            largest = v.or_zero(largest, -math.inf)

        def find_total(src: Any, dst: Any, powers: Any, mask: Any | None) -> None:
            power = v.exp_to_zero(builder.fsub(v.load(src, mask), largest))
            if not log:
                v.computed.store(power, powers, mask)
            if mask is not None:
                power = builder.select(mask, power, v.zero)
            builder.store(builder.fadd(builder.load(total), power), total)

        each(find_total)
        result = _results(v, largest, v.fold(builder.load(total), builder.fadd), log, zero_rows)
        each(lambda src, dst, powers, mask: out.store(result(src, powers, mask), dst, mask))

    return softmax


def strided_softmax(element: ElementType, lanes: int, log: int, zero_rows: int) -> Any:
    """Code that computes the softmax (log: its logarithm) of up to a vector of contiguous positions."""

    @emitted
    def softmax(builder: Any, x: Neighbours) -> None:
        v, out = both_ends(builder, element, lanes, x.integers)

        def powers(index: Any, offset: Any) -> Any:
            """Where those of an element of the axis are."""
            if v.is_narrow:
                return builder.add(x.powers, builder.mul(index, const(v.computed.bytes)))
            return builder.add(x.dst, offset)

        def vector(mask: Any | None) -> None:
            most, total = v.slots(1, v.c(-math.inf)) + v.slots(1, v.zero)
            # Slots are made where the function begins: here they are set again for each vector.
            builder.store(v.c(-math.inf), most)
            builder.store(v.zero, total)
            with cgutils.for_range(builder, x.size) as loop:
                value = v.load(builder.add(x.src, builder.mul(loop.index, x.stride)), mask)
                builder.store(v.larger(value, builder.load(most)), most)
            largest = v.or_zero(builder.load(most), -math.inf) if zero_rows else builder.load(most)
            with cgutils.for_range(builder, x.size) as loop:
                offset = builder.mul(loop.index, x.stride)
                power = v.exp_to_zero(builder.fsub(v.load(builder.add(x.src, offset), mask), largest))
                if not log:
                    v.computed.store(power, powers(loop.index, offset), mask)
                builder.store(builder.fadd(builder.load(total), power), total)
            result = _results(v, largest, builder.load(total), log, zero_rows)
            with cgutils.for_range(builder, x.size) as loop:
                offset = builder.mul(loop.index, x.stride)
                dst, src = builder.add(x.dst, offset), builder.add(x.src, offset)
                out.store(result(src, powers(loop.index, offset), mask), dst, mask)

        with builder.if_else(builder.icmp_signed(">=", x.positions, const(lanes))) as (whole, partly):
            with whole:
                vector(None)
            with partly:
                vector(v.below(x.positions))

    return softmax


def _results(v: Floats, most: Any, total: Any, log: int, zero_rows: int) -> Callable[[Any, Any, Any | None], Any]:
    """result(source address, address of powers, mask): a vector of results.

    The destination holds the powers; where its elements are narrower, and would round them, they have their own memory.
    """
    if log:
        subtrahend = v.b.fadd(most, v.log(total))
        return lambda src, powers, mask: v.b.fsub(v.load(src, mask), subtrahend)
    factor = v.b.fdiv(v.c(1.0), total)
    if zero_rows:
        factor = v.or_zero(factor, math.inf)
    return lambda src, powers, mask: v.mul(v.computed.load(powers, mask), factor)
