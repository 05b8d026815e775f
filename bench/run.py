"""A run of a suite: what the result file does not have yet is measured, shown and kept, one case after the other."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from .report import DISTURBED, Column, notes, render, summary
from .results import Case, ResultFile

__all__ = ["Closing", "Plan", "conditions", "run"]

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
    """Measure what the file does not have yet, and show it, with what `closing` makes of all; False if interrupted.

    again: how often a case that others disturbed is measured once more; the least disturbed measurement is kept.
    """
    shown: list[Case] = []
    style = [TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn()]
    try:
        with Progress(*style, TimeElapsedColumn(), TimeRemainingColumn(), console=console, transient=True) as progress:
            bar = progress.add_task("", total=len(plans))
            for plan in plans:
                progress.update(bar, description=plan.title)
                if results.has(plan.key, plan.wanted):
                    console.print(f"{plan.title}: already measured", style="dim", markup=False)
                else:
                    case = {"key": plan.key, "suite": plan.suite, "title": plan.title}
                    results.add(case | {"params": plan.params | plan.wanted} | _measured(plan, again))
                shown.append(results.cases[plan.key])
                console.print(render(shown[-1], columns))
                for note in notes(shown[-1]):
                    console.print(note, style="red", markup=False, highlight=False, soft_wrap=True)
                if (others := _others(shown[-1])) > DISTURBED:
                    text = f"other processes kept {others:.2f} processors busy: measure again on a quiet machine"
                    console.print(text, style="yellow")
                progress.advance(bar)
    except KeyboardInterrupt:
        kept = f": what was measured is in {results.path}; --resume goes on" if results.path else ""
        console.print(f"interrupted{kept}", style="bold")
        return False
    finally:
        for part in closing(shown):
            console.print(part)
        console.print(summary(shown), markup=False)
    return True


def _measured(plan: Plan, again: int) -> Case:
    found = [plan.measure()]
    while _others(found[-1]) > DISTURBED and len(found) <= again:
        found.append(plan.measure())
    return min(found, key=_others)


def _others(case: Case) -> float:
    return float(case.get("others") or 0.0)
