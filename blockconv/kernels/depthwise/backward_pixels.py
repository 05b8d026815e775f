"""The gradients of a depthwise convolution where neighbouring pixels are contiguous: of its weights, and of its input
where there is a stride.

A vector is neighbouring pixels of a row of one channel (NCHW), or of a block of a few (NCHW4). Rows outside an array
are read as a row of zeros. Masks set columns outside it, or past a row, to zero; inner columns need none.

Weights: each tap has a vector of sums, one for each pixel of a vector. They stay in registers while all images are
read, a column of vectors at a time. At the end the sums of a vector's pixels are added: pairs of vectors become one,
until all taps are in one. A step reads `sh` new rows of the input, and one of the gradient. Each row of the input is
multiplied by all rows of the gradient whose taps reach it; these stay in registers from a step to the next. So of 3x3
taps with stride 1 a step has four loads and nine products. With a horizontal stride of 2, taps share loads. Tasks,
splits and their sums are as in `backward_weights`.

Input: pixels of the input with the same remainder by the stride are reached by the same taps: their sums are a vector,
and these are interleaved and stored. A step computes the `sh` rows of the input that the same rows of the output's
gradient reach, so each of these is loaded once for all. Buffers: those of the forward op.
"""

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from llvmlite import ir

from blockconv import jit
from blockconv.core.activation import ActivationKind
from blockconv.core.types import ElementType
from blockconv.jit.arguments import group, held, word
from blockconv.jit.ir import emitted, fill_memory, opaque, picked
from blockconv.kernels.common.activation import ActivationArguments, activate, parameters_at
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import ChannelVector, ConvSizes, Geometry, image_at
from blockconv.kernels.common.operands import ConvOperands
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.depthwise.backward_weights import DepthwiseWeightsArguments
from blockconv.kernels.depthwise.codegen import chosen


