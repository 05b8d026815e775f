"""Channel shuffles where neighbouring channels are contiguous: tiles of pixels are transposed to planes and back.

An element at a time, a permutation of channels costs a load and a store each. Here a tile of pixels by neighbouring
channels is transposed in registers, and written to the scratch as one vector for each channel. Then the destination's
channels are read from there, and transposed back. Any permutation costs the same. A tile has as many pixels as a vector
has lanes, or fewer if fewer are contiguous. The number of its channels is the one that makes a block with the least
work (`_tile`). A last tile of pixels, or of a block's channels, is moved back to be whole.

Buffers: source, destination.
"""

from typing import NamedTuple

import numpy as np

from blockconv.core.types import FLOATS, Types
from blockconv.kernels.common.axis import positions
from blockconv.kernels.common.geometry import geometry
from blockconv.kernels.common.request import Reason, Request, same_layout_why_not
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.reorder.kernels import ShuffleArgs, ShuffleResult, ShuffleSource, permute_channels
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import OWN_TABLE, Launch


class ShuffleTile(NamedTuple):
    """A tile's pixels and channels, and the cycles that all tiles take."""

    pixels: int
    width: int
    cycles: float


def _tile(request: Request) -> ShuffleTile:
    """The tile that takes the fewest cycles.

    A pixel of a tile is loaded or stored, and joined with others to vectors; these are shuffled as often as their
    number is halved.
    """
    problem, layout, itemsize = request.problem, request.dst, request.itemsize
    outer, inner = positions(layout, problem.shape, 1, itemsize)
    g, padded = geometry(layout, problem.shape, itemsize), layout.padded_shape(problem.shape)[1]
    block = min(g.length, padded)
    pixels = 1 << min(request.machine.lanes(itemsize), inner.size).bit_length() - 1
    widths = (1 << k for k in range(min(pixels, block).bit_length()))
    tiles = outer.size * -(-inner.size // pixels) * (padded // block)

    def cycles(width: int) -> int:
        return 2 * tiles * -(-block // width) * (2 * pixels - width + width * (width.bit_length() - 1))

    best = min(widths, key=cycles)
    return ShuffleTile(pixels, best, cycles(best))


def _launches(request: Request) -> list[Launch]:
    p, layout, itemsize, threads = request.problem, request.dst, request.itemsize, request.threads
    c = p.shape[1]
    if p.shape[0] == 0:
        return []
    (pixels, width, _), g = _tile(request), geometry(layout, p.shape, itemsize)
    padded, plane = layout.padded_shape(p.shape)[1], pixels * itemsize
    block = min(g.length, padded)
    firsts = [start + min(k, block - width) for start in range(0, padded, block) for k in range(0, block, width)]
    sources = [ShuffleSource(offset=g.offset(k), plane=k * plane) for k in firsts if k < c]
    table = [word for source in sources for word in source]
    read = [channel for first, size, step in p.runs[1] for channel in range(first, first + size * step, step)]
    for k in firsts:
        planes = (read[d] if d < c else padded for d in range(k, k + width))
        table += [*ShuffleResult(offset=g.offset(k)), *(channel * plane for channel in planes)]
    outer, inner = positions(layout, p.shape, 1, itemsize)
    tiles = -(-inner.size // pixels)
    args = ShuffleArgs(
        table=OWN_TABLE,
        image=outer.src,
        pixels=inner.size,
        col=inner.src,
        tiles=tiles,
        sources=len(sources),
        results=len(firsts),
        zero=padded * plane,
    )
    tasks, size = outer.size * tiles, padded * plane
    kernel, chunk = permute_channels(Types.bits(itemsize).src, pixels, width), chunk_of(tasks, size, threads)
    return [Launch(kernel, args, tasks, chunk, scratch=size + plane, table=np.array(table, np.int64))]


def _why_not(request: Request) -> Reason | None:
    problem, dst, itemsize, m = request.problem, request.dst, request.itemsize, request.machine
    why_not = same_layout_why_not(request)
    if why_not or 0 in problem.shape:
        return why_not
    if geometry(dst, problem.shape, itemsize).channel != itemsize:
        return f"neighbouring channels are not contiguous in {dst}"
    pixels, padded = m.lanes(itemsize), dst.padded_shape(problem.shape)[1]
    if (padded + 1) * pixels * itemsize > m.second_level_cache:
        return f"a tile of {pixels} pixels by {padded} channels is larger than the second-level cache"
    return None


def _cost(request: Request) -> float:
    size = request.itemsize * request.dst.size(request.problem.shape)
    return request.seconds(size, size, _tile(request).cycles * request.machine.cycle_seconds() if size else 0.0)


ROWS = (same_layout_row("shuffle_planes", "shuffle", FLOATS, _cost, _launches, _why_not),)
