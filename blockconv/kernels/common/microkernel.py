"""The outer-product microkernel of convolution, as LLVM vector IR.

A tile is `rows` x `pixels` output pixels by `vectors` vectors of output channels, held in vector registers. A step of
the reduction is one tap of one block of channels. For each channel it multiplies one source scalar of each pixel by the
channel's weight vectors, which stream from memory in the order of use.

Four numbers address the source: bytes between pixels, between rows and between channel blocks, and a table of tap
offsets. So one microkernel serves every layout. It is the kernel of Georganas et al., SC'18 ("Anatomy of
high-performance deep learning convolutions on SIMD architectures") with the addresses left open.

The epilogue finishes and stores results in any memory order (`epilogue.py`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from blockconv import jit
from blockconv.core import target
from blockconv.core.types import ElementType
from blockconv.jit.ir import NEAREST, call_kernel, const, counted, emit_prefetch, emitted, opaque
from blockconv.jit.values import build, least, truth
from blockconv.kernels.common.dot import MULTIPLY_ADD, multiply_accumulate, source_element
from blockconv.kernels.common.epilogue import TileEpilogue, finish
from blockconv.kernels.common.interleaved import Shared, reduce_shared
from blockconv.kernels.common.requantize import dequantized
from blockconv.kernels.common.tile import LINE, Tile
from blockconv.kernels.common.tile_record import TileRecord, each_step, kernel_of_tiles, source_of
from blockconv.kernels.common.vectors import Vectors

STREAMED = 2048  # prefetch distance, in bytes, of the weights of a tile of one pixel
PREFETCHING = 8  # channels of a step whose arithmetic hides its prefetches
# Channels that are one turn of a step's loop. Counters and address updates take ports of the multiply-adds: on Xeons,
# two cycles in 16.
UNROLLED = 2


class TileSpec(NamedTuple):
    """The compile-time parameters of a microkernel: a tile, its source's strides, its stores, and how groups share it.

    The fields from `element` to `lanes` are those of `Tile`. Where more than one group shares a vector, a step may be
    several taps, and the channels are unrolled.

    step: channels of a block of the source, which each full step takes.
    store_width: contiguous destination channels, which one store writes; 1 is NCHW.
    act: an `ActivationKind`.
    shared: how groups share a vector.
    has_parts: whether stores are at irregular offsets, from a table.
    dot: the number of the multiply-accumulate (`Dot`). `step` counts the elements that it takes at once, of one channel
        or several.
    dst: the code of the destination's type where it differs from the accumulators'; for 8 bits it is always uint8.
    rounding: as in `Tile`.
    shifted: as in `Epilogue`.
    gap: as in `conv.blocking.TileShape`, of kernels that have it.
    k_blocked: whether a call reduces a block of the steps, and keeps the accumulators for the next.
    burst: whether a turn of channels prefetches as many lines as it reads, as Winograd's short reductions have to.
    src_channel: bytes between the sources of two channels of a step, where these are not contiguous.
    cut: whether tiles leave out taps that find only padding.
    wei_width: of a `pixel_tile`, output channels of a block of packed weights; the tile takes the first. 0: it takes
        all.
    """

    element: int
    fma: int
    rows: int
    pixels: int
    vectors: int
    lanes: int
    step: int
    store_width: int
    act: int
    shared: Shared
    has_parts: int = 0
    dot: int = 0
    dst: int = 0
    rounding: int = 0
    shifted: int = 0
    gap: int = 0
    k_blocked: int = 0
    burst: int = 0
    src_channel: int = 0
    cut: bool = False
    wei_width: int = 0

    @property
    def tile(self) -> Tile:
        """The tile as it is reduced."""
        return Tile(*self[:6], store_width=self.store_width, act=self.act, has_parts=self.has_parts)

    @property
    def finished(self) -> Tile:
        """The tile as it is stored."""
        return self.tile.stored_as(self.dst, self.rounding)

    @property
    def unrolled(self) -> int:
        """Channels of a turn."""
        has_room = self.vectors > 1 or target.isa().registers == 32  # for the next channel's scalars
        return unrolled_channels(self.step, self.fma and self.dot == MULTIPLY_ADD.number and has_room)

    @property
    def streamed(self) -> bool:
        """Whether all weights are used once, so that the tile is as fast as they come."""
        return self.rows * self.pixels == 1


def unrolled_channels(step: int, fma: int) -> int:
    """Channels of a turn, for a step of so many channels: several where LLVM has free registers to load ahead.

    On Arm it has none, as each scalar takes a register too: tiles of 27 accumulators would be spilled, and take twice
    as long. fma: whether multiply-adds are one instruction.
    """
    return UNROLLED if fma and target.isa().is_x86 and step % UNROLLED == 0 else 1


def lines_ahead(block: int, tiles: int, steps: int) -> int:
    """Lines of the next block of weights (`block` bytes) that each step of a tile prefetches; `tiles` use a block.

    Weights that would stay in the second-level cache are prefetched too: in a network, other ops' data has evicted
    them.
    """
    return -(-block // (LINE * tiles * steps))


@jit.kernel
def conv_tile(spec: TileSpec):
    """Reduce tiles and store them: see `kernel_of_tiles`.

    The loop over tasks is another kernel, the same for all tiles. So only code that differs between problems is
    compiled again.
    """
    kept = spec.rows * spec.pixels * spec.vectors * spec.lanes * ElementType.of(spec.element).itemsize
    return kernel_of_tiles(_compute, spec, kept)


def _compute(run: TileRecord, record, spec: TileSpec) -> None:
    """Reduce and store a tile, or a block of its reduction."""
    if spec.k_blocked:
        _reduce_block(spec, run, record)
        return
    if spec.shared.dense:
        accs = _accumulators(spec, run)
        _reduce(spec, run, accs)
    else:
        accs = reduce_shared(spec.tile.code(), spec.tile, spec.shared, spec.dot, run, spec.cut)
    _finish(spec, run, record, accs)


def _finish(spec: TileSpec, run: TileRecord, record, accs: list[Any]) -> None:
    """Store a tile that is reduced."""
    tile = spec.finished
    accs = real_accumulators(spec, (run.bia, run.scales), run.activation, accs)

    def apart() -> None:
        v, part = tile.code(), part_of(tile)
        memory, size = v.spilled(accs), tile.pixels * tile.vectors * v.bytes
        for row in range(tile.rows):
            count = const(tile.pixels // part.pixels)
            call_kernel.emit(run.part, record, run.dst + row * run.dst_row, memory + row * size, count)

    finish(tile, run, accs, apart)


def part_of(tile: Tile) -> Tile:
    """What `finish_part` stores of a tile at once: a pixel, or a row of planes."""
    return tile._replace(rows=1, pixels=tile.pixels if tile.store_width == 1 else 1)


@jit.kernel
def finish_part(tile: Tile):
    """Store a row that lacks channels, of so many `part_of` a tile. A kernel is for tiles of any number of pixels.

    Its arguments: the tile's `TileRecord`, the row's destination, the address of its accumulators, and how many.
    """
    size = tile.pixels * tile.vectors

    @emitted
    def store(record, dst, accs, count):
        run, v = TileRecord.load(record), tile.code()

        def each(run: TileRecord, sums: bool = False) -> None:
            with counted(count) as number:
                at, slots = accs + number * (size * v.bytes), v.slots(size, v.zero)
                v.restore(slots, at)
                epilogue = TileEpilogue(tile, run._replace(dst=dst + number * run.dst_pixel), masked=True)
                if sums:
                    epilogue.add_residual(slots)
                    v.spill(slots, at)
                else:
                    epilogue.finish(slots)

        if tile.store_width > 1:  # one call computes the activation of all pixels
            with build.if_then(truth(run.residual | run.activate), likely=False):
                each(run, sums=True)
                with build.if_then(truth(run.activate)):
                    call_kernel.emit(run.activate, accs, count * size, run.activation, const(0))
            run = run._replace(residual=const(0), activate=const(0))
        each(run)

    return store


def _reduce_block(spec: TileSpec, run: TileRecord, record) -> None:
    """A block of a tile's reduction. Accumulators are kept as they are: the sums are the same as without blocks."""
    v = spec.tile.code()
    is_last = truth(run.is_last)
    accs = _accumulators(spec, run)
    with build.if_then(~truth(run.is_first)):
        v.restore(accs, run.sums)
    _reduce(spec, run, accs)
    with build.if_else(is_last) as (finished, kept):
        with finished:
            _finish(spec, run, record, accs)
        with kept:
            v.spill(accs, run.sums)


