"""Layer normalisation of one contiguous row, and its gradient, as vector code: a mean and a variance for all of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import const, emitted
from blockconv.kernels.common.floats import Floats

PARTIAL = 64  # vectors of a partial sum


class RowSpan(NamedTuple):
    """A row.

    src, grad, dst: addresses of its first element.
    elements: how many.
    scale, shift: addresses of a number for each element.
    mean, inverse: of the row's: see `Groups`.
    parts: of gradients of bias and scale, to which the row's are added.
    room: bytes from one to the other.
    share: 1 / elements.
    epsilon: float64 both.
    """

    src: int
    grad: int
    dst: int
    elements: int
    scale: int
    shift: int
    mean: int
    inverse: int
    parts: int
    room: int
    share: float
    epsilon: float


def normalised_row(element: ElementType, lanes: int, centred: bool) -> Any:
    """Code that writes a row, and its statistics. centred: False: the mean counts as 0."""

    @emitted
    def normalise(builder: Any, s: RowSpan) -> None:
        b, v = builder, Floats(builder, element, lanes)
        share, mean = v.splat_float64(s.share), v.zero

        def squares(offset: Any, mask: Any | None) -> list[Any]:
            apart = v.sub(v.load(b.add(s.src, offset), mask), mean)
            square = v.mul(apart, apart)
            return [square if mask is None else b.select(mask, square, v.zero)]

        if centred:
            (total,) = _sums(v, s.elements, 1, lambda offset, mask: [v.load(b.add(s.src, offset), mask)])
            mean = v.mul(total, share)
        (total,) = _sums(v, s.elements, 1, squares)
        inverse = b.fdiv(v.c(1.0), v.sqrt(v.add(v.mul(total, share), v.splat_float64(s.epsilon))))
        with b.if_then(b.icmp_signed("!=", s.mean, const(0))):
            v.computed.store_first(mean, s.mean, 1)
            v.computed.store_first(inverse, s.inverse, 1)

        def column(offset: Any, mask: Any | None) -> None:
            at = v.in_computed(offset)
            scale, shift = (v.computed.load(b.add(each, at), mask) for each in (s.scale, s.shift))
            apart = v.sub(v.load(b.add(s.src, offset), mask), mean)
            v.store(v.add(v.mul(apart, v.mul(scale, inverse)), shift), b.add(s.dst, offset), mask)

        v.each(s.elements, column)

    return normalise


def gradient_of_row(element: ElementType, lanes: int) -> Any:
    """Code that writes the gradient of a row (see `group_gradients`), and adds to the gradients of bias and scale."""

    @emitted
    def write_gradient(builder: Any, s: RowSpan) -> None:
        b, v = builder, Floats(builder, element, lanes)
        mean, inverse = (v.computed.broadcast(each) for each in (s.mean, s.inverse))

        def loaded(offset: Any, mask: Any | None) -> tuple[Any, Any, Any]:
            """The gradient, the elements' differences from the mean, the scale."""
            grad, x = (v.load(b.add(each, offset), mask) for each in (s.grad, s.src))
            return grad, v.sub(x, mean), v.computed.load(b.add(s.scale, v.in_computed(offset)), mask)

        def summands(offset: Any, mask: Any | None) -> list[Any]:
            grad, apart, scale = loaded(offset, mask)
            product = v.mul(grad, apart)
            for part, value in ((s.parts, grad), (b.add(s.parts, s.room), v.mul(product, inverse))):
                to = b.add(part, v.in_computed(offset))
                v.computed.store(v.add(v.computed.load(to, mask), value), to, mask)
            return [v.mul(grad, scale), v.mul(product, scale)]

        totals = _sums(v, s.elements, 2, summands)
        shift, slope = (v.mul(v.mul(b.fneg(each), v.splat_float64(s.share)), inverse) for each in totals)
        slope = v.mul(v.mul(slope, inverse), inverse)

        def column(offset: Any, mask: Any | None) -> None:
            grad, apart, scale = loaded(offset, mask)
            y = v.add(v.mul(grad, v.mul(scale, inverse)), v.add(v.mul(apart, slope), shift))
            v.store(y, b.add(s.dst, offset), mask)

        v.each(s.elements, column)

    return write_gradient


def _sums(v: Floats, elements: Any, count: int, summands: Callable[[Any, Any], Sequence[Any]]) -> list[Any]:
    """The sums over all elements of the `count` vectors that summands(offset, mask) gives, each in every lane."""
    b, size = v.b, const(PARTIAL * v.lanes)
    totals, parts = v.slots(count, v.zero), v.slots(count, v.zero)
    with cgutils.for_range(b, b.sdiv(b.add(elements, b.sub(size, const(1))), size)) as loop:
        done = b.mul(loop.index, size)
        rest, first = b.sub(elements, done), b.mul(done, const(v.itemsize))
        for slot in parts:
            b.store(v.zero, slot)

        def add(offset: Any, mask: Any | None) -> None:
            for slot, value in zip(parts, summands(b.add(first, offset), mask), strict=True):
                b.store(v.add(b.load(slot), value), slot)

        v.each(b.select(b.icmp_signed("<", rest, size), rest, size), add)
        for total, part in zip(totals, parts, strict=True):
            b.store(v.add(b.load(total), b.load(part)), total)
    return [v.fold(b.load(slot), v.add) for slot in totals]
