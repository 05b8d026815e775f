"""Ops of each element by itself, or of each channel."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, get_args

import numpy as np

from blockconv.core.activation import IDENTITY, Activation
from blockconv.core.eltwise_problem import ActivationProblem, AffineProblem, BinaryKind, BinaryProblem
from blockconv.core.layout import Layout, row_major
from blockconv.core.problem_checks import broadcast, check_word, checked_shape
from blockconv.core.types import INTEGERS, ElementType, FloatType, element
from blockconv.network.ops.base import (
    Array,
    Arrays,
    BetweenTypes,
    ElementTypes,
    Scaled,
    Shape,
    Shapes,
    Solved,
    check_type,
    each_pixel,
)
from blockconv.network.ops.reach import Windows
from blockconv.network.ops.rule import Asked, Layouts, Site

__all__ = ["Activate", "Affine", "Binary", "BinaryKind", "Cast"]


@dataclass(frozen=True)
class Cast(BetweenTypes):
    """Floats as those of another type, rounded to the nearest, a half to the even one."""

    op: ClassVar[str] = "cast"
    dtype: FloatType

    def infer_type(self, inputs: ElementTypes, parameters: ElementTypes) -> ElementType:
        others = {*get_args(FloatType)} - {self.dtype}
        check_type(self, "input", inputs[0], *sorted(others))
        return element(self.dtype)

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        return inputs[0]


@dataclass(frozen=True)
class Activate(Solved):
    """An activation of each element."""

    op: ClassVar[str] = "activation"
    activation: Activation

    def problem(self, src: Shape) -> ActivationProblem:
        return ActivationProblem(src)

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        return self.activation.reference(inputs[0])

    def on_integers(self) -> Literal["moves", "computes"] | None:
        return "computes"

    def reads(self, site: Site, axes: tuple[int, ...]) -> list[Windows] | str:
        return each_pixel(site, axes)


@dataclass(frozen=True)
class Affine(Scaled):
    """dst = activation(src * scale[c] + shift[c]) over axis 1: a batch norm that found no convolution.
    parameters: scale (C,), shift (C,); of floats of 16 bits these may be float32, as which they are computed with."""

    op: ClassVar[str] = "affine"
    names: ClassVar[tuple[str, str]] = ("scale", "shift")
    activation: Activation = IDENTITY

    def problem(self, src: Shape) -> AffineProblem:
        return AffineProblem(src)

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        along = (-1,) + (1,) * (inputs[0].ndim - 2)
        scale, shift = (p.reshape(along) for p in parameters)
        return self.activation.reference(inputs[0] * scale + shift)

    def reads(self, site: Site, axes: tuple[int, ...]) -> list[Windows] | str:
        return each_pixel(site, axes)


@dataclass(frozen=True)
class Binary(Solved):
    """dst = activation(kind(a, b)) with NumPy's broadcasting, of a over b or b over a. Either may be a constant."""

    op: ClassVar[str] = "binary"
    inputs: ClassVar[range] = range(2, 3)
    kind: BinaryKind
    activation: Activation = IDENTITY

    def problem(self, src: Shape, other: Shape) -> BinaryProblem:
        return BinaryProblem(self.kind, src, other)

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        """The shape that NumPy gives; not every such shape has a kernel: see `BinaryProblem`."""
        check_word(self.op, "kind", self.kind, BinaryKind)
        return checked_shape(self.op, "inputs", broadcast(self.op, "inputs", *inputs))

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        return self.activation.reference(_BINARY[self.kind](*inputs))

    def on_integers(self) -> Literal["moves", "computes"] | None:
        return "computes"

    def leading(self, site: Site) -> int:
        return next((k for k, tensor in enumerate(site.inputs) if tensor.shape == site.output.shape), 0)

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        """The operand of the result's shape has the result's layout. So has the other, unless it has fewer dimensions:
        then it is row-major, and goes with a row-major result."""
        found = tuple(
            dst if known or len(tensor.shape) == dst.ndim else row_major(len(tensor.shape))
            for tensor, known in zip(site.inputs, site.constant, strict=True)
        )
        return found if src == dst and (dst == row_major(dst.ndim) or all(lay == dst for lay in found)) else None

    def kernel_layouts(self, problem: Any, srcs: Layouts, dst: Layout) -> tuple[Layout, Layout]:
        return dst, dst

    def asked(self, site: Site, srcs: Layouts, dsts: Layouts) -> Iterator[Asked]:
        """Nothing for arithmetic on 8-bit integers, which wraps around: kernels clip and round it."""
        if site.output.type.name not in INTEGERS or self.kind in ("max", "min"):
            yield from super().asked(site, srcs, dsts)

    def reads(self, site: Site, axes: tuple[int, ...]) -> list[Windows] | str:
        """Operands have the same pixels; a constant, or one of a single pixel, has one value for all of them."""
        whole = site.output.shape
        for tensor, constant in zip(site.inputs, site.constant, strict=True):
            shape = (1,) * (len(whole) - len(tensor.shape)) + tensor.shape
            sizes = [shape[axis] for axis in axes]
            if constant and any(size > 1 for size in sizes):
                return f"has the constant {tensor.name!r}, which differs from pixel to pixel"
            if not constant and sizes != [whole[axis] for axis in axes]:
                return f"reads one value {tensor.name!r} for all pixels"
        return each_pixel(site, axes)


def _quotient(a: Array, b: Array) -> Array:
    """Integers round towards zero, as in C."""
    return a / b if a.dtype.kind == "f" else (a - np.fmod(a, b)) // b


_BINARY: dict[BinaryKind, Callable[[Array, Array], Array]] = {
    "add": np.add,
    "mul": np.multiply,
    "sub": np.subtract,
    "div": _quotient,
    "max": np.maximum,
    "min": np.minimum,
}
