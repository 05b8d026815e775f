"""What pixels of a network's inputs each pixel of its values reads.

A value's pixel `o` along an axis reads pixels `step * o + low` to `step * o + high` of an input. `step` is a fraction
where a network enlarges images. Ops that read all pixels (a global average, attention) have no such bounds.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from fractions import Fraction
from typing import Any, NamedTuple

from blockconv.core.eltwise_problem import exact_scale
from blockconv.core.errors import UnsupportedError
from blockconv.network import ops

__all__ = ["PIXELS", "Reach", "ReceptiveField", "reaches", "receptive_fields", "windows"]

PIXELS = 2, 3  # the axes of an image that are pixels
_EACH = ops.Activate, ops.Affine, ops.Cast, ops.Dequantize, ops.Lrn, ops.Quantize, ops.Requantize, ops.Shuffle


class ReceptiveField(NamedTuple):
    """The pixels of an input that one pixel of an output reads, as (height, width).

    size: how many. stride: from the pixels that an output pixel reads to those that the next one reads; less than 1
    where the network enlarges images. first: the first pixel that output pixel 0 reads; negative ones are padding.
    """

    size: tuple[int, int]
    stride: tuple[Fraction, Fraction]
    first: tuple[int, int]


@dataclass(frozen=True)
class Reach:
    """An output's pixel `o` along one axis reads pixels `step * o + low` to `step * o + high`."""

    step: Fraction = Fraction(1)
    low: Fraction = Fraction(0)
    high: Fraction = Fraction(0)

    def through(self, window: Reach) -> Reach:
        """What is read of this value's own source by an op that reads this value by `window`."""
        return Reach(self.step * window.step, self.step * window.low + self.low, self.step * window.high + self.high)

    def joined(self, other: Reach) -> Reach:
        """What two paths to one value read together, if their steps agree."""
        return Reach(self.step, min(self.low, other.low), max(self.high, other.high))


Reaches = dict[int, Reach]  # by the axis of a value along which pixels lie


def reaches(network: Any, name: str) -> dict[str, Reaches]:
    """What each value reads of the input `name`, for all values that depend on it.

    Raises UnsupportedError, which names the node, where a value has no bounds.
    """
    found: dict[str, Reaches] = {name: dict.fromkeys(PIXELS, Reach())}
    for node in network.nodes:
        for source, given in windows(network, node, found).items():
            made = {axis: found[source][read].through(window) for axis, (read, window) in given.items()}
            known = found.setdefault(node.output, made)
            if known.keys() != made.keys() or any(known[axis].step != made[axis].step for axis in made):
                raise _refused(node, "joins values whose pixels have different strides")
            found[node.output] = {axis: known[axis].joined(made[axis]) for axis in made}
    return found


