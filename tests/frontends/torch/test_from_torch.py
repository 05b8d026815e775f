"""Modules of PyTorch as networks: values against eager, names, memory, and what is refused."""

from __future__ import annotations

import copy
import pickle
import re
import warnings
from pathlib import Path

import numpy as np
import pytest
import torch_models
from torch_models import NETWORKS, Apply, F, made, nn, torch

import blockconv as bc
from blockconv.core.errors import UnsupportedError
from blockconv.frontends.torch.ops import OPS as READ
from blockconv.network import lowering
from blockconv.network.limits import Limits
from blockconv.network.passes.fuse import fuse

IMAGE, ROW, MATRIX = (2, 6, 8, 10), (2, 6, 11), (3, 6)
V6 = torch.linspace(0.5, 2, 6)


def _written(x):
    y = x.clone()
    y[:, :2] += 1
    y[:, 3] = x[:, 0] * 2
    y[..., 4:7] = 0.5
    return y


def _written_apart(x):
    y = x.clone()
    y[:, ::2] = x[:, 1::2].sigmoid()
    y[:, 1, 1::3] = 7
    return y


def _convolved_by_values(x):
    w, b = x[0, :, :3, :4].reshape(12, 3, 1, 2).expand(-1, -1, 3, -1), x[0, :, 0, :2].reshape(12)
    return F.conv2d(x, w, b, (2, 1), (1, 2), (2, 3), 2) * F.conv2d(x, x[:1, :, :1, :1].flip(1))[:, :, :1, :1]


class FastLayer(nn.TransformerEncoderLayer):
    """As PyTorch's fast path calls it."""

    def __init__(self, *flags, mask=()):
        super().__init__(6, 2, 8)
        self.flags, self.mask = flags, mask

    def forward(self, x):
        w = [*self.parameters()]
        return torch._transformer_encoder_layer_fwd(x, 6, 2, *w[:4], *self.flags, 1e-5, *w[8:], *w[4:8], *self.mask)


