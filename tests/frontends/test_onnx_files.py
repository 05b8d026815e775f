"""Where a model and its values may be: open files, any path, links, files beside it, more than protobuf serializes."""

from __future__ import annotations

import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc

onnx = pytest.importorskip("onnx")
from onnx import TensorProto, helper, numpy_helper  # noqa: E402

X = np.random.default_rng(0).standard_normal((1, 4, 5, 6)).astype("f4")
W = np.random.default_rng(1).standard_normal((8, 4, 1, 1)).astype("f4")


def external(name: str, dtype: int, dims: Any, **entries: Any) -> Any:
    tensor = TensorProto(name=name, data_type=dtype, dims=dims, data_location=TensorProto.EXTERNAL)
    for key, value in entries.items():
        tensor.external_data.add(key=key, value=str(value))
    return tensor


def model(*weights: Any, in_function: bool = False, x: tuple[int, ...] = X.shape) -> Any:
    """Convolutions one after the other; the last one is in a function, whose values have the names of the model's."""
    opset = helper.make_opsetid("", 17)
    names = ["x", *(f"c{k}" for k in range(len(weights) - 1)), "y"]
    nodes = [
        helper.make_node("Conv", [a, weight.name], [b]) for a, b, weight in zip(names, names[1:], weights, strict=False)
    ]
    functions, opsets = [], [opset]
    if in_function:
        nodes[-1].op_type, nodes[-1].domain = "Own", "own"
        body = [helper.make_node("Conv", ["a", "b"], ["w0"]), helper.make_node("Relu", ["w0"], ["r"])]
        functions = [helper.make_function("own", "Own", ["a", "b"], ["r"], body, [opset])]
        opsets.append(helper.make_opsetid("own", 1))
    info = [helper.make_tensor_value_info("x", TensorProto.FLOAT, x)]
    info.append(helper.make_tensor_value_info("y", TensorProto.FLOAT, None))
    graph = helper.make_graph(nodes, "g", info[:1], info[1:], list(weights))
    return helper.make_model(graph, functions=functions, opset_imports=opsets, ir_version=8)


def wanted(*weights: Any) -> Any:
    found = X
    for weight in weights:
        found = np.einsum("oi,nihw->nohw", weight[:, :, 0, 0], found)
    return found


def check(network: bc.Network, *weights: Any) -> None:
    np.testing.assert_allclose(network.evaluate(X)["y"], wanted(*weights), rtol=1e-5, atol=1e-5)


class Elsewhere:
    """An os.PathLike that is no Path."""

    def __init__(self, path: Any) -> None:
        self.path = path

    def __fspath__(self) -> Any:
        return self.path


def test_a_model_is_a_path_bytes_or_an_open_file(tmp_path: Path) -> None:
    proto, path = model(numpy_helper.from_array(W, "w0")), tmp_path / "m.onnx"
    held = proto.SerializeToString()
    path.write_bytes(held)
    for given in (proto, held, bytearray(held), memoryview(held), path, str(path)):
        check(bc.load_onnx(given), W)
    for given in (Elsewhere(str(path)), Elsewhere(os.fsencode(path)), io.BytesIO(held)):
        check(bc.load_onnx(given), W)
    with open(path, "rb") as file:
        check(bc.load_onnx(file), W)
    with (
        open(path, encoding="latin-1") as text,
        pytest.raises(bc.ArgumentError, match=r'is a file in text mode; .*"rb"'),
    ):
        bc.load_onnx(text)
    with pytest.raises(
        bc.ArgumentError, match=r"has to be a path \(str or os.PathLike\), bytes, a file open for bytes"
    ):
        bc.load_onnx(7)
    with pytest.raises(bc.NetworkError, match=r"nothing.onnx'?: the file .* does not exist"):
        bc.load_onnx(Elsewhere(str(tmp_path / "nothing.onnx")))
    with pytest.raises(bc.NetworkError, match="is no complete ONNX model"):
        bc.load_onnx(io.BytesIO(held[:-7]))
    bc.compile(bc.load_onnx(path)).save(tmp_path / "m.plan")
    with pytest.raises(bc.NetworkError, match=r"m.plan'?: is a zip file.*Plan.load reads the files of Plan.save"):
        bc.load_onnx(tmp_path / "m.plan")


# ---------------------------------------------------------------- values in other files


