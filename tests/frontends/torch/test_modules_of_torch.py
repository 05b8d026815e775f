"""Modules that are converted in place: values, training, checkpoints, copies, and the way back."""

from __future__ import annotations

import copy
import importlib
import io
import pickle

import pytest
from torch_models import NETWORKS, made, nn, torch

import blockconv as bc

prune = importlib.import_module("torch.nn.utils.prune")
quantize_fx = importlib.import_module("torch.ao.quantization.quantize_fx")


def images(*shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(0))


def close(found, wanted, bound=1e-4):
    assert (found.shape, found.dtype) == (wanted.shape, wanted.dtype)
    assert (found - wanted).abs().max() <= bound * wanted.abs().max()


def trained(model, x, steps=3):
    """The losses of some steps."""
    optimizer, losses = torch.optim.SGD(model.train().parameters(), 0.05, momentum=0.9), []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return torch.tensor(losses)


@pytest.mark.parametrize("name", NETWORKS)
def test_a_converted_network_computes_and_trains_as_before(name):
    theirs, x = made(NETWORKS[name]), images(4, 3, 16, 16)
    own = bc.torch.convert(copy.deepcopy(theirs))
    assert any(type(module) is bc.torch.Conv2d for module in own.modules())
    assert {*own.state_dict()} == {*theirs.state_dict()}
    for tensor in (x, x.contiguous(memory_format=torch.channels_last)):
        with torch.no_grad():
            close(own(tensor), theirs(tensor))
            close(own(tensor), theirs(tensor))
    close(trained(own, x), trained(theirs, x))
    with torch.no_grad():  # weights that steps have changed are packed anew
        close(own.eval()(x), theirs.eval()(x))
    bc.torch.restore(own)
    assert not any(type(module).__module__.startswith("blockconv") for module in own.modules())


@pytest.mark.parametrize("mode", ["reflect", "circular"])
def test_other_convolutions(mode):
    model = nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, padding_mode=mode), nn.ConvTranspose2d(8, 4, 3, 2, 1, 1), nn.Flatten(2),
        nn.Conv1d(4, 6, 3, padding=1, padding_mode=mode), nn.ConvTranspose1d(6, 6, 2, 2),
        nn.Conv1d(6, 2, 5, 2, bias=False),
    )  # fmt: skip
    x, own = images(2, 3, 7, 8), bc.torch.convert(copy.deepcopy(model))
    with torch.no_grad():
        close(own(x), model(x))
    close(trained(own, x), trained(model, x))


def test_copies_and_checkpoints():
    x, own = images(2, 3, 8, 8), bc.torch.convert(nn.Sequential(nn.Conv2d(3, 8, 3)))
    with torch.no_grad():
        wanted = own(x)
        for copied in (copy.deepcopy(own), pickle.loads(pickle.dumps(own))):
            assert copied(x).equal(wanted)
        file = io.BytesIO()
        torch.save(own, file)
        file.seek(0)
        assert torch.load(file, weights_only=False)(x).equal(wanted)
        known = own[0]._packed
        bc.torch.refresh(own)
        assert own(x).equal(wanted)
        assert own[0]._packed is not known


def test_torch_compile_sees_one_op_for_each_convolution():
    own, kinds = bc.torch.convert(made(NETWORKS["unet"])), []

    def look(graph, inputs):
        kinds.extend(str(node.target) for node in graph.graph.nodes if node.op == "call_function")
        return graph

    x = images(1, 3, 16, 16)
    torch._dynamo.reset()
    close(torch.compile(own, backend=look, fullgraph=True)(x), own(x))
    assert sum("blockconv.conv2d" in kind for kind in kinds) == 3
    kinds.clear()
    weight = own.down.weight.detach()
    torch._dynamo.reset()
    close(torch.compile(lambda x: bc.conv2d(x, weight) * 2, backend=look, fullgraph=True)(x), bc.conv2d(x, weight) * 2)
    assert sum("blockconv.conv2d" in kind for kind in kinds) == 1
    torch._dynamo.reset()


