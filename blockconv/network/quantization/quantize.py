"""`quantize`: an integer network from a float network and samples."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from blockconv.core.checks import Names, check_flag, checked_word
from blockconv.core.errors import ArgumentError, NetworkError
from blockconv.core.quantization import real
from blockconv.core.record import frozen
from blockconv.core.types import INTEGERS, IntegerType, element, ieee
from blockconv.network.graph import Network, Node, check_network, running
from blockconv.network.ops import QuantizedConv2d
from blockconv.network.passes.for_kernels import CONVERSIONS
from blockconv.network.passes.fuse import fuse
from blockconv.network.passes.rewrite import Refit
from blockconv.network.quantization.calibration import (
    METHODS,
    OP,
    Calibration,
    Range,
    flowing,
    measured,
    read_samples,
    widen,
    with_outputs,
)
from blockconv.network.quantization.report import LayerReport, QuantizationReport, decibels
from blockconv.network.quantization.rewriting import (
    IntegerTarget,
    WeightTarget,
    quantizable,
    quantization_of,
    rewritten,
)


@dataclass(frozen=True, eq=False, repr=False)
class QuantizedNetwork(Network):
    """A network of integers, made by `quantize`.

    calibration: the ranges that it was made with.
    report: the signal-to-noise ratio of each layer.
    """

    calibration: Calibration = field(default_factory=lambda: Calibration({}), repr=False)
    report: QuantizationReport = field(default=QuantizationReport((), {}), repr=False)


@ieee
def quantize(
    network: Network,
    samples: Any = None,
    method: str = "minmax",
    per_channel: bool = True,
    *,
    float32: Iterable[str] = (),
    dtype: str = "uint8",
    weights: str = "int8",
    int8: Iterable[str] = (),
    percentile: float = 99.99,
    reduce_range: bool = False,
    calibration: Calibration | None = None,
) -> QuantizedNetwork:
    """An 8-bit (or 4-bit) integer network from a float32 network: a quarter of the size, and faster.

    Convolutions read 8-bit integers and int8 weights, and add exactly. The ops between them run on integers if they
    have integer kernels. Batch norms and activations are fused first. The inputs and outputs of the network stay
    float32. `compile` takes the result.

    network: a float32 network. It does not change.
    samples: typical inputs: a sequence of arrays, or of {input: array} for several inputs. All of them are measured;
        ten to a few hundred suffice. Every value must be finite.
    method: the range of a value: "minmax" (all numbers) or "percentile" (without the rarest at both ends).
    per_channel: True: one scale for each output channel of the weights. False: one scale for each layer.
    float32: the names of nodes that compute in float32.
    dtype: the type of values: "uint8", "int8", "uint4" or "int4". 4-bit values are packed for convolutions (not
        depthwise) and pools in channel blocks. Other ops run on 8 bits, with the same integers.
    weights: the type of weights, with zero point 0: "int8" or "int4". int4 is coarser and saves no memory, because
        kernels store the weights as bytes.
    int8: with 4 bits: the names of nodes whose weights and inputs keep 8 bits. First and last layers lose most.
    percentile: for method "percentile": the share of numbers at or below a range's upper end, above 50, at most 100.
    reduce_range: limit weights so that two neighbouring channels' weights of one sign sum to at most 128. This costs
        at most one of their 8 bits. It is for machines without VNNI (AVX2 and early AVX-512). Their fastest instruction
        adds pairs of products in 16 bits, and kernels use it only if these cannot overflow. With VNNI it gains nothing.
    calibration: ranges from an earlier run, instead of a measurement. Then the samples serve only the report.

    The result's `report` has the signal-to-noise ratio of each layer against the float network, over the samples. Its
    `calibration` can be saved and given again.
    Raises ArgumentError or NetworkError for a bad argument. For a NaN, an infinity or an empty sample, the error names
    the sample and the value.

    >>> import numpy as np, blockconv as bc
    >>> rng = np.random.default_rng(0)
    >>> builder = bc.NetworkBuilder("one layer")
    >>> x = builder.input("x", (1, 4, 6, 6))
    >>> builder.output(builder.conv2d(x, rng.standard_normal((8, 4, 1, 1)).astype("f"), activation="relu", name="conv"))
    >>> samples = rng.standard_normal((5, 1, 4, 6, 6)).astype("f")
    >>> small = bc.quantize(builder.build(), samples)
    >>> small.report.outputs["conv"] > 30  # decibels
    True
    """
    _check_options(network, method, percentile, calibration)
    kind: IntegerType = checked_word(OP, "dtype", dtype, INTEGERS)
    flags = check_flag(OP, "per_channel", per_channel), check_flag(OP, "reduce_range", reduce_range)
    targets = WeightTarget(*flags, checked_word(OP, "weights", weights, ("int8", "int4")))
    fed = None if samples is None and calibration is not None else read_samples(network, samples)
    if calibration is None:
        calibration = measured(network, fed or (), method, percentile)
    named = _read_names("float32", float32), _read_names("int8", int8)
    how = _Quantizing(calibration, kind, targets, *named)
    fused, values, made = how.steps(network)
    report = _report(fused, made, values, fed)
    kept = {f.name: getattr(made, f.name) for f in fields(Network) if f.init and f.name != "remake"}
    # The floats are kept where other sizes need them.
    remake = Refit(network, made, how) if network.limits or network.kept_limits() is None else None
    return QuantizedNetwork(**kept, remake=remake, calibration=calibration, report=report)


@frozen
class _Quantizing:
    """How a float32 network becomes one of integers, at any sizes of its inputs. See `quantize`."""

    calibration: Calibration
    dtype: IntegerType
    weights: WeightTarget
    float32: Names
    int8: Names

    def __call__(self, network: Network) -> Network:
        return self.steps(network)[-1]

    def steps(self, network: Network) -> tuple[Network, dict[str, IntegerTarget], Network]:
        """The network after fusion, the quantization of its values, and the network of integers."""
        fused = fuse(network)
        excluded, eight = _holders(fused, "float32", self.float32), _holders(fused, "int8", self.int8)
        shared = quantizable(fused, excluded, self.dtype)
        read = {name for node in fused.nodes if node.name in eight for name in node.inputs}
        values = self._integers(shared, read)
        return fused, values, fuse(rewritten(fused, values, excluded, self.weights._replace(kept=eight)))

    def _integers(self, shared: Mapping[str, str], kept: Collection[str]) -> dict[str, IntegerTarget]:
        """The quantization of each value; values that share a scale have the range of all of them.

        kept: values that keep 8 bits. Values that share a scale with one of these keep them too.
        """
        known = self.calibration
        missing = [name for name in shared if name not in known.ranges]
        if missing:
            rule = f"has no range for {', '.join(missing):.200}"
            raise ArgumentError(OP, "calibration", known.method, rule, "give a calibration of this network")
        ranges: dict[str, Range] = {}
        for name, root in shared.items():
            widen(ranges, root, known.ranges[name])
        wide: Any = element(self.dtype).unpacked.name
        types = dict.fromkeys(ranges, self.dtype) | {root: wide for name, root in shared.items() if name in kept}
        made = {root: IntegerTarget(quantization_of(*of, types[root]), types[root]) for root, of in ranges.items()}
        return {name: made[root] for name, root in shared.items()}


def _check_options(network: Any, method: object, percentile: object, calibration: object) -> None:
    check_network(OP, network)
    checked_word(OP, "method", method, METHODS)
    if calibration is not None and not isinstance(calibration, Calibration):
        raise ArgumentError(OP, "calibration", calibration, "has to be a Calibration, or None")
    if not isinstance(percentile, (int, float)) or not 50 < percentile <= 100:
        raise ArgumentError(OP, "percentile", percentile, "has to be a number above 50, and at most 100")
    for tensor in network.inputs:
        if tensor.dtype != np.float32:
            rule = f"is {tensor.dtype}, and only float32 networks can be quantized"
            raise NetworkError(network.name, tensor.name, tensor.shape, rule)


def _read_names(argument: str, names: object) -> Names:
    if isinstance(names, str):
        return (names,)
    listed = tuple(names) if isinstance(names, Iterable) else (names,)
    if not all(isinstance(name, str) for name in listed):
        raise ArgumentError(OP, argument, names, "has to be names of nodes", "give a list of strings")
    return listed


def _holders(fused: Network, argument: str, names: Iterable[str]) -> set[str]:
    """The fused nodes that do the work of the nodes with these names."""
    return {running(fused, argument, name) for name in names}


# ---------------------------------------------------------------- the report


def _report(
    fused: Network,
    made: Network,
    values: Mapping[str, IntegerTarget],
    samples: Sequence[Mapping[str, Any]] | None,
) -> QuantizationReport:
    """Compare the layers of the new network with those of the old one."""
    # A node of the new network does the work of the old one with its name.
    named = {node.name: node.output for node in fused.nodes}
    given = {node.output: named[node.name] for node in made.nodes if node.name in named}
    floats = set(flowing(made))
    compared = {value: name for value, name in given.items() if value in floats or name in values}
    ratios: dict[str, float] = {}
    if samples is not None:
        plans = with_outputs(fused, compared.values()), with_outputs(made, compared)
        signal, noise = dict.fromkeys(compared, 0.0), dict.fromkeys(compared, 0.0)
        for sample in samples:
            wanted, found = (plan.by_name(**sample) for plan in plans)
            for value, name in compared.items():
                exact, computed = wanted[name].astype(np.float64), found[value]
                if computed.dtype != np.float32:
                    computed = real(computed, values[name].quantization)
                signal[value] += float(np.square(exact).sum())
                noise[value] += float(np.square(exact - computed).sum())
        ratios = {value: decibels(signal[value], noise[value]) for value in compared}
    layers = [
        LayerReport(node.name, node.op, _runs_as(made, node), ratios.get(node.output))
        for node in made.nodes
        if not isinstance(node.attributes, CONVERSIONS)
    ]
    return QuantizationReport(tuple(layers), {name: ratios[name] for name in made.outputs if name in ratios})


def _runs_as(made: Network, node: Node) -> str:
    """The type of a node's output; for a convolution of integers that gives floats, of its input."""
    if isinstance(node.attributes, QuantizedConv2d) and node.attributes.dtype == "float32":
        return str(made.tensors[node.src].dtype)
    return str(made.tensors[node.output].dtype)
