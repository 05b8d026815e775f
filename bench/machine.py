"""The machine that a figure was measured on: `record()` goes into every result file."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import gc
import itertools
import multiprocessing
import os
import platform
import subprocess
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np

from blockconv.core.target import container_quota, target_cpu, target_features

from . import cpu
from .team import Team

__all__ = [
    "LoadMeter",
    "affinity",
    "caches",
    "flush_caches",
    "keep_freed_memory",
    "locked",
    "memory",
    "memory_added",
    "pin",
    "processors",
    "realtime",
    "record",
]

PACKAGES = ("numpy", "numba", "llvmlite", "tbb", "torch", "onnxruntime", "openvino", "ncnn", "onnx", "ai-edge-litert")
ROOT = Path(__file__).parents[1]
SETTINGS = ("NUMBA_", "OMP_", "GOMP_", "KMP_", "MKL_", "ONEDNN_", "DNNL_", "OPENBLAS_", "BLOCKCONV_")


def record() -> dict[str, Any]:
    """The facts about this machine and its software that a reader needs to judge a figure."""
    return {
        "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
        **cpu.describe(),
        "numba_cpu": target_cpu(),
        "numba_features": sorted(target_features()),
        "cores": os.cpu_count(),
        "affinity": len(affinity()),
        "quota": container_quota(),
        "memory_gib": _memory_gib(),
        "caches": caches(),
        "os": platform.platform(),
        "python": platform.python_version(),
        "versions": {name: version for name in PACKAGES if (version := _version(name))},
        "blockconv": _own_version(),
        "threading_layer": _threading_layer(),
        "keeps_freed_memory": keep_freed_memory(),
        "environment": {key: value for key, value in sorted(os.environ.items()) if key.startswith(SETTINGS)},
    }


def affinity() -> list[int]:
    """The processors that this thread may run on."""
    if hasattr(os, "sched_getaffinity"):
        return sorted(os.sched_getaffinity(0))
    return list(range(os.cpu_count() or 1))


def pin(processors: Sequence[int]) -> None:
    """Keep this thread, and threads that it starts later, to these processors, if the system can."""
    if hasattr(os, "sched_setaffinity"):
        os.sched_setaffinity(0, processors)


@contextlib.contextmanager
def realtime(threads: Sequence[int] = (0,)) -> Iterator[None]:
    """These threads, by default the calling one, above all other processes meanwhile.

    Raises PermissionError where the user may not ask for that, and OSError where the system has no such priority.
    """
    if not hasattr(os, "sched_setscheduler"):
        raise OSError("--realtime: this system has no real-time priority; measure without it, on an idle machine")
    try:
        _schedule(threads, os.SCHED_FIFO, 50)
        yield
    finally:
        _schedule(threads, os.SCHED_OTHER, 0)


def _schedule(threads: Sequence[int], policy: int, priority: int) -> None:
    for thread in threads:
        with contextlib.suppress(ProcessLookupError):  # it has ended
            os.sched_setscheduler(thread, policy, os.sched_param(priority))


@contextlib.contextmanager
def locked(path: Path | None) -> Iterator[None]:
    """Hold a lock on a file, as `flock FILE command` does: only one benchmark at a time. None: hold nothing."""
    if path is None:
        yield
        return
    import fcntl  # which only POSIX has

    with path.open("a") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def processors(count: int) -> list[int]:
    """`count` processors to measure on: of different cores as far as possible, the last ones, since the
    first have most of the interrupts."""
    by_core: dict[str, list[int]] = {}
    for processor in reversed(affinity()):
        siblings = Path(f"/sys/devices/system/cpu/cpu{processor}/topology/thread_siblings_list")
        core = siblings.read_text().strip() if siblings.exists() else str(processor)
        by_core.setdefault(core, []).append(processor)
    in_turn = [p for turn in itertools.zip_longest(*by_core.values()) for p in turn if p is not None]
    return sorted(in_turn[:count])


def _memory_gib() -> float | None:
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError):
        return None
    return round(total / 2**30, 1)


@functools.cache
def caches() -> dict[str, int]:
    """Bytes of each data cache that the first processor sees, by level: {"L1": 49152, ...}; {} if unknown."""
    found = {}
    for index in sorted(Path("/sys/devices/system/cpu/cpu0/cache").glob("index*")):
        try:
            level, kind, size = ((index / name).read_text().strip() for name in ("level", "type", "size"))
        except OSError:
            continue
        if kind != "Instruction":
            unit = {"K": 2**10, "M": 2**20, "G": 2**30}.get(size[-1], 1)
            found[f"L{level}"] = int(size.rstrip("KMG")) * unit
    return found


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _own_version() -> str:
    """Version, commit and whether the tree was changed since."""
    from blockconv._version import __version__

    try:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--exclude=*"]
        commit = subprocess.run(git, capture_output=True, text=True, check=True, timeout=10).stdout.strip()
    except (OSError, subprocess.SubprocessError):
        return __version__
    return f"{__version__} ({commit})"


def _threading_layer() -> str | None:
    """Numba's, if anything has launched on it yet."""
    import numba

    try:
        return str(numba.threading_layer())
    except ValueError:
        return None


