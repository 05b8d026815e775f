"""Tiles of wide pixels: how many outputs they have, and when their source is gathered first."""

from __future__ import annotations

from blockconv.core.problem import AdaptivePool2dProblem, Pool2dProblem
from blockconv.core.target import Isa
from blockconv.kernels.common.gathering import (
    FEW_SETS,
    TOGETHER,
    gathering_seconds,
    is_crowded,
    rows_that_stay,
    window_rows,
)
from blockconv.machine.machine import Machine

MOST_COLUMNS = 10  # of a tile that shares few of them: memory streams better through narrow tiles (1.2x at 112x112)


def pays_to_gather(machine: Machine, problem: Pool2dProblem | AdaptivePool2dProblem, s_col: int, pixel: int) -> bool:
    """Whether it takes less time to gather a window's pixels, of so many bytes, than to read them where they are.

    s_col: bytes from one to the next. A window of three rows reads each pixel so few times that two sets of the cache
    suffice.
    """
    p = problem
    if isinstance(p, AdaptivePool2dProblem) or pixel % TOGETHER or p.kw <= p.sw:
        return False
    if not rows_that_stay(machine, p.iw * TOGETHER, window_rows(p, 1), p.sh):
        return False
    return is_crowded(machine, window_rows(p, 1) * p.iw, s_col, FEW_SETS if p.kh > 3 else 1)


def crowded_seconds(machine: Machine, problem: Pool2dProblem, s_col: int, nbytes: int) -> float:
    """How long rows of windows wait beyond their loads, if they read each row of an image of `nbytes` by itself."""
    p = problem
    is_slow = is_crowded(machine, window_rows(p, 1) * p.iw, s_col)
    return gathering_seconds(machine, nbytes * p.kh / p.sh) if is_slow else 0.0


def _tile_columns(problem: Pool2dProblem, pixels: int) -> int:
    p = problem
    return len({pixel * p.sw + tap * p.dw for pixel in range(pixels) for tap in range(p.kw)})


def tile_pixels(isa: Isa, problem: Pool2dProblem) -> int:
    """Outputs of a tile, so that the fewest columns are read; 0 if a window has too many for the registers."""
    p, most = problem, isa.registers - 8
    if p.kw <= p.sw + 1:
        most = min(most, max(MOST_COLUMNS, p.kw))
    if p.kw > most:
        return 0
    fit = [pixels for pixels in range(1, min(8, p.ow) + 1) if _tile_columns(p, pixels) <= most]
    return min(fit, key=lambda pixels: (-(-p.ow // pixels) * (_tile_columns(p, pixels) + 1), -pixels), default=0)
