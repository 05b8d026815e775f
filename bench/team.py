"""Python threads that do the same thing at the same time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

__all__ = ["Team"]


class Team:
    """Python threads that do the same thing at the same time; the work has to release the GIL."""

    def __init__(self, threads: int) -> None:
        self.threads = threads
        self.pool = ThreadPoolExecutor(threads)
        self.barrier = threading.Barrier(threads)

    def __enter__(self) -> Team:
        return self

    def __exit__(self, *_: object) -> None:
        self.pool.shutdown()

    def each(self, work: Callable[[int], object]) -> Callable[[], None]:
        """A function that has every thread call `work(its number)`, and returns when all have."""

        def task(worker: int) -> None:
            self.barrier.wait()  # so that no thread takes two shares while another still starts
            work(worker)

        def run() -> None:
            if self.threads == 1:
                work(0)
            else:
                list(self.pool.map(task, range(self.threads)))

        return run
