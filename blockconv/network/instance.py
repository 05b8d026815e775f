"""A plan for one size of inputs, and its instances: what each call that is in flight has for itself."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy.typing as npt

from blockconv.network.planning.planned import Planned
from blockconv.network.rest import RestPlan
from blockconv.network.schedule import Action, ForeignCall, Schedule
from blockconv.runtime import Buffer, Op, Program, address_of, aligned_empty

__all__ = ["BoundPlan", "an_instance", "measured_runs"]

Segment = Program | ForeignCall


class Instance(NamedTuple):
    """What one call needs: an arena, and what runs bound to it. segments: programs, and foreign parts between them."""

    arena: npt.NDArray[Any]
    segments: tuple[Segment, ...]

    def run(self, buffers: Sequence[int], threads: int) -> None:
        """Run the plan. buffers: the addresses of inputs and outputs."""
        _run(self.segments, buffers, threads)


class BoundPlan(NamedTuple):
    """A plan for one size of inputs. idle: the instances that no call uses. rest: what runs after it."""

    planned: Planned
    schedule: Schedule
    idle: list[Instance]
    rest: RestPlan | None = None

    @property
    def nbytes(self) -> int:
        """Bytes of the arenas that it keeps, or of one before its first call."""
        return self.schedule.arena * max(1, len(self.idle))


@contextmanager
def an_instance(bound: BoundPlan) -> Iterator[Instance]:
    """An instance for one call, and back."""
    try:
        instance = bound.idle.pop()
    except IndexError:
        instance = _new_instance(bound)
    yield instance
    bound.idle.append(instance)


def _new_instance(bound: BoundPlan) -> Instance:
    arena = aligned_empty(bound.schedule.arena)
    network = bound.planned.network
    at = len(network.inputs) + len(network.outputs), address_of(arena)
    return Instance(arena, tuple(_segments(bound.schedule.actions, *at)))


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

    def fixed_word(word: int | Buffer) -> int | Buffer:
        return address + word.offset if isinstance(word, Buffer) and word.index == index else word

    for part, run in itertools.groupby(actions, lambda action: action.part):
        if part is None:
            ops: Iterable[Op] = (op for action in run for op in action.ops)
            yield Program([replace(op, args=tuple(map(fixed_word, op.args))) for op in ops])
        else:
            yield part._replace(args=tuple(map(fixed_word, part.args)))


def measured_runs(
    bound: BoundPlan, buffers: Sequence[int], threads: int, runs: int
) -> tuple[list[int], list[list[int]]]:
    """Nanoseconds of each run: of the whole plan in one native call, and of each of its actions by itself.

    buffers: the addresses of inputs and outputs.
    """
    with an_instance(bound) as instance:
        arena = address_of(instance.arena)
        actions = [tuple(_segments([action], len(buffers), arena)) for action in bound.schedule.actions]
        programs = [instance.segments, *actions]
        times: list[list[int]] = [[] for _ in programs]
        for _ in range(runs):
            for program, taken in zip(programs, times, strict=True):
                start = time.perf_counter_ns()
                _run(program, buffers, threads)
                taken.append(time.perf_counter_ns() - start)
    return times[0], times[1:]
