"""Which taps of a window fall inside the image: those outside multiply padding alone, and may be left out.

A tap that adds `weight * 0` changes no sum if the weight is finite (`Types.has_finite_weights`). Functions take an
axis, "h" or "w", of a problem or of a `Space`, which name sizes alike.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.types import Types

__all__ = ["Kept", "TapRange", "kept_taps", "reached_problem", "reached_taps", "tap_ranges", "taps_in_bounds"]

TapRange = tuple[int, int]  # the first tap, and past the last
# The least part of the taps that is profitable to leave out. Tiles that leave out taps have longer loops, which costs 3
# to 6 % with the 16 registers of AVX2, and are kernels of their own.
LEAST = 1 / 20


def taps_in_bounds(at: Any, x: str, start: Any, extent: int) -> Any:
    """(first, past the last) of the taps that some of `extent` outputs, from `start` on, find inside the image.

    start: an output, or an array of them. With strides, a tap between the first and the last may be outside too.
    """
    size, taps, stride, begin, dilation = (getattr(at, name + x) for name in "ikspd")
    first = start * stride - begin
    last = first + (extent - 1) * stride
    low = np.clip(-(last // dilation), 0, taps)
    return low, np.clip(-((first - size) // dilation), low, taps)


def tap_ranges(at: Any, x: str, extent: int) -> tuple[TapRange, ...]:
    """The range of each tile of `extent` outputs along an axis; the last tile is moved back to end with the image."""
    return _tap_ranges(_Axis(*(getattr(at, name + x) for name in "oikspd")), extent)


class _Axis(NamedTuple):
    """The sizes of one axis. Layers of a network share them, and the images of one size as well."""

    o: int
    i: int
    k: int
    s: int
    p: int
    d: int


@functools.lru_cache(maxsize=1 << 14)
def _tap_ranges(axis: _Axis, extent: int) -> tuple[TapRange, ...]:
    starts = np.minimum(np.arange(0, max(1, axis.o), extent), max(0, axis.o - extent))
    low, high = taps_in_bounds(axis, "", starts, extent)
    return tuple(zip(low.tolist(), high.tolist(), strict=True))


@functools.lru_cache(maxsize=1 << 14)
def _kept_along(axis: _Axis, extent: int) -> tuple[tuple[TapRange, ...], float]:
    """The ranges that occur, in order, and the taps of a tile on average."""
    ranges = _tap_ranges(axis, extent)
    return tuple(sorted(set(ranges))), sum(high - low for low, high in ranges) / len(ranges)


@functools.lru_cache(maxsize=4096)
def reached_taps(problem: Any) -> tuple[TapRange, TapRange]:
    """The rows and the columns of taps that some output finds inside the image: at least one of each.

    Padding before the image stays at least zero.
    """
    found = []
    for x in "hw":
        size, taps, begin, dilation = (getattr(problem, name + x) for name in "okpd")
        if taps == 1:
            found.append((0, 1))
            continue
        low, high = taps_in_bounds(problem, x, 0, size)
        low = min(int(low), taps - 1, begin // dilation)
        found.append((low, max(int(high), low + 1)))
    return found[0], found[1]


@functools.lru_cache(maxsize=4096)
def reached_problem(problem: Any) -> Any:
    """The same convolution with `reached_taps` alone: less padding, and the same destination."""
    changed: dict[str, int] = {}
    for x, (low, high) in zip("hw", reached_taps(problem), strict=True):
        size, out, stride, begin, dilation = (getattr(problem, name + x) for name in "iospd")
        begin, dilation = begin - low * dilation, dilation if high - low > 1 else 1
        end = (out - 1) * stride + (high - low - 1) * dilation + 1 - size - begin
        changed |= {f"k{x}": high - low, f"p{x}": begin, f"p{x}_r": end, f"d{x}": dilation}
    return dataclasses.replace(problem, **changed)


class Kept(NamedTuple):
    """Which taps tiles reduce: the ranges of rows of taps, and of columns, that occur. Neither: they reduce all.

    average: taps of a tile.
    """

    rows: tuple[TapRange, ...]
    cols: tuple[TapRange, ...]
    average: float

    @property
    def ranges(self) -> tuple[tuple[TapRange, TapRange], ...]:
        """Each pair of a range of rows and one of columns, columns first in order."""
        return tuple(itertools.product(self.rows, self.cols))


def kept_taps(at: Any, types: Types, rows: int, pixels: int, each: int = 1) -> Kept:
    """The part of a `Space` that tiles of so many rows and columns reduce.

    each: taps of a row that a step takes. Columns are left out where it takes one.
    """
    count = at.kh * at.kw
    if count > 1 and at.depth == 1 and types.has_finite_weights:
        down, height = _kept_along(_Axis(at.oh, at.ih, at.kh, at.sh, at.ph, at.dh), rows)
        columns = _Axis(at.ow, at.iw, at.kw, at.sw, at.pw, at.dw)
        along, width = _kept_along(columns, pixels) if each == 1 else (((0, at.kw),), at.kw)
        if height * width <= (1 - LEAST) * count:
            return Kept(down, along, height * width)
    return Kept((), (), at.depth * count)
