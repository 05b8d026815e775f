"""Pooling's kernels over planes of rows, columns and inner elements (see `blockconv.kernels.pool.rows`).

A task is some rows of outputs of one plane. A table of rows and one of columns hold the part of the image that each
window covers. A third holds the factors of sums. So no kernel clips a window, or counts or divides.

This module has the argument blocks, code that all kernels share, and the kernels that read windows from the image
itself. `kernels_lines` has the kernels that first reduce rows of windows into lines of scratch, those for indices, and
the one that takes any two layouts.
"""

from typing import Any, NamedTuple

from blockconv import jit
from blockconv.jit.arguments import Arguments, group, held, word
from blockconv.kernels.common.conversion import ConversionArguments
from blockconv.kernels.common.copies import gather_window
from blockconv.kernels.common.geometry import Geometry, ImageSizes
from blockconv.kernels.common.operands import PoolOperands
from blockconv.kernels.pool.codegen import (
    PoolRun,
    PoolTile,
    fold_pixels,
    max_with_index,
    reduce_plane,
    reduce_tile,
    reduce_window,
    store_window,
)
from blockconv.kernels.pool.reduction import PoolReduction, reducer

# A worker's scratch, in bytes: a vector that changes no result, and lines.
FILL, LINE = 0, 64
MOST_FOLDED = 16  # outputs whose vectors are folded together


# ---------------------------------------------------------------- argument blocks


class PoolArgs(PoolOperands, ImageSizes):
    """A pool of planes: the image, its outputs, its windows, whose rows and columns are a dilation apart, and tasks.

    Words that only some kernels read are 0 for the others.
    """

    table = word("a `WindowRow` for each row of outputs, a `Covered` for each column, then scales", "address")
    s = group(Geometry, "the strides of the image; planes have strides of their own")
    d = group(Geometry, "those of the outputs")
    sw = word("columns from a window to the next", "columns")
    kw = word("columns of a window, padding included", "columns")
    dh = word("rows from a row of a window to the next", "rows")
    dw = word("columns from a column of a window to the next", "columns")
    row_step = word("from a row of a window to the next", "bytes")
    col_step = word("from a column of a window to the next", "bytes")
    integers = group(ConversionArguments, "where the image is of integers")
    inner = word("elements of a pixel", "elements", 0)
    masks = word("from the table to a mask of ones for a pixel or a row; that of the last block follows", "bytes", 0)
    mask_bytes = word("from a mask to the next", "bytes", 0)
    blocks = word("channel blocks that are planes of their own", "blocks", 0)
    block_planes = word("planes from a channel block to the next", "planes", 0)
    planes = word("planes of the inner of their two loops", "planes", 0)
    s_outer = word("from a plane of the image to the next of the outer loop", "bytes", 0)
    s_plane = word("from a plane of the image to the next of the inner loop", "bytes", 0)
    d_outer = word("from a plane of outputs to the next of the outer loop", "bytes", 0)
    d_plane = word("from a plane of outputs to the next of the inner loop", "bytes", 0)
    task_rows = word("rows of outputs of a task, of which a plane's last task may have fewer", "rows", 0)
    plane_tasks = word("tasks of a plane", "tasks", 0)
    part = word("elements of a pixel that are computed for all rows before the next", "elements", 0)
    parts = word("such parts", "parts", 0)
    gathered_row = word("from a row of a gathered image to the next; 0 where a task gathers nothing", "bytes", 0)
    line_elements = word("elements of a line, with margins that stand for the padding, or of a plane", "elements", 0)
    line_bytes = word("from a line to the next", "bytes", 0)
    flags = word("from the table to what `reduce_line` reads of columns: bytes for a row's elements, a tap", "bytes", 0)
    channels = word("of the reference: channels", "channels", 0)
    padded = word("channels of the destination, padding included", "channels", 0)


class Covered(Arguments):
    """The part of an axis of the image that a row, or a column, of windows covers."""

    first = word("the first element that exists")
    taps = word("how many exist")


class WindowRow(Covered):
    """The rows of the image that a row of windows covers."""

    scales = word("from the table to what each window's sum is multiplied by, or that of integers divided by", "bytes")


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
    scales: Any  # address of the scales of the outputs' sums


