"""THE table of kernels: ordered, best first, the reference of each op last.

A new kernel is a row here; tests, benchmarks, the dispatcher and `explain` find it by itself.
"""

from blockconv.kernels.axis import rows as axis
from blockconv.kernels.backward_data import backward_data_row
from blockconv.kernels.conv import rows as conv
from blockconv.kernels.conv.weights_rows import BACKWARD_WEIGHTS
from blockconv.kernels.depthwise import rows as depthwise
from blockconv.kernels.depthwise.backward_rows import BACKWARD_DATA as DEPTHWISE_BACKWARD_DATA
from blockconv.kernels.depthwise.backward_rows import ROWS as DEPTHWISE_BACKWARD_WEIGHTS
from blockconv.kernels.dynamic import rows as dynamic
from blockconv.kernels.eltwise import rows as eltwise
from blockconv.kernels.indexed import rows as indexed
from blockconv.kernels.norm import rows as norm
from blockconv.kernels.pool import rows as pool
from blockconv.kernels.pool.backward_rows import BACKWARD as POOL_BACKWARD
from blockconv.kernels.product import rows as product
from blockconv.kernels.recurrent import rows as recurrent
from blockconv.kernels.reduce import rows as reduce
from blockconv.kernels.reorder import rows as reorder
from blockconv.kernels.reorder import shuffle
from blockconv.kernels.resize import rows as resize
from blockconv.kernels.table import Row, WeightForm
from blockconv.kernels.winograd import rows as winograd

__all__ = ["TABLE", "Row", "WeightForm"]

_CONVOLUTIONS: tuple[Row, ...] = (
    *depthwise.ROWS,
    conv.GROUPED,
    conv.DIRECT,
    conv.REGIONS,
    conv.MATRIX,
    conv.MATRIX_PIXELS,
    conv.PIXELS,
    *winograd.ROWS,
    conv.REFERENCE,
)
# Rows of floats. Regions need finite weights, and nobody knows whether weights that flow are finite.
_OF_FLOATS = (row for row in _CONVOLUTIONS if not row.name.endswith("_int8") and row is not conv.REGIONS)

TABLE: tuple[Row, ...] = (
    *_CONVOLUTIONS,
    DEPTHWISE_BACKWARD_DATA,
    *(backward_data_row(row, fills=conv.DIRECT) for row in _OF_FLOATS),
    *DEPTHWISE_BACKWARD_WEIGHTS,
    BACKWARD_WEIGHTS,
    *pool.ROWS,
    POOL_BACKWARD,
    *eltwise.ROWS,
    *shuffle.ROWS,
    *reorder.ROWS,
    *axis.ROWS,
    *norm.ROWS,
    *resize.ROWS,
    *reduce.ROWS,
    *indexed.ROWS,
    *product.ROWS,
    *recurrent.ROWS,
    *dynamic.ROWS,
)
