"""A plan for input sizes that were not planned: the choices of an anchor, a planned size, bound again.

Layouts and kernels are the anchor's, node by node; no layouts are searched. Kernels are those of any size
(`Request.anchor`), so that few are compiled for all sizes. The choice depends on the sizes and the anchor alone.
"""

import functools
import math

from blockconv.core.python import bounded_cache, zipped
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels import Row
from blockconv.kernels.common.request import Reason, Request
from blockconv.network.graph import Network, Node
from blockconv.network.planning.candidates import Candidate, Pricing, element_types, predicted, views
from blockconv.network.planning.planned import Options, Planned, ends, prepared
from blockconv.network.planning.planner import LayoutProblem, Solution

Chosen = tuple[Node, Candidate]
FASTER = 1.15  # how many times as fast another kernel has to be: it has weights of its own, which are kept too


def resized(network: Network, options: Options, anchor: Planned) -> Planned | None:
    """The plan for the network's sizes by the choices of the anchor; None if these do not do."""
    before = anchor.network.tensors
    if any(tensor.rank != before[tensor.name].rank for tensor in network.inputs):
        return None  # layouts are of a number of dimensions
    network, pricing = prepared(network, options, every=False)
    chosen = {node.name: (node, one) for node, one in zipped(anchor.network.nodes, anchor.chosen)}

    def candidate(node: Node) -> Candidate | None:
        """The anchor's view or kernel for its layouts; another kernel for these if it does not take the problem."""
        before, like = chosen.get(node.name, (None, None))
        if before is None or like is None or (before.op, len(before.inputs)) != (node.op, len(node.inputs)):
            return None
        ranks = [len(network.shape(name)) for name in (*node.inputs, node.output)]
        if before is not node and ranks != [layout.ndim for layout in (*like.srcs, like.dst)]:
            return None  # another value has this name, because rules look at sizes
        site = network.site(node)
        if like.row is None:
            for view in views(network, node, site, (like.dst,)):
                if (view.srcs, view.dst) == (like.srcs, like.dst):
                    return view
        a, src, dst = node.attributes, like.srcs[node.attributes.leading(site)], like.dst
        srcs, types = a.src_layouts(site, src, dst), element_types(node, site, pricing.machine)
        if srcs is None:
            return None
        known = like.request and like.request.problem
        for op, problem, (told, *_), (stored, *_) in a.requests(site, (src,), (dst,)):
            same = known if type(known) is type(problem) else problem
            request = Request(problem, told, stored, types, 1, pricing.machine, same)
            if costs := _costs(op, request, like.row, pricing):
                row = min(costs, key=lambda row: costs[row] * (1.0 if row is like.row else FASTER))
                return Candidate(row, request, srcs, dst, costs[row])
        return None

    found = []
    for node in network.nodes:
        one = candidate(node)
        if one is None:
            return None
        found.append((one,))
    solution = Solution((0,) * len(found), math.nan, -math.inf, ())
    return Planned(LayoutProblem((), *ends(network, options), pricing.reorder, network), tuple(found), solution)


def _costs(op: str, request: Request, like: Row | None, pricing: Pricing) -> dict[Row, float]:
    """The costs of the rows that take a request: the anchor's row, and direct ones if that is not direct.

    Small images do not fill Winograd's tiles. If none of these rows takes it, others may, and last the references. A
    row is left out if its bound says that it cannot replace the anchor's. The only row is not priced: it costs NaN.
    """

    def price(row: Row) -> float | None:
        found = selection.decide(row, request, pricing.accuracy)
        return None if isinstance(found, Reason) else pricing.price(predicted(row, request, found))

    first, usual, every = _rows(op, request.types, like)
    if like and first == (like,) and not isinstance(selection.decide(like, request, pricing.accuracy), Reason):
        return {like: math.nan}
    own = price(like) if like is not None and like in first and pricing.predicts else None
    most = math.inf if own is None else own
    least = functools.cache(lambda bound: bound(request))  # rows share bounds
    for rows in (first, usual, every):
        asked = (row for row in rows if row is not like and FASTER * least(row.least) < most)
        found = {row: price(row) for row in asked}
        if like in rows:
            found[like] = price(like) if own is None else own
        costs = {row: seconds for row, seconds in found.items() if seconds is not None}
        if costs:
            return costs
    return {}


@bounded_cache
def _rows(op: str, types: Types, like: Row | None) -> tuple[tuple[Row, ...], tuple[Row, ...], tuple[Row, ...]]:
    """The rows that are asked first; all but references; all, of those for these types."""
    every = tuple(selection.rows_for(op, types))
    usual = tuple(row for row in every if not row.reference)
    others = "" if like is None or like.algorithm == "direct" else "direct"  # the algorithm of rows beside the anchor's
    return tuple(row for row in usual if row is like or row.algorithm == others), usual, every
