"""Modules of PyTorch on blockconv's kernels, in place of torch.nn's own, and back."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as torch_functional

from blockconv.api.modules import Conv2d as Packed
from blockconv.api.pooling import max_pool2d
from blockconv.core.errors import ArgumentError
from blockconv.core.interop import has_tangent, traced
from blockconv.eager import functional
from blockconv.frontends.torch.reader import version, warn_of_unseen


class _Packing:
    """Packed weights belong to one process. Copies and pickles do not hold them."""

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}


def _gradient_needed(*tensors: Any) -> bool:
    enabled = torch.is_grad_enabled()
    return any(x is not None and ((enabled and x.requires_grad) or has_tangent(x)) for x in tensors)


def _padded(module: Any, input: Any) -> tuple[Any, Any]:
    """A convolution's input and the padding that it still needs: none after padding by a mode."""
    if module.padding_mode == "zeros":
        return input, module.padding
    return torch_functional.pad(input, module._reversed_padding_repeated_twice, mode=module.padding_mode), 0


class Conv2d(_Packing, torch.nn.Conv2d):  # type: ignore[misc]
    """torch.nn.Conv2d on blockconv's kernels. Without gradients weights are packed once, until they change."""

    def _conv_forward(self, input: Any, weight: Any, bias: Any) -> Any:
        input, padding = _padded(self, input)
        options = self.stride, padding, self.dilation, self.groups
        is_cast = weight.dtype is not torch.float32 and torch.is_autocast_enabled("cpu")
        if is_cast or traced(input, weight) or _gradient_needed(input, weight, bias):
            return functional.conv2d(input, weight, bias, *options)
        key = tuple(version(x) for x in (weight, bias) if x is not None), options
        held: Any = self.__dict__.get("_packed")
        if held is None or held[0] != key:
            if held is not None:
                warn_of_unseen("Conv2d", held[0][0], key[0])
            held = key, Packed(weight.detach(), None if bias is None else bias.detach(), *options), weight, bias
            self.__dict__["_packed"] = held
        return held[1](input)


class Conv1d(torch.nn.Conv1d):  # type: ignore[misc]
    """torch.nn.Conv1d on blockconv's kernels."""

    def _conv_forward(self, input: Any, weight: Any, bias: Any) -> Any:
        input, padding = _padded(self, input)
        return functional.conv1d(input, weight, bias, self.stride, padding, self.dilation, self.groups)


class ConvTranspose1d(torch.nn.ConvTranspose1d):  # type: ignore[misc]
    """torch.nn.ConvTranspose1d on blockconv's kernels."""

    def forward(self, input: Any, output_size: Any = None) -> Any:
        """As torch.nn.ConvTranspose1d."""
        more = self._output_padding(input, output_size, self.stride, self.padding, self.kernel_size, 1, self.dilation)
        options = self.stride, self.padding, more, self.groups, self.dilation
        return functional.conv_transpose1d(input, self.weight, self.bias, *options)


class ConvTranspose2d(torch.nn.ConvTranspose2d):  # type: ignore[misc]
    """torch.nn.ConvTranspose2d on blockconv's kernels."""

    def forward(self, input: Any, output_size: Any = None) -> Any:
        """As torch.nn.ConvTranspose2d."""
        more = self._output_padding(input, output_size, self.stride, self.padding, self.kernel_size, 2, self.dilation)
        options = self.stride, self.padding, more, self.groups, self.dilation
        return functional.conv_transpose2d(input, self.weight, self.bias, *options)


class MaxPool2d(torch.nn.MaxPool2d):  # type: ignore[misc]
    """torch.nn.MaxPool2d on blockconv's kernels."""

    def forward(self, input: Any) -> Any:
        """As torch.nn.MaxPool2d. Without gradients no indices are found that nobody reads."""
        options = self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        if traced(input) or self.return_indices or _gradient_needed(input):
            return functional.max_pool2d(input, *options, return_indices=self.return_indices)
        return max_pool2d(input, *options)


class AvgPool2d(torch.nn.AvgPool2d):  # type: ignore[misc]
    """torch.nn.AvgPool2d on blockconv's kernels."""

    def forward(self, input: Any) -> Any:
        """As torch.nn.AvgPool2d."""
        options = self.kernel_size, self.stride, self.padding, self.ceil_mode
        return functional.avg_pool2d(input, *options, self.count_include_pad, self.divisor_override)


class AdaptiveAvgPool2d(torch.nn.AdaptiveAvgPool2d):  # type: ignore[misc]
    """torch.nn.AdaptiveAvgPool2d on blockconv's kernels."""

    def forward(self, input: Any) -> Any:
        """As torch.nn.AdaptiveAvgPool2d."""
        return functional.adaptive_avg_pool2d(input, self.output_size)


_OURS: dict[type, type] = {
    getattr(torch.nn, own.__name__): own
    for own in (Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, MaxPool2d, AvgPool2d, AdaptiveAvgPool2d)
}


def convert(model: Any) -> Any:
    """Let the convolutions and pools of a model run on blockconv, for inference and training. Returns the model.

    model: a torch.nn.Module. Its modules of exactly the classes Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d,
        MaxPool2d, AvgPool2d and AdaptiveAvgPool2d of torch.nn change their class in place. Parameters, hooks, names and
        the `state_dict` stay, so optimizers and checkpoints do too.

    `restore` is the way back. Without gradients a Conv2d packs its weights once, and again when a version changes.
    Call `refresh` after writes to `.data`. Raises ArgumentError for what is no module.

    >>> import torch, blockconv.torch
    >>> model = blockconv.torch.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()))
    >>> model(torch.zeros(1, 3, 8, 8)).sum().backward()
    """
    return _changed("convert", model, _OURS.get)


def restore(model: Any) -> Any:
    """Undo `convert`. Returns the model. Raises ArgumentError for what is no module."""
    theirs = {own: base for base, own in _OURS.items()}
    forget_packed(model)
    return _changed("restore", model, theirs.get)


def forget_packed(model: Any) -> None:
    """Pack the weights of converted modules again at their next call."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        module.__dict__.pop("_packed", None)


def _changed(op: str, model: Any, other: Callable[[type], type | None]) -> Any:
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(op, "model", model, "has to be a torch.nn.Module")
    for module in model.modules():
        kind = other(type(module))
        if kind is not None:
            module.__class__ = kind
    return model
