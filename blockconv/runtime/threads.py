"""How many threads a call uses."""

from blockconv.core import target
from blockconv.core.checks import whole
from blockconv.core.errors import ArgumentError

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
