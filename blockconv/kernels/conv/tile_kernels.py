"""Which kernel computes the tiles of a convolution, and what it is compiled for."""

from __future__ import annotations

from typing import NamedTuple

from blockconv import jit
from blockconv.core.activation import ActivationKind
from blockconv.core.target import Isa
from blockconv.core.types import ElementType, Types, element
from blockconv.jit.records import fill
from blockconv.kernels.common.microkernel import PREFETCHING, TileSpec, conv_tile, finish_tile, finished_at_once
from blockconv.kernels.common.pixel_tile import PixelTileSpec, pixel_tile
from blockconv.kernels.common.tile import Tile
from blockconv.kernels.conv import matrix_pixel_tile, matrix_tile
from blockconv.kernels.conv.blocking import ConvBlocking
from blockconv.kernels.conv.matrix_pixel_tile import MatrixPixelSpec
from blockconv.kernels.conv.matrix_tile import MatrixTileSpec
from blockconv.kernels.table import Epilogue


class Tiles(NamedTuple):
    """The tiles of a convolution.

    src_unit: bytes from a unit of channels in a window to the next.
    has_parts: whether stores write at uneven distances.
    ahead: as in `TileSpec`, where tiles read a source in place, in blocks of channels far from each other; else 0.
    """

    isa: Isa
    types: Types
    blocking: ConvBlocking
    src_unit: int
    has_parts: bool
    ahead: int

    def kernel(self, epilogue: Epilogue) -> jit.Kernel:
        """The kernel that computes a tile."""
        if not self.blocking.pixel_lanes:
            return self.of_channels(epilogue)
        return self.of_matrix_pixels(epilogue) if self.blocking.dot.is_matrix else self.of_pixels(epilogue)

    def register_sizes(self) -> list[int]:
        """The arguments of `configure`, for a unit that multiplies matrices."""
        blocking = self.blocking
        if blocking.pixel_lanes:
            sizes = matrix_pixel_tile.register_sizes(blocking.width, blocking.blocks, self.step)
        else:
            sizes = matrix_tile.register_sizes(*blocking.shape, self.step)
        return [number for register in sizes for number in register]

    @property
    def step(self) -> int:
        """Elements of a pixel that a step multiplies: of a block of channels; by matrices, of all its taps."""
        taps = self.blocking.shared.taps if self.blocking.dot.is_matrix else 1
        return taps * self.blocking.step // self.blocking.dot.channels

    @property
    def stored(self) -> ElementType:
        """The type that is stored. Whether bytes are signed is a matter of bounds, which are arguments."""
        dst = self.types.dst
        return dst if dst.itemsize > 1 else element("uint4" if dst.is_packed else "uint8")

    @property
    def converted(self) -> int:
        """The code of that type; 0 if it is the accumulators' type."""
        return self.stored.code if self.stored != self.types.acc else 0

    def rounding(self, epilogue: Epilogue) -> int:
        return epilogue.rounding if self.stored.itemsize == 1 else 0

    def of_pixels(self, epilogue: Epilogue) -> jit.Kernel:
        """The kernel of a tile whose vectors run along pixels."""
        blocking, lanes = self.blocking, self.blocking.pixel_lanes
        spec = PixelTileSpec(
            element=self.types.acc.code,
            fma=int(self.isa.fma),
            rows=blocking.rows,
            vectors=blocking.pixels // lanes,
            channels=blocking.width,
            lanes=lanes,
            act=self.act(epilogue),
        )
        return pixel_tile(spec)

    def of_matrix_pixels(self, epilogue: Epilogue) -> jit.Kernel:
        """The kernel of a tile of matrices whose columns are pixels."""
        spec = fill(
            MatrixPixelSpec,
            self,
            self.blocking,
            element=self.types.acc.code,
            channels=self.blocking.width,
            step=self.step,
            act=self.act(epilogue),
            dot=self.blocking.dot.number,
            dst=self.converted,
            rounding=self.rounding(epilogue),
            shifted=epilogue.shifted,
        )
        return matrix_pixel_tile.matrix_pixel_tile(spec)

    def act(self, epilogue: Epilogue) -> int:
        """The `ActivationKind` that a kernel is compiled for. Where one may clip, the record says whether it does."""
        kind = epilogue.kind(self.types)
        clips = kind == ActivationKind.NONE and self.stored.is_float
        return ActivationKind.CLIP if clips else kind

    def of_channels(self, epilogue: Epilogue) -> jit.Kernel:
        """The kernel of a tile whose vectors run along output channels."""
        blocking, step = self.blocking, self.step
        if blocking.dot.is_matrix:
            how = fill(MatrixTileSpec, blocking, element=self.types.acc.code, step=step, dot=blocking.dot.number)
            return matrix_tile.matrix_tile(how)
        spec = fill(
            TileSpec,
            blocking,
            tile=self.tile(epilogue),
            store_width=self.store_width,
            loops=int(step > 1),
            dot=blocking.dot.number,
            shifted=epilogue.shifted,
            prefetches=int(step >= PREFETCHING),
            ahead=self.ahead if step > 1 else 0,
            src_channel=self.src_unit if blocking.has_panels_of_planes and step > 1 else 0,
        )
        return conv_tile(spec.of_pixels())

    @property
    def store_width(self) -> int:
        """Contiguous channels that a store writes; scattered tiles are stored as they are."""
        return self.blocking.store_width or self.blocking.lanes

    def tile(self, epilogue: Epilogue) -> Tile:
        """The tile of accumulators, and how they are stored."""
        acc, dst, rounding = self.types.acc, self.converted, self.rounding(epilogue)
        fma = int(self.isa.fma and acc.is_float)
        return Tile(acc.code, fma, *self.blocking.shape[:3], self.blocking.lanes, dst=dst, rounding=rounding)

    def stores(self, epilogue: Epilogue) -> bool:
        """Whether tiles that lack no channels store themselves."""
        return not (self.has_parts or self.blocking.dot.is_matrix or epilogue.activation == ActivationKind.OTHER)

    def finish(self, epilogue: Epilogue) -> jit.Kernel:
        """The kernel that stores other tiles."""
        at_once = finished_at_once(self.blocking.pixels, self.store_width, self.blocking.lanes)
        tile = self.tile(epilogue)._replace(rows=1, pixels=at_once, vectors=1)
        return finish_tile(tile, self.store_width, self.act(epilogue), self.has_parts, epilogue.shifted)
