"""The gradient of the input of a depthwise convolution with a stride, where neighbouring pixels are contiguous.

A vector is neighbouring pixels of one channel (NCHW), or of a block of a few (NCHW4). Pixels of the input with the same
remainder by the stride are reached by the same taps: their sums are a vector, and these are interleaved and stored. A
step computes the `sh` rows of the input that the same rows of the output's gradient reach, so each of these is loaded
once for all.

Rows outside the gradient are read as a row of zeros, columns outside it by masks, which inner columns do not need.

Buffers: those of the forward op.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from numba.core import cgutils

from blockconv import jit
from blockconv.core.activation import ActivationKind
from blockconv.core.types import ElementType
from blockconv.jit.arguments import group, held, word
from blockconv.jit.ir import const, emitted, fill_memory, shuffle
from blockconv.kernels.common.activation import ActivationArguments, activate, parameters_at
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import ConvSizes, Geometry
from blockconv.kernels.common.vectors import Vectors


class DepthwiseDataArguments(ConvSizes):
    """The gradient of the input. A task is a block of channels of an image."""

    src = word("the gradient of the output", "address")
    wei = word("of each block: [tap][channel]", "address")
    bia = word("of each channel", "address")
    dst = word("the gradient of the input", "address")
    activation = word("the activation, `ActivationArguments`", "address")
    source = group(Geometry, "the strides of `src`")
    destination = group(Geometry, "those of `dst`")
    blocks = word("of channels", "blocks")


class DataSpec(NamedTuple):
    """The compile-time parameters of a kernel.

    src, dst: the codes of the types of the output's gradient and of the input's.
    top, left: the padding, modulo the stride.
    lanes: of a vector, `unit` channels of so many pixels.
    holds: whether all weights stay in registers.
    activation: the `ActivationKind` of results.
    """

    src: int
    dst: int
    fma: int
    kh: int
    kw: int
    sh: int
    sw: int
    dh: int
    dw: int
    top: int
    left: int
    lanes: int
    unit: int
    holds: int
    activation: int

    @property
    def pixels(self) -> int:
        return self.lanes // self.unit

    @property
    def rows(self) -> dict[tuple[int, int], int]:
        """For the row of a step and each row of taps that reaches it, the row of the gradient, from the step's on."""
        return _reached(self.kh, self.sh, self.dh, self.top)

    @property
    def cols(self) -> dict[tuple[int, int], int]:
        """Likewise of columns."""
        return _reached(self.kw, self.sw, self.dw, self.left)

    @property
    def loads(self) -> int:
        """Loads of a step."""
        return len({*self.rows.values()}) * len({*self.cols.values()})

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel's channels that are read."""
        return self.unit * ElementType.of(self.src).itemsize

    @property
    def first(self) -> int:
        """The first column that a step reads."""
        return min(self.cols.values(), default=0)

    @property
    def zeros(self) -> int:
        """Bytes that are read in place of a row outside the gradient, in whole lines."""
        pixels = max(self.cols.values(), default=0) - self.first + self.pixels
        return -(-pixels * self.pixel_bytes // 64) * 64


def _reached(taps: int, stride: int, dilation: int, begin: int) -> dict[tuple[int, int], int]:
    """Where pixel `stride * m + rest` of the input is reached by a tap: {(rest, tap): output pixel - m}."""
    found = {}
    for rest in range(stride):
        for tap in range(taps):
            output, other = divmod(rest + begin - tap * dilation, stride)
            if other == 0:
                found[rest, tap] = output
    return found


class _Plane(NamedTuple):
    """A block of channels of an image: addresses.

    src: what the first step reads at column 0 of its window.
    """

    src: int
    zeros: int
    wei: int
    bia: int
    dst: int


class _Code:
    """The code of one plane."""

    def __init__(self, builder: Any, spec: DataSpec, a: DepthwiseDataArguments, x: _Plane) -> None:
        self.b, self.spec, self.a, self.x = builder, spec, a, x
        # Whole strides of padding.
        self.up, self.left = builder.sdiv(a.ph, const(spec.sh)), builder.sdiv(a.pw, const(spec.sw))
        self.v = Floats(builder, ElementType.of(spec.src), spec.lanes)
        self.stored = Floats(builder, ElementType.of(spec.dst), spec.lanes)
        self.sums = Vectors(builder, self.v.type, spec.lanes, bool(spec.fma))
        self.bias = self.repeated(x.bia)
        self.parameters = list(parameters_at(self.sums, a.activation)) if spec.activation else []
        self.held = [self.weight(k) for k in range(spec.kh * spec.kw)] if spec.holds else []

    def repeated(self, address: Any) -> Any:
        """The values of a block's channels, for each pixel of a vector."""
        if self.spec.unit == 1:
            return self.sums.broadcast(address)
        one = self.sums.load(address, lanes=self.spec.unit)
        return shuffle(self.b, one, one, [lane % self.spec.unit for lane in range(self.spec.lanes)])

    def weight(self, tap: int) -> Any:
        return self.repeated(self.b.add(self.x.wei, const(tap * self.spec.unit * self.sums.itemsize)))

    def all(self) -> None:
        b, a, spec = self.b, self.a, self.spec
        steps = b.sdiv(b.add(a.ih, const(spec.sh - 1)), const(spec.sh))
        columns = b.sdiv(b.add(a.iw, const(spec.sw - 1)), const(spec.sw))
        offsets = sorted({*spec.cols.values()})
        with cgutils.for_range_slice(b, const(0), columns, const(spec.pixels)) as (col, _):
            at = b.add(col, self.left)
            begins = [b.add(at, const(k)) for k in (spec.first, offsets[-1] + spec.pixels if offsets else 0)]
            reads_inside = b.and_(b.icmp_signed(">=", begins[0], const(0)), b.icmp_signed("<=", begins[1], a.ow))
            fits = b.icmp_signed("<=", b.mul(const(spec.sw), b.add(col, const(spec.pixels))), a.iw)
            with b.if_else(b.and_(reads_inside, fits)) as (inner, border):
                with inner, cgutils.for_range(b, steps) as loop:
                    self.step(loop.index, col, {})
                with border:
                    masks = {k: self.inside(b.add(at, const(k))) for k in offsets}
                    with cgutils.for_range(b, steps) as loop:
                        self.step(loop.index, col, masks, has_border=True)

    def inside(self, begin: Any) -> Any:
        """The mask of a vector's pixels, from this one on, that the gradient has."""
        b = self.b
        return b.and_(b.not_(self.below(b.neg(begin))), self.below(b.sub(self.a.ow, begin)))

    def below(self, pixels: Any) -> Any:
        return self.v.below(self.b.mul(pixels, const(self.spec.unit)))

    def step(self, number: Any, col: Any, masks: dict[int, Any], has_border: bool = False) -> None:
        """The rows `sh * number` and on of the input: a vector of each remainder, from column `sw * col` on."""
        b, a, x, spec = self.b, self.a, self.x, self.spec
        loaded = {}
        at = b.mul(b.add(b.add(col, self.left), const(spec.first)), const(spec.pixel_bytes))
        for row in sorted({*spec.rows.values()}):
            oh = b.add(b.add(number, self.up), const(row))
            line = b.add(b.add(x.src, at), b.mul(oh, a.source.row))
            line = b.select(b.icmp_unsigned("<", oh, a.oh), line, x.zeros)
            for k in {*spec.cols.values()}:
                mask = (masks[k], 0.0) if has_border else ()
                loaded[row, k] = self.v.load(b.add(line, const((k - spec.first) * spec.pixel_bytes)), *mask)
        for rest in range(spec.sh):
            found = [self.bias] * spec.sw
            for (of_row, h), row in spec.rows.items():
                for (phase, w), k in spec.cols.items() if of_row == rest else ():
                    tap = h * spec.kw + w
                    weight = self.held[tap] if self.held else self.weight(tap)
                    found[phase] = self.sums.multiply_add(loaded[row, k], weight, found[phase])
            found = list(map(self.activated, found))
            ih = b.add(b.mul(number, const(spec.sh)), const(rest))
            with b.if_then(b.icmp_signed("<", ih, a.ih)):
                dst = b.add(
                    b.add(x.dst, b.mul(ih, a.destination.row)),
                    b.mul(col, const(spec.sw * spec.unit * self.stored.itemsize)),
                )
                self.store(self.interleaved(found), dst, col, has_border)

    def activated(self, value: Any) -> Any:
        v, kind = self.sums, self.spec.activation
        if kind == ActivationKind.CLIP:
            return v.clip(value, *map(v.splat, self.parameters))
        number = ActivationArguments.load(self.b, self.a.activation).number
        return activate(v, value, number, self.parameters) if kind else value

    def interleaved(self, vectors: list[Any]) -> list[Any]:
        """The pixels of vectors of each remainder, in their order."""
        spec, found = self.spec, []
        for first in range(0, spec.sw * spec.pixels, spec.pixels):
            value, at = vectors[0], [divmod(first + lane // spec.unit, spec.sw) for lane in range(spec.lanes)]
            for rest, vector in enumerate(vectors):
                lanes = [m * spec.unit + lane % spec.unit for lane, (m, _) in enumerate(at)]
                taken = [
                    spec.lanes + k if of == rest else lane
                    for lane, (k, (_, of)) in enumerate(zip(lanes, at, strict=True))
                ]
                value = shuffle(self.b, value, vector, taken)
            found.append(value)
        return found

    def store(self, values: list[Any], dst: Any, col: Any, has_border: bool) -> None:
        b, spec = self.b, self.spec
        for k, value in enumerate(values):
            rest = b.sub(self.a.iw, b.add(b.mul(col, const(spec.sw)), const(k * spec.pixels)))
            mask = (self.below(rest),) if has_border else ()
            self.stored.store(value, b.add(dst, const(k * self.stored.bytes)), *mask)


@jit.kernel
def depthwise_data_of_pixels(shape: DataSpec):
    """The loop over planes."""
    zeros, taps, size = shape.zeros, shape.kh * shape.kw, shape.unit * ElementType.of(shape.src).computed.itemsize

    @emitted
    def compute(builder: Any, a: DepthwiseDataArguments, plane: _Plane) -> None:
        _Code(builder, shape, a, plane).all()

    def kernel(args, first, last, scratch):
        a = held(DepthwiseDataArguments(args))
        s, d = a.source, a.destination
        fill_memory(scratch, zeros, 0)
        for task in range(first, last):
            n, block = task // a.blocks, task % a.blocks
            src, dst = a.src + n * s.n + block * s.block, a.dst + n * d.n + block * d.block
            compute(a, _Plane(src, scratch, a.wei + block * (taps * size), a.bia + block * size, dst))

    return kernel
