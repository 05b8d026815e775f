"""Pooling, native in every layout with one block of channels: maxima and averages, from a layout to the same one.

To a pool, a layout is an array [planes][rows][columns][inner] (see `blocking`). Where inner is at least a vector
(wide), vectors run over it; where it is less (narrow), over the whole pixels of a row.

- `pool_runs`: narrow, small windows a pixel apart, with as many outputs in a row as pixels. Contiguous rows are one
  extent.
- `pool_tiles`: windows of few columns. Neighbouring outputs share the columns that they read. Constant shuffles pick
  the columns of narrow pixels.
- `pool_windows`: each window by itself, whatever its size: global, adaptive. A plane of narrow pixels that is one
  window is one extent. Other narrow windows are reduced element by element, from a row of vectors.
- `pool_lines`: any other windows: the windows' rows into a line of scratch, then the line's columns, so that large
  windows cost their height plus their width.
- `pool_indices`: maxima and where they are.
- `pool_reference`, `pool_indices_reference`: from any layout to any other.

Two tables, of rows and of columns, hold the part of the image that each window covers. They are made when the problem
is bound, so no kernel clips, or counts the elements of an average. Buffers: source, destination, and for
`pool2d_indices` the indices. Option of the primitive: quantizations, of integers in source and destination; the
destination's padding holds its zero point.
"""

from collections.abc import Callable
from functools import partial

import numpy as np

import blockconv.kernels.pool.kernels as pk
import blockconv.kernels.pool.kernels_lines as pl
from blockconv.core.quantization import Quantization
from blockconv.core.types import BYTES, NIBBLES, Types
from blockconv.jit import Kernel
from blockconv.kernels.common.gathering import window_rows
from blockconv.kernels.common.operands import POOL
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.common.unpacked import why_not_packed
from blockconv.kernels.pool.blocking import (
    ANY_TYPE,
    MASK_VECTORS,
    MOST_STRIDE,
    MOST_TAPS,
    MOST_UNROLLED,
    TASK_BYTES,
    PoolBlocking,
    Windows,
    shuffled_tile,
    why_not_shuffled,
    wide_tile,
    windows,
)
from blockconv.kernels.pool.costs import MOST_VECTORS, cost, reference_cost, unrolled
from blockconv.kernels.pool.kernels import PoolArgs, WindowRow
from blockconv.kernels.table import Primitive, Row
from blockconv.runtime import Block, Launch

MOST_MARGIN = 4  # times the image's columns, that a line may have in all: windows reach far beyond it otherwise
MOST_SUMMED = (2**31 - 1) // 255  # integers of 8 bits less a zero point, whose sum is sure to be an int32
MOST_PLANES = 32  # that a task reduces, each to one window
LONG_ROW, SHORT_ROW = 32, 7  # vectors: rows that are worth a start of their own; the second if pixels fill vectors


# ---------------------------------------------------------------- the tables of windows, their sums' scales, channels


def table_of(
    b: PoolBlocking, of: tuple[Windows, Windows] | None = None, columns: bool = False, repeat: int = 1, more: int = 0
) -> Block:
    """The table of a pool's windows, or `of` other rows and columns of windows.

    It has a `WindowRow` for each row, and a `Covered` for each column, if the kernel needs `columns`. Averages have a
    line of scales for each counted height, and slack for a vector's load. Each column's scale stands `repeat` times in
    it, and `more` elements go on from the line's beginning.
    """
    h, w = of or (windows(b.problem, "h"), windows(b.problem, "w"))
    empty = np.empty(0, np.int64)
    of_columns = np.stack([w.first, w.taps], axis=1).ravel() if columns else empty
    held, lines = empty, np.zeros_like(h.first)
    if b.is_average:
        heights, which = np.unique(h.counted, return_inverse=True)
        filled = _scales(b, heights, np.repeat(w.counted, repeat), more)
        lines = WindowRow.nbytes * len(lines) + 8 * (len(of_columns) + filled.shape[1] * which)
        held = np.append(filled, np.zeros(8, np.int64))
    return np.concatenate([np.stack([h.first, h.taps, lines], axis=1).ravel(), of_columns, held])


