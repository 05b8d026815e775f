"""blockconv inside PyTorch. Needs torch 2.6 or later; `import blockconv` alone does not import it.

>>> import torch, blockconv.torch
>>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.ReLU()).eval()
>>> fast = torch.compile(model, backend="blockconv")  # doctest: +SKIP
>>> with torch.no_grad():  # doctest: +SKIP
...     y = fast(torch.zeros(1, 3, 8, 8))
>>> print(blockconv.torch.report(fast))  # doctest: +SKIP
graph 0/0, inference: 2 of 2 ops in 1 plans, 0.31 s in blockconv
"""

from __future__ import annotations

import importlib
from importlib.metadata import PackageNotFoundError, distribution
from typing import Any

from blockconv.core.errors import ArgumentError
from blockconv.frontends.torch.modules import (
    AdaptiveAvgPool2d,
    AvgPool2d,
    Conv1d,
    Conv2d,
    ConvTranspose1d,
    ConvTranspose2d,
    MaxPool2d,
    convert,
    forget_packed,
    restore,
)
from blockconv.frontends.torch.reports import Compiled, compiled_graphs, memory_of

from . import functional

__all__ = [
    "AdaptiveAvgPool2d",
    "AvgPool2d",
    "Compiled",
    "Conv1d",
    "Conv2d",
    "ConvTranspose1d",
    "ConvTranspose2d",
    "MaxPool2d",
    "Report",
    "backend",
    "convert",
    "functional",
    "refresh",
    "report",
    "restore",
]


def backend(gm: Any, example_inputs: Any, **options: Any) -> Any:
    """The back end of torch.compile(backend="blockconv"). PyTorch calls it; you need not."""
    from blockconv.frontends.torch.backend import blockconv_backend  # with Dynamo, whose import takes seconds

    return blockconv_backend(gm, example_inputs, **options)


try:
    distribution("blockconv")
except PackageNotFoundError:  # in a source tree that is not installed PyTorch finds no entry point
    importlib.import_module("torch._dynamo").register_backend(backend, "blockconv")


class Report(tuple[Compiled, ...]):
    """The graphs of `report`. As text, a line for each, and one for each kind of op that runs in PyTorch."""

    __slots__ = ()

    def __str__(self) -> str:
        return "\n".join(map(str, self)) or "no graph was compiled with blockconv"


def report(model: Any = None) -> Report:
    """A report on torch.compile(backend="blockconv"): for each graph, the ops that run in plans and the others.

    model: a module, compiled or not: the graphs that ran with its parameters. None: all graphs that are in use.

    Each graph is a `Compiled`. It has the numbers of ops and plans, the ops that run in PyTorch with the reason, and
    the seconds inside blockconv. Raises ArgumentError for what is no module.
    """
    held = None if model is None else {id(memory) for memory in map(memory_of, _tensors("report", model))}
    return Report(graph for graph in compiled_graphs() if held is None or graph.is_of(held))


def refresh(model: Any) -> None:
    """Pack the weights of a model again at the next call.

    model: a module, compiled or not.

    Call it after writes of a part of a tensor that change no version: through `.data`, NumPy or another process, or to
    an inference tensor. Writes of a whole tensor, optimizers, `load_state_dict` and `copy_` need no call. Raises
    ArgumentError for what is no module.
    """
    for graph in report(model):
        graph.forget_weights()
    forget_packed(model)


def _tensors(op: str, model: Any) -> list[Any]:
    """A module's parameters and buffers."""
    if not hasattr(model, "parameters") or not hasattr(model, "buffers"):
        raise ArgumentError(op, "model", model, "has to be a torch.nn.Module")
    return [*model.parameters(), *model.buffers()]
