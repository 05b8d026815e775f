"""The records of a manifest, made in a process that compiles for one instruction set.

`manifest` starts it with a job on its standard input. It writes a record for each case, and one for each kernel, as
JSON lines to its standard output.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

import blockconv as bc
from blockconv.core.layout import NATIVE, Layout
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.dispatch.array import empty
from blockconv.dispatch.packing import packing
from blockconv.kernels import Row
from blockconv.kernels.common.request import Request
from blockconv.machine.machine import host
from blockconv.network.builder import NetworkBuilder
from blockconv.network.graph import Network
from blockconv.network.ops.base import OUTPUT
from blockconv.network.planning.binding import Workspace, bind
from blockconv.network.planning.candidates import Candidate, Pricing, candidates, element_types
from blockconv.network.planning.parameters import Parameters
from blockconv.runtime import Launch, Program, address_of
from blockconv.runtime.launcher import launch_alone, launch_worker

from . import reorders
from .assembly import digest
from .manifest_cases import MOST_MACS, Case, Direct, Node, Plan, Reorder, cases
from .manifest_probe import Kernels, Unpacked, blocking, stand_in

__all__ = ["Job", "records", "stored"]

Record = dict[str, Any]
Array = np.ndarray
THREADS = 4  # for which blockings and tasks are noted too, beside those for one thread
PLAIN = Layout("abcde")  # of a convolution's weights, as they are given


@dataclasses.dataclass(frozen=True)
class Job:
    """The job of a process.

    isa: the name of the instruction set, which records begin with. runs: whether this machine has it; else nothing
    is run, and no bits are noted. parts: the classes of cases ("Node", "Reorder", "Plan"). only: a part of the names
    of the records to make. second_level_cache, last_level_cache: bytes that stand for this machine's. assembly: a
    directory for the stripped assembly of each kernel.
    """

    isa: str
    runs: bool
    parts: Sequence[str]
    quick: bool
    only: str
    second_level_cache: int
    last_level_cache: int
    assembly: str | None = None

    def cases(self) -> list[Case]:
        """Its cases. `only` selects plans here, and selects the other cases record by record."""
        found = (case for case in cases(self.quick) if type(case).__name__ in self.parts)
        return [case for case in found if not isinstance(case, Plan) or self.only in case.name]


# ---------------------------------------------------------------- data


def uniform(shape: Sequence[int], dtype: str, seed: str) -> Array:
    """The same numbers on every machine: from -1 to 1 with all bits of their type, or all that an integer type has.

    They come from integers and exact arithmetic alone. (Normal numbers come from a logarithm, which differs between
    libraries; numbers of few bits would hide another order of a sum, or a rounding more.)
    """
    random, count = np.random.default_rng(zlib.crc32(seed.encode())), math.prod(shape)
    if np.dtype(dtype).kind != "f":
        return np.frombuffer(random.bytes(count * np.dtype(dtype).itemsize), dtype).reshape(shape)
    drawn = "float32" if dtype == "float16" else dtype
    return (2 * random.random(count, drawn) - 1).astype(dtype).reshape(shape)  # type: ignore[call-overload]


def stored(logical: Array, layout: Layout) -> Array:
    """The storage of a logical array, by NumPy alone; padding is zeros."""
    if logical.ndim == 4 and layout in NATIVE:
        return reorders.storage(logical, str(layout))
    if not layout.is_blocked:
        return np.ascontiguousarray(logical)
    block = layout.blocks[1]
    assert layout == Layout(f"aBcd{block}b")
    return reorders.storage(logical, f"NCHW{block}")


def _result(ops: Sequence[Launch], buffers: Sequence[Array], written: Sequence[Array]) -> str:
    """The digest of what ops write: bytes that they leave alone are the same each time too."""
    for array in written:
        array.reshape(-1).view(np.uint8)[:] = 0xA5
    Program(ops).run([address_of(array) for array in buffers], 1)
    return digest(b"".join(array.tobytes() for array in written))


# ---------------------------------------------------------------- cases


class Way(NamedTuple):
    """One way to run a case. bound(threads): its blocking and ops. result(): the digest of what they write, None where
    that would take too long. packing(): the ops that bring weights into the form that it reads."""

    name: str
    row: Row
    bound: Callable[[int], tuple[Record, Sequence[Launch]]]
    result: Callable[[], str] | None
    packing: Callable[[], Sequence[Launch]] = tuple


class Worker:
    """Makes records of cases. kernels: those met."""

    def __init__(self, job: Job, kernels: Kernels) -> None:
        self.job, self.kernels = job, kernels

    def records(self, case: Case) -> Iterator[Record]:
        """A record for each way in which the case runs."""
        if isinstance(case, Plan):
            yield from self._plan(case)
            return
        ways: dict[type, Callable[[Any], Iterator[Way]]] = {Reorder: _ways_of_reorder, Direct: _ways_of_direct}
        for way in ways.get(type(case), self._ways_of_node)(case):
            if self.job.only in way.name:
                yield self._record(way)

    def launcher(self) -> Record:
        """The record of the kernels that run ops, alone and on several threads."""
        kernels = [
            self.kernels.digests[kernel.address] for kernel in (launch_alone(), launch_worker(0), launch_worker(3))
        ]
        return {"key": f"{self.job.isa} launcher", "ops": [{"kernels": kernels}]}

    def _record(self, way: Way) -> Record:
        """The record of a way; for several threads only the differences from one thread."""
        (alone, ops), (several, shared) = way.bound(1), way.bound(THREADS)
        record: Record = {
            "key": f"{self.job.isa} {way.name}",
            "row": way.row.name,
            "blocking": alone,
            "ops": self._ops(ops),
        }
        more = {name: value for name, value in several.items() if alone[name] != value}
        if (together := self._ops(shared)) != record["ops"]:
            for op, before in zip(together, record["ops"], strict=True):
                if op["kernels"] == before["kernels"]:
                    del op["kernels"]
            more["ops"] = together
        if more:
            record[f"{THREADS} threads"] = more
        if packing := self._ops(way.packing()):
            record["packing"] = packing
        if self.job.runs and way.result is not None:
            record["bits"] = way.result()
        return record

    def _ops(self, ops: Sequence[Launch]) -> list[Record]:
        return [
            {"tasks": op.tasks, "chunk": op.chunk, "scratch": op.scratch, "kernels": self.kernels.of(op)} for op in ops
        ]

    def _ways_of_node(self, case: Node) -> Iterator[Way]:
        network = network_of(case)
        for candidate in candidates_of(case, network):
            yield self._way_of_candidate(case, network, candidate)

    def _way_of_candidate(self, case: Node, network: Network, candidate: Candidate) -> Way:
        row, request, srcs, dst = candidate[:4]
        assert row is not None
        (node,), src = network.nodes, srcs[0]
        problem, types = request.problem, request.types
        held = Parameters(network) if self.job.runs else Unpacked(network)

        def bound(threads: int) -> tuple[Record, Sequence[Launch]]:
            ops = bind(network, node, candidate, held, threads).launches
            return blocking(row, problem, src, dst, types, threads), ops

        def result() -> str:
            ops, operands = bind(network, node, candidate, held, 1)
            out = empty(network.shape(node.output), dst, network.tensors[node.output].dtype).storage
            places: dict[Any, Any] = {OUTPUT: out}
            for k, (shape, layout) in enumerate(zip(case.inputs, srcs, strict=True)):
                places[k] = stored(uniform(shape, case.dtype, f"{case.name} {k}"), layout)
            arrays = [np.empty(x.nbytes, np.uint8) if isinstance(x, Workspace) else x for x in operands]
            return _result(ops, [places[x] if isinstance(x, int) else x for x in arrays if x is not None], [out])

        def packed() -> Sequence[Launch]:
            form = row.prepare(problem, src, dst, types).weights
            return () if form is None else packing(problem, PLAIN, form, np.dtype(case.dtype).itemsize).program.launches

        by = f" {row.name}" if case.every else ""
        name = f"{case.name} {case.dtype} {src} > {dst}{by}"
        return Way(name, row, bound, result if case.macs <= MOST_MACS else None, packed)

    # -- networks

    def _plan(self, case: Plan) -> Iterator[Record]:
        from .networks import build  # which needs onnx

        plan = bc.compile(bc.load_onnx(build(case.network)), threads=1)
        names: dict[str, int] = {}
        for action in plan.actions:
            (_, written), node = action.writes, action.node
            name = f"{case.name} {action.kind} {action.name}" + ("" if node else f" > {written}")
            names[name] = count = names.get(name, 0) + 1
            record: Record = {
                "key": f"{self.job.isa} {name}" + (f" ({count})" if count > 1 else ""),
                "row": action.kernel if node else "",
                "reads": [str(layout) for _, layout in action.reads],
                "writes": str(written),
                "blocking": {},
                "ops": self._ops(action.launches),
            }
            if node is not None and node.op == "conv2d":
                row, problem = selection.named(node.op, action.kernel), plan.network.problem(node)
                types = element_types(node, plan.network.site(node), host())
                record["blocking"] = blocking(row, problem, action.reads[0][1], written, types, 1)
            yield record
        record = {"key": f"{self.job.isa} {case.name}", "arena": plan.arena_nbytes}
        if self.job.runs:
            record["weights"] = plan.weights_nbytes
            shapes = {tensor.name: tensor.shape for tensor in plan.network.inputs}
            outputs = plan.by_name(
                **{name: uniform(shape, "float32", f"{case.name} {name}") for name, shape in shapes.items()}
            )
            record["bits"] = digest(b"".join(outputs[name].tobytes() for name in plan.network.outputs))
        yield record


def _ways_of_direct(case: Direct) -> Iterator[Way]:
    for src, dst in (map(Layout, names) for names in case.pairs):
        for row in _taking(case.op, case.problem, src, dst, Types.all(case.dtype)):
            yield _way_of_direct(case, row, src, dst)


def _way_of_direct(case: Direct, row: Row, src: Layout, dst: Layout) -> Way:
    def prepared(threads: int) -> Any:
        return row.prepare(case.problem, src, dst, Types.all(case.dtype), threads, **dict(case.options))

    def result() -> str:
        primitive, buffers = prepared(1), []
        for k, (shape, side, is_written, dtype) in enumerate(case.operands):
            layout, kind = {"src": src, "dst": dst}.get(side, Layout("abcd"[: len(shape)])), dtype or case.dtype
            if is_written:
                buffers.append(empty(shape, layout, kind).storage)
            else:
                given = _corners(case.problem) if kind == "int64" else uniform(shape, kind, f"{case.name} {k}")
                buffers.append(stored(given, layout))
        written = [array for array, operand in zip(buffers, case.operands, strict=True) if operand.is_written]
        return _result(primitive.launches(), [*buffers, *(np.empty(n, np.uint8) for n in primitive.workspace)], written)

    name = f"{case.name} {case.dtype} {src} > {dst} {row.name}"
    return Way(name, row, lambda threads: ({}, prepared(threads).launches()), result)


def _corners(problem: Any) -> Array:
    """The first pixel of each window that is inside the image, as `max_pool2d` numbers them."""
    pool = problem.pool
    rows, cols = (
        np.maximum(0, np.arange(o) * s - p) for o, s, p in ((pool.oh, pool.sh, pool.ph), (pool.ow, pool.sw, pool.pw))
    )
    return np.broadcast_to(rows[:, None] * pool.iw + cols, pool.dst_shape).copy()


def _ways_of_reorder(case: Reorder) -> Iterator[Way]:
    problem, types = case.problem, Types.bits(case.problem.itemsize)
    src, dst = Layout(problem.src), Layout(problem.dst)
    chosen = selection.choose("reorder", problem, src, dst, types)
    for row in _taking("reorder", problem, src, dst, types) if case.every else [chosen]:
        yield _way_of_reorder(case, row, src, dst)


def _way_of_reorder(case: Reorder, row: Row, src: Layout, dst: Layout) -> Way:
    problem, dtype = case.problem, f"uint{8 * case.problem.itemsize}"

    def bound(threads: int) -> tuple[Record, Sequence[Launch]]:
        types = Types.bits(problem.itemsize)
        return {}, row.prepare(problem, src, dst, types, fill=case.fill, stream=case.stream).launches()

    def result() -> str:
        source, out = stored(uniform(problem.shape, dtype, case.name), src), empty(problem.shape, dst, dtype).storage
        return _result(bound(1)[1], [source, out], [out])

    return Way(f"{case.name} {row.name}" if case.every else case.name, row, bound, result)


def network_of(case: Node) -> Network:
    """A network of the one node."""
    builder = NetworkBuilder()
    inputs = [builder.input(f"x{k}", shape, case.dtype) for k, shape in enumerate(case.inputs)]
    seeds = enumerate(case.parameters)
    parameters = tuple(uniform(shape, case.dtype, f"{case.name} parameter {k}") for k, shape in seeds)
    builder.output(builder.add(case.attributes, *inputs, parameters=parameters))
    return builder.build()


def candidates_of(case: Node, network: Network) -> Iterator[Candidate]:
    """The dispatcher's row for each pair of layouts; or every row that takes them, the references too."""
    (node,) = network.nodes
    if not case.every:
        problem: Any = network.problem(node)
        for names in case.pairs:
            src, dst = map(Layout, names)
            types = Types.all(case.dtype)
            row = selection.choose(node.op, problem, src, dst, types)
            yield Candidate(row, Request(problem, src, dst, types), (src,), dst, 0.0)
        return
    pairs = {(Layout(src), Layout(dst)) for src, dst in case.pairs}
    pricing = Pricing(
        NATIVE,
        lambda one: one.cost,
        lambda tensor, src, dst: 0.0,
        host(),
        accuracy=math.inf,
        every=True,
        references=True,
    )
    for found in candidates(network, node, pricing):
        same_rank = found.srcs[0].ndim == found.dst.ndim == 4
        if found.row is not None and (not same_rank or (found.srcs[0], found.dst) in pairs):
            yield found


def _taking(op: str, problem: Any, src: Layout, dst: Layout, types: Types) -> list[Row]:
    return [row for row in selection.rows_for(op, types) if row.rejects(problem, src, dst, types) is None]


def records(job: Job) -> Iterator[Record]:
    """All records of a job. Changes this process, which is to do nothing else."""
    stand_in(job.second_level_cache, job.last_level_cache, job.runs)
    kernels = Kernels(None if job.assembly is None else Path(job.assembly) / job.isa)
    kernels.watch()
    worker = Worker(job, kernels)
    if Node.__name__ in job.parts and job.only in "launcher":
        yield worker.launcher()
    for case in job.cases():
        yield from worker.records(case)
        yield {"case": case.name}
    yield from kernels.records(job.isa)


def main() -> None:
    """Do the job on the standard input."""
    job = Job(**json.load(sys.stdin))
    for record in records(job):
        print(json.dumps(record), flush=True)


if __name__ == "__main__":
    main()
