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
from typing import Any, NamedTuple

import numpy as np

from blockconv import jit
from blockconv.kernels.cut import geometry
from blockconv.kernels.pool_kernels import (
    A_BLOCK,
    A_BLOCKS,
    A_CHANNELS,
    A_CHUNK,
    A_CHUNKS,
    A_COL_STEP,
    A_D_GEOMETRY,
    A_D_PLANE,
    A_D_ROW,
    A_DST,
    A_END,
    A_IDX,
    A_IH,
    A_INNER,
    A_IW,
    A_KW,
    A_LEFT,
    A_LINE_BYTES,
    A_OH,
    A_OW,
    A_PADDED,
    A_PH,
    A_PW,
    A_ROW_STEP,
    A_RUN,
    A_RUNS,
    A_S_COL,
    A_S_GEOMETRY,
    A_S_PLANE,
    A_S_ROW,
    A_SPLIT,
    A_SPLITS,
    A_SRC,
    A_SW,
    A_TABLE,
    A_THERE,
    GROUP,
    LINE,
    MOST_FOLDED,
    SLACK,
    pool_bins,
    pool_indices,
    pool_line_indices,
    pool_lines,
    pool_planes,
    pool_reference,
    pool_runs,
    pool_tiles,
    pool_wide_indices,
    pool_wide_lines,
    pool_windows,
)
from blockconv.kernels.pool_vectors import MAX_FLOAT, MAX_SIGNED, MAX_UNSIGNED, SUM_FLOAT
from blockconv.kernels.table import BANDWIDTH, Row
from blockconv.layout import NATIVE, Layout
from blockconv.problem import AdaptivePool2dProblem, Pool2dProblem
from blockconv.runtime import OWN_TAIL, Buffer, Op

__all__ = ["ROWS"]

SRC, DST, IDX = (Buffer(k) for k in range(3))
ITEMSIZE = {"float32": 4, "float64": 8, "int8": 1, "uint8": 1}
Problem = Pool2dProblem | AdaptivePool2dProblem


Windows = list[tuple[int, int, int]]


class View(NamedTuple):
    """A native layout as [planes][rows][columns][inner]: `block` channels in a plane, of `blocks` such for an image."""

    planes: int
    inner: int
    block: int
    blocks: int


