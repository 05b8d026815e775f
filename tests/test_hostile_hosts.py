"""Programs, containers and systems that blockconv does not expect: each is a row, run in a process of its own.

A row takes something away or replaces it. Convolutions in three types and a plan have to give the right values
there. `before` runs before blockconv is imported, `after` between the import and the work.
"""

from __future__ import annotations

import compileall
import os
import re
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

import blockconv as bc
from blockconv._pyinstaller import hook_dirs
from blockconv.core import files

PACKAGE = Path(bc.__file__).parent
posix = pytest.mark.skipif(os.name != "posix", reason="takes away what other systems do not have")


@dataclass(frozen=True)
class Host:
    """A row.

    before, after: code.
    within: a function that the work is passed to.
    checks: code that runs after the work.
    variables: of the environment.
    types: of the convolutions and plans. Rows that compile every kernel again take few.
    fresh: nothing is in its cache.
    quick: it runs by default.
    """

    before: str = ""
    after: str = ""
    within: str = "(lambda work: work())"
    checks: str = ""
    variables: dict[str, str | None] = field(default_factory=dict)
    types: tuple[str, ...] = ("float32", "float16", "int8")
    fresh: bool = False
    quick: bool = False


WORK = """
import numpy as np
import blockconv as bc
{after}
def work():
    rng = np.random.RandomState(0)
    x, w = rng.randint(-4, 5, (1, 8, 9, 9)), rng.randint(-2, 3, (8, 8, 3, 3))
    with np.errstate(all="ignore"):
        windows = np.lib.stride_tricks.sliding_window_view(np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1))), (3, 3), (2, 3))
        wanted = np.einsum("nchwij,ocij->nohw", windows, w)
    def same(found, wanted=wanted):
        assert np.array_equal(np.asarray(found).astype(np.float64), wanted), found
    for name in {types}:
        same(bc.conv2d(x.astype(name), w.astype(name), padding=1))
    builder = bc.NetworkBuilder()
    builder.output(builder.conv2d(builder.input("x", x.shape), w.astype(np.float32), padding=1, activation="relu"))
    network, positive = builder.build(), np.maximum(wanted, 0)
    x = x.astype(np.float32)
    for precision in {types}[:2]:
        same(bc.compile(network, precision=precision)(x), positive)
    same(*network.evaluate(x).values(), positive)
    if "int8" in {types}:
        quantized = bc.quantize(network, [x])
        found, (exact,) = bc.compile(quantized)(x), quantized.evaluate(x).values()
        assert np.array_equal(found, exact) and abs(found - positive).max() < 4
    print("computed")
{within}(work)
{checks}
"""

HIDDEN = """
import builtins, io, os
def hide(real):
    def opened(file, *args, **kwargs):
        if isinstance(file, (str, bytes, os.PathLike)) and os.fsdecode(file).startswith({folders}):
            raise {error}
        return real(file, *args, **kwargs)
    return opened
for name in ("stat", "lstat", "readlink", "listdir", "scandir", "open"):
    setattr(os, name, hide(getattr(os, name)))
builtins.open = io.open = hide(open)
"""

READ_ONLY = """
import builtins, errno, io, os
def refused(path):
    raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))
def reading(real):
    def opened(file, mode="r", *args, **kwargs):
        writes = mode & (os.O_WRONLY | os.O_RDWR | os.O_CREAT) if isinstance(mode, int) else set(mode) & set("wax+")
        return refused(file) if writes and file != os.devnull else real(file, mode, *args, **kwargs)
    return opened
os.mkdir = lambda path, *args, **kwargs: refused(path)
builtins.open = io.open = reading(open)
os.open = reading(os.open)
"""

NO_HOME = """
import pwd
def without_entry(user):
    raise KeyError(f"getpwuid(): uid not found: {user}")
pwd.getpwuid = without_entry
"""

TEMPORARY = """
import os
from blockconv import jit
assert jit.cache_directory().is_relative_to(os.environ["TMPDIR"]), jit.cache_directory()
"""

