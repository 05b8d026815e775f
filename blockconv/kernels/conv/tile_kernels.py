"""Which kernel computes the tiles of a convolution, and what it is compiled for."""

from typing import NamedTuple

from blockconv import jit
from blockconv.core.activation import ActivationKind
from blockconv.core.target import Isa
from blockconv.core.types import ElementType, Types, element
from blockconv.jit.records import fill
from blockconv.kernels.common.microkernel import TileSpec, conv_tile, finish_part
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

    def kernel(self, epilogue: Epilogue) -> jit.Kernel:
        """The kernel that computes a tile."""
        if not self.blocking.pixel_lanes:
            return self.of_channels(epilogue)
        return self.of_matrix_pixels(epilogue) if self.blocking.dot.is_matrix else self.of_pixels(epilogue)

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

    def act(self, epilogue: Epilogue) -> int:
        """The `ActivationKind` that a tile is compiled for: whether floats are clipped is a word of its record."""
        kind = epilogue.kind(self.types)
        return ActivationKind.CLIP if kind == ActivationKind.NONE and self.stored.is_float else kind

    def of_pixels(self, epilogue: Epilogue) -> jit.Kernel:
        """The kernel of a tile whose vectors run along pixels."""
        blocking, lanes = self.blocking, self.blocking.pixel_lanes
        of, vectors = self.spec(epilogue), blocking.pixels // lanes
        return pixel_tile(of._replace(pixels=blocking.width, vectors=vectors, lanes=lanes, store_width=lanes))

    def of_matrix_pixels(self, epilogue: Epilogue) -> jit.Kernel:
        """The kernel of a tile of matrices whose columns are pixels."""
        blocks, vectors = self.blocking.blocks, self.blocking.width // matrix_tile.LINES
        of = self.spec(epilogue)._replace(rows=blocks, vectors=vectors, lanes=matrix_tile.COLUMNS, fma=0)
        return matrix_pixel_tile.matrix_pixel_tile(of._replace(src_channel=self.src_unit))

    def of_channels(self, epilogue: Epilogue) -> jit.Kernel:
        """The kernel of a tile whose vectors run along output channels."""
        if self.blocking.dot.is_matrix:
            return matrix_tile.matrix_tile(self.spec(epilogue))
        return conv_tile(self.spec(epilogue)._replace(parted=1))

    def part(self, epilogue: Epilogue) -> jit.Kernel:
        """The kernel that stores such a tile where it lacks channels."""
        return finish_part(self.spec(epilogue).finished)

    def spec(self, epilogue: Epilogue) -> TileSpec:
        """The tile whose vectors run along output channels."""
        blocking, shared = self.blocking, self.blocking.shared
        return fill(
            TileSpec,
            self,
            blocking,
            shared,
            element=self.types.acc.code,
            fma=self.isa.fma and self.types.acc.is_float,
            step=self.step,
            store_width=blocking.store_width or blocking.lanes,
            act=self.act(epilogue),
            dot=blocking.dot.number,
            dst=self.converted,
            rounding=self.rounding(epilogue),
            shifted=epilogue.shifted,
            k_blocked=blocking.k_blocks > 1,
            src_channel=self.src_unit if blocking.has_panels_of_planes and self.step > 1 else 0,
            cut=blocking.kept is not None,
        )
