"""Convolutions and pools."""

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar, Literal

import numpy as np

from blockconv.core.activation import IDENTITY, Activation
from blockconv.core.checks import Pads, Pair, Shape, check_rank, check_same, checked_whole, reached_end
from blockconv.core.errors import ArgumentError
from blockconv.core.problem import (
    AdaptivePool2dProblem,
    Conv2dProblem,
    Pool2dProblem,
    PoolKind,
    transposed_problem,
    window_fields,
)
from blockconv.core.python import bounded_cache, zipped
from blockconv.core.quantization import PLAIN, Quantization
from blockconv.core.types import Array, ElementType, Types, element
from blockconv.network.ops.base import Op, Solved, check_type, common_type, converted_types, framed
from blockconv.network.ops.rule import ALL_PIXELS, Axes, Reads, Site, same_pixels, windows_of

__all__ = ["AdaptivePool2d", "Conv2d", "ConvTranspose2d", "Convolution", "IntegerConvolution", "Pool2d", "Weighted"]


_conv2d_problem = bounded_cache(Conv2dProblem)  # inferred several times for each node


@functools.lru_cache(maxsize=64)
def _finite(types: Types) -> Types:
    return types.knowing(finite=True)


class Weighted(Op):
    """The base of convolutions and transposed convolutions.

    parameters: the weight, and perhaps a bias.
    problem: the problem that kernels are chosen for, from the shapes of source and weight.
    """

    problem: ClassVar[Callable[..., Any]]
    parameters = range(1, 3)
    of_images = True
    stride: Pair = (1, 1)
    pads: Pads = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    groups: int = 1
    activation: Activation = IDENTITY

    def __post_init__(self) -> None:
        checked_whole(self.op, "groups", self.groups, least=1)

    def infer(self, src: Shape, *others: Any) -> Shape:
        """others: perhaps a residual, then weight and bias."""
        residual, wei, bias = (None, *others)[-3:]
        shape: Shape = self.problem(src, wei).dst_shape
        if bias is not None:
            check_same(self.op, "bias", bias, shape[1:2])
        if residual is not None:
            check_same(self.op, "residual", residual, shape, "the output")
        return shape

    def infer_type(self, src: Any, *others: Any) -> ElementType:
        *_, wei, bias = others
        if not src.is_half:
            return common_type(self, src, *others)
        check_type(self, "weight", wei, src.name)
        check_type(self, "bias", bias or src, src.name, "float32")
        return src

    def problem_at(self, site: Site) -> Any:
        return self.problem(site.src.shape, site.parameters[0].shape).named(site.name)

    def types_at(self, site: Site) -> Types:
        return converted_types(self, site) if site.src.type.is_half else super().types_at(site)


