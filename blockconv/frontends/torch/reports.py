"""A report of each graph that torch.compile gave to the back end."""

from __future__ import annotations

import weakref
from dataclasses import dataclass, field
from typing import Any

from blockconv.core.errors import ignoring
from blockconv.network.plan import Plan


@dataclass(eq=False)
class Compiled:
    """One graph that torch.compile gave to the back end, and its plans.

    name: as TORCH_LOGS calls it.
    kind: "inference", "forward" or "backward".
    nodes, taken: the number of its ops, and of the ops that run on blockconv.
    plans: the number of plans.
    refused: a text for each op that runs in PyTorch, and each reason.
    failed: parts that have no plan, and the reasons.
    seconds: the time inside blockconv, for reading, planning, compiling kernels and packing.
    packed: how often weights were packed.
    """

    name: str
    kind: str
    nodes: int = 0
    taken: int = 0
    plans: int = 0
    refused: list[str] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    seconds: float = 0.0
    packed: int = 0
    parts: list[Any] = field(default_factory=list, repr=False)
    owned: list[weakref.ref[Any]] = field(default_factory=list, repr=False)

    def is_of(self, memories: set[int]) -> bool:
        """Whether it ran with one of these parameters, given by the identities of their memory."""
        weights = (memory_of(weight) for part in self.parts for weight in part.weights)
        return any(id(memory) in memories for memory in (*weights, *(known() for known in self.owned)))

    @property
    def made(self) -> list[Plan]:
        """The plans that have run: `Plan.explain` and `Plan.report` show their layouts, kernels and times."""
        return [plan for part in self.parts for plan in part.plans]

    def forget_weights(self) -> None:
        """Make each part pack its weights again at the next call."""
        for part in self.parts:
            part.forget_weights()

    def __str__(self) -> str:
        share = f"{self.taken} of {self.nodes} ops in {self.plans} plans"
        lines = [f"{self.name}, {self.kind}: {share}, {self.seconds:.2f} s in blockconv"]
        lines += [f"  in PyTorch: {line}" for line in self.refused]
        return "\n".join([*lines, *(f"  no plan: {line}" for line in self.failed)])


_compiled: list[weakref.ref[Compiled]] = []


def compiled_graphs() -> list[Compiled]:
    """The graphs that are still in use, the oldest first."""
    return [graph for known in _compiled if (graph := known()) is not None]


def memory_of(tensor: Any) -> Any:
    """The memory of a tensor, an object that lives as long. PyTorch swaps no tensor that has a weak reference."""
    with ignoring(RuntimeError):  # a sparse one has several
        return tensor.untyped_storage()
    return tensor


def recorded(name: str, kind: str, owned: list[weakref.ref[Any]]) -> Compiled:
    """A record of a new graph. owned: the memory of its step's parameters, for `is_of`."""
    made = Compiled(name, kind, owned=owned)
    _compiled[:] = [known for known in _compiled if known() is not None]
    _compiled.append(weakref.ref(made))
    return made
