"""Weights and bias in the form that a kernel asks for: a reorder, like any other."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.array import BlockedArray, to_layout
from blockconv.kernels import WeightForm
from blockconv.problem import Conv2dProblem

__all__ = ["pack_bias", "pack_weights"]


def pack_weights(problem: Conv2dProblem, weight: npt.NDArray[Any], form: WeightForm) -> BlockedArray:
    """`weight`, (O, I/G, KH, KW) of any strides, as a kernel reads it."""
    p = problem
    grouped = np.ascontiguousarray(weight).reshape(p.g, p.oc // p.g, p.ic // p.g, p.kh, p.kw)
    return to_layout(grouped, form.layout)


def pack_bias(problem: Conv2dProblem, bias: npt.NDArray[Any] | None, form: WeightForm, dtype: str) -> npt.NDArray[Any]:
    """[groups][bias elements], zero beyond a group's channels; zeros without a bias."""
    packed = np.zeros((problem.g, form.bias), dtype)
    if bias is not None:
        packed[:, : problem.oc // problem.g] = bias.reshape(problem.g, -1)
    return packed
