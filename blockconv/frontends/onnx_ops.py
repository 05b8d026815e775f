"""One translator for each ONNX op: from a node and its operands to the network's own ops.

A translator takes a `Call` and returns the value, or values, that the node gives; it raises `Unsupported` for what
blockconv has no op for. A node whose operands are all constants never comes here: it is folded.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from onnx import helper

from blockconv.errors import NetworkError
from blockconv.frontends.onnx_scope import Call, Unsupported, title
from blockconv.kernels.activation import activation
from blockconv.network import ops
from blockconv.network.graph import Tensor

__all__ = ["TRANSLATORS"]

Array = npt.NDArray[Any]
Translator = Callable[[Call], "Tensor | list[Tensor]"]
TRANSLATORS: dict[str, Translator] = {}


def _op(*names: str) -> Callable[[Translator], Translator]:
    def register(translate: Translator) -> Translator:
        TRANSLATORS.update(dict.fromkeys(names, translate))
        return translate

    return register


def _only_output(call: Call) -> None:
    if call.extra_outputs:
        raise Unsupported(f"its output {call.extra_outputs[0]!r}")


# ---------------------------------------------------------------- windows


class _Window:
    """kernel, strides, pads and dilations of a node over images, 1-D ones as rows of one pixel's height."""

    def __init__(self, call: Call, kernel: Any) -> None:
        rank = len(kernel)
        if rank not in (1, 2):
            raise Unsupported(f"{rank}-D windows")
        spatial = call.input().shape[2:]
        if len(spatial) != rank:
            rule = f"its window, {kernel}, has not the rank of the input's image"
            raise NetworkError(title(call.node), "input", call.input().shape, rule)
        stride = call.attribute("strides", (1,) * rank)
        dilation = call.attribute("dilations", (1,) * rank)
        flat = call.attribute("pads", (0,) * 2 * rank)
        if len(stride) != rank or len(dilation) != rank or len(flat) != 2 * rank:
            rule = f"strides {stride}, dilations {dilation} and pads {flat} do not fit a window of {kernel}"
            raise NetworkError(title(call.node), "kernel_shape", kernel, rule)
        pads: Any = tuple(zip(flat[:rank], flat[rank:], strict=True))
        auto = call.attribute("auto_pad", "NOTSET")
        if auto == "VALID":
            pads = ((0, 0),) * rank
        elif auto.startswith("SAME"):
            pads = tuple(map(functools.partial(_same, auto), spatial, kernel, stride, dilation))
        self.rank = rank
        self.kernel = (1, *kernel)[-2:]
        self.stride = (1, *stride)[-2:]
        self.dilation = (1, *dilation)[-2:]
        self.pads = ((0, 0), *pads)[-2:]


