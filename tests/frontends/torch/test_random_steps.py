"""Steps of training of random networks, beside float64.

Eager PyTorch gives the yardstick: a value may be 20 times as far from float64 as eager's, or 5e-4 of the largest one.
Eager runs contiguous and without oneDNN, whose gradient of a strided 1x1 convolution of three channels_last channels
ends the process.
"""

from __future__ import annotations

import copy
import random

import pytest
from torch_models import F, nn, torch

ACTIVATIONS = (
    nn.ReLU, nn.SiLU, nn.GELU, nn.Hardswish, nn.LeakyReLU, nn.ELU, nn.Sigmoid, nn.Tanh, nn.Mish, nn.Softplus, nn.ReLU6,
    nn.PReLU, nn.Hardsigmoid, lambda: nn.ReLU(inplace=True), nn.Identity,
)  # fmt: skip


WAYS = {
    "add": lambda x, y: x + y,
    "gate": lambda x, y: x * torch.sigmoid(y),
    "concatenate": lambda x, y: torch.cat([x, y], 1),
    "subtract": lambda x, y: (x - y) * 0.5,
}
# Kinds of parts, some more often than others.
KINDS = "convolution convolution depthwise transposed norm norm activation pool se attention up join"


class Joined(nn.Module):
    """An input together with what a module makes of it."""

    def __init__(self, way, inner):
        super().__init__()
        self.way, self.inner = way, inner

    def forward(self, x):
        return WAYS[self.way](x, self.inner(x))


