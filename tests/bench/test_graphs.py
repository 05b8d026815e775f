"""`python -m bench graphs`: samples of a collection, each in a process of its own, their results kept and summed up."""

from __future__ import annotations

import argparse
import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

pytest.importorskip("torch")

from bench import graphs
from bench.commands import graphs as command

MODEL = """
import torch

class GraphModule(torch.nn.Module):
    def forward(self, L_self_modules_0_parameters_weight_: torch.Tensor, L_x_: torch.Tensor):
        y = torch.conv2d(L_x_, L_self_modules_0_parameters_weight_, None, (1, 1), (1, 1), (1, 1), 1)
        return (torch.nn.functional.relu(y), {more})
"""


def sample(folder: Path, more: str = "y * 2") -> Path:
    """A sample as GraphNet has them."""
    folder.mkdir(parents=True)
    (folder / "model.py").write_text(MODEL.format(more=more))
    for file, name, shape in (
        ("weight_meta.py", "L_self_modules_0_parameters_weight_", [8, 3, 3, 3]),
        ("input_meta.py", "L_x_", [2, 3, 9, 10]),
    ):
        fields = {"name": name, "shape": shape, "dtype": "torch.float32", "mean": 0.0, "std": 0.3, "data": None}
        lines = [f"    {key} = {value!r}" for key, value in fields.items()]
        (folder / file).write_text("\n".join([f"class Meta_{name}:", *lines, ""]))
    return folder


def test_samples_are_taken_in_the_order_of_names(tmp_path: Path) -> None:
    for name in ("b/two", "b/four", "b/three", "a/one"):
        sample(tmp_path / name)
    (tmp_path / "b" / "without weights").mkdir()
    found = [[str(path.relative_to(tmp_path)) for path in graphs.samples(tmp_path, families, every)]
             for families, every in (((), 1), (("b",), 2))]  # fmt: skip
    assert found == [["a/one", "b/four", "b/three", "b/two"], ["b/four", "b/two"]]


@pytest.mark.nightly
@pytest.mark.parametrize("way", graphs.WAYS)
def test_a_sample_is_read_run_and_judged(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that runs, one with an op that is not ours, one that is no sample. The second time results are known."""
    for name, more in (("plain", "y * 2"), ("odd", "torch.logcumsumexp(y, 1)"), ("wrong", "torch.no_such(y)")):
        sample(tmp_path / "of" / name, more)
    out, shown = tmp_path / "out.jsonl", io.StringIO()
    options: Any = {"threads": 1, "timeout": 300, "memory": 16 << 30, "timing": "calls"}
    paths = [tmp_path / "of" / name for name in ("plain", "odd", "wrong")]
    found = list(graphs.run_all(paths, way, out, **options))
    assert [one["result"] for one in found] == ["ok", "unusable" if way == "onnx" else "ok", "unusable"]
    for one in found[: 1 if way == "onnx" else 2]:
        assert one["error"] < 1e-5
        assert 0 < one["share"] <= 1
        assert min(one[name] for name in ("ours", "pytorch", "compile", "peak")) > 0
    assert "no_such" in found[2]["why"]
    assert way == "onnx" or "logcumsumexp" in "".join(found[1]["foreign"])
    monkeypatch.setattr(graphs, "_in_process", None)
    assert (
        list(graphs.run_all(paths, way, out, **options)) == found == list(map(json.loads, out.read_text().splitlines()))
    )
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    given = parser.parse_args([str(tmp_path), "--way", way, "--out", str(out), "--table", str(tmp_path / "table")])
    assert command.run(given, Console(file=shown, width=200)) == 0
    assert "of: 3 samples: " in shown.getvalue()
    assert "times as fast as pytorch" in shown.getvalue()
    lines = [line.split("\t") for line in (tmp_path / "table").read_text().splitlines()]
    assert [line[:2] for line in lines[1:]] == [[f"of/{one['name'][3:]}", one["result"]] for one in
                                                sorted(found, key=lambda one: one["name"])]  # fmt: skip
    (plain,) = (line for line in lines if line[0] == "of/plain")
    assert float(dict(zip(lines[0], plain, strict=False))["error"]) < 1e-5
