"""The microkernel of `matrix_tile` with its operands' roles exchanged: pixels are columns, output channels are lines.

The left matrix is 16 output channels by the 64 bytes of their weights at a step, the right one these channels by 16
pixels. So accumulators are rows of 16 neighbouring pixels of an output channel, as planes (NCHW) have them: they are
stored whole, and neither windows nor results are transposed. Windows of planes, with channels interleaved in units of
four bytes, are right matrices already: each line is one unit of neighbouring pixels.

A tile is a whole row of a task's pixels, in blocks of 16. The last block is stored in part. As many blocks as the
registers hold are reduced and stored before the next; where too few are left, some are computed again.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.ir import const
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


def _compute(b: Any, run: TileRecord, record: Any, spec: MatrixPixelSpec) -> None:
    """Reduce and store a tile. Accumulators go through the scratch, [output channel][block][pixel]."""
    reduce = _reduce if spec.dot in INSTRUCTIONS else _emulate
    last = const(spec.all_blocks - spec.blocks)
    with cgutils.for_range(b, const(-(-spec.all_blocks // spec.blocks))) as loop:
        first = b.mul(loop.index, const(spec.blocks))
        first = b.select(b.icmp_signed("<", first, last), first, last)
        steps = b.mul(run.runs, run.run_steps)
        ahead = b.mul(b.mul(loop.index, steps), b.mul(run.prefetch_lines, const(LINE)))
        now = run._replace(src=b.add(run.src, b.mul(first, const(LINE_BYTES))), prefetch=b.add(run.prefetch, ahead))
        reduce(b, spec, now)
        _Finish(b, spec, run, first).all_channels()


def _step(b: Any, spec: MatrixPixelSpec, run: TileRecord, step: Any) -> tuple[Any, Any]:
    """The addresses of a step's source and weights."""
    x = source_of(b, run, step)
    return x, b.add(run.wei, b.mul(step, const(spec.channels * spec.step * WORD)))


def _reduce(b: Any, spec: MatrixPixelSpec, run: TileRecord) -> None:
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
            load_register(b, registers.src(i), b.add(x, const(i * LINE_BYTES)), const(spec.src_unit))
            for k in vectors:
                if i == 0:
                    load_register(b, registers.wei(k), b.add(w, const(k * LINES * spec.step * WORD)), line)
                call_unit(b, instruction, registers.acc(i, k), registers.wei(k), registers.src(i))
    for i in range(spec.blocks):
        for k in vectors:
            at = b.add(run.scratch, const(k * LINES * spec.line + i * LINE_BYTES))
            store_register(b, registers.acc(i, k), at, const(spec.line))


def _emulate(b: Any, spec: MatrixPixelSpec, run: TileRecord) -> None:
    """The same as `_reduce`, by dot products of vectors."""
    v = Vectors(b, ElementType.of(spec.element), COLUMNS)
    with cgutils.for_range(b, const(spec.channels)) as channel:
        accs = v.slots(spec.blocks, v.zero)
        with each_step(b, run, bool(spec.cut)) as step:
            x, w = _step(b, spec, run, step)
            w = b.add(w, b.mul(channel.index, const(spec.step * WORD)))
            with cgutils.for_range(b, const(spec.step)) as unit:
                weight = v.broadcast(b.add(w, b.mul(unit.index, const(WORD))))
                line = b.add(x, b.mul(unit.index, const(spec.src_unit)))
                for i, slot in enumerate(accs):
                    pixels = v.load(b.add(line, const(i * LINE_BYTES)))
                    b.store(multiply_accumulate(v, spec.dot, pixels, weight, b.load(slot)), slot)
        at = b.add(run.scratch, b.mul(channel.index, const(spec.line)))
        for i, slot in enumerate(accs):
            v.store(b.load(slot), b.add(at, const(i * LINE_BYTES)))


class _Finish:
    """The code that stores some blocks' accumulators, which lack the bias yet, some channels at a time.

    first: the number of the first block.
    """

    def __init__(self, builder: Any, spec: MatrixPixelSpec, run: TileRecord, first: Any) -> None:
        self.b, self.spec, self.run, self.first = builder, spec, run, first

    def all_channels(self) -> None:
        """Store the channels that exist, `TOGETHER` at a time, and the remainder one by one."""
        b, width = self.b, const(self.spec.channels)
        exist = b.select(b.icmp_signed("<", self.run.valid, width), self.run.valid, width)
        whole = b.udiv(exist, const(TOGETHER))
        with cgutils.for_range(b, whole) as loop:
            self.each_block(b.mul(loop.index, const(TOGETHER)), TOGETHER)
        done = b.mul(whole, const(TOGETHER))
        with cgutils.for_range(b, b.sub(exist, done)) as loop:
            self.each_block(b.add(done, loop.index), 1)

    def each_block(self, channel: Any, channels: int) -> None:
        """Store so many channels from this one on, of each block of pixels."""
        with cgutils.for_range(self.b, const(self.spec.blocks)) as loop:
            self.block(channel, channels, loop.index)

    def block(self, channel: Any, channels: int, number: Any) -> None:
        """Store so many channels of the block of this number."""
        b, spec, run, tile = self.b, self.spec, self.run, self.spec.finished(channels)
        v = Vectors(b, ElementType.of(spec.element), COLUMNS)
        acc = b.add(run.scratch, b.add(b.mul(channel, const(spec.line)), b.mul(number, const(LINE_BYTES))))
        pixel = b.mul(b.add(self.first, number), const(COLUMNS))
        accs = []
        for k, bias in enumerate(self.each(v, run.bia, channel, channels)):
            accs += v.slots(1, v.add(v.load(b.add(acc, const(k * spec.line))), bias))
        if spec.dst and not v.type.is_float:
            each = functools.partial(self.each, channel=channel, channels=channels)
            accs = dequantized(v, accs, (run.bia, run.scales), each, spec.shifted, run.activation)
        at = b.add(run.dst, b.add(b.mul(channel, run.dst_block), b.mul(pixel, const(tile.itemsize))))
        out = Output(
            dst=at,
            dst_row=const(0),
            dst_pixel=run.dst_block,
            dst_block=const(0),
            residual=run.residual,
            valid=const(1),
            written=b.sub(const(spec.pixels), pixel),
            activation=run.activation,
            scratch=b.add(run.scratch, const(spec.channels * spec.line)),
        )
        finish(b, tile, COLUMNS, spec.act, out, accs)

    def each(self, v: Vectors, first: Any, channel: Any, channels: int) -> list[Any]:
        """A word for each of so many output channels from this one on, broadcast to every lane."""
        at = self.b.add(first, self.b.mul(channel, const(WORD)))
        return [v.broadcast(self.b.add(at, const(k * WORD))) for k in range(channels)]
