"""The microkernel of `matrix_tile` with its operands' roles exchanged: pixels are columns, output channels are lines.

The left matrix is 16 output channels by the 64 bytes of their weights at a step, the right one these channels by 16
pixels. So accumulators are rows of 16 neighbouring pixels of an output channel, as planes (NCHW) have them: they are
stored whole, and neither windows nor results are transposed. Windows of planes, with channels interleaved in units of
four bytes, are right matrices already: each line is one unit of neighbouring pixels.

A tile is a whole row of a task's pixels, in blocks of 16. The last block is stored in part. As many blocks as the
registers hold are reduced and stored before the next; where too few are left, some are computed again.
"""

import functools
from typing import Any

from blockconv import jit
from blockconv.jit.ir import const, counted
from blockconv.kernels.common.epilogue import finish
from blockconv.kernels.common.microkernel import TileSpec
from blockconv.kernels.common.requantize import dequantized
from blockconv.kernels.common.tile import LINE, Output
from blockconv.kernels.common.tile_record import TileRecord, kernel_of_tiles
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.conv.matrix_tile import (
    COLUMNS,
    LINE_BYTES,
    LINES,
    WORD,
    Registers,
    Unit,
)

TOGETHER = 8  # output channels that are finished together, in the vector registers


@jit.kernel
def matrix_pixel_tile(spec: TileSpec):
    """Reduce tiles of a row and store them: see `kernel_of_tiles`.

    spec: its `rows` are the blocks of pixels that are reduced together, its vectors are blocks of output channels, and
        `src_channel` is from a window's unit of channels to the next.
    """
    return kernel_of_tiles(functools.partial(_compute, spec=spec))


def _compute(b, run: TileRecord, record, spec: TileSpec) -> None:
    """Reduce and store a tile. Accumulators go through the scratch, [output channel][block][pixel]."""
    blocks = -(-spec.pixels // COLUMNS)
    last = const(blocks - spec.rows)
    with counted(b, const(-(-blocks // spec.rows))) as index:
        first = index * spec.rows
        first = b.select(first < last, first, last)
        steps = run.runs * run.run_steps
        ahead = index * steps * (run.prefetch_lines * LINE)
        now = run._replace(src=run.src + first * LINE_BYTES, prefetch=run.prefetch + ahead)
        _reduce(b, spec, now)
        _Finish(b, spec, run, first).all_channels()


def _reduce(b, spec: TileSpec, run: TileRecord) -> None:
    line = spec.rows * LINE_BYTES
    unit = Unit(b, spec, Registers(spec.rows, spec.vectors, exchanged=True), LINES)
    unit.reduce(
        run,
        begin=lambda acc, k: unit.zero(acc),
        source=lambda x, i: (x + i * LINE_BYTES, const(spec.src_channel)),
        weights=lambda w, k: (w + k * LINES * spec.step * WORD, const(spec.step * WORD)),
        stored=lambda i, k: (run.scratch + (k * LINES * line + i * LINE_BYTES), const(line)),
    )


class _Finish:
    """The code that stores some blocks' accumulators, which lack the bias yet, some channels at a time.

    first: the number of the first block.
    """

    def __init__(self, builder, spec: TileSpec, run: TileRecord, first) -> None:
        self.b, self.spec, self.run, self.first = builder, spec, run, first
        self.line = spec.rows * LINE_BYTES  # of an output channel's accumulators in the scratch

    def all_channels(self) -> None:
        """Store the channels that exist, `TOGETHER` at a time, and the remainder one by one."""
        b, width = self.b, const(self.spec.tile.width)
        exist = b.select(self.run.valid < width, self.run.valid, width)
        whole = b.udiv(exist, const(TOGETHER))
        with counted(b, whole) as index:
            self.each_block(index * TOGETHER, TOGETHER)
        done = whole * TOGETHER
        with counted(b, exist - done) as index:
            self.each_block(done + index, 1)

    def each_block(self, channel, channels: int) -> None:
        """Store so many channels from this one on, of each block of pixels."""
        with counted(self.b, const(self.spec.rows)) as index:
            self.block(channel, channels, index)

    def block(self, channel, channels: int, number) -> None:
        """Store so many channels of the block of this number."""
        b, spec, run, v = self.b, self.spec, self.run, self.spec.tile.code(self.b)
        # Channels take the place of the pixels.
        tile = spec.finished._replace(rows=1, pixels=channels, vectors=1, period=1)
        acc = run.scratch + (channel * self.line + number * LINE_BYTES)
        pixel = (self.first + number) * COLUMNS
        accs = []
        for k, bias in enumerate(self.each(v, run.bia, channel, channels)):
            accs += v.slots(1, v.add(v.load(acc + k * self.line), bias))
        if spec.dst and not v.type.is_float:
            each = functools.partial(self.each, channel=channel, channels=channels)
            accs = dequantized(v, accs, (run.bia, run.scales), each, spec.shifted, run.activation)
        at = run.dst + (channel * run.dst_block + pixel * tile.itemsize)
        out = Output(
            dst=at,
            dst_row=const(0),
            dst_pixel=run.dst_block,
            dst_block=const(0),
            residual=run.residual,
            valid=const(1),
            written=spec.pixels - pixel,
            activation=run.activation,
            scratch=run.scratch + spec.tile.width * self.line,
            clips=run.clips,
        )
        finish(b, tile, COLUMNS, spec.act, out, accs)

    def each(self, v: Vectors, first, channel, channels: int) -> list[Any]:
        """A word for each of so many output channels from this one on, broadcast to every lane."""
        at = first + channel * WORD
        return [v.broadcast(at + k * WORD) for k in range(channels)]