def real_accumulators(spec: TileSpec, at: tuple[Any, Any], args, accs: list[Any]) -> list[Any]:
    """Accumulators ready to be finished: integers that are stored as another type become real numbers.

    at: `bia` and `scales` of a `TileRecord`. args: the address of the `EpilogueArguments`.
    """
    if not spec.dst or ElementType.of(spec.element).is_float:
        return accs

    def each(f: Vectors, address) -> list[Any]:
        return [f.load(address + k * f.bytes) for k in range(spec.vectors)]

    return dequantized(spec.tile.code(), accs, at, each, spec.shifted, args)


# ---------------------------------------------------------------- the reduction


def _accumulators(spec: TileSpec, run: TileRecord) -> list[Any]:
    """The accumulators, as yet the bias: stack slots, which LLVM keeps in registers, by [row][pixel][vector]."""
    v = spec.tile.code()
    bias = [v.load(run.bia + k * v.bytes) for k in range(spec.vectors)]
    return v.in_slots(bias * (spec.rows * spec.pixels))


def _reduce(spec: TileSpec, run: TileRecord, accs: list[Any]) -> None:
    """Add the products of all of the record's steps to the accumulators."""
    v = spec.tile.code()
    # Pixels that are addressed from one of them: each takes a register for its distance.
    each = min(spec.pixels, 6 if target.isa().is_x86 else 14)
    # Else LLVM adds the stride for each pixel, and of a dot product's many sums it stores one and loads it at once.
    to_pixel = [opaque(k * run.src_pixel) for k in range(each + 1)]

    def channel(x, w) -> None:
        """One channel at one tap: every pixel's scalar against every weight vector."""
        weights = [v.load(w + k * v.bytes) for k in range(spec.vectors)]
        slots = iter(accs)
        for row in range(spec.rows):
            base = x + row * run.src_row if row else x
            for p in range(spec.pixels):
                nth = p % each
                if not nth and (p or spec.dot):
                    base = opaque(base + to_pixel[each] if p else base)
                at = base + to_pixel[nth] if nth else base
                scalar = source_element(v, spec.dot, at)
                for weight in weights:
                    slot = next(slots)
                    slot.held = multiply_accumulate(v, spec.dot, scalar, weight, slot.held)

    # A pixel's channels of a step are as many bytes as the pixel has, at the least.
    ahead = range(0, spec.pixels, max(1, LINE // (spec.step * v.itemsize)))
    how = spec.unrolled, spec.streamed, spec.burst, ahead, spec.cut
    apart = spec.src_channel or v.itemsize
    Reduction(run, spec.step, apart, spec.vectors * v.bytes, channel, *how).all_steps()


class Reduction(NamedTuple):
    """The loop over the steps of a reduction.

    run: a `TileRecord` of LLVM's values.
    step: channels of a full step.
    apart: bytes between the sources of two channels.
    channel_bytes: of a channel's weights for all of the tile.
    channel(x, w): emits the arithmetic of one channel at one tap, of the source and the weights at these addresses.
    unrolled: channels of a full step that are one turn of its loop.
    ahead: pixels whose cache lines of the next step's source each step prefetches, if `TileRecord.ahead` says so.
    streamed, burst, cut: as in `TileSpec`.
    """

    run: TileRecord
    step: int
    apart: int
    channel_bytes: int
    channel: Callable[[Any, Any], None]
    unrolled: int = 1
    streamed: bool = False
    burst: int = 0
    ahead: Iterable[int] = ()
    cut: bool = False

    def all_steps(self) -> None:
        run = self.run
        self.steps(each_step(run, self.cut), const(self.step), self.unrolled)
        if self.step > 1:
            tail = each_step(run, self.cut, run.runs * run.run_steps, run.tail_steps)
            self.steps(tail, run.tail_channels, 1)

    def steps(self, numbers: AbstractContextManager[Any], channels, unrolled: int) -> None:
        """Reduce over the steps of these numbers, with `channels` channels each, so many of them in a turn."""
        run, channel_bytes = self.run, self.channel_bytes
        with numbers as step:
            x = source_of(run, step)
            w = run.wei + step * (self.step * channel_bytes)
            if self.step == 1:  # not a loop of one, which LLVM would take apart too late to schedule it well
                self.prefetch_streamed(w)
                self.channel(x, w)
                return
            if self.ahead:
                self.prefetch_next(step)
            # LLVM unrolls a loop of four turns. It then spills addresses, and on Arm accumulators.
            with counted(opaque(build.udiv(channels, const(unrolled)))) as turn:
                first = turn * unrolled
                # LLVM moves no load past a prefetch. One alone parts the channels, whose weights there are too few
                # registers to load side by side; it places several among them.
                before = 0 if self.burst else unrolled - 1
                for k in range(unrolled):
                    if k == before and self.step >= PREFETCHING and not self.streamed:
                        self.prefetch_share(step, first, unrolled)
                    channel = first + k
                    src = x + channel * self.apart
                    at = w + channel * channel_bytes
                    self.prefetch_streamed(at)
                    self.channel(src, at)

    def prefetch_next(self, step) -> None:
        """Prefetch the next step's source into the first-level cache.

        No processor prefetches it by itself where it is not contiguous with this step's, as with blocks of few pixels.
        """
        run = self.run
        with build.if_then(truth(opaque(run.ahead))):  # opaque: else LLVM makes two loops
            last = run.runs * run.run_steps + run.tail_steps - 1
            following = step + 1
            following = least(following, last)
            x = source_of(run, following)
            for pixel in self.ahead:
                emit_prefetch(x + pixel * run.src_pixel, NEAREST)

    def prefetch_streamed(self, w) -> None:
        """Prefetch weights that are multiplied soon; processors run farther ahead with one stream than with two."""
        for line in range(0, self.channel_bytes if self.streamed else 0, LINE):
            emit_prefetch(w + (STREAMED + line))

    def prefetch_share(self, step, channel, count: int) -> None:
        """Prefetch the share of `count` channels in their step's lines: as many bytes as they read, at the most.

        All lines of a step at once would take every fill buffer of the first-level cache. The next channels' weights,
        in the second-level cache, would then wait for lines from memory. Lines beyond a small share are left to other
        shares. Where many tiles share a block, a share is less than a line: more would prefetch the same lines
        repeatedly, and each prefetch takes a port and a fill buffer.
        """
        share = self.run.prefetch_lines * (LINE // self.step)  # bytes
        at = self.run.prefetch + (step * self.step + channel) * share
        for line in range(0, count * self.channel_bytes if self.burst else LINE, LINE):
            emit_prefetch(at + line)
