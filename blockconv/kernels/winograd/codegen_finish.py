"""Winograd's third stage, as LLVM vector IR: products to pixels, which are finished and stored.

Products of integers are summed as int32, which wraps, and so do their transforms. The results are right modulo 2^32,
and `unit`² times too large. A multiplication with an inverse modulo 2^32 divides by the odd part of `unit`². A shift to
the right divides by the even part. So a pixel is exact as long as the even part times it is an int32.
"""

import functools
from collections.abc import Iterator
from typing import Any, NamedTuple

from blockconv.core.types import ElementType
from blockconv.jit.ir import const, counted, emitted
from blockconv.jit.values import alloca_once
from blockconv.kernels.common.epilogue import finish
from blockconv.kernels.common.requantize import FLOAT32, dequantized
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
    fma: int
    store_width: int
    act: int
    has_parts: int = 0
    dst: int = 0
    rounding: int = 0
    shifted: int = 0
    period: int = 0

    @property
    def channels(self) -> int:
        """Channels of a vector."""
        return self.period or self.lanes

    def tile(self, rows: int, pixels: int) -> Tile:
        """So many pixels of a vector each."""
        finished = FLOAT32 if self.dst else self.products
        dst = self.dst if self.dst != FLOAT32.code else 0
        shape = rows, pixels, 1, self.lanes
        return Tile(finished.code, self.fma, *shape, self.period, dst=dst, rounding=self.rounding)

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


@functools.cache
def destination_transform(how: Finish):
    """Code that transforms `Products` to m² pixels, finishes them and stores them, as `Output` has it; not to planes.

    `rows` x `cols` of the tile's pixels are in the image. The output's scratch holds two tiles.
    """
    m, lanes, store_width, act, has_parts = how.form.m, how.lanes, how.store_width, how.act, bool(how.has_parts)
    whole_tile, one_pixel = (how.tile(size, size) for size in (m, 1))

    @emitted
    def transform(builder, products, rows, cols, out) -> None:
        v, pixels = whole_tile.code(builder), _pixels(builder, how, products)
        whole = out.valid >= how.channels  # else, too, pixel by pixel: less code
        for size in (rows, cols):
            whole = whole & (size >= m)
        with builder.if_else(whole, likely=True) as (all_of_it, part):
            with all_of_it:
                full = out._replace(valid=const(lanes), written=const(lanes))
                finish(builder, whole_tile, store_width, act, full, pixels, has_parts)
            with part:
                for k, slot in enumerate(pixels):
                    v.store(builder.load(slot), out.scratch + k * v.bytes)
                one, behind = alloca_once(builder, v.kind), out.scratch + m * m * v.bytes
                with counted(builder, rows) as row, counted(builder, cols) as col:
                    k = row * m + col
                    builder.store(v.load(out.scratch + k * v.bytes), one)
                    offset = row * out.dst_row + col * out.dst_pixel
                    here = out._replace(dst=out.dst + offset, scratch=behind)
                    finish(builder, one_pixel, store_width, act, here, [one], has_parts)

    return transform


@functools.cache
def destination_to_patch(how: Finish):
    """Code that transforms `Products` to m rows of m pixels with their bias, vectors from `dst` on."""

    @emitted
    def transform(builder, products, dst, dst_row) -> None:
        v = how.tile(1, 1).code(builder)
        rows = multiples(builder, dst, dst_row, how.form.m)
        for k, slot in enumerate(_pixels(builder, how, products)):
            row, col = divmod(k, how.form.m)
            v.store(builder.load(slot), rows[row] + col * v.bytes)

    return transform


@functools.cache
def finish_pixels(pixels: int, how: Finish):
    """Code that finishes so many neighbouring pixels, vectors of channels at `src`, and stores them to planes."""
    tile = how.tile(1, pixels)

    @emitted
    def finish_them(builder, src, out) -> None:
        v = tile.code(builder)
        values = (v.load(src + k * v.bytes) for k in range(pixels))
        finish(builder, tile, 1, how.act, out, _in_slots(v, values))

    return finish_them


def _pixels(builder, how: Finish, products) -> list[Any]:
    """A tile's pixels with their bias, row by row, in stack slots; real numbers where integers become others."""
    v = Vectors(builder, how.products, how.lanes, bool(how.fma))
    pixels = _in_slots(v, _biased(v, how, products))
    if not (how.dst and how.form.exact):
        return pixels
    at = products.bia, products.scales
    return dequantized(v, pixels, at, lambda f, address: [f.load(address)], how.shifted, products.activation)


def _biased(v: Vectors, how: Finish, products) -> Iterator[Any]:
    """A tile's pixels with their bias, row by row."""
    form, bias = how.form, v.broadcast(products.bia) if how.period else v.load(products.bia)
    side = form.side
    positions = multiples(v.b, products.src, products.src_position, form.positions)

    def column(k: int) -> list[Any]:
        return [v.load(at) for at in positions[k::side]]

    for row in transform_2d(v, destination_1d, form, column, side):
        for value in row:
            yield _divided(v, value, form.unit**2) + bias


def _divided(v: Vectors, value, unit: int):
    """A multiple of `unit` modulo 2^32, as int32, divided by it; exact where the quotient times `even` is an int32."""
    even = unit & -unit
    if unit > even:
        value = value * pow(unit // even, -1, 1 << 32)
    return value >> even.bit_length() - 1 if even > 1 else value


def _in_slots(v: Vectors, values: Iterator[Any]) -> list[Any]:
    """Values in stack slots, as `finish` takes them."""
    return [v.slots(1, value)[0] for value in values]
