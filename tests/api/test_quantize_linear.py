"""`quantize_linear` and `dequantize_linear`: what they give, of what kind, and what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
import quantized_oracle

import blockconv as bc
from blockconv import Quantization

RNG = np.random.default_rng(180)
SHAPE = (2, 18, 5, 6)
X = (RNG.integers(-700, 700, SHAPE) * RNG.choice([0.125, 0.0123], SHAPE)).astype(np.float32)
Q = Quantization(0.25, 130)
WANTED = quantized_oracle.integers(X, "uint8", 0.25, 130)


def test_what_goes_in_comes_out():
    found = bc.quantize_linear(X, Q)
    assert found.dtype == np.uint8
    assert (found == WANTED).all()
    last = bc.quantize_linear(np.ascontiguousarray(X.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2), Q)
    assert bc.is_channels_last(last)
    assert (last == WANTED).all()
    blocked = bc.quantize_linear(X, Q, layout="NCHW32")
    assert (blocked.layout, blocked.dtype, blocked.zero_point) == (bc.Layout("NCHW32"), np.uint8, 130)
    assert (blocked.storage[..., 18:] == 130).all(), "the padding stands for zero"
    assert (blocked.numpy() == WANTED).all()
    real = bc.dequantize_linear(blocked, Q, layout="NHWC")
    assert (real.dtype, real.layout) == (np.float32, bc.Layout("NHWC"))
    assert (real.numpy() == quantized_oracle.real(WANTED, 0.25, 130)).all()
    assert bc.dequantize_linear(WANTED, Q).tobytes() == quantized_oracle.real(WANTED, 0.25, 130).tobytes()


def test_integers_are_requantized():
    to = Quantization(0.3, -7)
    found = bc.quantize_linear(bc.to_layout(WANTED, "NCHW4"), to, "int8", input_quantization=Q, layout="NHWC")
    wanted = quantized_oracle.integers(quantized_oracle.real(WANTED, 0.25, 130), "int8", 0.3, -7)
    assert (found.numpy() == wanted).all()


def test_any_rank_and_no_elements():
    for shape in ((7,), (3, 5), (2, 3, 4), (1, 2, 3, 2, 2), (0, 3, 2, 2)):
        x = np.linspace(-9, 9, int(np.prod(shape)), dtype=np.float32).reshape(shape)
        found = bc.quantize_linear(x, Quantization(0.1, 3), np.int8)
        assert found.shape == shape
        assert (found == quantized_oracle.integers(x, "int8", 0.1, 3)).all()


def test_onnx_runtime_gives_the_same_bits():
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    nodes = [onnx.helper.make_node("QuantizeLinear", ["x", "s", "z"], ["q"])]
    nodes += [onnx.helper.make_node("DequantizeLinear", ["q", "s", "z"], ["y"])]
    for dtype, scale, zero_point in (("uint8", 0.0371, 3), ("int8", 0.5, -128), ("uint8", 0.25, 255)):
        values = [np.float32(scale), np.array(zero_point, dtype)]
        held = [onnx.numpy_helper.from_array(v, name) for v, name in zip(values, "sz", strict=True)]
        kind = onnx.TensorProto
        sides = [
            onnx.helper.make_tensor_value_info("x", kind.FLOAT, SHAPE),
            onnx.helper.make_tensor_value_info("q", getattr(kind, dtype.upper()), SHAPE),
            onnx.helper.make_tensor_value_info("y", kind.FLOAT, SHAPE),
        ]
        graph = onnx.helper.make_graph(nodes, "quantize", sides[:1], sides[1:], held)
        model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
        session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        q, y = session.run(None, {"x": X})
        found = bc.quantize_linear(X, Quantization(scale, zero_point), dtype, layout="NCHW16")
        assert (found.numpy() == q).all()
        assert bc.dequantize_linear(found, Quantization(scale, zero_point)).numpy().tobytes() == y.tobytes()


def refused(match, *args, **options):
    with pytest.raises(bc.ArgumentError, match=match):
        bc.quantize_linear(*args, **options)


def test_what_breaks_a_rule():
    refused("x='float64': has to be float32", X.astype(np.float64), Q)
    refused("dtype=.*: has to be uint8 or int8", X, Q, "int32")
    refused("dtype=.*: has to be uint8 or int8", X, Q, "no type")
    refused("quantization=0.5: has to be a Quantization", X, 0.5)
    refused("zero_point has to be from -128 to 127", X, Q, "int8")
    refused("quantization=.*one scale", X, Quantization([1.0, 2.0]))
    refused("input_quantization=None: has to be a Quantization, because x is uint8", WANTED, Q)
    refused("input_quantization=.*: is for integers", X, Q, input_quantization=Q)
    refused("layout='NCHW16': has 4 dimensions", X[0], Q, layout="NCHW16")
    refused("1 to 6 dimensions", np.float32(1), Q)
    sums = np.zeros(4, np.int32)
    refused("has to have zero point 0", sums, Q, input_quantization=Quantization(1.0, 1))
    with pytest.raises(bc.ArgumentError, match="is the array's zero point, and quantization has 130"):
        bc.dequantize_linear(bc.empty(SHAPE, "NHWC", "uint8", zero_point=7), Q)
    with pytest.raises(bc.DtypeError, match="x='float32': has to be uint8, int8 or int32"):
        bc.dequantize_linear(X, Q)
