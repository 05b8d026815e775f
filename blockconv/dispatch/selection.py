"""Which kernel solves a problem: what every row decides, a primitive with its cost or the reason why not.

Reorders are chosen like all else; their programs are kept here.
"""

import functools
import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from blockconv.core import text
from blockconv.core.checks import Shape
from blockconv.core.errors import ArgumentError, UnsupportedError, warn
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem, ReorderProblem
from blockconv.core.python import bounded_cache
from blockconv.core.quantization import Quantization
from blockconv.core.types import ElementType, Types
from blockconv.kernels import TABLE, Row
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.table import Primitive
from blockconv.machine.machine import Machine
from blockconv.runtime import Program

# The names of largest errors of a kernel, relative to the largest output. None is NEAR times direct convolution's. 0 is
# none, so that kernels compute by the definition.
ACCURACIES: dict[str, float | None] = {"default": None, "strict": 0.0}
NEAR = 3.0

# Widths of images in usual networks: 224, 256, 320, 384, 416, 640 pixels and their halves.
COMMON_WIDTHS = frozenset(odd << k for odd in (1, 3, 5, 7, 13) for k in range(9))


def accuracy_of(op: str, value: Any) -> float | None:
    """One of ACCURACIES, or a number. Raises ArgumentError, in the name of a function `op`."""
    if isinstance(value, str) and value in ACCURACIES:
        return ACCURACIES[value]
    if isinstance(value, bool) or not isinstance(value, (int, float, np.floating, np.integer)) or not value >= 0:
        rule = f"has to be a number of at least 0, or one of {', '.join(ACCURACIES)}"
        raise ArgumentError(op, "accuracy", value, rule)
    try:
        return float(value)
    except OverflowError:  # an int that no float holds
        return math.inf


def rows_for(op: str, types: Types | None = None) -> list[Row]:
    """The table's rows of an op, in its order: all, or those for some element types."""
    return [row for row in TABLE if row.op == op and (types is None or row.takes(types))]


def has_kernels(op: str, type: ElementType) -> bool:
    """Whether the table has kernels for an op and a type. 4-bit integers may run as 8-bit integers."""
    return bool(rows_for(op, Types.all(type.unpacked.name)))


def decisions(op: str, request: Request, accuracy: float | None = None) -> dict[Row, Primitive | Reason]:
    """The decision of each of the table's rows for `op`, in the table's order."""
    return {row: decide(row, request, accuracy) for row in rows_for(op)}


def decide(row: Row, request: Request, accuracy: float | None = None) -> Primitive | Reason:
    """`Row.decide`, which also rejects kernels whose stated error is more than `accuracy`; see ACCURACIES."""
    found = row.decide(request)
    if isinstance(found, Reason) or row.error is None:
        return found
    error, direct = row.error(request.problem)
    most = NEAR * direct if accuracy is None else accuracy
    return found if error <= most else f"has an error of up to {error:.1e} of the largest output, more than {most:.1e}"


def anchor_of(problem: Any) -> Any:
    """The anchor of a call on arrays (`Request.anchor`): None, or the problem itself, so that kernels are for any size.

    A depthwise kernel for short rows is compiled for its width, which may differ at each call. Only usual widths have
    such kernels in calls.
    """
    is_any = isinstance(problem, Conv2dProblem) and problem.is_depthwise and problem.iw not in COMMON_WIDTHS
    return problem if is_any else None


def choose(
    op: str, problem: Any, src: Layout, dst: Layout, types: Types, accuracy: float | None = None, once: bool = False
) -> Row:
    """The row whose kernel is predicted to take the least time, of equals the first; a reference if there is no other.

    The choice depends on the problem alone, never on the threads, so that results keep their bits. A fall to the
    reference warns of what was missing. once: weights are packed for one call, which counts too.
    """
    request = Request(problem, src, dst, types, anchor=anchor_of(problem))
    found = decisions(op, request, accuracy)
    best = cheapest(found, request if once else None)
    if best is not None and not best[0].reference:
        return best[0]
    rejected = "; ".join(f"{row.name}: {one}" for row, one in found.items() if isinstance(one, Reason))
    if best is None:
        raise UnsupportedError(f"{op} from {src} to {dst}, {types}: no kernel takes it. {rejected}")
    if rejected:
        said = f"blockconv: {op} from {src} to {dst} runs on the slow reference kernel {best[0].name}: "
        warn(said + rejected, stacklevel=3)
    return best[0]


@bounded_cache
def program_of(
    op: str, problem: Any, src: Layout, dst: Layout, types: Types, threads: int, **options: Any
) -> tuple[Program, int]:
    """The program of the row that is chosen, and the bytes of its workspace. options: of the row."""
    row = choose(op, problem, src, dst, types)
    primitive = alone = row.prepare(problem, src, dst, types, **options)
    if threads > 1:
        primitive = row.prepare(problem, src, dst, types, threads, **options)
    return Program(primitive.launches(), alone.seconds), sum(primitive.workspace)


