"""An op that another library computes."""

from dataclasses import field
from typing import Literal

from blockconv.core.checks import Names, Shape
from blockconv.core.errors import ArgumentError
from blockconv.core.types import Array, ElementType, element
from blockconv.network.foreign import runner
from blockconv.network.ops.base import ANY, Op

__all__ = ["Foreign"]


class Foreign(Op):
    """One output of a node that ONNX Runtime or PyTorch computes, row-major, in the model's element types.

    Passes and the planner know nothing about it. Several nodes of a network may be outputs of one such node: they hold
    the same model, and run once. See `blockconv.network.foreign`.

    model: an ONNX model of the node, in bytes. Its inputs are the node's, in this order. It holds the nodes before it
        too, if these make values that are no arrays of numbers, such as strings and sequences. Or, for PyTorch, a
        call of an op (`blockconv.frontends.torch.runner`).
    output: the index of the model's output.
    kinds: the ops of the model's nodes.
    shapes: the inputs' shapes, for which the model holds.
    shape, dtype: those of the output.
    library: "onnx" or "pytorch".
    """

    op = "foreign"
    inputs = range(ANY)
    folds = False  # some are random
    is_exact = True
    model: bytes = field(repr=False)
    output: int
    kinds: Names
    shapes: tuple[Shape, ...]
    shape: Shape
    dtype: str
    library: Literal["onnx", "pytorch"] = "onnx"

    def infer(self, *inputs: Shape) -> Shape:
        if inputs != self.shapes:
            rule = f"op {self.kinds[-1]} was read for {self.shapes}"
            raise ArgumentError(self.op, "inputs", inputs, rule, "load the model again with these input_shapes")
        return self.shape

    def infer_type(self, *inputs: ElementType) -> ElementType:
        return element(self.dtype)

    def compute(self, *inputs: Array) -> Array:
        return runner(self.library).computed(self, inputs)
