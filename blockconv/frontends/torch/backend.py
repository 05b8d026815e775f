"""The back end of `torch.compile`: what the planner takes runs as plans, the rest in PyTorch.

AOTAutograd gives a graph of ATen ops whose parameters are inputs. A dry run of the translators over fake tensors says
which nodes blockconv takes, and why not the others. Connected nodes become one `Part`, which is planned at its first
call, when the weights are there. Parameters and buffers are its constants: batch norms are folded into convolutions,
and weights are packed once. A part remembers the identity, the address and the version of each. If one changes, it
folds and packs again, and keeps the kernels and layouts that it chose.
"""

from __future__ import annotations

import functools
import logging
import threading
import time
import warnings
import weakref
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch._dynamo.backends.common import aot_autograd
from torch._guards import CompileContext, TracingContext
from torch.fx import Graph, GraphModule
from torch.fx._lazy_graph_module import _LazyGraphModule
from torch.fx.graph import CodeGen
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import OperatorSupportBase
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from blockconv.core.errors import ArgumentError, BlockconvError, SlowPathWarning
from blockconv.core.layout import Layout
from blockconv.core.types import NUMBERS
from blockconv.frontends.torch.decompositions import decompositions, kept_whole
from blockconv.frontends.torch.ops import HEAVY, OPS
from blockconv.frontends.torch.reader import (
    Constant,
    Reader,
    Refused,
    hint,
    kind_of,
    stand_in,
    version,
    warn_of_unseen,
)
from blockconv.frontends.torch.reports import Compiled, recorded
from blockconv.frontends.torch.training import partition_step, place_ops
from blockconv.network.graph import Tensor
from blockconv.network.plan import Plan, check_options, compile_between
from blockconv.network.planning.planned import Options
from blockconv.runtime import check_threads, get_num_threads

__all__ = ["Settings", "blockconv_backend"]

OP = 'torch.compile(backend="blockconv")'
KEPT = 8  # sizes of inputs that a part keeps plans for
LEAST = 8  # nodes of a part that has neither convolution, nor pool, nor matrix
TYPES = tuple(name for name in NUMBERS if name != "float64")
NHWC = Layout("NHWC")
log = logging.getLogger("blockconv.torch")


class Settings(NamedTuple):
    """The `options` of torch.compile, as in `compile`."""

    threads: int | None = None
    layouts: Any = "auto"
    accuracy: str = "default"
    precision: Any = "float32"
    fallback: str = "eager"

    @classmethod
    def read(cls, given: Mapping[str, Any] | None) -> Settings:
        """Raises ArgumentError for an option that does not exist."""
        for name, value in (given or {}).items():
            if name not in cls._fields:
                raise ArgumentError(OP, "options", {name: value}, f"has to be among {', '.join(cls._fields)}")
        made = cls(**given or {})
        check_options(OP, "optimal", made.accuracy, made.precision)
        if made.fallback not in ("eager", "inductor"):
            raise ArgumentError(OP, "fallback", made.fallback, "has to be 'eager' or 'inductor'")
        if made.threads is not None:
            check_threads(OP, "threads", made.threads)
        return made

    def of_plans(self) -> list[str]:
        """The options of plans that are not the defaults."""
        given = self._replace(fallback="eager")
        return [name for name in self._fields if getattr(given, name) != self._field_defaults[name]]

    def options(self) -> Options:
        """The options of each plan."""
        return Options(self.layouts, "optimal", False, self.threads or get_num_threads(), self.accuracy)


