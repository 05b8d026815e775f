"""What a manifest says of its cases, found out in a process that compiles for one instruction set.

Started by `manifest` with a job on its standard input, it writes a record for each case, and one for each kernel, as
JSON lines on its standard output. All that a manifest knows of the inside of the package stands here: which functions
give a row's blocking, where kernels are compiled, what machine facts choices are made from.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import sys
import zlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import blockconv as bc
from blockconv import dispatch, jit, kept
from blockconv.array import empty, reorder_program
from blockconv.kernels import TABLE, Row, cut, depthwise_cut, grouped, winograd_cut
from blockconv.layout import NATIVE, Layout
from blockconv.network.builder import NetworkBuilder
from blockconv.network.candidates import OUTPUT, Candidate, Parameters, Pricing, bind, candidates
from blockconv.network.graph import Network
from blockconv.packing import packing
from blockconv.runtime import Op, Program, address_of

from . import reorders
from .assembly import digest, strip
from .manifest_cases import MOST_MACS, Case, Node, Plan, Reorder, cases

__all__ = ["Job", "records"]

Record = dict[str, Any]
Array = np.ndarray
THREADS = 4  # for which blockings and tasks are noted too, beside those for one thread
PLAIN = Layout("abcde")  # of a convolution's weights, as they are given


@dataclasses.dataclass(frozen=True)
class Job:
    """What a process is to do.

    isa: the name of the instruction set, which records begin with. runs: whether this machine has it; else nothing
    is run, and no bits are noted. parts: the classes of cases ("Node", "Reorder", "Plan"). only: a part of the names
    of cases. second_level_cache, last_level_cache: bytes that stand for this machine's. assembly: a directory for the
    stripped assembly of each kernel.
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
        """Its cases."""
        return [c for c in cases(self.quick) if type(c).__name__ in self.parts and self.only in c.name]


# ---------------------------------------------------------------- the machine


def stand_in(job: Job) -> None:
    """Caches of the job's sizes in place of this machine's, and one processor, so that kernels are compiled here.

    Together with the CPU and the features that Numba is told to compile for (see `manifest.TARGETS`), these are all
    facts of a machine that choices depend on: what was measured on it lies in the cache directory, which is empty.
    """
    jit.second_level_cache = lambda: job.second_level_cache  # type: ignore[assignment]
    jit.last_level_cache = lambda: job.last_level_cache  # type: ignore[assignment]
    jit.affinity = lambda: 1
    if not job.runs:  # to pack weights would run a kernel
        import blockconv.network.plan

        blockconv.network.plan.Parameters = _Unpacked  # type: ignore[misc]


class _Unpacked(Parameters):
    """Stands for packed weights and constants on a machine that cannot pack them."""

    def weights(self, *_: Any) -> tuple[Array, Array]:
        return np.empty(0), np.empty(0)

    def constant(self, *_: Any) -> Array:
        return np.empty(0)


# ---------------------------------------------------------------- kernels


class Kernels:
    """The stripped assembly of every kernel that this process meets, by the kernel's address.

    A kernel that another process of the same manifest compiled comes from their common cache directory, where that
    process noted the assembly's digest beside the code.
    """

    def __init__(self, directory: Path | None) -> None:
        self.directory = directory
        self.digests: dict[int, str] = {}
        self.names: dict[str, set[str]] = {}  # by digest

    def watch(self) -> None:
        """Note all kernels from now on."""
        family = jit.KernelFamily
        ask, compile_ = family.__call__, family.compile

        @functools.wraps(ask)
        def asked(this: Any, *params: int) -> jit.Kernel:
            kernel = ask(this, *params)
            if kernel.address and kernel.address not in self.digests:
                known = kept.read(f"assembly-{this.entry(*params)}").get("digest")
                self._note(this, params, kernel.address, known or self._write(this.compile(*params)))
            return kernel

        @functools.wraps(compile_)
        def compiled(this: Any, *params: int) -> jit.Kernel:
            kernel = compile_(this, *params)
            found = self._write(kernel)
            kept.write(f"assembly-{this.entry(*params)}", {"digest": found})
            self._note(this, params, kernel.address, found)
            return kernel

        family.__call__, family.compile = asked, compiled  # type: ignore[method-assign]

    def _note(self, family: Any, params: Sequence[int], address: int, found: str) -> None:
        self.digests[address] = found
        name = f"{family.__module__}:{family.__name__}({', '.join(map(str, map(int, params)))})"
        self.names.setdefault(found, set()).add(name)

    def _write(self, kernel: jit.Kernel) -> str:
        assert kernel.code is not None
        text = strip(kernel.code.asm())
        found = digest(text)
        if self.directory is not None:
            self.directory.mkdir(parents=True, exist_ok=True)
            (self.directory / f"{found}.s").write_text(text, encoding="utf-8")
        return found

    def of(self, op: Op) -> list[str]:
        """An op's kernel, then those that it calls: their addresses are among its arguments."""
        called = {self.digests[a] for a in op.args if isinstance(a, int) and a in self.digests}
        return [self.digests[op.kernel.address], *sorted(called)]

    def records(self, isa: str) -> Iterator[Record]:
        """A record for each kernel."""
        for found, names in self.names.items():
            yield {"key": f"{isa} kernel {found}", "names": sorted(names)}


