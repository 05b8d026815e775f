"""Pooling's vector code: a maximum or a sum of elements, by vectors and one by one, as LLVM IR.

Every function reduces vectors that lie at run-time strides, keeping several accumulators so that no operation waits
for the one before it. A maximum takes a NaN wherever it meets one and keeps the first of equals, as PyTorch's does.
Sums are never taken back by a subtraction, so a NaN or infinity reaches the windows that hold it and no other.

What is known when a kernel is built is a `Reduction` and a ``...Spec``; what it is called with is a ``...Run``.
Addresses and steps between elements of memory are in bytes.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from blockconv.core.types import ElementType
from blockconv.jit.ir import I64, const, emitted, pointer, shuffle
from blockconv.kernels.common.vectors import Vectors, llvm_type

__all__ = [
    "MAXIMUM",
    "SUM",
    "Reducer",
    "Reduction",
    "TileRun",
    "TileSpec",
    "WindowRun",
    "combine",
    "identity",
    "load_value",
    "pool_tile",
    "reduce_window",
    "store_value",
]

MAXIMUM, SUM = range(2)
SUMS = 4  # that hide the latency of an addition

_Vectors = list[Any]


class Reduction(NamedTuple):
    """What a kernel reduces, and by which vectors."""

    operation: int  # MAXIMUM or SUM
    element: int  # the element type's code
    lanes: int  # elements of a vector
    masked: int = 0  # 1: zeros are stored for channels that do not exist


class Reducer(Vectors):
    """The vector code of a reduction."""

    def __init__(self, builder: Any, reduction: Reduction) -> None:
        super().__init__(builder, ElementType.of(reduction.element), reduction.lanes)
        self.is_sum, self.is_masked = reduction.operation == SUM, bool(reduction.masked)
        self.sums: _Vectors = []  # slots, while a guard adds up what is read: see `guarded`
        self._read = 0

    @property
    def identity(self) -> Any:
        """What changes no result, a scalar: zero, or the least value."""
        if self.is_sum:
            return 0.0
        if self.type.is_float:
            return -math.inf
        return -(1 << (8 * self.itemsize - 1)) if self.type.kind == "signed" else 0

    def more(self, x: Any, y: Any) -> Any:
        """Where x > y, both vectors or both scalars; false where one is NaN."""
        if self.type.is_float:
            return self.b.fcmp_ordered(">", x, y)
        return (self.b.icmp_signed if self.type.kind == "signed" else self.b.icmp_unsigned)(">", x, y)

    def combine(self, acc: Any, x: Any) -> Any:
        """`acc` with one value more."""
        if self.is_sum:
            return self.add(acc, x)
        # x86's own maximum gives `acc` if either is NaN, which is wrong only where `x` is.
        larger = self.b.select(self.more(x, acc), x, acc)
        if self.sums or not self.type.is_float:
            return larger
        return self.b.select(self.b.fcmp_unordered("uno", x, x), x, larger)

    def accumulators(self, count: int) -> _Vectors:
        return self.slots(count, self.c(self.identity))

    def accumulate(self, slot: Any, x: Any) -> None:
        self.b.store(self.combine(self.b.load(slot), x), slot)

    def reduced(self, vectors: int, known: int, count: Any, read: Callable[[Any, int], Any]) -> _Vectors:
        """`vectors` reductions of `count` steps; read(step, v) gives a value. known: `count`, if not 0; unrolled."""
        if known:
            values = [read(const(0), v) for v in range(vectors)]
            for step in range(1, known):
                values = [self.combine(value, read(const(step), v)) for v, value in enumerate(values)]
            return values
        slots = self.accumulators(vectors)
        with cgutils.for_range(self.b, count) as loop:
            for v, slot in enumerate(slots):
                self.accumulate(slot, read(loop.index, v))
        return [self.b.load(slot) for slot in slots]

    def guarded(self, compute: Callable[[], _Vectors], store: Callable[[_Vectors], None]) -> None:
        """``store(compute())``, faster for maxima: as if nothing were NaN, and once more if the sums say that it was.

        A maximum that takes a NaN wherever it meets one is three instructions, x86's own is one. All values that
        `compute` reads by `read` are added up, on units that maxima leave idle; the sum is NaN if one of them is (or
        if both infinities are among them).
        """
        if self.is_sum or not self.type.is_float:
            store(compute())
            return
        self.sums = self.slots(SUMS, self.c(0.0))
        values = compute()
        total = self.b.load(self.sums[0])
        for slot in self.sums[1:]:
            total = self.add(total, self.b.load(slot))
        is_nan = self.b.bitcast(self.b.fcmp_unordered("uno", total, total), ir.IntType(self.lanes))
        self.sums = []
        some = self.b.icmp_unsigned("!=", is_nan, is_nan.type(0))
        # Stored before it is known, so that no register has to hold a result until then.
        store(values)
        with self.b.if_then(some, likely=False):
            store(compute())

    def read(self, address: Any, mask: Any | None = None) -> Any:
        """The vector at `address`, for the guard to see. Lanes that the mask lacks change no result."""
        value = self.load(address, mask, self.identity)
        if self.sums:
            slot = self.sums[self._read % len(self.sums)]
            self._read += 1
            self.b.store(self.add(self.b.load(slot), value), slot)
        return value

    def read_pixels(self, address: Any, inner: int, stride: int) -> Any:
        """As many whole pixels of `inner` elements as a vector holds, each `stride` pixels after the one before it."""
        if stride == 1:
            return self.load(address)
        offsets = [(k // inner) * stride * inner + k % inner for k in range(self.lanes // inner * inner)]
        value = ir.Constant(self.kind, ir.Undefined)
        for first in range(0, offsets[-1] + 1, self.lanes):
            here = [k for k, offset in enumerate(offsets) if first <= offset < first + self.lanes]
            if not here:
                continue
            part = self.load(self.b.add(address, const(first * self.itemsize)))
            chosen = list(range(self.lanes))
            for k in here:
                chosen[k] = self.lanes + offsets[k] - first
            value = shuffle(self.b, value, part, chosen)
        return value

    def store_result(self, value: Any, address: Any, scale: Any, mask: Any, count: Any | None = None) -> None:
        """Store what windows come to, sums times the vector `scale`.

        mask: the address of zero bits for channels that do not exist. count: the elements that are stored, if not all.
        """
        if self.is_sum:
            value = self.mul(value, scale)
        if self.is_masked:
            value = self.with_zero_bits(value, mask)
        self.store(value, address, None if count is None else self.below(count))

    def after(self, address: Any, steps: int, step: Any) -> Any:
        """The address `steps` times `step` bytes after another."""
        return address if steps == 0 else self.b.add(address, self.b.mul(const(steps), step))

    def plus(self, address: Any, elements: int) -> Any:
        """The address so many elements after another."""
        return self.b.add(address, const(elements * self.itemsize))


# ---------------------------------------------------------------- one element at a time


def _scalar(element: ElementType) -> Any:
    """Numba's type of an element in a kernel: a float of its size, or an int64."""
    if element.is_float:
        return types.float32 if element.itemsize == 4 else types.float64
    return types.int64


