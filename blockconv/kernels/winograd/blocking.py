"""How a Winograd convolution is cut into tasks: blocks of tiles, chunks of output channels, scratch."""

import math
from typing import NamedTuple

from blockconv.core.checks import Pair
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.python import bounded_cache
from blockconv.kernels.common.dot import MULTIPLY_ADD, Dot, dot_of_words
from blockconv.kernels.common.geometry import Geometry, geometry
from blockconv.kernels.common.request import shared_sizes
from blockconv.kernels.common.tasks import splits_of
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.winograd.arguments import HEADER_BYTES, WinogradScratch
from blockconv.kernels.winograd.codegen import ELEMENT
from blockconv.kernels.winograd.codegen_finish import ROW_PIXELS
from blockconv.kernels.winograd.transforms import Form
from blockconv.machine.machine import Machine

ITEMSIZE = ELEMENT.itemsize  # of a product, and of the channel, or the pair, that a multiply-accumulate takes
MOST_SCRATCH = 8 << 20  # bytes that the transformed source of a block of tiles may take
CHUNK = 4  # vectors of output channels whose products are held between the second and the third stage
# By the machine's registers and the vectors of output channels: the tiles that are in registers with these.
_TILE_PIXELS = {32: {1: 28, 2: 14, 3: 9, 5: 5}, 16: {1: 12, 2: 6}}
# By the machine's registers, where vectors are of images: accumulators, and the fewest output channels that a loaded
# vector is multiplied for.
_IMAGE_TILES = {32: (24, 8), 16: (12, 4)}
LEAST_IMAGES = 4  # of a vector
WINDOW = 64 << 10  # bytes of a window of the source, at most (of a single tile's more, if need be)
FEW_EDGES = 0.25  # of an image's tiles: where pixels are vectors, fewer at its edge are read without windows
COLUMNS = 16  # neighbouring pixels of planes that are transposed together, at most
STEP = 0.3  # of such a tile's channel that a step of the reduction takes beside its products


class TileWindow(NamedTuple):
    """The part of a source that is gathered at once, for neighbouring tiles of an image (see `source.py`).

    rows, cols: of tiles, at most; more than one row where all columns fit.
    leading: pixels from a row to the next.
    height: rows of pixels.
    """

    rows: int
    cols: int
    leading: int
    height: int


