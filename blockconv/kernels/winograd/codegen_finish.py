"""Winograd's third stage, as LLVM vector IR: products to pixels, which are finished and stored.

Products of integers are summed as int32, which wraps, and so do their transforms. The results are right modulo 2^32,
and `unit`² times too large. A multiplication with an inverse modulo 2^32 divides by the odd part of `unit`². A shift to
the right divides by the even part. So a pixel is exact as long as the even part times it is an int32.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from blockconv.core.types import ElementType
from blockconv.jit.ir import emitted
from blockconv.jit.values import build
from blockconv.kernels.common.epilogue import TileEpilogue, finish
from blockconv.kernels.common.requantize import dequantized
from blockconv.kernels.common.tile import Tile
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.winograd.codegen import ELEMENT, PRODUCT, multiples
from blockconv.kernels.winograd.transforms import Form, destination_1d, transform_2d

ROW_PIXELS = 64  # of a row of a patch, which is stored to planes


class Finish(NamedTuple):
    """How pixels are finished: vectors of `lanes` channels of a form's outputs, and how they are stored.

    store_width: contiguous channels of the destination that a store takes; 1 is planes.
    act, has_parts: as `finish` has them.
    dst: the code of a destination's type that products become, of 8 bits uint8 for int8 too; 0: they are stored as they
        are.
    rounding: as in `Tile`.
    shifted: as in `Epilogue`.
    period: 1 where a vector is of images of one channel, else 0.
    """

    form: Form
    lanes: int
    fma: bool
    store_width: int
    act: int
    has_parts: int = 0
    dst: int = 0
    rounding: int = 0
    shifted: int = 0
    period: int = 0

    @property
    def is_planes(self) -> bool:
        return self.store_width == 1

    @property
    def channels(self) -> int:
        """Channels of a vector."""
        return self.period or self.lanes

    def tile(self, rows: int, pixels: int) -> Tile:
        """So many pixels of a vector each."""
        tile = Tile(self.products.code, self.fma, rows, pixels, 1, self.lanes, self.period)
        tile = tile._replace(store_width=self.store_width, act=self.act, has_parts=self.has_parts)
        return tile.stored_as(self.dst, self.rounding)

    @property
    def products(self) -> ElementType:
        return PRODUCT if self.form.exact else ELEMENT


class Products(NamedTuple):
    """The products of a tile for a vector of output channels, and what is added to them."""

    src: int  # the address of the first position's products
    src_position: int  # from a position to the next
    bia: int  # the address of the channels' bias
    scales: int  # and of their scales, which make integers real numbers
    activation: int  # the address of its parameters


def row_tiles(m: int) -> int:
    """Tiles of a row that are finished together, at most, where the destination is planes."""
    return ROW_PIXELS // m


def destination_transform(how: Finish):
    """Code that transforms `Products` to m² pixels with their bias. Those of a whole tile are finished and stored, as
    `Output` has it; others, and planes, are stored in a patch, vectors in rows of `ROW_PIXELS`."""
    m, tile = how.form.m, how.tile(how.form.m, how.form.m)

    @emitted
    def transform(products, is_whole, out, patch) -> None:
        v, pixels = tile.code(), _pixels(how, products)

        def to_patch() -> None:
            for k, slot in enumerate(pixels):
                row, col = divmod(k, m)
                v.store(slot.held, patch + (row * ROW_PIXELS + col) * v.bytes)

        if how.is_planes:
            to_patch()
            return
        with build.if_else(is_whole > 0, likely=True) as (whole, part):
            with whole:
                TileEpilogue(tile, out, masked=False).finish(pixels)
            with part:
                to_patch()

    return transform


@functools.cache
def finish_pixels(pixels: int, how: Finish):
    """Code that finishes so many neighbouring pixels, vectors of channels at `src`, and stores them."""
    tile = how.tile(1, pixels)

    @emitted
    def finish_them(src, out) -> None:
        v = tile.code()
        values = (v.load(src + k * v.bytes) for k in range(pixels))
        finish(tile, out, v.in_slots(values))

    return finish_them


def _pixels(how: Finish, products) -> list[Any]:
    """A tile's pixels with their bias, row by row, in stack slots; real numbers where integers become others."""
    v = Vectors(how.products, how.lanes, how.fma)
    pixels = v.in_slots(_biased(v, how, products))
    if not (how.dst and how.form.exact):
        return pixels
    at = products.bia, products.scales
    return dequantized(v, pixels, at, lambda f, address: [f.load(address)], how.shifted, products.activation)


def _biased(v: Vectors, how: Finish, products) -> Iterator[Any]:
    """A tile's pixels with their bias, row by row."""
    form, bias = how.form, v.broadcast(products.bia) if how.period else v.load(products.bia)
    side = form.side
    positions = multiples(products.src, products.src_position, form.positions)

    def column(k: int) -> list[Any]:
        return [v.load(at) for at in positions[k::side]]

    for row in transform_2d(v, destination_1d, form, column, side):
        for value in row:
            yield _divided(value, form.unit**2) + bias


def _divided(value, unit: int):
    """A multiple of `unit` modulo 2^32, as int32, divided by it; exact where the quotient times `even` is an int32."""
    even = unit & -unit
    if unit > even:
        value = value * pow(unit // even, -1, 1 << 32)
    return value >> even.bit_length() - 1 if even > 1 else value
