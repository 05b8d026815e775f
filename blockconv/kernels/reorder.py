"""Reorders: copy tiles, transpose them in registers, or, for layouts whose blocks do not nest, element by element.

A reorder is a `nest` of loops. Where one loop has unit stride on both sides its runs are copied
(`reorder_copy`); where two different ones have it, tiles of both are read as vectors, transposed
in registers and written as vectors (`transposes`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from blockconv import jit
from blockconv.eltwise_problem import TransposeProblem
from blockconv.emit import load_bits, load_i64, move, store_bits, store_i64
from blockconv.kernels.nest import Loop, Nest, nest
from blockconv.kernels.table import BANDWIDTH, Row
from blockconv.kernels.transposes import transpose_op
from blockconv.kernels.walk import (
    A_DST,
    A_FILL,
    A_LIMITS,
    A_OWN,
    A_SRC,
    DST,
    SEGMENT,
    SRC,
    TASK_BYTES,
    limited_dimensions,
    nest_op,
    outer_position,
)
from blockconv.layout import Layout
from blockconv.problem import ReorderProblem
from blockconv.runtime import Buffer, Op

__all__ = ["ROWS"]


# ---------------------------------------------------------------- copies


@jit.kernel
def reorder_copy(itemsize, vector_bytes, one_vector, stream):
    """Runs that are contiguous on both sides, moved by vectors of `vector_bytes` (one of them, or more).

    own words: elements in a run; of each inner loop x and y: size, source bytes, destination bytes,
    what a step adds to the run's index, strip (steps in a task).
    """

    def kernel(args, first, last, scratch):
        fill, run = load_i64(args, A_FILL), load_i64(args, A_OWN)
        own = args + 8 * (A_OWN + 1)
        xs, x_src, x_dst, x_index, x_strip = (
            load_i64(own, 0),
            load_i64(own, 1),
            load_i64(own, 2),
            load_i64(own, 3),
            load_i64(own, 4),
        )
        ys, y_src, y_dst, y_index, y_strip = (
            load_i64(own, 5),
            load_i64(own, 6),
            load_i64(own, 7),
            load_i64(own, 8),
            load_i64(own, 9),
        )
        x_strips, y_strips = (xs + x_strip - 1) // x_strip, (ys + y_strip - 1) // y_strip
        limits = args + 8 * A_LIMITS
        for task in range(first, last):
            x_task, rest = task % x_strips, task // x_strips
            src, dst, i0, _, i2, i3 = outer_position(args, rest // y_strips)
            if i2 >= load_i64(limits, 5) or i3 >= load_i64(limits, 7):
                continue
            exists = i2 < load_i64(limits, 4) and i3 < load_i64(limits, 6)
            src, dst = src + load_i64(args, A_SRC), dst + load_i64(args, A_DST)
            y_first, x_first = (rest % y_strips) * y_strip, x_task * x_strip
            for y in range(y_first, min(ys, y_first + y_strip)):
                x_last = min(xs, x_first + x_strip)
                y_index_now = i0 + y * y_index
                furthest = y_index_now + (x_last - 1) * x_index + run
                s, d = src + y * y_src + x_first * x_src, dst + y * y_dst + x_first * x_dst
                if one_vector and exists and furthest <= load_i64(limits, 0):
                    for _ in range(x_first, x_last):
                        move(d, s, vector_bytes, stream)
                        s, d = s + x_src, d + x_dst
                    continue
                for x in range(x_first, x_last):
                    index = y_index_now + x * x_index
                    valid = min(run, load_i64(limits, 0) - index) if exists else 0
                    size = valid * itemsize
                    if size >= vector_bytes:
                        for at in range(0, size - vector_bytes + 1, vector_bytes):
                            move(d + at, s + at, vector_bytes, stream)
                        if size % vector_bytes:
                            move(d + size - vector_bytes, s + size - vector_bytes, vector_bytes, 0)
                    else:
                        for k in range(valid):
                            store_bits(d + k * itemsize, load_bits(s + k * itemsize, itemsize), itemsize)
                    for k in range(max(valid, 0), min(run, load_i64(limits, 1) - index)):
                        store_bits(d + k * itemsize, fill, itemsize)
                    s, d = s + x_src, d + x_dst

    return kernel


_UNIT = Loop(-1, 0, 1, 0, 0)


def copy_op(nest: Nest, itemsize: int, fill: int, stream: bool = False) -> Op | str:
    """The op that copies runs contiguous on both sides, of one element if need be; else why not, in a sentence."""
    run = next((loop for loop in nest.loops if loop.src == loop.dst == 1), _UNIT)
    slots = limited_dimensions(nest, run.dim, run.dim)
    if slots is None:
        return "more than four dimensions have tails"
    inner = [loop for loop in nest.loops if loop is not run and (loop.dim == run.dim or not nest.partial(loop))]
    limits = dict(nest.limits)
    if run.size * itemsize > TASK_BYTES:
        # A long run is cut: pieces are steps of a loop, and the run's end is the limit of the last.
        whole = run
        piece = TASK_BYTES // itemsize
        limits.setdefault(run.dim, (run.size, run.size))
        x = Loop(run.dim, piece, -(-run.size // piece), piece, piece)
        run, inner = Loop(run.dim, 1, piece, 1, 1), []
        outer = [loop for loop in nest.loops if loop is not whole]
    else:
        x = min(inner, key=lambda loop: loop.src, default=_UNIT)
        outer = [loop for loop in nest.loops if loop is not run and loop is not x]
    y = min((loop for loop in inner if loop is not x), key=lambda loop: loop.dst, default=_UNIT)
    outer = [loop for loop in outer if loop is not y]
    run_bytes = run.size * itemsize
    x_strip = min(x.size, max(1, SEGMENT // run_bytes))
    y_strip = min(y.size, max(1, TASK_BYTES // (run_bytes * x_strip)))
    x_strip = min(x.size, max(1, TASK_BYTES // (run_bytes * y_strip)))
    own = [run.size]
    for loop, strip in ((x, x_strip), (y, y_strip)):
        own += [loop.size, loop.src * itemsize, loop.dst * itemsize, loop.step * (loop.dim == run.dim), strip]
    vector_bytes = min(64, 1 << (run_bytes.bit_length() - 1))
    tasks = -(-x.size // x_strip) * -(-y.size // y_strip)
    aligned = all(loop.dst * itemsize % 64 == 0 for loop in (x, y, *outer))
    streams = stream and vector_bytes == 64 and aligned
    kernel = reorder_copy(itemsize, vector_bytes, int(vector_bytes == run_bytes), int(streams))
    return nest_op(kernel, limits, slots, outer, own, tasks, itemsize, fill)


# ---------------------------------------------------------------- the reference


@jit.kernel
def reorder_elements(itemsize):
    """Any two layouts, element by element; a task is `chunk` elements of the destination's storage.

    own words from A_LOOPS on: chunk, elements, axes of the destination, of the source, dimensions; then
    for each destination axis, innermost first: dim, step, size; for each source axis: dim, step, size,
    stride; for each dimension: extent. The scratch holds the logical index.
    """

    def kernel(args, first, last, scratch):
        src, dst, fill = load_i64(args, A_SRC), load_i64(args, A_DST), load_i64(args, A_FILL)
        chunk, elements = load_i64(args, 3), load_i64(args, 4)
        dst_axes, src_axes, dims = load_i64(args, 5), load_i64(args, 6), load_i64(args, 7)
        dst_table = args + 8 * 8
        src_table = dst_table + 8 * 3 * dst_axes
        extents = src_table + 8 * 4 * src_axes
        for at in range(first * chunk, min(last * chunk, elements)):
            for d in range(dims):
                store_i64(scratch, d, 0)
            rest = at
            for k in range(dst_axes):
                dim, step, size = (
                    load_i64(dst_table, 3 * k),
                    load_i64(dst_table, 3 * k + 1),
                    load_i64(dst_table, 3 * k + 2),
                )
                store_i64(scratch, dim, load_i64(scratch, dim) + step * (rest % size))
                rest //= size
            exists = True
            for d in range(dims):
                exists = exists and load_i64(scratch, d) < load_i64(extents, d)
            value = fill
            if exists:
                offset = 0
                for k in range(src_axes):
                    index = load_i64(scratch, load_i64(src_table, 4 * k)) // load_i64(src_table, 4 * k + 1)
                    offset += (index % load_i64(src_table, 4 * k + 2)) * load_i64(src_table, 4 * k + 3)
                value = load_bits(src + offset * itemsize, itemsize)
            store_bits(dst + at * itemsize, value, itemsize)

    return kernel


def elements_op(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, fill: int) -> Op:
    """The op of any two layouts of one rank."""
    elements, chunk = dst.size(shape), 4096
    dst_axes, src_axes = dst.axes(shape)[::-1], src.axes(shape)
    words: list[int | Buffer] = [SRC, DST, fill, chunk, elements, len(dst_axes), len(src_axes), len(shape)]
    for axis in dst_axes:
        words += [axis.dim, axis.step, axis.size]
    for axis in src_axes:
        words += [axis.dim, axis.step, axis.size, axis.stride]
    return Op(reorder_elements(itemsize), (*words, *shape), -(-elements // chunk), scratch=8 * len(shape))


# ---------------------------------------------------------------- packed 4-bit values


@jit.kernel
def unpack_nibbles():
    """Two values a byte, low nibble first, to one a byte. args: packed, bytes out, packed bytes, bytes a task."""

    def kernel(args, first, last, scratch):
        src, dst, size, per = load_i64(args, 0), load_i64(args, 1), load_i64(args, 2), load_i64(args, 3)
        for at in range(first * per, min(last * per, size)):
            byte = load_bits(src + at, 1)
            store_bits(dst + 2 * at, (byte & 15) | ((byte >> 4) << 8), 2)

    return kernel


@jit.kernel
def pack_nibbles():
    """The inverse of `unpack_nibbles`. args: bytes in, packed, packed bytes, packed bytes a task."""

    def kernel(args, first, last, scratch):
        src, dst, size, per = load_i64(args, 0), load_i64(args, 1), load_i64(args, 2), load_i64(args, 3)
        for at in range(first * per, min(last * per, size)):
            pair = load_bits(src + 2 * at, 2)
            store_bits(dst + at, (pair & 15) | ((pair >> 4) & 240), 1)

    return kernel


def nibble_op(kernel: jit.Kernel, src: Buffer, dst: Buffer, packed_bytes: int) -> Op:
    """An op of `unpack_nibbles` or `pack_nibbles` over `packed_bytes` bytes."""
    per = 16 * 1024
    return Op(kernel, (src, dst, packed_bytes, per), -(-packed_bytes // per))


# ---------------------------------------------------------------- rows of the kernel table


def _nested(problem: ReorderProblem, src: Layout, dst: Layout, make: Callable[..., Op | str]) -> Op | str:
    loops = nest(src, dst, problem.shape)
    if loops is None:
        return "the blocks of the two layouts do not nest: neither size divides the other"
    return make(loops, problem.itemsize, 0)


def _why_not(make: Callable[..., Op | str]) -> Callable[[ReorderProblem, Layout, Layout], str | None]:
    def why_not(problem: ReorderProblem, src: Layout, dst: Layout) -> str | None:
        with jit.collecting():  # to ask compiles nothing
            op = _nested(problem, src, dst, make)
        return op if isinstance(op, str) else None

    return why_not


def _bind(make: Callable[..., Op | str]) -> Callable[..., list[Op]]:
    def bind(problem: ReorderProblem, src: Layout, dst: Layout, fill: int = 0, stream: bool = False) -> list[Op]:
        if 0 in problem.shape:
            return []
        loops = nest(src, dst, problem.shape)
        assert loops is not None
        op = make(loops, problem.itemsize, fill, stream)
        assert isinstance(op, Op), op
        return [op]

    return bind


def _bind_elements(problem: ReorderProblem, src: Layout, dst: Layout, fill: int = 0, stream: bool = False) -> list[Op]:
    return [elements_op(src, dst, problem.shape, problem.itemsize, fill)]


def _cost(seconds_per_byte: float) -> Callable[[ReorderProblem, Layout, Layout, int], float]:
    def cost(problem: ReorderProblem, src: Layout, dst: Layout, threads: int) -> float:
        moved = problem.itemsize * (src.size(problem.shape) + dst.size(problem.shape))
        return 2e-6 + moved * seconds_per_byte / threads

    return cost


# ---------------------------------------------------------------- permutations of row-major arrays
# A permuted array is its own layout: the result's elements in the order of the source. So a transpose is a reorder.


def _as_reorder(problem: TransposeProblem, itemsize: int) -> tuple[ReorderProblem, Layout, Layout]:
    src = Layout("".join("abcdef"[problem.perm.index(axis)] for axis in range(len(problem.perm))))
    dst = Layout("abcdef"[: len(problem.perm)])
    return ReorderProblem(problem.dst_shape, src.name, dst.name, itemsize), src, dst


def _transpose_row(of: Row) -> Row:
    """A reorder's row as one of transpose; of `bind`, dtype and threads are given as to the other ops of a network."""

    def why_not(problem: TransposeProblem, src: Layout, dst: Layout) -> str | None:
        rank = len(problem.shape)
        if not src == dst == Layout("abcdef"[:rank]):
            return f"is for row-major arrays of {rank} dimensions, {'abcdef'[:rank]}"
        return None if 0 in problem.shape else of.why_not(*_as_reorder(problem, 4))

    def cost(problem: TransposeProblem, src: Layout, dst: Layout, threads: int) -> float:
        return of.cost(*_as_reorder(problem, 4), threads)

    def bind(problem: TransposeProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> Sequence[Op]:
        return of.bind(*_as_reorder(problem, np.dtype(dtype).itemsize))

    return Row(of.name.replace("reorder", "transpose"), "transpose", None, None, None, why_not, cost, bind,
               reference=of.reference)  # fmt: skip


REORDERS = (
    Row(
        "reorder_transpose",
        "reorder",
        None,
        None,
        None,
        _why_not(transpose_op),
        _cost(1 / BANDWIDTH),
        _bind(transpose_op),
    ),
    Row("reorder_copy", "reorder", None, None, None, _why_not(copy_op), _cost(1 / 27e9), _bind(copy_op)),
    Row(
        "reorder_elements",
        "reorder",
        None,
        None,
        None,
        lambda problem, src, dst: None,
        _cost(10e-9),
        _bind_elements,
        reference=True,
    ),
)

ROWS = (*REORDERS, *map(_transpose_row, REORDERS))
