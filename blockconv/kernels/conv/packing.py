"""The kernels that pack the windows of convolution by tiles; each is called with the addresses of `TilesArguments` and
of a `WindowRecord`."""

from blockconv import jit
from blockconv.core import target
from blockconv.core.types import ElementType, element
from blockconv.jit.ir import copy_memory, fill_memory, move, move_part
from blockconv.kernels.common.copies import fill_pixels, gather_blocks
from blockconv.kernels.common.geometry import NO_BLOCK, Geometry
from blockconv.kernels.common.packed_pixels import PixelPacking, Pixels, pixel_packer
from blockconv.kernels.common.requantize import EpilogueArguments
from blockconv.kernels.conv.arguments import TilesArguments, WindowRecord
from blockconv.kernels.conv.codegen import ChannelAddresses, interleaver, line_packer, moved, window_converter

UNIT = 4  # bytes


def source_offset(a, c):
    """From the source's first channel to channel `c`, in bytes."""
    return Geometry.offset(a.source, c)


def columns_in_bounds(a, iw):
    """(first, past the last) of a window's columns, from `iw` on, that are inside the image."""
    cols, step = a.window_cols, a.col_step
    left = min(cols, max(0, (-iw + step - 1) // step))
    return left, max(left, min(cols, (a.iw - iw + step - 1) // step))


def is_padding(a, h, z):
    """Whether row `h` of level `z` is outside the source."""
    return h < 0 or h >= a.ih or z < 0 or z >= a.depth_size


@jit.kernel
def pack_window(cb, itemsize):
    """Pack a window, all its blocks of `cb` channels, as [block][level][row][column][channel].

    Padding is zeros. Channels of one byte are integers, whose padding is the zero point. Any values are packed in place
    of channels that do not exist: their weights are zero.
    """
    chunk = cb * itemsize

    def kernel(a: TilesArguments, wanted: WindowRecord):
        fill = EpilogueArguments(a.activation).src_fill if itemsize == 1 else 0
        window, image, channel = wanted.window, wanted.image, wanted.channel
        depth, ih, iw = wanted.depth, wanted.ih, wanted.iw
        cols, row_bytes, w_block = a.window_cols, a.packed_row, a.packed_block
        col_step, s_col, s_len = a.col_step, a.source.col, a.source.length
        step, blocks, rows = col_step * s_col, a.ic_blocks, a.window_rows
        left, right = columns_in_bounds(a, iw)
        # Blocks that are neighbours in the source are copied pixel by pixel: its lines are read once, in order.
        contiguous = min(blocks, max(1, s_len // cb))
        if (s_len < NO_BLOCK and channel % s_len) or a.depth > 1:
            contiguous = 1  # a group that begins inside a block of the source ends in another; levels are in between
        for part in range((blocks + contiguous - 1) // contiguous):
            first, count = part * contiguous, min(contiguous, blocks - part * contiguous)
            src_block = image + source_offset(a, channel + first * cb)
            # A source's padding is read with the rest; without padding, only the tail is read.
            tail = a.group_ic - (first + count - 1) * cb
            padded = tail >= cb or (s_len < NO_BLOCK and a.groups == 1)
            full = count if padded else count - 1
            for level in range(a.depth):
                z = depth + level * a.depth_step
                plane = src_block + z * a.depth_bytes + (iw + left * col_step) * s_col
                out = window + (first * a.depth + level) * w_block - row_bytes
                for r in range(rows):
                    out += row_bytes
                    h = ih + r * a.row_step
                    first_col, end_col = (cols, cols) if is_padding(a, h, z) else (left, right)
                    for k in range(count):
                        fill_pixels(out + k * w_block, first_col, chunk, fill)
                        fill_pixels(out + k * w_block + end_col * chunk, cols - end_col, chunk, fill)
                    if first_col == end_col:
                        continue
                    src, dst = plane + h * a.source.row, out + left * chunk
                    if count == 1 and padded:
                        gather_blocks(dst, src, (right - left) * chunk, chunk, step)
                        continue
                    # Channels of less than 32 bits may be packed with what follows a pixel's last ones in the row.
                    followed = right - left - (chunk - tail * itemsize + step - 1) // step if itemsize < 4 else 0
                    for p in range(right - left):
                        for k in range(full):
                            move(dst + k * w_block, src + k * chunk, chunk, 0)
                        if full < count and p < followed:
                            move(dst + full * w_block, src + full * chunk, chunk, 0)
                        elif full < count:
                            copy_memory(dst + full * w_block, src + full * chunk, tail * itemsize)
                        src, dst = src + step, dst + chunk

    return kernel


def window_packer(pixel: int, filled, begin, pack):
    """A kernel that packs a window as [block][level][row][column], of pixels of so many bytes.

    filled: padding is the zero point, and not zeros. begin(a, wanted, block): which channels a block has. pack(a,
    wanted, of, dst, src, count, step): packs them, of a row's `count` pixels that are inside the image. src, step: the
    first one's channel 0; from a pixel to the next. of: what `begin` returns.
    """

    def kernel(a: TilesArguments, wanted: WindowRecord):
        fill = EpilogueArguments(a.activation).src_fill if filled else 0
        cols, rows, levels, first, ih = a.window_cols, a.window_rows, a.depth, wanted.depth, wanted.ih
        row_bytes, row_step, src_row, step = a.packed_row, a.row_step, a.source.row, a.col_step * a.source.col
        left, right = columns_in_bounds(a, wanted.iw)
        start = wanted.image + wanted.iw * a.source.col + left * step
        for plane in range(a.ic_blocks * levels):
            of, z = begin(a, wanted, plane // levels), first + plane % levels * a.depth_step
            for r in range(rows):
                out, h = wanted.window + plane * a.packed_block + r * row_bytes, ih + r * row_step
                if is_padding(a, h, z) or left == right:
                    fill_pixels(out, cols, pixel, fill)
                    continue
                fill_pixels(out, left, pixel, fill)
                src = start + z * a.depth_bytes + h * src_row
                pack(a, wanted, of, out + left * pixel, src, right - left, step)
                fill_pixels(out + right * pixel, cols - right, pixel, fill)

    return kernel


@jit.kernel
def pack_cut_window(cb, itemsize):
    """`pack_window` for groups that begin inside the source's blocks: a block of the window spans two of these."""

    def begin(a, wanted, block):
        c, count = wanted.channel + block * cb, min(cb, a.group_ic - block * cb)
        head = min(count, a.source.length - c % a.source.length)
        return source_offset(a, c), source_offset(a, c + head), head, count

    def pack(a, wanted, of, dst, src, pixels, step):
        first, second, head, count = of
        for _ in range(pixels):  # the next pixel overwrites what is moved too much
            move_part(dst, src + first, cb, itemsize, head)
            if head < count:
                move_part(dst + head * itemsize, src + second, cb, itemsize, count - head)
            src, dst = src + step, dst + cb * itemsize

    return window_packer(cb * itemsize, False, begin, pack)


@jit.unrolled_kernel
def pack_pixels(channels, cb, pitch, lanes, itemsize, filled=0):
    """Pack a window of groups that share a vector, as [level][row][column][pitch].

    channels: of these groups; the source has `cb` at a time contiguous. pitch: channels and padding of a pixel. filled:
    padding is the zero point, of elements of four bytes, and not zeros.
    """
    pixel, pack_line = pitch * itemsize, line_packer(channels, cb, pitch, lanes, itemsize)

    def begin(a, wanted, block):
        channel = wanted.channel
        return source_offset(a, channel), channel % a.source.length, min(channels, a.ic - channel)

    def pack(a, wanted, of, dst, src, count, step):
        offset, inside, exist = of
        s_len, first = a.source.length, src + offset
        # A source's padding is read with the rest, where it has any.
        if cb == s_len or (cb == channels and (exist == channels or s_len < NO_BLOCK)):
            pack_line(dst, first, count, step, a.source.block, (exist - 1) // cb)
            return
        # Groups begin and end inside the source's blocks. The next pixel overwrites what is moved too much.
        start = first - inside * itemsize
        for p in range(count):
            c, at, size, block = 0, first + p * step, min(exist, s_len - inside), start + p * step
            while c < exist:
                for k in range(0, size, lanes):
                    move_part(dst + p * pixel + (c + k) * itemsize, at + k * itemsize, lanes, itemsize, size - k)
                c, block = c + size, block + a.source.block
                at, size = block, min(s_len, exist - c)

    return window_packer(pixel, filled, begin, pack)


def channel_addresses(a, at, c, last):
    """The addresses of four channels, or of a pair, from `c` on. Past the last one, it stands for the others."""
    c0, c1 = at + source_offset(a, min(c, last)), at + source_offset(a, min(c + 1, last))
    c2, c3 = at + source_offset(a, min(c + 2, last)), at + source_offset(a, min(c + 3, last))
    return ChannelAddresses(c0, c1, c2, c3, last - c)


@jit.kernel
def pack_interleaved(unit, vector_bytes=0):
    """Pack a window of a source whose channels are not contiguous in fours of bytes, or in pairs of 16-bit floats.

    unit: 4 or 2. The packed order is [four or pair][level][row][column][channel]. Where the source's pixels are
    neighbours, planes are interleaved in registers. vector_bytes: whole vectors of them, for matrices, whose last fours
    or pairs may not exist; 0: by sixteen and four pixels.
    """
    interleave = interleaver(unit, vector_bytes)

    def begin(a, wanted, part):
        return channel_addresses(a, 0, wanted.channel + unit * part, wanted.channel + a.group_ic - 1)

    def pack(a, wanted, of, dst, src, count, step):
        # Past the last channel, weights are zero: bytes repeat the last channel, floats are zeros.
        if vector_bytes == 0 or unit == 4 or of.others >= 0:
            interleave(moved(of, src), dst, count, step)
        else:
            fill_memory(dst, count * 4, 0)

    return window_packer(4, unit == 4, begin, pack)


def _row_bytes(cols, lanes: int):
    """Bytes of a unit's row of so many columns, in whole vectors."""
    return (cols + lanes - 1) // lanes * (lanes * UNIT)


def spare_bytes(isa: target.Isa, units: int, cols: int, extent: int) -> int:
    """Bytes past a window's end that are written while windows of so many columns are packed; see `pack_units`."""
    return 0 if extent else units * _row_bytes(cols, isa.vector_bytes // UNIT)


@jit.kernel
def pack_units(units, extent, unit, is_float):
    """Pack a window as [block][level][row][column][unit], units of four bytes, of `unit` channels each.

    units: of a pixel that are packed together. extent: how many of them are contiguous in the source; 0: not even
    channels are. These are interleaved first, into a row of each unit after the window. is_float: zeros are packed in
    place of channels that do not exist; integers may have any values there, since their weights are zero.
    """
    lanes, channels = target.isa().vector_bytes // UNIT, units * unit
    # Floats end inside a unit.
    each, kind = (unit, element("bfloat16")) if is_float and extent else (1, element("int32"))
    size, at_once = UNIT // each, each * min(lanes, units & -units)
    joins = extent * each if 0 < extent * each < at_once and at_once % (extent * each) == 0 else 0
    pack_extents = pixel_packer(PixelPacking(kind, kind, at_once, 1, joins))
    pack_planes = pixel_packer(PixelPacking(kind, kind, lanes, 2, 0, units if units < lanes else 0))
    interleave = interleaver(unit)

    def begin(a, wanted, block):
        channel, last = wanted.channel + block * channels, wanted.channel + a.group_ic - 1
        return channel, last, source_offset(a, channel)

    def pack(a, wanted, of, dst, src, count, step):
        channel, last, offset = of
        exist = (min(channels, last + 1 - channel) * each + unit - 1) // unit
        if extent:
            at, block = src + offset, a.source.block
            pack_extents(
                Pixels(at, step, block, extent * each, size, 0, exist, dst, at_once * size, units * each, count)
            )
        else:
            spare, row = wanted.window + a.panel_bytes, _row_bytes(count, lanes)
            for k in range(units):
                planes = channel_addresses(a, src, channel + k * unit, last)
                interleave(planes, spare + k * row, count, step)
            pack_planes(Pixels(spare, UNIT, row, 1, UNIT, 0, exist, dst, lanes * UNIT, units, count))

    return window_packer(units * UNIT, not is_float, begin, pack)


@jit.kernel
def convert_window(type: ElementType, itemsize, flipped, size):
    """Convert a packed window to what tiles read. Arguments: destination, source, number of bytes, one that is unused.

    type: of the source. Bytes are widened, or if `itemsize` is 1, their highest bit is flipped: a signed byte
    becomes 128 more, unsigned. Packed pairs of 4 bits become two channels, and floats of 16 bits float32.
    itemsize: of a channel there. flipped: whether signed 4 bits become unsigned, 8 more. size: bytes of the source that
    are converted at once; up to so many past the last are read, and as many channels written. Both may be one memory,
    whose second half is widened to the whole of it.
    """
    convert = window_converter(type, itemsize, flipped, size)
    each = 2 * itemsize if type.is_packed else itemsize // type.itemsize  # bytes that a byte becomes

    def kernel(dst, src, count):
        for at in range(0, count, size):
            convert(dst + at * each, src + at)

    return kernel


@jit.kernel
def unpack_pixels(cb, type: ElementType, itemsize, flipped, lanes):
    """`pack_window` and `convert_window` in one, of a 1x1 convolution without stride or padding, whose pixels touch.

    cb: packed pairs of a pixel that are contiguous in the source, a multiple of `lanes`.
    """
    unpack = window_converter(type, itemsize, flipped, lanes)

    def kernel(a: TilesArguments, wanted: WindowRecord):
        size, out = a.window_cols * cb, wanted.window
        first = wanted.image + wanted.ih * a.source.row + wanted.iw * a.source.col
        for block in range(a.ic_blocks):
            line = first + source_offset(a, wanted.channel + block * cb)
            for _ in range(a.window_rows):
                for at in range(0, size, lanes):
                    unpack(out + 2 * itemsize * at, line + at)
                line, out = line + a.row_step * a.source.row, out + a.window_row

    return kernel
