"""The worked examples of CONTRIBUTING.md: each change is made to a copy of the package, and does what it says."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import blockconv as bc

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")


class Example(NamedTuple):
    """A section of the page: changes as diffs, a check as Python, environment variables of the check."""

    diffs: list[str]
    checks: list[str]
    variables: dict[str, str]


def examples() -> dict[str, Example]:
    found = {}
    for section in re.split(r"^## ", TEXT, flags=re.MULTILINE)[1:]:
        title, _, body = section.partition("\n")
        blocks = {
            kind: re.findall(rf"^```{kind}\n(.*?)^```", body, re.MULTILINE | re.DOTALL) for kind in ("diff", "python")
        }
        variables = dict(re.findall(r"^# ([A-Z_]+)=(\S+)$", body, re.MULTILINE))
        if blocks["python"]:
            found[title] = Example(blocks["diff"], blocks["python"], variables)
    return found


def apply(diff: str, root: Path) -> int:
    """Make a diff's changes, found by their context and not by line numbers; how many lines were added or removed."""
    lines, changed = diff.splitlines(), 0
    assert lines[0].startswith("--- "), lines[0]
    path = root / lines[0].removeprefix("--- ").strip()
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    for hunk in "\n".join(lines[1:]).split("@@\n")[1:]:
        kept = [line for line in hunk.splitlines() if line[:1] in (" ", "-", "+", "")]
        before = "\n".join(line[1:] for line in kept if not line.startswith("+"))
        after = "\n".join(line[1:] for line in kept if not line.startswith("-"))
        changed += sum(line[:1] in "+-" and line != "" for line in kept)
        assert not text or text.count(before) == 1, f"{path.name} has {text.count(before)} times:\n{before}"
        text = text.replace(before, after) if text else after + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return changed


def test_every_kind_of_change_has_an_example() -> None:
    assert [title.split()[-1] for title in examples()] == [
        "layout",
        "activation",
        "op",
        "kernel",
        "L2Norm",
        "type",
        "CPU",
    ]


def test_excerpts_are_verbatim() -> None:
    excerpts = re.findall(r"^```py\n# (\S+)\n(.*?)^```", TEXT, re.MULTILINE | re.DOTALL)
    assert len(excerpts) >= 1
    for path, text in excerpts:
        assert text in (ROOT / path).read_text(encoding="utf-8"), f"{path} has changed:\n{text}"


def changed(title: str, root: Path) -> Example:
    """An example, whose changes are made to a copy of the package below `root`."""
    example = examples()[title]
    shutil.copytree(Path(bc.__file__).parent, root / "blockconv", ignore=shutil.ignore_patterns("__pycache__"))
    lines = sum(apply(diff, root) for diff in example.diffs)
    assert lines <= 80, "an example that takes so many lines shows that something has no one place"
    return example


@pytest.mark.parametrize("title", examples())
def test_the_example_fits(title: str, tmp_path: Path) -> None:
    changed(title, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("title", examples())
@pytest.mark.sampled(3)
def test_the_example_does_what_it_says(title: str, tmp_path: Path, run_python: Any) -> None:
    example = changed(title, tmp_path)
    for check in example.checks:
        run_python(check, PYTHONPATH=str(tmp_path), BLOCKCONV_CACHE_DIR=str(tmp_path / "cache"), **example.variables)


@pytest.mark.slow
def test_a_change_is_needed_for_the_check(tmp_path: Path, run_python: Any) -> None:
    """The checks fail in the package as it is, all but that of what needs no change to the library."""
    for title, example in examples().items():
        if example.diffs and not example.variables:
            done = run_python(example.checks[-1], status=None)
            assert done.returncode != 0, title


def test_a_diff_that_fits_nowhere_is_seen(tmp_path: Path) -> None:
    (tmp_path / "a.py").write_text("one\ntwo\n")
    assert apply("--- a.py\n@@\n one\n-two\n+three\n", tmp_path) == 2
    assert (tmp_path / "a.py").read_text() == "one\nthree\n"
    with pytest.raises(AssertionError, match="0 times"):
        apply("--- a.py\n@@\n one\n-two\n+three\n", tmp_path)