# ---------------------------------------------------------------- blockings


def blocking(row: Row, problem: Any, src: Layout, dst: Layout, dtype: str, threads: int) -> Record:
    """The fields of the blocking that a row has for a problem, by their names; {} for a row that has none."""
    if row.name == "conv_direct":
        found: Any = cut.blocking(problem, src, dst, dtype, threads)
    elif row.name == "conv_grouped":
        found = grouped.blocking(problem, src, dst, dtype, threads)
    elif row.name == "conv_depthwise":
        found = depthwise_cut.cut(problem, src, dst, dtype)
    elif row.name.startswith("conv_winograd_f"):
        found = winograd_cut.cut(problem, dst, int(row.name.removeprefix("conv_winograd_f")), threads)
    else:
        return {}
    return _by_name(found)


def _by_name(value: Any) -> Any:
    """A dataclass or named tuple as a dict, and what it holds too."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _by_name(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if hasattr(value, "_asdict"):
        return {name: _by_name(item) for name, item in value._asdict().items()}
    return value


# ---------------------------------------------------------------- data


def uniform(shape: Sequence[int], dtype: str, seed: str) -> Array:
    """The same numbers on every machine: from -1 to 1 with all bits of their type, or all that an integer type has.

    They come from integers and exact arithmetic alone. (Normal numbers come from a logarithm, which differs between
    libraries; numbers of few bits would hide another order of a sum, or a rounding more.)
    """
    random, count = np.random.default_rng(zlib.crc32(seed.encode())), math.prod(shape)
    if np.dtype(dtype).kind != "f":
        return np.frombuffer(random.bytes(count * np.dtype(dtype).itemsize), dtype).reshape(shape)
    return (2 * random.random(count, dtype) - 1).astype(dtype).reshape(shape)  # type: ignore[call-overload, no-any-return]


def _stored(logical: Array, layout: Layout) -> Array:
    """The storage of a logical array, by NumPy alone."""
    native = logical.ndim == 4 and layout in NATIVE
    return reorders.storage(logical, str(layout)) if native else np.ascontiguousarray(logical)


def _result(ops: Sequence[Op], buffers: Sequence[Array], written: Sequence[Array]) -> str:
    """The digest of what ops write: bytes that they leave alone are the same each time too."""
    for array in written:
        array.reshape(-1).view(np.uint8)[:] = 0xA5
    Program(ops).run([address_of(array) for array in buffers], 1)
    return digest(b"".join(array.tobytes() for array in written))


# ---------------------------------------------------------------- cases


class Worker:
    """Makes records of cases. kernels: those met."""

    def __init__(self, job: Job, kernels: Kernels) -> None:
        self.job, self.kernels = job, kernels

    def records(self, case: Case) -> Iterator[Record]:
        """Each way in which the case runs."""
        if isinstance(case, Node):
            return self._indices(case) if case.indices else self._node(case)
        return self._reorder(case) if isinstance(case, Reorder) else self._plan(case)

    def _ops(self, ops: Sequence[Op]) -> list[Record]:
        return [
            {"tasks": op.tasks, "chunk": op.chunk, "scratch": op.scratch, "kernels": self.kernels.of(op)} for op in ops
        ]

    def _record(self, name: str, row: Row, bound: Callable[[int], tuple[Record, Sequence[Op]]]) -> Record:
        """bound(threads): a blocking and ops. Of several threads only what is not as for one is noted."""
        (alone, ops), (several, shared) = bound(1), bound(THREADS)
        record = {"key": f"{self.job.isa} {name}", "row": row.name, "blocking": alone, "ops": self._ops(ops)}
        more = {name: value for name, value in several.items() if alone[name] != value}
        if (together := self._ops(shared)) != record["ops"]:
            for op, before in zip(together, record["ops"], strict=True):
                if op["kernels"] == before["kernels"]:
                    del op["kernels"]
            more["ops"] = together
        if more:
            record[f"{THREADS} threads"] = more
        return record

    # -- one op of a network

    def _node(self, case: Node) -> Iterator[Record]:
        network = _network(case)
        (node,) = network.nodes
        held = Parameters(network) if self.job.runs else _Unpacked(network)
        sources = [uniform(shape, case.dtype, f"{case.name} {k}") for k, shape in enumerate(case.inputs)]
        for candidate in _candidates(case, network):
            row, problem, srcs, dst, _ = candidate
            assert row is not None

            def bound(threads: int, candidate: Candidate = candidate) -> tuple[Record, Sequence[Op]]:
                row, problem, srcs, dst, _ = candidate
                assert row is not None
                ops = bind(network, node, candidate, held, threads).ops
                return blocking(row, problem, srcs[0], dst, case.dtype, threads), ops

            by = f" {row.name}" if case.every else ""
            record = self._record(f"{case.name} {case.dtype} {srcs[0]} > {dst}{by}", row, bound)
            if row.weights is not None:
                form = row.weights(problem, srcs[0], dst, case.dtype)
                how = packing(problem, PLAIN, form, np.dtype(case.dtype).itemsize)
                record["packing"] = self._ops(how.program.ops)
            if self.job.runs and case.macs <= MOST_MACS:
                ops, operands = bind(network, node, candidate, held, 1)
                out = empty(network.shape(node.output), dst, network.tensors[node.output].dtype).storage
                places = {k: _stored(x, lay) for k, (x, lay) in enumerate(zip(sources, srcs, strict=True))}
                places[OUTPUT] = out
                buffers = [places[operand] if isinstance(operand, int) else operand for operand in operands]
                record["bits"] = _result(ops, buffers, [out])
            yield record

    def _indices(self, case: Node) -> Iterator[Record]:
        """Of a maximum pool: networks have no such op."""
        network = _network(case)
        problem: Any = network.problem(network.nodes[0])
        source = uniform(problem.src_shape, case.dtype, f"{case.name} 0")
        for names in case.pairs:
            src, dst = map(Layout, names)
            for row in _taking("pool2d_indices", problem, src, dst, case.dtype):
                bound = _bound(row, problem, src, dst, case.dtype)
                record = self._record(f"{case.name} {case.dtype} {src} > {dst} {row.name}", row, bound)
                if self.job.runs:
                    out, where = (empty(problem.dst_shape, dst, kind).storage for kind in (case.dtype, np.int64))
                    record["bits"] = _result(bound(1)[1], [_stored(source, src), out, where], [out, where])
                yield record

    # -- reorders

    def _reorder(self, case: Reorder) -> Iterator[Record]:
        problem = case.problem
        src, dst, dtype = Layout(problem.src), Layout(problem.dst), f"uint{8 * problem.itemsize}"
        rows = _taking("reorder", problem, src, dst, f"{problem.itemsize} bytes")
        chosen = dispatch.choose("reorder", problem, src, dst, f"{problem.itemsize} bytes")
        source = _stored(uniform(problem.shape, dtype, case.name), src)
        for row in rows if case.every else [chosen]:

            def bound(threads: int, row: Row = row) -> tuple[Record, Sequence[Op]]:
                if row is chosen:
                    return {}, reorder_program(problem.shape, src, dst, problem.itemsize, case.fill, case.stream).ops
                return {}, row.bind(problem, src, dst, case.fill, case.stream)

            record = self._record(f"{case.name} {row.name}" if case.every else case.name, row, bound)
            if self.job.runs:
                out = empty(problem.shape, dst, dtype).storage
                record["bits"] = _result(bound(1)[1], [source, out], [out])
            yield record

    # -- networks

    def _plan(self, case: Plan) -> Iterator[Record]:
        from .networks import build  # which needs onnx

        plan = bc.compile(bc.load_onnx(build(case.network)), threads=1)
        names: dict[str, int] = {}
        for action in plan.actions:
            (_, written), node = action.writes, action.node
            name = f"{case.name} {action.kind} {action.name}" + ("" if node else f" > {written}")
            names[name] = count = names.get(name, 0) + 1
            record = {
                "key": f"{self.job.isa} {name}" + (f" ({count})" if count > 1 else ""),
                "row": action.kernel if node else "",
                "reads": [str(layout) for _, layout in action.reads],
                "writes": str(written),
                "blocking": {},
                "ops": self._ops(action.ops),
            }
            if node is not None and node.op == "conv2d":
                row, problem = dispatch.named(node.op, action.kernel), plan.network.problem(node)
                dtype = str(plan.network.tensors[node.output].dtype)
                record["blocking"] = blocking(row, problem, action.reads[0][1], written, dtype, 1)
            yield record
        record = {"key": f"{self.job.isa} {case.name}", "arena": plan.arena_nbytes}
        if self.job.runs:
            record["weights"] = plan.weights_nbytes
            shapes = {tensor.name: tensor.shape for tensor in plan.network.inputs}
            outputs = plan(**{name: uniform(shape, "float32", f"{case.name} {name}") for name, shape in shapes.items()})
            arrays = [outputs[name] for name in plan.network.outputs] if isinstance(outputs, dict) else [outputs]
            record["bits"] = digest(b"".join(array.tobytes() for array in arrays))
        yield record


def _network(case: Node) -> Network:
    """A network of the one node."""
    builder = NetworkBuilder()
    inputs = [builder.input(f"x{k}", shape, case.dtype) for k, shape in enumerate(case.inputs)]
    seeds = enumerate(case.parameters)
    parameters = tuple(uniform(shape, case.dtype, f"{case.name} parameter {k}") for k, shape in seeds)
    builder.output(builder.add(case.attributes, *inputs, parameters=parameters))
    return builder.build()


def _candidates(case: Node, network: Network) -> Iterator[Candidate]:
    """The dispatcher's row for each pair of layouts; or every row that takes them, the references too."""
    (node,) = network.nodes
    if not case.every:
        problem: Any = network.problem(node)
        for names in case.pairs:
            src, dst = map(Layout, names)
            row = dispatch.choose(node.op, problem, src, dst, case.dtype)
            yield Candidate(row, problem, (src,), dst, 0.0)
        return
    pairs = {(Layout(src), Layout(dst)) for src, dst in case.pairs}
    for reference in (False, True):
        pricing = Pricing(
            NATIVE, lambda taken, problem, node: taken.seconds, lambda tensor, src, dst: 0.0,
            _is_reference if reference else _is_none, every=True,
        )  # fmt: skip
        if any(row.reference == reference for row in TABLE if row.op == node.op):
            for found in candidates(network, node, pricing):
                same_rank = found.srcs[0].ndim == found.dst.ndim == 4
                if found.row is not None and (not same_rank or (found.srcs[0], found.dst) in pairs):
                    yield found


def _is_reference(row: Row) -> bool:
    return row.reference


def _is_none(row: Row) -> bool:
    return not row.reference


def _taking(op: str, problem: Any, src: Layout, dst: Layout, dtype: str) -> list[Row]:
    rows = [row for row in TABLE if row.op == op]
    return [row for row in rows if dispatch.why_not(row, problem, src, dst, dtype, math.inf) is None]


def _bound(
    row: Row, problem: Any, src: Layout, dst: Layout, dtype: str
) -> Callable[[int], tuple[Record, Sequence[Op]]]:
    return lambda threads: ({}, row.bind(problem, src, dst, dtype, threads))


def records(job: Job) -> Iterator[Record]:
    """All records of a job. Changes this process, which is to do nothing else."""
    stand_in(job)
    kernels = Kernels(None if job.assembly is None else Path(job.assembly) / job.isa)
    kernels.watch()
    worker = Worker(job, kernels)
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
