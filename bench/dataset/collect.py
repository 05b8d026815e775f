"""Measuring a network for the data set: each candidate and reorder alone, then whole assignments, in turns.

Each time is kept as soon as it is there (`Times`), so that an interrupted export goes on where it was.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from blockconv.network.planning.planner import LayoutProblem, Solution, evaluate, fixed, optimal

from .. import nets
from ..measure import measure
from ..peers import OURS, Variant
from ..results import OK
from ..timing import Timing, compare
from ..workers import Crew, PeerError
from . import planners
from .probe import Asked, Move, Opened

__all__ = ["Settings", "Times", "assignment_rows", "candidate_rows", "measure_all", "reorder_rows", "solved"]

TOGETHER = 64  # kernels or reorders that take turns
PLANS = 12  # whole networks that take turns, beside their reference
SHARES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.5, 0.75, 1.0)  # in turns: with which probability nodes leave the optimum
COSTS = ("predicted", "measured")
Row = dict[str, Any]


@dataclass(frozen=True)
class Settings:
    """How an export measures. An interrupted one goes on only with the same settings.

    layouts: the planner chooses among them. samples: assignments drawn at random. seed: of them, and of weights.
    realtime: whether workers took their samples at real-time priority.
    """

    layouts: tuple[str, ...]
    threads: int
    dtype: str
    batch: int
    samples: int
    seed: int
    timing: Mapping[str, Any]
    realtime: bool = False


class Times:
    """Measurements by name in a file of JSON lines; each is written as soon as it is there."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.known: dict[str, Row] = {}
        if path.exists():
            text = path.read_text(encoding="utf-8")
            for line in text.splitlines():
                try:
                    row = json.loads(line)
                except json.JSONDecodeError:  # cut off
                    continue
                self.known[row.pop("key")] = row
            if text and not text.endswith("\n"):
                self._write("\n")

    def put(self, key: str, row: Row) -> None:
        """Keep a measurement."""
        self.known[key] = row
        self._write(json.dumps({"key": key, **row}) + "\n")

    def _write(self, text: str) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(text)

    def seconds(self, key: str | None) -> float | None:
        """The measured median; None if there is none."""
        found: float | None = self.known.get(key or "", {}).get("measured_median_s")
        return found


def _row(timing: Timing, others: float | None) -> Row:
    return {
        "measured_median_s": timing.median * 1e-9,
        "measured_q1_s": timing.q1 * 1e-9,
        "measured_q3_s": timing.q3 * 1e-9,
        "rounds_count": len(timing.samples),
        "calls_count": timing.repeats,
        "others_processors": others,
    }


# ---------------------------------------------------------------- measuring


def measure_all(
    known: Opened,
    asked: Asked,
    given: Sequence[np.ndarray],
    expected: np.ndarray,
    crew: Crew,
    settings: Settings,
    times: Times,
) -> Iterator[tuple[str, int, int]]:
    """Measure what `times` does not have yet. Yields (what, done, in all) before each group.

    If the crew has to wait for its turn, all kernels are compiled before it, and the turn is the whole network's.
    """
    wanted: dict[str, tuple[int, int]] = {}
    for node, found in enumerate(known.found):
        for k, candidate in enumerate(found):
            if (key := known.key(candidate)) is not None:
                wanted.setdefault(key, (node, k))
    moves = {known.move_key(move): move for move in known.moves() if not known.is_free(move)}
    parts: dict[str, dict[str, Any]] = {"kernels": wanted, "moves": moves}
    if crew.lock is not None:
        for part, picks in parts.items():
            for keys in _groups(picks, times, TOGETHER):
                yield f"compiling {part}", 0, len(picks)
                _made(part, asked, [picks[key] for key in keys], crew, settings.threads)
    with crew.turn():
        for part, picks in parts.items():
            yield from _alone(part, picks, asked, crew, settings, times)
        yield from _assignments(known, asked, given, expected, crew, settings, times)


def _groups(wanted: Mapping[str, Any], times: Times, size: int) -> Iterator[list[str]]:
    """The keys that have no time yet, in groups of this size, whose members take turns."""
    waiting = [key for key in wanted if key not in times.known]
    for first in range(0, len(waiting), size):
        yield waiting[first : first + size]


def _alone(
    part: str, wanted: Mapping[str, Any], asked: Asked, crew: Crew, settings: Settings, times: Times
) -> Iterator[tuple[str, int, int]]:
    """Measure kernels or moves, each alone, in groups whose members take turns."""
    for keys in _groups(wanted, times, TOGETHER):
        yield part, sum(key in times.known for key in wanted), len(wanted)
        made = _made(part, asked, [wanted[key] for key in keys], crew, settings.threads)
        ready = {key: variant for key, variant in zip(keys, made, strict=True) if isinstance(variant, Variant)}
        found = compare({key: variant.function for key, variant in ready.items()}, **settings.timing)
        for key, variant in zip(keys, made, strict=True):
            times.put(key, _row(found[key], found.others) if key in ready else {"failure": str(variant)})


