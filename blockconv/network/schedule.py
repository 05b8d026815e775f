"""From chosen candidates to ops over memory: reorders put in, views resolved, an arena packed, kernels bound.

A *value* is a tensor in one layout. Its memory is a block, or a part of one. Views, and layouts with the same bytes,
share their source's block. An input of a concatenation is in the output's block, if it is alone in its own. A block is
an input or output of the network, an array of constants, or a part of the arena. Bytes of the arena serve one block
after the other.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from dataclasses import field
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.checks import Shape
from blockconv.core.errors import ArgumentError, NetworkError, said_by
from blockconv.core.layout import Layout, row_major
from blockconv.core.python import zipped
from blockconv.core.record import frozen
from blockconv.core.types import Array
from blockconv.dispatch.selection import reorder_program
from blockconv.kernels.reorder.nibbles import unpacked_bytes
from blockconv.network import foreign, ops
from blockconv.network.graph import Network, Node
from blockconv.network.memory import Interval, packed, same_bytes
from blockconv.network.ops.rule import View
from blockconv.network.planning.binding import BoundNode, Workspace, bind_all
from blockconv.network.planning.candidates import Candidate, Reorder
from blockconv.network.planning.parameters import Parameters
from blockconv.network.planning.planned import Planned
from blockconv.runtime import Buffer, Launch, address_of
from blockconv.runtime.launcher import beyond

Value = tuple[str, Layout]


@frozen
class Action:
    """A step of a plan: run a node's kernel or a foreign part, or reorder or copy a value.

    kind: the node's op, "reorder" or "copy".
    cost: predicted seconds; NaN where it was compared with nothing, as at a size that was not planned.
    launches: over the buffers of the schedule.
    part: of foreign nodes that run together; `node` is the first of them, `writes` its output.
    """

    name: str
    kind: str
    kernel: str
    reads: tuple[Value, ...]
    writes: Value
    cost: float
    launches: tuple[Launch, ...] = field(repr=False)
    node: Node | None = field(default=None, repr=False)
    part: foreign.ForeignPart | None = field(default=None, repr=False)

    @property
    def layouts(self) -> tuple[Layout, Layout]:
        """The layouts of what it reads first and of what it writes; some foreign parts read nothing."""
        return (*self.reads, self.writes)[0][1], self.writes[1]

    def __getstate__(self) -> dict[str, Any]:
        """A copy has no launches, since these hold addresses: it tells what was done, and runs nothing."""
        return {**self.__dict__, "launches": (), "part": None}


class FailureReport(NamedTuple):
    """Where in the arena a node's kernels report that they failed, in bytes; they get inputs of these shapes."""

    node: Node
    inputs: tuple[Shape, ...]
    begin: int
    end: int

    def failure(self, arena: Array) -> ArgumentError | None:
        """The error that names the node, if its kernels failed."""
        words = arena[self.begin : self.end].view(np.int64).tolist()
        node = self.node
        return said_by(str(node), node.attributes.failure(self.inputs, words), NetworkError) if words[0] else None


@frozen
class Schedule:
    """Actions in order. Buffers of their ops: the network's inputs, its outputs, the arena.

    arena: bytes.
    live: bytes of the largest set of blocks in the arena that live at once.
    views: values that are made of others' bytes, without a kernel.
    held: constants that the ops point to.
    reports: of the nodes that may fail, in order and one after the other; zero before the ops run.
    """

    actions: tuple[Action, ...]
    arena: int
    live: int
    views: Mapping[Value, tuple[Value, ...]]
    held: tuple[Array, ...]
    reports: tuple[FailureReport, ...]


class _Block:
    """The memory of a value: bytes of its own, or a part of another block.

    address: an address, or a buffer of the schedule; None for the arena.
    parent: the block that it is a part of, from the byte `offset` on.
    """

    def __init__(
        self, nbytes: int, address: Buffer | int | None = None, parent: _Block | None = None, offset: int = 0
    ) -> None:
        self.nbytes, self.address, self.parent, self.offset = nbytes, address, parent, offset
        self.first, self.last = 1 << 60, -1

    def root(self) -> tuple[_Block, int]:
        """The outermost block, and where in it this one begins."""
        block, offset = self, 0
        while block.parent is not None:
            block, offset = block.parent, offset + block.offset
        return block, offset

    def adopts(self, other: _Block, offset: int) -> bool:
        """Take a block in, if it is its own."""
        if other.address is not None or other.parent is not None or other is self.root()[0]:
            return False
        other.parent, other.offset = self, offset
        return True

    def part(self, nbytes: int, offset: int) -> _Block:
        """Some of its bytes; the block itself if these are all."""
        return self if nbytes == self.nbytes else _Block(nbytes, None, self, offset)


class _Draft(NamedTuple):
    """An action whose launches have no addresses yet.

    operands: a block or constants for each buffer of its launches.
    """

    action: Action
    operands: tuple[_Block | Array | None, ...]


