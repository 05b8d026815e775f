"""Graphs of a training step: their convolutions, forward and backward, run on blockconv's ops; the rest in PyTorch."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from blockconv.core.errors import BlockconvError
from blockconv.frontends.torch.reader import Refused, kind_of
from blockconv.frontends.torch.reports import Compiled

__all__ = ["place_ops"]

aten = torch.ops.aten
TYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def place_ops(gm: Any, record: Compiled) -> None:
    """Put blockconv's ops in place of a graph's convolutions. The record lists the others."""
    refused = Refused()
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        record.nodes += kind_of(node).startswith(("aten.", "blockconv."))
        record.taken += kind_of(node).startswith("blockconv.")
        place = {aten.convolution.default: _forward, aten.convolution_backward.default: _backward}.get(node.target)
        if place is None:
            continue
        reason = _why_not(node)
        if reason or not place(gm.graph, node):
            refused.add(node, reason or "strides of its result")
        else:
            record.taken += 1
    gm.graph.eliminate_dead_code()
    gm.recompile()
    record.refused = refused.lines()


def _why_not(node: Any) -> str:
    """Why a convolution stays in PyTorch."""
    first = node.args[:2] if node.target is aten.convolution.default else node.args[:3]
    tensors = [each.meta["val"] for each in first]
    transposed = node.args[6 if node.target is aten.convolution.default else 7]
    if tensors[0].device.type != "cpu":
        return f"on {tensors[0].device.type}"
    if transposed or tensors[0].dim() != 4:
        return "transposed" if transposed else f"{tensors[0].dim() - 2}-D windows"
    dtypes = {tensor.dtype for tensor in tensors}
    return "" if len(dtypes) == 1 and dtypes <= {*TYPES} else ", ".join(sorted(map(str, dtypes)))


def _forward(graph: Any, node: Any) -> bool:
    x, weight, bias, stride, padding, dilation, _, _, groups = node.args
    given = x, weight, bias, list(stride), list(padding), list(dilation), groups
    return _put(graph, node, torch.ops.blockconv.conv2d.default, given)


def _backward(graph: Any, node: Any) -> bool:
    """One op for each gradient that is read."""
    grad, x, weight, _, stride, padding, dilation, _, _, groups, _ = node.args
    options = list(stride), list(padding), list(dilation), groups
    ops, done = torch.ops.blockconv, True
    for part in list(node.users):
        with graph.inserting_before(node):
            if part.args[1] == 0:
                given = _shape(graph, x), weight, grad, *options
                done &= _put(graph, part, ops.conv2d_backward_data.default, given)
            elif part.args[1] == 1:
                given = x, _shape(graph, weight), grad, *options
                done &= _put(graph, part, ops.conv2d_backward_weights.default, given)
    return done


def _shape(graph: Any, node: Any) -> list[Any]:
    """A shape; sizes that are not fixed are read when the graph runs."""
    sizes = enumerate(node.meta["val"].shape)
    return [size if isinstance(size, int) else _size(graph, node, axis, size) for axis, size in sizes]


def _size(graph: Any, node: Any, axis: int, size: Any) -> Any:
    made = graph.call_function(aten.sym_size.int, (node, axis))
    made.meta["val"] = size
    return made


def _put(graph: Any, node: Any, op: Any, given: Sequence[Any]) -> bool:
    """An op in place of a node, with the strides that tracing promised. False if those are of no memory format."""
    promised = node.meta["val"]
    with graph.inserting_before(node):
        made = graph.call_function(op, tuple(given))
        fakes = torch.fx.node.map_arg(tuple(given), lambda each: each.meta["val"])
        try:
            with promised.fake_mode:
                made.meta["val"] = found = op(*fakes)
        except (BlockconvError, RuntimeError):
            graph.erase_node(made)
            return False
        result = made
        if not _lies_as(found, promised) and any(user.op != "output" for user in node.users):
            formats = (torch.contiguous_format, torch.channels_last)
            wanted = [each for each in formats if promised.is_contiguous(memory_format=each)]
            if not wanted:
                graph.erase_node(made)
                return False
            result = graph.call_function(aten.clone.default, (made,), {"memory_format": wanted[0]})
            result.meta["val"] = promised
    node.replace_all_uses_with(result)
    return True


def _lies_as(found: Any, promised: Any) -> bool:
    pairs = zip(found.stride(), promised.stride(), found.shape, strict=True)
    return all(have == want or size == 1 for have, want, size in pairs)
