"""torch.compile(backend="blockconv"): values, strides, weights that change, what runs in PyTorch and what is said."""

from __future__ import annotations

import copy
import importlib
import math
import re
import shutil
import warnings
import weakref
from pathlib import Path

import numpy as np
import pytest
from torch_models import NETWORKS, Apply, F, Residual, made, nn, torch

import blockconv as bc

backend = importlib.import_module("blockconv.torch").backend
report, refresh = bc.torch.report, bc.torch.refresh


@pytest.fixture(autouse=True)
def fresh():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def images(*shape, seed=0):
    return torch.from_numpy(np.random.default_rng(seed).standard_normal(shape, np.float32))


def close(found, wanted, bound=1e-5):
    assert found.shape == wanted.shape
    assert found.dtype == wanted.dtype
    assert (found - wanted).abs().max() <= bound * wanted.abs().max()


@pytest.mark.slow
@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.sampled(2)
def test_a_network_is_eagers_with_its_strides(name):
    model, x = made(NETWORKS[name]), images(2, 3, 16, 16)
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        for tensor in (x, x.to(memory_format=torch.channels_last)):
            found, wanted = fast(tensor), model(tensor)
            close(found, wanted)
            if name != "shuffled":  # whose strides eager does not trace as they are
                assert found.stride() == wanted.stride()
    for graph in report(model):
        assert (graph.taken, graph.plans, graph.refused, graph.failed) == (graph.nodes, 1, [], [])
        assert graph.seconds > 0


@pytest.mark.slow
def test_sizes_that_change_are_plans_of_one_graph():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.Flatten(2), nn.Linear(36, 4)))
    fast = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for n in (2, 3, 5, 3):
            close(fast(images(n, 3, 8, 8)), model(images(n, 3, 8, 8)))
        close(fast(images(4, 3, 16, 8)[:, :, ::2]), model(images(4, 3, 16, 8)[:, :, ::2]))
    assert all(graph.plans == 1 and graph.packed <= 1 for graph in report(model))
    assert len(report(model)) <= 3


@pytest.mark.slow
def test_an_instance_norm_repeats_its_weight_for_any_batch():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.InstanceNorm2d(8, affine=True), nn.Conv2d(8, 4, 3)))
    fast = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for n, size in ((2, 8), (3, 9), (5, 12), (2, 8)):
            close(fast(images(n, 3, size, 8)), model(images(n, 3, size, 8)))
        model[1].weight.mul_(3)
        close(fast(images(4, 3, 10, 8)), model(images(4, 3, 10, 8)))
    for graph in report(model):
        assert (graph.plans, graph.refused, graph.failed) == (1, [], [])


def planned(monkeypatch):
    """How often layouts are searched, from now on."""
    found, plan = [], importlib.import_module("blockconv.network.plan").plan_layouts
    monkeypatch.setattr("blockconv.network.plan.plan_layouts", lambda *args: found.append(args) or plan(*args))
    return found


@pytest.mark.slow
def test_many_sizes_share_the_choices_of_one(monkeypatch):
    class Sized(nn.Module):
        """Numbers and a constant that depend on the size go out beside the convolution, which reads one too."""

        def __init__(self):
            super().__init__()
            self.conv = nn.Conv2d(3, 8, 3)

        def forward(self, x):
            y = self.conv(x)
            large = F.interpolate(y, size=x.shape[2:], mode="bilinear")
            return y.flatten(2) * y.shape[2], torch.arange(y.shape[3]) * 2, y.shape[2] * 3, large

    model = made(Sized)
    fast = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        fast(images(2, 3, 8, 8)), fast(images(2, 3, 9, 8))
        searches = planned(monkeypatch)
        for k in 2 * [*range(12)]:
            x = images(2, 3, 8 + k, 20 - k)
            for found, wanted in zip(fast(x), model(x), strict=True):
                assert found == wanted if isinstance(wanted, int) else torch.allclose(found, wanted, atol=1e-4)
    assert not searches
    assert not any(graph.failed for graph in report(model))


class Steps(nn.Module):
    """As a diffusion model, with a time step; and a threshold."""

    def __init__(self):
        super().__init__()
        self.conv, self.each = nn.Conv2d(3, 4, 3), nn.Parameter(torch.linspace(0, 1, 4).view(1, 4, 1, 1))

    def forward(self, x, t, bound):
        y = self.conv(x) * (t / 10) + self.each * t
        return torch.where(y > bound, y.clamp(-t, t), y - bound), t + 1


def test_numbers_that_a_model_calculates_with_are_inputs_of_one_plan(monkeypatch):
    model = made(Steps)
    fast, x = torch.compile(model, backend=backend), images(2, 3, 8, 8)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", bc.SlowPathWarning)
        for k in range(3):
            fast(x, 3 + k, 0.25 * k)
        searches = planned(monkeypatch)
        for t, bound in ((7, 0.3), (12, -0.5), (2, 0.1), (40, 1.5)):
            (found, after), (wanted, _) = fast(x, t, bound), model(x, t, bound)
            close(found, wanted)
            assert after == t + 1
    assert not searches
    assert not any(graph.failed for graph in report(model))


class Scaled(nn.Module):
    """A convolution whose weight is standardised, and scaled by a number of the module's."""

    def __init__(self):
        super().__init__()
        self.weight, self.scale = nn.Parameter(images(4, 3, 3, 3)), 0.3

    def forward(self, x, t):
        gain = torch.full((4,), 2.0) * self.scale
        weight = F.batch_norm(self.weight.view(1, 4, -1), None, None, gain, training=True).view_as(self.weight)
        return F.conv2d(x, weight) * self.scale + (t + 1)


