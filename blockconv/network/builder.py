"""Build a network in Python, with one call for each op."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from blockconv.core.activation import activation as read_activation
from blockconv.core.checks import check_flag, check_shape, read_shape
from blockconv.core.errors import ArgumentError, NetworkError
from blockconv.core.interop import as_numpy
from blockconv.core.python import zipped
from blockconv.core.types import element
from blockconv.dispatch.boundary import output_paddings, pads, pair, read_window
from blockconv.network import ops
from blockconv.network.emitter import Emitter, own_state
from blockconv.network.graph import Network, Node, inferred
from blockconv.network.ops.rule import Tensor


class NetworkBuilder:
    """Builds a `Network`. The method of an op adds a node and returns the name of its value, for other methods.

    name: the network's name, for its errors.

    Stride, padding and dilation are as in the drop-in functions. Each op takes the `name` of its node; the default is
    the op with a number. A method raises ArgumentError, or a subclass, for bad parameters, and for values of
    shapes or types that the op does not take.

    >>> import numpy as np
    >>> from blockconv import NetworkBuilder
    >>> b = NetworkBuilder("tiny")
    >>> x = b.input("x", (1, 3, 8, 8))
    >>> y = b.conv2d(x, np.ones((4, 3, 3, 3), np.float32), padding=1, activation="relu")
    >>> b.output(b.global_avg_pool2d(y))
    >>> b.build().evaluate(np.ones((1, 3, 8, 8), np.float32))["pool2d_1"].shape
    (1, 4, 1, 1)
    """

    __getstate__ = own_state

    def __init__(self, name: str = "network") -> None:
        self.name = name
        _check_name("NetworkBuilder", "name", name)
        self._emitter = Emitter(name, folds=False)
        self._outputs: list[str] = []

    def input(self, name: str, shape: tuple[int, ...], dtype: Any = np.float32) -> str:
        """Add an input. Returns its name.

        name: the input's name.
        shape: the logical shape, (N, C, H, W) for images.
        dtype: a NumPy dtype, or "int4" or "uint4".
        """
        try:
            type = element(dtype)
            if type.dtype.kind in "cmMOSU":
                raise TypeError
        except TypeError:
            rule = "has to be a NumPy dtype of numbers or bools, the name of one, 'int4' or 'uint4'"
            raise NetworkError(self.name, "dtype", dtype, rule) from None
        self._check_free("input", name)
        sizes = read_shape(self.name, name, shape, error=NetworkError)
        check_shape(self.name, name, sizes, type.itemsize, NetworkError)
        return self._emitter.input(Tensor(name, sizes, type)).name

    def constant(self, value: Any, name: str | None = None) -> str:
        """Add a constant, an array or a number, as operand of a binary op or a concatenation. Returns its name."""
        name = name or f"constant_{len(self._emitter.constants)}"
        self._check_free("constant", name)
        return self._emitter.constant(name, as_numpy(value, self.name, name, kept=True)).name

    def output(self, *values: str) -> None:
        """Make these values outputs of the network."""
        for value in values:
            _check_name(self.name, "output", value)
        self._outputs += values

    def build(self) -> Network:
        """The network. Raises NetworkError if it has no outputs, or an op's parameter is no constant."""
        return self._emitter.network(tuple(self._outputs))

    def add(self, attributes: ops.Op, *inputs: str, parameters: tuple[Any, ...] = (), name: str | None = None) -> str:
        """Add a node of any op. Returns the name of its value, which is the node's name.

        attributes: a record of `blockconv.network.ops`.
        inputs: the names of values.
        parameters: arrays, such as weight and bias.
        name: the node's name. Default: the op with a number.

        Raises NetworkError, which names the node, for operands that the op does not take.
        """
        if not dataclasses.is_dataclass(attributes) or not hasattr(attributes, "op"):
            rule = "has to be a record of blockconv.network.ops"
            raise ArgumentError("add", "attributes", attributes, rule, 'add two values by binary("add", a, b)')
        name = name or f"{attributes.op}_{len(self._emitter.nodes)}"
        self._check_free("node", name)
        for value in inputs:
            _check_name(f"node {name!r} ({attributes.op})", "inputs", value)
            if value not in self._emitter.values:
                rule = "is no input and no constant, and no node before this one produces it"
                raise NetworkError(f"node {name!r} ({attributes.op})", "inputs", value, rule)
        arrays = {
            f"{name}.{i}": as_numpy(value, self.name, f"{name}.{i}", kept=True) for i, value in enumerate(parameters)
        }
        for held in arrays:
            self._check_free("constant", held)
        read = tuple(self._emitter.values[value] for value in inputs)
        kept = tuple(Tensor(held, array.shape, element(array.dtype)) for held, array in arrays.items())
        inferred(Node(name, attributes, inputs, name, tuple(arrays)), read, kept)  # an error changes nothing
        for held, array in arrays.items():
            self._emitter.constant(held, array)
        return self._emitter.emit(attributes, *read, parameters=kept, name=name).name

    def _check_free(self, what: str, name: str) -> None:
        _check_name(self.name, what, name)
        if name in self._emitter.values:
            raise NetworkError(self.name, what, name, "is the name of another value, and values have one producer")

    # -- one method an op, where `add` does not read well

    def conv2d(
        self,
        x: str,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        dilation: Any = 1,
        groups: int = 1,
        *,
        activation: Any = None,
        residual: str | None = None,
        name: str | None = None,
    ) -> str:
        """activation(conv(x, weight) + bias + residual), like the function `conv2d`.

        x: the name of a value of shape (N, C, H, W).
        weight: (O, C / groups, KH, KW), of the dtype of x.
        bias: None, or (O,).
        stride, padding, dilation, groups, activation: as in the function.
        residual: None, or the name of a value of the output's shape.
        name: the node's name.
        """
        w = as_numpy(weight, "conv2d", "weight", kept=True)
        steps = read_window("conv2d", (*w.shape[2:], 1, 1)[:2], stride, padding, dilation)
        attributes = ops.Conv2d(*steps, groups, read_activation(activation))
        inputs = (x,) if residual is None else (x, residual)
        return self.add(attributes, *inputs, parameters=(w,) if bias is None else (w, bias), name=name)

    def conv_transpose2d(
        self,
        x: str,
        weight: Any,
        bias: Any = None,
        stride: Any = 1,
        padding: Any = 0,
        output_padding: Any = 0,
        groups: int = 1,
        dilation: Any = 1,
        *,
        activation: Any = None,
        name: str | None = None,
    ) -> str:
        """activation(conv_transpose(x, weight) + bias), like the function `conv_transpose2d`.

        x: the name of a value of shape (N, C, H, W).
        weight: (C, O / groups, KH, KW), of the dtype of x.
        bias: None, or (O,).
        stride, padding, output_padding, groups, dilation, activation: as in the function.
        name: the node's name.
        """
        op = "conv_transpose2d"
        w = as_numpy(weight, op, "weight", kept=True)
        strides, edges, dilations = read_window(op, (*w.shape[2:], 1, 1)[:2], stride, padding, dilation)
        more = output_paddings(op, output_padding, strides, dilations)
        cut: Any = tuple((begin, end - extra) for (begin, end), extra in zipped(edges, more))
        attributes = ops.ConvTranspose2d(strides, cut, dilations, groups, read_activation(activation))
        return self.add(attributes, x, parameters=(w,) if bias is None else (w, bias), name=name)

    def max_pool2d(
        self,
        x: str,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        name: str | None = None,
    ) -> str:
        """The largest element of each window. stride: by default kernel_size."""
        return self._pool("max", x, kernel_size, stride, padding, ceil_mode, name)

    def avg_pool2d(
        self,
        x: str,
        kernel_size: Any,
        stride: Any = None,
        padding: Any = 0,
        ceil_mode: bool = False,
        count_include_pad: bool = True,
        name: str | None = None,
    ) -> str:
        """The mean of each window. stride: by default kernel_size."""
        counts = check_flag("avg_pool2d", "count_include_pad", count_include_pad)
        kind: ops.PoolKind = "avg_include_padding" if counts else "avg_exclude_padding"
        return self._pool(kind, x, kernel_size, stride, padding, ceil_mode, name)

    def _pool(
        self, kind: ops.PoolKind, x: str, kernel: Any, stride: Any, padding: Any, ceil_mode: bool, name: str | None
    ) -> str:
        size = pair("pool2d", "kernel_size", kernel)
        step = size if stride is None else pair("pool2d", "stride", stride)
        sides = pads("pool2d", padding, size, step, (1, 1))
        return self.add(ops.Pool2d(kind, size, step, sides, (1, 1), ceil_mode), x, name=name)

    def global_avg_pool2d(self, x: str, name: str | None = None) -> str:
        """The mean of each channel: (N, C, 1, 1)."""
        return self.add(ops.Pool2d("avg_exclude_padding"), x, name=name)

    def adaptive_avg_pool2d(self, x: str, output_size: Any, name: str | None = None) -> str:
        """The mean of each of `output_size` windows, like the function `adaptive_avg_pool2d`."""
        return self.add(ops.AdaptivePool2d(pair("adaptive_avg_pool2d", "output_size", output_size)), x, name=name)

    def activation(self, x: str, activation: Any, name: str | None = None) -> str:
        """An activation of `conv2d`, or another function of each element, such as "exp" or ("elu", 0.5).

        A name that does not exist raises an error, which lists all names.
        """
        return self.add(ops.Activate(read_activation(activation, "activation", alone=True)), x, name=name)

    def binary(self, kind: ops.BinaryKind, a: str, b: str, name: str | None = None) -> str:
        """add, sub, mul, div, max or min of two values, broadcast as in NumPy."""
        return self.add(ops.Binary(kind), a, b, name=name)

    def affine(self, x: str, scale: Any, shift: Any, name: str | None = None) -> str:
        """x * scale[c] + shift[c] over axis 1. scale, shift: arrays of shape (C,)."""
        return self.add(ops.Affine(), x, parameters=(scale, shift), name=name)

    def concat(self, *values: str, axis: int = 1, name: str | None = None) -> str:
        """The concatenation of values along an axis."""
        return self.add(ops.Concat(axis), *values, name=name)


def _check_name(owner: str, argument: str, name: object) -> None:
    if not isinstance(name, str):
        rule = "has to be a str: a name"
        raise NetworkError(owner, argument, name, rule, "for an array, give the name that constant(array) returns")
