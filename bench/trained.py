"""The networks that steps of training are measured on besides those of `bench.modules`, with random weights."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from .modules import MODULES

__all__ = ["NETWORKS"]


def _conv(
    ic: int, oc: int, kernel: int = 1, stride: int = 1, groups: int = 1, act: Any = nn.ReLU, norm: Any = nn.BatchNorm2d
) -> nn.Sequential:
    parts: list[nn.Module] = [nn.Conv2d(ic, oc, kernel, stride, kernel // 2, groups=groups, bias=False), norm(oc)]
    return nn.Sequential(*parts, *([] if act is None else [act()]))


def _head(channels: int) -> list[nn.Module]:
    return [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, 1000)]


class _Sum(nn.Module):
    """act(inner(x) + shortcut(x))."""

    def __init__(self, inner: nn.Module, shortcut: nn.Module | None = None, act: nn.Module | None = None) -> None:
        super().__init__()
        self.inner, self.shortcut, self.act = inner, shortcut or nn.Identity(), act or nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.act(self.inner(x) + self.shortcut(x))
        return found


class _Branches(nn.Module):
    """The concatenation of what branches give of one input."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


class _Squeeze(nn.Module):
    """Squeeze-and-excite: a gate for each channel."""

    def __init__(self, channels: int, inner: int, act: Any = nn.ReLU, gate: Any = nn.Sigmoid) -> None:
        super().__init__()
        self.gate = nn.Sequential(
            nn.AdaptiveAvgPool2d(1), nn.Conv2d(channels, inner, 1), act(), nn.Conv2d(inner, channels, 1), gate()
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = x * self.gate(x)
        return found


def vgg11_bn() -> nn.Module:
    """Simonyan and Zisserman, 2014, with batch norms."""
    layers: list[nn.Module] = []
    ic = 3
    for width in (64, 0, 128, 0, 256, 256, 0, 512, 512, 0, 512, 512, 0):
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(ic, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU(inplace=True)]
        ic = width
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(True), nn.Linear(4096, 4096), nn.ReLU(True), nn.Linear(4096, 1000)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(7), nn.Flatten(), *head)


