"""The back end of `torch.compile`: what the planner takes runs as plans, the rest in PyTorch.

AOTAutograd gives a graph of ATen ops whose parameters are inputs. A dry run of the translators over fake tensors says
which nodes blockconv takes, and why not the others. Connected nodes become one `Part`, which is planned at its first
call, when the weights are there. Parameters and buffers are its constants: batch norms are folded into convolutions,
and weights are packed once. If one changes (see `Snapshot`), a part folds and packs again, and keeps the kernels and
layouts that it chose.
"""

from __future__ import annotations

import functools
import logging
import math
import operator
import threading
import time
import weakref
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple, cast

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._dynamo.convert_frame import compile_lock
from torch._guards import CompileContext, TracingContext
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen
from torch.fx.node import map_arg
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from blockconv.core.checks import Shape
from blockconv.core.errors import ArgumentError, BlockconvError, ignoring, warn
from blockconv.core.layout import Layout
from blockconv.core.python import zipped
from blockconv.frontends.torch.decompositions import decompositions, kept_whole, strides_of_kernels
from blockconv.frontends.torch.ops import HEAVY
from blockconv.frontends.torch.reader import (
    Constant,
    Reader,
    Refused,
    arguments_of,
    calls_op,
    draws,
    elsewhere,
    hint,
    kind_of,
    stand_in,
    writes,
)
from blockconv.frontends.torch.reports import Compiled, memory_of, recorded
from blockconv.frontends.torch.training import partition_step, place_norms
from blockconv.frontends.torch.weights import Snapshot, lent
from blockconv.frontends.torch.windows import is_last
from blockconv.network.graph import Network
from blockconv.network.ops.rule import Tensor
from blockconv.network.plan import Plan, check_options, compile_between
from blockconv.network.planning.planned import Options, read_layouts
from blockconv.runtime import check_threads, get_num_threads

OP = 'torch.compile(backend="blockconv")'
KEPT = 8  # plans that a part keeps, for memory formats and for numbers
SIZES = 256  # sizes of inputs for which a part knows its results; their plan keeps fewer of them bound
LEAST = 8  # nodes of a part that has neither convolution, nor pool, nor matrix
NHWC = Layout("NHWC")
Shapes = tuple[Shape, ...]
log = logging.getLogger("blockconv.torch")


class Settings(NamedTuple):
    """The `options` of torch.compile, as in `compile`."""

    threads: int | None = None
    layouts: Any = "auto"
    accuracy: str | float = "default"
    precision: Any = "float32"
    fallback: str = "eager"

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> Settings:
        """Raises ArgumentError for an option or a value that does not exist."""
        for name, value in (given or {}).items():
            if name not in cls._fields:
                raise ArgumentError(OP, "options", {name: value}, f"has to be among {', '.join(cls._fields)}")
        made = cls(**given or {})
        made = made._replace(accuracy=check_options(OP, "optimal", made.accuracy, made.precision))
        if not isinstance(made.layouts, Mapping):  # which names nodes: each graph has its own
            read_layouts(cast(Any, None), made.layouts)
        if made.fallback not in ("eager", "inductor"):
            raise ArgumentError(OP, "fallback", made.fallback, "has to be 'eager' or 'inductor'")
        if made.threads is not None:
            check_threads(OP, "threads", made.threads)
        return made

    def options(self) -> Options:
        """The options of each plan."""
        return Options(self.layouts, "optimal", False, self.threads or get_num_threads(), self.accuracy)


