"""ResNet-50 (He et al., CVPR 2016; stride in the 3x3 convolutions), with random weights: a network to try things on."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from blockconv.network.builder import NetworkBuilder
from blockconv.network.graph import Network

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # channels inside a block, blocks, stride
EXPANSION = 4
CLASSES = 1000


def resnet50(size: int = 224) -> Network:
    """The network over (1, 3, size, size) float32, batch norms folded; gives (1, 1000, 1, 1).

    Weights keep the variance of what a ReLU gives, and residual branches are scaled down, so that values
    neither vanish nor overflow.
    """
    builder, rng = NetworkBuilder("ResNet-50"), np.random.default_rng(0)

    def conv(
        x: str, ic: int, oc: int, k: int, stride: int = 1, relu: bool = True, gain: float = 1.0, residual: Any = None
    ) -> str:
        bias = rng.uniform(-0.1, 0.1, oc).astype(np.float32)
        limit = np.float32(gain * math.sqrt(6 / (ic * k * k)))  # uniform numbers: normal ones take three times as long
        weight = rng.random((oc, ic, k, k), np.float32)
        weight -= np.float32(0.5)
        weight *= 2 * limit
        act = "relu" if relu else None
        return builder.conv2d(x, weight, bias, stride, k // 2, activation=act, residual=residual)

    x = conv(builder.input("image", (1, 3, size, size)), 3, 64, 7, 2)
    x, ic = builder.max_pool2d(x, 3, 2, 1), 64
    for channels, blocks, first in STAGES:
        for stride in (first, *(1,) * (blocks - 1)):
            oc = channels * EXPANSION
            shortcut = x if ic == oc and stride == 1 else conv(x, ic, oc, 1, stride, relu=False, gain=0.7)
            y = conv(x, ic, channels, 1)
            y = conv(y, channels, channels, 3, stride)
            x, ic = conv(y, channels, oc, 1, gain=0.3, residual=shortcut), oc
    builder.output(conv(builder.global_avg_pool2d(x), ic, CLASSES, 1, relu=False))
    return builder.build()
