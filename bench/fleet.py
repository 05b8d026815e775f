"""`--scheduler ADDRESS`: a suite on the machines of Dask's workers, one case at a time on each machine.

Each case runs once on each kind of processor, and the machines of a kind share its cases. Dask carries cases to
machines and knows which machines are there. A machine that disappears loses its case, which runs again: on another
machine of its kind, or on the same one when it is back. On a machine, a case is the same command in a process of its
own, so everything is measured in one way.
"""

from __future__ import annotations

import argparse
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import dask
import distributed
from rich.console import Console

from blockconv.cli.arguments import Parser

from . import cpu, machine
from .results import Case, load
from .run import Job

__all__ = ["Exports", "Fleet"]

ATTEMPTS = 3  # machines that a case may lose
PATIENCE = 60.0  # seconds without a machine of a kind, after which its cases are given up
LOOK = 1.0  # seconds between two looks at who is there
HOST = "BLOCKCONV_BENCH_HOST"  # the machine's name in results, where its own is not to be used
# The process ends when its worker ends: the worker holds the other end of its standard input.
START = """
import os, sys, threading
threading.Thread(target=lambda: (os.read(0, 1), os._exit(1)), daemon=True).start()
from bench.__main__ import main
sys.exit(main())
"""


class Machine(NamedTuple):
    """Where a worker is: the name of its machine, and the folder of results of its kind of processor."""

    host: str
    kind: str


class Fleet:
    """The machines of a scheduler's workers, until `close`. kinds: of their processors, as folders of results.

    arguments: of the command that runs, as it was given.
    """

    def __init__(self, address: str, arguments: Sequence[str], console: Console) -> None:
        self.console, self.arguments = console, _without_output(arguments)
        self.client = distributed.Client(address, timeout=30, set_as_default=False)
        self._known: dict[str, Machine] = {}
        self._headed: set[tuple[str, str]] = set()
        self._look()
        self.kinds = sorted({there.kind for there in self._known.values()})
        if not self.kinds:
            raise ValueError(f"--scheduler: {address!r} has no workers: start one in a clone on each machine")
        hosts = Counter(there.kind for there in self._seats().values())
        for kind in self.kinds:
            console.print(f"{kind}: {hosts[kind]} machines", markup=False)

    def close(self) -> None:
        self.client.close()

    def __enter__(self) -> Fleet:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def measure(self, jobs: Sequence[Job], say: Callable[[str], None]) -> Iterator[tuple[Job, Case]]:
        """Each job with its case, as they come. A job that could not be measured is told of and left out."""
        waiting, running = list(jobs), dict[Any, tuple[Job, str]]()  # future: (job, address)
        lost, seen = Counter[int](), dict.fromkeys(self.kinds, time.monotonic())
        while waiting or running:
            seats = self._seats()
            for future in [future for future, (_, address) in running.items() if address not in seats]:
                job, _ = running.pop(future)
                future.cancel()
                lost[id(job)] += 1
                again = lost[id(job)] < ATTEMPTS
                self._tell(job, f"its machine disappeared; {'it runs again' if again else 'given up'}")
                waiting = [job, *waiting] if again else waiting
            busy = {address for _, address in running.values()}
            for address, there in seats.items():
                seen[there.kind] = time.monotonic()
                for job in [job for job in waiting if job.kind == there.kind and address not in busy][:1]:
                    waiting.remove(job)
                    running[self._start(job, address)] = job, address
            say(f"{len(running)} cases on {len(seats)} machines")
            for future in self._finished([*running]):
                job, _ = running.pop(future)
                if future.status == "finished":
                    yield job, self._result(job, *future.result())
                else:
                    self._tell(job, str(future.exception()))
            for job in [job for job in waiting if time.monotonic() - seen[job.kind] > PATIENCE]:
                waiting.remove(job)
                self._tell(job, f"no machine of this kind for {PATIENCE:.0f} s; given up")

    def _finished(self, running: Sequence[Any]) -> set[Any]:
        """The futures that are done. Waits a moment first."""
        if not running:
            time.sleep(LOOK)
            return set()
        try:
            with self.client.as_current():
                return set(distributed.wait(running, timeout=LOOK, return_when="FIRST_COMPLETED").done)
        except distributed.TimeoutError:
            return set()

    def _start(self, job: Job, address: str) -> Any:
        return self.client.submit(_case, self.arguments, job.plan.key, workers=[address], pure=False)

    def _result(self, job: Job, *given: Any) -> Any:
        """The case; the first one of a machine comes after the machine's record."""
        header, case = given
        if (case["host"], job.kind) not in self._headed:
            self._headed.add((case["host"], job.kind))
            job.results.head(header | {"command": list(self.arguments)})
        return case

    def _tell(self, job: Job, what: str) -> None:
        self.console.print(f"{job.plan.title}, {job.kind}: {what}", style="yellow", markup=False, soft_wrap=True)

    def _look(self) -> None:
        """Ask new workers where they are."""
        here = set(self.client.nthreads())
        new = [address for address in here if address not in self._known]
        found = self.client.run(_where, workers=new, on_error="ignore") if new else {}
        self._known = {address: at for address, at in (self._known | found).items() if address in here}

    def _seats(self) -> dict[str, Machine]:
        """One worker of each machine, which runs its cases."""
        self._look()
        first: dict[str, str] = {}
        for address, there in self._known.items():
            first.setdefault(there.host, address)
        return {address: self._known[address] for address in first.values()}


