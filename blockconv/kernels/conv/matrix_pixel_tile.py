"""The microkernel of `matrix_tile` with its operands' roles exchanged: pixels are columns, output channels are lines.

The left matrix is 16 output channels by the 64 bytes of their weights at a step, the right one these channels by 16
pixels. So accumulators are rows of 16 neighbouring pixels of an output channel, as planes (NCHW) have them: they are
stored whole, and neither windows nor results are transposed. Windows of planes, with channels interleaved in units of
four bytes, are right matrices already: each line is one unit of neighbouring pixels.

A tile is a whole row of a task's pixels, in blocks of 16. The last block is stored in part. As many blocks as the
registers hold are reduced and stored before the next; where too few are left, some are computed again.
"""

from typing import Any

from blockconv import jit
from blockconv.jit.ir import const, counted
from blockconv.jit.values import build, least
from blockconv.kernels.common.epilogue import finish
from blockconv.kernels.common.microkernel import TileSpec
from blockconv.kernels.common.requantize import dequantized
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.tile_record import TileRecord, kernel_of_tiles
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.conv.matrix_tile import COLUMNS, LINE_BYTES, LINES, WORD, Registers, Unit

TOGETHER = 8  # output channels that are finished together, in the vector registers


@jit.kernel
def matrix_pixel_tile(spec: TileSpec):
    """Reduce tiles of a row and store them: see `kernel_of_tiles`.

    spec: its `rows` are the blocks of pixels that are reduced together, its vectors are blocks of output channels, and
        `src_channel` is from a window's unit of channels to the next.
    """
    return kernel_of_tiles(_compute, spec)


def _compute(run: TileRecord, record, spec: TileSpec) -> None:
    """Reduce and store a tile. Accumulators go through the scratch, [output channel][block][pixel]."""
    blocks = -(-spec.pixels // COLUMNS)
    last = const(blocks - spec.rows)
    with counted(const(-(-blocks // spec.rows))) as index:
        first = index * spec.rows
        first = least(first, last)
        steps = run.runs * run.run_steps
        ahead = index * steps * (run.prefetch_lines * LINE)
        now = run._replace(src=run.src + first * LINE_BYTES, prefetch=run.prefetch + ahead)
        _reduce(spec, now)
        _finish(spec, run, first)


def _reduce(spec: TileSpec, run: TileRecord) -> None:
    line = spec.rows * LINE_BYTES
    unit = Unit(spec, Registers(spec.rows, spec.vectors, exchanged=True), LINES)
    unit.reduce(
        run,
        begin=lambda acc, k: unit.zero(acc),
        source=lambda x, i: (x + i * LINE_BYTES, const(spec.src_channel)),
        weights=lambda w, k: (w + k * LINES * spec.step * WORD, const(spec.step * WORD)),
        stored=lambda i, k: (run.scratch + (k * LINES * line + i * LINE_BYTES), const(line)),
    )


def _finish(spec: TileSpec, run: TileRecord, first) -> None:
    """Store some blocks' accumulators, which lack the bias yet, some channels at a time. first: the first block."""
    line, v, width = spec.rows * LINE_BYTES, spec.tile.code(), const(spec.tile.width)

    def block(channel, channels: int, number) -> None:
        """Store so many channels from this one on, of the block of this number."""

        def each(f: Vectors, address) -> list[Any]:
            """A word for each of the output channels, broadcast to every lane."""
            return [f.broadcast(address + channel * WORD + k * WORD) for k in range(channels)]

        # Channels take the place of the pixels.
        tile = spec.finished._replace(rows=1, pixels=channels, vectors=1, period=1, store_width=COLUMNS, has_parts=0)
        acc, pixel = run.scratch + (channel * line + number * LINE_BYTES), (first + number) * COLUMNS
        accs = v.in_slots(v.load(acc + k * line) + bias for k, bias in enumerate(each(v, run.bia)))
        if spec.dst and not v.type.is_float:
            accs = dequantized(v, accs, (run.bia, run.scales), each, spec.shifted, run.activation)
        out = run._replace(
            dst=run.dst + (channel * run.dst_block + pixel * tile.itemsize),
            dst_row=const(0),
            dst_pixel=run.dst_block,
            dst_block=const(0),
            valid=const(1),
            written=spec.pixels - pixel,
        )
        finish(tile, out, accs)

    exist = least(run.valid, width)
    whole = build.udiv(exist, const(TOGETHER))
    for begin, channels, count in ((const(0), TOGETHER, whole), (whole * TOGETHER, 1, exist - whole * TOGETHER)):
        with counted(count) as index, counted(const(spec.rows)) as number:
            block(begin + index * channels, channels, number)
