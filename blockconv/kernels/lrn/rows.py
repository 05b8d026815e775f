"""Local response normalisation across channels.

Buffers: source, destination. For 8-bit integers the primitive has the option `quantizations`, of source and
destination. It computes as if the source were dequantized and the result quantized.
"""

from __future__ import annotations

from blockconv.core.types import BYTES, FLOATS, element
from blockconv.kernels.common.axis import Quantizations, cost, walked_axis
from blockconv.kernels.common.request import Request
from blockconv.kernels.lrn.kernels import LrnArgs, lrn
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import Launch


def _launches(request: Request, quantizations: Quantizations = None) -> list[Launch]:
    p, bits = request.problem, element("float64").bits
    if 0 in p.shape:
        return []
    at = walked_axis(request, 1, quantizations)
    # A window that reaches further than the channels do holds no more than all of them.
    before, after = (min(side, p.shape[1]) for side in ((p.size - 1) // 2, p.size // 2))
    kernel, squares = lrn(*at.params, p.beta == 0.75), (before + p.shape[1] + after) * at.own_step
    factors = {"scale": bits(p.alpha / p.size), "bias": bits(p.bias), "beta": bits(p.beta)}
    return [at.launch(kernel, squares, LrnArgs, before=before, after=after, **factors)]


ROWS = (same_layout_row("lrn", "lrn", (*FLOATS, *BYTES), cost, _launches),)
