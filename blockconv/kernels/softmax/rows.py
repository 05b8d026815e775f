"""Softmax, or its logarithm, along any axis of a layout with or without blocks of channels.

Buffers: source, destination (which may be the source). For 8-bit integers the primitive has the option `quantizations`,
of source and destination. It computes as if the source were dequantized and the result quantized.
"""

from __future__ import annotations

from blockconv.core.types import BYTES, FLOATS
from blockconv.kernels.common.axis import Quantizations, cost, walked_axis
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.softmax.kernels import softmax
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import Launch


def _launches(request: Request, quantizations: Quantizations = None) -> list[Launch]:
    p, element = request.problem, request.types.src
    if 0 in p.shape:
        return []
    at, more = walked_axis(request, p.axis, quantizations), (1,) if p.zero_rows else ()
    powers = p.shape[p.axis] * at.own_step if element != element.computed else 0
    return [at.launch(softmax(*at.params, p.log, *more), powers)]


def _why_not(request: Request) -> Reason | None:
    why_not, dst = same_layout_why_not(request), request.dst
    if why_not is None and request.problem.axis == 0 and dst.blocks[0] > 1:
        return f"does not normalise across the image blocks of {dst}"
    return why_not


ROWS = (same_layout_row("softmax", "softmax", (*FLOATS, *BYTES), cost, _launches, _why_not),)