def test_floats_of_a_module_are_constants_and_other_floats_flow():
    model = made(Scaled)
    fast, x = torch.compile(model, backend=backend, dynamic=True), images(2, 3, 8, 8)
    with torch.no_grad():
        for t in (1.5, 2.5):
            close(fast(x, t), model(x, t))
        (graph,) = report(model)
        assert (graph.taken, graph.refused, graph.packed) == (graph.nodes, [], 1)
        assert len(graph.parts[0].flows) == 2, "the image and t"
        model.scale = -0.7
        close(fast(x, 1.5), model(x, 1.5))
        assert (report(model), graph.packed) == ((graph,), 2)
        torch._dynamo.reset()
        fast = torch.compile(model, backend=backend)
        for model.scale in (0.5, 0.6, 0.7):  # Dynamo takes a float that changed as an input
            close(fast(x, 1.5), model(x, 1.5))
        assert all(graph.packed <= 1 for graph in report(model)[1:])


@pytest.mark.slow
def test_constants_that_depend_on_sizes_are_not_shared_between_plans():
    """A number for each channel is broadcast to the size of the image, under one name at each size."""

    class Grid(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv, self.each = nn.Conv2d(3, 4, 3), nn.Parameter(torch.randn(1, 4, 1, 1))

        def forward(self, x):
            y = self.conv(x)
            return y * (y.mean(1, True) + self.each)

    model = made(Grid)
    fast = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for height in (8, 12, 9, 20, 8):
            close(fast(images(2, 3, height, 8)), model(images(2, 3, height, 8)))


def changes(model):
    """Ways in which weights change and versions too."""
    optimizer = torch.optim.SGD(model.parameters(), 0.5)

    def step():
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        optimizer.step()

    def loaded():
        model.load_state_dict({name: value * 1.5 for name, value in model.state_dict().items()})

    def copied():
        with torch.no_grad():
            model[1].running_var.copy_(torch.full((8,), 3.0))

    def replaced():
        model[0].weight = nn.Parameter(model[0].weight.detach() * 2)

    return step, loaded, copied, replaced


def test_weights_that_change_in_place_are_packed_anew():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU()))
    x, fast = images(2, 3, 9, 9), torch.compile(model, backend=backend)
    with torch.no_grad():
        before = fast(x)
        (graph,) = report(model)
        for count, change in enumerate(changes(model), start=2):
            with torch.enable_grad():
                change()
            found = fast(x)
            assert not torch.allclose(found, before)
            close(found, model(x))
            close(fast(x), model(x))
            before = found
            assert graph.packed == count or change.__name__ == "replaced"


