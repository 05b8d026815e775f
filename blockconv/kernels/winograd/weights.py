"""How Winograd convolution wants its weights: transformed, in the order in which they are multiplied."""

from __future__ import annotations

import functools

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.kernels.table import Transform, WeightForm
from blockconv.kernels.winograd import kernels
from blockconv.kernels.winograd.arguments import WinogradWeightsArgs
from blockconv.kernels.winograd.blocking import ITEMSIZE, Blocking, blocking
from blockconv.kernels.winograd.costs import weight_seconds
from blockconv.kernels.winograd.transforms import EXACT_FORMS, FORMS, TAPS, Form
from blockconv.runtime import Buffer, Op

__all__ = ["weight_form"]


def _transform_op(form: Form, problem: Conv2dProblem) -> Op:
    p, m, at = problem, form.m, blocking(problem, Layout("NHWC"), form.m, 1, form.exact)
    args = WinogradWeightsArgs(
        src=Buffer(0),
        dst=Buffer(1),
        position=at.wei_position(p),
        ocb=at.wei_ocb(p),
        groups=p.g,
        group_ic=p.ic // p.g,
        group_oc=p.oc // p.g,
    )
    if form.exact:
        kernel = kernels.winograd_pair_weights(m, at.vectors, at.out_lanes)
        return Op(kernel, args, p.g * at.ocbs * at.elements(p.ic // p.g), 16)
    kernel = kernels.winograd_weights(m, p.sh, at.vectors, at.out_lanes)
    return Op(kernel, args, at.sets * at.set_ocbs * (p.ic // p.g), 64, TAPS * TAPS * at.out_lanes * ITEMSIZE)


def _transformed_bytes(form: Form, problem: Conv2dProblem) -> int:
    return blocking(problem, Layout("NHWC"), form.m, 1, form.exact).wei_bytes(problem)


def weight_form(problem: Conv2dProblem, dst: Layout, at: Blocking) -> WeightForm:
    """What to pack for a problem that is cut so."""
    whole = max(at.width, at.lanes)
    bias = -(-dst.padded_shape(problem.dst_shape)[1] // whole) * whole
    layout = Layout(f"aBCde{at.width}b{at.dot.channels}c" if at.form.exact else "abcde")
    return WeightForm(layout, bias, problem.g, TRANSFORMS[at.form], at.dot)


TRANSFORMS = {  # one for each stride too, that forms differ: packed weights are kept by them
    form: Transform(
        functools.partial(_transform_op, form),
        functools.partial(_transformed_bytes, form),
        functools.partial(weight_seconds, form.m, form.exact),
    )
    for form in (*FORMS, *EXACT_FORMS)
}
