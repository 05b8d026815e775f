"""Translators of ONNX's quantized ops. See `ops`, and `contributed` for ONNX Runtime's own.

An op of integers becomes what it is defined by: Dequantize of its inputs, the float op, Quantize of its output. Passes
turn these into one integer op (`passes.integers`), as they do for models that are written this way.
"""

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from blockconv.core.checks import MOST_DIMENSIONS, Shape, axis_shape
from blockconv.core.errors import ArgumentError
from blockconv.core.python import zipped
from blockconv.core.quantization import Quantization
from blockconv.core.types import BYTES, INTEGERS, NIBBLES, Array, element
from blockconv.frontends.onnx.matrices import matmul
from blockconv.frontends.onnx.runner import dtype_of
from blockconv.frontends.onnx.scope import Call, Dequantized, op
from blockconv.frontends.onnx.windows import convolution
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.lowering import Convolved
from blockconv.network.ops.rule import Tensor, Tensors

CONSTANT = "constant scales and zero points; uint8 and int8"
ALSO_4_BITS = f"{CONSTANT}, uint4 and int4"


# ---------------------------------------------------------------- scales and zero points


def scales(call: Call, at: int) -> Array:
    """The operand `at`: one scale or several. Raises NetworkError for anything else."""
    scale = call.array(at, "scale")
    try:
        return Quantization(scale.reshape(-1) if scale.ndim else float(scale)).scale.reshape(scale.shape)
    except ArgumentError as error:
        raise call.error("scale", scale, error.rule, "quantize the model again") from error


def zero_points(call: Call, at: int, dtype: Any) -> Array:
    """The operand `at`: zero points of the type of their integers, one a byte; 0 if it is left out."""
    if not call.has(at):
        return np.zeros((), element(str(dtype)).dtype)
    zero_point = call.array(at, "zero point")
    if str(zero_point.dtype) != str(dtype):
        raise call.error("zero_point", zero_point, f"has to have dtype {dtype}, like the array")
    return unpacked(zero_point)


def unpacked(value: Array) -> Array:
    """Convert ml_dtypes' 4-bit integers to 8-bit ones; others stay as they are."""
    name = value.dtype.name
    return value.astype(element(name).dtype) if name in NIBBLES else value


def quantization(call: Call, at: int, dtype: Any) -> Quantization:
    """One scale, operand `at`, and one zero point, the next operand."""
    scale, zero_point = scales(call, at), zero_points(call, at + 1, dtype)
    for name, value in (("scale", scale), ("zero_point", zero_point)):
        if value.size != 1:
            raise call.error(name, value, "has to be one number; only weights have several")
    return _of_one(scale, zero_point)


def _of_one(scale: Array, zero_point: Array) -> Quantization:
    return Quantization(float(scale.item()), int(zero_point.reshape(-1)[0]))


def check_bytes(dtype: Any) -> None:
    if dtype not in BYTES:
        raise Unsupported(f"integers of {dtype}")


# ---------------------------------------------------------------- constants


def _kept(call: Call, value: Array, scale: Array, zero_point: Array) -> Dequantized | None:
    """The constant integers of a node that dequantizes them, if passes may take them."""
    axis = call.axis(call["axis"], max(value.ndim, 1)) if scale.size > 1 else 0
    if call["block_size"]:
        return _of_blocks(value, *_along(call, value.shape, scale, zero_point), axis)
    return as_weight(value, scale, zero_point, axis)


def as_weight(value: Array, scale: Array, zero_point: Array, axis: int) -> Dequantized | None:
    """Constant integers with zero point 0: int8, or int16 if int8 cannot hold them; int32 stays.

    None if the zero points do not fit the axis, or are not 0 for int32.
    """
    scale = scale.reshape(()) if scale.size == 1 else scale
    if value.dtype == np.int32:
        return Dequantized(value, ops.Dequantize(Quantization(scale), axis)) if not zero_point.any() else None
    several = zero_point.size > 1
    if several and (axis >= value.ndim or zero_point.size != value.shape[axis]):
        return None
    along = zero_point.reshape(axis_shape(axis, value.ndim) if several else ())
    wide = value.astype(np.int16) - along.astype(np.int16)
    fits = wide.min(initial=0) >= -128 and wide.max(initial=0) <= 127
    return Dequantized(wide.astype(np.int8) if fits else wide, ops.Dequantize(Quantization(scale), axis))