def _made(part: str, asked: Asked, picks: Sequence[Any], crew: Crew, threads: int) -> list[Variant | str]:
    """A variant for each pick, or the reason why there is none: then each is made by itself."""
    crew.clear()
    found = crew.variants(OURS, "of_dataset", part, asked, picks, threads=threads)
    if len(found) == len(picks) and all(variant.name != OURS for variant in found):
        return list(found)
    if len(picks) > 1:
        crew.clear()
        alone = [crew.variants(OURS, "of_dataset", part, asked, [pick], threads=threads)[0] for pick in picks]
        return [variant if variant.name != OURS else _reason(variant) for variant in alone]
    return [_reason(found[0])]


def _reason(failed: Variant) -> str:
    try:
        failed.fetch()
    except PeerError as error:
        return str(error)
    return "its variant is missing"


def _assignments(
    known: Opened,
    asked: Asked,
    given: Sequence[np.ndarray],
    expected: np.ndarray,
    crew: Crew,
    settings: Settings,
    times: Times,
) -> Iterator[tuple[str, int, int]]:
    wanted = {_name(chosen): chosen for chosen in _wanted(known, settings, times)}
    reference = optimal(known.problem).chosen
    for names in _groups(wanted, times, PLANS):
        yield "assignments", sum(name in times.known for name in wanted), len(wanted)
        arguments = "of_dataset", "assignments", asked, given, [reference, *(wanted[name] for name in names)]
        crew.clear()
        variants = crew.variants(OURS, *arguments, threads=settings.threads)
        case = measure(variants, expected, nets.TOLERANCE[settings.dtype], **settings.timing)
        entries = case["entries"]
        if len(entries) != 1 + len(names):
            raise ValueError(f"assignments: {entries[0].get('note', entries[0]['verdict'])}")
        if entries[0]["verdict"] != OK:
            raise ValueError(f"the optimal plan gives wrong results, or none: {entries[0]}")
        for name, entry in zip(names, entries[1:], strict=True):
            if entry["verdict"] != OK:
                times.put(name, {"failure": entry.get("note", entry["verdict"])})
                continue
            timing = Timing(entry["name"], tuple(entry["timing"]["samples"]), entry["timing"]["repeats"], 0.0)
            about = {"error_relative": entry["error"], "reference_s": entries[0]["timing"]["median"] * 1e-9}
            times.put(name, {**_row(timing, case["others"]), **about})


def _name(chosen: Sequence[int]) -> str:
    return "assignment " + " ".join(map(str, chosen))


def _wanted(known: Opened, settings: Settings, times: Times) -> list[tuple[int, ...]]:
    """The assignments to measure: the planners', then the samples, each once."""
    return list(dict.fromkeys([chosen for _, chosen, _ in (*planned(known, times), *samples(known, settings))]))


# ---------------------------------------------------------------- assignments


def measured_problem(known: Opened, times: Times) -> LayoutProblem | None:
    """The problem with measured costs alone. A choice that was not measured is none; None if a node has no other."""
    costs: dict[tuple[int, int], float] = {}
    for node in range(len(known.found)):
        for k, seconds in enumerate(_measured_seconds(known, node, times)):
            if seconds is not None:
                costs[node, k] = seconds

    def reorder(value: str, src: Any, dst: Any) -> float:
        move = Move(value, src, dst)
        seconds = 0.0 if known.is_free(move) else times.seconds(known.move_key(move))
        return math.inf if seconds is None else seconds

    return planners.restricted_to(known.problem, costs, reorder)


def _measured_seconds(known: Opened, node: int, times: Times) -> list[float | None]:
    """The measured seconds of each candidate of a node. A view has those of its copies. None: not measured."""
    found: list[float | None] = []
    for candidate, copies in zip(known.found[node], known.copies(node), strict=True):
        if candidate.view is None:
            found.append(times.seconds(known.key(candidate)))
        else:
            each = [times.seconds(known.move_key(move)) for move in copies]
            found.append(None if None in each else sum(seconds for seconds in each if seconds is not None))
    return found


def solved(known: Opened, times: Times) -> dict[str, LayoutProblem]:
    """The problem by predicted costs, and by measured ones where all nodes have some."""
    measured = measured_problem(known, times)
    return {"predicted": known.problem, **({} if measured is None else {"measured": measured})}


