"""Single elements of any number type inside kernels: floats are float64 there, integers int64, booleans 0 or 1."""

from llvmlite import ir

from blockconv.core.types import SIGNED, ElementType
from blockconv.jit.ir import I64, const, emitted, pointer
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import llvm_type


@emitted
def number_at(builder, element: ElementType, address):
    """The number at an address."""
    if element.is_float:
        value = builder.extract_element(Floats(builder, element, 1).load(address), const(0))
        return builder.fpext(value, ir.DoubleType())
    value = builder.load(pointer(builder, address, llvm_type(element)), align=1)
    if element.itemsize == 8:
        return value
    return (builder.sext if element.kind == SIGNED else builder.zext)(value, I64)


@emitted
def put_number(builder, element: ElementType, address, value) -> None:
    """Store a number: floats are rounded, and integers keep their lower bits."""
    if element.is_float:
        f = Floats(builder, element, 1)
        f.store(f.computed.splat_float64(value), address)
        return
    value = value if element.itemsize == 8 else builder.trunc(value, llvm_type(element))
    builder.store(value, pointer(builder, address, value.type), align=1)
