"""Memory between two pages that no one may touch: a kernel that reads or writes past its arrays dies there."""

from __future__ import annotations

import ctypes
import mmap
import sys
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.runtime import address_of

PAGE = mmap.PAGESIZE
CANARY = 0xA5
WINDOW = 4096  # bytes on the open side of an array that are looked at afterwards

Bytes = npt.NDArray[np.uint8]


def available() -> bool:
    return sys.platform.startswith(("linux", "darwin"))


class Guarded:
    """`size` bytes with a page that cannot be read or written before them, and one after.

    `take(n, "end")` gives n bytes that end at the last page, `take(n, "start")` n that start after the first.
    The other side of them is open, and holds canaries: `intact()` says whether they still live.
    """

    def __init__(self, size: int) -> None:
        self.size = -(-size // PAGE) * PAGE
        self._map = mmap.mmap(-1, self.size + 2 * PAGE)
        anchor = (ctypes.c_char * len(self._map)).from_buffer(self._map)
        base = ctypes.addressof(anchor)
        self.bytes: Bytes = np.frombuffer(self._map, np.uint8)[PAGE:-PAGE]
        libc = ctypes.CDLL(None, use_errno=True)
        for page in (base, base + PAGE + self.size):
            if libc.mprotect(ctypes.c_void_p(page), PAGE, 0):
                raise OSError(ctypes.get_errno(), "mprotect")
        self._libc, self._base, self._anchor = libc, base, anchor
        self._around = slice(0, 0)

    def take(self, nbytes: int, where: str) -> Bytes:
        first = self.size - nbytes if where == "end" else 0
        self._around = (
            slice(max(0, first - WINDOW), first) if where == "end" else slice(nbytes, min(self.size, nbytes + WINDOW))
        )
        self.bytes[self._around] = CANARY
        return self.bytes[first : first + nbytes]

    def intact(self) -> bool:
        return bool((self.bytes[self._around] == CANARY).all())


def run_on_pages(program: Any, buffers: list[npt.NDArray[Any]], at: str, threads: int) -> list[npt.NDArray[Any]]:
    """Run a program on copies of its buffers between such pages, and give these. at: as `Guarded.take` says."""
    memories = [Guarded(array.nbytes) for array in buffers]
    there = [m.take(a.nbytes, at).view(a.dtype) for m, a in zip(memories, buffers, strict=True)]
    for to, array in zip(there, buffers, strict=True):
        to[:] = array.reshape(-1)
    program.run([address_of(each) for each in there], threads)
    assert all(memory.intact() for memory in memories)
    return there


def last_line(run_python: Any, arguments: list[str]) -> str:
    """Run a script that touches guarded memory, and give the last line that it prints; its last case if it dies."""
    done = run_python(arguments, status=None)
    last: list[str] = done.stdout.splitlines()[-1:]
    assert done.returncode == 0, f"status {done.returncode} at {last}\n{done.stderr[-4000:]}"
    return last[0]
