"""`compile`: from a network to a plan; and the plan: kernels, packed weights and an arena, run in one native call."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, NamedTuple, get_args

import numpy as np
import numpy.typing as npt

from blockconv.array import BlockedArray, to_layout
from blockconv.checks import whole
from blockconv.errors import ArgumentError, NetworkError, UnsupportedError
from blockconv.interop import as_numpy
from blockconv.layout import NATIVE, Layout
from blockconv.network import archive, explain, report
from blockconv.network.candidates import Parameters, compile_kernels, plain
from blockconv.network.fusion import fuse
from blockconv.network.graph import Network
from blockconv.network.planned import Layouts, Options, Planned, Planner, plan_layouts
from blockconv.network.schedule import Action, Schedule, schedule
from blockconv.runtime import Buffer, Op, Program, address_of, aligned_empty, check_threads, get_num_threads
from blockconv.tuning import read_costs

__all__ = ["Plan", "compile"]

Array = npt.NDArray[Any]
Shapes = tuple[tuple[int, ...], ...]
ACCURACIES = ("default", "strict")
KEPT = 8  # sizes of inputs that a plan keeps itself bound for


def compile(
    network: Network,
    layouts: Layouts = "auto",
    planner: Planner = "optimal",
    measure: bool = False,
    input_shapes: Any = None,
    threads: int | None = None,
    accuracy: str = "default",
    costs: str | PathLike[str] | Mapping[str, float] | None = None,
) -> Plan:
    """Choose a layout for every tensor of a network and a kernel for every op, and bind them: a `Plan`.

    layouts: "auto", where the planner chooses; a layout, which every op has that can; or {node: layout} for some
    nodes, the rest being chosen. planner: "optimal" (least predicted cost) or "greedy" (op by op). measure: time
    the candidates instead of predicting them; slow at first, kept on disk. input_shapes: a shape for the
    network's input, or {input: shape}. threads: the most that a call uses. accuracy: "default", or "strict":
    no Winograd kernels. costs: seconds of your own, which go before all others, by `tuning.key` and
    `planned.reorder_key`, or a JSON file of them (such as the costs.json that measurements are kept in).

    The inputs and outputs of the network are arrays of logical shape (N, C, H, W).
    Raises NetworkError, LayoutError, ArgumentError, and UnsupportedError for a node that no kernel takes.
    """
    if input_shapes is not None:
        network = network.with_input_shapes(input_shapes)
    _check_options("compile", planner, accuracy)
    network = fuse(network)
    count = get_num_threads() if threads is None else check_threads("compile", "threads", threads)
    return Plan(network, Options(_read_layouts(network, layouts), planner, measure, count, accuracy, read_costs(costs)))


def _check_options(op: str, planner: object, accuracy: object) -> None:
    for argument, value, words in (("planner", planner, get_args(Planner)), ("accuracy", accuracy, ACCURACIES)):
        if not isinstance(value, str) or value not in words:
            raise ArgumentError(op, argument, value, f"has to be {' or '.join(map(repr, words))}")


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
        self._profiled: Profile | None = None
        self._released = False
        self._of(tuple(tensor.shape for tensor in network.inputs))

    # -- files

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan: its network with weights, what it was asked for, and the kernels and layouts it chose."""
        if self._released:
            raise NetworkError(
                self.network.name, "save", str(path), "the plan's weights were released", "save it before"
            )
        options, bound = self.options, self._first
        asked: Any = options.layouts
        asked = {name: str(lay) for name, lay in asked.items()} if isinstance(asked, Mapping) else str(asked)
        chosen = {
            node.name: [None if c.row is None else c.row.name, [str(lay) for lay in c.srcs], str(c.dst)]
            for node, c in zip(bound.planned.network.nodes, bound.planned.chosen, strict=True)
        }
        kept = {"layouts": asked, "planner": options.planner, "threads": options.threads, "accuracy": options.accuracy}
        archive.write(path, self.network, {"options": kept, "chosen": chosen})

    @classmethod
    def load(cls, path: str | PathLike[str], threads: int | None = None) -> Plan:
        """Read what `save` wrote. Its choices are taken as they are where the same kernels exist here; else, and for
        other sizes of inputs, it is planned anew. Raises ArgumentError for any other file."""
        count = None if threads is None else check_threads("Plan.load", "threads", threads)
        network, extra = archive.read(path)
        try:
            kept, chosen = extra["options"], dict(extra["chosen"])
            _check_options("Plan.load", kept["planner"], kept["accuracy"])
            saved = whole(kept["threads"])  # on a machine that may have more
            if saved is None or saved < 1:
                raise ValueError(f"threads={kept['threads']!r}")
            layouts = _read_layouts(network, kept["layouts"])
            count = count or min(saved, get_num_threads())
            options = Options(layouts, kept["planner"], False, count, kept["accuracy"], {}, chosen)
        except (KeyError, TypeError, ValueError) as error:
            raise archive.refused(path, error) from error
        try:
            return cls(network, options)
        except UnsupportedError as error:
            raise archive.refused(path, error) from error

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
                    if self._released:
                        rule = "the plan's weights were released, so it cannot be made for new sizes"
                        raise NetworkError(self.network.name, "inputs", shapes, rule, f"it has {[*self._bound]}")
                    bound = self._make(self._with_shapes(shapes))
                    if len(self._bound) >= KEPT:
                        del self._bound[next(iter(self._bound))]
                    self._bound[shapes] = bound
        return bound

    def _with_shapes(self, shapes: Shapes) -> Network:
        """The network for inputs of these shapes. Raises NetworkError, naming the input, if it takes none such."""
        made = [(tensor.name, tensor.shape) for tensor in self.network.inputs]
        names = [name for name, _ in made]
        try:
            return self.network.with_input_shapes(dict(zip(names, shapes, strict=True)))
        except ArgumentError as error:
            at = next(k for k, (_, shape) in enumerate(made) if shape != shapes[k])
            rule, remedy = f"the network cannot take it: {error}", f"it was compiled for {names[at]} of {made[at][1]}"
            raise NetworkError(self.network.name, names[at], shapes[at], rule, remedy) from error

    def _make(self, network: Network) -> _Bound:
        planned = plan_layouts(network, self.options)
        compile_kernels(network, planned.chosen, self.options.threads)
        problem = planned.problem
        given = {tensor.name: problem.given[tensor.name] for tensor in network.inputs}
        wanted = [plain(len(network.shape(name))) for name in network.outputs]
        threads = self.options.threads
        made = schedule(network, planned.chosen, given, wanted, self._parameters, problem.reorder, threads)
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
        profile = Profile(actions, tuple(_median(taken[1:]) for taken in times), _median(whole[1:]))
        if bound is self._first:
            self._profiled = profile
        return profile

    def release(self) -> None:
        """Give up the network's own weights: the packed ones are what remains. Only sizes that came before still run,
        and the plan cannot be saved any more."""
        with self._lock:
            self._released = True
            self.network = _without_weights(self.network)
            self._parameters.release()
            for shapes, bound in self._bound.items():
                planned = bound.planned._replace(network=_without_weights(bound.planned.network))
                self._bound[shapes] = bound._replace(planned=planned)

    # -- looking inside

    @property
    def actions(self) -> tuple[Action, ...]:
        """What the plan does, in order, for the sizes that it was compiled for."""
        return self._first.schedule.actions

    @property
    def reorders(self) -> tuple[Action, ...]:
        """The reorders and copies of the plan."""
        return tuple(action for action in self.actions if action.kind in ("reorder", "copy"))

    @property
    def weights_nbytes(self) -> int:
        """Bytes of packed weights."""
        return self._parameters.nbytes

    @property
    def arena_nbytes(self) -> int:
        """Bytes that a call needs for what flows between ops, at the sizes that the plan was compiled for."""
        return self._first.schedule.arena

    @property
    def cost(self) -> float:
        """Predicted seconds of a call on one thread."""
        return self._first.planned.solution.cost

    def summary(self) -> str:
        """What was planned, how well, and what it takes, in a few lines."""
        bound = self._first
        solution, options = bound.planned.solution, self.options
        kinds = [action.kind for action in bound.schedule.actions]
        if solution.exact:
            quality = "no plan costs less over the same table of costs"
        elif math.isfinite(solution.bound):
            quality = f"no plan costs less than {solution.bound * 1e3:.2f} ms"
        else:
            quality = "not searched for the least"
        lines = [
            f"{bound.planned.network.name}: layouts {options.asked}, planner {options.planner}: "
            f"{solution.cost * 1e3:.2f} ms predicted on one thread; {quality}",
            f"{len(kinds)} kernel calls, {kinds.count('reorder')} of them reorders and {kinds.count('copy')} copies; "
            f"weights {self.weights_nbytes / 1e6:.1f} MB, arena {self.arena_nbytes / 1e6:.1f} MB, "
            f"of which {bound.schedule.live / 1e6:.1f} MB live at once",
        ]
        if self._profiled is not None:
            lines.append(f"measured on {options.threads} threads: {self._profiled.whole * 1e3:.2f} ms")
        return "\n".join(lines)

    def explain(self) -> str:
        """A table of every kernel call: layouts, predicted time, measured time (after `profile`), and what else there
        was and why it was not taken; each reorder with its cost and its reason."""
        bound = self._first
        measured = None if self._profiled is None else self._profiled.seconds
        said = explain.table(bound.planned, bound.schedule.actions, measured, self.options.asked)
        return f"{self.summary()}\n{said}"

    def report(self, path: str | PathLike[str]) -> None:
        """Write one self-contained HTML page: the network drawn with its layouts as colours, reorders marked, times
        (measured ones after `profile`), and the plans of fixed layouts beside the chosen one."""
        bound = self._first
        measured = None if self._profiled is None else self._profiled.seconds
        Path(path).write_text(
            report.page(bound.planned, bound.schedule, measured, self.summary(), self.options.asked), encoding="utf-8"
        )


def _without_weights(network: Network) -> Network:
    """The network with constants of the same shapes that take no memory."""
    constants = {name: np.broadcast_to(np.zeros((), c.dtype), c.shape) for name, c in network.constants.items()}
    return replace(network, constants=constants, remake=None)


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
