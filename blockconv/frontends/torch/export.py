"""A module, by `torch.export`, as a network."""

from __future__ import annotations

import math
import pickle
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram, ShapesCollection
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind
from torch.fx import Graph
from torch.fx.node import map_aggregate, map_arg
from torch.utils._pytree import tree_flatten, tree_unflatten
from torch.utils._sympy.printers import PythonPrinter

from blockconv.core.checks import Names, Shape
from blockconv.core.errors import ArgumentError, NetworkError, UnsupportedError, failing, ignoring
from blockconv.core.interop import like
from blockconv.core.python import zipped
from blockconv.core.record import frozen
from blockconv.frontends.torch.decompositions import decompositions
from blockconv.frontends.torch.reader import Constant, Reader, calls_op, hint, kind_of, module_of, needed, stand_in
from blockconv.frontends.torch.runner import op_of
from blockconv.network.graph import Network
from blockconv.network.limits import Limits
from blockconv.network.ops.rule import Tensor

OP = "from_torch"
_LIFTED = "lifted_tensor_"  # in PyTorch's names of tensors that the forward function makes of numbers


def read_module(module: Any, example_inputs: Any, dynamic_shapes: Any, strict: bool, pickled: Any) -> Network:
    """See `from_torch`. pickled: see `Traces`."""
    given: tuple[Any, ...] = ()
    if isinstance(module, ExportedProgram):
        program = module.run_decompositions(decompositions())
    elif isinstance(module, torch.nn.Module):
        given = tuple(example_inputs) if isinstance(example_inputs, (tuple, list)) else (example_inputs,)
        for each in (x for x in given if isinstance(x, np.ndarray)):
            rule = "has to be tensors, and numbers where the module takes them"
            raise ArgumentError(OP, "example_inputs", each, rule, "give torch.from_numpy(x)")
        held = (x for part in module.modules() for x in vars(part).values())
        if any(isinstance(x, torch.ScriptObject) and "quantized" in str(x._type()) for x in held):
            rule = "has weights that PyTorch's quantized kernels packed, and torch.export reads none of them"
            raise ArgumentError(OP, "module", module, rule, "give the float module, and quantize the network")
        program = _traced(module, given, dynamic_shapes)
    else:
        raise ArgumentError(OP, "module", module, "has to be a torch.nn.Module or a torch.export.ExportedProgram")
    first = Traced.of(program, "torch" if module is program else type(module).__name__, strict)
    again = (module, given) if given and dynamic_shapes is None else None
    if again is None:  # Dim.AUTO gives at least 2, and PyTorch lets such a program take 1
        ranges = {name: (1, math.inf) if ends == (2, math.inf) else ends for name, ends in first.limits.ranges.items()}
        first = replace(first, limits=replace(first.limits, ranges=ranges))
    traces = Traces([first], pickled, again)
    made = first.read({}, traces)
    traces.called = made.outputs
    if written := program.graph_signature.buffers_to_mutate:
        names = ", ".join(written.values())
        text = f"the module writes its buffers {names} when it is called, and a network has no state"
        raise UnsupportedError(f"{OP}: {text}; let it take them as arguments, and return their new values")
    return made


def _traced(module: Any, given: tuple[Any, ...], dynamic_shapes: Any) -> Any:
    with torch.no_grad():
        program = torch.export.export(module, given, dynamic_shapes=dynamic_shapes)
        return program.run_decompositions(decompositions())


