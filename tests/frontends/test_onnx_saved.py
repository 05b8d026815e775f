"""Models that ONNX Runtime saved after its own optimisation: all of it is native, with the values of the originals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core import target

onnx = pytest.importorskip("onnx")
ort = pytest.importorskip("onnxruntime")
from onnx import helper, numpy_helper  # noqa: E402

LEVELS = ("BASIC", "EXTENDED", "ALL")
BLOCKED = "com.microsoft.nchwc"
pytestmark = pytest.mark.filterwarnings("ignore::blockconv.SlowPathWarning")


class Model:
    """Nodes, each named as its output, and constants."""

    def __init__(self, opset: int = 17) -> None:
        self.rng, self.opset = np.random.default_rng(0), opset
        self.nodes: list[Any] = []
        self.constants: dict[str, Any] = {}

    def __call__(self, op: str, inputs: str, output: str, **attributes: Any) -> str:
        names = ["" if name == "-" else name for name in inputs.split()]
        self.nodes.append(helper.make_node(op, names, [output], output, **attributes))
        return output

    def floats(self, name: str, *shape: int) -> str:
        fan_in = int(np.prod(shape[1:])) or 1
        return self.known(name, (self.rng.standard_normal(shape) / np.sqrt(fan_in)).astype("f4"))

    def known(self, name: str, value: Any) -> str:
        self.constants[name] = value
        return name

    def proto(self, shape: tuple[int, ...], *outputs: str) -> Any:
        arrays = [numpy_helper.from_array(np.asarray(value), name) for name, value in self.constants.items()]
        gives = [helper.make_tensor_value_info(name, 1, None) for name in outputs]
        given = [helper.make_tensor_value_info("x", 1, shape)]
        graph = helper.make_graph(self.nodes, "saved", given, gives, arrays)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", self.opset)], ir_version=8)


def session(model: Any, level: str, saved: str = "") -> Any:
    options = ort.SessionOptions()
    options.graph_optimization_level = getattr(ort.GraphOptimizationLevel, f"ORT_{level}")
    options.log_severity_level, options.intra_op_num_threads, options.optimized_model_filepath = 3, 1, saved
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def kinds(path: Path) -> set[str]:
    return {".".join(filter(None, (node.domain, node.op_type))) for node in onnx.load(path).graph.node}


# ---------------------------------------------------------------- three networks


def cnn() -> Any:
    m = Model()
    m("Conv", f"x {m.floats('w0', 24, 3, 3, 3)} {m.floats('b0', 24)}", "c0", pads=[1] * 4, strides=[2, 2])
    m("Relu", "c0", "r0")
    m("Conv", f"r0 {m.floats('w1', 24, 1, 3, 3)}", "c1", pads=[1] * 4, group=24)
    m("Clip", f"c1 {m.known('low', np.float32(0))} {m.known('high', np.float32(6))}", "r1")
    m("Conv", f"r1 {m.floats('w2', 16, 24, 1, 1)} {m.floats('b2', 16)}", "c2")
    m("Conv", f"c2 {m.floats('w3', 16, 16, 3, 3)}", "c3", pads=[1] * 4)
    m("Relu", m("Add", "c3 c2", "a3"), "r3")
    m("MaxPool", "r3", "m", kernel_shape=[2, 2], strides=[2, 2])
    m("Conv", f"m {m.floats('w4', 20, 16, 1, 1)}", "c4")
    m("Mul", f"c4 {m('Sigmoid', 'c4', 'g4')}", "s4")
    m("Conv", f"s4 {m.floats('w5', 32, 20, 3, 3)}", "c5", pads=[1] * 4)
    m("AveragePool", "c5", "p5", kernel_shape=[3, 3], pads=[1] * 4)
    ones = m.known("ones", np.linspace(0.5, 2, 32).astype("f4"))
    m("BatchNormalization", f"p5 {ones} {ones} {ones} {ones}", "n5")
    scales = m.known("twice", np.array([1, 1, 2, 2], "f4"))
    floors = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"}
    m("Resize", f"m - {scales}", "u0", mode="nearest", **floors)
    m("Resize", f"n5 - {scales}", "u5", mode="linear", coordinate_transformation_mode="half_pixel")
    m("Concat", "u0 u5", "both", axis=1)
    m("Conv", f"both {m.floats('w6', 8, 48, 1, 1)}", "c6")
    m("Flatten", m("GlobalAveragePool", "c6", "p6"), "f6")
    m("Gemm", f"f6 {m.floats('w7', 10, 8)}", "y7", transB=1)
    m("HardSigmoid", "y7", "y", alpha=0.3, beta=0.4)
    return m.proto((1, 3, 16, 16), "y", "c6")


STEP = 0.03


def quantized_cnn(dtype: Any) -> Any:
    m = Model()

    def quantized(x: str, scale: float = STEP, zero: int = 3) -> str:
        given = f"{m.known(f'{x}.s', np.float32(scale))} {m.known(f'{x}.z', dtype(zero))}"
        return m("DequantizeLinear", f"{m('QuantizeLinear', f'{x} {given}', f'{x}.q')} {given}", f"{x}.d")

    def weight(name: str, *shape: int) -> str:
        value = m.rng.standard_normal(shape) / np.sqrt(np.prod(shape[1:]))
        scale = np.float32(np.abs(value).max() / 127)
        given = m.known(f"{name}.w", np.rint(value / scale).astype(np.int8)), m.known(f"{name}.ws", scale)
        zero = m.known(f"{name}.wz", np.int8(0))
        bias = m.known(f"{name}.b", m.rng.integers(-500, 500, shape[0]).astype(np.int32))
        scales = m.known(f"{name}.bs", np.float32(STEP * scale)), m.known(f"{name}.bz", np.int32(0))
        m("DequantizeLinear", f"{bias} {scales[0]} {scales[1]}", f"{name}.bias")
        return f"{m('DequantizeLinear', f'{given[0]} {given[1]} {zero}', f'{name}.weight')} {name}.bias"

    first = m("Conv", f"{quantized('x')} {weight('c1', 16, 3, 3, 3)}", "c1", pads=[1] * 4, strides=[2, 2])
    r1 = quantized(m("Relu", first, "r1"))
    m("Conv", f"{r1} {weight('c2', 16, 1, 3, 3)}", "c2", group=16, pads=[1] * 4)
    m("Conv", f"{quantized('c2')} {weight('c3', 16, 16, 1, 1)}", "c3")
    total = quantized(m("Add", f"{quantized('c3')} {r1}", "a3"))
    pooled = quantized(m("MaxPool", total, "m3", kernel_shape=[2, 2], strides=[2, 2]))
    c4 = quantized(m("Conv", f"{pooled} {weight('c4', 16, 16, 3, 3)}", "c4", pads=[1] * 4))
    gate = quantized(m("Sigmoid", c4, "g4"), 1 / 256, 0)
    leaky = quantized(m("LeakyRelu", quantized(m("Mul", f"{c4} {gate}", "s4")), "l4", alpha=0.1))
    mean = quantized(m("AveragePool", leaky, "p4", kernel_shape=[2, 2], strides=[2, 2]))
    small = quantized(m("MaxPool", pooled, "m4", kernel_shape=[2, 2], strides=[2, 2]))
    both = quantized(m("Concat", f"{mean} {small}", "both", axis=1))
    flat = quantized(m("Flatten", quantized(m("GlobalAveragePool", both, "p5")), "f5"))
    y = quantized(m("Gemm", f"{flat} {weight('y', 10, 32)}", "y", transB=1))
    m("Softmax", y, "soft", axis=-1)
    return m.proto((1, 3, 16, 16), "soft", both)


def transformer(opset: int) -> Any:
    m = Model(opset)

    def normalized(x: str, name: str) -> str:
        scale, bias = m.floats(f"{name}.g", 32), m.floats(f"{name}.b", 32)
        if opset >= 17:
            return m("LayerNormalization", f"{x} {scale} {bias}", name, axis=-1)
        mean = m("ReduceMean", x, f"{name}.m", axes=[-1])
        centred = m("Sub", f"{x} {mean}", f"{name}.c")
        square = m("Pow", f"{centred} {m.known('two', np.float32(2))}", f"{name}.q")
        var = m("ReduceMean", square, f"{name}.v", axes=[-1])
        deviation = m("Sqrt", m("Add", f"{var} {m.known('eps', np.float32(1e-5))}", f"{name}.e"), f"{name}.s")
        scaled = m("Mul", f"{m('Div', f'{centred} {deviation}', f'{name}.d')} {scale}", f"{name}.y")
        return m("Add", f"{scaled} {bias}", name)

    def linear(x: str, name: str, rows: int, columns: int) -> str:
        product = m("MatMul", f"{x} {m.floats(f'{name}.w', rows, columns)}", f"{name}.p")
        return m("Add", f"{product} {m.floats(f'{name}.b', columns)}", name)

    def gelu(x: str, name: str) -> str:
        one, half, root = (m.known(f"n{v:.1f}", np.float32(v)) for v in (1, 0.5, 2**0.5))
        above = m("Add", f"{m('Erf', m('Div', f'{x} {root}', f'{name}.d'), f'{name}.e')} {one}", f"{name}.a")
        return m("Mul", f"{m('Mul', f'{x} {above}', f'{name}.m')} {half}", name)

    m.known("heads", np.array([0, 0, 4, 8])), m.known("whole", np.array([0, 0, 32]))
    m.known("mask", np.triu(np.full((6, 6), -1e9, "f4"), 1)), m.known("root", np.float32(8**0.5))
    inside = normalized("x", "n1")
    for name in "qkv":
        perm = [0, 2, 3, 1] if name == "k" else [0, 2, 1, 3]
        m("Transpose", m("Reshape", f"{linear(inside, name, 32, 32)} heads", f"{name}.r"), f"{name}.t", perm=perm)
    scores = m("Div", f"{m('MatMul', 'q.t k.t', 'scores')} root", "scaled")
    weights = m("Softmax", m("Add", f"{scores} mask", "masked"), "weights", axis=-1)
    attended = m("Transpose", m("MatMul", f"{weights} v.t", "o"), "o.t", perm=[0, 2, 1, 3])
    m("Add", f"x {linear(m('Reshape', f'{attended} whole', 'o.r'), 'out', 32, 32)}", "x2")
    wide = gelu(linear(normalized("x2", "n2"), "f1", 32, 64), "gelu")
    y = normalized(m("Add", f"x2 {linear(wide, 'f2', 64, 32)}", "x3"), "n3")
    turned = m("Transpose", y, "n3.t", perm=[0, 2, 1])
    m("Mul", f"{m('MatMul', f'{turned} {y}', 'gram')} {m.known('third', np.float32(0.3))}", "y")
    return m.proto((2, 6, 32), "y", y)


MODELS = {  # with the ops that tell that ONNX Runtime has fused at its level
    "cnn": (cnn, {"EXTENDED": {"FusedConv", "FusedGemm", "QuickGelu"}, "ALL": set()}),
    "uint8": (lambda: quantized_cnn(np.uint8), {"EXTENDED": {"QLinearAdd", "QGemm", "QLinearConcat"}}),
    "int8": (lambda: quantized_cnn(np.int8), {"EXTENDED": {"FusedConv"}}),
    "opset 13": (lambda: transformer(13), {"EXTENDED": {"SkipLayerNormalization", "FusedMatMul"}}),
    "opset 17": (lambda: transformer(17), {"EXTENDED": {"SkipLayerNormalization", "Gelu"}}),
}
X86 = {
    "cnn": {f"{BLOCKED}.{op}" for op in ("Conv", "MaxPool", "AveragePool", "Upsample", "ReorderOutput")},
    "uint8": {"com.microsoft.QLinearConv"},
}


@pytest.mark.sampled(3)
@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize("name", MODELS)
def test_saved_models_are_native(name: str, level: str, tmp_path: Path) -> None:
    make, fused = MODELS[name]
    model, path = make(), tmp_path / "saved.onnx"
    shape = [d.dim_value for d in model.graph.input[0].type.tensor_type.shape.dim]
    x = np.random.default_rng(1).standard_normal(shape).astype("f4")
    session(model, f"ENABLE_{level}", str(path))
    assert kinds(path) >= {f"com.microsoft.{op}" for op in fused.get(level, ())}
    if level == "ALL" and target.is_x86():
        assert kinds(path) >= X86.get(name, set())
    wanted = session(model, "DISABLE_ALL").run(None, {"x": x})
    network = bc.load_onnx(path, strict=True)
    results = [network.evaluate(x)]
    if (name, level) == ("cnn", "ALL"):
        results.append(bc.compile(network, threads=1)(x))
    tolerance = 1.01 * STEP if "int8" in name else 1e-4  # where a sum is rounded the other way, a step
    for found in results:
        for output, y in zip(network.outputs, wanted, strict=True):
            assert found[output].dtype == y.dtype
            np.testing.assert_allclose(found[output], y, rtol=1e-5, atol=tolerance)


ACTIVATIONS = {
    "Relu": {}, "Tanh": {}, "Sigmoid": {}, "LeakyRelu": {"alpha": 0.3}, "HardSigmoid": {"alpha": 0.3, "beta": 0.4},
    "Elu": {"alpha": 0.4}, "Selu": {"alpha": 1.5, "gamma": 1.1}, "Softplus": {}, "Softsign": {}, "Clip": {},
}  # fmt: skip


@pytest.mark.parametrize("kind", ACTIVATIONS)
def test_activations_that_onnx_runtime_fuses(kind: str, tmp_path: Path) -> None:
    for op in ("Conv", "Gemm"):
        m = Model()
        ends = f" {m.known('low', np.float32(-0.1))} {m.known('high', np.float32(0.2))}" if kind == "Clip" else ""
        shape = (2, 8, 3, 3) if op == "Conv" else (3, 8)
        m(op, f"x {m.floats('w', *((16, 8, 1, 1) if op == 'Conv' else (8, 5)))}", "s")
        m(kind, f"s{ends}", "y", **ACTIVATIONS[kind])
        model, path = m.proto(shape, "y"), tmp_path / f"{op}.onnx"
        x = m.rng.standard_normal(shape).astype("f4")
        (wanted,) = session(model, "ENABLE_EXTENDED", str(path)).run(None, {"x": x})
        network = bc.load_onnx(path, strict=True)
        np.testing.assert_allclose(network.evaluate(x)["y"], wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("simplified", [False, True])
def test_rms_normalization_is_fused_at_any_opset(simplified: bool, tmp_path: Path) -> None:
    m = Model(13)
    x = m("Add", f"x {m.known('skip', np.float32(0.5))}", "total") if simplified else "x"
    mean = m("ReduceMean", m("Pow", f"{x} {m.known('two', np.float32(2))}", "square"), "mean", axes=[-1])
    root = m("Sqrt", m("Add", f"{mean} {m.known('eps', np.float32(1e-5))}", "above"), "root")
    m("Mul", f"{m('Div', f'{x} {root}', 'divided')} {m.floats('g', 16)}", "y")
    model, path, given = m.proto((2, 3, 16), "y"), tmp_path / "rms.onnx", m.rng.standard_normal((2, 3, 16)).astype("f4")
    (wanted,) = session(model, "ENABLE_EXTENDED", str(path)).run(None, {"x": given})
    assert "SimplifiedLayerNormalization" in kinds(path)
    np.testing.assert_allclose(bc.load_onnx(path, strict=True).evaluate(given)["y"], wanted, rtol=1e-5, atol=1e-6)


def test_weights_of_4_bits_stay_in_one_node(tmp_path: Path) -> None:
    int4 = pytest.importorskip("ml_dtypes").int4
    m = Model(21)
    weight = m.known("w", m.rng.integers(-8, 8, (32, 5)).astype(int4))
    given = f"{m.floats('s', 2, 5)} {m.known('z', m.rng.integers(-2, 3, (2, 5)).astype(int4))}"
    m("MatMul", f"x {m('DequantizeLinear', f'{weight} {given}', 'd', axis=0, block_size=16)}", "y")
    m.constants["s"] = np.abs(m.constants["s"])
    model, path, x = m.proto((3, 32), "y"), tmp_path / "bits.onnx", m.rng.standard_normal((3, 32)).astype("f4")
    model.ir_version = 10
    session(model, "ENABLE_EXTENDED", str(path))
    assert "com.microsoft.MatMulNBits" in kinds(path)
    (wanted,) = session(model, "DISABLE_ALL").run(None, {"x": x})  # the other one rounds x to 8 bits
    np.testing.assert_allclose(bc.load_onnx(path, strict=True).evaluate(x)["y"], wanted, rtol=1e-5, atol=1e-5)


def in_blocks(weight: np.ndarray, block: int) -> np.ndarray:
    """A weight as ONNX Runtime saves it."""
    o, i, h, w = weight.shape
    if i < block:
        return np.ascontiguousarray(weight.reshape(o // block, block, i, h, w).transpose(0, 2, 3, 4, 1))
    blocks = weight.reshape(o // block, block, i // block, block, h, w)
    return np.ascontiguousarray(blocks.transpose(0, 2, 4, 5, 3, 1))


@pytest.mark.parametrize(("block", "channels"), [(8, 24), (8, 32), (16, 32)])
def test_the_block_of_a_weight(block: int, channels: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A weight of whole blocks of 16 may be in either: then it is in this processor's."""
    tells = channels % 16 != 0
    monkeypatch.setattr(target, "is_x86", lambda: True)
    monkeypatch.setattr(target, "host_features", lambda: frozenset({"avx512f"} if tells or block == 16 else ()))
    first, second = Model(), Model()
    weights = [first.rng.standard_normal(s).astype("f4") for s in ((channels, 3, 3, 3), (channels, channels, 1, 1))]
    for m, change in ((first, lambda w: w), (second, lambda w: in_blocks(w, block).reshape(w.shape))):
        domain = BLOCKED if m is second else ""
        names = [m.known(f"w{k}", change(w)) for k, w in enumerate(weights)]
        m("Conv", f"{m('Conv', f'x {names[0]}', 'c', domain=domain)} {names[1]}", "d", domain=domain)
    second("ReorderOutput", "d", "y", domain=BLOCKED, channels=channels - 1, channels_last=1)
    plain, blocked = first.proto((1, 3, 5, 5), "d"), second.proto((1, 3, 5, 5), "y")
    blocked.opset_import.append(helper.make_opsetid(BLOCKED, 1))
    x = first.rng.standard_normal((1, 3, 5, 5)).astype("f4")
    wanted = bc.load_onnx(plain).evaluate(x)["d"][:, :-1].transpose(0, 2, 3, 1)
    found = bc.load_onnx(blocked, strict=True).evaluate(x)["y"]
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_a_weight_without_whole_blocks_is_refused() -> None:
    m = Model()
    m("Conv", f"x {m.floats('w', 20, 3, 1, 1)}", "y", domain=BLOCKED)
    model = m.proto((1, 3, 5, 5), "y")
    model.opset_import.append(helper.make_opsetid(BLOCKED, 1))
    with pytest.raises(bc.NetworkError, match=r"node 'y' \(Conv\): weight=.*whole blocks of 8 channels"):
        bc.load_onnx(model)


