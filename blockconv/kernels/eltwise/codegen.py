"""Elementwise ops as vector code: contiguous elements, and their operands.

8-bit integers are dequantized to float32, and the result is quantized. Floats of 16 bits are float32 between load and
store.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from blockconv.core import target
from blockconv.core.activation import ACTIVATIONS, FUNCTIONS, ActivationKind
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, group
from blockconv.jit.ir import I32, I64, call_llvm, const, emitted, pointer
from blockconv.kernels.common.activation import ActivationArguments, activate
from blockconv.kernels.common.requantize import Elements, QuantizationArguments
from blockconv.kernels.common.unpacked import shuffled_bytes
from blockconv.kernels.common.vectors import Vectors

UNROLL = 4  # vectors at a time


class OpKind:
    """The function of x (the source), y (the operand) and z (the second operand), known when a kernel is built."""

    NOTHING, ADD, SUB, MUL, DIV, MAX, MIN, OTHER_MINUS, OTHER_OVER, AFFINE, LOOKUP = range(11)
    POW, FMOD, ATAN2, OTHER_POW, OTHER_FMOD, OTHER_ATAN2 = range(11, 17)


class Operand:
    """How an operand goes along with contiguous elements: not at all, as many, or repeated.

    REPEATED: a few elements, kept in vectors by code that is built for their number. PERIOD: as many as the extent.
    """

    NONE, FULL, REPEATED, PERIOD = range(4)


def operand_count(kind: int) -> int:
    return {OpKind.NOTHING: 0, OpKind.LOOKUP: 0, OpKind.AFFINE: 2}.get(kind, 1)


def operand_type(element: ElementType, kind: int) -> ElementType:
    """The type of an operand's elements in memory: scales and shifts are held as they are computed with."""
    return element.computed if kind == OpKind.AFFINE else element


class EltwiseQuantization(Arguments):
    """The quantizations of an elementwise op's integers."""

    src = group(QuantizationArguments, "of the source")
    other = group(QuantizationArguments, "of the operand")
    dst = group(QuantizationArguments, "of the destination")


class ExtentsRun(NamedTuple):
    """Extents of contiguous elements.

    src, dst: the addresses of the first one.
    other, second: the addresses of as many elements of the operands, or of their repeated elements.
    mask: of as many elements with zero bits where no channel exists.
    size: elements of an extent.
    activation: the address of its `ActivationArguments`, or of the 256 bytes that are looked up.
    extents: how many.
    step, stride: bytes from an extent to the next, and of the operands.
    integers: the address of their `EltwiseQuantization`.
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
    integers: int


class _Sides:
    """Code over the elements of source, operands and destination, and over the computed type."""

    def __init__(self, builder: Any, element: ElementType, lanes: int, kind: int, integers: Any) -> None:
        self.memory = self.real = Vectors(builder, element, lanes)
        self.operands = Vectors(builder, operand_type(element, kind), lanes)
        self.is_converted = element != element.computed and kind != OpKind.LOOKUP
        self.fill = None
        if element != element.computed:
            at = [builder.add(integers, const(8 * field.first)) for field in EltwiseQuantization.fields.values()]
            self.src, self.other, self.dst = (Elements(builder, element, lanes, address) for address in at)
            self.real = self.dst.real
            self.fill = self.memory.zero
        if not element.is_float:
            self.fill = self.memory.splat(builder.trunc(self.dst.words.zero_point, self.memory.element))

    def source(self, x: Any) -> Any:
        return self.src.dequantized(x) if self.is_converted else x

    def operand(self, x: Any) -> Any:
        return self.other.dequantized(x) if self.operands.type != self.real.type else x

    def operand_at(self, address: Any, offset: Any, mask: Any | None) -> Any:
        """The operand beside the source's elements at an offset in bytes."""
        ratio = self.operands.itemsize // self.memory.itemsize
        at = self.memory.b.mul(offset, const(ratio)) if ratio > 1 else offset
        return self.operand(self.operands.load(self.memory.b.add(address, at), mask))

    def result(self, x: Any) -> Any:
        return self.dst.quantized(x) if self.is_converted else x

    def masked(self, x: Any, mask: Any) -> Any:
        """A result where the bits at the address `mask` are not zero; elsewhere zero, or the zero point."""
        b, v = self.memory.b, self.memory
        if self.fill is None:
            return v.with_zero_bits(x, mask)
        keep = b.load(pointer(b, mask, v.kind), align=1)
        return b.select(b.icmp_signed("!=", keep, v.zero), x, self.fill)


