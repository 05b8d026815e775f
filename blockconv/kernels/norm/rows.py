"""Group normalisation: each group of channels of an image, over all its pixels, has mean 0 and variance 1.

Then it is scaled and shifted by channel. One channel a group is instance normalisation; one group, and no pixels, layer
normalisation. By pixel, each pixel is an image of its own. A task reads some groups of an image three times: for means,
for squares of deviations from them, and for the results. So a large mean loses no digits. One group of one pixel (layer
normalisation) is a walk over the axis of channels.

Buffers: source, scale and bias of each channel (of the type that is computed with), destination (which may be the
source). With the option `statistics` also inputs of the gradient: the mean of each image's groups, and
1 / sqrt(variance + epsilon).

The gradient's: source, gradient of the output, scale, mean, 1 / sqrt(variance + epsilon), destination, gradients of
scale and bias, workspace. A task takes some images, and keeps its part of the last two in the workspace.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

from blockconv.core.layout import Layout
from blockconv.core.types import FLOATS, element
from blockconv.jit.records import fill
from blockconv.kernels.common.axis import WalkedAxis, walked_axis
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry, geometry
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.norm.kernels import (
    ARRAYS,
    BACKWARD_ARRAYS,
    LayerNormArgs,
    NormArgs,
    group_norm,
    group_norm_backward,
    group_norm_parameters,
    layer_norm,
    layer_norm_backward,
)
from blockconv.kernels.table import Primitive, Row
from blockconv.runtime import Buffer, Launch

PARTIAL = 64  # pixels of a partial sum: errors grow with the number of additions to it, and to the total
PASSES, BACKWARD_PASSES = 3, 4  # of vectors; a gradient reads two sources, twice
SPLIT, TASKS = 64, 16  # images that share a part of gradients, at the most; tasks, where there are images enough
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


class Cut(NamedTuple):
    """How a request's elements are cut.

    unit: channels of a unit.
    units: of an image.
    block, room, padded: as of `NormArgs`.
    period: as of `group_norm`.
    split, splits: as of `NormArgs`.
    """

    where: Where
    unit: int
    units: int
    block: int
    room: int
    padded: int
    period: int
    split: int
    splits: int


def _cut(request: Request, walked: WalkedAxis | None = None) -> Cut:
    channels, lanes = request.problem.shape[1], request.machine.lanes(request.types.src.computed.itemsize)
    where = _where(request)
    contiguous = where.block == channels
    unit = _unit(channels, channels // request.problem.groups, lanes if contiguous else where.block)
    block, units = unit if contiguous else where.block, -(-channels // unit)
    room = -(-(-(-unit // block) * block) // lanes) * lanes
    period = where.period if not contiguous or unit == channels else 0
    images = where.images if walked is None else walked.tasks
    split = max(1, min(SPLIT, images // -(-TASKS // units)))
    padded = 0 if contiguous else -channels % block
    return Cut(where, unit, units, block, room, padded, period, split, -(-images // split))


def _args(request: Request, cut: Cut, buffers: tuple[str, ...]) -> NormArgs:
    """buffers: the words that are buffers, in their order."""
    p, layout, itemsize, where = request.problem, request.dst, request.types.src.itemsize, cut.where
    images, group, bits = layout.blocks[0] if layout.ndim == 4 else 1, p.shape[1] // p.groups, element("float64").bits
    strides = {a.step: a.stride * itemsize for a in layout.axes(p.shape) if a.dim == 0}
    image, block_of_images = strides[1], strides[images]
    if p.per_pixel:
        images, image, block_of_images = where.images // p.shape[0], where.at.col, strides[1]
    return fill(
        NormArgs,
        p,
        cut,
        where,
        **{name: Buffer(k) for k, name in enumerate(buffers)},
        image=image,
        images=images,
        image_block=block_of_images,
        all_images=where.images,
        channels=p.shape[1],
        group=group,
        block=cut.block,
        block_stride=cut.unit * itemsize if where.block == p.shape[1] else where.at.block,
        pixel_stride=where.at.col,
        partial=PARTIAL * (_lanes(request) // where.period if where.period else 1),
        share=bits(1 / (group * where.rows * where.pixels)),
        epsilon=bits(p.epsilon),
    )


_FORWARD, _STATISTICS = ("src", "scale", "shift", "dst"), ("mean", "inverse")
_BACKWARD = "src", "grad", "scale", *_STATISTICS, "dst", "of_scale", "of_shift", "work"


def _lanes(request: Request) -> int:
    return request.machine.lanes(request.types.src.computed.itemsize)


def _walked(request: Request, statistics: bool, gathers: bool = True) -> WalkedAxis | None:
    """The walk over the channels of one group and one pixel; None where more pixels or groups have statistics.

    statistics: they are kept in the logical order of the pixels, which has to be the order in memory. gathers: as of
    `walked_axis`.
    """
    p = request.problem
    dims = [axis.dim for axis in request.dst.axes(p.shape) if axis.size > 1 and axis.dim != 1]
    is_one = p.groups == 1 and (p.per_pixel or math.prod(p.shape[2:]) == 1)
    if 0 in p.shape or not is_one or (statistics and dims != sorted({*dims})):
        return None
    return walked_axis(request, 1, gathers=gathers)


def _layer_words(request: Request, buffers: tuple[str, ...], **words: int) -> dict[str, Any]:
    """The words of `LayerNormArgs` that are not the walk's. buffers: the words that are buffers, in their order."""
    p, bits = request.problem, element("float64").bits
    given = {name: Buffer(k) for k, name in enumerate(buffers) if name in LayerNormArgs.fields}
    return {**given, "share": bits(1 / p.shape[1]), "epsilon": bits(p.epsilon), **words}


