"""Memory that kernels work on: aligned arrays, their addresses, and each thread's own scratch."""

import ctypes
import threading
from collections.abc import Callable
from typing import TypeVar

import numpy as np
import numpy.typing as npt

from blockconv.core.types import Array

T = TypeVar("T", bound=np.generic)
Empty = Callable[[int], npt.NDArray[np.uint8]]  # so many uninitialised bytes, aligned


ALIGNMENT = 128  # bytes: a pair of cache lines, which processors fetch together


def aligned_empty(nbytes: int) -> npt.NDArray[np.uint8]:
    """`nbytes` uninitialised bytes, the first at a multiple of `ALIGNMENT`."""
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -address_of(raw) % ALIGNMENT
    return raw[start : start + nbytes]


def aligned_like(array: Array) -> Callable[[], Array]:
    """Makes uninitialised arrays with the shape, strides and dtype of an array, which is dense in any order."""
    shape, strides, dtype, nbytes = array.shape, array.strides, array.dtype, array.nbytes
    return lambda: np.ndarray(shape, dtype, aligned_empty(nbytes), 0, strides)


def aligned_copy(array: npt.NDArray[T], empty: Empty = aligned_empty) -> npt.NDArray[T]:
    """A copy of an array, row-major, at a multiple of `ALIGNMENT`. empty: gives its memory."""
    kept = empty(array.nbytes).view(array.dtype).reshape(array.shape)
    kept[...] = array
    return kept


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


class Region:
    """Arrays that are kept one after another in few large pieces of memory.

    NumPy requests 2 MiB pages from Linux for arrays of 4 MiB and more. A run reads the weights of deep layers once. On
    small pages, each page takes an address translation anew, and no processor prefetches past a page's end. A
    convolution with 1 MB of weights takes 87 to 107 us on small pages, and 68 to 81 here.

    A region's memory is freed with its last array.
    """

    PIECE = 1 << 25  # bytes; what is not used yet takes none of the machine's memory

    def __init__(self) -> None:
        self._free = np.empty(0, np.uint8)

    def empty(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Uninitialised bytes, after the bytes of the call before if they fit."""
        taken = -(-nbytes // ALIGNMENT) * ALIGNMENT
        if taken > self._free.nbytes:
            self._free = aligned_empty(max(taken, self.PIECE))
        given, self._free = self._free[:nbytes], self._free[taken:]
        return given


class Scratch(threading.local):
    """A thread's own memory, which grows and is kept."""

    def __init__(self) -> None:
        self.keep(np.empty(0, np.uint8))

    def keep(self, memory: Array) -> None:
        """Give this memory from now on."""
        self.memory, self.size, self.given = memory, memory.nbytes, (address_of(memory), memory)

    def of(self, nbytes: int) -> tuple[int, Array]:
        """The address of at least so many bytes, and the array to hold in a local variable until the kernel has run.

        Python frees a daemon thread's own data as the process ends, even if its kernel runs, but no local variables.
        """
        if nbytes > self.size:
            self.keep(aligned_empty(nbytes))
        return self.given
