"""Problems of products whose operands all flow: of two matrices, and attention."""

from __future__ import annotations

from typing import Any

from blockconv.core.checks import Axes, Shape, broadcast, checked_shape, checked_wholes, set_field
from blockconv.core.errors import ArgumentError
from blockconv.core.problem import OpProblem
from blockconv.core.python import zipped

Order = Axes | None  # axis i of the matrices is axis order[i] of the array; None: as they are


class _Product(OpProblem):
    """The base of products of matrices.

    orders: of the operands and the result.
    size: the axes before the last two, rows and columns of the result. Raises ArgumentError.
    """

    def check(self: Any) -> None:
        """Check the operands' dimensions, and the orders."""
        orders = []
        for name, order in zipped((*self.sources[: len(self.orders) - 1], "result"), self.orders):
            shape = None if name == "result" else getattr(self, name)
            if shape is not None and len(shape) < 2:
                raise ArgumentError(self.op, name, shape, "has to have at least two dimensions")
            if order is not None:
                order = checked_wholes(self.op, "orders", order, None if shape is None else len(shape))
                if sorted(order) != [*range(len(order))] or len(order) - 1 not in order[-2:]:
                    rule = "has to name each axis once, and the last one among the last two"
                    raise ArgumentError(self.op, "orders", order, rule)
            orders.append(None if order == tuple(range(len(order or ()))) else order)
        set_field(self, "orders", tuple(orders))
        rank, order = len(self.size[0]) + 2, self.orders[-1]
        if order is not None and (len(order) != rank or order[-1] != rank - 1):
            rule = f"has to have the result's {rank} axes, and the last one last"
            raise ArgumentError(self.op, "orders", order, rule)

    @property
    def dst_shape(self: Any) -> Shape:
        """The shape of the result."""
        batch, rows, columns = self.size
        return ordered((*batch, rows, columns), self.orders[-1])


class MatMulProblem(_Product):
    """a @ b with NumPy's broadcasting of the axes before the last two.

    orders: of a, b and the result. Rows and columns may change places with each other and with other axes. The last
    axis of an operand has to be one of its matrices' two axes. The last axis of the result has to be its columns.
    """

    op = "matmul"
    sources = ("a", "b")
    a: Shape
    b: Shape
    orders: tuple[Order, ...] = (None, None, None)

    @property
    def size(self) -> tuple[Shape, int, int]:
        a, b = ordered(self.a, self.orders[0]), ordered(self.b, self.orders[1])
        if a[-1] != b[-2]:
            raise ArgumentError(self.op, "b", b, f"has to have {a[-1]} rows, as many as {a} has columns")
        return broadcast(self.op, "b", a[:-2], b[:-2]), a[-2], b[-1]

    @property
    def depth(self) -> int:
        """Products in each sum."""
        return ordered(self.a, self.orders[0])[-1]


class AttentionProblem(_Product):
    """softmax(scale * (a @ b) + mask) @ c with NumPy's broadcasting of the axes before the last two.

    mask: a shape that broadcasts to the shape of a @ b, with as many columns; None: no mask.
    causal: row i attends to columns 0 to i alone.
    zero_rows: a row without any column, whose mask is minus infinity throughout, gives zeros and not NaN.
    orders: of a, b, c and the result, as in `MatMulProblem`.
    """

    op = "attention"
    sources = ("a", "b", "c", "mask")
    a: Shape
    b: Shape
    c: Shape
    mask: Shape | None = None
    scale: float = 1.0
    causal: bool = False
    zero_rows: bool = False
    orders: tuple[Order, ...] = (None, None, None, None)

    def check(self) -> None:
        super().check()
        if self.mask is not None:
            set_field(self, "mask", checked_shape(self.op, "mask", self.mask))
            scores = self.scores.dst_shape
            if self.mask[-1:] != scores[-1:] or broadcast(self.op, "mask", self.mask, scores) != scores:
                rule = f"has to broadcast to {scores}, the shape of the scores, and to have as many columns"
                raise self._error("mask", rule)

    @property
    def scores(self) -> MatMulProblem:
        """The product of a and b."""
        return MatMulProblem(self.a, self.b, (*self.orders[:2], None))

    @property
    def size(self) -> tuple[Shape, int, int]:
        batch, rows, depth = self.scores.size
        c = ordered(self.c, self.orders[2])
        if c[-2] != depth:
            raise ArgumentError(self.op, "c", c, f"has to have {depth} rows, as many as the scores have columns")
        return broadcast(self.op, "c", batch, c[:-2]), rows, c[-1]


def ordered(shape: Shape, order: Order) -> Shape:
    """A shape with its axes in that order."""
    return shape if order is None else tuple(shape[axis] for axis in order)
