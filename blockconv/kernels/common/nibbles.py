"""Two integers of 4 bits in a byte, the first in its lower bits: how vectors of these become one a byte, and how
they are made.

Layouts have them where channels that share a byte are neighbours in one block, so that a byte belongs to one pixel.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from blockconv.core.layout import Layout
from blockconv.jit.ir import I8

PAIRED = 4  # the least number of contiguous 4-bit channels: as many as a multiply-accumulate takes at once


def why_not_packed(layout: Layout, channels: int, groups: int) -> str | None:
    """Why a kernel cannot read or write packed integers in a layout, as groups of so many channels; None if it can."""
    if layout.blocks[1] % PAIRED:
        return f"packed 4-bit integers need channel blocks of a multiple of {PAIRED}, unlike {layout}"
    if groups > 1 and channels % PAIRED:
        return f"packed 4-bit integers need a multiple of {PAIRED} channels in each group, not {channels}"
    return None


def unpacked_pairs(builder: Any, pairs: Any) -> Any:
    """The integers of a vector of bytes, twice as many, one a byte; without a sign."""
    wide = ir.VectorType(ir.IntType(16), pairs.type.count)
    both = builder.zext(pairs, wide)
    both = builder.or_(both, builder.shl(both, _each(wide, 4)))
    both = builder.and_(both, _each(wide, 0x0F0F))
    return builder.bitcast(both, ir.VectorType(I8, 2 * pairs.type.count))


def packed_pairs(builder: Any, values: Any) -> Any:
    """Bytes of the lowest bits of an even number of lanes, the first of a pair in its lower bits."""
    bits = values.type.element.width
    wide = ir.VectorType(ir.IntType(2 * bits), values.type.count // 2)
    both = builder.bitcast(values, wide)
    low = builder.and_(both, _each(wide, 0x0F))
    # With all but those bits of the other: processors choose bits in one instruction, and the bytes are the lowest.
    high = builder.and_(builder.lshr(both, _each(wide, bits - 4)), _each(wide, -0x10))
    return builder.trunc(builder.or_(low, high), ir.VectorType(I8, wide.count))


def _each(kind: ir.VectorType, value: int) -> ir.Constant:
    """A constant in every lane."""
    return ir.Constant(kind, [value] * kind.count)
