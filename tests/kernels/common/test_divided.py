"""Quantization divides by its scale without a division: the quotient is that of a division, bit for bit."""

from __future__ import annotations

import numpy as np
import pytest

import blockconv as bc

# Powers of two between which scales lie: those of networks, and the ends of float32, whose inverses are no use.
RANGES = ((-30, 30), (-100, 100), (-126, -100), (96, 127))


@pytest.mark.isa
@pytest.mark.parametrize("ends", RANGES)
def test_every_quotient_is_rounded_once(ends):
    """Halves of the scale, and the floats beside them, which a quotient that is off by one bit rounds elsewhere."""
    rng = np.random.default_rng(ends[1] - ends[0])
    for _ in range(60):
        scale = np.float32(rng.uniform(1, 2) * 2.0 ** rng.uniform(*ends))
        if not 0 < scale < np.inf:
            continue
        with np.errstate(over="ignore"):
            ties = (rng.integers(-300, 300, 2000) + rng.choice([0, 0.5], 2000)).astype(np.float32) * scale
        some = np.array([0.0, -0.0, 3e38, -3e38, 1e-45, np.inf, -np.inf, 1.0], np.float32)
        x = np.concatenate([ties, np.nextafter(ties, np.inf), np.nextafter(ties, -np.inf), some], dtype=np.float32)
        zero_point = int(rng.integers(0, 256))
        with np.errstate(over="ignore", under="ignore"):
            wanted = np.clip(np.rint(x / scale) + zero_point, 0, 255)
        found = bc.quantize_linear(x.reshape(1, 8, 1, -1), bc.Quantization(float(scale), zero_point))
        assert np.array_equal(np.asarray(found).reshape(-1), wanted.astype(np.uint8))


@pytest.mark.isa
def test_no_number_is_the_least():
    x = np.full((1, 8, 1, 40), np.nan, np.float32)
    x[0, 3] = 1.0
    found = np.asarray(bc.quantize_linear(x, bc.Quantization(0.5, 3)))
    assert (found[0, 3] == 5).all()
    assert not found[0, [0, 1, 2, 4, 5, 6, 7]].any()
