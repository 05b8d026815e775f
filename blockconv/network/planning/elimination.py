"""Minimising a sum of cost tables over variables of few values each: exactly where that fits a budget, else with a
bound.

A *factor* is a table of costs over some variables. To eliminate a variable, add all factors that hold it and take the
least over its values. The result is a factor over its neighbours (bucket elimination: Dechter, Artificial Intelligence
1999). The cheapest variable goes first. With one or two neighbours, these are the reductions RI and RII of partitioned
boolean quadratic problems (PBQP). They solve every series-parallel network exactly, in no time. Elimination goes on to
three neighbours and more, as long as a table has at most `TABLE` elements.

Where a table would be larger, its factors are added and minimised in several parts (mini-buckets: Dechter and Rish,
Journal of the ACM 2003). The result is a lower bound, and the assignment that the smaller tables suggest is a solution.
Between the two the search branches on the values of a variable that was split, depth first, until they meet or the
budget of steps is spent.
"""

import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core.python import zipped

Costs = npt.NDArray[np.float64]
TABLE = 1 << 20  # elements of a table that an elimination may make, the eliminated variable's values included
STEPS = 1 << 30  # elements that a search may compute, some seconds; a count, so that all machines stop alike
OVERHEAD = 1 << 12  # elements that could be computed in the time of the smallest table
SLAB = 1 << 16  # elements that are added at once, so that they stay in the caches
TOLERANCE = 1e-9  # the relative improvement that makes a solution better than a known one


class Factor(NamedTuple):
    """Costs over variables: one axis of `costs` for each of `scope`, in its order."""

    scope: tuple[int, ...]
    costs: Costs


class Minimum(NamedTuple):
    """The result of a search. No assignment costs less than `bound`.

    values: of the variables; None if no assignment costs less than the known `cost`.
    steps: the steps that the search took.
    """

    values: dict[int, int] | None
    cost: float
    bound: float
    steps: int


def minimum(
    factors: Sequence[Factor],
    most: float = math.inf,
    steps: int = STEPS,
    table: int = TABLE,
    report: Callable[[int], None] | None = None,
) -> Minimum:
    """The values that make the sum of the factors least, if that sum is less than `most`.

    steps: the budget, in elements of tables; the first elimination is always finished, so that there is a bound.
    table: elements that a table may have. report(steps): is told how many were spent, as it goes.
    """
    domains = {v: size for f in factors for v, size in zipped(f.scope, f.costs.shape)}
    best, unseen, spent = Minimum(None, most, -math.inf, 0), math.inf, 0

    def spend(count: int) -> None:
        nonlocal spent
        spent += count
        if report is not None:
            report(spent)

    def improves(cost: float) -> bool:
        return cost < best.cost - TOLERANCE * abs(best.cost) if math.isfinite(best.cost) else cost < best.cost

    def search(known: Mapping[int, int], parts: Sequence[Factor]) -> None:
        """Look through all assignments in which the variables `known` have their values."""
        nonlocal best, unseen
        left = {v: size for v, size in domains.items() if v not in known}
        bound, suggested, variable = _relax(parts, left, table, spend)
        if not improves(bound):
            return
        values = {**suggested, **known}
        if improves(cost := _total(factors, values)):
            best = best._replace(values=values, cost=cost)
        if variable is None or not improves(bound):
            return
        likely = values[variable]
        for value in sorted(range(domains[variable]), key=lambda value: (value != likely, value)):
            if spent >= steps:
                unseen = min(unseen, bound)
                return
            search({**known, variable: value}, [_fixed(f, {variable: value}) for f in parts])

    # A variable of one value is decided. Tables have no axis for it, so a table of n elements has at most log2(n) axes.
    decided = {v: 0 for v, size in domains.items() if size == 1}
    search(decided, [_fixed(f, decided) for f in factors])
    return best._replace(bound=min(best.cost, unseen), steps=spent)


def _total(factors: Sequence[Factor], values: Mapping[int, int]) -> float:
    return sum(float(f.costs[tuple(values[v] for v in f.scope)]) for f in factors)


