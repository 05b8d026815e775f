"""The base of all ops of a network."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from typing import Any, ClassVar, Literal, TypeVar

import numpy as np

from blockconv.core.checks import Names, Pair, Shape, check_rank, check_same
from blockconv.core.errors import ArgumentError, DtypeError
from blockconv.core.layout import Layout, row_major
from blockconv.core.problem import ReorderProblem
from blockconv.core.python import zipped
from blockconv.core.quantization import Quantization
from blockconv.core.record import Record
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

T = TypeVar("T")
ANY = 1 << 30  # more inputs than a node may have
OUTPUT = -1  # among a kernel's buffers: what a node writes; the k-th result beside it is OUTPUT - 1 - k
Buffers = list[int | Array | None]  # a kernel's: numbers of inputs, `OUTPUT`, arrays, or None for none
Further = tuple[tuple[Shape | None, ElementType], ...]  # results beside an output; None: of the output's shape


def common_type(op: Op, *types: ElementType | None) -> ElementType:
    """The op's own `dtype`, else the type that all operands have.

    Raises DtypeError if types of operands differ, or if the op does not take or give a type.
    """
    given = [type for type in types if type is not None]
    check_inputs(op, given)
    if given.count(given[0]) < len(given):
        raise DtypeError(op.op, "dtype", ", ".join(map(str, given)), "have to be equal")
    dtype = getattr(op, "dtype", None)
    if dtype is None:
        return given[0]
    if op.gives:
        check_type(op, "dtype", element(dtype), *op.gives)
    return element(dtype)


class Op(Record):
    """An op of a network: its attributes are the fields, and all that is known of it its methods.

    op: its name, under which the kernel table has its kernels.
    inputs, parameters: how many there may be; parameters are constants that a kernel may repack.
    row_op: the op of the table's rows, if it is neither the problem's nor `op`.
    takes, gives: the names of the types that inputs may have, and that the field `dtype` may have. Empty: any.
    effect: what `on_integers` says; "moves" where the field that `moves_with` names has the value that it gives.
    keeps_pixels: whether an output pixel reads the pixels at the same position, and no others.
    mixes: the field with the axis, or the axes, along which it reads other elements all the same.
    of_images: whether it needs pixels along H and W.
    is_exact: whether `compute` takes all elements as they are; other ops get floats as float64.
    folds: whether it is computed at once where all its operands are constants.
    packs: whether kernels get weights that flow, which each run packs.
    reads_as_dst: whether inputs after the first have the destination's layout.
    told: the names of attributes that are options of a row's primitive, if they are not None.
    infer: the output's shape, from the operands' shapes. Raises ArgumentError.
    infer_type: the output's element type, from the operands' types. Raises DtypeError. Default: the common type.
    compute: the output in plain NumPy, from the operands' elements: slow, written from the definition, and independent
        of the kernels.

    These three take the operands in order: inputs, then parameters. None stands for one that a node leaves out.
    failure: the error of kernels that failed (`Primitive.fails`), from the inputs' shapes and what the kernels wrote.
    """

    op: ClassVar[str]
    inputs: ClassVar[range] = range(1, 2)
    parameters: ClassVar[range] = range(1)
    row_op: ClassVar[str] = ""
    takes: ClassVar[Sequence[str]] = ()
    gives: ClassVar[Sequence[str]] = ()
    effect: ClassVar[Literal["moves", "computes"] | None] = None
    moves_with: ClassVar[tuple[str, Any]] = ("", None)
    keeps_pixels: ClassVar[bool] = False
    mixes: ClassVar[str] = ""
    of_images: ClassVar[bool] = False
    is_exact: ClassVar[bool] = False
    folds: ClassVar[bool] = True
    packs: ClassVar[bool] = False
    reads_as_dst: ClassVar[bool] = False
    told: ClassVar[Names] = ("activation",)

    infer: ClassVar[Callable[..., Shape]]
    infer_type: ClassVar[Callable[..., ElementType]] = common_type
    compute: ClassVar[Callable[..., Array]]
    failure: ClassVar[Callable[..., ArgumentError]]

    def operands(self, inputs: Sequence[T], parameters: Sequence[T]) -> list[T | None]:
        """The arguments of `infer`, `infer_type` and `compute`."""
        return _filled(inputs, self.inputs) + _filled(parameters, self.parameters)

    def on_integers(self) -> Literal["moves", "computes"] | None:
        """The op's effect on 8-bit and 4-bit integers that stand for floats, where the table has kernels for them.

        "moves": it gives some of them unchanged. "computes": as `Quantized`, with what they stand for. None: nothing.
        """
        field, value = self.moves_with
        return "moves" if field and getattr(self, field) == value else self.effect

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

    def evaluate(self, inputs: Sequence[Array], parameters: Sequence[Array] = ()) -> Array:
        """`compute`, with floats in float64 and integers as they are, and without warnings of NumPy."""
        with np.errstate(all="ignore"):
            given = self.operands(inputs, parameters)
            return self.compute(*given) if self.is_exact else self.compute(*map(_wide, given))

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
            yield self.row_op or getattr(problem, "row_op", "") or self.op, problem, srcs, dsts

    def leading(self, site: Site) -> int:
        """The number of the input whose layout is a kernel's source layout."""
        return 0

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        """The layout of each input for a kernel from `src` to `dst`; None if there is none.

        Inputs of other dimensions than the leading one are row-major.
        """
        every = zipped(site.inputs, (src, *[dst if self.reads_as_dst else src] * (len(site.inputs) - 1)))
        return tuple(layout if tensor.rank == layout.ndim else row_major(tensor.rank) for tensor, layout in every)

    def dst_layout(self, site: Site, dst: Layout) -> Layout:
        """The output's layout for a kernel's request."""
        return dst

    def further(self, site: Site) -> Further:
        """The shapes and types of further results. `compute` then returns a tuple."""
        return ()

    def buffers(self, count: int) -> Buffers | None:
        """A kernel's buffers before its memory, for so many inputs: their numbers, `OUTPUT`, arrays, or None for none.

        None: the inputs, the parameters, the output, the further results.
        """
        return None

    def views(self, site: Site, layouts: Layouts) -> Iterator[View]:
        """The views among these layouts, which have the first input's dimensions."""
        yield from ()

    def types_at(self, site: Site) -> Types:
        """The element types of a kernel's arrays."""
        return Types.all(site.output.type.array_dtype)

    def options(self) -> dict[str, Any]:
        """The options of a row's primitive."""
        return {name: value for name in self.told if (value := getattr(self, name, None)) is not None}


