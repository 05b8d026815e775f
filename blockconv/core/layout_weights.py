"""The layouts of weights that go with those of activations, by library."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple, TypeVar

from blockconv.core.errors import LayoutError
from blockconv.core.layout import Layout, read_layout

__all__ = ["ConvolutionMode", "convolution_mode", "weights_for"]

# Weights by library and activation: dense over (O, I, H, W), grouped and depthwise over (G, O, I, H, W), but
# MACE's depthwise over (M, I, H, W). A key may be a mode: NCHW44 is NCHW4 with other weights. Those of
# oneDNN's NCHW serve a first layer of few channels that writes NCHW16; those of its NHWC are int8. MegEngine
# pads the channels of each group by themselves.
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
    """A convolution format of MegEngine: the layouts of activations and weights, None for no such weights.

    activation: over (N, C, H, W).
    dense: of weights over (O, I, H, W).
    grouped, depthwise: of weights over (G, O, I, H, W).
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
    """MegEngine's convolution mode of that name. NCHW44 and NCHW44_DOT are NCHW4 with other weights.

    Raises LayoutError for a name that is none, with those that there are.
    """
    return _row("convolution_mode", "name", name, _MODES["megengine"], "is no convolution mode of MegEngine")


def weights_for(activation: str | Layout, kind: str = "dense", library: str = "megengine") -> Layout:
    """The layout in which a library wants the weights that meet activations of a layout.

    activation: a layout in any of its names, or a convolution mode of MegEngine, such as NCHW44.
    kind: "dense", over (O, I, H, W), "grouped" or "depthwise", over (G, O, I, H, W), but MACE's depthwise over
        (M, I, H, W).
    library: "megengine", "mace", "onednn" or "openvino".

    Raises LayoutError if it has no such weights.

    >>> import blockconv as bc
    >>> bc.weights_for("NCHW16", library="onednn")
    Layout('ABcd16b16a')
    """
    op = "weights_for"
    layout = read_layout(op, "activation", activation)
    modes = _row(op, "library", library, _MODES, "is no library with weights of its own")
    kinds = {name: column for column, name in enumerate(ConvolutionMode._fields) if name != "activation"}
    column = _row(op, "kind", kind, kinds, "is no kind of weights")
    if activation in modes:
        mode = activation
    else:  # another name of a mode's layout; of several modes, the plain one stands first
        mode = next((mode for mode, row in modes.items() if row.activation == layout), layout.name)
    weights = {mode: wanted for mode, row in modes.items() if (wanted := row[column])}
    return _row(op, "activation", mode, weights, f"{library} has no {kind} weights for it")


def _row(op: str, argument: str, key: object, table: Mapping[str, _Row], rule: str) -> _Row:
    if isinstance(key, str) and key in table:
        return table[key]
    raise LayoutError(op, argument, key, rule, f"take one of {', '.join(table)}")
