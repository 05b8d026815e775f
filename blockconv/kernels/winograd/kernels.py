"""Winograd convolution's kernels: products, pixels, the kernel that runs all stages block by block, and weights.

The stages (see `blockconv.kernels.winograd.rows`) are kernels of their own, called by their address. So the variants
for source layouts, destination layouts and the microkernel's tiles do not multiply.
"""

from blockconv import jit
from blockconv.jit.arguments import held
from blockconv.jit.ir import call_kernel, copy_memory, digits, fill_memory, move_part
from blockconv.kernels.common.geometry import Geometry
from blockconv.kernels.common.packed_pixels import bits_transposer
from blockconv.kernels.common.tile import LINE, Output
from blockconv.kernels.common.tile_record import TileRecord
from blockconv.kernels.winograd.arguments import HEADER_BYTES, ZEROS, Header, WinogradArgs, WinogradWeightsArgs
from blockconv.kernels.winograd.codegen import ELEMENT, multiply_shared, weight_transform
from blockconv.kernels.winograd.codegen_finish import (
    ROW_PIXELS,
    Finish,
    Products,
    destination_transform,
    finish_pixels,
    row_tiles,
)
from blockconv.kernels.winograd.source import tile_at
from blockconv.kernels.winograd.transforms import TAPS

ITEMSIZE = ELEMENT.itemsize
SOME = 8  # taps that are transposed together
LEAST_PIXELS = 4  # of planes that are stored together, unless it is one

# ---------------------------------------------------------------- second stage: products


