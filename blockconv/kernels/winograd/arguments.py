"""The argument blocks of Winograd's kernels, and the header of a worker's scratch."""

from blockconv.jit.arguments import (
    Arguments,
    address,
    group,
    in_blocks,
    in_bytes,
    in_channels,
    in_pixels,
    in_rows,
    kernel_address,
    table,
    word,
)
from blockconv.kernels.common.geometry import Geometry, ImageSizes
from blockconv.kernels.common.operands import ConvOperands
from blockconv.kernels.common.packed_images import PackRecord
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.tile_record import TileRecord


class WinogradScratch(Arguments):
    """A worker's scratch. The header comes first, then the *patch*: a window's gathered pixels, or finished tiles."""

    v = in_bytes("to the transformed source, [position][vector of channels][tile]")
    v_position = in_bytes("from a position of the transformed source to the next")
    products = in_bytes("to the held products, [position][tile][output channel]")
    products_position = in_bytes("from a position of the products to the next")
    products_tile = in_bytes("from a tile's products of a position to the next tile's")
    products_channel = in_bytes("from an output channel's products of a position to the next one's")


class WinogradArgs(ConvOperands, ImageSizes, WinogradScratch):
    """The arguments of the kernel `winograd` and of its three stages.

    A set is the groups whose channels are transformed together; they are whole vectors. A block of tiles is what a task
    transforms at once. A position is one of the `side`² products of a tile. Transformed weights are [group][block of
    output channels][position][input channel].
    """

    products_record = group(TileRecord, "what the microkernel's calls share")
    scales = in_bytes("from the biases to the scales of integer products, as many")
    offsets = word(
        "for each group of a set, a table: from a tile's transformed source to each reduction step, in bytes", "address"
    )
    pack_kernel = kernel_address("what packs windows of the source, by a `PackRecord`")
    source_kernel = kernel_address("the first stage")
    multiply_kernel = kernel_address("the second stage")
    finish_kernel = kernel_address("the third stage")
    store_kernel = kernel_address("what it stores patches by")
    tiles = word("tiles of all images", "tiles")
    tile_images = word("images whose tiles are one: of a vector, or 1", "images")
    last_image = word("the last image that such a tile may begin with", "images")
    tile_rows = in_rows("rows of tiles of an image")
    tile_cols = word("tiles of a row", "tiles")
    block_tiles = word("tiles of a block", "tiles")
    splits = word("tasks that share a block's output channels", "tasks")
    set_ocbs = in_blocks("blocks of output channels of a set")
    chunk = in_blocks("blocks of output channels whose products are held before they are transformed")
    positions = word("products of a tile for each pair of channels")
    ic = in_channels("input channels of all groups")
    oc = in_channels("output channels of all groups")
    oc_padded = in_channels("those, with the destination's padding")
    src_channels = in_channels("input channels of a vector: of one, its lanes are images")
    set_vectors = word("vectors of a set's input channels", "vectors")
    src_strides = group(Geometry)
    lane_strides = group(Geometry, "the source's, where lanes are channels; where they are images, these are its block")
    dst_strides = group(Geometry)
    dst_block = in_bytes("from the channels that are stored together to the next such")
    wei_position = in_bytes("from a position of the weights to the next")
    wei_ocb = in_bytes("from a block of output channels' weights to the next")
    tile_kernel = kernel_address("the microkernel, or 0 where groups share a vector")
    tile_pixels = word("tiles that it takes, as its pixels", "tiles")
    tile_channels = in_channels("output channels of a block that it takes")
    width = in_channels("output channels of a block")
    vector = in_bytes("a vector of the transformed source")
    prefetch_rows = in_rows("rows of the next tile's source that are prefetched")
    src_end = address("the end of the source")
    window_rows = in_rows("rows of tiles whose source is gathered together, as a window")
    window_cols = word("tiles of such a row", "tiles")
    window_leading = in_pixels("from a row of a window to the next")
    side = in_pixels("source pixels that a tile reads in each direction")
    step = in_pixels("from a tile's first source pixel to the next tile's")
    wei_side = word("positions of the weights in each direction")
    sets = word("sets of groups", "sets")
    tile_blocks = in_blocks("blocks of tiles")
    set_ic = in_channels("input channels of a set")
    set_oc = in_channels("output channels of a set")
    ocbs = in_blocks("blocks of output channels of a group")
    group_oc = in_channels("output channels of a group, with the destination's padding if there is only one")
    group_steps = word("reduction steps of a group", "steps")
    # For layouts whose blocks end within a vector: a table for each vector of channels, one after the other.
    dst_parts = in_bytes("from `offsets` to the destination's: from a vector's first channel to its parts")


class WinogradWeightsArgs(Arguments):
    """The arguments of `winograd_weights`."""

    src = address(
        "weights of all groups, (oc, a group's ic, 3, 3); or [group][block of output channels][pair of input channels]"
        "[tap][channel of the block][channel of the pair]",
    )
    dst = address(
        "transformed weights: [group][block of output channels][position][input channel][channel of the block]",
    )
    factors = address("a table: of each value, what the taps are multiplied by; bits of float64s, or integers")
    side = word("values in each direction", "positions")
    odd = word("see `transforms.odd_tap`", "1 or 2")
    position = in_bytes("from a position of a block to the next")
    ocb = in_bytes("from a block of output channels to the next")
    groups = word("groups that exist; of others, weights are zeros", "groups")
    group = in_bytes("from a group's weights to the next one's")
    group_oc = in_channels("output channels of a group")
    vectors = word("of a block of output channels", "vectors")
    steps = word("input channels of a group, or pairs of them", "steps")
    ic_step = in_bytes("from the weights of an input channel to those of the next")
    oc_step = in_bytes("from those of an output channel to those of the next")
    tap_step = in_bytes("from a tap to the next, where output channels are contiguous")


ZEROS = 32  # words: more than the bias of a block of output channels takes


class Held(Arguments):
    """A word of a line of memory."""

    value = word("see the line")


class Header(Arguments):
    """The header that a worker's scratch begins with."""

    set_index = word("the set of groups that is worked on")
    first_ocb = word("the first block of the set's output channels whose products are held")
    last_ocb = word("the one after the last such")
    rows = in_pixels("rows of the patch that is stored")
    cols = in_pixels("its columns")
    dst = address("the destination of its first pixel")
    zeros = table(Held, ZEROS, "read in place of a bias")
    record = group(TileRecord)
    pack = group(PackRecord)


HEADER_BYTES = -(-Header.nbytes // LINE) * LINE
