"""The command line, and what the README says of it."""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc
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


def test_doctor(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor"]) == 0
    said = capsys.readouterr().out
    for word in ("numba", "llvmlite", "numpy", "python", "affinity", "quota", "threading layer", "registers of"):
        assert word in said
    for fact in (bc.__version__, sys.version.split()[0], bc.jit.threading_layer().name, bc.jit.target_cpu()):
        assert fact in said
    assert bc.jit.cache_directory().name in said.replace("\n", "").replace(" ", "")


def test_run_takes_the_picture_through_every_layout(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run", "--dtype", "uint8", "--threads", "1"]) == 0
    said = capsys.readouterr().out
    assert "(1, 3, 224, 224) uint8" in said
    rows = {line.split("│")[1].strip(): line.split("│") for line in said.splitlines() if line.startswith("│")}
    assert set(rows) == {row.name for row in bc.known_layouts() if bc.Layout(row.name).ndim == 4}
    assert rows["NCHW16"][3].strip() == "1x1x224x224x16"
    assert rows["NCHW16"][4].strip() == f"{224 * 224 * 16:,}"
    assert {row[7].strip() for row in rows.values()} == {"0"}
    assert all(float(row[column]) > 0 for row in rows.values() for column in (5, 6))


def test_run_says_so_if_a_picture_comes_back_changed(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    module = sys.modules["blockconv.__main__"]
    monkeypatch.setattr(module, "_seconds", lambda function: 1.0)  # which calls nothing
    assert main(["run", "--dtype", "uint8"]) == 1
    assert "255" in capsys.readouterr().out


def test_run_with_a_picture_of_ones_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = pytest.importorskip("PIL.Image")
    path = tmp_path / "mine.png"
    image.fromarray(np.arange(5 * 7 * 3, dtype=np.uint8).reshape(5, 7, 3)).save(path)
    assert main(["run", "--input", str(path), "--batch", "3"]) == 0
    assert "(3, 3, 5, 7) float32" in capsys.readouterr().out


def test_what_cannot_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("PIL.Image")
    assert main(["run", "--input", str(tmp_path / "none.png")]) == 2
    (tmp_path / "text.png").write_text("no picture")
    assert main(["run", "--input", str(tmp_path / "text.png")]) == 2
    assert main(["run", "--threads", "100000"]) == 2
    assert "set_num_threads: n=100000" in capsys.readouterr().out.replace("\n", " ")
    for wrong in (["run", "--batch", "0"], ["run", "--dtype", "float12"], ["walk"], []):
        with pytest.raises(SystemExit, match="2"):
            main(wrong)


def test_without_pillow_the_remedy_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "PIL", None)
    assert main(["run", "--input", str(tmp_path / "mine.png")]) == 2
    assert "pip install pillow" in capsys.readouterr().out


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
    assert ["run"] in commands
    assert ["doctor"] in commands
    for words in commands:
        with pytest.raises(SystemExit, match="0"):
            main([*words, "--help"])
    assert (ROOT / ".ci/run").read_text().count("-m pytest") >= 1
