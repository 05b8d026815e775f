"""Rules that reduce the many spellings of an op to one, and drop ops that change nothing."""

import functools
import math
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from blockconv.core.activation import Activation, activation
from blockconv.core.checks import Pair, Shape, axis_shape, of_rank
from blockconv.core.python import zipped
from blockconv.core.types import Array, ElementType, element
from blockconv.network.graph import Node
from blockconv.network.ops import (
    Activate,
    Affine,
    Binary,
    Cast,
    Concat,
    Gather,
    Op,
    Pad,
    PixelShuffle,
    Pool2d,
    ReduceMean,
    Reshape,
    Shuffle,
    Slice,
    Transpose,
)
from blockconv.network.passes.rewrite import Edit, rule

LEAST = float(np.finfo(np.float32).tiny)


# ---------------------------------------------------------------- shapes


def _idle(edit: Edit, node: Node) -> bool:
    """Ops that change nothing vanish."""
    a, src = node.attributes, edit.shape(node.src)
    idle = (
        (isinstance(a, Activate) and a.activation.is_identity)
        or (isinstance(a, Reshape) and edit.shape(node.output) == src)
        or (isinstance(a, Transpose) and a.perm == tuple(range(len(src))))
        or (isinstance(a, Pad) and not any(map(any, a.pads)))
        or (isinstance(a, PixelShuffle) and a.block == (1, 1))
        or (isinstance(a, Concat) and len(node.inputs) == 1)
    )
    return idle and edit.bypass(node)


@functools.partial(rule, shared=True)
def _reshape_of_reshape(edit: Edit, node: Node, a: Reshape, before: Node, b: Reshape) -> bool:
    """The second reads what the first does; the first goes if nothing else reads it."""
    if 0 in edit.shape(node.output):
        return False
    # -1 stays, for other sizes. 0 means a size of the input, which is another one now, so it becomes a number.
    sizes = zipped(a.shape, edit.shape(node.output))
    return edit.skip(before, node, Reshape(tuple(said or size for said, size in sizes)))


@functools.partial(rule, shared=True)
def _transpose_of_transpose(edit: Edit, node: Node, a: Transpose, before: Node, b: Transpose) -> bool:
    """The second reads what the first does; the first goes if nothing else reads it."""
    return edit.skip(before, node, Transpose(tuple(b.perm[axis] for axis in a.perm)))


@rule
def elementwise_after_reshape(edit: Edit, node: Node, a: Activate | Affine | Cast, before: Node, b: Reshape) -> bool:
    """Elementwise ops go before a reshape, where the op that computes the values can take them in."""
    src, dst = edit.shape(before.src), edit.shape(node.output)
    return (not isinstance(a, Affine) or src[:2] == dst[:2]) and edit.exchange(before, node, before.inputs)


@rule
def _binary_after_reshape(edit: Edit, node: Node, a: Binary, before: Node, b: Reshape, at: int) -> bool:
    """A binary op with a constant for each channel goes before a reshape: a bias after a product of matrices."""
    constant, src, dst = edit.constants.get(node.inputs[1 - at]), edit.shape(before.src), edit.shape(node.output)
    if constant is None or len(src) < 2 or 0 in dst or edit.shape(before.output) != dst:
        return False
    wide = of_rank(constant.shape, len(dst))
    axes = [(size, math.prod(dst[:axis])) for axis, size in enumerate(wide) if size > 1]
    if axes != [(src[1], src[0])] or src[:2] == dst[:2]:
        return False
    along = edit.constant(f"{node.name}.channels", constant.reshape(axis_shape(1, len(src))))
    return edit.exchange(before, node, (along, before.src) if at else (before.src, along))


@functools.partial(rule, shared=True)
def _broadcast_once(edit: Edit, node: Node, a: Binary, before: Node, b: Binary, at: int) -> bool:
    """Arithmetic broadcasts operands itself, so it reads an operand as it was before a product with ones."""
    other = node.inputs[1 - at]
    if b != Binary("mul") or edit.shape(other) != edit.shape(node.output):
        return False
    for _, src, ones in edit.constant_operands(before):
        if even(ones) == 1:
            return edit.become(node, a, inputs=(other, src) if at else (src, other))
    return False


@rule
def _concat_of_concat(edit: Edit, node: Node, a: Concat, before: Node, b: Concat, at: int) -> bool:
    inputs = (*node.inputs[:at], *before.inputs, *node.inputs[at + 1 :])
    return a == b and edit.become(node, a, before, inputs=inputs)


