"""What holds for every test: a cache of kernels apart from the user's, and room for four threads.

BLOCKCONV_CACHE_DIR, where the caller sets it, is used, so that runs can share compiled kernels. Without it, one
run's processes share a directory that goes away with the run: that they may is one of the promises under test.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import hashlib
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

# Numba reads this once, when it is imported. A pool of four, also where there are two processors.
os.environ.setdefault("NUMBA_NUM_THREADS", str(max(4, os.cpu_count() or 1)))

_own_cache = None
if "BLOCKCONV_CACHE_DIR" not in os.environ:
    _own_cache = tempfile.mkdtemp(prefix="blockconv-tests-")
    os.environ["BLOCKCONV_CACHE_DIR"] = _own_cache  # which the workers of pytest-xdist inherit

# Hundreds of processes import the package. If the caller wants no bytecode beside the sources, they share it elsewhere.
if os.environ.pop("PYTHONDONTWRITEBYTECODE", ""):
    os.environ.setdefault("PYTHONPYCACHEPREFIX", os.path.join(os.environ["BLOCKCONV_CACHE_DIR"], "bytecode"))

import pytest  # noqa: E402

with contextlib.suppress(ModuleNotFoundError):  # `.ci/versions` runs the essentials without it
    import hypothesis

    # A machine that does something else too is slow, and no example is wrong for that.
    hypothesis.settings.register_profile("without deadlines", deadline=None)
    hypothesis.settings.load_profile("without deadlines")

gc.disable()  # modules and tests stay: `pytest_collection_finish`
ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def small_problems_run_on_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """They gain nothing by it, but the large ones of which it holds anyway would take the tests hours."""
    monkeypatch.setattr("blockconv.runtime.launcher.GRAIN", 1e-12)


# What the text of a file has that can have tests of a marker.
MARKED = {"isa": r"mark\.isa|isa_layouts", "slow": r"mark\.(slow|sampled)"}


@functools.cache
def may_have(marker: str, path: Path) -> bool:
    """Whether a file can have tests of a marker, by its text."""
    return re.search(MARKED[marker], path.read_text(encoding="utf-8")) is not None


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Where tests marked `isa` alone run, or `slow` ones alone, no other file is imported."""
    is_test = collection_path.suffix == ".py" and collection_path.name.startswith("test_")
    first = config.option.markexpr.partition(" ")[0]
    return True if is_test and first in MARKED and not may_have(first, collection_path) else None


PARTS = 32  # of the cases of a sampled grid that do not run by default: the first is slow, the others are nightly


def share_of(test: str, seed: str, machines: int) -> int:
    """Which of so many machines runs a test, from 1 on. Another seed, another distribution."""
    return 1 + int.from_bytes(hashlib.sha256(f"{seed} {test}".encode()).digest()[:8], "big") % machines


@pytest.hookimpl(tryfirst=True)  # before `-m` is read
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """In a test that is `sampled(n)`, mark all but each n-th case: the first part as slow, the others as nightly.

    In a slow test, all but each n-th case are nightly. With BLOCKCONV_TEST_SHARE=2/3, the tests of the second of three
    machines stay; BLOCKCONV_TEST_SEED distributes them anew.
    """
    cases: Counter[str] = Counter()
    left_out: Counter[str] = Counter()
    for item in items:
        for marker in MARKED:
            seen = may_have(marker, item.path) or not item.get_closest_marker(marker)
            assert seen, f"{item.nodeid}: may_have has to see {marker}"
        if sampled := item.get_closest_marker("sampled"):
            test, (n,) = item.nodeid.partition("[")[0], sampled.args
            if item.get_closest_marker("slow"):
                if cases[test] % n:
                    item.add_marker("nightly")
            elif cases[test] % n:
                item.add_marker("nightly" if left_out[test] % PARTS else "slow")
                left_out[test] += 1
            cases[test] += 1
    own, machines = map(int, os.environ.get("BLOCKCONV_TEST_SHARE", "1/1").split("/"))
    seed = os.environ.get("BLOCKCONV_TEST_SEED", "")
    others = [item for item in items if share_of(item.nodeid, seed, machines) != own]
    if others:
        config.hook.pytest_deselected(items=others)
        items[:] = [item for item in items if share_of(item.nodeid, seed, machines) == own]


ALWAYS = {"test_modules.py", "test_essentials.py"}  # which `.ci/run quick` runs, however long it takes


def pytest_runtest_setup(item: pytest.Item) -> None:
    """`.ci/run quick` has a minute: a test that does not start in it is skipped, and counted."""
    late = time.time() > float(os.environ.get("BLOCKCONV_TEST_UNTIL", "inf"))
    if late and item.path.name not in ALWAYS:
        pytest.skip("not run, for want of time: `.ci/run merge` runs them")


def pytest_collection_finish() -> None:
    """Modules and tests stay to the end: Python's collector need not look at them again and again."""
    gc.collect()
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    if _own_cache is not None:
        shutil.rmtree(_own_cache, ignore_errors=True)


Run = Callable[..., "subprocess.CompletedProcess[str]"]


@pytest.fixture
def run_python() -> Run:
    """Run code, or a list of arguments, in a Python of its own, with variables added to (None: taken from) ours."""

    def run(
        code: str | list[str], *, status: int | None = 0, timeout: float = 300, **variables: str | None
    ) -> subprocess.CompletedProcess[str]:
        path = os.pathsep.join([str(ROOT), str(ROOT / "tests" / "support")])
        environment = {**os.environ, "PYTHONPATH": path, "PYTHONFAULTHANDLER": "1", **variables}
        done = subprocess.run(
            [sys.executable, *(["-c", code] if isinstance(code, str) else code)],
            env={name: value for name, value in environment.items() if value is not None},
            cwd=tempfile.gettempdir(),
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
        assert status is None or done.returncode == status, (
            f"status {done.returncode}\n{done.stdout}\n{done.stderr[-8000:]}"
        )
        return done

    return run


@pytest.fixture
def on_machine(request: pytest.FixtureRequest) -> Iterator[str]:
    """The name of one of `machines.MACHINES`, for which blockings and costs are worked out in this test."""
    from machines import MACHINES, stand_in

    with stand_in(MACHINES[request.param]):
        yield request.param
