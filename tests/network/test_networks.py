"""The networks of the harness are the ones that their names say, with random weights, for any batch."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("onnx")

from bench.networks import NETWORKS, build, light
from blockconv import load_onnx
from blockconv.network.passes.fuse import fuse


# Multiply-adds and parameters as published: torchvision's documentation, in units of 1e9 and 1e6.
@pytest.mark.parametrize(
    ("name", "macs", "parameters"),
    [("resnet50", 4.09, 25.6), ("resnext50", 4.23, 25.0), ("mobilenetv2", 0.30, 3.5), ("efficientnet_b0", 0.39, 5.3)],
)
def test_built_here(name, macs, parameters):
    net = fuse(load_onnx(build(name)))
    assert net.shape("x") == (1, 3, 224, 224)
    assert net.shape(net.outputs[0]) == (1, 1000)
    assert sum(net.problem(n).macs for n in net.nodes if n.op == "conv2d") / 1e9 == pytest.approx(macs, abs=0.01)
    assert sum(c.size for c in net.constants.values()) / 1e6 == pytest.approx(parameters, abs=0.1)
    # Norms, activations and residuals went into the convolutions.
    gates = 16 if name == "efficientnet_b0" else 0
    assert sorted({node.op for node in net.nodes} - {"conv2d", "pool2d", "reshape"}) == ["binary"] * bool(gates)
    assert len([node for node in net.nodes if node.op == "binary"]) == gates


# As published, but for heads and shapes of inputs that are not; with products by constants, without attention's own.
@pytest.mark.parametrize(
    ("name", "macs", "parameters", "shapes"),
    [
        ("mobilenetv3", 0.22, 5.5, [(1, 1000)]),
        ("mobilenetv4", 0.186, 3.8, [(1, 1000)]),
        ("hrnet", 4.32, 21.3, [(1, 1000)]),
        ("convnext_t", 4.46, 28.6, [(1, 1000)]),
        ("regnet_y", 0.83, 6.4, [(1, 1000)]),
        ("repvgg", 1.51, 9.1, [(1, 1000)]),
        ("swin_t", 4.35, 28.3, [(1, 1000)]),
        ("vit_s", 4.24, 22.1, [(1, 1000)]),
        ("unet", None, 7.8, [(1, 2, 224, 224)]),
        ("u2net", None, 44.0, [(1, 1, 320, 320)]),
        ("deeplabv3", None, 11.0, [(1, 21, 224, 224)]),
        ("yolo_like", None, 3.15, [(1, c, size, size) for size in (80, 40, 20) for c in (64, 80)]),
        ("yolo11_like", None, 2.62, [(1, c, size, size) for size in (80, 40, 20) for c in (64, 80)]),
        ("detector_like", None, 0.6, [(1, 1, 640, 640)]),
        ("reader_like", None, None, [(2, 80, 6625)]),
        ("vocoder_like", None, 0.9, [(1, 1, 16384)]),
        ("vad_like", None, None, [(126, 2, 1)]),
    ],
)
@pytest.mark.sampled(2)
def test_networks_of_other_kinds(name, macs, parameters, shapes):
    """With the parameters that the model has: before what is constant is folded, repeated or padded."""
    model = build(name, batch=2 if name == "vad_like" else shapes[0][0])
    net = load_onnx(model)
    assert [net.shape(output) for output in net.outputs] == shapes
    if macs:
        assert sum(net.problem(n).macs for n in net.nodes if n.op == "conv2d") / 1e9 == pytest.approx(macs, rel=0.02)
    if parameters:
        sizes = [np.prod(tensor.dims) for tensor in model.graph.initializer if tensor.data_type == 1]
        assert sum(sizes) / 1e6 == pytest.approx(parameters, rel=0.03)


@pytest.mark.parametrize("name", ["squeezenet", "shufflenet", "densenet121", "inception_v1", "inception_v2"])
@pytest.mark.sampled(4)
def test_light_networks_with_random_weights(name):
    net, light_net = load_onnx(build(name, batch=3)), load_onnx(light(name))
    assert net.shape(net.inputs[0].name) == (3, 3, 224, 224)
    assert net.shape(net.outputs[0]) == (3, *light_net.shape(light_net.outputs[0])[1:])
    assert len(net.nodes) == len(light_net.nodes)
    for node in net.nodes:
        for parameter in node.parameters if node.op == "conv2d" else ():
            assert np.unique(net.constants[parameter]).size > 1, node
    assert len(light_net.with_input_shapes((1, 3, 224, 224)).nodes) == len(light_net.nodes)


def test_the_same_seed_gives_the_same_network():
    first, second, other = (build("squeezenet", seed=seed).SerializeToString() for seed in (0, 0, 1))
    assert first == second != other


@pytest.mark.slow
def test_results_are_neither_lost_nor_even():
    x = np.random.default_rng(0).standard_normal((1, 3, 224, 224)).astype(np.float32)
    for name in ("mobilenetv2", "shufflenet"):
        net = load_onnx(build(name))
        y = net.evaluate(x)[net.outputs[0]]
        assert np.isfinite(y).all()
        assert y.std() > abs(y.mean())


def test_an_unknown_name():
    with pytest.raises(ValueError, match="resnext50"):
        build("resnet51")
    assert len(NETWORKS) == 30