@dataclass(frozen=True)
class PixelsSpec:
    """The compile-time parameters of a kernel.

    src, dst: the codes of the types of the arrays that are read, and of the input's gradient.
    lanes: of a vector, `unit` channels of so many pixels.
    bias: of weights: whether the bias's gradient is wanted.
    top, left: of the input: the padding, modulo the stride.
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
    lanes: int
    unit: int
    bias: int = 0
    top: int = 0
    left: int = 0
    holds: int = 0
    activation: int = ActivationKind.NONE

    @property
    def pixels(self) -> int:
        return self.lanes // self.unit

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel's channels that are read."""
        return self.unit * ElementType.of(self.src).itemsize

    def zeros(self, columns: int) -> int:
        """Bytes of so many columns that are read in place of a row outside an array, in whole lines."""
        return -(-columns * self.pixel_bytes // LINE) * LINE

    # ------------------------------------------------------------ the gradient of weights

    @property
    def sums(self) -> int:
        return self.kh * self.kw + self.bias

    @property
    def grad_rows(self) -> int:
        """Rows of the gradient whose taps reach a row of the input, and rows between such."""
        return (self.kh - 1) * self.dh // self.sh + 1

    @property
    def bases(self) -> list[int]:
        """Columns, after the first tap's, that each `sw` vectors of a row of the input begin with."""
        return sorted({w * self.dw // self.sw * self.sw for w in range(self.kw)})

    @property
    def weights_loads(self) -> int:
        """Loads of a step."""
        rows = len({h * self.dh % self.sh for h in range(self.kh)})
        return 1 + rows * len(self.bases) * self.sw

    @property
    def weights_zeros(self) -> int:
        return self.zeros(self.bases[-1] + self.sw * self.pixels)

    # ------------------------------------------------------------ the gradient of the input

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
    def first(self) -> int:
        """The first column that a step reads."""
        return min(self.cols.values(), default=0)

    @property
    def past(self) -> int:
        """Past the last one."""
        return max(self.cols.values(), default=0) + self.pixels

    @property
    def data_zeros(self) -> int:
        return self.zeros(self.past - self.first)


def _reached(taps: int, stride: int, dilation: int, begin: int) -> dict[tuple[int, int], int]:
    """Where pixel `stride * m + rest` of the input is reached by a tap: {(rest, tap): output pixel - m}."""
    found = {}
    for rest in range(stride):
        for tap in range(taps):
            output, other = divmod(rest + begin - tap * dilation, stride)
            if other == 0:
                found[rest, tap] = output
    return found


class _Code:
    """The code of a kernel. `v`: vectors of what is read; `sums`: vectors of the type that is computed with.

    zeros: the address of what is read in place of rows outside an array.
    """

    def __init__(self, builder, spec: PixelsSpec, a, zeros) -> None:
        self.b, self.spec, self.a, self.zeros = builder, spec, a, zeros
        self.v = Floats(builder, ElementType.of(spec.src), spec.lanes)
        self.sums = Vectors(builder, self.v.type, spec.lanes, bool(spec.fma))

    def below(self, pixels):
        """The mask of a vector's first pixels."""
        return self.v.below(pixels * self.spec.unit)

    def between(self, begin, end):
        """The mask of a vector's pixels from number `begin` to `end`."""
        return ~self.below(begin) & self.below(end)

    def read(self, address, mask: Any | None):
        """A vector; zeros where there is a mask that lacks them."""
        return self.v.load(address) if mask is None else self.v.load(address, mask, 0.0)


# ---------------------------------------------------------------- the gradient of weights


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


class _WeightsCode(_Code):
    """The code of a vector of channels, in one function: what it holds in registers is stored once, at the end."""

    def __init__(self, builder, spec: PixelsSpec, a: DepthwiseWeightsArguments, zeros) -> None:
        super().__init__(builder, spec, a, zeros)
        self.accs = self.sums.slots(spec.sums, self.sums.zero)

    def begin(self) -> None:
        """Begin a column: `grads` are the rows of the gradient of a step, of the one before, ..."""
        self.grads = self.sums.slots(self.spec.grad_rows, self.sums.zero)

    def step(self, at: _Column, oh, has_mask: bool, has_border: bool) -> None:
        """A row of the gradient, and the rows of the input that no row before it reaches.

        has_border: rows may be outside the image, or not be reduced.
        """
        b, a, spec = self.b, self.a, self.spec
        for older, newer in zip(self.grads[:0:-1], self.grads[-2::-1], strict=True):
            b.store(b.load(newer), older)
        mask = at.grad_mask
        if has_border:
            mask = b.select(oh < at.last, mask, ir.Constant(mask.type, None))
        grad = self.read(at.grad + oh * a.gradient.row, mask if has_mask else None)
        b.store(grad, self.grads[0])
        # One pointer that moves: else each row has its own, and most of these are spilled.
        src = opaque(b, at.src + oh * (spec.sh * a.source.row))
        for j in sorted({h * spec.dh % spec.sh for h in range(spec.kh)}):
            taps = [h for h in range(spec.kh) if h * spec.dh % spec.sh == j]
            line = src + j * a.source.row
            if has_border:
                ih = oh * spec.sh - a.ph + j
                line = b.select(b.icmp_unsigned("<", ih, a.ih), line, self.zeros)
            values = self.values(at, line, has_mask)
            for h in taps:
                back = h * spec.dh // spec.sh
                row = oh - back
                is_reduced = (row >= at.first) & (row < at.last)
                with b.if_then(is_reduced) if has_border else nullcontext():
                    for value, slot in zip(values, self.accs[h * spec.kw :], strict=False):
                        b.store(self.sums.multiply_add(value, b.load(self.grads[back]), b.load(slot)), slot)
        if spec.bias:
            b.store(b.load(self.accs[-1]) + grad, self.accs[-1])

    def values(self, at: _Column, line, has_mask: bool) -> list[Any]:
        """The vector that each tap of a row reads."""
        spec, loaded = self.spec, dict[int, list[Any]]()
        for (base, start), mask in at.masks.items():
            address = line + (base + start) * spec.pixel_bytes
            loaded.setdefault(base, []).append(self.read(address, mask if has_mask else None))
        taps = [divmod(w * spec.dw, spec.sw) for w in range(spec.kw)]
        return [chosen(self.b, loaded[base * spec.sw], spec.unit, phase) for base, phase in taps]

    def column(self, col, src, grad, first, last) -> _Column:
        b, a, spec = self.b, self.a, self.spec
        left, valid = col * spec.sw - a.pw, a.ow - col
        masks = {}
        for base in spec.bases:
            for start in range(0, spec.sw * spec.pixels, spec.pixels):
                begin = left + (base + start)
                inside, reached = a.iw - begin, valid * spec.sw - start
                end = b.select(inside < reached, inside, reached)
                masks[base, start] = self.between(-begin, end)
        src, grad = src + col * (a.sw * a.source.col), grad + col * a.gradient.col
        return _Column(src, grad, first, last, self.below(valid), masks)

    def fold(self, to) -> None:
        """Store the sums of the pixels of each vector, [tap][channel]."""
        b, v, spec = self.b, self.sums, self.spec
        vectors = [b.load(slot) for slot in self.accs]
        for _ in range(spec.pixels.bit_length() - 1):
            vectors += [v.zero] * (len(vectors) % 2)
            pairs = [[p, q] for p, q in zip(vectors[::2], vectors[1::2], strict=True)]
            vectors = [v.add(*(chosen(b, pair, spec.unit, first) for first in (0, 1))) for pair in pairs]
        for k, value in enumerate(vectors):
            count = min(spec.lanes, spec.sums * spec.unit - k * spec.lanes)
            v.store_lanes(value, to + k * v.bytes, None, count)


weights_code = emitted(_WeightsCode)


def _reduce_image(code, shape, a, src, grad, first, last):
    """Reduce rows `first` to `last` of an image's gradient, a column of vectors at a time."""
    end, before = last + shape.grad_rows - 1, first + shape.grad_rows - 1
    # The first step whose rows are all inside the image, and past the last.
    inner = min(max((a.ph + shape.sh - 1) // shape.sh, before), end)
    outer = min(max(min((a.ih + a.ph) // shape.sh, last), inner), end)
    for col in range(0, a.ow, shape.pixels):
        at = code.column(col, src, grad, first, last)
        split = inner if col >= a.inner and col + shape.pixels <= a.outer else outer
        code.begin()
        for oh in range(first, inner):
            code.step(at, oh, True, True)
        for oh in range(inner, split):  # masks, but no checks of rows
            code.step(at, oh, True, False)
        for oh in range(split, outer):
            code.step(at, oh, False, False)
        for oh in range(outer, end):
            code.step(at, oh, True, True)


@jit.kernel
def depthwise_weights_of_pixels(shape: PixelsSpec):
    """The loop over splits and vectors of channels."""
    zeros, each = shape.weights_zeros, shape.sums * shape.unit * ElementType.of(shape.src).computed.itemsize

    def kernel(args, first, last, scratch):
        a = held(DepthwiseWeightsArguments(args))
        fill_memory(scratch, zeros, 0)
        for task in range(first, last):
            split, group = task // a.groups, task % a.groups
            start, end = a.n * a.oh * split // a.splits, a.n * a.oh * (split + 1) // a.splits
            for vector in range(a.vectors * group // a.groups, a.vectors * (group + 1) // a.groups):
                of, code = ChannelVector(a.table)[vector], weights_code(shape, a, scratch)
                src = a.src + of.src - a.ph * a.source.row - a.pw * a.source.col
                for n in range(start // a.oh, (end + a.oh - 1) // a.oh):
                    image, grad = image_at(src, n, a.source), image_at(a.grad + of.dst, n, a.gradient)
                    top, bottom = max(start - n * a.oh, 0), min(end - n * a.oh, a.oh)
                    _reduce_image(code, shape, a, image, grad, top, bottom)
                code.fold(a.sums + (split * a.vectors + vector) * each)

    return kernel


# ---------------------------------------------------------------- the gradient of the input


class DepthwiseDataArguments(ConvOperands, ConvSizes):
    """The gradient of the input, whose source is the output's gradient. A task is a block of channels of an image.

    The weights are [block][tap][channel].
    """

    source = group(Geometry, "the strides of `src`")
    destination = group(Geometry, "those of `dst`")
    blocks = word("of channels", "blocks")


class _DataCode(_Code):
    """The code of one plane: a block of channels of an image. wei, bia: the addresses of its own."""

    def __init__(self, builder, spec: PixelsSpec, a: DepthwiseDataArguments, zeros, wei, bia) -> None:
        super().__init__(builder, spec, a, zeros)
        self.stored, self.wei = Floats(builder, ElementType.of(spec.dst), spec.lanes), wei
        self.bias = self.repeated(bia)
        self.parameters = list(parameters_at(self.sums, a.activation)) if spec.activation else []
        self.held = [self.weight(k) for k in range(spec.kh * spec.kw)] if spec.holds else []

    def repeated(self, address):
        """The values of a block's channels, for each pixel of a vector."""
        return self.sums.repeated(address, self.spec.unit)[0]

    def weight(self, tap: int):
        return self.repeated(self.wei + tap * self.spec.unit * self.sums.itemsize)

    def masks(self, at) -> dict[int, Any]:
        """The masks of the vectors that steps load, by the column from `at` on that a vector begins with."""
        starts = {k: (at + k) for k in {*self.spec.cols.values()}}
        return {k: self.between(-start, self.a.ow - start) for k, start in starts.items()}

    def step(self, src, dst, oh, ih, masks: dict[int, Any] | None, left: Any | None) -> None:
        """The rows `ih` and on of the input, at `dst`: a vector of each remainder.

        oh, src: the row of the output's gradient, and its pixel, from which rows and columns of taps count. left:
        pixels up to the end of the rows, where these may be fewer than are stored.
        """
        b, a, spec, loaded = self.b, self.a, self.spec, {}
        for row in sorted({*spec.rows.values()}):
            number = oh + row
            line = src + (number * a.source.row + spec.first * spec.pixel_bytes)
            line = b.select(b.icmp_unsigned("<", number, a.oh), line, self.zeros)
            for k in {*spec.cols.values()}:
                address = line + (k - spec.first) * spec.pixel_bytes
                loaded[row, k] = self.read(address, masks and masks[k])
        for rest in range(spec.sh):
            found = [self.bias] * spec.sw
            for (of_row, h), row in spec.rows.items():
                for (phase, w), k in spec.cols.items() if of_row == rest else ():
                    tap = h * spec.kw + w
                    weight = self.held[tap] if self.held else self.weight(tap)
                    found[phase] = self.sums.multiply_add(loaded[row, k], weight, found[phase])
            found = list(map(self.activated, found))
            number = ih + rest
            with b.if_then(number < a.ih):
                self.store(self.interleaved(found), dst + number * a.destination.row, left)

    def activated(self, value):
        v, kind = self.sums, self.spec.activation
        if kind == ActivationKind.CLIP:
            return v.clip(value, *map(v.splat, self.parameters))
        number = ActivationArguments.load(self.b, self.a.activation).number
        return activate(v, value, number, self.parameters) if kind else value

    def interleaved(self, vectors: list[Any]) -> list[Any]:
        """The pixels of vectors of each remainder, in their order."""
        spec, kind, found = self.spec, vectors[0].type, []
        for first in range(0, spec.sw * spec.lanes, spec.lanes):
            numbers = [divmod(k, spec.unit) for k in range(first, first + spec.lanes)]
            at = [n % spec.sw * spec.lanes + n // spec.sw * spec.unit + channel for n, channel in numbers]
            found.append(picked(self.b, kind, at, vectors.__getitem__))
        return found

    def store(self, values: list[Any], dst, left: Any | None) -> None:
        for k, value in enumerate(values):
            rest = () if left is None else (self.below(left - k * self.spec.pixels),)
            self.stored.store(value, dst + k * self.stored.bytes, *rest)


data_code = emitted(_DataCode)


def _compute_plane(code, shape, a, src, dst):
    """The gradient of a plane's input, a column of vectors at a time."""
    steps, size = (a.ih + shape.sh - 1) // shape.sh, ElementType.of(shape.dst).itemsize
    for col in range(0, (a.iw + shape.sw - 1) // shape.sw, shape.pixels):
        at, iw = col + a.pw // shape.sw, shape.sw * col
        first, to = src + at * shape.pixel_bytes, dst + iw * (shape.unit * size)
        reads_inside = at + shape.first >= 0 and at + shape.past <= a.ow
        if reads_inside and shape.sw * (col + shape.pixels) <= a.iw:
            for k in range(steps):
                code.step(first, to, k + a.ph // shape.sh, shape.sh * k, None, None)
        else:
            masks = code.masks(at)
            for k in range(steps):
                code.step(first, to, k + a.ph // shape.sh, shape.sh * k, masks, a.iw - iw)


@jit.kernel
def depthwise_data_of_pixels(shape: PixelsSpec):
    """The loop over planes."""
    zeros, taps, size = shape.data_zeros, shape.kh * shape.kw, shape.unit * ElementType.of(shape.src).computed.itemsize

    def kernel(args, first, last, scratch):
        a = held(DepthwiseDataArguments(args))
        s, d = a.source, a.destination
        fill_memory(scratch, zeros, 0)
        for task in range(first, last):
            n, block = task // a.blocks, task % a.blocks
            src, dst = a.src + n * s.n + block * s.block, a.dst + n * d.n + block * d.block
            code = data_code(shape, a, scratch, a.wei + block * (taps * size), a.bia + block * size)
            _compute_plane(code, shape, a, src, dst)

    return kernel
