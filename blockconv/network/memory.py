"""Memory of tensors: layouts that give the same bytes, offsets in an arena."""

import bisect
from collections.abc import Sequence
from typing import NamedTuple

from blockconv.core.checks import Pair, Shape
from blockconv.core.layout import Layout
from blockconv.core.python import bounded_cache
from blockconv.kernels.common.loop_nest import nest
from blockconv.runtime.memory import ALIGNMENT


@bounded_cache
def same_bytes(shape: Shape, a: Layout, b: Layout) -> bool:
    """Whether an array's storage is the same in two layouts: NCHW and NHWC of 1x1 images, or NCHW4 and CHWN4 of one."""
    if a == b:
        return True
    if a.padded_shape(shape) != b.padded_shape(shape):
        return False
    loops = nest(a, b, shape)
    return loops is not None and all(loop.src == loop.dst for loop in loops.loops)


class Interval(NamedTuple):
    """Bytes that are needed from step `first` to step `last`, both included."""

    nbytes: int
    first: int
    last: int


def packed(intervals: Sequence[Interval]) -> tuple[list[int], int]:
    """(an offset for each, the total bytes), so that intervals that live at once do not overlap.

    It places the largest first, each in the smallest gap that holds it (Pisarchyk and Lee, MLSys 2020: "greedy by
    size"). On their networks and ours, the arena is within a few percent of the largest live set.
    """
    offsets = [0] * len(intervals)
    placed: list[int] = []  # by offset
    total = 0
    for k in sorted(range(len(intervals)), key=lambda k: (-intervals[k].nbytes, intervals[k].first)):
        need = intervals[k]
        best: Pair | None = None  # (gap, offset)
        end = 0
        for other in placed:
            taken = intervals[other]
            if taken.last < need.first or need.last < taken.first:
                continue
            gap = offsets[other] - end
            if gap >= need.nbytes and (best is None or gap < best[0]):
                best = gap, end
            end = max(end, -(-(offsets[other] + taken.nbytes) // ALIGNMENT) * ALIGNMENT)
        offsets[k] = best[1] if best is not None else end
        total = max(total, offsets[k] + need.nbytes)
        bisect.insort(placed, k, key=offsets.__getitem__)
    return offsets, total
