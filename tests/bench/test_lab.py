"""What the harness makes of many cases: standings of layouts and peers, regret, the model's quality, the page."""

from __future__ import annotations

import io
import re

import numpy as np
import pytest
from rich.console import Console

pytest.importorskip("matplotlib")

import matplotlib

from bench import changes, lab, page, plots, standings, tables
from bench.results import ResultFile
from bench.workers import Crew

LIMITS = {"low": 0.99, "median": 1.0, "high": 1.01, "q1": 0.995, "q3": 1.005}


def entry(name: str, milliseconds: float, role: str = "peer", **more) -> dict:
    timing = {key: 1e6 * milliseconds * factor for key, factor in LIMITS.items()}
    fixed = {"name": name, "role": role, "version": "1", "verdict": "ok", "error": 0.0, "first": 1e7, "prepare": 1e6}
    return fixed | {"timing": timing} | more


def layer(key: str = "a", channels: int = 64, peer: float = 2.0, **times: float) -> dict:
    """A case with our layouts' milliseconds, torch and ncnn."""
    ours = [entry(f"blockconv {layout}", time, "ours") for layout, time in times.items()]
    best = min(times.values())
    ratio = {"a": "torch x", "b": "", "median": peer / best, "low": peer / best - 0.01, "high": peer / best + 0.01}
    return {
        "key": key, "suite": "layers", "title": f"layer {key}, 1 threads", "others": 0.0,
        "params": {"problem": f"ic{channels}ih8oc8kh3ph1", "threads": 1, "cold": False},
        "flops": 2e8, "bytes": 1e6, "peak": 1e11, "bandwidth": 3e10,
        "entries": [*ours, entry("torch x", peer), entry("torch y", 2 * peer), entry("ncnn z", 3 * peer)],
        "speedups": {e["name"]: ratio for e in ours[:1]},
    }  # fmt: skip


def text(*parts) -> str:
    console = Console(width=200, file=io.StringIO(), record=True)
    for part in parts:
        console.print(part)
    return console.export_text()


# Standings


def test_layouts_are_compared_with_the_fastest_of_them():
    cases = [layer("a", NHWC=1.0, NCHW=2.0), layer("b", NHWC=1.0, NCHW=1.0), layer("c", 3, NHWC=1.0, NCHW=10.0)]
    assert standings.layout_speeds(cases[0]) == {"NHWC": 1.0, "NCHW": 0.5}
    shown = text(standings.layout_table(cases))
    assert re.search(r"geometric mean +│ +1.00 +│ +0.71 ", shown)  # without c, which has three channels
    assert re.search(r"layers under 0.75 +│ 0 of 2 +│ 1 of 2", shown)
    assert "layer c, 1 threads (few channels" in shown


def test_peers_are_compared_by_their_best_format():
    cases = [layer("a", NHWC=1.0, NCHW=2.0), layer("b", peer=0.5, NHWC=1.0, NCHW=2.0)]
    assert standings.against(cases[0]) == standings.against(cases[0], "torch") == 2.0
    assert standings.against(cases[0], "ncnn", "NCHW") == 3.0
    assert standings.against(cases[0], "openvino") is None
    shown = text(standings.peer_table(cases))
    assert re.search(r"torch +│ +1.00 │ +1 of 2 │ +1.00 │ 0.50", shown)
    assert re.search(r"best of all +│ +1.00", shown)
    assert len(list(standings.closing(cases))) == 2


def test_results_as_markdown(tmp_path):
    cases = [layer("a", NHWC=1.0, NCHW=2.0), layer("b", NHWC=1.0, NCHW=1.0)]
    pool = layer("p", NHWC=1.0, NCHW=1.0) | {"suite": "pools"}
    pool["params"] = pool["params"] | {"kind": "max"}
    results = ResultFile(tmp_path / "r", {"machine": {"cpu": "x", "os": "y", "versions": {"numpy": "2"}}})
    for case in (*cases, pool, NETWORK):
        results.add(case | {"key": case["suite"] + case["key"]})
    text = tables.markdown([tmp_path / "r"])
    assert "| layer a | 1 | 200 | 100 | 100 (torch x) | 2.00 |" in text
    assert "| layer p | 1 | 1.0 | 1.0 | 0.5 (torch x) | 2.00 |" in text
    assert "| NCHW | 0.71 | 0.50 | 1.41 | 4.24 | 1.41 |" in text
    assert "| the best of ours |  |  | 2.00 | 6.00 | 2.00 |" in text
    assert "| n, 1 images, 1 threads | auto | 1 ms | 0.0% |" in text


