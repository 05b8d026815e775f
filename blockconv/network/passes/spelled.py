"""Rules for ops that networks write as smaller ones: activations as gates, layer and RMS norms as squares and roots."""

import itertools
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from numpy.polynomial import polynomial

from blockconv.core.activation import Activation, activation
from blockconv.core.python import zipped
from blockconv.network.graph import Node
from blockconv.network.ops import Activate, Affine, Binary, GroupNorm, Op, ReduceMean, Reshape, Transpose
from blockconv.network.ops.rule import Axes
from blockconv.network.passes.rewrite import Edit, rule
from blockconv.network.passes.simplify import even, joined_factors, stored

Coefficients = npt.NDArray[np.float64]
_ROOT = math.sqrt(2 / math.pi)
_ZERO, _HALF, _X = np.zeros(1), np.array([0, 0.5]), np.array([0, 1.0])
_ONE = _ZERO, np.ones(1)
_Unit = tuple[str, tuple[float, float], float]
# By gate: three polynomials of x (the gate's input, the addend, the gate's factor), and the activation that they make.
_SPELLED = {
    "erf": (np.array([0, math.sqrt(0.5)]), _HALF, _HALF, activation("gelu")),
    "tanh": (np.array([0, _ROOT, 0, _ROOT * 0.044715]), _HALF, _HALF, activation("gelu_tanh", alone=True)),
    "sigmoid": (_X, _ZERO, _X, activation("silu")),
    "clip": (np.array([0.5, 1 / 6]), _ZERO, _X, activation("hardswish")),
}
_MOST_NODES, _MOST_POWERS = 12, 4


# ---------------------------------------------------------------- activations


class _Expression(NamedTuple):
    """A value as plain + gated * gate, where both are polynomials of x, and the nodes that compute it."""

    plain: Coefficients
    gated: Coefficients
    nodes: dict[str, Node]


@rule
def _activation(edit: Edit, node: Node, a: Affine | Binary) -> bool:
    """Fuse x * (1 + erf(x / sqrt(2))) / 2, x * clip(x + 3, 0, 6) / 6 and other sums of `_SPELLED`, in any expansion.

    clip(a x + b, 0, h) / h is hardsigmoid(a / h, b / h).
    """
    gates, values = _gates_above(edit, node) if a.activation.is_identity else ([], [])
    near = {8: 1e-12, 4: 2e-6}.get(edit.type(node.output).itemsize, 1e-2)
    for (gate, (kind, line, height)), x in itertools.product(gates, values):
        inner, outer = _expression(edit, gate.src, x, None), _expression(edit, node.output, x, gate)
        if inner is None or outer is None:
            continue
        gated = inner.plain * line[1]
        gated[0] += line[0]
        nodes = {**inner.nodes, **outer.nodes, gate.name: gate}
        parts, (*wanted, found) = (gated, outer.plain, outer.gated * height), _SPELLED[kind]
        if not all(map(_is_near, parts, wanted, [near] * 3)):
            if (
                kind != "clip"
                or not inner.nodes
                or gated.size != 2
                or not all(map(_is_near, parts[1:], _ONE, [near] * 2))
            ):
                continue
            found = activation(("hardsigmoid", *gated[::-1]))
        if _alone(edit, nodes, node):
            others = [one for one in nodes.values() if one is not node]
            return edit.become(node, Activate(found), *others, inputs=(x,), parameters=())
    return False


def _unit(act: Activation) -> _Unit | None:
    """A gate as (kind, line, height): height * kind(line). A clip gets bounds 0 and 1. None: no gate of `_SPELLED`."""
    if act.number == 0:
        return ("clip", (0.0, 1 / act.second), act.second) if act.first == 0 < act.second < math.inf else None
    if act.name == "hardsigmoid":
        return "clip", (act.second, act.first), 1.0
    return (act.name, (0.0, 1.0), 1.0) if act.name in _SPELLED else None


