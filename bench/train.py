"""`python -m bench train`: steps of training in PyTorch, each way in a process of its own.

A step is the forward pass, the loss, the backward pass, and SGD with momentum. The model alone is compiled. Weights and
data are random and the same for each way, so that losses can be compared.

A result has the median of the steps in milliseconds with its interval, and the first step in seconds (compilation and
all). It has the losses of the first steps, and peak memory in MiB: of the timed steps, and of the whole process. The
peak of the steps includes what a compiler left in memory. So run twice before memory is compared: the second run finds
kernels on disk.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import math
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.table import Table

from .grid import Grid
from .timing import compare, time_once

__all__ = ["DTYPES", "WAYS", "Case", "line", "run_all", "table"]

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
DTYPES = ("float32", "bfloat16")
WARM_UP = 3  # steps before the timed ones
Result = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """One process: a network of `bench.trained`, one of the WAYS, autocast's type, and sizes."""

    name: str
    way: str
    dtype: str = "float32"
    threads: int = 1
    batch: int = 8
    size: int = 224


def run_all(cases: Sequence[Case], out: Path | None, *, rounds: int, timeout: float) -> Iterator[Result]:
    """The result of each case. Cases in `out` are not measured again."""
    known: dict[Case, Result] = {}
    if out is not None and out.exists():
        for one in map(json.loads, out.read_text(encoding="utf-8").splitlines()):
            known[Case(**{field: one[field] for field in asdict(cases[0])})] = one
    for case in cases:
        if case not in known:
            known[case] = asdict(case) | _in_process(case, rounds, timeout)
            if out is not None:
                with out.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(known[case]) + "\n")
        yield known[case]


def _in_process(case: Case, rounds: int, timeout: float) -> Result:
    command = [sys.executable, "-m", "bench.train", json.dumps(asdict(case)), str(rounds)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"more than {timeout:.0f} s"}
    for text in reversed(done.stdout.splitlines()):
        if text.startswith("{"):
            found: Result = json.loads(text)
            return found
    return {"failed": f"the process ended with {done.returncode}: {done.stderr[-300:]}"}


def line(one: Result) -> str:
    """A result in one line."""
    told = one.get("failed") or f"{one['ms']:.0f} ms, {one['steps_mib']:.0f} MiB, first {one['first']:.1f} s"
    return f"{one['name']:12} {one['way']:38} {one['dtype']:9} {one['threads']} threads: {told}"


def table(results: Sequence[Result]) -> Table:
    """Each result beside the best of eager and of Inductor with the same sizes, threads and type."""
    heads = (
        "module",
        "threads",
        "type",
        "way",
        "ms",
        "over eager",
        "over Inductor",
        "MiB",
        "of eager's",
        "second loss",
    )
    cells, done = [], [one for one in results if "ms" in one]
    for one in done:
        same = [each for each in done if all(each[key] == one[key] for key in ("name", "threads", "dtype", "size"))]
        eager, inductor = (
            min((each for each in same if each["way"].startswith(peer)), key=lambda each: each["ms"], default=None)
            for peer in ("eager", "inductor")
        )
        cells.append(
            (one["name"], str(one["threads"]), one["dtype"], one["way"], f"{one['ms']:.0f}",
             f"{eager['ms'] / one['ms']:.2f}" if eager else "", f"{inductor['ms'] / one['ms']:.2f}" if inductor else "",
             f"{one['steps_mib']:.0f}", f"{one['steps_mib'] / eager['steps_mib']:.2f}" if eager else "",
             f"{one['losses'][1]:.5g}")
        )  # fmt: skip
    return Grid("Steps of training", heads, cells, range(4)).table()


# ---------------------------------------------------------------- one process


def _step(case: Case) -> Callable[[], float]:
    """One step of training, which returns the loss."""
    import torch

    import blockconv as bc

    from .modules import FORMATS
    from .trained import NETWORKS

    compiled, form = WAYS[case.way]
    torch.set_num_threads(case.threads)
    bc.set_num_threads(case.threads)
    torch.manual_seed(0)
    model = NETWORKS[case.name]().train().to(memory_format=FORMATS[form])
    x = torch.randn(case.batch, 3, case.size, case.size).to(memory_format=FORMATS[form])
    labels = torch.randint(1000, (case.batch,))
    masks = torch.rand(case.batch, 1, case.size, case.size).round()
    optimizer = torch.optim.SGD(model.parameters(), 0.001, momentum=0.9)
    if case.way.startswith("ours"):
        importlib.import_module("blockconv.torch")  # which names the back end in a source tree that is not installed
    call = model if compiled is None else torch.compile(model, **compiled)
    mixed = torch.autocast("cpu", dtype=torch.bfloat16) if case.dtype == "bfloat16" else contextlib.nullcontext()

    def step() -> float:
        optimizer.zero_grad()
        with mixed:
            y = call(x)
        if y.dim() == 2:
            loss = torch.nn.functional.cross_entropy(y.float(), labels)
        else:
            loss = torch.nn.functional.binary_cross_entropy_with_logits(y.float(), masks)
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    return step


def _status(name: str) -> float:
    """MiB, by a line of this process's status."""
    for text in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
        if text.startswith(f"{name}:"):
            return int(text.split()[1]) / 1024
    return math.nan


def _measure(case: Case, rounds: int) -> Result:
    step = _step(case)
    losses: list[float] = []
    first = time_once(lambda: losses.append(step()))
    losses += [step() for _ in range(WARM_UP)]
    whole = _status("VmHWM")
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5", encoding="ascii")  # the peak counts from here
    timing = compare({"step": step}, rounds=rounds, warmup=1, setup={"step": gc.collect})["step"]
    return {
        "ms": timing.median * 1e-6,
        "low": timing.low * 1e-6,
        "high": timing.high * 1e-6,
        "first": first * 1e-9,
        "losses": losses,
        "steps_mib": _status("VmHWM"),
        "whole_mib": max(whole, _status("VmHWM")),
    }


if __name__ == "__main__":
    print(json.dumps(_measure(Case(**json.loads(sys.argv[1])), int(sys.argv[2]))))
