"""The page of a plan: one file, what it says, its lines, and colours that can be read."""

from __future__ import annotations

import base64
import itertools
import json
import re
import typing
from html.parser import HTMLParser
from importlib import resources
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_networks import inception_network, residual_network, values

import blockconv as bc
from blockconv.core import text
from blockconv.network.reporting import data, drawing
from blockconv.network.reporting import page as report


def page(plan: bc.Plan, folder: Path, **measured: float) -> str:
    plan.report(folder / "plan.html", measured)
    return (folder / "plan.html").read_text(encoding="utf-8")


class Reader(HTMLParser):
    """The texts of a page, and whether its elements are nested soundly."""

    VOID = frozenset({"meta", "br"})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: object) -> None:
        if tag not in self.VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: object) -> None:
        pass

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


# ---------------------------------------------------------------- colours


def luminance(colour: str) -> float:
    """Relative luminance, as WCAG 2 defines it."""
    parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def contrast(a: str, b: str) -> float:
    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_contrast_is_that_of_wcag() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)  # the grey that just fails


@pytest.mark.parametrize("name", drawing.FILLS)
def test_text_in_boxes_can_be_read(name: str) -> None:
    assert contrast(drawing.ON_FILL, drawing.FILLS[name]) >= 4.5


@pytest.mark.parametrize(
    ("theme", "ink", "ground"), list(itertools.product(drawing.THEMES, drawing.TEXTS, ("paper", "band")))
)
def test_text_on_the_page_can_be_read(theme: str, ink: str, ground: str) -> None:
    colours = drawing.THEMES[theme]
    assert contrast(colours[ink], colours[ground]) >= 4.5


@pytest.mark.parametrize("theme", drawing.THEMES)
def test_lines_and_bars_can_be_seen(theme: str) -> None:
    colours = drawing.THEMES[theme]
    assert all(contrast(colours[name], colours["paper"]) >= 3 for name in ("wire", "predicted", "measured"))


def test_every_layout_has_a_colour_of_its_own() -> None:
    assert {layout.name for layout in bc.NATIVE} < drawing.FILLS.keys()
    assert len(set(drawing.FILLS.values())) == len(drawing.FILLS)


def test_the_style_sheet_takes_its_colours_from_the_palette() -> None:
    style = (resources.files("blockconv") / "data" / "report.css").read_text(encoding="utf-8")
    assert not re.findall(r"#[0-9a-f]{3,8}\b", style)
    defined = set(re.findall(r"--([a-z-]+):", drawing.style_variables()))
    given = {"fill", "from", "left", "step", "figures"}  # by the elements themselves
    assert set(re.findall(r"var\(--([a-z-]+)\)", style)) <= defined | given
    inks = set(re.findall(r"[; {]color: var\(--([a-z-]+)\)", style))
    assert inks <= {*drawing.TEXTS, "on-fill"}


# ---------------------------------------------------------------- what the page says


def test_the_page_stands_alone_and_shows_every_call_once(tmp_path: Path) -> None:
    plan = bc.compile(residual_network(), "NCHW16")
    html = page(plan, tmp_path)
    assert not re.search(r"http|<script|@import|url\((?!#)|\bsrc=", html)
    assert "overflow: auto" not in html
    assert "overflow: scroll" not in html
    texts = Reader(html).texts
    for action in plan.actions:
        box = rf'<span class="box" title="{action.name}"[^>]*><b>{action.name}</b><span>([0-9x]+)</span>'
        boxes = re.findall(box, html)
        assert "x".join(map(str, plan.network.shape(action.writes[0]))) in boxes
    assert html.count('class="call"') + html.count('class="moved call"') == len(plan.actions)
    assert any("reads NCHW16; layouts: NCHW16" in text for text in texts)
    assert "measured" not in texts  # a head of a column; nothing was timed


def test_a_plan_of_no_images_has_a_page(tmp_path: Path) -> None:
    b = bc.NetworkBuilder()
    b.output(b.max_pool2d(b.input("x", (0, 3, 8, 8)), 2))
    assert "Comparison" in page(bc.compile(b.build()), tmp_path)


def test_times_are_of_the_threads_that_ran_and_measured_where_it_did(tmp_path: Path) -> None:
    plan = bc.compile(residual_network(), threads=2)
    html = page(plan, tmp_path, NCHW16=2e-3)
    assert "predicted,<br>2 threads" in html
    assert "predicted,<br>1 thread," in html
    assert "measured,<br>2 threads" in html
    assert 'class="measured"' not in html
    profile = plan.profile(values((1, 3, 12, 12)), runs=1)
    html = page(plan, tmp_path)
    assert html.count('<i class="measured" style') == len(profile.actions)
    assert "2 threads" not in page(bc.compile(residual_network(), threads=1), tmp_path)


