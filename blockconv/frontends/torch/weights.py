"""Tensors that something was packed from, and whether they still are what they were.

A tensor's version is a hint: writes through `.data`, NumPy, DLPack or a storage, collectives of gloo, and other
processes do not count one. So each check also compares some lines of each tensor: see `Fingerprint`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from blockconv.core.errors import ignoring
from blockconv.core.python import zipped
from blockconv.runtime.fingerprint import Fingerprint


def lent(tensor: Any) -> Any:
    """A tensor's memory in another storage. An array of it does not keep the tensor's own from being resized."""
    with ignoring(BufferError, RuntimeError):  # a type that DLPack does not have
        return torch.from_dlpack(tensor.detach())
    return tensor


class Snapshot:
    """Tensors as they are now. Make it before what is packed from them, so that a write in between is seen."""

    __slots__ = ("_fingerprint", "_known", "_memory", "tensors")

    def __init__(self, tensors: Sequence[Any]) -> None:
        self.tensors = tensors  # held, so that no other tensor can have their identities
        self._memory = [x.detach() for x in tensors]  # likewise their addresses, also after an assignment to `.data`
        self._known = [_known(x) for x in tensors]
        self._fingerprint = Fingerprint((x.data_ptr(), _span(x)) for x in tensors if x.dim())

    def are(self, tensors: Sequence[Any]) -> bool:
        """Whether these are the same tensors, with the same values as far as their versions and some lines tell."""
        if len(tensors) != len(self._known):
            return False
        for x, (tensor, address, version) in zipped(tensors, self._known):
            if tensor is None:
                if repr(x.item()) != version:
                    return False
            elif x is not tensor or x.data_ptr() != address or (version is not None and x._version != version):
                return False
        return not self._fingerprint.differs()


def _known(tensor: Any) -> tuple[Any, int, Any]:
    """A tensor, its address and its version, which inference tensors do not have. Instead of a scalar, its value:
    PyTorch puts a module's float into a new tensor at each call.
    """
    if not tensor.dim():
        return None, 0, repr(tensor.item())
    return tensor, tensor.data_ptr(), None if tensor.is_inference() else tensor._version


def _span(tensor: Any) -> int:
    """The bytes from a tensor's first element to its last."""
    if not tensor.numel():
        return 0
    steps = [step * (size - 1) for step, size in zipped(tensor.stride(), tensor.shape)]
    return (1 + sum(steps)) * tensor.element_size()


def _count_step(optimizer: Any, args: Any, kwargs: Any) -> None:
    """Give parameters a new version after a step, which may change few elements. Fused optimizers give none."""
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            torch.autograd.graph.increment_version(parameter)


register_optimizer_step_post_hook(_count_step)
