"""Elementwise ops as vector code: contiguous elements, and what goes along with them."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import const, emitted
from blockconv.kernels.common.activation import ActivationArguments, ActivationKind, activate
from blockconv.kernels.common.vectors import Vectors

__all__ = ["UNROLL", "Extents", "OpKind", "Operand", "eltwise_extent", "operand_count"]

UNROLL = 4  # vectors at a time


class OpKind:
    """What is computed of x, the source, y, the operand, and z, the second operand; known when a kernel is built."""

    NOTHING, ADD, SUB, MUL, DIV, MAX, MIN, OTHER_MINUS, OTHER_OVER, AFFINE = range(10)


class Operand:
    """How an operand goes along with contiguous elements: not at all, as many, or repeated.

    REPEATED: a few elements, of which code that is built for their number makes vectors. PERIOD: as many as the extent.
    """

    NONE, FULL, REPEATED, PERIOD = range(4)


def operand_count(kind: int) -> int:
    return {OpKind.NOTHING: 0, OpKind.AFFINE: 2}.get(kind, 1)


class Extents(NamedTuple):
    """Extents of contiguous elements.

    src, dst: the addresses of the first one. other, second: those of as many elements of the operands, or of those that
    are repeated. mask: of as many elements with zero bits where no channel exists. size: elements of an extent.
    activation: the address of its `ActivationArguments`. extents: how many; step, stride: bytes from an extent to the
    next, and of the operands.
    """

    src: int
    other: int
    second: int
    mask: int
    dst: int
    size: int
    activation: int
    extents: int
    step: int
    stride: int


def eltwise_extent(
    element: ElementType, lanes: int, kind: int, operand: int, act: int, masked: int, inner: int = 0
) -> Any:
    """Code for dst = act(kind(src, other, second)) over `Extents`.

    act: an `ActivationKind`. masked: the result is zero where the mask says so. inner: elements that are repeated.
    """
    count = math.lcm(inner, lanes) // lanes if operand == Operand.REPEATED else 1
    unroll = count if act == ActivationKind.OTHER or masked else -(-UNROLL // count) * count

    @emitted
    def compute(builder: Any, x: Extents) -> None:
        v = Vectors(builder, element, lanes)
        activate = _activation(v, act, x.activation)
        with cgutils.for_range(builder, x.extents) as loop:
            at, offset = builder.mul(loop.index, x.step), builder.mul(loop.index, x.stride)
            src, dst = builder.add(x.src, at), builder.add(x.dst, at)
            addresses = [builder.add(address, offset) for address in (x.other, x.second)][: operand_count(kind)]
            _extent(v, x, src, dst, _operands(v, operand, addresses, inner), activate)

    def _extent(v: Vectors, x: Extents, src: Any, dst: Any, operands: Any, activate: Any) -> None:
        def vector(offset: Any, mask: Any | None, k: int | None = None) -> None:
            value = v.load(v.b.add(src, offset), mask)
            value = activate(_combined(v, kind, value, *[*operands(offset, mask, k), None, None][:2]))
            if masked:
                value = v.with_zero_bits(value, v.b.add(x.mask, offset))
            v.store(value, v.b.add(dst, offset), mask)

        v.each(x.size, vector, unroll)

    return compute


def _operands(v: Vectors, operand: int, addresses: list[Any], inner: int) -> Callable[..., list[Any]]:
    """operands(offset, mask, k): their vectors at an offset; k: the vector's number in an unrolled loop, if known."""
    if operand != Operand.REPEATED:
        return lambda offset, mask, k: [v.load(v.b.add(address, offset), mask) for address in addresses]
    held = [v.repeated(address, inner) for address in addresses]
    count = math.lcm(inner, v.lanes) // v.lanes
    if count == 1:
        return lambda offset, mask, k: [vectors[0] for vectors in held]
    kept = [v.kept(vectors) for vectors in held]

    def operands(offset: Any, mask: Any | None, k: int | None) -> list[Any]:
        if k is not None:
            return [vectors[k % count] for vectors in held]
        period = v.b.urem(offset, const(count * v.bytes))
        return [v.load(v.b.add(address, period)) for address in kept]

    return operands


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
