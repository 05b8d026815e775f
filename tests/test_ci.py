"""The lanes of .ci/run: which tests a lane and a machine have."""

from __future__ import annotations

import importlib.util
import os
import re
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
    ("blockconv/api/functional.py", "tests/api"), ("blockconv/torch/functional.py", "tests/frontends/torch"),
    ("blockconv/kernels/conv/rows.py", "tests/kernels/conv"), ("blockconv/dask.py", "tests/network/test_dask.py"),
    ("blockconv/kernels/norm/rows.py", "tests/kernels/test_norm.py"),
    ("blockconv/kernels/common/axis_walk.py", "tests/kernels/test_conformance.py"),
    ("blockconv/kernels/common/axis_walk.py", "tests/kernels/test_norm.py"),
]  # fmt: skip


def of_ci(name: str) -> ModuleType:
    """A script of .ci as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / ".ci" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def changed() -> ModuleType:
    return of_ci("changed")


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


def test_modules_that_import_a_changed_one_are_tested_last(changed: ModuleType) -> None:
    assert "blockconv/kernels/norm/kernels.py" in changed.importers("blockconv/kernels/common/axis_walk.py")
    found = changed.selected(["blockconv/core/layout.py"])
    assert found.index("tests/core") < found.index("tests/dispatch/test_array.py")
    assert max(Counter(found).values()) == 1


def test_files_come_before_folders_and_once(changed: ModuleType) -> None:
    found = changed.selected(["blockconv/network/plan.py", "blockconv/network/graph.py", "tests/network/test_plan.py"])
    assert found[0] == "tests/network/test_plan.py"
    assert all(test.endswith(".py") for test in found[: found.index("tests/network")])
    assert not any(test.startswith("tests/network/") for test in found[found.index("tests/network") :])
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


@pytest.mark.skipif(os.name == "nt" or shutil.which("bash") is None, reason="no bash of this system")
@pytest.mark.parametrize("arguments", [["fast"], ["merge", "4/3"], ["merge", "0/3"], ["nightly", "two"]])
def test_a_lane_or_a_share_that_does_not_exist_is_refused(arguments: list[str]) -> None:
    done = subprocess.run(["bash", ROOT / ".ci" / "run", *arguments], capture_output=True, text=True, timeout=60)
    assert done.returncode == 2
    assert "nightly" in done.stderr or "1/3" in done.stderr


# ---------------------------------------------------------------- hosted checks and releases

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_each_step_of_a_workflow_is_one_line_that_calls_a_script(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for command in re.findall(r"^ +-? *run: (.*)$", text, re.MULTILINE):
        script = re.match(r"(?:python3? )?(\.ci/[\w.]+) ", command)
        assert script, command
        assert (ROOT / script[1]).is_file(), command


@pytest.mark.parametrize("path", WORKFLOWS, ids=lambda path: path.stem)
def test_actions_are_pinned_and_permissions_are_few(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    for action in re.findall(r"^ +-? *uses: (.*)$", text, re.MULTILINE):
        assert re.fullmatch(r"\./\.github/workflows/\w+\.yml|[\w/-]+@[0-9a-f]{40} # v[\d.]+", action), action
    assert "\npermissions:\n  contents: read\n\n" in text
    assert "secrets." not in text


CHANGELOG = "# Changelog\n\n## 1.2.3, 2026-05-04\n\n### Added\n\n- A.\n\n## 1.2.2\n\n- B.\n"
RELEASED = ("v1.2.3", CHANGELOG, '__version__ = "1.2.3"\n', "a\nversion: 1.2.3\ndate-released: 2026-05-04\n")


def test_a_release_has_one_version_and_one_date() -> None:
    release = of_ci("release")
    assert release.section(CHANGELOG, "1.2.3") == ("2026-05-04", "### Added\n\n- A.\n")
    assert not release.faults(*RELEASED)
    for k, text in enumerate(RELEASED):
        for old in re.findall(r"v?1\.2\.3|2026-05-04", text):
            changed = (*RELEASED[:k], text.replace(old, "0.0.7", 1), *RELEASED[k + 1 :])
            assert release.faults(*changed), changed[k]
    assert release.faults("main", *RELEASED[1:])


def test_checksums_are_those_of_the_files(tmp_path: Path) -> None:
    (tmp_path / "b.whl").write_bytes(b"abc")
    (tmp_path / "a.tar.gz").write_bytes(b"")
    first, second = of_ci("release").checksums(tmp_path).splitlines()
    assert first.startswith("e3b0c44298fc1c14")
    assert first.endswith("  a.tar.gz")
    assert second.startswith("ba7816bf8f01cfea")
    assert second.endswith("  b.whl")
