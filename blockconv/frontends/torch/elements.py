"""Translators of ATen's ops on numbers of any type: arithmetic, masks, indices that flow, and ops along an axis."""

import functools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.fx import Node as FxNode

from blockconv.core.element_problem import ScatterKind
from blockconv.core.python import zipped
from blockconv.core.types import COUNTED, NUMBERS, WHOLE, element
from blockconv.frontends.torch.reader import Call, Constant, Value, hint, lowered, of_numbers, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.lowering import reduced_shape
from blockconv.network.ops.rule import Axes, Tensor

_SHORT = ("int8", "uint8", "int16", "uint16")
MOST_SORTED = 256  # elements of a line


# ---------------------------------------------------------------- types


def as_numbers(call: Call, value: Value, name: str = "") -> Tensor:
    """A tensor, a constant or a number, as numbers of the type of this name. Default: the result's."""
    name = name or call.result
    if name not in NUMBERS:
        raise Unsupported(f"of {name}")
    if isinstance(value, Tensor):
        wide = "int64" if value.type.is_float and name in _SHORT else name  # PyTorch drops the upper bits
        return call.converted(call.converted(value, wide), name)
    if isinstance(value, Constant):
        return call.tensor(Constant(value.tensor.to(getattr(torch, name)), value.name))
    if not isinstance(value, (bool, int, float)):
        raise Unsupported(f"an operand of {type(value).__name__}")
    type_ = element(name)
    if name in WHOLE and not type_.bounds[0] <= value <= type_.bounds[1]:
        raise Unsupported(f"{value} as {name}")
    return call.constant(np.asarray(value).astype(type_.dtype), "number")


def _operands(call: Call, name: str = "") -> list[Tensor]:
    """Both operands as numbers of the type of this name. Default: the result's."""
    return [as_numbers(call, call[one], name) for one in ("self", "other")]


def _promoted(call: Call) -> list[Tensor]:
    """Both operands in the type that PyTorch promotes them to."""
    given = (call.traced["self"], call.traced["other"])
    traced = [one.meta["val"] if isinstance(one, FxNode) else one for one in given]
    numbers = [value if isinstance(value, (torch.Tensor, bool, float)) else hint(value) for value in traced]
    name = str(torch.result_type(*numbers)).removeprefix("torch.")
    return _operands(call, name)


of_numbers("_to_copy")(lambda call: as_numbers(call, call.x))
of_numbers("prims.convert_element_type")(lambda call: as_numbers(call, call.input("a")))


# ---------------------------------------------------------------- each element by itself


@of_numbers("add", "sub", "mul", "div", "maximum", "minimum", "atan2")
def _binary(call: Call) -> Tensor:
    a, b = _operands(call)
    if call.get("rounding_mode") is not None:
        return _quotient(call, a, b)
    if call.get("alpha", 1) != 1:
        b = call.mul(b, as_numbers(call, call["alpha"]))
    return call.binary(call.kind.removesuffix("imum"), a, b)