@rule
def _concat_of_parts(edit: Edit, node: Node, a: Concat) -> bool:
    """Parts of one value, put together in another order, are a gather: `roll`, and pads that wrap."""
    found = [part for name in node.inputs if (part := edit.private(name, Slice)) is not None]
    known = {(part.inputs, part.attributes.axis) for part in found}
    if len(found) < len(node.inputs) or known != {(found[0].inputs, a.axis)}:
        return False
    indices = tuple(b.begin + k * b.step for b in (part.attributes for part in found) for k in range(b.size))
    if len({part.name for part in found}) < len(found) or not indices:
        return False
    return edit.become(node, Gather(a.axis, indices), *found, inputs=found[0].inputs)


@rule
def _concat_of_longest_prefix(edit: Edit, node: Node, a: Concat) -> bool:
    """A concatenation reads an earlier one that holds its first inputs: cat(a, b, c) is cat(cat(a, b), c).

    DenseNet's blocks, as PyTorch exports them, concatenate all earlier features anew in every layer. In a chain, each
    layer's features are written once, directly behind earlier ones, if the layout permits that.
    """
    best: Node | None = None
    for other in edit.nodes.values():
        if other is node:
            break
        held = len(other.inputs)
        longer = 1 < held < len(node.inputs) and (best is None or held > len(best.inputs))
        # One that nothing reads would be merged back into this one, and so on without end.
        if longer and other.attributes == a and edit.reads(other.output):
            best = other if other.inputs == node.inputs[:held] else best
    if best is None:
        return False
    return edit.become(node, a, inputs=(best.output, *node.inputs[len(best.inputs) :]))


@rule
def _mean_is_pool(edit: Edit, node: Node, a: ReduceMean) -> bool:
    """A mean over H and W is a global pool."""
    if len(edit.shape(node.src)) != 4 or a.axes != (2, 3):
        return False
    pool = Pool2d("avg_exclude_padding")
    if a.keepdims:
        return edit.become(node, pool)
    value = edit.value_name(f"{node.output}.pooled")
    flat = Node(f"{node.name}.flat", Reshape((0, 0)), (value,), node.output)
    return edit.replace((node,), replace(node, attributes=pool, output=value), flat)


@rule
def _shuffle(edit: Edit, node: Node, a: Reshape, middle: Node, turn: Transpose) -> bool:
    """Reshape, transpose, reshape: how networks spell the shuffles of channels and of pixels."""
    first = edit.private(middle.src, Reshape)
    if first is None:
        return False
    src, split, dst = (edit.shape(name) for name in (first.src, first.output, node.output))
    if len(src) != 4 or len(dst) != 4 or 0 in src:
        return False
    for shuffle, shape, perm in _shuffles(src, dst, split):
        if _loops(shape, perm) == _loops(split, turn.perm):
            return edit.become(node, shuffle, first, middle, inputs=first.inputs)
    return False


