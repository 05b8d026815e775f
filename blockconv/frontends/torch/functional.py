"""torch.nn.functional's convolutions and pools on blockconv's kernels, with gradients of any order.

Each is one op for autograd, autocast and torch.compile. Weights are packed at each call, since a step of training
changes them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from blockconv.core.activation import ACTIVATIONS as DEFINITIONS
from blockconv.core.activation import activation as read_activation
from blockconv.core.checks import check_flag, check_same, checked_number, checked_word
from blockconv.core.errors import ArgumentError, raised_by
from blockconv.dispatch.boundary import PADDINGS, output_paddings, pair, read_window
from blockconv.frontends.torch.library import calls

__all__ = [
    "adaptive_avg_pool2d",
    "adaptive_max_pool2d",
    "avg_pool2d",
    "batch_norm",
    "conv1d",
    "conv2d",
    "conv_transpose1d",
    "conv_transpose2d",
    "group_norm",
    "layer_norm",
    "max_pool2d",
]


def conv2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    activation: Any = None,
    residual: Any = None,
    padding_mode: str = "zeros",
) -> Any:
    """torch.nn.functional.conv2d: activation(conv(input, weight) + bias + residual), with gradients.

    input: (N, C, H, W) or (C, H, W), a CPU tensor: float32, float64, bfloat16 or float16.
    weight: (O, C / groups, KH, KW).
    bias: None, or (O,).
    stride, padding, dilation, groups, activation, residual: as in `blockconv.conv2d`.
    padding_mode: likewise, but not "symmetric". PyTorch pads, and raises its own error for more pixels than it can.

    The output is channels_last if input or weight is. Raises ArgumentError for a bad argument.
    """
    x, dilations = _batched("conv2d", input), _two(dilation)
    mode = PADDINGS[checked_word("conv2d", "padding_mode", padding_mode, PADDINGS)]
    if mode == "symmetric":
        raise ArgumentError("conv2d", "padding_mode", padding_mode, "has no gradient", "index rows and columns before")
    _check_rank("conv2d", "weight", weight, (4,), "(O, C / groups, KH, KW)")
    is_pair = [*map(type, _two(padding))] == [int, int]  # the op checks these, and stride and dilation
    # torch.compile follows this function, also with sizes that change.
    if not (is_pair and mode == "constant") and not torch.compiler.is_dynamo_compiling():
        _, padding, dilations = read_window("conv2d", tuple(weight.shape[2:]), stride, padding, dilation)
    elif padding == "same" and _two(stride) == (1, 1):
        total = [dilations[k] * (weight.shape[2 + k] - 1) for k in (0, 1)]
        padding = tuple((all_ // 2, all_ - all_ // 2) for all_ in total)
    (top, bottom), (left, right) = map(_two, _two(0 if padding == "valid" else padding))
    if mode != "constant" or (top, left) != (bottom, right):
        theirs = {"edge": "replicate", "wrap": "circular"}.get(mode, mode)
        x, top, left = _F.pad(x, (left, right, top, bottom), theirs), 0, 0
    y = calls.conv2d(x, weight, bias, _two(stride), (top, left), dilations, groups)
    y = _as_given(y, input)
    if residual is not None:
        _check_rank("conv2d", "residual", residual, (3, 4), "of the output's shape")
        check_same("conv2d", "residual", tuple(residual.shape), tuple(y.shape), "the output")
        y = y + residual.to(y.dtype)
    return _activated(y, activation)


def conv1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
    *,
    activation: Any = None,
    padding_mode: str = "zeros",
) -> Any:
    """torch.nn.functional.conv1d with gradients: `conv2d` over (N, C, 1, L)."""
    window = {"stride": stride, "dilation": dilation, "padding": padding}
    others = {"bias": bias, "groups": groups, "activation": activation, "padding_mode": padding_mode}
    return _over_a_row("conv1d", conv2d, input, weight, window, **others)


def _over_a_row(
    op: str, convolution: Callable[..., Any], input: Any, weight: Any, window: dict[str, Any], **others: Any
) -> Any:
    """A 1-D convolution as a 2-D one over one row. The output is contiguous, as PyTorch's is. Padding may be a word."""
    _check_rank(op, "input", input, (2, 3), "(N, C, L) or (C, L)")
    _check_rank(op, "weight", weight, (3,), "three dimensions")
    for name, value in window.items():
        given = value if isinstance(value, (tuple, list)) else (value,)
        others[name] = value if isinstance(value, str) else (int("padding" not in name), *given)
    with nullcontext() if torch.compiler.is_dynamo_compiling() else raised_by(op):
        return convolution(input.contiguous().unsqueeze(-2), weight.unsqueeze(-2), **others).squeeze(-2)