class ByData(torch.optim.Optimizer):
    """As many optimizers write: through `.data`, which counts no version."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self):
        for parameter in self.param_groups[0]["params"]:
            parameter.data.sub_(parameter.grad)


@pytest.mark.parametrize(
    "make",
    [ByData, *(lambda p, f=f: f(p, 0.5, fused=True) for f in (torch.optim.AdamW, torch.optim.SGD))],
    ids=["data", "fused AdamW", "fused SGD"],
)
def test_an_optimizer_that_counts_no_version_is_noticed(make):
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3)))
    x, own = images(2, 3, 9, 9), bc.torch.convert(copy.deepcopy(model))
    for each, call in ((model, torch.compile(model, backend=backend)), (own, own)):
        optimizer = make(each.parameters())
        for _ in range(2):
            with torch.no_grad():
                call(x)
            each(x).square().sum().backward()
            optimizer.step()
            with torch.no_grad():
                close(call(x), F.conv2d(x, each[0].weight, each[0].bias))


def test_the_plans_of_a_training_step_can_be_looked_at(tmp_path):
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 1))).train()
    fast = torch.compile(model, backend=backend)
    fast(images(2, 3, 9, 9)).square().sum().backward()
    said = {graph.kind: "".join(plan.explain() for plan in graph.made) for graph in report(model)}
    assert {*said} == {"forward", "backward"}
    assert "batch_norm" in said["forward"]
    assert "backward_data" in said["backward"]
    assert "conv_backward_weights" in said["backward"]
    (plan,) = report(model)[-1].made
    plan.report(tmp_path / "step.html")
    assert "conv_backward_weights" in (tmp_path / "step.html").read_text(encoding="utf-8")


@pytest.mark.parametrize("trains", [False, True])
def test_parameters_are_not_held_by_weak_references(trains):
    """PyTorch swaps no tensor that has one, as `load_state_dict` and `to` may. Its own, of tracing, go in time."""
    model, other = (made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3)), seed) for seed in (0, 1))
    x, fast = images(1, 3, 8, 8), torch.compile(model, backend=backend)
    for k in range(2):
        with torch.set_grad_enabled(trains):
            close(fast(x).detach(), model(x).detach())
        assert weakref.ref not in {type(known) for known in weakref.getweakrefs(model[0].weight)}
        assert ("forward" if trains else "inference") in [graph.kind for graph in report(model)]
        assert not report(other)
        if k == 0:
            model[0].weight = nn.Parameter(other[0].weight.detach().clone())


def test_an_address_that_is_used_again_is_no_known_weight():
    """An assignment to `.data` changes no version; memory that it frees may come back with other values."""
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3)))
    x, fast = images(2, 3, 9, 9), torch.compile(model, backend=backend)
    weight, first = model[0].weight, model[0].weight.detach().clone()
    with torch.no_grad():
        for k in range(8):
            weight.data = first * (k + 1)
            close(fast(x), model(x))
            weight.data = first  # what was assigned before is free
            weight.data = first * -(k + 1)
            close(fast(x), model(x))


def test_a_state_that_each_call_writes_is_no_weight():
    class Stream(nn.Module):
        def __init__(self):
            super().__init__()
            self.conv = nn.Conv1d(3, 8, 3)
            self.register_buffer("past", torch.zeros(2, 3, 2))

        def forward(self, x):
            x = torch.cat([self.past, x], -1)
            self.past.copy_(x[..., -2:])
            return self.conv(x)

    own = made(Stream)
    theirs, fast = copy.deepcopy(own), torch.compile(own, backend=backend)
    with torch.no_grad():
        for k in range(3):
            close(fast(images(2, 3, 9, seed=k)), theirs(images(2, 3, 9, seed=k)))
    assert [graph.packed for graph in report(own)] == [1]


def test_what_blockconv_writes_into_tensors_has_a_new_version():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8)))
    x, fast = images(2, 3, 9, 9), torch.compile(model, backend=backend)
    with torch.no_grad():
        before, norm = fast(x), model[1]
        bc.batch_norm(model[0](x), norm.running_mean, norm.running_var)
        close(fast(x), model(x))
        assert not fast(x).equal(before)
    kept = torch.ones(2, 8, 7, 7, requires_grad=True).exp()
    bc.conv2d(x, model[0].weight.detach(), out=(out := kept.detach()))
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        kept.sum().backward()
    assert out.equal(kept)


def test_outputs_that_are_views_share_memory_as_in_eager_mode():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))

    def call(x):
        y = model(x)
        return y, y.flatten(1), y[:, ::2], y.permute(0, 2, 3, 1).sigmoid().flatten(2), *y.mT.split(4, 1)

    x, fast = images(2, 3, 9, 9), torch.compile(call, backend=backend)
    with torch.no_grad():
        found, wanted = fast(x), call(x)
        for a, b in zip(found, wanted, strict=True):
            close(a, b)
            assert a.stride() == b.stride()
        for y in (found, wanted):
            y[0].zero_()
        assert [a.any().item() for a in found] == [b.any().item() for b in wanted]
    (graph,) = report(model)
    assert (graph.taken, graph.refused) == (graph.nodes, [])


def test_sizes_that_data_decide_are_row_major():
    conv = made(lambda: nn.Conv2d(3, 8, 3))

    def call(x, count):
        k = count.item()
        torch._check(k >= 1)
        torch._check(k <= 4)
        return conv(x)[:, :k] * k

    fast, x = torch.compile(call, backend=backend), images(2, 3, 9, 9)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", bc.SlowPathWarning)
        for k in (1, 2, 3):
            close(fast(x, torch.tensor(k)), call(x, torch.tensor(k)))
            assert fast(x, torch.tensor(k)).is_contiguous()


def test_a_default_device_is_not_that_of_results():
    model = made(lambda: Apply(lambda x, w: F.conv2d(x, w).permute(3, 2, 0, 1), w=images(8, 3, 3, 3)))
    x, fast = images(2, 3, 9, 9), torch.compile(model, backend=backend)
    with torch.no_grad(), torch.device("meta"):
        found = fast(x)
    close(found, model(x))


class Scans(nn.Module):
    """An op that blockconv does not have."""

    def forward(self, x):
        return torch.logcumsumexp(x, 1)


class Odd(nn.Module):
    """In the middle, an op that blockconv does not have."""

    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 4, 3)

    def forward(self, x):
        return self.b(torch.logcumsumexp(torch.relu(self.a(x)), 1))


class Positions(nn.Module):
    """A bias by the distances of pixels, as attention has it: integers that depend on no input."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3, padding=1)

    def forward(self, x):
        pixels = torch.arange(8)
        away = pixels.view(1, -1) - pixels.view(-1, 1)
        table = torch.zeros(8, 8, 2)
        table[:, :, 0], table[:, :, 1] = away.repeat(1, 1), away**2
        return self.conv(x) + torch.where(away == 0, 1.0, table.sum(-1))


def test_what_depends_on_no_input_is_constant():
    model = made(Positions)
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        close(fast(images(2, 3, 8, 8)), model(images(2, 3, 8, 8)))
    (graph,) = report(model)
    assert (graph.plans, graph.refused, graph.failed) == (1, [], [])


class Grid(nn.Module):
    """The coordinates of an image's columns, which depend on its size alone."""

    def forward(self, x):
        grid = torch.arange(x.shape[-1], dtype=torch.float32)
        for _ in range(8):  # enough ops for a part
            grid = grid * 0.5 + 1
        return torch.logcumsumexp(x, 1), grid


@pytest.mark.parametrize("dynamic", [False, True])
def test_a_constant_output_is_the_callers_own(dynamic):
    model = Grid()
    fast = torch.compile(model, backend=backend, dynamic=dynamic)
    with torch.no_grad():
        for _ in range(2):
            found, wanted = fast(images(2, 3, 8, 8)), model(images(2, 3, 8, 8))
            close(found[1], wanted[1])
            found[1].zero_()
    assert not any(graph.failed for graph in report())


class Tokens(nn.Module):
    """Numbers looked up, and attended with a mask; places, and the vector of the largest number."""

    def __init__(self):
        super().__init__()
        self.table = nn.Embedding(9, 8)

    def forward(self, ids):
        x = self.table(ids)
        scores = (x @ x.mT).masked_fill((ids == 0)[:, None], -1e9)
        y = scores.softmax(-1) @ x
        return y[torch.arange(2), ids.argmax(-1)], (ids != 0).cumsum(1), ids > 2


