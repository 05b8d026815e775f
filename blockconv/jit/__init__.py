"""From a kernel's Python body to machine code, and where that is kept."""

from blockconv.jit.cache import cache_directory, disk_cache
from blockconv.jit.families import (
    Addressed,
    Kernel,
    KernelFamily,
    Wanted,
    collecting,
    kernel,
    telling,
    unrolled_kernel,
    unswitched_kernel,
)

__all__ = [
    "Addressed",
    "Kernel",
    "KernelFamily",
    "Wanted",
    "cache_directory",
    "collecting",
    "disk_cache",
    "kernel",
    "telling",
    "unrolled_kernel",
    "unswitched_kernel",
]
