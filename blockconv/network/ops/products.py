"""Products of values that all flow."""

import numpy as np

from blockconv.core.product_problem import AttentionProblem, MatMulProblem, Order
from blockconv.core.types import FLOATS, Array
from blockconv.network.ops.axes import softmax
from blockconv.network.ops.base import RowMajor

__all__ = ["Attention", "MatMul"]


class MatMul(RowMajor):
    """a @ b, matrices whose other axes broadcast as NumPy's. Either may be a constant.

    orders: those of the axes of a, b and the result, as `Transpose` has them, or None; see `MatMulProblem`.
    """

    solves = MatMulProblem
    takes = FLOATS
    inputs = range(2, 3)
    orders: tuple[Order, ...] = (None, None, None)

    def compute(self, *factors: Array) -> Array:
        a, b = map(_ordered, factors, self.orders)
        return _ordered(np.asarray(a @ b), self.orders[-1])


class Attention(RowMajor):
    """softmax(scale * (a @ b) + mask) @ c.

    inputs: a, b, c, and perhaps the mask, which broadcasts to a @ b.

    b are the keys as a product has them, (..., width, keys): `orders` say so of (..., keys, width) too.

    causal: row i attends to columns 0 to i alone.
    zero_rows: a row whose scores are all minus infinity gives zeros and not NaN.
    orders: those of the axes of a, b, c and the result, as `Transpose` has them, or None; see `AttentionProblem`.
    """

    solves = AttentionProblem
    takes = FLOATS
    inputs = range(3, 5)
    scale: float = 1.0
    causal: bool = False
    zero_rows: bool = False
    orders: tuple[Order, ...] = (None, None, None, None)

    def compute(self, queries: Array, keys: Array, values: Array, mask: Array | None) -> Array:
        a, b, c = map(_ordered, (queries, keys, values), self.orders)
        scores = self.scale * (a @ b) + (0 if mask is None else mask)
        if self.causal:
            scores = np.where(np.tri(*scores.shape[-2:]) > 0, scores, -np.inf)
        weights = softmax(scores, -1, self.zero_rows)
        return _ordered(np.asarray(weights @ c), self.orders[-1])


def _ordered(x: Array, order: Order) -> Array:
    return x if order is None else x.transpose(order)
