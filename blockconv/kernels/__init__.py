"""THE table of kernels: ordered, best first, the reference of each op last.

A new kernel is a row here; tests, benchmarks, the dispatcher and `explain` find it by itself.
"""

from __future__ import annotations

from blockconv.kernels import reorder
from blockconv.kernels.table import Row

__all__ = ["TABLE", "Row"]

TABLE: tuple[Row, ...] = (*reorder.ROWS,)
