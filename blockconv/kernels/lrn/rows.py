"""Local response normalisation across channels.

Buffers: source, destination. For 8-bit integers the primitive has the option `quantizations`, of source and
destination. It computes as if the source were dequantized and the result quantized.
"""

from __future__ import annotations

import math

from blockconv.core.types import BYTES, FLOATS, element
from blockconv.jit.records import fill
from blockconv.kernels.common.axis import Quantizations, contiguous_axis, cost, strided_axis
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.lrn.codegen import ANY_POWER, THREE_QUARTERS
from blockconv.kernels.lrn.kernels import LINE, ChannelWindow, ContiguousLrn, Factors, StridedLrn, lrn_lines, lrn_planes
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import Buffer, Launch

STRETCH = 8  # vectors of a plane in a task, if there are plenty: of less, memory streams worse


def _launches(request: Request, quantizations: Quantizations = None) -> list[Launch]:
    p, kind, threads = request.problem, request.types.src, request.threads
    itemsize = kind.itemsize
    if 0 in p.shape:
        return []
    held = kind.computed.itemsize
    lanes, axis = request.machine.lanes(held), contiguous_axis(request, 1, quantizations)
    channels, positions = p.shape[1], math.prod(p.shape) // p.shape[1]
    bits = element("float64").bits
    factors = Factors(scale=bits(p.alpha / p.size), bias=bits(p.bias), beta=bits(p.beta))
    window = ChannelWindow(size=p.size, before=(p.size - 1) // 2, factors=factors)
    params = (kind.code, lanes, THREE_QUARTERS if p.beta == 0.75 else ANY_POWER)
    if axis is not None:
        squares = LINE + -(-(channels + 2 * p.size) * held // LINE) * LINE
        args = fill(ContiguousLrn, axis, window=window, line=squares)
        scratch = squares + (channels * itemsize if axis.gathered else 0)
        chunk = chunk_of(positions, channels * itemsize, threads)
        return [Launch(lrn_lines(*params), args, positions, chunk, scratch=scratch)]
    axes = strided_axis(request, 1, quantizations)
    pixels = axes.inner
    stretch = min(STRETCH, positions // (4 * threads * lanes))
    task_pixels = max(1, stretch, TASK_BYTES // (channels * itemsize * lanes)) * lanes
    strided = StridedLrn(
        src=Buffer(0),
        dst=Buffer(1),
        pixels=pixels,
        task_pixels=task_pixels,
        channels=channels,
        window=window,
        integers=axes.integers,
    )
    return [Launch(lrn_planes(*params), strided, positions // pixels * -(-pixels // task_pixels), scratch=LINE)]


ROWS = (same_layout_row("lrn", "lrn", (*FLOATS, *BYTES), cost, _launches),)
