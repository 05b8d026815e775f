"""Planning by a user's own means: their planner, and their table of costs."""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from typing import Any

from blockconv.core.errors import ArgumentError, short
from blockconv.core.layout import NATIVE, Layout
from blockconv.core.problem import ReorderProblem
from blockconv.core.python import zipped
from blockconv.dispatch.tuning import read_costs
from blockconv.network.graph import Network
from blockconv.network.memory import same_bytes
from blockconv.network.planning.planned import Options, Planned, cost_key, ends, formulated, read_layouts, reorder_key
from blockconv.network.planning.planner import Choice, LayoutProblem

NEAREST = 3  # keys that an error lists


OwnPlanner = Callable[[LayoutProblem], Mapping[str, Any]]


def chosen_by(planner: OwnPlanner, network: Network, options: Options) -> Options:
    """The options with the choices that a user's planner makes for a network.

    Raises ArgumentError for an answer that does not fit the problem.
    """
    if options.layouts != "auto":
        rule = "has to be 'auto' with a function as planner, whose answer may have any native layout"
        raise ArgumentError("compile", "layouts", options.layouts, rule)
    name = getattr(planner, "__qualname__", type(planner).__qualname__)
    problem, _ = formulated(network, options, every=True)
    answer = planner(problem)
    if not isinstance(answer, Mapping):
        rule = f"has to return {{node: choice or layout}}, and returned {short(answer)}"
        raise ArgumentError("compile", "planner", name, rule)
    choices = {step.name: step.choices for step in problem.steps}
    exact: dict[str, Choice] = {}
    for node, choice in answer.items():
        if isinstance(choice, Choice):
            if choice not in choices.get(node, ()):
                rule = f"has to return one of each step's choices, and returned for {node!r} {short(choice)}"
                raise ArgumentError("compile", "planner", name, rule)
            exact[node] = choice
    given: Any = {node: one for node, one in answer.items() if node not in exact}
    layouts: Any = read_layouts(problem.network, given, "planner's answer")
    return replace(options, layouts={**layouts, **exact}, planner=f"{name}()")


# ---------------------------------------------------------------- costs


def cost_table(given: Network, options: Options, planned: Planned) -> dict[str, float]:
    """The cost of every kernel by its key. A measured plan has the best kernel alone for each pair of layouts."""
    network, reorder = planned.network, planned.problem.reorder
    every = planned.candidates if options.measure else formulated(given, options, every=True)[1]
    found = {cost_key(c, planned.threads): c.cost for ways in every for c in ways if c.row is not None}
    chosen = (choice.dst for step in planned.problem.steps for choice in step.choices)
    moved = _reorders(network, options, chosen)
    return found | {reorder_key(network.shape(one[0]), *one[1:]): reorder(*one) for one in moved}


def _reorders(network: Network, options: Options, layouts: Iterable[Layout]) -> Iterable[tuple[str, Layout, Layout]]:
    """A value of each shape, with each pair of layouts that have different bytes; the others cost nothing.

    The layouts are the given ones, and those of a plan's inputs and outputs.
    """
    given, made = ends(network, options)
    images = [lay for lay in dict.fromkeys((*layouts, *given.values(), *made.values())) if lay.ndim == 4]
    names = {tensor.shape: name for name, tensor in network.tensors.items() if name not in network.constants}
    for shape, name in names.items():
        if len(shape) == 4:
            yield from ((name, src, dst) for src in images for dst in images if not same_bytes(shape, src, dst))


OwnCosts = Callable[[Any, str, Layout, Layout], float | None]


def _keys(network: Network, options: Options) -> dict[str, tuple[str, tuple[Any, str, Layout, Layout]]]:
    """Each key that a plan of this network may read, in all of `NATIVE` and the requested layouts.

    With the first node or value that has this cost, and the arguments of `OwnCosts` for it.
    """
    every = tuple(dict.fromkeys((*NATIVE, *options.named)))
    problem, found = formulated(network, replace(options, layouts=every, measure=False), every=True)
    known = {
        cost_key(c, count): (node.name, (c.request.problem, c.row.name, c.request.src, c.request.dst))
        for node, candidates in zipped(problem.network.nodes, found)
        for c in candidates
        for count in ({1, options.threads} if options.measure else {1})
        if c.row is not None
    }
    for name, src, dst in _reorders(problem.network, options, every):
        tensor = problem.network.tensors[name]
        moved = ReorderProblem(tensor.shape, src.tag, dst.tag, 1 if tensor.type.is_packed else tensor.type.itemsize)
        known.setdefault(reorder_key(tensor.shape, src, dst), (name, (moved, "reorder", src, dst)))
    return known


def own_costs(costs: Any, network: Network, options: Options) -> dict[str, float]:
    """A user's costs by key: those of a table, or what a function returns for each key, unless that is None.

    Raises ArgumentError for anything that is no cost, and for a key that no plan of this network reads, in whatever
    layouts.
    """
    if callable(costs):
        given = {key: costs(*asked) for key, (_, asked) in _keys(network, options).items()}
        return read_costs({key: seconds for key, seconds in given.items() if seconds is not None})
    table = read_costs(costs)
    known = {key: name for key, (name, _) in _keys(network, options).items()} if table else {}
    unknown = [key for key in table if key not in known]
    if unknown:
        rule = f"is unknown to this network, like {len(unknown)} of the {len(table)} keys"
        nearest = "; ".join(map(repr, _nearest(unknown[0], known)))
        raise ArgumentError(
            "compile", "costs", unknown[0], rule, f"Plan.cost_table lists all keys; the nearest: {nearest}"
        )
    return table


def _nearest(key: str, known: Mapping[str, str]) -> list[str]:
    """The keys that share most words with one, their nodes' names counted as words."""
    words = set(re.findall(r"\w+", key))
    shared = {other: len(words & {node, *re.findall(r"\w+", other)}) for other, node in known.items()}
    likely = sorted(known, key=lambda other: -shared[other])[: 10 * NEAREST]
    return sorted(likely, key=lambda other: -difflib.SequenceMatcher(None, key, other).ratio())[:NEAREST]
