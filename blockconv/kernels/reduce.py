"""Means over any axes of a row-major array. (Over H and W of a native layout, pooling has them.)

Neighbouring axes of one sort are one. If the last is kept, a vector holds neighbours of it, and what is reduced are
loops around; else stretches are summed by vectors, and the vector's lanes at the end. Partial sums are of at most
64 vectors, and are added to the total: errors grow with the number of these, not of elements.

Buffers: source, destination.
"""

from __future__ import annotations

import itertools
import math
from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.eltwise_problem import ReduceMeanProblem
from blockconv.emit import const, load_f, load_i64, store_f
from blockconv.kernels.cut import ITEMSIZE
from blockconv.kernels.lines import Code, chunk_of, lanes_of, literals
from blockconv.kernels.table import Row
from blockconv.layout import Layout
from blockconv.runtime import Buffer, Op

__all__ = ["ROWS"]

PARTIAL = 64  # vectors in a partial sum
LOOPS = 3  # groups of axes of one sort that six dimensions make

# Argument words. kept, reduced: `LOOPS` times size and source bytes, outermost first. The innermost axis has its own.
(A_SRC, A_DST, A_INNER, A_COUNT, A_KEPT, A_REDUCED) = (0, 1, 2, 3, 4, 4 + 2 * LOOPS)


@intrinsic(prefer_literal=True)
def add_vectors(typingctx, itemsize_lit, lanes_lit, src, steps, stride, count, total):
    """Add to the vector at `total` `steps` vectors, `stride` bytes apart, of which `count` lanes exist."""

    def codegen(context, builder, signature, args):
        itemsize, lanes = literals(signature, 2)
        src, steps, stride, count, total = args[2:]
        e = Code(builder, itemsize, lanes)
        slot = cgutils.alloca_once(builder, e.kind)
        there = e.below(count)
        groups = builder.sdiv(builder.add(steps, const(PARTIAL - 1)), const(PARTIAL))
        with cgutils.for_range(builder, groups) as group:
            first = builder.mul(group.index, const(PARTIAL))
            left = builder.sub(steps, first)
            some = builder.select(builder.icmp_signed("<", left, const(PARTIAL)), left, const(PARTIAL))
            builder.store(e.v.c(0.0), slot)
            with cgutils.for_range(builder, some) as loop:
                at = builder.add(src, builder.mul(builder.add(first, loop.index), stride))
                builder.store(builder.fadd(builder.load(slot), e.load(at, there)), slot)
            e.store(builder.fadd(e.load(total), builder.load(slot)), total)
        return context.get_dummy_value()

    return types.void(itemsize_lit, lanes_lit, *[types.int64] * 5), codegen


@jit.kernel
def reduce_mean(itemsize, lanes, kept_inside):
    """A task is a vector of results, or one result. Scratch: the vector of sums."""
    size = lanes * itemsize

    def kernel(args, first, last, scratch):
        inner = load_i64(args, A_INNER)
        vectors = (inner + lanes - 1) // lanes if kept_inside else 1
        kept, reduced = args + 8 * A_KEPT, args + 8 * A_REDUCED
        for task in range(first, last):
            at, rest = task % vectors * lanes, task // vectors
            src, above = load_i64(args, A_SRC) + at * itemsize, rest
            for k in range(LOOPS):
                loop = kept + 16 * (LOOPS - 1 - k)
                src += above % load_i64(loop, 0) * load_i64(loop, 1)
                above //= load_i64(loop, 0)
            for lane in range(lanes):
                store_f(scratch + lane * itemsize, 0.0, itemsize)
            for i in range(load_i64(reduced, 0)):
                for j in range(load_i64(reduced, 2)):
                    here = src + i * load_i64(reduced, 1) + j * load_i64(reduced, 3)
                    if kept_inside:
                        steps, stride = load_i64(reduced, 4), load_i64(reduced, 5)
                        add_vectors(itemsize, lanes, here, steps, stride, min(lanes, inner - at), scratch)
                    else:
                        whole = inner // lanes
                        add_vectors(itemsize, lanes, here, whole, size, lanes, scratch)
                        if inner > whole * lanes:
                            add_vectors(itemsize, lanes, here + whole * size, 1, 0, inner - whole * lanes, scratch)
            count = float(load_i64(args, A_COUNT))
            if kept_inside:
                dst = load_i64(args, A_DST) + (rest * inner + at) * itemsize
                for lane in range(min(lanes, inner - at)):
                    store_f(dst + lane * itemsize, load_f(scratch + lane * itemsize, itemsize) / count, itemsize)
            else:
                total = 0.0
                for lane in range(lanes):
                    total += load_f(scratch + lane * itemsize, itemsize)
                store_f(load_i64(args, A_DST) + task * itemsize, total / count, itemsize)

    return kernel


def _bind(problem: ReduceMeanProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, itemsize = problem, ITEMSIZE[dtype]
    if 0 in p.shape:
        return []
    # Axes of one sort that follow each other: (whether reduced, size), then with the bytes from one to the next.
    axes = [(axis in p.axes, size) for axis, size in enumerate(p.shape) if size > 1]
    merged = [(sort, math.prod(size for _, size in group)) for sort, group in itertools.groupby(axes, lambda a: a[0])]
    stride = itemsize
    groups: list[tuple[bool, int, int]] = []
    for reduced, size in reversed(merged):
        groups.insert(0, (reduced, size, stride))
        stride *= size
    last, size, _ = groups.pop() if groups else (False, 1, 0)
    loops: dict[bool, list[int]] = {}
    for sort in (False, True):
        found = [(n, step) for reduced, n, step in groups if reduced == sort]
        loops[sort] = [x for loop in [*[(1, 0)] * (LOOPS - len(found)), *found] for x in loop]
    if last:  # two loops around a stretch; of three groups the last is the stretch
        loops[True] = [*loops[True][2:], 1, 0]
    count = math.prod(p.shape[axis] for axis in p.axes)
    lanes = lanes_of(itemsize)
    results = math.prod(loops[False][::2])
    tasks = results if last else results * -(-size // lanes)
    words: tuple[int | Buffer, ...] = (Buffer(0), Buffer(1), size, count, *loops[False], *loops[True])
    kernel = reduce_mean(itemsize, lanes, int(not last))
    return [Op(kernel, words, tasks, chunk_of(tasks, count * itemsize, threads), scratch=lanes * itemsize)]


def _why_not(problem: ReduceMeanProblem, src: Layout, dst: Layout) -> str | None:
    rank = len(problem.shape)
    return None if src == dst == Layout("abcdef"[:rank]) else f"is for row-major arrays of {rank} dimensions"


def _cost(problem: Any, src: Layout, dst: Layout, threads: int) -> float:
    return 1e-6 + 4 * math.prod(problem.shape) / (15e9 * threads)


ROWS = (Row("reduce_mean", "reduce_mean", None, None, frozenset(ITEMSIZE), _why_not, _cost, _bind),)
