"""Elements that become others on their way from one array to another, by vectors and one by one."""

from typing import Any, NamedTuple

from blockconv.core.python import zipped
from blockconv.core.types import BITS, ElementType
from blockconv.jit.arguments import Arguments, group
from blockconv.jit.ir import const, counted, emitted
from blockconv.jit.values import build, truth
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.requantize import QuantizationArguments, quantization_words

CONVERTED_LANES = 16  # of a converted vector, of bytes too: as many float32 fill a vector of AVX-512


class Moved(NamedTuple):
    """The element types of a move: in the source and in the destination.

    Bits have one type on both sides and are copied; numbers are converted.
    """

    src: ElementType
    dst: ElementType

    @property
    def is_converted(self) -> bool:
        return self.src.kind != BITS

    @property
    def src_bytes(self) -> int:
        return self.src.itemsize

    @property
    def dst_bytes(self) -> int:
        return self.dst.itemsize

    @property
    def itemsize(self) -> int:
        """Bytes of the wider one."""
        return max(self.src_bytes, self.dst_bytes)


class ConversionArguments(Arguments):
    """The quantizations of converted elements."""

    src = group(QuantizationArguments, "in the source")
    dst = group(QuantizationArguments, "in the destination")


def conversion_words(types: tuple[ElementType, ElementType], given) -> ConversionArguments:
    """The arguments of a source and a destination of these types. given: the quantization of each; None for floats."""
    src, dst = map(quantization_words, given, types)
    return ConversionArguments(src=src, dst=dst)


def quantizations_at(address) -> list[Any]:
    """The addresses of both `QuantizationArguments` of the `ConversionArguments` at this one."""
    return [address + 8 * ConversionArguments.fields[end].first for end in ("src", "dst")]


def read_and_written(src: ElementType, dst: ElementType, lanes: int, address) -> tuple[Floats, Floats]:
    """Code over the elements of a source, and over those of a destination.

    address: of their `ConversionArguments`, which integers need.
    """
    ends = zipped((src, dst), quantizations_at(address))
    v, out = (Floats(type, lanes, words) for type, words in ends)
    return v, out


class ConvertedExtents(NamedTuple):
    """`count` contiguous extents of `size` elements; the steps from one to the next, in bytes."""

    src: Any
    dst: Any
    size: Any
    count: Any
    src_step: Any
    dst_step: Any
    conversion: Any  # the address of its `ConversionArguments`


@emitted
def convert_extents(moved: Moved, lanes: int, one_vector: int, x: ConvertedExtents) -> None:
    """Convert `ConvertedExtents` by vectors of `lanes`: one for an extent, or more.

    The last vector of an extent is moved back to be whole. Shorter extents are converted element by element.
    """
    if not moved.is_converted:
        return
    vectors, one = (read_and_written(*moved, n, x.conversion) for n in (lanes, 1))

    def at(ends: tuple[Floats, Floats], k, src, dst) -> None:
        v, out = ends
        value = v.load(src + k * v.itemsize)
        out.store(value, dst + k * out.itemsize)

    def extent(src, dst) -> None:
        with build.if_else(x.size >= lanes) as (long, short):
            with long:
                with counted(x.size // lanes) as part:
                    at(vectors, part * lanes, src, dst)
                with build.if_then(truth(x.size % lanes)):
                    at(vectors, x.size - lanes, src, dst)
            with short, counted(x.size) as element:
                at(one, element, src, dst)

    with counted(x.count) as n:
        src = x.src + n * x.src_step
        dst = x.dst + n * x.dst_step
        if one_vector:
            at(vectors, const(0), src, dst)
        else:
            extent(src, dst)
