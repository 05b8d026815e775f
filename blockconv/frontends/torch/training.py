"""The graph of a training step is rewritten before plans take it.

Batch norms of images take in the addition and the ReLU that follow them. Their gradients find the mask of the ReLU
again, so its input is not kept. So this comes before a step is parted into a forward and a backward graph.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch.partitioners import default_partition
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.utils._pytree import tree_leaves

from blockconv.api.norms import UNBOUNDED
from blockconv.core.python import zipped
from blockconv.core.types import FLOATS, element
from blockconv.frontends.torch.reader import arguments_of

aten, ops = torch.ops.aten, torch.ops.blockconv


def partition_step(joint: Any, inputs: Any, **options: Any) -> Any:
    """PyTorch's partition of the joint graph of a step, after batch norms were fused."""
    for node in joint.graph.find_nodes(op="call_function", target=aten.as_strided.default):
        _drop_storage(node)
    for node in joint.graph.find_nodes(op="call_function", target=aten.expand.default):
        _expand_late(node)
    for node in joint.graph.find_nodes(op="call_function", target=aten.permute.default):
        if node.args[0].target is aten.permute.default and node.args[1] == node.args[0].args[1] == [1, 0]:
            node.replace_all_uses_with(node.args[0].args[0])
    place_norms(joint.graph, joint=True)
    joint.recompile()
    return default_partition(joint, inputs, **options)


def place_norms(graph: Any, joint: bool = False) -> None:
    """Put blockconv's op in place of batch norms of images in training, and of what follows them.

    joint: whether the graph will be parted. A checkpoint computes some of its nodes twice: these stay until then.
    """
    legit = aten._native_batch_norm_legit_functional.default, aten._native_batch_norm_legit.no_stats
    for node in list(graph.nodes):
        if node.target in legit and not (joint and "recompute" in node.meta):
            _place_norm(graph, node)
    graph.eliminate_dead_code()


def _drop_storage(node: Any) -> None:
    """The gradient of `as_strided` of a whole tensor is a reshape. PyTorch writes it into zeros for a storage."""
    if getattr(node.args[0], "target", None) is aten.as_strided_scatter.default:
        zeros, written = node.args[0].args[:2]
        given, size = [each.meta["val"] for each in (written, node)], zeros.meta["val"].numel()
        if all(x.is_contiguous() and statically_known_true(x.numel() == size) for x in given):
            with node.graph.inserting_before(node):
                node.replace_all_uses_with(_emitted(node, aten.view.default, written, node.args[1]))


def _expand_late(node: Any) -> None:
    """Divide before a gradient is expanded, and let additions and products broadcast."""
    x, shape = node.args[0], node.meta["val"].shape
    if x.meta["val"].dim() != len(shape):
        return
    for user in list(node.users):
        if user.target is aten.div.Scalar:
            with node.graph.inserting_before(user):  # a divisor may be a size, which is known from there on
                divided = _emitted(user, aten.div.Scalar, x, user.args[1])
                expanded = _emitted(user, aten.expand.default, divided, node.args[1])
            user.replace_all_uses_with(expanded)
            _expand_late(expanded)
        elif user.target in (aten.add.Tensor, aten.mul.Tensor) and not user.kwargs:
            others = [other for other in user.args if isinstance(other, torch.fx.Node) and other is not node]
            if others and _is_as_large(others[0].meta["val"], user.meta["val"]):
                user.replace_input_with(node, x)


def _emitted(node: Any, op: Any, *given: Any) -> Any:
    """A new node that helps to replace one, with what it gives of fake tensors."""
    made = node.graph.call_function(op, given)
    made.meta = {key: value for key, value in node.meta.items() if key == "partitioner_tag"}
    fakes = map_arg(given, lambda each: each.meta["val"])
    tensor = next(each for each in tree_leaves(fakes) if isinstance(each, torch.Tensor))
    with tensor.fake_mode:
        made.meta["val"] = op(*fakes)
    return made


class _Fused(NamedTuple):
    """A batch norm with what follows it.

    end: the node whose value the op gives.
    residual: None, or the node that is added.
    bounds: of the output.
    masked: gradients of a ReLU6 that read the value before it. They may as well read that after it.
    """

    end: Any
    residual: Any
    bounds: tuple[float, float]
    masked: list[Any]


def _place_norm(graph: Any, node: Any) -> None:
    """One op in place of a batch norm, an addition and a ReLU, and one in place of the gradients of both."""
    given = arguments_of(node)
    x = given["input"].meta["val"]
    if not given["training"] or not _is_taken(x):
        return
    found = _following(node)
    point = found and _fusing_point(graph, node, given["input"], found)
    residual, bounds = (found.residual, found.bounds) if found and point else (None, UNBOUNDED)
    with graph.inserting_before(point or node):
        numbers = given["momentum"], given["eps"], *bounds
        known = map(given.get, ("input", "weight", "bias", "running_mean", "running_var"))
        parts, results = _parts(node, 5, ops.batch_norm, *known, residual, *numbers)
    if not results:
        return
    if found and point:
        results.pop(0, None)  # the value without what follows
        for part in node.users:
            for gradient in part.users if part.args[1] == 1 and residual is None else ():
                if gradient.target == aten.native_batch_norm_backward.default:
                    _fuse_gradient(graph, gradient, found, parts[1:3], given["bias"])
        for reader in found.masked:
            reader.update_arg(1, parts[0])
        found.end.replace_all_uses_with(parts[0])
    for part in node.users:
        if part.args[1] in results:
            part.replace_all_uses_with(results[part.args[1]])


