"""The blocking of convolution on a unit that multiplies matrices: the channels of a step, the tile.

In a packed window, up to 64 bytes of a pixel's channels are contiguous for each step, whatever blocks the source has.
The fewest possible steps share the channels evenly. Few channels leave most of a step empty, which a row of taps fills
then: the pixels of a window's row touch, and so do their channels.
"""

from collections.abc import Iterator
from dataclasses import replace

from blockconv.core.problem import Conv2dProblem
from blockconv.core.python import bounded_cache
from blockconv.jit.records import fill
from blockconv.kernels.common.dot import Dot, matrix_dot_for, name_of, packed_as_one
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry
from blockconv.kernels.common.interleaved import DENSE
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.taps import kept_taps
from blockconv.kernels.conv.blocking import (
    ConvBlocking,
    ConvTile,
    TileShape,
    divided,
    fills_units,
    is_read_in_place,
    store_width,
    straddles_blocks,
)
from blockconv.kernels.conv.matrix_tile import COLUMNS, LINE_BYTES, LINES, WORD, row_blocks
from blockconv.kernels.conv.packing import spare_bytes
from blockconv.kernels.conv.space import Space, space

UNITS = LINE_BYTES // WORD  # units of four bytes that a step takes at the most
# (vectors of output channels, blocks of pixels) whose accumulators, sources and weights fit into eight registers.
SHAPES = (2, 2), (1, 4), (1, 3), (1, 2), (2, 1), (1, 1)


