"""The ops of PyTorch that reach `ops` whole, and the decompositions of the others."""

import contextlib
import functools
import math
from collections.abc import Iterator
from typing import Any

import torch
from torch._decomp.decompositions import log_sigmoid_forward, max_unpool2d, upsample_compute_output_size
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensor
from torch.fx.experimental.symbolic_shapes import statically_known_true
from torch.fx.node import map_arg
from torch.nn import functional
from torch.utils._pytree import tree_leaves, tree_map_only

from blockconv.core.python import zipped
from blockconv.frontends.torch.ops import OPS

aten = torch.ops.aten
# Ops that are translated as they are, though PyTorch would decompose them.
_KEPT = frozenset(
    {
        *("hardsigmoid", "hardswish", "mish", "silu", "celu", "softplus", "_prelu_kernel", "pixel_shuffle", "lstm"),
        *("upsample_bilinear2d", "upsample_nearest2d", "_upsample_nearest_exact2d", "upsample_linear1d", "gru"),
        *(f"{mode}_pad{rank}d" for mode in ("reflection", "replication") for rank in (1, 2, 3)),
        # One op is faster than its parts, here or in PyTorch.
        *("scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu", "_safe_softmax", "baddbmm"),
        *("_log_softmax", "logsumexp", "_fused_rms_norm", "pixel_unshuffle", "im2col", "grid_sampler_2d"),
        *("upsample_trilinear3d", "upsample_bicubic2d", "_upsample_bilinear2d_aa", "_upsample_bicubic2d_aa"),
        "addr",  # whose parts give other strides than its kernel
    }
)


# Ops whose results PyTorch traces as contiguous. Their kernels give an image's memory format, or the strides of a sum.
_OF_IMAGES = {"roll", "channel_shuffle", "reflection_pad3d", "replication_pad3d"}
_OF_SUMS = {"div", "copysign", "xlogy", "logical_and", "logical_or", "logical_xor", "heaviside", "logaddexp"}


def decompositions() -> dict[Any, Any]:
    """PyTorch's decompositions to core ATen, without those of ops that are translated as they are."""
    every = dict(torch.export.default_decompositions())
    whole = _KEPT | _OF_IMAGES | _OF_SUMS | {name for name in OPS if name.endswith("_backward")}
    return {op: trace for op, trace in every.items() if getattr(op, "_opname", "") not in whole} | {
        aten.ldexp.Tensor: lambda x, exponent: x * 2.0**exponent,
        aten.native_dropout_backward.default: lambda gradient, mask, scale: gradient * mask * scale,
        # PyTorch's kernels give contiguous arrays here, and an image's memory format there.
        aten.log_sigmoid_forward.default: lambda x: tuple(y.contiguous() for y in log_sigmoid_forward(x)),
        aten.max_unpool2d.default: lambda x, *a: max_unpool2d(x, *a).contiguous(memory_format=suggest_memory_format(x)),
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default: _attention_backward,
        aten._native_multi_head_attention.default: _multi_head_attention,
        aten._transformer_encoder_layer_fwd.default: _encoder_layer,
    }


def _attention_backward(
    gradient: Any, q: Any, k: Any, v: Any, y: Any, sums: Any, dropout: float, is_causal: bool, **named: Any
) -> Any:
    """The gradients of attention as products. They compute its weights again, and read nothing else of the forward.

    Long rows of weights would need more memory than all else: PyTorch's kernel takes these by parts.
    """
    width, mask, scale = q.shape[-1], named.get("attn_mask"), named.get("scale")
    long = not statically_known_true(k.shape[-2] <= LONG * width)
    if dropout or long or q.dtype != torch.float32 or q.shape[1] != k.shape[1]:  # heads of queries may share keys
        return NotImplemented
    scale = width**-0.5 if scale is None else scale
    scores = q @ k.mT * scale
    mask = scores.new_full(scores.shape[-2:], -math.inf).triu(1) if is_causal else mask
    weights = aten._safe_softmax(scores if mask is None else scores + mask, -1)
    of_weights = gradient @ v.mT
    of_scores = weights * (of_weights - (weights * of_weights).sum(-1, keepdim=True)) * scale
    return of_scores @ k, of_scores.mT @ q, weights.mT @ gradient


LONG = 4  # times the width of a head


def _multi_head_attention(query: Any, key: Any, value: Any, width: int, heads: int, *others: Any, **named: Any) -> Any:
    """PyTorch's fast path of inference as the ops that it stands for. One with weights stays whole.

    A mask is true, or minus infinity, for what is left out. Its kind 1 is one of shape (N, S), for all queries.
    """
    qkv_weight, qkv_bias, weight, bias, *options = others
    mask, need_weights, _, kind = (*options, *(None, True, True, None)[len(options) :])[:4]
    if need_weights or named:
        return NotImplemented
    projected = zipped((query, key, value), qkv_weight.chunk(3), qkv_bias.chunk(3))
    q, k, v = (functional.linear(x, w, b).unflatten(-1, (heads, -1)).transpose(1, 2) for x, w, b in projected)
    mask = mask.logical_not() if mask is not None and mask.dtype == torch.bool else mask
    mask = mask[:, None, None] if kind == 1 else mask
    found = functional.scaled_dot_product_attention(q, k, v, mask).transpose(1, 2).flatten(2)
    return functional.linear(found, weight, bias), query.new_empty(0)