def blockconv_backend(gm: Any, example_inputs: Sequence[Any], **given: Any) -> Any:
    """torch.compile calls this with each graph. Use ``torch.compile(model, backend="blockconv")``."""
    settings = Settings.read(given.get("options"))
    name = f"graph {CompileContext.current_compile_id()}"

    owned: list[Any] = []

    def compiled(kind: str, graph: Any, inputs: Sequence[Any]) -> Any:
        strides_of_kernels(graph.graph)
        how = settings if kind == "inference" else settings._replace(precision="float32")
        if kind == "forward" and how != settings:
            warn(f"blockconv: {name}: precision has no effect in a step of training", 2, UserWarning)
        # Gradients read nearly all values, and tensors have no blocks.
        if kind != "inference" and how.layouts == "auto":
            how = how._replace(layouts=("NCHW", "NHWC"))
        # Threads compile backward graphs while others trace, and what traces marks all new nodes of the process.
        with compile_lock:
            return _planned(graph, recorded(name, kind, owned), how, set() if kind == "backward" else _static())

    how: dict[str, Any] = {"decompositions": decompositions()}
    # Graphs of a training step keep PyTorch's ops whole: they are fast as such.
    needs_gradients = (isinstance(x, torch.Tensor) and x.requires_grad for x in example_inputs)
    if trains := torch.is_grad_enabled() and any(needs_gradients):
        how["partition_fn"] = partition_step
        # Else PyTorch writes running statistics after the graph, and a checkpoint that reads them finds them changed.
        how["keep_inference_input_mutations"] = True
    elif not torch._dynamo.config.assume_static_by_default:  # which has as inputs those alone that changed before
        _mark_static(gm.graph)

    compiler = aot_autograd(
        fw_compiler=functools.partial(compiled, "forward"),
        bw_compiler=functools.partial(compiled, "backward"),
        inference_compiler=functools.partial(compiled, "inference"),
        **how,
    )
    with kept_whole(trains):
        return compiler(gm, example_inputs)


def _mark_static(graph: Any) -> None:
    """Mark a module's own floats, which Dynamo passes as new tensors, as inputs that are static as its weights are."""
    for node in graph.find_nodes(op="placeholder"):
        given = node.meta.get("grapharg")
        if given is not None and given.pass_arg_as_tensor and given.source.guard_source.is_unspecialized_nn_module():
            node.meta.setdefault("tensor_dict", {})["_dynamo_static_input_type"] = "unguarded"


def _static() -> set[int]:
    """The inputs of the graph that are parameters, buffers or floats of modules, and that the graph does not write."""
    known = TracingContext.get().fw_metadata
    first = len(known.tokens)
    return {k for k in known.static_input_indices or () if not known.input_info[k - first].mutates_data}


class _Boxed(CodeGen):  # type: ignore[misc]
    """Code of a graph that takes a list and empties it, so that a value's memory goes after its last use."""

    def gen_fn_def(self, free_vars: list[str], maybe_return_annotation: str, **how: Any) -> str:
        """The head of the function, which PyTorch's code generator calls for."""
        names = [name.partition(":")[0] for name in free_vars if name != "self"]
        return f"def forward(self, args):\n    [{', '.join(names)}] = args\n    args.clear()"


def _boxed(gm: Any, record: Compiled, static: Collection[int]) -> Any:
    """A graph as AOTAutograd calls it: with a list. It keeps the record alive."""
    for view in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
        view.target = torch.ops.aten.reshape.default  # kernels of PyTorch give other strides than it traced
    gm.graph.set_codegen(_Boxed())
    gm.recompile()
    _LazyGraphModule.force_recompile(gm)  # else each call goes by the function that makes the code at the first
    run = gm.forward

    def call(args: list[Any]) -> Any:
        if not record.owned:
            record.owned.extend(weakref.ref(memory_of(args[k])) for k in static)
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


# ---------------------------------------------------------------- which nodes run as plans


def _planned(gm: Any, record: Compiled, settings: Settings, static: set[int]) -> Any:
    """A graph, compiled. static: its inputs that are parameters, which only the plans of inference hold packed."""
    started, infers = time.perf_counter(), record.kind == "inference"
    held = static if infers else set()
    place_norms(gm.graph)
    constant = _constants(gm.graph, held)
    _mark_numbers(gm.graph)
    taken, refused = _judged(gm.graph, constant)
    last, missing = _last_views(gm.graph), bool(refused.nodes)
    chosen = _partitions(gm, taken - last, refused)
    record.nodes = sum(_counts(node) and node not in constant and node not in last for node in gm.graph.nodes)
    own = {node for nodes in chosen for node in nodes} | {*filter(_is_own, gm.graph.nodes)}
    record.taken = sum(map(_counts, own))
    record.plans, record.refused = len(chosen), refused.lines()
    names = [f"blockconv_{k}" for k in range(len(chosen))]
    fuse_by_partitions(gm, chosen, prefix="blockconv_", always_return_tuple=True)
    constant = _constants(gm.graph, held)  # of new nodes
    for call in gm.graph.find_nodes(op="call_module"):
        if call.target in names:
            _place_part(gm, call, constant, record, settings)
    gm.graph.eliminate_dead_code()
    record.seconds += time.perf_counter() - started
    with ignoring():
        log.info("%s", record)
    if settings.fallback == "inductor":
        from blockconv.frontends.torch import inductor  # whose import takes seconds

        inductor.compile_rest(gm)
    for node in [node for node in gm.graph.nodes if writes(node)]:
        gm.graph.output_node().prepend(node)  # after all that read what it writes, wherever these were put
    if missing and infers:  # PyTorch runs a few small ops as fast
        shown = "; ".join(record.refused[:4]) + (f"; and {len(record.refused) - 4} more" if record.refused[4:] else "")
        text = f"blockconv: {record.name}: {record.nodes - record.taken} of {record.nodes} ops run in PyTorch: {shown}"
        warn(f"{text}. blockconv.torch.report() has all")
    return _boxed(gm, record, static)


