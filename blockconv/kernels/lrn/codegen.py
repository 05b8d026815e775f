"""Local response normalisation as vector code."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import call_llvm, const, emitted
from blockconv.kernels.common.conversion import both_ends
from blockconv.kernels.common.vectors import Vectors

THREE_QUARTERS, ANY_POWER = range(2)  # how s ** -beta is found: by two square roots, or by the C library


class LrnRun(NamedTuple):
    """Contiguous results, each from the squares of the channels around its own.

    src: the address of the results' own elements.
    near: of the first element that the first result needs the square of, or of its square.
    dst: of the results.
    size: results.
    taps: elements, or squares, that each needs.
    stride: bytes from one of these to the next.
    factors: the address of scale, bias and beta.
    integers: where the `ConversionArguments` of elements are.

    Squares and factors have the type of the arithmetic.
    """

    src: int
    near: int
    dst: int
    size: int
    taps: int
    stride: int
    factors: int
    integers: int


def squares(element: ElementType, lanes: int) -> Any:
    """Code that squares `count` contiguous elements, which it leaves in the type that is computed with."""

    @emitted
    def square(builder: Any, src: Any, dst: Any, count: Any, integers: Any) -> None:
        v, _ = both_ends(builder, element, lanes, integers)

        def vector(offset: Any, mask: Any | None) -> None:
            x = v.load(builder.add(src, offset), mask)
            v.computed.store(v.mul(x, x), builder.add(dst, v.in_computed(offset)), mask)

        v.each(count, vector)

    return square


def normalisation(element: ElementType, lanes: int, power: int, squared: bool) -> Any:
    """Code that computes a `LrnRun`'s results. squared: the neighbouring elements are squares already."""

    @emitted
    def normalise(builder: Any, w: LrnRun) -> None:
        v, out = both_ends(builder, element, lanes, w.integers)
        slot = cgutils.alloca_once(builder, v.kind)

        def square(offset: Any, tap: Any, mask: Any | None) -> Any:
            near = builder.add(w.near, builder.mul(tap, w.stride))
            if squared:
                return v.computed.load(builder.add(near, v.in_computed(offset)), mask)
            x = v.load(builder.add(near, offset), mask)
            return v.mul(x, x)

        def vector(offset: Any, mask: Any | None) -> None:
            builder.store(v.zero, slot)
            with cgutils.for_range(builder, w.taps) as loop:
                builder.store(builder.fadd(builder.load(slot), square(offset, loop.index, mask)), slot)
            x = v.load(builder.add(w.src, offset), mask)
            found = _normalised(v.computed, x, builder.load(slot), power, w.factors)
            out.store(found, builder.add(w.dst, offset), mask)

        v.each(w.size, vector)

    return normalise


def _normalised(v: Vectors, x: Any, total: Any, power: int, factors: Any) -> Any:
    """x / (bias + scale * total) ** beta."""
    scale, bias, beta = (v.broadcast(v.b.add(factors, const(k * v.itemsize))) for k in range(3))
    base = v.add(bias, v.mul(scale, total))
    if power == THREE_QUARTERS:
        name = f"llvm.sqrt.{v.suffix()}"
        root = call_llvm(v.b, name, v.kind, [base])
        return v.b.fdiv(x, v.mul(root, call_llvm(v.b, name, v.kind, [root])))
    return v.b.fdiv(x, call_llvm(v.b, f"llvm.pow.{v.suffix()}", v.kind, [base, beta]))
