"""The frame of a drop-in call: the first of calls that are alike checks and binds, and each is one launch.

A function is a `Frame` with a `solve`, which checks its arrays and names the problem. The frame remembers what `solve`
finds for the shapes, strides and types of the arrays, the function's options and the number of threads.
"""

from __future__ import annotations

import functools
import itertools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.errors import ArgumentError, DtypeError
from blockconv.core.interop import as_numpy, like, like_any
from blockconv.core.layout import Layout
from blockconv.core.types import FLOATS, Types, as_float
from blockconv.dispatch import selection
from blockconv.dispatch.array import NCHW, BlockedArray, allocate, is_channels_last, storage_of, to_layout
from blockconv.dispatch.boundary import (
    cache_key,
    check_array_layout,
    check_out,
    checked_alias,
    dense_layout,
    given_images,
    keep,
    memory_of,
    native_layout,
    reordered,
)
from blockconv.runtime import Program, address_of, get_num_threads
from blockconv.runtime.memory import AlignedLike, Scratch

workspace = Scratch()  # of the thread that calls

_NOTHING: Mapping[str, Any] = MappingProxyType({})


class Result(NamedTuple):
    """An array that a call gives.

    layout: as the kernel writes it; None: dense, of any number of dimensions.
    is_plain: an array even for BlockedArrays; a tensor if any input is one.
    """

    shape: tuple[int, ...]
    layout: Layout | None
    dtype: Any
    zero_point: int = 0
    is_plain: bool = False


class Computation(NamedTuple):
    """The work of a function on arrays of certain shapes, layouts and types.

    row: the op of the table's rows.
    problem: None if there is nothing to compute, so that all results are zeros.
    src, dst: layouts of the request.
    read: the layout in which the kernel reads each array.
    results: the first one goes to `out`.
    buffers: names in the kernel's order: of arrays, of what is beside them, and "out", "out1", ... for the results. A
        name of none of these is a null.
    options: of the row.
    """

    row: str
    problem: Any
    src: Layout
    dst: Layout
    types: Types
    read: Sequence[Layout]
    results: tuple[Result, ...]
    buffers: tuple[str, ...]
    options: Mapping[str, Any] = _NOTHING


class Destination(NamedTuple):
    """Where the first result has to go.

    layout: the layout of `out`, or the argument `out_layout`; None without either.
    dtype: the dtype of `out`; None without it.
    """

    layout: Layout | None
    dtype: Any


# From arrays by name, the destination, the options of a call and its `kind`.
Solve = Callable[[dict[str, BlockedArray], Destination, Any, Any], Computation]


class Bound(NamedTuple):
    """A program for calls whose arrays are of one kind.

    order: takes the kernel's buffers from the arrays, the results, those beside them, and a null; None if those are
        the buffers.
    workspace: bytes that the program needs, whose buffer is the last one.
    room: makes the first result.
    others: make the other ones.
    is_plain: see `Result`, of the first.
    is_simple: whether one array is read and another one written, and nothing else.
    """

    program: Program
    threads: int
    order: Callable[[list[int]], tuple[int, ...]] | None
    workspace: int
    is_plain: bool
    is_simple: bool = False
    room: Callable[[], Any] = tuple
    others: tuple[Callable[[], Any], ...] = ()

    def launch(self, memory: Iterable[Any]) -> None:
        """Run on arrays, results, and what is beside them; None for what is left out."""
        starts = [*map(start_of, memory)]
        addresses: Sequence[int] = starts if self.order is None else self.order([*starts, 0])
        if self.workspace:
            addresses = (*addresses, workspace.of(self.workspace))
        self.program.run(addresses, self.threads)


_bound: dict[Any, Bound] = {}


