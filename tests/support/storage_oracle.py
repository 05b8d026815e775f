"""What a storage holds, element by element, from the formulas of layout_oracle or from the one rule of offsets.

Nothing here knows of blockconv's Layout: a tag is read by four lines, and the rule is oneDNN's
(walk the inner blocks from the innermost outwards, then the outer letters).
"""

from __future__ import annotations

import functools
import math
import re
from itertools import product
from typing import Any

import numpy as np
import numpy.typing as npt
from layout_oracle import ACTIVATIONS

Array = npt.NDArray[Any]
Shape = tuple[int, ...]


@functools.lru_cache(maxsize=512)
def places(layout: str, shape: Shape) -> tuple[Array, int]:
    """(offset of each logical element, as an array of `shape`; elements in the storage), of a name or a tag."""
    row = ACTIVATIONS.get(layout)
    if row is None:
        return by_the_rule(layout, shape)
    size = row.size(*shape)
    if row.offset is not None:
        offsets = row.offset(*shape, *np.indices(shape))
        return np.broadcast_to(offsets, shape).astype(np.int64), size
    found = row.offsets(shape)
    flat = np.fromiter((found[index] for index in product(*map(range, shape))), np.int64, math.prod(shape))
    return flat.reshape(shape), size


def by_the_rule(tag: str, shape: Shape) -> tuple[Array, int]:
    """The same of any tag of oneDNN's generic letters, by its rule."""
    letters = re.match("[A-Za-z]+", tag)[0].lower()  # type: ignore[index]
    blocks = [("abcdef".index(letter), int(size)) for size, letter in re.findall("([0-9]+)([a-z])", tag)]
    whole = [math.prod(size for dim, size in blocks if dim == d) for d in range(len(letters))]
    position = [np.asarray(axis) for axis in np.indices(shape)]
    offset, stride = np.zeros(shape, np.int64), 1
    for dim, size in reversed(blocks):
        offset += position[dim] % size * stride
        position[dim] = position[dim] // size
        stride *= size
    for letter in reversed(letters):
        dim = "abcdef".index(letter)
        offset += position[dim] * stride
        stride *= -(-shape[dim] // whole[dim])
    return offset, stride


def stored(logical: Array, layout: str, fill: object = 0) -> Array:
    """The flat storage of a logical array: its elements in their places, `fill` in every other place.

    `fill` may be an array of the storage's size (dirty tails).
    """
    offsets, size = places(layout, logical.shape)
    flat = np.empty(size, logical.dtype)
    flat[...] = fill
    flat[offsets] = logical
    return flat


def logical_bits(shape: Shape, itemsize: int, seed: int = 0) -> Array:
    """Random bits as unsigned integers, in which no element of more than a byte is like another."""
    rng = np.random.default_rng([seed, itemsize, *shape])
    dtype = np.dtype(f"u{itemsize}")
    bits: Array = rng.integers(0, np.iinfo(dtype).max, shape, dtype, endpoint=True)
    return bits


def garbage(size: int, itemsize: int) -> Array:
    """What a dirty tail holds: bits that `logical_bits` has no reason to hold."""
    return np.full(size, int.from_bytes(b"\xee" * itemsize, "little"), f"u{itemsize}")
