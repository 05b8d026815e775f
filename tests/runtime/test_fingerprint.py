"""Fingerprints of memory: every change of a byte in a line, of any size, at any address."""

from __future__ import annotations

import numpy as np
import pytest

from blockconv.runtime.fingerprint import EACH, LINE, MOST, Fingerprint

SIZES = [*range(1, 20), 63, 64, 65, 127, 128, 255, 256, 257, 1000, LINE * MOST, LINE * MOST + 5]


def of(array):
    return Fingerprint([(array.ctypes.data, array.nbytes)])


@pytest.mark.parametrize("size", SIZES)
def test_a_changed_byte_is_seen_in_time(size):
    draw = np.random.default_rng(size)
    array = draw.integers(0, 256, size + 3, np.uint8)[draw.integers(0, 3) :][:size]
    calls = -(-size // (LINE * EACH)) if size <= LINE * MOST else None
    for at in draw.integers(0, size, 20):
        known = of(array)
        assert not any(known.differs() for _ in range(3))
        array[at] ^= 1 << draw.integers(8)
        if calls:
            assert [known.differs() for _ in range(calls)][-1]
            assert known.differs(), "a change stays seen"


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16", "int8"])
@pytest.mark.parametrize("size", [5, 100, 100_000])
@pytest.mark.parametrize("change", [np.negative, lambda x: x[::-1], lambda x: x * 2, lambda x: x * 0], ids=range(4))
def test_a_change_of_the_whole_is_seen_at_once(size, dtype, change):
    draw = np.random.default_rng(size)
    for _ in range(10):
        array = draw.integers(1, 60, size).astype(dtype) * (draw.integers(0, 2, size) * 2 - 1).astype(dtype)
        known, new = of(array), change(array)
        if not np.array_equal(new, array):
            array[...] = new.copy()
            assert known.differs()


def test_spans_and_no_spans():
    arrays = [np.ones(k, np.float32) for k in (7, 0, 300, 5000)]
    for changed in (0, 2, 3):
        known = Fingerprint([(x.ctypes.data, x.nbytes) for x in arrays])
        assert not known.differs()
        arrays[changed] *= 2
        assert known.differs()
    assert not Fingerprint([]).differs()
    assert not Fingerprint([(0, 0)]).differs()
