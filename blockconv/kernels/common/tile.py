"""A tile of pixels by output channels, and where it is stored."""

from __future__ import annotations

from typing import Any, NamedTuple

from blockconv.core.types import ElementType, element
from blockconv.kernels.common.vectors import Vectors

LINE = 64  # bytes of a cache line


class Tile(NamedTuple):
    """A tile of `rows` x `pixels` pixels by `vectors` vectors of `lanes` output channels.

    element: the code of its elements' type.
    fma: whether multiply-adds round once.
    period: lanes after which a vector's channels repeat; 0 where they don't.
    dst: the code of a type that floats are stored as, integers of 8 or 4 bits or floats of 16; 0: they are stored as
        they are.
    rounding: a `Rounding`, to integers.
    unpacked: how many vectors are stored as one, in the order of `unpacked.py`; 0 where each is stored.
    row: elements of a row, where the last vector of one has more lanes; 0 where not, or where that is not known.
    dense: whether rows follow one another, so that a row's last vector may write over the next, which is stored later.
    store_width: contiguous destination channels, which one store writes; 1 is NCHW.
    act: an `ActivationKind`.
    has_parts: whether `Output.dst_block` is a table.
    """

    element: int
    fma: int
    rows: int
    pixels: int
    vectors: int
    lanes: int
    period: int = 0
    dst: int = 0
    rounding: int = 0
    unpacked: int = 0
    row: int = 0
    dense: int = 0
    store_width: int = 0
    act: int = 0
    has_parts: int = 0

    def stored_as(self, dst: int, rounding: int) -> Tile:
        """The tile as another type, if not 0: integers that become real numbers on the way are float32 before."""
        if not dst:
            return self
        float32 = element("float32").code
        return self._replace(element=float32, dst=dst if dst != float32 else 0, rounding=rounding)

    @property
    def itemsize(self) -> int:
        """Bytes of an element of the destination."""
        return ElementType.of(self.dst or self.element).itemsize

    @property
    def width(self) -> int:
        """Lanes of a pixel."""
        return self.vectors * self.lanes

    def code(self) -> Vectors:
        return Vectors(ElementType.of(self.element), self.lanes, bool(self.fma))

    @property
    def in_order(self) -> Tile:
        """The tile as it is stored, its channels in order."""
        if not self.unpacked:
            return self
        return self._replace(lanes=self.lanes * self.unpacked, vectors=self.vectors // self.unpacked, unpacked=0)

    def stored(self) -> Vectors:
        """Code over the stored vectors."""
        tile = self.in_order
        return Vectors(ElementType.of(self.dst), tile.lanes) if self.dst else tile.code()


class Output(NamedTuple):
    """Where a tile goes, if no `TileRecord` says it: values of LLVM, i64s; the strides in bytes.

    dst: the address of the first pixel and channel.
    dst_row, dst_pixel: from a row of pixels, and a pixel, to the next.
    dst_block: from the channels of one store to the next store's; or, where a tile has parts, the address of a table:
        from its first channel to each store's.
    residual: from the destination to the residual, which has the same strides; 0 where there is none.
    valid: output channels that exist.
    written: output channels that are written, as zero where they do not exist.
    activation, activate: as in `ConvOperands`.
    """

    dst: Any
    dst_row: Any
    dst_pixel: Any
    dst_block: Any
    residual: Any
    valid: Any
    written: Any
    activation: Any
    activate: Any
