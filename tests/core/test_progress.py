"""What is said of work that takes long, and where."""

from __future__ import annotations

import logging
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from blockconv.core import progress, text


def told(monkeypatch: pytest.MonkeyPatch, terminal: bool, steps: int, total: int | None) -> None:
    """Say progress of work that takes a second for each step."""
    clock = iter(range(1000))
    monkeypatch.setattr(text, "is_terminal", lambda: terminal)
    monkeypatch.setattr(progress, "time", SimpleNamespace(perf_counter=lambda: float(next(clock))))
    with progress.Progress("counting", total, "by hand") as shown:
        for done in range(1, steps):
            shown.tick(done, "one")
            assert progress.SOLE_BAR.locked() is (terminal and total is not None and done >= 2)
    assert not progress.SOLE_BAR.locked()


@pytest.fixture
def unheard(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program without logging."""
    monkeypatch.setattr(progress.LOGGER, "hasHandlers", lambda: False)


LINES = ["2 of 30 after 2 s; by hand", "12 of 30 after 12 s", "22 of 30 after 22 s", "finished after 30 s"]


@pytest.mark.usefixtures("unheard")
def test_without_logging_lines_go_to_the_error_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told(monkeypatch, False, 30, 30)
    said = capsys.readouterr()
    assert said.err.splitlines() == [f"blockconv: counting: {line}" for line in LINES]
    shown = progress.Progress("counting", 30, is_long=True)
    shown.tick(0)
    shown.__exit__(KeyError)
    assert capsys.readouterr().err.splitlines()[-1].startswith("blockconv: counting: stopped after ")
    told(monkeypatch, True, 4, None)  # without a total there is no bar
    assert capsys.readouterr().err.splitlines()[0] == "blockconv: counting: 2 after 2 s; by hand"
    told(monkeypatch, False, 2, 30)
    with progress.Progress("counting", 30, is_long=True) as shown:
        shown.tick(0)
        shown.tick(1)
    assert [line.rpartition(": ")[2] for line in capsys.readouterr().err.splitlines()] == [
        "0 of 30 after 1 s",
        "finished after 3 s",
    ]
    progress.LOGGER.setLevel(logging.WARNING)
    try:
        told(monkeypatch, False, 30, 30)
    finally:
        progress.LOGGER.setLevel(logging.NOTSET)
    assert capsys.readouterr() == (said.out, "") == ("", "")


def test_with_logging_lines_are_records(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, capsys: pytest.CaptureFixture[str]
) -> None:
    told(monkeypatch, False, 30, 30)
    assert not caplog.records  # the program wants warnings alone
    with caplog.at_level(logging.INFO):
        told(monkeypatch, False, 30, 30)
    assert caplog.messages == [f"counting: {line}" for line in LINES]
    assert capsys.readouterr() == ("", "")


@pytest.mark.usefixtures("unheard")
def test_on_a_terminal_a_bar_comes_and_goes(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("FORCE_COLOR", "1")
    monkeypatch.setenv("TERM", "xterm")
    told(monkeypatch, True, 30, 30)
    said = capsys.readouterr()
    assert said.out == ""
    assert "counting one" in said.err
    assert "29/30" in said.err
    assert "blockconv: " not in said.err
    with progress.SOLE_BAR:  # a line above another's bar
        monkeypatch.setattr(progress, "SOLE_BAR", SimpleNamespace(acquire=lambda blocking: False, locked=lambda: False))
        with progress.Progress("counting", 30, begun=-5.0) as shown:
            shown.tick(1)
    assert "blockconv: counting: 1 of 30" in capsys.readouterr().err


COMPILES = """
import sys
import time
import numpy as np
import blockconv as bc
from blockconv.core import progress

b = bc.NetworkBuilder("small")
b.output(b.conv2d(b.input("x", (1, 8, 6, 6)), np.ones((8, 8, 1, 1), np.float32)))
network = b.build()
progress.FIRST = 0.0
bc.compile(network, threads=1, layouts="NCHW")
time.sleep(1.1)  # a pause of a second begins another line
print("a call", file=sys.stderr)
bc.max_pool2d(np.ones((1, 8, 6, 6), np.float32), 2)
"""


@pytest.mark.slow
def test_kernels_that_are_compiled_are_told_of_and_kept_ones_are_not(run_python: Any, tmp_path: Path) -> None:
    cold, warm = (run_python(COMPILES, BLOCKCONV_CACHE_DIR=str(tmp_path)) for _ in range(2))
    assert cold.stdout == warm.stdout == ""
    assert warm.stderr == "a call\n"
    network, call = cold.stderr.split("a call\n")
    kept = re.escape(f"; they are kept in {tmp_path}")
    assert re.search(rf"^blockconv: compiling kernels: 0 of \d+ after \d+ s{kept}\n", network, re.MULTILINE)
    assert network.splitlines()[-1].startswith("blockconv: compiling kernels: finished after")
    # On a machine that is busy, such a pause may come between two of them too.
    assert re.fullmatch(rf"(blockconv: compiling kernels: 1 after \d+ s{kept}\n)+", call), call
