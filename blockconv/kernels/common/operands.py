"""The operands of ops: the words that kernels have them by, and their buffers by number."""

from blockconv.core.layout import Layout
from blockconv.jit.arguments import Arguments, address, kernel_address
from blockconv.runtime.launcher import Buffer


class Operands(Arguments):
    """The source and the destination of an op. If an op has no others, they are its buffers."""

    src = address("the source", Buffer(0))
    dst = address("the destination", Buffer(1))


class PoolOperands(Operands):
    """The operands of a pool."""

    idx = address("the indices of maxima, int64s in the destination's order; 0: there are none", 0)


class ConvOperands(Operands):
    """The operands of a convolution."""

    wei = address("packed weights")
    bia = address("packed bias")
    residual = address("the residual, with the destination's strides; the destination where there is none")
    activation = address("the activation's `ActivationArguments`; of integers `EpilogueArguments`")
    activate = kernel_address("what computes one that does more than clip, of vectors: see `activate_vectors`", 0)


SRC, WEI, BIA, DST, RES, ACT = (Buffer(k) for k in range(6))
CONV = ConvOperands(src=SRC, wei=WEI, bia=BIA, dst=DST, residual=RES, activation=ACT)
POOL = PoolOperands(idx=Buffer(2))
# Buffers of the gradient of a convolution's weights. OIHW is the default layout of that gradient.
INPUT, GRAD, DST_WEIGHTS, DST_BIAS, WORKSPACE = (Buffer(k) for k in range(5))
OIHW = Layout("abcd")


def conv_operands(residual: bool, activate: int = 0) -> ConvOperands:
    """The operands of a convolution, with a residual or without, and the kernel of its activation."""
    return CONV._replace(residual=RES if residual else DST, activate=activate)
