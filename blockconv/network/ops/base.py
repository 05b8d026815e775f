"""What all ops of a network share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar

from blockconv.core.errors import ArgumentError, DtypeError
from blockconv.core.types import ElementType

__all__ = [
    "Attributes",
    "ElementTypes",
    "Pads",
    "Pair",
    "Shape",
    "Shapes",
    "Solved",
    "check_axis",
    "check_rank",
    "check_type",
]

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
ElementTypes = tuple[ElementType, ...]
Pair = tuple[int, int]
Pads = tuple[Pair, Pair]  # ((top, bottom), (left, right))


@dataclass(frozen=True)
class Attributes:
    """What all ops share. `infer` gives the output's shape from those of inputs and of parameters."""

    op: ClassVar[str]
    # How many inputs and parameters (constants that a kernel may repack) there may be.
    inputs: ClassVar[range] = range(1, 2)
    parameters: ClassVar[range] = range(1)

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        """The output's shape. Raises ArgumentError."""
        raise NotImplementedError

    def infer_type(self, inputs: ElementTypes, parameters: ElementTypes) -> ElementType:
        """The output's element type: that of all operands, unless an op says otherwise. Raises DtypeError."""
        given = (*inputs, *parameters)
        if len(set(given)) > 1:
            raise DtypeError(self.op, "dtype", ", ".join(map(str, given)), "have to be equal")
        return given[0]


class Solved(Attributes):
    """An op whose rules and sizes are those of its problem, which kernels are asked to solve.

    problem(*shapes): the problem of inputs of these shapes. Raises ArgumentError.
    """

    problem: ClassVar[Callable[..., Any]]

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        shape: Shape = self.problem(*inputs).dst_shape
        return shape


def check_type(attributes: Attributes, argument: str, type: ElementType, *wanted: str) -> None:
    """Raise DtypeError unless an element type is one of the wanted ones, which are named."""
    if type.name not in wanted:
        raise DtypeError(attributes.op, argument, type.name, f"has to be {' or '.join(wanted)}")


def check_rank(attributes: Attributes, shape: Shape, rank: int) -> None:
    """Raise ArgumentError unless a shape has that many dimensions."""
    if len(shape) != rank:
        raise ArgumentError(attributes.op, "input", shape, f"has to have {rank} dimensions")


def check_axis(attributes: Attributes, axis: int, shape: Shape) -> None:
    """Raise ArgumentError unless a shape has that axis, counted from the front."""
    if not 0 <= axis < len(shape):
        raise ArgumentError(attributes.op, "axis", axis, f"has to be one of the {len(shape)} axes of {shape}")
