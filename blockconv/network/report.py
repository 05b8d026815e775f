"""A plan as one self-contained page of HTML: drawn, with layouts as colours; tables; other plans beside it."""

from __future__ import annotations

from html import escape
from importlib import resources

from blockconv.layout import NATIVE, Layout
from blockconv.network.explain import arrow, microseconds, reason, rejections
from blockconv.network.planned import Planned
from blockconv.network.planner import Solution, fixed, greedy
from blockconv.network.schedule import Action, Schedule, Value

__all__ = ["page"]

# One hue a layout; the row-major ones grey.
COLOURS = {
    "NCHW": "#9aa5b1", "NHWC": "#e0a458", "NCHW4": "#7fb7be", "NCHW8": "#5b9bd5", "NCHW16": "#5a7fd6",
    "NCHW32": "#8a6fd1", "NCHW64": "#b565c4", "CHWN4": "#5fae77",
}  # fmt: skip
OTHER, REORDER = "#c3cad2", "#e5484d"
CHANGES = ' stroke-dasharray="4 3" class="changes"'  # the mark of a kernel that changes the layout
ROW, BOX, HEIGHT, LANE, TOP = 34, 250, 26, 18, 34  # pixels: from row to row, a box, between lanes of edges


def page(
    planned: Planned, made: Schedule, measured: tuple[float, ...] | None, summary: str, asked: str
) -> str:  # fmt: skip
    """The page. measured: seconds of each action, if it was profiled. asked: the layouts that were asked for."""
    style = (resources.files("blockconv") / "data" / "report.css").read_text(encoding="utf-8")
    times = measured or tuple(action.cost for action in made.actions)
    lines = "".join(f"<p>{escape(line)}</p>" for line in summary.splitlines())
    title = escape(planned.network.name)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><title>{title}: plan</title><style>{style}</style>'
        f"<h1>{title}</h1>{lines}{_legend(made)}"
        f"<h2>Beside it</h2>{_beside(planned)}"
        f"<h2>The plan</h2><p>Boxes are kernel calls, coloured by the layout that they write; red are reorders and "
        f"copies. Bars are {'measured' if measured else 'predicted'} times. Point at a box for more.</p>"
        f'<div class="scroll">{_drawing(planned, made, times, asked)}</div>'
        f"<h2>Every call</h2>{_table(planned, made.actions, measured, asked)}</html>"
    )


def _colour(layout: Layout) -> str:
    return COLOURS.get(layout.name, OTHER)


def _legend(made: Schedule) -> str:
    used = {action.writes[1] for action in made.actions}
    keys = [(layout.name, _colour(layout)) for layout in NATIVE if layout in used] + [("reorder or copy", REORDER)]
    return '<p class="legend">' + "".join(f'<i style="background:{c}"></i>{escape(n)} ' for n, c in keys) + "</p>"


# ---------------------------------------------------------------- other plans


def _beside(planned: Planned) -> str:
    """The chosen plan, and what the same costs say of greedy and of every fixed layout."""
    problem = planned.problem
    known = {choice.dst for step in problem.steps for choice in step.choices}
    plans: dict[str, Solution] = {"this plan": planned.solution, "greedy": greedy(problem)}
    plans |= {f"{layout} everywhere": fixed(problem, layout) for layout in NATIVE if layout in known}
    most = max(solution.cost for solution in plans.values())
    rows = []
    for name, solution in plans.items():
        width = 100 * solution.cost / most
        count = len([1 for tensor, a, b in solution.reorders if problem.reorder(tensor, a, b) > 0])
        rows.append(
            f'<tr class="{"this" if name == "this plan" else ""}"><td>{name}<td class="n">{solution.cost * 1e3:.2f}'
            f'<td class="n">{solution.cost / planned.solution.cost:.3f}<td class="n">{count}'
            f'<td class="bar"><i style="width:{width:.1f}%"></i>'
        )
    head = "<tr><th>plan<th>predicted, ms on one thread<th>times this one<th>reorders<th>"
    return f"<table>{head}{''.join(rows)}</table>"


# ---------------------------------------------------------------- the drawing


def _sources(made: Schedule) -> list[set[int]]:
    """Of each action, the actions that made what it reads; -1 is an input of the network or a constant."""
    makers: dict[Value, int] = {}

    def origins(value: Value) -> set[int]:
        if value in makers:
            return {makers[value]}
        if value in made.views:
            return set().union(*(origins(other) for other in made.views[value]))
        return {-1}

    found = []
    for k, action in enumerate(made.actions):
        found.append(set().union(*(origins(value) for value in action.reads)))
        if action.kind != "copy":  # which moves a value that others may read where it was
            makers[action.writes] = k
    return found