# A program that embeds Python, whatever Python says its name is: it notes each start.
EMBEDDED = """
import os, stat, sys, tempfile
program = os.path.join(tempfile.mkdtemp(), {name!r})
with open(program, "w") as file:
    file.write('#!/bin/sh\\necho started >> "$0.starts"\\n')
os.chmod(program, stat.S_IRWXU)
sys.executable = program
"""
PARALLEL = """
from blockconv.core import target
from blockconv.jit import compile_processes
target.affinity = lambda: 2
compile_processes.compile_together([("blockconv.kernels.reorder.rows", "reorder_copy", (52, 52, 4, 1, 0))] * 6)
"""
NOT_STARTED = "assert not os.path.exists(program + '.starts'), 'the program started itself'"

# What is told: a line of progress, and a warning of a slow path.
TELLS = """
from blockconv.core import progress
with progress.Progress("work", 3, is_long=True) as told:
    told.tick(1)
bc.to_layout(np.ones((1, 24, 4, 4), np.float32), "aBcd4b6b")
"""
FEW = ("float32",)
RESTORED = "sys.stderr = sys.__stderr__"  # which Python flushes as it ends
ON_SMALL_STACK = """(lambda work: (
    threading.stack_size({kib} << 10), thread := threading.Thread(target=work), thread.start(), thread.join()
))"""

# Numbers that overflow and underflow in each type, and functions whose formulas do.
EXTREMES = """
with np.errstate(all="ignore"):
    scales = 10.0 ** np.linspace(-44, 4, 576).reshape(8, 8, 3, 3)
    w, x = scales.astype(np.float32), (scales[:1, :, :3, :3] * 1e30).astype(np.float32)
    halves = [(each.astype(np.float16), w.astype(np.float16)) for each in (x, -x)]
for each, weight in halves:
    bc.conv2d(each, weight, weight[:, 0, 0, 0], padding=1)
for precision in ("float32", "bfloat16", "float16"):
    builder = bc.NetworkBuilder()
    y = builder.conv2d(builder.input("x", x.shape), w, w[:, 0, 0, 0], padding=1)
    for name in ("exp", "gelu", "softplus", "mish", "elu"):
        y = builder.activation(y, name)
    builder.output(builder.conv2d(y, w, padding=1))
    network = builder.build()
    plan = bc.compile(network, precision=precision)
    plan(x), network.evaluate(x), plan.network.evaluate(x)
"""
HOSTS = {
    "another program than Python": Host(EMBEDDED.format(name="uwsgi"), PARALLEL, checks=NOT_STARTED, quick=True),
    "another Python than the one that runs": Host(EMBEDDED.format(name="python3"), PARALLEL, checks=NOT_STARTED),
    "a frozen program": Host(EMBEDDED.format(name="python") + "sys.frozen = True", PARALLEL, checks=NOT_STARTED),
    "no executable": Host("import sys; sys.executable = None", PARALLEL),
    "an embedded interpreter's arguments": Host("import sys; sys.orig_argv = []", PARALLEL),
    "a program that was packed without the files of modules": Host(
        after="from pathlib import Path\nfrom blockconv.jit import cache\ncache._ROOT = Path('/nowhere')", types=FEW
    ),
    "no processes": Host(
        "import subprocess\nsubprocess.Popen.__init__ = lambda *a, **k: exec('raise PermissionError(1)')", PARALLEL
    ),
    "no threads": Host(
        "import _thread, threading\n"
        "_thread.start_new_thread = threading._start_new_thread = lambda *a, **k: exec('raise RuntimeError')",
        types=FEW,
        fresh=True,
    ),
    "neither a home nor an entry of passwd": Host(
        NO_HOME, TEMPORARY, variables={"HOME": None, "XDG_CACHE_HOME": None, "BLOCKCONV_CACHE_DIR": None}, types=FEW
    ),
    "a home that is no folder": Host(
        variables={"HOME": "/dev/null", "XDG_CACHE_HOME": None, "BLOCKCONV_CACHE_DIR": None}, types=FEW
    ),
    "no writable folder": Host(READ_ONLY, variables={"HOME": "/nowhere", "BLOCKCONV_CACHE_DIR": None}, types=FEW),
    "no /sys": Host(HIDDEN.format(folders='"/sys"', error="FileNotFoundError(2, 'hidden')"), PARALLEL),
    "an unreadable /proc": Host(
        HIDDEN.format(folders='("/proc", "/sys")', error="PermissionError(13, 'hidden')"), PARALLEL
    ),
    "64 KiB of stack": Host(within=ON_SMALL_STACK.format(kib=64), before="import threading", types=FEW, fresh=True),
    "64 KiB of stack, kernels from disk, several threads": Host(
        "import threading",
        "from blockconv.runtime import launcher\nlauncher.GRAIN = 1e-12\nbc.set_num_threads(2)",
        within=ON_SMALL_STACK.format(kib=64),
    ),
    "no error stream": Host(after="import sys; sys.stderr = None\n" + TELLS),
    "an error stream with write alone": Host(
        after="import sys, types; sys.stderr = types.SimpleNamespace(write=lambda text: len(text))\n" + TELLS,
        checks=RESTORED,
    ),
    "an error stream that fails": Host(
        after="import sys, types; sys.stderr = types.SimpleNamespace(write=lambda text: 1 / 0, flush=lambda: 1 / 0)\n"
        + TELLS,
        checks=RESTORED,
    ),
    "a closed error stream": Host(
        after="import io, sys; sys.stderr = io.StringIO(); sys.stderr.close()\n" + TELLS, checks=RESTORED
    ),
    "a terminal that fails": Host(
        after="import sys, types\n"
        "sys.stderr = types.SimpleNamespace(write=lambda text: 1 / 0, isatty=lambda: True, flush=lambda: 1 / 0)\n"
        + TELLS,
        checks=RESTORED,
        variables={"TERM": "xterm"},
    ),
    "a log handler that raises": Host(
        after="import logging\nclass Broken(logging.Handler):\n    emit = lambda *a: exec('raise OSError')\n"
        "logging.basicConfig(level=logging.DEBUG, handlers=[Broken()])\n" + TELLS
    ),
    "a hook of warnings that raises": Host(
        after="import warnings\nwarnings.showwarning = lambda *a, **k: exec('raise OSError')\n" + TELLS
    ),
    "errors of NumPy that raise": Host("import numpy as np; np.seterr(all='raise')", checks=EXTREMES, quick=True),
    "errors of NumPy that raise while kernels compile": Host(
        "import numpy as np; np.seterr(all='raise')", types=("float32", "float16"), fresh=True
    ),
    "warnings of NumPy that raise": Host(
        "import warnings; warnings.simplefilter('error', RuntimeWarning)", checks=EXTREMES
    ),
}
CASES = [pytest.param(host, id=name, marks=[] if host.quick else pytest.mark.slow) for name, host in HOSTS.items()]


