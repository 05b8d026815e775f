"""What integer convolutions need beside weights: biases with zero points in them, scales, an epilogue's numbers.

The sum of (x - zero_point) * w is that of x * w, less zero_point times the sum of w, which is part of the bias; so zero
points cost nothing where products are added. (A window's border holds the zero point, and adds nothing.)
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core import target
from blockconv.core.errors import ArgumentError
from blockconv.core.problem import Conv2dProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import LIGHT, ElementType, Types, element
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.packing import pack_bias
from blockconv.kernels import WeightForm
from blockconv.kernels.common.activation import Activation, ActivationKind
from blockconv.kernels.common.dot import dot_for
from blockconv.kernels.common.requantize import EpilogueArguments, Rounding
from blockconv.kernels.table import Epilogue

__all__ = [
    "MOST_PRODUCTS",
    "PLAIN",
    "Quantizations",
    "Requantization",
    "are_small",
    "check_sums",
    "check_zero_point",
    "is_light",
    "is_narrow",
    "known_weights",
    "pair_sums",
    "quantized_bias",
    "weight_sums",
    "with_weights",
]

Array = npt.NDArray[Any]

LARGEST = 255 * 128  # of a product of a byte less its zero point with a weight
MOST_PRODUCTS = (2**31 - 1) // LARGEST  # whose sum is sure to be an int32: 65,793
MOST_OF_PAIR = (2**15 - 1) // 255  # that two weights of one sign may add up to: 128
LARGEST_INT4 = 255 * 8  # with a weight of 4 bits
MOST_PRODUCTS_INT4 = (2**31 - 1) // LARGEST_INT4
PLAIN = Quantization(1.0)


class Quantizations(NamedTuple):
    """What the integers of a convolution's arrays stand for.

    sum: what sums are rounded to by themselves, in the destination's type, before a residual is added; None: nothing.
    """

    src: Quantization = PLAIN
    wei: Quantization = PLAIN
    dst: Quantization = PLAIN
    residual: Quantization = PLAIN
    sum: Quantization | None = None


def check_sums(op: str, weight: Array | BlockedArray, bias: Array | None) -> None:
    """Raise unless every sum of products, and with its bias, is sure to be an int32, whatever the source holds."""
    products = int(np.prod(weight.shape[1:], dtype=object))
    is_int4 = isinstance(weight, BlockedArray)
    largest, allowed = (LARGEST_INT4, MOST_PRODUCTS_INT4) if is_int4 else (LARGEST, MOST_PRODUCTS)
    if products > allowed:
        rule = f"an output sums {products} products, which may overflow int32"
        remedy = f"sum at most {allowed} at a time, or convolve in float32"
        raise ArgumentError(op, "weight", weight, rule, remedy)
    most = int(np.abs(bias.astype(np.int64)).max(initial=0)) if bias is not None else 0
    if most + largest * products > 2**31 - 1:
        rule = f"a bias of {most} and a sum of {products} products may overflow int32"
        raise ArgumentError(op, "bias", bias, rule, f"give biases of at most {2**31 - 1 - largest * products}")


def pair_sums(weight: Array) -> Array:
    """Of each output channel the largest sum of two weights that may be multiplied side by side, of one sign: (O,).

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
    found: Array = np.maximum(*sums).max(axis=1, initial=0)
    return found


def is_narrow(weight: Array) -> bool:
    """Whether the products of two int8 weights side by side with any uint8 are sure to add up to an int16.

    What adds them as such (vpmaddubsw) then never saturates, so that its sums are exact.
    """
    some = 16  # channels; where weights are not narrow, the first ones tell
    return all((pair_sums(weight[k : k + some]) <= MOST_OF_PAIR).all() for k in range(0, len(weight), some))