def _shuffles(src: Shape, dst: Shape, split: Shape) -> Iterator[tuple[Op, Shape, Shape]]:
    """The shuffles from shape to shape, with the transposes that spell them: the shapes, and the axes' order.

    split: the shape that is transposed.
    """
    if src == dst and len(split) == 5 and split[1] * split[2] == src[1]:
        yield Shuffle(split[1]), (src[0], *split[1:3], *src[2:]), (0, 2, 1, 3, 4)
    inverse = math.prod(dst[2:]) < math.prod(src[2:])
    (n, c, h, w), (m, d, *image) = (src, dst) if inverse else (dst, src)
    rows, columns = (max(1, many // few) for many, few in zipped((h, w), image))
    if src != dst and (m, d, image[0] * rows, image[1] * columns) == (n, c * rows * columns, h, w):
        for by_channel in (True, False):
            shuffle = PixelShuffle((rows, columns), by_channel, inverse)
            turn = shuffle.problem(src)
            yield shuffle, turn.shape, turn.perm


def _loops(shape: Shape, perm: Shape) -> list[Pair]:
    """(elements, stride) of the loops that read a transpose's source in the order of its result."""
    found: list[Pair] = []
    for axis in perm:
        size, stride = shape[axis], math.prod(shape[axis + 1 :])
        if size > 1 and found and found[-1][1] == size * stride:  # one loop is both
            found[-1] = found[-1][0] * size, stride
        elif size > 1:
            found.append((size, stride))
    return found


SHAPES = (
    _shuffle,
    _idle,
    _reshape_of_reshape,
    _transpose_of_transpose,
    elementwise_after_reshape,
    _binary_after_reshape,
    _broadcast_once,
    _concat_of_concat,
    _concat_of_parts,
    _concat_of_longest_prefix,
    _mean_is_pool,
)


# ---------------------------------------------------------------- constants along the channels


def stored(value: Array, type: ElementType, beside: Array | None = None, least: float = LEAST) -> Array | None:
    """Folded numbers in float64, rounded once to the type; None if that type cannot hold them.

    The error may be half a unit in the last place of `beside` (default: of the numbers themselves), plus `least`. So
    float16 subnormals are refused, unless larger numbers are beside them.
    """
    made = value.astype(type.dtype)
    if least == LEAST and type.name != "float16":  # whose normal numbers reach down to that
        return made if np.isfinite(made).all() else None
    error = np.abs(made.astype(np.float64) - value)
    unit = float(np.spacing(np.ones((), type.dtype)))
    return made if (error <= unit / 2 * np.abs(value if beside is None else beside) + least).all() else None


def put_affine(edit: Edit, old: tuple[Node, ...], src: str, scale: Array, shift: Array, act: Activation) -> bool:
    """Replace `old` by one affine op of `src`, with the last one's name. False if the type cannot hold the numbers."""
    last, type = old[-1], edit.type(src).computed
    parameters = edit.stored(last, scale=stored(scale, type, least=0.0), shift=stored(shift, type))
    made = Node(last.name, Affine(act), (src,), last.output, parameters)
    return bool(parameters) and edit.replace(old, made)


def even(value: Array) -> float | None:
    """The one finite number that an array holds; None if it holds others."""
    first = float(value.flat[0]) if value.size else math.nan
    return first if math.isfinite(first) and (value == value.flat[0]).all() else None


def _channels(value: Array, src: Shape) -> Array | None:
    """A constant operand of a value of shape `src`, as (C,), if it has a number for each channel, or one for all."""
    wide = of_rank(value.shape, len(src))
    if not element(value.dtype).is_float or value.ndim > len(src) or len(src) < 2 or wide[1] != value.size:
        return None
    return np.broadcast_to(value.reshape(-1), (src[1],)) if value.size in (1, src[1]) else None


@rule
def _binary_is_affine(edit: Edit, node: Node, a: Binary) -> bool:
    """Adding, subtracting, multiplying by or dividing by a constant of each channel."""
    for at, src, constant in edit.constant_operands(node) if a.kind in ("add", "sub", "mul", "div") else ():
        value = None if src in edit.constants else _channels(constant, edit.shape(src))
        if value is None or (a.kind == "div" and (at == 0 or 0 in value)):
            continue
        value = value.astype(np.float64)
        if a.kind in ("mul", "div"):
            scale, shift = value if a.kind == "mul" else 1 / value, np.zeros_like(value)
        else:
            one, sign = np.ones_like(value), -1 if a.kind == "sub" else 1
            scale, shift = (one, sign * value) if at == 1 else (sign * one, value)
        return put_affine(edit, (node,), src, scale, shift, a.activation)
    return False


@rule
def _bound_is_clip(edit: Edit, node: Node, a: Binary) -> bool:
    """The larger, or the smaller, of a value and one number."""
    is_bound = a.kind in ("max", "min") and a.activation.is_identity
    for _, src, constant in edit.constant_operands(node) if is_bound else ():
        if src in edit.constants or not element(constant.dtype).is_float:
            continue
        if constant.size == 1 and constant.ndim <= len(edit.shape(src)):
            bound = float(constant.item())
            clip = activation(("clip", bound) if a.kind == "max" else ("clip", -np.inf, bound))
            return edit.become(node, Activate(clip), inputs=(src,))
    return False


def joined_factors(edit: Edit, before: Node, node: Node) -> tuple[Array, Array]:
    """One scale and shift in place of those of two nodes."""
    (s0, t0), (s1, t1) = map(edit.factors, (before, node))
    return s0 * s1, t0 * s1 + t1


@rule
def _affine_of_affine(edit: Edit, node: Node, a: Affine, before: Node, b: Affine) -> bool:
    if not b.activation.is_identity:
        return False
    scale, shift = joined_factors(edit, before, node)
    return put_affine(edit, (before, node), before.src, scale, shift, a.activation)


CHANNELS = (_binary_is_affine, _bound_is_clip, _affine_of_affine)
