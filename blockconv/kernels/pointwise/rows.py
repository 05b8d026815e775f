"""Choices, comparisons, logic, arithmetic of integers and conversions: ops of elements of any number types.

All operands have the layout of the destination, and any of them may have one element along an axis where others have
more. So there is one stride for each operand and each axis of the storage, which is zero where the operand is
broadcast. Contiguous extents of the destination are vectors; along these an operand has as many elements, or one.

Buffers: the operands, the destination. Types: the source's type is the operands' (except the first of `where`, which is
boolean), the destination's type is the result's.
"""

from __future__ import annotations

import math

from blockconv.core.element_problem import PointwiseProblem
from blockconv.core.layout import Layout
from blockconv.core.types import NUMBERS, ElementType, Types, element
from blockconv.kernels.common.loop_nest import Loop, fused
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.common.same_layout import same_layout_why_not
from blockconv.kernels.common.tasks import TASK_BYTES, chunk_of
from blockconv.kernels.pointwise.codegen import KINDS, operand_types
from blockconv.kernels.pointwise.kernels import PointwiseArgs, PointwiseLoop, pointwise
from blockconv.kernels.table import Primitive, Row
from blockconv.runtime import Buffer, Launch

ALL = 1 << 40  # channels, where none is missing
EXTENT_CYCLES, VECTOR_CYCLES = 12, 2  # beside memory: of an extent, and of a vector


def _loops(problem: PointwiseProblem, layout: Layout) -> list[Loop]:
    """The loops over the destination's storage, outermost first; strides of the destination and the operands."""
    shape = problem.dst_shape
    ragged = bool(layout.is_blocked and shape[1] % layout.blocks[1])
    axes = [layout.axes(shape), *(layout.axes(one) for one in problem.shapes)]
    loops = []
    for axis, *others in zip(*axes, strict=True):
        strides = (
            0 if one[axis.dim] == 1 and shape[axis.dim] != 1 else other.stride
            for one, other in zip(problem.shapes, others, strict=True)
        )
        if axis.size > 1:
            loops.append(Loop(axis.size, (axis.stride, *strides), axis.dim, axis.step))
    found = fused(loops, alone=lambda loop: ragged and loop.dim == 1)
    contiguous = bool(found) and found[-1].strides[0] == 1
    return found if contiguous else [*found, Loop(1, (1, *[0] * len(problem.shapes)))]


def _launches(request: Request) -> list[Launch]:
    p, types, layout, threads = request.problem, request.types, request.dst, request.threads
    if 0 in p.dst_shape:
        return []
    *outer, inner = _loops(p, layout)
    sizes = [types.dst.itemsize, *(type.itemsize for type in operand_types(p.kind, types.src))]
    ragged = bool(layout.is_blocked and p.dst_shape[1] % layout.blocks[1])
    unit, nbytes = 64 * 8, inner.size * max(sizes)
    piece = inner.size if nbytes <= 2 * TASK_BYTES else max(1, TASK_BYTES // (unit * max(sizes))) * unit
    pieces = -(-inner.size // piece)
    rows = outer.pop() if outer else Loop(1, (0,) * len(inner.strides))
    task_rows = max(1, min(rows.size, TASK_BYTES // (piece * max(sizes))))
    row_tasks = -(-rows.size // task_rows)
    full = sum(1 << k for k, stride in enumerate(inner.strides[1:]) if stride)
    count = len(p.shapes)
    args = PointwiseArgs(
        **{name: Buffer(min(k, count - 1)) for k, name in enumerate(("src", "second", "third"))},
        dst=Buffer(count),
        extent=inner.size,
        piece=piece,
        pieces=pieces,
        rows=_loop(rows, sizes, ragged),
        task_rows=task_rows,
        row_tasks=row_tasks,
        valid=p.dst_shape[1] if ragged else ALL,
        depth=len(outer),
        loops=[_loop(loop, sizes, ragged) for loop in reversed(outer)],
    )
    tasks = pieces * row_tasks * math.prod(loop.size for loop in outer)
    kernel = pointwise(KINDS.index(p.kind), types.src.code, types.dst.code, full, _lanes(request))
    return [Launch(kernel, args, tasks, chunk_of(tasks, piece * task_rows * max(sizes), threads))]


def _loop(loop: Loop, sizes: list[int], ragged: bool) -> PointwiseLoop:
    dst, *operands = (stride * size for stride, size in zip(loop.strides, sizes, strict=True))
    first, second, third, *_ = *operands, 0, 0
    channels = loop.step if ragged and loop.dim == 1 else 0
    return PointwiseLoop(size=loop.size, dst=dst, first=first, second=second, third=third, channels=channels)


def _lanes(request: Request) -> int:
    types = request.types.src, request.types.dst
    held = [
        type.computed.itemsize if type.is_half and request.problem.kind != "where" else type.itemsize for type in types
    ]
    return request.machine.lanes(max(held))


def _cost(request: Request) -> float:
    p, types, m = request.problem, request.types, request.machine
    *outer, inner = _loops(p, request.dst)
    sizes = zip(operand_types(p.kind, types.src), p.shapes, strict=True)
    read = sum(type.itemsize * request.dst.size(shape) for type, shape in sizes)
    extents, vectors = math.prod(loop.size for loop in outer), -(-inner.size // _lanes(request))
    computed = extents * (EXTENT_CYCLES + vectors * VECTOR_CYCLES) * m.cycle_seconds()
    moved = m.move_seconds(read, types.dst.itemsize * request.dst.size(p.dst_shape))
    return m.launch_seconds() + max(moved, computed) / request.threads


def _why_not(request: Request) -> Reason | None:
    p, types = request.problem, request.types
    if not {types.src.name, types.dst.name} <= {*NUMBERS}:
        return f"takes numbers and booleans, not {types}"
    if types.dst != _result_type(p.kind, types):
        return f"{p.kind} of {types.src} does not give {types.dst}"
    if p.kind in _OF_INTEGERS and types.src.is_float:
        return f"{p.kind} is of integers here, not of {types.src}"
    return same_layout_why_not(request)


_OF_INTEGERS = ("and", "or", "xor", "add", "sub", "mul", "div", "mod", "max", "min")


def _result_type(kind: str, types: Types) -> ElementType:
    return element("bool") if kind in ("equal", "less", "less_equal") else types.dst if kind == "convert" else types.src


def _make(request: Request) -> Primitive | Reason:
    return _why_not(request) or Primitive(lambda: _cost(request), lambda: _launches(request))


ROWS = (Row("pointwise", "pointwise", _make, whole_blocks=True),)
