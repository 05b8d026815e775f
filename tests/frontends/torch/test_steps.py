"""Ops of a training step in plans, beside PyTorch's autograd in float64."""

import numpy as np
import pytest
from torch_models import nn, torch

import blockconv as bc
from blockconv.core.element_problem import GradientKind
from blockconv.core.types import element
from blockconv.network import ops
from blockconv.network.emitter import Emitter
from blockconv.network.ops.rule import Tensor

F = nn.functional
get_args = GradientKind.__args__
LAYOUTS = ("NCHW", "NHWC", "NCHW16")


def ran(make, *given, layouts="auto", threads=2):
    """The outputs of a plan of what `make(emitter, *tensors)` emits, which `Network.evaluate` confirms."""
    emitter = Emitter("step", folds=False)
    tensors = [
        emitter.input(Tensor(f"x{k}", x.shape, element(str(x.dtype).removeprefix("torch."))))
        for k, x in enumerate(given)
    ]
    network = emitter.network(tuple(made.name for made in make(emitter, *tensors)))
    arrays = {tensor.name: x.numpy() for tensor, x in zip(tensors, given, strict=True)}
    found = bc.compile(network, layouts=layouts, threads=threads).by_name(arrays)
    for name, wanted in network.evaluate(arrays).items():
        close(found[name], wanted)
    return [torch.from_numpy(found[name]) for name in network.outputs]


def close(found, wanted, error=2e-5):
    wanted = np.asarray(wanted, np.float64)
    assert found.shape == wanted.shape
    np.testing.assert_allclose(np.asarray(found, np.float64), wanted, rtol=0, atol=error * max(1, np.abs(wanted).max()))


def rand(*shape):
    return torch.randn(shape)


def gradients(f, *given):
    """(the gradient of the output, the gradients of the inputs), in float64."""
    doubles = [x.double().requires_grad_() for x in given]
    y = f(*doubles)
    grad = torch.randn(y.shape)
    return grad, torch.autograd.grad(y, doubles, grad.double())


WINDOWS = [
    (8, 24, 3, 1, 1, 1, 1), (8, 24, 3, 2, 1, 1, 4), (16, 16, 3, 1, 1, 1, 16), (3, 32, 7, 2, 3, 1, 1),
    (20, 12, 1, 1, 0, 1, 1), (8, 8, 3, 1, 2, 2, 2), (12, 20, 2, 2, 0, 1, 1),
]  # fmt: skip


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ic", "oc", "k", "s", "p", "d", "g"), WINDOWS)
def test_a_convolution_and_its_gradients_by_weights_that_flow(ic, oc, k, s, p, d, g, layout):
    x, w, b = rand(2, ic, 13, 11), rand(oc, ic // g, k, k), rand(oc)
    options = {"stride": s, "padding": p, "dilation": d, "groups": g}
    grad, wanted = gradients(lambda x, w, b: F.conv2d(x, w, b, **options), x, w, b)
    window = (s, s), ((p, p), (p, p)), (d, d)
    for last in (False, True):
        made = ops.FlowingConv2d(ops.Conv2d(*window, g), last)
        (y,) = ran(lambda e, *given, made=made: [e.emit(made, *given)], x, w, b, layouts=layout)
        close(y, F.conv2d(x.double(), w.double(), b.double(), **options))
        of_weights = ops.Conv2dBackwardWeights(ops.Conv2d(*window, g), last, (k, k), True)

        def both(e, *given, made=of_weights):
            of_w = e.emit(made, *given)
            return of_w, e.emit(ops.FurtherResult(0, (oc,), "float32"), of_w)

        for found, expected in zip(ran(both, x, grad, layouts=layout), wanted[1:], strict=True):
            close(found, expected)
    ends = [
        (p, (out - 1) * s + d * (k - 1) + 1 - p - size) for out, size in zip(grad.shape[2:], x.shape[2:], strict=True)
    ]
    of_x = ops.FlowingConv2d(ops.ConvTranspose2d((s, s), tuple(ends), (d, d), g))
    (found,) = ran(lambda e, *given: [e.emit(of_x, *given)], grad, w, layouts=layout)
    close(found, wanted[0])


def test_weights_are_packed_at_each_run():
    made = ops.FlowingConv2d(ops.Conv2d(pads=((1, 1), (1, 1))))
    emitter = Emitter("step", folds=False)
    shapes = {"x": (1, 16, 9, 9), "w": (16, 16, 3, 3)}
    tensors = [emitter.input(Tensor(name, shape, element("float32"))) for name, shape in shapes.items()]
    plan = bc.compile(emitter.network((emitter.emit(made, *tensors).name,)))
    x, w = rand(*shapes["x"]), rand(*shapes["w"])
    for _ in range(3):
        close(plan(x, w), F.conv2d(x.double(), w.double(), padding=1))
        w.add_(1)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("running", "residual"), [(True, True), (False, False)])
