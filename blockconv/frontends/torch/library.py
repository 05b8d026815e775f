"""Ops of PyTorch's dispatcher that run on blockconv's kernels, with gradients: `torch.ops.blockconv`.

The three convolutions differentiate into each other, so derivatives of any order exist:

- conv2d(x, w): dx = conv2d_backward_data(g, w), dw = conv2d_backward_weights(x, g)
- conv2d_backward_data(g, w), of gradient h: dg = conv2d(h, w), dw = conv2d_backward_weights(h, g)
- conv2d_backward_weights(x, g), of gradient h: dx = conv2d_backward_data(g, h), dg = conv2d(x, h)

All ops but batch norms and max pools are linear in each operand, so their forward derivatives (tangents) are sums of
the ops themselves: of conv2d, conv2d(dx, w) + conv2d(x, dw).

Under autocast, convolutions run in its type.

PyTorch's dispatcher takes 12 µs for an op in Python, and 20 with a gradient. So `calls` has each op as a function that
goes by the dispatcher only if something besides autograd watches: a mode, a transform, a trace, autocast, a profiler.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch

from blockconv.api.functional import CONV2D
from blockconv.api.gradients import BACKWARD_DATA, conv2d_backward_weights
from blockconv.api.norms import (
    UNBOUNDED,
    gradients,
    group_norm,
    group_norm_backward,
    layer_norm,
    layer_norm_backward,
    normalized,
)
from blockconv.api.pooling import (
    adaptive_avg_pool2d,
    adaptive_avg_pool2d_backward,
    avg_pool2d,
    avg_pool2d_backward,
    max_pool2d,
    max_pool2d_backward,
)
from blockconv.core.interop import followed, follows_tangents, has_tangent
from blockconv.core.python import zipped

calls: Any = SimpleNamespace()
_library = torch.library.Library("blockconv", "DEF")
_CONVOLVED = "SymInt[] stride, SymInt[] padding, SymInt[] dilation, SymInt groups"
_POOLED = "int[] kernel_size, int[] stride, int[] padding"
Ints = Sequence[int]
Run = Callable[..., Any]


def _no_derivative(ctx: Any, *_: Any) -> Any:
    raise NotImplementedError("blockconv's norms have first derivatives: give those of torch.nn.functional")


def _define(
    schema: str,
    run: Run,
    fake: Run,
    keep: Run = lambda *_: None,
    backward: Run = _no_derivative,
    along: Run | None = None,
    autocast: bool = False,
) -> None:
    """An op of CPU tensors, and its derivative.

    run: what it does, with gradients off. fake: what it gives of fake tensors.
    keep(ctx, inputs, output): what backward(ctx, *gradients) reads. along: see `_call`.
    """
    name = schema.partition("(")[0]
    _library.define(schema, tags=(torch.Tag.pt2_compliant_tag,))
    _library.impl(name, lambda *args: run(*map(_detached, args)), "CPU")
    torch.library.register_fake(f"blockconv::{name}", fake, lib=_library)
    torch.library.register_autograd(f"blockconv::{name}", backward, setup_context=keep, lib=_library)
    op = getattr(torch.ops.blockconv, name).default
    if autocast:
        _library.impl(name, _in_autocast(op), "AutocastCPU")
    call = _call(op, run, keep, backward, along)
    setattr(calls, name, call)
    # Transforms meet an op's own call here: `Transformed` knows them, and register_autograd would drop tangents.
    _library.impl(name, call, "FuncTorchDynamicLayerFrontMode")


def _detached(value: Any) -> Any:
    """A tensor without its graph, which PyTorch keeps. One with a tangent stays, and is refused as an array."""
    return value.detach() if isinstance(value, torch.Tensor) and not has_tangent(value) else value


def _call(op: Any, run: Run, keep: Run, backward: Run, along: Any = None) -> Any:
    """An op as a function of tensors, without PyTorch's dispatcher where nobody else needs it.

    along(inputs, outputs, tangents): the tangents of the outputs; a tangent of an input is None if it has none.
    """

    class Function(torch.autograd.Function):  # type: ignore[misc]
        @staticmethod
        def forward(ctx: Any, *args: Any) -> Any:
            output = run(*args)
            keep(ctx, args, output)
            return output

    class Transformed(torch.autograd.Function):  # type: ignore[misc]
        """The op under transforms of torch.func, and with tangents. Each transform calls it one level further down."""

        @staticmethod
        def forward(*args: Any) -> Any:
            return call(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
            keep(ctx, inputs, output)
            ctx.set_materialize_grads(False)
            ctx.inputs = [None if isinstance(x, torch.Tensor) else x for x in inputs]
            kept = (*inputs, *(output if isinstance(output, tuple) else (output,)))
            ctx.save_for_forward(*(x if isinstance(x, torch.Tensor) else None for x in kept))

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            return (None,) * len(ctx.inputs) if grads[0] is None else backward(ctx, *grads)

        @staticmethod
        def vmap(info: Any, in_dims: Any, *args: Any) -> Any:
            return _each_by_itself(call, info.batch_size, in_dims, args)

    def jvp(ctx: Any, *tangents: Any) -> Any:
        kept, count = ctx.saved_tensors, len(ctx.inputs)
        inputs = [other if x is None else x for x, other in zip(kept, ctx.inputs, strict=False)]
        return along(inputs, kept[count:], tangents)

    Function.backward = staticmethod(backward)
    if along is not None:
        Transformed.jvp = staticmethod(jvp)
    for kind in (Function, Transformed):
        kind.__name__ = kind.__qualname__ = op.__name__.partition(".")[0]

    def call(*args: Any) -> Any:
        if torch.compiler.is_dynamo_compiling():
            return op(*args)
        if torch._C._are_functorch_transforms_active() or follows_tangents():
            return Transformed.apply(*args)
        if _is_watched(args):
            return op(*args)
        differentiable = torch.is_grad_enabled() and torch._C._any_requires_grad(*args)
        return Function.apply(*args) if differentiable else run(*args)

    return call


def _each_by_itself(call: Run, count: int, dims: Sequence[Any], args: Sequence[Any]) -> Any:
    """An op of a batch of arguments, one after the other. dims: the batch's axis of each argument, or None."""
    pairs = [*zipped(args, dims)]
    found = [
        call(*(x.select(dim, k) if isinstance(x, torch.Tensor) and dim is not None else x for x, dim in pairs))
        for k in range(count)
    ]
    if not isinstance(found[0], tuple):
        return torch.stack(found), 0
    return tuple(map(torch.stack, zipped(*found))), (0,) * len(found[0])


