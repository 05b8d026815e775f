"""Translators of ONNX's ops that compute: from a node and its operands to the network's own ops.

A translator takes a `Call` and returns the value, or values, that the node gives. It raises `Unsupported` if blockconv
has no op for the node. A node whose operands are all constants is computed at once (`Scope.compute`).
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import helper

from blockconv.core.activation import ACTIVATIONS, FUNCTIONS, activation, function
from blockconv.core.types import BYTES, FLOATS, NUMBERS, numpy_dtype
from blockconv.frontends.onnx.contributed import CONTRIBUTED_OPS, SELU
from blockconv.frontends.onnx.dynamic import DYNAMIC_OPS
from blockconv.frontends.onnx.elements import ELEMENT_OPS
from blockconv.frontends.onnx.matrices import MATRIX_OPS
from blockconv.frontends.onnx.quantized import QUANTIZED_OPS
from blockconv.frontends.onnx.recurrent import RECURRENT_OPS
from blockconv.frontends.onnx.scope import Call, OnnxOp, Translator, only_output, registered
from blockconv.frontends.onnx.shapes import SHAPE_OPS
from blockconv.frontends.onnx.windows import WINDOW_OPS
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor

Array = npt.NDArray[Any]
OPS: dict[str, OnnxOp] = (
    SHAPE_OPS | WINDOW_OPS | MATRIX_OPS | QUANTIZED_OPS | CONTRIBUTED_OPS | DYNAMIC_OPS | RECURRENT_OPS | ELEMENT_OPS
)  # all that are read
_op = functools.partial(registered, OPS)


# ---------------------------------------------------------------- elementwise


def _activation(name: str, attributes: dict[str, float]) -> Translator:
    def translate(call: Call) -> Tensor:
        values = [call.attribute(key, default) for key, default in attributes.items()]
        return call.emit(ops.Activate(activation((name, *values))), call.input())

    return translate


def _function(name: str, attributes: dict[str, float]) -> Translator:
    def translate(call: Call) -> Tensor:
        values = [call.attribute(key, default) for key, default in attributes.items()]
        return call.emit(ops.Activate(function(name, *values)), _floats(call))

    return translate


def _floats(call: Call) -> Tensor:
    """The first input, which has to be of floats."""
    x = call.input()
    if not x.type.is_float:
        raise Unsupported(f"of {x.dtype}")
    return x


_OF_FLOATS = "floats"
for _name, _definition in ACTIVATIONS.items():
    if _definition.onnx:
        _op(_definition.onnx[0])(_activation(_name, _definition.onnx[1]))
for _name, _definition in FUNCTIONS.items():
    if _definition.onnx:
        _op(_definition.onnx[0], since=6, limits=_OF_FLOATS)(_function(_name, _definition.onnx[1]))
_op("Selu", since=6, limits=_OF_FLOATS)(_function("elu", SELU))


@_op("Elu", since=6, limits=_OF_FLOATS)
def _elu(call: Call) -> Tensor:
    """With alpha 1, as mostly, it is Celu, which a convolution takes in."""
    alpha = call.attribute("alpha", 1.0)
    return call.emit(ops.Activate(activation("celu") if alpha == 1 else function("elu", alpha)), _floats(call))


@_op("Neg", since=6)
def _neg(call: Call) -> Tensor:
    x = call.input()
    return call.binary("mul", x, _number(call, -1)) if x.type.is_float else call.binary("sub", _number(call, 0), x)


@_op("Reciprocal", since=6)
def _reciprocal(call: Call) -> Tensor:
    return call.binary("div", _number(call, 1), call.input())


def _number(call: Call, value: float) -> Tensor:
    """A constant of the first input's type."""
    return call.constant(np.asarray(value, call.input().type.dtype), "number")


@_op("Pow", since=7, limits="floats; the exponent a constant number")
def _pow(call: Call) -> Tensor:
    exponent, x = call.array(1, "exponent"), _floats(call)
    if exponent.size != 1 or exponent.ndim > len(x.shape):
        raise Unsupported(f"an exponent of shape {exponent.shape}")
    return call.power(x, float(exponent.item()))


