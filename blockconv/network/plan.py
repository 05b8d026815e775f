"""`compile`: from a network to a plan; and the plan: kernels, packed weights and an arena, run in one native call."""

from __future__ import annotations

import functools
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.array import BlockedArray, to_layout
from blockconv.boundary import as_numpy
from blockconv.errors import ArgumentError, NetworkError
from blockconv.layout import NATIVE, Layout
from blockconv.network.candidates import Candidate, Parameters, Pricing, candidates, plain
from blockconv.network.fusion import fuse
from blockconv.network.graph import Network
from blockconv.network.memory import same_bytes
from blockconv.network.planner import Assignment, Choice, Solution, Step, evaluate, fixed, greedy, optimal, restrict
from blockconv.network.schedule import Action, Schedule, schedule
from blockconv.runtime import Buffer, Op, Program, address_of, aligned_empty, get_num_threads

__all__ = ["Plan", "compile"]

Array = npt.NDArray[Any]
Shapes = tuple[tuple[int, ...], ...]
Layouts = str | Layout | Mapping[str, str | Layout]
Planner = Literal["optimal", "greedy"]
KEPT = 8  # sizes of inputs that a plan keeps itself bound for


@dataclass(frozen=True)
class Options:
    """What `compile` was asked for."""

    layouts: Layouts
    planner: Planner
    measure: bool
    threads: int
    accuracy: str


def compile(
    network: Network,
    layouts: Layouts = "auto",
    planner: Planner = "optimal",
    measure: bool = False,
    input_shapes: Any = None,
    threads: int | None = None,
    accuracy: str = "default",
) -> Plan:
    """Choose a layout for every tensor of a network and a kernel for every op, and bind them: a `Plan`.

    layouts: "auto", where the planner chooses; a layout, which every op has that can; or {node: layout} for some
    nodes, the rest being chosen. planner: "optimal" (least predicted cost) or "greedy" (op by op). measure: time
    the candidates instead of predicting them; slow at first, kept on disk. input_shapes: a shape for the
    network's input, or {input: shape}. threads: the most that a call uses. accuracy: "default", or "strict":
    no Winograd kernels.

    The inputs and outputs of the network are arrays of logical shape (N, C, H, W).
    Raises NetworkError, LayoutError, ArgumentError, and UnsupportedError for a node that no kernel takes.
    """
    if input_shapes is not None:
        network = network.with_input_shapes(input_shapes)
    if planner not in ("optimal", "greedy"):
        raise ArgumentError("compile", "planner", planner, "has to be 'optimal' or 'greedy'")
    network = fuse(network)
    count = get_num_threads() if threads is None else threads
    return Plan(network, Options(_read_layouts(network, layouts), planner, measure, count, accuracy))


def _read_layouts(network: Network, layouts: Layouts) -> Layouts:
    if isinstance(layouts, Mapping):
        names = {node.name for node in network.nodes}
        for name in layouts:
            if name not in names:
                raise NetworkError(network.name, "layouts", name, "is the name of no node", "see network.summary()")
        return {name: _native(layout) for name, layout in layouts.items()}
    return layouts if layouts == "auto" else _native(layouts)


def _native(layout: str | Layout) -> Layout:
    layout = Layout(layout)
    if layout not in NATIVE:
        raise ArgumentError("compile", "layouts", str(layout), f"kernels run in {', '.join(map(str, NATIVE))}")
    return layout


# ---------------------------------------------------------------- planning


class Planned(NamedTuple):
    """A network with the problem of its layouts, and a solution."""

    network: Network
    problem: Assignment
    candidates: tuple[tuple[Candidate, ...], ...]  # of each node, as the steps of `problem` have them
    solution: Solution

    @property
    def chosen(self) -> list[Candidate]:
        """The candidate of each node."""
        return [found[k] for found, k in zip(self.candidates, self.solution.chosen, strict=True)]


def _universe(network: Network, options: Options) -> tuple[Layout, ...]:
    """The layouts that are looked at: all native ones, but CHWN4 where it is NCHW4 byte for byte."""
    asked = options.layouts.values() if isinstance(options.layouts, Mapping) else [options.layouts]
    single = all(tensor.shape[0] == 1 for tensor in network.tensors.values() if len(tensor.shape) == 4)
    return tuple(lay for lay in NATIVE if lay.name != "CHWN4" or not single or lay in asked)


