"""Ranges of floats, and the quantizations found from them, as vector code."""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from blockconv.core.types import element
from blockconv.jit.ir import I32, I64, call_llvm, const, emitted, pointer
from blockconv.kernels.common.requantize import FLOAT32, QuantizationArguments, float_of
from blockconv.kernels.common.vectors import Vectors

UNROLL = 4  # vectors at a time, so that a comparison need not wait for the one before
FOUND_BYTES = 2 * FLOAT32.itemsize  # a scale and a zero point
UINT8 = element("uint8")
LAST = float(UINT8.bounds[1])


def range_of_elements(lanes: int) -> Any:
    """Code that writes the least and the greatest of `count` float32, and of 0; a NaN is neither."""

    @emitted
    def write_range(builder: Any, src: Any, count: Any, dst: Any) -> None:
        v = float_of(builder, lanes)
        least, most = (v.slots(UNROLL, v.zero) for _ in range(2))

        def vector(offset: Any, mask: Any | None, k: int = 0) -> None:
            x = v.load(builder.add(src, offset), mask)  # lanes that do not exist are 0
            builder.store(_smaller(v, x, builder.load(least[k])), least[k])
            builder.store(v.larger(x, builder.load(most[k])), most[k])

        v.each(count, vector, UNROLL)
        for number, (slots, combine) in enumerate(((least, lambda x, y: _smaller(v, x, y)), (most, v.larger))):
            found = builder.load(slots[0])
            for slot in slots[1:]:
                found = combine(builder.load(slot), found)
            _put(builder, builder.extract_element(v.fold(found, combine), ir.Constant(I32, 0)), dst, number)

    return write_range


def _smaller(v: Vectors, x: Any, y: Any) -> Any:
    """The smaller of each lane; `y` where one is NaN."""
    return v.b.select(v.b.fcmp_ordered("<", x, y), x, y)


def _put(builder: Any, value: Any, address: Any, number: int) -> None:
    at = builder.add(address, const(number * FLOAT32.itemsize))
    builder.store(value, pointer(builder, at, value.type), align=4)


def _scalars(builder: Any, address: Any) -> list[Any]:
    """The two float32 at an address."""
    kind = ir.FloatType()
    return [
        builder.load(pointer(builder, builder.add(address, const(k * FLOAT32.itemsize)), kind), align=4)
        for k in range(2)
    ]


@emitted
def found_of_range(builder: Any, src: Any, dst: Any) -> None:
    """Write the scale and the zero point of uint8 for the range at `src`, each a float32."""
    b, kind = builder, ir.FloatType()

    def c(value: float) -> Any:
        return ir.Constant(kind, value)

    low, high = _scalars(b, src)
    step = b.fdiv(b.fsub(high, low), c(LAST))
    scale = b.select(b.fcmp_ordered(">", step, c(0.0)), step, c(1.0))
    zero = b.fsub(c(0.0), b.fdiv(low, scale))
    zero = b.select(b.fcmp_ordered(">", zero, c(0.0)), zero, c(0.0))
    zero = b.select(b.fcmp_ordered("<", zero, c(LAST)), zero, c(LAST))
    _put(b, scale, dst, 0)
    _put(b, call_llvm(b, "llvm.rint.f32", kind, [zero]), dst, 1)


@emitted
def describe_found(builder: Any, found: Any, dst: Any) -> None:
    """Write the `QuantizationArguments` of uint8 of the scale and the zero point that were found."""
    scale, zero = _scalars(builder, found)
    bits = [builder.bitcast(builder.fpext(x, ir.DoubleType()), I64) for x in _bounds(builder, scale, zero)]
    words = QuantizationArguments(scale=bits[0], zero_point=builder.fptosi(zero, I64), low=bits[1], high=bits[2])
    for k, value in enumerate(words):
        builder.store(value, pointer(builder, builder.add(dst, const(8 * k)), I64), align=8)


def _bounds(builder: Any, scale: Any, zero: Any) -> list[Any]:
    """The scale, and the bounds of uint8 less the zero point."""
    return [scale, *(builder.fsub(ir.Constant(ir.FloatType(), float(bound)), zero) for bound in UINT8.bounds)]
