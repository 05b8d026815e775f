"""Networks and plans in files: a zip of JSON and arrays, which holds no code."""

from __future__ import annotations

import dataclasses
import json
import zipfile
from os import PathLike
from typing import Any

import numpy as np

from blockconv.errors import ArgumentError
from blockconv.kernels.activation import Activation
from blockconv.network import ops
from blockconv.network.graph import Network, Node, Tensor

__all__ = ["read", "write"]

FORMAT = 1
_ATTRIBUTES: dict[str, Any] = {name: getattr(ops, name) for name in ops.__all__ if isinstance(getattr(ops, name), type)}
_RECORDS: dict[str, Any] = {**_ATTRIBUTES, "Activation": Activation}


def write(path: str | PathLike[str], network: Network, extra: dict[str, Any]) -> None:
    """Write a network, and what JSON can hold beside it."""
    described = {
        "format": FORMAT,
        "name": network.name,
        "inputs": [[t.name, list(t.shape), str(t.dtype)] for t in network.inputs],
        "outputs": list(network.outputs),
        "nodes": [[n.name, _plain(n.attributes), list(n.inputs), n.output, list(n.parameters)] for n in network.nodes],
        "constants": list(network.constants),
        "extra": extra,
    }
    arrays = {f"c{k}": value for k, value in enumerate(network.constants.values())}
    with open(path, "wb") as file:
        np.savez(file, network=np.frombuffer(json.dumps(described).encode(), np.uint8), **arrays)  # type: ignore[arg-type]


def read(path: str | PathLike[str]) -> tuple[Network, dict[str, Any]]:
    """What `write` wrote. Raises ArgumentError for any other file."""
    try:
        with np.load(path, allow_pickle=False) as file:
            described = json.loads(bytes(file["network"]))
            if described["format"] != FORMAT:
                raise ValueError(f"format {described['format']}")
            constants = {name: file[f"c{k}"] for k, name in enumerate(described["constants"])}
        inputs = tuple(Tensor(name, tuple(shape), np.dtype(dtype)) for name, shape, dtype in described["inputs"])
        nodes = tuple(
            Node(name, _record(attributes), tuple(taken), output, tuple(parameters))
            for name, attributes, taken, output, parameters in described["nodes"]
        )
        network = Network(inputs, tuple(described["outputs"]), nodes, constants, described["name"])
        return network, described["extra"]
    except (KeyError, EOFError, ValueError, TypeError, AttributeError, zipfile.BadZipFile) as error:
        raise ArgumentError("Plan.load", "path", str(path), f"is no file of Plan.save ({error})") from error


def _plain(value: Any) -> Any:
    """A record as JSON has it; tuples are lists there."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"is": type(value).__name__, **fields}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    return value


def _record(value: Any) -> Any:
    if isinstance(value, dict):
        return _RECORDS[value["is"]](**{name: _record(item) for name, item in value.items() if name != "is"})
    if isinstance(value, list):
        return tuple(_record(item) for item in value)
    return value
