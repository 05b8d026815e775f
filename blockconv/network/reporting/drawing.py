"""A plan drawn as HTML, a row for each input, kernel call and output, with the tensors between them as lines.

Each row draws its part of the lines, as long as the row is. So a row may be opened, wrapped on a narrow screen, or
printed on another sheet of paper. A line stands for one piece of memory: a tensor, or several that are parts of one (a
concatenation's inputs, a slice, a reshape). It goes from the row that writes first to the row that reads last.

Each text stands on its ground with a contrast of 4.5 to 1 or more (WCAG 2, AA).
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from typing import NamedTuple

from blockconv.core import text
from blockconv.core.checks import Pair
from blockconv.core.layout import Layout
from blockconv.core.python import zipped
from blockconv.network import ops
from blockconv.network.foreign import counted
from blockconv.network.graph import Network
from blockconv.network.order import join, root
from blockconv.network.planning.planned import Planned
from blockconv.network.reporting.data import CallData
from blockconv.network.schedule import Action, Schedule, Value

# One hue for each layout that kernels run in, the plain ones grey and amber; the same in the light and the dark.
FILLS = {
    "NCHW": "#b4bcc6", "NHWC": "#e9b96e", "NCHW4": "#8fd0cf", "NCHW8": "#8cc4f2", "NCHW16": "#9db4f5",
    "NCHW32": "#c0aaf2", "NCHW64": "#e3a3e6", "CHWN4": "#93d6a2",
    "other": "#d5d9de", "reorder": "#ff9d94",
}  # fmt: skip
ON_FILL = "#14171c"  # the text in a box

THEMES: Mapping[str, Mapping[str, str]] = {
    "light": {
        "paper": "#ffffff", "band": "#f3f5f8", "ink": "#1b2028", "muted": "#59616d", "line": "#dfe3e8",
        "wire": "#7b8594", "predicted": "#7d8ba3", "measured": "#3d5a98", "alert": "#b3261e",
    },
    "dark": {
        "paper": "#14171c", "band": "#1e232b", "ink": "#e6e9ee", "muted": "#a3acb8", "line": "#343b46",
        "wire": "#8a94a3", "predicted": "#8494b0", "measured": "#6ea0ff", "alert": "#ff9d94",
    },
}  # fmt: skip
TEXTS = ("ink", "muted", "alert")  # colours of a theme that text is written in, on its "paper" and its "band"


def fill(layout: Layout) -> str:
    """The colour of a layout."""
    return FILLS.get(layout.name, FILLS["other"])


def style_variables() -> str:
    """The colours as the variables of a style sheet; the dark ones where the reader's system asks for them."""

    def block(theme: str) -> str:
        return "".join(f"--{name}:{colour};" for name, colour in THEMES[theme].items())

    return (
        f":root{{color-scheme:light dark;--on-fill:{ON_FILL};{block('light')}}}"
        f"@media screen and (prefers-color-scheme:dark){{:root{{{block('dark')}}}}}"
    )


CENTRES = {"in": 13, "out": 23}  # pixels from a row's top at which a line enters and leaves its box
BOX = 4, 32  # pixels from a row's top to its box's, and to the box's end
STEM = 16  # pixels from a box's left end to the line that leads to the next row
PITCH, WIDEST = 11.0, 88.0  # pixels from line to line, and of all lines together at most


class DrawnRow(NamedTuple):
    """The drawn form of an action, or of an input or output of the network, which have no kernel and take no time."""

    name: str
    kind: str  # "input", "output", or an action's
    what: str
    kernel: str
    shape: str
    src: Layout
    dst: Layout
    predicted: float | None
    measured: float | None
    reads: tuple[Value, ...]
    writes: Value | None


class Line(NamedTuple):
    """Tensors in one piece of memory, by the rows that write and read them.

    lane: 0 is next to the boxes.
    """

    writers: frozenset[int]
    readers: frozenset[int]
    lane: int

    @property
    def first(self) -> int:
        return min(self.writers)

    @property
    def last(self) -> int:
        return max(self.writers | self.readers)


# ---------------------------------------------------------------- rows