def test_a_roll_of_sizes_that_change_runs_natively():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 4, 3), Apply(lambda x: x.roll((-2, x.shape[3] // 2), (2, 3)))))
    fast = torch.compile(model, backend=backend, dynamic=True)
    with torch.no_grad():
        for shape in ((2, 3, 8, 9), (2, 3, 13, 8)):
            close(fast(images(*shape)), model(images(*shape)))
    assert [(graph.refused, graph.failed, graph.plans) for graph in report(model)] == [([], [], 1)]


def test_masks_and_indices_run_natively():
    model = made(Tokens)
    fast = torch.compile(model, backend=backend)
    with torch.no_grad():
        for ids in (torch.tensor([[3, 1, 8, 0], [2, 0, 0, 0]]), torch.tensor([[1, 2, 3, 4], [8, 7, 0, 0]])):
            for found, wanted in zip(fast(ids), model(ids), strict=True):
                torch.testing.assert_close(found, wanted)
    (graph,) = report(model)
    assert (graph.nodes, graph.plans, graph.failed) == (graph.taken, 1, [])


def test_as_strided_reads_the_memory_behind_a_view():
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()))

    def call(x):
        return model(x)[:, 2:].transpose(2, 3).as_strided((2, 3, 4), (250, 7, 2))

    fast = torch.compile(call, backend=backend)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", bc.SlowPathWarning)
        close(fast(images(2, 3, 8, 8)), call(images(2, 3, 8, 8)))
    assert [graph.taken for graph in report(model)] == [2]


def test_what_runs_in_pytorch_is_named_and_warned_of_once():
    model = made(Odd)
    fast = torch.compile(model, backend=backend)
    with (
        torch.no_grad(),
        pytest.warns(bc.SlowPathWarning, match="1 of 4 ops run in PyTorch: aten.logcumsumexp") as caught,
    ):
        close(fast(images(2, 3, 8, 8)), model(images(2, 3, 8, 8)))
    assert len(caught) == 1
    (graph,) = report(model)
    assert (graph.nodes, graph.taken, graph.plans) == (4, 3, 2)
    assert re.search(r"in PyTorch: aten.logcumsumexp: 1 node, the first 'logcumsumexp'", str(report(model)))


def test_a_few_small_ops_are_no_slow_path():
    """As after a break of the graph. The report has them."""
    x, unpool = images(2, 3, 4, 6), lambda y, at: nn.functional.max_unpool2d(y, at, 2)
    pooled = nn.functional.max_pool2d(x, 2, return_indices=True)
    most = torch.compile(lambda x: x.max(1)[0] + 1, backend=backend)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", bc.SlowPathWarning)
        close(torch.compile(unpool, backend=backend, dynamic=True)(*pooled), unpool(*pooled))
        close(most(x), x.max(1)[0] + 1)
    assert "aten.max: too few ops for a plan: 1 node" in str(report()[-1])


class Outside(nn.Module):
    """Ops that plans do not have: indices of maxima, statistics of the batch, and weights that flow."""

    def __init__(self):
        super().__init__()
        self.norm, self.w = nn.BatchNorm2d(3), nn.Linear(3, 3 * 9)

    def forward(self, x):
        y, at = nn.functional.max_pool2d(self.norm(x), 2, return_indices=True)
        n, c, h, w = y.shape
        weights = self.w(y.mean((2, 3))).view(-1, 1, 3, 3)
        y = nn.functional.conv2d(y.view(1, -1, h, w), weights, padding=1, groups=n * c).view(y.shape)
        return nn.functional.max_unpool2d(y, at, 2), at


def test_what_no_plan_has_runs_on_ops_of_their_own():
    model, x = made(Outside).train(), images(2, 3, 8, 12)
    own = copy.deepcopy(model)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error", bc.SlowPathWarning)
        (y, at), wanted = torch.compile(own, backend=backend)(x), model(x)
    close(y, wanted[0])
    assert torch.equal(at, wanted[1])
    for a, b in zip(own.buffers(), model.buffers(), strict=True):
        close(a.float(), b.float())
    assert all("too few ops" in line for graph in report(own) for line in graph.refused)


@pytest.mark.nightly
@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++", "c++"))), reason="no C++ compiler here")
def test_inductor_compiles_what_is_left():
    """Between plans, in inference and in a step."""
    model = made(lambda: nn.Sequential(Odd(), nn.BatchNorm2d(4), nn.MaxPool2d(2)))
    model[0].b.bias = None  # its gradient is noise before a batch norm
    fast, x = torch.compile(model, backend=backend, options={"fallback": "inductor"}), images(2, 3, 12, 12)

    def ops_of(call):
        with torch.profiler.profile() as seen:
            call()
        return {event.key for event in seen.key_averages()}

    with torch.no_grad(), pytest.warns(bc.SlowPathWarning, match="1 of 6 ops run in PyTorch: aten.logcumsumexp"):
        close(fast(x), model(x))
    with torch.no_grad():
        assert any("CompiledFxGraph" in op for op in ops_of(lambda: fast(x)))
        whole = nn.Sequential(Scans(), model)
        twice = torch.compile(whole, backend=backend, options={"fallback": "inductor"})
        for height in (13, 15):
            x = images(2, 3, height, 12)
            close(fast(x), model(x))
            close(twice(x), whole(x))
        x = images(2, 3, 12, 12)
    own, found = copy.deepcopy(model.train()), []
    trained = torch.compile(own, backend=backend, options={"fallback": "inductor"})
    for each, call in ((model, model), (own, trained)):
        y = call(x)
        y.square().sum().backward()
        found.append([y, *(parameter.grad for parameter in each.parameters()), *each.buffers()])
    for a, b in zip(*found, strict=True):
        close(b.float(), a.float(), 1e-4)
    assert [graph.taken for graph in report(own)] == [6, 24]
    seen = ops_of(lambda: trained(x).sum().backward())
    assert any("CompiledFxGraph" in op for op in seen)
    assert not {"aten::convolution", "aten::native_batch_norm", "aten::threshold_backward"} & seen


def test_attention_is_one_op():

    class Attention(nn.Module):
        def __init__(self):
            super().__init__()
            self.patches, self.out = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 5)

        def forward(self, x):
            x = self.patches(x).flatten(2).mT.contiguous().unflatten(2, (2, 8)).transpose(1, 2)
            return self.out(nn.functional.scaled_dot_product_attention(x, x, x).transpose(1, 2).flatten(2))

    model, x = made(Attention), images(2, 3, 16, 16)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", bc.SlowPathWarning)
        close(torch.compile(model, backend=backend)(x), model(x))
    (graph,) = report(model)
    assert graph.nodes == graph.taken, graph.refused


