"""From windows to programs: a filter is a list of windows, each over one axis or several, in scipy's order."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blockconv.core import target
from blockconv.core.types import Array, ElementType, element
from blockconv.filters.codegen import (
    GREATEST,
    LEAST,
    MEAN,
    ORDERED,
    PAIR_DIFFERENCES,
    PAIR_SUMS,
    RANK,
    SORT,
    SUM,
    WEIGHTED,
    Reducing,
    lanes_of,
)
from blockconv.filters.kernels import OUTSIDE, FilterArgs, FilterStep, filter_rows
from blockconv.runtime import OWN_TABLE, Buffer, Launch, Program, address_of

TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "float32", "float64")
NARROW = 64  # where the elements behind an axis are fewer, vectors are along the axis
TASK_ROWS, RING_BYTES = 64, 128 * 1024
MOST_KNOWN = 9  # terms of a sum or an extreme that a kernel is compiled for
EXTREMES = (GREATEST, LEAST)

Term = tuple[int, int, int, int]  # a plane or step, a row, a column, and which row of the results of SORT


class ImageWindow(NamedTuple):
    """A reduction of some elements around each element of an image, which has a first axis of size 1.

    kind: of `codegen`. WEIGHTED stands for whichever kind gives scipy's results.
    offsets: of these elements, one number for each axis of the image.
    weights: of each, for weighted sums.
    mode: the border, by scipy's name.
    cval: the number outside, for the border "constant".
    rank: for the kind RANK.
    """

    kind: int
    offsets: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    mode: str
    cval: float
    rank: int = 0

    @property
    def axes(self) -> list[int]:
        """The axes along which it has more than the element itself."""
        return [axis for axis, offsets in enumerate(zip(*self.offsets, strict=True)) if any(offsets)]

    @property
    def outside(self) -> set[float]:
        """The constant outside the image, if results read one."""
        return {self.cval} if self.mode == "constant" and self.axes else set()

    def reach(self, axis: int) -> tuple[int, int]:
        """The first and the last offset along an axis."""
        found = [offset[axis] for offset in self.offsets]
        return min(found), max(found)


class Memory(NamedTuple):
    """An array's memory: its elements, and its strides in bytes."""

    dtype: Any
    shape: tuple[int, ...]
    strides: tuple[int, ...]


def sources(size: int, first: int, count: int, mode: str | None) -> Array:
    """The index of the element at each of `count` positions from `first` on; -1 for a constant."""
    at = np.arange(first, first + count)
    if mode == "constant":
        return np.where((at >= 0) & (at < size), at, -1)
    if mode in (None, "nearest") or size == 1:
        return at.clip(0, size - 1)
    if mode == "wrap":
        return at % size
    period = 2 * size if mode == "reflect" else 2 * size - 2
    at %= period
    return np.where(at < size, at, period - at - (mode == "reflect"))


# ---------------------------------------------------------------- types


def _sum(window: ImageWindow, src: ElementType) -> float:
    """The largest sum of the magnitudes of a window's terms."""
    largest = max(map(float, map(abs, (*src.bounds, *window.outside))))
    return float(np.abs(window.weights or [len(window.offsets)]).sum() * largest)


def _error(window: ImageWindow, src: ElementType, acc: str) -> float:
    """A bound of what a sum in any order differs from the sum in float64 in scipy's order."""
    return (len(window.weights) + 3) * (2.0**-24 if acc == "float32" else 2.0**-53) * _sum(window, src)


