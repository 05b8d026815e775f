"""Sums of vectors, as vector code."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import const, emitted
from blockconv.kernels.common.vectors import Vectors

__all__ = ["Summands", "sum_of_vectors"]

PARTIAL = 64  # vectors in a partial sum


class Summands(NamedTuple):
    """`steps` vectors, `stride` bytes apart, of which the first `valid` lanes exist, to be added to that at `total`."""

    src: int
    steps: int
    stride: int
    valid: int
    total: int


def sum_of_vectors(element: ElementType, lanes: int) -> Any:
    """Code that adds `Summands`."""

    @emitted
    def add_vectors(builder: Any, s: Summands) -> None:
        v = Vectors(builder, element, lanes)
        slot = cgutils.alloca_once(builder, v.kind)
        mask = v.below(s.valid)
        partials = builder.sdiv(builder.add(s.steps, const(PARTIAL - 1)), const(PARTIAL))
        with cgutils.for_range(builder, partials) as partial:
            first = builder.mul(partial.index, const(PARTIAL))
            left = builder.sub(s.steps, first)
            steps = builder.select(builder.icmp_signed("<", left, const(PARTIAL)), left, const(PARTIAL))
            builder.store(v.zero, slot)
            with cgutils.for_range(builder, steps) as loop:
                at = builder.add(s.src, builder.mul(builder.add(first, loop.index), s.stride))
                builder.store(builder.fadd(builder.load(slot), v.load(at, mask)), slot)
            v.store(builder.fadd(v.load(s.total), builder.load(slot)), s.total)

    return add_vectors
