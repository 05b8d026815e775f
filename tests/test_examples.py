"""`examples/`: each script runs as a user would run it, and is where users look for it."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))

# What the output of each has to say: the point of the example.
SAID = {
    "blocked_layouts.py": "and back, bit for bit: True",
    "choose_layouts.py": r"optimal .*\n(.*\n)+alternating ",
    "drop_in_conv2d.py": r"An error says what to do: conv2d: stride=0",
    "lab_data.py": r"optimal, measured ",
    "large_image.py": r"found (\d+) of \1 discs, and 0 where",
    "learn_costs.py": r"\nall  .*\n(.*\n)+A plan by corrected costs: ",
    "many_threads.py": r"plan .*the same bits: True\nConv2d .*the same bits: True",
    "onnx_model.py": r"5 nodes became 3 kernel calls.*\n(.*\n)the loaded plan gives the same bits: True",
    "packed_weights.py": r"Conv2d with out= +\d+ µs",
    "plan_a_network.py": r"reorders and copies: [01](.*\n)+  reorder of image: NCHW -> NCHW16",
    "rank_layouts.py": r"\nmean +0\.[2-9]",  # Kendall's tau: beyond chance
}

NEEDED = {
    "lab_data.py": ("pandas", "pyarrow"),
    "learn_costs.py": ("matplotlib", "onnx", "pyarrow", "sklearn"),
    "onnx_model.py": ("onnx",),
    "rank_layouts.py": ("torch",),
}
ARGUMENTS = {"rank_layouts.py": (str(ROOT / "bench" / "results" / "lab-data"), "4")}  # seconds


@pytest.mark.slow
@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
@pytest.mark.sampled(2)
def test_it_runs(path: Path, run_python: Callable[..., object]) -> None:
    for module in NEEDED.get(path.name, ()):
        pytest.importorskip(module)
    done = run_python(
        [str(path), *ARGUMENTS.get(path.name, ())], timeout=300, PYTHONWARNINGS="default", PYTHONIOENCODING="utf-8"
    )
    assert re.search(SAID[path.name], done.stdout), done.stdout
    assert "SlowPathWarning" not in done.stderr


def test_each_is_shown_and_says_what_it_is_for() -> None:
    page = (ROOT / "docs" / "examples.md").read_text(encoding="utf-8")
    assert re.findall(r"literalinclude} \.\./examples/(\w+\.py)", page)
    assert sorted(re.findall(r"literalinclude} \.\./examples/(\w+\.py)", page)) == [path.name for path in EXAMPLES]
    assert [*SAID] == [path.name for path in EXAMPLES]
    for path in EXAMPLES:
        assert path.read_text(encoding="utf-8").startswith('"""'), path
    assert "](examples" in (ROOT / "README.md").read_text(encoding="utf-8")
