"""Translators of ONNX's ops that compute: from a node and its operands to the network's own ops.

A translator takes a `Call` and returns the value, or values, that the node gives; it raises `Unsupported` for what
blockconv has no op for. A node whose operands are all constants never comes here: it is folded.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import helper

from blockconv.core.errors import NetworkError
from blockconv.frontends.onnx.scope import Call, Op, Translator, Unsupported, registered, title
from blockconv.frontends.onnx.shapes import SHAPE_OPS
from blockconv.kernels.common.activation import ACTIVATIONS, activation
from blockconv.network import ops
from blockconv.network.graph import Tensor

__all__ = ["OPS"]

Array = npt.NDArray[Any]
OPS: dict[str, Op] = dict(SHAPE_OPS)  # every op that is read
_op = functools.partial(registered, OPS)


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
        auto = call.attribute("auto_pad", "") or "NOTSET"
        if auto not in _AUTO_PADS:
            raise NetworkError(title(call.node), "auto_pad", auto, f"has to be one of {', '.join(_AUTO_PADS)}")
        if auto == "VALID":
            pads = ((0, 0),) * rank
        elif auto.startswith("SAME"):
            pads = tuple(map(functools.partial(_same, auto), spatial, kernel, stride, dilation))
        self.rank = rank
        self.kernel = (1, *kernel)[-2:]
        self.stride = (1, *stride)[-2:]
        self.dilation = (1, *dilation)[-2:]
        self.pads = ((0, 0), *pads)[-2:]


_AUTO_PADS = ("NOTSET", "SAME_UPPER", "SAME_LOWER", "VALID")


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


@_op("Conv", limits="1-D and 2-D; constant weight and bias")
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


@_op("MaxPool", limits="1-D and 2-D; pads smaller than the window; no indices")
@_op("AveragePool", limits="1-D and 2-D; pads smaller than the window")
def _pool(call: Call) -> Tensor:
    _only_output(call)
    window = _Window(call, call.attribute("kernel_shape", ()))
    for size, sides in zip(window.kernel, window.pads, strict=True):
        if max(sides) >= size:  # a window of padding alone would have no maximum and no average
            remedy = "lower the pads, or put a Pad before the node"
            rule = f"have to be smaller than the window, {window.kernel}"
            raise NetworkError(title(call.node), "pads", window.pads, rule, remedy)
    if call.attribute("storage_order", 0) not in (0, 1):
        raise NetworkError(title(call.node), "storage_order", call.attribute("storage_order"), "has to be 0 or 1")
    kind: ops.PoolKind = "max"
    if call.node.op_type == "AveragePool":
        kind = "avg_include_padding" if call.attribute("count_include_pad", 0) else "avg_exclude_padding"
    ceil_mode = bool(call.attribute("ceil_mode", 0))
    attributes = ops.Pool2d(kind, window.kernel, window.stride, window.pads, window.dilation, ceil_mode)
    return _row(call, call.emit(attributes, _image(call, call.input())), window.rank)


@_op("GlobalMaxPool", "GlobalAveragePool", limits="1-D and 2-D")
def _global_pool(call: Call) -> Tensor:
    x = call.input()
    if len(x.shape) not in (3, 4):
        raise Unsupported(f"an input of {len(x.shape)} dimensions")
    kind: ops.PoolKind = "max" if call.node.op_type == "GlobalMaxPool" else "avg_exclude_padding"
    return _row(call, call.emit(ops.Pool2d(kind), _image(call, x)), len(x.shape) - 2)


# ---------------------------------------------------------------- matrices


@_op("Gemm", limits="constant B and C")
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
    shape = (a.shape[0], rows.shape[0])
    if c.ndim > 2 or any(size not in (1, wanted) for size, wanted in zip(c.shape[::-1], shape[::-1], strict=False)):
        raise NetworkError(title(call.node), "C", c, f"does not broadcast to the product's shape, {shape}")
    if c.size in (1, rows.shape[0]) and c.shape[:-1] in ((), (1,)):
        return _product(call, a, rows, np.broadcast_to(c.reshape(-1), rows.shape[:1]))
    return call.emit(ops.Binary("add"), _product(call, a, rows, None), call.constant(c, "c"))


@_op("MatMul", limits="constant B, a matrix or a vector")
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


def _activation(name: str, attributes: dict[str, float]) -> Translator:
    def translate(call: Call) -> Tensor:
        values = [call.attribute(key, default) for key, default in attributes.items()]
        return call.emit(ops.Activate(activation((name, *values))), call.input())

    return translate


for _name, _definition in ACTIVATIONS.items():
    if _definition.onnx:
        _op(_definition.onnx[0])(_activation(_name, _definition.onnx[1]))


@_op("Swish", limits="alpha 1")
def _swish(call: Call) -> Tensor:
    if call.attribute("alpha", 1.0) != 1:
        raise Unsupported("an alpha other than 1")
    return call.emit(ops.Activate(activation("silu")), call.input())


@_op("Gelu", limits="not approximated")
def _gelu(call: Call) -> Tensor:
    if call.attribute("approximate", "none") != "none":
        raise Unsupported("the approximation by tanh")
    return call.emit(ops.Activate(activation("gelu")), call.input())


@_op("Clip", limits="constant bounds")
def _clip(call: Call) -> Tensor:
    bounds = [call.attribute("min", -math.inf), call.attribute("max", math.inf)]
    for i in (0, 1):
        if call.has(1 + i):
            bounds[i] = float(call.array(1 + i, ("minimum", "maximum")[i]).item())
    low, high = bounds
    if math.isnan(low) or math.isnan(high):
        raise Unsupported(f"bounds {low} and {high}")
    # Where the bounds are the wrong way round, ONNX gives the upper one.
    return call.emit(ops.Activate(activation(("clip", min(low, high), high))), call.input())


@_op("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum")
def _binary(call: Call) -> Tensor:
    """Of two, or of any number, from the left."""
    kinds: dict[str, ops.BinaryKind] = {
        "Add": "add",
        "Sum": "add",
        "Sub": "sub",
        "Mul": "mul",
        "Div": "div",
        "Max": "max",
        "Min": "min",
    }
    result = call.input()
    for i in range(1, len(call.inputs)):
        result = call.emit(ops.Binary(kinds[call.node.op_type]), result, _aligned(call, result, call.input(i)))
    return result


def _aligned(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """Before opset 7 (8 for those of any number), operands were broadcast only where the node said so, and one that
    said `axis` began there, not at the end."""
    variadic = call.node.op_type in ("Max", "Min", "Sum")
    if call.opset >= (8 if variadic else 7):
        return b
    if not call.attribute("broadcast", 0):
        if a.shape != b.shape:
            rule = f"{call.node.op_type} of opset {call.opset} broadcasts {'never' if variadic else 'with broadcast=1'}"
            raise NetworkError(title(call.node), "inputs", (a.shape, b.shape), rule, "export for opset 8 or later")
        return b
    axis = call.attribute("axis")
    if axis is None:
        return b
    after = len(a.shape) - call.axis(axis, len(a.shape)) - len(b.shape)
    if after < 0:
        rule = f"leaves no room for an operand of shape {b.shape} in one of {a.shape}"
        raise NetworkError(title(call.node), "axis", axis, rule)
    shape = (*b.shape, *(1,) * after)
    if b.name in call.scope.constants:
        return call.constant(call.scope.constants[b.name].reshape(shape), "operand")
    return call.reshape(b, shape)


@_op("BatchNormalization", limits="constant parameters; inference")
def _batch_norm(call: Call) -> Tensor:
    if call.attribute("training_mode", 0) or not call.attribute("spatial", 1):
        raise Unsupported("training" if call.attribute("training_mode", 0) else "spatial=0")
    _only_output(call)
    names = ("scale", "bias", "mean", "variance")
    scale, bias, mean, variance = (call.array(1 + i, name).astype(np.float64) for i, name in enumerate(names))
    with np.errstate(invalid="ignore", divide="ignore"):  # as ONNX has it, a negative variance gives NaN
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


@_op("Dropout", limits="inference: the identity")
def _dropout(call: Call) -> Tensor:
    if call.has(2) and call.array(2, "training_mode").item():
        raise Unsupported("training")
    if call.has(1) and not 0 <= call.array(1, "ratio").item() < 1:
        rule = "has to be at least 0 and less than 1"
        raise NetworkError(title(call.node), "ratio", call.array(1, "ratio").item(), rule)
    _only_output(call)
    return call.input()


@_op("Identity")
def _identity(call: Call) -> Tensor:
    return call.input()


@_op("Cast", limits="to the type that it has", since=6)
def _cast(call: Call) -> Tensor:
    if helper.tensor_dtype_to_np_dtype(call.attribute("to")) != call.input().dtype:
        raise Unsupported(f"from {call.input().dtype} to another type")
    return call.input()
