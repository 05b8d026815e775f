"""What softmax and local response normalisation share: all elements of an axis are needed for each result.

In storage these lie in one of two ways. As a *line*: stretches of contiguous elements, one for each block of channels
(NHWC: a single one), which are walked by vectors along the axis. Or far apart (NCHW), where a vector holds neighbours
that have nothing to do with each other, and the axis is a loop. Channels that do not exist are never read; they are
written as zeros.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from blockconv import jit
from blockconv.emit import I32, call_llvm, const, pointer, shuffle, splat
from blockconv.kernels.activation import Vectors
from blockconv.kernels.table import BANDWIDTH
from blockconv.layout import Layout
from blockconv.runtime import Buffer

__all__ = ["Code", "Far", "Lines", "chunk_of", "cost", "far", "lanes_of", "lines", "literals"]

TASK_BYTES = 16 * 1024

# Argument words: buffers; lines in a row, bytes between two, between two rows; of a stretch bytes to the next and
# elements; the elements of a line, and those to zero after it; an op's own.
(A_SRC, A_DST, A_LINES, A_LINE, A_ROW, A_BLOCK, A_LENGTH, A_COUNT, A_TAIL, A_OWN) = range(10)


class Code:
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

    def folded(self, x: Any, combine: Callable[[Any, Any], Any]) -> Any:
        """All lanes of `x` combined, in every lane."""
        half = self.lanes // 2
        while half:
            x = combine(x, shuffle(self.b, x, x, [(lane + half) % self.lanes for lane in range(self.lanes)]))
            half //= 2
        return x

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


def literals(signature: Any, count: int) -> list[int]:
    return [t.literal_value for t in signature.args[:count]]


class Lines(NamedTuple):
    """An axis as lines: lines in a row, elements between two; rows, elements between two; a line's stretches."""

    lines: int
    line: int
    rows: int
    row: int
    block: int
    length: int
    elements: int
    tail: int

    def words(self, itemsize: int) -> list[int | Buffer]:
        numbers = [n * itemsize for n in (self.line, self.row, self.block)]
        return [Buffer(0), Buffer(1), self.lines, *numbers, self.length, self.elements, self.tail]


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
    found = far(layout, shape, axis)
    return Lines(1, 0, found.rows, found.steps, 0, found.steps, found.steps, 0) if found.inner == 1 else None


class Far(NamedTuple):
    """An axis of a layout without blocks: rows around it, its steps, elements inside it."""

    rows: int
    steps: int
    inner: int


def far(layout: Layout, shape: tuple[int, ...], axis: int) -> Far:
    at = layout.outer.index(axis)
    sizes = [shape[dim] for dim in layout.outer]
    return Far(math.prod(sizes[:at]), sizes[at], math.prod(sizes[at + 1 :]))


def lanes_of(itemsize: int) -> int:
    return jit.isa().vector_bytes // itemsize


def chunk_of(tasks: int, nbytes: int, threads: int) -> int:
    """Tasks of `nbytes` each that are taken at a time."""
    return max(1, min(tasks // (4 * threads), TASK_BYTES // max(1, nbytes)))


def cost(cycles: float, problem: Any, src: Layout, dst: Layout, threads: int) -> float:
    """Bytes at the speed of a copy, or `cycles` for each vector, or part of one, of a block."""
    size = dst.size(problem.shape)
    part = min(16, dst.blocks[1]) if dst.is_blocked else 16
    return 1e-6 + max(8 * size / BANDWIDTH, size / part * cycles / 3e9) / threads
