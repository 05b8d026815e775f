"""The parameters of integer convolutions besides weights: biases that include zero points, scales, an epilogue's
numbers.

The sum of (x - zero_point) * w is the sum of x * w, less zero_point times the sum of w. The bias includes the latter,
so zero points cost nothing where products are added. (A window's border holds the zero point, and adds nothing.)
"""

import math
from typing import Any

import numpy as np

from blockconv.core.activation import ActivationKind
from blockconv.core.errors import ArgumentError
from blockconv.core.problem import Conv2dProblem
from blockconv.core.quantization import Quantization, Requantization
from blockconv.core.target import Isa
from blockconv.core.types import LIGHT, Array, ElementType, Types, element, ieee
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.packing import pack_bias
from blockconv.kernels import WeightForm
from blockconv.kernels.common.activation import activation_arguments
from blockconv.kernels.common.dot import dot_for
from blockconv.kernels.common.requantize import EpilogueArguments, Rounding
from blockconv.kernels.table import Epilogue
from blockconv.machine.machine import host

MOST = 2**31 - 1  # of an int32
LARGEST = 255 * 128  # of a product of a byte less its zero point with a weight
MOST_OF_PAIR = (2**15 - 1) // 255  # that two weights of one sign may add up to: 128
LARGEST_INT4 = 255 * 8  # with a weight of 4 bits


def check_sums(op: str, weight: Array | BlockedArray, bias: Array | None) -> None:
    """Raise unless every sum of products, and with its bias, is sure to be an int32, whatever the source holds."""
    products = math.prod(weight.shape[1:])
    largest = LARGEST_INT4 if isinstance(weight, BlockedArray) else LARGEST
    allowed = MOST // largest
    if products > allowed:
        rule = f"an output sums {products} products, which may overflow int32"
        remedy = f"sum at most {allowed} at a time, or convolve in float32"
        raise ArgumentError(op, "weight", weight, rule, remedy)
    most = int(np.abs(bias.astype(np.int64)).max(initial=0)) if bias is not None else 0
    if most + largest * products > MOST:
        rule = f"a bias of {most} and a sum of {products} products may overflow int32"
        raise ArgumentError(op, "bias", bias, rule, f"give biases of at most {MOST - largest * products}")


def sums_fit(weight: Array, bias: Array | None = None) -> bool:
    """Whether `check_sums` takes a weight and a bias."""
    try:
        check_sums("", weight, bias)
    except ArgumentError:
        return False
    return True


def pair_sums(weight: Array) -> Array:
    """The largest sum of two weights of one sign that may be multiplied side by side, for each output channel: (O,).

    weight: (O, I/groups, KH, KW), of any type; a weight of the other sign counts as zero, as a source may hold zero
    where it is. Side by side are two neighbouring input channels, the first of an even number, at one tap. Where a
    group has one input channel, depthwise kernels may take any two taps, so it is the two largest ones.
    """
    oc, ic = weight.shape[:2]
    wide = weight.astype(np.int16 if weight.dtype.kind == "i" else weight.dtype)
    if ic == 1:
        taps = np.sort(wide.reshape(oc, -1), axis=1)
        pairs = [taps[:, :2], taps[:, -2:]]  # of negative sign, of positive
        first, second = (np.stack([pair[:, k] for pair in pairs], 1) for k in (0, -1))
        if taps.shape[1] == 1:
            second = np.zeros_like(second)
    else:
        first, second = (wide[:, k::2].reshape(oc, -1) for k in (0, 1))
        second = np.pad(second, ((0, 0), (0, first.shape[1] - second.shape[1])))
    sums = [np.maximum(sign * first, 0) + np.maximum(sign * second, 0) for sign in (1, -1)]
    return np.maximum(*sums).max(axis=1, initial=0)


def is_narrow(weight: Array) -> bool:
    """Whether the products of two int8 weights side by side with any uint8 are sure to add up to an int16.

    The instruction that adds them in 16 bits (vpmaddubsw) then never saturates, so its sums are exact.
    """
    some = 16  # channels; where weights are not narrow, the first ones tell
    return all((pair_sums(weight[k : k + some]) <= MOST_OF_PAIR).all() for k in range(0, len(weight), some))


def is_light(weight: Array | BlockedArray) -> bool:
    """Whether the int8 weights of one sign of each output channel add up to less than `LIGHT`.

    Sums of products with bytes are then below 256 times that, which Winograd convolution is exact for.
    """
    products = math.prod(weight.shape[1:])
    if products * (8 if isinstance(weight, BlockedArray) else 128) < LIGHT:
        return True
    if isinstance(weight, BlockedArray):
        return False
    flat = weight.reshape(len(weight), -1)
    return all((np.abs(bound(flat, 0).sum(axis=1, dtype=np.int64)) < LIGHT).all() for bound in (np.maximum, np.minimum))


def is_finite(weight: Any, type: ElementType) -> bool:
    """Whether weights, as elements of this type, are neither NaN nor infinite."""
    given = np.asarray(weight).astype(type.dtype, copy=False)
    if type.is_half:
        exponent = np.array(np.inf, type.dtype).view(np.uint16)
        return bool(((given.view(np.uint16) & exponent) != exponent).all())
    with np.errstate(over="ignore", invalid="ignore"):
        return bool(np.isfinite(given.sum()) or np.isfinite(given).all())  # a sum of others is not finite


def with_weights(types: Types, weight: Array | BlockedArray, padded: bool = True) -> Types:
    """The types of a call's convolution by these weights. Narrow weights have a type of their own if this machine
    multiplies them faster. If images are padded, so have float weights that are known to be finite."""
    if types.wei.is_float:
        return types.knowing(finite=padded and is_finite(weight, types.wei))
    isa = host().isa
    narrow = of_narrow(types, isa) != types and (isinstance(weight, BlockedArray) or is_narrow(weight))
    return known_weights(types, narrow, is_light(weight), isa)


