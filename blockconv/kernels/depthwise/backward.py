"""The gradients of a depthwise convolution: of its weights, and of its input where there is a stride.

A vector is neighbouring channels of a pixel (NHWC), or neighbouring pixels of a row of one channel (NCHW), or of a
block of a few (NCHW4). Rows and columns outside an array are read as a vector of zeros, or masked.

Weights: a *line* is a row of single pixels where vectors hold channels, and a column of vectors where they hold pixels.
Each tap has a vector of sums, which stay in registers along a line. A step reads the new positions of the input along
it, as many as the stride, and one of the gradient. Each position of the input is multiplied by all vectors of the
gradient whose taps reach it; these stay in registers from a step to the next. So of 3x3 taps with stride 1 a step has
four loads and nine products. Across the line, with a stride of 2, taps of pixels share loads. At the end the sums of a
vector's pixels are added: pairs of vectors become one, until all taps are in one.

A task of weights is a share of the gradient's rows (a split), and some of the vectors. Another op adds the sums of all
splits in their order. How many there are follows from the problem.

Input: pixels of the input with the same remainder by the stride are reached by the same taps: their sums are a vector,
and these are interleaved and stored. A step computes the `sh` rows of the input that the same rows of the output's
gradient reach, so each of these is loaded once for all. Buffers: those of the forward op.
"""

import itertools
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, NamedTuple

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import group, held, word
from blockconv.jit.ir import const, digits, emitted, fill_memory, load_i64, opaque, picked
from blockconv.jit.values import build, least
from blockconv.kernels.common.activation import clip, compute
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import ChannelVector, ConvSizes, Geometry, image_at
from blockconv.kernels.common.operands import ConvOperands
from blockconv.kernels.common.tile import LINE
from blockconv.kernels.common.vectors import Vectors
from blockconv.kernels.depthwise.codegen import chosen