OPS = {
    "conv": (lambda: nn.Conv2d(6, 8, 3, 2, 1, 1, 2), IMAGE),
    "conv asymmetric": (lambda: nn.Conv2d(6, 8, (3, 2), (1, 2), (0, 1), (2, 1), bias=False), IMAGE),
    "conv same": (lambda: nn.Conv2d(6, 8, 4, padding="same"), IMAGE),
    "conv reflect": (lambda: nn.Conv2d(6, 8, 3, padding=1, padding_mode="zeros"), (6, 8, 10)),
    "conv1d": (lambda: nn.Conv1d(6, 8, 3, 2, 1), ROW),
    "conv transposed": (lambda: nn.ConvTranspose2d(6, 8, 3, 2, 1, 1, 2), IMAGE),
    "conv transposed asymmetric": (
        lambda: nn.ConvTranspose2d(6, 8, (3, 2), (1, 3), (0, 1), (0, 2), bias=False, dilation=(2, 1)),
        IMAGE,
    ),
    "conv transposed 1d": (lambda: nn.ConvTranspose1d(6, 8, 3, 2, 1, 1), ROW),
    "conv by values": (lambda: Apply(_convolved_by_values), IMAGE),
    "conv1d by values": (lambda: Apply(lambda x: F.conv1d(x, x[:, :3, :4].repeat(1, 2, 1), padding=1)), ROW),
    "linear": (lambda: nn.Linear(6, 5), MATRIX),
    "linear 3d": (lambda: nn.Linear(11, 5, bias=False), ROW),
    "linear of image": (lambda: nn.Sequential(nn.Flatten(), nn.Linear(480, 5)), IMAGE),
    "addmm": (lambda: Apply(lambda x, b, w: torch.addmm(b, x, w), b=torch.randn(4), w=torch.randn(6, 4)), MATRIX),
    "addmm scaled": (
        lambda: Apply(lambda x, b, w: torch.addmm(b, x, w, beta=0.5, alpha=2), b=torch.randn(4), w=torch.randn(6, 4)),
        MATRIX,
    ),
    "mm": (lambda: Apply(lambda x, w: x @ w, w=torch.randn(6, 4)), MATRIX),
    "addmm of values": (lambda: Apply(lambda x: torch.addmm(x[0], x, x.t() @ x)), MATRIX),
    "linear of values": (lambda: Apply(lambda x: F.linear(x, x[0, :, :], x[0, 0, :6])), ROW),
    "bmm": (lambda: Apply(lambda x: (x @ x.mT).bmm(x) + x.bmm(x.mT @ x)), ROW),
    "baddbmm": (lambda: Apply(lambda x: torch.baddbmm(x[:1, :1], x, x.mT @ x, beta=0.5, alpha=2)), ROW),
    "matmul": (lambda: Apply(lambda x, v: v @ (x @ x.mT) @ x[0, 0], v=torch.randn(3, 8)), IMAGE),
    "einsum": (lambda: Apply(lambda x: torch.einsum("bchw,bdhw->bcd", x, x)), IMAGE),
    "attention": (lambda: Apply(lambda x: F.scaled_dot_product_attention(x, x * 2, x[:, :1])), IMAGE),
    "attention of constants": (
        lambda: Apply(lambda x, q: x * F.scaled_dot_product_attention(q, q, q), q=torch.randn(1, 6, 8, 10)),
        IMAGE,
    ),
    "attention causal": (lambda: Apply(lambda x: F.scaled_dot_product_attention(x, x, x, is_causal=True)), IMAGE),
    "attention masked": (
        lambda: Apply(lambda x, m: F.scaled_dot_product_attention(x, x, x, m, scale=0.3), m=torch.randn(8, 8)),
        IMAGE,
    ),
    "attention of nothing": (
        lambda: Apply(lambda x, m: F.scaled_dot_product_attention(x, x, x, m), m=torch.arange(64).view(8, 8) > 20),
        IMAGE,
    ),
    "attention of shared heads": (
        lambda: Apply(lambda x: F.scaled_dot_product_attention(x, x[:, :2], x[:, 2:4], enable_gqa=True)),
        IMAGE,
    ),
    "attention of a layer": (
        lambda: Apply(
            lambda x, w, b, o, c: torch._native_multi_head_attention(x, x, x, 11, 1, w, b, o, c, None, False)[0],
            w=torch.arange(363).view(33, 11) % 5 - 2.0,
            b=torch.arange(33) / 9,
            o=torch.arange(121).view(11, 11) % 3 - 1.0,
            c=torch.arange(11) / 7,
        ),
        ROW,
    ),
    "attention by parts": (lambda: Apply(lambda x: (x * 0.3 @ x.mT + 1).softmax(-1) @ x.relu()), IMAGE),
    "batch norm": (lambda: nn.BatchNorm2d(6), IMAGE),
    "batch norm plain": (lambda: nn.BatchNorm2d(6, affine=False), IMAGE),
    "batch norm 1d": (lambda: nn.BatchNorm1d(6), MATRIX),
    "group norm": (lambda: nn.GroupNorm(2, 6), IMAGE),
    "group norm plain": (lambda: nn.GroupNorm(3, 6, affine=False), ROW),
    "layer norm": (lambda: nn.LayerNorm((8, 10)), IMAGE),
    "layer norm plain": (lambda: nn.LayerNorm(11, elementwise_affine=False), ROW),
    "rms norm": (lambda: nn.RMSNorm((8, 10), 0.1), IMAGE),
    "rms norm plain": (lambda: nn.RMSNorm(11, elementwise_affine=False), ROW),
    "instance norm": (lambda: nn.InstanceNorm2d(6, affine=True), IMAGE),
    "batch norm of the batch": (lambda: nn.BatchNorm2d(6, track_running_stats=False), IMAGE),
    "batch norm of rows": (lambda: nn.BatchNorm1d(6, affine=False, track_running_stats=False), (5, 6)),
    **{
        name: (getattr(nn, name), IMAGE)
        for name in ("ReLU", "ReLU6", "SiLU", "Sigmoid", "Hardswish", "Hardsigmoid", "GELU", "Mish", "Tanh", "ELU")
    },
    "hardtanh": (lambda: nn.Hardtanh(-0.5, 0.25), IMAGE),
    "clamp": (lambda: Apply(lambda x: x.clamp(-0.5).clamp_max(0.5).clamp(-0.1, 0.2)), IMAGE),
    "leaky_relu": (lambda: nn.LeakyReLU(0.2), IMAGE),
    "elu": (lambda: nn.ELU(0.3), IMAGE),
    "selu": (nn.SELU, IMAGE),
    "celu": (lambda: nn.CELU(0.7), IMAGE),
    "prelu": (lambda: nn.PReLU(6), IMAGE),
    "gelu tanh": (lambda: nn.GELU("tanh"), IMAGE),
    "softplus": (nn.Softplus, IMAGE),
    "softplus beta": (lambda: nn.Softplus(2.5), IMAGE),
    **{
        f"{name} {kind}": (lambda f=f, o=options: Apply(lambda x: f(x, **o)), IMAGE)
        for name, f in (
            ("var", torch.var),
            ("std", torch.std),
            ("var_mean", lambda x, **o: sum(torch.var_mean(x, **o))),
        )
        for kind, options in {
            "all": {},
            "axes": {"dim": (2, 3), "keepdim": True},
            "biased": {"dim": -1, "correction": 0},
        }.items()
    },
    **{
        f"{name} {kind}": (lambda f=f: Apply(f), IMAGE)
        for name, reduce in (("max", torch.max), ("min", torch.min))
        for kind, f in {
            "all": reduce,
            "axis": lambda x, r=reduce: r(x, 1)[0],
            "two": lambda x, r=reduce: r(x, x * 2),
            "keepdim": lambda x, r=reduce: r(x, -1, keepdim=True)[0],
        }.items()
    },
    "flip": (lambda: Apply(lambda x: x.flip(1, -1)), IMAGE),
    "roll": (lambda: Apply(lambda x: x.roll((3, -2), (1, 3))), IMAGE),
    "index": (lambda: Apply(lambda x, i: x[:, i], i=torch.tensor([[3, 1], [0, -1]])), IMAGE),
    "index of pixels": (
        lambda: Apply(lambda x, h, w: x[:, :, h[:, None], w], h=torch.tensor([7, 0]), w=torch.tensor([1, 3, 5])),
        IMAGE,
    ),
    "columns of windows": (lambda: nn.Unfold((3, 2), (2, 1), 1, (1, 3)), IMAGE),
    "windows that overlap": (lambda: Apply(lambda x: x.unfold(2, 5, 2).unfold(3, 4, 3) * 2), IMAGE),
    "part written": (lambda: Apply(lambda x: _written(x)), IMAGE),
    "parts written apart": (lambda: Apply(_written_apart), IMAGE),
    "filled": (lambda: Apply(lambda x: x + torch.full_like(x, 3) * x.new_ones(10)), IMAGE),
    "wrapped pad": (lambda: Apply(lambda x: F.pad(x, (1, 2, 2, 1), mode="circular")), IMAGE),
    "upsample 1d": (lambda: nn.Upsample(scale_factor=2, mode="linear"), ROW),
    "upsample 1d to size": (lambda: nn.Upsample(17, mode="linear", align_corners=True), ROW),
    "softsign": (nn.Softsign, IMAGE),
    "rounded": (lambda: Apply(lambda x: x.floor() + x.ceil() * 2 + x.round() * 3), IMAGE),
    "functions": (lambda: Apply(lambda x: x.abs().sqrt().log().exp() + x.erf() + x.sin() * x.cos()), IMAGE),
    "root": (lambda: Apply(lambda x: (x * x + 1) ** 0.5 + (x.abs() + 1).rsqrt() - x**3), IMAGE),
    "trilinear": (lambda: nn.Upsample(scale_factor=(2, 1.5, 0.6), mode="trilinear"), (2, 3, 4, 6, 5)),
    "trilinear corners": (lambda: nn.Upsample((5, 4, 9), mode="trilinear", align_corners=True), (1, 3, 4, 6, 5)),
    "powers of a parameter": (lambda: Apply(lambda x, p: x.abs() ** p + x.abs() ** (1 / p), p=V6[1:2]), IMAGE),
    "powers": (lambda: Apply(lambda x: x.abs() ** (1 / 3) + x.abs().pow(-1.7) + x**4 - (x - 9) ** 5), IMAGE),
    "add": (lambda: Apply(lambda x, v: x + v[:, None, None] + 2 + torch.add(x, x, alpha=0.5), v=V6), IMAGE),
    "sub": (lambda: Apply(lambda x, v: 1 - (x - v[:, None, None]) - 2 * x.mean(1, True), v=V6), IMAGE),
    "mul": (lambda: Apply(lambda x, v: x * v[:, None, None] * 3 * x.mean((2, 3), True) * -x, v=V6), IMAGE),
    "div": (lambda: Apply(lambda x, v: x / v[:, None, None] / 2 + 1 / (x * x + 1), v=V6), IMAGE),
    "maximum": (lambda: Apply(lambda x: torch.maximum(x, -x * 2).minimum(x**2)), IMAGE),
    "outer": (lambda: Apply(lambda x: x.mean(2, True) * x.mean(3, True)), IMAGE),
    "max pool": (lambda: nn.MaxPool2d(3, 2, 1, ceil_mode=True), IMAGE),
    "max pool dilated": (lambda: nn.MaxPool2d((2, 3), 1, dilation=2), IMAGE),
    "max pool 1d": (lambda: nn.MaxPool1d(3, 2, 1), ROW),
    "avg pool": (lambda: nn.AvgPool2d(3, 2, 1), IMAGE),
    "avg pool excluding": (lambda: nn.AvgPool2d(3, 2, 1, count_include_pad=False), IMAGE),
    "avg pool divisor": (lambda: nn.AvgPool2d(2, divisor_override=3), IMAGE),
    "avg pool 1d": (lambda: nn.AvgPool1d(3, 2, 1), ROW),
    "adaptive avg": (lambda: nn.AdaptiveAvgPool2d((3, 4)), IMAGE),
    "adaptive avg 1": (lambda: nn.AdaptiveAvgPool2d(1), IMAGE),
    "adaptive avg 1d": (lambda: nn.AdaptiveAvgPool1d(3), ROW),
    "adaptive max": (lambda: nn.AdaptiveMaxPool2d((4, 5)), IMAGE),
    "adaptive max of all": (lambda: nn.AdaptiveMaxPool2d(1), IMAGE),
    "adaptive max of unequal windows": (lambda: nn.AdaptiveMaxPool2d((3, 7)), IMAGE),
    "amax": (lambda: Apply(lambda x: x.amax((2, 3))), IMAGE),
    "mean": (lambda: Apply(lambda x: x.mean((-2, -1)) + x.mean(1)[:, 0, :6]), IMAGE),
    "mean of all": (lambda: Apply(lambda x: x * x.mean()), IMAGE),
    "sum": (lambda: Apply(lambda x: x.sum(1)), IMAGE),
    "extremes": (lambda: Apply(lambda x: x.amax(1) - x.amin((0, 3), keepdim=True)[:, 0]), IMAGE),
    "norms": (lambda: Apply(lambda x: x.norm(p=2, dim=(2, 3), keepdim=True) * x.norm(p=1, dim=1, keepdim=True)), IMAGE),
    "cat": (lambda: Apply(lambda x: torch.cat([x, F.relu(x), x], -1)), IMAGE),
    "stack": (lambda: Apply(lambda x: torch.stack([x, F.relu(x)], 1)), ROW),
    "slice": (lambda: Apply(lambda x: x[:, 1:5:2, -3:, 2]), IMAGE),
    "split": (lambda: Apply(lambda x: torch.cat(x.split([1, 2, 3], 1)[::-1], 1) + torch.cat(x.split(4, 1), 1)), IMAGE),
    "chunk": (lambda: Apply(lambda x: x.chunk(3, 1)[1] * x.unbind(3)[4][..., None][:, :2]), IMAGE),
    "view": (lambda: Apply(lambda x: x.view(2, 3, -1).reshape(6, 160).unflatten(0, (2, 3)).flatten(1)), IMAGE),
    "permute": (lambda: Apply(lambda x: x.permute(0, 2, 3, 1).transpose(1, 3).mT), IMAGE),
    "t": (lambda: Apply(lambda x: F.relu(x).t()), MATRIX),
    "squeeze": (lambda: Apply(lambda x: x[:, :1].unsqueeze(0).squeeze(0).squeeze().unsqueeze(-1).squeeze(2, 3)), IMAGE),
    "expand": (lambda: Apply(lambda x: x[:, :1].expand(-1, 3, 8, 10) + x[0, 0].expand(2, 3, 8, 10)), IMAGE),
    "repeat": (lambda: Apply(lambda x: x.repeat(1, 2, 1, 3) * x.expand(3, 2, 6, 8, 10).repeat(1, 1, 2, 1, 3)), IMAGE),
    "repeat often": (lambda: Apply(lambda x: x.repeat(1, 1, 70, 1)), IMAGE),
    "index select": (lambda: Apply(lambda x, v: x.index_select(1, v), v=torch.tensor([5, 3, 1, 0, 2])), IMAGE),
    "pad": (lambda: Apply(lambda x: F.pad(x, (1, 2, -1, 3), value=0.5)), IMAGE),
    "zero pad": (lambda: nn.ZeroPad2d(2), IMAGE),
    "nearest": (lambda: nn.Upsample(scale_factor=(2, 1.5)), IMAGE),
    "nearest size": (lambda: nn.Upsample((5, 13)), IMAGE),
    "nearest exact": (lambda: nn.Upsample((5, 13), mode="nearest-exact"), IMAGE),
    "nearest as float32 rounds": (lambda: nn.Upsample((82, 20)), IMAGE),
    "nearest exact as float32 rounds": (lambda: nn.Upsample((41, 9), mode="nearest-exact"), IMAGE),
    "nearest by a scale of about 2": (lambda: nn.Upsample(scale_factor=(2.05, 1.7)), IMAGE),
    "bilinear": (lambda: nn.Upsample(scale_factor=1.7, mode="bilinear"), IMAGE),
    "bilinear corners": (lambda: nn.Upsample((5, 13), mode="bilinear", align_corners=True), IMAGE),
    "bilinear corners by scale": (
        lambda: nn.Upsample(scale_factor=(1.7, 0.6), mode="bilinear", align_corners=True),
        IMAGE,
    ),
    "bicubic": (lambda: nn.Upsample(scale_factor=(1.7, 0.6), mode="bicubic"), IMAGE),
    "bicubic corners": (lambda: nn.Upsample((5, 13), mode="bicubic", align_corners=True), IMAGE),
    **{
        f"{mode} antialias to {size}{' corners' * corners}": (
            lambda m=mode, s=size, c=corners: Apply(
                lambda x: F.interpolate(x, s, mode=m, antialias=True, align_corners=c)
            ),
            IMAGE,
        )
        for mode in ("bilinear", "bicubic")
        for size, corners in (((3, 13), False), ((16, 4), True))
    },
    "antialias by scales": (
        lambda: Apply(lambda x: F.interpolate(x, scale_factor=(0.4, 0.7), mode="bicubic", antialias=True)),
        IMAGE,
    ),
    "softmax": (lambda: nn.Sequential(nn.Softmax(-1), nn.Softmax2d()), IMAGE),
    "log softmax": (lambda: nn.Sequential(nn.LogSoftmax(-1), nn.LogSoftmax(1)), IMAGE),
    **{
        f"grid sample {mode} {outside}": (
            lambda m=mode, o=outside: Apply(
                lambda x, g: F.grid_sample(x, g.sin() * 1.6 + x[:, 0, :1, None, :2], m, o, o == "border"),
                g=torch.arange(2 * 5 * 7 * 2).view(2, 5, 7, 2) / 3,
            ),
            IMAGE,
        )
        for mode in ("bilinear", "nearest", "bicubic")
        for outside in ("zeros", "border", "reflection")
    },
    **{
        f"encoder layer with a mask of kind {kind}": (
            lambda m=mask, k=kind: FastLayer(k == 1, False, mask=(m, k)),
            (2, 5, 6),
        )
        for kind, mask in (
            (0, torch.eye(5).log()),
            (1, torch.arange(10).view(2, 5) % 4 > 2),
            (2, torch.arange(100).view(2, 2, 5, 5) % 3 > 1),
        )
    },
    "encoder layer": (lambda: FastLayer(False, False), (2, 5, 6)),
    "encoder layer with norms first": (lambda: FastLayer(True, True), (2, 5, 6)),
    "reflected": (lambda: nn.Sequential(nn.ReflectionPad2d((1, 3, 0, 2)), nn.ReplicationPad2d((4, 0, 1, 1))), IMAGE),
    "channel shuffle": (lambda: nn.ChannelShuffle(3), IMAGE),
    "channel shuffle 1d": (lambda: nn.ChannelShuffle(2), ROW),
    "pixel shuffle": (lambda: nn.Sequential(nn.PixelUnshuffle(2), nn.PixelShuffle(2)), IMAGE),
    "dropout": (lambda: nn.Sequential(nn.Dropout(), nn.Identity(), nn.Dropout2d()), IMAGE),
    "clone": (lambda: Apply(lambda x: x.clone().contiguous().detach()), IMAGE),
    "to": (lambda: Apply(lambda x: x.to(torch.bfloat16).to(torch.float32)), IMAGE),
    "empty parts": (lambda: Apply(lambda x: torch.cat([*x.split([0, 2, 4], 1), x[:, 5:3].relu()], 1)), IMAGE),
    "of constants": (lambda: Apply(lambda x, v: x * (v * 2).exp()[:, None, None] + torch.arange(10), v=V6), IMAGE),
}