class Heads(nn.Module):
    """Attention between two projections. how: arguments of PyTorch's function; a mask may leave out all of a row."""

    def __init__(self, **how):
        super().__init__()
        self.how, self.qkv, self.out = how, nn.Linear(24, 72), nn.Linear(24, 24)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 3, 8)).permute(2, 0, 3, 1, 4).unbind()
        return self.out(nn.functional.scaled_dot_product_attention(q, k, v, **self.how).transpose(1, 2).flatten(2))


@pytest.mark.parametrize("length", [10, 33])
@pytest.mark.parametrize("how", ["plain", "mask", "rows left out", "causal"])
def test_attention_trains_in_a_plan_where_rows_are_short(how, length):
    mask = torch.randn(length, length).masked_fill(torch.rand(length, length) > 0.8, -torch.inf)
    given = {
        "plain": {"scale": 0.3},
        "mask": {"attn_mask": mask.index_fill(1, torch.tensor(0), 0.0)},
        "rows left out": {"attn_mask": torch.rand(length, length).tril(-1) > 0},
        "causal": {"is_causal": True},
    }[how]
    model, x = Heads(**given), torch.randn(2, length, 24, requires_grad=True)
    y = torch.compile(model, backend=backend)(x)
    found = [y, *torch.autograd.grad(y.square().sum(), [x, *model.parameters()])]
    exact = copy.deepcopy(model).double()
    if "attn_mask" in given and given["attn_mask"].is_floating_point():
        exact.how = {"attn_mask": given["attn_mask"].double()}
    x = x.detach().double().requires_grad_()
    y = exact(x)
    wanted = [y, *torch.autograd.grad(y.square().sum(), [x, *exact.parameters()])]
    for a, b in zip(found, wanted, strict=True):
        close(a, b.float())
    forward, backward = report(model)
    whole = length <= 32
    assert (forward.plans, backward.plans) == ((1, 1) if whole else (2, 2))
    assert (not forward.refused and not backward.refused) == whole


def test_views_that_a_step_keeps_share_the_memory_of_what_they_show():
    """The parts of a projection are kept for the gradients as views of one tensor, as in eager mode."""
    model, x, held = Heads(), torch.randn(2, 10, 24), []
    y = torch.compile(model, backend=backend)(x)
    held = [kept for kept in y.grad_fn.saved_tensors if kept.shape == (2, 3, 10, 8)]
    owners = {kept.untyped_storage().data_ptr() for kept in held}
    assert len(held) >= 3
    assert len(owners) <= len(held) - 2


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
def test_other_types(dtype):
    model = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())).to(dtype)
    fast, x = torch.compile(model, backend=backend), images(1, 3, 8, 8).to(dtype)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("ignore", bc.SlowPathWarning)
        close(fast(x), model(x), 0.01 if dtype == torch.bfloat16 else 1e-12)
    (graph,) = report(model)
    assert (graph.taken, graph.plans) == (2, 1)


def test_other_devices_are_pytorchs():
    """There is no CUDA here. The device "meta" stands for all others."""
    model, x = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())), images(1, 3, 8, 8)
    elsewhere = copy.deepcopy(model).to("meta")
    fast = torch.compile(elsewhere, backend=backend)
    with torch.no_grad(), pytest.warns(bc.SlowPathWarning, match="2 of 2 ops run in PyTorch: .*on meta"):
        y = fast(x.to("meta"))
    assert (y.device.type, y.shape) == ("meta", model(x).shape)
    y = torch.compile(copy.deepcopy(elsewhere), backend=backend)(x.to("meta"))  # a step of training
    y.sum().backward()
    assert y.device.type == "meta"


def test_inference_mode_and_options():
    model, x = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU())), images(1, 3, 8, 8)
    fast = torch.compile(model, backend=backend, options={"threads": 1, "layouts": "NHWC"})
    with torch.inference_mode():
        close(fast(x), model(x))
    fast(x).sum().backward()  # also in a step of training
    half = torch.compile(model, backend=backend, options={"precision": "bfloat16"})
    torch._dynamo.reset()
    with torch.no_grad():
        close(half(x), model(x), 0.02)
        assert not half(x).equal(model(x))
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match=r"options=.*'thread'.* has to be among threads"):
        torch.compile(model, backend=backend, options={"thread": 1})(x)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="fallback='gcc': has to be 'eager' or 'inductor'"):
        torch.compile(model, backend=backend, options={"fallback": "gcc"})(x)
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(Exception, match="layouts='FOO'"):
        torch.compile(model, backend=backend, options={"layouts": "FOO"})(x)


