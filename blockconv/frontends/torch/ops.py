"""Translators of ATen's ops: from a node and its operands to the network's own ops.

`from_torch` and the back end of `torch.compile` share the table. A translator gets a `Call`. It returns the node's
value, or a list of values. None is an output that blockconv does not compute. It raises `Unsupported` if blockconv has
no op.
"""

from __future__ import annotations

import math
from typing import NamedTuple, get_args

import numpy as np
import torch

from blockconv.core.activation import ACTIVATIONS, FUNCTIONS
from blockconv.core.checks import Shape, axis_shape
from blockconv.core.element_problem import GradientKind
from blockconv.core.python import zipped
from blockconv.core.types import FLOATS, Array
from blockconv.frontends.torch import shapes, windows  # noqa: F401  (their ops are read)
from blockconv.frontends.torch.elements import as_numbers, reduced, reduced_axes
from blockconv.frontends.torch.reader import OPS as OPS
from blockconv.frontends.torch.reader import Call, Constant, Value, kind_of, lowered, of_numbers, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.lowering import GELU, reduced_shape
from blockconv.network.ops.rule import Tensor

# Ops that are worth a plan by themselves.
HEAVY = frozenset(
    {
        *("convolution", "addmm", "mm", "bmm", "max_pool2d_with_indices", "avg_pool2d"),
        *("max_pool3d_with_indices", "avg_pool3d"),
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("blockconv.conv2d", "blockconv.conv2d_backward_data", "blockconv.max_pool2d", "blockconv.avg_pool2d"),
        *(
            "blockconv.batch_norm",
            "blockconv.batch_norm_backward",
            "native_batch_norm_backward",
            "convolution_backward",
        ),
    }
)


# ---------------------------------------------------------------- element by element


def _takes_x_alone(name: str) -> bool:
    """Whether ATen has an op of this name that takes a tensor and nothing else."""
    found = getattr(getattr(torch.ops.aten, name, None), "default", None)
    return found is not None and len(found._schema.arguments) == 1


for _name in (*ACTIVATIONS, *FUNCTIONS):
    if _name not in OPS and _takes_x_alone(_name):
        op(_name)(lowered(lambda call, x, name=_name: call.apply(name, x)))
op("leaky_relu")(lambda call: call.apply(("leaky_relu", call["negative_slope"]), call.x))
op("celu")(lambda call: call.apply(("celu", call["alpha"]), call.x))
op("gelu")(lambda call: call.apply(GELU[call["approximate"]], call.x))


@op("softplus")
def _softplus(call: Call) -> Tensor:
    x, beta = call.x, float(call["beta"])
    if call["threshold"] < 20:  # above it PyTorch gives x, which differs from softplus by exp(-threshold)
        raise Unsupported(f"threshold={call['threshold']}")
    y = call.apply("softplus", call.scaled(x, beta))
    return y if beta == 1 else call.div(y, beta)


@op("elu")
def _elu(call: Call) -> Tensor:
    """scale * (max(x, 0) + min(alpha * (exp(input_scale * x) - 1), 0))."""
    alpha, scale, of_input = (float(call[name]) for name in ("alpha", "scale", "input_scale"))
    if of_input != 1:
        raise Unsupported(f"input_scale={of_input}")
    return call.elu(call.x, alpha, scale)


@op("_prelu_kernel")
def _prelu(call: Call) -> Tensor:
    x, along = call.x, axis_shape(1, call.x.rank)
    return call.leaky(x, call.parameter("weight", lambda w: w.reshape(along) if w.ndim == 1 < x.rank else w))


@op("pow")
def _pow(call: Call) -> Tensor:
    x, exponent = as_numbers(call, call["self"]), call["exponent"]
    if isinstance(exponent, Constant) and exponent.array.size == 1 and exponent.array.ndim <= x.rank:
        exponent = exponent.array.item()
    if not isinstance(exponent, (int, float)):
        if not x.type.is_float:
            raise Unsupported(f"of {x.type}, to a power that is no constant number")
        return call.binary("pow", x, as_numbers(call, exponent))
    return call.power(x, float(exponent))


# ---------------------------------------------------------------- norms and reductions


