"""How a pool becomes the arguments of its kernels: planes of inner elements, tables of windows, tasks."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

import blockconv.kernels.pool_kernels as pk
from blockconv import jit
from blockconv.kernels.pool_elements import MAX_FLOAT, MAX_SIGNED, MAX_UNSIGNED, SUM_FLOAT
from blockconv.layout import Layout
from blockconv.problem import AdaptivePool2dProblem, Pool2dProblem
from blockconv.runtime import OWN_TABLE, Block, Buffer, Op

__all__ = [
    "DST", "IDX", "ITEMSIZE", "SRC", "TASK_BYTES", "Problem", "Table", "Windows",
    "all_taps", "axis_of", "is_global", "is_masked", "kind_of", "lanes_of", "make_op", "shared_words", "tasks_of",
    "view", "windows",
]  # fmt: skip

SRC, DST, IDX = (Buffer(k) for k in range(3))
ITEMSIZE = {"float32": 4, "float64": 8, "int8": 1, "uint8": 1}
Problem = Pool2dProblem | AdaptivePool2dProblem


class Windows(NamedTuple):
    """Of windows along an axis: the first element in the image, how many there are, how many an average counts."""

    first: Block
    taps: Block
    counted: Block


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


def axis_of(problem: Problem, x: str) -> _Axis:
    if isinstance(problem, AdaptivePool2dProblem):
        return _Axis(getattr(problem, "i" + x), getattr(problem, "o" + x), 0, 0, 0, 0, 1)
    return _Axis(
        *(int(getattr(problem, name)) for name in (f"i{x}", f"o{x}", f"k{x}", f"s{x}", f"p{x}", f"p{x}_r", f"d{x}"))
    )


def windows(problem: Problem, x: str, outputs: Block | None = None) -> Windows:
    """The windows of these outputs along an axis, or of all; arrays, as an axis may have millions."""
    a = axis_of(problem, x)
    o = np.arange(a.out) if outputs is None else outputs
    if isinstance(problem, AdaptivePool2dProblem):
        first = o * a.size // a.out
        taps = -(-(o + 1) * a.size // a.out) - first
        return Windows(first, taps, taps)
    start = o * a.stride - a.begin
    before = -(np.minimum(0, start) // a.dilation)  # taps in the begin padding
    until = np.minimum(a.kernel, -((start - a.size) // a.dilation))
    taps = np.maximum(0, until - before)
    counted = taps
    if problem.divisor is not None:
        counted = np.full_like(o, problem.divisor if x == "h" else 1)
    elif problem.kind == "avg_include_padding":
        counted = np.minimum(a.kernel, -((start - a.size - a.end) // a.dilation))
    return Windows(start + before * a.dilation, taps, counted)


def all_taps(problem: Problem, x: str) -> int:
    """How many elements all windows along an axis cover: those of one window, but for windows at the ends."""
    a = axis_of(problem, x)
    if isinstance(problem, AdaptivePool2dProblem):
        return a.size + a.out - math.gcd(a.size, a.out)  # neighbours share an element where a bound is no integer
    inner_first = min(a.out, -(-a.begin // a.stride))
    fitting = (a.size + a.begin - (a.kernel - 1) * a.dilation - 1) // a.stride + 1
    inner_last = max(inner_first, min(a.out, fitting))
    ends = np.concatenate([np.arange(inner_first), np.arange(inner_last, a.out)])
    return (inner_last - inner_first) * a.kernel + int(windows(problem, x, ends).taps.sum())


def kind_of(problem: Problem, dtype: str) -> int:
    if isinstance(problem, AdaptivePool2dProblem) or problem.kind != "max":
        return SUM_FLOAT
    return {"int8": MAX_SIGNED, "uint8": MAX_UNSIGNED}.get(dtype, MAX_FLOAT)


def lanes_of(dtype: str) -> int:
    return jit.isa().vector_bytes // ITEMSIZE[dtype]


def is_global(problem: Problem) -> bool:
    """Whether the only window is the whole image."""
    if (problem.oh, problem.ow) != (1, 1):
        return False
    rows, cols = windows(problem, "h"), windows(problem, "w")
    return (rows.taps[0], cols.taps[0]) == (problem.ih, problem.iw)


TASK_BYTES = 1 << 16  # of the source: what a task reads at the least, if there are tasks enough


def shared_words(problem: Problem, layout: Layout, dtype: str, threads: int) -> dict[int, int | Buffer]:
    """The words that all kernels share, and how the rows of outputs are cut into tasks."""
    p, itemsize = problem, ITEMSIZE[dtype]
    v = view(layout, p.src_shape)
    h, w = axis_of(p, "h"), axis_of(p, "w")
    s_col = v.inner * itemsize
    s_row = p.iw * s_col
    rows = max(1, min(p.oh, TASK_BYTES * p.oh // (p.ih * s_row)))
    wanted = -(-4 * threads // v.planes)  # tasks of a plane
    if wanted > 1:
        rows = max(1, min(rows, (p.oh - 1) // (wanted - 1)))
    chunks = -(-p.oh // rows)
    return {
        pk.A_SRC: SRC, pk.A_DST: DST, pk.A_TABLE: OWN_TABLE, pk.A_OH: p.oh, pk.A_OW: p.ow, pk.A_IW: p.iw,
        pk.A_INNER: v.inner, pk.A_CHANNELS: p.ic, pk.A_BLOCK: v.block, pk.A_BLOCKS: v.blocks,
        pk.A_S_PLANE: p.ih * s_row, pk.A_S_ROW: s_row, pk.A_S_COL: s_col,
        pk.A_D_PLANE: p.oh * p.ow * s_col, pk.A_D_ROW: p.ow * s_col,
        pk.A_ROW_STEP: h.dilation * s_row, pk.A_COL_STEP: w.dilation * s_col,
        pk.A_PW: w.begin, pk.A_SW: w.stride, pk.A_KW: w.kernel,
        pk.A_CHUNK: -(-p.oh // chunks), pk.A_CHUNKS: chunks, pk.A_SPLIT: v.inner, pk.A_SPLITS: 1,
    }  # fmt: skip


class Table(NamedTuple):
    """What a kernel's table holds. Rows of windows always; `columns`, if the kernel asks what they cover.

    flat: other windows than the problem's. repeat: how often each column's scale stands; more: elements for which a
    line of scales goes on from its beginning. there: flags at the table's end.
    """

    columns: bool = False
    repeat: int = 1
    flat: tuple[Windows, Windows] | None = None
    more: int = 0
    there: Block = np.empty(0, np.int64)


def _filled(problem: Problem, dtype: str, table: Table) -> Block:
    """The words of all windows' rows, of their columns, and the scales: a line for each height that counts.

    After the last line there is slack for a vector's load.
    """
    of_h = table.flat[0] if table.flat else windows(problem, "h")
    averages = kind_of(problem, dtype) == SUM_FLOAT
    of_w = (table.flat[1] if table.flat else windows(problem, "w")) if averages or table.columns else None
    columns = np.stack([of_w.first, of_w.taps], axis=1).ravel() if of_w and table.columns else np.empty(0, np.int64)
    scales, lines = np.empty(0, np.int64), np.zeros_like(of_h.first)
    if averages and of_w:
        heights, which = np.unique(of_h.counted, return_inverse=True)
        held = _scales(heights, np.repeat(of_w.counted, table.repeat), table.more, dtype)
        lines = 8 * (3 * len(lines) + len(columns) + held.shape[1] * which)
        scales = np.append(held, np.zeros(8, np.int64))
    rows = np.stack([of_h.first, of_h.taps, lines], axis=1).ravel()
    return np.concatenate([rows, columns, scales, table.there])


def _scales(heights: Block, widths: Block, more: int, dtype: str) -> Block:
    """1 / (height * width), or 0 for empty windows: a line of whole words for each height."""
    widths = np.resize(widths, widths.size + more)
    words = -(-widths.size * ITEMSIZE[dtype] // 8)
    held = np.zeros((len(heights), 8 * words // ITEMSIZE[dtype]), dtype)
    for line, height in zip(held, heights, strict=True):
        counts = (height * widths).astype(np.float64)
        line[: widths.size] = np.divide(1.0, counts, out=np.zeros_like(counts), where=counts != 0)
    return held.view(np.int64)


def make_op(
    kernel: jit.Kernel,
    problem: Problem,
    dtype: str,
    words: dict[int, int | Buffer],
    tasks: tuple[int, int],
    scratch: int = pk.LINE,
    table: Table = Table(),  # noqa: B008
) -> Op:
    """The op; `tasks`: how many, and how many at a time."""
    held = _filled(problem, dtype, table)
    words = words | {pk.A_THERE: 8 * (held.size - table.there.size)}
    count = max(pk.A_END, *(key + 1 for key in words))
    return Op(kernel, tuple(words.get(k, 0) for k in range(count)), *tasks, scratch, held)


def tasks_of(problem: Problem, layout: Layout, words: dict[int, int | Buffer], threads: int) -> tuple[int, int]:
    """How many tasks there are, and how many a worker takes at a time."""
    planes, chunks, rows = view(layout, problem.src_shape).planes, words[pk.A_CHUNKS], words[pk.A_CHUNK]
    plane_bytes, tasks = words[pk.A_S_PLANE], planes * chunks  # type: ignore[operator]
    bytes_of_task = plane_bytes * rows // problem.oh  # type: ignore[operator]
    return tasks, max(1, min(tasks // (8 * threads), TASK_BYTES // max(1, bytes_of_task)))


def is_masked(problem: Problem, layout: Layout) -> int:
    """Whether a kernel has channels to zero."""
    return int(layout.padded_shape(problem.src_shape)[1] > problem.ic)
