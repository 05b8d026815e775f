"""An op's planning rule: the problem that kernels solve, the layouts of its operands, types and options.

No kernel and no machine is known here. The planner asks the kernel table, and gets the rows that take the problem. An
op offers a *view*, which needs no kernel, if the bytes of its output exist already. Views are a reshape, a contiguous
slice, and a concatenation whose inputs are written straight into its output.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple

import numpy as np

from blockconv.core.layout import Layout, row_major
from blockconv.core.types import ElementType, Types

__all__ = ["Asked", "Layouts", "Rule", "Shape", "Site", "Tensor", "View"]

Shape = tuple[int, ...]
Layouts = tuple[Layout, ...]


@dataclass(frozen=True)
class Tensor:
    """A value: its name, logical shape and element type."""

    name: str
    shape: Shape
    type: ElementType

    @property
    def dtype(self) -> np.dtype[Any] | str:
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


class Site(NamedTuple):
    """A node of a network with its values.

    name: the node's.
    inputs, parameters, output: its values.
    constant: for each input, whether it is a constant.
    made: for each input, whether a node makes it.
    """

    name: str
    inputs: tuple[Tensor, ...]
    parameters: tuple[Tensor, ...]
    output: Tensor
    constant: tuple[bool, ...]
    made: tuple[bool, ...]


class Asked(NamedTuple):
    """The request to the table's rows of an op: take a problem from any of these layouts to any of those."""

    op: str
    problem: Any
    srcs: Layouts
    dsts: Layouts


class View(NamedTuple):
    """An output without a kernel.

    srcs, dst: the layouts of inputs and output.
    begin: the output's offset in its first input, in elements.
    starts: each input's offset in the output, in elements; None if the output is part of an input.
    """

    srcs: Layouts
    dst: Layout
    begin: int = 0
    starts: tuple[int, ...] | None = None


class Rule:
    """The common rule: kernels that the table has under the op's name, one layout for all inputs, no views.

    Kernels see values of other than four dimensions in row-major order.
    """

    op: ClassVar[str]

    def problem_at(self, site: Site) -> Any:
        """The problem that kernels solve; None if there are only views."""
        return None

    def asked(self, site: Site, srcs: Layouts, dsts: Layouts) -> Iterator[Asked]:
        """The requests for these layouts of source and destination."""
        problem = self.problem_at(site)
        if problem is not None:
            srcs, dsts = (
                layouts if layouts[0].ndim == len(shape) else (row_major(len(shape)),)
                for layouts, shape in ((srcs, problem.src_shape), (dsts, problem.dst_shape))
            )
            yield Asked(self.op, problem, srcs, dsts)

    def leading(self, site: Site) -> int:
        """The number of the input whose layout is a kernel's source layout."""
        return 0

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        """The layout of each input for a kernel from `src` to `dst`; None if there is none."""
        return (src,) * len(site.inputs)

    def kernel_layouts(self, problem: Any, srcs: Layouts, dst: Layout) -> tuple[Layout, Layout]:
        """The source and the destination layout as a kernel is told them."""
        src, dst = (
            layout if layout.ndim == len(shape) else row_major(len(shape))
            for layout, shape in ((srcs[0], problem.src_shape), (dst, problem.dst_shape))
        )
        return src, dst

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
