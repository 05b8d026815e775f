"""Translators of products of matrices, which are convolutions of 1x1. See `ops`."""

import functools
import math
from collections.abc import Callable

import numpy as np

from blockconv.core.checks import Axes, Shape
from blockconv.core.python import zipped
from blockconv.core.types import Array
from blockconv.frontends.onnx.scope import Call, op
from blockconv.network import ops
from blockconv.network.emitter import Unsupported
from blockconv.network.lowering import PLAIN, Convolved
from blockconv.network.ops.rule import Tensor

op("Gemm", limits="floats, or constant B and C")(lambda call: gemm(call, call.x, 1, 2))


def gemm(call: Call, a: Tensor, b_at: int, c_at: int) -> Tensor:
    """alpha * A * B + beta * C, of a node whose operands `b_at` and `c_at` are B and C."""
    b = call.input(b_at)
    if a.rank != 2 or b.rank != 2:
        raise call.error("inputs", (a.shape, b.shape), "have to be matrices")
    if call.flows(b_at):
        y = _product(call)
    else:
        a = call.transposed(a, (1, 0), helps=True) if call["transA"] else a
        y = call.scaled(matmul(call, a, b_at, turned=call["transB"]), call.attribute("alpha", 1.0))
    if not call.has(c_at):
        return y
    c = call.input(c_at)
    if c.rank > 2 or any(size not in (1, n) for size, n in zip(c.shape[::-1], y.shape[::-1], strict=False)):
        raise call.error("C", c.shape, f"has to broadcast to the product's shape, {y.shape}")
    if not call.flows(c_at):  # as floats, if it is given as integers
        c = call.constant(call.array(c_at, "third matrix"), "c")
    return call.add(y, call.scaled(c, call.attribute("beta", 1.0)))


@op("com.microsoft.FusedMatMul", limits="floats")
def _product(call: Call) -> Tensor:
    """alpha * a @ b, either of them transposed as attributes say."""
    a, b, alpha = call.x, call.input(1), call.attribute("alpha", 1.0)
    orders = [_order(call, x, side) for x, side in ((a, "A"), (b, "B"))]
    if not any(orders):
        return call.scaled(call.multiplied(a, b), alpha)
    if min(a.rank, b.rank) < 2 or not a.type.is_float:
        raise Unsupported(f"matrices of {a.type} of shapes {a.shape} and {b.shape}")
    return call.scaled(call.emit(ops.MatMul((*orders, None)), a, b), alpha)


def _order(call: Call, x: Tensor, side: str) -> Axes | None:
    """The order of an operand's axes, or None for its own: "transBatchA" says that its rows are the first axis."""
    order = list(range(x.rank))
    if call[f"transBatch{side}"] and len(order) > 1:
        order = [*order[1:-1], 0, order[-1]]
    if call[f"trans{side}"]:
        order[-2:] = order[:-3:-1]
    return tuple(order) if order != sorted(order) else None


op("MatMul", limits="floats, or constant B; up to 6 dimensions")(
    lambda call: call.multiplied(call.x, call.input(1)) if call.flows(1) else matmul(call, call.x, 1)
)


@op("Attention", limits="floats")
def _attention(call: Call) -> Tensor:
    usual = {"softcap": 0.0, "softmax_precision": 1, "left_window_size": -1, "right_window_size": -1}
    others = [f"{name}={call[name]}" for name, value in usual.items() if call.attribute(name, value) != value]
    if others or any(call.has(k) for k in range(4, len(call.inputs))):
        raise Unsupported(", ".join(others) or "past keys and values")
    names = ("q_num_heads", "kv_num_heads", "kv_num_heads")
    q, k, v = (of_heads(call, call.input(at), name) for at, name in enumerate(names))
    y = call.attended(q, k, v, call.optional(3), call["scale"], bool(call["is_causal"]))
    return y if call.x.rank == 4 else of_rows(call, y)


def of_rows(call: Call, y: Tensor) -> Tensor:
    """(batch, rows, heads * width) of (batch, heads, rows, width)."""
    batch, heads, rows, width = y.shape
    return call.reshape(call.emit(ops.Transpose((0, 2, 1, 3)), y), (batch, rows, heads * width))


