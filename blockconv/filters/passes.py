"""From windows to programs: a filter is a list of windows, each over one axis or several, in scipy's order."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.types import Array, ElementType, element
from blockconv.filters.codegen import (
    GREATEST,
    LEAST,
    MEAN,
    NONE,
    ORDERED,
    PAIR_DIFFERENCES,
    PAIR_SUMS,
    PAIRS,
    RANK,
    WEIGHTED,
    Reducing,
    lanes_of,
)
from blockconv.filters.kernels import OUTSIDE, FilterArgs, FilterSpec, FilterWindow, filter_rows
from blockconv.runtime import OWN_TABLE, Buffer, Launch, Program, address_of

TYPES = ("uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "float32", "float64")
NARROW = 256  # bytes: where the elements behind an axis are fewer, vectors are along the axis
TASK_ROWS, RING_BYTES = 64, 128 * 1024


class ImageWindow(NamedTuple):
    """A reduction of some elements around each element of an image, which has a first axis of size 1.

    kind: of `codegen`. WEIGHTED stands for whichever kind gives scipy's results.
    offsets: of these elements, one number for each axis of the image.
    weights: of each, for weighted sums.
    modes: the border of each axis, by scipy's names.
    cval: the number outside, for the border "constant".
    rank: for the kind RANK.
    """

    kind: int
    offsets: tuple[tuple[int, ...], ...]
    weights: tuple[float, ...]
    modes: tuple[str, ...]
    cval: float
    rank: int = 0

    @property
    def axes(self) -> list[int]:
        """The axes along which it has more than the element itself."""
        return [axis for axis in range(len(self.modes)) if any(offset[axis] for offset in self.offsets)]

    @property
    def is_constant(self) -> bool:
        return any(self.modes[axis] == "constant" for axis in self.axes)


class Strided(NamedTuple):
    """An image and a result of one shape, by strides in bytes."""

    shape: tuple[int, ...]
    src: tuple[int, ...]
    dst: tuple[int, ...]


def sources(size: int, before: int, after: int, mode: str) -> Array:
    """The index of the element at each position from -before to size + after; -1 for a constant."""
    at = np.arange(-before, size + after)
    if mode == "nearest" or (size == 1 and mode != "constant"):
        return at.clip(0, size - 1)
    if mode == "constant":
        return np.where((at >= 0) & (at < size), at, -1)
    if mode == "wrap":
        return at % size
    period = 2 * size if mode == "reflect" else 2 * size - 2
    at %= period
    return np.where(at < size, at, period - at - (mode == "reflect"))


# ---------------------------------------------------------------- types


def is_exact(window: ImageWindow, src: ElementType, most: float) -> bool:
    """Whether all sums of integers stay below a number, so that their order does not matter."""
    numbers = np.array([*window.weights, *[window.cval] * window.is_constant])
    if src.is_float or not (np.abs(numbers) < most).all() or (numbers % 1).any():
        return False
    largest = float(max(map(abs, src.bounds)))
    if window.is_constant:
        largest = max(largest, abs(window.cval))
    return bool(np.abs(window.weights or [len(window.offsets)]).sum() * largest < most)


def computed_by(window: ImageWindow, src: ElementType, dst: ElementType) -> tuple[int, str, float]:
    """The kind of reduction, the type that it is computed in for scipy's results, and the error of a checked sum, or 0.

    Integers are scipy's to the last bit: sums that are exact in any order, or in float64 in scipy's order.
    """
    kind: int = window.kind
    narrow = src.itemsize <= 2 or src.name == "float32"
    if kind in (GREATEST, LEAST, RANK):
        fits = not window.is_constant or src.is_float or (src.bounds[0] <= window.cval <= src.bounds[1])
        whole = src.is_float or not window.is_constant or window.cval % 1 == 0
        return kind, src.name if src == dst and src.name != "int64" and fits and whole else "float64", 0
    if dst.is_float:
        return kind, "float32" if narrow and dst.itemsize == 4 else "float64", 0
    limits = {"int16": 2.0**15, "float32": 2.0**21 if kind == MEAN else 2.0**24, "float64": 2.0**53}
    for name, limit in limits.items():
        if (narrow or name == "float64") and is_exact(window, src, limit):
            return kind, name, 0
    error = (len(window.weights) + 3) * 2.0**-24 * np.abs(window.weights).sum() * 255
    if src.itemsize == 1 and error < 2.0**-11 and not window.is_constant:
        return ORDERED, "float32", error
    return (ORDERED if kind == WEIGHTED else kind), "float64", 0


def levels_of(window: ImageWindow) -> int:
    """How often neighbours are combined, so that the window is made of few of these."""
    count = len(window.offsets)
    axes = window.axes
    if count < 6 or window.kind not in (MEAN, GREATEST, LEAST) or len(axes) != 1:
        return 0
    first, last = window.offsets[0][axes[0]], window.offsets[-1][axes[0]]
    if last - first + 1 != count:
        return 0
    if window.kind != MEAN:
        return count.bit_length() - 1
    return min(range(count.bit_length()), key=lambda k: (count >> k) + count % (1 << k) + 2 * k)


def paired(window: ImageWindow) -> tuple[int, tuple[tuple[int, ...], ...], tuple[float, ...]]:
    """An ordered sum along one axis as scipy adds: (kind, offsets, weights).

    scipy begins with the middle element, and goes on from the left. It adds the elements of a symmetric window in
    pairs, or subtracts them.
    """
    offsets, weights = window.offsets, window.weights
    count = len(weights)
    if len(window.axes) != 1:
        return ORDERED, offsets, weights
    w, middle, least = np.array(weights), count // 2, np.finfo(np.float64).eps
    left, right = w[:middle], w[::-1][:middle]
    for kind, apart in ((PAIR_SUMS, left - right), (PAIR_DIFFERENCES, left + right)):
        if count % 2 and (np.abs(apart) <= least).all():
            pairs = [offset for k in range(middle) for offset in (offsets[k], offsets[-1 - k])]
            return kind, (offsets[middle], *pairs), (weights[middle], *weights[:middle])
    return ORDERED, (offsets[-1], *offsets[:-1]), (weights[-1], *weights[:-1])


# ---------------------------------------------------------------- programs


class RowPlan(NamedTuple):
    """How an image is cut into planes, rows and elements of a row.

    row: the axis of rows.
    column: the axis along which windows go in a row; None where they do not.
    inner: elements from one to the next along it.
    """

    row: int
    column: int | None
    inner: int


def plan_of(window: ImageWindow, second: ImageWindow | None, shape: Sequence[int], itemsize: int) -> RowPlan | None:
    """How a window, perhaps with a second one along rows, goes over an image; None if two are not one pass."""
    axes = window.axes

    def behind(axis: int) -> int:
        return math.prod(shape[axis + 1 :])

    if second is not None:
        (row, *others), (column, *more) = axes or [0], second.axes or [0]
        together = not others and not more and column == row + 1
        return RowPlan(row, column, behind(column)) if together and behind(column) * itemsize < NARROW else None
    last = max(axes, default=len(shape) - 1)
    if axes == [last] and behind(last) * itemsize >= NARROW:
        return RowPlan(last, None, 1)
    return RowPlan(last - 1, last, behind(last))


Pass = tuple[ImageWindow, ImageWindow | None, RowPlan]


@functools.lru_cache(maxsize=128)
def passes_of(
    windows: tuple[ImageWindow, ...], shape: tuple[int, ...], src: ElementType, dst: ElementType
) -> tuple[Pass, ...]:
    """The passes over memory that windows take: two neighbouring windows are one where that is possible."""
    if len(windows) > 1 and commute(windows, src, dst):
        windows = tuple(sorted(windows, key=lambda window: window.axes))
    found: list[Pass] = []
    left = list(windows)
    while left:
        first, second = left[0], left[1] if len(left) > 1 else None
        given = dst if found else src
        plan = plan_of(first, second, shape, dst.itemsize) if second and can_join(first, second, given, dst) else None
        if plan is None:
            second, plan = None, plan_of(first, None, shape, dst.itemsize)
        assert plan is not None
        found.append((first, second, plan))
        del left[: 1 if second is None else 2]
    return tuple(found)


def commute(windows: Sequence[ImageWindow], src: ElementType, dst: ElementType) -> bool:
    """Whether windows along one axis each give the same in any order: within rounding of floats, else to the bit."""
    if any(len(window.axes) != 1 or (window.is_constant and window.cval) for window in windows):
        return False
    kinds = {window.kind for window in windows}
    if kinds <= {GREATEST} or kinds <= {LEAST}:
        return src == dst
    if dst.is_float or kinds != {WEIGHTED}:
        return dst.is_float and kinds <= {WEIGHTED, MEAN}
    # Integers of up to 16 bits wrap, as sums and products of remainders do.
    exact = is_exact(windows[0], src, 2.0**31) and all(is_exact(window, dst, 2.0**31) for window in windows)
    return exact and src == dst and dst.itemsize <= 2


def can_join(first: ImageWindow, second: ImageWindow, src: ElementType, dst: ElementType) -> bool:
    """Whether two windows may be computed in one type, with one constant."""
    same = computed_by(first, src, dst)[1] == computed_by(second, dst, dst)[1]
    compares = any(window.kind in (GREATEST, LEAST, RANK) for window in (first, second))
    return (same or not compares) and (first.cval == second.cval or not first.is_constant or not second.is_constant)


@functools.lru_cache(maxsize=128)
def program_of(
    first: ImageWindow, second: ImageWindow | None, plan: RowPlan, geometry: Strided, src: ElementType, dst: ElementType
) -> Program:
    """The program of a pass. Buffer 0 is the image, buffer 1 the result."""
    kinds = [computed_by(first, src, dst)] + ([computed_by(second, dst, dst)] if second else [])
    acc = max((element(name) for _, name, _ in kinds), key=lambda type: type.itemsize)
    made = _Pass(first, second, plan, geometry, acc)
    how, one = made.words(first, *kinds[0])
    then, two = made.words(second, *kinds[1]) if second else (Reducing(NONE), one)
    constant = first if first.is_constant or second is None else second
    args = FilterArgs(
        src=Buffer(0),
        end=src.itemsize + sum((n - 1) * max(0, by) for n, by in zip(geometry.shape, geometry.src, strict=True)),
        dst=Buffer(1),
        table=OWN_TABLE,
        dst_row=geometry.dst[plan.row],
        constant=first.is_constant,
        in_place=plan.column is None or second is not None,
        cval=acc.bits(constant.cval if constant.is_constant else 0),
        first=one,
        second=two,
        **made.sizes,
    )
    kernel = filter_rows(FilterSpec(src.code, dst.code, acc.code, how, then))
    scratch = args.addresses + 8 * (2 + max(one.addresses, two.addresses))
    terms = 6 + len(first.offsets) + (len(second.offsets) if second else 0)
    seconds = math.prod(geometry.shape) * terms / lanes_of(acc) * 0.5e-9
    tasks = math.prod(geometry.shape[: plan.row]) * args.row_tasks * args.column_tasks
    return Program([Launch(kernel, args, tasks, 1, scratch, np.concatenate(made.table))], seconds)


class _Pass:
    """The tables of a pass, and the sizes of its tasks and its scratch."""

    def __init__(
        self, first: ImageWindow, second: ImageWindow | None, plan: RowPlan, geometry: Strided, acc: ElementType
    ) -> None:
        self.first, self.second, self.plan, self.acc = first, second, plan, acc
        self.table: list[Array] = []
        shape, row = geometry.shape, plan.row
        of_rows = [offset[row] for offset in first.offsets]
        self.low, reach = min(of_rows), max(of_rows) - min(of_rows) + 1
        self.leading = sorted({offset[:row] for offset in first.offsets})
        self.add(_planes(shape[:row], self.leading, geometry, first.modes))
        rows, columns = shape[row], math.prod(shape[row + 1 :])
        source = sources(rows, -self.low, max(of_rows), first.modes[row])
        rows_at = self.add(np.where(source < 0, OUTSIDE, source * geometry.src[row]))
        margin, mode = 0, ""
        margin_at = 0
        if plan.column is not None:
            window, inner = second or first, plan.inner
            far, mode = max(abs(offset[plan.column]) for offset in window.offsets), window.modes[plan.column]
            found = sources(shape[plan.column], far, far, mode)
            found = np.concatenate([found[:far], found[found.size - far :]])[:, None]
            margin, margin_at = far * inner, self.add(np.where(found < 0, -1, found * inner + np.arange(inner)))
        rings = len(self.leading) + (0 if plan.column is not None and second is None else levels_of(first))
        least = max(4 * margin, 512, RING_BYTES // (acc.itemsize * reach * rings))
        is_whole = columns <= 2 * least or (margin and mode == "wrap")
        column_size = columns if is_whole else -(-columns // (columns // least))
        row_size = min(rows, max(TASK_ROWS, 4 * reach))
        slot = -(-(column_size + 2 * margin + 2 * lanes_of(acc)) * acc.itemsize // 128) * 128 + 64
        self.positions = row_size + reach - 1
        pointers = slot * (3 + reach * rings)
        self.sizes = {
            "planes": len(self.leading),
            "rows_at": rows_at,
            "margin_at": margin_at,
            "rows": rows,
            "reach": reach,
            "columns": columns,
            "margin": margin,
            "row_size": row_size,
            "row_tasks": -(-rows // row_size),
            "column_size": column_size,
            "column_tasks": -(-columns // column_size),
            "slot": slot,
            "pointers": pointers,
            "addresses": pointers + 8 * self.positions * rings,
            "positions": self.positions,
        }

    def add(self, words: Any) -> int:
        """Add words to the table, and give their offset there."""
        at = 8 * sum(map(len, self.table))
        self.table.append(np.asarray(words, np.int64).reshape(-1))
        return at

    def words(self, window: ImageWindow, kind: int, name: str, error: float) -> tuple[Reducing, FilterWindow]:
        """The words of a window, and its reduction."""
        acc, level = self.acc, 0
        if window is self.second or self.second is not None or self.plan.column is None:
            level = levels_of(window)
        kind, offsets, weights = paired(window) if kind == ORDERED else (kind, window.offsets, window.weights)
        places, count = self.places(window, offsets, level), len(offsets)
        is_checked = error > 0 and acc.name == "float32"
        types = [element("float64"), acc] if is_checked else [acc]
        number = acc if acc.is_float else element("float32")
        made = FilterWindow(
            terms=(count + 1) // 2 if kind in PAIRS else len(places),
            addresses=len(places),
            places=self.add([(8 * pointer, column * acc.itemsize) for pointer, column in places]),
            weights=self.add([kind.bits(w) for kind in types for w in _rounded(weights, kind)] if weights else [0]),
            scale=number.bits(1 / count),
            bias=number.bits(0.5 / count if kind == MEAN else error),
            levels=level,
            step=self.plan.inner if window is self.second else 1,
        )
        return Reducing(kind, count if kind == RANK else 0, window.rank, is_checked), made

    def places(self, window: ImageWindow, offsets: Sequence[tuple[int, ...]], level: int) -> list[tuple[int, int]]:
        """For each term the number of its pointer, and the element in its row."""
        row, column, inner = self.plan
        margin = self.sizes["margin"]
        if level:
            start, boxes = window.offsets[0][window.axes[0]], _boxes(window, level)
            if window is self.second:
                return [(box, margin + (start + at) * inner) for box, at in boxes]
            ends = level * self.positions + (1 << level) - 1
            return [(box * ends + start - self.low + at, 0) for box, at in boxes]
        if window is self.second:
            return [(0, margin + offset[self.plan.row + 1] * inner) for offset in offsets]
        across = [0 if column is None or self.second else margin + offset[column] * inner for offset in offsets]
        rows = [self.positions * self.leading.index(offset[:row]) + offset[row] - self.low for offset in offsets]
        return list(zip(rows, across, strict=True))


def _boxes(window: ImageWindow, level: int) -> list[tuple[int, int]]:
    """The parts of a window: whether it is a combination of 2 ** level neighbours, and where it begins."""
    count, size = len(window.offsets), 1 << level
    if window.kind != MEAN:
        return [(1, 0), (1, count - size)]
    whole = count // size * size
    return [(1, at) for at in range(0, whole, size)] + [(0, at) for at in range(whole, count)]


def _rounded(weights: Sequence[float], acc: ElementType) -> Array:
    """Weights in the computed type, whose sum is as near to the sum of the weights as the largest one allows."""
    given = np.array(weights)
    found = given.astype(acc.dtype)
    if acc.name == "float32":
        found[np.abs(given).argmax()] += given.sum() - found.sum(dtype=np.float64)
    return found


def _planes(lead: Sequence[int], leading: Sequence[tuple[int, ...]], geometry: Strided, modes: Sequence[str]) -> Array:
    """For each plane of the result its offset, and the offsets of the planes of the image that it reads."""
    found = np.zeros((*lead, 1 + len(leading)), np.int64)
    outside = np.zeros(found.shape, bool)
    for axis, size in enumerate(lead):
        shape = [-1 if k == axis else 1 for k in range(len(lead))]
        found[..., 0] += np.arange(size).reshape(shape) * geometry.dst[axis]
        for k, offset in enumerate(leading):
            at = sources(size, max(0, -offset[axis]), max(0, offset[axis]), modes[axis])
            at = at[max(0, offset[axis]) :][:size].reshape(shape)
            found[..., 1 + k] += at * geometry.src[axis]
            outside[..., 1 + k] |= at < 0
    return np.where(outside, OUTSIDE, found)


# ---------------------------------------------------------------- arrays


def run(windows: Sequence[ImageWindow], image: Array, out: Array) -> None:
    """Write what the windows make of an image, one after the other, to an array of its shape.

    Between two passes numbers are rounded to the type of `out`, which may share memory with the image.
    """
    if image.size == 0:
        return
    if not windows:
        out[...] = image
        return
    source, final = (x[None].view(np.uint8) if x.dtype == np.bool_ else x[None] for x in (image, out))
    made = np.empty(final.shape, final.dtype) if np.may_share_memory(source, final) else final
    passes = passes_of(tuple(windows), final.shape, element(source.dtype), element(final.dtype))
    for k, (first, second, plan) in enumerate(passes):
        to = made if (len(passes) - k) % 2 else np.empty(final.shape, final.dtype)
        source = source if _fits(source, plan) else np.ascontiguousarray(source)
        written = to if _fits(to, plan) else np.empty(final.shape, final.dtype)
        geometry = Strided(final.shape, source.strides, written.strides)
        program = program_of(first, second, plan, geometry, element(source.dtype), element(final.dtype))
        program.run([address_of(source), address_of(written)])
        if written is not to:
            to[...] = written
        source = to
    if made is not final:
        final[...] = made


def _fits(array: Array, plan: RowPlan) -> bool:
    """Whether the axes behind that of rows are one dense axis."""
    dense = array.itemsize
    for axis in reversed(range(plan.row + 1, array.ndim)):
        if array.shape[axis] > 1 and array.strides[axis] != dense:
            return False
        dense *= array.shape[axis]
    return True