# Two files of one tree


def test_agreement_is_counted_in_the_ratio_to_the_best_peer():
    old = {key: layer(key, NHWC=1.0) for key in "abc"}
    new = {"a": layer("a", NHWC=1.02), "b": layer("b", NHWC=1.2), "c": layer("c", peer=3.0, NHWC=1.5)}
    found = changes.agreement(old, new)  # c: the machine was slower, and both were
    assert "agrees within 5% in 2 of 3 cases" in found
    assert "20.0% at most" in found
    assert "no case" in changes.agreement(old, {})


def test_a_case_has_its_own_drift():
    peers = {"key": "k", "title": "k", "suite": "layers"}
    quiet = [entry("o", 1.0, "ours"), *(entry(name, 1.0) for name in "pqr")]
    slow = [entry("o", 1.3, "ours"), *(entry(name, 1.3) for name in "pqr")]
    others = {name: {**peers, "key": name, "entries": quiet} for name in "xyz"}
    (change, *_), _ = changes.changes({"k": {**peers, "entries": quiet}, **others}, {"k": {**peers, "entries": slow}})
    assert change.verdict == "same"  # in its turn everything was slower


# The lab


def network(**choices: tuple[float, list]) -> dict:
    entries = []
    for name, (time, ops) in choices.items():
        told = [
            dict(zip(("name", "kind", "kernel", "layouts", "predicted", "measured"), op, strict=True)) for op in ops
        ]
        about = {"reorders": sum(op["kind"] == "reorder" for op in told), "predicted": 1e-3, "ops": told}
        entries.append(entry(f"blockconv {name}", time, "ours", about=about))
    params = {"network": "n", "batch": 1, "threads": 1}
    return {
        "key": "n", "suite": "lab", "title": "n, 1 images, 1 threads", "params": params, "entries": entries,
        "speedups": {}, "flops": 1e9, "peak": 1e11, "images": 1,
    }  # fmt: skip


def op(layout: str, predicted: float, measured: float, name: str = "conv", kind: str = "conv2d") -> tuple:
    return name, kind, "direct", layout, predicted, measured


NETWORK = network(
    auto=(1.0, [op("NHWC", 1e-4, 1e-4), op("", 1e-5, 2e-4, "to NHWC", "reorder")]),
    NCHW=(1.5, [op("NCHW", 2e-4, 3e-4)]),
    NCHW16=(1.2, [op("NCHW16", 3e-4, 2e-4)]),
    again=(1.1, [op("NHWC", 1e-4, 1e-4)]),  # the same way: no fourth one
)


def test_regret_is_the_distance_to_the_best_known():
    assert lab.regrets(NETWORK) == pytest.approx({"auto": 0, "NCHW": 0.5, "NCHW16": 0.2, "again": 0.1})
    shown = text(*lab.closing([NETWORK]))
    assert re.search(r"auto +│ +1 ms │ +0.0% │ +1 ms │ +1 │ 200 µs, 20.0%", shown)


def test_the_quality_of_the_model():
    quality = lab.model_quality(NETWORK)
    assert quality == (1, pytest.approx(0.5), 1.0, pytest.approx(1.0))
    wrong = network(a=(1, [op("x", 1e-4, 3e-4)]), b=(1, [op("y", 2e-4, 2e-4)]), c=(1, [op("z", 3e-4, 1e-4)]))
    assert lab.model_quality(wrong)[1:3] == (pytest.approx(-1), 0.0)
    assert lab.model_quality(network(a=(1, [op("x", 1e-4, 3e-4)]))) is None


def test_rank_correlation():
    a = np.array([1.0, 2, 3, 4])
    assert lab.rank_correlation(a, a**3) == pytest.approx(1)
    assert lab.rank_correlation(a, -a) == pytest.approx(-1)
    assert lab.rank_correlation(a, np.ones(4)) == 0
    # With ties, as scipy.stats.spearmanr has it.
    assert lab.rank_correlation(a, np.array([1.0, 1, 2, 3])) == pytest.approx(0.9486833)


def test_where_a_layout_overtakes():
    speeds = {
        16: {"A": 1.0, "B": 0.5, "C": 0.9},
        8: {"A": 0.5, "B": 1.0, "C": 0.99},
        32: {"A": 1.0, "B": 0.995, "C": 0.5},  # A and B: too close to say
    }
    # From 8 to 16 A passes B and C; C was level with B before, and is ahead first at 16.
    assert lab.crossings(speeds) == [(16, "A", "B"), (16, "A", "C"), (32, "B", "C")]


