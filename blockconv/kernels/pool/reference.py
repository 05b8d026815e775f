"""How pooling from any layout to any other is bound."""

from __future__ import annotations

from blockconv.jit.records import fill
from blockconv.kernels.common.geometry import geometry
from blockconv.kernels.common.operands import POOL
from blockconv.kernels.pool.blocking import PoolBlocking, axis_of
from blockconv.kernels.pool.kernels_reference import ReferenceArgs, pool_reference
from blockconv.kernels.pool.tables import table_of
from blockconv.runtime import OWN_TABLE, Launch


def reference_op(b: PoolBlocking, indices: int) -> Launch:
    """The op of a pool from any layout to any other."""
    p, h, w = b.problem, axis_of(b.problem, "h"), axis_of(b.problem, "w")
    s, padded = geometry(b.src, p.src_shape, b.itemsize), b.dst.padded_shape(p.dst_shape)[1]
    args = fill(
        ReferenceArgs,
        p,
        b,
        src=POOL.src,
        dst=POOL.dst,
        idx=POOL.idx if indices else 0,
        table=OWN_TABLE,
        channels=p.ic,
        padded=padded,
        row_step=h.dilation * s.row,
        col_step=w.dilation * s.col,
        dh=h.dilation,
        dw=w.dilation,
        s=s,
        d=geometry(b.dst, p.dst_shape, b.itemsize),
    )
    kernel = pool_reference(*b.reduction[:2], indices)
    return Launch(kernel, args, p.n * padded * p.oh, 4, 0, table_of(b, columns=True))
