"""A plan as data: one record, the source of its text, its page and its JSON."""

import math
from collections.abc import Iterator
from dataclasses import replace
from typing import Any, TypedDict

from blockconv._version import __version__
from blockconv.core import target, text
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout
from blockconv.core.python import zipped
from blockconv.dispatch import selection
from blockconv.kernels.common.request import Reason, Request
from blockconv.machine import identity
from blockconv.machine.profile import selected
from blockconv.network.graph import Network, Node
from blockconv.network.ops.rule import names_of
from blockconv.network.planning.candidates import Candidate
from blockconv.network.planning.planned import Options, Planned
from blockconv.network.planning.planner import LayoutProblem, optimal
from blockconv.network.reporting.profile import Profile, seconds_of_actions, seconds_of_plan
from blockconv.network.schedule import Action, Schedule

VERSION = 1  # of PlanData: another number where a field changes its meaning or goes away
PRICED = 8  # reorders of a plan for which the best plan without them is searched


class MachineData(TypedDict):
    """The machine of a plan.

    cpu: the processor's full name.
    isa: the instruction set of kernels.
    target: LLVM's name of the processor.
    profile: the machine profile of the costs.
    because: the reason for this profile.
    """

    cpu: str
    isa: str
    target: str
    profile: str
    because: str


class ValueData(TypedDict):
    """A value of the network.

    kind: "input", "constant" or "computed".
    """

    name: str
    shape: list[int]
    dtype: str
    kind: str


class CandidateData(TypedDict):
    """A way to run a node.

    kernel: None for a view, which moves nothing.
    srcs: the layout of each input.
    """

    kernel: str | None
    srcs: list[str]
    dst: str
    seconds: float


class RejectedData(TypedDict):
    """A kernel that does not take the node in the chosen layouts, and the reason."""

    kernel: str
    reason: str


class NodeData(TypedDict):
    """An op after fusion.

    parameters: names of constants.
    chosen: the index of the candidate that runs.
    """

    name: str
    op: str
    inputs: list[str]
    parameters: list[str]
    output: str
    candidates: list[CandidateData]
    chosen: int
    rejected: list[RejectedData]


class ReorderData(TypedDict):
    """Seconds to reorder a value from each of its layouts to each other; None where that is impossible."""

    value: str
    layouts: list[str]
    seconds: list[list[float | None]]


class CallData(TypedDict):
    """A kernel call.

    name: the node's name, or the tensor's for a reorder or copy.
    kind: the node's op, "reorder" or "copy".
    kernel: the kernel's name.
    reads: a pair [value, layout] for each input.
    writes: the pair [value, layout] of the output.
    shape: the output's logical shape.
    predicted: seconds on `PlanData.threads`.
    measured: seconds of the call by itself; None without a profile.
    ops: the ops of ONNX that another library runs in this call; empty for a kernel.
    why: the reason of a reorder or copy; "" for a node.
    saves: seconds that the best plan without this reorder costs more; None if that is not known, or if none exists.
    """

    name: str
    kind: str
    kernel: str
    reads: list[list[str]]
    writes: list[str]
    shape: list[int]
    predicted: float
    measured: float | None
    ops: list[str]
    why: str
    saves: float | None


class ChoiceData(TypedDict):
    """The proven quality of the plan.

    seconds: predicted on `threads`, like the costs of candidates.
    threads: the number of threads of these costs.
    bound: a lower bound for the seconds of every plan; None if unknown.
    optimal: whether no plan costs less.
    quality: the same in words.
    """

    seconds: float
    threads: int
    bound: float | None
    optimal: bool
    quality: str


