"""Vector code of filters: rows in the type that is computed with, and the reduction of a window's terms."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core import target
from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.ir import I64, const, counted, emitted, pointer
from blockconv.kernels.common.vectors import Vectors, llvm_type

# How a window's terms become a result. WEIGHTED: multiply-adds. ORDERED: products and sums, each rounded, in the order
# of the terms. PAIR_SUMS, PAIR_DIFFERENCES: likewise, and a weight is for the sum or difference of two elements. MEAN:
# the sum times a number. RANK: the element of this rank.
NONE, WEIGHTED, ORDERED, PAIR_SUMS, PAIR_DIFFERENCES, MEAN, GREATEST, LEAST, RANK = range(9)
PAIRS = (PAIR_SUMS, PAIR_DIFFERENCES)
AT_ONCE = 4  # vectors that one pass over the terms computes


class Reducing(NamedTuple):
    """A reduction that a kernel is compiled for.

    terms, rank: of RANK alone, else 0.
    checked: whether an ordered sum is computed in float32 first, and again in float64 where that is near an integer.
    """

    kind: int
    terms: int = 0
    rank: int = 0
    checked: int = 0


def lanes_of(acc: ElementType) -> int:
    """Elements of a vector."""
    return target.isa().vector_bytes // acc.itemsize


def converted(b, value, given: ElementType, wanted: ElementType):
    """A vector of one type as another one, as C's casts convert: floats are truncated, integers wrap."""
    if given == wanted:
        return value
    kind = ir.VectorType(llvm_type(wanted), value.type.count)
    if given.is_float and wanted.is_float:
        return (b.fpext if wanted.itemsize > given.itemsize else b.fptrunc)(value, kind)
    if wanted.is_float:
        return (b.sitofp if given.kind == SIGNED else b.uitofp)(value, kind)
    if given.is_float:  # what is below 0 wraps too, as x86's conversions of doubles to unsigned integers do in C
        bits = 64 if wanted.itemsize * 8 + (wanted.kind != SIGNED) > 32 else 32
        value = b.fptosi(value, ir.VectorType(ir.IntType(bits), value.type.count))
    if value.type.element.width == kind.element.width:
        return value
    if value.type.element.width > kind.element.width:
        return b.trunc(value, kind)
    return (b.sext if given.kind == SIGNED else b.zext)(value, kind)


