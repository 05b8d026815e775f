"""Networks that find objects, without the decoding of boxes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from onnx import helper

from .builder import MODERN, Builder

__all__ = ["yolo11_like", "yolo_like"]


class _Yolo(Builder):
    """The blocks of YOLOv8 and YOLO11. Heads end before boxes are decoded."""

    def unit(self, x: str, c: int, k: int = 3, stride: int = 1, groups: int = 1) -> str:
        return self.conv_norm(x, c, k, stride, groups, act="silu")

    def bottleneck(self, x: str, inner: int, adds: bool = True) -> str:
        y = self.unit(self.unit(x, inner), self.channels[x])
        return self.node("Add", x, y) if adds else y

    def split(self, x: str, c: int, bodies: Sequence[Callable[[str], str]], half: int = 0) -> str:
        """C2f: `bodies` run one after the other on the second half. Both halves and all results are joined."""
        parts = self.halves(self.unit(x, 2 * (half or c // 2), 1))
        for body in bodies:
            parts.append(body(parts[-1]))
        return self.unit(self.concat(*parts), c, 1)

    def pyramid(self, x: str, c: int) -> str:
        """SPPF."""
        pools = [self.unit(x, c // 2, 1)]
        for _ in range(3):
            pools.append(self.max_pool(pools[-1], 5, 1))
        return self.unit(self.concat(*pools), c, 1)

    def heads(self, levels: Sequence[str], classes: Callable[[str], str]) -> Any:
        found = []
        for y in levels:
            boxes = self.unit(self.unit(y, 64), 64)
            found += [self.conv(boxes, 64, 1, bias=True), self.conv(classes(y), 80, 1, bias=True)]
        return self.model(found, 3, 640, 640)


def yolo_like(batch: int, rng: np.random.Generator) -> Any:
    """YOLOv8's smallest network."""
    b = _Yolo(batch, rng, MODERN)

    def split(x: str, c: int, repeats: int, adds: bool) -> str:
        return b.split(x, c, [lambda y: b.bottleneck(y, c // 2, adds)] * repeats)

    x, kept = b.unit("x", 16, 3, 2), []
    for c, repeats in ((32, 1), (64, 2), (128, 2), (256, 1)):
        x = split(b.unit(x, c, 3, 2), c, repeats, True)
        kept.append(x)
    x = b.pyramid(x, 256)
    middle = split(b.concat(b.resized(x, 2), kept[2]), 128, 1, False)
    small = split(b.concat(b.resized(middle, 2), kept[1]), 64, 1, False)
    middle = split(b.concat(b.unit(small, 64, 3, 2), middle), 128, 1, False)
    large = split(b.concat(b.unit(middle, 128, 3, 2), x), 256, 1, False)
    return b.heads([small, middle, large], lambda y: b.unit(b.unit(y, 80), 80))


def yolo11_like(batch: int, rng: np.random.Generator) -> Any:
    """YOLO11's smallest network: blocks inside blocks, attention over the last map, depthwise heads."""
    b = _Yolo(batch, rng, MODERN)

    def plain(x: str, c: int, half: int = 0) -> str:
        half = half or c // 2
        return b.split(x, c, [lambda y: b.bottleneck(y, half // 2)], half)

    def nested(y: str) -> str:
        c = b.channels[y] // 2
        one = b.bottleneck(b.bottleneck(b.unit(y, c, 1), c), c)
        return b.unit(b.concat(one, b.unit(y, c, 1)), 2 * c, 1)

    def attend(x: str) -> str:
        """Two heads of 32 channels, which values have twice, over 20x20 pixels."""
        c, n, cuts = b.channels[x], 400, b.ints(32, 32, 64)
        qkv = b.reshape(b.conv_norm(x, 2 * c, 1), batch, 2, 128, n)
        names = [f"part{k}_{len(b.nodes)}" for k in range(3)]
        b.nodes.append(helper.make_node("Split", [qkv, cuts], names, axis=2))
        b.channels |= dict.fromkeys(names, c)
        scores = b.node("MatMul", b.transpose(names[0], 0, 1, 3, 2), names[1])
        weights = b.node("Softmax", b.node("Mul", scores, b.number(32**-0.5)), axis=-1)
        y = b.node("MatMul", names[2], b.transpose(weights, 0, 1, 3, 2))
        y, value = (b.reshape(z, batch, c, 20, 20, channels=c) for z in (y, names[2]))
        y = b.conv_norm(b.node("Add", y, b.conv_norm(value, c, 3, groups=c)), c, 1)
        x = b.node("Add", x, y)
        return b.node("Add", x, b.conv_norm(b.unit(x, 2 * c, 1), c, 1))

    x = b.unit(b.unit("x", 16, 3, 2), 32, 3, 2)
    low = plain(b.unit(plain(x, 64, 16), 64, 3, 2), 128, 32)
    mid = b.split(b.unit(low, 128, 3, 2), 128, [nested])
    x = b.pyramid(b.split(b.unit(mid, 256, 3, 2), 256, [nested]), 256)
    parts = b.halves(b.unit(x, 256, 1))
    x = b.unit(b.concat(parts[0], attend(parts[1])), 256, 1)
    middle = plain(b.concat(b.resized(x, 2), mid), 128)
    small = plain(b.concat(b.resized(middle, 2), low), 64)
    middle = plain(b.concat(b.unit(small, 64, 3, 2), middle), 128)
    large = b.split(b.concat(b.unit(middle, 128, 3, 2), x), 256, [nested])

    def classes(y: str) -> str:
        for _ in range(2):
            y = b.unit(b.unit(y, b.channels[y], 3, groups=b.channels[y]), 80, 1)
        return y

    return b.heads([small, middle, large], classes)