def _is_taken(x: Any) -> bool:
    """Whether blockconv normalises images. Sizes that change are 2 or more."""
    if x.dim() != 4 or x.device.type != "cpu" or str(x.dtype).removeprefix("torch.") not in FLOATS:
        return False
    return all(map(statically_known_true, (x.shape[1] > 0, math.prod((x.shape[0], *x.shape[2:])) > 1)))


def _parts(node: Any, count: int, op: Any, *given: Any) -> tuple[list[Any], dict[int, Any]]:
    """(The results of an op that has several; those that others read of the node, in the types that tracing promised).

    There are none of the latter if the first result has other strides than tracing promised.
    """
    made = _emitted(node, op.default, *given)
    parts = [_emitted(node, operator.getitem, made, k) for k in range(count)]
    read, promised = {part.args[1] for part in node.users}, node.meta["val"]
    if not _has_strides_of(parts[0].meta["val"], promised[0]):
        return parts, {}
    convert = torch.ops.prims.convert_element_type.default
    return parts, {
        k: part if part.meta["val"].dtype == promised[k].dtype else _emitted(node, convert, part, promised[k].dtype)
        for k, part in enumerate(parts)
        if k in read
    }


def _following(node: Any) -> _Fused | None:
    """The nodes after a batch norm that its op can compute too; None if there are none."""
    values = [part for part in node.users if part.args[1] == 0]
    if len(values) != 1:
        return None
    end, residual = values[0], None
    readers = _readers(end)
    if len(readers) == 1 and readers[0].target is aten.add.Tensor and not readers[0].kwargs:
        added = [other for other in readers[0].args if other is not end]
        if len(added) == 1 and isinstance(added[0], torch.fx.Node):
            end, residual = readers[0], added[0]
            readers = _readers(end)
    clamps = [reader for reader in readers if reader.target in (aten.relu.default, aten.hardtanh.default)]
    masked = [reader for reader in readers if reader not in clamps]
    if len(clamps) != 1 or any(reader.target != _CLIPPED or _origin(reader.args[1]) is not end for reader in masked):
        return None if residual is None else _Fused(end, residual, UNBOUNDED, [])
    given = arguments_of(clamps[0])
    bounds = float(given.get("min_val", 0.0)), float(given.get("max_val", math.inf))
    return _Fused(clamps[0], residual, bounds, masked)


def _fusing_point(graph: Any, node: Any, x: Any, found: _Fused) -> Any:
    """The node before which one op can stand; None unless all values are alike in memory, and kept for the gradient."""
    value = x.meta["val"]
    for other in (found.end, found.residual):
        kept = None if other is None else other.meta["val"]
        if kept is not None and (kept.dim(), kept.dtype, kept.device) != (value.dim(), value.dtype, value.device):
            return None
        if kept is not None and not (_is_as_large(kept, value) and _has_strides_of(kept, value)):
            return None
    exact = element(str(value.dtype).removeprefix("torch.")).dtype.type
    if any(exact(bound) != bound for bound in found.bounds):  # masks are found by comparing with values of this type
        return None
    position = {each: k for k, each in enumerate(graph.nodes)}
    if found.residual is None or position[found.residual] < position[node]:
        return node.next
    readers = (reader for part in node.users if part.args[1] for reader in part.users)
    return found.end if all(position[reader] > position[found.end] for reader in readers) else None


def _fuse_gradient(graph: Any, node: Any, found: _Fused, statistics: Sequence[Any], bias: Any) -> None:
    """The gradients of a batch norm and of the ReLU after it as one op, if nobody else reads the latter."""
    given = arguments_of(node)
    mask = given["grad_out"]
    kinds = {(0.0, math.inf): aten.threshold_backward.default}
    if mask.target != kinds.get(found.bounds, _CLIPPED) or len(mask.users) > 1:
        return
    if _origin(mask.args[1]) is not found.end and mask not in found.masked:
        return
    with graph.inserting_before(node):
        known = mask.args[0], given["input"], given["weight"], bias, *statistics, *found.bounds
        _, results = _parts(node, 3, ops.batch_norm_backward, *known)
    if not results:
        return
    for part in list(node.users):
        part.replace_all_uses_with(results[part.args[1]])
    found.masked[:] = [reader for reader in found.masked if reader is not mask]


_COPIES = aten.detach.default, aten.clone.default, aten.alias.default


def _origin(node: Any) -> Any:
    """The node whose values a node copies."""
    while node.target in _COPIES:
        node = node.args[0]
    return node


def _readers(node: Any) -> list[Any]:
    """Who reads a value or copies of it."""
    found: list[Any] = []
    for user in node.users:
        found += _readers(user) if user.target in _COPIES else [user]
    return found


def _is_as_large(a: Any, b: Any) -> bool:
    return all(statically_known_true(one == other) for one, other in zipped(a.shape, b.shape))


def _has_strides_of(found: Any, promised: Any) -> bool:
    pairs = zipped(found.stride(), promised.stride(), found.shape)
    return all(statically_known_true(have == want) or statically_known_true(size == 1) for have, want, size in pairs)


_CLIPPED = aten.hardtanh_backward.default