def error(found, wanted):
    found, wanted = np.asarray(found, np.float64), np.asarray(wanted.detach().double())
    assert found.shape == wanted.shape
    return np.abs(found - wanted).max() / max(1e-30, np.abs(wanted).max())


def given(shape):
    return torch.from_numpy(np.random.default_rng(0).standard_normal(shape, np.float32))


@pytest.mark.slow
@pytest.mark.parametrize("name", OPS)  # all of them gate a merge: each is the one test of a line of the table
def test_an_op_is_torchs(name):
    make, shape = OPS[name]
    module, x = made(make), given(shape)
    network = bc.from_torch(module, x, strict=True)
    (found,) = network.evaluate(x.numpy()).values()
    assert error(found, module(x)) < 1e-5


@pytest.mark.parametrize("part", [lambda x: x[:, 3:3], lambda x: x.split([6, 0], 1)[1], lambda x: x[:, :0] * 2 + 1])
def test_an_empty_part_is_native(part):
    x = given((2, 6, 5, 4))
    found = bc.compile(bc.from_torch(Apply(part), x, strict=True), threads=1)(x.numpy())
    assert (found.shape, found.dtype) == (part(x).shape, np.float32)


TABLE = torch.from_numpy(np.random.default_rng(4).standard_normal((6, 3), np.float32))
SOME = torch.tensor([[3, 1, 4], [1, 5, 0]])
POINTS = torch.from_numpy(np.random.default_rng(5).uniform(-1.3, 1.3, (2, 2, 1, 5, 3)).astype(np.float32))
MORE = "erfc", "expm1", "log1p", "log2", "log10", "exp2", "trunc"


def _put(x, at, value):
    y = x.clone()
    y[at] = value
    return y


