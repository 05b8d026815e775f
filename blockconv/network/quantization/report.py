"""The accuracy of a quantized network, layer by layer."""

import math
from typing import NamedTuple

from blockconv.core import text
from blockconv.core.checks import Names


class LayerReport(NamedTuple):
    """The accuracy of a node.

    name: the node's name.
    op: its op.
    dtype: the type that it computes in: "uint8", "int8", "uint4", "int4" or "float32".
    snr: the signal-to-noise ratio of its output over all samples, in decibels; infinite without a difference, None
        without a measurement.
    """

    name: str
    op: str
    dtype: str
    snr: float | None


class QuantizationReport(NamedTuple):
    """The accuracy of a quantized network against the float network; `print` shows a table.

    layers: the layers, in the order in which they run.
    outputs: {output: signal-to-noise ratio in decibels}; empty without samples.
    """

    layers: tuple[LayerReport, ...]
    outputs: dict[str, float]

    @property
    def floats(self) -> Names:
        """The names of the layers that compute in float32."""
        return tuple(layer.name for layer in self.layers if layer.dtype == "float32")

    def __str__(self) -> str:
        rows = [(text.shortened(one.name, 40), one.op, one.dtype, shown(one.snr)) for one in self.layers]
        outputs = [(text.shortened(name, 40), "output", "", shown(snr)) for name, snr in self.outputs.items()]
        heads = "layer", "op", "runs in", "signal to\nnoise, dB"
        return text.table(heads, [*rows, *outputs], right=(3,), rules=[len(rows)])

    def __repr__(self) -> str:
        worst = min((one.snr for one in self.layers if one.snr is not None), default=None)
        return (
            f"QuantizationReport({len(self.layers)} layers, {len(self.floats)} in float32, least SNR {shown(worst)} dB)"
        )


def decibels(signal: float, noise: float) -> float:
    """The ratio of two sums of squares."""
    if noise == 0:
        return math.inf
    return 10 * math.log10(signal / noise) if signal > 0 else -math.inf


def shown(snr: float | None) -> str:
    """A ratio in a column of them."""
    return "" if snr is None else f"{snr:.1f}"
