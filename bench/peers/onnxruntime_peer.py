"""ONNX Runtime: a model of one node, with input and output bound once.

`NCHW` is what a model of one layer gets: ONNX Runtime's own blocked layout inside, with its reorders
around it. `NCHWc` is the optimised node alone, from blocked to blocked, as it runs amid a network.
"""

from __future__ import annotations

import functools
import math
import tempfile
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import onnxruntime as ort
from onnx import TensorProto, helper, numpy_helper

from blockconv.problem import Conv2dProblem

from . import Variant, end_padding

BLOCKED = "com.microsoft.nchwc"


def version() -> str:
    return str(ort.__version__)


def conv2d(
    problem: Conv2dProblem, src: np.ndarray, wei: np.ndarray, bias: np.ndarray | None, threads: int
) -> list[Variant]:
    ends = end_padding(problem)
    if ends is None:
        return []
    model = _model(problem, ends, wei, bias)
    run, out = _bound(model, src, problem.dst_shape, threads)
    variants = [Variant("onnxruntime NCHW", run, lambda: _spoil(out, run).copy())]
    optimised = _optimise(model)
    if any(node.domain == BLOCKED for node in optimised.graph.node):
        variants.append(_blocked(problem, optimised, src, threads))
    return variants


def _model(problem: Conv2dProblem, ends: tuple[int, int], wei: np.ndarray, bias: np.ndarray | None) -> onnx.ModelProto:
    weights = {"w": wei} if bias is None else {"w": wei, "b": bias}
    p = problem
    node = helper.make_node(
        "Conv", ["x", *weights], ["y"], kernel_shape=[p.kh, p.kw], strides=[p.sh, p.sw],
        dilations=[p.dh, p.dw], group=p.g, pads=[p.ph, p.pw, *ends],
    )  # fmt: skip
    graph = helper.make_graph(
        [node], "layer", [_value("x", p.src_shape)], [_value("y", p.dst_shape)],
        [numpy_helper.from_array(array, name) for name, array in weights.items()],
    )  # fmt: skip
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=9)


def _value(name: str, shape: tuple[int, ...] | None) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def _session(model: onnx.ModelProto, threads: int, *, optimise: bool = True, save: str = "") -> ort.InferenceSession:
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
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _bound(
    model: onnx.ModelProto, x: np.ndarray, out_shape: tuple[int, ...], threads: int, *, optimise: bool = True
) -> tuple[Callable[[], object], np.ndarray]:
    """A call with input and output bound, and its output."""
    session = _session(model, threads, optimise=optimise)
    out = np.empty(out_shape, np.float32)
    binding = session.io_binding()
    binding.bind_ortvalue_input("x", ort.OrtValue.ortvalue_from_numpy(x))
    # The array has to outlive the binding, which only has its address; `run` keeps both.
    binding.bind_output("y", "cpu", 0, np.float32, out_shape, out.ctypes.data)
    return functools.partial(_run, session, binding, out), out


def _run(session: ort.InferenceSession, binding: ort.IOBinding, out: np.ndarray) -> None:
    session.run_with_iobinding(binding)


def _spoil(out: np.ndarray, run: Callable[[], object]) -> np.ndarray:
    out.fill(math.nan)
    run()
    return out


def _optimise(model: onnx.ModelProto) -> onnx.ModelProto:
    """The model as ONNX Runtime rewrites it for this machine."""
    with tempfile.TemporaryDirectory() as folder:
        path = str(Path(folder) / "optimised.onnx")
        _session(model, 1, save=path)
        return onnx.load(path)


def _blocked(problem: Conv2dProblem, optimised: onnx.ModelProto, src: np.ndarray, threads: int) -> Variant:
    """The blocked node between its reorders, which are run before and after the timing."""
    nodes = {node.op_type: node for node in optimised.graph.node}
    conv = nodes["Conv"]
    if "ReorderInput" in nodes:  # a first layer reads plain NCHW
        alone = _alone(optimised, nodes["ReorderInput"])
        src = _session(alone, 1, optimise=False).run(None, {"x": src})[0]
    out_channels = next(array.dims[0] for array in optimised.graph.initializer if array.name == conv.input[1])
    n, _, oh, ow = problem.dst_shape
    run, out = _bound(_alone(optimised, conv), src, (n, out_channels, oh, ow), threads, optimise=False)
    unblock = _session(_alone(optimised, nodes["ReorderOutput"]), 1, optimise=False)
    return Variant("onnxruntime NCHWc", run, lambda: unblock.run(None, {"x": _spoil(out, run)})[0])


def _alone(model: onnx.ModelProto, node: onnx.NodeProto) -> onnx.ModelProto:
    """A model of one of the nodes, from "x" to "y"."""
    single = onnx.NodeProto()
    single.CopyFrom(node)
    single.input[0], single.output[0] = "x", "y"
    weights = [array for array in model.graph.initializer if array.name in node.input]
    graph = helper.make_graph([single], "node", [_value("x", None)], [_value("y", None)], weights)
    return helper.make_model(graph, opset_imports=model.opset_import, ir_version=model.ir_version)
