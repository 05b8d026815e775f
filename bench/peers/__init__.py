"""The peers: other libraries doing the same work, each with its best honest setting.

One module a peer, named `<name>_peer`. It imports its library, which may be missing, and has

    version() -> str
    conv2d(problem, src, wei, bias, threads) -> list[Variant]
    pool2d(problem, src, threads) -> list[Variant]                   where it has pools
    reorder(problem, src, threads) -> list[Variant]                  where it has reorders

Arrays are NumPy's, NCHW and OIHW (a reorder's source is the storage of its layout). What can be
prepared is prepared before it returns: weights packed, models compiled, outputs allocated.
A list may be empty, where the library cannot express the problem.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import ModuleType
from typing import Any, Literal

import numpy as np

from blockconv.problem import Conv2dProblem, Pool2dProblem

__all__ = ["NAMES", "Peer", "Variant", "end_padding", "is_symmetric", "load"]

NAMES = ("torch", "onnxruntime", "openvino", "ncnn")


@dataclass(frozen=True)
class Variant:
    """One way to do the work.

    `function()` runs it; that is what is timed. `fetch()` runs it once more, into an output that was
    spoilt before where it writes into one of its own, and returns the result in logical order.
    A `roof` is no contender: it shows what the machine allows.
    """

    name: str
    function: Callable[[], object]
    fetch: Callable[[], np.ndarray]
    role: Literal["ours", "peer", "roof"] = "peer"
    version: str = ""
    note: str = ""


@dataclass(frozen=True)
class Peer:
    """A library that could be imported."""

    name: str
    version: str
    module: ModuleType

    def variants(self, op: str, *arguments: Any) -> list[Variant]:
        """What the peer has for an operation: nothing, if it does not have it."""
        make = getattr(self.module, op, None)
        return [replace(variant, version=self.version) for variant in make(*arguments)] if make else []


def load(names: Sequence[str] = NAMES) -> tuple[list[Peer], dict[str, str]]:
    """The peers of these names, and for each that could not be imported the reason."""
    found, missing = [], {}
    for name in names:
        if name not in NAMES:
            raise ValueError(f"no peer is called {name!r}: there are {', '.join(NAMES)}")
        try:
            module = importlib.import_module(f"{__name__}.{name}_peer")
        except ImportError as error:
            missing[name] = str(error)
        else:
            found.append(Peer(name, module.version(), module))
    return found, missing


def is_symmetric(problem: Conv2dProblem | Pool2dProblem) -> bool:
    """Whether the begin padding on both sides gives the same output, as an API with one number needs."""
    return all(
        (size + 2 * begin - (kernel - 1) * dilation - 1) // stride + 1 == out
        for size, begin, kernel, dilation, stride, out in _axes(problem)
    )


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


def _axes(problem: Conv2dProblem | Pool2dProblem) -> list[tuple[int, ...]]:
    return [tuple(getattr(problem, letter + x) for letter in "ipkdso") for x in "hw"]
