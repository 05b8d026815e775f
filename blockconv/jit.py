"""The one place with Numba policy: what is compiled for, where it is kept, which threads run it.

A *kernel family* is a function of plain integers that returns the Python body of one
specialisation; ``@kernel`` makes it a callable that gives the compiled `Kernel` for those
integers. A kernel is a C function ``void (int64, int64, int64, int64)``, known by its address.

Compiled code is kept by `kernel_cache` and not by Numba's own cache, for three reasons: Numba's
index files race between processes (numba#8085), its keys do not see edits in a helper module,
and reading one entry costs the set-up of the whole type system (0.1 s). What that cache needs to
know of Numba stands here: the fingerprint of everything that the code depends on.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import hashlib
import os
import platform
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

import llvmlite
import llvmlite.binding as llvm
import numba
from numba.core import config
from numba.core.registry import cpu_target

from blockconv.codegen import Code, generate, link
from blockconv.errors import SlowPathWarning, UnsupportedError
from blockconv.kernel_cache import KernelCache, find

__all__ = [
    "Isa",
    "Kernel",
    "Wanted",
    "cache_directory",
    "collecting",
    "default_threads",
    "disk_cache",
    "isa",
    "kernel",
    "parallel_for",
    "threading_layer",
]

_lock = threading.RLock()  # Numba's compiler and the layer's start are entered by one thread at a time.


# ---------------------------------------------------------------- the machine that Numba targets


@dataclass(frozen=True)
class Isa:
    """What the generated code may use: vector width and the number of vector registers.

    Taken from the features that Numba targets (``NUMBA_CPU_NAME``, ``NUMBA_CPU_FEATURES``),
    which need not be the machine's. halves: a vector runs as two halves (AMD's Zen 4), so vectors of half the
    width do as much in the same time.
    """

    name: str
    vector_bytes: int
    registers: int
    fma: bool
    halves: bool = False


@functools.cache
def target_features() -> frozenset[str]:
    """The CPU features that Numba compiles for, by LLVM's names."""
    text = cpu_target.target_context.codegen()._tm_features or ""
    return frozenset(part[1:] for part in text.split(",") if part.startswith("+"))


@functools.cache
def target_cpu() -> str:
    return str(config.CPU_NAME or llvm.get_host_cpu_name())


@functools.cache
def isa() -> Isa:
    """The widest vector unit among `target_features`."""
    features = target_features()
    if {"avx512f", "avx512dq", "avx512vl", "avx512bw"} <= features:
        return Isa("avx512", 64, 32, True, halves=target_cpu() == "znver4")
    if {"avx2", "fma"} <= features:
        return Isa("avx2", 32, 16, True)
    if platform.machine().lower() in ("aarch64", "arm64"):
        return Isa("neon", 16, 32, True)
    return Isa("sse", 16, 16, "fma" in features)