class WinogradBlocking(NamedTuple):
    """A task is a block of tiles of a set of groups and a share (one of `splits`) of their output channels.

    images: of a vector, which then holds one channel of each, and a tile is of as many images; 0: vectors are of
        channels.
    lanes: of a vector of products.
    src_lanes: of the transformed source; `transform_lanes` are transformed together.
    dot: the multiply-accumulate; for integers it takes pairs of channels, 16 bits each.
    set_groups: groups of a set, so many that their channels are whole vectors; there are `sets`.
    ic_block: channels of a group that one reduction step takes, as many as are always in one vector.
    shared: a set is one vector of small groups, as many channels out as in, whose weights stay in registers.
    tile_pixels: tiles that are in registers together, with `tile_channels` of a block's output channels, which are
        `vectors` vectors of `out_lanes`.
    ocbs: blocks of a group's output channels.
    chunk: blocks whose products are held before they are transformed.
    tile_rows, tile_cols: tiles of an image.
    tiles: of all images.
    block_tiles: of a block.
    window: where these are gathered.
    """

    form: Form
    dot: Dot
    images: int
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
    tile_channels: int
    ocbs: int
    splits: int
    chunk: int
    tile_rows: int
    tile_cols: int
    tiles: int
    block_tiles: int
    window: TileWindow
    scratch: WinogradScratch

    @property
    def scratch_bytes(self) -> int:
        """Bytes of a worker's scratch, which ends with the held products."""
        return self.scratch.products + self.form.positions * self.scratch.products_position

    @property
    def width(self) -> int:
        """Output channels of a block, which are multiplied together."""
        return self.vectors * self.out_lanes

    @property
    def edge(self) -> float:
        """The share of an image's tiles that are at its edge."""
        return 1 - max(0, self.tile_rows - 2) * max(0, self.tile_cols - 2) / (self.tile_rows * self.tile_cols)

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
        return odd_lines(self.elements(problem.group_ic) * self.width * ITEMSIZE)

    def elements(self, channels: int) -> int:
        """Elements that a multiply-accumulate takes so many channels as."""
        return -(-channels // self.dot.channels)

    @property
    def itemsize(self) -> int:
        """Bytes of a channel of the transformed source."""
        return ITEMSIZE // self.dot.channels

    @property
    def src_channels(self) -> int:
        """Channels of a vector of the transformed source."""
        return 1 if self.images else self.src_lanes

    @property
    def block_vectors(self) -> float:
        """Vectors of a tile's products with a block of output channels."""
        return self.width if self.images else self.width / self.lanes

    def contiguous(self, strides: Geometry, lanes: int) -> tuple[int, bool]:
        """(elements of a vector that a load or a store takes, whether they are at uneven distances).

        In vectors of channels, they are the most that divide both a block and a vector. Distances are uneven where a
        block ends within a vector that begins in it.
        """
        width = lanes if self.images else min(lanes, strides.length & -strides.length)
        return width, not self.images and width not in (lanes, strides.length)

    def wei_ocb(self, problem: Conv2dProblem) -> int:
        """Bytes from a block of output channels' weights to the next."""
        return self.wei_positions * self.wei_position(problem)

    def wei_bytes(self, problem: Conv2dProblem) -> int:
        """Bytes of the weights of all groups, with the groups that the last set lacks."""
        return self.sets * self.set_ocbs * self.wei_ocb(problem)


def vector_images(machine: Machine, problem: Conv2dProblem, src: Layout, dst: Layout) -> int:
    """Images of a vector, where a channel's images are contiguous in source and destination; else 0.

    A last vector of fewer images is moved back to be whole.
    """
    p = problem
    together = all(geometry(layout, shape, 1).n == 1 for layout, shape in ((src, p.src_shape), (dst, p.dst_shape)))
    images = min(machine.lanes(ITEMSIZE), 1 << p.n.bit_length() >> 1)
    return images if together and images >= LEAST_IMAGES else 0


@bounded_cache
def blocking(
    machine: Machine,
    problem: Conv2dProblem,
    dst: Layout,
    m: int,
    threads: int,
    exact: bool = False,
    images: int = 0,
    shared: bool = False,
) -> WinogradBlocking:
    """How a problem is cut on a machine. The order of sums does not depend on the threads.

    exact: of integers. images: as in `WinogradBlocking`. shared: by kernels for any size (`Request.anchor`).
    """
    p, form, isa = problem, Form(m, problem.sh, exact), machine.isa
    dot, wei_lanes = dot_of_words(isa) if exact else MULTIPLY_ADD, machine.lanes(ITEMSIZE)
    lanes = images or wei_lanes
    src_lanes = lanes * dot.channels
    ic, oc, oc_padded = p.group_ic, p.group_oc, dst.padded_shape(p.dst_shape)[1]
    set_groups = 1 if p.g == 1 or images else lanes // math.gcd(lanes, ic, oc)
    sets, src_vectors = -(-p.g // set_groups), ic if images else -(-set_groups * ic // src_lanes)
    out_lanes, vectors = (ic, 1) if _is_shared(p, wei_lanes) else _block_vectors(machine, p, wei_lanes)
    width = vectors * out_lanes
    ocbs, tile_rows, tile_cols = -(-(oc_padded if p.g == 1 else oc) // width), -(-p.oh // m), -(-p.ow // m)
    tiles = max(1, -(-p.n // (images or 1)) * tile_rows * tile_cols)
    tile_bytes, registers = form.positions * src_vectors * lanes * ITEMSIZE, machine.registers
    held, few = _held_tiles(registers, vectors, width, images), _most_tiles(machine, tile_bytes, set_groups * oc)
    at_most = _most_tiles_of_images(tile_bytes, tiles, held) if images else few
    tile_pixels, block_tiles = _tile_block(tiles, at_most, held, -(-threads // (sets * ocbs)), shared)
    most = max(1, ic // 2 // width) if images else CHUNK // vectors
    splits, chunk = _split_and_chunk(set_groups, sets * -(-tiles // block_tiles), ocbs, threads, most)
    # A group's last block may be wider than what is left of the group; the last set has the destination's padding too.
    window = _window(form, tile_rows, tile_cols, p.pw, wei_lanes * ITEMSIZE)
    row = (set_groups - 1) * oc + min(chunk, ocbs) * width + max(0, oc_padded - sets * set_groups * oc)
    return WinogradBlocking(
        form=form,
        dot=dot,
        images=images,
        lanes=lanes,
        src_lanes=src_lanes,
        # A transform spills, and to store a half costs half: 41 ns, not 70.
        transform_lanes=min(src_lanes, wei_lanes * dot.channels // 2) if isa.halves else src_lanes,
        set_groups=set_groups,
        sets=sets,
        ic_block=wei_lanes * dot.channels if set_groups == 1 else math.gcd(lanes, ic),
        shared=_is_shared(p, wei_lanes) and not images,
        out_lanes=out_lanes,
        vectors=vectors,
        tile_pixels=tile_pixels,
        tile_channels=_tile_channels(registers, width, tile_pixels) if images else width,
        ocbs=ocbs,
        splits=splits,
        chunk=chunk,
        tile_rows=tile_rows,
        tile_cols=tile_cols,
        tiles=tiles,
        block_tiles=block_tiles,
        window=window,
        scratch=_scratch(form, lanes, window, block_tiles, src_vectors, row if images else -(-row // lanes), images),
    )


def reads_windows(source: Geometry, at: WinogradBlocking) -> bool:
    """Whether windows of the source are of several tiles, since most of them are gathered."""
    width, _ = at.contiguous(source, at.src_lanes)
    return width < at.src_lanes or (at.edge > FEW_EDGES and not at.images)


def _tile_block(tiles: int, at_most: int, held: int, tasks: int, shared: bool) -> Pair:
    """(tiles in registers together, tiles of a block), for so many tasks at least. held: the most in registers.

    tasks: more than one where there are more threads than blocks of output channels, so that they share the tiles too.
    """
    wanted = -(-tiles // max(-(-tiles // at_most), min(tiles, tasks)))
    tile_pixels = -(-wanted // -(-wanted // held))
    if shared:
        sizes = [size for size in shared_sizes(held) if size <= wanted]
        tile_pixels = min(sizes, key=lambda size: (-(-wanted // size) * (size + 1), -size))
    return tile_pixels, min(tiles, -(-wanted // tile_pixels) * tile_pixels)


def _split_and_chunk(set_groups: int, blocks: int, ocbs: int, threads: int, most: int) -> Pair:
    """(tasks that share the output channels of each of so many blocks of tiles, blocks of these held together).

    most: that are held. With images in vectors, sources have a vector for each channel, and products take half as much
    as they do.
    """
    if set_groups > 1:
        return 1, set_groups * ocbs
    splits = splits_of(blocks, ocbs, threads, min(ocbs, -(-threads // blocks)))
    return splits, min(-(-ocbs // splits), most)


def _held_tiles(registers: int, vectors: int, width: int, images: int) -> int:
    """Tiles that are in registers together, at most, with a block of so many output channels, or a part of it."""
    if not images:
        return _TILE_PIXELS[registers][vectors]
    accumulators, fewest = _IMAGE_TILES[registers]
    return accumulators // math.gcd(width, fewest)


def _tile_channels(registers: int, width: int, tiles: int) -> int:
    """Output channels of a block that are in registers with so many tiles of images, which divide the block."""
    accumulators, _ = _IMAGE_TILES[registers]
    return max(k for k in range(1, width + 1) if width % k == 0 and k * tiles <= accumulators)


def _is_shared(problem: Conv2dProblem, lanes: int) -> bool:
    """Whether the groups of a vector have their weights in registers."""
    ic, oc = problem.group_ic, problem.group_oc
    return problem.g > 1 and ic == oc and lanes % ic == 0


def _block_vectors(machine: Machine, problem: Conv2dProblem, lanes: int) -> Pair:
    """(lanes, vectors) of a block of output channels: halves of vectors, if these cost nothing and fewer are idle."""
    oc = problem.group_oc
    half, whole = lanes // 2, -(-oc // lanes)
    halves = 2 * whole - 1
    if problem.g > 1 and machine.isa.halves and oc <= halves * half and halves in _TILE_PIXELS[32]:
        return half, halves
    return lanes, min(2, whole)


def _window(form: Form, tile_rows: int, tile_cols: int, pw: int, pixel: int) -> TileWindow:
    """The window, which stays near the core. pixel: bytes of one, at most."""

    def side(tiles: int) -> int:
        return (tiles - 1) * form.step + form.side

    def fitting(most: int, across: int) -> int:
        """Rows of tiles, of so many pixels, that fit; or columns of one row, which is so many pixels high."""
        held = WINDOW // (across * pixel)
        return max(1, min(most, (held - form.side) // form.step + 1))

    cols = fitting(tile_cols, form.side)
    leading = max(side(cols), pw + COLUMNS)
    rows = fitting(tile_rows, leading) if cols == tile_cols else 1
    return TileWindow(rows, cols, leading, side(rows))


def _scratch(
    form: Form, lanes: int, window: TileWindow, tiles: int, sources: int, products: int, images: int
) -> WinogradScratch:
    """The scratch for so many tiles, with so many vectors of their sources and products each.

    images: of a vector; products are then stored channel by channel, each of all tiles.
    """
    m, vector = form.m, lanes * ITEMSIZE
    pixels = form.positions, window.height * window.leading, m * ROW_PIXELS  # of the source, of the destination
    v = HEADER_BYTES + odd_lines(max(pixels) * vector)
    v_position, products_position = odd_lines(tiles * sources * vector), odd_lines(tiles * products * vector)
    return WinogradScratch(
        v=v,
        v_position=v_position,
        products=v + form.positions * v_position,
        products_position=products_position,
        products_tile=vector if images else products * vector,
        products_channel=tiles * vector if images else ITEMSIZE,
    )


def odd_lines(nbytes: int) -> int:
    """At least as many bytes, an odd number of cache lines: data so far apart does not share cache sets."""
    return (-(-nbytes // LINE) | 1) * LINE


def _most_tiles(machine: Machine, tile_bytes: int, oc: int) -> int:
    """Tiles of a block, at most. tile_bytes: of a tile's transformed source.

    More use weights more often; fewer stay in the second-level cache, with the weights if these fit too.
    """
    often = 28 if tile_bytes * oc <= 8 * machine.second_level_cache else 56
    return max(1, min(often, MOST_SCRATCH // tile_bytes))


def _most_tiles_of_images(tile_bytes: int, tiles: int, held: int) -> int:
    """`_most_tiles` where these are of a vector of images: a block is no more than registers hold.

    It is the size with the least work, with what a step of the reduction takes beside its products.
    """
    most = max(1, min(held, MOST_SCRATCH // tile_bytes))
    return min(range(1, most + 1), key=lambda size: -(-tiles // size) * (size + STEP))
