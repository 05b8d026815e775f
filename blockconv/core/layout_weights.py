"""The weight layouts of other libraries, by the layout of the activations."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from blockconv.core.errors import LayoutError
from blockconv.core.layout import Layout, read_layout

# Weights by library and activation. Dense weights are over (O, I, H, W), grouped and depthwise over
# (G, O, I, H, W), MACE's depthwise over (M, I, H, W). A key may be a mode: NCHW44 is NCHW4 with other weights.
# oneDNN's weights for NCHW serve a first layer of few channels that writes NCHW16; its weights for NHWC are int8.
# MegEngine pads the channels of each group by themselves.
_WEIGHTS: dict[str, dict[str, tuple[str, str, str]]] = {
    "megengine": {
        "NCHW": ("oihw", "goihw", "C11HW"),
        "NHWC": ("ohwi", "gohwi", ""),
        "NCHW4": ("oIhw4i", "goIhw4i", "Goihw4g"),
        "NCHW8": ("oIhw8i", "goIhw8i", ""),
        "NCHW32": ("oIhw32i", "goIhw32i", ""),
        "NCHW64": ("oIhw64i", "goIhw64i", ""),
        "NCHW44": ("OIhw4i4o", "gOIhw4i4o", "Goihw4g"),
        "NCHW88": ("OIhw8i8o", "gOIhw8i8o", "Goihw8g"),
        "NCHW44_DOT": ("OIhw4o4i", "gOIhw4o4i", ""),
        "CHWN4": ("Ihwo4i", "gIhwo4i", ""),
        "NHWCD4": ("Ohwi4o", "gOhwi4o", "Goihw4g"),
        "NHWCD4-dot": ("OhwI4o4i", "gOhwI4o4i", ""),  # int8; MegEngine calls this mode NHWCD4 too
    },
    "mace": {"NHCW4": ("Ohwi4o", "", "oIhw4i")},
    "onednn": {
        "NCHW": ("Ohwi16o", "", ""),
        "NHWC": ("OIhw4i16o4i", "gOIhw4i16o4i", "Goihw16g"),
        "NCHW8": ("OIhw8i8o", "gOIhw8i8o", ""),
        "NCHW16": ("OIhw16i16o", "gOIhw16i16o", "Goihw16g"),
    },
    "openvino": {
        "NCHW16": ("os_is_yx_isv16_osv16", "g_os_is_yx_isv16_osv16", "gs_oiyx_gsv16"),
        "bsv16_fsv16": ("is_os_yx_isv16_osv16", "", ""),
    },
}


_Row = TypeVar("_Row")


class ConvolutionMode(NamedTuple):
    """A convolution format of MegEngine: the layouts of activations and weights.

    activation: the layout of activations (N, C, H, W).
    dense: the layout of weights (O, I, H, W).
    grouped, depthwise: the layouts of weights (G, O, I, H, W); None if MegEngine has none.
    """

    activation: Layout
    dense: Layout
    grouped: Layout | None
    depthwise: Layout | None


_MODES = {
    library: {
        mode: ConvolutionMode(Layout(mode), Layout(dense), *(Layout(name) if name else None for name in rest))
        for mode, (dense, *rest) in modes.items()
    }
    for library, modes in _WEIGHTS.items()
}


def convolution_mode(name: str) -> ConvolutionMode:
    """MegEngine's convolution mode with this name. NCHW44 and NCHW44_DOT are NCHW4 with other weights.

    Raises LayoutError, which lists the modes, for another name.
    """
    return _row("convolution_mode", "name", name, _MODES["megengine"], "must be a convolution mode of MegEngine")


def weights_for(activation: str | Layout, kind: str = "dense", library: str = "megengine") -> Layout:
    """The weight layout of a library for activations in a layout.

    activation: a layout, any of its names, or a convolution mode of MegEngine, such as NCHW44.
    kind: "dense" for (O, I, H, W), "grouped" or "depthwise" for (G, O, I, H, W). MACE's depthwise weights are
        (M, I, H, W).
    library: "megengine", "mace", "onednn" or "openvino".

    Raises LayoutError if the library has no such weights.

    >>> import blockconv as bc
    >>> bc.weights_for("NCHW16", library="onednn")
    Layout('ABcd16b16a')
    """
    op = "weights_for"
    layout = read_layout(op, "activation", activation)
    modes = _row(op, "library", library, _MODES, "must be a library with weight layouts")
    kinds = {name: column for column, name in enumerate(ConvolutionMode._fields) if name != "activation"}
    column = _row(op, "kind", kind, kinds, "must be a kind of weights")
    if activation in modes:
        mode = activation
    else:  # another name of a mode's layout; of several modes, the plain one stands first
        mode = next((mode for mode, row in modes.items() if row.activation == layout), layout.name)
    weights = {mode: wanted for mode, row in modes.items() if (wanted := row[column])}
    return _row(op, "activation", mode, weights, f"has no {kind} weights in {library}")


def _row(op: str, argument: str, key: object, table: Mapping[str, _Row], rule: str) -> _Row:
    if isinstance(key, str) and key in table:
        return table[key]
    raise LayoutError(op, argument, key, rule, f"give one of {', '.join(table)}")
