"""The choice of layouts of one network: its problem, by what was asked for, and its solution."""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import field, replace
from statistics import median_high
from typing import Any, Literal, NamedTuple, get_args

import numpy as np

from blockconv.core import text
from blockconv.core.checks import Shape, of_rank
from blockconv.core.errors import ArgumentError, LayoutError, NetworkError, UnsupportedError
from blockconv.core.layout import NATIVE, Layout, row_major
from blockconv.core.progress import Progress
from blockconv.core.python import zipped
from blockconv.core.record import frozen
from blockconv.dispatch import selection, tuning
from blockconv.dispatch.boundary import native_layout
from blockconv.dispatch.selection import reorder_seconds
from blockconv.machine.machine import Machine, host
from blockconv.network.graph import Network, Node, running
from blockconv.network.memory import same_bytes
from blockconv.network.ops.rule import Tensor
from blockconv.network.passes.for_kernels import of_kernels, widened
from blockconv.network.planning import remembered
from blockconv.network.planning.binding import Workspace, bind
from blockconv.network.planning.candidates import Candidate, Pricing, Reorder, candidates, cheapest
from blockconv.network.planning.elimination import STEPS
from blockconv.network.planning.parameters import Parameters
from blockconv.network.planning.planner import (
    Choice,
    LayoutProblem,
    Solution,
    Step,
    evaluate,
    fixed,
    greedy,
    optimal,
    restricted,
)
from blockconv.runtime import Launch

Layouts = str | Layout | Sequence[str | Layout] | Mapping[str, str | Layout]
Planner = Literal["optimal", "greedy"]
WORD = 4  # bytes of a float, of which a block of channels is a vector
PADDED = 1.2  # how much more than their elements the images take in blocks of a vector, if half vectors are considered
MOST = 16  # candidates of a node that are timed
BETWEEN_OPS = 0.5e-6  # seconds that threads need to meet between two ops, so that no reorder is made for less


@frozen
class Options:
    """The arguments of `compile`.

    layouts: the answer of a user's own planner is {node: layout or choice}.
    planner: such a function's name is "f()".
    costs: a user's own, as `Plan.cost_table` gives them.
    ends: layouts of inputs and outputs that are not row-major.
    """

    layouts: Layouts | Mapping[str, Layout | Choice]
    planner: str
    measure: bool
    threads: int
    accuracy: str | float
    costs: Mapping[str, float] = field(default_factory=dict)
    chosen: Mapping[str, Any] | None = None  # of a plan that was saved: kernel, sources, destination of each node
    ends: Mapping[str, Layout] = field(default_factory=dict)

    def end(self, tensor: Tensor) -> Layout:
        """The layout in which a plan gets an input, or gives an output."""
        return self.ends.get(tensor.name) or row_major(tensor.rank)

    @property
    def is_own(self) -> bool:
        """Whether a user's function is the planner."""
        return self.planner not in get_args(Planner)

    @property
    def solver(self) -> str:
        """The planner, without a user's function."""
        return "optimal" if self.is_own else self.planner

    @property
    def named(self) -> list[Layout]:
        """The layouts that were asked for."""
        asked: Any = self.layouts
        given = asked.values() if isinstance(asked, Mapping) else asked if isinstance(asked, tuple) else [asked]
        return [layout for layout in given if isinstance(layout, Layout)]

    @property
    def asked(self) -> str:
        """The layouts that were asked for, as text."""
        if self.is_own:
            return "auto"
        if isinstance(self.layouts, Mapping):
            return ", ".join(f"{name}: {layout}" for name, layout in self.layouts.items())
        if isinstance(self.layouts, (str, Layout)):
            return str(self.layouts)
        return f"auto among {', '.join(map(str, self.layouts))}"

    def written(self) -> dict[str, Any]:
        """The options that a file keeps."""
        asked: Any = self.layouts
        if isinstance(asked, Mapping):
            written = {name: lay.dst if isinstance(lay, Choice) else lay for name, lay in asked.items()}
            asked = {name: lay.tag for name, lay in written.items() if lay.is_native}
        elif asked != "auto":
            asked = [lay.tag for lay in asked] if isinstance(asked, tuple) else asked.tag
        return {"layouts": asked, "planner": self.solver, "threads": self.threads, "accuracy": self.accuracy}


