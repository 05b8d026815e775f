"""The multiply-accumulate of a reduction: floats one by one, or 8-bit integers and bfloat16 as dot products.

A dot product is a multiply-add on wider elements. Neighbouring channels of a pixel that fill 32 bits are one element,
which is broadcast like a float32. A lane of the weights has as many weights of one output channel. Their products are
added to the lane's int32 or float32. So a tile, its addresses and its loop nest are the same for all.

Each dot product is an instruction; of integers, one emulated in plain IR runs everywhere. Arm's instructions take the
broadcast element from one lane of a register, so that no other instruction broadcasts it.

Where a processor has a unit that multiplies matrices (AMX), an instruction does all dot products of 16 pixels and 16
output channels at once (`matrix_tile.py`).
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv.core.checks import Pair
from blockconv.core.target import Isa
from blockconv.core.types import BRAIN, SIGNED, UNSIGNED, ElementType, Types
from blockconv.jit.ir import I32, call_llvm, pointer, vector
from blockconv.jit.values import build
from blockconv.kernels.common.vectors import Vectors


class Dot(NamedTuple):
    """A multiply-accumulate.

    number: how kernel families are told.
    channels: in an element that is broadcast.
    itemsize: bytes of a channel in a packed window and in packed weights; 0 if these have the arrays' types.
    is_unsigned: a source of int8 is packed with 128 more in each channel, as uint8.
    instructions: how many multiply and add; several need a register for the values between them.
    is_matrix: whether it multiplies matrices.
    is_signed: a source of uint8 is packed with 128 less in each channel, as int8.
    """

    number: int
    channels: int
    itemsize: int = 0
    is_unsigned: bool = False
    instructions: int = 1
    is_matrix: bool = False
    is_signed: bool = False

    def shift(self, src: ElementType) -> int:
        """The number that packing adds to each channel of a source of this type: it flips the highest bit."""
        if self.is_signed and src.kind == UNSIGNED and not src.is_packed:
            return -128
        return src.flip if self.is_unsigned else 0


MULTIPLY_ADD = Dot(0, 1)
WIDENED = MULTIPLY_ADD._replace(itemsize=4)  # floats of 16 bits that become float32 while they are packed
# u8 times s8, four at a time: VNNI. Or both widened to 16 bits while they are packed, two at a time: exact too.
DOTS = {
    "vpdpbusd": Dot(1, 4, 1, True),
    "vpmaddwd": Dot(2, 2, 2, instructions=2),
    "vpdpbusd, emulated": Dot(3, 4, 1, True),
    "vpmaddwd, emulated": Dot(4, 2, 2, instructions=2),
    # u8 times s8, two at a time as int16, where a sum of two would saturate: for narrow weights, or sources of 4 bits.
    "vpmaddubsw": Dot(7, 4, 1, True, instructions=3),
    # Words of 16 bits, two at a time, where VNNI has an instruction for it.
    "vpdpwssd": Dot(8, 2, 2),
    # Arm's: s8 times s8, and u8 times s8.
    "sdot": Dot(15, 4, 1, is_signed=True),
    "usdot": Dot(16, 4, 1, True),
}
# Instructions that are not measured, with one that takes as long on every processor that has both.
_AS_LONG = {"vpdpwssd": "vpdpbusd", "tdpbssd": "tdpbusd"}
# bfloat16, two at a time: AVX512-BF16, and Arm's BF16.
BRAIN_DOTS = {"vdpbf16ps": Dot(5, 2, 2), "bfdot": Dot(17, 2, 2)}
# Matrix instructions, by the types of source and weights. No source is converted.
MATRIX_DOTS = {
    "tdpbusd": Dot(9, 4, 1, is_matrix=True),
    "tdpbssd": Dot(10, 4, 1, is_matrix=True),
    "tdpbf16ps": Dot(11, 2, 2, is_matrix=True),
}


def dot_for(types: Types, isa: Isa) -> Dot:
    """The fastest multiply-accumulate of an instruction set for these types."""
    if types.acc.is_float:
        if not types.src.is_half:
            return MULTIPLY_ADD
        # Where matrices of bfloat16 have a unit, an instruction of vectors takes as long as four multiply-adds.
        has_dots = isa.bf16 and not isa.amx
        dot = BRAIN_DOTS["vdpbf16ps" if isa.is_x86 else "bfdot"]
        return dot if types.src.kind == BRAIN and has_dots else WIDENED
    if isa.vnni:
        return DOTS["vpdpbusd"]
    if isa.dotprod:
        return DOTS["usdot" if isa.i8mm and types.src.kind == UNSIGNED else "sdot"]
    if not isa.is_x86:
        return DOTS["vpmaddwd, emulated"]
    fits = types.wei.narrow or types.src.is_packed
    return DOTS["vpmaddubsw" if fits and isa.ssse3 else "vpmaddwd"]


def dot_of_words(isa: Isa) -> Dot:
    """The fastest multiply-accumulate of an instruction set for integers of 16 bits, whose sums wrap."""
    if isa.vnni:
        return DOTS["vpdpwssd"]
    return DOTS["vpmaddwd" if isa.is_x86 else "vpmaddwd, emulated"]


def matrix_dot_for(types: Types) -> Dot:
    """The multiply-accumulate of matrices for these types."""
    return MATRIX_DOTS["tdpbf16ps" if types.acc.is_float else "tdpbssd" if types.src.kind == SIGNED else "tdpbusd"]


def packed_as_one(types: Types, dot: Dot) -> int:
    """Channels of a source that are packed as one: as many as fill 32 bits, where several are multiplied at once."""
    return 1 if dot.channels == 1 else 4 // types.src.itemsize


def by_number(number: int) -> Dot:
    """The dot product of this number."""
    return next(dot for dot in DOTS.values() if dot.number == number)


@functools.cache
def name_of(dot: Dot) -> str:
    """The name of a multiply-accumulate in a machine's profile; empty for floats."""
    found = next((name for name, known in (DOTS | BRAIN_DOTS | MATRIX_DOTS).items() if known.number == dot.number), "")
    return _AS_LONG.get(found, found)


