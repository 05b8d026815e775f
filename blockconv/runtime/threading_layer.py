"""Numba's threading layer: which one runs, how it is started, and a parallel loop on it.

The loop's entry point is a private symbol of Numba. Where Numba lacks it, Python threads run the loop.
"""

import ctypes
import functools
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

import llvmlite.binding as llvm

from blockconv.core import target
from blockconv.core.errors import UnsupportedError, ignoring, to_install, warn
from blockconv.core.heavy_work import on_own_stack
from blockconv.core.record import frozen

LAYERS = ("tbb", "omp", "workqueue")

_lock = threading.RLock()  # One thread starts the layer.

# void (*)(void *fn, char **args, size_t *dims, size_t *steps, void *data, size_t inner, size_t arrays, int threads)
_PARALLEL_FOR = ctypes.CFUNCTYPE(None, ctypes.c_int64, *(ctypes.c_void_p,) * 3, *(ctypes.c_int64,) * 3, ctypes.c_int)
_WORKER = ctypes.CFUNCTYPE(None, *(ctypes.c_void_p,) * 4)


@frozen
class ThreadingLayer:
    """Numba's running layer: its name, its entry point, whether calls may overlap, the most threads of a call, and the
    TBB that was loaded.

    "python" is not one of Numba's: each call starts Python threads.
    """

    name: str
    parallel_for: Callable[..., None]
    concurrent: bool
    most: int
    tbb: str | None = None


def asked() -> str | None:
    """The layer that the user named by NUMBA_THREADING_LAYER or `numba.config`; None where they named none."""
    name = str(target.numba_setting("THREADING_LAYER")).lower()
    return name if name in LAYERS else None


def running() -> str | None:
    """The layer that Numba runs; None before its first start."""
    numba = sys.modules.get("numba")
    with ignoring(AttributeError, ValueError):  # it is being imported, or has started none
        return None if numba is None else str(numba.threading_layer())
    return None


def threading_layer(wanted: str | None = None) -> ThreadingLayer:
    """Start Numba's threading layer (tbb, else omp, else workqueue) and give its entry point.

    It keeps a layer that already runs, or else starts the one that the user named. wanted: the only layer to accept.

    Raises UnsupportedError if `wanted` is not installed, or if Numba runs another one: a process starts only one layer.
    """
    with _lock:
        if running() is None:
            _start(wanted)
        layer = _running_layer()
    if wanted not in (None, layer.name):
        raise UnsupportedError(
            f"Numba's threading layer {wanted} is not available: {layer.name} runs, and a process starts only one; "
            f"choose it before the first call that uses several threads"
        )
    return layer


def _start(wanted: str | None) -> None:
    global _starter, _tbb
    # Importing Numba takes longer than all else at a process's start. Only calls on several threads need it.
    numba: Any = on_own_stack(lambda: importlib.import_module("numba"))
    config = numba.config
    before = config.THREADING_LAYER
    if (wanted or asked()) in (None, "tbb"):
        _tbb = load_tbb()
        _starter = threading.current_thread()
    try:
        if wanted is not None:
            config.THREADING_LAYER = wanted
        numba.get_num_threads()  # which starts the layer
    except ValueError as error:
        raise UnsupportedError(f"Numba's threading layer {config.THREADING_LAYER} is not available: {error}") from error
    finally:
        config.THREADING_LAYER = before  # the user's setting, for the whole process


@functools.cache
def _running_layer() -> ThreadingLayer:
    most = target.numba_setting("NUMBA_NUM_THREADS")
    name, symbol = running(), llvm.address_of_symbol("numba_parallel_for")
    if name is None or not symbol:
        from importlib.metadata import version  # which imports e-mail and sockets

        warn(
            f"blockconv: each call starts Python threads, which takes about 0.1 ms for each, because Numba "
            f"{version('numba')} hides its pool (it has no numba_parallel_for)"
        )
        return ThreadingLayer("python", _on_python_threads, concurrent=True, most=most)
    if name == "tbb":
        # When Python frees this module, Numba ends TBB, and waits for an empty task that TBB got at its start. A fork
        # loses the task if no thread of TBB took it, as on one processor: the wait would never end.
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(sys.modules["numba.np.ufunc.tbbpool"]))
    if name == "workqueue":
        warn(
            "blockconv: threads run on Numba's workqueue layer, because you chose it, or TBB and OpenMP are missing: "
            "it starts them about 80 times slower, and one call at a time; "
            + to_install("tbb", "TBB, if it exists for this platform")
        )
    return ThreadingLayer(name, _PARALLEL_FOR(symbol), name != "workqueue", most, tbb=_tbb if name == "tbb" else None)


