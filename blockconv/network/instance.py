"""A plan for one size of inputs, and its instances: what each call that is in flight has for itself."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import numpy.typing as npt

from blockconv.network.planning.planned import Planned
from blockconv.network.schedule import Action, Schedule
from blockconv.runtime import Buffer, Op, Program, address_of, aligned_empty

__all__ = ["BoundPlan", "an_instance", "measured_runs"]


class Instance(NamedTuple):
    """What one call needs: an arena, and the ops bound to it."""

    arena: npt.NDArray[Any]
    program: Program


class BoundPlan(NamedTuple):
    """A plan for one size of inputs. idle: the instances that no call uses."""

    planned: Planned
    schedule: Schedule
    idle: list[Instance]


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
    ops = _in_arena(bound.schedule.actions, len(network.inputs) + len(network.outputs), address_of(arena))
    return Instance(arena, Program(ops))


def _in_arena(actions: Sequence[Action], index: int, address: int) -> list[Op]:
    """The ops, with buffer `index` at an address."""

    def fixed_word(word: int | Buffer) -> int | Buffer:
        return address + word.offset if isinstance(word, Buffer) and word.index == index else word

    return [replace(op, args=tuple(map(fixed_word, op.args))) for action in actions for op in action.ops]


def measured_runs(
    bound: BoundPlan, buffers: Sequence[int], threads: int, runs: int
) -> tuple[list[int], list[list[int]]]:
    """Nanoseconds of each run: of the whole plan in one native call, and of each of its actions by itself.

    buffers: the addresses of inputs and outputs.
    """
    with an_instance(bound) as instance:
        arena = address_of(instance.arena)
        actions = [Program(_in_arena([action], len(buffers), arena)) for action in bound.schedule.actions]
        programs = [instance.program, *actions]
        times: list[list[int]] = [[] for _ in programs]
        for _ in range(runs):
            for program, taken in zip(programs, times, strict=True):
                start = time.perf_counter_ns()
                program.run(buffers, threads)
                taken.append(time.perf_counter_ns() - start)
    return times[0], times[1:]
