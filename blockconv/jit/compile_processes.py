"""Compiling many kernels in several processes at once, as one process compiles one at a time.

Two kinds exist: `compile_together` fills this machine's cache, and `workers` make kernels for any machine. Nothing
else in blockconv starts a process.

`compile_together` starts only a Python. A child is an isolated Python (`-I`): it imports neither from the current
directory nor from where the environment says, but from where this process does. It loads blockconv itself from this
process's own files. It hands compiled kernels over through the disk cache.
"""

import contextlib
import importlib
import json
import multiprocessing
import os
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from blockconv import jit
from blockconv.core import target
from blockconv.core.errors import failing, ignoring, warn
from blockconv.jit.packs import Target

FEWEST = 3  # kernels that are worth another process, which takes a second to start
OTHERS = 2  # kernels that the caller compiles afterwards by itself: those that pack weights
PATIENCE = 60.0  # seconds that a child may go on for when this process's own share is done
WAIT = 0.25  # seconds between two looks at how far children are
LAST_LINES = 6  # of a child's errors, which are shown
_ORIGIN = Path(getattr(sys.modules["blockconv"], "__file__", None) or "")  # frozen modules may have none

_CHILD = """
import importlib, importlib.util, json, logging, sys
logging.getLogger("blockconv").setLevel(logging.ERROR)
job = json.load(sys.stdin)
for name, value in job["sys"].items():
    setattr(sys, name, value)
found = importlib.util.spec_from_file_location("blockconv", job["package"])
sys.modules["blockconv"] = importlib.util.module_from_spec(found)
found.loader.exec_module(sys.modules["blockconv"])
for module, family, params in job["kernels"]:
    getattr(importlib.import_module(module), family)(*params)
"""


def compile_together(wanted: Sequence[jit.Wanted], tell: Callable[[], None] = lambda: None) -> None:
    """Compile kernels in as many processes as there are processors; they meet in the disk cache.

    Children that fail cost time, and one SlowPathWarning with the first error. This process then compiles each missing
    kernel at its first use. tell: called every `WAIT` seconds while this process waits for children.
    """
    count = min(target.affinity(), len(wanted) // FEWEST)
    may_compile = target.may_compile() and not target.numba_setting("DISABLE_JIT")
    if count < 2 or not _is_python() or not may_compile or jit.disk_cache().refusal():
        return
    own = max(0, (len(wanted) + OTHERS) // count - OTHERS)
    children: list[subprocess.Popen[bytes]] = []
    try:
        for k in range(count - 1):
            with ignoring(OSError):  # the system has no room for another process
                children.append(_start(wanted[own + k :: count - 1]))
        for module, family, params in wanted[:own]:
            getattr(importlib.import_module(module), family)(*params)
        failed = [said for child in children if (said := _wait(child, tell)) is not None]
    except BaseException:
        for child in children:
            _stop(child)
        raise
    if failed:
        warn(
            f"blockconv: {len(failed)} of {len(children)} processes that help to compile kernels failed. This "
            f"process compiles the rest. The first error:\n{failed[0]}"
        )


@contextlib.contextmanager
def workers(at: Target | None = None) -> Iterator[ProcessPoolExecutor]:
    """Processes that make kernels for a target, by default for this machine, and run none (`target.make_for`)."""
    given = {}
    if at is not None:
        signed = ",".join(f"+{feature}" for feature in at.features.split())
        given = {"NUMBA_CPU_NAME": at.cpu, "NUMBA_CPU_FEATURES": signed}
    spawn, before = multiprocessing.get_context("spawn"), dict(os.environ)
    with tempfile.TemporaryDirectory() as nothing:  # what plans remember on disk is of a machine that runs them
        os.environ.update(given, BLOCKCONV_CACHE_DIR=nothing)
        try:
            triple = at.triple if at is not None else target.triple()
            with ProcessPoolExecutor(target.affinity(), spawn, target.make_for, (triple,)) as pool:
                yield pool
        finally:
            os.environ.clear()
            os.environ.update(before)


_PYTHON = re.compile(r"python[\d.]*[dtw]*(\.exe)?", re.IGNORECASE)


def _is_python() -> bool:
    """Whether this process is Python's own program beyond doubt, and blockconv a folder that a child can read.

    A frozen program starts itself again, and so may one that embeds Python: `sys.executable` is then this program, or a
    Python that has nothing to do with it. Linux tells which program runs. Elsewhere its name has to do.
    """
    names = [os.path.basename(name or "") for name in (sys.executable, *sys.orig_argv[:1])]
    if hasattr(sys, "frozen") or len(names) < 2 or not all(map(_PYTHON.fullmatch, names)):
        return False
    with ignoring(OSError):
        return _ORIGIN.is_file() and (sys.platform != "linux" or os.path.samefile(sys.executable, "/proc/self/exe"))
    return False


def _start(kernels: Sequence[jit.Wanted]) -> subprocess.Popen[bytes]:
    """Start a child on its share, which a file holds: it may be longer than a pipe takes, or a command line."""
    own = {
        "path": _import_path(_ORIGIN.parents[1]),
        "dont_write_bytecode": sys.dont_write_bytecode,
        "pycache_prefix": sys.pycache_prefix,
    }
    with tempfile.TemporaryFile() as given:
        given.write(json.dumps({"sys": own, "package": str(_ORIGIN), "kernels": kernels}).encode())
        given.seek(0)
        return subprocess.Popen(
            [sys.executable, "-I", "-c", _CHILD],
            env={**os.environ, "BLOCKCONV_CACHE_DIR": str(jit.disk_cache().base)},
            stdin=given,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
        )


def _import_path(library: Path) -> list[str]:
    """This process's `sys.path` without the current directory and what is relative to it.

    The directory that holds the package comes last. It may be the current one (a clone, or `pip install --target .`).
    Modules of Python and of installed packages then still take precedence over modules there.
    """
    try:
        current = os.path.realpath(os.getcwd())
    except failing(OSError):  # it was removed
        current = None
    texts = [entry for entry in sys.path if isinstance(entry, str) and os.path.isabs(entry)]
    return [entry for entry in texts if os.path.realpath(entry) != current] + [str(library)]


def _wait(child: subprocess.Popen[bytes], tell: Callable[[], None]) -> str | None:
    """None if it succeeded, else the last lines of what it said."""
    end = time.monotonic() + PATIENCE
    while True:
        try:
            _, errors = child.communicate(timeout=max(0.0, min(WAIT, end - time.monotonic())))
            break
        except subprocess.TimeoutExpired:
            if time.monotonic() < end:
                tell()
                continue
            _stop(child)
            return f"(stopped after {PATIENCE:.0f} s)"
    if child.returncode == 0:
        return None
    lines = errors.decode(errors="replace").splitlines()
    return "\n".join(lines[-LAST_LINES:]) or f"(nothing; its exit status is {child.returncode})"


def _stop(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    child.communicate()