def blockconv_backend(gm: Any, example_inputs: Sequence[Any], **given: Any) -> Any:
    """torch.compile calls this with each graph. Use ``torch.compile(model, backend="blockconv")``."""
    settings = Settings.read(given.get("options"))
    name = f"graph {CompileContext.current_compile_id()}"

    owned: list[Any] = []

    def infer(graph: Any, inputs: Sequence[Any]) -> Any:
        return _inference(graph, recorded(name, "inference", owned), settings)

    def train(kind: str, graph: Any, inputs: Sequence[Any]) -> Any:
        started, record = time.perf_counter(), recorded(name, kind, owned)
        place_ops(graph, record)
        record.seconds += time.perf_counter() - started
        log.info("%s", record)
        static = _static() if kind == "forward" else set()
        if kind == "forward" and (ignored := settings.of_plans()):
            text = f"blockconv: {name}: a step of training has no plan, so that {', '.join(ignored)} have no effect"
            warnings.warn(text, UserWarning, stacklevel=2)
        if settings.fallback == "inductor":
            return _recorded(_inductor().compile_step(graph, inputs, kind == "backward", static), record, static)
        return _boxed(graph, record, static)

    how: dict[str, Any] = {"decompositions": decompositions()}
    if _needs_gradients(example_inputs):
        how = {"decompositions": {}, "partition_fn": partition_step}
        if settings.fallback == "inductor":
            how = _inductor().for_training()
        # Else PyTorch writes running statistics after the graph, and a checkpoint that reads them finds them changed.
        how["keep_inference_input_mutations"] = True

    compiler = aot_autograd(
        fw_compiler=functools.partial(train, "forward"),
        bw_compiler=functools.partial(train, "backward"),
        inference_compiler=infer,
        **how,
    )
    with kept_whole():
        return compiler(gm, example_inputs)


def _inductor() -> Any:
    """The module of that name, whose import takes seconds."""
    from blockconv.frontends.torch import inductor

    return inductor


def _needs_gradients(inputs: Sequence[Any]) -> bool:
    """Whether AOTAutograd makes graphs of a training step. These keep PyTorch's ops whole: they are fast as such."""
    return torch.is_grad_enabled() and any(isinstance(x, torch.Tensor) and x.requires_grad for x in inputs)


def _static() -> set[int]:
    """The inputs of the graph that are parameters or buffers, and that the graph does not write."""
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
    """A graph as AOTAutograd calls it: with a list."""
    gm.graph.set_codegen(_Boxed())
    gm.recompile()
    _LazyGraphModule.force_recompile(gm)  # else each call goes by the function that makes the code at the first
    return _recorded(gm.forward, record, static)


def _recorded(run: Callable[[list[Any]], Any], record: Compiled, static: Collection[int]) -> Any:
    """A function of a list that keeps the record alive."""

    def call(args: list[Any]) -> Any:
        if not record.owned:
            record.owned.extend(weakref.ref(args[k]) for k in static)
        return run(args)

    call._boxed_call = True  # type: ignore[attr-defined]
    return call


# ---------------------------------------------------------------- which nodes run as plans


def _inference(gm: Any, record: Compiled, settings: Settings) -> Any:
    """A graph without gradients, compiled."""
    started = time.perf_counter()
    static = _static()
    constant = _constants(gm.graph, static)
    taken, refused = _judged(gm.graph, constant)
    chosen = _partitions(gm, taken, refused)
    record.nodes = sum(_counts(node) and node not in constant for node in gm.graph.nodes)
    record.taken = sum(_counts(node) for nodes in chosen for node in nodes)
    record.plans, record.refused = len(chosen), refused.lines()
    names = [f"blockconv_{k}" for k in range(len(chosen))]
    fuse_by_partitions(gm, chosen, prefix="blockconv_", always_return_tuple=True)
    constant = _constants(gm.graph, static)  # of new nodes
    for call in gm.graph.find_nodes(op="call_module"):
        if call.target in names:
            _place_part(gm, call, constant, record, settings)
    gm.graph.eliminate_dead_code()
    record.seconds += time.perf_counter() - started
    log.info("%s", record)
    if settings.fallback == "inductor":
        _inductor().compile_rest(gm)
    for node in [node for node in gm.graph.nodes if _writes(node)]:
        gm.graph.output_node().prepend(node)  # after all that read what it writes, wherever these were put
    if refused.nodes:
        shown = "; ".join(record.refused[:4]) + (f"; and {len(record.refused) - 4} more" if record.refused[4:] else "")
        text = f"blockconv: {record.name}: {record.nodes - record.taken} of {record.nodes} ops run in PyTorch: {shown}"
        warnings.warn(f"{text}. blockconv.torch.report() has all", SlowPathWarning, stacklevel=2)
    return _boxed(gm, record, static)


