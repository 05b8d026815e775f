"""How a pool becomes the arguments of its kernels: planes of inner elements, tables of windows, tasks."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

import blockconv.kernels.pool_kernels as pk
from blockconv import jit
from blockconv.kernels.pool_elements import MAX_FLOAT, MAX_SIGNED, MAX_UNSIGNED, SUM_FLOAT
from blockconv.layout import Layout
from blockconv.problem import AdaptivePool2dProblem, Pool2dProblem
from blockconv.runtime import OWN_TAIL, Buffer, Op

__all__ = [
    "DST", "IDX", "ITEMSIZE", "SRC", "TASK_BYTES", "Problem", "Windows",
    "axis_of", "is_global", "is_masked", "kind_of", "lanes_of", "make_op", "shared_words", "tasks_of", "view",
    "windows",
]  # fmt: skip

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


def axis_of(problem: Problem, x: str) -> _Axis:
    if isinstance(problem, AdaptivePool2dProblem):
        return _Axis(getattr(problem, "i" + x), getattr(problem, "o" + x), 0, 0, 0, 0, 1)
    return _Axis(
        *(int(getattr(problem, name)) for name in (f"i{x}", f"o{x}", f"k{x}", f"s{x}", f"p{x}", f"p{x}_r", f"d{x}"))
    )


def windows(problem: Problem, x: str) -> Windows:
    """Of each window along an axis: the first element in the image, how many there are, how many an average counts."""
    a = axis_of(problem, x)
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


def kind_of(problem: Problem, dtype: str) -> int:
    if isinstance(problem, AdaptivePool2dProblem) or problem.kind != "max":
        return SUM_FLOAT
    return {"int8": MAX_SIGNED, "uint8": MAX_UNSIGNED}.get(dtype, MAX_FLOAT)


def lanes_of(dtype: str) -> int:
    return jit.isa().vector_bytes // ITEMSIZE[dtype]


def is_global(problem: Problem) -> bool:
    """Whether the only window is the whole image."""
    rows, cols = windows(problem, "h"), windows(problem, "w")
    return [w[:2] for w in rows] == [(0, problem.ih)] and [w[:2] for w in cols] == [(0, problem.iw)]


TASK_BYTES = 1 << 16  # of the source: what a task reads at the least, if there are tasks enough


def shared_words(problem: Problem, layout: Layout, dtype: str, threads: int) -> dict[int, int | Buffer]:
    """The words that all kernels share, and how the rows of outputs are cut into tasks."""
    p, itemsize = problem, ITEMSIZE[dtype]
    v = view(layout, p.src_shape)
    h, w = axis_of(p, "h"), axis_of(p, "w")
    s_col = v.inner * itemsize
    s_row = p.iw * s_col
    rows = max(1, min(p.oh, TASK_BYTES * p.oh // (p.ih * s_row)))
    while rows > 1 and v.planes * -(-p.oh // rows) < 4 * threads:
        rows -= 1
    chunks = -(-p.oh // rows)
    return {
        pk.A_SRC: SRC, pk.A_DST: DST, pk.A_TABLE: OWN_TAIL, pk.A_OH: p.oh, pk.A_OW: p.ow, pk.A_IW: p.iw,
        pk.A_INNER: v.inner, pk.A_CHANNELS: p.ic, pk.A_BLOCK: v.block, pk.A_BLOCKS: v.blocks,
        pk.A_S_PLANE: p.ih * s_row, pk.A_S_ROW: s_row, pk.A_S_COL: s_col,
        pk.A_D_PLANE: p.oh * p.ow * s_col, pk.A_D_ROW: p.ow * s_col,
        pk.A_ROW_STEP: h.dilation * s_row, pk.A_COL_STEP: w.dilation * s_col,
        pk.A_PW: w.begin, pk.A_SW: w.stride, pk.A_KW: w.kernel,
        pk.A_CHUNK: -(-p.oh // chunks), pk.A_CHUNKS: chunks, pk.A_SPLIT: v.inner, pk.A_SPLITS: 1,
    }  # fmt: skip


def _table(problem: Problem, dtype: str, repeat: int, of_h: Windows, of_w: Windows, more: int = 0) -> list[int]:
    """The words of all windows' rows, of their columns, and the scales: a line for each height that counts.

    Each scale stands `repeat` times, a line goes on from its beginning for `more` elements, and after the last line
    there is slack for a vector's load.
    """
    if kind_of(problem, dtype) != SUM_FLOAT:
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


def make_op(
    kernel: jit.Kernel,
    problem: Problem,
    dtype: str,
    words: dict[int, int | Buffer],
    tasks: tuple[int, int],
    scratch: int = pk.LINE,
    repeat: int = 1,
    flat: tuple[Windows, Windows] | None = None,
    more: int = 0,
    there: bytes = b"",
) -> Op:
    """The op; `tasks`: how many, and how many at a time. flat: other windows than the problem's. there: flags."""
    of_h, of_w = flat or (windows(problem, "h"), windows(problem, "w"))
    table = _table(problem, dtype, repeat, of_h, of_w, more)
    words = words | {pk.A_THERE: 8 * len(table)}
    table += np.frombuffer(there.ljust(-(-len(there) // 8) * 8, b"\0"), np.int64).tolist()
    count = max(pk.A_END, *(key + 1 for key in words))
    args = (*(words.get(k, 0) for k in range(count)), *table)
    return Op(kernel, args, *tasks, scratch, len(table))


def tasks_of(problem: Problem, layout: Layout, words: dict[int, int | Buffer], threads: int) -> tuple[int, int]:
    """How many tasks there are, and how many a worker takes at a time."""
    planes, chunks, rows = view(layout, problem.src_shape).planes, words[pk.A_CHUNKS], words[pk.A_CHUNK]
    plane_bytes, tasks = words[pk.A_S_PLANE], planes * chunks  # type: ignore[operator]
    bytes_of_task = plane_bytes * rows // problem.oh  # type: ignore[operator]
    return tasks, max(1, min(tasks // (8 * threads), TASK_BYTES // max(1, bytes_of_task)))


def is_masked(problem: Problem, layout: Layout) -> int:
    """Whether a kernel has channels to zero."""
    return int(layout.padded_shape(problem.src_shape)[1] > problem.ic)
