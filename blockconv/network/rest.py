"""The model after a network whose output shapes depend on data. It is planned when they are known.

A node such as NonMaxSuppression or NonZero ends a network. It and all that depends on it are the network's *rest*: an
ONNX model that reads outputs of the network.
"""

import threading
from collections.abc import Callable, Mapping
from dataclasses import field, replace
from typing import Any

from blockconv.core.checks import Names, Shape
from blockconv.core.record import frozen
from blockconv.core.types import Array
from blockconv.network.foreign import runner

Shapes = tuple[tuple[str, Shape], ...]
KEPT = 8  # plans of what follows, for as many shapes


@frozen
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
    outputs: Names
    kinds: Names
    odd: Names = ()
    head: bytes | None = field(default=None, repr=False)
    follows: Names = ()
    read: Callable[[Mapping[str, Shape]], Any] | None = field(default=None, repr=False)

    def evaluate(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Compute the outputs from the network's. The library that runs foreign nodes computes them all."""
        return RestPlan(replace(self, head=None, read=None), None, 1).run(values)


class RestPlan:
    """A rest, ready to run: its head, and plans of what follows for the shapes that came last.

    make(network): how to run a network, as a function from its inputs by name to its outputs.
    """

    def __init__(self, rest: Rest, make: Any, threads: int) -> None:
        self.rest, self.make = rest, make
        head = rest.model if rest.head is None else rest.head  # whose outputs may have any shapes and types
        self._head = runner("onnx").Session(head, threads, constants=rest.constants)
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
