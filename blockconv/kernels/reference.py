"""The reference convolution: one output element at a time, for every problem. Slow, and simple enough to trust."""

from __future__ import annotations

from blockconv import jit
from blockconv.emit import load_f, load_i64, store_f
from blockconv.kernels.cut import ITEMSIZE, geometry
from blockconv.kernels.epilogue import activate_scalar
from blockconv.kernels.table import Row, WeightForm
from blockconv.kernels.tiles import ACT, BIA, DST, RES, SRC, WEI
from blockconv.layout import NATIVE, Layout
from blockconv.problem import Conv2dProblem
from blockconv.runtime import Buffer, Op

__all__ = ["ROWS"]

# Argument words: buffers; a switch for the residual; the problem; the two geometries.
_PROBLEM = ("ic", "oc", "ih", "iw", "oh", "ow", "kh", "kw", "sh", "sw", "ph", "pw", "dh", "dw", "g", "padded")
_P, _S, _D = 7, 7 + len(_PROBLEM), 7 + len(_PROBLEM) + 6


@jit.kernel
def conv_reference(itemsize):
    """A task is one row of one output channel, padding channels included (they are zero)."""

    def kernel(args, first, last, scratch):
        ic, oc, ih, iw = load_i64(args, _P), load_i64(args, _P + 1), load_i64(args, _P + 2), load_i64(args, _P + 3)
        oh, ow, kh, kw = load_i64(args, _P + 4), load_i64(args, _P + 5), load_i64(args, _P + 6), load_i64(args, _P + 7)
        sh, sw, ph, pw = (
            load_i64(args, _P + 8),
            load_i64(args, _P + 9),
            load_i64(args, _P + 10),
            load_i64(args, _P + 11),
        )
        dh, dw, g, padded = (
            load_i64(args, _P + 12),
            load_i64(args, _P + 13),
            load_i64(args, _P + 14),
            load_i64(args, _P + 15),
        )
        s_len, d_len = load_i64(args, _S + 2), load_i64(args, _D + 2)
        to_residual = load_i64(args, 4) - load_i64(args, 3)
        for task in range(first, last):
            h, rest = task % oh, task // oh
            c, n = rest % padded, rest // padded
            out = load_i64(args, 3) + n * load_i64(args, _D) + h * load_i64(args, _D + 4)
            out += (c // d_len) * load_i64(args, _D + 1) + (c % d_len) * load_i64(args, _D + 3)
            first_ic = c // (oc // g) * (ic // g)
            for w in range(ow):
                at = out + w * load_i64(args, _D + 5)
                if c >= oc:
                    store_f(at, 0.0, itemsize)
                    continue
                total = load_f(load_i64(args, 2) + c * itemsize, itemsize)
                for i in range(ic // g):
                    k = first_ic + i
                    plane = load_i64(args, 0) + n * load_i64(args, _S)
                    plane += (k // s_len) * load_i64(args, _S + 1) + (k % s_len) * load_i64(args, _S + 3)
                    for y in range(kh):
                        for x in range(kw):
                            ys, xs = h * sh - ph + y * dh, w * sw - pw + x * dw
                            at_weight = load_i64(args, 1) + (((c * (ic // g) + i) * kh + y) * kw + x) * itemsize
                            weight = load_f(at_weight, itemsize)
                            value = weight - weight  # zero padding times the weight: NaN if that is infinite
                            if 0 <= ys < ih and 0 <= xs < iw:
                                there = plane + ys * load_i64(args, _S + 4) + xs * load_i64(args, _S + 5)
                                value = weight * load_f(there, itemsize)
                            total += value
                if to_residual:
                    total += load_f(at + to_residual, itemsize)
                store_f(at, activate_scalar(total, load_i64(args, 5), load_i64(args, 6)), itemsize)

    return kernel


def _bind(
    problem: Conv2dProblem, src: Layout, dst: Layout, dtype: str, threads: int, act: int, residual: bool
) -> list[Op]:
    p, itemsize = problem, ITEMSIZE[dtype]
    padded = dst.padded_shape(p.dst_shape)[1]
    numbers = [padded if name == "padded" else int(getattr(p, name)) for name in _PROBLEM]
    geometries = [*geometry(src, p.src_shape, itemsize), *geometry(dst, p.dst_shape, itemsize)]
    buffers: tuple[int | Buffer, ...] = (SRC, WEI, BIA, DST, RES if residual else DST, ACT)
    args = (*buffers, act, *numbers, *geometries)
    return [Op(conv_reference(itemsize), args, p.n * padded * p.oh, 4)]


ROWS = (
    Row(
        "conv_reference",
        "conv2d",
        frozenset(NATIVE),
        frozenset(NATIVE),
        frozenset(ITEMSIZE),
        lambda problem, src, dst: None,
        lambda problem, src, dst, threads: problem.flops / (1e9 * threads),
        _bind,
        lambda problem, src, dst, dtype: WeightForm(Layout("abcde"), problem.oc // problem.g),
        reference=True,
    ),
)
