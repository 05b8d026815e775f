"""Translators of ONNX's quantized ops, and of those that ONNX Runtime adds (com.microsoft). See `ops`.

An op of integers becomes what it is defined by: Dequantize of what it reads, the op of floats, Quantize of what it
gives; passes make one op of integers of that (`passes.integers`), as they do of models that say it so themselves.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
from onnx import helper

from blockconv.core.errors import ArgumentError, NetworkError
from blockconv.core.quantization import Quantization
from blockconv.core.types import BYTES, ByteType
from blockconv.frontends.onnx.matrices import gemm, matmul
from blockconv.frontends.onnx.scope import Call, Dequantized, Op, Scope, Unsupported, registered, title
from blockconv.frontends.onnx.windows import average, convolution, global_pool
from blockconv.kernels.common.activation import activation
from blockconv.network import ops
from blockconv.network.graph import Tensor

__all__ = ["QUANTIZED_OPS", "keeps_integers"]

Array = npt.NDArray[Any]
QUANTIZED_OPS: dict[str, Op] = {}
_op = functools.partial(registered, QUANTIZED_OPS)
_CONSTANT = "constant scales and zero points; uint8 and int8"


# ---------------------------------------------------------------- scales and zero points


def _scale(call: Call, at: int) -> Array:
    """The operand `at`, a scale or several. Raises NetworkError for what is none."""
    scale = call.array(at, "scale")
    try:
        return Quantization(scale if scale.ndim else float(scale)).scale
    except ArgumentError as error:
        raise NetworkError(title(call.node), "scale", scale, error.rule, "quantize the model anew") from error


def _zero_point(call: Call, at: int, dtype: Any) -> Array:
    """The operand `at`, zero points of the type of what they are for; 0 if it is left out."""
    if not call.has(at):
        return np.zeros((), dtype)
    zero_point = call.array(at, "zero point")
    if zero_point.dtype != dtype:
        raise NetworkError(title(call.node), "zero_point", zero_point, f"has to be of dtype {dtype}, as the array is")
    return zero_point


def _one(call: Call, at: int, dtype: Any) -> Quantization:
    """One scale and one zero point, the operands `at` and the next."""
    scale, zero_point = _scale(call, at), _zero_point(call, at + 1, dtype)
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        if value.size != 1:
            raise NetworkError(title(call.node), name, value, "has to be one number, as weights alone have several")
    return Quantization(float(scale.item()), int(zero_point.item()))


def _check_bytes(call: Call, dtype: Any) -> None:
    if dtype not in BYTES:
        raise Unsupported(f"integers of {dtype}")


# ---------------------------------------------------------------- constants


def keeps_integers(node: Any, scope: Scope) -> bool:
    """Whether a node dequantizes a constant whose integers passes may take; then it is known by these."""
    if node.op_type != "DequantizeLinear":
        return False
    value = scope.constants.get(scope.values[node.input[0]].name)
    if value is None or any(scope.array(scope.values[name].name) is None for name in node.input if name):
        return False
    call = Call(node, scope)
    if call.attribute("block_size", 0) or value.dtype not in (*BYTES, np.dtype(np.int32)):
        return False
    if call.array(1, "scale").dtype != np.float32 or call.attribute("output_dtype", 0) not in (0, 1):
        return False
    scale, zero_point = _scale(call, 1), _zero_point(call, 2, value.dtype)
    axis = call.axis(call.attribute("axis", 1), max(value.ndim, 1)) if scale.size > 1 else 0
    if scale.ndim and scale.size == 1:
        scale = scale.reshape(())
    found = _as_weight(value, scale, zero_point, axis)
    if found is not None:
        scope.values[node.output[0]] = scope.quantized_constant(node.output[0], found)
    return found is not None


def _as_weight(value: Array, scale: Array, zero_point: Array, axis: int) -> Dequantized | None:
    """Constant integers as such of the zero point 0; None if an int8 cannot hold them so."""
    if value.dtype == np.int32:
        return Dequantized(value, ops.Dequantize(Quantization(scale), axis)) if not zero_point.any() else None
    along = (
        zero_point.reshape((-1,) + (1,) * (value.ndim - 1 - axis)) if zero_point.size > 1 else zero_point.reshape(-1)
    )
    if zero_point.size > 1 and (axis >= value.ndim or zero_point.size != value.shape[axis]):
        return None
    wide = value.astype(np.int32) - (along.astype(np.int32) if along.size > 1 else int(along[0]))
    if wide.size and (wide.min() < -128 or wide.max() > 127):
        return None
    return Dequantized(wide.astype(np.int8), ops.Dequantize(Quantization(scale), axis))


def _weight(call: Call, at: int, axis: int) -> None:
    """The operand `at`, a constant of integers, becomes one of floats that keeps them, by what the next two say."""
    value = call.array(at, "weight")
    _check_bytes(call, value.dtype)
    scale, zero_point = _scale(call, at + 1), _zero_point(call, at + 2, value.dtype)
    if scale.size == 1:
        scale = scale.reshape(())
    axis = axis if value.ndim > 1 else 0
    if any(p.size not in (1, value.shape[axis]) for p in (scale, zero_point)):
        rule = f"there has to be one, or {value.shape[axis]}: one for each output channel"
        raise NetworkError(title(call.node), "scale", scale, rule)
    found, name = _as_weight(value, scale, zero_point, axis), call.scope.value_name(f"{call.name}.weight")
    if found is not None:
        call.inputs[at] = call.scope.quantized_constant(name, found)
        return
    along = (-1,) + (1,) * (value.ndim - 1 - axis)
    wide = value.astype(np.int32) - zero_point.astype(np.int32).reshape(along if zero_point.size > 1 else ())
    real = wide.astype(np.float32) * scale.reshape(along if scale.ndim else ())
    call.inputs[at] = call.scope.constant(name, real.astype(np.float32))


# ---------------------------------------------------------------- to integers and back


@_op("QuantizeLinear", "com.microsoft.QuantizeLinear", limits=f"float32 to uint8 or int8; {_CONSTANT}; no blocks")
def _quantize_linear(call: Call) -> Tensor:
    x = call.input()
    wanted = call.attribute("output_dtype", 0)
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(wanted)) if wanted else np.dtype(np.uint8)
    if call.has(2):
        dtype = call.array(2, "zero point").dtype
    _check_float(call, x)
    _check_bytes(call, dtype)
    scale, zero_point = _scale(call, 1), _zero_point(call, 2, dtype)
    if scale.size == 1:
        return _quantize(call, x, Quantization(float(scale.item()), int(zero_point.reshape(-1)[0])), dtype, helps=False)
    axis = _axis_of(call, x, scale, zero_point)
    made = []
    for k in range(scale.size):
        part = call.emit(ops.Slice(axis, k, 1), x, helps=True)
        given = Quantization(float(scale[k]), int(np.broadcast_to(zero_point, scale.shape)[k]))
        made.append(_quantize(call, part, given, dtype))
    return call.emit(ops.Concat(axis), *made)


@_op("DequantizeLinear", "com.microsoft.DequantizeLinear", limits=f"to float32; {_CONSTANT}, int32; no blocks")
def _dequantize_linear(call: Call) -> Tensor:
    x = call.input()
    if x.dtype not in (*BYTES, np.dtype(np.int32)) or call.array(1, "scale").dtype != np.float32:
        raise Unsupported(f"from {x.dtype}, with scales of {call.array(1, 'scale').dtype}")
    if call.attribute("block_size", 0):
        raise Unsupported("blocks")
    scale, zero_point = _scale(call, 1), _zero_point(call, 2, x.dtype)
    if scale.size == 1:
        given = Quantization(float(scale.item()), int(zero_point.reshape(-1)[0]))
        return call.emit(ops.Dequantize(given), x)
    axis = _axis_of(call, x, scale, zero_point)
    along = (-1,) + (1,) * (len(x.shape) - 1 - axis)
    y = call.emit(ops.Dequantize(Quantization(1.0)), x, helps=True)
    if zero_point.any():
        zeros = np.broadcast_to(zero_point, scale.shape).astype(np.float32).reshape(along)
        y = call.emit(ops.Binary("sub"), y, call.constant(zeros, "zero_point"), helps=True)
    return call.emit(ops.Binary("mul"), y, call.constant(scale.reshape(along), "scale"))


def _check_float(call: Call, x: Tensor) -> None:
    if x.dtype != np.float32:
        raise Unsupported(f"from {x.dtype}")
    if call.attribute("block_size", 0):
        raise Unsupported("blocks")


def _axis_of(call: Call, x: Tensor, scale: Array, zero_point: Array) -> int:
    axis = call.axis(call.attribute("axis", 1), len(x.shape))
    if scale.size != x.shape[axis] or zero_point.size not in (1, scale.size):
        rule = f"there have to be {x.shape[axis]}, one for each index of axis {axis}, and as many zero points"
        raise NetworkError(title(call.node), "scale", scale, rule)
    return axis


def _quantize(call: Call, x: Tensor, given: Quantization, dtype: Any, helps: bool = True) -> Tensor:
    """`x` as integers."""
    kind: ByteType = "uint8" if dtype == np.uint8 else "int8"
    return call.emit(ops.Quantize(given, kind), x)


def _dequantized(call: Call, at: int) -> Tensor:
    """The operand `at`, by the scale and the zero point that follow, as floats."""
    x = call.input(at)
    _check_bytes(call, x.dtype)
    return call.emit(ops.Dequantize(_one(call, at + 1, x.dtype)), x, helps=True)


def _stored(call: Call, y: Tensor, at: int, dtype: Any) -> Tensor:
    """What the node gives: floats as integers of the type that its inputs have, by the operands `at` and the next."""
    return _quantize(call, y, _one(call, at, dtype), dtype)


# ---------------------------------------------------------------- convolutions and products


@_op("QLinearConv", limits=f"1-D and 2-D; constant weight and bias; {_CONSTANT}")
def _qlinear_conv(call: Call) -> Tensor:
    x = _dequantized(call, 0)
    scale = _one(call, 1, call.input().dtype).scale * _scale(call, 4)
    _weight(call, 3, 0)
    more: tuple[Tensor, ...] = ()
    if call.has(8):
        bias = Dequantized(
            call.array(8, "bias"), ops.Dequantize(Quantization(scale if scale.size > 1 else scale.item()))
        )
        more = (call.scope.quantized_constant(call.scope.value_name(f"{call.name}.bias"), bias),)
    y = convolution(call, ops.Conv2d(), x, 3, more)
    return _stored(call, y, 6, _output_dtype(call, 7))


def _output_dtype(call: Call, at: int) -> Any:
    """That of the output's zero point."""
    dtype = call.array(at, "zero point").dtype if call.has(at) else call.input().dtype
    _check_bytes(call, dtype)
    return dtype


