"""Direct convolution: every problem, from any native layout to any other, as dense tiles (`tiles`) of one group."""

from __future__ import annotations

from blockconv import jit
from blockconv.kernels.cut import ITEMSIZE, blocking, space, weight_layout, why_not_window
from blockconv.kernels.table import BANDWIDTH, CYCLE, Row, WeightForm, store_cycles
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
    """Cycles of the tiles, of packing windows and of stores, or the bytes of a first touch, whichever take longer.

    The constants were fitted to 23 layers of ResNet-50 in 36 pairs of layouts each (one thread, AVX-512): 90 % of
    the predictions are within 7 %, and the layouts predicted to be the best cost 2 % more than the best.
    """
    p, cut, at = problem, blocking(problem, src, dst, "float32", threads), space(problem, src, dst)
    ic, oc = p.ic // p.g, p.oc // p.g
    tiles = at.images * p.g * -(-at.oh // cut.rows) * -(-at.ow // cut.pixels) * -(-oc // cut.width)
    vectors = cut.rows * cut.pixels * cut.vectors
    at_once = 2 * jit.isa().vector_bytes // (4 * cut.lanes)  # half vectors are taken where they run twice as fast
    places = -(-ic // cut.step) * p.kh * p.kw
    store = store_cycles(dst, cut.piece)
    cycles = tiles * (max(vectors / at_once, 4) * ic * p.kh * p.kw + 0.7 * places + store * vectors)
    if not cut.in_place:
        groups = at.images * p.g * -(-at.oh // cut.group_rows) * -(-at.ow // cut.group_cols)
        pixels = groups * -(-cut.group_cols // cut.panel) * cut.window_rows * cut.window_cols * at.depth
        cycles += pixels * (PACK.get(cut.cb, 2.7) * -(-ic // cut.cb) + 0.5 * ic / cut.lanes)
    moved = 4 * (src.size(p.src_shape) + dst.size(p.dst_shape) + p.oc * ic * p.kh * p.kw)
    return 1e-6 + max(cycles * CYCLE, moved / BANDWIDTH) / threads


def _why_not(problem: Conv2dProblem, src: Layout, dst: Layout) -> str | None:
    return why_not_window(blocking(problem, src, dst, "float32", 1))


# Cycles of a pixel's channels packed together, by how many.
PACK = {1: 0.2, 2: 8.0, 3: 12.0, 4: 1.2, 8: 1.8}


ROWS = (
    Row(
        "conv_direct",
        "conv2d",
        frozenset(NATIVE),
        frozenset(NATIVE),
        frozenset(ITEMSIZE),
        _why_not,
        _cost,
        _bind,
        _weights,
    ),
)
