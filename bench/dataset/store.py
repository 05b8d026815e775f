"""The data set's folder, FOLDER/RUN/NETWORK. A run is a machine with threads and types, and sources of one digest."""

from __future__ import annotations

import dataclasses
import filecmp
import hashlib
import json
import math
import shutil
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

from blockconv.core import text
from blockconv.jit.cache import digest_of, modules, source_digest
from blockconv.machine.profile import selected
from blockconv.network.graph import Node

from .. import cpu, machine, nets, networks
from ..measure import noise
from ..workers import Crew
from . import collect, schema, tpugraphs
from .collect import Row, Settings, Times
from .probe import Asked, Opened, opened

__all__ = ["LAST", "Kept", "export", "images_of", "kept", "merge", "network_name", "run_name"]

MACHINE, GRAPH, TIMES = "machine.json", "graph.json", "times.jsonl"
LAST = "assignments.parquet"  # written last: a network that has it is complete


@dataclasses.dataclass(frozen=True)
class Kept:
    """A complete network of a set. run: the name of its folder. machine: the record. tables: rows by table."""

    run: str
    network: str
    machine: dict[str, Any]
    graph: dict[str, Any]
    tables: dict[str, list[Row]]

    @property
    def name(self) -> str:
        """A name that no other network of the set has."""
        return f"{self.run}/{self.network}"

    @property
    def family(self) -> str:
        """The family of networks whose layers resemble its own."""
        return networks.family(self.network)

    @property
    def processor(self) -> str:
        return str(self.machine["machine"]["cpu"])

    @property
    def kind(self) -> str:
        """Its type, threads and processor."""
        return f"{self.machine['dtype']}, {text.threads(self.machine['threads'])}, {self.processor}"

    @property
    def title(self) -> str:
        """The network and its kind."""
        return f"{self.network}, {self.kind}"


# ---------------------------------------------------------------- export


def export(folder: Path, names: Sequence[str], settings: Settings, crew: Crew, say: Any) -> list[str]:
    """Measure networks that the folder does not have yet, and write each when it is complete; those written.

    names: of `networks.NETWORKS`, or ONNX files. settings.batch: of the former, and of a file where it has no other.
    say(text): is told what is going on. Raises ValueError if the folder has a network of this name that is another
    model, or was measured with other settings; and for a file with another number of images.
    """
    written = []
    for name in names:
        its = dataclasses.replace(settings, batch=images_of(name, settings.batch))
        run = folder / run_name(its)
        target = run / network_name(name)
        _check_same(target, name, its)
        if (target / LAST).exists():
            say(f"{target.name}: complete")
            continue
        target.mkdir(parents=True, exist_ok=True)
        if not (run / MACHINE).exists():
            _write_json(run / MACHINE, _record(its))
        _export(target, name, its, crew, say)
        written.append(target.name)
    return written


def network_name(name: str) -> str:
    """The folder of a network of the harness, or of an ONNX file, in a run's."""
    return Path(nets._split(name)[0]).stem


def images_of(name: str, batch: int) -> int:
    """The number of images of a network. Sizes after an ONNX file's name give it; else the file does."""
    file, sizes = nets._split(name)
    if file in networks.NETWORKS:
        return batch
    if not sizes:
        sizes = _input_sizes(file)
    count = sizes[0] if sizes and sizes[0] > 0 else batch
    if batch not in (1, count):
        raise ValueError(f"--batch {batch}: {file} has {count} images; give {file}={batch}x3x224x224, or other sizes")
    return count


def _input_sizes(file: str) -> tuple[int, ...]:
    graph = onnx.load(file, load_external_data=False).graph
    constants = {tensor.name for tensor in graph.initializer}
    value = next(value for value in graph.input if value.name not in constants)
    return tuple(dim.dim_value for dim in value.type.tensor_type.shape.dim)


def run_name(settings: Settings, kind: str | None = None) -> str:
    """A name for all that holds for every network of a run: processor, threads, types, images, sources.

    kind: the processor, as a folder of results; by default this one.
    """
    parts = kind or cpu.folder(machine.record()), f"{settings.threads}-threads", settings.dtype
    return "-".join((*parts, f"{settings.batch}-images", source_digests()["planners"][:8]))