@op("_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "native_batch_norm")
def _batch_norm(call: Call) -> Value:
    if call.get("training"):
        raise call.in_training("training mode, whose statistics are the batch's")
    x = call.x
    mean, variance = (call.array(f"running_{what}").astype(np.float64) for what in ("mean", "var"))
    scale, bias = _factors(call)
    scale = scale * (1 / np.sqrt(variance + call["eps"]))
    return [call.affine(x, scale, bias - mean * scale), None, None]


_GRADIENTS: dict[str, GradientKind] = {kind.replace("gradient", "backward"): kind for kind in get_args(GradientKind)}
_GRADIENTS["threshold_backward"] = "relu_gradient"


@op(*_GRADIENTS)
def _activation_backward(call: Call) -> Tensor:
    if call.get("threshold", 0) != 0 or call.get("approximate", "none") != "none":
        raise Unsupported("another threshold or form")
    grad, x = (call.tensor(given) for given in (*call.arguments.values(),)[:2])
    return call.emit(ops.ActivationBackward(_GRADIENTS[call.kind]), grad, x)


@op("hardtanh_backward")
def _clipped_gradient(call: Call) -> Tensor:
    x, grad = call.x, call.input("grad_output")
    inside = call.binary("and", call.binary("greater", x, call["min_val"]), call.less(x, call["max_val"]))
    return call.where(inside, grad, 0)


@op("blockconv.batch_norm")
def _training_norm(call: Call) -> Value:
    """(output, mean, inverse, updated running mean and variance)."""
    x, kind, names = call.x, call.x.type.computed.name, ("running_mean", "running_var")
    running, residual = [call[name] for name in names if call[name] is not None], call["residual"]
    bounds = call["low"], call["high"]
    made = ops.BatchNorm(call["eps"], call["momentum"], len(running) == 2, residual is not None, *bounds)
    if len(running) == 1:
        raise Unsupported("one of two running statistics")
    others = [call.converted(call.tensor(one), kind) for one in running]
    y = call.emit(
        made, x, *_factors_that_flow(call, x), *others, *([] if residual is None else [call.tensor(residual)])
    )
    return _with_results(call, y, x.shape[1:2], kind, 2 + len(running))


@op("blockconv.batch_norm_backward", "native_batch_norm_backward")
def _training_norm_backward(call: Call) -> Value:
    x, (grad, *others) = call.x, (call.get(a, call.get(b)) for a, b in _KNOWN)
    if x.rank != 4 or not call.get("train", True):
        raise Unsupported("other statistics than the batch's" if x.rank == 4 else f"{x.rank} dimensions")
    made = ops.BatchNormBackward(call.get("low", -math.inf), call.get("high", math.inf))
    known = [call.converted(call.tensor(one), x.type.computed.name) for one in others]
    y = call.emit(made, x, call.tensor(grad), *_factors_that_flow(call, x), *known)
    return _with_results(call, y, x.shape[1:2], x.type.computed.name, 2)


_KNOWN = ("grad", "grad_out"), ("mean", "save_mean"), ("inverse", "save_invstd")  # blockconv's names, and ATen's


def _factors_that_flow(call: Call, x: Tensor) -> list[Tensor]:
    """Weight and bias of a norm by channels, (C,), in the type that it computes in."""
    kind, given = x.type.computed, [call.get("weight"), call.get("bias")]
    return [
        call.constant(np.full(x.shape[1], default, kind.dtype), "number")
        if one is None
        else call.reshape(call.converted(call.tensor(one), kind.name), x.shape[1:2])
        for one, default in zipped(given, (1.0, 0.0))
    ]


def _with_results(
    call: Call, y: Tensor, shape: Shape, dtype: str, count: int, given: Shape = ()
) -> list[Tensor | None]:
    """An output and its further results of one shape that other nodes read, in the types of the trace.

    given: the shape that PyTorch gives the results, if that is another one.
    """
    found: list[Tensor | None] = [y, *[None] * (count + 2)]
    for k in filter(call.reads, range(1, 1 + count)):
        read = call.emit(ops.FurtherResult(k - 1, shape, dtype), y)
        promised = str(call.node.meta["val"][k].dtype)[6:]
        found[k] = call.reshape(call.converted(read, promised), given or shape)
    return found


class _Groups(NamedTuple):
    """A group or a layer norm as one of images: it normalises `groups` of their channels. Rows are images of one pixel.

    factors, statistics: the shapes that PyTorch gives these.
    """

    shape: Shape
    groups: int
    factors: Shape
    statistics: Shape

    @classmethod
    def of(cls, call: Call) -> _Groups:
        """Read a node."""
        x, sizes = call.x, call.get("normalized_shape")
        if sizes is None:
            groups = call["group"]
            shape: Shape = (*x.shape[:2], 1, math.prod(x.shape[2:])) if x.rank != 4 else x.shape
            return cls(shape, groups, x.shape[1:2], (x.shape[0], groups))
        rows = x.shape[: x.rank - len(sizes)]
        return cls((math.prod(rows), math.prod(sizes), 1, 1), 1, tuple(sizes), (*rows, *(1 for _ in sizes)))


@op("native_group_norm", "native_layer_norm")
def _group_norm(call: Call) -> Value:
    x, at = call.x, _Groups.of(call)
    if not any(isinstance(call.get(name), Tensor) for name in ("weight", "bias")) and not call.reads(1):
        if (sizes := call.get("normalized_shape")) is not None:
            return [call.normalise_rows(x, x.rank - len(sizes), *_factors(call), call["eps"]), None, None]
        return [call.normalise(x, at.groups, *_factors(call), call["eps"]), None, None]
    image = call.reshape(x, at.shape)
    y = call.emit(ops.GroupNormTraining(at.groups, call["eps"]), image, *_factors_that_flow(call, image))
    _, *known = _with_results(call, y, (at.shape[0], at.groups), x.type.computed.name, 2, at.statistics)
    return [call.reshape(y, x.shape), *known]


@op("native_group_norm_backward", "native_layer_norm_backward")
def _group_norm_backward(call: Call) -> Value:
    x, at = call.x, _Groups.of(call)
    image, grad = (call.reshape(one, at.shape) for one in (x, call.input("grad_out")))
    kind, shape = x.type.computed.name, (at.shape[0], at.groups)
    known = [call.reshape(call.converted(call.input(name), kind), shape) for name in ("mean", "rstd")]
    made = ops.GroupNormBackward(at.groups)
    y = call.emit(made, image, grad, _factors_that_flow(call, image)[0], *known)
    _, *found = _with_results(call, y, at.shape[1:2], kind, 2, at.factors)
    return [call.reshape(y, x.shape), *found]


@op("_fused_rms_norm")
def _rms_norm(call: Call) -> Value:
    x = call.x
    axis, epsilon = x.rank - len(call["normalized_shape"]), call["eps"]
    epsilon = np.finfo(x.type.computed.dtype).eps if epsilon is None else epsilon
    return [call.normalise_rows(x, axis, *_factors(call), epsilon, centred=False), None]


@op("_native_batch_norm_legit")
def _instance_norm(call: Call) -> Value:
    """A batch norm by the batch's statistics. PyTorch writes `instance_norm` as one of an image with all channels."""
    x = call.x
    if call.get("running_mean") is not None or not call["training"]:
        raise call.in_training("training mode, whose statistics are the batch's")
    if x.shape[0] == 1:
        return [call.normalise(x, max(1, x.shape[1]), *_factors(call), call["eps"]), None, None]
    if x.type.is_half:
        raise Unsupported(f"statistics of a batch of {x.type}")
    _, off, variance = call.moments(x, tuple(axis for axis in range(x.rank) if axis != 1))
    scaled = call.mul(off, call.power(call.add(variance, call["eps"]), -0.5))
    return [call.affine(scaled, *(np.broadcast_to(array, x.shape[1:2]) for array in _factors(call))), None, None]


def _factors(call: Call) -> tuple[Array, Array]:
    scale, bias = (None if call.get(name) is None else call.array(name) for name in ("weight", "bias"))
    return np.ones(()) if scale is None else scale, np.zeros(()) if bias is None else bias


@op("_softmax", "_safe_softmax", "_log_softmax")
def _softmax(call: Call) -> Tensor:
    x = call.x
    if call.get("half_to_float") or call.get("dtype") is not None:
        raise Unsupported("a change of type")
    how = call.kind == "_safe_softmax", call.kind.endswith("log_softmax")
    return call.emit(ops.Softmax(call.along, *how), x)


@op("linalg_vector_norm")
def _norm(call: Call) -> Tensor:
    """Sums of 16-bit floats are of float32, as in PyTorch."""
    order, x = float(call["ord"]), as_numbers(call, call.x)
    x = call.converted(x, x.type.computed.name)
    return call.converted(call.norm(x, order, reduced_axes(call), call["keepdim"]), call.result)


@op("var", "var_mean")
def _variance(call: Call) -> Value:
    x, axes, keep = call.x, reduced_axes(call), bool(call.get("keepdim", False))
    count = math.prod(x.shape[axis] for axis in axes)
    more = count - (1 if call.get("correction") is None else call["correction"])
    if x.type.is_half or more <= 0:
        raise Unsupported(f"correction={call['correction']} of {count} elements of {x.type}")
    mean, _, squares = call.moments(x, axes, keep)
    variance = call.scaled(squares, count / more)
    if call.kind == "var":
        return variance
    return [variance, call.reshape(mean, reduced_shape(x.shape, axes, keep))]


@of_numbers("amax")
def _amax(call: Call) -> Tensor:
    x, axes = call.x, reduced_axes(call)
    if x.rank != 4 or axes != (2, 3) or not x.type.is_float:
        return reduced(call, x, "max")
    y = call.emit(ops.Pool2d("max"), x)
    return y if call["keepdim"] else call.reshape(y, x.shape[:2])


# ---------------------------------------------------------------- products and attention


_FACTORS = {"mm": ("self", "mat2"), "bmm": ("self", "mat2"), "addmm": ("mat1", "mat2"), "baddbmm": ("batch1", "batch2")}


@op(*_FACTORS)
def _product(call: Call) -> Tensor:
    """alpha * a @ b + beta * self. By a constant matrix it is a 1x1 convolution of images of one pixel."""
    a, b = _FACTORS[call.kind]
    x, matrix, turned = call.input(a), call[b], call.node.args[-1]
    if call.kind in ("mm", "addmm") and isinstance(matrix, Constant):
        y = call.product(x, call.parameter(b, lambda w: w.T[:, :, None, None]))
    elif call.kind == "addmm" and _is_linear(call):
        return _linear(call, x, call.tensor(call.reader.values[turned.args[0]]), call.x)
    else:
        y = call.multiplied(x, call.input(b))
    y, beta = call.scaled(y, call.get("alpha", 1)), call.get("beta", 0)
    return y if beta == 0 else call.add(y, call.scaled(call.x, beta))


def _linear(call: Call, x: Tensor, wei: Tensor, bias: Tensor) -> Tensor:
    """A linear layer of many rows: a convolution of 1x1 over pixels, which adds the bias itself."""
    image = call.emit(ops.Transpose((0, 3, 1, 2)), call.helper(ops.Reshape((1, 1, -1, x.shape[1])), x))
    shift = call.converted(bias, x.type.computed.name)
    y = call.emit(ops.FlowingConv2d(ops.Conv2d()), image, call.reshape(wei, (*wei.shape, 1, 1)), shift)
    return call.reshape(call.helper(ops.Transpose((0, 2, 3, 1)), y), (x.shape[0], wei.shape[0]))


def _is_linear(call: Call) -> bool:
    """Whether a product is one of many rows by the transpose of a matrix, plus a vector."""
    is_plain = (call["alpha"], call["beta"]) == (1, 1) and call.x.shape == call.input("mat2").shape[1:]
    return is_plain and call.input("mat1").shape[0] >= MANY and kind_of(call.node.args[2]) == "aten.permute"


MANY = 128  # rows, for which it pays to pack a matrix


@op("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", types=(*FLOATS, "bool"))
def _attention(call: Call) -> Value:
    q, k, v = (call.input(name) for name in ("query", "key", "value"))
    if call["dropout_p"]:
        raise call.in_training(f"dropout_p={call['dropout_p']}")
    mask = None if call["attn_mask"] is None else call.input("attn_mask")
    y = call.attended(q, k, v, mask, call.get("scale"), bool(call["is_causal"]))
    return y if call.kind == "scaled_dot_product_attention" else [y, None]


# ---------------------------------------------------------------- recurrent layers


# The gates of PyTorch in ONNX's order.
_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}


