"""How a pool is cut: planes of inner elements, tables of windows, tasks.

To a pool, a tensor is an array [planes][rows][columns][inner], in which everything but inner may have any strides. So
layouts differ only in numbers. NCHW has N * C planes of 1 inner element, NHWC N planes of C, NCHW16 N * C/16 planes of
16. CHWN4 has C/4 planes of 4 * N, HWCN one plane of C * N.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.layout import Layout
from blockconv.core.problem import AdaptivePool2dProblem, Pool2dProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import ElementType
from blockconv.kernels.common.conversion import ConversionArguments, conversion_words
from blockconv.kernels.common.gathering import (
    FEW_SETS,
    TOGETHER,
    gathering_seconds,
    is_crowded,
    rows_that_stay,
    window_rows,
)
from blockconv.kernels.common.geometry import WindowAxis, geometry, window_axis
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.operands import POOL
from blockconv.kernels.common.request import Reason
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.pool.codegen import PoolTile
from blockconv.kernels.pool.kernels import PoolArgs
from blockconv.kernels.pool.reduction import MAXIMUM, SUM, PoolReduction, held_type
from blockconv.machine.machine import Machine
from blockconv.runtime import OWN_TABLE, Block

MOST_OUTPUTS = 8  # of a tile of pixels that are vectors or wider
MORE = 1.05  # times the fewest columns that another tile may read, so that sizes of images share tiles
MASKED = 2  # last vectors of columns that tiles mask at the least, so that sizes of images share kernels
MASK_VECTORS = 12  # the most that a kernel stores with one mask address
MOST_SHARED = 10  # columns of a tile that shares few: memory streams better through narrow tiles (1.2x at 112x112)
MOST_PICKED = 16  # vectors of a tile whose columns are picked from them
MOST_STRIDE, MOST_TAPS = 4, 5  # of windows whose columns are picked
MOST_UNROLLED = 3  # taps along an axis; more are a loop
SPARE = 8  # vector registers for anything but the columns of a tile
TASK_BYTES = 1 << 16  # of the source that a task reads at the least, if there are tasks enough
Problem = Pool2dProblem | AdaptivePool2dProblem

ANY_TYPE = ("float32", "float64", "bfloat16", "float16", "int8", "uint8")  # the element types that pools take


class PlaneView(NamedTuple):
    """A layout as [planes][rows][columns][inner]; inner elements are contiguous.

    outer, nearer: the two loops of planes, with strides in elements of the source and of the destination.
    exist: of each inner element in a plane of the last channel block, whether its channel exists.
    blocks: channel blocks that are planes of their own, `block_planes` planes from each other.
    """

    outer: Loop
    nearer: Loop
    inner: int
    exist: Block
    blocks: int
    block_planes: int

    @property
    def planes(self) -> int:
        return self.outer.size * self.nearer.size


def view(layout: Layout, src_shape: tuple[int, ...], dst_shape: tuple[int, ...]) -> PlaneView:
    """The view of a source and a destination in the same layout, with at most one block of channels.

    Only existing images of a block count.
    """
    images, channels = src_shape[:2]
    loops = [
        Loop(min(s.size, images) if s.dim == 0 else s.size, (s.stride, d.stride), s.dim, s.step)
        for s, d in zip(layout.axes(src_shape), layout.axes(dst_shape), strict=True)
    ]
    inner, split, channel = 1, len(loops), np.zeros(1, np.int64)
    for loop in reversed(loops):
        if loop.dim > 1 or (loop.size > 1 and loop.strides != (inner, inner)):
            break
        channel = np.add.outer(np.arange(loop.size) * (loop.step if loop.dim == 1 else 0), channel).ravel()
        inner *= loop.size
        split -= 1
    around = [loop for loop in loops[:split] if loop.dim < 2 and loop.size > 1]
    of_blocks = next((k for k, loop in enumerate(around) if loop.dim == 1), None)
    blocks, block_planes = 1, 1
    if of_blocks is not None:
        blocks, block_planes = around[of_blocks].size, math.prod(loop.size for loop in around[of_blocks + 1 :])
        channel = channel + (blocks - 1) * around[of_blocks].step
    one = Loop(1, (0, 0))
    outer, nearer = [one, one, *fused(around)][-2:]
    return PlaneView(outer, nearer, inner, np.where(channel < channels, 1, 0), blocks, block_planes)


# ---------------------------------------------------------------- windows


class Windows(NamedTuple):
    """Windows along an axis: each one's first element in the image, how many it covers, how many an average counts."""

    first: Block
    taps: Block
    counted: Block


