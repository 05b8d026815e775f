"""The microkernel of `matrix_tile` with its operands' roles exchanged: pixels are columns, output channels are lines.

The left matrix is 16 output channels by the 64 bytes of their weights at a step, the right one these channels by 16
pixels. So accumulators are rows of 16 neighbouring pixels of an output channel, as planes (NCHW) have them: they are
stored whole, and neither windows nor results are transposed. Windows of planes, with channels interleaved in units of
four bytes, are right matrices already: each line is one unit of neighbouring pixels.

A tile is a whole row of a task's pixels, in blocks of 16. The last block is stored in part. As many blocks as the
registers hold are reduced and stored before the next; where too few are left, some are computed again.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.ir import const, counted
from blockconv.kernels.common.dot import multiply_accumulate
from blockconv.kernels.common.epilogue import finish
from blockconv.kernels.common.requantize import FLOAT32, dequantized
from blockconv.kernels.common.tile import LINE, Output, Tile
from blockconv.kernels.common.tile_record import TileRecord, each_step, kernel_of_tiles, source_of
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.conv.matrix_tile import (
    COLUMNS,
    INSTRUCTIONS,
    LINE_BYTES,
    LINES,
    WORD,
    Registers,
    call_unit,
    load_register,
    prefetch_next,
    store_register,
)

TOGETHER = 8  # output channels that are finished together, in the vector registers
_EXCHANGED = {"llvm.x86.tdpbusd": "llvm.x86.tdpbsud"}  # the instruction whose left bytes are signed, and right ones not


class MatrixPixelSpec(NamedTuple):
    """The compile-time parameters of a microkernel.

    element: the code of the accumulators' type.
    channels: output channels, whole blocks of 16.
    pixels: of a row.
    blocks: of pixels that are reduced together.
    src_unit: bytes from a window's unit of channels to the next.
    step, act, dot, dst, rounding, shifted, cut: as in `TileSpec`.
    """

    element: int
    channels: int
    pixels: int
    blocks: int
    src_unit: int
    step: int
    act: int
    dot: int
    dst: int
    rounding: int
    shifted: int
    cut: int = 0

    @property
    def all_blocks(self) -> int:
        return -(-self.pixels // COLUMNS)

    @property
    def line(self) -> int:
        """Bytes of an output channel's accumulators in the scratch."""
        return self.blocks * LINE_BYTES

    @property
    def registers(self) -> Registers:
        return Registers(self.blocks, self.channels // LINES)

    def finished(self, channels: int) -> Tile:
        """So many channels of one block of pixels as they are stored: they take the place of the pixels."""
        element, dst = self.element, 0
        if self.dst:
            element, dst = FLOAT32.code, self.dst if self.dst != FLOAT32.code else 0
        return Tile(element, 0, 1, channels, 1, COLUMNS, period=1, dst=dst, rounding=self.rounding if self.dst else 0)


def register_sizes(channels: int, blocks: int, step: int) -> Iterator[tuple[int, int, int]]:
    """(register, lines, bytes of a line) of each register, as `matrix_tile.configure` takes them."""
    vectors = channels // LINES
    registers = Registers(blocks, vectors)
    for k in range(vectors):
        yield registers.wei(k), LINES, step * WORD
        for i in range(blocks):
            yield registers.acc(i, k), LINES, COLUMNS * WORD
    for i in range(blocks):
        yield registers.src(i), step, COLUMNS * WORD


@jit.kernel
def matrix_pixel_tile(spec: MatrixPixelSpec):
    """Reduce tiles and store them: see `kernel_of_tiles`."""
    return kernel_of_tiles(functools.partial(_compute, spec=spec))


def _compute(b, run: TileRecord, record, spec: MatrixPixelSpec) -> None:
    """Reduce and store a tile. Accumulators go through the scratch, [output channel][block][pixel]."""
    reduce = _reduce if spec.dot in INSTRUCTIONS else _emulate
    last = const(spec.all_blocks - spec.blocks)
    with counted(b, const(-(-spec.all_blocks // spec.blocks))) as index:
        first = index * spec.blocks
        first = b.select(first < last, first, last)
        steps = run.runs * run.run_steps
        ahead = index * steps * (run.prefetch_lines * LINE)
        now = run._replace(src=run.src + first * LINE_BYTES, prefetch=run.prefetch + ahead)
        reduce(b, spec, now)
        _Finish(b, spec, run, first).all_channels()


def _step(b, spec: MatrixPixelSpec, run: TileRecord, step) -> tuple[Any, Any]:
    """The addresses of a step's source and weights."""
    x = source_of(b, run, step)
    return x, run.wei + step * (spec.channels * spec.step * WORD)


def _reduce(b, spec: MatrixPixelSpec, run: TileRecord) -> None:
    registers, vectors = spec.registers, range(spec.channels // LINES)
    instruction = INSTRUCTIONS[spec.dot]
    instruction, line = _EXCHANGED.get(instruction, instruction), const(spec.step * WORD)
    for i in range(spec.blocks):
        for k in vectors:
            call_unit(b, "llvm.x86.tilezero", registers.acc(i, k))
    with each_step(b, run, bool(spec.cut)) as step:
        x, w = _step(b, spec, run, step)
        prefetch_next(b, run, step)
        for i in range(spec.blocks):
            load_register(b, registers.src(i), x + i * LINE_BYTES, const(spec.src_unit))
            for k in vectors:
                if i == 0:
                    load_register(b, registers.wei(k), w + k * LINES * spec.step * WORD, line)
                call_unit(b, instruction, registers.acc(i, k), registers.wei(k), registers.src(i))
    for i in range(spec.blocks):
        for k in vectors:
            at = run.scratch + (k * LINES * spec.line + i * LINE_BYTES)
            store_register(b, registers.acc(i, k), at, const(spec.line))


def _emulate(b, spec: MatrixPixelSpec, run: TileRecord) -> None:
    """The same as `_reduce`, by dot products of vectors."""
    v = Vectors(b, ElementType.of(spec.element), COLUMNS)
    with counted(b, const(spec.channels)) as channel:
        accs = v.slots(spec.blocks, v.zero)
        with each_step(b, run, bool(spec.cut)) as step:
            x, w = _step(b, spec, run, step)
            w = w + channel * (spec.step * WORD)
            with counted(b, const(spec.step)) as unit:
                weight = v.broadcast(w + unit * WORD)
                line = x + unit * spec.src_unit
                for i, slot in enumerate(accs):
                    pixels = v.load(line + i * LINE_BYTES)
                    b.store(multiply_accumulate(v, spec.dot, pixels, weight, b.load(slot)), slot)
        at = run.scratch + channel * spec.line
        for i, slot in enumerate(accs):
            v.store(b.load(slot), at + i * LINE_BYTES)


class _Finish:
    """The code that stores some blocks' accumulators, which lack the bias yet, some channels at a time.

    first: the number of the first block.
    """

    def __init__(self, builder, spec: MatrixPixelSpec, run: TileRecord, first) -> None:
        self.b, self.spec, self.run, self.first = builder, spec, run, first

    def all_channels(self) -> None:
        """Store the channels that exist, `TOGETHER` at a time, and the remainder one by one."""
        b, width = self.b, const(self.spec.channels)
        exist = b.select(self.run.valid < width, self.run.valid, width)
        whole = b.udiv(exist, const(TOGETHER))
        with counted(b, whole) as index:
            self.each_block(index * TOGETHER, TOGETHER)
        done = whole * TOGETHER
        with counted(b, exist - done) as index:
            self.each_block(done + index, 1)

    def each_block(self, channel, channels: int) -> None:
        """Store so many channels from this one on, of each block of pixels."""
        with counted(self.b, const(self.spec.blocks)) as index:
            self.block(channel, channels, index)

    def block(self, channel, channels: int, number) -> None:
        """Store so many channels of the block of this number."""
        b, spec, run, tile = self.b, self.spec, self.run, self.spec.finished(channels)
        v = Vectors(b, ElementType.of(spec.element), COLUMNS)
        acc = run.scratch + (channel * spec.line + number * LINE_BYTES)
        pixel = (self.first + number) * COLUMNS
        accs = []
        for k, bias in enumerate(self.each(v, run.bia, channel, channels)):
            accs += v.slots(1, v.add(v.load(acc + k * spec.line), bias))
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
            scratch=run.scratch + spec.channels * spec.line,
            clips=run.clips,
        )
        finish(b, tile, COLUMNS, spec.act, out, accs)

    def each(self, v: Vectors, first, channel, channels: int) -> list[Any]:
        """A word for each of so many output channels from this one on, broadcast to every lane."""
        at = first + channel * WORD
        return [v.broadcast(at + k * WORD) for k in range(channels)]
