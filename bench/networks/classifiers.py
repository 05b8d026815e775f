"""Convolutional networks that classify pictures."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from .builder import MODERN, Builder

__all__ = [
    "convnext_t",
    "efficientnet_b0",
    "hrnet",
    "mobilenet_v2",
    "mobilenet_v3",
    "mobilenet_v3_features",
    "mobilenet_v4",
    "regnet_y",
    "repvgg",
    "resnet",
]


def resnet(groups: int, width: int) -> Callable[[int, np.random.Generator], Any]:
    """He et al. 2015 with the stride on the 3x3 convolution, as torchvision has it; ResNeXt of Xie et al. 2016."""

    def make(batch: int, rng: np.random.Generator) -> Any:
        b = Builder(batch, rng)
        x = b.conv_norm("x", 64, 7, 2, act="relu")
        x = b.node("MaxPool", x, kernel_shape=[3, 3], strides=[2, 2], pads=[1] * 4)
        for stage, blocks in enumerate((3, 4, 6, 3)):
            inner, outer = width * groups << stage, 256 << stage
            for block in range(blocks):
                stride = 2 if stage and not block else 1
                y = b.conv_norm(x, inner, 1, act="relu")
                y = b.conv_norm(y, inner, 3, stride, groups, act="relu")
                y = b.conv_norm(y, outer, 1)
                short = x if block else b.conv_norm(x, outer, 1, stride)
                x = b.activation(b.node("Add", y, short), "relu")
        return b.classifier(x)

    return make


def mobilenet_v2(batch: int, rng: np.random.Generator) -> Any:
    """Sandler et al. 2018."""
    b = Builder(batch, rng)
    x = b.conv_norm("x", 32, 3, 2, act="relu6")
    rows = ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1), (6, 160, 3, 2), (6, 320, 1, 1))
    for expand, oc, repeats, first in rows:
        for i in range(repeats):
            stride, ic = first if i == 0 else 1, b.channels[x]
            y = x if expand == 1 else b.conv_norm(x, ic * expand, 1, act="relu6")
            y = b.conv_norm(y, ic * expand, 3, stride, ic * expand, act="relu6")
            y = b.conv_norm(y, oc, 1)
            x = b.node("Add", x, y) if stride == 1 and ic == oc else y
    return b.classifier(b.conv_norm(x, 1280, 1, act="relu6"))


def efficientnet_b0(batch: int, rng: np.random.Generator) -> Any:
    """Tan and Le 2019, with PyTorch's symmetric padding."""
    b = Builder(batch, rng)
    x = b.conv_norm("x", 32, 3, 2, act="silu")
    rows = (
        (1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5), (6, 192, 4, 2, 5),
        (6, 320, 1, 1, 3),
    )  # fmt: skip
    for expand, oc, repeats, first, k in rows:
        for i in range(repeats):
            stride, ic = first if i == 0 else 1, b.channels[x]
            y = x if expand == 1 else b.conv_norm(x, ic * expand, 1, act="silu")
            y = b.conv_norm(y, ic * expand, k, stride, ic * expand, act="silu")
            y = b.conv_norm(b.squeeze_excite(y, ic // 4, ("silu", "sigmoid")), oc, 1)
            x = b.node("Add", x, y) if stride == 1 and ic == oc else y
    return b.classifier(b.conv_norm(x, 1280, 1, act="silu"))


# Kernel, expanded and output channels, whether it squeezes, activation, stride, dilation in DeepLab.
_MOBILENET_V3 = (
    (3, 16, 16, 0, "relu", 1, 1), (3, 64, 24, 0, "relu", 2, 1), (3, 72, 24, 0, "relu", 1, 1),
    (5, 72, 40, 1, "relu", 2, 1), (5, 120, 40, 1, "relu", 1, 1), (5, 120, 40, 1, "relu", 1, 1),
    (3, 240, 80, 0, "hardswish", 2, 1), (3, 200, 80, 0, "hardswish", 1, 1), (3, 184, 80, 0, "hardswish", 1, 1),
    (3, 184, 80, 0, "hardswish", 1, 1), (3, 480, 112, 1, "hardswish", 1, 1), (3, 672, 112, 1, "hardswish", 1, 1),
    (5, 672, 160, 1, "hardswish", 2, 2), (5, 960, 160, 1, "hardswish", 1, 2), (5, 960, 160, 1, "hardswish", 1, 2),
)  # fmt: skip


def mobilenet_v3_features(b: Builder, dilated: bool = False, slim: bool = False) -> list[str]:
    """Howard et al. 2019, the large one: what each stride takes, and the last. dilated: without the last stride.

    slim: half as many channels, and nothing squeezed, as in PP-OCR's detector.
    """

    def width(c: int) -> int:
        return max(8, (c // 2 + 4) // 8 * 8) if slim else c

    x, found = b.conv_norm("x", width(16), 3, 2, act="hardswish"), []
    for k, inner, oc, squeezes, act, stride, step in _MOBILENET_V3:
        inner, oc = width(inner), width(oc)
        y, ic = x, b.channels[x]
        if stride > 1:
            found.append(x)
        if inner != ic:
            y = b.conv_norm(y, inner, 1, act=act)
        keeps = dilated and step > 1
        y = b.conv_norm(y, inner, k, 1 if keeps else stride, inner, act=act, dilation=step if keeps else 1)
        if squeezes and not slim:
            y = b.squeeze_excite(y, -(-inner // 32) * 8, ("relu", "hardsigmoid"))
        y = b.conv_norm(y, oc, 1)
        x = b.node("Add", x, y) if stride == 1 and ic == oc else y
    return [*found, b.conv_norm(x, width(960), 1, act="hardswish")]


def mobilenet_v3(batch: int, rng: np.random.Generator) -> Any:
    b = Builder(batch, rng, MODERN)
    x = b.node("GlobalAveragePool", mobilenet_v3_features(b)[-1])
    return b.classifier(b.activation(b.conv(x, 1280, 1, bias=True), "hardswish"))


# Kernels before and after the expansion (0: none), stride, expansion, channels.
_MOBILENET_V4 = (
    (5, 5, 2, 3, 96), *[(0, 3, 1, 2, 96)] * 4, (3, 0, 1, 4, 96),
    (3, 3, 2, 6, 128), (5, 5, 1, 4, 128), (0, 5, 1, 4, 128), (0, 5, 1, 3, 128), *[(0, 3, 1, 4, 128)] * 2,
)  # fmt: skip


def mobilenet_v4(batch: int, rng: np.random.Generator) -> Any:
    """Qin et al. 2024: the small convolutional one."""
    b = Builder(batch, rng, MODERN)
    x = b.conv_norm("x", 32, 3, 2, act="relu")
    for first, second in ((32, 32), (96, 64)):
        x = b.conv_norm(b.conv_norm(x, first, 3, 2, act="relu"), second, 1, act="relu")
    for before, after, stride, expand, oc in _MOBILENET_V4:
        ic = b.channels[x]
        y = b.conv_norm(x, ic, before, 1 if after else stride, ic) if before else x
        y = b.conv_norm(y, ic * expand, 1, act="relu")
        y = b.conv_norm(y, ic * expand, after, stride, ic * expand, act="relu") if after else y
        y = b.conv_norm(y, oc, 1)
        x = b.node("Add", x, y) if stride == 1 and ic == oc else y
    x = b.node("GlobalAveragePool", b.conv_norm(x, 960, 1, act="relu"))
    return b.classifier(b.conv_norm(x, 1280, 1, act="relu"))


def hrnet(batch: int, rng: np.random.Generator) -> Any:
    """Wang et al. 2019: HRNet-W18, whose branches of four sizes are added to each other again and again."""
    b = Builder(batch, rng, MODERN)

    def block(x: str, c: int, wide: int = 0) -> str:
        """Two convolutions, or three of them where the result has so many channels."""
        first = b.conv_norm(x, c, 1 if wide else 3, act="relu")
        y = b.conv_norm(b.conv_norm(first, c, 3, act="relu"), wide, 1) if wide else b.conv_norm(first, c, 3, gain=0.3)
        short = b.conv_norm(x, wide, 1) if wide and b.channels[x] != wide else x
        return b.activation(b.node("Add", y, short), "relu")

    def moved(x: str, start: int, end: int) -> str:
        """A branch at the size of another."""
        if start > end:
            return b.resized(b.conv_norm(x, 18 << end, 1, gain=0.3), 1 << (start - end), "nearest")
        for k in range(start, end):
            last = k == end - 1
            act, gain = ("", 0.3) if last else ("relu", 1)
            x = b.conv_norm(x, 18 << (end if last else start), 3, 2, act=act, gain=gain)
        return x

    x = b.conv_norm(b.conv_norm("x", 64, 3, 2, act="relu"), 64, 3, 2, act="relu")
    for _ in range(4):
        x = block(x, 64, 256)
    branches = [b.conv_norm(x, 18, 3, act="relu"), b.conv_norm(x, 36, 3, 2, act="relu")]
    for count, modules in ((2, 1), (3, 4), (4, 3)):
        if count > len(branches):
            branches.append(b.conv_norm(branches[-1], 18 << (count - 1), 3, 2, act="relu"))
        for _ in range(modules):
            for k in range(4 * count):
                branches[k % count] = block(branches[k % count], 18 << k % count)
            sums = []
            for end in range(count):
                parts = [moved(y, start, end) for start, y in enumerate(branches)]
                y = parts[0]
                for part in parts[1:]:
                    y = b.node("Add", y, part)
                sums.append(b.activation(y, "relu"))
            branches = sums
    wide = [block(y, 32 << k, 128 << k) for k, y in enumerate(branches)]
    x = wide[0]
    for k, y in enumerate(wide[1:]):
        x = b.node("Add", y, b.conv_norm(x, 256 << k, 3, 2, bias=True, act="relu"))
    return b.classifier(b.conv_norm(x, 2048, 1, bias=True, act="relu"))


def convnext_t(batch: int, rng: np.random.Generator) -> Any:
    """Liu et al. 2022."""
    b = Builder(batch, rng, MODERN)

    def norm(x: str) -> str:
        return b.transpose(b.layer_norm(b.transpose(x, 0, 2, 3, 1)), 0, 3, 1, 2)

    x = norm(b.conv("x", 96, 4, 4, bias=True, pad=0))
    for stage, blocks in enumerate((3, 3, 9, 3)):
        c = 96 << stage
        x = b.conv(norm(x), c, 2, 2, bias=True, pad=0) if stage else x
        for _ in range(blocks):
            y = b.layer_norm(b.transpose(b.conv(x, c, 7, groups=c, bias=True), 0, 2, 3, 1))
            y = b.node("Mul", b.perceptron(y), b.random((c,), "scale"))
            x = b.node("Add", x, b.transpose(y, 0, 3, 1, 2))
    return b.classifier(norm(b.node("GlobalAveragePool", x)))


def regnet_y(batch: int, rng: np.random.Generator) -> Any:
    """Radosavovic et al. 2020: RegNetY-800MF."""
    b = Builder(batch, rng, MODERN)
    x = b.conv_norm("x", 32, 3, 2, act="relu")
    for c, blocks in ((64, 1), (144, 3), (320, 8), (784, 2)):
        for block in range(blocks):
            stride, ic = 1 if block else 2, b.channels[x]
            y = b.conv_norm(b.conv_norm(x, c, 1, act="relu"), c, 3, stride, c // 16, act="relu")
            y = b.conv_norm(b.squeeze_excite(y, ic // 4, ("relu", "sigmoid")), c, 1)
            short = x if block else b.conv_norm(x, c, 1, stride)
            x = b.activation(b.node("Add", y, short), "relu")
    return b.classifier(x)


def repvgg(batch: int, rng: np.random.Generator) -> Any:
    """Ding et al. 2021: RepVGG-A0 as it is trained, with its branches."""
    b = Builder(batch, rng, MODERN)
    x = "x"
    for c, blocks in ((48, 1), (48, 2), (96, 4), (192, 14), (1280, 1)):
        for block in range(blocks):
            stride = 1 if block else 2
            y, z = (b.conv_norm(x, c, k, stride, gain=3**-0.5) for k in (3, 1))
            y = b.node("Add", y, z)
            x = b.activation(b.node("Add", y, b.norm(x)) if block else y, "relu")
    return b.classifier(x)
