"""Kernels are compiled in several processes, which run nothing that lies in the current directory."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

import blockconv as bc
from blockconv.core import target
from blockconv.jit import compile_processes
from blockconv.kernels.reorder.rows import reorder_copy

TOGETHER = """
import logging, os, sys
logging.getLogger("blockconv").setLevel(logging.WARNING)
import blockconv as bc
from blockconv.jit import compile_processes
from blockconv import jit
from blockconv.core import target
from blockconv.kernels.reorder.kernels import reorder_copy
{first}
target.affinity = lambda: 2
sizes = [(52, 52, 4 * 2**k, 1, 0) for k in range(4)] + [(56, 56, 8, 1, 0), (56, 56, 16, 1, 0)]
with jit.collecting() as wanted:
    assert all(reorder_copy(*size).address == 0 for size in sizes)
assert len(wanted) == 6
compile_processes.compile_together(list(wanted))
found = [reorder_copy(*size) for size in sizes]
assert all(kernel.address for kernel in found)
print(sum(not kernel.compiled for kernel in found))  # read from disk: another process compiled them
with jit.collecting() as wanted:
    reorder_copy(*sizes[0])
assert not wanted
"""
PLANTED = "open({ran!r}, 'w').close()\nraise SystemExit('what lies in the current directory was run')\n"


@pytest.mark.parametrize(
    "entry", ["''", *(pytest.param(entry, marks=pytest.mark.slow) for entry in ("'.'", "os.getcwd()"))]
)
def test_children_do_not_import_from_the_current_directory(entry: str, run_python: Any, tmp_path: Path) -> None:
    """Those that are listed are not compiled, and then are, by whichever process."""
    ran, here = tmp_path / "ran", tmp_path / "here"
    here.mkdir()
    for name in ("json", "numpy", "importlib", "blockconv", "sitecustomize"):
        (here / f"{name}.py").write_text(PLANTED.format(ran=str(ran)))
    first = f"os.chdir({str(here)!r}); sys.path.insert(0, {entry})"
    done = run_python(TOGETHER.format(first=first), BLOCKCONV_CACHE_DIR=str(tmp_path / "cache"))
    assert not ran.exists()
    assert int(done.stdout) >= 3
    assert done.stderr == ""


@pytest.mark.slow
def test_children_use_the_library_that_their_parent_uses(run_python: Any, tmp_path: Path) -> None:
    """It lies in the current directory here, as in a clone; beside it lies what must not be run."""
    ran, clone = tmp_path / "ran", tmp_path / "clone"
    clone.mkdir()
    (clone / "blockconv").symlink_to(Path(bc.__file__).parent)
    plant = f"open('json.py', 'w').write({PLANTED.format(ran=str(ran))!r})"  # now that our own Python has started
    first = f"os.chdir({str(clone)!r}); assert bc.__file__.startswith({str(clone)!r}); {plant}"
    done = run_python(
        TOGETHER.format(first=first),
        BLOCKCONV_CACHE_DIR=str(tmp_path / "cache"),
        PYTHONPATH=str(clone),
    )
    assert not ran.exists()
    assert int(done.stdout) >= 3


def test_what_a_parent_could_import_its_children_can(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed, library = tmp_path / "site-packages", tmp_path / "clone"
    current = tmp_path / "current"
    current.mkdir()
    (tmp_path / "link").symlink_to(current)
    monkeypatch.chdir(current)
    monkeypatch.setattr(
        sys, "path", ["", ".", "lib", str(current), str(tmp_path / "link"), str(installed), "/stdlib.zip", Path("x")]
    )
    assert compile_processes._import_path(library) == [str(installed), "/stdlib.zip", str(library)]
    assert compile_processes._import_path(current) == [str(installed), "/stdlib.zip", str(current)]
    current.rmdir()
    assert str(installed) in compile_processes._import_path(library)


def test_a_child_that_fails_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = [("blockconv.kernels.reorder.rows", "no_such_family", (k,)) for k in range(6)]
    wanted[:2] = [("blockconv.kernels.reorder.rows", "reorder_copy", (52, 52, 4, 1, 0)) for _ in range(2)]
    monkeypatch.setattr(target, "affinity", lambda: 2)
    with pytest.warns(bc.SlowPathWarning, match=r"1 of 1 processes(.|\n)*no_such_family") as caught:
        compile_processes.compile_together(wanted)
    assert len(caught) == 1
    assert len(str(caught[0].message).splitlines()) <= 1 + compile_processes.LAST_LINES


def test_an_error_here_leaves_no_child_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    started = []
    popen = compile_processes.subprocess.Popen
    monkeypatch.setattr(
        compile_processes.subprocess, "Popen", lambda *a, **k: started.append(popen(*a, **k)) or started[-1]
    )
    monkeypatch.setattr(target, "affinity", lambda: 2)
    with pytest.raises(AttributeError, match="no_such_family"):
        compile_processes.compile_together(
            [("blockconv.kernels.reorder.rows", "no_such_family", (k,)) for k in range(8)]
        )
    assert [child.poll() is not None for child in started] == [True]


def test_a_child_without_end_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compile_processes, "_CHILD", "import time; time.sleep(600)")
    monkeypatch.setattr(compile_processes, "PATIENCE", 0.01)
    monkeypatch.setattr(target, "affinity", lambda: 2)
    with pytest.warns(bc.SlowPathWarning, match="stopped after"):
        compile_processes.compile_together([("blockconv.kernels.reorder.rows", "reorder_copy", (52, 52, 4, 1, 0))] * 6)


def test_a_long_list_of_kernels_reaches_a_child(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Longer than what a pipe or a command line holds."""
    out = tmp_path / "count"
    child = f"import json, sys; open({str(out)!r}, 'w').write(str(len(json.load(sys.stdin)['kernels'])))"
    monkeypatch.setattr(compile_processes, "_CHILD", child)
    monkeypatch.setattr(target, "affinity", lambda: 2)
    reorder_copy(52, 52, 4, 1, 0)
    wanted = [("blockconv.kernels.reorder.rows", "reorder_copy", (52, 52, 4, 1, 0))] * 8000
    assert len(json.dumps(wanted)) > 1 << 18
    compile_processes.compile_together(wanted)
    assert 3990 < int(out.read_text()) < 4010
