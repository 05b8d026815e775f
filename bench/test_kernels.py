"""Every kernel of the table that takes a problem, in every layout that it takes: each is checked, then timed.

The table is walked, so that a new row or layout is timed without another line here.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest

from bench import layers, pools, reorders
from bench.measure import noise
from bench.peers import spoil
from bench.shape_files import read_shape_file
from blockconv import Layout
from blockconv.core import target
from blockconv.core.activation import IDENTITY
from blockconv.core.problem import Conv2dProblem, Pool2dProblem, ReorderProblem
from blockconv.core.types import Types
from blockconv.dispatch.array import BlockedArray, empty
from blockconv.dispatch.selection import decide, rows_for
from blockconv.kernels import Row
from blockconv.kernels.common.request import Reason, Request
from blockconv.network import ops
from blockconv.network.builder import NetworkBuilder
from blockconv.network.graph import Network
from blockconv.network.ops.base import OUTPUT
from blockconv.network.planning.binding import bind
from blockconv.network.planning.candidates import Candidate
from blockconv.network.planning.parameters import Parameters
from blockconv.runtime import Program, address_of

QUICK = {"64-64 1x1 56", "128-128 3x3 28", "depthwise 576 3x3 14", "128-128 g32 3x3 56", "3x3 s2", "global 7x7"}
TOLERANCE = 1e-4
LAYOUTS = [Layout(name) for name in layers.LAYOUTS]


class Case(NamedTuple):
    """A kernel for a problem, from one layout to another."""

    row: Row
    problem: Any
    src: Layout
    dst: Layout

    @property
    def title(self) -> str:
        if isinstance(self.problem, ReorderProblem):
            return f"reorder {'x'.join(map(str, self.problem.shape))} {self.src} to {self.dst}"
        return " ".join(filter(None, (self.row.op, getattr(self.problem, "kind", ""), self.problem.name)))


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if "case" in metafunc.fixturenames:
        found = list(_cases(metafunc.config))
        names = [f"{case.title}-{case.row.name}-{case.src}-{case.dst}" for case in found]
        metafunc.parametrize("case", found, ids=names)


def _cases(config: pytest.Config) -> Iterator[Case]:
    everything, pairs = config.getoption("all_problems"), config.getoption("pairs")
    convolutions = read_shape_file(Path(__file__).parent / "shapes" / "peers.txt", "conv2d")
    for problem in (*convolutions, *pools.PROBLEMS):
        if everything or problem.name in QUICK:
            op = "conv2d" if isinstance(problem, Conv2dProblem) else "pool2d"
            yield from _taking(op, problem, [(s, d) for s in LAYOUTS for d in LAYOUTS if pairs or s == d])
    for shape in reorders.SHAPES if everything else reorders.SHAPES[:1]:
        for names in [(s, d) for s in layers.LAYOUTS for d in layers.LAYOUTS if s != d] if pairs else reorders.PAIRS:
            yield from _taking("reorder", ReorderProblem(shape, *names, itemsize=4), [tuple(map(Layout, names))])


def _taking(op: str, problem: Any, pairs: list[Any]) -> Iterator[Case]:
    """Each row and pair that takes the problem; the references, slow by intent, only where no other row does."""
    types = Types.bits(4) if op == "reorder" else Types.all("float32")
    asked = [(row, Request(problem, s, d, types)) for row in rows_for(op, types) for s, d in pairs]
    taken = [(row, request) for row, request in asked if not isinstance(decide(row, request), Reason)]
    found = [Case(row, problem, request.src, request.dst) for row, request in taken]
    yield from [case for case in found if not case.row.reference] or found


@pytest.mark.benchmark(min_rounds=9, max_time=0.15, warmup=True, warmup_iterations=3)
def test_kernel(benchmark: Any, request: pytest.FixtureRequest, case: Case) -> None:
    threads = request.config.getoption("kernel_threads")
    program, buffers, out = _bound(case, threads)
    spoil(out.storage)
    program.run(buffers, threads)
    expected = _expected(case.problem)
    error = float(np.abs(out.numpy() - expected).max() / np.abs(expected).max())
    assert error <= (0.0 if case.row.op == "reorder" else TOLERANCE)  # no time for a wrong result
    benchmark.group = f"{case.title}, {threads} threads"
    benchmark.extra_info.update(
        kernel=case.row.name, src=str(case.src), dst=str(case.dst), error=error, isa=target.isa()
    )
    benchmark(program.run, buffers, threads)


def _bound(case: Case, threads: int) -> tuple[Program, Addresses, BlockedArray]:
    """The kernel as a program, the addresses of its buffers, and its output."""
    row, problem, src, dst = case
    shape = problem.shape if row.op == "reorder" else problem.dst_shape
    x, out = BlockedArray.from_numpy(_data(problem)[0], src), empty(shape, dst, np.float32)
    if row.op == "reorder":
        primitive = row.prepare(problem, src, dst, Types.bits(problem.itemsize))
        return Program(primitive.launches()), Addresses([x.storage, out.storage]), out
    network = _network(problem)
    (node,) = network.nodes
    request = Request(network.problem(node), src, dst, Types.all("float32"))
    chosen = Candidate(row, request, (src,), dst, 0.0)
    bound = bind(network, node, chosen, Parameters(network), threads)
    places = {0: x.storage, OUTPUT: out.storage}
    arrays: list[Any] = [places[operand] if isinstance(operand, int) else operand for operand in bound.operands]
    return Program(bound.launches), Addresses(arrays), out


class Addresses(list):  # type: ignore[type-arg]
    """Addresses, with the arrays that they are of, which have to live as long."""

    def __init__(self, arrays: list[np.ndarray]) -> None:
        super().__init__(map(address_of, arrays))
        self.arrays = arrays


def _network(problem: Conv2dProblem | Pool2dProblem) -> Network:
    """A network of the one problem, through which any row is bound."""
    p, builder = problem, NetworkBuilder()
    x = builder.input("x", p.src_shape)
    step, sides, apart = (p.sh, p.sw), ((p.ph, p.ph_r), (p.pw, p.pw_r)), (p.dh, p.dw)
    if isinstance(p, Conv2dProblem):
        _, wei, bias = _data(p)
        builder.output(builder.add(ops.Conv2d(step, sides, apart, p.g, IDENTITY), x, parameters=(wei, bias)))
    else:
        builder.output(builder.add(ops.Pool2d(p.kind, (p.kh, p.kw), step, sides, apart, p.ceil_mode), x))
    return builder.build()


@functools.lru_cache(maxsize=4)
def _data(problem: Any) -> tuple[np.ndarray, ...]:
    if isinstance(problem, Conv2dProblem):
        return layers.arrays(problem)
    shape = problem.shape if isinstance(problem, ReorderProblem) else problem.src_shape
    return (noise(shape, "float32"),)


@functools.lru_cache(maxsize=4)
def _expected(problem: Any) -> np.ndarray:
    if isinstance(problem, Conv2dProblem):
        return layers.reference(problem, *_data(problem))
    return pools.reference(problem, *_data(problem)) if isinstance(problem, Pool2dProblem) else _data(problem)[0]
