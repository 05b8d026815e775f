"""Softmax along any axis, and local response normalisation across channels.

Both need all elements of an axis for each result. In storage these lie in one of two ways. As a *line*: stretches of
contiguous elements, one for each block of channels (NHWC: a single one), which are walked by vectors along the axis.
Or far apart (NCHW), where a vector holds neighbours that have nothing to do with each other, and the axis is a loop.
Channels that do not exist are never read; they are written as zeros.

Buffers: source, destination (which may be the source for softmax).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv import jit
from blockconv.eltwise_problem import LrnProblem, SoftmaxProblem
from blockconv.emit import I32, call_llvm, const, load_f, load_i64, pointer, splat, store_bits, store_f
from blockconv.kernels.activation import Vectors
from blockconv.kernels.cut import ITEMSIZE
from blockconv.kernels.table import Row
from blockconv.layout import NATIVE, Layout
from blockconv.runtime import Buffer, Op

__all__ = ["ROWS"]

LINE = 64
TASK_BYTES = 16 * 1024
_i64 = types.int64


class _Code:
    """Vector code over `lanes` elements of `itemsize` bytes; of a last vector only the lanes that exist are touched."""

    def __init__(self, builder: Any, itemsize: int, lanes: int) -> None:
        self.b, self.itemsize, self.lanes = builder, itemsize, lanes
        self.element = ir.FloatType() if itemsize == 4 else ir.DoubleType()
        self.kind = ir.VectorType(self.element, lanes)
        self.suffix = f"v{lanes}f{8 * itemsize}.p0"
        self.v = Vectors(builder, self.kind)

    def load(self, address: Any, there: Any | None = None, other: float = 0.0) -> Any:
        at = pointer(self.b, address, self.kind)
        if there is None:
            return self.b.load(at, align=self.itemsize)
        what = [at, ir.Constant(I32, self.itemsize), there, self.v.c(other)]
        return call_llvm(self.b, f"llvm.masked.load.{self.suffix}", self.kind, what)

    def store(self, value: Any, address: Any, there: Any | None = None) -> None:
        at = pointer(self.b, address, self.kind)
        if there is None:
            self.b.store(value, at, align=self.itemsize)
        else:
            what = [value, at, ir.Constant(I32, self.itemsize), there]
            call_llvm(self.b, f"llvm.masked.store.{self.suffix}", ir.VoidType(), what)

    def all(self, address: Any) -> Any:
        """The scalar at an address, in every lane."""
        return splat(self.b, self.b.load(pointer(self.b, address, self.element), align=self.itemsize), self.lanes)

    def below(self, count: Any) -> Any:
        iota = ir.Constant(ir.VectorType(I32, self.lanes), list(range(self.lanes)))
        return self.b.icmp_signed("<", iota, splat(self.b, self.b.trunc(count, I32), self.lanes))

    def each(self, count: Any, body: Callable[[Any, Any | None], None]) -> None:
        """body(byte offset, which lanes exist) for the vectors of `count` elements; None: all lanes."""
        whole = self.b.sdiv(count, const(self.lanes))
        with cgutils.for_range(self.b, whole) as loop:
            body(self.b.mul(loop.index, const(self.lanes * self.itemsize)), None)
        done = self.b.mul(whole, const(self.lanes))
        rest = self.b.sub(count, done)
        with self.b.if_then(self.b.icmp_signed(">", rest, const(0))):
            body(self.b.mul(done, const(self.itemsize)), self.below(rest))

    def exp(self, x: Any) -> Any:
        """e^x for x up to 0; zero where float32 has nothing near it."""
        value = self.v.exp(x)
        if self.itemsize == 8:
            return value
        return self.b.select(self.b.fcmp_ordered("<", x, self.v.c(-87.3)), self.v.c(0.0), value)

    def larger(self, x: Any, y: Any) -> Any:
        return self.b.select(self.b.fcmp_ordered(">", x, y), x, y)

    def log(self, x: Any) -> Any:
        return self.v.each_lane("logf" if self.itemsize == 4 else "log", x)


def _literals(signature: Any, count: int) -> list[int]:
    return [t.literal_value for t in signature.args[:count]]


# ---------------------------------------------------------------- softmax of lines

MOST, TOTAL, RESULT = range(3)  # what is done with a stretch


@intrinsic(prefer_literal=True)
def softmax_stretch(typingctx, itemsize_lit, lanes_lit, step_lit, log_lit, src, dst, count, sums):
    """One step over `count` contiguous elements of a line.

    MOST: lane-wise maximum into the vector at `sums`. TOTAL: exp(src - first of sums), into dst unless `log`, and its
    lane-wise sum into the vector after. RESULT: dst times the scalar after these, or, for `log`, src minus it.
    """

    def codegen(context, builder, signature, args):
        itemsize, lanes, step, log = _literals(signature, 4)
        src, dst, count, sums = args[4:]
        e = _Code(builder, itemsize, lanes)
        size = lanes * itemsize
        at = builder.add(sums, const(step * size))
        if step == RESULT:
            by = e.all(at)
            if log:
                e.each(
                    count,
                    lambda o, m: e.store(builder.fsub(e.load(builder.add(src, o), m), by), builder.add(dst, o), m),
                )
            else:
                e.each(count, lambda o, m: e.store(e.v.mul(e.load(builder.add(dst, o), m), by), builder.add(dst, o), m))
            return context.get_dummy_value()
        slot = cgutils.alloca_once_value(builder, e.load(at))
        most = e.all(sums) if step == TOTAL else None

        def body(offset: Any, there: Any | None) -> None:
            x = e.load(builder.add(src, offset), there, -math.inf)
            if step == MOST:
                builder.store(e.larger(x, builder.load(slot)), slot)
                return
            x = e.exp(builder.fsub(x, most))
            if there is not None:  # -inf less -inf is no number
                x = builder.select(there, x, e.v.c(0.0))
            if not log:
                e.store(x, builder.add(dst, offset), there)
            builder.store(builder.fadd(builder.load(slot), x), slot)

        e.each(count, body)
        e.store(builder.load(slot), at)
        return context.get_dummy_value()

    return types.void(itemsize_lit, lanes_lit, step_lit, log_lit, *[_i64] * 4), codegen


# Argument words: buffers; lines in a row, bytes between two, between two rows; of a stretch bytes to the next and
# elements; the axis' length;
# elements to zero after it.
(A_SRC, A_DST, A_LINES, A_LINE, A_ROW, A_BLOCK, A_LENGTH, A_COUNT, A_TAIL, A_OWN) = range(10)


@jit.kernel
def softmax_lines(itemsize, lanes, log):
    """A task is a line."""
    size = lanes * itemsize

    def kernel(args, first, last, scratch):
        block, length, count = load_i64(args, A_BLOCK), load_i64(args, A_LENGTH), load_i64(args, A_COUNT)
        blocks = (count + length - 1) // length
        for task in range(first, last):
            at = task // load_i64(args, A_LINES) * load_i64(args, A_ROW)
            at += task % load_i64(args, A_LINES) * load_i64(args, A_LINE)
            src, dst = load_i64(args, A_SRC) + at, load_i64(args, A_DST) + at
            for lane in range(lanes):
                store_f(scratch + lane * itemsize, -math.inf, itemsize)
                store_f(scratch + size + lane * itemsize, 0.0, itemsize)
            for k in range(blocks):
                n = min(length, count - k * length)
                softmax_stretch(itemsize, lanes, MOST, log, src + k * block, dst + k * block, n, scratch)
            most = load_f(scratch, itemsize)
            for lane in range(1, lanes):
                most = max(most, load_f(scratch + lane * itemsize, itemsize))
            store_f(scratch, most, itemsize)
            for k in range(blocks):
                n = min(length, count - k * length)
                softmax_stretch(itemsize, lanes, TOTAL, log, src + k * block, dst + k * block, n, scratch)
            total = 0.0
            for lane in range(lanes):
                total += load_f(scratch + size + lane * itemsize, itemsize)
            by = load_f(scratch, itemsize) + math.log(total) if log else 1.0 / total
            store_f(scratch + 2 * size, by, itemsize)
            for k in range(blocks):
                n = min(length, count - k * length)
                softmax_stretch(itemsize, lanes, RESULT, log, src + k * block, dst + k * block, n, scratch)
            end = dst + (blocks - 1) * block + (count - (blocks - 1) * length) * itemsize
            for k in range(load_i64(args, A_TAIL)):
                store_bits(end + k * itemsize, 0, itemsize)

    return kernel


# ---------------------------------------------------------------- softmax of axes that are far apart


@intrinsic(prefer_literal=True)
def softmax_vector(typingctx, itemsize_lit, lanes_lit, log_lit, src, dst, steps, stride, count):
    """The softmax of `count` (or, if more, a vector's) neighbours along an axis of `steps`, `stride` bytes apart."""

    def codegen(context, builder, signature, args):
        itemsize, lanes, log = _literals(signature, 3)
        src, dst, steps, stride, count = args[3:]
        e = _Code(builder, itemsize, lanes)

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


# ---------------------------------------------------------------- local response normalisation

THREE_QUARTERS, ANY_POWER = range(2)  # how s ** -beta is found: by two square roots, or by the C library


def _normalised(e: _Code, x: Any, squares: Any, power: int, numbers: Any) -> Any:
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
        itemsize, lanes = _literals(signature, 2)
        src, dst, count = args[2:]
        e = _Code(builder, itemsize, lanes)

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
        itemsize, lanes, power = _literals(signature, 3)
        src, near, squared, dst, count, taps, tap, numbers = args[3:]
        e = _Code(builder, itemsize, lanes)
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


# ---------------------------------------------------------------- ops


class Lines(NamedTuple):
    """An axis as lines: lines in a row, elements between two; rows, elements between two; a line's stretches."""

    lines: int
    line: int
    rows: int
    row: int
    block: int
    length: int
    count: int
    tail: int

    def words(self, itemsize: int) -> list[int | Buffer]:
        numbers = [n * itemsize for n in (self.line, self.row, self.block)]
        return [Buffer(0), Buffer(1), self.lines, *numbers, self.length, self.count, self.tail]


def lines(layout: Layout, shape: tuple[int, ...], axis: int) -> Lines | None:
    """An axis whose elements lie together, at least in a block; None where they are far apart."""
    if layout.is_blocked:
        if axis != 1:
            return None
        n, c, h, w = shape
        b, padded = layout.blocks[1], layout.padded_shape(shape)[1]
        pixels, images = (h * w * n, 1) if layout == Layout("CHWN4") else (h * w, n)
        if pixels == 1:  # the blocks of an image touch
            return Lines(1, 0, images, padded, 0, c, c, padded - c)
        return Lines(pixels, b, images, padded * pixels, b * pixels, b, c, padded - c)
    found = _far(layout, shape, axis)
    return Lines(1, 0, found.rows, found.steps, 0, found.steps, found.steps, 0) if found.inner == 1 else None


class Far(NamedTuple):
    """An axis of a layout without blocks: rows around it, its steps, elements inside it."""

    rows: int
    steps: int
    inner: int


def _far(layout: Layout, shape: tuple[int, ...], axis: int) -> Far:
    at = layout.outer.index(axis)
    sizes = [shape[dim] for dim in layout.outer]
    return Far(math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :]))


