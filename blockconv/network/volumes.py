"""Convolutions and pools of sequences, (N, C, L), images, and volumes, (N, C, D, H, W), by ops of images.

A sequence is an image of one row. A volume becomes the images of its slices, (D * N, C, H, W), with slices outermost.
The taps of a convolution along D become more input channels: each slice of the result reads its slices concatenated.
A pool pools each slice, and then along D: it takes a volume's slices as an image of D rows and N * C * H * W columns.
`passes.volumes` lets the ops between them run on images too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from blockconv.core.checks import Pair, Shape
from blockconv.network.emitter import Unsupported
from blockconv.network.lowering import Translation
from blockconv.network.ops import (
    AdaptivePool2d,
    Affine,
    Binary,
    Conv2d,
    Convolution,
    ConvTranspose2d,
    Pad,
    Pool2d,
    QuantizedConv2d,
    Transpose,
)
from blockconv.network.ops.rule import Tensor, Tensors

TO_IMAGES, TO_VOLUME = (2, 0, 1, 3, 4), (1, 2, 0, 3, 4)  # between (N, C, D, H, W) and (D, N, C, H, W)


class Depth(NamedTuple):
    """The windows of a convolution or a pool along D. The ops of images have the windows along H and W."""

    size: int
    stride: int = 1
    dilation: int = 1
    pads: Pair = (0, 0)


class Window(NamedTuple):
    """The windows of a convolution or a pool, along (D,) H and W; D is for volumes.

    rank: dimensions of the images. If it is 1, images and windows have one row.
    """

    rank: int
    kernel: Shape
    stride: Shape
    pads: tuple[Pair, ...]
    dilation: Shape

    @classmethod
    def of(cls, kernel: Sequence[int], stride: Sequence[int], pads: Sequence[Any], dilation: Sequence[int]) -> Window:
        """The windows, from a number for each dimension; pads: (before, after)."""
        axes = -max(2, len(kernel))
        sides = (1, *kernel)[axes:], (1, *stride)[axes:], ((0, 0), *pads)[axes:], (1, *dilation)[axes:]
        return cls(len(kernel), *sides)

    @property
    def depth(self) -> Depth:
        """The windows along D."""
        return Depth(self.kernel[0], self.stride[0], self.dilation[0], self.pads[0])

    def within(self, made: Any) -> Any:
        """An op with the windows along H and W."""
        kernel = {"kernel": self.kernel[-2:]} if isinstance(made, Pool2d) else {}
        return replace(made, stride=self.stride[-2:], pads=self.pads[-2:], dilation=self.dilation[-2:], **kernel)


def as_images(call: Translation, x: Tensor, rank: int) -> Tensor:
    """x as (N, C, H, W), or as (N, C, D, H, W) for a volume. rank: dimensions of its images. x may lack N."""
    if x.rank == rank + 2 and rank > 1:
        return x
    shape = x.shape if x.rank == rank + 2 else (1, *x.shape)
    return call.reshape(x, shape if rank > 1 else (*shape[:2], 1, shape[2]))


def as_given(call: Translation, y: Tensor, x: Tensor, rank: int) -> Tensor:
    """Undo `as_images` for a result: give `y` the dimensions that `x` has."""
    if x.rank == rank + 2 and rank > 1:
        return y
    shape = y.shape if rank > 1 else (*y.shape[:2], y.shape[3])
    return call.reshape(y, shape if x.rank == rank + 2 else shape[1:])


Weight = Callable[..., Tensor]  # makes the weight; an argument changes the array first


def convolution(
    call: Translation,
    made: Convolution | ConvTranspose2d,
    x: Tensor,
    window: Window,
    weight: Weight,
    bias: Tensors,
    others: Tensors = (),
) -> Tensor:
    """A convolution, or a transposed one. made: the op without its windows. weight, others: see `convolved`."""
    made, image = window.within(made), as_images(call, x, window.rank)
    if window.rank == 3:
        make, more = (transposed, ()) if isinstance(made, ConvTranspose2d) else (convolved, (others,))
        y = make(call, made, image, weight, bias, window.depth, *more)
    else:
        rows: Any = [lambda w: w[:, :, None]] if window.rank == 1 else []
        parameters = weight(*rows), *bias
        if isinstance(made, ConvTranspose2d):
            y = call.emit(made, image, parameters=parameters)
        else:
            y = call.convolve(made, image, others, parameters)
    return as_given(call, y, x, window.rank)


def pool(call: Translation, made: Pool2d | AdaptivePool2d, x: Tensor, rank: int, along: Depth | int) -> Tensor:
    """A pool of images of `rank` dimensions. made: the op along H and W. along: see `pooled`."""
    image = as_images(call, x, rank)
    y = pooled(call, made, image, along) if rank == 3 else call.emit(made, image)
    return as_given(call, y, x, rank)


def _also_of_none(make: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Extend an op to 0 volumes: the result is empty, and has the other sizes of one volume's result."""

    @functools.wraps(make)
    def made(call: Translation, op: Any, x: Tensor, *more: Any) -> Tensor:
        if x.shape[0]:
            return make(call, op, x, *more)
        first = len(call.emitter.nodes)
        y = make(call, op, Tensor(call.emitter.value_name("volume"), (1, *x.shape[1:]), x.type), *more)
        call.emitter.drop(first)
        return call.constant(np.zeros((0, *y.shape[1:]), y.type.dtype), "empty")

    return made


