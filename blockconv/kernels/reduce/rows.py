"""Means over any axes of an array, but no blocked one. (Over H and W alone, pooling has them.) Sums, products, maxima
and minima are made in the same way, and divided by 1; so are those of integers, which wrap around, and of booleans.

A walk goes over the results, and a loop nest over the summands of each: neighbouring axes that are summed are one loop.
The innermost kept axes are the elements of a row, and kernels sum rows. Where several rows are a vector, they are one
row, whose sums are added to each other at the end. Partial sums of some rows are added to the total: errors grow with
the number of additions to either, not with the elements. If rows are long, few of them are summed at a time, so that
memory is read in order. A row may hold short lines with a sum of each (a row of NHCW4: the columns of each block of
channels). Then rows are summed first, element by element, and then each line of the sum.

Buffers: source, destination.
"""

import math

from blockconv.core.types import NUMBERS
from blockconv.jit.records import fill
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.request import Reason, Request, same_layout_why_not
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.common.walk import Walk, padded_channels
from blockconv.kernels.reduce.codegen import HOW, rows_at_once, summed_type
from blockconv.kernels.reduce.kernels import LOOPS, WIDE, ReduceArgs, SummedLoop, reduce_mean
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import Launch

MOST, LONGEST = 8, 8192  # vectors that are summed at once, and elements in a task: their sums stay in the caches
LONGEST_LINE = 4096  # bytes of a line that is summed with its row: of a longer one, to sum it apart costs little
SHORT, LONG, MOST_PARTIALS = 8, 64, 256  # additions to a partial sum, of long rows and of others; to a total


def _launches(request: Request) -> list[Launch]:
    p, layout, element, threads = request.problem, request.dst, request.types.src, request.threads
    itemsize, held = element.itemsize, summed_type(element).itemsize
    lanes = request.machine.lanes(max(4, held))
    if 0 in p.shape:
        return []
    walk = Walk.of(layout, layout.padded_shape(p.dst_shape), [layout.padded_shape(p.shape)], lanes)
    axes = (axis for axis in layout.axes(p.shape) if axis.size > 1 and axis.dim in p.axes)
    loops = fused(Loop(axis.size, (axis.stride,)) for axis in axes)
    inner, results = walk.elements.size, walk.extents
    period, needed = (inner if lanes % inner == 0 else 0), -(-inner // lanes)
    vectors = min(range(1, min(MOST, needed) + 1), key=lambda k: (-(-needed // k) * (k + 1), -k))
    width, summed = vectors * lanes, math.prod(loop.size for loop in loops)
    # A row that several lines make, each with a sum of its own: rows are summed first, and then each line of the sum.
    line = loops[-1].size * inner if len(loops) == 2 and inner <= width else 0
    folds = 0 < line * itemsize <= LONGEST_LINE and [line, loops[0].src] == [
        walk.rows.strides[1],
        walk.rows.size * line,
    ]
    segments = max(-(-inner // LONGEST), -(-4 * threads // results) if threads > 1 else 1)
    size = min(inner, -(-inner // (segments * width)) * width)
    nbytes, tasks = summed * size * itemsize, results * -(-inner // size)
    run = max(1, min(walk.rows.size, TASK_BYTES // (line * held if folds else nbytes), tasks // (4 * threads)))
    words, tasks, _ = walk.tasks((1, 0), (itemsize, itemsize), threads, (size, run))
    reduced = [SummedLoop(size=loop.size, stride=loop.src * itemsize) for loop in loops[: -1 if folds else None]]
    reduced = [SummedLoop(size=1, stride=0)] * (LOOPS - len(reduced)) + reduced
    rows = reduced[-1].size // (lanes // period if period and not folds else 1)
    partial = SHORT if folds or inner > width else LONG * rows_at_once(vectors)
    args = fill(
        ReduceArgs,
        walk,
        **words,
        count=math.prod(p.shape[axis] for axis in p.axes) if p.kind == "mean" else 1,
        partial=max(partial, rows // MOST_PARTIALS),
        blocks=padded_channels(layout, p.dst_shape),
        line=line,
        reduced=reduced,
    )
    how = HOW.index("sum" if p.kind == "mean" else p.kind)
    form = element, lanes, vectors, period, args.blocks.valid > 0, how, folds
    wide = WIDE * lanes
    sums = width + -(-run * line // wide) * wide if folds else -(-size // width) * width
    return [Launch(reduce_mean(*form), args, tasks, chunk_of(tasks, run * nbytes, threads), scratch=sums * held)]


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