def eltwise_extent(
    element: ElementType, lanes: int, kind: int, operand: int, act: int, masked: int, inner: int = 0
) -> Any:
    """Code for dst = act(kind(src, other, second)) over `ExtentsRun`.

    act: an `ActivationKind`. masked: the result is zero where the mask says so. inner: elements that are repeated.
    """
    count = math.lcm(inner, lanes) // lanes if operand == Operand.REPEATED else 1
    unroll = count if act >= ActivationKind.OTHER or masked else -(-UNROLL // count) * count

    @emitted
    def compute(builder: Any, x: ExtentsRun) -> None:
        sides = _Sides(builder, element, lanes, kind, x.integers)
        looked_up = kind == OpKind.LOOKUP
        activate = _lookup(sides.memory, x.activation) if looked_up else _activation(sides.real, act, x.activation)
        with cgutils.for_range(builder, x.extents) as loop:
            at, offset = builder.mul(loop.index, x.step), builder.mul(loop.index, x.stride)
            src, dst = builder.add(x.src, at), builder.add(x.dst, at)
            addresses = [builder.add(address, offset) for address in (x.other, x.second)][: operand_count(kind)]
            _extent(sides, x, src, dst, _operands(sides, operand, addresses, inner), activate)

    def _extent(sides: _Sides, x: ExtentsRun, src: Any, dst: Any, operands: Any, activate: Any) -> None:
        v = sides.memory

        def vector(offset: Any, mask: Any | None, k: int | None = None) -> None:
            value = sides.source(v.load(v.b.add(src, offset), mask))
            value = activate(_combined(sides.real, kind, value, *[*operands(offset, mask, k), None, None][:2]))
            value = sides.result(value)
            if masked:
                value = sides.masked(value, v.b.add(x.mask, offset))
            v.store(value, v.b.add(dst, offset), mask)

        v.each(x.size, vector, unroll)

    return compute


def _operands(sides: _Sides, operand: int, addresses: list[Any], inner: int) -> Callable[..., list[Any]]:
    """operands(offset, mask, k): their vectors at an offset; k: the vector's number in an unrolled loop, if known."""
    v, real = sides.memory, sides.real
    if operand != Operand.REPEATED:
        return lambda offset, mask, k: [sides.operand_at(at, offset, mask) for at in addresses]
    held = [[sides.operand(x) for x in sides.operands.repeated(address, inner)] for address in addresses]
    count = math.lcm(inner, v.lanes) // v.lanes
    if count == 1:
        return lambda offset, mask, k: [vectors[0] for vectors in held]
    kept = [real.kept(vectors) for vectors in held]

    def operands(offset: Any, mask: Any | None, k: int | None) -> list[Any]:
        if k is not None:
            return [vectors[k % count] for vectors in held]
        period = v.b.urem(offset, const(count * v.bytes))
        at = v.b.mul(period, const(real.itemsize // v.itemsize))
        return [real.load(v.b.add(address, at)) for address in kept]

    return operands


def _combined(v: Vectors, kind: int, x: Any, y: Any, z: Any) -> Any:
    b = v.b
    if kind in (OpKind.MAX, OpKind.MIN):
        # A NaN of either operand stays.
        more = b.fcmp_ordered(">" if kind == OpKind.MAX else "<", x, y)
        return b.select(b.or_(more, b.fcmp_unordered("uno", x, x)), x, y)
    if kind >= OpKind.POW:  # of the C library
        name = ("pow", "fmod", "atan2")[(kind - OpKind.POW) % 3] + "f" * (v.itemsize == 4)
        return v.each_lane(name, *((y, x) if kind >= OpKind.OTHER_POW else (x, y)))
    simple = {
        OpKind.NOTHING: lambda: x,
        OpKind.LOOKUP: lambda: x,
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
    table = FUNCTIONS if act == ActivationKind.FUNCTION else ACTIVATIONS
    return lambda x: activate(v, x, given.number, parameters, table)


def _lookup(v: Vectors, table: Any) -> Callable[[Any], Any]:
    """lookup(x): for each byte of a vector, the one that it names of the 256 at an address.

    With VBMI two permutations name 128 each. A shuffle names 16. The eight shuffles of a half are chained: each holds
    its bytes xor the bytes of the shuffle before, and changes only results whose index is not below its first byte.
    """
    b, isa = v.b, target.isa()
    if isa.vbmi:
        parts = [v.load(b.add(table, const(k))) for k in range(0, 256, v.bytes)]
        name = f"llvm.x86.avx512.vpermi2var.qi.{8 * v.bytes}"
        halves = [(parts[k], parts[k + 1]) for k in (0, 2)]

        def permuted(x: Any) -> Any:
            low, high = (call_llvm(b, name, v.kind, [first, x, second]) for first, second in halves)
            return b.select(b.icmp_signed("<", x, v.zero), high, low)

        return permuted
    if not isa.ssse3:
        return lambda x: _looked_up_one_by_one(v, table, x)
    rows = [v.gathered([b.add(table, const(k))] * (v.lanes // 16)) for k in range(0, 256, 16)]
    steps = [row if k % 8 == 0 else b.xor(row, rows[k - 1]) for k, row in enumerate(rows)]

    def shuffled(x: Any) -> Any:
        found = v.zero
        for half in (steps[:8], steps[8:]):
            at = x if half[0] is steps[0] else b.xor(x, v.c(-128))
            for step in half:
                found = b.xor(found, shuffled_bytes(b, step, at))
                at = call_llvm(b, f"llvm.ssub.sat.{v.suffix()}", v.kind, [at, v.c(16)])
        return found

    return shuffled


def _looked_up_one_by_one(v: Vectors, table: Any, x: Any) -> Any:
    found = ir.Constant(v.kind, ir.Undefined)
    for lane in range(v.lanes):
        at = ir.Constant(I32, lane)
        named = v.b.add(table, v.b.zext(v.b.extract_element(x, at), I64))
        found = v.b.insert_element(found, v.b.load(pointer(v.b, named, v.element)), at)
    return found
