"""A module, by `torch.export`, as a network."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Graph
from torch.fx.node import map_aggregate, map_arg

from blockconv.core.errors import ArgumentError, NetworkError, UnsupportedError
from blockconv.core.interop import like
from blockconv.frontends.torch import Pickled
from blockconv.frontends.torch.decompositions import decompositions
from blockconv.frontends.torch.ops import OPS
from blockconv.frontends.torch.reader import Constant, Reader, hint, module_of, needed, stand_in
from blockconv.network.aten import op_of
from blockconv.network.graph import Network, Tensor
from blockconv.network.ops import Shape

__all__ = ["Program", "read_module"]

OP = "from_torch"
REMEDY = "give from_torch dynamic_shapes"


def read_module(module: Any, example_inputs: Any, dynamic_shapes: Any, strict: bool) -> Network:
    """See `from_torch`."""
    if isinstance(module, ExportedProgram):
        program = module
    elif isinstance(module, torch.nn.Module):
        given = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        for each in given:
            if isinstance(each, np.ndarray):
                rule = "has to be tensors, and numbers where the module takes them"
                raise ArgumentError(OP, "example_inputs", each, rule, "give torch.from_numpy(x)")
        with torch.no_grad():
            program = torch.export.export(module, given, dynamic_shapes=dynamic_shapes)
    else:
        rule = "has to be a torch.nn.Module or a torch.export.ExportedProgram"
        raise ArgumentError(OP, "module", module, rule)
    program = program.run_decompositions(decompositions())
    made = Program.of(program, "torch" if module is program else type(module).__name__, strict)({})
    if written := program.graph_signature.buffers_to_mutate:
        names = ", ".join(written.values())
        text = f"the module writes its buffers {names} when it is called, and a network has no state"
        raise UnsupportedError(f"{OP}: {text}; let it take them as arguments, and return their new values")
    return made


@dataclass(frozen=True, eq=False)
class Program:
    """A traced module, which is read as a network for inputs of any shapes. Networks keep it, and copies share it.

    nodes: its placeholders, and the ops that its outputs need.
    outputs: the names of the nodes that it returns.
    state: for each placeholder but the caller's inputs, its constant.
    sizes: for each input, its sizes: numbers, and expressions (of sympy) of symbols for those that change.
    ranges: for each symbol, the least and the largest size. Without any, the program is read for all sizes.
    name, strict: as in `from_torch`.
    """

    nodes: list[Any]
    outputs: list[str]
    state: dict[str, Constant]
    sizes: dict[str, tuple[Any, ...]]
    ranges: dict[Any, tuple[int, float]]
    name: str
    strict: bool

    @classmethod
    def of(cls, program: Any, name: str, strict: bool) -> Program:
        """Raises ArgumentError for a program that does not return tensors."""
        held, outputs = {**program.state_dict, **program.constants}, [arg.name for arg in _returned(program)]
        given = {spec.arg.name: spec for spec in program.graph_signature.input_specs}
        theirs = {name for name, spec in given.items() if spec.kind == InputKind.USER_INPUT}
        state = {name: Constant(held[spec.target], spec.target) for name, spec in given.items() if name not in theirs}
        holders = list(program.graph.find_nodes(op="placeholder"))
        shapes = {node.name: node.meta["val"].shape for node in holders if hasattr(node.meta.get("val"), "shape")}
        sizes = {name: tuple(map(_expression, shape)) for name, shape in shapes.items() if name in theirs}
        symbols = {symbol for shape in sizes.values() for size in shape for symbol in getattr(size, "free_symbols", ())}
        ranges = {symbol: _bounds(program.range_constraints.get(symbol)) for symbol in symbols}
        ops = [node for node in program.graph.nodes if node.op == "call_function"]
        ops = needed(ops, [node for node in program.graph.nodes if node.name in outputs])
        return cls([*holders, *ops], outputs, state, sizes, ranges, name, strict)

    def __call__(self, shapes: Mapping[str, Shape]) -> Network:
        """The network for these shapes of inputs, the others as in the trace.

        Raises NetworkError if the trace does not hold for them.
        """
        self._check(shapes)
        try:
            return self._read(shapes)
        except UnsupportedError as error:
            if not shapes:
                raise
            rule = f"does not fit the sizes that were traced: {error}"
            raise NetworkError(self.name, "input_shapes", dict(shapes), rule, REMEDY) from error

    def _read(self, shapes: Mapping[str, Shape]) -> Network:
        reader = Reader(self.name, OPS, foreign=not self.strict)
        for node in self.nodes:
            if node.op == "placeholder":
                value = self.state.get(node.name) or stand_in(node)
                if isinstance(value, Tensor):
                    value = reader.input(value.name, shapes.get(value.name, value.shape), value.type)
                reader.values[node] = value
        reader.read(node for node in self.nodes if node.op != "placeholder")
        reader.refused.report(OP)
        by_name = {node.name: node for node in self.nodes}
        values = [_tensor(reader, reader.values[by_name[name]]) for name in self.outputs]
        return reader.emitter.network(reader.outputs(values), self)

    def _check(self, shapes: Mapping[str, Shape]) -> None:
        """Raise NetworkError for sizes that the trace excludes."""
        known: dict[Any, int] = {}
        sizes = [
            (name, axis, have, want)
            for name, shape in (shapes.items() if self.ranges else ())
            for axis, (have, want) in enumerate(zip(shape, self.sizes[name], strict=False))
        ]
        for name, axis, have, want in sorted(sizes, key=lambda size: size[3] not in self.ranges):
            for symbol in {*getattr(want, "free_symbols", ())} - known.keys():  # of a linear expression
                zero, one = (int(want.subs({**known, symbol: number})) for number in (0, 1))
                known[symbol] = (have - zero) // (one - zero)
            wanted = want if isinstance(want, int) else int(want.subs(known))
            low, high = self.ranges.get(want, (wanted, wanted))
            if have != wanted or not low <= have <= high:
                bounds = f"from {low} to {high}" if want in self.ranges and have == wanted else wanted
                rule = f"axis {axis} of {name!r} has to be {bounds}, as it was traced"
                raise NetworkError(self.name, "input_shapes", dict(shapes), rule, REMEDY)

    def __deepcopy__(self, memo: object) -> Program:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """Weights stay arrays, which a pickle shares with the network's constants."""
        nodes = [_flat(node) for node in self.nodes]
        data = pickle.dumps((nodes, self.outputs, self.sizes, self.ranges, self.name, self.strict))
        return Pickled, (data, {name: (value.name, value.array) for name, value in self.state.items()})

    @classmethod
    def loaded(cls, data: bytes, state: Mapping[str, Any]) -> Program:
        """A program of a pickle. Raises UnsupportedError for ops that this process does not have."""
        nodes, *rest = pickle.loads(data)
        graph, known = Graph(), dict[str, Any]()
        for op, target, given, name, meta in nodes:
            args, kwargs = map_aggregate(given, lambda x: known[x.name] if isinstance(x, _Operand) else x)
            target = op_of(target.decode()) if isinstance(target, bytes) else target
            known[name] = graph.create_node(op, target, args, kwargs)
            known[name].name = name
            known[name].meta.update(meta)
        with warnings.catch_warnings():  # of arrays that are read-only
            warnings.simplefilter("ignore")
            held = {name: Constant(like(torch.empty(0), array), called) for name, (called, array) in state.items()}
        return cls([*known.values()], rest[0], held, *rest[1:])