class PlanData(TypedDict):
    """A plan as data. Times are in seconds, sizes in bytes, layouts are names that `Layout` reads.

    version: the version of this record.
    blockconv: the version of the library.
    network: the network's name.
    machine: the machine of the plan.
    layouts, planner, accuracy: the arguments of `compile`, as text.
    is_measured: the argument `measure` of `compile`.
    threads: the number of threads of a call.
    inputs, outputs: the names of values.
    values: everything that nodes read and write, with constants.
    nodes: the ops after fusion, in order, with their candidates.
    reorders: the costs of reorders, for each value with several layouts.
    calls: the kernel calls in order.
    rest: the ops of ONNX that run after these calls, because their shapes depend on data.
    choice: the proven quality of the plan.
    predicted: seconds of the plan on `threads`.
    measured: seconds of the plan in one native call; None without a profile.
    weights: bytes of packed weights.
    arena: bytes that a call needs between ops.
    live: the most of these bytes that are in use at once.
    """

    version: int
    blockconv: str
    network: str
    machine: MachineData
    layouts: str
    planner: str
    accuracy: str
    is_measured: bool
    threads: int
    inputs: list[str]
    outputs: list[str]
    values: list[ValueData]
    nodes: list[NodeData]
    reorders: list[ReorderData]
    calls: list[CallData]
    rest: list[str]
    choice: ChoiceData
    predicted: float
    measured: float | None
    weights: int
    arena: int
    live: int


def collected(
    planned: Planned, schedule: Schedule, options: Options, weights: int, profile: Profile | None
) -> PlanData:
    """The record of a plan. weights: bytes of packed ones. profile: None if the plan was not timed."""
    network, solution, threads = planned.network, planned.solution, options.threads
    return {
        "version": VERSION,
        "blockconv": __version__,
        "network": network.name,
        "machine": _machine(),
        "layouts": options.asked,
        "planner": options.planner,
        "accuracy": str(options.accuracy),
        "is_measured": options.measure,
        "threads": threads,
        "inputs": [*names_of(network.inputs)],
        "outputs": list(network.outputs),
        "values": _values(network),
        "nodes": [
            {
                "name": node.name,
                "op": node.op,
                "inputs": list(node.inputs),
                "parameters": list(node.parameters),
                "output": node.output,
                "candidates": [*map(_candidate, found)],
                "chosen": k,
                "rejected": _rejected(node, found[k]),
            }
            for node, found, k in zipped(network.nodes, planned.candidates, solution.chosen)
        ],
        "reorders": _reorders(planned.problem),
        "calls": _calls(planned, schedule.actions, options, profile),
        "rest": [] if network.rest is None else list(network.rest.kinds),
        "choice": {
            "seconds": solution.cost,
            "threads": planned.threads,
            "bound": _finite(solution.bound),
            "optimal": solution.exact,
            "quality": planned.quality,
        },
        "predicted": seconds_of_plan(planned, solution, threads),
        "measured": None if profile is None else profile.whole,
        "weights": weights,
        "arena": schedule.arena,
        "live": schedule.live,
    }


def _finite(seconds: float) -> float | None:
    return float(seconds) if math.isfinite(seconds) else None


def _machine() -> MachineData:
    known = selected()
    of_profile = {"target": target.target_cpu(), "profile": known.profile.name, "because": known.why}
    return {**identity.describe(), **of_profile}  # type: ignore[typeddict-item]


def _values(network: Network) -> list[ValueData]:
    inputs = {*names_of(network.inputs)}
    kinds = {**dict.fromkeys(inputs, "input"), **dict.fromkeys(network.constants, "constant")}
    return [
        {"name": name, "shape": list(one.shape), "dtype": one.type.name, "kind": kinds.get(name, "computed")}
        for name, one in network.tensors.items()
    ]


def _candidate(one: Candidate) -> CandidateData:
    kernel, srcs, dst = one.choice
    return {"kernel": kernel, "srcs": [*map(str, srcs)], "dst": str(dst), "seconds": float(one.cost)}


def _rejected(node: Node, taken: Candidate) -> list[RejectedData]:
    """Kernels that refuse the layouts that were chosen, each with its reason."""
    if taken.row is None or not taken.srcs[0].ndim == taken.dst.ndim == 4:
        return []
    types = taken.request.types
    request = Request(taken.request.problem, taken.srcs[0], taken.dst, types)
    others = [row for row in selection.rows_for(node.op, types) if row is not taken.row and not row.reference]
    found = {row.name: selection.decide(row, request) for row in others}
    return [{"kernel": name, "reason": one} for name, one in found.items() if isinstance(one, Reason)]


