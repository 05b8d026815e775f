"""A function's call that is made again: what was checked and chosen for arrays that lie the same way is kept."""

from __future__ import annotations

from typing import Any

from blockconv.api.bound import Bound
from blockconv.api.modules import Conv2d
from blockconv.dispatch.array import BlockedArray, allocate
from blockconv.dispatch.boundary import Array, given_images, images_like
from blockconv.dispatch.packing import Packing, is_kept, kept_room, weights_as_read, widened
from blockconv.runtime import address_of

__all__ = ["Repeated", "repeatable"]


class Repeated:
    """A convolution of floats into a new array, for whatever values and addresses the arrays of its call have.

    Their shapes, strides and types are those that were checked. What is left takes a third of a first call's time
    beside arithmetic: room for the output and the packed weights, and one launch.
    """

    __slots__ = ("_arithmetic", "_bound", "_packing", "_unbatched")

    def __init__(self, conv: Conv2d, bound: Bound, packing: Packing, unbatched: bool) -> None:
        self._arithmetic, self._bound, self._packing, self._unbatched = conv.arithmetic, bound, packing, unbatched

    def __call__(self, input: Any, x: Array, weight: Array, bias: Array | None) -> Any:
        """input: what the caller gave, of which `x` is the array."""
        bound = self._bound
        dst = allocate(bound.shape, bound.dst, bound.dtype).storage
        packed, between = kept_room(self._packing)
        biases, params = self._arithmetic.beside_weights(bound, weight, bias, None)
        addresses = packed, address_of(biases), address_of(params), address_of(weight), between
        bound.launch(address_of(x), address_of(dst), None, addresses)
        return images_like(input, dst, bound.dst, self._unbatched)


def repeatable(conv: Conv2d, given: Array) -> Repeated | None:
    """What is left to do for arrays that lie as this input and the weights do; None where one of them is copied."""
    x, unbatched = given_images("conv2d", given)
    storage, bound = conv.bound_to(x, None, False)
    weight, how = conv.weight, None if bound.plan is None else bound.plan.packing
    if bound.plan is None or how is None or isinstance(weight, BlockedArray) or not conv.arithmetic.is_float:
        return None
    read = weights_as_read(bound.problem, widened(weight, bound.plan.form))[0]
    copied = address_of(storage) != address_of(given) or address_of(read) != address_of(weight)
    if copied or weight.dtype != bound.types.wei.dtype or not is_kept(how):
        return None
    return Repeated(conv, bound, how, unbatched)
