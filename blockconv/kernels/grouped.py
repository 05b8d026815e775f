"""Grouped convolution with few channels a group: several groups to a vector of output channels (`shared`).

Where a group's output channels fill half a vector or less, dense tiles would leave most lanes idle. Here as many
whole groups as a vector holds are one group of the tiles: ResNeXt's 4 channels a group, RegNet's 8.
"""

from __future__ import annotations

import functools
import math

from blockconv import jit
from blockconv.kernels.cut import (
    ITEMSIZE,
    NO_BLOCK,
    Blocking,
    Space,
    destination_piece,
    geometry,
    pixels_of_task,
    space,
    why_not_window,
)
from blockconv.kernels.shared import Shared
from blockconv.kernels.table import BANDWIDTH, CYCLE, Row, WeightForm, store_cycles
from blockconv.kernels.tiles import bind_tiles
from blockconv.layout import NATIVE, Layout
from blockconv.problem import Conv2dProblem
from blockconv.runtime import Op

__all__ = ["ROWS"]

WIDEST = 4  # vectors that the source channels of a vector's groups may fill


def _sharing(problem: Conv2dProblem, lanes: int) -> int:
    """Groups that fit into a vector."""
    return lanes // (problem.oc // problem.g)


def _lanes(problem: Conv2dProblem, lanes: int) -> int:
    """Of a vector, or of half of one where that costs nothing and leaves a tenth of them less idle."""
    half, p = lanes // 2, problem
    if not jit.isa().halves or p.oc // p.g > half:
        return lanes
    total = {width: -(-p.g // _sharing(p, width)) * width for width in (lanes, half)}
    return half if 10 * total[half] <= 9 * total[lanes] else lanes


@functools.lru_cache(maxsize=4096)
def blocking(problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str, threads: int) -> Blocking:
    """How a problem is cut on this machine. Tile sizes do not depend on the threads."""
    isa, itemsize, p, at = jit.isa(), ITEMSIZE[dtype], problem, space(problem, src, dst)
    lanes, registers = _lanes(p, isa.vector_bytes // itemsize), 32 if isa.registers == 32 else 16
    count = _sharing(p, lanes)
    ic, oc = p.ic // p.g, p.oc // p.g
    channels = count * ic
    pitch = 1 << (channels - 1).bit_length() if channels < lanes else -(-channels // lanes) * lanes
    taps = at.kw if at.kw <= (7 if registers == 32 else 3) else 1
    shared = Shared(count, ic, oc, pitch, taps, at.dw if taps > 1 else 0)
    rows, pixels = _tile(at, registers - taps - 2)
    groups = -(-p.g // count)
    g_rows, g_cols = pixels_of_task(
        at, groups, rows, pixels, at.depth * pitch * itemsize, threads, jit.second_level_cache() // 4
    )
    w_rows, w_cols = at.window(g_rows, g_cols)
    window = at.depth * pitch * itemsize * w_rows * w_cols
    window += (lanes - 1) * pitch * itemsize  # planes are transposed in whole vectors of pixels
    scratch = -(-window // 128) * 128 + 256 + 3 * rows * pixels * lanes * itemsize
    piece = destination_piece(dst, lanes, groups, count * oc)
    cb = _source_block(channels, geometry(src, p.src_shape, itemsize).length, lanes)
    return Blocking(
        rows, pixels, 1, lanes, cb, piece, g_rows, g_cols, 1, 1, False, g_cols, w_rows, w_cols, scratch, shared=shared
    )  # fmt: skip


def _source_block(channels: int, length: int, lanes: int) -> int:
    """Channels of a vector's groups that are moved together: contiguous in the source, at most a vector."""
    return min(channels, lanes) if length == NO_BLOCK else math.gcd(channels, min(length, lanes))


def _tile(at: Space, registers: int) -> tuple[int, int]:
    """(rows, pixels) that fit into so many accumulators, in the fewest tiles; a few more cost less than a tile."""
    best: tuple[float, tuple[int, int]] | None = None
    for count in range(-(-at.ow // registers), -(-at.ow // registers) + 3):
        pixels = -(-at.ow // count)
        for rows in {min(at.oh, registers // pixels), 1}:
            tiles = -(-at.oh // rows) * -(-at.ow // pixels)
            score = tiles * (max(rows * pixels, 4) + 1.0), (rows, pixels)
            if best is None or score < best:
                best = score
    assert best is not None
    return best[1]


def _why_not(problem: Conv2dProblem, src: Layout, dst: Layout) -> str | None:
    p, lanes = problem, jit.isa().vector_bytes // ITEMSIZE["float32"]
    ic, oc = p.ic // p.g, p.oc // p.g
    if p.g == 1:
        return "is for groups"
    if ic == 1:
        return "is for groups of two input channels or more"
    if 2 * oc > lanes:
        return f"is for groups of at most {lanes // 2} output channels, not {oc}"
    if _sharing(p, lanes) * ic > WIDEST * lanes:
        return f"is for groups of at most {WIDEST * lanes // _sharing(p, lanes)} input channels, not {ic}"
    return why_not_window(blocking(problem, src, dst, "float32", 1))


def _weights(problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str) -> WeightForm:
    """[vector][channel][row][tap][groups of the vector][channels of a group]."""
    cut = blocking(problem, src, dst, dtype, 1)
    count, oc = cut.shared.groups, cut.shared.oc
    outer, inner = (
        ("A" if count > 1 else "a") + ("B" if oc > 1 else "b"),
        f"{count}a" * (count > 1) + f"{oc}b" * (oc > 1),
    )
    return WeightForm(Layout(f"{outer}cde{inner}"), cut.lanes, count)


def _bind(
    problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str, threads: int, act: int, residual: bool
) -> list[Op]:
    return bind_tiles(problem, src, dst, dtype, blocking(problem, src, dst, dtype, threads), act, residual)


def _cost(problem: Conv2dProblem, src: Layout, dst: Layout, threads: int) -> float:
    """Arithmetic in whole tiles at the rate of the machine's vectors, or the bytes moved, whichever is more."""
    p, cut, at = problem, blocking(problem, src, dst, "float32", threads), space(problem, src, dst)
    tiles = at.images * -(-p.g // cut.shared.groups) * -(-at.oh // cut.rows) * -(-at.ow // cut.pixels)
    flops = 2 * tiles * cut.rows * cut.pixels * cut.lanes * (p.ic // p.g) * p.kh * p.kw
    moved = 4 * (src.size(p.src_shape) + dst.size(p.dst_shape) + p.oc * (p.ic // p.g) * p.kh * p.kw)
    stored = store_cycles(dst, cut.piece) * CYCLE * tiles * cut.rows * cut.pixels
    rate = 7e9 * jit.isa().vector_bytes / 4  # of half vectors too: they are taken where they run twice as fast
    return 2e-6 + max(flops / rate + stored, moved / BANDWIDTH) / threads


ROWS = (
    Row(
        "conv_grouped",
        "conv2d",
        frozenset(NATIVE),
        frozenset(NATIVE),
        frozenset(ITEMSIZE),
        _why_not,
        _cost,
        _bind,
        _weights,
    ),
)
