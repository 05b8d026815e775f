"""Gradients as the harness has them: what is expected of all, and what ours and PyTorch give."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from bench import gradients, layers, peers, pools
from bench.measure import noise, relative_error
from bench.peers import OURS
from bench.workers import Crew
from blockconv.core.problem import Conv2dProblem, Pool2dProblem

LAYERS = [
    Conv2dProblem.from_descriptor(text)
    for text in (
        "mb2ic16ih9oc20kh3ph1sh2",
        "g4mb1ic8ih10oc12kh3ph1dh1",
        "mb1ic3ih10oc5oh5kh3sh2ph0",
        "mb1ic2ih6oc3oh2kh2sh3ph0",
    )
]
POOLS = [Pool2dProblem.from_descriptor(text) for text in ("mb2ic5ih9oh5kh3sh2ph1", "mb1ic3ih8oh4kh2sh2")]
GRADIENTS = [direction for direction in gradients.DIRECTIONS if direction != gradients.FORWARD]


def whole(shape: tuple[int, ...], seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(-9, 10, shape).astype(np.float64)


@pytest.mark.parametrize("problem", LAYERS, ids=Conv2dProblem.descriptor)
def test_what_is_expected_of_gradients_is_the_transpose_of_the_layer(problem: Conv2dProblem):
    """The layer is linear in its source and in its weights, so one sum has three spellings."""
    src, wei, grad = (whole(s, k) for k, s in enumerate((problem.src_shape, problem.wei_shape, problem.dst_shape)))
    forward = np.vdot(layers.reference(problem, src, wei, None), grad)
    assert np.vdot(src, gradients.input_gradient(problem, wei, grad)) == forward
    assert np.vdot(wei, gradients.weight_gradient(problem, src, grad)) == forward


@pytest.mark.parametrize("kind", ["max", "avg_include_padding", "avg_exclude_padding"])
@pytest.mark.parametrize("problem", POOLS, ids=Pool2dProblem.descriptor)
def test_what_is_expected_of_a_pools_gradient_is_its_slope(problem: Pool2dProblem, kind: str):
    pool = Pool2dProblem.from_descriptor(problem.descriptor(), kind)  # type: ignore[arg-type]
    order = np.random.default_rng(0).permutation(np.prod(pool.src_shape)).reshape(pool.src_shape).astype(np.float64)
    step, grad = whole(pool.src_shape, 1), whole(pool.dst_shape, 2)
    slope = (pools.reference(pool, order + step / 64) - pools.reference(pool, order)) * 64
    np.testing.assert_allclose(np.vdot(pools_gradient(pool, order, grad), step), np.vdot(slope, grad), rtol=1e-9)


def pools_gradient(pool: Pool2dProblem, src: np.ndarray, grad: np.ndarray) -> np.ndarray:
    found = gradients.pool_gradient(pool, src, grad)
    assert found.shape == pool.src_shape
    return found


@pytest.fixture(scope="module")
def libraries() -> Iterator[list[peers.Peer]]:
    pytest.importorskip("torch")
    from bench.peers import torch_peer

    yield peers.load([OURS, "torch"])[0]
    torch_peer._modes.close()  # it computes without gradients, for as long as its process lives


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("direction", GRADIENTS)
def test_a_gradient_of_each_library_is_as_expected(libraries: list[peers.Peer], direction: str, dtype: str):
    way = layers.Way(dtype, direction=direction)
    for problem in LAYERS[: 3 if dtype == "float32" else 1]:
        op, given, expected = layers._work(problem, way)
        for peer in libraries:
            ours = [["NHWC"], *([] if direction == "backward_weights" else ["auto"])] if peer.name == OURS else []
            variants = peer.variants(op, problem, *given, *ours, 1)
            assert variants or not peers.is_symmetric(problem)
            for variant in variants:
                variant.function()
                assert relative_error(variant.fetch(), expected) <= layers.TOLERANCE[dtype], variant.name


@pytest.mark.parametrize("kind", ["max", "avg_exclude_padding"])
def test_a_pools_gradient_of_each_library_is_as_expected(libraries: list[peers.Peer], kind: str):
    pool = Pool2dProblem.from_descriptor(POOLS[0].descriptor(), kind)  # type: ignore[arg-type]
    src, grad = noise(pool.src_shape, "float32"), noise(pool.dst_shape, "float32", 1)
    expected = gradients.pool_gradient(pool, src, grad)
    for peer in libraries:
        for variant in peer.variants("pool2d_backward", pool, src, grad, *([["NHWC"]] if peer.name == OURS else []), 1):
            variant.function()
            assert relative_error(variant.fetch(), expected) <= 1e-6, variant.name


def test_ways_that_do_not_exist_are_no_cases():
    ways = [layers.Way(*way) for way in (("float32", "auto", "backward_weights"), ("int8", "auto", "backward_data"),
                                         ("float32", "winograd", "backward_weights"))]  # fmt: skip
    plans = layers.plans(LAYERS[:1], [1], ["NHWC"], Crew([]), {}, ways)
    assert [plan.params["direction"] for plan in plans] == ["backward_weights"]
    ways_of_pools = [pools.Way(dtype, "backward") for dtype in ("float32", "uint8")]
    assert len(pools.plans(POOLS, [1], ["NHWC"], Crew([]), {}, ways_of_pools)) == len(POOLS)


def test_the_floor_is_the_larger_of_sums_and_bytes():
    case = {"flops": 4e9, "peak": 2e9, "bytes": 1e9, "bandwidth": 1e9}
    assert layers.floor(case) == 2
    assert layers.floor(case | {"bandwidth": 1e8}) == 10