def known_weights(types: Types, narrow: bool, light: bool, isa: Isa) -> Types:
    """The types, where weights are known to be narrow or light (see `ElementType`)."""
    return (of_narrow(types, isa) if narrow else types).knowing(light=light)


def of_narrow(types: Types, isa: Isa) -> Types:
    """The types with narrow weights, if these have a faster multiply-accumulate; else as they are."""
    narrow = types.knowing(narrow=types.wei.name == "int8")
    return types if dot_for(narrow, isa) == dot_for(types, isa) else narrow


def check_zero_point(op: str, argument: str, found: int, given: Quantization | None, name: str | None = None) -> None:
    """Raise if a BlockedArray says another zero point than its Quantization; 0 says nothing.

    name: what the Quantization is given as.
    """
    wanted, name = 0 if given is None else given.zero_point, name or f"{argument}_quantization"
    if found not in (0, wanted):
        rule = f"is the array's zero point, and {name} has {wanted}"
        raise ArgumentError(op, argument, found, rule, f"give {name}=Quantization(scale, {found})")


@ieee
def quantized_bias(
    problem: Conv2dProblem, weight: Array, bias: Array | None, form: WeightForm, after: Requantization
) -> Array:
    """Biases, int32, with the source's zero point folded in; where the destination needs them, scales after them, and
    the factors of an affine.

    weight: (O, I/G, KH, KW); its sums by output channel, (O,), will do where all taps are read. after: what becomes of
    the sums.
    """
    if form.pieces:
        (piece,) = form.pieces
        return quantized_bias(piece.problem, piece.of(weight), bias, piece.form, after)
    types, given = after.types, after.given
    zero_point = given.src.zero_point + form.dot.shift(types.src)
    folded = np.zeros(problem.oc, np.int64)
    if zero_point:  # a sum of as many weights as `check_sums` takes is an int32
        folded = folded - zero_point * _sums(weight, form).astype(np.int64)
    if bias is not None:
        folded = folded + bias
    return _packed(problem, form, folded, *((after.scales.sums, *after.factors) if types.is_requantized else ()))


def _packed(problem: Conv2dProblem, form: WeightForm, *parts: Array) -> Array:
    """Integers of the output channels as int32, floats as the bits of float32, one part after the other."""
    every = (np.broadcast_to(part, np.shape(part) or (problem.oc,)) for part in parts)
    packed = [pack_bias(problem, part, form, np.int32 if part.dtype.kind == "i" else np.float32) for part in every]
    return np.concatenate([part.reshape(-1).view(np.int32) for part in packed])


def _sums(weight: Array, form: WeightForm) -> Array:
    """The sum of each output channel's weights, (O,), or one such for each of the form's ranges of taps."""
    parts = [weight[:, :, slice(*rows), slice(*cols)] for rows, cols in form.kept] or [weight]
    sums = np.stack([part.reshape(len(weight), -1).sum(axis=1, dtype=np.int32) for part in parts])
    return sums if form.kept else sums[0]


@ieee
def weight_sums(
    problem: Conv2dProblem, weight: Array, bias: Array | None, form: WeightForm, types: Types, given: Quantization
) -> Array:
    """The table from which an op makes biases and scales once it finds the source's quantization.

    See `dynamic_epilogue_op`.

    weight: (O, I/G, KH, KW). bias: float32, which is added to what scales make of sums. given: of the weights.
    """
    if form.pieces:
        (piece,) = form.pieces
        return weight_sums(piece.problem, piece.of(weight), bias, piece.form, types, given)
    scales, biases = [given.scale] * types.is_requantized, [] if bias is None else [bias]
    return _packed(problem, form, _sums(weight, form), *scales, *biases)


def epilogue_of(after: Requantization) -> Epilogue:
    """The epilogue that kernels are compiled for. If scales are left to multiply by, it takes the longer way of an
    activation."""
    kind = after.activation.kind if after.scales.folded or after.types.dst.itemsize > 1 else ActivationKind.OTHER
    rounding = Rounding.AWAY * after.away | Rounding.SUMS * (after.given.sum is not None and after.affine is None)
    return Epilogue(kind, after.residual is not None, rounding, len(after.factors))


@ieee
def epilogue_block(after: Requantization) -> Array:
    """The `EpilogueArguments`."""
    given, types, scales = after.given, after.types, after.scales
    zero_point = given.dst.zero_point if types.dst.itemsize == 1 else 0
    low, high = after.bounds
    sum_low, sum_high = after.sum_bounds
    flip = 0 if after.residual is None else after.residual.flip
    arguments = EpilogueArguments(
        **activation_arguments(after.activation)._asdict(),
        src_fill=_four_bytes(given.src.zero_point, types.src),
        dst_fill=_four_bytes(zero_point, types.dst),
        inverse=_bits(scales.inverse),
        low=_bits(low),
        high=_bits(high),
        zero_point=zero_point,
        sum_low=_bits(sum_low),
        sum_high=_bits(sum_high),
        sum_scale=_bits(scales.rounded),
        residual_scale=_bits(scales.residual),
        residual_flip=flip,
        residual_zero=given.residual.zero_point + flip,
    )
    return np.array(arguments, np.int64)


def _four_bytes(value: int, type: ElementType) -> int:
    """Four bytes of nothing but this integer."""
    return (value & 15) * 0x11111111 if type.is_packed else (value & 255) * 0x01010101


_bits = element("float64").bits