ELEMENTS = {  # of floats (2, 6, 8), with a NaN and infinities, and of int64 (2, 6)
    "comparisons": lambda x, k: [x > 0.1, x <= x.flip(1), x != x, k >= 2.5, k[:, None] == x[..., :6], k.byte() < 3],
    "logic": lambda x, k: [
        (x > 0) & (x < 1) | ~x.isnan(),
        torch.logical_xor(k, x[:, 0, :6]),
        x.logical_not(),
        k & 3 | k ^ ~k,
    ],
    "masks": lambda x, k: [
        x.tril(1),
        k.triu(-1),
        x.masked_fill(x > 0, -1e9),
        torch.where(x > 0, 1, 0),
        torch.where(x > 0, x, k[:, :, None]),
        x.isinf(),
        x.isfinite(),
    ],
    "signs": lambda x, k: [x.sign(), (k - 3).sign(), (k - 3).abs(), (k - 3).byte().abs(), -k, x.isnan().sign()],
    "any and all": lambda x, k: [
        (x > 0).any(1),
        x.all(-1, keepdim=True),
        (k > 8).any(),
        k.byte().any(0),
        torch.any(x, dim=(0, 2)),
    ],
    "numbers": lambda x, k: [
        *(
            (k - 3) // 2,
            (k - 3) % -4,
            torch.fmod(k - 3, -4),
            torch.div(k - 3, 2, rounding_mode="trunc"),
            k / 2,
            2 - k,
            k + 0.5,
        ),
        *(
            torch.add(k, k, alpha=3),
            torch.rsub(x, x * x, alpha=3),
            k.int() + k.byte(),
            (x > 0) + (x < 1),
            (x > 0) * x,
            torch.maximum(k, k.flip(1)),
        ),
    ],
    "conversions": lambda x, k: [
        *((x.nan_to_num(0, 9, -9) * 40).to(to) for to in (torch.int64, torch.int32, torch.uint8, torch.int8)),
        *(x.bool(), k.bool(), x.double(), k.byte().float() / 255, k.to(torch.bfloat16), x.isnan().long()),
    ],
    "bounds": lambda x, k: [
        x.clamp(x[:, :1], x[:, 1:2]),
        k.clamp(1, 3),
        k.clamp(1.5),
        k.clamp(max=k.flip(0)),
        x.clamp_min(k[..., None]),
    ],
    "sums": lambda x, k: [
        *((x > 0).sum(1), k.sum(), k.int().sum(1, True), k.prod(1), k.cumsum(0), (x > 0).cumsum(-1)),
        *(x[:, 4:].cumsum(1), x[0].cumprod(0), (x > 0).float().mean(), k.sum(dtype=torch.float32)),
    ],
    "extremes": lambda x, k: [*x.max(1), *x.min(2, keepdim=True), k.amax(0), k.max(), *k.min(1), (x > 0).max(1)[1]],
    "places of extremes": lambda x, k: [x.argmax(1), x.argmin(), k.argmax(0, keepdim=True), x.argmax(keepdim=True)],
    "largest": lambda x, k: [*x[1, 4:].topk(3), *(k * 6 + torch.arange(6)).topk(2, 1, largest=False)],
    "logarithms of sums": lambda x, k: [x.logsumexp(1), x.logsumexp((0, 2), keepdim=True), x.logsumexp((0, 1, 2))],
    "indices": lambda x, k: [
        x.gather(1, k[:, None, :1]),
        x.take_along_dim(k[:, None, :1], 1),
        x.index_select(1, k[0]),
        *(
            x[:, k[0]],
            x[:, k - 6],
            x[k[0] % 2, k[1] - 6],
            x[:, k[0], k[1]],
            x[k[:, :1] % 2, :, k],
            x[:, SOME, k[0, :3]],
        ),
        x[:, SOME, SOME[0]],
        F.embedding(k, TABLE),
        F.one_hot(k, 7),
    ],
    "moves": lambda x, k: [
        k[:, :1].repeat(1, 80),
        torch.cat([k.T.reshape(2, -1), k[:, ::2], k.flip(1)], 1).expand(3, 2, -1).repeat(2, 1, 1),
        torch.cat([k, x[:, 0]], 1),
        torch.stack([x > 0, x < 0], 1),
        k.roll(1, 1).unbind(1)[2],
    ],
    "functions": lambda x, k: [
        *(getattr(torch, name)(y) for name in MORE for y in (x * 3, x * 1e-10)),
        *(x.frac(), torch.atan2(x, x.flip(1)), torch.atan2(k, k.flip(1)), x.abs() ** x.flip(1), 2**x),
    ],
    "rounded quotients": lambda x, k: [
        *(
            torch.div(x, y, rounding_mode=how)
            for y in (0.1, -3.0, 0.0, x.flip(1), k[..., None])
            for how in ("floor", "trunc")
        ),
    ],
    "remainders": lambda x, k: [x % 0.7, x % -0.7, x % 0.0, x % x.flip(1), x.fmod(0.7), x[:, :1].fmod(x), k % -1.5],
    "norms": lambda x, k: [
        *(torch.linalg.vector_norm(x, order, 1) for order in (0, 1, 2, 3, -0.5, np.inf, -np.inf)),
        torch.linalg.vector_norm(x.half() * 200, 2, (0, 2), True),
        torch.linalg.vector_norm(x, 3, dtype=torch.float64),
    ],
    "updates": lambda x, k: [
        x.scatter(1, k[:, None, :4], 1.5),
        x.scatter(2, k[:, :, None], x.flip(1)),
        x.scatter_add(1, k[:, :, None], x),
        k.scatter(1, k, 3, reduce="multiply"),
        *(
            y.scatter_reduce(1, k[:, None, :4], y[:, :1, :4], how, include_self=itself)
            for y in (x, (x.nan_to_num(0, 9, -9) * 40).int())
            for how in ("sum", "prod", "amax", "amin", "mean")
            for itself in (True, False)
        ),
        x.index_add(1, k[0], x, alpha=2),
        x.index_copy(1, torch.tensor([3, 0]), x[:, :2] * 2),
        *(_put(x, at, value) for at, value in ((x > 0, 7), (x[..., 0] > 0, np.nan), ((slice(None), x[0] > 0), -1))),
        _put(x, (slice(None), SOME), x[:, :1, None]),
        _put(x, (k[:, 0] % 2, slice(None), SOME[0, :2]), 2),
        _put(x, (slice(None), torch.tensor([2, -1]), torch.tensor([0, 7])), x[:, 0, :2]),
    ],
    "orders": lambda x, k: [
        *(y for at in (0, 2) for down in (True, False) for y in x.sort(dim=at, descending=down, stable=True)),
        *(k.argsort(dim=1, descending=True, stable=True), k.byte().sort(dim=0, stable=True)[1]),
        *(x.topk(3, largest=False)[0], x.msort()),
    ],
    "diagonals": lambda x, k: [
        x.diagonal(2, 1, 2),
        x.diagonal(-1, 0, 2),
        torch.einsum("bii->bi", x[..., :6]),
        k.diag(),
    ],
    "columns as images": lambda x, k: [
        F.fold(x[:, :4, :6], (4, 3), 2, 1, 0, 1),
        F.fold(x, (3, 4), (2, 3), (1, 2), (1, 2), (2, 1)),
        F.fold(x[0, :, :6], (4, 5), (2, 3), padding=(0, 1), stride=2),
    ],
    "points of volumes": lambda x, k: [
        F.grid_sample(x.nan_to_num(1, 1, 1).view(2, 3, 2, 4, 2), POINTS, mode, outside, align_corners=mode == "nearest")
        for mode in ("bilinear", "nearest")
        for outside in ("zeros", "border", "reflection")
    ],
    "mask of attention": lambda x, k: [
        F.scaled_dot_product_attention(*[x[:, :3].nan_to_num(1, 1, 1)] * 3, x[:, :3, :3] > 0)
    ],
}


def numbers():
    x = given((2, 6, 8))
    x[0, 2, 3], x[1, 1, 1], x[0, 0, 5], x[0, :, 6], x[0, 0, 0] = np.nan, np.inf, np.inf, -np.inf, 0
    x[1, 3, :3] = x[1, 2, :3]
    return x, torch.from_numpy(np.random.default_rng(1).integers(0, 6, (2, 6)))


def check_exactly(found, wanted):
    for a, b in zip(found, wanted, strict=True):
        a = a if isinstance(a, torch.Tensor) else torch.from_numpy(a.view(np.int16) if a.dtype.kind == "V" else a)
        a = a.view(b.dtype) if b.dtype == torch.bfloat16 else a
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6, equal_nan=True)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", ELEMENTS)
def test_numbers_of_any_type_are_torchs(name):
    module, (x, k) = Apply(ELEMENTS[name]), numbers()
    network = bc.from_torch(module, (x, k), strict=True)
    found = network.evaluate({tensor.name: y.numpy() for tensor, y in zip(network.inputs, (x, k), strict=True)})
    check_exactly(found.values(), module(x, k))


