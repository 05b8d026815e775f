"""Graphs of a training step: convolutions, pools and batch norms, forward and backward, run on blockconv's ops.

All other ops run in PyTorch. Before a step is parted into a forward and a backward graph, batch norms take in the
addition and the ReLU that follow them. Their gradients find the mask of the ReLU again, so its input is not kept.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch._functorch.partitioners import default_partition
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg

from blockconv.api.norms import UNBOUNDED
from blockconv.core.errors import BlockconvError, failing, ignoring
from blockconv.core.types import element
from blockconv.frontends.torch.reader import Refused, arguments_of, kind_of

aten, ops = torch.ops.aten, torch.ops.blockconv
TYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def place_ops(gm: Any) -> tuple[int, int, list[str]]:
    """Replace the ops of a graph that blockconv has by its own.

    Returns how many ops there are, how many of them are blockconv's, and a line for each kind of the others.
    """
    every, taken, refused = 0, 0, Refused()
    for node in list(gm.graph.nodes):
        if node.op != "call_function":
            continue
        every += kind_of(node).startswith(("aten.", "blockconv."))
        taken += kind_of(node).startswith("blockconv.")
        why_not = place_op(gm.graph, node)
        taken += why_not == ""
        if why_not:
            refused.add(node, why_not)
    gm.graph.eliminate_dead_code()
    return every, taken, refused.lines()


def place_op(graph: Any, node: Any) -> str | None:
    """Put blockconv's op in place of a node. Returns "", or why the node stays; None if blockconv has no such op."""
    place = _PLACES.get(node.target)
    if place is None:
        return None
    try:
        _replace(graph, node, place)
    except failing(_StaysError, BlockconvError, RuntimeError) as error:
        return str(error) if isinstance(error, _StaysError) else "its arguments"
    return ""


class _StaysError(Exception):
    """Why an op stays in PyTorch."""


class _Site:
    """A node that is replaced: its arguments by name, and a way to make nodes before it."""

    def __init__(self, graph: Any, node: Any) -> None:
        self.graph, self.node = graph, node
        self.given = arguments_of(node, node.args, node.kwargs)
        values = [each.meta["val"] for each in node.all_input_nodes]
        tensors = [value for value in values if isinstance(value, torch.Tensor)]  # others are sizes that change
        floats = {each.dtype for each in tensors if each.dtype.is_floating_point}
        if node.target in _OWN_STATISTICS:  # whose parameters may be float32 beside 16-bit values
            floats = {self.given[name].meta["val"].dtype for name in ("grad_out", "input") if name in self.given}
        if any(each.device.type != "cpu" for each in tensors):
            raise _StaysError(f"on {next(each.device.type for each in tensors if each.device.type != 'cpu')}")
        if len(floats) != 1 or not floats <= {*TYPES}:
            raise _StaysError(", ".join(sorted({str(each.dtype) for each in tensors})))
        self.mode = tensors[0].fake_mode

    def emit(self, op: Any, *given: Any) -> Any:
        """A new node, with what it gives of fake tensors."""
        made = self.graph.call_function(op, given)
        made.meta = {key: value for key, value in self.node.meta.items() if key == "partitioner_tag"}
        fakes = map_arg(given, lambda each: each.meta["val"])
        with self.mode:
            made.meta["val"] = op(*fakes)
        return made

    def shape(self, node: Any) -> list[Any]:
        """A shape; sizes that are not fixed are read when the graph runs."""
        sizes = enumerate(node.meta["val"].shape)
        return [size if isinstance(size, int) else self.emit(aten.sym_size.int, node, axis) for axis, size in sizes]

    def reads(self, k: int) -> bool:
        """Whether someone reads an output."""
        return any(part.args[1] == k for part in self.node.users)


def _replace(graph: Any, node: Any, place: Callable[[_Site], dict[int | None, Any]]) -> None:
    """Nodes in place of one, or of its outputs, with the strides that tracing promised."""
    with graph.inserting_before(node):
        site = _Site(graph, node)
        promised = node.meta["val"]
        made = {
            k: _as_promised(site, found, promised if k is None else promised[k]) for k, found in place(site).items()
        }
    if None in made:
        node.replace_all_uses_with(made[None])
        return
    for part in list(node.users):
        part.replace_all_uses_with(made[part.args[1]])


