"""Translators of ONNX's ops that compute: from a node and its operands to the network's own ops.

A translator takes a `Call` and returns the value, or values, of the node. It raises `Unsupported` if blockconv has no
op for the node. The reader computes a node at once if all its operands are constants (`graph._fold`).
"""

import collections
import math
from collections.abc import Callable
from typing import Any

import numpy as np
from onnx import defs

from blockconv.core.activation import FUNCTIONS
from blockconv.core.types import BYTES, FLOATS, NUMBERS, Array, numpy_dtype
from blockconv.frontends.onnx import contributed, elements, shapes  # noqa: F401  (their ops are read)
from blockconv.frontends.onnx.contributed import ACTIVATIONS_OF_ONNX, softmax
from blockconv.frontends.onnx.rules import RUNTIMES
from blockconv.frontends.onnx.runner import dtype_of
from blockconv.frontends.onnx.scope import OPS as OPS
from blockconv.frontends.onnx.scope import Call, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.lowering import GELU
from blockconv.network.ops.rule import Tensor

# ---------------------------------------------------------------- elementwise


def _activation(call: Call) -> Tensor:
    """An activation or a function, whose parameters are attributes of the node."""
    name, attributes = ACTIVATIONS_OF_ONNX[call.kind]
    x = call.floats() if name in FUNCTIONS else call.x
    return call.apply((name, *(call.attribute(key, default) for key, default in attributes.items())), x)


for _name, (_own, _) in ACTIVATIONS_OF_ONNX.items():
    _limits: Any = {"since": 6, "limits": "floats"} if _own in FUNCTIONS else {}
    op(_name, **_limits)(_activation)


op("Elu", since=6, limits="floats")(lambda call: call.elu(call.floats(), call["alpha"]))


@op("Pow", since=7, limits="floats; the exponent a constant number")
def _pow(call: Call) -> Tensor:
    exponent, x = call.array(1, "exponent"), call.floats()
    if exponent.size != 1 or exponent.ndim > x.rank:
        raise Unsupported(f"an exponent of shape {exponent.shape}")
    return call.power(x, float(exponent.item()))


op("PRelu", since=7, limits="floats")(lambda call: call.leaky(call.floats(), call.input(1)))


# By ONNX's own definition for float64, in which the slope float32(1/6) is not 1/6.
op("HardSwish")(lambda call: call.apply("hardswish", call.operand(0, "float32", "bfloat16", "float16")))
op("Gelu")(lambda call: call.apply(GELU[call.one_of("approximate", *GELU)], call.x))


@op("Clip")
def _clip(call: Call) -> Tensor:
    if call.flows(1, 2) or call.x.type.name not in (*FLOATS, *BYTES):
        return call.clipped(call.x, *map(call.optional, (1, 2)))
    ends = (1, "min", -math.inf), (2, "max", math.inf)
    bounds = [float(call.array(k, name).item() if call.has(k) else call.attribute(name, end)) for k, name, end in ends]
    if any(map(math.isnan, bounds)):
        raise Unsupported(f"min={bounds[0]}, max={bounds[1]}: NaN bounds")
    return call.clipped(call.x, *bounds)


@op("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean")
def _binary(call: Call) -> Tensor:
    """An op of two operands, or of any number from left to right."""
    named = call.kind
    kind: Any = "add" if named in ("Sum", "Mean") else named.lower()
    result = call.x
    for i in range(1, len(call.inputs)):
        result = call.binary(kind, result, _aligned(call, result, call.input(i)))
    return call.div(result, len(call.inputs)) if named == "Mean" else result