@op("lstm", "gru")
def _recurrent(call: Call) -> list[Tensor]:
    """All layers: the hidden values of each step, the last ones of each layer, and an LSTM's last cells."""
    name, x = call.kind, call.x
    if "batch_sizes" in call.arguments or (call["train"] and call["dropout"]):
        raise Unsupported("packed sequences" if "batch_sizes" in call.arguments else "dropout")
    reverse = (False, True)[: 1 + call["bidirectional"]]
    layers, d, each = call["num_layers"], len(reverse), 4 if call["has_biases"] else 2
    split = [np.split(value.array, len(_GATES[name])) for value in call["params"] if isinstance(value, Constant)]
    arrays = [np.concatenate([parts[k] for k in _GATES[name]]) for parts in split]
    if len(arrays) != layers * d * each:
        raise Unsupported("projections, or weights that are no constants")
    given = [call.tensor(value) for value in (call["hx"] if name == "lstm" else [call["hx"]])]
    order = (1, 0, 2) if call["batch_first"] else (0, 1, 2)
    x = call.transposed(x, order, helps=True)
    ends: list[list[Tensor]] = []
    for layer in range(layers):
        own = arrays[layer * d * each : (layer + 1) * d * each]
        weights = [np.stack(own[k::each]) for k in range(each)]
        weights += [np.zeros(weights[0].shape[:2], weights[0].dtype)] * (4 - each)
        states = [call.helper(ops.Slice(0, layer * d, d), state) for state in given]
        y, *last = call.recurrent(x, "lstm" if name == "lstm" else "gru_of_sums", reverse, weights, states)
        steps, _, n, h = y.shape
        x = call.reshape(call.helper(ops.Transpose((0, 2, 1, 3)), y), (steps, n, d * h))
        ends.append(last)
    return [call.transposed(x, order, helps=True), *(call.helper(ops.Concat(0), *some) for some in zipped(*ends))]
