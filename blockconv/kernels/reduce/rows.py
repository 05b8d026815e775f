"""Means over any axes of an array, but no blocked one. (Over H and W alone, pooling has them.) Sums, products, maxima
and minima are made in the same way, and divided by 1; so are those of integers, which wrap around, and of booleans.

Neighbouring axes of one sort, kept or reduced, are one loop. The innermost kept axes are the elements of a row, and
kernels sum rows. Where several rows are a vector, they are one row, whose sums are added to each other at the end.
Partial sums of some rows are added to the total: errors grow with the number of additions to either, not with the
elements. If rows are long, few of them are summed at a time, so that memory is read in order. A row may hold short
lines with a sum of each (a row of NHCW4: the columns of each block of channels). Then rows are summed first, element by
element, and then each line of the sum.

Buffers: source, destination.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from typing import NamedTuple

from blockconv.core.eltwise_problem import ReduceMeanProblem
from blockconv.core.layout import Axis, Layout
from blockconv.core.types import NUMBERS, ElementType
from blockconv.jit import Kernel
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.reduce.codegen import Combine, rows_at_once, summed_type
from blockconv.kernels.reduce.kernels import LOOPS, WIDE, FoldedMeanArgs, MeanArgs, MeanLoop, reduce_folded, reduce_mean
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import Buffer, Launch

HOW = {"mean": Combine.ADD, "sum": Combine.ADD, "max": Combine.MAX, "min": Combine.MIN, "prod": Combine.MUL}


class Axes(NamedTuple):
    """A storage's neighbouring axes of one sort as one: whether they are summed and how many elements they have.

    inner: contiguous elements that are kept, inside all of these.
    period: these, where several make a vector, else 0.
    vectors: of a row that are summed at once.
    summands: elements of a mean.
    divisor: of the sums.
    """

    outer: list[tuple[bool, int]]
    inner: int
    period: int
    vectors: int
    summands: int
    divisor: int

    @staticmethod
    def of(problem: ReduceMeanProblem, layout: Layout, lanes: int) -> Axes:
        p = problem
        axes = [(axis.dim in p.axes, axis.size) for axis in layout.axes(p.shape) if axis.size > 1]
        merged = [(sort, math.prod(size for _, size in same)) for sort, same in itertools.groupby(axes, lambda a: a[0])]
        inner = 1 if not merged or merged[-1][0] else merged.pop()[1]
        period, needed = (inner if lanes % inner == 0 else 0), -(-inner // lanes)
        vectors = min(range(1, min(MOST, needed) + 1), key=lambda k: (-(-needed // k) * (k + 1), -k))
        summands = math.prod(p.shape[axis] for axis in p.axes)
        return Axes(merged, inner, period, vectors, summands, summands if p.kind == "mean" else 1)

    def row_steps(self, lanes: int) -> int:
        """Steps of the innermost summed axis that are a row of elements."""
        return lanes // self.period if self.period else 1

    def is_folded(self, lanes: int, itemsize: int) -> bool:
        """Whether a row holds short lines that are summed apart, around one another as `FoldedMeanArgs` has them."""
        sorts = [reduced for reduced, _ in self.outer]
        if sorts not in ([True, False, True], [False, True, False, True]) or self.inner > self.vectors * lanes:
            return False
        return self.outer[-1][1] * self.inner * itemsize <= LONGEST_LINE


def _launches(request: Request) -> list[Launch]:
    p, layout, element, threads = request.problem, request.dst, request.types.src, request.threads
    lanes = request.machine.lanes(max(4, summed_type(element).itemsize))
    if 0 in p.shape:
        return []
    at = Axes.of(p, layout, lanes)
    folded = at.is_folded(lanes, element.itemsize)
    family, bound = (reduce_folded, _folded) if folded else (reduce_mean, _summed)
    kernel = family(
        element.code, lanes, at.vectors, at.period, int(layout.padded_shape(p.shape) != p.shape), HOW[p.kind]
    )
    blocks = next((axis for axis in layout.axes(p.dst_shape) if axis.dim == 1), Axis(1, 1, 1, 1))
    channels = {
        "channels": p.shape[1] if layout.is_blocked else 0,
        "block": layout.blocks[1] if layout.is_blocked else 1,
        "blocks": blocks.size,
        "block_stride": blocks.stride,
    }
    return [bound(at, kernel, element, lanes, threads, channels)]


def _summed(
    at: Axes, kernel: Kernel, element: ElementType, lanes: int, threads: int, channels: Mapping[str, int]
) -> Launch:
    itemsize, inner, vectors, row_steps = element.itemsize, at.inner, at.vectors, at.row_steps(lanes)
    stride = inner * itemsize
    loops: list[tuple[bool, MeanLoop]] = []
    for reduced, size in reversed(at.outer):
        loops.insert(0, (reduced, MeanLoop(size=size, stride=stride)))
        stride *= size
    kept, summed = (_three([loop for reduced, loop in loops if reduced == sort]) for sort in (False, True))
    results, width = math.prod(loop.size for loop in kept), vectors * lanes
    segments = max(-(-inner // LONGEST), -(-4 * threads // results) if threads > 1 else 1)
    segment = min(inner, -(-inner // (segments * width)) * width)
    segments = -(-inner // segment)
    rows = summed[-1].size // row_steps
    partial = SHORT if inner > width else LONG * rows_at_once(vectors)
    nbytes = at.summands * segment * itemsize
    run = max(1, min(kept[-1].size, TASK_BYTES // nbytes, results * segments // (4 * threads)))
    tasks = segments * -(-kept[-1].size // run) * (results // kept[-1].size)
    args = MeanArgs(
        src=Buffer(0),
        dst=Buffer(1),
        inner=inner,
        segment=segment,
        run=run,
        partial=max(partial, rows // MOST_PARTIALS),
        row_steps=row_steps,
        count=at.divisor,
        **channels,
        kept=kept,
        reduced=summed,
    )
    scratch = -(-segment // width) * width * summed_type(element).itemsize
    return Launch(kernel, args, tasks, chunk_of(tasks, run * nbytes, threads), scratch=scratch)


def _folded(
    at: Axes, kernel: Kernel, element: ElementType, lanes: int, threads: int, channels: Mapping[str, int]
) -> Launch:
    *around, (_, rows), (_, lines), (_, steps) = at.outer
    outer, line, held = math.prod(size for _, size in around), steps * at.inner, summed_type(element).itemsize
    run = max(1, min(lines, TASK_BYTES // (line * held), outer * lines // (4 * threads)))
    totals = -(-run * line // (WIDE * lanes)) * WIDE * lanes * held
    row_stride = lines * line * element.itemsize
    args = FoldedMeanArgs(
        src=Buffer(0),
        dst=Buffer(1),
        outer_stride=rows * row_stride,
        rows=rows,
        row_stride=row_stride,
        partial=max(SHORT, rows // MOST_PARTIALS),
        lines=lines,
        line=line,
        run=run,
        inner=at.inner,
        row_steps=at.row_steps(lanes),
        count=at.divisor,
        totals=totals,
        **channels,
    )
    tasks, nbytes = outer * -(-lines // run), rows * run * line * element.itemsize
    return Launch(kernel, args, tasks, chunk_of(tasks, nbytes, threads), scratch=totals + at.vectors * lanes * held)


_ONCE = MeanLoop(size=1, stride=0)
MOST, LONGEST = 8, 8192  # vectors that are summed at once, and elements in a task: their sums stay in the caches
LONGEST_LINE = 4096  # bytes of a line that is summed with its row: of a longer one, to sum it apart costs little
SHORT, LONG, MOST_PARTIALS = 8, 64, 256  # additions to a partial sum, of long rows and of others; to a total


def _three(loops: list[MeanLoop]) -> list[MeanLoop]:
    return [_ONCE] * (LOOPS - len(loops)) + loops


def _why_not(request: Request) -> Reason | None:
    why_not, dst = same_layout_why_not(request), request.dst
    if why_not is None and any(dst.blocks[axis] > 1 for axis in request.problem.axes):
        return f"does not sum across the blocks of {dst}"
    kind, type = request.problem.kind, request.types.src
    if not type.is_float and (kind == "mean" or (type.name == "bool" and kind not in ("max", "min"))):
        return f"has no {kind} of {type}"
    return why_not


def _cost(request: Request) -> float:
    m, nbytes = request.machine, request.types.src.itemsize * math.prod(request.problem.shape)
    return m.launch_seconds() + m.move_seconds(nbytes, 0) / request.threads


ROWS = (same_layout_row("reduce_mean", "reduce_mean", NUMBERS, _cost, _launches, _why_not),)
