"""ResNet-50 (He et al., CVPR 2016; stride in the 3x3 convolutions), with random weights: a network to try things on."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from blockconv.network.builder import NetworkBuilder
from blockconv.network.graph import Network

STAGES = ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2))  # channels inside a block, blocks, stride
EXPANSION = 4
CLASSES = 1000


def resnet50(batch: int = 1, size: int = 224, seed: int = 0) -> Network:
    """The network over (batch, 3, size, size) float32, batch norms folded; gives (batch, 1000, 1, 1).

    Weights keep the variance of what a ReLU gives, and residual branches are scaled down, so that values
    neither vanish nor overflow.
    """
    net = _ResNet(seed)
    x = net.builder.input("image", (batch, 3, size, size))
    x = net.conv(x, 3, 64, 7, 2)
    x = net.builder.max_pool2d(x, 3, 2, 1)
    ic = 64
    for channels, blocks, stride in STAGES:
        for k in range(blocks):
            x = net.bottleneck(x, ic, channels, stride if k == 0 else 1)
            ic = channels * EXPANSION
    x = net.builder.global_avg_pool2d(x)
    x = net.conv(x, ic, CLASSES, 1, relu=False)
    net.builder.output(x)
    return net.builder.build()


class _ResNet:
    def __init__(self, seed: int) -> None:
        self.builder = NetworkBuilder("ResNet-50")
        self.rng = np.random.default_rng(seed)

    def weight(self, oc: int, ic: int, k: int, gain: float) -> npt.NDArray[np.float32]:
        limit = np.float32(gain * math.sqrt(6 / (ic * k * k)))  # uniform numbers: normal ones take three times as long
        drawn: npt.NDArray[np.float32] = self.rng.random((oc, ic, k, k), np.float32)
        drawn -= np.float32(0.5)
        drawn *= 2 * limit
        return drawn

    def conv(
        self,
        x: str,
        ic: int,
        oc: int,
        k: int,
        stride: int = 1,
        *,
        relu: bool = True,
        gain: float = 1.0,
        residual: str | None = None,
    ) -> str:
        bias = self.rng.uniform(-0.1, 0.1, oc).astype(np.float32)
        act = "relu" if relu else None
        weight = self.weight(oc, ic, k, gain)
        return self.builder.conv2d(x, weight, bias, stride, k // 2, activation=act, residual=residual)

    def bottleneck(self, x: str, ic: int, channels: int, stride: int) -> str:
        oc = channels * EXPANSION
        shortcut = x if ic == oc and stride == 1 else self.conv(x, ic, oc, 1, stride, relu=False, gain=0.7)
        y = self.conv(x, ic, channels, 1)
        y = self.conv(y, channels, channels, 3, stride)
        return self.conv(y, channels, oc, 1, gain=0.3, residual=shortcut)