def _same(auto: str, size: int, kernel: int, stride: int, dilation: int) -> tuple[int, int]:
    total = max(0, (-(-size // stride) - 1) * stride + dilation * (kernel - 1) + 1 - size)
    less, more = total // 2, total - total // 2
    return (less, more) if auto == "SAME_UPPER" else (more, less)


def _image(call: Call, x: Tensor) -> Tensor:
    """(N, C, L) as (N, C, 1, L)."""
    return call.reshape(x, (*x.shape[:2], 1, x.shape[2])) if len(x.shape) == 3 else x


def _row(call: Call, y: Tensor, rank: int) -> Tensor:
    """Back again."""
    return call.reshape(y, (*y.shape[:2], y.shape[3])) if rank == 1 else y


@_op("Conv")
def _conv(call: Call) -> Tensor:
    weight = call.array(1, "weight")
    window = _Window(call, weight.shape[2:])
    given = call.attribute("kernel_shape", weight.shape[2:])
    if given != weight.shape[2:]:
        raise NetworkError(title(call.node), "kernel_shape", given, f"the weight's is {weight.shape[2:]}")
    wei = call.input(1) if window.rank == 2 else call.constant(weight[:, :, None], "weight")
    parameters: tuple[Tensor, ...] = (wei,)
    if call.has(2):
        call.array(2, "bias")
        parameters = (wei, call.input(2))
    groups = call.attribute("group", 1)
    attributes = ops.Conv2d(window.stride, window.pads, window.dilation, groups)
    return _row(call, call.emit(attributes, _image(call, call.input()), parameters=parameters), window.rank)


@_op("MaxPool", "AveragePool")
def _pool(call: Call) -> Tensor:
    _only_output(call)
    window = _Window(call, call.attribute("kernel_shape", ()))
    kind: ops.PoolKind = "max"
    if call.node.op_type == "AveragePool":
        kind = "avg_include_padding" if call.attribute("count_include_pad", 0) else "avg_exclude_padding"
    ceil_mode = bool(call.attribute("ceil_mode", 0))
    attributes = ops.Pool2d(kind, window.kernel, window.stride, window.pads, window.dilation, ceil_mode)
    return _row(call, call.emit(attributes, _image(call, call.input())), window.rank)


@_op("GlobalMaxPool", "GlobalAveragePool")
def _global_pool(call: Call) -> Tensor:
    x = call.input()
    if len(x.shape) not in (3, 4):
        raise Unsupported(f"an input of {len(x.shape)} dimensions")
    kind: ops.PoolKind = "max" if call.node.op_type == "GlobalMaxPool" else "avg_exclude_padding"
    return _row(call, call.emit(ops.Pool2d(kind), _image(call, x)), len(x.shape) - 2)


# ---------------------------------------------------------------- matrices


@_op("Gemm")
def _gemm(call: Call) -> Tensor:
    a, weight = call.input(), call.array(1, "second matrix")
    if len(a.shape) != 2 or weight.ndim != 2:
        raise NetworkError(title(call.node), "inputs", (a.shape, weight.shape), "have to be matrices")
    if call.attribute("transA", 0):
        a = call.emit(ops.Transpose((1, 0)), a, helps=True)
    alpha, beta = call.attribute("alpha", 1.0), call.attribute("beta", 1.0)
    # alpha is a float32; exactly one is the common case, and leaves large weights uncopied.
    scaled = weight if alpha == 1 else (weight * alpha).astype(weight.dtype)
    rows = scaled if call.attribute("transB", 0) else scaled.T
    if not call.has(2):
        return _product(call, a, rows, None)
    c = call.array(2, "third matrix")
    c = c if beta == 1 else (c * beta).astype(c.dtype)
    if c.size in (1, rows.shape[0]) and c.shape[:-1] in ((), (1,)):
        return _product(call, a, rows, np.broadcast_to(c.reshape(-1), rows.shape[:1]))
    return call.emit(ops.Binary("add"), _product(call, a, rows, None), call.constant(c, "c"))


@_op("MatMul")
def _matmul(call: Call) -> Tensor:
    a, weight = call.input(), call.array(1, "second matrix")
    if weight.ndim > 2:
        raise Unsupported("a batch of second matrices")
    if len(a.shape) < 1 or weight.ndim < 1:
        raise NetworkError(title(call.node), "inputs", (a.shape, weight.shape), "have to be vectors or matrices")
    rows = weight[None] if weight.ndim == 1 else weight.T
    y = _product(call, a, rows, None)
    return call.reshape(y, a.shape[:-1] if weight.ndim == 1 else (*a.shape[:-1], rows.shape[0]))


def _product(call: Call, a: Tensor, rows: Array, bias: Array | None) -> Tensor:
    """(..., K) by (N, K), transposed, plus bias: a convolution of 1x1 over images of one pixel."""
    if rows.shape[1] != a.shape[-1]:
        rule = f"has {a.shape[-1]} columns, and the second matrix {rows.shape[1]} rows"
        raise NetworkError(title(call.node), "input", a.shape, rule)
    parameters: tuple[Tensor, ...] = (call.constant(rows[:, :, None, None], "weight"),)
    if bias is not None:
        parameters = (*parameters, call.constant(bias, "bias"))
    lead = math.prod(a.shape[:-1])
    y = call.emit(ops.Conv2d(), call.reshape(a, (lead, a.shape[-1], 1, 1)), parameters=parameters)
    return call.reshape(y, (lead, rows.shape[0]))


# ---------------------------------------------------------------- elementwise


def _activation(name: str, *parameters: tuple[str, float]) -> Translator:
    def translate(call: Call) -> Tensor:
        values = [call.attribute(key, default) for key, default in parameters]
        return call.emit(ops.Activate(activation((name, *values))), call.input())

    return translate


TRANSLATORS["Relu"] = _activation("relu")
TRANSLATORS["LeakyRelu"] = _activation("leaky_relu", ("alpha", 0.01))
TRANSLATORS["Sigmoid"] = _activation("sigmoid")
TRANSLATORS["Tanh"] = _activation("tanh")
TRANSLATORS["HardSigmoid"] = _activation("hardsigmoid", ("alpha", 0.2), ("beta", 0.5))
TRANSLATORS["HardSwish"] = _activation("hardswish")


@_op("Swish")
def _swish(call: Call) -> Tensor:
    if call.attribute("alpha", 1.0) != 1:
        raise Unsupported("an alpha other than 1")
    return call.emit(ops.Activate(activation("silu")), call.input())


@_op("Gelu")
def _gelu(call: Call) -> Tensor:
    if call.attribute("approximate", "none") != "none":
        raise Unsupported("the approximation by tanh")
    return call.emit(ops.Activate(activation("gelu")), call.input())


@_op("Clip")
def _clip(call: Call) -> Tensor:
    bounds = [call.attribute("min", -math.inf), call.attribute("max", math.inf)]
    for i in (0, 1):
        if call.has(1 + i):
            bounds[i] = float(call.array(1 + i, ("minimum", "maximum")[i]).item())
    return call.emit(ops.Activate(activation(("clip", *bounds))), call.input())


@_op("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum")
def _binary(call: Call) -> Tensor:
    """Of two, or of any number, from the left."""
    kinds: dict[str, ops.BinaryKind] = {
        "Add": "add", "Sum": "add", "Sub": "sub", "Mul": "mul", "Div": "div", "Max": "max", "Min": "min",
    }  # fmt: skip
    result = call.input()
    for i in range(1, len(call.inputs)):
        result = call.emit(ops.Binary(kinds[call.node.op_type]), result, _aligned(call, result, call.input(i)))
    return result


def _aligned(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """Before opset 7, a second operand that said `axis` began there, not at the end."""
    axis = call.attribute("axis")
    if call.opset >= 7 or axis is None or not call.attribute("broadcast", 0):
        return b
    shape = (*b.shape, *(1,) * (len(a.shape) - call.axis(axis, len(a.shape)) - len(b.shape)))
    if b.name in call.scope.constants:
        return call.constant(call.scope.constants[b.name].reshape(shape), "operand")
    return call.reshape(b, shape)


@_op("BatchNormalization")
def _batch_norm(call: Call) -> Tensor:
    if call.attribute("training_mode", 0) or not call.attribute("spatial", 1):
        raise Unsupported("training" if call.attribute("training_mode", 0) else "spatial=0")
    _only_output(call)
    names = ("scale", "bias", "mean", "variance")
    scale, bias, mean, variance = (call.array(1 + i, name).astype(np.float64) for i, name in enumerate(names))
    factor = scale / np.sqrt(variance + call.attribute("epsilon", 1e-5))
    dtype = call.input().dtype
    parameters = [call.constant(v.astype(dtype), w) for v, w in ((factor, "scale"), (bias - mean * factor, "shift"))]
    return call.emit(ops.Affine(), call.input(), parameters=(parameters[0], parameters[1]))


@_op("LRN")
def _lrn(call: Call) -> Tensor:
    alpha, beta, bias = call.attribute("alpha", 1e-4), call.attribute("beta", 0.75), call.attribute("bias", 1.0)
    return call.emit(ops.Lrn(call.attribute("size"), alpha, beta, bias), call.input())


@_op("Softmax")
def _softmax(call: Call) -> Tensor:
    x = call.input()
    axis = call.axis(call.attribute("axis", -1 if call.opset >= 13 else 1), len(x.shape))
    if call.opset >= 13 or math.prod(x.shape[axis + 1 :]) == 1:
        return call.emit(ops.Softmax(axis), x)
    # Before opset 13: over all axes from that one on.
    flat = call.reshape(x, (math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return call.reshape(call.emit(ops.Softmax(1), flat), x.shape)


@_op("Dropout")
def _dropout(call: Call) -> Tensor:
    if call.has(2) and call.array(2, "training_mode").item():
        raise Unsupported("training")
    _only_output(call)
    return call.input()


@_op("Identity")
def _identity(call: Call) -> Tensor:
    return call.input()


@_op("Cast")
def _cast(call: Call) -> Tensor:
    if helper.tensor_dtype_to_np_dtype(call.attribute("to")) != call.input().dtype:
        raise Unsupported(f"from {call.input().dtype} to another type")
    return call.input()


# ---------------------------------------------------------------- shapes


@_op("Shape")
def _shape(call: Call) -> Tensor:
    shape = call.input().shape
    part = shape[slice(call.attribute("start", 0), call.attribute("end", None))]
    return call.constant(np.array(part, np.int64), "shape")


@_op("Size")
def _size(call: Call) -> Tensor:
    return call.constant(np.array(call.input().elements, np.int64), "size")


@_op("Flatten")
def _flatten(call: Call) -> Tensor:
    shape, axis = call.input().shape, call.attribute("axis", 1)
    axis = axis + len(shape) if axis < 0 else axis
    return call.reshape(call.input(), (math.prod(shape[:axis]), math.prod(shape[axis:])), helps=False)


@_op("Reshape")
def _reshape(call: Call) -> Tensor:
    x = call.input()
    shape = call.ints(1, "shape") if call.has(1) else call.attribute("shape")
    if call.attribute("allowzero", 0) and 0 in shape:
        raise Unsupported("an empty tensor")
    return call.emit(ops.Reshape(shape), x)


@_op("Squeeze")
def _squeeze(call: Call) -> Tensor:
    x = call.input()
    axes = call.ints(1, "axes") if call.has(1) else call.attribute("axes")
    if axes is None:
        return call.reshape(x, tuple(size for size in x.shape if size != 1), helps=False)
    gone = [call.axis(axis, len(x.shape)) for axis in axes]
    return call.reshape(x, tuple(size for i, size in enumerate(x.shape) if i not in gone), helps=False)


@_op("Unsqueeze")
def _unsqueeze(call: Call) -> Tensor:
    x = call.input()
    axes = call.ints(1, "axes") if call.has(1) else call.attribute("axes")
    rank = len(x.shape) + len(axes)
    new = {call.axis(axis, rank) for axis in axes}
    sizes = iter(x.shape)
    return call.reshape(x, tuple(1 if i in new else next(sizes) for i in range(rank)), helps=False)


@_op("Transpose")
def _transpose(call: Call) -> Tensor:
    perm = call.attribute("perm", tuple(reversed(range(len(call.input().shape)))))
    return call.emit(ops.Transpose(perm), call.input())


@_op("Concat")
def _concat(call: Call) -> Tensor:
    parts = [call.input(i) for i in range(len(call.inputs))]
    axis = call.axis(call.attribute("axis", 1), len(parts[0].shape))
    return call.emit(ops.Concat(axis), *parts)


@_op("Split")
def _split(call: Call) -> list[Tensor]:
    x = call.input()
    axis = call.axis(call.attribute("axis", 0), len(x.shape))
    sizes = call.ints(1, "split") if call.has(1) else call.attribute("split")
    if sizes is None:
        count = call.attribute("num_outputs", len(call.node.output))
        each = -(-x.shape[axis] // count)
        sizes = [max(0, min(each, x.shape[axis] - i * each)) for i in range(count)]
    if sum(sizes) != x.shape[axis]:
        raise NetworkError(title(call.node), "split", sizes, f"does not add up to axis {axis} of {x.shape}")
    begins = [sum(sizes[:i]) for i in range(len(sizes))]
    return [call.emit(ops.Slice(axis, begin, size), x) for begin, size in zip(begins, sizes, strict=True)]


@_op("Slice")
def _slice(call: Call) -> Tensor:
    x = call.input()
    if call.opset < 10:
        starts, ends = call.attribute("starts"), call.attribute("ends")
        axes, steps = call.attribute("axes"), None
    else:
        starts, ends = call.ints(1, "starts"), call.ints(2, "ends")
        axes = call.ints(3, "axes") if call.has(3) else None
        steps = call.ints(4, "steps") if call.has(4) else None
    for axis, start, end, step in zip(
        axes or range(len(starts)), starts, ends, steps or [1] * len(starts), strict=True
    ):
        at = call.axis(axis, len(x.shape))
        taken = range(x.shape[at])[slice(start, end, step)]
        if not taken:
            raise Unsupported("an empty tensor")
        if taken != range(x.shape[at]):
            x = call.emit(ops.Slice(at, taken[0], len(taken), step), x)
    return x


@_op("Pad")
def _pad(call: Call) -> Tensor:
    x = call.input()
    if call.attribute("mode", "constant") != "constant":
        raise Unsupported(f"mode {call.attribute('mode')!r}")
    rank = len(x.shape)
    value, axes = call.attribute("value", 0.0), tuple(range(rank))
    flat = call.ints(1, "pads") if call.has(1) else call.attribute("pads", call.attribute("paddings"))
    if call.has(2):
        value = float(call.array(2, "constant_value").item())
    if call.has(3):
        axes = tuple(call.axis(axis, rank) for axis in call.ints(3, "axes"))
    if len(flat) != 2 * len(axes):
        raise NetworkError(title(call.node), "pads", flat, f"has to hold two numbers for each of {len(axes)} axes")
    pads = [(0, 0)] * rank
    for axis, before, after in zip(axes, flat[: len(axes)], flat[len(axes) :], strict=True):
        pads[axis] = (before, after)
    return call.emit(ops.Pad(tuple(pads), value), x)


@_op("ReduceMean")
def _reduce_mean(call: Call) -> Tensor:
    x = call.input()
    axes: Sequence[int] | None = call.ints(1, "axes") if call.has(1) else call.attribute("axes")
    if not axes and call.attribute("noop_with_empty_axes", 0):
        return x
    given = axes or range(len(x.shape))
    found = tuple(sorted(call.axis(axis, len(x.shape)) for axis in given))
    return call.emit(ops.ReduceMean(found, bool(call.attribute("keepdims", 1))), x)


@_op("Resize", "Upsample")
def _resize(call: Call) -> Tensor:
    x, modern = call.input(), call.node.op_type == "Resize" and call.opset >= 11
    rank = len(x.shape)
    axes = tuple(call.axis(axis, rank) for axis in call.attribute("axes", range(rank)))
    mode = call.attribute("mode", "nearest")
    coordinates: Any = call.attribute("coordinate_transformation_mode", "half_pixel") if modern else "asymmetric"
    nearest: Any = call.attribute("nearest_mode", "round_prefer_floor") if modern else "floor"
    unknown = [
        f"{name}={value!r}"
        for name, value, known in (
            ("mode", mode, ("nearest", "linear", "bilinear")),
            ("coordinate_transformation_mode", coordinates, _COORDINATES),
            ("antialias", call.attribute("antialias", 0), (0,)),
        )
        if value not in known
    ]
    if rank != 4 or unknown:
        raise Unsupported(", ".join(unknown) or f"an input of {rank} dimensions")
    kind: Literal["nearest", "linear"] = "nearest" if mode == "nearest" else "linear"
    scales = _scales(call, 2 if modern else 1)
    if scales is not None:
        scale = dict(zip(axes, scales, strict=True))
        if any(scale.get(axis, 1) != 1 for axis in (0, 1)):
            raise Unsupported("scales of N or C")
        return call.emit(ops.Resize(kind, None, (scale.get(2, 1.0), scale.get(3, 1.0)), coordinates, nearest), x)
    size = dict(zip(axes, _sizes(call, axes), strict=True))
    if any(size.get(axis, x.shape[axis]) != x.shape[axis] for axis in (0, 1)):
        raise Unsupported("sizes of N or C")
    wanted = size.get(2, x.shape[2]), size.get(3, x.shape[3])
    return call.emit(ops.Resize(kind, wanted, None, coordinates, nearest), x)


_COORDINATES = ("half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners")


def _scales(call: Call, at: int) -> Sequence[float] | None:
    """One for each axis, from the input at that place or an attribute; None if sizes are given instead."""
    if call.has(at) and call.input(at).elements:
        return [float(k) for k in call.array(at, "scales").reshape(-1)]
    found: Sequence[float] | None = call.attribute("scales")
    return found


def _sizes(call: Call, axes: tuple[int, ...]) -> tuple[int, ...]:
    """The sizes wanted; with an aspect ratio to keep, those that it leaves."""
    sizes, policy = call.ints(3, "sizes"), call.attribute("keep_aspect_ratio_policy", "stretch")
    if policy == "stretch":
        return sizes
    ratios = [size / call.input().shape[axis] for axis, size in zip(axes, sizes, strict=True)]
    ratio = min(ratios) if policy == "not_larger" else max(ratios)
    return tuple(math.floor(call.input().shape[axis] * ratio + 0.5) for axis in axes)
