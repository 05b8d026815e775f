"""Activations: their names and parameters, and their code over vectors.

float32 uses polynomials that stay within 5e-7 of the largest value; float64 calls the C library
lane by lane. A NaN stays a NaN in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from blockconv.emit import I64, call_llvm
from blockconv.errors import ArgumentError

__all__ = ["IDENTITY", "Activation", "Vectors", "activate_vector", "activation"]


@dataclass(frozen=True)
class Activation:
    """An activation with its two parameters (0 where it has fewer). number 0 is clip(first, second)."""

    name: str
    number: int = 0
    first: float = -math.inf
    second: float = math.inf

    @property
    def is_identity(self) -> bool:
        return self.number == 0 and self.first == -math.inf and self.second == math.inf


IDENTITY = Activation("none")

# name -> (number, default parameters). ReLU and its like are clips.
_TABLE: dict[str, tuple[int, tuple[float, ...]]] = {
    "none": (0, ()),
    "relu": (0, ()),
    "relu6": (0, ()),
    "clip": (0, (-math.inf, math.inf)),
    "leaky_relu": (1, (0.01,)),
    "sigmoid": (2, ()),
    "tanh": (3, ()),
    "silu": (4, ()),
    "hardswish": (5, ()),
    "gelu": (6, ()),
    "hardsigmoid": (7, (1 / 6, 0.5)),
}
_FIXED_CLIPS = {"none": (-math.inf, math.inf), "relu": (0.0, math.inf), "relu6": (0.0, 6.0)}


def activation(spec: str | tuple[Any, ...] | None, op: str = "conv2d") -> Activation:
    """An Activation from None, a name, or (name, *parameters).

    Names: relu, relu6, clip(low, high), leaky_relu(slope=0.01), sigmoid, tanh, silu, hardswish, gelu (by erf),
    hardsigmoid(alpha=1/6, beta=1/2). Raises ArgumentError for anything else.
    """
    if spec is None:
        return IDENTITY
    name, *given = spec if isinstance(spec, (tuple, list)) and spec else (spec,)
    if not isinstance(name, str) or name not in _TABLE:
        raise ArgumentError(op, "activation", spec, f"has to be one of {', '.join(_TABLE)}, or (name, *parameters)")
    number, defaults = _TABLE[name]
    if len(given) > len(defaults):
        raise ArgumentError(op, "activation", spec, f"{name} takes {len(defaults)} parameters")
    try:
        values = [float(x) for x in given]
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(op, "activation", spec, "its parameters have to be numbers") from None
    values += defaults[len(values) :]
    if name == "clip" and values[0] > values[1]:
        raise ArgumentError(op, "activation", spec, "the low of a clip has to be at most its high", "swap them")
    if name in _FIXED_CLIPS:
        values = list(_FIXED_CLIPS[name])
    return Activation(name, number, *values) if number == 0 else Activation(name, number, *[*values, 0.0, 0.0][:2])


# ---------------------------------------------------------------- code


class Vectors:
    """Arithmetic on vectors of one type, written as expressions."""

    def __init__(self, builder: Any, kind: Any) -> None:
        self.b, self.kind, self.count = builder, kind, kind.count
        self.single = isinstance(kind.element, ir.FloatType)
        self.suffix = f"v{kind.count}f{32 if self.single else 64}"

    def c(self, value: float) -> Any:
        return ir.Constant(self.kind, [value] * self.count)

    def all(self, scalar: Any) -> Any:
        one = self.b.insert_element(ir.Constant(self.kind, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), self.count), [0] * self.count)
        return self.b.shuffle_vector(one, one, zeros)

    def add(self, x: Any, y: Any) -> Any:
        return self.b.fadd(x, y)

    def mul(self, x: Any, y: Any) -> Any:
        return self.b.fmul(x, y)

    def clip(self, x: Any, low: float, high: float) -> Any:
        x = self.b.select(self.b.fcmp_ordered("<", x, self.c(low)), self.c(low), x)
        return self.b.select(self.b.fcmp_ordered(">", x, self.c(high)), self.c(high), x)

    def poly(self, x: Any, coefficients: list[float]) -> Any:
        """Horner, highest power first."""
        value = self.c(coefficients[0])
        for k in coefficients[1:]:
            value = self.add(self.mul(value, x), self.c(k))
        return value

    def exp(self, x: Any) -> Any:
        """e^x; in float32 infinity above 88.4, and not below e^-87."""
        if not self.single:
            return call_llvm(self.b, f"llvm.exp.{self.suffix}", self.kind, [x])
        is_nan = self.b.fcmp_unordered("uno", x, x)
        bounded = self.b.select(is_nan, self.c(0.0), self.clip(x, -87.0, 89.0))
        n = call_llvm(self.b, f"llvm.rint.{self.suffix}", self.kind, [self.mul(bounded, self.c(1 / math.log(2)))])
        # log(2) in two parts: n times the first is exact.
        rest = self.add(bounded, self.mul(n, self.c(-0.693359375)))
        rest = self.add(rest, self.mul(n, self.c(2.12194440e-4)))
        value = self.poly(rest, [1 / 720, 1 / 120, 1 / 24, 1 / 6, 0.5, 1.0, 1.0])
        ints = ir.VectorType(ir.IntType(32), self.count)
        biased = self.b.add(self.b.fptosi(n, ints), ir.Constant(ints, [127] * self.count))
        power = self.b.bitcast(self.b.shl(biased, ir.Constant(ints, [23] * self.count)), self.kind)
        return self.b.select(is_nan, x, self.mul(value, power))

    def sigmoid(self, x: Any) -> Any:
        return self.b.fdiv(self.c(1.0), self.add(self.c(1.0), self.exp(self.b.fneg(x))))

    def each_lane(self, function: str, x: Any) -> Any:
        """A function of the C library on each lane of float64."""
        out = ir.Constant(self.kind, ir.Undefined)
        for lane in range(self.count):
            at = ir.Constant(ir.IntType(32), lane)
            value = call_llvm(self.b, function, self.kind.element, [self.b.extract_element(x, at)])
            out = self.b.insert_element(out, value, at)
        return out

    def erf(self, x: Any) -> Any:
        """float32 by Abramowitz and Stegun 7.1.26 (1.5e-7 absolute), float64 by the C library."""
        if not self.single:
            return self.each_lane("erf", x)
        negative = self.b.fcmp_ordered("<", x, self.c(0.0))
        size = self.b.select(negative, self.b.fneg(x), x)
        t = self.b.fdiv(self.c(1.0), self.add(self.c(1.0), self.mul(size, self.c(0.3275911))))
        tail = self.poly(t, [1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592, 0.0])
        value = self.b.fsub(self.c(1.0), self.mul(tail, self.exp(self.b.fneg(self.mul(size, size)))))
        return self.b.select(negative, self.b.fneg(value), value)


def _leaky_relu(v: Vectors, x: Any, params: list[Any]) -> Any:
    return v.b.select(v.b.fcmp_ordered("<", x, v.c(0.0)), v.mul(x, v.all(params[0])), x)


def _tanh(v: Vectors, x: Any, params: list[Any]) -> Any:
    """float32 as Cephes has it: x + x^3 p(x^2) near 0, where 2 sigmoid(2x) - 1 would lose what is small."""
    if not v.single:
        return v.each_lane("tanh", x)
    square = v.mul(x, x)
    coefficients = [-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1]
    small = v.add(x, v.mul(v.mul(v.poly(square, coefficients), square), x))
    large = v.add(v.mul(v.sigmoid(v.mul(x, v.c(2.0))), v.c(2.0)), v.c(-1.0))
    return v.b.select(v.b.fcmp_ordered("<", square, v.c(0.625 * 0.625)), small, large)


def _silu(v: Vectors, x: Any, params: list[Any]) -> Any:
    return v.mul(x, v.sigmoid(x))


def _hardswish(v: Vectors, x: Any, params: list[Any]) -> Any:
    return v.mul(x, v.mul(v.clip(v.add(x, v.c(3.0)), 0.0, 6.0), v.c(1 / 6)))


def _gelu(v: Vectors, x: Any, params: list[Any]) -> Any:
    return v.mul(v.mul(x, v.c(0.5)), v.add(v.c(1.0), v.erf(v.mul(x, v.c(math.sqrt(0.5))))))


def _hardsigmoid(v: Vectors, x: Any, params: list[Any]) -> Any:
    return v.clip(v.add(v.mul(x, v.all(params[0])), v.all(params[1])), 0.0, 1.0)


_CODE: dict[int, Callable[[Vectors, Any, list[Any]], Any]] = {
    1: _leaky_relu,
    2: lambda v, x, params: v.sigmoid(x),
    3: _tanh,
    4: _silu,
    5: _hardswish,
    6: _gelu,
    7: _hardsigmoid,
}


def activate_vector(builder: Any, x: Any, number: Any, params: list[Any]) -> Any:
    """The activation of run-time `number` on the vector `x`; unknown numbers leave it as it is."""
    start = builder.block
    done = builder.append_basic_block("activated")
    switch = builder.switch(number, done)
    results = [(x, start)]
    for value, code in _CODE.items():
        block = builder.append_basic_block(f"activation_{value}")
        switch.add_case(ir.Constant(I64, value), block)
        builder.position_at_end(block)
        results.append((code(Vectors(builder, x.type), x, params), builder.block))
        builder.branch(done)
    builder.position_at_end(done)
    phi = builder.phi(x.type)
    for result, block in results:
        phi.add_incoming(result, block)
    return phi
