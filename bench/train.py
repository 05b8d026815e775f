"""`python -m bench train`: steps of training in PyTorch, each way in a process of its own, in turns.

A step is the forward pass, the loss, the backward pass, and SGD with momentum. The model alone is compiled. Weights and
data are random and the same for each way, so that losses can be compared.

After its first steps a process has as many processors as threads. With `--realtime`, timed steps run above all other
processes of the machine, so other work slows no way more than another. Beside its time an entry has:

- "losses": of the first steps. An entry whose second loss differs from eager's is wrong.
- "memory": the most bytes that the process has in memory during timed steps. This includes what a compiler left there,
  so measure twice before you compare: the second process finds kernels on disk. Any back end of `torch.compile` has
  Dynamo's modules in it, some 130 MB: of a small batch, eager's process is the smaller one.
- "start": of the first step, compilation and all, the "seconds", the "cpu" seconds of the process and its children, and
  how many "kernels" blockconv compiled. The pool of Inductor's compilers is no child that ended, so it is not counted.
- "optimizer" and "outside": shares of a step, of SGD and of all else that is in no plan. Only ours have "outside".
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import multiprocessing
import resource
import signal
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from blockconv.core import text

from . import machine
from .grid import markdown as markdown_table
from .measure import speedups
from .report import Column, best_speedup, short_title, speedup_text
from .results import FAILED, OK, WRONG, Case, Entry, seconds
from .run import Plan, conditions
from .standings import against, timed
from .timing import compare
from .workers import hang_up, own_threads, pin_threads, set_apart

__all__ = ["COLUMNS", "DTYPES", "WAYS", "markdown", "plans"]

WAYS: dict[str, tuple[dict[str, Any] | None, str]] = {  # what torch.compile is told, memory format of model and images
    "eager contiguous": (None, "contiguous"),
    "eager channels_last": (None, "channels_last"),
    "inductor contiguous": ({"backend": "inductor"}, "contiguous"),
    "inductor channels_last": ({"backend": "inductor"}, "channels_last"),
    "ours contiguous": ({"backend": "blockconv"}, "contiguous"),
    "ours channels_last": ({"backend": "blockconv"}, "channels_last"),
    "ours, rest by inductor, contiguous": ({"backend": "blockconv", "options": {"fallback": "inductor"}}, "contiguous"),
    "ours, rest by inductor, channels_last": (
        {"backend": "blockconv", "options": {"fallback": "inductor"}},
        "channels_last",
    ),
}
DTYPES = {"float32": 5e-3, "bfloat16": 5e-2}  # autocast's type: how far a second loss may be from eager's, relative
LOSSES = 4  # of an entry
SHARES = 3  # steps whose parts are timed one by one


def _of_eager(case: Case, entry: Entry) -> str:
    """Memory as a share of the faster eager way's."""
    eager = _fastest(case, "peer", "eager")
    return f"{entry['memory'] / eager['memory']:.2f}" if eager else ""


def _fastest(case: Case, role: str, first: str) -> Entry | None:
    """The fastest entry of a role whose name begins so."""
    return min((e for e in timed(case, role) if e["name"].startswith(first)), key=seconds, default=None)


COLUMNS = (
    Column("memory", lambda _, entry: text.megabytes(entry["memory"])),
    Column("of eager's", _of_eager),
    Column("first, CPU s", lambda _, entry: f"{entry['start']['cpu']:.1f}"),
    Column("kernels", lambda _, entry: str(entry["start"]["kernels"])),
    Column("SGD", lambda _, entry: f"{entry['optimizer']:.0%}"),
    Column("outside", lambda _, entry: f"{entry['outside']:.0%}" if "outside" in entry else ""),
    Column("times best peer", speedup_text),
)


def markdown(cases: Sequence[Case]) -> Iterator[str]:
    """The lines of a table: a row for each case with the fastest memory format of each library, and geometric means."""
    rows, means = [], {name: list[float]() for name in ("eager", "inductor", "best of all")}
    for case in cases:
        eager, inductor = (_fastest(case, "peer", name) for name in ("eager", "inductor"))
        ours = _fastest(case, "ours", "ours")
        best = best_speedup(case)  # in the same rounds
        ratios = {name: against(case, name) for name in means} | {
            "best of all": float(best["median"]) if best else None
        }
        for name, ratio in ratios.items():
            means[name] += [ratio] if ratio else []
        cells = [_ratio(ratio) for ratio in ratios.values()]
        if ours:
            start = ours["start"]
            cells += [_of_eager(case, ours), f"{start['cpu']:.1f}", start["kernels"]]
            cells += [f"{ours['optimizer']:.0%}", f"{ours['outside']:.0%}"]
        rows.append((short_title(case), case["params"]["threads"], *map(_ms, (eager, inductor, ours)), *cells))
    rows.append(
        ("geometric mean", *[""] * 4, *(_ratio(statistics.geometric_mean(m)) if m else "" for m in means.values()))
    )
    heads = ("step, ms", "threads", "eager", "Inductor", "blockconv", "times eager", "times Inductor", "times the best",
             "memory of eager's", "first step, CPU s", "kernels compiled", "SGD", "outside plans")  # fmt: skip
    return markdown_table(heads, [row + ("",) * (len(heads) - len(row)) for row in rows])


