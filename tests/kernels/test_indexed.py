"""Gathers and scatters by indices that flow, running sums, largest elements: against Python, on small problems."""

from __future__ import annotations

import itertools
import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
from eltwise_lab import available, check
from storage_oracle import Array

import blockconv as bc
from blockconv.core.element_problem import IndexProblem, ScanProblem, TopProblem
from blockconv.core.errors import ArgumentError, NetworkError
from blockconv.core.layout import row_major
from blockconv.core.types import Types, element
from blockconv.network import ops

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

Shape = tuple[int, ...]
TYPES = ("float32", "float64", "float16", "bfloat16", "int64", "int32", "uint8")
# (data, indices, form, axis)
PROBLEMS: list[tuple[Shape, Shape, Any, int]] = [
    ((5,), (7,), "along", 0), ((3, 5, 4), (2, 3), "along", 1), ((4, 6), (), "along", 0), ((2, 3, 5), (1,), "along", 2),
    ((3, 5, 4), (2, 7, 4), "elements", 1), ((6,), (9,), "elements", 0), ((2, 3, 4, 5), (2, 2, 4, 3), "elements", 3),
    ((3, 5, 4), (4, 2), "tuples", 0), ((3, 5, 4), (2, 2, 3), "tuples", 0), ((3, 5, 4), (1,), "tuples", 0),
    ((3, 5, 4, 2), (3, 6, 2), "tuples", 1), ((2, 3, 5, 4), (2, 3, 1, 1), "tuples", 2), ((1, 1), (1, 1), "along", 1),
]  # fmt: skip


def numbers(shape: Shape, name: str, seed: int = 0) -> Array:
    """Small whole numbers; of floats a few are NaN or infinite."""
    rng, dtype = np.random.default_rng([seed, *shape]), element(name).dtype
    x = rng.integers(0, 5, shape).astype(dtype)
    if element(name).is_float:
        x = np.where(
            rng.random(shape) < 0.1, np.asarray(rng.choice([math.nan, math.inf, -math.inf], shape)).astype(dtype), x
        )
    return np.asarray(x)


def places(data: Shape, indices: Array, form: str, axis: int, from_end: bool = True) -> list[tuple[int, ...] | None]:
    """For each index, or tuple, the beginning of the place that it names; None if there is none."""
    found: list[tuple[int, ...] | None] = []
    if form == "along":
        for before in np.ndindex(*data[:axis]):
            found += [(*before, int(k)) for k in indices.reshape(-1)]
    elif form == "elements":
        for place in np.ndindex(*indices.shape):
            found.append((*place[:axis], int(indices[place]), *place[axis + 1 :]))
    else:
        for place in np.ndindex(*indices.shape[:-1]):
            found.append((*place[:axis], *map(int, indices[place])))
    wrapped = (tuple(k + data[d] * (k < 0 and from_end) for d, k in enumerate(place)) for place in found if place)
    return [place if all(0 <= k < data[d] for d, k in enumerate(place)) else None for place in wrapped]


def some_indices(data: Shape, shape: Shape, form: str, axis: int, outside: bool) -> Array:
    rng = np.random.default_rng([*data, *shape])
    limits = np.array(data[axis : axis + shape[-1]] if form == "tuples" else data[axis]) + (2 if outside else 0)
    return np.asarray(rng.integers(-limits, limits, shape, dtype=np.int64))


def types_of(data: str, index: str, dst: str = "") -> Types:
    return Types(element(data), element(index), element(data), element(dst or data))


def tag(shape: Shape) -> str:
    return row_major(max(1, len(shape))).tag


@pytest.mark.parametrize(("outside", "from_end"), [(False, True), (True, True), (True, False)])
@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_gathers(problem: tuple[Shape, Shape, Any, int], outside: bool, from_end: bool) -> None:
    data, shape, form, axis = problem
    p = IndexProblem(data, shape, form, axis, from_end)
    for name, index in (("float32", "int64"), ("uint8", "int32"), ("float64", "int64"), ("bfloat16", "int64")):
        x, at = numbers(data, name), some_indices(data, shape, form, axis, outside)
        zero = np.zeros(
            data[axis + 1 :] if form == "along" else () if form == "elements" else data[axis + shape[-1] :], x.dtype
        )
        items = [zero if place is None else x[place] for place in places(data, at, form, axis, from_end)]
        wanted = np.array(items, x.dtype).reshape(p.dst_shape)
        operands = [(x, ""), (at.astype(index), "")]
        if p.dst_shape:
            dst = tag(p.dst_shape)
            check("gather_at", p, tag(data), operands, wanted, dst=dst, types=types_of(name, index), threads=2)
        if not outside:
            assert np.array_equal(ops.GatherAt(form, axis).evaluate([x, at], []), wanted, equal_nan=True)