def read_layouts(network: Network, layouts: Layouts, argument: str = "layouts") -> Layouts:
    """By the nodes that run, where they are given by nodes. argument: what errors call them."""
    if isinstance(layouts, (list, tuple)):
        if not layouts:
            raise ArgumentError("compile", argument, layouts, "has to name at least one layout", "or give 'auto'")
        return tuple(dict.fromkeys(native_layout(layout, "compile", argument) for layout in layouts))
    if not isinstance(layouts, Mapping):
        return layouts if str(layouts) == "auto" else native_layout(layouts, "compile", argument)  # type: ignore
    read: dict[str, Layout] = {}
    for name, layout in layouts.items():
        wanted = native_layout(layout, "compile", argument, {name: layout})
        why = "the value of a folded node is a constant, an input or unused"
        holder = running(network, argument, name, f" ({why})")
        if read.setdefault(holder, wanted) != wanted:
            rule = f"is part of node {holder!r}, which has {read[holder]} already"
            raise NetworkError(network.name, argument, {name: str(wanted)}, rule, "give a node one layout")
    return read


Found = tuple[tuple[Candidate, ...], ...]  # of each node


class Planned(NamedTuple):
    """The problem of a network's layouts, and a solution. `resized` gives neither steps nor costs."""

    problem: LayoutProblem
    candidates: Found  # of each node, as the steps of `problem` have them
    solution: Solution
    threads: int = 1  # that the costs of candidates are for
    is_recalled: bool = False  # chosen before: only the chosen candidates were priced

    @property
    def network(self) -> Network:
        """The network as it runs."""
        return self.problem.network

    @property
    def is_priced(self) -> bool:
        """Whether costs are known."""
        return not math.isnan(self.solution.cost)

    @property
    def chosen(self) -> list[Candidate]:
        """The candidate of each node."""
        return [found[k] for found, k in zipped(self.candidates, self.solution.chosen)]

    @property
    def quality(self) -> str:
        """How good the solution is known to be, in words."""
        if self.solution.exact:
            return "no plan costs less with these costs"
        if math.isfinite(self.solution.bound):
            return f"no plan costs less than {text.duration(self.solution.bound)}"
        return "no search for the least cost"


def _universe(network: Network, options: Options, machine: Machine, every: bool) -> tuple[Layout, ...]:
    """The layouts to consider: the requested tuple; else `NATIVE`'s that profit the network, and requested ones.

    Blocks of float32 are vectors, or halves of these in networks of few channels. Other blocks take 0.1 % off the time
    of most networks, 0.6 % at most, for a fifth more kernels and most of the planner's time. Narrower types gain up to
    7 % by all blocks. every: as in `formulated`.
    """
    if isinstance(options.layouts, tuple):
        return options.layouts
    images = [tensor for name, tensor in network.tensors.items() if tensor.rank == 4 and name not in network.constants]
    block = machine.lanes(WORD)
    padded = sum(Layout(f"NCHW{block}").size(image.shape) for image in images)
    is_wide = padded <= PADDED * sum(image.elements for image in images)
    names = {"NCHW", "NHWC", f"NCHW{block}", f"NCHW{block if is_wide else block // 2}"}
    if every or any(image.type.itemsize < WORD for image in images):
        single = all(image.shape[0] == 1 for image in images)  # CHWN4 is NCHW4 then
        names = {layout.name for layout in NATIVE if layout.name != "CHWN4" or not single}
    usual = [layout for layout in NATIVE if layout.name in names]
    return tuple(dict.fromkeys([*usual, *options.named]))


def formulate(network: Network, found: Found, reorder: Reorder, options: Options) -> LayoutProblem:
    """The problem of a network with these candidates."""
    steps = []
    for node, ways in zipped(network.nodes, found):
        flows = [i for i, name in enumerate(node.inputs) if name not in network.constants]
        choices = tuple(Choice(tuple(c.srcs[i] for i in flows), c.dst, c.cost, c.choice[0]) for c in ways)
        steps.append(Step(node.name, tuple(node.inputs[i] for i in flows), node.output, choices))
    return LayoutProblem(tuple(steps), *ends(network, options), reorder, network)


def ends(network: Network, options: Options) -> tuple[dict[str, Layout], dict[str, Layout]]:
    """The layouts of a network's inputs and outputs, by name; those of constants are no part of its problem."""
    given = {tensor.name: options.end(tensor) for tensor in network.inputs}
    made = [name for name in network.outputs if name not in network.constants]
    return given, {name: options.end(network.tensors[name]) for name in made}


def _solve(problem: LayoutProblem, options: Options) -> Solution:
    asked = options.layouts
    if isinstance(asked, Layout):
        return fixed(problem, asked)
    solver = greedy if options.planner == "greedy" else _optimal
    if not isinstance(asked, Mapping):
        return solver(problem)

    def keep(step: Step, choice: Choice) -> bool:
        wanted = asked.get(step.name, choice.dst)
        return replace(choice, cost=wanted.cost) == wanted if isinstance(wanted, Choice) else choice.dst == wanted

    found = restricted(problem, keep, solver)
    return replace(found, bound=-math.inf) if options.is_own else found


