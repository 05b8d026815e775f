"""Where a tile's masked stores are: never behind the array, where a page may be missing that is not even written."""

from __future__ import annotations

import ctypes

import numpy as np
import pytest

from blockconv import jit
from blockconv.core import target
from blockconv.core.activation import ActivationKind
from blockconv.core.types import element
from blockconv.jit.ir import const, emitted
from blockconv.jit.values import build
from blockconv.kernels.common.epilogue import TileEpilogue
from blockconv.kernels.common.tile import Output, Tile
from blockconv.kernels.common.vectors import Vectors
from blockconv.runtime import address_of

pytestmark = pytest.mark.isa
LANES, BLOCK, PIXEL = target.isa().vector_bytes // 4, 1 << 20, 64


@jit.kernel
def store_addresses(lanes, store_width):
    """Write the address of each store of a tile of one pixel and two vectors."""
    tile = Tile(element("float32").code, 0, 1, 1, 2, lanes, store_width=store_width, act=ActivationKind.NONE)

    @emitted
    def emit(dst, found, written):
        zero = const(0)
        out = Output(dst, zero, const(PIXEL), const(BLOCK), zero, written, written, zero, zero)
        epilogue = TileEpilogue(tile, out, masked=True)
        if store_width == 1:
            at = []

            def each(pixels, base, limit):
                at.extend(address for address, _ in epilogue.planes(base, limit))
                return pixels

            epilogue.each_plane([zero, zero], dst, each)
        else:
            at = [locate()[0] for vector in range(2) for _, locate in epilogue.stores(vector, dst)]
        words = Vectors(element("int64"), 1)
        for k, address in enumerate(at):
            words.store(words.splat(address), build.add(found, const(8 * k)))

    def kernel(dst, found, written, unused_scratch):
        emit(dst, found, written)

    return kernel


@pytest.mark.parametrize("store_width", [1, 2, 4, LANES])
def test_stores_of_nothing_have_an_address_that_exists(store_width):
    kernel = store_addresses(LANES, store_width)
    function, dst = ctypes.CFUNCTYPE(None, *[ctypes.c_int64] * 4)(kernel.address), 1 << 40
    for written in range(1, 2 * LANES + 1):
        found = np.zeros(2 * LANES // store_width, np.int64)
        function(dst, address_of(found), written, 0)
        wanted = dst + BLOCK * np.arange(found.size)
        exist = store_width * np.arange(found.size) < written
        assert np.array_equal(found[exist], wanted[exist])
        assert set(found[~exist]) <= set(found[exist])
