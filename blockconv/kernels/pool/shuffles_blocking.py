"""The blocking of `pool_shuffles`: which pools it is for, the tile, the parts of a row."""

from __future__ import annotations

import math

from blockconv.jit.records import fill
from blockconv.kernels.common.request import Reason
from blockconv.kernels.pool.blocking import MASK_VECTORS, PoolBlocking
from blockconv.kernels.pool.shuffles import ShuffledTile, ShufflesArgs

MOST_STRIDE, MOST_TAPS = 4, 5  # of windows whose columns are picked
MOST_UNROLLED = 3  # rows of a window
MOST_COLUMNS = 16  # vectors of a tile's columns
MOST_BYTES = 20 * 1024  # of rows of the image that are read again for the next row of outputs
SPARE = 8  # vector registers for anything but the columns of a tile


def why_not_shuffled(b: PoolBlocking) -> Reason | None:
    """None for a pool that is cut into such tiles, else why it is not, in a sentence."""
    p, isa, inner = b.problem, b.machine.isa, b.view.inner
    if b.is_adaptive:
        return "needs windows of equal size"
    if not b.has_contiguous_pixels:
        return f"the pixels of a row are not contiguous in {b.src}"
    if inner % b.lanes == 0:
        return f"a pixel of {b.src} has {inner} elements here, which fill whole vectors without shuffles"
    if isa.vector_bytes < 32:
        return f"needs masked loads and vectors of at least 256 bits, unlike {isa.name}"
    if inner == 1 and p.sw == 1:
        return "contiguous pixels at stride 1 fill vectors without shuffles"
    if p.sw > MOST_STRIDE or p.kw > MOST_TAPS or p.iw * inner >= 1 << 31:
        return f"needs strides up to {MOST_STRIDE}, windows of up to {MOST_TAPS} columns, and rows below 2^31 elements"
    return None if _tiles(b) else f"the vector registers do not hold {p.kw} columns of a window"


def shuffled_tile(b: PoolBlocking) -> ShuffledTile:
    """The tile of a pool that needs the fewest instructions."""
    p, row = b.problem, -(-b.problem.ow * b.view.inner // b.lanes)

    def instructions(tile: ShuffledTile) -> int:
        return -(-row // tile.vectors) * (tile.columns(b.lanes) * p.kh + tile.vectors * p.kw + 2)

    return min(_tiles(b), key=instructions)


def _tiles(b: PoolBlocking) -> list[ShuffledTile]:
    """Tiles of whole pixels, or of a whole row of outputs, whose columns fit the registers."""
    lanes, outputs = b.lanes, b.problem.ow * b.view.inner
    period, most = math.lcm(b.view.inner, lanes) // lanes, min(b.machine.isa.registers - SPARE, MOST_COLUMNS)
    choices = {-(-outputs // lanes), *range(period, min(MASK_VECTORS, outputs // lanes) + 1, period)}
    tiles = [_tile(b, vectors) for vectors in sorted(choices) if vectors <= MASK_VECTORS]
    return [tile for tile in tiles if tile.columns(lanes) <= most]


def _tile(b: PoolBlocking, vectors: int) -> ShuffledTile:
    p, lanes, inner = b.problem, b.lanes, b.view.inner
    kh, width = p.kh if p.kh <= MOST_UNROLLED else 0, vectors * lanes
    shift = -p.pw * inner % lanes
    tile = ShuffledTile(vectors, inner, kh, p.kw, p.sw, p.dw, shift, int(width > p.ow * inner))
    columns, before = tile.columns(lanes), p.pw * inner + shift
    last = max(0, p.ow * inner - width) * p.sw - before  # the first element of the last tile
    beyond = last + columns * lanes - p.iw * inner
    return tile._replace(left=min(columns, before // lanes), right=min(columns, max(0, -(-beyond // lanes))))


def shuffles_args(b: PoolBlocking) -> ShufflesArgs:
    """Parts of a row are so short that the rows of their windows stay in the first-level cache for the next row."""
    p, width = b.problem, shuffled_tile(b).vectors * b.lanes
    outputs, wanted = p.ow * b.view.inner, -(-p.kh * b.row_bytes // MOST_BYTES)
    part = -(-outputs // (width * wanted)) * width
    return fill(ShufflesArgs, b.args, part=part, parts=-(-outputs // part))
