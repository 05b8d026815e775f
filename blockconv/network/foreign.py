"""Nodes that another library runs. A front end registers the module that runs its nodes.

Nodes of the op `Foreign` that run one after the other are one *part*: one model, and one session of the library. A
session reads and writes memory that the plan has, in row-major order, so nothing is copied at a part's borders.

A runner is a module, which is imported when a network needs it. It has

- `foreign_part(network, nodes, threads)`: the `ForeignPart` of some foreign nodes, ready to run. Raises
  UnsupportedError, which names the ops, where nothing runs it.
- `computed(node, inputs)`: the output of a `Foreign` by itself.
"""

import importlib
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple, Protocol

from blockconv.core.checks import Names

RUNNERS: dict[str, str] = {}  # modules, by the libraries of nodes
LIBRARIES = {"onnxruntime": "ONNX Runtime", "numpy": "NumPy", "pytorch": "PyTorch"}


def runner(library: str) -> Any:
    """The module that runs nodes of this library."""
    return importlib.import_module(RUNNERS[library])


class Session(Protocol):
    """A part, ready to run on memory. Several threads may run it at once."""

    @property
    def library(self) -> str:
        """The library that runs it, as tables of calls name it: a key of LIBRARIES."""

    def run(self, addresses: Sequence[int]) -> None:
        """Compute the outputs. addresses: of the inputs, then of the outputs, each row-major.

        Raises NetworkError, which names the node, where that fails.
        """


class ForeignPart(NamedTuple):
    """Nodes that run together.

    inputs, outputs: values of the network, in the order of the session's.
    kinds: the ops of the nodes.
    args: the addresses of inputs and outputs, or their buffers.
    """

    session: Session
    inputs: Names
    outputs: Names
    kinds: Names
    args: tuple[Any, ...] = ()


def read_outside(network: Any, nodes: Sequence[Any]) -> list[str]:
    """The values of some nodes that the network gives, or that other nodes read."""
    mine, made = {node.name for node in nodes}, dict.fromkeys(node.output for node in nodes)
    readers = network.readers
    return [name for name in made if name in network.outputs or any(one.name not in mine for one in readers[name])]


def counted(kinds: Iterable[str]) -> str:
    """Ops with how many there are of each."""
    return ", ".join(f"{kind} ({count})" for kind, count in sorted(Counter(kinds).items()))
