"""Softmax, or its logarithm, along any axis; local response normalisation across channels.

Buffers: source, destination (softmax's may be the source). For 8-bit integers the primitive has the option
`quantizations`, of source and destination. It computes as if the source were dequantized and the result quantized.
"""

from blockconv.core.types import BYTES, FLOATS, element
from blockconv.kernels.axis.kernels import LrnArgs, lrn, softmax
from blockconv.kernels.common.axis import Quantizations, cost, walked_axis
from blockconv.kernels.common.request import Reason, Request, same_layout_why_not
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import Launch


def _softmax(request: Request, quantizations: Quantizations = None) -> list[Launch]:
    p, element = request.problem, request.types.src
    if 0 in p.shape:
        return []
    at, more = walked_axis(request, p.axis, quantizations), (1,) if p.zero_rows else ()
    powers = p.shape[p.axis] * at.own_step if element != element.computed else 0
    return [at.launch(softmax(*at.params, p.log, *more), powers)]


def _softmax_why_not(request: Request) -> Reason | None:
    why_not, dst = same_layout_why_not(request), request.dst
    if why_not is None and request.problem.axis == 0 and dst.blocks[0] > 1:
        return f"does not normalise across the image blocks of {dst}"
    return why_not


def _lrn(request: Request, quantizations: Quantizations = None) -> list[Launch]:
    p, bits = request.problem, element("float64").bits
    if 0 in p.shape:
        return []
    at = walked_axis(request, 1, quantizations)
    # A window that reaches further than the channels do holds no more than all of them.
    before, after = (min(side, p.shape[1]) for side in ((p.size - 1) // 2, p.size // 2))
    kernel, squares = lrn(*at.params, p.beta == 0.75), (before + p.shape[1] + after) * at.own_step
    factors = {"scale": bits(p.alpha / p.size), "bias": bits(p.bias), "beta": bits(p.beta)}
    return [at.launch(kernel, squares, LrnArgs, before=before, after=after, **factors)]


ROWS = (
    same_layout_row("softmax", "softmax", (*FLOATS, *BYTES), cost, _softmax, _softmax_why_not),
    same_layout_row("lrn", "lrn", (*FLOATS, *BYTES), cost, _lrn),
)