def _counts(node: Any) -> bool:
    """Whether a node is an op, and not a size or a part of a result."""
    kind = kind_of(node) if node.op == "call_function" else ""
    return kind.startswith(("aten.", "blockconv.")) and not kind.startswith("aten.sym_")


def _writes(node: Any) -> bool:
    """Whether a node writes an input of the graph."""
    return isinstance(node.target, torch._ops.OpOverload) and bool(node.target._schema.is_mutable)


def _constants(graph: Any, static: set[int]) -> set[Any]:
    """The nodes that depend on parameters and buffers alone, or on nothing, as a range does."""
    found: set[Any] = set()
    for index, node in enumerate(graph.find_nodes(op="placeholder")):
        if index in static:
            found.add(node)
    for node in graph.nodes:
        is_random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        of_constants = not is_random and all(other in found for other in node.all_input_nodes)
        if node.op == "get_attr" or (node.op == "call_function" and of_constants):
            found.add(node)
    return found


def _judged(graph: Any, constant: set[Any]) -> tuple[set[Any], Refused]:
    """The nodes that translators take, by running these over stand-ins; and why not the others."""
    reader, taken = Reader("graph", OPS, fake=True, types=TYPES), set()
    for node in graph.nodes:
        before = sum(map(len, reader.refused.nodes.values()))
        if node.op == "call_function" and node not in constant:
            elsewhere = _elsewhere(node)
            if elsewhere:
                reader.refused.add(node, elsewhere)
            else:
                reader.read([node])
            if sum(map(len, reader.refused.nodes.values())) == before:
                taken.add(node)
        if node.op != "output":
            given = reader.values.get(node)
            if node.op == "get_attr":
                reader.values[node] = Constant(getattr(graph.owning_module, node.target), node.name)
            elif not isinstance(given, list):  # whose outputs that blockconv does not compute are None
                reader.values[node] = stand_in(node, constant=node in constant)
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        seen = node.args[0]
        while node not in taken and seen in taken and any(made.alias_info for made in seen.target._schema.returns):
            taken.discard(seen)
            reader.refused.add(seen, "a view, whose memory as_strided reads")
            seen = seen.args[0]
    return taken, reader.refused


def _elsewhere(node: Any) -> str:
    """The device that a node reads or writes, if that is not the CPU."""
    for other in (node, *node.all_input_nodes):
        value = other.meta.get("val")
        for tensor in value if isinstance(value, (tuple, list)) else (value,):
            if isinstance(tensor, torch.Tensor) and tensor.device.type != "cpu":
                return f"on {tensor.device.type}"
    return ""


class _Support(OperatorSupportBase):  # type: ignore[misc]
    def __init__(self, taken: set[Any]) -> None:
        self.taken = taken

    def is_node_supported(self, submodules: Any, node: Any) -> bool:
        return node in self.taken


def _partitions(gm: Any, taken: set[Any], refused: Refused) -> list[dict[Any, Any]]:
    """The nodes of each part. A part has a convolution, a pool or a matrix, or many nodes."""
    proposed = CapabilityBasedPartitioner(gm, _Support(taken), allows_single_node_partition=True).propose_partitions()
    chosen = []
    for partition in proposed:
        nodes = dict(partition.nodes)
        kinds = {kind_of(node).removeprefix("aten.") for node in nodes}
        if kinds & HEAVY or sum(map(_counts, nodes)) >= LEAST:
            chosen.append(nodes)
        else:
            for node in filter(_counts, nodes):
                refused.add(node, "alone between such ops, and too small for a plan")
    return chosen


