"""The reduction of pooling: a maximum or a sum of elements, of floats or integers, and its vectors.

A maximum takes a NaN wherever it meets one and keeps the first of equals, as PyTorch's does. Sums are never taken back
by a subtraction, so a NaN or infinity reaches the windows that hold it and no other. Integers less their zero point are
summed as int32, and lines of scratch hold such sums. An integer average is the sum as float32, divided once and rounded
to even. The divisor is the number of elements, times the destination's scale relative to the source's. Floats of 16
bits are float32 as soon as they are read, in lines of scratch too, and are rounded as they are stored.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.ir import call_llvm, const, counted, emitted, every_pixel, picked, pointer, splat
from blockconv.jit.values import build, truth
from blockconv.kernels.common.conversion import quantizations_at
from blockconv.kernels.common.requantize import Elements, QuantizationArguments
from blockconv.kernels.common.unpacked import packed_pairs, unpacked_pairs
from blockconv.kernels.common.vectors import Vectors

MAXIMUM, SUM = range(2)
SUMS = 4  # accumulators, which hide the latency of an addition

_Vectors = list[Any]


def held_type(operation: int, element_type: ElementType) -> ElementType:
    """The type that is reduced: int32 for sums of integers, float32 for 16-bit floats, bytes for packed maxima."""
    if element_type.is_float:
        return element_type.computed
    if element_type.is_packed and operation == MAXIMUM:
        return element(element_type.dtype)
    return element("int32") if operation == SUM else element_type


@dataclass(frozen=True)
class PoolReduction:
    """The reduction of a kernel, and its vectors."""

    operation: int  # MAXIMUM or SUM
    element: int  # the element type's code
    lanes: int  # elements of a vector in memory, or packed pairs
    masked: bool = False  # a value is stored for channels that do not exist: zero, or the zero point

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the image and of outputs."""
        return ElementType.of(self.element).itemsize

    @property
    def held(self) -> ElementType:
        """The type that elements are reduced in, and that lines of scratch hold."""
        return held_type(self.operation, ElementType.of(self.element))

    @property
    def identity(self) -> float:
        """The number of this type that changes no result: zero, or the least."""
        if self.operation == SUM:
            return 0.0 if self.held.is_float else 0
        return -math.inf if self.held.is_float else self.held.bounds[0]

    @property
    def neutral(self) -> int:
        """Its bits."""
        return self.held.bits(self.identity)


