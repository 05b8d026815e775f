"""The rows of depthwise gradients: of weights, by vectors of channels or pixels, and of inputs, by vectors of pixels.

Buffers and options of the first two: as in `kernels.conv.weights_rows`.
"""

import math
from dataclasses import replace

import numpy as np

from blockconv.core.layout import Layout
from blockconv.core.types import OF_GRADIENTS, ElementType
from blockconv.jit.records import fill
from blockconv.kernels.common.activation import activation_kernel
from blockconv.kernels.common.dot import MULTIPLY_ADD, WIDENED
from blockconv.kernels.common.geometry import ChannelVector, channel_vectors, contiguous_unit, window_axis
from blockconv.kernels.common.operands import DST_BIAS, DST_WEIGHTS, GRAD, INPUT, OIHW, WORKSPACE, conv_operands
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.depthwise.backward import (
    DepthwiseDataArguments,
    DepthwiseWeightsArguments,
    GradientSpec,
    depthwise_data_of_pixels,
    depthwise_weights,
    finish_depthwise_weights,
)
from blockconv.kernels.rewritten import exchanged_problem
from blockconv.kernels.table import Epilogue, Primitive, Row, TapsPiece, WeightForm
from blockconv.runtime import OWN_TABLE, Launch

TASKS = 16  # that there are, where there is work enough: splits do not depend on the threads
SPLIT_BYTES = 1 << 18  # of both arrays that a split reads, at the least
CONTIGUOUS = 4  # vectors of a pixel that a task reads, at the least, where there are more of them than tasks need
SPARE = 4  # registers beside the sums
BORDER = 0.5  # of a product's time, what it takes to see whether a tap is outside
MOST_STRIDE = 4  # that gradients of inputs take; the code has a part for each remainder
DATA_SPARE = 3  # registers beside their weights, sums and what is loaded
DATA_CYCLES = 8  # of a step of theirs, beside its products, loads and stores
ROW_CYCLES = 40  # of a row of the gradient, of a vector of channels
PIXELS_CYCLES = 2  # of a vector of pixels, beside its loads
FOLD_CYCLES = 30  # to add the sums of a vector's pixels


def _lanes(request: Request) -> int:
    """Channels of a vector; 0 where there are too few contiguous ones."""
    most = request.lanes
    for of in (request.source, request.destination):
        if of.channel != request.types.src.itemsize:
            return 0
        most = min(most, 1 << (of.length.bit_length() - 1))
    return most if 2 * most >= request.lanes else 0


Vectors = list[tuple[int, ...]]


