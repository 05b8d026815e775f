"""Activations and functions: for each, its name, its parameters, what it computes, and the same as code over vectors.

An activation ends any kernel, and each kernel that ends with one holds the code of all. A function runs by itself, in
the element-wise kernel: it costs the other kernels no compilation.

The code is Python's operators and the methods of `kernels/common/vectors.py`. float32 uses polynomials that stay
within 5e-7 of the largest value; float64 calls the C library lane by lane. A NaN stays a NaN in all of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import field
from typing import Any

import numpy as np

from blockconv.core.errors import ArgumentError
from blockconv.core.record import frozen
from blockconv.core.types import Array


class ActivationKind:
    """A kernel is compiled for no activation, a clip in registers, any other activation, or any of `FUNCTIONS`.

    The last two are chosen by their number at run time. Element-wise kernels alone have FUNCTION. A convolution of
    floats is compiled for OTHER, and may end with any activation, or none.
    """

    NONE, CLIP, OTHER, FUNCTION = range(4)


@frozen
class Activation:
    """An activation with its two parameters (0 where it has fewer). number 0 is clip(first, second).

    The name decides the number: another version of the library, which wrote a plan, may have another.
    """

    name: str
    number: int = 0
    first: float = -math.inf
    second: float = math.inf

    def __post_init__(self) -> None:
        object.__setattr__(self, "number", NUMBERS.get(self.name, 0))

    @property
    def is_identity(self) -> bool:
        return self.number == 0 and self.first == -math.inf and self.second == math.inf

    @property
    def kind(self) -> int:
        """The `ActivationKind` of kernels that end with it."""
        if self.is_identity:
            return ActivationKind.NONE
        if self.name in FUNCTIONS:
            return ActivationKind.FUNCTION
        return ActivationKind.OTHER if self.number else ActivationKind.CLIP

    def reference(self, x: Array) -> Array:
        """The activation of each element, in NumPy, by its definition."""
        definition = FUNCTIONS.get(self.name) or ACTIVATIONS[self.name]
        count = len(definition.parameters) if self.number else 2
        return x if self.is_identity else np.asarray(definition.reference(x, *(self.first, self.second)[:count]))


def activation(spec: str | tuple[Any, ...] | None, op: str = "conv2d", alone: bool = False) -> Activation:
    """An Activation from None, a name, or (name, *parameters), of `ACTIVATIONS`, or if `alone` of `FUNCTIONS` too.

    Raises ArgumentError for anything else.
    """
    known = ACTIVATIONS | FUNCTIONS if alone else ACTIVATIONS
    if spec is None:
        return IDENTITY
    name, *given = spec if isinstance(spec, (tuple, list)) and spec else (spec,)
    if not isinstance(name, str) or name not in known:
        rule = f"has to be one of {', '.join(known)}, or (name, *parameters)"
        remedy = f"in a network, NetworkBuilder.activation(x, {spec!r}) computes it" if name in [*FUNCTIONS] else ""
        raise ArgumentError(op, "activation", spec, rule, remedy)
    definition = known[name]
    if len(given) > len(definition.parameters):
        raise ArgumentError(op, "activation", spec, f"has to have at most {len(definition.parameters)} parameters")
    try:
        values = [float(x) for x in given]
    except (TypeError, ValueError, OverflowError):
        raise ArgumentError(op, "activation", spec, "has to have numbers as parameters") from None
    values += [*definition.parameters.values()][len(values) :]
    if name == "clip" and not values[0] <= values[1]:
        raise ArgumentError(op, "activation", spec, "has to have low <= high, without NaN")
    first, second = definition.bounds or (*values, 0.0, 0.0)[:2]
    return Activation(name, first=first, second=second)


# ---------------------------------------------------------------- code over vectors: `v` is the generator of kernels


_ROOT = math.sqrt(0.5)


def _tanh(v: Any, x: Any) -> Any:
    """float32 as Cephes has it: x + x^3 p(x^2) near 0, where 2 sigmoid(2x) - 1 would lose what is small."""
    if v.itemsize == 8:
        return v.each_lane("tanh", x)
    square = x * x
    coefficients = [-5.70498872745e-3, 2.06390887954e-2, -5.37397155531e-2, 1.33314422036e-1, -3.33332819422e-1]
    small = x + v.polynomial(square, coefficients) * square * x
    large = v.sigmoid(x * 2.0) * 2.0 + -1.0
    return v.b.select(square < 0.625 * 0.625, small, large)


def _mish(v: Any, x: Any) -> Any:
    """tanh(log(1 + e)) for e = exp(x) is (1 + e / 2) / (1 + e / 2 + 1 / e): nothing cancels, and no square overflows.

    An infinite 1 / e makes it zero, as it should. It is 1 from long before 80 on, where e / 2 might overflow too.
    """
    reciprocal = v.exp(-v.b.select(x > 80.0, v.c(80.0), x))
    above = 0.5 / reciprocal + 1.0
    return x * (above / (above + reciprocal))


def _celu(v: Any, x: Any, alpha: Any) -> Any:
    alpha = v.splat(alpha)
    below = alpha * v.expm1(x / alpha)
    return v.b.select(x < 0.0, below, x)


def _gelu_tanh(v: Any, x: Any) -> Any:
    """(1 + tanh(u)) / 2 is sigmoid(2u)."""
    cubic = 1.0 + 0.044715 * (x * x)
    return x * v.sigmoid(x * (2 * math.sqrt(2 / math.pi)) * cubic)


def _exp(v: Any, x: Any) -> Any:
    """In float32, the square of exp(x / 2): the range of `v.exp` is narrower than float32's at both ends."""
    if v.itemsize == 8:
        return v.exp(x)
    root = v.exp(x * 0.5)
    return root * root


