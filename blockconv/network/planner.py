"""Which layout each tensor has: the choice of one candidate for every op, at the least cost over a whole network.

Ops have candidates, each with a layout for every input, one for the output, and a cost. A tensor lies in its
producer's layout and in that of every copy that a reorder makes of it; one copy serves all readers that want it.
So the cost of a choice is that of its candidates, and of one reorder for each (tensor, layout) that is read and
is not the producer's.

`optimal` writes this as a partitioned boolean quadratic problem (PBQP: Scholz and Eckstein, LCTES 2002; for layouts
of convolutions: Anderson and Gregg, CGO 2018): variables with costs, and matrices of costs between two of them. A
variable is an op, its values the candidates; a tensor of several readers is a variable too, its values the
producer's layout together with a set of copies, which makes shared reorders exact. Variables of one or two
neighbours are reduced away without loss, which solves every series-parallel network: those of ResNet, Inception,
DenseNet, MobileNet, U-Net. What is left is branched on, within a budget; then the answer comes with a bound.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.errors import ArgumentError

__all__ = ["Assignment", "Choice", "Solution", "Step", "evaluate", "fixed", "greedy", "optimal", "restrict"]

Lay = Any  # a layout; anything that can be hashed
Costs = npt.NDArray[np.float64]
BRANCHES = 4096  # subproblems that `optimal` looks at before it stops with a bound


@dataclass(frozen=True)
class Choice:
    """A candidate of an op: a layout of each input, one of the output, seconds; and what the caller keeps with it."""

    srcs: tuple[Lay, ...]
    dst: Lay
    cost: float
    what: Any = field(default=None, compare=False)


@dataclass(frozen=True)
class Step:
    """An op: the tensors that it reads, the one that it writes, and its candidates."""

    name: str
    inputs: tuple[str, ...]
    output: str
    choices: tuple[Choice, ...]


@dataclass(frozen=True)
class Assignment:
    """The problem. steps: in an order in which they can run. given: the layout that each input of the network has.

    wanted: the layout that each output has to be in. reorder(tensor, src, dst): seconds, infinite if impossible.
    """

    steps: tuple[Step, ...]
    given: Mapping[str, Lay]
    wanted: Mapping[str, Lay]
    reorder: Callable[[str, Lay, Lay], float]


@dataclass(frozen=True)
class Solution:
    """A choice for every step, by index. cost: seconds. bound: no solution costs less; `exact` if this one does not.

    reorders: (tensor, src, dst) of each copy, in the order of their tensors.
    """

    chosen: tuple[int, ...]
    cost: float
    bound: float
    reorders: tuple[tuple[str, Lay, Lay], ...]

    @property
    def exact(self) -> bool:
        return self.cost <= self.bound + 1e-9 * abs(self.bound)


def evaluate(problem: Assignment, chosen: Sequence[int], bound: float = -math.inf) -> Solution:
    """What a choice costs, by the definition, and the reorders that it needs."""
    where = dict(problem.given)
    needed: dict[tuple[str, Lay], None] = {}  # in order
    cost = 0.0
    for step, index in zip(problem.steps, chosen, strict=True):
        choice = step.choices[index]
        cost += choice.cost
        where[step.output] = choice.dst
        needed |= dict.fromkeys(zip(step.inputs, choice.srcs, strict=True))
    needed |= dict.fromkeys(problem.wanted.items())
    copies = tuple((tensor, where[tensor], lay) for tensor, lay in needed if lay != where[tensor])
    cost += sum(problem.reorder(*copy) for copy in copies)
    return Solution(tuple(chosen), cost, bound, copies)


# ---------------------------------------------------------------- restrictions and heuristics


def restrict(problem: Assignment, keep: Callable[[Step, Choice], bool]) -> tuple[Assignment, list[list[int]]]:
    """The problem with only the choices that are to be kept, and their indices; a step that keeps none keeps all."""
    steps, indices = [], []
    for step in problem.steps:
        kept = [k for k, choice in enumerate(step.choices) if keep(step, choice)] or list(range(len(step.choices)))
        steps.append(replace(step, choices=tuple(step.choices[k] for k in kept)))
        indices.append(kept)
    return replace(problem, steps=tuple(steps)), indices


def fixed(problem: Assignment, layout: Lay) -> Solution:
    """Every op reads and writes `layout` if it has a candidate that does; the others as is best."""

    def keep(step: Step, choice: Choice) -> bool:
        return choice.dst == layout and all(src == layout for src in choice.srcs)

    smaller, indices = restrict(problem, keep)
    solved = optimal(smaller)
    return evaluate(problem, [kept[k] for kept, k in zip(indices, solved.chosen, strict=True)])


def greedy(problem: Assignment) -> Solution:
    """Op by op: the candidate that costs least with the reorders that it needs, whatever follows."""
    where: dict[str, Lay] = dict(problem.given)
    made: set[tuple[str, Lay]] = set(where.items())
    chosen = []
    for step in problem.steps:
        prices = []
        for choice in step.choices:
            wanted = dict.fromkeys(pair for pair in zip(step.inputs, choice.srcs, strict=True) if pair not in made)
            prices.append(choice.cost + sum(problem.reorder(name, where[name], lay) for name, lay in wanted))
        best = int(np.argmin(prices))
        chosen.append(best)
        choice = step.choices[best]
        where[step.output] = choice.dst
        made |= {(step.output, choice.dst), *zip(step.inputs, choice.srcs, strict=True)}
    return evaluate(problem, chosen)


# ---------------------------------------------------------------- PBQP


class _Pbqp:
    """Variables with a cost for each value, and a matrix of costs for each pair that has one."""

    def __init__(self) -> None:
        self.costs: dict[int, Costs] = {}
        self.edges: dict[int, dict[int, Costs]] = {}

    def add(self, variable: int, costs: Costs) -> None:
        self.costs[variable] = costs
        self.edges[variable] = {}

    def connect(self, a: int, b: int, matrix: Costs) -> None:
        """Add the costs of (value of a, value of b)."""
        if b in self.edges[a]:
            matrix = matrix + self.edges[a][b]
        self.edges[a][b], self.edges[b][a] = matrix, matrix.T

    def remove(self, variable: int) -> tuple[Costs, dict[int, Costs]]:
        costs, edges = self.costs.pop(variable), self.edges.pop(variable)
        for other in edges:
            del self.edges[other][variable]
        return costs, edges

    def copy(self) -> _Pbqp:
        twin = _Pbqp()
        twin.costs = dict(self.costs)
        twin.edges = {a: dict(edges) for a, edges in self.edges.items()}
        return twin

    def fix(self, variable: int, value: int) -> float:
        """Give a variable its value: its neighbours take over the costs between them. The value's own cost."""
        costs, edges = self.remove(variable)
        for other, matrix in edges.items():
            self.costs[other] = self.costs[other] + matrix[value]
        return float(costs[value])

    def reduce(self, stack: list[tuple[int, Costs, dict[int, Costs]]]) -> None:
        """Eliminate every variable of at most two neighbours, exactly; `stack` remembers how to decide them later."""
        waiting = {v for v, edges in self.edges.items() if len(edges) <= 2}
        while waiting:
            variable = min(waiting, key=lambda v: (len(self.edges[v]), v))
            waiting.discard(variable)
            costs, edges = self.remove(variable)
            stack.append((variable, costs, edges))
            others = list(edges)
            if len(others) == 1:
                self.costs[others[0]] = self.costs[others[0]] + (costs[:, None] + edges[others[0]]).min(axis=0)
            elif len(others) == 2:
                self.connect(others[0], others[1], _through(costs[:, None] + edges[others[0]], edges[others[1]]))
            waiting |= {v for v in others if len(self.edges[v]) <= 2}

    def bound(self) -> float:
        """No assignment costs less."""
        pairs = sum(float(m.min()) for a, edges in self.edges.items() for b, m in edges.items() if a < b)
        return sum(float(c.min()) for c in self.costs.values()) + pairs


