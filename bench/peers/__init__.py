"""The libraries that are compared: ours and its peers, each with its best honest setting.

One module a library, named `<name>_peer`. It imports its library, which may be missing, and has

    version() -> str
    conv2d(problem, src, wei, bias, threads) -> Iterable[Variant]
    quantized_conv2d(problem, layer, threads) -> Iterable[Variant]   where it has convolutions of integers
    conv2d_backward_data(problem, wei, grad, threads), conv2d_backward_weights(problem, src, grad, threads),
    conv_transpose2d(problem, wei, src, threads) -> Iterable[Variant]   where it has gradients; src as grad
    pool2d(problem, src, threads) -> Iterable[Variant]               where it has pools
    pool2d_backward(problem, src, grad, threads) -> Iterable[Variant]   where it has their gradients
    reorder(problem, src, threads) -> Iterable[Variant]              where it has reorders
    plain_copy(src, threads) -> Iterable[Variant]                    where its copies are a roof
    network(path, x, threads) -> Iterable[Variant]                   where it reads ONNX
    halves_network(path, x, dtype, threads) -> Iterable[Variant]     where it stores one of float32 in 16 bits

and DTYPES, the types that it has for an operation, where float32 is not the only one.

Arrays are NumPy's, NCHW and OIHW (a reorder's source is the storage of its layout). All preparation
comes before a variant is yielded: weights packed, models compiled, outputs allocated.
There may be none, where the library cannot express the problem. Biases of bfloat16 layers are float32.
Our own module takes the layouts (of a network: the choices) to do it in before `threads`, and of a convolution the
algorithm.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import numpy as np

from blockconv.core.problem import Conv2dProblem, Pool2dProblem

from .. import machine

__all__ = [
    "NAMES",
    "NUMBERS",
    "OURS",
    "ZERO",
    "Peer",
    "QuantizedLayer",
    "Variant",
    "end_padding",
    "is_symmetric",
    "load",
    "output_padding",
    "pool_padding",
    "spoil",
]

OURS = "blockconv"
NUMBERS = ("float32", "float64", "int8", "uint8")  # what pools and reorders are measured in
NAMES = ("torch", "onnxruntime", "openvino", "ncnn", "litert", "numpy")


ZERO = 128  # the zero point of sources and destinations: less it, they are the int8 of zero point 0 that some want


@dataclass(frozen=True)
class QuantizedLayer:
    """A convolution of 8-bit integers. The destination is uint8 of zero point ZERO and of dst_scale.

    src: uint8 of zero point ZERO. wei: int8 with a scale for each output channel. bias: int32 of `bias_scale`.
    """

    src: np.ndarray
    wei: np.ndarray
    bias: np.ndarray
    src_scale: float
    wei_scale: np.ndarray
    dst_scale: float

    @property
    def bias_scale(self) -> np.ndarray:
        """The scale of the bias in each output channel, float32."""
        scale: np.ndarray = np.float32(self.src_scale) * self.wei_scale
        return scale

    @property
    def real_bias(self) -> np.ndarray:
        """The bias as float32."""
        real: np.ndarray = self.bias.astype(np.float32) * self.bias_scale
        return real


@dataclass(frozen=True)
class Variant:
    """One way to do the work.

    `function()` runs it; that is what is timed. `fetch()` runs it once more, into an output that was
    spoilt before where it writes into one of its own, and returns the result in logical order.
    `reorder_in` and `reorder_out` are what a caller with plain NCHW arrays pays besides, where the
    variant works in another layout. A `roof` is no contender: it shows what the machine allows.
    """

    name: str
    function: Callable[[], object]
    fetch: Callable[[], np.ndarray]
    role: Literal["ours", "peer", "roof"] = "peer"
    version: str = ""
    note: str = ""
    reorder_in: Callable[[], object] | None = None
    reorder_out: Callable[[], object] | None = None
    about: Callable[[], dict[str, Any]] | None = None  # what else is to be known, as JSON: asked for after the timing
    prepare: float = 0.0  # nanoseconds that it took to prepare; for networks with the first call
    memory: int | None = None  # bytes that this took at its peak, of networks


@dataclass(frozen=True)
class Peer:
    """A library that could be imported."""

    name: str
    version: str
    module: ModuleType

    def variants(self, op: str, *arguments: Any) -> list[Variant]:
        """The peer's variants of an operation: none if it lacks the operation, or the arrays' type."""
        make = getattr(self.module, op, None)
        dtypes = getattr(self.module, "DTYPES", {}).get(op, ("float32",))
        found: list[Variant] = []
        if make is None or any(a.dtype.name not in dtypes for a in arguments if isinstance(a, np.ndarray)):
            return found
        each = iter(make(*arguments))
        while True:
            told: dict[str, Any] = {}
            # A layer's is hidden in what the allocator keeps, and reading it takes longer than to prepare the layer.
            is_network = op.endswith("network")
            with machine.memory_added(told, "memory") if is_network else contextlib.nullcontext():
                started = time.perf_counter_ns()
                variant = next(each, None)
                if variant is not None and is_network:  # some engines allocate in the first call
                    with contextlib.suppress(Exception):  # `measure` calls it again, and reports the error
                        variant.function()
                told["prepare"] = float(time.perf_counter_ns() - started)
            if variant is None:
                return found
            found.append(replace(variant, version=self.version, **told))


def load(names: Sequence[str] = NAMES) -> tuple[list[Peer], dict[str, str]]:
    """The peers of these names, and for each that could not be imported the reason."""
    found, missing = [], {}
    for name in names:
        if name not in (OURS, *NAMES):
            raise ValueError(f"no peer is called {name!r}: there are {', '.join(NAMES)}")
        try:
            module = importlib.import_module(f"{__name__}.{name}_peer")
        except ImportError as error:
            missing[name] = str(error)
        else:
            found.append(Peer(name, module.version(), module))
    return found, missing


def spoil(array: np.ndarray) -> None:
    """Overwrite an output, so that what a call leaves out is seen: with NaN, or the least of an integer type."""
    array.fill(np.iinfo(array.dtype).min if array.dtype.kind in "iu" else math.nan)


def is_symmetric(problem: Conv2dProblem | Pool2dProblem) -> bool:
    """Whether the begin padding on both sides gives the same output, as an API with one number needs."""
    return all(
        (size + 2 * begin - (kernel - 1) * dilation - 1) // stride + 1 == out
        for size, begin, kernel, dilation, stride, out in _axes(problem)
    )


def output_padding(problem: Conv2dProblem) -> tuple[int, int]:
    """Rows and columns of the source that a transposed convolution by this problem's windows would leave out."""
    window = (problem.kh - 1) * problem.dh + 1, (problem.kw - 1) * problem.dw + 1
    bottom, right = (
        size + begin + max(end, 0) - (out - 1) * stride - taps
        for size, begin, end, out, stride, taps in (
            (problem.ih, problem.ph, problem.ph_r, problem.oh, problem.sh, window[0]),
            (problem.iw, problem.pw, problem.pw_r, problem.ow, problem.sw, window[1]),
        )
    )
    return bottom, right


def end_padding(problem: Conv2dProblem | Pool2dProblem) -> tuple[int, int] | None:
    """Bottom and right padding that are not negative; None where the problem crops its input instead."""
    ends = []
    for size, begin, kernel, dilation, stride, out in _axes(problem):
        window = (kernel - 1) * dilation + 1
        end = max(0, (out - 1) * stride + window - size - begin)
        if (size + begin + end - window) // stride + 1 != out:
            return None
        ends.append(end)
    return ends[0], ends[1]


def pool_padding(problem: Pool2dProblem) -> tuple[int, int] | None:
    """`end_padding`, or None too where an average would count other elements than the problem says."""
    ends = end_padding(problem)
    padded = ends is not None and any((problem.ph, problem.pw, *ends))
    if padded and problem.ceil_mode and problem.kind == "avg_include_padding":
        return None
    return ends


def _axes(problem: Conv2dProblem | Pool2dProblem) -> list[tuple[int, ...]]:
    return [tuple(getattr(problem, letter + x) for letter in "ipkdso") for x in "hw"]