def _erf_alone(v: Any, x: Any) -> Any:
    """Where x is small, float32 by its series, which keeps the digits."""
    if v.itemsize == 8:
        return v.erf(x)
    square = x * x
    series = [2 / math.sqrt(math.pi) * (-1) ** k / (math.factorial(k) * (2 * k + 1)) for k in range(6, -1, -1)]
    near = x * v.polynomial(square, series)
    return v.b.select(square < 0.5, near, v.erf(x))


def _softplus_of(v: Any, x: Any) -> Any:
    power = v.exp_to_zero(-v.magnitude(x))
    above = v.b.select(x < 0.0, v.c(0.0), x)
    return above + v.each_lane("log1p" if v.itemsize == 8 else "log1pf", power)


def _elu(v: Any, x: Any, alpha: Any, gamma: Any) -> Any:
    below = v.splat(alpha) * v.expm1(x)
    return v.splat(gamma) * v.b.select(x < 0.0, below, x)


def _of_library(name: str) -> Callable[..., Any]:
    """A function of the C library, lane by lane. Its parameters are its second argument, and so on."""
    return lambda v, x, *more: v.each_lane(name if v.itemsize == 8 else f"{name}f", x, *map(v.splat, more))


def _of_llvm(name: str) -> Callable[..., Any]:
    """A function that is an instruction of most processors."""
    return lambda v, x: v.intrinsic(name, x)


# ---------------------------------------------------------------- the tables


def _clipped(x: Array, low: float, high: float) -> Array:
    return np.minimum(np.maximum(x, low), high)


def logistic(x: Array) -> Array:
    """The sigmoid."""
    return 1 / (1 + np.exp(-x))


def _softplus(x: Array) -> Array:
    """log(1 + exp(x)), where nothing overflows."""
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


_erf, _erfc = (np.vectorize(of, otypes=[np.float64]) for of in (math.erf, math.erfc))


@frozen
class Definition:
    """All that is known of an activation; kernels, the evaluation of constants, ONNX and the documentation read it.

    formula: what it computes.
    reference(x, *parameters): the same in NumPy.
    parameters: at most two, by name, with their defaults.
    code(vectors, x, *parameters): the same over a vector; parameters are LLVM scalars. None for a clip, whose
        parameters are its bounds.
    bounds: the bounds of a clip that takes no parameters.
    onnx: the op of ONNX that it is, and that op's attributes, in the order of the parameters, with their defaults.
    """

    formula: str
    reference: Callable[..., Array]
    code: Callable[..., Any] | None = None
    parameters: dict[str, float] = field(default_factory=dict)
    bounds: tuple[float, float] | None = None
    onnx: tuple[str, dict[str, float]] | None = None