def _ms(entry: Entry | None) -> str:
    return f"{seconds(entry) * 1e3:.3g} ({entry['name'].rpartition(' ')[2]})" if entry else ""


def _ratio(ratio: float | None) -> str:
    return "" if ratio is None else f"**{ratio:.2f}**" if ratio < 1 else f"{ratio:.2f}"


@dataclass(frozen=True)
class Training:
    """The training of all ways of a case: a network of `bench.trained`, autocast's type, and sizes.

    realtime: steps are timed at real-time priority.
    """

    network: str
    dtype: str
    threads: int
    batch: int
    size: int
    realtime: bool


def plans(
    networks: Sequence[str],
    ways: Sequence[str],
    dtypes: Sequence[str],
    threads: Sequence[int],
    batch: int,
    size: int,
    timing: dict[str, Any],
    *,
    realtime: bool = False,
    lock: Path | None = None,
) -> list[Plan]:
    """A case for each network, type and number of threads, with every way in it.

    realtime: time steps at real-time priority, above all other processes.
    lock: a file that is locked while steps are timed, which other benchmarks of this machine lock too.
    """
    trainings = [
        Training(name, dtype, count, batch, size, realtime)
        for count in threads
        for dtype in dtypes
        for name in networks
    ]
    return [_plan(training, ways, timing, lock) for training in trainings]


def _plan(training: Training, ways: Sequence[str], timing: dict[str, Any], lock: Path | None) -> Plan:
    params, how = conditions(training.threads, timing, training.dtype)
    params = {"network": training.network, "batch": training.batch, "size": training.size, **params}
    title = f"{training.network}, {training.batch} images of {training.size}x{training.size}, {how}"
    wanted = {"ways": list(ways)}
    return Plan("train", title, params, lambda: _measure(training, ways, timing, lock), wanted)


def _measure(training: Training, ways: Sequence[str], timing: dict[str, Any], lock: Path | None) -> Case:
    workers = {way: _Worker(training, way) for way in ways}
    try:
        entries = [worker.begun() for worker in workers.values()]
        _judge(entries, DTYPES[training.dtype])
        right = {entry["name"]: workers[entry["name"]] for entry in entries if entry["verdict"] == OK}
        with machine.locked(lock):
            comparison = compare(right, **timing, min_time=0.0, warmup=1)
        for entry in entries:
            if entry["name"] in right:
                entry["timing"] = comparison[entry["name"]].to_json()
                entry |= right[entry["name"]].ask("facts")
    finally:
        for worker in workers.values():
            worker.close()
    return {"images": training.batch, "entries": entries, "speedups": speedups(entries, comparison), "others": None}


def _judge(entries: Sequence[Entry], tolerance: float) -> None:
    """Compare second losses, after one step of the optimizer, with eager's."""
    losses = {entry["name"]: entry["losses"][1] for entry in entries if "losses" in entry}
    expected = next((loss for name, loss in losses.items() if name.startswith("eager")), None)
    for entry in entries:
        if expected is not None and entry["name"] in losses:
            entry["error"] = abs(losses[entry["name"]] / expected - 1)
            if not entry["error"] <= tolerance:
                entry["verdict"] = WRONG


class _Worker:
    """The near end of a process that trains one way."""

    def __init__(self, training: Training, way: str) -> None:
        self.way = way
        context = multiprocessing.get_context("spawn")
        self.pipe, far_end = context.Pipe()
        self.process = context.Process(target=_serve, args=(far_end, training, way))
        self.process.start()
        far_end.close()

    def begun(self) -> Entry:
        """Its entry without a time, after the first steps; with a note if these failed."""
        role = "ours" if self.way.startswith("ours") else "peer"
        try:
            found = self.ask("begin")
        except RuntimeError as error:
            return {"name": self.way, "role": role, "verdict": FAILED, "note": str(error)}
        return {"name": self.way, "role": role, "verdict": OK, **found}

    def timed(self, calls: int, prime: int = 0, cold: bool = False) -> float:
        """Nanoseconds of `calls` steps. They last longer than `prime` is for."""
        return float(self.ask("timed", calls))

    def ask(self, method: str, *arguments: Any) -> Any:
        try:
            self.pipe.send((method, arguments))
            right, answer = self.pipe.recv()
        except (EOFError, ConnectionError):
            raise RuntimeError("its process ended; what it said is above") from None
        if not right:
            raise RuntimeError(answer)
        return answer

    def close(self) -> None:
        hang_up(self.pipe, self.process)


