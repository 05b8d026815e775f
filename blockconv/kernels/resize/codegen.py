"""Blends of contiguous elements, as vector code."""

from __future__ import annotations

from typing import Any

from blockconv.core.types import ElementType
from blockconv.jit.ir import emitted
from blockconv.kernels.common.vectors import Vectors

__all__ = ["blend"]


def blend(element: ElementType, lanes: int) -> Any:
    """Code for dst = a * (1 - weight) + b * weight over `count` contiguous elements; weight is a float64."""

    @emitted
    def mix(builder: Any, a: Any, b: Any, weight: Any, dst: Any, count: Any) -> None:
        v = Vectors(builder, element, lanes)
        one = builder.fsub(weight.type(1.0), weight)
        first, second = (v.splat(x if v.itemsize == 8 else builder.fptrunc(x, v.element)) for x in (one, weight))

        def vector(offset: Any, mask: Any | None) -> None:
            x = v.mul(v.load(builder.add(a, offset), mask), first)
            y = v.mul(v.load(builder.add(b, offset), mask), second)
            v.store(v.add(x, y), builder.add(dst, offset), mask)

        v.each(count, vector)

    return mix
