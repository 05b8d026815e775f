"""Group normalisation: each group of channels of an image, over all its pixels, has mean 0 and variance 1.

Then it is scaled and shifted by channel. One channel a group is instance normalisation; one group, and no pixels, layer
normalisation. By pixel, each pixel is an image of its own. A task reads some groups of an image three times: for means,
for the squares of what differs from them (so that a large mean loses no digits), and for the results.

Buffers: source, scale and bias of each channel (of the type that is computed with), destination (which may be the
source).
"""

from __future__ import annotations

import math
from typing import NamedTuple

from blockconv.core.layout import Layout
from blockconv.core.types import FLOATS, element
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry, geometry
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.norm.kernels import ARRAYS, NormArgs, group_norm
from blockconv.kernels.table import Reason, Request, same_layout_row
from blockconv.runtime import Buffer, Op

__all__ = ["ROWS"]

PARTIAL = 64  # pixels of a partial sum: errors grow with the number of additions to it, and to the total
PASSES = 3
VECTOR_CYCLES, SPAN_CYCLES = 1.5, 20  # of a vector in each pass; of a stretch of pixels in a block of channels


class Where(NamedTuple):
    """Where the elements are: the strides, the channels of a block (of a unit, where all are contiguous), pixels.

    images: those whose statistics are apart, pixels among them.
    """

    at: Geometry
    block: int
    images: int
    rows: int
    row_stride: int
    pixels: int
    period: int


def _where(request: Request) -> Where:
    p, layout, itemsize = request.problem, request.dst, request.types.src.itemsize
    n, c, *spatial = p.shape
    lanes = request.machine.lanes(request.types.src.computed.itemsize)
    shape = p.shape if layout.ndim == 4 else (n, c, 1, math.prod(spatial))
    inner = layout if layout.ndim == 4 else Layout("NCHW")
    pixels = shape[2] * shape[3]
    if inner == Layout("NCHW") and pixels == 1:
        inner = Layout("NHWC")  # the same bytes, and channels are neighbours
    at = geometry(inner, shape, itemsize)
    rows, row_pixels = (1, pixels) if at.row == shape[3] * at.col else (shape[2], shape[3])
    length = c if at.length == NO_BLOCK else at.length
    if p.per_pixel:
        return Where(at, length, n * pixels, 1, 0, 1, 0)
    period = length if length < lanes and lanes % length == 0 and at.col == length * itemsize else 0
    return Where(at, length, n, rows, at.row, row_pixels, period)


def _unit(channels: int, group: int, block: int) -> int:
    """The channels of a unit: whole groups, and whole blocks, or all."""
    return min(channels, math.lcm(group, block))


def _ops(request: Request) -> list[Op]:
    p, layout, kind = request.problem, request.dst, request.types.src
    if 0 in p.shape:
        return []
    lanes, channels, group = request.machine.lanes(kind.computed.itemsize), p.shape[1], p.shape[1] // p.groups
    where = _where(request)
    at, contiguous = where.at, where.block == channels
    unit = _unit(channels, group, lanes if contiguous else where.block)
    block = unit if contiguous else where.block
    units, images = -(-channels // unit), layout.blocks[0] if layout.ndim == 4 else 1
    padded = 0 if contiguous else -channels % block
    strides = {a.step: a.stride * kind.itemsize for a in layout.axes(p.shape) if a.dim == 0}
    image, block_of_images = strides[1], strides[images]
    if p.per_pixel:
        images, image, block_of_images = where.images // p.shape[0], at.col, strides[1]
    room, bits = -(-(-(-unit // block) * block) // lanes) * lanes, element("float64").bits
    args = NormArgs(
        src=Buffer(0),
        scale=Buffer(1),
        shift=Buffer(2),
        dst=Buffer(3),
        image=image,
        images=images,
        image_block=block_of_images,
        units=units,
        unit=unit,
        room=room,
        channels=channels,
        group=group,
        block=block,
        block_stride=unit * kind.itemsize if contiguous else at.block,
        padded=padded,
        rows=where.rows,
        row_stride=where.row_stride,
        pixels=where.pixels,
        pixel_stride=at.col,
        partial=PARTIAL * (lanes // where.period if where.period else 1),
        inverse=bits(1 / (group * where.rows * where.pixels)),
        epsilon=bits(p.epsilon),
        centred=int(p.centred),
    )
    period = where.period if not contiguous or unit == channels else 0
    kernel = group_norm(kind.code, lanes, period, int(padded > 0))
    tasks, nbytes = where.images * units, unit * where.rows * where.pixels * kind.itemsize
    scratch = ARRAYS * room * kind.computed.itemsize
    return [Op(kernel, args, tasks, chunk_of(tasks, nbytes, request.threads), scratch=scratch)]


def _why_not(request: Request) -> Reason | None:
    why_not, dst = same_layout_why_not(request), request.dst
    if why_not is None and dst.ndim == 4 and dst.blocks[1] > 1:
        at = geometry(dst, request.problem.shape, request.types.src.itemsize)
        if at.channel != request.types.src.itemsize:
            return f"needs channels of a block that are neighbours, unlike {dst}"
    if why_not is None and request.problem.per_pixel and dst.ndim == 4:
        at = geometry(dst, request.problem.shape, request.types.src.itemsize)
        if dst.blocks[0] > 1 or at.row != request.problem.shape[3] * at.col:
            return f"needs pixels that are evenly apart, unlike {dst}"
    return why_not


def _cost(request: Request) -> float:
    m, p, kind = request.machine, request.problem, request.types.src
    size = request.dst.size(p.shape)
    if not size:
        return m.launch_seconds()
    where, lanes = _where(request), m.lanes(kind.computed.itemsize)
    part = lanes if where.period else where.block / -(-where.block // lanes)  # elements of a vector
    spans = where.images * where.rows * -(-p.shape[1] // where.block)
    cycles = (PASSES if p.centred else PASSES - 1) * (size / part * VECTOR_CYCLES + spans * SPAN_CYCLES)
    computed = cycles * m.cycle_seconds()
    moved = m.move_seconds(kind.itemsize * size, kind.itemsize * size)
    return m.launch_seconds() + max(moved, computed) / min(request.threads, where.images * p.groups)


ROWS = (same_layout_row("group_norm", "group_norm", FLOATS, _cost, _ops, _why_not),)