def _reorders(problem: LayoutProblem) -> list[ReorderData]:
    layouts: dict[str, dict[Layout, None]] = {name: {lay: None} for name, lay in problem.given.items()}
    for step in problem.steps:
        layouts[step.output] = dict.fromkeys(choice.dst for choice in step.choices)
    for step in problem.steps:
        for k, name in enumerate(step.inputs):
            layouts[name] |= dict.fromkeys(choice.srcs[k] for choice in step.choices)
    for name, lay in problem.wanted.items():
        layouts[name][lay] = None
    return [
        {
            "value": name,
            "layouts": list(map(str, found)),
            "seconds": [[0.0 if a == b else _finite(problem.reorder(name, a, b)) for b in found] for a in found],
        }
        for name, found in layouts.items()
        if len(found) > 1
    ]


def _calls(planned: Planned, actions: tuple[Action, ...], options: Options, profile: Profile | None) -> list[CallData]:
    measured = [None] * len(actions) if profile is None else profile.seconds
    predicted = seconds_of_actions(planned, actions, options.threads)
    return [
        {
            "name": action.name,
            "kind": action.kind,
            "kernel": action.kernel,
            "reads": [[name, str(lay)] for name, lay in action.reads],
            "writes": [action.writes[0], str(action.writes[1])],
            "shape": list(planned.network.shape(action.writes[0])),
            "predicted": float(guess),
            "measured": took,
            "ops": [] if action.part is None else list(action.part.kinds),
            "why": why,
            "saves": saves,
        }
        for action, guess, took, (why, saves) in zipped(
            actions, predicted, measured, _reasons(planned, actions, options.asked)
        )
    ]


# ---------------------------------------------------------------- why


def more(seconds: float) -> str:
    """The additional cost of something."""
    return f"{'-' if seconds < 0 else '+'}{text.duration(abs(seconds))}" if abs(seconds) >= 5e-11 else "the same time"


def _reasons(planned: Planned, actions: tuple[Action, ...], chosen: str) -> Iterator[tuple[str, float | None]]:
    """The reason of each reorder and copy; for the dearest also the extra cost of the best plan without it.

    chosen: "auto" if the planner had its choice, else what the user asked for.
    """
    free = chosen == "auto" and planned.solution.exact  # a search that found no end is not begun again for each
    dearest = sorted((a for a in actions if a.kind == "reorder"), key=lambda a: -a.cost)[: PRICED if free else 0]
    problem, nodes = planned.problem, {node.name: node for node in planned.network.nodes}
    taken = [*zipped(problem.steps, planned.solution.chosen)]

    def reason(action: Action) -> tuple[str, float | None]:
        if action.node:
            return "", None
        if action.kind == "copy":
            return "copied to its place in a concatenation, or in an output", None
        tensor, dst = action.writes
        readers = [
            f"{step.name} ({nodes[step.name].op})"
            for step, k in taken
            if (tensor, dst) in zipped(step.inputs, step.choices[k].srcs)
        ]
        verb = "reads" if len(readers) == 1 else "read"
        who = f"{', '.join(readers)} {verb} {dst}" if readers else f"the output is {dst}"
        if chosen != "auto":
            return f"{who}; layouts: {chosen}", None
        if not any(action is each for each in dearest):
            return who, None
        dearer = _without(problem, tensor, dst) - planned.solution.cost
        if math.isinf(dearer):
            return f"{who}; every plan needs it", None
        return f"{who}; the best plan without it costs {more(dearer)}", dearer

    return map(reason, actions)


def _without(problem: LayoutProblem, tensor: str, dst: Layout) -> float:
    """The cost of the best plan in which a tensor is not reordered to this layout."""

    def cost(name: str, a: Any, b: Any) -> float:
        return math.inf if (name, b) == (tensor, dst) and a != b else problem.reorder(name, a, b)

    try:
        return optimal(replace(problem, reorder=cost)).cost
    except ArgumentError:
        return math.inf