def conv_transpose2d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
    *,
    activation: Any = None,
) -> Any:
    """torch.nn.functional.conv_transpose2d with gradients: the gradient of a convolution's input.

    input: (N, C, H, W) or (C, H, W).
    weight: (C, O / groups, KH, KW).
    activation: as in `blockconv.conv_transpose2d`.

    The other arguments are PyTorch's. Raises ArgumentError for a bad argument.
    """
    name = "conv_transpose2d"
    steps, dilations, more = map(_two, (stride, dilation, output_padding))
    edges: Any = [*map(_two, _two(padding))]
    x = _batched(name, input)
    _check_rank(name, "weight", weight, (4,), "(C, O / groups, KH, KW)")
    if not torch.compiler.is_dynamo_compiling():  # which follows this function, also with sizes that change
        steps, edges, dilations = read_window(name, tuple(weight.shape[2:]), stride, padding, dilation)
        more, groups = output_paddings(name, output_padding, steps, dilations), pair(name, "groups", groups)[0]
    n, channels = x.shape[0], weight.shape[1] * groups
    reach = [(x.shape[2 + k] - 1) * steps[k] + dilations[k] * (weight.shape[2 + k] - 1) + 1 for k in (0, 1)]
    if all(0 <= edges[k][0] - edges[k][1] + more[k] < steps[k] for k in (0, 1)):
        sizes, begins = [reach[k] - sum(edges[k]) + more[k] for k in (0, 1)], [begin for begin, _ in edges]
        y = calls.conv2d_backward_data([n, channels, *sizes], weight, x, bias, steps, begins, dilations, groups)
    else:  # a convolution of the output would have more pixels than the input
        whole = calls.conv2d_backward_data([n, channels, *reach], weight, x, None, steps, (0, 0), dilations, groups)
        cut = [side for k in (1, 0) for side in (-edges[k][0], more[k] - edges[k][1])]
        y = _F.pad(whole, cut)
        y = y if bias is None else y + bias.to(y.dtype)[:, None, None]
    return _activated(_as_given(y, input), activation)


def conv_transpose1d(
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    output_padding: Any = 0,
    groups: int = 1,
    dilation: Any = 1,
) -> Any:
    """torch.nn.functional.conv_transpose1d with gradients: `conv_transpose2d` over (N, C, 1, L)."""
    window = {"stride": stride, "dilation": dilation, "padding": padding, "output_padding": output_padding}
    return _over_a_row("conv_transpose1d", conv_transpose2d, input, weight, window, bias=bias, groups=groups)


def max_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    """torch.nn.functional.max_pool2d, with a gradient. input: (N, C, H, W) or (C, H, W)."""
    op, sizes = "max_pool2d", _window(kernel_size, stride, padding)
    x, gives_both = _batched(op, input), check_flag(op, "return_indices", return_indices)
    found = calls.max_pool2d(x, *sizes, _two(dilation), check_flag(op, "ceil_mode", ceil_mode))
    values, indices = (_as_given(part, input) for part in found)
    return (values, indices) if gives_both else values


