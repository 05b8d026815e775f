"""Conversions between integer accumulators, real numbers and 8-bit integers.

The steps are float32. Each rounds on its own, in the same order on every machine:
- The accumulator is multiplied by its output channel's scale, and a float32 bias, if any, is added (`dequantized`).
- With `Rounding.SUMS`, the sum is clamped, rounded and multiplied by its own scale, as if it was stored
  (`rounded_sum`). With `AFFINE` it is clamped and rounded before the float32 bias, and multiplied by another scale of
  its output channel.
- The residual times its scale is added (`dequantized_residual`), and the activation follows.
- The result is multiplied by the inverse of the destination's scale, clamped and rounded, and the zero point is added
  (`quantized`).

No step is contracted to a multiply-add, so all machines compute the same bits. If the activation is none or a clip,
`core.quantization.Requantization` multiplies all scales and bounds by that inverse beforehand. The bounds are then the
destination's.

Ops between convolutions compute with dequantized values, as ONNX does. They subtract the zero point and multiply by the
scale, do the op in float32, divide by the destination's scale and round to even (`Elements`).
"""

import enum
from collections.abc import Callable
from typing import Any

from llvmlite import ir

from blockconv.core import target
from blockconv.core.quantization import Quantization
from blockconv.core.types import SIGNED, ElementType, element
from blockconv.jit.arguments import Arguments, float64_bits, word
from blockconv.jit.ir import I8, I32, I64, call_llvm, const, shuffle, splat, vector
from blockconv.jit.values import build, truth
from blockconv.kernels.common.activation import ActivationArguments
from blockconv.kernels.common.halves import rounded, widened
from blockconv.kernels.common.unpacked import PARTS, UNPACKED_LANES, in_order, nearest, packed, unpacked_order
from blockconv.kernels.common.vectors import Vectors

FLOAT32 = element("float32")
AFFINE = 2  # `Epilogue.shifted`


class EpilogueArguments(ActivationArguments):
    """The epilogue of integer accumulators, as kernels read it; only an activation if these are not requantized."""

    src_fill = word("the source's zero point, in each of four bytes: what stands for zeros")
    dst_fill = word("the destination's zero point likewise; 0 where it has none")
    inverse = float64_bits("1 / the destination's scale, for what no scale had been multiplied by")
    low = word(
        "the least integer of the destination's type, less the zero point; or what bounds more", "bits of a float64"
    )
    high = float64_bits("the greatest one likewise")
    zero_point = word("the destination's zero point")
    sum_low = float64_bits("of sums that are rounded by themselves, what `low` is of the destination")
    sum_high = float64_bits("the greatest one likewise")
    sum_scale = float64_bits("the scale of these")
    residual_scale = float64_bits("the residual's scale")
    residual_flip = word("128 where the residual is signed: with that bit flipped its bytes are 128 more, unsigned")
    residual_zero = word("the residual's zero point as those bytes have it")


class Rounding(enum.IntFlag):
    """How kernels round to integers.

    AWAY: round a half away from zero, and not to the even neighbour.
    SUMS: round a scaled sum by itself, half to even, before adding a residual, as if it had been stored.
    """

    AWAY = 1
    SUMS = 2


class QuantizationArguments(Arguments):
    """The quantization of an array, as kernels read it."""

    scale = float64_bits("the real number that an integer more stands for")
    zero_point = word("the integer that stands for 0")
    low = float64_bits("the least integer of the type, less the zero point")
    high = float64_bits("the greatest one likewise")


def quantization_words(given: Quantization | None, type: ElementType) -> QuantizationArguments:
    """The arguments for an array of this type. given: None for floats, which stand for themselves."""
    float64 = element("float64")
    if given is None:
        return QuantizationArguments(scale=float64.bits(1.0), zero_point=0, low=0, high=0)
    low, high = type.bounds
    return QuantizationArguments(
        scale=float64.bits(float(given.scale)),
        zero_point=given.zero_point,
        low=float64.bits(low - given.zero_point),
        high=float64.bits(high - given.zero_point),
    )


def float_of(lanes: int) -> Vectors:
    """Vectors of float32, whose multiplications and additions round one by one."""
    return Vectors(FLOAT32, lanes)


def dequantized(
    v: Vectors, accs: list[Any], at: tuple[Any, Any], each: Callable[[Vectors, Any], list[Any]], shifted: int, args
) -> list[Any]:
    """Accumulators as float32, times the scales of their output channels.

    v: code over the accumulators, which are stack slots in the order [row][pixel][vector], as are the results. at: the
        addresses of biases and scales. each(f, address): the numbers of a pixel's output channels, as
        vectors. shifted: as in `Epilogue`. args: the address of the `EpilogueArguments`.
    """
    f, (bia, scale), made = float_of(v.lanes), at, []
    # Biases, scales and the arrays after these are evenly spaced.
    arrays = [each(f, scale + (scale - bia) * k) for k in range(1 + shifted)]
    loaded = EpilogueArguments.load(args, held=True) if shifted == AFFINE else None
    for i, slot in enumerate(accs):
        scales, *shifts = (array[i % len(array)] for array in arrays)
        x = build.sitofp(slot.held, f.kind) * scales
        if loaded:
            x = _rounded_sum(f, loaded, x) * shifts[1]
        made.append(x + shifts[0] if shifts else x)
    return f.in_slots(made)