def _lanes(spans: list[tuple[int, int]]) -> list[int]:
    """A lane for each long edge, so that none that overlap share one; short ones get the nearest."""
    lanes = [0] * len(spans)
    taken: list[list[tuple[int, int]]] = []
    for k in sorted(range(len(spans)), key=lambda k: spans[k][1] - spans[k][0]):
        first, last = spans[k]
        lane = next((n for n, there in enumerate(taken) if all(b <= first or last <= a for a, b in there)), len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append((first, last))
        lanes[k] = lane
    return lanes


def _drawing(planned: Planned, made: Schedule, times: tuple[float, ...], asked: str) -> str:
    sources = _sources(made)
    edges = [(a, k) for k, makers in enumerate(sources) for a in sorted(makers)]
    long = [(a, k) for a, k in edges if k - a > 1]
    lanes = dict(zip(long, _lanes(long), strict=True))
    left = 20 + LANE * (max(lanes.values(), default=0) + 1)
    most = max(times, default=1.0)
    parts = [f'<text x="{left}" y="{TOP - 16}" class="small">inputs</text>']
    for a, k in edges:
        y0, y1 = TOP + ROW * a + (HEIGHT if a >= 0 else ROW - HEIGHT // 4), TOP + ROW * k
        if (a, k) not in lanes:
            parts.append(f'<path d="M{left + 24} {y0}V{y1}"/>')
            continue
        x = left - LANE * (lanes[a, k] + 1) + 6
        y0, y1 = y0 - HEIGHT // 2 if a >= 0 else y0 - 4, y1 + HEIGHT // 2
        parts.append(f'<path d="M{left} {y0}H{x + 6}q-6 0 -6 6V{y1 - 6}q0 6 6 6H{left}"/>')
    for k, action in enumerate(made.actions):
        parts.append(_box(planned, action, times[k], most, left, TOP + ROW * k, asked))
    width, height = left + BOX + 420, TOP + ROW * len(made.actions) + 10
    return f'<svg width="{width}" height="{height}" viewBox="0 0 {width} {height}">{"".join(parts)}</svg>'


def _box(planned: Planned, action: Action, seconds: float, most: float, x: int, y: int, asked: str) -> str:
    layouts = arrow(action.reads[0][1], action.writes[1])
    shape = "x".join(map(str, planned.network.shape(action.writes[0])))
    tip = f"{action.name}: {action.kernel}\n{layouts}, {shape}\npredicted {microseconds(action.cost)} µs"
    fill = REORDER
    if action.node is not None:
        fill = _colour(action.writes[1])
    else:
        tip += f"\n{reason(planned, action, asked)}"
    label = action.name if len(action.name) <= 30 else f"…{action.name[-29:]}"
    changes = action.node is not None and action.reads[0][1] != action.writes[1]
    bar, at, line = 160 * seconds / most, x + BOX, y + HEIGHT // 2 + 4
    return (
        f"<g><title>{escape(tip)}</title>"
        f'<rect x="{x}" y="{y}" width="{BOX}" height="{HEIGHT}" rx="6" fill="{fill}"'
        f"{CHANGES if changes else ''}/>"
        f'<text x="{x + 8}" y="{line}">{escape(label)}</text>'
        f'<text x="{at - 8}" y="{line}" text-anchor="end">{escape(action.kind)}</text>'
        f'<rect x="{at + 10}" y="{y + 7}" width="{bar:.1f}" height="{HEIGHT - 14}" class="time"/>'
        f'<text x="{at + 16 + bar:.0f}" y="{line}" class="small">{microseconds(seconds)} µs &#160; {escape(layouts)}'
        "</text></g>"
    )


# ---------------------------------------------------------------- the table


def _table(planned: Planned, actions: tuple[Action, ...], measured: tuple[float, ...] | None, asked: str) -> str:
    network = planned.network
    by_name = {node.name: (node, found, taken) for node, found, taken in
               zip(network.nodes, planned.candidates, planned.chosen, strict=True)}  # fmt: skip
    rows = []
    for k, action in enumerate(actions):
        if action.node is None:
            why, mark = reason(planned, action, asked), ' class="reorder"'
        else:
            why, mark = "; ".join(rejections(network, *by_name[action.node.name], most=3)), ""
        shape = "x".join(map(str, network.shape(action.writes[0])))
        cells = (action.name, action.kind, action.kernel, arrow(action.reads[0][1], action.writes[1]), shape)
        rows.append(
            f"<tr{mark}>{''.join(f'<td>{escape(cell)}' for cell in cells)}<td class=n>{microseconds(action.cost)}"
            f"<td class=n>{microseconds(measured[k] if measured else None)}<td class=why>{escape(why)}"
        )
    head = "".join(
        f"<th>{heading}"
        for heading in (
            "op", "kind", "kernel", "layouts", "writes", "predicted, µs", "measured, µs",
            "what else there was; a reorder's reason",
        )
    )  # fmt: skip
    return f"<table><tr>{head}{''.join(rows)}</table>"
