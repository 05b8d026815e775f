"""What a task of a depthwise convolution gathers: the source's pixels for some entries of the table, of some rows."""

from __future__ import annotations

from collections.abc import Mapping

from blockconv.core.problem import Conv2dProblem
from blockconv.kernels.common.gathering import TOGETHER, is_crowded, rows_that_stay, window_rows
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.tile import LINE

__all__ = ["entries_gathered", "gathered_rows", "gathered_words"]


def entries_gathered(problem: Conv2dProblem, src: Geometry, each: int, entries: int) -> int:
    """How many entries, of `each` bytes of a pixel, are gathered at once; 0 where the source is read in place.

    entries: those that lie together in a pixel. Where a row of tiles reads nothing again, nothing is gathered.
    """
    p = problem
    if p.oc != p.ic or p.kh <= p.sh or not is_crowded(window_rows(p, 1) * p.iw, src.col):
        return 0
    parts = [k for k in range(1, entries + 1) if entries % k == 0 and k * each % LINE == 0]
    found = max((k for k in parts if k * each <= TOGETHER), default=min(parts, default=0))
    return found if found and rows_that_stay(p.iw * found * each, window_rows(p, 1), p.sh) else 0


def gathered_rows(problem: Conv2dProblem, pixel: int, rows: int, unit: int) -> int:
    """Rows of a task, at most `rows`, whole multiples of `unit`, whose window stays in the second-level cache.

    pixel: bytes that are gathered of a pixel.
    """
    most = rows_that_stay(problem.iw * pixel, window_rows(problem, 1), problem.sh)
    return min(rows, max(unit, most // unit * unit))


def gathered_words(problem: Conv2dProblem, window: int, pixel: int, rows: int) -> tuple[int, Mapping[str, int]]:
    """(the end of the scratch, the arguments' words) of tasks of so many rows, whose window begins at `window`."""
    p = problem
    words = {"window": window, "row_stride": p.iw * pixel, "gathered_col": pixel}
    return window + window_rows(p, rows) * p.iw * pixel, words
