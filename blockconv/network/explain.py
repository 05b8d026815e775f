"""Why a plan is as it is, in words: kernels with layouts and times, what else there was, each reorder's reason."""

from __future__ import annotations

import io
import math
from dataclasses import replace
from typing import Any

from rich.console import Console
from rich.table import Table

from blockconv import dispatch
from blockconv.errors import ArgumentError
from blockconv.kernels import TABLE
from blockconv.layout import Layout
from blockconv.network.candidates import Candidate
from blockconv.network.graph import Network, Node
from blockconv.network.planned import Planned
from blockconv.network.planner import Assignment, optimal
from blockconv.network.schedule import Action

__all__ = ["arrow", "microseconds", "reason", "rejections", "table"]


def microseconds(seconds: float | None) -> str:
    """A time as text, in µs; empty for None."""
    return "" if seconds is None else f"{seconds * 1e6:,.1f}"


def arrow(src: Layout, dst: Layout) -> str:
    """The layouts that a kernel goes from and to."""
    return str(src) if src == dst else f"{src} → {dst}"


def rejections(
    network: Network, node: Node, found: tuple[Candidate, ...], taken: Candidate, most: int = 2
) -> list[str]:
    """What else there was for a node: kernels that refuse these layouts, each with its reason; dearer candidates."""
    said = []
    if taken.row is not None:
        dtype = str(network.tensors[node.output].dtype)
        src, dst = taken.srcs[0], taken.dst
        for row in TABLE:
            if row.op != node.op or row is taken.row or row.reference or dtype not in (row.dtypes or (dtype,)):
                continue
            if src.ndim == dst.ndim == 4:
                why_not = dispatch.why_not(row, taken.problem, src, dst, dtype)
                if why_not is not None:
                    said.append(f"{row.name}: {why_not}")
    others = sorted((c for c in found if c is not taken), key=lambda c: c.cost)
    for other in others[:most]:
        name = "a view" if other.row is None else other.row.name
        more = (other.cost - taken.cost) * 1e6
        said.append(f"{arrow(other.srcs[0], other.dst)} by {name}: {more:+,.1f} µs")
    return said


def reason(planned: Planned, action: Action, chosen: str) -> str:
    """Why a reorder or copy is made, and what the best plan without it would cost more.

    chosen: "auto" if the planner had its choice, else what the user asked for.
    """
    tensor, (_, src), (_, dst) = action.name, action.reads[0], action.writes
    if action.kind == "copy":
        return "its place in a concatenation, or in an output, is another"
    problem = planned.problem
    readers = [
        step.name
        for step, k in zip(problem.steps, planned.solution.chosen, strict=True)
        if (tensor, dst) in zip(step.inputs, step.choices[k].srcs, strict=True)
    ]
    who = f"{', '.join(readers)} read{'s' if len(readers) == 1 else ''} {dst}" if readers else f"the output is {dst}"
    if chosen != "auto":
        return f"{who}; layouts: {chosen}"
    more = _without(problem, tensor, src, dst) - planned.solution.cost
    return f"{who}; " + (
        "no plan does without" if math.isinf(more) else f"the best plan without costs {more * 1e6:+,.1f} µs"
    )


def _without(problem: Assignment, tensor: str, src: Layout, dst: Layout) -> float:
    """The cost of the best plan in which a tensor is not reordered so."""

    def cost(name: str, a: Any, b: Any) -> float:
        return math.inf if (name, b) == (tensor, dst) and a != b else problem.reorder(name, a, b)

    try:
        return optimal(replace(problem, reorder=cost)).cost
    except ArgumentError:
        return math.inf


def table(planned: Planned, actions: tuple[Action, ...], measured: tuple[float, ...] | None, chosen: str) -> str:
    """The whole plan as a table."""
    network = planned.network
    by_name = {node.name: (node, found, taken) for node, found, taken in
               zip(network.nodes, planned.candidates, planned.chosen, strict=True)}  # fmt: skip
    shown = Table(title=network.name, title_justify="left")
    for heading in ("op", "kind", "kernel", "layouts"):
        shown.add_column(heading, no_wrap=heading != "kernel")
    for heading in ("predicted, µs", "measured, µs"):
        shown.add_column(heading, justify="right", no_wrap=True)
    shown.add_column("what else there was; a reorder's reason")
    for k, action in enumerate(actions):
        layouts = arrow(action.reads[0][1], action.writes[1])
        times = microseconds(action.cost), microseconds(measured[k] if measured else None)
        if action.node is None:
            why = reason(planned, action, chosen)
            shown.add_row(action.name, action.kind, action.kernel, layouts, *times, why, style="bold yellow")
        else:
            why = "; ".join(rejections(network, *by_name[action.node.name]))
            shown.add_row(action.name, action.kind, action.kernel, layouts, *times, why)
    text = io.StringIO()
    Console(file=text, width=180, highlight=False).print(shown)
    return text.getvalue()
