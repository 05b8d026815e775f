"""Call one plan and one Conv2d from many Python threads at once.

Calls release the GIL and need no locks. The bits of a result do not depend on the number of threads.
If many callers work at once, use one thread per call: the plan here is compiled for one, and Conv2d
takes bc.get_num_threads().
"""

import os
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

import blockconv as bc

CALLERS = min(4, os.cpu_count() or 1)
IMAGES = 64


def network() -> bc.Network:
    rng = np.random.default_rng(0)
    b = bc.NetworkBuilder("three layers")
    x = b.input("x", (1, 32, 56, 56))
    for _ in range(3):
        x = b.conv2d(x, (rng.standard_normal((32, 32, 3, 3)) / 17).astype(np.float32), padding=1, activation="relu")
    b.output(x)
    return b.build()


if __name__ == "__main__":
    rng = np.random.default_rng(1)
    images = [rng.standard_normal((1, 32, 56, 56)).astype(np.float32) for _ in range(IMAGES)]
    conv = bc.Conv2d((rng.standard_normal((64, 32, 3, 3)) / 17).astype(np.float32), padding=1)
    plan = bc.compile(network(), threads=1)
    conv(images[0])  # compiles kernels and packs weights, which other threads would wait for

    for name, function in (("plan", plan), ("Conv2d", conv)):
        start = time.perf_counter()
        alone = [function(image) for image in images]
        one = time.perf_counter() - start
        with ThreadPoolExecutor(CALLERS) as pool:
            start = time.perf_counter()
            together = list(pool.map(function, images))
            many = time.perf_counter() - start
        same = all(np.array_equal(a, b) for a, b in zip(alone, together, strict=True))
        print(
            f"{name:<7} {IMAGES} images from one caller {one * 1e3:6.1f} ms, from {CALLERS} {many * 1e3:6.1f} ms; ",
            end="",
        )
        print(f"the same bits: {same}")
        assert same
