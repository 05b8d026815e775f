"""`python -m bench modules`: PyTorch modules as they are, and with `torch.nn.functional.conv2d` replaced by ours.

Nothing else is changed: batch norms, activations and pools are PyTorch's. Each call packs the weights, as it does for a
user who only imports another `conv2d`. Modules are as torchvision builds them, with random weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from rich.table import Table
from torch import nn
from torch.nn import functional

import blockconv as bc

from .grid import Grid
from .timing import compare

__all__ = ["FORMATS", "MODULES", "measure", "replaced", "table"]

FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}


def _conv(ic: int, oc: int, kernel: int, stride: int = 1, groups: int = 1, act: Any = nn.ReLU) -> nn.Sequential:
    conv = nn.Conv2d(ic, oc, kernel, stride, kernel // 2, groups=groups, bias=False)
    return nn.Sequential(conv, nn.BatchNorm2d(oc), *([] if act is None else [act(inplace=True)]))


class _Residual(nn.Module):
    """inner(x) + shortcut(x), and an activation."""

    def __init__(self, inner: nn.Module, shortcut: nn.Module, act: nn.Module) -> None:
        super().__init__()
        self.inner, self.shortcut, self.act = inner, shortcut, act

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.act(self.inner(x) + self.shortcut(x))
        return found


def _resnet(depths: Sequence[int], bottleneck: bool) -> nn.Module:
    layers: list[nn.Module] = [_conv(3, 64, 7, 2), nn.MaxPool2d(3, 2, 1)]
    ic = 64
    for k, (width, count) in enumerate(zip((64, 128, 256, 512), depths, strict=True)):
        for block in range(count):
            stride, oc = (2 if k and not block else 1), (4 * width if bottleneck else width)
            parts = [_conv(ic, width, 1), _conv(width, width, 3, stride)] if bottleneck else [_conv(ic, oc, 3, stride)]
            inner = nn.Sequential(*parts, _conv(width, oc, 1 if bottleneck else 3, act=None))
            shortcut = nn.Identity() if ic == oc and stride == 1 else _conv(ic, oc, 1, stride, act=None)
            layers.append(_Residual(inner, shortcut, nn.ReLU(inplace=True)))
            ic = oc
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(ic, 1000))


def resnet18() -> nn.Module:
    """He et al., "Deep Residual Learning for Image Recognition", 2015."""
    return _resnet((2, 2, 2, 2), bottleneck=False)


def resnet50() -> nn.Module:
    """The larger one of the same paper; strides are in the 3x3, as in torchvision."""
    return _resnet((3, 4, 6, 3), bottleneck=True)


def mobilenetv2() -> nn.Module:
    """Sandler et al., "MobileNetV2: Inverted Residuals and Linear Bottlenecks", 2018."""
    layers: list[nn.Module] = [_conv(3, 32, 3, 2, act=nn.ReLU6)]
    ic = 32
    for expand, oc, count, first in ((1, 16, 1, 1), (6, 24, 2, 2), (6, 32, 3, 2), (6, 64, 4, 2), (6, 96, 3, 1),
                                     (6, 160, 3, 2), (6, 320, 1, 1)):  # fmt: skip
        for block in range(count):
            width, stride = expand * ic, first if not block else 1
            parts = [_conv(ic, width, 1, act=nn.ReLU6)] if expand > 1 else []
            parts += [_conv(width, width, 3, stride, width, act=nn.ReLU6), _conv(width, oc, 1, act=None)]
            inner = nn.Sequential(*parts)
            layers.append(_Residual(inner, nn.Identity(), nn.Identity()) if ic == oc and stride == 1 else inner)
            ic = oc
    last = _conv(ic, 1280, 1, act=nn.ReLU6)
    return nn.Sequential(*layers, last, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(1280, 1000))


class UNet(nn.Module):
    """Ronneberger et al., "U-Net", 2015, with batch norms and 32 channels first, for one class."""

    def __init__(self, first: int = 32, depth: int = 4) -> None:
        super().__init__()
        widths = [first << k for k in range(depth + 1)]
        self.down = nn.ModuleList(map(self._pair, (3, *widths), widths))
        self.up = nn.ModuleList(nn.ConvTranspose2d(2 * c, c, 2, 2) for c in widths[-2::-1])
        self.merge = nn.ModuleList(self._pair(2 * c, c) for c in widths[-2::-1])
        self.pool, self.head = nn.MaxPool2d(2), nn.Conv2d(first, 1, 1)

    @staticmethod
    def _pair(ic: int, oc: int) -> nn.Module:
        return nn.Sequential(_conv(ic, oc, 3), _conv(oc, oc, 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        skips: list[torch.Tensor] = []
        for down in self.down:
            x = down(self.pool(x) if skips else x)
            skips.append(x)
        for up, merge, skip in zip(self.up, self.merge, skips[-2::-1], strict=True):
            x = merge(torch.cat([up(x), skip], 1))
        found: torch.Tensor = self.head(x)
        return found


class _Norm(nn.LayerNorm):
    """Over the channels of (N, C, H, W)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class _Next(nn.Module):
    def __init__(self, c: int) -> None:
        super().__init__()
        self.depthwise, self.norm = nn.Conv2d(c, c, 7, padding=3, groups=c), nn.LayerNorm(c, eps=1e-6)
        self.wide, self.narrow = nn.Linear(c, 4 * c), nn.Linear(4 * c, c)
        self.scale = nn.Parameter(torch.full((c, 1, 1), 1e-6))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.depthwise(x).permute(0, 2, 3, 1))
        y = self.narrow(functional.gelu(self.wide(y))).permute(0, 3, 1, 2)
        return x + self.scale * y


