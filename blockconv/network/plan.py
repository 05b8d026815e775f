"""`compile` plans a network. A `Plan` holds kernels, packed weights and an arena, and runs in one native call."""

from __future__ import annotations

import functools
import itertools
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from statistics import median_high
from typing import Any, get_args

import numpy as np

from blockconv.core.checks import Shape, axes_remedy, check_flag, checked_whole, checked_word, read_shape, whole
from blockconv.core.errors import ArgumentError, NetworkError, UnsupportedError, warn
from blockconv.core.files import StrPath, as_path, reading, replacing
from blockconv.core.heavy_work import garbage_at_the_end
from blockconv.core.interop import as_numpy, first_tensor, like
from blockconv.core.layout import Layout
from blockconv.core.python import zipped
from blockconv.core.types import Array, FloatType, ieee
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.selection import accuracy_of
from blockconv.network import archive, foreign
from blockconv.network.graph import Network, check_network
from blockconv.network.instance import Arenas, BoundPlan, End, measured_runs
from blockconv.network.ops.rule import listed, names_of
from blockconv.network.passes.fuse import fuse
from blockconv.network.passes.precision import stored_as
from blockconv.network.planning.own import OwnCosts, OwnPlanner, chosen_by, cost_table, own_costs
from blockconv.network.planning.parameters import Parameters
from blockconv.network.planning.planned import (
    Layouts,
    Options,
    Planned,
    Planner,
    choices,
    plan_layouts,
    read_layouts,
    with_all_candidates,
)
from blockconv.network.planning.resized import resized
from blockconv.network.reporting import explain
from blockconv.network.reporting import page as report
from blockconv.network.reporting.data import PlanData, collected
from blockconv.network.reporting.profile import Profile, seconds_of_actions
from blockconv.network.rest import RestPlan
from blockconv.network.schedule import Action, schedule
from blockconv.network.tiling import Tiling, checked_out, run_tiled, tiling
from blockconv.runtime import Launch, address_of, aligned_empty, check_threads, get_num_threads

Shapes = tuple[Shape, ...]
SUFFIXES = (".html", ".htm", ".json")  # of reports
KEPT = 32  # sizes of inputs, beside its own, that a plan keeps itself bound for