@pytest.mark.sampled(3)
@pytest.mark.slow
@posix
@pytest.mark.parametrize("host", CASES)
def test_a_host(host: Host, run_python: Any, tmp_path: Path) -> None:
    text = host.before + WORK.format(after=host.after, within=host.within, checks=host.checks, types=host.types)
    variables = {"TMPDIR": str(tmp_path), **({"BLOCKCONV_CACHE_DIR": str(tmp_path)} if host.fresh else {})}
    done = run_python(text, **variables | host.variables)
    assert done.stdout.split() == ["computed"], done.stderr


# ---------------------------------------------------------------- where the package is


def zipped(folder: Path, edit: str = "") -> Path:
    """A zip of the package."""
    with zipfile.ZipFile(folder / "package.zip", "w") as archive:
        for path in PACKAGE.rglob("*"):
            if path.is_file() and "__pycache__" not in path.parts:
                text = path.read_bytes() + (edit.encode() if path.name == "ir.py" else b"")
                archive.writestr(f"blockconv/{path.relative_to(PACKAGE).as_posix()}", text)
    return folder / "package.zip"


def compiled(folder: Path, edit: str = "") -> Path:
    """A folder of the package without sources."""
    copy = folder / "blockconv"
    shutil.copytree(PACKAGE, copy, ignore=shutil.ignore_patterns("__pycache__"))
    with (copy / "jit" / "ir.py").open("a") as file:
        file.write(edit)
    compileall.compile_dir(copy, quiet=2, legacy=True)
    for path in copy.rglob("*.py"):
        path.unlink()
    return folder


