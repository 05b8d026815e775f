"""A plan as one self-contained page of HTML: what it is, other plans beside it, and every call of it, drawn."""

import base64
import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from typing import NamedTuple

from blockconv._version import __version__
from blockconv.core import target, text
from blockconv.core.files import packaged
from blockconv.core.layout import NATIVE
from blockconv.machine import identity
from blockconv.network.ops.rule import names_of
from blockconv.network.planning.planned import Planned
from blockconv.network.planning.planner import Solution, fixed, greedy
from blockconv.network.reporting import drawing
from blockconv.network.reporting.data import PlanData
from blockconv.network.reporting.drawing import FILLS, fill, style_variables
from blockconv.network.reporting.explain import foreign, others
from blockconv.network.reporting.profile import seconds_of_plan
from blockconv.network.schedule import Schedule

LEAST_SCALE = 0.01  # the axis of the bars reaches at least this share of the best plan's time
SCALE = 80.0  # per cent of the column of bars that their axis takes; figures stand in the rest


class Drawn(NamedTuple):
    """The content of the page: the plan's data and, for its lines and other plans, their sources.

    measured: the measured seconds of whole plans, by their layouts.
    """

    data: PlanData
    planned: Planned
    schedule: Schedule
    measured: Mapping[str, float]

    @property
    def threads(self) -> int:
        """The threads that run the plan."""
        return self.data["threads"]

    @property
    def own_time(self) -> float | None:
        """As it was measured in turns with the other plans, if it was; else as its profile has it."""
        return self.measured.get(self.data["layouts"], self.data["measured"])


def page(drawn: Drawn) -> str:
    """The page."""
    planned, schedule = drawn.planned, drawn.schedule
    style = packaged("report.css").read_text(encoding="utf-8")
    network, title = planned.network, escape(planned.network.name)
    rows = drawing.rows(planned, schedule, drawn.data["calls"])
    ends = " → ".join(
        ", ".join(f"{name} {text.dims(network.shape(name))}" for name in names)
        for names in (names_of(network.inputs), network.outputs)
    )
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{title}: plan</title><style>{style_variables()}{style}</style></head><body>{_MARKERS}"
        f'<header><h1>{title}</h1><p class="muted">{escape(ends)}</p></header>'
        f"<main>{_facts(drawn)}"
        f"<h2>Comparison with other plans</h2>{_comparison(drawn)}"
        f"<h2>Every call</h2>{_legend(rows, drawn)}{drawing.drawing(rows, schedule, _why(drawn))}"
        f"</main><footer>blockconv {__version__}, {escape(target.target_cpu())}, {target.isa().name}; "
        f"{_download(drawn)}</footer></body></html>"
    )


_MARKERS = (
    '<svg width="0" height="0" class="markers" aria-hidden="true"><defs><marker id="arrow" viewBox="0 0 6 6" refX="6" '
    'refY="3" markerWidth="6" markerHeight="6" markerUnits="userSpaceOnUse" orient="auto">'
    '<path d="M0 0L6 3L0 6Z"/></marker></defs></svg>'
)


# ---------------------------------------------------------------- the plan at a glance


