"""The blocking of 1x1 convolution with vectors along pixels: the tile, and the pixels of a task.

The source is always packed, in panels of a tile's pixels: a channel of a tile is then next to the one before it, where
the source has them a plane apart, each in a page of its own. That pays from 16 output channels on.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import NamedTuple

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import ElementType
from blockconv.kernels.common.geometry import geometry
from blockconv.kernels.conv.blocking import Blocking, pixels_of_task, tasks_wanted, tiles_of_registers
from blockconv.kernels.conv.space import Space, is_pointwise, space

__all__ = ["blocking", "cycles", "why_not"]


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


def why_not(problem: Conv2dProblem, src: Layout, dst: Layout, element: ElementType) -> str | None:
    """Why vectors cannot run along the pixels of a row, or the images of a pixel."""
    p, at = problem, space(problem, src, dst)
    if not is_pointwise(p):
        return "is for 1x1 without stride or padding"
    for layout, shape in ((src, p.src_shape), (dst, p.dst_shape)):
        lies = geometry(layout, shape, element.itemsize)
        if lies.length != 1 or lies.along(at.axes[2]) != element.itemsize:
            return f"is for layouts in which a channel's neighbouring pixels lie together, not for {layout}"
    least = min(_lanes(element))
    if at.ow < least:
        return f"is for rows of at least {least} pixels, not of {at.ow}"
    return None


def _lanes(element: ElementType) -> list[int]:
    """Of a vector, and of half of one where that runs twice as fast."""
    isa = target.isa()
    lanes = isa.vector_bytes // element.itemsize
    return [lanes, lanes // 2] if isa.halves else [lanes]


@functools.lru_cache(maxsize=4096)
def blocking(problem: Conv2dProblem, src: Layout, dst: Layout, element: ElementType, threads: int) -> Blocking:
    """The blocking of a problem on this machine. Tile sizes do not depend on the threads."""
    p, itemsize, at = problem, element.itemsize, space(problem, src, dst)
    oc, pixel_bytes = p.oc // p.g, p.ic // p.g * itemsize
    tile = min(_tiles(oc, at, element), key=lambda tile: _cycles(p, at, tile, at.oh, at.ow, itemsize))
    ocbs = -(-oc // tile.channels)
    room, images = target.second_level_cache() // 4, at.images * p.g
    if at.oh == 1:
        task_rows, task_cols = 1, _columns_of_task(p, at, tile, room // pixel_bytes, threads, itemsize)
    else:
        task_rows, task_cols = pixels_of_task(at, p.g, tile.rows, tile.pixels, pixel_bytes, threads, room)
    tasks = images * -(-at.oh // task_rows) * -(-at.ow // task_cols)
    windows = -(-task_cols // tile.pixels) * tile.pixels * task_rows * pixel_bytes
    return Blocking(
        rows=tile.rows,
        pixels=tile.pixels,
        vectors=tile.channels,
        lanes=1,
        cb=1,
        store_width=1,
        task_rows=task_rows,
        task_cols=task_cols,
        splits=min(ocbs, -(-tasks_wanted(threads) // tasks)),
        ocbs=ocbs,
        in_place=False,
        panel=tile.pixels,
        window_rows=task_rows,
        window_cols=tile.pixels,
        scratch=-(-windows // 128) * 128 + 256 + 3 * tile.rows * tile.pixels * tile.channels * itemsize,
        pixel_lanes=tile.lanes,
    )


def _columns_of_task(problem: Conv2dProblem, at: Space, tile: _Tile, most: int, threads: int, itemsize: int) -> int:
    """Columns, at most so many, of a task of one row, that leave the least to do to the busiest thread.

    The last task is moved back to be whole, and does some work again.
    """
    units, images = -(-at.ow // tile.pixels), at.images * problem.g
    largest = min(max(1, most // tile.pixels), -(-units // -(-tasks_wanted(threads) // images)))
    # Of the sizes that make the same number of tasks, the least.
    sizes = {min(at.ow, -(-units // -(-units // size)) * tile.pixels) for size in range(1, largest + 1)}

    def busiest(size: int) -> tuple[float, int]:
        tasks = images * -(-at.ow // size)
        return -(-tasks // threads) / tasks * _cycles(problem, at, tile, 1, size, itemsize), -size

    return min(sizes, key=busiest)


# ---------------------------------------------------------------- the tile, and what it costs

STEP_CYCLES = 0.25  # that a step of the reduction takes beside its loads and multiply-adds
TILE_CYCLES = 20.0  # that a tile takes beside its reduction
PART_CYCLES = 60.0  # that it takes more where not all of its channels exist
BLOCK_CYCLES = 40.0  # that a task takes for each of its blocks of output channels, beside their tiles
PACK_CYCLES = 6.0  # to pack a row of a panel, beside a cycle for each of its vectors


def cycles(problem: Conv2dProblem, at: Space, found: Blocking, itemsize: int) -> float:
    """Predicted, on one thread."""
    tile = _Tile(found.rows, found.pixels // found.pixel_lanes, found.pixel_lanes, found.width)
    return _cycles(problem, at, tile, found.task_rows, found.task_cols, itemsize)


def _cycles(problem: Conv2dProblem, at: Space, tile: _Tile, rows: int, cols: int, itemsize: int) -> float:
    """`cycles`, of tasks of so many rows and columns."""
    p = problem
    ic, tasks = p.ic // p.g, at.images * p.g * -(-at.oh // rows) * -(-at.ow // cols)
    oc, columns = p.oc // p.g, -(-cols // tile.pixels)
    ocbs, tiles = -(-oc // tile.channels), -(-rows // tile.rows) * columns
    reduced = ocbs * (tiles * (ic * _step_cycles(tile, tile.lanes * itemsize) + TILE_CYCLES) + BLOCK_CYCLES)
    reduced += tiles * PART_CYCLES * (oc % tile.channels > 0)
    packed = ic * rows * columns * (PACK_CYCLES + tile.vectors)
    return tasks * (reduced + packed)


def _step_cycles(tile: _Tile, vector_bytes: int) -> float:
    """Cycles of a step of the reduction: multiply-adds, loads, latency or instructions, whichever bind."""
    isa, loaded = target.isa(), tile.rows * tile.vectors
    products = loaded * tile.channels
    multiply_adds = products * (1.0 if isa.halves and vector_bytes == isa.vector_bytes else 0.5)
    # Without FMA a product is a copy, a multiplication and an addition, and to broadcast is to load and to shuffle.
    instructions = loaded + (products + tile.channels if isa.fma else 3 * products + 2 * tile.channels)
    return max(multiply_adds, (loaded + tile.channels + 1) / 2, 4.0, instructions / 6) + STEP_CYCLES


def _tiles(oc: int, at: Space, element: ElementType) -> Iterator[_Tile]:
    """Those that the registers hold; output channels are shared evenly."""
    for lanes in _lanes(element):
        for held, most in tiles_of_registers(target.isa().fma):
            channels = -(-oc // -(-oc // most))
            for vectors in range(1, held + 1):
                if held % vectors == 0 and held // vectors <= at.oh and vectors * lanes <= at.ow:
                    yield _Tile(held // vectors, vectors, lanes, channels)
