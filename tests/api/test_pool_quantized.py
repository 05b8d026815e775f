"""Pooling functions on 8-bit integers: what they give, what they are told, what they refuse."""

from __future__ import annotations

from typing import Any

import guarded
import numpy as np
import pytest
import quantized_pool_oracle

import blockconv as bc
from blockconv import Quantization

X = np.random.default_rng(182).integers(0, 256, (2, 18, 9, 8), np.uint8)
SRC, DST = (0.02, 117), (0.05, 3)
GIVEN = {"input_quantization": Quantization(*SRC), "out_quantization": Quantization(*DST)}
WINDOW: tuple[Any, ...] = ((4, 4), (3, 3), (2, 2), (1, 0), (0, 1), (1, 1))


def wanted(kind: str = "avg_include_padding", dst: tuple[float, int] = DST) -> Any:
    return quantized_pool_oracle.average(X, SRC, dst, kind, None, *WINDOW)


def test_averages_have_a_quantization_of_their_own() -> None:
    window = {"kernel_size": 3, "stride": 2, "padding": ((1, 0), (0, 1))}
    found = bc.avg_pool2d(X, **window, **GIVEN)  # type: ignore[arg-type]
    assert found.dtype == np.uint8
    assert (found == wanted()).all()
    blocked = bc.to_layout(bc.BlockedArray.from_numpy(X, zero_point=117), "NCHW16")
    out = bc.avg_pool2d(blocked, **window, count_include_pad=False, **GIVEN, out_layout="NHWC")  # type: ignore[arg-type]
    assert (out.zero_point, out.layout) == (3, bc.Layout("NHWC"))
    assert (out.numpy() == wanted("avg_exclude_padding")).all()
    same = bc.avg_pool2d(X, **window, input_quantization=Quantization(*SRC))  # type: ignore[arg-type]
    assert (same == wanted(dst=SRC)).all()
    mean = np.rint(X.mean(axis=(2, 3), keepdims=True, dtype=np.float32))
    assert (bc.global_avg_pool2d(X) == mean).all(), "integers stand for themselves"
    assert (bc.adaptive_avg_pool2d(X, 1, **GIVEN) == bc.global_avg_pool2d(X, **GIVEN)).all()


def test_maxima_keep_the_zero_point() -> None:
    blocked = bc.to_layout(bc.BlockedArray.from_numpy(X, zero_point=117), "NCHW32")
    out = bc.max_pool2d(blocked, 3, 2, 1)
    assert out.zero_point == 117
    assert (out.storage[..., 18:] == 117).all()
    assert (out.numpy() == bc.max_pool2d(X, 3, 2, 1)).all()


@pytest.mark.sampled(2)
@pytest.mark.isa
@pytest.mark.parametrize(("dtype", "low"), [("uint4", 0), ("int4", -8)])
def test_packed_integers_of_four_bits(dtype: str, low: int) -> None:
    """Maxima and averages in NCHW64: odd channels, whole blocks, and one channel more than a block."""
    kept = {"kernel_size": 3, "stride": 2, "padding": ((1, 0), (0, 1))}
    for channels in (19, 64, 129):
        x = (np.random.default_rng(channels).integers(0, 16, (2, channels, 9, 8)) + low).astype(dtype.replace("4", "8"))
        packed = bc.BlockedArray.from_numpy(x, "NCHW64", dtype=dtype, zero_point=low + 5)
        for src, dst in (((0.5, low + 5), (0.2, low + 15)), ((0.5, low), (0.9, low))):
            given = {"input_quantization": Quantization(*src), "out_quantization": Quantization(*dst)}
            there = packed if src[1] == packed.zero_point else bc.BlockedArray.from_numpy(x, "NCHW64", dtype=dtype)
            found = bc.avg_pool2d(there, **kept, **given)  # type: ignore[arg-type]
            average = quantized_pool_oracle.average(x, src, (*dst, dtype), "avg_include_padding", None, *WINDOW)
            assert (found.numpy() == average).all()
            assert (found.dtype, found.zero_point) == (dtype, dst[1])
            mean = bc.global_avg_pool2d(there, **given).numpy()
            assert (mean == exact_mean(x, src, (*dst, dtype))).all()
        found = bc.max_pool2d(packed, **kept)  # type: ignore[arg-type]
        assert (found.numpy() == bc.max_pool2d(x, **kept)).all()  # type: ignore[arg-type]
        nibbles = np.stack([found.storage & 15, found.storage >> 4], -1).reshape(2, -1, 16, 64)
        assert (nibbles[:, -1, :, channels % 64 or 64 :] == packed.zero_point & 15).all(), "the padding"


