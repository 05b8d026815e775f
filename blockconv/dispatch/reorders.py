"""The programs of reorders."""

import functools

from blockconv.core.checks import Shape
from blockconv.core.layout import Layout
from blockconv.core.problem import ReorderProblem
from blockconv.core.quantization import Quantization
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels.common.request import Request
from blockconv.machine.machine import Machine
from blockconv.runtime import Program

Ends = tuple[Quantization | None, Quantization | None]  # what source and destination stand for; None: floats


def reorder_program(
    shape: Shape, src: Layout, dst: Layout, itemsize: int, fill: int = 0, stream: bool = False
) -> Program:
    """The program of a reorder, from buffer 0 to buffer 1; itemsize 0 is packed 4-bit.

    fill: the bits of the destination's padding. stream: store past the caches, to addresses of whole lines.
    """
    return conversion_program(shape, (src, dst), _moved(itemsize), None, stream, fill)


def _moved(itemsize: int) -> Types:
    """The types of elements that are moved as they are."""
    return Types.bits(itemsize) if itemsize else Types.converted("uint4", "uint4")


@functools.lru_cache(maxsize=1 << 16)
def reorder_seconds(machine: Machine, shape: Shape, src: Layout, dst: Layout, itemsize: int) -> float:
    """The predicted seconds of `reorder_program` on one thread: those of the kernel that is chosen on this machine."""
    types = _moved(itemsize)
    request = Request(ReorderProblem(shape, src.name, dst.name, types.src.itemsize), src, dst, types, 1, machine)
    best = selection.cheapest(selection.decisions("reorder", request))
    assert best is not None, "one row takes every reorder"
    return best[1].seconds


@functools.lru_cache(maxsize=4096)
def conversion_program(
    shape: Shape,
    layouts: tuple[Layout, Layout],
    types: Types,
    quantizations: Ends | None,
    stream: bool = False,
    fill: int = 0,
) -> Program:
    """The program of a reorder that converts elements, from buffer 0 to buffer 1; the padding holds the zero point.

    quantizations: of source and destination, None of floats; None where elements are moved. stream, fill: as
    `reorder_program` has them.
    """
    src, dst = layouts
    problem = ReorderProblem(shape, src.name, dst.name, types.src.itemsize)
    row = selection.choose("reorder", problem, src, dst, types)
    primitive = row.prepare(problem, src, dst, types, stream=stream, quantizations=quantizations, fill=fill)
    return Program(primitive.launches(), primitive.seconds)
