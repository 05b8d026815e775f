"""Translators of ATen's ops: from a node and its operands to the network's own ops.

`from_torch` and the back end of `torch.compile` share the table. A translator takes a `Call` and returns the value, or
the list of values, that the node gives; None stands for an output that blockconv does not compute. It raises
`Unsupported` for what blockconv has no op for.
"""

import math
from typing import get_args

import numpy as np
import torch

from blockconv.core.activation import ACTIVATIONS, FUNCTIONS
from blockconv.core.checks import Shape
from blockconv.core.element_problem import GradientKind
from blockconv.core.types import Array
from blockconv.frontends.torch import matrices, shapes, windows  # noqa: F401  (their ops are read)
from blockconv.frontends.torch.elements import as_numbers, reduced, reduced_axes
from blockconv.frontends.torch.reader import OPS as OPS
from blockconv.frontends.torch.reader import Call, Constant, Value, lowered, of_numbers, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor

# Ops that are worth a plan by themselves.
HEAVY = frozenset(
    {
        *("convolution", "linear", "addmm", "mm", "bmm", "max_pool2d_with_indices", "avg_pool2d"),
        *("max_pool3d_with_indices", "avg_pool3d"),
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("blockconv.conv2d", "blockconv.conv2d_backward_data", "blockconv.max_pool2d", "blockconv.avg_pool2d"),
        *("blockconv.conv2d_backward_weights", "blockconv.batch_norm", "blockconv.batch_norm_backward"),
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


@op("_prelu_kernel", "prelu")
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


@op("_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "native_batch_norm", "batch_norm")
def _batch_norm(call: Call) -> Value:
    if call.get("training"):
        raise call.in_training("training mode, whose statistics are the batch's")
    x = call.input()
    mean, variance = (call.array(f"running_{what}").astype(np.float64) for what in ("mean", "var"))
    scale = 1 / np.sqrt(variance + call["eps"])
    scale = scale if call["weight"] is None else scale * call.array("weight")
    shift = -mean * scale if call["bias"] is None else call.array("bias") - mean * scale
    return [call.affine(x, scale, shift), None, None]


_GRADIENTS: dict[str, GradientKind] = {kind.replace("gradient", "backward"): kind for kind in get_args(GradientKind)}
_GRADIENTS["threshold_backward"] = "relu_gradient"


@op(*_GRADIENTS)
def _activation_backward(call: Call) -> Tensor:
    if call.get("threshold", 0) != 0 or call.get("approximate", "none") != "none":
        raise Unsupported("another threshold or form")
    grad, x = (call.tensor(given) for given in (*call.arguments.values(),)[:2])
    return call.emit(ops.ActivationBackward(_GRADIENTS[call.kind]), grad, x)


@op("hardtanh_backward", "leaky_relu_backward")
def _masked_gradient(call: Call) -> Tensor:
    """The gradient where the input is between two bounds; else 0, or its product with a slope."""
    grad, x = call.tensor(call["grad_output"]), call.input()
    if call.kind == "leaky_relu_backward":
        inside, other = call.binary("greater", x, 0.0), call.binary("mul", grad, call["negative_slope"])
    else:
        within = call.binary("greater", x, call["min_val"]), call.binary("less", x, call["max_val"])
        inside, other = call.binary("and", *within), call.constant(np.zeros((), grad.type.dtype), "number")
    return call.emit(ops.Where(), inside, grad, other)


@op("blockconv.batch_norm")
def _training_norm(call: Call) -> Value:
    """(output, mean, inverse, updated running mean and variance)."""
    x, kind, names = call.input(), call.input().type.computed.name, ("running_mean", "running_var")
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


@op("blockconv.batch_norm_backward")
def _training_norm_backward(call: Call) -> Value:
    x, kind = call.input(), call.input().type.computed.name
    others = [call.converted(call.tensor(call[name]), kind) for name in ("mean", "inverse")]
    made = ops.BatchNormBackward(call["low"], call["high"])
    y = call.emit(made, x, call.tensor(call["grad"]), *_factors_that_flow(call, x), *others)
    return _with_results(call, y, x.shape[1:2], kind, 2)


def _factors_that_flow(call: Call, x: Tensor) -> list[Tensor]:
    """Weight and bias of a norm by channels, (C,), in the type that it computes in."""
    kind, given = x.type.computed, [call.get("weight"), call.get("bias")]
    return [
        call.constant(np.full(x.shape[1], default, kind.dtype), "number")
        if one is None
        else call.reshape(call.converted(call.tensor(one), kind.name), x.shape[1:2])
        for one, default in zip(given, (1.0, 0.0), strict=True)
    ]


def _with_results(call: Call, y: Tensor, shape: Shape, dtype: str, count: int) -> list[Tensor | None]:
    """An output and the results of a shape beside it that other nodes read."""
    made = [ops.Result(k, shape, dtype) if call.reads(1 + k) else None for k in range(count)]
    return [y, *(None if one is None else call.emit(one, y) for one in made), None, None]


@op("blockconv.group_norm", "blockconv.layer_norm", "blockconv.group_norm_backward", "blockconv.layer_norm_backward")
def _trained_group_norm(call: Call) -> Value:
    """A group norm that keeps its statistics, or its gradients. Rows of a layer norm are images of one pixel."""
    given, sizes = call.input(), call.get("normalized_shape")
    kind, before = given.type.computed.name, given.shape[: given.rank - len(sizes or ())]
    if sizes is None:
        shape: Shape = (*given.shape[:2], 1, math.prod(given.shape[2:])) if given.rank != 4 else given.shape
        groups, factors = call["num_groups"], given.shape[1:2]
        known: Shape = (given.shape[0], groups)
    else:
        shape, groups, factors = (math.prod(before), math.prod(sizes), 1, 1), 1, tuple(sizes)
        known = (*before, *(1 for _ in sizes))
    x = call.reshape(given, shape)
    if "grad" in call.arguments:
        grad = call.reshape(call.tensor(call["grad"]), shape)
        statistics = [
            call.reshape(call.converted(call.tensor(call[name]), kind), (shape[0], groups))
            for name in ("mean", "inverse")
        ]
        y = call.emit(ops.GroupNormBackward(groups), x, grad, _factors_that_flow(call, x)[0], *statistics)
        found, wanted = shape[1:2], factors
    else:
        y = call.emit(ops.GroupNormTraining(groups, call["eps"]), x, *_factors_that_flow(call, x))
        found, wanted = (shape[0], groups), known
    _, *others = _with_results(call, y, found, kind, 2)
    return [call.reshape(y, given.shape), *(None if one is None else call.reshape(one, wanted) for one in others)]


@op("native_group_norm", "group_norm")
def _group_norm(call: Call) -> Value:
    groups = call.get("group") or call.get("num_groups")
    return [call.normalise(call.input(), groups, *_factors(call), call["eps"]), None, None]


@op("native_layer_norm", "layer_norm")
def _layer_norm(call: Call) -> Value:
    x = call.input()
    axis = x.rank - len(call["normalized_shape"])
    return [call.normalise_rows(x, axis, *_factors(call), call["eps"]), None, None]


@op("_fused_rms_norm", "rms_norm")
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


@op("_softmax", "softmax", "_safe_softmax", "_log_softmax", "log_softmax")
def _softmax(call: Call) -> Tensor:
    x = call.input()
    if call.get("half_to_float") or call.get("dtype") is not None:
        raise Unsupported("a change of type")
    how = call.kind == "_safe_softmax", call.kind.endswith("log_softmax")
    return call.emit(ops.Softmax(call.along(x), *how), x)


@of_numbers("mean")
def _mean(call: Call) -> Tensor:
    x = as_numbers(call, call.input())
    return call.emit(ops.ReduceMean(reduced_axes(call), bool(call.get("keepdim", False))), x)


@op("linalg_vector_norm")
def _norm(call: Call) -> Tensor:
    """Sums of 16-bit floats are of float32, as in PyTorch."""
    order, x = float(call["ord"]), as_numbers(call, call.input())
    x = call.converted(x, x.type.computed.name)
    axes = reduced_axes(call)
    if any(x.shape[axis] == 0 for axis in axes):
        raise Unsupported(f"dim={axes} of shape {x.shape}")
    return call.converted(call.norm(x, order, axes, bool(call["keepdim"])), call.result)


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