def test_what_reads_blocks_of_channels_does_not_run_elsewhere() -> None:
    """A session would take the channels of a plan, which are in no blocks, for blocks."""
    m = Model()
    m("ReorderInput", "x", "i", domain=BLOCKED)
    m("Conv", f"i {m('Abs', m.floats('w', 32, 32, 1, 1), 'flows')}", "c", domain=BLOCKED)
    m("ReorderOutput", "c", "y", domain=BLOCKED, channels=32)
    proto = m.proto((1, 32, 4, 4), "y")
    proto.graph.input.append(helper.make_tensor_value_info("w", 1, (32, 32, 1, 1)))
    proto.graph.ClearField("initializer")
    proto.opset_import.append(helper.make_opsetid(BLOCKED, 1))
    with pytest.raises(bc.UnsupportedError, match=r"node 'c' \(Conv\): com.microsoft.nchwc.Conv of such operands"):
        bc.load_onnx(proto)


ATTENDED = {  # the op, the inputs beside x and its attributes
    "joined": ("Attention", "w b", {}),
    "joined, of a mask": ("Attention", "w b mask", {"mask_filter_value": -3.0}),
    "joined, of masks of rows and more": ("Attention", "w b rows - added", {"unidirectional": 1}),
    "joined, of widths": ("Attention", "wide wide_b", {"qkv_hidden_sizes": [16, 16, 8], "scale": 0.7}),
    "three": ("MultiHeadAttention", "keys keys", {}),
    "three of a bias and a mask": ("MultiHeadAttention", "keys values b2 hidden", {}),
    "three of more": ("MultiHeadAttention", "x values2 - - added", {"unidirectional": 1, "scale": 0.3}),
    "keys of heads": ("MultiHeadAttention", "heads heads", {}),
}