def avg_pool2d(
    input: Any,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    """torch.nn.functional.avg_pool2d, with a gradient. input: (N, C, H, W) or (C, H, W)."""
    op, sizes = "avg_pool2d", _window(kernel_size, stride, padding)
    x = _batched(op, input)
    flags = check_flag(op, "ceil_mode", ceil_mode), check_flag(op, "count_include_pad", count_include_pad)
    return _as_given(calls.avg_pool2d(x, *sizes, *flags, divisor_override), input)


def adaptive_avg_pool2d(input: Any, output_size: Any) -> Any:
    """torch.nn.functional.adaptive_avg_pool2d, with a gradient. input: (N, C, H, W) or (C, H, W)."""
    op = "adaptive_avg_pool2d"
    return _as_given(calls.adaptive_avg_pool2d(_batched(op, input), _sizes(op, input, output_size)), input)


def adaptive_max_pool2d(input: Any, output_size: Any, return_indices: bool = False) -> Any:
    """torch.nn.functional.adaptive_max_pool2d, with a gradient. input: (N, C, H, W) or (C, H, W).

    It runs on blockconv where `output_size` divides the input's size, else in PyTorch.
    """
    op = "adaptive_max_pool2d"
    _batched(op, input)
    sizes = _sizes(op, input, output_size)
    steps = [(input.shape[k - 2] // max(1, size), input.shape[k - 2] % max(1, size)) for k, size in enumerate(sizes)]
    if any(rest or not step for step, rest in steps):
        return _F.adaptive_max_pool2d(input, output_size, return_indices)
    return max_pool2d(input, [step for step, _ in steps], return_indices=return_indices)


def _sizes(op: str, input: Any, output_size: Any) -> list[Any]:
    """The height and the width of an adaptive pool's output; None stands for the input's."""
    sizes = _two(output_size)
    if len(sizes) != 2 or any(size is not None and (isinstance(size, str) or size < 0) for size in sizes):
        rule = "has to be an int of at least 0, or a pair of such ints and Nones"
        raise ArgumentError(op, "output_size", output_size, rule)
    return [input.shape[k - 2] if size is None else size for k, size in enumerate(sizes)]


def batch_norm(
    input: Any,
    running_mean: Any,
    running_var: Any,
    weight: Any = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """torch.nn.functional.batch_norm, with first derivatives.

    Training with (N, C, H, W) of at least two elements a channel runs on blockconv's kernels, in contiguous and
    channels_last memory. Everything else runs in PyTorch.
    """
    _check_rank("batch_norm", "input", input, range(9), "(N, C, *)")
    is_native = (
        check_flag("batch_norm", "training", training)
        and input.dim() == 4
        and 0 not in input.shape
        and input[:, 0].numel() > 1
        and input.is_floating_point()
    )
    checked_number("batch_norm", "momentum", momentum)
    checked_number("batch_norm", "eps", eps)
    is_known = eps > 0 and (running_mean is None) is (running_var is None)
    if not is_native or not is_known:  # PyTorch runs it, or says what is wrong
        return _F.batch_norm(input, running_mean, running_var, weight, bias, training, momentum, eps)
    kept = running_mean, running_var
    y, _, _, *new = calls.batch_norm(input, weight, bias, *kept, None, momentum, eps, -math.inf, math.inf)
    with torch.no_grad():
        for running, updated in zip(kept, new, strict=True):
            if running is not None:
                running.copy_(updated)
    return y


def group_norm(input: Any, num_groups: int, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """torch.nn.functional.group_norm, with first derivatives. input: (N, C, *), a CPU tensor of floats.

    Images are normalised in contiguous and channels_last memory. Raises ArgumentError for a bad argument.
    """
    _check_rank("group_norm", "input", input, range(2, 9), "(N, C, *)")
    return calls.group_norm(input, num_groups, weight, bias, eps)[0]


def layer_norm(input: Any, normalized_shape: Any, weight: Any = None, bias: Any = None, eps: float = 1e-5) -> Any:
    """torch.nn.functional.layer_norm, with first derivatives. input: a CPU tensor of floats.

    The output is contiguous, as PyTorch's is. Raises ArgumentError for a bad argument.
    """
    sizes = tuple(normalized_shape) if isinstance(normalized_shape, (tuple, list)) else (normalized_shape,)
    return calls.layer_norm(input, sizes, weight, bias, eps)[0]


def _window(kernel_size: Any, stride: Any, padding: Any) -> tuple[Any, ...]:
    kernel, steps = _two(kernel_size), () if stride is None else _two(stride)
    return kernel, steps or kernel, _two(padding)


def _two(value: Any) -> tuple[Any, ...]:
    """For H and for W. The ops check what it is: torch.compile follows these functions, and not the ops."""
    given = tuple(value) if isinstance(value, (tuple, list)) else (value,)
    return given * 2 if len(given) == 1 else given


def _batched(op: str, input: Any) -> Any:
    """(N, C, H, W) of an input that may have no N."""
    _check_rank(op, "input", input, (3, 4), "(N, C, H, W) or (C, H, W)")
    return input if input.dim() == 4 else input.unsqueeze(0)


def _as_given(y: Any, input: Any) -> Any:
    """The output with N only if the input has it."""
    return y if input.dim() == 4 else y.squeeze(0)


def _check_rank(op: str, argument: str, value: Any, ranks: Sequence[int], axes: str) -> None:
    """Raise ArgumentError for what is no tensor of one of these ranks."""
    if not isinstance(value, torch.Tensor):
        raise ArgumentError(
            op, argument, value, f"has to be a torch tensor, {axes}", "for an array give torch.from_numpy(x)"
        )
    if value.dim() not in ranks:
        raise ArgumentError(op, argument, tuple(value.shape), f"has to be {axes}")


_F: Any = torch.nn.functional
_ACTIVATIONS: dict[str, Callable[..., Any]] = {  # those whose function of PyTorch has another name, or fewer parameters
    "none": lambda x: x,
    "clip": torch.clamp,
    "hardsigmoid": lambda x, alpha, beta: (x * alpha + beta).clamp(0, 1),
}


def _activated(y: Any, given: Any) -> Any:
    """An activation by PyTorch, which has its gradient."""
    if given is None:
        return y
    known = read_activation(given)
    function = _ACTIVATIONS.get(known.name) or getattr(_F, known.name)
    return function(y, *(known.first, known.second)[: len(DEFINITIONS[known.name].parameters)])
