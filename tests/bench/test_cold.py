"""`bench cold` counts the kernels that its processes compile."""

from __future__ import annotations

import re

import pytest

from bench.__main__ import main


@pytest.mark.slow
def test_a_process_with_an_empty_cache_compiles_what_it_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["cold", "--networks", "--calls", "1"]) == 0
    found = re.search(r"1 calls of conv2d\W+([\d.]+)\W+([\d.]+)\W+(\d+)", capsys.readouterr().out)
    assert found
    started, ready, kernels = map(float, found.groups())
    assert started < ready
    assert kernels > 1
