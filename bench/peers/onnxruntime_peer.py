"""ONNX Runtime: a model of one node, with input and output bound once.

`NCHW` is what a model of one layer gets: ONNX Runtime's own layout inside, with its reorders around it. `NCHWc`
is the optimised node alone, from blocked to blocked, as it runs amid a network; of integers, whose kernels want
channels last, it is `NHWC`.
"""

from __future__ import annotations

import functools
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from blockconv.core.problem import Conv2dProblem, Pool2dProblem

from . import QuantizedLayer, Variant, end_padding, pool_padding, qdq, spoil

BLOCKED = "com.microsoft.nchwc"


def version() -> str:
    return str(ort.__version__)


def conv2d(
    problem: Conv2dProblem, src: np.ndarray, wei: np.ndarray, bias: np.ndarray | None, threads: int
) -> Iterator[Variant]:
    ends = end_padding(problem)
    if ends is None:
        return
    model = _model(problem, ends, wei, bias)
    yield _plain(model, src, problem.dst_shape, threads)
    optimised = _optimise(model)
    if any(node.domain == BLOCKED for node in optimised.graph.node):
        yield _blocked(problem, optimised, src, threads)


def quantized_conv2d(problem: Conv2dProblem, layer: QuantizedLayer, threads: int) -> Iterator[Variant]:
    ends = end_padding(problem)
    if ends is None:
        return
    model = qdq.model(problem, ends, layer)
    yield _plain(model, layer.src, problem.dst_shape, threads)
    optimised = _optimise(model)
    if [node.op_type for node in optimised.graph.node] == ["Transpose", "QLinearConv", "Transpose"]:
        n, oc, oh, ow = problem.dst_shape
        before, conv, after = (_alone(optimised, node, TensorProto.UINT8) for node in optimised.graph.node)
        yield _between(before, conv, after, layer.src, (n, oh, ow, oc), threads, "NHWC")


def pool2d(problem: Pool2dProblem, src: np.ndarray, threads: int) -> Iterator[Variant]:
    """In its blocked layout too, of whole blocks of channels, which its optimiser leaves so between convolutions."""
    p, ends = problem, pool_padding(problem)
    if ends is None or p.divisor or (p.kind != "max" and p.dh * p.dw != 1):
        return
    attributes: dict[str, Any] = {"kernel_shape": [p.kh, p.kw], "strides": [p.sh, p.sw], "pads": [p.ph, p.pw, *ends]}
    if p.kind == "max":
        attributes["dilations"] = [p.dh, p.dw]
    else:
        attributes["count_include_pad"] = int(p.kind == "avg_include_padding")
    kind = "MaxPool" if p.kind == "max" else "AveragePool"
    model = _single(helper.make_node(kind, ["x"], ["y"], **attributes), p.src_shape, p.dst_shape, {})
    yield _plain(model, src, p.dst_shape, threads)
    if p.ic % 16 == 0:  # whole blocks, of 8 or 16 as the machine's vectors are

        def node(kind: str, **values: Any) -> onnx.NodeProto:
            return helper.make_node(kind, ["x"], ["y"], domain=BLOCKED, **values)

        steps = node("ReorderInput"), node(kind, **attributes), node("ReorderOutput", channels=p.ic)
        before, pool, after = (_alone(model, step) for step in steps)
        yield _between(before, pool, after, src, p.dst_shape, threads)


def network(path: str, x: np.ndarray, threads: int) -> Iterator[Variant]:
    """A whole network, as its optimiser rewrites it for this machine."""
    session = _session(Path(path).read_bytes(), threads)
    binding = session.io_binding()
    binding.bind_ortvalue_input(session.get_inputs()[0].name, ort.OrtValue.ortvalue_from_numpy(x))
    for output in session.get_outputs():
        binding.bind_output(output.name, "cpu")

    def fetch() -> np.ndarray:
        session.run_with_iobinding(binding)
        return np.concatenate([output.ravel() for output in binding.copy_outputs_to_cpu()])

    yield Variant("onnxruntime", lambda: session.run_with_iobinding(binding), fetch)


def plain_network(path: str, *given: np.ndarray) -> np.ndarray:
    """All outputs of a network, one after the other, without any rewriting of its graph."""
    session = _session(Path(path).read_bytes(), 0, optimise=False)
    inputs = {its.name: x for its, x in zip(session.get_inputs(), given, strict=True)}
    return np.concatenate([output.ravel() for output in session.run(None, inputs)])


def _plain(model: onnx.ModelProto, src: np.ndarray, out_shape: tuple[int, ...], threads: int) -> Variant:
    run, out = _bound(model, src, out_shape, threads)
    return Variant("onnxruntime NCHW", run, lambda: _spoil(out, run).copy())


