"""The launcher: a program (a list of kernels with their arguments and tasks) run in one native call.

A program's launches run one after the other. The tasks of one launch run on all threads. Each worker has its own range
of the launch's tasks. So its caches still hold what it read and wrote in the last run or in the launch before. It takes
chunks of its range by the range's counter, and then chunks of the others' ranges. It waits until every task of the
launch is done. A worker that never starts holds nobody up: the others take its chunks.

A run needs an *instance* (argument blocks, counters), which is checked out for the call. So any number of threads may
run one program at once.
"""

from __future__ import annotations

import ctypes
import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv import jit
from blockconv.core.checks import Pair
from blockconv.core.record import frozen
from blockconv.core.target import is_elsewhere
from blockconv.jit.arguments import Arguments, address, group, in_bytes, kernel_address, word
from blockconv.jit.ir import call_kernel, fetch_add, load_acquire, spin_pause, yield_processor
from blockconv.runtime import pools
from blockconv.runtime.memory import Scratch, address_of, aligned_empty
from blockconv.runtime.pools import get_num_threads

LINE = 16  # int64s between two counters: 128 bytes, so that no two share a (pair of) cache lines
GRAIN = 12e-6  # the least work of a thread, in seconds: to wake it takes 6 µs, or 20 µs if its processor sleeps
SPINS = 2000  # polls before a waiting worker yields its processor; about 50 µs

Block = npt.NDArray[np.int64]


@frozen
class Buffer:
    """An argument that is an address, known only when the program runs: buffer number `index`, plus bytes."""

    index: int
    offset: int = 0


def beyond(address: int | Buffer, by: int) -> int | Buffer:
    """An address, or a buffer, so many bytes further."""
    if not by:  # as most
        return address
    return address + by if isinstance(address, int) else Buffer(address.index, address.offset + by)


OWN_TABLE = Buffer(-1)  # in a launch's arguments: the address of its own `Launch.table`
_NO_TABLE: Block = np.empty(0, np.int64)


@dataclass(frozen=True, eq=False)
class Launch:
    """One kernel over `tasks` independent tasks.

    args: the kernel's argument block, int64s or `Buffer`s.
    chunk: tasks taken at a time.
    scratch: bytes a worker needs.
    table: read-only int64s that `OWN_TABLE` points to, which all runs share; as long as an image may be, so neither
        copied nor made of Python's numbers.
    """

    kernel: jit.Kernel
    args: tuple[int | Buffer, ...]
    tasks: int
    chunk: int = 1
    scratch: int = 0
    table: Block = field(default_factory=lambda: _NO_TABLE)

    @functools.cached_property
    def buffers_at(self) -> tuple[int, ...]:
        """Which of its arguments are `Buffer`s: few of a hundred words."""
        return tuple([k for k, value in enumerate(self.args) if isinstance(value, Buffer)])

    def with_addresses(self, address: Callable[[Buffer], int | Buffer]) -> Launch:
        """The same launch with what `address` gives for each buffer: its address, or another buffer."""
        args = [*self.args]
        for k in self.buffers_at:
            if args[k] is not OWN_TABLE:
                args[k] = address(args[k])  # type: ignore[arg-type]
        made = Launch(self.kernel, tuple(args), self.tasks, self.chunk, self.scratch, self.table)
        made.__dict__["buffers_at"] = tuple([k for k in self.buffers_at if isinstance(args[k], Buffer)])
        return made

    def placed(self, at: Sequence[int | Buffer]) -> Launch:
        """The same launch at these addresses, or on these buffers, one in place of each of its buffers."""
        return self.with_addresses(lambda buffer: beyond(at[buffer.index], buffer.offset))

    def with_buffers(self, numbers: Mapping[int, int]) -> Launch:
        """The same launch on other buffers: `numbers` maps old buffer numbers to new ones."""
        return self.with_addresses(lambda buffer: Buffer(numbers.get(buffer.index, buffer.index), buffer.offset))

    def with_offsets(self, offsets: Mapping[int, Pair]) -> Launch:
        """The same launch on other parts of its buffers.

        offsets: for each buffer that begins later, by how many bytes, and its size, which addresses keep to.
        """

        def moved(buffer: Buffer) -> Buffer:
            if buffer.index not in offsets:
                return buffer
            later, end = offsets[buffer.index]
            return Buffer(buffer.index, min(buffer.offset + later, end))

        return self.with_addresses(moved)