def test_the_back_end_takes_converted_modules_and_functions():
    model = nn.Sequential(nn.ConvTranspose2d(3, 3, 3, 2, 1, 1, bias=False), nn.AvgPool2d(2), made(NETWORKS["resnet"]))
    own, x = bc.torch.convert(model.eval()), images(1, 3, 16, 16)

    def call(x):
        return bc.torch.functional.avg_pool2d(own(bc.torch.functional.max_pool2d(x, 3, 1, 1))[:, None, None], (1, 2))

    torch._dynamo.reset()
    with torch.no_grad():
        close(torch.compile(call, backend=bc.torch.backend)(x), call(x))
    graph = bc.torch.report(own)[-1]
    assert (graph.taken, graph.plans) == (graph.nodes, 1)
    assert not graph.refused
    torch._dynamo.reset()
    own.train()(x.repeat(2, 1, 1, 1)).sum().backward()
    torch.compile(own, backend=bc.torch.backend)(x.repeat(2, 1, 1, 1)).sum().backward()
    assert [graph.taken >= 7 for graph in bc.torch.report(own)[-2:]] == [True, True]
    torch._dynamo.reset()


def test_pools_find_indices_only_for_gradients_or_who_asks():
    model = nn.Sequential(nn.AvgPool2d(2, 1), nn.AdaptiveAvgPool2d((6, 5)), nn.MaxPool2d(2, return_indices=True))
    x, own = images(2, 3, 8, 9), bc.torch.convert(copy.deepcopy(model))
    own.max, model.max = bc.torch.convert(nn.MaxPool2d(3, 2, 1)), nn.MaxPool2d(3, 2, 1)
    for a, b in zip((own[:3](x)[0], own.max(x)), (model[:3](x)[0], model.max(x)), strict=True):
        close(a, b, 1e-6)
    assert own[2](x)[1].equal(model[2](x)[1])
    with torch.profiler.profile() as seen:
        own.max(x)
        assert own.max(x.clone().requires_grad_()).requires_grad
    assert [event.count for event in seen.key_averages() if event.key == "blockconv::max_pool2d"] == [1]


def test_attributes_that_change_are_those_of_the_next_call():
    own, x = bc.torch.convert(nn.Conv2d(3, 8, 3, padding=1)), images(2, 3, 8, 8)
    with torch.no_grad():
        own(x)
        own.stride, own.dilation, own.padding = (2, 2), (2, 2), (2, 2)
        close(own(x), nn.functional.conv2d(x, own.weight, own.bias, 2, 2, 2))


def test_who_follows_a_call_without_gradients_sees_ops():
    """Else a trace would hold the results of its example, and a transform would meet tensors without memory."""
    own, x = bc.torch.convert(nn.Sequential(nn.Conv2d(3, 8, 3), nn.MaxPool2d(2))), images(3, 3, 8, 8)
    weight = own[0].weight.detach()

    def call(x):
        return bc.max_pool2d(bc.conv2d(x, weight), 2)

    with torch.no_grad():
        for function in (own, call):
            wanted = function(x)
            for trace in (torch.jit.trace, lambda f, x: torch.fx.experimental.proxy_tensor.make_fx(f)(x)):
                close(trace(function, x * 2)(x), wanted)
            close(torch.vmap(function)(x[:, None])[:, 0], wanted)
        stacked = {name: torch.stack([tensor, tensor * 2]) for name, tensor in own.named_parameters()}
        found = torch.vmap(lambda given: torch.func.functional_call(own, given, (x,)))(stacked)
        close(found, torch.stack([own(x), own(x) * 2]))
        assert copy.deepcopy(own).to("meta")(x.to("meta")).shape == wanted.shape
        with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as fake:
            assert own(fake.from_tensor(x)).shape == wanted.shape


def test_16_bit_weights_under_autocast():
    theirs, x = nn.Conv2d(3, 8, 3).bfloat16(), images(2, 3, 8, 8)
    own = bc.torch.convert(copy.deepcopy(theirs))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        close(own(x), theirs(x), 0.02)


def test_what_is_no_module_is_refused():
    for function in (bc.torch.convert, bc.torch.restore):
        with pytest.raises(bc.ArgumentError, match=r"has to be a torch\.nn\.Module"):
            function(3)


# ---------------------------------------------------------------- tools that read models


