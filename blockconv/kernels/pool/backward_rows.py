"""The row of the gradients of pools: see `backward`, whose kernels it binds."""

import functools
import math
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.types import FLOATS
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry, channel_vectors
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.pool.backward import ALL, PoolBackwardArgs, pool_backward, pool_scatter, pool_spread
from blockconv.kernels.pool.blocking import Windows, windows
from blockconv.kernels.table import Primitive, Row
from blockconv.runtime import OWN_TABLE, Buffer, Launch


def _lanes(request: Request) -> int:
    """Channels of a vector: 1 where none are contiguous in both arrays."""
    s, d, itemsize = request.source, request.destination, request.types.src.itemsize
    if not all(of.length > 1 and of.channel == itemsize for of in (s, d)):
        return 1
    lanes = request.machine.lanes(request.types.src.computed.itemsize)
    return min(lanes, 1 << (min(s.length, d.length, request.problem.ic).bit_length() - 1))


BAND = 1 << 16  # bytes of the input's gradient that a task computes, at the most, but for one row
SCATTERED = 128  # channels of a task that scatters
PLANE = 1 << 19  # bytes of a plane of sums, at the most
MOST_REPEATED = 8  # columns of a window whose pixels belong to no other, for which code of its own is made
# For a vector of the input, and each window that covers it; for an element that is scattered, and a vector of zeros.
PIXEL_CYCLES, WINDOW_CYCLES, SCATTER_CYCLES, CLEAR_CYCLES = 4.5, 4.5, 4, 2


def _by_planes(request: Request) -> bool:
    """Whether maxima of 16-bit floats are added in a plane of float32."""
    s, d, kind, (height, width) = request.source, request.destination, request.types.src, request.problem.dst_shape[2:]
    rows = s.col == d.col == kind.itemsize and d.row == width * d.col and s.length == d.length == 1
    plane = height * width * kind.computed.itemsize
    return bool(kind.is_half and request.problem.is_max and rows and plane <= PLANE)


@functools.lru_cache(maxsize=4096)
def _repeated(request: Request) -> int:
    """The `columns` of a `pool_spread`: 0 where windows have pixels in common, or pixels are not contiguous."""
    p, itemsize, (_, cols, ih, iw) = request.problem, request.types.src.itemsize, _axes(request)
    if p.is_max or request.destination.col != itemsize:
        return 0
    if (p.src_shape[2], ih, *cols.taps) == (1, 1, iw):  # an adaptive pool may have more windows of one row
        return ALL
    columns, count = int(cols.taps[0]), len(cols.first)
    follow = (cols.first == columns * np.arange(count)).all() and (cols.taps[:-1] == columns).all()
    fits = 0 < columns <= MOST_REPEATED and cols.taps[-1] <= columns and request.source.col == itemsize
    return columns if follow and fits else 0


def _by_vectors(request: Request) -> bool:
    """Whether vectors of channels are summed."""
    p, lanes = request.problem, _lanes(request)
    if not p.is_max:
        return lanes > 1
    if request.types.src.is_half:
        return not _by_planes(request)
    return lanes > 1 and _cycles_of_sums(request, lanes) < _cycles_of_scatter(request)