@pytest.mark.parametrize("name", ["resnet", pytest.param("unet", marks=pytest.mark.slow)])
def test_a_training_step_is_eagers(name):
    """Batch norms in training mode, gradients of all parameters and of the input, in both memory formats."""
    for format in (torch.contiguous_format, torch.channels_last):
        torch._dynamo.reset()
        theirs = made(NETWORKS[name]).train().to(memory_format=format)
        own = copy.deepcopy(theirs)
        found = []
        for model, call in ((theirs, theirs), (own, torch.compile(own, backend=backend))):
            x = images(4, 3, 16, 16).to(memory_format=format).requires_grad_()
            y = call(x)
            y.square().sum().backward()
            found.append([y, x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()])
        for a, b in zip(*found, strict=True):
            close(b.float(), a.float(), 1e-4)
        graphs = {graph.kind: graph for graph in report(own)}
        assert [graphs[kind].plans for kind in ("forward", "backward")] == [1, 1 + (name == "unet")]
        refused = graphs["forward"].refused + graphs["backward"].refused
        pytorchs = "aten.copy_: ", "aten.upsample_bilinear2d_backward: "  # copy_: of running statistics
        assert all(line.startswith(pytorchs) for line in refused), refused


class Windows(nn.Module):
    """Every op that training puts on blockconv, with biases."""

    def __init__(self):
        super().__init__()
        self.images = nn.Sequential(
            nn.BatchNorm2d(3), nn.Conv2d(3, 8, 3), nn.ReLU(), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1),
            nn.AdaptiveAvgPool2d((3, 2)),
            nn.ConvTranspose2d(8, 4, 3, 2, 1, 1),
        )  # fmt: skip
        self.rows = nn.Sequential(nn.Conv1d(4, 6, 3, padding=1), nn.ConvTranspose1d(6, 4, 2, 2), nn.AvgPool1d(2))

    def forward(self, x):
        return self.rows(self.images(x).flatten(2).contiguous())


@pytest.mark.slow
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.sampled(3)
def test_what_we_have_of_a_training_step_is_ours(format, dtype):
    theirs = made(Windows).train().to(memory_format=format)
    own, found = copy.deepcopy(theirs), []
    for model, call in ((theirs, theirs), (own, torch.compile(own, backend=backend))):
        x = images(2, 3, 16, 16).to(memory_format=format).requires_grad_()
        with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
            y = call(x)
        y.float().square().sum().backward()
        found.append([y, x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()])
    for a, b in zip(*found, strict=True):
        close(b.float(), a.float(), 1e-5 if dtype == torch.float32 else 0.03)
    refused = [line for graph in report(own) for line in graph.refused]
    assert all(line.startswith("aten.copy_: ") for line in refused), refused  # of running statistics


@pytest.mark.parametrize("affine", [True, False])
def test_instance_norms_of_a_training_step_are_ours(affine):
    theirs = made(
        lambda: nn.Sequential(nn.ReLU(), nn.InstanceNorm2d(4, affine=affine), nn.Sigmoid(), nn.Conv2d(4, 8, 3))
    )
    own, found = copy.deepcopy(theirs), []
    for model, call in ((theirs, theirs), (own, torch.compile(own, backend=backend))):
        x = images(2, 4, 12, 10).requires_grad_()
        (call(x) * images(2, 8, 10, 8, seed=1)).sum().backward()
        found.append([x.grad, *(parameter.grad for parameter in model.parameters())])
    for a, b in zip(*found, strict=True):
        close(b, a)
    assert not [line for graph in report(own) for line in graph.refused]


@pytest.mark.parametrize("kept", ["weight", "bias", "none"])
def test_a_step_of_a_batch_norm_without_a_gradient_for_all_factors(kept):
    norm = lambda: nn.BatchNorm2d(8, affine=kept != "none")  # noqa: E731
    theirs = made(lambda: nn.Sequential(nn.Conv2d(3, 8, 3, bias=False), norm(), nn.ReLU(), nn.Conv2d(8, 4, 1))).train()
    for name, parameter in theirs[1].named_parameters():
        parameter.requires_grad_(name == kept)
    own, found = copy.deepcopy(theirs), []
    for model, call in ((theirs, theirs), (own, torch.compile(own, backend=backend))):
        call(images(2, 3, 12, 10)).square().sum().backward()
        found.append([parameter.grad for parameter in model.parameters() if parameter.requires_grad])
    for a, b in zip(*found, strict=True):
        close(b, a, 1e-4)


def judged(monkeypatch):
    """The ops of each graph of a step from now on, as its plans get them."""
    graphs, judge = [], importlib.import_module("blockconv.frontends.torch.backend")._judged

    def kept(graph, constant):
        graphs.append([node for node in graph.nodes if node.op == "call_function"])
        return judge(graph, constant)

    monkeypatch.setattr("blockconv.frontends.torch.backend._judged", kept)
    return graphs


def masks(ops):
    """The number of gradients of ReLUs and clips."""
    return sum(str(op.target).startswith(("aten.threshold_backward", "aten.hardtanh_backward")) for op in ops)


class Norms(nn.Module):
    """What may follow a batch norm: ReLU6, an addition and ReLU, an addition, and readers that forbid a fusion."""

    def __init__(self):
        super().__init__()
        self.convs = nn.ModuleList(nn.Conv2d(4, 4, 1, bias=False) for _ in range(6))
        self.norms = nn.ModuleList(nn.BatchNorm2d(4) for _ in range(6))
        self.norms[3].momentum, self.norms[4].weight = 0.3, None

    def forward(self, x):
        parts = [self.norms[k](self.convs[k](x)) for k in range(6)]
        a = F.relu6(parts[0], inplace=True)
        b = F.relu(a + parts[1])
        c = parts[2] + b
        d = F.relu(parts[3])
        e = parts[4] * F.hardtanh(parts[4], -0.5, 0.25)
        return (F.relu(parts[5] + c.mean((2, 3), keepdim=True)) + c * d + d.sigmoid() + e).sigmoid()


