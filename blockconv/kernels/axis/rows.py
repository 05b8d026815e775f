"""Softmax, or its logarithm, along any axis; local response normalisation across channels.

Buffers: source, destination (softmax's may be the source). For 8-bit integers the primitive has the option
`quantizations`, of source and destination. It computes as if the source were dequantized and the result quantized.
"""

from collections.abc import Callable, Collection
from typing import Any

from blockconv.core.types import BYTES, FLOATS, element
from blockconv.kernels.axis.kernels import LrnArgs, lrn, softmax
from blockconv.kernels.common.axis import Quantizations, WalkedAxis, walked_axis
from blockconv.kernels.common.request import Reason, Request, same_layout_why_not
from blockconv.kernels.table import Row, same_layout_row
from blockconv.runtime import Launch

MULTIPLY_ADDS = 60.0  # time of a vector of results with an exponential or a power, in multiply-adds


def axis_row(
    op: str,
    dtypes: Collection[str],
    launch: Callable[[Any, WalkedAxis], Launch],
    multiply_adds: float = MULTIPLY_ADDS,
) -> Row:
    """The `Row` of an op whose results need all elements of the problem's `axis`.

    launch(problem, walked): the launch for an array with elements. multiply_adds: the time of a vector of results.
    """

    def why_not(request: Request) -> Reason | None:
        if request.problem.axis == 0 and request.dst.blocks[0] > 1:
            return f"does not compute across the image blocks of {request.dst}"
        return same_layout_why_not(request)

    def launches(request: Request, quantizations: Quantizations = None) -> list[Launch]:
        p = request.problem
        return [] if 0 in p.shape else [launch(p, walked_axis(request, p.axis, quantizations))]

    def seconds(request: Request) -> float:
        """Seconds to move source and destination, or to compute each vector, or part of one, of a block."""
        layout, size = request.dst, request.dst.size(request.problem.shape)
        part = min(16, layout.blocks[1]) if layout.is_blocked and layout.blocks[1] > 1 else 16
        nbytes, computed = size * request.itemsize, size / part * request.machine.fma_seconds(16, 4)
        return request.seconds(nbytes, nbytes, computed * multiply_adds)

    return same_layout_row(op, op, dtypes, seconds, launches, why_not)


def _softmax(p: Any, at: WalkedAxis) -> Launch:
    powers = p.shape[p.axis] * at.own_step if at.element != at.element.computed else 0
    return at.launch(softmax(*at.params, p.log, *(1,) if p.zero_rows else ()), powers)


def _lrn(p: Any, at: WalkedAxis) -> Launch:
    bits = element("float64").bits
    # A window wider than the channels holds no more than all of them.
    before, after = (min(side, p.shape[1]) for side in ((p.size - 1) // 2, p.size // 2))
    kernel, squares = lrn(*at.params, p.beta == 0.75), (before + p.shape[1] + after) * at.own_step
    factors = {"scale": bits(p.alpha / p.size), "bias": bits(p.bias), "beta": bits(p.beta)}
    return at.launch(kernel, squares, LrnArgs, before=before, after=after, **factors)


ROWS = axis_row("softmax", (*FLOATS, *BYTES), _softmax), axis_row("lrn", (*FLOATS, *BYTES), _lrn)
