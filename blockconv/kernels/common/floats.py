"""Vectors of floats that kernels compute in float32 or float64, whatever their type in memory is."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from blockconv.core.types import ElementType
from blockconv.jit.ir import const, emitted
from blockconv.kernels.common.halves import rounded, widened
from blockconv.kernels.common.requantize import Elements
from blockconv.kernels.common.vectors import Vectors


class Floats(Vectors):
    """Floats in the computed type: narrower types in memory are float32 from a load to a store.

    Floats of 16 bits are rounded once, by the store; integers of 8 bits are dequantized and quantized, as the
    `QuantizationArguments` at the address `words` say. `itemsize` and `bytes` are of memory; `computed` is as many
    vectors of the type that is computed with.
    """

    def __init__(self, builder: Any, element: ElementType, lanes: int, words: Any = None) -> None:
        super().__init__(builder, element.computed, lanes)
        self.computed = Vectors(builder, element.computed, lanes)
        self.is_narrow = element != element.computed
        self.held, self.words = element, words
        self.elements = None if element.is_float else Elements(builder, element, lanes, words)
        self.memory = Vectors(builder, element, lanes)
        self.itemsize, self.bytes = self.memory.itemsize, self.memory.bytes

    def load(self, address: Any, mask: Any | None = None, other: float | None = None, lanes: int | None = None) -> Any:
        if not self.is_narrow:
            return super().load(address, mask, other, lanes)
        some = self.computed if lanes is None else Vectors(self.b, self.type, lanes)
        value = self._widened(some, self.memory.load(address, mask, lanes=lanes))
        return value if mask is None or other is None else self.b.select(mask, value, some.c(other))

    def gathered(self, addresses: Sequence[Any]) -> Any:
        value = self.memory.gathered(addresses)
        return self._widened(self.computed, value) if self.is_narrow else value

    def store(self, value: Any, address: Any, mask: Any | None = None) -> None:
        if self.is_narrow:
            value = self._rounded(Vectors(self.b, self.type, value.type.count), value)
        self.memory.store(value, address, mask)

    def in_computed(self, offset: Any) -> Any:
        """An offset in memory, in bytes, as the offset of the same elements in the computed type."""
        return self.b.mul(offset, const(self.type.itemsize // self.itemsize))

    def _widened(self, some: Vectors, value: Any) -> Any:
        """A vector of the memory's type, in the computed type."""
        return widened(some, self.held, value) if self.held.is_half else self._elements(some.lanes).dequantized(value)

    def _rounded(self, some: Vectors, value: Any) -> Any:
        """A vector of the computed type, in the memory's type."""
        return rounded(some, self.held, value) if self.held.is_half else self._elements(some.lanes).quantized(value)

    def _elements(self, lanes: int) -> Elements:
        """Code over so many integers."""
        if self.elements is not None and lanes == self.lanes:
            return self.elements
        return Elements(self.b, self.held, lanes, self.words)


def widener(kind: ElementType, lanes: int) -> Any:
    """widen(src, dst, count): code that copies elements in memory to an array of the computed type."""

    @emitted
    def widen(builder: Any, src: Any, dst: Any, count: Any) -> None:
        v = Floats(builder, kind, lanes)

        def vector(at: Any, mask: Any | None) -> None:
            v.computed.store(v.load(builder.add(src, at), mask), builder.add(dst, v.in_computed(at)), mask)

        v.each(count, vector)

    return widen


def narrower(kind: ElementType, lanes: int) -> Any:
    """narrow(src, dst, count): the inverse of `widener`'s."""

    @emitted
    def narrow(builder: Any, src: Any, dst: Any, count: Any) -> None:
        v = Floats(builder, kind, lanes)

        def vector(at: Any, mask: Any | None) -> None:
            v.store(v.computed.load(builder.add(src, v.in_computed(at)), mask), builder.add(dst, at), mask)

        v.each(count, vector)

    return narrow