class Counter(Arguments):
    """A count that all workers share."""

    value = word("how many, so far")


class RunRecord(Arguments):
    """A run of a program, as its workers read it."""

    launches = word("how many launches there are")
    table = address("the launch table: a `LaunchEntry` for each")
    entered = group(Counter, "workers that have begun")
    scratch = address("the first worker's scratch")
    scratch_size = in_bytes("scratch of a worker")
    workers = word("how many may come")


class LaunchEntry(Arguments):
    """A launch of a run."""

    kernel = kernel_address("the kernel")
    args = address("its argument block")
    tasks = word("how many tasks there are")
    chunk = word("tasks that are taken at a time")
    counters = address("`LINE` words apart: tasks done, then the tasks taken of each worker's range")


@jit.kernel
def launch_worker(position):  # type: ignore[no-untyped-def]
    """One worker of a run. position: which parameter is the `RunRecord`'s address.

    It is 0 for OpenMP, which calls a worker with that alone, and 3 for Numba's threading layers.
    """

    def worker(first_parameter, unused_dims, unused_steps, fourth_parameter):  # type: ignore[no-untyped-def]
        record = fourth_parameter if position == 3 else first_parameter
        run = RunRecord(record)
        launches = run.launches
        table = LaunchEntry(run.table)
        workers = run.workers
        me = fetch_add(run.entered.address, 1)
        if me >= workers:  # An OpenMP team has its full size in each run, so that none of its threads ends.
            return
        scratch = run.scratch + me * run.scratch_size
        for i in range(launches):
            launch = table[i]
            tasks = launch.tasks
            chunk = launch.chunk
            done = launch.counters
            for k in range(workers):
                owner = me + k if me + k < workers else me + k - workers
                taken = done + 8 * LINE * (1 + owner)
                start = tasks * owner // workers
                end = tasks * (owner + 1) // workers
                # A write to a counter takes longer the more workers watch it: they read first, and add once a range.
                if start + load_acquire(taken) >= end:
                    continue
                first = start + fetch_add(taken, chunk)
                mine = 0
                while first < end:
                    last = min(first + chunk, end)
                    call_kernel(launch.kernel, launch.args, first, last, scratch)
                    mine += last - first
                    first = start + fetch_add(taken, chunk)
                if mine > 0:
                    fetch_add(done, mine)
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
    """The same run by the calling thread alone, without counters; called with the `RunRecord`'s address only."""

    def alone(run: RunRecord):  # type: ignore[no-untyped-def]
        table = LaunchEntry(run.table)
        scratch = run.scratch
        for i in range(run.launches):
            launch = table[i]
            call_kernel(launch.kernel, launch.args, 0, launch.tasks, scratch)

    return alone


# A kernel has three arguments more, which `launch_alone` leaves alone: to convert them takes as long as the call.
_CALL = ctypes.CFUNCTYPE(None, ctypes.c_void_p)

_RECORD_WORDS, _ENTRY_WORDS = LINE, LaunchEntry.nbytes // 8
# The words of a record that each run writes.
_ENTERED, _SCRATCH, _WORKERS = (RunRecord.fields[name].first for name in ("entered", "scratch", "workers"))