class Frame:
    """A drop-in function on arrays, tensors and BlockedArrays.

    op: its name in the texts of errors.
    names: of the arguments that are arrays; the results are of the kind of the first.
    beside: names of further buffers, which calls give as the kernel reads or writes them.
    optional: arguments that may be None.
    types: the element types of the arguments that take others than `FLOATS`.
    takes_one: whether (C, H, W) is one image.
    """

    __slots__ = ("_beside", "_names", "_optional", "_solve", "_takes_one", "_types", "op")

    def __init__(
        self,
        op: str,
        names: tuple[str, ...],
        solve: Solve,
        beside: tuple[str, ...] = (),
        optional: tuple[str, ...] = (),
        types: Mapping[str, Sequence[str]] = _NOTHING,
        takes_one: bool = False,
    ) -> None:
        self.op, self._names, self._solve, self._beside = op, names, solve, beside
        self._optional, self._types, self._takes_one = optional, types, takes_one

    def __call__(
        self,
        given: tuple[Any, ...],
        options: tuple[Any, ...],
        kind: Any = None,
        beside: tuple[Any, ...] = (),
        out: Any = None,
        out_layout: Any = None,
    ) -> list[Any]:
        """The results.

        given: the arrays; None for one that is left out.
        options: further arguments, as the caller gave them.
        kind: hashable facts on which `solve` depends, too.
        beside: arrays; None for one that is left out.

        Raises ArgumentError, or a subclass, for a bad argument, before it writes anything.
        """
        op, first = self.op, given[0]
        if len(given) == 1:  # spares lists, a tenth of a small call's time
            x = first if type(first) is np.ndarray else given_array(op, self._names[0], first)
            arrays: tuple[Any, ...] = (x,)
            key: tuple[Any, ...] = (op, cache_key(options), kind, get_num_threads(), memory_order(x))
        else:
            named = zip(self._names, given, strict=True)
            arrays = tuple(
                [None if x is None and name in self._optional else given_array(op, name, x) for name, x in named]
            )
            key = (op, cache_key(options), kind, get_num_threads(), *map(memory_order, arrays))
        wanted = written = None
        if out is not None or out_layout is not None:
            wanted = None if out_layout is None else native_layout(out_layout, op, "out_layout")
            is_held = isinstance(out, BlockedArray) and isinstance(first, BlockedArray)
            written = out if out is None or is_held else as_numpy(out, op, "out", write=True)
            key = *key, memory_order(written), wanted
        bound = _bound.get(key)
        if bound is None:
            bound, made, is_alike = self._first(arrays, (options, kind), beside, written, wanted)
            if is_alike:
                keep(_bound, key, bound)
        elif bound.is_simple and written is None:
            y = bound.room()
            bound.program.run((start_of(arrays[0]), start_of(y)), bound.threads)
            return [like(first, y)]
        else:
            made = [bound.room() if written is None else written]
            if bound.others:
                made += [room() for room in bound.others]
            if written is not None:
                for name, x in zip(self._names, arrays, strict=True):
                    if x is not None:
                        checked_alias(op, memory_of(x), memory_of(written), name)
            bound.launch(itertools.chain(arrays, made, beside))
        for k in range(1, len(made)):
            made[k] = like_any(given, made[k])
        if out is not None:
            made[0] = out
        else:
            made[0] = like_any(given, made[0]) if bound.is_plain else like(first, made[0])
        return made

    # -- the first of calls that are alike

    def _first(
        self, given: Sequence[Any], about: tuple[Any, Any], beside: tuple[Any, ...], out: Any, wanted: Layout | None
    ) -> tuple[Bound, list[Any], bool]:
        """The bound program, the results, and whether the next call needs no checks, because nothing was copied.

        about: the options and the kind of the call.
        """
        first, named = given[0], dict(zip(self._names, given, strict=True))
        is_one = self._takes_one and len(first.shape) == 3
        sources = {name: self._read(name, x) for name, x in named.items() if x is not None}
        written = out[None] if is_one and out is not None else out
        final = self._layout_of(first, written, wanted)
        solution = self._solve(sources, Destination(final, getattr(out, "dtype", None)), *about)
        if final is None and not solution.results[0].is_plain:
            final = first.layout if isinstance(first, BlockedArray) else sources[self._names[0]].layout
        read = {name: to_layout(x, to) for (name, x), to in zip(sources.items(), solution.read, strict=True)}
        made: list[Any] = [
            np.zeros(r.shape, r.dtype) if r.layout is None else allocate(r.shape, r.layout, r.dtype, r.zero_point)
            for r in solution.results
        ]
        held = None if written is None else self._held(first, written, solution.results[0], final)
        if held is not None:
            for name, x in read.items():
                checked_alias(self.op, x.storage, held.storage, name)
            if held.layout is made[0].layout:
                made[0] = held
        bound = self._bind(solution)
        if solution.problem is None:
            for x in made:
                memory_of(x)[...] = 0
        else:
            bound.launch((*map(read.get, named), *made, *beside))
        for k, x in enumerate(made):
            if final is not None and isinstance(x, BlockedArray):
                made[k] = to_layout(x, final, out=held if k == 0 else None) if x.layout is not final else x
        is_alike = solution.problem is not None and all(
            start_of(x) == start_of(read[name]) for name, x in named.items() if x is not None
        )
        is_alike = is_alike and all(r.layout in (None, final or r.layout) for r in solution.results)
        are_arrays = not isinstance(first, BlockedArray)
        seen = [
            _logical(x, is_one) if isinstance(x, BlockedArray) and (are_arrays or r.is_plain) else x
            for x, r in zip(made, solution.results, strict=True)
        ]
        room, *others = map(_room, seen, solution.results)
        is_simple = len(read) == len(made) == 1 and bound.order is None and not bound.workspace
        return bound._replace(is_simple=is_simple, room=room, others=tuple(others)), seen, is_alike

    def _read(self, name: str, x: Any) -> BlockedArray:
        """An array in a native layout, without a copy if it is dense in one."""
        if not isinstance(x, BlockedArray) and self._takes_one:
            x = given_images(self.op, x, name)[0]
        return as_blocked(self.op, name, x, self._types.get(name, FLOATS))

    def _layout_of(self, first: Any, out: Any, wanted: Layout | None) -> Layout | None:
        """The layout that the caller wants of the first result; None for any."""
        if isinstance(out, BlockedArray):
            return wanted or out.layout
        if out is None and isinstance(first, BlockedArray):
            return wanted
        check_array_layout(self.op, wanted)
        return wanted if out is None else dense_layout(self.op, out, is_channels_last(out), wanted)

    def _held(self, first: Any, out: Any, target: Result, layout: Layout | None) -> BlockedArray:
        """`out` as a BlockedArray of its memory. Raises ArgumentError if it does not fit."""
        is_blocked = isinstance(first, BlockedArray) and not target.is_plain
        kind = BlockedArray if is_blocked else np.ndarray
        check_out(self.op, out, kind, target.shape, target.dtype, layout if is_blocked else None)
        if isinstance(out, BlockedArray):
            if out.zero_point != target.zero_point:
                rule = f"has to have the output's zero point, {target.zero_point}"
                raise ArgumentError(self.op, "out", out, rule)
            return out
        assert layout is not None
        return BlockedArray(out.transpose(layout.outer), layout, target.shape)

    def _bind(self, solution: Computation) -> Bound:
        results = [f"out{k}" if k else "out" for k in range(len(solution.results))]
        names = [*self._names, *results, *self._beside]
        program, room, threads = Program(()), 0, get_num_threads()
        if solution.problem is not None:
            request = solution.row, solution.problem, solution.src, solution.dst, solution.types, threads
            program, room = selection.program_of(*request, **solution.options)
        positions = tuple(names.index(name) if name in names else len(names) for name in solution.buffers)
        in_order = positions == tuple(range(len(names)))
        order = None if in_order else operator.itemgetter(*positions)
        return Bound(program, threads, order, room, solution.results[0].is_plain)


