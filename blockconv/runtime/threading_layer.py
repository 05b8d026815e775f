"""Numba's threading layer: which one runs, how it is started, and a parallel loop on it."""

from __future__ import annotations

import ctypes
import functools
import os
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import llvmlite.binding as llvm
from numba.core import config

from blockconv.core.errors import SlowPathWarning

__all__ = ["ThreadingLayer", "parallel_for", "threading_layer"]

_lock = threading.RLock()  # The layer is started by one thread.

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
