"""The row of depthwise weights' gradients: `kernels.depthwise.backward_weights`.

Buffers and options: as those of `kernels.conv.weights_rows`.
"""

from __future__ import annotations

import math

import numpy as np

from blockconv.core.layout import Layout
from blockconv.core.types import FLOATS, HALVES, Types
from blockconv.kernels.common.geometry import ConvSizes, image_blocks
from blockconv.kernels.depthwise.backward_weights import (
    ChannelVector,
    DepthwiseWeightsArguments,
    depthwise_weights,
    finish_depthwise_weights,
)
from blockconv.kernels.table import Primitive, Reason, Request, Row
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["BACKWARD_WEIGHTS"]

TASKS = 16  # that there are, where there is work enough: splits do not depend on the threads
SPLIT_BYTES = 1 << 18  # of both arrays that a split reads, at the least
SPARE = 4  # registers beside the sums
BORDER = 0.5  # of a product's time, what it takes to see whether a tap is outside
ROW_CYCLES = 40  # of a row of the gradient, of a vector of channels
INPUT, GRAD, DST, DST_BIAS, WORKSPACE = (Buffer(k) for k in range(5))
_OIHW = Layout("abcd")


def _lanes(request: Request) -> int:
    """Channels of a vector; 0 where there are too few contiguous ones."""
    types, most = request.types, request.machine.lanes(request.types.acc.itemsize)
    for of, type in ((request.source, types.src), (request.destination, types.src)):
        if of.channel != type.itemsize:
            return 0
        most = min(most, 1 << (of.length.bit_length() - 1))
    return most if 2 * most >= request.machine.lanes(types.acc.itemsize) else 0


def _vectors(request: Request, lanes: int) -> list[tuple[int, int, int, int]]:
    """The words of each `ChannelVector`."""
    s, g, found, c = request.source, request.destination, [], 0
    while c < request.problem.ic:
        count = min(lanes, request.problem.ic - c, s.length - c % s.length, g.length - c % g.length)
        found.append((s.offset(c), g.offset(c), c, count))
        c += count
    return found


def _splits(request: Request, vectors: int) -> tuple[int, int]:
    """(splits of the rows, groups of vectors)."""
    p = request.problem
    read = request.types.src.itemsize * (math.prod(p.src_shape) + math.prod(p.dst_shape))
    splits = max(1, min(TASKS, p.n * p.oh, read // SPLIT_BYTES))
    return splits, min(vectors, -(-TASKS // splits))


def _why_not(request: Request) -> Reason | None:
    p = request.problem
    for layout in (request.src, request.dst):
        if not layout.is_native:
            return f"needs layouts with at most one block of channels, unlike {layout}"
    if not p.is_depthwise or p.oc != p.ic:
        return "needs groups of one input channel and one output channel"
    most = request.machine.isa.registers - SPARE
    if p.kh * p.kw > most:
        return f"needs a window of at most {most} taps, so that their sums fit the registers"
    return None if _lanes(request) else "needs vectors of contiguous channels in both arrays"


def _make(request: Request, weights: Layout = _OIHW, bias: bool = False) -> Primitive | Reason:
    reason = _why_not(request)
    if reason is not None:
        return reason
    p, types, m, lanes = request.problem, request.types, request.machine, _lanes(request)
    vectors = _vectors(request, lanes)
    splits, groups = _splits(request, len(vectors))
    sums = splits * len(vectors) * (p.kh * p.kw + 1) * lanes * types.acc.itemsize

    def seconds() -> float:
        pixels = len(vectors) * p.n * p.oh * p.ow
        borders = 1 + BORDER * (p.kw - 1) / max(p.kw, p.ow) + BORDER * (p.kh - 1) / max(p.kh, p.oh)
        rows = len(vectors) * p.n * p.oh * ROW_CYCLES
        cycles = pixels * (p.kh * p.kw + 1) * borders + rows + 2 * sums / types.acc.itemsize / lanes
        return m.launch_seconds() + cycles * m.cycle_seconds() / min(request.threads, splits * groups)

    return Primitive(seconds, lambda: _ops(request, weights, bias), workspace=(sums,))


def _ops(request: Request, weights: Layout, bias: bool) -> list[Op]:
    p, types, lanes = request.problem, request.types, _lanes(request)
    vectors, acc = _vectors(request, lanes), types.acc
    splits, groups = _splits(request, len(vectors))
    src, grad = (
        image_blocks(layout, shape, types.src.itemsize)
        for layout, shape in ((request.src, p.src_shape), (request.dst, p.dst_shape))
    )
    inner = min(p.ow, -(-p.pw // p.sw))
    outer = max(inner, min(p.ow, (p.iw + p.pw - (p.kw - 1) * p.dw - 1) // p.sw + 1))
    axes = {axis.dim: axis.stride * types.dst.itemsize for axis in weights.axes(p.wei_shape)}
    args = DepthwiseWeightsArguments(
        src=INPUT,
        grad=GRAD,
        dst=DST,
        dst_bias=DST_BIAS if bias else 0,
        sums=WORKSPACE,
        table=OWN_TABLE,
        taps_at=ChannelVector.nbytes * len(vectors),
        vectors=len(vectors),
        groups=groups,
        splits=splits,
        source=request.source,
        gradient=request.destination,
        src_images=src[0],
        src_image_block=src[1],
        grad_images=grad[0],
        grad_image_block=grad[1],
        **ConvSizes.of(p),
        inner=inner,
        outer=outer,
        dst_o=axes[0],
    )
    taps = [h * axes[2] + w * axes[3] for h in range(p.kh) for w in range(p.kw)]
    table = np.array([*np.ravel(vectors), *taps], np.int64)
    kernel = depthwise_weights(types.src.code, int(request.machine.isa.fma), p.kh, p.kw, lanes, int(bias))
    finish = finish_depthwise_weights(acc.code, types.dst.code, lanes, p.kh * p.kw, int(bias))
    chunk = max(1, len(vectors) // 16)
    return [Op(kernel, args, splits * groups, 1, 256, table), Op(finish, args, len(vectors), chunk, 0, table)]


BACKWARD_WEIGHTS = Row(
    name="depthwise_backward_weights",
    op="conv2d_backward_weights",
    make=_make,
    dtypes=frozenset(str(types) for types in (*map(Types.all, FLOATS[:2]), *HALVES)),
)