def _weights_at(a, header, position):
    """The set's transformed weights of a position. With stride 2 all odd pixels meet one tap, the last of a side's."""
    side, last = a.side, a.wei_side - 1
    number = min(position // side, last) * (last + 1) + min(position % side, last)
    set_weights = a.wei + header.set_index * a.set_ocbs * a.wei_ocb
    return set_weights + number * a.wei_position


def _first_channel(a, ocb):
    """The set's output channel that a block begins with."""
    blocks = a.ocbs
    return ocb // blocks * a.group_oc + ocb % blocks * a.width


@jit.kernel
def winograd_multiply():
    """Multiply the scratch's transformed tiles with the weights of the set's output channel blocks first to last - 1.

    The products go to the scratch. For each position a call of `tile_kernel` takes all tiles and one block.
    """

    def kernel(a: WinogradArgs, first, last, scratch):
        header = Header(scratch)
        before, start = header.set_index * a.set_oc, _first_channel(a, first)
        width, channels, exist = a.width, a.tile_channels, min(a.set_oc, a.oc - before)
        run = header.record
        copy_memory(run.address, a.products_record.address, TileRecord.nbytes)
        run.bia = header.zeros.address
        ahead_bytes = run.tiles * run.prefetch_lines * (run.full_steps * LINE)
        for position in range(a.positions):
            v = scratch + a.v + position * a.v_position
            products = scratch + a.products + position * a.products_position
            weights = _weights_at(a, header, position)
            for ocb in range(first, last):
                oc = _first_channel(a, ocb)
                group = ocb // a.ocbs
                run.offsets = a.offsets + 8 * group * a.group_steps
                ahead = weights + (ocb + 1) * a.wei_ocb
                if ocb + 1 == last:
                    ahead = _weights_at(a, header, position + 1) + first * a.wei_ocb
                # The rest is nothing but the destination's padding.
                for part in range((min(width, exist - oc) + channels - 1) // channels):
                    c = part * channels
                    run.wei = weights + ocb * a.wei_ocb + c * ITEMSIZE
                    run.prefetch = ahead
                    ahead += ahead_bytes
                    run.src = v
                    run.dst = products + (oc + c - start) * a.products_channel
                    call_kernel(a.tile_kernel, run.address, 0, 0, 0)

    return kernel


@jit.kernel
def winograd_multiply_shared(lanes, part, fma: bool, channels):
    """The same, where a set is a vector of groups of so many channels, in and out: their weights stay in registers.

    part: lanes that are multiplied together.
    """
    vector, multiply = lanes * ITEMSIZE, multiply_shared(part, fma, channels)

    def kernel(a: WinogradArgs, first, last, scratch):
        header = Header(scratch)
        tiles, wei_group, products_tile = a.block_tiles, a.wei_ocb, a.products_tile
        v, products = scratch + a.v, scratch + a.products
        for position in range(a.positions):
            weights = _weights_at(a, header, position)
            for c in range(0, lanes, part):
                src, dst, wei = v + ITEMSIZE * c, products + ITEMSIZE * c, weights + c // channels * wei_group
                multiply(tiles, src, vector, dst, products_tile, wei, wei_group)
            v += a.v_position
            products += a.products_position

    return kernel


# ---------------------------------------------------------------- third stage: pixels


def _output(how):
    """output: where pixels of a vector go."""
    images, nbytes = how.lanes if how.period else 0, 8 * (how.lanes // how.store_width)

    def output(a, scratch, oc, dst):
        """`oc` is the first channel, `dst` the first pixel's address."""
        return Output(
            dst=dst,
            dst_row=a.dst_strides.row,
            dst_pixel=a.dst_strides.col,
            dst_block=a.offsets + a.dst_parts + oc // how.lanes * nbytes if how.has_parts else a.dst_block,
            residual=a.residual - a.dst,
            valid=a.oc - oc,
            written=images or a.oc_padded - oc,
            activation=a.activation,
            activate=a.activate,
        )

    return output


def _store_row(pixels, how):
    """store: a row of a patch, so many pixels at a time, or fewer where there are no more."""
    pixel, output, finish_them = how.lanes * ITEMSIZE, _output(how), finish_pixels(pixels, how)

    def store(a, scratch, oc, src, dst, cols):
        for col in range(0, cols, pixels):
            at = min(col, cols - pixels)  # the last ones are moved back to be as many
            finish_them(src + at * pixel, output(a, scratch, oc, dst + at * a.dst_strides.col))

    if pixels == 1:
        return store
    store_fewer = _store_row(pixels // 2 if pixels > LEAST_PIXELS else 1, how)

    def store_as_many(a, scratch, oc, src, dst, cols):
        if cols < pixels:
            store_fewer(a, scratch, oc, src, dst, cols)
        else:
            store(a, scratch, oc, src, dst, cols)

    return store_as_many


@jit.kernel
def winograd_store(how: Finish):
    """Finish and store the header's patch, from channel `first` on: planes a vector of pixels at a time, else pixels.

    If the lines of 16 planes were written bit by bit, all might map to the same few sets of the first-level cache.
    """
    row, store = ROW_PIXELS * how.lanes * ITEMSIZE, _store_row(how.lanes if how.is_planes else 1, how)

    def kernel(args: WinogradArgs, first, last, scratch):
        a, header = held(args), Header(scratch)
        for r in range(header.rows):
            store(a, scratch, first, scratch + HEADER_BYTES + r * row, header.dst + r * a.dst_strides.row, header.cols)

    return kernel


@jit.kernel
def winograd_finish(how: Finish):
    """Transform the products of tiles first to last - 1 and the header's channel blocks, and store their pixels.

    Whole tiles are stored at once. Planes, several tiles of a row, and tiles that lack pixels or channels are stored in
    a patch first, from which `store_kernel` stores them.
    """
    m, channels, planes, pixel = how.form.m, how.channels, how.is_planes, how.lanes * ITEMSIZE
    transform, output, most = destination_transform(how), _output(how), row_tiles(m) if planes else 1

    def kernel(a: WinogradArgs, first, last, scratch):
        header = Header(scratch)
        dst_row, dst_col = a.dst_strides.row, a.dst_strides.col
        number, last_ocb, patch = header.set_index, header.last_ocb, scratch + HEADER_BYTES
        before = number * a.set_oc
        start, end = _first_channel(a, header.first_ocb), _first_channel(a, last_ocb)
        if number + 1 == a.sets and last_ocb == a.set_ocbs:
            end = a.oc_padded - before
        for channel in range(start, end, channels):
            oc = before + channel
            plane = a.dst + Geometry.offset(a.dst_strides, oc)
            products, bia = scratch + a.products + (channel - start) * a.products_channel, a.bia + oc * ITEMSIZE
            tile = first
            while tile < last:
                row, col, n = tile_at(a, tile)
                count = min(most, last - tile, a.tile_cols - col)
                rows, cols = min(m, a.oh - row * m), min(count * m, a.ow - col * m)
                dst = plane + n * a.dst_strides.n + row * m * dst_row + col * m * dst_col
                is_whole = not planes and rows == m and cols == m and a.oc - oc >= channels
                for k in range(count if oc < a.oc else 0):  # the destination's padding has no products
                    given = Products(products, a.products_position, bia, bia + a.scales, a.activation)
                    transform(given, is_whole, output(a, scratch, oc, dst), patch + k * m * pixel)
                    products += a.products_tile
                if not is_whole:
                    header.rows, header.cols, header.dst = rows, cols, dst
                    call_kernel(a.store_kernel, a.address, oc, 0, scratch)
                tile += count

    return kernel


# ---------------------------------------------------------------- all three


@jit.kernel
def winograd():
    """A task is a block of tiles of a set and a share of its output channels; tasks of a block follow one another.

    It reads source, weights, bias and residual, and writes the pixels of its tiles and channels in the destination.
    """

    def kernel(a: WinogradArgs, first, last, scratch):
        header = Header(scratch)
        fill_memory(header.zeros.address, 8 * ZEROS, 0)
        tiles, splits, ocbs = a.block_tiles, a.splits, a.set_ocbs
        chunk, blocks, loaded = a.chunk, a.tile_blocks, -1
        for task in range(first, last):
            split, number = digits(task, splits)
            tile = min(number % blocks * tiles, a.tiles - tiles)
            if number != loaded:
                header.set_index = number // blocks
                call_kernel(a.source_kernel, a.address, tile, tile + tiles, scratch)
                loaded = number
            ocb, end = ocbs * split // splits, ocbs * (split + 1) // splits
            while ocb < end:
                upto = min(ocb + chunk, end)
                header.first_ocb = ocb
                header.last_ocb = upto
                call_kernel(a.multiply_kernel, a.address, ocb, upto, scratch)
                call_kernel(a.finish_kernel, a.address, tile, tile + tiles, scratch)
                ocb = upto

    return kernel


# ---------------------------------------------------------------- weights


@jit.kernel
def winograd_weights(exact, lanes, turned=0):
    """Transform weights; a task is an input channel of a block (vectors of `lanes`) of a group's output channels.

    exact: whether of integers; a task is then a pair of channels, whose weights are read where they are.
    turned: 0; 1: taps are in reverse order; 2: and output channels are contiguous.
    """
    pixel, taps = lanes * ITEMSIZE, TAPS * TAPS
    transpose = bits_transposer(ITEMSIZE, lanes, columns=SOME)
    begin = (taps - 1) * pixel if turned else 0
    transform = weight_transform(exact, 2 * lanes if exact else lanes)

    def kernel(a: WinogradWeightsArgs, first, last, scratch):
        steps, group_oc, oc_step, vectors = a.steps, a.group_oc, a.oc_step, a.vectors
        width, block = vectors * lanes, vectors * pixel
        blocks, tap = (group_oc + width - 1) // width, block if exact else -pixel if turned else pixel
        for task in range(first, last):
            step, ocb = digits(task, steps)
            for v in range(vectors):
                of_taps = a.src + task * (taps * block) + v * pixel
                if not exact:
                    oc, group = ocb % blocks * width + v * lanes, min(ocb // blocks, a.groups - 1)
                    src = a.src + group * a.group + oc * oc_step + step * a.ic_step
                    # Groups that the last set lacks are multiplied too, with zeros: denormal numbers would take long.
                    exist = group_oc - oc if group == ocb // blocks else 0
                    if turned == 2:
                        for t in range(taps):
                            move_part(scratch + t * pixel, src + t * a.tap_step, lanes, ITEMSIZE, exist)
                    else:
                        for t in range(taps - SOME + 1):
                            transpose(scratch + t * pixel, pixel, src + t * ITEMSIZE, oc_step, SOME, exist, lanes)
                    of_taps = scratch + begin
                dst = a.dst + ocb * a.ocb + (step * vectors + v) * pixel
                transform(of_taps, tap, dst, a.position, a.factors, a.side, a.odd)

    return kernel
