"""The pool of threads that calls run on: which one, for what reason, what changes it, and how many a call uses.

PyTorch's threads spin for a while after each of its operations. Threads of another pool then wait for a processor, so
where PyTorch is in the process, calls run on its own pool. It may be imported at any time, so each call looks whether
it is there: a lookup in `sys.modules`, until it is.
"""

import os
import threading
from collections.abc import Callable
from typing import Literal

from blockconv.core import target
from blockconv.core.checks import checked_word, whole
from blockconv.core.errors import ArgumentError, UnsupportedError, to_install, warn
from blockconv.core.record import frozen
from blockconv.runtime import openmp, threading_layer

POOLS = ("auto", "tbb", "openmp", "workqueue")
VARIABLE = "BLOCKCONV_THREADING"
# Its layers, by our names; "python" serves where Numba does not give its own away.
_OF_NUMBA = {"tbb": "tbb", "omp": "openmp", "workqueue": "workqueue", "python": "python"}
_WHY_LOST = "this process was forked from one with an OpenMP runtime, and has none of its threads"
_LAYER_OF = {name: layer for layer, name in _OF_NUMBA.items() if name in POOLS}


@frozen
class Pool:
    """A pool of threads, and how to run a worker on it.

    name: "tbb", "openmp", "workqueue", "python" (each call starts threads), or "none" where calls run on the calling
        thread alone.
    why: the reason that it was chosen, as a sentence.
    library: the file of its runtime, where it is known.
    launch: ``launch(worker, data, workers, team)`` runs a worker on up to `workers` threads. OpenMP starts `team`
        threads, and all but the first `workers` have to return at once. GNU's runtime ends threads if a region has
        fewer than the one before, and starts them again for the next.
    position: which of the worker's four parameters `data` is, counted from 0.
    until_torch: whether it has to be chosen anew once PyTorch is in the process.
    """

    name: str
    why: str
    library: str | None = None
    launch: Callable[[int, int, int, int], object] | None = None
    position: int = 0
    until_torch: bool = False
    concurrent: bool = True  # else calls of several Python threads take turns


def current() -> Pool:
    """The pool that a call on several threads runs on now. Starts it, where it does not run."""
    global _pool
    pool = _pool
    if pool is None or (pool.until_torch and openmp.torch_is_loaded()):
        with _lock:
            pool = _pool = _pool_of(*_asked())
    return pool


def get_threading() -> str:
    """The thread pool of the next call: "tbb", "openmp", "workqueue" or "python"; "none" without a pool.

    "python": each call starts threads, because Numba hides its pool.

    `set_threading` or BLOCKCONV_THREADING chooses it. "auto" may change when PyTorch is imported, and after a fork.
    This function starts the pool, like a call. `blockconv doctor` shows the reason for the choice.

    Raises ArgumentError if BLOCKCONV_THREADING is no name that `set_threading` takes, and UnsupportedError if its pool
    is not available.

    >>> import blockconv as bc
    >>> bc.get_threading() in ("tbb", "openmp", "workqueue")
    True
    """
    return current().name


def set_threading(pool: Literal["auto", "tbb", "openmp", "workqueue"]) -> None:
    """Choose the thread pool of calls, for all threads of this process.

    pool: one of
        "auto": PyTorch's OpenMP threads if PyTorch is loaded, else "tbb", or the first of the others that is found.
        PyTorch's threads spin for milliseconds after each of its operations. On another pool, a call of ours right
        after one may take twice as long.
        "tbb": Intel's Threading Building Blocks, through Numba. Needs the package `tbb`.
        "openmp": the loaded OpenMP runtime (PyTorch's first), else Numba's own.
        "workqueue": Numba's simplest pool. A call takes some 100 µs more, and calls of several Python threads take
        turns.

    Default: BLOCKCONV_THREADING, else NUMBA_THREADING_LAYER (its "omp" is "openmp" here), else "auto".

    Every pool gives the same bits. Every choice but "auto" starts its pool at once.

    You can change between "auto", a loaded OpenMP runtime and Numba's running layer at any time. Calls in flight end on
    their old pool. Numba starts only one layer in a process: after "tbb" starts, "workqueue" is not available, and vice
    versa. The same holds for "openmp" without a loaded runtime.

    A forked child has no threads of the OpenMP runtimes that were loaded before, and does not use them. Its calls run
    on TBB, or without TBB on the calling thread alone, with a `SlowPathWarning`.

    Raises ArgumentError for another name. Raises UnsupportedError if the pool is not installed, if Numba runs another
    layer, or in a forked child. The previous choice then stays.

    >>> import blockconv as bc
    >>> bc.set_threading("auto")
    """
    global _chosen, _pool
    name = _checked("pool", pool)
    with _lock:
        if name == "auto":
            _chosen, _pool = name, None
            return
        found = _pool_of(name, "set_threading")
        if found.name != name:
            raise UnsupportedError(f"set_threading: pool={pool!r}: is not available: {found.why}")
        _chosen, _pool = name, found


