"""blockconv's ops in PyTorch: values, gradients of two orders, strides, autocast, and what opcheck checks."""

from __future__ import annotations

import copy
import functools
import importlib
import math
import sys
import types
import unittest

import numpy as np
import pytest
from torch_models import F, nn, torch

import blockconv as bc

ours = bc.torch.functional
ops = torch.ops.blockconv


def random(*shape, dtype=torch.float32, grad=True, seed=0):
    made = torch.randn(*shape, dtype=dtype, generator=torch.Generator().manual_seed(seed))
    return made.requires_grad_(grad)


def placed(x, how):
    """The same values with other strides."""
    with torch.no_grad():
        if how == "channels_last":
            x = x.contiguous(memory_format=torch.channels_last)
        elif how == "permuted":
            x = x.permute(2, 0, 3, 1).contiguous().permute(1, 3, 0, 2)
        elif how == "sliced":
            x = torch.stack([x, x], -1)[..., 0]
    return x.detach().requires_grad_()


PLACES = ("contiguous", "channels_last", "permuted", "sliced")
CONVS = {  # weight, options of conv2d
    "3x3": ((8, 6, 3, 3), {"padding": 1}),
    "strided": ((8, 6, 3, 2), {"stride": (2, 1), "padding": (1, 0)}),
    "dilated": ((8, 6, 3, 3), {"dilation": 2, "padding": "same"}),
    "even": ((8, 6, 2, 4), {"padding": "same"}),
    "grouped": ((9, 2, 3, 3), {"groups": 3, "stride": 2}),
    "depthwise": ((6, 1, 3, 3), {"groups": 6, "padding": 1}),
    "1x1": ((8, 6, 1, 1), {}),
}


def gradients(function, *given):
    y = function(*given)
    weight = random(*y.shape, dtype=y.dtype, grad=False, seed=9)
    return y, torch.autograd.grad((y * weight).sum(), given)