def cheapest(found: Mapping[Row, Primitive | Reason], packed: Request | None = None) -> tuple[Row, Primitive] | None:
    """The row of `decisions` that is taken: see `choose`. None if none takes the problem.

    packed: the request, if packing its weights counts.
    """
    taken = [(row, one) for row, one in found.items() if not isinstance(one, Reason)]
    return min(
        [c for c in taken if not c[0].reference] or taken,
        key=lambda c: c[1].seconds + (packing_seconds(c[1], packed) if packed else 0.0),
        default=None,
    )


def packing_seconds(primitive: Primitive, request: Request) -> float:
    """Seconds to pack a problem's weights, and for the kernel to read them once more."""
    form, problem, itemsize = primitive.form, request.problem, request.types.wei.itemsize
    written = form.read_bytes(problem, itemsize)
    moved = request.machine.move_seconds(itemsize * math.prod(problem.wei_shape) + written, written)
    parts = [(of.form.transform, of.problem) for of in form.pieces] or [(form.transform, problem)]
    return moved + sum(transform.seconds(of) for transform, of in parts if transform is not None)


def named(op: str, name: str) -> Row:
    """The row of `op` with this name."""
    return next(row for row in rows_for(op) if row.name == name)


class Explanation(str):
    """The table of `explain`; `candidates` has its rows as dicts, with numbers in place of texts."""

    candidates: list[dict[str, Any]]


def explain(
    op: str, problem: Any, pairs: Iterable[tuple[Layout, Layout]], types: Types, threads: int, machine: Machine
) -> Explanation:
    """The candidates for each pair of layouts as a table. It marks the choice for one thread, as `choose` makes it."""
    rows: list[tuple[str, str, str, str]] = []
    candidates, starts = [], []  # starts: of each pair
    for src, dst in pairs:
        starts.append(len(rows))
        request = Request(problem, src, dst, types, threads, machine)
        best = cheapest(decisions(op, request.on_threads(1)))
        for row, found in decisions(op, request).items():
            why, seconds = (found, None) if isinstance(found, Reason) else (None, found.seconds)
            taken = best is not None and row is best[0]
            at: dict[str, Any] = {"kernel": row.name, "src": str(src), "dst": str(dst)}
            candidates.append(at | {"seconds": seconds, "why_not": why, "taken": taken})
            said = f"no: {why}" if why else "taken" if taken else ""
            rows.append((row.name, text.arrow(src, dst), "" if seconds is None else text.duration(seconds), said))
    heads = "kernel", "layouts", f"predicted,\n{text.threads(threads)}", ""
    told = Explanation(text.table(heads, rows, right=(2,), rules=starts[1:]))
    told.candidates = candidates
    return told


# ---------------------------------------------------------------- reorders


Ends = tuple[Quantization | None, Quantization | None]  # what source and destination stand for; None: floats


def _moved(itemsize: int) -> Types:
    """The types of elements that are moved as they are."""
    return Types.bits(itemsize) if itemsize else Types.converted("uint4", "uint4")


@functools.lru_cache(maxsize=1 << 16)
def reorder_seconds(machine: Machine, shape: Shape, src: Layout, dst: Layout, itemsize: int) -> float:
    """The predicted seconds of `reorder_program` on one thread: those of the kernel that is chosen on this machine."""
    types = _moved(itemsize)
    request = Request(ReorderProblem(shape, src.name, dst.name, types.src.itemsize), src, dst, types, 1, machine)
    best = cheapest(decisions("reorder", request))
    assert best is not None, "one row takes every reorder"
    return best[1].seconds


@bounded_cache
def reorder_program(
    shape: Shape,
    src: Layout,
    dst: Layout,
    elements: int | Types,
    quantizations: Ends | None = None,
    stream: bool = False,
    fill: int = 0,
) -> Program:
    """The program of a reorder, from buffer 0 to buffer 1.

    elements: the bytes of elements that are moved as they are, 0 for packed 4-bit ones; or the types to convert from
        and to.
    quantizations: of source and destination, None of floats; None where elements are moved.
    stream: store past the caches, to addresses of whole lines.
    fill: the bits of the destination's padding, which holds the zero point where elements are converted.
    """
    types = elements if isinstance(elements, Types) else _moved(elements)
    problem = ReorderProblem(shape, src.name, dst.name, types.src.itemsize)
    options = {"stream": stream, "quantizations": quantizations, "fill": fill}
    return program_of("reorder", problem, src, dst, types, 1, **options)[0]