def row_reader(src: ElementType, acc: ElementType):
    """read(dst, src, count): code that copies a row of an image to scratch, in the type that is computed with."""

    @emitted
    def read(b, dst, at, count) -> None:
        v = Vectors(b, src, lanes_of(acc))

        def vector(offset, mask: Any | None) -> None:
            to = pointer(b, dst + offset * (acc.itemsize // src.itemsize), ir.VectorType(llvm_type(acc), v.lanes))
            b.store(converted(b, v.load(at + offset, mask), src, acc), to, align=1)  # scratch has room for all lanes

        v.each(count, vector)

    return read


def constant_row(acc: ElementType):
    """fill(dst, bits, count): code that writes one number `count` times, and up to a vector more."""

    @emitted
    def fill(b, dst, bits, count) -> None:
        v = Vectors(b, acc, lanes_of(acc))
        number = bits if acc.itemsize == 8 else b.trunc(bits, ir.IntType(8 * acc.itemsize))
        value = v.splat(b.bitcast(number, v.element) if number.type != v.element else number)
        with counted(b, b.sdiv(count + (v.lanes - 1), const(v.lanes))) as n:
            v.store(value, dst + n * v.bytes)

    return fill


def combination(kind: int, acc: ElementType):
    """combine(dst, x, y, count): code that writes the sums, or the extremes, of two rows to scratch."""
    kind = kind if kind in (GREATEST, LEAST) else MEAN

    @emitted
    def combine(b, dst, x, y, count) -> None:
        v = Vectors(b, acc, lanes_of(acc))
        with counted(b, b.sdiv(count + (v.lanes - 1), const(v.lanes))) as n:
            at = n * v.bytes
            v.store(_step(v, kind, v.load(x + at), None, v.load(y + at)), dst + at)

    return combine


def reduction(how: Reducing, acc: ElementType, out: ElementType, returns: bool):
    """reduce(addresses, window, weights, to, count): code that stores `count` results at `to`.

    addresses: of the elements that the first result reads: for each term one, and two where terms are pairs, but for
        the first term. They have a vector more behind them that may be read.
    window: `FilterWindow`. weights: their address.
    returns: results are rounded to the type `out`, and stored in the type that is computed with.
    """

    @emitted
    def reduce(b, addresses, window: Any, weights, to, count) -> None:
        code = _Reduction(b, how, acc, out, addresses, window, weights)
        stored, lanes = acc if returns else out, code.v.lanes
        memory = Vectors(b, stored, lanes)

        def block(first, vectors: int, rest: Any | None = None) -> None:
            """Results from `first` on, of these vectors; at most `rest` elements, where that is given."""
            for k, value in enumerate(code.results(first, vectors)):
                at, value = to + (first + k * lanes) * stored.itemsize, converted(b, value, out, stored)
                if rest is None:
                    memory.store(value, at)
                else:
                    memory.store_below(value, at, rest)

        at_once = (AT_ONCE if how.kind != RANK else 2 if how.terms < 10 else 1) * lanes
        groups = b.sdiv(count, const(at_once))
        with counted(b, groups) as n:
            block(n * at_once, at_once // lanes)
        left = count - groups * at_once
        with counted(b, b.sdiv(left + (lanes - 1), const(lanes))) as n:
            block(count - left + n * lanes, 1, left - n * lanes)

    return reduce


class _Reduction:
    """Code of a reduction. All but the number of the first result and of vectors is the same for every block."""

    def __init__(self, b, how: Reducing, acc: ElementType, out: ElementType, addresses, window, weights) -> None:
        self.b, self.how, self.acc, self.out = b, how, acc, out
        self.addresses, self.window, self.weights = addresses, window, weights
        self.v = Vectors(b, acc, lanes_of(acc), target.isa().fma and acc.is_float)

    def results(self, first, vectors: int) -> list[Any]:
        """Vectors of results, in the type `out`."""
        b, how, v = self.b, self.how, self.v
        if how.checked:
            return self.checked(first, vectors)
        if how.kind == RANK:
            given = zip(*(self.loaded(v, const(k), first, vectors) for k in range(how.terms)), strict=True)
            return [converted(b, ranked(v, [*values], how.rank), self.acc, self.out) for values in given]
        values = self.summed(v, how.kind, self.weights, first, vectors)
        if how.kind == MEAN:
            return [_mean(b, value, self.acc, self.window, self.out) for value in values]
        return [converted(b, value, self.acc, self.out) for value in values]

    def loaded(self, v: Vectors, number, first, vectors: int) -> list[Any]:
        """The elements at an address, by its number (i64), in the type of `v`."""
        memory = Vectors(self.b, self.acc, v.lanes)
        at = self.b.load(pointer(self.b, self.addresses + 8 * number, I64)) + first * self.acc.itemsize
        return [converted(self.b, memory.load(at + k * memory.bytes), self.acc, v.type) for k in range(vectors)]

    def summed(self, v: Vectors, kind: int, weights, first, vectors: int) -> list[Any]:
        """The terms combined, in the type of `v`."""
        b, pairs = self.b, self.how.kind in PAIRS
        join = v.add if self.how.kind == PAIR_SUMS else v.sub

        def weighted(x, term):
            return x * v.broadcast(weights + 8 * term) if kind in WITH_WEIGHTS else x

        begun = self.loaded(v, const(0), first, vectors)
        slots = [v.slots(1, weighted(x, const(0)))[0] for x in begun]
        with counted(b, self.window.terms, const(1)) as term:
            values = self.loaded(v, 2 * term - 1 if pairs else term, first, vectors)
            if pairs:
                values = [join(x, y) for x, y in zip(values, self.loaded(v, 2 * term, first, vectors), strict=True)]
            w = v.broadcast(weights + 8 * term) if kind in WITH_WEIGHTS else None
            for slot, value in zip(slots, values, strict=True):
                b.store(_step(v, kind, value, w, b.load(slot)), slot)
        return [b.load(slot) for slot in slots]

    def checked(self, first, vectors: int) -> list[Any]:
        """Ordered sums of small integers: computed again where the first attempt is near an integer, but 0."""
        b, v, out = self.b, self.v, Vectors(self.b, self.out, self.v.lanes)
        exact, bound = Vectors(b, element("float64"), v.lanes), _number(v, self.window.bias)
        quick = self.summed(v, WEIGHTED, self.weights + 8 * self.window.terms, first, vectors)
        slots, near = [], None
        for value in quick:
            slots += out.slots(1, converted(b, value, self.acc, self.out))
            whole = v.intrinsic("rint", value)
            is_near = v.magnitude(value - whole) < b.select(whole * whole > 0.0, bound, v.zero)
            near = is_near if near is None else near | is_near
        bits = b.bitcast(near, ir.IntType(v.lanes))
        with b.if_then(b.icmp_unsigned("!=", bits, bits.type(0)), likely=False):
            again = self.summed(exact, self.how.kind, self.weights, first, vectors)
            for slot, value in zip(slots, again, strict=True):
                b.store(converted(b, value, exact.type, self.out), slot)
        return [b.load(slot) for slot in slots]


WITH_WEIGHTS = (WEIGHTED, ORDERED, *PAIRS)


def _step(v: Vectors, kind: int, x, weight, value):
    """The result with one term more."""
    if kind == WEIGHTED:
        return v.multiply_add(x, weight, value)
    if kind in WITH_WEIGHTS:
        return value + x * weight
    if kind == MEAN:
        return value + x
    more = v.compared(">" if kind == GREATEST else "<", x, value)
    return v.b.select(more, x, value)


def _mean(b, total, acc: ElementType, window, out: ElementType):
    """A sum by the number of terms, in the type `out`.

    For integers half a unit of the sum is added: the quotient is then truncated to what division gives, as a rounded
    product is nearer to it than that.
    """
    kind = acc if acc.is_float else element("float32")
    v = Vectors(b, kind, total.type.count, target.isa().fma)
    total = converted(b, total, acc, kind)
    scale, bias = (_number(v, bits) for bits in (window.scale, window.bias))
    if out.is_float:
        return converted(b, total * scale, kind, out)
    return converted(b, v.multiply_add(total, scale, v.intrinsic("copysign", bias, total)), kind, out)


def _number(v: Vectors, bits):
    """A number of the computed type in every lane, from a word's bits."""
    word = bits if v.itemsize == 8 else v.b.trunc(bits, ir.IntType(8 * v.itemsize))
    return v.splat(v.b.bitcast(word, v.element))


def ranked(v: Vectors, values: list[Any], rank: int):
    """The element of this rank of each lane, by a network of comparisons. LLVM leaves out what it does not need."""
    for low, high in MEDIAN_OF_9 if (len(values), rank) == (9, 4) else network(len(values)):
        x, y = values[low], values[high]
        less = v.compared("<", y, x)
        values[low], values[high] = v.b.select(less, y, x), v.b.select(less, x, y)
    return values[rank]


_SORTS_3 = ((0, 1), (1, 2), (0, 1))
# Sort three times three; the median is that of the largest first, the middle second and the least third.
MEDIAN_OF_9 = (
    *((3 * k + low, 3 * k + high) for k in range(3) for low, high in _SORTS_3),
    *((0, 3), (3, 6), (1, 4), (4, 7), (1, 4), (5, 8), (2, 5), (2, 4), (4, 6), (2, 4)),
)


def network(count: int) -> Iterator[tuple[int, int]]:
    """Batcher's odd-even merge sort of `count` elements: which two are compared, in order."""
    size = 1
    while size < count:
        step = size
        while step:
            for first in range(step % size, count - step, 2 * step):
                for low in range(first, min(first + step, count - step)):
                    if low // (2 * size) == (low + step) // (2 * size):
                        yield low, low + step
            step //= 2
        size *= 2
