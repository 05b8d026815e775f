"""The launcher: a program (a list of kernels with their arguments and tasks) run in one native call.

A program's ops run one after the other; the tasks of one op run on all threads. Each worker has
a range of the op's tasks of its own, so that what it read and wrote in the last run, or wrote in
the op before, is still in its own caches; it takes chunks of them from the range's counter, and
then chunks of the others' ranges. It waits until every task of the op is done before it goes on,
so a worker that never starts holds nobody up: the others take its chunks.

What a run needs (argument blocks, counters) is an *instance*, checked out for the call, so that
any number of threads may run one program at once.
"""

from __future__ import annotations

import ctypes
import functools
import math
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from blockconv import jit
from blockconv.checks import whole
from blockconv.emit import (
    call_kernel,
    fetch_add,
    load_acquire,
    load_i64,
    spin_pause,
    yield_processor,
)
from blockconv.errors import ArgumentError

__all__ = [
    "OWN_TABLE",
    "Block",
    "Buffer",
    "Op",
    "Program",
    "Scratch",
    "address_of",
    "aligned_empty",
    "check_threads",
    "get_num_threads",
    "set_num_threads",
]

LINE = 16  # int64s between two counters: 128 bytes, so that no two share a (pair of) cache lines
OP_WORDS = 5  # kernel, arguments, tasks, chunk, counters
WORTH = 12e-6  # seconds of work that a thread has to have: to wake it takes 6 µs, or 20 where its processor sleeps
SPINS = 2000  # polls before a waiting worker yields its processor; about 50 µs

Block = npt.NDArray[np.int64]


@dataclass(frozen=True)
class Buffer:
    """An argument that is an address, known only when the program runs: buffer number `index`, plus bytes."""

    index: int
    offset: int = 0


OWN_TABLE = Buffer(-1)  # in an op's arguments: the address of its own `Op.table`
_NO_TABLE: Block = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Op:
    """One kernel over `tasks` independent tasks.

    args: the kernel's argument block, int64s or `Buffer`s. chunk: tasks taken at a time.
    scratch: bytes a worker needs. table: read-only int64s that `OWN_TABLE` points to, which all runs share; as long as
    an image may be, so neither copied nor made of Python's numbers.
    """

    kernel: jit.Kernel
    args: tuple[int | Buffer, ...]
    tasks: int
    chunk: int = 1
    scratch: int = 0
    table: Block = field(default_factory=lambda: _NO_TABLE)

    def with_buffers(self, numbers: Mapping[int, int]) -> Op:
        """The same on other buffers: those that `numbers` names get new numbers."""

        def renamed(value: int | Buffer) -> int | Buffer:
            if isinstance(value, Buffer) and value.index in numbers:
                return Buffer(numbers[value.index], value.offset)
            return value

        return replace(self, args=tuple(map(renamed, self.args)))


@jit.kernel
def launch_worker():  # type: ignore[no-untyped-def]
    """One worker of a run. Called by Numba's threading layer, so the fourth argument is the run's record.

    record: ops, address of the op table, worker counter, scratch, scratch bytes a worker, workers.
    """

    def worker(unused_args, unused_dims, unused_steps, record):  # type: ignore[no-untyped-def]
        ops = load_i64(record, 0)
        table = load_i64(record, 1)
        workers = load_i64(record, 5)
        me = fetch_add(record + 8 * 2, 1)
        scratch = load_i64(record, 3) + me * load_i64(record, 4)
        for i in range(ops):
            op = table + i * (8 * OP_WORDS)
            tasks = load_i64(op, 2)
            chunk = load_i64(op, 3)
            done = load_i64(op, 4)
            for k in range(workers):
                owner = me + k if me + k < workers else me + k - workers
                taken = done + 8 * LINE * (1 + owner)
                start = tasks * owner // workers
                end = tasks * (owner + 1) // workers
                first = start + fetch_add(taken, chunk)
                while first < end:
                    last = min(first + chunk, end)
                    call_kernel(load_i64(op, 0), load_i64(op, 1), first, last, scratch)
                    fetch_add(done, last - first)
                    first = start + fetch_add(taken, chunk)
            spins = 0
            while load_acquire(done) < tasks:
                spins += 1
                if spins < SPINS:
                    spin_pause()
                else:
                    yield_processor()

    return worker


@jit.kernel
def launch_alone():  # type: ignore[no-untyped-def]
    """The same run by the calling thread alone: no counters. Called from Python, with the record only."""

    def alone(record, unused_first, unused_last, unused_scratch):  # type: ignore[no-untyped-def]
        table = load_i64(record, 1)
        scratch = load_i64(record, 3)
        for i in range(load_i64(record, 0)):
            op = table + i * (8 * OP_WORDS)
            call_kernel(load_i64(op, 0), load_i64(op, 1), 0, load_i64(op, 2), scratch)

    return alone


# A kernel has three arguments more, which `launch_alone` leaves alone: to convert them takes as long as the call.
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
_RECORD_WORDS = LINE


