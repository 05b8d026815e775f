"""Softmax's kernel, a body of the walk over an axis.

The softmax of x is e^(x - most) / total. Here most is the largest of all x, so no power overflows, and total is the sum
of these powers. Its logarithm is x - (most + log(total)).
"""

import math

from blockconv import jit
from blockconv.core.types import ElementType
from blockconv.kernels.common.axis_walk import axis_kernel


@jit.kernel
def softmax(element, lanes, direction, log, zero_rows=0):
    """The softmax, or with `log` its logarithm. The destination holds the powers between the visits.

    Scratch: powers, where elements are narrower than these. zero_rows: as of `SoftmaxProblem`.
    """

    def body(w):
        b, v, run = w.b, w.v, w.run

        def x(at, other=None):
            return v.load(b.add(run.src, at.offset), at.mask, other)

        def powers(at):
            return b.add(run.own, at.own) if v.is_narrow else b.add(run.dst, at.offset)

        (most,) = w.folded(lambda at: [x(at, -math.inf)], 1, v.larger, -math.inf)
        if zero_rows:
            most = v.or_zero(most, -math.inf)

        def power(at):
            found = v.exp_to_zero(v.sub(x(at), most))
            if not log:
                v.computed.store(found, powers(at), at.mask)
            return [found]

        (total,) = w.folded(power, 1, v.add, 0.0)
        if log:
            subtrahend = v.add(most, v.log(total))
            w.each(lambda at: w.out.store(v.sub(x(at), subtrahend), b.add(run.dst, at.offset), at.mask))
            return
        factor = b.fdiv(v.c(1.0), total)
        if zero_rows:
            factor = v.or_zero(factor, math.inf)

        def result(at):
            w.out.store(v.mul(v.computed.load(powers(at), at.mask), factor), b.add(run.dst, at.offset), at.mask)

        w.each(result)

    return axis_kernel(ElementType.of(element), lanes, direction, body)
