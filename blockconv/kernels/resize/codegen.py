"""Blends and sums of rows, and of the columns of a row, as vector code."""

from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core.python import zipped
from blockconv.core.types import ElementType
from blockconv.jit.ir import I64, const, counted, emitted, pointer
from blockconv.jit.values import build
from blockconv.kernels.common.conversion import read_and_written
from blockconv.kernels.common.vectors import Vectors

UNROLLED = 4  # vectors of sums that share one read of a tap's offset and weight
TAP = 16  # bytes: an offset and a weight
ANY_NUMBER, COPIED, BLENDED = range(3)  # taps that code is compiled for


class ColumnForm(NamedTuple):
    """The form of the columns of a row; kernels are compiled for it.

    taps: of each row and column. `COPIED`: the only one is copied. `BLENDED`: two, whose weights add up to 1.
        `ANY_NUMBER`: their number is known at run time.
    lanes: of a vector.
    inner: elements of a pixel, which is made of few vectors; 0: any number.
    part: if not 0, vectors of the row's elements are sums, whatever pixels they are of. They are read in parts of so
        many elements. The last vector overlaps the one before.
    near: a vector is read at once, and its lanes are permuted.
    """

    taps: int
    lanes: int
    inner: int
    part: int = 0
    near: int = 0

    def head(self, itemsize: int) -> int:
        """Bytes that say where a vector's tap is: the offsets of its parts, or of the vector that is permuted, and
        indices of `itemsize` bytes."""
        return 8 + self.lanes * itemsize if self.near else 8 * (self.lanes // self.part)


def blend(src: ElementType, dst: ElementType, lanes: int):
    """Code for dst = a * (1 - weight) + b * weight over `count` contiguous elements; weight is a float64.

    src, dst: the types that are read and written; one may be wider. integers: the address of the `ConversionArguments`,
        if one is an integer type.
    """

    @emitted
    def mix(a, b, weight, to, count, integers) -> None:
        ends = read_and_written(src, dst, lanes, integers)
        taps = (a, weight.type(1.0) - weight), (b, weight)
        ends[0].each(count, lambda offset, mask: _sum(ends, BLENDED, taps, to, offset, mask))

    return mix


def sums_of_rows(src: ElementType, dst: ElementType, lanes: int):
    """Code for dst = the sum of `taps` times `count` contiguous elements, each at its offset and with its weight.

    src, dst, integers: as in `blend`.
    """

    @emitted
    def rows(base, entries, taps, to, count, integers) -> None:
        _each(read_and_written(src, dst, lanes, integers), ANY_NUMBER, (base, entries, taps), to, count)

    return rows


def _tap(base, at) -> tuple[Any, Any]:
    """The address and the weight that an entry of a table says."""
    weight = pointer(at + 8, ir.DoubleType())
    return base + build.load(pointer(at, I64)), weight.held


def _sum(ends: tuple[Vectors, Vectors], kind: int, taps: Any, to, offset, mask: Any | None, number: int = 1) -> None:
    """Store `number` neighbouring vectors of sums, or of copies.

    taps: the address and the weight of each; with `ANY_NUMBER`, the address from which offsets count, the table, and
        how many.
    """
    v, out = ends

    def values(tap) -> list[Any]:
        address, weight = tap
        read = [v.load(address + (offset + k * v.bytes), mask) for k in range(number)]
        return read if kind == COPIED else [x * v.splat_float64(weight) for x in read]

    if kind == ANY_NUMBER:
        (base, entries, count), slots = taps, v.slots(number, v.zero)
        with counted(count) as n:
            for slot, x in zipped(slots, values(_tap(base, entries + n * TAP))):
                slot.held += x
        made = v.loaded(slots)
    else:
        made, *others = map(values, taps)
        for other in others:
            made = [x + y for x, y in zipped(made, other)]
    for k, value in enumerate(made):
        out.store(value, to + _as_bytes_of(out, v, offset + k * v.bytes), mask)


def _each(ends: tuple[Vectors, Vectors], kind: int, taps: Any, to, count) -> None:
    """The sums of `count` contiguous elements."""
    v, _ = ends
    groups = count // (UNROLLED * v.lanes)
    with counted(groups) as n:
        _sum(ends, kind, taps, to, n * (UNROLLED * v.bytes), None, UNROLLED)
    done = groups * (UNROLLED * v.lanes)
    start = done * v.itemsize
    v.each(count - done, lambda offset, mask: _sum(ends, kind, taps, to, start + offset, mask))


class SummedRow(NamedTuple):
    """A row of results: its address, its pixels, bytes from one to the next, and elements of each.

    If vectors of it are sums, its elements are its pixels.
    """

    dst: Any
    ow: Any
    step: Any
    count: Any


def sums_of_columns(src: ElementType, dst: ElementType, form: ColumnForm):
    """Code that makes a `SummedRow` from a row of the source, each result of `count` taps.

    src, dst, integers: as in `blend`. The table has an offset and a weight for each tap of each pixel. If vectors of
    elements are sums, it has a head (`ColumnForm.head`) and the weights of all lanes for each tap of a vector; of two
    that are blended, both heads, then the weights of the second.
    """
    kind = form.taps

    def ends(lanes: int, integers) -> tuple[Vectors, Vectors]:
        if kind != COPIED:
            return read_and_written(src, dst, lanes, integers)
        v = Vectors(src, lanes)  # copies move bits
        return v, v

    @emitted
    def columns(line, entries, count, row: SummedRow, integers) -> None:
        if form.part:
            _by_vector(ends(form.lanes, integers), form, line, entries, count, row)
            return
        count, step = const(kind) if kind else count, const(form.inner * dst.itemsize) if form.inner else row.step
        with counted(row.ow) as n:
            at, to, start = entries + n * (count * TAP), row.dst + n * step, 0
            taps: Any = [_tap(line, at + k * TAP) for k in range(kind)] or (line, at, count)
            if kind == BLENDED:
                (first, _), (second, weight) = taps
                taps = (first, weight.type(1.0) - weight), (second, weight)
            while start < form.inner:  # the fewest vectors
                width = min(form.lanes, 1 << (form.inner - start).bit_length() - 1)
                _sum(ends(width, integers), kind, taps, to, const(start * src.itemsize), None)
                start += width
            if not form.inner:
                _each(ends(form.lanes, integers), kind, taps, to, row.count)

    return columns


def _by_vector(ends: tuple[Vectors, Vectors], form: ColumnForm, line, entries, count, row: SummedRow) -> None:
    """Columns whose vectors are sums, whatever pixels they are of."""
    (v, out), kind, lanes = ends, form.taps, form.lanes
    held = v.computed
    head = form.head(held.itemsize)

    def values(at):
        words = pointer(at, I64)
        parts = [line + build.load(build.gep(words, [const(k)])) for k in range(1 if form.near else lanes // form.part)]
        return held.permuted(v.load(parts[0]), at + 8) if form.near else v.gathered(parts)

    def vector(n, start) -> None:
        if kind == ANY_NUMBER:
            (slot,), size = v.slots(1, v.zero), head + held.bytes
            with counted(count) as k:
                at = entries + (n * count + k) * size
                slot.held += values(at) * held.load(at + head)
            made = slot.held
        else:
            at = entries + n * (kind * head + held.bytes * (kind == BLENDED))
            made, *second = [values(at + k * head) for k in range(kind)]
            if kind == BLENDED:
                weight = held.load(at + kind * head)
                made = made * (1.0 - weight) + second[0] * weight
        out.store(made, row.dst + start * out.itemsize)

    whole = row.ow // lanes
    with counted(whole) as n:
        vector(n, n * lanes)
    with build.if_then(whole * lanes < row.ow):
        vector(whole, row.ow - lanes)


def _as_bytes_of(to: Vectors, of: Vectors, offset):
    """An offset in bytes, in an array of other elements that has as many before it."""
    if to.itemsize < of.itemsize:
        return build.udiv(offset, const(of.itemsize // to.itemsize))
    return offset if to.itemsize == of.itemsize else offset * (to.itemsize // of.itemsize)
