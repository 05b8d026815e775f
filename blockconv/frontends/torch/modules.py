"""Modules of PyTorch on blockconv's kernels, in place of torch.nn's own, and back."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.nn import functional as F  # noqa: F401, N812  (torch.jit.script looks for this name in PyTorch's `forward`)
from torch.nn.utils.parametrize import is_parametrized

from blockconv.api.modules import Conv2d as Packed
from blockconv.api.pooling import max_pool2d
from blockconv.core.errors import ArgumentError
from blockconv.core.interop import follows_tangents, has_tangent, has_values
from blockconv.frontends.torch import functional
from blockconv.frontends.torch.library import PLAIN_TENSORS
from blockconv.frontends.torch.weights import Snapshot, lent

_FLOATS = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


def _is_taken(input: Any) -> bool:
    """Whether blockconv computes a call: its input is a tensor of floats in memory, and no tracer follows the call."""
    if not isinstance(input, torch.Tensor) or input.dtype not in _FLOATS or input.layout is not torch.strided:
        return False
    if torch.compiler.is_dynamo_compiling() or not input.is_cpu:  # Dynamo traces blockconv's ops
        return input.is_cpu
    is_traced = torch._C._len_torch_dispatch_stack() or torch._C._get_tracing_state() is not None
    return not is_traced and (type(input) in PLAIN_TENSORS or has_values(input))


class _StandIn(type):
    """The type of a class that stands for one of torch.nn's, from which it inherits.

    Calls that blockconv does not take run PyTorch's own `forward`, and torch.jit.script compiles that. Tools compare
    classes of modules, or look them up: a stand-in is equal to PyTorch's class. Tracers do not look into modules of
    torch.nn: an instance says that it is of the module of PyTorch's class.
    """

    def __new__(mcs, name: str, bases: tuple[type, ...], body: dict[str, Any]) -> _StandIn:
        theirs: Any = bases[0]
        if not any(isinstance(base, _StandIn) for base in bases):  # not a class that inherits from a stand-in
            own = body["forward"]

            @functools.wraps(theirs.forward)
            def forward(self: Any, input: Any, *more: Any, **named: Any) -> Any:
                return (own if _is_taken(input) else theirs.forward)(self, input, *more, **named)

            body |= {"forward": forward, "theirs": theirs, "__module__": theirs.__module__}
        return super().__new__(mcs, name, bases, {"__module__": theirs.__dict__["__module__"], **body})

    @property
    def __module__(cls) -> str:  # type: ignore[override]
        return "blockconv.torch" if "theirs" in cls.__dict__ else cls.__dict__["__module__"]

    def __repr__(cls) -> str:
        return f"<class '{cls.__module__}.{cls.__qualname__}'>"

    def __eq__(cls, other: object) -> bool:
        return cls is other or cls.__dict__.get("theirs") is other

    def __hash__(cls) -> int:
        return hash(cls.__dict__["theirs"]) if "theirs" in cls.__dict__ else super().__hash__()


def _is_op(*tensors: Any) -> bool:
    """Whether a call has to be an op of PyTorch's: for torch.compile, a transform, a gradient or a fake tensor."""
    if torch.compiler.is_dynamo_compiling() or torch._C._are_functorch_transforms_active():
        return True
    given = [x for x in tensors if x is not None]
    if torch.is_grad_enabled() and any(x.requires_grad for x in given):
        return True
    is_plain = all(type(x) in PLAIN_TENSORS or has_values(x) for x in given)
    return not is_plain or (follows_tangents() and any(map(has_tangent, given)))


class Conv2d(torch.nn.Conv2d, metaclass=_StandIn):  # type: ignore[misc]
    """torch.nn.Conv2d on blockconv's kernels. Without gradients weights are packed once, until they change."""

    def forward(self, input: Any) -> Any:
        """As torch.nn.Conv2d."""
        weight, bias = self.weight, self.bias
        options, mode = (self.stride, self.padding, self.dilation, self.groups), {"padding_mode": self.padding_mode}
        is_cast = weight.dtype is not torch.float32 and torch.is_autocast_enabled("cpu")
        is_kept = "weight" in self._parameters or "weight" in self._buffers  # not computed by each call
        if not is_kept or is_cast or _is_op(input, weight, bias):
            return functional.conv2d(input, weight, bias, *options, **mode)
        held: Any = self.__dict__.get("_packed")
        given = (weight,) if bias is None else (weight, bias)
        if held is None or held[1] != (options, mode) or not held[0].are(given):
            known = Snapshot(given)
            made = Packed(lent(weight), None if bias is None else lent(bias), *options, **mode)
            held = self.__dict__["_packed"] = known, (options, mode), made
        return held[2](input)

    def __getstate__(self) -> dict[str, Any]:
        """Packed weights belong to one process. Copies and pickles do not hold them."""
        return {name: value for name, value in self.__dict__.items() if name != "_packed"}


