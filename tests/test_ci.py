"""The lanes of .ci/run: which tests a lane and a machine have."""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
from collections import Counter
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent
MODULES = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "blockconv").rglob("*.py"))
OTHERS = [
    ("README.md", "tests/test_docs.py"), ("docs/index.md", "tests/test_docs.py"),
    ("CONTRIBUTING.md", "tests/test_contributing.py"), ("pyproject.toml", "tests/test_packaging.py"),
    (".ci/run", "tests/test_ci.py"), ("bench/layers.py", "tests/bench"), ("examples/a.py", "tests/test_examples.py"),
    ("tests/core/test_isa.py", "tests/core/test_isa.py"), ("tests/support/pages.py", "tests/test_docs.py"),
    ("blockconv/api/functional.py", "tests/api"), ("blockconv/eager/functional.py", "tests/frontends/torch"),
    ("blockconv/kernels/conv/rows.py", "tests/kernels/conv"), ("blockconv/dask.py", "tests/network/test_dask.py"),
    ("blockconv/kernels/norm/rows.py", "tests/kernels/test_norm.py"),
]  # fmt: skip


@pytest.fixture(scope="module")
def changed() -> ModuleType:
    spec = importlib.util.spec_from_file_location("changed", ROOT / ".ci" / "changed.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def conftest(request: pytest.FixtureRequest) -> ModuleType:
    module = request.config.pluginmanager.get_plugin(str(ROOT / "tests" / "conftest.py"))
    assert isinstance(module, ModuleType)
    return module


@pytest.mark.parametrize("path", MODULES)
def test_every_module_has_tests_that_quick_runs(path: str, changed: ModuleType) -> None:
    assert changed.selected([path])


@pytest.mark.parametrize(("path", "wanted"), OTHERS)
def test_what_changed_has_the_tests_that_concern_it(path: str, wanted: str, changed: ModuleType) -> None:
    assert wanted in changed.selected([path])


def test_files_come_before_folders_and_once(changed: ModuleType) -> None:
    found = changed.selected(["blockconv/network/plan.py", "blockconv/network/graph.py", "tests/network/test_plan.py"])
    assert found[0] == "tests/network/test_plan.py"
    assert found[-1] == "tests/network"
    assert max(Counter(found).values()) == 1


@pytest.mark.parametrize("machines", [1, 2, 3, 8])
def test_each_test_is_one_machines_and_the_same_with_each_commit(machines: int, conftest: ModuleType) -> None:
    tests = [f"tests/test_x.py::test_y[{k}]" for k in range(4000)]
    shares = Counter(conftest.share_of(test, "", machines) for test in tests)
    assert sorted(shares) == list(range(1, machines + 1))
    assert min(shares.values()) > 0.8 * len(tests) / machines
    # These are fixed: what merges is not decided by the day, the number of commits or the process.
    assert [conftest.share_of(test, "", 3) for test in tests[:6]] == [3, 2, 3, 1, 2, 3]
    moved = sum(conftest.share_of(t, "20260101", machines) != conftest.share_of(t, "20260102", machines) for t in tests)
    assert moved > 0.8 * len(tests) * (1 - 1 / machines) - 1


@pytest.mark.skipif(shutil.which("bash") is None, reason="no bash")
@pytest.mark.parametrize("arguments", [["fast"], ["merge", "4/3"], ["merge", "0/3"], ["nightly", "two"]])
def test_a_lane_or_a_share_that_does_not_exist_is_refused(arguments: list[str]) -> None:
    done = subprocess.run(["bash", ROOT / ".ci" / "run", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "nightly" in done.stderr or "1/3" in done.stderr