def _through(left: Costs, right: Costs) -> Costs:
    """The least over k of left[k, i] + right[k, j]."""
    # The middle variable's values in turn; what is added and compared stays in the cache.
    best: Costs = left[0][:, None] + right[0]
    for k in range(1, len(left)):
        np.minimum(best, left[k][:, None] + right[k], out=best)
    return best


def _decide(stack: list[tuple[int, Costs, dict[int, Costs]]], values: dict[int, int]) -> None:
    """The values of eliminated variables, last eliminated first."""
    for variable, costs, edges in reversed(stack):
        total = costs
        for other, matrix in edges.items():
            total = total + matrix[:, values[other]]
        values[variable] = int(total.argmin())


def _solve(problem: _Pbqp, most: float, branches: int) -> tuple[dict[int, int] | None, float, float]:
    """(values, their cost, a bound) of an assignment that costs less than `most`; None if none was found.

    Depth first, the most promising value first; what was not looked at lowers the bound.
    """
    best: tuple[dict[int, int] | None, float] = (None, most)
    unseen = math.inf
    left = branches

    def search(core: _Pbqp, spent: float, path: list[list[tuple[int, Costs, dict[int, Costs]]]]) -> None:
        nonlocal best, unseen, left
        stack: list[tuple[int, Costs, dict[int, Costs]]] = []
        core.reduce(stack)
        spent += sum(float(costs.min()) for _, costs, edges in stack if not edges)
        path = [*path, stack]
        if not core.costs:
            if spent < best[1]:
                values: dict[int, int] = {}
                for done in reversed(path):
                    _decide(done, values)
                best = values, spent
            return
        variable = max(core.edges, key=lambda v: (len(core.edges[v]), -len(core.costs[v]), -v))
        promising = []
        for value in range(len(core.costs[variable])):
            twin = core.copy()
            cost = spent + twin.fix(variable, value)
            promising.append((cost + twin.bound(), value, cost, twin))
        for least, value, cost, twin in sorted(promising, key=lambda item: item[:2]):
            if least >= best[1]:
                break
            if left <= 0:
                unseen = min(unseen, least)
                break
            left -= 1
            # The fixed variable is "eliminated" with the one value that it has.
            only = np.full(len(core.costs[variable]), math.inf)
            only[value] = 0.0
            search(twin, cost, [*path, [(variable, only, {})]])

    search(problem, 0.0, [])
    return best[0], best[1], min(best[1], unseen)


