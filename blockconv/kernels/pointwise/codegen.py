"""Vector code of ops whose operands have types of their own: choices, comparisons, integers, conversions.

An op of the kind k of `KINDS`. Booleans are bytes, 0 or 1. Floats of 16 bits are compared and converted as float32.
"""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

from llvmlite import ir

from blockconv.core.element_problem import PointwiseKind
from blockconv.core.types import BITS, SIGNED, ElementType, element
from blockconv.jit.ir import call_llvm, const, emitted
from blockconv.kernels.common.halves import rounded, widened
from blockconv.kernels.common.vectors import Vectors

KINDS: tuple[PointwiseKind, ...] = get_args(PointwiseKind)
UNROLL = 4  # vectors at a time
_COMPARED = {"equal": "==", "less": "<", "less_equal": "<="}


def operand_types(kind: PointwiseKind, src: ElementType) -> tuple[ElementType, ...]:
    """The types of the operands in memory."""
    return {"where": (element("bool"), src, src), "convert": (src,)}.get(kind, (src, src))


class PointwiseRun(NamedTuple):
    """Contiguous elements of the destination: how many, the addresses of the first ones and of the operands'."""

    size: int
    dst: int
    first: int
    second: int
    third: int


def pointwise_extent(kind: PointwiseKind, src: ElementType, dst: ElementType, full: int, lanes: int) -> Any:
    """Code for dst = kind(operands) over `PointwiseRun`.

    full: a bit for each operand that has as many elements; others have one for all.
    """
    types = operand_types(kind, src)

    @emitted
    def compute(builder: Any, x: PointwiseRun) -> None:
        bytes_, target = Vectors(builder, element("uint8"), lanes), Vectors(builder, dst, lanes)
        sides = [Vectors(builder, type, lanes) for type in types]
        addresses = x.first, x.second, x.third

        def read(k: int, offset: Any, mask: Any | None) -> Any:
            v = sides[k]
            value = held[k]
            if value is None:
                at = builder.add(addresses[k], builder.mul(offset, const(v.itemsize)))
                value = v.load(at, mask)
            return value if kind == "where" else _computed(v, value)

        def vector(offset: Any, mask: Any | None, _: int | None = None) -> None:
            given = [read(k, offset, mask) for k in range(len(sides))]
            at = builder.add(x.dst, builder.mul(offset, const(target.itemsize)))
            target.store(_result(kind, src, target, given), at, mask)

        held = [None if full >> k & 1 else v.broadcast(addresses[k]) for k, v in enumerate(sides)]
        bytes_.each(x.size, vector, UNROLL)

    return compute


def _computed(v: Vectors, value: Any) -> Any:
    """Floats of 16 bits as float32."""
    return widened(Vectors(v.b, v.type.computed, v.lanes), v.type, value) if v.type.is_half else value


def _result(kind: PointwiseKind, src: ElementType, target: Vectors, given: list[Any]) -> Any:
    """The vector of results as memory has it."""
    b = target.b
    if kind == "where":
        return b.select(_is_true(b, given[0]), given[1], given[2])
    if kind == "convert":
        return _converted(src, target, given[0])
    x, y = given
    if kind in _COMPARED:
        sign = _COMPARED[kind]
        compared = b.fcmp_ordered if src.is_float else b.icmp_signed if src.kind == SIGNED else b.icmp_unsigned
        return b.zext(compared(sign, x, y), target.kind)
    if kind in ("max", "min"):
        compared = b.icmp_signed if src.kind == SIGNED else b.icmp_unsigned
        return b.select(compared(">" if kind == "max" else "<", x, y), x, y)
    if kind in ("div", "mod"):
        return _divided(kind, src, target, x, y)
    simple = {"and": b.and_, "or": b.or_, "xor": b.xor, "add": b.add, "sub": b.sub, "mul": b.mul}
    return simple[kind](x, y)


def _is_true(b: Any, x: Any) -> Any:
    """Whether elements are not zero; a NaN is not."""
    zero = ir.Constant(x.type, None)
    is_float = isinstance(x.type.element, (ir.FloatType, ir.DoubleType))
    return b.fcmp_unordered("!=", x, zero) if is_float else b.icmp_signed("!=", x, zero)


def _divided(kind: str, src: ElementType, v: Vectors, x: Any, y: Any) -> Any:
    """Integers divided towards zero, or the remainder with the divisor's sign. By zero it is 0.

    A processor stops at a division by zero, and of the least integer by -1, so neither is made.
    """
    b, one, none = v.b, v.c(1), v.zero
    by_zero = b.icmp_signed("==", y, none)
    safe = b.select(by_zero, one, y)
    if src.kind != SIGNED:
        found = b.udiv(x, safe) if kind == "div" else b.urem(x, safe)
        return b.select(by_zero, none, found)
    turned = b.icmp_signed("==", y, v.c(-1))
    safe = b.select(turned, one, safe)
    if kind == "div":
        quotient = b.select(turned, b.sub(none, x), b.sdiv(x, safe))
        return b.select(by_zero, none, quotient)
    rest = b.srem(x, safe)
    other_sign = b.icmp_signed("<", b.xor(rest, y), none)
    rest = b.select(b.and_(b.icmp_signed("!=", rest, none), other_sign), b.add(rest, y), rest)
    return b.select(b.or_(by_zero, turned), none, rest)


def _converted(src: ElementType, target: Vectors, x: Any) -> Any:
    """Elements converted to another type. Floats beyond an integer's bounds become the bound; a NaN becomes 0."""
    b, dst, computed = target.b, target.type, target.type.computed
    if dst.kind == BITS:  # booleans
        return b.zext(_is_true(b, x), target.kind)
    if dst.is_float:
        wide = Vectors(b, computed, target.lanes)
        if not src.is_float:
            value = (b.sitofp if src.kind == SIGNED else b.uitofp)(x, wide.kind)
        elif src.computed.itemsize == computed.itemsize:
            value = x
        else:
            value = (b.fpext if computed.itemsize == 8 else b.fptrunc)(x, wide.kind)
        return rounded(wide, dst, value) if dst.is_half else value
    if src.is_float:
        sign = "s" if dst.kind == SIGNED else "u"
        source = Vectors(b, src.computed, target.lanes)
        return call_llvm(b, f"llvm.fpto{sign}i.sat.{target.suffix()}.{source.suffix()}", target.kind, [x])
    if src.itemsize >= dst.itemsize:
        return x if src.itemsize == dst.itemsize else b.trunc(x, target.kind)
    return (b.sext if src.kind == SIGNED else b.zext)(x, target.kind)
