"""How a Winograd convolution cuts a problem: blocks of tiles, chunks of output channels, scratch; and what it costs."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

from blockconv import jit
from blockconv.kernels.cut import geometry
from blockconv.kernels.epilogue import LINE
from blockconv.kernels.table import BANDWIDTH
from blockconv.kernels.winograd_transforms import side, tiles_abreast
from blockconv.layout import Layout
from blockconv.problem import Conv2dProblem

__all__ = ["SCRATCH", "Cut", "cost", "cut"]

SCRATCH = 8 << 20  # bytes that a block's transformed source may take
CHUNK = 4  # vectors of output channels that are held between the second and the third stage
HEADER = 512  # bytes at the start of a worker's scratch: which channels are worked on, and zeros
# Registers: vectors of output channels: tiles in registers with them.
_PIXELS = {32: {1: 28, 2: 14, 3: 9, 5: 5}, 16: {1: 12, 2: 6}}


@dataclass(frozen=True)
class Cut:
    """A task is `block` tiles of a set of groups and a share (one of `splits`) of their output channels.

    part: channels of a vector of the source that are transformed together. together: groups of a set, so many that
    their channels are whole vectors; `sets` of these are all. run: channels of a group that are multiplied in one loop,
    as many as surely lie in one vector. pixels: tiles in registers together, with `vectors` vectors of `out_lanes`
    output channels. shared: a set is one vector of small groups, as many channels out as in, whose weights stay in
    registers. ocbs: blocks of a group's output channels. chunk: blocks whose products are held before they are
    transformed, `m_tile` bytes a tile. *_position: bytes between what belongs to two of the `side`² positions of a
    transformed tile. patch, v, products: where these lie in the scratch.
    """

    m: int
    side: int
    lanes: int
    part: int
    out_lanes: int
    vectors: int
    pixels: int
    rows: int
    columns: int
    tiles: int
    block: int
    chunk: int
    together: int
    sets: int
    run: int
    shared: bool
    ocbs: int
    splits: int
    v_position: int
    m_position: int
    m_tile: int
    patch: int
    v: int
    products: int
    scratch: int

    @property
    def width(self) -> int:
        """Output channels that are multiplied together."""
        return self.vectors * self.out_lanes

    @property
    def blocks(self) -> int:
        return -(-self.tiles // self.block)

    @property
    def positions(self) -> int:
        return self.side**2

    @property
    def weight_positions(self) -> int:
        return (self.m + 2) ** 2

    def weight_position(self, problem: Conv2dProblem) -> int:
        """Bytes from a block of output channels' weights of one position to those of the next."""
        return odd_lines(problem.ic // problem.g * self.width * 4)

    def weight_bytes(self, problem: Conv2dProblem) -> int:
        """Of all groups, those too that the last set lacks."""
        return self.sets * self.together * self.ocbs * self.weight_positions * self.weight_position(problem)


def odd_lines(nbytes: int) -> int:
    """At least as many bytes, an odd number of cache lines: what lies so far apart does not share sets."""
    return (-(-nbytes // LINE) | 1) * LINE


def cut(problem: Conv2dProblem, dst: Layout, m: int, threads: int) -> Cut:
    """How a problem is cut on this machine. The order of sums does not depend on the threads."""
    isa, p = jit.isa(), problem
    lanes, alpha = isa.vector_bytes // 4, side(m, p.sh)
    ic, oc, padded = p.ic // p.g, p.oc // p.g, dst.padded_shape(p.dst_shape)[1]
    together = 1 if p.g == 1 else lanes // math.gcd(lanes, ic, oc)
    sets = -(-p.g // together)
    part = lanes // 2 if isa.halves else lanes  # a transform spills, and to store a half costs half: 41 ns, not 70
    shared = p.g > 1 and ic == oc and lanes % ic == 0
    if shared:
        out_lanes, vectors = ic, 1
    else:
        out_lanes, vectors = _vectors(oc, lanes) if p.g > 1 else (lanes, 2 if oc > lanes else 1)
    width, channels = vectors * out_lanes, -(-together * ic // lanes) * lanes
    rows, columns = -(-p.oh // m), -(-p.ow // m)
    tiles = max(1, p.n * rows * columns)
    most = _PIXELS[32 if isa.registers == 32 else 16][vectors]
    ocbs = -(-(padded if p.g == 1 else oc) // width)
    # More threads than there are blocks of output channels share the tiles too.
    at_once = _tiles_of_a_block(alpha * alpha, channels, together * oc)
    blocks = max(-(-tiles // at_once), min(tiles, -(-threads // (sets * ocbs))))
    wanted = -(-tiles // blocks)
    groups = -(-wanted // most)
    pixels = -(-wanted // groups)
    block = min(tiles, groups * pixels)
    blocks = -(-tiles // block)
    splits = _splits(sets * blocks, ocbs, threads) if together == 1 else 1
    chunk = min(-(-ocbs // splits), CHUNK // vectors) if together == 1 else together * ocbs
    # A group's last block may be wider than what is left of the group; the last set has the destination's padding too.
    row = (together - 1) * oc + min(chunk, ocbs) * width + max(0, padded - sets * together * oc)
    m_tile = -(-row // lanes) * lanes * 4
    v_position, m_position = odd_lines(block * channels * 4), odd_lines(block * m_tile)
    patch = HEADER + 2 * m * m * lanes * 4
    _, wide = tiles_abreast(m, p.sh, lanes)
    v = patch + odd_lines(max(alpha * wide, m * max(m, lanes)) * lanes * 4)  # of the source, of the destination
    products = v + alpha * alpha * v_position
    scratch = products + alpha * alpha * m_position
    return Cut(
        m, alpha, lanes, part, out_lanes, vectors, pixels, rows, columns, tiles, block, chunk, together, sets,
        lanes if together == 1 else math.gcd(lanes, ic), shared, ocbs, splits,
        v_position, m_position, m_tile, patch, v, products, scratch,
    )  # fmt: skip


def _vectors(oc: int, lanes: int) -> tuple[int, int]:
    """(lanes, vectors) of a group's products: halves of vectors, if these cost nothing and fewer lanes are idle."""
    half, whole = lanes // 2, -(-oc // lanes)
    if jit.isa().halves and oc <= (2 * whole - 1) * half and 2 * whole - 1 in _PIXELS[32]:
        return half, 2 * whole - 1
    return lanes, min(2, whole)


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


def _tiles_of_a_block(positions: int, channels: int, oc: int) -> int:
    """More tiles use weights more often; fewer stay in the second-level cache, with the weights if these fit too."""
    cache = jit.second_level_cache()
    often = 28 if positions * channels * oc * 4 <= 8 * cache else 56
    return max(1, min(often, SCRATCH // (positions * channels * 4)))


# ---------------------------------------------------------------- cost

FMA = 0.2e-9  # seconds of a vector multiply-add, as all rows assume; see blockconv.tuning
_SHARED = 1.3  # a multiply-add of groups that share a vector: its channels are permuted, or broadcast one by one
_CALL = 30  # what a tile of products takes beyond its multiply-adds and stores, in multiply-adds
# The transforms of a vector of channels of one tile, source and destination, by m and stride, in multiply-adds of
# vectors, and times that where so many channels lie together.
_TRANSFORMS = {(2, 1): (100, 57), (4, 1): (300, 135), (6, 1): (850, 430), (2, 2): (180, 68), (4, 2): (850, 290)}
_PIECES = {1: (1.3, 2.0), 4: (1.6, 1.2), 8: (1.3, 1.1)}
_STREAM = 42e9  # bytes of weights a second, which are read in order; like `FMA`, 1.4 times as fast as it is
_EDGE = 0.35  # more for a source over the image's edge


def cost(problem: Conv2dProblem, src: Layout, dst: Layout, m: int, threads: int) -> float:
    """Seconds: of the products or their weights' way to the core, and of transforms or pixels in and out."""
    p, at = problem, cut(problem, dst, m, 1)
    lanes, tiles = at.lanes, at.blocks * at.block
    vectors_in, vectors_out = -(-p.ic // lanes), -(-dst.padded_shape(p.dst_shape)[1] // lanes)
    if at.shared:
        multiply = at.positions * tiles * vectors_in * (p.ic // p.g) * _SHARED
    else:
        # Fewer than eight accumulators wait for each other.
        slow, vectors = max(1.0, 8 / (at.pixels * at.vectors)), at.width / lanes
        calls = at.positions * p.g * at.ocbs * at.blocks * -(-at.block // at.pixels)
        multiply = at.positions * tiles * p.ic * at.ocbs * vectors * slow
        multiply += calls * (_CALL + 2 * at.pixels * vectors)
    edge = 1 + _EDGE * (1 - p.n * max(0, at.rows - 2) * max(0, at.columns - 2) / at.tiles)
    source, destination = map(float, _TRANSFORMS[m, p.sh])
    source *= vectors_in * edge * _slower(src, p.src_shape, lanes)[0]
    destination *= vectors_out * _slower(dst, p.dst_shape, lanes)[1]
    transforms = tiles * (source + destination)
    weights = at.weight_bytes(p)
    moved = weights * at.blocks if weights // at.sets > jit.second_level_cache() // 2 else weights
    pixels = 4 * (src.size(p.src_shape) + dst.size(p.dst_shape))
    return 2e-6 + (max(multiply * FMA, moved / _STREAM) + max(transforms * FMA, pixels / BANDWIDTH)) / threads


def _slower(layout: Layout, shape: tuple[int, ...], lanes: int) -> tuple[float, float]:
    length = geometry(layout, shape, 4).length
    return (1.0, 1.0) if length >= lanes else _PIECES[length]
