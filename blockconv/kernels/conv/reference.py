"""The kernel of the reference convolution."""

from blockconv import jit
from blockconv.jit.arguments import group, in_channels, word
from blockconv.jit.ir import digits, load_f, store_f
from blockconv.kernels.common.activation import activate_scalar
from blockconv.kernels.common.geometry import ConvSizes, Geometry
from blockconv.kernels.common.operands import ConvOperands


class ReferenceArguments(ConvOperands, ConvSizes):
    """The arguments of `conv_reference`. Weights are (O, I/G, KH, KW)."""

    ic = in_channels("input channels")
    oc = in_channels("output channels")
    g = word("groups", "groups")
    padded_oc = in_channels("output channels, with the destination's padding")
    source = group(Geometry, "the source's strides")
    destination = group(Geometry, "the destination's strides")


@jit.unswitched_kernel
def conv_reference(itemsize):
    """A task is one row of one output channel, padding channels included (they are zero)."""

    def kernel(a: ReferenceArguments, first, last, scratch):
        source, destination = a.source, a.destination
        group_ic, group_oc = a.ic // a.g, a.oc // a.g
        residual = a.residual - a.dst
        for task in range(first, last):
            h, c, n = digits(task, a.oh, a.padded_oc)
            out = a.dst + n * destination.n + h * destination.row + Geometry.offset(destination, c)
            for w in range(a.ow):
                at = out + w * destination.col
                if c >= a.oc:
                    store_f(at, 0.0, itemsize)
                    continue
                total = load_f(a.bia + c * itemsize, itemsize)
                for i in range(group_ic):
                    plane = a.src + n * source.n + Geometry.offset(source, c // group_oc * group_ic + i)
                    for y in range(a.kh):
                        for x in range(a.kw):
                            ih, iw = h * a.sh - a.ph + y * a.dh, w * a.sw - a.pw + x * a.dw
                            weight = load_f(a.wei + (((c * group_ic + i) * a.kh + y) * a.kw + x) * itemsize, itemsize)
                            value = weight - weight  # zero padding times the weight: NaN if that is infinite
                            if 0 <= ih < a.ih and 0 <= iw < a.iw:
                                value = weight * load_f(plane + ih * source.row + iw * source.col, itemsize)
                            total += value
                if residual:
                    total += load_f(at + residual, itemsize)
                store_f(at, activate_scalar(total, a.activation), itemsize)

    return kernel