def formulate(network: Network, pricing: Pricing) -> tuple[Assignment, Any]:
    """The assignment of layouts of a network, and the candidates of each node."""
    found = tuple(tuple(candidates(network, node, pricing)) for node in network.nodes)
    steps = []
    for node, options in zip(network.nodes, found, strict=True):
        flows = [i for i, name in enumerate(node.inputs) if name not in network.constants]
        choices = tuple(Choice(tuple(c.srcs[i] for i in flows), c.dst, c.cost, c) for c in options)
        steps.append(Step(node.name, tuple(node.inputs[i] for i in flows), node.output, choices))
    given = {tensor.name: plain(len(tensor.shape)) for tensor in network.inputs}
    wanted = {name: plain(len(network.shape(name))) for name in network.outputs if name not in network.constants}
    return Assignment(tuple(steps), given, wanted, pricing.reorder), found


def _solve(problem: Assignment, options: Options) -> Solution:
    asked = options.layouts
    if isinstance(asked, Layout):
        return fixed(problem, asked)
    solver = optimal if options.planner == "optimal" else greedy
    if asked == "auto":
        return solver(problem)
    assert isinstance(asked, Mapping)
    smaller, indices = restrict(problem, lambda step, choice: choice.dst == asked.get(step.name, choice.dst))
    solved = solver(smaller)
    chosen = [kept[k] for kept, k in zip(indices, solved.chosen, strict=True)]
    return replace(evaluate(problem, chosen), bound=solved.bound)


# ---------------------------------------------------------------- the plan


class _Bound(NamedTuple):
    """A plan for one size of inputs."""

    planned: Planned
    schedule: Schedule
    idle: list[_Instance]


class _Instance(NamedTuple):
    """What one call needs: an arena, and the ops bound to it."""

    arena: Array
    program: Program


class Plan:
    """A network with a kernel and layouts for every op. Immutable, and safe to call from several threads at once.

    ``plan(x)`` gives the output as an array, or several by name. Inputs of other sizes are planned when they
    first come, and kept.
    """

    def __init__(self, network: Network, options: Options) -> None:
        self.network, self.options = network, options
        self._parameters = Parameters(network)
        self._lock = threading.Lock()
        self._bound: dict[Shapes, _Bound] = {}
        self._of(tuple(tensor.shape for tensor in network.inputs))

    # -- running

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the network on arrays, torch tensors or BlockedArrays, in the order of its inputs or by name."""
        given = self._given(inputs, named)
        bound = self._of(tuple(x.shape for x in given))
        network = bound.planned.network
        sources = [self._enter(x, tensor) for x, tensor in zip(given, network.inputs, strict=True)]
        outputs = [network.tensors[name] for name in network.outputs]
        results = [np.empty(tensor.shape, tensor.dtype) for tensor in outputs]
        with _instance(bound) as instance:
            instance.program.run([*map(address_of, sources), *map(address_of, results)], self.options.threads)
        return results[0] if len(results) == 1 else dict(zip(network.outputs, results, strict=True))

    def _given(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
        names = [tensor.name for tensor in self.network.inputs]
        if len(inputs) > len(names) or any(name not in names[len(inputs) :] for name in named):
            raise NetworkError(self.network.name, "inputs", [*named] or len(inputs), f"they are {', '.join(names)}")
        given = [*inputs, *(named[name] for name in names[len(inputs) :] if name in named)]
        if len(given) != len(names):
            raise NetworkError(self.network.name, "inputs", len(given), f"there are {len(names)}: {', '.join(names)}")
        return [
            x if isinstance(x, BlockedArray) else as_numpy(x, "plan", name)
            for x, name in zip(given, names, strict=True)
        ]

    def _enter(self, x: Any, tensor: Any) -> Array:
        """The input's elements in row-major order."""
        if isinstance(x, BlockedArray):
            x = to_layout(x, plain(x.ndim)).storage
        if x.dtype != tensor.dtype:
            raise NetworkError(self.network.name, tensor.name, x, f"has to be of dtype {tensor.dtype}")
        return np.ascontiguousarray(x)

    def _of(self, shapes: Shapes) -> _Bound:
        """The plan for these sizes."""
        bound = self._bound.get(shapes)
        if bound is None:
            with self._lock:
                bound = self._bound.get(shapes)
                if bound is None:
                    names = [tensor.name for tensor in self.network.inputs]
                    network = self.network.with_input_shapes(dict(zip(names, shapes, strict=True)))
                    bound = self._make(network)
                    if len(self._bound) >= KEPT:
                        del self._bound[next(iter(self._bound))]
                    self._bound[shapes] = bound
        return bound

    def _make(self, network: Network) -> _Bound:
        reorder = _reorder_costs(network)
        pricing = Pricing(_universe(network, self.options), lambda row, p, s, d, node: row.cost(p, s, d, 1), reorder)
        problem, found = formulate(network, pricing)
        planned = Planned(network, problem, found, _solve(problem, self.options))
        given = [problem.given[tensor.name] for tensor in network.inputs]
        wanted = [plain(len(network.shape(name))) for name in network.outputs]
        made = schedule(
            network, planned.chosen, dict(zip((t.name for t in network.inputs), given, strict=True)), wanted,
            self._parameters, reorder, self.options.threads,
        )  # fmt: skip
        return _Bound(planned, made, [])

    @property
    def _first(self) -> _Bound:
        return self._of(tuple(tensor.shape for tensor in self.network.inputs))

    def profile(self, *inputs: Any, runs: int = 15, **named: Any) -> Profile:
        """Time every action by itself, in the plan's order, `runs` times over; and the whole plan, in one native call.

        A time by itself includes one launch, about 3 µs, that the whole plan does not have.
        """
        given = self._given(inputs, named)
        bound = self._of(tuple(x.shape for x in given))
        network = bound.planned.network
        sources = [self._enter(x, tensor) for x, tensor in zip(given, network.inputs, strict=True)]
        results = [np.empty(network.shape(name), network.tensors[name].dtype) for name in network.outputs]
        buffers = [*map(address_of, sources), *map(address_of, results)]
        threads, actions = self.options.threads, bound.schedule.actions
        with _instance(bound) as instance:
            place = len(buffers), address_of(instance.arena)
            programs = [Program(in_arena([action], *place)) for action in actions]
            times: list[list[int]] = [[] for _ in programs]
            whole: list[int] = []
            for _ in range(runs + 1):
                start = time.perf_counter_ns()
                instance.program.run(buffers, threads)
                whole.append(time.perf_counter_ns() - start)
                for program, taken in zip(programs, times, strict=True):
                    start = time.perf_counter_ns()
                    program.run(buffers, threads)
                    taken.append(time.perf_counter_ns() - start)
        # The first of each warms up.
        return Profile(actions, tuple(_median(taken[1:]) for taken in times), _median(whole[1:]))

    # -- looking inside

    @property
    def actions(self) -> tuple[Action, ...]:
        """What the plan does, in order, for the sizes that it was compiled for."""
        return self._first.schedule.actions

    @property
    def reorders(self) -> tuple[Action, ...]:
        """The reorders and copies of the plan."""
        return tuple(action for action in self.actions if action.kind in ("reorder", "copy"))