def test_names_are_escaped(tmp_path: Path) -> None:
    b = bc.NetworkBuilder("<b>bold</b>")
    b.output(b.conv2d(b.input("<x>", (1, 3, 4, 4)), np.ones((4, 3, 1, 1), np.float32), name='"<script>'))
    html = page(bc.compile(b.build()), tmp_path)
    assert "<script" not in html
    assert "<b>bold" not in html
    assert "&lt;x&gt;" in html
    Reader(html)


@pytest.mark.parametrize(
    ("most", "step", "count"),
    [(0.0, 0.002, 5), (0.058, 0.02, 3), (0.06, 0.02, 3), (0.234, 0.05, 5), (3.22, 1.0, 4), (0.5, 0.1, 5)],
)
def test_the_axis_begins_at_the_best_and_holds_the_worst(most: float, step: float, count: int) -> None:
    found = report._scale(most)
    assert found == (pytest.approx(step), count)
    assert found[0] * found[1] >= most


# ---------------------------------------------------------------- the data


def kept_to(record: Any, kind: Any) -> bool:
    """Whether a record is of a type of `data`, to its last leaf, with no field more or less."""
    if typing.is_typeddict(kind):
        hints = typing.get_type_hints(kind)
        return record.keys() == hints.keys() and all(kept_to(record[name], hint) for name, hint in hints.items())
    if typing.get_origin(kind) is list:
        return type(record) is list and all(kept_to(item, *typing.get_args(kind)) for item in record)
    return type(record) in (typing.get_args(kind) or (kind,))


@pytest.mark.parametrize("asked", [{}, {"layouts": "NHWC"}, {"planner": "greedy"}, {"planner": lambda problem: {}}])
@pytest.mark.parametrize("make", [residual_network, inception_network])
def test_data_text_and_page_say_the_same(make: Any, asked: dict[str, Any], tmp_path: Path) -> None:
    plan = bc.compile(make(), threads=2, **asked)
    for timed in (False, True):
        if timed:
            plan.profile(np.zeros(plan.network.inputs[0].shape, np.float32), runs=1)
        found = plan.to_dict()
        assert kept_to(found, data.PlanData)
        plan.report(tmp_path / "plan.json")
        assert json.loads((tmp_path / "plan.json").read_text("utf-8")) == found
        (held,) = re.findall(r'href="data:application/json;base64,([^"]+)"', page(plan, tmp_path))
        assert json.loads(base64.b64decode(held)) == found
        assert (found["measured"] is not None) == timed
        words = plan.explain().split()
        assert all(word in words for call in found["calls"] for word in text.microseconds(call["predicted"]).split())
    assert found["version"] == 1
    prices = {
        (one["value"], a, b): one["seconds"][i][j]
        for one in found["reorders"]
        for i, a in enumerate(one["layouts"])
        for j, b in enumerate(one["layouts"])
    }
    moved = sum(prices[value, str(src), str(dst)] or 0 for value, src, dst in plan.planned.solution.reorders)
    alone = sum(node["candidates"][node["chosen"]]["seconds"] for node in found["nodes"])
    assert alone + moved == pytest.approx(found["choice"]["seconds"]) == pytest.approx(plan.cost)
    assert found["choice"]["optimal"] == (not asked)
    shapes = {value["name"]: tuple(value["shape"]) for value in found["values"]}
    assert all(shapes[name] == plan.network.shape(name) for node in plan.network.nodes for name in node.inputs)
    assert any(node["rejected"] for node in found["nodes"])


# ---------------------------------------------------------------- the lines


def drawn(plan: bc.Plan) -> tuple[list[drawing.Row], list[drawing.Line], set[int]]:
    bound = plan._first
    rows = drawing.rows(bound.planned, bound.schedule, plan.to_dict()["calls"])
    return rows, drawing.lines(rows, bound.schedule), drawing.direct(rows, bound.schedule)


def test_what_is_read_later_has_a_line() -> None:
    rows, lines, direct = drawn(bc.compile(residual_network()))
    number = {row.name: k for k, row in enumerate(rows)}
    assert [row.kind for row in rows if row.kind != "reorder"][:2] == ["input", "conv2d"]
    assert rows[-1].kind == "output"
    assert direct >= {number["stem"], number["a"], number["join"], number["short"]}
    ends = {(min(line.writers), max(line.readers)) for line in lines}
    assert ends == {(number["stem"], number["join"]), (number["join"], number["b"])}
    assert {line.lane for line in lines} == {0}  # one ends where the other begins


def test_parts_of_a_concatenation_share_a_line() -> None:
    rows, lines, _ = drawn(bc.compile(inception_network(), "NCHW16"))
    number = {row.name: k for k, row in enumerate(rows) if row.kind == "conv2d"}
    whole = next(line for line in lines if number["one"] in line.writers)
    assert {number["two"]} < whole.writers
    assert number["three"] in whole.readers


def test_lines_that_overlap_have_lanes_of_their_own() -> None:
    _, lines, _ = drawn(bc.compile(inception_network(), "NCHW16"))
    for a, b in itertools.combinations(lines, 2):
        assert a.lane != b.lane or a.last <= b.first or b.last <= a.first
