"""Judges a model: blockconv beside ONNX Runtime and ONNX's reference evaluator. Two of three decide.

A result that both peers contradict is wrong. Where the peers differ, a result that neither shares is undecided, and a
peer that stands alone is wrong.

Tolerances: results that only move or compare elements, and integers, are exact. Others may differ as much as rounding
makes them: ONNX Runtime runs the model in float32 eight times more, with noise of a few units of the model's type on
each rounded value and on each term of a sum; a result may be four times as far from the peers' as these are from each
other. Integers that
ONNX Runtime's own ops round may differ by 1 in one element of 500. Integers that are resized linearly may all differ by
1, since some round and some truncate.

Not compared, but by shape and type: what follows from an integer that is made of a NaN, or by Cast of an infinity, and
from a maximum of a window that holds a NaN. ONNX leaves both open. ONNX Runtime gives what the processor's instructions
give, so it keeps the NaN of one window and drops that of the next. The reference evaluator pads windows with NaN, so it
drops all. In blockconv a maximum keeps a NaN, and the integer is the lowest of its type, zero in a Cast.
"""

from __future__ import annotations

import copy
import ctypes
import math
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple
from unittest import mock

import ml_dtypes
import numpy as np
from fuzz_graphs import BLOCK, MS, Case
from onnx import TensorProto, defs, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import blockconv as bc
from blockconv.network.passes import fuse

__all__ = ["PEERS", "VERDICTS", "Finding", "judge", "worst"]

Array = np.ndarray[Any, Any]
Outputs = dict[str, Array]
Note = Callable[[str], None]
VERDICTS = ("crash", "wrong", "undecided", "peer wrong", "refused", "right")  # the worst first
NARROW = "onnxruntime in float32"  # a peer for types that it does not have an op for
PEERS = ("onnxruntime", NARROW, "reference", "tolerance")  # phases in which peers run
LAYOUTS = ("NCHW", "NHWC", "NCHW4", "NCHW8", "NCHW16", "CHWN4")


class Finding(NamedTuple):
    """`path`: the way of running the model. `says`: the difference, or an error's text."""

    verdict: str
    path: str = ""
    says: str = ""


def worst(findings: list[Finding]) -> Finding:
    return min(findings, key=lambda one: VERDICTS.index(one.verdict), default=Finding("right"))


# ---------------------------------------------------------------- peers


def onnx_runtime(model: Any, feeds: Outputs) -> Outputs:
    import onnxruntime as ort

    options = ort.SessionOptions()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return dict(zip([one.name for one in session.get_outputs()], session.run(None, feeds), strict=True))


def reference(model: Any, feeds: Outputs) -> Outputs:
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        results = ReferenceEvaluator(model, new_ops=[*_CONTRIBUTED, *_missing(model)]).run(None, feeds)
    return {value.name: np.asarray(x) for value, x in zip(model.graph.output, results, strict=True)}


def _tried(run: Callable[[Any, Outputs], Outputs], model: Any, feeds: Outputs) -> Outputs | str:
    try:
        return run(model, feeds)
    except Exception as error:  # of any kind: the peers are foreign
        return f"{type(error).__name__}: {error}".replace("\n", " ")


def _integers(x: Array, scale: Array, zero: Array | None) -> Array:
    return (x.astype("f4") - (0 if zero is None else zero.astype("f4"))) * scale


def _rounded(y: Array, scale: Array, zero: Array) -> Array:
    ends = np.iinfo(zero.dtype)
    return np.clip(np.rint(y.astype("f4") / scale) + zero.astype("f4"), ends.min, ends.max).astype(zero.dtype)


def _onnx(op: str, *given: Array, **attributes: Any) -> Array:
    names = [f"x{i}" for i in range(len(given))]
    sides = [
        helper.make_tensor_value_info(n, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)
        for n, x in zip(names, given, strict=True)
    ]
    node = helper.make_node(op, names, ["y"], **attributes)
    graph = helper.make_graph([node], "g", sides, [helper.make_empty_tensor_value_info("y")])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20 if op == "Gelu" else 17)], ir_version=9)
    return np.asarray(ReferenceEvaluator(model).run(None, dict(zip(names, given, strict=True)))[0])


def _last(compute: Callable[[Array], Array], x: Array, last: int) -> Array:
    """`compute` wants channels first; `x` may have them last."""
    return np.moveaxis(compute(np.moveaxis(x, -1, 1)), 1, -1) if last else compute(x)


def _qgemm(a: Any, x: Array, s: Array, z: Array, w: Array, t: Array, u: Array, c: Any = None, *end: Array) -> Array:
    y = _integers(x, s, z) @ _integers(w, t, u) + (0 if c is None else c * (s * t))
    return _rounded(y, *end) if end else y.astype("f4")


