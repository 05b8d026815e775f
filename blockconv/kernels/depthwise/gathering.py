"""The work of a depthwise task at a pixel: how many entries of the table it reads at once, and what it gathers."""

from __future__ import annotations

from blockconv.core.problem import Conv2dProblem
from blockconv.kernels.common.gathering import TOGETHER, is_crowded, rows_that_stay, window_rows
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.waiting import is_beyond
from blockconv.kernels.depthwise.kernels import DepthwiseScratch
from blockconv.machine.machine import Machine


def entries_gathered(machine: Machine, problem: Conv2dProblem, src: Geometry, each: int, entries: int) -> int:
    """How many entries, of `each` bytes of a pixel, are gathered at once; 0 where the source is read in place.

    entries: how many are contiguous in a pixel. Where a row of tiles reads nothing again, nothing is gathered.
    """
    p = problem
    if p.oc != p.ic or p.kh <= p.sh or not is_crowded(machine, window_rows(p, 1) * p.iw, src.col):
        return 0
    parts = [k for k in range(1, entries + 1) if entries % k == 0 and k * each % LINE == 0]
    found = max((k for k in parts if k * each <= TOGETHER), default=min(parts, default=0))
    return found if found and rows_that_stay(machine, p.iw * found * each, window_rows(p, 1), p.sh) else 0


def entries_that_stay(
    machine: Machine, problem: Conv2dProblem, src: Geometry, each: int, entries: int, rows: int, nbytes: int
) -> int:
    """How many of a pixel's neighbouring entries a task takes at once; 0 where no part's window would stay.

    each: bytes of a pixel that an entry reads. rows: of the source, that a row of tiles reads. nbytes: of the source.

    A row of tiles reads again what those above it read. If pixels are many lines, this is more than the first-level
    cache holds. With a part of the channels it may stay there (384 channels of 14x14 in NHWC: 1.6 times as fast). A
    part is no fewer bytes than are fetched together; a source beyond the second-level cache is read pixel by pixel,
    whose lines the processor fetches ahead. Vectors of a quarter of a line are computed longer than lines are fetched.
    """
    p, known = problem, machine.profile
    pixels, half = rows * p.iw, known.caches["L1"] // 2
    narrow = machine.isa.vector_bytes < known.line // 2
    if narrow or p.kh <= p.sh or pixels * src.col <= half:
        return entries
    crowded = pixels > known.ways // 2 * known.sets_reached(src.col)
    held = max(half // (pixels * each), -(-TOGETHER // each))
    if is_beyond(machine, nbytes) or crowded or held * pixels * each > 3 * half // 2:
        return 0
    return -(-entries // -(-entries // held))


def gathered_rows(machine: Machine, problem: Conv2dProblem, pixel: int, rows: int, unit: int) -> int:
    """Rows of a task, at most `rows`, whole multiples of `unit`, whose window stays in the second-level cache.

    pixel: bytes that are gathered of a pixel.
    """
    most = rows_that_stay(machine, problem.iw * pixel, window_rows(problem, 1), problem.sh)
    return min(rows, max(unit, most // unit * unit))


def gathered_scratch(problem: Conv2dProblem, window: int, pixel: int, rows: int) -> tuple[int, DepthwiseScratch]:
    """(the end of the scratch, its parts) of tasks of so many rows, whose window begins at `window`."""
    row = problem.iw * pixel
    parts = DepthwiseScratch(window=window, row_stride=row, gathered_col=pixel)
    return window + window_rows(problem, rows) * row, parts
