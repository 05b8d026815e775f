"""The tiles that a machine's vector registers hold."""

from __future__ import annotations

from blockconv.core.target import Isa
from blockconv.kernels.common.dot import BY_ELEMENT, MULTIPLY_ADD, Dot
from blockconv.machine.machine import Machine

# (vectors of output channels, the most pixels) of a tile that is held in so many registers.
_TILES = {32: ((1, 28), (2, 14), (3, 9), (4, 6)), 16: ((1, 12), (2, 6), (3, 4))}
_TILES_WITHOUT_FMA = ((1, 12), (2, 6), (3, 3))  # of 16 registers; one holds each product before it is added

# By vpmaddubsw, for which a register holds ones. With AVX2's three operands, two accumulators more cost less than a
# narrower tile, though they are kept in memory. Three vectors read more weights from the second-level cache than hides.
_TILES_OF_BYTES = {"sse": ((1, 12), (2, 5)), "avx2": ((1, 12), (2, 7), (2, 6))}

# By Arm's dot products: LLVM loads several scalars ahead of what is assembly.
_TILES_BY_ELEMENT = ((1, 26), (2, 13), (3, 8), (4, 6))


def tiles_of_registers(isa: Isa, fused: bool) -> tuple[tuple[int, int], ...]:
    """(vectors, the most scalars that are broadcast against them) of the tiles that the vector registers hold.

    fused: whether one instruction multiplies and adds; else each product takes a register before it is added.
    """
    registers = isa.tile_registers
    return _TILES[registers] if fused or registers == 32 else _TILES_WITHOUT_FMA


def tiles_of(dot: Dot, isa: Isa) -> tuple[tuple[int, int], ...]:
    """`tiles_of_registers` for a multiply-accumulate."""
    if dot.number in BY_ELEMENT:
        return _TILES_BY_ELEMENT
    if dot.instructions == 3 and isa.name in _TILES_OF_BYTES:
        return _TILES_OF_BYTES[isa.name]
    return tiles_of_registers(isa, isa.fma if dot.number == MULTIPLY_ADD.number else dot.instructions == 1)


def are_far(machine: Machine, steps: int, vectors: int) -> bool:
    """Whether a tile's weights do not stay in the first-level cache for the next one, beside the source.

    vectors: that each step of the reduction reads.
    """
    return steps * vectors * machine.isa.vector_bytes > machine.profile.caches["L1"] // 2
