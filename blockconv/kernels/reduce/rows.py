"""Means over any axes of an array, but no blocked one. (Over H and W alone, pooling has them.)

Neighbouring axes of one sort, kept or reduced, are one loop. If the last is kept, a vector holds neighbours of it, and
what is reduced are loops around; else contiguous extents are summed by vectors, and the vector's lanes at the end.
Partial sums are of at most 64 vectors, and are added to the total: errors grow with their number, not the elements'.

Buffers: source, destination.
"""

from __future__ import annotations

import itertools
import math

from blockconv.core.eltwise_problem import ReduceMeanProblem
from blockconv.core.layout import Axis, Layout
from blockconv.core.types import ElementType, Types
from blockconv.kernels.common.geometry import ITEMSIZE
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.common.tasks import chunk_of, lanes_of
from blockconv.kernels.reduce.kernels import LOOPS, MeanArgs, MeanLoop, reduce_mean
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.costs import launch_seconds, move_seconds
from blockconv.runtime import Buffer, Op

__all__ = ["ROWS"]


def _ops(problem: ReduceMeanProblem, layout: Layout, element: ElementType, threads: int) -> list[Op]:
    p, itemsize = problem, element.itemsize
    if 0 in p.shape:
        return []
    # Neighbouring axes of one sort: (whether reduced, size), then the loop over them.
    axes = [(axis.dim in p.axes, axis.size) for axis in layout.axes(p.shape) if axis.size > 1]
    merged = [(sort, math.prod(size for _, size in same)) for sort, same in itertools.groupby(axes, lambda a: a[0])]
    stride = itemsize
    loops: list[tuple[bool, MeanLoop]] = []
    for reduced, size in reversed(merged):
        loops.insert(0, (reduced, MeanLoop(size=size, stride=stride)))
        stride *= size
    sums, inner = loops.pop() if loops else (False, _ONCE)
    kept, summed = (_three([loop for reduced, loop in loops if reduced == sort]) for sort in (False, True))
    if sums:  # two loops around a contiguous extent, which is the third
        summed = [*summed[1:], _ONCE]
    count = math.prod(p.shape[axis] for axis in p.axes)
    lanes = lanes_of(itemsize)
    results = math.prod(loop.size for loop in kept)
    tasks = results if sums else results * -(-inner.size // lanes)
    blocks = next((axis for axis in layout.axes(p.dst_shape) if axis.dim == 1), Axis(1, 1, 1, 1))
    args = MeanArgs(
        src=Buffer(0),
        dst=Buffer(1),
        inner=inner.size,
        count=count,
        channels=p.shape[1] if layout.is_blocked else 0,
        block=math.prod(layout.blocks),
        blocks=blocks.size,
        block_stride=blocks.stride,
        kept=kept,
        reduced=summed,
    )
    ragged = layout.padded_shape(p.shape) != p.shape
    kernel, chunk = (
        reduce_mean(element.code, lanes, int(not sums), int(ragged)),
        chunk_of(tasks, count * itemsize, threads),
    )
    return [Op(kernel, args, tasks, chunk, scratch=lanes * itemsize)]


_ONCE = MeanLoop(size=1, stride=0)


def _three(loops: list[MeanLoop]) -> list[MeanLoop]:
    return [_ONCE] * (LOOPS - len(loops)) + loops


def _why_not(problem: ReduceMeanProblem, src: Layout, dst: Layout) -> str | None:
    why_not = same_layout_why_not(problem.shape, src, dst)
    if why_not is None and any(dst.blocks[axis] > 1 for axis in problem.axes):
        return f"does not sum over the blocks of {dst}"
    return why_not


def _make(problem: ReduceMeanProblem, src: Layout, dst: Layout, types: Types, threads: int) -> Primitive:
    def cost() -> float:
        return launch_seconds() + move_seconds(4 * math.prod(problem.shape), 0) / threads

    return Primitive(cost, lambda: _ops(problem, dst, types.src, threads))


ROWS = (Row("reduce_mean", "reduce_mean", dtypes=frozenset(ITEMSIZE), why_not=_why_not, make=_make),)
