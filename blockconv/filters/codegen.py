"""Vector code of filters: rows in the type that is computed with, and the reduction of a window's terms."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core import target
from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.ir import I64, const, counted, emitted, pointer, store_vector, vector
from blockconv.kernels.common.vectors import Vectors, llvm_type

# How the terms of a step become its result.
# WEIGHTED: multiply-adds.
# ORDERED: products and sums, each rounded, in the order of the terms, as integers.
# PAIR_SUMS, PAIR_DIFFERENCES: the same, and a term is a sum, or a difference, of two elements, but the first.
# SUM, MEAN: the sum, and the sum times a number.
# GREATEST, LEAST: an extreme. RANK: the term of this rank. SORT: the terms in ascending order, a row for each.
WEIGHTED, ORDERED, PAIR_SUMS, PAIR_DIFFERENCES, SUM, MEAN, GREATEST, LEAST, SORT, RANK = range(10)
PAIRS = (PAIR_SUMS, PAIR_DIFFERENCES)
AT_ONCE = 4  # vectors that one pass over the terms computes


class Reducing(NamedTuple):
    """A reduction that a kernel is compiled for.

    rounds: whether results are rounded to the type of the filter's result.
    rows: the number of terms, or 0 if it is not known.
    columns: of as many rows, for RANK. With more than one, the terms are column after column, and each is in order.
    streams: whether results are stored past the caches.
    """

    kind: int
    rounds: int = 0
    rows: int = 0
    columns: int = 1
    rank: int = 0
    streams: int = 0


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
    if given.is_float:  # negative numbers wrap too, as x86's conversions of doubles to unsigned integers do in C
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

        def piece(offset, mask: Any | None, _number: int = 0) -> None:
            to = pointer(b, dst + offset * (acc.itemsize // src.itemsize), ir.VectorType(llvm_type(acc), v.lanes))
            b.store(converted(b, v.load(at + offset, mask), src, acc), to, align=1)  # scratch has room for all lanes

        v.each(count, piece, AT_ONCE)

    return read


def reduction(how: Reducing, acc: ElementType, out: ElementType, is_last: bool):
    """reduce(addresses, step, weights, to, count, slot): code that writes `count` results at `to`.

    addresses: of the elements that the first result reads. A vector more behind them may be read.
    step: `FilterStep`. weights: their address. slot: bytes from a row of results of SORT to the next.
    is_last: results are stored in the type `out`; else in the type that is computed with.
    """

    @emitted
    def reduce(b, addresses, step: Any, weights, to, count, slot) -> None:
        code = _Reduction(b, how, acc, out, addresses, step, weights)
        stored, lanes = out if is_last else acc, code.v.lanes
        memory = Vectors(b, stored, lanes)
        vectors = AT_ONCE if how.kind < SORT else 2 if how.rows * how.columns < 10 else 1
        at_once = const(vectors * lanes)

        def block(first, vectors: int, limit: Any | None = None) -> None:
            """Results from `first` on, of these vectors; at most `limit` elements, where that is given."""
            for k, rows in enumerate(code.results(first, vectors)):
                for row, value in enumerate(rows):
                    value = converted(b, value, code.made, stored)
                    at = to + (first + k * lanes) * stored.itemsize + slot * row
                    if limit is not None:
                        memory.store_below(value, at, limit)
                    else:
                        store_vector(b, b.bitcast(value, vector(stored.itemsize, lanes)), at, bool(how.streams))

        head = const(0)  # results before a whole line of memory
        if how.streams:
            head = b.sdiv((const(0) - to) & (memory.bytes - 1), const(stored.itemsize))
            head = b.select(head < count, head, count)
        groups = b.sdiv(count - head, at_once)
        with counted(b, groups) as n:
            block(head + n * at_once, vectors)
        done = head + groups * at_once
        tail = b.sdiv(count - done + (lanes - 1), const(lanes))
        with counted(b, tail + b.zext(head > 0, I64)) as n:
            is_tail, first = n < tail, done + n * lanes
            block(b.select(is_tail, first, const(0)), 1, b.select(is_tail, count - first, head))

    return reduce


class _Reduction:
    """Code of a reduction. All but the number of the first result and of vectors is the same for every block."""

    def __init__(self, b, how: Reducing, acc: ElementType, out: ElementType, addresses, step, weights) -> None:
        self.b, self.how, self.acc, self.addresses, self.step, self.weights = b, how, acc, addresses, step, weights
        self.v = Vectors(b, acc, lanes_of(acc), target.isa().fma and acc.is_float)
        self.made = out if how.rounds else acc
        self.terms = b.sdiv(step.terms + 1, const(2)) if how.kind in PAIRS else step.terms
        self.known = [self.address(const(k)) for k in range(how.rows * how.columns)]

    def results(self, first, vectors: int) -> list[list[Any]]:
        """For each vector the rows of results, in the type `made`."""
        b, how, v = self.b, self.how, self.v
        if how.kind in (SORT, RANK):
            terms = [self.loaded(v, k, first, vectors) for k in range(len(self.known))]
            found = [sorted_rows(v, [*values], how) for values in zip(*terms, strict=True)]
            return [[converted(b, value, self.acc, self.made) for value in rows] for rows in found]
        if how.kind in (ORDERED, *PAIRS):
            return [[value] for value in self.checked(first, vectors)]
        values = self.summed(v, how.kind, self.weights, first, vectors)
        if how.kind == MEAN:
            return [[self.mean(value)] for value in values]
        return [[converted(b, value, self.acc, self.made)] for value in values]

    def address(self, number):
        """The address of an element, by its number (i64)."""
        return self.b.load(pointer(self.b, self.addresses + 8 * number, I64))

    def loaded(self, v: Vectors, number, first, vectors: int) -> list[Any]:
        """Elements in the type of `v`, by the number of their address: an i64, or known."""
        memory = Vectors(self.b, self.acc, v.lanes)
        at = (self.known[number] if isinstance(number, int) else self.address(number)) + first * self.acc.itemsize
        return [converted(self.b, memory.load(at + k * memory.bytes), self.acc, v.type) for k in range(vectors)]

    def summed(self, v: Vectors, kind: int, weights, first, vectors: int) -> list[Any]:
        """The terms combined, in the type of `v`."""
        b, is_weighted, how = self.b, kind in (WEIGHTED, ORDERED, *PAIRS), self.how
        begun = self.loaded(v, 0 if self.known else const(0), first, vectors)
        slots = [v.slots(1, x * v.broadcast(weights) if is_weighted else x)[0] for x in begun]

        def add(number) -> None:
            values = self.loaded(v, 2 * number - 1 if how.kind in PAIRS else number, first, vectors)
            if how.kind in PAIRS:
                join = v.add if how.kind == PAIR_SUMS else v.sub
                values = list(map(join, values, self.loaded(v, 2 * number, first, vectors)))
            w = v.broadcast(weights + 8 * number) if is_weighted else None
            for slot, x in zip(slots, values, strict=True):
                total = b.load(slot)
                if kind == WEIGHTED:
                    total = v.multiply_add(x, w, total)
                elif kind in (GREATEST, LEAST):
                    total = b.select(v.compared(">" if kind == GREATEST else "<", x, total), x, total)
                else:
                    total = total + (x * w if is_weighted else x)
                b.store(total, slot)

        if self.known:
            for k in range(1, (how.rows + 1) // 2 if how.kind in PAIRS else how.rows):
                add(k)
        else:
            with counted(b, self.terms, const(1)) as number:
                add(number)
        return [b.load(slot) for slot in slots]

    def checked(self, first, vectors: int) -> list[Any]:
        """Ordered sums as integers: computed again where a quick one is near an integer, but 0."""
        b, v, out = self.b, self.v, Vectors(self.b, self.made, self.v.lanes)
        exact, bound, slots = Vectors(b, element("float64"), v.lanes), self.number(v, self.step.bias), []
        for k, value in enumerate(self.summed(v, WEIGHTED, self.weights + 8 * self.terms, first, vectors)):
            slots += out.slots(1, converted(b, value, self.acc, self.made))
            whole = v.intrinsic("rint", value)
            is_near = v.magnitude(value - whole) < b.select(whole * whole > 0.0, bound, v.zero)
            bits = b.bitcast(is_near, ir.IntType(v.lanes))
            with b.if_then(b.icmp_unsigned("!=", bits, bits.type(0)), likely=False):
                (again,) = self.summed(exact, self.how.kind, self.weights, first + k * v.lanes, 1)
                b.store(converted(b, again, exact.type, self.made), slots[-1])
        return [b.load(slot) for slot in slots]

    def mean(self, total):
        """A sum by the number of terms.

        For integers half a unit of the sum is added: the quotient is then truncated to what division gives, as a
        rounded product is nearer to it than that.
        """
        kind = self.acc if self.acc.is_float else element("float32")
        v = Vectors(self.b, kind, self.v.lanes, target.isa().fma)
        scale, half = self.number(v, self.step.scale), self.number(v, self.step.bias)
        total = converted(self.b, total, self.acc, kind)
        total = v.multiply_add(total, scale, v.intrinsic("copysign", half, total))
        return converted(self.b, total, kind, self.made)

    def number(self, v: Vectors, bits):
        """A number of the type of `v` in every lane, from a word's bits."""
        return v.splat(self.b.bitcast(bits if v.itemsize == 8 else self.b.trunc(bits, ir.IntType(32)), v.element))


def sorted_rows(v: Vectors, values: list[Any], how: Reducing) -> list[Any]:
    """SORT: the terms in order. RANK: the term of this rank alone. LLVM leaves out the comparisons that nobody needs.

    Columns that are in order stay so when their rows are sorted. An element then has more elements on one side of it
    than the rank allows, or it is a candidate.
    """

    def in_order(terms: list[Any]) -> list[Any]:
        for low, high in network(len(terms)):
            x, y = terms[low], terms[high]
            less = v.compared("<", y, x)
            terms[low], terms[high] = v.b.select(less, y, x), v.b.select(less, x, y)
        return terms

    if how.kind == SORT:
        return in_order(values)
    rows, columns, rank = how.rows, how.columns, how.rank
    if columns > 1:
        matrix, values = [in_order(values[row::rows]) for row in range(rows)], []
        for row, column in itertools.product(range(rows), range(columns)):
            if (rows - row) * (columns - column) > rows * columns - how.rank:
                rank -= 1  # the element is before the one of the rank
            elif (row + 1) * (column + 1) <= how.rank + 1:
                values.append(matrix[row][column])
    return [in_order(values)[rank]]


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