@_op("QLinearMatMul", limits=f"constant B, a matrix or a vector; {_CONSTANT}")
def _qlinear_matmul(call: Call) -> Tensor:
    a = _dequantized(call, 0)
    _weight(call, 3, 1)
    return _stored(call, matmul(call, ops.Conv2d(), a, 3), 6, _output_dtype(call, 7))


@_op("com.microsoft.QGemm", limits=f"constant B and C; {_CONSTANT}")
def _qgemm(call: Call) -> Tensor:
    a = _dequantized(call, 0)
    scale = _one(call, 1, call.input().dtype).scale * _scale(call, 4)
    _weight(call, 3, 0 if call.attribute("transB", 0) else 1)
    if call.has(6):
        bias = call.array(6, "bias").astype(np.float32) * scale.astype(np.float32)
        call.inputs[6] = call.constant(bias * np.float32(call.attribute("alpha", 1.0)), "bias")
    y = gemm(call, a, 3, 6)
    return y if not call.has(7) else _stored(call, y, 7, _output_dtype(call, 8))


def _sums(call: Call, zero_point_at: int, weight_at: int, axis: int) -> ops.QuantizedConv2d:
    """The attributes of a convolution that gives sums of integers; its weight becomes int8."""
    x, value = call.input(), call.array(weight_at, "weight")
    for dtype in (x.dtype, value.dtype):
        _check_bytes(call, dtype)
    zero_points = _zero_point(call, zero_point_at + 1, value.dtype)
    found = _as_weight(value, np.ones((), np.float32), zero_points, axis if value.ndim > 1 else 0)
    if found is None:
        raise Unsupported("weights that, less their zero point, are beyond int8")
    zero_point = _zero_point(call, zero_point_at, x.dtype)
    if zero_point.size != 1:
        raise Unsupported("several zero points of its first input")
    call.inputs[weight_at] = call.constant(found.integers, "weight")
    return ops.QuantizedConv2d(src=Quantization(1.0, int(zero_point.item())))