# Kernels know those with code by their numbers, in this order from 1 on: a new one comes last.
ACTIVATIONS = {
    "none": Definition("x", _clipped, bounds=(-math.inf, math.inf)),
    "relu": Definition("max(x, 0)", _clipped, bounds=(0.0, math.inf), onnx=("Relu", {})),
    "relu6": Definition("min(max(x, 0), 6)", _clipped, bounds=(0.0, 6.0)),
    "clip": Definition("min(max(x, low), high)", _clipped, parameters={"low": -math.inf, "high": math.inf}),
    "leaky_relu": Definition(
        "x if x >= 0 else slope * x",
        lambda x, slope: np.where(x < 0, x * slope, x),
        lambda v, x, slope: v.b.select(x < 0.0, x * v.splat(slope), x),
        {"slope": 0.01},
        onnx=("LeakyRelu", {"alpha": 0.01}),
    ),
    "sigmoid": Definition("1 / (1 + exp(-x))", logistic, lambda v, x: v.sigmoid(x), onnx=("Sigmoid", {})),
    "tanh": Definition("tanh(x)", np.tanh, _tanh, onnx=("Tanh", {})),
    "silu": Definition("x / (1 + exp(-x))", lambda x: x * logistic(x), lambda v, x: x * v.sigmoid(x)),
    "hardswish": Definition(
        "x * min(max(x + 3, 0), 6) / 6",
        lambda x: x * np.clip(x + 3, 0, 6) / 6,
        lambda v, x: x * (v.clip(x + 3.0, v.c(0.0), v.c(6.0)) * (1 / 6)),
        onnx=("HardSwish", {}),
    ),
    "gelu": Definition(
        "x * (1 + erf(x / sqrt(2))) / 2",
        lambda x: x * 0.5 * (1 + _erf(x * _ROOT)),
        lambda v, x: x * 0.5 * (1.0 + v.erf(x * _ROOT)),
    ),
    "hardsigmoid": Definition(
        "min(max(alpha * x + beta, 0), 1)",
        lambda x, alpha, beta: np.clip(x * alpha + beta, 0, 1),
        lambda v, x, alpha, beta: v.clip(x * v.splat(alpha) + v.splat(beta), v.c(0.0), v.c(1.0)),
        {"alpha": 1 / 6, "beta": 0.5},
        onnx=("HardSigmoid", {"alpha": 0.2, "beta": 0.5}),
    ),
    "mish": Definition("x * tanh(log(1 + exp(x)))", lambda x: x * np.tanh(_softplus(x)), _mish, onnx=("Mish", {})),
    "celu": Definition(
        "max(x, 0) + min(alpha * (exp(x / alpha) - 1), 0)",
        lambda x, alpha: np.where(x < 0, alpha * np.expm1(np.minimum(x, 0) / alpha), x),
        _celu,
        {"alpha": 1.0},
        onnx=("Celu", {"alpha": 1.0}),
    ),
}
# As those of ACTIVATIONS, with numbers of their own; neither `activation=` nor fusion takes them.
FUNCTIONS = {
    "abs": Definition("|x|", np.abs, lambda v, x: v.magnitude(x), onnx=("Abs", {})),
    "exp": Definition("exp(x)", np.exp, _exp, onnx=("Exp", {})),
    "log": Definition("log(x)", np.log, lambda v, x: v.log(x), onnx=("Log", {})),
    "sqrt": Definition("sqrt(x)", np.sqrt, lambda v, x: v.sqrt(x), onnx=("Sqrt", {})),
    "erf": Definition("erf(x)", _erf, _erf_alone, onnx=("Erf", {})),
    "softplus": Definition("log(1 + exp(x))", _softplus, _softplus_of, onnx=("Softplus", {})),
    "elu": Definition(
        "gamma * (x if x >= 0 else alpha * (exp(x) - 1))",
        lambda x, alpha, gamma: gamma * np.where(x < 0, alpha * np.expm1(np.minimum(x, 0)), x),
        _elu,
        {"alpha": 1.0, "gamma": 1.0},
    ),
    "softsign": Definition(
        "x / (1 + |x|)",
        lambda x: x / (1 + np.abs(x)),
        lambda v, x: x / (1.0 + v.magnitude(x)),
        onnx=("Softsign", {}),
    ),
    "sin": Definition("sin(x)", np.sin, _of_library("sin"), onnx=("Sin", {})),
    "cos": Definition("cos(x)", np.cos, _of_library("cos"), onnx=("Cos", {})),
    "gelu_tanh": Definition(
        "x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3))) / 2",
        lambda x: x * logistic(2 * math.sqrt(2 / math.pi) * x * (1 + 0.044715 * x * x)),
        _gelu_tanh,
    ),
    "floor": Definition("the largest integer that is at most x", np.floor, _of_llvm("floor"), onnx=("Floor", {})),
    "ceil": Definition("the smallest integer that is at least x", np.ceil, _of_llvm("ceil"), onnx=("Ceil", {})),
    "round": Definition("the nearest integer; of two, the even", np.rint, _of_llvm("nearbyint"), onnx=("Round", {})),
    "pow": Definition("x ** exponent", np.power, _of_library("pow"), {"exponent": 1.0}),
    "erfc": Definition("1 - erf(x)", _erfc, _of_library("erfc")),
    "expm1": Definition("exp(x) - 1", np.expm1, _of_library("expm1")),
    "log1p": Definition("log(1 + x)", np.log1p, _of_library("log1p")),
    "log2": Definition("log(x) / log(2)", np.log2, _of_library("log2")),
    "log10": Definition("log(x) / log(10)", np.log10, _of_library("log10")),
    "exp2": Definition("2 ** x", np.exp2, _of_library("exp2")),
    "trunc": Definition("x without its fraction", np.trunc, _of_llvm("trunc")),
}