class Convolution(Weighted):
    """The common base of float and integer convolutions."""

    op = "conv2d"
    inputs = range(1, 3)
    reads_as_dst = True

    def problem(self, src: Shape, wei: Shape) -> Conv2dProblem:
        check_rank(self.op, src, 4)
        if len(wei) != 4 or src[1] != wei[1] * self.groups:
            rule = f"has to be (O, I/groups, KH, KW), with I = {src[1]} input channels and groups = {self.groups}"
            is_last = len(wei) == 4 and src[3] == wei[1] * self.groups
            remedy = f"images are (N, C, H, W), and channels seem to be last in {src}" if is_last else ""
            raise ArgumentError(self.op, "weight", wei, rule, remedy)
        oc, _, kh, kw = wei
        return _conv2d_problem(*src, oc, kh, kw, *window_fields(self.stride, self.pads, self.dilation, self.groups))

    def windows(self, site: Site, axes: Axes) -> Reads:
        return [windows_of(self.problem_at(site)), *[same_pixels(axes)] * (len(site.inputs) - 1)]

    def sums(self, src: Array, wei: Array) -> Array:
        """The sums of the products, without bias and residual."""
        p, g = self.problem(src.shape, wei.shape), self.groups
        image = framed_image(src, p)
        dst = np.zeros((p.n, g, p.oc // g, p.oh * p.ow), np.result_type(src, wei))
        for y, x, window in taps_of(image, p):
            weights = wei[:, :, y, x].reshape(g, p.oc // g, p.ic // g)
            dst += weights @ window.reshape(p.n, g, p.ic // g, p.oh * p.ow)
        return dst.reshape(p.dst_shape)


class IntegerConvolution(Convolution):
    """The common base of convolutions with int8 weights, whose products are summed as int32.

    wei: what the weights stand for, of the zero point 0; they may have a scale for each output channel.
    narrow, light: whether they are known to be so (`dispatch.quantizing.is_narrow`, `is_light`), which changes no
        result.
    """

    is_exact = True
    wei: Quantization = PLAIN
    narrow: bool = False
    light: bool = False

    def infer(self, src: Shape, *others: Any) -> Shape:
        shape = super().infer(src, *others)
        self.wei.check(self.op, "wei", "int8", shape[1])
        if self.wei.zero_point:
            raise self._error("wei", "has to have zero point 0")
        return shape

    def check_integers(
        self, src: ElementType, wei: ElementType, bias: ElementType | None, taken: Sequence[str], biases: str
    ) -> None:
        """taken: types that an input may have. biases: the type of a bias."""
        check_type(self, "input", src, *taken)
        check_type(self, "weight", wei, "int8")
        if bias is not None:
            check_type(self, "bias", bias, biases)

    def types_at(self, site: Site) -> Types:
        types = Types.quantized(site.src.type.array_dtype, site.output.type.array_dtype)
        return types.knowing(narrow=self.narrow, light=self.light)

    def int32_sums(self, src: Array, given: Quantization, wei: Array, bias: Array | None = None) -> Array:
        """The int32 sums of the products of integers, and of a bias. `given` says what `src` stands for.

        float64 holds these integers exactly, and multiplies matrices of them faster than NumPy does ints.
        """
        exact = (src.astype(np.int64) - given.zero_point).astype(np.float64)
        sums = self.sums(exact, wei.astype(np.float64))
        return (sums if bias is None else sums + bias[:, None, None]).astype(np.int32)

    def activated(self, x: Array) -> Array:
        """The activation of float32, rounded once."""
        return self.activation.reference(x.astype(np.float64)).astype(np.float32)


class Conv2d(Convolution):
    """dst = activation(conv(src, wei) + bia + res).

    inputs: src and perhaps res, of dst's shape.
    parameters: wei (O, I/groups, KH, KW) and perhaps bia (O,).
    dtype: of dst, if it is not src's: float32, of a src of 16 bits, whose bia may be of float32 too.
    finite: whether wei is known to hold neither NaN nor infinity, which changes no result.
    """

    dtype: Literal["float32"] | None = None
    finite: bool = False

    def infer_type(self, src: Any, *others: Any) -> ElementType:
        if self.dtype is not None and not src.is_half:
            raise self._error("dtype", f"is for 16-bit inputs, and the input is {src}")
        super().infer_type(src, *others)
        dst = src if self.dtype is None else element(self.dtype)
        check_type(self, "residual", others[0] or dst, dst.name)
        return dst

    def compute(self, src: Array, residual: Array | None, wei: Array, bias: Array | None) -> Array:
        sums = self.sums(src, wei)
        if bias is not None:
            sums += bias[:, None, None]
        if residual is not None:
            sums += residual
        return self.activation.reference(sums)

    def types_at(self, site: Site) -> Types:
        types = super().types_at(site)
        return _finite(types) if self.finite else types


class ConvTranspose2d(Weighted):
    """dst = activation(conv_transpose(src, wei) + bia).

    parameters: wei (I, O/groups, KH, KW) and perhaps bia (O,).

    Output pixel o adds what input pixel i gives it by tap k, where o + begin = i * stride + k * dilation. pads: pixels
    that are cut from the output. A negative end adds pixels, which is output_padding.
    """

    op = "conv_transpose2d"

    def problem(self, src: Shape, wei: Shape) -> Conv2dProblem:
        """The convolution whose input has the shape of this op's output."""
        check_rank(self.op, src, 4)
        if len(wei) != 4 or src[1] != wei[0] or src[1] % self.groups:
            rule = (
                f"has to be (I, O/groups, KH, KW), with I = {src[1]} input channels, a multiple of {self.groups} groups"
            )
            raise ArgumentError(self.op, "weight", wei, rule)
        sizes = [size - begin - end for size, (begin, end) in zipped(self.uncut(src[2:], wei[2:]), self.pads)]
        if min(src[2:]) < 1 or min(sizes) < 1:
            raise ArgumentError(self.op, "input", src, f"gives an output of {sizes} pixels, with pads = {self.pads}")
        return transposed_problem(src[0], wei, sizes, self.groups, self.stride, self.pads, self.dilation)

    def uncut(self, sizes: Shape, kernel: Shape) -> list[int]:
        """Height and width of the output without pads."""
        given = zipped(sizes, kernel, self.stride, self.dilation)
        return [(size - 1) * stride + (taps - 1) * dilation + 1 for size, taps, stride, dilation in given]

    def compute(self, src: Array, wei: Array, bias: Array | None) -> Array:
        p = self.problem(src.shape, wei.shape)
        dst = framed_image(np.zeros(p.dst_shape, np.result_type(src, wei)), p)
        image = src.reshape(p.n, p.g, p.group_oc, p.oh * p.ow)
        for y, x, window in taps_of(dst, p):  # the pixels that this tap adds to
            weights = wei[:, :, y, x].reshape(p.g, p.group_oc, -1).swapaxes(1, 2)
            window += (weights @ image).reshape(window.shape)
        dst = framed(dst, [(-begin, -end) for begin, end in _reach(p)], 0)
        return self.activation.reference(dst if bias is None else dst + bias[:, None, None])

    def windows(self, site: Site, axes: Axes) -> Reads:
        return [{axis: (axis, reach.inverse()) for axis, (_, reach) in windows_of(self.problem_at(site)).items()}]


class Pool2d(Solved):
    """Pooling by windows; `kernel` None is one window over the whole image. Fields as in Pool2dProblem."""

    op = "pool2d"
    of_images = True
    effect = "computes"
    moves_with = "kind", "max"
    kind: PoolKind
    kernel: Pair | None = None
    stride: Pair = (1, 1)
    pads: Pads = ((0, 0), (0, 0))
    dilation: Pair = (1, 1)
    ceil_mode: bool = False
    divisor: int | None = None

    def problem(self, *shapes: Any) -> Any:
        check_rank(self.op, shapes[0], 4)
        steps = window_fields(self.stride, self.pads, self.dilation, self.ceil_mode, self.divisor)
        return Pool2dProblem(self.kind, *shapes[0], *(self.kernel or shapes[0][2:]), *steps)

    def compute(self, src: Array) -> Array:
        p = self.problem(src.shape)
        if self.kind == "max":
            least = -math.inf if src.dtype.kind == "f" else np.iinfo(src.dtype).min
            best = np.full(p.dst_shape, least, src.dtype)
            for _, _, window in taps_of(framed_image(src, p, least), p):
                best = np.maximum(best, window)
            return best
        total = sum(window for _, _, window in taps_of(framed_image(src, p), p))
        return np.asarray(total / (counted(p) if self.divisor is None else self.divisor))

    def windows(self, site: Site, axes: Axes) -> Reads:
        return ALL_PIXELS if self.kernel is None else [windows_of(self.problem(site.src.shape))]


class AdaptivePool2d(Solved):
    """The average over windows that together cover the image: PyTorch's adaptive_avg_pool2d."""

    op = "pool2d"
    effect = "computes"
    size: Pair

    def problem(self, *shapes: Any) -> Any:
        check_rank(self.op, shapes[0], 4)
        sizes: Any = *shapes[0], *self.size
        return AdaptivePool2dProblem(*sizes)

    def compute(self, src: Array) -> Array:
        dst = np.zeros((*src.shape[:2], *self.size), src.dtype)
        rows, columns = self.spans(src.shape)
        for y, x in np.ndindex(*self.size):
            dst[:, :, y, x] = src[:, :, slice(*rows[y]), slice(*columns[x])].mean(axis=(2, 3))
        return dst

    def spans(self, shape: Shape) -> list[list[Pair]]:
        """The pixels (first, end) of each window, along H and W."""
        sides = zipped(shape[2:], self.size)
        return [[(o * n // count, -(-(o + 1) * n // count)) for o in range(count)] for n, count in sides]


# ---------------------------------------------------------------- windows in NumPy


def taps_of(x: Array, p: Any) -> Iterator[tuple[int, int, Array]]:
    """(kh, kw, what that tap of each window reads) of a framed image; `p` is the problem."""
    for y in range(p.kh):
        for z in range(p.kw):
            top, left = y * p.dh, z * p.dw
            rows = slice(top, top + (p.oh - 1) * p.sh + 1, p.sh)
            yield y, z, x[..., rows, left : left + (p.ow - 1) * p.sw + 1 : p.sw]


def framed_image(src: Array, p: Any, value: float = 0) -> Array:
    """The image with pads of `value` that make room for each window."""
    return framed(src, _reach(p), value)


def _reach(p: Any) -> tuple[Pair, Pair, Pair, Pair]:
    """Pads that make room for each window, and no more."""
    return (0, 0), (0, 0), (p.ph, reached_end(p, "h")), (p.pw, reached_end(p, "w"))


def counted(p: Any) -> Array:
    """How many elements each window averages: those of the image, and of its padding where that counts."""
    ones = np.ones((1, 1, p.ih, p.iw))
    none, rows, columns = (0, 0), (p.ph, p.ph_r), (p.pw, p.pw_r)
    padded = framed(ones, (none, none, rows, columns), float(p.kind == "avg_include_padding"))
    (_, _, (_, bottom), (_, right)) = _reach(p)
    whole = framed(padded, (none, none, (0, bottom - p.ph_r), (0, right - p.pw_r)), 0.0)
    return np.asarray(sum(window for _, _, window in taps_of(whole, p)))
