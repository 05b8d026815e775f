"""The compiler of kernels: from a Python body to machine code, and the cache of this code."""

from blockconv.jit.cache import cache_directory as cache_directory
from blockconv.jit.cache import disk_cache as disk_cache
from blockconv.jit.families import Addressed as Addressed
from blockconv.jit.families import Kernel as Kernel
from blockconv.jit.families import KernelFamily as KernelFamily
from blockconv.jit.families import Wanted as Wanted
from blockconv.jit.families import collecting as collecting
from blockconv.jit.families import kernel as kernel
from blockconv.jit.families import telling as telling
from blockconv.jit.families import unrolled_kernel as unrolled_kernel
from blockconv.jit.families import unswitched_kernel as unswitched_kernel