def of_heads(call: Call, x: Tensor, name: str) -> Tensor:
    """(batch, heads, rows, width) of this or (batch, rows, heads * width)."""
    if x.rank not in (3, 4):
        raise call.error("inputs", x.shape, "has to have three or four dimensions")
    if x.rank == 4:
        return x
    heads = call[name]
    if not heads or x.shape[2] % heads:
        raise call.error(name, heads, f"has to divide the {x.shape[2]} columns of {x.shape}")
    wide = call.reshape(x, (*x.shape[:2], heads, x.shape[2] // heads))
    return call.helper(ops.Transpose((0, 2, 1, 3)), wide)


@op("Einsum", limits="floats; each operand names an axis once; at most 6 dimensions", since=12)
def _einsum(call: Call) -> Tensor:
    """Operands are multiplied from the left. An axis that no other operand and no result has is summed before."""
    terms, out = _equation(call)
    values = [call.input(k) for k in range(len(call.inputs))]
    if not all(x.type.is_float for x in values) or any(len({*of}) < len(of) for of in (*terms, out)):
        raise Unsupported(f"equation={call['equation']!r} of {values[0].type}")
    value, of = _summed(call, values[0], terms[0], {*"".join(terms[1:]), *out})
    for k, (other, term) in enumerate(zipped(values[1:], terms[1:]), start=2):
        later = {*"".join(terms[k:]), *out}
        other, term = _summed(call, other, term, {*of} | later)
        value, of = _summed(call, value, of, {*term} | later)
        value, of = _contracted(call, (value, of), (other, term), later)
    return call.transposed(value, [of.index(label) for label in out])


def _equation(call: Call) -> tuple[list[str], str]:
    """The labels of each operand's axes, and those of the result. Axes of an ellipsis have labels of their own."""
    equation = call["equation"].replace(" ", "")
    named, arrow, out = equation.partition("->")
    terms = named.split(",")
    if len(terms) != len(call.inputs):
        raise call.error("equation", equation, f"has to name {len(call.inputs)} operands")
    if not arrow:
        plain = named.replace("...", "").replace(",", "")
        out = "..." * ("..." in named) + "".join(label for label in sorted({*plain}) if plain.count(label) == 1)
    more = [call.input(k).rank - len(term.replace("...", "")) for k, term in enumerate(terms)]
    if any(count < 0 or (count and "..." not in term) for count, term in zipped(more, terms)):
        raise call.error("equation", equation, f"does not fit operands of {[x.rank for x in call.inputs if x]} axes")
    own = "".join(chr(0x100 + k) for k in range(max(more)))
    terms = [term.replace("...", own[len(own) - count :]) for term, count in zipped(terms, more)]
    out = out.replace("...", own)
    labels = "".join(terms)
    if not {*out} <= {*labels} or not (labels + "a").isalpha():
        raise call.error("equation", equation, "names what is no axis of an operand")
    return terms, out


def _summed(call: Call, x: Tensor, of: str, kept: set[str]) -> tuple[Tensor, str]:
    """A value summed over the axes whose labels are not kept."""
    axes = tuple(k for k, label in enumerate(of) if label not in kept)
    if any(x.shape[axis] == 0 for axis in axes):
        raise Unsupported(f"a sum over no elements of {x.shape}")
    y = call.helper(ops.Reduce(axes, False, "sum"), x) if axes else x
    return y, "".join(label for label in of if label in kept)


def _contracted(call: Call, left: tuple[Tensor, str], right: tuple[Tensor, str], kept: set[str]) -> tuple[Tensor, str]:
    """A product of matrices. It sums over shared labels that are not kept; its batch is shared labels that are kept."""
    (x, a), (y, b) = left, right
    sizes = dict(zipped(a, x.shape))
    for label, size in zipped(b, y.shape):
        known = sizes.setdefault(label, size)
        if known != size and (label not in kept or 1 not in (known, size)):
            raise call.error("inputs", (x.shape, y.shape), f"do not fit in axis {label!r} of the equation")
        sizes[label] = size if known == 1 else known
    batch, rows = ([label for label in a if label in kept and (label in b) is both] for both in (True, False))
    columns = [label for label in b if label not in a]
    summed = [label for label in a if label in b and label not in kept]
    if len(batch) > 4:
        raise Unsupported(f"{len(batch)} axes that both operands have")

    def matrices(operand: Tensor, of: str, first: list[str], last: list[str]) -> Tensor:
        turned = call.transposed(operand, [of.index(label) for label in (*batch, *first, *last)], helps=True)
        sides = (math.prod(sizes[label] for label in side) for side in (first, last))
        return call.reshape(turned, (*(operand.shape[of.index(label)] for label in batch), *sides))

    made = call.multiplied(matrices(x, a, rows, summed), matrices(y, b, summed, columns))
    labels = "".join((*batch, *rows, *columns))
    return call.reshape(made, tuple(sizes[label] for label in labels)), labels


def matmul(call: Call, a: Tensor, at: int, by: Convolved = PLAIN, turned: bool = False) -> Tensor:
    """A by B, operand `at`, as convolutions. turned: B is (N, K)."""
    weight = call.array(at, "second matrix")
    if 0 in (*a.shape, *weight.shape):  # the product has no elements, or they are sums of nothing
        sides = [call.converted(x, x.type.name if x.type.is_float else "float32") for x in (a, call.input(at))]
        y = call.multiplied(*sides)
        return y if a.type.is_float else call.converted(y, "int32")
    if a.rank < 1 or weight.ndim < 1:
        raise call.error("inputs", (a.shape, weight.shape), "have to be vectors or matrices")
    if weight.ndim > 2:
        return _batched(call, a, at, by)
    change: Callable[[Array], Array] = lambda b: (b[None] if b.ndim == 1 else b if turned else b.T)[:, :, None, None]  # noqa: E731
    wei = call.weight(at, "weight", change, 0 if turned else 1)
    y = call.product(a, wei, None, by)
    rows = (*a.shape[:-2], -1) if a.rank > 1 else ()
    return call.reshape(y, rows if weight.ndim == 1 else (*rows, wei.shape[0]))


def _batched(call: Call, a: Tensor, at: int, by: Convolved) -> Tensor:
    """Products of matrices whose batches broadcast. A convolution computes each product of integers."""
    weight = call.array(at, "second matrix")
    if by == PLAIN and call.input(at).name not in call.scope.dequantized:
        return call.multiplied(a, call.input(at))
    *given, rows, columns = (1,) * (2 - a.rank) + a.shape
    try:
        common = np.broadcast_shapes(tuple(given), weight.shape[:-2])
    except ValueError:
        raise call.error("input", a.shape, f"has to have a batch that broadcasts with {weight.shape[:-2]}") from None
    matrices = call.reshape(a, (-1, rows, columns))
    numbers = np.broadcast_to(np.arange(matrices.shape[0]).reshape(given), common)
    found = []
    for index, number in np.ndenumerate(numbers):
        wei = call.weight(at, "weight", functools.partial(_matrix, common, index), -1)
        found.append(call.product(call.part(matrices, 0, int(number), 1, helps=True), wei, None, by))
    return call.reshape(call.joined(0, found), (*common, *[rows] * (a.rank > 1), weight.shape[-1]))


def _matrix(common: Shape, index: Shape, b: Array) -> Array:
    """One of some matrices, which broadcast to a batch, as the weight of a convolution of 1x1."""
    return np.broadcast_to(b, (*common, *b.shape[-2:]))[index].T[:, :, None, None]


# ---------------------------------------------------------------- recurrent layers


_LIMITS = "constant weights, whole sequences, layout 0, the default activations; no clip, no peepholes"


@op("LSTM", limits=f"{_LIMITS}; no input_forget", since=7)
@op("GRU", limits=_LIMITS, since=7)
def _recurrent(call: Call) -> list[Tensor]:
    """All outputs: the hidden values of each step, the last ones, and an LSTM's last cells."""
    is_lstm, x, reverse = call.kind == "LSTM", call.x, _directions(call)
    w, r = call.array(1, "weight"), call.array(2, "recurrence weight")
    gates, d, h = 4 if is_lstm else 3, len(reverse), r.shape[-1]
    if x.rank != 3 or w.shape != (d, gates * h, x.shape[2]) or r.shape != (d, gates * h, h):
        rule = f"with weights of shapes {w.shape} and {r.shape} are no layers of {d} directions"
        raise call.error("input", x.shape, rule)
    bias = call.array(3, "bias", np.zeros((d, 2 * gates * h), w.dtype))
    states = [call.optional(5 + k) for k in range(2 if is_lstm else 1)]
    weights = w, r, bias[:, : gates * h], bias[:, gates * h :]
    of_sums = call["linear_before_reset"]
    return call.recurrent(x, "lstm" if is_lstm else "gru_of_sums" if of_sums else "gru", reverse, weights, states)


def _directions(call: Call) -> tuple[bool, ...]:
    """Whether each direction begins with the last step. Raises Unsupported for attributes with other values."""
    found = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
    named = call.one_of("direction", *found)
    usual = ("sigmoid", "tanh", "tanh")[: 3 if call.kind == "LSTM" else 2] * len(found[named])
    names = call.attribute("activations", usual)
    given = tuple((name.decode() if isinstance(name, bytes) else name).lower() for name in names)
    for name, value in (("clip", None), ("input_forget", 0), ("layout", 0)):
        if call.attribute(name, value) != value:
            raise Unsupported(f"{name}={call[name]}")
    if given != usual:
        raise Unsupported(f"activations={given}")
    if call.has(7):
        raise Unsupported("peepholes")
    if call.has(4) and set(call.ints(4, "sequence_lens")) - {call.x.shape[0]}:
        raise Unsupported("sequence_lens that are shorter")
    return found[named]
