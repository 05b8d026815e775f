"""From windows to programs: a filter is a list of windows, each over one axis or several, in scipy's order."""

from __future__ import annotations

import contextlib
import contextvars
import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from blockconv.core import target
from blockconv.core.python import zipped
from blockconv.core.types import Array, ElementType, element
from blockconv.filters.codegen import EXTREMES, MEAN, ORDERED, RANK, ROUNDED, STORED, STREAMED, SUM, WEIGHTED, Reducing
from blockconv.filters.kernels import BEYOND, FilterArgs, FilterStep, filter_rows
from blockconv.runtime import OWN_TABLE, Buffer, Launch, Program, address_of

TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "float32", "float64")
NARROW = 64  # where the elements behind an axis are fewer, vectors are along the axis
TASK_ROWS, RING_BYTES = 64, 128 * 1024
MOST_KNOWN = 9  # terms of a sum or an extreme that a kernel is compiled for

Term = tuple[int, int, int]  # a source, a row, a column


class ImageWindow(NamedTuple):
    """A reduction of some elements around each element of an image, which has a first axis of size 1.

    kind: of `codegen`. WEIGHTED stands for whichever kind gives scipy's results.
    offsets: of these elements, one number for each axis of the image.
    mode: the border, by scipy's name.
    cval: the number outside, for the border "constant".
    weights: of each, for weighted sums.
    rank: for the kind RANK.
    is_line: whether it has all elements from one to another one along an axis, which scipy adds in an order of its own.
    """

    kind: int
    offsets: tuple[tuple[int, ...], ...]
    mode: str
    cval: float
    weights: tuple[float, ...] = ()
    rank: int = 0
    is_line: bool = False

    @property
    def axes(self) -> list[int]:
        """The axes along which it has more than the element itself."""
        return [axis for axis, offsets in enumerate(zipped(*self.offsets)) if any(offsets)]

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


def sources(size: int, at: Array, mode: str | None) -> Array:
    """The index of the element at each position of an axis; -1 for a constant."""
    if mode == "constant":
        return np.where((at >= 0) & (at < size), at, -1)
    if mode in (None, "nearest"):
        return at.clip(0, size - 1)
    whole = np.arange(size)
    period = np.append(whole, {"reflect": whole[::-1], "mirror": whole[-2:0:-1]}.get(mode, whole[:0]))
    return period[at % len(period)]


# ---------------------------------------------------------------- types


def _sum(window: ImageWindow, src: ElementType) -> float:
    """The largest sum of the magnitudes of a window's terms."""
    largest = max(map(float, map(abs, (*src.bounds, *window.outside))))
    return float(np.abs(window.weights or [len(window.offsets)]).sum() * largest)


def _error(window: ImageWindow, src: ElementType, acc: str) -> float:
    """A bound of what the sum differs from the sum in float64 in scipy's order, where each sum so far is rounded."""
    sizes = np.abs(window.weights)
    unit = 2.0**-24 if acc == "float32" else len(sizes) * 2.0**-52
    return unit * _sum(window._replace(weights=(*sizes.cumsum(), *3 * sizes)), src)


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
    for name, bits in (("int16", 15), ("float32", 21 if kind == MEAN else 24), ("float64", 53)):
        if is_whole and (narrow or name == "float64") and _sum(window, src) < 2**bits:
            return kind, name
    if kind != WEIGHTED:
        return kind, "float64"
    is_small = src.itemsize == 1 and not window.outside and _error(window, src, "float32") < 2.0**-9
    return ORDERED, "float32" if is_small else "float64"


