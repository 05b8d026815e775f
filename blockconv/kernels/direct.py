"""Direct convolution: every problem, from any native layout to any other, as dense tiles (`tiles`) of one group."""

from __future__ import annotations

from blockconv.kernels.cut import ITEMSIZE, blocking, space, weight_layout
from blockconv.kernels.table import Row, WeightForm
from blockconv.kernels.tiles import bind_tiles
from blockconv.layout import NATIVE, Layout
from blockconv.problem import Conv2dProblem
from blockconv.runtime import Op

__all__ = ["ROWS"]


def _bind(
    problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str, threads: int, act: int, residual: bool
) -> list[Op]:
    return bind_tiles(problem, src, dst, dtype, blocking(problem, src, dst, dtype, threads), act, residual)


def _weights(problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str) -> WeightForm:
    cut = blocking(problem, src, dst, dtype, 1)
    return WeightForm(weight_layout(cut), cut.ocbs * cut.width)


def _cost(problem: Conv2dProblem, src: Layout, dst: Layout, threads: int) -> float:
    """Arithmetic in whole tiles at the rate of the machine's vectors, or the bytes moved, whichever is more."""
    p, cut, at = problem, blocking(problem, src, dst, "float32", threads), space(problem, src, dst)
    tiles = at.images * p.g * -(-at.oh // cut.rows) * -(-at.ow // cut.pixels) * -(-(p.oc // p.g) // cut.width)
    flops = 2 * tiles * cut.rows * cut.pixels * cut.width * (p.ic // p.g) * p.kh * p.kw
    moved = 4 * (src.size(p.src_shape) + dst.size(p.dst_shape) + p.oc * (p.ic // p.g) * p.kh * p.kw)
    return 2e-6 + max(flops / (cut.lanes * 10e9), moved / 25e9) / threads


ROWS = (
    Row(
        "conv_direct",
        "conv2d",
        frozenset(NATIVE),
        frozenset(NATIVE),
        frozenset(ITEMSIZE),
        lambda problem, src, dst: None,
        _cost,
        _bind,
        _weights,
    ),
)
