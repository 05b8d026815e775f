"""Matrices that are packed as a tile reads them, and softmax over rows of scores, as vector code."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import const, emitted, transpose
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import Vectors


class Matrix(NamedTuple):
    """A matrix in memory, whose columns are contiguous, and where it goes.

    src, dst: addresses.
    rows, columns: how many exist.
    stride: from a row to the next, in bytes.
    dst_row: from a packed row to the next, in bytes; packed rows are the matrix's, or its columns where it is turned.
    dst_block: from a vector of such a row to the next, in bytes.
    blocks: vectors of a packed row. Elements that do not exist are zeros.
    """

    src: int
    dst: int
    rows: int
    columns: int
    stride: int
    dst_row: int
    dst_block: int
    blocks: int


def matrix_packer(element: ElementType, lanes: int, turned: bool) -> Any:
    """Code that packs a `Matrix`, or its transpose, in the type that is computed with."""
    return _turned(element, lanes) if turned else _straight(element, lanes)


def _straight(element: ElementType, lanes: int) -> Any:
    @emitted
    def pack(builder: Any, x: Matrix) -> None:
        v = Floats(builder, element, lanes)
        with cgutils.for_range(builder, x.rows) as row, cgutils.for_range(builder, x.blocks) as block:
            src, dst = (
                builder.add(at, builder.mul(row.index, by)) for at, by in ((x.src, x.stride), (x.dst, x.dst_row))
            )
            first = builder.mul(block.index, const(lanes))
            at, left = builder.add(src, builder.mul(first, const(v.itemsize))), builder.sub(x.columns, first)
            to = builder.add(dst, builder.mul(block.index, x.dst_block))
            with builder.if_else(builder.icmp_signed(">=", left, const(lanes)), likely=True) as (whole, part):
                with whole:
                    v.computed.store(v.load(at), to)
                with part:  # an address that is masked off is the row's own, as one behind the array takes long
                    at = builder.select(builder.icmp_signed(">", left, const(0)), at, src)
                    v.computed.store(v.load(at, v.below(left)), to)

    return pack


def _turned(element: ElementType, lanes: int) -> Any:
    @emitted
    def pack(builder: Any, x: Matrix) -> None:
        """Squares of as many rows and columns as a vector has lanes, transposed in registers."""
        v = Floats(builder, element, lanes)
        squares = builder.sdiv(builder.add(x.columns, const(lanes - 1)), const(lanes))

        def square(src: Any, dst: Any, rows: Any | None, columns: Any) -> None:
            """rows, columns: how many exist; rows is None where all of both do."""
            loaded = []
            for k in range(lanes):
                at = builder.add(src, builder.mul(const(k), x.stride))
                if rows is None:
                    loaded.append(v.load(at))
                    continue
                exists = builder.icmp_signed("<", const(k), rows)
                count = builder.select(exists, columns, const(0))
                loaded.append(v.load(builder.select(exists, at, x.src), v.below(count)))
            for k, value in enumerate(transpose(builder, loaded, lanes, lanes)):
                at = builder.add(dst, builder.mul(const(k), x.dst_row))
                if rows is None:
                    v.computed.store(value, at)
                else:
                    with builder.if_then(builder.icmp_signed("<", const(k), columns)):
                        v.computed.store(value, at)

        with cgutils.for_range(builder, x.blocks) as block, cgutils.for_range(builder, squares) as part:
            row, column = (builder.mul(loop.index, const(lanes)) for loop in (block, part))
            rows, columns = builder.sub(x.rows, row), builder.sub(x.columns, column)
            src = builder.add(builder.add(x.src, builder.mul(row, x.stride)), builder.mul(column, const(v.itemsize)))
            dst = builder.add(x.dst, builder.add(builder.mul(column, x.dst_row), builder.mul(block.index, x.dst_block)))
            is_whole = builder.and_(*(builder.icmp_signed(">=", size, const(lanes)) for size in (rows, columns)))
            with builder.if_else(is_whole, likely=True) as (whole, rest):
                with whole:
                    square(src, dst, None, columns)
                with rest:
                    square(src, dst, rows, columns)

    return pack


class Scores(NamedTuple):
    """Rows of scores: [vector][row][lane], of the type that is computed with. They become a row's softmax.

    address: of the first.
    rows: how many there are.
    block: from a vector to the next, in bytes.
    columns: of a row; the lanes after the last may hold anything.
    scale: a factor, float64.
    mask: the address of the values that are added to the first row.
    mask_row: from there to the next row's, in bytes.
    first: the number of the first row.
    """

    address: int
    rows: int
    block: int
    columns: int
    scale: float
    mask: int
    mask_row: int
    first: int


class _RowVectors(NamedTuple):
    """The vectors of a row of scores: the address of the first, whole ones, columns of a last one, and from one to the
    next, in bytes."""

    v: Vectors
    base: Any
    whole: Any
    rest: Any
    block: Any

    def at(self, number: Any) -> Any:
        return self.v.b.add(self.base, self.v.b.mul(number, self.block))

    def each(self, body: Callable[[Any, Any, Any | None], None]) -> None:
        """body(address, number, mask) for each vector; the mask is None where all columns exist."""
        with cgutils.for_range(self.v.b, self.whole) as loop:
            body(self.at(loop.index), loop.index, None)
        with self.v.b.if_then(self.v.b.icmp_signed(">", self.rest, const(0))):
            body(self.at(self.whole), self.whole, self.v.below(self.rest))


def softmax_of_scores(element: ElementType, lanes: int, masked: bool, causal: bool, zero_rows: bool) -> Any:
    """Code that makes softmax(scale * score + mask) of `Scores`. masked: there is a mask, of this type.

    causal, zero_rows: as in `AttentionProblem`.
    """

    @emitted
    def softmax(builder: Any, x: Scores) -> None:
        v, given = Vectors(builder, element.computed, lanes), Floats(builder, element, lanes)
        scale = v.splat_float64(x.scale)
        most, total = v.slots(1, v.zero) + v.slots(1, v.zero)
        with cgutils.for_range(builder, x.rows) as loop:
            added, limit = builder.add(x.mask, builder.mul(loop.index, x.mask_row)), x.columns
            if causal:
                seen = builder.add(builder.add(x.first, loop.index), const(1))
                limit = builder.select(builder.icmp_signed("<", seen, limit), seen, limit)
            whole = builder.sdiv(limit, const(lanes))
            base = builder.add(x.address, builder.mul(loop.index, const(v.bytes)))
            row = _RowVectors(v, base, whole, builder.sub(limit, builder.mul(whole, const(lanes))), x.block)

            def find_most(at: Any, number: Any, mask: Any | None) -> None:
                score = v.mul(v.load(at), scale)
                if masked:
                    offset = builder.mul(number, const(given.bytes))
                    score = v.add(score, given.load(builder.add(added, offset), mask))
                if mask is not None:
                    score = builder.select(mask, score, v.c(-math.inf))
                v.store(score, at)
                builder.store(v.larger(score, builder.load(most)), most)

            def find_total(at: Any, number: Any, mask: Any | None) -> None:
                power = v.exp_to_zero(v.sub(v.load(at), largest))
                if mask is not None:
                    power = builder.select(mask, power, v.zero)
                v.store(power, at)
                builder.store(v.add(builder.load(total), power), total)

            builder.store(v.c(-math.inf), most)
            builder.store(v.zero, total)
            row.each(find_most)
            largest = v.fold(builder.load(most), v.larger)
            if zero_rows:
                largest = v.or_zero(largest, -math.inf)
            row.each(find_total)
            sums = v.fold(builder.load(total), v.add)
            factor = builder.fdiv(v.c(1.0), sums)
            if zero_rows:
                factor = v.or_zero(factor, math.inf)
            row.each(lambda at, number, mask: v.store(v.mul(v.load(at), factor), at))
            if causal:  # the others are zero
                begin, end = (builder.sdiv(builder.add(n, const(lanes - 1)), const(lanes)) for n in (limit, x.columns))
                with cgutils.for_range(builder, builder.sub(end, begin)) as unseen:
                    v.store(v.zero, row.at(builder.add(begin, unseen.index)))

    return softmax
