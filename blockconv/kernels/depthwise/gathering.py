"""Depthwise convolution of pixels that lie a power of two apart, which push each other out of the first-level cache.

Pixels of 512 or 1024 channels of float32 in NHWC are 2 or 4 KiB apart: the same channels of all pixels of a window are
lines of one or two sets of the cache, each of which holds a few. Whatever a tile reads then comes from the second-level
cache, for every tap anew: 3x3 of 1024 channels at 28x28 takes 3.1 times as long as of blocks of 16. So a task, which is
some entries of the table and some rows, gathers what it reads of them first, where pixels are neighbours.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

from blockconv.core import target
from blockconv.core.problem import Conv2dProblem
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.tile import LINE
from blockconv.machine.profile import profile

__all__ = ["entries_gathered", "gathered_rows", "gathered_words", "gathering_seconds"]

FEW_SETS = 2  # in which all pixels lie: of 4 it takes longer to gather (strides of 2 .75 times as fast, 5x5 .85)
TOGETHER = 256  # bytes of a pixel that are gathered at once: lines that follow one another are fetched ahead


def entries_gathered(problem: Conv2dProblem, src: Geometry, each: int, entries: int) -> int:
    """How many entries, of `each` bytes of a pixel, are gathered at once; 0 where the source is read in place.

    entries: those that lie together in a pixel.
    """
    p = problem
    if p.oc != p.ic or not _is_crowded(p, src):
        return 0
    parts = [k for k in range(1, entries + 1) if entries % k == 0 and k * each % LINE == 0]
    return max((k for k in parts if k * each <= TOGETHER), default=min(parts, default=0))


def _is_crowded(problem: Conv2dProblem, src: Geometry) -> bool:
    """Whether the rows of a window lie in so few sets of the first-level cache that these hold but a part of them."""
    p, known = problem, profile()
    lines, rest = divmod(src.col, known.line)
    sets = known.sets // math.gcd(known.sets, lines)
    pixels = min(p.ih, (p.kh - 1) * p.dh + 1) * p.iw
    return rest == 0 and sets <= FEW_SETS and pixels > 2 * known.ways * sets


def gathered_rows(problem: Conv2dProblem, pixel: int, rows: int, unit: int) -> int:
    """Rows of a task, at most `rows`, whole multiples of `unit`, whose window stays in the second-level cache.

    pixel: bytes that are gathered of a pixel.
    """
    p = problem
    held = target.second_level_cache() // 4 // (p.iw * pixel) - (p.kh - 1) * p.dh - 1
    return min(rows, max(1, held // p.sh // unit) * unit)


def gathering_seconds(problem: Conv2dProblem, bytes_of_image: int, images: int, rows: int) -> float:
    """What all tasks of so many rows take to gather, of an image of so many bytes."""
    p, known = problem, profile()
    height = min(p.ih, (rows - 1) * p.sh + (p.kh - 1) * p.dh + 1)
    read = images * bytes_of_image * max(1.0, -(-p.oh // rows) * height / p.ih)
    floats = known.vector_bytes // 4
    return read / known.vector_bytes * known.pack(floats, "apart")


def gathered_words(problem: Conv2dProblem, window: int, pixel: int, rows: int) -> tuple[int, Mapping[str, int]]:
    """(the end of the scratch, the arguments' words) of tasks of so many rows, whose window begins at `window`."""
    p = problem
    height = min(p.ih, (rows - 1) * p.sh + (p.kh - 1) * p.dh + 1)
    words = {"window": window, "row_stride": p.iw * pixel, "gathered_col": pixel}
    return window + height * p.iw * pixel, words