def planned(known: Opened, times: Times) -> list[tuple[str, tuple[int, ...], Solution | None]]:
    """(origin, choice of each node, solution that has a bound) of each planner by each kind of costs."""
    made: list[tuple[str, tuple[int, ...], Solution | None]] = []
    for costs, problem in solved(known, times).items():
        for name, plan in planners.PLANNERS.items():
            if name == "random" and costs == "measured":
                continue
            solution = optimal(problem) if name == "optimal" else None
            chosen = plan(problem) if solution is None else solution.chosen
            if planners.finite(problem, chosen):
                whole = chosen if costs == "predicted" else planners.numbers(problem, chosen)
                made.append((f"{name}, {costs}", whole, solution))
    for layout in planners.layouts_of(known.problem):
        if layout.ndim == 4:
            made.append((f"fixed {layout.tag}, predicted", fixed(known.problem, layout).chosen, None))
    return made


def samples(known: Opened, settings: Settings) -> list[tuple[float, tuple[int, ...], None]]:
    """(share, choice of each node, None): the optimum, where each node leaves it with probability `share`.

    A node that leaves takes any of its candidates. So samples are spread from near the best to any at all. No two are
    equal: a small network may have fewer than were asked for.
    """
    random = np.random.default_rng(settings.seed)
    best = optimal(known.problem).chosen
    found: list[tuple[float, tuple[int, ...], None]] = []
    seen = {best}
    tries = 0
    while len(found) < settings.samples and tries < 20 * settings.samples:
        share = SHARES[tries % len(SHARES)]
        tries += 1
        leaves = random.random(len(best)) < share
        others = [int(random.integers(len(step.choices))) for step in known.problem.steps]
        chosen = tuple(other if leave else k for other, leave, k in zip(others, leaves, best, strict=True))
        if chosen not in seen and planners.finite(known.problem, chosen):
            seen.add(chosen)
            found.append((share, chosen, None))
    return found


# ---------------------------------------------------------------- rows of the tables


def _kept(times: Times, key: str | None) -> Row:
    return {name: value for name, value in times.known.get(key or "", {}).items() if name != "failure"}


def candidate_rows(known: Opened, times: Times) -> Iterator[Row]:
    """The table `candidates`."""
    for n, (node, step) in enumerate(zip(known.network.nodes, known.problem.steps, strict=True)):
        copies = known.copies(n)
        for k, (candidate, choice) in enumerate(zip(known.found[n], step.choices, strict=True)):
            key = known.key(candidate)
            yield {
                "node": node.name,
                "op": node.op,
                "candidate": k,
                "kernel": choice.kernel,
                "is_view": candidate.view is not None,
                "srcs": [layout.tag for layout in choice.srcs],
                "dst": choice.dst.tag,
                "key": key,
                "copies": [move.value for move in copies[k]],
                "predicted_s": float(choice.cost),
                **_kept(times, key),
            }


def reorder_rows(known: Opened, times: Times) -> Iterator[Row]:
    """The table `reorders`."""
    readers: dict[str, list[str]] = {}
    for step in known.problem.steps:
        for value in step.inputs:
            readers.setdefault(value, []).append(step.name)
    for move in known.moves():
        seconds, key = float(known.problem.reorder(move.value, move.src, move.dst)), known.move_key(move)
        yield {
            "value": move.value,
            "readers": readers.get(move.value, []),
            "src": move.src.tag,
            "dst": move.dst.tag,
            "is_free": known.is_free(move),
            "key": key,
            "predicted_s": seconds if math.isfinite(seconds) else None,
            **_kept(times, key),
        }


def assignment_rows(known: Opened, settings: Settings, times: Times) -> Iterator[Row]:
    """The table `assignments`: a row for each planner and each sample, also where two chose the same."""
    measured = [_measured_seconds(known, node, times) for node in range(len(known.found))]
    every: Iterable[tuple[Any, tuple[int, ...], Solution | None]] = (*planned(known, times), *samples(known, settings))
    for origin, chosen, solution in every:
        found = evaluate(known.problem, chosen)
        named = {"origin": origin} if isinstance(origin, str) else {"origin": "sample", "share": origin}
        parts = [seconds[k] for seconds, k in zip(measured, chosen, strict=True)]
        moves = [Move(*copy) for copy in found.reorders]
        parts += [0.0 if known.is_free(m) else times.seconds(known.move_key(m)) for m in moves]
        bound = {}
        if solution is not None:
            finite = math.isfinite(solution.bound)
            bound = {"bound_s": float(solution.bound) if finite else None, "is_optimal": bool(solution.exact)}
        yield {
            **named,
            "chosen": list(chosen),
            "reorders_count": sum(not known.is_free(move) for move in moves),
            "predicted_s": float(found.cost),
            "summed_s": None if None in parts else float(sum(part for part in parts if part is not None)),
            **bound,
            **_kept(times, _name(chosen)),
        }


def coverage(rows: Sequence[Row]) -> float:
    """The share of measurable rows that have a measured time."""
    timed = [row for row in rows if row.get("key", "") is not None and not row.get("is_free")]
    return statistics.fmean(row.get("measured_median_s") is not None for row in timed) if timed else 1.0
