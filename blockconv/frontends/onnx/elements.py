"""Translators of ONNX's ops on booleans, integers and indices that flow. See `ops`."""

from __future__ import annotations

import functools
import math
from typing import Any, get_args

import numpy as np

from blockconv.core.element_problem import PointwiseKind, ScatterKind
from blockconv.core.problem_checks import MOST_DIMENSIONS
from blockconv.core.types import FLOATS, NUMBERS, WHOLE
from blockconv.frontends.onnx.scope import Call, OnnxOp, registered
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.ops.rule import Tensor
from blockconv.network.sampling import Outside, Sampling, sampled

ELEMENT_OPS: dict[str, OnnxOp] = {}
_op = functools.partial(registered, ELEMENT_OPS)
_COUNTED = tuple(name for name in WHOLE if name != "uint64")  # which an int64 holds


def _number(call: Call, index: int = 0, *types: str) -> Tensor:
    """An input of one of these types, or of any numbers and booleans."""
    x = call.input(index)
    if x.type.name not in (types or NUMBERS):
        raise Unsupported(f"of {x.type}")
    if len(x.shape) > MOST_DIMENSIONS:
        raise Unsupported(f"input={x.shape}: {len(x.shape)} dimensions")
    return x


def _like(call: Call, x: Tensor, value: float) -> Tensor:
    """A constant of the type of `x`."""
    return call.constant(np.asarray(value).astype(x.type.dtype), "number")


# ---------------------------------------------------------------- each element by itself


@_op("Where", since=9)
def _where(call: Call) -> Tensor:
    return call.pointwise("where", call.input(), _number(call, 1), _number(call, 2))


@_op("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual", since=7)
def _compared(call: Call) -> Tensor:
    a, b = _number(call), _number(call, 1)
    if call.node.op_type.startswith("Greater"):
        a, b = b, a
    kinds: dict[str, PointwiseKind] = {"Equal": "equal", "Less": "less", "Greater": "less"}
    return call.pointwise(kinds.get(call.node.op_type, "less_equal"), a, b)


@_op("And", "Or", "Xor", "BitwiseAnd", "BitwiseOr", "BitwiseXor", since=7)
def _logic(call: Call) -> Tensor:
    kinds: dict[str, PointwiseKind] = {"And": "and", "Or": "or", "Xor": "xor"}
    kind = kinds[call.node.op_type.removeprefix("Bitwise")]
    return call.pointwise(kind, _number(call, 0, *WHOLE, "bool"), _number(call, 1, *WHOLE, "bool"))


@_op("Not", "BitwiseNot")
def _not(call: Call) -> Tensor:
    x = _number(call, 0, *WHOLE, "bool")
    return call.inverted(x)


@_op("IsNaN")
def _is_nan(call: Call) -> Tensor:
    x = _number(call, 0, *FLOATS)
    return call.inverted(call.pointwise("equal", x, x))


@_op("IsInf")
def _is_inf(call: Call) -> Tensor:
    x = _number(call, 0, *FLOATS)
    signs = [sign for sign, name in ((1, "detect_positive"), (-1, "detect_negative")) if call.attribute(name, 1)]
    found = [call.pointwise("equal", x, _like(call, x, sign * math.inf)) for sign in signs]
    if not found:  # nothing is both above and below a number
        return call.pointwise("less", x, _like(call, x, -math.inf))
    return found[0] if len(found) == 1 else call.pointwise("or", *found)


@_op("Sign")
def _sign(call: Call) -> Tensor:
    """A NaN stays."""
    x = _number(call, 0, *FLOATS, *WHOLE)
    zero, one = _like(call, x, 0), _like(call, x, 1)
    above = call.pointwise("where", call.pointwise("less", zero, x), one, x)
    if x.type.name.startswith("uint"):
        return above
    return call.pointwise("where", call.pointwise("less", x, zero), _like(call, x, -1), above)


@_op("ThresholdedRelu", limits="floats")
def _thresholded(call: Call) -> Tensor:
    x = _number(call, 0, *FLOATS)
    least = _like(call, x, call.attribute("alpha", 1.0))
    return call.pointwise("where", call.pointwise("less", least, x), x, _like(call, x, 0))


@_op("Shrink")
def _shrink(call: Call) -> Tensor:
    """As floats, though the attributes become integers where ONNX defines it by other ops."""
    given = _number(call)
    x = given if given.type.name == "float64" else call.converted(given, "float32")
    size, bias = (call.attribute(name, default) for name, default in (("lambd", 0.5), ("bias", 0.0)))
    y = _like(call, x, 0)
    for ends, side in (((x, _like(call, x, -size)), bias), ((_like(call, x, size), x), -bias)):
        y = call.pointwise("where", call.pointwise("less", *ends), call.binary("add", x, _like(call, x, side)), y)
    return call.converted(y, given.type.name)


@_op("Mod")
def _mod(call: Call) -> Tensor:
    """With `fmod` the remainder has the sign of the dividend. ONNX has floats with `fmod` alone."""
    fmod = call.attribute("fmod", 0)
    if fmod and call.input().type.is_float:
        return call.binary("fmod", call.input(), call.input(1))
    a, b = _number(call, 0, *WHOLE), _number(call, 1, *WHOLE)
    if not fmod:
        return call.pointwise("mod", a, b)
    return call.pointwise("sub", a, call.pointwise("mul", call.pointwise("div", a, b), b))


