"""Single elements of any type in kernels, which compute floats as float64, integers as int64, booleans as 0 or 1."""

from llvmlite import ir

from blockconv.core.types import SIGNED, ElementType
from blockconv.jit.ir import I64, const, emitted, pointer
from blockconv.jit.values import build
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import llvm_type


@emitted
def number_at(element: ElementType, address):
    """The number at an address."""
    if element.is_float:
        value = build.extract_element(Floats(element, 1).load(address), const(0))
        return build.fpext(value, ir.DoubleType())
    value = build.load(pointer(address, llvm_type(element)), align=1)
    if element.itemsize == 8:
        return value
    return (build.sext if element.kind == SIGNED else build.zext)(value, I64)


@emitted
def put_number(element: ElementType, address, value) -> None:
    """Store a number: round a float; keep the lower bits of an integer."""
    if element.is_float:
        f = Floats(element, 1)
        f.store(f.computed.splat_float64(value), address)
        return
    value = value if element.itemsize == 8 else build.trunc(value, llvm_type(element))
    build.store(value, pointer(address, value.type), align=1)
