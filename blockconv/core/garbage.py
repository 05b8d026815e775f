"""When Python's garbage collector runs: not while much is made that soon goes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator

__all__ = ["garbage_at_the_end"]


@contextlib.contextmanager
def garbage_at_the_end() -> Iterator[None]:
    """What is made inside, objects by the ten thousand, is young at the end, and collected without the rest.

    Else Python's collector promotes it, and visits all objects of the process again and again: a fifth of the time that
    a kernel takes to compile in a process of 200,000 objects, and more in larger ones.
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