def multiply_accumulate(v: Vectors, number: int, x, w, acc):
    """acc + x * w: the products of all channels of each lane's element are added. number: a `Dot`'s.

    The instruction of a `Dot` has to be one of the target's: LLVM ends the process where it is not.
    """
    return v.multiply_add(x, w, acc) if number == MULTIPLY_ADD.number else _DOTS[number](v, x, w, acc)


class InFirstLane(NamedTuple):
    """A vector whose first lane has an element of the source, for instructions that broadcast it themselves."""

    vector: Any


def source_element(v: Vectors, number: int, address):
    """The element of the source at an address, as `multiply_accumulate` takes it against each vector of weights."""
    if number not in BY_ELEMENT:
        return v.broadcast(address)
    scalar = build.load(pointer(address, I32), align=v.itemsize)
    undefined = ir.VectorType(scalar.type, v.lanes)(ir.Undefined)
    return InFirstLane(build.insert_element(undefined, scalar, I32(0)))


# By number: the extension, the instruction for two whole vectors, and the one that broadcasts its last operand. `sudot`
# is `usdot` with exchanged operands: the broadcast one is unsigned.
BY_ELEMENT = {15: ("dotprod", "sdot", "sdot"), 16: ("i8mm", "usdot", "sudot"), 17: ("bf16", "bfdot", "bfdot")}


def _of_arm(number: int) -> Callable[..., Any]:
    extension, whole, broadcast = BY_ELEMENT[number]
    full, element = ("8h", "2h") if extension == "bf16" else ("16b", "4b")

    def emit(v: Vectors, x, w, acc):
        """In assembly: LLVM ends the process for an intrinsic that its target is not known to have."""
        if isinstance(x, InFirstLane):
            operands, x = f"{broadcast} $0.4s, $1.{full}, $2.{element}[0]", x.vector
        else:
            operands = f"{whole} $0.4s, $2.{full}, $1.{full}"
        kind = ir.FunctionType(v.kind, [w.type, x.type, v.kind])
        return build.asm(kind, f".arch_extension {extension}\\0A{operands}", "=w,w,w,0", [w, x, acc], False)

    return emit


def _vnni(name: str) -> Callable[..., Any]:
    def emit(v: Vectors, x, w, acc):
        return call_llvm(f"llvm.x86.avx512.{name}.{8 * v.bytes}", v.kind, [acc, x, w])  # AVX-VNNI's too

    return emit


