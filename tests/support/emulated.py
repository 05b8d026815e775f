"""Instructions emulated for machines that lack them: dot products of bfloat16, and the unit that multiplies matrices.

Their multiply-accumulates have numbers of their own, by which kernels on disk are told from those of instructions.
After an edit here, clear the cache of kernels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blockconv.core.types import element
from blockconv.jit.ir import const, counted, stack_memory
from blockconv.jit.values import build
from blockconv.kernels.common.dot import _DOTS, MATRIX_DOTS, Dot, _emulated
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.conv.matrix_tile import LINE_BYTES, LINES, WORD, Unit


def vdpbf16ps(v: Vectors, x, w, acc):
    """The upper channel's product is added first. Denormal numbers count, which the instruction takes for zeros."""
    ints = Vectors(element("int32"), v.lanes)
    x, w = (build.bitcast(value, ints.kind) for value in (x, w))
    upper = [build.bitcast(value & ints.c(-1 << 16), v.kind) for value in (x, w)]
    lower = [build.bitcast(value << ints.c(16), v.kind) for value in (x, w)]
    return v.multiply_add(lower[0], lower[1], v.multiply_add(upper[0], upper[1], acc))


BRAIN = {"vdpbf16ps, emulated": Dot(105, 2, 2)}
_DOTS[105] = vdpbf16ps
EMULATED = {dot: dot._replace(number=100 + dot.number) for dot in MATRIX_DOTS.values()}
_PRODUCTS: dict[int, Callable[..., Any]] = {
    109: _emulated(4, True),
    110: _emulated(4, False),
    111: vdpbf16ps,
}
assert _PRODUCTS.keys() == {dot.number for dot in EMULATED.values()}


class EmulatedUnit(Unit):
    """Registers are on the stack."""

    def __init__(self, spec, registers, lines: int) -> None:
        super().__init__(spec, registers, lines)
        self.v, self.sizes = spec.tile.code(), registers.sizes(lines, spec.step)
        self.memory = {register: stack_memory.emit(LINES * LINE_BYTES) for register in self.sizes}

    def zero(self, register: int) -> None:
        self.each_line(register, lambda v, line, _: v.store(v.zero, line))

    def load(self, register: int, at, apart) -> None:
        self.each_line(register, lambda v, line, n: v.store(v.load(at + n * apart), line))

    def store(self, register: int, at, apart) -> None:
        self.each_line(register, lambda v, line, n: v.store(v.load(line), at + n * apart))

    def multiply(self, acc: int, left: int, right: int) -> None:
        v, (lines, line) = self.v, self.sizes[left]
        with counted(const(lines)) as n:
            held, scalars = (self.memory[register] + n * LINE_BYTES for register in (acc, left))
            (slot,) = v.slots(1, v.load(held))
            with counted(const(line // WORD)) as k:
                pair = v.broadcast(scalars + k * WORD), v.load(self.memory[right] + k * LINE_BYTES)
                x, w = reversed(pair) if self.registers.exchanged else pair
                build.store(_PRODUCTS[self.spec.dot](v, x, w, build.load(slot)), slot)
            v.store(build.load(slot), held)

    def each_line(self, register: int, body: Callable[[Vectors, Any, Any], None]) -> None:
        """body(code over a line, the line of a register, its number)."""
        lines, line = self.sizes[register]
        with counted(const(lines)) as n:
            body(Vectors(element("int32"), line // WORD), self.memory[register] + n * LINE_BYTES, n)