def _dynamic_matmul(a: Any, x: Array, w: Array, t: Array, u: Any = None, b: Any = None) -> Array:
    low, high = min(0, x.min(initial=0)), max(0, x.max(initial=0))
    scale = np.float32((high - low) / 255) or np.float32(1)
    zero = np.clip(np.rint(-low / scale), 0, 255).astype("u1")
    y = _integers(_rounded(x, scale, zero), scale, zero) @ _integers(w, t, u)
    return (y + (0 if b is None else b)).astype("f4")


def _matmul_of_bits(a: Any, x: Array, w: Array, s: Array, z: Array | None = None) -> Array:
    def each(packed: Array) -> Array:
        rows = packed.reshape(a.N, -1)
        return rows if a.bits == 8 else np.dstack([rows % 16, rows // 16]).reshape(a.N, -1)

    blocks = -(-a.K // a.block_size)
    zero = np.full((a.N, blocks), 2 ** (a.bits - 1), "f4") if z is None else each(z)[:, :blocks].astype("f4")
    size = a.block_size
    whole = (each(w).astype("f4") - np.repeat(zero, size, 1)) * np.repeat(s.reshape(a.N, blocks), size, 1)
    return (x @ whole[:, : a.K].T).astype("f4")


def _softmax(a: Any, x: Array, *end: Array) -> Array:
    axis = getattr(a, "axis", -1)
    if getattr(a, "opset", 13) < 13:
        flat = x.reshape(int(np.prod(x.shape[: axis % x.ndim])), -1)
        return _rounded(_onnx("Softmax", _integers(flat, *end[:2]), axis=1), *end[2:]).reshape(x.shape)
    return _rounded(_onnx("Softmax", _integers(x, *end[:2]), axis=axis), *end[2:])


def _max_pool(a: Any, x: Array) -> Array:
    return _last(lambda y: _onnx("MaxPool", y, **_window(a)), x, 1)


def _average(a: Any, x: Array, *end: Array) -> Array:
    """With count_include_pad, ONNX Runtime divides by all taps, also those beyond the padding."""
    given = _window(a)

    def one(y: Array) -> Array:
        rank, ends = y.ndim - 2, [(0, 0), (0, 0)]
        pads, strides = given.get("pads", [0] * 2 * rank), given.get("strides", [1] * rank)
        for size, kernel, stride, before, after in zip(
            y.shape[2:], given["kernel_shape"], strides, pads[:rank], pads[rank:], strict=True
        ):
            steps = max(0, size + before + after - kernel) / stride
            steps = math.ceil(steps) if given.get("ceil_mode") else math.floor(steps)
            last = min(steps * stride, (size + before - 1) // stride * stride)  # no window begins after the input
            ends.append((before, max(after, last + kernel - size - before)))
        shares = [
            _onnx("AveragePool", np.pad(z, ends), kernel_shape=given["kernel_shape"], strides=strides)
            for z in (y, np.ones_like(y))
        ]
        return shares[0] if given.get("count_include_pad") else shares[0] / shares[1]

    return _rounded(_last(one, _integers(x, *end[:2]), getattr(a, "channels_last", 0)), *end[2:])


def _window(a: Any) -> dict[str, Any]:
    names = ("kernel_shape", "strides", "pads", "dilations", "ceil_mode", "count_include_pad")
    return {name: getattr(a, name) for name in names if getattr(a, name, None) is not None}


def _global(a: Any, x: Array, *end: Array) -> Array:
    axes = (1, 2) if getattr(a, "channels_last", 0) else (2, 3)
    return _rounded(_integers(x, *end[:2]).mean(axes, keepdims=True), *end[2:])


def _concat(a: Any, s: Array, z: Array, *parts: Array) -> Array:
    whole = [_integers(*parts[i : i + 3]) for i in range(0, len(parts), 3)]
    return _rounded(np.concatenate(whole, a.axis), s, z)


def _activated(a: Any, y: Array) -> Array:
    return np.maximum(y, 0) if a.activation == "Relu" else np.tanh(y)


def _turned(a: Any, x: Array, side: str) -> Array:
    x = np.moveaxis(x, 0, -2) if getattr(a, f"transBatch{side}", 0) else x
    return x.swapaxes(-1, -2) if getattr(a, f"trans{side}", 0) else x


def _attended(a: Any, parts: Iterable[Array], mask: Array | None, added: Array | None) -> Array:
    q, k, v = (x.reshape(*x.shape[:2], a.num_heads, -1).transpose(0, 2, 1, 3).astype("f8") for x in parts)
    scores = q @ k.swapaxes(-1, -2) * getattr(a, "scale", q.shape[-1] ** -0.5)
    scores = scores + np.where(mask > 0, 0, a.mask_filter_value)[:, None, None] if mask is not None else scores
    scores = scores + (0 if added is None else added)
    if getattr(a, "unidirectional", 0):
        scores = np.where(np.tri(*scores.shape[-2:], dtype=bool), scores, -np.inf)
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    y = shares / shares.sum(-1, keepdims=True) @ v
    return y.transpose(0, 2, 1, 3).reshape(len(y), y.shape[2], -1).astype("f4")


_MEANINGS: dict[str, Callable[..., Array]] = {
    "QuantizeLinear": lambda a, x, s, z: _rounded(x, s, z),
    "DequantizeLinear": lambda a, x, s, z=None: _integers(x, s, z).astype("f4"),
    "QLinearAdd": lambda a, x, s, z, y, t, u, *end: _rounded(_integers(x, s, z) + _integers(y, t, u), *end),
    "QLinearMul": lambda a, x, s, z, y, t, u, *end: _rounded(_integers(x, s, z) * _integers(y, t, u), *end),
    "QLinearSigmoid": lambda a, x, s, z, *end: _rounded(1 / (1 + np.exp(-_integers(x, s, z))), *end),
    "QLinearLeakyRelu": lambda a, x, s, z, *end: _rounded(_onnx("LeakyRelu", _integers(x, s, z), alpha=a.alpha), *end),
    "QLinearSoftmax": _softmax,
    "QLinearConcat": _concat,
    "QLinearAveragePool": _average,
    "QLinearGlobalAveragePool": _global,
    "NhwcMaxPool": _max_pool,
    "QGemm": _qgemm,
    "DynamicQuantizeMatMul": _dynamic_matmul,
    "FusedMatMul": lambda a, x, y: getattr(a, "alpha", 1) * (_turned(a, x, "A") @ _turned(a, y, "B")),
    "Gelu": lambda a, x: _onnx("Gelu", x),
    "BiasGelu": lambda a, x, y: _onnx("Gelu", x + y),
    "FastGelu": lambda a, x, y=0: _onnx("Gelu", x + np.float32(y), approximate="tanh"),
    "QuickGelu": lambda a, x: x / (1 + np.exp(-(a.alpha or 1.702) * x)),
    "FusedConv": lambda a, x, w, b=None, z=0: _activated(
        a, _onnx("Conv", x, w, b, **_window(a), group=a.group or 1) + z
    ),
    "FusedGemm": lambda a, x, w, b: _activated(a, x @ (w.T if a.transB else w) + b),
    "SkipLayerNormalization": lambda a, x, y, w, b, c: _onnx("LayerNormalization", x + y + c, w, b, epsilon=a.epsilon),
    "Attention": lambda a, x, w, b, mask=None, past=None, added=None: _attended(
        a, np.split(x @ w + b, 3, -1), mask, added
    ),
    "MultiHeadAttention": lambda a, q, k, v, b=None, mask=None, added=None: _attended(
        a, map(np.add, (q, k, v), np.split(b, 3) if b is not None else (0,) * 3), mask, added
    ),
    "SkipSimplifiedLayerNormalization": lambda a, x, y, w, c: _rms(x + y + c, w, a.epsilon),
    "MatMulNBits": _matmul_of_bits,
    "MatMulIntegerToFloat": lambda a, x, w, s, t, z=None, u=None, b=None: (
        _integers(x, s, z) @ _integers(w, t, u) + (0 if b is None else b)
    ).astype("f4"),
    "ConvTransposeWithDynamicPads": lambda a, x, w, p, b: _onnx("ConvTranspose", x, w, b, pads=p.tolist()),
    "QLinearConv": lambda a, *given: _onnx("QLinearConv", *given, **_window(a), group=getattr(a, "group", 1)),
}


def _op_run(name: str, domain: str, mean: Callable[..., Array]) -> Any:
    """Makes an op for the reference evaluator from a NumPy function."""
    run = lambda self, *given, **more: (np.asarray(mean(self, *given)),)  # noqa: E731
    return type(name, (OpRun,), {"op_domain": domain, "_run": run})


def _rms(x: Array, scale: Array, epsilon: float) -> Array:
    wide = x.astype("f8")
    return (wide / np.sqrt((wide * wide).mean(-1, keepdims=True) + epsilon) * scale).astype("f4")


def _filled(a: Any, x: Array) -> Array:
    """Whole blocks of channels, channels first."""
    x = np.moveaxis(x, -1, 1) if a.channels_last else x
    return np.pad(x, ((0, 0), (0, -x.shape[1] % BLOCK), (0, 0), (0, 0)))


def _unfilled(a: Any, x: Array) -> Array:
    return np.moveaxis(x[:, : a.channels], 1, -1) if a.channels_last else x[:, : a.channels]


def _blocked_conv(a: Any, x: Array, w: Array, b: Array | None = None) -> Array:
    """Weights lie as (O, I, H, W, i, o) of blocks, or as (O, H, W, o) where there is one input channel."""
    o, i, k, _ = w.shape
    if i == 1:
        w = np.moveaxis(w.reshape(o // BLOCK, i, k, k, BLOCK), -1, 1)
    else:
        w = np.einsum("OIhwio->OoIihw", w.reshape(o // BLOCK, i // BLOCK, k, k, BLOCK, BLOCK))
    given = [x, w.reshape(o, i, k, k), *([] if b is None else [b])]
    y = _onnx("Conv", *given, pads=a.pads, group=a.group)
    return _activated(a, y) if getattr(a, "activation", None) else y


def _upsampled(a: Any, x: Array) -> Array:
    mode = getattr(a, "mode", None) or "nearest"
    how = getattr(a, "coordinate_transformation_mode", None) or "asymmetric"
    more = {"coordinate_transformation_mode": how, "nearest_mode": "floor", "mode": mode}
    return _onnx("Resize", x, np.zeros(0, "f4"), np.array(a.scales, "f4"), **more)


_IN_BLOCKS: dict[str, Callable[..., Array]] = {
    "ReorderInput": _filled,
    "ReorderOutput": _unfilled,
    "Conv": _blocked_conv,
    "Upsample": _upsampled,
    "MaxPool": lambda a, x: _onnx("MaxPool", x, **_window(a)),
    "AveragePool": lambda a, x: _onnx("AveragePool", x, **_window(a)),
    "GlobalMaxPool": lambda a, x: x.max((2, 3), keepdims=True),
    "GlobalAveragePool": lambda a, x: x.mean((2, 3), keepdims=True),
}
_CONTRIBUTED = [
    *(_op_run(name, MS, mean) for name, mean in _MEANINGS.items()),
    *(_op_run(name, f"{MS}.nchwc", mean) for name, mean in _IN_BLOCKS.items()),
    _op_run("SimplifiedLayerNormalization", "", lambda a, x, w: _rms(x, w, 1e-5)),
]


def _missing(model: Any) -> list[Any]:
    """The ops that the reference evaluator lacks, or gets wrong, in the model's opset."""
    opset = next(one.version for one in model.opset_import if one.domain == "")
    return [_op_run(name, "", mean) for name, (until, mean) in _OLD.items() if opset < until]


def _dequantized(a: Any, x: Array, scale: Array, zero: Array | None = None) -> Array:
    along = (-1, *(1,) * (x.ndim - 1 - getattr(a, "axis", 1) % max(1, x.ndim))) if np.ndim(scale) else ()
    return _integers(x, scale.reshape(along), None if zero is None else zero.reshape(along)).astype("f4")


def _resized(a: Any, x: Array, scales: Array | None = None) -> Array:
    mode = getattr(a, "mode", "nearest")
    given = np.array(a.scales if scales is None else scales, "f4")
    more = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor", "mode": mode}
    return _onnx("Resize", x, np.zeros(0, "f4"), given, **more)


def _flat_softmax(a: Any, x: Array, log: bool = False) -> Array:
    # The evaluator's own default is that of the newest opset.
    axis = next((one.i for one in a.onnx_node.attribute if one.name == "axis"), 1) % max(1, x.ndim)
    flat = x.reshape(int(np.prod(x.shape[:axis])), -1).astype("f8")
    rest = flat - flat.max(1, keepdims=True)
    total = np.exp(rest).sum(1, keepdims=True)
    return (rest - np.log(total) if log else np.exp(rest) / total).reshape(x.shape).astype(x.dtype)


def _normalized(a: Any, x: Array, *parameters: Array) -> Array:
    scale, bias, mean, var = (p.astype("f8").reshape(-1, *(1,) * (x.ndim - 2)) for p in parameters)
    epsilon = np.float32(getattr(a, "epsilon", 1e-5)).astype("f8")
    return ((x.astype("f8") - mean) / np.sqrt(var + epsilon) * scale + bias).astype(x.dtype)


_OLD: dict[str, tuple[int, Callable[..., Array]]] = {  # before which opset, and its meaning
    "DequantizeLinear": (19, _dequantized),
    "BatchNormalization": (14, _normalized),
    "Softmax": (13, _flat_softmax),
    "LogSoftmax": (13, lambda a, x: _flat_softmax(a, x, log=True)),
    "Resize": (11, _resized),
    "Upsample": (11, _resized),
}


# ---------------------------------------------------------------- how far rounding goes

NOISES = 8
_OTHERS = {TensorProto.DOUBLE, TensorProto.FLOAT16, TensorProto.BFLOAT16}
_EXACT = {
    *("Identity", "Relu", "Max", "Min", "Clip", "MaxPool", "GlobalMaxPool", "NhwcMaxPool", "Concat", "Pad", "Slice"),
    *("Where", "GatherElements", "GatherND", "ScatterND", "Trilu", "Sign", "Gather", "Expand", "Tile", "OneHot"),
    *("Split", "Reshape", "Transpose", "Flatten", "Squeeze", "Unsqueeze", "Dropout", "Constant", "Shape", "Size"),
}
_SUMS = {
    *(
        "MatMul",
        "FusedMatMul",
        "MatMulNBits",
        "FusedConv",
        "FusedGemm",
        "MultiHeadAttention",
        "SkipLayerNormalization",
        "SkipSimplifiedLayerNormalization",
        "SimplifiedLayerNormalization",
        "Gemm",
        "Einsum",
        "Conv",
        "ConvTranspose",
        "Sum",
        "Mean",
        "AveragePool",
        "GlobalAveragePool",
        "LpPool",
    ),
    *("ReduceSum", "ReduceMean", "ReduceL1", "ReduceL2", "ReduceSumSquare", "ReduceLogSum", "GlobalLpPool", "CumSum"),
    *("LayerNormalization", "GroupNormalization", "InstanceNormalization", "RMSNormalization", "LpNormalization"),
}
_UNITS = {"float16": 2.0**-10, "bfloat16": 2.0**-7, "float64": 2.0**-46}
_LEAST = 2.0**-21  # of noise in float32


def in_float32(model: Any) -> Any:
    """The model with all floats float32."""
    made = copy.deepcopy(model)
    for value in (*made.graph.input, *made.graph.output):
        if value.type.tensor_type.elem_type in _OTHERS:
            value.type.tensor_type.elem_type = TensorProto.FLOAT
    tensors = [*made.graph.initializer]
    for node in made.graph.node:
        for attribute in node.attribute:
            if node.op_type == "Cast" and attribute.i in _OTHERS:
                attribute.i = TensorProto.FLOAT
            tensors += [attribute.t] if attribute.HasField("t") else []
    for tensor in tensors:
        if tensor.data_type in _OTHERS:
            tensor.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(tensor).astype("f4"), tensor.name))
    return made


def _narrow(feeds: Outputs) -> Outputs:
    return {name: x.astype("f4") if _is_float(x) else x for name, x in feeds.items()}


def _is_float(x: Array) -> bool:
    return x.dtype.kind == "f" or x.dtype == ml_dtypes.bfloat16


def _is_exact(node: Any) -> bool:
    nearest = all(a.s == b"nearest" for a in node.attribute if a.name == "mode")
    return node.op_type in _EXACT or (node.op_type in ("Resize", "Upsample") and nearest)


def _unit(model: Any, kind: str) -> float:
    """The largest unit in the last place of 1, over the types that values are rounded to."""
    nodes = model.graph.node
    casts = [a.i for node in nodes if node.op_type == "Cast" for a in node.attribute if a.name == "to"]
    wide = {TensorProto.FLOAT: 2.0**-23, TensorProto.FLOAT16: 2.0**-10, TensorProto.BFLOAT16: 2.0**-7}
    numbers = any(a.HasField("f") for node in nodes for a in node.attribute)  # ONNX holds them as float32
    others = (
        kind != "float64"
        or numbers
        # Statistics of such an op are float32, whatever its operands are.
        or any(defs.has(node.op_type) and "stash_type" in defs.get_schema(node.op_type).attributes for node in nodes)
        or any("uantize" in node.op_type or "Q" in node.op_type or node.domain for node in nodes)
    )
    return max([_UNITS.get(kind, 0.0), 2.0**-23 * others, *(wide.get(to, 0.0) for to in casts)])


class Tolerance:
    """The difference that rounding explains, element by element."""

    def __init__(self, model: Any, feeds: Outputs, kind: str, least: float = 0.0) -> None:
        self.unit = max(least, _unit(model, kind))
        self.rounds = least > 0 or any(not _is_exact(node) for node in model.graph.node)
        self.truncates = any(
            node.op_type in ("Resize", "Upsample") and not _is_exact(node) for node in model.graph.node
        )
        self.steps = any(node.op_type.startswith("QLinear") or node.domain == MS for node in model.graph.node)
        self.quantizes = any("Quantize" in node.op_type for node in model.graph.node)
        self.noise: dict[str, Array] = {}
        narrow, fed = in_float32(model), _narrow(feeds)
        values = _tried(onnx_runtime, _every(narrow), fed)
        self.open = set() if isinstance(values, str) else _left_open(narrow, fed | values)
        self.unknown = np.full((), np.inf if self.quantizes else 64 * self.unit)  # where ONNX Runtime does not run it
        if self.rounds and not isinstance(values, str):
            self._measure(narrow, fed, values)

    def _measure(self, model: Any, feeds: Outputs, values: Outputs) -> None:
        unit = max(self.unit, _LEAST)
        runs = [_tried(onnx_runtime, _noisy(model, feeds | values, 2 * unit, seed), feeds) for seed in range(NOISES)]
        for value in model.graph.output:
            if value.name not in values:  # an input or a constant
                self.noise[value.name] = np.zeros(())
                continue
            truth = values[value.name].astype("f8")
            with np.errstate(all="ignore"):
                found = [np.abs(run[value.name].astype("f8") - truth) for run in runs if not isinstance(run, str)]
                most = np.max([np.nan_to_num(f, nan=np.inf) for f in found], axis=0) if found else np.zeros(())
            self.noise[value.name] = np.where(np.isnan(truth) | np.isinf(truth), 0, most) * (self.unit / unit)

    def of(self, name: str, truth: Array) -> Array:
        """The tolerance of an output."""
        if name in self.open:
            return np.full((), np.inf)
        noise = self.noise.get(name, self.unknown) if self.rounds else np.zeros(())
        noise = noise if noise.shape in ((), truth.shape) else self.unknown
        if self.quantizes and noise.size:  # where one element is rounded the other way, its neighbours may be, too
            noise = np.maximum(noise, noise.max())
        if not _is_float(truth):
            return np.ceil(noise) + self.truncates
        wide = np.abs(truth.astype("f8"))
        most = np.max(wide, initial=0, where=np.isfinite(wide))
        return 4 * noise + (8 * self.unit * (wide + most / 4) if self.rounds else 0)


def _left_open(model: Any, values: Outputs) -> set[str]:
    """The values that ONNX leaves open, and those that follow from them. values: of the whole model."""
    found: set[str] = set()
    for node in model.graph.node:
        given = [values[name].astype("f8") for name in node.input if name in values and _is_float(values[name])]
        made = [values[name] for name in node.output if name in values]
        is_cast = node.op_type == "Cast" and not any(map(_is_float, made))
        ends = "Quantize" in node.op_type or node.op_type.endswith("MaxPool")
        if (
            not found.isdisjoint(node.input)
            or (is_cast and not all(np.isfinite(x).all() for x in given))
            or (ends and any(np.isnan(x).any() for x in given))
        ):
            found.update(node.output)
    return found


def _every(model: Any) -> Any:
    """The model with every value as an output."""
    every = copy.deepcopy(model)
    names = [name for node in model.graph.node for name in node.output if name]
    del every.graph.output[:]
    every.graph.output.extend(helper.make_empty_tensor_value_info(name) for name in names)
    return every


def _noisy(model: Any, values: Outputs, unit: float, seed: int) -> Any:
    """The model with noise on what its nodes give, and on the terms of its sums: these may cancel."""
    made, rng = copy.deepcopy(model), np.random.default_rng(seed)
    known = {one.name: numpy_helper.to_array(one) for one in model.graph.initializer} | values
    nodes = list(made.graph.node)
    del made.graph.node[:]

    def add(name: str, size: Array, to: str) -> None:
        noise = (rng.uniform(-unit, unit, size.shape) * np.where(np.isfinite(size), size, 0)).astype("f4")
        made.graph.initializer.append(numpy_helper.from_array(noise, f"{to}.noise"))
        made.graph.node.append(helper.make_node("Add", [name, f"{to}.noise"], [to]))

    for k, node in enumerate(nodes):
        for i, name in enumerate(node.input if node.op_type in _SUMS else ()):
            if name in known and known[name].dtype == np.float32:
                add(name, np.abs(known[name]), f"{k}.{i}.term")
                node.input[i] = f"{k}.{i}.term"
        rounded = [] if _is_exact(node) else [name for name in node.output if name and values[name].dtype == np.float32]
        made.graph.node.append(node)
        made.graph.node[-1].output[:] = [f"{name}.exact" if name in rounded else name for name in node.output]
        for name in rounded:
            size = np.abs(values[name])
            # 1 + erf(x) cancels: results of below zero are rounded as their inputs are.
            others = [known[one] for one in node.input if one in known] if node.op_type.endswith("Gelu") else []
            largest = max(np.max(np.abs(x), initial=0, where=np.isfinite(x)) for x in (size, *others))
            add(f"{name}.exact", size + largest / 4, name)
    return made


def differ(a: Array, b: Array, tolerance: Array, steps: bool = False, typed: bool = True) -> str:
    """Says how `a` differs from `b`; "" if it does not. steps: integers may differ by 1 in one element of 500."""
    if a.shape != b.shape:
        return f"shape {a.shape} for {b.shape}"
    if typed and a.dtype != b.dtype:
        return f"dtype {a.dtype} for {b.dtype}"
    x, y = (v.astype("f8" if _is_float(v) else "O").astype("f8") for v in (a, b))
    with np.errstate(all="ignore"):
        off = np.abs(x - y)
        bad = ~((off <= tolerance) | (x == y) | (np.isnan(x) & np.isnan(y)) | np.isinf(tolerance))
    if not bad.any() or (steps and not _is_float(a) and bad.sum() <= 1 + bad.size / 500 and off.max() <= 1):
        return ""
    at = tuple(int(k) for k in np.argwhere(bad)[0])
    return f"{bad.sum()} of {bad.size} elements, the first at {at}: {a[at]} for {b[at]}"


# ---------------------------------------------------------------- blockconv


def pass_names() -> list[str]:
    return list(dict.fromkeys(map(_name, fuse.PASSES)))


def _name(step: Any) -> str:
    return f"{step.__module__.rpartition('.')[2]}.{step.__name__}"


@contextmanager
def left_out(name: str) -> Iterator[None]:
    """Networks are compiled without this pass."""
    kept = tuple(step for step in fuse.PASSES if _name(step) != name)
    with mock.patch.object(fuse, "PASSES", kept):
        yield


Ours = dict[str, Outputs | Exception]


def blockconv(case: Case, note: Note, seed: int = 0, plans: bool = True) -> list[Ours]:
    """Runs the case in every way: for each size, the outputs or the exception of each path.

    plans: make them too, which takes ten times as long as all else.
    """
    found: list[Ours] = [{} for _ in case.feeds]
    rng = np.random.default_rng([seed, 21])
    note("load")
    try:
        network = bc.load_onnx(case.model, {name: x.shape for name, x in case.feeds[0].items()})
    except Exception as error:
        return [{"load": error}, *({} for _ in case.feeds[1:])]

    def each(path: str, run: Callable[[Outputs], Outputs]) -> None:
        for k, feeds in enumerate(case.feeds):
            note(f"{path}, size {k}")
            try:
                found[k][path] = run(feeds)
            except Exception as error:
                found[k][path] = error

    def sized(feeds: Outputs) -> bc.Network:
        return network.with_input_shapes({name: x.shape for name, x in feeds.items()}) if feeds else network

    def planned(path: str, layouts: Any) -> None:
        note(path)
        try:
            plan = bc.compile(network, layouts=layouts, threads=2)
        except Exception as error:
            found[0][path] = error
            return
        each(path, lambda feeds: _twice(plan, feeds))

    each("evaluate", lambda feeds: dict(sized(feeds).evaluate(feeds)))
    each("evaluate fused", lambda feeds: dict(fuse.fuse(sized(feeds)).evaluate(feeds)))
    for name in pass_names() if plans else []:
        with left_out(name):
            each(f"evaluate without {name}", lambda feeds: dict(fuse.fuse(sized(feeds)).evaluate(feeds)))
    if not plans:
        return found
    planned("plan", "auto")
    layout = str(rng.choice(LAYOUTS))
    planned(f"plan in {layout}", layout)
    name = str(rng.choice(pass_names()))
    with left_out(name):
        planned(f"plan without {name}", "auto")
    return found


def _twice(plan: bc.Plan, feeds: Outputs) -> Outputs:
    """Two calls give the same bits."""
    results = []
    for _ in range(2):
        given = plan(**feeds)
        results.append(dict(given) if isinstance(given, Mapping) else {plan.network.outputs[0]: given})
    for name, first in results[0].items():
        second = results[1][name]
        if first.dtype != second.dtype or first.tobytes() != second.tobytes():
            raise AssertionError(f"a second call gives another {name!r}")
    return results[0]


# ---------------------------------------------------------------- verdicts


def judge(case: Case, note: Note = lambda phase: None, seed: int = 0, plans: bool = True) -> list[Finding]:
    """Gives all that is not right.

    note: called with the name of each phase, so that a crash has one. seed: chooses a layout, and a pass to leave out.
    """
    found: dict[Finding, None] = {}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        peers = [_peers(case, feeds, note) for feeds in case.feeds]
        ours = blockconv(case, note, seed, plans)
        note("heap")
        _check_heap()
        note("tolerance")
        for sized in zip(case.feeds, ours, peers, strict=True):
            found |= dict.fromkeys(_at(case, *sized))
    return list(found)


def _check_heap() -> None:
    """Makes the allocator look at its lists now, so that a broken heap ends this model and not a later one."""
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform == "linux" else None
    if trim is not None:
        trim(0)


def _peers(case: Case, feeds: Outputs, note: Note) -> dict[str, Outputs]:
    """The outputs of each peer that runs the model."""
    note("onnxruntime")
    given = {"onnxruntime": _tried(onnx_runtime, case.model, feeds)}
    note("reference")
    given["reference"] = _tried(reference, case.model, feeds)
    if isinstance(given["onnxruntime"], str) and case.kind in _UNITS:
        note(NARROW)
        given[NARROW] = _tried(onnx_runtime, in_float32(case.model), _narrow(feeds))
    return {name: outputs for name, outputs in given.items() if not isinstance(outputs, str)}


def _at(case: Case, feeds: Outputs, ours: Ours, peers: dict[str, Outputs]) -> Iterator[Finding]:
    """The findings of one size."""
    results = {path: outputs for path, outputs in ours.items() if not isinstance(outputs, Exception)}
    for path, error in ours.items():
        if isinstance(error, Exception):
            yield from _of_error(path, error, peers, _has_empty(case.model, feeds, peers))
    if results:
        tolerance = Tolerance(case.model, feeds, case.kind, 2.0**-23 if NARROW in peers else 0.0)
        for value in case.model.graph.output:
            yield from _of_output(value.name, results, peers, tolerance)


def _has_empty(model: Any, feeds: Outputs, peers: dict[str, Outputs]) -> bool:
    """Whether a value has a size of 0, which networks may refuse."""
    values = _tried(onnx_runtime, _every(in_float32(model)), _narrow(feeds))
    known = [feeds, *peers.values(), {} if isinstance(values, str) else values]
    return any(x.size == 0 for values in known for x in values.values())


def _of_error(path: str, error: Exception, peers: dict[str, Outputs], empty: bool) -> Iterator[Finding]:
    says = f"{type(error).__name__}: {error}"
    if " without " in path:  # later passes may need the one that is left out
        return
    # The peers round the number of windows of a pool towards 0, and find one where none fits.
    odd = empty or "smaller than the dilated kernel" in says
    if isinstance(error, bc.UnsupportedError) or (odd and isinstance(error, bc.BlockconvError)):
        yield Finding("refused", path, says)
    elif not isinstance(error, bc.BlockconvError):
        yield Finding("crash", path, says)
    elif peers:  # a model may be broken if a peer refuses it, or if the peers differ
        yield Finding("wrong" if _agree(*peers.values()) else "refused", path, says)


def _agree(*results: Outputs) -> bool:
    """Whether two peers give about the same."""
    if len(results) < 2 or any(results[0][name].shape != x.shape for name, x in results[1].items()):
        return False
    return all(
        np.allclose(results[0][name].astype("f8"), x.astype("f8"), 1e-2, 1e-2, True) for name, x in results[1].items()
    )


def _of_output(
    name: str, ours: dict[str, Outputs], peers: dict[str, Outputs], tolerance: Tolerance
) -> Iterator[Finding]:
    def far(a: Array, b: Array, typed: bool = True) -> str:
        return differ(a, b, tolerance.of(name, b), tolerance.steps, typed)

    wanted = [outputs[name] for outputs in peers.values()]
    agreed = len(wanted) == 2 and not far(wanted[1], wanted[0], False)
    believed = set()
    for path, outputs in ours.items():
        said = {peer: far(outputs[name], given[name], peer != NARROW) for peer, given in peers.items()}
        if said and all(said.values()):
            says = f"{name}: {'; '.join(f'{text} ({peer})' for peer, text in said.items())}"
            yield Finding("wrong" if agreed else "undecided", path, says)
        elif not agreed:
            believed |= {peer for peer, text in said.items() if not text}
    if not agreed and len(peers) == 2 and len(believed) == 1:
        (other,) = set(peers) - believed
        yield Finding("peer wrong", other, f"{name}: {far(*wanted, False)}")
    first, *others = ours
    for path in [] if agreed else others:
        text = far(ours[path][name], ours[first][name])
        if text:
            yield Finding("wrong", path, f"{name}: {text} ({first})")