class Instance(jit.Addressed):
    """The memory of one run: record, counters, launch table, argument blocks, in one aligned block.

    A launch's counters: tasks done, then the tasks taken of each worker's range.
    """

    def __init__(self, program: Program, workers: int) -> None:
        launches, count = program.launches, len(program.launches)
        self.workers = workers
        counters, lines = _RECORD_WORDS, (1 + workers if workers > 1 else 0)
        table = counters + lines * LINE * count
        first = table + _ENTRY_WORDS * count
        block = aligned_empty(8 * (first + sum(len(launch.args) for launch in launches))).view(np.int64)
        block[:table] = 0
        self.block: Block = block
        self.words = block.data  # a word is written faster here than in the array
        self.address = base = address_of(block)
        self.counters = block[counters:table:LINE]
        entered = Counter(value=0)
        size = program.scratch
        record = RunRecord(
            launches=count, table=base + 8 * table, entered=entered, scratch=0, scratch_size=size, workers=workers
        )
        block[: len(record)] = record
        self.patches: list[tuple[int, int, int]] = []  # (a word's index, buffer, offset)
        self.buffers: tuple[int, ...] | None = None  # that the patches were made for
        entries: list[int] = []
        words: list[Any] = []
        for i, launch in enumerate(launches):
            entries += LaunchEntry(
                kernel=launch.kernel.address,
                args=base + 8 * (first + len(words)),
                tasks=launch.tasks,
                chunk=launch.chunk,
                counters=base + 8 * (counters + lines * LINE * i),
            )
            at = len(words)
            words += launch.args
            for k in launch.buffers_at:
                buffer: Any = launch.args[k]
                words[at + k] = address_of(launch.table) if buffer is OWN_TABLE else 0
                if buffer is not OWN_TABLE:
                    self.patches.append((first + at + k, buffer.index, buffer.offset))
        block[table:] = entries + words

    def use_scratch(self, address: int) -> None:
        """Workers have their scratch from this address on."""
        self.words[_SCRATCH] = address


class Program:
    """An immutable list of launches, ready to run on any buffers.

    ``run(buffers)`` takes the addresses that the launches' `Buffer`s stand for. It is safe from any
    number of threads at once, and releases the GIL.

    seconds: about how long a run takes on one thread. The largest number of threads follows from it.
    """

    def __init__(self, launches: Sequence[Launch], seconds: float = math.inf) -> None:
        self.launches = tuple(launch for launch in launches if launch.tasks > 0)
        widest = max((-(-launch.tasks // launch.chunk) for launch in self.launches), default=0)
        self.width = widest if seconds == math.inf else min(widest, max(1, int(seconds / GRAIN)))
        if is_elsewhere():
            self.width = 0  # the calling thread runs it, and then nothing runs
        self.scratch = -(-max((launch.scratch for launch in self.launches), default=0) // 128) * 128  # of a worker
        self._idle: list[Instance] = []

    def run(self, buffers: Sequence[int], threads: int | None = None) -> None:
        if not self.launches:
            return
        if threads is None:
            threads = get_num_threads()
        workers, pool = (threads if threads < self.width else self.width), None  # `min` takes longer
        if workers > 1:
            pool = pools.current()
            if pool.launch is None:
                workers = 1
        try:
            instance = self._idle.pop()
        except IndexError:
            instance = None
        if instance is None or instance.workers != workers:
            instance = Instance(self, workers)
        block = instance.words
        if (given := tuple(buffers)) != instance.buffers:
            instance.buffers = given
            for index, number, offset in instance.patches:
                block[index] = buffers[number] + offset
        if self.scratch:
            block[_SCRATCH], _held = _scratch.of(self.scratch * workers)
        if pool is None or pool.launch is None:
            _entry_alone()(instance.address)
        else:
            block[_ENTERED], block[_WORKERS] = 0, workers
            instance.counters[:] = 0
            pool.launch(launch_worker(pool.position).address, instance.address, workers, threads)
        self._idle.append(instance)


@functools.cache
def _entry_alone() -> Callable[[int], object]:
    return _CALL(launch_alone().address) if not is_elsewhere() else lambda record: None


_scratch = Scratch()