def _facts(drawn: Drawn) -> str:
    planned, threads = drawn.planned, drawn.threads
    data = drawn.data
    kinds = [call["kind"] for call in data["calls"]]
    alone, moved = data["choice"]["seconds"], kinds.count("reorder") + kinds.count("copy")
    facts = [(f"predicted, {text.threads(threads)}", text.duration(data["predicted"]))]
    if threads != planned.threads:
        facts.append((f"predicted, {text.threads(planned.threads)}", text.duration(alone)))
    if drawn.own_time is not None:
        facts.append((f"measured, {text.threads(threads)}", text.duration(drawn.own_time)))
    facts += [
        ("kernel calls", str(len(kinds))),
        ("reorders and copies", str(moved)),
        ("packed weights", text.megabytes(data["weights"])),
        ("memory of a call", text.megabytes(data["arena"])),
    ]
    tiles = "".join(f"<div><dt>{name}</dt><dd>{value}</dd></div>" for name, value in facts)
    parameters = {name for node in planned.network.nodes for name in node.parameters}
    given = sum(planned.network.constants[name].nbytes for name in parameters)
    said = f"Layouts: {data['layouts']}; planner: {data['planner']}. {_sentence(data['choice']['quality'])}"
    if given:
        said += (
            f" The network's weights are {text.megabytes(given)}. Packing pads them to whole blocks. For Winograd "
            "kernels it also transforms them, which takes up to seven times the bytes."
        )
    said += "".join(f" {_sentence(line)}" for line in foreign(data))
    return f'<dl class="facts">{tiles}</dl><p>{escape(said)}</p>'


def _sentence(said: str) -> str:
    return f"{said[:1].upper()}{said[1:]}."


# ---------------------------------------------------------------- other plans


class _Compared(NamedTuple):
    """A plan compared with the others.

    colour: of its bar.
    """

    name: str
    solution: Solution
    predicted: float
    measured: float | None
    colour: str


def _plans(drawn: Drawn) -> list[_Compared]:
    """The chosen plan, and the greedy one and each fixed layout at the same costs."""
    planned, measured = drawn.planned, drawn.measured
    problem = planned.problem
    known = {choice.dst for step in problem.steps for choice in step.choices}

    def compared(name: str, solution: Solution, seconds: float | None, colour: str) -> _Compared:
        predicted = seconds_of_plan(planned, solution, drawn.threads)
        return _Compared(name, solution, predicted or math.ulp(0), seconds, colour)  # no images take nothing

    found = [compared("this plan", planned.solution, drawn.own_time, "var(--wire)")]
    found.append(compared("greedy", greedy(problem), measured.get("greedy"), "var(--wire)"))
    fixed_ones = ((layout, fixed(problem, layout)) for layout in NATIVE if layout in known)
    return found + [compared(f"all {one}", plan, measured.get(one.name), fill(one)) for one, plan in fixed_ones]


def _comparison(drawn: Drawn) -> str:
    planned, threads = drawn.planned, drawn.threads
    plans = _plans(drawn)
    best, worst = min(plan.predicted for plan in plans), max(plan.predicted for plan in plans)
    step, count = _scale(worst / best - 1)
    timed, both = any(plan.measured is not None for plan in plans), threads != planned.threads
    unit, scale = ("ms", 1e3) if best >= 1e-3 else ("µs", 1e6)
    rows = []
    for plan in plans:
        more = plan.predicted / best - 1
        times = [plan.predicted] + [plan.solution.cost] * both + [plan.measured] * timed
        figures = ["" if seconds is None else f"{seconds * scale:.2f}" for seconds in times]
        reorders = [copy for copy in plan.solution.reorders if planned.problem.reorder(*copy) > 0]
        cells = "".join(f"<td>{figure}</td>" for figure in (*figures, len(reorders)))
        said = "best" if more == 0 else _per_cent(more, step / 10)
        rows.append(
            f'<tr{" class=this" if plan.name == "this plan" else ""}><th scope="row">{plan.name}</th>'
            f'<td class="bar"><i style="width:{SCALE * more / (step * count):.2f}%;background:{plan.colour}"></i>'
            f"<span>{said}</span></td>{cells}</tr>"
        )
    ticks = "".join(
        f'<span style="left:{SCALE * k / count:.2f}%">{_per_cent(k * step, step)}</span>' for k in range(count + 1)
    )
    threads_of = [("predicted", threads)] + [("predicted", planned.threads)] * both + [("measured", threads)] * timed
    heads = [f"{what},<br>{text.threads(number)}, {unit}" for what, number in threads_of]
    columns = "".join(f'<th scope="col">{head}</th>' for head in (*heads, "reorders"))
    style = f"--step:{100 / count:.3f}%;--figures:{1 + len(heads)}"
    return (
        f'<p>{_comparison_text(drawn)}</p><table class="beside" style="{style}"><thead><tr>'
        f'<th scope="col">plan</th><th scope="col" class="axis">slower than the best of these'
        f'<div class="ticks">{ticks}</div></th>{columns}</tr></thead><tbody>{"".join(rows)}</tbody></table>'
    )


