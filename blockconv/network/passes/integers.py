"""Ops between dequantized values become ops of integers, of 8 bits and of 4 (see `for_kernels`).

A quantized network, as ONNX's tools write it, has each float op between a Dequantize of its inputs and a Quantize of
its output. This pass moves Dequantize down and Quantize up, past ops that only move elements. A convolution of
dequantized values becomes a convolution of integers. An op that has integer kernels and a Quantize after it gives
integers itself. Other ops run in float32 between the two (`dequantized`).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, NamedTuple

import numpy as np

from blockconv.core.activation import ActivationKind
from blockconv.core.checks import Names, Shape
from blockconv.core.python import zipped
from blockconv.core.quantization import PLAIN, Quantization, real
from blockconv.core.types import BYTES, INTEGERS, Array, ElementType, element
from blockconv.dispatch.quantizing import is_finite, is_light, is_narrow, sums_fit
from blockconv.dispatch.selection import has_kernels
from blockconv.network.graph import Network, Node, holds
from blockconv.network.ops import (
    Activate,
    Affine,
    Binary,
    Conv2d,
    ConvTranspose2d,
    Dequantize,
    DynamicConv2d,
    Lookup,
    Op,
    Pad,
    PixelShuffle,
    Quantize,
    Quantized,
    QuantizedConv2d,
    Requantize,
    Reshape,
)
from blockconv.network.ops.rule import Tensor
from blockconv.network.passes.rewrite import Edit, adding_convolution, rewritten, rule


def convolutions(network: Network) -> Network:
    """Dequantize goes down to convolutions, which become convolutions of integers with float32 results."""
    if not holds(network.nodes, Dequantize):
        return network
    network = rewritten(network, _goes_down, _transposed_activates)
    return rewritten(network, _goes_down, _transposed_conv, _conv_of_integers)


def stores(network: Network) -> Network:
    """Ops that a Quantize follows give integers, where they have kernels for it."""
    if not holds(network.nodes, Quantize):
        return network
    moves, computes = (_goes_down, _goes_up), (_conv_stores, _op_stores, _conv_scales, _conv_adds)
    return rewritten(network, _quantize_of_dequantize, *moves, *computes)


def lookups(network: Network) -> Network:
    """Element-wise ops from 8 bits to 8 bits look their result up in a table, which `Network.evaluate` makes."""
    return rewritten(network, _op_looks_up)


def known_weights(network: Network) -> Network:
    """Convolutions record facts on their weights: `finite` for floats with padding, `narrow` and `light` for int8."""

    def said(node: Node) -> Node:
        a = node.attributes
        if isinstance(a, Conv2d) and any(map(any, a.pads)) and not a.finite:
            name = node.parameters[0]
            finite = is_finite(network.constants[name], network.tensors[name].type)
            return replace(node, attributes=replace(a, finite=finite)) if finite else node
        if not isinstance(a, (QuantizedConv2d, DynamicConv2d)):
            return node
        weight = network.constants[node.parameters[0]]
        known = replace(a, narrow=a.narrow or is_narrow(weight), light=a.light or is_light(weight))
        return replace(node, attributes=known)

    nodes = tuple(map(said, network.nodes))
    return network if nodes == network.nodes else network.changed(nodes)


def dequantized(network: Network) -> list[Node]:
    """The nodes that compute in float32 although all that flows into them are integers that were dequantized."""
    kinds = (Quantize, Dequantize, Requantize, Quantized, QuantizedConv2d, DynamicConv2d)
    found = []
    for node in network.nodes:
        flows = [name for name in node.inputs if name not in network.constants]
        makers = [network.producers.get(name) for name in flows]
        read = [one.src for one in makers if one is not None and isinstance(one.attributes, Dequantize)]
        integers = len(read) == len(makers) and all(network.tensors[name].type.name in INTEGERS for name in read)
        quantized = any(isinstance(reader.attributes, Quantize) for reader in network.readers[node.output])
        if not isinstance(node.attributes, kinds) and integers and (quantized or isinstance(node.attributes, Conv2d)):
            found.append(node)
    return found


# ---------------------------------------------------------------- what moves elements


def effect_on(attributes: Op, type: ElementType) -> Literal["moves", "computes"] | None:
    """`Op.on_integers`, if there are kernels from and to integers of this type."""
    effect = attributes.on_integers()
    return effect if effect and (isinstance(attributes, Reshape) or has_kernels(attributes.op, type)) else None


def _goes_down(edit: Edit, node: Node) -> bool:
    """op(dequantize(x)) is dequantize(op(x)) where the op only moves elements."""
    found = _behind(edit, node.inputs)
    if found is None:
        return False
    (given, *_), (type, *_) = found.given, found.types
    if len({*zipped(found.given, found.types)}) > 1 or effect_on(node.attributes, type) != "moves":
        return False
    value, attributes = edit.value_name(f"{node.output}.integers"), node.attributes.of_moved_integers(given)
    moved = replace(node, attributes=attributes, inputs=found.names, output=value)
    after = Node(f"{node.name}.dequantize", Dequantize(given), (value,), node.output)
    return edit.replace((*found.gone, node), moved, after)


@rule
def _goes_up(edit: Edit, node: Node, a: Quantize, before: Node, b: Op) -> bool:
    """quantize(op(x)) is op(quantize(x)) where the op only moves elements."""
    if effect_on(b, element(a.dtype)) != "moves":
        return False
    names = dict.fromkeys(before.inputs)
    values = {name: edit.value_name(f"{name}.quantized") for name in names}
    made = [Node(f"{node.name}.{k}", a, (name,), values[name]) for k, name in enumerate(names)]
    inputs = tuple(values[name] for name in before.inputs)
    moved = replace(before, attributes=b.of_moved_integers(a.dst), inputs=inputs, output=node.output)
    return edit.replace((before, node), *made, moved)


@rule
def _quantize_of_dequantize(edit: Edit, node: Node, a: Quantize) -> bool:
    """Integers that become others, or the same."""
    found = _behind(edit, node.inputs)
    if found is None:
        return False
    attributes: Op = Requantize(found.given[0], a.dst, a.dtype)
    if (a.dst, element(a.dtype)) == (found.given[0], found.types[0]):
        attributes = Reshape((0,) * len(edit.shape(node.output)))  # changes nothing, and vanishes
    return edit.become(node, attributes, *found.gone, inputs=found.names)


# ---------------------------------------------------------------- what computes


@rule
def _conv_of_integers(edit: Edit, node: Node, a: Conv2d) -> bool:
    found, weight = _behind(edit, node.inputs[:1]), _weight(edit, node.parameters[0], 0)
    if found is None or weight is None:
        return False
    (src,), (integers, given) = found.given, weight
    bias = _integer_bias(edit, node, src.scale * given.scale)
    if not sums_fit(integers, bias):
        return False
    parameters = [edit.constant(f"{node.name}.weight", integers)]
    if bias is not None:
        parameters.append(edit.constant(f"{node.name}.bias", bias))
    common = a.stride, a.pads, a.dilation, a.groups, a.activation
    attributes, inputs = QuantizedConv2d(*common, src=src, wei=given, dtype="float32"), (*found.names, *node.inputs[1:])
    return edit.become(node, attributes, *found.gone, inputs=inputs, parameters=tuple(parameters))


@rule
def _transposed_activates(edit: Edit, node: Node, a: Activate, before: Node, b: ConvTranspose2d) -> bool:
    """A transposed convolution takes the activation that follows it, before its channels become pixels."""
    if not b.activation.is_identity or a.activation.kind == ActivationKind.FUNCTION:
        return False
    return edit.merge(before, node, replace(b, activation=a.activation))


@rule
def _transposed_conv(edit: Edit, node: Node, a: ConvTranspose2d) -> bool:
    """A transposed convolution of dequantized values becomes a convolution, whose channels become pixels.

    Along an axis with stride s, pixel s * q + r adds the products of tap r + s * j and input q - j. So one window
    serves all remainders r, as channels. A tap that some remainders lack is zero.
    """
    weight = _weight(edit, node.parameters[0], 1)
    if weight is None or a.dilation != (1, 1) or _behind(edit, node.inputs) is None:
        return False
    integers, given = weight
    (sh, sw), shapes = a.stride, (edit.shape(node.src), edit.shape(node.output), integers.shape)
    sides: list[Any] = []
    for read, size, kernel, step, (begin, _) in zipped(*(shape[2:] for shape in shapes), a.stride, a.pads):
        first, rest = divmod(begin, step)
        count, made = -(-kernel // step), -(-(rest + size) // step)
        before = count - 1 - first
        sides.append((count, (before, made - read - before + count - 1), (-rest, rest + size - made * step)))
    taps, pads, cuts = zipped(*sides)
    if min(map(min, pads)) < 0:
        return False
    scales = np.tile(np.repeat(given.scale, sh * sw), a.groups) if given.scale.ndim else given.scale
    stored = edit.constant(f"{node.name}.weight", _of_remainders(integers, a.groups, a.stride, taps))
    names = [edit.value_name(f"{node.output}.{part}") for part in ("real", "sums", "pixels", "cut")]
    bias = [edit.constant(f"{node.name}.bias", np.repeat(_values(edit, name), sh * sw)) for name in node.parameters[1:]]
    conv = Conv2d((1, 1), pads, (1, 1), a.groups, a.activation)
    nodes = [
        Node(f"{node.name}.weight", Dequantize(Quantization(scales)), (stored,), names[0]),
        Node(node.name, conv, node.inputs, names[1], (names[0], *bias)),
        Node(f"{node.name}.pixels", PixelShuffle((sh, sw)), (names[1],), names[2]),
        Node(f"{node.name}.cut", Pad(((0, 0), (0, 0), *cuts)), (names[2],), names[3]),
    ]
    nodes = nodes if any(map(any, cuts)) else nodes[:-1]
    return edit.replace((node,), *nodes[:-1], replace(nodes[-1], output=node.output))


def _of_remainders(weight: Array, groups: int, stride: Sequence[int], taps: Sequence[int]) -> Array:
    """Weights (I, O/groups, KH, KW) of a transposed convolution as those of a convolution: see `_transposed_conv`."""
    (ic, oc, *sizes), (sh, sw), (kh, kw) = weight.shape, stride, taps
    ends = [(0, size * step - given) for size, step, given in zipped(taps, stride, sizes)]
    wide = np.pad(weight, [(0, 0), (0, 0), *ends]).reshape(groups, ic // groups, oc, kh, sh, kw, sw)
    turned = wide[:, :, :, ::-1, :, ::-1].transpose(0, 2, 4, 6, 1, 3, 5)
    return turned.reshape(groups * oc * sh * sw, ic // groups, kh, kw)


def _values(edit: Edit, name: str) -> Array:
    """A constant's numbers, or those of a dequantized one."""
    known = _constant(edit, name)
    return edit.constants[name] if known is None else real(*known)