def compile(
    network: Network,
    layouts: Layouts = "auto",
    planner: Planner | OwnPlanner = "optimal",
    measure: bool = False,
    input_shapes: Any = None,
    threads: int | None = None,
    accuracy: str | float = "default",
    costs: StrPath | Mapping[str, float] | OwnCosts | None = None,
    precision: FloatType = "float32",
) -> Plan:
    """Choose a layout for every tensor of a network and a kernel for every op, and bind them: a `Plan`.

    network: a network of `load_onnx`, `from_torch`, `quantize` or `NetworkBuilder.build`. It does not change.
    layouts: "auto": the planner chooses among NCHW, NHWC and, for float32, blocks of one vector of channels; of half a
        vector too where few channels would leave a fifth of whole ones empty. With your own planner, and for narrower
        types, it chooses among `NATIVE`. A list: it chooses among these layouts, also your own. A native layout
        (`Layout.is_native`) or its name: each op uses this layout if it can. A dict {node: layout}: these nodes write
        these layouts, and the planner chooses the rest. If fusion merged a node into another (a batch norm, an
        activation), its name means the other node.
    planner: "optimal" (the least predicted cost), "greedy" (op by op), or your own function, as described below.
    measure: measure the candidates instead of predicting them. The first time is slow; times are kept on disk.
    input_shapes: the shape of the only input, or {input: shape}. Default: the network's.
    threads: the most threads that a call of the plan uses. Default: `get_num_threads` now.
    accuracy: the largest error that a convolution may have, relative to its largest output: "default", "strict" (no
        Winograd kernels) or a number, as in `conv2d`.
    costs: your own costs in seconds, which override all others: a mapping with keys of `Plan.cost_table`, a JSON file
        with one, or a function `costs(problem, kernel, src, dst)`, as described below. A key that is unknown to the
        network is an error.
    precision: "float32": every value has the network's type. "bfloat16" or "float16": the plan stores the weights and
        values of a float32 network in this type, each rounded once, and sums in float32. Inputs and outputs keep the
        network's types. `plan.network.evaluate` rounds like the plan.

    `compile` calls your own planner once, with a `LayoutProblem`. This has the ops after fusion, their choices with
    costs, the costs of reorders, and the network. Your planner returns {node: choice} or {node: layout}. Nodes that it
    omits are planned optimally. Its answer also holds for other input sizes, if its choices exist there.

    `compile` calls your own `costs` for each key of `Plan.cost_table`, for the network's sizes. Its arguments are the
    problem of the op, the name of the kernel, and the layouts (`Layout`) that it reads and writes. A reorder has a
    `ReorderProblem`, and "reorder" for a kernel. It returns seconds, or None to keep blockconv's own cost.

    Inputs and outputs are arrays of logical shape, (N, C, H, W) for images.
    Raises NetworkError, LayoutError or ArgumentError for a bad argument, and UnsupportedError for a node without a
    kernel.

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
        try:
            network = network.with_input_shapes(input_shapes)
        except ArgumentError as error:
            rule, remedy = f"the network does not take them: {error}", f"its own are {listed(network.inputs)}"
            raise NetworkError("compile", "input_shapes", input_shapes, rule, remedy) from error
    accuracy = check_options("compile", "optimal" if callable(planner) else planner, accuracy, precision)
    count = get_num_threads() if threads is None else check_threads("compile", "threads", threads)
    network = stored_as(fuse(network, precision), precision)
    named = planner if isinstance(planner, str) else "optimal"
    measures = check_flag("compile", "measure", measure)
    options = Options(read_layouts(network, layouts), named, measures, count, accuracy)
    options = replace(options, costs=own_costs(costs, network, options))
    plan = Plan(network, options if isinstance(planner, str) else chosen_by(planner, network, options))
    _warn_of_foreign(plan)
    return plan


def _warn_of_foreign(plan: Plan) -> None:
    """Name the ops that another library runs."""
    parts = [action.part for action in plan.actions if action.part is not None]
    kinds = [kind for part in parts for kind in part.kinds if not kind.startswith("blockconv.")]
    rest = () if plan.network.rest is None else plan.network.rest.kinds
    if kinds or rest:
        count = len(parts) + bool(rest)
        used = parts[0].session.library if parts else foreign.runner("onnx").default_library()
        where = f"{foreign.LIBRARIES[used]} runs them, in {count} part{'s' if count > 1 else ''} of the network"
        said = f"blockconv: {plan.network.name}: foreign ops: {foreign.counted((*kinds, *rest))}; {where}"
        warn(said, stacklevel=3)


def compile_between(
    network: Network, ends: Mapping[str, Layout], precision: FloatType, options: Options, like: Plan | None = None
) -> Plan:
    """A plan whose inputs and outputs have the layouts `ends`, row-major or NHWC; by default row-major.

    like: a plan of this network for other sizes. Both share packed weights of the same form.
    """
    network = stored_as(fuse(network, precision), precision)
    layouts: Any = options.layouts
    return Plan(network, replace(options, layouts=read_layouts(network, layouts), ends=ends), like)


def check_options(op: str, planner: object, accuracy: Any, precision: object = "float32") -> str | float:
    """Raises ArgumentError. Returns the accuracy, numbers as Python's."""
    checked_word(op, "planner", planner, get_args(Planner), "compile also takes your own function")
    checked_word(op, "precision", precision, get_args(FloatType))
    number = accuracy_of(op, accuracy)
    return accuracy if number is None or isinstance(accuracy, str) else number


# ---------------------------------------------------------------- the plan


