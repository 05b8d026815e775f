"""The ops that stay in PyTorch, compiled by Inductor: `options={"fallback": "inductor"}`. It needs a C++ compiler."""

from collections.abc import Sequence
from typing import Any

import torch
from torch._guards import TracingContext
from torch._inductor.compile_fx import compile_fx_inner
from torch._inductor.decomposition import select_decomp_table
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.passes.infra.partitioner import CapabilityBasedPartitioner
from torch.fx.passes.operator_support import create_op_support
from torch.fx.passes.utils.fuser_utils import fuse_by_partitions

from blockconv.frontends.torch.reader import elsewhere, writes


def _is_taken(submodules: Any, node: Any) -> bool:
    known = "val" in node.meta and "number" not in node.meta
    return node.op == "call_function" and known and not elsewhere(node) and not writes(node)


def compile_rest(gm: Any) -> None:
    """Replace a graph's ops by modules of Inductor's code. The graph's own modules stay."""
    support = create_op_support(_is_taken)
    found = CapabilityBasedPartitioner(gm, support, allows_single_node_partition=True).propose_partitions()
    if not found:
        return
    fuse_by_partitions(gm, [dict(each.nodes) for each in found], prefix="inductor_", always_return_tuple=True)
    for call in gm.graph.find_nodes(op="call_module"):
        if call.target.startswith("inductor_"):
            call.args = (*call.args, *_sizes_of(gm.graph, call.args))
            fakes, module = [argument.meta["val"] for argument in call.args], gm.get_submodule(call.target)
            count = len(module.graph.find_nodes(op="placeholder"))
            called = lambda *args, module=module, count=count: module(*args[:count])  # noqa: E731
            traced = make_fx(called, decomposition_table=select_decomp_table())(*fakes)
            with TracingContext.patch(output_strides=None):  # which are the graph's, and not those of a part of it
                compiled = compile_fx_inner(traced, fakes, is_inference=True)
            gm.add_submodule(call.target, _Compiled(compiled))


def _sizes_of(graph: Any, given: Sequence[Any]) -> list[Any]:
    """The inputs of a graph that are symbols of sizes, such as s, where these arguments only have s - 2."""
    values = [node.meta["val"] for node in given]
    sizes = [size for x in values if isinstance(x, torch.Tensor) for size in (*x.shape, *x.stride())]
    found = {s.node.expr for s in (*sizes, *values) if isinstance(s, torch.SymInt)}
    missing = {symbol for expression in found for symbol in expression.free_symbols} - found
    holders = [node for node in graph.find_nodes(op="placeholder") if isinstance(node.meta.get("val"), torch.SymInt)]
    return [node for node in holders if node.meta["val"].node.expr in missing]


class _Compiled(torch.nn.Module):  # type: ignore[misc]
    def __init__(self, run: Any) -> None:
        super().__init__()
        self.run = run

    def forward(self, *args: Any) -> Any:
        return tuple(self.run(list(args)))