@_op("ConvInteger", limits=f"1-D and 2-D; constant weight; {_CONSTANT}")
def _conv_integer(call: Call) -> Tensor:
    return convolution(call, _sums(call, 2, 1, 0), call.input(), 1, ())


@_op("MatMulInteger", limits=f"constant B, a matrix or a vector; {_CONSTANT}")
def _matmul_integer(call: Call) -> Tensor:
    return matmul(call, _sums(call, 2, 1, 1), call.input(), 1)


# ---------------------------------------------------------------- ONNX Runtime's own


def _binary(kind: ops.BinaryKind) -> Callable[[Call], Tensor]:
    def translate(call: Call) -> Tensor:
        y = call.emit(ops.Binary(kind), _dequantized(call, 0), _dequantized(call, 3))
        return _stored(call, y, 6, call.input().dtype)

    return translate


_op("com.microsoft.QLinearAdd", limits=_CONSTANT)(_binary("add"))
_op("com.microsoft.QLinearMul", limits=_CONSTANT)(_binary("mul"))


@_op("com.microsoft.QLinearConcat", limits=_CONSTANT)
def _qlinear_concat(call: Call) -> Tensor:
    parts = [_dequantized(call, at) for at in range(2, len(call.inputs), 3)]
    axis = call.axis(call.attribute("axis"), len(parts[0].shape))
    return _stored(call, call.emit(ops.Concat(axis), *parts), 0, _output_dtype(call, 1))


