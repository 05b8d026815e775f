"""Fusion: passes that rewrite a network to compute the same with less memory traffic.

A pass is a function from a network to a network. `fuse` runs all passes, in an order in which each finds the forms that
earlier ones leave. A rule never merges a value that is an output or has other readers. It folds constants in float64
and rounds once, unless their type cannot hold the result.
"""

import functools
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from blockconv.core.activation import Activation, ActivationKind, activation
from blockconv.core.errors import NetworkError
from blockconv.core.python import zipped
from blockconv.core.types import FloatType, element, ieee
from blockconv.network.graph import Network, Node, folded
from blockconv.network.ops import (
    Activate,
    AdaptivePool2d,
    Affine,
    Binary,
    Concat,
    Conv2d,
    Convolution,
    ConvTranspose2d,
    DynamicConv2d,
    Op,
    Pad,
    Pool2d,
    QuantizedConv2d,
    Reshape,
    Weighted,
)
from blockconv.network.passes import dynamic, integers, precision, products, simplify
from blockconv.network.passes.for_kernels import widened
from blockconv.network.passes.rewrite import Edit, adding_convolution, drop_dead_code, refitted, rewritten, rule
from blockconv.network.passes.spelled import SPELLED, norm_of_pixels
from blockconv.network.passes.volumes import VOLUMES


@ieee
def fuse(network: Network, dtype: FloatType = "float32") -> Network:
    """The network after all passes. For other input shapes, they run again on the given network.

    dtype: the type in which `precision.stored_as` will hold the weights of a network of float32.
    """
    fused = network
    for step in PASSES:
        before = fused
        fused = fuse_epilogues(before, dtype) if step is fuse_epilogues else step(before)
        for name in before.tensors.keys() & fused.tensors.keys():
            if before.tensors[name] != fused.tensors[name]:
                rule = f"changes {before.tensors[name]} to {fused.tensors[name]}"
                raise NetworkError(network.name, "pass", step.__name__, rule, "please report it with the network")
    return refitted(network, fused, functools.partial(fuse, dtype=dtype))


# ---------------------------------------------------------------- redundant nodes


def fold_constants(network: Network) -> Network:
    """Turn nodes whose inputs are all constants into constants."""

    def rule(edit: Edit, node: Node) -> bool:
        value = folded(node, edit.constants, edit.type(node.output))
        return value is not None and edit.fold(node, value)

    return rewritten(network, rule)


def merge_equal(network: Network) -> Network:
    """Merge nodes that apply the same op to the same values. Nodes that make outputs of the network stay."""
    kept: dict[object, Node] = {}
    values: dict[str, str] = {}  # removed values, and their replacements
    nodes, merged = [], dict(network.merged)
    for node in network.nodes:
        node = node.reading(values)
        key = node.attributes, repr(node.attributes), node.inputs, node.parameters  # 0.0 and -0.0 are equal
        first = kept.setdefault(key, node) if node.attributes.folds else node
        if first is node or node.output in network.outputs:
            nodes.append(node)
        else:
            values[node.output], merged[node.name] = first.output, first.name
    return network.changed(nodes, merged=merged) if values else network


def unify(network: Network) -> Network:
    """Give each op one form (see `simplify`), and run ops of volumes on images (see `volumes`)."""
    return rewritten(network, norm_of_pixels, *simplify.SHAPES, *simplify.CHANNELS, *SPELLED, *VOLUMES)


def fuse_products(network: Network) -> Network:
    """Make attention one op, and let products read and write any order of axes: see `products`."""
    return rewritten(rewritten(network, *products.ATTENTION), *products.PRODUCTS)


# ---------------------------------------------------------------- into convolutions and pools


def fold_into_windows(network: Network) -> Network:
    """Turn a `Pad` of an image into padding of the convolution or the pool that reads it. Turn a fully connected layer
    over a flattened image into a convolution by a kernel as large as the image."""
    return rewritten(network, _pad_into_conv, _pad_into_pool, _flat_conv)


