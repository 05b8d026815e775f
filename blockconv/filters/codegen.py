"""Vector code of filters: rows in the type that is computed with, and the reduction of a window's terms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core import target
from blockconv.core.python import zipped
from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.ir import I64, const, counted, emit_prefetch, emitted, pointer, store_vector, vector
from blockconv.jit.values import binary, build, least
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.eltwise.codegen import converted

# How the terms of a step become its result.
# WEIGHTED: multiply-adds. ORDERED: products and sums in scipy's order, each rounded, as integers.
# SUM, MEAN: the sum, and the sum times a number.
# GREATEST, LEAST: an extreme. RANK: the term of this rank.
WEIGHTED, ORDERED, SUM, MEAN, GREATEST, LEAST, RANK = range(7)
WEIGHED, EXTREMES = (WEIGHTED, ORDERED), (GREATEST, LEAST)
# A result as it is computed; rounded to the type of the filter's result; stored in that type; stored past the caches.
COMPUTED, ROUNDED, STORED, STREAMED = range(4)
AT_ONCE = 4  # vectors that one pass over the terms computes


class Reducing(NamedTuple):
    """A reduction that a kernel is compiled for.

    result: how results are stored: `COMPUTED`, `ROUNDED`, `STORED` or `STREAMED`.
    terms: their number, or 0 if it is not known.
    """

    kind: int
    result: int = COMPUTED
    terms: int = 0
    rank: int = 0


def lanes_of(acc: ElementType) -> int:
    """Elements of a vector."""
    return target.isa().vector_bytes // acc.itemsize


def _cast(v: Vectors, made: Vectors, value):
    """A vector of one type as another one, as C's casts convert: floats are truncated, integers wrap."""
    if v.type.is_float and not made.type.is_float:
        # Negative numbers wrap too, as x86's conversions of doubles to unsigned integers do in C.
        is_long = made.itemsize * 8 + (made.type.kind != SIGNED) > 32
        whole = Vectors(element("int64" if is_long else "int32"), v.lanes)
        v, value = whole, build.fptosi(value, whole.kind)
    return converted(v, made, value)