@_op("com.microsoft.QLinearGlobalAveragePool", limits=f"1-D and 2-D; channels first; {_CONSTANT}")
def _qlinear_global(call: Call) -> Tensor:
    _check_channels(call)
    y = global_pool(call, "avg_exclude_padding", _dequantized(call, 0))
    return _stored(call, y, 3, call.input().dtype)


@_op(
    "com.microsoft.QLinearAveragePool", limits=f"1-D and 2-D; channels first; pads smaller than the window; {_CONSTANT}"
)
def _qlinear_average(call: Call) -> Tensor:
    _check_channels(call)
    return _stored(call, average(call, _dequantized(call, 0)), 3, call.input().dtype)


def _check_channels(call: Call) -> None:
    if call.attribute("channels_last", 0):
        raise Unsupported("channels last")


@_op("com.microsoft.QLinearSigmoid", limits=_CONSTANT)
def _qlinear_sigmoid(call: Call) -> Tensor:
    y = call.emit(ops.Activate(activation("sigmoid")), _dequantized(call, 0))
    return _stored(call, y, 3, call.input().dtype)


@_op("com.microsoft.QLinearLeakyRelu", limits=_CONSTANT)
def _qlinear_leaky_relu(call: Call) -> Tensor:
    slope = activation(("leaky_relu", call.attribute("alpha", 0.01)))
    return _stored(call, call.emit(ops.Activate(slope), _dequantized(call, 0)), 3, call.input().dtype)


@_op("com.microsoft.QLinearSoftmax", limits=_CONSTANT)
def _qlinear_softmax(call: Call) -> Tensor:
    x = _dequantized(call, 0)
    axis = call.axis(call.attribute("axis", -1), len(x.shape))
    if call.attribute("opset", 13) < 13 and axis != len(x.shape) - 1:
        raise Unsupported("opset below 13, which is over several axes")
    return _stored(call, call.emit(ops.Softmax(axis), x), 3, call.input().dtype)