@pytest.mark.parametrize(
    ("module", "why"),
    [
        (lambda x, k: k // k, "may be 0"),
        (lambda x, k: k % (k - 2), "may be 0"),
        (lambda x, k: x.repeat(1, 1, 40).topk(2, largest=False)[0], "of 320 elements of float32"),
        (lambda x, k: x.repeat(1, 1, 40).sort(descending=True)[0], r"of shape \(2, 6, 320\)"),
        (
            lambda x, k: (
                x.byte() + torch.tensor([300]).byte() - 2 + (k > 0).byte()[:, :, None] * 3 + k.byte()[..., None] == 300
            ),
            "300 as uint8",
        ),
    ],
)
def test_what_numbers_pytorch_keeps(module, why):
    with pytest.raises(UnsupportedError, match=why):
        bc.from_torch(Apply(module), numbers(), strict=True)


@pytest.mark.slow
def test_masks_and_indices_are_one_native_call():
    """Padded tokens: looked up, attended with a mask, and the one with the largest number taken."""

    def attend(ids):
        x = F.embedding(ids, TABLE)
        scores = (x @ x.mT).masked_fill((ids == 0)[:, None], -1e9)
        places = (ids != 0).cumsum(1)
        y = (scores.softmax(-1) @ x)[torch.arange(2), ids.argmax(-1)]
        return y, places, *y.topk(2)

    ids = torch.tensor([[3, 1, 4, 1, 5, 0], [2, 5, 0, 0, 0, 0]])
    plan = bc.compile(bc.from_torch(Apply(attend), ids, strict=True))
    for given in (ids, ids.flip(1)):
        check_exactly(plan(given).values(), attend(given))


@pytest.mark.parametrize(
    ("function", "least"),
    [
        (lambda x, k: x.index_select(1, k), 0),
        (lambda x, k: x.gather(1, k[None]), 0),
        (lambda x, k: F.embedding(k, x), 0),
        (lambda x, k: x[:, k], -3),
        (lambda x, k: x[k, k - 1], -2),
    ],
)
def test_an_index_that_pytorch_refuses_raises(function, least):
    x, k = torch.arange(9.0).view(3, 3), torch.tensor([1])
    network = bc.from_torch(Apply(function), (x, k), strict=True)
    first, second = (tensor.name for tensor in network.inputs)
    plan = bc.compile(network, threads=1)
    for index in range(-5, 5):
        given = {first: x.numpy(), second: np.array([index])}
        if least <= index < 3:
            check_exactly(network.evaluate(given).values(), [function(x, k * 0 + index)])
            continue
        for run in (network.evaluate, lambda given: plan(**given)):
            text = rf"indices=({index}|{index - 1}): have to be {-3 if least else 0} to 2"
            with pytest.raises(bc.NetworkError, match=text):
                run(given)


def test_a_large_expansion_is_copies(monkeypatch):
    monkeypatch.setattr(lowering, "MOST_ONES", 100)
    module, x = Apply(lambda x: torch.cat([x[:, :, :1, :1].expand(-1, -1, 8, 10), x], 1)), given(IMAGE)
    network = bc.from_torch(module, x)
    assert {node.op for node in network.nodes} <= {"slice", "gather", "concat"}
    (found,) = network.evaluate(x.numpy()).values()
    assert error(found, module(x)) == 0


def test_an_expansion_to_its_own_size_is_nothing():
    """Whatever its size: PyTorch writes them before products of batches."""
    x = given((1, 1, 2100, 2100))
    network = bc.from_torch(Apply(lambda x: torch.relu(x.expand(-1, -1, -1, -1))), x, strict=True)
    assert [node.op for node in network.nodes] == ["activation"]


RECURRENT = [
    (nn.LSTM, {"num_layers": 2, "bidirectional": True, "batch_first": True}),
    (nn.LSTM, {"bias": False}),
    (nn.GRU, {"bidirectional": True}),
    (nn.GRU, {"num_layers": 3, "batch_first": True, "dropout": 0.5}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("kind", "options"), RECURRENT)
@pytest.mark.sampled(2)
def test_recurrent_layers_are_torchs(kind, options):
    module, x = made(lambda: kind(11, 7, **options)), given(ROW)
    d = 1 + options.get("bidirectional", False)
    first = given((d * options.get("num_layers", 1), 2 if options.get("batch_first") else 6, 7))
    states = (first, first * 2) if kind is nn.LSTM else first
    for args in ((x,), (x, states)):
        network = bc.from_torch(module, args, strict=True)
        assert any(node.op == "recurrent" for node in network.nodes)
        y, last = module(*args)
        wanted = [y, *(last if kind is nn.LSTM else [last])]
        arrays = [tensor.numpy() for tensor in (x, first, first * 2)][: len(network.inputs)]
        found = bc.compile(network)(*arrays)
        assert all(error(a, b) < 1e-5 for a, b in zip(found.values(), wanted, strict=True))


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sampled(2)
def test_a_network_is_torchs(name):
    module, x = made(NETWORKS[name]), given((2, 3, 16, 16))
    plan = bc.compile(bc.from_torch(module, (x,)))
    for tensor in (x, x.to(memory_format=torch.channels_last), x.repeat(1, 1, 2, 1)[:, :, ::2]):
        assert error(plan(tensor), module(tensor)) < 1e-5
    assert pickle.loads(pickle.dumps(plan))(x).equal(plan(x))
    assert copy.deepcopy(plan.network).summary() == plan.network.summary()


def test_constants_are_the_modules_parameters_by_name_and_memory():
    module = made(torch_models.resnet)
    network = bc.from_torch(module, given((1, 3, 16, 16)))
    parameters = dict(module.named_parameters())
    assert {"0.weight", "2.conv1.weight", "3.downsample.0.weight", "6.weight", "6.bias"} <= {*network.constants}
    for name, value in network.constants.items():
        if name in parameters:
            assert np.shares_memory(value, parameters[name].detach().numpy()), name
            assert not value.flags.writeable
    assert [node.name for node in network.nodes][:3] == ["0", "1", "2.conv1"]


def test_a_shared_weight_is_one_constant():
    conv = nn.Conv2d(6, 6, 3, padding=1)
    network = bc.from_torch(nn.Sequential(conv, nn.ReLU(), conv), given(IMAGE))
    assert len(network.constants) == 2


def test_sizes_change_as_the_exporter_was_told():
    module = made(torch_models.resnet)
    batch = torch.export.Dim("batch", min=2, max=64)
    network = bc.from_torch(module, given((2, 3, 16, 16)), ({0: batch},))
    plan = bc.compile(network)
    for n in (2, 5):
        x = given((n, 3, 16, 16))
        assert error(plan(x), module(x)) < 1e-5
    for other in ((1, 3, 16, 16), (65, 3, 16, 16), (2, 3, 16, 18)):  # as in PyTorch
        with pytest.raises(
            bc.NetworkError, match=r"axis [03] of 'input' has to be (from 2 to 64|16), .*dynamic_shapes"
        ):
            network.with_input_shapes(other)


def test_sizes_that_follow_from_others():
    batch = torch.export.Dim("batch", min=2, max=64)
    module = Apply(lambda x, y, z: torch.cat([x, y]) + z)
    several = tuple(given((n, 6)) for n in (3, 6, 9))
    network = bc.from_torch(module, several, (({0: batch}, {0: 2 * batch}, {0: 3 * batch}),))
    for found in (network, pickle.loads(pickle.dumps(network))):
        assert found.with_input_shapes({"x_0": (4, 6), "x_1": (8, 6), "x_2": (12, 6)})
        with pytest.raises(bc.NetworkError, match="axis 0 of"):
            found.with_input_shapes({"x_0": (4, 6), "x_1": (8, 6), "x_2": (13, 6)})


TRACED = {  # a module, the shape that it is traced with, and another
    "rows": (lambda: nn.Conv1d(6, 4, 3), ROW, (3, 6, 17)),
    "volumes": (lambda: nn.Conv3d(3, 4, 2, padding=1), (1, 3, 4, 5, 6), (1, 3, 4, 6, 5)),
    "pools of volumes": (lambda: nn.AvgPool3d(2), (1, 3, 4, 5, 6), (2, 3, 5, 4, 7)),
    "no batch": (lambda: nn.Conv2d(6, 4, 3), IMAGE[1:], (6, 10, 8)),
    "enlarged": (lambda: nn.Upsample(scale_factor=2, mode="bilinear"), IMAGE, (1, 6, 5, 9)),
    "pooled to a size": (lambda: nn.AdaptiveMaxPool2d(2), IMAGE, (2, 6, 4, 6)),
    "one value twice": (lambda: Apply(lambda x: (x, x.relu(), x * 2)), IMAGE, (2, 6, 10, 8)),
}


@pytest.mark.parametrize("name", TRACED)
@pytest.mark.sampled(3)
def test_other_sizes_than_those_that_were_traced(name):
    make, shape, other = TRACED[name]
    module, x = made(make), given(other)
    network, wanted = bc.from_torch(module, given(shape)), module(x)
    again = pickle.loads(pickle.dumps(network))
    for copied in (network, copy.deepcopy(network), again, pickle.loads(pickle.dumps(again))):
        found = copied.with_input_shapes(other).evaluate(x.numpy())
        for a, b in zip(found.values(), wanted if isinstance(wanted, tuple) else [wanted], strict=True):
            assert error(a, b) < 1e-5


def test_a_size_that_a_trace_rounds_stays():
    """A trace of any batch and length gives the length 1.7 * 11 as 18, under a guard."""
    module = made(lambda: nn.Upsample(scale_factor=1.7, mode="area"))
    network = bc.from_torch(module, given(ROW))
    for shape in ((3, *ROW[1:]), (2, 6, 17)):
        x = given(shape)
        (found,) = network.with_input_shapes(shape).evaluate(x.numpy()).values()
        assert error(found, module(x)) < 1e-5


def test_a_size_that_a_traced_view_does_not_take():
    network = bc.from_torch(Apply(lambda x: x.view(2, 48, 10)), given(IMAGE))
    for copied in (network, pickle.loads(pickle.dumps(network))):
        with pytest.raises(
            bc.NetworkError, match=r"take them: shape '\[2, 48, 10\]' is|as it was traced.*dynamic_shapes"
        ):
            copied.with_input_shapes((3, *IMAGE[1:]))


class Sized(nn.Module):
    """What sizes may enter: an output size, a factor, a window, a shape, a constant, a branch."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(6, 4, 3, 2)

    def forward(self, x):
        y = F.interpolate(self.conv(x), size=x.shape[-2:]) * x.shape[2] ** -0.5
        y = y + F.avg_pool2d(y, (1, x.shape[3])) + torch.arange(x.shape[3])
        return y.view(x.shape[0], 2, -1) if x.shape[2] > 9 else y.flatten(1)


@pytest.mark.slow
def test_a_module_whose_numbers_follow_from_sizes():
    module = made(Sized)
    network = bc.from_torch(module, given((1, 6, 8, 11)))
    copied = pickle.loads(pickle.dumps(network))
    for net, others in ((network, ((4, 9), (1, 9), (1, 12), (3, 12))), (copied, ((4, 9), (2, 8)))):
        for count, height in others:
            x = given((count, 6, height, 11))
            other = net.with_input_shapes(tuple(x.shape))
            assert error(other.evaluate(x.numpy())[network.outputs[0]], module(x)) < 1e-5
            if height <= 9:
                assert [node.name for node in other.nodes] == [node.name for node in network.nodes]
    with pytest.raises(bc.NetworkError, match=r"axis 2 of 'x' has to be from \d to 9, as it was traced"):  # a branch
        copied.with_input_shapes((2, 6, 12, 11))


@pytest.mark.slow
@pytest.mark.parametrize("op", [lambda x: x.relu(), lambda x: x.flatten(1)[:, : x.shape[3]]])
def test_tensors_of_sizes_are_those_of_each_trace(op):
    module = Apply(lambda x: op(x) * x.new_tensor(x.shape[2:]).sum())
    network = bc.from_torch(module, given(IMAGE))
    copied = pickle.loads(pickle.dumps(network))
    for shape in ((2, 6, 9, 10), (3, 6, 5, 7), IMAGE):
        x = given(shape)
        (found,) = network.with_input_shapes(shape).evaluate(x.numpy()).values()
        assert error(found, module(x)) < 1e-5
    with pytest.raises(bc.NetworkError, match="has to be 8, as it was traced"):
        copied.with_input_shapes((2, 6, 9, 10))


def _padded(x):
    return F.max_pool2d(F.pad(x, (0, 0, 0, 1)) if x.shape[2] % 2 else x, 2)


_BRANCHES = (
    _padded,
    lambda x: x.relu() if len(x) == 2 else x.tanh(),
    lambda x: x[x.size(0) - 2 :],
    lambda x: x.relu() if x.shape[2] > x.shape[3] else x.tanh(),
    lambda x: x.relu() if x.shape[2] * x.shape[3] > 100 else x.tanh(),
    lambda x: x.relu() if x.shape[2] != 12 else x.tanh(),
)


@pytest.mark.slow
@pytest.mark.parametrize("op", _BRANCHES)
@pytest.mark.sampled(3)
def test_sizes_may_decide_what_the_code_of_a_module_runs(op):
    network = bc.from_torch(Apply(op), given(IMAGE))
    for shape in ((2, 6, 9, 10), (3, 6, 8, 10), (1, 6, 7, 8), (3, 6, 12, 7), (3, 6, 30, 41), IMAGE):
        x = given(shape)
        (found,) = network.with_input_shapes(shape).evaluate(x.numpy()).values()
        assert error(found, op(x)) < 1e-5


@pytest.mark.slow
def test_a_program_takes_the_sizes_that_its_branches_take():
    """Also one image, and sizes on which an equation of sizes depends: here a cut of a row of an odd length."""
    module = Apply(
        lambda x: F.max_pool2d(x, 2).repeat(1, 1, 2, 2) + x[:, :, : x.shape[2] // 2 * 2, : x.shape[3] // 2 * 2]
    )
    auto = dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO)
    network = bc.from_torch(module, (given(IMAGE),), ((auto,),))
    copied = pickle.loads(pickle.dumps(network))
    for shape in ((1, 6, 8, 10), (3, 6, 12, 16), (2, 6, 4, 30)):
        x = given(shape)
        for each in (network, copied):
            (found,) = each.with_input_shapes(shape).evaluate(x.numpy()).values()
            assert error(found, module(x)) < 1e-5
    branch = Apply(lambda x: x.relu() if x.shape[2] > x.shape[3] else x.tanh())
    network = bc.from_torch(torch.export.export(branch, (given(IMAGE),), dynamic_shapes=((auto,),)), given(IMAGE))
    with pytest.raises(bc.NetworkError, match=r"have to fulfil .* as it was traced; .*dynamic_shapes"):
        network.with_input_shapes((2, 6, 12, 7))


@pytest.mark.slow
def test_a_pickle_takes_an_empty_batch():
    """As of Dask's empty chunks; without a trace of its own, but only where a trace takes several batches."""
    module = nn.Sequential(nn.Conv2d(6, 4, 3), nn.UpsamplingBilinear2d(scale_factor=2)).eval()
    copied = pickle.loads(pickle.dumps(bc.from_torch(module, given(IMAGE))))
    for shape in ((0, 6, 9, 7), (0, *IMAGE[1:])):
        (found,) = copied.with_input_shapes(shape).evaluate(np.zeros(shape, np.float32)).values()
        assert found.shape == module(torch.zeros(shape)).shape
    fixed = bc.from_torch(torch.export.export(module, (given((2, 6, 8, 8)),)), given((2, 6, 8, 8)))
    for network, shape in ((fixed, (0, 6, 8, 8)), (copied, (1, 6, 0, 8))):
        with pytest.raises(bc.NetworkError, match="as it was traced"):
            network.with_input_shapes(shape)


def test_other_sizes_have_the_weights_and_the_mode_of_the_first():
    module = nn.Sequential(nn.Conv2d(6, 4, 3), nn.Dropout(), nn.Flatten()).eval()
    network, other = bc.from_torch(module, given(IMAGE)), given((3, 6, 9, 7))
    wanted = module(other)
    module.train()
    module[0].weight = nn.Parameter(module[0].weight.detach() * 2)
    (found,) = network.with_input_shapes(tuple(other.shape)).evaluate(other.numpy()).values()
    assert error(found, wanted) < 1e-5
    assert module[1].training


def test_a_program_of_fixed_sizes_takes_no_others():
    module = Apply(lambda x: x.relu() * x.shape[2])
    program = torch.export.export(module, (given(IMAGE),))
    with pytest.raises(bc.NetworkError, match=r"axis 2 of 'x_0' has to be 8, as it was traced; .*dynamic_shapes"):
        bc.from_torch(program, given(IMAGE)).with_input_shapes((2, 6, 9, 10))


@pytest.mark.slow
def test_a_pickle_holds_each_weight_once():
    module = nn.Sequential(nn.Conv2d(6, 64, 5), nn.ReLU(), nn.Conv2d(64, 64, 5))
    weights = sum(parameter.numel() * 4 for parameter in module.parameters())
    assert len(pickle.dumps(bc.from_torch(module, given((1, 6, 16, 16))))) < 1.1 * weights


@pytest.mark.slow
def test_plans_of_any_size_in_copies_and_files(tmp_path):
    """Sizes that the trace excludes are refused by a plan, its copies and its file."""
    module, x = Apply(lambda x, w: F.conv2d(x, w).flatten(1) * x.shape[0], w=given((4, 6, 1, 1))), given(IMAGE)
    batch = torch.export.Dim("batch", min=2, max=8)
    plan = bc.compile(bc.from_torch(module, (x,), (({0: batch},),)))
    plan.save(tmp_path / "plan")
    (joblib := pytest.importorskip("joblib")).dump(plan, tmp_path / "joblib")
    copies = copy.deepcopy(plan), pickle.loads(pickle.dumps(plan)), joblib.load(tmp_path / "joblib")
    for each in (plan, *copies, bc.Plan.load(tmp_path / "plan")):
        for count in (2, 5, 9):
            x = given((count, *IMAGE[1:]))
            if each in (plan, *copies) and count < 9:
                assert error(each(x), module(x)) < 1e-5
            elif count > 2:
                with pytest.raises(bc.NetworkError, match=r"axis 0 of|not those of the file|does not take it"):
                    each(x)


def test_nodes_that_name_no_size():
    """So that files of plans take other sizes."""
    enlarged, most = nn.Upsample(scale_factor=2, mode="bilinear", align_corners=True), nn.AdaptiveMaxPool2d(1)
    free = (dict.fromkeys((0, 2, 3), torch.export.Dim.AUTO),)
    network = bc.from_torch(Apply(lambda x: enlarged(x) * most(x)), given(IMAGE), (free,))
    assert network.kept_limits()


def test_reshapes_of_tokens_hold_for_any_batch():
    """Also after passes, as files of plans hold them."""

    def attend(x, w):
        x = F.linear(F.layer_norm(x.flatten(2).mT, (6,)), w).unflatten(2, (2, 3)).transpose(1, 2)
        return ((x @ x.mT).softmax(-1) @ x).transpose(1, 2).flatten(2)

    network = bc.from_torch(Apply(attend, w=given((6, 6))), given(IMAGE), (({0: torch.export.Dim.AUTO},),))
    assert network.kept_limits()
    assert fuse(network).kept_limits()


def test_a_branch_that_a_far_size_takes(tmp_path):
    """A file and a quantized network compute nothing for sizes that the trace excludes."""
    module, x = Apply(lambda x: F.relu(x) * 2 if x.shape[-1] > 100 else F.relu(x)), given((2, 3, 16, 16))
    sizes = {0: torch.export.Dim("n"), 2: torch.export.Dim("h"), 3: torch.export.Dim("w", max=100)}
    network = bc.from_torch(module, (x,), ((sizes,),))
    bc.compile(network).save(tmp_path / "plan")
    for plan in (bc.Plan.load(tmp_path / "plan"), bc.compile(bc.quantize(network, [x]))):
        for one in (plan, pickle.loads(pickle.dumps(plan))):
            assert error(one(given((3, 3, 9, 100))), module(given((3, 3, 9, 100)))) < 0.03
            with pytest.raises(bc.NetworkError, match=r"axis 3 of"):
                one(given((2, 3, 16, 200)))
    bc.Plan.load(tmp_path / "plan").save(tmp_path / "again")
    with pytest.raises(bc.NetworkError, match=r"axis 3 of 'x_0' has to be from 0 to 100"):
        bc.Plan.load(tmp_path / "again")(given((2, 3, 16, 101)))


@pytest.mark.parametrize("auto", [None, ({0: torch.export.Dim.AUTO, 3: torch.export.Dim.AUTO},)])
def test_a_branch_that_one_size_alone_takes(auto, tmp_path):
    """A file holds the conditions of a trace, also one that no other size shows. Each way to a file keeps them."""
    module, x = Apply(lambda x: F.relu(x) if x.shape[2] * x.shape[3] != 96 else F.relu(x) * 2), given(IMAGE)
    network = bc.from_torch(module, x, auto and (auto,))
    path = tmp_path / "plan"
    made = network, pickle.loads(pickle.dumps(network)), bc.quantize(network, [x])
    for one in (*map(bc.compile, made), *(lambda: bc.Plan.load(path) for _ in range(2))):
        plan = one if isinstance(one, bc.Plan) else one()
        plan.save(path)
        for each in (plan, bc.Plan.load(path)):
            for shape in (IMAGE, (3, 6, 8, 13), (2, 6, 8, 30)):
                assert error(each(given(shape)), module(given(shape))) < 0.03
        with pytest.raises(bc.NetworkError, match=r"have to fulfil .* != 96|not take it"):
            bc.Plan.load(path)(given((2, 6, 8, 12)))


def test_a_file_holds_no_code_but_arithmetic(tmp_path):
    limits = Limits({"x": ["n", 6]}, {"n": (1, 9)}, ["n % 2 == 0"])
    assert limits.is_plain()
    assert limits.excludes({"x": (4, 6)}) == ""
    assert "fulfil n % 2 == 0" in limits.excludes({"x": (3, 6)})
    for text in ("print(n)", "n.real > 0", "n ** n > 0", "[n for n in (1,)]"):
        assert not Limits({"x": ["n", 6]}, {"n": (1, 9)}, [text]).is_plain()


def test_several_inputs_and_outputs():
    module = Apply(lambda x, y: (x + y, x, x + y * 2))
    x, y = given(IMAGE), given((10,))
    plan = bc.compile(bc.from_torch(module, (x, y)))
    assert all(error(a, b) < 1e-6 for a, b in zip(plan(x, y).values(), module(x, y), strict=True))


def test_one_error_names_everything_that_is_not_supported():
    class Odd(nn.Module):
        def forward(self, x):
            return torch.logcumsumexp(x, 0) + torch.logcumsumexp(x, 1) + torch.kthvalue(x, 1, keepdim=True)[0]

    with pytest.raises(UnsupportedError) as caught:
        bc.from_torch(nn.Sequential(nn.Conv2d(6, 6, 1), Odd()), given(IMAGE), strict=True)
    text = str(caught.value)
    assert re.search(r"aten.logcumsumexp: 2 nodes, the first 'logcumsumexp' in 1 \(.*Odd\)", text)
    assert "aten.kthvalue: 1 node" in text


def _kinds(x):
    values, indices = torch.kthvalue(x, 3, dim=1, keepdim=True)
    narrow = torch.where(x > 0, x, torch.sort(x, dim=-1)[0]).to(torch.float64)
    return F.relu(x) + values.sum(1, keepdim=True), indices, x.isnan().any(1), narrow, torch.fft.rfft(x).real


PYTORCH = {
    "one op": lambda x: torch.logcumsumexp(x, 1),
    "between convolutions": lambda x: F.conv2d(torch.logcumsumexp(F.conv2d(x, WEIGHT), 1), WEIGHT),
    "kinds and several outputs": _kinds,
    "a view": lambda x: x.view(torch.int32).flip(1) + 1,
    "what a constant gives": lambda x: torch.bucketize(x, torch.linspace(-1, 1, 5)),
    "a scalar": lambda x: x * torch.median(x),
    "bits of one element": lambda x: x[:1, :1, :1, :1].view(torch.int32),
    "a check that no output needs": lambda x: torch.linalg.inv(x[..., :8] + 9 * torch.eye(8)),
    "no elements": lambda x: torch.cat([torch.logcumsumexp(x, 1), torch.logcumsumexp(x[:, :0], 1)], 1),
    "one of several outputs": lambda x: torch.kthvalue(x, 3, 1)[1] * 2,
    "two equal nodes": lambda x: torch.logcumsumexp(x, 1).relu() - F.conv2d(torch.logcumsumexp(x, 1), WEIGHT),
    "of two outputs of one name": lambda x: torch.kthvalue(x, 3, 1)[0].sum() + torch.kthvalue(x, 2, 2)[0],
    "a softplus that is cut early": lambda x: F.softplus(x, threshold=1),
    "what autocast would round": lambda x: torch.addbmm(x[1, 1, :, :8], x[0, :2], x[0, 1:3].mT, beta=0.5),
}
WEIGHT = torch.from_numpy(np.random.default_rng(5).standard_normal((6, 6, 1, 1), np.float32))


@pytest.mark.parametrize("what", PYTORCH)
@pytest.mark.sampled(2)
def test_pytorch_runs_what_blockconv_has_no_op_for(what, tmp_path):
    module, x = Apply(PYTORCH[what]), given(IMAGE)
    network = bc.from_torch(module, x)
    with pytest.warns(bc.SlowPathWarning, match=r"aten\.\w+ \(\d+\).* PyTorch runs them"):
        plan = bc.compile(network)
    plan.save(tmp_path / "plan")
    wanted = module(x)
    wanted = list(wanted) if isinstance(wanted, tuple) else [wanted]
    with torch.autocast("cpu", torch.bfloat16):
        in_autocast = plan.by_name(x)
    ways = [plan.by_name(x), pickle.loads(pickle.dumps(plan)).by_name(x), bc.Plan.load(tmp_path / "plan").by_name(x)]
    for found in [*ways, in_autocast, {k: torch.from_numpy(y) for k, y in network.evaluate(x.numpy()).items()}]:
        for a, b in zip(found.values(), wanted, strict=True):
            assert (a.shape, a.dtype) == (b.shape, b.dtype)
            assert not a.numel() or error(a, b) < 1e-6


def test_indices_of_maxima_and_convolutions_by_values_are_native(tmp_path):

    def call(x):
        return F.conv2d(x, x[:1, :, :1, :2]) + F.max_pool2d(x, (1, 2), 1, return_indices=True)[1]

    network = bc.from_torch(Apply(call), given(IMAGE))
    assert "foreign" not in {node.op for node in network.nodes}
    (found,) = network.evaluate(given(IMAGE).numpy()).values()
    assert error(found, call(given(IMAGE))) < 1e-5
    with warnings.catch_warnings():
        warnings.simplefilter("error", bc.SlowPathWarning)
        bc.compile(network).save(tmp_path / "plan")
    assert error(bc.Plan.load(tmp_path / "plan")(given(IMAGE)), call(given(IMAGE))) < 1e-5


def test_pytorchs_ops_take_other_sizes_where_these_may_change():
    module = Apply(lambda x: F.relu(torch.logcumsumexp(F.relu(x), 2)).flip(3))
    batch = torch.export.Dim("batch", min=2, max=64)
    plan = bc.compile(bc.from_torch(module, given((2, *IMAGE[1:])), (({0: batch},),)))
    for count in (2, 5):
        x = given((count, *IMAGE[1:]))
        assert error(plan(x), module(x)) < 1e-6


def test_an_error_in_pytorch_names_the_op():
    module = Apply(lambda x, k: x.index_reduce(1, k, x[:, :2], "mean"))
    k = torch.zeros(2, dtype=torch.int64)
    plan = bc.compile(bc.from_torch(module, (given(IMAGE), k)))
    with pytest.raises(bc.NetworkError, match=r"aten\.index_reduce.*out of range"):
        plan(given(IMAGE), k + 99)


def test_random_numbers_are_pytorchs():
    """Each call draws anew, and two draws of one shape are two."""
    module, x = Apply(lambda x: F.relu(x + torch.rand(10)) - torch.rand(10) * torch.randn_like(x)), given(IMAGE)
    plan = bc.compile(bc.from_torch(module, x))
    for seed in (1, 2):
        torch.manual_seed(seed)
        found = plan(x)
        torch.manual_seed(seed)
        assert error(found, module(x)) < 1e-6
    assert error(found, plan(x)) > 0.1
    with pytest.raises(UnsupportedError, match=r"aten\.rand: random numbers"):
        bc.from_torch(module, x, strict=True)


def test_shapes_that_depend_on_data_are_refused():
    with pytest.raises(UnsupportedError, match="shapes that depend on data"):
        bc.from_torch(Apply(lambda x: torch.nonzero(x)), given(IMAGE))


def test_outputs_without_tensors():
    assert len(bc.from_torch(Apply(lambda x: (x + 1, None, x * 2)), given(IMAGE)).outputs) == 2
    with pytest.raises(bc.ArgumentError, match="3: has to return tensors"):
        bc.from_torch(Apply(lambda x: (x + 1, 3)), given(IMAGE))


def test_a_module_that_keeps_a_state_is_refused():
    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("past", torch.zeros(2, 6, 3))

        def forward(self, x):
            x = torch.cat([self.past, x], -1)
            self.past.copy_(x[..., -3:])
            return x * 2

    with pytest.raises(UnsupportedError, match=r"writes its buffers past .* has no state; let it take them"):
        bc.from_torch(Stream(), given(ROW))


@pytest.mark.parametrize("what", ["training", "weight", "no module"])
def test_what_cannot_be_read_says_why(what):
    if what == "training":
        with pytest.raises(UnsupportedError, match=r"training mode.*eval\(\)"):
            bc.from_torch(nn.Sequential(nn.BatchNorm2d(6)).train(), given(IMAGE))
    elif what == "weight":
        with pytest.raises(UnsupportedError, match="its weight is no constant"):
            bc.from_torch(Apply(lambda x, w: F.prelu(x, w)), (given(IMAGE), given((6,))), strict=True)
    else:
        with pytest.raises(bc.ArgumentError, match=r"has to be a torch\.nn\.Module"):
            bc.from_torch(lambda x: x, given(IMAGE))
        with pytest.raises(bc.ArgumentError, match=r"example_inputs=<ndarray .*; give torch\.from_numpy"):
            bc.from_torch(nn.ReLU(), given(IMAGE).numpy())


def test_the_import_of_blockconv_is_without_torch(run_python):
    run_python("import sys, blockconv as bc; bc.from_torch; assert 'torch' not in sys.modules")


def test_the_page_lists_every_op():
    page = (Path(__file__).parents[3] / "docs/reference/torch.md").read_text(encoding="utf-8")
    listed = set(re.findall(r"`((?:prims\.)?\w+)`", page.partition("## The ops")[2].partition("PyTorch also runs")[0]))
    assert listed == {name for name in READ if not name.startswith("blockconv.")}


class Spectrum(nn.Module):
    """A product in the frequency domain, with complex weights."""

    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1), nn.Conv2d(4, 2, 1)
        self.weight = nn.Parameter(torch.randn(4, 8, 5, dtype=torch.complex64))

    def forward(self, x):
        y = torch.relu(self.first(x))
        return self.last(torch.fft.irfft2(torch.fft.rfft2(y) * self.weight, s=y.shape[-2:]))


class ComplexConvolution(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.last = nn.Conv2d(3, 4, 3, padding=1, dtype=torch.complex64), nn.Conv2d(4, 2, 1)

    def forward(self, x):
        return self.last(self.first(torch.complex(x, x * 2)).abs())


class Halves(nn.Module):
    """Several complex results of one op, and two readers of one."""

    def forward(self, x):
        low, high = torch.chunk(torch.fft.fft(x), 2, 1)
        return low.real + (high * 2j).imag + low.abs()


class QuantizedMean(nn.Module):
    def forward(self, x):
        bytes_ = torch.quantize_per_tensor(x, 0.05, 3, torch.quint8)
        return nn.functional.adaptive_avg_pool2d(bytes_, 2).dequantize() + 1


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("kind", [Spectrum, ComplexConvolution, Halves, QuantizedMean])
@pytest.mark.sampled(4)
def test_values_of_types_that_networks_lack_pass_between_ops_in_pytorch(kind):
    torch.manual_seed(0)
    model, x = kind().eval(), torch.randn(1, 4 if kind is Halves else 3, 8, 8)
    network = bc.from_torch(model, x)
    plan = bc.compile(network)
    with torch.no_grad():
        wanted = model(x)
    for found in (plan(x), pickle.loads(pickle.dumps(plan))(x), *network.evaluate(x.numpy()).values()):
        assert (torch.as_tensor(found) - wanted).abs().max() <= 1e-5 * wanted.abs().max()
    with pytest.raises(bc.UnsupportedError):
        bc.from_torch(model, x, strict=True)