def _per_cent(share: float, step: float) -> str:
    """A share in per cent, with the decimals that tell steps apart."""
    digits = max(0, math.ceil(-math.log10(100 * step) - 1e-9))
    return "0" if share == 0 else f"{100 * share:+.{min(digits, 2)}f} %"


def _comparison_text(drawn: Drawn) -> str:
    threads, priced = drawn.threads, drawn.planned.threads
    said = f"Bars begin at the best of these plans, not at zero. They show predictions for {text.threads(threads)}."
    if threads != priced:
        said += (
            f" The planner uses predictions for {text.threads(priced)}, so that the choice does not depend on the "
            "number of threads. With more threads, another plan may be predicted to be faster."
        )
    return said


def _scale(most: float) -> tuple[float, int]:
    """(step, steps) of an axis from 0 that holds `most` in at most five steps of 1, 2 or 5 times a power of ten."""
    most = max(most, LEAST_SCALE) if math.isfinite(most) else 1.0
    power = 10.0 ** math.floor(math.log10(most / 5) + 1e-9)
    step = next(power * k for k in (1, 2, 5, 10) if power * k * 5 >= most * (1 - 1e-9))
    return step, math.ceil(most / step - 1e-9)


# ---------------------------------------------------------------- every call


def _legend(rows: Sequence[drawing.DrawnRow], drawn: Drawn) -> str:
    used = {layout for row in rows for layout in (row.src, row.dst)}
    keys = [(layout.name, fill(layout)) for layout in NATIVE if layout in used]
    keys += [("another layout", FILLS["other"])] * any(fill(layout) == FILLS["other"] for layout in used)
    keys += [("reorder or copy", FILLS["reorder"])] * any(row.kind in ("reorder", "copy") for row in rows)
    chips = "".join(f'<li><i style="background:{colour}"></i>{escape(name)}</li>' for name, colour in keys)
    times = [("predicted", f"predicted on {text.threads(drawn.threads)}")]
    times += [("measured", "measured, each call by itself")] * (drawn.data["measured"] is not None)
    bars = "".join(f'<li><i class="{name}"></i>{said}</li>' for name, said in times)
    return (
        f'<ul class="legend">{chips}{bars}</ul>'
        "<p>A box is a kernel call, with the shape (N x C x H x W) of its output. Its colour is the output's layout. "
        "The stripe at its left is the input's layout. If they differ, the kernel changes the layout itself. Lines "
        "lead to the readers. Tensors in one piece of memory, such as the parts of a concatenation, share a line. "
        "Times are in µs, and their bars begin at zero. Open a row for the other candidates.</p>"
    )


def _why(drawn: Drawn) -> list[str]:
    """For each row what else there was, or why it is reordered."""
    data = drawn.data
    rest = {node["name"]: "; ".join(others(node, most=3)) for node in data["nodes"]}
    said = [call["why"] or rest.get(call["name"], "") for call in data["calls"]]
    return [*[""] * len(drawn.planned.network.inputs), *said, *[""] * len(drawn.planned.problem.wanted)]


def _download(drawn: Drawn) -> str:
    """The plan's data as a link that holds them."""
    held = base64.b64encode(json.dumps(drawn.data).encode("utf-8")).decode("ascii")
    name = f"{identity.slug(drawn.data['network']) or 'plan'}.json"
    return f'<a download="{name}" href="data:application/json;base64,{held}">this plan as data (JSON)</a>'