PLAIN_TENSORS = torch.Tensor, torch.nn.Parameter
# Text, complex numbers and dicts are no arguments of any op: the op itself says what has to be there.
_TAKEN = frozenset((*PLAIN_TENSORS, torch.Size, list, tuple, int, bool, float, type(None), str, bytes, complex, dict))


def _linear(name: str, *operands: int, bias: int | None = None) -> Run:
    """The tangent of an op that is linear in each operand, and adds a bias."""

    def along(inputs: Sequence[Any], outputs: Sequence[Any], tangents: Sequence[Any]) -> Any:
        terms = []
        for k in operands:
            if tangents[k] is not None:
                given = [None if i == bias else tangents[k] if i == k else x for i, x in enumerate(inputs)]
                terms.append(getattr(calls, name)(*given))
        if bias is not None and tangents[bias] is not None:
            terms.append(tangents[bias][:, None, None].expand_as(outputs[0]))
        return sum(terms[1:], terms[0])

    return along


def _is_watched(args: Sequence[Any]) -> bool:
    """Whether more than autograd has to see a call of an op: then it goes by PyTorch's dispatcher."""
    for value in args:
        kind = type(value)
        if kind not in _TAKEN or (kind in PLAIN_TENSORS and (not value.is_cpu or value.is_neg())):
            return True
    return followed() or torch.is_autocast_enabled("cpu") or torch.autograd._profiler_enabled()


