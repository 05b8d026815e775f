"""`bench pairs`: two trees in turns."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest
from rich.console import Console

from bench.commands import pairs
from bench.pairs import CASES, _Tree

ROOT = Path(__file__).parents[2]
CASE = "sample pool2d max mb2ic20ih9oh9kh3ph1 float32 NHWC > NHWC pool_tiles"


def _options(*given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    pairs.add_arguments(parser)
    return parser.parse_args([str(ROOT), str(ROOT), *given, "--runs", "1", "--rounds", "1"])


@pytest.mark.slow
@pytest.mark.parametrize("given", [["--cases", CASE], ["--networks", "squeezenet", "--layouts", "NHWC"]])
def test_a_tree_beside_itself_has_a_ratio_for_each_case(given: list[str]) -> None:
    console = Console(width=200, record=True)
    assert pairs.run(_options(*given), console) == 0
    name = "squeezenet NHWC" if "--networks" in given else CASE
    (line,) = (line for line in console.export_text().splitlines() if f"│ {name} " in line)
    *_, ratio, old, new, _ = (part.strip() for part in line.split("│"))
    assert float(new) / float(old) == pytest.approx(float(ratio), rel=0.2)


def test_a_tree_without_the_next_case_is_named() -> None:
    with _Tree(ROOT, CASES, {"only": "no such case", "quick": True, "names": []}) as tree:  # noqa: SIM117
        with pytest.raises(RuntimeError, match=r"the next case is None, and not 'no such case'"):
            tree.next("no such case")
