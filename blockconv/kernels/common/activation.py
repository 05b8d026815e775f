"""Activations in kernels: the words that select one, and its code. `core.activation` defines them."""

import struct
from collections.abc import Iterator
from typing import Any

from llvmlite import ir

from blockconv.core.activation import ACTIVATIONS, NUMBERS, Activation, ActivationKind
from blockconv.core.python import bounded_cache
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, float64_bits, word
from blockconv.jit.ir import I32, I64, const, emitted, pointer
from blockconv.jit.values import binary, build
from blockconv.kernels.common.vectors import Vectors


class ActivationArguments(Arguments):
    """An activation as kernels read it."""

    number = word("the activation's, from 1 on; 0 is clip(first, second)")
    first = float64_bits("its first parameter")
    second = float64_bits("its second parameter")


def activation_arguments(act: Activation) -> ActivationArguments:
    """An activation as kernels read it."""
    return _arguments(act.number, *struct.unpack("2q", struct.pack("2d", act.first, act.second)))


@bounded_cache
def _arguments(number: int, first: int, second: int) -> ActivationArguments:
    return ActivationArguments(number=number, first=first, second=second)


def activate(v: Vectors, x, number, parameters: list[Any]):
    """The activation of this number at run time on the vector `x`; unknown numbers leave it as it is."""
    start = build.block
    done = build.append_basic_block("activated")
    switch = build.switch(number, done)
    results = [(x, start)]
    for name, definition in ACTIVATIONS.items():
        if definition.code is None:
            continue
        value = NUMBERS[name]
        block = build.append_basic_block(f"activation_{value}")
        switch.add_case(I64(value), block)
        build.position_at_end(block)
        results.append((definition.code(v, x, *parameters[: len(definition.parameters)]), build.block))
        build.branch(done)
    build.position_at_end(done)
    phi = build.phi(x.type)
    for result, block in results:
        phi.add_incoming(result, block)
    return phi


def parameters_at(v: Vectors, act) -> Iterator[Any]:
    """The two parameters of the activation whose `ActivationArguments` are at the address `act`, as elements."""
    for name in ("first", "second"):
        at = act + 8 * ActivationArguments.fields[name].first
        yield build.fptrunc(build.load(pointer(at, ir.DoubleType())), v.element)


@emitted
def activate_scalar(value, address, kind):
    """The activation of one float, as it is described at `address`; kind: an `ActivationKind`, at run time."""
    v = Vectors(ElementType.of(8 if value.type == ir.DoubleType() else 4), 1)
    low, high = parameters_at(v, address)
    number = ActivationArguments.load(address).number
    number = build.select(binary("eq", kind, ActivationKind.OTHER), number, const(0))
    other = activate(v, v.splat(value), number, [low, high])
    clipped = v.clip(v.splat(value), v.splat(low), v.splat(high))
    chosen = build.select(binary("eq", kind, ActivationKind.CLIP), clipped, other)
    return build.extract_element(chosen, I32(0))
