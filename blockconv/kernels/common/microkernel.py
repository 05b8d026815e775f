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

import functools
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from blockconv import jit
from blockconv.core import target
from blockconv.core.activation import ActivationKind
from blockconv.core.types import ElementType
from blockconv.jit.ir import I64, NEAREST, call_kernel, const, counted, emit_prefetch, emitted, opaque
from blockconv.jit.records import fill
from blockconv.jit.values import alloca_once
from blockconv.kernels.common.dot import MULTIPLY_ADD, multiply_accumulate, source_element
from blockconv.kernels.common.epilogue import TileEpilogue, finish
from blockconv.kernels.common.interleaved import DENSE, Shared, reduce_shared
from blockconv.kernels.common.requantize import FLOAT32, dequantized
from blockconv.kernels.common.tile import LINE, Output, Tile
from blockconv.kernels.common.tile_record import TileRecord, each_step, kernel_of_tiles, source_of
from blockconv.kernels.common.unpacked import PARTS
from blockconv.kernels.common.vectors import Vectors

PREFETCHING = 8  # channels of a step whose arithmetic hides its prefetches
# Channels that are one turn of a step's loop. Counters and address updates take ports of the multiply-adds: on Xeons,
# two cycles in 16.
UNROLLED = 2


class TileSpec(NamedTuple):
    """The compile-time parameters of a microkernel: a tile, its instruction, its stores, and how groups share a vector.

    tile: see `of_pixels`. Its `dst` is the code of the destination's type where it differs from the accumulators'; for
        8 bits it is always uint8.
    store_width: contiguous destination channels, which one store writes; 1 is NCHW.
    shared: where more than one group shares a vector, a step may be several taps, and the channels are unrolled.
    loops: whether a step of the reduction is a loop over channels, and not a single one.
    dot: the number of the multiply-accumulate (`Dot`). A channel is one of its elements.
    shifted: as in `Epilogue`.
    prefetches: whether a turn of channels prefetches a line of the next weights: in steps of `PREFETCHING` channels.
    ahead: bytes from a pixel's source to the next pixel's, at most a cache line, if each step prefetches the next step;
        else 0.
    src_channel: bytes between the sources of two channels of a step, where these are not contiguous.
    """

    tile: Tile
    store_width: int
    shared: Shared = DENSE
    loops: int = 0
    dot: int = 0
    shifted: int = 0
    prefetches: int = 0
    ahead: int = 0
    src_channel: int = 0

    @property
    def finished(self) -> Tile:
        """The tile as it is stored: one row, except of planes."""
        stored = as_stored(self.tile)
        return stored if self.store_width == 1 else stored._replace(rows=1, pixels=self.tile.all_pixels)

    @property
    def unrolled(self) -> int:
        """Channels of a turn."""
        has_room = self.tile.vectors > 1 or target.isa().registers == 32  # for the next channel's scalars
        return unrolled_channels(self.tile.fma and self.dot == MULTIPLY_ADD.number and has_room) if self.loops else 1

    def of_pixels(self) -> TileSpec:
        """The spec whose kernel serves this tile: one of a single row serves all tiles of as many pixels.

        Each pixel is found by its distance from the first of `addressed_together`. So these have to be at the same
        distances in every such group of pixels.
        """
        tile, count = self.tile, self.tile.all_pixels
        at_once = addressed_together(count)
        is_even = tile.pixels == 1 or count == at_once or at_once % tile.pixels == 0
        is_one = self.shared.dense and self.store_width != 1 and is_even
        return self._replace(tile=tile._replace(rows=1, pixels=count)) if is_one else self


def as_stored(tile: Tile) -> Tile:
    """A tile when it is stored: integers that become real numbers are float32 before."""
    if not tile.dst:
        return tile
    return tile._replace(element=FLOAT32.code, dst=tile.dst if tile.dst != FLOAT32.code else 0)


def addressed_together(pixels: int) -> int:
    """Pixels that are addressed from one of them: each takes a register for its distance."""
    return min(pixels, 6 if target.isa().is_x86 else 14)


