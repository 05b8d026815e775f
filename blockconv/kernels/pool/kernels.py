"""Pooling's kernels over planes of rows, columns and inner elements (see `blockconv.kernels.pool.rows`).

A task is some rows of outputs of one plane. What a window covers of the image comes from a table of rows and one of
columns, and what its sum is multiplied by from one more: no kernel clips a window, or counts or divides.

Here are the argument blocks, what all kernels share, and the kernels that read windows from the image itself; those
that reduce rows of windows into lines of scratch first, and those that find indices, are in `kernels_lines`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, group, word
from blockconv.jit.compiler import inline
from blockconv.jit.ir import load_bits, load_f, move, store_bits, store_f, store_i64
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.pool.codegen import (
    SUM,
    Reduction,
    TileRun,
    TileSpec,
    WindowRun,
    combine,
    identity,
    load_value,
    pool_tile,
    reduce_window,
    store_value,
)
from blockconv.kernels.pool.codegen_lines import FoldRun, PlaneRun, fold_planes, reduce_plane

# A worker's scratch, in bytes: a vector that changes no result, and lines.
FILL, LINE = 0, 64
MOST_FOLDED = 16  # planes whose vectors are folded together


# ---------------------------------------------------------------- argument blocks


class PoolArgs(Arguments):
    """A pool of planes: the image, its outputs, and the tasks. Windows' rows and columns are a dilation apart."""

    src = word("the image's first plane", "address")
    dst = word("the outputs' first plane", "address")
    table = word("a WindowRow for each row of outputs, a WindowColumn for each column, then scales", "address")
    oh = word("rows of outputs of a plane", "rows")
    ow = word("outputs of a row", "columns")
    iw = word("pixels of a row of the image", "columns")
    inner = word("elements of a pixel", "elements")
    masks = word("from the table to a mask of ones over a pixel's elements; that of the last block follows", "bytes")
    mask_bytes = word("from a mask to the next", "bytes")
    mask_period = word("of elements of a pixel after which a mask begins anew", "bytes")
    blocks = word("channel blocks that are planes of their own", "blocks")
    block_planes = word("planes from a channel block to the next", "planes")
    planes = word("planes of the inner of their two loops", "planes")
    s_outer = word("from a plane of the image to the next of the outer loop", "bytes")
    s_plane = word("from a plane of the image to the next of the inner loop", "bytes")
    s_row = word("from a row of the image to the next", "bytes")
    s_col = word("from a pixel of the image to the next", "bytes")
    d_outer = word("from a plane of outputs to the next of the outer loop", "bytes")
    d_plane = word("from a plane of outputs to the next of the inner loop", "bytes")
    d_row = word("from a row of outputs to the next", "bytes")
    d_col = word("from an output to the next", "bytes")
    row_step = word("from a row of a window to the next", "bytes")
    col_step = word("from a column of a window to the next", "bytes")
    pw = word("columns of padding at the beginning of a row", "columns")
    sw = word("columns from a window to the next", "columns")
    kw = word("columns of a window, padding included", "columns")
    task_rows = word("rows of outputs of a task, of which a plane's last task may have fewer", "rows")
    plane_tasks = word("tasks of a plane", "tasks")


class WindowsArgs(PoolArgs):
    """Windows whose channels may be cut into tasks too."""

    split = word("elements of a pixel that are one task's", "elements")
    splits = word("such parts of a pixel", "parts")


class PlaneArgs(PoolArgs):
    """Planes whose only window is the whole plane: `runs` times `run` groups of four vectors, then `left` elements."""

    runs = word("times that accumulators begin anew", "runs")
    run = word("groups of four vectors until they do", "groups")
    left = word("elements after these", "elements")


class WindowRow(Arguments):
    """What a row of windows covers of the image."""

    first = word("the first row that exists", "rows")
    taps = word("how many rows exist", "rows")
    scales = word("from the table to what each window's sum is multiplied by", "bytes")


class WindowColumn(Arguments):
    """What a column of windows covers of the image."""

    first = word("the first column that exists", "columns")
    taps = word("how many columns exist", "columns")


class ReferenceArgs(Arguments):
    """A pool from any layout to any other."""

    src = word("the source", "address")
    dst = word("the destination", "address")
    idx = word("the indices, int64s laid out as the destination, or 0", "address")
    table = word("as `PoolArgs.table`", "address")
    oh = word("rows of outputs", "rows")
    ow = word("columns of outputs", "columns")
    iw = word("columns of the image", "columns")
    channels = word("channels", "channels")
    padded = word("channels of the destination, padding included", "channels")
    row_step = word("from a row of a window to the next", "bytes")
    col_step = word("from a column of a window to the next", "bytes")
    dh = word("rows from a row of a window to the next", "rows")
    dw = word("columns from a column of a window to the next", "columns")
    s = group(Geometry, "of the source")
    d = group(Geometry, "of the destination")