def computed_by(window: ImageWindow, src: ElementType, dst: ElementType) -> tuple[int, str]:
    """The kind of reduction, and the type that it is computed in, for scipy's results.

    Integers are scipy's to the last bit: sums that are exact in any order, or in float64 in scipy's order.
    """
    kind: int = window.kind
    narrow = src.itemsize <= 2 or src.name == "float32"
    if kind in (*EXTREMES, RANK):
        is_held = src.is_float or all(src.bounds[0] <= x <= src.bounds[1] and x % 1 == 0 for x in window.outside)
        return kind, src.name if src == dst and src.name != "int64" and is_held else "float64"
    if dst.is_float:
        return kind, "float32" if narrow and dst.itemsize == 4 else "float64"
    is_whole = not src.is_float and all(x % 1 == 0 for x in (*window.weights, *window.outside))
    limits = {"int16": 2.0**15, "float32": 2.0**21 if kind == MEAN else 2.0**24, "float64": 2.0**53}
    for name, limit in limits.items():
        largest = max(_sum(window, src), *map(abs, window.weights), 0) if is_whole else math.inf
        if (narrow or name == "float64") and largest < limit:
            return kind, name
    if kind != WEIGHTED:
        return kind, "float64"
    is_small = src.itemsize == 1 and not window.outside and _error(window, src, "float32") < 2.0**-9
    return ORDERED, "float32" if is_small else "float64"


def paired(window: ImageWindow) -> tuple[int, list[Any], list[float]]:
    """An ordered sum as scipy adds: (kind, offsets, weights).

    Along one axis scipy begins with the middle element, and goes on from the left. It adds the elements of a symmetric
    window in pairs, or subtracts them. Otherwise it begins with the last element.
    """
    offsets, weights = [*window.offsets], np.array(window.weights)
    if len(window.axes) == 1:
        middle = len(weights) // 2
        left, right = weights[:middle], weights[::-1][:middle]
        for kind, sign in ((PAIR_SUMS, 1), (PAIR_DIFFERENCES, -1)):
            if len(weights) % 2 and (np.abs(left - sign * right) <= np.finfo(np.float64).eps).all():
                pairs = zip(offsets[:middle], offsets[:middle:-1], strict=True)
                return kind, [offsets[middle], *itertools.chain(*pairs)], [weights[middle], *left]
        offsets, weights = offsets[-1:] + offsets[:-1], np.roll(weights, 1)
    return ORDERED, offsets, weights.tolist()


def parts_of(count: int, levels: int, overlap: bool) -> list[tuple[int, int]]:
    """Neighbours as few powers of two of them: (exponent, number of the first). overlap: some may be in two."""
    found, start = [], 0
    while start < count:
        level = levels if overlap else min(levels, (count - start).bit_length() - 1)
        found.append((level, min(start, count - (1 << level))))
        start += 1 << level
    return found


# ---------------------------------------------------------------- passes


