"""Kernels of softmax and of local response normalisation: the code that `axis_walk` runs along one axis.

The softmax of x is e^(x - most) / total. `most` is the largest x, so no power overflows. `total` is the sum of the
powers. The logarithm is x - (most + log(total)).
"""

import math

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.jit.arguments import float64_bits, word
from blockconv.jit.ir import const, counted
from blockconv.kernels.common.axis_walk import AxisArgs, axis_walk, softmax_terms


@jit.kernel
def softmax(element: ElementType, lanes, direction, log, zero_rows=0):
    """The softmax, or with `log` its logarithm. The destination holds the powers between the visits.

    Scratch: powers, where elements are narrower than these. zero_rows: as of `SoftmaxProblem`.
    """

    def body(w):
        v, run = w.v, w.run

        def x(at, other=None):
            return v.load(run.src + at.offset, at.mask, other)

        def powers(at):
            return run.own + at.own if v.is_narrow else run.dst + at.offset

        def put(power, at):
            if not log:
                v.computed.store(power, powers(at), at.mask)

        most, total, factor = softmax_terms(w, lambda at: x(at, -math.inf), x, put, zero_rows)
        if log:
            subtrahend = most + v.log(total)
            w.each(lambda at: w.out.store(x(at) - subtrahend, run.dst + at.offset, at.mask))
            return

        def result(at):
            w.out.store(v.computed.load(powers(at), at.mask) * factor, run.dst + at.offset, at.mask)

        w.each(result)

    return axis_walk(element, lanes, direction, body)


class LrnArgs(AxisArgs):
    """x / (bias + scale * sum of squares) ** beta. The sum is of the channels in the window around the result's."""

    before = word("channels of the window before the result's own")
    after = word("channels of the window after it")
    scale = float64_bits("alpha / size of the window")
    bias = float64_bits("bias")
    beta = float64_bits("beta")


@jit.kernel
def lrn(element: ElementType, lanes, direction, three_quarters):
    """Scratch: the channels' squares, between zeros for channels that do not exist. three_quarters: beta is 0.75."""

    def body(w):
        v, run, a = w.v, w.run, LrnArgs.load(w.run.args, held=True)
        step, vectors = const(w.own_step), w.v.computed
        first = run.own + a.before * step
        scale, bias, beta = map(v.splat_float64, (a.scale, a.bias, a.beta))

        def zero(address, channels):
            elements = channels * (w.own_step // vectors.itemsize)
            vectors.each(elements, lambda offset, mask: vectors.store(v.zero, address + offset, mask))

        def square(at):
            x = v.load(run.src + at.offset, at.mask)
            vectors.store(x * x, first + at.own, at.mask)

        def result(at):
            (total,) = v.slots(1, v.zero)
            with counted(a.before + a.after + 1) as n:
                near = run.own + at.own + n * step
                total.held += vectors.load(near, at.mask)
            x = v.load(run.src + at.offset, at.mask)
            base = bias + scale * total.held
            if three_quarters:
                root = v.sqrt(base)
                factor = root * v.sqrt(root)
            else:
                factor = v.intrinsic("pow", base, beta)
            w.out.store(x / factor, run.dst + at.offset, at.mask)

        zero(run.own, a.before)
        zero(first + a.size * step, a.after)
        w.each(square)
        w.each(result)

    return axis_walk(element, lanes, direction, body)
