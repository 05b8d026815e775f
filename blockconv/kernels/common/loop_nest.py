"""Storage as strided loops, and a reorder as a nest of them.

A loop has a size, and for each operand the stride from one of its steps to the next. The axes of a layout are such
loops. Loops that are contiguous with each other in every operand are fused, so the fewest possible loops remain.

In a reorder the blocks of both layouts cut a dimension into digits (C = 4·c1 + c0), and each digit is a loop. HPTT
(Springer et al., ARRAY'17) and oneDNN's reorders do the same.
"""

import math
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import TypeVar

from blockconv.core.checks import Pair, Shape
from blockconv.core.layout import Axis, Layout
from blockconv.core.python import bounded_cache
from blockconv.core.record import frozen

_L = TypeVar("_L", bound="Loop")


@frozen
class Loop:
    """`size` steps: each adds `strides[k]` to the offset in operand k, and `step` to the logical index of `dim`.

    If a loop has two operands, the first is the source and the second the destination.
    """

    size: int
    strides: tuple[int, ...]
    dim: int = -1
    step: int = 0

    @property
    def src(self) -> int:
        return self.strides[0]

    @property
    def dst(self) -> int:
        return self.strides[1]

    def around(self: _L, inner: _L) -> _L | None:
        """This loop and one directly inside it as one, if in every operand the next step is where the inner loop ends.

        dim and step are then those of the inner loop.
        """
        if self.strides != tuple([inner.size * stride for stride in inner.strides]):
            return None
        return replace(inner, size=self.size * inner.size)


def fused(loops: Iterable[_L], alone: Callable[[_L], bool] = lambda loop: False) -> list[_L]:
    """Loops, outermost first, with those fused that are one. alone(loop): it must stay as it is."""
    done: list[_L] = []
    for inner in loops:
        one = done[-1].around(inner) if done and not alone(done[-1]) and not alone(inner) else None
        done[-1:] = [*done[-1:], inner] if one is None else [one]
    return done


@frozen
class Nest:
    """Loops in the destination's order, outermost first; strides in elements.

    limits: two numbers for a dimension. Indices below the first are copied, those up to the second are filled, and the
        rest are not written. Every other dimension is copied whole.
    unread: dimensions whose filled indices have no memory in the source: it must not be read there.
    """

    loops: tuple[Loop, ...]
    limits: dict[int, Pair]
    unread: frozenset[int]

    def partial(self, loop: Loop) -> bool:
        return loop.dim in self.limits


@bounded_cache
def nest(src: Layout, dst: Layout, shape: Shape) -> Nest | None:
    """The loop nest of a reorder; None where the layouts' blocks do not nest (sizes 4 and 6, say)."""
    loops: list[Loop] = []
    limits: dict[int, Pair] = {}
    padded, readable, read, written = dst.padded_shape(shape), src.padded_shape(shape), src.axes(shape), dst.axes(shape)
    for dim, extent in enumerate(shape):
        digits = _digits(dim, padded[dim], [a for a in read if a.dim == dim], [a for a in written if a.dim == dim])
        if digits is None:
            return None
        if padded[dim] != extent or math.prod([d.size for d in digits]) != extent:
            limits[dim] = (extent, padded[dim])
        loops += digits
    loops = sorted((loop for loop in loops if loop.size > 1), key=lambda loop: (-loop.dst, -loop.src))
    unread = frozenset(dim for dim in limits if readable[dim] < padded[dim])
    return Nest(tuple(fused(loops, lambda loop: loop.dim in limits)), limits, unread)


def _digits(dim: int, padded: int, src: list[Axis], dst: list[Axis]) -> list[Loop] | None:
    """The coarsest digits that both sides' axes of one dimension are made of, biggest step first, as the axes are."""
    if len(src) == len(dst) == 1:
        return [Loop(padded, (src[0].stride, dst[0].stride), dim, 1)]
    steps = sorted({a.step for a in src} | {a.step for a in dst}, reverse=True)
    if any(big % small for big, small in zip(steps, steps[1:], strict=False)):  # noqa: RUF007
        return None
    digits = []
    above = padded
    for step in steps:
        strides = tuple(a.stride * (step // a.step) for a in (_holding(src, step), _holding(dst, step)))
        digits.append(Loop(-(-above // step), strides, dim, step))
        # Below a digit with one value, the loop covers only the part of a block that exists.
        above = min(step, above)
    return digits


def _holding(axes: list[Axis], step: int) -> Axis:
    return next(a for a in axes if a.step <= step)
