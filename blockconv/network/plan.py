"""`compile`: from a network to a plan; and the plan: kernels, packed weights and an arena, run in one native call."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import replace
from os import PathLike
from pathlib import Path
from typing import Any, get_args

import numpy as np
import numpy.typing as npt

from blockconv.core.checks import whole
from blockconv.core.errors import ArgumentError, NetworkError, UnsupportedError, short
from blockconv.core.interop import as_numpy, like_any
from blockconv.core.layout import row_major
from blockconv.core.types import FloatType
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.tuning import read_costs
from blockconv.network import archive
from blockconv.network.arrays import allocate, entered, unpacked
from blockconv.network.graph import Network, check_network
from blockconv.network.instance import BoundPlan, an_instance, measured_runs
from blockconv.network.passes.fuse import fuse
from blockconv.network.passes.precision import stored_as
from blockconv.network.planning.candidates import Parameters, compile_kernels
from blockconv.network.planning.own import OwnPlanner, check_costs, chosen_by, cost_table
from blockconv.network.planning.planned import (
    Layouts,
    Options,
    Planned,
    Planner,
    plan_layouts,
    read_layouts,
)
from blockconv.network.planning.planner import Choice
from blockconv.network.reporting import explain, predict
from blockconv.network.reporting import page as report
from blockconv.network.reporting.data import PlanData, Sizes, collected
from blockconv.network.reporting.profile import Profile, median_seconds
from blockconv.network.schedule import Action, schedule
from blockconv.runtime import address_of, check_threads, get_num_threads

__all__ = ["Plan", "compile"]

Array = npt.NDArray[Any]
Shapes = tuple[tuple[int, ...], ...]
ACCURACIES = ("default", "strict")
KEPT = 8  # sizes of inputs that a plan keeps itself bound for


def compile(
    network: Network,
    layouts: Layouts = "auto",
    planner: Planner | OwnPlanner = "optimal",
    measure: bool = False,
    input_shapes: Any = None,
    threads: int | None = None,
    accuracy: str = "default",
    costs: str | PathLike[str] | Mapping[str, float] | None = None,
    precision: FloatType = "float32",
) -> Plan:
    """Choose a layout for every tensor of a network and a kernel for every op, and bind them: a `Plan`.

    network: what `load_onnx` or `NetworkBuilder.build` gives; it is not changed.
    layouts: "auto", where the planner chooses among `NATIVE`; a list of the layouts that it is to choose among, your
        own too; a layout that kernels run in (`Layout.is_native`), or its name, which every op has that can; or
        {node: layout}, in which some nodes write, the rest being chosen. A node that fusion merged into another (a
        batch norm, an activation) stands for that one.
    planner: "optimal" (the least predicted cost), "greedy" (op by op), or a function of your own: see below.
    measure: time the candidates instead of predicting them: slow at first, kept on disk.
    input_shapes: a shape for the network's input, or {input: shape}; by default those that the network has.
    threads: the most that a call of the plan uses; by default what `get_num_threads` says now.
    accuracy: "default", or "strict": no Winograd kernels.
    costs: seconds of your own, which go before all others: a mapping with keys of `Plan.cost_table`, or a JSON file of
        one. A key that nothing in the network reads is refused.
    precision: "float32", where every value has the type that the network gives it; or "bfloat16" or "float16", in which
        the weights and values of a network of float32 are stored, each rounded once; sums are float32. Inputs and
        outputs stay what the network says. `plan.network.evaluate` rounds as the plan does.

    A planner of your own is called once, with a `LayoutProblem`: the ops after fusion, the choices of each with their
    costs, the costs of reorders, the network. It returns {node: choice}, or {node: layout}, as `layouts` takes it.
    Nodes that it leaves out are planned optimally. For other sizes of inputs its answer holds, where its choices exist.

    The inputs and outputs of the network are arrays of logical shape, (N, C, H, W) for images.
    Raises NetworkError, LayoutError, ArgumentError, and UnsupportedError for a node that no kernel takes.

    >>> import numpy as np, blockconv as bc
    >>> builder = bc.NetworkBuilder("one layer")
    >>> x = builder.input("x", (1, 3, 5, 5))
    >>> builder.output(builder.conv2d(x, np.ones((8, 3, 3, 3), np.float32), padding=1))
    >>> plan = bc.compile(builder.build(), layouts="NCHW8", threads=1)
    >>> plan(np.ones((1, 3, 5, 5), np.float32))[0, 0, 0]
    array([12., 18., 18., 18., 12.], dtype=float32)
    >>> def quickest(problem):
    ...     return {step.name: min(step.choices, key=lambda choice: choice.cost) for step in problem.steps}
    >>> bc.compile(builder.build(), planner=quickest).cost >= bc.compile(builder.build()).cost > 0
    True
    >>> mine = bc.compile(builder.build(), planner=lambda problem: {problem.steps[0].name: "NHWC"})
    >>> [action.writes[1] for action in mine.actions if action.kind == "conv2d"]
    [Layout('NHWC')]
    """
    check_network("compile", network)
    if input_shapes is not None:
        network = network.with_input_shapes(input_shapes)
    _check_options("compile", "optimal" if callable(planner) else planner, accuracy, precision)
    count = get_num_threads() if threads is None else check_threads("compile", "threads", threads)
    network = stored_as(fuse(network, precision), precision)
    named = planner if isinstance(planner, str) else "optimal"
    options = Options(read_layouts(network, layouts), named, measure, count, accuracy, read_costs(costs))
    check_costs(network, options)
    return Plan(network, options if isinstance(planner, str) else chosen_by(planner, network, options))


def _check_options(op: str, planner: object, accuracy: object, precision: object = "float32") -> None:
    for argument, value, words, remedy in (
        ("planner", planner, get_args(Planner), "compile takes a function of your own too"),
        ("accuracy", accuracy, ACCURACIES, ""),
        ("precision", precision, get_args(FloatType), ""),
    ):
        if not isinstance(value, str) or value not in words:
            raise ArgumentError(op, argument, value, f"has to be {' or '.join(map(repr, words))}", remedy)


# ---------------------------------------------------------------- the plan


class Plan:
    """A network with a kernel and layouts for every op, which `compile` makes and `Plan.load` reads.

    It is immutable, and safe to call from several threads at once. It can be copied and pickled: what is kept is what
    `save` writes, so that a copy, in any process on any machine, packs its weights for itself.

    ``plan(x)`` gives the output as an array, or several by name in a dict: torch tensors if an input is one. Inputs of
    other sizes are planned when they first come, and kept.
    """

    def __init__(self, network: Network, options: Options, like: Plan | None = None) -> None:
        self.network, self.options = network, options
        self._parameters: Parameters = Parameters(network, None if like is None else like._parameters)
        self._lock = threading.Lock()
        self._bound: dict[Shapes, BoundPlan] = {}
        self._profiled: Profile | None = None
        self._released = False
        self._of(tuple(tensor.shape for tensor in network.inputs))

    def with_layouts(self, layouts: Layouts) -> Plan:
        """A plan of the same network, and asked for the same, in other layouts: see `compile`.

        Weights that both plans have packed alike are in memory once. Raises as `compile` does.
        """
        if self._released:
            raise NetworkError(
                self.network.name, "with_layouts", layouts, "the plan's weights were released", "make it before"
            )
        planner = "optimal" if self.options.is_own else self.options.planner
        asked = replace(self.options, layouts=read_layouts(self.network, layouts), planner=planner, chosen=None)
        return Plan(self.network, asked, self)

    # -- files and copies

    def _asked(self, op: str, value: object) -> Options:
        """The options that make this plan again, with the kernels and layouts that it chose. Raises after `release`."""
        if self._released:
            raise NetworkError(self.network.name, op, value, "the plan's weights were released", f"{op} it before")
        planned = self._first.planned
        chosen = {
            node.name: [None if c.row is None else c.row.name, [lay.tag for lay in c.srcs], c.dst.tag]
            for node, c in zip(planned.network.nodes, planned.chosen, strict=True)
        }
        return replace(self.options, chosen=chosen)

    def __reduce__(self) -> tuple[object, ...]:
        """A copy holds what `save` writes, nothing of this process, and is bound where it is made."""
        return _made_again, (type(self), self.network, self._asked("copy", self))

    def save(self, path: str | PathLike[str]) -> None:
        """Write the plan: its network with weights, what it was asked for, and the kernels and layouts it chose.

        Raises NetworkError after `release`, OSError where the file cannot be written.
        """
        options = self._asked("save", str(path))
        asked: Any = options.layouts
        if isinstance(asked, Mapping):
            written = {name: lay.dst if isinstance(lay, Choice) else lay for name, lay in asked.items()}
            asked = {name: lay.tag for name, lay in written.items() if lay.is_native}
        elif asked != "auto":
            asked = [lay.tag for lay in asked] if isinstance(asked, tuple) else asked.tag
        planner = "optimal" if options.is_own else options.planner
        kept = {"layouts": asked, "planner": planner, "threads": options.threads, "accuracy": options.accuracy}
        archive.write(path, self.network, {"options": kept, "chosen": options.chosen})

    @classmethod
    def load(cls, path: str | PathLike[str], threads: int | None = None) -> Plan:
        """Read what `save` wrote.

        Its choices are taken as they are where the same kernels exist here; else, and for other sizes of inputs, it is
        planned anew.

        path: of the file.
        threads: the most that a call uses; by default as many as were saved, or as there are if these are fewer.

        Raises ArgumentError for any other file.
        """
        count = None if threads is None else check_threads("Plan.load", "threads", threads)
        network, extra = archive.read(path)
        try:
            kept, chosen = extra["options"], dict(extra["chosen"])
            _check_options("Plan.load", kept["planner"], kept["accuracy"])
            saved = whole(kept["threads"])  # on a machine that may have more
            if saved is None or saved < 1:
                raise ValueError(f"threads={short(kept['threads'])}")
            layouts = read_layouts(network, kept["layouts"])
            options = Options(layouts, kept["planner"], False, count or saved, kept["accuracy"], {}, chosen)
        except (KeyError, TypeError, ValueError) as error:
            raise archive.refused(path, error) from error
        try:
            return _made_again(cls, network, options) if count is None else cls(network, options)
        except UnsupportedError as error:
            raise archive.refused(path, error) from error

    # -- running

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        """Run the network on arrays, torch CPU tensors or BlockedArrays, in the order of its inputs or by name.

        Gives the output, or {name: output} where there are several, row-major and of their logical shapes: torch
        tensors (over the memory of the results, without a copy) if any input is a tensor, else NumPy arrays, for
        BlockedArrays too. A BlockedArray may be in any layout: it is reordered on its way in. Integers of 4 bits come
        in as a BlockedArray of them, or one a byte, int8 or uint8, as they come out. `torch.autocast` changes nothing:
        a plan computes in the types that it was compiled for.
        Raises NetworkError for inputs of other names, numbers, dtypes, or shapes that the network cannot have.
        """
        bound, sources, results = self._entered(inputs, named)
        with an_instance(bound) as instance:
            instance.program.run([*map(address_of, sources), *map(address_of, results)], self.options.threads)
        tensors = (bound.planned.network.tensors[name] for name in self.network.outputs)
        plain = map(unpacked, results, tensors)
        shown = [like_any((*inputs, *named.values()), result) for result in plain]
        return shown[0] if len(shown) == 1 else dict(zip(self.network.outputs, shown, strict=True))

    def _entered(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> tuple[BoundPlan, list[Array], list[Array]]:
        """The plan for the sizes of what a call is given, its inputs in row-major order, and new outputs."""
        given = self._given(inputs, named)
        bound = self._of(tuple(x.shape for x in given))
        network = bound.planned.network
        sources = [entered(x, tensor, network.name) for x, tensor in zip(given, network.inputs, strict=True)]
        return bound, sources, [allocate(network.tensors[name]) for name in network.outputs]

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

    def _of(self, shapes: Shapes) -> BoundPlan:
        """The plan for these sizes."""
        bound = self._bound.get(shapes)
        if bound is None:
            with self._lock:
                bound = self._bound.get(shapes)
                if bound is None:
                    if self._released:
                        rule = "the plan's weights were released, so it cannot be made for new sizes"
                        raise NetworkError(self.network.name, "inputs", shapes, rule, f"it has {[*self._bound]}")
                    bound = self._make(self._with_shapes(shapes), shapes)
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

    def _make(self, network: Network, shapes: Shapes) -> BoundPlan:
        first = shapes == tuple(tensor.shape for tensor in self.network.inputs)  # `chosen` is for these sizes alone
        planned = plan_layouts(network, self.options if first else replace(self.options, chosen=None))
        network = planned.network
        compile_kernels(network, planned.chosen, self.options.threads)
        problem = planned.problem
        given = {tensor.name: problem.given[tensor.name] for tensor in network.inputs}
        wanted = [row_major(len(network.shape(name))) for name in network.outputs]
        threads = self.options.threads
        held = self._parameters.of(network)
        made = schedule(network, planned.chosen, given, wanted, held, problem.reorder, threads)
        return BoundPlan(planned, made, [])

    @property
    def _first(self) -> BoundPlan:
        return self._of(tuple(tensor.shape for tensor in self.network.inputs))

    def profile(self, *inputs: Any, runs: int = 15, **named: Any) -> Profile:
        """Time every action by itself, in the plan's order, `runs` times over; and the whole plan, in one native call.

        A time by itself includes one launch, about 3 µs, that the whole plan does not have. Raises ArgumentError unless
        `runs` is an int of at least 1, and as a call does.
        """
        if (whole(runs) or 0) < 1:
            raise ArgumentError("Plan.profile", "runs", runs, "has to be an int of at least 1")
        bound, sources, results = self._entered(inputs, named)
        buffers = [*map(address_of, sources), *map(address_of, results)]
        threads, actions = self.options.threads, bound.schedule.actions
        in_one, each = measured_runs(bound, buffers, threads, runs + 1)
        # The first of each warms up.
        seconds = tuple(median_seconds(times[1:]) for times in each)
        predicted = predict.actions_on(bound.planned, actions, threads)
        profile = Profile(actions, seconds, median_seconds(in_one[1:]), predicted, threads)
        if bound is self._first:
            self._profiled = profile
        return profile

    def release(self) -> None:
        """Give up the network's own weights: the packed ones are what remains.

        Only sizes of inputs that came before still run, and the plan cannot be saved any more.
        """
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
    def planned(self) -> Planned:
        """What was chosen, for the sizes that the plan was compiled for: candidates, and the solution among them."""
        return self._first.planned

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

    def cost_table(self) -> dict[str, float]:
        """The seconds of every kernel and reorder that the planner chose among, as `costs` of `compile` takes them.

        A kernel's key is its name, the problem, its layouts, the element types and the threads, with " | " between:
        "conv_direct | ... | NHWC -> NCHW16 | float32 | 1 threads". The key of a reorder stands for all values of its
        shape: "reorder | 1x64x56x56 | NHWC -> NCHW16".
        """
        return cost_table(self.planned)

    def summary(self) -> str:
        """What was planned, how well, and what it takes, in a few lines."""
        return explain.summary(self.to_dict())

    def explain(self) -> str:
        """Every kernel call, and why: text for people, which may change.

        A table of the calls with their layouts, predicted times and, after `profile`, measured times; the reason of
        each reorder and its cost; what else there was for each op, and why it was not taken.
        """
        data = self.to_dict()
        return f"{explain.summary(data)}\n\n{explain.table(data, self.actions)}"

    def to_dict(self) -> PlanData:
        """The plan as data, of numbers, texts, lists and dicts alone, so that JSON holds it.

        It has the network after fusion with its values and shapes, the candidates of each node with their costs, why
        other kernels were refused, the costs of reorders, the choice and how good it is known to be, every kernel call,
        times after `profile`, and the machine. Text and page are made of the same. `version` changes where a field
        changes its meaning or goes away.
        """
        bound = self._first
        sizes = Sizes(self.weights_nbytes, self.arena_nbytes)
        return collected(bound.planned, bound.schedule, self.options, sizes, self._profiled)

    def report(self, path: str | PathLike[str], measured: Mapping[str, float] | None = None) -> None:
        """Write the plan as one self-contained HTML page, or, where the path ends in ".json", as the data of `to_dict`.

        The page: the network drawn with its layouts as colours, reorders marked, times
        (measured ones after `profile`), and the plans of fixed layouts beside the chosen one.

        path: of the page or the data.
        measured: for the page, seconds of whole plans that were timed, by their layouts, this one's by "auto".
        """
        data, bound = self.to_dict(), self._first
        if Path(path).suffix.lower() == ".json":
            written = json.dumps(data, indent=1, allow_nan=False)
        else:
            written = report.page(report.Drawn(data, bound.planned, bound.schedule), measured or {})
        Path(path).write_text(written, encoding="utf-8")

    def __repr__(self) -> str:
        network, options = self.network, self.options
        inputs = ", ".join(f"{tensor.name}={tensor.shape}" for tensor in network.inputs)
        bound = self._bound.get(tuple(tensor.shape for tensor in network.inputs))
        calls = "" if bound is None else f", {len(bound.schedule.actions)} kernel calls"  # a repr plans nothing anew
        return f"Plan({network.name}, {inputs}, layouts={options.asked}{calls}, threads={options.threads})"


def _made_again(made: type[Plan], network: Network, options: Options) -> Plan:
    """The plan that a file or a pickle holds, on at most the threads of this process."""
    return made(network, replace(options, threads=min(options.threads, get_num_threads())))


def _without_weights(network: Network) -> Network:
    """The network with constants of the same shapes that take no memory."""
    constants = {name: np.broadcast_to(np.zeros((), c.dtype), c.shape) for name, c in network.constants.items()}
    return replace(network, constants=constants, remake=None)