def _cycles_of_sums(request: Request, lanes: int) -> float:
    """Cycles to sum vectors of so many lanes."""
    p = request.problem
    pixels, outputs = (p.n * math.prod(shape[2:]) for shape in (p.dst_shape, p.src_shape))
    return -(-p.ic // lanes) * (pixels * PIXEL_CYCLES + outputs * p.taps * WINDOW_CYCLES)


def _cycles_of_scatter(request: Request) -> float:
    p = request.problem
    cleared = math.prod(p.dst_shape) * request.types.src.itemsize / request.machine.isa.vector_bytes
    return CLEAR_CYCLES * cleared + SCATTER_CYCLES * math.prod(p.src_shape)


class _Axes(NamedTuple):
    """The windows along both axes, and the input's rows and columns."""

    rows: Windows
    cols: Windows
    ih: int
    iw: int


def _axes(request: Request) -> _Axes:
    """The windows of a gradient. An average of all pixels takes rows that follow each other as one."""
    p, d = request.problem, request.destination
    rows, cols = windows(p.pool, "h"), windows(p.pool, "w")
    ih, iw = p.dst_shape[2:]
    is_one = p.src_shape[2:] == (1, 1) and (*rows.taps, *cols.taps) == (ih, iw) and d.row == iw * d.col
    if is_one and not p.is_max and not _by_vectors(request):
        one = np.ones(1, np.int64)
        return _Axes(rows._replace(first=0 * one, taps=one), cols._replace(taps=ih * iw * one), 1, ih * iw)
    return _Axes(rows, cols, ih, iw)


def _coverings(of: Windows, size: int, dilation: int) -> Any:
    """A `Covering` for each of so many pixels along an axis."""
    last, pixels = of.first + (of.taps - 1) * dilation, np.arange(size)
    # With dilation, the pixels of windows need not begin in the windows' order.
    start = np.searchsorted(np.maximum.accumulate(last), pixels, "left")
    end = np.searchsorted(np.minimum.accumulate(of.first[::-1])[::-1], pixels, "right")
    found = np.stack([start, np.maximum(start, end)], axis=1)
    begins = np.append(np.flatnonzero((found[1:] != found[:-1]).any(axis=1)) + 1, size)
    return np.column_stack([found, begins[np.searchsorted(begins, pixels, "right")] - pixels])


def _shares(of: Windows) -> Any:
    """1 / what an average counts of each window; 0 where it has no pixel."""
    return np.divide(1.0, of.counted, out=np.zeros(len(of.first)), where=of.taps > 0)


def _slots(request: Request) -> tuple[list[Any], int]:
    """Two tables of a `pool_spread`, its factors and its slots, and how many slots a vector of columns has.

    None, where sums are repeated.
    """
    type, (_, cols, _, iw) = request.types.src.computed, _axes(request)
    itemsize, lanes = type.itemsize, request.machine.lanes(type.itemsize)
    factors = np.zeros(-(-len(cols.first) // 2) * 2, type.name)
    factors[: len(cols.first)] = _shares(cols)
    if _repeated(request):
        return [factors.view(np.int64), []], 0
    vectors = -(-iw // lanes)
    pixels = np.arange(vectors * lanes)
    start = np.searchsorted(cols.first + cols.taps, pixels, "right")
    end = np.where(pixels < iw, np.searchsorted(cols.first, pixels, "right"), start)
    slots = int((end - start).max())
    at = (start[:, None] + np.arange(slots)).reshape(vectors, lanes, slots).transpose(0, 2, 1)
    keep = at < end.reshape(vectors, 1, lanes)
    base = np.where(keep.any(axis=2), np.where(keep, at, 1 << 40).min(axis=2), 0)[..., None]
    parts = []
    # If an adaptive pool has more windows than pixels, the windows of a vector may be further apart than its lanes.
    for first in range(0, int(np.where(keep, at - base, 0).max()) + 1, lanes):
        chosen = keep & (first <= at - base) & (at - base < first + lanes)
        words = np.concatenate([np.where(chosen, at - base - first, 0), np.where(chosen, -1, 0)], axis=2)
        held = np.ascontiguousarray(words, f"i{itemsize}").view(np.int64)
        parts.append(np.concatenate([np.minimum(base + first, len(cols.first)) * itemsize, held], axis=2))
    table = np.concatenate(parts, axis=1)
    slots = table.shape[1]
    return [factors.view(np.int64), table], slots


def _table(request: Request, runs) -> tuple[Any, dict[str, int], int]:
    """The table of a gradient, where its parts begin, and the slots of a vector of columns."""
    pool, (rows, cols, ih, iw) = request.problem.pool, _axes(request)
    dh, dw = getattr(pool, "dh", 1), getattr(pool, "dw", 1)
    columns: list[Any] = [[], []]
    slots = 0
    if not request.problem.is_max and not _by_vectors(request):
        columns, slots = _slots(request)
    shares = (_shares(axis).view(np.int64) for axis in (rows, cols))
    tables = _coverings(rows, ih, dh), _coverings(cols, iw, dw), *shares, runs, *columns
    parts = [np.asarray(part, np.int64).reshape(-1) for part in tables]
    ends = np.cumsum([8 * part.size for part in parts])
    names = "cols_at", "row_shares_at", "col_shares_at", "channels_at", "factors_at", "slots_at"
    return np.concatenate(parts), dict(zip(names, map(int, ends), strict=False)), slots


def _launch(request: Request) -> Launch:
    p, type, lanes = request.problem, request.types.src, _lanes(request)
    _, _, ih, iw = _axes(request)
    s, d, by_vectors = request.source, request.destination, _by_vectors(request)
    padded, most_channels = request.padded_oc, lanes if by_vectors or lanes == 1 else SCATTERED
    runs = np.array(channel_vectors(s, d, p.ic, most_channels, padded), np.int64)
    most, (table, at, slots) = request.machine.lanes(type.computed.itemsize), _table(request, runs)
    # Where pixels hold all channels, these are neighbours.
    inner = len(runs) if s.length == d.length == NO_BLOCK else 1
    row = iw * inner * lanes * type.itemsize
    made = (p.src_shape[3] + 2 * most) * type.computed.itemsize
    follow = [_planes_follow(p, *of, type.itemsize) for of in ((s, p.src_shape), (d, p.dst_shape))]
    plane = ih * iw * type.itemsize
    band = min(ih, max(1, BAND // row)) if by_vectors else ih
    args = PoolBackwardArgs(
        src=Buffer(0),
        dst=Buffer(1),
        idx=Buffer(2) if p.is_max else 0,
        table=OWN_TABLE,
        **at,
        slots=slots,
        made_at=made,
        vectors=len(runs),
        plane=plane if follow[1] else 0,
        src_plane=math.prod(p.src_shape[2:]) * type.itemsize if all(follow) else 0,
        inner=inner,
        band=band,
        n=p.n,
        ih=ih,
        iw=iw,
        oh=p.src_shape[2],
        ow=p.src_shape[3],
        source=s,
        destination=d,
    )
    images = request.dst.padded_shape(p.dst_shape)[0]
    if by_vectors:
        tasks = images * -(-ih // band) * (len(runs) // inner)
        chunk = chunk_of(tasks, row * band, request.threads)
        return Launch(pool_backward(type.code, lanes, p.is_max), args, tasks, chunk, 0, table)
    tasks = images * len(runs)
    chunk = chunk_of(tasks, plane * max(1, p.ic // len(runs)), request.threads)
    if p.is_max:
        scratch = (ih * iw + p.src_shape[3]) * type.computed.itemsize if type.is_half else 0
        return Launch(pool_scatter(type.code, most), args, tasks, chunk, scratch, table)
    scratch = made + (iw + most) * type.itemsize
    return Launch(pool_spread(type.code, most, _repeated(request)), args, tasks, chunk, scratch, table)


def _planes_follow(problem, s: Geometry, shape: tuple[int, ...], itemsize: int) -> bool:
    """Whether each channel's plane is contiguous, and followed by the next channel's, and the next image's."""
    height, width = shape[2:]
    plane, is_dense = height * width * itemsize, s.col == itemsize and s.row == width * s.col
    return is_dense and s.length == 1 and s.block == plane and (problem.n == 1 or s.n == problem.ic * plane)


def _make(request: Request) -> Primitive:
    def seconds() -> float:
        m = request.machine
        if request.problem.is_max and not _by_vectors(request):
            cycles = _cycles_of_scatter(request)
        else:
            lanes = _lanes(request) if _by_vectors(request) else m.lanes(request.types.src.computed.itemsize)
            cycles = _cycles_of_sums(request, lanes)
        return m.launch_seconds() + cycles * m.cycle_seconds() / request.threads

    return Primitive(seconds, lambda: [_launch(request)])


BACKWARD = Row("pool_backward", "pool2d_backward", _make, frozenset(FLOATS))