def rows(planned: Planned, made: Schedule, calls: Sequence[CallData]) -> list[DrawnRow]:
    """Inputs, actions in their order, outputs."""
    network, problem = planned.network, planned.problem

    def end(kind: str, name: str, layout: Layout) -> DrawnRow:
        value = name, layout
        reads, writes = ((), value) if kind == "input" else ((value,), None)
        shape = text.dims(network.shape(name))
        return DrawnRow(name, kind, kind, "", shape, layout, layout, None, None, reads, writes)

    found = [end("input", tensor.name, problem.given[tensor.name]) for tensor in network.inputs]
    for action, call in zipped(made.actions, calls):
        writes = action.writes if action.kind != "copy" else None  # others may read what is copied where it was
        said = action.name, action.kind, _what(network, action), action.kernel, text.dims(call["shape"])
        times = call["predicted"], call["measured"]
        found.append(DrawnRow(*said, *action.layouts, *times, action.reads, writes))
    return [*found, *(end("output", name, layout) for name, layout in problem.wanted.items())]


def _what(network: Network, action: Action) -> str:
    """An op in a few words: conv2d 3x3, stride 2, relu."""
    node = action.node
    if node is None:
        return action.kind
    a, said = node.attributes, [node.op]
    if action.part is not None:
        return counted(action.part.kinds)
    if isinstance(a, ops.Conv2d):
        oc, _, kh, kw = network.shape(node.parameters[0])
        residual = " + residual" if len(node.inputs) > 1 else ""
        said = [f"{'depthwise' if a.groups == oc > 1 else 'conv'} {kh}x{kw}{residual}"]
        said += [f"stride {_once(a.stride)}"] * (a.stride != (1, 1))
        said += [f"dilation {_once(a.dilation)}"] * (a.dilation != (1, 1))
        said += [f"{a.groups} groups"] * (1 < a.groups < oc)
    elif isinstance(a, ops.Pool2d):
        window = "global" if a.kernel is None else text.dims(a.kernel)
        said = [f"{a.kind.partition('_')[0]} pool {window}"]
        said += [f"stride {_once(a.stride)}"] * (a.stride != (1, 1))
    elif isinstance(a, ops.Binary):
        said = [a.kind]
    activation = getattr(a, "activation", None)
    if activation is not None and not activation.is_identity:
        said.append(activation.name)
    return ", ".join(said)


def _once(pair: Pair) -> str:
    return str(pair[0]) if pair[0] == pair[1] else text.dims(pair)


# ---------------------------------------------------------------- lines


def lines(found: Sequence[DrawnRow], made: Schedule) -> list[Line]:
    """The lines left of the boxes. A value that only the next row reads needs none: it is drawn from box to box."""
    joined: dict[Value, Value] = {}  # those in one piece of memory
    for view, sources in made.views.items():
        for source in sources:
            join(joined, source, view)
    writers: dict[Value, set[int]] = {}
    readers: dict[Value, set[int]] = {}
    for k, makers in enumerate(_makers(found, made)):
        for maker in makers:
            if maker < k - 1 and (value := found[maker].writes):
                group = root(joined, value)
                writers.setdefault(group, set()).add(maker)
                readers.setdefault(group, set()).add(k)
    drawn = [Line(frozenset(writers[group]), frozenset(readers[group]), 0) for group in writers]
    taken: list[list[Line]] = []
    for line in sorted(drawn, key=lambda line: (line.last - line.first, line.first)):
        # Lines share a lane if they are apart. One may end where another begins: it enters the box above.
        apart = ([a.last <= line.first or line.last <= a.first for a in others] for others in taken)
        lane = next((n for n, known in enumerate(apart) if all(known)), len(taken))
        if lane == len(taken):
            taken.append([])
        taken[lane].append(line._replace(lane=lane))
    return sorted((line for others in taken for line in others), key=lambda line: line.first)


def direct(found: Sequence[DrawnRow], made: Schedule) -> set[int]:
    """The rows that read what the row before them wrote."""
    return {k for k, makers in enumerate(_makers(found, made)) if k - 1 in makers}


def _makers(found: Sequence[DrawnRow], made: Schedule) -> Iterable[frozenset[int]]:
    """For each row the rows that wrote what it reads, or what that is made of without a kernel."""
    wrote = {row.writes: k for k, row in enumerate(found)}

    @functools.cache
    def origins(value: Value) -> frozenset[int]:
        """The rows that wrote a value; none for a constant."""
        if value in wrote:
            return frozenset((wrote[value],))
        return frozenset().union(*map(origins, made.views.get(value, ())))

    return (frozenset().union(*map(origins, row.reads)) for row in found)


# ---------------------------------------------------------------- HTML


