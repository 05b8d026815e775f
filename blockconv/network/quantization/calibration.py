"""The ranges that a network's values have, as samples show them; kept in files."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from blockconv.core.errors import ArgumentError
from blockconv.network.graph import Network
from blockconv.network.passes.fuse import fuse
from blockconv.network.plan import Plan, compile

__all__ = ["METHODS", "Calibration", "flowing", "measured", "read_samples", "with_outputs"]

Array = npt.NDArray[Any]
METHODS = ("minmax", "percentile")
BINS = 2048  # of a histogram over the whole range of a value
OP = "quantize"


@dataclass(frozen=True)
class Calibration:
    """The least and the largest number of each value of a network, as `quantize` measured them.

    ranges: (low, high) by the value's name, after fusion.
    method: how they were found.

    Raises ArgumentError for a range that is none.
    """

    ranges: Mapping[str, tuple[float, float]]
    method: str = "minmax"

    def __post_init__(self) -> None:
        for name, (low, high) in self.ranges.items():
            if not (math.isfinite(low) and math.isfinite(high) and low <= high):
                rule = "has to be a pair of finite numbers, the least first"
                raise ArgumentError("Calibration", f"ranges[{name!r}]", (low, high), rule, "leave NaNs out of samples")

    def save(self, path: str | PathLike[str]) -> None:
        """Write it, as JSON."""
        Path(path).write_text(json.dumps({"method": self.method, "ranges": dict(self.ranges)}, indent=1), "utf-8")

    @classmethod
    def load(cls, path: str | PathLike[str]) -> Calibration:
        """Read what `save` wrote. Raises ArgumentError for any other file."""
        try:
            found = json.loads(Path(path).read_text("utf-8"))
            ranges = {str(name): (float(low), float(high)) for name, (low, high) in found["ranges"].items()}
            return cls(ranges, str(found["method"]))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            rule = f"is no file of Calibration.save ({error})"
            raise ArgumentError("Calibration.load", "path", str(path), rule) from error


def read_samples(network: Network, samples: Any) -> list[dict[str, Any]]:
    """What the network is fed, by the names of its inputs, for each sample."""
    names = [tensor.name for tensor in network.inputs]
    if isinstance(samples, (str, bytes, Mapping)) or not isinstance(samples, Iterable):
        rule = "has to be a sequence of what the network is called with"
        raise ArgumentError(OP, "samples", samples, rule, "give a list, of one sample at least")
    found = []
    for k, sample in enumerate(samples):
        if isinstance(sample, Mapping):
            given = dict(sample)
        else:
            several = sample if isinstance(sample, (tuple, list)) and len(names) > 1 else (sample,)
            given = dict(zip(names, several, strict=False))
        if set(given) != set(names):
            rule = f"has to be the inputs {', '.join(names)}: a dict by name, a tuple, or the array of the only one"
            raise ArgumentError(OP, f"samples[{k}]", sorted(map(str, given)), rule)
        found.append(given)
    if not found:
        raise ArgumentError(OP, "samples", [], "has to hold a sample at least", "or give calibration=")
    return found


def flowing(network: Network) -> list[str]:
    """The values of float32 that flow at run time."""
    made = [*(tensor.name for tensor in network.inputs), *(node.output for node in network.nodes)]
    return [name for name in made if network.tensors[name].dtype == np.float32]


def with_outputs(network: Network, names: Iterable[str], threads: int | None) -> Plan:
    """A plan that gives these values of a network that is fused, beside its outputs."""
    outputs = dict.fromkeys((*network.outputs, *names))
    return compile(network.changed(outputs=outputs), threads=threads)


def values_of(plan: Plan, sample: Mapping[str, Any]) -> dict[str, Array]:
    """What a plan gives, by name."""
    found = plan(**sample) if all(name.isidentifier() for name in sample) else plan(*_ordered(plan, sample))
    return found if isinstance(found, dict) else {plan.network.outputs[0]: found}


def _ordered(plan: Plan, sample: Mapping[str, Any]) -> list[Any]:
    return [sample[tensor.name] for tensor in plan.network.inputs]


def measured(
    network: Network, samples: Sequence[Mapping[str, Any]], method: str, percentile: float, threads: int | None
) -> Calibration:
    """The ranges of a network's values over samples: all that occurs, or what leaves out the rarest on either side."""
    fused = fuse(network)
    names = flowing(fused)
    plan = with_outputs(fused, names, threads)
    lows, highs = dict.fromkeys(names, math.inf), dict.fromkeys(names, -math.inf)
    for sample in samples:
        for name, value in _found(plan, names, sample):
            lows[name], highs[name] = min(lows[name], float(value.min())), max(highs[name], float(value.max()))
    ranges = {name: (lows[name], highs[name]) for name in names}
    whole = Calibration(ranges)  # checks that they are finite
    if method == "minmax":
        return whole
    counts = {name: np.zeros(BINS, np.int64) for name in names}
    for sample in samples:
        for name, value in _found(plan, names, sample):
            low, high = _around(*ranges[name])
            counts[name] += np.histogram(value, BINS, (low, high))[0]
    return Calibration({name: _inner(counts[name], ranges[name], percentile) for name in names}, method)


def _found(plan: Plan, names: Iterable[str], sample: Mapping[str, Any]) -> Iterable[tuple[str, Array]]:
    values = values_of(plan, sample)
    for name in names:
        yield name, np.asarray(values[name] if name in values else sample[name])


def _around(low: float, high: float) -> tuple[float, float]:
    """A range that is not empty."""
    return (low, high) if low < high else (low - 0.5, high + 0.5)


def _inner(counts: Array, given: tuple[float, float], percentile: float) -> tuple[float, float]:
    """The part of a range that all but the rarest numbers are in; `percentile` of all is at or below its end."""
    low, high = _around(*given)
    share, width = np.cumsum(counts) / counts.sum(), (high - low) / BINS
    first = int(np.searchsorted(share, 1 - percentile / 100, side="right"))
    last = int(np.searchsorted(share, percentile / 100))
    return max(given[0], low + first * width), min(given[1], low + (last + 1) * width)