def _of_blocks(value: Array, scale: Array, zero_point: Array, axis: int) -> Dequantized | None:
    """Constant integers with scales for blocks along one axis, as int8 with one scale for each index of another axis.

    None if int8 cannot hold them. Each scale has to be a whole multiple of the least scale of its index. Then products
    stand for the same numbers, and round to the same float32. scale, zero_point: of each element.
    """
    wide = value.astype(np.int64) - zero_point
    for channels in (k for k in range(value.ndim) if k != axis):
        least = scale.min(axis=tuple(k for k in range(value.ndim) if k != channels), keepdims=True)
        times = np.rint(scale.astype(np.float64) / least)
        whole = wide * times
        if (times * least == scale).all() and whole.min(initial=0) >= -128 and whole.max(initial=0) <= 127:
            given = ops.Dequantize(Quantization(least.reshape(-1)), channels)
            return Dequantized(whole.astype(np.int8), given)
    return None


def weight(call: Call, at: int, axis: int) -> None:
    """Replace the operand `at`, constant integers, by floats that keep these integers. The next two operands are scale
    and zero point."""
    value = call.array(at, "weight")
    check_bytes(value.dtype)
    scale, zero_point = scales(call, at + 1), zero_points(call, at + 2, value.dtype)
    axis = axis if value.ndim > 1 else 0
    if any(p.size not in (1, value.shape[axis]) for p in (scale, zero_point)):
        raise call.error("scale", scale, f"has to hold one scale, or {value.shape[axis]}: one for each output channel")
    found = as_weight(value, scale, zero_point, axis)
    assert found is not None
    call.inputs[at] = call.kept(found, "weight")


# ---------------------------------------------------------------- to integers and back


@op("QuantizeLinear", "com.microsoft.QuantizeLinear", limits=f"from float32; {ALSO_4_BITS}; blocks of one zero point")
def _quantize_linear(call: Call) -> Tensor:
    x = call.x
    wanted = call["output_dtype"]
    dtype: Any = str(dtype_of(wanted)) if wanted else "uint8"
    if call.has(2):
        dtype = str(call.array(2, "zero point").dtype)
    if x.dtype != np.float32:
        raise Unsupported(f"from {x.dtype}")
    if dtype not in INTEGERS:
        raise Unsupported(f"integers of {dtype}")
    scale, zero_point = scales(call, 1), zero_points(call, 2, dtype)
    if call["block_size"]:
        scale, zero_point = _along(call, x.shape, scale, zero_point)
        least, most = zero_point.min(), zero_point.max()
        if least != most:
            raise Unsupported(f"zero_point={least} to {most}: blocks of several zero points")
        x, scale = call.helper(ops.Binary("div"), x, call.constant(scale, "scale")), np.ones(())
    if scale.size == 1:
        return call.emit(ops.Quantize(_of_one(scale, zero_point), dtype), x)
    axis = _axis_of(call, x.shape, scale, zero_point)
    made = []
    for k in range(scale.size):
        part = call.helper(ops.Slice(axis, k, 1), x)
        given = Quantization(float(scale[k]), int(np.broadcast_to(zero_point, scale.shape)[k]))
        made.append(call.emit(ops.Quantize(given, dtype), part))
    return call.emit(ops.Concat(axis), *made)


@op("DequantizeLinear", "com.microsoft.DequantizeLinear", limits=f"float32 scales; {ALSO_4_BITS}; int32")
def _dequantize_linear(call: Call) -> Tensor:
    x, value = call.x, call.scope.constants.get(call.x.name)
    if x.dtype not in (*INTEGERS, "int32") or call.array(1, "scale").dtype != np.float32:
        raise Unsupported(f"from {x.dtype}, with scales of {call.array(1, 'scale').dtype}")
    scale, zero_point = scales(call, 1), zero_points(call, 2, x.dtype)
    found, to = None, element(dtype_of(call["output_dtype"] or 1)).name
    if value is not None and to == "float32":
        found = _kept(call, unpacked(value), scale, zero_point)
    if found is not None:
        return call.scope.quantized_constant(call.node.output[0], found)
    if value is not None and (x.type.is_packed or x.rank > MOST_DIMENSIONS):
        raise Unsupported(f"a constant of {x.type} of shape {x.shape}")
    if scale.size == 1 and not call["block_size"]:
        return call.converted(call.emit(ops.Dequantize(_of_one(scale, zero_point)), x), to)
    scale, zero_point = _along(call, x.shape, scale, zero_point)
    y = call.helper(ops.Dequantize(Quantization(1.0)), x)
    if zero_point.any():
        y = call.helper(ops.Binary("sub"), y, call.constant(zero_point.astype(np.float32), "zero_point"))
    return call.converted(call.mul(y, call.constant(scale, "scale")), to)