def _optimal(problem: LayoutProblem) -> Solution:
    """`planner.optimal`, with the progress of long searches shown."""
    with Progress("searching for the best layouts", STEPS) as shown:
        return optimal(problem, report=shown.tick)


def prepared(network: Network, options: Options, every: bool) -> tuple[Network, Pricing]:
    """The network as it will run, and the pricing of its candidates. every: as in `formulated`."""
    network = of_kernels(network)
    for name, tensor in network.tensors.items():
        if not tensor.elements and tensor.type.is_packed:
            rule = f"plans do not support empty values of {tensor.type}"
            raise UnsupportedError(f"value {name!r} has shape {tensor.shape}: {rule}")
    if isinstance(options.layouts, tuple):  # which may have no blocks of channels, as packed values need
        network = widened(network, options.layouts)
    accuracy = selection.accuracy_of("compile", options.accuracy)
    # The functions hold no network, whose weights a plan may give up.
    machine, costs, tensors = host(), options.costs, network.tensors
    weight_rate = _weight_rate(network, machine)

    @functools.cache
    def reorder(name: str, src: Layout, dst: Layout) -> float:
        """The kernel's prediction on one thread; 0 where the bytes are the same; a user's own by `reorder_key`."""
        shape, type = tensors[name].shape, tensors[name].type
        if src != dst and same_bytes(shape, src, dst):
            return 0.0
        given = costs.get(reorder_key(shape, src, dst)) if costs else None
        itemsize = 0 if type.is_packed else type.itemsize
        return BETWEEN_OPS + reorder_seconds(machine, shape, src, dst, itemsize) if given is None else given

    def price(one: Candidate) -> float:
        """A user's cost; else the row's, but at least the time to load its weights.

        The cost is for one thread, so that the choice, and every bit, does not depend on the number of threads.
        """
        given = costs.get(cost_key(one, 1)) if costs else None
        return max(one.cost, one.wei_bytes / weight_rate) if given is None else given

    layouts, predicts = _universe(network, options, machine, every), not costs
    return network, Pricing(layouts, price, reorder, machine, accuracy, every or options.measure, predicts=predicts)


def formulated(network: Network, options: Options, every: bool) -> tuple[LayoutProblem, Found]:
    """The problem of the network as it will run, and the candidates of each node.

    every: keep each kernel, not the cheapest for its layouts alone.
    """
    network, pricing = prepared(network, options, every)
    found = tuple(tuple(candidates(network, node, pricing)) for node in network.nodes)
    if options.measure:
        found = measured(network, found, options.threads, options.costs)
    return formulate(network, found, pricing.reorder, options), found


def plan_layouts(network: Network, options: Options) -> Planned:
    """A candidate for every node, as the options ask.

    If a file or an earlier process made the choice, no search runs, and only the chosen candidates are priced.
    """
    if options.chosen is not None:
        return _recalled(network, options, options.chosen, -math.inf) or plan_layouts(
            network, replace(options, chosen=None)
        )
    if options.measure or options.is_own:
        return _searched(network, options)
    machine, asked = host(), replace(options, threads=1)
    caches = machine.second_level_cache, machine.last_level_cache
    values = network.nodes, network.tensors, network.inputs, network.outputs, tuple(network.constants)
    name = remembered.kept_name(machine.isa, machine.profile, caches, asked, values)
    known = _recalled(network, options, *remembered.choice(name))
    if known is None:
        planned = _searched(network, options)
        remembered.keep_choice(name, choices(planned), planned.solution.bound)
    return known or planned


def _searched(network: Network, options: Options) -> Planned:
    """The best candidates among all."""
    problem, found = formulated(network, options, options.is_own)  # whose choice need not be the cheapest
    return Planned(problem, found, _solve(problem, options), options.threads if options.measure else 1)


def with_all_candidates(network: Network, options: Options, planned: Planned) -> Planned:
    """The same choice among all candidates, with their prices. network: as `plan_layouts` took it."""
    if not planned.is_recalled:
        return planned
    every = options.chosen is not None  # what a file has need not be the cheapest here
    problem, found = formulated(network, replace(options, measure=False), every)
    known = [{c.choice: k for k, c in enumerate(ways)} for ways in found]
    numbers = [at.get(c.choice, -1) for at, c in zipped(known, planned.chosen)]
    if -1 in numbers:  # a file may name layouts that its options do not
        return planned
    return Planned(problem, found, evaluate(problem, numbers, planned.solution.bound))


