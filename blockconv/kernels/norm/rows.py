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

Batch normalisation in training: see `batch`. Buffers of the forward op: source, scale, bias, destination, mean,
1 / sqrt(variance + epsilon), residual, running mean and variance and their new values (0 for missing ones), numbers
(`NormArgs.numbers`), workspace. Buffers of the gradient: source, gradient of the output, scale, bias, mean,
1 / sqrt(variance + epsilon), destination, gradients of scale and bias, numbers, workspace. All but source, residual,
gradient and destination have the computed type. The option `extra` is the parameter of `batch_apply`.
"""

import math
from typing import Any

from blockconv.core.checks import Shape
from blockconv.core.layout import Layout
from blockconv.core.types import FLOATS, element
from blockconv.jit.records import fill
from blockconv.kernels.common.axis import WalkedAxis, walked_axis, walked_rows
from blockconv.kernels.common.geometry import NO_BLOCK, geometry
from blockconv.kernels.common.request import Reason, Request, same_layout_why_not
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.norm.batch import batch_apply, batch_sums, batch_terms
from blockconv.kernels.norm.codegen import TERMS, TOTALS, UNROLL
from blockconv.kernels.norm.kernels import (
    LayerNormArgs,
    NormArgs,
    NormCut,
    group_norm,
    group_norm_parameters,
    layer_norm,
    layer_norm_backward,
)
from blockconv.kernels.table import Primitive, Row
from blockconv.runtime import Buffer, Launch

NCHW = Layout("NCHW")
PARTIAL = 64  # pixels of a partial sum: errors grow with the number of additions to it, and to the total
PASSES, BACKWARD_PASSES = 3, 4  # of vectors; a gradient reads two sources, twice
SPLIT, TASKS = 64, 16  # images that share a part of gradients, at the most; tasks, where there are images enough
VECTOR_CYCLES, SPAN_CYCLES = 1.5, 20  # of a vector in each pass; of a stretch of pixels in a block of channels
CHUNK_BYTES = 1 << 16  # of a batch norm's chunk: about what a core's first cache holds
UNIT = 512  # channels of a batch norm's unit, at the most, where all channels of a pixel are contiguous


def _lanes(request: Request) -> int:
    return request.machine.lanes(request.types.src.computed.itemsize)


def _flat(request: Request) -> tuple[Layout, Shape]:
    """The layout and the shape with four dimensions. Pixels of an array of another rank are one row."""
    layout, (n, c, *spatial) = request.dst, request.problem.shape
    if layout.ndim != 4:
        layout, spatial = NCHW, [1, math.prod(spatial)]
    if layout == NCHW and math.prod(spatial) == 1:
        layout = Layout("NHWC")  # the same bytes, and channels are neighbours
    return layout, (n, c, *spatial)


def _cut(request: Request, group: int, least: int, per_pixel: bool = False) -> NormCut:
    """The cut, but for its chunks and splits, into units of whole groups, and of whole blocks or all channels.

    least: channels of a unit, if all channels of a pixel are contiguous and as many.
    """
    (layout, shape), itemsize, lanes = _flat(request), request.itemsize, _lanes(request)
    at, (images, c, height, width) = geometry(layout, shape, itemsize), shape
    length = c if at.length == NO_BLOCK else at.length
    unit = min(c, math.lcm(group, least if length == c else length))
    contiguous, block = length == c, unit if length == c else length
    rows, pixels = (1, height * width) if at.row == width * at.col else (height, width)
    period = length if length < lanes and lanes % length == 0 and at.col == length * itemsize else 0
    if per_pixel:
        at, images = at._replace(images=height * width, n=at.col, image_block=at.n), images * height * width
        rows, pixels, period = 1, 1, 0
    return fill(
        NormCut,
        at,
        all_images=images,
        units=-(-c // unit),
        unit=unit,
        channels=c,
        room=-(-(-(-unit // block) * block) // lanes) * lanes,
        padded=0 if contiguous else -c % block,
        block=block,
        block_stride=unit * itemsize if contiguous else at.block,
        rows=rows,
        row_stride=at.row,
        pixels=pixels,
        pixel_stride=at.col,
        period=period if not contiguous or unit == c else 0,
    )


def _group_cut(request: Request, walked: WalkedAxis | None = None, most: int = SPLIT) -> NormCut:
    """most: images of a split."""
    p, lanes = request.problem, _lanes(request)
    cut = _cut(request, p.shape[1] // p.groups, lanes, p.per_pixel)
    tasks, units = cut.all_images, cut.units
    if walked is not None:
        units, cut = walked.args.outer or 1, cut._replace(units=1, unit=cut.channels, room=cut.channels)
        tasks = walked.tasks // units
    split = max(1, min(most, tasks // -(-TASKS // units)))
    return cut._replace(
        chunk=PARTIAL * (UNROLL * lanes // cut.period if cut.period else 1),
        split=split,
        splits=-(-tasks // split),
    )


def _batch_cut(request: Request) -> NormCut:
    cut = _cut(request, 1, UNIT)
    cut = cut._replace(chunk=min(cut.pixels, max(1, CHUNK_BYTES // (cut.unit * request.itemsize))))
    return cut._replace(splits=max(1, min(-(-TASKS // cut.units), cut.chunks)))


_FORWARD, _STATISTICS = ("src", "scale", "shift", "dst"), ("mean", "inverse")
_BACKWARD = "src", "grad", "scale", *_STATISTICS, "dst", "of_scale", "of_shift", "work"
_RUNNING = "old_mean", "old_variance", "new_mean", "new_variance"
_BATCH = *_FORWARD, *_STATISTICS, "residual", *_RUNNING, "numbers", "work"
_BATCH_BACKWARD = "src", "grad", "scale", "shift", *_STATISTICS, "dst", "of_scale", "of_shift", "numbers", "work"


def _words(request: Request, buffers: tuple[str, ...], count: int) -> dict[str, Any]:
    """The words that all norms have. buffers: the words that are buffers, in their order. count: as of `NormArgs`."""
    bits, named = element("float64").bits, {name: Buffer(k) for k, name in enumerate(buffers)}
    return {**named, "share": bits(1 / count), "epsilon": bits(request.problem.epsilon)}


def _walked(request: Request, statistics: bool, gathers: bool) -> WalkedAxis | None:
    """The walk over groups of channels, of one pixel or of contiguous rows of them; None where there is none.

    statistics: they are kept in the logical order of the pixels, which has to be the order in memory. gathers: as of
    `walked_axis`.
    """
    p = request.problem
    if 0 not in p.shape and not p.per_pixel and _flat(request)[0] == NCHW:
        return walked_rows(request, p.groups, not gathers)
    dims = [axis.dim for axis in request.dst.axes(p.shape) if axis.size > 1 and axis.dim != 1]
    is_one = p.groups == 1 and (p.per_pixel or math.prod(p.shape[2:]) == 1)
    if 0 in p.shape or not is_one or (statistics and dims != sorted({*dims})):
        return None
    return walked_axis(request, 1, gathers=gathers)


def _group_launches(request: Request, walked: WalkedAxis | None, buffers: tuple[str, ...]) -> list[Launch]:
    p, kind, lanes = request.problem, request.types.src, _lanes(request)
    if 0 in p.shape:
        return []
    is_backward = "grad" in buffers
    cut = _group_cut(request, walked, SPLIT if is_backward else 1)
    group = p.shape[1] // p.groups
    count = group * cut.rows * cut.pixels
    words = _words(request, buffers, count)
    args = fill(NormArgs, p, cut, **words, group=group, count=count)
    if walked is None:
        scratch = (TOTALS + TERMS) * cut.room * kind.computed.itemsize
        tasks, nbytes = cut.units * cut.splits, cut.split * cut.unit * cut.rows * cut.pixels * kind.itemsize
        kernel = group_norm(kind, lanes, cut.period, cut.padded > 0, is_backward)
        first = Launch(kernel, args, tasks, chunk_of(tasks, nbytes, request.threads), scratch)
    elif is_backward:
        units, kernel = walked.args.outer, layer_norm_backward(*walked.params)
        made = fill(LayerNormArgs, walked.args, cut, **words, tasks=walked.tasks // units)
        first = Launch(kernel, made, units * cut.splits, 1, 2 * cut.room // units * walked.own_step)
    else:
        first = walked.launch(layer_norm(*walked.params, p.centred), made=LayerNormArgs, **words)
    last = Launch(group_norm_parameters(kind, lanes), args, cut.units, max(1, cut.units // 16))
    return [first, last] if is_backward else [first]


def _group_row(op: str, buffers: tuple[str, ...], passes: int) -> Row:
    is_backward = "grad" in buffers

    def make(request: Request, statistics: bool = is_backward) -> Primitive | Reason:
        p, reason = request.problem, same_layout_why_not(request)
        walked = None if reason else _walked(request, statistics, gathers=not is_backward)
        if reason := reason or (None if walked else _why_not(request, p.per_pixel)):
            return reason
        if is_backward and 0 in p.shape:
            return "needs at least one element"
        if statistics and not p.centred:
            return "needs statistics with a mean"
        names = buffers if is_backward else (*buffers, *_STATISTICS * statistics)
        cut = _group_cut(request, walked) if is_backward else None
        work = () if cut is None else (2 * cut.room * cut.units * cut.splits * request.types.src.computed.itemsize,)
        return Primitive(
            lambda: _seconds(request, walked, 1 + is_backward, passes - (not p.centred)),
            lambda: _group_launches(request, walked, names),
            workspace=work,
        )

    return Row(op, op, make, FLOATS, whole_blocks=not is_backward)


def _why_not(request: Request, per_pixel: bool = False) -> Reason | None:
    """Why not, for equal layouts."""
    p, dst = request.problem, request.dst
    if dst.ndim != 4:
        return None
    if max(dst.blocks[2:]) > 1:
        return f"needs rows and columns without blocks, unlike {dst}"
    at = geometry(dst, p.shape, request.itemsize)
    if dst.blocks[1] > 1 and at.channel != request.itemsize:
        return f"needs channels of a block that are neighbours, unlike {dst}"
    if per_pixel and (dst.blocks[0] > 1 or at.row != p.shape[3] * at.col):
        return f"needs pixels that are evenly apart, unlike {dst}"
    return None


def _seconds(request: Request, walked: WalkedAxis | None, sources: int, passes: int) -> float:
    """sources: arrays that are read. passes: over vectors of elements."""
    p, kind = request.problem, request.types.src
    size, lanes = request.dst.size(p.shape), _lanes(request)
    if not size:
        return request.seconds(0, 0)
    if walked is not None:
        part, tasks = size / walked.vectors, walked.tasks
        spans = tasks if walked.across else tasks * walked.extents
    else:
        cut = _group_cut(request)
        part = lanes if cut.period else cut.block / -(-cut.block // lanes)  # elements of a vector
        spans, tasks = cut.all_images * cut.rows * -(-p.shape[1] // cut.block), cut.all_images * p.groups
    computed = passes * (size / part * VECTOR_CYCLES + spans * SPAN_CYCLES) * request.machine.cycle_seconds()
    busy = request.on_threads(min(request.threads, tasks))
    return busy.seconds(sources * kind.itemsize * size, kind.itemsize * size, computed)


# ---------------------------------------------------------------- batch normalisation in training


def _batch_launches(request: Request, cut: NormCut, buffers: tuple[str, ...], extra: bool) -> list[Launch]:
    p, kind, lanes, is_backward = request.problem, request.types.src, _lanes(request), "grad" in buffers
    count, terms_at = math.prod(p.shape) // p.shape[1], 16 * cut.room * cut.units * cut.splits
    args = fill(NormArgs, p, cut, **_words(request, buffers, count), count=count, terms_at=terms_at)
    tasks = cut.units * cut.chunks
    chunk = chunk_of(tasks, cut.chunk * cut.unit * kind.itemsize, request.threads)
    sums = batch_sums(kind, lanes, cut.period, is_backward, is_backward and extra)
    apply = batch_apply(kind, lanes, cut.period, cut.padded > 0, is_backward, extra)
    return [
        Launch(sums, args, cut.units * cut.splits, 1, 3 * cut.room * kind.computed.itemsize),
        Launch(batch_terms(kind, lanes, is_backward), args, cut.units, max(1, cut.units // 16)),
        Launch(apply, args, tasks, chunk),
    ]


def _batch_row(op: str, buffers: tuple[str, ...]) -> Row:
    def make(request: Request, extra: bool = False) -> Primitive | Reason:
        if reason := same_layout_why_not(request) or _why_not(request):
            return reason
        if request.dst.blocks[0] > 1:
            return f"needs a layout without blocks of images, unlike {request.dst}"

        def seconds() -> float:
            nbytes = request.itemsize * math.prod(request.problem.shape)
            return request.seconds((4 if "grad" in buffers else 2 + extra) * nbytes, nbytes, launches=3)

        cut = _batch_cut(request)
        work = cut.room * cut.units * (16 * cut.splits + TERMS * request.types.src.computed.itemsize)
        return Primitive(seconds, lambda: _batch_launches(request, cut, buffers, extra), workspace=(work,))

    return Row(op, op, make, FLOATS)


ROWS = (
    _group_row("group_norm", _FORWARD, PASSES),
    _group_row("group_norm_backward", _BACKWARD, BACKWARD_PASSES),
    _batch_row("batch_norm", _BATCH),
    _batch_row("batch_norm_backward", _BATCH_BACKWARD),
)