@_also_of_none
def convolved(
    call: Translation,
    made: Convolution,
    x: Tensor,
    weight: Weight,
    bias: Tensors,
    depth: Depth,
    others: Tensors,
) -> Tensor:
    """The convolution of a volume.

    made: the op along H and W.
    weight: makes a constant of the weight (O, I/groups, KD, KH, KW); a function may change it first.
    others: the inputs after the first.

    Groups have their own channels, so each tap is then a convolution that adds to the previous one.
    """
    n, zero = x.shape[0], made.src.zero_point if isinstance(made, QuantizedConv2d) else 0
    if not isinstance(made, (Conv2d, QuantizedConv2d)) and any(depth.pads):
        raise Unsupported("3-D windows with padding, of integers whose zero point is found at run time")
    taps = [*_taps(call, _images(call, x), n, depth, float(zero))]
    if made.groups == 1:
        wide = call.joined(1, taps)
        wei = weight(lambda w: np.ascontiguousarray(w.swapaxes(1, 2)).reshape(w.shape[0], -1, *w.shape[3:]))
        return _volume(call, call.convolve(made, wide, others, (wei, *bias)), n)
    if not isinstance(made, Conv2d):
        raise Unsupported("3-D windows of integers in groups")
    total: Tensors = ()
    for k, tap in enumerate(taps):
        total = (call.convolve(made, tap, total, (_tap(weight, k), *(() if total else bias))),)
    return _volume(call, total[0], n)


def _tap(weight: Weight, k: int) -> Tensor:
    """The weight of images for one tap along D."""
    return weight(lambda w: np.ascontiguousarray(w[:, :, k]))


def _taps(call: Translation, y: Tensor, n: int, depth: Depth, zero: float) -> Iterator[Tensor]:
    """For each tap along D, the slices that the result's slices read. Slices outside hold `zero`."""
    size, stride, dilation, (before, after) = depth
    reach, d = dilation * (size - 1) + 1, y.shape[0] // n
    count = (before + d + after - reach) // stride + 1
    if count < 1 or 0 in y.shape:
        raise call.error("input", y.shape, f"has {d} slices, and {before + after} of padding, for windows of {reach}")
    y = _padded(call, y, before * n, ((count - 1) * stride + reach - before - d) * n, zero)
    each, c, h, w = (n, *y.shape[1:]) if stride == 1 else (1, n * y.shape[1], *y.shape[2:])
    wide = call.reshape(y, (-1, c, h, w))
    for k in range(size):
        part = call.part(wide, 0, k * dilation * each, count * each, stride, helps=True)
        yield call.reshape(part, (count * n, *y.shape[1:]))


