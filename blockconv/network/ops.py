"""The ops of a network: what each one is, as a frozen record, and the shape that it gives.

This is the whole vocabulary: front ends translate into it, fusion rewrites within it, and the planner finds a
kernel for each. A record says nothing of the sizes of its inputs, so that a network can be asked for
other ones; `problem` joins the two where kernels need it. Shapes are logical, (N, C, H, W) where there are
four dimensions. `check` of each record raises ArgumentError for inputs that it cannot take.

An op that a kernel can end with an activation has it as a field; it is the identity unless fusion set it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Literal

from blockconv.core.checks import check_extents
from blockconv.core.errors import ArgumentError
from blockconv.core.problem import AdaptivePool2dProblem, Conv2dProblem, Pool2dProblem, PoolKind
from blockconv.kernels.common.activation import IDENTITY, Activation

__all__ = [
    "Activate",
    "AdaptivePool2d",
    "Affine",
    "Attributes",
    "Binary",
    "BinaryKind",
    "Concat",
    "Conv2d",
    "Lrn",
    "Pad",
    "Pool2d",
    "PoolKind",
    "ReduceMean",
    "Reshape",
    "Resize",
    "Shape",
    "Shuffle",
    "Slice",
    "Softmax",
    "Transpose",
]

Shape = tuple[int, ...]
Shapes = tuple[Shape, ...]
Pair = tuple[int, int]
Pads = tuple[Pair, Pair]  # ((top, bottom), (left, right))
BinaryKind = Literal["add", "mul", "sub", "div", "max", "min"]


@dataclass(frozen=True)
class Attributes:
    """What all ops share. `infer` gives the output's shape from those of inputs and of parameters."""

    op: ClassVar[str]
    # How many inputs and parameters (constants that a kernel may repack) there may be.
    inputs: ClassVar[range] = range(1, 2)
    parameters: ClassVar[range] = range(1)

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        """The output's shape. Raises ArgumentError."""
        raise NotImplementedError


@dataclass(frozen=True)
class Conv2d(Attributes):
    """dst = activation(conv(src, wei) + bia + res). inputs: src and perhaps res, of dst's shape; parameters: wei
    (O, I/groups, KH, KW) and perhaps bia (O,)."""

    op: ClassVar[str] = "conv2d"
    inputs: ClassVar[range] = range(1, 3)
    parameters: ClassVar[range] = range(1, 3)
    stride: Pair = (1, 1)
    pads: Pads = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    activation: Activation = IDENTITY

    def problem(self, src: Shape, wei: Shape) -> Conv2dProblem:
        """The problem that kernels are chosen for."""
        _rank(self, src, 4)
        if len(wei) != 4 or src[1] != wei[1] * self.groups:
            rule = f"has to be (O, I/groups, KH, KW) with I = {src[1]} channels of the input, groups = {self.groups}"
            raise ArgumentError(self.op, "weight", wei, rule)
        (top, bottom), (left, right) = self.pads
        n, ic, ih, iw = src
        oc, _, kh, kw = wei
        return Conv2dProblem(
            n, ic, ih, iw, oc, kh, kw, *self.stride, top, left, bottom, right, *self.dilation, self.groups
        )

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        problem = self.problem(inputs[0], parameters[0])
        if len(parameters) > 1 and parameters[1] != (problem.oc,):
            raise ArgumentError(self.op, "bias", parameters[1], f"has to be of shape ({problem.oc},)")
        if len(inputs) > 1 and inputs[1] != problem.dst_shape:
            raise ArgumentError(self.op, "residual", inputs[1], f"has to be of the output's shape, {problem.dst_shape}")
        return problem.dst_shape


@dataclass(frozen=True)
class Pool2d(Attributes):
    """Pooling by windows; `kernel` None is one window over the whole image. Fields as in Pool2dProblem."""

    op: ClassVar[str] = "pool2d"
    kind: PoolKind
    kernel: Pair | None = None
    stride: Pair = (1, 1)
    pads: Pads = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    ceil_mode: bool = False
    divisor: int | None = None

    def problem(self, src: Shape) -> Pool2dProblem:
        """The problem that kernels are chosen for."""
        _rank(self, src, 4)
        (top, bottom), (left, right) = self.pads
        n, ic, ih, iw = src
        kernel, pads = self.kernel or (ih, iw), (top, left, bottom, right)
        rest = self.ceil_mode, self.divisor
        return Pool2dProblem(self.kind, n, ic, ih, iw, *kernel, *self.stride, *pads, *self.dilation, *rest)

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        return self.problem(inputs[0]).dst_shape


@dataclass(frozen=True)
class AdaptivePool2d(Attributes):
    """The average over windows that together cover the image: PyTorch's adaptive_avg_pool2d."""

    op: ClassVar[str] = "pool2d"
    size: Pair

    def problem(self, src: Shape) -> AdaptivePool2dProblem:
        """The problem that kernels are chosen for."""
        _rank(self, src, 4)
        n, ic, ih, iw = src
        return AdaptivePool2dProblem(n, ic, ih, iw, *self.size)

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        return self.problem(inputs[0]).dst_shape


