"""How work runs that needs much stack, or makes much garbage."""

from __future__ import annotations

import contextlib
import gc
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from blockconv.core.errors import failing

_T = TypeVar("_T")

STACK = 16 << 20  # bytes, which LLVM's recursion and chains of imports never need


def on_own_stack(work: Callable[[], _T]) -> _T:
    """`work()` on a thread with a stack of its own, as the caller's may be too small.

    An exception of a signal handler waits until the work is done, so it stops no compiler halfway.
    """
    with ThreadPoolExecutor(1, "blockconv") as threads:
        before = threading.stack_size(STACK)  # for all threads to come
        try:
            done = threads.submit(work)
        except failing(RuntimeError):  # the system has no more threads, or Python ends
            return work()
        finally:
            threading.stack_size(before)
        return done.result()


@contextlib.contextmanager
def garbage_at_the_end() -> Iterator[None]:
    """Collect no garbage inside. At the end, collect the objects made inside, tens of thousands, but no older ones.

    Otherwise Python's collector promotes them, and visits all objects of the process again and again. In a process of
    200,000 objects this takes a fifth of a kernel's compile time, and more in larger ones.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
        gc.collect(0)
