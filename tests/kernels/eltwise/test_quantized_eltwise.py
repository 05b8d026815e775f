"""Elementwise ops of 8-bit integers: bit for bit what dequantizing, the op in float32 and quantizing give."""

from __future__ import annotations

from typing import Any

import conv_oracle
import numpy as np
import pytest
import quantized_oracle
from eltwise_lab import available, check, isa_layouts, of_channels
from storage_oracle import Array

from blockconv import Quantization
from blockconv.core.activation import activation
from blockconv.core.element_problem import ElementsProblem

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

SHAPES = [(2, 20, 3, 5), (1, 64, 7, 7), (3, 3, 9, 4), (4, 33, 1, 1)]
# Scales and zero points of both operands and the result: ties of rounding, saturation, both ends of the range.
UNSIGNED = ("uint8", (0.5, 255), (0.25, 0), (0.5, 128))
SIGNED = ("int8", (0.03, -128), (0.011, 127), (0.02, -128))
KINDS = {
    "add": np.add, "sub": np.subtract, "mul": np.multiply, "div": np.divide, "max": np.maximum, "min": np.minimum,
}  # fmt: skip


def numbers(shape: tuple[int, ...], dtype: str, seed: int = 0) -> Array:
    limits = np.iinfo(dtype)
    found: Array = np.random.default_rng([*shape, seed]).integers(limits.min, limits.max, shape, dtype, endpoint=True)
    return found


def run(kind: str, layout: str, arrays: tuple[Array, Array], given: Any, act: Any = None, **options: Any) -> None:
    dtype, *sides, dst = given
    x, y = (quantized_oracle.real(a, *side) for a, side in zip(arrays, sides, strict=True))
    with np.errstate(all="ignore"):
        value = np.asarray(conv_oracle.activate(KINDS[kind](x, y), act), np.float32)
    wanted = quantized_oracle.integers(value, dtype, *dst)
    problem = ElementsProblem(kind, (arrays[0].shape, arrays[1].shape))  # type: ignore[arg-type]
    said = tuple(Quantization(*one) for one in (*sides, dst))
    operands = [(a, layout) for a in arrays]
    options = {"fill": dst[1], "activation": activation(act), "quantizations": said, **options}
    check("binary", problem, layout, operands, wanted, **options)


# Layouts, types and what is added: as much, a number for each channel, or one for each pixel.
ADDED = [(layout, UNSIGNED, (False, False, False)) for layout in ("NCHW", "NHWC", "NCHW4", "NCHW64", "CHWN4")]
ADDED += [("NHWC", SIGNED, (False, False, False)), ("NCHW16", UNSIGNED, (True, False, True))]
ADDED += [("NHWC", UNSIGNED, (True, False, True)), ("NCHW", SIGNED, (True, True, False))]
MARKS: dict[int, list[Any]] = {1: [pytest.mark.isa], 2: [pytest.mark.isa], 6: [pytest.mark.isa]}


@pytest.mark.parametrize("k", [pytest.param(k, marks=MARKS.get(k, [pytest.mark.slow])) for k in range(len(ADDED))])
def test_add_of_every_broadcast(k: int) -> None:
    layout, given, ones = ADDED[k]
    for shape in SHAPES:
        other = tuple(1 if one else size for size, one in zip(shape, (*ones, ones[2]), strict=True))
        arrays = numbers(shape, str(given[0])), numbers(other, str(given[0]), 1)
        run("add", layout, arrays, given, threads=2)


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind != "sub")) for kind in KINDS])
def test_every_kind_and_which_operand_is_broadcast(kind: str) -> None:
    shape, small = (2, 20, 3, 5), (2, 20, 1, 1)
    run(kind, "NCHW16", (numbers(shape, "uint8"), numbers(shape, "uint8", 1)), UNSIGNED)
    if kind == "sub":
        run("sub", "NCHW16", (numbers(small, "int8"), numbers(shape, "int8", 1)), SIGNED)
        run("sub", "ABcd4a16b", (numbers(shape, "uint8"), numbers(shape, "uint8", 1)), UNSIGNED)


@pytest.mark.isa
def test_mul_with_an_activation_in_place() -> None:
    arrays = numbers(SHAPES[0], "int8"), numbers(SHAPES[0], "int8", 1)
    run("mul", "NCHW16", arrays, SIGNED, "relu", in_place=0)


def test_activations() -> None:
    layout = "NCHW8"
    for act, (dtype, src, _, dst) in (("relu", UNSIGNED), (("leaky_relu", 0.5), SIGNED)):
        x = numbers(SHAPES[0], str(dtype))
        value = np.asarray(conv_oracle.activate(quantized_oracle.real(x, *src), act), np.float32)
        said = Quantization(*src), Quantization(*dst)
        wanted = quantized_oracle.integers(value, str(dtype), *dst)
        options = {"activation": activation(act), "quantizations": said, "fill": dst[1]}
        check("activation", ElementsProblem("activation", (x.shape,)), layout, [(x, layout)], wanted, **options)


