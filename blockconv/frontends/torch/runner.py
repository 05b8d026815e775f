"""Running ATen's ops in PyTorch: those of a module that blockconv has no op for.

It is a runner of `blockconv.network.foreign`. A foreign node holds one call of an op as JSON, with a number in place of
each tensor. Nodes that run one after the other are one part.
"""

import ctypes
import importlib
import json
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from blockconv.core.checks import Names, Shape
from blockconv.core.errors import NetworkError, UnsupportedError, failing, ignoring, to_install
from blockconv.core.python import zipped
from blockconv.core.record import frozen
from blockconv.core.types import Array, numpy_dtype
from blockconv.network.foreign import ForeignPart, read_outside
from blockconv.network.ops import Foreign

torch: Any = None
with ignoring(ModuleNotFoundError):  # `Session` says how to install it
    torch = importlib.import_module("torch")

_NAMED = ("dtype", "device", "memory_format", "layout")  # kinds of torch's objects that JSON holds by name


@frozen
class Nested:
    """A call whose result is an argument of another one: a tensor of a type that networks lack, such as a complex one.

    output: its number, of several.
    """

    target: Any
    args: Sequence[Any]
    kwargs: Mapping[str, Any]
    output: int | None = None


def as_call(
    target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], slot: Callable[[Any], Any], node: str
) -> bytes:
    """A call of an overload of ATen's as JSON.

    slot(x): the number of a tensor among its arguments, or a `Nested` in its place. Raises TypeError for others.
    node: its name. Two calls of a random op differ by it.
    """

    def plain(value: Any) -> Any:
        if isinstance(value, Nested):
            return {"call": [str(value.target), value.args, value.kwargs, value.output]}
        if isinstance(value, complex):
            return {"complex": [value.real, value.imag]}
        for name in _NAMED:
            if isinstance(value, getattr(torch, name)):
                return {name: str(value).removeprefix("torch.")}
        found = slot(value)
        return {"slot": found} if isinstance(found, int) else found

    return json.dumps([str(target), args, kwargs, *[node] * _is_random(target)], default=plain).encode()


def op_of(title: str) -> Any:
    """The overload of this name, such as "aten.add.Tensor". Raises UnsupportedError if nobody registered it."""
    space, name, overload = title.split(".")
    if space == __name__.partition(".")[0]:
        importlib.import_module(f"{space}.torch")
    try:
        return getattr(getattr(getattr(torch.ops, space), name), overload)
    except AttributeError:
        raise UnsupportedError(f"PyTorch has no op {title} here; import the package that registers it") from None


def _is_random(op: Any) -> bool:
    return torch.Tag.nondeterministic_seeded in op.tags


def foreign_part(network: Any, nodes: Sequence[Any], threads: int) -> ForeignPart:
    """The part of some foreign nodes of a network. PyTorch has its own number of threads."""
    steps: dict[tuple[bytes, Names], list[tuple[int, str]]] = {}  # outputs of each call, with their numbers
    for node in nodes:  # equal nodes are one call, whose output has several names
        steps.setdefault((node.attributes.model, node.inputs), []).append((node.attributes.output, node.output))
    made = {node.output for node in nodes}
    inputs = [*dict.fromkeys(name for node in nodes for name in node.inputs if name not in made)]
    outputs = read_outside(network, nodes)
    calls = [(json.loads(model), reads, writes) for (model, reads), writes in steps.items()]
    typed = {name: (network.shape(name), network.tensors[name].type.name) for name in (*inputs, *outputs)}
    first, last = ({name: typed[name] for name in names} for names in (inputs, outputs))
    kinds = tuple(call[0].rpartition(".")[0] for call, _, _ in calls)
    return ForeignPart(Session(first, last, calls), tuple(inputs), tuple(outputs), kinds)


_Ends = Mapping[str, tuple[Shape, str]]  # the shapes and types of values
_Calls = Sequence[tuple[Any, Sequence[str], Sequence[tuple[int, str]]]]


