"""The programs of reorders."""

import functools

from blockconv.core.checks import Shape
from blockconv.core.layout import Layout
from blockconv.core.problem import ReorderProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels.common.request import Request
from blockconv.kernels.reorder.nibbles import nibble_op
from blockconv.machine.machine import Machine
from blockconv.runtime import Buffer, Program

Ends = tuple[Quantization | None, Quantization | None]  # what source and destination stand for; None: floats


@functools.lru_cache(maxsize=4096)
def reorder_program(
    shape: Shape, src: Layout, dst: Layout, itemsize: int, fill: int = 0, stream: bool = False
) -> Program:
    """The program of a reorder, from buffer 0 to buffer 1; itemsize 0 is packed 4-bit.

    fill: the bits of the destination's padding. stream: store past the caches, to addresses of whole lines.
    """
    problem = ReorderProblem(shape, src.name, dst.name, itemsize or 1)
    types = Types.bits(problem.itemsize)
    row = selection.choose("reorder", problem, src, dst, types)
    primitive = row.prepare(problem, src, dst, types, fill=fill, stream=stream)
    launches = primitive.launches()
    if itemsize:
        return Program(launches, primitive.seconds)
    src_bytes, dst_bytes = -(-src.size(shape) // 2), -(-dst.size(shape) // 2)
    inner = [launch.with_buffers({0: 2, 1: 3}) for launch in launches]
    return Program(
        [
            nibble_op(0, Buffer(0), Buffer(2), src_bytes),
            *inner,
            nibble_op(1, Buffer(3), Buffer(1), dst_bytes),
        ]
    )


@functools.lru_cache(maxsize=1 << 16)
def reorder_seconds(machine: Machine, shape: Shape, src: Layout, dst: Layout, itemsize: int) -> float:
    """The predicted seconds of `reorder_program` on one thread: those of the kernel that is chosen on this machine."""
    problem = ReorderProblem(shape, src.name, dst.name, itemsize or 1)
    request = Request(problem, src, dst, Types.bits(problem.itemsize), 1, machine)
    rows = selection.rows_for("reorder", request.types)
    best = selection.cheapest({row: selection.decide(row, request) for row in rows})
    assert best is not None, "the reference takes every reorder"
    seconds = best[1].seconds
    if not itemsize:
        seconds += sum(machine.move_seconds(size // 2, size) for size in (src.size(shape), dst.size(shape)))
    return seconds


@functools.lru_cache(maxsize=4096)
def conversion_program(
    shape: Shape,
    layouts: tuple[Layout, Layout],
    types: Types,
    quantizations: Ends,
    stream: bool = False,
) -> Program:
    """The program of a reorder that converts elements, from buffer 0 to buffer 1; the padding holds the zero point.

    quantizations: of source and destination, None of floats. stream: as `reorder_program` has it.
    """
    src, dst = layouts
    problem = ReorderProblem(shape, src.name, dst.name, types.src.itemsize)
    row = selection.choose("reorder", problem, src, dst, types)
    primitive = row.prepare(problem, src, dst, types, stream=stream, quantizations=quantizations)
    return Program(primitive.launches(), primitive.seconds)
