"""Matrices that are packed as a tile reads them, and softmax over rows of scores, as vector code."""

from __future__ import annotations

from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv.core.types import ElementType
from blockconv.jit.ir import const, emitted, transpose
from blockconv.kernels.common.floats import Floats

__all__ = ["Matrix", "matrix_packer"]


class Matrix(NamedTuple):
    """A matrix in memory, whose columns are contiguous, and where it goes.

    src, dst: addresses.
    rows, columns: how many exist.
    stride: from a row to the next, in bytes.
    dst_row: from a packed row to the next, in bytes; packed rows are the matrix's, or its columns where it is turned.
    dst_block: from a vector of such a row to the next, in bytes.
    blocks: vectors of a row. Those that are more than exist are zeros.
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
            """rows, columns: those that exist; rows is None where all of both do."""
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
