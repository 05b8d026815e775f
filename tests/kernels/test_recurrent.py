"""LSTM and GRU: every kind, direction and type between guard pages, against a loop over single values."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from eltwise_lab import available, check
from storage_oracle import Array

import blockconv as bc
from blockconv.core.eltwise_problem import COLUMNS, RecurrentKind, RecurrentProblem
from blockconv.core.types import element
from blockconv.network import ops
from blockconv.network.ops import blocks_of_columns

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

KINDS: tuple[RecurrentKind, ...] = ("lstm", "gru", "gru_of_sums")
DIRECTIONS = ((False,), (True,), (False, True))
# steps, batch, hidden: one of each, no image, hidden values that end inside a vector and inside a block of columns, a
# group that lacks an image.
SIZES = [(1, 1, 1), (3, 2, 19), (2, 0, 4), (4, 3, 64), (2, 1, 100), (2, 5, 19)]
TOLERANCE = {"float32": 3e-6, "float64": 1e-12, "float16": 0, "bfloat16": 0}  # halves: see `compare_halves`


def sigmoid(x: Array) -> Array:
    return np.asarray(1 / (1 + np.exp(-x)))


def layer(p: RecurrentProblem, src: Array, states: Array, r: Array, b: Array) -> Array:
    """By ONNX's definition, in float64. r: (D, H, gates, H); b: (D, gates, H)."""
    x = src.astype("f8").reshape(p.steps, p.batch, len(p.reverse), p.gates, p.hidden)
    first = states.astype("f8").reshape(p.states_shape[0], len(p.reverse), p.batch, p.hidden)
    made = np.zeros((p.dst_shape[0], *first.shape[1:]))
    for d, n in itertools.product(range(len(p.reverse)), range(p.batch)):
        h, c = first[0, d, n], first[-1, d, n]
        order = range(p.steps)[::-1] if p.reverse[d] else range(p.steps)
        for t in order:
            s = np.einsum("k,kgh->gh", h, r[d]) + b[d]
            if p.kind == "lstm":
                i, o, f = (sigmoid(x[t, n, d, k] + s[k]) for k in range(3))
                c = f * c + i * np.tanh(x[t, n, d, 3] + s[3])
                h = o * np.tanh(c)
            else:
                z, reset = (sigmoid(x[t, n, d, k] + s[k]) for k in range(2))
                inner = reset * s[2] if p.kind == "gru_of_sums" else (reset * h) @ r[d][:, 2] + b[d, 2]
                h = (1 - z) * np.tanh(x[t, n, d, 2] + inner) + z * h
            made[t, d, n] = h
        if p.kind == "lstm":
            made[-1, d, n] = c
    return made.reshape(p.dst_shape)


def operands(p: RecurrentProblem, dtype: str) -> tuple[list[Array], Array]:
    """Source, states, weights and biases as the kernel has them; and what it gives."""
    rng, kind, d = np.random.default_rng([p.steps, p.batch, p.hidden]), element(dtype), len(p.reverse)
    src, states = (rng.standard_normal(shape).astype("f").astype(kind.dtype) for shape in (p.src_shape, p.states_shape))
    r, b = (
        rng.standard_normal((d, *more, p.gates, p.hidden)).astype(kind.computed.dtype) * scale
        for more, scale in (((p.hidden,), kind.computed.dtype.type(0.4)), ((), kind.computed.dtype.type(1)))
    )
    wanted = layer(p, src, states, r, b).astype(kind.dtype)
    columns = r.reshape(d, p.hidden, -1)
    parts = np.split(columns, [p.columns[0] * p.hidden], axis=2)
    held = [blocks_of_columns(part) for part in parts if part.size]
    return [src, states, held[0], b.reshape(d, -1), *held[1:]], wanted


@pytest.mark.isa
@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.sampled(4)
def test_every_kind_and_type(kind: RecurrentKind, dtype: str) -> None:
    for k, (size, reverse) in enumerate(itertools.product(SIZES, DIRECTIONS)):
        p = RecurrentProblem(kind, *size, reverse)
        given, wanted = operands(p, dtype)
        if not wanted.size and element(dtype).is_half:
            continue
        placed = [(x, "") for x in given]
        options: dict[str, Any] = {"exact": False, "tolerance": TOLERANCE[dtype], "threads": 1 + k % 2}
        check("recurrent", p, "abc", placed, wanted, **options)


