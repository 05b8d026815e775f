"""The words of an op's planning rule: values, requests to the kernel table, views, and the pixels that an op reads.

An op offers a *view*, which needs no kernel, if the bytes of its output exist already. Views are a reshape, a
contiguous slice, and a concatenation whose inputs are written straight into its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from fractions import Fraction
from typing import Any, NamedTuple

from blockconv.core.checks import Axes as Axes
from blockconv.core.checks import Names, Shape
from blockconv.core.layout import Layout
from blockconv.core.python import zipped
from blockconv.core.record import frozen
from blockconv.core.types import ArrayDtype, ElementType

Layouts = tuple[Layout, ...]


@frozen
class Tensor:
    """A value: its name, logical shape and element type."""

    name: str
    shape: Shape
    type: ElementType

    @property
    def dtype(self) -> ArrayDtype:
        """The type as a BlockedArray's dtype: NumPy's, or "int4" or "uint4", two to a byte."""
        return self.type.array_dtype

    @property
    def elements(self) -> int:
        """The number of logical elements."""
        return math.prod(self.shape)

    @property
    def rank(self) -> int:
        """The number of axes."""
        return len(self.shape)


Tensors = tuple[Tensor, ...]


def names_of(tensors: Iterable[Tensor]) -> Names:
    """The names of tensors."""
    return tuple([tensor.name for tensor in tensors])


def listed(tensors: Iterable[Tensor]) -> str:
    """Names and shapes."""
    return ", ".join(f"{tensor.name} {tensor.shape}" for tensor in tensors)


class Site(NamedTuple):
    """A node of a network with its values.

    name: the node's.
    inputs, parameters, output: its values.
    constant: for each input, whether it is a constant.
    made: for each input, whether a node makes it.
    """

    name: str
    inputs: Tensors
    parameters: Tensors
    output: Tensor
    constant: tuple[bool, ...]
    made: tuple[bool, ...]

    @property
    def src(self) -> Tensor:
        """The first input."""
        return self.inputs[0]


# Requests to `Row`s: (op, problem, layouts of the source, layouts of the destination), in any combination of layouts.
Requests = Iterator[tuple[str, Any, Layouts, Layouts]]


class View(NamedTuple):
    """An output without a kernel.

    srcs, dst: the layouts of inputs and output.
    begin: the output's offset in its first input, in elements.
    starts: each input's offset in the output, in elements; None if the output is part of an input.
    """

    srcs: Layouts
    dst: Layout
    begin: int = 0
    starts: Axes | None = None


# ---------------------------------------------------------------- the pixels that an op reads

PIXELS = 2, 3  # the axes of an image that are pixels
NOT_IMAGES = f"needs its pixels along the axes {PIXELS}"
ALL_PIXELS = "reads all pixels of an image for each pixel of its output"


@frozen
class Reach:
    """An output's pixel `o` along one axis reads pixels `step * o + low` to `step * o + high`."""

    step: Fraction = Fraction(1)
    low: Fraction = Fraction(0)
    high: Fraction = Fraction(0)

    def through(self, window: Reach) -> Reach:
        """The reach, in this value's own source, of an op that reads this value by `window`."""
        return Reach(self.step * window.step, self.step * window.low + self.low, self.step * window.high + self.high)

    def inverse(self) -> Reach:
        """The output pixels whose reach includes a pixel `o`."""
        return Reach(1 / self.step, -self.high / self.step, -self.low / self.step)

    def shifted(self, by: int) -> Reach:
        """The same reach, `by` pixels further."""
        return Reach(self.step, self.low + by, self.high + by)

    def joined(self, other: Reach) -> Reach:
        """The union of the reaches of two paths to one value, which have one step."""
        return Reach(self.step, min(self.low, other.low), max(self.high, other.high))


Windows = dict[int, tuple[int, Reach]]  # axis of the output: the source's axis, and the reach along it


Reads = list[Windows] | str  # of each input, or why it has no bounds


def same_pixels(axes: Axes) -> Windows:
    """The pixel at the same position."""
    return {axis: (axis, Reach()) for axis in axes}


def windows_of(problem: Any) -> Windows:
    """The windows of a convolution's or a pool's problem."""
    p = problem
    along = ((p.sh, p.ph, p.kh, p.dh), (p.sw, p.pw, p.kw, p.dw))
    return {
        axis: (axis, Reach(Fraction(stride), Fraction(-begin), Fraction((size - 1) * dilation - begin)))
        for axis, (stride, begin, size, dilation) in zipped(PIXELS, along)
    }
