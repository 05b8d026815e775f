"""The blocking of convolution with vectors along pixels: the tile, and the pixels of a task.

The source is always packed, so that the channels of a tile are neighbours. In the source they are a plane apart, each
in a page of its own. Packing is profitable from 16 output channels on. With one tap, a panel is a tile's pixels. With
more, windows of tiles overlap, and a task has one panel. The columns of a row that a tap reads are neighbours in it,
with strides too (`ConvBlocking.phases`). So the same vectors serve every tap, each from where that begins.

Few output channels leave most lanes of a vector of channels idle, in every layout. There vectors of pixels serve
layouts without planes too: packing transposes windows, and tiles are scattered.
"""

import math
from collections.abc import Iterator
from typing import NamedTuple

from blockconv.core.checks import Pair
from blockconv.core.python import bounded_cache
from blockconv.core.target import Isa
from blockconv.kernels.common.dot import tiles_of_registers
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.taps import kept_taps
from blockconv.kernels.common.tasks import tasks_wanted
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.conv.blocking import ConvBlocking
from blockconv.kernels.conv.dividing import pixels_of_task, splits_of_tasks
from blockconv.kernels.conv.space import Space, space
from blockconv.machine.machine import Machine
from blockconv.machine.profile import SCATTERED

SERVED = 3  # products of a loaded vector, without which loads, and not products, would bind


class _Tile(NamedTuple):
    """`rows` rows of `vectors` vectors of `lanes` pixels, by output channels."""

    rows: int
    vectors: int
    lanes: int
    channels: int

    @property
    def pixels(self) -> int:
        """Columns."""
        return self.vectors * self.lanes


def why_not(request: Request) -> Reason | None:
    """Why vectors cannot run along the pixels of a row, or the images of a pixel."""
    p, itemsize = request.problem, request.itemsize
    at, most = space_of(request), request.machine.lanes(itemsize) // 2
    for layout, strides in ((request.src, request.source), (request.dst, request.destination)):
        if contiguous_channels(strides, at, itemsize) and (p.g > 1 or p.oc > most):
            alike = f"or at most {most} output channels in one group, not {p.oc} in {p.g}"
            return f"needs contiguous neighbours along {at.axes[2]}, unlike {layout}, {alike}"
    if p.g > 1 and p.kh * p.kw > 1 and p.group_oc < SERVED:
        return f"needs groups of at least {SERVED} output channels, to reuse each loaded vector of pixels"
    least = min(_lanes(request.machine, itemsize))
    if at.ow < least:
        return f"needs rows of at least {least} output pixels, not {at.ow}"
    return None


def contiguous_channels(strides: Geometry, at: Space, itemsize: int) -> int:
    """Channels of a pixel, a power of two of them, that are contiguous; 0 where its neighbours are."""
    if strides.length == 1 and strides.along(at.axes[2]) == itemsize:
        return 0
    return strides.length & -strides.length if strides.channel == itemsize else 1


def space_of(request: Request) -> Space:
    """The space that tiles run in. Only the packing of planes finds the rows of a flat destination."""
    flat = space(request, strided=True)
    has_planes = not contiguous_channels(request.source, flat, request.itemsize)
    return flat if has_planes else space(request)


