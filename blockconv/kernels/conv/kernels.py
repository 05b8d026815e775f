"""The kernels of convolution by tiles: the loop over tasks, and the kernels that scatter tiles.

See `blockconv.kernels.conv.binding`. The loop over tasks and tiles is one kernel for all problems. Packing a window,
computing a tile and scattering it are kernels of their own, called by address with a record of arguments. So a new
problem compiles the microkernel of its tile, and seldom more. Kernels that pack or scatter are called with the
addresses of the arguments and of their record.
"""

from typing import NamedTuple

from blockconv import jit
from blockconv.jit.ir import call_kernel, copy_memory, digits, fill_memory, load_bits, load_i64, prefetch, store_bits
from blockconv.kernels.common.requantize import EpilogueArguments
from blockconv.kernels.common.tasks import extent_of_task
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.tile_record import TileRecord
from blockconv.kernels.common.vectors import fill_elements
from blockconv.kernels.conv.arguments import ScatterRecord, TilesArguments, WindowRecord
from blockconv.kernels.conv.packing import source_offset

# ---------------------------------------------------------------- destinations whose blocks groups share


def _destination_offset(a, c):
    """From the destination's first channel to channel `c`, in bytes."""
    d_len = a.destination.length
    return (c // d_len) * a.destination.block + ((c % d_len) * a.destination.channel >> a.dst_shift)


@jit.unrolled_kernel
def scatter_tile(itemsize, shift=0):
    """Move a tile's channels to the destination, block by block, or from there to the tile; see `ScatterRecord`.

    shift: 1 where two channels share a byte; then only pairs are moved.
    """

    def kernel(a: TilesArguments, wanted: ScatterRecord):
        fill = EpilogueArguments(a.activation).dst_fill if itemsize == 1 else 0
        tile, base, first = wanted.tile, wanted.dst, wanted.channel
        valid, written, gather = wanted.valid, wanted.written, wanted.gather
        rows, pixels, width = a.tile_rows, a.tile_pixels, a.tile_width
        c, d_len = 0, a.destination.length
        while c < written:
            at, exists = base + _destination_offset(a, first + c), c < valid
            count = min(d_len - (first + c) % d_len, (min(valid, written) if exists else written) - c)
            for r in range(rows):
                for p in range(pixels):
                    of_tile = tile + (((r * pixels + p) * width + c) * itemsize >> shift)
                    dst = at + r * a.destination.row + p * a.destination.col
                    if gather:
                        copy_memory(of_tile, dst, count * itemsize >> shift)
                    elif exists:
                        copy_memory(dst, of_tile, count * itemsize >> shift)
                    else:
                        fill_memory(dst, count * itemsize >> shift, fill)
            c += count

    return kernel


@jit.kernel
def scatter_pixels(itemsize):
    """`scatter_tile` for a tile whose vectors run along pixels: [row][channel][pixel]."""

    def kernel(a: TilesArguments, wanted: ScatterRecord):
        pixels, width, col = a.tile_pixels, a.tile_width, a.destination.col
        for r in range(a.tile_rows):
            row = wanted.dst + r * a.destination.row
            # The next tile's lines arrive while it is computed; stores to lines that are far wait for each.
            next_tile = row + _destination_offset(a, wanted.channel) + pixels * col
            for k in range(pixels * col // LINE):
                prefetch(next_tile + k * LINE)
            for c in range(min(wanted.valid, wanted.written)):
                at, of_tile = row + _destination_offset(a, wanted.channel + c), (r * width + c) * pixels * itemsize
                of_tile += wanted.tile
                if wanted.gather:
                    for p in range(pixels):
                        store_bits(of_tile + p * itemsize, load_bits(at + p * col, itemsize), itemsize)
                else:
                    for p in range(pixels):
                        store_bits(at + p * col, load_bits(of_tile + p * itemsize, itemsize), itemsize)
            c, d_len = wanted.valid, a.destination.length
            while c < wanted.written:
                at, count = row + _destination_offset(a, wanted.channel + c), d_len - (wanted.channel + c) % d_len
                count = min(count, wanted.written - c)
                for p in range(pixels):
                    fill_elements(itemsize, at + p * col, count, 0)
                c += count

    return kernel


# ---------------------------------------------------------------- the loop over tasks


def _write_common(a, run):
    """Write the words that the records of all tiles share: scattered ones are first stored after their accumulators."""
    tile_bytes, residual, tiles = a.tile_bytes, a.residual - a.dst, run.address - 3 * a.tile_bytes
    copy_memory(run.address, a.record.address, TileRecord.nbytes)
    run.scratch, run.residual = tiles, residual
    if a.scatters:
        run.dst = tiles + tile_bytes
        run.residual = tile_bytes if residual else 0


def _pack_panels(a, run, window, image, n, group, begin, cols):
    """Pack the window of a task, panel by panel. begin: its first row and column."""
    ih = begin[0] * a.sh - a.ph
    iw = begin[1] * a.sw - a.pw
    depth = n * a.image_step + a.image_start
    panel = a.panel
    for k in range((cols.size + panel - 1) // panel):
        wanted = WindowRecord(run.address + TileRecord.nbytes)
        at = window + k * a.panel_bytes
        wanted.window = at + a.packed_at
        wanted.image = image
        wanted.channel = group * a.group_ic
        wanted.depth = depth
        wanted.ih = ih
        wanted.iw = iw + min(k * panel, max(0, cols.size - panel)) * a.sw
        call_kernel(a.pack, a.address, wanted.address, 0, 0)
        if a.convert:
            call_kernel(a.convert, at, at + a.packed_at, a.panel_bytes - a.packed_at, 0)


class _Block(NamedTuple):
    """Output channels of a tile: the first, how many exist, and how many are written."""

    channel: int
    valid: int
    written: int


def _scatter(a, run, dst, block, gather):
    """Move the stored tile to the destination. gather: 1, move its part of the residual to where the tile reads it."""
    wanted = ScatterRecord(run.address + TileRecord.nbytes)
    wanted.tile = run.scratch + (1 + gather) * a.tile_bytes
    wanted.dst = dst + gather * (a.residual - a.dst)
    wanted.channel = block.channel
    wanted.valid = block.valid
    wanted.written = min(a.tile_width, block.valid) if gather else block.written
    wanted.gather = gather
    call_kernel(a.scatter, a.address, wanted.address, 0, 0)


def _tiles_of(a, cols):
    """The tiles of a row of a task."""
    return (cols.size + a.tile_pixels - 1) // a.tile_pixels


def _write_row(a, run, cols):
    """Write the words that the tiles of a row of a task share."""
    pixels, last, tiles = a.tile_pixels, cols.size - a.tile_pixels, _tiles_of(a, cols)
    # Where each tile of a row has a panel, it begins with it.
    src_next = a.panel_bytes if a.panel == pixels else pixels * a.record.src_pixel
    run.src_next = src_next
    run.src_last = (tiles - 1) * src_next if a.panel == pixels else last * a.record.src_pixel
    run.dst_next = pixels * a.destination.col
    run.dst_last = last * a.destination.col


class _Steps(NamedTuple):
    """Words of a tile's record if no tap is left out."""

    offsets: int
    wei: int
    bia: int
    full: int
    tail: int


def _taps_in_bounds(first, last, size, taps, apart):
    """(first, past the last) of the taps that some of a tile's pixels find inside the image; see `common.taps`.

    first, last: the columns, or rows, of the image that the first tap of the tile's first pixel and of its last one is
    at.
    """
    low = min(taps, max(0, -(last // apart)))
    return low, max(low, min(taps, -((first - size) // apart)))


def _rows_in_bounds(a, row):
    first = row * a.sh - a.ph
    return _taps_in_bounds(first, first + (a.tile_rows - 1) * a.sh, a.ih, a.tap_rows, a.tap_row)


def _cols_in_bounds(a, col):
    if not a.tap_cols:
        return 0, a.tap_row_steps
    first = col * a.sw - a.pw
    return _taps_in_bounds(first, first + (a.tile_pixels - 1) * a.sw, a.iw, a.tap_cols, a.tap_col)


def _leave_out(a, run, every, rows, cols):
    """Write which steps a tile reduces: in each block of channels, the steps of these rows and columns of taps.

    If none is left out, all are one run, as in a tile inside the image.
    """
    (top, bottom), (left, right) = rows, cols
    first, each, run_steps = top * a.tap_row_steps + left, right - left, a.tap_rows * a.tap_row_steps
    is_whole = each == a.tap_row_steps
    is_all = is_whole and bottom - top == a.tap_rows
    taken = (bottom - top) * each if is_whole else each
    run.offsets = every.offsets + first * 8
    run.wei = every.wei + first * a.step_bytes
    run.runs = 1 if is_all else every.full // run_steps
    run.run_steps = every.full if is_all else run_steps
    run.rows = 1 if is_whole else bottom - top
    run.row_steps = 0 if is_whole else a.tap_row_steps
    run.full_steps = every.full if is_all else taken
    run.tail_steps = taken if every.tail else 0
    if a.biases:
        table, ends = a.offsets + a.biases, a.tap_rows + 1
        number = ends * ends + left * (a.tap_row_steps + 1) + right
        run.bia = every.bia + load_i64(table, top * ends + bottom) + load_i64(table, number)
        run.scales = run.bia + a.scales_at


def _compute_rows(a, run, rows, cols, src, dst, block):
    """Compute the tiles of these rows and columns; a call takes as many as `run` says."""
    count, together, tiles = rows.size, run.tiles, _tiles_of(a, cols)
    tile_rows, last_col = a.tile_rows, cols.size - a.tile_pixels
    every = _Steps(run.offsets, run.wei, run.bia, run.full_steps, run.tail_steps)
    for number in range((count + tile_rows - 1) // tile_rows):
        r = min(number * tile_rows, count - tile_rows)
        tile = 0
        while tile < tiles:
            if a.tap_rows:
                col = cols.first + min(tile * a.tile_pixels, last_col)
                _leave_out(a, run, every, _rows_in_bounds(a, rows.first + r), _cols_in_bounds(a, col))
            run.src = src + r * a.record.src_row + min(tile * run.src_next, run.src_last)
            at = dst + r * a.destination.row + min(tile * run.dst_next, run.dst_last)
            _compute_tiles(a, run, at, block)
            run.prefetch += together * a.record.prefetch_lines * (every.full * LINE)
            run.sums += together * a.tile_bytes
            tile += together
    run.bia = every.bia


def _compute_tiles(a, run, dst, block):
    """Compute tiles of the first pixel `dst` and see them stored: one, if they are scattered or followed by padding."""
    if run.is_last:
        if not a.scatters:
            run.dst = dst + _destination_offset(a, block.channel)
        elif run.residual:
            _scatter(a, run, dst, block, 1)
    call_kernel(a.tile, run.address, 0, 0, 0)
    width = a.tile_width
    if run.is_last and a.scatters:
        _scatter(a, run, dst, block, 0)
    elif run.is_last and block.written > width:
        _scatter(a, run, dst, _Block(block.channel + width, 0, block.written - width), 0)


def _written(a, group, ocb, valid):
    """Output channels that a tile writes. valid: channels of the group from the tile's first on."""
    written = min(a.tile_width, valid)
    if group == a.groups - 1:
        # The last group writes the padding, its last tile all that is left of it.
        padding = a.padded_oc - (group * a.group_oc + ocb * a.tile_width)
        written = padding if ocb == a.ocbs - 1 else min(a.tile_width, padding)
    return written


def _write_block(a, run, group, ocb):
    """Write the words that the records of a block of output channels share."""
    run.bia = a.bia + (group * a.ocbs + ocb) * (a.tile_width * a.acc_itemsize)
    run.scales = run.bia + a.scales_at
    if a.parts_step:
        run.dst_block = a.offsets + a.parts + (group * a.ocbs + ocb) * a.parts_step


def _write_steps(a, run, group, ocb, valid, k, sums):
    """Write which steps tiles reduce: block number `k` of them. The weights that come after these."""
    is_last = k == a.k_blocks - 1
    before = k * a.k_steps
    full = a.record.full_steps - before if is_last else a.k_steps
    tail = a.record.tail_steps if is_last else 0
    if valid <= 0:  # blocks of the destination's padding alone are zero: nothing is reduced for them
        full, tail = 0, 0
    wei = a.wei + (group * a.wei_blocks + ocb) * a.wei_block + before * a.step_bytes
    run.offsets = a.offsets + before * 8
    run.wei = wei
    run.runs = 1
    run.run_steps = full
    run.rows = 1
    run.row_steps = 0
    run.full_steps = full
    run.tail_steps = tail
    run.sums = sums
    run.is_first = k == 0
    run.is_last = is_last
    return wei + (full + tail) * a.step_bytes


@jit.kernel
def conv_tiles():
    """The loop over tasks, windows and tiles, with `TilesArguments`; specialised are the kernels that these name."""

    def kernel(a: TilesArguments, first, last, scratch):
        window, tiles = scratch, scratch + a.tiles_at
        rows, pixels, width = a.tile_rows, a.tile_pixels, a.tile_width
        run = TileRecord(tiles + 3 * a.tile_bytes)
        _write_common(a, run)
        if a.enter:
            call_kernel(a.enter, tiles, 0, 0, 0)
        packed = -1
        for task in range(first, last):
            split, rest = digits(task, a.splits)
            col_task, row_task, group, n = digits(rest, a.col_tasks, a.row_tasks, a.groups)
            task_rows = extent_of_task(a.oh, rows, a.row_tasks, row_task)
            task_cols = extent_of_task(a.ow, pixels, a.col_tasks, col_task)
            # The first pixel that a window is of, or a panel of one. It has room for the largest task, so it may begin
            # before this one's, and it does not reach past the destination.
            row, col = min(task_rows.first, a.oh - a.task_rows), min(task_cols.first, a.ow - a.panel)
            image = a.src + n * a.source.n
            if a.in_place:
                window = image + source_offset(a, group * a.group_ic)
                window += row * a.source.row + col * a.source.col
            elif rest != packed:
                _pack_panels(a, run, window, image, n, group, (row, col), task_cols)
                packed = rest
            src = window + (task_rows.first - row) * a.record.src_row + (task_cols.first - col) * a.record.src_pixel
            dst = a.dst + n * a.destination.n
            dst += task_rows.first * a.destination.row + task_cols.first * a.destination.col
            _write_row(a, run, task_cols)
            ocbs = a.ocbs
            for ocb in range(ocbs * split // a.splits, ocbs * (split + 1) // a.splits):
                valid = min(a.group_oc, a.oc - group * a.group_oc) - ocb * width
                block = _Block(group * a.group_oc + ocb * width, valid, _written(a, group, ocb, valid))
                _write_block(a, run, group, ocb)
                run.valid = width if a.scatters else block.valid
                run.written = width if a.scatters else block.written
                is_alone = a.scatters or a.tap_cols or block.written > width
                run.tiles = 1 if is_alone else _tiles_of(a, task_cols)
                for k in range(a.k_blocks):
                    run.prefetch = _write_steps(a, run, group, ocb, block.valid, k, scratch + a.sums_at)
                    _compute_rows(a, run, task_rows, task_cols, src, dst, block)
        if a.enter:
            call_kernel(a.leave, 0, 0, 0, 0)

    return kernel
