"""The arguments of microkernels, and the loop over the tiles of a row, which is the same for all of them."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

from blockconv.jit.arguments import Arguments, address, in_bytes, in_channels, in_rows, kernel_address, word
from blockconv.jit.ir import I64, const, counted, emitted, load_i64
from blockconv.jit.values import alloca_once, build, least, truth
from blockconv.kernels.common.tile import LINE


class TileRecord(Arguments):
    """The arguments of `conv_tile`: the source, weights and destination of a tile, or of several in a row.

    An op's block of arguments has a record with the words that all its tiles share. A worker copies it to
    its scratch, and writes the others there.

    A step of the reduction is one tap of one block of channels. All steps are one run of one row. Where some taps are
    left out, each block of channels is a run, whose rows have the remaining steps. The words from `dst` to `activate`
    are those of `Output`. With several tiles, words for one tile describe the first. The last tile may be closer to the
    one before it than the others are; then it computes some pixels again.
    """

    full_steps = word("steps that take a whole block of channels, of each row of a run", "steps")
    tail_steps = word("steps that take fewer channels, after all others, of each row", "steps")
    tail_channels = in_channels("what each of those takes")
    prefetch_lines = word("how much of the next weights each full step prefetches", "cache lines")
    tiles = word("how many are computed, one after the other", "tiles")
    src_next = in_bytes("from the source of a tile to that of the next")
    src_last = in_bytes("from the first one's to the last one's")
    dst_next = in_bytes("from the destination of a tile to that of the next")
    dst_last = in_bytes("from the first one's to the last one's")
    src = address("the source of the tile's first pixel")
    src_row = in_bytes("from the source of a row of pixels to that of the next")
    src_pixel = in_bytes("from the source of a pixel to that of the next in its row")
    offsets = address("a table: from `src` to what each step reads, in the order of the weights, in bytes")
    runs = word("runs of steps of a whole block of channels; they come first", "runs")
    run_steps = word("from a run's first step to that of the next", "steps")
    rows = in_rows("rows of taps in a run, and in the tail")
    row_steps = word("from a row's first step to that of the next", "steps")
    wei = address("packed weights: [step][channel of the block][output channel of the tile]")
    bia = address("a bias for each output channel of the tile")
    prefetch = address("memory that is read after this tile")
    dst = address("the destination of the tile's first pixel and channel")
    dst_row = in_bytes("from a row of pixels to the next")
    dst_pixel = in_bytes("from a pixel to the next")
    dst_block = in_bytes("from the channels that are stored together to the next such; see `Output`")
    residual = in_bytes("from the destination to the residual, of the same strides; 0: there is none")
    valid = in_channels("output channels that exist")
    written = in_channels("output channels that are written, as zero where they do not exist")
    activation = address("the activation's `ActivationArguments`")
    activate = kernel_address("what computes it; 0: it clips, or there is none")
    scratch = address("memory for the accumulators of a tile")
    scales = address("a float32 for each output channel, which makes integer accumulators real numbers")
    part = kernel_address("what stores a tile that lacks channels: see `finish_part`")
    sums = address("where the accumulators are kept from a block of the reduction to the next (`k_blocked`)")
    is_first = word("whether this is the reduction's first block, before which they are the bias", "0 or 1")
    is_last = word("whether it is the last one, after which the tile is finished", "0 or 1")
    ahead = word("whether each step of several channels prefetches the next step's source", "0 or 1")


@contextlib.contextmanager
def each_step(run: TileRecord, cut: bool, start=None, count=None) -> Iterator[Any]:
    """A loop over the steps of a reduction, which gives their numbers. Default: over those of all runs.

    cut: whether tiles leave out taps. If not, all steps are one row of one run: a single loop, which takes fewer
    registers. start, count: the first step of a single run, and how many of each row are taken.
    """
    steps = run.full_steps if count is None else count
    begin = const(0) if start is None else start
    if not cut:
        with counted(steps) as n:
            yield begin + n
        return
    # The rows of all runs are one loop: one more nested loop would have more variables than there are registers.
    first, left = (alloca_once(I64, value=value) for value in (begin, run.rows))
    to_next_run = run.run_steps - (run.rows - 1) * run.row_steps
    with counted(run.runs * run.rows if start is None else run.rows):
        begin = first.held
        with counted(steps) as n:
            yield begin + n
        remaining = left.held - 1
        is_last = ~truth(remaining)
        left.held = build.select(is_last, run.rows, remaining)
        first.held = begin + build.select(is_last, to_next_run, run.row_steps)


def source_of(run: TileRecord, step):
    """The address that a step of the reduction reads, for the tile's first pixel."""
    return run.src + load_i64.emit(run.offsets, step)


def kernel_of_tiles(compute: Callable[[TileRecord, Any, Any], None], spec, kept: int = 0) -> Callable[..., None]:
    """A kernel whose first argument is a `TileRecord`.

    compute(run, record, spec) reduces and stores each tile. The kernel ignores its other arguments. A call
    computes all tiles of a row, because a call and loading a record take as long as some 30 multiply-adds.
    kept: bytes of a tile's accumulators in `sums`.
    """

    @emitted
    def compute_tiles(record):
        run = TileRecord.load(record)
        lines = run.prefetch_lines * (run.runs * run.run_steps * LINE)

        def further(number, each, last):
            distance = number * each
            return least(distance, last)

        with counted(run.tiles) as number:
            of_tile = run._replace(
                src=run.src + further(number, run.src_next, run.src_last),
                dst=run.dst + further(number, run.dst_next, run.dst_last),
                prefetch=run.prefetch + number * lines,
                sums=run.sums + number * kept,
            )
            compute(of_tile, record, spec)

    return compute_tiles