# The page


def test_the_page_stands_alone():
    pytest.importorskip("matplotlib")
    cases = {c["key"]: c for c in (layer("a", NHWC=1.0, NCHW=2.0), layer("b<script>", NHWC=3.0, NCHW=2.5), NETWORK)}
    cases["b<script>"]["entries"].append({"name": "bad", "role": "peer", "version": "", "verdict": "WRONG", "error": 1})
    html = page.render([([{"machine": {"cpu": "x"}, "command": ["layers"]}], cases)], "a title")
    assert html.count("<svg") >= 4
    fetched = re.findall(r'(?:src|href)\s*=\s*"([^"#]*)"|url\(([^#)][^)]*)\)|@import', html)
    assert all(data.startswith("data:") and not url for data, url in fetched)
    assert "<script" not in html
    assert "WRONG" in html
    assert "0.50" in html
    assert "Regret" in html


def contrast(a: str, b: str) -> float:
    """As WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[k : k + 2], 16) / 255 for k in (1, 3, 5)]
        linear = [c / 12.92 if c <= 0.03928 else ((c + 0.055) / 1.055) ** 2.4 for c in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(a), luminance(b)))
    return (light + 0.05) / (dark + 0.05)


def test_text_on_the_page_can_be_read():
    for ink in (page.INK, page.MUTED, page.ALERT, *plots.STANDING.values()):
        assert contrast(ink, page.PAPER) >= 4.5
    assert contrast(page.INK, page.NOTE) >= 4.5
    assert all(re.match(rf"color: ({page.INK}|{page.MUTED}|{page.PAPER}|{'|'.join(plots.STANDING.values())})", c)
               for c in re.findall(r"(?<![-\w])color: #.{6}", page.STYLE))  # fmt: skip


def test_shares_can_be_read_on_every_colour_of_the_map():
    for share in np.linspace(0, 1, 101):
        ground = matplotlib.colormaps["RdYlGn"](share)[:3]
        assert contrast(plots.ink_on(ground), matplotlib.colors.to_hex(ground)) >= 4.5


def test_the_chart_and_the_list_say_the_same_in_the_same_order():
    cases = [layer(name, NHWC=1.0 + k / 3, peer=2.0) for k, name in enumerate("zay")]
    cases[1]["speedups"]["blockconv NHWC"] |= {"median": 1.23456}  # of the same rounds, not of the medians
    html = page.render([([{"machine": {"cpu": "x"}, "command": []}], {c["key"]: c for c in cases})], "t")
    chart = html[html.index("<svg") : html.index("</svg>")]
    listed = re.findall(r'<summary><b class="\w+">([0-9.]+)</b> ([^<]+)', html)
    assert [name for _, name in listed] == ["layer z", "layer a", "layer y"]
    drawn = re.findall(r">([\w .]+)</text>", chart)
    assert [text for text in drawn if text.startswith("layer")] == ["layer z", "layer a", "layer y"]
    assert [figure for figure, _ in listed] == ["2.00", "1.23", "1.20"]
    assert [text for text in drawn if re.fullmatch(r"\d\.\d\d", text)] == ["2.00", "1.23", "1.20"]


def test_a_network_that_is_not_known_is_said_before_anything_is_measured():
    pytest.importorskip("onnx")
    from bench import nets

    with pytest.raises(ValueError, match=r"networks='regnet': is no file; give an ONNX file, or one of .*resnet50"):
        nets.plans(["resnet50", "regnet"], [1], [1], ["auto"], Crew([]), {})


def test_a_model_with_open_sizes_runs_with_those_after_its_name(tmp_path):
    onnx = pytest.importorskip("onnx")
    from bench import nets, networks

    path = str(tmp_path / "open.onnx")
    onnx.save(networks.any_size("line_reader"), path)
    with pytest.raises(ValueError, match=f"networks='{path}': .*no fixed shape.*; give {path}=1x3x224x224"):
        nets._loaded(path, nets._file(path, 1, str(tmp_path)))
    named = f"{path}=1x3x32x72"
    assert nets._loaded(named, nets._file(named, 1, str(tmp_path))).inputs[0].shape == (1, 3, 32, 72)
    with pytest.raises(ValueError, match=r"open\.onnx=1xa': give sizes"):
        nets.plans([f"{path}=1xa"], [1], [1], ["auto"], Crew([]), {})