def close(found, wanted, bound=1e-5):
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert (found - wanted).abs().max() <= bound * max(1e-6, wanted.abs().max())


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", CONVS)
@pytest.mark.sampled(3)
def test_conv2d_and_its_gradients_are_torchs(name, place):
    shape, options = CONVS[name]
    given = placed(random(2, 6, 7, 9), place), random(*shape, seed=1), random(shape[0], seed=2)
    found, wanted = (gradients(lambda *x, f=f: f(*x, **options), *given) for f in (ours.conv2d, F.conv2d))
    close(found[0], wanted[0])
    if place in PLACES[:2]:
        assert found[0].stride() == wanted[0].stride()
    for ours_, theirs in zip(found[1], wanted[1], strict=True):
        close(ours_, theirs)
    again = gradients(lambda *x: bc.conv2d(*x, **options), *given)
    assert all(a.equal(b) for a, b in zip((again[0], *again[1]), (found[0], *found[1]), strict=True))


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2, "padding": 1, "output_padding": 1}, {"stride": (2, 3), "groups": 2, "dilation": (1, 2)}],
)
def test_conv_transpose2d_and_its_gradients_are_torchs(options):
    given = random(2, 6, 5, 4), random(6, 8 // options.get("groups", 1), 3, 3, seed=1), random(8, seed=2)
    found, wanted = (
        gradients(lambda *x, f=f: f(*x, **options), *given) for f in (ours.conv_transpose2d, F.conv_transpose2d)
    )
    for ours_, theirs in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
        close(ours_, theirs)


def test_conv_transpose2d_cuts_each_side_with_a_gradient_too():
    x, w = random(2, 6, 5, 4), random(6, 8, 3, 3, seed=1)
    for padding in (((1, 0), (0, 1)), ((0, 1), (2, 0)), (1, (0, 1))):
        options = {"stride": 2, "padding": padding, "output_padding": 1}
        close(bc.conv_transpose2d(x, w, **options), bc.conv_transpose2d(x.detach(), w.detach(), **options))


@pytest.mark.parametrize("place", PLACES[:2])
def test_pools_and_their_gradients_are_torchs(place):
    x = placed(random(2, 6, 8, 9), place)
    for name, options in (
        ("max_pool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "ceil_mode": True}),
        ("max_pool2d", {"kernel_size": (2, 3), "dilation": 2}),
        ("avg_pool2d", {"kernel_size": 3, "stride": 2, "padding": 1, "count_include_pad": False}),
        ("avg_pool2d", {"kernel_size": 2, "divisor_override": 3}),
        ("adaptive_avg_pool2d", {"output_size": (3, None)}),
        ("adaptive_max_pool2d", {"output_size": (4, 3)}),
        ("adaptive_max_pool2d", {"output_size": (3, 3)}),
    ):
        found, wanted = (gradients(functools.partial(getattr(f, name), **options), x) for f in (ours, F))
        close(found[0], wanted[0])
        close(found[1][0], wanted[1][0])
        assert found[0].stride() == wanted[0].stride()
    assert ours.max_pool2d(x, 2, return_indices=True)[1].equal(F.max_pool2d(x, 2, return_indices=True)[1])


def test_conv1d_unbatched_images_residuals_and_activations():
    x, w, b = random(2, 6, 11), random(8, 6, 3, seed=1), random(8, seed=2)
    for found, wanted in zip(
        gradients(lambda *g: ours.conv1d(*g, stride=2, padding=1), x, w, b)[1],
        gradients(lambda *g: F.conv1d(*g, stride=2, padding=1), x, w, b)[1],
        strict=True,
    ):
        close(found, wanted)
    x, w = random(6, 7, 9), random(8, 6, 3, 3, seed=1)
    close(ours.conv2d(x, w), F.conv2d(x, w))
    residual = random(8, 5, 7, seed=3)
    for name in ("relu", "relu6", ("clip", -1, 0.5), ("leaky_relu", 0.2), "sigmoid", "tanh", "silu", "hardswish"):
        found = ours.conv2d(x, w, residual=residual, activation=name)
        close(found, bc.conv2d(x.detach(), w.detach(), residual=residual.detach(), activation=name), 1e-5)
    for name in ("gelu", "hardsigmoid", ("hardsigmoid", 0.2, 0.4), "mish", ("celu", 0.5), None):
        close(ours.conv2d(x, w, activation=name), bc.conv2d(x.detach(), w.detach(), activation=name), 1e-5)


SMALL = {"stride": (2, 1), "padding": (1, 0), "dilation": (1, 2), "groups": 2}


def small(place="contiguous"):
    x = placed(random(2, 4, 5, 6, dtype=torch.float64), place)
    return x, random(6, 2, 2, 3, dtype=torch.float64, seed=1), random(6, dtype=torch.float64, seed=2)


@pytest.fixture
def on_one_thread():
    before = bc.get_num_threads()
    bc.set_num_threads(1)
    yield
    bc.set_num_threads(before)


@pytest.mark.parametrize("place", [*PLACES, pytest.param("whole", marks=pytest.mark.nightly)])
def test_derivatives_of_two_orders(place, on_one_thread):
    """Along random directions; "whole": each element."""
    x, w, b = small("contiguous" if place == "whole" else place)
    options = tuple(SMALL.values())
    grad = placed(random(*ops.conv2d(x, w, b, *options).shape, dtype=torch.float64, seed=3), place)
    t, c = random(4, 3, 2, 2, dtype=x.dtype), random(x.shape[1], dtype=x.dtype)
    for function, given in (
        (lambda x, w, b: ops.conv2d(x, w, b, *options), (x, w, b)),
        (lambda w, g, c: ops.conv2d_backward_data(x.shape, w, g, c, *options), (w, grad, c)),
        (lambda x, g: ops.conv2d_backward_weights(x, w.shape, g, *options), (x, grad)),
        (lambda x, w: ours.conv_transpose2d(x, w, stride=2, output_padding=1), (x, t)),
        (lambda x, w: ours.conv1d(x[0], w[0], padding=1), (x, random(1, 3, 5, 2, dtype=x.dtype))),
        (lambda x: ours.max_pool2d(x, 2), (x,)),
        (lambda x: ours.avg_pool2d(x, 2, 1, 1), (x,)),
        (lambda x: ours.adaptive_avg_pool2d(x, (3, 2)), (x,)),
        (lambda x: ours.adaptive_max_pool2d(x, (1, 3)), (x,)),
    ):
        assert torch.autograd.gradcheck(function, given, nondet_tol=0, fast_mode=place != "whole")
        assert torch.autograd.gradgradcheck(function, given, nondet_tol=0, fast_mode=place != "whole")


@pytest.mark.slow
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.sampled(2)
def test_opcheck(place, on_one_thread):
    x, w, b = small(place)
    options = tuple(map(list, list(SMALL.values())[:3])), 2
    options = (*options[0], 2)
    grad = random(*ops.conv2d(x, w, b, *options).shape, dtype=torch.float64, seed=3)
    for op, given in (
        (ops.conv2d, (x, w, b, *options)),
        (
            ops.conv2d_backward_data,
            (list(x.shape), w, placed(grad, place), random(x.shape[1], dtype=x.dtype), *options),
        ),
        (ops.conv2d_backward_weights, (x, list(w.shape), grad, *options)),
        (ops.max_pool2d, (x, [2, 2], [2, 2], [0, 0], [1, 1], False)),
        (ops.avg_pool2d, (x, [2, 2], [1, 1], [1, 1], False, True, None)),
        (ops.adaptive_avg_pool2d, (x, [3, 2])),
    ):
        torch.library.opcheck(op.default, given)


def test_autocast_is_torchs():
    x, w, b = random(2, 6, 7, 9), random(8, 6, 3, 3, seed=1), random(8, seed=2)
    for dtype in (torch.bfloat16, torch.float16):
        with torch.autocast("cpu", dtype=dtype):
            found, wanted = (gradients(f, x, w, b) for f in (ours.conv2d, F.conv2d))
            assert bc.conv2d(x, w).dtype == dtype
        for ours_, theirs in zip((found[0], *found[1]), (wanted[0], *wanted[1]), strict=True):
            close(ours_, theirs, 0.03)


class Seeing(torch.utils._python_dispatch.TorchDispatchMode):
    """A mode that keeps the ops that it sees."""

    def __init__(self):
        super().__init__()
        self.seen = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.add(func)
        return func(*args, **(kwargs or {}))


def test_who_watches_a_call_sees_the_op():
    """A mode, a profiler, a trace, a transform, autocast, tensors without memory of their own."""
    x, w = random(1, 6, 7, 7, grad=False), random(8, 6, 3, 3, grad=False)
    wanted = ours.conv2d(x, w, padding=1)

    def call(x):
        return ours.conv2d(x, w, padding=1)

    with Seeing() as mode:
        close(call(x), wanted)
    assert ops.conv2d.default in mode.seen
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profiler:
        call(x)
    assert "blockconv::conv2d" in {event.name for event in profiler.events()}
    graph = torch.fx.experimental.proxy_tensor.make_fx(call)(x).graph
    assert graph.find_nodes(op="call_function", target=ops.conv2d.default)
    assert "blockconv::conv2d" in str(torch.jit.trace(call, x).graph)
    close(torch.vmap(call)(x[None])[0], wanted)
    with torch.autocast("cpu", torch.bfloat16):
        assert call(x).dtype is torch.bfloat16
    assert ours.conv2d(x.to("meta"), w.to("meta"), padding=1).shape == wanted.shape
    close(call(torch.complex(-x, -x).conj().imag), wanted)  # whose sign is a bit of the tensor
    with torch._subclasses.FakeTensorMode() as fake:
        found = ours.conv2d(fake.from_tensor(x), fake.from_tensor(w), padding=1)
    assert type(found) is torch._subclasses.FakeTensor


def test_autograd_alone_does_not_wait_for_the_dispatcher(monkeypatch):
    x, w = random(1, 6, 7, 7), random(8, 6, 3, 3)
    for kind in (torch._ops.OpOverload, torch._ops.OpOverloadPacket):
        monkeypatch.setattr(kind, "__call__", None)
    y = ours.conv2d(ours.max_pool2d(x, 2), w)
    (of_x,) = torch.autograd.grad(y.sum(), [x], create_graph=True)
    of_x.sum().backward()
    assert w.grad is not None


def test_derivatives_in_forward_mode(on_one_thread):
    """Alone, and forward over reverse, along random directions."""
    x, w, b = small()
    t = random(4, 3, 2, 2, dtype=x.dtype)
    for function, given in (
        (lambda x, w, b: ours.conv2d(x, w, b, **SMALL), (x, w, b)),
        (lambda x, w: ours.conv_transpose2d(x, w, stride=2, output_padding=1), (x, t)),
        (lambda x: ours.max_pool2d(x, 2), (x,)),
        (lambda x: ours.avg_pool2d(x, 2, 1, 1), (x,)),
        (lambda x: ours.adaptive_avg_pool2d(x, (3, 2)), (x,)),
    ):
        assert torch.autograd.gradcheck(function, given, fast_mode=True, check_forward_ad=True, check_backward_ad=False)
        assert torch.autograd.gradgradcheck(
            function,
            given,
            fast_mode=True,
            check_fwd_over_rev=True,
            check_rev_over_rev=False,
            check_undefined_grad=False,
        )


def test_tangents_of_tensors_that_require_no_gradient():
    x, w, tangent = (random(2, 6, *size, grad=False) for size in ((7, 9), (3, 3), (7, 9)))
    conv = nn.Conv2d(6, 2, 3).requires_grad_(False)
    pairs = (
        (lambda x: bc.conv2d(x, w), lambda x: F.conv2d(x, w)),
        (lambda x: bc.conv2d(w, x[:, :, :2, :2]), lambda x: F.conv2d(w, x[:, :, :2, :2])),
        (lambda x: bc.max_pool2d(x, 2), lambda x: F.max_pool2d(x, 2)),
        (bc.torch.convert(copy.deepcopy(conv)), conv),
    )
    for own, theirs in pairs:
        _, wanted = torch.func.jvp(theirs, (x,), (tangent,))
        close(torch.func.jvp(own, (x,), (tangent,))[1], wanted)
        with torch.autograd.forward_ad.dual_level():
            found = torch.autograd.forward_ad.unpack_dual(own(torch.autograd.forward_ad.make_dual(x, tangent)))
        close(found.primal, theirs(x))
        close(found.tangent, wanted)


def test_a_tangent_does_not_end_in_silence():
    """Functions without forward-mode derivatives refuse it, in all ways in which PyTorch asks for them."""
    x, w, tangent = (random(2, 6, *size, grad=False) for size in ((7, 9), (3, 3), (7, 9)))
    norm = lambda x: ours.batch_norm(x, None, None, training=True)  # noqa: E731
    op = lambda x: ops.conv2d(x, w, None, [1, 1], [0, 0], [1, 1], 1)  # noqa: E731
    with pytest.raises(NotImplementedError, match="jvp"):
        torch.func.jvp(norm, (x,), (tangent,))
    for call, error in ((bc.global_avg_pool2d, bc.ArgumentError), (op, bc.ArgumentError), (norm, NotImplementedError)):
        with pytest.raises(error, match=r"tangent|jvp"), torch.autograd.forward_ad.dual_level():
            call(torch.autograd.forward_ad.make_dual(x, tangent))


@pytest.mark.slow
@pytest.mark.parametrize("backend", [None, "eager", "aot_eager"])
@pytest.mark.sampled(3)
def test_transforms_of_the_ops_themselves(backend):
    """Also inside a compiled function, where each function of ours is its op."""
    x, w, tangent = (random(2, 6, *size, grad=False) for size in ((7, 9), (3, 3), (7, 9)))
    compiled = (lambda f: f) if backend is None else functools.partial(torch.compile, backend=backend)
    for own, theirs in (
        (lambda x: ops.conv2d(x, w, None, [1, 1], [0, 0], [1, 1], 1), lambda x: F.conv2d(x, w)),
        (lambda x: ops.avg_pool2d(x, [2, 2], [2, 2], [0, 0], False, True, None), lambda x: F.avg_pool2d(x, 2)),
        (lambda x: ops.max_pool2d(x, [2, 2], [2, 2], [0, 0], [1, 1], False)[0], lambda x: F.max_pool2d(x, 2)),
        (lambda x: ours.conv2d(x, w, padding=1), lambda x: F.conv2d(x, w, padding=1)),
    ):
        (_, found), (_, wanted) = (
            compiled(lambda x, t, f=f: torch.func.jvp(f, (x,), (t,)))(x, tangent) for f in (own, theirs)
        )
        close(found, wanted)
        close(*(compiled(torch.func.grad(lambda x, f=f: f(x).sin().sum()))(x) for f in (own, theirs)))
        torch._dynamo.reset()
    norm = lambda x: ops.group_norm(x, 2, None, None, 1e-5)[0]  # noqa: E731
    with pytest.raises(NotImplementedError, match="jvp"):
        compiled(lambda x, t: torch.func.jvp(norm, (x,), (t,)))(x, tangent)


@pytest.mark.slow
def test_transforms_of_torch_func():
    """Gradients of each image by itself, and second derivatives, of a converted network."""
    theirs = nn.Sequential(nn.Conv2d(2, 3, 2), nn.Tanh(), nn.MaxPool2d(2, 1), nn.AdaptiveAvgPool2d(1)).double()
    own, x = bc.torch.convert(copy.deepcopy(theirs)), random(3, 2, 4, 4, dtype=torch.float64, grad=False)
    given = {name: parameter.detach() for name, parameter in theirs.named_parameters()}
    found = []
    for model in (own, theirs):
        loss = lambda given, x, m=model: torch.func.functional_call(m, given, (x[None],)).square().sum()  # noqa: E731
        each = torch.func.vmap(torch.func.grad(loss), (None, 0))(given, x)
        twice = torch.func.jacrev(torch.func.jacrev(loss))(given, x[0])["0.weight"]["0.weight"]
        hessian = torch.func.hessian(loss, 1)(given, x[0])
        found.append([*each.values(), twice, hessian])
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-10)


def test_what_has_no_gradient_is_refused():
    x, w = random(2, 6, 7, 9), random(8, 6, 3, 3)
    for options in (
        {"out": torch.empty(2, 8, 5, 7)}, {"out_layout": "NHWC"}, {"accuracy": "strict"}, {"algorithm": "direct"},
        {"input_quantization": bc.Quantization(1.0)},
    ):  # fmt: skip
        with pytest.raises(bc.ArgumentError, match=r"conv2d: .*=.*has no gradient.*torch\.no_grad\(\)"):
            bc.conv2d(x, w, **options)
    for call in (
        lambda: bc.conv_transpose2d(x, random(6, 8, 3, 3), accuracy="strict"),
        lambda: bc.conv1d(x[0], w[0], algorithm="direct"),
        lambda: bc.avg_pool2d(x, 2, input_quantization=bc.Quantization(1.0)),
    ):
        with pytest.raises(bc.ArgumentError, match="has no gradient"):
            call()
    for call in (
        lambda: bc.conv2d(x, w.detach().numpy()),
        lambda: bc.conv1d(x[0].detach().numpy(), w[0]),
        lambda: bc.conv_transpose2d(bc.to_layout(x.detach().numpy(), "NCHW8"), random(6, 8, 3, 3)),
    ):
        with pytest.raises(bc.ArgumentError, match=r"(input|weight)=.*has to be a tensor.*torch\.from_numpy"):
            call()
    with pytest.raises(bc.ArgumentError, match=r"residual=\(1, 8, 1, 1\): has to have the shape of the output"):
        bc.conv2d(x, w, residual=random(1, 8, 1, 1))
    with pytest.raises(bc.ArgumentError, match="output_padding"):
        ours.conv_transpose2d(x, random(6, 8, 3, 3), output_padding=1)
    for name, values in {
        "stride": ((1, 2, 3), None), "dilation": (None,), "output_padding": (-1, None), "padding": ("mirror",),
        "groups": (None, 0),
    }.items():  # fmt: skip
        for value in values:
            with pytest.raises(bc.ArgumentError, match=f"conv_transpose2d: {name}="):
                ours.conv_transpose2d(x, random(6, 8, 3, 3), **{name: value})
    for call in (ours.conv2d, ours.conv1d, ours.conv_transpose2d, ours.conv_transpose1d):
        with pytest.raises(bc.ArgumentError, match=r"input=.*has to be a torch tensor.*torch\.from_numpy"):
            call(x.detach().numpy(), w)
        with pytest.raises(bc.ArgumentError, match="weight="):
            call(x[0], None)
    with pytest.raises(bc.ArgumentError, match="stride="):
        ours.conv2d(x, w, stride=0)
    for padding in ((), ((1,), 1, 1), None, "reflect", -1):
        with pytest.raises(bc.ArgumentError, match="conv2d: padding="):
            ours.conv2d(x, w, padding=padding)
    for call, more in ((ours.batch_norm, (None, None)), (ours.group_norm, (2,))):
        for image in (None, [1], x.detach().numpy()):
            with pytest.raises(bc.ArgumentError, match=r"_norm: input=.*: has to be a torch tensor"):
                call(image, *more)
    with pytest.raises(bc.ArgumentError, match=r"conv2d: residual=\[1\]: has to be a torch tensor"):
        ours.conv2d(x, w, residual=[1])
    assert ours.max_pool2d(x, np.int64(2), np.int64(2)).shape == (2, 6, 3, 4)
    # Text by mistake; with and without a gradient.
    for image in (x, x.detach()):
        with pytest.raises(bc.ArgumentError, match="conv2d: groups='8'"):
            ours.conv2d(image, w, groups="8")
        with pytest.raises(bc.ArgumentError, match="group_norm: num_groups='2'"):
            ours.group_norm(image, "2")
        for name in ("adaptive_avg_pool2d", "adaptive_max_pool2d"):
            with pytest.raises(bc.ArgumentError, match=f"{name}: output_size='2': has to be an int"):
                getattr(ours, name)(image, "2")
        for bad in ("1", None, [1], 1j, {}, 10**400):
            for name, given in (("batch_norm", (None, None)), ("group_norm", (2,)), ("layer_norm", (9,))):
                with pytest.raises(bc.ArgumentError, match=f"{name}: eps=.*: must be a number"):
                    getattr(ours, name)(image, *given, eps=bad)
            with pytest.raises(bc.ArgumentError, match=r"batch_norm: momentum=.*: must be a number"):
                ours.batch_norm(image, None, None, training=True, momentum=bad)
        for bad in ("2", 1j, 2.5, 0, math.nan, True, {}, 10**30):
            with pytest.raises(bc.ArgumentError, match="avg_pool2d: divisor"):
                ours.avg_pool2d(image, 2, divisor_override=bad)


def test_the_functions_are_a_module():
    """`import blockconv.torch.functional as F`, as people import PyTorch's."""
    assert importlib.import_module("blockconv.torch.functional") is ours
    assert ours.conv2d is importlib.import_module("blockconv.frontends.torch.functional").conv2d


def test_the_gradient_penalty_of_a_network():
    """Second derivatives through a network, as WGAN-GP takes them."""
    model = nn.Sequential(nn.Conv2d(3, 6, 3, padding=1), nn.Tanh(), nn.Conv2d(6, 1, 3)).double()
    x, found = random(1, 3, 6, 6, dtype=torch.float64), []
    for convert in (False, True):
        if convert:
            bc.torch.convert(model)
        model.zero_grad()
        (slope,) = torch.autograd.grad(model(x).sum(), x, create_graph=True)
        slope.square().sum().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None])
    for a, b in zip(*found, strict=True):
        close(a, b, 1e-10)


