"""Vectors of floats that kernels compute in float32 or float64, whatever their type in memory is."""

from collections.abc import Sequence
from typing import Any

from blockconv.core.types import ElementType
from blockconv.jit.ir import emitted
from blockconv.jit.values import build
from blockconv.kernels.common.requantize import Elements
from blockconv.kernels.common.vectors import Vectors


class Floats(Vectors):
    """Floats in the computed type: narrower types in memory are float32 from a load to a store.

    Floats of 16 bits are rounded once, by the store; integers of 8 bits are dequantized and quantized, as the
    `QuantizationArguments` at the address `words` say. `itemsize` and `bytes` are of memory; `computed` is as many
    vectors of the type that is computed with.
    """

    def __init__(self, element: ElementType, lanes: int, words=None) -> None:
        super().__init__(element.computed, lanes)
        self.memory, self.computed = Vectors(element, lanes), Vectors(element.computed, lanes)
        self.is_narrow, self.words = element != element.computed, words
        self.elements = None if element.is_float else Elements(element, lanes, words)
        self.itemsize, self.bytes = self.memory.itemsize, self.memory.bytes

    def load(self, address, mask: Any | None = None, other: float | None = None, lanes: int | None = None):
        if not self.is_narrow:
            return super().load(address, mask, other, lanes)
        value = self.widened(self.memory.load(address, mask, lanes=lanes))
        if mask is None or other is None:
            return value
        return build.select(mask, value, Vectors(self.type, value.type.count).c(other))

    def gathered(self, addresses: Sequence[Any]):
        return self.widened(self.memory.gathered(addresses))

    def store(self, value, address, mask: Any | None = None) -> None:
        self.memory.store(self.rounded(value), address, mask)

    def in_computed(self, offset):
        return offset * (self.type.itemsize // self.itemsize)

    def widened(self, value):
        return self._elements(value.type.count).dequantized(value) if self.is_narrow else value

    def rounded(self, value):
        return self._elements(value.type.count).quantized(value) if self.is_narrow else value

    def _elements(self, lanes: int) -> Elements:
        """Code over so many."""
        if self.elements is not None and lanes == self.lanes:
            return self.elements
        return Elements(self.memory.type, lanes, self.words)


def converter(kind: ElementType, lanes: int, widens: bool):
    """convert(src, dst, count): code that copies elements in memory to an array of the computed type; or from one."""

    @emitted
    def convert(src, dst, count) -> None:
        v = Floats(kind, lanes)

        def vector(at, mask: Any | None) -> None:
            if widens:
                v.computed.store(v.load(src + at, mask), dst + v.in_computed(at), mask)
            else:
                v.store(v.computed.load(src + v.in_computed(at), mask), dst + at, mask)

        v.each(count, vector)

    return convert
