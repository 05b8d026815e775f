"""Pooling, native in the eight layouts: maxima and averages over windows, from a layout to the same one.

Every native layout is dense, so to a pool it is an array [planes][rows][columns][inner], and the layouts
differ only in two numbers: NCHW has N·C planes of 1 inner element, NHWC N planes of C, NCHW16 N·C/16 planes
of 16, CHWN4 C/4 planes of 4·N. Where inner is at least a vector, vectors run over it; where it is less,
over the whole pixels of a row.

- `pool_tiles`: wide inner, windows of few columns. Neighbouring outputs share the columns that they read.
- `pool_windows`: wide inner, each window by itself, whatever its size: global, adaptive.
- `pool_planes`: inner a vector or less, one window that is the whole plane.
- `pool_runs`: narrow inner, small windows a pixel apart, and as many outputs in a row as the image has pixels: rows
  that follow one another are one run of elements.
- `pool_lines`: any other: the window's rows into a line of scratch, then the line's columns into outputs, so
  that large windows cost their height plus their width.
- `pool_bins`: the same with outputs one at a time, for windows of unequal widths and large strides.
- `pool_wide_indices`, `pool_line_indices`: maxima and where they are, of wide and of narrow inner.

What a window covers of the image is a table of rows and one of columns, made when the problem is bound:
no kernel clips, or counts what an average divides by.

Buffers: source, destination, and for `pool2d_indices` the indices. Options of `bind`: dtype and threads.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import blockconv.kernels.pool_indices as pi
import blockconv.kernels.pool_kernels as pk
from blockconv import jit
from blockconv.kernels.cut import geometry
from blockconv.kernels.pool_arguments import (
    DST,
    IDX,
    ITEMSIZE,
    SRC,
    TASK_BYTES,
    Problem,
    Table,
    Windows,
    all_taps,
    axis_of,
    is_global,
    is_masked,
    kind_of,
    lanes_of,
    make_op,
    shared_words,
    tasks_of,
    view,
    windows,
)
from blockconv.kernels.table import BANDWIDTH, Row
from blockconv.layout import NATIVE, Layout
from blockconv.problem import AdaptivePool2dProblem, Pool2dProblem
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["ROWS"]


# ---------------------------------------------------------------- pool_tiles


def _tile_columns(problem: Pool2dProblem, pixels: int) -> int:
    return len({p * problem.sw + t * problem.dw for p in range(pixels) for t in range(problem.kw)})


MOST_COLUMNS = 10  # of a tile that shares few of them: memory streams better through narrow tiles (1.2x at 112x112)


def _tile_pixels(problem: Pool2dProblem) -> int:
    """Outputs of a tile, so that the fewest columns are read; 0 if a window has too many for the registers."""
    most = jit.isa().registers - 8
    if problem.kw <= problem.sw + 1:
        most = min(most, max(MOST_COLUMNS, problem.kw))
    if problem.kw > most:
        return 0
    fit = [p for p in range(1, min(8, problem.ow) + 1) if _tile_columns(problem, p) <= most]
    return min(fit, key=lambda p: (-(-problem.ow // p) * (_tile_columns(problem, p) + 1), -p), default=0)


def _why_not_tiles(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if (reason := _why_not_wide(dtype, problem, src, dst)) is not None:
        return reason
    if isinstance(problem, AdaptivePool2dProblem):
        return "windows are of unequal sizes"
    if is_global(problem):
        return "one window has no columns to share"
    return (
        None if _tile_pixels(problem) else f"{problem.kw} columns of a window are more than the vector registers hold"
    )


def _bind_tiles(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words = problem, shared_words(problem, src, dtype, threads)
    kernel = pk.pool_tiles(
        kind_of(p, dtype),
        ITEMSIZE[dtype],
        lanes_of(dtype),
        _tile_pixels(p),
        p.kh if p.kh <= MOST_UNROLLED else 0,
        p.kw,
        p.sw,
        p.dw,
        is_masked(p, src),
    )
    tasks = tasks_of(p, src, words, threads)
    return [make_op(kernel, p, dtype, words, tasks)]


# ---------------------------------------------------------------- pool_windows


def _why_not_windows(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if (reason := _why_not_wide(dtype, problem, src, dst)) is not None:
        return reason
    if isinstance(problem, AdaptivePool2dProblem) or is_global(problem):
        return None
    if _why_not_padding(problem) is not None:
        return None
    overlaps = problem.kw > problem.sw or problem.kh > problem.sh
    return "windows overlap, and their columns are better reduced once" if overlaps else None


def _flattened(problem: Problem, words: dict[int, int | Buffer], s_col: int) -> tuple[Windows, Windows]:
    """A window that is the whole image as rows of at most 128 pixels, or as it is."""
    pixels = problem.ih * problem.iw
    cols = max(k for k in range(1, 129) if pixels % k == 0)
    row, col = windows(problem, "h"), windows(problem, "w")
    if cols >= min(problem.iw, 16):
        words |= {pk.A_S_ROW: cols * s_col, pk.A_ROW_STEP: cols * s_col, pk.A_COL_STEP: s_col}
        return row._replace(taps=row.taps * 0 + pixels // cols), col._replace(taps=col.taps * 0 + cols)
    return row, col


def _bind_windows(problem: Problem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words, lanes = problem, shared_words(problem, src, dtype, threads), lanes_of(dtype)
    v = view(src, p.src_shape)
    masked = is_masked(p, src)
    vectors = next(k for k in (8, 4, 2, 1) if k == 1 or k * lanes <= (v.block if masked else v.inner))
    kernel = pk.pool_windows(kind_of(p, dtype), ITEMSIZE[dtype], lanes, vectors, 8 // vectors, masked)
    tasks = v.planes * int(words[pk.A_CHUNKS])  # type: ignore[arg-type]
    # A last vector that is moved back would lie in two tasks, and be summed in two orders.
    if tasks < 4 * threads and v.inner % lanes == 0:
        width = vectors * lanes
        wanted = min(v.inner // width, -(-4 * threads // tasks))
        words[pk.A_SPLIT] = split = -(-(v.inner // width) // wanted) * width
        words[pk.A_SPLITS] = splits = -(-v.inner // split)
        tasks *= splits
    flat = _flattened(p, words, v.inner * ITEMSIZE[dtype]) if is_global(p) else None
    # The scratch holds the mask alone; a call without scratch is a little shorter.
    return [make_op(kernel, p, dtype, words, (tasks, 1), pk.LINE if masked else 0, Table(True, flat=flat))]


# ---------------------------------------------------------------- pool_lines, pool_wide_lines, pool_bins


def _why_not_wide(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if src != dst:
        return "does not change the layout"
    inner, lanes = view(src, problem.src_shape).inner, lanes_of(dtype)
    return None if inner >= lanes else f"a pixel of {src} has {inner} elements here, fewer than a vector's {lanes}"


def _why_not_narrow(dtype: str, problem: Problem, src: Layout, dst: Layout, most: int | None = None) -> str | None:
    """most: elements of a pixel; by default fewer than a vector's."""
    if src != dst:
        return "does not change the layout"
    inner, most = view(src, problem.src_shape).inner, most or lanes_of(dtype) - 1
    return None if inner <= most else f"a pixel of {src} has {inner} elements here, more than {most}"