class Conv1d(torch.nn.Conv1d, metaclass=_StandIn):  # type: ignore[misc]
    """torch.nn.Conv1d on blockconv's kernels."""

    def forward(self, input: Any) -> Any:
        """As torch.nn.Conv1d."""
        options, mode = (self.stride, self.padding, self.dilation, self.groups), self.padding_mode
        return functional.conv1d(input, self.weight, self.bias, *options, padding_mode=mode)


def _transposed(call: Callable[..., Any], dimensions: int) -> Callable[..., Any]:
    """The `forward` of a transposed convolution."""

    def forward(self: Any, input: Any, output_size: Any = None) -> Any:
        """As PyTorch's."""
        sizes = self.stride, self.padding, self.kernel_size, dimensions, self.dilation
        more = self._output_padding(input, output_size, *sizes)
        options = self.stride, self.padding, more, self.groups, self.dilation
        return call(input, self.weight, self.bias, *options)

    return forward


class ConvTranspose1d(torch.nn.ConvTranspose1d, metaclass=_StandIn):  # type: ignore[misc]
    """torch.nn.ConvTranspose1d on blockconv's kernels."""

    forward = _transposed(functional.conv_transpose1d, 1)


class ConvTranspose2d(torch.nn.ConvTranspose2d, metaclass=_StandIn):  # type: ignore[misc]
    """torch.nn.ConvTranspose2d on blockconv's kernels."""

    forward = _transposed(functional.conv_transpose2d, 2)


class MaxPool2d(torch.nn.MaxPool2d, metaclass=_StandIn):  # type: ignore[misc]
    """torch.nn.MaxPool2d on blockconv's kernels."""

    def forward(self, input: Any) -> Any:
        """As torch.nn.MaxPool2d. Without gradients no indices are found that nobody reads."""
        options = self.kernel_size, self.stride, self.padding, self.dilation, self.ceil_mode
        if self.return_indices or _is_op(input):
            return functional.max_pool2d(input, *options, return_indices=self.return_indices)
        return max_pool2d(input, *options)


class AvgPool2d(torch.nn.AvgPool2d, metaclass=_StandIn):  # type: ignore[misc]
    """torch.nn.AvgPool2d on blockconv's kernels."""

    def forward(self, input: Any) -> Any:
        """As torch.nn.AvgPool2d."""
        options = self.kernel_size, self.stride, self.padding, self.ceil_mode
        return functional.avg_pool2d(input, *options, self.count_include_pad, self.divisor_override)


class AdaptiveAvgPool2d(torch.nn.AdaptiveAvgPool2d, metaclass=_StandIn):  # type: ignore[misc]
    """torch.nn.AdaptiveAvgPool2d on blockconv's kernels."""

    def forward(self, input: Any) -> Any:
        """As torch.nn.AdaptiveAvgPool2d."""
        return functional.adaptive_avg_pool2d(input, self.output_size)


_OURS: dict[type, Any] = {
    own.theirs: own
    for own in (Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d, MaxPool2d, AvgPool2d, AdaptiveAvgPool2d)
}


def convert(model: Any) -> Any:
    """Let the convolutions and pools of a model run on blockconv, for inference and training. Returns the model.

    model: a torch.nn.Module. Its modules of exactly the classes Conv1d, Conv2d, ConvTranspose1d, ConvTranspose2d,
        MaxPool2d, AvgPool2d and AdaptiveAvgPool2d of torch.nn, parametrized or not, change their class in place.
        Parameters, hooks, names and the `state_dict` stay, so optimizers and checkpoints do too.

    `restore` is the way back. Without gradients a Conv2d packs its weights once, and again when they change. Call
    `refresh` after a write of a part of them that counts no version. PyTorch computes what blockconv does not take, and
    what a tracer follows. Raises ArgumentError for what is no module.

    >>> import torch, blockconv.torch
    >>> model = blockconv.torch.convert(torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()))
    >>> model(torch.zeros(1, 3, 8, 8)).sum().backward()
    """
    return _changed("convert", model, _OURS.get)


def restore(model: Any) -> Any:
    """Undo `convert`. Returns the model. Raises ArgumentError for what is no module."""
    forget_packed(model)
    return _changed("restore", model, lambda kind: kind.__dict__.get("theirs"))


def forget_packed(model: Any) -> None:
    """Pack the weights of converted modules again at their next call."""
    for module in model.modules() if isinstance(model, torch.nn.Module) else ():
        module.__dict__.pop("_packed", None)


def _changed(op: str, model: Any, other: Callable[[type], type | None]) -> Any:
    """A model whose modules have other classes. A parametrization makes a class that inherits from a module's own."""
    if not isinstance(model, torch.nn.Module):
        raise ArgumentError(op, "model", model, "has to be a torch.nn.Module")
    for module in model.modules():
        kind = type(module)
        first = kind.__bases__[0] if is_parametrized(module) else kind
        if (changed := other(first)) is not None:
            module.__class__ = type(kind.__name__, (changed,), {**kind.__dict__}) if first is not kind else changed
    return model
