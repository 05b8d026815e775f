"""Element types: their names, codes and NumPy's dtypes, of which bfloat16 is another package's."""

from __future__ import annotations

import ml_dtypes
import numpy as np
import pytest

from blockconv.core.types import HALVES, INT8, ElementType, Types, element

NAMES = ("float16", "bfloat16", "float32", "float64", *(f"{u}int{bits}" for u in ("", "u") for bits in (8, 16, 32, 64)))


@pytest.mark.parametrize("name", NAMES)
def test_codes_lead_back_to_types(name):
    found = element(name)
    assert ElementType.of(found.code) == found
    assert element(found.dtype) == found
    assert found.dtype.name == name


def test_no_two_types_share_a_code():
    assert len({element(name).code for name in NAMES}) == len(NAMES)


def test_bfloat16_is_a_float():
    brain = element(ml_dtypes.bfloat16)
    assert brain == element(np.dtype(ml_dtypes.bfloat16)) == element("bfloat16")
    assert brain.is_float
    assert brain.is_half
    assert brain != element("float16")
    assert brain.bits(1.0) == 0x3F80
    assert element("float16").bits(1.0) == 0x3C00


def test_types_of_convolutions_have_names_of_their_own():
    every = [*HALVES, *INT8, Types.all("float32"), Types.all("bfloat16"), Types.all("float16")]
    assert len({str(types) for types in every}) == len(every)
    assert str(Types.converted("bfloat16", "float32")) == "bfloat16/bfloat16/float32/float32"