def _line_columns(problem: Pool2dProblem) -> int:
    """Columns that the windows of a row of outputs span, and the image's."""
    p = problem
    return max((p.ow - 1) * p.sw + (p.kw - 1) * p.dw + 1, p.pw + p.iw)


MOST_MARGIN = 4  # times the image's columns, that a line may have in all: windows reach far beyond it otherwise


def _why_not_padding(problem: Pool2dProblem) -> str | None:
    """Kernels that walk whole windows, their padding too, are not for windows that are nearly all padding."""
    columns, most = _line_columns(problem), MOST_MARGIN * (problem.iw + 16)
    return f"windows span {columns} columns, of which the image has {problem.iw}" if columns > most else None


def _why_not_wide_lines(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if isinstance(problem, AdaptivePool2dProblem):
        return "windows are of unequal sizes"
    if (reason := _why_not_padding(problem)) is not None:
        return reason
    return _why_not_wide(dtype, problem, src, dst)


def _bind_wide_lines(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words, lanes = problem, shared_words(problem, src, dtype, threads), lanes_of(dtype)
    words |= {pk.A_LEFT: _line_columns(p) * lanes}
    kernel = pk.pool_wide_lines(kind_of(p, dtype), ITEMSIZE[dtype], lanes, is_masked(p, src))
    tasks = tasks_of(p, src, words, threads)
    return [make_op(kernel, p, dtype, words, tasks, pk.LINE + _line_columns(p) * lanes * ITEMSIZE[dtype])]


MOST_STRIDE = 4  # a strided load reads as many vectors
MOST_UNROLLED = 3  # taps along an axis; more are a loop


def _why_not_lines(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if isinstance(problem, AdaptivePool2dProblem):
        return "windows are of unequal sizes"
    if problem.sw > MOST_STRIDE:
        return f"columns of windows are {problem.sw} apart, and more than {MOST_STRIDE} would be loaded for nothing"
    if (reason := _why_not_padding(problem)) is not None:
        return reason
    return _why_not_narrow(dtype, problem, src, dst)


def _bind_lines(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words, itemsize = problem, shared_words(problem, src, dtype, threads), ITEMSIZE[dtype]
    inner = view(src, p.src_shape).inner
    elements = _line_columns(p) * inner
    line_bytes = -(-(elements * itemsize + pk.SLACK) // 64) * 64
    words |= {pk.A_LEFT: elements, pk.A_LINE_BYTES: line_bytes}
    kh, kw = (p.kh, p.kw) if max(p.kh, p.kw) <= MOST_UNROLLED else (0, 0)
    wide = inner if p.sw > 1 else 1
    kernel = pk.pool_lines(kind_of(p, dtype), itemsize, lanes_of(dtype), kh, kw, wide, p.sw, is_masked(p, src))
    tasks = tasks_of(p, src, words, threads)
    return [make_op(kernel, p, dtype, words, tasks, pk.LINE + 2 * line_bytes, Table(repeat=inner))]


MOST_TAPS = 5  # of a window that is unrolled in a run
LONG_ROW = 32  # vectors: a row that is worth a start of its own


def _why_not_runs(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if isinstance(problem, AdaptivePool2dProblem):
        return "windows are of unequal sizes"
    p, isa = problem, jit.isa()
    if (p.sh, p.sw) != (1, 1) or p.ow != p.iw:
        return "is for stride 1 and rows of as many outputs as the image has columns"
    if max(p.kh, p.kw) > MOST_TAPS:
        return f"windows have more than {MOST_TAPS} rows or columns"
    if isa.vector_bytes < 32 or (isa.vector_bytes < 64 and ITEMSIZE[dtype] < 4):
        return f"{isa.name} has no masked loads of these elements"
    if p.iw * view(src, p.src_shape).inner >= LONG_ROW * lanes_of(dtype):
        return f"rows have {LONG_ROW} vectors and more"
    return _why_not_narrow(dtype, problem, src, dst)


def _bind_runs(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words, lanes = problem, shared_words(problem, src, dtype, threads), lanes_of(dtype)
    inner, group = view(src, p.src_shape).inner, pk.GROUP * lanes
    words |= {pk.A_IH: p.ih, pk.A_PH: p.ph}
    columns = np.arange(p.iw) + p.dw * np.arange(p.kw)[:, None] - p.pw
    there = np.repeat((columns >= 0) & (columns < p.iw), inner, axis=1)
    flags = np.stack([np.resize(tap, p.iw * inner + group) for tap in there]).ravel()
    flags = np.resize(flags, -(-flags.size // 8) * 8).view(np.int64)
    checked = sum(1 << t for t, tap in enumerate(there) if not tap.all())
    kernel = pk.pool_runs(kind_of(p, dtype), ITEMSIZE[dtype], lanes, p.kh, p.kw, checked, is_masked(p, src))
    buffer = (words[pk.A_CHUNK] + (p.kh - 1) * p.dh) * words[pk.A_S_ROW]  # type: ignore[operator]
    tasks = tasks_of(p, src, words, threads)
    table = Table(repeat=inner, more=group, there=flags)
    return [make_op(kernel, p, dtype, words, tasks, pk.LINE + buffer, table)]


def _bind_bins(problem: Problem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words = problem, shared_words(problem, src, dtype, threads)
    kernel = pk.pool_bins(kind_of(p, dtype), ITEMSIZE[dtype], lanes_of(dtype))
    tasks = tasks_of(p, src, words, threads)
    line = p.iw * view(src, p.src_shape).inner * ITEMSIZE[dtype]
    return [make_op(kernel, p, dtype, words, tasks, pk.LINE + line + pk.SLACK, Table(columns=True))]


# ---------------------------------------------------------------- pool_planes


def _why_not_planes(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if not is_global(problem):
        return "there are several windows, or they are not the whole image"
    return _why_not_narrow(dtype, problem, src, dst, lanes_of(dtype))


def _bind_planes(problem: Problem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words, lanes = problem, shared_words(problem, src, dtype, threads), lanes_of(dtype)
    v = view(src, p.src_shape)
    group = 4 * (lanes // v.inner * v.inner)
    total = p.ih * p.iw * v.inner
    # A last group may not read past the plane: where lanes are left over, its last vector would.
    groups = total // group if lanes % v.inner == 0 else max(0, (total - lanes) // group)
    run = min(groups, 16)
    runs = groups // run if run else 0
    words |= {pk.A_RUNS: runs, pk.A_RUN: run, pk.A_LEFT: total - runs * run * group}
    kernel = pk.pool_planes(kind_of(p, dtype), ITEMSIZE[dtype], lanes, v.inner)
    chunk = max(1, min(v.planes // (4 * threads), TASK_BYTES // (total * ITEMSIZE[dtype])))
    return [
        make_op(kernel, p, dtype, words, (v.planes, chunk), pk.LINE + (1 + pk.MOST_FOLDED) * lanes * ITEMSIZE[dtype])
    ]


# ---------------------------------------------------------------- the reference


def _scalar_words(problem: Problem, src: Layout, dst: Layout, dtype: str) -> dict[int, int | Buffer]:
    p, itemsize = problem, ITEMSIZE[dtype]
    s, d = geometry(src, p.src_shape, itemsize), geometry(dst, p.dst_shape, itemsize)
    h, w = axis_of(p, "h"), axis_of(p, "w")
    words: dict[int, int | Buffer] = {
        pk.A_SRC: SRC, pk.A_DST: DST, pk.A_TABLE: OWN_TABLE, pk.A_OH: p.oh, pk.A_OW: p.ow, pk.A_IW: p.iw,
        pk.A_CHANNELS: p.ic,
        pk.A_ROW_STEP: h.dilation * s.row, pk.A_COL_STEP: w.dilation * s.col,
        pk.A_RUNS: h.dilation, pk.A_RUN: w.dilation, pi.A_PADDED: dst.padded_shape(p.dst_shape)[1], pi.A_IDX: IDX,
    }  # fmt: skip
    words |= {pi.A_S_GEOMETRY + k: number for k, number in enumerate(s)}
    return words | {pi.A_D_GEOMETRY + k: number for k, number in enumerate(d)}


def _bind_reference(problem: Problem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    words = _scalar_words(problem, src, dst, dtype)
    del words[pi.A_IDX]
    kernel = pi.pool_reference(kind_of(problem, dtype), ITEMSIZE[dtype])
    tasks = problem.n * dst.padded_shape(problem.dst_shape)[1] * problem.oh
    return [make_op(kernel, problem, dtype, words, (tasks, 4), table=Table(columns=True))]


def _bind_indices(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    words = _scalar_words(problem, src, dst, dtype)
    kernel = pi.pool_indices(kind_of(problem, dtype), ITEMSIZE[dtype])
    tasks = problem.n * dst.padded_shape(problem.dst_shape)[1] * problem.oh
    return [make_op(kernel, problem, dtype, words, (tasks, 4), table=Table(columns=True))]


def _why_not_indices_by_vectors(problem: Problem, src: Layout, dst: Layout) -> str | None:
    if problem.ih * problem.iw >= 1 << 31:
        return "indices have more than 31 bits"
    return _why_not_indices(problem, src, dst)


def _why_not_wide_indices(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    return _why_not_indices_by_vectors(problem, src, dst) or _why_not_wide(dtype, problem, src, dst)


def _bind_wide_indices(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    words, masked = shared_words(problem, src, dtype, threads) | {pi.A_IDX: IDX}, is_masked(problem, src)
    kernel = pi.pool_wide_indices(kind_of(problem, dtype), ITEMSIZE[dtype], lanes_of(dtype), masked)
    tasks = tasks_of(problem, src, words, threads)
    return [make_op(kernel, problem, dtype, words, tasks, table=Table(columns=True))]


def _why_not_line_indices(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    return _why_not_indices_by_vectors(problem, src, dst) or _why_not_lines(dtype, problem, src, dst)


def _bind_line_indices(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, itemsize, lanes = problem, ITEMSIZE[dtype], lanes_of(dtype)
    inner = view(src, p.src_shape).inner
    line_bytes = -(-(_line_columns(p) * inner * itemsize + pk.SLACK) // 64) * 64
    words = shared_words(p, src, dtype, threads) | {
        pi.A_IDX: IDX,
        pk.A_LEFT: p.kh * line_bytes,
        pk.A_LINE_BYTES: line_bytes,
    }
    kernel = pi.pool_line_indices(kind_of(p, dtype), itemsize, lanes, inner, p.sw, p.dw, is_masked(p, src))
    return [make_op(kernel, p, dtype, words, tasks_of(p, src, words, threads), pk.LINE + p.kh * line_bytes)]


def _cost(cycles: float, dtype: str, problem: Problem, src: Layout, dst: Layout, threads: int) -> float:
    """Bytes moved at the speed of a copy, or `cycles` for each vector loaded, whichever is more."""
    itemsize = ITEMSIZE[dtype]
    moved = itemsize * (src.size(problem.src_shape) + dst.size(problem.dst_shape))
    loads = (
        problem.n
        * problem.ic
        * all_taps(problem, "h")
        * all_taps(problem, "w")
        / (1 if cycles > 5 else lanes_of(dtype))
    )
    return 2e-6 + max(moved / BANDWIDTH, loads * cycles / 3e9) / threads


def _why_not_indices(problem: Problem, src: Layout, dst: Layout) -> str | None:
    if isinstance(problem, AdaptivePool2dProblem) or problem.kind != "max":
        return "only a maximum has an index"
    return None


_NATIVE = frozenset(NATIVE)
_TYPES = {"f32": ("float32",), "f64": ("float64",), "i8": ("int8", "uint8")}
WhyNot = Callable[[str, Any, Layout, Layout], "str | None"]


def _rows(
    name: str, why_not: WhyNot, bind: Callable[..., list[Op]], cycles: float = 1.0, op: str = "pool2d"
) -> list[Row]:
    """A row for each size of element, as it decides how many of them are a vector."""

    def row(suffix: str, dtypes: tuple[str, ...]) -> Row:
        def reason(problem: Problem, src: Layout, dst: Layout) -> str | None:
            averages = isinstance(problem, AdaptivePool2dProblem) or problem.kind != "max"
            if averages and suffix == "i8":
                return "averages are of floats"
            return why_not(dtypes[0], problem, src, dst)

        cost = partial(_cost, cycles, dtypes[0])
        return Row(f"{name}_{suffix}", op, _NATIVE, _NATIVE, frozenset(dtypes), reason, cost, bind)

    return [row(*item) for item in _TYPES.items()]


ROWS = (
    *_rows("pool_tiles", _why_not_tiles, _bind_tiles),
    *_rows("pool_planes", _why_not_planes, _bind_planes),
    *_rows("pool_windows", _why_not_windows, _bind_windows),
    *_rows("pool_wide_lines", _why_not_wide_lines, _bind_wide_lines),
    *_rows("pool_runs", _why_not_runs, _bind_runs),
    *_rows("pool_lines", _why_not_lines, _bind_lines),
    *_rows("pool_bins", _why_not_narrow, _bind_bins, 3.0),
    Row(
        "pool_reference",
        "pool2d",
        _NATIVE,
        _NATIVE,
        frozenset(ITEMSIZE),
        lambda problem, src, dst: None,
        partial(_cost, 8.0, "float32"),
        _bind_reference,
        reference=True,
    ),
    *_rows("pool_wide_indices", _why_not_wide_indices, _bind_wide_indices, 4.0, "pool2d_indices"),
    *_rows("pool_line_indices", _why_not_line_indices, _bind_line_indices, 4.0, "pool2d_indices"),
    Row(
        "pool_indices",
        "pool2d_indices",
        _NATIVE,
        _NATIVE,
        frozenset(ITEMSIZE),
        _why_not_indices,
        partial(_cost, 12.0, "float32"),
        _bind_indices,
        reference=True,
    ),
)