@pytest.mark.slow
@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.sampled(3)
def test_batch_norms_take_in_what_follows_them(format, dtype, monkeypatch):
    graphs = judged(monkeypatch)
    theirs = made(Norms).train().to(dtype).to(memory_format=format)
    own, found = copy.deepcopy(theirs), []
    for model, call in ((theirs, theirs), (own, torch.compile(own, backend=backend))):
        x = images(3, 4, 8, 8).to(dtype).to(memory_format=format).requires_grad_()
        y = call(x)
        y.float().square().sum().backward()
        found.append([y, x.grad, *(parameter.grad for parameter in model.parameters()), *model.buffers()])
    for a, b in zip(*found, strict=True):  # rounding decides masks here and there
        if a is not None:
            assert (b - a).float().abs().mean() <= (1e-4 if dtype == torch.float32 else 0.05) * a.abs().max()
    clamps = sum(str(op.target).startswith(("aten.relu", "aten.hardtanh")) for op in graphs[0])
    # Forward: those of parts[4] and parts[5]. Backward: those, and the ReLU of b.
    assert (clamps, masks(graphs[1])) == (2, 3)
    bounds = [node.args[-2:] for node in graphs[1] if str(node.target) == "blockconv.batch_norm_backward.default"]
    assert sorted(bounds) == [(0.0, 6.0), (0.0, math.inf)]


OTHER_READERS = {
    "an op of one argument": lambda y: F.relu(y) + y.sigmoid(),
    "an op with a list": lambda y: F.relu(y) * y.mean((2, 3), keepdim=True),
    "an op with a number": lambda y: F.relu(y) + y * 2,
    "the caller": lambda y: (y, F.relu(y)),
    "none, but PyTorch's graph leaves out a bound": lambda y: F.hardtanh(y, -2, 1),
}


@pytest.mark.parametrize("what", OTHER_READERS)
@pytest.mark.sampled(3)
def test_a_batch_norm_with_other_readers_than_a_relu(what):
    trained_alike(lambda: nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4)), OTHER_READERS[what])


def trained_alike(make, then=lambda y: y, sizes=((8, 8),), dtype=torch.float32, **options):
    """A step of a compiled model is that of eager, for images of some sizes, or shapes. Returns the model."""
    theirs = made(make).train().to(dtype)
    own, found = copy.deepcopy(theirs), []
    compiled = torch.compile(lambda x: then(own(x)), backend=backend, **options)
    for model, call in ((theirs, lambda x: then(theirs(x))), (own, compiled)):
        found.append([])
        for size in sizes:
            x, y = images(*(2, 4, *size)[-4:]).to(dtype).requires_grad_(), ()
            y = call(x)
            y = y if isinstance(y, tuple) else (y,)
            sum(part.float().square().sum() for part in y).backward()
            found[-1] += [*y, x.grad, *(parameter.grad.clone() for parameter in model.parameters())]
    for a, b in zip(*found, strict=True):
        close(b.detach().float(), a.detach().float(), 1e-4 if dtype == torch.float32 else 0.05)
    return own


@pytest.mark.slow
@pytest.mark.parametrize(
    ("sizes", "options"), [(((4, 4, 8, 8), (3, 4, 8, 8)), {}), (((8, 8), (12, 10)), {"dynamic": True})]
)
@pytest.mark.sampled(2)
def test_batch_norms_stay_when_sizes_change(sizes, options, monkeypatch):
    """A last, smaller batch, and images of any size: fused alike."""
    graphs = judged(monkeypatch)
    own = trained_alike(Norms, sizes=sizes, **options)
    assert all(line.startswith("aten.copy_: ") for graph in report(own) for line in graph.refused)
    assert sum(str(op.target).startswith(("aten.relu", "aten.hardtanh")) for op in graphs[-2]) == 2
    assert masks(graphs[-1]) == 3


