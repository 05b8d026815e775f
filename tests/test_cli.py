"""The command line, and what the README says of it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

import blockconv as bc
from blockconv import compare_plans, plan_command
from blockconv.__main__ import layouts_markdown, main

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(autouse=True)
def _threads() -> Any:
    yield
    bc.set_num_threads(None)


def test_layouts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layouts"]) == 0
    said = capsys.readouterr().out
    for row in bc.known_layouts():
        assert row.name in said
        assert row.tag in said


def test_the_readmes_table_of_layouts_is_the_generated_one(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["layouts", "--markdown"]) == 0
    said = capsys.readouterr().out
    assert said == layouts_markdown()
    tables = re.findall(r"(?:^\|.*\n)+", README, re.MULTILINE)
    assert said in tables
    rows = [line.split("|") for line in said.splitlines()[2:]]
    assert [row[1].strip(" `") for row in rows] == [row.name for row in bc.known_layouts()]
    assert {row[1].strip(" `") for row in rows if row[5].strip() == "native"} == {layout.name for layout in bc.NATIVE}


def test_the_readmes_table_of_onnx_ops_is_the_generated_one(capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    from blockconv.frontends.onnx_ops import OPS

    assert main(["ops", "--markdown"]) == 0
    said = capsys.readouterr().out
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in said.splitlines()[2:]]
    listed = sorted(name for row in rows for name in row[0].split(", "))
    if onnx.defs.onnx_opset_version() >= 24:  # an older onnx does not know them all
        assert said in re.findall(r"(?:^\|.*\n)+", README, re.MULTILINE)
        assert listed == sorted(OPS)
    assert main(["ops"]) == 0
    shown = capsys.readouterr().out
    assert all(name in shown for name in listed)


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("numba", "llvmlite", "numpy", "python", "affinity", "quota", "threading layer", "registers of"):
        assert word in said
    for fact in (bc.__version__, sys.version.split()[0], bc.jit.threading_layer().name, bc.jit.target_cpu()):
        assert fact in said
    assert bc.jit.cache_directory().name in said.replace("\n", "").replace(" ", "")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> bc.Network:
    """A small network in the place of the one that runs by default."""
    builder = bc.NetworkBuilder("small")
    weight = np.random.default_rng(0).standard_normal((16, 3, 3, 3)).astype(np.float32)
    builder.output(builder.conv2d(builder.input("image", (1, 3, 12, 12)), weight, padding=1, activation="relu"))
    network = builder.build()
    monkeypatch.setattr(compare_plans, "resnet50", lambda: network)
    return network


def test_run_compares_fixed_layouts_with_the_plan(small: bc.Network, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--layouts", "NHWC", "NCHW16", "--threads", "1", "--batch", "2"]) == 0
    said = capsys.readouterr().out
    assert "small, 2x3x12x12" in said
    rows = {line.split("│")[1].strip(): line.split("│") for line in said.splitlines() if line.startswith("│")}
    assert list(rows) == ["NHWC", "NCHW16", "the chosen plan"]
    assert min(float(row[3]) for row in rows.values()) == 1
    assert [row[4].strip() for row in rows.values()] != ["0"] * 3  # NHWC has to be left at the end


def test_run_says_so_if_plans_differ(
    small: bc.Network, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wrong(bc.Plan):
        def __call__(self, *inputs: Any, **named: Any) -> Any:
            return super().__call__(*inputs, **named) * np.float32(1.001)

    def compiled(network: bc.Network, layouts: str) -> bc.Plan:
        plan = bc.compile(network, layouts=layouts)
        return Wrong(network, plan.options) if layouts == "auto" else plan

    monkeypatch.setattr(compare_plans, "compile", compiled)
    assert main(["run", "--layouts", "NHWC"]) == 1
    assert "1.0e-03" in capsys.readouterr().out


def test_run_with_a_picture_of_ones_own(small: bc.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "mine.png"
    pixels = np.arange(24 * 36 * 3, dtype=np.uint8).reshape(24, 36, 3)
    image.fromarray(pixels).save(path)
    assert np.array_equal(compare_plans.read(path), pixels)
    assert main(["run", "--input", str(path), "--layouts", "NHWC"]) == 0
    given = compare_plans._entering(small.inputs[0], str(path))
    assert given.shape == (1, 3, 12, 12)
    wanted = (pixels[::2, ::3].transpose(2, 0, 1) / 255 - np.array(compare_plans.MEAN)[:, None, None]) / np.array(
        compare_plans.SPREAD
    )[:, None, None]
    assert np.allclose(given[0], wanted, atol=1e-6)


def test_a_model_from_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    onnx = pytest.importorskip("onnx")
    h = onnx.helper
    values = [h.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [1, 4, 5, 5]) for name in "xy"]
    graph = h.make_graph([h.make_node("Relu", ["x"], ["y"])], "tiny", values[:1], values[1:])
    onnx.save(h.make_model(graph), tmp_path / "tiny.onnx")
    assert main(["run", str(tmp_path / "tiny.onnx"), "--input", "random", "--layouts", "NCHW"]) == 0
    assert "tiny, 1x4x5x5" in capsys.readouterr().out
    assert main(["run", str(tmp_path / "tiny.onnx"), "--input", "mine.png"]) == 2
    assert "no picture" in capsys.readouterr().out.replace("\n", " ")


def test_what_cannot_be_run(small: bc.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL.Image")
    assert main(["run", "--input", str(tmp_path / "none.png")]) == 2
    (tmp_path / "text.png").write_text("no picture")
    assert main(["run", "--input", str(tmp_path / "text.png")]) == 2
    assert main(["run", str(tmp_path / "text.png")]) == 2
    assert main(["run", "--layouts", "NCWH"]) == 2
    assert main(["run", "--threads", "100000"]) == 2
    assert "set_num_threads: n=100000" in capsys.readouterr().out.replace("\n", " ")
    assert main(["run", "--batch", "0"]) == 2
    assert "--batch=0" in capsys.readouterr().out
    for wrong in (["run", "--batch", "many"], ["walk"], []):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)


def test_without_pillow_the_remedy_is_named(
    small: bc.Network, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["run", "--input", str(tmp_path / "mine.png")]) == 2
    assert "pip install pillow" in capsys.readouterr().out.replace("\n", "")


def test_as_a_module(run_python: Any) -> None:
    assert run_python(["-m", "blockconv", "--version"]).stdout == f"blockconv {bc.__version__}\n"
    run_python(["-m", "blockconv", "nonsense"], status=2)


# ---------------------------------------------------------------- the README


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.MULTILINE | re.DOTALL)


@pytest.mark.parametrize("number", range(len(blocks("python"))))
def test_the_readmes_examples_say_what_they_say(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each block runs; a line that ends in a comment `# -> value` has that value."""
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(compile(blocks("python")[number], f"README.md, block {number}", "exec"), names)
    for line in blocks("python")[number].splitlines():
        expression, arrow, wanted = line.partition("  # -> ")
        if arrow:
            assert repr(eval(expression.partition(" = ")[2] or expression, names)) == wanted, line