def _place_part(gm: Any, call: Any, constant: set[Any], record: Compiled, settings: Settings) -> None:
    """A `Part` in place of a fused module. Parameters become its arguments, and what follows from them its own work."""
    module = gm.get_submodule(call.target)
    leaves: dict[Any, None] = {}
    for argument in call.args:
        _collect_leaves(argument, constant, leaves)
    graph = Graph()
    inner: dict[Any, Any] = {}
    for leaf in leaves:
        inner[leaf] = graph.placeholder(leaf.name)
        inner[leaf].meta = leaf.meta

    def place(outer: Any) -> Any:
        if outer not in inner:
            inner[outer] = graph.node_copy(outer, place)
        return inner[outer]

    placed = dict(zip(module.graph.find_nodes(op="placeholder"), map(place, call.args), strict=True))
    for node in module.graph.nodes:
        if node.op != "placeholder":
            placed[node] = graph.node_copy(node, placed.__getitem__)
    call.args = tuple(leaves)
    part = Part(GraphModule(module, graph), [leaf in constant for leaf in leaves], record, settings)
    record.parts.append(part)
    gm.add_submodule(call.target, part)


def _collect_leaves(node: Any, constant: set[Any], leaves: dict[Any, None]) -> None:
    """The arguments of a part, in an order: what flows into it, and the parameters behind what is constant."""
    if node.op == "call_function" and node in constant:
        for other in node.all_input_nodes:
            _collect_leaves(other, constant, leaves)
    else:
        leaves[node] = None


# ---------------------------------------------------------------- one part


class _Made(NamedTuple):
    """A plan for arguments of one kind; None: they run in PyTorch, or all results are constants.

    results: see `_result`; None: they run in PyTorch.
    """

    plan: Plan | None
    results: tuple[Any, ...] | None


class Part(torch.nn.Module):  # type: ignore[misc]
    """Connected nodes of a graph, which run as a plan for each size of inputs; in PyTorch if there is none."""

    def __init__(self, module: Any, static: Sequence[bool], record: Compiled, settings: Settings) -> None:
        super().__init__()
        self.in_pytorch, self.record, self.settings = module, record, settings
        self.static = [k for k, is_static in enumerate(static) if is_static]
        self.flows = [k for k, is_static in enumerate(static) if not is_static]
        given = [node.meta["val"] for node in module.graph.find_nodes(op="placeholder")]
        sizes = [size for value in given for size in getattr(value, "shape", (value,))]
        self._sizes_change = any(isinstance(size, torch.SymInt) for size in sizes)
        self._lock = threading.Lock()
        self.weights: list[Any] = []  # held, so that no other tensor can have their identities
        self._memory: list[Any] = []  # likewise their addresses, also after an assignment to `.data`
        self.versions: tuple[Any, ...] = ()
        self._plans: dict[Any, Any] = {}  # by key; and the versions of the weights that they are for
        self._options: dict[Any, Options] = {}

    def forward(self, *args: Any) -> Any:
        """The outputs, as a tuple."""
        weights = [args[k] for k in self.static]
        versions = tuple(map(version, weights))
        key = tuple(_key(args[k]) for k in self.flows)
        plans = self._plans  # another thread may put others in their place
        made = plans.get(key) if plans.get("versions") == versions else None
        if made is None:
            made = self._prepared(args, weights, versions, key)
        if made.results is None:
            return self.in_pytorch(*args)
        flows = (args[k] for k in self.flows if isinstance(args[k], torch.Tensor))
        results = {} if made.plan is None else made.plan(*flows)
        outputs = iter([results] if isinstance(results, torch.Tensor) else results.values())
        return tuple(_as_promised(next(outputs), one) if isinstance(one, tuple) else _own(one) for one in made.results)

    def forget_weights(self) -> None:
        """Pack anew at the next call."""
        with self._lock:
            self.versions, self._plans = (), {}

    def _prepared(self, args: Sequence[Any], weights: list[Any], versions: tuple[Any, ...], key: Any) -> _Made:
        with self._lock:
            started = time.perf_counter()
            if versions != self.versions:
                warn_of_unseen(self.record.name, self.versions, versions)
                self._plans = {"versions": versions}
                self.weights, self.versions = weights, versions
                self._memory = [weight.detach() for weight in weights]
                self.record.packed += 1
            if key not in self._plans:
                if len(self._plans) > KEPT:
                    del self._plans[next(known for known in self._plans if known != "versions")]
                try:
                    self._plans[key] = self._planned(args, key)
                except BlockconvError as error:
                    self._plans[key] = _Made(None, None)
                    self.record.failed.append(str(error))
                    text = f"blockconv: {self.record.name}: a part of the graph runs in PyTorch: {error}"
                    warnings.warn(text, SlowPathWarning, stacklevel=4)
            self.record.seconds += time.perf_counter() - started
            made: _Made = self._plans[key]
            return made

    def _planned(self, args: Sequence[Any], key: Any) -> _Made:
        """A plan for these arguments. Kernels and layouts are chosen once for each key."""
        graph = self.in_pytorch.graph
        reader, ends = Reader(self.record.name, OPS, types=TYPES), {}
        for k, (node, value) in enumerate(zip(graph.find_nodes(op="placeholder"), args, strict=True)):
            if not isinstance(value, torch.Tensor):
                reader.values[node] = value
            elif k in self.static:
                reader.values[node] = Constant(value, node.name)
            else:
                traced: Any = stand_in(node)
                reader.values[node] = tensor = reader.input(node.name, tuple(value.shape), traced.type)
                if _key(value)[1]:
                    ends[tensor.name] = NHWC
        reader.read(node for node in graph.nodes if node.op == "call_function")
        reader.refused.report(OP)
        (results,) = graph.output_node().args
        known = [reader.values[node] for node in results]
        names = reader.outputs(value for value in known if isinstance(value, Tensor))
        orders = list(map(_result, known, results))
        if not names:
            return _Made(None, tuple(orders))
        of_tensors = [order for order in orders if isinstance(order, tuple)]
        ends |= {name: NHWC for name, order in zip(names, of_tensors, strict=True) if order == (0, 2, 3, 1)}
        network = reader.emitter.network(names)
        others = [made.plan for made in self._plans.values() if isinstance(made, _Made) and made.plan is not None]
        like = others[0] if others and self._sizes_change else None
        options = self._options.get(key) or self.settings.options()
        plan = compile_between(network, ends, self.settings.precision, options, like)
        self._options[key] = plan.options_with_choices()
        if not self._sizes_change:
            plan.release()
        return _Made(plan, tuple(orders))


