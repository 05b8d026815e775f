"""Reorders: copy tiles, transpose them in registers, or, for layouts whose blocks do not nest, element by element.

A reorder is a `nest` of loops. Where one loop has unit stride on both sides its extents are copied
(`reorder_copy`); where two different ones have it, tiles of both are read as vectors, transposed
in registers and written as vectors (`reorder_transpose`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

from blockconv import jit
from blockconv.core.eltwise_problem import TransposeProblem
from blockconv.core.layout import Layout
from blockconv.core.problem import ReorderProblem
from blockconv.core.types import Types
from blockconv.jit.arguments import Arguments
from blockconv.kernels.common.loop_nest import Loop, Nest, nest
from blockconv.kernels.reorder.blocking import copy_blocking, transpose_blocking
from blockconv.kernels.reorder.codegen import BOUNCE, TABLED
from blockconv.kernels.reorder.kernels import (
    SCRATCH,
    CopyArgs,
    CopyLoop,
    DstAxis,
    ElementArgs,
    Limit,
    NibbleArgs,
    OuterLoop,
    SrcAxis,
    TileLoop,
    TransposeArgs,
    reorder_copy,
    reorder_elements,
    reorder_transpose,
)
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.costs import launch_seconds, move_seconds, scalar_seconds
from blockconv.runtime import OWN_TABLE, Buffer, Op

__all__ = ["ROWS"]


# ---------------------------------------------------------------- ops


SRC, DST = Buffer(0), Buffer(1)
ALL = 1 << 40  # the limit of a dimension that is copied whole


def _nest_words(
    limits: dict[int, tuple[int, int]], dims: tuple[int, ...], outer: list[Loop], itemsize: int, fill: int
) -> dict[str, Any]:
    """The words of a `NestArgs`, and the loops at the end of the block."""
    pairs = [limits.get(dim, (ALL, ALL)) for dim in dims]
    return {
        "src": SRC,
        "dst": DST,
        "fill": fill,
        "depth": len(outer),
        "limits": [Limit(copied=copied, written=written) for copied, written in pairs],
        "loops": [_outer_loop(loop, dims, itemsize) for loop in reversed(outer)],
    }


def _outer_loop(loop: Loop, dims: tuple[int, ...], itemsize: int) -> OuterLoop:
    steps = {f"index{k}": loop.step * (loop.dim == dim) for k, dim in enumerate(dims)}
    return OuterLoop(size=loop.size, src=loop.src * itemsize, dst=loop.dst * itemsize, **steps)


def copy_op(nest: Nest, itemsize: int, fill: int, stream: bool = False) -> Op | str:
    """The op that copies contiguous extents; else why not, in a sentence."""
    c = copy_blocking(nest, itemsize)
    if isinstance(c, str):
        return c
    nbytes = c.extent.size * itemsize
    vector_bytes = min(64, 1 << (nbytes.bit_length() - 1))
    aligned = all(loop.dst * itemsize % 64 == 0 for loop in (c.x, c.y, *c.outer))
    streams = stream and vector_bytes == 64 and aligned
    kernel = reorder_copy(itemsize, vector_bytes, int(vector_bytes == nbytes), int(streams))
    x, y = (
        CopyLoop(
            size=loop.size,
            src=loop.src * itemsize,
            dst=loop.dst * itemsize,
            index=loop.step * (loop.dim == c.extent.dim),
            strip=strip,
        )
        for loop, strip in ((c.x, c.x_strip), (c.y, c.y_strip))
    )
    args = CopyArgs(**_nest_words(c.limits, c.dims, c.outer, itemsize, fill), extent=c.extent.size, x=x, y=y)
    return Op(kernel, args, c.tasks * math.prod(loop.size for loop in c.outer), scratch=SCRATCH)


def transpose_op(nest: Nest, itemsize: int, fill: int, stream: bool = False) -> Op | str:
    """The op that transposes tiles; else why not, in a sentence."""
    t = transpose_blocking(nest, itemsize, stream)
    if isinstance(t, str):
        return t
    (d1, d0), (s1, s0) = ([stride * itemsize for stride in strides] for strides in (t.u_strides, t.v_strides))
    tabled, bounce = t.shape.flags & TABLED, t.shape.flags & BOUNCE
    args = TransposeArgs(
        **_nest_words(nest.limits, t.dims, t.outer, itemsize, fill),
        u=TileLoop(size=t.us, strip=t.u_strip, outer=OWN_TABLE if tabled else d1, inner=d0, index=t.u.step),
        v=TileLoop(size=t.vs, strip=t.v_strip, outer=s1, inner=s0, index=t.v.step),
        ahead=t.ahead * itemsize,
    )
    return Op(
        reorder_transpose(*t.shape),
        args,
        t.tasks * math.prod(loop.size for loop in t.outer),
        scratch=SCRATCH + (t.shape.nbytes if bounce else 0),
        table=np.array(t.offsets, np.int64) * itemsize,
    )


def elements_op(src: Layout, dst: Layout, shape: tuple[int, ...], itemsize: int, fill: int) -> Op:
    """The op of any two layouts of one rank."""
    elements, task_size = dst.size(shape), 4096
    dst_axes, src_axes = dst.axes(shape)[::-1], src.axes(shape)
    args = ElementArgs(
        src=SRC,
        dst=DST,
        fill=fill,
        task_size=task_size,
        size=elements,
        dst_rank=len(dst_axes),
        src_rank=len(src_axes),
        dims=len(shape),
    )
    axes: list[Arguments] = [DstAxis(dim=a.dim, step=a.step, size=a.size) for a in dst_axes]
    axes += [SrcAxis(dim=a.dim, step=a.step, size=a.size, stride=a.stride) for a in src_axes]
    words = (*args, *itertools.chain(*axes), *shape)
    return Op(reorder_elements(itemsize), words, -(-elements // task_size), scratch=8 * len(shape))


def nibble_op(kernel: jit.Kernel, src: Buffer, dst: Buffer, packed_bytes: int) -> Op:
    """An op of `unpack_nibbles` or `pack_nibbles` over `packed_bytes` bytes."""
    task_size = 16 * 1024
    args = NibbleArgs(src=src, dst=dst, size=packed_bytes, task_size=task_size)
    return Op(kernel, args, -(-packed_bytes // task_size))


# ---------------------------------------------------------------- rows of the kernel table


def _nested(problem: ReorderProblem, src: Layout, dst: Layout, op: Callable[..., Op | str]) -> Op | str:
    loops = nest(src, dst, problem.shape)
    if loops is None:
        return "the blocks of the two layouts do not nest: neither size divides the other"
    return op(loops, problem.itemsize, 0)


def _why_not(op: Callable[..., Op | str]) -> Callable[[ReorderProblem, Layout, Layout], str | None]:
    def why_not(problem: ReorderProblem, src: Layout, dst: Layout) -> str | None:
        with jit.collecting():  # to ask compiles nothing
            found = _nested(problem, src, dst, op)
        return found if isinstance(found, str) else None

    return why_not


def _moved(problem: ReorderProblem, src: Layout, dst: Layout) -> int:
    """Bytes that are read and written."""
    return problem.itemsize * (src.size(problem.shape) + dst.size(problem.shape))


def _seconds(problem: ReorderProblem, src: Layout, dst: Layout) -> float:
    """To read and write them."""
    return move_seconds(problem.itemsize * src.size(problem.shape), problem.itemsize * dst.size(problem.shape))


def _transpose_cost(problem: ReorderProblem, src: Layout, dst: Layout) -> float:
    return _TRANSPOSED * _seconds(problem, src, dst)


def _copy_cost(problem: ReorderProblem, src: Layout, dst: Layout) -> float:
    """Bytes at the speed of a copy, or a move for each contiguous extent, whichever takes longer."""
    loops = nest(src, dst, problem.shape)
    assert loops is not None
    extent = next((loop.size for loop in loops.loops if loop.src == loop.dst == 1), 1) * problem.itemsize
    moved = _moved(problem, src, dst)
    return max(_seconds(problem, src, dst), moved / 2 / min(extent, LINE) * MOVE * scalar_seconds())


def _elements_cost(problem: ReorderProblem, src: Layout, dst: Layout) -> float:
    return _moved(problem, src, dst) * 10e-9


MOVE = 1.6  # scalar moves that a load and a store of a vector take, and the loop around them
_TRANSPOSED = 1.1  # beside a copy
LINE = 64


def _row(
    name: str,
    op: Callable[..., Op | str],
    cost: Callable[[ReorderProblem, Layout, Layout], float],
    reference: bool = False,
) -> Row:
    """Options of the primitive: fill, the bits of the destination's padding; stream, to store past the caches."""

    def make(
        problem: ReorderProblem,
        src: Layout,
        dst: Layout,
        types: Types,
        threads: int,
        fill: int = 0,
        stream: bool = False,
    ) -> Primitive:
        def ops() -> list[Op]:
            if 0 in problem.shape:
                return []
            if reference:
                return [elements_op(src, dst, problem.shape, problem.itemsize, fill)]
            found = op(nest(src, dst, problem.shape), problem.itemsize, fill, stream)
            assert isinstance(found, Op), found
            return [found]

        return Primitive(lambda: launch_seconds() + cost(problem, src, dst) / threads, ops)

    why_not = (lambda problem, src, dst: None) if reference else _why_not(op)
    return Row(name, "reorder", why_not=why_not, make=make, reference=reference)


