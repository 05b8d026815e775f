"""Models of one or two nodes that break a rule of ONNX, with what the error says, and odd ones that break none."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from onnx import AttributeProto, TensorProto, helper, numpy_helper

__all__ = ["BROKEN", "ODD", "Broken", "X", "function", "model", "node"]

X = np.random.default_rng(0).standard_normal((1, 4, 6, 6)).astype(np.float32)
W = np.random.default_rng(1).standard_normal((8, 4, 3, 3)).astype(np.float32)
DATA, INT, INTS, FLOAT = np.float32, AttributeProto.INT, AttributeProto.INTS, TensorProto.FLOAT
OWN = (helper.make_opsetid("", 17), helper.make_opsetid("own", 1))


class Broken(NamedTuple):
    """`says`: a pattern of the error. `stricter`: why ONNX Runtime takes the model, if it does."""

    model: Any
    says: str
    stricter: str = ""


def node(op: str, *inputs: str, outputs: tuple[str, ...] = ("y",), name: str = "node", **attributes: Any) -> Any:
    return helper.make_node(op, list(inputs), list(outputs), name, **attributes)


def model(
    nodes: list[Any],
    constants: dict[str, Any] | None = None,
    opset: int | tuple[Any, ...] = 17,
    outputs: tuple[str, ...] = ("y",),
    element: int = FLOAT,
    functions: tuple[Any, ...] = (),
    ir: int = 8,
    x: np.ndarray = X,
) -> Any:
    graph = helper.make_graph(
        nodes,
        "g",
        [helper.make_tensor_value_info("x", helper.np_dtype_to_tensor_dtype(x.dtype), x.shape)],
        [helper.make_tensor_value_info(name, element, None) for name in outputs],
        [numpy_helper.from_array(np.asarray(value), name) for name, value in (constants or {}).items()],
    )
    opsets = [helper.make_opsetid("", opset)] if isinstance(opset, int) else opset
    return helper.make_model(graph, opset_imports=opsets, ir_version=ir, functions=functions)


def function(name: str, *nodes: Any, inputs: tuple[str, ...] = ("a",), opsets: Any = OWN) -> Any:
    return helper.make_function("own", name, inputs, ["b"], nodes, opsets)


def op(kind: str, constants: dict[str, Any] | None = None, /, opset: int = 17, **attributes: Any) -> Any:
    """A node over x and constants, of which those without a name are left out."""
    outputs = attributes.pop("outputs", ("y",))
    names = [name.strip() for name in constants or {}]
    given = {name: value for name, value in (constants or {}).items() if name.strip() and name != "x"}
    return model([node(kind, "x", *names, outputs=outputs, **attributes)], given, opset, tuple(filter(None, outputs)))


def attribute(kind: str, *protos: Any, constants: dict[str, Any] | None = None) -> Any:
    """A node with attributes as they are."""
    made = op(kind, constants)
    made.graph.node[0].attribute.extend(protos)
    return made


def tensor(**changes: Any) -> Any:
    """A convolution whose weight is changed as a proto."""
    made = op("Conv", {"w": W})
    weight = made.graph.initializer[0]
    for field, value in changes.items():
        weight.ClearField(field)
        if field == "dims":
            weight.dims.extend(value)
        elif field != "external_data":
            setattr(weight, field, value)
    return made


def changed(made: Any, change: Any) -> Any:
    change(made)
    return made


def ints(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def floats(*values: float) -> np.ndarray:
    return np.array(values, np.float32)


def declared_input(name: str, element: int, shape: tuple[int, ...]) -> Any:
    return lambda made: made.graph.input.append(helper.make_tensor_value_info(name, element, shape))


def sparse(values: np.ndarray, indices: np.ndarray, dims: tuple[int, ...] = (6,), name: str = "c") -> Any:
    """A sparse tensor of these parts, whatever they are."""
    made = numpy_helper.from_array(values, name), numpy_helper.from_array(indices, f"{name}.indices")
    return helper.make_sparse_tensor(*made, dims)


def has_sparse(tensor: Any) -> Any:
    return lambda made: made.graph.sparse_initializer.append(tensor)


def _attributes() -> dict[str, Broken]:
    axis = {"name": "axis", "type": INT}
    return {
        "unknown": Broken(op("Relu", foo=1), r"node 'node' \(Relu\): foo=1: is no attribute of Relu of opset 17"),
        "misspelt": Broken(op("Conv", {"w": W}, stride=[2, 2]), r"stride=\[2, 2\].*did you mean 'strides'"),
        "of a later opset": Broken(
            op("AveragePool", opset=7, kernel_shape=[2, 2], ceil_mode=1),
            "ceil_mode=1: is no attribute of AveragePool of opset 7",
        ),
        "of an earlier opset": Broken(
            op("Squeeze", opset=13, axes=[0]), r"axes=\[0\].*is no attribute of Squeeze of opset 13"
        ),
        "in a folded node": Broken(
            model([node("Relu", "w", outputs=("c",), name="fold", foo=1), node("Conv", "x", "c")], {"w": W}),
            "node 'fold'.*foo",
        ),
        "in a node that nothing needs": Broken(
            model([node("Relu", "x"), node("Relu", "x", outputs=("q",), name="b", foo=1)]), "node 'b'.*foo"
        ),
        "float for int": Broken(op("Softmax", axis=1.0), "axis=1.0: is float, and has to be int"),
        "int for ints": Broken(op("Conv", {"w": W}, strides=2), "strides=2: is int, and has to be ints"),
        "int for string": Broken(op("Conv", {"w": W}, auto_pad=1), "auto_pad=1: is int, and has to be string"),
        "int for float": Broken(op("LeakyRelu", alpha=1), "alpha=1: is int, and has to be float"),
        "missing": Broken(op("MaxPool"), "kernel_shape=None: is required by MaxPool of opset 17"),
        "missing axis": Broken(op("Concat"), "axis=None: is required"),
        "given twice": Broken(
            attribute("Softmax", AttributeProto(**axis, i=1), AttributeProto(**axis, i=2)),
            "axis=2: occurs twice",
        ),
        "of two values": Broken(attribute("Softmax", AttributeProto(**axis, i=1, f=1.0)), "data field mismatch"),
        "not text": Broken(
            attribute(
                "Conv", AttributeProto(name="auto_pad", type=AttributeProto.STRING, s=b"\xff"), constants={"w": W}
            ),
            "cannot be read|auto_pad",
        ),
        "a function's": Broken(
            attribute("Softmax", AttributeProto(**axis, ref_attr_name="foo")), "axis.*'foo'", "it takes the default"
        ),
    }


def _values() -> dict[str, Broken]:
    pool = {"kernel_shape": [2, 2]}
    return {
        "auto_pad": Broken(
            op("Conv", {"w": W}, auto_pad="SAME"), "auto_pad='SAME': has to be one of NOTSET, SAME_UPPER"
        ),
        "auto_pad of a pool": Broken(op("MaxPool", auto_pad="valid", **pool), "auto_pad='valid': has to be one of"),
        "strides of 0": Broken(
            op("Conv", {"w": W}, strides=[0, 1]), r"strides=\[0, 1\]: has to hold numbers of at least 1"
        ),
        "strides of 0, folded": Broken(
            model(
                [node("Conv", "v", "w", outputs=("c",), strides=[0, 0]), node("Add", "x", "c", name="b")],
                {"v": X, "w": W},
            ),
            "strides",
        ),
        "pads of -1": Broken(op("Conv", {"w": W}, pads=[-1, -1, -1, -1]), r"node 'node' \(Conv\).*-1"),
        "too few pads": Broken(op("Conv", {"w": W}, pads=[1, 1]), r"node 'node' \(Conv\).*pads \(1, 1\)"),
        "pads of a pool": Broken(
            op("AveragePool", pads=[2, 2, 2, 2], **pool),
            r"pads=.*a window of \(2, 2\) with dilation \(1, 1\) reads only padding",
        ),
        "storage_order": Broken(op("MaxPool", storage_order=5, **pool), "storage_order=5: has to be one of 0, 1"),
        "groups of 0": Broken(op("Conv", {"w": W}, group=0), "node 'node'"),
        "axis of Flatten": Broken(op("Flatten", axis=5), "axis=5: has to be -4 to 4"),
        "negative axis of old": Broken(op("Flatten", opset=9, axis=-1), "axis=-1: has to be 0 to 4"),
        "axis of Softmax": Broken(op("Softmax", axis=4), "axis=4: has to be one of the input's 4 axes"),
        "perm": Broken(op("Transpose", perm=[0, 0, 1, 2]), r"perm=\(0, 0, 1, 2\)"),
        "split of other outputs": Broken(
            op("Split", {"s": ints(1, 1, 2)}, axis=1, outputs=("y", "z")), "has to hold 2 sizes"
        ),
        "split of -2": Broken(op("Split", {"s": ints(-2, 6)}, axis=1, outputs=("y", "z")), r"split=\(-2, 6\)"),
        "num_outputs of 0": Broken(
            op("Split", opset=18, axis=1, num_outputs=0), "num_outputs=0: has to be the number of outputs, 1"
        ),
        "split by nothing": Broken(op("Split", opset=18, axis=1, outputs=("y", "z")), "neither 'split'"),
        "squeezed axis of 4": Broken(op("Squeeze", {"a": ints(1)}), r"axes=\(1,\): have to have size 1"),
        "unsqueezed twice": Broken(op("Unsqueeze", {"a": ints(0, -6)}), r"axes=\(0, -6\): name one axis twice"),
        "sliced twice": Broken(
            op("Slice", {"s": ints(0, 1), "e": ints(3, 3), "a": ints(2, -2)}), "name one axis twice"
        ),
        "a step of 0": Broken(op("Slice", {"s": ints(0), "e": ints(3), "a": ints(2), "t": ints(0)}), "hold a 0"),
        "starts without ends": Broken(op("Slice", {"s": ints(0, 1), "e": ints(3), "a": ints(2)}), r"starts=\(0, 1\)"),
        "floats for starts": Broken(
            op("Slice", {"s": floats(0), "e": floats(3)}), "starts=.*float32.*has to hold ints"
        ),
        "starts of two dimensions": Broken(op("Slice", {"s": ints(0)[None], "e": ints(3)[None]}), "one dimension"),
        "padded twice": Broken(
            op("Pad", {"p": ints(1, 1, 1, 1), "": 0, "a": ints(2, 2)}, opset=18), "name one axis twice"
        ),
        "scales of infinity": Broken(op("Resize", {"": 0, "s": floats(1, 1, np.inf, 1)}), "scales=.*finite"),
        "scales and sizes": Broken(
            op("Resize", {"": 0, "s": floats(1, 1, 2, 2), "z": ints(1, 4, 12, 12)}), "but not both"
        ),
        "sizes of -1": Broken(op("Resize", {"": 0, " ": 0, "z": ints(1, 4, -1, 6)}), "sizes"),
        "nearest_mode": Broken(op("Resize", {"": 0, "s": floats(1, 1, 2, 2)}, nearest_mode="up"), "nearest_mode='up'"),
        "scales below 1": Broken(op("Upsample", {"s": floats(1, 1, 0.5, 1)}, opset=9), "1 or more"),
        "bias of three rows": Broken(
            op("BatchNormalization", {k: floats(1, 2, 3) for k in "sbmv"}), r"node 'node' \(Batch"
        ),
        "C of Gemm": Broken(
            model(
                [node("Flatten", "x", outputs=("f",), name="f"), node("Gemm", "f", "w", "c")],
                {"w": np.ones((144, 5), DATA), "c": np.ones((3, 5), DATA)},
            ),
            "C=.*has to broadcast",
        ),
        "shape that holds too little": Broken(op("Reshape", {"s": ints(5, 5)}), r"shape=\(5, 5\)"),
        "floats for a shape": Broken(op("Reshape", {"s": floats(144)}), "has to hold ints"),
        "ratio of Dropout": Broken(op("Dropout", {"r": np.float32(1)}, opset=13), r"ratio=1\.0"),
        "sum of unlike shapes, old": Broken(op("Sum", {"c": floats(1)}, opset=6), "opset 6 broadcasts never"),
        "Constant of nothing": Broken(
            model([node("Constant", outputs=("c",)), node("Add", "x", "c", name="b")]), "one of"
        ),
        "cropped beyond": Broken(
            op("Pad", {"p": ints(0, 0, -8, 0, 0, 0, 4, 0)}), "crops more than there is", "it reads what is not there"
        ),
    }


def _operands() -> dict[str, Broken]:
    return {
        "too many": Broken(op("Relu", {"x": 0}), "input size 2"),
        "too few": Broken(op("Add"), "input size 1"),
        "too many outputs": Broken(op("Relu", outputs=("y", "z")), "output size 2"),
        "no output": Broken(
            model([node("Relu", "x"), node("Relu", "x", outputs=(), name="b")]), "node 'b'|output size 0"
        ),
        "of two types": Broken(op("Add", {"c": np.ones(6)}), "inconsistent type"),
        "of a wrong type": Broken(
            model([node("MaxPool", "x", kernel_shape=[2, 2])], x=X.astype(np.int32), element=6), "int32"
        ),
        "of a type that came later": Broken(
            model([node("Relu", "x")], x=X.astype(np.int32), element=6, opset=13), "int32"
        ),
        "declared otherwise": Broken(model([node("Relu", "x")], element=TensorProto.DOUBLE), "value 'y': elem_type=11"),
        "declared otherwise inside": Broken(
            changed(
                model([node("Relu", "x", outputs=("a",)), node("Relu", "a", name="b")]),
                lambda made: made.graph.value_info.append(helper.make_tensor_value_info("a", 7, X.shape)),
            ),
            "value 'a'",
        ),
        "dangling, unneeded": Broken(
            model([node("Relu", "x"), node("Relu", "no", outputs=("q",), name="b")]), "inputs='no': is no init"
        ),
        "in a circle, unneeded": Broken(
            model(
                [
                    node("Relu", "x"),
                    node("Relu", "b", outputs=("a",), name="a"),
                    node("Relu", "a", outputs=("b",), name="b"),
                ]
            ),
            "cycle: 'a' -> 'b' -> 'a'",
        ),
        "two nodes of one name": Broken(
            model([node("Relu", "x", outputs=("a",)), node("Relu", "a")]), "name='node': is also the name of another"
        ),
        "an output named as the input": Broken(
            model([node("Relu", "x", outputs=("x",)), node("Relu", "x", name="b")]), "already the name"
        ),
    }


def _opsets() -> dict[str, Broken]:
    relu = [node("Relu", "x")]
    two = (helper.make_opsetid("", 13), helper.make_opsetid("ai.onnx", 17))
    return {
        "none": Broken(model(relu, opset=()), "opset_import=.*has to name an operator set"),
        "0": Broken(model(relu, opset=0), "opset_import=0.*has to be at least 1"),
        "-1": Broken(model(relu, opset=-1), "opset_import=-1"),
        "99": Broken(model(relu, opset=99), "opset_import=99: onnx .* knows opsets up to .*upgrade"),
        "two": Broken(model(relu, opset=two), "imports operator set .* in versions 13 and 17", "it takes the last"),
        "another's": Broken(
            model(relu, opset=(helper.make_opsetid("com.x", 1),)),
            "needs ONNX's own operator set",
            "it takes its newest",
        ),
        "before the op": Broken(op("HardSwish", opset=13), "exists from opset 14 on"),
        "after the op": Broken(op("Upsample", {"s": floats(1, 1, 2, 2)}, opset=10), "was removed in opset 10"),
        "unknown domain": Broken(model([node("Relu", "x", domain="com.x")]), r"com\.x\.Relu: 1 node"),
        "IR": Broken(model(relu, ir=99), "ir_version=99.*upgrade"),
    }


def _constants() -> dict[str, Broken]:
    short = numpy_helper.from_array(floats(1, 2), "t")
    short.dims[0] = -1
    twice = op("Conv", {"w": W})
    twice.graph.initializer.append(twice.graph.initializer[0])
    return {
        "too short": Broken(tensor(raw_data=W.tobytes()[:-4]), r"initializer 'w', read by node 'node' \(Conv\): dims"),
        "too long": Broken(tensor(raw_data=W.tobytes() + b"1234"), "initializer 'w'"),
        "of -1": Broken(tensor(dims=(-1, 4, 3, 3)), r"dims|\[-1, 4, 3, 3\]: has to hold sizes of at least 0"),
        "of a huge size": Broken(tensor(dims=(1 << 62, 4, 3, 3)), "initializer 'w'"),
        "of no type": Broken(tensor(data_type=0), "initializer 'w'"),
        "of an unknown type": Broken(tensor(data_type=99), "initializer 'w'"),
        "without values": Broken(tensor(raw_data=b""), "initializer 'w'"),
        "elsewhere": Broken(tensor(raw_data=b"", data_location=1), "in another file.*give load_onnx the model's path"),
        "of another declared shape": Broken(
            changed(op("Conv", {"w": W}), declared_input("w", FLOAT, (8, 4, 5, 5))),
            r"declared as an input of shape \[8, 4, 5, 5\]",
        ),
        "of another declared type": Broken(
            changed(op("Conv", {"w": W}), declared_input("w", 7, W.shape)), "element type 7"
        ),
        "in a node, of -1": Broken(
            model([node("Constant", outputs=("c",), value=short), node("Add", "x", "c", name="b")]), "at least 0"
        ),
        "twice": Broken(twice, "'w': is the name of 2 initializers", "it takes the last"),
        **{
            f"sparse, {name}": Broken(
                changed(model([node("Add", "x", "c")]), has_sparse(sparse(*parts))), f"initializer 'c', read by.*{says}"
            )
            for name, parts, says in (
                ("beyond the end", (floats(1), ints(6)), r"indices=.*has to be inside \(6,\)"),
                ("before the start", (floats(1), ints(-1)), r"has to be inside \(6,\)"),
                ("beyond an axis", (floats(1), ints(0, 6)[None], (6, 6)), r"has to be inside \(6, 6\)"),
                ("of other numbers", (floats(1, 2), ints(1)), r"needs 2 numbers with integers of shape"),
                ("of fewer axes", (floats(1), ints(1)[None], (6, 6)), r"shape \(\(1,\), \(1, 2\)\)"),
                ("of a negative size", (floats(), ints(), (-6,)), r"has to be inside \(-6,\)"),
                ("of matrices", (floats(1)[None], ints(1)), r"needs 1 numbers"),
            )
        },
        "sparse and dense": Broken(
            changed(op("Add", {"c": floats(1)}), has_sparse(sparse(floats(1), ints(0)))), "'c': is the name of 2 init"
        ),
        "sparse, of a node": Broken(
            model(
                [
                    node("Constant", outputs=("c",), sparse_value=sparse(floats(1), ints(6))),
                    node("Add", "x", "c", name="b"),
                ]
            ),
            r"node 'node' \(Constant\), attribute 'sparse_value': indices=.*has to be inside \(6,\)",
        ),
        "an input of no type": Broken(
            changed(op("Relu"), lambda made: setattr(made.graph.input[0].type.tensor_type, "elem_type", 0)),
            "input 'x': elem_type=0",
        ),
        "an input of an unknown type": Broken(
            changed(op("Relu"), lambda made: setattr(made.graph.input[0].type.tensor_type, "elem_type", 99)),
            "elem_type=99",
        ),
    }


def _functions() -> dict[str, Broken]:
    def calls(*functions: Any, inputs: tuple[str, ...] = ("x",), opset: Any = OWN) -> Any:
        return model([node("F", *inputs, domain="own")], opset=opset, functions=functions)

    def inner(kind: str, domain: str = "", **attributes: Any) -> Any:
        return node(kind, "a", outputs=("b",), name="in", domain=domain, **attributes)

    doubling = [
        function(
            f"F{i}",
            node(f"F{i + 1}", "a", outputs=("m",), domain="own"),
            node(f"F{i + 1}", "m", outputs=("b",), domain="own"),
        )
        for i in range(40)
    ]
    many = (*doubling, function("F40", inner("Relu")), function("F", inner("F0", "own")))
    standard = function("Relu", inner("Tanh"))
    standard.domain = ""
    return {
        "that call themselves": Broken(
            calls(function("F", inner("F", "own"))), r"own\.F: .*calls itself: function own\.F -> function own\.F"
        ),
        "that call each other": Broken(
            calls(function("F", inner("G", "own")), function("G", inner("F", "own"))), "calls itself.*no recursion"
        ),
        "that call themselves, unneeded": Broken(
            model([node("Relu", "x")], opset=OWN, functions=(function("F", inner("F", "own")),)), "calls itself"
        ),
        "defined twice": Broken(calls(function("F", inner("Relu")), function("F", inner("Tanh"))), "defined twice"),
        "with too many operands": Broken(
            calls(function("F", inner("Relu")), inputs=("x", "x")), r"inputs=\['x', 'x'\]: function own\.F has 1"
        ),
        "with a broken body": Broken(calls(function("F", inner("Relu", foo=1))), "foo=1"),
        "with a dangling body": Broken(calls(function("F", node("Add", "a", "q", outputs=("b",)))), "'q'"),
        "without opsets": Broken(
            calls(function("F", inner("Relu"), opsets=OWN[1:])), r"function own\.F does not import"
        ),
        "of a domain not imported": Broken(
            calls(function("F", inner("Relu")), opset=OWN[:1]), "the model does not import"
        ),
        "named as an op of ONNX": Broken(
            model([node("Relu", "x")], functions=(standard,)), "is also an op of ONNX", "it runs the op"
        ),
        # Not given to ONNX Runtime.
        "that double": Broken(calls(*many), "1099511627776 nodes after inlining", "not tried"),
    }


BROKEN: dict[str, Broken] = {
    f"{group}: {name}": case
    for group, cases in (
        ("attributes", _attributes()),
        ("values", _values()),
        ("operands", _operands()),
        ("opsets", _opsets()),
        ("constants", _constants()),
        ("functions", _functions()),
    )
    for name, case in cases.items()
}


def _sparse_nodes(x: str = "x", y: str = "y") -> list[Any]:
    constant = node("Constant", outputs=("c",), sparse_value=sparse(floats(2), ints(4)))
    return [constant, node("Add", x, "c", outputs=(y,), name="sum")]


def _branch() -> Any:
    nodes = [*_sparse_nodes("x", "s"), node("Mul", "s", "d", outputs=("m",), name="product")]
    made = helper.make_graph(nodes, "branch", [], [helper.make_tensor_value_info("m", FLOAT, None)])
    made.sparse_initializer.append(sparse(floats(3), ints(4), name="d"))
    return made


# Nothing is wrong with these.
ODD: dict[str, Any] = {
    "domain ai.onnx": model([node("Relu", "x", domain="ai.onnx")]),
    "auto_pad and pads": op("MaxPool", kernel_shape=[2, 2], auto_pad="VALID", pads=[1, 1, 1, 1]),
    "auto_pad of no text": op("Conv", {"w": W}, auto_pad=""),
    "the same opset twice": model([node("Relu", "x")], opset=(helper.make_opsetid("", 17),) * 2),
    "nodes in reverse order": model([node("Relu", "a", name="b"), node("Tanh", "x", outputs=("a",), name="a")]),
    "mean over one axis, twice": op("ReduceMean", axes=[1, -3]),
    "keepdims of 2": op("ReduceMean", axes=[1], keepdims=2),
    "bounds the wrong way round": op("Clip", {"low": np.float32(1), "high": np.float32(0)}),
    "size": model([node("Size", "x")], element=7),
    "no part of a shape": model([node("Shape", "x", start=2, end=1)], element=7),
    "division by a size": model(
        [
            node("Size", "x", outputs=("s",), name="s"),
            node("Cast", "s", outputs=("c",), name="c", to=1),
            node("Div", "x", "c"),
        ]
    ),
    "slices beyond the ends": op("Slice", {"s": ints(-(2**63)), "e": ints(2**63 - 1), "a": ints(2), "t": ints(2)}),
    "an initializer that is an input": changed(op("Conv", {"w": W}), declared_input("w", FLOAT, W.shape)),
    "a shape declared otherwise": changed(
        op("Relu"), lambda made: made.graph.value_info.append(helper.make_tensor_value_info("y", FLOAT, (9, 9)))
    ),
    "a function": model(
        [node("F", "x", domain="own")], opset=OWN, functions=(function("F", node("Relu", "a", outputs=("b",))),)
    ),
    "a function of another opset": model(
        [node("F", "x", domain="own")],
        opset=OWN,
        functions=(function("F", node("Relu", "a", outputs=("b",)), opsets=(helper.make_opsetid("", 13),)),),
    ),
    "IR 3": model([node("Relu", "x")], ir=3, opset=9),
    **{
        f"sparse: {name}": changed(model([node("Add", "x", "c")]), has_sparse(sparse(*parts)))
        for name, parts in (
            ("in order", (floats(2, -1), ints(0, 35), (6, 6))),
            ("in no order, one twice", (floats(2, -1, 5), ints(35, 7, 35), (6, 6))),
            ("by axes", (floats(2, -1), np.array([[0, 5], [3, 2]]), (6, 6))),
            ("of 32-bit indices", (floats(2, -1), np.array([1, 4], np.int32))),
            ("of nothing", (floats(), ints())),
        )
    },
    "sparse: a constant": model(_sparse_nodes()),
    "sparse: in a function": model(
        [node("F", "x", domain="own")], opset=OWN, functions=(function("F", *_sparse_nodes("a", "b")),)
    ),
    "sparse: in a branch": model([node("If", "yes", then_branch=_branch(), else_branch=_branch())], {"yes": True}),
}
