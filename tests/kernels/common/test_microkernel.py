"""What a tile's kernel is compiled for: what its turns prefetch, and no number that it does not have."""

from __future__ import annotations

from blockconv.core import target
from blockconv.kernels.common.interleaved import DENSE
from blockconv.kernels.common.microkernel import TileSpec, lines_ahead
from blockconv.kernels.common.tile import LINE

LANES, STEP = target.isa().vector_bytes // 4, 16
TILE = TileSpec(4, int(target.isa().fma), 1, 4, 4, LANES, STEP, LANES, 0, *DENSE)


def test_a_turn_prefetches_one_line_where_that_is_enough_for_a_step_and_else_what_it_reads():
    turns = STEP // TILE.unrolled
    assert [TILE.prefetching(lines).burst for lines in (1, turns, turns + 1, 4 * STEP)] == [0, 0, 1, 1]
    block = STEP * TILE.vectors * LANES * 4  # bytes of a step's weights
    assert TILE.prefetching(lines_ahead(10 * block, block // LINE, 10)).burst == 0, "as many tiles as lines of a step"


def test_tiles_that_prefetch_their_own_weights_or_none_are_one_kernel_for_any_number_of_lines():
    for tile in (TILE._replace(pixels=1), TILE._replace(step=1)):
        assert tile.prefetching(1) == tile.prefetching(100) == tile