def regnety_800mf() -> nn.Module:
    """Radosavovic et al., "Designing Network Design Spaces", 2020: groups of 16 channels, squeeze-and-excite."""
    layers: list[nn.Module] = [_conv(3, 32, 3, 2)]
    ic = 32
    for width, count in ((64, 1), (144, 3), (320, 8), (784, 2)):
        for block in range(count):
            stride = 1 if block else 2
            parts = [_conv(ic, width), _conv(width, width, 3, stride, width // 16), _Squeeze(width, ic // 4)]
            shortcut = None if block else _conv(ic, width, 1, stride, act=None)
            layers.append(_Sum(nn.Sequential(*parts, _conv(width, width, act=None)), shortcut, nn.ReLU(True)))
            ic = width
    return nn.Sequential(*layers, *_head(ic))


def _inverted(stages: Sequence[Any], first: int, last: int, act: Any) -> nn.Module:
    layers: list[nn.Module] = [_conv(3, first, 3, 2, act=act)]
    ic = first
    for expand, oc, count, step, kernel in stages:
        for block in range(count):
            width, stride = ic * expand, 1 if block else step
            parts = [_conv(ic, width, act=act)] if expand > 1 else []
            parts += [_conv(width, width, kernel, stride, width, act), _Squeeze(width, max(1, ic // 4), act)]
            inner = nn.Sequential(*parts, _conv(width, oc, act=None))
            layers.append(_Sum(inner) if ic == oc and stride == 1 else inner)
            ic = oc
    return nn.Sequential(*layers, _conv(ic, last, act=act), *_head(last))


def efficientnet_b0() -> nn.Module:
    """Tan and Le, 2019, without stochastic depth."""
    stages = ((1, 16, 1, 1, 3), (6, 24, 2, 2, 3), (6, 40, 2, 2, 5), (6, 80, 3, 2, 3), (6, 112, 3, 1, 5),
              (6, 192, 4, 2, 5), (6, 320, 1, 1, 3))  # fmt: skip
    return _inverted(stages, 32, 1280, nn.SiLU)


def mobilenetv3() -> nn.Module:
    """Howard et al., 2019, about its large one: hard-swish in all layers, gates in all blocks."""
    stages = ((1, 16, 1, 1, 3), (4, 24, 2, 2, 3), (3, 40, 3, 2, 5), (6, 80, 4, 2, 3), (6, 112, 2, 1, 3),
              (6, 160, 3, 2, 5))  # fmt: skip
    return _inverted(stages, 16, 960, nn.Hardswish)


class _Dense(nn.Module):
    def __init__(self, ic: int, growth: int) -> None:
        super().__init__()
        self.inner = nn.Sequential(nn.BatchNorm2d(ic), nn.ReLU(), _conv(ic, 4 * growth))
        self.last = nn.Conv2d(4 * growth, growth, 3, padding=1, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat([x, self.last(self.inner(x))], 1)


def densenet121() -> nn.Module:
    """Huang et al., 2016."""
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    ic = 64
    for count in (6, 12, 24, 16):
        if ic > 64:
            layers += [nn.BatchNorm2d(ic), nn.ReLU(), nn.Conv2d(ic, ic // 2, 1, bias=False), nn.AvgPool2d(2)]
            ic //= 2
        for _ in range(count):
            layers.append(_Dense(ic, 32))
            ic += 32
    return nn.Sequential(*layers, nn.BatchNorm2d(ic), nn.ReLU(), *_head(ic))


def resnext26() -> nn.Module:
    """Xie et al., 2016: 32 groups, two blocks a stage."""
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    ic = 64
    for width in (128, 256, 512, 1024):
        for block in range(2):
            stride = 2 if width > 128 and not block else 1
            parts = [_conv(ic, width), _conv(width, width, 3, stride, 32), _conv(width, 2 * width, act=None)]
            shortcut = None if block else _conv(ic, 2 * width, 1, stride, act=None)
            layers.append(_Sum(nn.Sequential(*parts), shortcut, nn.ReLU(True)))
            ic = 2 * width
    return nn.Sequential(*layers, *_head(ic))


def googlenet() -> nn.Module:
    """Szegedy et al., 2014, with batch norms and without its side heads."""
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1), _conv(64, 64), _conv(64, 192, 3)]
    ic = 192
    for sizes in ((), (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64), (), (192, 96, 208, 16, 48, 64),
                  (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64),
                  (256, 160, 320, 32, 128, 128), (), (256, 160, 320, 32, 128, 128),
                  (384, 192, 384, 48, 128, 128)):  # fmt: skip
        if not sizes:
            layers.append(nn.MaxPool2d(3, 2, 1))
            continue
        one, before3, three, before5, five, pooled = sizes
        layers.append(
            _Branches(
                _conv(ic, one),
                nn.Sequential(_conv(ic, before3), _conv(before3, three, 3)),
                nn.Sequential(_conv(ic, before5), _conv(before5, five, 3)),
                nn.Sequential(nn.MaxPool2d(3, 1, 1), _conv(ic, pooled)),
            )
        )
        ic = one + three + five + pooled
    return nn.Sequential(*layers, *_head(ic))


class _Shuffled(nn.Module):
    """A unit of ShuffleNetV2; stride 2 for other channels than `ic`."""

    def __init__(self, ic: int, oc: int) -> None:
        super().__init__()
        self.splits, half = ic == oc, oc // 2
        stride, inner = (1, half) if self.splits else (2, ic)
        self.left = nn.Identity() if self.splits else self._arm(ic, half, first=False)
        self.right = nn.Sequential(_conv(inner, half), _conv(half, half, 3, stride, half, act=None), _conv(half, half))

    @staticmethod
    def _arm(ic: int, oc: int, first: bool) -> nn.Module:
        return nn.Sequential(_conv(ic, ic, 3, 2, ic, act=None), _conv(ic, oc))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two = x.chunk(2, 1) if self.splits else (x, x)
        return functional.channel_shuffle(torch.cat([self.left(one), self.right(two)], 1), 2)


def shufflenetv2() -> nn.Module:
    """Ma et al., 2018."""
    layers: list[nn.Module] = [_conv(3, 24, 3, 2), nn.MaxPool2d(3, 2, 1)]
    ic = 24
    for width, count in ((116, 4), (232, 8), (464, 4)):
        for _ in range(count):
            layers.append(_Shuffled(ic, width))
            ic = width
    return nn.Sequential(*layers, _conv(ic, 1024), *_head(1024))


def squeezenet() -> nn.Module:
    """Iandola et al., 2016: no norms."""

    def conv(ic: int, oc: int, kernel: int = 1) -> nn.Module:
        return nn.Sequential(nn.Conv2d(ic, oc, kernel, padding=kernel // 2), nn.ReLU(True))

    layers: list[nn.Module] = [nn.Conv2d(3, 64, 3, 2), nn.ReLU(True), nn.MaxPool2d(3, 2)]
    ic = 64
    for squeeze, expand in ((16, 64), (16, 64), (0, 0), (32, 128), (32, 128), (0, 0), (48, 192), (48, 192), (64, 256),
                            (64, 256)):  # fmt: skip
        if not squeeze:
            layers.append(nn.MaxPool2d(3, 2))
            continue
        layers += [conv(ic, squeeze), _Branches(conv(squeeze, expand), conv(squeeze, expand, 3))]
        ic = 2 * expand
    return nn.Sequential(*layers, conv(ic, 1000), nn.AdaptiveAvgPool2d(1), nn.Flatten())


class _Attention(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.qkv, self.out = heads, nn.Linear(width, 3 * width), nn.Linear(width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4).unbind()
        found: torch.Tensor = self.out(functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return found


class ViT(nn.Module):
    """Dosovitskiy et al., 2020: the tiny one, patches of 16 pixels, the mean of all tokens."""

    def __init__(self, width: int = 192, depth: int = 12, heads: int = 3) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, width, 16, 16)
        blocks: list[nn.Module] = []
        for _ in range(depth):
            wide = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU())
            blocks.append(_Sum(nn.Sequential(nn.LayerNorm(width), _Attention(width, heads))))
            blocks.append(_Sum(nn.Sequential(wide, nn.Linear(4 * width, width))))
        self.blocks, self.norm, self.head = nn.Sequential(*blocks), nn.LayerNorm(width), nn.Linear(width, 1000)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2)
        found: torch.Tensor = self.head(self.norm(self.blocks(tokens)).mean(1))
        return found


class Denoiser(nn.Module):
    """A U-Net as diffusion models have it: group norms, SiLU, nearest resizing; it gives one channel."""

    def __init__(self, first: int = 48) -> None:
        super().__init__()
        widths = [first, 2 * first, 4 * first]
        self.start = nn.Conv2d(3, first, 3, 2, 1)
        self.down = nn.ModuleList(map(self._block, (first, *widths[:-1]), widths))
        self.up = nn.ModuleList(self._block(a + b, b) for a, b in zip(widths[:0:-1], widths[-2::-1], strict=True))
        self.pool, self.head = nn.AvgPool2d(2), nn.Conv2d(first, 1, 3, padding=1)

    @staticmethod
    def _block(ic: int, oc: int) -> nn.Module:
        def half(c: int) -> list[nn.Module]:
            return [nn.GroupNorm(8, c), nn.SiLU(), nn.Conv2d(c, oc, 3, padding=1)]

        return _Sum(nn.Sequential(*half(ic), *half(oc)), None if ic == oc else nn.Conv2d(ic, oc, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, skips = self.start(x), list[torch.Tensor]()
        for down in self.down:
            x = down(self.pool(x) if skips else x)
            skips.append(x)
        for up, skip in zip(self.up, skips[-2::-1], strict=True):
            x = up(torch.cat([functional.interpolate(x, scale_factor=2), skip], 1))
        found: torch.Tensor = self.head(functional.interpolate(x, scale_factor=2))
        return found


class Detector(nn.Module):
    """A detector in the manner of YOLOv8: SiLU, split blocks, resized and concatenated maps of three sizes."""

    def __init__(self, first: int = 32) -> None:
        super().__init__()
        w = [first << k for k in range(5)]
        self.stem = nn.Sequential(_conv(3, w[0] // 2, 3, 2, act=nn.SiLU), self._down(w[0] // 2, w[0]))
        self.stages = nn.ModuleList(self._down(a, b) for a, b in itertools.pairwise(w[:4]))
        self.merge = nn.ModuleList(self._block(a + b, b) for a, b in ((w[3], w[2]), (w[2], w[1])))
        self.heads = nn.ModuleList(nn.Sequential(_conv(c, c, 3, act=nn.SiLU), nn.Conv2d(c, 84, 1)) for c in w[3:0:-1])
        self.last = nn.Linear(84, 1000)

    @staticmethod
    def _block(ic: int, oc: int) -> nn.Module:
        inner = nn.Sequential(_conv(oc // 2, oc // 2, 3, act=nn.SiLU), _conv(oc // 2, oc // 2, 3, act=nn.SiLU))
        parts = _Branches(_conv(ic, oc // 2, act=nn.SiLU), nn.Sequential(_conv(ic, oc // 2, act=nn.SiLU), _Sum(inner)))
        return nn.Sequential(parts, _conv(oc, oc, act=nn.SiLU))

    def _down(self, ic: int, oc: int) -> nn.Module:
        return nn.Sequential(_conv(ic, oc, 3, 2, act=nn.SiLU), self._block(oc, oc))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x, maps = self.stem(x), list[torch.Tensor]()
        for stage in self.stages:
            x = stage(x)
            maps.append(x)
        found = [maps[-1]]
        for merge, other in zip(self.merge, maps[1::-1], strict=True):
            found.append(merge(torch.cat([functional.interpolate(found[-1], scale_factor=2), other], 1)))
        scores = [head(each).flatten(2).mean(2) for head, each in zip(self.heads, found, strict=True)]
        made: torch.Tensor = self.last(torch.stack(scores).mean(0))
        return made


NETWORKS: dict[str, Callable[[], nn.Module]] = {
    **MODULES,
    "vgg11_bn": vgg11_bn,
    "regnety_800mf": regnety_800mf,
    "efficientnet_b0": efficientnet_b0,
    "mobilenetv3": mobilenetv3,
    "densenet121": densenet121,
    "resnext26": resnext26,
    "googlenet": googlenet,
    "shufflenetv2": shufflenetv2,
    "squeezenet": squeezenet,
    "vit_tiny": ViT,
    "denoiser": Denoiser,
    "detector": Detector,
}