def _hardswish_slope(v: Any, g: Any, x: Any) -> Any:
    slope = x * (1 / 3) + 0.5
    inner = v.b.select(x < 3.0, g * slope, g)
    return v.b.select(x <= -3.0, v.zero, inner)


def _silu_slope(v: Any, g: Any, x: Any) -> Any:
    s = v.sigmoid(x)
    return g * s * (1.0 + x * (1.0 - s))


def _gelu_slope(v: Any, g: Any, x: Any) -> Any:
    share = (v.erf(x * _ROOT) + 1.0) * 0.5
    density = v.exp_to_zero(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return g * (share + x * density)


def _of_x(slope: Callable[[Array], Array]) -> Callable[[Array, Array], Array]:
    return lambda g, x: np.asarray(g * slope(x))


def _silu_slope_of(x: Array) -> Array:
    s = logistic(x)
    return s * (1 + x * (1 - s))


# Gradients of activations: reference(g, x) and code(vectors, g, x). g: the gradient of the output. x: the input, or of
# relu the output, y.
GRADIENTS = {
    "relu": Definition(
        "g if y > 0 else 0",
        lambda g, y: np.where(y <= 0, 0, g),
        lambda v, g, y: v.b.select(y <= 0.0, v.zero, g),
    ),
    "silu": Definition("g * s * (1 + x * (1 - s)), s = sigmoid(x)", _of_x(_silu_slope_of), _silu_slope),
    "hardswish": Definition(
        "g * (0 if x <= -3 else 1 if x >= 3 else x / 3 + 1 / 2)",
        _of_x(lambda x: np.where(x <= -3, 0, np.where(x < 3, x / 3 + 0.5, 1))),
        _hardswish_slope,
    ),
    "gelu": Definition(
        "g * (p(x) + x * p'(x)), p(x) = (1 + erf(x / sqrt(2))) / 2",
        _of_x(lambda x: (1 + _erf(x * _ROOT)) / 2 + x * np.exp(-x * x / 2) / math.sqrt(2 * math.pi)),
        _gelu_slope,
    ),
}
NUMBERS = {
    name: number
    for table in (ACTIVATIONS, FUNCTIONS)
    for number, name in enumerate((n for n, one in table.items() if one.code), start=1)
}
IDENTITY = Activation("none")
