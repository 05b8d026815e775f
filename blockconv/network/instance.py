"""A plan for one size of inputs, and its instances: what each call that is in flight has for itself."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from blockconv.core.checks import Shape
from blockconv.core.errors import NetworkError
from blockconv.core.interop import as_numpy
from blockconv.core.layout import Layout, row_major
from blockconv.core.python import zipped
from blockconv.core.types import Array, ArrayDtype
from blockconv.dispatch.array import BlockedArray, to_layout
from blockconv.network import foreign
from blockconv.network.graph import elements_of
from blockconv.network.ops.rule import Tensor
from blockconv.network.planning.planned import Planned
from blockconv.network.rest import RestPlan
from blockconv.network.schedule import Action, Schedule
from blockconv.runtime import Buffer, Launch, Program, address_of, aligned_empty


class End(NamedTuple):
    """An input or output of a bound plan, and the memory that kernels read or write there.

    tensor: the value.
    dtype: of its elements, as a BlockedArray has it.
    layout: without blocks.
    stored: the shape in the order of the layout. Packed values are bytes, two to each.
    held: the dtype of the memory.
    logical: the axes of the memory in logical order; None if they have that order.
    plain: whether the memory is a row-major array of the tensor's shape and dtype.
    """

    tensor: Tensor
    dtype: ArrayDtype
    layout: Layout
    stored: Shape
    held: np.dtype[Any]
    logical: Shape | None
    plain: bool

    @classmethod
    def of(cls, tensor: Tensor, layout: Layout) -> End:
        type, shape = tensor.type, tensor.shape
        if type.is_packed:
            return cls(tensor, tensor.dtype, layout, (type.nbytes(tensor.elements),), np.dtype(np.uint8), None, False)
        plain = len(shape) < 2 or layout is row_major(len(shape))
        stored = shape if plain else tuple(shape[axis] for axis in layout.outer)
        return cls(tensor, tensor.dtype, layout, stored, type.dtype, None if plain else layout.logical, plain)

    def entered(self, x: Any, network: str) -> Array:
        """An input's elements in the layout, packed where the network has them so.

        x: a NumPy array or a BlockedArray, of the tensor's shape. Raises NetworkError for elements of another type.
        """
        if self.plain and type(x) is np.ndarray and x.dtype == self.dtype and x.flags.c_contiguous:
            return x
        tensor = self.tensor
        if not isinstance(x, BlockedArray):
            x = as_numpy(x, "plan", tensor.name)
        if tensor.type.is_packed and not isinstance(x, BlockedArray):
            given = np.ascontiguousarray(elements_of(x, tensor, network))
            x = BlockedArray.from_numpy(given, row_major(x.ndim), dtype=tensor.type.name)
        dtype = x.dtype
        if isinstance(x, BlockedArray):
            x = to_layout(x, self.layout).storage
        elif x.ndim > 1:
            x = x.transpose(self.layout.outer)
        if dtype != self.dtype:
            raise NetworkError(network, tensor.name, x, f"has to have dtype {self.dtype}, not {dtype}", "convert it")
        return np.ascontiguousarray(x)

    def allocated(self) -> Array:
        """Room for an output, seen in its logical shape; bytes where two elements share one."""
        room: Array = np.empty(self.stored, self.held)
        return room if self.logical is None else room.transpose(self.logical)

    def written(self, out: Any, sources: Sequence[Array], network: str) -> Array:
        """The memory of an output that the caller gives. Raises NetworkError for any that kernels cannot write."""
        x, name = as_numpy(out, "plan", "out", write=True), self.tensor.name
        if self.tensor.type.is_packed or x.dtype != self.dtype:
            raise NetworkError(network, name, out, f"out has to have dtype {self.dtype}, and not be packed")
        if x.shape != self.tensor.shape:
            raise NetworkError(network, name, out, f"out has to have shape {self.tensor.shape}")
        flags = (x if self.logical is None else x.transpose(self.layout.outer)).flags
        if not (flags.c_contiguous and flags.writeable and flags.aligned):
            raise NetworkError(network, name, out, f"out has to be writeable, and dense in the order of {self.layout}")
        if any(np.may_share_memory(x, source) for source in sources):
            raise NetworkError(network, name, out, "out must not overlap an input", "give another array")
        return x

    def shown(self, result: Array) -> Array:
        """An output as callers get it: one 4-bit integer per byte."""
        tensor = self.tensor
        if not tensor.type.is_packed:
            return result
        return BlockedArray(result, row_major(tensor.rank), tensor.shape, dtype=tensor.type.name).numpy()


Segment = Program | foreign.ForeignPart  # foreign parts are between programs
T = TypeVar("T")


class Arenas:
    """Memory for values between ops, which the calls of a plan share, whatever their sizes: each takes an arena.

    Fresh memory costs more than the ops in it: the first touch of a page takes as long as arithmetic on 50 kB. So an
    arena has room for the largest size that was bound, and a page is touched once for all sizes.
    """

    def __init__(self) -> None:
        self.idle: list[Array] = []  # which no call uses
        self._most = 0  # bytes that a size was bound to

    def expect(self, nbytes: int) -> None:
        """A size is bound that needs an arena of so many bytes."""
        self._most = max(self._most, nbytes)

    def take(self, nbytes: int) -> Array:
        """An arena of at least so many bytes; a smaller one that was idle goes."""
        try:
            arena = self.idle.pop()
        except IndexError:  # other calls have them
            arena = None
        return aligned_empty(max(nbytes, self._most)) if arena is None or arena.nbytes < nbytes else arena

    @property
    def nbytes(self) -> int:
        """Bytes of the arenas that no call uses."""
        return sum(arena.nbytes for arena in self.idle)


class BoundPlan(NamedTuple):
    """A plan for one size of inputs.

    arenas: of the plan.
    inputs, outputs: what a call is given, and what it returns.
    segments: what runs, by the address of the arena that it is bound to.
    rest: what runs after it.
    """

    planned: Planned
    schedule: Schedule
    arenas: Arenas
    inputs: tuple[End, ...]
    outputs: tuple[End, ...]
    segments: dict[int, tuple[Segment, ...]]
    rest: RestPlan | None = None

    def run(self, buffers: Sequence[int], threads: int) -> None:
        """Run the plan. buffers: the addresses of inputs and outputs. Raises the errors of `in_arena`."""
        self.in_arena(lambda _, segments: _run(segments, buffers, threads))

    def in_arena(self, work: Callable[[int, tuple[Segment, ...]], T]) -> T:
        """`work` with the address of an arena that no other call has meanwhile, and what is bound to it.

        Raises NetworkError, which names the node, for the first kernel that failed. It is the cause of later errors.
        """
        arena, reports = self.arenas.take(self.schedule.arena), self.schedule.reports
        address = address_of(arena)
        segments = self.segments.get(address)
        if segments is None:
            if len(self.segments) >= MOST_BOUND:
                self.segments.clear()
            ends = len(self.inputs) + len(self.outputs)
            segments = self.segments[address] = tuple(_segments(self.schedule.actions, ends, address))
        if reports:
            arena[reports[0].begin : reports[-1].end] = 0
        try:
            return work(address, segments)
        finally:
            failures = [report.failure(arena) for report in reports] if reports else ()
            self.arenas.idle.append(arena)
            for failure in failures:
                if failure is not None:
                    raise failure


MOST_BOUND = 8  # addresses that one size is bound to, and so calls of it in flight


def _run(segments: Iterable[Segment], buffers: Sequence[int], threads: int) -> None:
    for segment in segments:
        if isinstance(segment, Program):
            segment.run(buffers, threads)
        else:
            segment.session.run(
                [word if isinstance(word, int) else buffers[word.index] + word.offset for word in segment.args]
            )


def _segments(actions: Iterable[Action], index: int, address: int) -> Iterator[Segment]:
    """Programs, and foreign parts between them, with buffer `index` at an address."""

    def fixed(buffer: Buffer) -> int | Buffer:
        return address + buffer.offset if buffer.index == index else buffer

    for part, run in itertools.groupby(actions, lambda action: action.part):
        if part is None:
            launches: Iterable[Launch] = (launch for action in run for launch in action.launches)
            yield Program([launch.with_addresses(fixed) for launch in launches])
        else:
            yield part._replace(args=tuple([w if isinstance(w, int) else fixed(w) for w in part.args]))


def measured_runs(bound: BoundPlan, buffers: Sequence[int], threads: int, runs: int) -> list[list[int]]:
    """Nanoseconds of each run: of the whole plan in one native call, then of each of its actions by itself.

    buffers: the addresses of inputs and outputs.
    """

    def measured(arena: int, segments: tuple[Segment, ...]) -> list[list[int]]:
        actions = [tuple(_segments([action], len(buffers), arena)) for action in bound.schedule.actions]
        programs = [segments, *actions]
        times: list[list[int]] = [[] for _ in programs]
        for _ in range(runs):
            for program, taken in zipped(programs, times):
                start = time.perf_counter_ns()
                _run(program, buffers, threads)
                taken.append(time.perf_counter_ns() - start)
        return times

    return bound.in_arena(measured)
