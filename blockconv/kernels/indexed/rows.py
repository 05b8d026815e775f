"""Gathers and scatters by indices that flow, running sums, and largest elements: ops of row-major data.

An index that the data does not have is a failure (`Primitive.fails`): it is reported, reads zeros, and writes nothing.

Buffers: gather_at: data, indices, destination, report. scatter_at: data, indices, updates, destination, report. scan,
top: source, destination. Types: the source's type is the data's, the weights' type is the indices'.
"""

import math

from blockconv.core.checks import MOST_DIMENSIONS
from blockconv.core.types import NUMBERS, Types
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.tasks import chunk_of
from blockconv.kernels.indexed.kernels import (
    SCANS,
    SCATTERS,
    AxisLinesArgs,
    IndexedArgs,
    IndexedAxis,
    IndexLoop,
    OutsideIndex,
    gather_at,
    scan,
    scatter_at,
    top,
)
from blockconv.kernels.table import Primitive, Row
from blockconv.runtime import Buffer, Launch

INDEX_BYTES = 16  # of an item at the least, when threads share them
INDEX_CYCLES, ELEMENT_CYCLES = 20, 6  # of an item that is found by its index, and of an element in a scalar loop
_EMPTY = IndexedAxis(least=0, size=1, stride=0)


def _index_args(request: Request, **buffers: Buffer) -> IndexedArgs:
    p, itemsize, index = request.problem, request.itemsize, request.types.wei.itemsize
    strides = [math.prod(p.shape[k + 1 :]) * itemsize for k in range(len(p.shape))]
    axes = [IndexedAxis(least=p.least(k), size=p.shape[k], stride=strides[k]) for k in p.components]
    loops = fused(Loop(size, (data * itemsize, indices * index)) for size, data, indices in p.loops if size > 1)
    count, size = math.prod(size for size, _, _ in p.loops), p.elements * itemsize
    return IndexedArgs(
        data=Buffer(0),
        indices=Buffer(1),
        **buffers,
        whole=math.prod(p.shape) * itemsize,
        size=size,
        count=count,
        components=len(axes),
        axes=[*axes, *[_EMPTY] * (MOST_DIMENSIONS - len(axes))],
        depth=len(loops),
        loops=[IndexLoop(size=loop.size, data=loop.src, indices=loop.dst) for loop in reversed(loops)],
    )


def _gather(request: Request) -> list[Launch]:
    args = _index_args(request, items=Buffer(2), dst=Buffer(2), outside=Buffer(3))
    chunk = chunk_of(args.count, max(args.size, INDEX_BYTES), request.threads)
    return [Launch(gather_at(request.types.wei), args, args.count, chunk)]


def _scatter(request: Request, kind: str = "none") -> list[Launch]:
    args = _index_args(request, items=Buffer(2), dst=Buffer(3), outside=Buffer(4))
    # A plain copy is the same for all types of one size.
    type = request.types.src if kind != "none" else Types.bits(request.itemsize).src
    return [Launch(scatter_at(request.types.wei, type, SCATTERS.index(kind)), args, 1)]


def _lines(request: Request, count: int) -> tuple[AxisLinesArgs, int, int]:
    """(args, tasks, how many are taken at a time)."""
    outer, size, inner = request.problem.lines
    args = AxisLinesArgs(size=size, inner=inner, count=count)
    return args, outer * inner, chunk_of(outer * inner, size * request.itemsize, request.threads)


def _scan(request: Request) -> list[Launch]:
    p = request.problem
    kernel = scan(request.types.src, SCANS.index(p.kind), p.exclusive, p.reverse)
    return [Launch(kernel, *_lines(request, 1))]


def _top(request: Request) -> list[Launch]:
    p = request.problem
    kernel = top(request.types.src, p.smallest, p.last)
    return [Launch(kernel, *_lines(request, p.count), scratch=16 * p.count)]


def _is_row_major(request: Request) -> Reason | None:
    for layout in (request.src, request.dst):
        if layout.tag != "abcdefghij"[: layout.ndim]:
            return f"needs row-major arrays, unlike {layout}"
    type = request.types.src
    return None if type.name in NUMBERS else f"does not take {type}"


def _row(op: str, launches: object, cycles: int) -> Row:
    fails = op in ("gather_at", "scatter_at")
    workspace = (OutsideIndex.nbytes,) if fails else ()

    def seconds(request: Request) -> float:
        p, m, itemsize = request.problem, request.machine, request.itemsize
        count = math.prod(p.dst_shape) / max(1, p.elements) if fails else math.prod(p.shape)
        moved = m.move_seconds(itemsize * math.prod(p.dst_shape), itemsize * math.prod(p.dst_shape))
        return m.launch_seconds() + moved + count * cycles * m.cycle_seconds() / request.threads

    def make(request: Request, **options: object) -> Primitive | Reason:
        return _is_row_major(request) or Primitive(
            lambda: seconds(request),
            lambda: launches(request, **options),  # type: ignore[operator]
            workspace=workspace,
            fails=fails,
        )

    return Row(op, op, make)


ROWS = (
    _row("gather_at", _gather, INDEX_CYCLES),
    _row("scatter_at", _scatter, INDEX_CYCLES),
    _row("scan", _scan, ELEMENT_CYCLES),
    _row("top", _top, ELEMENT_CYCLES),
)