def fused(model, x):
    return torch.ao.quantization.fuse_modules(copy.deepcopy(model), [["0", "1", "2"]])


def through_onnx(model, x):
    file = io.BytesIO()
    torch.onnx.export(model, (x,), file, dynamo=False, do_constant_folding=False)
    network = bc.load_onnx(io.BytesIO(file.getvalue()))
    return lambda x: next(iter(network.evaluate(x.numpy()).values()))


def quantized(model, x):
    """FX quantization looks up modules by class; integers go where blockconv has no kernels."""
    mapping = torch.ao.quantization.get_default_qconfig_mapping("fbgemm")
    prepared = quantize_fx.prepare_fx(copy.deepcopy(model), mapping, (x,))
    prepared(x)
    return quantize_fx.convert_fx(prepared)


TRACERS = {
    "symbolic_trace": lambda model, x: torch.fx.symbolic_trace(model),
    "features by name": lambda model, x: torch.fx.Interpreter(torch.fx.symbolic_trace(model)).run,
    "make_fx": lambda model, x: torch.fx.experimental.proxy_tensor.make_fx(model)(x),
    "export": lambda model, x: torch.export.export(model, (x,)).module(),
    "jit.trace": lambda model, x: torch.jit.trace(model, x),
    "jit.script": lambda model, x: torch.jit.script(model),
    "jit.freeze": lambda model, x: torch.jit.freeze(torch.jit.script(model)),
    "onnx": through_onnx,
    "fuse_modules": fused,
    "FX quantization": quantized,
}


def readable():
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, padding_mode="reflect"), nn.AvgPool2d(2), nn.ConvTranspose2d(8, 4, 2, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(2), nn.ConvTranspose1d(4, 4, 3), nn.Conv1d(4, 4, 2),
    )  # fmt: skip


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", TRACERS)
def test_other_tools_read_a_converted_model_as_they_read_its_original(name):
    theirs, x = made(readable), images(2, 3, 16, 16)
    own = bc.torch.convert(copy.deepcopy(theirs))
    with torch.no_grad():
        close(torch.as_tensor(TRACERS[name](own, x)(x)), torch.as_tensor(TRACERS[name](theirs, x)(x)))
        close(own(x), theirs(x))
    assert {type(module).__module__.partition(".")[0] for module in own} == {"torch", "blockconv"}


@pytest.mark.filterwarnings("ignore")
def test_from_torch_names_weights_that_other_kernels_packed():
    x = images(2, 3, 9, 9)
    for layer in (nn.Conv2d(3, 8, 3), nn.Linear(9, 8)):
        with pytest.raises(bc.ArgumentError, match=r"quantized kernels packed.*; give the float module"):
            bc.from_torch(quantized(nn.Sequential(layer, nn.ReLU()).eval(), x), (x,))


def test_a_converted_module_is_a_leaf_to_tracers_and_runs_on_blockconv():
    traced = torch.fx.symbolic_trace(bc.torch.convert(made(readable)))
    called = [traced.get_submodule(node.target) for node in traced.graph.find_nodes(op="call_module")]
    assert len(called) == 11
    assert isinstance(called[0], bc.torch.Conv2d)


def test_counters_count_what_they_count_without_blockconv():
    theirs, x = made(readable), images(2, 3, 16, 16)
    counts = []
    for model in (theirs, bc.torch.convert(copy.deepcopy(theirs))):
        with torch.utils.flop_counter.FlopCounterMode(display=False) as counter:
            model(x).sum().backward()
        counts.append(counter.get_total_flops())
    assert counts[0] == counts[1] > 0


def test_a_class_that_a_tool_makes_of_a_converted_one_runs_on_blockconv():
    """As fully_shard makes one, of a class of its own and the module's."""
    own, x = bc.torch.convert(nn.Conv2d(3, 4, 3)), images(1, 3, 6, 6)
    wanted = own(x)
    for bases in ((type("Mixin", (), {}), type(own)), (type(own),)):
        own.__class__ = type("Sharded", bases, {})
        assert own(x).equal(wanted)
        assert isinstance(own, bc.torch.Conv2d)


# ---------------------------------------------------------------- inputs that PyTorch alone computes


def draw(*shape, dtype=torch.complex64):
    return lambda: torch.randn(*shape, dtype=dtype)


