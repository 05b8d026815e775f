"""What a tile's kernel is compiled for: a number of pixels, and not how they are rows."""

from __future__ import annotations

import pytest

from blockconv.core import target
from blockconv.kernels.common.microkernel import TileSpec, addressed_together
from blockconv.kernels.common.tile import Tile

LANES = target.isa().vector_bytes // 4


def spec(rows: int, pixels: int, store_width: int = LANES) -> TileSpec:
    return TileSpec(Tile(4, int(target.isa().fma), rows, pixels, 2, LANES), store_width, loops=1)


@pytest.mark.parametrize(("rows", "pixels"), [(1, 6), (2, 3), (3, 2), (6, 1), (2, 2), (4, 1), (2, 6), (4, 3), (12, 1)])
def test_tiles_of_as_many_pixels_are_one_kernel(rows: int, pixels: int) -> None:
    """But tiles that store planes, whose pixels have to be neighbours."""
    assert spec(rows, pixels).of_pixels() == spec(1, rows * pixels)
    assert spec(rows, pixels, 1).of_pixels() == spec(rows, pixels, 1)


def test_tiles_whose_pixels_are_at_other_distances_in_each_group_have_kernels_of_their_own():
    """Pixels are addressed from one of each group, so a row may not end inside one."""
    uneven = spec(2, addressed_together(28) + 1)
    assert uneven.of_pixels() == uneven