# ---------------------------------------------------------------- what kernels share


class Plane(NamedTuple):
    """A plane."""

    src: Any  # address of its first pixel
    dst: Any  # address of its first output
    mask: Any  # address of zero bits for the elements of a pixel whose channels do not exist


class OutputRow(NamedTuple):
    """A row of outputs, and the rows of the image that its windows cover."""

    ih: Any  # the first row of the image
    rows: Any  # how many
    src: Any  # address of that row's first pixel
    dst: Any  # address of the first output
    scales: Any  # address of what the outputs' sums are multiplied by


@inline
def plane_at(a, number):
    """The `Plane` of this number, in the order of the storage."""
    outer = number // a.planes
    nearer = number - outer * a.planes
    is_last = number // a.block_planes % a.blocks == a.blocks - 1
    mask = a.table + a.masks + (a.mask_bytes if is_last else 0)
    return Plane(a.src + outer * a.s_outer + nearer * a.s_plane, a.dst + outer * a.d_outer + nearer * a.d_plane, mask)


@inline
def start(a, task):
    """(`Plane`, first row of outputs, row after the last) of a task."""
    plane_tasks, rows = a.plane_tasks, a.task_rows
    number = task // plane_tasks
    first = (task - number * plane_tasks) * rows
    return plane_at(a, number), first, min(a.oh, first + rows)


@inline
def output_row(a, plane, oh):
    """The `OutputRow` of a plane."""
    row = WindowRow(a.table)[oh]
    ih, rows, scales = row.first, row.taps, a.table + row.scales
    return OutputRow(ih, rows, plane.src + ih * a.s_row, plane.dst + oh * a.d_row, scales)


@inline
def window_column(a, ow):
    """(first column, how many) of a column of windows."""
    column = WindowColumn(a.table + WindowRow.nbytes * a.oh)[ow]
    return column.first, column.taps


@inline
def fill_identity(operation, element, itemsize, to, elements):
    """Fill `elements` elements with what changes no result."""
    for k in range(elements):
        store_value(to + k * itemsize, identity(operation, element), element)


@inline
def exists(mask, i, period, itemsize):
    """Whether an element's channel exists: of a pixel's elements, with a mask that begins anew."""
    return load_bits(mask + i * itemsize % period, itemsize) != 0


@inline
def store_result(operation, element, itemsize, to, value, scale):
    """Store what a window comes to: a sum times the number at `scale`."""
    if operation == SUM:
        store_f(to, value * load_f(scale, itemsize), itemsize)
    else:
        store_value(to, value, element)


# ---------------------------------------------------------------- one output at a time


@inline
def _offset(strides, n, c, h, w):
    """The offset of an element, in bytes."""
    at = n * strides.n + c // strides.length * strides.block + c % strides.length * strides.channel
    return at + h * strides.row + w * strides.col


@jit.kernel
def pool_reference(operation, element, indices):
    """From any layout to any other; a task is one row of one channel, padding channels included (they are zero).

    indices: 1 for maxima and where they are, h * width + w: of equals the first, of NaNs the last, as PyTorch has it.
    """
    itemsize = ElementType.of(element).itemsize

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
                    store_bits(to, 0, itemsize)
                    if indices:
                        store_i64(index_to, 0, 0)
                    continue
                column, cols = window_column(a, ow)
                start = a.src + _offset(a.s, n, c, ih, column)
                value, index = identity(operation, element), ih * iw + column
                for y in range(rows):
                    for x in range(cols):
                        more = load_value(start + y * a.row_step + x * a.col_step, element)
                        if not indices:
                            value = combine(operation, element, value, more)
                        elif more > value or more != more:
                            value, index = more, (ih + y * dh) * iw + column + x * dw
                store_result(operation, element, itemsize, to, value, scales + ow * itemsize)
                if indices:
                    store_i64(index_to, 0, index)

    return kernel


# ---------------------------------------------------------------- wide pixels


class Tile(NamedTuple):
    """The shape of `pool_tiles`' tiles."""

    pixels: int  # outputs
    kh: int  # rows of a window that are few enough to be unrolled, or 0
    kw: int
    stride: int
    dilation: int