class Profile(NamedTuple):
    """Median seconds of each action of a plan by itself, and of the whole plan."""

    actions: tuple[Action, ...]
    seconds: tuple[float, ...]
    whole: float


def _median(nanoseconds: Sequence[int]) -> float:
    return sorted(nanoseconds)[len(nanoseconds) // 2] / 1e9


@contextmanager
def _instance(bound: _Bound) -> Iterator[_Instance]:
    """An instance for one call, and back."""
    try:
        instance = bound.idle.pop()
    except IndexError:
        instance = _new_instance(bound)
    yield instance
    bound.idle.append(instance)


def _new_instance(bound: _Bound) -> _Instance:
    arena = aligned_empty(bound.schedule.arena)
    network = bound.planned.network
    ops = in_arena(bound.schedule.actions, len(network.inputs) + len(network.outputs), address_of(arena))
    return _Instance(arena, Program(ops))


def in_arena(actions: Sequence[Action], index: int, address: int) -> list[Op]:
    """The ops, with buffer `index` at an address."""

    def fixed_word(word: int | Buffer) -> int | Buffer:
        return address + word.offset if isinstance(word, Buffer) and word.index == index else word

    return [replace(op, args=tuple(map(fixed_word, op.args))) for action in actions for op in action.ops]


def _reorder_costs(network: Network) -> Callable[[str, Layout, Layout], float]:
    @functools.cache
    def cost(name: str, src: Layout, dst: Layout) -> float:
        tensor = network.tensors[name]
        if src == dst or not same_bytes(tensor.shape, src, dst):
            moved = tensor.dtype.itemsize * (src.size(tensor.shape) + dst.size(tensor.shape))
            return 2e-6 + moved / 25e9
        return 0.0

    return cost
