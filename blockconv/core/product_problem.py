"""Problems of products whose operands all flow: of two matrices, and attention."""

from __future__ import annotations

from dataclasses import dataclass

from blockconv.core.errors import ArgumentError
from blockconv.core.problem_checks import Shape, broadcast, checked_number, checked_shape, checked_whole
from blockconv.core.problem_fields import set_field

Order = tuple[int, ...] | None  # axis i of the matrices is axis order[i] of the array; None: as they are


@dataclass(frozen=True)
class MatMulProblem:
    """a @ b with NumPy's broadcasting of the axes before the last two.

    orders: of a, b and the result. Rows and columns may change places with each other and with other axes. The last
    axis of an operand has to be one of its matrices' two axes. The last axis of the result has to be its columns.
    """

    a: Shape
    b: Shape
    orders: tuple[Order, ...] = (None, None, None)

    def __post_init__(self) -> None:
        _check_operands("matmul", self, ("a", "b"))
        batch, _, _ = self.size
        _check_result("matmul", self.orders[-1], len(batch) + 2)

    @property
    def size(self) -> tuple[Shape, int, int]:
        """The axes before the last two, rows and columns of the product."""
        a, b = ordered(self.a, self.orders[0]), ordered(self.b, self.orders[1])
        if a[-1] != b[-2]:
            raise ArgumentError("matmul", "b", b, f"has to have {a[-1]} rows, as many as {a} has columns")
        return broadcast("matmul", "b", a[:-2], b[:-2]), a[-2], b[-1]

    @property
    def depth(self) -> int:
        """Products in each sum."""
        return ordered(self.a, self.orders[0])[-1]

    @property
    def src_shape(self) -> Shape:
        """The shape of a."""
        return self.a

    @property
    def dst_shape(self) -> Shape:
        """The shape of the result."""
        batch, rows, columns = self.size
        return ordered((*batch, rows, columns), self.orders[-1])


@dataclass(frozen=True)
class AttentionProblem:
    """softmax(scale * (a @ b) + mask) @ c with NumPy's broadcasting of the axes before the last two.

    mask: a shape that broadcasts to the shape of a @ b, with as many columns; None: no mask.
    causal: row i attends to columns 0 to i alone.
    zero_rows: a row without any column, whose mask is minus infinity throughout, gives zeros and not NaN.
    orders: of a, b, c and the result, as in `MatMulProblem`.
    """

    a: Shape
    b: Shape
    c: Shape
    mask: Shape | None = None
    scale: float = 1.0
    causal: bool = False
    zero_rows: bool = False
    orders: tuple[Order, ...] = (None, None, None, None)

    def __post_init__(self) -> None:
        _check_operands("attention", self, ("a", "b", "c"))
        set_field(self, "scale", checked_number("attention", "scale", self.scale))
        batch, _, _ = self.size
        _check_result("attention", self.orders[-1], len(batch) + 2)
        if self.mask is not None:
            set_field(self, "mask", checked_shape("attention", "mask", self.mask))
            scores = self.scores.dst_shape
            if self.mask[-1:] != scores[-1:] or broadcast("attention", "mask", self.mask, scores) != scores:
                rule = f"has to broadcast to {scores}, the shape of the scores, and to have as many columns"
                raise ArgumentError("attention", "mask", self.mask, rule)

    @property
    def scores(self) -> MatMulProblem:
        """The product of a and b."""
        return MatMulProblem(self.a, self.b, (*self.orders[:2], None))

    @property
    def size(self) -> tuple[Shape, int, int]:
        """The axes before the last two, rows and columns of the result."""
        batch, rows, depth = self.scores.size
        c = ordered(self.c, self.orders[2])
        if c[-2] != depth:
            raise ArgumentError("attention", "c", c, f"has to have {depth} rows, as many as the scores have columns")
        return broadcast("attention", "c", batch, c[:-2]), rows, c[-1]

    @property
    def src_shape(self) -> Shape:
        """The shape of a."""
        return self.a

    @property
    def dst_shape(self) -> Shape:
        """The shape of the result."""
        batch, rows, columns = self.size
        return ordered((*batch, rows, columns), self.orders[-1])


def ordered(shape: Shape, order: Order) -> Shape:
    """A shape with its axes in that order."""
    return shape if order is None else tuple(shape[axis] for axis in order)


def _check_operands(op: str, problem: MatMulProblem | AttentionProblem, names: tuple[str, ...]) -> None:
    """Check the shapes of these operands and their orders."""
    orders = []
    for name, order in zip((*names, "result"), problem.orders, strict=True):
        shape = checked_shape(op, name, getattr(problem, name)) if name in names else None
        if shape is not None:
            set_field(problem, name, shape)
            if len(shape) < 2:
                raise ArgumentError(op, name, shape, "has to have at least two dimensions")
        if order is not None:
            order = checked_whole(op, "orders", order, None if shape is None else len(shape))
            if sorted(order) != [*range(len(order))] or len(order) - 1 not in order[-2:]:
                rule = "has to name each axis once, and the last one among the last two"
                raise ArgumentError(op, "orders", order, rule)
        orders.append(None if order == tuple(range(len(order or ()))) else order)
    set_field(problem, "orders", tuple(orders))


def _check_result(op: str, order: Order, rank: int) -> None:
    if order is not None and (len(order) != rank or order[-1] != rank - 1):
        raise ArgumentError(op, "orders", order, f"has to have the result's {rank} axes, and the last one last")
