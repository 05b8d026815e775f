"""Small PyTorch modules: one for each op that the PyTorch front end reads, and small networks of known kinds."""

from __future__ import annotations

import pytest

torch = pytest.importorskip("torch")
nn, F = torch.nn, torch.nn.functional


class Apply(nn.Module):
    """A function as a module, with buffers of its own."""

    def __init__(self, function, **buffers):
        super().__init__()
        self.function = function
        for name, value in buffers.items():
            self.register_buffer(name, value)

    def forward(self, *x):
        return self.function(*x, **dict(self.named_buffers()))


class Residual(nn.Module):
    """ResNet's basic block."""

    def __init__(self, c, out, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv2d(c, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out)
        self.conv2, self.bn2 = nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out)
        self.relu = nn.ReLU(inplace=True)
        self.downsample = nn.Sequential(nn.Conv2d(c, out, 1, stride, bias=False), nn.BatchNorm2d(out))

    def forward(self, x):
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        return self.relu(y + self.downsample(x))


class Inverted(nn.Module):
    """MobileNet's block, with squeeze and excitation."""

    def __init__(self, c, wide):
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(c, wide, 1), nn.BatchNorm2d(wide), nn.Hardswish())
        self.depthwise = nn.Sequential(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide), nn.BatchNorm2d(wide), nn.ReLU6())
        self.squeeze = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 8, 1), nn.ReLU(), nn.Conv2d(8, wide, 1))
        self.project = nn.Conv2d(wide, c, 1)

    def forward(self, x):
        y = self.depthwise(self.expand(x))
        return x + self.project(y * F.hardsigmoid(self.squeeze(y)))


class UNet(nn.Module):
    """Down, up, and a concatenation."""

    def __init__(self):
        super().__init__()
        self.down, self.below = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        self.up = nn.Conv2d(24, 4, 3, padding=1)

    def forward(self, x):
        skip = F.relu(self.down(x))
        below = F.silu(self.below(F.max_pool2d(skip, 2)))
        wide = F.interpolate(below, scale_factor=2, mode="bilinear", align_corners=False)
        return self.up(torch.cat([skip, wide], 1))


class Shuffled(nn.Module):
    """ShuffleNet's: half of the channels pass by."""

    def __init__(self):
        super().__init__()
        self.conv, self.shuffle = nn.Conv2d(8, 8, 3, padding=1), nn.ChannelShuffle(2)

    def forward(self, x):
        a, b = x.chunk(2, 1)
        return self.shuffle(torch.cat([a, self.conv(b)], 1))


def resnet():
    return nn.Sequential(
        nn.Conv2d(3, 8, 7, 2, 3), nn.MaxPool2d(3, 2, 1), Residual(8, 8), Residual(8, 16, 2), nn.AdaptiveAvgPool2d(1),
        nn.Flatten(), nn.Linear(16, 10),
    )  # fmt: skip


def mobilenet():
    return nn.Sequential(nn.Conv2d(3, 8, 3, 2, 1), Inverted(8, 24), Inverted(8, 24), nn.AdaptiveAvgPool2d((2, 2)))


def unet():
    return UNet()


def shuffled():
    return nn.Sequential(nn.Conv2d(3, 16, 3), Shuffled(), Shuffled())


NETWORKS = {"resnet": resnet, "mobilenet": mobilenet, "unet": unet, "shuffled": shuffled}


def made(make, seed=0):
    """A module in eval mode, whose batch norms have other statistics than 0 and 1."""
    torch.manual_seed(seed)
    module = make().eval()
    for part in module.modules():
        if isinstance(part, nn.BatchNorm2d) and part.track_running_stats:
            part.running_mean.normal_()
            part.running_var.uniform_(0.5, 2)
    return module