def plane_at(a, number):
    """The `Plane` of this number, in the order of the storage."""
    outer = number // a.planes
    nearer = number - outer * a.planes
    is_last = number // a.block_planes % a.blocks == a.blocks - 1
    mask = a.table + a.masks + (a.mask_bytes if is_last else 0)
    return Plane(a.src + outer * a.s_outer + nearer * a.s_plane, a.dst + outer * a.d_outer + nearer * a.d_plane, mask)


def start(a, task):
    """(`Plane`, first row of outputs, row after the last) of a task."""
    plane_tasks, rows = a.plane_tasks, a.task_rows
    number = task // plane_tasks
    first = (task - number * plane_tasks) * rows
    return plane_at(a, number), first, min(a.oh, first + rows)


def output_row(a, plane, oh):
    """The `OutputRow` of a plane."""
    row = WindowRow(a.table)[oh]
    ih, rows, scales = row.first, row.taps, a.table + row.scales
    return OutputRow(ih, rows, plane.src + ih * a.s.row, plane.dst + oh * a.d.row, scales)


def window_column(a, ow):
    """(first column, how many) of a column of windows."""
    column = Covered(a.table + WindowRow.nbytes * a.oh)[ow]
    return column.first, column.taps


# ---------------------------------------------------------------- tiles and windows


def _gathered_image(a, image, at, oh_first, oh_last, window, size):
    """Gather the pixels that some rows of outputs read. Returns where the image would begin, seen from these.

    at, size: of each pixel, from its first byte on and how many; these are a pixel's of the window.
    """
    top, end = 1 << 62, 0
    for oh in range(oh_first, oh_last):
        row = WindowRow(a.table)[oh]
        if row.taps > 0:
            top, end = min(top, row.first), max(end, row.first + (row.taps - 1) * a.dh + 1)
    top = min(top, end)
    gather_window(window, size, image + top * a.s.row + at, a.s.row, a.s.col, end - top, a.iw, size)
    return window - top * a.iw * size - at


def _one_tile(e, tile, is_wide, is_inside, run):
    """A tile, by the code for its rows; is_inside: all of its columns are in the image."""
    kh = tile.kh
    if is_inside and (kh == 0 or run.rows == kh):
        reduce_tile(e, tile, 0, kh, run)
    elif is_wide or kh == 0 or run.rows != kh:
        reduce_tile(e, tile, 1, 0, run)
    else:
        reduce_tile(e, tile, 1, kh, run)


@jit.unrolled_kernel
def pool_tiles(reduction: PoolReduction, tile: PoolTile):
    """A task is rows of outputs, by tiles of some outputs by a vector of channels, or of vectors of whole pixels.

    A row's last tile, or a pixel's last vector, is moved back to be whole.
    """
    lanes, itemsize, held_bytes = reduction.lanes, reduction.itemsize, reduction.held.itemsize
    span, is_wide = tile.span(reduction.lanes), tile.inner == reduction.lanes
    # Columns count pixels, or elements where a vector has several pixels.
    unit, span, width = (1, span, tile.vectors) if is_wide else (tile.inner, span * lanes, tile.vectors * lanes)

    def kernel(args, first, last, scratch):
        a = held(PoolArgs(args))
        e, fill = reducer(reduction, a.integers.address), scratch + FILL
        if is_wide:
            e.store_padding(fill, a.integers.src.zero_point)
        s_row, s_col, d_col = a.s.row, a.s.col, a.d.col
        if a.gathered_row:
            s_row, s_col = a.gathered_row, a.part * itemsize
        step, d_step = s_col, d_col
        if not is_wide:
            s_col, d_col, step, d_step = itemsize, itemsize, lanes * itemsize, lanes * itemsize
        elements, outputs = a.iw * unit, a.ow * unit
        for task in range(first, last):
            plane, oh_first, oh_last = start(a, task)
            for number in range(a.parts):
                image, part = plane.src, number * a.part
                if a.gathered_row:
                    image = _gathered_image(a, image, part * itemsize, oh_first, oh_last, scratch + LINE, s_col)
                end = part + a.part if is_wide else 1
                for oh in range(oh_first, oh_last):
                    row = output_row(a, plane, oh)
                    src = image + row.ih * s_row
                    for at in range(0, outputs, width):
                        done = max(0, min(at, outputs - width))
                        column = done * tile.stride - a.pw * unit - tile.shift
                        is_inside = column >= 0 and column + span <= elements
                        for i_at in range(part, end, lanes):
                            i = min(i_at, a.inner - lanes) * itemsize if is_wide else 0
                            run = PoolRun(
                                src=src + column * s_col + i,
                                step=step,
                                rows=row.rows,
                                row_step=a.dh * s_row,
                                dst=row.dst + done * d_col + i,
                                d_step=d_step,
                                scales=row.scales + done * held_bytes,
                                mask=plane.mask + (i if is_wide else done * itemsize),
                                count=outputs,
                                edge=fill,
                                column=column,
                                width=elements,
                            )
                            _one_tile(e, tile, is_wide, is_inside, run)

    return kernel


