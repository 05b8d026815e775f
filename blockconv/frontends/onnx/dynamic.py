"""Translators of ONNX's sums of integers, and of the quantization that is found while a network runs. See `ops`.

DynamicQuantizeLinear gives integers, a scale and a zero point. An op that reads this zero point for its first input
becomes a `DynamicConv2d` with the quantization found. Its sums are int32, as ONNX has them. A pass
(`passes.dynamic`) makes the multiplications by scales part of it.
"""

import math
from collections.abc import Callable

import numpy as np

from blockconv.core.checks import Shape
from blockconv.core.quantization import Quantization
from blockconv.core.types import Array, element
from blockconv.frontends.onnx.matrices import matmul
from blockconv.frontends.onnx.quantized import (
    CONSTANT,
    as_weight,
    check_bytes,
    quantization,
    scales,
    weight,
    zero_points,
)
from blockconv.frontends.onnx.scope import Call, op
from blockconv.frontends.onnx.windows import convolution
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor

_FOUND = "zero points that are constant, or found by DynamicQuantizeLinear; uint8 and int8"
_WHOLE = ops.Dequantize(Quantization(1.0))  # integers as floats
_Source = tuple[ops.Convolution, tuple[Tensor, ...]]  # a convolution of integers, and its inputs after the first
_Product = Callable[[Call, Tensor, _Source], Tensor]  # a node's value, with its current weight


@op("DynamicQuantizeLinear")
def _quantize(call: Call) -> list[Tensor]:
    x = call.input()
    if x.dtype != np.float32:
        raise Unsupported(f"from {x.dtype}")
    _, y, scale, zero_point = _found(call, x)
    return [y, call.reshape(scale, (), helps=False), call.reshape(zero_point, (), helps=False)]


