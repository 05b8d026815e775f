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

from blockconv import jit
from blockconv.core.types import FLOATS, ElementType, Types
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import store_bits
from blockconv.kernels.common.axis_walk import positions
from blockconv.kernels.common.geometry import geometry
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.common.request import Reason, Request, same_layout_why_not
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.common.transposed_tile import TABLED_SRC, TileAddresses, TransposeShape, transpose_tile
from blockconv.kernels.table import same_layout_row
from blockconv.runtime import OWN_TABLE, Launch


class ShuffleSource(Arguments):
    """Neighbouring channels of the source, as many as a tile has."""

    offset = word("from the pixel's first channel", "bytes")
    plane = word("where the first of them goes in the scratch", "bytes")


class ShuffleResult(Arguments):
    """Neighbouring channels of the destination. As many offsets of planes follow."""

    offset = word("from the pixel's first channel", "bytes")


class ShuffleArgs(Operands):
    """A permutation of the channels of every pixel, where neighbouring channels, a tile's at least, are contiguous."""

    table = word("a `ShuffleSource` for each vector of these; then a `ShuffleResult` for each", "address")
    image = word("from an image, or a row of pixels that are equally far apart, to the next", "bytes")
    pixels = word("in an image, or in such a row")
    col = word("from a pixel to the next", "bytes")
    tiles = word("that these pixels make")
    sources = word("tiles of the source's channels")
    results = word("tiles of the destination's channels")
    zero = word("where the scratch has a plane of zeros, for channels that do not exist", "bytes")


@jit.kernel
def permute_channels(code, pixels, width):
    """A task is a tile of pixels, all channels, `width` at a time. Scratch: a vector of the pixels for each channel.

    code: of the elements' type, which is bits.
    """
    to_planes = TransposeShape(code, code, pixels, width, pixels, width, 0)
    to_tile = TransposeShape(code, code, width, pixels, width, pixels, TABLED_SRC)
    itemsize = ElementType.of(code).itemsize
    plane = pixels * itemsize

    def kernel(args, first, last, scratch):
        a = ShuffleArgs(args)
        col, tiles, sources, results = a.col, a.tiles, a.sources, a.results
        zero = scratch + a.zero
        for k in range(pixels):
            store_bits(zero + k * itemsize, 0, itemsize)
        for task in range(first, last):
            pixel = min(task % tiles * pixels, a.pixels - pixels)
            at = task // tiles * a.image + pixel * col
            src, dst = a.src + at, a.dst + at
            row = a.table
            for _ in range(sources):
                source = ShuffleSource(row)
                at, to = src + source.offset, scratch + source.plane
                transpose_tile(to_planes, TileAddresses(at, 0, col, pixels, to, 0, plane, width, width, 0, 0))
                row += ShuffleSource.nbytes
            for _ in range(results):
                result = ShuffleResult(row)
                offsets, to = row + ShuffleResult.nbytes, dst + result.offset
                tile = TileAddresses(scratch, offsets, 0, width, to, 0, col, pixels, pixels, 0, 0)
                transpose_tile(to_tile, tile)
                row += ShuffleResult.nbytes + 8 * width

    return kernel


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
    problem, layout, itemsize = request.problem, request.dst, request.types.src.itemsize
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
    p, layout, itemsize, threads = request.problem, request.dst, request.types.src.itemsize, request.threads
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
    kernel, chunk = permute_channels(Types.bits(itemsize).src.code, pixels, width), chunk_of(tasks, size, threads)
    return [Launch(kernel, args, tasks, chunk, scratch=size + plane, table=np.array(table, np.int64))]


def _why_not(request: Request) -> Reason | None:
    problem, dst, itemsize, m = request.problem, request.dst, request.types.src.itemsize, request.machine
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
    size = request.types.src.itemsize * request.dst.size(request.problem.shape)
    return request.seconds(size, size, _tile(request).cycles * request.machine.cycle_seconds() if size else 0.0)


ROWS = (same_layout_row("shuffle_planes", "shuffle", FLOATS, _cost, _launches, _why_not),)
