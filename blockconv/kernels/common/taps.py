"""Which taps of a window fall inside the image: those outside multiply padding alone, and may be left out.

A tap that adds `weight * 0` changes no sum if the weight is finite (`Types.has_finite_weights`). Functions take an
axis, "h" or "w", of a problem or of a `Space`, which name sizes alike.
"""

import dataclasses
import itertools
import operator
from typing import NamedTuple

from blockconv.core.python import bounded_cache, zipped

TapRange = tuple[int, int]  # the first tap, and past the last
# The least part of the taps that is profitable to leave out. Tiles that leave out taps have longer loops, which costs 3
# to 6 % with the 16 registers of AVX2, and are kernels of their own.
LEAST = 1 / 20


def tap_ranges(at, x: str, extent: int) -> tuple[TapRange, ...]:
    """The range of each tile of `extent` outputs along an axis; the last tile is moved back to end with the image."""
    runs = _tap_runs(_axis(at, x), extent)
    return tuple(itertools.chain.from_iterable(itertools.repeat(taps, count) for taps, count in runs))


class _Axis(NamedTuple):
    """The sizes of one axis. Layers of a network share them, and the images of one size as well."""

    o: int
    i: int
    k: int
    s: int
    p: int
    d: int


_FIELDS = {x: operator.attrgetter(*(name + x for name in _Axis._fields)) for x in "hw"}


def _axis(at, x: str) -> _Axis:
    return _Axis(*_FIELDS[x](at))


def _in_bounds(axis: _Axis, start: int, extent: int) -> TapRange:
    """(first, past the last) of the taps that some of `extent` outputs, from `start` on, find inside the image.

    With strides, a tap between the first and the last may be outside too.
    """
    first = start * axis.s - axis.p
    last = first + (extent - 1) * axis.s
    low = min(max(-(last // axis.d), 0), axis.k)
    return low, min(max(-((first - axis.i) // axis.d), low), axis.k)


def _tap_runs(axis: _Axis, extent: int) -> tuple[tuple[TapRange, int], ...]:
    """The ranges of an axis' tiles in their order, each with how many tiles have it one after the other.

    Only tiles near the ends of the image are looked at: the others have all taps.
    """
    tiles, last = -(-max(1, axis.o) // extent), max(0, axis.o - extent)

    def taps(tile: int) -> TapRange:
        return _in_bounds(axis, min(tile * extent, last), extent)

    front = list(itertools.takewhile(lambda found: found[0] > 0, map(taps, range(tiles))))
    others = map(taps, range(tiles - 1, len(front) - 1, -1))
    back = list(itertools.takewhile(lambda found: found[1] < axis.k, others))[::-1]
    middle = tiles - len(front) - len(back)
    whole = [((0, axis.k), middle)] if middle else []
    return (*((found, 1) for found in front), *whole, *((found, 1) for found in back))


def kept_along(at, x: str, extent: int) -> tuple[tuple[TapRange, ...], float]:
    """The ranges of tiles of `extent` outputs along an axis that occur, in order, and the taps of one on average."""
    return _kept_along(_axis(at, x), extent)


@bounded_cache
def _kept_along(axis: _Axis, extent: int) -> tuple[tuple[TapRange, ...], float]:
    runs = _tap_runs(axis, extent)
    total = sum((high - low) * count for (low, high), count in runs)
    return tuple(sorted({taps for taps, _ in runs})), total / sum(count for _, count in runs)


@bounded_cache
def reached_taps(problem) -> tuple[TapRange, TapRange]:
    """The rows and the columns of taps that some output finds inside the image: at least one of each.

    Padding before the image stays at least zero.
    """
    found = []
    for x in "hw":
        size, taps, begin, dilation = (getattr(problem, name + x) for name in "okpd")
        if taps == 1:
            found.append((0, 1))
            continue
        low, high = _in_bounds(_axis(problem, x), 0, size)
        low = min(low, taps - 1, begin // dilation)
        found.append((low, max(high, low + 1)))
    return found[0], found[1]


@bounded_cache
def reached_problem(problem):
    """The same convolution with `reached_taps` alone: less padding, and the same destination."""
    changed: dict[str, int] = {}
    for x, (low, high) in zipped("hw", reached_taps(problem)):
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


def kept_taps(at, finite: bool, rows: int, pixels: int, each: int = 1) -> Kept:
    """The part of a `Space` that tiles of so many rows and columns reduce.

    finite: whether weights are known to be (`Types.has_finite_weights`).
    each: taps of a row that a step takes. Columns are left out where it takes one.
    """
    count = at.kh * at.kw
    if count > 1 and at.depth == 1 and finite:
        down, height = kept_along(at, "h", rows)
        along, width = kept_along(at, "w", pixels) if each == 1 else (((0, at.kw),), at.kw)
        if height * width <= (1 - LEAST) * count:
            return Kept(down, along, height * width)
    return Kept((), (), at.depth * count)
