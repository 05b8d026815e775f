"""The blocking of direct convolution: the tile, the pixels of a task, how tasks share output channels."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from blockconv.core.checks import Pair
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.python import bounded_cache
from blockconv.core.types import Types
from blockconv.jit.records import fill
from blockconv.kernels.common.dot import MULTIPLY_ADD, Dot, dot_for, name_of, packed_as_one, tiles_of
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry
from blockconv.kernels.common.interleaved import DENSE, Shared
from blockconv.kernels.common.request import Request, are_far
from blockconv.kernels.common.taps import Kept, kept_taps
from blockconv.kernels.conv.dividing import (
    CHANNELS_OF_PLANES,
    blocks_of_packing,
    pays_to_pack_planes,
    pixels_of_task,
    room_for_window,
    splits_of_tasks,
)
from blockconv.kernels.conv.space import Space, TapsRegion, regions, space
from blockconv.machine.machine import Machine


class TileShape(NamedTuple):
    """Output pixels, in rows, and vectors of output channels that are held in registers.

    gap: where rows are computed as one, the window's columns between the end of a row and the begin of the next. Their
    pixels are computed too, and not stored.
    """

    rows: int
    pixels: int
    vectors: int
    gap: int = 0

    @property
    def lines(self) -> int:
        """Pixels that are computed."""
        return self.rows * (self.pixels + self.gap) - self.gap


@dataclass(frozen=True, kw_only=True)
class ConvTile:
    """A tile (rows x pixels x vectors of lanes), and how its source is packed.

    gap: as in `TileShape`.
    cb: channels packed together.
    step: channels of a step of the reduction: cb, or those of one element (`Dot`) where a loop over so few costs more
        than it saves.
    store_width: contiguous destination channels that one store writes; 0 where tiles are scattered.
    in_place: tiles read the source where it is (`is_read_in_place`).
    shared: how groups share a vector; a "group" here is then as many of them as do.
    dot: the multiply-accumulate.
    interleaved: packing interleaves the source's channels, which do not fill units of 32 bits there.
    """

    rows: int
    pixels: int
    vectors: int
    gap: int = 0
    lanes: int
    cb: int
    step: int = 1
    store_width: int
    in_place: bool
    shared: Shared = DENSE
    dot: Dot = MULTIPLY_ADD
    interleaved: bool = False

    @property
    def shape(self) -> TileShape:
        return TileShape(self.rows, self.pixels, self.vectors, self.gap)

    @property
    def width(self) -> int:
        """Output channels of a tile."""
        return self.vectors * self.lanes


@dataclass(frozen=True, kw_only=True)
class ConvBlocking(ConvTile):
    """How a problem is made of tiles.

    task_rows, task_cols: pixels of a task.
    splits: tasks that share a group's output channels, in `ocbs` blocks.
    panel: output columns of a window, a tile's where windows of tiles do not overlap, so that what a tile reads is
        contiguous; else the task's.
    scratch: bytes a worker needs.
    pixel_lanes: pixels of a vector where vectors run along these, and each of `vectors` is one channel; 0 where they
        run along channels.
    phases: of a row of a window whose columns are taken by their remainder to the stride, how many remainders;
        `window_cols` is of each.
    line: columns of a row of the destination where its rows are one and those of the source are not (`space`, strided);
        else 0.
    k_blocks: blocks of the reduction's steps, between which a task's accumulators are kept in the scratch.
    blocks: how many blocks of `pixel_lanes` pixels are reduced together by matrices whose columns are pixels; else 0.
    kept: which taps tiles reduce, where some are left out.
    """

    task_rows: int
    task_cols: int
    splits: int
    ocbs: int
    panel: int
    window_rows: int
    window_cols: int
    scratch: int
    pixel_lanes: int = 0
    phases: int = 1
    line: int = 0
    k_blocks: int = 1
    blocks: int = 0
    kept: Kept | None = None

    @property
    def lines(self) -> int:
        """Pixels of a tile whose accumulators the scratch has room for."""
        return self.blocks * self.pixel_lanes or self.shape.lines

    @property
    def has_panels_of_planes(self) -> bool:
        """Whether the pixels of each tile are packed as [channel][pixel], and a step takes several of the channels."""
        return self.cb == 1 and self.step > 1

    @property
    def tiles(self) -> int:
        """Tiles of a task's pixels, for each block of output channels."""
        return -(-self.task_rows // self.rows) * -(-self.task_cols // self.pixels)


def weight_layout(blocking: ConvBlocking) -> Layout:
    """The layout of packed weights, over (G, O/G, I/G, H, W): what a tile reads, in the order it reads it."""
    # Where a matrix's lines are output channels, a step's channels of each are contiguous.
    each = blocking.step if blocking.dot.is_matrix and blocking.pixel_lanes else blocking.dot.channels
    width = f"{blocking.width}b" if blocking.width > 1 else ""
    blocks = f"{blocking.step // each}c" * (blocking.step > each) + width + f"{each}c" * (each > 1)
    return Layout(f"a{'B' if width else 'b'}{'C' if blocking.step > 1 else 'c'}de{blocks}")


@bounded_cache
def blocking(request: Request, tile: TileShape | None = None) -> ConvBlocking:
    """The blocking of a problem on a machine. Tile and block sizes do not depend on the threads.

    tile: the requested shape, instead of the one of least predicted time.
    """
    p, types, m, isa = request.problem, request.types, request.machine, request.machine.isa
    at, dot, s, d = space(request), dot_for(types, isa), request.source, request.destination
    lanes, oc = request.lanes, p.group_oc
    is_half = p.g > 1 and isa.halves and 0 < oc % lanes <= lanes // 2
    if is_half:
        lanes //= 2  # groups of 24 or 40 channels waste fewer of them
    unit = packed_as_one(types, dot)
    interleaved = not fills_units(p, s, unit)
    cb = unit if interleaved else _source_block(p, s, unit)
    stored = store_width(d, at, types.dst.itemsize, lanes, groups_of=oc if p.g > 1 else 0)
    as_it_is = not (interleaved or is_converted(types, dot) or _ends_inside(p, s, types, dot))
    shape = tile or tile_of_least_time(request, at, d, stored, lanes, dot, is_half)
    in_place = as_it_is and is_read_in_place(m, p, at, s, shape.pixels)
    packs_planes = in_place and at.axes[2] == "hw" and pays_to_pack_planes(isa, s, -(-oc // (shape.vectors * lanes)))
    # Steps of whole blocks prefetch the next block. For blocks of four it is profitable if these are read in place.
    blocks_are_steps = cb > 4 * dot.channels or (in_place and cb == 4 * dot.channels)
    inner = fill(
        ConvTile,
        shape,
        lanes=lanes,
        cb=cb,
        step=CHANNELS_OF_PLANES if packs_planes else cb if blocks_are_steps else dot.channels,
        store_width=stored,
        in_place=in_place and not packs_planes,
        dot=dot,
        interleaved=interleaved,
    )
    return divided(request, inner, packs_planes=packs_planes)


def region_blockings(request: Request, vectors: int) -> list[tuple[TapsRegion, ConvBlocking]]:
    """The blocking of each region of a problem, of tiles of so many vectors that read the source where it is.

    None, where there is no such tile, or its pixels are too far apart.
    """
    p, types, m, s, d = request.problem, request.types, request.machine, request.source, request.destination
    lanes, dot = request.lanes, dot_for(types, m.isa)
    whole, oc = space(request), p.group_oc
    stored = store_width(d, whole, types.dst.itemsize, lanes, groups_of=oc if p.g > 1 else 0)
    taken = vectors in (count for count, _ in tiles_of(dot, m.isa))
    if not taken or straddles_blocks(p, d, stored, lanes, vectors * lanes) or cuts_blocks(p, s):
        return []
    cb, made = _source_block(p, s, 1), []
    for region in regions(p):
        at = region.space(p)
        shape = tile_of_least_time(request, at, d, stored, lanes, dot, False, of=vectors)
        if not fit_in_ways(m, s.col, shape.pixels):
            return []
        step = cb if cb >= 4 * dot.channels else dot.channels
        inner = fill(ConvTile, shape, lanes=lanes, cb=cb, step=step, store_width=stored, in_place=True, dot=dot)
        made.append((region, replace(divided(request, inner, region.levels(p)), kept=region.all_kept)))
    return made


def divided(request: Request, tile: ConvTile, at: Space | None = None, packs_planes: bool = False) -> ConvBlocking:
    """The blocking whose tasks are as large as caches allow, and as many as threads need.

    at: the pixels, if they are not the problem's. packs_planes: tiles read what is packed as [channel][pixel].
    """
    p, types, threads, m = request.problem, request.types, request.threads, request.machine
    at, (rows, pixels, vectors, _) = at or space(request), tile.shape
    itemsize, packed, shared = types.acc.itemsize, tile.dot.itemsize or types.src.itemsize, tile.shared
    width, oc, cb, groups = vectors * tile.lanes, p.group_oc, tile.cb, -(-p.g // shared.groups)
    ocbs = -(-(oc if tile.store_width == 0 or p.g > 1 else request.padded_oc) // width)
    channels = -(-p.group_ic // cb) * cb * at.depth
    weights = channels * at.kh * at.kw * packed  # of an output channel
    pixel_bytes = channels * packed if shared.dense else at.depth * shared.pitch * itemsize
    # Threads share the pixels, or the weights where these are more than the source. Each then reads its share once.
    # (More threads than there are blocks of output channels share both.)
    by_pixels = weights * oc <= channels * packed * at.ih * at.iw or not shared.dense
    whole = pixel_bytes * math.prod(at.window(at.oh, at.ow))
    cache = m.second_level_cache
    room = cache // 4 if by_pixels else room_for_window(cache, weights * width, whole)
    sharing = threads if by_pixels else -(-threads // ocbs)
    task_rows, task_cols = pixels_of_task(at, groups, rows, pixels, pixel_bytes, sharing, room)
    tasks = max(1, at.images * groups) * -(-at.oh // task_rows) * -(-at.ow // task_cols)
    packing = blocks_of_packing(pixels * vectors) if packs_planes else 0.0
    splits = splits_of_tasks(tasks, ocbs, threads, packing)
    # Each tile of a 1x1 convolution has a contiguous panel, unless whole rows are packed faster than a tile's few
    # pixels.
    in_blocks = at.kh == at.kw == at.depth == 1 and cb > packed_as_one(types, tile.dot) and not tile.in_place
    by_tiles = (in_blocks and shared.dense) or packs_planes
    panel = pixels if by_tiles else task_cols
    w_rows, w_cols = at.window(task_rows, panel)
    windows = 0 if tile.in_place else -(-task_cols // panel) * pixel_bytes * w_rows * w_cols
    if not shared.dense:
        windows += (tile.lanes - 1) * shared.pitch * itemsize  # planes are transposed in whole vectors of pixels
    tiles = -(-task_rows // rows) * -(-task_cols // pixels)
    k_blocks = _k_blocks(cache, weights * width, tiles, tile)
    kept = 3 + (tiles if k_blocks > 1 else 0)
    scratch = -(-windows // 128) * 128 + 256 + kept * tile.shape.lines * width * itemsize
    return fill(
        ConvBlocking,
        tile,
        task_rows=task_rows,
        task_cols=task_cols,
        splits=splits,
        ocbs=ocbs,
        panel=panel,
        window_rows=w_rows,
        window_cols=w_cols,
        scratch=scratch,
        k_blocks=k_blocks,
    )


def _k_blocks(cache: int, weights: int, tiles: int, tile: ConvTile) -> int:
    """How many blocks the steps of a reduction are taken in.

    cache: bytes of the second level. weights: bytes that each of the `tiles` reads.

    The next tile reads the same weights again. A longer reduction has evicted them by then from the second-level cache,
    which holds the next weights and the windows too.
    """
    most = cache // 8
    if weights <= most or tiles == 1 or not tile.shared.dense or tile.dot.is_matrix:
        return 1
    return -(-2 * weights // most)


def fills_units(problem: Conv2dProblem, src: Geometry, unit: int) -> bool:
    """Whether so many channels of a group, from a multiple of these on, are neighbours that fill 32 bits in a source.

    unit: `packed_as_one`.
    """
    if unit == 1:
        return True
    ic = problem.group_ic
    return unit * src.channel == ELEMENT and src.length % unit == 0 and (problem.g == 1 or ic % unit == 0)


def _ends_inside(problem: Conv2dProblem, src: Geometry, types: Types, dot: Dot) -> bool:
    """Whether the last element of a pixel's channels holds other values: of the next pixel, or from after the array.

    With floats, the source's padding counts too: it may hold NaN, and zero weights do not remove that.
    """
    return problem.group_ic % dot.channels > 0 and (types.acc.is_float or src.length == NO_BLOCK)


def is_converted(types: Types, dot: Dot) -> bool:
    """Whether a packed window is another than the source's bytes."""
    if types.src.is_packed:
        return True
    return dot.itemsize not in (0, types.src.itemsize) or dot.shift(types.src) != 0


def _source_block(problem: Conv2dProblem, src: Geometry, unit: int) -> int:
    """Channels that are packed together: contiguous in the source, except where a group begins within its blocks.

    In a blocked source, a power of two that divides the block: a vector of 16 of 24 channels would span two blocks.
    unit: channels that are packed as one, of a source that has its channels in such units.
    """
    units = -(-problem.group_ic // unit)
    if units <= 4 and src.length == NO_BLOCK:
        return units * unit  # few channels are packed without padding, but for a source that has it in the same order
    block = math.gcd(src.length // unit, 4 if units <= 4 else 16)
    # Groups of 8 or 24 channels are whole half blocks: these need no padding, and none spans two of the source's
    # blocks. (No block of bytes may.)
    whole = math.gcd(block, units)
    return unit * (whole if problem.g > 1 and (unit > 1 or 2 * whole == block) else block)


ELEMENT = 4  # bytes of what is broadcast where a multiply-accumulate takes several channels


def is_read_in_place(machine: Machine, problem: Conv2dProblem, at: Space, src: Geometry, pixels: int) -> bool:
    """Whether tiles may read the source where it is: the rows of a 1x1 convolution, if groups divide no block.

    Rows of images (HWCN) are read so where each channel has its own: to pack them is a short copy for each.
    They are not if a tile's lines would evict each other from the first-level cache: 14 pixels that are 4 KiB apart
    take four times as long.
    """
    if at.axes == ("", "hw", "n"):
        return src.length == 1
    if at.oh > 1 or at.axes[2] not in ("hw", "hwn") or cuts_blocks(problem, src):
        return False
    return fit_in_ways(machine, src.along(at.axes[2]), pixels)


def cuts_blocks(problem: Conv2dProblem, src: Geometry) -> bool:
    """Whether groups begin inside a block of the source."""
    return bool(problem.g > 1 and src.length not in (1, NO_BLOCK) and problem.group_ic % src.length)


def fit_in_ways(machine: Machine, apart: int, pixels: int) -> bool:
    """Whether the cache lines of so many pixels, so many bytes apart, stay in the first-level cache together."""
    known = machine.profile
    return pixels <= known.ways * known.sets_reached(apart) - 2


def store_width(dst: Geometry, at: Space, itemsize: int, lanes: int, groups_of: int) -> int:
    """Contiguous channels that a tile stores at once; 1 where it stores planes instead, transposed in registers.

    0 where it can do neither, and is scattered. Its pixels are then not neighbours in a plane, blocks have an odd
    number of channels, or groups begin or end inside a store. groups_of: channels of a group; 0: there is one.
    """
    if dst.length == 1:
        return 1 if dst.along(at.axes[2]) == itemsize else 0
    width = math.gcd(dst.length, lanes)
    if dst.length == NO_BLOCK:
        return width
    return 0 if width == 1 or groups_of % width else width


def has_parts(dst: Geometry, stored: int, width: int, groups_of: int) -> bool:
    """Whether the stores (`store_width`) of tiles of `width` channels are at uneven distances.

    They are where a tile spans a block and a part of the next. With blocks of a power of two none does (see
    `tile_of_least_time`).
    """
    if stored <= 1 or dst.length in (stored, NO_BLOCK):
        return False
    return bool(dst.length % width or groups_of % width)


UNLIKE = 1.2  # how much more time another tile than the anchor's takes at least, to be compiled in its place
COLUMNS, MOST_ROWS = (7, 4), 4  # of tiles for any size, beside the most pixels that fit into the registers
MOST_WINDOW = 1 << 30  # bytes of a tile's window


def straddles_blocks(problem: Conv2dProblem, dst: Geometry, stored: int, lanes: int, width: int) -> bool:
    """Whether tiles of `width` channels would span two of the destination's blocks, as none may.

    But where they cover whole ones, or these are of no power of two. Groups that are no whole tiles begin inside a
    block.
    """
    if not (stored == lanes < dst.length < NO_BLOCK) or dst.length & (dst.length - 1):
        return False
    return dst.length % width > 0 or (problem.g > 1 and problem.group_oc % width > 0)


def why_not_window(blocking: ConvBlocking) -> str | None:
    """Why tiles cannot pack their windows: taps that are dilated far apart have more between them than fits."""
    fits = blocking.scratch <= MOST_WINDOW
    return None if fits else f"needs {blocking.scratch:.1e} bytes for a tile's window, with the pixels between its taps"


def tile_of_least_time(
    request: Request, at: Space, dst: Geometry, stored: int, lanes: int, dot: Dot, binds: bool, of: int = 0
) -> TileShape:
    """The tile of least predicted time, by the machine's profile.

    of: vectors that it has to have; 0 for any number.
    binds: whether loads limit a tile of one vector, so that others are preferred: it has more loads than multiply-adds.
        Two multiply-adds of half vectors are issued in a cycle, but no more loads.
    """
    p, m = request.problem, request.machine
    tiles = tuple(
        (vectors, most, binds and vectors == 1 and p.group_oc > lanes)
        for vectors, most in tiles_of(dot, m.isa)
        if of in (0, vectors) and not straddles_blocks(p, dst, stored, lanes, vectors * lanes)
    )
    like = None if request.anchor is None else blocking(request.at_anchor).shape
    tiles = tuple(tile for tile in tiles if like and tile[0] == like.vectors) or tiles
    return _least_tile(m, p, at, request.types.has_finite_weights, tiles, lanes, dot, like)


@bounded_cache
def _least_tile(
    machine: Machine, p, at: Space, finite: bool, tiles: tuple[Any, ...], lanes: int, dot: Dot, like: TileShape | None
) -> TileShape:
    """`tile_of_least_time` among (vectors, the most pixels, whether loads limit it): one for most pairs of layouts.

    finite: whether weights are known to be. like: the anchor's tile.
    """
    rates, oc, elements = machine.profile.by(name_of(dot)), p.group_oc, -(-p.group_ic // dot.channels)
    best: tuple[bool, float, int, int, tuple[int, int, int]] | None = None
    for vectors, most, bound in tiles:
        is_far, ocbs = are_far(machine, elements * p.kh * p.kw, vectors), -(-oc // (vectors * lanes))
        for r, pixels, taps, count in _tiles(at, finite, most, like):
            reduced = elements * taps * rates.step(r * pixels, vectors, is_far=is_far)
            seconds, shape = reduced + rates.end(r * pixels * vectors), (r, pixels, vectors)
            seconds *= count * ocbs * (1.0 if like is None or shape == like[:3] else UNLIKE)
            if best is not None and not best[0] and seconds > 1.00001 * best[1]:
                continue
            level = float(f"{seconds:.6e}")  # of sums that are equal but for their rounding
            score = bound, level, abs(vectors - 2), -r * pixels, shape
            if best is None or score < best:
                best = score
    assert best is not None
    return TileShape(*best[4])


@bounded_cache
def _tiles(at: Space, finite: bool, most: int, like: TileShape | None) -> tuple[tuple[int, int, float, int], ...]:
    """(rows, pixels, taps on average, how many) of the tiles of `tile_sizes`, which layers of one size share.

    finite: whether weights are known to be.
    """
    return tuple(
        (rows, pixels, kept_taps(at, finite, rows, pixels).average, -(-at.oh // rows) * -(-at.ow // pixels))
        for rows, pixels in tile_sizes(at, most, like)
    )


def tile_sizes(at: Space, most: int, like: TileShape | None) -> Iterator[Pair]:
    """(rows, pixels) of tiles of at most so many pixels: that share rows evenly, or, with an anchor, for any size.

    like: the anchor's tile, or None.
    """
    if like is None:
        least = -(-at.ow // most)
        for pixels in (-(-at.ow // count) for count in range(least, least + 3)):
            for rows in {min(at.oh, most // pixels), 1}:
                yield rows, pixels
        return
    # Tiles of one column are for images that have no room for others.
    sizes = most, *(COLUMNS if at.ow >= COLUMNS[-1] else (1,))
    shapes = ((rows, size) for size in sizes for rows in (min(most // size, MOST_ROWS), 1))
    for rows, pixels in dict.fromkeys([(like.rows, like.pixels), *shapes]):
        if rows <= at.oh and pixels <= at.ow and 0 < rows * pixels <= most:
            yield rows, pixels
