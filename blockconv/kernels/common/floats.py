"""Vectors of floats that are computed with in the type that is right for it, whatever their type in memory is."""

from __future__ import annotations

from typing import Any

from blockconv.core.types import ElementType
from blockconv.jit.ir import const
from blockconv.kernels.common.halves import rounded, widened
from blockconv.kernels.common.vectors import Vectors

__all__ = ["Floats"]


class Floats(Vectors):
    """Floats as they are computed with: those of 16 bits are float32 from a load to a store, which rounds once.

    `itemsize` and `bytes` are of memory; `computed` is as many vectors of the type that is computed with.
    """

    def __init__(self, builder: Any, element: ElementType, lanes: int) -> None:
        super().__init__(builder, element.computed, lanes)
        self.computed = Vectors(builder, element.computed, lanes)
        self.half = element if element.is_half else None
        self.memory = Vectors(builder, element, lanes)
        self.itemsize, self.bytes = self.memory.itemsize, self.memory.bytes

    def load(self, address: Any, mask: Any | None = None, other: float | None = None, lanes: int | None = None) -> Any:
        if self.half is None:
            return super().load(address, mask, other, lanes)
        some = self.computed if lanes is None else Vectors(self.b, self.type, lanes)
        value = widened(some, self.half, self.memory.load(address, mask, lanes=lanes))
        return value if mask is None or other is None else self.b.select(mask, value, some.c(other))

    def store(self, value: Any, address: Any, mask: Any | None = None) -> None:
        if self.half is not None:
            value = rounded(Vectors(self.b, self.type, value.type.count), self.half, value)
        self.memory.store(value, address, mask)

    def in_computed(self, offset: Any) -> Any:
        """Bytes of memory as those that as many elements take in the type that is computed with."""
        return self.b.mul(offset, const(self.type.itemsize // self.itemsize))
