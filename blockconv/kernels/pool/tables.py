"""The tables of pools: the extents of windows, the scales of their sums, the channels that exist."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from blockconv.kernels.pool.blocking import MASK_VECTORS, PoolBlocking, Windows, windows
from blockconv.kernels.pool.kernels import WindowRow
from blockconv.runtime import Block


class LineOfScales(NamedTuple):
    """A line of scales: each column's stands `repeat` times, and `more` elements go on from the line's beginning."""

    repeat: int = 1
    more: int = 0


ONE_EACH = LineOfScales()


def table_of(
    b: PoolBlocking, of: tuple[Windows, Windows] | None = None, columns: bool = False, scales: LineOfScales = ONE_EACH
) -> Block:
    """The table of a pool's windows, or `of` other rows and columns of windows.

    It has a `WindowRow` for each row, and a `Covered` for each column, if the kernel needs `columns`. Averages have a
    line of scales for each counted height, and slack for a vector's load.
    """
    h, w = of or (windows(b.problem, "h"), windows(b.problem, "w"))
    empty = np.empty(0, np.int64)
    of_columns = np.stack([w.first, w.taps], axis=1).ravel() if columns else empty
    held, lines = empty, np.zeros_like(h.first)
    if b.is_average:
        heights, which = np.unique(h.counted, return_inverse=True)
        filled = _scales(b, heights, np.repeat(w.counted, scales.repeat), scales.more)
        lines = WindowRow.nbytes * len(lines) + 8 * (len(of_columns) + filled.shape[1] * which)
        held = np.append(filled, np.zeros(8, np.int64))
    return np.concatenate([np.stack([h.first, h.taps, lines], axis=1).ravel(), of_columns, held])


def masks_of(b: PoolBlocking, elements: int) -> Block:
    """Two masks over elements of pixels, of ones, and with zero bits for the last block's channels that do not exist.

    Each holds so many elements, and as many as vectors read after them.
    """
    exist = np.resize(b.view.exist, elements + MASK_VECTORS * b.lanes)
    bits = np.where(exist, -1, 0)
    if b.is_odd:  # the last pair that exists has its first channel alone
        bits[(exist > 0) & (np.roll(exist, -1) == 0)] = 0x0F
    words = np.zeros((2, -(-exist.size * b.itemsize // 8) * 8 // b.itemsize), f"i{b.itemsize}")
    words[0], words[1, : exist.size] = -1, bits
    return words.ravel().view(np.int64)


def _scales(b: PoolBlocking, heights: Block, widths: Block, more: int) -> Block:
    """A line of whole words for each height: 1 / (height * width), or 0 for empty windows.

    For integers, the divisors of sums: (height * width) times the destination's scale relative to the source's.
    """
    widths = np.resize(widths, widths.size + more)
    itemsize = b.held.itemsize
    words = -(-widths.size * itemsize // 8)
    held = np.zeros((len(heights), 8 * words // itemsize), b.element.computed.name)
    for line, height in zip(held, heights, strict=True):
        counts = (height * widths).astype(np.float64)
        if not b.element.is_float:
            line[: widths.size] = np.where(counts != 0, counts * b.step, 1.0)
        else:
            line[: widths.size] = np.divide(1.0, counts, out=np.zeros_like(counts), where=counts != 0)
    return held.view(np.int64)