@dataclass(frozen=True)
class Activate(Attributes):
    """An activation of each element."""

    op: ClassVar[str] = "activation"
    activation: Activation

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        return inputs[0]


@dataclass(frozen=True)
class Affine(Attributes):
    """dst = activation(src * scale[c] + shift[c]) over axis 1: a batch norm that found no convolution.
    parameters: scale (C,), shift (C,)."""

    op: ClassVar[str] = "affine"
    parameters: ClassVar[range] = range(2, 3)
    activation: Activation = IDENTITY

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        src = inputs[0]
        if len(src) < 2:
            raise ArgumentError(self.op, "input", src, "has to have a channel axis, axis 1")
        for name, shape in zip(("scale", "shift"), parameters, strict=True):
            if shape != (src[1],):
                raise ArgumentError(self.op, name, shape, f"has to be of shape ({src[1]},)")
        return src


@dataclass(frozen=True)
class Binary(Attributes):
    """dst = activation(kind(a, b)) with NumPy's broadcasting, of a over b or b over a. Either may be a constant."""

    op: ClassVar[str] = "binary"
    inputs: ClassVar[range] = range(2, 3)
    kind: BinaryKind
    activation: Activation = IDENTITY

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        a, b = inputs
        rank = max(len(a), len(b))
        wide = [(1,) * (rank - len(shape)) + shape for shape in inputs]
        if any(x != y and 1 not in (x, y) for x, y in zip(*wide, strict=True)):
            raise ArgumentError(self.op, "inputs", inputs, "do not broadcast")
        return tuple(y if x == 1 else x for x, y in zip(*wide, strict=True))


@dataclass(frozen=True)
class Concat(Attributes):
    """Inputs one after the other along an axis (0 or more)."""

    op: ClassVar[str] = "concat"
    inputs: ClassVar[range] = range(1, 1 << 30)
    axis: int = 1

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        first, at = inputs[0], self.axis
        _axis(self, at, first)
        for shape in inputs:
            if len(shape) != len(first) or shape[:at] + shape[at + 1 :] != first[:at] + first[at + 1 :]:
                raise ArgumentError(self.op, "inputs", inputs, f"have to agree on every axis but {at}")
        return (*first[:at], sum(shape[at] for shape in inputs), *first[at + 1 :])


@dataclass(frozen=True)
class Lrn(Attributes):
    """src / (bias + alpha / size * sum of squares over the channels from c - floor((size-1)/2) to
    c + ceil((size-1)/2)) ** beta: ONNX's, and PyTorch's, for odd sizes."""

    op: ClassVar[str] = "lrn"
    size: int
    alpha: float = 1e-4
    beta: float = 0.75
    bias: float = 1.0

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        if len(inputs[0]) < 2:
            raise ArgumentError(self.op, "input", inputs[0], "has to have a channel axis, axis 1")
        if self.size < 1:
            raise ArgumentError(self.op, "size", self.size, "must be at least 1")
        check_extents(self.op, "size", self.size, (self.size,))
        return inputs[0]


@dataclass(frozen=True)
class Softmax(Attributes):
    """exp(src - max) / sum over one axis (0 or more)."""

    op: ClassVar[str] = "softmax"
    axis: int

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        _axis(self, self.axis, inputs[0])
        return inputs[0]


@dataclass(frozen=True)
class Resize(Attributes):
    """H and W of (N, C, H, W) resampled; either `size` or `scale` is given.

    With scale s (given, or out / in), output pixel o reads at source coordinate
    half_pixel: (o + 0.5) / s - 0.5; pytorch_half_pixel: that, or 0 where out is 1; asymmetric: o / s;
    align_corners: o * (in - 1) / (s * in - 1), or 0 where out is 1.
    linear blends the two pixels around it along each axis; nearest takes one, rounded as `nearest` says
    (round_prefer_floor rounds x.5 down, round_prefer_ceil up). Coordinates outside read the border pixel.
    """

    op: ClassVar[str] = "resize"
    mode: Literal["nearest", "linear"]
    size: Pair | None = None
    scale: tuple[float, float] | None = None
    coordinates: Literal["half_pixel", "pytorch_half_pixel", "asymmetric", "align_corners"] = "half_pixel"
    nearest: Literal["round_prefer_floor", "round_prefer_ceil", "floor", "ceil"] = "round_prefer_floor"

    def scales(self, src: Shape) -> tuple[float, float]:
        """Scale of H and of W."""
        if self.scale is not None:
            return self.scale
        assert self.size is not None
        return self.size[0] / src[2], self.size[1] / src[3]

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        src = inputs[0]
        _rank(self, src, 4)
        if (self.size is None) == (self.scale is None):
            raise ArgumentError(self.op, "size", self.size, "either size or scale is given")
        out = self.size
        if self.scale is not None:
            out = (math.floor(src[2] * self.scale[0]), math.floor(src[3] * self.scale[1]))
        if out is None or min(*out, *src[2:]) < 1:
            raise ArgumentError(self.op, "size", out, f"sizes of output and of input, {src[2:]}, must be at least 1")
        return (*src[:2], *out)