class Session:
    """A part, ready to run on memory.

    calls: each call, the values that it reads, and its outputs that are values, by their numbers.

    Raises UnsupportedError without PyTorch.
    """

    library = "pytorch"

    def __init__(self, inputs: _Ends, outputs: _Ends, calls: _Calls) -> None:
        self.inputs, self.outputs = inputs, outputs
        if torch is None:
            kinds = [call[0] for call, _, _ in calls]
            remedy = to_install("torch", "PyTorch, which runs it")
            raise UnsupportedError(f"blockconv has no op for {', '.join(kinds)}; {remedy}")
        last = {name: k for k, (_, reads, _) in enumerate(calls) for name in reads}
        self._calls = []
        for k, (call, reads, writes) in enumerate(calls):
            spent = [name for name in dict.fromkeys(reads) if last[name] == k and name not in self.outputs]
            self._calls.append((call[0], bound(call), reads, writes, spent))

    def run(self, addresses: Sequence[int]) -> None:
        """See `foreign.Session`."""
        given, taken = addresses[: len(self.inputs)], addresses[len(self.inputs) :]
        values = {one: _tensor(at, *type) for (one, type), at in zipped(self.inputs.items(), given)}
        with torch.no_grad(), torch.autocast("cpu", enabled=False):  # a plan's types are fixed
            for name, call, reads, writes, spent in self._calls:
                operands = [values[one] for one in reads]
                try:
                    found = call(operands)
                except failing() as error:
                    shapes = [tuple(x.shape) for x in operands]
                    raise NetworkError(name, "inputs", shapes, f"cannot be computed: {error}") from error
                results = found if isinstance(found, (tuple, list)) else [found]
                values |= {one: results[k] for k, one in writes}
                for one in spent:
                    del values[one]
            for (one, type), at in zipped(self.outputs.items(), taken):
                _tensor(at, *type).copy_(values[one])


def bound(call: Any) -> Callable[[Sequence[Any]], Any]:
    """The op of a call, with all arguments but the tensors. Raises UnsupportedError for one that writes its inputs."""
    title, args, kwargs = call[:3]
    op = op_of(title)
    reads = any("Tensor" in str(a.type) for a in op._schema.arguments)
    if op._schema.is_mutable or not (reads or _is_random(op)):
        raise UnsupportedError(f"{title} is no function of tensors")

    def given(value: Any, tensors: Sequence[Any]) -> Any:
        if isinstance(value, list):
            return [given(each, tensors) for each in value]
        if not isinstance(value, dict):
            return value
        ((kind, what),) = value.items()
        if kind == "call":
            found = bound(what)(tensors)
            return found if what[3] is None else found[what[3]]
        if kind == "complex":
            return complex(*what)
        if kind == "slot":
            return tensors[what]
        return torch.device(what) if kind == "device" else getattr(torch, what)

    return lambda tensors: op(*given(args, tensors), **{name: given(x, tensors) for name, x in kwargs.items()})


def _tensor(address: int, shape: Sequence[int], name: str) -> Any:
    """The tensor that memory holds, row-major."""
    dtype = getattr(torch, name)
    count = math.prod(shape)
    if not count:
        return torch.empty(shape, dtype=dtype)
    memory = (ctypes.c_char * (count * dtype.itemsize)).from_address(address)
    return torch.frombuffer(memory, dtype=dtype).reshape(shape)


def computed(node: Foreign, inputs: Sequence[Array]) -> Array:
    """The output of a foreign node by itself."""
    given, result = [np.ascontiguousarray(x) for x in inputs], np.empty(node.shape, numpy_dtype(node.dtype))
    types = {str(k): (x.shape, x.dtype.name) for k, x in enumerate(inputs)}
    calls = [(json.loads(node.model), [*types], [(node.output, "made")])]
    Session(types, {"made": (node.shape, node.dtype)}, calls).run([x.ctypes.data for x in (*given, result)])
    return result
