"""The gradient of the weights of a depthwise convolution, where neighbouring pixels are contiguous.

A vector is neighbouring pixels of a row of one channel (NCHW), or of a block of a few (NCHW4). Each tap has a vector of
sums, one for each pixel of a vector. They stay in registers while all images are read, a column of vectors at a time.
At the end the sums of a vector's pixels are added: pairs of vectors become one, until all taps are in one.

A step reads `sh` new rows of the input, and one of the gradient. Each row of the input is multiplied by all rows of the
gradient whose taps reach it; these stay in registers from a step to the next. So of 3x3 taps with stride 1 a step has
four loads and nine products. Masks set values outside the image, or past a row, to zero. They depend on the column
alone, and inner columns need none. With a horizontal stride of 2, taps share loads.

Tasks, splits and their sums are as in `backward_weights`.
"""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any, NamedTuple

from llvmlite import ir
from numba.core import cgutils

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import held
from blockconv.jit.ir import const, emitted, fill_memory, join, opaque, shuffle
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import ChannelVector
from blockconv.kernels.common.vectors import Vectors, lanes_below
from blockconv.kernels.depthwise.backward_weights import DepthwiseWeightsArguments


class PixelsSpec(NamedTuple):
    """The compile-time parameters of a kernel.

    src: the code of the type of input and gradient.
    lanes: of a vector, `unit` channels of so many pixels.
    bias: whether its gradient is wanted.
    """

    src: int
    fma: int
    kh: int
    kw: int
    sh: int
    sw: int
    dh: int
    dw: int
    lanes: int
    unit: int
    bias: int

    @property
    def pixels(self) -> int:
        return self.lanes // self.unit

    @property
    def sums(self) -> int:
        return self.kh * self.kw + self.bias

    @property
    def rows(self) -> int:
        """Rows of the gradient whose taps reach a row of the input, and rows between such."""
        return (self.kh - 1) * self.dh // self.sh + 1

    @property
    def bases(self) -> list[int]:
        """Columns, after the first tap's, that each `sw` vectors of a row of the input begin with."""
        return sorted({w * self.dw // self.sw * self.sw for w in range(self.kw)})

    @property
    def loads(self) -> int:
        """Loads of a step."""
        rows = len({h * self.dh % self.sh for h in range(self.kh)})
        return 1 + rows * len(self.bases) * self.sw

    @property
    def zeros(self) -> int:
        """Bytes that are read in place of a row outside the image, in whole lines."""
        pixels = self.bases[-1] + self.sw * self.pixels
        return -(-pixels * self.unit * ElementType.of(self.src).itemsize // 64) * 64


class _Planes(NamedTuple):
    """The images of a vector of channels: addresses and rows.

    src, grad: of the first image, of what the first pixel's first tap reads, and of that pixel.
    start, end: rows of the gradient, of all images, that are reduced.
    """

    sums: int
    zeros: int
    src: int
    grad: int
    start: int
    end: int


class _Column(NamedTuple):
    """A column of vectors of an image: addresses, the rows that are reduced, and masks.

    masks: of the vectors of the input that a row of taps loads, by base and first pixel.
    """

    src: Any
    grad: Any
    first: Any
    last: Any
    grad_mask: Any
    masks: dict[tuple[int, int], Any]


class _Code:
    """The code of a kernel, in one function: what it holds in registers is stored once, at the end."""

    def __init__(self, builder: Any, spec: PixelsSpec, a: DepthwiseWeightsArguments, x: _Planes) -> None:
        self.b, self.spec, self.a, self.x = builder, spec, a, x
        self.v = Floats(builder, ElementType.of(spec.src), spec.lanes)
        self.sums = Vectors(builder, self.v.type, spec.lanes, bool(spec.fma))
        self.accs = self.sums.slots(spec.sums, self.sums.zero)
        self.grads = self.sums.slots(spec.rows, self.sums.zero)  # of this step, of the one before, ...

    def all(self) -> None:
        b, a, x, spec = self.b, self.a, self.x, self.spec
        # The first step whose rows are all inside the image, and past the last.
        top = b.sdiv(b.add(a.ph, const(spec.sh - 1)), const(spec.sh))
        bottom = b.sdiv(b.add(a.ih, a.ph), const(spec.sh))
        end_image = b.sdiv(b.add(x.end, b.sub(a.oh, const(1))), a.oh)
        with cgutils.for_range_slice(b, b.sdiv(x.start, a.oh), end_image, const(1)) as (n, _):
            before = b.mul(n, a.oh)
            first, last = (self.clipped(b.sub(row, before), const(0), a.oh) for row in (x.start, x.end))
            end = b.add(last, const(spec.rows - 1))
            inner = self.clipped(top, b.add(first, const(spec.rows - 1)), end)
            outer = self.clipped(self.smaller(bottom, last), inner, end)
            src = self.image(n, x.src, a.src_images, a.src_image_block, a.source.n)
            grad = self.image(n, x.grad, a.grad_images, a.grad_image_block, a.gradient.n)
            with cgutils.for_range_slice(b, const(0), a.ow, const(spec.pixels)) as (col, _):
                at = self.column(col, src, grad)._replace(first=first, last=last)
                past = b.add(col, const(spec.pixels))
                is_inner = b.and_(b.icmp_signed(">=", col, a.inner), b.icmp_signed("<=", past, a.outer))
                split = b.select(is_inner, inner, outer)  # masks, but no checks of rows, up to there
                for slot in self.grads:
                    b.store(self.sums.zero, slot)
                for begin, stop, *checks in (
                    (first, inner, True, True),
                    (inner, split, True, False),
                    (split, outer, False, False),
                    (outer, end, True, True),
                ):
                    with cgutils.for_range_slice(b, begin, stop, const(1)) as (oh, _):
                        self.step(at, oh, *checks)

    def step(self, at: _Column, oh: Any, has_mask: bool, has_border: bool) -> None:
        """A row of the gradient, and the rows of the input that no row before it reaches.

        has_border: rows may be outside the image, or not be reduced.
        """
        b, a, x, v, spec = self.b, self.a, self.x, self.v, self.spec
        for older, newer in zip(self.grads[:0:-1], self.grads[-2::-1], strict=True):
            b.store(b.load(newer), older)
        mask = at.grad_mask
        if has_border:
            mask = b.select(b.icmp_signed("<", oh, at.last), mask, ir.Constant(mask.type, None))
        grad = v.load(b.add(at.grad, b.mul(oh, a.gradient.row)), *((mask, 0.0) if has_mask else ()))
        b.store(grad, self.grads[0])
        # One pointer that moves: else each row has its own, and most of these are spilled.
        src = opaque(b, b.add(at.src, b.mul(oh, b.mul(const(spec.sh), a.source.row))))
        for j in sorted({h * spec.dh % spec.sh for h in range(spec.kh)}):
            taps = [h for h in range(spec.kh) if h * spec.dh % spec.sh == j]
            line = b.add(src, b.mul(const(j), a.source.row))
            if has_border:
                ih = b.add(b.sub(b.mul(oh, const(spec.sh)), a.ph), const(j))
                line = b.select(b.icmp_unsigned("<", ih, a.ih), line, x.zeros)
            values = self.values(at, line, has_mask)
            for h in taps:
                back = h * spec.dh // spec.sh
                row = b.sub(oh, const(back))
                is_reduced = b.and_(b.icmp_signed(">=", row, at.first), b.icmp_signed("<", row, at.last))
                with b.if_then(is_reduced) if has_border else nullcontext():
                    for value, slot in zip(values, self.accs[h * spec.kw :], strict=False):
                        b.store(self.sums.multiply_add(value, b.load(self.grads[back]), b.load(slot)), slot)
        if spec.bias:
            b.store(self.sums.add(b.load(self.accs[-1]), grad), self.accs[-1])

    def values(self, at: _Column, line: Any, has_mask: bool) -> list[Any]:
        """The vector that each tap of a row reads."""
        spec, loaded = self.spec, dict[int, list[Any]]()
        for (base, start), mask in at.masks.items():
            address = self.b.add(line, const((base + start) * spec.unit * self.v.itemsize))
            loaded.setdefault(base, []).append(self.v.load(address, *((mask, 0.0) if has_mask else ())))
        taps = [divmod(w * spec.dw, spec.sw) for w in range(spec.kw)]
        return [_every(self.b, loaded[base * spec.sw], spec.sw, phase, spec.unit) for base, phase in taps]

    def column(self, col: Any, src: Any, grad: Any) -> _Column:
        b, a, spec = self.b, self.a, self.spec
        left, valid = b.sub(b.mul(col, const(spec.sw)), a.pw), b.sub(a.ow, col)
        masks = {}
        for base in spec.bases:
            for start in range(0, spec.sw * spec.pixels, spec.pixels):
                begin = b.add(left, const(base + start))
                end = self.smaller(b.sub(a.iw, begin), b.sub(b.mul(valid, const(spec.sw)), const(start)))
                masks[base, start] = b.and_(b.not_(self.below(b.neg(begin))), self.below(end))
        src, grad = b.add(src, b.mul(col, b.mul(a.sw, a.source.col))), b.add(grad, b.mul(col, a.gradient.col))
        return _Column(src, grad, None, None, self.below(valid), masks)

    def fold(self) -> None:
        """Store the sums of the pixels of each vector, [tap][channel]."""
        b, v, spec = self.b, self.sums, self.spec
        vectors = [b.load(slot) for slot in self.accs]
        for _ in range(spec.pixels.bit_length() - 1):
            vectors += [v.zero] * (len(vectors) % 2)
            pairs = [[p, q] for p, q in zip(vectors[::2], vectors[1::2], strict=True)]
            vectors = [v.add(*(_every(b, pair, 2, first, spec.unit) for first in (0, 1))) for pair in pairs]
        for k, value in enumerate(vectors):
            count = min(spec.lanes, spec.sums * spec.unit - k * spec.lanes)
            v.store_lanes(value, b.add(self.x.sums, const(k * v.bytes)), None, count)

    # ------------------------------------------------------------ numbers

    def smaller(self, p: Any, q: Any) -> Any:
        return self.b.select(self.b.icmp_signed("<", p, q), p, q)

    def clipped(self, p: Any, low: Any, high: Any) -> Any:
        return self.smaller(self.b.select(self.b.icmp_signed("<", p, low), low, p), high)

    def image(self, n: Any, first: Any, images: Any, block: Any, each: Any) -> Any:
        """`image_at`, which divides only where there are several blocks."""
        b = self.b
        at = cgutils.alloca_once_value(b, b.add(first, b.mul(n, each)))
        with b.if_then(b.icmp_signed(">=", n, images)):
            further = b.sub(block, b.mul(images, each))
            b.store(b.add(b.load(at), b.mul(b.udiv(n, images), further)), at)
        return b.load(at)

    def below(self, pixels: Any) -> Any:
        return lanes_below(self.b, self.spec.lanes, self.b.mul(pixels, const(self.spec.unit)))


def _every(builder: Any, vectors: list[Any], step: int, first: int, unit: int) -> Any:
    """Every `step`-th element of `unit` lanes of as many vectors, from number `first` on."""
    if step == 1:
        return vectors[0]
    joined, pixels = join(builder, vectors), vectors[0].type.count // unit
    return shuffle(builder, joined, joined, [(p * step + first) * unit + c for p in range(pixels) for c in range(unit)])


@jit.kernel
def depthwise_weights_of_pixels(shape: PixelsSpec):
    """The loop over splits and vectors of channels."""
    zeros, each = shape.zeros, shape.sums * shape.unit * ElementType.of(shape.src).computed.itemsize

    @emitted
    def add(builder: Any, a: DepthwiseWeightsArguments, planes: _Planes) -> None:
        code = _Code(builder, shape, a, planes)
        code.all()
        code.fold()

    def kernel(args, first, last, scratch):
        a = held(DepthwiseWeightsArguments(args))
        fill_memory(scratch, zeros, 0)
        for task in range(first, last):
            split, group = task // a.groups, task % a.groups
            start, end = a.n * a.oh * split // a.splits, a.n * a.oh * (split + 1) // a.splits
            for vector in range(a.vectors * group // a.groups, a.vectors * (group + 1) // a.groups):
                of = ChannelVector(a.table)[vector]
                src = a.src + of.src - a.ph * a.source.row - a.pw * a.source.col
                sums = a.sums + (split * a.vectors + vector) * each
                add(a, _Planes(sums, scratch, src, a.grad + of.dst, start, end))

    return kernel