# The far end


def _serve(pipe: Connection, training: Training, way: str) -> None:
    """Answer until the pipe is closed."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the near end decides what an interrupt means
    desk = _Desk(training, way)
    try:
        while True:
            method, arguments = pipe.recv()
            try:
                answer = True, getattr(desk, method)(*arguments)
            except Exception as error:  # one way's failure must not end a run over many
                answer = False, f"{type(error).__name__}: {error}"[:500]
            pipe.send(answer)
    except (EOFError, ConnectionError):
        pass


class _Desk:
    """The requests that a worker answers."""

    def __init__(self, training: Training, way: str) -> None:
        self.training, self.way = training, way
        self.seconds = dict.fromkeys(("step", "optimizer", "plans"), 0.0)  # of the last step

    def begin(self) -> Entry:
        """The first steps: losses, and what the very first took."""
        self._prepare()
        began, cpu, losses = time.perf_counter(), _cpu_seconds(), [self.step()]
        start = {"seconds": time.perf_counter() - began, "cpu": _cpu_seconds() - cpu, "kernels": _compiled()}
        losses += [self.step() for _ in range(1, LOSSES)]
        processors = machine.processors(self.training.threads)
        pin_threads(processors)
        set_apart(processors)
        gc.collect()
        with contextlib.suppress(OSError):
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
        return {"losses": losses, "start": start}

    def timed(self, calls: int) -> int:
        gc.collect()
        with self._priority():
            began = time.perf_counter_ns()
            for _ in range(calls):
                self.step()
            return time.perf_counter_ns() - began

    def facts(self) -> Entry:
        """Memory, and shares of a step."""
        found = {"memory": machine.memory()["VmHWM"]}
        if ours := self.way.startswith("ours"):
            self._watch_plans()
        shares = []
        for _ in range(SHARES):
            with self._priority():
                self.step()
            shares.append({part: value / self.seconds["step"] for part, value in self.seconds.items()})
        optimizer, in_plans = (statistics.median(each[part] for each in shares) for part in ("optimizer", "plans"))
        return found | {"optimizer": optimizer} | ({"outside": 1 - optimizer - in_plans} if ours else {})

    def _prepare(self) -> None:
        """Make the model, and what a step reads."""
        import torch

        import blockconv as bc

        from .modules import FORMATS
        from .trained import NETWORKS

        given, (compiled, form) = self.training, WAYS[self.way]
        torch.set_num_threads(given.threads)
        bc.set_num_threads(given.threads)
        torch.manual_seed(0)
        model = NETWORKS[given.network]().train().to(memory_format=FORMATS[form])
        self.x = torch.randn(given.batch, 3, given.size, given.size).to(memory_format=FORMATS[form])
        self.labels = torch.randint(1000, (given.batch,))
        self.masks = torch.rand(given.batch, 1, given.size, given.size).round()
        self.optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
        if self.way.startswith("ours"):
            importlib.import_module("blockconv.torch")  # which names the back end in a tree that is not installed
        self.call = model if compiled is None else torch.compile(model, **compiled)
        mixed = torch.autocast("cpu", dtype=torch.bfloat16) if given.dtype == "bfloat16" else None
        self.mixed = mixed or contextlib.nullcontext()

    def step(self) -> float:
        """One step; its loss."""
        from torch.nn import functional

        began, self.seconds["plans"] = time.perf_counter(), 0.0
        self.optimizer.zero_grad()
        with self.mixed:
            y = self.call(self.x)
        if y.dim() == 2:
            loss = functional.cross_entropy(y.float(), self.labels)
        else:
            loss = functional.binary_cross_entropy_with_logits(y.float(), self.masks)
        loss.backward()
        reached = time.perf_counter()
        self.optimizer.step()
        found = float(loss.detach())
        ended = time.perf_counter()
        self.seconds |= {"step": ended - began, "optimizer": ended - reached}
        return found

    def _priority(self) -> contextlib.AbstractContextManager[None]:
        return machine.realtime(own_threads()) if self.training.realtime else contextlib.nullcontext()

    def _watch_plans(self) -> None:
        """Add up the seconds that plans take from now on."""
        from blockconv.frontends.torch.backend import Part

        run = Part.forward

        def forward(part: Any, *args: Any) -> Any:
            began = time.perf_counter()
            found = run(part, *args)
            self.seconds["plans"] += time.perf_counter() - began
            return found

        Part.forward = forward  # type: ignore[assignment, method-assign]


def _cpu_seconds() -> float:
    """The CPU seconds of this process, and of its children that ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _compiled() -> int:
    """How many kernels of blockconv's this process compiled."""
    from blockconv import jit

    families = [each for each in gc.get_objects() if type(each) is jit.KernelFamily]
    return sum(kernel.compiled for family in families for kernel in family._kernels.values())
