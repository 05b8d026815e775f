"""Networks that give a map: they segment, cut out, or find text."""

from __future__ import annotations

from typing import Any

import numpy as np

from .builder import MODERN, Builder
from .classifiers import mobilenet_v3_features

__all__ = ["deeplab_v3", "detector_like", "u2net", "unet"]


def deeplab_v3(batch: int, rng: np.random.Generator) -> Any:
    """Chen et al. 2017, on MobileNetV3, as torchvision has it."""
    b = Builder(batch, rng, MODERN)
    x = mobilenet_v3_features(b, dilated=True)[-1]
    parts = [b.conv_norm(x, 256, 1, act="relu")]
    parts += [b.conv_norm(x, 256, 3, act="relu", dilation=step) for step in (12, 24, 36)]
    parts.append(b.resized(b.conv_norm(b.node("GlobalAveragePool", x), 256, 1, act="relu"), 14))
    y = b.conv_norm(b.node("Concat", *parts, axis=1, channels=1280), 256, 1, act="relu")
    y = b.conv(b.conv_norm(y, 256, 3, act="relu"), 21, 1, bias=True)
    return b.model([b.resized(y, 16)], 3, 224, 224)


def unet(batch: int, rng: np.random.Generator) -> Any:
    """Ronneberger et al. 2015, with half the channels, padding and norms."""
    b = Builder(batch, rng, MODERN)

    def double(x: str, c: int) -> str:
        return b.conv_norm(b.conv_norm(x, c, 3, act="relu"), c, 3, act="relu")

    x, kept = "x", []
    for c in (32, 64, 128, 256):
        kept.append(double(x, c))
        x = b.max_pool(kept[-1])
    x = double(x, 512)
    for c in (256, 128, 64, 32):
        x = double(b.concat(kept.pop(), b.up_conv(x, c)), c)
    return b.model([b.conv(x, 2, 1, bias=True)], 3, 224, 224)


def u2net(batch: int, rng: np.random.Generator) -> Any:
    """Qin et al. 2020: a U of small Us, and a map from each of its levels."""
    b = Builder(batch, rng, MODERN)

    def unit(x: str, c: int, step: int = 1) -> str:
        return b.conv_norm(x, c, 3, act="relu", dilation=step)

    def small_u(x: str, inner: int, oc: int, levels: int) -> str:
        """levels: 0 for four dilations in place of sizes."""
        first = unit(x, oc)
        kept, steps = [unit(first, inner)], [2, 4] if levels == 0 else [1] * (levels - 2)
        for step in steps:
            kept.append(unit(kept[-1] if levels == 0 else b.max_pool(kept[-1]), inner, step))
        y = unit(kept[-1], inner, 2 if levels else 8)
        for k in reversed(range(len(kept))):
            y = unit(b.concat(y, kept[k]), inner if k else oc, 1 if levels or k == 0 else 2 * k)
            y = b.resized(y, 2, "linear") if k and levels else y
        return b.node("Add", y, first)

    kept: list[str] = []
    x = "x"
    for inner, oc, levels in ((32, 64, 7), (32, 128, 6), (64, 256, 5), (128, 512, 4), (256, 512, 0), (256, 512, 0)):
        kept.append(small_u(b.max_pool(x) if kept else x, inner, oc, levels))
        x = kept[-1]
    maps = [x]
    for k, inner, oc, levels in ((4, 256, 512, 0), (3, 128, 256, 4), (2, 64, 128, 5), (1, 32, 64, 6), (0, 16, 64, 7)):
        x = small_u(b.concat(b.resized(x, 2, "linear"), kept[k]), inner, oc, levels)
        maps.append(x)
    sides = [b.conv(y, 1, 3, bias=True) for y in reversed(maps)]
    sides = [b.resized(y, 1 << k, "linear") if k else y for k, y in enumerate(sides)]
    return b.model([b.activation(b.conv(b.concat(*sides), 1, 1, bias=True), "sigmoid")], 3, 320, 320)


def detector_like(batch: int, rng: np.random.Generator) -> Any:
    """PP-OCRv3's detector of text: MobileNetV3 of half the width, a pyramid whose maps are squeezed, DB's head."""
    b = Builder(batch, rng, MODERN)

    def squeezed(x: str, c: int, k: int) -> str:
        y = b.conv(x, c, k)
        return b.node("Add", y, b.squeeze_excite(y, c // 4, ("relu", "hardsigmoid")))

    *levels, last = (squeezed(x, 96, 1) for x in mobilenet_v3_features(b, slim=True)[1:])
    levels.append(last)
    for k in (2, 1, 0):
        levels[k] = b.node("Add", levels[k], b.resized(levels[k + 1], 2))
    smooth = [squeezed(y, 24, 3) for y in levels]
    x = b.concat(*(b.resized(y, 1 << k, "nearest") if k else y for k, y in enumerate(smooth)))
    x = b.norm(b.up_conv(b.conv_norm(x, 24, 3, act="relu"), 24), "relu")
    return b.model([b.activation(b.up_conv(x, 1), "sigmoid")], 3, 640, 640)