def stored(folder: Path, **more: Any) -> Path:
    """m.onnx with its weight in w.bin, 16 bytes from the beginning."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "w.bin").write_bytes(bytes(16) + W.tobytes())
    path = folder / "m.onnx"
    path.write_bytes(model(external("w0", 1, W.shape, location="w.bin", offset=16, **more)).SerializeToString())
    return path


@pytest.mark.parametrize("relative", [False, True])
def test_a_cache_of_links_is_followed(tmp_path: Path, relative: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hugging Face keeps models: links with names, to files that are named by their contents."""
    stored(tmp_path / "blobs")
    snapshot = tmp_path / "snapshots" / "1a2b" / "onnx"
    snapshot.mkdir(parents=True)
    for name, blob in (("m.onnx", "d00d"), ("w.bin", "f00d")):
        (tmp_path / "blobs" / name).rename(tmp_path / "blobs" / blob)
        (snapshot / name).symlink_to(Path("../../../blobs") / blob)
    monkeypatch.chdir(snapshot)
    check(bc.load_onnx("m.onnx" if relative else snapshot / "m.onnx"), W)
    # And through a link to the folder itself.
    (tmp_path / "here").symlink_to(snapshot, target_is_directory=True)
    check(bc.load_onnx(tmp_path / "here" / "m.onnx"), W)


def test_a_link_within_the_models_folder_is_followed(tmp_path: Path) -> None:
    path = stored(tmp_path)
    (tmp_path / "data").mkdir()
    (tmp_path / "w.bin").rename(tmp_path / "data" / "values")
    (tmp_path / "w.bin").symlink_to("data/values")
    check(bc.load_onnx(path), W)


def test_a_link_out_of_both_folders_is_refused_by_its_rule(tmp_path: Path) -> None:
    path = stored(tmp_path / "model")
    (tmp_path / "model" / "w.bin").rename(tmp_path / "secret")
    (tmp_path / "model" / "w.bin").symlink_to("../secret")
    says = r"initializer 'w0', .*it is a link to .*secret, and has to be in .*/model, the model's folder;"
    with pytest.raises(bc.NetworkError, match=says):
        bc.load_onnx(path)
    (tmp_path / "links").mkdir()
    for name in ("m.onnx", "w.bin"):
        (tmp_path / "links" / name).symlink_to(f"../model/{name}")
    says = (
        r"it is a link to .*secret, and has to be in .*/links, the model's folder, or .*/model, where the model's own"
    )
    with pytest.raises(bc.NetworkError, match=says):
        bc.load_onnx(tmp_path / "links" / "m.onnx")


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"length": 4}, "its values cannot be read"),
        ({"length": 10**9}, "1000000000 bytes from offset 16 are not inside its 144 bytes"),
        ({"length": -4}, "its length, '-4', has to be a whole number"),
        ({"length": "x"}, "its length, 'x', has to be a whole number"),
    ],
)
def test_a_part_that_is_not_there_is_refused(tmp_path: Path, entries: dict[str, Any], says: str) -> None:
    with pytest.raises(bc.NetworkError, match=f"initializer 'w0'.*{says}"):
        bc.load_onnx(stored(tmp_path, **entries))


@pytest.mark.parametrize("kind", ["INT4", "UINT4", "BFLOAT16", "FLOAT16", "INT8", "BOOL", "DOUBLE"])
def test_values_of_every_type_are_read(tmp_path: Path, kind: str) -> None:
    """Those of 4 bits are two in a byte. Sparse ones become dense."""
    from blockconv.frontends.onnx.file import read_initializers, read_model

    dtype, number = helper.tensor_dtype_to_np_dtype(TensorProto.DataType.Value(kind)), TensorProto.DataType.Value(kind)
    value = np.array([[1, 0, 3], [4, 5, 1]]).astype(dtype)
    raw = numpy_helper.from_array(value).raw_data
    (tmp_path / "w.bin").write_bytes(raw)
    proto = model(external("w0", number, value.shape, location="w.bin"))
    sparse, places = model(), numpy_helper.from_array(np.array([0, 1, 2, 4, 5, 6]))
    parts = external("w0", number, (value.size,), location="w.bin"), places
    sparse.graph.sparse_initializer.append(helper.make_sparse_tensor(*parts, (2, 4)))
    for made, columns in ((proto, 0), (sparse, 1)):
        (tmp_path / "m.onnx").write_bytes(made.SerializeToString())
        read, files = read_model(tmp_path / "m.onnx")
        found = read_initializers(read, None, files)["w0"]
        assert found.dtype == dtype
        np.testing.assert_array_equal(found.astype("f4"), np.pad(value.astype("f4"), ((0, 0), (0, columns))))