@rule
def _pad_into_conv(edit: Edit, node: Node, a: Conv2d, before: Node, pad: Pad) -> bool:
    pads = _joined(pad, a.pads) if pad.value == 0 else None
    return pads is not None and edit.skip(before, node, replace(a, pads=pads))


@rule
def _pad_into_pool(edit: Edit, node: Node, a: Pool2d, before: Node, pad: Pad) -> bool:
    pads = None if a.kernel is None else _joined(pad, a.pads)
    if pads is None:
        return False
    if a.kind == "max":
        return pad.value == -np.inf and edit.skip(before, node, replace(a, pads=pads))
    # The pad's pixels count in an average; the pool's own padding may not count.
    if pad.value != 0 or any(map(any, a.pads)) or a.ceil_mode:
        return False
    return edit.skip(before, node, replace(a, pads=pads, kind="avg_include_padding"))


def _joined(pad: Pad, pads: Any) -> Any:
    """The pads of `pad` and of the op that follows, added; None if `pad` pads more than H and W, or crops."""
    if len(pad.pads) != 4 or any(map(any, pad.pads[:2])) or any(min(ends) < 0 for ends in pad.pads):
        return None
    return tuple((b + before, e + after) for (b, e), (before, after) in zipped(pad.pads[2:], pads))


@functools.partial(rule, shared=True)
def _flat_conv(edit: Edit, node: Node, a: Convolution, flat: Node, b: Reshape) -> bool:
    if len(node.inputs) > 1:
        return False
    src, wide, wei = (edit.shape(name) for name in (*flat.inputs, *node.inputs, node.parameters[0]))
    if len(src) != 4 or wide != (src[0], src[1] * src[2] * src[3], 1, 1) or wei[1:] != wide[1:] or 0 in src:
        return False
    if any(map(any, a.pads)) or (a.stride, a.dilation, a.groups) != ((1, 1), (1, 1), 1):
        return False
    weight = edit.constants[node.parameters[0]].reshape(wei[0], *src[1:])
    parameters = (edit.constant(f"{node.name}.weight", weight), *node.parameters[1:])
    return edit.skip(flat, node, a, parameters=parameters)


def fuse_epilogues(network: Network, dtype: FloatType = "float32") -> Network:
    """Fuse scales and shifts of channels, parallel convolutions, a residual and an activation into a convolution. Fuse
    an activation into an affine or binary op. dtype: see `fuse`."""
    into_conv, together = (functools.partial(rule, dtype=dtype) for rule in (_affine_into_conv, _parallel_convs))
    affines = into_conv, dynamic.affine_into_dynamic, integers.affine_into_conv
    return rewritten(network, *affines, together, _residual_into_conv, _activation_into, _activation_before_concat)


@rule
def _affine_into_conv(
    edit: Edit, node: Node, a: Affine, conv: Node, b: Conv2d | ConvTranspose2d, dtype: FloatType
) -> bool:
    if not b.activation.is_identity:
        return False
    scale, shift = edit.factors(node)
    is_scaled = simplify.even(scale) != 1
    if len(conv.inputs) > 1 and is_scaled:  # it would scale the residual
        return False
    weight, *bias = edit.parameters(conv)
    parameters, type = conv.parameters[0], element(weight.dtype)
    if is_scaled:
        # (groups, input channels, output channels, ...) of a transposed convolution, (output channels, ...) of others.
        groups, turned = b.groups, isinstance(b, ConvTranspose2d)
        split = (groups, -1, *weight.shape[1:]) if turned else weight.shape
        along = (groups, 1, weight.shape[1], 1, 1) if turned else (-1, 1, 1, 1)
        wide = weight.astype(np.float64).reshape(split) * scale.reshape(along)
        largest = np.abs(wide).max(axis=(1, 3, 4) if turned else (1, 2, 3), keepdims=True)
        scaled = simplify.stored(wide, type, largest)
        if scaled is None or (dtype != "float32" and simplify.stored(wide, element(dtype), largest) is None):
            return False
        parameters = edit.constant(f"{conv.name}.weight", scaled.reshape(weight.shape))
    total = simplify.stored(bias[0].astype(np.float64) * scale + shift if bias else shift, type.computed)
    shifts = edit.stored(conv, bias=total)
    made = replace(b, activation=a.activation)
    return bool(shifts) and edit.merge(conv, node, made, parameters=(parameters, *shifts))


