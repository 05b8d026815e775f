"""Recurrent layers."""

from typing import Any

import numpy as np

from blockconv.core.activation import logistic
from blockconv.core.checks import Shape, check_rank, check_same
from blockconv.core.eltwise_problem import COLUMNS, RecurrentKind, RecurrentProblem
from blockconv.core.errors import ArgumentError
from blockconv.core.types import FLOATS, Array, ElementType
from blockconv.network.ops.base import Solved, check_type

__all__ = ["Recurrent", "blocks_of_columns"]


def blocks_of_columns(matrices: Array) -> Array:
    """(D, H, columns) as (D, blocks, H, COLUMNS), with zeros where the last block has no columns."""
    d, h, count = matrices.shape
    blocks = -(-count // COLUMNS)
    padded = np.zeros((d, h, blocks * COLUMNS), matrices.dtype)
    padded[:, :, :count] = matrices
    return np.ascontiguousarray(padded.reshape(d, h, blocks, COLUMNS).swapaxes(1, 2))


class Recurrent(Solved):
    """An LSTM or a GRU over T steps of N sequences in D directions, with ONNX's order of gates.

    inputs: the products of all inputs with their weights, plus biases: (T, N, D * gates * H). Then the first hidden
        values, and an LSTM's first cells: (1 or 2, D * N, H).
    parameters: the weights of hidden values; biases (D, gates * H); for the kind "gru" the weights of reset hidden
        values. Weights are (D, H, columns) in the form of `blocks_of_columns`.
    kind: see `RecurrentProblem`.
    reverse: for each direction, whether it begins with the last step.

    The output has shape (T, D * N, H): the hidden values of each step. An LSTM's last cells follow as step T.
    """

    solves = RecurrentProblem
    inputs = range(2, 3)
    parameters = range(2, 4)
    kind: RecurrentKind
    reverse: tuple[bool, ...] = (False,)

    def sizes(self, src: Shape, states: Shape) -> dict[str, Any]:
        for shape in (src, states):
            check_rank(self.op, shape, 3)
        return {"steps": src[0], "batch": src[1], "hidden": states[2]}

    def infer(self, src: Shape, states: Shape, *parameters: Shape | None) -> Shape:
        p: RecurrentProblem = self.problem(src, states)
        for name, given, shape in (("input", src, p.src_shape), ("states", states, p.states_shape)):
            check_same(self.op, name, given, shape)
        d, h = len(p.reverse), p.hidden
        first, second = ((d, -(-count * h // COLUMNS), h, COLUMNS) for count in p.columns)
        wanted = first, (d, p.gates * h), *[second] * bool(second[1])
        if (found := tuple(shape for shape in parameters if shape is not None)) != wanted:
            raise ArgumentError(self.op, "parameters", found, f"have to have the shapes {wanted}")
        return p.dst_shape

    def infer_type(self, src: ElementType, states: ElementType, *parameters: ElementType | None) -> ElementType:
        check_type(self, "input", src, *FLOATS)
        check_type(self, "states", states, src.name)
        for type in filter(None, parameters):
            check_type(self, "weight", type, *dict.fromkeys((src.name, src.computed.name)))
        return src

    def compute(self, src: Array, states: Array, first: Array, bias: Array, second: Array | None) -> Array:
        p: RecurrentProblem = self.problem(src.shape, states.shape)
        d, h, (count, _) = len(p.reverse), p.hidden, p.columns
        weights = [w.swapaxes(1, 2).reshape(d, h, -1) for w in (first, second) if w is not None]
        src = src.reshape(p.steps, p.batch, d, p.gates * h)
        states = states.reshape(p.states_shape[0], d, p.batch, h)
        found = np.zeros((p.dst_shape[0], d, p.batch, h), np.result_type(src, states))
        for k, backward in enumerate(p.reverse):
            hidden, cell = states[0, k], states[-1, k]
            for t in range(p.steps)[:: -1 if backward else 1]:
                x = np.split(src[t, :, k], p.gates, axis=1)
                r = np.split((hidden @ weights[0][k])[:, : count * h], count, axis=1)
                b = np.split(bias[k], p.gates)
                gates = [logistic(x[g] + r[g] + b[g]) for g in range(min(3, count))]
                if self.kind == "lstm":
                    cell = gates[2] * cell + gates[0] * np.tanh(x[3] + r[3] + b[3])
                    hidden = gates[1] * np.tanh(cell)
                else:
                    if self.kind == "gru":
                        last = ((gates[1] * hidden) @ weights[1][k])[:, :h] + b[2]
                    else:
                        last = gates[1] * (r[2] + b[2])
                    hidden = (1 - gates[0]) * np.tanh(x[2] + last) + gates[0] * hidden
                found[t, k] = hidden
            if self.kind == "lstm":
                found[p.steps, k] = cell
        return found.reshape(p.dst_shape)