def _integer_bias(edit: Edit, node: Node, scale: Any) -> Array | None:
    """A convolution's bias as int32 of this scale: its own integers if they have it, else the nearest ones."""
    if len(node.parameters) < 2:
        return None
    name = node.parameters[1]
    known, wide = _constant(edit, name), edit.shape(name)
    exact = known is not None and known[0].dtype == np.int32 and not known[1].zero_point
    if known is not None and exact and np.allclose(known[1].scale, scale, rtol=1e-6, atol=0):
        return known[0]
    values = _values(edit, name)
    whole = np.rint(values.astype(np.float64) / scale)
    bounds = np.iinfo(np.int32)  # what is beyond them is more than `check_sums` takes
    return np.broadcast_to(np.nan_to_num(np.clip(whole, bounds.min, bounds.max), nan=bounds.max), wide).astype(np.int32)


@rule
def _conv_stores(edit: Edit, node: Node, a: Quantize, conv: Node, b: QuantizedConv2d) -> bool:
    """A convolution of integers stores integers, and adds a residual of them."""
    found = _behind(edit, conv.inputs[1:]) if b.dtype == "float32" else None
    if found is None:
        return False
    attributes = replace(b, dtype=a.dtype, dst=a.dst, residual=next(iter(found.given), None))
    return edit.merge(conv, node, attributes, *found.gone, inputs=(conv.src, *found.names))