def dequantized_residual(v: Vectors, args: EpilogueArguments, value):
    """A residual's vector of bytes as float32, times its scale."""
    wide = vector(4, v.lanes)
    # The float32 2^23 + byte has the byte in its lowest mantissa bits. Differences of these floats are exact.
    bits = build.trunc(args.residual_flip, I32) | _TWO_TO_23
    lifted = build.bitcast(build.zext(value, wide) ^ splat(bits, v.lanes), v.kind)
    zero = build.trunc(args.residual_zero, I32) + _TWO_TO_23
    difference = lifted - v.splat(build.bitcast(zero, v.element))
    return difference * v.splat_float64(args.residual_scale)


def rounded_sum(v: Vectors, args: EpilogueArguments, x):
    """Clamp float32 multiples of the sums' own scale, round them half to even, and multiply by that scale."""
    return _rounded_sum(v, args, x) * v.splat_float64(args.sum_scale)


def _rounded_sum(v: Vectors, args: EpilogueArguments, x):
    return _whole(v, _between(v, x, args.sum_low, args.sum_high))


def _whole(v: Vectors, x):
    """Round floats of up to 2^22 to integers, half to even, as floats."""
    if target.isa().vector_bytes > 16:  # instruction sets with wider vectors round in one instruction
        return call_llvm(f"llvm.nearbyint.{v.suffix()}", v.kind, [x])
    return x + _TO_WHOLE - _TO_WHOLE


_TWO_TO_23 = 0x4B000000  # the bits of this float32
# From 2^23 to 2^24 floats are integers. So adding this rounds to an integer, half to even. The low bits of the sum's
# mantissa are the low bits of the rounded addend.
_TO_WHOLE = 1.5 * 2**23
_BELOW_HALF = 0.5 - 2**-25  # the largest float32 below 0.5: adding it and truncating rounds a half away from zero


def times_inverse(v: Vectors, args: EpilogueArguments, x):
    """float32 as multiples of the destination's scale."""
    return x * v.splat_float64(args.inverse)


def quantized(v: Vectors, args: EpilogueArguments | QuantizationArguments, x, away: bool, kind: ir.IntType = I8):
    """Multiples of the destination's scale, from float32 to 8-bit integers. Values out of range are clamped, and a NaN
    becomes the least integer.

    away: round a half away from zero, and not to the even neighbour. kind: LLVM's type of the results, whose lowest 8
        bits count.
    """
    scaled = _bounded(v, args, x)
    if away:
        whole = _whole_away(v, scaled)
    else:
        whole = build.bitcast(scaled + _TO_WHOLE, vector(4, v.lanes))
    return build.trunc(whole, ir.VectorType(kind, v.lanes)) + splat(build.trunc(args.zero_point, kind), v.lanes)


def quantized_parts(v: Vectors, args: EpilogueArguments, parts: list[Any], away: bool, fits: bool):
    """`quantized` of four parts (`unpacked.py`), as one vector of bytes in order.

    fits: whether each is sure to fit a 32-bit integer. Packing saturates, so the bytes are bounded, not the floats. A
        NaN, or a value too low for a 32-bit integer, becomes the least 32-bit integer.
    """
    if not target.is_x86():
        return in_order([quantized(v, args, x, away) for x in parts])
    # Packing makes unsigned bytes, so the code adds 128 to values that may be negative.
    bound = build.fptosi(build.bitcast(args.low, ir.DoubleType()), I64) + args.zero_point
    flip = build.select(bound < 0, const(128), const(0))
    offset = build.trunc(args.zero_point + flip, ir.IntType(16))

    def whole(x):
        return _whole_away(v, x) if away else nearest(x)

    low, high = v.splat_float64(args.low), v.splat_float64(args.high)
    if away:  # the conversion is undefined beyond 32 bits
        parts = [_bounded(v, args, x) for x in parts]
    elif not fits:
        parts = [build.select(high < x, high, x) for x in parts]
    made, least, most = (packed([whole(x) for x in of], offset) for of in (parts, [low] * PARTS, [high] * PARTS))
    made = build.select(build.icmp_unsigned(">", made, least), made, least)
    made = build.select(build.icmp_unsigned("<", made, most), made, most)
    return made ^ splat(build.trunc(flip, I8), made.type.count)