@intrinsic(prefer_literal=True)
def load_value(typingctx, address, element_lit):
    """The element at `address`: a float of its size, or an int64."""
    element = ElementType.of(element_lit.literal_value)

    def codegen(context, builder, signature, args):
        kind = llvm_type(element)
        value = builder.load(pointer(builder, args[0], kind), align=element.itemsize)
        if element.is_float or kind == I64:
            return value
        return (builder.sext if element.kind == "signed" else builder.zext)(value, I64)

    return _scalar(element)(types.int64, element_lit), codegen


@intrinsic(prefer_literal=True)
def store_value(typingctx, address, value, element_lit):
    """Write one element, given as `load_value` gives it."""
    element = ElementType.of(element_lit.literal_value)

    def codegen(context, builder, signature, args):
        kind = llvm_type(element)
        value = context.cast(builder, args[1], signature.args[1], _scalar(element))
        if not element.is_float and kind != I64:
            value = builder.trunc(value, kind)
        builder.store(value, pointer(builder, args[0], kind), align=element.itemsize)
        return context.get_dummy_value()

    return types.void(types.int64, value, element_lit), codegen


@intrinsic(prefer_literal=True)
def identity(typingctx, operation_lit, element_lit):
    """What a reduction starts from, as `load_value` gives it."""
    reduction = Reduction(operation_lit.literal_value, element_lit.literal_value, 1)
    result = _scalar(ElementType.of(reduction.element))

    def codegen(context, builder, signature, args):
        return ir.Constant(context.get_value_type(result), Reducer(builder, reduction).identity)

    return result(operation_lit, element_lit), codegen


@intrinsic(prefer_literal=True)
def combine(typingctx, operation_lit, element_lit, acc, x):
    """One step of a reduction, on elements as `load_value` gives them."""
    reduction = Reduction(operation_lit.literal_value, element_lit.literal_value, 1)

    def codegen(context, builder, signature, args):
        return Reducer(builder, reduction).combine(args[2], args[3])

    # (An unsigned element is a non-negative int64, which both comparisons order alike.)
    return acc(operation_lit, element_lit, acc, x), codegen