def row_reader(src: ElementType, acc: ElementType):
    """read(dst, at, count): code that copies a row of an image to scratch, in the type that is computed with."""

    @emitted
    def read(dst, at, count) -> None:
        v, made = (Vectors(type, lanes_of(acc)) for type in (src, acc))

        def piece(offset, mask: Any | None, _number: int = 0) -> None:
            value = _cast(v, made, v.load(at + offset, mask))
            made.store(value, dst + offset * (made.itemsize // v.itemsize))  # scratch has room for all lanes

        v.each(count, piece, AT_ONCE)

    return read


def reductions(hows: Sequence[Reducing], src: ElementType, acc: ElementType, out: ElementType):
    """reduce(number, addresses, step, weights, to, count, ahead): code that writes `count` results at `to`.

    addresses: of the elements that the first result reads. A vector more behind them may be read.
    step: `FilterStep`. weights: the address of what `passes` adds to the tables for the step's kind.
    ahead: elements of the image that are soon read. Arithmetic hides their prefetches; it may be outside the image.
    """

    @emitted
    def reduce(number, addresses, step: Any, weights, to, count, ahead) -> None:
        for k, how in enumerate(hows):
            with build.if_then(binary("eq", number, k)):
                code = _Reduction(how, acc, addresses, step, weights)
                code.made, code.ahead = Vectors(out if how.result else acc, code.v.lanes), (ahead, src.itemsize)
                _write(code, Vectors(out if how.result >= STORED else acc, code.v.lanes), to, count)

    return reduce


def _write(code: _Reduction, memory: Vectors, to, count) -> None:
    """Write `count` results at an address."""
    lanes, streams, done = memory.lanes, code.how.result == STREAMED, const(0)

    def block(first, vectors: int, limit: Any | None = None) -> None:
        """Results from `first` on, of these vectors; at most `limit` elements, where that is given."""
        for k in range(vectors if streams and limit is None else 0):
            ahead, itemsize = code.ahead
            emit_prefetch(ahead + (first + k * lanes) * itemsize)
        for k, value in enumerate(code.results(first, vectors)):
            value, at = _cast(code.made, memory, value), to + (first + k * lanes) * memory.itemsize
            if limit is not None:
                memory.store_below(value, at, limit)
            else:
                store_vector(build.bitcast(value, vector(memory.itemsize, lanes)), at, streams)

    if streams:  # results before a whole line of memory
        head = ((const(0) - to) & (memory.bytes - 1)) // memory.itemsize
        done = least(head, count)
        block(const(0), 1, done)
    vectors = 1 if code.how.kind == RANK else AT_ONCE
    width = vectors * lanes
    groups = (count - done) // width
    with counted(groups) as n:
        block(done + n * width, vectors)
    with counted(count, done + groups * width, const(lanes)) as first:
        block(first, 1, count - first)


class _Reduction:
    """Code of a reduction. All but the number of the first result and of vectors is the same for every block."""

    made: Vectors
    ahead: tuple[Any, int]

    def __init__(self, how: Reducing, acc: ElementType, addresses, step, weights) -> None:
        self.how, self.addresses, self.step, self.weights = how, addresses, step, weights
        self.v = Vectors(acc, lanes_of(acc), target.isa().fma and acc.is_float)
        self.known = [self.address(const(k)) for k in range(how.terms)]

    def results(self, first, vectors: int) -> list[Any]:
        """The vectors of results, in the type of `made`."""
        v, how = self.v, self.how
        if how.kind == RANK:
            terms = [self.loaded(v, at, first, vectors) for at in self.known]
            values = [ranked(v, [*window], how.rank) for window in zipped(*terms)]
        else:
            values = self.combined(first, vectors)
        if how.kind == ORDERED:
            return [self.checked(value, first + k * v.lanes) for k, value in enumerate(values)]
        if how.kind == MEAN:
            return [self.mean(value) for value in values]
        return [_cast(v, self.made, value) for value in values]

    def address(self, number):
        """The address of an element, by its number (i64)."""
        return build.load(pointer(self.addresses + 8 * number, I64))

    def loaded(self, v: Vectors, address, first, vectors: int) -> list[Any]:
        """Elements in the type of `v`."""
        at = address + first * self.v.itemsize
        return [_cast(self.v, v, self.v.load(at + k * self.v.bytes)) for k in range(vectors)]

    def combined(self, first, vectors: int) -> list[Any]:
        """The terms combined."""
        v, kind = self.v, self.how.kind
        begun = self.loaded(v, self.known[0] if self.known else self.address(const(0)), first, vectors)
        if kind in WEIGHED:
            begun = [x * v.broadcast(self.weights) for x in begun]
        slots = [v.slots(1, x)[0] for x in begun]

        def add(number, address) -> None:
            w = v.broadcast(self.weights + 8 * number) if kind in WEIGHED else None
            for slot, x in zipped(slots, self.loaded(v, address, first, vectors)):
                total = build.load(slot)
                if kind in WEIGHED:
                    total = v.multiply_add(x, w, total)
                elif kind in (SUM, MEAN):
                    total = total + x
                else:
                    total = build.select(v.compared(">" if kind == GREATEST else "<", x, total), x, total)
                build.store(total, slot)

        for k, address in enumerate(self.known[1:], 1):
            add(k, address)
        if not self.known:
            with counted(self.step.terms, const(1)) as number:
                add(number, self.address(number))
        return [build.load(slot) for slot in slots]

    def checked(self, value, first):
        """A sum as integers. If the fast sum is near an integer other than 0, it is computed again in scipy's order."""
        v, weights = self.v, self.weights + 8 * self.step.terms
        (slot,) = self.made.slots(1, _cast(v, self.made, value))
        whole = v.intrinsic("rint", value)
        is_near = (v.magnitude(value - whole) < v.broadcast(weights)) & v.compared("!=", whole, v.zero)
        bits = build.bitcast(is_near, ir.IntType(v.lanes))
        with build.if_then(build.icmp_unsigned("!=", bits, bits.type(0)), likely=False):
            exact = Vectors(element("float64"), v.lanes)
            (total,) = exact.slots(1, exact.zero)
            with counted(self.step.ordered) as number:
                pair = weights + (number * 32 + 8)
                ends = (self.address(build.load(pointer(pair + at, I64))) for at in (0, 8))
                x, y = (self.loaded(exact, end, first, 1)[0] for end in ends)
                both = x + y * exact.broadcast(pair + 24)
                build.store(build.load(total) + both * exact.broadcast(pair + 16), total)
            build.store(_cast(exact, self.made, build.load(total)), slot)
        return build.load(slot)

    def mean(self, total):
        """A sum by the number of terms.

        Integers add half a unit to the sum, and the product is truncated. Its rounding error is less than that, so the
        result is the quotient's.
        """
        kind = self.v.type if self.v.type.is_float else element("float32")
        v = Vectors(kind, self.v.lanes, target.isa().fma)
        scale, half = (v.broadcast(self.weights + at) for at in (0, 8))
        total = _cast(self.v, v, total)
        return _cast(v, self.made, v.multiply_add(total, scale, v.intrinsic("copysign", half, total)))


def ranked(v: Vectors, values: list[Any], rank: int):
    """The value of a rank. LLVM leaves out the comparisons that it does not need."""
    for low, high in network(len(values)):
        x, y = values[low], values[high]
        less = v.compared("<", y, x)
        values[low], values[high] = build.select(less, y, x), build.select(less, x, y)
    return values[rank]


def network(count: int) -> Iterator[tuple[int, int]]:
    """Batcher's merge exchange sort of `count` elements: which two are compared, in order."""
    powers = [1 << k for k in range(count.bit_length())][::-1]
    for p, q in itertools.product(powers, powers):
        far, bit = (p, 0) if q == powers[0] else (2 * q - p, p)
        if q >= p:
            yield from ((k, k + far) for k in range(count - far) if k & p == bit)
