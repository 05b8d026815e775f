"""Floats of 16 bits in memory, which are float32 in registers: how one becomes the other.

Every float of 16 bits is a float32, so that widening is exact. Rounding is to the nearest, a half to the even one. Too
large numbers become infinite, and a NaN stays one. bfloat16 is the upper half of a float32. float16 has instructions
where the target says so (`Isa.f16`), and else the same in integers, bit for bit, but for a NaN's payload.
"""

from llvmlite import ir

from blockconv.core import target
from blockconv.core.types import BRAIN, ElementType
from blockconv.jit.ir import call_llvm, vector
from blockconv.jit.values import build
from blockconv.kernels.common.vectors import Vectors


def widened(v: Vectors, half: ElementType, bits):
    """The float32 of vectors `v` that these are: a vector of the bits, as integers, of type `half`."""
    wide = vector(4, v.lanes)
    if half.kind == BRAIN:
        return build.bitcast(build.zext(bits, wide) << 16, v.kind)
    if target.isa().f16:
        return build.fpext(build.bitcast(bits, ir.VectorType(ir.HalfType(), v.lanes)), v.kind)
    return _widened_in_integers(v, build.zext(bits, wide))


def rounded(v: Vectors, half: ElementType, x, flushes: bool = False):
    """float32 of vectors `v` rounded to type `half`: the bits, as a vector of integers.

    flushes: denormal numbers may become zeros, as they do by the instruction that AVX512-BF16 has for bfloat16.
    """
    narrow = vector(2, v.lanes)
    isa = target.isa()
    if half.kind == BRAIN and flushes and isa.is_x86 and isa.bf16 and v.bytes in (32, 64):
        return call_llvm(f"llvm.x86.avx512bf16.cvtneps2bf16.{8 * v.bytes}", narrow, [x])
    if half.kind != BRAIN and isa.f16:
        return build.bitcast(build.fptrunc(x, ir.VectorType(ir.HalfType(), v.lanes)), narrow)
    bits = build.bitcast(x, vector(4, v.lanes))
    made = _rounded_to_brain(v, bits) if half.kind == BRAIN else _rounded_in_integers(v, bits)
    return build.trunc(made, narrow)


def _each(v: Vectors, value: int) -> ir.Constant:
    """An integer in every lane."""
    return vector(4, v.lanes)(value)


def _rounded_to_brain(v: Vectors, bits):
    upper = build.lshr(bits, _each(v, 16))
    even = (upper & 1) + 0x7FFF
    nearest = build.lshr(bits + even, _each(v, 16))
    x = build.bitcast(bits, v.kind)
    return build.select(build.fcmp_unordered("uno", x, x), upper | 0x40, nearest)


# The exponent's bias is 15 in float16 and 127 in float32, and float32's mantissa has 13 bits more.
_REBIAS, _MORE = (127 - 15) << 23, 13
_LEAST = (127 - 14) << 23  # 2^-14, the least normal float16, as bits of a float32
_TOO_LARGE = (127 + 16) << 23  # 2^16; a number below that rounds up to it gets the bits of infinity
_INFINITE = 0x7F800000


def _widened_in_integers(v: Vectors, bits):
    sign = (bits & 0x8000) << 16
    size = bits & 0x7FFF
    normal = (size << _MORE) + _REBIAS
    special = build.icmp_unsigned(">=", size, _each(v, 0x7C00))
    normal = build.select(special, normal | _INFINITE, normal)
    # Values below the least normal one are multiples of 2^-24. They are made without arithmetic on denormal floats,
    # which a processor may be set to take for zeros.
    small = build.bitcast(build.sitofp(size, v.kind) * 2.0**-24, size.type)
    made = build.select(build.icmp_unsigned("<", size, _each(v, 0x0400)), small, normal)
    return build.bitcast(made | sign, v.kind)


def _rounded_in_integers(v: Vectors, bits):
    sign = build.lshr(bits & 1 << 31, _each(v, 16))
    size = bits & (1 << 31) - 1
    odd = build.lshr(size, _each(v, _MORE)) & 1
    even = odd + ((1 << (_MORE - 1)) - 1)
    normal = build.lshr(size - _REBIAS + even, _each(v, _MORE))
    # A sum with 1/2 has 2^-24 as its last bit, like the smallest float16: it rounds the same way.
    summed = build.bitcast(build.bitcast(size, v.kind) + 0.5, size.type)
    small = summed - ((127 - 1) << 23)
    special = build.select(build.icmp_unsigned(">", size, _each(v, _INFINITE)), _each(v, 0x7E00), _each(v, 0x7C00))
    made = build.select(build.icmp_unsigned("<", size, _each(v, _LEAST)), small, normal)
    made = build.select(build.icmp_unsigned(">=", size, _each(v, _TOO_LARGE)), special, made)
    return made | sign
