"""Networks and plans in files: a zip of JSON and arrays, which holds no code."""

import base64
import dataclasses
import functools
import json
from types import UnionType
from typing import Any, BinaryIO, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import numpy as np

from blockconv._version import __version__
from blockconv.core.activation import Activation
from blockconv.core.checks import Axes, Names, Shape
from blockconv.core.errors import NetworkError, short
from blockconv.core.files import StrPath, as_path, reading, replacing
from blockconv.core.python import zipped
from blockconv.core.quantization import Quantization
from blockconv.core.types import element, numpy_dtype
from blockconv.network import ops
from blockconv.network.graph import Network, Node
from blockconv.network.limits import Limits
from blockconv.network.ops.rule import Tensor, names_of
from blockconv.network.rest import Rest

FORMAT = 1
_OPS = {name: each for name, each in vars(ops).items() if isinstance(each, type)}
_RECORDS: dict[str, Any] = {**_OPS, "Activation": Activation}


def write(path: StrPath, network: Network, extra: dict[str, Any]) -> None:
    """Write a network, and `extra`, which JSON can hold.

    A file cannot plan a network's rest again: another library runs all of it. Nor can it read a model again for other
    sizes: it says whether that changes nodes.
    """
    rest = network.rest
    limits = None if getattr(network.remake, "func", None) is _refuse_sizes else network.kept_limits()
    described = {
        "format": FORMAT,
        "version": __version__,
        "name": network.name,
        "inputs": [[t.name, list(t.shape), t.type.name] for t in network.inputs],
        "outputs": list(network.outputs),
        "nodes": [[n.name, _plain(n.attributes), list(n.inputs), n.output, list(n.parameters)] for n in network.nodes],
        "constants": list(network.constants),
        "rest": None if rest is None else _plain((rest.model, rest.outputs, rest.kinds, list(rest.constants))),
        "bfloat16": [name for name, value in network.constants.items() if value.dtype.name == "bfloat16"],
        "own_sizes": limits is None or not all(one.is_plain() for one in limits),
        "limits": [dataclasses.asdict(one) for one in limits or ()],
        "merged": {name: network.holder(name) for name in network.merged},
        "extra": extra,
    }
    # NumPy's files have no bfloat16, but its bits.
    stored = (x.view(np.uint16) if x.dtype.name == "bfloat16" else x for x in network.constants.values())
    arrays = {f"c{k}": value for k, value in enumerate(stored)}
    arrays |= {f"r{k}": value for k, value in enumerate(rest.constants.values())} if rest is not None else {}
    with replacing("Plan.save", path) as file:
        np.savez(file, network=np.frombuffer(json.dumps(described).encode(), np.uint8), **arrays)  # type: ignore[arg-type]


def read(path: StrPath) -> tuple[Network, dict[str, Any]]:
    """The content that `write` wrote. Raises ArgumentError for any other file, and OSError if it cannot be
    opened."""
    with open(as_path("Plan.load", path), "rb") as file, reading("Plan.load", path):
        return _read(file)


def _read(opened: BinaryIO) -> tuple[Network, dict[str, Any]]:
    if opened.read(2) != b"PK":  # np.load would take it for a pickle, and advise to allow it
        raise ValueError("it is no archive")
    opened.seek(0)
    with np.load(opened, allow_pickle=False) as file:
        described = json.loads(bytes(file["network"]))
        if described["format"] != FORMAT:
            writer = described.get("version", "0.1.0 or before")
            raise ValueError(f"blockconv {writer} wrote format {described['format']}; {__version__} reads {FORMAT}")
        constants = {name: file[f"c{k}"] for k, name in enumerate(described["constants"])}
        rest = None
        if described.get("rest"):
            model, outputs, kinds, names = described["rest"]
            held = {name: file[f"r{k}"] for k, name in enumerate(_typed(Names, names))}
            rest = Rest(_typed(bytes, model), held, _typed(Names, outputs), _typed(Names, kinds))
    for name in described.get("bfloat16", ()):  # files of before have none
        constants[name] = constants[name].view(numpy_dtype("bfloat16"))
    inputs = tuple(
        Tensor(name, _typed(Axes, shape), element(_typed(str, dtype))) for name, shape, dtype in described["inputs"]
    )
    nodes = tuple(
        Node(name, _typed(ops.Op, attributes), _typed(Names, taken), output, _typed(Names, parameters))
        for name, attributes, taken, output, parameters in described["nodes"]
    )
    called = names_of(inputs), [n for node in nodes for n in (node.name, node.output)]
    for name in (described["name"], *called[0], *called[1]):
        _typed(str, name)
    name = described["name"]
    again: Any = functools.partial(_refuse_sizes, name) if described.get("own_sizes") else None
    runs = {node.name for node in nodes}
    merged = {old: new for old, new in described.get("merged", {}).items() if new in runs}  # files of before have none
    network = Network(inputs, _typed(Names, described["outputs"]), nodes, constants, name, again, merged, rest)
    limits = [Limits(**given) for given in described.get("limits", ())]
    if not all(one.is_plain() for one in limits):
        raise ValueError("its limits of sizes are no arithmetic")
    if again is None and limits:
        network = network.remade_by(_Within(network, limits))
    return network, dict(described["extra"])