@_op("Trilu")
def _trilu(call: Call) -> Tensor:
    """Whether an element is kept is a mask of the last two axes: a constant, unless the diagonal flows."""
    x = _number(call)
    if len(x.shape) < 2:
        raise call.error("input", x.shape, "has to have at least 2 dimensions")
    rows, columns = (np.arange(size, dtype=np.int64) for size in x.shape[-2:])
    above = call.constant(columns[None, :] - rows[:, None], "diagonals")
    k = _number(call, 1, "int64") if call.has(1) else call.constant(np.zeros((), np.int64), "diagonal")
    k = call.reshape(k, ())
    ends = (k, above) if call.attribute("upper", 1) else (above, k)
    return call.pointwise("where", call.pointwise("less_equal", *ends), x, _like(call, x, 0))


@_op("OneHot", limits="a constant depth", since=9)
def _one_hot(call: Call) -> Tensor:
    """Indices are compared with all of the depth. Ones of floats are made int64 before, as ONNX has it."""
    indices, depth, values = _number(call), int(call.array(1, "depth").reshape(-1)[0]), _number(call, 2)
    if values.shape != (2,):
        raise call.error("values", values.shape, "have to be two, off and on")
    rank = len(indices.shape)
    axis = call.axis(call.attribute("axis", -1), rank + 1)
    whole = indices if indices.type.name == "int64" else call.emit(ops.Convert("int64"), indices)
    wide = call.reshape(whole, (*indices.shape[:axis], 1, *indices.shape[axis:]))
    negative = call.pointwise("less", wide, _like(call, wide, 0))
    wide = call.pointwise("where", negative, call.pointwise("add", wide, _like(call, wide, depth)), wide)
    places = np.arange(depth, dtype=np.int64).reshape(-1, *(1,) * (rank - axis))
    off, on = (call.reshape(call.emit(ops.Slice(0, k, 1), values), ()) for k in (0, 1))
    return call.pointwise("where", call.pointwise("equal", wide, call.constant(places, "places")), on, off)


# ---------------------------------------------------------------- indices


def _indices(call: Call) -> Tensor:
    return _number(call, 1, "int64", "int32")


@_op("GatherElements")
def _gather_elements(call: Call) -> Tensor:
    x, indices = _number(call), _indices(call)
    return call.emit(ops.GatherAt("elements", call.axis(call.attribute("axis", 0), len(x.shape))), x, indices)


@_op("GatherND")
def _gather_tuples(call: Call) -> Tensor:
    return call.emit(ops.GatherAt("tuples", call.attribute("batch_dims", 0)), _number(call), _indices(call))


@_op("ScatterElements", "Scatter", since=9)
def _scatter_elements(call: Call) -> Tensor:
    axis = call.axis(call.attribute("axis", 0), len(call.input().shape))
    return _scattered(call, ops.ScatterAt("elements", axis, _reduction(call)))


@_op("ScatterND")
def _scatter_tuples(call: Call) -> Tensor:
    return _scattered(call, ops.ScatterAt("tuples", 0, _reduction(call)))


def _reduction(call: Call) -> ScatterKind:
    kind: Any = call.attribute("reduction", "none")
    if kind not in ("none", "add", "mul", "max", "min"):
        raise call.error("reduction", kind, "has to be none, add, mul, max or min")
    return kind  # type: ignore[no-any-return]


def _scattered(call: Call, made: ops.ScatterAt) -> Tensor:
    types = () if made.kind == "none" else (*FLOATS, *_COUNTED)
    return call.emit(made, _number(call, 0, *types), _indices(call), _number(call, 2))


@_op("GridSample", limits="images and volumes of floats; no cubic mode", since=16)
def _grid_sample(call: Call) -> Tensor:
    modes: dict[str, Any] = {"bilinear": "linear", "linear": "linear", "nearest": "nearest"}
    mode, outside = call.attribute("mode", "linear"), call.attribute("padding_mode", "zeros")
    if mode not in modes:
        raise Unsupported(f"mode={mode!r}")
    if outside not in get_args(Outside):
        raise call.error("padding_mode", outside, f"has to be one of {', '.join(get_args(Outside))}")
    how = Sampling(modes[mode], outside, bool(call.attribute("align_corners", 0)))
    return sampled(call, call.input(), call.input(1), how)


# ---------------------------------------------------------------- along an axis


@_op("CumSum", limits="a constant axis")
def _cumulative(call: Call) -> Tensor:
    x = _number(call, 0, *FLOATS, *WHOLE)
    axis = call.axis(int(call.array(1, "axis").reshape(-1)[0]), len(x.shape))
    flags = bool(call.attribute("exclusive", 0)), bool(call.attribute("reverse", 0))
    return call.emit(ops.Scan(axis, "add", *flags), x)


@_op("ArgMax", "ArgMin", limits="a NaN counts as the first")
def _arg(call: Call) -> Tensor:
    x = _number(call, 0, *FLOATS, *_COUNTED)
    axis = call.axis(call.attribute("axis", 0), len(x.shape))
    last = bool(call.attribute("select_last_index", 0))
    y = call.emit(ops.Top(axis, 1, call.node.op_type == "ArgMin", last), x)
    return y if call.attribute("keepdims", 1) else call.reshape(y, (*x.shape[:axis], *x.shape[axis + 1 :]))


@_op("TopK", limits="a constant k; a NaN counts as the first")
def _top(call: Call) -> list[Tensor]:
    """Sorted, whether the node asks for it or not; equal elements in the order of their indices."""
    x = _number(call, 0, *FLOATS, *_COUNTED)
    axis = call.axis(call.attribute("axis", -1), len(x.shape))
    count = int(call.array(1, "k").reshape(-1)[0]) if call.has(1) else call.attribute("k")
    indices = call.emit(ops.Top(axis, count, not call.attribute("largest", 1)), x, helps=True)
    return [call.emit(ops.GatherAt("elements", axis), x, indices), indices]