def _quotient(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """The quotient, rounded."""
    if a.type.is_float:
        return _quotient_of_floats(call, a, b)
    _check_integers(call, a)
    return _floored(call, a, b) if call["rounding_mode"] == "floor" else call.div(a, b)


def _floored(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """The quotient of integers, rounded down."""
    return call.div(call.sub(a, call.binary("mod", a, b)), b)


def _quotient_of_floats(call: Call, a: Tensor, b: Tensor) -> Tensor:
    """Rounded down, it is what is left after the remainder, which is exact: 1 // 0.1 is 9."""
    y = call.div(a, b)
    if call["rounding_mode"] == "trunc":
        return call.apply("trunc", y)
    rest, below = _divided(call, a, b)
    whole = call.div(call.sub(a, rest), b)
    rounded = call.apply("round", call.where(below, call.sub(whole, 1), whole))
    return call.where(call.equal(b, 0), y, rounded)


def _divided(call: Call, a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """(remainder, is_below) of floats: `a - trunc(a / b) * b`, and whether floor(a / b) is trunc(a / b) - 1."""
    y = call.binary("fmod", a, b)
    opposite = (("less", "greater"), ("greater", "less"))  # y and b against 0
    pairs = [[call.binary(kind, x, 0) for kind, x in zipped(kinds, (y, b))] for kinds in opposite]
    return y, call.binary("or", *(call.binary("and", *pair) for pair in pairs))


def _check_integers(call: Call, a: Tensor) -> None:
    """PyTorch raises where a divisor of integers is 0, so it has to be a constant."""
    divisor = call["other"]
    values = divisor.array if isinstance(divisor, Constant) else 0 if isinstance(divisor, Tensor) else divisor
    if a.type.name not in WHOLE or not np.all(values):
        raise Unsupported(f"of {a.type}, or by what may be 0")


@of_numbers("remainder", "fmod")
def _remainder(call: Call) -> Tensor:
    """The remainder of a quotient that is rounded down, or towards 0 in `fmod`."""
    a, b = _operands(call)
    if a.type.is_float:
        if call.kind == "fmod":
            return call.fmod(a, b)
        y, below = _divided(call, a, b)
        return call.where(below, call.add(y, b), y)
    _check_integers(call, a)
    return call.binary("mod", a, b) if call.kind == "remainder" else call.fmod(a, b)


of_numbers("neg")(lowered(Call.negated))
of_numbers("abs")(lowered(Call.magnitude))
of_numbers("isnan")(lowered(Call.is_nan))
of_numbers("sign")(lowered(functools.partial(Call.sign, keeps_nan=False)))
op("isinf")(lowered(Call.is_infinite))
op("reciprocal")(lowered(functools.partial(Call.power, exponent=-1)))
op("rsqrt")(lowered(functools.partial(Call.power, exponent=-0.5)))


_COMPARED = {
    "eq": "equal",
    "ne": "not_equal",
    "lt": "less",
    "le": "less_equal",
    "gt": "greater",
    "ge": "greater_equal",
}


of_numbers(*_COMPARED)(lambda call: call.binary(_COMPARED[call.kind], *_promoted(call)))


@of_numbers("logical_and", "logical_or", "logical_xor", "bitwise_and", "bitwise_or", "bitwise_xor")
def _logic(call: Call) -> Tensor:
    family, _, kind = call.kind.partition("_")
    return call.binary(kind, *_operands(call, "bool" if family == "logical" else ""))


of_numbers("logical_not", "bitwise_not")(lambda call: call.inverted(as_numbers(call, call.x)))
of_numbers("where")(lambda call: call.where(as_numbers(call, call["condition"], "bool"), *_operands(call)))


@of_numbers("clamp", "hardtanh")
def _clamp(call: Call) -> Tensor:
    x, ends = as_numbers(call, call.x), [call.get(k, call.get(f"{k}_val")) for k in ("min", "max")]
    if x.type.is_float and not any(isinstance(end, (Tensor, Constant)) for end in ends):
        return call.clipped(x, *ends)
    return call.clipped(x, *(None if end is None else as_numbers(call, end) for end in ends))


# ---------------------------------------------------------------- indices


# Ops with `from_end=False` refuse negative indices, as PyTorch does.


of_numbers("gather")(
    lambda call: call.emit(ops.GatherAt("elements", call.along, from_end=False), call.x, call.input("index"))
)


@of_numbers("index_select")
def _index_select(call: Call) -> Tensor:
    x, axis = call.x, call.along
    if isinstance(call["index"], Constant):
        return call.gathered(x, axis, call.array("index").reshape(-1))
    return call.emit(ops.GatherAt("along", axis, from_end=False), x, call.reshape(call.input("index"), (-1,)))


of_numbers("embedding")(
    lambda call: call.emit(ops.GatherAt("along", 0, from_end=False), call.input("weight"), call.input("indices"))
)


def flow_indices(call: Call, given: list[tuple[int, Value]]) -> Tensor:
    """The elements at indices of some axes, (axis, indices). Indices broadcast together, and may be negative."""
    x, indices = call.x, [(axis, call.tensor(value)) for axis, value in given]
    (axis, index), *others = indices
    if not others and index.type.name in ("int64", "int32"):
        return call.emit(ops.GatherAt("along", axis), x, index)
    tuples, order, before = _tuples(call, x, indices)
    y = call.emit(ops.GatherAt("tuples"), call.transposed(x, order), tuples)
    k = tuples.rank - 1
    return call.transposed(y, (*range(k, k + before), *range(k), *range(k + before, y.rank)))


def _tuples(call: Call, x: Tensor, given: list[tuple[int, Tensor]]) -> tuple[Tensor, Axes, int]:
    """Indices of some axes as tuples; the order of axes that has these in front; how many axes stay before theirs."""
    if not {index.type.name for _, index in given} <= {"int64", "int32"}:
        raise Unsupported("indices that are not of int64 or int32")
    named = [axis for axis, _ in given]
    shape = np.broadcast_shapes(*(index.shape for _, index in given))
    wide = [call.reshape(call.expanded(call.converted(index, "int64"), shape), (*shape, 1)) for _, index in given]
    before = named[0] if named == [*range(named[0], named[0] + len(named))] else 0
    return call.joined(len(shape), wide), (*named, *(axis for axis in range(x.rank) if axis not in named)), before


def _check_updated(x: Tensor, indices: Tensor, kind: ScatterKind) -> None:
    if 0 in (x.rank, *x.shape, *indices.shape) or (kind != "none" and x.type.name in ("bool", "uint64")):
        raise Unsupported(f"{kind} of {x.type} of shape {x.shape}, at indices of shape {indices.shape}")


@of_numbers("scatter", "scatter_add", "scatter_reduce")
def _scatter(call: Call) -> Tensor:
    """The last update of an element stays. PyTorch promises no order."""
    x, indices = call.x, call.input("index")
    kinds: dict[str, ScatterKind] = {"add": "add", "sum": "add", "mean": "add", "multiply": "mul", "prod": "mul"}
    kinds |= {"amax": "max", "amin": "min", "none": "none"}
    named = call.get("reduce", "add" if call.kind == "scatter_add" else "none")
    _check_updated(x, indices, kinds[named])
    updates = as_numbers(call, call.get("src", call.get("value")), x.type.name)
    for axis, (size, have) in enumerate(zip(indices.shape, updates.shape, strict=False)):
        updates = updates if size == have else call.helper(ops.Slice(axis, 0, size), updates)

    def scattered(x: Tensor, kind: ScatterKind, updates: Tensor) -> Tensor:
        made = ops.ScatterAt("elements", call.along, kind, from_end=False)
        return call.emit(made, x, indices, updates)

    def filled(number: float, shape: Sequence[int]) -> Tensor:
        return call.constant(np.full(shape, number, x.type.dtype), "numbers")

    counts = filled(1, x.shape) if named == "mean" else None
    if not call.get("include_self", True):  # an element that has updates starts at what changes none of them
        low, high = (-math.inf, math.inf) if x.type.is_float else x.type.bounds
        start = filled({"mul": 1, "max": low, "min": high}.get(kinds[named], 0), indices.shape)
        x = scattered(x, "none", start)
        counts = None if counts is None else scattered(counts, "none", start)
    y = scattered(x, kinds[named], call.expanded(updates, indices.shape))
    if counts is None:
        return y
    counts = scattered(counts, "add", filled(1, indices.shape))
    return call.div(y, counts) if x.type.is_float else _floored(call, y, counts)


@of_numbers("index_put")
def _put(call: Call) -> Tensor:
    """One value where a mask is true, or values at indices of some axes, as `flow_indices` reads them."""
    x, values = call.x, as_numbers(call, call["values"])
    given = [(axis, call.tensor(value)) for axis, value in enumerate(call["indices"]) if value is not None]
    kind: ScatterKind = "add" if call["accumulate"] else "none"
    if [index.type.name for _, index in given] == ["bool"] and values.elements == 1 and kind == "none":
        ((axis, mask),) = given
        mask = call.reshape(mask, (*mask.shape, *(1,) * (x.rank - axis - mask.rank)))
        return call.where(mask, call.reshape(values, ()), x)
    tuples, order, first = _tuples(call, x, given)
    _check_updated(x, tuples, kind)
    shape, rest = tuples.shape[:-1], [x.shape[axis] for axis in order[tuples.shape[-1] :]]
    values = call.expanded(values, (*rest[:first], *shape, *rest[first:]))
    k, places = len(shape), (*range(len(shape) + len(rest)),)
    updates = call.transposed(values, (*places[first : first + k], *places[:first], *places[first + k :]))
    made = call.helper(ops.ScatterAt("tuples", 0, kind), call.transposed(x, order), tuples, updates)
    return call.transposed(made, tuple(map(order.index, range(len(order)))))


# ---------------------------------------------------------------- along axes


def reduced_axes(call: Call) -> Axes:
    """The axes of a reduction, sorted: all if none is named. Raises Unsupported for axes without elements."""
    shape, rank, given = call.x.shape, call.x.rank, call.get("dim")
    named = [given] if isinstance(given, int) else given or range(rank)
    axes = {call.axis(axis, rank) for axis in named} if rank else ()  # PyTorch takes dim=0 of a number, too
    if any(shape[axis] == 0 for axis in axes):
        raise Unsupported(f"dim={given} of shape {shape}")
    return tuple(sorted(axes))


def reduced(call: Call, x: Tensor, kind: str) -> Tensor:
    """A reduction over `reduced_axes`."""
    return call.reduced(x, kind, reduced_axes(call), call.get("keepdim", False))


of_numbers("sum", "prod", "mean")(lambda call: reduced(call, as_numbers(call, call.x), call.kind))
of_numbers("amin")(lambda call: reduced(call, call.x, "min"))
of_numbers("any")(lambda call: call.converted(reduced(call, as_numbers(call, call.x, "bool"), "max"), call.result))
op("logsumexp")(lambda call: call.log_sum_exp(call.x, reduced_axes(call), call["keepdim"]))


@of_numbers("max", "min")
def _extreme(call: Call) -> Value:
    """The maximum or minimum of all elements, of two tensors, or along one axis, with its indices if they are read."""
    if "other" in call.arguments:
        return _binary(call)
    y = reduced(call, call.x, call.kind)
    if "dim" not in call.arguments:
        return y
    return [y, _top_one(call) if call.reads(1) else None]


@of_numbers("argmax", "argmin")
def _top_one(call: Call) -> Tensor:
    """The index of the first of equal elements, and of the first NaN, if there is one."""
    x, rank, dim = call.x, call.x.rank, call.get("dim")
    if x.type.name not in (*COUNTED, "bool") and not x.type.is_float:
        raise Unsupported(f"of {x.type}")
    axis = 0 if dim is None else call.axis(dim, rank)
    line = call.reshape(x, (-1,)) if dim is None or not rank else x
    y = call.emit(
        ops.Top(axis, 1, "min" in call.kind), call.converted(line, "uint8") if x.type.name == "bool" else line
    )
    return call.reshape(y, reduced_shape(x.shape, range(rank) if dim is None else (axis,), call["keepdim"]))


@of_numbers("topk", "sort")
def _ordered(call: Call) -> list[Tensor]:
    """The first elements in an order, or all, and their indices. Equal elements are in the order of their indices.

    A NaN is the largest of floats, as in PyTorch. The kernel inserts each element into those before it, so lines that
    it sorts have to be short.
    """
    x, axis = call.x, call.along
    size = x.shape[axis] if x.shape else 0
    count, descending = call.get("k", size), call.get("largest", call.get("descending"))
    turns = x.type.is_float and not descending  # from the other end of the descending order
    is_long = size > MOST_SORTED and (turns or call.kind == "sort")
    if (x.type.name not in COUNTED and not x.type.is_float) or not size or is_long:
        raise Unsupported(f"of {size} elements of {x.type}, of shape {x.shape}")
    top = ops.Top(axis, size if turns else count, not (turns or descending), turns)
    indices = call.helper(top, x)
    indices = call.gathered(indices, axis, np.arange(size)[::-1][:count]) if turns else indices
    return [call.emit(ops.GatherAt("elements", axis), x, indices), indices]


of_numbers("cumsum")(lambda call: call.emit(ops.Scan(call.along, "add"), as_numbers(call, call.x)))
of_numbers("cumprod")(lambda call: call.emit(ops.Scan(call.along, "mul"), as_numbers(call, call.x)))
