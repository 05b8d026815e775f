"""The operands of ops: the words that kernels have them by, and their buffers by number."""

from blockconv.core.layout import Layout
from blockconv.jit.arguments import Arguments, word
from blockconv.runtime.launcher import Buffer


class Operands(Arguments):
    """The source and the destination of an op. If an op has no others, they are its buffers."""

    src = word("the source", "address", Buffer(0))
    dst = word("the destination", "address", Buffer(1))


class PoolOperands(Operands):
    """The operands of a pool."""

    idx = word("the indices of maxima, int64s in the destination's order; 0: there are none", "address", 0)


class ConvOperands(Operands):
    """The operands of a convolution."""

    wei = word("packed weights", "address")
    bia = word("packed bias", "address")
    residual = word("the residual, with the destination's strides; the destination where there is none", "address")
    activation = word("the activation's `ActivationArguments`; of integers `EpilogueArguments`", "address")


SRC, WEI, BIA, DST, RES, ACT = (Buffer(k) for k in range(6))
CONV = ConvOperands(src=SRC, wei=WEI, bia=BIA, dst=DST, residual=RES, activation=ACT)
POOL = PoolOperands(idx=Buffer(2))
# Buffers of the gradient of a convolution's weights. OIHW is the default layout of that gradient.
INPUT, GRAD, DST_WEIGHTS, DST_BIAS, WORKSPACE = (Buffer(k) for k in range(5))
OIHW = Layout("abcd")


def conv_operands(residual: bool) -> ConvOperands:
    """The operands of a convolution, with a residual or without."""
    return CONV if residual else CONV._replace(residual=DST)