def test_the_readmes_commands_exist() -> None:
    ours = [shlex.split(line.split("&&")[-1]) for text in blocks("sh") for line in text.splitlines()]
    commands = [words[1:] for words in ours if words and words[0].endswith("bin/blockconv")]
    assert ["run", "--report", "plan.html"] in commands
    assert ["doctor"] in commands
    for words in commands:
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--help"])
    assert (ROOT / ".ci/run").read_text().count("-m pytest") >= 1


def test_plan_explains_draws_and_saves(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network = bc.NetworkBuilder("little")
    network.output(network.conv2d(network.input("x", (1, 16, 6, 6)), np.ones((16, 16, 1, 1), np.float32), name="only"))
    saved, page = tmp_path / "plan", tmp_path / "plan.html"
    bc.compile(network.build()).save(saved)
    assert bc.Plan.load(saved).network.name == "little"
    with patch.object(plan_command, "resnet50", network.build):
        assert main(["plan", "--layouts", "NCHW16", "--profile", "--report", str(page), "--save", str(saved)]) == 0
    said = capsys.readouterr().out
    assert "only" in said
    assert "NCHW16" in said
    assert "<svg" in page.read_text(encoding="utf-8")
    assert main(["plan", "--shape", "1xa"]) == 2
    assert "--shape" in capsys.readouterr().out
