"""Pooling from any layout to any other, one output at a time."""

from blockconv import jit
from blockconv.jit.arguments import group, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import store_bits, store_i64
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.pool.codegen import WindowRun, reduce_element
from blockconv.kernels.pool.codegen_lines import IndexRun, max_with_index
from blockconv.kernels.pool.kernels import PoolWords, WindowRow, window_column
from blockconv.kernels.pool.reduction import PoolReduction


class ReferenceArgs(PoolWords):
    """A pool from any layout to any other."""

    channels = word("channels", "channels")
    padded = word("channels of the destination, padding included", "channels")
    dh = word("rows from a row of a window to the next", "rows")
    dw = word("columns from a column of a window to the next", "columns")
    s = group(Geometry, "of the source")
    d = group(Geometry, "of the destination")


@inline
def _offset(strides, n, c, h, w):
    """The offset of an element, in bytes."""
    at = n * strides.n + c // strides.length * strides.block + c % strides.length * strides.channel
    return at + h * strides.row + w * strides.col


@jit.kernel
def pool_reference(operation, element, indices):
    """From any layout to any other; a task is one row of one channel, padding channels included (they stand for zero).

    indices: 1 for maxima and where they are, h * width + w: of equals the first, of NaNs the last, as PyTorch has it.
    """
    reduction = PoolReduction(operation, element, 1)
    itemsize, held_bytes = reduction.itemsize, reduction.held.itemsize
    reduce, maximum = reduce_element(reduction), max_with_index(reduction)

    def kernel(args, first, last, scratch):
        a = ReferenceArgs(args)
        iw, row_step, col_step = a.iw, a.row_step, a.col_step
        for task in range(first, last):
            n, c, oh = task // a.oh // a.padded, task // a.oh % a.padded, task % a.oh
            row = WindowRow(a.table)[oh]
            ih, rows, scales = row.first, row.taps, a.table + row.scales
            for ow in range(a.ow):
                offset = _offset(a.d, n, c, oh, ow)
                to, index_to = a.dst + offset, a.idx + offset // itemsize * 8
                if c >= a.channels:
                    store_bits(to, a.integers.dst.zero_point, itemsize)
                    if indices:
                        store_i64(index_to, 0, 0)
                    continue
                column, cols = window_column(a, ow)
                start = a.src + _offset(a.s, n, c, ih, column)
                if indices:
                    at, below = ih * iw + column, a.dh * iw
                    run = start, rows, row_step, cols, col_step, at, below, a.dw, 0, to, index_to
                    maximum(IndexRun(*run, 0, 1))
                else:
                    scale = scales + ow * held_bytes
                    window = start, rows, row_step, cols, col_step, to, scale
                    reduce(WindowRun(*window, 0, 0, a.integers.address))

    return kernel
