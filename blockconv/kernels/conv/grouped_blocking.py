"""The blocking of grouped convolution with few channels a group: several groups to a vector of output channels.

Where a group's output channels fill half a vector or less, dense tiles would leave most lanes idle. Here as many
whole groups as a vector holds are one group of the tiles: ResNeXt's 4 channels a group, RegNet's 8. Bytes need channels
that are contiguous in fours. An element of the source is then as many channels as a multiply-accumulate takes.
"""

import math

from blockconv.core.checks import Pair
from blockconv.core.problem import Conv2dProblem
from blockconv.core.python import bounded_cache
from blockconv.kernels.common.dot import WIDENED, Dot, dot_for, packed_as_one
from blockconv.kernels.common.geometry import NO_BLOCK
from blockconv.kernels.common.interleaved import Shared
from blockconv.kernels.common.request import Request
from blockconv.kernels.conv.blocking import (
    ConvBlocking,
    ConvTile,
    TileShape,
    divided,
    fills_units,
    store_width,
    tile_sizes,
)
from blockconv.kernels.conv.space import Space, space
from blockconv.machine.machine import Machine


def groups_per_vector(problem: Conv2dProblem, lanes: int) -> int:
    """Groups whose output channels fit into a vector."""
    return lanes // problem.group_oc


def _lanes(machine: Machine, problem: Conv2dProblem, lanes: int) -> int:
    """Lanes of a vector, or of half of one where that costs nothing and takes a tenth fewer lanes in all."""
    half, p = lanes // 2, problem
    if not machine.isa.halves or p.group_oc > half:
        return lanes
    total = {width: -(-p.g // groups_per_vector(p, width)) * width for width in (lanes, half)}
    return half if 10 * total[half] <= 9 * total[lanes] else lanes


def _dot(request: Request) -> Dot:
    """The multiply-accumulate: 16-bit floats are widened where their channels are not contiguous in pairs."""
    types, dot = request.types, dot_for(request.types, request.machine.isa)
    if types.src.is_half and not fills_units(request.problem, request.source, packed_as_one(types, dot)):
        return WIDENED
    return dot


@bounded_cache
def blocking(request: Request) -> ConvBlocking:
    """The blocking of a problem on a machine. Tile sizes do not depend on the threads."""
    p, types, m = request.problem, request.types, request.machine
    itemsize, at, d = types.acc.itemsize, space(request), request.destination
    lanes, registers = _lanes(m, p, m.lanes(itemsize)), m.registers
    dot = _dot(request)
    count = groups_per_vector(p, lanes)
    ic, oc = p.group_ic // dot.channels, p.group_oc
    # The pitch counts elements, `channels` what is packed as one: four bytes, which may be several elements.
    unit = packed_as_one(types, dot)
    channels = count * p.group_ic // unit
    pitch = 1 << (channels - 1).bit_length() if channels < lanes else -(-channels // lanes) * lanes
    pitch *= unit // dot.channels
    taps = at.kw if at.kw <= (7 if registers == 32 else 3) else 1
    shared = Shared(count, ic, oc, pitch, taps, at.dw if taps > 1 else 0, at.sw if at.kw > 1 else 1)
    like = None if request.anchor is None else blocking(request.at_anchor).shape
    rows, pixels = _tile(at, registers - taps - 2 - (dot.instructions > 1), like)
    width = store_width(d, at, types.dst.itemsize, lanes, groups_of=count * oc if p.g > count else 0)
    length = request.source.length
    tile = ConvTile(
        rows=rows,
        pixels=pixels,
        vectors=1,
        lanes=lanes,
        cb=_source_block(channels, length if length == NO_BLOCK else length // unit, lanes),
        store_width=width,
        in_place=False,
        step=dot.channels,
        shared=shared,
        dot=dot,
    )
    return divided(request, tile)


def _source_block(channels: int, length: int, lanes: int) -> int:
    """Channels of a vector's groups that are moved together: contiguous in the source, at most a vector."""
    return min(channels, lanes) if length == NO_BLOCK else math.gcd(channels, length, lanes)


def _tile(at: Space, registers: int, like: TileShape | None) -> Pair:
    """(rows, pixels) that fit into so many accumulators, in the fewest tiles; a few more cost less than a tile."""
    tiles = (
        (-(-at.oh // rows) * -(-at.ow // pixels) * (max(rows * pixels, 4) + 1.0), (rows, pixels))
        for rows, pixels in tile_sizes(at, registers, like)
    )
    return min(tiles)[1]
