"""The frame of a drop-in call: the first of calls that are alike checks and binds, and each is one launch.

A function is a `Frame` with a `solve`, which checks its arrays and names the program. The frame remembers what `solve`
finds for the shapes, strides and types of the arrays, the function's options and the number of threads.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.checks import Names, Shape, check_same
from blockconv.core.errors import ArgumentError, DtypeError, UnsupportedError
from blockconv.core.interop import as_numpy, like, like_any, tensor_order
from blockconv.core.layout import NCHW, Layout
from blockconv.core.python import zipped
from blockconv.core.types import FLOATS, Array, Types, as_float
from blockconv.dispatch import selection
from blockconv.dispatch.array import (
    BlockedArray,
    allocate,
    check_alias,
    check_out,
    is_channels_last,
    require_movable,
    storage_of,
    to_layout,
)
from blockconv.dispatch.boundary import (
    cache_key,
    check_array_layout,
    dense_layout,
    given_images,
    keep,
    memory_of,
    native_layout,
    reordered,
)
from blockconv.runtime import Program, address_of, get_num_threads
from blockconv.runtime.memory import Scratch, aligned_like

_workspace = Scratch()  # of the thread that calls

_NOTHING: Mapping[str, Any] = MappingProxyType({})
_ARRAY = np.ndarray  # a name of this module is found sooner than one of another


class Result(NamedTuple):
    """An array that a call gives.

    layout: as the kernel writes it; None: dense, of any number of dimensions.
    is_plain: an array even for BlockedArrays; a tensor if any input is one.
    """

    shape: Shape
    layout: Layout | None
    dtype: Any
    zero_point: int = 0
    is_plain: bool = False


# Makes addresses of a call's operands and `values`, and returns the memory there too, which the call has to keep.
Derive = Callable[[Sequence[Any], Any], tuple[Sequence[int], Any]]


class Computation(NamedTuple):
    """The work of a function on arrays of certain shapes, layouts and types.

    program: None if there is nothing to compute, so that all results are zeros.
    workspace: bytes that the program needs, whose buffer is the last one.
    read: the layout in which the kernel reads each array.
    results: the first one goes to `out`.
    buffers: names in the kernel's order: of arrays, of what is beside them, of what is derived, and "out", "out1", ...
        for the results. Any other name is a null.
    layout: the first result's, if the caller names none; None: the first array's.
    derive: makes the buffers named in `derived`, at each call.
    beside: of those buffers, for a caller that makes them once: their arrays or bytes. With "positions", "biases" are
        gathered at each call: for each of them, its number among the given ones from 1 on, and 0 for a zero.
    """

    program: Program | None
    workspace: int
    read: Sequence[Layout]
    results: tuple[Result, ...]
    buffers: Names
    layout: Layout | None = None
    derived: Names = ()
    derive: Derive | None = None
    beside: Mapping[str, int | Array] | None = None


class Call(NamedTuple):
    """The arguments of `solve`.

    arrays: by name, in native layouts.
    operands: as they were given.
    options, kind, values: as in `Frame.__call__`.
    layout: the one that the caller wants for the first result; None for any.
    dtype: the dtype of `out`; None without it.
    is_blocked: whether the first result is to be a BlockedArray.
    """

    arrays: dict[str, BlockedArray]
    operands: Sequence[Any]
    options: tuple[Any, ...]
    kind: Any
    values: Any
    layout: Layout | None
    dtype: Any
    is_blocked: bool


class Bound(NamedTuple):
    """A program for calls whose arrays are of one kind.

    order: takes the kernel's buffers from the arrays, the results, those beside them, those derived, and a null; None
        if those are the buffers.
    is_plain: the first result's; see `Result`.
    is_simple: whether the kernel reads the arrays in place, and writes the only result.
    read: the layouts of the arrays if any of them is copied; else None.
    final: the layout that the first result is reordered to; None if the kernel writes it.
    room: makes the first result.
    others: make the other results.
    """

    program: Program | None
    threads: int
    order: Callable[[Sequence[int]], Sequence[int]] | None
    workspace: int
    derive: Derive | None
    is_plain: bool
    is_simple: bool
    read: Sequence[Layout] | None
    final: Layout | None
    room: Callable[[], Any]
    others: tuple[Callable[[], Any], ...]

    def launch(self, memory: Iterable[Any], operands: Sequence[Any], values: Any) -> None:
        """Run on arrays, results, and what is beside them, in `memory`; None for what is left out."""
        program, threads, order, workspace, derive = self[:5]
        assert program is not None
        starts = [address_of(x) if type(x) is _ARRAY else 0 if x is None else start_of(x) for x in memory]
        if derive is not None:
            derived, _held = derive(operands, values)  # is kept till the program has run
            starts += derived
        if order is not None:
            starts.append(0)
            starts = order(starts)  # type: ignore[assignment]
        if workspace:
            start, _workspace_held = _workspace.of(workspace)
            starts = [*starts, start]
        program.run(starts, threads)


BoundCalls = dict[Any, Bound]
_kept: BoundCalls = {}


class Frame:
    """A drop-in function on arrays, tensors and BlockedArrays.

    op: its name in the texts of errors.
    names: of the arguments that are arrays; the results are of the kind of the first.
    operands: the names of further arrays, which the kernel reads in a form that `Computation.derive` makes.
    beside: names of further buffers, which calls give as the kernel reads or writes them.
    optional: arguments that may be None.
    types: the element types of the arguments that take others than `FLOATS`; None if `solve` checks them.
    takes_one: whether (C, H, W) is one image.
    """

    __slots__ = ("_all", "_beside", "_may_miss", "_names", "_solve", "_takes_one", "_types", "op")

    def __init__(
        self,
        op: str,
        names: Names,
        solve: Callable[[Call], Computation],
        beside: Names = (),
        optional: Names = (),
        types: Mapping[str, Sequence[str] | None] = _NOTHING,
        takes_one: bool = False,
        operands: Names = (),
    ) -> None:
        self.op, self._names, self._solve, self._beside = op, names, solve, beside
        self._types, self._takes_one = types, takes_one
        self._all = names + operands
        self._may_miss = [name in optional for name in self._all]

    def __call__(
        self,
        given: tuple[Any, ...],
        options: tuple[Any, ...],
        kind: Any = None,
        beside: tuple[Any, ...] = (),
        out: Any = None,
        out_layout: Any = None,
        values: Any = None,
        kept: BoundCalls | None = None,
    ) -> list[Any]:
        """The results.

        given: the arrays, and the operands; None for one that is left out.
        options: further arguments, as the caller gave them.
        kind: hashable facts on which `solve` depends, too.
        beside: arrays; None for one that is left out.
        values: an argument. The program depends on its `kind`, and not on it.
        kept: remembers what is bound; None: the memory of all functions.

        Raises ArgumentError, or a subclass, for a bad argument, before it writes anything.
        """
        op, first = self.op, given[0]
        arrays: Sequence[Any] = given
        key: list[Any] = [op, cache_key((*options, out_layout)), kind, get_num_threads()]
        for k, x in enumerate(given):
            if type(x) is _ARRAY:  # its `memory_order`, without the call
                key.append((x.shape, x.strides, x.dtype, x.flags.aligned))
            elif x is None and self._may_miss[k]:
                key.append(None)
            elif (seen := tensor_order(x)) is not None:  # a known call takes its address alone
                key.append(seen)
            else:
                arrays = [*arrays[:k], given_array(op, self._all[k], x), *arrays[k + 1 :]]
                key.append(memory_order(arrays[k]))
        written = None
        if out is not None:
            is_held = isinstance(out, BlockedArray) and isinstance(first, BlockedArray)
            written = out if is_held else as_numpy(out, op, "out", write=True)
            key += memory_order(written), memory_of(written).flags.writeable
        kept, known = _kept if kept is None else kept, tuple(key)
        bound, count = kept.get(known), len(self._names)
        if bound is not None and bound.is_simple and written is None:
            y = bound.room()
            if bound.order is None and count == 1:  # the shortest calls
                x = arrays[0]
                start = address_of(x) if type(x) is _ARRAY else start_of(x)
                bound.program.run((start, address_of(y) if type(y) is _ARRAY else start_of(y)), bound.threads)  # type: ignore[union-attr]
            else:
                bound.launch((*arrays[:count], y), arrays[count:], values)
            return [like(first, y)]
        if bound is None or bound.read is not None:
            call = self._call(arrays, (options, kind, values), written, out_layout)
            if bound is None:
                bound = keep(kept, known, self._bind(arrays, call, written))
        images = arrays[:count] if bound.read is None else self._read_all(call, bound.read)
        made = self._run(bound, images, (arrays[count:], values), beside, written)
        return self._finish(bound, made, given, written, out)

    def _run(
        self, bound: Bound, images: Sequence[Any], about: tuple[Any, Any], beside: tuple[Any, ...], out: Any
    ) -> list[Any]:
        """The results as the kernel writes them; the first one is `out`, if that can be. about: operands, values."""
        made = [bound.room()] if out is None or bound.final is not None else [out]
        if bound.others:
            made += [room() for room in bound.others]
        if out is not None:
            for name, x in zipped(self._names, images):
                if x is not None:
                    check_alias(self.op, memory_of(given_array(self.op, name, x)), memory_of(out), name)
        if bound.program is None:
            for y in made:
                memory_of(y)[...] = 0
        else:
            bound.launch((*images, *made, *beside), *about)
        return made

    def computation(
        self, given: Sequence[Any], options: tuple[Any, ...], values: Any = None, out: Any = None, layout: Any = None
    ) -> Computation:
        """The work of a call that reads all arrays in place. layout: the first result's.

        Raises the errors of a call, and UnsupportedError where it copies an array or reorders the result.
        """
        arrays = [x if x is None else given_array(self.op, name, x) for name, x in zipped(self._all, given)]
        call = self._call(arrays, (options, None, values), out, layout)
        found = self._solve(call)
        if (call.layout or found.layout) not in (None, found.results[0].layout):
            raise UnsupportedError(
                f"{self.op}: the result has to be in {found.results[0].layout}, which its kernel writes"
            )
        for name in _copied(call, found, arrays):
            raise UnsupportedError(f"{self.op}: {name} has to be dense in the order of NCHW or NHWC")
        return found

    # -- the first of calls that are alike, and calls that copy arrays

    def _call(self, arrays: Sequence[Any], about: tuple[Any, Any, Any], out: Any, out_layout: Any) -> Call:
        """about: options, kind, values."""
        wanted = None if out_layout is None else native_layout(out_layout, self.op, "out_layout")
        sources = {name: self._read(name, x) for name, x in zip(self._names, arrays, strict=False) if x is not None}
        written = out[None] if out is not None and self._is_one(arrays[0]) else out
        final = self._layout_of(arrays[0], written, wanted)
        is_blocked = isinstance(arrays[0], BlockedArray)
        operands = [
            x if x is None or type(x) is _ARRAY else given_array(self.op, name, x)
            for name, x in zipped(self._all, arrays)
        ]
        return Call(sources, operands[len(self._names) :], *about, final, getattr(out, "dtype", None), is_blocked)

    def _is_one(self, x: Any) -> bool:
        return self._takes_one and len(x.shape) == 3

    def _read(self, name: str, x: Any) -> BlockedArray:
        """An array in a native layout, without a copy if it is dense in one."""
        if not isinstance(x, BlockedArray) and self._takes_one:
            x = given_images(self.op, x, name)
        return as_blocked(self.op, name, x, self._types.get(name, FLOATS))

    def _read_all(self, call: Call, layouts: Sequence[Layout]) -> Sequence[Any]:
        """The arrays in the layouts in which the kernel reads them."""
        read: dict[str, BlockedArray] = {}
        for (name, x), to in zipped(call.arrays.items(), layouts):
            read[name] = x if x.layout is to else to_layout(x, to) if read else reordered(self.op, x, to)
        return [*map(read.get, self._names)]

    def _layout_of(self, first: Any, out: Any, wanted: Layout | None) -> Layout | None:
        """The layout that the caller wants of the first result; None for any."""
        if isinstance(out, BlockedArray):
            return wanted or out.layout
        if isinstance(first, BlockedArray) and (out is None or wanted is not None):
            return wanted
        check_array_layout(self.op, wanted)
        return wanted if out is None else dense_layout(self.op, out, is_channels_last(out), wanted)

    def _bind(self, arrays: Sequence[Any], call: Call, written: Any) -> Bound:
        solution, first, is_one = self._solve(call), arrays[0], self._is_one(arrays[0])
        target = solution.results[0]
        final = call.layout or solution.layout
        if final is None and not target.is_plain:
            final = first.layout if call.is_blocked else call.arrays[self._names[0]].layout
        final = None if final is target.layout else final
        if written is not None:
            is_blocked, out = call.is_blocked and not target.is_plain, written[None] if is_one else written
            kind, layout = (BlockedArray, final or target.layout) if is_blocked else (np.ndarray, None)
            check_out(self.op, out, kind, target.shape, target.dtype, layout, target.zero_point)
        copies = _copied(call, solution, arrays)
        results = [f"out{k}" if k else "out" for k in range(len(solution.results))]
        names = [*self._names, *results, *self._beside, *solution.derived]
        positions = tuple(names.index(name) if name in names else len(names) for name in solution.buffers)
        is_empty = solution.program is None
        in_order = positions == tuple(range(len(names)))
        room, *others = (_room(r, call.is_blocked or final is not None, is_one) for r in solution.results)
        return Bound(
            program=solution.program,
            threads=get_num_threads(),
            order=None if in_order else operator.itemgetter(*positions),
            workspace=solution.workspace,
            derive=solution.derive,
            is_plain=target.is_plain,
            is_simple=not (copies or final or is_empty or others or self._beside or target.is_plain),
            read=solution.read if copies else None,
            final=final,
            room=room,
            others=tuple(others),
        )

    def _finish(self, bound: Bound, made: list[Any], given: tuple[Any, ...], written: Any, out: Any) -> list[Any]:
        """The results as the caller gets them: in its layout, and of its kind."""
        first = given[0]
        if (final := bound.final) is not None:
            is_one, held = self._is_one(first), written
            if isinstance(written, np.ndarray):
                images = written[None] if is_one else written
                held = BlockedArray(images.transpose(final.outer), final, images.shape)
            for k, x in enumerate(made):
                if isinstance(x, BlockedArray):
                    found = to_layout(x, final, out=None if k else held)
                    made[k] = found if isinstance(first, BlockedArray) else _logical(found, is_one)
        if len(made) > 1:
            made[1:] = [like_any(given, x) for x in made[1:]]
        if out is not None:
            made[0] = out
        else:
            made[0] = like_any(given, made[0]) if bound.is_plain else like(first, made[0])
        return made


def chosen(op: str, problem: Any, src: Layout, dst: Layout, types: Types, **options: Any) -> tuple[Program | None, int]:
    """The program of the row that is chosen, and the bytes of its workspace; none without a problem."""
    if problem is None:
        return None, 0
    return selection.program_of(op, problem, src, dst, types, get_num_threads(), **options)


def _copied(call: Call, found: Computation, given: Sequence[Any]) -> list[str]:
    """The names of the arrays that the kernel does not read in place."""
    arrays = [x for x in given if x is not None]
    each = zip(call.arrays.items(), found.read, arrays, strict=False)
    return [name for (name, x), to, array in each if x.layout is not to or start_of(x) != start_of(array)]


def _room(result: Result, is_blocked: bool, is_one: bool) -> Callable[[], Any]:
    """Makes a result."""
    if result.layout is None:
        return functools.partial(np.zeros, result.shape, result.dtype)
    blocked = functools.partial(allocate, result.shape, result.layout, result.dtype, result.zero_point)
    if is_blocked and not result.is_plain:
        return blocked
    return aligned_like(_logical(blocked(), is_one))


def _logical(x: BlockedArray, is_one: bool) -> Any:
    """The array, (N, C, H, W), or (C, H, W) for one image, of a layout without blocks."""
    result = x.storage.transpose(x.layout.logical)
    return result[0] if is_one else result


# ---------------------------------------------------------------- arrays


def by_axes(op: str, function: Callable[..., Any], given: dict[str, Any]) -> Any:
    """A function's result on arrays with the axes `axes`, in that order too. given: the arguments, by name."""
    axes, out = given.pop("axes"), given["out"]
    if "".join(sorted(str(axes))) not in ("CHW", "CHNW"):
        raise ArgumentError(op, "axes", axes, "has to name the axes of images once, like 'HWC' or 'NHWC'")
    order = [axes.index(name) for name in "NCHW" if name in axes]
    for name in ("input", "residual", "out"):
        if (x := given.get(name)) is not None:
            if isinstance(x, BlockedArray) or np.ndim(x) != len(order):
                raise ArgumentError(op, name, x, f"has to be an array of the axes {axes}")
            given[name] = _in_order(x, order)
    found = function(**given)
    made = [_in_order(x, np.argsort(order).tolist()) for x in (found if isinstance(found, tuple) else [found])]
    first = made[0] if out is None else out
    return (first, *made[1:]) if isinstance(found, tuple) else first