class _Branch(NamedTuple):
    """A convolution's numbers in float64, and its nodes (`old`): one, or none for the value itself."""

    old: tuple[Node, ...]
    weight: npt.NDArray[np.float64]
    bias: npt.NDArray[np.float64]
    attributes: Conv2d


@rule
def _parallel_convs(edit: Edit, node: Node, a: Binary, conv: Node, b: Conv2d, at: int, dtype: FloatType) -> bool:
    """Merge the sum of two convolutions of one value into one, if one's window contains the other's.

    RepVGG and MobileOne have these sums. A scaled copy of the value, or the value itself, is a 1x1 convolution.
    """
    if a.kind != "add" or len({edit.shape(name) for name in (*node.inputs, node.output)}) > 1:
        return False
    wide = _branch(edit, conv.output, conv)
    more = _branch(edit, node.inputs[1 - at], conv, dtype) if wide else None
    taps = _taps(more, wide) if wide and more else None
    if wide is None or more is None or taps is None:
        return False
    weight = wide.weight.copy()
    weight[:, :, taps[0][:, None], taps[1]] += more.weight
    type = edit.type(conv.parameters[0])
    made = simplify.stored(weight, type, np.abs(weight).max(axis=(1, 2, 3), keepdims=True))
    parameters = edit.stored(conv, weight=made, bias=simplify.stored(wide.bias + more.bias, type.computed))
    attributes = replace(b, activation=a.activation)
    return bool(parameters) and edit.merge(conv, node, attributes, *more.old, parameters=parameters)


def _branch(edit: Edit, name: str, beside: Any, dtype: FloatType = "float32") -> _Branch | None:
    """A value as a convolution of the input of `beside`, with the same strides and groups; else None.

    In 16-bit types, refuse a scaled copy: small weights that are added to it would lose their last bits.
    """
    source, own = beside.src, beside.attributes
    oc, per_group, *_ = edit.shape(beside.parameters[0])
    conv = edit.private(name, Conv2d)
    if conv:
        attributes = conv.attributes
        alike = (attributes.stride, attributes.groups) == (own.stride, own.groups)
        if conv.inputs != (source,) or not alike or not attributes.activation.is_identity:
            return None
        weight, *bias = edit.factors(conv)
        return _Branch((conv,), weight, bias[0] if bias else np.zeros(oc), attributes)
    affine = edit.private(name, Affine)
    narrow = dtype != "float32" or edit.type(source).is_half
    if own.stride != (1, 1) or edit.shape(source)[1] != oc or narrow:
        return None
    if affine and affine.inputs == (source,) and affine.attributes.activation.is_identity:
        scale, shift = edit.factors(affine)
    elif name == source:
        scale, shift = np.ones(oc), np.zeros(oc)
    else:
        return None
    weight = np.zeros((oc, per_group, 1, 1))
    weight[np.arange(oc), np.arange(oc) % per_group, 0, 0] = scale
    return _Branch((affine,) if affine else (), weight, shift, Conv2d(groups=own.groups))


def _taps(inner: _Branch, outer: _Branch) -> list[npt.NDArray[np.intp]] | None:
    """For each tap of `inner`, the tap of `outer` that reads the same pixel, along H and W; None if one has none."""
    found = []
    for axis in (0, 1):
        (count, step, pad), (size, outer_step, outer_pad) = (
            (one.weight.shape[2 + axis], one.attributes.dilation[axis], one.attributes.pads[axis][0])
            for one in (inner, outer)
        )
        at, rest = np.divmod(np.arange(count) * step + outer_pad - pad, outer_step)
        if rest.any() or at[0] < 0 or at[-1] >= size:
            return None
        found.append(at)
    return found


