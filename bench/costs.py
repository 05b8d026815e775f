"""`python -m bench costs`: what rows predict beside what their kernels take, and what the choices made by it cost.

Every row of the kernel table that takes a problem of the lists runs it in every layout, from and to itself. Three
figures tell whether a prediction is of use: its error; of two ways to run the same problem whose times differ, whether
the faster one is predicted to be (a planner asks no more); and by how much the row that is taken is slower than the
best one for the same layout (its regret).
"""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, NamedTuple

from rich.table import Table

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem, Pool2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection, tuning
from blockconv.dispatch.selection import Candidate

from .results import Case
from .timing import compare

__all__ = ["DIFFERENT", "LISTS", "Quality", "Way", "case", "quality", "table", "worst"]

LISTS = ("peers", "depthwise", "grouped", "pools")
DIFFERENT = 0.10  # times that differ by less are level: neither need be predicted to be the shorter
TYPES = Types.all("float32")


class Way(NamedTuple):
    """A row that runs a problem from and to a layout; predicted and measured are seconds on one thread."""

    row: str
    layout: str
    predicted: float
    measured: float
    taken: bool


# ---------------------------------------------------------------- measuring


def case(of: str, problem: Conv2dProblem | Pool2dProblem, layouts: Sequence[str], rounds: int) -> Case:
    """A problem of the list `of`, with every way to run it as an entry."""
    op = "conv2d" if isinstance(problem, Conv2dProblem) else "pool2d"
    found = {(c.row.name, str(c.src)): c for name in layouts for c in _ways(op, problem, Layout(name))}
    taken = {(selection.choose(op, problem, lay, lay, TYPES).name, str(lay)) for lay in map(Layout, layouts)}
    runs = {" ".join(key): _run(problem, candidate) for key, candidate in found.items()}
    measured = compare(runs, rounds=rounds, min_time=200e-6, warmup=2)
    ways = [
        Way(*key, c.primitive.seconds, min(measured[" ".join(key)].samples) * 1e-9, key in taken)
        for key, c in found.items()
        if c.primitive is not None
    ]
    text = problem.name or problem.descriptor()
    return {
        "key": f"costs|{of}|{op}|{problem.descriptor()}|{getattr(problem, 'kind', '')}",
        "suite": "costs",
        "title": text,
        "params": {"list": of, "problem": problem.descriptor(), "threads": 1},
        "others": measured.others,
        "entries": [way._asdict() for way in ways],
    }


def _ways(op: str, problem: Any, layout: Layout) -> Iterator[Candidate]:
    """Every row but the references."""
    for candidate in selection.candidates(op, problem, layout, layout, TYPES):
        if candidate.primitive is not None and not candidate.row.reference:
            yield candidate


def _run(problem: Any, candidate: Candidate) -> Any:
    """What runs a candidate once, on buffers of its own."""
    assert candidate.primitive is not None
    return tuning.runner(candidate.primitive, problem, candidate.src, candidate.dst, TYPES.src.itemsize)


# ---------------------------------------------------------------- what it comes to


class Quality(NamedTuple):
    """How good the predictions for a list are.

    ratio: predicted over measured, the median. error: of the predictions, once they are divided by that, as quantiles
    (a half, nine tenths). ordered: of pairs of ways to run one problem that differ by `DIFFERENT`, the share predicted
    in order. regrets: of each choice of a row, sorted.
    """

    ways: int
    ratio: float
    error: tuple[float, float]
    pairs: int
    ordered: float
    regrets: tuple[float, ...]


def quality(cases: Iterable[Case]) -> Quality:
    """Of all ways of these cases."""
    problems = [[Way(**entry) for entry in case["entries"]] for case in cases]
    ratios = [way.predicted / way.measured for ways in problems for way in ways]
    middle = statistics.median(ratios)
    errors = sorted(abs(ratio / middle - 1) for ratio in ratios)
    pairs = [pair for ways in problems for pair in itertools.combinations(ways, 2) if _differ(*pair)]
    right = sum((a.predicted < b.predicted) == (a.measured < b.measured) for a, b in pairs)
    regrets = sorted(regret for ways in problems for regret, _, _ in _choices(ways))
    error = errors[len(errors) // 2], errors[len(errors) * 9 // 10]
    return Quality(len(ratios), middle, error, len(pairs), right / max(1, len(pairs)), tuple(regrets))


def _differ(a: Way, b: Way) -> bool:
    fast, slow = sorted((a.measured, b.measured))
    return slow > (1 + DIFFERENT) * fast


def _choices(ways: Sequence[Way]) -> Iterator[tuple[float, Way, Way]]:
    """(by how much the row that is taken is slower than the fastest, both), in each layout."""
    for layout in {way.layout: None for way in ways}:
        here = [way for way in ways if way.layout == layout]
        taken, best = next(way for way in here if way.taken), min(here, key=lambda way: way.measured)
        yield taken.measured / best.measured - 1, taken, best


def table(cases: Sequence[Case]) -> Table:
    """The quality of each list, and of all."""
    found = Table(title="Predicted beside measured, one thread", title_justify="left", title_style="bold")
    heads = "list", "ways", "predicted\n/ measured", "error,\nmedian", "error,\n90 %", "pairs that\ndiffer", "in order"
    for k, head in enumerate((*heads, "choices", "regret\nup to 5 %", "largest\nregret")):
        found.add_column(head, justify="right" if k else "left")
    for name in (*LISTS, None):
        chosen = [case for case in cases if name is None or case["params"]["list"] == name]
        if not chosen:
            continue
        q = quality(chosen)
        cells = (
            str(q.ways),
            f"{q.ratio:.2f}",
            f"{q.error[0]:.0%}",
            f"{q.error[1]:.0%}",
            str(q.pairs),
            f"{q.ordered:.1%}",
        )
        within = sum(regret <= 0.05 for regret in q.regrets) / len(q.regrets)
        found.add_row(name or "all", *cells, str(len(q.regrets)), f"{within:.1%}", f"{q.regrets[-1]:.0%}")
    return found


def worst(cases: Sequence[Case], count: int) -> Table:
    """The choices with the largest regret, and the row that would have been best."""
    found = Table(title="The costliest choices", title_justify="left", title_style="bold")
    for head in ("problem", "layout", "taken", "fastest", "regret"):
        found.add_column(head)
    listed = [
        (regret, case["title"], taken.layout, taken.row, best.row)
        for case in cases
        for regret, taken, best in _choices([Way(**entry) for entry in case["entries"]])
    ]
    for regret, title, layout, taken_row, best_row in sorted(listed, reverse=True)[:count]:
        found.add_row(title, layout, taken_row, best_row, f"{regret:.0%}")
    return found
