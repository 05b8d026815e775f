"""Why a plan is as it is, in words: kernels with layouts and times, what else there was, each reorder's reason."""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace
from typing import Any, NamedTuple

from blockconv.core import text
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout
from blockconv.dispatch import selection
from blockconv.kernels import TABLE
from blockconv.network.graph import Network, Node
from blockconv.network.planning.candidates import Candidate, element_types
from blockconv.network.planning.planned import Options, Planned
from blockconv.network.planning.planner import Assignment, optimal
from blockconv.network.reporting import predict
from blockconv.network.reporting.profile import CALL_HEADS, Profile, call_cells
from blockconv.network.schedule import Action, Schedule

__all__ = ["Sizes", "reasons", "rejections", "summary", "table"]

PRICED = 8  # reorders of a plan for which the best plan without them is searched


class Sizes(NamedTuple):
    """Bytes of packed weights, and of the memory that a call needs between ops."""

    weights: int
    arena: int


def summary(planned: Planned, schedule: Schedule, options: Options, sizes: Sizes, profile: Profile | None) -> str:
    """What was planned, how well, and what it takes, in a few lines. profile: None if the plan was not timed."""
    threads, kinds = options.threads, [action.kind for action in schedule.actions]
    weights, arena, live = map(text.megabytes, (sizes.weights, sizes.arena, schedule.live))
    predicted = f"predicted: {text.duration(planned.solution.cost)} on {text.threads(planned.threads)}"
    if threads != planned.threads:
        predicted += f", {text.duration(predict.plan_on(planned, planned.solution, threads))} on {threads}"
    lines = [
        f"{planned.network.name}: layouts {options.asked}, planner {options.planner}; {planned.quality}",
        predicted,
        f"{len(kinds)} kernel calls, {kinds.count('reorder')} of them reorders and {kinds.count('copy')} copies",
        f"packed weights {weights}; a call's memory between ops {arena}, of which {live} live at once",
    ]
    if profile is not None:
        lines.insert(2, f"measured: {text.duration(profile.whole)} on {text.threads(threads)}")
    return "\n".join(textwrap.fill(line, text.WIDTH) for line in lines)


def rejections(
    network: Network, node: Node, found: tuple[Candidate, ...], taken: Candidate, most: int = 2
) -> list[str]:
    """What else there was for a node: dearer candidates; kernels that refuse these layouts, each with its reason."""
    said = []
    others = sorted((c for c in found if c is not taken), key=lambda c: c.cost)
    for other in others[:most]:
        name = "a view" if other.row is None else other.row.name
        more = other.cost - taken.cost
        said.append(f"{text.arrow(other.srcs[0], other.dst)} by {name}: {_more(more)}")
    if taken.row is not None:
        types = element_types(network, node)
        src, dst = taken.srcs[0], taken.dst
        for row in TABLE:
            if row.op != node.op or row is taken.row or row.reference or not row.takes(types):
                continue
            if src.ndim == dst.ndim == 4:
                why_not = selection.why_not(row, taken.problem, src, dst, types)
                if why_not is not None:
                    said.append(f"{row.name}: {why_not}")
    return said


def _more(seconds: float) -> str:
    """What something costs more."""
    return f"{'-' if seconds < 0 else '+'}{text.duration(abs(seconds))}" if abs(seconds) >= 5e-11 else "the same time"


def reasons(planned: Planned, actions: tuple[Action, ...], chosen: str) -> list[tuple[Action, str]]:
    """Each reorder and copy, with why it is made; of the dearest also what the best plan without it would cost more.

    chosen: "auto" if the planner had its choice, else what the user asked for.
    """
    moved = [action for action in actions if action.node is None]
    free = chosen == "auto" and planned.solution.exact  # a search that found no end is not begun again for each
    dearest = sorted((a for a in moved if a.kind == "reorder"), key=lambda a: -a.cost)[: PRICED if free else 0]
    return [(action, _reason(planned, action, chosen, any(action is d for d in dearest))) for action in moved]


def _reason(planned: Planned, action: Action, chosen: str, priced: bool) -> str:
    tensor, (_, dst) = action.name, action.writes
    if action.kind == "copy":
        return "copied, as its place in a concatenation, or in an output, is another"
    problem, nodes = planned.problem, {node.name: node for node in planned.network.nodes}
    readers = [
        f"{step.name} ({nodes[step.name].op})"
        for step, k in zip(problem.steps, planned.solution.chosen, strict=True)
        if (tensor, dst) in zip(step.inputs, step.choices[k].srcs, strict=True)
    ]
    who = f"{', '.join(readers)} read{'s' if len(readers) == 1 else ''} {dst}" if readers else f"the output is {dst}"
    if chosen != "auto":
        return f"{who}; layouts: {chosen}"
    if not priced:
        return who
    more = _without(problem, tensor, dst) - planned.solution.cost
    return f"{who}; " + ("no plan does without" if math.isinf(more) else f"the best plan without costs {_more(more)}")


def _without(problem: Assignment, tensor: str, dst: Layout) -> float:
    """The cost of the best plan in which a tensor is not reordered to this layout."""

    def cost(name: str, a: Any, b: Any) -> float:
        return math.inf if (name, b) == (tensor, dst) and a != b else problem.reorder(name, a, b)

    try:
        return optimal(replace(problem, reorder=cost)).cost
    except ArgumentError:
        return math.inf


def table(planned: Planned, actions: tuple[Action, ...], profile: Profile | None, chosen: str, threads: int) -> str:
    """The whole plan: a table of its calls, then why each reorder is made, and what else there was for each op.

    chosen: "auto", or the layouts that were asked for. threads: that run it, which the times are predicted for.
    """
    predicted = predict.actions_on(planned, actions, threads)
    heads: tuple[str, ...] = (*CALL_HEADS, "writes", "predicted,\nµs")
    columns = [[text.microseconds(seconds) for seconds in (*predicted, sum(predicted))]]
    if profile is not None:
        heads = (*heads, "measured,\nµs")
        columns.append([text.microseconds(seconds) for seconds in (*profile.seconds, sum(profile.seconds))])
    shapes = [text.dims(planned.network.shape(action.writes[0])) for action in actions]
    rows = [(*call_cells(action), shape) for action, shape in zip(actions, shapes, strict=True)]
    rows.append((f"{len(actions)} calls", "", "", ""))
    cells = [(*row, *figures) for row, *figures in zip(rows, *columns, strict=True)]
    said = f"Times are for {text.threads(threads)}."
    parts = [text.table(heads, cells, right=range(4, len(heads)), rules=[len(actions)]), said]
    moved = [text.paragraph(action.name, why) for action, why in reasons(planned, actions, chosen)]
    if moved:
        parts += ["", "Why tensors are reordered and copied:", *moved]
    return "\n".join([*parts, "", _others_head(planned), *_others(planned)])


def _others_head(planned: Planned) -> str:
    threads = text.threads(planned.threads)
    return f"Other candidates, in their own time on {threads} beside what was taken (no reorders); or why not:"


def _others(planned: Planned) -> list[str]:
    """What else there was for each node; nodes of which the same is to be said stand together."""
    found: dict[str, list[str]] = {}
    for node, options, taken in zip(planned.network.nodes, planned.candidates, planned.chosen, strict=True):
        if said := rejections(planned.network, node, options, taken):
            found.setdefault("; ".join(said), []).append(node.name)
    return [text.paragraph(", ".join(names), said) for said, names in found.items()]