def receptive_fields(network: Any) -> dict[str, ReceptiveField]:
    """The receptive field of each output in the only input: see `Network.receptive_field`."""
    found = reaches(network, network.inputs[0].name)
    fields = {}
    for name in network.outputs:
        along = [found[name][axis] for axis in sorted(found[name])] if name in found else []
        if len(along) != 2:
            raise UnsupportedError(f"receptive_field: output {name!r} has no pixels: it does not depend on the input")
        first = [-int(-reach.low // 1) for reach in along]
        size = [int(reach.high // 1) + 1 - begin for reach, begin in zip(along, first, strict=True)]
        fields[name] = ReceptiveField((size[0], size[1]), (along[0].step, along[1].step), (first[0], first[1]))
    return fields


Windows = dict[int, tuple[int, Reach]]  # axis of the output: the source's axis, and what it reads along it


def windows(network: Any, node: Any, known: Mapping[str, Any]) -> dict[str, Windows]:
    """What a node reads of each of its inputs that are in `known`, which maps values to the axes of their pixels.

    Raises UnsupportedError, which names the node, if it reads pixels without bounds.
    """
    flows = [name for name in dict.fromkeys(node.inputs) if name in known]
    if not flows:
        return {}
    a = node.attributes.of if isinstance(node.attributes, ops.Quantized) else node.attributes
    axes = sorted(known[flows[0]])
    if any(sorted(known[name]) != axes for name in flows):
        raise _refused(node, "joins values whose pixels are along different axes")
    same: Windows = {axis: (axis, Reach()) for axis in axes}
    if isinstance(a, ops.Transpose):
        if [axis for axis in a.perm if axis in axes] != axes:
            raise _refused(node, "exchanges rows and columns")
        return {flows[0]: {k: (axis, Reach()) for k, axis in enumerate(a.perm) if axis in axes}}
    if isinstance(a, _EACH) or (isinstance(a, (ops.Softmax, ops.Concat, ops.Slice)) and a.axis not in axes):
        return dict.fromkeys(flows, same)
    if isinstance(a, ops.ReduceMean) and a.keepdims and not set(a.axes) & set(axes):
        return dict.fromkeys(flows, same)
    if isinstance(a, ops.Pad):
        return {flows[0]: {axis: (axis, _shifted(-a.pads[axis][0])) for axis in axes}}
    if isinstance(a, ops.Binary):
        return dict.fromkeys(flows, _binary(network, node, axes, same))
    if tuple(axes) != PIXELS:
        raise _refused(node, f"needs its pixels along the axes {PIXELS}")
    if isinstance(a, ops.Convolution) and not isinstance(a, ops.DynamicConv2d):
        window = _window(a.problem(network.shape(node.inputs[0]), network.shape(node.parameters[0])))
        return {name: window if name == node.inputs[0] else same for name in flows}
    if isinstance(a, ops.Pool2d) and a.kernel is not None:
        return {flows[0]: _window(a.problem(network.shape(node.inputs[0])))}
    if isinstance(a, ops.Resize):
        return {flows[0]: _resize(node, a.problem(network.shape(node.inputs[0])))}
    raise _refused(node, "reads all pixels of an image for each pixel of its output")


def _refused(node: Any, rule: str) -> UnsupportedError:
    remedy = "end the network before it, and run the rest on the whole result"
    return UnsupportedError(f"{node}: {rule}; {remedy}")


def _shifted(by: int) -> Reach:
    return Reach(Fraction(1), Fraction(by), Fraction(by))


def _binary(network: Any, node: Any, axes: list[int], same: Windows) -> Windows:
    """Operands have the same pixels; a constant, or one of a single pixel, has one value for all of them."""
    rank = len(network.shape(node.output))
    for name in node.inputs:
        shape = (1,) * (rank - len(network.shape(name))) + network.shape(name)
        sizes = [shape[axis] for axis in axes]
        if name in network.constants and any(size > 1 for size in sizes):
            raise _refused(node, f"has the constant {name!r}, which differs from pixel to pixel")
        if name not in network.constants and sizes != [network.shape(node.output)[axis] for axis in axes]:
            raise _refused(node, f"reads one value {name!r} for all pixels")
    return same


def _window(p: Any) -> Windows:
    along = ((p.sh, p.ph, p.kh, p.dh), (p.sw, p.pw, p.kw, p.dw))
    return {
        axis: (axis, Reach(Fraction(stride), Fraction(-begin), Fraction((size - 1) * dilation - begin)))
        for axis, (stride, begin, size, dilation) in zip(PIXELS, along, strict=True)
    }


def _resize(node: Any, p: Any) -> Windows:
    found: Windows = {}
    for axis, size, out, scale in ((2, p.ih, p.oh, p.scale_h), (3, p.iw, p.ow, p.scale_w)):
        by = Fraction(out, size) if scale is None else exact_scale("resize", "scale", scale)
        if by != 1 and p.coordinates == "align_corners":
            raise _refused(node, "aligns the corners of the whole image (align_corners)")
        if by != 1 and p.coordinates == "pytorch_half_pixel" and out == 1:
            raise _refused(node, "reads pixel 0 where an output has one pixel (pytorch_half_pixel)")
        # Output o is at source coordinate o / by + shift, between two pixels.
        shift = Fraction(0) if p.coordinates == "asymmetric" or by == 1 else (1 / by - 1) / 2
        wide = 0 if by == 1 else 1
        found[axis] = axis, Reach(1 / by, shift - wide, shift + wide)
    return found