def _fixed(factor: Factor, values: Mapping[int, int]) -> Factor:
    """A factor where some variables have these values: a table over the others."""
    if values.keys().isdisjoint(factor.scope):
        return factor
    costs = factor.costs[tuple(values.get(v, slice(None)) for v in factor.scope)]
    return Factor(tuple(v for v in factor.scope if v not in values), np.asarray(costs))


def _relax(
    factors: Sequence[Factor], domains: Mapping[int, int], table: int, spend: Callable[[int], None]
) -> tuple[float, dict[int, int], int | None]:
    """Eliminate every variable, the one with the smallest table first, splitting tables that would be too large.

    Returns a bound, the values it suggests, and the variable to branch on (None if the bound is exact).
    """

    def eliminated(factors: Sequence[Factor], variable: int) -> Factor:
        """The least, over a variable's values, of a sum of factors."""
        scope = tuple(sorted(_scope(factors) - {variable}))
        aligned = [_aligned(f, (variable, *scope)) for f in factors]
        shape = np.broadcast_shapes(*(a.shape for a in aligned))[1:]
        values = domains[variable]
        spend(OVERHEAD + values * math.prod(shape))
        slab = max(1, SLAB // max(1, math.prod(shape)))
        best = np.full(shape, math.inf)
        for first in range(0, values, slab):
            total = functools.reduce(np.add, (costs[first : first + slab] for costs in aligned))
            np.minimum(best, total.min(axis=0), out=best)
        return Factor(scope, best)

    holding: dict[int, list[Factor]] = {v: [] for v in domains}
    for f in factors:
        for v in f.scope:
            holding[v].append(f)
    constant = sum(float(f.costs) for f in factors if not f.scope)
    sizes = {v: _size(held, domains) for v, held in holding.items()}
    order: list[tuple[int, list[Factor]]] = []
    tangled: Counter[int] = Counter()  # how many tables that are too large each variable is in
    while sizes:
        variable = min(sizes, key=lambda v: (sizes[v], v))
        size = sizes.pop(variable)
        held = holding.pop(variable)
        order.append((variable, held))
        if size > table:
            tangled.update(_scope(held))
        for part in _parts(held, domains, table):
            made = eliminated(part, variable)
            constant += 0.0 if made.scope else float(made.costs)
            for v in made.scope:
                holding[v].append(made)
        for v in _scope(held) - {variable}:
            holding[v] = [f for f in holding[v] if variable not in f.scope]
            sizes[v] = _size(holding[v], domains)
    branch = max(tangled, key=lambda v: (tangled[v], -domains[v], -v), default=None)
    values: dict[int, int] = {}  # the best by the factors that a variable was eliminated with, the last one first
    for variable, held in reversed(order):
        costs = (f.costs[tuple(slice(None) if v == variable else values[v] for v in f.scope)] for f in held)
        values[variable] = int(sum(costs, np.zeros(domains[variable])).argmin())
    return constant, values, branch


def _scope(factors: Sequence[Factor]) -> set[int]:
    """The variables of these factors."""
    return {v for f in factors for v in f.scope}


def _size(factors: Sequence[Factor], domains: Mapping[int, int]) -> int:
    """Elements of a table over all variables of these factors."""
    return math.prod(domains[v] for v in _scope(factors))


def _parts(factors: Sequence[Factor], domains: Mapping[int, int], table: int) -> list[list[Factor]]:
    """Groups of factors, so that the sum of each group fits a table; one group if the sum of all fits."""
    parts: list[list[Factor]] = []
    for f in sorted(factors, key=lambda f: (-f.costs.size, f.scope)):
        fitting = (part for part in parts if _size([*part, f], domains) <= table)
        room = next(fitting, [])
        if not room:
            parts.append(room)
        room.append(f)
    return parts


def _aligned(factor: Factor, scope: tuple[int, ...]) -> Costs:
    """A factor's costs with an axis for each variable of `scope`, of length 1 where it does not depend on it."""
    ordered = sorted(range(len(factor.scope)), key=lambda axis: scope.index(factor.scope[axis]))
    sizes = dict(zipped(factor.scope, factor.costs.shape))
    return factor.costs.transpose(ordered).reshape([sizes.get(v, 1) for v in scope])