def _as_promised(site: _Site, made: Any, promised: Any) -> Any:
    if isinstance(promised, (tuple, list)):
        if not all(map(_has_strides_of, made.meta["val"], promised)):
            raise _StaysError("strides of its results")
        return made
    if _has_strides_of(made.meta["val"], promised):
        return made
    formats = (torch.contiguous_format, torch.channels_last)
    wanted = [each for each in formats if promised.dim() == 4 and promised.is_contiguous(memory_format=each)]
    if not wanted:
        raise _StaysError("strides of its result")
    result = site.graph.call_function(aten.clone.default, (made,), {"memory_format": wanted[0]})
    result.meta["val"] = promised
    return result


def _is_as_large(a: Any, b: Any) -> bool:
    return all(statically_known_true(one == other) for one, other in zip(a.shape, b.shape, strict=True))


def _has_strides_of(found: Any, promised: Any) -> bool:
    pairs = zip(found.stride(), promised.stride(), found.shape, strict=True)
    return all(statically_known_true(have == want) or statically_known_true(size == 1) for have, want, size in pairs)


# ---------------------------------------------------------------- convolutions


def _options(site: _Site, dimensions: int) -> list[Any]:
    """Stride, padding, dilation and groups, for two dimensions."""
    if dimensions not in (3, 4):
        raise _StaysError(f"{dimensions - 2}-D windows")
    pairs = [list(site.given[name]) for name in ("stride", "padding", "dilation")]
    extra = site.given["output_padding"] if site.given["transposed"] else ()
    if not all(isinstance(step, int) and more in range(step) for more, step in zip(extra, pairs[0], strict=False)):
        raise _StaysError("more output padding than a stride")
    if dimensions == 3:
        pairs = [[least, *pair] for least, pair in zip((1, 0, 1), pairs, strict=True)]
    return [*pairs, site.given["groups"]]


def _with_rows(site: _Site, node: Any) -> Any:
    """A tensor of 1-D windows as one of 2-D windows."""
    return site.emit(aten.unsqueeze.default, node, 2) if node.meta["val"].dim() == 3 else node


def _convolution(site: _Site) -> dict[int | None, Any]:
    given, dimensions = site.given, site.node.meta["val"].dim()
    x, weight = (_with_rows(site, given[name]) for name in ("input", "weight"))
    options, bias = _options(site, dimensions), given["bias"]
    if given["transposed"]:
        y, sizes = site.node.meta["val"].shape, site.shape(x)
        if not all(isinstance(size, int) for size in y[1:]):
            raise _StaysError("transposed, of a size that changes")
        shape = [sizes[0], y[1], *((1,) if dimensions == 3 else ()), *y[2:]]
        made = site.emit(ops.conv2d_backward_data.default, shape, weight, x, bias, *options)
    else:
        made = site.emit(ops.conv2d.default, x, weight, bias, *options)
    return {None: site.emit(aten.squeeze.dim, made, 2) if dimensions == 3 else made}


def _convolution_backward(site: _Site) -> dict[int | None, Any]:
    """One op for each gradient that is read."""
    given = site.given
    dimensions = given["weight"].meta["val"].dim()
    options = _options(site, dimensions)
    made: dict[int | None, Any] = {}
    grad, x, weight = (_with_rows(site, given[name]) for name in ("grad_output", "input", "weight"))
    data, weights, forward = (
        each.default for each in (ops.conv2d_backward_data, ops.conv2d_backward_weights, ops.conv2d)
    )
    if site.reads(0) and given["transposed"]:
        made[0] = site.emit(forward, grad, weight, None, *options)
    elif site.reads(0):
        made[0] = site.emit(data, site.shape(x), weight, grad, None, *options)
    if site.reads(1):
        a, b = (grad, x) if given["transposed"] else (x, grad)
        made[1] = site.emit(weights, a, site.shape(weight), b, *options)
    if dimensions == 3:
        made = {k: site.emit(aten.squeeze.dim, each, 2) for k, each in made.items()}
    if site.reads(2):
        made[2] = site.emit(aten.sum.dim_IntList, grad, [0, 2, 3])
    return made


# ---------------------------------------------------------------- pools


def _window(site: _Site) -> list[Any]:
    """Kernel, stride and padding, for two dimensions."""
    pairs = [list(site.given[name]) for name in ("kernel_size", "stride", "padding")]
    kernel, stride, padding = (pair * 2 if len(pair) == 1 else pair for pair in pairs)
    return [kernel, stride or kernel, padding]