def _in_autocast(op: Any) -> Run:
    autocast = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastCPU)
    taken = torch.float32, torch.bfloat16, torch.float16

    def call(*args: Any) -> Any:
        dtype = torch.get_autocast_dtype("cpu")
        with torch._C._ExcludeDispatchKeyGuard(autocast):
            return op(*(x.to(dtype) if isinstance(x, torch.Tensor) and x.dtype in taken else x for x in args))

    return call


# ---------------------------------------------------------------- memory formats


def _is_last(tensor: Any) -> bool:
    """Whether an image's strides say channels_last, as PyTorch reads them: also those of axes of one element."""
    if tensor.dim() != 4:
        return False
    (_, c, h, w), (image, channel, row, pixel) = tensor.shape, tensor.stride()
    ascends = channel > 0 and channel * c <= pixel and pixel * w <= row and row * h <= image
    return bool(ascends and row * h != channel and 0 not in tensor.shape)


def _layout(*tensors: Any) -> str:
    """The memory format of a convolution's output: channels_last if one of its operands is."""
    return "NHWC" if any(map(_is_last, tensors)) else "NCHW"


_FORMATS = {"NHWC": torch.channels_last, "NCHW": torch.contiguous_format}


def _empty(like: Any, shape: Ints, layout: str) -> Any:
    return torch.empty(shape, dtype=like.dtype, device=like.device, memory_format=_FORMATS[layout])


def _laid_out(grad: Any, layout: str) -> Any:
    """A gradient in the memory format of the forward op, so that its results have PyTorch's strides.

    Transforms of torch.func hide the strides.
    """
    if torch._C._are_functorch_transforms_active() or _layout(grad) == layout:
        return grad
    return grad.clone(memory_format=_FORMATS[layout])


# ---------------------------------------------------------------- convolutions


def _tuples(options: Sequence[Any]) -> tuple[Any, ...]:
    """Stride, padding, dilation and groups, as the drop-in functions have them."""
    return *map(tuple, options[:3]), options[3]


def _conv2d(x: Any, w: Any, bias: Any, *options: Any) -> Any:
    given = *_tuples(options), None, "auto", "default"
    return CONV2D((x, None, w, bias), given, (), out_layout=_layout(x, w))[0]


def _fake_conv2d(x: Any, w: Any, bias: Any, *options: Any) -> Any:
    torch._check(x.dim() == 4 and w.dim() == 4, lambda: "blockconv::conv2d: input and weight have four dimensions")
    return _empty(x, torch.ops.aten.conv2d(x, w, None, *options).shape, _layout(x, w))


def _derivative(name: str, made: int, *, bias: int | None) -> tuple[Run, Run, Run, bool]:
    """Of one of the three: the last arguments of `_define`.

    made: which of input, weight and output it makes of the others. bias: its place.
    """
    kept = [k for k in range(3) if k != made]

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.options = inputs[-4:]
        ctx.save_for_backward(*(inputs[k] for k in kept))

    def backward(ctx: Any, given: Any) -> Any:
        needs, options = ctx.needs_input_grad, ctx.options
        given = given if bias is None else _laid_out(given, _layout(*ctx.saved_tensors))
        parts: Any = (*ctx.saved_tensors[:made], given, *ctx.saved_tensors[made:])
        x, w, y = parts
        found = [
            made != 0 and needs[0] and calls.conv2d_backward_data(x.shape, w, y, None, *options),
            made != 1 and needs[1] and calls.conv2d_backward_weights(x, w.shape, y, *options),
            made != 2 and needs[2] and calls.conv2d(x, w, None, *options),
        ]
        if bias is not None:
            found[bias:] = [needs[bias] and given.sum((0, 2, 3))]
        return *(None if one is False else one for one in found), *(None,) * 4

    return keep, backward, _linear(name, *kept, bias=bias), True


