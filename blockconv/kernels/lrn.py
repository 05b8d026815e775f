"""Local response normalisation across channels.

Buffers: source, destination.
"""

from __future__ import annotations

import struct
from functools import partial
from typing import Any

from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.eltwise_problem import LrnProblem
from blockconv.emit import call_llvm, const, load_f, load_i64, store_bits, store_f
from blockconv.kernels.cut import ITEMSIZE
from blockconv.kernels.lines import (
    A_BLOCK,
    A_COUNT,
    A_DST,
    A_LENGTH,
    A_LINE,
    A_LINES,
    A_OWN,
    A_ROW,
    A_SRC,
    A_TAIL,
    TASK_BYTES,
    Code,
    chunk_of,
    cost,
    lanes_of,
    lines,
    literals,
)  # fmt: skip
from blockconv.kernels.table import Row
from blockconv.layout import NATIVE, Layout
from blockconv.runtime import Buffer, Op

__all__ = ["ROWS"]

LINE = 64
_i64 = types.int64

# ---------------------------------------------------------------- local response normalisation

THREE_QUARTERS, ANY_POWER = range(2)  # how s ** -beta is found: by two square roots, or by the C library


def _normalised(e: Code, x: Any, squares: Any, power: int, numbers: Any) -> Any:
    """x / (bias + scale * squares) ** beta; the address `numbers` holds these three."""
    scale, bias, beta = (e.all(e.b.add(numbers, const(k * e.itemsize))) for k in range(3))
    total = e.v.add(bias, e.v.mul(scale, squares))
    if power == THREE_QUARTERS:
        name = f"llvm.sqrt.{e.v.suffix}"
        root = call_llvm(e.b, name, e.kind, [total])
        return e.b.fdiv(x, e.v.mul(root, call_llvm(e.b, name, e.kind, [root])))
    return e.b.fdiv(x, call_llvm(e.b, f"llvm.pow.{e.v.suffix}", e.kind, [total, beta]))


@intrinsic(prefer_literal=True)
def square_stretch(typingctx, itemsize_lit, lanes_lit, src, dst, count):
    """Squares of `count` contiguous elements."""

    def codegen(context, builder, signature, args):
        itemsize, lanes = literals(signature, 2)
        src, dst, count = args[2:]
        e = Code(builder, itemsize, lanes)

        def body(offset: Any, there: Any | None) -> None:
            x = e.load(builder.add(src, offset), there)
            e.store(e.v.mul(x, x), builder.add(dst, offset), there)

        e.each(count, body)
        return context.get_dummy_value()

    return types.void(itemsize_lit, lanes_lit, *[_i64] * 3), codegen


@intrinsic(prefer_literal=True)
def lrn_stretch(typingctx, itemsize_lit, lanes_lit, power_lit, src, near, squared, dst, count, taps, tap, numbers):
    """`count` contiguous results, from `taps` squares each, `tap` bytes apart (of values, if `squared` is 0).

    src: the results' own elements. near: the address of the first square (or value) of the first result.
    """

    def codegen(context, builder, signature, args):
        itemsize, lanes, power = literals(signature, 3)
        src, near, squared, dst, count, taps, tap, numbers = args[3:]
        e = Code(builder, itemsize, lanes)
        slot = cgutils.alloca_once(builder, e.kind)
        is_square = builder.icmp_signed("!=", squared, const(0))

        def body(offset: Any, there: Any | None) -> None:
            builder.store(e.v.c(0.0), slot)
            with cgutils.for_range(builder, taps) as loop:
                x = e.load(builder.add(builder.add(near, offset), builder.mul(loop.index, tap)), there)
                x = builder.select(is_square, x, e.v.mul(x, x))
                builder.store(builder.fadd(builder.load(slot), x), slot)
            x = e.load(builder.add(src, offset), there)
            e.store(_normalised(e, x, builder.load(slot), power, numbers), builder.add(dst, offset), there)

        e.each(count, body)
        return context.get_dummy_value()

    return types.void(itemsize_lit, lanes_lit, power_lit, *[_i64] * 8), codegen


