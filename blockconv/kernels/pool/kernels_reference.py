"""Pooling from any layout to any other, one output at a time."""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import group, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import store_bits, store_i64
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.pool.codegen import combine, identity
from blockconv.kernels.pool.kernels import PoolWords, WindowRow, reading, storing, window_column
from blockconv.kernels.pool.reduction import held_type


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
    itemsize, held_bytes = ElementType.of(element).itemsize, held_type(operation, ElementType.of(element)).itemsize
    read, store = reading(operation, element), storing(operation, element)

    def kernel(args, first, last, scratch):
        a = ReferenceArgs(args)
        iw, dh, dw = a.iw, a.dh, a.dw
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
                value, index = identity(operation, element), ih * iw + column
                for y in range(rows):
                    for x in range(cols):
                        more = read(a, start + y * a.row_step + x * a.col_step)
                        if not indices:
                            value = combine(operation, element, value, more)
                        elif more > value or more != more:
                            value, index = more, (ih + y * dh) * iw + column + x * dw
                store(a, to, value, scales + ow * held_bytes)
                if indices:
                    store_i64(index_to, 0, index)

    return kernel