def is_light(weight: Array | BlockedArray) -> bool:
    """Whether the int8 weights of one sign of each output channel add up to less than `LIGHT`.

    Sums of products with bytes are then below 256 times that, which Winograd convolution is exact for.
    """
    products = int(np.prod(weight.shape[1:], dtype=object))
    if products * (8 if isinstance(weight, BlockedArray) else 128) < LIGHT:
        return True
    if isinstance(weight, BlockedArray):
        return False
    flat = weight.reshape(len(weight), -1)
    return all((np.abs(bound(flat, 0).sum(axis=1, dtype=np.int64)) < LIGHT).all() for bound in (np.maximum, np.minimum))


def with_weights(types: Types, weight: Array | BlockedArray) -> Types:
    """The types of a convolution by these weights: of narrow ones, if that lets this machine multiply them faster."""
    if types.wei.name != "int8":
        return types
    narrow = of_narrow(types) != types and (isinstance(weight, BlockedArray) or is_narrow(weight))
    return known_weights(types, narrow, is_light(weight))


def known_weights(types: Types, narrow: bool, light: bool) -> Types:
    """The types with weights of which this is known (see `ElementType`)."""
    known = of_narrow(types) if narrow else types
    return known._replace(wei=replace(known.wei, light=light))


def of_narrow(types: Types) -> Types:
    """The types with narrow weights, if these have a faster multiply-accumulate here; else as they are."""
    narrow = types._replace(wei=replace(types.wei, narrow=types.wei.name == "int8"))
    return types if dot_for(narrow, target.isa()) == dot_for(types, target.isa()) else narrow


def check_zero_point(op: str, argument: str, found: int, given: Quantization | None, name: str | None = None) -> None:
    """Raise if a BlockedArray says another zero point than its Quantization; 0 says nothing.

    name: what the Quantization is given as.
    """
    wanted, name = 0 if given is None else given.zero_point, name or f"{argument}_quantization"
    if found not in (0, wanted):
        rule = f"is the array's zero point, and {name} has {wanted}"
        raise ArgumentError(op, argument, found, rule, f"give {name}=Quantization(scale, {found})")


def quantized_bias(
    problem: Conv2dProblem, weight: Array, bias: Array | None, form: WeightForm, after: Requantization
) -> Array:
    """Biases, int32, with the source's zero point folded in; where the destination needs them, scales after them.

    weight: (O, I/G, KH, KW); its sums by output channel, (O,), will do. after: what becomes of the sums.
    """
    types, given = after.types, after.given
    zero_point = given.src.zero_point + (types.src.flip if form.dot.is_unsigned else 0)
    folded = np.zeros(problem.oc, np.int64)
    if zero_point:  # a sum of as many weights as `check_sums` takes is an int32
        folded -= zero_point * weight.reshape(problem.oc, -1).sum(axis=1, dtype=np.int32).astype(np.int64)
    if bias is not None:
        folded = folded + bias
    packed = pack_bias(problem, folded, form, np.int32)
    if not types.is_requantized:
        return packed
    scale = np.broadcast_to(after.scales.sums, (problem.oc,))
    return np.concatenate([packed.reshape(-1), pack_bias(problem, scale, form, np.float32).reshape(-1).view(np.int32)])


def weight_sums(
    problem: Conv2dProblem, weight: Array, bias: Array | None, form: WeightForm, types: Types, given: Quantization
) -> Array:
    """What an op makes biases and scales of, once the source's quantization is found: see `dynamic_epilogue_op`.

    weight: (O, I/G, KH, KW). bias: float32, which is added to what scales make of sums. given: of the weights.
    """
    sums = weight.reshape(problem.oc, -1).sum(axis=1, dtype=np.int32)
    parts = [pack_bias(problem, sums, form, np.int32)]
    if types.is_requantized:
        parts.append(pack_bias(problem, np.broadcast_to(given.scale, (problem.oc,)), form, np.float32))
    if bias is not None:
        parts.append(pack_bias(problem, bias, form, np.float32))
    return np.concatenate([part.reshape(-1).view(np.int32) for part in parts])


class Scales(NamedTuple):
    """What the steps after sums multiply by.

    sums: integers, one or one an output channel. rounded: these, once they are rounded by themselves. residual: its
    integers. inverse: what an activation gives. folded: whether all make multiples of the destination's scale, so that
    the last is 1.
    """

    sums: Array
    rounded: Any
    residual: Any
    inverse: Any
    folded: bool


