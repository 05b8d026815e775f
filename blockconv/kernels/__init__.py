"""THE table of kernels: ordered, best first, the reference of each op last.

A new kernel is a row here; tests, benchmarks, the dispatcher and `explain` find it by itself.
"""

from __future__ import annotations

from blockconv.kernels import (
    box,
    depthwise,
    direct,
    eltwise,
    grouped,
    lrn,
    permute,
    pooling,
    reduce,
    reference,
    reorder,
    resize,
    softmax,
    winograd,
)
from blockconv.kernels.table import Row, WeightForm

__all__ = ["TABLE", "Row", "WeightForm"]

TABLE: tuple[Row, ...] = (
    *depthwise.ROWS,
    *grouped.ROWS,
    *direct.ROWS,
    *winograd.ROWS,
    *reference.ROWS,
    *pooling.ROWS,
    *eltwise.ROWS,
    *permute.ROWS,
    *reorder.ROWS,
    *box.ROWS,
    *softmax.ROWS,
    *lrn.ROWS,
    *resize.ROWS,
    *reduce.ROWS,
)
