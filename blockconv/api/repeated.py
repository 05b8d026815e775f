"""A function's repeated call: it keeps the checks and the choice made for arrays with the same shapes and strides."""

from __future__ import annotations

from typing import Any

import numpy as np

from blockconv.api.bound import BoundConv
from blockconv.api.modules import Conv2d
from blockconv.core.interop import like
from blockconv.dispatch.array import BlockedArray
from blockconv.dispatch.boundary import Array, given_images
from blockconv.dispatch.packing import Packing, is_kept, kept_room, pack_bias, weights_as_read, widened
from blockconv.runtime import address_of
from blockconv.runtime.memory import AlignedLike


class Repeated:
    """A convolution of floats into a new array, for whatever values and addresses the arrays of its call have.

    The arrays have the checked shapes, strides and types. The remaining work takes a third of a first call's time
    beside arithmetic: room for the output and the packed weights, and one launch.
    """

    __slots__ = ("_biases", "_bound", "_packing", "_params", "_positions", "_room")

    def __init__(self, conv: Conv2d, bound: BoundConv, packing: Packing, result: Array) -> None:
        """result: the first call's; other results have its strides."""
        assert not isinstance(conv.weight, BlockedArray)
        self._bound, self._packing = bound, packing
        self._biases, self._params = conv.arithmetic.beside_weights(bound, conv.weight, None, None)
        # For each packed bias, its number among a zero and the given biases.
        self._positions = self._biases
        if conv.bias is not None:
            assert bound.plan is not None
            numbers = np.arange(1, 1 + conv.bias.size)
            self._positions = pack_bias(bound.problem, numbers, bound.plan.form, numbers.dtype)
        self._room = AlignedLike(result)

    def __call__(self, input: Any, x: Array, weight: Array, bias: Array | None) -> Any:
        """input: the caller's argument. x: its array."""
        dst = self._room()
        packed, between = kept_room(self._packing)
        biases = self._biases
        if bias is not None:
            given = np.zeros(1 + bias.size, biases.dtype)
            given[1:] = bias
            biases = given[self._positions]
        addresses = packed, address_of(biases), address_of(self._params), address_of(weight), between
        self._bound.launch(address_of(x), address_of(dst), None, addresses)
        return like(input, dst)


def repeatable(conv: Conv2d, given: Array, result: Array) -> Repeated | None:
    """The remaining work for arrays with the shapes and strides of this input and these weights; None where one of them
    is copied."""
    storage, bound = conv.bound_to(given_images("conv2d", given)[0], None, False)
    weight, how = conv.weight, None if bound.plan is None else bound.plan.packing
    if bound.plan is None or how is None or isinstance(weight, BlockedArray) or not conv.arithmetic.is_float:
        return None
    read = weights_as_read(widened(weight, bound.plan.form))[0]
    copied = address_of(storage) != address_of(given) or address_of(read) != address_of(weight)
    if copied or weight.dtype != bound.types.wei.dtype or not is_kept(how):
        return None
    return Repeated(conv, bound, how, result)
