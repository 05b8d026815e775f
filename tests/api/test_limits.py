"""Huge numbers: refused by name where no array can be meant, and never a loop of Python's over an image's length."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import blockconv as bc
from blockconv.core import checks
from blockconv.core.problem import AdaptivePool2dProblem, Conv2dProblem, Pool2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.network import ops

X, W = np.ones((1, 3, 8, 8), np.float32), np.ones((4, 3, 3, 3), np.float32)


def tiny(shape: tuple[int, ...] = (1, 3, 8, 8), **more: Any) -> bc.Network:
    b = bc.NetworkBuilder("tiny")
    b.output(b.conv2d(b.input("x", shape), W, **more))
    return b.build()


HUGE: dict[str, tuple[Callable[[], Any], str, str]] = {  # a call, the argument that is named, the rule
    "padding": (lambda: bc.conv2d(X, W, padding=2**40), "padding=1099511627776", "at most 2^31"),
    "padding of an output that cannot be": (lambda: bc.conv2d(X, W, padding=10**8), r"dst_shape=\(1, 4, ", "bytes"),
    "padding of an output that is too long": (lambda: bc.conv2d(X, W, padding=2**31), "oh=", "the output's height has"),
    "a transposed output": (
        lambda: bc.conv_transpose2d(X[:, :3], W[:3, :, :1], stride=2**30), "oh=", "the output's height has to be"),
    "stride": (lambda: bc.conv2d(X, W, stride=2**61), "stride=", "at most 2^31"),
    "dilation": (lambda: bc.conv2d(X, W, dilation=2**61), "dilation=", "at most 2^31"),
    "a kernel of a pool": (lambda: bc.max_pool2d(X, 2**40, 1, 2**39), "kernel_size=", "at most 2^31"),
    "a stride of a pool": (lambda: bc.avg_pool2d(X, 2, 2**70), "stride=", "at most 2^31"),
    "a divisor": (lambda: bc.avg_pool2d(X, 2, divisor_override=2**70), "divisor_override=", "at most 2^31"),
    "an output_size": (lambda: bc.adaptive_avg_pool2d(X, 2**40), "output_size=1099511627776", "at most 2^31"),
    "an adaptive output": (lambda: bc.adaptive_avg_pool2d(X, 10**8), r"dst_shape=\(1, 3, ", r"2\^47 bytes"),
    "empty's extent": (lambda: bc.empty((2**62,), "a"), "shape=", "at most 2^31"),
    "empty's bytes": (lambda: bc.empty((2**20, 3, 2**20, 2**20), "NCHW16"), "shape=", r"2\^47 bytes"),
    "empty's packed bytes": (lambda: bc.empty((2**31, 2**31), "ab", "int4"), "shape=", r"2\^47 bytes"),
    "a shape of BlockedArray": (lambda: bc.BlockedArray(X, "NCHW", (2**62,) * 4), "shape=", "at most 2^31"),
    "a broadcast extent": (
        lambda: bc.to_layout(np.broadcast_to(np.float32(1), (2**33, 1, 1, 1)), "NHWC"), "x=", "at most 2^31"),
    "a broadcast input": (
        lambda: bc.conv2d(np.broadcast_to(np.float32(1), (1, 3, 2**24, 2**24)), W), "input=", r"2\^47 bytes"),
    "a broadcast extent of an input": (
        lambda: bc.conv2d(np.broadcast_to(np.float32(1), (1, 3, 2**33, 1)), W), "input=", "at most 2^31"),
    "a broadcast extent of a pool": (
        lambda: bc.max_pool2d(np.broadcast_to(np.int8(1), (1, 1, 1, 2**33)), 1), "input=", "at most 2^31"),
    "a broadcast extent of weights": (
        lambda: bc.conv2d(X, np.broadcast_to(np.float32(1), (2**33, 3, 3, 3))), "weight=", "at most 2^31"),
    "input_shapes": (lambda: bc.compile(tiny(), input_shapes=(1, 3, 2**40, 2**40)), "tiny: x=", "at most 2^31"),
    "input_shapes' bytes": (lambda: bc.compile(tiny(), input_shapes=(1, 3, 2**31, 2**31)), "tiny: x=", r"2\^47 bytes"),
    "an input of a builder": (lambda: tiny((1, 3, 2**40, 8)), "tiny: x=", "at most 2^31"),
    "pads of a node": (lambda: tiny(padding=10**8), "node 'conv2d_0'.*dst_shape=", "bytes"),
}  # fmt: skip


@pytest.mark.parametrize("what", HUGE)
def test_a_huge_number_is_refused_by_name(what: str) -> None:
    call, argument, rule = HUGE[what]
    with pytest.raises(bc.ArgumentError, match=f"{argument}.*{rule.replace('2^31', '2.31')}"):
        call()


def test_pads_of_a_model_are_refused(tmp_path: Path) -> None:
    helper = pytest.importorskip("onnx.helper")
    value = [helper.make_tensor_value_info(name, 1, shape) for name, shape in (("x", [1, 3, 8, 8]), ("y", None))]
    weight = helper.make_tensor("w", 1, W.shape, W.ravel())
    node = helper.make_node("Conv", ["x", "w"], ["y"], name="far", pads=[2**40] * 4)
    graph = helper.make_graph([node], "graph", value[:1], value[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)])
    with pytest.raises(bc.ArgumentError, match=r"far.*at most 2.31"):
        bc.load_onnx(model)


@pytest.mark.parametrize("size", [5, 8, 2**31])
def test_a_window_of_channels_may_be_wider_than_there_are(size: int) -> None:
    """And costs no memory for that; a larger one is refused."""
    b, x = bc.NetworkBuilder(), np.random.default_rng(0).standard_normal((1, 4, 3, 3)).astype(np.float32)
    b.output(b.add(ops.Lrn(size), b.input("x", x.shape), name="y"))
    network = b.build()
    wanted = x / (1 + 1e-4 / size * (x * x).sum(1, keepdims=True)) ** 0.75 if size > 7 else None
    found = network.evaluate(x)["y"]
    np.testing.assert_allclose(bc.compile(network)(x), found, rtol=1e-5)
    if wanted is not None:
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


def test_a_window_of_too_many_channels_is_refused() -> None:
    with pytest.raises(bc.ArgumentError, match=r"lrn: size=2147483649: has to be at most 2\^31"):
        ops.Lrn(2**31 + 1).infer((1, 4, 3, 3))


@pytest.mark.parametrize("extent", [checks.MOST_EXTENT, checks.MOST_EXTENT + 1])
def test_the_bound_itself_is_allowed(extent: int) -> None:
    if extent <= checks.MOST_EXTENT:
        checks.check_extents("op", "size", extent, (extent, -extent))
        checks.check_bytes("op", "size", extent, checks.MOST_BYTES)
        return
    with pytest.raises(bc.ArgumentError):
        checks.check_extents("op", "size", extent, (extent,))
    with pytest.raises(bc.ArgumentError):
        checks.check_bytes("op", "size", extent, checks.MOST_BYTES + 1)


@pytest.mark.parametrize(
    "shape", [(1, 3, 2.5, 8), (1, 3, -1, 8), (1, 3, "8", 8), 5, "abcd", (1, 3, True, 8), (1, None, 8, 8)]
)
def test_what_is_no_shape(shape: Any) -> None:
    with pytest.raises(bc.NetworkError, match=r"tiny: x=.*has to be a shape"):
        bc.compile(tiny(), input_shapes=shape)


# ---------------------------------------------------------------- long images


def steps(call: Callable[[], Any]) -> int:
    """Lines of the library that run, of Python's."""
    count, before = 0, sys.gettrace()

    def trace(frame: Any, event: str, arg: object) -> Any:
        nonlocal count
        if "blockconv" not in frame.f_code.co_filename:
            return None
        count += event == "line"
        return trace

    sys.settrace(trace)
    try:
        call()
    finally:
        sys.settrace(before)
    return count


