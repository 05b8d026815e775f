"""The argument blocks of Winograd's kernels, and the header of a worker's scratch."""

from blockconv.jit.arguments import Arguments, group, table, word
from blockconv.kernels.common.geometry import Geometry, ImageSizes
from blockconv.kernels.common.operands import ConvOperands
from blockconv.kernels.common.packed_images import PackRecord
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.tile_record import TileRecord


class WinogradScratch(Arguments):
    """A worker's scratch, from its beginning. The header and two tiles of pixels come first."""

    patch = word("to a window's gathered pixels, or a tile's finished ones", "bytes")
    v = word("to the transformed source, [position][vector of channels][tile]", "bytes")
    v_position = word("from a position of the transformed source to the next", "bytes")
    products = word("to the held products, [position][tile][output channel]", "bytes")
    products_position = word("from a position of the products to the next", "bytes")
    products_tile = word("from a tile's products of a position to the next tile's", "bytes")
    products_channel = word("from an output channel's products of a position to the next one's", "bytes")


class WinogradArgs(ConvOperands, ImageSizes, WinogradScratch):
    """The arguments of the kernel `winograd` and of its three stages.

    A set is the groups whose channels are transformed together; they are whole vectors. A block of tiles is what a task
    transforms at once. A position is one of the `side`² products of a tile. Transformed weights are [group][block of
    output channels][position][input channel].
    """

    products_record = group(TileRecord, "what the microkernel's calls share")
    scales = word("from the biases to the scales of integer products, as many", "bytes")
    offsets = word(
        "for each group of a set, a table: from a tile's transformed source to each reduction step, in bytes", "address"
    )
    pack_kernel = word("what packs windows of the source, by a `PackRecord`", "address of a kernel")
    source_kernel = word("the first stage", "address of a kernel")
    multiply_kernel = word("the second stage", "address of a kernel")
    finish_kernel = word("the third stage", "address of a kernel")
    store_kernel = word("what it stores patches by", "address of a kernel")
    tiles = word("tiles of all images", "tiles")
    tile_images = word("images whose tiles are one: of a vector, or 1", "images")
    last_image = word("the last image that such a tile may begin with", "images")
    tile_rows = word("rows of tiles of an image", "rows")
    tile_cols = word("tiles of a row", "tiles")
    block_tiles = word("tiles of a block", "tiles")
    splits = word("tasks that share a block's output channels", "tasks")
    set_ocbs = word("blocks of output channels of a set", "blocks")
    chunk = word("blocks of output channels whose products are held before they are transformed", "blocks")
    positions = word("products of a tile for each pair of channels")
    ic = word("input channels of all groups", "channels")
    oc = word("output channels of all groups", "channels")
    oc_padded = word("those, with the destination's padding", "channels")
    src_channels = word("input channels of a vector: of one, its lanes are images", "channels")
    set_vectors = word("vectors of a set's input channels", "vectors")
    src_strides = group(Geometry)
    lane_strides = group(Geometry, "the source's, where lanes are channels; where they are images, these are its block")
    dst_strides = group(Geometry)
    dst_block = word("from the channels that are stored together to the next such", "bytes")
    wei_position = word("from a position of the weights to the next", "bytes")
    wei_ocb = word("from a block of output channels' weights to the next", "bytes")
    tile_kernel = word("the microkernel, or 0 where groups share a vector", "address of a kernel")
    tile_pixels = word("tiles that it takes, as its pixels", "tiles")
    tile_channels = word("output channels of a block that it takes", "channels")
    width = word("output channels of a block", "channels")
    vector = word("a vector of the transformed source", "bytes")
    prefetch_rows = word("rows of the next tile's source that are prefetched", "rows")
    src_end = word("the end of the source", "address")
    window_rows = word("rows of tiles whose source is gathered together, as a window", "rows")
    window_cols = word("tiles of such a row", "tiles")
    window_leading = word("from a row of a window to the next", "pixels")
    side = word("source pixels that a tile reads in each direction", "pixels")
    step = word("from a tile's first source pixel to the next tile's", "pixels")
    wei_side = word("positions of the weights in each direction")
    sets = word("sets of groups", "sets")
    tile_blocks = word("blocks of tiles", "blocks")
    set_ic = word("input channels of a set", "channels")
    set_oc = word("output channels of a set", "channels")
    ocbs = word("blocks of output channels of a group", "blocks")
    group_oc = word("output channels of a group, with the destination's padding if there is only one", "channels")
    group_steps = word("reduction steps of a group", "steps")
    # For layouts whose blocks end within a vector: a table for each vector of channels, one after the other.
    dst_parts = word("from `offsets` to the destination's: from a vector's first channel to its parts", "bytes")


class WinogradWeightsArgs(Arguments):
    """The arguments of `winograd_weights`."""

    src = word(
        "weights of all groups, (oc, a group's ic, 3, 3); or [group][block of output channels][pair of input channels]"
        "[tap][channel of the block][channel of the pair]",
        "address",
    )
    dst = word(
        "transformed weights: [group][block of output channels][position][input channel][channel of the block]",
        "address",
    )
    factors = word("a table: of each value, what the taps are multiplied by; bits of float64s, or integers", "address")
    side = word("values in each direction", "positions")
    odd = word("see `transforms.odd_tap`", "1 or 2")
    position = word("from a position of a block to the next", "bytes")
    ocb = word("from a block of output channels to the next", "bytes")
    groups = word("groups that exist; of others, weights are zeros", "groups")
    group = word("from a group's weights to the next one's", "bytes")
    group_oc = word("output channels of a group", "channels")
    steps = word("input channels of a group, or pairs of them", "steps")
    ic_step = word("from the weights of an input channel to those of the next", "bytes")
    oc_step = word("from those of an output channel to those of the next", "bytes")
    tap_step = word("from a tap to the next, where output channels are contiguous", "bytes")


ZEROS = 32  # words: more than the bias of a block of output channels takes


class Held(Arguments):
    """A word of a line of memory."""

    value = word("see the line")


class Header(Arguments):
    """The header that a worker's scratch begins with."""

    set_index = word("the set of groups that is worked on")
    first_ocb = word("the first block of the set's output channels whose products are held")
    last_ocb = word("the one after the last such")
    rows = word("rows of the patch that is stored", "pixels")
    cols = word("its columns", "pixels")
    dst = word("the destination of its first pixel", "address")
    zeros = table(Held, ZEROS, "read in place of a bias")
    record = group(TileRecord)
    pack = group(PackRecord)


HEADER_BYTES = -(-Header.nbytes // LINE) * LINE  # two tiles of pixels follow it, for `Output.scratch`
