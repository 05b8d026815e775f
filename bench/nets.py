"""`python -m bench nets`: whole networks, ours planned in several ways beside the engines that read ONNX.

A *choice* is a way to choose the layouts of a network. It is one of CHOICES, or the name of a layout
(for every op that can run in it), or a JSON file of {op: layout}. It may be `costs=FILE`, with a
cost table of one's own (as `compile` takes it), or `module:function`, a planner of one's own. The
planner is called with the network as it will run. It returns {node: layout}, like the `planner` of
`blockconv.compile`. Or it returns a plan, or any function that takes the input and gives the outputs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx

import blockconv as bc
from blockconv.core import text
from blockconv.core.problem import Conv2dProblem

from . import networks, roof
from .measure import measure, noise
from .report import Column, speedup_text
from .results import Case, Entry, seconds
from .run import Plan, conditions
from .workers import Crew

__all__ = ["CHOICES", "COLUMNS", "check_names", "plans"]

CHOICES = {
    "auto": "optimal over modelled costs",
    "measured": "optimal over measured costs",
    "greedy": "op by op over modelled costs",
}
# Shares of the largest output. float32: Winograd kernels and the order of long sums. int8: steps of a 255th at every
# layer, beside the float network; a wrong kernel gives noise, whose error is more than 1. 16-bit types: each value is
# rounded to 8 or 11 bits.
TOLERANCE = {
    "float32": 1e-4,
    **dict.fromkeys(("int8", "int8-reduced", "int8-s8s8", "int8-u8u8"), 0.3),
    "bfloat16": 0.05,
    "float16": 0.01,
}


def _reorders(case: Case, entry: Entry) -> str:
    return str(entry["about"]["reorders"]) if "about" in entry else ""


COLUMNS = (
    Column("reorders", _reorders),
    Column("images/s", lambda case, entry: f"{case['images'] / seconds(entry):.1f}"),
    Column("memory", lambda case, entry: text.megabytes(entry["memory"]) if "memory" in entry else ""),
    Column("GFLOP/s", lambda case, entry: f"{case['flops'] / seconds(entry) / 1e9:.0f}"),
    Column("times best peer", speedup_text),
)


def plans(
    names: Sequence[str],
    batches: Sequence[int],
    threads: Sequence[int],
    choices: Sequence[str],
    crew: Crew,
    timing: dict[str, Any],
    *,
    suite: str = "nets",
    dtypes: Sequence[str] = ("float32",),
) -> list[Plan]:
    """A case for each network, number of images and of threads, and type.

    names: of `networks.NETWORKS`, or ONNX files; FILE=1x3x224x224 for a model with open sizes.
    dtypes: of `TOLERANCE`; int8 is the network as ONNX Runtime's tool quantizes it (`quantized.KINDS`). bfloat16 and
    float16 are the float network, stored so by each engine. Errors are relative to the float network.

    Raises ValueError for a name that is neither, before anything is measured.
    """
    check_names(names, suite)
    return [
        _plan(name, batch, count, choices, crew, timing, suite, dtype)
        for dtype in dtypes
        for count in threads
        for name in names
        for batch in batches
    ]


def check_names(names: Sequence[str], suite: str) -> None:
    """Raise ValueError for a name that is neither of `networks.NETWORKS` nor an ONNX file."""
    for name in names:
        if name not in networks.NETWORKS and not Path(_split(name)[0]).is_file():
            known = ", ".join(networks.NETWORKS)
            raise ValueError(f"{suite}: networks={name!r}: is no file; give an ONNX file, or one of {known}")


def _plan(
    name: str,
    batch: int,
    threads: int,
    choices: Sequence[str],
    crew: Crew,
    timing: dict[str, Any],
    suite: str,
    dtype: str,
) -> Plan:
    def measure_it() -> Case:
        with tempfile.TemporaryDirectory() as folder:
            path = _file(name, batch, folder)
            net = _loaded(name, path)
            x = noise(net.inputs[0].shape, "float32")
            expected = _expected(net, path, x)
            if dtype.startswith("int8"):
                from .quantized import quantized  # which needs onnxruntime

                path = quantized(path, folder, dtype)
            ours = [choices, suite == "lab"]
            if dtype in ("bfloat16", "float16"):
                variants = crew.contenders("halves_network", path, x, dtype, ours=ours, threads=threads)
            else:
                variants = crew.contenders("network", path, x, ours=ours, threads=threads)
            measured = measure(variants, expected, TOLERANCE[dtype], **timing)
        problems = [net.problem(node) for node in net.nodes if node.op == "conv2d"]
        flops = sum(p.flops for p in problems if isinstance(p, Conv2dProblem))
        return {"images": x.shape[0], "flops": flops, "peak": roof.fp32_peak(threads), **measured}

    params, how = conditions(threads, timing, dtype)
    params = {"network": name, "batch": batch, **params}
    return Plan(suite, f"{Path(_split(name)[0]).stem}, {batch} images, {how}", params, measure_it, crew.wanted(choices))


def _split(name: str) -> tuple[str, tuple[int, ...]]:
    """FILE=1x3x224x224 as its file and sizes; any other name as itself, without sizes."""
    file, equals, sizes = name.rpartition("=")
    if not equals or Path(name).is_file():
        return name, ()
    try:
        return file, tuple(int(size) for size in sizes.split("x"))
    except ValueError:
        raise ValueError(f"networks={name!r}: give sizes after the file's =, such as 1x3x224x224") from None


def _file(name: str, batch: int, folder: str) -> str:
    """The path of a network whose input has a fixed shape, which every engine then reads."""
    file, shape = _split(name)
    if not shape and name not in networks.NETWORKS:
        return file
    path = str(Path(folder, "model.onnx"))
    onnx.save(_resized(onnx.load(file), shape) if shape else networks.build(name, batch), path)
    return path


def _resized(model: onnx.ModelProto, shape: tuple[int, ...]) -> onnx.ModelProto:
    """The model with an input of this shape; the engines infer the other shapes."""
    constants = {tensor.name for tensor in model.graph.initializer}
    value = next(value for value in model.graph.input if value.name not in constants)
    value.CopyFrom(onnx.helper.make_tensor_value_info(value.name, value.type.tensor_type.elem_type, shape))
    for inferred in (*model.graph.output, *model.graph.value_info):
        inferred.type.tensor_type.ClearField("shape")
    return model


def _loaded(name: str, path: str) -> bc.Network:
    try:
        return bc.load_onnx(path)
    except bc.ArgumentError as error:
        if error.argument != "input_shapes":
            raise
        raise ValueError(f"networks={name!r}: {error.rule}; give {name}=1x3x224x224, or other sizes") from None


def _expected(net: bc.Network, path: str, *given: np.ndarray) -> np.ndarray:
    """All outputs, one after the other: by ONNX Runtime with nothing rewritten, else by our own evaluation by NumPy."""
    try:
        from .peers import onnxruntime_peer
    except ImportError:
        found = net.evaluate({tensor.name: x for tensor, x in zip(net.inputs, given, strict=True)})
        return np.concatenate([np.asarray(found[name]).ravel() for name in net.outputs])
    return onnxruntime_peer.plain_network(path, *given)
