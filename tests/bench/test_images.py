"""`python -m bench images`: lines come as they are measured, and slow peers are called once."""

import time

import numpy as np
import pytest
from rich.console import Console

from bench import images
from bench.__main__ import main

pytest.importorskip("scipy")


def test_a_slow_peer_is_called_once(monkeypatch):
    calls = {"ours": 0, "scipy": 0, "quick": 0}

    def run(name, seconds):
        def call():
            calls[name] += 1
            time.sleep(seconds)

        return call

    monkeypatch.setattr(
        images, "cases", lambda *given: {"ours": run("ours", 0), "scipy": run("scipy", 0.2), "quick": run("quick", 0)}
    )
    (line,) = images.measure(["3x3"], ["uint8"], 8, 0.05, 0.1)
    assert calls["scipy"] == 1
    assert min(calls["ours"], calls["quick"]) > 1
    assert line.time("scipy") >= 200
    assert line.ratio("scipy") > line.ratio("quick") > 0
    assert np.isnan(line.ratio("opencv"))


def test_lines_are_printed_as_they_are_measured(monkeypatch, capsys):
    measured = images.measure

    def measure(*given):
        for line in measured(*given):
            yield line
            assert line.name in capsys.readouterr().out

    monkeypatch.setattr(images, "measure", measure)
    monkeypatch.setattr(Console, "is_terminal", False)
    main(
        ["images", "--filters", "3x3", "maximum 3", "--dtypes", "uint8", "--size", "40", "--budget", "0.01", "--quick"]
    )
    assert "geometric mean" in capsys.readouterr().out
