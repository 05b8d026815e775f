"""What load_onnx says of broken models, and that ONNX Runtime refuses them too; and that only our errors come out."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core.errors import ArgumentError, DtypeError, NetworkError, UnsupportedError

onnx = pytest.importorskip("onnx")
from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402
from onnx import TensorProto, helper  # noqa: E402
from onnx_broken import BROKEN, ODD, X, model, node, op, tensor  # noqa: E402


@pytest.mark.parametrize("name", BROKEN)
def test_the_error_says_what_is_wrong(name: str) -> None:
    with pytest.raises((NetworkError, UnsupportedError), match=BROKEN[name].says):
        bc.load_onnx(BROKEN[name].model, strict=True)


def runtime(proto: Any) -> list[np.ndarray]:
    """What ONNX Runtime gives."""
    ort = pytest.importorskip("onnxruntime")
    options = ort.SessionOptions()
    options.log_severity_level = 4
    session = ort.InferenceSession(proto.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return list(session.run(None, {"x": X}))


@pytest.mark.parametrize("name", [name for name, case in BROKEN.items() if case.stricter != "not tried"])
def test_onnx_runtime_refuses_it_too(name: str) -> None:
    """Or is known to take it, for a reason."""
    if BROKEN[name].stricter:
        runtime(BROKEN[name].model)
    else:
        pytest.importorskip("onnxruntime")
        with pytest.raises(Exception, match="ONNXRuntimeError"):
            runtime(BROKEN[name].model)


@pytest.mark.parametrize("name", ODD)
def test_what_onnx_runtime_takes_is_taken_with_its_result(name: str) -> None:
    net = bc.load_onnx(ODD[name])
    found = net.evaluate(X)[net.outputs[0]]
    (wanted,) = runtime(ODD[name])
    assert (found.shape, found.dtype) == (np.shape(wanted), np.asarray(wanted).dtype)
    np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-5)


def test_sizes_and_parts_of_shapes() -> None:
    """Size is a scalar, and a part of a shape may be empty: plans give both."""
    size = bc.load_onnx(ODD["size"])
    part = bc.load_onnx(ODD["no part of a shape"])
    assert (size.shape("y"), part.shape("y")) == ((), (0,))
    found = bc.compile(size)(X)
    assert (found.shape, int(found)) == ((), X.size)
    assert bc.compile(part)(X).shape == (0,)


def test_empty_axes_are_refused_as_they_mean_two_things() -> None:
    with pytest.raises(UnsupportedError, match="empty axes, which mean none to ONNX and all to ONNX Runtime"):
        bc.load_onnx(op("Squeeze", {"a": np.zeros(0, np.int64)}), strict=True)


def test_a_long_graph_in_reverse_order_is_put_in_order() -> None:
    count = 20_000
    nodes = [node("Relu", f"v{i}" if i else "x", outputs=(f"v{i + 1}",), name=f"n{i}") for i in range(count)]
    from blockconv.network.order import topological

    order, circle = topological(nodes[::-1], lambda n: n.input, lambda n: n.output, {"x"})
    assert not circle
    assert [n.name for n in order] == [n.name for n in nodes]
    nodes[0].input[0] = f"v{count}"
    order, circle = topological(nodes, lambda n: n.input, lambda n: n.output, {"x"})
    assert (len(order), len(circle)) == (0, count)


# ---------------------------------------------------------------- values in other files


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    inside = tmp_path / "model"
    (inside / "folder").mkdir(parents=True)
    weight = op("Conv", {"w": np.ones((8, 4, 3, 3), np.float32)}).graph.initializer[0].raw_data
    for path in (tmp_path / "secret", inside / "w.bin"):
        path.write_bytes(weight)
    (inside / "short.bin").write_bytes(weight[:-4])
    (inside / "link").symlink_to(tmp_path / "secret")
    if hasattr(os, "mkfifo"):
        os.mkfifo(inside / "fifo")
    return inside


def stored(folder: Path, **entries: str) -> Path:
    proto = tensor(raw_data=b"", data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        proto.graph.initializer[0].external_data.add(key=key, value=value)
    path = folder / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    return path


@pytest.mark.parametrize(
    "entries",
    [
        {"location": "../secret"}, {"location": "folder/../../secret"}, {"location": "link"}, {"location": "folder"},
        {"location": "nothing"}, {"location": "fifo"}, {"location": ""}, {}, {"location": "short.bin"},
        {"location": "w.bin", "offset": "-1"}, {"location": "w.bin", "offset": "4"},
        {"location": "w.bin", "offset": "x"}, {"location": "w.bin", "length": "4"},
    ],
    ids=str,
)  # fmt: skip
def test_values_outside_the_models_folder_or_of_another_length(folder: Path, entries: dict[str, str]) -> None:
    with pytest.raises(NetworkError, match=r"values .*cannot be read.*(one file|export the model again)"):
        bc.load_onnx(stored(folder, **entries))


def test_an_absolute_path_to_values(folder: Path) -> None:
    with pytest.raises(NetworkError, match="cannot be read"):
        bc.load_onnx(stored(folder, location=str(folder.parent / "secret")))


def test_values_beside_the_model_are_read_by_its_path_alone(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = stored(folder, location="w.bin")
    assert bc.load_onnx(path).constants["w"].sum() == 8 * 36
    monkeypatch.chdir(folder)
    assert bc.load_onnx("m.onnx").constants["w"].sum() == 8 * 36
    for unplaced in (path.read_bytes(), onnx.load(path, load_external_data=False)):
        with pytest.raises(NetworkError, match="give load_onnx the model's path"):
            bc.load_onnx(unplaced)


# ---------------------------------------------------------------- what the caller gives


@pytest.mark.parametrize("shape", [(1, 4, -6, 6), (1, 4, 2.5, 6), (1, 4, "6", 6), "abcd", 5, (True, 4, 6, 6)])
def test_input_shapes_that_are_none(shape: Any) -> None:
    for shapes in (shape, {"x": shape}):
        with pytest.raises(ArgumentError, match=r"input_shapes=.*input 'x' has to be a tuple of ints"):
            bc.load_onnx(op("Relu"), shapes)


def test_constants_of_another_type() -> None:
    proto = op("Conv", {"w": np.ones((8, 4, 3, 3), np.float32)})
    del proto.graph.initializer[:]
    proto.graph.input.append(helper.make_tensor_value_info("w", TensorProto.FLOAT, (8, 4, 3, 3)))
    for wrong in (np.ones((8, 4, 3, 3)), [["a"]], {}):
        with pytest.raises(DtypeError, match=r"constants\['w'\]=.*element type FLOAT"):
            bc.load_onnx(proto, constants={"w": wrong})
    for wrong in (5, [("w", np.ones((8, 4, 3, 3), np.float32))]):
        with pytest.raises(ArgumentError, match="has to be a dict"):
            bc.load_onnx(proto, constants=wrong)  # type: ignore[arg-type]


# ---------------------------------------------------------------- anything


def _whole() -> Any:
    return model(
        [
            node("Conv", "x", "w", outputs=("c",), name="conv", pads=[1, 1, 1, 1], strides=[1, 1]),
            node("MaxPool", "c", outputs=("m",), name="pool", kernel_shape=[2, 2], auto_pad="SAME_UPPER"),
            node("Slice", "m", "s", "e", outputs=("p",), name="slice"),
            node("Resize", "p", "", "r", outputs=("u",), name="resize", mode="linear"),
            node("Split", "u", outputs=("l", "k"), name="split", axis=1),
            node("Concat", "l", "k", outputs=("j",), name="concat", axis=1),
            node("Unsqueeze", "j", "a", outputs=("q",), name="unsqueeze"),
            node("Squeeze", "q", "a", name="squeeze"),
        ],
        {
            "w": np.ones((8, 4, 3, 3), np.float32), "s": np.array([0, 1]), "e": np.array([9, 9]),
            "r": np.array([1, 1, 2, 2], np.float32), "a": np.array([2]),
        },
    )  # fmt: skip


NUMBERS = st.one_of(st.integers(-3, 5), st.sampled_from([2**31, -(2**31), 2**40, 2**63 - 1, -(2**63)]))
VALUES = st.one_of(
    NUMBERS, st.floats(width=32), st.text(max_size=4), st.binary(max_size=4), st.lists(NUMBERS, min_size=1, max_size=5)
)
NAMES = ("pads", "strides", "kernel_shape", "auto_pad", "axis", "axes", "mode", "group", "dilations", "num_outputs")
OPS = ("Conv", "MaxPool", "Pad", "Reshape", "Transpose", "LRN", "Gemm", "Flatten", "ReduceMean", "Split", "Slice", "If")


@st.composite
def broken(draw: st.DrawFn) -> Any:
    """A model with some things changed."""
    proto = _whole()
    for _ in range(draw(st.integers(1, 3))):
        at = draw(st.sampled_from(list(proto.graph.node)))
        weight = draw(st.sampled_from(list(proto.graph.initializer)))
        match draw(st.integers(0, 8)):
            case 0:
                at.attribute.append(helper.make_attribute(draw(st.sampled_from(NAMES)), draw(VALUES)))
            case 1 if at.attribute:
                changed = draw(st.sampled_from(list(at.attribute)))
                changed.CopyFrom(helper.make_attribute(changed.name, draw(VALUES)))
            case 2:
                at.op_type = draw(st.sampled_from(OPS))
            case 3:
                at.input[draw(st.integers(0, len(at.input) - 1))] = draw(st.sampled_from(["", "x", "y", "w", "no"]))
            case 4:
                values = draw(st.lists(NUMBERS, max_size=5))
                weight.CopyFrom(onnx.numpy_helper.from_array(np.array(values, np.int64), weight.name))
            case 5 if weight.dims:
                weight.dims[draw(st.integers(0, len(weight.dims) - 1))] = draw(NUMBERS)
            case 6:
                weight.data_type = draw(st.integers(0, 30))
            case 7:
                proto.graph.node.append(at)
            case _:
                proto.opset_import[0].version = draw(st.integers(-1, 40))
    return proto


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(broken())
def test_only_our_errors_come_out(proto: Any) -> None:
    with contextlib.suppress(bc.BlockconvError):
        bc.load_onnx(proto)
