"""Sums of integers whose quantization is found at run time become real numbers in the convolution that sums them.

ONNX multiplies them by the found scale times the weights' scale, in an op of its own.
"""

import math
from dataclasses import replace

import numpy as np

from blockconv.core.checks import of_rank
from blockconv.core.errors import ArgumentError
from blockconv.core.quantization import Quantization
from blockconv.core.types import Array
from blockconv.network.graph import Network, Node, holds
from blockconv.network.ops import Affine, Binary, Conv2d, Dequantize, DynamicConv2d, FindQuantization, Reshape, Slice
from blockconv.network.passes import simplify
from blockconv.network.passes.rewrite import Edit, rewritten, rule

_WHOLE = Dequantize(Quantization(1.0))  # integers as floats


def scaled(network: Network) -> Network:
    """Sums times scales are convolutions that give real numbers."""
    if not holds(network.nodes, DynamicConv2d):
        return network
    return rewritten(network, _scale)


def _factor(edit: Edit, name: str) -> tuple[str, Array] | None:
    """(the value that has a found scale as a part, constants) if this value is their product; else None."""
    node = edit.producer(name, Reshape, Slice, Binary)
    if node is None:
        return None
    a = node.attributes
    if isinstance(a, Reshape):
        inner = _factor(edit, node.src)
        return inner if inner is not None and inner[1].size == 1 else None
    if isinstance(a, Slice):
        is_scale = edit.producer(node.src, FindQuantization) is not None and (a.begin, a.size) == (0, 1)
        return (node.src, np.ones((), np.float32)) if is_scale else None
    for _, other, constant in edit.constant_operands(node) if a == Binary("mul") else ():
        inner = _factor(edit, other)
        if inner is not None:
            return inner[0], inner[1] * constant
    return None


@rule
def _scale(edit: Edit, node: Node, a: Binary) -> bool:
    """A value times a factor, where the value is made of sums alone, which take the factor in."""
    shape = edit.shape(node.output)
    if a != Binary("mul"):
        return False
    for value, other in (node.inputs, node.inputs[::-1]):
        factor = _factor(edit, other)
        if factor is None or edit.shape(value) != shape:
            continue
        found, constant = factor
        axes = [k for k, size in enumerate(of_rank(constant.shape, len(shape))) if size > 1]
        made = _Scaled(edit, found)
        try:
            if len(axes) < 2 and made.scale(value, node.output, constant.reshape(-1), *axes[:1]):
                return edit.replace((*made.old, node), *made.new)
        except ArgumentError:  # the constant is no scale of integers
            continue
    return False


class _Scaled:
    """The nodes that make a value (`old`), and nodes that make it times a found scale and constants (`new`)."""

    def __init__(self, edit: Edit, found: str) -> None:
        self.edit, self.found = edit, found
        self.old: list[Node] = []
        self.new: list[Node] = []

    def scale(self, name: str, output: str, constant: Array, axis: int = 1) -> bool:
        """Whether there are nodes that make `output` of what makes the value of that name.

        constant: one number, or one for each index of an axis.
        """
        node = self.edit.private(name, Dequantize, Reshape, DynamicConv2d, Conv2d)
        if node is None:
            return False
        a = node.attributes
        if a == _WHOLE:
            self.old.append(node)
            return self.scale(node.src, output, constant, axis)
        if isinstance(a, Reshape):
            return self._reshaped(node, output, constant, axis)
        if axis != 1 and constant.size > 1:
            return False
        if isinstance(a, DynamicConv2d) and a.dtype == "int32" and node.inputs[1] == self.found:
            given = Quantization(constant if constant.size > 1 else float(constant[0]))
            return self._put(node, replace(node, attributes=replace(a, dtype="float32", wei=given), output=output))
        is_join = isinstance(a, Conv2d) and len(node.inputs) == 2 and len(node.parameters) == 1
        return is_join and self._joined(node, output, constant)

    def _reshaped(self, node: Node, output: str, constant: Array, axis: int) -> bool:
        src, dst = self.edit.shape(node.src), self.edit.shape(node.output)
        at: list[int] = []  # one number has no axis
        if constant.size > 1:
            at = [k for k, n in enumerate(src) if (n, math.prod(src[:k])) == (dst[axis], math.prod(dst[:axis]))]
            if not at:
                return False
        value = self.edit.value_name(f"{output}.flat")
        if not self.scale(node.src, value, constant, *at[:1]):
            return False
        return self._put(node, replace(node, inputs=(value,), output=output))

    def _joined(self, node: Node, output: str, constant: Array) -> bool:
        """The same for a convolution that multiplies sums by a number per output channel and adds other sums."""
        values = [self.edit.value_name(f"{output}.{k}") for k in range(2)]
        one = np.ones(1, np.float32)
        if not all(map(self.scale, node.inputs, values, (one, constant))):
            return False
        weight = self.edit.constants[node.parameters[0]] * constant.reshape(-1, 1, 1, 1)
        parameters = (self.edit.constant(f"{node.name}.scaled", weight.astype(np.float32)),)
        return self._put(node, replace(node, inputs=tuple(values), output=output, parameters=parameters))

    def _put(self, old: Node, new: Node) -> bool:
        self.old.append(old)
        self.new.append(new)
        return True


@rule
def affine_into_dynamic(edit: Edit, node: Node, a: Affine, conv: Node, b: DynamicConv2d) -> bool:
    """A scale and a shift of channels are part of the convolution before them."""
    if not b.activation.is_identity or b.dtype != "float32" or len(conv.inputs) > 2:
        return False
    scale, shift = edit.factors(node)
    if len(conv.parameters) > 1:
        shift = edit.constants[conv.parameters[1]] * scale + shift
    bias, given = edit.stored(conv, bias=simplify.stored(shift, edit.type(node.output))), b.wei
    if not bias:
        return False
    if (scale != 1).any():
        try:
            given = Quantization(given.scale * scale)
        except ArgumentError:  # a scale of integers is positive
            return False
    parameters = (conv.parameters[0], *bias)
    return edit.merge(conv, node, replace(b, wei=given, activation=a.activation), parameters=parameters)
