"""Between integer accumulators and real numbers, and between these and integers of 8 bits.

The steps are float32, each rounded by itself, in one order on every machine: the accumulator times the scale of its
output channel (`dequantized`); plus the residual times its scale (`dequantized_residual`); the activation; times the
inverse of the destination's scale, bounded so that it fits, rounded to a whole number, plus the zero point
(`quantized`). Nothing is contracted to a multiply-add, so that bits agree wherever they are computed.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir

from blockconv.core.types import element
from blockconv.jit.arguments import word
from blockconv.jit.ir import I8, I32, call_llvm, const
from blockconv.kernels.common.activation import ActivationArguments
from blockconv.kernels.common.vectors import Vectors

__all__ = ["FLOAT32", "EpilogueArguments", "dequantized", "dequantized_residual", "float_of", "quantized"]

FLOAT32 = element("float32")


class EpilogueArguments(ActivationArguments):
    """What becomes of integer accumulators, as kernels read it; an activation where they stay what they are."""

    src_fill = word("the source's zero point, in each of four bytes: what stands for zeros")
    dst_fill = word("the destination's zero point likewise; 0 where it has none")
    inverse = word("1 / the destination's scale", "bits of a float64")
    low = word("the least integer of the destination's type, less the zero point", "bits of a float64")
    high = word("the greatest one likewise", "bits of a float64")
    zero_point = word("the destination's zero point")
    residual_scale = word("the residual's scale", "bits of a float64")
    residual_flip = word("128 where the residual is signed: with that bit flipped its bytes are 128 more, unsigned")
    residual_zero = word("the residual's zero point as those bytes have it")


def float_of(builder: Any, lanes: int) -> Vectors:
    """Vectors of float32, whose multiplications and additions round one by one."""
    return Vectors(builder, FLOAT32, lanes)


def dequantized(v: Vectors, accs: list[Any], scales: Any, vectors: int) -> list[Any]:
    """Accumulators as float32, times the scales of their output channels, which are at the address `scales`.

    v: of the accumulators, stack slots in the order [row][pixel][vector]; so is what is returned.
    """
    f, b = float_of(v.b, v.lanes), v.b
    factors = [f.load(b.add(scales, const(k * f.bytes))) for k in range(vectors)]
    made = []
    for i, slot in enumerate(accs):
        made += f.slots(1, f.mul(b.sitofp(b.load(slot), f.kind), factors[i % vectors]))
    return made


def dequantized_residual(v: Vectors, args: EpilogueArguments, value: Any) -> Any:
    """A residual's vector of bytes as float32, times its scale."""
    b, wide = v.b, ir.VectorType(I32, v.lanes)
    flip = b.trunc(args.residual_flip, I8)
    unsigned = b.zext(b.xor(value, _splat(v, flip)), wide)
    difference = b.sub(unsigned, _splat(v, b.trunc(args.residual_zero, I32)))
    return v.mul(b.sitofp(difference, v.kind), _splat_float(v, args.residual_scale))


# From 2^23 to 2^24 floats are the whole numbers: a sum with this is rounded to one, half to even, and the low bits of
# its mantissa are those of what was added.
_TO_WHOLE = 1.5 * 2**23
_BELOW_HALF = 0.5 - 2**-25  # the float32 below a half, which added to one rounds half away from zero


def quantized(v: Vectors, args: EpilogueArguments, x: Any, away: bool) -> Any:
    """float32 as integers of 8 bits; what does not fit is the nearest that does, and a NaN the least.

    away: a half is rounded away from zero, and not to the even neighbour.
    """
    b, bytes_ = v.b, ir.VectorType(I8, v.lanes)
    scaled = v.mul(x, _splat_float(v, args.inverse))
    # The bounds are whole numbers, so that it is the same to bound before and after rounding.
    scaled = v.larger(scaled, _splat_float(v, args.low))
    high = _splat_float(v, args.high)
    scaled = b.select(b.fcmp_ordered("<", scaled, high), scaled, high)
    if away:
        half = call_llvm(b, f"llvm.copysign.{v.suffix()}", v.kind, [v.c(_BELOW_HALF), scaled])
        whole = b.trunc(b.fptosi(v.add(scaled, half), ir.VectorType(I32, v.lanes)), bytes_)
    else:
        whole = b.trunc(b.bitcast(v.add(scaled, v.c(_TO_WHOLE)), ir.VectorType(I32, v.lanes)), bytes_)
    return b.add(whole, _splat(v, b.trunc(args.zero_point, I8)))


def _splat(v: Vectors, scalar: Any) -> Any:
    """An integer in every lane."""
    return Vectors(v.b, element(f"int{scalar.type.width}"), v.lanes).splat(scalar)


def _splat_float(v: Vectors, bits: Any) -> Any:
    """The float64 of these bits, which is a float32, in every lane."""
    return v.splat(v.b.fptrunc(v.b.bitcast(bits, ir.DoubleType()), v.element))
