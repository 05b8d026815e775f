"""Averages of integers from their definition, in plain NumPy; what windows cover and count is `pool_oracle`'s.

Nothing here knows of blockconv. The sum of x less its zero point over what a window covers of the image is exact; it is
divided, as float32, by the float32 nearest to the count times the ratio of the scales, and rounded to even.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pool_oracle
import quantized_oracle

Array = pool_oracle.Array


def average(x: Array, src: tuple[Any, ...], dst: tuple[Any, ...], kind: str, divisor: Any, *window: Any) -> Array:
    """src, dst: (scale, zero point), and of dst a dtype if it is none of NumPy's: int4 or uint4.

    window: as `pool_oracle.pool` has it, from `out` to `dilation`.
    """
    scales = [float(np.float32(scale)) for scale, *_ in (src, dst)]
    away = x.astype(np.int64) - src[1]
    total = pool_oracle.pool(away, "avg_exclude_padding", *window, 1)[0]
    if divisor is None:
        # Of ones the sum is how many the window covers, and the mean what part these are of those that count.
        ones = pool_oracle.pool(np.ones_like(away), "avg_exclude_padding", *window, 1)[0]
        mean = pool_oracle.pool(np.ones_like(away), kind, *window, None)[0]
        count = np.where(ones > 0, np.rint(ones / np.where(ones > 0, mean, 1)), 1)
    else:
        count = np.full(total.shape, divisor)
    assert np.abs(total).max(initial=0) < 2**31
    quotient = total.astype(np.float32) / (count * (scales[1] / scales[0])).astype(np.float32)
    limits = quantized_oracle.limits(dst[2] if len(dst) > 2 else x.dtype.name)
    whole = np.rint(quotient.astype(np.float64)) + dst[1]
    return np.clip(whole, *limits).astype(x.dtype)
