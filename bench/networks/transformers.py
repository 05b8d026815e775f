"""Vision transformers."""

from __future__ import annotations

from typing import Any

import numpy as np

from .builder import MODERN, Builder

__all__ = ["swin_t", "vit_s"]


def swin_t(batch: int, rng: np.random.Generator) -> Any:
    """Liu et al. 2021."""
    b = Builder(batch, rng, MODERN)

    def rolled(x: str, by: int, size: int) -> str:
        for axis in (1, 2):
            cuts = b.ints(0), b.ints(by % size), b.ints(size), b.ints(axis)
            first, second = (b.node("Slice", x, cuts[k], cuts[k + 1], cuts[3]) for k in (0, 1))
            x = b.node("Concat", second, first, axis=axis)
        return x

    x = b.layer_norm(b.transpose(b.conv("x", 96, 4, 4, bias=True, pad=0), 0, 2, 3, 1))
    for stage, blocks in enumerate((2, 2, 6, 2)):
        c, size, heads = 96 << stage, 56 >> stage, 3 << stage
        for block in range(blocks):
            n, shifts = size // 7, block % 2 and size > 7
            y = rolled(b.layer_norm(x), 3, size) if shifts else b.layer_norm(x)
            y = b.transpose(b.reshape(y, batch, n, 7, n, 7, c), 0, 1, 3, 2, 4, 5)
            bias = b.random((1, heads, 49, 49), "shift")
            y = b.attention(b.reshape(y, batch * n * n, 49, c), 49, heads, bias, n * n)
            y = b.transpose(b.reshape(y, batch, n, n, 7, 7, c), 0, 1, 3, 2, 4, 5)
            y = b.reshape(y, batch, size, size, c)
            x = b.node("Add", x, rolled(y, -3, size) if shifts else y)
            x = b.node("Add", x, b.perceptron(b.layer_norm(x)))
        if stage < 3:  # four pixels become one
            y = b.transpose(b.reshape(x, batch, size // 2, 2, size // 2, 2, c), 0, 1, 3, 4, 2, 5)
            y = b.layer_norm(b.reshape(y, batch, size // 2, size // 2, 4 * c, channels=4 * c))
            x = b.linear(y, 2 * c)
    return b.classifier(b.transpose(b.layer_norm(x), 0, 3, 1, 2))


def vit_s(batch: int, rng: np.random.Generator) -> Any:
    """Dosovitskiy et al. 2021, with 384 channels."""
    b = Builder(batch, rng, MODERN)
    x = b.transpose(b.reshape(b.conv("x", 384, 16, 16, bias=True, pad=0), batch, 384, 196), 0, 2, 1)
    x = b.node("Concat", b.random((batch, 1, 384), "shift"), x, axis=1, channels=384)
    x = b.node("Add", x, b.random((1, 197, 384), "shift"))
    for _ in range(12):
        x = b.node("Add", x, b.attention(b.layer_norm(x), 197, 6))
        x = b.node("Add", x, b.perceptron(b.layer_norm(x)))
    y = b.node("Slice", b.layer_norm(x), b.ints(0), b.ints(1), b.ints(1))
    return b.classifier(b.reshape(y, batch, 384, 1, 1))
