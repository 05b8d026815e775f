"""`python -m bench manifest`: what kernels do and give, case by case, so that two trees of the code can be compared.

A line for each case has the row of the kernel table that is taken, its blocking and its ops' tasks. It has a digest of
each kernel's stripped assembly, and one of the output's bits. Code that is moved or renamed leaves the file as it was,
but for the names of kernels. The machine that makes the file matters only by the instruction sets it can run. Numba
compiles for fixed processors (`TARGETS`), and choices are made for caches of fixed sizes.
"""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import llvmlite.binding as llvm
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from . import machine
from .manifest_cases import BATCH, MOST_MACS, Direct, Node, Plan, Reorder, cases, left_out, rows_in_reach
from .manifest_worker import THREADS, Job

__all__ = ["FORMAT", "QUICK", "TARGETS", "Target", "load", "make", "write"]

FORMAT = 1
ROOT = Path(__file__).parents[1]
SECOND_LEVEL_CACHE, LAST_LEVEL_CACHE = 1 << 20, 32 << 20  # bytes that choices are made for, on every machine
PARTS = (
    (Plan.__name__,),
    (Node.__name__, Direct.__name__, Reorder.__name__),
)  # what one process does; the longest to start with first
PACKAGES = ("numpy", "numba", "llvmlite", "onnx")
Record = dict[str, Any]


class Target(NamedTuple):
    """A processor to compile for, by LLVM's names. needs: more features that a machine has to have to run the code."""

    cpu: str
    features: tuple[str, ...]
    needs: tuple[str, ...] = ()

    def runs(self, available: Mapping[str, bool]) -> bool:
        """Whether a machine of these features runs the code."""
        return all(available.get(name, False) for name in (*self.features, *self.needs))


_AVX512 = ("avx2", "fma", "avx512f", "avx512dq", "avx512vl", "avx512bw")
# The widest first. Features are named because blockconv goes by them (`target.isa`), not by the processor alone.
TARGETS = {
    "avx512": Target("skylake-avx512", _AVX512, ("avx512cd",)),
    "avx512-zen4": Target("znver4", _AVX512, ("avx512vbmi2", "avx512vnni", "avx512bf16", "avx512bitalg", "gfni")),
    "avx2": Target("haswell", ("avx2", "fma"), ("bmi2", "lzcnt", "movbe")),
    "sse": Target("nehalem", ("sse4.2",), ("popcnt",)),
}
QUICK = ("avx512", "avx2", "sse")


# ---------------------------------------------------------------- making one


def make(
    isas: Iterable[str],
    console: Console,
    quick: bool = False,
    only: str = "",
    processes: int = 1,
    assembly: Path | None = None,
    caches: tuple[int, int] = (SECOND_LEVEL_CACHE, LAST_LEVEL_CACHE),
) -> tuple[Record, list[Record]]:
    """(the header, the records in the order of their keys). caches: bytes of the second level and of the last."""
    available = llvm.get_host_cpu_features()
    runs = {name: TARGETS[name].runs(available) for name in isas}
    where = None if assembly is None else str(assembly.resolve())
    jobs = [Job(isa, runs[isa], parts, quick, only, *caches, where) for parts in PARTS for isa in runs]
    columns = TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn()
    with (
        tempfile.TemporaryDirectory(prefix="blockconv-manifest-") as cache,
        Progress(*columns, console=console, transient=True) as shown,
        ThreadPoolExecutor(processes) as pool,
    ):
        bar = shown.add_task("cases", total=sum(len(job.cases()) for job in jobs))
        found = list(pool.map(lambda job: _run(job, cache, lambda: shown.advance(bar)), jobs))
    records = _merged(record for part in found for record in part)
    untaken = rows_in_reach() - {record.get("row") for record in records}
    here = machine.record()
    header = {
        "manifest": FORMAT,
        "quick": quick,
        "only": only,
        "native": next((name for name, target in TARGETS.items() if target.runs(available)), None),
        "targets": {name: {**TARGETS[name]._asdict(), "runs": runs[name]} for name in sorted(runs)},
        "caches": list(caches),
        "threads": [1, THREADS],
        "batch": BATCH,
        "most multiply-adds": MOST_MACS,
        "not run, as they have more": left_out(cases(quick)),
        "rows without a case": [] if only else sorted(untaken),
        "cpu": here["cpu"],
        "versions": {"python": here["python"], **{name: here["versions"].get(name) for name in PACKAGES}},
    }
    return header, records


def _run(job: Job, cache: str, advance: Callable[[], None]) -> list[Record]:
    """The records of a process of its own."""
    target = TARGETS[job.isa]
    environment = {name: text for name, text in os.environ.items() if not name.startswith(("NUMBA_", "BLOCKCONV_"))}
    environment |= {
        "NUMBA_CPU_NAME": target.cpu,
        "NUMBA_CPU_FEATURES": ",".join(f"+{name}" for name in target.features),
        "NUMBA_NUM_THREADS": "1",
        # Neither kernels of another tree nor what was measured on this machine may have a say.
        "BLOCKCONV_CACHE_DIR": cache,
        "PYTHONPATH": str(ROOT),
    }
    with tempfile.TemporaryFile("w+") as given, tempfile.TemporaryFile("w+") as errors:
        json.dump(dataclasses.asdict(job), given)
        given.seek(0)
        child = subprocess.Popen(
            [sys.executable, "-m", "bench.manifest_worker"],
            stdin=given, stdout=subprocess.PIPE, stderr=errors, text=True, env=environment, cwd=ROOT,
        )  # fmt: skip
        with child:
            assert child.stdout is not None
            records = []
            for line in child.stdout:
                record = json.loads(line)
                if "case" in record:
                    advance()
                else:
                    records.append(record)
        if child.returncode != 0:
            errors.seek(0)
            raise ValueError(f"manifest: {job.isa}: status {child.returncode}\n{errors.read()[-4000:]}")
    return records


def _merged(records: Iterable[Record]) -> list[Record]:
    """Sorted by key; kernels that several processes met are one."""
    found: dict[str, Record] = {}
    for record in records:
        known = found.setdefault(record["key"], record)
        if known is not record:
            if "names" not in record:
                raise ValueError(f"manifest: two cases are called {record['key']!r}")
            known["names"] = sorted({*known["names"], *record["names"]})
    return [found[key] for key in sorted(found)]


# ---------------------------------------------------------------- files


def write(path: Path, header: Record, records: Sequence[Record]) -> None:
    """Whole, or not at all."""
    lines = [json.dumps(record, separators=(",", ":"), ensure_ascii=False) for record in (header, *records)]
    partial = path.with_name(path.name + ".part")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)


def load(path: Path) -> tuple[Record, dict[str, Record]]:
    """(the header, the records by key) of a file. Raises ValueError for one that is no manifest."""
    try:
        header, *records = map(json.loads, path.read_text(encoding="utf-8").splitlines())
        if header["manifest"] != FORMAT:
            raise ValueError(f"{path}: has format {header['manifest']}, and this is {FORMAT}: make it again")
        return header, {record["key"]: record for record in records}
    except (json.JSONDecodeError, KeyError, TypeError) as error:
        raise ValueError(f"{path}: is no file of `python -m bench manifest --out` ({error})") from None
