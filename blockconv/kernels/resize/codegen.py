"""Blends of contiguous elements, and of the columns of a row, as vector code."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core.types import ElementType
from blockconv.jit.ir import I64, const, counted, emitted, pointer
from blockconv.kernels.common.conversion import read_and_written
from blockconv.kernels.common.vectors import Vectors


def blend(src: ElementType, dst: ElementType, lanes: int):
    """Code for dst = a * (1 - weight) + b * weight over `count` contiguous elements; weight is a float64.

    src, dst: the types that are read and written; one may be wider. integers: the address of the `ConversionArguments`,
        if one is an integer type.
    """

    @emitted
    def mix(builder, a, b, weight, to, count, integers) -> None:
        v, out = read_and_written(builder, src, dst, lanes, integers)
        one = weight.type(1.0) - weight
        first, second = (v.splat_float64(x) for x in (one, weight))

        def vector(offset, mask: Any | None) -> None:
            x = v.load(a + offset, mask) * first
            y = v.load(b + offset, mask) * second
            out.store(x + y, to + _as_bytes_of(out, v, offset), mask)

        v.each(count, vector)

    return mix


UNROLLED = 4  # vectors of sums that share one read of a tap's offset and weight
WEIGHT = 16  # bytes: an offset and a weight


def sums_of_rows(src: ElementType, dst: ElementType, lanes: int):
    """Code for dst = the sum of `taps` times `count` contiguous elements, each at its offset and with its `Weight`.

    src, dst, integers: as in `blend`.
    """

    @emitted
    def rows(builder, base, weights, taps, dst_, count, integers) -> None:
        _sums(builder, *read_and_written(builder, src, dst, lanes, integers), taps)(base, weights, dst_, count)

    return rows


def _sums(builder, v, out, taps) -> Callable[[Any, Any, Any, Any], None]:
    """sums(base, weights, to, count): the code of `sums_of_rows`."""

    def sums(base, weights, to, count) -> None:
        def vectors(offset, mask: Any | None, number: int = 1) -> None:
            made = v.slots(number, v.zero)
            with counted(builder, taps) as n:
                at = weights + n * WEIGHT
                first = base + (builder.load(pointer(builder, at, I64)) + offset)
                weight = builder.load(pointer(builder, at + 8, ir.DoubleType()))
                factor = v.splat_float64(weight)
                for k, slot in enumerate(made):
                    x = v.load(first + k * v.bytes, mask) * factor
                    builder.store(builder.load(slot) + x, slot)
            for k, slot in enumerate(made):
                at = offset + k * v.bytes
                out.store(builder.load(slot), to + _as_bytes_of(out, v, at), mask)

        groups = builder.sdiv(count, const(UNROLLED * v.lanes))
        with counted(builder, groups) as n:
            vectors(n * (UNROLLED * v.bytes), None, UNROLLED)
        done = groups * (UNROLLED * v.lanes)
        start = done * v.itemsize
        v.each(count - done, lambda offset, mask: vectors(start + offset, mask))

    return sums


class SummedRow(NamedTuple):
    """A row of results: its address, its pixels, bytes from one to the next, and elements of each.

    If vectors of it are sums, its elements are its pixels.
    """

    dst: Any
    ow: Any
    step: Any
    count: Any


def sums_of_columns(src: ElementType, dst: ElementType, lanes: int, part: int, near: int):
    """Code that makes a `SummedRow` from a row of the source.

    src, dst, integers: as in `blend`.
    part: 0 if each pixel is a sum, as in `sums_of_rows`. Otherwise vectors of the row's elements are sums, and the
    last one overlaps the one before. An entry for each tap of a vector has the offsets of its parts, of `part`
    elements each, and the weights of its lanes. near: it has the offset of one vector, and indices of its lanes.
    """
    head = 8 + lanes * src.itemsize if near else 8 * (lanes // part) if part else 0
    size = head + lanes * src.itemsize

    @emitted
    def columns(builder, line, entries, taps, row: SummedRow, integers) -> None:
        ow = row.ow
        v, out = read_and_written(builder, src, dst, lanes, integers)
        if not part:
            pixel, nbytes = _sums(builder, v, out, taps), taps * WEIGHT
            with counted(builder, ow) as n:
                at = entries + n * nbytes
                pixel(line, at, row.dst + n * row.step, row.count)
            return
        nbytes, last = taps * size, ow - lanes
        vectors = builder.sdiv(ow + (lanes - 1), const(lanes))
        with counted(builder, vectors) as n:
            (made,) = v.slots(1, v.zero)
            first = entries + n * nbytes
            with counted(builder, taps) as tap:
                at = first + tap * size
                words = pointer(builder, at, I64)
                offsets = [builder.load(builder.gep(words, [const(k)])) for k in range(1 if near else lanes // part)]
                if near:
                    x = v.permuted(v.load(line + offsets[0]), at + 8)
                else:
                    x = v.gathered([line + offset for offset in offsets])
                x = x * v.load(at + head)
                builder.store(builder.load(made) + x, made)
            start = n * lanes
            start = builder.select(start < last, start, last)
            out.store(builder.load(made), row.dst + start * out.itemsize)

    return columns


def _as_bytes_of(to: Vectors, of: Vectors, offset):
    """An offset in bytes, in an array of other elements that has as many before it."""
    if to.itemsize < of.itemsize:
        return of.b.udiv(offset, const(of.itemsize // to.itemsize))
    return offset if to.itemsize == of.itemsize else offset * (to.itemsize // of.itemsize)


def pixels_of_a_vector(lanes: int, inner: int) -> int:
    """Pixels of `inner` elements that make up a vector; 1 where they do not."""
    return lanes // inner if lanes % inner == 0 else 1


def near_bytes(vector: int) -> int:
    """Bytes of a `near` entry: the offsets of two vectors of the source, and which of their lanes are the result."""
    return 16 + 2 * vector


def make_columns(element: ElementType, dst_element: ElementType, lanes: int, inner: int, linear: int, near: int):
    """Code that makes the `count` pixels of a row of results from a row of the source, as its `Tap`s say.

    element, dst_element: the types that are read and written; one may be wider where the code blends.
    inner: elements of a pixel. linear: blends, else copies. integers: as in `blend`.
    near: in each vector of several pixels, the first pixels of all pairs come from one vector of the source, the second
        ones from another. Their entries (`near_bytes`) follow the taps. Where several pixels are a vector, the weights
        of all elements of the row come last.
    """
    pixels = pixels_of_a_vector(lanes, inner)

    @emitted
    def columns(builder, src, taps, dst, count, integers) -> None:
        ends = functools.partial(_ends, builder, element, dst_element, linear, integers)
        v, out = ends(lanes)
        done = const(0)

        def addresses(at) -> list[Any]:
            """The pixels whose offsets are the first words at an address: one, or two that are blended."""
            words = pointer(builder, at, I64)
            return [src + builder.load(builder.gep(words, [const(k)])) for k in range(1 + linear)]

        def sources(column) -> tuple[list[Any], Any]:
            """The addresses of the pixels that one is made of, and of their `Tap`."""
            at = taps + column * TAP
            return addresses(at), at

        if pixels > 1:
            groups = builder.sdiv(count, const(pixels))
            done = groups * pixels
            computed = Vectors(builder, v.type, lanes)
            nears, size = taps + count * TAP, near * near_bytes(computed.bytes)
            weights = nears + groups * size
            with counted(builder, groups) as n:
                if near:
                    at = nears + n * size
                    indices = [at + (16 + k * computed.bytes) for k in range(1 + linear)]
                    values = [computed.permuted(v.load(x), k) for x, k in zip(addresses(at), indices, strict=True)]
                else:
                    first = n * pixels
                    each = [sources(first + k)[0] for k in range(pixels)]
                    values = [v.gathered(side) for side in zip(*each, strict=True)]
                if linear:
                    weight = computed.load(weights + n * computed.bytes)
                    values = [values[0] * (1.0 - weight), values[1] * weight]
                    values = [v.add(*values)]
                out.store(values[0], dst + n * out.bytes)
        with counted(builder, count - done) as n:
            column = done + n
            given, tap = sources(column)
            factors = _weights(v, tap) if linear else []
            to = dst + column * (inner * out.itemsize)
            start = 0
            while start < inner:  # the fewest vectors
                width = min(lanes, 1 << (inner - start).bit_length() - 1)
                _column(*ends(width), given, factors, to)(const(start * v.itemsize), None)
                start += width

    return columns


def _ends(builder, src: ElementType, dst: ElementType, linear: int, integers, lanes: int) -> tuple[Vectors, Vectors]:
    """Code over the elements that are read, and over the written ones. Copies move bits."""
    if linear:
        return read_and_written(builder, src, dst, lanes, integers)
    v = Vectors(builder, src, lanes)
    return v, v


TAP = 24  # bytes: two offsets and a weight


def _weights(v: Vectors, tap) -> list[Any]:
    """The weights of the first and of the second pixel, scalars."""
    second = v.b.load(pointer(v.b, tap + 16, ir.DoubleType()))
    both = second.type(1.0) - second, second
    return [x if v.itemsize == 8 else v.b.fptrunc(x, v.element) for x in both]


def _column(v: Vectors, out: Vectors, sources: list[Any], weights: list[Any], to) -> Callable[[Any, Any], None]:
    """body(offset, mask) for a vector of a pixel."""
    factors = [v.splat(x) for x in weights]

    def vector(offset, mask) -> None:
        values = [v.load(source + offset, mask) for source in sources]
        if factors:
            x, y = (value * factor for value, factor in zip(values, factors, strict=True))
            values = [x + y]
        out.store(values[0], to + _as_bytes_of(out, v, offset), mask)

    return vector
