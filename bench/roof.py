"""The limits of the machine: multiply-adds from registers alone, and copies of memory.

Results are given as shares of these: measured here and now, by loops that do nothing else.
"""

from __future__ import annotations

import functools
import platform
from collections.abc import Callable
from typing import Any

import numpy as np

from blockconv.core.target import target_features

from .team import Team
from .timing import compare

__all__ = ["copy_bandwidth", "fp32_peak", "roof"]


@functools.cache
def fp32_peak(threads: int = 1) -> float:
    """Floating-point operations a second of fused multiply-adds that touch no memory."""
    loop, width, accumulators = _fma_loop()
    steps = 1_000_000
    seeds = np.linspace(0.1, 1.0, accumulators, dtype=np.float32)
    with Team(threads) as team:
        run = team.each(lambda _: loop(seeds.ctypes.data, steps))
        timing = compare({"peak": run}, rounds=15)["peak"]
    # The best sample: a peak is what the machine can do, not what its neighbours let it.
    return threads * 2.0 * width * accumulators * steps / (min(timing.samples) * 1e-9)


@functools.cache
def copy_bandwidth(nbytes: int, threads: int = 1) -> float:
    """Bytes read and written a second by copying `nbytes`, a share to each thread, again and again.

    With shares much under a megabyte, several threads wait for Python as much as for memory.
    """
    share = max(nbytes // threads, 1)
    pairs = [(np.ones(share, np.uint8), np.zeros(share, np.uint8)) for _ in range(threads)]
    repeats = max(1, (64 << 20) // nbytes)  # the team's start is then small beside its work

    def copy(worker: int) -> None:
        src, dst = pairs[worker]
        for _ in range(repeats):
            np.copyto(dst, src)

    with Team(threads) as team:
        timing = compare({"copy": team.each(copy)}, rounds=15)["copy"]
    return 2.0 * share * threads * repeats / (timing.median * 1e-9)


def roof(nbytes: int, threads: int, itemsize: int = 4) -> dict[str, float]:
    """The limits of work on so many bytes: "peak" in operations a second, "bandwidth" of a copy in bytes a second.

    A peak goes with the elements of a vector: float64 has half of float32's, int8 four times as much.
    """
    size = 1 << max(16, nbytes.bit_length())  # few sizes, each measured once
    return {"peak": fp32_peak(threads) * 4 / itemsize, "bandwidth": copy_bandwidth(min(size, 64 << 20), threads)}


@functools.cache
def _fma_loop() -> tuple[Callable[[int, int], float], int, int]:
    """(loop(address of starting values, steps), vector width, accumulators) for this processor.

    Enough independent accumulators to hide the latency of a fused multiply-add (4 cycles on two
    units, at least), few enough to stay in registers beside the two factors.
    """
    import numba

    features = target_features()
    wide = "avx512f" in features
    width = 16 if wide else 8 if "avx" in features else 4
    accumulators = 24 if wide or platform.machine() in ("arm64", "aarch64") else 12
    fused = platform.machine() not in ("x86_64", "AMD64") or "fma" in features
    step = _fma_intrinsic(width, accumulators, fused)

    @numba.njit("float32(int64, int64)", nogil=True)  # type: ignore[untyped-decorator]
    def loop(address: Any, steps: Any) -> Any:
        return step(address, steps)

    return loop, width, accumulators


def _fma_intrinsic(width: int, accumulators: int, fused: bool) -> Any:
    from llvmlite import ir
    from numba import types
    from numba.core import cgutils
    from numba.extending import intrinsic

    @intrinsic  # type: ignore[untyped-decorator]
    def fma_loop(typingctx: Any, address: Any, steps: Any) -> Any:
        return types.float32(types.int64, types.int64), _build

    def _build(context: Any, builder: Any, signature: Any, arguments: Any) -> Any:
        vector = ir.VectorType(ir.FloatType(), width)
        address, steps = arguments

        first_lane = ir.IntType(32)(0)

        def spread(value: Any) -> Any:
            lane = builder.insert_element(vector(ir.Undefined), value, first_lane)
            return builder.shuffle_vector(lane, lane, ir.VectorType(ir.IntType(32), width)([0] * width))

        def multiply_add(total: Any) -> Any:
            if not fused:
                return builder.fadd(builder.fmul(total, factor), addend)
            kind = ir.FunctionType(vector, [vector] * 3)
            function = cgutils.get_or_insert_function(builder.module, kind, f"llvm.fma.v{width}f32")
            return builder.call(function, [total, factor, addend])

        # Starting values come from memory: were they known or equal, LLVM would merge the chains.
        starts = builder.inttoptr(address, ir.FloatType().as_pointer())
        values = [builder.load(builder.gep(starts, [ir.IntType(64)(i)])) for i in range(accumulators)]
        factor, addend = spread(values[0]), spread(values[1])
        totals = [cgutils.alloca_once_value(builder, spread(value)) for value in values]
        with cgutils.for_range(builder, steps):
            for total in totals:
                builder.store(multiply_add(builder.load(total)), total)
        sums = [builder.load(total) for total in totals]
        total = functools.reduce(builder.fadd, sums)
        return builder.extract_element(total, first_lane)

    return fma_loop