def test_a_sigmoid_of_every_byte() -> None:
    x = np.arange(256, dtype=np.uint8).reshape(1, 256, 1, 1)
    value = (1 / (1 + np.exp(-(x.astype(np.float64) - 128) * 0.05))).astype(np.float32)
    said = Quantization(0.05, 128), Quantization(1 / 256, 0)
    wanted = quantized_oracle.integers(value, "uint8", 1 / 256, 0)
    options: dict[str, Any] = {"activation": activation("sigmoid"), "quantizations": said}
    check("activation", ElementsProblem("activation", (x.shape,)), "NHWC", [(x, "NHWC")], wanted, **options)


@pytest.mark.parametrize("layout", isa_layouts())
def test_a_table_of_every_byte(layout: str) -> None:
    table = np.random.default_rng(0).permutation(256).astype(np.uint8)
    said = Quantization(0.5, 7), Quantization(0.5, 7)
    for k, shape in enumerate([*SHAPES, (5, 70, 1, 2), (2, 0, 3, 3)]):
        x = numbers(shape, ("uint8", "int8")[k % 2])
        wanted = table[x.view(np.uint8)].view(x.dtype)
        options: dict[str, Any] = {"table": table.tobytes(), "quantizations": said, "fill": 7}
        p = ElementsProblem("lookup", (shape,))
        check("lookup", p, layout, [(x, layout)], wanted, in_place=[None, 0][k % 2], **options)


@pytest.mark.isa
def test_a_table_of_many_bytes_on_threads() -> None:
    table, x = np.arange(256, dtype=np.uint8)[::-1].copy(), numbers((1, 3, 301, 107), "uint8")
    p = ElementsProblem("lookup", (x.shape,))
    check("lookup", p, "NCHW", [(x, "NCHW")], table[x], threads=2, table=table.tobytes())


@pytest.mark.parametrize("layout", [*isa_layouts(), "ABcd4a16b"])
@pytest.mark.sampled(4)
def test_affine(layout: str) -> None:
    """Scale and shift of each channel are float32: some are negative or zero, some results are out of range."""
    for k, shape in enumerate([*SHAPES, (5, 70, 1, 2), (1, 7, 11, 13), (2, 0, 3, 3)]):
        dtype, src, _, dst = (UNSIGNED, SIGNED)[k % 2]
        x, rng = numbers(shape, str(dtype)), np.random.default_rng(k)
        scale, shift = (rng.integers(-8, 9, shape[1]).astype("f") * factor for factor in (0.25, 0.7))
        act = (None, "relu", ("clip", -0.3, 9.0), "hardswish")[k % 4]
        value = quantized_oracle.real(x, *src) * scale.reshape(-1, 1, 1) + shift.reshape(-1, 1, 1)
        wanted = quantized_oracle.integers(np.asarray(conv_oracle.activate(value, act), np.float32), str(dtype), *dst)
        said = Quantization(*src), Quantization(*dst)
        options: dict[str, Any] = {"activation": activation(act), "quantizations": said, "fill": dst[1]}
        operands = [(x, layout), *(of_channels(one, layout) for one in (scale, shift))]
        p = ElementsProblem("affine", (shape,))
        check("affine", p, layout, operands, wanted, in_place=[None, 0][k % 2], threads=2, **options)


def test_onnx_runtime_is_apart_at_ties_alone() -> None:
    """It folds zero points and scales into two factors and a term, so that a tie may not be one there."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    for op, kind in (("QLinearAdd", "add"), ("QLinearMul", "mul")):
        dtype, *sides, dst = ("uint8", (0.02, 117), (0.013, 3), (0.03, 50))
        arrays, named = [numbers((64, 64), str(dtype), k) for k in range(2)], []
        for name, (scale, zero_point) in zip("xyz", (*sides, dst), strict=True):
            named += [(f"{name}s", np.float32(scale)), (f"{name}z", np.array(zero_point, dtype))]
        inputs = ["x", "xs", "xz", "y", "ys", "yz", "zs", "zz"]
        node = onnx.helper.make_node(op, inputs, ["z"], domain="com.microsoft")
        ends = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.UINT8, (64, 64)) for n in "xyz"]
        held = [onnx.numpy_helper.from_array(np.asarray(value), name) for name, value in named]
        graph = onnx.helper.make_graph([node], op, ends[:2], ends[2:], held)
        opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
        model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8).SerializeToString()
        session = runtime.InferenceSession(model, providers=["CPUExecutionProvider"])
        x, y = (quantized_oracle.real(a, *side) for a, side in zip(arrays, sides, strict=True))
        value = KINDS[kind](x, y)
        apart = session.run(None, dict(zip("xy", arrays, strict=True)))[0] != quantized_oracle.integers(
            value, dtype, *dst
        )
        quotient = value[apart] / np.float32(dst[0])
        assert (np.abs(quotient - np.floor(quotient) - 0.5) < 1e-4).all()
