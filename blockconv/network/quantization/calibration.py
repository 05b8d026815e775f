"""The ranges of a network's values, measured on samples, and their files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.errors import ArgumentError
from blockconv.core.files import StrPath, as_path, reading, replacing
from blockconv.core.interop import as_numpy
from blockconv.core.record import frozen
from blockconv.core.types import Array
from blockconv.network.graph import Network
from blockconv.network.ops.rule import names_of
from blockconv.network.passes.fuse import fuse
from blockconv.network.plan import Plan, compile
from blockconv.network.quantization.rewriting import flows_in_order

METHODS = ("minmax", "percentile")
DROPPED = 16  # bits of a float32 that do not tell bins of a histogram apart
BINS = 1 << 32 - DROPPED
OP = "quantize"
Range = tuple[float, float]


@frozen
class Calibration:
    """The range of each value of a network, as measured by `quantize`.

    ranges: {value: (low, high)}, with the names after fusion.
    method: the method of `quantize` that found them.

    Raises ArgumentError for a range that is not finite or whose low end is above its high end.
    """

    ranges: Mapping[str, tuple[float, float]]
    method: str = "minmax"

    def __post_init__(self) -> None:
        try:  # Python's numbers, for JSON
            ranges = {name: (float(low), float(high)) for name, (low, high) in self.ranges.items()}
        except (TypeError, ValueError, OverflowError, AttributeError):
            raise ArgumentError("Calibration", "ranges", self.ranges, "has to be {value: (low, high)}") from None
        object.__setattr__(self, "ranges", ranges)
        for name, (low, high) in ranges.items():
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                rule = "has to be a pair of finite numbers, the smaller one first"
                raise ArgumentError("Calibration", f"ranges[{name!r}]", (low, high), rule, "give samples without NaNs")

    def save(self, path: StrPath) -> None:
        """Write it as JSON."""
        with replacing("Calibration.save", path) as file:
            file.write(json.dumps({"method": self.method, "ranges": dict(self.ranges)}, indent=1).encode())

    @classmethod
    def load(cls, path: StrPath) -> Calibration:
        """Read a file of `save`. Raises ArgumentError for any other file."""
        text = as_path("Calibration.load", path).read_bytes()
        with reading("Calibration.load", path):
            found = json.loads(text)
            return cls(found["ranges"], str(found["method"]))


def read_samples(network: Network, samples: Any) -> list[dict[str, Any]]:
    """The network's inputs by name, for each sample. Raises ArgumentError without a range."""
    names = names_of(network.inputs)
    if isinstance(samples, (str, bytes, Mapping)) or not isinstance(samples, Iterable):
        rule = "has to be a sequence of inputs of the network"
        raise ArgumentError(OP, "samples", samples, rule, "give a list of at least one sample")
    found = []
    for k, sample in enumerate(samples):
        if isinstance(sample, Mapping):
            given = dict(sample)
        else:
            several = sample if isinstance(sample, (tuple, list)) and len(names) > 1 else (sample,)
            given = dict(zip(names, several, strict=False))
        if set(given) != set(names):
            rule = f"has to be the inputs {', '.join(names)}: a dict by name, a tuple, or the array of the only input"
            raise ArgumentError(OP, f"samples[{k}]", sorted(map(str, given)), rule)
        for name in names:
            given[name] = array = as_numpy(given[name], OP, f"samples[{k}]")
            if array.dtype == np.float32:  # a call refuses others
                _extent(k, name, array)
        found.append(given)
    if not found:
        raise ArgumentError(OP, "samples", [], "has to hold at least one sample", "or give calibration=")
    return found


def flowing(network: Network) -> list[str]:
    """The values of float32 that flow at run time."""
    return [name for name in flows_in_order(network) if network.tensors[name].dtype == np.float32]


def with_outputs(network: Network, names: Iterable[str]) -> Plan:
    """A plan that gives these values of a network that is fused, beside its outputs."""
    outputs = dict.fromkeys((*network.outputs, *names))
    return compile(replace(network, outputs=tuple(outputs), remake=None, rest=None))


def measured(network: Network, samples: Sequence[Mapping[str, Any]], method: str, percentile: float) -> Calibration:
    """The ranges of a network's values over samples: all that occurs, or what leaves out the rarest on either side.

    Raises ArgumentError, with the sample and the value, where a value is empty or holds a NaN or an infinity.
    """
    fused = fuse(network)
    names = flowing(fused)
    plan = with_outputs(fused, names)
    ranges: dict[str, Range] = {}
    counts = {name: np.zeros(BINS, np.int64) for name in (names if method == "percentile" else ())}
    for k, sample in enumerate(samples):
        found = plan.by_name(**sample)
        for name in names:
            value = np.asarray(found[name] if name in found else sample[name])
            widen(ranges, name, _extent(k, name, value))
            if name in counts:
                counts[name] += np.bincount(_bins(value), minlength=BINS)
    for name, count in counts.items():  # all but the rarest numbers; `percentile` of all are at or below the end
        share = np.cumsum(count) / count.sum()
        first = int(np.searchsorted(share, 1 - percentile / 100, side="right"))
        last = int(np.searchsorted(share, percentile / 100))
        # A bin's outer edge is its neighbour's inner one.
        low, high = _edge(first - (first < BINS // 2)), _edge(last + (last >= BINS // 2))
        ranges[name] = max(ranges[name][0], low), min(ranges[name][1], high)
    return Calibration(ranges, method)


def widen(ranges: dict[str, Range], name: str, found: Range) -> None:
    """Let the range of this name hold what was found, too."""
    low, high = ranges.get(name, found)
    ranges[name] = min(low, found[0]), max(high, found[1])


def _extent(sample: int, name: str, value: Array) -> Range:
    """The least and the largest number of a value. Raises ArgumentError where it has no range."""
    low, high = (float(value.min()), float(value.max())) if value.size else (math.nan, math.nan)
    if math.isfinite(low) and math.isfinite(high):
        return low, high
    odd = value[~np.isfinite(value)]
    what = f"holds {odd.size} NaN or infinite numbers, such as {odd[0]}" if odd.size else "is empty"
    rule = f"gives value {name!r} no range: it {what}"
    raise ArgumentError(OP, f"samples[{sample}]", value, rule, "remove or repair this sample")


def _bins(value: Array) -> npt.NDArray[np.int64]:
    """The bin of each number, in the order of numbers.

    A bin holds the float32 numbers of one sign and exponent, with equal first 7 bits of the mantissa. Every bin is less
    than 1 % wide, so one outlier does not make the bins of the others coarse.
    """
    bits = np.ascontiguousarray(value, np.float32).reshape(-1).view(np.int32) >> DROPPED
    return np.where(bits < 0, -1 - (bits & (BINS // 2 - 1)), bits).astype(np.int64) + BINS // 2


def _edge(number: int) -> float:
    """The least magnitude in a bin."""
    at = number - BINS // 2
    magnitude = np.int32((at if at >= 0 else -1 - at) << DROPPED).view(np.float32)
    return float(magnitude if at >= 0 else -magnitude)