class _Pass:
    """One pass over memory for a window, or two along neighbouring axes: its steps, and the tables of its kernel.

    row: the axis of rows. column: the axis along which windows go in a row; None where they do not. inner: elements
    from one to the next along it.
    """

    def __init__(self, windows: Sequence[ImageWindow], src: Memory, dst: Memory) -> None:
        self.src, self.dst = src, dst
        given, self.out = element(src.dtype), element(dst.dtype)
        self.modes = {axis: window.mode for window in windows for axis in window.axes}
        axes = sorted(self.modes) or [len(src.shape) - 1]
        self.row, self.column, self.inner = axes[-1] - 1, axes[-1], math.prod(src.shape[axes[-1] + 1 :])
        if len(axes) == 1 and self.inner >= NARROW:
            self.row, self.column, self.inner = axes[0], len(src.shape), 1
        reach = [window.reach(self.column) for window in windows if self.column in window.axes]
        self.before = -min([0, *[first for first, _ in reach]]) * self.inner
        self.after = max([0, *[last for _, last in reach]]) * self.inner
        self.low = sum(window.reach(self.row)[0] for window in windows)
        self.outside = next(iter(set().union(*(window.outside for window in windows))), 0.0)
        self.planes = sorted({offset[: self.row] for offset in windows[0].offsets})
        # Of planes, then of steps: rows behind those of the image, rows in scratch, rows in a row of results.
        self.lags, self.rings, self.outputs = ([n] * len(self.planes) for n in (0, 1, 1))
        self.steps: list[tuple[Reducing, list[Term], dict[str, int]]] = []
        self.tables: list[Array] = []
        kinds = [computed_by(window, type, self.out) for window, type in zip(windows, (given, self.out), strict=False)]
        self.acc = max((element(name) for _, name in kinds), key=lambda type: type.itemsize)
        source, shifted = None, 0
        for window, type, (kind, _) in zip(windows, (given, self.out), kinds, strict=False):
            shifted |= int(self.column in window.axes)
            source = self.window(window, type, kind, source, shifted)

    def window(self, window: ImageWindow, src: ElementType, kind: int, source: int | None, shifted: int) -> int:
        """Add the steps of a window on planes of the image, or on a step; the number of the last one."""
        low, acc, words = window.reach(self.row)[0], self.acc, {"shifted": shifted}
        number = acc if acc.is_float else element("float32")
        how, offsets, weights, types = Reducing(kind, 1), [*window.offsets], [*window.weights], [acc]
        if kind == ORDERED:
            kind, offsets, weights = paired(window)
            how, types = Reducing(kind, 1), [element("float64"), acc]
            words["bias"] = number.bits(_error(window, src, acc.name))
        columns = [sum(offset[self.column :][:1]) * self.inner for offset in offsets]
        planes = [self.planes.index(offset[: self.row]) if source is None else source for offset in offsets]
        terms = [
            (plane, offset[self.row] - low, at, 0) for plane, offset, at in zip(planes, offsets, columns, strict=True)
        ]
        count = len(terms)
        if kind == RANK:
            how, terms = self.ranked(window.rank, terms)
        elif kind == MEAN:
            words |= {"scale": number.bits(1 / count), "bias": number.bits((not self.out.is_float) / 2 / count)}
        axes = window.axes
        if kind in (MEAN, *EXTREMES) and len(axes) == 1 and np.ptp(window.reach(axes[0])) + 1 == count:
            terms = self.combined(Reducing(kind if kind in EXTREMES else SUM), terms)
        if weights:
            words["weights"] = self.add([type.bits(w) for type in types for w in _rounded(weights, type)])
        return self.step(how, terms, **words)

    def ranked(self, rank: int, terms: list[Term]) -> tuple[Reducing, list[Term]]:
        """The step of a rank, and its terms: those of a rectangle of rows and columns are sorted by columns before."""
        columns = sorted({term[2] for term in terms})
        rows, source = len(terms) // len(columns), terms[0][0]
        if min(rows, len(columns)) < 2 or {*terms} != {(source, row, at, 0) for row in range(rows) for at in columns}:
            return Reducing(RANK, 1, len(terms), rank=rank), terms
        made = self.step(Reducing(SORT, rows=rows), [(source, row, 0, 0) for row in range(rows)], outputs=rows)
        return Reducing(RANK, 1, rows, len(columns), rank), [
            (made, 0, at, row) for at in columns for row in range(rows)
        ]

    def combined(self, how: Reducing, terms: list[Term]) -> list[Term]:
        """The terms of a mean or an extreme along an axis: elements, or combinations of 2, 4, 8, ... neighbours."""
        count, overlap, made = len(terms), how.kind in EXTREMES, [terms[0][0]]
        levels = min(range(count.bit_length()), key=lambda k: 3 * k + len(parts_of(count, k, overlap)))
        for k in range(levels):
            row, column = (later - first for first, later in zip(terms[0][1:3], terms[1 << k][1:3], strict=True))
            made.append(self.step(how, [(made[-1], 0, 0, 0), (made[-1], row, column, 0)]))
        return [(made[level], *terms[start][1:]) for level, start in parts_of(count, levels, overlap)]

    def step(self, how: Reducing, reads: list[Term], outputs: int = 1, **words: int) -> int:
        """Add a step; its number. outputs: rows of a row of its results."""
        if how.kind not in (SORT, RANK) and len(reads) <= MOST_KNOWN:
            how = how._replace(rows=len(reads))
        lag = max(self.lags[source] + row for source, row, _, _ in reads)
        for source, row, _, _ in reads:
            self.rings[source] = max(self.rings[source], lag - self.lags[source] - row + 1)
        for found, own in ((self.lags, lag), (self.rings, 1), (self.outputs, outputs)):
            found.append(own)
        self.steps.append((how, reads, {"shifted": 0, "weights": 0, "scale": 0, "bias": 0} | words))
        return len(self.lags) - 1

    def add(self, words: Any) -> int:
        """Add words to the tables, and give their offset there."""
        self.tables.append(np.asarray(words, np.int64).reshape(-1))
        return 8 * sum(map(len, self.tables[:-1]))

    def launch(self, buffers: tuple[int, int]) -> Launch:
        """The kernel on the image in the first buffer, with the result in the second."""
        acc, src, count, lag = self.acc, element(self.src.dtype), len(self.planes), self.lags[-1]
        columns, made = (math.prod(memory.shape[self.row + 1 :]) for memory in (self.src, self.dst))
        rows, margin, size = self.dst.shape[self.row], self.before + self.after, acc.itemsize
        rings = [n * outputs for n, outputs in zip(self.rings, self.outputs, strict=True)]
        least = max(4 * margin, 512, RING_BYTES // (size * sum(rings)))
        is_whole = self.modes.get(self.column) == "wrap"
        tiles = np.linspace(0, made, 2 if is_whole else 1 + max(1, made // least), dtype=int)
        slot = -(-(max(np.diff(tiles)) + 2 * margin + 2 * lanes_of(acc)) * size // 128) * 128 + 64
        row_size = min(rows, max(TASK_ROWS, 4 * lag))
        positions, pointers = row_size + lag, 8 * max(len(terms) for _, terms, _ in self.steps)
        starts = [*itertools.accumulate([pointers + 8 * positions * len(rings), *(slot * n for n in rings)])]
        groups = [(how, len([*same])) for how, same in itertools.groupby(how for how, *_ in self.steps[:-1])]
        steps = []
        for k, (_, terms, words) in enumerate(self.steps, count):
            begin = words["shifted"] * self.before
            places = [(8 * (at * positions + row), (x + begin) * size + part * slot) for at, row, x, part in terms]
            own = {"places": self.add(places), "lag": self.lags[k], "rows": self.rings[k], "outputs": self.outputs[k]}
            steps.append(FilterStep(**words, **own, terms=len(terms), ring=starts[k]))
        args = FilterArgs(
            src=Buffer(buffers[0]),
            dst=Buffer(buffers[1]),
            tables=OWN_TABLE,
            planes=count,
            planes_at=self.add(self.planes_at()),
            rows_at=self.add(self.rows_at()),
            columns_at=self.add(np.stack([tiles[:-1], tiles[1:]], 1)),
            margin_at=self.add(self.margin_at(columns, made)),
            groups_at=self.add([0, *itertools.accumulate(n for _, n in groups)]),
            constant_at=self.add(np.full(slot // size, self.outside, acc.dtype).view(np.int64)),
            rows=rows,
            lag=lag,
            columns=columns,
            before=self.before,
            after=self.after,
            row_size=row_size,
            row_tasks=-(-rows // row_size),
            column_tasks=len(tiles) - 1,
            dst_row=self.dst.strides[self.row],
            cval=acc.bits(self.outside),
            slot=slot,
            pointers=pointers,
            positions=positions,
            ring=self.rings[0],
            rings=starts[0],
            last=len(steps) - 1,
            steps=steps,
        )
        # Stores of whole lines pass the caches by, where these do not hold the image and the result.
        streams = size == self.out.itemsize and 2 * size * math.prod(self.dst.shape) > target.last_level_cache()
        hows = [how for how, _ in groups] + [self.steps[-1][0]._replace(streams=streams)]
        kernel = filter_rows(src.code, self.out.code, acc.code, *hows)
        tasks = math.prod(self.dst.shape[: self.row]) * args.row_tasks * args.column_tasks
        return Launch(kernel, args, tasks, 1, starts[-1], np.concatenate(self.tables))

    def rows_at(self) -> Array:
        """The offset of the row of the image at each row that results read."""
        count = self.dst.shape[self.row] + self.lags[-1]
        found = sources(self.src.shape[self.row], self.low, count, self.modes.get(self.row))
        return np.where(found < 0, OUTSIDE, found * self.src.strides[self.row])

    def margin_at(self, columns: int, made: int) -> Array:
        """The element at each position before a row of the image, and behind it; -1 for a constant."""
        before, size, behind = (n // self.inner for n in (self.before, columns, made + self.after - columns))
        ends = ((-before, before), (size, max(0, behind)))
        found = np.concatenate([sources(size, at, n, self.modes.get(self.column)) for at, n in ends])[:, None]
        return np.where(found < 0, -1, found * self.inner + np.arange(self.inner))

    def planes_at(self) -> Array:
        """For each plane of the result its offset, and the offsets of the planes of the image that it reads."""
        lead = self.dst.shape[: self.row]
        at = np.indices(lead).reshape(len(lead), math.prod(lead))
        found = [self.dst.strides[: self.row] @ at]
        for offsets in self.planes:
            index = np.zeros_like(at)
            for axis, (size, first) in enumerate(zip(self.src.shape, offsets, strict=False)):
                index[axis] = sources(size, first, lead[axis], self.modes.get(axis))[at[axis]]
            found.append(np.where((index < 0).any(0), OUTSIDE, self.src.strides[: self.row] @ index))
        return np.stack(found, 1)


def _rounded(weights: Sequence[float], acc: ElementType) -> Array:
    """Weights in the computed type, whose sum is as near to the sum of the weights as the largest one allows."""
    given = np.array(weights)
    found = given.astype(acc.dtype)
    if acc.name == "float32":
        found[np.abs(given).argmax()] += given.sum() - found.sum(dtype=np.float64)
    return found


def _joined(windows: Sequence[ImageWindow], shape: tuple[int, ...]) -> list[tuple[ImageWindow, ...]]:
    """Windows by passes: two along neighbouring axes are one pass where that is possible.

    In one pass the image is extended, not the result of the first window: a constant has to be 0.
    """
    found: list[tuple[ImageWindow, ...]] = []
    for window in windows:
        both = (*(found[-1] if found else ()), window)
        axes = sorted(axis for one in both for axis in one.axes)
        outside = set().union(*(one.outside for one in both))
        is_one = len(both) == len(axes) == 2 and axes[1] - axes[0] == 1
        if is_one and outside <= {0} and math.prod(shape[axes[1] + 1 :]) < NARROW:
            found[-1] = both
        else:
            found.append((window,))
    return found


@functools.lru_cache(maxsize=128)
def _program(windows: tuple[ImageWindow, ...], *arrays: Memory) -> Program:
    """The program of windows on three buffers: the image, the result, and what is between two passes."""
    passes, launches, given, seconds = _joined(windows, arrays[1].shape), [], 0, 0.0
    for k, joined in enumerate(passes):
        to = 2 - (len(passes) - k) % 2
        made = _Pass(joined, arrays[given], arrays[to])
        launches.append(made.launch((given, to)))
        seconds += math.prod(arrays[to].shape) * sum(6 + len(terms) for _, terms, _ in made.steps) * 4e-11
        given = to
    return Program(launches, seconds)


def run(windows: Sequence[ImageWindow], image: Array, out: Array) -> None:
    """Write the windows' results on an image, one after the other, to an array.

    The array has the image's shape, or a window tells by its offsets where the first element is. Between two passes
    numbers are rounded to the type of `out`, which may share memory with the image.
    """
    if out.size == 0:
        return
    source, final = (x[None].view(np.uint8) if x.dtype == np.bool_ else x[None] for x in (image, out))
    source = source if _is_dense(source) else np.ascontiguousarray(source)
    between = np.empty(final.shape, final.dtype)
    made = final if _is_dense(final) and not np.may_share_memory(source, final) else np.empty_like(between)
    arrays = (source, made, between)
    program = _program(tuple(windows), *(Memory(x.dtype, x.shape, x.strides) for x in arrays))
    program.run([address_of(x) for x in arrays])
    if made is not final:
        final[...] = made


def _is_dense(x: Array) -> bool:
    """Whether an image is dense, but for its first axis where rows are along that."""
    return x[0].flags.c_contiguous or (x.ndim > 2 and x[0, 0].size >= NARROW and x[0, 0].flags.c_contiguous)
