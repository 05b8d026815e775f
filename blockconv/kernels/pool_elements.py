"""What a pool reduces: a maximum or a sum of elements, a vector of them or one, as LLVM IR.

A maximum takes a NaN wherever it meets one and keeps the first of equals, as PyTorch's does.
"""

from __future__ import annotations

import math
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv.emit import I32, call_llvm, const, pointer, splat

__all__ = [
    "MAX_FLOAT", "MAX_SIGNED", "MAX_UNSIGNED", "SUM_FLOAT", "Elements",
    "combine", "identity", "load_value", "store_value",
]  # fmt: skip

MAX_FLOAT, SUM_FLOAT, MAX_SIGNED, MAX_UNSIGNED = range(4)
_i64 = types.int64
SUMS = 4  # that hide the latency of an addition


class Elements:
    """What is reduced: the kind of reduction, the element, and the lanes of a vector."""

    def __init__(self, kind: int, itemsize: int, lanes: int) -> None:
        self.kind, self.itemsize, self.lanes = kind, itemsize, lanes
        self.sums: list[Any] = []  # while they are taken, no value is NaN: see `guarded`
        self._seen = 0
        floats = {4: ir.FloatType(), 8: ir.DoubleType()}
        self.element = floats[itemsize] if kind in (MAX_FLOAT, SUM_FLOAT) else ir.IntType(8 * itemsize)
        self.vector = ir.VectorType(self.element, lanes)
        self.bytes = lanes * itemsize
        self.suffix = f"v{lanes}{'f' if kind in (MAX_FLOAT, SUM_FLOAT) else 'i'}{8 * itemsize}"

    @property
    def lowest(self) -> Any:
        """What changes no result: the least value, or zero."""
        least = -(1 << (8 * self.itemsize - 1))
        return {MAX_FLOAT: -math.inf, SUM_FLOAT: 0.0, MAX_SIGNED: least, MAX_UNSIGNED: 0}[self.kind]

    def identity(self) -> ir.Constant:
        return ir.Constant(self.vector, [self.lowest] * self.lanes)

    def combine(self, builder: Any, acc: Any, x: Any) -> Any:
        """`acc` with one value more."""
        if self.kind == SUM_FLOAT:
            return builder.fadd(acc, x)
        if self.kind == MAX_FLOAT:
            # x86's own maximum gives `acc` if either is NaN, which is wrong only where `x` is.
            more = builder.select(builder.fcmp_ordered(">", x, acc), x, acc)
            if self.sums:
                return more
            return builder.select(builder.fcmp_unordered("uno", x, x), x, more)
        compare = builder.icmp_signed if self.kind == MAX_SIGNED else builder.icmp_unsigned
        return builder.select(compare(">", x, acc), x, acc)

    def guarded(self, builder: Any, compute: Any, store: Any) -> None:
        """``store(compute())``, faster for maxima: as if nothing were NaN, and once more if the sums say that it was.

        A maximum that takes a NaN wherever it meets one is three instructions, x86's own is one. All values that
        `compute` shows to `seen` are added up, on units that maxima leave idle; the sum is NaN if one of them is (or
        if both infinities are among them).
        """
        if self.kind != MAX_FLOAT:
            store(compute())
            return
        self.sums = [cgutils.alloca_once(builder, self.vector) for _ in range(SUMS)]
        for slot in self.sums:
            builder.store(ir.Constant(self.vector, [0.0] * self.lanes), slot)
        values = compute()
        total = builder.load(self.sums[0])
        for slot in self.sums[1:]:
            total = builder.fadd(total, builder.load(slot))
        lanes = builder.bitcast(builder.fcmp_unordered("uno", total, total), ir.IntType(self.lanes))
        self.sums = []
        with builder.if_else(builder.icmp_unsigned("!=", lanes, lanes.type(0)), likely=False) as (there, nowhere):
            with there:
                store(compute())
            with nowhere:
                store(values)

    def seen(self, builder: Any, x: Any) -> Any:
        """`x`, which was read."""
        if self.sums:
            slot = self.sums[self._seen % len(self.sums)]
            self._seen += 1
            builder.store(builder.fadd(builder.load(slot), x), slot)
        return x

    def load(self, builder: Any, address: Any) -> Any:
        return builder.load(pointer(builder, address, self.vector), align=self.itemsize)

    def store(self, builder: Any, value: Any, address: Any) -> None:
        builder.store(value, pointer(builder, address, self.vector), align=self.itemsize)

    def load_some(self, builder: Any, address: Any, count: Any) -> Any:
        """The first `count` elements; the lanes after them hold what changes no result."""
        return self.load_where(builder, address, self.below(builder, count))

    def load_where(self, builder: Any, address: Any, there: Any) -> Any:
        """The lanes of the mask `there`; the others are not read."""
        arguments = [pointer(builder, address, self.vector), ir.Constant(I32, self.itemsize), there, self.identity()]
        return call_llvm(builder, f"llvm.masked.load.{self.suffix}.p0", self.vector, arguments)

    def store_some(self, builder: Any, value: Any, address: Any, count: Any) -> None:
        arguments = [value, pointer(builder, address, self.vector), ir.Constant(I32, self.itemsize)]
        call_llvm(
            builder, f"llvm.masked.store.{self.suffix}.p0", ir.VoidType(), [*arguments, self.below(builder, count)]
        )

    def below(self, builder: Any, count: Any) -> Any:
        iota = ir.Constant(ir.VectorType(I32, self.lanes), list(range(self.lanes)))
        return builder.icmp_signed("<", iota, splat(builder, builder.trunc(count, I32), self.lanes))

    def broadcast(self, builder: Any, address: Any) -> Any:
        return splat(builder, builder.load(pointer(builder, address, self.element), align=self.itemsize), self.lanes)

    def slots(self, builder: Any, count: int) -> list[Any]:
        """Accumulators: stack slots, which LLVM keeps in registers."""
        slots = [cgutils.alloca_once(builder, self.vector) for _ in range(count)]
        for slot in slots:
            builder.store(self.identity(), slot)
        return slots

    def into(self, builder: Any, slot: Any, x: Any) -> None:
        builder.store(self.combine(builder, builder.load(slot), x), slot)

    def reduced(self, builder: Any, vectors: int, known: int, count: Any, load: Any) -> list[Any]:
        """`vectors` reductions of `count` steps; load(step, v) gives a value. known: `count`, if not 0; unrolled."""
        if known:
            values = [load(const(0), v) for v in range(vectors)]
            for step in range(1, known):
                values = [self.combine(builder, value, load(const(step), v)) for v, value in enumerate(values)]
            return values
        slots = self.slots(builder, vectors)
        with cgutils.for_range(builder, count) as loop:
            for v, slot in enumerate(slots):
                self.into(builder, slot, load(loop.index, v))
        return [builder.load(slot) for slot in slots]

    def masked(self, builder: Any, value: Any, mask: Any) -> Any:
        """`value` with zero bits where the bits at the address `mask` are."""
        bits = ir.VectorType(ir.IntType(8 * self.itemsize), self.lanes)
        keep = builder.load(pointer(builder, mask, bits), align=1)
        return builder.bitcast(builder.and_(builder.bitcast(value, bits), keep), self.vector)