def _checked(argument: str, name: object) -> str:
    return checked_word("set_threading", argument, name, POOLS)


def _asked() -> tuple[str, str]:
    """(the name that was asked for, where)."""
    if _chosen is not None:
        return _chosen, "set_threading"
    if given := os.environ.get(VARIABLE):
        return _checked(VARIABLE, given.lower()), VARIABLE
    if layer := threading_layer.asked():
        return _OF_NUMBA[layer], "NUMBA_THREADING_LAYER"
    return "auto", ""


def _pool_of(name: str, by: str) -> Pool:
    """The pool of a name that was asked for `by` something; in a forked child one that is safe there."""
    torch = openmp.torch_is_loaded()
    if (runtime := _runtime_for(name)) is not None:
        parallel = runtime.parallel
        why = f"{by} asks for it" if name == "openmp" else "PyTorch is in this process, and uses it"
        return Pool(
            "openmp",
            why,
            runtime.path,
            lambda worker, data, workers, team: parallel(worker, data, team, 0),
            until_torch=not torch,
        )
    if threading_layer.stranded:
        return _alone("this process was forked from one with Numba's threads, and has none of them")
    wanted, why = _LAYER_OF.get(name), f"{by} asks for it"
    if name == "auto":
        why = "PyTorch's OpenMP runtime was not found" if torch else "PyTorch is not in this process"
    if _lost and wanted in (None, "omp"):
        # Numba's layer "omp" may be on one of the runtimes that are lost.
        wanted, why = threading_layer.running() or "tbb", _WHY_LOST
        try:
            threading_layer.threading_layer(wanted)
        except UnsupportedError:
            return _alone(f"{why}, and TBB was not found; {to_install('tbb', 'TBB')}")
    numba = threading_layer.threading_layer(wanted)
    return Pool(
        _OF_NUMBA[numba.name],
        why,
        numba.tbb,
        lambda worker, data, workers, team: threading_layer.parallel_for(numba, worker, data, workers),
        position=3,
        until_torch=name in ("auto", "openmp") and not torch,
        concurrent=numba.concurrent,
    )


def _runtime_for(name: str) -> openmp.Runtime | None:
    """The OpenMP runtime that a call is to run on; None where it is to run on Numba's layer."""
    runtime = openmp.of_process() if name == "openmp" else openmp.of_torch() if name == "auto" else None
    return None if runtime is None or os.path.realpath(runtime.path) in _lost else runtime


def _alone(why: str) -> Pool:
    warn(f"blockconv: calls run on one thread: {why}")
    return Pool("none", why)


_lock = threading.RLock()
_chosen: str | None = None  # by set_threading
_pool: Pool | None = None  # that calls run on, once one has
_lost: frozenset[str] = frozenset()  # files of the OpenMP runtimes that were loaded before this process was forked


def _after_fork() -> None:
    """A child has none of a runtime's threads, and GNU's runtime waits for them for ever."""
    global _lock, _pool, _lost
    _lock, _pool = threading.RLock(), None
    runtime = openmp.of_torch()
    files = [*openmp.loaded(), *([runtime.path] if runtime else [])]
    _lost |= frozenset(map(os.path.realpath, files))


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


# ---------------------------------------------------------------- how many


_threads: int | None = None


def get_num_threads() -> int:
    """The most threads that a call uses: the number of `set_num_threads`, else the smallest limit of this process.

    The limits are: the processors of its affinity, the container's quota (rounded, at least 1), NUMBA_NUM_THREADS, and
    the first number of OMP_NUM_THREADS. Launchers such as torchrun and Dask's nanny set OMP_NUM_THREADS=1 for their
    workers. The first call reads them once. `torch.set_num_threads` has no effect.
    """
    return target.default_threads() if _threads is None else _threads


def set_num_threads(n: int | None) -> None:
    """Set the most threads that a call uses, for all threads of this process.

    n: an int from 1 to the size of Numba's thread pool (NUMBA_NUM_THREADS, by default the number of processors). None
        restores the default of `get_num_threads`.

    A call with little work uses fewer threads. A compiled `Plan` keeps the number from its compilation.
    Raises ArgumentError for another value.

    >>> import blockconv as bc
    >>> bc.set_num_threads(1)
    >>> bc.get_num_threads()
    1
    >>> bc.set_num_threads(None)
    """
    global _threads
    _threads = None if n is None else check_threads("set_num_threads", "n", n)


def check_threads(op: str, argument: str, n: object) -> int:
    """`n` as a number of threads. Raises ArgumentError unless Numba's pool has so many threads.

    Every number of threads from a user is checked here before a run: a run on 0 threads would write no output.
    """
    most = int(target.numba_setting("NUMBA_NUM_THREADS"))
    number = whole(n)
    if number is None or not 1 <= number <= most:
        rule = f"has to be an int from 1 to {most} (the size of Numba's thread pool)"
        raise ArgumentError(op, argument, n, rule, "set NUMBA_NUM_THREADS before the first import for more")
    return number