_define(
    f"conv2d(Tensor input, Tensor weight, Tensor? bias, {_CONVOLVED}) -> Tensor",
    _conv2d,
    _fake_conv2d,
    *_derivative("conv2d", 2, bias=2),
)
_define(
    f"conv2d_backward_data(SymInt[] input_shape, Tensor weight, Tensor grad, Tensor? bias, {_CONVOLVED}) -> Tensor",
    lambda shape, w, grad, bias, *options: BACKWARD_DATA(
        (grad, w, bias), (tuple(shape), *_tuples(options), None, "auto", "default"), out_layout=_layout(grad, w)
    )[0],
    lambda shape, w, grad, *options: _empty(grad, shape, _layout(grad, w)),
    *_derivative("conv2d_backward_data", 0, bias=3),
)
_define(
    f"conv2d_backward_weights(Tensor input, SymInt[] weight_shape, Tensor grad, {_CONVOLVED}) -> Tensor",
    lambda x, shape, grad, *options: conv2d_backward_weights(
        x, tuple(shape), grad, *_tuples(options), out=_empty(x, shape, _layout(x, grad))
    ),
    lambda x, shape, grad, *options: _empty(x, shape, _layout(x, grad)),
    *_derivative("conv2d_backward_weights", 1, bias=None),
)


# ---------------------------------------------------------------- pools


def _pool(run: Run, like: int = 0) -> Run:
    """A pool or its gradient, with lists as tuples. like: the argument whose memory format the result has."""

    def call(*args: Any) -> Any:
        given = [tuple(each) if isinstance(each, list) else each for each in args]
        return run(*given, out_layout=_layout(args[like]))

    return call


def _fake_pool(op: Any) -> Run:
    """The result of PyTorch's own op, in the input's memory format."""

    def call(x: Any, *options: Any) -> Any:
        found = op(x, *options)
        parts = found if isinstance(found, tuple) else (found,)
        made = tuple(_empty(part, part.shape, _layout(x)) for part in parts)
        return made if isinstance(found, tuple) else made[0]

    return call


def _chosen(x: Any, indices: Any) -> Any:
    """The elements that a max pool chose."""
    return x.flatten(2).gather(2, indices.flatten(2)).view(indices.shape)


def _define_pool(name: str, options: str, run: Run, fake: Run, gradient: Run, along: Run | None = None) -> None:
    """A pool and its gradient, each the other's derivative. along: see `_call`; a max pool has its own.

    The gradient takes the pool's options, but an adaptive pool has one alone, its output's size. A max pool gives
    indices too, which take the options' part in the derivative of its gradient.
    """
    backward, is_max, is_adaptive = f"{name}_backward", along is not None, "adaptive" in name

    def keep(ctx: Any, inputs: Any, output: Any) -> None:
        x, *ctx.options = inputs
        ctx.shape, ctx.layout = x.shape, _layout(x)
        if is_max:
            ctx.save_for_backward(output[1])
            ctx.mark_non_differentiable(output[1])

    def of_pool(ctx: Any, grad: Any, *_: Any) -> Any:
        options = () if is_adaptive else ctx.options
        of_x = getattr(calls, backward)(ctx.shape, _laid_out(grad, ctx.layout), *ctx.saved_tensors, *options)
        return of_x, *(None,) * len(ctx.options)

    def keep_gradient(ctx: Any, inputs: Any, output: Any) -> None:
        _, grad, *options = inputs
        ctx.count = len(options)
        if is_max:
            ctx.save_for_backward(options[0])
        else:
            ctx.options = (grad.shape[2:],) if is_adaptive else options

    def of_gradient(ctx: Any, given: Any) -> Any:
        of_grad = _chosen(given, *ctx.saved_tensors) if is_max else getattr(calls, name)(given, *ctx.options)
        return None, of_grad, *(None,) * ctx.count

    made, more = ("(Tensor, Tensor)", ", Tensor indices") if is_max else ("Tensor", "")
    more += "" if is_adaptive else f", {options}"
    _define(f"{name}(Tensor input, {options}) -> {made}", _pool(run), fake, keep, of_pool, along or _linear(name, 0))
    _define(
        f"{backward}(SymInt[] input_shape, Tensor grad{more}) -> Tensor",
        _pool(gradient, like=1),
        lambda shape, grad, *_: _empty(grad, shape, _layout(grad)),
        keep_gradient,
        of_gradient,
        _linear(backward, 1),
    )