def _launches(request: Request, walked: WalkedAxis | None, statistics: bool) -> list[Launch]:
    if 0 in request.problem.shape:
        return []
    kind, buffers = request.types.src, (*_FORWARD, *_STATISTICS * statistics)
    if walked is not None:
        kernel = layer_norm(*walked.params, int(request.problem.centred))
        return [walked.launch(kernel, made=LayerNormArgs, **_layer_words(request, buffers))]
    cut = _cut(request)
    args = _args(request, cut, buffers)
    kernel = group_norm(kind.code, _lanes(request), cut.period, int(cut.padded > 0))
    tasks, nbytes = cut.where.images * cut.units, cut.unit * cut.where.rows * cut.where.pixels * kind.itemsize
    scratch = ARRAYS * cut.room * kind.computed.itemsize
    return [Launch(kernel, args, tasks, chunk_of(tasks, nbytes, request.threads), scratch=scratch)]


def _backward_launches(request: Request, walked: WalkedAxis | None, cut: Cut) -> list[Launch]:
    kind, args = request.types.src, _args(request, cut, _BACKWARD)
    scratch, parameters = BACKWARD_ARRAYS * cut.room * kind.computed.itemsize, group_norm_parameters
    if walked is not None:
        sizes = {"room": cut.room, "split": cut.split, "tasks": walked.tasks}
        words = fill(LayerNormArgs, walked.args, **_layer_words(request, _BACKWARD, **sizes))
        first = Launch(layer_norm_backward(*walked.params), words, cut.splits)
    else:
        kernel = group_norm_backward(kind.code, _lanes(request), cut.period, int(cut.padded > 0))
        first = Launch(kernel, args, cut.units * cut.splits, 1, scratch)
    last = parameters(kind.code, _lanes(request))
    return [first, Launch(last, args, cut.units, max(1, cut.units // 16), 16 * cut.room)]


def _forward(request: Request, statistics: bool = False) -> Primitive | Reason:
    walked = _walked(request, statistics)
    reason = _why_not(request, walked)
    if reason is not None:
        return reason
    passes = PASSES if request.problem.centred else PASSES - 1
    return Primitive(lambda: _seconds(request, walked, 1, passes), lambda: _launches(request, walked, statistics))


def _backward(request: Request) -> Primitive | Reason:
    walked = _walked(request, True, gathers=False)
    reason = _why_not(request, walked)
    if reason is not None:
        return reason
    if 0 in request.problem.shape:
        return "needs at least one element"
    if not request.problem.centred:
        return "needs statistics with a mean"
    cut = _cut(request, walked)
    work = 2 * cut.room * cut.units * cut.splits * request.types.src.computed.itemsize
    return Primitive(
        lambda: _seconds(request, walked, 2, BACKWARD_PASSES),
        lambda: _backward_launches(request, walked, cut),
        workspace=(work,),
    )


def _why_not(request: Request, walked: WalkedAxis | None) -> Reason | None:
    p, dst = request.problem, request.dst
    why_not = same_layout_why_not(request)
    if why_not is not None or dst.ndim != 4 or walked is not None:
        return why_not
    at = geometry(dst, p.shape, request.types.src.itemsize)
    if dst.blocks[1] > 1 and at.channel != request.types.src.itemsize:
        return f"needs channels of a block that are neighbours, unlike {dst}"
    if p.per_pixel and (dst.blocks[0] > 1 or at.row != p.shape[3] * at.col):
        return f"needs pixels that are evenly apart, unlike {dst}"
    return None


def _seconds(request: Request, walked: WalkedAxis | None, sources: int, passes: int) -> float:
    """sources: arrays that are read. passes: over vectors of elements."""
    m, p, kind = request.machine, request.problem, request.types.src
    size, lanes = request.dst.size(p.shape), _lanes(request)
    if not size:
        return m.launch_seconds()
    if walked is not None:
        part, tasks = size / walked.vectors, walked.tasks
        spans = tasks if walked.across else tasks * walked.extents
    else:
        where = _where(request)
        part = lanes if where.period else where.block / -(-where.block // lanes)  # elements of a vector
        spans, tasks = where.images * where.rows * -(-p.shape[1] // where.block), where.images * p.groups
    computed = passes * (size / part * VECTOR_CYCLES + spans * SPAN_CYCLES) * m.cycle_seconds()
    moved = m.move_seconds(sources * kind.itemsize * size, kind.itemsize * size)
    return m.launch_seconds() + max(moved, computed) / min(request.threads, tasks)


ROWS = (Row("group_norm", "group_norm", _forward, frozenset(FLOATS), whole_blocks=True),)
BACKWARD = Row("group_norm_backward", "group_norm_backward", _backward, frozenset(FLOATS))
