"""Each library in a process of its own, pinned to as many processors as it may use.

In one process libraries change each other. Two of them share a TBB, whose threads then work for a
library that was told to use one (OpenVINO ran at twice its speed beside Numba). They share an
allocator. The spinning threads of one take the processors of the next. A worker without a request
sleeps in a read of its pipe. It takes its samples by itself, so the pipe is no part of any time.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import multiprocessing
import os
import signal
import threading
import traceback
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np

from blockconv.core.errors import BlockconvError

from . import machine, peers
from .peers import OURS, Variant
from .timing import Local

__all__ = ["Crew", "PeerError", "hang_up", "own_threads", "pin_threads", "pinned", "set_apart"]


class PeerError(RuntimeError):
    """An error in a worker, with the name of the error there."""


class Crew:
    """The workers of a run, one for each library and number of threads, kept until `close`.

    versions: of the libraries that could be imported. missing: of the others, why not.
    realtime: the workers take their samples at real-time priority, above all other processes.
    lock: a file that is locked during `turn`, which other benchmarks of this machine lock too.
    """

    def __init__(
        self, names: Sequence[str], threads: Sequence[int] = (1,), *, realtime: bool = False, lock: Path | None = None
    ) -> None:
        self.lock = lock
        self.versions: dict[str, str] = {}
        self.missing: dict[str, str] = {}
        self._workers: dict[tuple[str, int], _Worker] = {}
        started = {(name, count): _Worker(name, count, realtime) for count in threads for name in names}
        for (name, count), worker in started.items():
            try:
                self.versions[name] = worker.answer()
            except PeerError as error:
                self.missing[name] = str(error)
                worker.close()
            else:
                self._workers[name, count] = worker

    def contenders(self, op: str, *arguments: Any, threads: int, ours: Sequence[Any] = ()) -> list[Variant]:
        """All variants of an operation, built anew; the last ones are forgotten. ours: for our module alone."""
        self.clear()
        found = []
        for name in self.versions:
            found += self.variants(name, op, *arguments, *(ours if name == OURS else ()), threads=threads)
        return found

    def variants(self, name: str, op: str, *arguments: Any, threads: int) -> list[Variant]:
        """A library's variants of an operation, built in its worker; `arguments` as its module takes them.

        A library that fails at it has one variant, which says so when it is called.
        """
        worker = self._workers.get((name, threads))
        if worker is None:
            return []
        try:
            found = worker.ask("build", op, *arguments, threads)
        except PeerError as error:
            return [_failed(name, self.versions[name], error)]
        return [replace(variant, **_handles(worker, handle, variant)) for handle, variant in found]

    def copies(self, nbytes: int, expected: np.ndarray, threads: int) -> list[Variant]:
        """Copies that read and write so many bytes in all: the roof of what only moves memory.

        One is right if it copied; that is fetched as what the others are expected to give.
        """
        given = np.arange(nbytes // 8, dtype=np.float32)

        def judged(copy: Variant) -> Variant:
            def fetch() -> np.ndarray:
                return expected if np.array_equal(copy.fetch(), given) else np.full_like(expected, np.nan)

            return replace(copy, fetch=fetch)

        found = [self.variants(name, "plain_copy", given, threads=threads) for name in self.versions]
        return [judged(copy) for copies in found for copy in copies]

    def wanted(self, layouts: Sequence[str] = ()) -> dict[str, list[str]]:
        """The names of layouts and libraries that a case of this crew has to have."""
        ours = {"layouts": list(layouts)} if layouts else {"ours": [OURS] if OURS in self.versions else []}
        return {**ours, "peers": [name for name in self.versions if name != OURS]}

    def turn(self) -> contextlib.AbstractContextManager[None]:
        """No other benchmark that takes the same lock measures meanwhile."""
        return machine.locked(self.lock)

    def clear(self) -> None:
        """Forget every variant, before the next problem."""
        for worker in self._workers.values():
            with contextlib.suppress(PeerError):  # one that ended says so when it is next asked for something
                worker.ask("clear")

    def close(self) -> None:
        for worker in self._workers.values():
            worker.close()
        self._workers.clear()

    def __enter__(self) -> Crew:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass(frozen=True)
class Remote:
    """A function of a variant in a worker: `compare` has it timed there."""

    worker: _Worker
    handle: int
    part: str

    def __call__(self) -> None:
        self.timed(1)

    def timed(self, calls: int, prime: int = 0, cold: bool = False) -> float:
        """Nanoseconds of `calls` calls, after `prime` untimed ones and, if `cold`, a flush of the caches."""
        return float(self.worker.ask("timed", self.handle, self.part, calls, prime, cold))


def _failed(name: str, version: str, error: PeerError) -> Variant:
    def fail() -> np.ndarray:
        raise error

    return Variant(name, fail, fail, "ours" if name == OURS else "peer", version)


PARTS = ("function", "reorder_in", "reorder_out")


def _handles(worker: _Worker, handle: int, variant: Variant) -> dict[str, Any]:
    parts = {part: Remote(worker, handle, part) for part in PARTS if getattr(variant, part)}
    about = {"about": lambda: worker.ask("about", handle)} if variant.about else {}
    return {"fetch": lambda: worker.ask("fetch", handle), **about, **parts}


class _Worker:
    """The near end of a worker."""

    def __init__(self, name: str, threads: int, realtime: bool) -> None:
        context = multiprocessing.get_context("spawn")  # a fork would take our threads' locks along
        self.pipe, far_end = context.Pipe()
        arguments = far_end, name, machine.processors(threads), realtime
        self.process: BaseProcess = context.Process(target=_serve, args=arguments, daemon=True)
        with pinned(machine.processors(threads)):  # what counts the processors at its import counts these
            self.process.start()
        far_end.close()

    def ask(self, method: str, *arguments: Any) -> Any:
        with contextlib.suppress(ConnectionError):  # if it ended, `answer` says so
            self.pipe.send((method, arguments))
        return self.answer()

    def answer(self) -> Any:
        try:
            right, answer = self.pipe.recv()
        except (EOFError, ConnectionError) as error:
            self.process.join(5)
            raise PeerError(f"its process ended (status {self.process.exitcode})") from error
        if not right:
            raise PeerError(answer)
        return answer

    def close(self) -> None:
        hang_up(self.pipe, self.process)


def hang_up(pipe: Connection, process: BaseProcess) -> None:
    """End a process that serves a pipe until it is closed."""
    pipe.close()
    process.join(2)
    if process.is_alive():
        process.kill()
        process.join()


@contextlib.contextmanager
def pinned(processors: Sequence[int]) -> Iterator[None]:
    """This thread on these processors, which a process that is started meanwhile inherits."""
    before = machine.affinity()
    machine.pin(processors)
    try:
        yield
    finally:
        machine.pin(before)


# The far end


def _serve(pipe: Connection, name: str, processors: Sequence[int], realtime: bool) -> None:
    """Answer until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the near end decides what an interrupt means
    machine.pin(processors)
    machine.keep_freed_memory()
    try:
        found, missing = peers.load([name])
        if missing:
            pipe.send((False, missing[name]))
            return
        desk = _Desk(found[0], processors, realtime)
        pipe.send((True, found[0].version))
        while True:
            method, arguments = pipe.recv()
            try:
                answer = True, getattr(desk, method)(*arguments)
            except Exception as error:  # the failure of one variant is no end of the worker
                answer = False, _why(error)
            pipe.send(answer)
    except (EOFError, ConnectionError):
        pass


