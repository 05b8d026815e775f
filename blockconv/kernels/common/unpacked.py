"""Bytes unpacked to lanes of 32 bits, in the order that costs least, and packed again.

An x86 processor unpacks within each 16 bytes of a vector, so that four vectors made of one of bytes do not hold its
elements in order: of each 16 bytes, the first vector has the first four, the second the next four, and so on. Packing
puts them back. Code in between works lane by lane, so the order matters only for other operands, which are kept in this
order too.

Two integers of 4 bits in a byte, the first in its lower bits, become one a byte, and are made of these. Layouts have
them where channels that share a byte are neighbours in one block, so that a byte belongs to one pixel.
"""

import functools
from collections.abc import Sequence
from typing import Any

from llvmlite import ir

from blockconv.core.layout import Layout
from blockconv.core.python import zipped
from blockconv.core.target import Isa
from blockconv.jit.ir import I32, call_llvm, join, shuffle, vector
from blockconv.jit.values import build

PARTS = 4  # vectors of 32 bits that a vector of bytes becomes
UNIT = 16  # bytes within which is unpacked, and shuffled


def permutes_bytes(isa: Isa) -> bool:
    """Whether one instruction permutes the bytes of a vector, wherever these are."""
    return isa.vbmi


@functools.cache
def unpacked_order(lanes: int) -> tuple[int, ...]:
    """Which of `lanes` bytes each lane of the four vectors holds, one vector after the other."""
    units, each = lanes // UNIT, UNIT // PARTS
    return tuple(UNIT * k + each * j + i for j in range(PARTS) for k in range(units) for i in range(each))


def interleaved(rows: Sequence[Any], itemsize: int) -> list[Any]:
    """The four vectors of 32-bit lanes whose elements are one of each row's: all of four rows of bytes, or of two.

    rows: vectors of bytes. itemsize: of what a lane holds; 2, bytes of two rows that are widened without a sign.
    """
    zero = rows[0].type(None)
    pairs = [unpacked(rows[0], rows[1], 1)]
    pairs.append(unpacked(rows[2], rows[3], 1) if itemsize == 1 else [zero, zero])
    found = []
    for half, other in zipped(*pairs):
        found += unpacked(half, other, 3 - itemsize)
    wide = vector(4, rows[0].type.count // PARTS)
    return [build.bitcast(part, wide) for part in found]


def unpacked(a, b, itemsize: int) -> list[Any]:
    """The low and the high elements of each 16 bytes of `a`, each followed by its neighbour of `b`."""
    lanes, each = a.type.count // itemsize, UNIT // itemsize
    kind = vector(itemsize, lanes)
    a, b, found = build.bitcast(a, kind), build.bitcast(b, kind), []
    for first in (0, each // 2):
        taken = [unit + first + i for unit in range(0, lanes, each) for i in range(each // 2)]
        both = [at for k in taken for at in (k, lanes + k)]
        found.append(build.bitcast(shuffle(a, b, both), vector(1, lanes * itemsize)))
    return found


def in_order(parts: Sequence[Any]):
    """One vector of the elements of all parts, in order."""
    wide = join(list(parts))
    order = unpacked_order(wide.type.count)
    return shuffle(wide, wide, [order.index(k) for k in range(len(order))])


def split(value) -> list[Any]:
    """The four parts of a vector whose elements are in order."""
    order = unpacked_order(value.type.count)
    each = len(order) // PARTS
    return [shuffle(value, value, list(order[k : k + each])) for k in range(0, len(order), each)]


_SHUFFLES = {16: "llvm.x86.ssse3.pshuf.b.128", 32: "llvm.x86.avx2.pshuf.b", 64: "llvm.x86.avx512.pshuf.b.512"}


def shuffled_bytes(value, indices):
    """In each 16 bytes, the bytes of `value` that the last four bits of indices name; 0 where an index is negative."""
    return call_llvm(_SHUFFLES[value.type.count], value.type, [value, indices])


_NARROW = {
    4: ("llvm.x86.sse2.packssdw.128", "llvm.x86.sse2.packuswb.128"),
    8: ("llvm.x86.avx2.packssdw", "llvm.x86.avx2.packuswb"),
    16: ("llvm.x86.avx512.packssdw.512", "llvm.x86.avx512.packuswb.512"),
}
UNPACKED_LANES = frozenset(_NARROW)  # of vectors of 32 bits that can be packed


def nearest(x):
    """float32 rounded to 32-bit integers, half to even. Values out of range, and NaN, become the least integer."""
    kind = vector(4, x.type.count)
    if x.type.count == 16:
        rest = [kind(None), ir.IntType(16)(-1), I32(4)]  # as MXCSR says
        return call_llvm("llvm.x86.avx512.mask.cvtps2dq.512", kind, [x, *rest])
    return call_llvm({4: "llvm.x86.sse2.cvtps2dq", 8: "llvm.x86.avx.cvt.ps2dq.256"}[x.type.count], kind, [x])


def packed(parts: Sequence[Any], offset):
    """The integers of four parts plus `offset` (i16), as bytes in order; sums are clamped to 0 and 255."""
    each = parts[0].type.count
    words, bytes_ = vector(2, 2 * each), vector(1, 4 * each)
    to_words, to_bytes = _NARROW[each]
    one = build.insert_element(words(ir.Undefined), offset, I32(0))
    splat = shuffle(one, one, [0] * words.count)
    halves = []
    for low, high in zipped(parts[::2], parts[1::2]):
        half = call_llvm(to_words, words, [low, high])
        halves.append(call_llvm(f"llvm.sadd.sat.v{words.count}i16", words, [half, splat]))
    return call_llvm(to_bytes, bytes_, halves)


PAIRED = 4  # the least number of contiguous 4-bit channels: as many as a multiply-accumulate takes at once


def why_not_packed(layout: Layout, channels: int, groups: int) -> str | None:
    """Why a kernel cannot read or write packed integers in a layout, as groups of so many channels; None if it can."""
    if layout.blocks[1] % PAIRED:
        return f"packed 4-bit integers need channel blocks of a multiple of {PAIRED}, unlike {layout}"
    if groups > 1 and channels % PAIRED:
        return f"packed 4-bit integers need a multiple of {PAIRED} channels in each group, not {channels}"
    return None


def unpacked_pairs(pairs):
    """The integers of a vector of bytes, twice as many, one a byte; without a sign."""
    wide = vector(2, pairs.type.count)
    both = build.zext(pairs, wide)
    both = both | both << 4
    both = both & 0x0F0F
    return build.bitcast(both, vector(1, 2 * pairs.type.count))


def packed_pairs(values):
    """Bytes of the lowest bits of an even number of lanes, the first of a pair in its lower bits."""
    bits = values.type.element.width
    wide = ir.VectorType(ir.IntType(2 * bits), values.type.count // 2)
    both = build.bitcast(values, wide)
    low = both & 0x0F
    # With all but those bits of the other: processors choose bits in one instruction, and the bytes are the lowest.
    high = build.lshr(both, wide(bits - 4)) & -0x10
    return build.trunc(low | high, vector(1, wide.count))
