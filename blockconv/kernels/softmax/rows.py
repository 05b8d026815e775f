"""Softmax, or its logarithm, along any axis of a layout with or without blocks of channels.

Buffers: source, destination (which may be the source). For 8-bit integers the primitive has the option `quantizations`,
of source and destination. It computes as if the source were dequantized and the result quantized.
"""

from __future__ import annotations

import math

from blockconv.core.types import BYTES, FLOATS
from blockconv.kernels.common.axis import Quantizations, contiguous_axis, cost, strided_axis
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.softmax.kernels import LINE, softmax_lines, softmax_planes
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import Launch


def _launches(request: Request, quantizations: Quantizations = None) -> list[Launch]:
    p, layout, element, threads = request.problem, request.dst, request.types.src, request.threads
    itemsize = element.itemsize
    if 0 in p.shape:
        return []
    more = (1,) if p.zero_rows else ()
    is_narrow = element != element.computed
    lanes, nbytes = request.machine.lanes(element.computed.itemsize), p.shape[p.axis] * itemsize
    contiguous = contiguous_axis(request, p.axis, quantizations)
    if contiguous is not None:
        positions = math.prod(p.shape) // p.shape[p.axis]
        kernel = softmax_lines(element.code, lanes, int(p.log), *more)
        powers = p.shape[p.axis] * element.computed.itemsize if is_narrow else 0
        scratch = -(-nbytes // LINE) * LINE * contiguous.gathered + powers
        return [Launch(kernel, contiguous, positions, chunk_of(positions, nbytes, threads), scratch)]
    strided = strided_axis(request, p.axis, quantizations)
    positions = layout.size(p.shape) // p.shape[p.axis]
    tasks = positions // strided.inner * -(-strided.inner // lanes)
    ragged = layout.padded_shape(p.shape) != p.shape
    kernel = softmax_planes(element.code, lanes, int(p.log), int(ragged), *more)
    powers = p.shape[p.axis] * lanes * element.computed.itemsize if is_narrow else 0
    return [Launch(kernel, strided, tasks, chunk_of(tasks, nbytes * lanes, threads), powers)]


def _why_not(request: Request) -> Reason | None:
    why_not, dst = same_layout_why_not(request), request.dst
    if why_not is None and request.problem.axis == 0 and dst.blocks[0] > 1:
        return f"does not normalise across the image blocks of {dst}"
    return why_not


ROWS = (same_layout_row("softmax", "softmax", (*FLOATS, *BYTES), cost, _launches, _why_not),)
