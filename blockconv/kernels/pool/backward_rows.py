"""The row of the gradients of pools: see `backward`, whose kernels it binds."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blockconv.core.layout import Layout
from blockconv.core.types import FLOATS
from blockconv.kernels.common.geometry import NO_BLOCK
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.pool.backward import PoolBackwardArgs, pool_backward, pool_scatter, pool_spread
from blockconv.kernels.pool.blocking import windows
from blockconv.kernels.table import Primitive, Reason, Request, Row
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["BACKWARD"]


def _runs(request: Request, lanes: int) -> list[tuple[int, int, int, int]]:
    """The words of a `Channels` for each vector of at most so many lanes."""
    p, s, d = request.problem, request.source, request.destination
    padded = request.dst.padded_shape(p.dst_shape)[1]
    found, c = [], 0
    while c < padded:
        exist = p.ic - c
        count = min(lanes, padded - c, d.length - c % d.length)
        if exist > 0:
            count = min(count, s.length - c % s.length, exist)
        valid = max(0, min(count, exist))
        found.append((d.offset(c), s.offset(c) if valid else 0, valid, count))
        c += count
    return found


def _lanes(request: Request) -> int:
    """Channels of a vector: 1 where none are contiguous in both arrays."""
    s, d, itemsize = request.source, request.destination, request.types.src.itemsize
    if not all(of.length > 1 and of.channel == itemsize for of in (s, d)):
        return 1
    lanes = request.machine.lanes(request.types.src.computed.itemsize)
    return min(lanes, 1 << (min(s.length, d.length, request.problem.ic).bit_length() - 1))


BAND = 1 << 16  # bytes of the input's gradient that a task computes, at the most, but for one row
MOST_TAPS = 24  # of a maximum whose vectors are added at each tap


def _by_vectors(request: Request) -> bool:
    """Whether vectors of channels are added."""
    p, is_half = request.problem, request.types.src.is_half
    return is_half or (_lanes(request) > 1 and not (p.is_max and p.taps > MOST_TAPS))


def _tables(request: Request) -> list[Any]:
    """`Windows` of rows and of columns, and a `Covering` for each row of the input."""
    pool = request.problem.pool
    rows, cols = windows(pool, "h"), windows(pool, "w")
    last = rows.first + (rows.taps - 1) * getattr(pool, "dh", 1)
    pixels = np.arange(request.problem.dst_shape[2])
    # With dilation, what windows cover need not begin in their order.
    start = np.searchsorted(np.maximum.accumulate(last), pixels, "left")
    end = np.searchsorted(np.minimum.accumulate(rows.first[::-1])[::-1], pixels, "right")
    return [np.stack(rows, axis=1), np.stack(cols, axis=1), np.stack([start, np.maximum(start, end)], axis=1)]


def _blocks(layout: Layout, shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Images of a block, and bytes from a block to the next."""
    step = next((a.stride for a in layout.axes(shape) if a.dim == 0 and a.step > 1), 0)
    return (layout.blocks[0], step * itemsize) if step else (1 << 40, 0)


def _op(request: Request) -> Op:
    p, type, lanes = request.problem, request.types.src, _lanes(request)
    s, d, by_vectors = request.source, request.destination, _by_vectors(request)
    runs = np.array(_runs(request, lanes), np.int64)
    parts = [np.asarray(part, np.int64).reshape(-1) for part in (*_tables(request), runs)]
    ends = np.cumsum([0, *(8 * part.size for part in parts)])
    # Where pixels hold all channels, these are neighbours.
    inner = len(runs) if s.length == d.length == NO_BLOCK else 1
    row = p.dst_shape[3] * inner * lanes * type.computed.itemsize
    band = min(p.dst_shape[2], max(1, BAND // row)) if by_vectors else p.dst_shape[2]
    src, dst = (
        _blocks(layout, shape, type.itemsize)
        for layout, shape in ((request.src, p.src_shape), (request.dst, p.dst_shape))
    )
    args = PoolBackwardArgs(
        src=Buffer(0),
        dst=Buffer(1),
        idx=Buffer(2) if p.is_max else 0,
        rows=OWN_TABLE,
        cols_at=int(ends[1]),
        covering_at=int(ends[2]),
        channels_at=int(ends[3]),
        vectors=len(runs),
        inner=inner,
        pixel=p.ic * type.itemsize if inner == len(runs) else 0,
        band=band,
        n=p.n,
        ih=p.dst_shape[2],
        iw=p.dst_shape[3],
        oh=p.src_shape[2],
        ow=p.src_shape[3],
        dh=getattr(p.pool, "dh", 1),
        dw=getattr(p.pool, "dw", 1),
        source=s,
        destination=d,
        src_images=src[0],
        src_image_block=src[1],
        dst_images=dst[0],
        dst_image_block=dst[1],
    )
    images, table = request.dst.padded_shape(p.dst_shape)[0], np.concatenate(parts)
    if by_vectors:
        tasks = images * -(-p.dst_shape[2] // band) * (len(runs) // inner)
        kernel, scratch = pool_backward(type.code, lanes, int(p.is_max)), row * band if type.is_half else 0
        return Op(kernel, args, tasks, chunk_of(tasks, row * band, request.threads), scratch, table)
    tasks = images * len(runs)
    chunk = chunk_of(tasks, p.dst_shape[2] * p.dst_shape[3] * type.itemsize, request.threads)
    if p.is_max:
        return Op(pool_scatter(type.itemsize), args, tasks, chunk, 0, table)
    most = request.machine.lanes(type.itemsize)
    return Op(pool_spread(type.code, most), args, tasks, chunk, p.src_shape[3] * type.itemsize, table)


def _make(request: Request) -> Primitive | Reason:
    for layout in (request.src, request.dst):
        if not layout.is_native:
            return f"needs layouts with at most one block of channels, unlike {layout}"
    if math.prod(request.problem.dst_shape[2:]) >= 1 << 31:
        return "needs fewer pixels of an image than 2^31"

    def seconds() -> float:
        p, m = request.problem, request.machine
        pixels, outputs = (p.n * p.ic * math.prod(shape[2:]) for shape in (p.dst_shape, p.src_shape))
        cleared = CLEAR_CYCLES * pixels * request.types.src.itemsize / m.isa.vector_bytes
        if _by_vectors(request):
            added = outputs / _lanes(request) * (VECTOR_CYCLES + p.taps * TAP_CYCLES)
        elif p.is_max:
            added = outputs * SCATTER_CYCLES
        else:
            added = outputs * math.sqrt(p.taps) * SCATTER_CYCLES
        return m.launch_seconds() + (cleared + added) * m.cycle_seconds() / request.threads

    return Primitive(seconds, lambda: [_op(request)])


# Of a vector of zeros; of a vector of the output, of each of its taps; of an element that is added by itself.
CLEAR_CYCLES, VECTOR_CYCLES, TAP_CYCLES, SCATTER_CYCLES = 2, 8, 2, 4
BACKWARD = Row("pool_backward", "pool2d_backward", _make, frozenset(FLOATS))