def _room(seen: Any, result: Result) -> Callable[[], Any]:
    """Makes results like one that a caller has seen."""
    if isinstance(seen, BlockedArray):
        return functools.partial(allocate, seen.shape, seen.layout, seen.dtype, seen.zero_point)
    if result.layout is None:
        return functools.partial(np.zeros, seen.shape, seen.dtype)
    return AlignedLike(seen)


def _logical(x: BlockedArray, is_one: bool) -> Any:
    """The array, (N, C, H, W), or (C, H, W) for one image, of a layout without blocks."""
    result = x.storage.transpose(x.layout.logical)
    return result[0] if is_one else result


# ---------------------------------------------------------------- arrays


def given_array(op: str, argument: str, x: Any) -> Any:
    """A BlockedArray as it is, anything else as an array."""
    return x if isinstance(x, BlockedArray) else as_numpy(x, op, argument)


def memory_order(x: Any) -> tuple[Any, ...]:
    """The properties of an array that decide its kernel, without its address. Calls with equal ones are bound once."""
    if type(x) is np.ndarray:
        return x.shape, x.strides, x.dtype, x.flags.aligned
    return () if x is None else (x.layout, x.shape, x.dtype, x.zero_point)


def check_alike(op: str, given: Mapping[str, BlockedArray]) -> BlockedArray:
    """The first of some arrays. Raises ArgumentError or DtypeError unless all have its shape and dtype."""
    first, *_ = given
    x = given[first]
    for name, each in given.items():
        if each.shape != x.shape:
            raise ArgumentError(op, name, each.shape, f"has to have the shape of {first}, {x.shape}")
        if each.dtype != x.dtype:
            raise DtypeError(op, name, str(each.dtype), f"has to have the dtype of {first}, {x.dtype}")
    return x


def start_of(x: Any) -> int:
    """The address of an array's first byte; 0 for None."""
    if type(x) is np.ndarray:
        return address_of(x)
    return 0 if x is None else address_of(memory_of(x))


def as_blocked(op: str, argument: str, given: Any, types: Sequence[str] = FLOATS) -> BlockedArray:
    """An array in a native layout, without a copy if it is dense in one."""
    x = given_array(op, argument, given)
    if len(x.shape) != 4:
        raise ArgumentError(op, argument, x, "has to be (N, C, H, W)")
    if str(x.dtype) not in types:
        rule = "has to be " + " or ".join(filter(None, (", ".join(types[:-1]), types[-1])))
        raise DtypeError(op, argument, str(x.dtype), rule, as_float(argument, x.dtype))
    if isinstance(x, BlockedArray):
        return x if x.layout.is_native else reordered(op, x, NCHW)
    return BlockedArray(*storage_of(x, is_channels_last(x)), x.shape)
