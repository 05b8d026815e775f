"""The kernel that computes the tiles of a convolution, and its compiled parameters."""

from typing import NamedTuple

from blockconv import jit
from blockconv.core.target import Isa
from blockconv.core.types import ElementType, Types, element
from blockconv.jit.records import fill
from blockconv.kernels.common.microkernel import TileSpec, conv_tile
from blockconv.kernels.common.pixel_tile import pixel_tile
from blockconv.kernels.conv import matrix_pixel_tile, matrix_tile
from blockconv.kernels.conv.blocking import ConvBlocking
from blockconv.kernels.table import Epilogue


class Tiles(NamedTuple):
    """The tiles of a convolution.

    src_unit: bytes from a unit of channels in a window to the next.
    has_parts: whether stores write at uneven distances.
    """

    isa: Isa
    types: Types
    blocking: ConvBlocking
    src_unit: int
    has_parts: bool

    def kernel(self, spec: TileSpec) -> jit.Kernel:
        """The kernel that computes a tile of these parameters."""
        along_pixels = self.blocking.pixel_lanes > 0
        if self.blocking.dot.is_matrix:
            family = matrix_pixel_tile.matrix_pixel_tile if along_pixels else matrix_tile.matrix_tile
            return family(spec)
        return pixel_tile(spec) if along_pixels else conv_tile(spec)

    def register_sizes(self) -> list[int]:
        """The arguments of `configure`, for a unit that multiplies matrices."""
        blocking, lines = self.blocking, matrix_tile.LINES
        registers = matrix_tile.Registers(blocking.blocks, blocking.width // lines, exchanged=True)
        if not blocking.pixel_lanes:
            rows, pixels, vectors, gap = blocking.shape
            blocks = matrix_tile.row_blocks(rows, pixels, gap)
            registers, lines = matrix_tile.Registers(len(blocks), vectors), blocks[0].pixels
        sizes = registers.sizes(lines, self.step)
        return [number for register, size in sizes.items() for number in (register, *size)]

    @property
    def step(self) -> int:
        """Elements of a pixel that a step multiplies: a channel block's; with matrix units, those of all taps."""
        taps = self.blocking.shared.taps if self.blocking.dot.is_matrix else 1
        return taps * self.blocking.step // self.blocking.dot.channels

    @property
    def stored(self) -> ElementType:
        """The stored type. Signed bytes count as unsigned here: bounds, which are arguments, tell them apart."""
        dst = self.types.dst
        return dst if dst.itemsize > 1 else element("uint4" if dst.is_packed else "uint8")

    @property
    def converted(self) -> int:
        """The code of that type; 0 if it is the accumulators' type."""
        return self.stored.code if self.stored != self.types.acc else 0

    def rounding(self, epilogue: Epilogue) -> int:
        return epilogue.rounding if self.stored.itemsize == 1 else 0

    def spec(self, epilogue: Epilogue) -> TileSpec:
        """The tile's parameters."""
        blocking = self.blocking
        lanes, along_pixels = blocking.pixel_lanes or blocking.lanes, blocking.pixel_lanes > 0
        store_width = lanes if along_pixels else blocking.store_width or lanes
        spec = fill(
            TileSpec,
            self,
            blocking,
            element=self.types.acc.code,
            fma=self.isa.fma and self.types.acc.is_float,
            lanes=lanes,
            step=self.step,
            store_width=store_width,
            act=epilogue.kind(self.types, store_width),
            dot=blocking.dot.number,
            dst=self.converted,
            rounding=self.rounding(epilogue),
            shifted=epilogue.shifted,
            k_blocked=blocking.k_blocks > 1,
            src_channel=self.src_unit if blocking.has_panels_of_planes and self.step > 1 else 0,
            cut=blocking.kept is not None,
        )
        if along_pixels and blocking.dot.is_matrix:
            vectors, lanes = blocking.width // matrix_tile.LINES, matrix_tile.COLUMNS
            return spec._replace(rows=blocking.blocks, vectors=vectors, lanes=lanes, fma=0, src_channel=self.src_unit)
        if along_pixels:
            return spec._replace(pixels=blocking.width, vectors=blocking.pixels // lanes)
        return spec