@rule
def _op_stores(edit: Edit, node: Node, a: Quantize, before: Node, of: Op) -> bool:
    """An op between dequantized values and a Quantize is one of integers."""
    found, type = _behind(edit, before.inputs), element(a.dtype)
    if found is None or any(each.unpacked != type.unpacked for each in found.types):
        return False
    if effect_on(of, type) != "computes":
        return False
    return edit.merge(before, node, Quantized(of, found.given, a.dst, a.dtype), *found.gone, inputs=found.names)


@rule
def _conv_adds(edit: Edit, node: Node, a: Quantized) -> bool:
    """A convolution of integers adds the other operand of an integer addition in its store; of two, the later does.

    It rounds its own result as if it had been stored, so that nothing else changes.
    """
    if not isinstance(a.of, Binary) or a.of.kind != "add" or element(a.dtype).is_packed:
        return False
    found = adding_convolution(edit, node, lambda of: _gives(of, a.dtype))
    if found is None or len(found[0].parameters) > 2:
        return False
    (before, other), of = found, found[0].attributes
    attributes = replace(of, activation=a.of.activation, sum=of.dst, dst=a.dst, residual=a.srcs[other])
    return edit.merge(before, node, attributes, inputs=(*before.inputs, node.inputs[other]))


def _gives(of: Op, dtype: str) -> bool:
    """Whether an op is a convolution of integers that gives integers of this type, rounded once."""
    return isinstance(of, QuantizedConv2d) and of.dtype == dtype and of.sum is None