def bind(op: str, problem: Any, *options: Any) -> None:
    """What the dispatcher looks at, and the ops of the kernel that it takes, in a plain and in a blocked layout."""
    for layout in map(bc.Layout, ("NCHW", "NCHW16")):
        row = selection.choose(op, problem, layout, layout, Types.all("float32"))
        row.prepare(problem, layout, layout, Types.all("float32"), 2).launches()


def along(axis: int, size: int, out: int) -> tuple[int, int, int, int]:
    """(ih, iw, oh, ow) of an image that is long in one axis."""
    return (size, 1, out, 1) if axis == 0 else (1, size, 1, out)


LONG: dict[str, Callable[[int, int], None]] = {  # an image's axis and length
    "max_pool2d": lambda axis, n: bind("pool2d", Pool2dProblem(
        "max", 1, 20, *along(axis, n, 0)[:2], *((2, 1) if axis == 0 else (1, 2)), *((2, 1) if axis == 0 else (1, 2)))),
    "return_indices": lambda axis, n: bind("pool2d_indices", Pool2dProblem(
        "max", 1, 20, *along(axis, n, 0)[:2], 3, 3, 1, 1, 1, 1)),
    "avg_pool2d": lambda axis, n: bind("pool2d", Pool2dProblem(
        "avg_exclude_padding", 1, 20, *along(axis, n, 0)[:2], 3, 3, 1, 1, 1, 1)),
    "adaptive_avg_pool2d": lambda axis, n: bind("pool2d", AdaptivePool2dProblem(1, 20, *along(axis, n, n // 3))),
    "conv2d": lambda axis, n: bind("conv2d", Conv2dProblem(
        1, 32, *along(axis, n, 0)[:2], 32, 3, 3, ph=1, pw=1), 0, False),
    "conv2d, 1x1": lambda axis, n: bind("conv2d", Conv2dProblem(
        1, 32, *along(axis, n, 0)[:2], 32, 1, 1), 0, False),
    "conv2d of groups": lambda axis, n: bind("conv2d", Conv2dProblem(
        1, 32, *along(axis, n, 0)[:2], 32, 3, 3, ph=1, pw=1, g=8), 0, False),
    "conv2d, depthwise": lambda axis, n: bind("conv2d", Conv2dProblem(
        1, 32, *along(axis, n, 0)[:2], 32, 3, 3, ph=1, pw=1, g=32), 0, False),
}  # fmt: skip


@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("op", LONG)
@pytest.mark.sampled(3)
def test_no_loop_runs_over_an_images_length(op: str, axis: int) -> None:
    short, long = 40_000, 320_000
    LONG[op](axis, short), LONG[op](axis, long)  # kernels are compiled, what is cached is cached
    # Other lengths of the same remainders, as those are what kernels are specialised for.
    first, second = (steps(lambda n=n: LONG[op](axis, n + 5040)) for n in (short, long))
    assert second <= 1.5 * first + 500


@pytest.mark.slow
def test_no_loop_runs_over_a_resampled_images_length() -> None:
    from blockconv.core.eltwise_problem import ResizeProblem

    def resize(n: int) -> None:
        for mode in ("linear", "nearest"):
            bind("resize", ResizeProblem(1, 20, 1, n, 1, 2 * n, mode))  # type: ignore[arg-type]

    for n in (1000, 300_000):  # a row that fits the cache, and one that is blended in parts: each has its kernel
        resize(n)
    assert steps(lambda: resize(320_000)) <= 1.5 * steps(lambda: resize(40_000)) + 500


def test_windows_that_are_nearly_all_padding() -> None:
    """Neither memory nor time grows with the padding: a walk over these taps would take hours."""
    x = np.arange(2 * 20 * 36, dtype=np.float32).reshape(2, 20, 6, 6)
    side = 2**30
    for layout in ("NCHW", "NHWC"):
        found = bc.max_pool2d(bc.to_layout(x, layout), 2 * side, 1, side).numpy()
        assert found.shape == (2, 20, 7, 7)
        assert np.array_equal(found, np.broadcast_to(x.max((2, 3), keepdims=True), found.shape))


@pytest.mark.filterwarnings("ignore::blockconv.SlowPathWarning")
@pytest.mark.parametrize("groups", [1, 4])
def test_taps_that_are_dilated_far_apart(groups: int) -> None:
    """The padded image's window would not fit into any memory; what the outer taps read is padding."""
    rng = np.random.default_rng(0)
    x, w = (rng.standard_normal(s).astype(np.float32) for s in ((1, 8, 5, 5), (8, 8 // groups, 3, 3)))
    found = bc.conv2d(x, w, padding=2**30, dilation=2**30, groups=groups)
    wanted = bc.conv2d(x, np.ascontiguousarray(w[..., 1:2, 1:2]), groups=groups)
    assert np.allclose(found, wanted, atol=1e-5)
