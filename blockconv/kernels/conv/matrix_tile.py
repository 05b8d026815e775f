"""The microkernel of convolution on a unit that multiplies matrices (Intel's AMX), with the same addresses as others'.

One instruction multiplies two matrices, and adds the products to a matrix of accumulators. The first has up to 16
pixels by 64 bytes of their channels, the second these channels by 16 output channels. Each matrix is read line by line,
at even distances: pixels of every window are so spaced, and weights for dot products are packed so anyway (`dot.py`). A
step of the reduction is then a tap of up to 64 bytes of channels, or a row of taps of fewer. A tile loads it once for
two by two such blocks of accumulators, or for four blocks of pixels: eight registers hold no more.

Accumulators go to the epilogue through memory, some pixels at a time. Tests emulate the unit where there is none
(`tests/support/emulated.py`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv import jit
from blockconv.core.checks import Pair
from blockconv.core.python import zipped
from blockconv.jit.ir import I8, I64, call_llvm, const, counted, emit_prefetch, emitted, pointer
from blockconv.jit.values import build
from blockconv.kernels.common.dot import MATRIX_DOTS, Dot
from blockconv.kernels.common.epilogue import finish
from blockconv.kernels.common.microkernel import TileSpec, real_accumulators
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.tile_record import TileRecord, each_step, kernel_of_tiles, source_of

REGISTERS = 8
LINES, LINE_BYTES = 16, 64  # of a register, at the most
COLUMNS = 16  # output channels of a block of accumulators
WORD = 4  # bytes of an accumulator, and of channels that are multiplied at once
MOST = 14  # vectors of accumulators that are finished together, in the vector registers
_EXCHANGED = {"tdpbusd": "tdpbsud"}  # the instruction whose left bytes are signed, and right ones not
Lines = tuple[Any, Any]  # the address of the first line of a matrix, and bytes from a line to the next
INSTRUCTIONS = {dot.number: name for name, dot in MATRIX_DOTS.items()}


def is_instruction(dot: Dot) -> bool:
    """Whether a multiply-accumulate is one of the unit's."""
    return dot.number in INSTRUCTIONS


class Block(NamedTuple):
    """Neighbouring pixels of a tile that are lines of one register: which row, which is the first, how many."""

    row: int
    first: int
    pixels: int


