"""The oracle of quantised convolution against numbers worked out by hand, ONNX's own example, and PyTorch's sums."""

from __future__ import annotations

import numpy as np
import pytest
import quantized_oracle
from quantized_oracle import Steps


def test_ties_go_to_even_or_away_from_zero():
    values = (-3.5, -2.5, -1.5, -0.5, 0.5, 1.5, 2.5, 3.5)
    total = np.array([int(2 * v) for v in values]).reshape(1, 1, 1, -1)
    even = quantized_oracle.requantize(total, Steps("int8", src_scale=0.5)).reshape(-1)
    away = quantized_oracle.requantize(total, Steps("int8", src_scale=0.5, away=True)).reshape(-1)
    assert even.tolist() == [-4, -2, -2, 0, 0, 2, 2, 4]
    assert away.tolist() == [-4, -3, -2, -1, 1, 2, 3, 4]
    # The zero point comes after rounding: an odd one does not change which neighbour is even.
    odd = quantized_oracle.requantize(total, Steps("int8", src_scale=0.5, dst_zero_point=1)).reshape(-1)
    assert (odd - 1).tolist() == even.tolist()


def test_what_does_not_fit_is_the_nearest_that_does():
    total = np.array([-(2**31) + 1, -300, -129, 127, 128, 256, 2**31 - 1]).reshape(1, 1, 1, -1)
    assert quantized_oracle.requantize(total, Steps("int8")).reshape(-1).tolist() == [
        -128,
        -128,
        -128,
        127,
        127,
        127,
        127,
    ]
    assert quantized_oracle.requantize(total, Steps("uint8")).reshape(-1).tolist() == [0, 0, 0, 127, 128, 255, 255]
    assert quantized_oracle.requantize(total, Steps("uint8", dst_zero_point=200)).reshape(-1).tolist()[1:4] == [
        0,
        71,
        255,
    ]


def test_residual_and_activation_come_between_the_scales():
    total = np.full((1, 1, 1, 2), 10)
    steps = Steps(
        "int8", 0.5, 2.0, 4.0, 1, "relu", np.array([[[[-30, 9]]]], np.int8), residual_scale=0.5, residual_zero_point=1
    )
    # 10 * 0.5 * 2 = 10; and (-30 - 1) / 2 = -15.5 makes -5.5, which relu makes 0, or (9 - 1) / 2 = 4 makes 14, or 3.5.
    assert quantized_oracle.requantize(total, steps).reshape(-1).tolist() == [1, 5]


def test_padding_stands_for_zero():
    x, w = np.full((1, 1, 2, 2), 7, np.uint8), np.ones((1, 1, 3, 3), np.int8)
    found = quantized_oracle.sums(x, w, np.array([100], np.int32), 5, pads=((1, 1), (1, 1)))
    assert (found == 100 + 4 * 2).all()


def test_sums_are_torchs():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    x, w = rng.integers(0, 256, (2, 6, 9, 7), np.uint8), rng.integers(-128, 128, (8, 3, 3, 3)).astype(np.int8)
    found = quantized_oracle.sums(x, w, None, 17, stride=(2, 1), pads=((1, 1), (2, 2)), dilation=(1, 2), groups=2)
    wide = torch.from_numpy(x.astype(np.float64) - 17)
    wanted = torch.nn.functional.conv2d(wide, torch.from_numpy(w.astype(np.float64)), None, (2, 1), (1, 2), (1, 2), 2)
    assert (found == wanted.numpy()).all()


def test_onnx_has_it_so():
    """Its reference on random numbers, which adds the zero point before it rounds: ties may go the other way."""
    onnx = pytest.importorskip("onnx")
    from onnx import TensorProto, helper
    from onnx.reference import ReferenceEvaluator

    names = ["x", "xs", "xz", "w", "ws", "wz", "ys", "yz"]
    node = helper.make_node("QLinearConv", names, ["y"], pads=[1, 1, 1, 1])
    kinds = [TensorProto.UINT8, TensorProto.FLOAT, TensorProto.UINT8, TensorProto.INT8, TensorProto.FLOAT]
    kinds += [TensorProto.INT8, TensorProto.FLOAT, TensorProto.UINT8]
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in zip(names, kinds, strict=True)]
    graph = helper.make_graph([node], "q", inputs, [helper.make_tensor_value_info("y", TensorProto.UINT8, None)])
    model = helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 13)])
    rng = np.random.default_rng(3)
    x, w = rng.integers(0, 256, (1, 4, 6, 5), np.uint8), rng.integers(-128, 128, (3, 4, 3, 3)).astype(np.int8)
    ws = np.array([0.001, 0.002, 0.0005], np.float32)
    given = (x, np.float32(0.02), np.uint8(117), w, ws, np.zeros(3, np.int8), np.float32(0.013), np.uint8(42))
    (wanted,) = ReferenceEvaluator(model).run(None, dict(zip(names, map(np.asarray, given), strict=True)))
    total = quantized_oracle.sums(x, w, None, 117, pads=((1, 1), (1, 1)))
    found = quantized_oracle.requantize(total, Steps("uint8", 0.02, ws, 0.013, 42))
    assert wanted.std() > 20  # it is not all saturated
    assert np.abs(found.astype(int) - wanted).max() <= 1
    assert (found == wanted).mean() > 0.95
