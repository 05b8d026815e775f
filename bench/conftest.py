"""The options of `pytest bench`. By default it runs a quick set of problems with equal layouts at both ends.

pytest bench                                    # every kernel, in every layout, on a few problems
pytest bench --all-problems --pairs -k direct   # every problem of peers.txt, every pair of layouts
pytest bench --benchmark-autosave; pytest bench --benchmark-compare
"""

from __future__ import annotations

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    group = parser.getgroup("blockconv kernels")
    group.addoption("--all-problems", action="store_true", help="all of peers.txt and of the pools, not a few")
    group.addoption("--pairs", action="store_true", help="every pair of layouts, not only the same at both ends")
    group.addoption("--kernel-threads", type=int, default=1, help="threads that a kernel runs on (1)")