def unrolled_channels(fma: int) -> int:
    """Channels of a turn of a step's loop, which has an even number: several where LLVM has free registers to load
    ahead.

    On Arm it has none, as each scalar takes a register too: tiles of 27 accumulators would be spilled, and take twice
    as long. fma: whether multiply-adds are one instruction.
    """
    return UNROLLED if fma and target.isa().is_x86 else 1


def lines_ahead(block: int, tiles: int, steps: int) -> int:
    """Lines of the next block of weights (`block` bytes) that each step of a tile prefetches; `tiles` use a block.

    Weights that would stay in the second-level cache are prefetched too: in a network, other ops' data has evicted
    them.
    """
    return -(-block // (LINE * tiles * steps))


@jit.kernel
def conv_tile(spec: TileSpec):
    """Reduce tiles, and store them or have them stored: see `kernel_of_tiles`.

    The loop over tasks is another kernel, the same for all tiles. So only code that differs between problems is
    compiled again.
    """
    kept = spec.tile.all_pixels * spec.tile.width * ElementType.of(spec.tile.element).itemsize
    return kernel_of_tiles(functools.partial(_compute, spec=spec), kept)


def _compute(builder: Any, run: TileRecord, record: Any, spec: TileSpec) -> None:
    """Reduce and store a tile, or a block of its reduction.

    Accumulators are kept between blocks as they are: the sums are the same as without blocks.
    """
    b, v, tile = builder, spec.tile.code(builder), spec.finished
    is_last = run.is_last > 0
    stores = b.and_(is_last, run.valid >= run.whole)
    if spec.shared.dense:
        accs = _accumulators(b, spec, run)
        _reduce(b, spec, run, accs)
    else:
        accs = reduce_shared(v, spec.tile, spec.shared, spec.dot, run)
    with b.if_else(stores, likely=True) as (stored, others):
        with stored:
            real = real_accumulators(v, spec.tile, run, accs, spec.shifted)
            is_float = ElementType.of(tile.dst or tile.element).is_float
            act = ActivationKind.CLIP if is_float else ActivationKind.NONE  # bytes are bounded in any case
            words = TileRecord.load(b, record)  # in registers they would be spilled
            out = fill(Output, words)._replace(dst=run.dst, clips=words.clips > 0)
            if spec.store_width > 1:
                pixels = distances(b, run, run.dst_row, run.dst_pixel, tile.pixels)
                out = out._replace(dst_pixel=tuple(pixels))
            TileEpilogue(b, tile, spec.store_width, act, out, False, masked=False).finish(real)
        with others:
            rare = TileRecord.load(b, record)
            memory = b.select(is_last, rare.scratch, run.sums)
            for k, slot in enumerate(accs):
                v.store(b.load(slot), memory + k * v.bytes)
            with b.if_then(is_last):
                call_kernel.emit(b, rare.finish, record, run.dst, memory, const(0))


def real_accumulators(v: Vectors, tile: Tile, run: TileRecord, accs: list[Any], shifted: int) -> list[Any]:
    """Accumulators ready to be finished: integers that are stored as another type become real numbers.

    v: code over the accumulators.
    """
    if not tile.dst or v.type.is_float:
        return accs

    def each(f: Vectors, address: Any) -> list[Any]:
        return [f.load(address + k * f.bytes) for k in range(tile.vectors)]

    return dequantized(v, accs, (run.bia, run.scales), each, shifted, run.activation)


# ---------------------------------------------------------------- tiles that do not store themselves


def finished_at_once(pixels: int, store_width: int, lanes: int) -> int:
    """Pixels that `finish_tile` finishes at once, of rows of so many: of planes, those that a vector has."""
    return min(pixels, lanes if store_width == 1 else PARTS)


@jit.kernel
def finish_tile(tile: Tile, store_width, act, has_parts=0, shifted=0):
    """Store a tile, given its `TileRecord`, its destination, and the address of its accumulators, [pixel][vector].

    tile: a vector of channels of `finished_at_once` pixels; otherwise as in `TileSpec`. act: an `ActivationKind`;
    `TileRecord.clips` says whether CLIP clips. has_parts: whether stores are at irregular offsets, from a table.
    """
    each, lanes = tile.pixels, tile.lanes

    @emitted
    def store(builder, record, dst, accs):
        b, run, v = builder, TileRecord.load(builder, record), tile.code(builder)
        memory, acc_pixel = b.ptrtoint(alloca_once(b, v.kind, each), I64), run.tile_width * v.itemsize
        exist = b.select(run.written < run.tile_width, run.written, run.tile_width)
        vectors, last = b.sdiv(exist + (lanes - 1), const(lanes)), run.tile_pixels - each
        count = b.sdiv(last + (2 * each - 1), const(each))
        with counted(b, vectors) as vector, counted(b, run.tile_rows) as row, counted(b, count) as n:
            before, first = vector * lanes, n * each
            first = b.select(first < last, first, last)  # the last ones are moved back to be as many
            at = accs + (row * run.tile_row + first) * acc_pixel + vector * v.bytes
            slots = [v.slots(1, v.load(at + k * acc_pixel))[0] for k in range(each)]
            base, table = dst + row * run.dst_row + first * run.dst_pixel, run.dst_block
            if has_parts:
                table = table + vector * (lanes // store_width * 8)
            else:
                base = base + vector * (lanes // store_width) * run.dst_block
            out = fill(Output, run)._replace(
                dst=base,
                dst_block=table,
                valid=run.valid - before,
                written=run.written - before,
                scratch=memory,
                clips=run.clips > 0,
            )
            of_vector = run._replace(bia=run.bia + vector * v.bytes, scales=run.scales + vector * v.bytes)
            slots = real_accumulators(v, tile, of_vector, slots, shifted)
            finish(b, as_stored(tile), store_width, act, out, slots, bool(has_parts))

    def kernel(record, dst, accs, unused):
        store(record, dst, accs)

    return kernel


# ---------------------------------------------------------------- the reduction


def _accumulators(builder: Any, spec: TileSpec, run: TileRecord) -> list[Any]:
    """The accumulators, as yet the bias, or the sums of the blocks before.

    They are stack slots, which LLVM keeps in registers, by [row][pixel][vector].
    """
    v = spec.tile.code(builder)
    bias = [v.load(run.bia + k * v.bytes) for k in range(spec.tile.vectors)]
    accs = [slot for _ in range(spec.tile.all_pixels) for value in bias for slot in v.slots(1, value)]
    with builder.if_then(builder.icmp_signed("==", run.is_first, const(0)), likely=False):
        for k, slot in enumerate(accs):
            builder.store(v.load(run.sums + k * v.bytes), slot)
    return accs


def distances(b: Any, run: TileRecord, to_row: Any, to_pixel: Any, count: int) -> list[Any]:
    """Bytes from the first pixel of a tile to each of so many, of rows of `tile_pixels`."""
    column = start = at = const(0)
    found = [at]
    for _ in range(count - 1):
        column = column + 1
        ends = b.icmp_signed("==", column, run.tile_pixels)
        start = b.select(ends, start + to_row, start)
        at = b.select(ends, start, at + to_pixel)
        column = b.select(ends, const(0), column)
        found.append(at)
    return found


def _reduce(builder: Any, spec: TileSpec, run: TileRecord, accs: list[Any]) -> None:
    """Add the products of all of the record's steps to the accumulators."""
    v = spec.tile.code(builder)
    each = addressed_together(spec.tile.pixels)
    all_pixels = distances(builder, run, run.src_row, run.src_pixel, spec.tile.all_pixels)
    # Else LLVM adds the stride for each pixel, and of a dot product's many sums it stores one and loads it at once.
    to_pixel = [opaque(builder, each_one) for each_one in all_pixels[: min(each + 1, spec.tile.pixels)]]

    def channel(x: Any, w: Any) -> None:
        """One channel at one tap: every pixel's scalar against every weight vector."""
        weights = [v.load(w + k * v.bytes) for k in range(spec.tile.vectors)]
        slots = iter(accs)
        for row in range(spec.tile.rows):
            base = x + all_pixels[row * spec.tile.pixels] if row else x
            for p in range(spec.tile.pixels):
                nth = p % each
                if not nth and (p or spec.dot):
                    base = opaque(builder, base + to_pixel[each] if p else base)
                at = base + to_pixel[nth] if nth else base
                scalar = source_element(v, spec.dot, at)
                for weight in weights:
                    slot = next(slots)
                    builder.store(multiply_accumulate(v, spec.dot, scalar, weight, builder.load(slot)), slot)

    apart = spec.src_channel or v.itemsize
    ahead = range(0, spec.tile.all_pixels, LINE // spec.ahead) if spec.ahead else ()
    how = spec.unrolled, spec.prefetches, [all_pixels[pixel] for pixel in ahead]
    Reduction(builder, run, spec.loops, apart, spec.tile.vectors * v.bytes, channel, *how).all_steps()


class Reduction(NamedTuple):
    """The loop over the steps of a reduction.

    run: a `TileRecord` of LLVM's values.
    loops: as in `TileSpec`.
    apart: bytes between the sources of two channels.
    channel_bytes: of a channel's weights for all of the tile.
    channel(x, w): emits the arithmetic of one channel at one tap, of the source and the weights at these addresses.
    unrolled: channels of a full step that are one turn of its loop.
    prefetches: as in `TileSpec`.
    ahead: bytes from the tile's source to what each step prefetches of the next step's.
    """

    b: Any
    run: TileRecord
    loops: int
    apart: int
    channel_bytes: int
    channel: Callable[[Any, Any], None]
    unrolled: int = 1
    prefetches: int = 0
    ahead: Sequence[Any] = ()

    def all_steps(self) -> None:
        b, run = self.b, self.run
        self.steps(each_step(b, run), run.step_channels, self.unrolled)
        if self.loops:
            tail = each_step(b, run, run.runs * run.run_steps, run.tail_steps)
            self.steps(tail, run.tail_channels, 1)

    def steps(self, numbers: AbstractContextManager[Any], channels: Any, unrolled: int) -> None:
        """Reduce over the steps of these numbers, with `channels` channels each, so many of them in a turn."""
        b, run, channel_bytes = self.b, self.run, self.channel_bytes
        with numbers as step:
            x = source_of(b, run, step)
            if not self.loops:  # not a loop of one, which LLVM would take apart too late to schedule it well
                w = run.wei + step * channel_bytes
                self.channel(x, w)
                return
            before = step * run.step_channels
            w = run.wei + before * channel_bytes
            if self.ahead:
                self.prefetch_next(step)
            # LLVM unrolls a loop of four turns. It then spills addresses, and on Arm accumulators.
            with counted(b, opaque(b, b.udiv(channels, const(unrolled)))) as turn:
                first = turn * unrolled
                # LLVM moves no load past a prefetch, which parts the channels: there are too few registers to load
                # the weights of both side by side.
                for k in range(unrolled):
                    if k == unrolled - 1 and self.prefetches:
                        self.prefetch_share(before + first)
                    channel = first + k
                    src = x + channel * self.apart
                    at = w + channel * channel_bytes
                    self.channel(src, at)

    def prefetch_next(self, step: Any) -> None:
        """Prefetch the next step's source into the first-level cache.

        No processor prefetches it by itself where it is not contiguous with this step's, as with blocks of few pixels.
        """
        b, run = self.b, self.run
        last = run.runs * run.run_steps + run.tail_steps - 1
        following = step + 1
        following = b.select(following < last, following, last)
        x = source_of(b, run, following)
        for distance in self.ahead:
            emit_prefetch(b, x + distance, NEAREST)

    def prefetch_share(self, channel: Any) -> None:
        """Prefetch the first line of the share of a turn's channels in their step's lines.

        More at once would take the fill buffers of the first-level cache. The next channels' weights, in the
        second-level cache, would then wait for lines from memory. Lines beyond are left to the processor. Where many
        tiles share a block, a share is less than a line.
        """
        emit_prefetch(self.b, self.run.prefetch + channel * self.run.share)