def _gates_above(edit: Edit, node: Node) -> tuple[list[tuple[Node, _Unit]], list[str]]:
    """(the gates above arithmetic, the nearest first; candidates for x: values in between with several readers, and the
    input of the first gate's line)."""
    waiting, gates, values, seen = [node], list[tuple[Node, _Unit]](), dict[str, None](), 0
    while waiting and seen < _MOST_NODES:
        one, seen = waiting.pop(0), seen + 1
        for name in one.inputs:
            if edit.reads(name) > 1:
                values[name] = None
            before = edit.producer(name, Op)
            if before is None:
                continue
            a = before.attributes
            unit = _unit(a.activation) if isinstance(a, Activate) else None
            if unit is not None:
                gates.append((before, unit))
            if unit is not None or (isinstance(a, (Affine, Binary)) and a.activation.is_identity):
                waiting.append(before)
    for gate, _ in gates[:1]:
        line = edit.private(gate.src, Affine)
        values |= {line.src: None} if line else {}
    return gates, list(values)


def _expression(edit: Edit, name: str, x: str, gate: Node | None, left: int = _MOST_NODES) -> _Expression | None:
    """A value as an expression of x and the gate; None if it has another form."""
    if name == x:
        return _Expression(_X, _ZERO, {})
    if gate is not None and name == gate.output:
        return _Expression(*_ONE, {})
    constant = edit.constants.get(name)
    if constant is not None:
        value = even(constant)
        return None if value is None else _Expression(np.array([value]), _ZERO, {})
    node = edit.producer(name, Affine, Binary)
    if node is None or left == 0 or not (a := node.attributes).activation.is_identity:
        return None
    made, *others = (_expression(edit, one, x, gate, left - 1) for one in node.operands)
    for kind, other in zipped(("mul", "add") if isinstance(a, Affine) else (a.kind,), others):
        made = None if made is None or other is None else _combined(made, kind, other)
    return None if made is None else made._replace(nodes={**made.nodes, node.name: node})


def _combined(a: _Expression, kind: str, b: _Expression) -> _Expression | None:
    """a and b added, subtracted, multiplied, or divided by a number; None if the result has another form."""
    nodes = {**a.nodes, **b.nodes}
    if kind in ("add", "sub"):
        join: Any = polynomial.polyadd if kind == "add" else polynomial.polysub
        return _Expression(join(a.plain, b.plain), join(a.gated, b.gated), nodes)
    if kind == "div" and b.plain.size == 1 and b.plain[0] and not b.gated.any():
        kind, b = "mul", b._replace(plain=1 / b.plain)
    if kind != "mul" or (a.gated.any() and b.gated.any()) or a.plain.size + b.plain.size > _MOST_POWERS + 2:
        return None
    times: Any = polynomial.polymul
    gated: Any = polynomial.polyadd(times(a.gated, b.plain), times(a.plain, b.gated))
    return _Expression(times(a.plain, b.plain), gated, nodes)


def _is_near(found: Coefficients, wanted: Coefficients, near: float) -> bool:
    size = max(found.size, wanted.size)
    a, b = (np.pad(x, (0, size - x.size)) for x in (found, wanted))
    return np.allclose(a, b, rtol=near, atol=0)


def _alone(edit: Edit, nodes: dict[str, Node], last: Node) -> bool:
    """Whether only these nodes read their outputs, except the last one's."""
    reads = [name for node in nodes.values() for name in node.inputs]
    return all(node is last or edit.reads(node.output) == reads.count(node.output) for node in nodes.values())


# ---------------------------------------------------------------- layer and RMS normalisation


@rule
def _norm(edit: Edit, node: Node, a: Binary) -> bool:
    """Fuse x / sqrt(mean of squares + epsilon) over the last axes, or over the channels of each pixel: an RMS norm.

    If x is another value less its mean, it is a layer norm.
    """
    sides: dict[str, Axes] = {"div": (0,), "mul": (0, 1)}
    found = sides.get(a.kind, ()) if a.activation.is_identity else ()
    return any(_normalised(edit, node, node.inputs[at], node.inputs[1 - at]) for at in found)