@rule
def _residual_into_conv(edit: Edit, node: Node, a: Binary) -> bool:
    """Let a convolution's store add the other operand of an addition. If both are convolutions, the later one adds."""
    found = adding_convolution(edit, node, _gives_floats) if a.kind == "add" else None
    if found is None:
        return False
    conv, other = found
    inputs = (*conv.inputs, node.inputs[other])
    return edit.merge(conv, node, replace(conv.attributes, activation=a.activation), inputs=inputs)


def _gives_floats(attributes: Op) -> bool:
    """Whether passes may fuse later ops into the op: no, if it is a convolution of integers that gives integers."""
    kinds = (QuantizedConv2d, DynamicConv2d)
    return not isinstance(attributes, kinds) or attributes.dtype == "float32"


_ACTIVATING = Weighted, Affine, Binary, Activate  # ops that may end with an activation
_POOLS = Pool2d, AdaptivePool2d


@rule
def _activation_into(edit: Edit, node: Node, a: Activate) -> bool:
    if a.activation.kind == ActivationKind.FUNCTION:
        return False
    before = edit.private(node.src, *_ACTIVATING)
    if before is None or not _gives_floats(b := before.attributes):
        return False
    if isinstance(b, Binary) and not edit.type(node.output).is_float:
        return False
    joined = _after(b.activation, a.activation)
    return bool(joined) and edit.merge(before, node, replace(b, activation=joined))


@rule
def _activation_before_concat(edit: Edit, node: Node, a: Activate, concat: Node, b: Concat) -> bool:
    """Move an activation of a concatenation to its inputs, if each can be fused with it or does not need it."""
    act, parts = a.activation, list(concat.inputs)
    if act.kind == ActivationKind.FUNCTION:
        return False
    at = [i for i, name in enumerate(parts) if not (act.name == "relu" and _is_nonnegative(edit, name))]
    if not all(edit.private(parts[i], *_ACTIVATING[:3]) for i in at):
        return False
    made = []
    for i in at:
        value = edit.value_name(f"{node.output}.{i}")
        made.append(Node(f"{node.name}.{i}", a, (parts[i],), value))
        parts[i] = value
    return edit.replace((concat, node), *made, replace(concat, inputs=tuple(parts), output=node.output))


def _is_nonnegative(edit: Edit, name: str) -> bool:
    """Whether a value surely has no negative numbers: it comes from a ReLU or sigmoid through pools and moves."""
    if before := edit.producer(name, *_ACTIVATING):
        act = before.attributes.activation
        return act.name == "sigmoid" or (act.number == 0 and act.first >= 0)
    before = edit.producer(name, Op)
    if before is None or (before.attributes.on_integers() != "moves" and not isinstance(before.attributes, _POOLS)):
        return False
    is_sum_turned = (getattr(before.attributes, "divisor", None) or 1) < 0
    return not is_sum_turned and all(_is_nonnegative(edit, source) for source in before.inputs)


def _after(first: Activation, second: Activation) -> Activation | None:
    """One activation that equals both in turn; None if no activation does."""
    if first.is_identity:
        return second
    if first.number != 0 or second.number != 0:
        return None
    low, high = (min(max(bound, second.first), second.second) for bound in (first.first, first.second))
    return activation(("clip", low, high))


PASSES = (
    drop_dead_code,
    integers.convolutions,
    dynamic.scaled,
    fold_constants,
    merge_equal,
    unify,
    fuse_products,
    fold_into_windows,
    fuse_epilogues,
    integers.stores,
    integers.lookups,
    precision.conversions,
    unify,
    drop_dead_code,
    widened,
    integers.known_weights,
)