@pytest.mark.parametrize("case", ATTENDED)
def test_attention_that_onnx_runtime_fuses(case: str) -> None:
    m, (op, others, attributes) = Model(), ATTENDED[case]
    shapes = {"w": (16, 48), "b": (48,), "wide": (16, 40), "wide_b": (40,), "keys": (2, 7, 16), "values": (2, 7, 8)}
    shapes |= {"b2": (40,), "values2": (2, 5, 8), "added": (1, 2, 5, 5), "heads": (2, 2, 7, 8)}
    for name in sorted({*others.split()} & {*shapes}):
        m.floats(name, *shapes[name])
    masks = {"mask": np.array([[1, 0, 1, 1, 0], [0, 1, 1, 1, 2]]), "hidden": np.eye(7, dtype=int)[:2]}
    masks["rows"] = np.tril(np.ones((2, 5, 5), int), 1)
    for name in {*others.split()} & {*masks}:
        m.known(name, masks[name].astype(np.int32))
    m(op, f"x {others}", "y", domain="com.microsoft", num_heads=2, **attributes)
    model, x = m.proto((2, 5, 16), "y"), m.rng.standard_normal((2, 5, 16)).astype("f4")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    (wanted,) = session(model, "DISABLE_ALL").run(None, {"x": x})
    network = bc.load_onnx(model, strict=True)
    np.testing.assert_allclose(network.evaluate(x)["y"], wanted, rtol=1e-5, atol=1e-6)
    if "mask" in case:
        np.testing.assert_allclose(bc.compile(network, threads=1)(x), wanted, rtol=1e-5, atol=1e-6)


