"""Ops between convolutions in bfloat16 and float16: what float64 gives, rounded once; tails zero, no byte outside.

The oracle is the evaluation of networks by NumPy, which knows nothing of kernels.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from eltwise_lab import available, check, of_channels
from storage_oracle import Array

from blockconv.core.activation import FUNCTIONS, activation
from blockconv.core.types import FLOATS, Types, element
from blockconv.kernels import TABLE
from blockconv.network import ops
from blockconv.network.graph import Network, Node
from blockconv.network.ops.rule import Tensor

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

B, F = "bfloat16", "float16"
SHAPE, LONGER = (2, 20, 7, 6), (1, 33, 5, 12)
MAX = ops.Pool2d("max", (3, 3), (1, 1), ((1, 1), (1, 1)))
AVERAGE = ops.Pool2d("avg_exclude_padding", (3, 3), (1, 1), ((1, 1), (1, 1)))
ALL = ops.Pool2d("avg_include_padding")
LINEAR = ops.Resize("linear", scale=(2.0, 1.5))
CUBIC = ops.Resize("cubic", scale=(2.0, 1.5))
FINE = ops.Resize("linear", scale=(0.5, 0.5), antialias=True)
NEAREST = ops.Resize("nearest", scale=(2.0, 1.5))
CLIP = activation(("clip", 0.5, 6.0))
JOIN, PAD = ops.Concat(1), ops.Pad(((0, 0), (0, 0), (1, 0), (0, 2)), -1.5)
# An op, the layout and the type that it runs in, and when that is run: each but those that move elements is a kernel.
ALWAYS, AS_OTHERS, SELDOM = [], [pytest.mark.isa], [pytest.mark.slow]
CASES: list[tuple[str, ops.Op, str, str, list[Any]]] = [
    ("max", MAX, "NCHW16", B, AS_OTHERS),
    ("global max", ops.Pool2d("max"), "NCHW", F, SELDOM),
    ("average", AVERAGE, "NCHW8", F, SELDOM),
    ("average", AVERAGE, "NHWC", B, SELDOM),
    ("global", ALL, "NCHW16", B, ALWAYS),
    ("add", ops.Binary("add", CLIP), "NCHW16", B, ALWAYS),
    *(("affine", ops.Affine(CLIP), lay, kind, ALWAYS) for lay in ("NCHW", "NHWC", "NCHW4", "CHWN4") for kind in (B, F)),
    ("affine", ops.Affine(), "NCHW16", F, AS_OTHERS),
    *(
        (name, ops.Activate(activation(name, alone=True)), "NCHW8", kind, ALWAYS)
        for name in ("exp", "erf")
        for kind in (B, F)
    ),
    *(
        (name, ops.Activate(activation(name, alone=True)), "NHWC", B, SELDOM)
        for name in FUNCTIONS
        if name not in ("log", "sqrt")
    ),
    ("scale", ops.Binary("mul"), "NHWC", B, SELDOM),
    ("remainder", ops.Binary("fmod"), "NHWC", B, ALWAYS),
    ("concat", JOIN, "NCHW16", B, ALWAYS),
    ("concat", JOIN, "NHWC", F, ALWAYS),
    ("pad", PAD, "NCHW4", F, ALWAYS),
    ("pad", PAD, "NHWC", B, ALWAYS),
    ("slice", ops.Slice(1, 3, 9, 2), "NCHW8", B, ALWAYS),
    ("shuffle", ops.Shuffle(4), "NCHW", F, ALWAYS),
    ("shuffle", ops.Shuffle(4), "NHWC", B, SELDOM),
    ("softmax", ops.Softmax(1), "NCHW", B, AS_OTHERS),
    ("softmax", ops.Softmax(1), "NCHW8", F, SELDOM),
    ("log softmax", ops.Softmax(1, log=True), "NCHW", F, SELDOM),
    ("log softmax", ops.Softmax(1, log=True), "NCHW8", B, SELDOM),
    ("lrn", ops.Lrn(5, 0.3, 0.75, 1.0), "NCHW8", B, SELDOM),
    ("lrn", ops.Lrn(5, 0.3, 0.75, 1.0), "NCHW", F, SELDOM),
    ("norm", ops.GroupNorm(2), "NCHW8", B, SELDOM),
    ("norm", ops.GroupNorm(2), "NHWC", F, SELDOM),
    ("mean", ops.ReduceMean((2,), True), "NCHW8", F, SELDOM),
    ("sum", ops.Reduce((2,)), "NCHW8", F, SELDOM),
    ("maximum", ops.Reduce((0, 3), kind="max"), "NHWC", B, ALWAYS),
    ("linear", LINEAR, "NCHW", B, SELDOM),
    ("linear", LINEAR, "NCHW16", F, SELDOM),
    ("cubic", CUBIC, "NCHW", B, ALWAYS),
    ("cubic", CUBIC, "NHWC", F, SELDOM),
    ("antialias", FINE, "NCHW16", F, SELDOM),
    ("nearest", NEAREST, "NCHW8", B, SELDOM),
]


def run(attributes: ops.Op, layout: str, dtype: str, shape: tuple[int, ...]) -> set[str]:
    """The names of the kernels that ran."""
    rng, kind = np.random.default_rng([*shape]), element(dtype).dtype
    shapes = [shape]
    if isinstance(attributes, ops.Binary):
        shapes.append(shape if attributes.kind == "add" else (1, shape[1], 1, 1))
    if isinstance(attributes, ops.Concat):
        shapes.append((shape[0], 7, *shape[2:]))
    count = attributes.parameters.start
    # A maximum that takes what lies outside for zero is wrong of negative numbers alone.
    most = -1 if getattr(attributes, "kind", "") == "max" else 4
    arrays: list[Array] = [rng.uniform(-4, most, one).astype(np.float32).astype(kind) for one in shapes]
    given = [rng.uniform(-2, 2, shape[1]).astype(np.float32) for _ in range(count)]
    names = [f"x{k}" for k in range(len(arrays))]
    node = Node("node", attributes, tuple(names), "y", tuple(f"p{k}" for k in range(count)))
    inputs = tuple(Tensor(name, x.shape, element(kind)) for name, x in zip(names, arrays, strict=True))
    network = Network(inputs, ("y",), (node,), dict(zip(node.parameters, given, strict=True)))
    wanted = attributes.evaluate(arrays, given).astype(kind)
    problem = network.problem(node)
    options = {} if not hasattr(attributes, "activation") else {"activation": attributes.activation}
    dense = of_channels if isinstance(attributes, ops.Affine) else lambda x, layout: (x, "")
    operands = [(x, layout) for x in arrays] + [dense(x, layout) for x in given]
    return check(node.op, problem, layout, operands, wanted, references=False, **options)


@pytest.mark.parametrize(
    ("attributes", "layout", "dtype"),
    [pytest.param(*one[1:4], id=f"{one[0]}-{one[2]}-{one[3]}", marks=one[4]) for one in CASES],
)
@pytest.mark.sampled(6)
def test_ops_round_once(attributes: ops.Op, layout: str, dtype: str) -> None:
    # What repeats for each pixel is built for the number of channels; groups divide one of them.
    one = attributes in (ops.Binary("mul"), ops.Binary("fmod"), ops.Shuffle(4), ops.GroupNorm(2))
    for shape in (SHAPE,) if one else (SHAPE, LONGER):
        assert run(attributes, layout, dtype, shape), "a kernel that is no reference"


@pytest.mark.parametrize(("kind", "dtype"), [("fmod", F), ("atan2", B)])
def test_functions_of_the_c_library_round_once(kind: Any, dtype: str) -> None:
    assert run(ops.Binary(kind), "NCHW8", dtype, (1, 9, 3, 5))


def test_every_op_between_convolutions_takes_both_types() -> None:
    """Whatever takes float32 does, but convolutions, whose accumulators are of another type, and what finds a
    quantization."""
    for dtype in FLOATS:
        taken = {row.op for row in TABLE if row.takes(Types.all(dtype))}
        every = {row.op for row in TABLE if row.takes(Types.all("float32"))}
        convolutions = {"conv2d", "conv2d_backward_data", "conv2d_backward_weights"}
        assert taken >= every - convolutions - {"find_quantization"}, dtype
