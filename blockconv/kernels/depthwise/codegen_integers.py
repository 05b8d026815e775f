"""The tile of a depthwise convolution of bytes.

A lane of 32 bits takes as many taps at once as it has room for. A dot product sums over taps here, and not over
channels as in a convolution of many channels. The taps are those of the loop axis. Their vectors of the source are
interleaved element by element (`unpacked.py`), once for every tap of the unrolled axis. Weights are packed likewise,
[tap of the unrolled axis] within [group of taps of the loop axis] or the other way round, [lane][tap of the group].
Weights, biases and scales are in the order of the lanes, or, where a block of few channels repeats, packed once. Taps
within 16 bytes of each other, in rows of few channels a pixel, are shuffled from one load.

Signed bytes are read as unsigned, with 128 more (unsigned ones as signed, for Arm's `sdot`). Padding is the zero point.
Positions outside are read from memory that holds it, along both axes. Where vectors run over pixels, lanes masked off
are set to it. Without masks of bytes, rows are packed with it (`depthwise_packed`).
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir

from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.ir import I8, const, counted, emitted, opaque, shuffle, splat
from blockconv.jit.values import build
from blockconv.kernels.common.dot import by_number
from blockconv.kernels.common.requantize import EpilogueArguments, dequantized
from blockconv.kernels.common.unpacked import PARTS, interleaved
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.depthwise.codegen import FloatTile, Loader, times


@emitted
def tile(spec, run):
    """Reduce and store one tile."""
    (IntegerTile if spec.dot else FloatTile)(spec, run).emit()


def repeats(period: int, lanes: int) -> bool:
    """Whether each 16 lanes of a vector of bytes are of the same channels."""
    return period < lanes and 16 % period == 0


class IntegerTile(FloatTile):
    """The code of one tile of bytes, as `FloatTile` is of floats."""

    def biases(self) -> list[Any]:
        spec = self.spec
        self.bytes = self.read_as = Vectors(element("uint8"), spec.lanes)
        self.dot = by_number(spec.dot)
        self.taken = self.dot.channels
        flip = 128 if (ElementType.of(spec.src).kind == SIGNED) != self.dot.is_signed else 0
        self.flip = ir.Constant(self.bytes.kind, [flip] * spec.lanes) if flip else None
        zero_point = build.trunc(EpilogueArguments.load(self.out.activation).src_fill, I8)
        self.border = splat(zero_point, spec.lanes)
        return self.v.in_slots(self.lanes(self.v, self.run.bia) * self.vectors())

    def vectors(self) -> int:
        """Vectors of outputs; `lanes` gives the parts of each."""
        return self.spec.loops * self.spec.unrolled

    def finished(self) -> list[Any]:
        """The accumulators, as float32 where they are not stored as they are."""
        if not self.spec.dst:
            return self.accs
        at = self.run.bia, self.run.scales
        return dequantized(self.v, self.accs, at, self.lanes, self.spec.shifted, self.out.activation)

    def lanes(self, v: Vectors, address) -> list[Any]:
        """The parts of a vector of values at an address: one for each lane, or each channel of a block."""
        period = self.spec.period
        if not repeats(period, self.spec.lanes):
            return [v.load(address + j * v.bytes) for j in range(PARTS)]
        if period == 1:
            return [v.broadcast(address)] * PARTS
        few = min(period, 4)  # that a part has of each 16
        found = {}
        for first in {few * j % period for j in range(PARTS)}:
            value = v.load(address + first * v.itemsize, lanes=few)
            found[first] = shuffle(value, value, [k % few for k in range(v.lanes)])
        return [found[few * j % period] for j in range(PARTS)]

    # ------------------------------------------------------------ the reduction

    def reduce(self, variant) -> None:
        spec, taken, (edges, _) = self.spec, self.taken, variant
        full, rest = divmod(spec.joined, taken)
        if full == 1:
            self.group(edges, const(0), taken)
        elif full:
            with counted(const(full)) as group:
                self.group(edges, group, taken)
        if rest:
            self.group(edges, const(full), rest)

    def group(self, edges: tuple[bool, bool], number, taps: int) -> None:
        """A group of so many taps of the loop axis."""
        wei, first = self.run.wei + number * self.loop.wei_step, number * self.dot.channels

        def weights() -> Callable[[int], list[Any]]:
            # Loaded where they are used: held, they would be spilled.
            here, step = opaque(wei), opaque(self.unrolled.wei_step)
            return lambda t: self.lanes(self.v, here + times(step, t))

        for q in range(self.spec.loops):
            self.feed(edges, [self.row(first + k, q) for k in range(taps)], weights, self.slots(q))

    def parts(self, address) -> list[Any]:
        return self.lanes(self.v, address)

    def row(self, tap, q: int) -> tuple[Any, Any, Loader]:
        """As of floats.

        Packed rows of pixels are in phases, one for each pixel of a stride; `size` is the bytes of one, and `src_step`
        those of a pixel.
        """
        if not self.spec.is_packed:
            return super().row(tap, q)
        ahead, columns = tap * self.loop.dilation, const(self.spec.columns)
        phase, pixels = build.urem(ahead, columns), build.udiv(ahead, columns)
        at = phase * self.loop.size + pixels * self.loop.src_step
        at = self.run.src + (at + q * self.spec.lanes)
        return at, self.unrolled.src_step, Loader(self.bytes, self.spec, self.run)

    def read(self, at: list[Any], rows: list[tuple[Any, Any, Loader]]) -> list[Any]:
        if not self.spec.shuffled:
            return super().read(at, rows)
        each = 4 // self.dot.itemsize
        taken, zero = [], self.spec.lanes
        for lane in range(self.spec.lanes // PARTS):
            first = lane // 4 * 16 + lane % 4
            for t in range(each):
                taken.append(first + t * self.spec.shuffled if t < len(rows) else zero)
                taken += [zero] * (self.dot.itemsize - 1)
        found = []
        for j in range(PARTS):
            x = self.bytes.load(at[0] + 4 * j)
            found.append(build.bitcast(shuffle(self.operand(x), self.bytes.zero, taken), self.v.kind))
        return found

    def operand(self, x):
        """Bytes of the source as the dot product takes them: unsigned, unless it is of signed bytes."""
        return x if self.flip is None else opaque(x ^ self.flip)

    def joined(self, rows: list[Any]) -> list[Any]:
        """The parts of vectors of the source, one a tap. Where there are fewer taps, weights are zero."""
        rows = [self.operand(x) for x in rows] + [self.bytes.zero] * (self.dot.channels - len(rows))
        return interleaved(rows, self.dot.itemsize)