@pytest.mark.nightly
def test_sizes_that_change_may_be_arguments_of_ops_of_a_step():
    sizes = (8, 8), (12, 10), (9, 10)
    for then in (
        lambda y: F.adaptive_avg_pool2d(y, (y.shape[2] // 2, y.shape[3] - 1)),
        lambda y: F.avg_pool2d(y, y.shape[2:]),
        lambda y: F.conv2d(y, torch.ones(2, 4, 1, 1), padding=y.shape[2] // 4),
        lambda y: F.interpolate(F.max_pool2d(y, 2), y.shape[2:]),
        lambda y: F.interpolate(y[:, :, None], scale_factor=2, mode="trilinear").flatten(1, 2),
        lambda y: F.interpolate(F.interpolate(y, scale_factor=2, mode="bilinear"), y.shape[2:], mode="bicubic"),
    ):
        torch._dynamo.reset()
        trained_alike(lambda: nn.Conv2d(4, 4, 1), then, sizes, dynamic=True)


def test_a_step_takes_other_strides_than_pytorch_traced():
    """The gradient of mse_loss is contiguous in PyTorch's kernel, and channels_last in its trace."""
    turned = lambda y: y.permute(0, 2, 3, 1).reshape(-1, 4).tanh().view(2, 8, 8, 4).permute(0, 3, 1, 2)  # noqa: E731
    trained_alike(lambda: nn.Conv2d(4, 4, 1), lambda y: F.mse_loss(turned(y), torch.zeros(2, 4, 8, 8)))


def test_a_checkpoint_around_a_batch_norm():
    norm = nn.Sequential(nn.Conv2d(4, 4, 1, bias=False), nn.BatchNorm2d(4), nn.ReLU())

    class Again(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = copy.deepcopy(norm).train()

        def forward(self, x):
            return torch.utils.checkpoint.checkpoint(self.inner, x, use_reentrant=False)

    trained_alike(Again, sizes=((8, 8), (8, 8)))
    own, theirs = made(Again).train(), made(Again).train()
    fast = torch.compile(lambda x: own(x).detach() + own.inner[1].running_mean.sum(), backend=backend)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", bc.SlowPathWarning)
        for seed in range(3):  # a graph without gradients, which writes statistics
            x = images(2, 4, 8, 8, seed=seed)
            close(fast(x), theirs(x).detach() + theirs.inner[1].running_mean.sum())
    assert own.inner[1].running_var.allclose(theirs.inner[1].running_var)
    assert own.inner[1].num_batches_tracked == 3


def test_more_output_padding_than_a_stride_trains_in_pytorch():
    trained_alike(lambda: nn.Sequential(nn.Conv2d(4, 4, 1), nn.ConvTranspose2d(4, 3, 3, output_padding=1, dilation=2)))


def test_bounds_that_a_type_rounds_mask_gradients_as_pytorch_does():
    """0.7 is 0.699 in bfloat16: a clipped value is below the bound."""
    norm = nn.BatchNorm2d(4).bfloat16()
    trained_alike(lambda: Apply(lambda x: F.hardtanh(norm(x) + x, -0.7, 0.7)), dtype=torch.bfloat16)


def test_a_graph_lets_values_go_after_their_last_use():
    """Else the activations of a step stay until its backward pass ends."""
    graph, known = torch.fx.Graph(), []
    x = graph.placeholder("x")
    y = graph.call_function(torch.relu, (x,))
    graph.output((graph.call_function(lambda y: [y, [one() is None for one in known]], (y,)),))
    record = importlib.import_module("blockconv.frontends.torch.reports").recorded("graph", "backward", [])
    run = importlib.import_module("blockconv.frontends.torch.backend")._boxed
    args = [images(2, 3)]
    known.append(weakref.ref(args[0]))
    ((_, gone),) = run(torch.fx.GraphModule({}, graph), record, ())(args)
    assert (gone, args) == ([True], [])


def test_a_training_step_sees_what_an_optimizer_did():
    # Without a bias before the batch norm: its gradient is noise, which Adam makes as large as all others.
    first = nn.Conv2d(3, 8, 3, bias=False)
    own = made(lambda: nn.Sequential(first, nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 1, 3))).train()
    theirs, losses = copy.deepcopy(own), []
    for model, call in ((theirs, theirs), (own, torch.compile(own, backend=backend))):
        optimizer, seen = torch.optim.Adam(model.parameters(), 0.01), []
        for k in range(4):
            optimizer.zero_grad()
            loss = (call(images(4, 3, 8, 8, seed=k)) - 1).square().mean()
            loss.backward()
            optimizer.step()
            seen.append(loss.item())
        losses.append(seen)
        model.eval()
        with torch.no_grad():
            seen.append(call(images(2, 3, 8, 8)).mean().item())
    np.testing.assert_allclose(*losses, rtol=1e-3)


def test_the_entry_point_is_the_back_end():
    text = (Path(__file__).parents[3] / "pyproject.toml").read_text(encoding="utf-8")
    ((module, name),) = re.findall(r'torch_dynamo_backends\]\nblockconv = "([\w.]+):(\w+)"', text)
    assert getattr(importlib.import_module(module), name) is backend


def test_what_is_no_module_is_refused():
    for function in (report, refresh):
        with pytest.raises(bc.ArgumentError, match=r"has to be a torch\.nn\.Module"):
            function(3)
    assert str(report(Residual(3, 3))) == "no graph was compiled with blockconv"


class Next(nn.Module):
    """ConvNeXt's block between a layer norm over channels first and a group norm."""

    def __init__(self):
        super().__init__()
        self.stem, self.depthwise = nn.Conv2d(3, 8, 2, 2), nn.Conv2d(8, 8, 3, padding=1, groups=8)
        self.first, self.norm, self.last = nn.LayerNorm(8), nn.LayerNorm(8), nn.GroupNorm(2, 8)
        self.wide, self.back, self.scale = nn.Linear(8, 16), nn.Linear(16, 8), nn.Parameter(torch.full((8,), 0.5))

    def forward(self, x):
        x = self.first(self.stem(x).permute(0, 2, 3, 1)).permute(0, 3, 1, 2)
        y = self.back(F.gelu(self.wide(self.norm(self.depthwise(x).permute(0, 2, 3, 1))))) * self.scale
        return F.relu(self.last(x + y.permute(0, 3, 1, 2)))


@pytest.mark.slow
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("format", "dtype", "dynamic"),
    [
        (torch.contiguous_format, torch.float32, True),
        (torch.channels_last, torch.float32, False),
        (torch.contiguous_format, torch.bfloat16, False),
    ],
)
def test_layer_and_group_norms_train_on_blockconv(format, dtype, dynamic):
    theirs = made(Next).train().to(dtype).to(memory_format=format)
    own, found = copy.deepcopy(theirs), []
    for model, call in ((theirs, theirs), (own, torch.compile(own, backend=backend, dynamic=dynamic))):
        x = images(2, 3, 12, 12).to(dtype).to(memory_format=format).requires_grad_()
        y = call(x)
        y.float().square().sum().backward()
        found.append([y, x.grad, *(parameter.grad for parameter in model.parameters())])
    for a, b in zip(*found, strict=True):
        close(b.float(), a.float(), 1e-4 if dtype == torch.float32 else 0.06)
    assert [(graph.plans, graph.refused) for graph in report(own)] == [(1, [])] * 2