class Reducer(Vectors):
    """The vector code of a reduction: over vectors of the held type, which are read from `memory`.

    integers: the address of their `ConversionArguments`, where integers are read or written.
    """

    def __init__(self, reduction: PoolReduction, integers=None) -> None:
        self.memory = Vectors(ElementType.of(reduction.element), reduction.lanes)
        self.is_packed = self.memory.type.is_packed
        super().__init__(reduction.held, reduction.lanes * (2 if self.is_packed else 1))
        self.is_sum, self.is_masked, self.identity = reduction.operation == SUM, reduction.masked, reduction.identity
        self.is_widened, self.is_half = reduction.held != self.memory.type, self.memory.type.is_half
        if self.is_half or (integers is not None and self.is_widened):
            sides = [None, None] if self.is_half else quantizations_at(integers)
            self.image, self.outputs = (Elements(self.memory.type, self.lanes, side) for side in sides)
        if integers is not None and self.is_masked and not self.memory.type.is_float:
            words = QuantizationArguments.load(quantizations_at(integers)[1])
            self.filled = splat(build.trunc(words.zero_point, self.memory.element), self.lanes)
        self.sums: _Vectors = []  # slots, while a guard adds up values that are read: see `guarded`
        self._read = 0

    @property
    def neutral(self):
        """The vector that changes no result."""
        return self.c(self.identity)

    def more(self, x, y):
        """Where x > y, both vectors or both scalars; false where one is NaN."""
        if self.type.is_float:
            return x > y
        return (build.icmp_signed if self.type.kind == "signed" else build.icmp_unsigned)(">", x, y)

    def is_taken(self, value, most):
        """Where a value takes the place of the maximum before it: where it is more, or NaN."""
        more = self.more(value, most)
        return more | build.fcmp_unordered("uno", value, value) if self.type.is_float else more

    def combine(self, acc, x):
        """`acc` with one value more."""
        if self.is_sum:
            return acc + x
        # x86's own maximum gives `acc` if either is NaN, which is wrong only where `x` is.
        larger = build.select(self.more(x, acc), x, acc)
        if self.sums or not self.type.is_float:
            return larger
        return build.select(build.fcmp_unordered("uno", x, x), x, larger)

    def store_padding(self, address, zero_point) -> None:
        """Store a vector of the image's elements that change no result: what is read where there is no column."""
        memory = self.memory
        if self.is_sum and not memory.type.is_float:
            value = memory.splat(build.trunc(zero_point, memory.element))
        else:
            value = self.in_memory(self.neutral)
        memory.store(value, address)

    def accumulators(self, count: int) -> _Vectors:
        return self.slots(count, self.neutral)

    def accumulate(self, slot, x) -> None:
        build.store(self.combine(build.load(slot), x), slot)

    def fold_into(self, totals: _Vectors, slots: _Vectors) -> None:
        """Accumulate slots in fewer ones, in turns."""
        for k, slot in enumerate(slots):
            self.accumulate(totals[k % len(totals)], build.load(slot))

    def feed(self, slots: _Vectors, address, step: int, count: Any | None = None) -> None:
        """Accumulate vectors `step` bytes apart, one in each slot; their first `count` elements, or all."""
        mask = None if count is None else self.below(count)
        values = [self.read(address + k * step, mask) for k in range(len(slots))]
        for slot, value in zip(slots, values, strict=True):
            self.accumulate(slot, value)

    def reduced(self, vectors: int, known: int, count, read: Callable[[Any, int], Any]) -> _Vectors:
        """`vectors` reductions of `count` steps; read(step, v) gives a value. known: `count`, if not 0; unrolled."""
        if known:
            values = [read(const(0), v) for v in range(vectors)]
            for step in range(1, known):
                values = [self.combine(value, read(const(step), v)) for v, value in enumerate(values)]
            return values
        slots = self.accumulators(vectors)
        with counted(count) as index:
            for v, slot in enumerate(slots):
                self.accumulate(slot, read(index, v))
        return self.loaded(slots)

    def guarded(self, compute: Callable[[], _Vectors], store: Callable[[_Vectors], None]) -> None:
        """``store(compute())``, faster for maxima; see `watch`."""
        self.watch()
        store(compute())
        is_nan = self.met_nan()
        if is_nan is not False:
            with build.if_then(is_nan):
                store(compute())

    def watch(self) -> None:
        """From here on maxima are computed as if nothing were NaN; if `met_nan` says so, once more.

        A maximum that takes a NaN wherever it meets one is three instructions, x86's own is one. All values that are
        read by `read` are added up, on units that maxima leave idle. The sum is NaN if one of them is, or if both
        infinities are among them. Results are stored before it is known, so that no register holds one until then.
        """
        self.sums = [] if self.is_sum or not self.type.is_float else self.slots(SUMS, self.c(0.0))

    def met_nan(self):
        """Whether the values that were read since `watch` may have a NaN, which is rare; its effect ends."""
        if not self.sums:
            return False
        total = sum(self.loaded(self.sums[1:]), build.load(self.sums[0]))
        self.sums, bits = [], ir.IntType(self.lanes)
        is_nan = build.bitcast(build.fcmp_unordered("uno", total, total), bits)
        some = truth(is_nan)
        return call_llvm("llvm.expect.i1", some.type, [some, some.type(0)])

    def read(self, address, mask: Any | None = None):
        """The image's vector at `address`, for the guard to see. Lanes that the mask lacks change no result."""
        if not self.is_widened:
            return self.read_held(address, mask)
        value = self.memory.load(address, mask)
        if self.is_packed:
            return self._seen(self._unpacked(value))
        value = self.image.dequantized(value) if self.is_half else self.image.difference(value)
        return self._seen(value if mask is None else build.select(mask, value, self.c(self.identity)))

    def _unpacked(self, pairs):
        """Packed integers in the held type."""
        value = unpacked_pairs(pairs)
        if self.memory.type.kind == SIGNED:
            value = (value ^ 8) - 8
        return self.image.difference(value) if self.is_sum else value

    def read_held(self, address, mask: Any | None = None):
        """The same of a vector in the scratch."""
        return self._seen(self.load(address, mask, self.identity))

    def _seen(self, value):
        """A value that was read, which the guard adds up."""
        if self.sums:
            slot = self.sums[self._read % len(self.sums)]
            self._read += 1
            build.store(build.load(slot) + value, slot)
        return value

    def read_pixels(self, address, inner: int, stride: int):
        """As many whole pixels of `inner` elements as a vector holds, each `stride` pixels after the one before it."""
        if stride == 1:
            return self.load(address)
        elements = every_pixel(self.lanes, inner, stride)
        return picked(self.kind, elements, lambda k: self.load(address + k * self.bytes))

    def scale(self, address, spread: bool = True):
        """The factor of sums, or the divisor of sums of integers; None for maxima. spread: one for all lanes."""
        if not self.is_sum:
            return None
        f = self if self.type.is_float else Vectors(element("float32"), self.lanes)
        return f.broadcast(address) if spread else f.load(address)

    def store_result(self, value, address, scale, mask, count: Any | None = None) -> None:
        """Store the results of windows. scale: the vector of factors or divisors of sums.

        mask: the address of zero bits for channels that do not exist. count: the elements that are stored, if not all.
        """
        memory = self.memory
        if self.is_sum:
            if self.type.is_float:
                value = value * scale
            else:  # divided as float32, which rounds once
                value = self.outputs.rounded(build.sitofp(value, scale.type) / scale)
        value = self.in_memory(value)
        if self.is_masked and self.type.is_float:
            value = memory.with_zero_bits(value, mask)
        elif self.is_masked:
            keep = build.load(pointer(mask, memory.kind), align=1)
            keep = unpacked_pairs(keep) if self.is_packed else keep
            value = build.select(truth(keep), value, self.filled)
        if self.is_packed:
            value = packed_pairs(value)
        memory.store(value, address, None if count is None else self.below(count))

    def in_memory(self, value):
        """Results as memory has them."""
        return self.outputs.quantized(value) if self.is_half else value

    def plus(self, address, elements: int):
        """The address so many elements of the image, or of outputs, after another."""
        return address + elements * self.memory.itemsize

    def plus_held(self, address, elements: int):
        """The same for the held type in the scratch, and for scales."""
        return address + elements * self.itemsize


reducer = emitted(Reducer)
