"""Runs rows of the table on logical arrays: dirty tails, guard pages, the destination compared whole."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
from guarded import Guarded, available
from storage_oracle import Array, stored

from blockconv import NATIVE, Layout
from blockconv.core.eltwise_problem import GatherProblem
from blockconv.core.types import Types, element
from blockconv.kernels import TABLE, Row
from blockconv.runtime import Program, address_of

LAYOUTS = [str(layout) for layout in NATIVE]
ISA_LAYOUTS = ("NCHW", "NHWC", "NCHW4", "NCHW32", "CHWN4")


def isa_layouts() -> list[Any]:
    """All native layouts, as parameters; some run again with narrower vectors."""
    return [pytest.param(name, marks=[pytest.mark.isa] if name in ISA_LAYOUTS else []) for name in LAYOUTS]


_ARENAS = [Guarded(1 << 21) for _ in range(7)] if available() else []


def rows(op: str, problem: Any, src: str, dst: str | None, types: Types) -> Iterator[Row]:
    """Every row that says that it can solve the problem."""
    for row in TABLE:
        if row.op == op and not row.rejects(problem, Layout(src), Layout(dst or src), types):
            yield row


def place(logical: Array, layout: str, dirt: object) -> Array:
    """The storage of a logical array of any rank: native layouts are for (N, C, H, W), others row-major."""
    if logical.ndim != 4 or layout == "abcd":
        return np.ascontiguousarray(logical).reshape(-1)
    return stored(logical, layout, dirt)


def of_channels(x: Array, layout: str) -> tuple[Array, str]:
    """A dense operand with an element for each channel, up to the end of a block; those beyond are not used."""
    return np.pad(x, (0, -len(x) % Layout(layout).blocks[1]), constant_values=77), ""


def check(
    op: str, problem: Any, layout: str, operands: Sequence[tuple[Array, str]], wanted: Array, *,
    dst: str | None = None, exact: bool = True, tolerance: float = 1e-6, threads: int = 1, in_place: int | None = None,
    scale: float | None = None, fill: float = 0, references: bool = True, types: Types | None = None, **options: Any,
) -> set[str]:  # fmt: skip
    """Run every kernel for it at both ends of guarded memory. operands: logical arrays, and their layouts ("": dense).

    types: where they are not all the type of `wanted`. in_place: the destination is this operand's memory.
    fill: what its padding has to hold. references: run those too. Results of 16 bits have to be `wanted`, but for a few
    that lie between two such numbers, which may be the other one.
    """
    dtype = wanted.dtype
    types = types or Types.all(dtype)
    names = set()
    after = place(wanted, dst or layout, fill)
    before = [
        np.ravel(x) if lay == "" else place(x, lay, np.nan if element(x.dtype).is_float else 99) for x, lay in operands
    ]
    found = [row for row in rows(op, problem, layout, dst, types) if references or not row.reference]
    assert found, f"no kernel for {problem} from {layout} to {dst or layout}"
    for row, where in itertools.product(found, ("end", "start")):
        layouts = Layout(layout), Layout(dst or layout)
        primitive = row.prepare(problem, *layouts, types, threads, **options)
        program, memory = Program(primitive.launches()), [np.full(n, 0xC3, np.uint8) for n in primitive.workspace]
        what = f"{row.name}, {problem}, {layout} to {dst or layout}, {dtype}, {options}, against the {where}"
        sources = []
        for arena, storage in zip(_ARENAS, before, strict=False):
            source = arena.take(storage.nbytes, where)
            source[:] = storage.view(np.uint8)
            sources.append(source)
        arena = _ARENAS[len(before)] if in_place is None else _ARENAS[in_place]
        target = arena.take(after.nbytes, where) if in_place is None else sources[in_place]
        if in_place is None:
            target[:] = 0xC3
        program.run([*map(address_of, (*sources, target, *memory))], threads)
        if element(dtype).is_half:
            compare_halves(target.view(dtype), after, what)
        else:
            compare(target.view(dtype), after, exact, tolerance, what, scale)
        assert arena.intact(), f"{what}: wrote outside"
        for k, storage in enumerate(before):
            assert k == in_place or np.array_equal(sources[k], storage.view(np.uint8)), f"{what}: wrote to a source"
        names.add(row.name)
    return names


def compare(found: Array, wanted: Array, exact: bool, tolerance: float, what: str, scale: float | None) -> None:
    if exact:
        assert np.array_equal(found, wanted, equal_nan=True), what
        return
    finite = np.isfinite(wanted)
    assert np.array_equal(found[~finite], wanted[~finite], equal_nan=True), what
    assert np.all(found[wanted == 0] == 0), what
    largest = np.abs(wanted[finite]).max(initial=1e-30) if scale is None else scale
    assert np.abs(found[finite] - wanted[finite]).max(initial=0) <= tolerance * largest, what


def compare_halves(found: Array, wanted: Array, what: str) -> None:
    """The same bits, but for one in a hundred, which may be the number beside: what is computed as float32 may lie on
    the other side of the middle of two numbers of 16 bits. Nor are numbers apart that are so in float32."""
    apart = np.abs(ordered(found) - ordered(wanted))
    with np.errstate(invalid="ignore"):
        wide = wanted.astype(np.float32)
        apart[np.abs(found.astype(np.float32) - wide) <= 1e-6 * np.abs(wide).max(initial=0)] = 0
    assert apart.max(initial=0) <= 1, what
    assert np.mean(apart) <= 0.01, what


def ordered(halves: Array) -> Array:
    """Floats of 16 bits as integers, in whose order they are; both zeros are 0, all NaNs one number."""
    bits = halves.view(np.int16).astype(np.int32)
    whole = np.where(bits < 0, -(bits & 0x7FFF), bits)
    return np.where(np.isnan(halves), 1 << 16, whole)


def sliced(shape: Sequence[int], begins: Sequence[int], sizes: Sequence[int], steps: Sequence[int]) -> GatherProblem:
    """The elements begin, begin + step, ... of each axis."""
    return GatherProblem(tuple(shape), tuple((run,) for run in zip(begins, sizes, steps, strict=True)))
