"""Nodes that another library runs. A front end registers the module that runs its nodes.

Nodes of the op `Foreign` that run one after the other are one *part*: one model, and one session of the library. A
session reads and writes memory that the plan has, in row-major order, so nothing is copied at a part's borders.

A runner is a module, which is imported when a network needs it. It has

- `joined(network, nodes)`: the `ForeignPart` of some foreign nodes.
- `Session(model, threads)`: a part, ready to run. Raises UnsupportedError, which names the ops, where nothing runs it.
- `computed(node, inputs)`: the output of a `Foreign` by itself.
"""

import importlib
import threading
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

from blockconv.core.checks import Shape
from blockconv.core.types import Array

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

    inputs, outputs: values of the network, in the order of the model's.
    kinds: the ops of the nodes.
    """

    model: bytes
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    kinds: tuple[str, ...]


def joined(network: Any, nodes: Sequence[Any], threads: int) -> tuple[ForeignPart, Session]:
    """The part of some foreign nodes of a network, and its session."""
    found = runner(nodes[0].attributes.library)
    part: ForeignPart = found.joined(network, nodes)
    return part, found.Session(part.model, threads)


def counted(kinds: Iterable[str]) -> str:
    """Ops with how many there are of each."""
    return ", ".join(f"{kind} ({count})" for kind, count in sorted(Counter(kinds).items()))


# ---------------------------------------------------------------- after shapes that data decide

# A node such as NonMaxSuppression or NonZero ends a network. It and all that depends on it are the network's *rest*: an
# ONNX model that reads outputs of the network. It is planned when the shapes are known.


Shapes = tuple[tuple[str, Shape], ...]
KEPT = 8  # plans of what follows, for as many shapes


@dataclass(frozen=True)
class Rest:
    """The nodes of an ONNX model that depend on shapes which data decide.

    model: all of them, in bytes, without weights. Its inputs are outputs of the network.
    constants: arrays that it reads.
    outputs: the outputs of network and rest together, in order.
    kinds: the ops of its nodes.
    odd: inputs that are no arrays of numbers. A call gives them by name, or after all others.
    head: the nodes whose shapes depend on data, in bytes, if `read` reads what follows them.
    follows: the inputs of what follows.
    read: the function that reads what follows the head as a network, for the shapes of its inputs.
    """

    model: bytes = field(repr=False)
    constants: Mapping[str, Array] = field(repr=False)
    outputs: tuple[str, ...]
    kinds: tuple[str, ...]
    odd: tuple[str, ...] = ()
    head: bytes | None = field(default=None, repr=False)
    follows: tuple[str, ...] = ()
    read: Callable[[Mapping[str, Shape]], Any] | None = field(default=None, repr=False)

    def evaluate(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the outputs from the network's. The library that runs foreign nodes computes them all."""
        found = {**values, **_session(self.model, self.constants, 1).results(values)}
        return {name: found[name] for name in self.outputs}


def _session(model: bytes, constants: Mapping[str, Array], threads: int) -> Any:
    """A model whose outputs may have any shapes and types, ready to run."""
    return runner("onnx").Session(model, threads, constants=constants)


class RestPlan:
    """A rest, ready to run: its head, and plans of what follows for the shapes that came last.

    make(network): how to run a network, as a function from its inputs by name to its outputs.
    """

    def __init__(self, rest: Rest, make: Callable[[Any], Any], threads: int) -> None:
        self.rest, self.make = rest, make
        self._head = _session(rest.model if rest.head is None else rest.head, rest.constants, threads)
        self._plans: dict[Shapes, Callable[..., dict[str, Any]]] = {}
        self._lock = threading.Lock()

    def run(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """The outputs of network and rest, of those of the network."""
        found = {**values, **self._head.results(values)}
        if self.rest.read is not None:
            found |= self._of(tuple((name, found[name].shape) for name in self.rest.follows))(found)
        return {name: found[name] for name in self.rest.outputs}

    def _of(self, shapes: Shapes) -> Callable[..., dict[str, Any]]:
        """The plan of what follows, for inputs of these shapes."""
        plan = self._plans.get(shapes)
        if plan is None:
            with self._lock:
                assert self.rest.read is not None
                plan = self._plans.get(shapes) or self.make(self.rest.read(dict(shapes)))
                if len(self._plans) >= KEPT:
                    del self._plans[next(iter(self._plans))]
                self._plans[shapes] = plan
        return plan