class Traces:
    """The traces of a module, each for some sizes of inputs. Networks keep them, and copies share them.

    programs: the first is of the example's sizes.
    pickled: the class that holds them in a pickle.
    again: the module and its arguments, for sizes that no program takes. Pickles are without it.
    called: the names of the network's outputs, at all sizes.
    """

    def __init__(
        self,
        programs: list[Traced],
        pickled: Any,
        again: tuple[Any, tuple[Any, ...]] | None = None,
        called: Names = (),
    ) -> None:
        self.programs, self.pickled, self.again, self.called = programs, pickled, again, called
        self._modes = {} if again is None else {part: part.training for part in again[0].modules()}

    def __call__(self, shapes: Mapping[str, Shape]) -> Network:
        """The network for these shapes of inputs. Raises NetworkError if the module does not take them."""
        program = next((program for program in self.programs if not program.limits.excludes(shapes)), None)
        try:
            return (program or self._for(shapes)).read(shapes, self, self.called)
        except UnsupportedError as error:
            raise self._refusal(shapes, f"does not fit the sizes that were traced: {error}") from error

    @property
    def limits(self) -> list[Limits]:
        """See `Network.limits`."""
        return [program.limits for program in self.programs]

    def _refusal(
        self, shapes: Mapping[str, Shape], rule: str, remedy: str = "give from_torch dynamic_shapes"
    ) -> NetworkError:
        return NetworkError(self.programs[0].name, "input_shapes", dict(shapes), rule, remedy)

    def _for(self, shapes: Mapping[str, Shape]) -> Traced:
        """One more program, for all sizes like these: PyTorch takes a size of 1 for itself, others as symbols."""
        first = self.programs[0]
        if self.again is None:
            # An empty batch is made as batches of any size are.
            some = [{name: (x[0] or n, *x[1:]) if x else () for name, x in shapes.items()} for n in (2, 3)]
            if free := [p for p in self.programs if not any(map(p.limits.excludes, some))]:
                return free[0]
            raise self._refusal(shapes, self.programs[-1].limits.excludes(shapes))
        (module, given), sizes = self.again, iter(shapes.values())
        leaves, spec = tree_flatten(given)
        args = [torch.zeros(next(sizes), dtype=x.dtype) if isinstance(x, torch.Tensor) else x for x in leaves]
        free = ShapesCollection()
        for x in filter(torch.is_tensor, args):
            free[x] = [torch.export.Dim.AUTO] * x.dim()
        now = {part: part.training for part in self._modes}
        try:
            for part in now:
                part.training = self._modes[part]
            program = _traced(module, tree_unflatten(args, spec), free)
            made = Traced.of(program, first.name, first.strict).named_like(first)
        except failing() as error:  # of the module, or of PyTorch, whose trace may speak of symbols
            try:
                module(*tree_unflatten(args, spec))
            except failing() as own:
                raise self._refusal(shapes, f"the module does not take them: {own}", "") from own
            raise self._refusal(shapes, f"cannot be traced: {error}") from error
        finally:
            for part, mode in now.items():
                part.training = mode
        # The module may have others by now. Tensors that a trace made may hold its sizes.
        known = {value.name: value for value in first.state.values() if _LIFTED not in value.name}
        made.state.update({name: known.get(value.name, value) for name, value in made.state.items()})
        self.programs.append(made)
        return made

    def __deepcopy__(self, memo: object) -> Traces:
        return self

    def __reduce__(self) -> tuple[object, ...]:
        """With programs for many sizes. Weights stay arrays, which a pickle shares with the network's constants."""
        if self.again is not None:
            own: Any = self.programs[0].limits.sizes
            one, more = ({name: (n, *shape[1:]) if shape else () for name, shape in own.items()} for n in (1, 3))
            for sizes in (one, own, more):  # a trace with one image is for one image alone, others for more
                if all(not limits.ranges or limits.excludes(sizes) for limits in self.limits):
                    with ignoring(NetworkError):
                        self._for(sizes)
        data = pickle.dumps((self.called, [program.flat() for program in self.programs]))
        return self.pickled, (data, [{k: (c.name, c.array) for k, c in p.state.items()} for p in self.programs])

    @classmethod
    def loaded(cls, data: bytes, states: list[dict[str, Any]], pickled: Any) -> Traces:
        """The programs of a pickle. Raises UnsupportedError for ops that this process does not have."""
        called, programs = pickle.loads(data)
        return cls([Traced.loaded(*pair) for pair in zipped(programs, states)], pickled, None, called)


