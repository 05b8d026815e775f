"""A plan explained in words: kernels with layouts and times, the other candidates, each reorder's reason."""

import textwrap

from blockconv.core import text
from blockconv.core.python import zipped
from blockconv.network.foreign import counted
from blockconv.network.reporting.data import NodeData, PlanData, more
from blockconv.network.reporting.profile import CALL_HEADS, call_cells
from blockconv.network.schedule import Action


def summary(plan: PlanData) -> str:
    """A few lines on a plan: what was planned, how well, and at what cost."""
    threads, choice, kinds = plan["threads"], plan["choice"], [call["kind"] for call in plan["calls"]]
    weights, arena, live = map(text.megabytes, (plan["weights"], plan["arena"], plan["live"]))
    predicted = f"predicted: {text.duration(choice['seconds'])} on {text.threads(choice['threads'])}"
    if threads != choice["threads"]:
        predicted += f", {text.duration(plan['predicted'])} on {threads}"
    lines = [
        f"{plan['network']}: layouts {plan['layouts']}, planner {plan['planner']}; {choice['quality']}",
        predicted,
        f"{len(kinds)} kernel calls, {kinds.count('reorder')} of them reorders and {kinds.count('copy')} copies",
        f"packed weights {weights}; memory between ops {arena}, at most {live} of it in use at once",
    ]
    if plan["measured"] is not None:
        lines.insert(2, f"measured: {text.duration(plan['measured'])} on {text.threads(threads)}")
    return "\n".join(textwrap.fill(line, text.WIDTH) for line in [*lines, *foreign(plan)])


def _times(plan: PlanData) -> dict[str, list[float]]:
    """Seconds of each call: predicted ones, and measured ones after a profile."""
    found = {"predicted": [call["predicted"] for call in plan["calls"]]}
    if plan["measured"] is not None:
        found["measured"] = [call["measured"] or 0.0 for call in plan["calls"]]
    return found


def foreign(plan: PlanData) -> list[str]:
    """The foreign parts, with their share of the time."""
    calls, said = [call for call in plan["calls"] if call["ops"]], []
    if calls:
        shares = []
        for what, every in _times(plan).items():
            own = sum(seconds for call, seconds in zipped(plan["calls"], every) if call["ops"])
            shares.append(f"{own / (sum(every) or 1.0):.0%} of the {what} time")
        kinds = counted(kind for call in calls for kind in call["ops"])
        said.append(f"foreign parts: {len(calls)}, {kinds} in {calls[0]['kernel']}, {', '.join(shares)}")
    if plan["rest"]:
        said.append(f"after these calls, for shapes that depend on data: {counted(plan['rest'])}")
    return said


def others(node: NodeData, most: int = 2) -> list[str]:
    """The alternatives of a node: dearer candidates, and kernels that refuse these layouts, each with its reason."""
    taken, said = node["candidates"][node["chosen"]], []
    dearer = sorted((c for c in node["candidates"] if c is not taken), key=lambda c: c["seconds"])
    for other in dearer[:most]:
        way = text.arrow(other["srcs"][0], other["dst"])
        said.append(f"{way} by {other['kernel'] or 'a view'}: {more(other['seconds'] - taken['seconds'])}")
    return [*said, *(f"{row['kernel']}: {row['reason']}" for row in node["rejected"])]


def table(plan: PlanData, actions: tuple[Action, ...]) -> str:
    """The whole plan: a table of its calls, then why each reorder is made, and what else there was for each op."""
    calls, times = plan["calls"], _times(plan)
    heads = [*CALL_HEADS, "writes", *(f"{what},\nµs" for what in times)]
    columns = [[text.microseconds(seconds) for seconds in (*column, sum(column))] for column in times.values()]
    rows = [(*call_cells(action), text.dims(call["shape"])) for action, call in zipped(actions, calls)]
    rows.append((f"{len(calls)} calls", "", "", ""))
    cells = [(*row, *figures) for row, *figures in zipped(rows, *columns)]
    said = f"Times are for {text.threads(plan['threads'])}."
    parts = [text.table(heads, cells, right=range(4, len(heads)), rules=[len(calls)]), said]
    moved = [text.paragraph(call["name"], call["why"]) for call in calls if call["why"]]
    if moved:
        parts += ["", "Why tensors are reordered and copied:", *moved]
    threads = text.threads(plan["choice"]["threads"])
    head = f"Other candidates: their time on {threads} against the chosen one, without reorders; or why not:"
    return "\n".join([*parts, "", head, *_others(plan)])


def _others(plan: PlanData) -> list[str]:
    """The other candidates of each node; nodes with the same text share a paragraph."""
    found: dict[str, list[str]] = {}
    for node in plan["nodes"]:
        if said := others(node):
            found.setdefault("; ".join(said), []).append(node["name"])
    return [text.paragraph(", ".join(names), said) for said, names in found.items()]