def _lanes(machine: Machine, itemsize: int) -> list[int]:
    """Lanes of a vector, and of half of one where that runs twice as fast."""
    lanes = machine.lanes(itemsize)
    return [lanes, lanes // 2] if machine.isa.halves else [lanes]


@bounded_cache
def blocking(request: Request) -> ConvBlocking:
    """The blocking of a problem on a machine. Tile sizes do not depend on the threads."""
    p, m, threads, itemsize = request.problem, request.machine, request.threads, request.itemsize
    at = space_of(request)
    oc, pixel_bytes = p.group_oc, p.group_ic * at.depth * itemsize

    def score(tile: _Tile) -> tuple[float, int]:  # of tiles whose times are equal but for their rounding, the largest
        cycles = float(f"{_cycles(request, at, tile, at.oh, at.ow):.3e}")
        return cycles, -tile.rows * tile.vectors * tile.channels

    tiles = [*_tiles(m, oc, at, itemsize)]
    if request.anchor is not None:
        # The anchor's tile, or one vector of pixels, which fits into any image.
        like = None if why_not(request.at_anchor) else blocking(request.at_anchor)
        own = like and (like.rows, like.pixels, like.width)
        tiles = [x for x in tiles if x.rows * x.vectors == 1 or (x.rows, x.pixels, x.channels) == own]
    tile = min(tiles, key=score)
    ocbs = -(-oc // tile.channels)
    room, images = m.second_level_cache // 4, at.images * p.g
    if at.oh == 1:
        task_rows, task_cols = 1, _columns_of_task(request, at, tile, room // pixel_bytes)
    else:
        task_rows, task_cols = pixels_of_task(at, p.g, tile.rows, tile.pixels, pixel_bytes, threads, room)
    tasks = images * -(-at.oh // task_rows) * -(-at.ow // task_cols)
    panel = tile.pixels if at.kh == at.kw == at.depth == 1 else task_cols
    phases, cols = _phases(at, panel)
    window_rows = at.window(task_rows, panel)[0]
    windows = -(-task_cols // panel) * phases * cols * window_rows * pixel_bytes
    return ConvBlocking(
        rows=tile.rows,
        pixels=tile.pixels,
        vectors=tile.channels,
        lanes=1,
        cb=1,
        store_width=SCATTERED if contiguous_channels(request.destination, at, itemsize) else 1,
        task_rows=task_rows,
        task_cols=task_cols,
        splits=splits_of_tasks(tasks, ocbs, threads),
        ocbs=ocbs,
        in_place=False,
        panel=panel,
        window_rows=window_rows,
        window_cols=cols,
        scratch=-(-windows // 128) * 128 + 256 + 3 * tile.rows * tile.pixels * tile.channels * itemsize,
        pixel_lanes=tile.lanes,
        phases=phases,
        # The rows of the one-tap problem, where its space differs from the space of the other kernels.
        line=p.ow if at != space(request) else 0,
    )


def _phases(at: Space, panel: int) -> Pair:
    """(phases, columns of each) of a row of a window for so many columns of the destination."""
    taps = [w * at.dw for w in range(at.kw)]
    return max(tap % at.sw for tap in taps) + 1, panel + max(tap // at.sw for tap in taps)


def _columns_of_task(request: Request, at: Space, tile: _Tile, most: int) -> int:
    """Columns, at most so many, of the largest task of one row, that leave the least to do to the busiest thread."""
    p, threads = request.problem, request.threads
    units, images = -(-at.ow // tile.pixels), at.images * p.g
    largest = min(max(1, most // tile.pixels), -(-units // -(-tasks_wanted(threads) // images)))
    # The least of the sizes that make the same number of tasks. Pricing takes time: of very many sizes it tries some.
    some = range(largest, 0, -max(1, largest // 64))
    sizes = {min(at.ow, -(-units // -(-units // size)) * tile.pixels) for size in some}

    def busiest(size: int) -> tuple[float, int]:
        tasks = images * -(-at.ow // size)
        return -(-tasks // threads) / tasks * _cycles(request, at, tile, 1, size), -size

    return min(sizes, key=busiest)


# ---------------------------------------------------------------- the tile, and what it costs

MOST_HELD = 8  # vectors of pixels of a tile
STEP_CYCLES = 0.25  # that a step of the reduction takes beside its loads and multiply-adds
PART_CYCLES = 60.0  # that it takes more where not all of its channels exist
SCATTERED_CYCLES = 1.5  # to move an element by itself
ZEROED_CYCLES = 6.0  # to write a vector of a pixel's padding
PART_SQUARES = 2.5  # that one takes as long as to transpose where its pixels or channels are masked
ROW_CYCLES, PLANE_ROW_CYCLES = 90.0, 5.0  # that a row takes beside its vectors: of pixels with channels, and of a plane
BLOCK_CYCLES = 40.0  # that a task takes for each of its blocks of output channels, beside their tiles


def seconds(request: Request, found: ConvBlocking, at: Space) -> float:
    """Predicted, on one thread."""
    tile = _Tile(found.rows, found.pixels // found.pixel_lanes, found.pixel_lanes, found.width)
    return _cycles(request, at, tile, found.task_rows, found.task_cols) * request.machine.cycle_seconds()


def _cycles(request: Request, at: Space, tile: _Tile, rows: int, cols: int) -> float:
    """Predicted, on one thread, of tasks of at most so many rows and columns."""
    p, machine, itemsize = request.problem, request.machine, request.itemsize
    ic, oc, lanes = p.group_ic, p.group_oc, machine.lanes(itemsize)
    down, along = -(-at.oh // rows), -(-at.ow // cols)
    tasks, columns = at.images * p.g * down * along, -(-at.ow // tile.pixels) / along
    ocbs, tiles = -(-oc // tile.channels), -(-at.oh // tile.rows) / down * columns
    steps = ic * kept_taps(at, request.types.has_finite_weights, tile.rows, tile.pixels).average
    end = machine.profile.rates.end(tile.rows * tile.vectors * tile.channels) / machine.cycle_seconds()
    step = _step_cycles(machine, tile, itemsize, overlap=p.kh * p.kw > 1)
    reduced = ocbs * (tiles * (steps * step + end) + BLOCK_CYCLES)
    reduced += tiles * PART_CYCLES * (oc % tile.channels > 0)
    if contiguous_channels(request.destination, at, itemsize):
        vectors = -(-(request.padded_oc - p.oc) // lanes)
        reduced += tiles * tile.rows * tile.pixels * (oc * SCATTERED_CYCLES + vectors * ZEROED_CYCLES)
    panel, panels = (tile.pixels, columns) if at.kh == at.kw == at.depth == 1 else (cols, 1)
    phases, each = _phases(at, panel)
    shuffle = machine.isa.vector_bytes / 64  # cycles: of narrower vectors several begin in one
    if channels := packed_channels(request.source, at, itemsize, lanes, ic):
        row = _transposed_cycles(lanes, shuffle, each, ic, channels)
    else:
        row = ic * _strided_cycles(lanes, shuffle, each, p.sw if at.axes[2] == "hw" else at.sw)
    return tasks * (reduced + panels * at.depth * at.window(rows, panel)[0] * phases * row)


def packed_channels(strides: Geometry, at: Space, itemsize: int, lanes: int, ic: int) -> int:
    """Contiguous channels of a pixel that packing transposes at once, a power of two; 0 where it moves planes."""
    return min(contiguous_channels(strides, at, itemsize), lanes, 1 << (ic - 1).bit_length())


def _transposed_cycles(lanes: int, shuffle: float, columns: int, ic: int, channels: int) -> float:
    """To pack so many columns of a row, from pixels of which so many channels are transposed at once."""
    whole = columns // lanes * (ic // channels)
    parts = -(-columns // lanes) * -(-ic // channels) - whole
    return ROW_CYCLES + (whole + PART_SQUARES * parts) * max(lanes, channels * (math.log2(channels) * shuffle + 2))


def _strided_cycles(lanes: int, shuffle: float, columns: int, stride: int) -> float:
    """To pack so many columns of a row of a plane: vectors are shuffled, or their elements loaded, if that is less."""
    return PLANE_ROW_CYCLES + -(-columns // lanes) * min((2 + 2.5 * stride) * shuffle, 4 * lanes)


def _step_cycles(machine: Machine, tile: _Tile, itemsize: int, overlap: bool) -> float:
    """Cycles of a step of the reduction: multiply-adds, loads, latency or instructions, whichever bind.

    overlap: vectors of taps overlap, so they begin anywhere, and those which two lines share are loaded twice.
    """
    isa, loaded, vector_bytes = machine.isa, tile.rows * tile.vectors, tile.lanes * itemsize
    products = loaded * tile.channels
    each = 2.0 if isa.halves and vector_bytes == isa.vector_bytes else 1.0  # halves that a vector is run as
    multiply_adds, loads = products * each / 2, loaded * each
    if overlap:
        # As the profile has it of the other microkernel, which broadcasts so many pixels against so many vectors.
        measured = machine.profile.rates.step(tile.channels, loaded, part=each / 2 if isa.halves else 1.0)
        multiply_adds = measured / machine.cycle_seconds()
        loads *= 1 + (vector_bytes - itemsize) / LINE
    # Without FMA a product is a copy, a multiplication and an addition, and to broadcast is to load and to shuffle.
    instructions = loaded + (products + tile.channels if isa.fma else 3 * products + 2 * tile.channels)
    return max(multiply_adds, (loads + tile.channels + 1) / 2, 4.0, instructions / 6) + STEP_CYCLES


def _held(isa: Isa, oc: int) -> Iterator[Pair]:
    """(vectors of pixels, the most output channels) of tiles that the registers hold: with all of a few, more vectors.

    Otherwise tiles of more channels load fewer vectors for the same products.
    """
    known = tiles_of_registers(isa, isa.fma)
    yield from known
    free = isa.tile_registers - (1 if isa.fma else 2)  # of a weight, and of a product
    for held in range(max(vectors for vectors, _ in known) + 1, MOST_HELD + 1):
        if free // held > oc:
            yield held, oc


def _tiles(machine: Machine, oc: int, at: Space, itemsize: int) -> Iterator[_Tile]:
    """Tiles that the registers hold; output channels are shared evenly."""
    for lanes in _lanes(machine, itemsize):
        for held, most in _held(machine.isa, oc):
            channels = -(-oc // -(-oc // most))
            for vectors in range(1, held + 1):
                if held % vectors == 0 and held // vectors <= at.oh and vectors * lanes <= at.ow:
                    yield _Tile(held // vectors, vectors, lanes, channels)