# ---------------------------------------------------------------- permutations of row-major arrays
# A permuted array is its own layout: the result's elements in the order of the source. So a transpose is a reorder.


def _as_reorder(problem: TransposeProblem, itemsize: int) -> tuple[ReorderProblem, Layout, Layout]:
    src = Layout("".join("abcdef"[problem.perm.index(axis)] for axis in range(len(problem.perm))))
    dst = Layout("abcdef"[: len(problem.perm)])
    return ReorderProblem(problem.dst_shape, src.name, dst.name, itemsize), src, dst


def _transpose_row(of: Row) -> Row:
    """A reorder's row as one of transpose."""

    def why_not(problem: TransposeProblem, src: Layout, dst: Layout) -> str | None:
        rank = len(problem.shape)
        if not src == dst == Layout("abcdef"[:rank]):
            return f"is for row-major arrays of {rank} dimensions, {'abcdef'[:rank]}"
        return None if 0 in problem.shape else of.why_not(*_as_reorder(problem, 4))

    def make(problem: TransposeProblem, src: Layout, dst: Layout, types: Types, threads: int) -> Primitive:
        return of.prepare(*_as_reorder(problem, types.src.itemsize), types, threads)

    name = of.name.replace("reorder", "transpose")
    return Row(name, "transpose", why_not=why_not, make=make, reference=of.reference)


REORDERS = (
    _row("reorder_transpose", transpose_op, _transpose_cost),
    _row("reorder_copy", copy_op, _copy_cost),
    _row("reorder_elements", elements_op, _elements_cost, reference=True),
)

ROWS = (*REORDERS, *map(_transpose_row, REORDERS))
