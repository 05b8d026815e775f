"""How a node may run: its candidates from the kernel table, with layouts and costs.

The op says what it requires of the kernel table (`network.ops.rule`). The table says the rest.
"""

import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

from blockconv.core.errors import UnsupportedError
from blockconv.core.layout import Layout, row_major
from blockconv.core.python import bounded_cache, zipped
from blockconv.core.record import frozen
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.dispatch.quantizing import known_weights
from blockconv.kernels import Row
from blockconv.kernels.common.request import Reason, Request
from blockconv.kernels.table import Primitive
from blockconv.machine.machine import Machine
from blockconv.network.graph import Network, Node
from blockconv.network.ops import Concat, Foreign
from blockconv.network.ops.rule import Layouts, Site, View

Reorder = Callable[[str, Layout, Layout], float]
FOREIGN_SECONDS, FOREIGN_RATE = 3e-6, 5e9  # a foreign node takes so long, and moves so many bytes a second


class Candidate(NamedTuple):
    """A kernel for a node, or None for a view, and its layouts.

    request: the request that the row takes; None for a view.
    srcs, dst: the layouts of the node's inputs and output.
    cost: seconds; NaN for a kernel that was compared with no other.
    wei_bytes: of its packed weights.
    """

    row: Row | None
    request: Any
    srcs: Layouts
    dst: Layout
    cost: float
    view: View | None = None
    wei_bytes: int = 0

    @property
    def choice(self) -> tuple[str | None, Layouts, Layout]:
        """Its kernel's name, None for a view, and its layouts. No other candidate of the node has the same."""
        return self.row.name if self.row else None, self.srcs, self.dst

    def prepare(self, threads: int, **options: Any) -> Primitive:
        """The kernel on so many threads."""
        assert self.row is not None
        return self.row.prepared(self.request.on_threads(threads), **options)


@frozen
class Pricing:
    """The cost of a candidate.

    layouts: the layouts to consider.
    price(candidate): the seconds of one whose cost is what its row predicts for one thread.
    reorder(tensor, src, dst): the seconds of a reorder, or of a copy.
    machine: the one that the plan is for.
    accuracy: the largest error that a kernel may have; see `selection.ACCURACIES`.
    every: keep each kernel, not the cheapest for its layouts alone.
    references: take reference kernels too where there are others.
    dsts: the layouts that kernels write, if not all of `layouts`.
    predicts: whether `price` is no less than what rows predict: a user gave no costs.
    """

    layouts: Layouts
    price: Callable[[Candidate], float]
    reorder: Reorder
    machine: Machine
    accuracy: float | None = None
    every: bool = False
    references: bool = False
    dsts: Layouts = ()
    predicts: bool = False


def element_types(node: Node, site: Site, machine: Machine) -> Types:
    """The element types of a node's arrays; narrow weights only where the machine multiplies them faster."""
    types = node.attributes.types_at(site)
    if not (types.wei.narrow or types.wei.light):
        return types
    return known_weights(types.knowing(narrow=False), types.wei.narrow, types.wei.light, machine.isa)


def candidates(network: Network, node: Node, pricing: Pricing) -> list[Candidate]:
    """Every way to run a node, by the cheapest kernel for its layouts; the reference only if there is no other."""
    site = network.site(node)
    found = [*views(network, node, site, pricing.layouts, pricing.reorder)]
    if not isinstance(node.attributes, Foreign):
        found += _with_kernels(node, site, pricing)
    if not found:
        raise UnsupportedError(f"{node}: no kernel takes {node.attributes.problem_at(site)}")
    return cheapest(found, pricing.every)


def cheapest(found: Iterable[Candidate], every: bool) -> list[Candidate]:
    """The cheapest for each pair of layouts; with `every`, of each kernel."""
    best: dict[Any, Candidate] = {}
    for one in found:
        key = one.srcs, one.dst, every and one.row and one.row.name
        if key not in best or one.cost < best[key].cost:
            best[key] = one
    return list(best.values())


def views(
    network: Network, node: Node, site: Site, layouts: Layouts, reorder: Reorder | None = None
) -> Iterator[Candidate]:
    """The candidates without a kernel, with these layouts. reorder: as in `Pricing`, or None: copies cost nothing."""
    if isinstance(node.attributes, Foreign):
        yield _foreign(site)
        return
    for view in node.attributes.views(site, layouts if site.src.rank == 4 else (row_major(site.src.rank),)):
        cost = 0.0 if view.starts is None or reorder is None else _copies(network, node, view, reorder)
        yield Candidate(None, None, view.srcs, view.dst, cost, view)


