"""Single elements of any number type inside kernels: floats are float64 there, integers int64, booleans 0 or 1."""

from llvmlite import ir

from blockconv.core.types import SIGNED, ElementType
from blockconv.jit.ir import I32, I64, emitted, pointer
from blockconv.kernels.common.halves import rounded, widened
from blockconv.kernels.common.vectors import Vectors

_FIRST = ir.Constant(I32, 0)


@emitted
def number_at(builder, element: ElementType, address):
    """The number at an address."""
    v = Vectors(builder, element, 1)
    value = builder.load(pointer(builder, address, v.element), align=1)
    if not element.is_float:
        if element.itemsize == 8:
            return value
        return (builder.sext if element.kind == SIGNED else builder.zext)(value, I64)
    if element.is_half:
        wide = widened(Vectors(builder, element.computed, 1), element, v.splat(value))
        value = builder.extract_element(wide, _FIRST)
    return value if element.itemsize == 8 else builder.fpext(value, ir.DoubleType())


@emitted
def put_number(builder, element: ElementType, address, value) -> None:
    """Store a number: floats are rounded, and integers keep their lower bits."""
    v = Vectors(builder, element, 1)
    if not element.is_float:
        value = value if element.itemsize == 8 else builder.trunc(value, v.element)
    elif element.itemsize < 8:
        value = builder.fptrunc(value, ir.FloatType())
    if element.is_half:
        wide = Vectors(builder, element.computed, 1)
        value = builder.extract_element(rounded(wide, element, wide.splat(value)), _FIRST)
    builder.store(value, pointer(builder, address, value.type), align=1)
