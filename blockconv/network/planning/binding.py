"""A chosen kernel bound to a node's buffers: its operands, then the memory that it needs beside them."""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from blockconv import jit
from blockconv.core.layout import Layout, row_major
from blockconv.core.python import zipped
from blockconv.core.quantization import Quantizations, Requantization
from blockconv.core.types import Array, Types, element
from blockconv.dispatch.packing import activation_block, bias_positions, pack_bias, packing_launches, spread_launch
from blockconv.dispatch.quantizing import check_sums, epilogue_block, epilogue_of, quantized_bias, weight_sums
from blockconv.jit.compile_processes import compile_together
from blockconv.kernels import WeightForm
from blockconv.kernels.dynamic.rows import EPILOGUE_BYTES, dynamic_epilogue_op
from blockconv.kernels.table import Epilogue, Primitive
from blockconv.network.graph import Network, Node
from blockconv.network.ops import Conv2d, ConvTranspose2d, DynamicConv2d, FlowingConv2d, QuantizedConv2d
from blockconv.network.ops.base import OUTPUT
from blockconv.network.planning.candidates import Candidate
from blockconv.network.planning.parameters import Parameters
from blockconv.runtime import Buffer, Launch

Known = dict[Any, tuple[Primitive, tuple[Launch, ...]]]
Prepare = Callable[..., tuple[Primitive, tuple[Launch, ...]]]


class Workspace(NamedTuple):
    """Memory that ops need beside what they read and write, while they run.

    reports: whether it is zero before the plan runs, and read after it; see `Primitive.fails`.
    """

    nbytes: int
    reports: bool = False


class BoundNode(NamedTuple):
    """Ops whose k-th buffer is `operands[k]`: as `Op.buffers` has them, or memory."""

    launches: tuple[Launch, ...]
    operands: tuple[int | Array | Workspace | None, ...]


def bind(
    network: Network, node: Node, candidate: Candidate, held: Parameters, threads: int, known: Known | None = None
) -> BoundNode:
    """The ops of a candidate that has a kernel. The buffers are inputs, parameters, output, further results, memory.

    A convolution's are those of its kernels: source, weight, bias, destination, residual, epilogue.

    known: the kernels of convolutions bound before. Convolutions with the same problem share their ops.
    """
    convolution = _CONVOLUTIONS.get(type(node.attributes))
    if convolution is not None:
        prepare = functools.partial(_prepared, {} if known is None else known, candidate, threads)
        return convolution(network, node, candidate, held, prepare)
    primitive = candidate.prepare(threads, **node.attributes.options())
    computed, own = network.tensors[node.output].type.computed, node.attributes.buffers(len(node.inputs))
    block, ranks = (*candidate.request.dst.blocks, 1, 1)[1], (len(network.shape(name)) for name in node.parameters)
    # Constants of channels end with a block, as the destination's channels do.
    layouts = (Layout(f"A{block}a") if rank == 1 < block else row_major(rank) for rank in ranks)
    constants = (held.constant(*named, computed) for named in zipped(node.parameters, layouts))
    last = len(primitive.workspace) - 1
    memory = (Workspace(nbytes, primitive.fails and k == last) for k, nbytes in enumerate(primitive.workspace))
    further = (OUTPUT - 1 - k for k in range(len(node.attributes.further(network.site(node)))))
    buffers = (*range(len(node.inputs)), *constants, OUTPUT, *further) if own is None else own
    return BoundNode(primitive.launches(), (*buffers, *memory))


def bind_all(network: Network, chosen: Sequence[Candidate], held: Parameters, threads: int) -> list[BoundNode | None]:
    """The ops of a candidate for each node; None for a view.

    Kernels that the disk cache does not have are compiled together, on all processors.
    """

    def bound() -> list[BoundNode | None]:
        pairs, known = zipped(network.nodes, chosen), Known()
        return [bind(network, node, one, held, threads, known) if one.row is not None else None for node, one in pairs]

    with jit.collecting() as wanted:
        found = bound()
    if not wanted:
        return found
    with jit.telling(wanted) as tell:
        compile_together(list(wanted), tell)
        return bound()


def _prepared(
    known: Known, candidate: Candidate, threads: int, epilogue: Epilogue
) -> tuple[Primitive, tuple[Launch, ...]]:
    """The kernel of a convolution, and its ops. Its activation's parameters are in a buffer, and not in the ops."""
    key = candidate.row, candidate.request, epilogue
    found = known.get(key)
    if found is None:
        primitive = candidate.prepare(threads)
        found = known[key] = primitive, primitive.launches(epilogue)
    return found