_PAIRS = {16: "llvm.x86.sse2.pmadd.wd", 32: "llvm.x86.avx2.pmadd.wd", 64: "llvm.x86.avx512.pmaddw.d.512"}


def _vpmaddwd(v: Vectors, x, w, acc):
    pairs = vector(2, 2 * v.lanes)
    products = call_llvm(_PAIRS[v.bytes], v.kind, [build.bitcast(x, pairs), build.bitcast(w, pairs)])
    return acc + products


_BYTE_PAIRS = {
    16: "llvm.x86.ssse3.pmadd.ub.sw.128",
    32: "llvm.x86.avx2.pmadd.ub.sw",
    64: "llvm.x86.avx512.pmaddubs.w.512",
}


def _vpmaddubsw(v: Vectors, x, w, acc):
    """Two sums of two products, each an int16, and their sum. Exact where weights are narrow, or channels of 4 bits."""
    bytes_, pairs = (ir.VectorType(ir.IntType(32 // count), count * v.lanes) for count in (4, 2))
    sums = call_llvm(_BYTE_PAIRS[v.bytes], pairs, [build.bitcast(x, bytes_), build.bitcast(w, bytes_)])
    ones = pairs([1] * pairs.count)
    return acc + call_llvm(_PAIRS[v.bytes], v.kind, [sums, ones])


def _emulated(channels: int, is_unsigned: bool) -> Callable[..., Any]:
    bits = 32 // channels

    def emit(v: Vectors, x, w, acc):

        def channel(value, k: int, unsigned: bool):
            above = value << 32 - bits * (k + 1)
            return (build.lshr if unsigned else build.ashr)(above, v.c(32 - bits))

        for k in range(channels):
            acc = acc + channel(x, k, is_unsigned) * channel(w, k, False)
        return acc

    return emit


def _vdpbf16ps(v: Vectors, x, w, acc):
    pairs = vector(4, v.lanes)
    name = f"llvm.x86.avx512bf16.dpbf16ps.{8 * v.bytes}"
    return call_llvm(name, v.kind, [acc, build.bitcast(x, pairs), build.bitcast(w, pairs)])


_DOTS: dict[int, Callable[..., Any]] = {
    1: _vnni("vpdpbusd"),
    2: _vpmaddwd,
    3: _emulated(4, True),
    4: _emulated(2, False),
    5: _vdpbf16ps,
    7: _vpmaddubsw,
    8: _vnni("vpdpwssd"),
    **{number: _of_arm(number) for number in BY_ELEMENT},
}


# (vectors of output channels, the most pixels) of a tile that is held in so many registers.
_TILES = {32: ((1, 28), (2, 14), (3, 9), (4, 6)), 16: ((1, 12), (2, 6), (3, 4))}
_TILES_WITHOUT_FMA = ((1, 12), (2, 6), (3, 3))  # of 16 registers; one holds each product before it is added

# By vpmaddubsw, for which a register holds ones. With AVX2's three operands, two accumulators more cost less than a
# narrower tile, though they are kept in memory. Three vectors read more weights from the second-level cache than hides.
_TILES_OF_BYTES = {"sse": ((1, 12), (2, 5)), "avx2": ((1, 12), (2, 7), (2, 6))}

# By Arm's dot products: LLVM loads several scalars ahead of what is assembly.
_TILES_BY_ELEMENT = ((1, 26), (2, 13), (3, 8), (4, 6))


def tiles_of_registers(isa: Isa, fused: bool) -> tuple[Pair, ...]:
    """(vectors, the most scalars that are broadcast against them) of the tiles that the vector registers hold.

    fused: whether one instruction multiplies and adds; else each product takes a register before it is added.
    """
    registers = isa.tile_registers
    return _TILES[registers] if fused or registers == 32 else _TILES_WITHOUT_FMA


def tiles_of(dot: Dot, isa: Isa) -> tuple[Pair, ...]:
    """`tiles_of_registers` for a multiply-accumulate."""
    if dot.number in BY_ELEMENT:
        return _TILES_BY_ELEMENT
    if dot.instructions == 3 and isa.name in _TILES_OF_BYTES:
        return _TILES_OF_BYTES[isa.name]
    return tiles_of_registers(isa, isa.fma if dot.number == MULTIPLY_ADD.number else dot.instructions == 1)