@dataclass(frozen=True)
class Pad(Attributes):
    """A constant written around: `pads` has (before, after) for each axis; negative ends crop."""

    op: ClassVar[str] = "pad"
    pads: tuple[Pair, ...]
    value: float = 0.0

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        src = inputs[0]
        if len(self.pads) != len(src):
            raise ArgumentError(self.op, "pads", self.pads, f"has to hold a pair for each of {len(src)} axes")
        dst = tuple(size + before + after for size, (before, after) in zip(src, self.pads, strict=True))
        kept = [size + min(before, 0) + min(after, 0) for size, (before, after) in zip(src, self.pads, strict=True)]
        if any(size < 0 for size in kept):
            raise ArgumentError(self.op, "pads", self.pads, f"crops more than there is of {src}")
        return dst


@dataclass(frozen=True)
class Slice(Attributes):
    """Elements begin, begin + step, ... (`size` of them) of one axis. What a Split gives is one Slice an output."""

    op: ClassVar[str] = "slice"
    axis: int
    begin: int
    size: int
    step: int = 1

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        src, at = inputs[0], self.axis
        _axis(self, at, src)
        last = self.begin + (self.size - 1) * self.step
        if self.step == 0 or self.size < 0 or (self.size and not (0 <= self.begin < src[at] and 0 <= last < src[at])):
            rule = f"begin {self.begin} and step {self.step} leave the {src[at]} elements of axis {at}"
            raise ArgumentError(self.op, "size", self.size, rule)
        return (*src[:at], self.size, *src[at + 1 :])


@dataclass(frozen=True)
class Transpose(Attributes):
    """dst's axis i is src's axis perm[i]."""

    op: ClassVar[str] = "transpose"
    perm: tuple[int, ...]

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        if sorted(self.perm) != list(range(len(inputs[0]))):
            raise ArgumentError(self.op, "perm", self.perm, f"has to permute the {len(inputs[0])} axes of {inputs[0]}")
        return tuple(inputs[0][axis] for axis in self.perm)


@dataclass(frozen=True)
class Reshape(Attributes):
    """The same elements in row-major order (plain NCHW where there are four axes) under another shape.

    A 0 in `shape` is the input's size at that place, one -1 is what remains.
    """

    op: ClassVar[str] = "reshape"
    shape: Shape

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        src = inputs[0]
        if self.shape.count(-1) > 1 or any(size < -1 for size in self.shape):
            raise ArgumentError(self.op, "shape", self.shape, "sizes are at least 0, but for one -1")
        if any(size == 0 and i >= len(src) for i, size in enumerate(self.shape)):
            raise ArgumentError(self.op, "shape", self.shape, f"has a 0 where the input, {src}, has no axis")
        shape = tuple(src[i] if size == 0 else size for i, size in enumerate(self.shape))
        known, total = math.prod(size for size in shape if size != -1), math.prod(src)
        if -1 in shape and known and total % known == 0:
            shape = tuple(total // known if size == -1 else size for size in shape)
        if math.prod(shape) != total or -1 in shape:
            raise ArgumentError(self.op, "shape", self.shape, f"cannot hold the {total} elements of {src}")
        return shape


@dataclass(frozen=True)
class ReduceMean(Attributes):
    """The mean over axes (0 or more), which stay as 1 if `keepdims`."""

    op: ClassVar[str] = "reduce_mean"
    axes: tuple[int, ...]
    keepdims: bool = True

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        for axis in self.axes:
            _axis(self, axis, inputs[0])
        kept = [1 if i in self.axes else size for i, size in enumerate(inputs[0])]
        return tuple(size for i, size in enumerate(kept) if self.keepdims or i not in self.axes)


@dataclass(frozen=True)
class Shuffle(Attributes):
    """ShuffleNet's channel shuffle: output channel k * groups + i is input channel i * (C / groups) + k."""

    op: ClassVar[str] = "shuffle"
    groups: int

    def infer(self, inputs: Shapes, parameters: Shapes) -> Shape:
        _rank(self, inputs[0], 4)
        if self.groups < 1 or inputs[0][1] % self.groups:
            raise ArgumentError(self.op, "groups", self.groups, f"has to divide the {inputs[0][1]} channels")
        return inputs[0]


def _rank(attributes: Attributes, shape: Shape, rank: int) -> None:
    if len(shape) != rank:
        raise ArgumentError(attributes.op, "input", shape, f"has to have {rank} dimensions")


def _axis(attributes: Attributes, axis: int, shape: Shape) -> None:
    if not 0 <= axis < len(shape):
        raise ArgumentError(attributes.op, "axis", axis, f"has to be one of the {len(shape)} axes of {shape}")
