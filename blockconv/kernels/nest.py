"""A reorder as a loop nest: each loop has a size and two strides, one in the source and one in the destination.

The blocks of both layouts cut a dimension into digits (C = 4·c1 + c0); loops that follow one
another in both layouts are fused. What is left is the least that has to be walked, as in
HPTT (Springer et al., ARRAY'17) and in oneDNN's reorders.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace

from blockconv.layout import Axis, Layout

__all__ = ["Loop", "Nest", "nest"]


@dataclass(frozen=True)
class Loop:
    """`size` steps; each adds `step` to the logical index of `dim` and `src`, `dst` elements to the offsets."""

    dim: int
    step: int
    size: int
    src: int
    dst: int


@dataclass(frozen=True)
class Nest:
    """Loops in the destination's order, outermost first.

    Of a dimension in `limits`, indices below the first number are copied, from there to the
    second filled, and from there on left alone. Every other dimension is walked whole.
    Of a dimension in `unread`, the source has no place for what is filled: it must not be read.
    """

    loops: tuple[Loop, ...]
    limits: dict[int, tuple[int, int]]
    unread: frozenset[int]

    def partial(self, loop: Loop) -> bool:
        return loop.dim in self.limits


@functools.lru_cache(maxsize=4096)
def nest(src: Layout, dst: Layout, shape: tuple[int, ...]) -> Nest | None:
    """The loop nest of a reorder; None where the layouts' blocks do not nest (sizes 4 and 6, say)."""
    loops: list[Loop] = []
    limits: dict[int, tuple[int, int]] = {}
    padded, there = dst.padded_shape(shape), src.padded_shape(shape)
    for dim, extent in enumerate(shape):
        digits = _digits(dim, padded[dim], _of(dim, src.axes(shape)), _of(dim, dst.axes(shape)))
        if digits is None:
            return None
        if math.prod(d.size for d in digits) != extent or padded[dim] != extent:
            limits[dim] = (extent, padded[dim])
        loops += digits
    loops = sorted((loop for loop in loops if loop.size > 1), key=lambda loop: (-loop.dst, -loop.src))
    unread = frozenset(dim for dim in limits if there[dim] < padded[dim])
    return Nest(tuple(_fused(loops, limits)), limits, unread)


def _of(dim: int, axes: tuple[Axis, ...]) -> list[Axis]:
    return sorted((a for a in axes if a.dim == dim), key=lambda a: -a.step)


def _digits(dim: int, padded: int, src: list[Axis], dst: list[Axis]) -> list[Loop] | None:
    """The coarsest digits that both sides' axes of one dimension are made of, biggest step first."""
    steps = sorted({a.step for a in src} | {a.step for a in dst}, reverse=True)
    if any(big % small for big, small in zip(steps, steps[1:], strict=False)):  # noqa: RUF007
        return None
    digits = []
    above = padded
    for step in steps:
        size = -(-above // step)
        s, d = _holding(src, step), _holding(dst, step)
        digits.append(Loop(dim, step, size, s.stride * (step // s.step), d.stride * (step // d.step)))
        # Below a digit that takes one value, a whole block need not be walked, only what exists of it.
        above = min(step, above)
    return digits


def _holding(axes: list[Axis], step: int) -> Axis:
    return next(a for a in axes if a.step <= step)


def _fused(loops: list[Loop], limits: dict[int, tuple[int, int]]) -> list[Loop]:
    """Neighbours that are one run in both layouts become one loop; only whole dimensions can."""
    done: list[Loop] = []
    for inner in loops:
        outer = done[-1] if done else None
        if (
            outer is not None
            and not {outer.dim, inner.dim} & set(limits)
            and outer.dst == inner.size * inner.dst
            and outer.src == inner.size * inner.src
        ):
            done[-1] = replace(inner, size=outer.size * inner.size)
        else:
            done.append(inner)
    return done