@dataclass(frozen=True, eq=False)
class Traced:
    """A traced module, which is read as a network for inputs of some shapes.

    nodes: its placeholders, and the ops that its outputs need.
    outputs: the names of the nodes that it returns.
    state: for each placeholder but the caller's inputs, its constant.
    limits: the sizes of inputs that it holds for.
    name, strict: as in `from_torch`.
    """

    nodes: list[Any]
    outputs: list[str]
    state: dict[str, Constant]
    limits: Limits
    name: str
    strict: bool

    @classmethod
    def of(cls, program: Any, name: str, strict: bool) -> Traced:
        """Raises ArgumentError for a program that does not return tensors."""
        held, outputs = {**program.state_dict, **program.constants}, [arg.name for arg in _returned(program)]
        signature = program.graph_signature  # tokens order the ops that check or print, and no output needs them
        given = {spec.arg.name: spec for spec in signature.input_specs if spec.kind != InputKind.TOKEN}
        theirs = {name for name, spec in given.items() if spec.kind == InputKind.USER_INPUT}
        state = {name: Constant(held[spec.target], spec.target) for name, spec in given.items() if name not in theirs}
        holders = [node for node in program.graph.find_nodes(op="placeholder") if node.name in given]
        shapes = {node.name: node.meta["val"].shape for node in holders if hasattr(node.meta.get("val"), "shape")}
        sizes = {name: tuple(map(_expression, shape)) for name, shape in shapes.items() if name in theirs}
        symbols = {symbol for shape in sizes.values() for size in shape for symbol in getattr(size, "free_symbols", ())}
        ranges = {str(symbol): _bounds(program.range_constraints.get(symbol)) for symbol in symbols}
        ops = [node for node in program.graph.nodes if node.op == "call_function"]
        made = [node for node in program.graph.nodes if node.name in outputs]
        texts = {name: [n if isinstance(n, int) else PythonPrinter().doprint(n) for n in sizes[name]] for name in sizes}
        limits = Limits(texts, ranges, _guards(shapes.values(), symbols))
        return cls([*holders, *needed(ops, made)], outputs, state, limits, name, strict)

    def named_like(self, other: Traced) -> Traced:
        """The trace with another one's names, if both have the same ops, apart from ops that compute numbers."""
        named = {node: f"number_{k}" for k, node in enumerate(self.nodes) if not _makes_tensors(node)}
        ops, theirs = ([node for node in each.nodes if _makes_tensors(node)] for each in (self, other))
        if [*map(kind_of, ops)] == [*map(kind_of, theirs)]:
            named |= {node: like.name for node, like in zipped(ops, theirs)}
        returned = [node for name in self.outputs for node in self.nodes if node.name == name]
        for node, name in named.items():
            node.name = name
        return replace(self, outputs=[node.name for node in returned])

    def read(self, shapes: Mapping[str, Shape], remake: Any, called: Sequence[str] = ()) -> Network:
        """The network for these shapes of inputs, the others as in the trace. Raises UnsupportedError.

        called: the names of its outputs.
        """
        reader = Reader(self.name, foreign=not self.strict)
        for node in self.nodes:
            if node.op == "placeholder":
                value = self.state.get(node.name) or stand_in(node)
                if isinstance(value, Tensor):
                    value = reader.input(value.name, shapes.get(value.name, value.shape), value.type)
                reader.values[node] = value
        reader.read(node for node in self.nodes if node.op != "placeholder")
        reader.refused.report(OP)
        by_name = {node.name: node for node in self.nodes}
        names = list(reader.outputs(_tensor(reader.tensor(reader.values[by_name[name]])) for name in self.outputs))
        for k, name in enumerate(called):
            if names[k] != name:
                other = reader.emitter.value_name(name)  # for a value that has this one
                names = [other if each == name else each for each in names]
                for old, new in ((name, other), (names[k], name)):
                    if old in reader.emitter.values:
                        reader.emitter.rename(old, new)
                names[k] = name
        return reader.emitter.network(tuple(names), remake)

    def flat(self) -> tuple[Any, ...]:
        """Everything but the state, as plain values."""
        return [*map(_flat, self.nodes)], self.outputs, self.limits, self.name, self.strict

    @classmethod
    def loaded(cls, flat: tuple[Any, ...], state: Mapping[str, Any]) -> Traced:
        """The trace that `flat` gave. Raises UnsupportedError for ops that this process does not have."""
        nodes, outputs, *rest = flat
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
        return cls([*known.values()], outputs, held, *rest)


@frozen
class _Operand:
    """An argument of a pickled node: another node."""

    name: str


def _flat(node: Any) -> tuple[Any, ...]:
    """A node as plain values: its op by name, and traced values as tensors of shapes, strides and types alone."""

    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value.node.hint if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)) else value
        sizes, strides = ([*map(hint, each)] for each in (value.shape, value.stride()))
        return torch.empty_strided(sizes, strides, dtype=value.dtype, device="meta")

    given = map_arg((node.args, node.kwargs), lambda other: _Operand(other.name))
    target = str(node.target).encode() if calls_op(node) else node.target
    meta = {"val": map_aggregate(node.meta.get("val"), described), "nn_module_stack": {"": module_of(node)}}
    return node.op, target, given, node.name, meta


def _makes_tensors(node: Any) -> bool:
    value = node.meta.get("val")
    return isinstance(value, (torch.Tensor, tuple, list)) or node.op == "placeholder"


def _guards(shapes: Any, symbols: set[Any]) -> list[str]:
    """The conditions on sizes that a trace assumes, beside their ranges."""
    traced = next((n.node.shape_env for shape in shapes for n in shape if isinstance(n, torch.SymInt)), None)
    known = {} if traced is None else dict.fromkeys(traced.simplify(guard.expr) for guard in traced.guards)
    return [PythonPrinter().doprint(guard) for guard in known if guard.free_symbols and guard.free_symbols <= symbols]


def _expression(size: Any) -> Any:
    return size.node.expr if isinstance(size, torch.SymInt) else size


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


def _tensor(value: Any) -> Tensor:
    if not isinstance(value, Tensor):
        raise ArgumentError(OP, "module", value, "has to return tensors")
    return value
