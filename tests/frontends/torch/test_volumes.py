"""3-D networks of PyTorch: native from end to end, and their volumes are images in between."""

from __future__ import annotations

import numpy as np
import pytest
from torch_models import Apply, F, made, nn, torch

import blockconv as bc
from blockconv.network.passes.fuse import fuse


class Block(nn.Module):
    """R3D's block."""

    def __init__(self, c, out, stride=1):
        super().__init__()
        self.conv1, self.bn1 = nn.Conv3d(c, out, 3, stride, 1, bias=False), nn.BatchNorm3d(out)
        self.conv2, self.bn2 = nn.Conv3d(out, out, 3, 1, 1, bias=False), nn.BatchNorm3d(out)
        self.down = nn.Sequential(nn.Conv3d(c, out, 1, stride, bias=False), nn.BatchNorm3d(out)) if stride > 1 else None

    def forward(self, x):
        y = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(x)))))
        return F.relu(y + (self.down(x) if self.down else x))


def resnet():
    """A small R3D."""
    stem = nn.Conv3d(3, 16, (3, 7, 7), (1, 2, 2), (1, 3, 3), bias=False), nn.BatchNorm3d(16), nn.ReLU()
    blocks = Block(16, 16), Block(16, 32, 2)
    return nn.Sequential(*stem, nn.MaxPool3d(3, 2, 1), *blocks, nn.AdaptiveAvgPool3d(1), nn.Flatten(), nn.Linear(32, 7))


class UNet(nn.Module):
    """Down, up by a transposed convolution, and a concatenation."""

    def __init__(self, norm=nn.BatchNorm3d):
        super().__init__()
        self.down = nn.Sequential(nn.Conv3d(1, 16, 3, padding=1), norm(16), nn.LeakyReLU(0.1))
        self.below = nn.Sequential(nn.MaxPool3d(2), nn.Conv3d(16, 32, 3, padding=1), norm(32), nn.LeakyReLU(0.1))
        self.up = nn.ConvTranspose3d(32, 16, 2, 2)
        self.last = nn.Sequential(nn.Conv3d(32, 16, 3, padding=1), norm(16), nn.LeakyReLU(0.1), nn.Conv3d(16, 3, 1))

    def forward(self, x):
        skip = self.down(x)
        return self.last(torch.cat([skip, self.up(self.below(skip))], 1))


def separable():
    """MobileNet's and R(2+1)D's convolutions, and pools of averages."""
    mixed = nn.Conv3d(8, 8, 3, 1, 1, groups=8), nn.BatchNorm3d(8), nn.Hardswish(), nn.Conv3d(8, 16, 1), nn.ReLU6()
    apart = nn.Conv3d(16, 16, (1, 3, 3), padding=(0, 1, 1)), nn.ReLU(), nn.Conv3d(16, 16, (3, 1, 1), (2, 1, 1))
    return nn.Sequential(nn.Conv3d(3, 8, 1), *mixed, *apart, nn.AvgPool3d(2, ceil_mode=True), nn.AdaptiveAvgPool3d(2))


NETWORKS = {
    "R3D": (resnet, (1, 3, 4, 16, 16), 2, 0),
    "U-Net": (UNet, (1, 1, 4, 8, 8), 2, 0),
    "separable": (separable, (1, 3, 6, 8, 10), 2, 0),
    "instance norm": (lambda: UNet(nn.InstanceNorm3d), (1, 1, 4, 8, 8), 10, 3),
    "trilinear": (lambda: nn.Upsample(scale_factor=2, mode="trilinear"), (2, 1, 4, 8, 8), 0, 0),
    "several volumes": (UNet, (2, 1, 4, 8, 8), 2, 0),
}


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sampled(2)
def test_a_network_is_torchs_and_native(name):
    make, shape, transposes, activations = NETWORKS[name]
    module, x = made(make), volume(shape)
    network = bc.from_torch(module, x, strict=True)
    fused = fuse(network)
    kinds = [node.op for node in fused.nodes]
    assert (kinds.count("transpose"), kinds.count("activation")) == (transposes, activations), fused.summary()
    for found in (network.evaluate(x.numpy()), fused.evaluate(x.numpy())):
        check(*found.values(), module(x))


W, V = torch.linspace(-1, 1, 144).view(4, 4, 1, 3, 3), torch.linspace(-2, 1, 4).view(4, 1, 1, 1)
BETWEEN = {  # of y, a convolution's result, and how often volumes become images or images volumes
    "elements": (lambda y: F.relu(y * 2 + y.sigmoid()), 2),
    "a constant of channels": (lambda y: F.relu(torch.maximum(y, V)), 2),
    "a constant of slices": (lambda y: y * torch.linspace(1, 2, 3).view(3, 1, 1), 4),
    "a mask": (lambda y: y * F.adaptive_avg_pool3d(y, 1).sigmoid(), None),
    "channels": (lambda y: F.relu(torch.cat([y, y], 1)[:, :4]), None),
    "slices": (lambda y: torch.cat([y, F.relu(y)], 2), 2),
    "rows": (lambda y: torch.cat([y, -y], 3), 2),
    "columns": (lambda y: torch.cat([y, -y], 4), 2),
    "volumes": (lambda y: torch.cat([y, -y], 0), None),
    "an output": (lambda y: torch.flip(y, (2,)) + y.tanh(), None),
}


@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("name", BETWEEN)
@pytest.mark.sampled(4)
def test_what_is_between_convolutions(name, n):
    function, transposes = BETWEEN[name]
    module = Apply(lambda x, w: F.conv3d(function(F.conv3d(x, w, padding=(0, 1, 1))), w), w=W)
    x = volume((n, 4, 3, 4, 5))
    fused = fuse(bc.from_torch(module, x, strict=True))
    (found,) = fused.evaluate(x.numpy()).values()
    check(found, module(x))
    assert transposes in (None, [node.op for node in fused.nodes].count("transpose")), fused.summary()


@pytest.mark.slow
def test_torch_compile_takes_the_trilinear_op():
    module = nn.Sequential(nn.Conv3d(1, 4, 3), nn.Upsample(scale_factor=2, mode="trilinear")).eval()
    fast = torch.compile(module, backend="blockconv")
    with torch.no_grad():
        for shape in ((1, 1, 4, 5, 6), (2, 1, 5, 4, 7)):
            check(fast(volume(shape)), module(volume(shape)))
    assert [(graph.taken, graph.nodes) for graph in bc.torch.report(fast)] == [(2, 2)] * 2


@pytest.mark.parametrize("name", ["U-Net", "separable", "trilinear"])
@pytest.mark.sampled(3)
def test_no_volumes(name):
    make, shape, *_ = NETWORKS[name]
    module, x = made(make), volume((0, *shape[1:]))
    network = bc.from_torch(module, volume(shape))
    for net in (network, fuse(network)):
        (found,) = net.with_input_shapes(x.shape).evaluate(x.numpy()).values()
        assert found.shape == module(x).shape


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sampled(6)
def test_a_compiled_network_is_torchs(name):
    make, shape, *_ = NETWORKS[name]
    module, x = made(make), volume(shape)
    plan = bc.compile(bc.from_torch(module, x, strict=True))
    check(plan(x.numpy()), module(x))


def volume(shape):
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))


def check(found, wanted):
    wanted = wanted.detach().numpy()
    np.testing.assert_allclose(found, wanted, rtol=1e-4, atol=1e-5 * np.abs(wanted).max())