class _Instance:
    """The memory of one run: record, counters, op table, argument blocks, in one aligned block.

    An op's counters: tasks done, then the tasks taken of each worker's range.
    """

    def __init__(self, program: Program, workers: int) -> None:
        ops = program.ops
        self.workers = workers
        counters, lines = _RECORD_WORDS, (1 + workers if workers > 1 else 0)
        table = counters + lines * LINE * len(ops)
        block = aligned_empty(8 * (table + OP_WORDS * len(ops) + sum(len(op.args) for op in ops))).view(np.int64)
        block[:] = 0
        self.block: Block = block
        self.words = block.data  # in which one word is written faster than in the array
        self.address = base = address_of(block)
        self.counters = block[counters:table:LINE]
        block[0], block[1] = len(ops), base + 8 * table
        self.patches: list[tuple[int, int, int]] = []  # (word, buffer, offset)
        self.buffers: tuple[int, ...] | None = None  # that they were made for
        at = table + OP_WORDS * len(ops)
        for i, op in enumerate(ops):
            row = table + OP_WORDS * i
            block[row : row + OP_WORDS] = (
                op.kernel.address,
                base + 8 * at,
                op.tasks,
                op.chunk,
                base + 8 * (counters + lines * LINE * i),
            )
            for word, value in enumerate(op.args, start=at):
                if value is OWN_TABLE:
                    block[word] = address_of(op.table)
                elif isinstance(value, Buffer):
                    self.patches.append((word, value.index, value.offset))
                else:
                    block[word] = value
            at += len(op.args)


class Program:
    """An immutable list of ops, ready to run on any buffers.

    ``run(buffers)`` takes the addresses that the ops' `Buffer`s stand for. It is safe from any
    number of threads at once, and releases the GIL.

    seconds: about what a run takes on one thread; on how many it runs at most follows from that.
    """

    def __init__(self, ops: Sequence[Op], seconds: float = math.inf) -> None:
        self.ops = tuple(op for op in ops if op.tasks > 0)
        widest = max((-(-op.tasks // op.chunk) for op in self.ops), default=0)
        self.width = widest if seconds == math.inf else min(widest, max(1, int(seconds / WORTH)))
        self.scratch = -(-max((op.scratch for op in self.ops), default=0) // 128) * 128  # of a worker
        self._idle: list[_Instance] = []

    def run(self, buffers: Sequence[int], threads: int | None = None) -> None:
        if not self.ops:
            return
        if threads is None:
            threads = get_num_threads()
        if threads > self.width or jit.stranded:
            threads = 1 if jit.stranded else self.width
        try:
            instance = self._idle.pop()
        except IndexError:
            instance = None
        if instance is None or instance.workers != threads:
            instance = _Instance(self, threads)
        block = instance.words
        if (given := tuple(buffers)) != instance.buffers:
            instance.buffers = given
            for word, index, offset in instance.patches:
                block[word] = buffers[index] + offset
        if self.scratch:
            block[3], block[4] = _scratch.of(self.scratch * threads), self.scratch
        if threads == 1:
            _entry_alone()(instance.address)
        else:
            block[2], block[5] = 0, threads
            instance.counters[:] = 0
            jit.parallel_for(launch_worker().address, instance.address, threads)
        self._idle.append(instance)


@functools.cache
def _entry_alone() -> Callable[[int], object]:
    return _CALL(launch_alone().address)


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


_scratch = Scratch()


# ---------------------------------------------------------------- threads

_threads: int | None = None


def get_num_threads() -> int:
    """The most threads that a call uses: as set, else min(affinity, container quota, Numba's limit)."""
    return jit.default_threads() if _threads is None else _threads


def set_num_threads(n: int | None) -> None:
    """Set the most threads that a call uses, in this process and from all of its threads.

    n: an int from 1 to the size of Numba's thread pool (NUMBA_NUM_THREADS, by default the number of processors), or
        None for the default: the least of affinity, the container's quota and that pool. A call with little to do uses
        fewer. A compiled `Plan` keeps the number that it was compiled for.

    Raises ArgumentError for anything else.

    >>> import blockconv as bc
    >>> bc.set_num_threads(1)
    >>> bc.get_num_threads()
    1
    >>> bc.set_num_threads(None)
    """
    global _threads
    _threads = None if n is None else check_threads("set_num_threads", "n", n)


def check_threads(op: str, argument: str, n: object) -> int:
    """`n` as a number of threads. Raises ArgumentError unless it is an int that Numba's pool has threads for.

    Whoever is given a number of threads asks here before anything runs: a run for no threads, or for fewer, would
    start no worker, and leave its output as it found it.
    """
    from numba.core import config

    most = int(config.NUMBA_NUM_THREADS)
    number = whole(n)
    if number is None or not 1 <= number <= most:
        rule = f"has to be an int from 1 to {most} (the size of Numba's thread pool)"
        raise ArgumentError(op, argument, n, rule, "set NUMBA_NUM_THREADS before the first import for more")
    return number
