"""Translators of ATen's ops: from a node and its operands to the network's own ops.

`from_torch` and the back end of `torch.compile` share the table. A translator takes a `Call` and returns the value, or
the list of values, that the node gives; None stands for an output that blockconv does not compute. It raises
`Unsupported` for what blockconv has no op for.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.nn import functional

from blockconv.core.activation import ACTIVATIONS, FUNCTIONS, activation, function
from blockconv.core.eltwise_problem import RecurrentKind
from blockconv.core.types import FLOATS, NUMBERS
from blockconv.frontends.torch.elements import ELEMENT_OPS, as_numbers, flow_indices, reduced, reduced_axes
from blockconv.frontends.torch.reader import AtenOp, Call, Constant, InTraining, Value, hint, registered, stand_in
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.graph import Tensor

__all__ = ["HEAVY", "OPS", "decompositions", "kept_whole"]

Array = npt.NDArray[Any]
OPS: dict[str, AtenOp] = {**ELEMENT_OPS}
_op = functools.partial(registered, OPS)
_of_numbers = functools.partial(registered, OPS, types=NUMBERS)
# Ops that are worth a plan by themselves.
HEAVY = frozenset(
    {
        *("convolution", "linear", "addmm", "mm", "bmm", "max_pool2d_with_indices", "avg_pool2d"),
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu"),
        *("blockconv.conv2d", "blockconv.conv2d_backward_data", "blockconv.max_pool2d", "blockconv.avg_pool2d"),
    }
)
# Ops that are translated as they are, though PyTorch would decompose them.
_KEPT = frozenset(
    {
        *("hardsigmoid", "hardswish", "mish", "silu", "celu", "softplus", "_prelu_kernel"),
        *("upsample_bilinear2d", "upsample_nearest2d", "_upsample_nearest_exact2d"),
        *("channel_shuffle", "pixel_shuffle", "pixel_unshuffle", "upsample_linear1d", "lstm", "gru"),
        *(f"{mode}_pad{rank}d" for mode in ("reflection", "replication") for rank in (1, 2, 3)),
        # One op is faster than its parts, here or in PyTorch.
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", "_safe_softmax", "baddbmm"),
        *("_log_softmax", "logsumexp", "_fused_rms_norm"),
        *("im2col", "col2im", "upsample_bicubic2d", "upsample_trilinear3d", "grid_sampler_2d"),
    }
)


def decompositions() -> dict[Any, Any]:
    """PyTorch's decompositions to core ATen, without those of ops that are translated as they are."""
    table = dict(torch.export.default_decompositions())
    for op in [*table]:
        if getattr(op, "_schema", None) is not None and op._schema.name.removeprefix("aten::") in _KEPT:
            del table[op]
    table[torch.ops.aten._native_multi_head_attention.default] = _multi_head_attention
    return table


def _multi_head_attention(query: Any, key: Any, value: Any, width: int, heads: int, *others: Any, **named: Any) -> Any:
    """PyTorch's fast path of inference as the ops that it stands for. One with a mask or weights stays whole."""
    qkv_weight, qkv_bias, weight, bias, *options = others
    mask, need_weights = (*options, *(None, True)[len(options) :])[:2]
    if mask is not None or need_weights or named:
        return NotImplemented
    projected = zip((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3), strict=True)
    split = [functional.linear(x, w, b).unflatten(-1, (heads, -1)).transpose(1, 2) for x, w, b in projected]
    found = functional.scaled_dot_product_attention(*split).transpose(1, 2).flatten(2)
    return functional.linear(found, weight, bias), query.new_empty(0)


@contextlib.contextmanager
def kept_whole() -> Iterator[None]:
    """AOTAutograd would decompose resampling while it traces, whatever table it gets: not in here."""
    aten, key = torch.ops.aten, torch._C.DispatchKey
    packets = aten.upsample_bilinear2d, aten.upsample_nearest2d, aten._upsample_nearest_exact2d
    overloads = [overload for packet in packets for overload in (packet.default, packet.vec)]
    before = [dict(op.py_kernels) for op in overloads]
    for op in overloads:
        for alias in (key.Autograd, key.CompositeImplicitAutograd):
            op.py_kernels.pop(alias, None)
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in zip(overloads, before, strict=True):
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()


# ---------------------------------------------------------------- windows


def _pair(values: Sequence[int], default: int) -> tuple[int, int]:
    """A value for H and one for W, from a list of two, one, or none. In one dimension the value is W's."""
    values = tuple(values) or (default,)
    return (values[0], values[-1])