def view(layout: Layout, shape: tuple[int, ...]) -> View:
    n, c = shape[:2]
    if layout == Layout("NHWC"):
        return View(n, c, c, 1)
    block = layout.blocks[1]
    blocks = -(-c // block)
    if layout == Layout("CHWN4"):
        return View(blocks, 4 * n, block, blocks)
    return View(n * blocks, block, block, blocks)


class _Axis(NamedTuple):
    """One axis of a problem; windows of `kernel` taps, `dilation` apart."""

    size: int
    out: int
    kernel: int
    stride: int
    begin: int
    end: int
    dilation: int


def _axis(problem: Problem, x: str) -> _Axis:
    if isinstance(problem, AdaptivePool2dProblem):
        return _Axis(getattr(problem, "i" + x), getattr(problem, "o" + x), 0, 0, 0, 0, 1)
    return _Axis(
        *(int(getattr(problem, name)) for name in (f"i{x}", f"o{x}", f"k{x}", f"s{x}", f"p{x}", f"p{x}_r", f"d{x}"))
    )


def windows(problem: Problem, x: str) -> Windows:
    """Of each window along an axis: the first element in the image, how many there are, how many an average counts."""
    a = _axis(problem, x)
    if isinstance(problem, AdaptivePool2dProblem):
        bounds = [(o * a.size // a.out, -(-(o + 1) * a.size // a.out)) for o in range(a.out)]
        return [(first, last - first, last - first) for first, last in bounds]
    found = []
    for o in range(a.out):
        start = o * a.stride - a.begin
        before = -(-max(0, -start) // a.dilation)  # taps in the begin padding
        until = min(a.kernel, -(-(a.size - start) // a.dilation))
        taps = max(0, until - before)
        counted = taps
        if problem.divisor is not None:
            counted = problem.divisor if x == "h" else 1
        elif problem.kind == "avg_include_padding":
            counted = min(a.kernel, -(-(a.size + a.end - start) // a.dilation))
        found.append((start + before * a.dilation, taps, counted))
    return found


def _kind(problem: Problem, dtype: str) -> int:
    if isinstance(problem, AdaptivePool2dProblem) or problem.kind != "max":
        return SUM_FLOAT
    return {"int8": MAX_SIGNED, "uint8": MAX_UNSIGNED}.get(dtype, MAX_FLOAT)


def _lanes(dtype: str) -> int:
    return jit.isa().vector_bytes // ITEMSIZE[dtype]


def _is_global(problem: Problem) -> bool:
    """Whether the only window is the whole image."""
    rows, cols = windows(problem, "h"), windows(problem, "w")
    return [w[:2] for w in rows] == [(0, problem.ih)] and [w[:2] for w in cols] == [(0, problem.iw)]


TASK_BYTES = 1 << 16  # of the source: what a task reads at the least, if there are tasks enough


def _words(problem: Problem, layout: Layout, dtype: str, threads: int) -> dict[int, int | Buffer]:
    """The words that all kernels share, and how the rows of outputs are cut into tasks."""
    p, itemsize = problem, ITEMSIZE[dtype]
    v = view(layout, p.src_shape)
    h, w = _axis(p, "h"), _axis(p, "w")
    s_col = v.inner * itemsize
    s_row = p.iw * s_col
    rows = max(1, min(p.oh, TASK_BYTES * p.oh // (p.ih * s_row)))
    while rows > 1 and v.planes * -(-p.oh // rows) < 4 * threads:
        rows -= 1
    chunks = -(-p.oh // rows)
    return {
        A_SRC: SRC, A_DST: DST, A_TABLE: OWN_TAIL, A_OH: p.oh, A_OW: p.ow, A_IW: p.iw,
        A_INNER: v.inner, A_CHANNELS: p.ic, A_BLOCK: v.block, A_BLOCKS: v.blocks,
        A_S_PLANE: p.ih * s_row, A_S_ROW: s_row, A_S_COL: s_col, A_D_PLANE: p.oh * p.ow * s_col, A_D_ROW: p.ow * s_col,
        A_ROW_STEP: h.dilation * s_row, A_COL_STEP: w.dilation * s_col, A_PW: w.begin, A_SW: w.stride, A_KW: w.kernel,
        A_CHUNK: -(-p.oh // chunks), A_CHUNKS: chunks, A_SPLIT: v.inner, A_SPLITS: 1,
    }  # fmt: skip


def _table(problem: Problem, dtype: str, repeat: int, of_h: Windows, of_w: Windows, more: int = 0) -> list[int]:
    """The words of all windows' rows, of their columns, and the scales: a line for each height that counts.

    Each scale stands `repeat` times, a line goes on from its beginning for `more` elements, and after the last line
    there is slack for a vector's load.
    """
    if _kind(problem, dtype) != SUM_FLOAT:
        return [*(n for first, taps, _ in of_h for n in (first, taps, 0)), *(n for w in of_w for n in w[:2])]
    heights = sorted({counted for _, _, counted in of_h})
    of_line = np.repeat([counted for _, _, counted in of_w], repeat)
    counts = np.multiply.outer(heights, np.resize(of_line, of_line.size + more)).astype(np.float64)
    scales = np.divide(1.0, counts, out=np.zeros_like(counts), where=counts != 0)
    line = -(-counts.shape[1] * ITEMSIZE[dtype] // 8)
    held = np.zeros((len(heights), 8 * line // ITEMSIZE[dtype]), dtype)
    held[:, : counts.shape[1]] = scales
    start = 3 * len(of_h) + 2 * len(of_w)
    words = [n for first, taps, c in of_h for n in (first, taps, 8 * (start + line * heights.index(c)))]
    return [*words, *(n for w in of_w for n in w[:2]), *held.view(np.int64).ravel().tolist(), *[0] * 8]


def _op(
    kernel: jit.Kernel,
    problem: Problem,
    dtype: str,
    words: dict[int, int | Buffer],
    tasks: tuple[int, int],
    scratch: int = LINE,
    repeat: int = 1,
    flat: tuple[Windows, Windows] | None = None,
    more: int = 0,
    there: bytes = b"",
) -> Op:
    """The op; `tasks`: how many, and how many at a time. flat: other windows than the problem's. there: flags."""
    of_h, of_w = flat or (windows(problem, "h"), windows(problem, "w"))
    table = _table(problem, dtype, repeat, of_h, of_w, more)
    words = words | {A_THERE: 8 * len(table)}
    table += np.frombuffer(there.ljust(-(-len(there) // 8) * 8, b"\0"), np.int64).tolist()
    count = max(A_END, *(key + 1 for key in words))
    args = (*(words.get(k, 0) for k in range(count)), *table)
    return Op(kernel, args, *tasks, scratch, len(table))


def _tasks(problem: Problem, layout: Layout, words: dict[int, int | Buffer], threads: int) -> tuple[int, int]:
    """How many tasks there are, and how many a worker takes at a time."""
    planes, chunks, rows = view(layout, problem.src_shape).planes, words[A_CHUNKS], words[A_CHUNK]
    plane_bytes, tasks = words[A_S_PLANE], planes * chunks  # type: ignore[operator]
    bytes_of_task = plane_bytes * rows // problem.oh  # type: ignore[operator]
    return tasks, max(1, min(tasks // (8 * threads), TASK_BYTES // max(1, bytes_of_task)))


def _masked(problem: Problem, layout: Layout) -> int:
    """Whether a kernel has channels to zero."""
    return int(layout.padded_shape(problem.src_shape)[1] > problem.ic)


# ---------------------------------------------------------------- pool_tiles


def _tile_columns(problem: Pool2dProblem, pixels: int) -> int:
    return len({p * problem.sw + t * problem.dw for p in range(pixels) for t in range(problem.kw)})


MOST_COLUMNS = 10  # of a tile that shares few of them: memory streams better through narrow tiles (1.2x at 112x112)


def _tile_pixels(problem: Pool2dProblem) -> int:
    """Outputs of a tile, so that the fewest columns are read; 0 if a window has too many for the registers."""
    most = jit.isa().registers - 8
    if problem.kw <= problem.sw + 1:
        most = min(most, max(MOST_COLUMNS, problem.kw))
    fit = [p for p in range(1, min(8, problem.ow) + 1) if _tile_columns(problem, p) <= most]
    return min(fit, key=lambda p: (-(-problem.ow // p) * (_tile_columns(problem, p) + 1), -p), default=0)


def _why_not_tiles(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if (reason := _why_not_wide(dtype, problem, src, dst)) is not None:
        return reason
    if isinstance(problem, AdaptivePool2dProblem):
        return "windows are of unequal sizes"
    if _is_global(problem):
        return "one window has no columns to share"
    return (
        None if _tile_pixels(problem) else f"{problem.kw} columns of a window are more than the vector registers hold"
    )


def _bind_tiles(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words = problem, _words(problem, src, dtype, threads)
    kernel = pool_tiles(
        _kind(p, dtype),
        ITEMSIZE[dtype],
        _lanes(dtype),
        _tile_pixels(p),
        p.kh if p.kh <= MOST_UNROLLED else 0,
        p.kw,
        p.sw,
        p.dw,
        _masked(p, src),
    )
    tasks = _tasks(p, src, words, threads)
    return [_op(kernel, p, dtype, words, tasks)]


# ---------------------------------------------------------------- pool_windows


def _why_not_windows(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if (reason := _why_not_wide(dtype, problem, src, dst)) is not None:
        return reason
    if isinstance(problem, AdaptivePool2dProblem) or _is_global(problem):
        return None
    overlaps = problem.kw > problem.sw or problem.kh > problem.sh
    return "windows overlap, and their columns are better reduced once" if overlaps else None


def _flattened(problem: Problem, words: dict[int, int | Buffer], s_col: int) -> tuple[Windows, Windows]:
    """A window that is the whole image as rows of at most 128 pixels, or as it is."""
    pixels = problem.ih * problem.iw
    cols = max(k for k in range(1, 129) if pixels % k == 0)
    row, col = windows(problem, "h")[0], windows(problem, "w")[0]
    if cols >= min(problem.iw, 16):
        words |= {A_S_ROW: cols * s_col, A_ROW_STEP: cols * s_col, A_COL_STEP: s_col}
        return [(0, pixels // cols, row[2])], [(0, cols, col[2])]
    return [row], [col]


def _bind_windows(problem: Problem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words, lanes = problem, _words(problem, src, dtype, threads), _lanes(dtype)
    v = view(src, p.src_shape)
    masked = _masked(p, src)
    vectors = next(k for k in (8, 4, 2, 1) if k == 1 or k * lanes <= (v.block if masked else v.inner))
    kernel = pool_windows(_kind(p, dtype), ITEMSIZE[dtype], lanes, vectors, 8 // vectors, masked)
    tasks = v.planes * int(words[A_CHUNKS])  # type: ignore[arg-type]
    # A last vector that is moved back would lie in two tasks, and be summed in two orders.
    if tasks < 4 * threads and v.inner % lanes == 0:
        width = vectors * lanes
        wanted = min(v.inner // width, -(-4 * threads // tasks))
        words[A_SPLIT] = split = -(-(v.inner // width) // wanted) * width
        words[A_SPLITS] = splits = -(-v.inner // split)
        tasks *= splits
    flat = _flattened(p, words, v.inner * ITEMSIZE[dtype]) if _is_global(p) else None
    # The scratch holds the mask alone; a call without scratch is a little shorter.
    return [_op(kernel, p, dtype, words, (tasks, 1), LINE if masked else 0, flat=flat)]


# ---------------------------------------------------------------- pool_lines, pool_wide_lines, pool_bins


def _why_not_wide(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if src != dst:
        return "does not change the layout"
    inner, lanes = view(src, problem.src_shape).inner, _lanes(dtype)
    return None if inner >= lanes else f"a pixel of {src} has {inner} elements here, fewer than a vector's {lanes}"


def _why_not_narrow(dtype: str, problem: Problem, src: Layout, dst: Layout, most: int | None = None) -> str | None:
    """most: elements of a pixel; by default fewer than a vector's."""
    if src != dst:
        return "does not change the layout"
    inner, most = view(src, problem.src_shape).inner, most or _lanes(dtype) - 1
    return None if inner <= most else f"a pixel of {src} has {inner} elements here, more than {most}"


def _line_columns(problem: Pool2dProblem) -> int:
    """Columns that the windows of a row of outputs span, and the image's."""
    p = problem
    return max((p.ow - 1) * p.sw + (p.kw - 1) * p.dw + 1, p.pw + p.iw)


def _why_not_wide_lines(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if isinstance(problem, AdaptivePool2dProblem):
        return "windows are of unequal sizes"
    return _why_not_wide(dtype, problem, src, dst)


def _bind_wide_lines(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words, lanes = problem, _words(problem, src, dtype, threads), _lanes(dtype)
    words |= {A_LEFT: _line_columns(p) * lanes}
    kernel = pool_wide_lines(_kind(p, dtype), ITEMSIZE[dtype], lanes, _masked(p, src))
    tasks = _tasks(p, src, words, threads)
    return [_op(kernel, p, dtype, words, tasks, LINE + _line_columns(p) * lanes * ITEMSIZE[dtype])]


MOST_STRIDE = 4  # a strided load reads as many vectors
MOST_UNROLLED = 3  # taps along an axis; more are a loop


def _why_not_lines(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if isinstance(problem, AdaptivePool2dProblem):
        return "windows are of unequal sizes"
    if problem.sw > MOST_STRIDE:
        return f"columns of windows are {problem.sw} apart, and more than {MOST_STRIDE} would be loaded for nothing"
    return _why_not_narrow(dtype, problem, src, dst)


def _bind_lines(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words, itemsize = problem, _words(problem, src, dtype, threads), ITEMSIZE[dtype]
    inner = view(src, p.src_shape).inner
    elements = _line_columns(p) * inner
    line_bytes = -(-(elements * itemsize + SLACK) // 64) * 64
    words |= {A_LEFT: elements, A_LINE_BYTES: line_bytes}
    kh, kw = (p.kh, p.kw) if max(p.kh, p.kw) <= MOST_UNROLLED else (0, 0)
    wide = inner if p.sw > 1 else 1
    kernel = pool_lines(_kind(p, dtype), itemsize, _lanes(dtype), kh, kw, wide, p.sw, _masked(p, src))
    tasks = _tasks(p, src, words, threads)
    return [_op(kernel, p, dtype, words, tasks, LINE + 2 * line_bytes, inner)]


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
    if p.iw * view(src, p.src_shape).inner >= LONG_ROW * _lanes(dtype):
        return f"rows have {LONG_ROW} vectors and more"
    return _why_not_narrow(dtype, problem, src, dst)


def _bind_runs(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words, lanes = problem, _words(problem, src, dtype, threads), _lanes(dtype)
    inner, group = view(src, p.src_shape).inner, GROUP * lanes
    words |= {A_IH: p.ih, A_PH: p.ph}
    columns = np.arange(p.iw) + p.dw * np.arange(p.kw)[:, None] - p.pw
    there = np.repeat((columns >= 0) & (columns < p.iw), inner, axis=1)
    flags = np.stack([np.resize(tap, p.iw * inner + group) for tap in there]).tobytes()
    checked = sum(1 << t for t, tap in enumerate(there) if not tap.all())
    kernel = pool_runs(_kind(p, dtype), ITEMSIZE[dtype], lanes, p.kh, p.kw, checked, _masked(p, src))
    buffer = (words[A_CHUNK] + (p.kh - 1) * p.dh) * words[A_S_ROW]  # type: ignore[operator]
    tasks = _tasks(p, src, words, threads)
    return [_op(kernel, p, dtype, words, tasks, LINE + buffer, inner, more=group, there=flags)]


def _bind_bins(problem: Problem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words = problem, _words(problem, src, dtype, threads)
    kernel = pool_bins(_kind(p, dtype), ITEMSIZE[dtype], _lanes(dtype))
    tasks = _tasks(p, src, words, threads)
    line = p.iw * view(src, p.src_shape).inner * ITEMSIZE[dtype]
    return [_op(kernel, p, dtype, words, tasks, LINE + line + SLACK)]


# ---------------------------------------------------------------- pool_planes


def _why_not_planes(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    if not _is_global(problem):
        return "there are several windows, or they are not the whole image"
    return _why_not_narrow(dtype, problem, src, dst, _lanes(dtype))


def _bind_planes(problem: Problem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, words, lanes = problem, _words(problem, src, dtype, threads), _lanes(dtype)
    v = view(src, p.src_shape)
    group = 4 * (lanes // v.inner * v.inner)
    total = p.ih * p.iw * v.inner
    # A last group may not read past the plane: where lanes are left over, its last vector would.
    groups = total // group if lanes % v.inner == 0 else max(0, (total - lanes) // group)
    run = min(groups, 16)
    runs = groups // run if run else 0
    words |= {A_RUNS: runs, A_RUN: run, A_LEFT: total - runs * run * group}
    kernel = pool_planes(_kind(p, dtype), ITEMSIZE[dtype], lanes, v.inner)
    chunk = max(1, min(v.planes // (4 * threads), TASK_BYTES // (total * ITEMSIZE[dtype])))
    return [_op(kernel, p, dtype, words, (v.planes, chunk), LINE + (1 + MOST_FOLDED) * lanes * ITEMSIZE[dtype])]


# ---------------------------------------------------------------- the reference


def _scalar_words(problem: Problem, src: Layout, dst: Layout, dtype: str) -> dict[int, int | Buffer]:
    p, itemsize = problem, ITEMSIZE[dtype]
    s, d = geometry(src, p.src_shape, itemsize), geometry(dst, p.dst_shape, itemsize)
    h, w = _axis(p, "h"), _axis(p, "w")
    words: dict[int, int | Buffer] = {
        A_SRC: SRC, A_DST: DST, A_TABLE: OWN_TAIL, A_OH: p.oh, A_OW: p.ow, A_IW: p.iw, A_CHANNELS: p.ic,
        A_ROW_STEP: h.dilation * s.row, A_COL_STEP: w.dilation * s.col,
        A_RUNS: h.dilation, A_RUN: w.dilation, A_PADDED: dst.padded_shape(p.dst_shape)[1], A_IDX: IDX,
    }  # fmt: skip
    words |= {A_S_GEOMETRY + k: number for k, number in enumerate(s)}
    return words | {A_D_GEOMETRY + k: number for k, number in enumerate(d)}


def _bind_reference(problem: Problem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    words = _scalar_words(problem, src, dst, dtype)
    del words[A_IDX]
    kernel = pool_reference(_kind(problem, dtype), ITEMSIZE[dtype])
    tasks = problem.n * dst.padded_shape(problem.dst_shape)[1] * problem.oh
    return [_op(kernel, problem, dtype, words, (tasks, 4))]


def _bind_indices(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    words = _scalar_words(problem, src, dst, dtype)
    kernel = pool_indices(_kind(problem, dtype), ITEMSIZE[dtype])
    tasks = problem.n * dst.padded_shape(problem.dst_shape)[1] * problem.oh
    return [_op(kernel, problem, dtype, words, (tasks, 4))]


def _why_not_indices_by_vectors(problem: Problem, src: Layout, dst: Layout) -> str | None:
    if problem.ih * problem.iw >= 1 << 31:
        return "indices have more than 31 bits"
    return _why_not_indices(problem, src, dst)


def _why_not_wide_indices(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    return _why_not_indices_by_vectors(problem, src, dst) or _why_not_wide(dtype, problem, src, dst)


def _bind_wide_indices(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    words, masked = _words(problem, src, dtype, threads) | {A_IDX: IDX}, _masked(problem, src)
    kernel = pool_wide_indices(_kind(problem, dtype), ITEMSIZE[dtype], _lanes(dtype), masked)
    return [_op(kernel, problem, dtype, words, _tasks(problem, src, words, threads))]


def _why_not_line_indices(dtype: str, problem: Problem, src: Layout, dst: Layout) -> str | None:
    return _why_not_indices_by_vectors(problem, src, dst) or _why_not_lines(dtype, problem, src, dst)


def _bind_line_indices(problem: Pool2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, itemsize, lanes = problem, ITEMSIZE[dtype], _lanes(dtype)
    inner = view(src, p.src_shape).inner
    line_bytes = -(-(_line_columns(p) * inner * itemsize + SLACK) // 64) * 64
    words = _words(p, src, dtype, threads) | {A_IDX: IDX, A_LEFT: p.kh * line_bytes, A_LINE_BYTES: line_bytes}
    kernel = pool_line_indices(_kind(p, dtype), itemsize, lanes, inner, p.sw, p.dw, _masked(p, src))
    return [_op(kernel, p, dtype, words, _tasks(p, src, words, threads), LINE + p.kh * line_bytes)]


def _cost(cycles: float, dtype: str, problem: Problem, src: Layout, dst: Layout, threads: int) -> float:
    """Bytes moved at the speed of a copy, or `cycles` for each vector loaded, whichever is more."""
    itemsize = ITEMSIZE[dtype]
    moved = itemsize * (src.size(problem.src_shape) + dst.size(problem.dst_shape))
    taps = sum(w[1] for w in windows(problem, "h")) * sum(w[1] for w in windows(problem, "w"))
    loads = problem.n * problem.ic * taps / (1 if cycles > 5 else _lanes(dtype))
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
