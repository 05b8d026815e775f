"""Translators of ATen's ops: from a node and its operands to the network's own ops.

`from_torch` and the back end of `torch.compile` share the table. A translator takes a `Call` and returns the value, or
the list of values, that the node gives; None stands for an output that blockconv does not compute. It raises
`Unsupported` for what blockconv has no op for.
"""

import math

import numpy as np
import torch

from blockconv.core.activation import ACTIVATIONS, FUNCTIONS
from blockconv.core.types import FLOATS, Array
from blockconv.frontends.torch import shapes, windows  # noqa: F401  (their ops are read)
from blockconv.frontends.torch.elements import as_numbers, reduced, reduced_axes
from blockconv.frontends.torch.reader import OPS as OPS
from blockconv.frontends.torch.reader import Call, Constant, Value, lowered, of_numbers, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor

# Ops that are worth a plan by themselves.
HEAVY = frozenset(
    {
        *("convolution", "addmm", "mm", "bmm", "max_pool2d_with_indices", "avg_pool2d"),
        *("max_pool3d_with_indices", "avg_pool3d"),
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("blockconv.conv2d", "blockconv.conv2d_backward_data", "blockconv.max_pool2d", "blockconv.avg_pool2d"),
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
op("leaky_relu")(lambda call: call.apply(("leaky_relu", call["negative_slope"]), call.input()))
op("celu")(lambda call: call.apply(("celu", call["alpha"]), call.input()))
op("gelu")(lambda call: call.gelu(call.input(), call["approximate"] == "tanh"))


@op("softplus")
def _softplus(call: Call) -> Tensor:
    x, beta = call.input(), float(call["beta"])
    if call["threshold"] < 20:  # above it PyTorch gives x, which differs from softplus by exp(-threshold)
        raise Unsupported(f"threshold={call['threshold']}")
    y = call.apply("softplus", call.scaled(x, beta))
    return y if beta == 1 else call.binary("div", y, beta)


@op("elu")
def _elu(call: Call) -> Tensor:
    """scale * (max(x, 0) + min(alpha * (exp(input_scale * x) - 1), 0))."""
    alpha, scale, of_input = (float(call[name]) for name in ("alpha", "scale", "input_scale"))
    if of_input != 1:
        raise Unsupported(f"input_scale={of_input}")
    return call.elu(call.input(), alpha, scale)


@op("_prelu_kernel")
def _prelu(call: Call) -> Tensor:
    x, slope = call.input(), call.array("weight")
    return call.leaky(x, slope.reshape(-1, *(1,) * (x.rank - 2)) if slope.ndim == 1 < x.rank else slope)


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
    x = call.input()
    mean, variance = (call.array(f"running_{what}").astype(np.float64) for what in ("mean", "var"))
    scale = 1 / np.sqrt(variance + call["eps"])
    scale = scale if call["weight"] is None else scale * call.array("weight")
    shift = -mean * scale if call["bias"] is None else call.array("bias") - mean * scale
    return [call.affine(x, scale, shift), None, None]


op("native_group_norm")(
    lambda call: [call.normalise(call.input(), call["group"], *_factors(call), call["eps"]), None, None]
)


@op("native_layer_norm")
def _layer_norm(call: Call) -> Value:
    x = call.input()
    axis = x.rank - len(call["normalized_shape"])
    return [call.normalise_rows(x, axis, *_factors(call), call["eps"]), None, None]


@op("_fused_rms_norm")
def _rms_norm(call: Call) -> Value:
    x = call.input()
    axis, epsilon = x.rank - len(call["normalized_shape"]), call["eps"]
    epsilon = np.finfo(x.type.computed.dtype).eps if epsilon is None else epsilon
    return [call.normalise_rows(x, axis, *_factors(call), epsilon, centred=False), None]


@op("_native_batch_norm_legit")
def _instance_norm(call: Call) -> Value:
    """A batch norm by the batch's statistics. PyTorch writes `instance_norm` as one of an image with all channels."""
    x = call.input()
    if call.get("running_mean") is not None or not call["training"]:
        raise call.in_training("training mode, whose statistics are the batch's")
    if x.shape[0] == 1:
        return [call.normalise(x, max(1, x.shape[1]), *_factors(call), call["eps"]), None, None]
    if x.type.is_half:
        raise Unsupported(f"statistics of a batch of {x.type}")
    _, off, variance = call.moments(x, tuple(axis for axis in range(x.rank) if axis != 1))
    scaled = call.binary("mul", off, call.power(call.binary("add", variance, call["eps"]), -0.5))
    return [call.affine(scaled, *(np.broadcast_to(array, x.shape[1:2]) for array in _factors(call))), None, None]


def _factors(call: Call) -> tuple[Array, Array]:
    scale, bias = (None if call.get(name) is None else call.array(name) for name in ("weight", "bias"))
    return np.ones(()) if scale is None else scale, np.zeros(()) if bias is None else bias


@op("_softmax", "_safe_softmax", "_log_softmax")
def _softmax(call: Call) -> Tensor:
    x = call.input()
    if call.get("half_to_float") or call.get("dtype") is not None:
        raise Unsupported("a change of type")
    how = call.kind == "_safe_softmax", call.kind.endswith("log_softmax")
    return call.emit(ops.Softmax(call.along(x), *how), x)


@op("linalg_vector_norm")
def _norm(call: Call) -> Tensor:
    """Sums of 16-bit floats are of float32, as in PyTorch."""
    order, x = float(call["ord"]), as_numbers(call, call.input())
    x = call.converted(x, x.type.computed.name)
    return call.converted(call.norm(x, order, reduced_axes(call), call["keepdim"]), call.result)


@op("var", "var_mean")
def _variance(call: Call) -> Value:
    x, axes, keep = call.input(), reduced_axes(call), bool(call.get("keepdim", False))
    count = math.prod(x.shape[axis] for axis in axes)
    more = count - (1 if call.get("correction") is None else call["correction"])
    if x.type.is_half or more <= 0:
        raise Unsupported(f"correction={call['correction']} of {count} elements of {x.type}")
    mean, _, squares = call.moments(x, axes, keep)
    variance = call.scaled(squares, count / more)
    if call.kind == "var":
        return variance
    kept = tuple(n for axis, n in enumerate(mean.shape) if keep or axis not in axes)
    return [variance, call.reshape(mean, kept)]


@of_numbers("amax")
def _amax(call: Call) -> Tensor:
    x, axes = call.input(), reduced_axes(call)
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
    if call.kind in ("mm", "addmm") and isinstance(call[b], Constant):
        y = call.product(ops.Conv2d(), call.input(a), call.parameter(b, lambda w: w.T[:, :, None, None]), None)
    else:
        y = call.multiplied(call.input(a), call.input(b))
    y, beta = call.scaled(y, call.get("alpha", 1)), call.get("beta", 0)
    return y if beta == 0 else call.binary("add", y, call.scaled(call.input(), beta))


@op("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", types=(*FLOATS, "bool"))
def _attention(call: Call) -> Value:
    q, k, v = (call.input(name) for name in ("query", "key", "value"))
    if call["dropout_p"]:
        raise call.in_training(f"dropout_p={call['dropout_p']}")
    scale, mask = call.get("scale"), call["attn_mask"]
    made = ops.Attention(1 / math.sqrt(q.shape[-1]) if scale is None else float(scale), bool(call["is_causal"]), True)
    y = call.attended(made, q, k, v, None if mask is None else call.tensor(mask))
    return y if call.kind == "scaled_dot_product_attention" else [y, None]


# ---------------------------------------------------------------- recurrent layers


# The gates of PyTorch in ONNX's order.
_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}


@op("lstm", "gru")
def _recurrent(call: Call) -> list[Tensor]:
    """All layers: the hidden values of each step, the last ones of each layer, and an LSTM's last cells."""
    name, x = call.kind, call.input()
    if "batch_sizes" in call.arguments or (call["train"] and call["dropout"]):
        raise Unsupported("packed sequences" if "batch_sizes" in call.arguments else "dropout")
    reverse = (False, True)[: 1 + call["bidirectional"]]
    layers, d, each = call["num_layers"], len(reverse), 4 if call["has_biases"] else 2
    arrays = [value.array for value in call["params"] if isinstance(value, Constant)]
    if len(arrays) != layers * d * each:
        raise Unsupported("projections, or weights that are no constants")
    given = [call.tensor(value) for value in (call["hx"] if name == "lstm" else [call["hx"]])]
    x = call.emit(ops.Transpose((1, 0, 2)), x, helps=True) if call["batch_first"] else x
    ends: list[list[Tensor]] = []
    for layer in range(layers):
        own = arrays[layer * d * each : (layer + 1) * d * each]
        weights = [np.stack([_in_order(array, name) for array in own[k::each]]) for k in range(each)]
        weights += [np.zeros(weights[0].shape[:2], weights[0].dtype)] * (4 - each)
        states = [call.emit(ops.Slice(0, layer * d, d), state, helps=True) for state in given]
        y, *last = call.recurrent(x, "lstm" if name == "lstm" else "gru_of_sums", reverse, weights, states)
        steps, _, n, h = y.shape
        x = call.reshape(call.emit(ops.Transpose((0, 2, 1, 3)), y, helps=True), (steps, n, d * h))
        ends.append(last)
    x = call.emit(ops.Transpose((1, 0, 2)), x, helps=True) if call["batch_first"] else x
    return [x, *(call.emit(ops.Concat(0), *some, helps=True) for some in zip(*ends, strict=True))]


def _in_order(array: Array, name: str) -> Array:
    parts = np.split(array, len(_GATES[name]))
    return np.concatenate([parts[k] for k in _GATES[name]])