@jit.kernel
def pool_tiles(operation, element, lanes, masked, *tile):
    """A task is rows of outputs, by tiles of some outputs by a vector of channels.

    A row's last tile, or vector, is moved back to be whole. `Tile` says what the last integers are.
    """
    pixels, kh, kw, stride, dilation = Tile(*tile)
    reduction, itemsize = Reduction(operation, element, lanes, masked), ElementType.of(element).itemsize
    span = (pixels - 1) * stride + (kw - 1) * dilation + 1
    inner_tile = pool_tile(reduction, TileSpec(pixels, kw, stride, dilation, 0, kh))
    border_tile = pool_tile(reduction, TileSpec(pixels, kw, stride, dilation, 1, 0))

    def kernel(args, first, last, scratch):
        a = PoolArgs(args)
        fill = scratch + FILL
        fill_identity(operation, element, itemsize, fill, 64 // itemsize)
        inner, iw, ow_count, pw = a.inner, a.iw, a.ow, a.pw
        s_col, d_col, row_step, period = a.s_col, a.d_col, a.row_step, a.mask_period
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                for at in range(0, ow_count, pixels):
                    ow = min(at, ow_count - pixels)
                    column = ow * stride - pw
                    inside = column >= 0 and column + span <= iw
                    for i_at in range(0, inner, lanes):
                        i = min(i_at, inner - lanes) * itemsize
                        run = TileRun(
                            src=row.src + column * s_col + i,
                            rows=row.rows,
                            row_step=row_step,
                            col_step=s_col,
                            column=column,
                            width=iw,
                            fill=fill,
                            dst=row.dst + ow * d_col + i,
                            d_step=d_col,
                            scales=row.scales + ow * itemsize,
                            mask=plane.mask + i % period if masked else 0,
                        )
                        if inside and (kh == 0 or row.rows == kh):
                            inner_tile(run)
                        else:
                            border_tile(run)

    return kernel


@jit.kernel
def pool_windows(operation, element, lanes, masked, vectors, unroll):
    """A task is rows of outputs, or some channels of them; each output by itself, whatever its window's size.

    `vectors` vectors of its channels are reduced together, `unroll` columns of its window at a time.
    """
    reduction, itemsize = Reduction(operation, element, lanes, masked), ElementType.of(element).itemsize
    width = vectors * lanes
    several, one = reduce_window(reduction, vectors, unroll), reduce_window(reduction, 1, 4)

    def kernel(args, first, last, scratch):
        a = WindowsArgs(args)
        s_col, d_col, splits = a.s_col, a.d_col, a.splits
        inner, row_step, col_step, period = a.inner, a.row_step, a.col_step, a.mask_period
        for split_task in range(first, last):
            task = split_task // splits
            i_first = (split_task - task * splits) * a.split
            i_last = min(inner, i_first + a.split)
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                for ow in range(a.ow):
                    column, cols = window_column(a, ow)
                    src, dst, scale = row.src + column * s_col, row.dst + ow * d_col, row.scales + ow * itemsize
                    i = i_first
                    while i + width <= i_last:
                        at = i * itemsize
                        m = plane.mask + at % period if masked else 0
                        several(WindowRun(src + at, row.rows, row_step, cols, col_step, dst + at, scale, m))
                        i += width
                    while i < i_last:
                        i = min(i, inner - lanes)
                        at = i * itemsize
                        m = plane.mask + at % period if masked else 0
                        one(WindowRun(src + at, row.rows, row_step, cols, col_step, dst + at, scale, m))
                        i += lanes

    return kernel


# ---------------------------------------------------------------- whole planes


@jit.kernel
def pool_planes(operation, element, lanes, masked, inner):
    """A task is a plane of narrow pixels, which becomes one pixel; a vector of pixels at a time, if pixels fill one."""
    reduction, itemsize = Reduction(operation, element, lanes, 0), ElementType.of(element).itemsize
    used, size, pixel = lanes // inner * inner, lanes * itemsize, inner * itemsize
    fold = lanes % inner == 0 and lanes // inner <= MOST_FOLDED
    planes = lanes // inner if fold else 1
    reduce, fold_all = reduce_plane(reduction, inner), fold_planes(reduction, planes)

    def kernel(args, first, last, scratch):
        a = PlaneArgs(args)
        runs, run, left, period = a.runs, a.run, a.left, a.mask_period
        scale = a.table + WindowRow(a.table).scales
        folded = scratch + LINE
        vectors = folded + size
        for at in range(first, last, planes):
            plane = max(first, min(at, last - planes))
            count = min(planes, last - plane)
            for k in range(count):
                reduce(PlaneRun(plane_at(a, plane + k).src, runs, run, left, vectors + k * size))
            dst = a.dst + plane * pixel
            whole = fold and count == planes
            if fold:
                fold_all(FoldRun(vectors, dst if whole else folded, scale))
            else:
                for i in range(inner):
                    value = identity(operation, element)
                    for k in range(i, used, inner):
                        value = combine(operation, element, value, load_value(vectors + k * itemsize, element))
                    store_result(operation, element, itemsize, folded + i * itemsize, value, scale)
            if not whole:
                for k in range(0, count * pixel, itemsize):
                    move(dst + k, folded + k, itemsize, 0)
            for k in range(count if masked else 0):
                mask = plane_at(a, plane + k).mask
                for i in range(inner):
                    if not exists(mask, i, period, itemsize):
                        store_bits(dst + k * pixel + i * itemsize, 0, itemsize)

    return kernel
