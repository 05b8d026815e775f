"""A module, by `torch.export`, as a network."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind

from blockconv.core.errors import ArgumentError, NetworkError, UnsupportedError
from blockconv.frontends.torch.decompositions import decompositions
from blockconv.frontends.torch.ops import OPS
from blockconv.frontends.torch.reader import Constant, Reader, needed, stand_in
from blockconv.network.graph import Network, Tensor
from blockconv.network.ops import Shape

__all__ = ["read_module"]

OP = "from_torch"


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
    name = "torch" if module is program else type(module).__name__
    return read_program(program, name, {}, strict)


def read_program(program: Any, name: str, sizes: Mapping[str, Shape], strict: bool) -> Network:
    """sizes: shapes of some inputs, other than the example's. strict: no op is foreign."""
    reader = Reader(name, OPS, foreign=not strict)
    _read_inputs(program, reader, sizes)
    nodes = [node for node in program.graph.nodes if node.op == "call_function"]
    by_name = {node.name: node for node in program.graph.nodes}
    outputs = [by_name[arg.name] for arg in _returned(program)]
    reader.read(needed(nodes, outputs))
    reader.refused.report(OP)
    if written := program.graph_signature.buffers_to_mutate:
        names = ", ".join(written.values())
        text = f"the module writes its buffers {names} when it is called, and a network has no state"
        raise UnsupportedError(f"{OP}: {text}; let it take them as arguments, and return their new values")
    values = [_tensor(reader, reader.values[node]) for node in outputs]
    return reader.emitter.network(reader.outputs(values), _Again(program, name, strict))


@dataclass(frozen=True, eq=False)
class _Again:
    """A program, to be read for other shapes. Copies of networks share it, and pickles of them are without it."""

    program: Any
    name: str
    strict: bool

    def __call__(self, shapes: dict[str, Shape]) -> Network:
        """Raises NetworkError if the program, as it was traced, takes no such inputs."""
        try:
            return read_program(self.program, self.name, shapes, self.strict)
        except UnsupportedError as error:
            rule = f"does not fit the sizes that were traced: {error}"
            raise NetworkError(self.name, "input_shapes", shapes, rule, "give from_torch dynamic_shapes") from error

    def __deepcopy__(self, memo: object) -> _Again:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        return type(None), ()


def _returned(program: Any) -> list[Any]:
    """The tensors that a module returns."""
    returned = [spec.arg for spec in program.graph_signature.output_specs if spec.kind == OutputKind.USER_OUTPUT]
    for arg in returned:
        if isinstance(arg, ConstantArgument) and arg.value is not None:
            raise ArgumentError(OP, "module", arg.value, "has to return tensors")
    return [arg for arg in returned if not isinstance(arg, ConstantArgument)]


def _read_inputs(program: Any, reader: Reader, sizes: Mapping[str, Shape]) -> None:
    """Values of the placeholders: the module's own are constants under its names, the caller's are inputs."""
    holders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
    state = {**program.state_dict, **program.constants}
    for spec in program.graph_signature.input_specs:
        node = holders[spec.arg.name]
        if spec.kind == InputKind.USER_INPUT:
            value = stand_in(node)
            if isinstance(value, Tensor):
                value = reader.input(value.name, sizes.get(value.name, value.shape), value.type)
        else:
            value = Constant(state[spec.target], spec.target)
        reader.values[node] = value


def _tensor(reader: Reader, value: Any) -> Tensor:
    if isinstance(value, Constant):
        return reader.constant(value.array, value.name)
    if not isinstance(value, Tensor):
        raise ArgumentError(OP, "module", value, "has to return tensors")
    return value