_define_pool(
    "max_pool2d",
    f"{_POOLED}, int[] dilation, bool ceil_mode",
    partial(max_pool2d, return_indices=True),
    _fake_pool(torch.ops.aten.max_pool2d_with_indices),
    lambda shape, grad, indices, *options, **how: max_pool2d_backward(shape, grad, *options, indices=indices, **how),
    lambda inputs, outputs, tangents: (_chosen(tangents[0], outputs[1]), None),
)
_define_pool(
    "avg_pool2d",
    f"{_POOLED}, bool ceil_mode, bool count_include_pad, int? divisor_override",
    avg_pool2d,
    _fake_pool(torch.ops.aten.avg_pool2d),
    avg_pool2d_backward,
)
_define_pool(
    "adaptive_avg_pool2d",
    "SymInt[] output_size",
    adaptive_avg_pool2d,
    lambda x, size: _empty(x, (*x.shape[:2], *size), _layout(x)),
    adaptive_avg_pool2d_backward,
)


# ---------------------------------------------------------------- batch normalisation


def _dense(x: Any) -> Any:
    """The values of a tensor, in the memory format that its results have."""
    return _detached(x).contiguous(memory_format=_FORMATS[_layout(x)])


def _computed(x: Any) -> Any:
    """The type of the statistics of a norm."""
    return torch.float64 if x.dtype is torch.float64 else torch.float32


def _batch_norm(
    x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, residual: Any, *numbers: float
) -> Any:
    momentum, eps, low, high = numbers
    added = None if residual is None else _dense(residual)
    given: Any = (weight, bias), (running_mean, running_var), momentum, eps, added, (low, high)
    y, mean, *statistics = normalized(_dense(x), *given)
    return y, mean, *(mean.new_empty(0) if each is None else each for each in statistics)


def _fake_batch_norm(x: Any, weight: Any, bias: Any, running_mean: Any, running_var: Any, *rest: Any) -> Any:
    kind = _computed(x)
    made = [x.new_empty(x.shape[1], dtype=kind) for _ in range(2)]
    new = [x.new_empty(x.shape[1] if given is not None else 0, dtype=kind) for given in (running_mean, running_var)]
    return _empty(x, x.shape, _layout(x)), *made, *new


def _keep(ctx: Any, weight: Any, bias: Any, output: Any) -> None:
    """The types of a norm's parameters. Its statistics have no gradients."""
    ctx.types = [None if each is None else each.dtype for each in (weight, bias)]
    ctx.mark_non_differentiable(*output[1:])


def _keep_batch_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, weight, bias, _, _, residual, _, _, *ctx.bounds = inputs
    _keep(ctx, weight, bias, output)
    ctx.save_for_backward(x, weight, bias, *output[1:3], None if residual is None else output[0])


def _of_batch_norm(ctx: Any, grad: Any, *_: Any) -> Any:
    *given, y = ctx.saved_tensors
    low, high = ctx.bounds
    if y is not None:  # kernels know the bounds of sums without a residual
        grad, low, high = torch.where((y <= low) | (y >= high), 0, grad), *UNBOUNDED
    of_x, *rest = calls.batch_norm_backward(grad, *given, low, high)
    return of_x, *_of_parameters(ctx, rest), None, None, None if y is None else grad, *(None,) * 4