def _model(problem: Conv2dProblem, ends: tuple[int, int], wei: np.ndarray, bias: np.ndarray | None) -> onnx.ModelProto:
    weights = {"w": wei} if bias is None else {"w": wei, "b": bias}
    p = problem
    node = helper.make_node(
        "Conv", ["x", *weights], ["y"], kernel_shape=[p.kh, p.kw], strides=[p.sh, p.sw],
        dilations=[p.dh, p.dw], group=p.g, pads=[p.ph, p.pw, *ends],
    )  # fmt: skip
    return _single(node, p.src_shape, p.dst_shape, weights)


def _single(
    node: onnx.NodeProto, src: tuple[int, ...], dst: tuple[int, ...], weights: dict[str, np.ndarray]
) -> onnx.ModelProto:
    constants = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    graph = helper.make_graph([node], "layer", [_value("x", src)], [_value("y", dst)], constants)
    domains = [helper.make_opsetid("", 17), helper.make_opsetid(BLOCKED, 1)]
    return helper.make_model(graph, opset_imports=domains, ir_version=9)


def _value(name: str, shape: tuple[int, ...] | None, dtype: int = TensorProto.FLOAT) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, dtype, shape)


def _session(
    model: onnx.ModelProto | bytes, threads: int, *, optimise: bool = True, save: str = ""
) -> ort.InferenceSession:
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    levels = ort.GraphOptimizationLevel
    options.graph_optimization_level = levels.ORT_ENABLE_ALL if optimise else levels.ORT_DISABLE_ALL
    # Its threads spin while it works, but not on into a rival's turn.
    options.add_session_config_entry("session.force_spinning_stop", "1")
    if save:
        options.optimized_model_filepath = save
    content = model if isinstance(model, bytes) else model.SerializeToString()
    return ort.InferenceSession(content, options, providers=["CPUExecutionProvider"])


def _bound(
    model: onnx.ModelProto, x: np.ndarray, out_shape: tuple[int, ...], threads: int, *, optimise: bool = True
) -> tuple[Callable[[], object], np.ndarray]:
    """A call with input and output bound, and its output."""
    session = _session(model, threads, optimise=optimise)
    out = np.empty(out_shape, x.dtype)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(x))
    # The array has to outlive the binding, which only has its address; `run` keeps both.
    binding.bind_output("y", "cpu", 0, x.dtype, out_shape, out.ctypes.data)
    return functools.partial(_run, session, binding, out), out


def _run(session: ort.InferenceSession, binding: ort.IOBinding, out: np.ndarray) -> None:
    session.run_with_iobinding(binding)


def _spoil(out: np.ndarray, run: Callable[[], object]) -> np.ndarray:
    spoil(out)
    run()
    return out


def _optimise(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as ONNX Runtime rewrites it for this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "optimised.onnx")
        _session(model, 1, save=path)
        return onnx.load(path)


def _blocked(problem: Conv2dProblem, optimised: onnx.ModelProto, src: np.ndarray, threads: int) -> Variant:
    """The blocked node between its reorders, which are no part of its time."""
    nodes = {node.op_type: _alone(optimised, node) for node in optimised.graph.node}
    weights = next(node.input[1] for node in optimised.graph.node if node.op_type == "Conv")
    out_channels = next(array.dims[0] for array in optimised.graph.initializer if array.name == weights)
    n, _, oh, ow = problem.dst_shape
    reorder_in = nodes.get("ReorderInput")  # a first layer reads plain NCHW
    return _between(reorder_in, nodes["Conv"], nodes["ReorderOutput"], src, (n, out_channels, oh, ow), threads)


def _between(
    before: onnx.ModelProto | None,
    model: onnx.ModelProto,
    after: onnx.ModelProto,
    src: np.ndarray,
    out_shape: tuple[int, ...],
    threads: int,
    layout: str = "NCHWc",
) -> Variant:
    """A node in ONNX Runtime's own layout, with the nodes that change to it and back."""
    x, reorder_in = src, None
    if before is not None:
        x = _session(before, 1, optimise=False).run(None, {"x": src})[0]
        reorder_in, _ = _bound(before, src, x.shape, threads, optimise=False)
    run, out = _bound(model, x, out_shape, threads, optimise=False)
    unblock = _session(after, threads, optimise=False)
    return Variant(
        f"onnxruntime {layout}",
        run,
        lambda: unblock.run(None, {"x": _spoil(out, run)})[0],
        reorder_in=reorder_in,
        reorder_out=lambda: unblock.run(None, {"x": out}),
    )


def _alone(model: onnx.ModelProto, node: onnx.NodeProto, dtype: int = TensorProto.FLOAT) -> onnx.ModelProto:
    """A model of one of the nodes, from "x" to "y"."""
    single = onnx.NodeProto()
    single.CopyFrom(node)
    single.input[0], single.output[0] = "x", "y"
    weights = [array for array in model.graph.initializer if array.name in node.input]
    graph = helper.make_graph([single], "node", [_value("x", None, dtype)], [_value("y", None, dtype)], weights)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