def test_a_batch_norm_of_training_and_its_gradients(layout, running, residual):
    x, scale, bias, mean, variance, added = (
        rand(3, 20, 5, 7),
        rand(20),
        rand(20),
        rand(20),
        rand(20).abs(),
        rand(3, 20, 5, 7),
    )
    kept = mean.double(), variance.double()
    y = F.batch_norm(x.double(), *kept, scale.double(), bias.double(), True, 0.1)
    wanted = [torch.relu(y + added.double() * residual), x.double().mean((0, 2, 3))]
    given = [x, scale, bias, *(mean, variance) * running, *[added] * residual]
    made = ops.BatchNorm(1e-5, 0.1, running, residual, 0.0)

    def norm(e, *tensors):
        y = e.emit(made, *tensors)
        return [y, *(e.emit(ops.FurtherResult(k, (20,), "float32"), y) for k in range(4 if running else 2))]

    y, means, inverses, *new = ran(norm, *given, layouts=layout)
    for found, expected in zip((y, means, *new), (*wanted, *kept * running), strict=True):
        close(found, expected)
    relu = ops.BatchNormBackward(0.0)

    def backward(e, *tensors):
        of_x = e.emit(relu, *tensors)
        return [of_x, *(e.emit(ops.FurtherResult(k, (20,), "float32"), of_x) for k in (0, 1))]

    def forward(x, w, b):
        return torch.relu(F.batch_norm(x, None, None, w, b, True))

    grad, wanted = gradients(forward, x, scale, bias)
    for found, expected in zip(
        ran(backward, x, grad, scale, bias, means, inverses, layouts=layout), wanted, strict=True
    ):
        close(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("groups", [1, 4, 16])
def test_a_group_norm_of_training_and_its_gradients(layout, groups):
    x, scale, bias = rand(3, 16, 5, 7), rand(16), rand(16)
    grad, wanted = gradients(lambda x, w, b: F.group_norm(x, groups, w, b), x, scale, bias)

    def norm(e, *tensors):
        y = e.emit(ops.GroupNormTraining(groups, 1e-5), *tensors)
        return [y, *(e.emit(ops.FurtherResult(k, (3, groups), "float32"), y) for k in (0, 1))]

    def backward(e, *tensors):
        of_x = e.emit(ops.GroupNormBackward(groups), *tensors)
        return [of_x, *(e.emit(ops.FurtherResult(k, (16,), "float32"), of_x) for k in (0, 1))]

    y, means, inverses = ran(norm, x, scale, bias, layouts=layout)
    close(y, F.group_norm(x.double(), groups, scale.double(), bias.double()))
    for found, expected in zip(ran(backward, x, grad, scale, means, inverses, layouts=layout), wanted, strict=True):
        close(found, expected)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pools_and_their_gradients(layout):
    x = rand(2, 20, 9, 11)
    grad, (wanted,) = gradients(lambda x: F.max_pool2d(x, 3, 2, 1), x)
    pool = ops.Pool2d("max", (3, 3), (2, 2), ((1, 1), (1, 1)))

    def forward(e, x):
        y = e.emit(ops.MaxPool2dIndices(pool), x)
        return [y, e.emit(ops.FurtherResult(0, None, "int64"), y)]

    y, indices = ran(forward, x, layouts=layout)
    assert all(map(torch.equal, (y, indices), F.max_pool2d(x, 3, 2, 1, return_indices=True)))
    backward = ops.PoolBackward(pool, (9, 11))
    close(ran(lambda e, *given: [e.emit(backward, *given)], grad, indices, layouts=layout)[0], wanted)
    for f, made in (
        (lambda x: F.avg_pool2d(x, 2), ops.Pool2d("avg_include_padding", (2, 2), (2, 2))),
        (lambda x: F.adaptive_avg_pool2d(x, (2, 3)), ops.AdaptivePool2d((2, 3))),
    ):
        grad, (wanted,) = gradients(f, x)
        backward = ops.PoolBackward(made, (9, 11))
        close(ran(lambda e, g, made=backward: [e.emit(made, g)], grad, layouts=layout)[0], wanted)


@pytest.mark.parametrize("kind", get_args)
def test_gradients_of_activations_are_autograds(kind):
    f = getattr(F, kind.removesuffix("_gradient"))
    x = torch.linspace(-8, 8, 2 * 3 * 5 * 7).reshape(2, 3, 5, 7)
    grad, (wanted,) = gradients(f, x)
    given = f(x) if kind.startswith(("relu", "sigmoid", "tanh")) else x
    made = ops.ActivationBackward(kind)
    close(ran(lambda e, *given: [e.emit(made, *given)], grad, given)[0], wanted)


def compiled_step(model, x, backend):
    """The gradients of a step of a model: of its parameters, and of what it reads."""
    torch._dynamo.reset()
    torch.manual_seed(0)
    x = x.clone().requires_grad_()
    torch.compile(model, backend=backend)(x).square().sum().backward()
    return [x.grad, *(p.grad for p in model.parameters())]


EMPTY = {
    "pools": lambda: nn.Sequential(nn.AvgPool2d(3, 1, 1), nn.MaxPool2d(2), nn.SiLU()),
    "group norm": lambda: nn.Sequential(nn.GroupNorm(2, 8), nn.ReLU()),
    "layer norm": lambda: nn.LayerNorm([7, 7]),
    "dropout": lambda: nn.Dropout(0.2),
}


@pytest.mark.parametrize("between", EMPTY)
def test_an_empty_batch_has_gradients_of_zero(between):
    """Memory that was in use before holds other numbers."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3), EMPTY[between](), nn.Conv2d(8, 8, 3), nn.Sigmoid())
    for images in (0, 2):
        model.zero_grad()
        used = [torch.full((p.numel(),), 7e5) for p in model.parameters() for _ in range(20)]
        del used
        found = compiled_step(model, torch.randn(images, 3, 9, 9), bc.torch.backend)
        assert all(g.isfinite().all() and bool(g.any()) == (images > 0) for g in found[1:])


def test_a_checkpoint_with_dropout_is_compiled():
    first, rest = nn.Conv2d(3, 8, 3), nn.Sequential(nn.Conv2d(8, 8, 3), nn.Dropout(0.5))

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.rest = first, rest

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.rest, self.first(x), use_reentrant=False)

    x, steps = torch.randn(2, 3, 9, 9), []
    for backend in ("aot_eager", bc.torch.backend):
        model = Model()
        model.zero_grad()
        steps.append(compiled_step(model, x, backend))
    for found, wanted in zip(*steps, strict=True):
        close(found.detach().numpy(), wanted.numpy())


def test_heads_of_queries_share_keys_in_a_step():
    q, k, v = (rand(2, heads, 6, 8) for heads in (6, 2, 2))
    grad, wanted = gradients(lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), q, k, v)
    torch._dynamo.reset()
    given = [x.clone().requires_grad_() for x in (q, k, v)]
    attention = torch.compile(
        lambda q, k, v: F.scaled_dot_product_attention(q, k, v, enable_gqa=True), backend=bc.torch.backend
    )
    for found, expected in zip(torch.autograd.grad(attention(*given), given, grad), wanted, strict=True):
        close(found.numpy(), expected)