def _of_parameters(ctx: Any, found: Sequence[Any]) -> list[Any]:
    """The gradients of weight and bias in their types; None for one that is not given."""
    return [None if kind is None else g.to(kind) for g, kind in zipped(found, ctx.types)]


# Returns (output, means, inverses, running means and variances as they become, empty if they are not given).
_define(
    "batch_norm(Tensor input, Tensor? weight, Tensor? bias, Tensor? running_mean, Tensor? running_var,"
    " Tensor? residual, float momentum, float eps, float low, float high) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _batch_norm,
    _fake_batch_norm,
    _keep_batch_norm,
    _of_batch_norm,
)
_define(
    "batch_norm_backward(Tensor grad, Tensor input, Tensor? weight, Tensor? bias, Tensor mean, Tensor inverse,"
    " float low, float high) -> (Tensor, Tensor, Tensor)",
    lambda grad, x, weight, bias, mean, inverse, low, high: gradients(
        _dense(grad), _dense(x), (weight, bias), mean, inverse, (low, high)
    ),
    lambda grad, x, weight, bias, mean, *_: (_empty(x, x.shape, _layout(x)), *map(torch.empty_like, (mean, mean))),
)


# ---------------------------------------------------------------- group and layer normalisation


def _dense_image(x: Any) -> Any:
    return _dense(x) if x.dim() == 4 else x


def _fake_norm(x: Any, over: Any, *_: Any) -> Any:
    """over: the groups, or the sizes of a row."""
    kind, is_rows = _computed(x), isinstance(over, (tuple, list))
    shape = (*x.shape[: x.dim() - len(over)], *(1 for _ in over)) if is_rows else (x.shape[0], over)
    y = x.new_empty(x.shape) if is_rows or x.dim() != 4 else _empty(x, x.shape, _layout(x))
    return y, x.new_empty(shape, dtype=kind), x.new_empty(shape, dtype=kind)


def _fake_norm_backward(grad: Any, x: Any, over: Any, *_: Any) -> Any:
    y, like, _ = _fake_norm(x, over)
    shape = over if isinstance(over, (tuple, list)) else x.shape[1:2]
    return y, like.new_empty(shape), like.new_empty(shape)


def _keep_norm(ctx: Any, inputs: Any, output: Any) -> None:
    x, ctx.over, weight, bias, _ = inputs
    _keep(ctx, weight, bias, output)
    ctx.save_for_backward(x, weight, *output[1:])


def _define_norm(name: str, over: str, run: Run, gradient: Run) -> None:
    """A norm and its gradient. It gives (output, means, inverses), as PyTorch's native norms do."""

    def backward(ctx: Any, grad: Any, *_: Any) -> Any:
        x, *known = ctx.saved_tensors
        of_x, *rest = getattr(calls, f"{name}_backward")(grad, x, ctx.over, *known)
        return of_x, None, *_of_parameters(ctx, rest), None

    made = "(Tensor, Tensor, Tensor)"
    _define(
        f"{name}(Tensor input, {over}, Tensor? weight, Tensor? bias, float eps) -> {made}",
        run,
        _fake_norm,
        _keep_norm,
        backward,
    )
    _define(
        f"{name}_backward(Tensor grad, Tensor input, {over}, Tensor? weight, Tensor mean, Tensor inverse) -> {made}",
        gradient,
        _fake_norm_backward,
    )


_define_norm(
    "group_norm",
    "SymInt num_groups",
    lambda x, *given: group_norm(_dense_image(x), *given),
    lambda grad, x, *given: group_norm_backward(grad, _dense_image(x), *given),
)
_define_norm("layer_norm", "SymInt[] normalized_shape", layer_norm, layer_norm_backward)