def _why(error: Exception) -> str:
    """An error as one line; where it was raised too, unless it is one of ours, which says all."""
    text = f"{type(error).__name__}: {error}"
    place = traceback.extract_tb(error.__traceback__)[-1]
    if isinstance(error, BlockconvError) or place.filename.startswith("<"):  # the interpreter's own
        return text
    return f"{text} ({Path(place.filename).name}, line {place.lineno})"


class _Desk:
    """The requests that a worker answers."""

    def __init__(self, peer: peers.Peer, processors: Sequence[int], realtime: bool) -> None:
        self.peer, self.processors, self.realtime = peer, processors, realtime
        self.variants: list[Variant] = []
        self.apart: set[int] = set()  # handles

    def build(self, op: str, *arguments: Any) -> list[tuple[int, Variant]]:
        """(handle, variant with marks instead of functions) of each variant."""
        pin_threads(self.processors)
        made = self.peer.variants(op, *arguments)
        first = len(self.variants)
        self.variants += made
        gc.collect()
        gc.freeze()
        gc.disable()
        marks: list[dict[str, Any]] = [
            {part: getattr(v, part) and abs for part in (*PARTS, "fetch", "about")} for v in made
        ]
        return [(first + i, replace(v, **m)) for i, (v, m) in enumerate(zip(made, marks, strict=True))]

    def timed(self, handle: int, part: str, calls: int, prime: int, cold: bool) -> float:
        flush = functools.partial(machine.flush_caches, self.processors)
        local = Local(getattr(self.variants[handle], part), flush=flush)
        if prime and handle not in self.apart:  # it has been called by now, and has its threads
            set_apart(self.processors)
            self.apart.add(handle)
        with machine.realtime(own_threads()) if self.realtime else contextlib.nullcontext():
            return local.timed(calls, prime, cold)

    def fetch(self, handle: int) -> np.ndarray:
        return np.ascontiguousarray(self.variants[handle].fetch())

    def about(self, handle: int) -> dict[str, Any]:
        about = self.variants[handle].about
        return about() if about else {}

    def clear(self) -> None:
        self.variants.clear()
        self.apart.clear()
        gc.enable()
        gc.unfreeze()
        gc.collect()


def own_threads() -> list[int]:
    """The threads of this process; none where the system does not say."""
    return [int(path.name) for path in Path("/proc/self/task").glob("*")]


def pin_threads(processors: Sequence[int]) -> None:
    """Keep all threads of this process to these processors; new threads inherit it from their starter."""
    for thread in own_threads():
        _pin_thread(thread, processors)


def set_apart(processors: Sequence[int]) -> None:
    """Give the calling thread the first processor, and all others the rest.

    A thread that wakes is often put on its waker's processor, and they share it for milliseconds, or
    for good: a sample on two threads was then as slow as on one, or six times as slow. In every
    library here the thread that calls works too.
    """
    if len(processors) > 1:
        for thread in own_threads():
            _pin_thread(thread, processors[:1] if thread == threading.get_native_id() else processors[1:])


def _pin_thread(thread: int, processors: Sequence[int]) -> None:
    if hasattr(os, "sched_setaffinity"):
        with contextlib.suppress(OSError):  # it has ended
            os.sched_setaffinity(thread, processors)