WHERE = """
import sys
sys.path.insert(0, {folder!r})
import blockconv
from blockconv import jit
from blockconv.network.planning import remembered
assert blockconv.__file__.startswith({folder!r}), blockconv.__file__
"""
DIGESTS = WHERE + "print(jit.disk_cache().fingerprint, remembered._package().hex())"


@pytest.mark.slow
@pytest.mark.parametrize("packed", [zipped, compiled])
@pytest.mark.sampled(2)
def test_where_the_package_is(packed: Any, run_python: Any, tmp_path: Path) -> None:
    """It computes there, starts processes only where a child can read it, and an edit changes both digests."""
    seen = []
    for edit in ("", "\nedited = 1\n"):
        folder = tmp_path / f"edited {bool(edit)}"
        folder.mkdir()
        seen.append(run_python(DIGESTS.format(folder=str(packed(folder, edit)))).stdout.split())
    assert not {*seen[0]} & {*seen[1]}
    text = WHERE.format(folder=str(packed(tmp_path))) + WORK.format(
        after=PARALLEL, within="(lambda f: f())", checks="", types=FEW
    )
    assert run_python(text, BLOCKCONV_CACHE_DIR=str(tmp_path)).stdout.split() == ["computed"]


def test_missing_data_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files.resources, "files", lambda package: tmp_path)
    for name in ("machines", "report.css"):
        with pytest.raises(bc.UnsupportedError, match=f"data/{name} is missing"):
            files.packaged(name)
        (tmp_path / "data" / "machines").mkdir(parents=True, exist_ok=True)


def test_nothing_else_starts_a_process() -> None:
    starts = re.compile(
        r"\b(subprocess|multiprocessing|ProcessPoolExecutor|os\.(system|popen|spawn\w+|exec\w+|fork\w*)\(|posix_spawn)"
    )
    found = {
        path.relative_to(PACKAGE).as_posix() for path in PACKAGE.rglob("*.py") if starts.search(path.read_text("utf-8"))
    }
    assert found == {"jit/compile_processes.py"}


# ---------------------------------------------------------------- a real program

PROGRAM = """
import sys
import numpy as np
import blockconv as bc
from blockconv import jit
assert sys.frozen
x = np.arange(8 * 81, dtype=np.float32).reshape(1, 8, 9, 9) % 7
builder = bc.NetworkBuilder()
y = builder.input("x", x.shape)
for _ in range(3):
    y = builder.conv2d(y, np.full((8, 8, 3, 3), 1 / 64, np.float32), padding=1, activation="relu")
builder.output(builder.max_pool2d(y, 2))
network = builder.build()
plan = bc.compile(network)
assert abs(plan(x) - next(iter(network.evaluate(x).values()))).max() < 1e-3
plan.report(sys.argv[1])
print(len(jit.disk_cache().contents()), bc.get_threading())
"""


@pytest.mark.nightly
@pytest.mark.parametrize("kind", ["onedir", "onefile"])
def test_a_program_that_pyinstaller_packs(kind: str, tmp_path: Path) -> None:
    """It computes, starts nothing, finds its data, pip's TBB and its kernels of the last time."""
    pytest.importorskip("PyInstaller")
    (tmp_path / "program.py").write_text(PROGRAM)
    hooks = [f"--additional-hooks-dir={folder}" for folder in hook_dirs()]
    packing = [sys.executable, "-m", "PyInstaller", f"--{kind}", f"--paths={PACKAGE.parent}", *hooks, "program.py"]
    subprocess.run(packing, cwd=tmp_path, check=True, capture_output=True, timeout=1800)
    program = tmp_path / "dist" / "program" / "program" if kind == "onedir" else tmp_path / "dist" / "program"
    assert not [*tmp_path.glob("dist/*/_internal/torch")], "which the program does not import"
    outside = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    for _ in range(2):
        done = subprocess.run(
            [str(program), str(tmp_path / "plan.html")],
            env={**outside, "BLOCKCONV_CACHE_DIR": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            timeout=600,
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.split()[0] == "1"
    assert "compiling" not in done.stderr
    assert (tmp_path / "plan.html").stat().st_size > 1000
