"""Networks that store tensors in 16 bits and compute in float32; and conversions between types of floats.

Every value and every constant is rounded once, as it is stored. Inputs and outputs keep the types that the network
states. They are converted where they enter and leave; if a convolution makes an output, it stores it converted. Biases
stay float32, as accumulators are, and so do scales and shifts of channels.
"""

import functools
from dataclasses import replace

import numpy as np

from blockconv.core.checks import Names
from blockconv.core.errors import NetworkError
from blockconv.core.text import take_name
from blockconv.core.types import FloatType, element, ieee, numpy_dtype
from blockconv.network.graph import Network, Node, holds, taken_names
from blockconv.network.ops import Cast, Conv2d, Convert, Foreign, Weighted
from blockconv.network.ops.rule import names_of
from blockconv.network.passes.rewrite import Edit, refitted, rewritten, rule
from blockconv.network.passes.simplify import elementwise_after_reshape

_FLOAT32 = element("float32")


@ieee
def stored_as(network: Network, dtype: FloatType) -> Network:
    """The network with values of float32 stored as `dtype`. For other input shapes it is made anew from `network`.

    Raises NetworkError for a network that has values of other types (except bool, int32 and int64), or casts of its
    own.
    """
    if dtype == "float32":
        return network
    _check(network, dtype)
    made = conversions(_all_stored(network, dtype))
    return refitted(network, made, functools.partial(stored_as, dtype=dtype))


def conversions(network: Network) -> Network:
    """Convolutions store float32 where a conversion to it follows."""
    if not holds(network.nodes, Cast):
        return network
    return rewritten(network, elementwise_after_reshape, _conv_stores)


def _check(network: Network, dtype: str) -> None:
    for node in network.nodes:
        if isinstance(node.attributes, Foreign):  # which keeps its types
            continue
        names = (*node.inputs, *node.parameters, node.output)
        types = dict.fromkeys(network.tensors[name].type.name for name in names)
        # Integers of 8 and 4 bits may stand for floats; masks and indices stay as they are.
        known = ("float32", dtype, "bool", "int32", "int64")
        other = next((name for name in types if name not in known), None)
        if other or isinstance(node.attributes, Cast):
            rule = f"is for float32 networks, and {node} has {other or 'its own type'}"
            raise NetworkError(network.name, "precision", dtype, rule, "compile it with precision='float32'")


def _all_stored(network: Network, dtype: FloatType) -> Network:
    """Values stored as `dtype`, between conversions of all inputs, all outputs and the values of foreign nodes."""
    taken = taken_names(network)
    wide = [name for name, tensor in network.tensors.items() if tensor.type == _FLOAT32]
    narrow = {name: take_name(f"{name}.{dtype}", taken) for name in wide}

    def stored(names: Names) -> Names:
        return tuple(narrow.get(name, name) for name in names)

    foreign = [node for node in network.nodes if isinstance(node.attributes, Foreign)]
    own = [node for node in network.nodes if not isinstance(node.attributes, Foreign)]
    read = {name for node in own for name in node.operands}
    given = [*names_of(network.inputs), *(node.output for node in foreign)]
    nodes = [*foreign, *(Node(narrow[n], Cast(dtype), (n,), narrow[n]) for n in given if n in narrow and n in read)]
    for node in own:
        kept = int(isinstance(node.attributes, Weighted))  # weights, but no biases, scales and shifts
        parameters = (*stored(node.parameters[:kept]), *node.parameters[kept:])
        (output,) = stored((node.output,))
        if node.attributes == Convert("float32"):
            node = replace(node, attributes=Convert(dtype))
        nodes.append(replace(node, inputs=stored(node.inputs), parameters=parameters, output=output))
    wanted = dict.fromkeys([*network.outputs, *(name for node in foreign for name in node.inputs)])
    made = [name for name in wanted if name in narrow and any(node.output == name for node in own)]
    nodes += [Node(take_name(f"{name}.float32", taken), Cast("float32"), (narrow[name],), name) for name in made]
    read = {name for node in nodes for name in node.operands}
    halves = [name for name in network.constants if narrow.get(name) in read]
    stored_halves = {narrow[name]: network.constants[name].astype(numpy_dtype(dtype)) for name in halves}
    for name in halves:  # a factor or a divisor that is infinite only as stored is an error
        value = network.constants[name]
        beyond = np.isfinite(value) & ~np.isfinite(stored_halves[narrow[name]])
        for node in network.readers[name] if beyond.any() else ():
            if isinstance(node.attributes, Weighted) or getattr(node.attributes, "kind", "") in ("mul", "div"):
                rule = f"has no finite number for {value[beyond].flat[0]:.4g}, by which {node} multiplies or divides"
                remedy = "compile it with precision='bfloat16' or 'float32'"
                raise NetworkError(network.name, "precision", dtype, rule, remedy)
    return network.changed(nodes, {**network.constants, **stored_halves})


@rule
def _conv_stores(edit: Edit, node: Node, a: Cast, conv: Node, b: Conv2d) -> bool:
    """A convolution stores float32, if it adds no residual of 16 bits."""
    return a.dtype == "float32" and len(conv.inputs) == 1 and edit.merge(conv, node, replace(b, dtype="float32"))
