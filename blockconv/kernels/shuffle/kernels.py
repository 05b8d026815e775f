"""The kernel of channel shuffles: tiles of pixels transposed to planes and back."""

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import Arguments, word
from blockconv.jit.ir import store_bits
from blockconv.kernels.common.operands import Operands
from blockconv.kernels.common.transposed_tile import TABLED_SRC, TileAddresses, TransposeShape, transpose_tile


class ShuffleSource(Arguments):
    """Neighbouring channels of the source, as many as a tile has."""

    offset = word("from the pixel's first channel", "bytes")
    plane = word("where the first of them goes in the scratch", "bytes")


class ShuffleResult(Arguments):
    """Neighbouring channels of the destination. As many offsets of planes follow."""

    offset = word("from the pixel's first channel", "bytes")


class ShuffleArgs(Operands):
    """A permutation of the channels of every pixel, where neighbouring channels, a tile's at least, are contiguous."""

    table = word("a `ShuffleSource` for each vector of these; then a `ShuffleResult` for each", "address")
    image = word("from an image, or a row of pixels that are equally far apart, to the next", "bytes")
    pixels = word("in an image, or in such a row")
    col = word("from a pixel to the next", "bytes")
    tiles = word("that these pixels make")
    sources = word("tiles of the source's channels")
    results = word("tiles of the destination's channels")
    zero = word("where the scratch has a plane of zeros, for channels that do not exist", "bytes")


@jit.kernel
def permute_channels(code, pixels, width):
    """A task is a tile of pixels, all channels, `width` at a time. Scratch: a vector of the pixels for each channel.

    code: of the elements' type, which is bits.
    """
    to_planes = TransposeShape(code, code, pixels, width, pixels, width, 0)
    to_tile = TransposeShape(code, code, width, pixels, width, pixels, TABLED_SRC)
    itemsize = ElementType.of(code).itemsize
    plane = pixels * itemsize

    def kernel(args, first, last, scratch):
        a = ShuffleArgs(args)
        col, tiles, sources, results = a.col, a.tiles, a.sources, a.results
        zero = scratch + a.zero
        for k in range(pixels):
            store_bits(zero + k * itemsize, 0, itemsize)
        for task in range(first, last):
            pixel = min(task % tiles * pixels, a.pixels - pixels)
            at = task // tiles * a.image + pixel * col
            src, dst = a.src + at, a.dst + at
            row = a.table
            for _ in range(sources):
                source = ShuffleSource(row)
                at, to = src + source.offset, scratch + source.plane
                transpose_tile(to_planes, TileAddresses(at, 0, col, pixels, to, 0, plane, width, width, 0, 0))
                row += ShuffleSource.nbytes
            for _ in range(results):
                result = ShuffleResult(row)
                offsets, to = row + ShuffleResult.nbytes, dst + result.offset
                tile = TileAddresses(scratch, offsets, 0, width, to, 0, col, pixels, pixels, 0, 0)
                transpose_tile(to_tile, tile)
                row += ShuffleResult.nbytes + 8 * width

    return kernel
