"""Memory that kernels work on: aligned arrays, their addresses, and each thread's own scratch."""

from __future__ import annotations

import ctypes
import threading

import numpy as np
import numpy.typing as npt

__all__ = ["Scratch", "address_of", "aligned_empty"]


def aligned_empty(nbytes: int, align: int = 128) -> npt.NDArray[np.uint8]:
    """`nbytes` uninitialised bytes, the first at a multiple of `align`."""
    raw = np.empty(nbytes + align, np.uint8)
    start = -address_of(raw) % align
    return raw[start : start + nbytes]


def _address_by_interface(array: npt.NDArray[np.generic]) -> int:
    return int(array.__array_interface__["data"][0])


def _address_by_object(array: npt.NDArray[np.generic]) -> int:
    """The array object's first field, as NumPy's C interface has it since its first release: 0.1 µs, not 1.3."""
    return _field_at(id(array) + _HEADER).value


_field_at, _HEADER = ctypes.c_size_t.from_address, object.__basicsize__
_probe = np.empty(1, np.uint8)
# The address of an array's first element, read-only or not.
address_of = (
    _address_by_object if _address_by_object(_probe) == _address_by_interface(_probe) else _address_by_interface
)


class Scratch(threading.local):
    """A thread's own memory, which grows and is kept."""

    def __init__(self) -> None:
        self.keep(np.empty(0, np.uint8))

    def keep(self, memory: npt.NDArray[np.uint8]) -> None:
        self.memory, self.size, self.address = memory, memory.nbytes, address_of(memory)

    def of(self, nbytes: int) -> int:
        """The address of at least so many bytes."""
        if nbytes > self.size:
            self.keep(aligned_empty(nbytes))
        return self.address

    def array(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """So many bytes, which the next call gives again."""
        self.of(nbytes)
        return self.memory[:nbytes]