def exact_mean(x: Any, src: tuple[Any, ...], dst: tuple[Any, ...]) -> Any:
    ends = (1, 1), x.shape[2:], (1, 1), (0, 0), (0, 0), (1, 1)
    return quantized_pool_oracle.average(x, src, dst, "avg_include_padding", None, *ends)


@pytest.mark.skipif(not guarded.available(), reason="needs mprotect")
@pytest.mark.parametrize("where", ["start", "end"])
def test_packed_arrays_beside_pages_that_cannot_be_touched(where: str) -> None:
    memory = [guarded.Guarded(n) for n in (2 * 2 * 72 * 32, 2 * 2 * 20 * 32)]
    storages = [held.take(n, where) for held, n in zip(memory, (2 * 2 * 72 * 32, 2 * 2 * 20 * 32), strict=True)]
    storages[0][:] = np.random.default_rng(0).integers(0, 256, storages[0].size)
    shapes = ((2, 67, 9, 8), (2, 67, 5, 4))
    x, out = (bc.BlockedArray(s, "NCHW64", shape, dtype="int4") for s, shape in zip(storages, shapes, strict=True))
    plain = x.numpy()
    assert (bc.max_pool2d(x, 3, 2, 1, out=out).numpy() == bc.max_pool2d(plain, 3, 2, 1)).all()
    bc.avg_pool2d(x, 3, 2, 1, out=out)
    assert all(held.intact() for held in memory)


def test_packed_integers_are_refused_elsewhere() -> None:
    packed = bc.BlockedArray.from_numpy(X >> 4, "NCHW32", dtype="uint4")
    with pytest.raises(bc.LayoutError, match="pools of packed uint4 need NCHW64, and give no indices"):
        bc.max_pool2d(packed, 2)
    with pytest.raises(bc.LayoutError, match="give no indices"):
        bc.max_pool2d(bc.to_layout(packed, "NCHW64"), 2, return_indices=True)


def test_onnx_runtime_gives_the_same_but_for_sums_that_it_rounds() -> None:
    """It adds up real numbers, each of them rounded, so that a tie may not be one there."""
    onnx, runtime = pytest.importorskip("onnx"), pytest.importorskip("onnxruntime")
    held = [("s", np.float32(SRC[0])), ("z", np.uint8(SRC[1])), ("t", np.float32(DST[0])), ("y", np.uint8(DST[1]))]
    attributes = {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 0, 0, 1], "count_include_pad": 1}
    node = onnx.helper.make_node("QLinearAveragePool", list("xszty"), ["q"], domain="com.microsoft", **attributes)
    sides = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.UINT8, s) for n, s in (("x", X.shape), ("q", None))]
    graph = onnx.helper.make_graph(
        [node], "pool", sides[:1], sides[1:], [onnx.numpy_helper.from_array(np.asarray(v), n) for n, v in held]
    )
    opsets = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=opsets, ir_version=8)
    session = runtime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    apart = np.abs(session.run(None, {"x": X})[0].astype(int) - wanted())
    assert apart.max() <= 1
    assert (apart == 0).mean() > 0.99


def test_what_breaks_a_rule() -> None:
    def refused(match: str, x: Any, **options: Any) -> None:
        with pytest.raises(bc.ArgumentError, match=match):
            bc.avg_pool2d(x, 2, **options)

    refused(
        "input_quantization=.*is for 8-bit and 4-bit integers, and the input is float32", X.astype(np.float32), **GIVEN
    )
    refused("input_quantization=0.5: has to be a Quantization, or None", X, input_quantization=0.5)
    refused(r"out_quantization=\[0.5\]: has to be a Quantization, or None", X, out_quantization=[0.5])
    refused("input_quantization=None: is required with", X, out_quantization=Quantization(1.0))
    refused("zero_point has to be from -128 to 127", X.view(np.int8), input_quantization=Quantization(1.0, 200))
    refused("is the array's zero point", bc.BlockedArray.from_numpy(X, zero_point=7), **GIVEN)
    refused(
        "has to have the output's zero point, 3",
        bc.to_layout(X, "NHWC"),
        out=bc.empty((2, 18, 4, 4), "NHWC", "uint8"),
        **GIVEN,
    )
    with pytest.raises(bc.ArgumentError, match="may have at most 8421504 elements"):
        bc.global_avg_pool2d(np.zeros((1, 1, 2048, 4113), np.uint8))
