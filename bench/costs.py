"""`python -m bench costs`: what rows predict beside what their kernels take, and what the choices made by it cost.

Every row of the kernel table that takes a problem of the lists runs it in every layout, from and to itself. Three
figures tell whether a prediction is of use. The first is its error. For two ways to run a problem whose times differ,
the second tells whether the faster one is predicted to be faster (a planner needs no more). The third is the regret: by
how much the taken row is slower than the best one for the same layout.

Times that were measured once judge any prediction: `--measured FILE` asks the rows anew, under the profile that counts
now, and measures nothing. `--check` ends with status 1 where predictions are below `BARS`.
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
from blockconv.kernels import Row
from blockconv.kernels.common.request import Request
from blockconv.kernels.table import Primitive

from . import grid
from .grid import Grid
from .results import Case
from .timing import compare

__all__ = [
    "BARS",
    "DIFFERENT",
    "LISTS",
    "Quality",
    "Way",
    "anew",
    "case",
    "markdown",
    "missed",
    "quality",
    "table",
    "worst",
]

LISTS = ("peers", "depthwise", "grouped", "pools")
DIFFERENT = 0.10  # times that differ by less are level: neither need be predicted to be the shorter
TYPES = Types.all("float32")
LEVEL = 0.05  # a choice that is slower than the best one by no more is right


class Bars(NamedTuple):
    """The goals of predictions: a median error at the most, shares of pairs and of choices at the least."""

    error: float = 0.15
    ordered: float = 0.95
    right: float = 0.95


BARS = Bars()


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
    found = {(row.name, str(lay)): one for lay in map(Layout, layouts) for row, one in _ways(op, problem, lay)}
    taken = {(selection.choose(op, problem, lay, lay, TYPES).name, str(lay)) for lay in map(Layout, layouts)}
    runs = {" ".join(key): _run(problem, Layout(key[1]), one) for key, one in found.items()}
    nothing = tuning.program_runner(tuning.copy_of(16).launches(), (64, 64))  # takes the time of a call
    measured = compare(runs | {"": nothing}, rounds=rounds, min_time=200e-6, warmup=2)
    seconds = {name: min(measured[name].samples) * 1e-9 for name in (*runs, "")}
    ways = [
        # The time of an empty call from Python is not the kernel's.
        Way(*key, one.seconds, max(1e-9, seconds[" ".join(key)] - seconds[""]), key in taken)
        for key, one in found.items()
    ]
    text = problem.name or problem.descriptor()
    return {
        "key": f"costs|{of}|{op}|{problem.descriptor()}|{getattr(problem, 'kind', '')}",
        "suite": "costs",
        "title": text,
        "params": {"list": of, "problem": problem.descriptor(), "threads": 1},
        "others": measured.others,
        "speedups": {},  # beside no peer
        "entries": [way._asdict() for way in ways],
    }


def anew(case: Case) -> Case:
    """A case with predictions and choices as they are now, for the times that were measured."""
    _, _, op, text, kind = case["key"].split("|")
    problem: Any = Conv2dProblem.from_descriptor(text) if op == "conv2d" else Pool2dProblem.from_descriptor(text, kind)
    entries = []
    for name in dict.fromkeys(entry["layout"] for entry in case["entries"]):
        there = [entry for entry in case["entries"] if entry["layout"] == name]
        found = {row.name: one for row, one in _ways(op, problem, Layout(name))}
        chosen = selection.choose(op, problem, Layout(name), Layout(name), TYPES).name
        if chosen in {entry["row"] for entry in there}:  # else rows have changed since
            entries += [
                {**entry, "predicted": primitive.seconds, "taken": entry["row"] == chosen}
                for entry in there
                if (primitive := found.get(entry["row"])) is not None
            ]
    return {**case, "entries": entries}


def _ways(op: str, problem: Any, layout: Layout) -> Iterator[tuple[Row, Primitive]]:
    """Every row but the references."""
    for row, one in selection.decisions(op, Request(problem, layout, layout, TYPES)).items():
        if not row.reference and not isinstance(one, str):
            yield row, one


def _run(problem: Any, layout: Layout, primitive: Primitive) -> Any:
    """A function that runs a kernel once, on its own buffers."""
    return tuning.runner(primitive, problem, layout, layout, TYPES.src.itemsize)


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

    @property
    def right(self) -> float:
        """The share of choices that cost no more than `LEVEL` over the best."""
        return sum(regret <= LEVEL for regret in self.regrets) / max(1, len(self.regrets))


def quality(cases: Iterable[Case]) -> Quality:
    """The quality of the predictions for all ways of these cases."""
    problems = [[Way(**entry) for entry in case["entries"]] for case in cases]
    ratios = [way.predicted / way.measured for ways in problems for way in ways]
    middle = statistics.median(ratios)
    errors = sorted(abs(ratio / middle - 1) for ratio in ratios)
    pairs = [pair for ways in problems for pair in itertools.combinations(ways, 2) if _differ(*pair)]
    right = sum((a.predicted < b.predicted) == (a.measured < b.measured) for a, b in pairs)
    regrets = sorted(regret for ways in problems for regret, _, _ in _choices(ways))
    error = errors[len(errors) // 2], errors[len(errors) * 9 // 10]
    return Quality(len(ratios), middle, error, len(pairs), right / max(1, len(pairs)), tuple(regrets))


def missed(q: Quality) -> list[str]:
    """The figures that fall short of `BARS`, in words."""
    found = {
        f"the median error is {q.error[0]:.1%}, over {BARS.error:.0%}": q.error[0] > BARS.error,
        f"{q.ordered:.1%} of the pairs are in order, under {BARS.ordered:.0%}": q.ordered < BARS.ordered,
        f"{q.right:.1%} of the choices are right within {LEVEL:.0%}, under {BARS.right:.0%}": q.right < BARS.right,
    }
    return [text for text, is_short in found.items() if is_short]


def _differ(a: Way, b: Way) -> bool:
    fast, slow = sorted((a.measured, b.measured))
    return slow > (1 + DIFFERENT) * fast


def _choices(ways: Sequence[Way]) -> Iterator[tuple[float, Way, Way]]:
    """(by how much the row that is taken is slower than the fastest, both), in each layout."""
    for layout in {way.layout: None for way in ways}:
        here = [way for way in ways if way.layout == layout]
        taken, best = next(way for way in here if way.taken), min(here, key=lambda way: way.measured)
        yield taken.measured / best.measured - 1, taken, best


HEADS = ("list", "ways", "predicted / measured", "error, median", "error, 90 %", "pairs that differ", "in order",
         "choices", "regret up to 5 %", "largest regret")  # fmt: skip


def _rows(cases: Sequence[Case]) -> Iterator[tuple[str, ...]]:
    """The quality of each list, and of all, under `HEADS`."""
    for name in (*LISTS, None):
        chosen = [case for case in cases if name is None or case["params"]["list"] == name]
        if not chosen:
            continue
        q = quality(chosen)
        shares = f"{q.ratio:.2f}", f"{q.error[0]:.0%}", f"{q.error[1]:.0%}", str(q.pairs), f"{q.ordered:.1%}"
        yield name or "all", str(q.ways), *shares, str(len(q.regrets)), f"{q.right:.1%}", f"{q.regrets[-1]:.0%}"


def table(cases: Sequence[Case]) -> Table:
    """The quality of each list, and of all."""
    return Grid("Predicted beside measured, one thread", HEADS, [*_rows(cases)]).table()


def markdown(cases: Sequence[Case]) -> Iterator[str]:
    """The same as Markdown."""
    return grid.markdown(HEADS, [*_rows(cases)])


def worst(cases: Sequence[Case], count: int) -> Table:
    """The choices with the largest regret, and the row that would have been best."""
    listed = [
        (regret, case["title"], taken.layout, taken.row, best.row)
        for case in cases
        for regret, taken, best in _choices([Way(**entry) for entry in case["entries"]])
    ]
    rows = [(*rest, f"{regret:.0%}") for regret, *rest in sorted(listed, reverse=True)[:count]]
    return Grid("The costliest choices", ("problem", "layout", "taken", "fastest", "regret"), rows, range(4)).table()
