"""The pixels of its inputs that an op reads for each pixel of its output."""

from __future__ import annotations

from dataclasses import dataclass
from fractions import Fraction
from typing import Any

__all__ = ["ALL_PIXELS", "NOT_IMAGES", "PIXELS", "Reach", "Windows", "same_pixels", "windows_of"]

PIXELS = 2, 3  # the axes of an image that are pixels
NOT_IMAGES = f"needs its pixels along the axes {PIXELS}"
ALL_PIXELS = "reads all pixels of an image for each pixel of its output"


@dataclass(frozen=True)
class Reach:
    """An output's pixel `o` along one axis reads pixels `step * o + low` to `step * o + high`."""

    step: Fraction = Fraction(1)
    low: Fraction = Fraction(0)
    high: Fraction = Fraction(0)

    def through(self, window: Reach) -> Reach:
        """The reach, in this value's own source, of an op that reads this value by `window`."""
        return Reach(self.step * window.step, self.step * window.low + self.low, self.step * window.high + self.high)

    def shifted(self, by: int) -> Reach:
        """The same, of pixels `by` further."""
        return Reach(self.step, self.low + by, self.high + by)

    def joined(self, other: Reach) -> Reach:
        """The reach of two paths to one value together, if their steps agree."""
        return Reach(self.step, min(self.low, other.low), max(self.high, other.high))


Windows = dict[int, tuple[int, Reach]]  # axis of the output: the source's axis, and what is read along it


def same_pixels(axes: tuple[int, ...]) -> Windows:
    """The pixel at the same position."""
    return {axis: (axis, Reach()) for axis in axes}


def windows_of(problem: Any) -> Windows:
    """The windows of a convolution's or a pool's problem."""
    p = problem
    along = ((p.sh, p.ph, p.kh, p.dh), (p.sw, p.pw, p.kw, p.dw))
    return {
        axis: (axis, Reach(Fraction(stride), Fraction(-begin), Fraction((size - 1) * dilation - begin)))
        for axis, (stride, begin, size, dilation) in zip(PIXELS, along, strict=True)
    }
