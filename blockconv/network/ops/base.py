"""The base of all ops of a network."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, Literal

import numpy as np

from blockconv.core.checks import Pair, Shape
from blockconv.core.errors import ArgumentError, DtypeError
from blockconv.core.layout import Layout, row_major
from blockconv.core.problem import ReorderProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import Array, ElementType, Types, element
from blockconv.network.ops.rule import (
    ALL_PIXELS,
    NOT_IMAGES,
    PIXELS,
    Axes,
    Layouts,
    Reads,
    Requests,
    Site,
    View,
    same_pixels,
)

Arrays = Sequence[Array]
Shapes = tuple[Shape, ...]
ElementTypes = tuple[ElementType, ...]


@dataclass(frozen=True)
class Op:
    """An op of a network: its attributes are the fields, and all that is known of it its methods.

    op: its name, under which the kernel table has its kernels.
    inputs, parameters: how many there may be; parameters are constants that a kernel may repack.
    takes: the names of the types that inputs may have. Empty: any.
    effect: what `on_integers` says.
    keeps_pixels: whether an output pixel reads the pixels at the same position, and no others.
    mixes: the field with the axis, or the axes, along which it reads other elements all the same.
    of_images: whether it needs pixels along H and W.
    is_exact: whether `compute` takes all elements as they are; other ops get floats as float64.
    folds: whether it is computed at once where all its operands are constants.
    """

    op: ClassVar[str]
    inputs: ClassVar[range] = range(1, 2)
    parameters: ClassVar[range] = range(1)
    takes: ClassVar[Sequence[str]] = ()
    effect: ClassVar[Literal["moves", "computes"] | None] = None
    keeps_pixels: ClassVar[bool] = False
    mixes: ClassVar[str] = ""
    of_images: ClassVar[bool] = False
    is_exact: ClassVar[bool] = False
    folds: ClassVar[bool] = True

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        """The output's shape. Raises ArgumentError."""
        raise NotImplementedError

    def infer_type(self, inputs: ElementTypes, parameters: ElementTypes) -> ElementType:
        """The output's element type: the common one of all operands, unless an op says otherwise. Raises DtypeError."""
        check_inputs(self, inputs)
        given = (*inputs, *parameters)
        if given.count(given[0]) < len(given):
            raise DtypeError(self.op, "dtype", ", ".join(map(str, given)), "have to be equal")
        return given[0]

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        """The output, in plain NumPy: slow, written from the definition, and independent of the kernels."""
        raise NotImplementedError

    def failure(self, inputs: Shapes, report: Sequence[int]) -> ArgumentError:
        """The error of kernels that failed (`Primitive.fails`) on inputs of these shapes. report: what they wrote."""
        raise NotImplementedError

    def on_integers(self) -> Literal["moves", "computes"] | None:
        """The op's effect on 8-bit and 4-bit integers that stand for floats, where the table has kernels for them.

        "moves": it gives some of them unchanged. "computes": as `Quantized`, with what they stand for. None: nothing.
        """
        return self.effect

    def reads(self, site: Site, axes: Axes) -> Reads:
        """The window of each input that an output pixel reads, with pixels along `axes`; or why it has no bounds."""
        return NOT_IMAGES if self.of_images and axes != PIXELS else self.windows(site, axes)

    def windows(self, site: Site, axes: Axes) -> Reads:
        """`reads`, for an op `of_images` with its pixels along H and W."""
        mixed = getattr(self, self.mixes) if self.mixes else ()
        apart = {*axes}.isdisjoint(mixed if isinstance(mixed, tuple) else (mixed,))
        return [same_pixels(axes)] * len(site.inputs) if self.keeps_pixels and apart else ALL_PIXELS

    def of_moved_integers(self, given: Quantization) -> Op:
        """The op that moves integers which stand for what `given` says."""
        return self

    def evaluate(self, inputs: Arrays, parameters: Arrays) -> Array:
        """`compute`, with floats in float64 and integers as they are, and without warnings of NumPy."""
        with np.errstate(all="ignore"):
            given = [[x if self.is_exact else _wide(x) for x in operands] for operands in (inputs, parameters)]
            return self.compute(*given)

    # -- The planning rule: kernels that the table has under the op's name, one layout for all inputs, no views. Kernels
    # see values of other than four dimensions in row-major order. No kernel and no machine is known here.

    def problem_at(self, site: Site) -> Any:
        """The problem that kernels solve; None if there are only views."""
        return None

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        """The requests for these layouts of source and destination."""
        problem = self.problem_at(site)
        if problem is not None:
            srcs, dsts = (
                layouts if layouts[0].ndim == len(shape) else (row_major(len(shape)),)
                for layouts, shape in ((srcs, problem.src_shape), (dsts, problem.dst_shape))
            )
            yield self.op, problem, srcs, dsts

    def leading(self, site: Site) -> int:
        """The number of the input whose layout is a kernel's source layout."""
        return 0

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        """The layout of each input for a kernel from `src` to `dst`; None if there is none."""
        return (src,) * len(site.inputs)

    def views(self, site: Site, layouts: Layouts) -> Iterator[View]:
        """The views among these layouts of four dimensions."""
        yield from ()

    def types_at(self, site: Site) -> Types:
        """The element types of a kernel's arrays."""
        return Types.all(site.output.type.array_dtype)

    def options(self) -> dict[str, Any]:
        """The options of a row's primitive."""
        activation = getattr(self, "activation", None)
        return {} if activation is None else {"activation": activation}


