"""Networks of sequences: lines of text and sounds."""

from __future__ import annotations

from typing import Any

import numpy as np

from .builder import MODERN, Builder, random_weights

__all__ = ["line_reader", "reader_like", "vad_like", "vocoder_like"]


def reader_like(batch: int, rng: np.random.Generator) -> Any:
    """A text recogniser of PP-OCR's kind: MobileNetV3's blocks to one row of pixels, two LSTMs, characters."""
    b = Builder(batch, rng, MODERN)
    x = b.conv_norm("x", 16, 3, 2, act="hardswish")
    for k, inner, oc, rows in ((3, 32, 16, 1), (3, 64, 32, 2), (5, 160, 64, 2), (5, 320, 96, 2), (5, 480, 120, 1)):
        y = b.conv_norm(
            b.conv_norm(x, inner, 1, act="hardswish"), inner, k, groups=inner, act="hardswish", strides=[rows, 1]
        )
        x = b.conv_norm(b.squeeze_excite(y, inner // 4, ("relu", "hardsigmoid")), oc, 1)
    x = b.node("MaxPool", x, kernel_shape=[3, 2], strides=[3, 2])
    x = b.transpose(b.reshape(x, batch, 120, 80), 2, 0, 1)
    for h in (48, 48):
        x = _lstm(b, x, h, "bidirectional")
        x = b.reshape(b.transpose(x, 0, 2, 1, 3), 80, batch, 2 * h, channels=2 * h)
    return b.model([b.node("Softmax", b.linear(b.transpose(x, 1, 0, 2), 6625), axis=-1)], 3, 48, 320)


def _lstm(b: Builder, x: str, h: int, direction: str) -> str:
    d = 1 + (direction == "bidirectional")
    weights = [
        b.constant(random_weights(b.rng, (d, 4 * h, k), "weight") * np.float32(0.5 * h**0.5))
        for k in (b.channels[x], h)
    ]
    return b.node("LSTM", x, *weights, b.random((d, 8 * h), "shift"), hidden_size=h, direction=direction, channels=h)


def vocoder_like(batch: int, rng: np.random.Generator) -> Any:
    """HiFi-GAN's second generator (Kong et al. 2020): 64 frames of 80 bands become 16,384 samples."""
    b = Builder(batch, rng, MODERN)
    b.channels["x"] = 80

    def conv(x: str, c: int, k: int, step: int = 1) -> str:
        return b.conv(b.node("LeakyRelu", x, alpha=0.1), c, k, bias=True, rank=1, dilation=step)

    x = b.conv("x", 128, 7, bias=True, rank=1)
    for c, k, stride in ((64, 16, 8), (32, 16, 8), (16, 4, 2), (8, 4, 2)):
        given = b.random((2 * c, c, k), "weight"), b.random((c,), "shift")
        pads = [(k - stride) // 2] * 2
        x = b.node("LeakyRelu", x, alpha=0.1)
        x = b.node("ConvTranspose", x, *given, kernel_shape=[k], strides=[stride], pads=pads, channels=c)
        sums = []
        for size in (3, 7, 11):
            y = x
            for step in (1, 3, 5):
                y = b.node("Add", y, conv(conv(y, c, size, step), c, size))
            sums.append(y)
        total = b.node("Add", b.node("Add", sums[0], sums[1]), sums[2])
        x = b.node("Div", total, b.number(9))
    return b.model([b.activation(conv(x, 1, 7), "tanh")], 80, 64)


def vad_like(batch: int, rng: np.random.Generator) -> Any:
    """A detector of speech of Silero's kind: the spectrum of two seconds, four convolutions, an LSTM."""
    b = Builder(batch, rng, MODERN)
    b.channels["x"] = 1
    y = b.conv("x", 258, 256, 64, rank=1)
    cuts = b.ints(0), b.ints(129), b.ints(258), b.ints(1)
    parts = [b.node("Slice", y, cuts[k], cuts[k + 1], cuts[3], channels=129) for k in (0, 1)]
    x = b.node("Sqrt", b.node("Add", *(b.node("Mul", part, part) for part in parts)))
    for c, stride in ((128, 1), (64, 2), (64, 2), (128, 1)):
        x = b.activation(b.conv(x, c, 3, stride, bias=True, rank=1), "relu")
    x = b.node("Squeeze", _lstm(b, b.transpose(x, 2, 0, 1), 128, "forward"), b.ints(1))
    return b.model([b.activation(b.linear(b.activation(x, "relu"), 1), "sigmoid")], 1, 32000)


def line_reader(rng: np.random.Generator) -> Any:
    """As `reader_like`, without its recurrent layers, for lines of any length: the shape of a sequence is computed."""
    b = Builder(1, rng, MODERN)
    x = b.conv_norm("x", 16, 3, 2, act="hardswish")
    for k, oc, rows in ((3, 32, 1), (3, 64, 2), (3, 64, 1), (5, 128, 2), (5, 128, 1), (5, 256, 2), (5, 256, 1)):
        y = b.conv_norm(x, b.channels[x], k, groups=b.channels[x], act="hardswish", strides=[rows, 1])
        x = b.conv_norm(y, oc, 1, act="hardswish")
    x = b.node("MaxPool", x, kernel_shape=[3, 1], strides=[3, 1])
    sizes = b.node("Shape", x)
    parts = [b.node("Gather", sizes, b.ints(k), axis=0) for k in (0, 1, 3)]
    x = b.transpose(b.node("Reshape", x, b.node("Concat", *parts, axis=0)), 0, 2, 1)
    return b.model([b.node("Softmax", b.linear(x, 6625), axis=-1)], 3, 48, 320)
