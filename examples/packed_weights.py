"""In a loop, pack weights once and write into memory that you keep.

bc.conv2d packs its weights at every call. bc.Conv2d packs them once for each source layout, and out=
saves the allocation. For small images with many channels, packing takes longer than the convolution.
"""

import time
from collections.abc import Callable

import numpy as np

import blockconv as bc


def microseconds(function: Callable[[], object]) -> float:
    """The median of some calls, after one that compiles kernels and packs weights."""
    function()
    times = []
    for _ in range(50):
        start = time.perf_counter()
        function()
        times.append(time.perf_counter() - start)
    return sorted(times)[len(times) // 2] * 1e6


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    x = rng.standard_normal((1, 512, 7, 7)).astype(np.float32)
    weight = rng.standard_normal((512, 512, 3, 3)).astype(np.float32)

    conv = bc.Conv2d(weight, padding=1, activation="relu")
    blocked = bc.to_layout(x, "NCHW16")
    out = bc.empty((1, 512, 7, 7), "NCHW16")
    print(conv)

    times = {
        "bc.conv2d, which packs": microseconds(lambda: bc.conv2d(blocked, weight, padding=1, activation="relu")),
        "Conv2d": microseconds(lambda: conv(blocked)),
        "Conv2d with out=": microseconds(lambda: conv(blocked, out=out)),
    }
    for name, time_taken in times.items():
        print(f"{name:<24} {time_taken:8.0f} µs")
    print(f"on {bc.get_num_threads()} threads, medians of 50 calls")

    wanted = bc.conv2d(x, weight, padding=1, activation="relu")
    assert np.abs(out.numpy() - wanted).max() <= 1e-4 * np.abs(wanted).max()