def masks_of(b: PoolBlocking) -> Block:
    """Two masks over elements of pixels, of ones, and with zero bits for the last block's channels that do not exist.

    Each holds a wide pixel or a row of outputs, and as many elements as vectors read after them.
    """
    pixels = 1 if b.is_wide else b.problem.ow
    exist = np.resize(b.view.exist, pixels * b.view.inner + MASK_VECTORS * b.lanes)
    bits = np.where(exist, -1, 0)
    if b.is_odd:  # the last pair that exists has its first channel alone
        bits[(exist > 0) & (np.roll(exist, -1) == 0)] = 0x0F
    words = np.zeros((2, -(-exist.size * b.itemsize // 8) * 8 // b.itemsize), f"i{b.itemsize}")
    words[0], words[1, : exist.size] = -1, bits
    return words.ravel().view(np.int64)


def _scales(b: PoolBlocking, heights: Block, widths: Block, more: int) -> Block:
    """A line of whole words for each height: 1 / (height * width), or 0 for empty windows.

    For integers, the divisors of sums: (height * width) times the destination's scale relative to the source's.
    """
    widths = np.resize(widths, widths.size + more)
    itemsize = b.held.itemsize
    words = -(-widths.size * itemsize // 8)
    held = np.zeros((len(heights), 8 * words // itemsize), b.element.computed.name)
    for line, height in zip(held, heights, strict=True):
        counts = (height * widths).astype(np.float64)
        if not b.element.is_float:
            line[: widths.size] = np.where(counts != 0, counts * b.step, 1.0)
        else:
            line[: widths.size] = np.divide(1.0, counts, out=np.zeros_like(counts), where=counts != 0)
    return held.view(np.int64)


# ---------------------------------------------------------------- what several rows ask


def _why_not_wide(b: PoolBlocking) -> Reason | None:
    inner, lanes = b.view.inner, b.lanes
    return None if inner >= lanes else f"a pixel of {b.src} has {inner} elements here, fewer than a vector's {lanes}"


def _why_not_narrow(b: PoolBlocking) -> Reason | None:
    """For kernels of pixels with fewer elements than a vector."""
    if b.view.inner >= b.lanes:
        return f"a pixel of {b.src} has {b.view.inner} elements here, more than {b.lanes - 1}"
    return None if b.has_contiguous_pixels else f"the pixels of a row are not contiguous in {b.src}"


def _why_not_padding(b: PoolBlocking) -> Reason | None:
    """For kernels that read whole windows, with their padding."""
    columns, most = b.line_columns, MOST_MARGIN * (b.problem.iw + 16)
    return f"the windows span {columns} columns, and the image has only {b.problem.iw}" if columns > most else None


def _why_not_equal(b: PoolBlocking) -> Reason | None:
    return "needs windows of equal size" if b.is_adaptive else None


def _why_not_several(b: PoolBlocking) -> Reason | None:
    return "needs several windows, which share columns" if b.is_global else None


def _launch(
    b: PoolBlocking, kernel: Kernel, args: PoolArgs, tasks: tuple[int, int], scratch: int, table: Block
) -> Launch:
    """tasks: how many, and how many at a time."""
    if b.reduction.masked:
        masks = masks_of(b)
        args = args._replace(masks=table.nbytes, mask_bytes=masks.nbytes // 2)
        table = np.concatenate([table, masks])
    return Launch(kernel, args, *tasks, scratch, table)


# ---------------------------------------------------------------- pool_tiles, pool_windows


def _why_not_tiles(b: PoolBlocking) -> Reason | None:
    if (reason := why_not_shuffled(b)) is None or _why_not_wide(b) is not None:
        return reason
    if (reason := _why_not_equal(b) or _why_not_several(b)) is not None:
        return reason
    return None if wide_tile(b) else f"the vector registers do not hold {b.problem.kw} columns of a window"


def _tiles(b: PoolBlocking) -> Launch:
    inner, is_shuffled = b.view.inner, not b.is_wide
    tile, part = (shuffled_tile(b), inner) if is_shuffled else (wide_tile(b), b.part or inner)
    assert tile is not None
    gathered_row = 0 if is_shuffled else b.problem.iw * b.part * b.itemsize
    args = b.plane_args._replace(part=part, parts=inner // part, gathered_row=gathered_row)
    scratch = pk.LINE + window_rows(b.problem, b.task_rows) * gathered_row
    table = table_of(b, repeat=inner if is_shuffled else 1)
    return _launch(b, pk.pool_tiles(b.reduction, tile), args, b.tasks, scratch, table)


def _why_not_windows(b: PoolBlocking) -> Reason | None:
    p, reason = b.problem, _why_not_wide(b)
    if b.element.is_packed:
        return reason
    if b.is_adaptive or b.is_global or _why_not_padding(b) is not None:
        return reason and _why_not_narrow(b)
    if reason is not None:
        least = MOST_STRIDE + 1
        return f"needs a stride of at least {least} along the row, not {p.sw}" if p.sw < least else _why_not_narrow(b)
    if p.kw > p.sw or p.kh > p.sh:
        return "the windows overlap, and other kernels reduce each column only once"
    return f"the vector registers hold {p.kw} columns of a window, in tiles" if wide_tile(b) else None


def _planes(b: PoolBlocking) -> Launch:
    """Neighbouring planes are one task, if their pixels are neighbours in the destination."""
    p, v, args, several = b.problem, b.view, b.plane_args, b.lanes // b.view.inner
    follow = v.nearer.strides[1] == v.inner and not b.reduction.masked
    most = max(1, min(MOST_PLANES, v.planes // (4 * b.threads))) if follow else 1
    count = max((k for k in range(1, most + 1) if v.nearer.size % k == 0), key=lambda k: (k % several == 0, k))
    args = args._replace(
        s=args.s._replace(col=args.s_plane),
        ow=count,
        line_elements=p.ih * p.iw * v.inner,
        planes=v.nearer.size // count,
        s_plane=count * args.s_plane,
        d_plane=count * args.d_plane,
    )
    tasks = v.planes // count
    chunk = chunk_of(tasks, count * p.ih * b.row_bytes, b.threads, TASK_BYTES)
    scratch = pk.LINE + pk.MOST_FOLDED * b.lanes * b.held.itemsize
    return _launch(b, pk.pool_planes(b.reduction, v.inner), args, (tasks, chunk), scratch, table_of(b))


def _bins(b: PoolBlocking) -> Launch:
    scratch = pk.LINE + b.row_bytes // b.itemsize * b.held.itemsize + pl.SLACK
    return _launch(b, pl.pool_bins(b.reduction), b.plane_args, b.tasks, scratch, table_of(b, columns=True))


def _windows(b: PoolBlocking) -> Launch:
    if b.is_plane:
        return _planes(b)
    if b.view.inner < b.lanes:
        return _bins(b)
    p, v, lanes, vectors = b.problem, b.view, b.lanes, unrolled(b)
    part, parts, tasks = v.inner, 1, v.planes * b.plane_tasks
    # Otherwise a vector that is moved back would be in two tasks.
    width = vectors * lanes
    if tasks < 4 * b.threads and v.inner % width == 0:
        wanted = min(v.inner // width, -(-4 * b.threads // tasks))
        part = -(-(v.inner // width) // wanted) * width
        parts = -(-v.inner // part)
    args = b.plane_args._replace(part=part, parts=parts)
    h, w = windows(p, "h"), windows(p, "w")
    pixels = p.ih * p.iw
    cols = max(k for k in range(1, 129) if pixels % k == 0)
    if b.is_global and b.has_contiguous_rows and cols >= min(p.iw, 16):  # the image as rows of at most 128 pixels
        row = cols * args.s.col
        args = args._replace(s=args.s._replace(row=row), row_step=row, col_step=args.s.col)
        h, w = h._replace(taps=h.taps * 0 + pixels // cols), w._replace(taps=w.taps * 0 + cols)
    kernel = pk.pool_windows(b.reduction, vectors, MOST_VECTORS // vectors, 0)
    return _launch(b, kernel, args, (tasks * parts, 1), 0, table_of(b, (h, w), columns=True))


# ---------------------------------------------------------------- pool_lines, pool_runs


def _why_not_lines(b: PoolBlocking) -> Reason | None:
    if (reason := _why_not_equal(b) or _why_not_padding(b)) is not None or _why_not_wide(b) is None:
        return reason
    sw = b.problem.sw
    if sw > MOST_STRIDE:
        return f"needs a stride of at most {MOST_STRIDE} along the row, not {sw}, which would waste loads"
    return _why_not_narrow(b)


def _line_bytes(b: PoolBlocking) -> int:
    return -(-(b.line_columns * min(b.view.inner, b.lanes) * b.held.itemsize + pl.SLACK) // 64) * 64


def _lines(b: PoolBlocking) -> Launch:
    p, line_bytes, wide = b.problem, _line_bytes(b), b.view.inner >= b.lanes
    inner = min(b.view.inner, b.lanes)
    args = b.plane_args._replace(line_elements=b.line_columns * inner, line_bytes=line_bytes)
    if wide:
        kernel = pl.pool_lines(b.reduction, 0, 0, 1, 1, 1)
    else:
        kh, kw = (p.kh, p.kw) if max(p.kh, p.kw) <= MOST_UNROLLED else (0, 0)
        kernel = pl.pool_lines(b.reduction, kh, kw, inner if p.sw > 1 else 1, p.sw, 0)
    table = table_of(b, repeat=1 if wide else inner)
    return _launch(b, kernel, args, b.tasks, pk.LINE + 2 * line_bytes, table)


def _why_not_runs(b: PoolBlocking) -> Reason | None:
    if (reason := _why_not_equal(b)) is not None:
        return reason
    if b.is_widened:
        return "needs sums of the input's type, which its buffers hold"
    p, isa = b.problem, b.machine.isa
    if (p.sh, p.sw) != (1, 1) or p.ow != p.iw:
        return "needs stride 1, and as many output columns as input columns"
    if max(p.kh, p.kw) > MOST_TAPS:
        return f"needs windows of at most {MOST_TAPS} rows and columns"
    if not isa.has_masks(b.itemsize):
        return f"{isa.name} has no masked loads of these elements"
    vectors = p.iw * b.view.inner / b.lanes
    if vectors >= LONG_ROW:
        return f"needs rows of fewer than {LONG_ROW} vectors"
    if vectors >= SHORT_ROW and b.lanes % b.view.inner == 0 and why_not_shuffled(b) is None:
        return f"rows have at least {SHORT_ROW} vectors, and shuffles are faster"
    if not b.has_contiguous_rows:
        return f"the rows of a plane are not contiguous in {b.src}"
    return _why_not_narrow(b)


def _runs(b: PoolBlocking) -> Launch:
    p, inner, more = b.problem, b.view.inner, pl.GROUP * b.lanes
    columns = np.arange(p.iw) + p.dw * np.arange(p.kw)[:, None] - p.pw
    inside = np.repeat((columns >= 0) & (columns < p.iw), inner, axis=1)
    checked = sum(1 << t for t, tap in enumerate(inside) if not tap.all())
    flags = np.stack([np.resize(tap, p.iw * inner + more) for tap in inside]).ravel()
    flags = np.resize(flags, -(-flags.size // 8) * 8).view(np.int64)
    table = table_of(b, repeat=inner, more=more)
    args = b.plane_args._replace(flags=table.nbytes)
    kernel = pl.pool_runs(b.reduction, p.kh, p.kw, checked)
    buffer = (b.task_rows + (p.kh - 1) * p.dh) * b.row_bytes
    return _launch(b, kernel, args, b.tasks, pk.LINE + buffer, np.concatenate([table, flags]))


# ---------------------------------------------------------------- maxima and their indices


def _why_not_maxima(b: PoolBlocking) -> Reason | None:
    return "needs a maximum, because averages have no index" if b.is_average else None


def _why_not_indices(b: PoolBlocking) -> Reason | None:
    if b.problem.ih * b.problem.iw >= 1 << 31:
        return "needs indices below 2^31"
    return _why_not_maxima(b) or (_why_not_wide(b) and _why_not_lines(b))


def _indices(b: PoolBlocking) -> Launch:
    p, inner, args = b.problem, b.view.inner, b.plane_args._replace(idx=POOL.idx, part=b.view.inner, parts=1)
    if inner >= b.lanes:
        return _launch(b, pk.pool_windows(b.reduction, 1, 1, 1), args, b.tasks, 0, table_of(b, columns=True))
    line_bytes = _line_bytes(b)
    nbytes = p.kh * line_bytes
    args = args._replace(line_elements=nbytes // b.held.itemsize, line_bytes=line_bytes)
    kernel = pl.pool_line_indices(b.reduction, inner, p.sw, p.dw)
    return _launch(b, kernel, args, b.tasks, pk.LINE + nbytes, table_of(b))


# ---------------------------------------------------------------- references


def _reference(b: PoolBlocking, indices: int) -> Launch:
    """The op of a pool from any layout to any other."""
    p, padded = b.problem, b.dst.padded_shape(b.problem.dst_shape)[1]
    args = b.args._replace(idx=POOL.idx if indices else 0, channels=p.ic, padded=padded)
    kernel = pl.pool_reference(b.reduction.operation, b.reduction.element, indices)
    return Launch(kernel, args, p.n * padded * p.oh, 4, 0, table_of(b, columns=True))


# ---------------------------------------------------------------- rows of the table


def _row(
    name: str,
    why_not: Callable[[PoolBlocking], Reason | None],
    op_of: Callable[[PoolBlocking], Launch],
    seconds: Callable[[PoolBlocking], float] | None = None,
    op: str = "pool2d",
    dtypes: tuple[str, ...] = ANY_TYPE,
    reference: bool = False,
) -> Row:
    """A row of the table. The element type is a parameter: it decides how many elements are a vector.

    seconds: by default the profile's rates of the row of this name.
    """
    priced = seconds or partial(cost, name=name)

    def unsolved(b: PoolBlocking, types: Types) -> Reason | None:
        sums_integers = b.is_average and not types.src.is_float
        if sums_integers and types.src.itemsize > 1:
            return "averages need floats or 8-bit integers"
        if sums_integers and b.most_taps > MOST_SUMMED:
            return f"a window has {b.most_taps} elements, and sums of more than {MOST_SUMMED} may overflow int32"
        return why_not(b)

    def make(request: Request, quantizations: tuple[Quantization, Quantization] | None = None) -> Primitive | Reason:
        problem, src, dst, types = request.problem, request.src, request.dst, request.types
        if src != dst and not reference:
            return "does not change the layout"
        if types.src.is_packed and (reason := why_not_packed(src, problem.ic, 1)):
            return reason
        b = PoolBlocking(
            problem, src, dst, types.src, request.machine, request.threads, quantizations, anchor=request.anchor
        )
        b = b.in_pairs if types.src.is_packed else b
        return unsolved(b, types) or Primitive(lambda: priced(b), lambda: [op_of(b)], blocking=b)

    return Row(name, op, make, frozenset(dtypes), reference)


_WORDS = ("float32", "float64")
ROWS = (
    _row("pool_runs", _why_not_runs, _runs, dtypes=(*_WORDS, *BYTES)),  # its buffers hold elements as they are
    _row("pool_tiles", _why_not_tiles, _tiles),
    _row("pool_windows", _why_not_windows, _windows, dtypes=(*ANY_TYPE, *NIBBLES)),
    _row("pool_lines", lambda b: _why_not_several(b) or _why_not_lines(b), _lines),
    _row(
        "pool_reference",
        lambda b: None,
        partial(_reference, indices=0),
        partial(reference_cost, each=8.0),
        reference=True,
    ),
    _row("pool_indices", _why_not_indices, _indices, partial(reference_cost, each=0.5), "pool2d_indices"),
    _row(
        "pool_indices_reference",
        _why_not_maxima,
        partial(_reference, indices=1),
        partial(reference_cost, each=12.0),
        "pool2d_indices",
        reference=True,
    ),
)