def _channels(problem: Conv2dProblem, src: Geometry, unit: int) -> int:
    """Channels of a pixel that are packed together; a source's blocks are whole in them, or they in these.

    Units that are not contiguous are a power of two in number: they are transposed in registers.
    """
    units = -(-problem.group_ic // unit)
    length = NO_BLOCK if src.length == NO_BLOCK else max(1, src.length // unit)
    even = -(-units // -(-units // UNITS))
    if length == NO_BLOCK and fills_units(problem, src, unit):
        return unit * even
    if length in (1, NO_BLOCK):
        return unit << (even - 1).bit_length()
    if length > UNITS:
        return unit * max(k for k in range(1, UNITS + 1) if length % k == 0)
    return unit * min(UNITS // length, -(-even // length)) * length


def extent(cb: int, src: Geometry) -> int:
    """Channels that are contiguous in the source, of the `cb` that are packed together."""
    return cb if src.length == NO_BLOCK else min(cb, src.length)


def why_not(request: Request) -> Reason | None:
    """Why no matrices can be made of a problem's windows."""
    p, src, types, strides = request.problem, request.src, request.types, request.source
    unit = packed_as_one(types, matrix_dot_for(types))
    interleaved, cb = not fills_units(p, strides, unit), _channels(p, strides, unit)
    if strides.length not in (1, NO_BLOCK):
        if interleaved:
            return f"needs channel blocks of a multiple of {unit}, which fill 32 bits, unlike {src}"
        if p.g > 1 and p.group_ic % min(strides.length, cb):
            return "needs groups that begin and end at the source's block boundaries"
    if types.src.is_packed and (interleaved or extent(cb, strides) < cb):
        return f"needs channel blocks of at least {cb} for 4-bit integers, unlike {src}"
    return None


@bounded_cache
def blocking(request: Request, tile: TileShape | None = None) -> ConvBlocking:
    """The blocking of a problem. Tile and block sizes do not depend on the threads.

    tile: the requested shape, instead of the one of least predicted time.
    """
    p, types, m, s, d = request.problem, request.types, request.machine, request.source, request.destination
    at, dot = space(request), matrix_dot_for(types)
    unit = packed_as_one(types, dot)
    interleaved = not fills_units(p, s, unit)
    cb = _channels(p, s, unit)
    taps = at.kw if at.depth == at.dw == 1 and at.kw * cb <= UNITS * unit and p.group_ic <= cb else 1
    stored = store_width(d, at, types.dst.itemsize, COLUMNS, groups_of=p.group_oc if p.g > 1 else 0)
    as_it_is = not (interleaved or types.src.is_packed) and extent(cb, s) == cb and p.group_ic % cb == 0
    shape = tile or _tile(request, at, d, stored, cb, taps, dot)
    # Whole lines that are read once do not push each other out before they are.
    held = 1 if cb == UNITS * unit else shape.pixels
    in_place = as_it_is and is_read_in_place(m, p, at, s, held)
    if not (tile or in_place or request.anchor):
        # Columns of a packed window between the rows of its outputs, if pixels and rows are evenly apart.
        gap = (at.kw - 1) * at.dw if at.sh == at.sw == at.depth == 1 else 0
        shape = _tile(request, at, d, stored, cb, taps, dot, gap)
    inner = fill(
        ConvTile,
        shape,
        lanes=COLUMNS,
        cb=cb,
        step=cb,
        store_width=stored,
        in_place=in_place,
        dot=dot,
        interleaved=interleaved,
        shared=DENSE._replace(taps=taps),
    )
    found = divided(request, inner)
    units, at_once = cb // unit, 0 if interleaved else extent(cb, s)
    spare = 0 if found.in_place else spare_bytes(request.machine.isa, units, found.window_cols, at_once)
    return replace(found, scratch=found.scratch + -(-spare // LINE_BYTES) * LINE_BYTES)


def _tile(
    request: Request, at: Space, dst: Geometry, stored: int, cb: int, taps: int, dot: Dot, gap: int = 0
) -> TileShape:
    """The tile of least predicted time, by the machine's profile. gap: where rows may be one, as in `TileShape`."""
    problem, found = request.problem, []
    oc = problem.group_oc
    for vectors, blocks in SHAPES:
        width = vectors * COLUMNS
        if straddles_blocks(problem, dst, stored, COLUMNS, width):
            continue
        for shape in _shapes(at, blocks, vectors, gap, shared=request.anchor is not None):
            tiles = -(-at.oh // shape.rows) * -(-at.ow // shape.pixels) * -(-oc // width)
            seconds = tiles * shape_seconds(request, shape, cb, taps, dot)
            found.append((float(f"{seconds:.6e}"), shape.gap, abs(vectors - 2), -shape.rows * shape.pixels, shape))
    return min(found)[-1]


def _shapes(at: Space, blocks: int, vectors: int, gap: int, shared: bool) -> Iterator[TileShape]:
    """Tiles of at most so many blocks of pixels: rows of one or several, and, with a gap, rows that are one.

    shared: of whole blocks, as sizes share them (`Request.anchor`).
    """
    whole = [k * LINES for k in range(1, blocks + 1) if k * LINES <= at.ow] if shared else []
    for pixels in whole or _pixels(at.ow, blocks):
        for rows in {max(1, min(at.oh, blocks // len(row_blocks(1, pixels)))), 1}:
            yield TileShape(rows, pixels, vectors)
    rows = min(at.oh, (LINES * blocks + gap) // (at.ow + gap))
    if gap and rows > 1:
        yield TileShape(rows, at.ow, vectors, gap)


def _pixels(ow: int, blocks: int) -> list[int]:
    """Pixels of a row that make tiles of about the same size, of at most so many blocks, which are equally long."""
    least, found = -(-ow // (LINES * blocks)), set()
    for count in range(least, -(-ow // LINES) + 3):
        pixels = -(-ow // count)
        of_row = -(-pixels // LINES)
        found.add(-(-pixels // of_row) * of_row)
    return sorted(pixels for pixels in found if pixels <= ow)


def tile_seconds(request: Request, blocking: ConvBlocking) -> float:
    """Predicted, of a tile whose channels are stored whole."""
    return shape_seconds(request, blocking.shape, blocking.cb, blocking.shared.taps, blocking.dot)


def shape_seconds(request: Request, shape: TileShape, cb: int, taps: int, dot: Dot) -> float:
    """A block of few pixels, or of few channels, takes as long as one of sixteen, and of 64 bytes.

    A step waits for its weights from the second-level cache. Weights that do not stay there have to reach it first. The
    tile before is stored while matrices are multiplied. The longer time counts.
    """
    p, m, name = request.problem, request.machine, name_of(dot)
    blocks = len(row_blocks(shape.rows, shape.pixels, shape.gap))
    rates, alone = m.profile.by(name), m.profile.by(f"{name}, one step")
    elements, vectors = -(-p.group_ic // cb), shape.rows * shape.pixels * shape.vectors
    at = space(request)
    steps = elements * kept_taps(at, request.types.has_finite_weights, shape.rows, shape.pixels, taps).average / taps
    weights = p.oc * elements * p.kh * (p.kw // taps) * LINE_BYTES
    ways = 1 if weights <= m.second_level_cache else 2
    step = max(rates.step(LINES * blocks, shape.vectors), ways * shape.vectors * rates.latency)
    return max(steps * step + rates.end(vectors), alone.end(vectors))