def choices(planned: Planned) -> dict[str, list[Any]]:
    """The kernel, the sources' layouts and the destination's of each node, as files have them."""
    each = zipped(planned.network.nodes, (one.choice for one in planned.chosen))
    return {node.name: [kernel, [lay.tag for lay in srcs], dst.tag] for node, (kernel, srcs, dst) in each}


def _recalled(network: Network, options: Options, chosen: Mapping[str, Any], bound: float) -> Planned | None:
    """The plan with the choices that were made before; None if some do not exist here."""
    network, pricing = prepared(network, options, every=True)
    found = []
    for node in network.nodes:
        wanted = _choice(chosen.get(node.name))
        if wanted is None:
            return None
        _, srcs, dst = wanted
        images = dict.fromkeys(layout for layout in (*srcs, dst) if layout.ndim == 4)
        near = replace(pricing, layouts=tuple(images) or (row_major(4),), dsts=(dst,) if dst.ndim == 4 else ())
        ways = candidates(network, node, near)
        same = next((c for c in ways if c.choice == wanted), None)
        if same is None:
            return None
        found.append((same,))
    problem = formulate(network, tuple(found), pricing.reorder, options)
    return Planned(problem, tuple(found), evaluate(problem, [0] * len(found), bound), is_recalled=True)


def _choice(saved: Any) -> tuple[Any, tuple[Layout, ...], Layout] | None:
    """The kernel, the sources' layouts and the destination's, as a file has them; None for anything else."""
    try:
        kernel, srcs, dst = saved
        return kernel, tuple(map(Layout, srcs)), Layout(dst)
    except (TypeError, ValueError, LayoutError):
        return None


def _weight_rate(network: Network, machine: Machine) -> float:
    """Bytes of weights that a core reads in a second, where each run of the network takes them from memory.

    All weights together do not stay in the last cache then. Two cores are taken to read at once, because a choice is
    for any number of threads. For 512 channels of 7x7 on one core of a Zen 4, 38 MB of F(4x4) take as long as 17 MB of
    F(2x2). On two cores they take 1.7 times as long.
    """
    known = machine.profile
    nbytes = sum(array.nbytes for array in network.constants.values())
    return known.reads["memory"] / 2 if nbytes > known.caches["L3"] else math.inf


def cost_key(candidate: Candidate, threads: int) -> str:
    """The name of a kernel's time in a table of costs."""
    assert candidate.row is not None
    return tuning.key(candidate.row, candidate.request, threads)


def reorder_key(shape: Shape, src: Layout, dst: Layout) -> str:
    """The name of a reorder's time in a table of costs."""
    return f"reorder | {text.dims(shape)} | {src} -> {dst}"


# ---------------------------------------------------------------- measured costs


def measured(network: Network, found: Found, threads: int, costs: Mapping[str, float]) -> Found:
    """The candidates with times for costs: for each node, the MOST with the least predicted costs are timed.

    The other predictions are multiplied by the median ratio of time to prediction. The cheapest kernel for each pair
    of layouts stays. Times are kept on disk.
    """
    known = tuning.Costs()

    def timed(node: Node, options: tuple[Candidate, ...]) -> tuple[Candidate, ...]:
        kernels = sorted((c for c in options if c.row is not None), key=lambda c: c.cost)
        held = Parameters(network)
        times: dict[Candidate, float] = {}
        for candidate in kernels[:MOST]:
            name = cost_key(candidate, threads)
            seconds = costs.get(name, known.get(name))
            if seconds is None:
                seconds = tuning.seconds_of(*alone(network, node, candidate, held, threads), threads)
                known.put(name, seconds)
            times[candidate] = seconds
        ratio = median_high([times[one] / one.cost for one in times if one.cost] or [1.0])
        made = (c if c.row is None else c._replace(cost=times.get(c, c.cost * ratio)) for c in options)
        return tuple(cheapest(made, every=False))

    done: list[tuple[Candidate, ...]] = []
    with Progress("timing kernels", len(found)) as shown:
        for node, options in zipped(network.nodes, found):
            shown.tick(len(done), node.name)
            done.append(timed(node, options))
            known.save()
    return tuple(done)


def alone(
    network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int
) -> tuple[Sequence[Launch], list[int]]:
    """A candidate's ops, and the bytes of each of their buffers."""
    bound = bind(network, node, candidate, held, threads)

    def nbytes(operand: Any) -> int:
        if isinstance(operand, (np.ndarray, Workspace)):
            return operand.nbytes
        name, layout = (node.output, candidate.dst) if operand < 0 else (node.inputs[operand], candidate.srcs[operand])
        shape = network.shape(name)
        shape = of_rank(shape, layout.ndim)
        return network.tensors[name].type.nbytes(layout.size(shape))

    return bound.launches, [nbytes(operand) for operand in bound.operands]