def _key(value: Any) -> Any:
    """The size of an argument, and whether it is channels_last and not contiguous."""
    if not isinstance(value, torch.Tensor):
        return value
    last = value.dim() == 4 and not value.is_contiguous() and value.is_contiguous(memory_format=torch.channels_last)
    return value.shape, last


def _result(value: Any, node: Any) -> Any:
    """How a part gives an output: the order of axes of a tensor that its plan makes, or else the value itself."""
    if isinstance(value, Tensor):
        return _order(node.meta["val"])
    return value.tensor if isinstance(value, Constant) else value


def _own(value: Any) -> Any:
    """A constant result for the caller, who may write to it."""
    return value.clone() if isinstance(value, torch.Tensor) else value


def _order(fake: Any) -> tuple[int, ...]:
    """The order of the axes of an output, outermost first, by the strides that tracing found."""
    hints = [hint(stride) for stride in fake.stride()]
    return tuple(sorted(range(len(hints)), key=lambda axis: (-hints[axis], axis)))


def _as_promised(tensor: Any, order: tuple[int, ...]) -> Any:
    """A dense tensor whose axes lie in this order; itself if it does."""
    strides, size = [0] * len(order), 1
    for axis in reversed(order):
        strides[axis] = size
        size *= max(1, tensor.shape[axis])
    if tensor.stride() == tuple(strides):
        return tensor
    if all(have == want or n < 2 for have, want, n in zip(tensor.stride(), strides, tensor.shape, strict=True)):
        return tensor.as_strided(tensor.shape, strides)
    return tensor.new_empty_strided(tensor.shape, strides).copy_(tensor)