def test_columns_are_in_blocks() -> None:
    r = np.arange(2 * 3 * 70, dtype="f").reshape(2, 3, 70)
    found = blocks_of_columns(r)
    assert found.shape == (2, 2, 3, COLUMNS)
    np.testing.assert_array_equal(found[:, 0], r[:, :, :COLUMNS])
    np.testing.assert_array_equal(found[:, 1, :, : 70 - COLUMNS], r[:, :, COLUMNS:])


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_plan_gives_what_the_evaluator_gives(kind: RecurrentKind, precision: Any) -> None:
    p = RecurrentProblem(kind, 3, 2, 19, (False, True))
    (src, states, *parameters), wanted = operands(p, "float32")
    b = bc.NetworkBuilder()
    x, first = b.input("x", src.shape), b.input("states", states.shape)
    b.output(b.add(ops.Recurrent(kind, p.reverse), x, first, parameters=tuple(parameters), name="y"))
    network = b.build()
    np.testing.assert_allclose(network.evaluate({"x": src, "states": states})["y"], wanted, atol=1e-6)
    found = bc.compile(network, precision=precision, threads=2)(src, states)
    np.testing.assert_allclose(found, wanted, atol=2e-6 if precision == "float32" else 0.05)


def test_a_nan_stays_in_its_sequence() -> None:
    """From its step on, in each direction; other images have none."""
    p = RecurrentProblem("lstm", 4, 2, 5, (False, True))
    (src, states, *parameters), _ = operands(p, "float32")
    src[2, 1] = np.nan
    b = bc.NetworkBuilder()
    inputs = b.input("x", src.shape), b.input("states", states.shape)
    b.output(b.add(ops.Recurrent("lstm", p.reverse), *inputs, parameters=tuple(parameters)))
    nan = np.isnan(bc.compile(b.build())(src, states).reshape(5, 2, 2, 5)).all(-1)
    assert not nan[:, :, 0].any()
    np.testing.assert_array_equal(nan[:4, :, 1], [[False, True], [False, True], [True, True], [True, False]])


@pytest.mark.parametrize(
    ("shape", "states", "says"),
    [((3, 2, 7), (2, 2, 5), r"input=\(3, 2, 7\): has to have shape \(3, 2, 20\)"), ((0, 2, 20), (2, 2, 5), "steps=0"),
     ((3, 2, 20), (1, 2, 5), "states")],
)  # fmt: skip
def test_what_is_no_layer_is_refused(shape: tuple[int, ...], states: tuple[int, ...], says: str) -> None:
    b = bc.NetworkBuilder()
    weights = np.zeros((1, 1, 5, COLUMNS), "f"), np.zeros((1, 20), "f")
    with pytest.raises(bc.NetworkError, match=says):
        b.add(ops.Recurrent("lstm"), b.input("x", shape), b.input("s", states), parameters=weights)


@pytest.mark.parametrize("kind", KINDS)
def test_an_image_has_the_same_bits_in_any_batch_and_on_any_threads(kind: RecurrentKind) -> None:
    p = RecurrentProblem(kind, 2, 5, 19, (False, True))
    (src, states, *parameters), _ = operands(p, "float32")

    def run(first: int, last: int, threads: int) -> Array:
        b = bc.NetworkBuilder()
        chosen = states.reshape(-1, 2, 5, 19)[:, :, first:last]
        given = np.ascontiguousarray(src[:, first:last]), chosen.reshape(states.shape[0], -1, 19)
        inputs = b.input("x", given[0].shape), b.input("states", given[1].shape)
        b.output(b.add(ops.Recurrent(kind, p.reverse), *inputs, parameters=tuple(parameters)))
        return np.asarray(bc.compile(b.build(), threads=threads)(*given))

    whole = run(0, 5, 1)
    np.testing.assert_array_equal(run(0, 5, 2), whole)
    alone = [run(k, k + 1, 1).reshape(-1, 2, 1, 19) for k in range(5)]
    np.testing.assert_array_equal(np.concatenate(alone, axis=2), whole.reshape(-1, 2, 5, 19))
