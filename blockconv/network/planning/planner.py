"""Which layout each tensor has: the choice of one candidate for every op, at the least cost over a whole network.

Ops have candidates, each with a layout for every input, one for the output, and a cost. A tensor exists in its
producer's layout, and in the layout of every copy that a reorder makes. One copy serves all readers that want it. So
a choice costs what its candidates cost, plus one reorder for each (tensor, layout) that is read and is not the
producer's.

`optimal` writes this as a partitioned boolean quadratic problem (PBQP: Scholz and Eckstein, LCTES 2002; for layouts
of convolutions: Anderson and Gregg, CGO 2018): variables with costs, and matrices of costs between two of them. An op
is a variable, and its candidates are the values. A tensor with several readers is a variable too. Each of its values
is a layout of the producer with a set of copies, so shared reorders are exact. `elimination` minimises that.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core.checks import Names, Pair
from blockconv.core.errors import ArgumentError
from blockconv.core.python import zipped
from blockconv.core.record import frozen
from blockconv.network.graph import Network
from blockconv.network.planning.elimination import STEPS, TABLE, Factor, minimum

Lay = Any  # a layout; anything that can be hashed


@frozen
class Choice:
    """A candidate of an op: a layout of each input, one of the output, seconds; its kernel, None for a view."""

    srcs: tuple[Lay, ...]
    dst: Lay
    cost: float
    kernel: str | None = None


@frozen
class Step:
    """An op: the tensors that it reads, the one that it writes, and its candidates."""

    name: str
    inputs: Names
    output: str
    choices: tuple[Choice, ...]


class Edge(NamedTuple):
    """A value between two steps.

    value: its name.
    producer: the step that writes it; None for an input of the network.
    reader: the step that reads it; None for an output of the network.
    """

    value: str
    producer: str | None
    reader: str | None


@frozen
class LayoutProblem:
    """The problem of a planner: choose a kernel and layouts for each step.

    steps: the ops, in an order that can run. A step has a `name`, the names of its `inputs` and of its `output`, and
        its `choices`. A choice has a `kernel`, the layouts of the inputs (`srcs`) and of the output (`dst`), and a
        `cost` in seconds. The kernel of a view, which moves nothing, is None.
    given: {input of the network: its layout}.
    wanted: {output of the network: its required layout}.
    reorder: a function: `reorder(value, src, dst)` is the seconds of a reorder, infinite if none exists.
    network: the network, with `network.nodes`, `network.shape(value)` and `network.problem(node)`.

    A value has the layout of its producer's choice. For each other layout, one reorder serves all readers.
    """

    steps: tuple[Step, ...]
    given: Mapping[str, Lay]
    wanted: Mapping[str, Lay]
    reorder: Callable[[str, Lay, Lay], float]
    network: Network

    @property
    def edges(self) -> tuple[Edge, ...]:
        """Each value, once for each of its readers."""
        producers = {step.output: step.name for step in self.steps}
        reads = [(value, step.name) for step in self.steps for value in step.inputs]
        return tuple(
            Edge(value, producers.get(value), name) for value, name in [*reads, *((v, None) for v in self.wanted)]
        )

    def cost(self, chosen: Mapping[str, Choice]) -> float:
        """The predicted seconds of the plan with these choices, with its reorders. chosen: {step: choice}."""
        return evaluate(self, [step.choices.index(chosen[step.name]) for step in self.steps]).cost


@frozen
class Solution:
    """A choice for every step, by index.

    cost: seconds.
    bound: no solution costs less; `exact` if this one does not.
    reorders: (tensor, src, dst) of each copy, in the order of their tensors.
    """

    chosen: tuple[int, ...]
    cost: float
    bound: float
    reorders: tuple[tuple[str, Lay, Lay], ...]

    @property
    def exact(self) -> bool:
        return self.cost <= self.bound + 1e-9 * abs(self.bound)


def evaluate(problem: LayoutProblem, chosen: Sequence[int], bound: float = -math.inf) -> Solution:
    """The cost of a choice, by the definition, and the reorders that it needs."""
    where = dict(problem.given)
    needed: dict[tuple[str, Lay], None] = {}  # in order
    cost = 0.0
    for step, index in zipped(problem.steps, chosen):
        choice = step.choices[index]
        cost += choice.cost
        where[step.output] = choice.dst
        needed |= dict.fromkeys(zipped(step.inputs, choice.srcs))
    needed |= dict.fromkeys(problem.wanted.items())
    copies = tuple((tensor, where[tensor], lay) for tensor, lay in needed if lay != where[tensor])
    cost += sum(problem.reorder(*copy) for copy in copies)
    return Solution(tuple(chosen), cost, bound, copies)


# ---------------------------------------------------------------- restrictions and heuristics


def restricted(
    problem: LayoutProblem, keep: Callable[[Step, Choice], bool], solve: Callable[[LayoutProblem], Solution]
) -> Solution:
    """A solution of the choices that are to be kept alone, and a bound of these; a step that keeps none keeps all."""
    steps, indices = [], []
    for step in problem.steps:
        kept = [k for k, choice in enumerate(step.choices) if keep(step, choice)] or list(range(len(step.choices)))
        steps.append(replace(step, choices=tuple(step.choices[k] for k in kept)))
        indices.append(kept)
    solved = solve(replace(problem, steps=tuple(steps)))
    return evaluate(problem, [kept[k] for kept, k in zipped(indices, solved.chosen)], solved.bound)


def fixed(problem: LayoutProblem, layout: Lay) -> Solution:
    """Every op reads and writes `layout` if it has a candidate that does; the others as is best."""

    def keep(step: Step, choice: Choice) -> bool:
        return choice.dst == layout and all(src == layout for src in choice.srcs)

    return replace(restricted(problem, keep, optimal), bound=-math.inf)


def greedy(problem: LayoutProblem) -> Solution:
    """Op by op: the candidate that costs least with the reorders that it needs, whatever follows."""
    where: dict[str, Lay] = dict(problem.given)
    made: set[tuple[str, Lay]] = set(where.items())
    chosen = []
    for step in problem.steps:
        prices = []
        for choice in step.choices:
            wanted = dict.fromkeys(pair for pair in zipped(step.inputs, choice.srcs) if pair not in made)
            prices.append(choice.cost + sum(problem.reorder(name, where[name], lay) for name, lay in wanted))
        best = int(np.argmin(prices))
        chosen.append(best)
        choice = step.choices[best]
        where[step.output] = choice.dst
        made |= {(step.output, choice.dst), *zipped(step.inputs, choice.srcs)}
    return evaluate(problem, chosen)


# ---------------------------------------------------------------- the least


def optimal(
    problem: LayoutProblem,
    steps: int = STEPS,
    table: int = TABLE,
    report: Callable[[int], None] | None = None,
) -> Solution:
    """The least cost there is; with a bound where the budget ends before that is known.

    steps, table, report: the budget, as `elimination.minimum` has it.
    Raises ArgumentError if no choice of candidates can be connected by reorders.
    """
    first = greedy(problem)
    found = minimum(factors_of(problem), first.cost, steps, table, report)
    if found.values is None:
        if not math.isfinite(first.cost):
            names = ", ".join(step.name for step in problem.steps[:3])
            raise ArgumentError("plan", "steps", names, "have no choice of layouts that reorders can connect")
        return replace(first, bound=min(found.bound, first.cost))
    best = evaluate(problem, [found.values[k] for k in range(len(problem.steps))])
    return replace(best, bound=min(found.bound, best.cost))


def factors_of(problem: LayoutProblem) -> list[Factor]:
    """Costs over variables 0, 1, ...: the steps; then the tensors of several readers."""
    factors = [Factor((k,), np.array([c.cost for c in step.choices])) for k, step in enumerate(problem.steps)]
    producers: dict[str, int] = {}
    readers: dict[str, list[Pair]] = {}  # (step, which of its inputs)
    for k, step in enumerate(problem.steps):
        producers[step.output] = k
        for i, tensor in enumerate(step.inputs):
            readers.setdefault(tensor, []).append((k, i))
    variables = itertools.count(len(problem.steps))
    for tensor in dict.fromkeys((*problem.given, *producers)):
        uses = readers.get(tensor, [])
        wanted = [problem.wanted[tensor]] if tensor in problem.wanted else []
        if uses or wanted:
            factors += _of_tensor(problem, tensor, producers.get(tensor), uses, wanted, variables)
    return factors


def _of_tensor(
    problem: LayoutProblem,
    tensor: str,
    maker: int | None,
    uses: Sequence[Pair],
    wanted: Sequence[Lay],
    variables: Iterator[int],
) -> Iterator[Factor]:
    """The costs of a tensor, made by step `maker` (None: given), in the layouts that its readers want."""
    given = [problem.given[tensor]] if maker is None else [c.dst for c in problem.steps[maker].choices]
    asked = [[c.srcs[i] for c in problem.steps[k].choices] for k, i in uses]
    # Layouts by number from here on.
    number = {lay: k for k, lay in enumerate(dict.fromkeys(itertools.chain(given, *asked, wanted)))}
    price = np.full((len(number), len(number)), math.inf)
    for source in dict.fromkeys(given):
        for lay, d in number.items():
            price[number[source], d] = 0.0 if lay == source else problem.reorder(tensor, source, lay)
    made, reads = _numbers(given, number), [_numbers(layouts, number) for layouts in asked]
    if len(uses) == 1 and not wanted and maker is not None:
        yield Factor((maker, uses[0][0]), price[np.ix_(made, reads[0])])
        return
    sources, must = dict.fromkeys(made.tolist()), {number[lay] for lay in wanted}
    states = [(s, copies) for s in sources for copies in _copies(reads, must, s)]
    present = np.zeros((len(states), len(number)), bool)
    for k, (s, copies) in enumerate(states):
        present[k, [s, *copies]] = True
    state = next(variables)
    yield Factor((state,), np.array([sum(price[s, d] for d in copies) for s, copies in states]))
    if maker is not None:
        origins = np.array([s for s, _ in states])
        yield Factor((state, maker), np.where(origins[:, None] == made, 0.0, math.inf))
    for (k, _), layouts in zipped(uses, reads):
        yield Factor((state, k), np.where(present[:, layouts], 0.0, math.inf))


def _numbers(layouts: Sequence[Lay], number: Mapping[Lay, int]) -> npt.NDArray[np.int64]:
    return np.array([number[lay] for lay in layouts], np.int64)


def _copies(asked: Sequence[Iterable[int]], wanted: set[int], source: int) -> Iterator[frozenset[int]]:
    """The sets of copies that readers could use: at most one for each reader, and the wanted ones."""
    must = frozenset(wanted - {source})
    useful = [lay for lay in dict.fromkeys(itertools.chain(*asked)) if lay != source and lay not in must]
    for size in range(min(len(asked), len(useful)) + 1):
        for copies in itertools.combinations(useful, size):
            yield must | frozenset(copies)