def _options_of_pool(site: _Site) -> list[Any]:
    if site.given["self"].meta["val"].dim() != 4:
        raise _StaysError("3 dimensions")
    names = ("dilation", "ceil_mode", "count_include_pad", "divisor_override")
    rest = [site.given[name] for name in names if name in site.given]
    return [*_window(site), *(list(each) * (2 // len(each)) if isinstance(each, list) else each for each in rest)]


def _shape(site: _Site) -> list[Any]:
    """The shape of a pool's input, as an argument."""
    return [site.shape(site.given["self"])]


# ---------------------------------------------------------------- batch norms


def _check_norm(site: _Site) -> None:
    """Raise if blockconv does not normalise the input. Sizes that change are 2 or more."""
    given, shape = site.given, site.given["input"].meta["val"].shape
    if not given["training" if "training" in given else "train"]:
        raise _StaysError("statistics that are given")
    if len(shape) != 4:
        raise _StaysError("no (N, C, H, W)")
    if not all(map(statically_known_true, (shape[1] > 0, math.prod((shape[0], *shape[2:])) > 1))):
        raise _StaysError("fewer than two elements of a channel")


def _parts(site: _Site, count: int, op: Any, *given: Any) -> list[Any]:
    """The results of an op that has several."""
    made = site.emit(op.default, *given)
    return [site.emit(operator.getitem, made, k) for k in range(count)]


def _normalized(site: _Site, residual: Any = None, bounds: tuple[float, float] = UNBOUNDED) -> list[Any]:
    """The results of a batch norm, with an addition and bounds of the output."""
    names = "input", "weight", "bias", "running_mean", "running_var"
    numbers = site.given["momentum"], site.given["eps"], *bounds
    return _parts(site, 5, ops.batch_norm, *(site.given[name] for name in names), residual, *numbers)


def _batch_norm(site: _Site) -> dict[int | None, Any]:
    _check_norm(site)
    return _as_types(site, _normalized(site))


def _batch_norm_backward(site: _Site) -> dict[int | None, Any]:
    _check_norm(site)
    grad, x, weight, *statistics = (
        site.given[name] for name in ("grad_out", "input", "weight", "save_mean", "save_invstd")
    )
    return _as_types(site, _parts(site, 3, ops.batch_norm_backward, grad, x, weight, None, *statistics, *UNBOUNDED))


# ---------------------------------------------------------------- ops that have PyTorch's arguments and results


def _like(
    op: Any, *arguments: str | Callable[[_Site], list[Any]], count: int = 1
) -> Callable[[_Site], dict[int | None, Any]]:
    """Blockconv's op in place of PyTorch's. arguments: their names, or what gives some. count: of the results."""

    def place(site: _Site) -> dict[int | None, Any]:
        given = [x for each in arguments for x in ([site.given[each]] if isinstance(each, str) else each(site))]
        return {None: site.emit(op.default, *given)} if count == 1 else _as_types(site, _parts(site, count, op, *given))

    return place


# ---------------------------------------------------------------- batch norms with what follows them


def partition_step(joint: Any, inputs: Any, **options: Any) -> Any:
    """PyTorch's partition of the joint graph of a step, after batch norms were fused."""
    for node in joint.graph.find_nodes(op="call_function", target=_NORM):
        with ignoring(_StaysError):
            _fuse_norm(_Site(joint.graph, node))
    joint.graph.eliminate_dead_code()
    joint.recompile()
    return default_partition(joint, inputs, **options)


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


def _fuse_norm(site: _Site) -> None:
    """One op in place of a batch norm, an addition and a ReLU, and one in place of the gradients of both."""
    _check_norm(site)
    graph, node, given = site.graph, site.node, site.given
    found = _following(node)
    point = None if found is None else _fusing_point(site, found)
    if found is None or point is None:
        return
    backward = [
        each for part in node.users if part.args[1] == 1 for each in part.users if each.target == _NORM_BACKWARD
    ]
    with graph.inserting_before(point):
        parts = _normalized(site, found.residual, found.bounds)
        results = _as_types(site, parts)
    for gradient in backward if found.residual is None else ():
        _fuse_gradient(_Site(graph, gradient), found, parts[1:3], given["bias"])
    for reader in found.masked:
        reader.update_arg(1, parts[0])
    found.end.replace_all_uses_with(parts[0])
    for part in node.users:
        if part.args[1]:
            part.replace_all_uses_with(results[part.args[1]])


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
    given = arguments_of(clamps[0], clamps[0].args, clamps[0].kwargs)
    bounds = float(given.get("min_val", 0.0)), float(given.get("max_val", math.inf))
    return _Fused(clamps[0], residual, bounds, masked)


def _fusing_point(site: _Site, found: _Fused) -> Any:
    """The node before which one op can stand; None unless all values are alike in memory, and kept for the gradient."""
    value, node = site.given["input"].meta["val"], site.node
    for other in (found.end, found.residual):
        kept = None if other is None else other.meta["val"]
        if kept is not None and (kept.dim(), kept.dtype, kept.device) != (value.dim(), value.dtype, value.device):
            return None
        if kept is not None and not (_is_as_large(kept, value) and _has_strides_of(kept, value)):
            return None
    exact = element(str(value.dtype).removeprefix("torch.")).dtype.type
    if any(exact(bound) != bound for bound in found.bounds):  # masks are found by comparing with values of this type
        return None
    if "recompute" in node.meta or "recompute" in found.end.meta:
        return None
    position = {each: k for k, each in enumerate(site.graph.nodes)}
    if found.residual is None or position[found.residual] < position[node]:
        return node.next
    readers = (reader for part in node.users if part.args[1] for reader in part.users)
    return found.end if all(position[reader] > position[found.end] for reader in readers) else None


def _fuse_gradient(site: _Site, found: _Fused, statistics: Sequence[Any], bias: Any) -> None:
    """The gradient of a batch norm with that of the ReLU after it, if nobody else reads the latter."""
    mask, promised = site.given["grad_out"], site.node.meta["val"]
    kinds = {(0.0, math.inf): aten.threshold_backward.default}
    if mask.target != kinds.get(found.bounds, _CLIPPED) or len(mask.users) > 1:
        return
    if _origin(mask.args[1]) is not found.end and mask not in found.masked:
        return
    with site.graph.inserting_before(site.node):
        given = mask.args[0], site.given["input"], site.given["weight"], bias, *statistics, *found.bounds
        results = _as_types(site, _parts(site, 3, ops.batch_norm_backward, *given))
        if 0 in results:
            results[0] = _as_promised(site, results[0], promised[0])
    for part in list(site.node.users):
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


def _as_type(site: _Site, made: Any, dtype: Any) -> Any:
    same = made.meta["val"].dtype == dtype
    return made if same else site.emit(torch.ops.prims.convert_element_type.default, made, dtype)


def _as_types(site: _Site, results: Sequence[Any]) -> dict[int | None, Any]:
    """What is read of the results, in the types that tracing promised."""
    promised = site.node.meta["val"]
    return {k: _as_type(site, made, promised[k].dtype) for k, made in enumerate(results) if site.reads(k)}


_NORM, _NORM_BACKWARD = aten._native_batch_norm_legit_functional.default, aten.native_batch_norm_backward.default
_CLIPPED = aten.hardtanh_backward.default
_GROUP, _LAYER = ("input", "group", "weight"), ("input", "normalized_shape", "weight")
_OTHER_NORMS = {
    aten.native_group_norm.default: _like(ops.group_norm, *_GROUP, "bias", "eps", count=3),
    aten.native_group_norm_backward.default: _like(
        ops.group_norm_backward, "grad_out", *_GROUP, "mean", "rstd", count=3
    ),
    aten.native_layer_norm.default: _like(ops.layer_norm, *_LAYER, "bias", "eps", count=3),
    aten.native_layer_norm_backward.default: _like(
        ops.layer_norm_backward, "grad_out", *_LAYER, "mean", "rstd", count=3
    ),
}
_OWN_STATISTICS = {_NORM, _NORM_BACKWARD, *_OTHER_NORMS}
_PLACES: dict[Any, Callable[[_Site], dict[int | None, Any]]] = {
    aten.convolution.default: _convolution,
    aten.convolution_backward.default: _convolution_backward,
    _NORM: _batch_norm,
    _NORM_BACKWARD: _batch_norm_backward,
    **_OTHER_NORMS,
    aten.max_pool2d_with_indices.default: _like(ops.max_pool2d, "self", _options_of_pool),
    aten.max_pool2d_with_indices_backward.default: _like(
        ops.max_pool2d_backward, _shape, "grad_output", "indices", _options_of_pool
    ),
    aten.avg_pool2d.default: _like(ops.avg_pool2d, "self", _options_of_pool),
    aten.avg_pool2d_backward.default: _like(ops.avg_pool2d_backward, _shape, "grad_output", _options_of_pool),
    aten._adaptive_avg_pool2d.default: _like(ops.adaptive_avg_pool2d, "self", "output_size"),
    aten._adaptive_avg_pool2d_backward.default: _like(ops.adaptive_avg_pool2d_backward, _shape, "grad_output"),
}