@dataclasses.dataclass(frozen=True, eq=False)
class _Within:
    """Takes a network of a file to other sizes.

    limits: see `Network.limits`.
    """

    network: Network
    limits: list[Limits]

    def __call__(self, shapes: dict[str, Shape]) -> Network:
        reasons = [one.excludes(shapes) for one in self.limits]
        if all(reasons):
            raise NetworkError(self.network.name, "input_shapes", shapes, reasons[-1])
        return self.network.of_shapes(shapes, self)


def _refuse_sizes(name: str, shapes: dict[str, Shape]) -> NoReturn:
    rule = "are not those of the file, and this model's nodes depend on them"
    raise NetworkError(name, "input_shapes", shapes, rule, "compile the model, and save a plan for each size")


def _plain(value: Any) -> Any:
    """A record as JSON has it; tuples are lists there."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {f.name: _plain(getattr(value, f.name)) for f in dataclasses.fields(value) if f.init}
        return {"is": type(value).__name__, **fields}
    if isinstance(value, (tuple, list)):
        return [_plain(item) for item in value]
    if isinstance(value, Quantization):
        return [value.scale.tolist(), value.zero_point]
    if isinstance(value, np.generic):  # a number of NumPy is one of Python's
        return value.item()
    return base64.b64encode(value).decode("ascii") if isinstance(value, bytes) else value


def _record(value: Any, kinds: tuple[Any, ...]) -> Any:
    """The record that `_plain` wrote, of one of these kinds."""
    value = _renamed(value)
    made = _RECORDS[value["is"]]
    if not issubclass(made, kinds):
        raise TypeError(f"{value['is']} is none of {kinds}")
    types = get_type_hints(made)
    given = {name: _typed(types[name], item) for name, item in value.items() if name != "is"}
    return made(**given)


def _renamed(value: dict[str, Any]) -> dict[str, Any]:
    """A record as it is called now: files of before have other ops in these places."""
    if value["is"] == "Pointwise":
        return {"is": "Where"} if value["kind"] == "where" else {**value, "is": "Binary"}
    if value["is"] != "Scan" or "total" not in value:
        return value
    if not value["total"]:
        return {name: item for name, item in value.items() if name != "total"}
    kind = {"add": "sum", "mul": "prod"}.get(value["kind"], value["kind"])
    return {"is": "Reduce", "axes": [value["axis"]], "keepdims": True, "kind": kind}


def _typed(wanted: Any, value: Any) -> Any:
    """A JSON value as the type that a field declares. Raises TypeError if it does not fit."""
    origin, inner = get_origin(wanted), get_args(wanted)
    if origin in (Union, UnionType):
        if value is None and type(None) in inner:
            return None
        some = tuple(kind for kind in inner if kind is not type(None))
        return _record(value, some) if len(some) > 1 else _typed(some[0], value)
    if origin is Literal and isinstance(value, str) and value in inner:
        return value
    if origin is tuple and isinstance(value, list):
        kinds = inner[:1] * len(value) if inner[1:] == (...,) else inner
        return tuple(_typed(kind, item) for kind, item in zipped(kinds, value))
    if wanted is float and isinstance(value, (int, float)) and not isinstance(value, bool):
        return float(value)
    if wanted in (int, str, bool) and type(value) is wanted:
        return value
    if wanted is bytes and isinstance(value, str):
        return base64.b64decode(value, validate=True)
    if wanted in _RECORDS.values() and isinstance(value, dict):
        return _record(value, (wanted,))
    if wanted is Quantization and isinstance(value, list):
        scale, zero_point = value
        return Quantization(scale, zero_point)
    raise TypeError(f"{short(value, 60)} is no {wanted}")