def _image(call: Call, x: Tensor, rank: int) -> Tensor:
    """(N, C, H, W) of images with `rank` dimensions, with or without N."""
    shape = x.shape if len(x.shape) == rank + 2 else (1, *x.shape)
    return call.reshape(x, shape if rank == 2 else (*shape[:2], 1, shape[2]))


def _unlike_image(call: Call, y: Tensor, x: Tensor, rank: int) -> Tensor:
    """A result as `x` has its dimensions."""
    shape = y.shape if rank == 2 else (*y.shape[:2], y.shape[3])
    return call.reshape(y, shape if len(x.shape) == rank + 2 else shape[1:])


@_op("convolution", "conv2d", "conv1d", "blockconv.conv2d")
def _convolution(call: Call) -> Tensor:
    x, weight = call.input(), call.array("weight")
    rank = weight.ndim - 2
    if rank not in (1, 2):
        raise Unsupported(f"{rank}-D windows")
    row = rank == 1
    wei = call.parameter("weight", (lambda w: w[:, :, None]) if row else (lambda w: w))
    bias = (call.parameter("bias"),) if call["bias"] is not None else ()
    stride, padding, dilation = (tuple(call[name]) for name in ("stride", "padding", "dilation"))
    more = tuple(call["output_padding"]) if call.get("transposed") else (0,)
    made = ops.ConvTranspose2d if call.get("transposed") else ops.Conv2d
    ends = ((0, padding[0]), (0, more[0])) if row else (_pair(padding, 0), _pair(more, 0))
    attributes = made(
        (1, stride[0]) if row else _pair(stride, 1),
        tuple((p, p - extra) for p, extra in zip(*ends, strict=True)),  # type: ignore[arg-type]
        (1, dilation[0]) if row else _pair(dilation, 1),
        call["groups"],
    )
    return _unlike_image(call, call.emit(attributes, _image(call, x, rank), parameters=(wei, *bias)), x, rank)


@_op("blockconv.conv2d_backward_data")
def _transposed_convolution(call: Call) -> Tensor:
    x, weight = call.tensor(call["grad"]), call.parameter("weight")
    stride, padding, dilation = (_pair(call[name], 0) for name in ("stride", "padding", "dilation"))
    ends = []
    for k, size in enumerate(call["input_shape"][2:]):
        reach = (x.shape[2 + k] - 1) * stride[k] + dilation[k] * (weight.shape[2 + k] - 1) + 1
        ends.append((padding[k], reach - padding[k] - size))
    bias = () if call["bias"] is None else (call.parameter("bias"),)
    made = ops.ConvTranspose2d(stride, (ends[0], ends[1]), dilation, call["groups"])
    return call.emit(made, x, parameters=(weight, *bias))


def _pool(call: Call, kind: ops.PoolKind, rank: int, divisor: int | None = None) -> Tensor:
    x = call.input()
    kernel, stride = tuple(call["kernel_size"]), tuple(call["stride"]) or tuple(call["kernel_size"])
    padding, dilation = tuple(call["padding"]), tuple(call.get("dilation", (1,)))
    row = rank == 1
    attributes = ops.Pool2d(
        kind,
        (1, kernel[0]) if row else _pair(kernel, 1),
        (1, stride[0]) if row else _pair(stride, 1),
        ((0, 0), (padding[0],) * 2) if row else tuple((p, p) for p in _pair(padding, 0)),  # type: ignore[arg-type]
        (1, dilation[0]) if row else _pair(dilation, 1),
        bool(call["ceil_mode"]),
        divisor,
    )
    return _unlike_image(call, call.emit(attributes, _image(call, x, rank)), x, rank)


@_op("max_pool2d_with_indices", "max_pool2d", "blockconv.max_pool2d")
def _max_pool(call: Call) -> Value:
    return [_pool(call, "max", 2), None]


@_op("avg_pool1d", "avg_pool2d", "blockconv.avg_pool2d")
def _avg_pool(call: Call) -> Tensor:
    kind: ops.PoolKind = "avg_include_padding" if call["count_include_pad"] else "avg_exclude_padding"
    rank = 1 if call.kind.endswith("1d") else 2
    return _pool(call, kind, rank, call.get("divisor_override"))


