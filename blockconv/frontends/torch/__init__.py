"""PyTorch's modules as networks, and blockconv inside PyTorch. Nothing here imports torch before it is called."""

from __future__ import annotations

import functools
from typing import Any

from blockconv.core.checks import Shape, check_flag
from blockconv.core.errors import needing
from blockconv.network.graph import Network
from blockconv.network.limits import Limits


def from_torch(module: Any, example_inputs: Any, dynamic_shapes: Any = None, strict: bool = False) -> Network:
    """Read a PyTorch module as a network, for `compile`. Needs torch 2.6 or later.

    module: a torch.nn.Module in eval mode, on the CPU; or what `torch.export.export` returned for one.
    example_inputs: a tuple of its arguments, or its only argument. They give shapes and types.
    dynamic_shapes: sizes that may change, as in `torch.export.export`; all others then stay fixed. `Dim.AUTO` takes a
        size of 1 too. Without it, the network takes all sizes that the module takes. For the first other size PyTorch
        traces the module again, which takes seconds, because its code may read sizes. An ExportedProgram keeps its
        sizes. Pickles and files take the sizes of these traces, and of those with one image and with several. Sizes
        that do not fit raise a NetworkError.
    strict: refuse ops that blockconv has no kernels for. By default PyTorch runs them, on the same memory, and
        `compile` names them in one warning.

    The network shares the memory of the module's parameters, and names its constants like them. If you change a
    parameter in place, call `from_torch` and `compile` again: plans keep their packed and folded weights.
    The network leaves out outputs that are None. Raises UnsupportedError without torch, and for a module that writes
    its buffers. For ops that neither blockconv nor PyTorch runs, the error lists them with their modules. Raises
    ArgumentError for an object that is no module, and the errors of `torch.export.export` if it cannot trace a module.

    >>> import torch, blockconv as bc
    >>> model = torch.nn.Sequential(torch.nn.Conv2d(3, 8, 3), torch.nn.BatchNorm2d(8), torch.nn.ReLU()).eval()
    >>> network = bc.from_torch(model, torch.zeros(1, 3, 8, 8))
    >>> network.shape(network.outputs[0])
    (1, 8, 6, 6)
    """
    strict = check_flag("from_torch", "strict", strict)
    return _export("from_torch").read_module(module, example_inputs, dynamic_shapes, strict, Pickled)


def _export(op: str) -> Any:
    """The module that imports torch. Raises UnsupportedError without it."""
    with needing(op, "torch"):
        from blockconv.frontends.torch import export
    return export


class Pickled:
    """The traces of a network in a pickle. PyTorch is imported for it when the network gets other sizes."""

    def __init__(self, data: bytes, states: list[dict[str, Any]]) -> None:
        self.given = data, states

    @functools.cached_property
    def traces(self) -> Any:
        """The function that reads the network for other shapes."""
        return _export("a network of from_torch, for other sizes,").Traces.loaded(*self.given, Pickled)

    def __call__(self, shapes: dict[str, Shape]) -> Network:
        """See `Network.remake`."""
        return self.traces(shapes)

    @property
    def limits(self) -> list[Limits]:
        """See `Network.limits`."""
        return list(self.traces.limits)

    def __reduce__(self) -> tuple[object, ...]:
        return Pickled, self.given
