"""How a depthwise convolution is cut: what vectors run over, the tile, the tasks."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

from blockconv import jit
from blockconv.kernels.cut import ITEMSIZE, NO_BLOCK
from blockconv.layout import Layout
from blockconv.problem import Conv2dProblem

__all__ = ["Cut", "cut"]

_NHWC, _CHWN4 = Layout("NHWC"), Layout("CHWN4")

MOST_COLUMNS = 4  # a strided load reads as many vectors
MOST_TAPS = 11  # that are unrolled
MOST_OUTPUTS = {32: 14, 16: 10}  # accumulators of a tile, by the machine's vector registers
LEAST_OUTPUTS = {32: 14, 16: 7}  # that hide latencies, and what a tile costs besides its arithmetic


@dataclass(frozen=True)
class Cut:
    """What vectors run over, and the tile; `depthwise_tile._Spec` says what most numbers are.

    batched: a pixel is the channels of a block of all images (CHWN4). pixel: elements from pixel to pixel.
    """

    lanes: int
    period: int
    columns: int
    inner: int
    loops: int
    unrolled: int
    taps: int
    stride: int
    dilation: int
    begin: int
    end: int
    edges: int
    masks: int
    piece: int
    masked: int
    batched: bool
    pixel: int
    span: int  # entries of the table that a task takes at the least

    def flops(self, problem: Conv2dProblem, dst: Layout) -> int:
        """Of whole tiles."""
        p = problem
        entries = -(-dst.padded_shape(p.dst_shape)[1] // self.period)
        if self.columns:
            tiles = -(-p.oh // self.unrolled) * -(-p.ow * self.pixel // (self.loops * self.lanes))
        else:
            tiles = (
                -(-p.oh // self.loops)
                * -(-p.ow // self.unrolled)
                * -(-(self.pixel if self.batched else 1) // self.lanes)
            )
        images = 1 if self.batched else p.n
        return 2 * images * entries * tiles * self.loops * self.unrolled * self.lanes * p.kh * p.kw

    def share(self, problem: Conv2dProblem, entries: int, images: int, threads: int) -> tuple[int, int]:
        """(entries, rows) of a task."""
        unit = self.unrolled if self.columns else self.loops
        span = min(entries, self.span)
        wanted = 1 if threads == 1 else 8 * threads
        tasks = images * -(-entries // span)
        chunks = min(-(-problem.oh // unit), -(-wanted // tasks))
        rows = -(-problem.oh // (chunks * unit)) * unit
        tasks *= -(-problem.oh // rows)
        # Threads that share a pixel's channels fetch each other's lines: only where there are too few rows.
        if tasks < min(wanted, 3 * threads):
            span = -(-span // min(span, -(-wanted // tasks)))
        return span, rows


class _Axis(NamedTuple):
    """One axis of a problem."""

    size: int
    out: int
    taps: int
    stride: int
    dilation: int
    pad: int


class _Tiling(NamedTuple):
    unrolled: int
    taps: int
    stride: int
    dilation: int
    begin: int
    end: int
    edges: int


@functools.lru_cache(maxsize=4096)
def cut(problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str) -> Cut | str:
    """The cut on this machine; a sentence where there is none."""
    p, isa = problem, jit.isa()
    lanes, m = isa.vector_bytes // ITEMSIZE[dtype], p.oc // p.ic
    block = NO_BLOCK if src == _NHWC else src.blocks[1]
    height = _Axis(p.ih, p.oh, p.kh, p.sh, p.dh, p.ph)
    width = _Axis(p.iw, p.ow, p.kw, p.sw, p.dw, p.pw)
    registers = 32 if isa.registers == 32 else 16
    most, least = MOST_OUTPUTS[registers], LEAST_OUTPUTS[registers]
    pixel, batched = block, src == _CHWN4 and block < lanes
    if batched:
        pixel *= p.n
    wide = block >= lanes
    if not wide and src != dst:
        return f"vectors run over the pixels of {src}, which are stored as they lie there, not as in {dst}"
    if wide or (batched and p.sw > 1 and pixel >= lanes):
        tiling = _tiling(width, most)
        loops = min(p.oh, -(-least // tiling.unrolled))
        piece = min(lanes, NO_BLOCK if dst == _NHWC or batched else dst.blocks[1])
        masked = int(src == _NHWC and p.ic % lanes > 0)
        period, span = (lanes, -(-p.oc // lanes) if src == _NHWC else block // lanes * m) if wide else (block, 1)
        return Cut(lanes, period, 0, 1, loops, *tiling, 1, piece, masked, batched, pixel, span)
    if p.sw > 1 and (p.sw > MOST_COLUMNS or lanes % pixel):
        return f"a vector of {lanes} elements cannot be made of pixels of {pixel}, {p.sw} apart"
    tiling = _tiling(height, most)
    loops = min(-(-p.ow * pixel // lanes), -(-least // tiling.unrolled))
    masks = 1 if isa.name == "avx512" or not tiling.taps else 2
    inner = pixel if p.sw > 1 else 1
    return Cut(lanes, block, p.sw, inner, loops, *tiling, masks, lanes, 0, batched, pixel, 1)


def _tiling(axis: _Axis, most: int) -> _Tiling:
    """The unrolled axis: as many outputs as registers hold, in the fewest tiles, edges known where they can be."""
    best: tuple[float, _Tiling] | None = None
    for outputs in range(1, min(most, axis.out) + 1) if axis.taps <= MOST_TAPS else ():
        edges = _edges(axis, outputs)
        if edges is not None:
            score = -(-axis.out // outputs) * (outputs + 1.0), _Tiling(outputs, *axis[2:5], *edges)
            if best is None or score[0] <= best[0]:
                best = score
    # Tiles of a few outputs where more would do: the edges are nearly everything.
    if best is not None and (best[1].unrolled > 3 or best[1].unrolled == axis.out or axis.out < 7):
        return best[1]
    count = -(-axis.out // most)
    return _Tiling(-(-axis.out // count), 0, 0, 0, 0, 0, 1)


def _edges(axis: _Axis, outputs: int) -> tuple[int, int, int] | None:
    """(begin, end, edges) of tiles of so many outputs; None if others than the first and last reach over an edge."""
    span = (outputs - 1) * axis.stride + (axis.taps - 1) * axis.dilation + 1
    last = (axis.out - outputs) * axis.stride - axis.pad
    end = max(0, last + span - axis.size)
    if outputs == axis.out:
        return axis.pad, end, 1
    # Tiles but the last begin at multiples of `outputs` that are less than out - outputs.
    before = (axis.out - outputs - 1) // outputs * outputs
    second, final = (at * axis.stride - axis.pad for at in (outputs, before))
    if last < 0 or (before and second < 0) or final + span > axis.size:
        return None
    return axis.pad, end, 1 if axis.pad == end == 0 else 3
