"""Programs of kernels, run on threads, and the memory that they work on."""

from blockconv.runtime.launcher import OWN_TABLE, Block, Buffer, Launch, Program
from blockconv.runtime.memory import Scratch, address_of, aligned_empty
from blockconv.runtime.pools import check_threads, get_num_threads, get_threading, set_num_threads, set_threading

__all__ = [
    "OWN_TABLE",
    "Block",
    "Buffer",
    "Launch",
    "Program",
    "Scratch",
    "address_of",
    "aligned_empty",
    "check_threads",
    "get_num_threads",
    "get_threading",
    "set_num_threads",
    "set_threading",
]