def _check_same(target: Path, name: str, settings: Settings) -> None:
    """Raise ValueError if a network is there that is another model, or has other settings."""
    if not (target / GRAPH).exists():
        return
    graph = json.loads((target / GRAPH).read_text(encoding="utf-8"))
    if graph.get("model") != _digest(name):
        raise ValueError(f"{target} is of another model than {name}: rename the file, or take another folder")
    before, now = {"realtime": False, **graph["settings"]}, _as_json(settings)
    if before != now:
        differing = next(key for key in now if before.get(key) != now[key])
        remedy = f"take the same ({now[differing]} is given), or another folder"
        raise ValueError(f"{target} was exported with {differing}={before.get(differing)}: {remedy}")


def _digest(name: str) -> str | None:
    """The SHA-256 of an ONNX file; None for a network of the harness, which its name and seed tell."""
    file = Path(nets._split(name)[0])
    return None if name in networks.NETWORKS else hashlib.sha256(file.read_bytes()).hexdigest()


def _as_json(settings: Settings) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(dataclasses.asdict(settings)))
    return found


def source_digests() -> dict[str, str]:
    """Digests of the sources that make kernels, and of the whole package, whose planners choose."""
    return {"kernels": source_digest(), "planners": digest_of(modules()).hex()}


def _record(settings: Settings) -> dict[str, Any]:
    return {
        "schema": "blockconv-lab",
        "version": schema.VERSION,
        "licence": schema.LICENCE,
        "machine": machine.record(),
        "profile": selected().profile.name,
        "digests": source_digests(),
        "threads": settings.threads,
        "dtype": settings.dtype,
        "images_count": settings.batch,
    }


def _export(target: Path, name: str, settings: Settings, crew: Crew, say: Any) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        path = nets._file(name, settings.batch, scratch)
        plain = nets._loaded(name, path)
        given = [_input(tensor) for tensor in plain.inputs]
        expected = nets._expected(plain, path, *given)
        if settings.dtype.startswith("int8"):
            if len(given) > 1:
                raise ValueError(f"--dtype {settings.dtype}: {name} has {len(given)} inputs; give a quantized model")
            from ..quantized import quantized  # which needs onnxruntime

            path = quantized(path, scratch, settings.dtype)
        precision: Any = settings.dtype if settings.dtype in ("bfloat16", "float16") else "float32"
        asked: Asked = path, settings.layouts, precision, settings.threads
        known = opened(*asked)
        times = Times(target / TIMES)
        graph = {**graph_of(known), "network": target.name, "model": _digest(name), "settings": _as_json(settings)}
        _write_json(target / GRAPH, graph)
        for what, done, every in collect.measure_all(known, asked, given, expected, crew, settings, times):
            say(f"{target.name}: {what}, {done} of {every}")
        _write(target, known, graph, settings, times)


def _input(tensor: Any) -> np.ndarray:
    """The values that an input is measured with: noise, or zeros where numbers may be indices."""
    dtype = np.dtype(tensor.dtype)
    return noise(tensor.shape, dtype.name) if dtype.kind == "f" else np.zeros(tensor.shape, dtype)


def _write(target: Path, known: Opened, graph: dict[str, Any], settings: Settings, times: Times) -> None:
    about = {"network": target.name, "run": target.parent.name}
    rows = {
        "candidates": list(collect.candidate_rows(known, times)),
        "reorders": list(collect.reorder_rows(known, times)),
        "assignments": list(collect.assignment_rows(known, settings, times)),
    }
    failures = {key: row["failure"] for key, row in times.known.items() if "failure" in row}
    coverage = {name: collect.coverage(found) for name, found in rows.items()}
    _write_json(target / GRAPH, {**graph, "coverage": coverage, "failures": failures})
    made: dict[str, Any] = tpugraphs.arrays(graph, rows)
    np.savez_compressed(target / "tpugraphs.npz", **made)
    for name, found in rows.items():  # the last is LAST
        partial = target / f"{name}.partial"
        schema.write_table(partial, name, found, about)
        partial.replace(target / f"{name}.parquet")
    times.path.unlink(missing_ok=True)


