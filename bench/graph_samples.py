"""The samples of GraphNet as modules of PyTorch; see `bench.graphs`."""

from __future__ import annotations

import ast
import contextlib
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

__all__ = ["fit_norms", "read_sample"]


def _classes(path: Path) -> Iterator[dict[str, Any]]:
    """The fields of each class of a file of tensors."""
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef):
            pairs = [(field.targets[0], field.value) for field in node.body if isinstance(field, ast.Assign)]
            yield {name.id: _literal(value) for name, value in pairs if isinstance(name, ast.Name)}


def _literal(value: ast.expr) -> Any:
    with contextlib.suppress(ValueError):
        return ast.literal_eval(value)
    return None


def _tensor(fields: dict[str, Any], rng: np.random.Generator) -> Any:
    import torch

    dtype = getattr(torch, fields["dtype"].rpartition(".")[2])
    shape, name = fields["shape"], fields["name"]
    if fields.get("data") is not None:
        return torch.tensor(fields["data"], dtype=dtype).reshape(shape)
    if not dtype.is_floating_point:
        return torch.zeros(shape, dtype=dtype)
    mean, deviation = (fields.get(key) or 0.0 for key in ("mean", "std"))
    if not shape:  # the epsilon or the momentum of a batch norm
        return torch.tensor(mean, dtype=dtype)
    value = rng.normal(mean, deviation or 1e-3, shape)
    if re.search("running_var|variance|_eps$", name):
        value = np.abs(value) + 1e-3
    return torch.from_numpy(np.asarray(value)).to(dtype)


def _sizes(path: Path) -> dict[str, int]:
    """The example value of each symbol, by its name in lower case."""
    if not path.exists():
        return {}
    found = re.search(r"symbol2example_value = \{(.*?)\}", path.read_text(encoding="utf-8"), re.DOTALL)
    return {name.lower(): int(size) for name, size in re.findall(r"(\w+): (\d+)", found[1] if found else "")}


def read_sample(path: Path) -> tuple[Any, tuple[Any, ...]]:
    """A module that holds the weights, and its inputs."""
    import torch

    rng = np.random.default_rng(0)
    source = (path / "model.py").read_text(encoding="utf-8").replace("cuda:0", "cpu").replace("cuda", "cpu")
    source = re.sub(r"""(type=['"]cpu['"]), index=\d+""", r"\1", source)
    space: dict[str, Any] = {"device": torch.device}
    exec(compile(source, str(path / "model.py"), "exec"), space)
    graph = space["GraphModule"]().eval()
    tensors = {}
    for name in ("input_meta.py", "weight_meta.py"):
        for fields in _classes(path / name) if (path / name).exists() else ():
            tensors[fields["name"]] = _tensor(fields, rng)
    sizes: dict[str, float] = {**_sizes(path / "input_tensor_constraints.py")}
    for name, value in [*tensors.items()]:
        if re.fullmatch(r"s\d+", name):  # a size of an input
            sizes[name] = int(tensors.pop(name))
        elif value.dtype == torch.float64 and not value.shape:  # a number, which the graph calls item of
            sizes[name] = np.float64(tensors.pop(name))
    names = list(graph.forward.__code__.co_varnames[1 : graph.forward.__code__.co_argcount])
    inputs = [name for name in names if name in tensors and not re.search(r"_(parameters|buffers)_|^L_self_", name)]

    class Sample(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = graph  # PyTorch cannot export a part that is called `graph`
            for name in names:
                if name in tensors and name not in inputs:
                    value = tensors[name]
                    held = torch.nn.Parameter(value, requires_grad=False) if value.is_floating_point() else value
                    (self.register_parameter if isinstance(held, torch.nn.Parameter) else self.register_buffer)(
                        name, held
                    )

        def forward(self, *given: Any) -> Any:
            flows = dict(zip(inputs, given, strict=True))
            last = int(given[0].shape[-1]) if given else 1
            values = [
                flows[name] if name in flows else getattr(self, name) if name in tensors else sizes.get(name, last)
                for name in names
            ]
            return self.model(*values)

    return Sample().eval(), tuple(tensors[name] for name in inputs)


def fit_norms(module: Any, inputs: tuple[Any, ...]) -> None:
    """Let each batch norm hold the statistics of what it gets, so that values neither grow nor vanish with depth.

    The sample's statistics belong to its own weights. With random weights, values of some networks reach 10^6. There,
    the last bits of a sum decide what a gate does.
    """
    import torch

    class Fitting(torch.overrides.TorchFunctionMode):
        def __torch_function__(self, op: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            fits = op is torch.nn.functional.batch_norm and args[1] is not None
            if fits and args[0].numel() >= 8 * args[0].shape[1]:
                for held, found in zip(args[1:3], (torch.mean, torch.var), strict=True):
                    held.copy_(found(args[0], dim=[axis for axis in range(args[0].ndim) if axis != 1]))
            return op(*args, **(kwargs or {}))

    with torch.no_grad(), Fitting():
        module(*inputs)
