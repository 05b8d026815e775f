"""Strided copies between arrays: concat, slice, gather, pad and channel shuffle, from any layout to any other.

A reorder between layouts whose blocks of channels do not nest (24 and 16, say) is one too. Each op is a list of runs
along each axis: copies of the source's first, first + step, ..., or filled (`Copied`). N, H and W become three loops
a stride on either side, and borders before and after are filled. The channels become a list of *extents*, contiguous on
both sides and cut where a block of either layout ends. So an offset that is no multiple of a block, a permutation and a
step are no cases of their own. An extent is copied for a row of pixels at a time. If the extents of neighbouring pixels
are contiguous on both sides, they are copied as one.

Buffers: the source(s), the destination. Option of the primitive, for 8-bit integers, of all but the reorder:
quantizations, of the source(s) and of the destination. If they differ, elements are requantized as they are copied. The
destination's padding is its zero point.

Arrays of other than four dimensions are row-major. Neighbouring axes that are copied as a whole are one, and the
remaining axes are (N, C, H, W) for the copy.
"""

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np

from blockconv.core.eltwise_problem import ConcatProblem, GatherProblem, PadProblem
from blockconv.core.layout import Layout, row_major
from blockconv.core.problem import ReorderProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import NUMBERS, Types
from blockconv.kernels.batches import fill_images
from blockconv.kernels.common.conversion import ConversionArguments, Moved
from blockconv.kernels.common.geometry import ITEMSIZE, geometry
from blockconv.kernels.common.loop_nest import nest
from blockconv.kernels.common.requantize import quantization_words
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.strided_copy.kernels import FILL, ZERO, PixelLoop, StridedCopyArgs, strided_copy
from blockconv.kernels.strided_copy.regions import (
    Bordered,
    Copied,
    CopyPiece,
    CopySpan,
    blocking_of,
    extents_of,
    nest_of,
    pieces_of,
)
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.machine import QUANTIZED_CYCLES
from blockconv.runtime import OWN_TABLE, Buffer, Launch

MOST_RUNS = 32  # slices that a gather along N, H or W becomes, an op each
Quantizations = tuple[Quantization, ...] | None  # of the source(s) and of the destination, for integers

# ---------------------------------------------------------------- the ops


def _concat(p: ConcatProblem, dst: Layout) -> list[Copied]:
    return [
        Copied(
            shape, p.dst_shape, [[CopySpan(size)] for size in shape], [start * (k == p.axis) for k in range(len(shape))]
        )
        for shape, start in zip(p.shapes, p.starts, strict=True)
    ]


def _gather(p: GatherProblem, dst: Layout) -> list[Copied]:
    spans = [[CopySpan(size, first, step) for first, size, step in runs] for runs in p.runs]
    return [Copied(p.shape, p.dst_shape, spans, [0] * len(spans))]


def _pad(p: PadProblem, dst: Layout) -> list[Copied]:
    spans = []
    for size, (before, after) in zip(p.dst_shape, p.pads, strict=True):
        begin = min(max(0, before), size)
        count = max(0, size - begin - max(0, after))
        filled = (CopySpan(n, action=FILL) for n in (begin, size - begin - count))
        one, other = ([span] if span.size else [] for span in filled)
        spans.append([*one, CopySpan(count, max(0, -before)), *other])
    return [Copied(p.shape, p.dst_shape, spans, [0] * len(spans))]


def _reorder(p: ReorderProblem, dst: Layout) -> list[Copied]:
    padded = zip(p.shape, dst.padded_shape(p.shape), strict=True)
    spans = [[CopySpan(size), CopySpan(whole - size, action=FILL)] for size, whole in padded]
    return [Copied(p.shape, p.shape, spans, [0] * len(spans))]


# ---------------------------------------------------------------- how it is copied


def _launches(request: Request, parts: list[Copied], quantizations: Quantizations, fill: int) -> Iterator[Launch]:
    """The ops that copy from each source: one for each loop along N, H and W. No op where nothing is written."""
    itemsize, src, dst = request.types.src.itemsize, request.src, request.dst
    for number, copied in enumerate(parts):
        n, channels, *image = copied.spans
        begin = copied.starts[1]
        end = begin + sum(span.size for span in channels)
        if begin < end == copied.dst_shape[1]:  # the last block of channels is zeroed to its end
            tail = CopySpan(dst.padded_shape(copied.dst_shape)[1] - end, action=ZERO)
            copied = copied._replace(spans=(n, [*channels, tail], *image))
        axes = pieces_of(copied, geometry(src, copied.src_shape, itemsize), geometry(dst, copied.dst_shape, itemsize))
        given = (quantizations[number], quantizations[-1]) if quantizations else None
        pixels = itertools.product(*(Bordered.over(axes[k]) for k in (0, 2, 3)))
        for loops in pixels if axes[1] else ():
            yield _launch(request, loops, axes[1], (number, len(parts)), given, fill)