def graph_of(known: Opened) -> dict[str, Any]:
    """The graph after fusion: values and nodes by the names of `PlanData`, with attributes and problems, and edges."""
    network = known.network
    inputs = {tensor.name for tensor in network.inputs}
    kinds = {**dict.fromkeys(inputs, "input"), **dict.fromkeys(network.constants, "constant")}
    values = [
        {"name": name, "shape": list(one.shape), "dtype": one.type.name, "kind": kinds.get(name, "computed")}
        for name, one in network.tensors.items()
    ]
    problem = known.problem
    edges = [
        {"value": value, "producer": network.producers[value].name if value in network.producers else None, "reader": n}
        for value, n in [
            *((value, step.name) for step in problem.steps for value in step.inputs),
            *((value, None) for value in problem.wanted),
        ]
    ]
    return {
        "schema": "blockconv-lab",
        "version": schema.VERSION,
        "inputs": {name: layout.tag for name, layout in problem.given.items()},
        "outputs": {name: layout.tag for name, layout in problem.wanted.items()},
        "values": values,
        "nodes": [_node(known, k, node) for k, node in enumerate(network.nodes)],
        "edges": edges,
    }


def _node(known: Opened, number: int, node: Node) -> dict[str, Any]:
    request = next((c.request for c in known.found[number] if c.row is not None), None)
    problem = None if request is None else request.problem
    return {
        "name": node.name,
        "op": node.op,
        "attributes": _plain(node.attributes),
        "problem": None if problem is None else _plain(problem),
        "flops_count": int(getattr(problem, "flops", 0) or 0),
        "inputs": [name for name in node.inputs if name not in known.network.constants],
        "parameters": [*node.parameters, *(name for name in node.inputs if name in known.network.constants)],
        "output": node.output,
    }


def _plain(value: Any) -> Any:
    """A record as JSON: its fields, and the text of what JSON does not have."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
    if isinstance(value, Mapping):
        return {str(k): _plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(one) for one in value]
    if value is None or isinstance(value, (bool, int, str)):
        return value
    return float(value) if isinstance(value, float) and math.isfinite(value) else str(value)


def _write_json(path: Path, value: Any) -> None:
    partial = path.with_suffix(".partial")
    partial.write_text(json.dumps(value, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


# ---------------------------------------------------------------- reading and merging


def kept(folder: Path) -> Iterator[Kept]:
    """The complete networks of a set: of a folder, or of an archive that `tarfile` reads.

    Raises ValueError for another version, or a set without any network.
    """
    if folder.is_file():
        with tempfile.TemporaryDirectory() as place, tarfile.open(folder) as archive:
            archive.extractall(place, filter="data")
            yield from kept(Path(place))
        return
    found = sorted(path.parent for path in folder.glob(f"*/*/{LAST}"))
    if not found:
        raise ValueError(f"{folder} has no complete network of the lab's data set: FOLDER/RUN/NETWORK/{LAST}")
    for path in found:
        record = json.loads((path.parent / MACHINE).read_text(encoding="utf-8"))
        if (record.get("schema"), record.get("version")) != ("blockconv-lab", schema.VERSION):
            raise ValueError(f"{path.parent} has version {record.get('version')}; this reads {schema.VERSION}")
        graph = json.loads((path / GRAPH).read_text(encoding="utf-8"))
        tables = {name: schema.read_table(path / f"{name}.parquet") for name in schema.TABLES}
        yield Kept(path.parent.name, path.name, record, graph, tables)


def _undated(path: Path) -> dict[str, Any]:
    """A machine's record without its date: a machine may measure on several days."""
    record: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return {**record, "machine": {name: value for name, value in record["machine"].items() if name != "date"}}


def merge(folder: Path, others: Sequence[Path]) -> list[str]:
    """Copy the complete networks of other sets into a folder; "RUN/NETWORK" of those copied.

    A network that the folder has with the same bytes is left. A run of another machine of the same name gets a name of
    its own, with a digest of its record.
    """
    copied = []
    for other in others:
        for one in sorted(path.parent for path in other.glob(f"*/*/{LAST}")):
            run = folder / one.parent.name
            if (run / MACHINE).exists() and _undated(run / MACHINE) != _undated(one.parent / MACHINE):
                digest = hashlib.sha256((one.parent / MACHINE).read_bytes()).hexdigest()[:8]
                run = folder / f"{one.parent.name}-{digest}"
            target = run / one.name
            if (target / LAST).exists():
                if not filecmp.cmp(target / LAST, one / LAST, shallow=False):
                    raise ValueError(f"{target} and {one} are different measurements of one run; keep one of them")
                continue
            run.mkdir(parents=True, exist_ok=True)
            if not (run / MACHINE).exists():
                shutil.copyfile(one.parent / MACHINE, run / MACHINE)
            shutil.copytree(one, target, dirs_exist_ok=True)
            copied.append(f"{run.name}/{one.name}")
    return copied