def _counts(node: Any) -> bool:
    """Whether a node is an op, and not a size or a part of a result."""
    kind = kind_of(node) if node.op == "call_function" else ""
    return kind.startswith(("aten.", "blockconv.", "prims.")) and not kind.startswith("aten.sym_")


def _is_own(node: Any) -> bool:
    """Whether a node is an op of blockconv's, which needs no plan."""
    return kind_of(node).startswith("blockconv.")


def _is_view(node: Any) -> bool:
    """Whether a result of a node may share memory with an operand."""
    return calls_op(node) and any(r.alias_info for r in node.target._schema.returns)


def _constants(graph: Any, static: set[int]) -> set[Any]:
    """The nodes that depend on parameters and buffers alone, or on nothing, as a range does. Some also depend on sizes,
    as where an instance norm repeats its weight for each image."""
    found = {node for index, node in enumerate(graph.find_nodes(op="placeholder")) if index in static}
    for node in graph.nodes:
        others = [other for other in node.all_input_nodes if other not in found]
        are_sizes = (isinstance(x.meta.get("val"), torch.SymInt) and "number" not in x.meta for x in others)
        repeats = len(others) < len(node.all_input_nodes) and all(are_sizes)
        of_constants = not draws(node) and (not others or repeats)
        if node.op == "get_attr" or (node.op == "call_function" and of_constants):
            found.add(node)
    return found


def _judged(graph: Any, constant: set[Any]) -> tuple[set[Any], Refused]:
    """The nodes that translators take, by running these over stand-ins; and why not the others."""
    reader, taken, refused = Reader("graph", fake=True), set(), Refused()
    for node in graph.nodes:
        reader.refused = Refused()
        if node.op == "call_function" and node not in constant and "number" not in node.meta:
            if device := elsewhere(node):
                reader.refused.add(node, device)
            else:
                reader.read([node])
            if not reader.refused.nodes:
                taken.add(node)
            elif not _is_own(node):
                for why, titles in reader.refused.nodes.items():
                    refused.nodes.setdefault(why, []).extend(titles)
        if node.op != "output":
            given = reader.values.get(node)
            if node.op == "get_attr":
                reader.values[node] = Constant(getattr(graph.owning_module, node.target), node.name)
            elif not isinstance(given, list):  # whose outputs that blockconv does not compute are None
                reader.values[node] = stand_in(node, constant=node in constant)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        seen = node.args[0]
        while node not in taken and seen in taken and _is_view(seen):
            taken.discard(seen)
            refused.add(seen, "a view, whose memory as_strided reads")
            seen = seen.args[0]
    return taken, refused


def _last_views(graph: Any) -> set[Any]:
    """Views that only the caller reads. PyTorch makes them: they share memory with other outputs, as in eager mode.

    A view that others read too is made once more for the caller, who gets no copy.
    """
    output, copies = graph.output_node(), dict[Any, Any]()

    def copy(node: Any) -> Any:
        if _views(node) and node not in copies:
            copies[node] = graph.node_copy(node, copy)
        return copies.get(node, node)

    with graph.inserting_before(output):
        output.args = map_arg(output.args, copy)
    graph.eliminate_dead_code()
    found: set[Any] = set()
    for node in reversed(graph.nodes):
        if _views(node) and all(user.op == "output" or user in found for user in node.users):
            found.add(node)
    return found


def _views(node: Any) -> bool:
    """Whether a node is a view, or one of several that an op makes."""
    maker = node.args[0] if node.target is operator.getitem else node
    return _is_view(maker) and not writes(maker)