def quantized_together(
    v: Vectors, args: EpilogueArguments, values: list[Any], away: bool, fits: bool, kind: ir.IntType
) -> list[Any]:
    """`quantized` of vectors, four at a time where that takes fewer instructions. fits: as in `quantized_parts`."""
    in_parts = target.is_x86() and kind == I8 and v.lanes in UNPACKED_LANES and v.bytes <= target.isa().vector_bytes
    whole = len(values) // PARTS * PARTS if in_parts else 0
    made = []
    for first in range(0, whole, PARTS):
        four = quantized_parts(v, args, values[first : first + PARTS], away, fits)
        order = unpacked_order(four.type.count)
        made += [shuffle(four, four, list(order[k : k + v.lanes])) for k in range(0, len(order), v.lanes)]
    return made + [quantized(v, args, x, away, kind) for x in values[whole:]]


def _bounded(v: Vectors, args: EpilogueArguments | QuantizationArguments, scaled):
    """Multiples of the destination's scale, between its bounds; a NaN becomes the least.

    Rounding keeps the order, so clamping before it and after it give the same.
    """
    return _between(v, scaled, args.low, args.high)


def _between(v: Vectors, x, low, high):
    """Clamp float32 between two bounds, each the bits of a float64; a NaN becomes the lower one."""
    x, high = v.larger(x, v.splat_float64(low)), v.splat_float64(high)
    return build.select(x < high, x, high)


def _whole_away(v: Vectors, x):
    """Round floats to 32-bit integers, a half away from zero."""
    half = call_llvm(f"llvm.copysign.{v.suffix()}", v.kind, [v.c(_BELOW_HALF), x])
    return build.fptosi(x + half, vector(4, v.lanes))


_SAFE = 2.0**96  # for scales between this and its inverse, no product that matters overflows or underflows


def _inverse(v: Vectors, bits):
    """1 / scale as float32, in every lane; NaN if the scale is not safe (`_SAFE`). bits: of the scale, as float64."""
    scale = build.fptrunc(build.bitcast(bits, ir.DoubleType()), v.element)
    bounds = scale > v.element(1 / _SAFE), scale < v.element(_SAFE)
    inverse = v.element(1.0) / scale
    return v.splat(build.select(build.and_(*bounds), inverse, v.element(float("nan"))))


class Elements:
    """Code that computes with an array's elements in float32. It dequantizes integers.

    type: float32, 16-bit floats, 8-bit integers, or int32, which is only read. address: of an array's
        `QuantizationArguments`, for integers. real: the vectors that compute.
    """

    def __init__(self, type: ElementType, lanes: int, address=None) -> None:
        self.type = type
        self.real = float_of(lanes)
        if not type.is_float:
            self.words = QuantizationArguments.load(address)
            self.scale = self.real.splat_float64(self.words.scale)
            self.inverse = _inverse(self.real, self.words.scale)
            self.zero_point = splat(build.trunc(self.words.zero_point, I32), lanes)

    def dequantized(self, x):
        """A vector of elements as float32."""
        if self.type.is_half:
            return widened(self.real, self.type, x)
        return x if self.type.is_float else self.scaled(self.difference(x))

    def difference(self, x):
        """A vector of integers less their zero point, as int32."""
        wide = vector(4, self.real.lanes)
        if self.type.itemsize < 4:
            x = (build.sext if self.type.kind == SIGNED else build.zext)(x, wide)
        return x - self.zero_point

    def scaled(self, difference):
        """The real numbers of integers less their zero point, or of sums of these."""
        return build.sitofp(difference, self.real.kind) * self.scale

    def quantized(self, x):
        """float32 as a vector of elements: divide by the scale, and round half to even; see `quantized`."""
        if self.type.is_half:
            return rounded(self.real, self.type, x)
        return x if self.type.is_float else self.rounded(self.divided(x))

    def divided(self, x):
        """float32 divided by the scale, rounded once.

        A division takes as long as ten multiplications. So the code multiplies by the inverse, and corrects the
        product by its exact remainder: Markstein, "Computation of elementary functions on the IBM RISC System/6000"
        (1990), theorem 8. If the result is NaN (infinities, scales without such an inverse), the code
        divides.
        """
        if not target.isa().fma:
            return x / self.scale
        v = Vectors(FLOAT32, self.real.lanes, fma=True)
        guess = x * self.inverse
        rest = v.multiply_add(-guess, self.scale, x)
        (found,) = v.slots(1, v.multiply_add(rest, self.inverse, guess))
        failed = build.fcmp_unordered("uno", found.held, found.held)
        some = truth(build.bitcast(failed, ir.IntType(v.lanes)))
        with build.if_then(some, likely=False):
            found.held = x / self.scale
        return found.held

    def rounded(self, x):
        """Round float32 multiples of the scale to a vector of elements, half to even, plus the zero point."""
        return quantized(self.real, self.words, x, away=False)