class Plan:
    """A network with a kernel and layouts for every op. `compile` makes it, `Plan.load` reads it.

    ``plan(x)`` returns the output as an array, or several outputs as {name: array}; torch tensors if an input is one.
    Other input sizes use the layouts and kernels of the plan's own sizes, with new tasks and strides. The first call
    with a size takes some milliseconds more, or longer if a kernel is not on disk yet. The kernels for a size depend on
    the size and the machine, never on earlier calls. The plan keeps the last 32 sizes; all of them share the memory for
    values. `prepare` plans further sizes like the plan's own.

    A plan is immutable, and several threads may call it at once. Copies and pickles hold what `save` writes. A copy
    packs its own weights, in any process on any machine.
    """

    @ieee
    @garbage_at_the_end()
    def __init__(self, network: Network, options: Options, like: Plan | None = None) -> None:
        self.network, self.options = network, options
        self._names = names_of(network.inputs)
        self._parameters: Parameters = Parameters(network, None if like is None else like._parameters)
        self._lock, self._arenas = threading.Lock(), Arenas()
        self._others: dict[Shapes, BoundPlan] = {}  # bound to the choices of `_first`
        self._used: dict[Shapes, int] = {}  # when each of these was last called
        self._calls = itertools.count()
        self._profiled: Profile | None = None
        self._released = False
        self._first = self._bound(plan_layouts(network, options))
        self._planned: dict[Shapes, BoundPlan] = {tuple(tensor.shape for tensor in network.inputs): self._first}

    def with_layouts(self, layouts: Layouts) -> Plan:
        """A plan of the same network with the same options, but other layouts.

        layouts: as in `compile`.

        Both plans share packed weights of the same form. Raises the errors of `compile`.
        """
        options = self._asked("with_layouts", layouts)
        asked = replace(options, layouts=read_layouts(self.network, layouts), planner=options.solver, chosen=None)
        return Plan(self.network, asked, self)

    # -- files and copies

    def options_with_choices(self) -> Options:
        """The options that make this plan again, with the kernels and layouts that it chose.

        :meta private:
        """
        return self._asked("copy", self)

    def _asked(self, op: str, value: object) -> Options:
        """The options that make this plan again, with the kernels and layouts that it chose. Raises after `release`."""
        if self._released:
            rule = f"the plan's weights were released: {op} works before release only"
            raise NetworkError(self.network.name, op, value, rule)
        return replace(self.options, chosen=choices(self._first.planned))

    def __reduce__(self) -> tuple[object, ...]:
        """A copy holds what `save` writes, nothing of this process, and is bound where it is made."""
        return _made_again, (type(self), self.network, self.options_with_choices())

    def save(self, path: StrPath) -> None:
        """Write the network with its weights, the options of `compile`, and the chosen kernels and layouts.

        path: the file. A complete one takes its place, so others never read a part.

        Raises NetworkError after `release`, and OSError if the file cannot be written. Then the old file stays.
        """
        options = self._asked("save", str(path))
        archive.write(path, self.network, {"options": options.written(), "chosen": options.chosen})

    @classmethod
    def load(cls, path: StrPath, threads: int | None = None) -> Plan:
        """Read a file of `save`.

        path: the file.
        threads: the most threads that a call uses. Default: the saved number, or `get_num_threads` if that is smaller.

        The plan keeps its choices if the same kernels exist here. Else it plans again.
        Raises ArgumentError for any other file, OSError for one that cannot be read.
        """
        count = None if threads is None else check_threads("Plan.load", "threads", threads)
        network, extra = archive.read(path)
        with reading("Plan.load", path, KeyError, TypeError, ValueError):
            kept, chosen = extra["options"], dict(extra["chosen"])
            check_options("Plan.load", kept["planner"], kept["accuracy"])
            saved = checked_whole("Plan.load", "threads", kept["threads"], least=1)  # of a machine that may have more
            layouts = read_layouts(network, kept["layouts"])
            options = Options(layouts, kept["planner"], False, count or saved, kept["accuracy"], {}, chosen)
        with reading("Plan.load", path, UnsupportedError):
            return _made_again(cls, network, options) if count is None else cls(network, options)

    # -- running

    def __call__(self, /, *inputs: Any, out: Any = None, **named: Any) -> Any:
        """Run the network on arrays, torch CPU tensors or BlockedArrays, in the order of its inputs or by name.

        Several inputs may also be one dict, {name: array}.
        out: None, or the array to write and return, {output: array} for several: of the output's shape and dtype, as
            dense as a new one. It must not overlap an input. A network with an input named "out" takes a dict.
        Returns the output, or {name: output} for several: row-major, of logical shape. They are torch tensors (without
        a copy) if any input is a tensor, else NumPy arrays, also for BlockedArrays. A BlockedArray may have any layout;
        the plan reorders it. A 4-bit input is a packed BlockedArray, or an int8 or uint8 array with one integer per
        byte. A 4-bit output is such an array. `torch.autocast` has no effect: a plan computes in the types of its
        compilation.
        Raises NetworkError for a wrong number, name or dtype of inputs, and for a shape that the network does not take.
        Also raises it, with the node's name, for an index of a gather or a scatter that the data does not have.
        """
        shown = self._run(inputs, named, out)
        return out if out is not None else next(iter(shown.values())) if len(shown) == 1 else shown

    def by_name(self, /, *inputs: Any, **named: Any) -> dict[str, Any]:
        """Run the network as a call does. Returns {name: output}, also for one output."""
        return self._run(inputs, named)

    def _run(self, inputs: tuple[Any, ...], named: Mapping[str, Any], out: Any = None) -> dict[str, Any]:
        """Run the network. Returns the outputs by name, but none if `out` is written."""
        if len(inputs) == 1 and type(inputs[0]) is dict and not named:
            named, inputs = inputs[0], ()
        tensor, odd = first_tensor((*inputs, *named.values())), {}
        if self.network.rest is not None:
            if out is not None:
                raise NetworkError(self.network.name, "out", type(out).__name__, "is not for networks that Python ends")
            odd = self._odd(inputs, named)
            inputs = inputs[: len(self._names)] if odd else inputs
            named = {name: x for name, x in named.items() if name not in odd}
        bound, sources, results = self._entered(inputs, named, out)
        bound.run([*map(address_of, (*sources, *results))], self.options.threads)
        if out is not None:
            return {}
        found = {end.tensor.name: end.shown(result) for end, result in zipped(bound.outputs, results)}
        found = found if bound.rest is None else bound.rest.run(found | odd)
        if tensor is None:
            return found
        return {name: like(tensor, x) if isinstance(x, np.ndarray) else x for name, x in found.items()}

    def _odd(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> dict[str, Any]:
        """The inputs that are no arrays of numbers, which the network's rest reads: by name, or after all others."""
        assert self.network.rest is not None
        names = self.network.rest.odd
        given = dict(zip(names, inputs[len(self.network.inputs) :], strict=False))
        given |= {name: named[name] for name in names if name in named}
        for name in names:
            if name not in given:
                raise NetworkError(self.network.name, "inputs", [*given], f"lacks the input {name!r}")
        return given

    def tiling(self, shape: Shape, tile: int | tuple[int, int] | None = None, batch: int = 1) -> Tiling:
        """How `tiled` cuts images of a shape: the tiles, which pixels of each output they give, and their memory.

        shape: (N, C, H, W).
        tile: pixels of a tile, an int or (height, width), rounded up to a size that suits the network. Default: about
            512, or more if the receptive field is large.
        batch: tiles that run at once.

        Raises UnsupportedError for a network whose pixels need the whole image, such as one with global pools. The
        error names the node. Raises ArgumentError for a tile that is too small.
        """
        tiles = checked_whole("tiled", "batch", batch, least=1)
        how = tiling(self.network, read_shape("tiled", "shape", shape), tile)
        count = min(tiles, max(1, how.shape[0] * len(how.pieces)))
        network = how.network.with_input_shapes((count, *how.network.inputs[0].shape[1:]))
        ends = [network.inputs[0], *(network.tensors[name] for name in network.outputs)]
        nbytes = sum(tensor.elements * tensor.type.dtype.itemsize for tensor in ends)
        return how._replace(batch=count, nbytes=nbytes + self.bind((ends[0].shape,)).schedule.arena)

    def tiled(self, image: Any, tile: int | tuple[int, int] | None = None, out: Any = None, batch: int = 1) -> Any:
        """Run the plan on images of any size, tile by tile. Whole images give the same result.

        image: an array (N, C, H, W): NumPy, a memory map, Zarr, or anything with `shape`, `dtype` and slices.
        tile: as in `tiling`.
        out: None, or the array that is written, {output: array} for several: NumPy, a memory map, Zarr. It must not
            overlap the image.
        batch: tiles that run at once.

        Returns `out`, or new arrays. Memory: `tiling(...).nbytes`, and nothing of the image's size but `out`. With
        int8, results are those of the whole image bit for bit. With floats, they differ by the error of kernels, since
        a tile may run on other kernels. They do not depend on the order of tiles or on threads.
        Raises the errors of `tiling`, and ArgumentError for a bad argument, before it writes anything. After a
        later error, such as of a chunk that cannot be read, `out` has the tiles that were finished before.
        """
        try:
            dtype = np.dtype(image.dtype)
        except (AttributeError, TypeError):
            rule = "has to be an array with a NumPy dtype, or like one"
            remedy = "give x.numpy() for a tensor, and the array itself for a path or a group of Zarr"
            raise ArgumentError("tiled", "image", type(image).__name__, rule, remedy) from None
        if dtype != (wanted := self.network.inputs[0].type.dtype):
            remedy = f"give dask.array.from_array(image).astype('{wanted}'), which converts each tile"
            raise ArgumentError("tiled", "image", image, f"has to have dtype {wanted}, not {dtype}", remedy)
        if isinstance(image, (np.ndarray, BlockedArray)):
            image = as_numpy(image, "tiled", "image")  # refuses a mask
        how = self.tiling(np.shape(image), tile, batch)
        return run_tiled(self.by_name, how, image, checked_out(how, out, image))

    def _entered(
        self, inputs: tuple[Any, ...], named: Mapping[str, Any], out: Any = None
    ) -> tuple[BoundPlan, list[Array], list[Array]]:
        """The plan for the sizes of what a call is given, its inputs as the plan reads them, and its outputs."""
        given = self._given(inputs, named)
        bound = self.bind(tuple([x.shape for x in given]))
        sources = [end.entered(x, self.network.name) for end, x in zipped(bound.inputs, given)]
        if out is None:
            return bound, sources, [end.allocated() for end in bound.outputs]
        names, name = [end.tensor.name for end in bound.outputs], self.network.name
        given_out = out if isinstance(out, Mapping) else {names[0]: out}
        if {*given_out} != {*names}:
            raise NetworkError(
                name, "out", [*given_out], f"has to be {{name: array}} of the outputs {', '.join(names)}"
            )
        written = [end.written(given_out[end.tensor.name], sources, name) for end in bound.outputs]
        if len({*map(address_of, written)}) < len(written):
            raise NetworkError(name, "out", names, "has to be another array for each output")
        return bound, sources, written

    def _given(self, inputs: tuple[Any, ...], named: Mapping[str, Any]) -> list[Any]:
        """The inputs as arrays or BlockedArrays, in the order of the network's."""
        names, left = self._names, self._names[len(inputs) :]
        given = [*inputs, *[named[name] for name in left if name in named]]
        if len(given) == len(names) and len(named) == len(left):
            for k, x in enumerate(given):
                if type(x) is not np.ndarray and not isinstance(x, BlockedArray):
                    given[k] = as_numpy(x, "plan", names[k])
            return given
        for name in named:
            if name not in left:
                rule = "is given twice" if name in names else f"is not among the inputs {', '.join(names)}"
                raise NetworkError(self.network.name, "inputs", name, rule)
        rule = f"has to be the number of inputs, {len(names)}: {', '.join(names)}"
        raise NetworkError(self.network.name, "inputs", len(given), rule, "give each in this order, or by its name")

    def bind(self, shapes: Shapes) -> BoundPlan:
        """The plan for sizes of its inputs, which the first call binds.

        :meta private:
        """
        bound = self._planned.get(shapes)
        if bound is not None:
            return bound
        bound = self._others.get(shapes)
        if bound is None:
            with self._lock:
                bound = self._planned.get(shapes) or self._others.get(shapes)
                if bound is None:
                    bound = self._resized(shapes)
                    self._keep(shapes, bound)
        self._used[shapes] = next(self._calls)
        return bound

    @garbage_at_the_end()
    def _resized(self, shapes: Shapes) -> BoundPlan:
        """The plan for sizes that were not planned; see `resized`."""
        planned = resized(self._with_shapes(shapes), self.options, self._first.planned)
        # Where the choices do not do, as where a size is 0, the size is planned.
        return self._bound(planned) if planned else self._planned_anew(shapes)

    def _planned_anew(self, shapes: Shapes) -> BoundPlan:
        """The plan for sizes as `compile` makes it."""
        return self._bound(plan_layouts(self._with_shapes(shapes), replace(self.options, chosen=None)))

    def _keep(self, shapes: Shapes, bound: BoundPlan) -> None:
        """Keep a size bound, and give up those that were not called for longest."""
        others = self._others
        while len(others) >= KEPT:
            oldest = min(others, key=lambda known: self._used.get(known, -1))
            del others[oldest]
            self._used.pop(oldest, None)
        others[shapes] = bound

    def prepare(self, *sizes: Any) -> None:
        """Plan sizes like the plan's own: layouts and kernels are chosen for them, and they stay bound.

        sizes: each the shape of the only input, or {input: shape}.

        It takes as long as `compile`. Later calls of these sizes may be some percent faster. Their results differ from
        those without `prepare` by rounding. Files and copies of the plan do not hold prepared sizes.
        Raises NetworkError for a shape that the network does not take, and after `release`.
        """
        for given in sizes:
            named = self.network.named_shapes(given)
            shapes = tuple(named.get(tensor.name, tensor.shape) for tensor in self.network.inputs)
            with self._lock:
                if shapes not in self._planned:
                    self._planned[shapes] = self._planned_anew(shapes)
                    self._others.pop(shapes, None)

    def _with_shapes(self, shapes: Shapes) -> Network:
        """The network for inputs of these shapes.

        Raises NetworkError, naming the input, if it takes none such, and after `release`.
        """
        if self._released:
            known = [*self._planned, *self._others]
            rule = "the plan's weights were released, so it cannot plan for new sizes"
            raise NetworkError(self.network.name, "inputs", shapes, rule, f"give one of {known}")
        try:
            return self.network.with_input_shapes(dict(zipped(self._names, shapes)))
        except ArgumentError as error:
            pairs = zipped(self.network.inputs, shapes)
            own, given = next((tensor, shape) for tensor, shape in pairs if shape != tensor.shape)
            rule, remedy = f"the network does not take it: {error}", f"the plan was compiled for {own.shape}"
            if moved := axes_remedy(given, own.shape, own.name):
                rule, remedy = f"has to be (N, C, H, W), like {own.shape}", moved
            raise NetworkError(self.network.name, own.name, given, rule, remedy) from error

    def _bound(self, planned: Planned) -> BoundPlan:
        """A plan of layouts and kernels, bound."""
        network, threads = planned.network, self.options.threads
        inputs = tuple(End.of(tensor, self.options.end(tensor)) for tensor in network.inputs)
        outputs = tuple(End.of(t, self.options.end(t)) for t in map(network.tensors.__getitem__, network.outputs))
        made = schedule(planned, [end.layout for end in outputs], self._parameters.of(network), threads)
        rest = None if network.rest is None else RestPlan(network.rest, self._after, threads)
        self._arenas.expect(made.arena)
        return BoundPlan(planned, made, self._arenas, inputs, outputs, {}, rest)

    def _after(self, network: Network) -> Callable[..., dict[str, Any]]:
        """How to run what follows nodes whose shapes depend on data, for the shapes that came."""
        layouts = "auto" if isinstance(self.options.layouts, Mapping) else self.options.layouts
        options = replace(self.options, layouts=layouts, planner=self.options.solver, chosen=None, costs={})
        plan = Plan(fuse(network), options)
        return lambda values: plan._run(tuple(values[t.name] for t in network.inputs), {})

    def profile(self, *inputs: Any, runs: int = 15, **named: Any) -> Profile:
        """Measure each action by itself, in the plan's order, and the whole plan in one native call.

        inputs, named: the inputs, as in a call.
        runs: the number of measurements, whose median counts.

        The time of an action includes a launch of about 3 µs, which the whole plan does not have.
        Raises ArgumentError unless `runs` is an int from 1 to 1,000,000, and the errors of a call.
        """
        if not 1 <= (whole(runs) or 0) <= 1_000_000:
            raise ArgumentError("Plan.profile", "runs", runs, "has to be an int from 1 to 1,000,000")
        bound, sources, results = self._entered(inputs, named)
        buffers = [*map(address_of, (*sources, *results))]
        threads, actions = self.options.threads, bound.schedule.actions
        measured = measured_runs(bound, buffers, threads, runs + 1)
        in_one, *each = (median_high(times[1:]) / 1e9 for times in measured)  # the first of each warms up
        predicted = seconds_of_actions(bound.planned, actions, threads)
        profile = Profile(actions, tuple(each), in_one, predicted, threads)
        if bound is self._first:
            self._profiled = profile
        return profile

    def release(self) -> None:
        """Free the network's own weights, and keep only the packed ones.

        The plan then runs only for the input sizes that it knows, and cannot be saved. Its `network` holds zeros.
        """
        with self._lock:
            self._released = True
            self.network = _without_weights(self.network)
            self._parameters.release()
            for kept in (self._planned, self._others):
                for shapes, bound in kept.items():
                    problem = bound.planned.problem
                    problem = replace(problem, network=_without_weights(problem.network))
                    kept[shapes] = bound._replace(planned=bound.planned._replace(problem=problem))
            self._first = next(iter(self._planned.values()))
            self.__dict__.pop("planned", None)  # which has the weights

    # -- looking inside

    @property
    def actions(self) -> tuple[Action, ...]:
        """The calls of the plan, in order, for the sizes of its compilation."""
        return self._first.schedule.actions

    @functools.cached_property
    def planned(self) -> Planned:
        """The candidates and the chosen ones, for the sizes of the plan's compilation."""
        return with_all_candidates(self.network, self.options, self._first.planned)

    @property
    def reorders(self) -> tuple[Action, ...]:
        """The reorders and copies of the plan."""
        return tuple(action for action in self.actions if action.kind in ("reorder", "copy"))

    @property
    def weights_nbytes(self) -> int:
        """The bytes of packed weights."""
        return self._parameters.nbytes

    @property
    def arena_nbytes(self) -> int:
        """The bytes that a call needs for values between ops, at the sizes of the plan's compilation."""
        return self._first.schedule.arena

    @property
    def cost(self) -> float:
        """The predicted seconds of a call on one thread."""
        return self._first.planned.solution.cost

    def cost_table(self) -> dict[str, float]:
        """The seconds of every candidate kernel and reorder, in the form of `compile`'s `costs`.

        For a measured plan, the table has the best kernel for each pair of layouts.
        The key of a kernel holds its name, the problem, the layouts, the element types and the threads, separated by
        " | ": "conv_direct | ... | NHWC -> NCHW16 | float32 | 1 threads". The key of a reorder counts for all values of
        its shape: "reorder | 1x64x56x56 | NHWC -> NCHW16".
        """
        return cost_table(self.network, self.options, self.planned)

    def summary(self) -> str:
        """The layouts, the planner, the predicted time and the memory, in a few lines."""
        return explain.summary(self.to_dict())

    def explain(self) -> str:
        """Every kernel call, and the reasons for it, as a text for people. The text may change.

        It has a table of the calls with their layouts, predicted times and, after `profile`, measured times. It gives
        the reason and the cost of each reorder, and the other candidates of each op, with the reason why not.
        """
        data = self.to_dict()
        return f"{explain.summary(data)}\n\n{explain.table(data, self.actions)}"

    def to_dict(self) -> PlanData:
        """The plan as data: numbers, texts, lists and dicts, ready for JSON.

        It has the network after fusion with its values and shapes. It has the candidates of each node with their costs,
        the reasons against other kernels, and the costs of reorders. It has the choice with its proven quality, every
        kernel call, times after `profile`, and the machine. `explain` and `report` show the same data. `version`
        changes if a field changes its meaning or disappears.
        """
        return collected(self.planned, self._first.schedule, self.options, self.weights_nbytes, self._profiled)

    def report(self, path: StrPath, measured: Mapping[str, float] | None = None) -> None:
        """Write the plan as a self-contained HTML page, or as the data of `to_dict` if the path ends in ".json".

        path: the file.
        measured: for the page: measured seconds of whole plans, by their layouts; "auto" is this plan.

        The page draws the network with layouts as colours. It marks reorders, shows times (measured ones after
        `profile`), and compares the plan with plans of fixed layouts.
        """
        suffix = as_path("report", path).suffix.lower()
        if suffix not in SUFFIXES:
            raise ArgumentError("report", "path", path, "has to end in .html, or in .json for the data")
        known = {} if measured is None else measured
        times = known.values() if isinstance(known, Mapping) else [None]
        if not all(isinstance(took, (int, float, np.number)) for took in times):
            raise ArgumentError("report", "measured", measured, "has to be {layouts: seconds}, or None")
        data, bound = self.to_dict(), self._first
        if suffix == ".json":
            written = json.dumps(data, indent=1, allow_nan=False)
        else:
            written = report.page(report.Drawn(data, self.planned, bound.schedule, known))
        with replacing("report", path) as file:
            file.write(written.encode())

    def __repr__(self) -> str:
        network, options = self.network, self.options
        inputs = ", ".join(f"{tensor.name}={tensor.shape}" for tensor in network.inputs)
        calls = f", {len(self.actions)} kernel calls"
        return f"Plan({network.name}, {inputs}, layouts={options.asked}{calls}, threads={options.threads})"


def _made_again(made: type[Plan], network: Network, options: Options) -> Plan:
    """The plan that a file or a pickle holds, on at most the threads of this process."""
    return made(network, replace(options, threads=min(options.threads, get_num_threads())))


def _without_weights(network: Network) -> Network:
    """The network with constants of the same shapes that take no memory."""
    constants = {name: np.broadcast_to(np.zeros((), c.dtype), c.shape) for name, c in network.constants.items()}
    return replace(network, constants=constants, remake=None)


def launches_of(plan: Plan, inputs: tuple[Any, ...], out: Any) -> tuple[Any, list[Launch], list[Array]]:
    """Run a plan. Return its outputs, launches that write them again from the very inputs, and all memory."""
    first = plan(*inputs) if out is None else plan(*inputs, out=out)
    bound, sources, results = plan._entered(inputs, {}, first)
    parts, name = bound.schedule, plan.network.name
    if bound.rest is not None or parts.reports or any(action.part is not None for action in parts.actions):
        raise UnsupportedError(f"native: Python takes part in each call of the network {name!r}; see Plan.explain")
    for given, source in zipped(inputs, sources):
        if not isinstance(given, np.ndarray) or address_of(given) != address_of(source):
            raise ArgumentError("native", "inputs", given, "has to be an array as the plan reads it, row-major or NHWC")
    held = [*sources, *results, aligned_empty(parts.arena)]
    starts = [*map(address_of, held)]
    launches = [launch for action in parts.actions for launch in action.launches]
    return first, [launch.placed(starts) for launch in launches], held
