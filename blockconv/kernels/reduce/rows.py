"""Means over any axes of an array, but no blocked one. (Over H and W alone, pooling has them.)

Neighbouring axes of one sort, kept or reduced, are one loop; the innermost ones that are kept are the elements of a
row, and what is summed are rows. Where several rows are a vector, they are one row, whose sums are added to each other
at the end. Partial sums of some rows are added to the total: errors grow with the number of additions to either, not
with the elements. Of rows that are long, few are summed before the next elements of them: so memory is read in order.

Buffers: source, destination.
"""

from __future__ import annotations

import itertools
import math

from blockconv.core.eltwise_problem import ReduceMeanProblem
from blockconv.core.layout import Axis, Layout
from blockconv.core.types import FLOATS, ElementType, Types
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of, lanes_of
from blockconv.kernels.reduce.codegen import rows_at_once
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
    inner = 1 if not merged or merged[-1][0] else merged.pop()[1]
    stride = inner * itemsize
    loops: list[tuple[bool, MeanLoop]] = []
    for reduced, size in reversed(merged):
        loops.insert(0, (reduced, MeanLoop(size=size, stride=stride)))
        stride *= size
    kept, summed = (_three([loop for reduced, loop in loops if reduced == sort]) for sort in (False, True))
    count, lanes = math.prod(p.shape[axis] for axis in p.axes), lanes_of(element.computed.itemsize)
    # Elements of which several make a vector, else vectors of them.
    period, needed = (inner if lanes % inner == 0 else 0), -(-inner // lanes)
    vectors = min(range(1, min(MOST, needed) + 1), key=lambda k: (-(-needed // k) * (k + 1), -k))
    results, width = math.prod(loop.size for loop in kept), vectors * lanes
    segments = max(-(-inner // LONGEST), -(-4 * threads // results) if threads > 1 else 1)
    segment = min(inner, -(-inner // (segments * width)) * width)
    segments = -(-inner // segment)
    together = lanes // period if period else 1
    rows = summed[-1].size // together
    partial = SHORT if inner > width else LONG * rows_at_once(vectors)
    nbytes = count * segment * itemsize
    run = max(1, min(kept[-1].size, TASK_BYTES // nbytes, results * segments // (4 * threads)))
    tasks = segments * -(-kept[-1].size // run) * (results // kept[-1].size)
    blocks = next((axis for axis in layout.axes(p.dst_shape) if axis.dim == 1), Axis(1, 1, 1, 1))
    args = MeanArgs(
        src=Buffer(0),
        dst=Buffer(1),
        inner=inner,
        segment=segment,
        run=run,
        partial=max(partial, rows // MOST_PARTIALS),
        together=together,
        count=count,
        channels=p.shape[1] if layout.is_blocked else 0,
        block=layout.blocks[1] if layout.is_blocked else 1,
        blocks=blocks.size,
        block_stride=blocks.stride,
        kept=kept,
        reduced=summed,
    )
    kernel = reduce_mean(element.code, lanes, vectors, period, int(layout.padded_shape(p.shape) != p.shape))
    scratch = -(-segment // width) * width * element.computed.itemsize
    return [Op(kernel, args, tasks, chunk_of(tasks, run * nbytes, threads), scratch=scratch)]


_ONCE = MeanLoop(size=1, stride=0)
MOST, LONGEST = 8, 8192  # vectors that are summed at once, and elements in a task: their sums stay in the caches
SHORT, LONG, MOST_PARTIALS = 8, 64, 512  # additions to a partial sum, of long rows and of others; to a total


def _three(loops: list[MeanLoop]) -> list[MeanLoop]:
    return [_ONCE] * (LOOPS - len(loops)) + loops


def _why_not(problem: ReduceMeanProblem, src: Layout, dst: Layout, types: Types) -> str | None:
    why_not = same_layout_why_not(problem, src, dst, types)
    if why_not is None and any(dst.blocks[axis] > 1 for axis in problem.axes):
        return f"does not sum over the blocks of {dst}"
    return why_not


def _make(problem: ReduceMeanProblem, src: Layout, dst: Layout, types: Types, threads: int) -> Primitive:
    def cost() -> float:
        return launch_seconds() + move_seconds(types.src.itemsize * math.prod(problem.shape), 0) / threads

    return Primitive(cost, lambda: _ops(problem, dst, types.src, threads))


ROWS = (Row("reduce_mean", "reduce_mean", dtypes=frozenset(FLOATS), why_not=_why_not, make=_make, whole_blocks=True),)