def _splits(request: Request, vectors: int, along_pixels: bool) -> tuple[int, int]:
    """(splits of the rows, groups of vectors). Planes are shared first: each is read by one task."""
    p = request.problem
    read = request.types.src.itemsize * (math.prod(p.src_shape) + math.prod(p.dst_shape))
    most = -(-TASKS // vectors) if along_pixels else TASKS
    splits = max(1, min(most, p.n * p.oh, read // SPLIT_BYTES))
    groups = -(-TASKS // splits)
    if not along_pixels:
        # Rows that the next row of the gradient reads again stay in the first-level cache.
        again = request.machine.isa.vector_bytes * (p.iw * ((p.kh - 1) * p.dh + 1) + p.ow)
        wanted = -(-vectors * again // (request.machine.profile.caches["L1"] // 2))
        groups = max(groups, min(wanted, vectors // CONTIGUOUS))
    return splits, min(vectors, groups)


def _unit(request: Request, type: ElementType) -> int:
    """Channels of a pixel that are contiguous and followed by the next pixel, in both arrays; else 0.

    type: of the second array.
    """
    unit = contiguous_unit(request.source, request.types.src.itemsize)
    is_part = 2 * unit <= request.lanes and not unit & (unit - 1)
    return unit if is_part and unit == contiguous_unit(request.destination, type.itemsize) else 0


def _spec(request: Request, unit: int, columns: int, bias: bool = False) -> GradientSpec:
    """Half a vector, or less, serves rows of so many columns that it holds: fewer sums are added at the end."""
    p, types, lanes = request.problem, request.types, request.lanes
    while lanes > 4 and lanes >= 2 * max(unit, columns * unit):
        lanes //= 2
    codes = types.src.code, types.dst.code, int(request.machine.isa.fma)
    return GradientSpec(*codes, p.kh, p.kw, p.sh, p.sw, p.dh, p.dw, lanes, unit, int(bias))


def _why_not(request: Request) -> Reason | None:
    p = request.problem
    if not p.is_depthwise or p.oc != p.ic:
        return "needs groups of one input channel and one output channel"
    most = request.machine.isa.registers - SPARE
    if p.kh * p.kw > most:
        return f"needs a window of at most {most} taps, so that their sums fit the registers"
    return None


def _channels(request: Request, weights: Layout = OIHW, bias: bool = False) -> Primitive | Reason:
    lanes = _lanes(request)
    reason = _why_not(request) or (None if lanes else "needs vectors of contiguous channels in both arrays")
    return reason or _primitive(request, replace(_spec(request, lanes, 1, bias), lanes=lanes), weights)


def _pixels(request: Request, weights: Layout = OIHW, bias: bool = False) -> Primitive | Reason:
    unit, reason = _unit(request, request.types.src), _why_not(request)
    if reason is None and not unit:
        reason = "needs vectors of contiguous pixels, of the same few channels in both arrays"
    if reason is None and request.problem.sw > 2:
        reason = f"needs a horizontal stride of 1 or 2, not {request.problem.sw}"
    return reason or _primitive(request, _spec(request, unit, request.problem.ow, bias), weights)


def _primitive(request: Request, spec: GradientSpec, weights: Layout) -> Primitive:
    p, types, m = request.problem, request.types, request.machine
    vectors = channel_vectors(request.source, request.destination, p.ic, spec.unit)
    splits, groups = _splits(request, len(vectors), spec.pixels > 1)
    sums = splits * len(vectors) * (p.kh * p.kw + 1) * spec.unit * types.acc.itemsize

    def seconds() -> float:
        if spec.pixels == 1:
            borders = 1 + BORDER * (p.kw - 1) / max(p.kw, p.ow) + BORDER * (p.kh - 1) / max(p.kh, p.oh)
            cycles = p.ow * (p.kh * p.kw + 1) * borders + ROW_CYCLES
        else:
            each = max(spec.weights_loads, spec.sums / 2) + p.kh * p.kw * (p.sw - 1) / 2 + PIXELS_CYCLES
            cycles = -(-p.ow // spec.pixels) * each
        cycles = len(vectors) * (p.n * p.oh * cycles + FOLD_CYCLES * splits * (spec.pixels > 1))
        cycles += 2 * sums / types.acc.itemsize / spec.unit
        return m.launch_seconds() + cycles * m.cycle_seconds() / min(request.threads, splits * groups)

    return Primitive(seconds, lambda: _bind(request, spec, vectors, splits, groups, weights), workspace=(sums,))


def _bind(
    request: Request, spec: GradientSpec, vectors: Vectors, splits: int, groups: int, weights: Layout
) -> list[Launch]:
    p, types = request.problem, request.types
    # Vectors of pixels are read whole, past the last tap of their last pixel.
    x, reach = ("w", spec.bases[-1] + p.sw - 1) if spec.pixels > 1 else ("h", (p.kh - 1) * p.dh)
    axis = window_axis(p, x)
    inner = min(axis.out, -(-axis.begin // axis.stride))
    outer = max(inner, min(axis.out, (axis.size + axis.begin - reach - 1) // axis.stride + 1))
    axes = {axis.dim: axis.stride * types.dst.itemsize for axis in weights.axes(p.wei_shape)}
    taps = [h * axes[2] + w * axes[3] for h in range(p.kh) for w in range(p.kw)]
    # Sums of all taps of a channel that are, as they are in memory, what is wanted.
    is_dense = [*taps, axes[0]] == [k * types.dst.itemsize for k in range(len(taps) + 1)]
    is_finished = is_dense and spec.unit == splits == 1 and types.dst == types.acc and not spec.bias
    args = fill(
        DepthwiseWeightsArguments,
        p,
        src=INPUT,
        grad=GRAD,
        dst=DST_WEIGHTS,
        dst_bias=DST_BIAS if spec.bias else 0,
        sums=DST_WEIGHTS if is_finished else WORKSPACE,
        table=OWN_TABLE,
        taps_at=ChannelVector.nbytes * len(vectors),
        vectors=len(vectors),
        groups=groups,
        splits=splits,
        source=request.source,
        gradient=request.destination,
        inner=inner,
        outer=outer,
        dst_o=axes[0],
    )
    table = np.array([*np.ravel(vectors), *taps], np.int64)
    op = Launch(depthwise_weights(spec), args, splits * groups, 1, spec.weights_zeros, table)
    if is_finished:
        return [op]
    finish = finish_depthwise_weights(types.acc.code, types.dst.code, spec.unit, p.kh * p.kw, spec.bias)
    chunk = max(1, len(vectors) // 16)
    return [op, Launch(finish, args, len(vectors), chunk, 0, table)]


ROWS = (
    Row("depthwise_backward_weights", "conv2d_backward_weights", _channels, OF_GRADIENTS),
    Row("depthwise_backward_weights_pixels", "conv2d_backward_weights", _pixels, OF_GRADIENTS),
)


# ---------------------------------------------------------------- gradients of inputs


def _data_why_not(request: Request, unit: int) -> Reason | None:
    p, isa = request.problem, request.machine.isa
    if not p.is_depthwise or p.oc != p.ic:
        return "needs groups of one input channel and one output channel"
    if not (2 <= p.sw <= MOST_STRIDE and p.sh <= MOST_STRIDE):
        return f"needs strides of at most {MOST_STRIDE}, and a horizontal one of at least 2, not {p.sh} and {p.sw}"
    if not unit:
        return "needs vectors of contiguous pixels, of the same few channels in both arrays"
    if p.ic % unit:
        return f"needs a multiple of {unit} channels, not {p.ic}"
    if not isa.has_masks(request.types.src.itemsize):
        return "needs loads and stores with masks"
    return None


def _data_spec(request: Request, unit: int) -> GradientSpec:
    p = request.problem
    spec = replace(_spec(request, unit, -(-p.iw // p.sw)), top=p.ph % p.sh, left=p.pw % p.sw)
    needed = p.kh * p.kw + spec.loads + p.sw + DATA_SPARE
    return replace(spec, holds=int(needed <= request.machine.isa.registers))


_NO_EPILOGUE = Epilogue()


def _data(request: Request) -> Primitive | Reason:
    p, types, m = request.problem, request.types, request.machine
    unit = _unit(request, types.dst)
    reason = _data_why_not(request, unit)
    if reason:
        return reason
    spec, planes = _data_spec(request, unit), p.n * (p.ic // unit)
    weights = WeightForm(
        Layout(f"Abcde{unit}a" if unit > 1 else "abcde"), 1, dot=WIDENED if types.src.is_half else MULTIPLY_ADD
    )
    form = weights._replace(pieces=(TapsPiece(exchanged_problem(p), weights, ((0, 1), (0, 1))),))

    def seconds() -> float:
        each = max(p.kh * p.kw, spec.loads) + p.sw * p.sh + DATA_CYCLES
        steps = planes * -(-p.ih // p.sh) * -(-p.iw // (p.sw * spec.pixels))
        return request.seconds(request.src_bytes, request.dst_bytes, steps * each * m.cycle_seconds())

    def launches(epilogue: Epilogue = _NO_EPILOGUE) -> list[Launch]:
        assert not epilogue.residual
        activate = activation_kernel(epilogue.activation, spec.code())
        args = fill(
            DepthwiseDataArguments,
            p,
            conv_operands(epilogue.residual, activate),
            source=request.source,
            destination=request.destination,
            blocks=p.ic // unit,
        )
        chunk = max(1, planes // (16 * request.threads))
        return [Launch(depthwise_data_of_pixels(spec), args, planes, chunk, spec.data_zeros)]

    return Primitive(seconds, launches, weights=form)


BACKWARD_DATA = Row(
    "conv_backward_data_depthwise_pixels",
    "conv2d_backward_data",
    _data,
    OF_GRADIENTS,
)
