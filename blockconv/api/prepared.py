"""Everything that a convolution's problem needs and that does not depend on its weights: a kernel, their packed form, a
program."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import NamedTuple

from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.dispatch.packing import (
    Packing,
    packing,
)
from blockconv.kernels import Row, WeightForm
from blockconv.kernels.common.request import Request
from blockconv.kernels.table import Epilogue
from blockconv.runtime import Program


class Prepared(NamedTuple):
    """Everything that a problem needs, without the weights. All convolutions of the problem share it.

    packing: of the weights, which the program begins with; None if they come packed.
    workspace: bytes of memory that the program needs, whose buffer is the last one; 0: none.
    """

    form: WeightForm
    program: Program
    packing: Packing | None
    workspace: int = 0


@functools.lru_cache(maxsize=1024)
def prepared(
    row: Row,
    problem: Conv2dProblem,
    src: Layout,
    dst: Layout,
    types: Types,
    threads: int,
    epilogue: Epilogue,
    weights: Layout | None,
) -> Prepared:
    """weights: the layout that they are given in, if the program is to pack them."""
    prepare = functools.partial(row.prepare, problem, src, dst, types, anchor=selection.anchor_of(problem))
    primitive = prepare(threads=threads)
    alone = primitive if threads == 1 else prepare(threads=1)
    workspace = sum(primitive.workspace)
    if weights is None:
        return Prepared(primitive.form, Program(primitive.launches(epilogue), alone.seconds), None, workspace)
    # One program, so that threads are woken once. The weights' buffers come after those of the convolution, and the
    # workspace after them.
    how = packing(problem, weights, primitive.form, primitive.form.dot.itemsize or types.wei.itemsize)
    first = [launch.with_buffers({0: 6, 2: 7}) for launch in how.program.launches]
    seconds = alone.seconds + selection.packing_seconds(alone, Request(problem, src, dst, types))
    launches = [launch.with_buffers({6: 8}) for launch in primitive.launches(epilogue)]
    return Prepared(primitive.form, Program([*first, *launches], seconds), how, workspace)


# Which kernels of the table each algorithm may take.
ALGORITHMS: dict[str, Callable[[Row], bool]] = {
    "auto": lambda row: True,
    "direct": lambda row: row.algorithm == "direct" and not row.reference,
    "winograd": lambda row: row.algorithm == "winograd",
    "reference": lambda row: row.reference,
}


def by_algorithm(function: str, op: str, algorithm: str, request: Request, accuracy: float | None) -> Row:
    """The cheapest kernel of an algorithm that the user of a function names. op: of the table's rows."""
    found = selection.decisions(op, request, accuracy)
    found = [c for c in found if ALGORITHMS[algorithm](c.row)]
    best = selection.cheapest(found)
    if best is None:
        rule = "no kernel of this algorithm takes the problem: " + "; ".join(f"{c.row.name} {c.why_not}" for c in found)
        raise ArgumentError(function, "algorithm", algorithm, rule, "give 'auto'")
    return best.row