def _partitions(gm: Any, taken: set[Any], refused: Refused) -> list[dict[Any, Any]]:
    """The nodes of each part. A part has a convolution, a pool or a matrix, or many nodes."""
    support = create_op_support(lambda submodules, node: node in taken)
    proposed = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True).propose_partitions()
    chosen = []
    for partition in proposed:
        nodes = dict(partition.nodes)
        kinds = {kind_of(node).removeprefix("aten.") for node in nodes}
        if kinds & HEAVY or sum(map(_counts, nodes)) >= LEAST:
            chosen.append(nodes)
        else:
            for node in filter(_counts, nodes):
                refused.add(node, "too few ops for a plan")
    return chosen


def _place_part(gm: Any, call: Any, constant: set[Any], record: Compiled, settings: Settings) -> None:
    """A `Part` in place of a fused module. Parameters become its arguments, and what follows from them its own work."""
    module = gm.get_submodule(call.target)
    leaves = [*dict.fromkeys(leaf for argument in call.args for leaf in _leaves(argument, constant))]
    graph = Graph()
    inner: dict[Any, Any] = {}
    for leaf in leaves:
        inner[leaf] = graph.placeholder(leaf.name)
        inner[leaf].meta = leaf.meta

    def place(outer: Any) -> Any:
        if outer not in inner:
            inner[outer] = graph.node_copy(outer, place)
        return inner[outer]

    placed = dict(zipped(module.graph.find_nodes(op="placeholder"), map(place, call.args)))
    graph.output(graph.graph_copy(module.graph, placed))
    call.args = tuple(leaves)
    part = Part(GraphModule(module, graph), [leaf in constant for leaf in leaves], record, settings)
    record.parts.append(part)
    gm.add_submodule(call.target, part)


def _leaves(node: Any, constant: set[Any]) -> Iterator[Any]:
    """A node that flows into a part, or the parameters behind one that is constant."""
    if node.op == "call_function" and node in constant:
        for other in node.all_input_nodes:
            yield from _leaves(other, constant)
    else:
        yield node


# ---------------------------------------------------------------- numbers

_OPERANDS = {"self", "other", "min", "max"}  # ATen's names of arguments that may be tensors or numbers alike
_BY_KNOWN = {"aten.remainder", "aten.fmod"}  # ops whose divisor has to be known


def _mark_numbers(graph: Any) -> None:
    """Mark numbers that ops only calculate with, with the type that plans take them in. Sizes of inputs stay sizes."""
    sizes = _symbols(node.meta.get("val") for node in graph.find_nodes(op="placeholder"))
    for node in reversed(graph.nodes):
        value = node.meta.get("val")
        if not isinstance(value, (torch.SymInt, torch.SymFloat)) or _follows(value, sizes):
            continue
        if all("number" in user.meta or user.op == "output" or _calculates(user, node) for user in node.users):
            node.meta["number"] = torch.int64 if isinstance(value, torch.SymInt) else torch.float32


def _calculates(user: Any, number: Any) -> bool:
    """Whether an op takes a number as one of its operands, and as nothing else."""
    given = arguments_of(user) if calls_op(user) and kind_of(user) not in _BY_KNOWN else {}
    named = {name for name in given if given[name] is number}
    return bool(named) and named <= _OPERANDS and given.get("rounding_mode") is None


def _symbols(values: Iterable[Any]) -> set[Any]:
    """The symbols that are sizes of tensors among these values."""
    sizes = [size for value in values if isinstance(value, torch.Tensor) for size in value.shape]
    return {size.node.expr for size in sizes if isinstance(size, torch.SymInt) and size.node.expr.is_symbol}


def _follows(value: Any, symbols: set[Any]) -> bool:
    """Whether a number follows from these sizes."""
    is_symbolic = isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool))
    return is_symbolic and bool(value.node.expr.free_symbols <= symbols)


# ---------------------------------------------------------------- one part