def _in_order(x: Any, axes: Sequence[int]) -> Any:
    """A view of an array or a tensor with its axes in another order."""
    return x.permute(*axes) if hasattr(x, "permute") else np.transpose(x, axes)


def given_array(op: str, argument: str, x: Any) -> Any:
    """A BlockedArray as it is, anything else as an array."""
    return x if isinstance(x, BlockedArray) else as_numpy(x, op, argument)


def memory_order(x: Any) -> tuple[Any, ...]:
    """The properties of an array that decide its kernel, without its address. Calls with equal ones are bound once."""
    if type(x) is np.ndarray:
        return x.shape, x.strides, x.dtype, x.flags.aligned
    return x.layout, x.shape, x.dtype, x.zero_point


def check_alike(op: str, given: Mapping[str, BlockedArray]) -> BlockedArray:
    """The first of some arrays. Raises ArgumentError or DtypeError unless all have its shape and dtype."""
    first, *_ = given
    x = given[first]
    for name, each in given.items():
        check_same(op, name, each.shape, x.shape, first)
        if each.dtype != x.dtype:
            raise DtypeError(op, name, str(each.dtype), f"has to have the dtype of {first}, {x.dtype}")
    return x


def start_of(x: Any) -> int:
    """The address of the first byte of an array, of a BlockedArray, or of a tensor."""
    held = memory_of(x)
    return address_of(held) if isinstance(held, _ARRAY) else held.data_ptr()


def as_blocked(op: str, argument: str, given: Any, types: Sequence[str] | None = FLOATS) -> BlockedArray:
    """An array in a native layout, without a copy if it is dense in one."""
    x = given_array(op, argument, given)
    if len(x.shape) != 4:
        raise ArgumentError(op, argument, x, "has to be (N, C, H, W)")
    if types is None and isinstance(x, np.ndarray):
        require_movable(op, argument, x.dtype)
    elif types is not None and str(x.dtype) not in types:
        rule = "has to be " + " or ".join(filter(None, (", ".join(types[:-1]), types[-1])))
        raise DtypeError(op, argument, str(x.dtype), rule, as_float(argument, x.dtype))
    if isinstance(x, BlockedArray):
        return x if x.layout.is_native else reordered(op, x, NCHW, argument)
    return BlockedArray(*storage_of(x, is_channels_last(x)), x.shape)
