"""A run of a suite: what the result file does not have yet is measured, shown and kept, one case after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .report import DISTURBED, Column, notes, render, summary
from .results import Case, ResultFile

__all__ = ["Closing", "Job", "Measure", "Plan", "conditions", "run", "run_jobs"]

Closing = Callable[[Sequence[Case]], Iterable[RenderableType]]


@dataclass(frozen=True)
class Plan:
    """A case to be measured: `params` tell it apart, `wanted` what is to be in it, `measure` fills it."""

    suite: str
    title: str
    params: dict[str, Any]
    measure: Callable[[], Case]
    wanted: dict[str, list[str]] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return "|".join([self.suite, *(f"{name}={value}" for name, value in self.params.items())])


class Job(NamedTuple):
    """A case to be measured, and where it is kept. kind: of the machine that measures it; "" for this one."""

    plan: Plan
    results: ResultFile
    kind: str = ""


Measure = Callable[[Sequence[Job], Callable[[str], None]], Iterator[tuple[Job, Case]]]
"""measure(jobs, say) gives each job with its case; `say` shows what is going on."""


def conditions(threads: int, timing: dict[str, Any], dtype: str = "float32") -> tuple[dict[str, Any], str]:
    """(params, words of a title) of how something is measured. float32 is not named: it is what nearly all is."""
    params: dict[str, Any] = {"threads": threads, "cold": timing.get("cold", False)}
    words = [f"{threads} threads", *(["cold"] if params["cold"] else [])]
    if dtype != "float32":
        params["dtype"] = dtype
        words.append(dtype)
    return params, ", ".join(words)


def run(
    plans: Sequence[Plan],
    results: ResultFile,
    columns: Sequence[Column],
    console: Console,
    closing: Closing = lambda cases: [],
    *,
    again: int = 0,
) -> bool:
    """Measure what the file does not have yet, here, and show it, with what `closing` makes of all.

    again: how often a case that others disturbed is measured once more; the least disturbed measurement is kept.
    Returns False if it did not measure all.
    """

    def measure(jobs: Sequence[Job], say: Callable[[str], None]) -> Iterator[tuple[Job, Case]]:
        for job in jobs:
            plan = job.plan
            say(plan.title)
            case = {"key": plan.key, "suite": plan.suite, "title": plan.title, "params": plan.params | plan.wanted}
            yield job, case | _measured(plan, again)

    return run_jobs([Job(plan, results) for plan in plans], measure, columns, console, closing)


def run_jobs(
    jobs: Sequence[Job], measure: Measure, columns: Sequence[Column], console: Console, closing: Closing
) -> bool:
    """Have measured what files do not have yet, keep and show each case as it comes; False if not all were measured."""
    shown: list[Job] = []

    def show(job: Job) -> None:
        shown.append(job)
        _show(job, columns, console)
        progress.advance(bar)

    style = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    try:
        with Progress(*style, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(jobs))
            waiting = []
            for job in jobs:
                if job.results.has(job.plan.key, job.plan.wanted):
                    console.print(f"{job.plan.title}: already measured", style="dim", markup=False)
                    show(job)
                else:
                    waiting.append(job)
            for job, case in measure(waiting, lambda text: progress.update(bar, description=text)):
                job.results.add(case)
                show(job)
    except KeyboardInterrupt:
        paths = ", ".join(sorted({str(job.results.path) for job in jobs if job.results.path}))
        kept = f": what was measured is in {paths}; --resume goes on" if paths else ""
        console.print(f"interrupted{kept}", style="bold")
        return False
    finally:
        for kind in dict.fromkeys(job.kind for job in shown):
            cases = [job.results.cases[job.plan.key] for job in shown if job.kind == kind]
            if kind:
                console.print(kind, style="bold", markup=False)
            for part in closing(cases):
                console.print(part)
            console.print(summary(cases), markup=False)
    return len(shown) == len(jobs)


def _show(job: Job, columns: Sequence[Column], console: Console) -> None:
    case = job.results.cases[job.plan.key]
    if job.kind:
        console.print(f"{job.kind}, {case['host']}:", style="dim", markup=False)
    console.print(render(case, columns))
    for note in notes(case):
        console.print(note, style="red", markup=False, highlight=False, soft_wrap=True)
    if (others := _others(case)) > DISTURBED:
        text = f"other processes kept {others:.2f} processors busy: measure again on a quiet machine"
        console.print(text, style="yellow")


def _measured(plan: Plan, again: int) -> Case:
    found = [plan.measure()]
    while _others(found[-1]) > DISTURBED and len(found) <= again:
        found.append(plan.measure())
    return min(found, key=_others)


def _others(case: Case) -> float:
    return float(case.get("others") or 0.0)