def _found(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(The quantization found for `x`, `x` as integers, the scale and the uint8 zero point of shape (1,))."""
    found = call.emit(ops.FindQuantization(), x, helps=True)
    y = call.emit(ops.DynamicQuantize(), x, found)
    scale, zero_point = (call.emit(ops.Slice(0, k, 1), found, helps=True) for k in (0, 1))
    return found, y, scale, call.emit(ops.Quantize(Quantization(1.0)), zero_point, helps=True)


def _found_at(call: Call, at: int) -> Tensor | None:
    """The found quantization whose zero point is the operand `at`; None if the operand is anything else."""
    if not call.has(at):
        return None
    node = call.maker(call.input(at).name)
    for kind in (ops.Reshape, ops.Quantize, ops.Slice):
        if node is None or not isinstance(node.attributes, kind):
            return None
        name = node.inputs[0]
        node = call.maker(name)
    made = node is not None and isinstance(node.attributes, ops.FindQuantization)
    return Tensor(name, (2,), element("float32")) if made else None


# ---------------------------------------------------------------- sums of products


@op("ConvInteger", limits=f"1-D to 3-D; constant weight; {_FOUND}")
@op("MatMulInteger", limits=f"constant B, whose batch broadcasts with A's; {_FOUND}")
def _of_integers(call: Call) -> Tensor:
    product = _convolved if call.node.op_type == "ConvInteger" else _multiplied
    return _sums(call, call.input(), _source(call, 2), 3, product)


def _convolved(call: Call, x: Tensor, source: _Source) -> Tensor:
    return convolution(call, source[0], x, 1, (), source[1])


def _multiplied(call: Call, x: Tensor, source: _Source) -> Tensor:
    return matmul(call, source[0], x, 1, source[1])


def _source(call: Call, at: int) -> _Source:
    """The convolution of integers whose zero point is the operand `at`."""
    found = _found_at(call, at)
    if found is not None:
        return _of_found(found)
    zero_point = zero_points(call, at, call.input().dtype)
    if zero_point.size != 1:
        raise Unsupported(f"zero_point of shape {zero_point.shape}: several zero points for the first input")
    return ops.QuantizedConv2d(src=Quantization(1.0, int(zero_point.item()))), ()


def _of_found(found: Tensor) -> _Source:
    return ops.DynamicConv2d(), (found,)


def _sums(call: Call, x: Tensor, source: _Source, zero_point_at: int, product: _Product, real: bool = False) -> Tensor:
    """The sums of products of `x` and operand 1, a constant, less their zero points; float32 will do if `real`, or if
    nothing but Cast to float32 reads them."""
    real = real or call.node.output[0] in call.scope.only_cast
    value = call.array(1, "weight")
    for dtype in (x.dtype, value.dtype):
        check_bytes(call, dtype)
    zero_point, axis = zero_points(call, zero_point_at, value.dtype), int(product is _multiplied and value.ndim > 1)
    exact = as_weight(value, np.ones((), np.float32), zero_point, axis)
    if exact is None:
        said = f"zero points of shape {zero_point.shape}: neither one, nor one for each index of axis {axis}"
        raise Unsupported(f"{said} of the weight, {value.shape}")
    plain = value.ndim == 2 if product is _multiplied else True
    if real and plain and exact.integers.dtype == np.int16:
        return _corrected(call, x, source, zero_point, product)
    call.inputs[1] = call.constant(exact.integers, "weight")
    return product(call, x, source)


def _corrected(call: Call, x: Tensor, source: _Source, zero_point: Array, product: _Product) -> Tensor:
    """The sums as floats, by weights that an int8 cannot hold less their zero points.

    They are int8 weights plus a number for each output channel. The number is multiplied by the sum of all elements of
    a window. This takes little more time than int8 weights; weights of twice as many channels would take twice as long.
    """
    value, of_matrix = call.array(1, "weight"), product is _multiplied
    groups = 1 if of_matrix else call.attribute("group", 1)
    middle = 128 if value.dtype == np.uint8 else 0
    count = value.shape[1 if of_matrix else 0]
    ones = np.ones((value.shape[0], 1) if of_matrix else (groups, *value.shape[1:]), np.int8)
    parts = []
    for name, part in (("weight", (value.astype(np.int32) - middle).astype(np.int8)), ("ones", ones)):
        call.inputs[1] = call.constant(part, name)
        parts.append(call.emit(_WHOLE, product(call, x, source), helps=True))
    shape, at = parts[0].shape, parts[0].rank - 1 if of_matrix else 1
    flat = [call.reshape(y, _as_image(y.shape, at)) for y in parts]
    offsets = np.broadcast_to(middle - zero_point.astype(np.float32).reshape(-1), (count,))
    weight = call.constant(offsets.reshape(count, 1, 1, 1), "offsets")
    y = call.emit(ops.Conv2d(groups=groups), flat[1], flat[0], parameters=(weight,))
    call.scope.floats.add(call.node.output[0])
    return call.reshape(y, shape)


def _as_image(shape: Shape, at: int) -> Shape:
    """(N, C, H, W) for an array whose channels are axis `at`, the second or the last."""
    if at == 1 and len(shape) > 2:
        return (*shape[:2], *(1,) * (4 - len(shape)), *shape[2:])
    return math.prod(shape[:at]), shape[at], 1, 1


# ---------------------------------------------------------------- ONNX Runtime's own


@op("com.microsoft.MatMulIntegerToFloat", limits=f"constant B, a matrix or a vector, and bias; {_FOUND}")
def _matmul_to_float(call: Call) -> Tensor:
    found = _found_at(call, 4)
    if found is None:
        a = call.emit(ops.Dequantize(quantization(call, 2, call.input().dtype, 4)), call.input(), helps=True)
        weight(call, 1, 1, 3, 5)
        return _biased(call, matmul(call, ops.Conv2d(), a, 1), 6)
    sums = _sums(call, call.input(), _of_found(found), 5, _multiplied, True)
    return _biased(call, _scaled(call, sums, call.input(2), 3), 6)


@op("com.microsoft.DynamicQuantizeMatMul", limits=f"constant B, a matrix or a vector, and bias; {CONSTANT}")
def _dynamic_matmul(call: Call) -> Tensor:
    found, y, scale, _ = _found(call, call.input())
    return _biased(call, _scaled(call, _sums(call, y, _of_found(found), 3, _multiplied, True), scale, 2), 4)


def _scaled(call: Call, sums: Tensor, scale: Tensor, at: int) -> Tensor:
    """Sums times the scale of the source and those of the weight, the operand `at`."""
    factor = call.emit(ops.Binary("mul"), call.constant(scales(call, at).reshape(-1), "scale"), scale, helps=True)
    real = sums if sums.dtype == np.float32 else call.emit(_WHOLE, sums, helps=True)
    return call.emit(ops.Binary("mul"), real, factor)


def _biased(call: Call, y: Tensor, at: int) -> Tensor:
    """`y` plus operand `at`, if there is one."""
    return y if not call.has(at) else call.emit(ops.Binary("add"), y, call.constant(call.array(at, "bias"), "bias"))
