"""THE table of kernels: ordered, best first, the reference of each op last.

A new kernel is a row here; tests, benchmarks, the dispatcher and `explain` find it by itself.
"""

from __future__ import annotations

from blockconv.kernels import (
    box,
    direct,
    eltwise,
    grouped,
    lrn,
from blockconv.kernels import (
    box,
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
    pooling,
    reduce,
    reference,
    reorder,
    resize,
    softmax,
<<<<<<< HEAD
=======
    winograd,
>>>>>>> cc7c6de (Winograd convolution F(2x2), F(4x4), F(6x6) for every layout: three stages as kernels of their own, weighed against direct by cost and stated error)
)
from blockconv.kernels.table import Row, WeightForm

__all__ = ["TABLE", "Row", "WeightForm"]

TABLE: tuple[Row, ...] = (
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