# ---------------------------------------------------------------- one element at a time


def _scalar(kind: int, itemsize: int) -> Any:
    if kind in (MAX_FLOAT, SUM_FLOAT):
        return types.float32 if itemsize == 4 else types.float64
    return types.int64


@intrinsic(prefer_literal=True)
def load_value(typingctx, address, kind_lit, itemsize_lit):
    """The element at `address`: a float of its size, or an int64."""
    kind, itemsize = kind_lit.literal_value, itemsize_lit.literal_value
    result = _scalar(kind, itemsize)

    def codegen(context, builder, signature, args):
        element = Elements(kind, itemsize, 1).element
        value = builder.load(pointer(builder, args[0], element), align=itemsize)
        if kind == MAX_SIGNED:
            return builder.sext(value, ir.IntType(64))
        return builder.zext(value, ir.IntType(64)) if kind == MAX_UNSIGNED else value

    return result(_i64, kind_lit, itemsize_lit), codegen


@intrinsic(prefer_literal=True)
def store_value(typingctx, address, value, kind_lit, itemsize_lit):
    """Write one element, given as `load_value` gives it."""
    kind, itemsize = kind_lit.literal_value, itemsize_lit.literal_value
    given = _scalar(kind, itemsize)

    def codegen(context, builder, signature, args):
        value = context.cast(builder, args[1], signature.args[1], given)
        if given == types.int64:
            value = builder.trunc(value, ir.IntType(8 * itemsize))
        builder.store(value, pointer(builder, args[0], value.type), align=itemsize)
        return context.get_dummy_value()

    return types.void(_i64, value, kind_lit, itemsize_lit), codegen


@intrinsic(prefer_literal=True)
def identity(typingctx, kind_lit, itemsize_lit):
    """What a reduction starts from, as `load_value` gives it."""
    kind, itemsize = kind_lit.literal_value, itemsize_lit.literal_value
    result = _scalar(kind, itemsize)

    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(result), Elements(kind, itemsize, 1).lowest)

    return result(kind_lit, itemsize_lit), codegen


@intrinsic(prefer_literal=True)
def combine(typingctx, kind_lit, itemsize_lit, acc, x):
    """One step of a reduction, on elements as `load_value` gives them."""
    kind, itemsize = kind_lit.literal_value, itemsize_lit.literal_value

    def codegen(context, builder, signature, args):
        return Elements(kind, itemsize, 1).combine(builder, args[2], args[3])

    # (An unsigned element is a non-negative int64, which both comparisons order alike.)
    return acc(kind_lit, itemsize_lit, acc, x), codegen