@_also_of_none
def transposed(
    call: Translation,
    made: ConvTranspose2d,
    x: Tensor,
    weight: Weight,
    bias: Tensors,
    depth: Depth,
) -> Tensor:
    """The transposed convolution of a volume: each tap's images are added to the images that they overlap.

    made, weight: see `convolved`; the weight is (I, O/groups, KD, KH, KW).
    depth: its pads cut slices, or add them if they are negative.

    Slice i and tap k add to slice i * stride + k * dilation. So slices with one remainder by the stride are one sum,
    and the slices of all remainders interleave.
    """
    n, d = x.shape[0], x.shape[2]
    size, stride, dilation, (begin, end) = depth
    at = [divmod(k * dilation, stride) for k in range(size)]
    rows, count = d + at[-1][0], (d - 1) * stride + dilation * (size - 1) + 1 - begin - end
    if count < 1 or 0 in x.shape:
        raise call.error("input", x.shape, f"gives an output of {count} slices, with pads {depth.pads}")
    if {rest for _, rest in at} != {*range(min(stride, size))}:
        raise Unsupported(f"dilation={dilation} and stride={stride} along D")
    y, sums = _images(call, x), dict[int, Tensor]()
    once = size == stride and dilation == 1 and begin + count <= rows * stride  # each slice is one tap's, with its bias
    for k, (first, rest) in enumerate(at):
        z = call.emit(made, y, parameters=(_tap(weight, k), *(bias if once else ())))
        z = _padded(call, z, first * n, (rows - d - first) * n)
        sums[rest] = call.helper(Binary("add"), sums[rest], z) if rest in sums else z
    _, c, h, w = z.shape
    parts = [call.reshape(sums[rest], (rows, n * c, h, w)) for rest in range(len(sums))]
    wide = call.joined(1, parts)
    if len(parts) < stride:
        wide = call.helper(Pad(((0, 0), (0, (stride - len(parts)) * n * c), (0, 0), (0, 0))), wide)
    z = call.reshape(wide, (rows * stride * n, c, h, w))
    z = _padded(call, z, 0, (begin + count - rows * stride) * n)
    z = call.part(z, 0, begin * n, count * n, helps=True)
    if bias and not once:
        ones = call.constant(np.ones(c, bias[0].type.dtype), "ones")
        z = call.emit(Affine(), z, parameters=(ones, *bias))
    return _volume(call, z, n)


def _padded(call: Translation, y: Tensor, before: int, after: int, value: float = 0.0) -> Tensor:
    ends = max(0, before), max(0, after)
    return call.helper(Pad((ends, (0, 0), (0, 0), (0, 0)), value), y) if any(ends) else y


@_also_of_none
def pooled(call: Translation, made: Pool2d | AdaptivePool2d, x: Tensor, along: Depth | int) -> Tensor:
    """The pool of a volume: `made` along H and W, then the same along D.

    along: its windows along D, or the number of slices that an adaptive pool gives.
    """
    n, c, d = x.shape[:3]
    y = call.emit(made, _images(call, x))
    h, w = y.shape[2:]
    if along == Depth(1):
        return _volume(call, y, n)
    if isinstance(along, Depth):
        sides: dict[str, Any] = {"kernel": along.size, "stride": along.stride, "dilation": along.dilation}
        sides = {name: (size, 1) for name, size in sides.items()} | {"pads": (along.pads, (0, 0))}
        sides |= {"divisor": 1} if isinstance(made, Pool2d) and made.divisor is not None else {}
    else:
        sides = {"size": (along, n * c * h * w)}
    y = call.emit(replace(made, **sides), call.reshape(y, (1, 1, d, n * c * h * w)))
    return _volume(call, call.reshape(y, (-1, c, h, w)), n)


def _images(call: Translation, x: Tensor) -> Tensor:
    n, c, d, h, w = x.shape
    return call.reshape(call.helper(Transpose(TO_IMAGES), x), (d * n, c, h, w))


def _volume(call: Translation, y: Tensor, n: int) -> Tensor:
    return call.helper(Transpose(TO_VOLUME), call.reshape(y, (-1, n, *y.shape[1:])))
