"""How Winograd convolution wants its weights: transformed, in the order in which they are multiplied."""

import functools

import numpy as np

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.python import bounded_cache
from blockconv.kernels.common.request import Request
from blockconv.kernels.table import Transform, WeightForm
from blockconv.kernels.winograd import kernels
from blockconv.kernels.winograd.arguments import WinogradWeightsArgs
from blockconv.kernels.winograd.blocking import ITEMSIZE, WinogradBlocking, blocking
from blockconv.kernels.winograd.costs import weight_seconds
from blockconv.kernels.winograd.transforms import TAPS, Form, odd_tap, weight_factors
from blockconv.machine.machine import Machine
from blockconv.runtime import OWN_TABLE, Buffer, Launch


def _transform_op(form: Form, machine: Machine, turned: int, problem: Conv2dProblem, is_last: bool = False) -> Launch:
    """turned: whether input and output channels are exchanged, and taps in reverse order, in the weights that are read.
    is_last: whether output channels are contiguous in these.
    """
    p, at = problem, _blocking(form, machine, problem)
    ic, oc, each = p.group_ic, p.group_oc, TAPS * TAPS * ITEMSIZE
    args = WinogradWeightsArgs(
        src=Buffer(0),
        dst=Buffer(1),
        factors=OWN_TABLE,
        side=form.wei_side,
        odd=odd_tap(form),
        position=at.wei_position(p),
        ocb=at.wei_ocb(p),
        groups=p.g,
        group=ic * oc * each,
        group_oc=oc,
        vectors=at.vectors,
        steps=at.elements(ic),
        ic_step=oc * each if turned else each,
        oc_step=ITEMSIZE if is_last else each if turned else ic * each,
        tap_step=oc * ITEMSIZE,
    )
    table = np.array(weight_factors(form), np.int64 if form.exact else np.float64).view(np.int64).ravel()
    kernel = kernels.winograd_weights(form.exact, at.out_lanes, turned * (1 + is_last))
    tasks = at.set_ocbs * at.sets * at.elements(ic)
    return Launch(kernel, args, tasks, 16 if form.exact else 64, each * at.out_lanes, table)


def _transformed_bytes(form: Form, machine: Machine, problem: Conv2dProblem) -> int:
    return _bytes_of_channels(form, machine, problem.ic, problem.oc, problem.g)


@bounded_cache
def _bytes_of_channels(form: Form, machine: Machine, ic: int, oc: int, groups: int) -> int:
    """Bytes of the weights, which depend on nothing else of a problem: images of all sizes share them."""
    problem = Conv2dProblem(1, ic, TAPS, TAPS, oc, TAPS, TAPS, sh=form.stride, sw=form.stride, g=groups)
    return _blocking(form, machine, problem).wei_bytes(problem)


def _blocking(form: Form, machine: Machine, problem: Conv2dProblem) -> WinogradBlocking:
    """A blocking of the problem: transformed weights are the same for every layout and number of threads."""
    return blocking(machine, problem, Layout("NHWC"), form.m, 1, form.exact)


@functools.cache
def transform(form: Form, machine: Machine) -> Transform:
    """One object for each form, stride and machine: packed weights are kept by it."""
    return Transform(
        functools.partial(_transform_op, form, machine, 0),
        functools.partial(_transformed_bytes, form, machine),
        functools.partial(weight_seconds, form, machine),
        functools.partial(_transform_op, form, machine, 1),
    )


def weight_form(request: Request, at: WinogradBlocking) -> WeightForm:
    """The packed form of the weights for a problem that is cut so."""
    problem, whole = request.problem, max(at.width, at.lanes)
    bias = -(-request.padded_oc // whole) * whole
    layout = Layout(f"aBCde{at.width}b{at.dot.channels}c" if at.form.exact else "abcde")
    return WeightForm(layout, bias, problem.g, transform(at.form, request.machine), at.dot)