def _aligned(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """b, to broadcast to a. Before opset 7 (8 for ops of any number of operands), operands broadcast only with the
    attribute `broadcast`. The attribute `axis` is the axis of a at which b's axes begin; default: align at the end."""
    variadic = call.kind in ("Max", "Min", "Mean", "Sum")
    if call.opset >= (8 if variadic else 7):
        return b
    if not call["broadcast"]:
        if a.shape != b.shape:
            rule = f"{call.kind} of opset {call.opset} broadcasts {'never' if variadic else 'with broadcast=1'}"
            raise call.error("inputs", (a.shape, b.shape), rule, "export for opset 8 or later")
        return b
    axis = call["axis"]
    if axis is None:
        return b
    after = a.rank - call.axis(axis, a.rank) - b.rank
    if after < 0:
        raise call.error("axis", axis, f"does not fit an operand of shape {b.shape} into shape {a.shape}")
    return call.reshape(b, (*b.shape, *(1,) * after))


@op("BatchNormalization", limits="inference")
def _batch_norm(call: Call) -> Tensor:
    if call["training_mode"] or not call.attribute("spatial", 1):
        raise Unsupported("training_mode=1: training" if call["training_mode"] else "spatial=0")
    names = ("scale", "bias", "mean", "variance")
    if call.flows(1, 2, 3, 4):
        return _batch_norm_by_values(call)
    scale, bias, mean, variance = (call.array(1 + i, name).astype(np.float64) for i, name in enumerate(names))
    factor = scale / np.sqrt(variance + call["epsilon"])
    x, shift = call.x, bias - mean * factor
    if x.rank > 1:
        return call.affine(x, factor, shift)
    wide = call.reshape(x, (*x.shape, 1))  # an input of one dimension has one channel
    return call.reshape(call.affine(wide, factor, shift), x.shape)


def _of_channels(call: Call, k: int) -> Tensor:
    """An input with a number for each channel, in the first input's rank and type."""
    x, given = call.x, call.input(k)
    if given.shape != x.shape[1:2]:
        raise call.error("inputs", given.shape, f"has to have a number for each of {x.shape[1:2]} channels")
    return call.reshape(call.converted(given, x.type.name), (*given.shape, *(1,) * (x.rank - 2)))


def _batch_norm_by_values(call: Call) -> Tensor:
    """Batch normalisation by parameters from run time: (x - mean) * (scale / deviation) + bias."""
    x = call.floats()
    if x.rank < 2:
        raise Unsupported(f"input={x.shape}: {x.rank} dimensions, with parameters that flow")
    scale, bias, mean, variance = (_of_channels(call, k) for k in range(1, 5))
    shifted = call.add(variance, call["epsilon"])
    factor = call.div(scale, call.apply("sqrt", shifted, helps=True))
    return call.add(call.mul(call.sub(x, mean), factor), bias)


@op("GroupNormalization", limits="before opset 21: constant scale and bias")
def _group_norm(call: Call) -> Tensor:
    x, groups = call.x, call["num_groups"]
    # Opset 18 has one scale and one bias for each group; opset 21 has them for each channel.
    each = 1 if call.opset >= 21 or groups < 1 else x.shape[1] // groups

    def norm(scale: Array, bias: Array) -> Tensor:
        return call.normalise(x, groups, np.repeat(scale, each), np.repeat(bias, each), call["epsilon"])

    return _normalised(call, norm, _of_channels if each == 1 else None)


@op("InstanceNormalization", since=6)
def _instance_norm(call: Call) -> Tensor:
    x, epsilon = call.x, call["epsilon"]
    return _normalised(call, lambda s, b: call.normalise(x, max(1, x.shape[1]), s, b, epsilon), _of_channels)


@op("LayerNormalization")
def _layer_norm(call: Call) -> list[Tensor]:
    """The statistics are float32, for 16-bit floats too."""
    y, x = _norm_of_rows(call, True), call.x
    if not (call.reads(1) or call.reads(2)) or x.type.name == "float64":
        return [y]
    mean, _, variance = call.moments(call.converted(x, "float32"), tuple(range(call.along, x.rank)))
    return [y, mean, call.power(call.add(variance, call["epsilon"]), -0.5)]


@op("MeanVarianceNormalization", limits="floats", since=9)
def _mean_variance(call: Call) -> Tensor:
    """Use the differences from the mean: ONNX's own definition by squares loses digits."""
    x = call.floats()
    _, rest, variance = call.moments(x, call.axes(call["axes"], x.rank))
    deviation = call.apply("sqrt", variance, helps=True)
    return call.div(rest, call.add(deviation, 1e-9))


op("RMSNormalization", "SimplifiedLayerNormalization")(lambda call: _norm_of_rows(call, False))


def _norm_of_rows(call: Call, centred: bool) -> Tensor:
    x, epsilon = call.x, call.attribute("epsilon", 1e-5)
    axis = call.axis(call.attribute("axis", -1), x.rank)

    def along(call: Call, k: int) -> Tensor:
        given = call.input(k)
        if np.broadcast_shapes(given.shape, x.shape[axis:]) != x.shape[axis:]:
            raise call.error("scale", given.shape, f"has to broadcast to {x.shape[axis:]}, the axes from {axis} on")
        return call.converted(given, x.type.name)

    return _normalised(call, lambda s, b: call.normalise_rows(x, axis, s, b, epsilon, centred), along)


def _normalised(
    call: Call, norm: Callable[[Array, Array], Tensor], along: Callable[[Call, int], Tensor] | None
) -> Tensor:
    """norm(scale, bias). If one is no constant, both follow the norm. along: shapes an input to broadcast to x."""
    if call.attribute("stash_type", 1) != 1:
        raise Unsupported(f"stash_type={call['stash_type']}: statistics of another type than float32")
    if along is None or not call.flows(1, 2):
        return norm(call.array(1, "scale"), call.array(2, "bias", np.zeros(())))
    y = call.mul(norm(np.ones(()), np.zeros(())), along(call, 1))
    return call.add(y, along(call, 2)) if call.has(2) else y


op("LRN")(lambda call: call.emit(ops.Lrn(*(call[name] for name in ("size", "alpha", "beta", "bias"))), call.x))
op("Softmax", "LogSoftmax")(lambda call: softmax(call, call.x, call.along, call.opset))


@op("Dropout", limits="inference, where it is the identity")
def _dropout(call: Call) -> Tensor:
    ratio, training = (call.array(k, name, np.zeros(())).item() for k, name in ((1, "ratio"), (2, "training_mode")))
    if training:
        raise Unsupported("training_mode=True: training")
    if not 0 <= ratio < 1:
        raise call.error("ratio", ratio, "has to be at least 0 and less than 1")
    return call.x


op("Identity")(lambda call: call.x)


@op("Cast", "CastLike", limits="numbers and booleans; beyond an integer's bounds the bound, NaN 0", since=6)
def _cast(call: Call) -> Tensor:
    x, names = call.x, {numpy_dtype(name): name for name in NUMBERS}
    to = call.input(1).type.dtype if call.has(1) else dtype_of(call["to"])
    if to not in names or any(given is not None and given.type.is_packed for given in call.inputs):
        raise Unsupported(f"from {x.dtype} to {to}")
    return call.converted(x, names[to])


# ---------------------------------------------------------------- the table that `blockconv ops` and the reference show


HEADINGS = ("ops", "opsets", "limits")


def rows() -> list[tuple[str, str, str]]:
    """(ops, opsets, limits), ops of the same opsets and limits in one row."""
    groups: dict[tuple[str, str], list[str]] = collections.defaultdict(list)
    for name, known in sorted(OPS.items()):
        opsets = _opsets(name, known.since)
        if opsets:
            groups[opsets, known.limits].append(name)
    return sorted((", ".join(names), opsets, limits) for (opsets, limits), names in groups.items())


def _opsets(name: str, since: int) -> str:
    """The opsets that have an op and are supported; empty if the installed onnx knows none."""
    domain, _, _ = name.rpartition(".")
    if domain:  # onnx defines no ops of other domains
        return f"{domain} {since}"
    history = {
        s.since_version: s.deprecated for s in defs.get_all_schemas_with_history() if (s.domain, s.name) == ("", name)
    }
    if not history:
        return "any, in models that ONNX Runtime saved" if name in RUNTIMES else ""
    first, last = max(since, min(history)), max(history)
    return f"{first} to {last - 1}" if history[last] else f"from {first}"