@rule
def _conv_scales(edit: Edit, node: Node, a: Quantized, conv: Node, b: QuantizedConv2d) -> bool:
    """A convolution of integers multiplies and shifts its channels in its store, as if it had stored them before."""
    if not isinstance(a.of, Affine) or element(a.dtype).is_packed or not _gives(b, a.dtype):
        return False
    return _scaled(edit, conv, node, replace(b, activation=a.of.activation, sum=b.dst, dst=a.dst), b)


@rule
def affine_into_conv(edit: Edit, node: Node, a: Affine, conv: Node, b: QuantizedConv2d) -> bool:
    """A convolution of integers that gives float32 multiplies and shifts its channels."""
    return b.dtype == "float32" and _scaled(edit, conv, node, replace(b, activation=a.activation), b)


def _scaled(edit: Edit, conv: Node, affine: Node, attributes: QuantizedConv2d, before: QuantizedConv2d) -> bool:
    """The two nodes become a convolution with these attributes; unless it has a scale, a residual or an activation."""
    weight, *bias = conv.parameters
    if len(bias) > 1 or len(conv.inputs) > 1 or not before.activation.is_identity:
        return False
    bias = bias or [edit.constant(f"{conv.name}.bias", np.zeros(len(edit.constants[weight]), np.int32))]
    return edit.merge(conv, affine, attributes, parameters=(weight, *bias, *affine.parameters))


@rule
def _op_looks_up(edit: Edit, node: Node, a: Quantize | Quantized | Requantize | Lookup) -> bool:
    found = _element_wise(edit, node) if a.dtype in BYTES else None
    if found is None:
        return False
    source, nodes = found
    # The 256 values as images of one element. Constants have one value each.
    type, shape = edit.type(source), (256,) + (1,) * (len(edit.shape(source)) - 1)
    constants = {name: edit.constants[name] for one in nodes for name in one.inputs if name in edit.constants}
    constants |= {name: edit.constants[name][:1] for one in nodes for name in one.parameters}
    network = Network((Tensor(source, shape, type),), (node.output,), tuple(nodes), constants)
    every = np.arange(256, dtype=np.uint8).view(type.dtype).reshape(shape)
    table = network.evaluate(every)[node.output].tobytes()
    made = Node(node.name, Lookup(table, a.dst, a.dtype), (source,), node.output)
    return edit.replace((*nodes[1:], node), made)