# ---------------------------------------------------------------- the assignment as a PBQP


def optimal(problem: Assignment, branches: int = BRANCHES) -> Solution:
    """The least cost there is, or, where the network is no series-parallel one and the budget ends, with a bound.

    Raises ArgumentError if no choice of candidates can be connected by reorders.
    """
    pbqp = _formulate(problem)
    first = greedy(problem)
    # Slightly more than what is known, so that an equal one is found, and rounding does not matter.
    values, _, bound = _solve(pbqp, first.cost * (1 + 1e-9) if math.isfinite(first.cost) else math.inf, branches)
    if values is None and not math.isfinite(first.cost):
        names = ", ".join(step.name for step in problem.steps[:3])
        raise ArgumentError("plan", "steps", names, "no choice of layouts can be connected by reorders")
    found = first if values is None else evaluate(problem, [values[k] for k in range(len(problem.steps))])
    if first.cost < found.cost:
        found = first
    return replace(found, bound=min(bound, found.cost))


def _formulate(problem: Assignment) -> _Pbqp:
    """Variables 0, 1, ...: the steps; then the tensors of several readers."""
    pbqp = _Pbqp()
    producers: dict[str, int] = {}
    readers: dict[str, list[tuple[int, int]]] = {}  # (step, which of its inputs)
    for k, step in enumerate(problem.steps):
        pbqp.add(k, np.array([choice.cost for choice in step.choices]))
        producers[step.output] = k
        for i, tensor in enumerate(step.inputs):
            readers.setdefault(tensor, []).append((k, i))
    fresh = itertools.count(len(problem.steps))
    for tensor in dict.fromkeys((*problem.given, *producers)):
        uses = readers.get(tensor, [])
        wanted = [problem.wanted[tensor]] if tensor in problem.wanted else []
        maker = producers.get(tensor)
        given = [problem.given[tensor]] if maker is None else [c.dst for c in problem.steps[maker].choices]
        asked = [[c.srcs[i] for c in problem.steps[k].choices] for k, i in uses]
        if not uses and not wanted:
            continue
        # Layouts by number from here on.
        number = {lay: k for k, lay in enumerate(dict.fromkeys(itertools.chain(given, *asked, wanted)))}
        sources = list(dict.fromkeys(number[lay] for lay in given))
        price = np.full((len(number), len(number)), math.inf)
        for source in dict.fromkeys(given):
            for lay, d in number.items():
                price[number[source], d] = 0.0 if lay == source else problem.reorder(tensor, source, lay)
        made, reads = _numbers(given, number), [_numbers(layouts, number) for layouts in asked]
        if len(uses) == 1 and not wanted and maker is not None:
            pbqp.connect(maker, uses[0][0], price[np.ix_(made, reads[0])])
            continue
        states = [(s, copies) for s in sources for copies in _copies(reads, {number[lay] for lay in wanted}, s)]
        there = np.zeros((len(states), len(number)), bool)
        costs = np.zeros(len(states))
        for k, (s, copies) in enumerate(states):
            there[k, [s, *copies]] = True
            costs[k] = sum(price[s, d] for d in copies)
        x = next(fresh)
        pbqp.add(x, costs)
        if maker is not None:
            origins = np.array([s for s, _ in states])
            pbqp.connect(x, maker, np.where(origins[:, None] == made, 0.0, math.inf))
        for (k, _), layouts in zip(uses, reads, strict=True):
            pbqp.connect(x, k, np.where(there[:, layouts], 0.0, math.inf))
    return pbqp


def _numbers(layouts: Sequence[Lay], number: Mapping[Lay, int]) -> npt.NDArray[np.int64]:
    return np.array([number[lay] for lay in layouts], np.int64)


def _copies(asked: Sequence[Iterable[int]], wanted: set[int], source: int) -> Iterator[frozenset[int]]:
    """The sets of copies that readers could make use of: at most one each, and what has to be there."""
    must = frozenset(wanted - {source})
    useful = [lay for lay in dict.fromkeys(itertools.chain(*asked)) if lay != source and lay not in must]
    for size in range(min(len(asked), len(useful)) + 1):
        for copies in itertools.combinations(useful, size):
            yield must | frozenset(copies)