def info(name):
    """What PyTorch's own tests know of an op."""
    sys.modules.setdefault("expecttest", types.SimpleNamespace(TestCase=unittest.TestCase))  # no more is needed of it
    from torch.testing._internal.common_methods_invocations import op_db

    return next(op for op in op_db if op.name == f"nn.functional.{name}")


OPS = (
    "conv1d", "conv2d", "conv_transpose1d", "conv_transpose2d", "max_pool2d", "avg_pool2d", "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
)  # fmt: skip
BOUNDS = {torch.float32: 1e-4, torch.float64: 1e-10, torch.bfloat16: 0.03, torch.float16: 0.004}


def lies_as(found, wanted):
    """Whether the strides are the same where they matter."""
    pairs = zip(found.stride(), wanted.stride(), found.shape, strict=True)
    return 0 in found.shape or all(a == b for a, b, size in pairs if size > 1)


@pytest.mark.sampled(8)
@pytest.mark.slow
@pytest.mark.parametrize("dtype", BOUNDS)
@pytest.mark.parametrize("name", OPS)
def test_pytorchs_own_samples(name, dtype):
    """Of many samples each n-th."""
    every = list(info(name).sample_inputs("cpu", dtype, requires_grad=True))
    for sample in every[:: max(1, len(every) // 40)]:
        given = [sample.input, *(x for x in sample.args if isinstance(x, torch.Tensor))]
        results, outputs = [], []
        for function in (getattr(ours, name), getattr(F, name)):
            y = function(sample.input, *sample.args, **sample.kwargs)
            outputs.append(y if isinstance(y, tuple) else (y,))
            weight = torch.linspace(-1, 1, y[0].numel() if isinstance(y, tuple) else y.numel(), dtype=dtype)
            loss = (outputs[-1][0] * weight.view(outputs[-1][0].shape)).sum()
            results.append((*outputs[-1], *torch.autograd.grad(loss, given)))
        for found, wanted in zip(*results, strict=True):
            close(found.double(), wanted.double(), BOUNDS[dtype])
            assert found.dtype == wanted.dtype
        assert all(map(lies_as, *outputs)), (sample, [[x.stride() for x in each] for each in outputs])


@pytest.mark.parametrize("name", [name for name in OPS if "transpose" not in name])
@pytest.mark.sampled(3)
def test_pytorchs_own_errors(name):
    """PyTorch's samples of bad arguments raise, and never compute."""
    for error in info(name).error_inputs("cpu"):
        given = error.sample_input
        with pytest.raises((RuntimeError, ValueError, TypeError)):
            getattr(ours, name)(given.input, *given.args, **given.kwargs)


@pytest.mark.parametrize("place", ["contiguous", "channels_last", "sliced"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_batch_norm_in_training(place, dtype):
    given = placed(random(3, 20, 5, 7, dtype=dtype), place), *(random(20, seed=k).to(dtype).detach() for k in (1, 2))
    found, wanted = [], []
    for function, into in ((ours.batch_norm, found), (F.batch_norm, wanted)):
        running = torch.zeros(20, dtype=dtype), torch.ones(20, dtype=dtype)
        x, weight, bias = (each.detach().requires_grad_() for each in given)
        y, of = gradients(lambda x, w, b, f=function, r=running: f(x, *r, w, b, True, 0.3, 1e-3), x, weight, bias)
        into += [y, *of, *running]
    for one, other in zip(found, wanted, strict=True):
        close(one.detach(), other.detach(), {torch.float32: 1e-5, torch.float64: 1e-12}.get(dtype, 3e-2))
    assert found[0].is_contiguous(memory_format=torch.channels_last) == (place == "channels_last")


@pytest.mark.nightly
def test_batch_norm_as_an_op():
    x, weight, bias = random(2, 5, 3, 4, dtype=torch.float64), *(random(5, dtype=torch.float64, seed=k) for k in (1, 2))
    assert torch.autograd.gradcheck(
        lambda *given: ours.batch_norm(given[0], None, None, *given[1:], True), (x, weight, bias)
    )
    for place in PLACES[:2]:
        given = placed(x, place), weight, bias, torch.zeros(5), None, placed(x, place), 0.1, 1e-5, 0.0, 1.0
        torch.library.opcheck(ops.batch_norm, given)
    for residual in (None, random(*x.shape, dtype=x.dtype, seed=3)):
        for bounds in ((-math.inf, math.inf), (0.0, 0.5)):
            given = [each for each in (x, weight, bias, residual) if each is not None]
            assert torch.autograd.gradcheck(
                lambda x, w, b, *r, bounds=bounds: ops.batch_norm(
                    x, w, b, None, None, *(r or (None,)), 0.1, 1e-5, *bounds
                )[0],
                given,
            )
    zeros = torch.zeros(5, dtype=x.dtype)
    for wrong in ((zeros, None, None, None, True), (zeros, zeros, None, None, True, None)):
        with pytest.raises((RuntimeError, TypeError, ValueError)):
            ours.batch_norm(x, *wrong)
    y = ours.batch_norm(x, None, None, weight, bias, True)
    (of_x,) = torch.autograd.grad(y.square().sum(), x, create_graph=True)
    with pytest.raises(NotImplementedError, match="first derivatives"):
        of_x.sum().backward()
    evaluated = torch.zeros(5, dtype=torch.float64), torch.ones(5, dtype=torch.float64)
    assert torch.equal(ours.batch_norm(x, *evaluated, weight, bias), F.batch_norm(x, *evaluated, weight, bias))


@pytest.mark.parametrize("seed", range(12))
def test_group_and_layer_norms(seed):
    """Random problems beside PyTorch in float64: ranks, strides, types, parameters that are not there."""
    rng = np.random.default_rng(seed)
    dtype = (torch.float32, torch.float64, torch.bfloat16)[seed % 3]
    groups, each, *sizes = (int(k) for k in rng.integers(1, 8, 2 + seed % 4))
    shape = int(rng.integers(1, 9)), groups * each, *sizes
    x = (random(*shape, dtype=torch.float64, seed=seed).detach() + 3).to(dtype)
    x = placed(x, PLACES[seed % 4] if x.dim() == 4 else "sliced")
    over = x.shape[int(rng.integers(1, x.dim())) :]
    for name, given, of in (("group_norm", groups, shape[1:2]), ("layer_norm", over, over)):
        if math.prod(over if name == "layer_norm" else (each, *sizes)) < 2:
            continue
        weight, bias = (random(*of, seed=k).detach().to(dtype) if seed % 5 else None for k in (1, 2))
        results = []
        for module, kind in ((ours, dtype), (F, torch.float64)):
            parts = [None if each is None else each.detach().to(kind).requires_grad_() for each in (x, weight, bias)]
            y = getattr(module, name)(parts[0], given, *parts[1:], eps=1e-3)
            given_back = random(*shape, grad=False, seed=3).to(dtype).to(kind)
            results.append((y, *torch.autograd.grad(y, [each for each in parts if each is not None], given_back)))
        for found, wanted in zip(*results, strict=True):
            assert found.dtype == dtype
            close(found.double(), wanted, BOUNDS[dtype])


@pytest.mark.nightly
def test_group_and_layer_norms_as_ops():
    x, weight, bias = random(2, 6, 3, 4, dtype=torch.float64), *(random(6, dtype=torch.float64, seed=k) for k in (1, 2))
    last = x.detach().permute(0, 2, 3, 1).requires_grad_()
    for function, op, y, over in (
        (ours.group_norm, ops.group_norm, x, 3), (ours.layer_norm, ops.layer_norm, last, [6]),
    ):  # fmt: skip
        assert torch.autograd.gradcheck(
            lambda *given, f=function, o=over: f(given[0], o, *given[1:]), (y, weight, bias)
        )
        for place in PLACES[:2]:
            torch.library.opcheck(op, (placed(y, place), over, weight, bias, 1e-5))
        (of_x,) = torch.autograd.grad(function(y, over, weight).square().sum(), y, create_graph=True)
        with pytest.raises(NotImplementedError, match="first derivatives"):
            of_x.sum().backward()
    each = torch.func.vmap(torch.func.grad(lambda x: ours.layer_norm(x, (4,)).square().sum()))(x.detach())
    wanted = torch.func.vmap(torch.func.grad(lambda x: F.layer_norm(x, (4,)).square().sum()))(x.detach())
    close(each, wanted, 1e-9)