def test_a_mask_of_fewer_queries_than_keys_is_left_to_onnx_runtime() -> None:
    m = Model()
    op = ("MultiHeadAttention", f"x {m.floats('keys', 2, 7, 16)} keys", "y")
    m(*op, domain="com.microsoft", num_heads=2, unidirectional=1)
    model, x = m.proto((2, 5, 16), "y"), m.rng.standard_normal((2, 5, 16)).astype("f4")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(bc.UnsupportedError, match="numbers of queries and keys"):
        bc.load_onnx(model, strict=True)
    (wanted,) = session(model, "DISABLE_ALL").run(None, {"x": x})
    with pytest.warns(bc.SlowPathWarning):
        found = bc.compile(bc.load_onnx(model), threads=1)(x)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("widths", [(16, 16, 64), (16, 32), (48, 0, 0)], ids=str)
def test_widths_of_attention_that_are_wrong(widths: tuple[int, ...]) -> None:
    m = Model()
    m("Attention", f"x {m.floats('w', 16, 48)}", "y", domain="com.microsoft", num_heads=2, qkv_hidden_sizes=widths)
    model = m.proto((2, 5, 16), "y")
    model.opset_import.append(helper.make_opsetid("com.microsoft", 1))
    with pytest.raises(
        bc.NetworkError, match=r"\(Attention\): qkv_hidden_sizes=.*three sizes whose sum is the columns"
    ):
        bc.load_onnx(model, strict=True)
