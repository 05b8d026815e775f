"""The kernels that pack windows for tiles whose vectors run along pixels, as `packing`'s are called."""

from blockconv import jit
from blockconv.jit.ir import digits, move, prefetch
from blockconv.kernels.common.copies import fill_pixels
from blockconv.kernels.common.packed_pixels import bits_transposer
from blockconv.kernels.conv.arguments import TilesArguments, WindowRecord
from blockconv.kernels.conv.codegen import strided_mover
from blockconv.kernels.conv.packing import columns_in_bounds, is_padding, source_offset


@jit.kernel
def pack_planes(vector_bytes):
    """`pack_window` for panels of vectors of pixels of planes, without padding or strides.

    Each plane is in other pages than the one before it, which no processor prefetches: here the next panel is.
    """

    def kernel(a: TilesArguments, wanted: WindowRecord):
        src = wanted.image + source_offset(a, wanted.channel) + wanted.depth * a.depth_bytes
        src += wanted.ih * a.source.row + wanted.iw * a.source.col
        out, rows, src_row, row_bytes, src_block = (
            wanted.window,
            a.window_rows,
            a.source.row,
            a.window_row,
            a.source.block,
        )
        for _ in range(a.ic_blocks):
            line = src
            for _ in range(rows):
                for k in range(0, row_bytes, vector_bytes):
                    move(out + k, line + k, vector_bytes, 0)
                    prefetch(line + row_bytes + k)
                line, out = line + src_row, out + row_bytes
            src += src_block

    return kernel


def _row_copier(stride, lanes, itemsize):
    """copy(dst, src, first, width, count): columns `first`, `first + stride`, ..., so many, of a row of `width`.

    Columns that the row does not have are zeros. Whole vectors are written, with any values past the last column.
    """
    whole, part = (strided_mover(stride, lanes, itemsize, is_whole) for is_whole in (True, False))

    def copy(dst, src, first, width, count):
        for k in range(0, count, lanes):
            to, col = dst + k * itemsize, first + k * stride
            if col >= 0 and col + lanes * stride <= width:
                whole(to, src + col * itemsize, 0, 0)
            else:
                part(to, src + col * itemsize, -col, width - col)

    return copy


@jit.kernel
def pack_phases(phases, stride, lanes, itemsize):
    """Pack a window of planes as [channel][level][row][phase][column]: the columns of a phase are every `stride`-th.

    A tap's vector of neighbouring pixels of the destination is then contiguous. phases: how many of them taps read,
    from the first on. lanes: of a vector. Padding is zeros.
    """
    copy = _row_copier(stride, lanes, itemsize)

    def kernel(a: TilesArguments, wanted: WindowRecord):
        out, cols, depth, rows, iw = wanted.window, a.window_cols, a.depth, a.window_rows, wanted.iw
        for block in range(a.ic_blocks * depth):
            z = wanted.depth + block % depth * a.depth_step
            plane = wanted.image + source_offset(a, wanted.channel + block // depth) + z * a.depth_bytes
            for r in range(rows):
                h = wanted.ih + r * a.row_step
                width = 0 if is_padding(a, h, z) else a.iw
                for phase in range(phases):
                    copy(out, plane + h * a.source.row, iw + phase, width, cols)
                    out += cols * itemsize

    return kernel


@jit.kernel
def pack_across(channels, touching, phases, stride, lanes, itemsize):
    """`pack_phases` for a source whose pixels have so many channels contiguous: vectors of them are transposed.

    touching: whether the next pixel's channels follow.
    """
    # As planes are packed, with pixels in the place of channels.
    transpose = bits_transposer(itemsize, lanes, columns=channels, is_dense=touching and stride == 1)

    def kernel(a: TilesArguments, wanted: WindowRecord):
        cols, ic, plane, step = a.window_cols, a.ic_blocks, a.depth * a.packed_block, stride * a.source.col
        row_bytes = cols * itemsize
        for line in range(a.depth * a.window_rows):
            r, level = digits(line, a.window_rows)
            z, h = wanted.depth + level * a.depth_step, wanted.ih + r * a.row_step
            for phase in range(phases):
                left, right = columns_in_bounds(a, wanted.iw + phase)
                if is_padding(a, h, z) or left == right:
                    left = right = cols
                out = wanted.window + level * a.packed_block + (r * phases + phase) * row_bytes
                src = wanted.image + z * a.depth_bytes + h * a.source.row
                src += (wanted.iw + phase + left * stride) * a.source.col
                for c in range(0, ic, channels):
                    at = src + source_offset(a, wanted.channel + c)
                    for k in range(min(channels, ic - c) if left else 0):
                        fill_pixels(out + (c + k) * plane, left, itemsize, 0)
                    for k in range(left, cols, lanes):
                        to = out + c * plane + k * itemsize
                        transpose(to, plane, at + (k - left) * step, step, ic - c, right - k, cols - k)

    return kernel


@jit.kernel
def pack_flat(stride, lanes, itemsize):
    """Pack a panel of planes as [channel][pixel], of a 1x1 with strides whose destination is flat, without padding.

    stride: between the columns of a row of the source. lanes: of a vector.
    """
    copy = _row_copier(stride, lanes, itemsize)

    def kernel(a: TilesArguments, wanted: WindowRecord):
        out, cols, line = wanted.window, a.window_cols, a.line
        row, col, width = wanted.iw // line, wanted.iw % line, (line - 1) * stride + 1
        for c in range(a.ic_blocks):
            src = wanted.image + source_offset(a, wanted.channel + c) + row * a.line_bytes
            done, first = 0, col
            while done < cols:
                count = min(cols - done, line - first)
                copy(out + done * itemsize, src, first * stride, width, count)
                done, first, src = done + count, 0, src + a.line_bytes
            out += cols * itemsize

    return kernel
