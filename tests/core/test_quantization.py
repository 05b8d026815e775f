"""Quantization: what it keeps, and what it refuses."""

from __future__ import annotations

import pickle

import numpy as np
import pytest

from blockconv.core.errors import ArgumentError
from blockconv.core.quantization import Quantization


def test_what_it_keeps():
    one, many = Quantization(0.1, 3), Quantization([0.5, 0.25])
    assert one.scale == np.float32(0.1)
    assert one.scale.dtype == many.scale.dtype == np.float32
    assert (one.zero_point, many.zero_point, many.scale.shape) == (3, 0, (2,))
    assert repr(many) == "Quantization(scale=<2 scales>, zero_point=0)"
    assert one == Quantization(np.float32(0.1), np.int64(3))
    assert one != Quantization(0.1, 4)
    assert many != Quantization([0.5, 0.5])
    assert len({one, Quantization(0.1, 3), many}) == 2
    assert pickle.loads(pickle.dumps(many)) == many


def test_it_is_not_changed():
    given = np.array([0.5, 0.25])
    made = Quantization(given)
    given[0] = 7
    assert made.scale[0] == 0.5
    with pytest.raises(ValueError, match="read-only"):
        made.scale[0] = 1
    with pytest.raises(AttributeError, match="read-only; make a new"):
        made.zero_point = 1


@pytest.mark.parametrize(
    "scale",
    [
        0,
        -1.0,
        np.nan,
        np.inf,
        [0.5, 0.0],
        [0.5, -np.inf],
        1e-50,
        1e300,
        1e-45,
        "0.5",
        None,
        True,
        [],
        [[1.0]],
        1j,
        [[1], 2],
    ],
)
def test_scales_that_are_refused(scale):
    with pytest.raises(ArgumentError, match="Quantization: scale=") as caught:
        Quantization(scale)
    assert caught.value.argument == "scale"


@pytest.mark.parametrize("zero_point", [-129, 256, 1.0, "1", None, True, [1]])
def test_zero_points_that_are_refused(zero_point):
    with pytest.raises(ArgumentError, match="Quantization: zero_point="):
        Quantization(1.0, zero_point)


def test_what_an_array_asks_of_it():
    u8, s8 = np.dtype("uint8"), np.dtype("int8")
    for made, dtype, channels in (
        (Quantization(1.0, 255), u8, None),
        (Quantization(1.0, -128), s8, None),
        (Quantization([1.0, 2.0]), s8, 2),
        (Quantization(1.0), s8, 2),
    ):
        made.check("op", "q", dtype, channels)
    for made, dtype, channels, said in (
        (Quantization(1.0, -1), u8, None, "from 0 to 255"),
        (Quantization(1.0, 128), s8, None, "from -128 to 127"),
        (Quantization([1.0, 2.0]), u8, None, "one scale"),
        (Quantization([1.0, 2.0]), s8, 3, "or 3"),
    ):
        with pytest.raises(ArgumentError, match=said):
            made.check("op", "q", dtype, channels)
