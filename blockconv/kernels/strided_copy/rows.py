"""Strided copies between arrays: concat, slice, gather, pad and channel shuffle, from any layout to any other.

A reorder between layouts whose blocks of channels do not nest (24 and 16, say) is one too. N, H and W are three loops
with a stride on either side. A step of the source is part of its stride, and borders before and after are filled. The
channels are a list of *extents*, contiguous on both sides and cut where a block of either layout ends. So an offset
that is no multiple of a block, a permutation and a step are no cases of their own. An extent is copied for a row of
pixels at a time. If the extents of neighbouring pixels are contiguous on both sides, they are copied as one.

Buffers: the source(s), the destination. Option of the primitive, for 8-bit integers, of all but the reorder:
quantizations, of the source(s) and of the destination. If they differ, elements are requantized as they are copied. The
destination's padding is its zero point.

Arrays of other than four dimensions are row-major. Neighbouring axes that are copied as a whole are one, and the
remaining axes are (N, C, H, W) for the copy.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np

from blockconv.core.eltwise_problem import ConcatProblem, GatherProblem, PadProblem, Run
from blockconv.core.layout import Layout, row_major
from blockconv.core.problem import ReorderProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import NUMBERS, ElementType, Types
from blockconv.kernels.batches import fill_images
from blockconv.kernels.common.conversion import ConversionArguments, Moved
from blockconv.kernels.common.geometry import ITEMSIZE, NO_BLOCK, geometry
from blockconv.kernels.common.loop_nest import nest
from blockconv.kernels.common.requantize import quantization_words
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.strided_copy.blocking import blocking_of
from blockconv.kernels.strided_copy.kernels import FILL, PixelLoop, StridedCopyArgs, strided_copy
from blockconv.kernels.strided_copy.regions import (
    CopyRegion,
    CopySpan,
    Side,
    extents_of,
    images_are_innermost,
    in_blocks,
    loops_of,
    pixels,
)
from blockconv.kernels.table import Primitive, Row
from blockconv.machine.machine import QUANTIZED_CYCLES
from blockconv.runtime import OWN_TABLE, Buffer, Launch

_T = TypeVar("_T")
MOST_RUNS = 32  # slices that a gather along N, H or W becomes, an op each

# ---------------------------------------------------------------- how it is copied


@dataclass(frozen=True)
class CopyMethod:
    """How a region is copied, whatever its shape is.

    quantizations: of the source(s) and of the destination, for integers.
    fill: the bits of an element of the border.
    """

    kind: ElementType
    threads: int
    quantizations: tuple[Quantization, ...] | None = None
    fill: int = 0

    def of_source(self, k: int) -> CopyMethod:
        """The same with one of the sources."""
        given = self.quantizations
        return self if given is None else replace(self, quantizations=(given[k], given[-1]))

    @property
    def moved(self) -> Moved:
        """The elements, which are bits unless they are requantized."""
        given = self.quantizations
        same = given is None or given[0] == given[1]
        code = Types.bits(self.kind.itemsize).src.code if same else self.kind.code
        return Moved(code, code)

    @property
    def words(self) -> dict[str, Any]:
        src, dst = self.quantizations or (None, None)
        conversion = ConversionArguments(src=quantization_words(src, self.kind), dst=quantization_words(dst, self.kind))
        return {
            "fill": self.fill,
            "zero": 0 if dst is None else self.kind.bits(dst.zero_point),
            "conversion": conversion,
        }


def _launches(region: CopyRegion, src: Side, dst: Side, how: CopyMethod) -> list[Launch]:
    """The ops that copy a region, one for each block of images. No op if nothing is written."""
    if 0 in region.sizes or 0 in dst.shape or region.last == region.first:
        return []
    if src.layout.blocks[0] * dst.layout.blocks[0] == 1:
        return [_launch(region, src, dst, how)]
    return [_launch(*part, how) for part in in_blocks(region, src, dst, how.kind.itemsize)]


def _launch(region: CopyRegion, src: Side, dst: Side, how: CopyMethod) -> Launch:
    """The op that copies a region."""
    kind, threads = how.kind, how.threads
    s, d = src.geometry(kind.itemsize), dst.geometry(kind.itemsize)
    unit = kind.itemsize
    if images_are_innermost(region, src, s, kind.itemsize) and images_are_innermost(region, dst, d, kind.itemsize):
        # All images of a channel are copied as one, with the images of neighbouring channels.
        unit = s.channel
        region = replace(region, sizes=(1, *region.sizes[1:]), counts=region.counts and (1, *region.counts[1:]))
        s, d = s._replace(length=NO_BLOCK), d._replace(length=NO_BLOCK)
    loops = loops_of(region, s, d)
    extents = extents_of(region, s, d, dst.layout.padded_shape(dst.shape)[1], unit)
    cols = loops[2]
    contiguous = cols.src if cols.src == cols.dst or cols.size == 1 else 0
    blocking = blocking_of(loops, [extent.size for extent in extents], contiguous, threads)
    args = StridedCopyArgs(
        src=Buffer(src.buffer, src.begin + sum(map(operator.mul, region.sources, pixels(s)))),
        dst=Buffer(dst.buffer, dst.begin + sum(map(operator.mul, region.starts, pixels(d)))),
        extents=OWN_TABLE,
        **how.words,
        count=len(extents),
        task_extents=blocking.extents,
        extent_tasks=blocking.extent_tasks,
        task_cols=blocking.cols,
        col_tasks=blocking.col_tasks,
        contiguous=contiguous,
        loops=[PixelLoop(size=x.size, begin=x.begin, count=x.count, src_stride=x.src, dst_stride=x.dst) for x in loops],
    )
    table = np.array(extents, np.int64).ravel()
    return Launch(strided_copy(how.moved), args, blocking.tasks, blocking.chunk, table=table)


def _space(shape: Sequence[_T]) -> tuple[_T, _T, _T]:
    """The values of N, H and W."""
    return shape[0], shape[2], shape[3]


# ---------------------------------------------------------------- the ops


def _concat_ops(problem: ConcatProblem, src: Layout, dst: Layout, how: CopyMethod) -> list[Launch]:
    p, launches = problem, []
    for k, (shape, start) in enumerate(zip(p.shapes, p.starts, strict=True)):
        region = CopyRegion([CopySpan(shape[1])], 0, True, _space(shape))
        if p.axis == 1:
            region = replace(region, first=start, tail=start + shape[1] == p.dst_shape[1])
        else:
            region = replace(region, starts=_space([start if axis == p.axis else 0 for axis in range(4)]))
        launches += _launches(region, Side(shape, src, k), Side(p.dst_shape, dst, len(p.shapes)), how.of_source(k))
    return launches


def _gather_ops(problem: GatherProblem, src: Layout, dst: Layout, how: CopyMethod) -> list[Launch]:
    p, launches = problem, []
    sides = Side(p.shape, src, 0), Side(p.dst_shape, dst, 1)
    channels = [CopySpan(size, first, step) for first, size, step in p.runs[1]]
    for runs in itertools.product(*map(_placed, _space(p.runs))):
        starts, sources, sizes, steps = zip(*runs, strict=True)
        region = CopyRegion(channels, 0, True, sizes, starts=starts, sources=sources, steps=steps)
        launches += _launches(region, *sides, how)
    return launches


def _placed(runs: Iterable[Run]) -> Iterator[tuple[int, int, int, int]]:
    """The runs of an axis, each behind the index where it begins in the destination."""
    start = 0
    for run in runs:
        yield start, *run
        start += run[1]


def _pad_ops(problem: PadProblem, src: Layout, dst: Layout, how: CopyMethod) -> list[Launch]:
    p, shape = problem, problem.dst_shape
    before, end = zip(*p.pads, strict=True)
    begins = [min(max(0, a), size) for a, size in zip(before, shape, strict=True)]
    sources = [max(0, -a) for a in before]
    counts = [max(0, size - a - max(0, b)) for size, a, b in zip(shape, begins, end, strict=True)]
    after = shape[1] - begins[1] - counts[1]
    channels = [CopySpan(begins[1], action=FILL), CopySpan(counts[1], sources[1]), CopySpan(after, action=FILL)]
    region = CopyRegion(
        channels, 0, True, _space(shape), begins=_space(begins), counts=_space(counts), sources=_space(sources)
    )
    return _launches(region, Side(p.shape, src, 0), Side(shape, dst, 1), replace(how, fill=how.kind.bits(p.value)))


def _reorder_ops(
    problem: ReorderProblem,
    src: Layout,
    dst: Layout,
    how: CopyMethod,
    fill: int = 0,
    stream: bool = False,
) -> list[Launch]:
    """stream: as of other reorders; here it does nothing."""
    shape, padded = problem.shape, dst.padded_shape(problem.shape)
    channels = [CopySpan(shape[1]), CopySpan(padded[1] - shape[1], action=FILL)]
    counts = _space(shape) if padded[0] != shape[0] else None  # images that lack are a border
    region = CopyRegion(channels, 0, False, _space((padded[0], *shape[1:])), counts=counts)
    return _launches(region, Side(shape, src, 0), Side(shape, dst, 1), replace(how, fill=fill))


def _why_not_reorder(request: Request) -> Reason | None:
    problem, src, dst = request.problem, request.src, request.dst
    if not (src.is_native and dst.is_native):
        return "needs layouts with at most one block of channels, and one of images around it"
    if problem.itemsize not in ITEMSIZE.values():
        return f"does not take elements of {problem.itemsize} bytes"
    return None if nest(src, dst, problem.shape) is None else "is for layouts whose blocks do not nest"


# ---------------------------------------------------------------- arrays of other than four dimensions


def _groups(problem: ConcatProblem | GatherProblem | PadProblem) -> list[range]:
    """The groups of axes that are one axis to the copy.

    Each axis that is copied in part is a group: the first of these is the channels. The axes between two of these are
    one group. If there are fewer than four groups, the last are empty.
    """
    p, axes = problem, range(len(problem.src_shape))
    if isinstance(p, ConcatProblem):
        parts = [p.axis]
    elif isinstance(p, PadProblem):
        parts = [axis for axis in axes if p.pads[axis] != (0, 0)]
    else:
        parts = [axis for axis in axes if p.runs[axis] != ((0, p.shape[axis], 1),)]
    ends = [0, *(end for axis in parts for end in (axis, axis + 1)), len(axes)]
    before, *rest = itertools.starmap(range, itertools.pairwise(ends))
    found = [before, *filter(None, rest)]
    return found + [range(0)] * (4 - len(found))


def _in_four(problem: Any, groups: Sequence[range]) -> Any:
    """The problem of arrays of four dimensions that copies the same."""

    def of(sizes: Sequence[int], join: Callable[[Iterable[int]], int] = math.prod) -> tuple[int, ...]:
        return tuple(join(sizes[axis] for axis in group) for group in groups)

    p = problem
    if isinstance(p, ConcatProblem):
        return ConcatProblem(tuple(map(of, p.shapes)), 1)
    if isinstance(p, PadProblem):
        before, after = (of(ends, sum) for ends in zip(*p.pads, strict=True))
        return PadProblem(of(p.shape), tuple(zip(before, after, strict=True)), p.value)
    shape = of(p.shape)
    whole = [((0, size, 1),) for size in shape]
    return GatherProblem(shape, tuple(p.runs[g[0]] if len(g) == 1 else w for g, w in zip(groups, whole, strict=True)))


def _why_not(request: Request) -> Reason | None:
    src, dst = request.src, request.dst
    rank = len(request.problem.dst_shape)
    if rank == 4:
        rule = f"copies at most {MOST_RUNS} parts along other axes than the channels"
        return None if _count(_in_lines(request)) <= MOST_RUNS else rule
    if not src == dst == row_major(rank):
        return f"needs row-major arrays of {rank} dimensions ({row_major(rank).tag})"
    axes = len(_groups(request.problem))
    return None if axes == 4 else f"copies parts along at most 4 axes, and this copy needs {axes}"


def _in_lines(request: Request) -> Request:
    """The request as one of four dimensions; in row-major order, with the one that is gathered as the channels."""
    p, row = request.problem, row_major(4)
    if len(p.dst_shape) == 4:
        several = isinstance(p, GatherProblem) and any(len(runs) > 1 for runs in p.runs)
        if not (several and request.src == request.dst == row and len(_groups(p)) == 4):
            return request
    return request.of(_in_four(p, _groups(p)), row, row)


def _count(request: Request) -> int:
    """Ops that copy from a source: each has one run of images, of rows and of columns."""
    p = request.problem
    return math.prod(map(len, _space(p.runs))) if isinstance(p, GatherProblem) else 1


# ---------------------------------------------------------------- rows of the kernel table


def _seconds(request: Request) -> float:
    """Bytes at the speed of a copy, and moves of elements, where no extent is longer than one."""
    problem, src, dst, m = request.problem, request.src, request.dst, request.machine
    itemsize, elements = request.types.src.itemsize, dst.size(problem.dst_shape)
    moved = m.move_seconds(itemsize * elements, itemsize * elements)
    if isinstance(problem, ReorderProblem):
        return max(moved, elements / math.gcd(src.blocks[1], dst.blocks[1]) * m.scalar_seconds())
    moved = moved if src == dst else 3 * moved
    if isinstance(problem, GatherProblem):
        moved += m.launch_seconds() * max(0, _count(request) - 1)
        extents = sum(1 if step == 1 else size for _, size, step in problem.runs[1])
        alone = geometry(src, problem.shape, itemsize).channel == itemsize and extents * 4 > problem.dst_shape[1]
        return moved + (elements * m.scalar_seconds() if alone else 0.0)
    return moved


def _requantized_seconds(request: Request, how: CopyMethod) -> float:
    """To requantize as many elements as the destination has, where some stand for something else."""
    given = how.quantizations
    if given is None or all(one == given[-1] for one in given):
        return 0.0
    m = request.machine
    return request.dst.size(request.problem.dst_shape) / m.lanes(4) * QUANTIZED_CYCLES * m.cycle_seconds()


def _row(
    op: str,
    launches: Callable[..., list[Launch]],
    why_not: Callable[[Request], Reason | None] = _why_not,
    dtypes: Iterable[str] = NUMBERS,
) -> Row:
    def make(
        request: Request, quantizations: tuple[Quantization, ...] | None = None, **options: Any
    ) -> Primitive | Reason:
        reason = why_not(request)
        if reason:
            return reason
        request = _in_lines(request)
        problem, src, dst, types = request.problem, request.src, request.dst, request.types
        how = CopyMethod(types.src, request.threads, quantizations)

        def cost() -> float:
            seconds = max(_seconds(request), _requantized_seconds(request, how))
            return request.machine.launch_seconds() + seconds / request.threads

        def bound() -> list[Launch]:
            found = launches(problem, src, dst, how, **options)
            if isinstance(problem, ReorderProblem):  # which fills images too with its own
                return found
            zero = quantizations[-1].zero_point if quantizations else 0
            for buffer in [op.args[StridedCopyArgs.dst.first] for op in found[-1:]]:
                assert isinstance(buffer, Buffer)
                found += fill_images(dst, problem.dst_shape, types.src.itemsize, buffer.index, zero)
            return found

        return Primitive(cost=cost, make=bound)

    return Row(f"{op}_box", op, make, frozenset(dtypes))


MOVED = frozenset(str(Types.bits(itemsize)) for itemsize in ITEMSIZE.values())

ROWS = (
    _row("concat", _concat_ops),
    *(_row(op, _gather_ops) for op in ("gather", "slice", "shuffle")),
    _row("pad", _pad_ops),
    _row("reorder", _reorder_ops, why_not=_why_not_reorder, dtypes=MOVED),
)
