"""Products of values that all flow."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from blockconv.core.layout import Layout, row_major
from blockconv.core.product_problem import MatMulProblem, Order
from blockconv.core.types import FLOATS, ElementType
from blockconv.network.ops.base import Array, Arrays, ElementTypes, Shape, Solved, check_type
from blockconv.network.ops.rule import Asked, Layouts, Site

__all__ = ["MatMul"]


class _Product(Solved):
    """The base of products. All arrays are row-major."""

    def infer_type(self, inputs: ElementTypes, parameters: ElementTypes) -> ElementType:
        for type in inputs:
            check_type(self, "input", type, *FLOATS)
        return super().infer_type(inputs, parameters)

    def asked(self, site: Site, srcs: Layouts, dsts: Layouts) -> Iterator[Asked]:
        problem = self.problem_at(site)
        ends = ((row_major(len(shape)),) for shape in (problem.src_shape, problem.dst_shape))
        yield Asked(self.op, problem, *ends)

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        return tuple(row_major(len(tensor.shape)) for tensor in site.inputs)

    def options(self) -> dict[str, Any]:
        return {}


@dataclass(frozen=True)
class MatMul(_Product):
    """a @ b, matrices whose other axes broadcast as NumPy's. Either may be a constant.

    orders: those of the axes of a, b and the result, as `Transpose` has them, or None; see `MatMulProblem`.
    """

    op: ClassVar[str] = "matmul"
    inputs: ClassVar[range] = range(2, 3)
    orders: tuple[Order, ...] = (None, None, None)

    def problem(self, a: Shape, b: Shape) -> MatMulProblem:
        return MatMulProblem(a, b, self.orders)

    def compute(self, inputs: Arrays, parameters: Arrays) -> Array:
        a, b = (_ordered(x, order) for x, order in zip(inputs, self.orders, strict=False))
        return _ordered(np.asarray(a @ b), self.orders[-1])


def _ordered(x: Array, order: Order) -> Array:
    return x if order is None else x.transpose(order)