def solved_shape(op: Solved, *shapes: Shape) -> Shape:
    """The shape of what an op's problem gives."""
    return op.problem(*shapes).dst_shape


def sizes_of_sources(op: Solved, *shapes: Shape) -> dict[str, Any]:
    """The fields of an op's problem that are the shapes of its inputs."""
    return dict(zip(op.solves.sources, shapes, strict=False))


class Solved(Op):
    """An op with the rules and sizes of its problem, which kernels solve.

    solves: the problem's class. It gives the op its name, unless the op has one of its own.
    sizes: the fields of the problem of inputs of some shapes, besides the op's attributes of the same names.
    """

    solves: ClassVar[type[Any]]

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        if "solves" in vars(cls) and "op" not in vars(cls):
            cls.op = getattr(cls.solves, "op", "")

    sizes: ClassVar[Callable[..., dict[str, Any]]] = sizes_of_sources

    def problem(self, *shapes: Shape) -> Any:
        """The problem of inputs of these shapes. Raises ArgumentError."""
        op: Any = type(self)
        if self.of_images:
            check_rank(self.op, shapes[0], 4)
        fields = self.sizes(*shapes)
        for name in _shared(op):
            fields[name] = getattr(self, name)
        return self.solves(**fields)

    infer: ClassVar[Callable[..., Shape]] = solved_shape

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

    def infer(self, src: Shape, *factors: Shape) -> Shape:
        shape: Shape = self.problem(src).dst_shape
        for name, given in zipped(self.names, factors):
            check_same(self.op, name, given, shape[1:2])
        return shape

    def infer_type(self, src: ElementType, *factors: ElementType) -> ElementType:
        check_inputs(self, (src,))
        for name, type in zipped(self.names, factors):
            check_type(self, name, type, *dict.fromkeys((src.name, src.computed.name)))
        return src


def converted_types(op: Op, site: Site) -> Types:
    """The element types of kernels that convert elements."""
    return Types.converted(site.src.type.array_dtype, site.output.type.array_dtype)


class BetweenTypes(Op):
    """Elements of one type as those of another. Its kernels are reorders, from any layout to any other.

    An input of the network is read in row-major order, as it comes.
    """

    keeps_pixels: ClassVar[bool] = True

    def infer(self, src: Shape) -> Shape:
        return src

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        shape, itemsize = site.output.shape, site.src.type.itemsize
        for src in srcs if site.made[0] else (row_major(len(shape)),):
            for dst in dsts:
                yield "reorder", ReorderProblem(shape, src.name, dst.name, itemsize), (src,), (dst,)

    types_at = converted_types

    def options(self) -> dict[str, Any]:
        return {"quantizations": tuple(getattr(self, end, None) for end in ("src", "dst"))}


class RowMajor(Solved):
    """An op whose kernels read and write row-major arrays."""

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        src, dst = (row_major(tensor.rank) for tensor in (site.src, site.output))
        yield self.op, self.problem_at(site), (src,), (dst,)


class Trained(Solved):
    """The base of ops whose inputs after the first two are no images: these are row-major."""

    folds = False

    def infer_type(self, src: ElementType, *others: ElementType | None) -> ElementType:
        return common_type(self, src)


def check_inputs(attributes: Op, inputs: Sequence[ElementType]) -> None:
    """Raise DtypeError unless the op takes inputs of these types."""
    for type in inputs if attributes.takes else ():
        check_type(attributes, "input", type, *attributes.takes)


def check_type(attributes: Op, argument: str, type: ElementType, *wanted: str) -> None:
    """Raise DtypeError unless an element type is one of the wanted ones, which are named."""
    if type.name not in wanted:
        raise DtypeError(attributes.op, argument, type.name, f"has to be {' or '.join(wanted)}")


def _filled(given: Sequence[T], counts: range) -> list[T | None]:
    """The operands of a node. None stands for each operand that the node leaves out."""
    return [*given, *[None] * (counts.stop - 1 - len(given) if counts.stop < ANY else 0)]


def _wide(x: Array | None) -> Array | None:
    return x if x is None or not element(x.dtype).is_float else x.astype(np.float64)


def framed(x: Array, pads: Sequence[Pair], value: float) -> Array:
    """`x` with (before, after) of `value` on each axis; negative ends crop."""
    inner = tuple(slice(max(0, -b), n - max(0, -e)) for n, (b, e) in zipped(x.shape, pads))
    return np.pad(x[inner], [(max(0, b), max(0, e)) for b, e in pads] or 0, constant_values=value)