def axis_of(problem: Problem, x: str) -> WindowAxis:
    """The axis "h" or "w"; windows of an adaptive pool have no one size."""
    if isinstance(problem, AdaptivePool2dProblem):
        return WindowAxis(getattr(problem, "i" + x), getattr(problem, "o" + x), 0, 0, 0, 0, 1)
    return window_axis(problem, x)


def windows(problem: Problem, x: str, outputs: Block | None = None) -> Windows:
    """The windows of these outputs along an axis, or of all; arrays, as an axis may have millions."""
    a = axis_of(problem, x)
    o = np.arange(a.out) if outputs is None else outputs
    if isinstance(problem, AdaptivePool2dProblem):
        first = o * a.size // a.out
        taps = -(-(o + 1) * a.size // a.out) - first
        return Windows(first, taps, taps)
    start = o * a.stride - a.begin
    before = -(np.minimum(0, start) // a.dilation)  # taps in the begin padding
    until = np.minimum(a.kernel, -((start - a.size) // a.dilation))
    taps = np.maximum(0, until - before)
    counted = taps
    if problem.divisor is not None:
        counted = np.full_like(o, problem.divisor if x == "h" else 1)
    elif problem.kind == "avg_include_padding":
        counted = np.minimum(a.kernel, -((start - a.size - a.end) // a.dilation))
    return Windows(start + before * a.dilation, taps, counted)


def all_taps(problem: Problem, x: str) -> int:
    """How many elements all windows along an axis cover: those of one window, but for windows at the ends."""
    a = axis_of(problem, x)
    if isinstance(problem, AdaptivePool2dProblem):
        return a.size + a.out - math.gcd(a.size, a.out)  # neighbours share an element where a bound is no integer
    inner_first = min(a.out, -(-a.begin // a.stride))
    fitting = (a.size + a.begin - (a.kernel - 1) * a.dilation - 1) // a.stride + 1
    inner_last = max(inner_first, min(a.out, fitting))
    ends = np.concatenate([np.arange(inner_first), np.arange(inner_last, a.out)])
    return (inner_last - inner_first) * a.kernel + int(windows(problem, x, ends).taps.sum())


# ---------------------------------------------------------------- one pool


@dataclass(frozen=True)
class PoolBlocking:
    """A pool of elements of one type, from a layout to a layout, and how it is cut for so many threads.

    For packed integers, problem and layouts are over pairs of channels.

    is_odd: the last pair has one channel.
    anchor: the problem whose kernels this one shares where it can, as `Request` has it.
    """

    problem: Any  # a Problem
    src: Layout
    dst: Layout
    element: ElementType
    machine: Machine
    threads: int = 1
    quantizations: tuple[Quantization, Quantization] | None = None  # of source and destination, of integers
    is_odd: bool = False
    anchor: Any = None

    @property
    def in_pairs(self) -> PoolBlocking:
        """The blocking of packed integers, over pairs of channels."""
        halves = (re.sub(r"\d+", lambda size: str(int(size[0]) // 2), layout.tag) for layout in (self.src, self.dst))
        channels = self.problem.ic
        problem = replace(self.problem, ic=-(-channels // 2))
        return replace(
            self, problem=problem, src=Layout(next(halves)), dst=Layout(next(halves)), is_odd=channels % 2 > 0
        )

    @cached_property
    def view(self) -> PlaneView:
        """The view of a pool that does not change the layout."""
        return view(self.src, self.problem.src_shape, self.problem.dst_shape)

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel of a plane."""
        return self.view.inner * self.itemsize

    @cached_property
    def strides(self) -> tuple[tuple[int, int], tuple[int, int]]:
        """(from a row to the next, from a pixel to the next) of the source and of the destination, in bytes.

        Where there is one pixel in a row, or one row, that stride is as if they were contiguous.
        """
        found = []
        for layout, shape in ((self.src, self.problem.src_shape), (self.dst, self.problem.dst_shape)):
            g, (height, width) = geometry(layout, shape, self.itemsize), shape[2:]
            col = self.pixel_bytes if width == 1 else g.col
            found.append((width * col if height == 1 else g.row, col))
        return found[0], found[1]

    @property
    def has_contiguous_pixels(self) -> bool:
        """Whether the pixels of a row follow one another, in the source and in the destination."""
        return all(col == self.pixel_bytes for _, col in self.strides)

    @property
    def has_contiguous_rows(self) -> bool:
        """Whether a plane is one contiguous extent, in the source and in the destination."""
        rows = self.problem.iw * self.pixel_bytes, self.problem.ow * self.pixel_bytes
        return self.has_contiguous_pixels and rows == tuple(row for row, _ in self.strides)

    @property
    def itemsize(self) -> int:
        return self.element.itemsize

    @property
    def held(self) -> ElementType:
        """The type that elements are reduced in."""
        return held_type(SUM if self.is_average else MAXIMUM, self.element)

    @property
    def is_widened(self) -> bool:
        """Whether that is another type than the elements'."""
        return self.held != self.element

    @property
    def lanes(self) -> int:
        return self.machine.lanes(self.held.itemsize) // (2 if self.element.is_packed else 1)

    @property
    def step(self) -> float:
        """The destination's scale relative to the source's."""
        if self.quantizations is None:
            return 1.0
        src, dst = self.quantizations
        return float(dst.scale) / float(src.scale)

    @property
    def integers(self) -> ConversionArguments:
        """The quantizations of source and destination. Without them, integers stand for themselves."""
        given = self.quantizations or (None, None)
        if self.is_average and not self.element.is_float and self.quantizations is None:
            given = (Quantization(1.0), Quantization(1.0))
        return conversion_words((self.element, self.element), given)

    @property
    def most_taps(self) -> int:
        """Elements of the image that a window covers at the most."""
        return math.prod(int(windows(self.problem, x).taps.max(initial=0)) for x in "hw")

    @property
    def is_adaptive(self) -> bool:
        return isinstance(self.problem, AdaptivePool2dProblem)

    @property
    def is_average(self) -> bool:
        return self.is_adaptive or self.problem.kind != "max"

    @property
    def is_global(self) -> bool:
        """Whether the only window is the whole image."""
        p = self.problem
        if (p.oh, p.ow) != (1, 1):
            return False
        return (windows(p, "h").taps[0], windows(p, "w").taps[0]) == (p.ih, p.iw)

    @property
    def is_plane(self) -> bool:
        """Whether that image is one contiguous extent, of pixels of at most a vector."""
        is_narrow = self.view.inner <= self.lanes and not self.element.is_packed
        return is_narrow and self.is_global and self.has_contiguous_rows

    @cached_property
    def is_wide(self) -> bool:
        """Whether vectors run over a pixel."""
        return self.view.inner >= self.lanes and why_not_shuffled(self) is not None

    @property
    def reduction(self) -> PoolReduction:
        """The reduction of the kernels, which are masked if channels that do not exist have to be zeroed."""
        # Wide pixels of floats always are, by one operation for an output: so they share kernels.
        lacks_channels = self.is_odd or self.src.padded_shape(self.problem.src_shape)[1] > self.problem.ic
        masked = lacks_channels or (self.is_wide and not self.is_plane and self.element.is_float)
        return PoolReduction(SUM if self.is_average else MAXIMUM, self.element.code, self.lanes, masked)

    @property
    def row_bytes(self) -> int:
        """Bytes of a row of the image, in a plane."""
        return int(self.problem.iw * self.pixel_bytes)

    @cached_property
    def part(self) -> int:
        """Elements of a pixel that tiles gather at once, or 0."""
        pays = pays_to_gather(self.machine, self.problem, self.strides[0][1], self.pixel_bytes)
        return TOGETHER // self.itemsize if pays else 0

    @cached_property
    def plane_tasks(self) -> int:
        """Into how many tasks a plane's rows of outputs are cut."""
        p = self.problem
        rows = max(1, min(p.oh, TASK_BYTES * p.oh // (p.ih * self.row_bytes)))
        if self.part:
            rows = min(p.oh, rows_that_stay(self.machine, p.iw * TOGETHER, window_rows(p, 1), p.sh))
        wanted = -(-4 * self.threads // self.view.planes)
        if wanted > 1:
            rows = max(1, min(rows, (p.oh - 1) // (wanted - 1)))
        return int(-(-p.oh // rows))

    @property
    def task_rows(self) -> int:
        return int(-(-self.problem.oh // self.plane_tasks))

    @property
    def tasks(self) -> tuple[int, int]:
        """How many tasks there are, and how many a worker takes at a time."""
        tasks = self.view.planes * self.plane_tasks
        task_bytes = self.problem.ih * self.row_bytes * self.task_rows // self.problem.oh
        return tasks, chunk_of(tasks, task_bytes, self.threads, TASK_BYTES)

    @property
    def line_columns(self) -> int:
        """Columns that the windows of a row of outputs span, or the image's with its padding before, if more."""
        p = self.problem
        return int(max((p.ow - 1) * p.sw + (p.kw - 1) * p.dw + 1, p.pw + p.iw))

    @cached_property
    def args(self) -> PoolArgs:
        """The words that all kernels share."""
        p, h, w = self.problem, axis_of(self.problem, "h"), axis_of(self.problem, "w")
        s, d = (geometry(*of, self.itemsize) for of in ((self.src, p.src_shape), (self.dst, p.dst_shape)))
        return PoolArgs(
            src=POOL.src,
            dst=POOL.dst,
            table=OWN_TABLE,
            s=s,
            d=d,
            oh=h.out,
            ow=w.out,
            ih=h.size,
            iw=w.size,
            ph=h.begin,
            pw=w.begin,
            sw=w.stride,
            kw=w.kernel,
            dh=h.dilation,
            dw=w.dilation,
            row_step=h.dilation * s.row,
            col_step=w.dilation * s.col,
            integers=self.integers,
        )

    @cached_property
    def plane_args(self) -> PoolArgs:
        """The words that all kernels of planes share."""
        v, args, (s, d) = self.view, self.args, self.strides
        outer, nearer = ([stride * self.itemsize for stride in loop.strides] for loop in (v.outer, v.nearer))
        return args._replace(
            s=args.s._replace(row=s[0], col=s[1]),
            d=args.d._replace(row=d[0], col=d[1]),
            row_step=args.dh * s[0],
            col_step=args.dw * s[1],
            inner=v.inner,
            blocks=v.blocks,
            block_planes=v.block_planes,
            planes=v.nearer.size,
            s_outer=outer[0],
            s_plane=nearer[0],
            d_outer=outer[1],
            d_plane=nearer[1],
            task_rows=self.task_rows,
            plane_tasks=self.plane_tasks,
        )


# ---------------------------------------------------------------- tiles of wide pixels


def pays_to_gather(machine: Machine, problem: Problem, s_col: int, pixel: int) -> bool:
    """Whether it takes less time to gather a window's pixels, of so many bytes, than to read them where they are.

    s_col: bytes from one to the next. A window of three rows reads each pixel so few times that two sets of the cache
    suffice.
    """
    p = problem
    if isinstance(p, AdaptivePool2dProblem) or pixel % TOGETHER or p.kw <= p.sw:
        return False
    if not rows_that_stay(machine, p.iw * TOGETHER, window_rows(p, 1), p.sh):
        return False
    return is_crowded(machine, window_rows(p, 1) * p.iw, s_col, FEW_SETS if p.kh > 3 else 1)


def crowded_seconds(machine: Machine, problem: Pool2dProblem, s_col: int, nbytes: int) -> float:
    """How long rows of windows wait beyond their loads, if they read each row of an image of `nbytes` by itself."""
    p = problem
    is_slow = is_crowded(machine, window_rows(p, 1) * p.iw, s_col)
    return gathering_seconds(machine, nbytes * p.kh / p.sh) if is_slow else 0.0


def wide_tile(b: PoolBlocking) -> PoolTile | None:
    """The largest tile of one pixel a vector that reads few columns; None if no window fits the registers."""
    p, most = b.problem, b.machine.isa.registers - SPARE
    if p.kw <= p.sw + 1:
        most = min(most, max(MOST_SHARED, p.kw))
    if p.kw > most:
        return None
    read = {}
    for pixels in range(min(MOST_OUTPUTS, p.ow), 0, -1):
        columns = len({n * p.sw + tap * p.dw for n in range(pixels) for tap in range(p.kw)})
        if columns <= most:
            read[pixels] = -(-p.ow // pixels) * (columns + 1)
    best = next(pixels for pixels in read if read[pixels] <= MORE * min(read.values()))
    return PoolTile(best, b.lanes, _unrolled(p), p.kw, p.sw, p.dw)


def _unrolled(problem: Pool2dProblem) -> int:
    return problem.kh if problem.kh <= MOST_UNROLLED else 0


# ---------------------------------------------------------------- tiles of narrow pixels


def why_not_shuffled(b: PoolBlocking) -> Reason | None:
    """None for a pool that is cut into tiles whose columns are picked, else why it is not, in a sentence."""
    p, isa, inner = b.problem, b.machine.isa, b.view.inner
    if b.is_adaptive:
        return "needs windows of equal size"
    if not b.has_contiguous_pixels:
        return f"the pixels of a row are not contiguous in {b.src}"
    if b.itemsize < 4:
        return f"needs elements of at least 4 bytes, unlike {b.element.name}"
    if inner % b.lanes == 0:
        return f"a pixel of {b.src} has {inner} elements here, which fill whole vectors without shuffles"
    if isa.vector_bytes < 32:
        return f"needs masked loads and vectors of at least 256 bits, unlike {isa.name}"
    if inner == 1 and p.sw == 1:
        return "contiguous pixels at stride 1 fill vectors without shuffles"
    if p.sw > MOST_STRIDE or p.kw > MOST_TAPS or p.iw * inner >= 1 << 31:
        return f"needs strides up to {MOST_STRIDE}, windows of up to {MOST_TAPS} columns, and rows below 2^31 elements"
    return None if _shuffled_tiles(b) else f"the vector registers do not hold {p.kw} columns of a window"


def shuffled_tile(b: PoolBlocking) -> PoolTile:
    """The tile of a pool that needs the fewest instructions."""
    p, row = b.problem, -(-b.problem.ow * b.view.inner // b.lanes)

    def instructions(tile: PoolTile) -> int:
        return -(-row // tile.vectors) * (tile.span(b.lanes) * p.kh + tile.vectors * p.kw + 2)

    return min(_shuffled_tiles(b), key=instructions)


def _shuffled_tiles(b: PoolBlocking) -> list[PoolTile]:
    """Tiles of whole pixels, or of a whole row of outputs, whose columns fit the registers."""
    lanes, outputs = b.lanes, b.problem.ow * b.view.inner
    period, most = math.lcm(b.view.inner, lanes) // lanes, min(b.machine.isa.registers - SPARE, MOST_PICKED)
    choices = {-(-outputs // lanes), *range(period, min(MASK_VECTORS, outputs // lanes) + 1, period)}
    if b.anchor is not None:  # the anchor's tile, or the least
        own = replace(b, problem=b.anchor, anchor=None)
        choices &= {min(choices), *(shuffled_tile(own).vectors for _ in _shuffled_tiles(own)[:1])}
    tiles = [_shuffled_tile(b, vectors) for vectors in sorted(choices) if vectors <= MASK_VECTORS]
    return [tile for tile in tiles if tile.span(lanes) <= most]


def _shuffled_tile(b: PoolBlocking, vectors: int) -> PoolTile:
    p, lanes, inner, width = b.problem, b.lanes, b.view.inner, vectors * b.lanes
    shift, partial = -p.pw * inner % lanes, int(width > p.ow * inner)
    tile = PoolTile(vectors, inner, _unrolled(p), p.kw, p.sw, p.dw, shift=shift, partial=partial)
    columns, before = tile.span(lanes), p.pw * inner + shift
    last = max(0, p.ow * inner - width) * p.sw - before  # the first element of the last tile
    beyond = last + columns * lanes - p.iw * inner
    right = max(MASKED, -(-beyond // lanes))
    return replace(tile, left=min(columns, before // lanes), right=min(columns, right))