@pytest.mark.parametrize("problem", [p for p in PROBLEMS if p[2] != "along"], ids=str)
def test_scatters(problem: tuple[Shape, Shape, Any, int]) -> None:
    data, shape, form, axis = problem
    p = IndexProblem(data, shape, form, axis)
    combine: dict[str, Any] = {
        "none": lambda a, b: b,
        "add": np.add,
        "mul": np.multiply,
        "max": np.maximum,
        "min": np.minimum,
    }
    for (name, index), kind in itertools.product(
        (("float32", "int64"), ("int64", "int32"), ("float16", "int64")), combine
    ):
        outside = kind == "max"
        x, at = numbers(data, name), some_indices(data, shape, form, axis, outside)
        updates = numbers(p.dst_shape, name, 1)
        wanted, named = np.array(x), places(data, at, form, axis)
        items = updates.reshape(len(named), *(data[p.components[-1] + 1 :] if form == "tuples" else ()))
        for place, item in zip(named, items, strict=True):
            if place is not None:
                with np.errstate(all="ignore"):
                    wanted[place] = combine[kind](wanted[place], item)
        operands = [(x, ""), (at.astype(index), ""), (updates, "")]
        check("scatter_at", p, tag(data), operands, wanted, types=types_of(name, index), kind=kind)
        made = ops.ScatterAt(form, axis, kind)  # type: ignore[arg-type]
        if not outside:
            assert np.array_equal(made.evaluate([x, at, updates], []).astype(x.dtype), wanted, equal_nan=True)


def by_index(problem: tuple[Shape, Shape, Any, int], scatters: bool, name: str = "made") -> bc.Network:
    """x at the indices `at`; or x, with the gathered elements scattered to where they are from."""
    data, shape, form, axis = problem
    b = bc.NetworkBuilder()
    x, at = b.input("x", data), b.input("at", shape, "int64")
    made = b.add(ops.GatherAt(form, axis), x, at, name="first" if scatters else name)
    b.output(b.add(ops.ScatterAt(form, axis), x, at, made, name=name) if scatters else made)
    return b.build()


@pytest.mark.parametrize("problem", PROBLEMS, ids=str)
def test_an_index_that_the_data_does_not_have_is_an_error(problem: tuple[Shape, Shape, Any, int]) -> None:
    """Of plans and of the evaluator: it names node, index and range. The next call is right."""
    data, shape, form, axis = problem
    scatters, rng = form != "along", np.random.default_rng([*data, *shape])
    network = by_index(problem, scatters)
    plan = bc.compile(network, threads=2)
    x, inside = numbers(data, "float32"), some_indices(data, shape, form, axis, False)
    for beyond in (True, False):
        at, where = np.array(inside), tuple(int(rng.integers(n)) for n in shape)
        of = axis + (where[-1] if form == "tuples" else 0)
        at[where] = wrong = data[of] if beyond else -data[of] - 1
        said = (
            rf"node '{'first' if scatters else 'made'}' .*indices={wrong}: .*{-data[of]} to {data[of] - 1}.* axis {of} "
        )
        for run in (
            plan.by_name,
            plan.profile,
            lambda *given: network.evaluate(dict(zip(("x", "at"), given, strict=True))),
        ):
            with pytest.raises(NetworkError, match=said):
                run(x, at)
        assert np.array_equal(
            plan(x, inside), next(iter(network.evaluate({"x": x, "at": inside}).values())), equal_nan=True
        )


def test_a_scatter_reports_its_own_indices() -> None:
    b = bc.NetworkBuilder()
    x, at, new = b.input("x", (3, 4)), b.input("at", (2, 2), "int32"), b.input("new", (2,))
    b.output(b.add(ops.ScatterAt("tuples"), x, at, new, name="written"))
    plan = bc.compile(b.build(), threads=1)
    with pytest.raises(NetworkError, match=r"'written' \(scatter_at\): indices=-5: have to be -4 to 3, as axis 1"):
        plan(np.zeros((3, 4), np.float32), np.array([[0, 0], [2, -5]], np.int32), np.ones(2, np.float32))


def test_each_call_has_a_report_of_its_own() -> None:
    """Threads call one plan with sizes that share memory. The second node reads what the first one writes."""
    b = bc.NetworkBuilder()
    x, at = b.input("x", (64, 8)), b.input("at", (300,), "int64")
    b.output(b.add(ops.GatherAt("along", 1), b.add(ops.GatherAt("along"), x, at, name="rows"), at, name="columns"))
    plan, data = bc.compile(b.build(), threads=2), np.arange(512, dtype=np.float32).reshape(64, 8)

    def call(k: int) -> None:
        named = np.full(300 - k % 2, k % 8)
        if k % 3 == 0:
            named[k % 300] = 1000 + k
            with pytest.raises(NetworkError, match=f"'rows' .*indices={1000 + k}:"):
                plan(data, named)
        elif k % 3 == 1:
            named[k % 300] = 8 + k % 32
            with pytest.raises(NetworkError, match=f"'columns' .*indices={8 + k % 32}:"):
                plan(data, named)
        else:
            assert np.array_equal(plan(data, named), data[named][:, named])

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(call, range(240)))