def drawing(found: Sequence[DrawnRow], made: Schedule, why: Sequence[str]) -> str:
    """The rows as HTML. why: the text of each when it is opened; of reorders and copies it is always shown."""
    wires, next_to = lines(found, made), direct(found, made)
    lanes = 1 + max((line.lane for line in wires), default=-1)
    pitch = min(PITCH, WIDEST / max(lanes, 1))
    left = 14 + pitch * lanes
    stem = left + STEM

    def wires_of(k: int) -> str:
        """The lines in row k, from its top (0) to its end (100%)."""
        parts = []
        if k in next_to:
            parts.append(_segment(stem, 0, stem, BOX[0], arrow=True))
        if k + 1 in next_to:
            parts.append(_segment(stem, BOX[1], stem, "100%"))
        for line in wires:
            if not line.first <= k <= line.last:
                continue
            x = left - 12 - pitch * line.lane
            ends = [CENTRES["in"]] * (k in line.readers) + [CENTRES["out"]] * (k in line.writers)
            top, bottom = (0 if k > line.first else min(ends)), ("100%" if k < line.last else max(ends))
            parts.append(_segment(x, top, x, bottom))
            for y in ends:
                parts.append(_segment(x, y, left, y, arrow=y == CENTRES["in"]))
                if top == 0 and bottom == "100%":
                    parts.append(f'<circle cx="{x:.1f}" cy="{y}" r="2.5"/>')
        return f'<svg class="wires" aria-hidden="true" width="{stem + 6:.0f}" height="100%">{"".join(parts)}</svg>'

    most = max((t for row in found for t in (row.predicted, row.measured) if t is not None), default=0.0) or 1.0
    drawn = (_row(row, wires_of(k), why[k], most) for k, row in enumerate(found))
    timed = any(row.measured is not None for row in found)
    style = "plan" if timed else "plan untimed"
    return f'<div class="{style}" style="--left:{left:.0f}px">{_head(timed)}{"".join(drawn)}</div>'


def _head(timed: bool) -> str:
    """The names of the columns, where the screen is wide enough for columns."""
    figures = "".join(f'<span class="n">{name}</span>' for name in ("predicted", "measured")[: 1 + timed])
    return (
        '<div class="head row"><span>call, and the shape that it writes</span><div class="told"><span>op</span>'
        f'<span class="kernel">kernel</span><span>layouts</span>{figures}</div><span></span></div>'
    )


def _segment(x1: float, y1: float | str, x2: float, y2: float | str, arrow: bool = False) -> str:
    end = ' marker-end="url(#arrow)"' if arrow else ""
    return f'<line x1="{x1:.1f}" y1="{y1}" x2="{x2:.1f}" y2="{y2}"{end}/>'


def _row(row: DrawnRow, wires: str, why: str, most: float) -> str:
    name, shape = escape(text.shortened(row.name, 28)), escape(row.shape)
    moved = row.kind in ("reorder", "copy")
    ground = FILLS["reorder"] if moved else fill(row.dst)
    box = (
        f'<span class="box" title="{escape(row.name)}" style="--fill:{ground};--from:{fill(row.src)}">'
        f"<b>{name}</b><span>{shape}</span></span>"
    )
    if row.predicted is None:
        told = f'<span class="op">{row.what}</span><span class="kernel"></span><span>{escape(str(row.dst))}</span>'
        return f'<div class="end row">{wires}{box}<div class="told">{told}</div></div>'
    times = "".join(_time(label, seconds) for label, seconds in _times(row))
    bars = "".join(f'<i class="{label}" style="width:{100 * t / most:.2f}%"></i>' for label, t in _times(row) if t)
    line = (
        f'{wires}{box}<div class="told"><span class="op">{escape(row.what)}</span><span class="kernel">'
        f"{escape(row.kernel)}</span><span>{escape(text.arrow(row.src, row.dst))}</span>{times}</div>"
        f'<span class="bars">{bars}</span>'
    )
    if moved:
        return f'<div class="moved call"><div class="row">{line}</div><p class="why">{escape(why)}</p></div>'
    told = f"<strong>{escape(row.name)}</strong> {escape(why)}"
    return f'<details class="call"><summary class="row">{line}</summary><p class="why">{told}</p></details>'


def _times(row: DrawnRow) -> tuple[tuple[str, float | None], ...]:
    return ("predicted", row.predicted), ("measured", row.measured)


def _time(label: str, seconds: float | None) -> str:
    said = f'<span class="label">{label} </span>{text.microseconds(seconds)}<span class="label"> µs</span>'
    return "" if seconds is None else f'<span class="n">{said}</span>'
