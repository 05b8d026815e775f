"""A step of a recurrent layer as vector code: sums of products with the last hidden values, and the gates."""

from collections.abc import Iterator
from typing import Any, NamedTuple

from blockconv.core import target
from blockconv.core.activation import ACTIVATIONS
from blockconv.core.eltwise_problem import COLUMNS
from blockconv.core.python import zipped
from blockconv.core.types import ElementType
from blockconv.jit.ir import const, counted, emitted
from blockconv.jit.values import alloca_once
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.vectors import Vectors


class RecurrentStep(NamedTuple):
    """A step of one image in one direction; addresses.

    src: the inputs' terms of each gate.
    own: arrays in the type that is computed with: hidden values; an LSTM's cells, or reset hidden values; the hidden
        values' terms of each gate.
    last: these terms of the last gate of a GRU.
    dst: the hidden values that the step gives.
    size: the number of hidden values.
    """

    src: int
    own: int
    last: int
    dst: int
    size: int


HIDDEN, CELL, SUMS = range(3)  # arrays of a step


def add_products(kind: ElementType, lanes: int, images: int):
    """Code for sums += x @ weight, of `rows` rows of weights in `blocks` blocks of columns (`COLUMNS`).

    images: so many vectors `x` and `sums`, each `apart` bytes after the last. A weight that is loaded serves them all.
    """

    @emitted
    def add(sums, x, weight, rows, blocks, apart) -> None:
        v = Vectors(kind, lanes, fma=target.isa().fma)
        line, count = COLUMNS * v.itemsize, COLUMNS * v.itemsize // v.bytes
        starts = [apart * k for k in range(images)]
        while images * count > target.isa().tile_registers * 3 // 4 and count > 1:
            count //= 2
        slots = [[alloca_once(v.kind) for _ in range(count)] for _ in range(images)]

        def each(offsets: list[Any], to) -> Iterator[tuple[Any, Any]]:
            for start, row in zipped(starts, slots):
                for slot, offset in zipped(row, offsets):
                    yield slot, to + start + offset

        def add_part(offsets: list[Any], to, first) -> None:
            for slot, address in each(offsets, to):
                slot.held = v.load(address)
            with counted(rows) as row:
                read = x + row * v.itemsize
                values = [v.broadcast(read + start) for start in starts]
                at = first + row * line
                for k, offset in enumerate(offsets):
                    loaded = v.load(at + offset)
                    for value, of_image in zipped(values, slots):
                        of_image[k].held = v.multiply_add(value, loaded, of_image[k].held)
            for slot, address in each(offsets, to):
                v.store(slot.held, address)

        with counted(blocks) as block:
            to = sums + block * line
            first = weight + block * rows * line
            for start in range(0, line, count * v.bytes):
                add_part([const(start + k * v.bytes) for k in range(count)], to, first)

    return add


class _Gates:
    """Code over vectors of hidden values at an offset in bytes of memory."""

    def __init__(self, element: ElementType, lanes: int, step: RecurrentStep) -> None:
        self.f, self.step = Floats(element, lanes), step
        self.v = self.f.computed

    def own(self, array: int, offset):
        """The address of a vector in an array of the step's own."""
        return self.step.own + self.step.size * (array * self.v.itemsize) + self.f.in_computed(offset)

    def input(self, gate: int, offset, mask):
        start = self.step.size * (gate * self.f.itemsize)
        return self.f.load(self.step.src + start + offset, mask)

    def gate(self, gate: int, offset, mask):
        """The sigmoid of a gate's input and sums, from 0 to 1."""
        sums = self.v.load(self.own(SUMS + gate, offset), mask)
        return self.v.sigmoid(self.input(gate, offset, mask) + sums)

    def tanh(self, x):
        code = ACTIVATIONS["tanh"].code
        assert code is not None
        return code(self.v, x)


def reset_hidden(element: ElementType, lanes: int):
    """Code that writes the hidden values, times a GRU's reset gate, to `cell`."""

    @emitted
    def reset(step: RecurrentStep) -> None:
        g = _Gates(element, lanes, step)

        def vector(offset, mask) -> None:
            hidden = g.v.load(g.own(HIDDEN, offset), mask)
            g.v.store(g.gate(1, offset, mask) * hidden, g.own(CELL, offset), mask)

        g.f.each(step.size, vector)

    return reset


def update(element: ElementType, lanes: int, is_lstm: bool, resets_sums: bool):
    """Code that makes the hidden values of a step, and an LSTM's cells. resets_sums: see `RecurrentProblem`."""

    @emitted
    def make(step: RecurrentStep) -> None:
        g = _Gates(element, lanes, step)
        v = g.v

        def lstm(offset, mask):
            at = g.own(CELL, offset)
            last = g.input(3, offset, mask) + v.load(g.own(SUMS + 3, offset), mask)
            kept = g.gate(2, offset, mask) * v.load(at, mask)
            cell = kept + g.gate(0, offset, mask) * g.tanh(last)
            v.store(cell, at, mask)
            return g.gate(1, offset, mask) * g.tanh(cell)

        def gru(offset, mask):
            sums = v.load(step.last + g.f.in_computed(offset), mask)
            sums = g.gate(1, offset, mask) * sums if resets_sums else sums
            new, kept = g.tanh(g.input(2, offset, mask) + sums), g.gate(0, offset, mask)
            hidden = v.load(g.own(HIDDEN, offset), mask)
            return (1.0 - kept) * new + kept * hidden

        def vector(offset, mask) -> None:
            hidden = (lstm if is_lstm else gru)(offset, mask)
            v.store(hidden, g.own(HIDDEN, offset), mask)
            g.f.store(hidden, step.dst + offset, mask)

        g.f.each(step.size, vector)

    return make
