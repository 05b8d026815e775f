"""Rules for products of values that flow: they read transposed operands in place, and attention becomes one op."""

from dataclasses import dataclass, replace

import numpy as np

from blockconv.core.checks import Names, Shape, axis_shape
from blockconv.core.types import Array
from blockconv.network.graph import Node
from blockconv.network.ops import Affine, Attention, Binary, MatMul, Op, Reshape, Softmax, Transpose
from blockconv.network.passes.rewrite import Edit, rule
from blockconv.network.passes.simplify import even

MOST_MASK = 1 << 24  # elements of a mask that several constants become


@rule
def _reads_transposed(edit: Edit, node: Node, a: MatMul | Attention, before: Node, b: Transpose, at: int) -> bool:
    """A product reads its operands in the order of axes that they have before a transpose."""
    *orders, last = a.orders
    if at == len(orders):  # a mask
        return False
    orders[at] = tuple(b.perm[axis] for axis in orders[at] or range(len(b.perm)))
    return edit.skip(before, node, replace(a, orders=(*orders, last)), at)


@rule
def _writes_transposed(edit: Edit, node: Node, a: Transpose, before: Node, b: MatMul | Attention) -> bool:
    """A product writes its result in the order of axes that a transpose gives it."""
    *orders, last = b.orders
    order = a.perm if last is None else tuple(last[axis] for axis in a.perm)
    return edit.merge(before, node, replace(b, orders=(*orders, order)))


# ---------------------------------------------------------------- attention


@dataclass
class _Scores:
    """A value on the way up from a softmax, in the form factor * scores + mask + flowing.

    shape: of the value.
    gone: the nodes that one op replaces.
    mask: constants.
    flowing: another value's name.
    """

    name: str
    shape: Shape
    gone: list[Node]
    factor: float = 1.0
    mask: Array | None = None
    flowing: str | None = None

    def add(self, constant: Array, sign: float = 1.0) -> None:
        term = sign * self.factor * constant.astype(np.float64)
        self.mask = term if self.mask is None else self.mask + term


@rule
def _is_attention(edit: Edit, node: Node, second: MatMul) -> bool:
    """softmax(scale * (a @ b) + mask) @ c, as networks spell it: with the scale before or after, and masks added."""
    if second.orders[0] is not None:
        return False
    shape = edit.shape(node.src)
    found = _Scores(node.src, shape, [])
    flat = edit.private(found.name, Reshape)
    if flat is not None and _up_reshape(edit, flat, found=found):
        found.gone.insert(0, flat)
    softmax = edit.private(found.name, Softmax)
    if softmax is None or softmax.attributes.log or softmax.attributes.axis != len(found.shape) - 1:
        return False
    found.gone.insert(0, softmax)
    found.name = softmax.src
    while (first := edit.private(found.name, MatMul)) is None:
        before = edit.private(found.name, Op)
        if before is None or not any(step(edit, before, found=found) for step in (_up_affine, _up_binary, _up_reshape)):
            return False
        found.gone.insert(0, before)
    orders = first.attributes.orders
    if found.shape != shape or orders[2] is not None or (found.mask is not None and found.flowing):
        return False
    more = _mask(edit, node, found)
    made = Attention(found.factor, False, softmax.attributes.zero_rows, (*orders[:2], *second.orders[1:]))
    inputs = (*first.inputs, node.inputs[1], *more)
    return edit.become(node, made, first, *found.gone, inputs=inputs)


@rule
def _up_affine(edit: Edit, node: Node, a: Affine, found: _Scores) -> bool:
    scale, shift = edit.parameters(node)
    factor = even(scale)
    if factor is None or not a.activation.is_identity:
        return False
    if shift.any():
        found.add(shift.reshape(axis_shape(1, len(found.shape))))
    found.factor, found.name = found.factor * factor, node.src
    return True