def _along(call: Call, shape: Shape, scale: Array, zero_point: Array) -> tuple[Array, Array]:
    """Several scales and zero points as arrays that broadcast to the shape: one for each index of an axis, or block."""
    size, rank = call["block_size"], len(shape)
    axis = call.axis(call["axis"], rank)
    if not size:
        _axis_of(call, shape, scale, zero_point)
        along = axis_shape(axis, rank)
        return scale.reshape(along), np.broadcast_to(zero_point, scale.shape).reshape(along)
    blocks = (*shape[:axis], -(-shape[axis] // size), *shape[axis + 1 :])
    if size < 0 or scale.shape != blocks or zero_point.shape not in ((), blocks):
        rule = f"has to have shape {blocks}, one for each block of {size} along axis {axis}, like zero_point"
        raise call.error("scale", scale, rule)
    each = [np.repeat(np.broadcast_to(a, blocks), size, axis) for a in (scale, zero_point)]
    return each[0].take(range(shape[axis]), axis), each[1].take(range(shape[axis]), axis)


def _axis_of(call: Call, shape: Shape, scale: Array, zero_point: Array) -> int:
    axis = call.axis(call["axis"], len(shape))
    if scale.size != shape[axis] or zero_point.size not in (1, scale.size):
        rule = f"has to hold {shape[axis]}, one for each index of axis {axis}, like zero_point"
        raise call.error("scale", scale, rule)
    return axis


def dequantized(call: Call, at: int) -> Tensor:
    """Dequantize the operand `at` by the scale and the zero point that follow it."""
    x = call.input(at)
    check_bytes(x.dtype)
    return call.helper(ops.Dequantize(quantization(call, at + 1, x.dtype)), x)


def factors(call: Call, axis: int) -> tuple[Tensor, Array]:
    """(The first operand, the scales of its products with operand 3), both dequantized. axis: see `weight`."""
    weight(call, 3, axis)
    return dequantized(call, 0), quantization(call, 1, call.x.dtype).scale * scales(call, 4)


def stored(call: Call, y: Tensor, at: int, dtype: Any = None) -> Tensor:
    """The node's output: `y` as integers, by the scale and the zero point that are operands `at` and the next.

    dtype: of the integers. Default: the zero point's, or the input's if there is none.
    """
    if dtype is None:
        dtype = call.array(at + 1, "zero point").dtype if call.has(at + 1) else call.x.dtype
        check_bytes(dtype)
    kind: Any = str(dtype)
    return call.emit(ops.Quantize(quantization(call, at, dtype), kind), y)


# ---------------------------------------------------------------- convolutions and products


@op("QLinearConv", limits=f"1-D to 3-D; constant weight and bias; {CONSTANT}")
def qlinear_conv(call: Call) -> Tensor:
    x, scale = factors(call, 0)
    more: Tensors = ()
    if call.has(8):
        bias = Dequantized(
            call.array(8, "bias"), ops.Dequantize(Quantization(scale if scale.size > 1 else scale.item()))
        )
        more = (call.kept(bias, "bias"),)
    y = convolution(call, x, 3, more)
    return stored(call, y, 6)


op("QLinearMatMul", limits=f"constant B, whose batch broadcasts with A's; {CONSTANT}")(
    lambda call: stored(call, matmul(call, factors(call, 1)[0], 3), 6)
)


# ---------------------------------------------------------------- sums of integers, and quantization found at run time

# DynamicQuantizeLinear gives integers, a scale and a zero point. An op that reads this zero point for its first input
# becomes a `DynamicConv2d` with the quantization found. Its sums are int32, as ONNX has them. A pass (`passes.dynamic`)
# makes the multiplications by scales part of it.
_FOUND = "zero points that are constant, or found by DynamicQuantizeLinear; uint8 and int8"
_WHOLE = ops.Dequantize(Quantization(1.0))  # integers as floats


@op("DynamicQuantizeLinear")
def _quantize_by_data(call: Call) -> list[Tensor]:
    x = call.x
    if x.dtype != np.float32:
        raise Unsupported(f"from {x.dtype}")
    found, y, scale, zero_point = _found(call, x)
    call.scope.found[call.node.output[2]] = found.name
    return [y, call.reshape(scale, (), helps=False), call.reshape(zero_point, (), helps=False)]


def _found(call: Call, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(The quantization found for `x`, `x` as integers, the scale and the uint8 zero point of shape (1,))."""
    found = call.helper(ops.FindQuantization(), x)
    y = call.emit(ops.DynamicQuantize(), x, found)
    scale, zero_point = (call.helper(ops.Slice(0, k, 1), found) for k in (0, 1))
    return found, y, scale, call.helper(ops.Quantize(Quantization(1.0)), zero_point)


def _found_at(call: Call, at: int) -> Tensor | None:
    """The found quantization whose zero point is the operand `at`; None if the operand is anything else."""
    name = call.scope.found.get(call.input(at).name, "") if call.flows(at) else ""
    return call.scope.values.get(name)


# ---------------------------------------------------------------- sums of products


@op("ConvInteger", limits=f"1-D to 3-D; constant weight; {_FOUND}")
@op("MatMulInteger", limits=f"constant B, whose batch broadcasts with A's; {_FOUND}")
def _of_integers(call: Call) -> Tensor:
    return _sums(call, call.x, _source(call, 2), 3)


def _source(call: Call, at: int) -> Convolved:
    """The convolution of integers whose zero point is the operand `at`."""
    found = _found_at(call, at)
    if found is not None:
        return _of_found(found)
    zero_point = zero_points(call, at, call.x.dtype)
    if zero_point.size != 1:
        raise Unsupported(f"zero_point of shape {zero_point.shape}: several zero points for the first input")
    return ops.QuantizedConv2d(src=Quantization(1.0, int(zero_point.item()))), ()


def _of_found(found: Tensor) -> Convolved:
    return ops.DynamicConv2d(), (found,)


def _sums(call: Call, x: Tensor, by: Convolved, zero_point_at: int, real: bool = False) -> Tensor:
    """The sums of products of `x` and operand 1, a constant, less their zero points; float32 will do if `real`, or if
    nothing but Cast to float32 reads them."""
    real = real or call.node.output[0] in call.scope.only_cast
    value, of_matrix = call.array(1, "weight"), call.kind != "ConvInteger"

    def summed(weight: Array, name: str) -> Tensor:
        call.inputs[1] = call.constant(weight, name)
        return matmul(call, x, 1, by) if of_matrix else convolution(call, x, 1, (), *by)

    for dtype in (x.dtype, value.dtype):
        check_bytes(dtype)
    zero_point, axis = zero_points(call, zero_point_at, value.dtype), int(of_matrix and value.ndim > 1)
    exact = as_weight(value, np.ones((), np.float32), zero_point, axis)
    if exact is None:
        said = f"zero points of shape {zero_point.shape}: neither one, nor one for each index of axis {axis}"
        raise Unsupported(f"{said} of the weight, {value.shape}")
    if real and (value.ndim == 2 or not of_matrix) and exact.integers.dtype == np.int16:
        return _corrected(call, summed, value, of_matrix, zero_point)
    return summed(exact.integers, "weight")


def _corrected(call: Call, summed: Callable[..., Tensor], value: Array, of_matrix: bool, zero_point: Array) -> Tensor:
    """The sums as floats, by weights that an int8 cannot hold less their zero points.

    They are int8 weights plus a number for each output channel. The number is multiplied by the sum of all elements of
    a window. This takes little more time than int8 weights; weights of twice as many channels would take twice as long.
    """
    groups = 1 if of_matrix else call.attribute("group", 1)
    middle = 128 if value.dtype == np.uint8 else 0
    count = value.shape[1 if of_matrix else 0]
    ones = np.ones((value.shape[0], 1) if of_matrix else (groups, *value.shape[1:]), np.int8)
    weights = (value.astype(np.int32) - middle).astype(np.int8), ones
    parts = [call.helper(_WHOLE, summed(part, name)) for part, name in zipped(weights, ("weight", "ones"))]
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


@op("com.microsoft.MatMulIntegerToFloat", limits=f"constant B, a matrix or a vector; {_FOUND}")
def _matmul_to_float(call: Call) -> Tensor:
    found = _found_at(call, 4)
    if found is None:  # operands in the order of other ops, with scale and zero point after each
        given = [*call.inputs, *[None] * 3]
        call.inputs[:] = [given[k] for k in (0, 2, 4, 1, 3, 5, 6)]
        a, _ = factors(call, 1)
        return call.plus(matmul(call, a, 3), 6)
    sums = _sums(call, call.x, _of_found(found), 5, True)
    return call.plus(_scaled(call, sums, call.input(2), 3), 6)


@op("com.microsoft.DynamicQuantizeMatMul", limits=f"constant B, a matrix or a vector; {CONSTANT}")
def _dynamic_matmul(call: Call) -> Tensor:
    found, y, scale, _ = _found(call, call.x)
    return call.plus(_scaled(call, _sums(call, y, _of_found(found), 3, True), scale, 2), 4)


def _scaled(call: Call, sums: Tensor, scale: Tensor, at: int) -> Tensor:
    """Sums times the scale of the source and those of the weight, the operand `at`."""
    factor = call.helper(ops.Binary("mul"), call.constant(scales(call, at).reshape(-1), "scale"), scale)
    real = sums if sums.dtype == np.float32 else call.helper(_WHOLE, sums)
    return call.mul(real, factor)
