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
from typing import Any, NamedTuple

from blockconv.core.layout import Layout
from blockconv.core.types import FLOATS, element
from blockconv.jit.records import fill
from blockconv.kernels.common.axis import WalkedAxis, walked_axis
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry, geometry
from blockconv.kernels.common.request import Reason, Request, same_layout_why_not
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.norm.batch import batch_apply, batch_sums, batch_terms
from blockconv.kernels.norm.codegen import TERMS, TOTALS, UNROLL
from blockconv.kernels.norm.kernels import (
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
CHUNK_BYTES = 1 << 16  # of a batch norm's chunk: about what a core's first cache holds
UNIT = 512  # channels of a batch norm's unit, at the most, where all channels of a pixel are contiguous


class Cut(NamedTuple):
    """How a request's elements are cut: see `NormArgs`, and for the period `group_norm`."""

    at: Geometry
    unit: int
    units: int
    block: int
    block_stride: int
    room: int
    padded: int
    all_images: int
    rows: int
    row_stride: int
    pixels: int
    chunk: int
    period: int
    splits: int
    split: int = 0
    joined: int = 1

    @property
    def row_chunks(self) -> int:
        return -(-self.pixels // self.chunk)

    @property
    def chunks(self) -> int:
        return self.all_images * self.rows * self.row_chunks


def _cut(request: Request, layout: Layout, shape: tuple[int, ...], unit: int, per_pixel: bool = False) -> Cut:
    """The cut into units of so many channels, but for its chunks and splits. shape: of four dimensions."""
    itemsize, lanes, (n, c, height, width) = request.types.src.itemsize, _lanes(request), shape
    at = geometry(layout, shape, itemsize)
    length = c if at.length == NO_BLOCK else at.length
    contiguous, block = length == c, unit if length == c else length
    rows, pixels = (1, height * width) if at.row == width * at.col else (height, width)
    period = length if length < lanes and lanes % length == 0 and at.col == length * itemsize else 0
    if per_pixel:
        n, rows, pixels, period = n * height * width, 1, 1, 0
    return Cut(
        at=at,
        unit=unit,
        units=-(-c // unit),
        block=block,
        block_stride=unit * itemsize if contiguous else at.block,
        room=-(-(-(-unit // block) * block) // lanes) * lanes,
        padded=0 if contiguous else -c % block,
        all_images=n,
        rows=rows,
        row_stride=at.row,
        pixels=pixels,
        chunk=1,
        period=period if not contiguous or unit == c else 0,
        splits=1,
    )


def _group_cut(request: Request, walked: WalkedAxis | None = None) -> Cut:
    p, layout, itemsize, lanes = request.problem, request.dst, request.types.src.itemsize, _lanes(request)
    n, c, *spatial = p.shape
    shape = p.shape if layout.ndim == 4 else (n, c, 1, math.prod(spatial))
    inner = layout if layout.ndim == 4 else Layout("NCHW")
    if inner == Layout("NCHW") and shape[2] * shape[3] == 1:
        inner = Layout("NHWC")  # the same bytes, and channels are neighbours
    length, group = geometry(inner, shape, itemsize).length, c // p.groups
    # Whole groups, and whole blocks, or all.
    unit = min(c, math.lcm(group, lanes if length in (c, NO_BLOCK) else length))
    cut = _cut(request, inner, shape, unit, p.per_pixel)
    tasks = cut.all_images if walked is None else walked.tasks
    split = max(1, min(SPLIT, tasks // -(-TASKS // cut.units)))
    is_row = cut.period == 1 and cut.rows == 1 and cut.at.block == cut.pixels * cut.at.col
    return cut._replace(
        chunk=PARTIAL * (UNROLL * lanes // cut.period if cut.period else 1),
        split=split,
        splits=-(-tasks // split),
        joined=group if is_row else 1,
    )


def _batch_cut(request: Request) -> Cut:
    p, itemsize = request.problem, request.types.src.itemsize
    length = geometry(request.dst, p.shape, itemsize).length
    unit = min(p.shape[1], UNIT) if length == NO_BLOCK else length
    cut = _cut(request, request.dst, p.shape, unit)
    cut = cut._replace(chunk=min(cut.pixels, max(1, CHUNK_BYTES // (unit * itemsize))))
    return cut._replace(splits=max(1, min(-(-TASKS // cut.units), cut.chunks)))


def _args(request: Request, cut: Cut, buffers: tuple[str, ...], **words: int) -> NormArgs:
    """buffers: the words that are buffers, in their order."""
    p, layout, itemsize = request.problem, request.dst, request.types.src.itemsize
    images = layout.blocks[0] if layout.ndim == 4 else 1
    strides = {a.step: a.stride * itemsize for a in layout.axes(p.shape) if a.dim == 0}
    image, image_block = strides[1], strides[images]
    if cut.all_images != p.shape[0]:  # by pixel
        images, image, image_block = cut.all_images // p.shape[0], cut.at.col, image
    return fill(
        NormArgs,
        p,
        cut,
        **_given(request, buffers),
        image=image,
        images=images,
        image_block=image_block,
        channels=p.shape[1],
        pixel_stride=cut.at.col,
        **words,
    )


def _given(request: Request, buffers: tuple[str, ...]) -> dict[str, Any]:
    """The words that all norms have."""
    named = {name: Buffer(k) for k, name in enumerate(buffers)}
    return {**named, "epsilon": element("float64").bits(request.problem.epsilon)}


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
    given = {name: value for name, value in _given(request, buffers).items() if name in LayerNormArgs.fields}
    return {**given, "share": element("float64").bits(1 / request.problem.shape[1]), **words}


def _launches(request: Request, walked: WalkedAxis | None, statistics: bool) -> list[Launch]:
    if 0 in request.problem.shape:
        return []
    kind, buffers = request.types.src, (*_FORWARD, *_STATISTICS * statistics)
    if walked is not None:
        kernel = layer_norm(*walked.params, request.problem.centred)
        return [walked.launch(kernel, made=LayerNormArgs, **_layer_words(request, buffers))]
    cut = _group_cut(request)
    kernel = group_norm(kind.code, _lanes(request), cut.period, cut.padded > 0)
    tasks, nbytes = cut.all_images * cut.units, cut.unit * cut.rows * cut.pixels * kind.itemsize
    args, scratch = _group_args(request, cut, buffers), _scratch(request, cut)
    return [Launch(kernel, args, tasks, chunk_of(tasks, nbytes, request.threads), scratch=scratch)]


def _group_args(request: Request, cut: Cut, buffers: tuple[str, ...]) -> NormArgs:
    group = request.problem.shape[1] // request.problem.groups
    return _args(request, cut, buffers, group=group, count=group * cut.rows * cut.pixels)


def _scratch(request: Request, cut: Cut) -> int:
    """Bytes of a unit's totals and terms."""
    return (TOTALS + TERMS) * cut.room * request.types.src.computed.itemsize


def _backward_launches(request: Request, walked: WalkedAxis | None, cut: Cut) -> list[Launch]:
    kind, args = request.types.src, _group_args(request, cut, _BACKWARD)
    if walked is not None:
        sizes = {"room": cut.room, "split": cut.split, "tasks": walked.tasks}
        words = fill(LayerNormArgs, walked.args, **_layer_words(request, _BACKWARD, **sizes))
        first = Launch(layer_norm_backward(*walked.params), words, cut.splits)
    else:
        kernel = group_norm_backward(kind.code, _lanes(request), cut.period, cut.padded > 0)
        first = Launch(kernel, args, cut.units * cut.splits, 1, _scratch(request, cut))
    last = group_norm_parameters(kind.code, _lanes(request))
    return [first, Launch(last, args, cut.units, max(1, cut.units // 16), 16 * cut.room)]


def _forward(request: Request, statistics: bool = False) -> Primitive | Reason:
    reason = same_layout_why_not(request)
    walked = None if reason else _walked(request, statistics)
    if reason := reason or _why_not(request, walked):
        return reason
    passes = PASSES if request.problem.centred else PASSES - 1
    return Primitive(lambda: _seconds(request, walked, 1, passes), lambda: _launches(request, walked, statistics))


def _backward(request: Request) -> Primitive | Reason:
    reason = same_layout_why_not(request)
    walked = None if reason else _walked(request, True, gathers=False)
    if reason := reason or _why_not(request, walked):
        return reason
    if 0 in request.problem.shape:
        return "needs at least one element"
    if not request.problem.centred:
        return "needs statistics with a mean"
    cut = _group_cut(request, walked)
    work = 2 * cut.room * cut.units * cut.splits * request.types.src.computed.itemsize
    return Primitive(
        lambda: _seconds(request, walked, 2, BACKWARD_PASSES),
        lambda: _backward_launches(request, walked, cut),
        workspace=(work,),
    )


def _why_not(request: Request, walked: WalkedAxis | None) -> Reason | None:
    """Why not, for equal layouts."""
    p, dst = request.problem, request.dst
    if dst.ndim != 4 or walked is not None:
        return None
    at = geometry(dst, p.shape, request.types.src.itemsize)
    if dst.blocks[1] > 1 and at.channel != request.types.src.itemsize:
        return f"needs channels of a block that are neighbours, unlike {dst}"
    if p.per_pixel and (dst.blocks[0] > 1 or at.row != p.shape[3] * at.col):
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
        length = min(p.shape[1], cut.at.length)
        part = lanes if cut.period else length / -(-length // lanes)  # elements of a vector
        spans, tasks = cut.all_images * cut.rows * -(-p.shape[1] // length), cut.all_images * p.groups
    computed = passes * (size / part * VECTOR_CYCLES + spans * SPAN_CYCLES) * request.machine.cycle_seconds()
    busy = request.on_threads(min(request.threads, tasks))
    return busy.seconds(sources * kind.itemsize * size, kind.itemsize * size, computed)


# ---------------------------------------------------------------- batch normalisation in training


def _batch_why_not(request: Request) -> Reason | None:
    if request.src != request.dst:
        return "does not change the layout"
    if not request.src.is_native or request.src.blocks[0] > 1:
        return f"needs a layout with at most one block, of channels, unlike {request.src}"
    at = geometry(request.src, request.problem.shape, request.types.src.itemsize)
    if at.length > 1 and at.channel != request.types.src.itemsize:
        return f"needs channels of a block that are contiguous, unlike {request.src}"
    return None


def _batch_launches(request: Request, cut: Cut, names: tuple[str, ...], is_backward: bool, extra: bool) -> list[Launch]:
    p, kind, lanes = request.problem, request.types.src, _lanes(request)
    terms_at, count = 16 * cut.room * cut.units * cut.splits, p.shape[0] * p.shape[2] * p.shape[3]
    args = _args(request, cut, names, terms_at=terms_at, count=count)
    tasks, back, bounded = cut.units * cut.chunks, int(is_backward), int(is_backward and extra)
    chunk = chunk_of(tasks, cut.chunk * cut.unit * kind.itemsize, request.threads)
    sums = batch_sums(kind.code, lanes, cut.period, back, bounded)
    apply = batch_apply(kind.code, lanes, cut.period, cut.padded > 0, back, extra)
    return [
        Launch(sums, args, cut.units * cut.splits, 1, 3 * cut.room * kind.computed.itemsize),
        Launch(batch_terms(kind.code, back), args, cut.units, max(1, cut.units // 16)),
        Launch(apply, args, tasks, chunk),
    ]


_RUNNING = "old_mean", "old_variance", "new_mean", "new_variance"
_BATCH = "src", "scale", "shift", "dst", "mean", "inverse", "residual", *_RUNNING, "numbers", "work"
_BATCH_BACKWARD = "src", "grad", "scale", "shift", "mean", "inverse", "dst", "of_scale", "of_shift", "numbers", "work"


def _batch_row(name: str, names: tuple[str, ...]) -> Row:
    is_backward = "grad" in names

    def make(request: Request, extra: bool = False) -> Primitive | Reason:
        reason = _batch_why_not(request)
        if reason is not None:
            return reason

        def seconds() -> float:
            nbytes = request.types.src.itemsize * math.prod(request.problem.shape)
            return request.seconds((4 if is_backward else 2 + extra) * nbytes, nbytes, launches=3)

        cut = _batch_cut(request)
        work = cut.room * cut.units * (16 * cut.splits + TERMS * request.types.src.computed.itemsize)
        return Primitive(seconds, lambda: _batch_launches(request, cut, names, is_backward, extra), workspace=(work,))

    return Row(name, name, make, frozenset(FLOATS))


ROWS = (
    Row("group_norm", "group_norm", _forward, frozenset(FLOATS), whole_blocks=True),
    Row("group_norm_backward", "group_norm_backward", _backward, frozenset(FLOATS)),
    _batch_row("batch_norm", _BATCH),
    _batch_row("batch_norm_backward", _BATCH_BACKWARD),
)
