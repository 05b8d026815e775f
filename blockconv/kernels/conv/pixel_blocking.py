"""The blocking of direct convolution with vectors along pixels: the tile, the pixels of a task, what is packed."""

from __future__ import annotations

import functools
import math
from typing import NamedTuple

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import ElementType
from blockconv.kernels.common.geometry import geometry
from blockconv.kernels.conv.blocking import (
    L1_SETS,
    L1_WAYS,
    Blocking,
    pixels_of_task,
    room_for_window,
    tasks_wanted,
    tiles_of_registers,
)
from blockconv.kernels.conv.space import Space, is_pointwise, space

__all__ = ["blocking", "step_cycles", "why_not"]

LINE = 64  # bytes of a cache line


class _Tile(NamedTuple):
    """`rows` rows of `vectors` vectors of `lanes` pixels, by output channels."""

    rows: int
    vectors: int
    lanes: int
    channels: int


def why_not(problem: Conv2dProblem, src: Layout, dst: Layout, element: ElementType) -> str | None:
    """Why vectors cannot run along the pixels of a row, or the images of a pixel."""
    p, at = problem, space(problem, src, dst)
    for layout, shape in ((src, p.src_shape), (dst, p.dst_shape)):
        lies = geometry(layout, shape, element.itemsize)
        if lies.length != 1 or lies.along(at.axes[2]) != element.itemsize:
            return f"is for layouts in which a channel's neighbouring pixels lie together, not for {layout}"
    if at.kw > 1 and at.sw > 1:
        return f"is for horizontal stride 1, not {at.sw}"
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
    oc, ic = p.oc // p.g, p.ic // p.g
    tile = _tile(oc, at, element)
    rows, pixels, width = tile.rows, tile.vectors * tile.lanes, tile.channels
    ocbs = -(-oc // width)
    in_place = is_pointwise(p) and _stays_in_cache(p, src, tile, itemsize)
    pixel_bytes = ic * at.depth * itemsize
    weights, whole = ic * at.depth * at.kh * at.kw * itemsize, pixel_bytes * math.prod(at.window(at.oh, at.ow))
    by_pixels = weights * oc <= pixel_bytes * at.ih * at.iw
    room = target.second_level_cache() // 4 if by_pixels else room_for_window(weights * width, whole)
    if in_place:
        room = L1_SETS * L1_WAYS * LINE // 2
    sharing = threads if by_pixels else -(-threads // ocbs)
    task_rows, task_cols = pixels_of_task(at, p.g, rows, pixels, pixel_bytes, sharing, room)
    tasks = max(1, at.images * p.g) * -(-at.oh // task_rows) * -(-at.ow // task_cols)
    panel = pixels if at.kh == at.kw == at.depth == 1 and not in_place else task_cols
    w_rows, w_cols = at.window(task_rows, panel)
    windows = 0 if in_place else -(-task_cols // panel) * pixel_bytes * w_rows * w_cols
    return Blocking(
        rows=rows,
        pixels=pixels,
        vectors=width,
        lanes=1,
        cb=1,
        store_width=1,
        task_rows=task_rows,
        task_cols=task_cols,
        splits=min(ocbs, -(-tasks_wanted(threads) // tasks)),
        ocbs=ocbs,
        in_place=in_place,
        panel=panel,
        window_rows=w_rows,
        window_cols=w_cols,
        scratch=-(-windows // 128) * 128 + 256 + 3 * rows * pixels * width * itemsize,
        pixel_lanes=tile.lanes,
    )


def _stays_in_cache(problem: Conv2dProblem, src: Layout, tile: _Tile, itemsize: int) -> bool:
    """Whether what a tile reads of the source stays in the first-level cache where it is, for all output channels."""
    channels, block = problem.ic // problem.g, geometry(src, problem.src_shape, itemsize).block
    lines = tile.rows * (-(-tile.vectors * tile.lanes * itemsize // LINE) + 1)
    sets = L1_SETS // math.gcd(L1_SETS, block // LINE) if block % LINE == 0 else L1_SETS
    return channels * lines <= sets * L1_WAYS // 2


def step_cycles(rows: int, vectors: int, channels: int, vector_bytes: int) -> float:
    """Cycles of a step of the reduction: multiply-adds, loads or latency, whichever binds."""
    isa = target.isa()
    fma = 1.0 if isa.halves and vector_bytes == isa.vector_bytes else 0.5
    return max(rows * vectors * channels * fma, (rows * vectors + channels) / 2, 4.0) + 0.25


TILE_CYCLES = 30.0  # that a tile takes beside its reduction


def _tile(oc: int, at: Space, element: ElementType) -> _Tile:
    """The tile of least predicted time."""
    depth = at.kh * at.kw * at.depth
    best: tuple[float, int, _Tile] | None = None
    for lanes in _lanes(element):
        for held, most in tiles_of_registers():
            for vectors in range(1, held + 1):
                rows = held // vectors
                if rows * vectors < held or rows > at.oh or vectors * lanes > at.ow:
                    continue
                ocbs = -(-oc // most)
                channels = -(-oc // ocbs)
                tiles = ocbs * -(-at.oh // rows) * -(-at.ow // (vectors * lanes))
                cycles = step_cycles(rows, vectors, channels, lanes * element.itemsize)
                score = (tiles * (64 * depth * cycles + TILE_CYCLES), abs(held - 2), _Tile(rows, vectors, lanes, channels))
                if best is None or score < best:
                    best = score
    assert best is not None
    return best[2]
