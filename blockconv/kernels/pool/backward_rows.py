"""The row of the gradients of pools: see `backward`, whose kernels it binds."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockconv.core.layout import Layout
from blockconv.core.types import FLOATS
from blockconv.kernels.common.geometry import NO_BLOCK
from blockconv.kernels.pool.backward import PoolBackwardArgs, pool_backward, pool_scatter
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


def _scatters(request: Request) -> bool:
    """Whether elements of the output are added to the input's."""
    return not request.types.src.is_half and _lanes(request) == 1


def _covering(request: Request, x: str) -> tuple[Any, Any]:
    """A `Covering` for each input row ("h") or column, or each of windows, and what averages count of each window."""
    problem = request.problem
    pool, found = problem.pool, windows(problem.pool, x)
    if _scatters(request):
        return np.stack([found.first, found.taps], axis=1), found.counted
    first, last = found.first, found.first + found.taps - 1
    if problem.is_max:
        size, stride, begin, dilation = (getattr(pool, name + x) for name in "kspd")
        first = np.arange(len(first)) * stride - begin
        last = first + (size - 1) * dilation
    pixels = np.arange(problem.dst_shape[2 if x == "h" else 3])
    start, end = np.searchsorted(last, pixels, "left"), np.searchsorted(first, pixels, "right")
    return np.stack([start, np.maximum(0, end - start)], axis=1), found.counted


def _blocks(layout: Layout, shape: tuple[int, ...], itemsize: int) -> tuple[int, int]:
    """Images of a block, and bytes from a block to the next."""
    step = next((a.stride for a in layout.axes(shape) if a.dim == 0 and a.step > 1), 0)
    return (layout.blocks[0], step * itemsize) if step else (1 << 40, 0)


def _op(request: Request) -> Op:
    p, type, lanes = request.problem, request.types.src, _lanes(request)
    (rows, heights), (cols, widths) = _covering(request, "h"), _covering(request, "w")
    runs = np.array(_runs(request, lanes), np.int64)
    parts = [np.asarray(part, np.int64).reshape(-1) for part in (rows, cols, heights, widths, runs)]
    ends = np.cumsum([0, *(8 * part.size for part in parts)])
    # Where pixels hold all channels, these are neighbours.
    inner = len(runs) if request.source.length == request.destination.length == NO_BLOCK else 1
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
        heights_at=int(ends[2]),
        widths_at=int(ends[3]),
        channels_at=int(ends[4]),
        vectors=len(runs),
        inner=inner,
        n=p.n,
        ih=p.dst_shape[2],
        iw=p.dst_shape[3],
        oh=p.src_shape[2],
        ow=p.src_shape[3],
        source=request.source,
        destination=request.destination,
        src_images=src[0],
        src_image_block=src[1],
        dst_images=dst[0],
        dst_image_block=dst[1],
    )
    images = request.dst.padded_shape(p.dst_shape)[0]
    if _scatters(request):
        return Op(pool_scatter(type.itemsize, int(p.is_max)), args, images * len(runs), 1, 0, np.concatenate(parts))
    tasks = images * p.dst_shape[2] * (len(runs) // inner)
    kernel = pool_backward(type.code, lanes, int(p.is_max))
    return Op(kernel, args, tasks, max(1, min(16, tasks // 64)), 0, np.concatenate(parts))


def _make(request: Request) -> Primitive | Reason:
    for layout in (request.src, request.dst):
        if not layout.is_native:
            return f"needs layouts with at most one block of channels, unlike {layout}"

    def seconds() -> float:
        p, m = request.problem, request.machine
        pixels = p.n * p.ic * p.dst_shape[2] * p.dst_shape[3] / _lanes(request)
        products = p.n * p.ic * p.src_shape[2] * p.src_shape[3] * p.taps / _lanes(request)
        if _scatters(request):
            products /= p.taps if p.is_max else 1
            pixels /= 16
        return m.launch_seconds() + (4 * products + 8 * pixels) * m.cycle_seconds() / request.threads

    return Primitive(seconds, lambda: [_op(request)])


BACKWARD = Row("pool_backward", "pool2d_backward", _make, frozenset(FLOATS))
