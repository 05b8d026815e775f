"""The outer-product microkernel with its operands' roles exchanged: vectors run along pixels, weights are broadcast.

A tile is `rows` x `vectors` vectors of pixels by `channels` output channels. Each step of the reduction loads the
source pixels of one channel at one tap. It multiplies these vectors by one broadcast weight for each output channel.
Operands are addressed as in the other microkernel: the source at an offset from a table, the weights in reading order.
Where the pixels of a row are contiguous in each channel (NCHW, CHWN), nothing is transposed, and stores are whole
vectors.
"""

from typing import Any

from blockconv import jit
from blockconv.jit.ir import const, counted
from blockconv.jit.values import build
from blockconv.kernels.common.epilogue import finish
from blockconv.kernels.common.microkernel import Reduction, TileSpec, unrolled_channels
from blockconv.kernels.common.tile import Tile
from blockconv.kernels.common.tile_record import TileRecord, kernel_of_tiles


@jit.kernel
def pixel_tile(spec: TileSpec):
    """Reduce tiles and store them: see `kernel_of_tiles`.

    spec: its `pixels` are output channels, its vectors and `store_width` are of pixels.
    """
    return kernel_of_tiles(_compute, spec)


def _tile(spec: TileSpec, channels: int) -> Tile:
    """The accumulators of so many channels, which take the place of the pixels: a vector has one channel."""
    return spec.tile._replace(pixels=channels, period=1)


def _compute(run: TileRecord, record, spec: TileSpec) -> None:
    """Reduce and store a tile."""
    accs = _reduce(spec, run)
    whole = run.valid >= spec.pixels
    with build.if_else(whole, likely=True) as (full, part):
        with full:
            _finish(spec, run, accs, spec.pixels, const(0))
        with part:
            _finish_one_by_one(spec, run, accs)


def _reduce(spec: TileSpec, run: TileRecord) -> list[Any]:
    """The accumulators, stack slots that LLVM keeps in registers, in the order [row][channel][vector]."""
    v = _tile(spec, spec.pixels).code()
    biases = [v.broadcast(run.bia + k * v.itemsize) for k in range(spec.pixels)]
    accs = v.in_slots(bias for _ in range(spec.rows) for bias in biases for _ in range(spec.vectors))

    def channel(x, w) -> None:
        """One channel at one tap: every vector of pixels against every output channel's weight."""
        pixels = []
        for row in range(spec.rows):
            base = x + row * run.src_row if row else x
            pixels.append([v.load(base + k * v.bytes) for k in range(spec.vectors)])
        for c in range(spec.pixels):
            weight = v.broadcast(w + c * v.itemsize)
            for row in range(spec.rows):
                for k in range(spec.vectors):
                    slot = accs[(row * spec.pixels + c) * spec.vectors + k]
                    slot.held = v.multiply_add(pixels[row][k], weight, slot.held)

    wei_channel, unrolled = (spec.wei_width or spec.pixels) * v.itemsize, unrolled_channels(spec.step, spec.fma)
    Reduction(run, spec.step, spec.src_channel, wei_channel, channel, unrolled, cut=spec.cut).all_steps()
    return accs


def _finish(spec: TileSpec, run: TileRecord, accs: list[Any], channels: int, first) -> None:
    """Store the accumulators of so many channels, from number `first` on."""
    tile = _tile(spec, channels)
    out = run._replace(
        dst=run.dst + first * run.dst_block,
        dst_pixel=run.dst_block,
        dst_block=const(spec.lanes * tile.itemsize),
        valid=const(1),
        written=const(tile.width),
    )
    finish(tile, out, accs)


def _finish_one_by_one(spec: TileSpec, run: TileRecord, accs: list[Any]) -> None:
    """Store the channels that exist, where not all of a tile's do: each is stored from the scratch by the same code."""
    v = _tile(spec, 1).code()
    each, row = spec.rows * spec.vectors, spec.pixels * spec.vectors
    for c in range(spec.pixels):
        of_channel = [k for k in range(len(accs)) if k % row // spec.vectors == c]
        v.spill([accs[k] for k in of_channel], run.scratch + c * each * v.bytes)
    slots = v.slots(each, v.zero)
    with counted(run.valid) as n:
        at = run.scratch + n * (each * v.bytes)
        v.restore(slots, at)
        _finish(spec, run, slots, 1, n)
