"""From chosen candidates to ops over memory: reorders put in, views resolved, an arena packed, kernels bound.

A *value* is a tensor in one layout. It lies in a block of memory, or in a part of one: views, and layouts that have
the same bytes, share their source's; an input of a concatenation lies in the output's block where it is alone in
its own. A block is an input or output of the network, an array of constants, or a part of the arena, whose bytes
serve one block after the other.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.array import reorder_program
from blockconv.layout import Layout
from blockconv.network import ops
from blockconv.network.candidates import OUTPUT, Bound, Candidate, Parameters, bind, pieces
from blockconv.network.graph import Network, Node
from blockconv.network.memory import Interval, packed, part, same_bytes
from blockconv.runtime import OWN_TABLE, Buffer, Op, address_of

__all__ = ["Action", "Schedule", "schedule"]

Array = npt.NDArray[Any]
Value = tuple[str, Layout]


@dataclass(frozen=True)
class Action:
    """What a plan does: run a node's kernel, or reorder or copy a value.

    kind: the node's op, "reorder" or "copy". cost: predicted seconds. ops: over the buffers of the schedule.
    """

    name: str
    kind: str
    kernel: str
    reads: tuple[Value, ...]
    writes: Value
    cost: float
    ops: tuple[Op, ...] = field(repr=False)
    node: Node | None = field(default=None, repr=False)


@dataclass(frozen=True)
class Schedule:
    """Actions in order. Buffers of their ops: the network's inputs, its outputs, the arena.

    arena: bytes. live: bytes of the largest set of blocks in the arena that live at once. views: values that are
    made of others' bytes, without a kernel. held: constants that the ops point to.
    """

    actions: tuple[Action, ...]
    arena: int
    live: int
    views: Mapping[Value, tuple[Value, ...]]
    held: tuple[Array, ...]


class _Block:
    """Bytes. place: a buffer of the schedule, or an address; None for the arena. parent: the block that it lies in."""

    def __init__(self, nbytes: int, place: Buffer | int | None = None) -> None:
        self.nbytes, self.place = nbytes, place
        self.parent: _Block | None = None
        self.offset = 0  # in the parent, or in the arena
        self.first, self.last = 1 << 60, -1

    def root(self) -> tuple[_Block, int]:
        """The outermost block, and where in it this one begins."""
        block, offset = self, 0
        while block.parent is not None:
            block, offset = block.parent, offset + block.offset
        return block, offset

    def adopts(self, other: _Block, offset: int) -> bool:
        """Take a block in, if it is its own."""
        if other.place is not None or other.parent is not None or other is self.root()[0]:
            return False
        other.parent, other.offset = self, offset
        return True


@dataclass(frozen=True)
class _Spot:
    block: _Block
    offset: int = 0  # bytes

    def whole(self, nbytes: int) -> bool:
        return self.offset == 0 and self.block.nbytes == nbytes


class _Draft(NamedTuple):
    """An action whose ops are not bound to places yet. operands: a spot or constants for each buffer of its ops."""

    action: Action
    operands: tuple[_Spot | Array, ...]


class _Scheduler:
    def __init__(self, network: Network, held: Parameters, costs: Any, threads: int) -> None:
        self.network, self.held, self.costs, self.threads = network, held, costs, threads
        self.spots: dict[Value, _Spot] = {}
        self.made: dict[str, Layout] = {}  # the layout in which a tensor was produced
        self.drafts: list[_Draft] = []
        self.views: dict[Value, tuple[Value, ...]] = {}

    def nbytes(self, value: Value) -> int:
        tensor = self.network.tensors[value[0]]
        return value[1].size(tensor.shape) * tensor.dtype.itemsize

    def fresh(self, value: Value, place: Buffer | None = None) -> _Spot:
        spot = self.spots[value] = _Spot(_Block(self.nbytes(value), place))
        return spot

    def given(self, name: str, layout: Layout, place: Buffer) -> None:
        """An input of the network."""
        self.made[name] = layout
        self.fresh((name, layout), place)

    def need(self, value: Value) -> _Spot:
        """Where a value lies; made by a reorder if it is not there yet."""
        if value in self.spots:
            return self.spots[value]
        name, layout = value
        if name in self.network.constants:
            array = self.held.constant(name, layout)
            spot = self.spots[value] = _Spot(_Block(array.nbytes, None))
            spot.block.place = address_of(array)
            return spot
        source = name, self.made[name]
        shape = self.network.shape(name)
        if same_bytes(shape, source[1], layout):
            spot = self.spots[value] = self.spots[source]
            self.views[value] = (source,)
            return spot
        itemsize = self.network.tensors[name].dtype.itemsize
        ops_ = reorder_program(shape, source[1], layout, itemsize).ops
        spots = self.spots[source], self.fresh(value)
        cost = self.costs(name, source[1], layout)
        action = Action(name, "reorder", ops_[0].kernel.name, (source,), value, cost, ops_)
        self.drafts.append(_Draft(action, spots))
        return spots[1]

    def copy(self, value: Value, to: _Spot, cost: float) -> None:
        """Copy a value's bytes as they are."""
        itemsize = self.network.tensors[value[0]].dtype.itemsize
        line = Layout("a")
        ops_ = reorder_program((self.nbytes(value) // itemsize,), line, line, itemsize).ops
        action = Action(value[0], "copy", ops_[0].kernel.name, (value,), value, cost, ops_)
        self.drafts.append(_Draft(action, (self.spots[value], to)))

    # -- nodes

    def run(self, node: Node, candidate: Candidate) -> None:
        """A node by its candidate."""
        reads = tuple(zip(node.inputs, candidate.srcs, strict=True))
        spots = [self.need(value) for value in reads]
        value = node.output, candidate.dst
        self.made[node.output] = candidate.dst
        if candidate.row is None:
            self.view(node, reads, spots, value)
            return
        bound: Bound = bind(self.network, node, candidate, self.held, self.threads)
        target = self.fresh(value)
        operands = tuple(
            operand if isinstance(operand, np.ndarray) else target if operand == OUTPUT else spots[operand]
            for operand in bound.operands
        )
        action = Action(node.name, node.op, candidate.row.name, reads, value, candidate.cost, bound.ops, node)
        self.drafts.append(_Draft(action, operands))

    def view(self, node: Node, reads: tuple[Value, ...], spots: list[_Spot], value: Value) -> None:
        """A node whose output is bytes that are there, or are written in their place."""
        itemsize = self.network.tensors[node.output].dtype.itemsize
        self.views[value] = reads
        if isinstance(node.attributes, ops.Concat):
            starts = pieces(self.network, node, value[1])
            assert starts is not None
            whole = self.fresh(value)
            for read, spot, start in zip(reads, spots, starts, strict=True):
                at = start * itemsize
                if not (spot.whole(self.nbytes(read)) and whole.block.adopts(spot.block, at)):
                    self.copy(read, _Spot(whole.block, at), self.costs(read[0], read[1], read[1]))
        elif isinstance(node.attributes, ops.Slice):
            a, shape = node.attributes, self.network.shape(node.inputs[0])
            begin = part(reads[0][1], shape, a.axis, a.begin, a.size)
            assert begin is not None
            self.spots[value] = _Spot(spots[0].block, spots[0].offset + begin * itemsize)
        else:
            self.spots[value] = spots[0]

    def deliver(self, name: str, layout: Layout, place: Buffer) -> None:
        """An output of the network: made in its place, or copied there."""
        spot = self.need((name, layout))
        block = spot.block
        if spot.whole(self.nbytes((name, layout))) and block.place is None and block.parent is None:
            block.place = place
        else:
            self.copy((name, layout), _Spot(_Block(block.nbytes, place)), self.costs(name, layout, layout))

    # -- memory

    def finish(self, buffers: int) -> Schedule:
        """Place all blocks, and bind the ops to them. The arena is buffer number `buffers`."""
        roots: dict[int, _Block] = {}
        for t, draft in enumerate(self.drafts):
            for operand in draft.operands:
                if isinstance(operand, _Spot):
                    root, _ = operand.block.root()
                    root.first, root.last = min(root.first, t), max(root.last, t)
                    if root.place is None:
                        roots[id(root)] = root
        blocks = list(roots.values())
        intervals = [Interval(b.nbytes, b.first, b.last) for b in blocks]
        offsets, total = packed(intervals)
        for block, offset in zip(blocks, offsets, strict=True):
            block.place = Buffer(buffers, offset)
        live = max(
            (sum(i.nbytes for i in intervals if i.first <= t <= i.last) for t in range(len(self.drafts))), default=0
        )
        held = [x for draft in self.drafts for x in draft.operands if isinstance(x, np.ndarray)]
        return Schedule(tuple(map(_placed, self.drafts)), total, live, self.views, tuple(held))


def _placed(draft: _Draft) -> Action:
    places = [_place(operand) for operand in draft.operands]
    ops_ = tuple(replace(op, args=_located(op.args, places)) for op in draft.action.ops)
    return replace(draft.action, ops=ops_)


def _place(operand: _Spot | Array) -> Buffer | int:
    if isinstance(operand, np.ndarray):
        return address_of(operand)
    root, offset = operand.block.root()
    return _moved(root.place, offset + operand.offset)


def _moved(place: Buffer | int | None, by: int) -> Buffer | int:
    assert place is not None
    return Buffer(place.index, place.offset + by) if isinstance(place, Buffer) else place + by


def _located(args: Sequence[int | Buffer], places: Sequence[Buffer | int]) -> tuple[int | Buffer, ...]:
    return tuple(_moved(places[a.index], a.offset) if isinstance(a, Buffer) and a is not OWN_TABLE else a for a in args)


def schedule(
    network: Network,
    chosen: Sequence[Candidate],
    given: Mapping[str, Layout],
    wanted: Sequence[Layout],
    held: Parameters,
    costs: Any,
    threads: int,
) -> Schedule:
    """The schedule of a network. chosen: a candidate for each node. given, wanted: layouts of inputs and outputs.

    costs(tensor, src, dst): the predicted seconds of a reorder.
    """
    s = _Scheduler(network, held, costs, threads)
    for k, tensor in enumerate(network.inputs):
        s.given(tensor.name, given[tensor.name], Buffer(k))
    for node, candidate in zip(network.nodes, chosen, strict=True):
        s.run(node, candidate)
    first = len(network.inputs)
    for k, (name, layout) in enumerate(zip(network.outputs, wanted, strict=True)):
        s.deliver(name, layout, Buffer(first + k))
    return s.finish(first + len(network.outputs))