@_op("_adaptive_avg_pool2d", "adaptive_avg_pool2d", "blockconv.adaptive_avg_pool2d")
def _adaptive_avg_pool(call: Call) -> Tensor:
    x = call.input()
    size = _pair(call["output_size"], 1)
    return _unlike_image(call, call.emit(ops.AdaptivePool2d(size), _image(call, x, 2)), x, 2)


@_op("adaptive_max_pool2d")
def _adaptive_max_pool(call: Call) -> Value:
    x = call.input()
    image = _image(call, x, 2)
    size = _pair(call["output_size"], 1)
    if any(have % want for have, want in zip(image.shape[2:], size, strict=True)):
        raise Unsupported(f"output_size={size}, which does not divide {image.shape[2:]}")
    kernel = (image.shape[2] // size[0], image.shape[3] // size[1])
    return [_unlike_image(call, call.emit(ops.Pool2d("max", kernel, kernel), image), x, 2), None]


def _resize(call: Call, mode: Any, coordinates: Any, nearest: Any = "round_prefer_floor") -> Tensor:
    """Scales that the model gives decide where pixels are read; sizes have the scale out / in."""
    x, size, rank = call.input(), call.get("output_size"), len(call.input().shape) - 2
    if "scale_factors" in call.arguments:  # overload .vec
        scales = call["scale_factors"] or (None,) * rank
    else:
        scales = (call.get("scales_h"), call.get("scales_w")) if rank == 2 else (call.get("scales"),)
    if size is None:
        size = [math.floor(have * by) for have, by in zip(x.shape[2:], scales, strict=True)]
    if rank not in (1, 2):
        raise Unsupported(f"{rank}-D images")
    ones = (1,) * (2 - rank)
    given: Any = None if None in scales else (*map(float, ones), *map(float, scales))
    resized = call.emit(ops.Resize(mode, (*ones, *size), given, coordinates, nearest), _image(call, x, rank))
    return _unlike_image(call, resized, x, rank)


@_op("upsample_nearest2d")
def _nearest(call: Call) -> Tensor:
    return _resize(call, "nearest", "asymmetric", "floor")


@_op("_upsample_nearest_exact2d")
def _nearest_exact(call: Call) -> Tensor:
    return _resize(call, "nearest", "half_pixel", "round_prefer_ceil")


@_op("upsample_bilinear2d", "upsample_linear1d")
def _bilinear(call: Call) -> Tensor:
    return _resize(call, "linear", "align_corners" if call["align_corners"] else "half_pixel")


def _windowed(call: Call, x: Tensor, axis: int, size: int, step: int, dilation: int = 1) -> Tensor:
    """An axis as two: the windows of `size` elements, and what is in each."""
    count = (x.shape[axis] - dilation * (size - 1) - 1) // step + 1
    indices = step * np.arange(count)[:, None] + dilation * np.arange(size)
    shape = (*x.shape[:axis], count, size, *x.shape[axis + 1 :])
    return call.reshape(call.gathered(x, axis, indices.reshape(-1)), shape)


@_of_numbers("unfold")
def _unfold(call: Call) -> Tensor:
    x = call.input()
    axis, rank = call.axis(call["dimension"], len(x.shape)), len(x.shape)
    order = (*range(axis + 1), *range(axis + 2, rank + 1), axis + 1)
    return _transposed(call, _windowed(call, x, axis, call["size"], call["step"]), order)


@_op("im2col")
def _im2col(call: Call) -> Tensor:
    """The windows of an image as columns, a row for each channel and tap."""
    x = call.input()
    size, step, dilation, pads = (_pair(call[name], 1) for name in ("kernel_size", "stride", "dilation", "padding"))
    y = _image(call, x, 2)
    if any(pads):
        y = call.emit(ops.Pad(((0, 0), (0, 0), *((p, p) for p in pads)), 0.0), y, helps=True)
    for axis in (3, 2):
        k = axis - 2
        y = _windowed(call, y, axis, size[k], step[k], dilation[k])
    y = _transposed(call, y, (0, 1, 3, 5, 2, 4))
    n, c, kh, kw, oh, ow = y.shape
    return call.reshape(y, (n, c * kh * kw, oh * ow)[4 - len(x.shape) :])


# ---------------------------------------------------------------- matrices


def _product(call: Call, x: Tensor, weight: str, turned: bool, bias: str | None) -> Tensor:
    """(..., K) by a constant matrix, plus a bias: a 1x1 convolution of images of one pixel. turned: it is (N, K).

    By one that flows it is a product of two values.
    """
    if isinstance(call[weight], Tensor):
        matrix = call[weight]
        y = call.emit(ops.MatMul((None, (1, 0) if turned else None, None)), x, matrix)
        return y if bias is None or call[bias] is None else call.binary("add", y, call.input(bias))
    if call.array(weight).ndim != 2:
        raise Unsupported(f"a weight of {call.array(weight).ndim} dimensions")
    wei = call.parameter(weight, lambda w: (w if turned else w.T)[:, :, None, None])
    shift = None
    if bias is not None and call[bias] is not None:
        shape = (wei.shape[0],)
        if call.array(bias).shape not in (shape, (1, *shape), (1,), ()):
            raise Unsupported(f"a bias of shape {call.array(bias).shape}")
        shift = np.broadcast_to(call.array(bias).reshape(-1), shape)
    return call.reshape(call.product(ops.Conv2d(), x, wei, shift), (*x.shape[:-1], wei.shape[0]))


@_op("linear")
def _linear(call: Call) -> Tensor:
    return _product(call, call.input(), "weight", True, "bias")


@_op("addmm")
def _addmm(call: Call) -> Tensor:
    if call["alpha"] != 1 or call["beta"] != 1:
        raise Unsupported(f"alpha={call['alpha']}, beta={call['beta']}")
    return _product(call, call.input("mat1"), "mat2", False, "self")


@_op("mm")
def _mm(call: Call) -> Tensor:
    return _product(call, call.input(), "mat2", False, None)


@_op("bmm", "matmul")
def _matmul(call: Call) -> Tensor:
    return call.multiplied(call.input(), call.input("mat2" if "mat2" in call.arguments else "other"))


@_op("baddbmm")
def _baddbmm(call: Call) -> Tensor:
    y, added = call.multiplied(call.input("batch1"), call.input("batch2")), call.input()
    y, added = (
        x if factor == 1 else call.binary("mul", x, _number(call, factor, x))
        for x, factor in ((y, call["alpha"]), (added, call["beta"]))
    )
    return y if call["beta"] == 0 else call.binary("add", y, added)


# ---------------------------------------------------------------- element by element


def _activation(*names: str, spec: Callable[[Call], Any]) -> None:
    def translate(call: Call) -> Tensor:
        return call.emit(ops.Activate(activation(spec(call))), call.input())

    _op(*names)(translate)


def _of_x_alone(name: str) -> bool:
    """Whether ATen has an op of this name that takes a tensor and nothing else."""
    found = getattr(getattr(torch.ops.aten, name, None), "default", None)
    return found is not None and len(found._schema.arguments) == 1


for _name in filter(_of_x_alone, ACTIVATIONS):
    _activation(_name, spec=lambda call, name=_name: name)  # type: ignore[misc]
_activation("leaky_relu", spec=lambda call: ("leaky_relu", call["negative_slope"]))
_activation("celu", spec=lambda call: ("celu", call["alpha"]))


for _name in filter(_of_x_alone, [name for name in FUNCTIONS if name not in ELEMENT_OPS]):
    _op(_name)(lambda call, name=_name: call.emit(ops.Activate(function(name)), call.input()))  # type: ignore[misc]


@_op("gelu")
def _gelu(call: Call) -> Tensor:
    act = function("gelu_tanh") if call["approximate"] == "tanh" else activation("gelu")
    return call.emit(ops.Activate(act), call.input())


@_op("softplus")
def _softplus(call: Call) -> Tensor:
    x, beta = call.input(), float(call["beta"])
    wide = x if beta == 1 else call.binary("mul", x, _number(call, beta, x))
    y = call.emit(ops.Activate(function("softplus")), wide)
    return y if beta == 1 else call.binary("div", y, _number(call, beta, x))


@_op("elu")
def _elu(call: Call) -> Tensor:
    """scale * (max(x, 0) + min(alpha * (exp(input_scale * x) - 1), 0))."""
    alpha, scale, of_input = (float(call[name]) for name in ("alpha", "scale", "input_scale"))
    if of_input != 1:
        raise Unsupported(f"input_scale={of_input}")
    act = activation("celu") if alpha == 1 and scale == 1 else function("elu", alpha, scale)
    return call.emit(ops.Activate(act), call.input())


@_op("_prelu_kernel", "prelu")
def _prelu(call: Call) -> Tensor:
    x, slope = call.input(), call.array("weight")
    return call.leaky(x, slope.reshape(-1, *(1,) * (len(x.shape) - 2)) if slope.ndim == 1 < len(x.shape) else slope)


def _number(call: Call, value: float, like: Tensor) -> Tensor:
    return as_numbers(call, value, like.type.name)


@_op("reciprocal")
def _reciprocal(call: Call) -> Tensor:
    return call.binary("div", _number(call, 1.0, call.input()), call.input())


@_op("pow")
def _pow(call: Call) -> Tensor:
    if not isinstance(call["exponent"], (int, float)) or not isinstance(call["self"], Tensor):
        raise Unsupported("an exponent that is no number")
    return call.power(call.input(), float(call["exponent"]))


@_op("rsqrt")
def _rsqrt(call: Call) -> Tensor:
    return call.power(call.input(), -0.5)


@_op("_native_batch_norm_legit_no_training", "_native_batch_norm_legit_functional", "native_batch_norm", "batch_norm")
def _batch_norm(call: Call) -> Value:
    if call.get("training"):
        raise InTraining("training mode, whose statistics are the batch's; call eval() of the module")
    x = call.input()
    mean, variance = (call.array(f"running_{what}").astype(np.float64) for what in ("mean", "var"))
    with np.errstate(invalid="ignore", divide="ignore"):  # a negative variance gives NaN, as in PyTorch
        scale = 1 / np.sqrt(variance + call["eps"])
    scale = scale if call["weight"] is None else scale * call.array("weight")
    shift = -mean * scale if call["bias"] is None else call.array("bias") - mean * scale
    dtype = x.type.computed.dtype
    parameters = call.constant(scale.astype(dtype), "scale"), call.constant(shift.astype(dtype), "shift")
    return [call.emit(ops.Affine(), x, parameters=parameters), None, None]


@_op("native_group_norm", "group_norm")
def _group_norm(call: Call) -> Value:
    groups = call.get("group") or call.get("num_groups")
    return [call.normalise(call.input(), groups, *_factors(call), call["eps"]), None, None]


@_op("native_layer_norm", "layer_norm")
def _layer_norm(call: Call) -> Value:
    x = call.input()
    axis = len(x.shape) - len(call["normalized_shape"])
    return [call.normalise_rows(x, axis, *_factors(call), call["eps"]), None, None]


@_op("_fused_rms_norm", "rms_norm")
def _rms_norm(call: Call) -> Value:
    x = call.input()
    axis, epsilon = len(x.shape) - len(call["normalized_shape"]), call["eps"]
    epsilon = np.finfo(x.type.computed.dtype).eps if epsilon is None else epsilon
    return [call.normalise_rows(x, axis, *_factors(call), epsilon, centred=False), None]


@_op("_native_batch_norm_legit")
def _instance_norm(call: Call) -> Value:
    """PyTorch writes `instance_norm` as the batch norm of one image, whose channels are those of all images."""
    x = call.input()
    if call.get("running_mean") is not None or not call["training"] or x.shape[0] != 1:
        raise InTraining("training mode, whose statistics are the batch's; call eval() of the module")
    return [call.normalise(x, max(1, x.shape[1]), *_factors(call), call["eps"]), None, None]


def _factors(call: Call) -> tuple[Array, Array]:
    scale, bias = (None if call.get(name) is None else call.array(name) for name in ("weight", "bias"))
    return np.ones(()) if scale is None else scale, np.zeros(()) if bias is None else bias


@_op("_softmax", "softmax", "_safe_softmax")
def _softmax(call: Call) -> Tensor:
    x = call.input()
    if call.get("half_to_float") or call.get("dtype") is not None:
        raise Unsupported("a change of type")
    is_safe = call.kind == "_safe_softmax"
    return call.emit(ops.Softmax(call.axis(call["dim"], len(x.shape)), is_safe), x)


@_op("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", types=(*FLOATS, "bool"))
def _attention(call: Call) -> Value:
    q, k, v = (call.input(name) for name in ("query", "key", "value"))
    if call["dropout_p"]:
        raise Unsupported(f"dropout_p={call['dropout_p']}")
    scale, mask = call.get("scale"), call["attn_mask"]
    made = ops.Attention(1 / math.sqrt(q.shape[-1]) if scale is None else float(scale), bool(call["is_causal"]), True)
    y = call.attended(made, q, k, v, None if mask is None else call.tensor(mask))
    return y if call.kind == "scaled_dot_product_attention" else [y, None]


@_of_numbers("mean")
def _mean(call: Call) -> Tensor:
    x = as_numbers(call, call.input(), call.result)
    return call.emit(ops.ReduceMean(reduced_axes(call), bool(call.get("keepdim", False))), x)


@_op("linalg_vector_norm")
def _norm(call: Call) -> Tensor:
    x = call.input()
    if call["ord"] not in (1, 2) or x.type.is_half or call.get("dtype") is not None:
        raise Unsupported(f"ord={call['ord']} of {x.type}")
    if call["ord"] == 1:
        return reduced(call, call.emit(ops.Activate(function("abs")), x), "sum")
    return call.emit(ops.Activate(function("sqrt")), reduced(call, call.binary("mul", x, x), "sum"))


@_op("var", "var_mean")
def _variance(call: Call) -> Value:
    x, axes, keep = call.input(), reduced_axes(call), bool(call.get("keepdim", False))
    count = math.prod(x.shape[axis] for axis in axes)
    more = count - (1 if call.get("correction") is None else call["correction"])
    if x.type.is_half or more <= 0:
        raise Unsupported(f"correction={call['correction']} of {count} elements of {x.type}")
    mean = call.emit(ops.ReduceMean(axes, True), x)
    off = call.binary("sub", x, mean)
    squares = call.emit(ops.ReduceMean(axes, keep), call.binary("mul", off, off))
    variance = squares if more == count else call.binary("mul", squares, _number(call, count / more, x))
    if call.kind == "var":
        return variance
    kept = tuple(n for axis, n in enumerate(mean.shape) if keep or axis not in axes)
    return [variance, call.reshape(mean, kept)]


@_of_numbers("amax")
def _amax(call: Call) -> Tensor:
    x, axes = call.input(), reduced_axes(call)
    if len(x.shape) != 4 or axes != (2, 3) or not x.type.is_float:
        return reduced(call, x, "max")
    y = call.emit(ops.Pool2d("max"), x)
    return y if call["keepdim"] else call.reshape(y, x.shape[:2])


# ---------------------------------------------------------------- ops that move elements


@_of_numbers("view", "reshape", "_unsafe_view", "_reshape_alias")
def _view(call: Call) -> Tensor:
    x, shape = call.input(), tuple(int(size) for size in call.get("size") or call.get("shape") or ())
    rest = math.prod(size for size in shape if size != -1)
    return call.reshape(x, tuple(math.prod(x.shape) // max(1, rest) if size == -1 else size for size in shape))


@_of_numbers("flatten")
def _flatten(call: Call) -> Tensor:
    x = call.input()
    first, last = (call.axis(call[end], len(x.shape)) for end in ("start_dim", "end_dim"))
    return call.reshape(x, (*x.shape[:first], math.prod(x.shape[first : last + 1]), *x.shape[last + 1 :]))


@_of_numbers("unsqueeze")
def _unsqueeze(call: Call) -> Tensor:
    x = call.input()
    at = call["dim"] % (len(x.shape) + 1)
    return call.reshape(x, (*x.shape[:at], 1, *x.shape[at:]))


@_of_numbers("squeeze")
def _squeeze(call: Call) -> Tensor:
    x, rank = call.input(), len(call.input().shape)
    given = call.get("dim", range(rank))
    gone = {call.axis(axis, rank) for axis in ([given] if isinstance(given, int) else given)}
    return call.reshape(x, tuple(size for i, size in enumerate(x.shape) if size != 1 or i not in gone))


@_of_numbers("expand")
def _expand(call: Call) -> Tensor:
    x = call.input()
    new = len(call["size"]) - len(x.shape)
    shape = tuple(x.shape[i - new] if size == -1 else size for i, size in enumerate(call["size"]))
    return call.expanded(x, shape)


@_of_numbers("repeat")
def _repeat(call: Call) -> Tensor:
    x, counts = call.input(), tuple(call["repeats"])
    return call.repeated(call.reshape(x, (1,) * (len(counts) - len(x.shape)) + x.shape), counts)


@_of_numbers("index")
def _index(call: Call) -> Tensor:
    """Elements at indices of one axis or several. Constant ones are gathered axis by axis, where each varies alone."""
    x, given = call.input(), [(axis, value) for axis, value in enumerate(call["indices"]) if value is not None]
    first, known = given[0][0], all(isinstance(value, Constant) for _, value in given)
    arrays = [np.asarray(value.array) for _, value in given] if known else []
    if not {array.dtype.name for array in arrays} <= {"int64", "int32"}:
        raise Unsupported("indices that are not of int64 or int32")
    shape = np.broadcast_shapes(*(array.shape for array in arrays))
    varies = [[len(shape) - array.ndim + k for k, n in enumerate(array.shape) if n > 1] for array in arrays]
    flat = [axis for axes in varies for axis in axes]
    if not known or flat != sorted({*flat}) or [axis for axis, _ in given] != [*range(first, first + len(given))]:
        return flow_indices(call, given)
    rest = x.shape[first + len(given) :]
    for (axis, _), array in zip(given, arrays, strict=True):
        x = call.gathered(x, axis, array.reshape(-1))
    return call.reshape(x, (*x.shape[:first], *shape, *rest))


@_of_numbers("flip")
def _flip(call: Call) -> Tensor:
    x = call.input()
    for axis in call["dims"]:
        at = call.axis(axis, len(x.shape))
        x = call.gathered(x, at, np.arange(x.shape[at])[::-1])
    return x


@_of_numbers("slice_scatter", "select_scatter")
def _scatter(call: Call) -> Tensor:
    """A part of a value is written anew: what lies before and behind it, and the part, one after the other."""
    x, part = call.input(), call.input("src")
    axis = call.axis(call["dim"], len(x.shape))
    size = x.shape[axis]
    if "index" in call.arguments:
        part = call.reshape(part, (*x.shape[:axis], 1, *x.shape[axis + 1 :]))
        taken = range(call["index"] % size, call["index"] % size + 1)
    else:
        taken = range(size)[slice(call["start"], call["end"], call["step"])]
    if taken.step != 1 or not taken or part.type != x.type:
        raise Unsupported(f"step={taken.step}: {len(taken)} elements of {part.type} into {x.type}")
    ends = [(0, taken.start), (taken.stop, size - taken.stop)]
    before, after = ([call.emit(ops.Slice(axis, *end), x, helps=True)] if end[1] else [] for end in ends)
    parts = [*before, part, *after]
    return call.emit(ops.Concat(axis), *parts) if parts[1:] else part


@_of_numbers("copy")
def _copy(call: Call) -> Tensor:
    x = call.input()
    return call.expanded(as_numbers(call, call["src"], x.type.name), x.shape)


@_of_numbers("full_like", "zeros_like", "ones_like", "new_zeros", "new_ones", "new_full")
def _filled(call: Call) -> Value:
    """A constant of a value's shape, or of a given one."""
    if call.reader.fake:
        return stand_in(call.node, constant=True)
    name = call.kind
    number = call["fill_value"] if "fill_value" in call.arguments else int("ones" in name)
    size = call["size"] if "size" in call.arguments else call.input().shape
    return Constant(torch.full(tuple(size), number, dtype=call.node.meta["val"].dtype), call.node.name)


def _transposed(call: Call, x: Tensor, perm: Sequence[int]) -> Tensor:
    perm = tuple(call.axis(axis, len(x.shape)) for axis in perm)
    return x if perm == tuple(range(len(perm))) else call.emit(ops.Transpose(perm), x)


@_of_numbers("permute")
def _permute(call: Call) -> Tensor:
    return _transposed(call, call.input(), call["dims"])


@_of_numbers("transpose", "t")
def _transpose(call: Call) -> Tensor:
    perm = [*range(len(call.input().shape))]
    a, b = call.get("dim0", 0), call.get("dim1", -1)
    if len(perm) > 1:
        perm[a], perm[b] = perm[b], perm[a]
    return _transposed(call, call.input(), perm)


# The gates of PyTorch in ONNX's order.
_GATES = {"lstm": (0, 3, 1, 2), "gru": (1, 0, 2)}


@_op("lstm", "gru")
def _recurrent(call: Call) -> list[Tensor]:
    """All layers: the hidden values of each step, the last ones of each layer, and an LSTM's last cells."""
    name, x = call.kind, call.input()
    kind: RecurrentKind = "lstm" if name == "lstm" else "gru_of_sums"
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
        y, *last = call.recurrent(x, ops.Recurrent(kind, reverse), weights, states)
        steps, _, n, h = y.shape
        x = call.reshape(call.emit(ops.Transpose((0, 2, 1, 3)), y, helps=True), (steps, n, d * h))
        ends.append(last)
    x = call.emit(ops.Transpose((1, 0, 2)), x, helps=True) if call["batch_first"] else x
    return [x, *(call.emit(ops.Concat(0), *some, helps=True) for some in zip(*ends, strict=True))]


def _in_order(array: Array, name: str) -> Array:
    parts = np.split(array, len(_GATES[name]))
    return np.concatenate([parts[k] for k in _GATES[name]])


@_op("channel_shuffle")
def _channel_shuffle(call: Call) -> Tensor:
    x = call.input()
    return _unlike_image(call, call.emit(ops.Shuffle(call["groups"]), _image(call, x, 2)), x, 2)


@_op("pixel_shuffle")
def _pixel_shuffle(call: Call) -> Tensor:
    return call.pixels_of_channels(call.input(), call["upscale_factor"])


@_op("pixel_unshuffle")
def _pixel_unshuffle(call: Call) -> Tensor:
    return call.channels_of_pixels(call.input(), call["downscale_factor"])


@_of_numbers("cat")
def _cat(call: Call) -> Tensor:
    parts = [as_numbers(call, value, call.result) for value in call["tensors"]]
    return call.emit(ops.Concat(call.axis(call["dim"], len(parts[0].shape))), *parts)


def _part(call: Call, axis: int, begin: int, size: int, step: int = 1) -> Tensor:
    x = call.input()
    if size == 0:
        raise Unsupported("an empty tensor")
    return x if (size, step) == (x.shape[axis], 1) else call.emit(ops.Slice(axis, begin, size, step), x)


@_of_numbers("slice")
def _slice(call: Call) -> Tensor:
    shape = call.input().shape
    axis = call.axis(call["dim"], len(shape))
    taken = range(shape[axis])[slice(call["start"], call["end"], call["step"])]
    return _part(call, axis, taken.start, len(taken), taken.step)


@_of_numbers("select")
def _select(call: Call) -> Tensor:
    shape = call.input().shape
    axis = call.axis(call["dim"], len(shape))
    part = _part(call, axis, call["index"] % shape[axis], 1)
    return call.reshape(part, (*shape[:axis], *shape[axis + 1 :]))


@_of_numbers("split_with_sizes", "split", "unbind")
def _split(call: Call) -> list[Tensor]:
    shape = call.input().shape
    axis = call.axis(call["dim"], len(shape))
    sizes = call.get("split_sizes", call.get("split_size", 1))
    if isinstance(sizes, int):
        sizes = [min(sizes, shape[axis] - begin) for begin in range(0, shape[axis], sizes)]
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    parts = [_part(call, axis, begin, size) for begin, size in zip(begins, sizes, strict=True)]
    if call.kind == "unbind":
        parts = [call.reshape(part, (*shape[:axis], *shape[axis + 1 :])) for part in parts]
    return parts


@_op("constant_pad_nd")
def _pad(call: Call) -> Tensor:
    return call.emit(ops.Pad(_pads(call, call["pad"]), float(call["value"])), call.input())


@_op(*(f"{mode}_pad{rank}d" for mode in ("reflection", "replication") for rank in (1, 2, 3)))
def _pad_of_pixels(call: Call) -> Tensor:
    mode = "reflect" if "reflection" in call.kind else "edge"
    return call.padded(call.input(), _pads(call, call["padding"]), mode)


def _pads(call: Call, flat: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """(before, after) of each axis; PyTorch begins with the last one."""
    last = [*zip(flat[::2], flat[1::2], strict=True)][::-1]
    return ((0, 0),) * (len(call.input().shape) - len(last)) + tuple((int(a), int(b)) for a, b in last)


@_of_numbers("as_strided")
def _as_strided(call: Call) -> Tensor:
    """Nothing, if only strides of axes of one element change: tracing adds such after a mean of channels_last."""
    x, size = call.input(), tuple(map(int, call["size"]))
    traced = [node.meta["val"] for node in (call.node.args[0], call.node)]
    before, after = ([hint(stride) for stride in value.stride()] for value in traced)
    changed = any(n > 1 and a != b for n, a, b in zip(size, before, after, strict=False))
    if size != x.shape or changed or call["storage_offset"]:
        raise Unsupported("a view of other strides")
    return x


@_of_numbers("sym_size")
def _sym_size(call: Call) -> int:
    return call.input().shape[call["dim"]]


@_of_numbers("clone", "alias", "detach", "contiguous", "lift_fresh_copy", "dropout", "native_dropout")
def _identity(call: Call) -> Value:
    x = call.input()
    if call.get("train"):
        raise InTraining("training mode; call eval() of the module")
    return [x, None] if call.kind == "native_dropout" else x
