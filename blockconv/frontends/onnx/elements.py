"""Translators of ONNX's ops on booleans, integers and indices that flow. See `ops`."""

import functools
from typing import Any, get_args

import numpy as np

from blockconv.core.checks import axis_shape
from blockconv.core.element_problem import ScatterKind
from blockconv.core.types import COUNTED, FLOATS, WHOLE
from blockconv.frontends.onnx.scope import Call, lowered, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.lowering import reduced_shape
from blockconv.network.ops.rule import Tensor
from blockconv.network.sampling import Outside, Sampling, sampled

# ---------------------------------------------------------------- each element by itself

op("Where", since=9)(lowered(Call.where))
for _name, _kind in {
    "Equal": "equal",
    "Less": "less",
    "LessOrEqual": "less_equal",
    "Greater": "greater",
    "GreaterOrEqual": "greater_equal",
}.items():
    op(_name, since=7)(lowered(_kind))
for _name in ("And", "Or", "Xor"):
    op(_name, f"Bitwise{_name}", since=7)(lowered(_name.lower(), *WHOLE, "bool"))
op("Not", "BitwiseNot")(lowered(Call.inverted, *WHOLE, "bool"))
op("IsNaN")(lowered(Call.is_nan, *FLOATS))
op("Neg", since=6)(lambda call: call.negated(call.x))
op("Reciprocal", since=6)(lambda call: call.power(call.x, -1))
op("Sign")(lowered(functools.partial(Call.sign, keeps_nan=True), *FLOATS, *WHOLE))


@op("IsInf")
def _is_inf(call: Call) -> Tensor:
    signs = [sign for sign, name in ((1, "detect_positive"), (-1, "detect_negative")) if call[name]]
    return call.is_infinite(call.operand(0, *FLOATS), signs)


op("ThresholdedRelu", limits="floats")(lambda call: call.above(call.operand(0, *FLOATS), call["alpha"]))


@op("Shrink")
def _shrink(call: Call) -> Tensor:
    """As floats, though the attributes become integers where ONNX defines it by other ops."""
    given = call.operand()
    x = given if given.type.name == "float64" else call.converted(given, "float32")
    size, bias = (call[name] for name in ("lambd", "bias"))
    y = call.number(0, x)
    for ends, side in (((x, -size), bias), ((size, x), -bias)):
        moved = call.add(x, side)
        y = call.where(call.less(*ends), moved, y)
    return call.converted(y, given.type.name)


@op("Mod")
def _mod(call: Call) -> Tensor:
    """With `fmod` the remainder has the sign of the dividend. ONNX has floats with `fmod` alone."""
    fmod = call["fmod"]
    types = () if fmod and call.x.type.is_float else WHOLE
    a, b = call.operand(0, *types), call.operand(1, *types)
    return call.fmod(a, b) if fmod else call.binary("mod", a, b)


@op("Trilu", "com.microsoft.Trilu")
def _trilu(call: Call) -> Tensor:
    """Whether an element is kept is a mask of the last two axes: a constant, unless the diagonal flows."""
    x = call.operand()
    if x.rank < 2:
        raise call.error("input", x.shape, "has to have at least 2 dimensions")
    rows, columns = (np.arange(size, dtype=np.int64) for size in x.shape[-2:])
    above = call.constant(columns[None, :] - rows[:, None], "diagonals")
    k = call.operand(1, "int64") if call.has(1) else call.constant(np.zeros((), np.int64), "diagonal")
    k = call.reshape(k, ())
    ends = (k, above) if call["upper"] else (above, k)
    return call.where(call.binary("less_equal", *ends), x, 0)


@op("OneHot", limits="a constant depth", since=9)
def _one_hot(call: Call) -> Tensor:
    """Indices are compared with all of the depth. Ones of floats are made int64 before, as ONNX has it."""
    indices, depth, values = call.operand(), int(call.array(1, "depth").reshape(-1)[0]), call.operand(2)
    if values.shape != (2,):
        raise call.error("values", values.shape, "have to be two, off and on")
    rank = indices.rank
    axis = call.axis(call["axis"], rank + 1)
    wide = call.reshape(call.converted(indices, "int64"), (*indices.shape[:axis], 1, *indices.shape[axis:]))
    wide = call.where(call.less(wide, 0), call.add(wide, depth), wide)
    places = np.arange(depth, dtype=np.int64).reshape(axis_shape(axis, rank + 1))
    off, on = (call.gathered(values, 0, np.asarray(k)) for k in (0, 1))
    return call.where(call.equal(wide, call.constant(places, "places")), on, off)


# ---------------------------------------------------------------- indices


@op("GatherElements", "GatherND")
def _gather(call: Call) -> Tensor:
    x, indices = call.operand(), call.operand(1, "int64", "int32")
    of_tuples = call.kind == "GatherND"
    axis = call["batch_dims"] if of_tuples else call.along
    return call.emit(ops.GatherAt("tuples" if of_tuples else "elements", axis), x, indices)


@op("ScatterElements", "Scatter", "ScatterND", since=9)
def _scatter(call: Call) -> Tensor:
    kind = call.one_of("reduction", *get_args(ScatterKind))
    x = call.operand(0, *(() if kind == "none" else (*FLOATS, *COUNTED)))
    of_tuples = call.kind == "ScatterND"
    made = ops.ScatterAt("tuples", 0, kind) if of_tuples else ops.ScatterAt("elements", call.along, kind)
    return call.emit(made, x, call.operand(1, "int64", "int32"), call.operand(2))


@op("GridSample", limits="images and volumes of floats; no cubic mode", since=16)
def _grid_sample(call: Call) -> Tensor:
    modes: dict[str, Any] = {"bilinear": "linear", "linear": "linear", "nearest": "nearest"}
    mode, outside = call["mode"], call.one_of("padding_mode", *get_args(Outside))
    if mode not in modes:
        raise Unsupported(f"mode={mode!r}")
    how = Sampling(modes[mode], outside, bool(call["align_corners"]))
    return sampled(call, call.x, call.input(1), how)


# ---------------------------------------------------------------- along an axis


@op("CumSum", limits="a constant axis")
def _cumulative(call: Call) -> Tensor:
    x = call.operand(0, *FLOATS, *WHOLE)
    axis = call.axis(int(call.array(1, "axis").reshape(-1)[0]), x.rank)
    flags = bool(call["exclusive"]), bool(call["reverse"])
    return call.emit(ops.Scan(axis, "add", *flags), x)


@op("ArgMax", "ArgMin", limits="a NaN counts as the first")
def _arg(call: Call) -> Tensor:
    x, axis = call.operand(0, *FLOATS, *COUNTED), call.along
    y = call.emit(ops.Top(axis, 1, call.kind == "ArgMin", bool(call["select_last_index"])), x)
    return call.reshape(y, reduced_shape(x.shape, (axis,), call["keepdims"]))


@op("TopK", limits="a constant k; a NaN counts as the first")
def _top(call: Call) -> list[Tensor]:
    """Sorted, whether the node asks for it or not; equal elements in the order of their indices."""
    x = call.operand(0, *FLOATS, *COUNTED)
    axis = call.along
    count = int(call.array(1, "k").reshape(-1)[0]) if call.has(1) else call["k"]
    indices = call.helper(ops.Top(axis, count, not call["largest"]), x)
    return [call.emit(ops.GatherAt("elements", axis), x, indices), indices]