class _Scheduler:
    """costs(tensor, src, dst): the predicted seconds of a reorder."""

    def __init__(self, network: Network, held: Parameters, costs: Reorder, threads: int) -> None:
        self.network, self.held, self.costs, self.threads = network, held, costs, threads
        self.blocks: dict[Value, _Block] = {}
        self.made: dict[str, Layout] = {}  # the layout in which a tensor was produced
        self.drafts: list[_Draft] = []
        self.views: dict[Value, tuple[Value, ...]] = {}
        self.constants: list[Array] = []  # that values are
        self.beside: dict[tuple[str, int], _Block] = {}  # results beside a node's output, by its name
        self.failing, self.reports = list[FailureReport](), _Block(0)  # at offsets in this block

    def nbytes(self, value: Value) -> int:
        tensor = self.network.tensors[value[0]]
        return tensor.type.nbytes(value[1].size(tensor.shape))

    def allocate(self, value: Value, address: Buffer | None = None) -> _Block:
        """A block of its own for a value."""
        block = self.blocks[value] = _Block(self.nbytes(value), address)
        return block

    def need(self, value: Value) -> _Block:
        """The block of a value. A reorder makes the value if it does not exist yet."""
        if value in self.blocks:
            return self.blocks[value]
        name, layout = value
        if name in self.network.constants:
            array = self.held.constant(name, layout)
            self.constants.append(array)
            block = self.blocks[value] = _Block(array.nbytes, address_of(array))
            return block
        source = name, self.made[name]
        shape = self.network.shape(name)
        if same_bytes(shape, source[1], layout):
            block = self.blocks[value] = self.blocks[source]
            self.views[value] = (source,)
            return block
        type = self.network.tensors[name].type
        launches = reorder_program(shape, source[1], layout, 0 if type.is_packed else type.itemsize).launches
        read, made = self.blocks[source], self.allocate(value)
        cost = self.costs(name, source[1], layout)
        action = Action(name, "reorder", launches[0].kernel.name, (source,), value, cost, launches)
        # Packed elements pass through two more buffers, one element a byte.
        sizes = [unpacked_bytes(lay.size(shape)) for lay in (source[1], layout)] if type.is_packed else []
        self.drafts.append(_Draft(action, (read, made, *map(_Block, sizes))))
        return made

    def copy(self, value: Value, to: _Block, cost: float) -> None:
        """Copy a value's bytes as they are."""
        line, itemsize = Layout("a"), self.network.tensors[value[0]].type.itemsize  # 1 where two share a byte
        launches = reorder_program((self.nbytes(value) // itemsize,), line, line, itemsize).launches
        action = Action(value[0], "copy", launches[0].kernel.name, (value,), value, cost, launches)
        self.drafts.append(_Draft(action, (self.blocks[value], to)))

    # -- nodes

    def run(self, node: Node, candidate: Candidate, bound: BoundNode | None) -> None:
        """A node by its candidate, whose launches are `bound`."""
        reads = tuple(zipped(node.inputs, candidate.srcs))
        blocks = [self.need(value) for value in reads]
        value = node.output, candidate.dst
        self.made[node.output] = candidate.dst
        if isinstance(node.attributes, ops.FurtherResult):
            layout = self.made[node.src] if value[1].ndim == 4 else value[1]
            self.made[node.output], self.views[node.output, layout] = layout, reads
            self.blocks[node.output, layout] = self.beside[node.src, node.attributes.number]
            return
        if candidate.view is not None:
            self.view(node, candidate.view, reads, blocks, value)
            return
        assert candidate.row is not None
        assert bound is not None
        blocks = [*blocks, *self.results_beside(node, candidate.dst)[::-1], self.allocate(value)]
        operands = tuple(
            operand
            if operand is None or isinstance(operand, np.ndarray)
            else self.memory(node, operand)
            if isinstance(operand, Workspace)
            else blocks[operand]  # OUTPUT and what is beside it are counted from the end
            for operand in bound.operands
        )
        action = Action(node.name, node.op, candidate.row.name, reads, value, candidate.cost, bound.launches, node)
        self.drafts.append(_Draft(action, operands))

    def results_beside(self, node: Node, layout: Layout) -> list[_Block]:
        """New blocks for a node's further results. layout: the output's."""
        site, made = self.network.site(node), []
        for k, (shape, type) in enumerate(node.attributes.further(site)):
            count = layout.size(site.output.shape) if shape is None else math.prod(shape)
            made.append(_Block(type.nbytes(count)))
            self.beside[node.output, k] = made[-1]
        return made

    def memory(self, node: Node, needed: Workspace) -> _Block:
        """The workspace of a node's ops."""
        if not needed.reports:
            return _Block(needed.nbytes)
        begin, shapes = self.reports.nbytes, tuple(map(self.network.shape, node.inputs))
        self.reports.nbytes += needed.nbytes
        self.failing.append(FailureReport(node, shapes, begin, self.reports.nbytes))
        return _Block(needed.nbytes, None, self.reports, begin)

    def run_part(self, nodes: Sequence[Node], cost: float) -> None:
        """Foreign nodes as one part."""
        first = nodes[0]
        part = foreign.runner(first.attributes.library).foreign_part(self.network, nodes, self.threads)  # type: ignore[attr-defined]
        reads, writes = (
            tuple((name, row_major(len(self.network.shape(name)))) for name in names)
            for names in (part.inputs, part.outputs)
        )
        operands = *map(self.need, reads), *map(self.allocate, writes)
        self.made |= dict(writes)
        self.views |= dict.fromkeys(writes[1:], writes[:1])  # one call makes them all
        made = Action(first.name, first.op, part.session.library, reads, writes[0], cost, (), first, part)
        self.drafts.append(_Draft(made, operands))

    def view(self, node: Node, view: View, reads: tuple[Value, ...], blocks: list[_Block], value: Value) -> None:
        """A node whose output's bytes exist already, or are written straight into the output."""
        itemsize = self.network.tensors[node.output].type.itemsize  # parts of what is packed are no views
        self.views[value] = reads
        if view.starts is None:
            self.blocks[value] = blocks[0].part(self.nbytes(value), view.begin * itemsize)
            return
        whole = self.allocate(value)
        for read, block, start in zipped(reads, blocks, view.starts):
            at = start * itemsize
            if not whole.adopts(block, at):
                self.copy(read, _Block(block.nbytes, None, whole, at), self.costs(read[0], read[1], read[1]))

    def deliver(self, name: str, layout: Layout, address: Buffer) -> None:
        """An output of the network: written where it is wanted, or copied there."""
        block = self.need((name, layout))
        if block.address is None and block.parent is None:
            block.address = address
        else:
            self.copy((name, layout), _Block(block.nbytes, address), self.costs(name, layout, layout))

    # -- memory

    def finish(self, buffers: int) -> Schedule:
        """Place all blocks, and bind the launches to them. The arena is buffer number `buffers`."""
        roots: dict[int, _Block] = {}
        for t, draft in enumerate(self.drafts):
            for operand in draft.operands:
                if isinstance(operand, _Block):
                    root, _ = operand.root()
                    root.first, root.last = min(root.first, t), max(root.last, t)
                    if root.address is None:
                        roots[id(root)] = root
        self.reports.first, self.reports.last = 0, len(self.drafts) - 1  # it keeps its bytes through the whole run
        blocks = list(roots.values())
        intervals = [Interval(b.nbytes, b.first, b.last) for b in blocks]
        offsets, total = packed(intervals)
        for block, offset in zipped(blocks, offsets):
            block.address = Buffer(buffers, offset)
        starts = [0] * (len(self.drafts) + 1)  # bytes more that live from a draft on
        for interval in intervals:
            starts[interval.first] += interval.nbytes
            starts[interval.last + 1] -= interval.nbytes
        live = max(itertools.accumulate(starts))
        held = [*self.constants, *(x for draft in self.drafts for x in draft.operands if isinstance(x, np.ndarray))]
        actions = tuple(map(_bound_action, self.drafts))
        at = self.reports.address.offset if isinstance(self.reports.address, Buffer) else 0
        reports = tuple(one._replace(begin=at + one.begin, end=at + one.end) for one in self.failing)
        return Schedule(actions, total, live, self.views, tuple(held), reports)


def _bound_action(draft: _Draft) -> Action:
    addresses = [_address(operand) for operand in draft.operands]
    launches = tuple(launch.placed(addresses) for launch in draft.action.launches)
    part = draft.action.part
    made = object.__new__(Action)
    made.__dict__.update(draft.action.__dict__, launches=launches, part=part and part._replace(args=tuple(addresses)))
    return made


def _address(operand: _Block | Array | None) -> Buffer | int:
    if operand is None:
        return 0
    if isinstance(operand, np.ndarray):
        return address_of(operand)
    root, offset = operand.root()
    assert root.address is not None
    return beyond(root.address, offset)


def schedule(planned: Planned, wanted: Sequence[Layout], held: Parameters, threads: int) -> Schedule:
    """The schedule of a network. wanted: the layouts of its outputs."""
    network, problem = planned.network, planned.problem
    s = _Scheduler(network, held, problem.reorder if planned.is_priced else lambda *_: math.nan, threads)
    for k, tensor in enumerate(network.inputs):
        layout = s.made[tensor.name] = problem.given[tensor.name]
        s.allocate((tensor.name, layout), Buffer(k))
    every = zipped(network.nodes, planned.chosen, bind_all(network, planned.chosen, held, threads))
    for is_foreign, run in itertools.groupby(every, lambda one: isinstance(one[0].attributes, ops.Foreign)):
        if is_foreign:
            nodes, candidates, _ = zipped(*run)
            s.run_part(nodes, sum(candidate.cost for candidate in candidates))
            continue
        for node, candidate, its_ops in run:
            s.run(node, candidate, its_ops)
    first = len(network.inputs)
    for k, (name, layout) in enumerate(zipped(network.outputs, wanted)):
        if network.tensors[name].elements:
            s.deliver(name, layout, Buffer(first + k))
    return s.finish(first + len(network.outputs))