@jit.kernel
def lrn_lines(itemsize, lanes, power):
    """A task is a line (a pixel's channels). own words: size of the window, how far it begins before, three numbers.

    Scratch: the numbers, then the squares of the line between zeros for what is outside.
    """

    def kernel(args, first, last, scratch):
        block, length, count = load_i64(args, A_BLOCK), load_i64(args, A_LENGTH), load_i64(args, A_COUNT)
        blocks, window, before = (count + length - 1) // length, load_i64(args, A_OWN), load_i64(args, A_OWN + 1)
        for k in range(3):
            store_f(scratch + k * itemsize, load_f(args + 8 * (A_OWN + 2 + k), 8), itemsize)
        squares = scratch + LINE
        for k in range(window):
            store_bits(squares + k * itemsize, 0, itemsize)
            store_bits(squares + (before + count + k) * itemsize, 0, itemsize)
        line = squares + before * itemsize
        for task in range(first, last):
            at = task // load_i64(args, A_LINES) * load_i64(args, A_ROW)
            at += task % load_i64(args, A_LINES) * load_i64(args, A_LINE)
            src, dst = load_i64(args, A_SRC) + at, load_i64(args, A_DST) + at
            for k in range(blocks):
                n = min(length, count - k * length)
                square_stretch(itemsize, lanes, src + k * block, line + k * length * itemsize, n)
            for k in range(blocks):
                n = min(length, count - k * length)
                lrn_stretch(
                    itemsize, lanes, power, src + k * block, squares + k * length * itemsize, 1, dst + k * block, n,
                    window, itemsize, scratch,
                )  # fmt: skip
            end = dst + (blocks - 1) * block + (count - (blocks - 1) * length) * itemsize
            for k in range(load_i64(args, A_TAIL)):
                store_bits(end + k * itemsize, 0, itemsize)

    return kernel


@jit.kernel
def lrn_planes(itemsize, lanes, power):
    """A task is a plane's piece, all channels. args: buffers, pixels, of a task, channels, window, begin, numbers."""

    def kernel(args, first, last, scratch):
        pixels, piece, channels = load_i64(args, 2), load_i64(args, 3), load_i64(args, 4)
        window, before = load_i64(args, 5), load_i64(args, 6)
        for k in range(3):
            store_f(scratch + k * itemsize, load_f(args + 8 * (7 + k), 8), itemsize)
        pieces, plane = (pixels + piece - 1) // piece, pixels * itemsize
        for task in range(first, last):
            start = task % pieces * piece
            at = task // pieces * channels * plane + start * itemsize
            src, dst = load_i64(args, 0) + at, load_i64(args, 1) + at
            for c in range(channels):
                low, high = max(0, c - before), min(channels, c - before + window)
                lrn_stretch(
                    itemsize, lanes, power, src + c * plane, src + low * plane, 0, dst + c * plane,
                    min(piece, pixels - start), high - low, plane, scratch,
                )  # fmt: skip

    return kernel


# ---------------------------------------------------------------- the row of the table


def _bind_lrn(problem: LrnProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, itemsize = problem, ITEMSIZE[dtype]
    if 0 in p.shape:
        return []
    lanes, found = lanes_of(itemsize), lines(dst, p.shape, 1)
    power = THREE_QUARTERS if p.beta == 0.75 else ANY_POWER
    numbers = [struct.unpack("<q", struct.pack("<d", x))[0] for x in (p.alpha / p.size, p.bias, p.beta)]
    own = [p.size, (p.size - 1) // 2, *numbers]
    if found is not None:
        tasks = found.lines * found.rows
        scratch = LINE + (found.elements + 2 * p.size) * itemsize + LINE
        chunk = chunk_of(tasks, found.elements * itemsize, threads)
        words = (*found.words(itemsize), *own)
        return [Op(lrn_lines(itemsize, lanes, power), words, tasks, chunk, scratch=scratch)]
    pixels = p.shape[2] * p.shape[3]
    piece = max(1, TASK_BYTES // (p.shape[1] * itemsize * lanes)) * lanes
    pieces = -(-pixels // piece)
    words = (Buffer(0), Buffer(1), pixels, piece, p.shape[1], *own)
    return [Op(lrn_planes(itemsize, lanes, power), words, p.shape[0] * pieces, scratch=LINE)]


def _why_not_lrn(problem: LrnProblem, src: Layout, dst: Layout) -> str | None:
    return None if src == dst else "does not change the layout"


_NATIVE = frozenset(NATIVE)

ROWS = (Row("lrn", "lrn", _NATIVE, _NATIVE, frozenset(ITEMSIZE), _why_not_lrn, partial(cost, 30.0), _bind_lrn),)
