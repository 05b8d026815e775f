"""How many threads a call uses."""

from __future__ import annotations

from numba import config

from blockconv.core import target
from blockconv.core.checks import whole
from blockconv.core.errors import ArgumentError

__all__ = ["check_threads", "get_num_threads", "set_num_threads"]

_threads: int | None = None


def get_num_threads() -> int:
    """The most threads that a call uses: as `set_num_threads` said, else the least of what limits this process.

    That is the least of: the processors that it may run on (affinity), the container's quota (rounded, at least 1),
    NUMBA_NUM_THREADS, and OMP_NUM_THREADS, of whose list the first number counts. Launchers of many processes, such as
    torchrun and Dask's nanny, set OMP_NUM_THREADS=1 for their workers. It is read once, at the first call; what
    `torch.set_num_threads` says does not count.
    """
    return target.default_threads() if _threads is None else _threads


def set_num_threads(n: int | None) -> None:
    """Set the most threads that a call uses, in this process and from all of its threads.

    n: an int from 1 to the size of Numba's thread pool (NUMBA_NUM_THREADS, by default the number of processors), or
        None for the default: the least of affinity, the container's quota, NUMBA_NUM_THREADS and OMP_NUM_THREADS. A
        call with little to do uses fewer. A compiled `Plan` keeps the number that it was compiled for.

    Raises ArgumentError for anything else.

    >>> import blockconv as bc
    >>> bc.set_num_threads(1)
    >>> bc.get_num_threads()
    1
    >>> bc.set_num_threads(None)
    """
    global _threads
    _threads = None if n is None else check_threads("set_num_threads", "n", n)


def check_threads(op: str, argument: str, n: object) -> int:
    """`n` as a number of threads. Raises ArgumentError unless it is an int that Numba's pool has threads for.

    Whoever is given a number of threads asks here before anything runs: a run for no threads, or for fewer, would
    start no worker, and leave its output as it found it.
    """
    most = int(config.NUMBA_NUM_THREADS)
    number = whole(n)
    if number is None or not 1 <= number <= most:
        rule = f"has to be an int from 1 to {most} (the size of Numba's thread pool)"
        raise ArgumentError(op, argument, n, rule, "set NUMBA_NUM_THREADS before the first import for more")
    return number