@dataclass(frozen=True)
class Requantization:
    """What becomes of the sums of integers of a convolution, in the steps that `kernels.common.requantize` states.

    residual: its type, where there is one. away: whether a half is rounded away from zero, and not to even.
    """

    activation: Activation
    types: Types
    given: Quantizations
    residual: ElementType | None = None
    away: bool = False

    @property
    def epilogue(self) -> Epilogue:
        """What kernels are compiled for. What has scales left to multiply by takes the longer way of an activation."""
        kind = self.activation.kind if self.scales.folded or self.types.dst.itemsize > 1 else ActivationKind.OTHER
        rounding = Rounding.AWAY * self.away | Rounding.SUMS * (self.given.sum is not None)
        return Epilogue(kind, self.residual is not None, rounding)

    @functools.cached_property
    def scales(self) -> Scales:
        given, one = self.given, np.float32(1)
        sums, rounded, residual = given.src.scale * given.wei.scale, one, given.residual.scale
        if self.types.dst.itemsize > 1:
            return Scales(sums, rounded, residual, one, False)
        inverse = one / given.dst.scale
        if given.sum is not None:
            sums, rounded = sums * (one / given.sum.scale), given.sum.scale
        if self.activation.kind == ActivationKind.OTHER or not are_small(given):
            return Scales(sums, rounded, residual, inverse, False)
        if given.sum is None:
            return Scales(sums * inverse, rounded, residual * inverse, one, True)
        return Scales(sums, rounded * inverse, residual * inverse, one, True)

    @property
    def bounds(self) -> tuple[float, float]:
        """Of multiples of the destination's scale, of 8 or 4 bits: the type's, or an activation's that bounds more."""
        act, dst, is_byte = self.activation, self.given.dst, self.types.dst.itemsize == 1
        low, high = (bound - dst.zero_point for bound in (self.types.dst if is_byte else element("int8")).bounds)
        if is_byte and act.kind == ActivationKind.CLIP:  # see `Epilogue.kind`
            with np.errstate(over="ignore"):
                first, second = np.array([act.first, act.second], np.float32) * (np.float32(1) / dst.scale)
            low, high = max(low, min(first, high)), min(high, max(second, low))
        return low, high

    @property
    def sum_bounds(self) -> tuple[float, float]:
        """Of sums that are rounded by themselves, the destination type's bounds less their zero point."""
        bounds, given = self.types.dst.bounds, self.given.sum
        return (0, 0) if given is None else (bounds[0] - given.zero_point, bounds[1] - given.zero_point)

    @property
    def block(self) -> Array:
        """The `EpilogueArguments`."""
        given, types, scales = self.given, self.types, self.scales
        zero_point = given.dst.zero_point if types.dst.itemsize == 1 else 0
        low, high = self.bounds
        sum_low, sum_high = self.sum_bounds
        flip = 0 if self.residual is None else self.residual.flip
        arguments = EpilogueArguments(
            **self.activation.arguments._asdict(),
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


# Sums times scales of at most these, plus a residual of bytes times one of at most that, are below 2^31, whatever the
# sums: they become integers of 32 bits without being bounded first.
_MOST_OF_SUMS, _MOST_OF_BYTES = 0.5, 2.0**20


def are_small(given: Quantizations) -> bool:
    """Whether scales over that of the destination are so small that what they multiply fits 32 bits: nearly always."""
    src, wei, dst, residual = (float(each.scale.max()) for each in given[:4])
    if given.sum is not None:
        return max(float(given.sum.scale), residual) <= _MOST_OF_BYTES * dst
    return src * wei <= _MOST_OF_SUMS * dst and residual <= _MOST_OF_BYTES * dst


def _four_bytes(value: int, type: ElementType) -> int:
    """Four bytes of nothing but this integer."""
    return (value & 15) * 0x11111111 if type.is_packed else (value & 255) * 0x01010101


def _bits(value: Any) -> int:
    return int(struct.unpack("q", struct.pack("d", float(value)))[0])