@_op("PRelu", since=7, limits="floats")
def _prelu(call: Call) -> Tensor:
    x, slope = _floats(call), call.input(1)
    if call.scope.is_constant(slope.name):
        return call.leaky(x, call.array(1, "slope"))
    above, below = (
        call.emit(ops.Activate(activation(("clip", *bounds))), x, helps=True)
        for bounds in ((0.0, math.inf), (-math.inf, 0.0))
    )
    return call.binary("add", above, call.binary("mul", below, slope))


@_op("HardSwish")
def _hardswish(call: Call) -> Tensor:
    """ONNX defines it by HardSigmoid, whose slope is 1/6 as a float32: in float64 that is another number."""
    x = call.input()
    if x.type.name != "float64":
        return call.emit(ops.Activate(activation("hardswish")), x)
    gate = call.emit(ops.Activate(activation(("hardsigmoid", float(np.float32(1 / 6)), 0.5))), x)
    return call.binary("mul", x, gate)


@_op("Swish")
def _swish(call: Call) -> Tensor:
    if call.attribute("alpha", 1.0) != 1:
        raise Unsupported(f"alpha={call.attribute('alpha')}: an alpha other than 1")
    return call.emit(ops.Activate(activation("silu")), call.input())


@_op("Gelu")
def _gelu(call: Call) -> Tensor:
    approximate = call.attribute("approximate", "none")
    if approximate not in ("none", "tanh"):
        raise call.error("approximate", approximate, "has to be none or tanh")
    return call.emit(ops.Activate(function("gelu_tanh") if approximate == "tanh" else activation("gelu")), call.input())


@_op("Clip")
def _clip(call: Call) -> Tensor:
    given = [call.input(k) if call.has(k) else None for k in (1, 2)]
    flows = any(bound is not None and not call.scope.is_constant(bound.name) for bound in given)
    if flows or call.input().type.name not in (*FLOATS, *BYTES):
        y = call.input()
        kinds: tuple[ops.BinaryKind, ...] = ("max", "min")
        for kind, bound in zip(kinds, given, strict=True):
            y = y if bound is None else call.binary(kind, y, bound)
        return y
    bounds = [call.attribute("min", -math.inf), call.attribute("max", math.inf)]
    for i in (0, 1):
        if call.has(1 + i):
            bounds[i] = float(call.array(1 + i, ("minimum", "maximum")[i]).item())
    low, high = bounds
    if math.isnan(low) or math.isnan(high):
        raise Unsupported(f"min={low}, max={high}: NaN bounds")
    # Where the bounds are the wrong way round, ONNX gives the upper one.
    return call.emit(ops.Activate(activation(("clip", min(low, high), high))), call.input())


@_op("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean")
def _binary(call: Call) -> Tensor:
    """An op of two operands, or of any number from left to right."""
    op = call.node.op_type
    kind: Any = "add" if op in ("Sum", "Mean") else op.lower()
    result = call.input()
    for i in range(1, len(call.inputs)):
        result = call.binary(kind, result, _aligned(call, result, call.input(i)))
    return call.binary("div", result, _number(call, len(call.inputs))) if op == "Mean" else result