def _element_wise(edit: Edit, node: Node) -> tuple[str, list[Node]] | None:
    """(the furthest 8-bit value that alone determines a node's value, element by element; the nodes between, this one
    first). None if there is none, or only a conversion."""
    nodes, shape = [node], edit.shape(node.output)
    found: tuple[str, list[Node]] | None = None

    def is_inner(one: Node) -> bool:
        times = sum(each.inputs.count(one.output) for each in nodes)
        return edit.reads(one.output) == times and _is_element_wise(edit, one, shape)

    if not shape or not _is_element_wise(edit, node, shape):
        return None
    while True:
        made = {one.output for one in nodes}
        read = {name for one in nodes for name in one.inputs if name not in edit.constants} - made
        if len(read) == 1 and edit.type(*read).name in BYTES:
            found = next(iter(read)), list(nodes)
        before = [edit.producer(name, Op) for name in read]
        inner = [one for one in before if one is not None and is_inner(one)]
        if not inner:
            break
        nodes.append(inner[0])
    alone = isinstance(node.attributes, (Requantize, Lookup))
    return None if found is None or (alone and len(found[1]) == 1) else found


def _is_element_wise(edit: Edit, node: Node, shape: Shape) -> bool:
    """Whether each element of a node's value, of this shape, depends on elements at the same index alone."""
    a = node.attributes
    of = a.of if isinstance(a, Quantized) else a
    if not isinstance(of, (Activate, Affine, Binary, Quantize, Dequantize, Requantize, Lookup)):
        return False
    flows = [name for name in node.inputs if name not in edit.constants]
    ones = all(edit.constants[name].size == 1 for name in node.inputs if name in edit.constants)
    same = all(np.unique(edit.constants[name]).size == 1 for name in node.parameters)
    return bool(flows) and ones and same and all(edit.shape(name) == shape for name in (*flows, node.output))


# ---------------------------------------------------------------- looking


class _Behind(NamedTuple):
    """The 8-bit or 4-bit integers behind dequantized values that are no constants.

    given: what they stand for.
    gone: the Dequantize nodes whose values nothing else reads, which may vanish.
    """

    names: Names
    given: tuple[Quantization, ...]
    types: tuple[ElementType, ...]
    gone: list[Node]


def _behind(edit: Edit, names: Names) -> _Behind | None:
    """The integers behind all these values, or None."""
    found = [one for name in names if (one := edit.producer(name, Dequantize)) is not None]
    sources, given = tuple(one.src for one in found), tuple(one.attributes.src for one in found)
    types = tuple(map(edit.type, sources))
    is_all = len(found) == len(names) and edit.constants.keys().isdisjoint(sources)
    if not is_all or any(one.scale.ndim for one in given) or any(type.name not in INTEGERS for type in types):
        return None
    gone = {one.name: one for one in found if edit.reads(one.output) == names.count(one.output)}
    return _Behind(sources, given, types, [*gone.values()])


def _constant(edit: Edit, name: str) -> tuple[Array, Quantization, int] | None:
    """(The integers of a dequantized constant, what they stand for, the axis of their scales), or None."""
    before = edit.producer(name, Dequantize)
    if before is None or before.src not in edit.constants:
        return None
    return edit.constants[before.src], before.attributes.src, before.attributes.axis


def _weight(edit: Edit, name: str, axis: int) -> tuple[Array, Quantization] | None:
    """`_constant` of int8 without a zero point, and with one scale or one for each index of this axis, or None."""
    integers, given, along = _constant(edit, name) or (np.empty(0), PLAIN, 0)
    fits = integers.dtype == np.int8 and not given.zero_point and (not given.scale.ndim or along == axis)
    return (integers, given) if fits else None