@dataclass(frozen=True)
class _Operand:
    """An argument of a pickled node: another node."""

    name: str


def _flat(node: Any) -> tuple[Any, ...]:
    """A node as plain values: its op by name, and what tracing found as tensors of shapes, strides and types alone."""

    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
        sizes, strides = ([*map(hint, each)] for each in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")

    given = map_arg((node.args, node.kwargs), lambda other: _Operand(other.name))
    target = str(node.target).encode() if isinstance(node.target, torch._ops.OpOverload) else node.target
    meta = {"val": map_aggregate(node.meta.get("val"), described), "nn_module_stack": {"": module_of(node)}}
    return node.op, target, given, node.name, meta


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else int(size)


def _bounds(values: Any) -> tuple[int, float]:
    """The least and the largest value of a range of PyTorch's."""
    low, high = (0, math.inf) if values is None else (values.lower, values.upper)
    return int(low), int(high) if getattr(high, "is_Integer", False) else math.inf


def _returned(program: Any) -> list[Any]:
    """The tensors that a module returns."""
    returned = [spec.arg for spec in program.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    for arg in returned:
        if isinstance(arg, ConstantArgument) and arg.value is not None:
            raise ArgumentError(OP, "module", arg.value, "has to return tensors")
    return [arg for arg in returned if not isinstance(arg, ConstantArgument)]


def _tensor(reader: Reader, value: Any) -> Tensor:
    if isinstance(value, Constant):
        return reader.constant(value.array, value.name)
    if not isinstance(value, Tensor):
        raise ArgumentError(OP, "module", value, "has to return tensors")
    return value
