"""Elementwise ops as vector code: contiguous elements, and what goes along with them."""

from __future__ import annotations

from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import const, emitted
from blockconv.kernels.common.activation import ActivationArguments, ActivationKind, activate
from blockconv.kernels.common.vectors import Vectors

__all__ = ["UNROLL", "Extent", "OpKind", "Operand", "eltwise_extent", "operand_count"]

UNROLL = 4  # vectors at a time


class OpKind:
    """What is computed of x, the source, y, the operand, and z, the second operand; known when a kernel is built."""

    NOTHING, ADD, SUB, MUL, DIV, MAX, MIN, OTHER_MINUS, OTHER_OVER, AFFINE = range(10)


class Operand:
    """How an operand goes along with contiguous elements: not at all, as many, one vector for all, repeated, or as one
    element for all."""

    NONE, FULL, CONSTANT, PERIOD, SCALAR = range(5)


def operand_count(kind: int) -> int:
    return {OpKind.NOTHING: 0, OpKind.AFFINE: 2}.get(kind, 1)


class Extent(NamedTuple):
    """Contiguous elements.

    src, dst: their addresses. other, second: those of as many elements of the operands, or, where they are constant, of
    a vector of each, or of one element. mask: of as many elements with zero bits where no channel exists. size:
    elements. activation: the address of its `ActivationArguments`.
    """

    src: int
    other: int
    second: int
    mask: int
    dst: int
    size: int
    activation: int


def eltwise_extent(element: ElementType, lanes: int, kind: int, operand: int, act: int, masked: int) -> Any:
    """Code for dst = act(kind(src, other, second)) over an `Extent`.

    act: an `ActivationKind`. masked: the result is zero where the mask says so.
    """
    # What goes along with one element is no longer than a few vectors.
    unroll = 1 if act == ActivationKind.OTHER or masked or operand == Operand.SCALAR else UNROLL
    step = lanes * unroll

    @emitted
    def compute(builder: Any, x: Extent) -> None:
        v = Vectors(builder, element, lanes)
        addresses = [x.other, x.second][: operand_count(kind)]
        held = [v.load(address) for address in addresses] if operand == Operand.CONSTANT else []
        if operand == Operand.SCALAR:
            held = [v.broadcast(address) for address in addresses]
        activate = _activation(v, act, x.activation)

        def vector(offset: Any, mask: Any | None) -> None:
            value = v.load(builder.add(x.src, offset), mask)
            given = held or [v.load(builder.add(address, offset), mask) for address in addresses]
            value = activate(_combined(v, kind, value, *[*given, None, None][:2]))
            if masked:
                value = v.with_zero_bits(value, builder.add(x.mask, offset))
            v.store(value, builder.add(x.dst, offset), mask)

        groups = builder.sdiv(x.size, const(step))
        with cgutils.for_range(builder, groups) as loop:
            for k in range(unroll):
                at = builder.mul(loop.index, const(step * v.itemsize))
                vector(builder.add(at, const(k * v.bytes)), None)
        first = builder.mul(groups, const(step))
        rest = builder.sub(x.size, first)
        with cgutils.for_range(builder, builder.sdiv(builder.add(rest, const(lanes - 1)), const(lanes))) as loop:
            done = builder.mul(loop.index, const(lanes))
            left = builder.sub(rest, done)
            offset = builder.mul(builder.add(first, done), const(v.itemsize))
            vector(offset, v.below(left))

    return compute


def _combined(v: Vectors, kind: int, x: Any, y: Any, z: Any) -> Any:
    b = v.b
    if kind in (OpKind.MAX, OpKind.MIN):
        # A NaN of either operand stays.
        more = b.fcmp_ordered(">" if kind == OpKind.MAX else "<", x, y)
        return b.select(b.or_(more, b.fcmp_unordered("uno", x, x)), x, y)
    simple = {
        OpKind.NOTHING: lambda: x,
        OpKind.ADD: lambda: b.fadd(x, y),
        OpKind.SUB: lambda: b.fsub(x, y),
        OpKind.MUL: lambda: b.fmul(x, y),
        OpKind.DIV: lambda: b.fdiv(x, y),
        OpKind.OTHER_MINUS: lambda: b.fsub(y, x),
        OpKind.OTHER_OVER: lambda: b.fdiv(y, x),
        OpKind.AFFINE: lambda: b.fadd(b.fmul(x, y), z),
    }
    return simple[kind]()


def _activation(v: Vectors, act: int, address: Any) -> Any:
    """activate(x), of the activation whose `ActivationArguments` are at an address."""
    if act == ActivationKind.NONE:
        return lambda x: x
    given = ActivationArguments.load(v.b, address)
    doubles = [v.b.bitcast(bits, ir.DoubleType()) for bits in (given.first, given.second)]
    parameters = [x if v.itemsize == 8 else v.b.fptrunc(x, v.element) for x in doubles]
    if act == ActivationKind.CLIP:
        low, high = map(v.splat, parameters)
        return lambda x: v.clip(x, low, high)
    return lambda x: activate(v, x, given.number, parameters)
