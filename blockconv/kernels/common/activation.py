"""Activations in kernels: the words that select one, and its code. `core.activation` defines them."""

import struct
from collections.abc import Callable, Iterator
from typing import Any

from llvmlite import ir

from blockconv import jit
from blockconv.core.activation import ACTIVATIONS, NUMBERS, Activation, ActivationKind
from blockconv.core.python import bounded_cache
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, float64_bits, word
from blockconv.jit.ir import I32, I64, call_kernel, const, counted, emitted, pointer
from blockconv.jit.values import binary, build, truth
from blockconv.kernels.common.vectors import Vectors


class ActivationArguments(Arguments):
    """An activation as kernels read it."""

    number = word("the activation's, from 1 on; 0 is clip(first, second), and -1 is none")
    first = float64_bits("its first parameter")
    second = float64_bits("its second parameter")


def activation_arguments(act: Activation) -> ActivationArguments:
    """An activation as kernels read it."""
    number = -1 if act.is_identity else act.number
    return _arguments(number, *struct.unpack("2q", struct.pack("2d", act.first, act.second)))


@bounded_cache
def _arguments(number: int, first: int, second: int) -> ActivationArguments:
    return ActivationArguments(number=number, first=first, second=second)


def activations(v: Vectors, number, parameters: list[Any], table=ACTIVATIONS) -> Iterator[Callable[[Any], Any]]:
    """The code of each activation, or function of another table, on a vector.

    A block of its own holds what is emitted with it. The number selects the block at run time.
    """
    done = build.append_basic_block("activated")
    switch = build.switch(number, done)
    for name, definition in table.items():
        if definition.code is not None:
            block = build.append_basic_block(name)
            switch.add_case(I64(NUMBERS[name]), block)
            build.position_at_end(block)
            yield lambda x, d=definition: d.code(v, x, *parameters[: len(d.parameters)])  # type: ignore[misc]
            build.branch(done)
    build.position_at_end(done)


def parameters_at(v: Vectors, act) -> Iterator[Any]:
    """The two parameters of the activation whose `ActivationArguments` are at the address `act`, as elements."""
    for name in ("first", "second"):
        at = act + 8 * ActivationArguments.fields[name].first
        yield build.fptrunc(build.load(pointer(at, ir.DoubleType())), v.element)


def clip(v: Vectors, slots: list[Any], activation) -> None:
    """Clip floats, if the activation at this address does."""
    with build.if_then(binary("eq", ActivationArguments.load(activation).number, 0)):
        low, high = (v.splat(bound) for bound in parameters_at(v, activation))
        for slot in slots:
            slot.held = v.clip(slot.held, low, high)


def compute(v: Vectors, slots: list[Any], at) -> None:
    """Compute an activation that does more than clip, if `ConvOperands` have one. at: what has their words."""
    with build.if_then(truth(at.activate), likely=False):
        memory = v.spilled(slots)
        call_kernel.emit(at.activate, memory, const(len(slots)), at.activation, const(0))
        v.restore(slots, memory)


@jit.kernel
def activate_vectors(element: ElementType, lanes, fma):
    """Apply the activation described at an address to so many vectors: tiles that are spilled.

    Its code, longer than a tile's, is compiled once for all of them.
    """

    @emitted
    def each(address, count, act):
        v, number = Vectors(element, lanes, bool(fma)), ActivationArguments.load(act).number
        for code in activations(v, number, list(parameters_at(v, act))):
            with counted(count) as n:
                at = address + n * v.bytes
                v.store(code(v.load(at)), at)

    return each


def activation_kernel(kind: int, v: Vectors) -> int:
    """The address of the kernel that computes an activation of this `ActivationKind` on vectors; 0: none does."""
    return activate_vectors(v.type.code, v.lanes, v.fma).address if kind == ActivationKind.OTHER else 0


@emitted
def activate_scalar(value, act):
    """The activation, described at the address `act`, of one float."""
    v = Vectors(ElementType.of(8 if value.type == ir.DoubleType() else 4), 1)
    (slot,) = v.in_slots([v.splat(value)])
    clip(v, [slot], act)
    for code in activations(v, ActivationArguments.load(act).number, list(parameters_at(v, act))):
        slot.held = code(slot.held)
    return build.extract_element(slot.held, I32(0))