@dataclass(frozen=True)
class GradientSpec:
    """The compile-time parameters of a kernel.

    src, dst: the codes of the types of the arrays that are read, and of the input's gradient.
    lanes: of a vector, `unit` channels of so many pixels.
    bias: of weights: whether the bias's gradient is wanted.
    top, left: of the input: the padding, modulo the stride.
    holds: whether all weights stay in registers.
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

    @property
    def pixels(self) -> int:
        return self.lanes // self.unit

    @property
    def pixel_bytes(self) -> int:
        """Bytes of a pixel's channels that are read."""
        return self.unit * ElementType.of(self.src).itemsize

    def code(self) -> Vectors:
        """Code over the sums."""
        return Vectors(Floats(ElementType.of(self.src), self.lanes).type, self.lanes, bool(self.fma))

    def zeros(self, columns: int) -> int:
        """Bytes of so many columns that are read in place of a row outside an array, in whole lines."""
        return -(-columns * self.pixel_bytes // LINE) * LINE

    # ------------------------------------------------------------ the gradient of weights

    @property
    def sums(self) -> int:
        return self.kh * self.kw + self.bias

    @property
    def along(self) -> tuple[int, int, int]:
        """Taps, stride and dilation along a line."""
        return (self.kh, self.sh, self.dh) if self.pixels > 1 else (self.kw, self.sw, self.dw)

    @property
    def across(self) -> tuple[int, int, int]:
        return (self.kw, self.sw, self.dw) if self.pixels > 1 else (self.kh, self.sh, self.dh)

    @property
    def reach(self) -> int:
        """Steps from the first tap to the last: vectors of the gradient that wait for the input."""
        taps, stride, dilation = self.along
        return (taps - 1) * dilation // stride

    @property
    def keeps_gradients(self) -> bool:
        """Whether these stay in registers. With dilation there would be more of them than taps along the line."""
        return self.reach < self.along[0]

    @property
    def bases(self) -> list[int]:
        """Positions across the line, after the first tap's, where loads of a vector for each remainder begin."""
        taps, stride, dilation = self.across
        return sorted({k * dilation // stride * stride for k in range(taps)})

    @property
    def weights_loads(self) -> int:
        """Loads of a step."""
        taps, stride, dilation = self.along
        return 1 + len({k * dilation % stride for k in range(taps)}) * len(self.bases) * self.across[1]

    @property
    def weights_zeros(self) -> int:
        return self.zeros(self.bases[-1] + self.sw * self.pixels if self.pixels > 1 else 1)

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

    zeros: the address of what is read in place of positions outside an array.
    """

    def __init__(self, spec: GradientSpec, a, zeros) -> None:
        self.spec, self.a, self.zeros = spec, a, zeros
        self.v, self.sums = Floats(ElementType.of(spec.src), spec.lanes), spec.code()

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


class DepthwiseWeightsArguments(ConvSizes):
    """The gradient of depthwise weights."""

    src = word("the input", "address")
    grad = word("the gradient of the output", "address")
    dst = word("the gradient of the weights", "address")
    dst_bias = word("that of the bias; 0: not wanted", "address")
    sums = word("the sums of each split: of each vector its taps and the bias", "address")
    table = word("a `ChannelVector` for each vector", "address")
    taps_at = word("from there to the place of each tap in the gradient of the weights, in bytes", "bytes")
    vectors = word("of all channels")
    groups = word("of vectors, of tasks")
    splits = word("shares of the rows")
    source = group(Geometry, "the input's strides")
    gradient = group(Geometry, "the gradient's strides")
    inner = word("the first row or column of the gradient, across lines, whose taps are all in the image")
    outer = word("past the last")
    dst_o = word("from an output channel to the next in the gradient of the weights", "bytes")


class _Axis(NamedTuple):
    """An axis of both arrays: bytes from a position to the next, how many there are, and padding before the input's."""

    src_step: Any
    grad_step: Any
    src_size: Any
    grad_size: Any
    padding: Any


class _Line(NamedTuple):
    """A line of an image: addresses, and masks.

    first, last: the positions of the gradient that are reduced.
    grad_mask, masks: of the gradient's vector, and of the input's across the line, by base and first pixel; or None.
    """

    src: Any
    grad: Any
    first: Any
    last: Any
    grad_mask: Any | None
    masks: dict[tuple[int, int], Any | None]


class _WeightsCode(_Code):
    """The code of a vector of channels, in one function: what it holds in registers is stored once, at the end."""

    def __init__(self, spec: GradientSpec, a: DepthwiseWeightsArguments, zeros) -> None:
        super().__init__(spec, a, zeros)
        rows = _Axis(a.source.row, a.gradient.row, a.ih, a.oh, a.ph)
        cols = _Axis(a.source.col, a.gradient.col, a.iw, a.ow, a.pw)
        self.along, self.across = (rows, cols) if spec.pixels > 1 else (cols, rows)
        self.accs = self.sums.slots(spec.sums, self.sums.zero)

    def line(self, at, src, grad, first, last, valid, has_mask: bool) -> _Line:
        """The line at a position of the gradient across lines. src, grad: addresses of the first one's.

        valid: channels that exist, where a vector has nothing else.
        """
        spec, axis = self.spec, self.across
        stride = spec.across[1]
        left, behind = at * stride - axis.padding, axis.grad_size - at
        masks = dict.fromkeys(itertools.product(spec.bases, range(0, stride * spec.pixels, spec.pixels)))
        grad_mask = None
        if has_mask:
            grad_mask = self.below(behind) if spec.pixels > 1 else self.v.below(valid)
            for base, start in masks:
                begin = left + (base + start)
                inside, reached = axis.src_size - begin, behind * stride - start
                mask = self.between(-begin, least(inside, reached))
                masks[base, start] = mask if spec.pixels > 1 else mask & grad_mask
        # Vectors of the gradient of a step, of the one before, ...
        self.grads = self.sums.slots(spec.reach + 1 if spec.keeps_gradients else 1, self.sums.zero)
        return _Line(src + left * axis.src_step, grad + at * axis.grad_step, first, last, grad_mask, masks)

    def gradient(self, at: _Line, number, has_border: bool):
        """The gradient's vector at a position of the line."""
        address = at.grad + number * self.along.grad_step
        if has_border:
            address = build.select(number < at.last, address, self.zeros)
        return self.read(address, at.grad_mask)

    def step(self, at: _Line, number, has_border: bool) -> None:
        """A position of the gradient, and those of the input that none before it reaches.

        has_border: positions may be outside the image, or not be reduced.
        """
        spec, axis = self.spec, self.along
        count, stride, dilation = spec.along
        for older, newer in zip(self.grads[:0:-1], self.grads[-2::-1], strict=True):
            build.store(build.load(newer), older)
        build.store(self.gradient(at, number, has_border), self.grads[0])
        # One pointer that moves: else each position has its own, and most of these are spilled.
        src = opaque(at.src + number * (stride * axis.src_step))
        step = const(spec.pixel_bytes) if spec.pixels > 1 else self.across.src_step
        # The farthest first: in another order, rows of wide pixels wait longer for cache lines (NHWC: 1.3 times).
        for j in sorted({k * dilation % stride for k in range(count)}, reverse=True):
            taps = [k for k in range(count) if k * dilation % stride == j]
            line, apart = src + j * axis.src_step, step
            if has_border:
                inside = build.icmp_unsigned("<", number * stride - axis.padding + j, axis.src_size)
                line = build.select(inside, line, self.zeros)
                apart = build.select(inside, step, const(0)) if spec.pixels == 1 else step
            values = self.values(at, line, apart)
            for k in taps:
                back = k * dilation // stride
                before = number - back
                is_reduced = (before >= at.first) & (before < at.last)
                with build.if_then(is_reduced) if has_border else nullcontext():
                    if spec.keeps_gradients or back == 0:
                        grad = build.load(self.grads[back])
                    else:
                        grad = self.gradient(at, before, False)
                    for value, slot in zip(values, self.taps(k), strict=True):
                        build.store(self.sums.multiply_add(value, grad, build.load(slot)), slot)
        if spec.bias:
            build.store(build.load(self.accs[-1]) + build.load(self.grads[0]), self.accs[-1])

    def taps(self, number: int) -> list[Any]:
        """The sums of the taps across the line, at one along it."""
        spec = self.spec
        if spec.pixels > 1:
            return self.accs[number * spec.kw : (number + 1) * spec.kw]
        return self.accs[number : spec.kh * spec.kw : spec.kw]

    def values(self, at: _Line, line, step) -> list[Any]:
        """The vector that each tap across the line reads. step: bytes from a position to the next."""
        (count, stride, dilation), loaded = self.spec.across, dict[int, list[Any]]()
        for (base, start), mask in at.masks.items():
            loaded.setdefault(base, []).append(self.read(line + step * (base + start), mask))
        taps = [divmod(k * dilation, stride) for k in range(count)]
        return [chosen(loaded[base * stride], self.spec.unit, phase) for base, phase in taps]

    def begin(self, sums) -> None:
        """Go on from sums in memory."""
        self.sums.restore(self.accs, sums)

    def fold(self, to) -> None:
        """Store the sums of the pixels of each vector, [tap][channel]."""
        v, spec = self.sums, self.spec
        vectors = v.loaded(self.accs)
        for _ in range(spec.pixels.bit_length() - 1):
            vectors += [v.zero] * (len(vectors) % 2)
            pairs = [[p, q] for p, q in zip(vectors[::2], vectors[1::2], strict=True)]
            vectors = [chosen(pair, spec.unit, 0) + chosen(pair, spec.unit, 1) for pair in pairs]
        for k, value in enumerate(vectors):
            count = min(spec.lanes, spec.sums * spec.unit - k * spec.lanes)
            v.store_lanes(value, to + k * v.bytes, None, count)


weights_code = emitted(_WeightsCode)


def _steps(code, at, first, inner, outer, end):
    """Steps from `first` to `end`; from `inner` to `outer` no position is outside the image."""
    for number in range(first, inner):
        code.step(at, number, True)
    for number in range(inner, outer):
        code.step(at, number, False)
    for number in range(outer, end):
        code.step(at, number, True)


def _reduce(code, a, number, src, grad, first, last, valid):
    """Reduce positions `first` to `last` of the gradient along the line of this number."""
    shape, stride = code.spec, code.spec.along[1]
    size, padding = (a.ih, a.ph) if shape.pixels > 1 else (a.iw, a.pw)
    end, before = last + shape.reach, first + shape.reach
    # The first step whose positions are all inside the image, and past the last.
    inner = min(max((padding + stride - 1) // stride, before), end)
    outer = min(max(min((size + padding) // stride, last), inner), end)
    if number >= a.inner and number + shape.pixels <= a.outer and (shape.pixels > 1 or valid == shape.lanes):
        _steps(code, code.line(number, src, grad, first, last, valid, False), first, inner, outer, end)
    else:
        _steps(code, code.line(number, src, grad, first, last, valid, True), first, inner, outer, end)


@jit.kernel
def depthwise_weights(shape: GradientSpec):
    """The loop over splits, vectors of channels and lines.

    Where vectors hold channels, those of a pixel are contiguous, so that they are the inner loop.
    """
    zeros, each = shape.weights_zeros, shape.sums * shape.unit * ElementType.of(shape.src).computed.itemsize

    def kernel(args, first, last, scratch):
        a = held(DepthwiseWeightsArguments(args))
        fill_memory(scratch, zeros, 0)
        for task in range(first, last):
            group, split = digits(task, a.groups)
            start, end = a.n * a.oh * split // a.splits, a.n * a.oh * (split + 1) // a.splits
            first_vector, end_vector = a.vectors * group // a.groups, a.vectors * (group + 1) // a.groups
            sums = a.sums + split * a.vectors * each
            if shape.pixels == 1:
                fill_memory(sums + first_vector * each, (end_vector - first_vector) * each, 0)
                for row in range(start, end):
                    src, grad = image_at(a.src, row // a.oh, a.source), image_at(a.grad, row // a.oh, a.gradient)
                    src -= a.pw * a.source.col
                    for vector in range(first_vector, end_vector):
                        of, code = ChannelVector(a.table)[vector], weights_code(shape, a, scratch)
                        code.begin(sums + vector * each)
                        _reduce(code, a, row % a.oh, src + of.src, grad + of.dst, 0, a.ow, of.valid)
                        code.fold(sums + vector * each)
            else:
                for vector in range(first_vector, end_vector):
                    of, code = ChannelVector(a.table)[vector], weights_code(shape, a, scratch)
                    src = a.src + of.src - a.ph * a.source.row
                    for n in range(start // a.oh, (end + a.oh - 1) // a.oh):
                        image, grad = image_at(src, n, a.source), image_at(a.grad + of.dst, n, a.gradient)
                        top, bottom = max(start - n * a.oh, 0), min(end - n * a.oh, a.oh)
                        for col in range(0, a.ow, shape.pixels):
                            _reduce(code, a, col, image, grad, top, bottom, 0)
                    code.fold(sums + vector * each)

    return kernel


vectors, floats = (emitted(code, whole=True) for code in (Vectors, Floats))


@jit.kernel
def finish_depthwise_weights(acc, dst, lanes, taps, bias):
    """Add the sums of all splits, in their order, and move them to the gradient. A task is a vector of channels."""
    sums_of, to = ElementType.of(acc), ElementType.of(dst)
    size, dst_bytes = sums_of.itemsize, to.itemsize
    each = (taps + bias) * lanes * size

    def kernel(args, first, last, scratch):
        a, v, one, narrow = DepthwiseWeightsArguments(args), vectors(sums_of, lanes), vectors(sums_of, 1), floats(to, 1)
        for vector in range(first, last):
            sums = a.sums + vector * each
            for split in range(1, a.splits):
                for k in range(0, each, v.bytes):
                    v.store(v.load(sums + k) + v.load(sums + split * a.vectors * each + k), sums + k)
            of = ChannelVector(a.table)[vector]
            for lane in range(of.valid):
                at = a.dst + (of.first + lane) * a.dst_o
                for k in range(taps):
                    narrow.store(one.load(sums + (k * lanes + lane) * size), at + load_i64(a.table + a.taps_at, k))
                if bias:
                    value = one.load(sums + (taps * lanes + lane) * size)
                    narrow.store(value, a.dst_bias + (of.first + lane) * dst_bytes)

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

    def __init__(self, spec: GradientSpec, a: DepthwiseDataArguments, zeros, wei, bia) -> None:
        super().__init__(spec, a, zeros)
        self.stored, self.wei = Floats(ElementType.of(spec.dst), spec.lanes), wei
        self.bias = self.repeated(bia)
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
        a, spec, loaded = self.a, self.spec, {}
        for row in sorted({*spec.rows.values()}):
            number = oh + row
            line = src + (number * a.source.row + spec.first * spec.pixel_bytes)
            line = build.select(build.icmp_unsigned("<", number, a.oh), line, self.zeros)
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
            slots = self.sums.in_slots(found)
            clip(self.sums, slots, a.activation)
            compute(self.sums, slots, a)
            number = ih + rest
            with build.if_then(number < a.ih):
                self.store(self.interleaved(self.sums.loaded(slots)), dst + number * a.destination.row, left)

    def interleaved(self, vectors: list[Any]) -> list[Any]:
        """The pixels of vectors of each remainder, in their order."""
        spec, kind, found = self.spec, vectors[0].type, []
        for first in range(0, spec.sw * spec.lanes, spec.lanes):
            numbers = [divmod(k, spec.unit) for k in range(first, first + spec.lanes)]
            at = [n % spec.sw * spec.lanes + n // spec.sw * spec.unit + channel for n, channel in numbers]
            found.append(picked(kind, at, vectors.__getitem__))
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
def depthwise_data_of_pixels(shape: GradientSpec):
    """The loop over planes."""
    zeros, taps, size = shape.data_zeros, shape.kh * shape.kw, shape.unit * ElementType.of(shape.src).computed.itemsize

    def kernel(args, first, last, scratch):
        a = held(DepthwiseDataArguments(args))
        s, d = a.source, a.destination
        fill_memory(scratch, zeros, 0)
        for task in range(first, last):
            block, n = digits(task, a.blocks)
            src, dst = a.src + n * s.n + block * s.block, a.dst + n * d.n + block * d.block
            code = data_code(shape, a, scratch, a.wei + block * (taps * size), a.bia + block * size)
            _compute_plane(code, shape, a, src, dst)

    return kernel