class Part(torch.nn.Module):  # type: ignore[misc]
    """Connected nodes of a graph, which run as a plan, or in PyTorch if there is none.

    Its tensors are inputs of the plan, and so are numbers that ops only calculate with. The plan takes all sizes of
    inputs. Numbers that follow from sizes are computed from these. For each value of another number there is a plan.
    """

    def __init__(self, module: Any, static: Sequence[bool], record: Compiled, settings: Settings) -> None:
        super().__init__()
        self.in_pytorch, self.record, self.settings = module, record, settings
        self.holders = list(module.graph.find_nodes(op="placeholder"))
        self.static = [k for k, is_static in enumerate(static) if is_static]
        pairs = [*enumerate(self.holders)]
        rest = [(k, node.meta.get("number"), node.meta["val"]) for k, node in pairs if not static[k]]
        # By its place among the arguments, the type of each input of the plan that is a number; None for a tensor.
        self.flows = {k: kind for k, kind, value in rest if kind or isinstance(value, torch.Tensor)}
        symbols = _symbols(value for _, _, value in rest)
        numbers = {k: value for k, _, value in rest if k not in self.flows}
        self.derived = {k: value.node for k, value in numbers.items() if _follows(value, symbols)}
        self.numbers = [k for k in numbers if k not in self.derived]
        sizes = [size for *_, value in rest for size in getattr(value, "shape", ())]
        self._sizes_change = bool(numbers) or any(isinstance(size, torch.SymInt) for size in sizes)
        self._lock = threading.Lock()
        self.weights: list[Any] = []  # of the last plan
        # The weights, and the variants for them, by formats and numbers. Another thread may put others in their place.
        self._held: tuple[Snapshot | None, dict[Any, _Variant]] = None, {}
        self._options: dict[Any, Options] = {}

    def forward(self, *args: Any) -> Any:
        """The outputs, as a tuple."""
        weights = [args[k] for k in self.static]
        given = ((args[k], kind) for k, kind in self.flows.items())  # numbers have a kind
        flows = [x if kind is None else torch.tensor(x, dtype=kind, device="cpu") for x, kind in given]
        key, shapes = (*map(is_last, flows), *(args[k] for k in self.numbers)), tuple([x.shape for x in flows])
        held, variants = self._held
        variant = variants.get(key) if held and held.are(weights) else None
        results: Any = () if variant is None else variant.results.get(shapes, ())
        if results == ():
            variant, results = self._prepared(args, weights, key, shapes)
        if variant is None or results is None:
            return self.in_pytorch(*args)
        made = {} if variant.plan is None else variant.plan(*flows)
        outputs = iter([made] if isinstance(made, torch.Tensor) else made.values())
        return tuple(_as_promised(next(outputs), one) if isinstance(one, tuple) else _own(one) for one in results)

    @property
    def plans(self) -> list[Plan]:
        """Its plans, for other formats and numbers."""
        return [one.plan for one in self._held[1].values() if one.plan is not None]

    def forget_weights(self) -> None:
        """Pack anew at the next call."""
        with self._lock:
            self._held = None, {}

    def _prepared(self, args: Sequence[Any], weights: list[Any], key: Any, shapes: Shapes) -> tuple[_Variant, Any]:
        """The variant, ready for these shapes, and its results."""
        with self._lock:
            started = time.perf_counter()
            held, variants = self._held
            if not (held and held.are(weights)):
                self.weights = weights
                self._held = _, variants = Snapshot(weights), dict[Any, _Variant]()
                self.record.packed += 1
            given = [None if k in self.flows else x for k, x in enumerate(args)]
            variant = variants.get(key) or _Variant(self, given)
            if shapes not in variant.results:
                while len(variant.results) >= SIZES:
                    del variant.results[next(iter(variant.results))]
                try:
                    self._plan(variant, key, shapes)
                except BlockconvError as error:
                    variant.results[shapes] = None
                    self.record.failed.append(str(error))
                    text = f"blockconv: {self.record.name}: a part of the graph runs in PyTorch: {error}"
                    warn(text, stacklevel=4)
            if key not in variants and len(variants) >= KEPT:
                del variants[next(iter(variants))]
            variants[key] = variant
            self.record.seconds += time.perf_counter() - started
            return variant, variant.results[shapes]

    def _plan(self, variant: _Variant, key: Any, shapes: Shapes) -> None:
        """Let a variant have a plan, bound for these shapes. Kernels and layouts are chosen once for each key."""
        if not all(map(math.prod, shapes)):  # PyTorch knows what an empty batch gives: gradients that are zero
            variant.results[shapes] = None
            return
        names = [self.holders[k].name for k in self.flows]
        if variant.plan is not None:
            variant.plan.bind(shapes)
        if variant.plan is not None and shapes in variant.results:
            return
        network: Network | None = variant.read(dict(zipped(names, shapes)))
        if variant.plan is not None or network is None:
            return
        ends = {name: NHWC for name, is_last in zip(names, key, strict=False) if is_last}
        orders = [strides for strides in variant.results[shapes] or () if isinstance(strides, tuple)]
        ends |= {name: NHWC for name, strides in zipped(network.outputs, orders) if _channels_first(strides)}
        like = next(iter(self.plans), None) if self._sizes_change else None
        options = self._options.get(key) or self.settings.options()
        plan = compile_between(network, ends, self.settings.precision, options, like)
        self._options[key] = plan.options_with_choices()
        if not self._sizes_change:
            plan.release()
        variant.plan = plan