@rule
def _up_binary(edit: Edit, node: Node, a: Binary, found: _Scores) -> bool:
    sides = (1, 0) if a.kind in ("add", "mul") else (1,)
    for at in sides if a.activation.is_identity else ():
        this, other = node.inputs[at], node.inputs[1 - at]
        constant = edit.constants.get(this)
        if edit.shape(other) != found.shape:
            continue
        if constant is None:
            is_mask = edit.shape(this)[-1:] == found.shape[-1:]
            is_scores = edit.private(other, MatMul, Affine, Binary) is not None  # a product, or an op that may follow
            if a.kind != "add" or found.flowing or found.factor != 1 or not is_mask or not is_scores:
                continue
            found.flowing = this
        elif a.kind in ("add", "sub"):
            found.add(constant, 1.0 if a.kind == "add" else -1.0)
        else:
            factor = even(constant)
            if factor is None or (a.kind == "div" and factor == 0):
                continue
            found.factor *= factor if a.kind == "mul" else 1 / factor
        found.name = other
        return True
    return False


@rule
def _up_reshape(edit: Edit, node: Node, a: Reshape, found: _Scores) -> bool:
    shape = edit.shape(node.src)
    if shape[-2:] != found.shape[-2:] or len(shape) < 2 or found.flowing:
        return False
    if found.mask is not None:
        if np.prod(found.shape) > MOST_MASK:
            return False
        found.mask = np.broadcast_to(found.mask, found.shape).reshape(shape)
    found.shape, found.name = shape, node.src
    return True


def _mask(edit: Edit, node: Node, found: _Scores) -> Names:
    """The operand that is the mask, if there is one."""
    if found.flowing:
        return (found.flowing,)
    if found.mask is None or not found.mask.any():
        return ()
    mask = np.broadcast_to(found.mask, (*found.mask.shape[:-1], found.shape[-1]))
    return (edit.constant(f"{node.name}.mask", np.ascontiguousarray(mask, edit.type(node.output).dtype)),)


@rule
def _takes_scale(edit: Edit, node: Node, a: Attention, before: Node, b: Affine, at: int) -> bool:
    """Attention multiplies scores by the number that its operands were multiplied by before."""
    scale, shift = edit.parameters(before)
    factor = even(scale)
    if at > 1 or factor is None or shift.any() or not b.activation.is_identity:
        return False
    return edit.skip(before, node, replace(a, scale=a.scale * factor), at)


@rule
def _with_its_axes(edit: Edit, node: Node, a: MatMul | Attention) -> bool:
    """If reshapes merged operands' axes before the last two, the op reads their inputs. Its result is merged."""
    if any(order and order[0] for order in a.orders):
        return False
    count, dst = len(a.orders) - 1, edit.shape(node.output)
    merges = [before for name in node.inputs[:count] if (before := edit.producer(name, Reshape))]
    sources = [before.src for before in merges]
    wide, merged = [edit.shape(name) for name in sources], [edit.shape(name) for name in node.inputs]
    batch = wide[0][:-2] if wide else ()
    fits = all(shape == (*batch, *flat[1:]) for shape, flat in zip(wide, merged, strict=False))
    if len(sources) < count or not fits or len(batch) < 2 or any(len(shape) != 3 for shape in merged) or 0 in dst:
        return False
    for name in node.inputs[count:]:
        value = edit.constants.get(name)
        if value is None or len(value) not in (1, dst[0]):
            return False
        split = batch if len(value) == dst[0] else (1,) * len(batch)
        sources.append(edit.constant(f"{node.name}.mask", value.reshape(*split, *value.shape[1:])))
    outer = len(batch)
    orders = (order and (*range(outer), *(outer - 1 + axis for axis in order[1:])) for order in a.orders)
    made = edit.value_name(f"{node.output}.split")
    first = replace(node, attributes=replace(a, orders=tuple(orders)), inputs=tuple(sources), output=made)
    gone = [before for before in merges if edit.private(before.output, Reshape)]
    return edit.replace((*gone, node), first, Node(f"{node.name}.merged", Reshape(dst), (made,), node.output))


ATTENTION = (_is_attention,)  # first: the other rules would part what it looks for
PRODUCTS = (_takes_scale, _with_its_axes, _reads_transposed, _writes_transposed)