def _aligned(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """b for broadcasting to a. Before opset 7 (8 for ops of any number of operands), operands broadcast only with the
    attribute `broadcast`. The attribute `axis` is the axis of a at which b's axes begin; default: align at the end."""
    variadic = call.node.op_type in ("Max", "Min", "Mean", "Sum")
    if call.opset >= (8 if variadic else 7):
        return b
    if not call.attribute("broadcast", 0):
        if a.shape != b.shape:
            rule = f"{call.node.op_type} of opset {call.opset} broadcasts {'never' if variadic else 'with broadcast=1'}"
            raise call.error("inputs", (a.shape, b.shape), rule, "export for opset 8 or later")
        return b
    axis = call.attribute("axis")
    if axis is None:
        return b
    after = len(a.shape) - call.axis(axis, len(a.shape)) - len(b.shape)
    if after < 0:
        raise call.error("axis", axis, f"does not fit an operand of shape {b.shape} into shape {a.shape}")
    shape = (*b.shape, *(1,) * after)
    if b.name in call.scope.constants:
        return call.constant(call.scope.constants[b.name].reshape(shape), "operand")
    return call.reshape(b, shape)


@_op("BatchNormalization", limits="inference")
def _batch_norm(call: Call) -> Tensor:
    if call.attribute("training_mode", 0) or not call.attribute("spatial", 1):
        raise Unsupported("training_mode=1: training" if call.attribute("training_mode", 0) else "spatial=0")
    only_output(call)
    names = ("scale", "bias", "mean", "variance")
    if _flow(call, range(1, 5)):
        return _batch_norm_by_values(call)
    scale, bias, mean, variance = (call.array(1 + i, name).astype(np.float64) for i, name in enumerate(names))
    factor = scale / np.sqrt(variance + call.attribute("epsilon", 1e-5))
    dtype = call.input().type.computed.dtype
    parameters = [call.constant(v.astype(dtype), w) for v, w in ((factor, "scale"), (bias - mean * factor, "shift"))]
    x = call.input()
    if x.rank > 1:
        return call.emit(ops.Affine(), x, parameters=(parameters[0], parameters[1]))
    wide = call.reshape(x, (*x.shape, 1))  # of one dimension, there is one channel
    return call.reshape(call.emit(ops.Affine(), wide, parameters=(parameters[0], parameters[1])), x.shape)


def _flow(call: Call, places: Iterable[int]) -> bool:
    """Whether one of these inputs is no constant."""
    return not all(call.scope.is_constant(call.input(k).name) for k in places if call.has(k))


def _of_channels(call: Call, k: int) -> Tensor:
    """An input with a number for each channel, as one of the first input's rank and type."""
    x, given = call.input(), call.input(k)
    if given.shape != x.shape[1:2]:
        raise call.error("inputs", given.shape, f"has to have a number for each of {x.shape[1:2]} channels")
    return call.reshape(call.converted(given, x.type.name), (*given.shape, *(1,) * (len(x.shape) - 2)))


def _batch_norm_by_values(call: Call) -> Tensor:
    """Batch normalisation by parameters that flow: (x - mean) * (scale / deviation) + bias."""
    x = _floats(call)
    if len(x.shape) < 2:
        raise Unsupported(f"input={x.shape}: {len(x.shape)} dimensions, with parameters that flow")
    scale, bias, mean, variance = (_of_channels(call, k) for k in range(1, 5))
    shifted = call.binary("add", variance, _number(call, call.attribute("epsilon", 1e-5)))
    factor = call.binary("div", scale, call.emit(ops.Activate(function("sqrt")), shifted, helps=True))
    return call.binary("add", call.binary("mul", call.binary("sub", x, mean), factor), bias)


@_op("GroupNormalization", limits="before opset 21: constant scale and bias")
def _group_norm(call: Call) -> Tensor:
    x, groups = call.input(), call.attribute("num_groups")
    # Opset 18 had one of each a group; opset 21 replaced it.
    each = 1 if call.opset >= 21 or groups < 1 else x.shape[1] // groups

    def norm(scale: Array, bias: Array) -> Tensor:
        return call.normalise(x, groups, np.repeat(scale, each), np.repeat(bias, each), call.attribute("epsilon", 1e-5))

    return _normalised(call, norm, _of_channels if each == 1 else None)


@_op("InstanceNormalization", since=6)
def _instance_norm(call: Call) -> Tensor:
    x, epsilon = call.input(), call.attribute("epsilon", 1e-5)
    return _normalised(call, lambda s, b: call.normalise(x, max(1, x.shape[1]), s, b, epsilon), _of_channels)


@_op("LayerNormalization")
def _layer_norm(call: Call) -> list[Tensor]:
    """Its statistics are float32, of 16-bit floats too."""
    y, x = _norm_of_rows(call, True), call.input()
    if not call.extra_outputs:
        return [y]
    if x.type.name == "float64":
        only_output(call)
    axis = call.axis(call.attribute("axis", -1), x.rank)
    mean, _, variance = _moments(call, call.converted(x, "float32"), tuple(range(axis, x.rank)))
    epsilon = call.constant(np.float32(call.attribute("epsilon", 1e-5)), "epsilon")
    return [y, mean, call.power(call.binary("add", variance, epsilon), -0.5)]


@_op("MeanVarianceNormalization", limits="floats", since=9)
def _mean_variance(call: Call) -> Tensor:
    """By the differences from the mean. ONNX's own definition by squares loses digits."""
    x = _floats(call)
    _, rest, variance = _moments(call, x, call.axes(call.attribute("axes", (0, 2, 3)), x.rank))
    deviation = call.emit(ops.Activate(function("sqrt")), variance, helps=True)
    return call.binary("div", rest, call.binary("add", deviation, _number(call, 1e-9)))


def _moments(call: Call, x: Tensor, axes: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    """(the means over axes, the differences from them, the means of their squares)."""
    mean = call.emit(ops.ReduceMean(axes, True), x)
    rest = call.binary("sub", x, mean)
    return mean, rest, call.emit(ops.ReduceMean(axes, True), call.binary("mul", rest, rest))


@_op("RMSNormalization", "SimplifiedLayerNormalization")
def _rms_norm(call: Call) -> Tensor:
    only_output(call)
    return _norm_of_rows(call, False)


def _norm_of_rows(call: Call, centred: bool) -> Tensor:
    x, epsilon = call.input(), call.attribute("epsilon", 1e-5)
    axis = call.axis(call.attribute("axis", -1), len(x.shape))

    def along(call: Call, k: int) -> Tensor:
        given = call.input(k)
        if np.broadcast_shapes(given.shape, x.shape[axis:]) != x.shape[axis:]:
            raise call.error("scale", given.shape, f"has to broadcast to {x.shape[axis:]}, the axes from {axis} on")
        return call.converted(given, x.type.name)

    return _normalised(call, lambda s, b: call.normalise_rows(x, axis, s, b, epsilon, centred), along)


def _normalised(
    call: Call, norm: Callable[[Array, Array], Tensor], along: Callable[[Call, int], Tensor] | None
) -> Tensor:
    """norm(scale, bias). If one flows, both are applied after it. along: gives that input as it broadcasts to x."""
    if call.attribute("stash_type", 1) != 1:
        raise Unsupported(f"stash_type={call.attribute('stash_type')}: statistics of another type than float32")
    if along is None or not _flow(call, (1, 2)):
        return norm(call.array(1, "scale"), call.array(2, "bias") if call.has(2) else np.zeros(()))
    y = call.binary("mul", norm(np.ones(()), np.zeros(())), along(call, 1))
    return call.binary("add", y, along(call, 2)) if call.has(2) else y


@_op("LRN")
def _lrn(call: Call) -> Tensor:
    alpha, beta, bias = call.attribute("alpha", 1e-4), call.attribute("beta", 0.75), call.attribute("bias", 1.0)
    return call.emit(ops.Lrn(call.attribute("size"), alpha, beta, bias), call.input())


@_op("Softmax", "LogSoftmax")
def _softmax(call: Call) -> Tensor:
    x, log = call.input(), call.node.op_type == "LogSoftmax"
    axis = call.axis(call.attribute("axis", -1 if call.opset >= 13 else 1), x.rank)
    if call.opset >= 13 or math.prod(x.shape[axis + 1 :]) == 1:
        return call.emit(ops.Softmax(axis, log=log), x)
    # Before opset 13: over all axes from that one on.
    flat = call.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return call.reshape(call.emit(ops.Softmax(1, log=log), flat), x.shape)


@_op("Dropout", limits="inference, where it is the identity")
def _dropout(call: Call) -> Tensor:
    if call.has(2) and call.array(2, "training_mode").item():
        raise Unsupported("training_mode=True: training")
    if call.has(1) and not 0 <= call.array(1, "ratio").item() < 1:
        raise call.error("ratio", call.array(1, "ratio").item(), "has to be at least 0 and less than 1")
    only_output(call)
    return call.input()


@_op("Identity")
def _identity(call: Call) -> Tensor:
    return call.input()


@_op("Cast", "CastLike", limits="numbers and booleans; beyond an integer's bounds the bound, NaN 0", since=6)
def _cast(call: Call) -> Tensor:
    x, names = call.input(), {numpy_dtype(name): name for name in NUMBERS}
    to = call.input(1).type.dtype if call.has(1) else helper.tensor_dtype_to_np_dtype(call.attribute("to"))
    if to not in names or any(given is not None and given.type.is_packed for given in call.inputs):
        raise Unsupported(f"from {x.dtype} to {to}")
    return call.converted(x, names[to])
