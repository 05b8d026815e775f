"""Problems of ops on elements of any type: element by element, by indices that flow, and along one axis."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Literal

import numpy as np

from blockconv.core.checks import Axes, Shape, along, broadcast, check_axis, checked_shape, of_rank, set_field
from blockconv.core.errors import ArgumentError
from blockconv.core.problem import OpProblem
from blockconv.core.python import zipped

BinaryKind = Literal[
    "add", "sub", "mul", "div", "max", "min", "pow", "fmod", "atan2", "mod",
    "equal", "less", "less_equal", "and", "or", "xor",
]  # fmt: skip
GradientKind = Literal["relu_gradient", "silu_gradient", "hardswish_gradient", "gelu_gradient"]
ElementKind = Literal["activation", "lookup", "affine", BinaryKind, "where", "convert", GradientKind]
OPERANDS: dict[str, int] = {"where": 3, **dict.fromkeys(("activation", "lookup", "affine", "convert"), 1)}  # else 2
IndexForm = Literal["along", "elements", "tuples"]
ScatterKind = Literal["none", "add", "mul", "max", "min"]
ScanKind = Literal["add", "mul", "max", "min"]


class ElementsProblem(OpProblem):
    """kind(operands), broadcast together. Shapes with fewer dimensions get leading ones, as in NumPy.

    affine: src * scale[c] + shift[c] over axis 1; scale and shift, of shape (C,), have no shape here.
    """

    op = "elements"
    kind: ElementKind
    shapes: tuple[Shape, ...]

    def check(self) -> None:
        count = OPERANDS.get(self.kind, 2)
        if len(self.shapes) != count:
            raise ArgumentError(self.op, "operands", self.shapes, f"must be {count}, for {self.kind}")
        shapes = [checked_shape(self.op, "operands", shape) for shape in self.shapes]
        rank = len(functools.reduce(functools.partial(broadcast, self.op, "operands"), shapes))
        if self.kind == "affine" and rank < 2:
            raise ArgumentError(self.kind, "operands", self.shapes, "must have a channel axis, axis 1")
        set_field(self, "shapes", tuple(of_rank(shape, rank) for shape in shapes))

    @property
    def src_shape(self) -> Shape:
        """The logical shape of the first operand."""
        return self.shapes[0]

    @property
    def dst_shape(self) -> Shape:
        """The logical shape of the result."""
        return np.broadcast_shapes(*self.shapes)

    def of_images(self, n: int) -> ElementsProblem:
        """The same problem with `n` images, the first axis; an operand of one image for all keeps that."""
        images = self.dst_shape[0]
        shapes = tuple((n if shape[0] == images else 1, *shape[1:]) for shape in self.shapes)
        return replace(self, shapes=shapes)


class IndexProblem(OpProblem):
    """Elements of row-major data at indices that flow: the gathering of them, and the scattering of others there.

    shape: of the data.
    indices: the indices' shape.
    form: "along": each index is one of `axis`, for all that is around and inside of it (ONNX's Gather).
        "elements": each index is one of `axis`, for the element at its own place along other axes (GatherElements).
        "tuples": the last axis of indices holds one index of each axis from `axis` on (GatherND); the axes before are
        the same of both.
    axis: see `form`.
    from_end: whether negative indices count from the end. If not, the data does not have them.
    """

    op = "index"
    sources = ("shape", "indices")
    shape: Shape
    indices: Shape
    form: IndexForm
    axis: int = 0
    from_end: bool = True

    def check(self) -> None:
        check_axis(self.op, self.axis, self.shape)
        rank, axis = len(self.shape), self.axis
        if self.form == "elements" and (
            len(self.indices) != rank
            or any(i > s for k, (i, s) in enumerate(zipped(self.indices, self.shape)) if k != axis)
        ):
            raise self._error("indices", f"must fit into {self.shape}, but for axis {axis}")
        if self.form == "tuples" and (
            len(self.indices) <= axis
            or self.indices[:axis] != self.shape[:axis]
            or not 1 <= self.indices[-1] <= rank - axis
        ):
            rule = f"must begin as the data's {axis} axes, and end with at most {rank - axis} indices"
            raise self._error("indices", rule)

    @property
    def components(self) -> Axes:
        """The axes that one index names, or one tuple of them."""
        count = self.indices[-1] if self.form == "tuples" else 1
        return tuple(range(self.axis, self.axis + count))

    def least(self, axis: int) -> int:
        """The least index of an axis."""
        return -self.shape[axis] if self.from_end else 0

    def outside(self, index: int, component: int) -> ArgumentError:
        """The error for an index that the data does not have. component: its number in its tuple."""
        axis = self.axis + component
        size = self.shape[axis]
        rule = f"have to be {self.least(axis)} to {size - 1}, as axis {axis} has {size} elements"
        return ArgumentError(self.op, "indices", index, rule)

    @property
    def dst_shape(self) -> Shape:
        """The shape of what is gathered, or of the updates that are scattered."""
        if self.form == "elements":
            return self.indices
        if self.form == "along":
            return along(self.shape, self.axis, *self.indices)
        return (*self.indices[:-1], *self.shape[self.axis + self.indices[-1] :])

    @functools.cached_property
    def elements(self) -> int:
        """How many contiguous elements one index, or tuple, names."""
        return 1 if self.form == "elements" else math.prod(self.shape[self.components[-1] + 1 :])

    @property
    def loops(self) -> list[tuple[int, int, int]]:
        """Over indices, or tuples, outermost first: how many, and from one to the next in data and in indices."""
        of_data, of_indices = (
            [math.prod(shape[k + 1 :]) for k in range(len(shape))] for shape in (self.shape, self.indices)
        )
        if self.form == "elements":
            steps = zipped(self.indices, of_data, of_indices)
            return [(size, 0 if k == self.axis else data, index) for k, (size, data, index) in enumerate(steps)]
        outer, before = math.prod(self.shape[: self.axis]), math.prod(self.shape[self.axis :])
        if self.form == "along":
            return [(outer, before, 0), (math.prod(self.indices), 0, 1)]
        rest = math.prod(self.indices[self.axis : -1])
        return [(outer, before, rest * self.indices[-1]), (rest, 0, self.indices[-1])]


class _AlongAxis(OpProblem):
    """The base of problems that go along one axis of row-major data, element by element."""

    shape: Shape
    axis: int

    def check(self) -> None:
        check_axis(self.op, self.axis, self.shape)

    @property
    def lines(self) -> tuple[int, int, int]:
        """(lines outside of the axis, its elements, lines inside of it)."""
        return math.prod(self.shape[: self.axis]), self.shape[self.axis], math.prod(self.shape[self.axis + 1 :])


class ScanProblem(_AlongAxis):
    """Sums, products, maxima or minima of the elements up to each one along an axis.

    exclusive: without the element itself.
    reverse: from the end on.
    """

    op = "scan"
    kind: ScanKind = "add"
    exclusive: bool = False
    reverse: bool = False

    def check(self) -> None:
        super().check()
        if self.kind in ("max", "min") and (self.exclusive or self.shape[self.axis] == 0):
            rule = f"axis {self.axis}: the {self.kind} of nothing is undefined"
            raise self._error("shape", rule)


class TopProblem(_AlongAxis):
    """The indices of the `count` largest elements along an axis, in order; equal elements in the order of indices.

    smallest: of the smallest elements.
    last: equal elements in the reverse order of indices.
    A NaN is larger than all numbers, and for the smallest ones it is smaller.
    """

    op = "top"
    count: int = 1
    smallest: bool = False
    last: bool = False

    def check(self) -> None:
        super().check()
        size = self.shape[self.axis]
        if not 0 <= self.count <= size:
            rule = f"must be 0 to {size}, as axis {self.axis} has {size} elements"
            raise self._error("count", rule)

    @property
    def dst_shape(self) -> Shape:
        """The shape of the result."""
        return along(self.shape, self.axis, self.count)