def in_order(window: ImageWindow) -> list[tuple[int, int, float, float]]:
    """The products of an ordered sum, in the order in which scipy adds them.

    A product is (term, other term, weight, factor): (term + factor * other term) * weight, with terms by number. Along
    one axis scipy begins with the middle element, and goes on from the left. It adds the elements of a symmetric window
    in pairs, or subtracts them. Otherwise it begins with the last element.
    """
    weights, order = np.array(window.weights), [*range(len(window.weights))]
    middle, last = len(order) // 2, order[-1]
    if window.is_line:
        for sign in (1.0, -1.0):
            apart = np.abs(weights - sign * weights[::-1])[:middle]
            if last % 2 == 0 and (apart <= np.finfo(np.float64).eps).all():
                pairs = ((k, last - k, weights[k], sign) for k in range(middle))
                return [(middle, middle, weights[middle], 0.0), *pairs]
        order = [last, *order[:-1]]
    return [(k, k, weights[k], 0.0) for k in order]


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

    row: the axis of rows. column: the axis of columns. inner: elements from one to the next along it.
    """

    def __init__(self, windows: Sequence[ImageWindow], src: Memory, dst: Memory) -> None:
        self.src, self.dst, self.out = src, dst, element(dst.dtype)
        self.modes = {axis: window.mode for window in windows for axis in window.axes}
        axes = sorted(self.modes) or [len(src.shape) - 1]
        self.column = axes[-1] + (len(axes) == 1 and math.prod(src.shape[axes[-1] + 1 :]) >= NARROW)
        self.row, self.inner = self.column - 1, math.prod(src.shape[self.column + 1 :])
        lows, highs = zipped(*(window.reach(self.column) for window in windows))
        self.before, self.after = -min(0, *lows) * self.inner, max(0, *highs) * self.inner
        self.low = sum(window.reach(self.row)[0] for window in windows)
        self.outside = max(set().union(*(window.outside for window in windows)), default=0.0)
        self.planes = sorted({offset[: self.row] for offset in windows[0].offsets})
        # The planes, then the steps; and how many rows of each are needed at a time.
        self.sources: list[tuple[Any, FilterStep]] = [(None, FilterStep.with_zeros())] * len(self.planes)
        self.rows = [1] * len(self.planes)
        self.tables: list[Array] = []
        typed = [*zip(windows, (element(src.dtype), self.out), strict=False)]
        kinds, names = zipped(*(computed_by(window, type, self.out) for window, type in typed))
        self.acc = max(map(element, names), key=lambda type: type.itemsize)
        source = None
        for (window, type), kind in zipped(typed, kinds):
            source = self.window(window, type, kind, source)

    def window(self, window: ImageWindow, src: ElementType, kind: int, source: int | None) -> int:
        """Add the steps of a window on planes of the image, or on a step; the number of the last one."""
        low, acc, count = window.reach(self.row)[0], self.acc, len(window.offsets)
        number = acc if acc.is_float else element("float32")
        terms = [
            (
                self.planes.index(offset[: self.row]) if source is None else source,
                offset[self.row] - low,
                offset[self.column] * self.inner,
            )
            for offset in window.offsets
        ]
        words, pairs = [*map(acc.bits, _rounded(window.weights, acc))], []
        if kind == MEAN:
            words = [number.bits(x) for x in (1 / count, (not self.out.is_float) / 2 / count)]
        elif kind == ORDERED:
            words.append(acc.bits(_error(window, src, acc.name)))
            pairs = in_order(window)
        if kind in (MEAN, *EXTREMES) and window.is_line:
            terms = self.combined(Reducing(kind if kind in EXTREMES else SUM), terms)
        words += np.array(pairs, "i8, i8, f8, f8").view(np.int64).tolist()
        return self.step(Reducing(kind, ROUNDED, rank=window.rank), terms, words, len(pairs))

    def combined(self, how: Reducing, terms: list[Term]) -> list[Term]:
        """The terms of a mean or an extreme along an axis: elements, or combinations of 2, 4, 8, ... neighbours."""
        count, overlap, made = len(terms), how.kind in EXTREMES, [terms[0][0]]
        levels = min(range(count.bit_length()), key=lambda k: 3 * k + (count >> k))
        for k in range(levels):
            row, column = (later - first for first, later in zipped(terms[0][1:], terms[1 << k][1:]))
            made.append(self.step(how, [(made[-1], 0, 0), (made[-1], row, column)]))
        return [(made[level], *terms[start][1:]) for level, start in parts_of(count, levels, overlap)]

    def step(self, how: Reducing, reads: list[Term], words: Sequence[int] = (), ordered: int = 0) -> int:
        """Add a step; its number."""
        count = len(reads)
        if how.kind == RANK or count <= MOST_KNOWN:
            how = how._replace(terms=count)
        lags = [self.sources[source][1].lag + row for source, row, _ in reads]
        for lag, (source, *_) in zipped(lags, reads):
            self.rows[source] = max(self.rows[source], max(lags) - lag + 1)
        places, weights = self.add(np.array(reads) * (1, 1, self.acc.itemsize)), self.add(words)
        made = FilterStep.with_zeros(lag=max(lags), terms=count, places=places, weights=weights, ordered=ordered)
        self.sources.append((how, made))
        self.rows.append(1)
        return len(self.rows) - 1

    def add(self, words: Any) -> int:
        """Add words to the tables, and give their offset there."""
        self.tables.append(np.asarray(words, np.int64).reshape(-1))
        return 8 * sum(map(len, self.tables[:-1]))

    def launch(self, buffers: tuple[int, int]) -> Launch:
        """The kernel on the image in the first buffer, with the result in the second."""
        acc, size, (last, final) = self.acc, self.acc.itemsize, self.sources[-1]
        columns, made = (math.prod(memory.shape[self.row + 1 :]) for memory in (self.src, self.dst))
        rows, margin = self.dst.shape[self.row], self.before + self.after
        least = max(4 * margin, 512, RING_BYTES // (size * sum(self.rows)))
        tiles = 1 if self.modes.get(self.column) == "wrap" else max(1, made // least)
        slot = ((made // tiles + 1 + 2 * margin) * size // 128 + 2) * 128 + 64  # with room for a vector
        row_size = min(rows, max(TASK_ROWS, 4 * final.lag))
        positions, pointers = row_size + final.lag, 8 * max(step.terms for _, step in self.sources)
        first = -(-(pointers + 8 * positions * len(self.rows) + self.before * size) // 64) * 64
        rings = [*itertools.accumulate((slot * n for n in self.rows), initial=first)]
        # Stores of whole lines pass the caches by, where these do not hold the image and the result.
        streams = size == self.out.itemsize and 2 * size * math.prod(self.dst.shape) > target.last_level_cache()
        self.sources[-1] = last._replace(result=STREAMED if streams else STORED), final
        numbers = {how: k for k, how in enumerate(dict.fromkeys(how for how, _ in self.sources[::-1] if how))}
        steps = [
            step._replace(rows=n, ring=ring, how=numbers.get(how, 0))
            for (how, step), n, ring in zip(self.sources, self.rows, rings, strict=False)
        ]
        margins = self.margins(columns, made)
        args = FilterArgs(
            src=Buffer(buffers[0]),
            dst=Buffer(buffers[1]),
            tables=OWN_TABLE,
            planes=len(self.planes),
            planes_at=self.add(self.planes_at()),
            rows_at=self.add(self.offsets(self.src, self.row, self.low, rows + final.lag)),
            margin_at=self.add(margins),
            margins=len(margins),
            constant_at=self.add(np.full(slot // size, self.outside, acc.dtype).view(np.int64)),
            rows=rows,
            lag=final.lag,
            columns=columns,
            made=made,
            before=self.before,
            after=self.after,
            row_size=row_size,
            row_tasks=-(-rows // row_size),
            column_tasks=tiles,
            dst_row=self.dst.strides[self.row],
            slot=slot,
            pointers=pointers,
            positions=positions,
            sources=len(steps),
            steps=steps,
        )
        kernel = filter_rows(element(self.src.dtype).code, self.out.code, acc.code, *numbers)
        tasks = math.prod(self.dst.shape[: self.row]) * args.row_tasks * tiles
        return Launch(kernel, args, tasks, 1, rings[-1], np.concatenate(self.tables))

    def offsets(self, memory: Memory, axis: int, first: int, count: int) -> Array:
        """The offsets along an axis of the image's elements, from number `first` on, in the image or in the result."""
        found = sources(memory.shape[axis], np.arange(first, first + count), self.modes.get(axis))
        return np.where(found < 0, BEYOND, found * memory.strides[axis])

    def planes_at(self) -> Array:
        """For each plane of the result its offset, and the offsets of the planes of the image that it reads."""
        columns = []
        for memory, plane in ((self.dst, (0,) * self.row), *((self.src, plane) for plane in self.planes)):
            ends = zip(plane, self.dst.shape, strict=False)
            of_axes = [self.offsets(memory, axis, first, n) for axis, (first, n) in enumerate(ends)]
            columns.append(functools.reduce(np.add.outer, of_axes, np.zeros(1, int)).ravel())
        return np.stack(columns, 1)

    def margins(self, columns: int, made: int) -> Array:
        """For each element around a row of the image its column, and the one that it repeats; -1 for a constant."""
        at = np.append(np.arange(-self.before, 0), np.arange(columns, max(columns, made + self.after)))
        found = sources(columns // self.inner, at // self.inner, self.modes.get(self.column))
        return np.stack([at, np.where(found < 0, -1, found * self.inner + at % self.inner)], 1)


def _rounded(weights: Sequence[float], acc: ElementType) -> Array:
    """Weights in a type, whose sum is as near to the sum of the weights as the largest one allows."""
    given = np.array(weights)
    found = given.astype(acc.dtype)
    if weights:
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
        if (
            len(both) == 2
            and np.diff(axes).tolist() == [1]
            and outside <= {0}
            and math.prod(shape[axes[1] + 1 :]) < NARROW
        ):
            found[-1] = both
        else:
            found.append((window,))
    return found


@functools.lru_cache(maxsize=128)
def _program(windows: tuple[ImageWindow, ...], *arrays: Memory) -> Program:
    """The program of windows on three buffers: the image, the result, and what is between two passes."""
    passes, launches, given = _joined(windows, arrays[1].shape), [], 0
    for k, joined in enumerate(passes):
        to = 2 - (len(passes) - k) % 2
        launches.append(_Pass(joined, arrays[given], arrays[to]).launch((given, to)))
        given = to
    each = sum(10 + len(window.offsets) for window in windows) * 2e-11
    return Program(launches, each * math.prod(arrays[1].shape))


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
    runs = _runs.get()
    if runs is not None:
        runs.append((program, arrays))
    if made is not final:
        final[...] = made


Runs = list[tuple[Program, tuple[Array, ...]]]
_runs: contextvars.ContextVar[Runs | None] = contextvars.ContextVar("_runs", default=None)


@contextlib.contextmanager
def recording() -> Iterator[Runs]:
    """The programs that run meanwhile, each with its arrays: the image, the result, and one between them."""
    found: Runs = []
    token = _runs.set(found)
    try:
        yield found
    finally:
        _runs.reset(token)


def _is_dense(x: Array) -> bool:
    """Whether an image is dense, but for its first axis where rows are along that."""
    return x[0].flags.c_contiguous or (x.ndim > 2 and x[0, 0].size >= NARROW and x[0, 0].flags.c_contiguous)
