"""The outer-product microkernel with its operands' roles exchanged: vectors run along pixels, weights are broadcast.

A tile is `rows` x `vectors` vectors of pixels by `channels` output channels. Each step of the reduction loads the
source pixels of one channel at one tap. It multiplies these vectors by one broadcast weight for each output channel.
Operands are addressed as in the other microkernel: the source at an offset from a table, the weights in reading order.
Where the pixels of a row are contiguous in each channel (NCHW, CHWN), nothing is transposed, and stores are whole
vectors.
"""

import functools
from typing import Any, NamedTuple

from blockconv import jit
from blockconv.jit.ir import const, counted
from blockconv.kernels.common.epilogue import finish
from blockconv.kernels.common.microkernel import Reduction, unrolled_channels
from blockconv.kernels.common.tile import Output, Tile
from blockconv.kernels.common.tile_record import TileRecord, kernel_of_tiles


class PixelTileSpec(NamedTuple):
    """The compile-time parameters of a microkernel.

    element, fma, lanes: as `Tile`'s.
    act: an `ActivationKind`.
    step: channels that a step of the reduction takes, `src_channel` bytes apart.
    wei_width: output channels of a block of packed weights; the tile takes `channels` of them. 0: it takes all.
    cut: as in `TileSpec`.
    """

    element: int
    fma: int
    rows: int
    vectors: int
    channels: int
    lanes: int
    act: int
    step: int = 1
    src_channel: int = 0
    wei_width: int = 0
    cut: int = 0

    def tile(self, channels: int) -> Tile:
        """The accumulators of so many channels, which take the place of the pixels: a vector has one channel."""
        return Tile(self.element, self.fma, self.rows, channels, self.vectors, self.lanes, period=1)


@jit.unrolled_kernel
def pixel_tile(spec: PixelTileSpec):
    """Reduce tiles and store them: see `kernel_of_tiles`."""
    return kernel_of_tiles(functools.partial(_compute, spec=spec))


def _compute(builder, run: TileRecord, record, spec: PixelTileSpec) -> None:
    """Reduce and store a tile."""
    accs = _reduce(builder, spec, run)
    whole = run.valid >= spec.channels
    with builder.if_else(whole, likely=True) as (full, part):
        with full:
            _finish(builder, spec, run, accs, spec.channels, const(0))
        with part:
            _finish_one_by_one(builder, spec, run, accs)


def _reduce(builder, spec: PixelTileSpec, run: TileRecord) -> list[Any]:
    """The accumulators, stack slots that LLVM keeps in registers, in the order [row][channel][vector]."""
    v = spec.tile(spec.channels).code(builder)
    biases = [v.broadcast(run.bia + k * v.itemsize) for k in range(spec.channels)]
    accs = [slot for _ in range(spec.rows) for bias in biases for slot in v.slots(spec.vectors, bias)]

    def channel(x, w) -> None:
        """One channel at one tap: every vector of pixels against every output channel's weight."""
        pixels = []
        for row in range(spec.rows):
            base = x + row * run.src_row if row else x
            pixels.append([v.load(base + k * v.bytes) for k in range(spec.vectors)])
        for c in range(spec.channels):
            weight = v.broadcast(w + c * v.itemsize)
            for row in range(spec.rows):
                for k in range(spec.vectors):
                    slot = accs[(row * spec.channels + c) * spec.vectors + k]
                    builder.store(v.multiply_add(pixels[row][k], weight, builder.load(slot)), slot)

    wei_channel, unrolled = (spec.wei_width or spec.channels) * v.itemsize, unrolled_channels(spec.step, spec.fma)
    Reduction(builder, run, spec.step, spec.src_channel, wei_channel, channel, unrolled, cut=bool(spec.cut)).all_steps()
    return accs


def _finish(builder, spec: PixelTileSpec, run: TileRecord, accs: list[Any], channels: int, first) -> None:
    """Store the accumulators of so many channels, from number `first` on."""
    tile = spec.tile(channels)
    out = Output(
        dst=run.dst + first * run.dst_block,
        dst_row=run.dst_row,
        dst_pixel=run.dst_block,
        dst_block=const(spec.lanes * tile.itemsize),
        residual=run.residual,
        valid=const(1),
        written=const(tile.width),
        activation=run.activation,
        scratch=run.scratch,
        clips=run.clips,
    )
    finish(builder, tile, spec.lanes, spec.act, out, accs)


def _finish_one_by_one(builder, spec: PixelTileSpec, run: TileRecord, accs: list[Any]) -> None:
    """Store the channels that exist, where not all of a tile's do: each is stored from the scratch by the same code."""
    v = spec.tile(1).code(builder)
    each = spec.rows * spec.vectors
    # An activation overwrites the first channel's place in the scratch, which has been read by then.
    for c in range(spec.channels):
        for i in range(each):
            row, k = divmod(i, spec.vectors)
            slot = accs[(row * spec.channels + c) * spec.vectors + k]
            v.store(builder.load(slot), run.scratch + (c * each + i) * v.bytes)
    slots = v.slots(each, v.zero)
    with counted(builder, run.valid) as n:
        at = run.scratch + n * (each * v.bytes)
        for i, slot in enumerate(slots):
            builder.store(v.load(at + i * v.bytes), slot)
        _finish(builder, spec, run, slots, 1, n)