class Solved(Op):
    """An op with the rules and sizes of its problem, which kernels solve.

    solves: the problem's class. It gives the op its name, unless the op has one of its own.
    """

    solves: ClassVar[type[Any]]

    def __init_subclass__(cls) -> None:
        if "solves" in vars(cls) and "op" not in vars(cls):
            cls.op = getattr(cls.solves, "op", "")

    def sizes(self, shapes: Shapes) -> dict[str, Any]:
        """The fields of the problem of inputs of these shapes, besides the op's attributes of the same names."""
        return dict(zip(self.solves.sources, shapes, strict=False))

    def problem(self, *shapes: Shape) -> Any:
        """The problem of inputs of these shapes. Raises ArgumentError."""
        op: Any = type(self)
        fields = self.sizes(shapes)
        for name in _shared(op):
            fields[name] = getattr(self, name)
        return self.solves(**fields)

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        shape: Shape = self.problem(*inputs).dst_shape
        return shape

    def problem_at(self, site: Site) -> Any:
        return self.problem(*(tensor.shape for tensor in site.inputs))


@functools.cache
def _shared(op: Any) -> list[str]:
    """The names of fields that an op has, and its problem too."""
    names = {one.name for one in fields(op)}
    return [one.name for one in fields(op.solves) if one.init and one.name in names]


class Scaled(Solved):
    """An op with two parameters for each channel, of shape (C,).

    With 16-bit floats they may be float32, in which kernels compute.
    names: the names of the two in errors.
    """

    parameters: ClassVar[range] = range(2, 3)
    names: ClassVar[tuple[str, str]] = ("scale", "bias")

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        src = super().infer(inputs, parameters)
        for name, shape in zip(self.names, parameters, strict=True):
            if shape != (src[1],):
                raise ArgumentError(self.op, name, shape, f"has to have shape ({src[1]},)")
        return src

    def infer_type(self, inputs: ElementTypes, parameters: ElementTypes) -> ElementType:
        check_inputs(self, inputs)
        src = inputs[0]
        for name, type in zip(self.names, parameters, strict=True):
            check_type(self, name, type, *dict.fromkeys((src.name, src.computed.name)))
        return src


class BetweenTypes(Op):
    """Elements of one type as those of another. Its kernels are reorders, from any layout to any other.

    An input of the network is read in row-major order, as it comes.
    """

    keeps_pixels: ClassVar[bool] = True

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        return inputs[0]

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        shape, itemsize = site.output.shape, site.inputs[0].type.itemsize
        for src in srcs if site.made[0] else (row_major(len(shape)),):
            for dst in dsts:
                yield "reorder", ReorderProblem(shape, src.name, dst.name, itemsize), (src,), (dst,)

    def types_at(self, site: Site) -> Types:
        return Types.converted(site.inputs[0].type.array_dtype, site.output.type.array_dtype)

    def options(self) -> dict[str, Any]:
        return {"quantizations": tuple(getattr(self, end, None) for end in ("src", "dst"))}


class RowMajor(Solved):
    """An op whose kernels read and write row-major arrays."""

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        src, dst = (row_major(tensor.rank) for tensor in (site.inputs[0], site.output))
        yield self.op, self.problem_at(site), (src,), (dst,)

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        return tuple(row_major(tensor.rank) for tensor in site.inputs)


def check_inputs(attributes: Op, inputs: ElementTypes) -> None:
    """Raise DtypeError unless the op takes inputs of these types."""
    for type in inputs if attributes.takes else ():
        check_type(attributes, "input", type, *attributes.takes)


def check_type(attributes: Op, argument: str, type: ElementType, *wanted: str) -> None:
    """Raise DtypeError unless an element type is one of the wanted ones, which are named."""
    if type.name not in wanted:
        raise DtypeError(attributes.op, argument, type.name, f"has to be {' or '.join(wanted)}")


def _wide(x: Array) -> Array:
    return x.astype(np.float64) if element(x.dtype).is_float else x


def framed(x: Array, pads: Sequence[Pair], value: float) -> Array:
    """`x` with (before, after) of `value` on each axis; negative ends crop."""
    inner = tuple(slice(max(0, -b), n - max(0, -e)) for n, (b, e) in zip(x.shape, pads, strict=True))
    return np.pad(x[inner], [(max(0, b), max(0, e)) for b, e in pads] or 0, constant_values=value)