def parallel_for(layer: ThreadingLayer, worker: int, data: int, threads: int) -> None:
    """Run ``worker(_, dims, _, data)`` on up to `threads` threads of the layer, without the GIL."""
    threads = min(threads, layer.most)  # the workqueue layer runs no more
    dims = (ctypes.c_int64 * 1)(threads)
    if layer.concurrent:
        _callers[threading.get_ident()] = threading.current_thread()
        layer.parallel_for(worker, None, dims, None, data, 0, 0, threads)
    elif isinstance(threading.current_thread(), threading._DummyThread):
        # Python did not start this thread, so it may be one of the queue's: a second loop there would end the process.
        _WORKER(worker)(None, None, None, data)
    else:
        with _workqueue:
            layer.parallel_for(worker, None, dims, None, data, 0, 0, threads)


def _on_python_threads(worker: int, args: None, dims: object, steps: None, data: int, *numbers: int) -> None:
    """Numba's entry point, on Python threads. Workers share all work, so it completes even if some do not start."""
    run = _WORKER(worker)
    others = [threading.Thread(target=run, args=(None, None, None, data)) for _ in range(numbers[-1] - 1)]
    started = []
    with ignoring(RuntimeError):  # the system has no more threads
        for thread in others:
            thread.start()
            started.append(thread)
    run(None, None, None, data)
    for thread in started:
        thread.join()


_workqueue = threading.Lock()
_tbb: str | None = None  # the TBB that was loaded


def load_tbb() -> str | None:
    """Load pip's TBB, which Numba does not find by itself; the path loaded, or None."""
    for path in tbb_libraries():
        with ignoring(OSError):
            ctypes.CDLL(path, ctypes.RTLD_GLOBAL)
            return path
    return None


def tbb_libraries() -> list[str]:
    """The files of pip's TBB."""
    import site

    names = {"linux": "lib/libtbb.so.12", "darwin": "lib/libtbb.12.dylib", "win32": "Library/bin/tbb12.dll"}
    prefixes = dict.fromkeys((sys.prefix, sys.base_prefix, site.getuserbase()))
    paths = [os.path.join(prefix, *names[sys.platform].split("/")) for prefix in prefixes if sys.platform in names]
    return [path for path in paths if os.path.exists(path)]


_starter = threading.main_thread()  # the thread that started TBB
_callers: dict[int, threading.Thread] = {}  # the threads that called the layer
stranded = False  # True in a forked child, where Numba runs a layer that the child must not call


def _before_fork() -> None:
    """Forget the callers that have ended: Numba makes TBB ready for a fork once only its starter's thread is left."""
    for ident, thread in [*_callers.items()]:
        if not _is_left(thread):
            del _callers[ident]


def _is_left(thread: threading.Thread) -> bool:
    """Whether the system still has a thread. The system keeps it longer than Python, and TBB releases it in between."""
    tasks, end = "/proc/self/task", time.monotonic() + 0.1
    task = f"{tasks}/{thread.native_id}"
    while not thread.is_alive() and os.path.exists(task) and time.monotonic() < end:
        time.sleep(1e-3)
    return thread.is_alive() or os.path.exists(task) or not os.path.exists(tasks)


def _after_fork() -> None:
    global _lock, _workqueue, stranded
    # If TBB was not ready for the fork, a call on it may never end. A fork by C code, as uWSGI's, skips `_before_fork`:
    # then ended callers count too. A child lacks OpenMP's threads, and Numba ends the child at its first call.
    unready = {threading.current_thread(), *_callers.values()} != {_starter}
    stranded = stranded or running() == "omp" or (running() == "tbb" and unready)
    _lock, _workqueue = threading.RLock(), threading.Lock()
    _callers.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_child=_after_fork)