def _normalised(edit: Edit, node: Node, x: str, root: str) -> bool:
    nodes = [node]
    if node.attributes.kind == "mul":  # type: ignore[attr-defined]
        inverse = edit.producer(root, Binary)
        if (
            inverse is None
            or inverse.attributes.kind != "div"
            or even(edit.constants.get(inverse.src, np.zeros(2))) != 1
        ):
            return False
        nodes.append(inverse)
        root = inverse.inputs[1]
    found = edit.above(root, Activate, Affine, ReduceMean, Binary, shared=True)
    if not found:
        return False
    sqrt, line, variance, product = (one.attributes for one in found)
    factor, epsilon = map(even, edit.parameters(found[1]))
    nodes += found
    is_norm = (
        product == Binary("mul")
        and found[3].inputs == (x, x)
        and variance.keepdims
        and sqrt.activation == activation("sqrt", alone=True)
        and factor == 1
        and epsilon is not None
        and line.activation.is_identity
    )
    if not is_norm:
        return False
    norm, less = GroupNorm(1, epsilon or 0.0), edit.producer(x, Binary)
    mean = edit.producer(less.inputs[1], ReduceMean) if less else None
    if less and mean and less.attributes == Binary("sub") and mean.attributes == variance:
        centred, source = [*nodes, less, mean], less.src
        if mean.inputs == (source,) and _alone(edit, {one.name: one for one in centred}, node):
            return _put_norm(edit, centred[::-1], source, variance.axes, norm)
    is_alone = _alone(edit, {one.name: one for one in nodes}, node)
    return is_alone and _put_norm(edit, nodes[::-1], x, variance.axes, replace(norm, centred=False))


def _put_norm(edit: Edit, old: list[Node], x: str, axes: Axes, norm: GroupNorm) -> bool:
    node, shape, type = old[-1], edit.shape(x), edit.type(x)
    last, of_pixels = axes == tuple(range(len(shape) - len(axes), len(shape))), axes == (1,) and len(shape) == 4
    if 0 in shape or not axes or not (last or of_pixels):
        return False
    size = math.prod(shape[axis] for axis in axes)
    ones, zeros = (edit.constant(f"{node.name}.{k}", np.full(size, k, type.computed.dtype)) for k in (1, 0))
    if of_pixels:
        return edit.replace(old, Node(node.name, replace(norm, per_pixel=True), (x,), node.output, (ones, zeros)))
    rows, normal = (edit.value_name(f"{node.output}.{word}") for word in ("rows", "normal"))
    return edit.replace(
        old,
        Node(f"{node.name}.rows", Reshape((-1, size)), (x,), rows),
        Node(f"{node.name}.norm", norm, (rows,), normal, (ones, zeros)),
        Node(node.name, Reshape(shape), (normal,), node.output),
    )


@rule
def _affine_into_norm(edit: Edit, node: Node, a: Affine, before: Node, norm: GroupNorm) -> bool:
    """Fold the scale and shift of channels after a normalisation into its own."""
    if not a.activation.is_identity:
        return False
    scale, shift = (stored(each, edit.type(node.output).computed) for each in joined_factors(edit, before, node))
    parameters = edit.stored(node, scale=scale, shift=shift)
    return bool(parameters) and edit.merge(before, node, norm, name=node.name, parameters=parameters)


@rule
def norm_of_pixels(edit: Edit, node: Node, a: Transpose, last: Node, b: Reshape) -> bool:
    """Layer normalisation of channels, between transposes to the last axis and back, becomes one of each pixel."""
    found = edit.above(last.src, GroupNorm, Reshape, Transpose)
    if not found or (a.perm, found[2].attributes.perm) != ((0, 3, 1, 2), (0, 2, 3, 1)):
        return False
    (norm, before, first), of = found, found[0].attributes
    src = edit.shape(first.src)
    if of.groups != 1 or edit.shape(before.output)[1:] != src[1:2] or edit.shape(node.output) != src:
        return False
    gone, made = (first, before, norm, last), replace(of, per_pixel=True)
    return edit.become(node, made, *gone, inputs=first.inputs, parameters=norm.parameters)


SPELLED = (_activation, _norm, _affine_into_norm)