def test_a_function_and_values_in_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A function is inlined without the values, whatever their size; protobuf serializes 2 GiB at most."""
    from blockconv.frontends.onnx import functions

    seen, inline = [], functions.inliner.inline_local_functions
    monkeypatch.setattr(
        functions.inliner, "inline_local_functions", lambda m, **k: (seen.append(m.ByteSize()), inline(m, **k))[1]
    )
    large = np.random.default_rng(2).standard_normal((64, 8, 1, 1)).astype("f4")
    (tmp_path / "w.bin").write_bytes(W.tobytes() + large.tobytes())
    weights = (
        external("w0", 1, W.shape, location="w.bin", length=W.nbytes),
        external("w1", 1, large.shape, location="w.bin", offset=W.nbytes),
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(model(*weights, in_function=True).SerializeToString())
    for given in (path, onnx.load(path)):  # values beside the model, and in it
        np.testing.assert_allclose(
            bc.load_onnx(given).evaluate(X)["y"], np.maximum(wanted(W, large), 0), rtol=1e-5, atol=1e-5
        )
    assert max(seen) < large.nbytes


def test_a_constant_of_a_function_in_another_file(tmp_path: Path) -> None:
    opset = helper.make_opsetid("", 17)
    (tmp_path / "w.bin").write_bytes(W.tobytes())
    constant = helper.make_node("Constant", [], ["w"], value=external("v", 1, W.shape, location="w.bin"))
    body = [constant, helper.make_node("Conv", ["a", "w"], ["b"])]
    function = helper.make_function("own", "Own", ["a"], ["b"], body, [opset])
    info = [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", X.shape), ("y", None))]
    graph = helper.make_graph([helper.make_node("Own", ["x"], ["y"], domain="own")], "g", info[:1], info[1:])
    opsets = [opset, helper.make_opsetid("own", 1)]
    path = tmp_path / "m.onnx"
    proto = helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=8)
    path.write_bytes(proto.SerializeToString())
    check(bc.load_onnx(path), W)
    with pytest.raises(bc.NetworkError, match="give load_onnx the model's path"):
        bc.load_onnx(path.read_bytes())


@pytest.mark.nightly
def test_more_than_two_gib(tmp_path: Path) -> None:
    """A function, and 2.1 GiB of values in a file of zeros that takes no room."""
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 6 << 30:
        pytest.skip("less than 6 GiB of memory are free")
    side = 16896
    with open(tmp_path / "w.bin", "wb") as file:
        file.truncate(2 * 4 * side * side)
    shape = (side, side, 1, 1)
    weights = (
        external(f"w{k}", 1, shape, location="w.bin", offset=k * 4 * side**2, length=4 * side**2) for k in (0, 1)
    )
    path = tmp_path / "m.onnx"
    path.write_bytes(model(*weights, in_function=True, x=(1, side, 1, 1)).SerializeToString())
    network = bc.load_onnx(path)
    assert sum(value.nbytes for value in network.constants.values()) > 2 << 30
    assert [node.op for node in network.nodes] == ["conv2d", "conv2d", "activation"]


@pytest.mark.parametrize("known", [True, False])
def test_weights_of_branches_in_another_file(tmp_path: Path, known: bool) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "w.bin").write_bytes(W.tobytes())
    constant = helper.make_node("Constant", [], ["w"], value=external("v", 1, W.shape, location="w.bin"))
    ends = [helper.make_tensor_value_info(name, 1, None) for name in "cdy"]
    convs = [helper.make_node("Conv", ["x", "w"], [name]) for name in "cd"]
    branches = [
        helper.make_graph([convs[0]], "t", [], ends[:1], [external("w", 1, W.shape, location="w.bin")]),
        helper.make_graph([constant, convs[1]], "e", [], ends[1:2]),
    ]
    node = helper.make_node("If", ["yes"], ["y"], then_branch=branches[0], else_branch=branches[1])
    x, yes = helper.make_tensor_value_info("x", 1, X.shape), np.array(True)
    fed = [] if known else [helper.make_tensor_value_info("yes", TensorProto.BOOL, [])]
    held = [numpy_helper.from_array(yes, "yes")] if known else []
    graph = helper.make_graph([node], "g", [x, *fed], ends[2:], held)
    proto = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)
    path = tmp_path / "m.onnx"
    path.write_bytes(proto.SerializeToString())
    network = bc.load_onnx(path)
    for choice in (True,) if known else (True, False):
        found = network.evaluate({"x": X} | ({} if known else {"yes": np.array(choice)}))["y"]
        np.testing.assert_allclose(found, wanted(W), rtol=1e-5, atol=1e-5)
    with pytest.raises(bc.NetworkError, match=r"node 'w'.*give load_onnx the model's path"):
        bc.load_onnx(path.read_bytes())
