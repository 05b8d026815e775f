"""Floats of 16 bits widened and rounded: every one of them, and float32 at and beside each boundary."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from blockconv import jit
from blockconv.core import target
from blockconv.core.types import ElementType, element
from blockconv.jit.ir import emitted
from blockconv.jit.values import build
from blockconv.kernels.common import halves
from blockconv.kernels.common.vectors import Vectors
from blockconv.runtime import address_of

LANES = target.isa().vector_bytes // 4
pytestmark = pytest.mark.isa


@jit.kernel
def convert_halves(code, lanes, to_half, in_integers, flushes):
    half = ElementType.of(code)

    @emitted
    def emit(dst, src):
        v, stored = Vectors(element("float32"), lanes), Vectors(half, lanes)
        if in_integers and to_half:
            bits = halves._rounded_in_integers(v, Vectors(element("int32"), lanes).load(src))
            stored.store(build.trunc(bits, stored.kind), dst)
        elif in_integers:
            wide = Vectors(element("int32"), lanes)
            v.store(halves._widened_in_integers(v, build.zext(stored.load(src), wide.kind)), dst)
        elif to_half:
            stored.store(halves.rounded(v, half, v.load(src), flushes=bool(flushes)), dst)
        else:
            v.store(halves.widened(v, half, stored.load(src)), dst)

    itemsizes = (4, 2) if to_half else (2, 4)

    def kernel(dst, src, count, unused_scratch):
        for k in range(0, count, lanes):
            emit(dst + k * itemsizes[1], src + k * itemsizes[0])

    return kernel


def convert(name, array, to, in_integers, flushes=0):
    kernel = convert_halves(element(name).code, LANES, int(to == name), in_integers, flushes)
    out = np.empty(array.shape, element(to).dtype)
    function = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernel.address)
    assert array.size % LANES == 0
    function(address_of(out), address_of(array), array.size, 0)
    return out


# float16 also as targets without instructions for it have it.
WAYS = (("bfloat16", 0), ("float16", 0), ("float16", 1))


def every(name):
    return np.arange(1 << 16, dtype=np.uint16).view(element(name).dtype)


@pytest.mark.parametrize(("name", "in_integers"), WAYS)
def test_every_one_is_widened_exactly_and_comes_back(name, in_integers):
    bits = every(name)
    wide = convert(name, bits, "float32", in_integers)
    wanted = bits.astype(np.float32)
    numbers = ~np.isnan(wanted)
    assert (wide.view(np.uint32) == wanted.view(np.uint32))[numbers].all()
    assert np.isnan(wide[~numbers]).all()
    back = convert(name, wide, name, in_integers)
    assert (back.view(np.uint16) == bits.view(np.uint16))[numbers].all()
    assert np.isnan(back[~numbers].astype(np.float32)).all()


@pytest.mark.parametrize(("name", "in_integers"), WAYS)
def test_rounding_is_to_the_nearest_half_to_even(name, in_integers):
    """Between each two neighbours: the tie, what is just below it and just above it; whatever float32 there is."""
    bits = every(name).astype(np.float32)
    finite = np.unique(bits[np.isfinite(bits)])
    below, above = finite[:-1].astype(np.float64), finite[1:].astype(np.float64)
    ties = ((below + above) / 2).astype(np.float32)
    assert (ties.astype(np.float64) == (below + above) / 2).mean() > 0.99, "all but a few of bfloat16's least ones"
    some = np.random.default_rng(0).integers(0, 1 << 32, 1 << 18, np.uint32).view(np.float32)
    ends = np.array([65504, 65519.996, 65520, 1e5, np.inf, 3.4e38, 1e-45, 2.0**-25, 2.0**-24, np.nan], np.float32)
    x = np.concatenate([ties, np.nextafter(ties, -np.inf), np.nextafter(ties, np.inf), some, ends, -ends])
    x = np.resize(x, -(-x.size // LANES) * LANES).astype(np.float32)
    with np.errstate(over="ignore", invalid="ignore"):
        wanted = x.astype(element(name).dtype)
    found = convert(name, x, name, in_integers)
    numbers = ~np.isnan(x)
    wrong = (found.view(np.uint16) != wanted.view(np.uint16)) & numbers
    assert not wrong.any(), (x[wrong][:5], found[wrong][:5], wanted[wrong][:5])
    assert np.isnan(found[~numbers].astype(np.float32)).all()
    found = convert(name, x, name, in_integers, flushes=1)
    normal = numbers & (np.abs(x) >= 2.0**-126)
    assert (found.view(np.uint16) == wanted.view(np.uint16))[normal].all(), "by the target's instruction too"
    assert np.isnan(found[~numbers].astype(np.float32)).all()