def lines(x: Array, axis: int) -> Array:
    return np.moveaxis(x, axis, -1)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.sampled(3)
def test_scans(name: str) -> None:
    start = {"add": 0, "mul": 1}
    combine: dict[str, Any] = {"add": lambda a, b: a + b, "mul": lambda a, b: a * b, "max": max, "min": min}
    for k, (kind, exclusive, reverse) in enumerate(itertools.product(combine, (False, True), (False, True))):
        shape, axis = [((3, 4, 5), 1), ((7,), 0), ((2, 6), 1), ((4, 1, 3), 0)][k % 4]
        if exclusive and kind not in start:
            continue
        x = numbers(shape, name, k)
        x = (
            np.where(x.astype("f8") == x.astype("f8"), x, 2).astype(x.dtype) if kind in ("max", "min") else x
        )  # Python's max
        wanted = np.empty_like(lines(x, axis))
        for place in np.ndindex(*wanted.shape[:-1]):
            line = lines(x, axis)[place].astype("f8" if element(name).is_float else "i8").tolist()
            line = line[::-1] if reverse else line
            sums = list(itertools.accumulate(line, combine[kind]))
            sums = [start[kind], *sums[:-1]] if exclusive else sums
            wanted[place] = np.array(sums[::-1] if reverse else sums).astype(x.dtype)
        wanted = np.ascontiguousarray(np.moveaxis(wanted, -1, axis))
        p: Any = ScanProblem(shape, axis, kind, exclusive, reverse)  # type: ignore[arg-type]
        check("scan", p, tag(shape), [(x, "")], wanted, types=types_of(name, name), threads=2)
        made = ops.Scan(axis, kind, exclusive, reverse)  # type: ignore[arg-type]
        assert np.array_equal(made.evaluate([x], []).astype(x.dtype), wanted, equal_nan=True)


@pytest.mark.parametrize("name", TYPES)
@pytest.mark.sampled(3)
def test_largest(name: str) -> None:
    for k, (smallest, last) in enumerate(itertools.product((False, True), repeat=2)):
        for shape, axis, count in (((3, 9, 2), 1, 4), ((40,), 0, 40), ((2, 5), 1, 1), ((1, 1), 0, 1)):
            x = numbers(shape, name, k)
            wide = lines(x, axis).astype("f8")
            wanted = np.empty((*wide.shape[:-1], count), np.int64)
            for place in np.ndindex(*wide.shape[:-1]):
                line = list(enumerate(wide[place].tolist()))
                line = line[::-1] if last else line
                line.sort(
                    key=lambda pair: (
                        (pair[1] == pair[1], pair[1] if smallest else -pair[1]) if pair[1] == pair[1] else (False, 0)
                    )
                )
                wanted[place] = [index for index, _ in line[:count]]
            wanted = np.ascontiguousarray(np.moveaxis(wanted, -1, axis))
            p = TopProblem(shape, axis, count, smallest, last)
            check("top", p, tag(shape), [(x, "")], wanted, types=types_of(name, name, "int64"), threads=2)
            assert np.array_equal(ops.Top(axis, count, smallest, last).evaluate([x], []), wanted)


@pytest.mark.parametrize("shape", [(2, 0), (0, 3), (0, 0), (0,)], ids=str)
def test_largest_of_nothing(shape: tuple[int, ...]) -> None:
    b = bc.NetworkBuilder()
    b.output(b.add(ops.Top(len(shape) - 1, 0), b.input("x", shape)))
    network, x = b.build(), np.empty(shape, np.float32)
    for found in (network.evaluate(x), bc.compile(network, threads=1)(x)):
        (found,) = found.values() if isinstance(found, dict) else (found,)
        assert (found.shape, found.dtype) == ((*shape[:-1], 0), np.int64)


def test_what_is_no_problem() -> None:
    for make, said in (
        (lambda: IndexProblem((3,), (2,), "along", 1), "has to be one of the 1 axes"),
        (lambda: IndexProblem((3, 4), (4, 2), "elements", 1), "must fit into"),
        (lambda: IndexProblem((3, 4), (2, 3), "tuples"), "at most 2 indices"),
        (lambda: TopProblem((3,), 0, 4), "must be 0 to 3"),
        (lambda: ScanProblem((0,), 0, "max"), "undefined"),
    ):
        with pytest.raises(ArgumentError, match=said):
            make()
    b = bc.NetworkBuilder()
    with pytest.raises(NetworkError, match="int64 or int32"):
        b.add(ops.GatherAt("along"), b.input("x", (3,)), b.input("at", (2,)))