def _without_output(arguments: Sequence[str]) -> list[str]:
    """The arguments that a machine gets: all but the scheduler and the files of results."""
    here = Parser(add_help=False)
    for name in ("--scheduler", "--html"):
        here.add_argument(name)
    here.add_argument("--out", nargs="?")
    here.add_argument("--resume", action="store_true")
    return here.parse_known_args(list(arguments), argparse.Namespace())[1]


class Exports(Fleet):
    """The same for `bench lab --export`: a case is a network of the data set, measured on one machine.

    A job's plan has the arguments that are the network's own as `params`. What comes of it are files: {path: bytes}.
    """

    def _start(self, job: Job, address: str) -> Any:
        return self.client.submit(_exported, self.arguments, job.plan.params, workers=[address], pure=False)

    def _result(self, job: Job, *given: Any) -> Any:
        (files,) = given
        return files


# ---------------------------------------------------------------- on a machine


def _where() -> Machine:
    return Machine(os.environ.get(HOST) or platform.node(), cpu.folder(cpu.describe()))


def _case(arguments: Sequence[str], key: str) -> tuple[dict[str, Any], Case]:
    """(the header with this machine's record, the case), from the command in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "case.jsonl")
        _command([*arguments, "--case", key, "--out", str(out)])
        cases = load(out)
    host = _where().host
    header, case = cases[0][-1], cases[1][key]
    return header | {"machine": header["machine"] | {"host": host}}, case | {"host": host}


def _exported(arguments: Sequence[str], its: dict[str, Any]) -> tuple[dict[str, bytes]]:
    """The files of a network, from the command in a process of its own. its: arguments that replace the given ones."""
    with tempfile.TemporaryDirectory() as folder:
        own = [word for name, value in its.items() for word in (f"--{name}", str(value))]
        _command([*arguments, *own, "--export", folder])
        files = (path for path in Path(folder).rglob("*") if path.is_file())
        return ({str(path.relative_to(folder)): path.read_bytes() for path in files},)


def _command(arguments: Sequence[str]) -> None:
    """Run `python -m bench` in a process of its own; RuntimeError with the end of what it printed if it fails."""
    # Dask's nanny limits its workers to one thread of OpenMP; the command is told how many it may use.
    nannys = {**dask.config.get("distributed.nanny.pre-spawn-environ", {})}
    environment = {name: value for name, value in os.environ.items() if value != str(nannys.get(name))}
    with tempfile.TemporaryFile() as log:
        with subprocess.Popen(
            [sys.executable, "-c", START, *arguments],
            cwd=machine.ROOT, env=environment, stdin=subprocess.PIPE, stdout=log, stderr=log,
        ) as process:  # fmt: skip
            status = process.wait()
        if status:
            log.seek(0)
            text = log.read().decode(errors="replace")[-1000:]
            raise RuntimeError(f"python -m bench ended with status {status}: {text}")