def draw_bytes():
    return torch.quantize_per_tensor(torch.rand(1, 3, 8, 8), 0.1, 3, torch.quint8)


OTHERS = {
    "complex": (lambda: nn.Conv2d(3, 4, 3, dtype=torch.complex64), draw(1, 3, 6, 6)),
    "complex, 1-D": (lambda: nn.Conv1d(3, 4, 3, dtype=torch.complex128), draw(3, 6, dtype=torch.complex128)),
    "complex, transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, dtype=torch.complex64), draw(1, 3, 6, 6)),
    "quantized mean": (lambda: nn.AdaptiveAvgPool2d(2), draw_bytes),
    "quantized average": (lambda: nn.AvgPool2d(2), draw_bytes),
    "quantized maximum": (lambda: nn.MaxPool2d(2), draw_bytes),
    "integers": (lambda: nn.MaxPool2d(2), lambda: torch.arange(64).view(1, 1, 8, 8)),
    "mkldnn": (lambda: nn.MaxPool2d(2), lambda: torch.rand(1, 3, 8, 8).to_mkldnn()),
    "no values": (
        lambda: nn.Conv2d(3, 4, 3, device="meta"),
        lambda: torch.empty(1, 3, 8, 8, device="meta"),
    ),
}


def kept(x):
    """Values as an ordinary tensor."""
    return x.dequantize() if x.is_quantized else x.to_dense() if x.is_mkldnn else x


@pytest.mark.parametrize("name", OTHERS)
def test_what_blockconv_does_not_take_runs_in_pytorch(name):
    module, x = (make() for make in OTHERS[name])
    with torch.no_grad():
        found, wanted = bc.torch.convert(copy.deepcopy(module))(x), module(x)
    for kind in ("shape", "dtype", "layout", "device"):
        assert getattr(found, kind) == getattr(wanted, kind)
    assert found.is_meta or kept(found).equal(kept(wanted))


# ---------------------------------------------------------------- parametrizations

KINDS = {
    "weight_norm": nn.utils.parametrizations.weight_norm,
    "spectral_norm": nn.utils.parametrizations.spectral_norm,
    "orthogonal": nn.utils.parametrizations.orthogonal,
    "the older weight_norm": nn.utils.weight_norm,
    "the older spectral_norm": nn.utils.spectral_norm,
    "pruning": lambda module: prune.random_unstructured(module, "weight", 0.5),
    "two": lambda module: nn.utils.parametrize.register_parametrization(
        nn.utils.parametrizations.weight_norm(module), "weight", nn.Tanh()
    ),
}


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("after", [True, False], ids=["after", "before"])
@pytest.mark.parametrize("kind", [nn.Conv2d, nn.Conv1d, nn.ConvTranspose2d])
@pytest.mark.parametrize("name", KINDS)
def test_parametrized_modules_are_converted_and_restored(name, kind, after):
    torch.manual_seed(0)
    theirs, x = kind(4, 4, 3).eval(), images(1, 4, 6, 6) if kind is not nn.Conv1d else images(1, 4, 6)
    own = copy.deepcopy(theirs)
    if after:
        bc.torch.convert(own)
    for module in (theirs, own):
        torch.manual_seed(1)
        KINDS[name](module)
    bc.torch.convert(own)
    assert isinstance(own, getattr(bc.torch, kind.__name__))
    copied = copy.deepcopy(own) if "older" not in name and name != "pruning" else None
    for _ in range(2):  # a call that packs, and one with other weights
        with torch.no_grad():
            close(own(x), theirs(x))
            for module in (theirs, own):
                for parameter in module.parameters():
                    parameter.mul_(1.5)
    close(trained(own, x), trained(theirs, x))
    bc.torch.restore(own.eval())
    assert not any("blockconv" in base.__module__ for base in type(own).__mro__)
    with torch.no_grad():
        close(own(x), theirs.eval()(x))
    if nn.utils.parametrize.is_parametrized(own):
        nn.utils.parametrize.remove_parametrizations(own, "weight")
        assert type(own) is kind
        assert isinstance(copied, getattr(bc.torch, kind.__name__)), "a copy has a class of its own"
