"""A network's constants as kernels read them, each made once: packed weights, and operands in their layouts."""

from __future__ import annotations

import copy
import hashlib
from collections.abc import Callable, Mapping
from typing import Any
from weakref import WeakValueDictionary

import numpy as np

from blockconv import jit
from blockconv.core.checks import Names, of_rank
from blockconv.core.layout import Layout, row_major
from blockconv.core.types import Array, ElementType
from blockconv.dispatch.array import BlockedArray, to_layout
from blockconv.dispatch.packing import pack_weights
from blockconv.kernels import WeightForm
from blockconv.network.graph import Network, Node, array_bytes, same_array
from blockconv.runtime.memory import Empty, Region, aligned_copy, aligned_empty

Beside = Callable[[Array, Array | None], Array]


class Parameters:
    """Weights, packed once for each form that kernels request. All nodes and sizes that agree share the bytes.

    Memory holds them in the order of the nodes, each bias before its weights. So a convolution's prefetches beyond its
    weights load the next one's data.

    like: the parameters of another plan of the same network, maybe for other sizes. Weights that both need are packed
        once. They live as long as one of the two does.
    """

    def __init__(self, network: Network, like: Parameters | None = None) -> None:
        self._constants: Mapping[str, Array] = network.constants
        self._keys: Mapping[str, Any] = {}  # by which constants are kept, if not by their names
        self._packed: dict[Any, Array] = {}
        self._region = Region()
        self._shared: WeakValueDictionary[Any, Array] = WeakValueDictionary()
        if like is not None:
            self._shared, self._keys = like._shared, like.of(network)._keys

    def of(self, network: Network) -> Parameters:
        """The parameters of the network for other sizes, where constants may differ. Equal ones are packed once."""
        made = copy.copy(self)
        made._constants = network.constants
        known = ((name, self._constants.get(name)) for name in network.constants)
        others = [name for name, value in known if value is None or not same_array(value, network.constants[name])]
        made._keys = {**self._keys, **{name: (name, _digest(network.constants[name])) for name in others}}
        return made

    def weights(
        self, node: Node, problem: Any, form: WeightForm, how: tuple[Any, ...], beside: Beside, first: int = 0
    ) -> tuple[Array, Array]:
        """Packed weights of a convolution, and the other constants of its kernel.

        beside(weights, bias): makes the other constants; the node's parameters from `first` on, and `how`, decide them.
        """
        weight, *bias = [self._constants[name] for name in node.parameters[:2]]
        made = self._copied(node.parameters[first:], how, lambda: beside(weight, bias[0] if bias else None))
        key = problem.g, form
        return self._kept(node.parameters[:1], key, lambda empty: pack_weights(problem, weight, form, empty)), made

    def constant(self, name: str, layout: Layout, type: ElementType | None = None) -> Array:
        """A constant operand in a layout, in `type` if given. If it has fewer axes, axes of size 1 precede them."""
        value = np.ascontiguousarray(self._constants[name], None if type is None else type.dtype)
        value = value.reshape(of_rank(value.shape, layout.ndim))
        given = BlockedArray(value, row_major(layout.ndim), value.shape)
        return self._copied((name,), (layout, value.dtype), lambda: to_layout(given, layout).storage)

    def release(self) -> None:
        """Forget the constants; packed arrays remain."""
        self._constants = {}

    def _copied(self, names: Names, how: tuple[Any, ...], make: Callable[[], Array]) -> Array:
        return self._kept(names, how, lambda empty: aligned_copy(make(), empty))

    def _kept(self, names: Names, how: tuple[Any, ...], make: Callable[[Empty], Array]) -> Array:
        """The array of these constants, made once. For constants of other sizes it lives as long as it is used."""
        key = tuple(self._keys.get(name, name) for name in names), *how
        found = self._packed.get(key)
        if found is None:
            found = self._shared.get(key)
            is_of_all = self._keys.keys().isdisjoint(names)
            if found is None:
                with jit.collecting(compiles=True):  # packing runs now
                    found = self._shared[key] = make(self._region.empty if is_of_all else aligned_empty)
            if is_of_all:
                self._packed[key] = found
        return found

    @property
    def nbytes(self) -> int:
        """Bytes of all packed arrays."""
        return sum(array.nbytes for array in self._packed.values())


def _digest(value: Array) -> tuple[object, ...]:
    return value.dtype, value.shape, hashlib.sha256(array_bytes(value).data).digest()
