"""Winograd convolution's first stage: tiles of the source as vectors of channels, transformed.

Tiles overlap: a pixel is in up to nine of them. So the window of pixels that neighbouring tiles read is gathered once,
with the border around the image, by a kernel of its own. All its tiles are transformed from there.
Where pixels are vectors anyway, a window inside the image is read in place. A large image has few edges, so there a
window is a single tile.
"""

from typing import NamedTuple

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.ir import call_kernel, digits, prefetch
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry
from blockconv.kernels.common.requantize import EpilogueArguments
from blockconv.kernels.winograd.arguments import HEADER_BYTES, Header, WinogradArgs
from blockconv.kernels.winograd.codegen import ELEMENT, TRANSFORMED, source_transform
from blockconv.kernels.winograd.transforms import Form


def tile_at(a, tile):
    """(row, column, first image) of a tile."""
    col, row, images = digits(tile, a.tile_cols, a.tile_rows)
    return row, col, min(images * a.tile_images, a.last_image)


def _tiles_of_window(a, row, col, count):
    """(rows, columns) of tiles of a window, of the next `count` tiles: several rows only where these are whole."""
    cols = min(count, a.tile_cols - col)
    if cols < a.tile_cols or a.window_cols < cols:
        return 1, min(cols, a.window_cols)
    return min(min(count // cols, a.tile_rows - row), a.window_rows), cols


def _prefetch_next(a, src):
    """Prefetch the pixels that the tile to the right adds: the processor does not foresee so few lines in a row."""
    for r in range(a.prefetch_rows):
        for k in range(a.side, a.side + a.step):
            prefetch(src + r * a.src_strides.row + k * a.src_strides.col)


class Source(NamedTuple):
    """How a source is read.

    lanes: of a vector, channels or images of one; `part` of them are transformed together.
    in_place: whether a window is a tile, which is read in place inside the image, where all lanes are contiguous.
    type: the source's.
    """

    form: Form
    lanes: int
    part: int
    fma: bool
    in_place: bool
    type: ElementType

    @property
    def pixel(self) -> int:
        """Bytes of a vector of the source."""
        return self.lanes * self.type.itemsize

    @property
    def vector(self) -> int:
        """Bytes of a transformed one."""
        return self.lanes * (TRANSFORMED if self.form.exact else ELEMENT).itemsize


def _transform_tiles(how):
    """transform: the tiles of a window that begins at `src`, to vectors from `dst` on."""
    code, parts = source_transform(how.form, how.part, how.fma, how.type), how.lanes // how.part

    def transform(a, src, by_row, by_col, rows, cols, dst):
        for r in range(rows):
            for k in range(cols):
                at = src + r * a.step * by_row + k * a.step * by_col
                for part in range(parts):
                    here, to = at + part * (how.pixel // parts), dst + part * (how.vector // parts)
                    code(here, by_row, by_col, to, a.v_position)
                dst += how.vector

    return transform


@jit.kernel
def winograd_source(how: Source):
    """Transform tiles first to last - 1 of the header's set, all its channels, from the source into the scratch."""
    lanes, pixel, vector, transform = how.lanes, how.pixel, how.vector, _transform_tiles(how)

    def kernel(a: WinogradArgs, first, last, scratch):
        header = Header(scratch)
        window, v, pack = scratch + HEADER_BYTES, scratch + a.v, header.pack
        src_row, src_col = a.src_strides.row, a.src_strides.col
        side, step, leading, channels = a.side, a.step, a.window_leading * pixel, a.src_channels
        pack.dst, pack.strides, pack.width, pack.row_bytes = window, a.lane_strides.address, lanes, leading
        pack.height, pack.length, pack.row_step, pack.col_step = a.ih, a.iw, 1, 1
        border, tile = EpilogueArguments(a.activation).src_fill & 0xFF if how.form.exact else 0, first
        while tile < last:
            row, col, n = tile_at(a, tile)
            rows, cols = (1, 1) if how.in_place else _tiles_of_window(a, row, col, last - tile)
            ih, iw = row * step - a.ph, col * step - a.pw
            height, width = (rows - 1) * step + side, (cols - 1) * step + side
            image = a.src + n * a.src_strides.n
            start = image + ih * src_row + iw * src_col
            room = a.src_end - start - (height - 1) * src_row - (width - 1) * src_col - pixel
            inside = how.in_place and ih >= 0 and iw >= 0 and ih + height <= a.ih and iw + width <= a.iw
            pack.ih, pack.iw, pack.rows, pack.cols, pack.border = ih, iw, height, width, border
            out = v + (tile - first) * vector
            for block in range(a.set_vectors):
                c = header.set_index * a.set_ic + block * channels
                valid = min(channels, a.ic - c) * (lanes // channels)
                if valid <= 0:
                    break  # the last set has fewer groups
                offset = Geometry.offset(a.src_strides, c)
                at, by_row, by_col = start + offset, src_row, src_col
                # What follows the channels that exist is read too, and not multiplied.
                if inside and (valid == lanes or a.src_strides.length < NO_BLOCK or offset <= room):
                    _prefetch_next(a, at)
                else:
                    pack.image, pack.inside, pack.channels = image + offset, c % a.lane_strides.length, valid
                    call_kernel(a.pack_kernel, pack.address, 0, 0, 0)
                    pack.border = -1  # the next channels' window has the same
                    at, by_row, by_col = window, leading, pixel
                transform(a, at, by_row, by_col, rows, cols, out)
                out += a.block_tiles * vector
            tile += rows * cols

    return kernel