class LoadMeter:
    """How busy other processes keep the machine, from the making of the meter on.

    Our own processes are this one and its children by `multiprocessing`.
    """

    def __init__(self) -> None:
        self.start = self._now()

    def others(self) -> float | None:
        """Processors' worth of work that others did meanwhile; None where the system does not say."""
        if self.start is None or (now := self._now()) is None:
            return None
        seconds, all_busy, own = (after - before for before, after in zip(self.start, now, strict=True))
        return round(max(0.0, all_busy - own) / max(seconds, 0.1), 2)

    @staticmethod
    def _now() -> tuple[float, float, float] | None:
        """(time, seconds that all processors were busy, that our processes were)."""
        own = [os.getpid(), *(child.pid for child in multiprocessing.active_children())]
        try:
            fields = [int(word) for word in Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:]]
            ours = 0
            for process in own:  # user and system, behind the name, which may have spaces
                ours += sum(map(int, Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[11:13]))
        except OSError:
            return None
        user, nice, system, _, _, interrupts, soft_interrupts, steal = fields[:8]
        ticks = user + nice + system + interrupts + soft_interrupts + steal
        frequency = os.sysconf("SC_CLK_TCK")
        return time.monotonic(), ticks / frequency, ours / frequency


@functools.cache
def keep_freed_memory() -> bool:
    """Have the C library keep memory that was freed, and say whether it does (glibc).

    Otherwise it may return the memory to the system. Then a library which allocates its output at
    each call pays for fresh pages each time: 400 or 1500 µs for one layer of torch's, depending on
    the heap of the process.
    """
    trim_threshold, mmap_threshold = -1, -3
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError, TypeError):
        return False
    return bool(mallopt(trim_threshold, 1 << 30) and mallopt(mmap_threshold, 32 << 20))


def flush_caches(processors: Sequence[int] = ()) -> None:
    """Evict this process's data: each of its processors streams through more memory than its caches hold.

    Best effort: the hardware's replacement is not ours to command.
    """
    there = processors or affinity()
    with Team(len(there)) as team:
        team.each(lambda worker: _stream(there[worker]))()


def _stream(processor: int) -> None:
    pin([processor])  # this thread only
    np.add(_flush_buffer(), 1, out=_flush_buffer())


@functools.cache
def _flush_buffer() -> np.ndarray:
    # Twice the largest cache; a virtual machine may be shown a giant that it shares with others.
    limit = min(1 << 30, int((_memory_gib() or 8) * 2**30) // 8)
    return np.ones(min(2 * max(caches().values(), default=64 << 20), limit), np.uint8)


@contextlib.contextmanager
def memory_added(found: dict[str, Any], name: str) -> Iterator[None]:
    """Peak memory of this process beyond what it has before, in bytes, as found[name]; nothing where no file says."""
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)  # what the C library has kept of freed memory would hide as much
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="utf-8")
    before = memory()
    yield
    if before:
        found[name] = memory()["VmHWM"] - before["VmRSS"]


def memory() -> dict[str, int]:
    """The bytes that the process has in memory, VmRSS, and the most that it had, VmHWM."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/self/status").read_text(encoding="utf-8").splitlines()
        return {
            line.split(":")[0]: int(line.split()[1]) * 1024 for line in lines if line.startswith(("VmRSS", "VmHWM"))
        }
    return {}
