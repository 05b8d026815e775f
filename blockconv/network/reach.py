"""The pixels of a network's inputs that each pixel of its values reads.

A value's pixel `o` along an axis reads pixels `step * o + low` to `step * o + high` of an input. `step` is a fraction
where a network enlarges images. Ops that read all pixels (a global average, attention) have no such bounds. An op's
record says what it reads (`Op.reads`).
"""

import math
from collections.abc import Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from blockconv.core.checks import Pair
from blockconv.core.errors import UnsupportedError
from blockconv.core.python import zipped
from blockconv.network.ops.rule import PIXELS, Reach, Windows


class ReceptiveField(NamedTuple):
    """The pixels of an input that one pixel of an output reads, as (height, width).

    size: the number of pixels.
    stride: how many pixels the window moves from one output pixel to the next; less than 1 where the network enlarges
        images.
    first: the first pixel that output pixel 0 reads; negative ones are padding.
    """

    size: Pair
    stride: tuple[Fraction, Fraction]
    first: Pair


Reaches = dict[int, Reach]  # by the axis of a value that counts pixels


def reaches(network: Any, name: str) -> dict[str, Reaches]:
    """The reach of each value in the input `name`, for all values that depend on it.

    Raises UnsupportedError, which names the node, where a value has no bounds.
    """
    found: dict[str, Reaches] = {name: dict.fromkeys(PIXELS, Reach())}
    for node in network.nodes:
        for source, given in windows(network, node, found):
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
        first = [math.ceil(reach.low) for reach in along]
        size = [math.floor(reach.high) + 1 - begin for reach, begin in zipped(along, first)]
        fields[name] = ReceptiveField((size[0], size[1]), (along[0].step, along[1].step), (first[0], first[1]))
    return fields


def windows(network: Any, node: Any, known: Mapping[str, Any]) -> list[tuple[str, Windows]]:
    """Pair each of a node's inputs in `known` with the windows by which the node reads it.

    known: the pixels' axes of values. A value that is two inputs (a convolution's source and residual) appears twice.

    Raises UnsupportedError, which names the node, if it reads pixels without bounds.
    """
    flows = [name for name in dict.fromkeys(node.inputs) if name in known]
    if not flows:
        return []
    axes = tuple(sorted(known[flows[0]]))
    if any(tuple(sorted(known[name])) != axes for name in flows):
        raise _refused(node, "joins values whose pixels are along different axes")
    found = node.attributes.reads(network.site(node), axes)
    if isinstance(found, str):
        raise _refused(node, found)
    return [(name, window) for name, window in zipped(node.inputs, found) if name in known]


def _refused(node: Any, rule: str) -> UnsupportedError:
    remedy = "end the network before it, and run the rest on the whole result"
    return UnsupportedError(f"{node}: {rule}; {remedy}")