def affinity() -> int:
    """Processors that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def container_quota(root: Path = Path("/")) -> float | None:
    """The container's CPU quota in processors (cgroup v2 and v1); None if there is none.

    A group's quota holds for all groups inside it, so the least on the way up counts.
    """
    quotas = [quota for files in _cgroup_files(root) if (quota := _quota(*files)) is not None]
    return min(quotas, default=None)


def _quota(quota: Path, period: Path | None) -> float | None:
    """Processors, from v2's `cpu.max` ("150000 100000"), or from v1's two files."""
    try:
        words = quota.read_text().split()
        processors = float(words[0]) / float(words[1] if period is None else period.read_text())
    except (OSError, ValueError, IndexError, ZeroDivisionError):  # no such group, or "max": no limit
        return None
    return processors if processors > 0 else None


def _cgroup_files(root: Path) -> Iterator[tuple[Path, Path | None]]:
    """(quota, period) of every group that this process is in, and of those around it; v2 has one file for both."""
    try:
        lines = (root / "proc/self/cgroup").read_text().splitlines()
    except OSError:
        lines = []
    mounts = root / "sys/fs/cgroup"
    # In a container the path is often the host's, and the group itself is what is mounted.
    for line in [*lines, "0::/", "1:cpu:/"]:
        number, controllers, group = line.split(":", 2)
        if number == "0":
            base = mounts
        elif "cpu" in controllers.split(","):
            base = next((m for c in (controllers, "cpu") if (m := mounts / c).is_dir()), mounts / "cpu")
        else:
            continue
        inner = base / group.lstrip("/")
        for here in (inner, *inner.parents):
            if number == "0":
                yield here / "cpu.max", None
            else:
                yield here / "cpu.cfs_quota_us", here / "cpu.cfs_period_us"
            if here == base:
                break


@functools.cache
def default_threads() -> int:
    """min(affinity, container quota, Numba's own limit)."""
    quota = container_quota()
    whole = affinity() if quota is None else min(affinity(), max(1, int(quota + 0.5)))
    return max(1, min(whole, int(config.NUMBA_NUM_THREADS)))


@functools.cache
def second_level_cache() -> int:
    """Bytes of a core's second-level cache; 1 MiB where the system does not tell."""
    return _cache_size(2) or 1 << 20


@functools.cache
def last_level_cache() -> int:
    """Bytes of the third-level cache, else of the second."""
    return _cache_size(3) or second_level_cache()


def _cache_size(level: int) -> int | None:
    try:
        text = Path(f"/sys/devices/system/cpu/cpu0/cache/index{level}/size").read_text().strip()
        units = {"K": 1 << 10, "M": 1 << 20}
        return int(text[:-1]) * units[text[-1]]
    except (OSError, ValueError, KeyError, IndexError):
        return None


# ---------------------------------------------------------------- the on-disk cache


def _sources() -> list[Path]:
    """Every file whose text can change the code of a kernel."""
    here = Path(__file__).parent
    return [
        *sorted((here / "kernels").glob("*.py")),
        here / "codegen.py",
        here / "emit.py",
        here / "jit.py",
        here / "runtime.py",
    ]


@functools.cache
def _fingerprint() -> str:
    digest = hashlib.sha256()
    versions = (
        numba.__version__,
        llvmlite.__version__,
        sys.implementation.cache_tag,
        llvm.get_process_triple(),
    )
    for text in (*versions, target_cpu(), *sorted(target_features())):
        digest.update(str(text).encode() + b"\0")
    for path in _sources():
        digest.update(path.name.encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:20]


@functools.cache
def disk_cache() -> KernelCache:
    """Compiled kernels on disk, and what was measured with them."""
    return find(_fingerprint())


def cache_directory() -> Path:
    """Where compiled kernels are kept: ``BLOCKCONV_CACHE_DIR``, else the user's cache, else a temporary one."""
    return disk_cache().directory


# ---------------------------------------------------------------- kernels


@dataclass(frozen=True)
class Kernel:
    """A compiled kernel: its name, its address, and Numba's library, which keeps the code alive."""

    name: str
    address: int
    compiled: bool = field(default=False, compare=False)  # by this process, and not read from the disk cache
    code: Code | None = field(default=None, repr=False, compare=False)  # to be looked at: only `compile` gives it


class KernelFamily:
    """What ``@kernel`` makes of a builder: ``family(*ints)`` is the kernel specialised on them."""

    def __init__(self, build: Callable[..., Callable[[int, int, int, int], None]]) -> None:
        functools.update_wrapper(self, build)
        self.__name__ = build.__name__
        self._build = build
        self._kernels: dict[tuple[int, ...], Kernel] = {}

    def __call__(self, *params: int) -> Kernel:
        found = self._kernels.get(params)
        if found is None:
            listed = getattr(_collected, "kernels", None)
            if listed is not None and not disk_cache().holds(self.entry(*params)):
                listed[self._build.__module__, self.__name__, params] = None
                return Kernel(self.name(*params), 0)
            with _lock:
                found = self._kernels.get(params) or self._load(params) or replace(self.compile(*params), code=None)
                self._kernels[params] = found
        return found

    def name(self, *params: int) -> str:
        return "__".join([self._build.__name__, "_".join(str(int(p)) for p in params)]).rstrip("_")

    def entry(self, *params: int) -> str:
        """The name in the disk cache: builders of one name in two modules have entries of their own."""
        return f"{self._build.__module__}.{self.name(*params)}"

    def compile(self, *params: int) -> Kernel:
        """Compile now, past every cache, and keep the result on disk."""
        name = self.name(*params)
        if config.DISABLE_JIT:
            raise UnsupportedError(
                f"kernel {name}: NUMBA_DISABLE_JIT is set, and kernels are LLVM code, with no Python twin"
            )
        body = self._build(*params)
        body.__name__ = body.__qualname__ = name
        with _lock:
            code = generate(name, body)
            address = link(name, code.object)
        disk_cache().write(self.entry(*params), code.object)
        return Kernel(name, address, True, code)

    def _load(self, params: tuple[int, ...]) -> Kernel | None:
        name, code = self.name(*params), disk_cache().read(self.entry(*params))
        return None if code is None else Kernel(name, link(name, code))


def kernel(build: Callable[..., Callable[[int, int, int, int], None]]) -> KernelFamily:
    """Decorator: ``build(*ints)`` returns a kernel's Python body, ``body(args, first, last, scratch)``.

    The body may close over the integers only: they are the specialisation and the cache key.
    """
    return KernelFamily(build)


# ---------------------------------------------------------------- many kernels at once

_collected = threading.local()
Wanted = tuple[str, str, tuple[int, ...]]  # module, family, integers


@contextlib.contextmanager
def collecting() -> Iterator[dict[Wanted, None]]:
    """Kernels that this thread asks for inside, and the disk cache does not have, are listed and not compiled.

    What is returned for them has no code: it must not be run, or kept.
    """
    wanted: dict[Wanted, None] = {}
    around, _collected.kernels = getattr(_collected, "kernels", None), wanted
    try:
        yield wanted
    finally:
        _collected.kernels = around


# ---------------------------------------------------------------- threads

# void (*)(void *fn, char **args, size_t *dims, size_t *steps, void *data, size_t inner, size_t arrays, int threads)
_PARALLEL_FOR = ctypes.CFUNCTYPE(
    None,
    ctypes.c_int64,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_void_p,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int64,
    ctypes.c_int,
)


@dataclass(frozen=True)
class ThreadingLayer:
    """Numba's running layer: its name, its entry point, whether calls may overlap, and the TBB that was loaded."""

    name: str
    parallel_for: Callable[..., None]
    concurrent: bool
    tbb: str | None = None


@functools.cache
def threading_layer() -> ThreadingLayer:
    """Start Numba's threading layer (tbb, else omp, else workqueue) and give its entry point.

    A layer that the user asked for, or that runs already, is left as it is.
    """
    from numba.np.ufunc import parallel

    global _foreign
    tbb = None
    with _lock:
        if parallel._threading_layer is None and str(config.THREADING_LAYER).lower() not in ("omp", "workqueue"):
            tbb = _load_tbb()
            _foreign = threading.current_thread() is not threading.main_thread()
        parallel._launch_threads()
    name = parallel.threading_layer()
    if name == "workqueue":
        warnings.warn(
            "blockconv: neither TBB nor OpenMP was found, so threads run on Numba's workqueue layer, "
            "which starts them about 80 times slower and one call at a time; 'pip install tbb' where a wheel exists",
            SlowPathWarning,
            stacklevel=2,
        )
    entry = _PARALLEL_FOR(llvm.address_of_symbol("numba_parallel_for"))
    return ThreadingLayer(name, entry, concurrent=name != "workqueue", tbb=tbb if name == "tbb" else None)


def parallel_for(worker: int, data: int, threads: int) -> None:
    """Run ``worker(_, dims, _, data)`` on up to `threads` threads of the layer, without the GIL."""
    layer = threading_layer()
    threads = min(threads, config.NUMBA_NUM_THREADS)  # the workqueue layer has no more places
    dims = (ctypes.c_int64 * 1)(threads)
    if layer.concurrent:
        layer.parallel_for(worker, None, dims, None, data, 0, 0, threads)
    else:
        with _workqueue:
            layer.parallel_for(worker, None, dims, None, data, 0, 0, threads)


_workqueue = threading.Lock()


def _load_tbb() -> str | None:
    """Load pip's TBB, which Numba does not find by itself; the path loaded, or None."""
    names = {"linux": "libtbb.so.12", "darwin": "libtbb.12.dylib", "win32": "tbb12.dll"}
    name = names.get(sys.platform)
    for directory in _tbb_directories() if name else ():
        path = os.path.join(directory, str(name))
        if os.path.exists(path):
            try:
                ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
                return path
            except OSError:
                continue
    return None


def _tbb_directories() -> Iterator[str]:
    import site

    for prefix in dict.fromkeys((sys.prefix, sys.base_prefix, site.getuserbase())):
        yield os.path.join(prefix, "lib")
        yield os.path.join(prefix, "Library", "bin")


_foreign = False  # TBB was started by another thread than the main one
stranded = False  # in a forked child whose threading layer is beyond use


def _after_fork() -> None:
    global _lock, _workqueue, stranded
    # TBB that another thread than the main one started is not made ready for a fork by Numba: a call may never end.
    stranded = stranded or _foreign
    _lock, _workqueue = threading.RLock(), threading.Lock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)