def weights_and_bias(held: Parameters, node: Node, problem: Any, form: WeightForm, types: Types) -> tuple[Array, Array]:
    """Packed weights and biases of a convolution of floats."""
    dtype = types.acc.name
    how = dtype, problem.g, form.sharing, form.bias, form.order, form.pieces
    return held.weights(node, problem, form, how, lambda w, b: pack_bias(problem, b, form, dtype), 1)


def _conv2d(network: Network, node: Node, candidate: Candidate, held: Parameters, prepare: Prepare) -> BoundNode:
    problem = candidate.request.problem
    act, block = activation_block(node.attributes.activation)  # type: ignore[attr-defined]
    residual = len(node.inputs) > 1
    primitive, made = prepare(Epilogue(act, residual))
    weight, bias = weights_and_bias(held, node, problem, primitive.form, candidate.request.types)
    memory = map(Workspace, primitive.workspace)
    return BoundNode(made, (0, weight, bias, OUTPUT, 1 if residual else OUTPUT, block, *memory))


def _flowing_conv2d(
    network: Network, node: Node, candidate: Candidate, held: Parameters, prepare: Prepare
) -> BoundNode:
    """The kernels of a convolution, after ops that pack its weight, and a bias, into memory."""
    problem, types, a = candidate.request.problem, candidate.request.types, node.attributes
    act, block = activation_block(a.of.activation)  # type: ignore[attr-defined]
    primitive, kernels = prepare(Epilogue(act, False))
    form, memory, is_biased = primitive.form, [*map(Workspace, primitive.workspace)], len(node.inputs) > 2
    with jit.collecting(compiles=True):  # programs of packing are kept
        launches, sizes = packing_launches(problem, a.last, form, types, 6 + len(memory))  # type: ignore[attr-defined]
    bias = pack_bias(problem, None, form, types.acc.name)
    if is_biased:
        positions = bias_positions(network.shape(node.inputs[2])[0], problem, form)
        launches.append(spread_launch(positions, bias.itemsize, Buffer(6 + len(memory) + len(sizes)), Buffer(2)))
    packed, *between = map(Workspace, sizes)
    operands = 0, packed, Workspace(bias.nbytes) if is_biased else bias, OUTPUT, OUTPUT, block, *memory, 1, *between
    return BoundNode((*launches, *kernels), (*operands, *[2] * is_biased))


def _quantized_conv2d(
    network: Network, node: Node, candidate: Candidate, held: Parameters, prepare: Prepare
) -> BoundNode:
    problem, types, residual = candidate.request.problem, candidate.request.types, len(node.inputs) > 1
    a: Any = node.attributes
    added = network.tensors[node.inputs[1]].type if residual else None
    after = a.after(types, tuple([network.constants[name] for name in node.parameters[2:]]), added)
    primitive, made = prepare(epilogue_of(after))
    form, factors = primitive.form, [each.tobytes() for each in (after.scales.sums, *after.factors)]

    def folded(weight: Array, bias: Array | None) -> Array:
        check_sums(str(node), weight, bias)
        return quantized_bias(problem, weight, bias, form, after)

    how = problem.g, form, after.types, after.given.src, *factors
    weight, bias = held.weights(node, problem, form, how, folded)
    return BoundNode(made, (0, weight, bias, OUTPUT, 1 if residual else OUTPUT, epilogue_block(after)))


def _dynamic_conv2d(
    network: Network, node: Node, candidate: Candidate, held: Parameters, prepare: Prepare
) -> BoundNode:
    """The kernels of a quantized convolution, after an op that writes what depends on the found quantization."""
    problem, types = candidate.request.problem, candidate.request.types
    a: Any = node.attributes
    residual, shifted = len(node.inputs) > 2, len(node.parameters) > 1
    primitive, kernels = prepare(Epilogue(a.activation.kind, residual, shifted=int(shifted)))
    form = primitive.form

    def summed(weight: Array, bias: Array | None) -> Array:
        check_sums(str(node), weight, None)
        return weight_sums(problem, weight, bias, form, types, a.wei)

    weight, sums = held.weights(node, problem, form, (problem.g, form, types, a.wei), summed)
    after = Requantization(a.activation, types, Quantizations(), element("float32") if residual else None)
    scaled = types.is_requantized
    first = dynamic_epilogue_op(sums.size // (1 + scaled + shifted), scaled, shifted, Buffer(6), Buffer(7), Buffer(8))
    made = Workspace(sums.nbytes), OUTPUT, 2 if residual else OUTPUT, Workspace(EPILOGUE_BYTES)
    return BoundNode((first, *kernels), (0, weight, *made, 1, sums, epilogue_block(after)))


_CONVOLUTIONS = {
    Conv2d: _conv2d,
    ConvTranspose2d: _conv2d,
    FlowingConv2d: _flowing_conv2d,
    QuantizedConv2d: _quantized_conv2d,
    DynamicConv2d: _dynamic_conv2d,
}
