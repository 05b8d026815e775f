"""When Python's garbage collector runs: not while much is made that soon goes."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Iterator


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