def _lanes(itemsize: int) -> int:
    return jit.isa().vector_bytes // itemsize


def _chunk(tasks: int, nbytes: int, threads: int) -> int:
    """Tasks of `nbytes` each that are taken at a time."""
    return max(1, min(tasks // (4 * threads), TASK_BYTES // max(1, nbytes)))


def _bind_softmax(problem: SoftmaxProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, itemsize = problem, ITEMSIZE[dtype]
    if 0 in p.shape:
        return []
    lanes, found = _lanes(itemsize), lines(dst, p.shape, p.axis)
    if found is not None:
        tasks = found.lines * found.rows
        kernel = softmax_lines(itemsize, lanes, int(p.log))
        chunk = _chunk(tasks, found.count * itemsize, threads)
        return [Op(kernel, tuple(found.words(itemsize)), tasks, chunk, scratch=3 * lanes * itemsize)]
    far = _far(dst, p.shape, p.axis)
    row = far.inner * itemsize
    tasks = far.rows * -(-far.inner // lanes)
    words = (Buffer(0), Buffer(1), far.inner, far.steps * row, far.steps, row)
    chunk = _chunk(tasks, far.steps * lanes * itemsize, threads)
    return [Op(softmax_planes(itemsize, lanes, int(p.log)), words, tasks, chunk)]


def _bind_lrn(problem: LrnProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> list[Op]:
    p, itemsize = problem, ITEMSIZE[dtype]
    if 0 in p.shape:
        return []
    lanes, found = _lanes(itemsize), lines(dst, p.shape, 1)
    power = THREE_QUARTERS if p.beta == 0.75 else ANY_POWER
    numbers = [struct.unpack("<q", struct.pack("<d", x))[0] for x in (p.alpha / p.size, p.bias, p.beta)]
    own = [p.size, (p.size - 1) // 2, *numbers]
    if found is not None:
        tasks = found.lines * found.rows
        scratch = LINE + (found.count + 2 * p.size) * itemsize + LINE
        chunk = _chunk(tasks, found.count * itemsize, threads)
        words = (*found.words(itemsize), *own)
        return [Op(lrn_lines(itemsize, lanes, power), words, tasks, chunk, scratch=scratch)]
    pixels = p.shape[2] * p.shape[3]
    piece = max(1, TASK_BYTES // (p.shape[1] * itemsize * lanes)) * lanes
    pieces = -(-pixels // piece)
    words = (Buffer(0), Buffer(1), pixels, piece, p.shape[1], *own)
    return [Op(lrn_planes(itemsize, lanes, power), words, p.shape[0] * pieces, scratch=LINE)]


# ---------------------------------------------------------------- rows of the kernel table


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


def _why_not_lrn(problem: LrnProblem, src: Layout, dst: Layout) -> str | None:
    return None if src == dst else "does not change the layout"


def _cost(cycles: float, problem: Any, src: Layout, dst: Layout, threads: int) -> float:
    """Bytes at the speed of a copy, or `cycles` for each vector, or part of one, of a block."""
    size = dst.size(problem.shape)
    part = min(16, dst.blocks[1]) if dst.is_blocked else 16
    return 1e-6 + max(8 * size / 25e9, size / part * cycles / 3e9) / threads


_NATIVE, _FLOATS = frozenset(NATIVE), frozenset(ITEMSIZE)

ROWS = (
    Row("softmax", "softmax", None, None, _FLOATS, _why_not_softmax, partial(_cost, 30.0), _bind_softmax),
    Row("lrn", "lrn", _NATIVE, _NATIVE, _FLOATS, _why_not_lrn, partial(_cost, 30.0), _bind_lrn),
)
