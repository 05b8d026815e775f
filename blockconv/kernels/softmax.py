"""Softmax, or its logarithm, along any axis of a layout without blocks, and across the channels of a blocked one.

Buffers: source, destination (which may be the source).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.eltwise_problem import SoftmaxProblem
from blockconv.emit import const, load_i64, store_bits
from blockconv.kernels.cut import ITEMSIZE
from blockconv.kernels.lines import (
    A_BLOCK,
    A_COUNT,
    A_DST,
    A_LENGTH,
    A_LINE,
    A_LINES,
    A_ROW,
    A_SRC,
    A_TAIL,
    Code,
    chunk_of,
    cost,
    far,
    lanes_of,
    lines,
    literals,
)  # fmt: skip
from blockconv.kernels.table import Row
from blockconv.layout import NATIVE, Layout
from blockconv.runtime import Buffer, Op

__all__ = ["ROWS"]

_i64 = types.int64

# ---------------------------------------------------------------- softmax of lines


@intrinsic(prefer_literal=True)
def softmax_line(typingctx, itemsize_lit, lanes_lit, log_lit, src, dst, block, length, count):
    """The softmax of `count` elements that lie in stretches of `length`, `block` bytes from one to the next."""

    def codegen(context, builder, signature, args):
        itemsize, lanes, log = literals(signature, 3)
        src, dst, block, length, count = args[3:]
        e = Code(builder, itemsize, lanes)
        most, total = (cgutils.alloca_once(builder, e.kind) for _ in range(2))
        builder.store(e.v.c(-math.inf), most)
        builder.store(e.v.c(0.0), total)
        blocks = builder.sdiv(builder.add(count, builder.sub(length, const(1))), length)

        def walk(body: Callable[[Any, Any, Any | None], None]) -> None:
            """body(source address, destination address, which lanes exist) for each vector."""
            with cgutils.for_range(builder, blocks) as loop:
                left = builder.sub(count, builder.mul(loop.index, length))
                n = builder.select(builder.icmp_signed("<", left, length), left, length)
                at = builder.mul(loop.index, block)
                from_, to = builder.add(src, at), builder.add(dst, at)
                e.each(n, lambda offset, there: body(builder.add(from_, offset), builder.add(to, offset), there))

        def larger(from_: Any, to: Any, there: Any | None) -> None:
            builder.store(e.larger(e.load(from_, there, -math.inf), builder.load(most)), most)

        walk(larger)
        least = e.folded(builder.load(most), e.larger)

        def powers(from_: Any, to: Any, there: Any | None) -> None:
            x = e.exp(builder.fsub(e.load(from_, there), least))
            if not log:
                e.store(x, to, there)
            if there is not None:
                x = builder.select(there, x, e.v.c(0.0))
            builder.store(builder.fadd(builder.load(total), x), total)

        walk(powers)
        whole = e.folded(builder.load(total), builder.fadd)
        by = builder.fadd(least, e.log(whole)) if log else builder.fdiv(e.v.c(1.0), whole)

        def results(from_: Any, to: Any, there: Any | None) -> None:
            x = builder.fsub(e.load(from_, there), by) if log else e.v.mul(e.load(to, there), by)
            e.store(x, to, there)

        walk(results)
        return context.get_dummy_value()

    return types.void(itemsize_lit, lanes_lit, log_lit, *[_i64] * 5), codegen


@jit.kernel
def softmax_lines(itemsize, lanes, log):
    """A task is a line."""

    def kernel(args, first, last, scratch):
        block, length, count = load_i64(args, A_BLOCK), load_i64(args, A_LENGTH), load_i64(args, A_COUNT)
        blocks = (count + length - 1) // length
        for task in range(first, last):
            at = task // load_i64(args, A_LINES) * load_i64(args, A_ROW)
            at += task % load_i64(args, A_LINES) * load_i64(args, A_LINE)
            dst = load_i64(args, A_DST) + at
            softmax_line(itemsize, lanes, log, load_i64(args, A_SRC) + at, dst, block, length, count)
            end = dst + (blocks - 1) * block + (count - (blocks - 1) * length) * itemsize
            for k in range(load_i64(args, A_TAIL)):
                store_bits(end + k * itemsize, 0, itemsize)

    return kernel


# ---------------------------------------------------------------- softmax of axes that are far apart


@intrinsic(prefer_literal=True)
def softmax_vector(typingctx, itemsize_lit, lanes_lit, log_lit, src, dst, steps, stride, count):
    """The softmax of `count` (or, if more, a vector's) neighbours along an axis of `steps`, `stride` bytes apart."""

    def codegen(context, builder, signature, args):
        itemsize, lanes, log = literals(signature, 3)
        src, dst, steps, stride, count = args[3:]
        e = Code(builder, itemsize, lanes)

        def some(there: Any | None) -> None:
            most = cgutils.alloca_once_value(builder, e.v.c(-math.inf))
            total = cgutils.alloca_once_value(builder, e.v.c(0.0))
            # Slots are made where the function begins: here they are set again for each vector.
            builder.store(e.v.c(-math.inf), most)
            builder.store(e.v.c(0.0), total)
            with cgutils.for_range(builder, steps) as loop:
                x = e.load(builder.add(src, builder.mul(loop.index, stride)), there)
                builder.store(e.larger(x, builder.load(most)), most)
            least = builder.load(most)
            with cgutils.for_range(builder, steps) as loop:
                offset = builder.mul(loop.index, stride)
                x = e.exp(builder.fsub(e.load(builder.add(src, offset), there), least))
                if not log:
                    e.store(x, builder.add(dst, offset), there)
                builder.store(builder.fadd(builder.load(total), x), total)
            if log:
                by = builder.fadd(least, e.log(builder.load(total)))
            else:
                by = builder.fdiv(e.v.c(1.0), builder.load(total))
            with cgutils.for_range(builder, steps) as loop:
                offset = builder.mul(loop.index, stride)
                here = builder.add(dst, offset)
                if log:
                    x = builder.fsub(e.load(builder.add(src, offset), there), by)
                else:
                    x = e.v.mul(e.load(here, there), by)
                e.store(x, here, there)

        with builder.if_else(builder.icmp_signed(">=", count, const(lanes))) as (whole, partly):
            with whole:
                some(None)
            with partly:
                some(e.below(count))
        return context.get_dummy_value()

    return types.void(itemsize_lit, lanes_lit, log_lit, *[_i64] * 5), codegen


@jit.kernel
def softmax_planes(itemsize, lanes, log):
    """A task is a vector of neighbours. args: buffers, neighbours in a row, bytes of a row, steps, their stride."""

    def kernel(args, first, last, scratch):
        inner, row = load_i64(args, 2), load_i64(args, 3)
        vectors = (inner + lanes - 1) // lanes
        for task in range(first, last):
            at = task % vectors * lanes
            offset = task // vectors * row + at * itemsize
            softmax_vector(
                itemsize, lanes, log, load_i64(args, 0) + offset, load_i64(args, 1) + offset,
                load_i64(args, 4), load_i64(args, 5), inner - at,
            )  # fmt: skip

    return kernel


# ---------------------------------------------------------------- the row of the table


def _bind_softmax(problem: SoftmaxProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, itemsize = problem, ITEMSIZE[dtype]
    if 0 in p.shape:
        return []
    lanes, found = lanes_of(itemsize), lines(dst, p.shape, p.axis)
    if found is not None:
        tasks = found.lines * found.rows
        kernel = softmax_lines(itemsize, lanes, int(p.log))
        chunk = chunk_of(tasks, found.elements * itemsize, threads)
        return [Op(kernel, tuple(found.words(itemsize)), tasks, chunk)]
    apart = far(dst, p.shape, p.axis)
    row = apart.inner * itemsize
    tasks = apart.rows * -(-apart.inner // lanes)
    words = (Buffer(0), Buffer(1), apart.inner, apart.steps * row, apart.steps, row)
    chunk = chunk_of(tasks, apart.steps * lanes * itemsize, threads)
    return [Op(softmax_planes(itemsize, lanes, int(p.log)), words, tasks, chunk)]


def _why_not_softmax(problem: SoftmaxProblem, src: Layout, dst: Layout) -> str | None:
    if src != dst:
        return "does not change the layout"
    if dst.ndim != len(problem.shape):
        return f"{dst} is of {dst.ndim} dimensions, the problem of {len(problem.shape)}"
    if dst.is_blocked and dst not in NATIVE:
        return f"{dst} is blocked, and no native layout"
    if dst.is_blocked and problem.axis != 1:
        return "in blocked layouts only the channels are an axis to sum over"
    return None


ROWS = (
    Row(
        "softmax", "softmax", None, None, frozenset(ITEMSIZE), _why_not_softmax, partial(cost, 30.0), _bind_softmax,
    ),
)  # fmt: skip