class _Variant:
    """A part for some memory formats of its inputs, some numbers, and its weights.

    given: its arguments; None for values that flow.
    plan: None: all results are constants, or PyTorch runs them.
    results: by the shapes of inputs: see `_result`; None: PyTorch runs them.
    """

    def __init__(self, part: Part, given: list[Any]) -> None:
        self.part, self.given = part, given
        self.plan: Plan | None = None
        self.results: dict[Shapes, tuple[Any, ...] | None] = {}

    def read(self, shapes: Mapping[str, Shape]) -> Any:
        """The network for these shapes of its inputs; None if none of its outputs depends on one."""
        part, graph = self.part, self.part.in_pytorch.graph
        reader, held = Reader(part.record.name), [part.holders[k].meta["val"] for k in part.flows]
        traced = [size for value in held for size in getattr(value, "shape", ())]
        pairs = zipped(traced, [size for shape in shapes.values() for size in shape])
        sizes = {size.node.expr: number for size, number in pairs if isinstance(size, torch.SymInt)}
        for k, (node, value) in enumerate(zipped(part.holders, self.given)):
            if k in part.flows:
                reader.values[node] = reader.input(node.name, shapes[node.name], stand_in(node).type)
            elif k in part.derived:
                number = part.derived[k]
                reader.values[node] = number.pytype(number.expr.subs(sizes))
            else:
                reader.values[node] = Constant(lent(value), node.name) if k in part.static else value
        reader.read(node for node in graph.nodes if node.op == "call_function")
        reader.refused.report(OP)
        (results,) = graph.output_node().args
        known = [reader.values[node] for node in results]
        names = reader.outputs(value for value in known if isinstance(value, Tensor))
        made = [_result(value, node, sizes) for value, node in zipped(known, results)]
        self.results[tuple(shapes.values())] = tuple(made)
        return reader.emitter.network(names, self.read) if names else None


def _result(value: Any, node: Any, sizes: Mapping[Any, int]) -> Any:
    """How a part gives an output: the strides of a tensor that its plan makes, or else the value itself."""
    if not isinstance(value, (Tensor, Constant)):
        return value
    made = value.tensor if isinstance(value, Constant) else value
    strides = _strides(node.meta["val"], made.shape, sizes)
    return strides if made is value else _as_promised(made, strides)


def _own(value: Any) -> Any:
    """A constant result for the caller, who may write to it."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _strides(fake: Any, shape: Sequence[int], sizes: Mapping[Any, int]) -> Shape:
    """The strides of the trace, with these values of its symbols. If others decide, dense ones in the trace's order of
    axes; row-major ones if data decide."""
    symbols = [stride for stride in fake.stride() if isinstance(stride, torch.SymInt)]
    found = [n.node.expr.subs(sizes) if isinstance(n, torch.SymInt) else n for n in fake.stride()]
    if all(isinstance(n, int) or n.is_Integer for n in found):
        return tuple(map(int, found))
    known = all(stride.node.hint is not None for stride in symbols)
    size = 1
    for axis in sorted(range(len(shape)), key=lambda k: (hint(fake.stride(k)) if known else 0, -k)):
        found[axis] = size
        size *= max(1, shape[axis])
    return tuple(found)


def _channels_first(strides: Shape) -> bool:
    """Whether channels are the innermost axis of images, after rows and columns."""
    return len(strides) == 4 and strides[0] >= strides[2] >= strides[3] > strides[1]


def _as_promised(tensor: Any, strides: Shape) -> Any:
    """The values of a tensor with these strides; itself if it has them."""
    if tensor.stride() == strides:
        return tensor
    if all(have == want or n < 2 for have, want, n in zipped(tensor.stride(), strides, tensor.shape)):
        return tensor.as_strided(tensor.shape, strides)
    once = tensor[tuple(slice(None) if step else slice(1) for step in strides)]  # an expanded axis is one value
    return tensor.new_empty_strided(once.shape, strides).copy_(once).expand(tensor.shape)