class Squeezed(nn.Module):
    """Squeeze and excitation."""

    def __init__(self, c):
        super().__init__()
        self.down, self.up = nn.Conv2d(c, max(1, c // 4), 1), nn.Conv2d(max(1, c // 4), c, 1)

    def forward(self, x):
        return x * torch.sigmoid(self.up(F.silu(self.down(x.mean((2, 3), keepdim=True)))))


class Attended(nn.Module):
    """Attention of the pixels, and a residual."""

    def __init__(self, c, heads):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(c)
        self.projected, self.back = nn.Linear(c, 3 * c), nn.Linear(c, c)

    def forward(self, x):
        n, c, h, w = x.shape
        rows = x.flatten(2).transpose(1, 2)
        split = self.projected(self.norm(rows)).reshape(n, h * w, 3, self.heads, c // self.heads)
        y = F.scaled_dot_product_attention(*split.permute(2, 0, 3, 1, 4)).transpose(1, 2).reshape(n, h * w, c)
        return (rows + self.back(y)).transpose(1, 2).reshape(n, c, h, w)


class NormOfPixels(nn.LayerNorm):
    """The layer norm of each pixel."""

    def forward(self, x):
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


def norm(r, c):
    groups = r.choice([g for g in (1, 2, 4, 8) if c % g == 0])
    makers = (
        nn.BatchNorm2d, nn.BatchNorm2d, NormOfPixels, lambda c: nn.BatchNorm2d(c, affine=False),
        lambda c: nn.BatchNorm2d(c, track_running_stats=False), lambda c: nn.GroupNorm(groups, c),
        lambda c: nn.InstanceNorm2d(c, affine=groups > 1), lambda c: nn.LocalResponseNorm(3), lambda c: nn.Identity(),
    )  # fmt: skip
    return r.choice(makers)(c)


def convolution(r, c):
    out, k, side = r.choice([4, 6, 8, 12, 16, 24]), r.choice([1, 1, 3, 3, 5]), r.choice([0, 1])
    groups = r.choice([g for g in (1, 1, 1, 2, 4) if c % g == 0 and out % g == 0])
    mode = r.choice(["zeros"] * 4 + ["reflect", "circular"]) if k < 5 else "zeros"
    kernel, pads = ((k, k), k // 2) if side else ((k, 1), (k // 2, 0))
    return nn.Conv2d(c, out, kernel, r.choice([1, 1, 2]), pads, 1, groups, r.random() < 0.5, mode), out


def part(r, c):
    """(a module that reads `c` channels, how many it writes)."""
    kind = r.choice(KINDS.split())
    if kind == "convolution":
        return convolution(r, c)
    if kind == "depthwise":
        out = c * r.choice([1, 1, 2])
        return nn.Conv2d(c, out, r.choice([3, 5]), r.choice([1, 2]), 2, groups=c, bias=r.random() < 0.5), out
    if kind == "transposed":
        return nn.ConvTranspose2d(c, 8, r.choice([2, 3, 4]), r.choice([1, 2]), r.choice([0, 1])), 8
    if kind == "norm":
        return norm(r, c), c
    if kind == "pool":
        pools = (
            nn.MaxPool2d(2, ceil_mode=True), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1, count_include_pad=False),
            nn.AvgPool2d(2, 2), nn.AdaptiveAvgPool2d((4, 3)), nn.AdaptiveMaxPool2d(4),
        )  # fmt: skip
        return r.choice(pools), c
    if kind == "se":
        return Squeezed(c), c
    if kind == "attention" and c % 4 == 0:
        return Attended(c, r.choice([1, 2, 4])), c
    if kind == "up":
        return nn.Upsample(scale_factor=2, mode=r.choice(["nearest", "bilinear", "bicubic"])), c
    if kind == "join":
        way, first = r.choice([*WAYS]), nn.Conv2d(c, c, 3, padding=1, bias=False)
        inner = nn.Sequential(first, norm(r, c), r.choice(ACTIVATIONS)(), nn.Conv2d(c, c, 1), norm(r, c))
        return Joined(way, inner), c * (1 + (way == "concatenate"))
    return r.choice(ACTIVATIONS)(), c


def network(r):
    """(a random network in training mode, its input's channels)."""
    first = c = r.choice([1, 3, 4, 8])
    parts = []
    for _ in range(r.randint(4, 12)):
        made, c = part(r, c)
        parts.append(made)
    model = nn.Sequential(
        *parts, *([nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c, 5)] if r.random() < 0.5 else [])
    )
    for parameter in model.parameters():
        parameter.requires_grad_(r.random() < 0.85)
    return model, first


def steps(model, call, images, flows):
    """All results of some steps, by names; parameters keep their values, and gradients add up."""
    found = {}
    for k, x in enumerate(images):
        x = x.clone().requires_grad_(flows)
        y = call(x)
        y.square().mean().backward()
        found |= {f"output {k}": y.detach(), f"gradient {k}": x.grad}
    return found | {f"gradient of {name}": p.grad for name, p in model.named_parameters()} | dict(model.named_buffers())


def error(found, wanted):
    return float((found.double() - wanted).abs().max() / (wanted.abs().max() + 1e-30)) if wanted.numel() else 0.0


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(60))
@pytest.mark.sampled(20)
def test_steps_of_random_networks_are_near_float64(seed):
    r = random.Random(seed)
    torch.manual_seed(seed)
    torch._dynamo.reset()
    model, c = network(r)
    size, batch, flows = r.choice([(8, 8), (16, 12), (9, 17), (24, 24)]), r.choice([2, 3, 4]), r.random() < 0.6
    formats = [r.choice([torch.contiguous_format, torch.channels_last]) for _ in range(2)]
    images = [torch.randn(n, c, *size) for n in (batch, batch, batch + 1)]
    own, exact = copy.deepcopy(model).to(memory_format=formats[0]), copy.deepcopy(model).double()
    try:
        with torch.backends.mkldnn.flags(enabled=False):
            eager = steps(model, model, images, flows)
    except (RuntimeError, ValueError) as refused:  # windows that do not fit, or nothing that trains
        pytest.skip(str(refused))
    wanted = steps(exact, exact, [x.double() for x in images], flows)
    call = torch.compile(own, backend="blockconv", fullgraph=True)
    found = steps(own, call, [x.to(memory_format=formats[1]) for x in images], flows)
    assert {name for name, x in found.items() if x is None} == {name for name, x in eager.items() if x is None}
    for name, x in wanted.items():
        if x is not None and x.abs().max() > 1e-7:  # gradients that are 0 but for rounding
            assert error(found[name], x) <= max(5e-4, 20 * error(eager[name], x)), name
