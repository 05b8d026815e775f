"""Packed weights, and those of a gradient, whose convolutions have some of the taps each, against the definition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dBackwardDataProblem, Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.dispatch.packing import pack_weights
from blockconv.kernels.table import ALIGNED, WeightForm

# Packed layouts over (G, O, I, H, W): with and without blocks, blocks of no power of two, and two that share a vector.
FORMS = (
    "aBcde32b", "aBCde16c32b", "aBcde14b", "abcde", "Abcde16a", "ABcde4a4b", "aBCde8c12b2c", "aBced8b", "abCde4c2c",
)  # fmt: skip
# (G, O/G, I/G, kernel, stride, padding, dilation): all taps are reached, or not.
WEIGHTS = (
    (1, 24, 40, (3, 3), (2, 2), (1, 1), (1, 1)),
    (1, 9, 33, (4, 4), (2, 2), (1, 1), (1, 1)),
    (8, 4, 4, (3, 2), (1, 2), (0, 1), (1, 1)),
    (21, 1, 1, (3, 3), (2, 2), (1, 1), (1, 1)),
    (2, 5, 6, (5, 3), (3, 2), (2, 1), (2, 1)),
    (3, 17, 16, (1, 1), (2, 1), (0, 0), (1, 1)),
)


def packed(values: np.ndarray, layout: Layout) -> np.ndarray:
    """An array in a layout, element by element, zeros in its padding."""
    found = np.zeros(layout.size(values.shape), values.dtype)
    for index in np.ndindex(values.shape):
        found[layout.offset(values.shape, index)] = values[index]
    return found


@pytest.mark.slow
@pytest.mark.parametrize("case", WEIGHTS, ids=str)
@pytest.mark.sampled(2)
def test_taps_are_packed_where_their_convolution_has_them(case: Any) -> None:
    g, oc, ic, (kh, kw), stride, padding, dilation = case
    p = Conv2dBackwardDataProblem(1, g * ic, 12, 13, g * oc, kh, kw, *stride, *padding, *padding, *dilation, g)
    row = selection.named("conv2d_backward_data", "conv_backward_data_reference")
    plain = row.prepare(p, Layout("NCHW"), Layout("NCHW"), Types.all("float32")).form
    for k, tag in enumerate(FORMS):
        form = plain._replace(
            pieces=tuple(of._replace(form=WeightForm(Layout(tag), of.form.bias)) for of in plain.pieces)
        )
        dtype = (np.int32, np.int64, np.int16)[k % 3]
        weight = np.arange(1, 1 + np.prod(p.wei_shape), dtype=dtype).reshape(p.wei_shape)
        last = np.ascontiguousarray(weight.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        for given in (weight, last):
            found, at = pack_weights(p, given, form).view(dtype), 0
            for of in form.pieces:
                if of.taps is None:
                    wanted = np.zeros(Layout(tag).size(of.problem.grouped_wei_shape), dtype)
                else:
                    rows, cols = (
                        [first + i * step for i in range(size)]
                        for (first, step), size in zip(of.taps, (of.problem.kh, of.problem.kw), strict=True)
                    )
                    chosen = weight.reshape(p.grouped_wei_shape)[..., rows, :][..., cols]
                    wanted = packed(chosen.swapaxes(1, 2), Layout(tag))
                np.testing.assert_array_equal(found[at : at + wanted.size], wanted, f"{tag} {of.taps}")
                at += -(-wanted.nbytes // ALIGNED) * ALIGNED // wanted.itemsize


@pytest.mark.parametrize("tag", FORMS)
def test_a_form_has_each_weight_in_its_place_and_zeros_in_its_padding(tag: str) -> None:
    for k, (g, oc, ic, (kh, kw), *_) in enumerate(WEIGHTS):
        p = Conv2dProblem(1, g * ic, 12, 13, g * oc, kh, kw, g=g)
        dtype = (np.int32, np.int64, np.int16, np.int8)[k % 4]
        weight = np.arange(1, 1 + np.prod(p.wei_shape)).astype(dtype).reshape(p.wei_shape)
        wanted = packed(weight.reshape(p.grouped_wei_shape), Layout(tag))
        every_second = np.repeat(weight, 2, axis=2)[:, :, ::2]
        last = np.ascontiguousarray(weight.transpose(0, 2, 3, 1)).transpose(0, 3, 1, 2)
        for given in (weight, last, every_second):
            np.testing.assert_array_equal(pack_weights(p, given, WeightForm(Layout(tag), 0)).view(dtype), wanted)