def row_blocks(rows: int, pixels: int, gap: int = 0) -> list[Block]:
    """The blocks of a tile of so many rows of so many pixels: a row is one, or several, all of one size.

    A row that they do not divide ends with a block that has pixels of the one before. gap: pixels between rows
    (`TileShape`), which are one row with these.
    """
    if gap:
        rows, pixels = 1, rows * (pixels + gap) - gap
    count = -(-pixels // LINES)
    each = -(-pixels // count)
    return [Block(r, min(k * each, pixels - each), each) for r in range(rows) for k in range(count)]


class Registers(NamedTuple):
    """Numbers of the matrix registers: accumulators by [block of pixels][block of output channels], weights, sources.

    Each block's source has a register of its own. Where there are too few, it overwrites the source before it.
    exchanged: weights are the left matrix, and not sources.
    """

    blocks: int
    vectors: int
    exchanged: bool = False

    def acc(self, block: int, vector: int) -> int:
        return block * self.vectors + vector

    def wei(self, vector: int) -> int:
        return self.blocks * self.vectors + vector

    def src(self, block: int) -> int:
        return min(REGISTERS - 1, (self.blocks + 1) * self.vectors + block)

    def sizes(self, lines: int, step: int) -> dict[int, Pair]:
        """(lines, bytes of a line) of each register; accumulators have `lines`, `step` elements of four bytes are
        multiplied."""
        left, right = map(self.src, range(self.blocks)), map(self.wei, range(self.vectors))
        if self.exchanged:
            left, right = right, left
        accs = range(self.blocks * self.vectors)
        return (
            dict.fromkeys(accs, (lines, COLUMNS * WORD))
            | dict.fromkeys(left, (lines, step * WORD))
            | dict.fromkeys(right, (step, COLUMNS * WORD))
        )


# ---------------------------------------------------------------- before tiles, and after them


def _configuration(sizes: tuple[int, ...]) -> list[int]:
    """The words that say how large the registers are: palette 1, bytes of lines from byte 16 on, lines from 48 on."""
    said = bytearray(64)
    said[0] = 1
    for register, lines, line in zipped(*(sizes[k::3] for k in range(3))):
        said[16 + 2 * register] = line
        said[48 + register] = lines
    return [int.from_bytes(said[k : k + 8], "little", signed=True) for k in range(0, 64, 8)]


@jit.kernel
def configure(*sizes):
    """Say how large the registers are: of each the number, lines and bytes of a line. The argument is the address of 64
    bytes."""
    words = _configuration(sizes)

    @emitted
    def load_configuration(at):
        kind = ir.ArrayType(I64, len(words))
        to = pointer(at, kind)
        build.store(kind(words), to, align=8)
        call_llvm("llvm.x86.ldtilecfg", None, [pointer(at, I8)])

    return load_configuration


@jit.kernel
def release():
    """Leave the registers, which the system saves otherwise whenever it takes the processor away."""

    @emitted
    def release_registers():
        call_llvm("llvm.x86.tilerelease", None, [])

    return release_registers


# ---------------------------------------------------------------- the reduction


class Unit:
    """The reduction of a tile by the unit. Registers are given by their numbers; lines are so many bytes apart.

    lines: of a block of accumulators.
    """

    def __init__(self, spec: TileSpec, registers: Registers, lines: int) -> None:
        self.spec, self.registers, self.lines = spec, registers, lines

    def reduce(
        self,
        run: TileRecord,
        begin: Callable[[int, int], None],
        source: Callable[[Any, int], Lines],
        weights: Callable[[Any, int], Lines],
        stored: Callable[[int, int], Lines],
    ) -> None:
        """Reduce a tile, and leave the accumulators in the scratch.

        begin(register, k): sets an accumulator of block `k` of output channels.
        source(x, i), weights(w, k): the matrix of block `i` of pixels, and of block `k` of output channels. x, w: a
            step's source and weights.
        stored(i, k): where the accumulators of two blocks go.
        """
        spec, (count, vectors, _) = self.spec, self.registers
        acc, src, wei = self.registers.acc, self.registers.src, self.registers.wei
        pairs = [(i, k) for i in range(count) for k in range(vectors)]
        for i, k in pairs:
            begin(acc(i, k), k)
        with each_step(run, spec.cut) as step:
            x, w = source_of(run, step), run.wei + step * (spec.step * spec.vectors * COLUMNS * WORD)
            prefetch_next(run, step)
            for i, k in pairs:
                if k == 0:
                    self.load(src(i), *source(x, i))
                if i == 0:
                    self.load(wei(k), *weights(w, k))
                self.multiply(acc(i, k), *((wei(k), src(i)) if self.registers.exchanged else (src(i), wei(k))))
        for i, k in pairs:
            self.store(acc(i, k), *stored(i, k))

    def zero(self, register: int) -> None:
        self.call("tilezero", register)

    def load(self, register: int, at, apart) -> None:
        self.call("tileloadd64", register, pointer(at, I8), apart)

    def store(self, register: int, at, apart) -> None:
        self.call("tilestored64", register, pointer(at, I8), apart)

    def multiply(self, acc: int, left: int, right: int) -> None:
        """Add the products of two matrices to accumulators."""
        name = INSTRUCTIONS[self.spec.dot]
        self.call(_EXCHANGED.get(name, name) if self.registers.exchanged else name, acc, left, right)

    def call(self, name: str, *args) -> None:
        given = [I8(x) if isinstance(x, int) else x for x in args]
        call_llvm(f"llvm.x86.{name}", None, given)


# ---------------------------------------------------------------- a tile


@jit.kernel
def matrix_tile(spec: TileSpec):
    """Reduce tiles and store them: see `kernel_of_tiles`.

    spec: of vectors of 16 lanes; its `step` counts the elements of all taps of a step.
    """
    return kernel_of_tiles(_compute, spec)


def _compute(run: TileRecord, record, spec: TileSpec) -> None:
    """Reduce and store a tile. Accumulators go through the scratch, [row][pixel][output channel]."""
    _reduce(spec, run)
    _finish(spec, run)


def _reduce(spec: TileSpec, run: TileRecord) -> None:
    blocks, width_bytes = row_blocks(spec.rows, spec.pixels, spec.gap), spec.vectors * COLUMNS * WORD

    def source(x, i: int):
        at = x + blocks[i].first * run.src_pixel
        return (at + blocks[i].row * run.src_row) if blocks[i].row else at, run.src_pixel

    def stored(i: int, k: int):
        pixel = blocks[i].row * spec.pixels + blocks[i].first
        return run.scratch + (pixel * width_bytes + k * COLUMNS * WORD), const(width_bytes)

    unit = Unit(spec, Registers(len(blocks), spec.vectors), blocks[0].pixels)
    unit.reduce(
        run,
        begin=lambda acc, k: unit.load(acc, run.bia + k * COLUMNS * WORD, const(0)),  # each line is the bias
        source=source,
        weights=lambda w, k: (w + k * COLUMNS * WORD, const(width_bytes)),
        stored=stored,
    )


def prefetch_next(run: TileRecord, step) -> None:
    """Prefetch a step's share of the memory that is read after the tile."""
    at = run.prefetch + step * run.prefetch_lines * LINE
    with counted(run.prefetch_lines) as line:
        emit_prefetch(at + line * LINE)


def _finish(spec: TileSpec, run: TileRecord) -> None:
    """Store the accumulators from the scratch, some pixels of a row and some of their vectors at a time."""
    vectors, v = 1 if spec.store_width == 1 else spec.vectors, spec.tile.code()
    most = LINES if spec.store_width == 1 else MOST // vectors
    pixels = max(k for k in range(1, most + 1) if spec.pixels % k == 0)
    part, each = spec._replace(rows=1, pixels=pixels, vectors=vectors), spec.vectors * v.bytes
    parts = const(spec.rows), const(spec.pixels // pixels), const(spec.vectors // vectors)
    with counted(parts[0]) as row, counted(parts[1]) as index, counted(parts[2]) as vector:
        pixel, before, column = index * pixels, vector * COLUMNS, vector * v.bytes
        first = row * (spec.pixels + spec.gap) + pixel
        acc = run.scratch + first * each + column
        accs = v.in_slots(v.load(acc + (p * each + k * v.bytes)) for p in range(pixels) for k in range(vectors))
        out = run._replace(
            dst=run.dst + (row * run.dst_row + pixel * run.dst_pixel + before * run.dst_block),
            valid=run.valid - before,
            written=run.written - before,
        )
        accs = real_accumulators(part, (run.bia + column, run.scales + column), run.activation, accs)
        finish(part.finished, out, accs)