# ---------------------------------------------------------------- wide pixels


class TileSpec(NamedTuple):
    """A tile of neighbouring outputs of one row, a vector of channels each."""

    pixels: int  # outputs
    taps: int  # columns of a window
    stride: int  # columns between windows
    dilation: int  # columns between taps
    border: int  # 1: columns outside the image are met, and read from `TileRun.fill`
    rows: int  # of a window, if known, or 0


class TileRun(NamedTuple):
    """The arguments of `pool_tile`."""

    src: Any  # the channel of the first column, in the first row that exists
    rows: Any  # of the windows
    row_step: Any
    col_step: Any
    column: Any  # the first column's number
    width: Any  # columns of the image
    fill: Any  # address of a vector that changes no result
    dst: Any  # the first output
    d_step: Any  # from an output to the next
    scales: Any  # address of what each output's sum is multiplied by
    mask: Any  # address of zero bits for channels that do not exist


def pool_tile(reduction: Reduction, spec: TileSpec) -> Any:
    """Code for a tile: the windows' rows are reduced into a vector a column, then the columns of each window.

    Each column is loaded once, whatever the number of windows that it is in.
    """
    windows = [[p * spec.stride + t * spec.dilation for t in range(spec.taps)] for p in range(spec.pixels)]
    columns = sorted({c for window in windows for c in window})

    @emitted
    def tile(builder: Any, run: TileRun) -> None:
        e = Reducer(builder, reduction)
        inside = {}
        for c in columns if spec.border else ():
            inside[c] = builder.icmp_unsigned("<", builder.add(run.column, const(c)), run.width)

        def read(row: Any, v: int) -> Any:
            c = columns[v]
            at = e.after(builder.add(run.src, builder.mul(row, run.row_step)), c, run.col_step)
            return e.read(builder.select(inside[c], at, run.fill) if spec.border else at)

        def compute() -> _Vectors:
            reduced = dict(zip(columns, e.reduced(len(columns), spec.rows, run.rows, read), strict=True))
            values = []
            for window in windows:
                value = reduced[window[0]]
                for c in window[1:]:
                    value = e.combine(value, reduced[c])
                values.append(value)
            return values

        def store(values: _Vectors) -> None:
            for p, value in enumerate(values):
                scale = e.broadcast(e.plus(run.scales, p)) if e.is_sum else None
                e.store_result(value, e.after(run.dst, p, run.d_step), scale, run.mask)

        e.guarded(compute, store)

    return tile


class WindowRun(NamedTuple):
    """The arguments of `reduce_window`."""

    src: Any  # the window's first pixel that exists
    rows: Any
    row_step: Any
    cols: Any
    col_step: Any
    dst: Any
    scale: Any  # address of what a sum is multiplied by
    mask: Any  # address of zero bits for channels that do not exist


def reduce_window(reduction: Reduction, vectors: int, unroll: int) -> Any:
    """Code for one window of any size: `vectors` vectors of its channels, `unroll` columns at a time.

    Each row has accumulators of its own: a sum's rounding errors grow with rows plus columns, not with their product.
    """

    @emitted
    def window(builder: Any, run: WindowRun) -> None:
        e = Reducer(builder, reduction)
        at = cgutils.alloca_once(builder, I64)
        parts = (unroll, builder.sdiv(run.cols, const(unroll))), (1, builder.srem(run.cols, const(unroll)))

        def compute() -> _Vectors:
            totals = e.accumulators(vectors)
            with cgutils.for_range(builder, run.rows) as loop:
                builder.store(builder.add(run.src, builder.mul(loop.index, run.row_step)), at)
                slots = e.accumulators(unroll * vectors)
                for width, count in parts:
                    with cgutils.for_range(builder, count):
                        here = builder.load(at)
                        for c in range(width):
                            for v in range(vectors):
                                address = e.plus(e.after(here, c, run.col_step), v * e.lanes)
                                e.accumulate(slots[c * vectors + v], e.read(address))
                        builder.store(e.after(here, width, run.col_step), at)
                for i, slot in enumerate(slots):
                    e.accumulate(totals[i % vectors], builder.load(slot))
            return [builder.load(slot) for slot in totals]

        def store(values: _Vectors) -> None:
            for v, value in enumerate(values):
                scale = e.broadcast(run.scale) if e.is_sum else None
                e.store_result(value, e.plus(run.dst, v * e.lanes), scale, e.plus(run.mask, v * e.lanes))

        e.guarded(compute, store)

    return window
