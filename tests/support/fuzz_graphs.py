"""Random ONNX models of every op that `load_onnx` reads, each with inputs. The same seed gives the same model.

A model is a chain of a few ops with branches, at a random opset. Operands are constants, fed or computed. Sizes are
small: odd ones, 1 and 0. Some are symbolic; the model then has inputs of several sizes. ONNX's shape inference gives
the shape and type of each node, and a node that it refuses is left out.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from onnx import TypeProto, checker, defs, helper, numpy_helper, shape_inference

from blockconv.core import target
from blockconv.frontends.onnx.ops import OPS as TABLE

__all__ = ["BLOCK", "MS", "OPS", "Case", "Skip", "generate", "of_version"]

Array = np.ndarray[Any, Any]
MS = "com.microsoft"
BLOCK = 16 if not target.is_x86() or "avx512f" in target.host_features() else 8  # channels, in com.microsoft.nchwc
FLOATS = {"float32": np.dtype("f4"), "float64": np.dtype("f8"), "float16": np.dtype("f2")} | {
    "bfloat16": np.dtype(ml_dtypes.bfloat16)
}
BYTES = (np.dtype("u1"), np.dtype("i1"))
KINDS = ("float32", "float64", "float16", "bfloat16", "qdq", "integers")
KIND_CHANCES = (0.46, 0.08, 0.1, 0.08, 0.14, 0.14)
CHANNELS = (1, 2, 3, 4, 5, 8, 16, 17)
SIDES = (1, 2, 3, 5, 6, 7, 8, 9, 13)


class Case(NamedTuple):
    """A model with its inputs, one dict for each size. `kind` is its main type."""

    model: Any
    feeds: tuple[dict[str, Array], ...]
    kind: str = "float32"


class Value(NamedTuple):
    """A value of the graph. `flows`: it depends on an input."""

    name: str
    dtype: np.dtype[Any]
    shape: tuple[int, ...]
    flows: bool = True

    @property
    def rank(self) -> int:
        return len(self.shape)


class Skip(Exception):  # noqa: N818
    """The op cannot be put here."""


class Graph:
    """A model being made."""

    def __init__(self, seed: int) -> None:
        self.rng = np.random.default_rng([seed, 20])
        newest = defs.onnx_opset_version()
        self.opset = self.pick((9, 11, 13, 17, 21, newest)) if self.chance(0.4) else self.whole(7, newest)
        self.kind = str(self.rng.choice(KINDS, p=KIND_CHANCES))
        self.float = FLOATS.get(self.kind, np.dtype("f4"))
        self.nodes: list[Any] = []
        self.constants: dict[str, Array] = {}
        self.inputs: dict[str, tuple[tuple[int | str, ...], Callable[[tuple[int, ...]], Array]]] = {}
        self.values: list[Value] = []
        self.count = 0
        sides = SIDES if self.chance(0.9) else (0, *SIDES)
        self.symbols = {name: (self.pick(sides), self.pick(SIDES), self.pick((0, *SIDES))) for name in "hw"}
        self.symbols["n"] = (self.pick((1, 2, 3)), self.pick((1, 2, 5)), self.pick((0, 1, 2)))
        dynamic = self.chance(0.35)
        self.dynamic = {name for name in "nhw" if dynamic and self.chance(0.6)}

    # -- chance

    def chance(self, p: float) -> bool:
        return bool(self.rng.random() < p)

    def pick(self, options: Any) -> Any:
        return options[int(self.rng.integers(len(options)))]

    def whole(self, low: int, high: int) -> int:
        """From low to high, both included."""
        return int(self.rng.integers(low, high + 1))

    def number(self, low: float, high: float) -> float:
        return float(np.float32(self.rng.uniform(low, high)))

    def array(self, shape: tuple[int, ...], dtype: Any, scale: float = 1.0) -> Array:
        dtype = np.dtype(dtype)
        if dtype.kind in "iu":
            low, high = {"b": (-60, 60), "B": (0, 255)}.get(dtype.char, (-20, 20))
            return np.asarray(self.rng.integers(low, high, shape, endpoint=True)).astype(dtype)
        if dtype == np.bool_:
            return np.asarray(self.rng.random(shape) < 0.5)
        return np.asarray(self.rng.standard_normal(shape) * scale).astype(dtype)

    # -- values

    def name(self, what: str) -> str:
        self.count += 1
        return f"{what.lower()}_{self.count}"

    def input(self, dims: tuple[int | str, ...], dtype: Any, value: Array | None = None) -> Value:
        """An input of the model. dims: sizes, or symbols, of which only the dynamic ones are written as symbols."""
        shape = tuple(self.symbols[d][0] if isinstance(d, str) else d for d in dims)
        kept = tuple(d if d in self.dynamic else s for d, s in zip(dims, shape, strict=True))
        name = self.name("x")
        self.inputs[name] = kept, lambda sizes: self.array(sizes, dtype) if value is None else value
        return Value(name, np.dtype(dtype), shape)

    def constant(self, value: Any) -> Value:
        """An initializer, or a Constant node."""
        array = np.asarray(value)
        name = self.name("c")
        if self.opset >= 9 and self.chance(0.1):
            self.nodes.append(helper.make_node("Constant", [], [name], value=numpy_helper.from_array(array)))
        else:
            self.constants[name] = array
        return Value(name, array.dtype, array.shape, False)

    def operand(self, value: Any) -> Value:
        """Nearly always a constant; sometimes fed."""
        array = np.asarray(value)
        return self.input(array.shape, array.dtype, array) if self.chance(0.04) else self.constant(array)

    def dims(self, rank: int) -> tuple[int | str, ...]:
        if rank >= 2 and rank <= 5:
            return ("n", self.pick(CHANNELS), *("hw"[-(rank - 2) :] if 2 < rank < 5 else (3, 2, 2)[: rank - 2]))
        return tuple(self.pick(SIDES) for _ in range(rank))

    def take(self, *dtypes: Any, ranks: tuple[int, ...] = ()) -> Value:
        """A value of one of these types (the model's floats by default), the newest most often; or a new one."""
        wanted = [np.dtype(d) for d in dtypes] or [self.float]
        fits = [v for v in self.values if v.dtype in wanted and (not ranks or v.rank in ranks)]
        if fits and self.chance(0.93):
            return fits[-1] if self.chance(0.6) else self.pick(fits)
        if fits and self.chance(0.5) and (not ranks or self.chance(0.8)):
            like = self.pick(fits)
            return self.constant(self.array(like.shape, like.dtype))
        rank = self.pick(ranks or (4, 4, 4, 3, 2, 1, 0, 5))
        if not fits and self.values and not self.chance(0.3):
            raise Skip
        return self.input(self.dims(rank), self.pick(wanted))

    def bytes(self, ranks: tuple[int, ...] = ()) -> Value:
        """An int8 or uint8 value: an existing one, quantized floats, or a new input."""
        if any(v.dtype in BYTES and (not ranks or v.rank in ranks) for v in self.values):
            return self.take(*BYTES, ranks=ranks)
        if self.float == np.float32 and self.opset >= 10 and self.values and self.chance(0.7):
            return self.quantized(self.take(ranks=ranks))
        return self.input(self.dims(self.pick(ranks or (4, 4, 3, 2))), self.pick(BYTES))

    # -- nodes

    def add(self, op: str, *operands: Any, outputs: int = 1, like: Value | None = None, **attributes: Any) -> Any:
        """Adds a node of ONNX and gives its outputs. Arrays become constants; None leaves an operand out.

        like: what has the type and the shape of the output, where ONNX infers none.
        """
        try:
            schema = defs.get_schema(op, self.opset, "")
        except defs.SchemaError:
            raise Skip from None
        if schema.deprecated or any(name not in schema.attributes for name in attributes):
            raise Skip
        if any(isinstance(value, list) and not value for value in attributes.values()):  # which has no type
            raise Skip
        values = [v if v is None or isinstance(v, Value) else self.operand(v) for v in operands]
        while values and values[-1] is None:
            values.pop()
        _check_types(schema, values)
        names = [self.name(op) for _ in range(outputs)]
        node = helper.make_node(op, ["" if v is None else v.name for v in values], names, names[0], **attributes)
        found = self._infer(schema, node, [v for v in values if v is not None]) if like is None else {}
        self.nodes.append(node)
        flows = any(v is not None and v.flows for v in values)
        made = [self._keep(name, *(found[name] if like is None else (like.dtype, like.shape)), flows) for name in names]
        return made[0] if outputs == 1 else made

    def _infer(self, schema: Any, node: Any, values: list[Value]) -> dict[str, Any]:
        types = {v.name: _type(v) for v in values}
        known = {v.name: numpy_helper.from_array(self.constants[v.name]) for v in values if v.name in self.constants}
        imports = [helper.make_opsetid("", self.opset)]
        try:
            found = shape_inference.infer_node_outputs(schema, node, types, known, opset_imports=imports, ir_version=8)
            return {name: _read(found[name]) for name in node.output}
        except (KeyError, checker.ValidationError, shape_inference.InferenceError, RuntimeError, ValueError):
            raise Skip from None

    def contributed(
        self, op: str, like: tuple[Any, tuple[int, ...]] | None, *operands: Any, domain: str = MS, **attributes: Any
    ) -> Value:
        """Adds a node of com.microsoft. like: the type and shape of its output; None: no other op may read it."""
        values = [v if v is None or isinstance(v, Value) else self.operand(v) for v in operands]
        name = self.name(op)
        given = ["" if v is None else v.name for v in values]
        self.nodes.append(helper.make_node(op, given, [name], name, domain=domain, **attributes))
        flows = any(v is not None and v.flows for v in values)
        return (
            Value(name, np.dtype("f4"), (), flows)
            if like is None
            else self._keep(name, np.dtype(like[0]), like[1], flows)
        )

    def _keep(self, name: str, dtype: np.dtype[Any], shape: tuple[int, ...], flows: bool) -> Value:
        if min(shape, default=0) < 0 or len(shape) > 6 or np.prod([max(1, s) for s in shape]) > 1 << 15:
            raise Skip
        value = Value(name, dtype, shape, flows)
        self.values.append(value)
        return value

    def quantized(self, x: Value) -> Value:
        """`x` as 8 bits."""
        return self.add("QuantizeLinear", x, *self.quantization())  # type: ignore[no-any-return]

    def quantization(self, dtype: Any = None, count: int | None = None, low: float = 0.01) -> tuple[Value, Value]:
        """A scale and a zero point, or one of each for every channel."""
        dtype = np.dtype(dtype or self.pick(BYTES))
        shape = () if count is None else (count,)
        scale = self.rng.uniform(low, 4 * low, shape).astype("f4")
        middle = 128 if dtype == np.uint8 else 0
        zero = np.full(shape, middle) if self.chance(0.4) else self.rng.integers(-9, 9, shape) + middle
        if self.chance(0.2):
            zero = np.full(shape, self.pick((0, 255) if dtype == np.uint8 else (-128, 127)))
        return self.constant(scale), self.constant(zero.astype(dtype))


def _type(value: Value) -> Any:
    return helper.make_tensor_type_proto(helper.np_dtype_to_tensor_dtype(value.dtype), value.shape)


def _read(found: TypeProto) -> tuple[np.dtype[Any], tuple[int, ...]]:
    tensor = found.tensor_type
    if not tensor.HasField("shape") or any(not d.HasField("dim_value") for d in tensor.shape.dim):
        raise Skip
    dtype = np.dtype(helper.tensor_dtype_to_np_dtype(tensor.elem_type))
    return dtype, tuple(d.dim_value for d in tensor.shape.dim)


def _check_types(schema: Any, values: list[Value | None]) -> None:
    bound: dict[str, np.dtype[Any]] = {}
    if len(values) > schema.max_input:
        raise Skip
    for i, value in enumerate(values):
        formal = schema.inputs[min(i, len(schema.inputs) - 1)]
        if value is None:
            continue
        name = {"f4": "float", "f8": "double", "f2": "float16"}.get(value.dtype.str[1:], value.dtype.name)
        if f"tensor({name})" not in formal.types or bound.setdefault(formal.type_str, value.dtype) != value.dtype:
            raise Skip


# ---------------------------------------------------------------- ops

Put = Callable[[Graph], object]
OPS: dict[str, Put] = {}  # by the names that `blockconv ops` has


def _op(*names: str) -> Callable[[Callable[..., object]], Callable[..., object]]:
    """Registers the function that adds ops of these names; with several names it gets the name."""

    def register(put: Callable[..., object]) -> Callable[..., object]:
        for name in names:
            OPS[name] = put if len(names) == 1 else (lambda g, name=name: put(g, name))
        return put

    return register


@_op("LeakyRelu", "Celu", "HardSigmoid", "Gelu", "Swish")
def _with_attributes(g: Graph, op: str) -> None:
    ranges: dict[str, Any] = {
        "LeakyRelu": {"alpha": (-0.5, 1.5)},
        "Celu": {"alpha": (0.3, 2.0)},
        "HardSigmoid": {"alpha": (0.1, 0.5), "beta": (0.2, 0.7)},
        "Swish": {"alpha": (0.5, 1.5)},
    }.get(op, {})
    given = {name: g.number(*ends) for name, ends in ranges.items() if g.chance(0.7)}
    if op == "Gelu" and g.chance(0.3):
        given["approximate"] = g.pick(("none", "tanh"))
    if op == "Swish" and g.chance(0.7):
        given = {}
    if op == "HardSigmoid" and g.chance(0.4):
        given = {"alpha": 1 / 6, "beta": 0.5}
        x = g.take()
        g.add("Mul", x, g.add(op, x, **given))
        return
    g.add(op, g.take(), **given)


@_op("Exp", "Sin", "Cos")
def _function(g: Graph, op: str) -> None:
    # What the exponential and the periods of what is large are depends on the digits that rounding takes.
    g.add(op, g.add("Tanh", g.take()))


@_op("Log", "Sqrt", "Reciprocal", "Pow")
def _of_positive(g: Graph, op: str) -> None:
    x = g.take()
    if op != "Pow":
        g.add(op, g.add("Add", g.add("Abs", x), np.asarray(0.5, x.dtype)))
        return
    exponent = g.pick((2, 3, 2, 0.5, -1, -0.5, 1, 1.7))
    positive = g.add("Add", g.add("Abs", x), np.asarray(0.5, x.dtype)) if exponent not in (1, 2, 3) else x
    g.add("Pow", positive, np.full(g.pick(((), (1,))), exponent, x.dtype))


@_op("PRelu")
def _prelu(g: Graph) -> None:
    x = g.take(ranks=(4, 4, 3, 2, 1))
    shape: tuple[int, ...] = (x.shape[1], *(1,) * (x.rank - 2)) if x.rank > 1 and g.chance(0.7) else ()
    slope = g.array(shape, x.dtype, g.pick((0.2, 2)))
    g.add("PRelu", x, slope if g.opset >= 9 or shape else slope.reshape(1))


@_op("Clip")
def _clip(g: Graph) -> None:
    x = g.take() if g.chance(0.85) else g.take(*BYTES, np.int32, np.int64)
    bounds = [g.number(-2, 0.5), g.pick((6.0, g.number(0, 3), g.number(-2, 0.5)))]
    if g.opset < 11:
        g.add("Clip", x, **{n: b for n, b in zip(("min", "max"), bounds, strict=True) if g.chance(0.7)})
    else:
        bounds = [b if x.dtype.kind != "u" else abs(b) for b in bounds]
        g.add("Clip", x, *[np.asarray(b).astype(x.dtype) if g.chance(0.7) else None for b in bounds])


@_op("Add", "Sub", "Mul", "Div", "Max", "Min", "Sum", "Mean")
def _elementwise(g: Graph, op: str) -> None:
    own = () if g.chance(0.9) or op == "Mean" else (g.pick((np.int32, np.int64, np.int8, np.uint8)),)
    x = g.take(*own)
    count = g.whole(1, 4) if op in ("Max", "Min", "Sum", "Mean") else 2
    operands: list[Any] = [x]
    for _ in range(count - 1):
        same = [v for v in g.values if v.dtype == x.dtype and _broadcasts(v.shape, x.shape)]
        if same and g.chance(0.55):
            operands.append(g.pick(same))
            continue
        shape: Any = x.shape if g.chance(0.2) else [s if g.chance(0.5) else 1 for s in x.shape]
        shape = tuple(shape[g.whole(0, len(shape)) if g.chance(0.4) else 0 :])
        if g.chance(0.3) and x.rank > 1:
            shape = (x.shape[1], *(1,) * (x.rank - 2))
        if g.chance(0.1):
            shape = (g.pick((1, 2)), *shape)
        value = g.array(shape, x.dtype, g.pick((1, 1, 1, 100)))
        if g.chance(0.2):
            value = np.full(shape, g.pick((0, 1, 2, 6)), x.dtype)
        if op == "Div":
            value = (np.abs(value.astype("f8")) + 1).astype(x.dtype)
        operands.append(value)
    if op != "Div" and g.chance(0.3):
        operands.reverse()
    if op == "Div" and isinstance(operands[1], Value):  # what flows is often near 0
        raise Skip
    g.add(op, *operands)


def _broadcasts(a: tuple[int, ...], b: tuple[int, ...]) -> bool:
    return all(x == y or 1 in (x, y) for x, y in zip(a[::-1], b[::-1], strict=False))


@_op("BatchNormalization")
def _batch_norm(g: Graph) -> None:
    x = g.take(ranks=(4, 3, 2) if g.chance(0.9) else (5, 1))
    c = x.shape[1] if x.rank > 1 else 1
    var = (g.rng.uniform(0.3, 2, c) if g.chance(0.9) else np.full(c, 1e-8)).astype(x.dtype)
    g.add("BatchNormalization", x, *[g.array((c,), x.dtype) for _ in range(3)], var, **_epsilon(g))


@_op("GroupNormalization")
def _group_norm(g: Graph) -> None:
    x = g.take(ranks=(4, 4, 3))
    groups = g.pick([k for k in range(1, max(1, x.shape[1]) + 1) if x.shape[1] % k == 0])
    factors = [g.array((x.shape[1],), x.dtype) for _ in range(2)]
    g.add("GroupNormalization", x, *factors, like=x, num_groups=groups, **_epsilon(g))


@_op("InstanceNormalization")
def _instance_norm(g: Graph) -> None:
    x = g.take(ranks=(4, 4, 3))
    g.add("InstanceNormalization", x, *[g.array((x.shape[1],), x.dtype) for _ in range(2)], **_epsilon(g))


@_op("LayerNormalization")
def _layer_norm(g: Graph) -> None:
    x = g.take(ranks=(4, 3, 2))
    axis = g.whole(1, x.rank - 1)
    factors = [g.array(x.shape[axis:], x.dtype) for _ in range(1 + g.chance(0.7))]
    g.add("LayerNormalization", x, *factors, axis=g.pick((axis, axis - x.rank)), **_epsilon(g))


@_op("RMSNormalization")
def _rms_norm(g: Graph) -> None:
    x = g.take(ranks=(4, 3, 2))
    axis = g.whole(1, x.rank - 1)
    g.add("RMSNormalization", x, g.array(x.shape[axis:], x.dtype), axis=g.pick((axis, axis - x.rank)), **_epsilon(g))


@_op("ThresholdedRelu", "Shrink")
def _jumps(g: Graph, op: str) -> None:
    shrinks = op == "Shrink"
    x = _exact(g, *((g.float, np.int32) if shrinks else (g.float,)))
    g.add(op, x, **({"lambd": 1.5, "bias": g.pick((0.0, 0.5))} if shrinks else {"alpha": g.pick((0.0, 0.5))}))


@_op("LpNormalization")
def _lp_norm(g: Graph) -> None:
    x = g.take(ranks=(4, 3, 2))
    g.add("LpNormalization", g.add("Add", g.add("Abs", x), g.array(x.shape[-1:], x.dtype)), p=g.pick((1, 2)))


@_op("MeanVarianceNormalization")
def _mean_variance(g: Graph) -> None:
    x = g.take(np.float32, ranks=(4,))  # whose shape onnx does not infer
    if g.opset < 9 or 0 in x.shape:
        raise Skip
    x = g.add("Add", x, g.array(x.shape, "f4"))
    axes = g.pick(([0, 2, 3], [1, 2, 3]))
    g.contributed("MeanVarianceNormalization", ("f4", x.shape), x, domain="", axes=axes)


def _epsilon(g: Graph) -> dict[str, float]:
    return {"epsilon": g.pick((1e-5, 1e-3))} if g.chance(0.5) else {}


@_op("LRN")
def _lrn(g: Graph) -> None:
    given = {"alpha": g.number(0.001, 0.3), "beta": g.pick((0.75, 0.5, 1.0)), "bias": g.number(0.5, 2)}
    g.add("LRN", g.take(ranks=(4, 4, 3)), size=g.pick((1, 3, 5)), **{k: v for k, v in given.items() if g.chance(0.6)})


@_op("Softmax", "LogSoftmax")
def _softmax(g: Graph, op: str) -> None:
    x = g.take(ranks=(4, 3, 2, 1))
    least = -x.rank if g.opset >= 11 else 0
    g.add(op, x, **({"axis": g.whole(least, x.rank - 1)} if g.chance(0.7) else {}))


@_op("Dropout")
def _dropout(g: Graph) -> None:
    if g.opset >= 12:
        g.add("Dropout", g.take(), np.array(g.pick((0.0, 0.5)), "f4") if g.chance(0.5) else None)
    else:
        g.add("Dropout", g.take(), ratio=0.3)


@_op("Cast")
def _cast(g: Graph) -> None:
    x = g.take(*dict.fromkeys((g.float, np.dtype("f4"), *BYTES, np.dtype("i4"))))
    to = g.pick((np.dtype("f4"), g.float)) if x.dtype.kind in "iu" else g.pick((*FLOATS.values(), g.float, g.float))
    if g.chance(0.3):  # of what no rounding leads to another side of
        x, to = _exact(g), g.pick([*map(np.dtype, ("i8", "i4", "i2", "i1", "?")), g.float])
    g.add("Cast", x, to=helper.np_dtype_to_tensor_dtype(to))


@_op("CastLike")
def _cast_like(g: Graph) -> None:
    g.add("CastLike", _exact(g), np.zeros(1, g.pick((*map(np.dtype, ("i8", "i4", "i2", "i1", "?")), g.float))))


# ---------------------------------------------------------------- booleans, integers, indices that flow


def _exact(g: Graph, *dtypes: Any, ranks: tuple[int, ...] = (4, 4, 3, 2, 1, 0)) -> Value:
    """A value that no rounding changes, small whole numbers: one of integers or booleans, or an input."""
    wanted = [np.dtype(d) for d in dtypes or (g.float, np.int64, np.int32)]
    fits = [v for v in g.values if v.dtype in wanted and v.dtype.kind in "iub" and v.rank in ranks]
    if fits and g.chance(0.5):
        return g.pick(fits)
    dims, dtype = g.dims(g.pick(ranks)), g.pick(wanted)
    x = g.input(dims, dtype)
    g.inputs[x.name] = g.inputs[x.name][0], lambda sizes: _small(g, sizes, dtype)
    return x


def _small(g: Graph, shape: tuple[int, ...], dtype: Any) -> Array:
    dtype = np.dtype(dtype)
    return (
        g.array(shape, bool)
        if dtype.kind == "b"
        else g.rng.integers(0 if dtype.kind == "u" else -4, 5, shape).astype(dtype)
    )


def _beside(g: Graph, x: Value, dtype: Any = None) -> Any:
    """An operand that broadcasts with a value: a constant, or an input."""
    shape = tuple(size if g.chance(0.6) else 1 for size in x.shape)[g.whole(0, x.rank) if g.chance(0.3) else 0 :]
    value = _small(g, shape, x.dtype if dtype is None else dtype)
    return g.input(shape, value.dtype, value) if g.chance(0.4) else value


@_op("Equal", "Less", "LessOrEqual", "Greater", "GreaterOrEqual")
def _compared(g: Graph, op: str) -> None:
    x = _exact(g)
    y = g.add(op, x, _beside(g, x))
    if g.chance(0.6):  # a mask
        g.add("Where", y, *(_beside(g, y, g.float) for _ in "ab"))


@_op("Where")
def _where(g: Graph) -> None:
    x = g.take() if g.chance(0.7) else g.take(np.int64, np.int32, np.bool_)
    condition = [v for v in g.values if v.dtype == np.bool_ and _broadcasts(v.shape, x.shape)]
    mask = g.pick(condition) if condition and g.chance(0.6) else _beside(g, x, bool)
    other = np.asarray(g.pick((0, -np.inf))).astype(x.dtype) if x.dtype == g.float and g.chance(0.5) else _beside(g, x)
    g.add("Where", mask, *((x, other) if g.chance(0.5) else (other, x)))


@_op("And", "Or", "Xor", "Not", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "BitwiseNot")
def _logic(g: Graph, op: str) -> None:
    x = _exact(g, *((np.int64, np.int32, np.uint8) if "Bit" in op else (np.bool_,)))
    g.add(op, x, *([] if "Not" in op else [_beside(g, x)]))


@_op("IsNaN", "IsInf", "Sign", "Mod", "Trilu")
def _one_more(g: Graph, op: str) -> None:
    if op == "Trilu":
        x = _anything(g, (4, 3, 2))
        k = [g.operand(np.asarray(g.whole(-2, 3)))] if g.chance(0.6) else []
        g.add("Trilu", x, *k, upper=g.pick((0, 1)))
    elif op == "Mod":
        x = _exact(g, np.int64, np.int32, g.float)
        other = g.pick((np.array([3], x.dtype), np.array(-2, x.dtype)))
        g.add("Mod", x, other, **({"fmod": 1} if x.dtype == g.float or g.chance(0.3) else {}))
    else:
        x = _exact(g, *((g.float, np.int32) if op == "Sign" else (g.float,)))
        g.add(op, g.add("Div", x, np.zeros((), x.dtype)) if op != "Sign" else x)


@_op(f"{MS}.Trilu")
def _fused_trilu(g: Graph) -> None:
    x = g.take(np.float32, ranks=(4, 3, 2))
    g.contributed("Trilu", ("f4", x.shape), x, np.asarray(g.whole(-2, 3)), upper=g.pick((0, 1)))


@_op("OneHot")
def _one_hot(g: Graph) -> None:
    x = _exact(g, np.int64, np.int32, g.float, ranks=(3, 2, 1, 0))
    axis = g.pick((-1, g.whole(0, x.rank)))
    g.add("OneHot", x, np.asarray(g.whole(1, 5)), np.array([0, 1], g.pick((g.float, np.int64))), axis=axis)


def _indices(g: Graph, shape: tuple[int, ...], limits: Any) -> Any:
    """Indices below the limits, or negative ones that count from the end: an input, mostly."""
    if np.min(limits) < 1:
        raise Skip
    value = g.rng.integers(-np.asarray(limits), limits, shape).astype(np.int64)
    return g.input(shape, np.int64, value) if g.chance(0.7) else value


@_op("GatherElements", "ScatterElements", "Scatter")
def _by_elements(g: Graph, op: str) -> None:
    x = _anything(g, (4, 3, 2, 1))
    axis = g.whole(0, x.rank - 1)
    shape = tuple(g.whole(1, 4) if k == axis else max(0, s - g.pick((0, 0, 1))) for k, s in enumerate(x.shape))
    if op == "GatherElements":
        g.add(op, x, _indices(g, shape, x.shape[axis]), axis=axis)
        return
    kind = g.pick(("none", "add", "mul", "max", "min")) if g.opset >= 18 and x.dtype == g.float else "none"
    if kind == "none":  # each place once
        size = min(shape[axis], x.shape[axis])
        shape = tuple(size if k == axis else s for k, s in enumerate(shape))
        indices: Any = np.broadcast_to(
            g.rng.permutation(x.shape[axis])[:size].reshape(-1, *(1,) * (x.rank - axis - 1)), shape
        )
        indices = np.ascontiguousarray(indices)
    else:
        indices = _indices(g, shape, x.shape[axis])
    g.add(op, x, indices, g.array(shape, x.dtype), axis=axis, **({} if kind == "none" else {"reduction": kind}))


@_op("GatherND", "ScatterND")
def _by_tuples(g: Graph, op: str) -> None:
    x = _anything(g, (4, 3, 2))
    batch = g.whole(0, 1) if op == "GatherND" and g.opset >= 12 else 0
    count, width = g.whole(1, 3), g.whole(1, x.rank - batch)
    limits = x.shape[batch : batch + width]
    if op == "GatherND":
        indices = _indices(g, (*x.shape[:batch], count, width), limits)
        g.add(op, x, indices, **({"batch_dims": batch} if batch else {}))
    elif min(limits) > 0:  # each place once
        count = min(count, limits[0])
        rows = [g.rng.permutation(limits[0])[:count], *(g.rng.integers(0, n, count) for n in limits[1:])]
        g.add(op, x, np.stack(rows, -1).astype(np.int64), g.array((count, *x.shape[width:]), x.dtype))


@_op("CumSum", "ArgMax", "ArgMin", "TopK")
def _along(g: Graph, op: str) -> None:
    x = _exact(g, g.float, np.int64, np.int32, ranks=(4, 3, 2, 1))
    axis = g.whole(0, x.rank - 1)
    if op == "CumSum":
        flags = {name: 1 for name in ("exclusive", "reverse") if g.chance(0.4)}
        g.add(op, x, np.asarray(axis), **flags)
    elif op == "TopK":
        k, more = g.whole(0, x.shape[axis]), {"largest": g.pick((0, 1))} if g.opset >= 11 and g.chance(0.6) else {}
        if g.opset < 10:
            g.add(op, x, outputs=2, axis=axis, k=max(1, k))
        else:
            g.add(op, x, np.asarray([k]), outputs=2, axis=axis, **more)
    else:
        more = {"select_last_index": g.pick((0, 1))} if g.opset >= 12 and g.chance(0.4) else {}
        g.add(op, x, axis=axis, keepdims=g.pick((0, 1)), **more)


# ---------------------------------------------------------------- what moves elements


def _anything(g: Graph, ranks: tuple[int, ...] = ()) -> Value:
    return g.take(ranks=ranks) if g.chance(0.85) else g.take(g.float, *BYTES, np.int32, np.int64, ranks=ranks)


@_op("Concat")
def _concat(g: Graph) -> None:
    x = _anything(g, (4, 4, 3, 2, 1))
    axis = g.pick((1, 1, *range(x.rank))) % x.rank
    rest = lambda v: (v.dtype, v.shape[:axis], v.shape[axis + 1 :], v.rank)  # noqa: E731
    same = [v for v in g.values if rest(v) == rest(x)] or [x]
    parts: list[Any] = [x, *[g.pick(same) for _ in range(g.whole(0, 2))]]
    if g.chance(0.3):
        parts.append(g.array((*x.shape[:axis], g.pick((0, 1, 3, 16)), *x.shape[axis + 1 :]), x.dtype))
    g.rng.shuffle(parts)  # type: ignore[arg-type]
    g.add("Concat", *parts, axis=axis - x.rank if g.opset >= 11 and g.chance(0.3) else axis)


@_op("Flatten")
def _flatten(g: Graph) -> None:
    x = _anything(g)
    axis = g.whole(-x.rank if g.opset >= 11 else 0, x.rank)
    g.add("Flatten", x, **({"axis": axis} if g.chance(0.5) else {}))


@_op("Shape")
def _shape(g: Graph) -> None:
    x = _anything(g)
    y = g.add(
        "Shape", x, **({"start": g.whole(-2, 2), "end": g.whole(-1, 4)} if g.opset >= 15 and g.chance(0.4) else {})
    )
    if g.opset < 10 or x.dtype != g.float or not g.chance(0.6):
        return
    to = helper.np_dtype_to_tensor_dtype(g.float)  # constants that depend on the size of an input
    if g.chance(0.6) and y.shape[0]:
        first = g.whole(0, y.shape[0] - 1)
        factor = g.add("Cast", g.add("Slice", y, np.array([first]), np.array([first + 1])), to=to)
    else:
        factor = g.add("Cast", g.add("ConstantOfShape", y, value=numpy_helper.from_array(np.array([2], "f4"))), to=to)
    g.add(g.pick(("Mul", "Add")), x, factor)


@_op("Size")
def _size(g: Graph) -> None:
    g.add("Size", _anything(g))


@_op("Reshape")
def _reshape(g: Graph) -> None:
    x = _anything(g)
    if g.chance(0.2) and x.rank > 1 and g.opset >= 10:  # as exporters flatten: [Shape(x)[0], -1]
        first = g.add("Slice", g.add("Shape", x), np.array([0]), np.array([1]))
        target: Any = g.add("Concat", first, np.array([-1]), axis=0)
    else:
        sizes = list(x.shape)
        for _ in range(g.whole(0, 3)):  # two axes become one, or one two
            at = g.whole(0, max(0, len(sizes) - 1))
            if len(sizes) > 1 and at and g.chance(0.6):
                sizes[at - 1 : at + 1] = [sizes[at - 1] * sizes[at]]
            elif sizes:
                part = g.pick([k for k in (1, 2, 3, 4) if sizes[at] % k == 0])
                sizes[at : at + 1] = [part, sizes[at] // part]
        sizes = [0 if i < x.rank and s == x.shape[i] and g.chance(0.5) else s for i, s in enumerate(sizes)]
        if sizes and g.chance(0.5):
            sizes[g.whole(0, len(sizes) - 1)] = -1
        target = np.array(sizes, np.int64)
    g.add("Reshape", x, target, **({"allowzero": g.pick((0, 1))} if g.opset >= 14 and g.chance(0.1) else {}))


@_op("Squeeze")
def _squeeze(g: Graph) -> None:
    x = _anything(g)
    axes = [i for i, s in enumerate(x.shape) if s == 1 and g.chance(0.7)]
    _with_axes(g, "Squeeze", x, axes if axes and g.chance(0.8) else None)


@_op("Unsqueeze")
def _unsqueeze(g: Graph) -> None:
    x = _anything(g)
    count = g.whole(1, 2)
    if x.rank + count > 5:
        raise Skip
    _with_axes(g, "Unsqueeze", x, [int(k) for k in g.rng.permutation(x.rank + count)[:count]], x.rank + count)


def _with_axes(
    g: Graph, op: str, x: Value, axes: list[int] | None, rank: int = 0, since: int = 13, **more: Any
) -> None:
    if axes is not None and g.opset >= 11 and g.chance(0.3):
        axes = [a - (rank or x.rank) for a in axes]
    if g.opset < since:
        g.add(op, x, **({} if axes is None else {"axes": axes}), **more)
    else:
        g.add(op, x, None if axes is None else np.array(axes, np.int64), **more)


@_op("Transpose")
def _transpose(g: Graph) -> None:
    x = _anything(g)
    perm = g.pick(((0, 2, 3, 1), (0, 3, 1, 2))) if x.rank == 4 and g.chance(0.5) else g.rng.permutation(x.rank).tolist()
    g.add("Transpose", x, **({"perm": perm} if g.chance(0.85) else {}))


@_op("Split")
def _split(g: Graph) -> None:
    x = _anything(g, (4, 4, 3, 2))
    axis = g.pick((1, 1, *range(x.rank)))
    count = g.whole(1, 3)
    cuts = sorted(g.whole(0, x.shape[axis]) for _ in range(count - 1))
    sizes = np.diff([0, *cuts, x.shape[axis]])
    if g.chance(0.5) and x.shape[axis] % count == 0:
        more = {"num_outputs": count} if g.opset >= 18 else {}
        g.add("Split", x, outputs=count, axis=axis, **more)
    elif g.opset < 13:
        g.add("Split", x, outputs=count, axis=axis, split=sizes.tolist())
    else:
        g.add("Split", x, sizes.astype(np.int64), outputs=count, axis=axis)


@_op("Gather")
def _gather(g: Graph) -> None:
    x = _anything(g, (4, 4, 3, 2, 1))
    axis = g.whole(0, x.rank - 1)
    size = x.shape[axis]
    if not size:
        raise Skip
    shape = g.pick(((), (1,), (3,), (2, 2), (size,)))
    if g.chance(0.3):
        g.add("Gather", x, _indices(g, shape, size), axis=axis)
        return
    indices = np.arange(size)[:: g.pick((1, -1, 2))] if g.chance(0.4) else g.rng.integers(-size, size, shape)
    g.add("Gather", x, np.asarray(indices, g.pick((np.int64, np.int32))), axis=axis - x.rank * g.chance(0.3))


@_op("Expand")
def _expand(g: Graph) -> None:
    x = g.take() if g.chance(0.85) else g.take(np.int64, np.int32, np.bool_)
    at = g.whole(0, x.rank)
    shape = [g.pick((1, 3)) if size == 1 else g.pick((1, size)) for size in x.shape[at:]]
    g.add("Expand", x, np.asarray([2] * g.chance(0.2) * (at == 0) + shape, np.int64))


@_op("Tile")
def _tile(g: Graph) -> None:
    x = _anything(g)
    if x.rank:
        g.add("Tile", x, np.asarray([g.pick((1, 1, 2, 3)) for _ in range(x.rank)], np.int64))


@_op("Slice")
def _slice(g: Graph) -> None:
    x = _anything(g, (4, 4, 3, 2, 1))
    axes = [int(a) for a in g.rng.permutation(x.rank)[: g.whole(1, 2)]]
    starts, ends, steps = [], [], []
    for axis in axes:
        size = x.shape[axis]
        low, high = sorted((g.whole(0, size), g.whole(0, size)))
        step = g.pick((1, 1, 1, 2, -1, -2)) if g.opset >= 10 else 1
        ends_at = g.pick((high, 2**31 - 1, high - size if high < size else size))
        low, ends_at = (low, ends_at) if step > 0 else (high, low - 1 if low else -(2**31))
        starts.append(low), ends.append(ends_at), steps.append(step)  # type: ignore[func-returns-value]
    if g.opset < 10:
        g.add("Slice", x, starts=starts, ends=ends, axes=axes)
    else:
        index = g.pick((np.int32, np.int64))
        more = [np.array(steps, index)] if any(s != 1 for s in steps) or g.chance(0.3) else []
        g.add("Slice", x, *(np.array(a, index) for a in (starts, ends, axes)), *more)


@_op("Pad")
def _pad(g: Graph) -> None:
    x = g.take(ranks=(4, 4, 3, 2)) if g.chance(0.9) else g.take(*BYTES, np.int32, ranks=(4, 2))
    axes = [a for a in range(x.rank) if g.chance(0.7 if a > 1 else 0.15)]
    value = g.pick((0, 0, 0, g.pick((1, 2)), -np.inf)) if x.dtype.kind not in "iu" else g.pick((0, 3))
    pads = np.zeros((2, x.rank), np.int64)
    pads[:, axes] = g.rng.integers(0, 3, (2, len(axes)))
    if g.chance(0.15):
        pads[:, axes] = g.rng.integers(-1, 2, (2, len(axes)))
    mode = {} if g.chance(0.7) else {"mode": g.pick(("constant", "edge", "reflect", *["wrap"] * (g.opset >= 19)))}
    if g.opset < 11:
        y = g.add("Pad", x, pads=pads.reshape(-1).tolist(), value=float(value), **mode)
    elif g.opset >= 18 and g.chance(0.3):
        y = g.add("Pad", x, pads[:, axes].reshape(-1), np.array(value, x.dtype), np.array(axes, np.int64), **mode)
    else:
        y = g.add("Pad", x, pads.reshape(-1), np.array(value, x.dtype) if value or g.chance(0.3) else None, **mode)
    if g.chance(0.5) and y.rank == 4:  # what padding is fused into
        _pool_of(g, y, "MaxPool" if value else g.pick(("MaxPool", "AveragePool")))


@_op("LSTM", "GRU")
def _recurrent(g: Graph, op: str) -> None:
    x, gates, hidden = g.take(ranks=(3,)), 4 if op == "LSTM" else 3, g.pick((1, 4, 17))
    d, n = g.pick((1, 1, 2)), x.shape[1]
    named = "bidirectional" if d == 2 else g.pick(("forward", "reverse"))
    more: dict[str, Any] = {"hidden_size": hidden, "direction": named}
    if op == "GRU" and g.chance(0.5):
        more["linear_before_reset"] = 1
    if g.chance(0.1):
        more["clip"] = 0.5
    weights = [g.array((d, gates * hidden, k), x.dtype, 0.4) for k in (x.shape[2], hidden)]
    bias = g.array((d, 2 * gates * hidden), x.dtype) if g.chance(0.7) else None
    lengths = np.full(n, x.shape[0], np.int32) if g.chance(0.2) else None
    states = [g.operand(g.array((d, n, hidden), x.dtype)) if g.chance(0.4) else None for _ in range(gates - 2)]
    outputs = 1 + (op == "LSTM") + g.chance(0.5)
    g.add(op, x, *weights, bias, lengths, *states, outputs=outputs, **more)


@_op("DepthToSpace", "SpaceToDepth")
def _blocks(g: Graph, op: str) -> None:
    x, size = _anything(g, (4,)), g.pick((1, 2, 3))
    if op == "SpaceToDepth":
        g.add(op, x, blocksize=size)
    else:
        g.add(op, x, blocksize=size, **({"mode": g.pick(("DCR", "CRD"))} if g.opset >= 11 and g.chance(0.7) else {}))


@_op(
    *("ReduceMean", "ReduceSum", "ReduceMax", "ReduceMin", "ReduceProd", "ReduceL1", "ReduceL2", "ReduceSumSquare"),
    *("ReduceLogSum", "ReduceLogSumExp"),
)
def _reduce(g: Graph, op: str) -> None:
    x = g.take(ranks=(4, 4, 3, 2, 1))
    if op in ("ReduceSum", "ReduceMax", "ReduceMin") and g.chance(0.15):
        x = _exact(g, np.int64, np.int32, ranks=(4, 3, 2, 1))
    if op == "ReduceLogSum":
        x = g.add("Add", g.add("Abs", x), np.asarray(0.5, x.dtype))
    if op == "ReduceProd":  # of many, it leaves the range
        x = g.add("Tanh", x)
    axes = [2, 3] if x.rank == 4 and g.chance(0.4) else [a for a in range(x.rank) if g.chance(0.5)]
    more = {"keepdims": g.pick((0, 1))} if g.chance(0.7) else {}
    if g.opset >= 18 and g.chance(0.15):
        more["noop_with_empty_axes"] = g.pick((0, 1))
    _with_axes(g, op, x, axes if axes and g.chance(0.9) else None, since=13 if op == "ReduceSum" else 18, **more)


@_op("Resize", "Upsample")
def _resize(g: Graph, op: str) -> None:
    rank = g.pick((4, 4, 4, 3))
    x = g.take(ranks=(rank,)) if g.chance(0.85) else g.bytes((rank,))
    modern = op == "Resize" and g.opset >= 11
    mode = g.pick(("nearest", "linear", "linear", *["cubic"] * (modern and x.dtype != np.uint8 and x.dtype != np.int8)))
    least = 1 if op == "Upsample" else 0
    ratios = [g.pick((1.0, 2.0, 3.0, 1.5, 0.5, 0.6, 1 / 3, 2 / 3, 0.75, 9 / 7, g.number(0.4, 2.5))) for _ in "hw"]
    scales = np.array([1, 1, *(max(r, least) for r in ratios)][:rank], np.float32)
    if op == "Upsample":
        if g.opset < 9:
            g.add(op, x, scales=scales.tolist(), mode=mode)
        else:
            g.add(op, x, scales, mode=mode)
        return
    if g.opset < 11:
        g.add(op, x, scales, mode=mode)
        return
    modes = ["half_pixel", "asymmetric", "align_corners", "pytorch_half_pixel"]
    modes += ["half_pixel_symmetric"] * (g.opset >= 19)
    more: dict[str, Any] = {"mode": mode}
    if g.chance(0.8):
        more["coordinate_transformation_mode"] = g.pick(modes) if g.chance(0.9) else "half_pixel_symmetric"
    if mode == "nearest" and g.chance(0.7):
        more["nearest_mode"] = g.pick(("floor", "ceil", "round_prefer_floor", "round_prefer_ceil"))
    if mode == "cubic" and g.chance(0.5):
        more |= {"cubic_coeff_a": g.pick((-0.5, -0.75, -0.6)), "exclude_outside": g.pick((0, 1))}
    if mode != "nearest" and g.opset >= 18 and g.chance(0.3):
        more["antialias"] = 1
    roi = np.zeros(0, "f4") if g.opset < 13 or g.chance(0.3) else None
    if g.chance(0.5):
        sizes = np.array([*x.shape[:2], *(g.pick(SIDES) for _ in x.shape[2:])], np.int64)
        if g.opset >= 18 and g.chance(0.3):
            more["keep_aspect_ratio_policy"] = g.pick(("stretch", "not_larger", "not_smaller"))
            more["axes"] = list(range(2, rank))
            sizes = sizes[2:]
        g.add(op, x, roi, np.zeros(0, "f4") if g.opset < 13 else None, sizes, **more)
    elif g.opset >= 18 and g.chance(0.3):
        g.add(op, x, roi, scales[2:], axes=list(range(2, rank)), **more)
    else:
        g.add(op, x, roi, scales, **more)


@_op("GridSample")
def _grid_sample(g: Graph) -> None:
    """No point is half-way between two pixels, where rounding decides."""
    x = g.take(ranks=(4,))
    points = g.array((x.shape[0], g.pick(SIDES), g.pick(SIDES), 2), x.dtype, 0.8)
    names = ("bilinear", "nearest") if g.opset < 20 else ("linear", "nearest")
    how = {"mode": g.pick(names), "padding_mode": g.pick(("zeros", "border", "reflection"))}
    g.add("GridSample", x, g.add("Tanh", points) if g.chance(0.3) else points, align_corners=g.pick((0, 1)), **how)


# ---------------------------------------------------------------- windows and products


def _window(g: Graph, rank: int, pool: bool = False) -> tuple[list[int], dict[str, Any]]:
    kernel = [g.pick((1, 2, 3, 3, 5)) for _ in range(rank)]
    given: dict[str, Any] = {}
    if g.chance(0.6):
        given["strides"] = [g.pick((1, 2, 3)) for _ in range(rank)]
    if g.chance(0.25) and (not pool or g.opset >= 10):
        given["dilations"] = [g.pick((1, 2)) for _ in range(rank)]
    if g.chance(0.55):
        most = [k - 1 if pool else 2 for k in kernel]
        given["pads"] = [min(m, g.whole(0, 2)) for m in (*most, *most)]
    elif g.chance(0.3):
        given["auto_pad"] = g.pick(("SAME_UPPER", "SAME_LOWER", "VALID"))
    if pool:
        given["kernel_shape"] = kernel
        if "auto_pad" in given:  # the peers ignore dilations there
            given.pop("dilations", None)
    return kernel, given


def _weights(g: Graph, x: Value, kernel: list[int], dtype: Any) -> tuple[Array, dict[str, Any]]:
    """The weight of a convolution: dense, depthwise or grouped."""
    c = x.shape[1]
    groups = g.pick([k for k in (1, 1, 1, 2, 3, c) if k and c % k == 0]) if c else 1
    oc = groups * g.pick((1, 2)) if groups == c > 1 else groups * g.pick((1, 2, 3, 5, 16 if groups == 1 else 4))
    wei = g.array((oc, c // groups, *kernel), dtype, (1 + c // groups * np.prod(kernel)) ** -0.5)
    if np.dtype(dtype).kind in "iu":
        wei = g.array((oc, c // groups, *kernel), dtype)
    return wei, {"group": groups} if groups > 1 else {}


@_op("Conv")
def _conv(g: Graph) -> None:
    x = g.take(ranks=(4, 4, 4, 3))
    kernel, given = _window(g, x.rank - 2)
    wei, groups = _weights(g, x, kernel, g.float)
    weight: Any = wei
    if g.kind == "qdq":
        weight = _qdq_weight(g, wei, 0)
    more: list[Any] = [g.array(wei.shape[:1], g.float)] if g.chance(0.6) else []
    if g.kind == "qdq" and more:
        more = _qdq_bias(g, x, weight, wei.shape[0])
    y = g.add("Conv", x, weight, *more, **given, **groups)
    if g.chance(0.3):  # what is fused into it
        g.add(*g.pick((("Relu", y), ("Sigmoid", y), ("Add", y, y), ("Add", y, x))))


@_op("ConvTranspose")
def _conv_transpose(g: Graph) -> None:
    x = g.take(ranks=(4, 4, 3))
    kernel, given = _window(g, x.rank - 2)
    groups = g.pick([k for k in (1, 1, 2, 3, x.shape[1]) if k and x.shape[1] % k == 0]) if x.shape[1] else 1
    count = g.pick((1, 2, 3, 5))
    weight = g.array((x.shape[1], count, *kernel), g.float, (1 + x.shape[1] // groups * np.prod(kernel)) ** -0.5)
    strides = given.get("strides", [1] * len(kernel))
    if g.chance(0.3):
        given["output_padding"] = [g.whole(0, stride - 1) for stride in strides]
    if g.chance(0.15) and "w" not in g.dynamic and "h" not in g.dynamic:
        given["output_shape"] = [max(1, n * s - g.whole(0, 1)) for n, s in zip(x.shape[2:], strides, strict=True)]
    more = [g.array((count * groups,), g.float)] if g.chance(0.6) else []
    y = g.add("ConvTranspose", x, weight, *more, group=groups, **given)
    if g.chance(0.3):
        g.add("Relu", y)


@_op(f"{MS}.ConvTransposeWithDynamicPads")
def _conv_transpose_by_pads(g: Graph) -> None:
    x, count = g.take(np.float32, ranks=(4,)), g.pick((1, 2, 3))
    if 0 in x.shape:
        raise Skip
    weight, bias = g.array((x.shape[1], count, 3, 3), "f4", x.shape[1] ** -0.5), g.array((count,), "f4")
    like = "f4", (x.shape[0], count, *x.shape[2:])
    g.contributed("ConvTransposeWithDynamicPads", like, x, weight, np.array([1, 0, 1, 2]), bias)


def _qdq_weight(g: Graph, value: Array, axis: int) -> Value:
    """A weight as quantizers write it: symmetric int8 most often, else any zero point, or uint8."""
    if g.opset < 10:
        raise Skip
    dtype = np.dtype(g.pick(("i1", "i1", "u1")))
    count = value.shape[axis] if g.opset >= 13 and g.chance(0.5) else None
    scale, zero = g.quantization(dtype, count, 0.005)
    if dtype == np.int8 and g.chance(0.7):
        zero = g.constant(np.zeros(zero.shape, dtype))
    integers = g.constant(g.array(value.shape, dtype))
    more = {} if count is None else {"axis": axis}
    if g.chance(0.1) and count is None:  # quantized in the file
        return g.add("DequantizeLinear", g.add("QuantizeLinear", value, scale, zero), scale, zero)  # type: ignore[no-any-return]
    return g.add("DequantizeLinear", integers, scale, zero, **more)  # type: ignore[no-any-return]


def _qdq_bias(g: Graph, x: Value, weight: Value, count: int) -> list[Value]:
    """A bias of the scale of the sums, as quantizers write it; blockconv would round any other to that."""
    nodes = {node.output[0]: node for node in g.nodes if node.op_type == "DequantizeLinear"}
    scales = [g.constants.get(nodes[v.name].input[1]) for v in (x, weight) if v.name in nodes]
    if len(scales) < 2 or scales[0] is None or scales[1] is None or scales[0].size > 1:
        return []
    scale = g.constant((scales[0] * scales[1]).astype("f4"))
    return [g.add("DequantizeLinear", g.array((count,), np.int32) * 50, scale, **({"axis": 0} if scale.rank else {}))]


@_op("MaxPool", "AveragePool")
def _pool(g: Graph, op: str) -> None:
    own = BYTES if op == "MaxPool" and g.opset >= 12 and g.chance(0.15) else ()
    _pool_of(g, g.take(*own, ranks=(4, 4, 4, 3)), op)


def _pool_of(g: Graph, x: Value, op: str) -> None:
    if x.rank < 3:
        raise Skip
    _, given = _window(g, x.rank - 2, True)
    if op == "AveragePool" and g.opset < 19:
        given.pop("dilations", None)
    if g.opset >= 10 and "auto_pad" not in given and g.chance(0.3):
        given["ceil_mode"] = 1
    if op == "AveragePool" and g.chance(0.4):
        given["count_include_pad"] = 1
    g.add(op, x, **given)


@_op("GlobalAveragePool", "GlobalMaxPool")
def _global(g: Graph, op: str) -> None:
    g.add(op, g.take(ranks=(4, 4, 3)))


@_op("Gemm")
def _gemm(g: Graph) -> None:
    x = g.take(ranks=(2,))
    given: dict[str, Any] = {k: g.number(0.3, 2) for k in ("alpha", "beta") if g.chance(0.25)}
    if g.chance(0.15):
        given["transA"] = 1
    rows, k = x.shape[:: -1 if "transA" in given else 1]
    n = g.pick((1, 2, 5, 16, 17))
    turned = g.chance(0.5)
    wei: Any = g.array((n, k) if turned else (k, n), g.float)
    if g.kind != "qdq" and g.chance(0.2):
        wei = g.input(wei.shape, g.float, wei)
    if g.kind == "qdq":
        wei = _qdq_weight(g, wei, 0 if turned else 1)
    shape = g.pick(((n,), (1, n), (), (1,), (rows, 1), (rows, n)))
    more = [g.array(shape, g.float)] if g.opset < 11 or (g.kind != "qdq" and g.chance(0.7)) else []
    g.add("Gemm", x, wei, *more, **given, **({"transB": 1} if turned else {}))


@_op("MatMul")
def _matmul(g: Graph) -> None:
    x = g.take(ranks=(2, 3, 3, 4, 1))
    if g.kind == "qdq" and g.chance(0.8):
        g.add("MatMul", x, _qdq_weight(g, np.zeros(_factor(g, x, False), "f4"), 1))
    elif g.chance(0.4):  # of two that flow
        y = g.add("Transpose", x, perm=[*range(x.rank - 2), x.rank - 1, x.rank - 2]) if x.rank > 1 else x
        g.add("MatMul", *((x, y) if g.chance(0.6) else (y, x)))
    else:
        g.add("MatMul", x, g.array(_factor(g, x), g.float))


@_op("Einsum")
def _einsum(g: Graph) -> None:
    x = g.take(ranks=(4,))
    n, c, h, w = x.shape
    k = g.pick((1, 3, 8))
    equation, shape = g.pick(
        (
            *(("nchw,nckw->nchk", (n, c, k, w)), ("nchw,nkhc->nhwk", (n, k, h, c)), ("nchw,kc->nkhw", (k, c))),
            *(("nchw,kc->nk", (k, c)), ("...w,wk->...k", (w, k))),
        )
    )
    y = g.input(shape, g.float) if g.chance(0.6) else g.array(shape, g.float)
    g.add("Einsum", x, y, equation=equation)


@_op("Attention")
def _attention(g: Graph) -> None:
    """Named, or spelled: the second is what a pass makes one op of."""
    q = g.take(ranks=(4,))
    n, heads, rows, width = q.shape
    if 0 in q.shape:
        raise Skip
    keys, out = g.pick((1, 3, 8, 17)), g.pick((1, 4, 8))
    shared = g.pick((1, heads))
    k, v = (g.input((n, shared, keys, size), g.float) for size in (width, out))
    mask = g.array(g.pick(((keys,), (rows, keys), (1, heads, rows, keys))), g.float) if g.chance(0.5) else None
    if g.opset >= 23 and g.chance(0.6):
        g.add("Attention", q, k, v, mask, scale=g.number(0.1, 1), is_causal=int(g.chance(0.3)))
        return
    scores = g.add("MatMul", q, g.add("Transpose", k, perm=[0, 1, 3, 2]))
    if g.chance(0.7):
        scores = g.add(g.pick(("Mul", "Div")), scores, np.asarray(g.number(0.2, 2), g.float))
    if mask is not None:
        scores = g.add("Add", scores, mask)
    if g.opset >= 13:
        g.add("MatMul", g.add("Softmax", scores, axis=-1), v)


@_op(f"{MS}.FusedMatMul")
def _fused_matmul(g: Graph) -> None:
    x = g.take(np.float32, ranks=(2, 3, 4))
    turned = g.chance(0.5)
    given = {"alpha": g.number(0.3, 2)} if g.chance(0.5) else {}
    rows = x.shape[:-1]
    if g.chance(0.3):  # the axis of rows is the first
        rows = (*rows[1:], rows[0])
        given |= {"transBatchA": 1, "transBatchB": int(turned)}
    y = x if turned else g.input((x.shape[-1], rows[-1]), np.float32)
    g.contributed("FusedMatMul", ("f4", (*rows, rows[-1])), x, y, **given, **({"transB": 1} if turned else {}))


@_op(f"{MS}.Gelu", f"{MS}.BiasGelu", f"{MS}.FastGelu", f"{MS}.QuickGelu")
def _fused_gelu(g: Graph, op: str) -> None:
    x, name = g.take(np.float32, ranks=(4, 3, 2)), op.removeprefix(f"{MS}.")
    bias = [g.array(x.shape[-1:], "f4")] if name == "BiasGelu" or (name == "FastGelu" and g.chance(0.5)) else []
    more = {"alpha": g.number(1, 2)} if name == "QuickGelu" and g.chance(0.5) else {}
    g.contributed(name, ("f4", x.shape), x, *bias, **more)


@_op(f"{MS}.SkipLayerNormalization", f"{MS}.SkipSimplifiedLayerNormalization")
def _skip_layer_norm(g: Graph, op: str) -> None:
    x, name = g.take(np.float32, ranks=(3,)), op.removeprefix(f"{MS}.")
    factors = (g.array(x.shape[-1:], "f4") for _ in ("gc" if "Simplified" in name else "gbc"))
    other = g.input(x.shape, np.float32) if g.chance(0.5) else g.array(x.shape, "f4")
    g.contributed(name, ("f4", x.shape), x, other, *factors, epsilon=1e-3)


@_op(f"{MS}.EmbedLayerNormalization")
def _embedded(g: Graph) -> None:
    ids = g.input(g.dims(2), np.int32)
    g.inputs[ids.name] = g.inputs[ids.name][0], lambda sizes: g.rng.integers(0, 5, sizes).astype("i4")
    if 0 in ids.shape:
        raise Skip
    tables = (g.array((rows, 8), "f4") for rows in (5, 64, 5))
    factors = (g.array((8,), "f4") for _ in "gb")
    g.contributed("EmbedLayerNormalization", ("f4", (*ids.shape, 8)), ids, ids, *tables, *factors, epsilon=1e-3)


@_op(f"{MS}.RotaryEmbedding")
def _rotary(g: Graph) -> None:
    x = g.take(np.float32, ranks=(3,))
    if 0 in x.shape or x.shape[2] % 4:
        raise Skip
    tables = (g.array((64, x.shape[2] // 4), "f4") for _ in "cs")
    g.contributed("RotaryEmbedding", ("f4", x.shape), x, np.array([3]), *tables, interleaved=g.pick((0, 1)))


@_op(f"{MS}.Attention", f"{MS}.MultiHeadAttention")
def _fused_attention(g: Graph, op: str) -> None:
    x = g.take(np.float32, ranks=(3,))
    n, rows, width = x.shape
    if 0 in x.shape:
        raise Skip
    heads = 2 if width % 2 == 0 and g.chance(0.7) else 1
    mask = g.input((n, rows), np.int32) if g.chance(0.5) else None
    added = g.array((1, heads, rows, rows), "f4") if g.chance(0.3) else None
    given = {"num_heads": heads, **({"scale": g.number(0.2, 1)} if g.chance(0.3) else {})}
    given |= {"unidirectional": 1} if g.chance(0.3) else {}
    given |= {"mask_filter_value": -30.0} if mask else {}  # of -10000, rows of hidden keys have rounding errors
    bias = g.array((3 * width,), "f4")
    if op.endswith(".Attention"):
        weight = g.array((width, 3 * width), "f4", width**-0.5)
        g.contributed("Attention", ("f4", x.shape), x, weight, bias, mask, None, added, **given)
    else:
        keys = x if g.chance(0.5) else g.input(x.shape, np.float32)
        bias = bias if g.chance(0.5) else None
        g.contributed("MultiHeadAttention", ("f4", x.shape), x, keys, keys, bias, mask, added, **given)


@_op("SimplifiedLayerNormalization")
def _simplified(g: Graph) -> None:
    x = g.take(np.float32, ranks=(4, 3, 2))
    g.contributed("SimplifiedLayerNormalization", ("f4", x.shape), x, g.array(x.shape[-1:], "f4"), domain="", axis=-1)


_POOLS = ("MaxPool", "AveragePool", "GlobalMaxPool", "GlobalAveragePool")


@_op(*(f"{MS}.nchwc.{name}" for name in (*_POOLS, "ReorderInput", "ReorderOutput", "Conv", "Upsample")))
def _in_blocks(g: Graph, op: str) -> None:
    """An op between two reorders, as other ops would see the blocks. Any weight of whole blocks is one in blocks.

    Not of images without pixels, of which these ops end ONNX Runtime's process.
    """
    x, (domain, _, name) = g.take(np.float32, ranks=(4,)), op.rpartition(".")
    if 0 in x.shape or any(0 in sizes for sizes in g.symbols.values()):
        raise Skip
    last, (n, c, h, w) = g.chance(0.3), x.shape
    if last:
        n, h, w, c = x.shape
    wide = -(-c // BLOCK) * BLOCK
    y = g.contributed("ReorderInput", None, x, domain=domain, channels_last=int(last))
    if name == "Conv":
        k, depthwise = g.pick((1, 3)), g.chance(0.3)
        shape = (wide, 1, k, k) if depthwise else (g.pick((1, 2)) * BLOCK, wide, k, k)
        given = {"pads": [k // 2] * 4, "kernel_shape": [k, k], "group": wide if depthwise else 1}
        more = [g.array(shape[:1], "f4")] if g.chance(0.5) else []
        activated = {"activation": g.pick(("Relu", "Tanh"))} if g.chance(0.5) else {}
        y = g.contributed(
            name, None, y, g.constant(g.array(shape, "f4", 0.3)), *more, domain=domain, **given, **activated
        )
        c = shape[0] - g.pick((0, 3))
    elif name == "Upsample":
        by = g.pick(((1, 2), (2, 2), (3, 1)))
        mode = g.pick(
            ({}, {"mode": "linear", "coordinate_transformation_mode": g.pick(("half_pixel", "align_corners"))})
        )
        y, h, w = g.contributed(name, None, y, domain=domain, scales=[1, 1, *by], **mode), h * by[0], w * by[1]
    elif name.startswith("Global"):
        y, h, w = g.contributed(name, None, y, domain=domain), 1, 1
    elif name in _POOLS:
        k = min(2, h, w)
        y = g.contributed(name, None, y, domain=domain, kernel_shape=[k, k], strides=[k, k])
        h, w = h // k, w // k
    last = g.chance(0.3)
    like = (n, h, w, c) if last else (n, c, h, w)
    g.contributed("ReorderOutput", ("f4", like), y, domain=domain, channels=c, channels_last=int(last))


@_op(f"{MS}.FusedConv")
def _fused_conv(g: Graph) -> None:
    """As wide as its input, so that what is added has a known shape."""
    x = g.take(np.float32, ranks=(4,))
    if 0 in x.shape:
        raise Skip
    k, out = g.pick((1, 3)), g.pick((1, 4, 8))
    shape = (x.shape[0], out, *x.shape[2:])
    more = [g.array((out,), "f4"), *([g.input(shape, np.float32)] if g.chance(0.5) else [])]
    given = {"pads": [k // 2] * 4, "kernel_shape": [k, k], "group": 1, "activation": g.pick(("Relu", "Tanh"))}
    g.contributed("FusedConv", ("f4", shape), x, g.array((out, x.shape[1], k, k), "f4", 0.3), *more, **given)


@_op(f"{MS}.FusedGemm")
def _fused_gemm(g: Graph) -> None:
    x, n = g.take(np.float32, ranks=(2,)), g.pick((1, 5, 16))
    wei, given = g.array((n, x.shape[1]), "f4", 0.3), {"transB": 1, "activation": g.pick(("Relu", "Tanh"))}
    g.contributed("FusedGemm", ("f4", (x.shape[0], n)), x, wei, g.array((n,), "f4"), **given)


def _factor(g: Graph, x: Value, batches: bool = True) -> tuple[int, ...]:
    """The shape of a second factor of a product."""
    k, n = x.shape[-1], g.pick((1, 2, 5, 16))
    if batches and x.rank > 2 and g.chance(0.3):
        return (*x.shape[:-2], k, n) if g.chance(0.7) else (1, k, n)
    return (k,) if batches and g.chance(0.1) else (k, n)


# ---------------------------------------------------------------- integers


@_op("QuantizeLinear", "com.microsoft.QuantizeLinear")
def _quantize(g: Graph, op: str) -> None:
    x = g.take(np.float32)
    if op.startswith(MS):
        scale, zero = g.quantization()
        g.contributed("QuantizeLinear", (zero.dtype, x.shape), x, scale, zero)
        return
    per_axis = g.opset >= 13 and x.rank > 1 and g.chance(0.2)
    scale, zero = g.quantization(count=x.shape[1] if per_axis else None)
    y = g.add(op, x, scale, zero if per_axis or g.chance(0.9) else None, **({"axis": 1} if per_axis else {}))
    if g.chance(0.5):
        g.add("DequantizeLinear", y, scale, zero, **({"axis": 1} if per_axis else {}))


@_op("DequantizeLinear", "com.microsoft.DequantizeLinear")
def _dequantize(g: Graph, op: str) -> None:
    x = g.bytes()
    if op.startswith(MS):
        g.contributed("DequantizeLinear", ("f4", x.shape), x, *g.quantization(x.dtype))
        return
    per_axis = g.opset >= 13 and x.rank > 1 and g.chance(0.2)
    scale, zero = g.quantization(x.dtype, x.shape[1] if per_axis else None)
    g.add(op, x, scale, zero if g.chance(0.9) else None, **({"axis": 1} if per_axis else {}))


@_op("DynamicQuantizeLinear")
def _dynamic(g: Graph) -> None:
    y, scale, zero = g.add("DynamicQuantizeLinear", g.take(np.float32), outputs=3)
    if not g.chance(0.7) or y.rank < 2:
        return
    if y.rank == 4 and g.chance(0.6):
        kernel, given = _window(g, 2)
        wei, groups = _weights(g, y, kernel, np.int8)
        y = g.add("ConvInteger", y, wei, zero, **given, **groups)
    else:
        y = g.add("MatMulInteger", y, g.array(_factor(g, y), np.int8), zero)
    g.add("Mul", g.add("Cast", y, to=1), g.add("Mul", scale, np.float32(0.01)))


@_op("ConvInteger")
def _conv_integer(g: Graph) -> None:
    x = g.bytes((4, 4, 3))
    kernel, given = _window(g, x.rank - 2)
    wei, groups = _weights(g, x, kernel, g.pick(BYTES))
    zeros = [np.array(g.whole(0, 9), x.dtype) if g.chance(0.8) else None]
    if g.chance(0.5):
        zeros.append(np.array(g.whole(0, 9) + (128 if wei.dtype == np.uint8 else 0), wei.dtype))
    g.add("ConvInteger", x, wei, *zeros, **given, **groups)


@_op("MatMulInteger")
def _matmul_integer(g: Graph) -> None:
    x = g.bytes((2, 3, 4))
    wei = g.array(_factor(g, x), g.pick(BYTES))
    zeros = [np.array(g.whole(0, 9), x.dtype) if g.chance(0.8) else None]
    if g.chance(0.5):
        zeros.append(np.array(g.whole(0, 9) + (128 if wei.dtype == np.uint8 else 0), wei.dtype))
    g.add("MatMulInteger", x, wei, *zeros)


@_op("QLinearConv", "com.microsoft.QLinearConv")
def _qlinear_conv(g: Graph, op: str) -> None:
    x = g.bytes((4, 4, 3))
    kernel, given = _window(g, x.rank - 2)
    wei, groups = _weights(g, x, kernel, "i1" if x.dtype == np.int8 else g.pick(BYTES))
    per_channel = wei.dtype == np.int8 and g.chance(0.5)
    scale, zero = g.quantization(wei.dtype, wei.shape[0] if per_channel else None, 0.005)
    if wei.dtype == np.int8 and (per_channel or g.chance(0.6)):
        zero = g.constant(np.zeros(zero.shape, "i1"))
    bias = [g.array(wei.shape[:1], np.int32) * 50] if g.chance(0.5) else []
    y = g.quantization(x.dtype, None, 0.05)
    y = g.add("QLinearConv", x, *g.quantization(x.dtype), wei, scale, zero, *y, *bias, **given, **groups)
    if op.startswith(MS):
        if len(given.get("dilations", ())) == 1:
            raise Skip
        g.nodes[-1].domain = MS


@_op("QLinearMatMul")
def _qlinear_matmul(g: Graph) -> None:
    x = g.bytes((2, 3, 4))
    wei = g.array(_factor(g, x), "i1" if x.dtype == np.int8 else g.pick(BYTES))
    ends = g.quantization(wei.dtype, None, 0.005)
    g.add("QLinearMatMul", x, *g.quantization(x.dtype), wei, *ends, *g.quantization(x.dtype, None, 0.05))


@_op(f"{MS}.QLinearAdd", f"{MS}.QLinearMul")
def _qlinear_binary(g: Graph, op: str) -> None:
    x = g.bytes()
    other: Any = x if g.chance(0.4) else g.array(tuple(s if g.chance(0.7) else 1 for s in x.shape), x.dtype)
    ends = [g.quantization(x.dtype, None, low) for low in (0.01, 0.01, 0.03)]
    g.contributed(op.removeprefix(f"{MS}."), (x.dtype, x.shape), x, *ends[0], other, *ends[1], *ends[2])


@_op(f"{MS}.QLinearWhere")
def _qlinear_where(g: Graph) -> None:
    x = g.bytes()
    shown, other = g.array(x.shape, "f4") > 0, g.array(tuple(s if g.chance(0.7) else 1 for s in x.shape), x.dtype)
    ends = [g.quantization(x.dtype, None, low) for low in (0.01, 0.01, 0.03)]
    g.contributed("QLinearWhere", (x.dtype, x.shape), shown, x, *ends[0], other, *ends[1], *ends[2])


@_op(f"{MS}.QLinearConcat")
def _qlinear_concat(g: Graph) -> None:
    x = g.bytes((4, 3, 2))
    axis = g.whole(0, x.rank - 1)
    parts = [x, g.constant(g.array((*x.shape[:axis], g.pick((1, 3)), *x.shape[axis + 1 :]), x.dtype))]
    size = sum(p.shape[axis] for p in parts)
    flat = [v for part in parts for v in (part, *g.quantization(x.dtype))]
    shape = (*x.shape[:axis], size, *x.shape[axis + 1 :])
    g.contributed("QLinearConcat", (x.dtype, shape), *g.quantization(x.dtype, None, 0.02), *flat, axis=axis)


@_op(f"{MS}.QLinearLeakyRelu", f"{MS}.QLinearSigmoid", f"{MS}.QLinearSoftmax")
def _qlinear_unary(g: Graph, op: str) -> None:
    name = op.removeprefix(f"{MS}.")
    x = g.bytes((4, 3, 2)) if name == "QLinearSoftmax" else g.bytes()
    given: dict[str, Any] = {"alpha": g.number(0.01, 0.5)} if name == "QLinearLeakyRelu" else {}
    if name == "QLinearSoftmax":
        given = {"axis": g.pick((-1, x.rank - 1, g.whole(0, x.rank - 1))), "opset": g.pick((13, 13, 11))}
    ends = g.quantization(x.dtype), g.quantization(x.dtype, None, 0.02 if name == "QLinearLeakyRelu" else 0.002)
    g.contributed(name, (x.dtype, x.shape), x, *ends[0], *ends[1], **given)


@_op(f"{MS}.QLinearAveragePool", f"{MS}.QLinearGlobalAveragePool", f"{MS}.NhwcMaxPool")
def _qlinear_pool(g: Graph, op: str) -> None:
    name, x = op.removeprefix(f"{MS}."), g.bytes((4,))
    last = name == "NhwcMaxPool" or g.chance(0.4)
    n, c, *image = (x.shape[0], x.shape[3], *x.shape[1:3]) if last else x.shape
    ends = [*g.quantization(x.dtype), *g.quantization(x.dtype, None, 0.015)] if name != "NhwcMaxPool" else []
    more: dict[str, Any] = {"channels_last": int(last)} if ends else {}
    if name == "QLinearGlobalAveragePool":
        size = [1, 1]
    else:
        kernel, given = _window(g, 2, True)
        given = {k: v for k, v in given.items() if k != "auto_pad" and (k != "dilations" or not ends)}
        pads, strides = given.get("pads", [0] * 4), given.get("strides", [1, 1])
        reach = [d * (k - 1) + 1 for d, k in zip(given.get("dilations", [1, 1]), kernel, strict=True)]
        size = [(s + b + e - r) // t + 1 for s, b, e, r, t in zip(image, pads, pads[2:], reach, strides, strict=False)]
        more |= given
    if min(size) < 1 or 0 in x.shape:
        raise Skip
    g.contributed(name, (x.dtype, (n, *size, c) if last else (n, c, *size)), x, *ends, **more)


@_op(f"{MS}.QGemm")
def _qgemm(g: Graph) -> None:
    x = g.bytes((2,))
    n = g.pick((1, 5, 16))
    wei = g.array((x.shape[1], n), "i1" if x.dtype == np.int8 else g.pick(BYTES))
    ends = [*g.quantization(x.dtype), wei, *g.quantization(wei.dtype, None, 0.005)]
    bias = g.array((n,), np.int32) if g.chance(0.5) else None
    if g.chance(0.3):
        g.contributed("QGemm", ("f4", (x.shape[0], n)), *([x, *ends, bias] if bias is not None else [x, *ends]))
    else:
        g.contributed("QGemm", (x.dtype, (x.shape[0], n)), x, *ends, bias, *g.quantization(x.dtype, None, 0.05))


@_op(f"{MS}.DynamicQuantizeMatMul")
def _dynamic_matmul(g: Graph) -> None:
    x = g.take(np.float32, ranks=(2, 3))
    n = g.pick((1, 5, 16))
    wei = g.array((x.shape[-1], n), g.pick(BYTES))
    scale, zero = g.quantization(wei.dtype, n if g.chance(0.4) else None, 0.005)
    more = [zero if g.chance(0.8) else None, *([g.array((n,), "f4")] if g.chance(0.5) else [])]
    g.contributed("DynamicQuantizeMatMul", ("f4", (*x.shape[:-1], n)), x, wei, scale, *more)


@_op(f"{MS}.MatMulIntegerToFloat")
def _matmul_to_float(g: Graph) -> None:
    x = g.bytes((2, 3))
    n = g.pick((1, 5, 16))
    wei = g.array((x.shape[-1], n), "i1" if x.dtype == np.int8 else g.pick(BYTES))
    (s, z), (t, u) = g.quantization(x.dtype), g.quantization(wei.dtype, None, 0.005)
    more = [g.array((n,), "f4")] if g.chance(0.4) else []
    g.contributed("MatMulIntegerToFloat", ("f4", (*x.shape[:-1], n)), x, wei, s, t, z, u, *more)


@_op(f"{MS}.MatMulNBits")
def _matmul_of_bits(g: Graph) -> None:
    x, n, size, bits = g.take(np.float32, ranks=(2, 3)), g.pick((1, 5, 16)), g.pick((16, 32)), g.pick((4, 8))
    k, blocks = x.shape[-1], -(-x.shape[-1] // size)
    if not k or "w" in g.dynamic:  # the weight has as many rows
        raise Skip
    wei, scale = (
        g.array((n, blocks, size * bits // 8), "u1"),
        g.constant(g.rng.uniform(0.01, 0.1, n * blocks).astype("f4")),
    )
    more = [g.constant(g.array((n * -(-blocks * bits // 8),), "u1"))] if g.chance(0.5) else []
    given = {"K": k, "N": n, "bits": bits, "block_size": size}
    g.contributed("MatMulNBits", ("f4", (*x.shape[:-1], n)), x, g.constant(wei), scale, *more, **given)


def _is_plain(op: str) -> bool:
    """Whether ONNX's schema says enough of an op: it has one operand, and no attribute has to be given."""
    try:
        schema = defs.get_schema(op)
    except defs.SchemaError:
        return False
    return schema.min_input == schema.max_input == 1 and not any(a.required for a in schema.attributes.values())


def _plain(g: Graph, op: str) -> None:
    """Numbers among its attributes vary about their defaults."""
    x = g.take() if g.chance(0.9) else g.take(*BYTES, np.int32)
    numbers = [a for a in defs.get_schema(op).attributes.values() if a.type == defs.OpSchema.AttrType.FLOAT]
    g.add(op, x, **{a.name: a.default_value.f * g.number(0.3, 2.0) for a in numbers if g.chance(0.7)})


# The table of ops is the list: those that no function above puts are put by their schemas.
OPS.update({op: functools.partial(_plain, op=op) for op in TABLE if op not in OPS and _is_plain(op)})

# ---------------------------------------------------------------- models

_COMMON = ("Conv", "Add", "MaxPool", "AveragePool", "Resize", "Concat", "MatMul", "Relu", "Pad", "BatchNormalization")
_INTEGERS = tuple(name for name in OPS if "Q" in name or "Integer" in name or "Quantize" in name)


def _names(g: Graph) -> Iterator[str]:
    """The ops to try, in order."""
    for _ in range(80):
        if g.kind == "integers" and g.chance(0.65):
            yield g.pick(_INTEGERS)
        elif g.chance(0.35):
            yield g.pick(_COMMON)
        else:
            name = g.pick(list(OPS))
            if name not in _INTEGERS or g.kind in ("qdq", "integers") or g.chance(0.3):
                yield name


def of_version(op: str, opset: int, seed: int) -> Case:
    """A model of one op at an opset, with the ops that it needs before it."""
    g = Graph(seed)
    g.opset = opset
    for _ in range(200):
        g.nodes, g.values, g.constants, g.inputs = [], [], {}, {}
        g.values.append(g.input(g.dims(g.pick((4, 4, 3, 2))), g.float))
        try:
            OPS[op](g)
            return _case(g)
        except Skip:
            g.kind = g.pick(KINDS)
            g.float = FLOATS.get(g.kind, np.dtype("f4"))
    raise Skip


def generate(seed: int) -> Case:
    """The model and its inputs of a seed."""
    g = Graph(seed)
    wanted, made = g.pick((1, 1, 2, 3, 4, 5, 6, 8)), 0
    first = g.bytes() if g.kind == "integers" else g.input(g.dims(g.pick((4, 4, 4, 4, 3, 2, 2, 1, 5))), g.float)
    g.values.append(first)
    for name in _names(g):
        kept = len(g.nodes), dict(g.constants), dict(g.inputs), len(g.values)
        try:
            OPS[name](g)
            made += 1
            last = g.values[-1]
            if g.kind == "qdq" and last.dtype == np.float32 and g.chance(0.6):
                ends = g.quantization()
                g.add("DequantizeLinear", g.add("QuantizeLinear", last, *ends), *ends)
        except Skip:
            del g.nodes[kept[0] :], g.values[kept[3] :]
            g.constants, g.inputs = kept[1], kept[2]
        if made == wanted:
            break
    try:
        return _case(g)
    except Skip:  # nothing was made, and not even Identity takes the input
        return generate(seed + 1_000_003)


def _case(g: Graph) -> Case:
    if not any(v.name not in g.inputs for v in g.values):
        g.add("Identity", g.values[0])
    read = {name for node in g.nodes for name in node.input}
    outputs = [v for v in g.values if v.name not in g.inputs and (v.name not in read or g.chance(0.08))][-4:]
    inputs = {name: given for name, given in g.inputs.items() if name in read}
    sides = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(make((1,) * len(dims)).dtype), dims)
        for name, (dims, make) in inputs.items()
    ]
    gives = [helper.make_tensor_value_info(v.name, helper.np_dtype_to_tensor_dtype(v.dtype), None) for v in outputs]
    constants = [numpy_helper.from_array(value, name) for name, value in g.constants.items() if name in read]
    graph = helper.make_graph(g.nodes, "fuzz", sides, gives, constants)
    imports = [helper.make_opsetid("", g.opset)]
    ir = max(8, helper.find_min_ir_version_for(imports))
    imports += [helper.make_opsetid(domain, 1) for domain in sorted({node.domain for node in g.nodes} - {""})]
    model = helper.make_model(graph, opset_imports=imports, ir_version=ir)
    dynamic = any(isinstance(d, str) for dims, _ in inputs.values() for d in dims)
    feeds = tuple(
        {
            name: make(tuple(g.symbols[d][k] if isinstance(d, str) else d for d in dims))
            for name, (dims, make) in inputs.items()
        }
        for k in range(3 if dynamic else 1)
    )
    return Case(model, feeds, g.kind)
