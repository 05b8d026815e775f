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
from typing import NamedTuple

from blockconv.core.eltwise_problem import ReduceMeanProblem
from blockconv.core.layout import Layout
from blockconv.core.python import zipped
from blockconv.core.types import NUMBERS
from blockconv.jit.records import fill
from blockconv.kernels.common.request import Reason, Request, same_layout_why_not
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.common.walk import padded_channels
from blockconv.kernels.reduce.codegen import HOW, rows_at_once, summed_type
from blockconv.kernels.reduce.kernels import LOOPS, WIDE, MeanArgs, MeanLoop, reduce_mean
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import Launch


class Axes(NamedTuple):
    """A storage's neighbouring axes of one sort as one.

    outer: whether they are summed, and their loop.
    inner, line, means: as of `MeanArgs`.
    vectors, period: as of `reduce_mean`.
    row_steps: steps of the innermost summed axis that are a row of elements.
    width: elements of a row that are summed at once.
    divisor: of the sums.
    """

    outer: list[tuple[bool, MeanLoop]]
    inner: int
    vectors: int
    period: int
    row_steps: int
    width: int
    divisor: int
    line: int = 0
    means: int = 0

    @staticmethod
    def of(problem: ReduceMeanProblem, layout: Layout, lanes: int, itemsize: int) -> Axes:
        p = problem
        axes, merged = (axis for axis in layout.axes(p.shape) if axis.size > 1), []
        for reduced, same in itertools.groupby(axes, lambda axis: axis.dim in p.axes):
            sizes, strides = zipped(*((axis.size, axis.stride) for axis in same))
            merged.append((reduced, MeanLoop(size=math.prod(sizes), stride=strides[-1] * itemsize)))
        inner = 1 if not merged or merged[-1][0] else merged.pop()[1].size
        period, needed = (inner if lanes % inner == 0 else 0), -(-inner // lanes)
        vectors = min(range(1, min(MOST, needed) + 1), key=lambda k: (-(-needed // k) * (k + 1), -k))
        divisor = math.prod(p.shape[axis] for axis in p.axes) if p.kind == "mean" else 1
        row_steps, width = lanes // period if period else 1, vectors * lanes
        found = Axes(merged, inner, vectors, period, row_steps, width, divisor)
        if [reduced for reduced, _ in merged] not in _FOLDED or inner > width:
            return found
        *outer, (_, lines), (_, steps) = merged
        line = steps.size * inner
        if line * itemsize > LONGEST_LINE:
            return found
        rows = Axes(outer, lines.size * line, vectors, period, 1, WIDE * lanes, divisor)
        return rows._replace(line=line, means=inner)

    def segment(self, results: int, threads: int, held: int) -> int:
        """Inner elements in a task. results: of the loops around them. held: bytes of a sum."""
        if self.line:
            lines = self.inner // self.line
            return self.line * max(1, min(lines, TASK_BYTES // (self.line * held), results * lines // (4 * threads)))
        segments = max(-(-self.inner // LONGEST), -(-4 * threads // results) if threads > 1 else 1)
        return min(self.inner, -(-self.inner // (segments * self.width)) * self.width)


def _launches(request: Request) -> list[Launch]:
    p, layout, element, threads = request.problem, request.dst, request.types.src, request.threads
    itemsize, held = element.itemsize, summed_type(element).itemsize
    lanes = request.machine.lanes(max(4, held))
    if 0 in p.shape:
        return []
    at = Axes.of(p, layout, lanes, itemsize)
    kept, summed = (_three([loop for reduced, loop in at.outer if reduced == sort]) for sort in (False, True))
    results, rows = math.prod(loop.size for loop in kept), summed[-1].size // at.row_steps
    segment = at.segment(results, threads, held)
    segments = -(-at.inner // segment)
    partial = SHORT if at.line or at.inner > at.width else LONG * rows_at_once(at.vectors)
    nbytes = math.prod(loop.size for loop in summed) * segment * itemsize
    run = max(1, min(kept[-1].size, TASK_BYTES // nbytes, results * segments // (4 * threads)))
    tasks = segments * -(-kept[-1].size // run) * (results // kept[-1].size)
    args = fill(
        MeanArgs,
        at,
        count=at.divisor,
        segment=segment,
        run=run,
        partial=max(partial, rows // MOST_PARTIALS),
        blocks=padded_channels(layout, p.dst_shape),
        kept=kept,
        reduced=summed,
    )
    how = HOW.index("sum" if p.kind == "mean" else p.kind)
    form = element, lanes, at.vectors, at.period, args.blocks.valid > 0, how, at.line > 0
    scratch = (-(-segment // at.width) * at.width + at.vectors * lanes * (at.line > 0)) * held
    return [Launch(reduce_mean(*form), args, tasks, chunk_of(tasks, run * nbytes, threads), scratch=scratch)]


_FOLDED = [True, False, True], [False, True, False, True]  # whether axes are summed, where lines of rows are short
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
    return request.seconds(request.itemsize * math.prod(request.problem.shape), 0)


ROWS = (same_layout_row("reduce_mean", "reduce_mean", NUMBERS, _cost, _launches, _why_not),)
