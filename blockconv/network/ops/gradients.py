"""Ops of training: convolutions whose weights flow, gradients, and norms and pools that keep what gradients need.

An op may have further results. A node `FurtherResult` behind its node makes each of these a value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from blockconv.core.checks import Pair, Shape, check_same
from blockconv.core.layout import NCHW, NHWC, Layout, row_major
from blockconv.core.python import zipped
from blockconv.core.types import FLOATS, Array, Types, element
from blockconv.network.ops.base import OUTPUT, Buffers, Further, Op, Trained
from blockconv.network.ops.rule import Layouts, Requests, Site, View
from blockconv.network.ops.windows import AdaptivePool2d, Conv2d, ConvTranspose2d, Pool2d, framed_image, taps_of

__all__ = [
    "Conv2dBackwardWeights",
    "FlowingConv2d",
    "FurtherResult",
    "MaxPool2dIndices",
    "PoolBackward",
]


class FurtherResult(Op):
    """A further result of the node that makes the input.

    number: counted from 0.
    shape, dtype: the result's; None: the input's shape.
    """

    op = "result"
    folds = False
    number: int
    shape: Shape | None
    dtype: str

    def infer(self, src: Shape) -> Shape:
        return src if self.shape is None else self.shape

    def views(self, site: Site, layouts: Layouts) -> Iterator[View]:
        rank = site.output.rank
        for src in layouts:
            yield View((src,), src if rank == src.ndim else row_major(rank))


class _OfWeights(Trained):
    """The base of ops with a weight that flows.

    of: the op of a constant weight.
    last: whether the weight has channels last in memory; else it is row-major.
    """

    of_images = True
    of: Conv2d | ConvTranspose2d
    last: bool = False

    @property
    def weights(self) -> Layout:
        """The layout of the weight."""
        return NHWC if self.last else NCHW

    def problem_at(self, site: Site) -> Any:
        return super().problem_at(site).named(site.name)

    def types_at(self, site: Site) -> Types:
        return self.of.types_at(site)


def _of_constant(name: str) -> Any:
    """A method of the op of a constant weight, with the operands of that op."""

    def method(self: FlowingConv2d, src: Any, *parameters: Any) -> Any:
        of = self.of
        return getattr(of, name)(*of.operands([src], parameters))

    return method


class FlowingConv2d(_OfWeights):
    """A convolution or a transposed one whose weight flows. Each run of the plan packs the weight.

    inputs: src, wei, and perhaps bia, of the type of the sums.
    """

    op = "flowing_conv2d"
    inputs = range(2, 4)
    packs = True

    def problem(self: Any, *shapes: Shape) -> Any:
        return self.of.problem(*shapes[:2])

    infer, infer_type, compute = map(_of_constant, ("infer", "infer_type", "compute"))

    def src_layouts(self, site: Site, src: Layout, dst: Layout) -> Layouts | None:
        return (src, self.weights, row_major(1))[: len(site.inputs)]


class Conv2dBackwardWeights(_OfWeights):
    """The gradient of a convolution's weight, (O, I/groups, KH, KW).

    inputs: the convolution's, and its output's gradient.
    kernel: KH and KW.
    bias: whether the gradient of the bias, (O,), is a result beside it.
    """

    op = "conv2d_backward_weights"
    inputs = range(2, 3)
    takes = FLOATS
    told = "weights", "bias"
    reads_as_dst = True
    kernel: Pair = (1, 1)
    bias: bool = False

    def problem(self, *shapes: Shape) -> Any:
        src, grad = shapes
        problem = self.of.problem(src, (grad[1], src[1] // self.of.groups, *self.kernel)).backward_weights()
        check_same(self.op, "grad", grad, problem.dst_shape, "the output")
        return problem

    def infer(self, src: Shape, grad: Shape) -> Shape:
        return self.problem(src, grad).wei_shape

    def further(self, site: Site) -> Further:
        return (((site.inputs[1].shape[1],), site.output.type),) * self.bias

    def buffers(self, count: int) -> Buffers:
        return [0, 1, OUTPUT, OUTPUT - 1 if self.bias else None]

    def compute(self, src: Array, grad: Array) -> Any:
        p, g = self.problem(src.shape, grad.shape), self.of.groups
        dst = np.zeros((g, p.oc // g, p.ic // g, p.kh, p.kw))
        given = grad.reshape(p.n, g, p.oc // g, -1)
        for y, x, window in taps_of(framed_image(src, p), p):
            pixels = window.reshape(p.n, g, p.ic // g, -1)
            dst[..., y, x] = (given @ pixels.swapaxes(2, 3)).sum(axis=0)
        made = dst.reshape(p.wei_shape)
        return (made, grad.sum(axis=(0, 2, 3))) if self.bias else made

    def requests(self, site: Site, srcs: Layouts, dsts: Layouts) -> Requests:
        yield self.op, self.problem_at(site), srcs, srcs  # the row's destination is the gradient that it reads

    def dst_layout(self, site: Site, dst: Layout) -> Layout:
        return self.weights


class MaxPool2dIndices(Trained):
    """A max pool. The further result is each maximum's index in its plane, int64."""

    op = row_op = "pool2d_indices"
    takes = FLOATS
    of: Pool2d

    problem = FlowingConv2d.problem

    def further(self, site: Site) -> Further:
        return ((None, element("int64")),)

    def compute(self, src: Array) -> Any:
        p = self.of.problem(src.shape)
        at = np.arange(float(p.ih * p.iw)).reshape(1, 1, p.ih, p.iw)
        best, found = np.full(p.dst_shape, -np.inf), np.zeros(p.dst_shape)
        for (_, _, window), (_, _, index) in zipped(
            taps_of(framed_image(src, p, -np.inf), p), taps_of(framed_image(at, p), p)
        ):
            more = (window > best) | np.isnan(window)
            best, found = np.where(more, window, best), np.where(more, index, found)
        return best, found


class PoolBackward(Trained):
    """The gradient of a pool's input. inputs: its output's gradient, and the indices of a max pool.

    size: height and width of the input.
    """

    op = "pool2d_backward"
    inputs = range(1, 3)
    of: Pool2d | AdaptivePool2d
    size: Pair

    def problem(self, *shapes: Shape) -> Any:
        grad = shapes[0]
        problem = self.of.problem((*grad[:2], *self.size)).backward()
        check_same(self.op, "grad", grad, problem.src_shape, "the output")
        return problem

    def buffers(self, count: int) -> Buffers:
        return [0, OUTPUT, 1 if count > 1 else None]

    def compute(self, grad: Array, indices: Array | None) -> Array:
        problem = self.problem(grad.shape)
        n, c, h, w = problem.dst_shape
        dst = np.zeros((n, c, h * w))
        if indices is not None:
            planes = np.arange(n * c)[:, None]
            np.add.at(dst.reshape(n * c, -1), (planes, indices.reshape(n * c, -1)), grad.reshape(n * c, -1))
            return dst.reshape(n, c, h, w)
        for pixel in range(h * w):  # the pool is linear, and this is its transpose
            one = np.zeros((1, 1, h, w))
            one.reshape(-1)[pixel] = 1
            dst[..., pixel] = (grad * self.of.compute(one)).sum(axis=(2, 3))
        return dst.reshape(n, c, h, w)
