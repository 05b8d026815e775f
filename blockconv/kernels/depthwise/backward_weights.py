"""The gradient of the weights of a depthwise convolution, where channels of a pixel are contiguous.

A vector is neighbouring channels. The sums of all taps stay in registers while a row of the gradient is read, and in
the scratch from a row to the next. Input and gradient are read in place, in whatever layouts. Where a tap is outside
the image, a vector of zeros is read for the input.

A task is a share of the gradient's rows (a split), and some of the vectors. Another op adds the sums of all splits in
their order. How many there are follows from the problem.
"""

import functools
from typing import NamedTuple

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import group, held, word
from blockconv.jit.ir import const, counted, emitted, fill_memory, load_i64, opaque
from blockconv.kernels.common.floats import Floats
from blockconv.kernels.common.geometry import ChannelVector, ConvSizes, Geometry, image_at
from blockconv.kernels.common.vectors import Vectors


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
    inner = word("the first column of the gradient whose taps are all in the image")
    outer = word("past the last")
    dst_o = word("from an output channel to the next in the gradient of the weights", "bytes")


class GradientRow(NamedTuple):
    """A row of the gradient, of a vector of channels: addresses and rows of taps.

    src: where the first tap of column 0 reads.
    top: the first row of taps in the image.
    bottom: past the last row of taps.
    """

    sums: int
    src: int
    grad: int
    zeros: int
    top: int
    bottom: int
    valid: int


def _row_adder(type: ElementType, fma: bool, shape: tuple[int, int, int], bias: bool, whole: bool):
    """add(a, row): adds a row's products to the sums. shape: rows and columns of taps, lanes. whole: all lanes."""
    kh, kw, lanes = shape

    @emitted
    def add(builder, a: DepthwiseWeightsArguments, x: GradientRow) -> None:
        b, v = builder, Floats(builder, type, lanes)
        row, tap, col = a.dh * a.source.row, a.dw * a.source.col, a.sw * a.source.col
        held_sums = Vectors(b, type.computed, lanes, fma)
        exist, other = (None, None) if whole else (held_sums.below(x.valid), 0.0)
        count = kh * kw + int(bias)
        accs = held_sums.slots(count, held_sums.zero)
        for k, slot in enumerate(accs):
            b.store(held_sums.load(x.sums + k * held_sums.bytes), slot)

        def column(ow, guarded: bool, rows: range, bias: bool) -> None:
            grad = v.load(x.grad + ow * a.gradient.col, exist, other)
            # One pointer that moves: else each tap has its own, and most of these are spilled.
            at, iw = opaque(b, x.src + ow * col), ow * a.sw - a.pw
            for h in rows:
                start = at + h * row
                for w in range(kw):
                    address = start + w * tap
                    if guarded:
                        is_there = _between(b, iw + w * a.dw, const(0), a.iw)
                        address = b.select(is_there, address, x.zeros)
                    slot = accs[h * kw + w]
                    b.store(held_sums.multiply_add(v.load(address, exist, other), grad, b.load(slot)), slot)
            if bias:
                b.store(b.load(accs[-1]) + grad, accs[-1])

        def columns(rows: range, bias: bool) -> None:
            for first, last, guarded in ((const(0), a.inner, True), (a.inner, a.outer, False), (a.outer, a.ow, True)):
                with counted(b, last, first) as ow:
                    column(ow, guarded, rows, bias)

        all_rows = b.icmp_signed("==", x.top, const(0)) & b.icmp_signed("==", x.bottom, const(kh))
        with b.if_else(all_rows) as (inner, border):
            with inner:
                columns(range(kh), bias)
            with border:
                for h in range(kh):
                    with b.if_then(_between(b, const(h), x.top, x.bottom)):
                        columns(range(h, h + 1), False)
                if bias:
                    columns(range(0), True)
        for k, slot in enumerate(accs):
            held_sums.store(b.load(slot), x.sums + k * held_sums.bytes)

    return add


def _between(builder, value, first, end):
    return (value >= first) & (value < end)


@jit.kernel
def depthwise_weights(src, fma, kh, kw, lanes, bias):
    """The loop over splits, rows of the gradient and vectors. src: the code of the type. bias: whether it is wanted."""
    type = ElementType.of(src)
    add_all, add_some = (_row_adder(type, bool(fma), (kh, kw, lanes), bool(bias), whole) for whole in (True, False))
    each = (kh * kw + bias) * lanes * type.computed.itemsize

    def kernel(args, first, last, scratch):
        a = held(DepthwiseWeightsArguments(args))
        s, g = a.source, a.gradient
        fill_memory(scratch, 128, 0)
        for task in range(first, last):
            split, group = task // a.groups, task % a.groups
            first_vector, end_vector = a.vectors * group // a.groups, a.vectors * (group + 1) // a.groups
            sums = a.sums + split * a.vectors * each
            fill_memory(sums + first_vector * each, (end_vector - first_vector) * each, 0)
            rows = a.n * a.oh
            for number in range(rows * split // a.splits, rows * (split + 1) // a.splits):
                n, oh = number // a.oh, number % a.oh
                ih = oh * a.sh - a.ph
                top = max(0, (a.dh - 1 - ih) // a.dh)
                bottom = max(top, min(kh, (a.ih - ih + a.dh - 1) // a.dh))
                src = image_at(a.src, n, s) + ih * s.row - a.pw * s.col
                grad = image_at(a.grad, n, g) + oh * g.row
                for vector in range(first_vector, end_vector):
                    of = ChannelVector(a.table)[vector]
                    row = GradientRow(sums + vector * each, src + of.src, grad + of.dst, scratch, top, bottom, of.valid)
                    if of.valid == lanes:
                        add_all(a, row)
                    else:
                        add_some(a, row)

    return kernel


vectors, floats = (functools.partial(emitted, whole=True)(code) for code in (Vectors, Floats))


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