def _encoder_layer(x: Any, width: int, heads: int, *others: Any, **named: Any) -> Any:
    """PyTorch's fast path of a transformer's layer as the ops that it stands for."""
    attention, (with_gelu, norm_first, epsilon), weights = others[:4], others[4:7], others[7:15]
    mask, kind = (*others[15:], None, None)[:2]
    if named:
        return NotImplemented
    norm = functools.partial(functional.layer_norm, normalized_shape=(width,), eps=epsilon)
    first, second = (functools.partial(norm, weight=weights[k], bias=weights[k + 1]) for k in (0, 2))
    y = first(x) if norm_first else x
    x = x + _multi_head_attention(y, y, y, width, heads, *attention, mask, False, True, kind)[0]
    x = x if norm_first else first(x)
    y = functional.linear(second(x) if norm_first else x, *weights[4:6])
    x = x + functional.linear(functional.gelu(y) if with_gelu else functional.relu(y), *weights[6:])
    return x if norm_first else second(x)


def _of_sizes(op: Any, x: Any, size: Any, *others: Any) -> Any:
    """Resampling to a size or by factors as the op that has both. PyTorch's own takes no sizes that change."""
    *options, factors = others
    sizes = upsample_compute_output_size(x.shape, size, factors)
    return op(x, sizes, *options, *(factors or [None] * len(sizes)))


def _of_batch(trace: Any, x: Any, *given: Any, **named: Any) -> Any:
    """PyTorch's trace of resampling. Its checks fail for no image, so that this is traced as none of one image."""
    if not (isinstance(x.shape[0], int) and x.shape[0] == 0):
        return trace(x, *given, **named)
    return trace(x.new_empty((1, *x.shape[1:])), *given, **named)[:0]


def _like(form: Any, x: Any) -> Any:
    return torch.empty_like(x, memory_format=form) if x.dim() > 1 else x


def strides_of_kernels(graph: Any) -> None:
    """Let the values of a graph have the strides that PyTorch's kernels give, where its traces have others."""
    changed: set[Any] = set()
    strides = functools.partial(tree_map_only, torch.Tensor, torch.Tensor.stride)
    for node in (node for node in graph.nodes if node.op == "call_function"):
        name = str(getattr(node.target, "_opname", ""))
        given = [other.meta.get("val") for other in node.all_input_nodes]
        tensors = [value for value in tree_leaves(given) if isinstance(value, FakeTensor)]
        contiguous = name == "normal" or node.target is aten.pow.Scalar
        of_image = contiguous or name in _OF_IMAGES or "batch_norm" in name
        if not tensors or not (of_image or name in _OF_SUMS or changed.intersection(node.all_input_nodes)):
            continue
        args, kwargs = map_arg((node.args, node.kwargs), lambda other: other.meta["val"])
        with tensors[0].fake_mode:
            made = (aten.reshape.default if name == "view" else node.target)(*args, **kwargs)
            if of_image and (name != "roll" or args[2:]):
                form = torch.contiguous_format if contiguous else suggest_memory_format(args[0])
                made = tree_map_only(torch.Tensor, functools.partial(_like, form), made)
            elif name in _OF_SUMS and len(tensors) > 1:
                made = made.new_empty_strided(made.shape, torch.add(*args[:2]).stride())
        if strides(made) != strides(node.meta["val"]):
            node.meta["val"] = made
            changed.add(node)


@contextlib.contextmanager
def kept_whole(trains: bool) -> Iterator[None]:
    """AOTAutograd would decompose resampling while it traces, whatever table it gets: not in here."""
    key = torch._C.DispatchKey
    packets = [getattr(aten, name) for name in _KEPT if "upsample" in name and "2d" in name]
    packets += [] if trains else [aten.upsample_trilinear3d]  # whose gradient takes no sizes that change
    overloads = [overload for packet in packets for overload in (packet.default, packet.vec)]
    gradients = [aten.upsample_bilinear2d_backward.default, aten.upsample_bicubic2d_backward.default]
    gradients += [aten._upsample_bicubic2d_aa_backward.default]
    before = {op: dict(op.py_kernels) for op in (*overloads, *gradients)}
    for op in gradients:  # PyTorch's traces of these take no sizes that change
        op.py_kernels[key.Meta] = aten._upsample_bilinear2d_aa_backward.default
        op._dispatch_cache.clear()
    for op in overloads:
        if key.Meta in op.py_kernels:
            op.py_kernels[key.Meta] = functools.partial(_of_batch, op.py_kernels[key.Meta])
        for alias in (key.Autograd, key.CompositeImplicitAutograd):
            op.py_kernels.pop(alias, None)
            if op._overloadname == "vec":
                op.py_kernels[alias] = functools.partial(_of_sizes, op.overloadpacket.default)
        op._dispatch_cache.clear()
    try:
        yield
    finally:
        for op, kernels in before.items():
            op.py_kernels.clear()
            op.py_kernels.update(kernels)
            op._dispatch_cache.clear()
