"""A convolution or a plan on fixed arrays, as a function and an argument that any native code can call."""

from __future__ import annotations

from typing import Any

from blockconv.api.frame import start_of
from blockconv.api.modules import FRAME, Conv2d
from blockconv.core.errors import ArgumentError
from blockconv.network.plan import Plan, launches_of
from blockconv.nopython.calls import Native, of_computation, standing


def native(target: Conv2d | Plan, *inputs: Any, out: Any = None) -> Native:
    """A convolution or a plan bound to arrays: native code runs it without a look-up, on its own thread.

    target: a `Conv2d`, or a plan of `compile`.
    inputs: the arrays that each call reads; NumPy arrays, or for a Conv2d a BlockedArray. They are not copied, so an
        array has to be dense in the order of NCHW or NHWC; for a plan, as the plan reads it.
    out: the array that each call writes, as `target` takes it; {name: array} for a plan of several outputs. Default: a
        new one, which is ``native(...).out``.

    ``run = native(...)`` has ``run.function`` and ``run.argument``, for C and cffi. ``run()`` works in Python, and in
    functions that Numba compiles. Functions that Numba keeps on disk take it as an argument. One thread at a time may
    use it: make one for each thread.

    Raises the errors of `target`, ArgumentError for arrays that would be copied, and UnsupportedError for a plan that
    Python takes part in.

    >>> import numpy as np, blockconv as bc
    >>> x = np.ones((1, 1, 3, 3), np.float32)
    >>> run = bc.native(bc.Conv2d(np.ones((1, 1, 3, 3), np.float32), padding=1), x)
    >>> x[0, 0, 1, 1] = 2
    >>> run()
    >>> run.out[0, 0]
    array([[5., 7., 5.],
           [7., 10., 7.],
           [5., 7., 5.]], dtype=float32)
    """
    held: Any = target
    if isinstance(target, Plan):
        written, launches, held = launches_of(target, inputs, out)
        made = standing(launches, held)
    elif isinstance(target, Conv2d):
        if len(inputs) != 1:
            raise ArgumentError("native", "inputs", len(inputs), "has to be the one array that a Conv2d reads")
        written = target(*inputs, out=out)
        made = of_computation(
            "native", FRAME.computation((*inputs, None), (), target, written, target.out_layout), ("input",)
        )
        made.place([*map(start_of, inputs), start_of(written)])
    else:
        rule = "has to be a Conv2d or a plan"
        raise ArgumentError("native", "target", type(target).__name__, rule, "give blockconv.Conv2d(weight, ...)")
    return Native.of(made, written, (*inputs, held))
