"""Vector code over elements of memory, as LLVM IR: every kernel family's loads, stores and arithmetic."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from llvmlite import ir

from blockconv.core import target
from blockconv.core.checks import Pair
from blockconv.core.python import zipped
from blockconv.core.types import SIGNED, ElementType, Types
from blockconv.jit.ir import (
    I32,
    call_llvm,
    const,
    constants,
    counted,
    emitted,
    join,
    pointer,
    shuffle,
    splat,
    stack_memory,
    vector,
)
from blockconv.jit.values import alloca_once, binary, build, truth
from blockconv.kernels.common.unpacked import packed_pairs, unpacked_pairs

# (e^x - 1) / x in float32, for |x| up to half of log(2), which exp reduces its argument to; highest power first.
EXPM1_BY_X = (1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0)


def llvm_type(element: ElementType):
    """LLVM's type of an element; integers have no sign there, and floats of 16 bits are bits (`halves.py`)."""
    floats = {4: ir.FloatType(), 8: ir.DoubleType()}
    if element.is_float and not element.is_half:
        return floats[element.itemsize]
    return ir.IntType(8 * element.itemsize)


def lanes_below(lanes: int, limit, period: int = 0):
    """A mask: lane, or lane modulo `period`, < limit (i64)."""
    iota = constants(32, tuple(k % (period or lanes) for k in range(lanes)))
    return iota < splat(build.trunc(limit, I32), lanes)


def lanes_inside(lanes: int, first, size, ahead: int = 0):
    """A mask: 0 <= first + ahead + lane < size (i64s)."""
    numbers = constants(32, tuple(range(ahead, ahead + lanes)))
    first, size = (splat(build.trunc(value, I32), lanes) for value in (first, size))
    return build.icmp_unsigned("<", numbers + first, size)


def _powers(count: int) -> Iterator[Pair]:
    """`count` lanes as stretches of powers of two, the largest first: (first lane, lanes)."""
    first = 0
    for bit in reversed(range(count.bit_length())):
        if count >> bit & 1:
            yield first, 1 << bit
            first += 1 << bit


