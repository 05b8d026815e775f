"""The argument blocks of convolution by tiles."""

from blockconv.jit.arguments import Arguments, group, word
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
    offsets = word("from a pixel's source to what each step of its reduction reads: a table, in bytes", "address")
    ic = word("input channels", "channels, or packed pairs of these")
    oc = word("output channels", "channels")
    group_ic = word("input channels of a group", "channels, or packed pairs of these")
    group_oc = word("output channels of a group", "channels")
    ic_blocks = word("blocks of channels in a window", "blocks")
    k_blocks = word("blocks of steps: each is reduced for all tiles of a task before the next", "blocks")
    k_steps = word("full steps of such a block; the last has what is left", "steps")
    tap_rows = word("rows of taps, of which tiles take those inside the image; 0: they take all", "rows")
    tap_cols = word("columns of taps, likewise", "columns")
    tap_row_steps = word("steps of a row of taps", "steps")
    step_bytes = word("of the weights of a step", "bytes")
    tap_row = word("from a row of taps to the next", "rows")
    tap_col = word("from a column of taps to the next", "columns")
    biases = word("from `offsets` to a table: from the biases to those of each range of taps; 0: all are one", "bytes")
    row_step = word("from a row of the window to the next", "rows of the source")
    col_step = word("from a column of the window to the next", "columns of the source")
    sh = word("vertical stride", "rows")
    sw = word("horizontal stride", "columns")
    depth = word("levels of a window: taps along an axis that is neither its rows nor its columns", "levels")
    depth_step = word("from a level to the next", "positions")
    depth_size = word("length of that axis", "positions")
    depth_bytes = word("from a position of that axis to the next", "bytes")
    image_step = word("from an image's first level to that of the next", "positions")
    image_start = word("the first image's first level", "positions")
    source = group(Geometry, "the source's strides along image, row, column and channels, or packed pairs of these")
    destination = group(Geometry, "the destination's")
    parts = word("from `offsets` to a table: from each tile's first channel to what each store writes", "bytes")
    parts_step = word("of a tile in it; 0: stores are `dst_block` apart, and there is no table", "bytes")
    padded_oc = word("output channels, with the destination's padding", "channels")
    groups = word("groups", "groups")
    window_rows = word("rows of a window", "rows")
    window_cols = word("columns of a panel of it", "columns")
    window_row = word("from a row of the window to the next", "bytes")
    packed_row = word("likewise, as it is packed, before it is converted", "bytes")
    packed_block = word("from a level of a block of channels to the next, as it is packed", "bytes")
    packed_at = word("from a panel of the window to where it is packed", "bytes")
    convert = word("what converts a packed panel; 0 where it is what tiles read", "address of a kernel")
    line = word("columns of a row of the destination, where rows are one and the source's are not; else 0", "columns")
    line_bytes = word("from the source of such a row to that of the next", "bytes")
    panel = word("columns of the destination that share a panel of the window", "columns")
    panel_bytes = word("from a panel of the window to the next", "bytes")
    sums_at = word("from the scratch to the accumulators of a task's tiles, where blocks of steps share them", "bytes")
    tiles_at = word("from the scratch to three tiles and the records", "bytes")
    in_place = word("whether tiles read the source where it is, and no window is packed", "0 or 1")
    task_rows = word("rows of the largest task", "rows")
    row_tasks = word("tasks along an image's rows", "tasks")
    col_tasks = word("tasks along an image's columns", "tasks")
    ocbs = word("blocks of output channels of a group: as many as a tile has", "blocks")
    splits = word("tasks that share these", "tasks")
    wei_block = word("from the weights of a block of output channels to those of the next", "bytes")
    wei_blocks = word("blocks of weights of a group", "blocks")
    pack = word("what packs a window, by a `WindowRecord`", "address of a kernel")
    tile = word("what computes a tile, by a `TileRecord`", "address of a kernel")
    enter = word(
        "what a worker calls before its tasks, with the address of 64 bytes; 0: nothing", "address of a kernel"
    )
    leave = word("what it calls after them, if anything before", "address of a kernel")
    scatter = word(
        "what moves a tile to its destination, by a `ScatterRecord`; 0 where none does", "address of a kernel"
    )
    scatters = word("whether all tiles are moved by it; else the padding after the last group alone", "0 or 1")
    tile_rows = word("rows of a tile", "rows")
    tile_pixels = word("columns of a tile", "columns")
    tile_bytes = word("of the accumulators of a tile", "bytes")
    tile_width = word("output channels of a tile", "channels")
    dst_shift = word("1 where two of the destination's channels share a byte, whose `length` is of channels; else 0")
    acc_itemsize = word("of an accumulator, and of a bias", "bytes")
    scales_at = word("from an output channel's bias to its scale, where it has one", "bytes")


class WindowRecord(Arguments):
    """A panel of a window that is to be packed."""

    window = word("where it goes", "address")
    image = word("the source's image", "address")
    channel = word("its first channel", "channels")
    depth = word("its first level; may be outside", "positions")
    ih = word("its first row; may be outside", "rows")
    iw = word("its first column; may be outside", "columns")


class ScatterRecord(Arguments):
    """A tile [row][column][channel], with no gaps, that is moved to where its pixels belong, or from there.

    Where vectors run along pixels it is [row][channel][column].
    """

    tile = word("the tile", "address")
    dst = word("its first pixel, at the first output channel of all", "address")
    channel = word("its first output channel", "channels")
    valid = word("channels that exist", "channels")
    written = word("channels that are written, as zero where they do not exist", "channels")
    gather = word("whether the tile is read from there", "0 or 1")


# Bytes of a tile's record, and of a record to pack or to scatter; these two share their place.
RECORDS = TileRecord.nbytes + max(WindowRecord.nbytes, ScatterRecord.nbytes)