def convnext_t() -> nn.Module:
    """Liu et al., "A ConvNet for the 2020s", 2022; without stochastic depth."""
    layers: list[nn.Module] = [nn.Conv2d(3, 96, 4, 4), _Norm(96, eps=1e-6)]
    for c, count in ((96, 3), (192, 3), (384, 9), (768, 3)):
        layers += [] if c == 96 else [_Norm(c // 2, eps=1e-6), nn.Conv2d(c // 2, c, 2, 2)]
        layers += [_Next(c) for _ in range(count)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), _Norm(768, eps=1e-6), nn.Flatten(), nn.Linear(768, 1000))


MODULES: dict[str, Callable[[], nn.Module]] = {
    "resnet50": resnet50,
    "resnet18": resnet18,
    "mobilenetv2": mobilenetv2,
    "unet": UNet,
    "convnext_t": convnext_t,
}


@contextmanager
def replaced() -> Iterator[None]:
    """`torch.nn.functional.conv2d`, which `torch.nn.Conv2d` calls, is ours."""
    own = functional.conv2d
    functional.conv2d = bc.conv2d
    try:
        yield
    finally:
        functional.conv2d = own


def measure(name: str, layout: str, threads: int, rounds: int) -> tuple[float, float, float]:
    """(PyTorch's milliseconds, ours, the largest difference over the largest output) of one image of 224 x 224."""
    torch.manual_seed(0)
    torch.set_num_threads(threads)
    bc.set_num_threads(threads)
    module = MODULES[name]().eval()
    for part in module.modules():
        if isinstance(part, nn.Conv2d):  # by default values vanish from layer to layer
            nn.init.kaiming_normal_(part.weight)
    module = module.to(memory_format=FORMATS[layout])
    x = torch.randn(1, 3, 224, 224).to(memory_format=FORMATS[layout])

    def ours() -> torch.Tensor:
        with replaced():
            found: torch.Tensor = module(x)
        return found

    with torch.no_grad():
        wanted = module(x)
        error = float((ours() - wanted).abs().max() / wanted.abs().max())
        found = compare({"torch": lambda: module(x), "ours": ours}, rounds=rounds)
    return found["torch"].median * 1e-6, found["ours"].median * 1e-6, error


def table(rows: Sequence[tuple[str, str, int, float, float, float]]) -> Table:
    """rows: name, memory format, threads, and what `measure` gave."""
    heads = "module", "format", "threads", "PyTorch, ms", "ours, ms", "times as fast", "difference"
    cells = [
        (name, layout, str(threads), f"{theirs:.1f}", f"{ours:.1f}", f"{theirs / ours:.2f}", f"{error:.0e}")
        for name, layout, threads, theirs, ours, error in rows
    ]
    return Grid("PyTorch modules, conv2d replaced", heads, cells, range(2)).table()