class Vectors:
    """Code over vectors of `lanes` elements of one type.

    Addresses are i64s, in bytes, and need not be aligned to more than an element. fma: multiply-adds round once.
    `element` is LLVM's type of one, `kind` its type of a vector. `b` is `build`, for activations: `core` has no LLVM.
    """

    b = build

    def __init__(self, element: ElementType, lanes: int, fma: bool = False) -> None:
        self.type, self.lanes, self.fma = element, lanes, fma
        self.itemsize, self.bytes = element.itemsize, lanes * element.itemsize
        self.element = llvm_type(element)
        self.kind = ir.VectorType(self.element, lanes)

    @functools.cached_property
    def memory(self) -> Vectors:
        """Code over as many elements as memory has them. `Floats` computes with others than these."""
        return self

    @functools.cached_property
    def computed(self) -> Vectors:
        """Code over as many elements as they are computed with."""
        return self

    def in_computed(self, offset):
        """An offset in memory, in bytes, as the offset of the same elements in the computed type."""
        return offset

    def widened(self, value):
        """A vector as memory has it, in the computed type."""
        return value

    def rounded(self, value):
        """A vector of the computed type, as memory has it."""
        return value

    def suffix(self, lanes: int | None = None) -> str:
        """How the names of LLVM's intrinsics over such vectors end."""
        kind = "i" if isinstance(self.element, ir.IntType) else "f"
        return f"v{lanes or self.lanes}{kind}{8 * self.type.itemsize}"

    # ------------------------------------------------------------ memory

    def load(self, address, mask: Any | None = None, other: float | None = None, lanes: int | None = None):
        """The vector at `address`, or one of so many lanes. Lanes that the mask lacks are not read, and are `other`."""
        kind = self.kind if lanes is None else ir.VectorType(self.element, lanes)
        at = pointer(address, kind)
        if mask is None:
            return build.load(at, align=self.itemsize)
        rest = kind(None if other is None else [other] * kind.count)
        given = [at, I32(self.itemsize), mask, rest]
        return call_llvm(f"llvm.masked.load.{self.suffix(kind.count)}.p0", kind, given)

    def load_parts(self, address, part: int, step):
        """A vector whose parts, of `part` lanes each, are `step` bytes (i64) apart in memory."""
        parts = [self.load(address, lanes=part)]
        for k in range(1, self.lanes // part):
            parts.append(self.load(address + step * k, lanes=part))
        return join(parts)

    def gathered(self, addresses: Sequence[Any]):
        """A vector of equal parts, which are loaded from these addresses."""
        return join([self.load(at, lanes=self.lanes // len(addresses)) for at in addresses])

    def store(self, value, address, mask: Any | None = None) -> None:
        """Store a vector; lanes that the mask lacks are not written."""
        at = pointer(address, value.type)
        if mask is None:
            build.store(value, at, align=self.itemsize)
        else:
            given = [value, at, I32(self.itemsize), mask]
            call_llvm(f"llvm.masked.store.{self.suffix(value.type.count)}.p0", None, given)

    def load_first(self, address, count: int):
        """The first `count` lanes from `address`, and nothing beyond; the others are undefined."""
        made = self.kind(ir.Undefined)
        for first, size in _powers(count):
            part = self.load(address + first * self.itemsize, lanes=size)
            wide = shuffle(part, part, [lane % size for lane in range(self.lanes)])
            chosen = [lane + self.lanes * (first <= lane < first + size) for lane in range(self.lanes)]
            wide = shuffle(wide, wide, [(lane - first) % self.lanes for lane in range(self.lanes)])
            made = shuffle(made, wide, chosen)
        return made

    def store_first(self, value, address, count: int) -> None:
        """Store the first `count` lanes, without a mask."""
        for first, size in _powers(count):
            part = shuffle(value, value, list(range(first, first + size)))
            self.store(part, address + first * self.itemsize)

    def load_lanes(self, address, limit: Any | None, count: int, lanes: int):
        """The first `count` of so many lanes, the others undefined; of all of them, the first `limit` (i64).

        Integers that are stored two a byte are one a lane, and pairs are read together.
        """
        if self.type.is_packed:
            mask = None if limit is None else lanes_below(lanes // 2, limit >> 1)
            return unpacked_pairs(self.load(address, mask, lanes=lanes // 2))
        if count == lanes:
            return self.load(address, None if limit is None else lanes_below(lanes, limit), lanes=lanes)
        if target.isa().name == "avx512":
            return self.load(address, self.below(const(count)))
        return self.load_first(address, count)

    def store_lanes(self, value, address, limit: Any | None, count: int) -> None:
        """Store what `load_lanes` loads, of a vector of as many lanes."""
        if self.type.is_packed:
            value, limit = packed_pairs(value), None if limit is None else limit >> 1
        elif count < value.type.count:
            if target.isa().name == "avx512":
                self.store(value, address, self.below(const(count)))
            else:
                self.store_first(value, address, count)
            return
        if limit is None:
            self.store(value, address)
        else:
            self.store_below(value, address, limit)

    def store_below(self, value, address, limit) -> None:
        """Store the first `limit` lanes (i64) of a vector; all, where it has fewer.

        Without AVX-512 by halves: a masked store of AVX2 takes an AMD processor some 20 cycles, and elsewhere it is a
        branch for each lane.
        """
        lanes = value.type.count
        if target.isa().name == "avx512":
            self.store(value, address, lanes_below(lanes, limit))
            return
        with build.if_else(limit >= lanes) as (whole, part):
            with whole:
                self.store(value, address)
            with part, build.if_then(limit > 0):
                while lanes > 1:
                    lanes //= 2
                    is_stored = truth(limit & lanes)
                    first, second = (shuffle(value, value, list(range(k, k + lanes))) for k in (0, lanes))
                    with build.if_then(is_stored):
                        self.store(first, address)
                    value = build.select(is_stored, second, first)
                    address = address + build.select(is_stored, const(lanes * self.itemsize), const(0))

    def broadcast(self, address):
        """The element at `address` in every lane."""
        return self.splat(build.load(pointer(address, self.element), align=self.itemsize))

    def below(self, count, period: int = 0):
        """The mask of the first `count` lanes (i64), or of the first of each `period`."""
        return lanes_below(self.lanes, count, period)

    def permuted(self, value, indices):
        """The lanes of `value` that the integers at an address name. (LLVM makes one instruction of it.)"""
        kind = vector(self.itemsize, self.lanes)
        named = build.load(pointer(indices, kind), align=self.itemsize)
        out = value.type(ir.Undefined)
        for lane in range(self.lanes):
            at = I32(lane)
            out = build.insert_element(out, build.extract_element(value, build.extract_element(named, at)), at)
        return out

    def with_zero_bits(self, value, mask):
        """`value` with zero bits where the bits at the address `mask` are zero."""
        bits = vector(self.itemsize, self.lanes)
        keep = build.load(pointer(mask, bits), align=1)
        return build.bitcast(build.bitcast(value, bits) & keep, self.kind)

    def periodic(self, address, period):
        """The elements at an address that repeat after so many (i64), a divisor of the lanes."""
        (slot,) = self.slots(1, self.zero)

        def case(count: int) -> None:
            if count == self.lanes:
                slot.held = self.load(address)
                return
            with build.if_else(binary("eq", period, count)) as (this, larger):
                with this:
                    slot.held = self.repeated(address, count)[0]
                with larger:
                    case(2 * count)

        case(1)
        return slot.held

    def repeated(self, address, count: int) -> list[Any]:
        """The vectors of the `count` elements at an address, again and again, until they begin anew with a vector."""
        if count == 1:
            return [self.broadcast(address)]
        given = self.load(address, lanes=count)
        lanes = math.lcm(count, self.lanes)
        parts = [[k % count for k in range(first, first + self.lanes)] for first in range(0, lanes, self.lanes)]
        return [shuffle(given, given, part) for part in parts]

    def each(self, count, body: Callable[..., None], unroll: int = 1) -> None:
        """body(byte offset, mask) for the vectors of `count` elements; the mask is None where all lanes exist.

        unroll: vectors at a time, as long as there are so many: body(byte offset, None, which of these).
        """
        first, rest = const(0), count
        if unroll > 1:
            groups = build.sdiv(count, const(unroll * self.lanes))
            with counted(groups) as n:
                at = n * (unroll * self.bytes)
                for k in range(unroll):
                    body(at + k * self.bytes, None, k)
            first = groups * (unroll * self.bytes)
            rest = count - groups * (unroll * self.lanes)
        whole = build.sdiv(rest, const(self.lanes))  # 0 where there are fewer than no elements
        with counted(whole) as n:
            body(first + n * self.bytes, None)
        done = whole * self.lanes
        rest = rest - done
        with build.if_then(rest > 0):
            body(first + done * self.itemsize, self.below(rest))

    def slots(self, count: int, first) -> list[Any]:
        """Accumulators that begin as `first`: stack slots, which LLVM keeps in registers."""
        return self.in_slots([first] * count)

    def in_slots(self, values: Iterable[Any]) -> list[Any]:
        """Accumulators that begin as these vectors."""
        return [alloca_once(self.kind, value=value) for value in values]

    def loaded(self, slots: Iterable[Any]) -> list[Any]:
        """Load the accumulators from their stack slots."""
        return [slot.held for slot in slots]

    def spill(self, slots: list[Any], address) -> None:
        """Store accumulators, one vector after the other."""
        for k, slot in enumerate(slots):
            self.store(slot.held, address + k * self.bytes)

    def spilled(self, slots: list[Any]):
        """Store accumulators on the stack, and give their address."""
        address = stack_memory.emit(len(slots) * self.bytes)
        self.spill(slots, address)
        return address

    def restore(self, slots: list[Any], address) -> None:
        """Load accumulators that were spilled."""
        for k, slot in enumerate(slots):
            slot.held = self.load(address + k * self.bytes)

    def total(self, slots: list[Any], combine: Callable[[Any, Any], Any] = operator.add):
        """Accumulators combined (added), two by two."""
        values = self.loaded(slots)
        while len(values) > 1:
            values = [combine(x, y) for x, y in zipped(values[::2], values[1::2])]
        return values[0]

    # ------------------------------------------------------------ arithmetic

    def c(self, value: float):
        """A constant in every lane."""
        return self.kind(int(value) if isinstance(self.element, ir.IntType) else value)

    @property
    def zero(self):
        return self.kind(None)

    def splat(self, scalar):
        return splat(scalar, self.lanes)

    def splat_float64(self, value):
        """A float64, or the one of these bits, in every lane, rounded to the vector's type."""
        return self.splat(build.fptrunc(build.bitcast(value, ir.DoubleType()), self.element))

    def or_zero(self, value, other: float):
        """A vector of floats, or zeros where it is `other`."""
        return build.select(build.fcmp_ordered("==", value, self.c(other)), self.zero, value)

    def multiply_add(self, x, y, acc):
        """x * y + acc."""
        if self.fma:
            return call_llvm(f"llvm.fma.{self.suffix()}", self.kind, [x, y, acc])
        return x * y + acc

    def add_multiple(self, acc: Any | None, factor: float, x):
        """acc + factor * x, or factor * x where there is no `acc`; multiples of 1 and -1 are added as they are."""
        if acc is None:
            return x if factor == 1 else factor * x
        if factor == 1:
            return acc + x
        if factor == -1:
            return acc - x
        return self.multiply_add(self.c(factor), x, acc)

    def sum_of_multiples(self, factors: Sequence[float], values: Sequence[Any]):
        """The sum of each factor times its value; terms that need no multiplication come first."""
        acc = None
        for factor, x in sorted(zipped(factors, values), key=lambda pair: pair[0] != 1):
            acc = self.add_multiple(acc, factor, x)
        return acc

    def clip(self, x, low, high):
        """`x` between two vectors. Compared so that a NaN stays (x86's max and min do it in this operand order)."""
        x = build.select(x < low, low, x)
        return build.select(x > high, high, x)

    def compared(self, sign: str, x, y):
        """Where x < y, or as `sign` says; false where one is NaN."""
        if self.type.is_float:
            return build.fcmp_ordered(sign, x, y)
        return (build.icmp_signed if self.type.kind == SIGNED else build.icmp_unsigned)(sign, x, y)

    def extreme(self, sign: str, x, y):
        """x where x > y, or x < y, as `sign` says; else y. A NaN of either stays."""
        more = self.compared(sign, x, y)
        if self.type.is_float:
            more = more | build.fcmp_unordered("uno", x, x)
        return build.select(more, x, y)

    def larger(self, x, y):
        """The larger of each lane; `y` where one is NaN."""
        return build.select(x > y, x, y)

    def magnitude(self, x):
        """|x|."""
        return self.intrinsic("fabs", x)

    def sqrt(self, x):
        return self.intrinsic("sqrt", x)

    def intrinsic(self, name: str, *given):
        """LLVM's function `name` of each lane of its arguments."""
        return call_llvm(f"llvm.{name}.{self.suffix()}", self.kind, list(given))

    def fold(self, x, combine: Callable[[Any, Any], Any] = operator.add, period: int = 1):
        """All lanes of `x` that are a multiple of `period` apart combined (added), in every one of these lanes."""
        half = self.lanes // 2
        while half >= period:
            x = combine(x, shuffle(x, x, [(lane + half) % self.lanes for lane in range(self.lanes)]))
            half //= 2
        return x

    def polynomial(self, x, coefficients: Sequence[float]):
        """By Horner's rule; the coefficient of the highest power comes first."""
        value = self.c(coefficients[0])
        for k in coefficients[1:]:
            value = value * x + k
        return value

    def each_lane(self, function: str, *given):
        """A function of the C library on each lane of its arguments."""
        out = self.kind(ir.Undefined)
        for lane in range(self.lanes):
            at = I32(lane)
            value = call_llvm(function, self.element, [build.extract_element(x, at) for x in given])
            out = build.insert_element(out, value, at)
        return out

    def exp(self, x):
        """e^x; in float32 infinity above 88.4, and not below e^-87."""
        if self.itemsize == 8:
            return call_llvm(f"llvm.exp.{self.suffix()}", self.kind, [x])
        is_nan = build.fcmp_unordered("uno", x, x)
        bounded = build.select(is_nan, self.c(0.0), self.clip(x, self.c(-87.0), self.c(89.0)))
        n = call_llvm(f"llvm.rint.{self.suffix()}", self.kind, [bounded * (1 / math.log(2))])
        # log(2) in two parts: n times the first is exact.
        rest = bounded + n * -0.693359375
        rest = rest + n * 2.12194440e-4
        value = self.polynomial(rest, [*EXPM1_BY_X, 1.0])
        ints = vector(4, self.lanes)
        biased = build.fptosi(n, ints) + 127
        power = build.bitcast(biased << 23, self.kind)
        return build.select(is_nan, x, value * power)

    def expm1(self, x):
        """e^x - 1, also where the difference would lose all digits; float32 to 5e-7 of each value."""
        if self.itemsize == 8:
            return self.each_lane("expm1", x)
        near = x * self.polynomial(x, EXPM1_BY_X)
        far = self.exp(x) + -1.0
        return build.select(x * x < math.log(2) ** 2 / 4, near, far)

    def exp_to_zero(self, x):
        """e^x for x up to 0; zero where float32 has nothing near it."""
        value = self.exp(x)
        if self.itemsize == 8:
            return value
        return build.select(x < -87.3, self.c(0.0), value)

    def log(self, x):
        return self.each_lane("log" if self.itemsize == 8 else "logf", x)

    def sigmoid(self, x):
        return 1.0 / (1.0 + self.exp(-x))

    def erf(self, x):
        """float32 by Abramowitz and Stegun 7.1.26 (1.5e-7 absolute), float64 by the C library."""
        if self.itemsize == 8:
            return self.each_lane("erf", x)
        negative = x < 0.0
        size = build.select(negative, -x, x)
        t = 1.0 / (1.0 + size * 0.3275911)
        tail = self.polynomial(t, [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0])
        value = 1.0 - tail * self.exp(-(size * size))
        return build.select(negative, -value, value)


@emitted
def fill_elements(itemsize: int, dst, count, bits) -> None:
    """Write `count` elements of these bits, if there are any."""
    v = Vectors(Types.bits(itemsize).src, target.isa().vector_bytes // itemsize)
    value = v.splat(build.trunc(bits, v.element) if itemsize < 8 else bits)
    whole = build.sdiv(count, const(v.lanes))
    with counted(whole) as n:
        v.store(value, dst + n * v.bytes)
    rest = count - whole * v.lanes
    with build.if_then(rest > 0):
        v.store_below(value, dst + whole * v.bytes, rest)
