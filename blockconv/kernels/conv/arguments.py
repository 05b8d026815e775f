"""The argument blocks of convolution by tiles."""

from blockconv.jit.arguments import (
    Arguments,
    address,
    group,
    in_blocks,
    in_bytes,
    in_channels,
    in_columns,
    in_rows,
    kernel_address,
    word,
)
from blockconv.kernels.common.geometry import Geometry, ImageSizes
from blockconv.kernels.common.operands import ConvOperands
from blockconv.kernels.common.tile_record import TileRecord


class TilesArguments(ConvOperands, ImageSizes):
    """A convolution by tiles: what `conv_tiles` is called with, and the kernels that it calls.

    Pixels have the three axes of a `Space`: images of rows of columns. A group here is as many groups of the problem as
    share a vector. A task is some rows and columns of the destination, of one image and one group, and a share of the
    group's blocks of output channels. Its window is the part of the source that it reads. Where the window is packed in
    the scratch, its rows are [channel block][level of depth][row].
    """

    record = group(TileRecord, "what all tiles share; its steps are those of the whole reduction")
    offsets = address("from a pixel's source to what each step of its reduction reads: a table, in bytes")
    ic = word("input channels", "channels, or packed pairs of these")
    oc = in_channels("output channels")
    group_ic = word("input channels of a group", "channels, or packed pairs of these")
    group_oc = in_channels("output channels of a group")
    ic_blocks = in_blocks("blocks of channels in a window")
    k_blocks = in_blocks("blocks of steps: each is reduced for all tiles of a task before the next")
    k_steps = word("full steps of such a block; the last has what is left", "steps")
    tap_rows = in_rows("rows of taps, of which tiles take those inside the image; 0: they take all")
    tap_cols = in_columns("columns of taps, likewise")
    tap_row_steps = word("steps of a row of taps", "steps")
    step_bytes = in_bytes("of the weights of a step")
    tap_row = in_rows("from a row of taps to the next")
    tap_col = in_columns("from a column of taps to the next")
    biases = in_bytes("from `offsets` to a table: from the biases to those of each range of taps; 0: all are one")
    row_step = word("from a row of the window to the next", "rows of the source")
    col_step = word("from a column of the window to the next", "columns of the source")
    sh = in_rows("vertical stride")
    sw = in_columns("horizontal stride")
    depth = word("levels of a window: taps along an axis that is neither its rows nor its columns", "levels")
    depth_step = word("from a level to the next", "positions")
    depth_size = word("length of that axis", "positions")
    depth_bytes = in_bytes("from a position of that axis to the next")
    image_step = word("from an image's first level to that of the next", "positions")
    image_start = word("the first image's first level", "positions")
    source = group(Geometry, "the source's strides along image, row, column and channels, or packed pairs of these")
    destination = group(Geometry, "the destination's")
    parts = in_bytes("from `offsets` to a table: from each tile's first channel to what each store writes")
    parts_step = in_bytes("of a tile in it; 0: stores are `dst_block` apart, and there is no table")
    padded_oc = in_channels("output channels, with the destination's padding")
    groups = word("groups", "groups")
    window_rows = in_rows("rows of a window")
    window_cols = in_columns("columns of a panel of it")
    window_row = in_bytes("from a row of the window to the next")
    packed_row = in_bytes("likewise, as it is packed, before it is converted")
    packed_block = in_bytes("from a level of a block of channels to the next, as it is packed")
    packed_at = in_bytes("from a panel of the window to where it is packed")
    convert = kernel_address("what converts a packed panel; 0 where it is what tiles read")
    line = in_columns("columns of a row of the destination, where rows are one and the source's are not; else 0")
    line_bytes = in_bytes("from the source of such a row to that of the next")
    panel = in_columns("columns of the destination that share a panel of the window")
    panel_bytes = in_bytes("from a panel of the window to the next")
    sums_at = in_bytes("from the scratch to the accumulators of a task's tiles, where blocks of steps share them")
    tiles_at = in_bytes("from the scratch to three tiles and the records")
    in_place = word("whether tiles read the source where it is, and no window is packed", "0 or 1")
    task_rows = in_rows("rows of the largest task")
    row_tasks = word("tasks along an image's rows", "tasks")
    col_tasks = word("tasks along an image's columns", "tasks")
    ocbs = in_blocks("blocks of output channels of a group: as many as a tile has")
    splits = word("tasks that share these", "tasks")
    wei_block = in_bytes("from the weights of a block of output channels to those of the next")
    wei_blocks = in_blocks("blocks of weights of a group")
    pack = kernel_address("what packs a window, by a `WindowRecord`")
    tile = kernel_address("what computes a tile, by a `TileRecord`")
    enter = word(
        "what a worker calls before its tasks, with the address of 64 bytes; 0: nothing", "address of a kernel"
    )
    leave = kernel_address("what it calls after them, if anything before")
    scatter = word(
        "what moves a tile to its destination, by a `ScatterRecord`; 0 where none does", "address of a kernel"
    )
    scatters = word("whether all tiles are moved by it; else the padding after the last group alone", "0 or 1")
    tile_rows = in_rows("rows of a tile")
    tile_pixels = in_columns("columns of a tile")
    tile_bytes = in_bytes("of the accumulators of a tile")
    tile_width = in_channels("output channels of a tile")
    dst_shift = word("1 where two of the destination's channels share a byte, whose `length` is of channels; else 0")
    acc_itemsize = in_bytes("of an accumulator, and of a bias")
    scales_at = in_bytes("from an output channel's bias to its scale, where it has one")


class WindowRecord(Arguments):
    """A panel of a window that is to be packed."""

    window = address("where it goes")
    image = address("the source's image")
    channel = in_channels("its first channel")
    depth = word("its first level; may be outside", "positions")
    ih = in_rows("its first row; may be outside")
    iw = in_columns("its first column; may be outside")


class ScatterRecord(Arguments):
    """A tile [row][column][channel], with no gaps, that is moved to where its pixels belong, or from there.

    Where vectors run along pixels it is [row][channel][column].
    """

    tile = address("the tile")
    dst = address("its first pixel, at the first output channel of all")
    channel = in_channels("its first output channel")
    valid = in_channels("channels that exist")
    written = in_channels("channels that are written, as zero where they do not exist")
    gather = word("whether the tile is read from there", "0 or 1")


# Bytes of a tile's record, and of a record to pack or to scatter; these two share their place.
RECORDS = TileRecord.nbytes + max(WindowRecord.nbytes, ScatterRecord.nbytes)
