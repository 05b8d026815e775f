"""How a Winograd convolution is cut into tasks: blocks of tiles, chunks of output channels, scratch; and its cost."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass
from typing import NamedTuple

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.kernels.common.dot import MULTIPLY_ADD, Dot, dot_of_words, name_of
from blockconv.kernels.common.epilogue import LINE
from blockconv.kernels.common.geometry import Geometry, geometry
from blockconv.kernels.common.waiting import waiting_seconds
from blockconv.kernels.winograd.arguments import HEADER_BYTES, PLANE_BYTES
from blockconv.kernels.winograd.codegen import ELEMENT
from blockconv.kernels.winograd.transforms import Form
from blockconv.machine.costs import (
    cycle_seconds,
    fma_seconds,
    launch_seconds,
    move_seconds,
    spread_seconds,
    transform_seconds,
)
from blockconv.machine.profile import profile

__all__ = [
    "SCRATCH",
    "Blocking",
    "ScratchLayout",
    "blocking",
    "contiguous",
    "cost",
    "multiply_adds",
    "transforms",
]

ITEMSIZE = ELEMENT.itemsize  # of a product, and of what a multiply-accumulate takes of a channel, or a pair
SCRATCH = 8 << 20  # bytes that the transformed source of a block of tiles may take
CHUNK = 4  # vectors of output channels whose products are held between the second and the third stage
# Registers of the machine: vectors of output channels: tiles in registers with them.
_TILE_PIXELS = {32: {1: 28, 2: 14, 3: 9, 5: 5}, 16: {1: 12, 2: 6}}


class ScratchLayout(NamedTuple):
    """Where things lie in a worker's scratch, in bytes from its begin; behind the header and two tiles of pixels.

    patch: pixels of a tile that are gathered. v: the transformed source. products: those that are held. *_position:
    from one of a tile's positions to the next. products_tile: from a tile to the next. nbytes: of all.
    """

    patch: int
    v: int
    v_position: int
    products: int
    products_position: int
    products_tile: int
    nbytes: int


@dataclass(frozen=True)
class Blocking:
    """A task is a block of tiles of a set of groups and a share (one of `splits`) of their output channels.

    lanes: of a vector of products; src_lanes: of the transformed source, of which `transform_lanes` are transformed
    together. dot: what multiplies; of integers, which are 16 bits wide then, pairs of channels. set_groups: groups of a
    set, so many that their channels are whole vectors; there are `sets`. ic_block: channels of a group that one
    reduction step takes, as many as surely lie in one vector. shared: a set is one vector of small groups, as many
    channels out as in, whose weights stay in registers. tile_pixels: tiles that are in registers together, with
    `vectors` vectors of `out_lanes` output channels. ocbs: blocks of a group's output channels. chunk: blocks whose
    products are held before they are transformed. tile_rows, tile_cols: tiles of an image. tiles: of all images;
    block_tiles: of a block.
    """

    form: Form
    dot: Dot
    lanes: int
    src_lanes: int
    transform_lanes: int
    set_groups: int
    sets: int
    ic_block: int
    shared: bool
    out_lanes: int
    vectors: int
    tile_pixels: int
    ocbs: int
    splits: int
    chunk: int
    tile_rows: int
    tile_cols: int
    tiles: int
    block_tiles: int
    scratch: ScratchLayout

    @property
    def width(self) -> int:
        """Output channels of a block, which are multiplied together."""
        return self.vectors * self.out_lanes

    @property
    def tile_blocks(self) -> int:
        return -(-self.tiles // self.block_tiles)

    @property
    def set_ocbs(self) -> int:
        return self.set_groups * self.ocbs

    @property
    def wei_positions(self) -> int:
        return self.form.wei_side**2

    def wei_position(self, problem: Conv2dProblem) -> int:
        """Bytes from a block of output channels' weights of one position to those of the next."""
        return odd_lines(self.elements(problem.ic // problem.g) * self.width * ITEMSIZE)

    def elements(self, channels: int) -> int:
        """What a multiply-accumulate takes so many channels as."""
        return -(-channels // self.dot.channels)

    @property
    def itemsize(self) -> int:
        """Bytes of a channel of the transformed source."""
        return ITEMSIZE // self.dot.channels

    def wei_ocb(self, problem: Conv2dProblem) -> int:
        """Bytes from a block of output channels' weights to the next."""
        return self.wei_positions * self.wei_position(problem)

    def wei_bytes(self, problem: Conv2dProblem) -> int:
        """Of all groups, those too that the last set lacks."""
        return self.sets * self.set_ocbs * self.wei_ocb(problem)


def blocking(problem: Conv2dProblem, dst: Layout, m: int, threads: int, exact: bool = False) -> Blocking:
    """How a problem is cut on this machine. The order of sums does not depend on the threads. exact: of integers."""
    p, form, isa = problem, Form(m, problem.sh, exact), target.isa()
    dot, lanes = dot_of_words() if exact else MULTIPLY_ADD, isa.vector_bytes // ITEMSIZE
    src_lanes = lanes * dot.channels
    ic, oc, oc_padded = p.ic // p.g, p.oc // p.g, dst.padded_shape(p.dst_shape)[1]
    set_groups = 1 if p.g == 1 else lanes // math.gcd(lanes, ic, oc)
    sets, channels = -(-p.g // set_groups), -(-set_groups * ic // src_lanes) * src_lanes
    shared = _is_shared(p, lanes)
    out_lanes, vectors = (ic, 1) if shared else _block_vectors(p, lanes)
    width = vectors * out_lanes
    ocbs = -(-(oc_padded if p.g == 1 else oc) // width)
    tile_rows, tile_cols = -(-p.oh // m), -(-p.ow // m)
    tiles = max(1, p.n * tile_rows * tile_cols)
    # More threads than there are blocks of output channels share the tiles too.
    at_most = _most_tiles(form.positions * channels * ITEMSIZE // dot.channels, set_groups * oc)
    wanted = -(-tiles // max(-(-tiles // at_most), min(tiles, -(-threads // (sets * ocbs)))))
    calls = -(-wanted // _TILE_PIXELS[32 if isa.registers == 32 else 16][vectors])
    tile_pixels = -(-wanted // calls)
    block_tiles = min(tiles, calls * tile_pixels)
    if set_groups == 1:
        splits = _splits(sets * -(-tiles // block_tiles), ocbs, threads)
        chunk = min(-(-ocbs // splits), CHUNK // vectors)
    else:
        splits, chunk = 1, set_groups * ocbs
    # A group's last block may be wider than what is left of the group; the last set has the destination's padding too.
    row = (set_groups - 1) * oc + min(chunk, ocbs) * width + max(0, oc_padded - sets * set_groups * oc)
    return Blocking(
        form=form,
        dot=dot,
        lanes=lanes,
        src_lanes=src_lanes,
        # A transform spills, and to store a half costs half: 41 ns, not 70.
        transform_lanes=src_lanes // 2 if isa.halves else src_lanes,
        set_groups=set_groups,
        sets=sets,
        ic_block=src_lanes if set_groups == 1 else math.gcd(lanes, ic),
        shared=shared,
        out_lanes=out_lanes,
        vectors=vectors,
        tile_pixels=tile_pixels,
        ocbs=ocbs,
        splits=splits,
        chunk=chunk,
        tile_rows=tile_rows,
        tile_cols=tile_cols,
        tiles=tiles,
        block_tiles=block_tiles,
        scratch=_scratch(form, lanes, block_tiles, channels // dot.channels, -(-row // lanes) * lanes),
    )


def contiguous(at: Geometry, lanes: int) -> tuple[int, bool]:
    """(channels that a load or a store takes, whether the next such may lie anywhere).

    They are the most that divide both a block and a vector. Where a block ends within a vector that begins in it, they
    are not evenly far apart.
    """
    width = min(lanes, at.length & -at.length)
    return width, width not in (lanes, at.length)


def _is_shared(problem: Conv2dProblem, lanes: int) -> bool:
    """Whether the groups of a vector have their weights in registers."""
    ic, oc = problem.ic // problem.g, problem.oc // problem.g
    return problem.g > 1 and ic == oc and lanes % ic == 0


def _block_vectors(problem: Conv2dProblem, lanes: int) -> tuple[int, int]:
    """(lanes, vectors) of a block of output channels: halves of vectors, if these cost nothing and fewer are idle."""
    oc = problem.oc // problem.g
    half, whole = lanes // 2, -(-oc // lanes)
    halves = 2 * whole - 1
    if problem.g > 1 and target.isa().halves and oc <= halves * half and halves in _TILE_PIXELS[32]:
        return half, halves
    return lanes, min(2, whole)


def _scratch(form: Form, lanes: int, tiles: int, channels: int, oc: int) -> ScratchLayout:
    """The scratch for so many tiles, with so many channels (or pairs) of their sources and products."""
    m, vector = form.m, lanes * ITEMSIZE
    patch = HEADER_BYTES + 2 * m * m * vector
    wide = (form.tiles_per_vector(PLANE_BYTES if form.exact else lanes) - 1) * form.step + form.side
    v = patch + odd_lines(max(form.side * wide, m * max(m, lanes)) * vector)  # of the source, of the destination
    v_position, products_position = odd_lines(tiles * channels * ITEMSIZE), odd_lines(tiles * oc * ITEMSIZE)
    products = v + form.positions * v_position
    end = products + form.positions * products_position
    return ScratchLayout(patch, v, v_position, products, products_position, oc * ITEMSIZE, end)


def odd_lines(nbytes: int) -> int:
    """At least as many bytes, an odd number of cache lines: what lies so far apart does not share sets."""
    return (-(-nbytes // LINE) | 1) * LINE


# What the transform of a block's source takes, in products of a block of output channels: 0.3 to 0.5, measured on
# ResNet-50's layers; less, so that a tie goes to more tasks.
SPLITTING = 0.25


@functools.lru_cache(maxsize=4096)
def _splits(blocks: int, ocbs: int, threads: int) -> int:
    """Tasks that share a block's output channels, each with its transform: the least to do for the busiest thread."""

    def busiest(splits: int) -> float:
        tasks, most = blocks * splits, 0.0
        for worker in range(threads):
            first, last = tasks * worker // threads, tasks * (worker + 1) // threads
            channels = [ocbs * (task // splits) + ocbs * (task % splits) // splits for task in (first, last)]
            most = max(most, channels[1] - channels[0] + (last - first) * SPLITTING)
        return most

    return min(range(min(ocbs, -(-threads // blocks)), min(ocbs, 4 * threads) + 1), key=busiest)


def _most_tiles(tile_bytes: int, oc: int) -> int:
    """Tiles of a block, at most. tile_bytes: of a tile's transformed source.

    More use weights more often; fewer stay in the second-level cache, with the weights if these fit too.
    """
    often = 28 if tile_bytes * oc <= 8 * target.second_level_cache() else 56
    return max(1, min(often, SCRATCH // tile_bytes))


# ---------------------------------------------------------------- cost

_CALL = 30  # what a call of the microkernel takes beyond its multiply-adds and stores, in multiply-adds
_BEGIN = 4000  # cycles until three stages have what they work with, whatever the problem
_EDGE = 0.35  # more for a source over the image's edge
# What is seen of weights' way from beyond the second-level cache, or of the products, whichever is shorter: both need
# the fill buffers of the first-level cache, so one hides but a part of the other.
_SEEN = 0.25


def cost(problem: Conv2dProblem, src: Layout, dst: Layout, types: Types, at: Blocking, threads: int) -> float:
    """Seconds: of the products or their weights' way to the core, and of transforms or pixels in and out."""
    p = problem
    wei_bytes = at.wei_bytes(p)
    stays = wei_bytes // at.sets <= target.second_level_cache() // 2
    again = move_seconds(wei_bytes, 0)
    # In a network of integers others' weights fit the last cache, and these do not stay there: 740 µs for the 19 MB of
    # 512 channels of 7x7, whose products take 200.
    first = wei_bytes / profile().reads["memory"] if at.form.exact else again
    streamed = first + (0 if stays else at.tile_blocks - 1) * again
    rates = profile().by(name_of(at.dot))
    each = rates.each if at.form.exact else fma_seconds(at.lanes, ITEMSIZE)
    products = multiply_adds(p, at) * each
    multiply = max(products, streamed) + (0.0 if stays else _SEEN * min(products, streamed))
    read, written = types.src.nbytes(src.size(p.src_shape)), types.dst.nbytes(dst.size(p.dst_shape))
    # Transforms are timed in the second-level cache, and hide nothing of what comes from beyond it.
    beyond = max(0.0, move_seconds(read, written) - (read + written) / profile().copies["L2"])
    form, (source, destination) = (at.form.m, at.form.stride), transforms(p, dst, at)
    lies = geometry(src, p.src_shape, types.src.itemsize), geometry(dst, p.dst_shape, types.dst.itemsize)
    source *= transform_seconds(form, *_lies(lies[0], at.src_lanes, at))[0]
    stored = transform_seconds(form, *_lies(lies[1], at.lanes, at))[1]
    if types.is_requantized:
        stored += at.form.m**2 * rates.tile
    destination *= stored
    begin, waiting = launch_seconds() + _BEGIN * cycle_seconds(), waiting_seconds(p, src, dst, types)
    return begin + (multiply + source + destination + beyond + waiting) / threads


def weight_seconds(m: int, exact: bool, problem: Conv2dProblem) -> float:
    """To transform the weights, whose vectors of output channels take what those of a source's tile do."""
    p, at = problem, blocking(problem, Layout("NHWC"), m, 1, exact)
    return at.elements(p.ic) * at.ocbs * at.width / at.lanes * transform_seconds((m, p.sh), 0, False)[0]


def multiply_adds(problem: Conv2dProblem, at: Blocking) -> float:
    """What the products take, in multiply-adds of vectors."""
    p, positions = problem, at.form.positions
    tiles = at.tile_blocks * at.block_tiles
    if at.shared:
        spread = spread_seconds("winograd", at.lanes, ITEMSIZE) / fma_seconds(at.lanes, ITEMSIZE)
        return positions * tiles * -(-p.ic // at.lanes) * (p.ic // p.g) * spread
    # Fewer than eight accumulators wait for each other.
    slow, vectors = max(1.0, 8 / (at.tile_pixels * at.vectors)), at.width / at.lanes
    calls = positions * p.g * at.ocbs * at.tile_blocks * -(-at.block_tiles // at.tile_pixels)
    products = positions * tiles * at.elements(p.ic) * at.ocbs * vectors * slow
    return products + calls * (_CALL + 2 * at.tile_pixels * vectors)


def transforms(problem: Conv2dProblem, dst: Layout, at: Blocking) -> tuple[float, float]:
    """Vectors of a tile's channels that are transformed, of source and destination."""
    p, lanes = problem, at.lanes
    inner = p.n * max(0, at.tile_rows - 2) * max(0, at.tile_cols - 2)
    source = -(-p.ic // at.src_lanes) * (1 + _EDGE * (1 - inner / at.tiles))
    destination = -(-dst.padded_shape(p.dst_shape)[1] // lanes)
    tiles = at.tile_blocks * at.block_tiles
    return tiles * source, tiles * destination


def _lies(lies: Geometry, lanes: int, at: Blocking) -> tuple[int, bool]:
    """(channels of a vector that lie together, 0 for all; whether others lie between a pixel's and the next one's).

    lanes: of the vector; channels that lie together are counted as those of a vector of floats, which are fewer.
    """
    width, _ = contiguous(lies, lanes)
    together = width if width in (1, lanes) else max(2, width * at.lanes // lanes)
    return (together if width < lanes else 0), lies.col > lies.channel * lanes
