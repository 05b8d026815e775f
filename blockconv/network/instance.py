"""A plan for one size of inputs, and its instances: what each call that is in flight has for itself."""

import itertools
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, TypeVar

from blockconv.core.types import Array
from blockconv.network.arrays import End
from blockconv.network.planning.planned import Planned
from blockconv.network.rest import RestPlan
from blockconv.network.schedule import Action, ForeignCall, Schedule
from blockconv.runtime import Buffer, Launch, Program, address_of, aligned_empty

Segment = Program | ForeignCall  # foreign parts are between programs
T = TypeVar("T")


class Arenas:
    """Memory for values between ops, which the calls of a plan share, whatever their sizes: each takes an arena.

    Fresh memory costs more than the ops in it: the first touch of a page takes as long as arithmetic on 50 kB. So an
    arena has room for the largest size that was bound, and a page is touched once for all sizes.
    """

    def __init__(self) -> None:
        self._idle: list[Array] = []
        self._most = 0  # bytes that a size was bound to

    def expect(self, nbytes: int) -> None:
        """A size is bound that needs an arena of so many bytes."""
        self._most = max(self._most, nbytes)

    def take(self, nbytes: int) -> Array:
        """An arena of at least so many bytes; a smaller one that was idle goes."""
        try:
            arena = self._idle.pop()
        except IndexError:  # other calls have them
            arena = None
        return aligned_empty(max(nbytes, self._most)) if arena is None or arena.nbytes < nbytes else arena

    def give_back(self, arena: Array) -> None:
        self._idle.append(arena)

    @property
    def nbytes(self) -> int:
        """Bytes of the arenas that no call uses."""
        return sum(arena.nbytes for arena in self._idle)


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
            self.arenas.give_back(arena)
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


def measured_runs(
    bound: BoundPlan, buffers: Sequence[int], threads: int, runs: int
) -> tuple[list[int], list[list[int]]]:
    """Nanoseconds of each run: of the whole plan in one native call, and of each of its actions by itself.

    buffers: the addresses of inputs and outputs.
    """

    def measured(arena: int, segments: tuple[Segment, ...]) -> list[list[int]]:
        actions = [tuple(_segments([action], len(buffers), arena)) for action in bound.schedule.actions]
        programs = [segments, *actions]
        times: list[list[int]] = [[] for _ in programs]
        for _ in range(runs):
            for program, taken in zip(programs, times, strict=True):
                start = time.perf_counter_ns()
                _run(program, buffers, threads)
                taken.append(time.perf_counter_ns() - start)
        return times

    in_one, *each = bound.in_arena(measured)
    return in_one, each
