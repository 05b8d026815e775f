"""Panels of planes: whether each tile's pixels are packed channel by channel, and what that takes and saves."""

from __future__ import annotations

from blockconv.core.target import Isa
from blockconv.kernels.common.geometry import Geometry

CHANNELS_OF_PLANES = 16  # of a step, where a tile's pixels of planes are packed
PANEL_ROW_CYCLES = 6.0  # to pack a row of a panel of planes, beside a cycle for each of its vectors
STEP = 1.4  # of a step's address, in multiply-adds


def plane_read_cycles(isa: Isa, src: Geometry) -> float:
    """Cycles of a step that reads pixels of a plane where it is, beside those of any step; as measured.

    Vectors of AVX-512 belong to tiles of more pixels, whose arithmetic hides it.
    """
    if src.length != 1 or isa.vector_bytes == 64:
        return 0.0
    return 1.2 if src.block % 16 else 0.3


def pays_to_pack_planes(isa: Isa, src: Geometry, ocbs: int) -> bool:
    """Whether a tile's pixels are packed channel by channel, though they could be read where they are.

    Each channel is then next to the one before it, and not in another page, for every block of output channels.
    """
    waits = plane_read_cycles(isa, src)
    return waits > 0 and ocbs * (waits + STEP / 2) > PANEL_ROW_CYCLES + 2


def blocks_of_packing(products: int) -> float:
    """Blocks of output channels whose multiply-adds take as long as packing; a step of a tile has so many vectors'."""
    return (PANEL_ROW_CYCLES + 1) / (products / 2)