@jit.unswitched_kernel
def pool_windows(reduction: PoolReduction, vectors, unroll, indices):
    """A task is rows of outputs, or some channels of them; each output by itself, whatever its window's size.

    `vectors` vectors of its channels are reduced together, `unroll` columns of its window at a time. The remainder is
    reduced as whole vectors, which overlap with channels before. indices: 1 for maxima, by one vector, and where they
    are.
    """
    lanes, itemsize, held_bytes = reduction.lanes, reduction.itemsize, reduction.held.itemsize
    width = vectors * lanes

    def kernel(args, first, last, scratch):
        a = held(PoolArgs(args))
        e, count = reducer(reduction, a.integers.address), min(width, a.inner)
        moved = (count - lanes) * itemsize
        for number in range(first, last):
            task = number // a.parts
            i_first = (number - task * a.parts) * a.part
            i_last = min(a.inner, i_first + a.part)
            plane, oh_first, oh_last = start(a, task)
            for oh in range(oh_first, oh_last):
                row = output_row(a, plane, oh)
                for ow in range(a.ow):
                    column, cols = window_column(a, ow)
                    src, dst, scale = row.src + column * a.s.col, row.dst + ow * a.d.col, row.scales + ow * held_bytes
                    for i in range(i_first, i_last, width):
                        at = max(0, min(i, a.inner - width)) * itemsize
                        mask = plane.mask + at
                        run = PoolRun(src + at, a.col_step, row.rows, a.row_step, dst + at, 0, scale, mask)
                        if indices:
                            of, to = row.ih * a.iw + column, a.idx + (dst + at - a.dst) // itemsize * 8
                            max_with_index(e, a, run._replace(count=lanes, cols=cols, index=of, idx=to), 0, 0, 1)
                            continue
                        e.watch()
                        store_window(e, reduce_window(e, vectors, unroll, run, cols, moved), run, moved)
                        if e.met_nan():
                            store_window(e, reduce_window(e, vectors, unroll, run, cols, moved), run, moved)

    return kernel


# ---------------------------------------------------------------- whole planes


@jit.kernel
def pool_planes(reduction: PoolReduction, inner):
    """A task is `ow` planes of pixels of `inner` elements, at most a vector's. Each plane becomes one pixel.

    The vectors of several planes are folded together.
    """
    lanes, itemsize, held_bytes = reduction.lanes, reduction.itemsize, reduction.held.itemsize
    pixels = 1 << (lanes // inner).bit_length() - 1
    used, outputs, size = pixels * inner, min(pixels, MOST_FOLDED), lanes * held_bytes

    def kernel(args, first, last, scratch):
        a = held(PoolArgs(args))
        e, vectors, elements = reducer(reduction, a.integers.address), scratch + LINE, a.line_elements
        scales = a.table + WindowRow(a.table).scales
        for task in range(first, last):
            plane = plane_at(a, task)
            for at in range(0, a.ow, outputs):
                count = min(outputs, a.ow - at)
                for k in range(count):
                    src, to = plane.src + (at + k) * a.s.col, vectors + k * size
                    e.watch()
                    e.store(reduce_plane(e, used, src, elements)[0], to)
                    if e.met_nan():
                        e.store(reduce_plane(e, used, src, elements)[0], to)
                run = PoolRun(vectors, 0, 0, 0, plane.dst + at * inner * itemsize, 0, scales, plane.mask, count * inner)
                if count * inner == lanes:
                    fold_pixels(e, outputs, inner, used, 0, run)
                else:
                    fold_pixels(e, outputs, inner, used, 1, run)

    return kernel
