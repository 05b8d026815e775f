"""Small networks that plans are tried on, with random weights."""

from __future__ import annotations

from typing import Any

import numpy as np

import blockconv as bc
from blockconv.network import ops


def values(shape: tuple[int, ...], seed: int = 0) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def residual_network(n: int = 1, size: int = 12) -> bc.Network:
    """A stem, two residual convolutions, a pool of everything, a classifier; ragged channels."""
    b = bc.NetworkBuilder("residual")
    x = b.input("x", (n, 3, size, size))
    x = b.conv2d(x, values((20, 3, 3, 3), 1), values((20,), 2), stride=2, padding=1, activation="relu", name="stem")
    y = b.conv2d(x, values((20, 20, 3, 3), 3), padding=1, activation="relu", name="a")
    x = b.conv2d(y, values((20, 20, 1, 1), 4), values((20,), 5), residual=x, activation="relu", name="join")
    short = b.max_pool2d(x, 3, 1, 1, name="short")
    y = b.conv2d(x, values((20, 20, 1, 1), 6), residual=short, activation="relu", name="b")
    y = b.global_avg_pool2d(y, name="mean")
    y = b.conv2d(y, values((10, 20, 1, 1), 8), values((10,), 9), name="classes")
    y = b.add(ops.Reshape((0, -1)), y, name="flat")
    b.output(y)
    return b.build()


def inception_network(n: int = 1) -> bc.Network:
    """Branches of 16, 32 and 8 channels beside each other, one of which is read again, then of 16 more and 5."""
    b = bc.NetworkBuilder("inception")
    x = b.input("x", (n, 16, 6, 6))
    one = b.conv2d(x, values((16, 16, 1, 1), 1), activation="relu", name="one")
    two = b.conv2d(x, values((32, 16, 1, 1), 2), name="two")
    inner = b.add(ops.Concat(), one, two, name="inner")
    three = b.conv2d(inner, values((16, 48, 1, 1), 3), name="three")
    four = b.conv2d(one, values((5, 16, 1, 1), 4), name="four")
    outer = b.add(ops.Concat(), inner, three, four, name="outer")
    b.output(b.max_pool2d(outer, 2, name="pooled"), inner)
    return b.build()


def whole_numbers(rng: np.random.Generator, *shape: int, low: int = -2, high: int = 3) -> np.ndarray:
    """float32 numbers whose products and sums are exact in any order."""
    return rng.integers(low, high, shape).astype(np.float32)


def u_net(rng: np.random.Generator) -> bc.Network:
    b = bc.NetworkBuilder("u")
    x = b.input("x", (1, 3, 64, 64))
    down = b.conv2d(x, whole_numbers(rng, 8, 3, 3, 3), padding=1, activation="relu")
    middle = b.conv2d(b.max_pool2d(down, 2), whole_numbers(rng, 8, 8, 3, 3, low=-1, high=2), padding=2, dilation=2)
    up = b.add(ops.Resize("nearest", scale=(2.0, 2.0)), middle)
    b.output(b.conv2d(b.concat(up, down), whole_numbers(rng, 2, 16, 3, 3, low=-1, high=2), padding=1), middle)
    return b.build()
