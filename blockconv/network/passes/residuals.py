"""Which of two values that are added is made by a convolution that can add the other in its store."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from blockconv.network.graph import Node
from blockconv.network.ops import Convolution
from blockconv.network.passes.rewrite import Edit


def adding_convolution(edit: Edit, node: Node, takes: Callable[[Any], bool]) -> tuple[Node, Any, int] | None:
    """(a convolution that can add the other input of an addition in its store, its attributes, which input that is).

    takes(attributes): whether a convolution can. If both inputs come from one, the later does. None if neither can.
    """
    first, second = node.inputs
    if first == second or any(name in edit.constants for name in node.inputs):
        return None
    found = []
    for name, other in ((first, 1), (second, 0)):
        conv = edit.private(name, Convolution)
        if conv is None or len(conv[0].inputs) >= conv[1].inputs[-1] or not conv[1].activation.is_identity:
            continue
        if takes(conv[1]) and edit.shape(node.inputs[other]) == edit.shape(node.output) == edit.shape(name):
            found.append((*conv, other))
    return max(found, key=lambda one: edit.position(one[0]), default=None)