def _launch(
    request: Request,
    pixels: tuple[Bordered, ...],
    channels: list[CopyPiece],
    buffers: tuple[int, int],
    given: Quantizations,
    fill: int,
) -> Launch:
    """The op that copies channels of these pixels. given: the quantizations of both sides."""
    kind, n = request.types.src, pixels[0]
    unit, images = kind.itemsize, n.size * kind.itemsize
    read, written = (sum(loop.offsets[side] for loop in pixels) for side in (0, 1))
    apart = channels[0].src_step % images == 0 and channels[0].dst_step == images
    if n.size == n.count > 1 and n.strides == (unit, unit) and apart:
        # All images of a channel are copied as one, with the images of neighbouring channels.
        unit, pixels = images, pixels[1:]
    loops, extents = nest_of(pixels), extents_of(channels, unit)
    cols = loops[2]
    contiguous = cols.src if cols.src == cols.dst or cols.size == 1 else 0
    blocking = blocking_of(loops, [extent.size for extent in extents], contiguous, request.threads)
    src, dst = given or (None, None)
    code = (kind if src != dst else Types.bits(kind.itemsize).src).code  # bits, unless elements are requantized
    args = StridedCopyArgs(
        src=Buffer(buffers[0], read),
        dst=Buffer(buffers[1], written),
        extents=OWN_TABLE,
        fill=fill,
        zero=kind.bits(dst.zero_point) if dst else 0,
        conversion=ConversionArguments(src=quantization_words(src, kind), dst=quantization_words(dst, kind)),
        count=len(extents),
        task_extents=blocking.extents,
        extent_tasks=blocking.extent_tasks,
        task_cols=blocking.cols,
        col_tasks=blocking.col_tasks,
        contiguous=contiguous,
        loops=[PixelLoop(size=x.size, begin=x.begin, count=x.count, src_stride=x.src, dst_stride=x.dst) for x in loops],
    )
    table = np.array(extents, np.int64).ravel()
    return Launch(strided_copy(Moved(code, code)), args, blocking.tasks, blocking.chunk, table=table)


# ---------------------------------------------------------------- rows of the kernel table


def _why_not(request: Request) -> Reason | None:
    problem, src, dst = request.problem, request.src, request.dst
    if len(problem.dst_shape) == 4 and not (src.is_native and dst.is_native):
        return "needs layouts with at most one block of channels, and one of images around it"
    if not isinstance(problem, ReorderProblem):
        return None
    if problem.itemsize not in ITEMSIZE.values():
        return f"does not take elements of {problem.itemsize} bytes"
    return None if nest(src, dst, problem.shape) is None else "is for layouts whose blocks do not nest"


def _in_lines(request: Request, parts: list[Copied]) -> tuple[Request, list[Copied]] | Reason:
    """Both for four dimensions; in row-major order, with an axis that has several runs as the channels."""
    rank, row, axes = len(request.problem.dst_shape), row_major(4), len(parts[0].groups)
    if rank != 4:
        if not request.src == request.dst == row_major(rank):
            return f"needs row-major arrays of {rank} dimensions ({row_major(rank).tag})"
        if axes > 4:
            return f"copies parts along at most 4 axes, and this copy needs {axes}"
        return request.of(request.problem, row, row), [one.in_four for one in parts]
    if request.src == request.dst == row and axes == 4 and any(one.is_several for one in parts):
        parts = [one.in_four for one in parts]
    rule = f"copies at most {MOST_RUNS} parts along other axes than the channels"
    return (request, parts) if parts[0].runs <= MOST_RUNS else rule


def _seconds(request: Request, copied: Copied) -> float:
    """Bytes at the speed of a copy, and moves of elements, where no extent is longer than one."""
    problem, src, dst, m = request.problem, request.src, request.dst, request.machine
    itemsize, elements = request.types.src.itemsize, dst.size(copied.dst_shape)
    moved = m.move_seconds(itemsize * elements, itemsize * elements)
    if isinstance(problem, ReorderProblem):
        return max(moved, elements / math.gcd(src.blocks[1], dst.blocks[1]) * m.scalar_seconds())
    moved = moved if src == dst else 3 * moved
    if isinstance(problem, GatherProblem):
        moved += m.launch_seconds() * max(0, copied.runs - 1)
        extents = sum(1 if span.step == 1 else span.size for span in copied.spans[1])
        alone = geometry(src, copied.src_shape, itemsize).channel == itemsize and extents * 4 > copied.dst_shape[1]
        return moved + (elements * m.scalar_seconds() if alone else 0.0)
    return moved


def _requantized_seconds(request: Request, elements: int, given: Quantizations) -> float:
    """To requantize so many elements, where some stand for something else."""
    if given is None or all(one == given[-1] for one in given):
        return 0.0
    m = request.machine
    return elements / m.lanes(4) * QUANTIZED_CYCLES * m.cycle_seconds()


def _row(op: str, parts_of: Callable[[Any, Layout], list[Copied]], dtypes: Iterable[str] = NUMBERS) -> Row:
    """Options of a reorder, as of others: fill; stream, which does nothing here."""

    def make(
        request: Request, quantizations: Quantizations = None, fill: int = 0, stream: bool = False
    ) -> Primitive | Reason:
        problem, kind = request.problem, request.types.src
        is_reorder = isinstance(problem, ReorderProblem)
        found = _why_not(request) or _in_lines(request, parts_of(problem, request.dst))
        if isinstance(found, Reason):
            return found
        at, parts = found
        value = kind.bits(problem.value) if isinstance(problem, PadProblem) else fill

        def cost() -> float:
            elements = at.dst.size(parts[0].dst_shape)
            seconds = max(_seconds(at, parts[0]), _requantized_seconds(at, elements, quantizations))
            return at.machine.launch_seconds() + seconds / at.threads

        def launches() -> list[Launch]:
            made = [*_launches(at, parts, quantizations, value)]
            zero = quantizations[-1].zero_point if quantizations else 0
            if made and not is_reorder:  # which fills images too with its own
                made += fill_images(at.dst, parts[0].dst_shape, kind.itemsize, len(parts), zero)
            return made

        return Primitive(cost, launches)

    return Row(f"{op}_box", op, make, frozenset(dtypes))


MOVED = frozenset(str(Types.bits(itemsize)) for itemsize in ITEMSIZE.values())

ROWS = (
    _row("concat", _concat),
    *(_row(op, _gather) for op in ("gather", "slice", "shuffle")),
    _row("pad", _pad),
    _row("reorder", _reorder, MOVED),
)