def _foreign(site: Site) -> Candidate:
    """A foreign node's candidate: row-major. Its cost chooses nothing: it is a guess from the memory it moves."""
    tensors = *site.inputs, site.output
    *srcs, dst = (row_major(tensor.rank) for tensor in tensors)
    nbytes = sum(tensor.type.nbytes(tensor.elements) for tensor in tensors)
    return Candidate(None, None, tuple(srcs), dst, FOREIGN_SECONDS + nbytes / FOREIGN_RATE)


def _copies(network: Network, node: Node, view: View, reorder: Reorder) -> float:
    """Seconds to copy inputs into the output that contains them. An input that is written there costs nothing."""

    def written_there(k: int, name: str) -> bool:
        first = next(reader for reader in network.readers[name] if isinstance(reader.attributes, Concat))
        return name in network.producers and first is node and name not in node.inputs[:k]

    return sum(
        reorder(name, layout, layout)
        for k, (name, layout) in enumerate(zipped(node.inputs, view.srcs))
        if not written_there(k, name)
    )


def _with_kernels(node: Node, site: Site, pricing: Pricing) -> Iterator[Candidate]:
    """A candidate for each kernel and pair of layouts that it takes; other than four dimensions are row-major alone."""
    a = node.attributes
    src_rank, dst_rank = site.inputs[a.leading(site)].rank, site.output.rank
    types = element_types(node, site, pricing.machine)
    srcs = pricing.layouts if src_rank == 4 else (row_major(src_rank),)
    dsts = pricing.dsts or pricing.layouts if dst_rank == 4 else (row_major(dst_rank),)
    for op, problem, *layouts in a.requests(site, srcs, dsts):
        for one in accepted(pricing.machine, op, problem, types, *layouts, pricing.accuracy, pricing.references):
            # A problem may have other dimensions than the values, such as axes of size 1.
            src = one.srcs[0] if one.srcs[0].ndim == src_rank else row_major(src_rank)
            dst = one.dst if one.dst.ndim == dst_rank else row_major(dst_rank)
            found = a.src_layouts(site, src, dst)
            if found is not None:
                packed = selection.packing_seconds(one.prepare(1), one.request) if a.packs else 0.0
                yield one._replace(srcs=found, dst=a.dst_layout(site, dst), cost=pricing.price(one) + packed)


@bounded_cache
def accepted(
    machine: Machine,
    op: str,
    problem: Any,
    types: Types,
    srcs: Layouts,
    dsts: Layouts,
    accuracy: float | None,
    references: bool = False,
) -> tuple[Candidate, ...]:
    """Each row of the table that takes the problem, by its kernel's layouts; reference rows only if no other takes any.

    Kept with its costs: a problem occurs often in a network, and each plan requests all problems.
    """
    asked = [Request(problem, src, dst, types, 1, machine) for src in srcs for dst in dsts]
    rows = [row for one in asked[:1] for row in selection.rows_for(op, types) if row.least(one) < math.inf]

    def taken(some: Iterable[Row]) -> list[tuple[Row, Request, Primitive]]:
        decided = ((row, request, selection.decide(row, request, accuracy)) for row in some for request in asked)
        return [(row, request, one) for row, request, one in decided if not isinstance(one, Reason)]

    found = [] if references else taken(row for row in rows if not row.reference)
    return tuple(predicted(*one) for one in found or taken(rows))


def predicted(row: Row, request: Request, primitive: Primitive) -> Candidate:
    """A row that takes a request, with its predicted time and the bytes of weights that it reads."""
    weights = primitive.weights
    wei_bytes = 0 if weights is None else weights.read_bytes(request.problem, request.types.wei.itemsize)
    return Candidate(row, request, (request.src,), request.dst, primitive.seconds, None, wei_bytes)


# ---------------------------------------------------------------- chosen candidates


def on_threads(candidate: Candidate, priced: int, threads: int) -> float:
    """A candidate's cost on `threads`, from its cost on `priced` threads, in proportion to its kernel's predictions."""
    is_priced = not math.isnan(candidate.cost)
    if candidate.row is None or (is_priced and priced == threads):
        return candidate.cost
    after = candidate.prepare(threads).seconds
    if not is_priced:
        return after
    before = candidate.prepare(priced).seconds
    return candidate.cost * after / before if before else candidate.cost
