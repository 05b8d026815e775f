"""The OpenMP runtimes that this process has loaded: which they are, and a parallel region on one of them.

PyTorch's operations run on the threads of an OpenMP runtime, which spin for some milliseconds after each, on the
processors that the next call needs. Whoever calls PyTorch and blockconv in turns wants one pool for both.
"""

import ctypes
import os
import re
import sys
from collections.abc import Callable

from blockconv.core.errors import failing
from blockconv.core.record import frozen
from blockconv.core.target import read_fact

# GNU's, Intel's and LLVM's. All three have `GOMP_parallel`, which GCC's code calls for a parallel region.
_NAMES = ("libgomp", "libiomp5", "libomp")
# void GOMP_parallel(void (*worker)(void *), void *data, unsigned threads, unsigned flags)
_PARALLEL = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint)


@frozen
class Runtime:
    """An OpenMP runtime: its file, and ``parallel(worker, data, threads, 0)``, which runs ``worker(data)`` on each."""

    path: str
    parallel: Callable[[int, int, int, int], object]


def torch_is_loaded() -> bool:
    """Whether PyTorch's libraries are in this process. It is only a lookup, because each call needs it."""
    return "torch._C" in sys.modules


def of_torch() -> Runtime | None:
    """The runtime that PyTorch's own parallel regions run on; None without PyTorch, or where that is not OpenMP.

    The linker binds PyTorch to the process's global symbols first (LD_PRELOAD may put Intel's runtime there), then to
    the libraries that it was linked with. This function searches in the same order.
    """
    path = getattr(sys.modules.get("torch._C"), "__file__", None)
    return None if path is None else _runtime(None) or _runtime(path)


def of_process() -> Runtime | None:
    """PyTorch's runtime, else any other that is loaded."""
    return of_torch() or _runtime(None) or next((found for path in loaded() if (found := _runtime(path))), None)


def loaded() -> list[str]:
    """The files of the runtimes in this process, as far as the system tells."""
    return [file for file in mapped_files() if os.path.basename(file).startswith(_NAMES)]


def mapped_files() -> list[str]:
    """The files that are mapped into this process, libraries among them, as far as the system tells: Linux does."""
    return list(dict.fromkeys(re.findall("/.*", read_fact("/proc/self/maps"))))


def _runtime(path: str | None) -> Runtime | None:
    """The runtime that a library has, or was linked with; of None, what is global in the process. It loads nothing."""
    mode = getattr(os, "RTLD_NOLOAD", None)
    if mode is None:  # on Windows, where PyTorch's runtime is Microsoft's or Intel's, without GNU's entry
        return None
    try:
        address = ctypes.cast(ctypes.CDLL(path, mode | os.RTLD_LAZY).GOMP_parallel, ctypes.c_void_p).value
    except failing(OSError, AttributeError):
        return None
    return Runtime(_file_of(address) or "unknown", _PARALLEL(address)) if address else None


def _file_of(address: int) -> str | None:
    """The file of the library that contains an address."""
    info = (ctypes.c_char_p * 4)()  # Dl_info: the file, its address, the symbol, its address
    try:
        found = ctypes.CDLL(None).dladdr(ctypes.c_void_p(address), info)
    except AttributeError:
        return None
    return os.fsdecode(info[0]) if found and info[0] else None
