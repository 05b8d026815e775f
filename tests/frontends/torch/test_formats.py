"""Memory formats and empty dimensions of torch.compile(backend="blockconv"): strides and values are eager mode's."""

from __future__ import annotations

import importlib
import itertools
import sys
import types
import unittest
import warnings

import numpy as np
import pytest
from torch_models import F, torch

import blockconv as bc

pytree = importlib.import_module("torch.utils._pytree")
tree_flatten, tree_leaves, tree_unflatten = pytree.tree_flatten, pytree.tree_leaves, pytree.tree_unflatten
tree_map_only = pytree.tree_map_only
make_fx = importlib.import_module("torch.fx.experimental.proxy_tensor").make_fx
decompositions = importlib.import_module("blockconv.frontends.torch.decompositions")
backend = importlib.import_module("blockconv.torch").backend
compiler = importlib.import_module("blockconv.frontends.torch.backend")
table = importlib.import_module("blockconv.frontends.torch.ops").OPS
ours = bc.torch.functional
LAST = torch.channels_last


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.reset()


def images(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def laid_out(x):
    """An image in each memory format. Axes of one element have the strides of this format too."""
    yield from (x.clone(memory_format=form) for form in (torch.contiguous_format, LAST))


# Functions of an image of 4 channels. Traces of the first ones have other strides than PyTorch's kernels.
KINDS = {
    "roll": lambda x: torch.roll(x, -1, 0),
    "roll of two axes": lambda x: torch.roll(x, (1, -2), (2, 3)),
    "roll of all": lambda x: torch.roll(x, 5),
    "channel_shuffle": lambda x: F.channel_shuffle(x, 2),
    "floor_divide": lambda x: torch.floor_divide(x, torch.ones(4, 1, 1)),
    "logsigmoid": F.logsigmoid,
    "reflection_pad3d": lambda x: F.pad(x[:, None], (1, 1, 1, 1, 1, 1), mode="reflect"),
    "zeros_like": torch.zeros_like,
    "full_like": lambda x: torch.full_like(x, 3),
    "group_norm": lambda x: F.group_norm(x, 2),
    "instance_norm": F.instance_norm,
    "one channel": lambda x: x[:, :1] + 1,
    "expanded": lambda x: x.mean((2, 3), keepdim=True).expand(-1, -1, 5, 5),
    "reduced": lambda x: x.amax(1),
    "flip": lambda x: x.flip(2),
    "permuted": lambda x: x.permute(0, 2, 3, 1) * 2,
    "cat": lambda x: torch.cat([x, x + 1], 1),
    "max_pool2d": lambda x: F.max_pool2d(x, 2),
    "avg_pool2d": lambda x: F.avg_pool2d(x, 2),
    "pixel_shuffle": lambda x: F.pixel_shuffle(x, 2),
    "interpolate": lambda x: F.interpolate(x, scale_factor=1.7),
    "bilinear": lambda x: F.interpolate(x, scale_factor=2, mode="bilinear"),
    "softmax": lambda x: x.softmax(1),
    "where": lambda x: torch.where(x > 0, x, torch.zeros(4, 1, 1)),
    "power of a number": lambda x: 2.0**x,
    "ldexp": lambda x: torch.ldexp(x, x[:1]),
    "addr": lambda x: torch.addr(x[0, 0].t(), x[0, 0, 0], x[0, 0, 1], beta=0),
    "batch norm of rows": lambda x: F.batch_norm(x.flatten(2).transpose(1, 2), None, None, training=True),
    "maximum of a number": lambda x: x.sum().max(0).values,
    "sum of a number": lambda x: x.amax().sum(-1),
    **{  # whose first operand is broadcast
        name: lambda x, name=name: getattr(torch, name)(torch.ones(1, 1, 1, x.shape[3]), x)
        for name in (
            "heaviside",
            "logical_and",
            "logical_or",
            "logical_xor",
            "gt",
            "true_divide",
            "maximum",
            "atan2",
            "fmod",
            "logaddexp",
        )
    },
}
WEIGHTS = {"3x3": ((4, 4, 3, 3), 1), "1x1": ((4, 4, 1, 1), 1), "depthwise": ((4, 1, 3, 3), 4)}


def alike(found, wanted, note=""):
    """The same values; and the same strides, but for a tensor without elements."""
    assert len(found) == len(wanted), note
    for a, b in zip(found, wanted, strict=True):
        assert (a.shape, a.dtype) == (b.shape, b.dtype), note
        assert torch.allclose(a, b, rtol=1e-4, atol=1e-4, equal_nan=True), note
        pairs = zip(a.stride(), b.stride(), a.shape, strict=True)
        assert 0 in a.shape or all(s == t or n == 1 for s, t, n in pairs), (note, a.shape, a.stride(), b.stride())


@pytest.mark.nightly
def test_outputs_of_a_plan_have_the_strides_of_eager_mode():
    """All kinds in one graph after a convolution, for both formats of the image and the weight."""
    kinds = {name: kind for name, kind in KINDS.items() if name not in ("interpolate", "roll of two axes")}

    def call(x, w):
        y = F.conv2d(x, w)
        return [kind(y) for kind in kinds.values()]

    with torch.no_grad():
        fast = torch.compile(call, backend=backend)
        for x, w in itertools.product(laid_out(images(2, 3, 8, 8)), laid_out(images(4, 3, 1, 1))):
            for found, wanted, name in zip(fast(x, w), call(x, w), kinds, strict=True):
                alike([found], [wanted], name)
                assert name == "expanded" or found.stride() == wanted.stride(), name  # of axes of one element too


@pytest.mark.parametrize("dynamic", [False, True])
def test_as_strided_reads_what_eager_mode_reads(dynamic):
    w = images(2, 3, 3, 3)
    call = lambda x: torch.as_strided(F.conv2d(torch.roll(x, -1, 0), w), (5, 10), (4, 1), 0)  # noqa: E731
    x = images(2, 3, 8, 8).contiguous(memory_format=LAST)
    with torch.no_grad():
        alike([torch.compile(call, backend=backend, dynamic=dynamic)(x)], [call(x)])


def step(call, *given):
    """A result, and the gradients of what it was given, each with a gradient that is expanded and one that is not."""
    given = [x.detach().requires_grad_() for x in given]
    y = call(*given)
    kept = torch.autograd.grad(y.sum(), given, retain_graph=True)
    return [y.detach(), *kept, *torch.autograd.grad(y, given, torch.ones_like(y))]


SHAPES = [((2, 4, 8, 8), *weight) for weight in WEIGHTS.values()]
SHAPES += [((2, 1, 8, 8), (4, 1, 3, 3), 1), ((1, 4, 8, 8), (1, 4, 3, 3), 1), ((2, 4, 8, 1), (4, 4, 3, 1), 1)]


@pytest.mark.parametrize(("image", "weight", "groups"), SHAPES)
def test_convolutions_and_their_gradients_have_pytorchs_strides(image, weight, groups):
    for x, w in itertools.product(laid_out(images(*image)), laid_out(images(*weight))):
        found, wanted = (step(lambda x, w, f=f: f(x, w, groups=groups), x, w) for f in (ours.conv2d, F.conv2d))
        alike(found, wanted, (x.stride(), w.stride()))


@pytest.mark.parametrize("op", ["conv1d", "conv_transpose1d"])
@pytest.mark.parametrize("groups", [1, 4])
def test_convolutions_of_sequences_have_pytorchs_strides(op, groups):
    """A permuted sequence is no channels_last image. An error names the function that was called."""
    permuted = images(2, 5, 4).transpose(1, 2)
    for x, w in itertools.product((permuted, permuted.contiguous()), laid_out(images(4, 4 // groups, 1, 3))):
        given = x, w[:, :, 0]
        alike(*(step(lambda x, w, f=f: getattr(f, op)(x, w, groups=groups), *given) for f in (ours, F)))
    with pytest.raises(bc.ArgumentError, match=f"^{op}: padding=.*"):
        getattr(ours, op)(*given, padding=-9, groups=groups)


@pytest.mark.parametrize("pool", ["max_pool2d", "avg_pool2d"])
def test_pools_and_their_gradients_have_pytorchs_strides(pool):
    for x in laid_out(images(2, 4, 8, 8)):
        alike(*(step(lambda x, f=f: getattr(f, pool)(x, 2), x) for f in (ours, F)))


@pytest.mark.slow
@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.sampled(3)
def test_a_compiled_step_has_the_strides_of_eager_mode(name):
    shape, groups = WEIGHTS[name]
    for kind in ("group_norm", "roll", "channel_shuffle", "max_pool2d", "avg_pool2d", "logsigmoid", "cat"):
        call = lambda x, w, kind=KINDS[kind]: kind(F.conv2d(x, w, groups=groups))  # noqa: E731
        fast = torch.compile(call, backend=backend)
        for x, w in itertools.product(laid_out(images(2, 4, 8, 8)), laid_out(images(*shape))):
            alike(step(fast, x, w), step(call, x, w), kind)


# ---------------------------------------------------------------- no images


NEAREST = [{"scale_factor": 1 / 3}, {"scale_factor": 1.7}, {"scale_factor": 1.7, "recompute_scale_factor": True}]


@pytest.mark.parametrize("how", [*NEAREST, {"size": (3, 5), "mode": "nearest-exact"}])
def test_resampling_of_no_image(how):
    with torch.no_grad():
        x = images(0, 3, 8, 8)
        call = lambda x: F.interpolate(x, **how)  # noqa: E731
        alike([torch.compile(call, backend=backend)(x)], [call(x)])


@pytest.mark.slow
@pytest.mark.parametrize("name", KINDS)
@pytest.mark.sampled(3)
def test_no_image_and_no_row(name):
    for shape in ((0, 4, 8, 8), (2, 4, 0, 8)):
        torch._dynamo.reset()
        x = images(*shape)
        with torch.no_grad():
            try:
                wanted = KINDS[name](x)
            except (RuntimeError, IndexError):  # PyTorch does not take it
                continue
            alike([torch.compile(KINDS[name], backend=backend)(x)], [wanted], shape)


# ---------------------------------------------------------------- PyTorch's own samples


def ops_of_pytorch():
    """PyTorch's ops, each with what its own tests give it."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # no more is needed of it
    from torch.testing._internal.common_methods_invocations import op_db

    return [op for op in op_db if torch.float32 in op.dtypes]


def samples(op, gradients=False):
    for sample in itertools.islice(op.sample_inputs("cpu", torch.float32, requires_grad=gradients), 60):
        yield op.op, (sample.input, *sample.args), sample.kwargs


def placed(x, how):
    """A tensor with other strides, or with none of its first axis."""
    if not isinstance(x, torch.Tensor) or x.layout != torch.strided or x.dim() < 2:
        return x
    if how == "empty":
        return x.detach()[:0]
    order = {"last": [0, *range(2, x.dim()), 1], "reversed": [*range(x.dim())][::-1]}.get(how, [*range(x.dim())])
    back = [order.index(axis) for axis in range(x.dim())]
    return x.detach().permute(order).contiguous().permute(back)


# PyTorch's dispatcher takes these apart before any back end sees them, also for others.
TRACED = {"einsum", "nn.functional.interpolate", "nn.functional.upsample_nearest"}


@pytest.mark.nightly
@pytest.mark.parametrize("part", range(64))
def test_traces_have_the_strides_of_kernels(part):
    """Of every op of PyTorch, whoever computes it: the strides of a graph's outputs are eager mode's."""
    for op in ops_of_pytorch()[part::64]:
        every = [*samples(op)] if op.name not in TRACED else []
        for (call, args, named), how in itertools.product(every[:: max(1, len(every) // 5)], ("last", "reversed")):
            leaves, spec = tree_flatten(tree_map_only(torch.Tensor, lambda x, how=how: placed(x, how), (args, named)))
            where = [k for k, x in enumerate(leaves) if isinstance(x, torch.Tensor)]

            def outputs(*tensors, leaves=leaves, spec=spec, where=where, call=call):
                args, named = tree_unflatten(
                    [dict(zip(where, tensors, strict=True)).get(k, x) for k, x in enumerate(leaves)], spec
                )
                return [x for x in tree_leaves(call(*args, **named)) if isinstance(x, torch.Tensor)]

            tensors = [leaves[k] for k in where]
            with torch.no_grad():
                try:
                    wanted = outputs(*tensors)
                    graph = make_fx(outputs, decompositions.decompositions(), "fake")(*tensors).graph
                except Exception:  # eager mode does not take it, or its result depends on data
                    continue
            decompositions.strides_of_kernels(graph)
            for node, b in zip(tree_leaves(graph.output_node().args), wanted, strict=True):
                if node is not None and b.layout == torch.strided and 0 not in b.shape:
                    pairs = zip(node.meta["val"].stride(), b.stride(), b.shape, strict=True)
                    known = (pair for pair in pairs if isinstance(pair[0], int))  # others depend on data
                    assert all(s == t or n == 1 for s, t, n in known), (op.name, how, args, named)


# Ops that PyTorch decomposes into those of the table.
DECOMPOSED = """
    _reshape_alias _unsafe_index_put _unsafe_view adaptive_avg_pool2d adaptive_avg_pool3d all avg_pool1d batch_norm
    clamp_max clamp_min contiguous conv1d conv2d conv3d dropout flatten frac grid_sampler group_norm layer_norm
    linear log_softmax matmul max_pool2d max_pool3d new_full new_ones new_zeros ones_like prelu reshape rms_norm
    rsub select_scatter softmax split t to transpose true_divide unbind zeros_like
"""


@pytest.mark.nightly
@pytest.mark.parametrize("name", sorted({name.rpartition(".")[2] for name in table} | {*DECOMPOSED.split()} - TRACED))
def test_every_op_of_the_table(name, monkeypatch):
    """PyTorch's samples of an op, in each format and without elements: values and strides of eager mode."""
    monkeypatch.setattr(compiler, "LEAST", 1)
    every = [sample for op in ops_of_pytorch() if op.name.rpartition(".")[2] == name for sample in samples(op)]
    for op, args, named in every[:: max(1, len(every) // 6)]:
        leaves, spec = tree_flatten((args, named))
        for how in ("contiguous", "last", "empty"):
            given, options = tree_unflatten([placed(x, how) for x in leaves], spec)
            torch._dynamo.reset()
            call = lambda *args, op=op, **named: tree_leaves(op(*args, **named))  # noqa: E731
            with torch.no_grad():
                try:
                    wanted = [x for x in call(*given, **options) if isinstance(x, torch.Tensor)]
                    torch.compile(call, backend="aot_eager")(*given, **options)
                except Exception:  # neither eager mode nor other back ends take it
                    continue
                found = torch.compile(call, backend=backend)(*given, **options)
                alike([x for x in found if isinstance(x, torch.Tensor)], wanted, (how, given, options))
