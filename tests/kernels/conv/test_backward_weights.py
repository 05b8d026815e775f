"""The gradient of a convolution's weights and bias, by every row of the table, against its definition."""

from __future__ import annotations

import dataclasses
import math
import sys
from pathlib import Path
from typing import Any

import conv_oracle
import emulated
import guarded
import numpy as np
import pytest
from conv_lab import NAMES, ROUND, Canaried, Memory, Paged, _placed, _scratch_in, parameters
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from machines import MACHINES
from random_cases import cases
from storage_oracle import stored

import blockconv as bc
from bench.shape_files import read_shape_file
from blockconv import runtime
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dBackwardWeightsProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels import Row
from blockconv.kernels.common.dot import WIDENED
from blockconv.kernels.common.request import Request
from blockconv.kernels.conv import weights_blocking

SHAPES = Path(__file__).parents[3] / "bench" / "shapes"
LAYOUTS = (*NAMES, "abdc", "cdba", "bcda", "adcb", "aBcd24b", "aBcd5b", "acBd4b", "ABcd2a4b", "ABcd16a16b")

PROBLEMS = (
    "mb3ic17ih9iw20oc12kh3kw3ph1pw1",
    "mb2ic3ih20oc18kh7sh2ph3",  # a first layer
    "mb2ic20ih7oc70kh1",
    "mb2ic20ih7iw9oc12kh1kw1sh2sw2",
    "mb1ic9ih11oc8kh3sh2ph2dh1",
    "mb1ic9ih13iw15oc8kh4kw2sh3sw1ph2pw5dh1dw3",  # more padding than the kernel is large
    "g9mb2ic9ih9oc9kh3sh2ph1",
    "g20mb2ic20ih12oc20kh3ph1",
    "g4mb2ic16ih7oc24kh3ph1",
    "g3mb2ic15ih9oc6kh3sh2ph1",
    "g4mb1ic4ih9oc12kh5ph2",  # depthwise, three outputs a channel
    "g7mb2ic56ih9iw11oc56kh3kw3ph1pw1",  # groups of half a vector, and of one with AVX2
    "g5mb2ic20ih8iw13oc80kh3kw3sh2sw2ph2pw2dh1dw1",  # of a vector, fewer input channels
    "g6mb2ic30ih9oc12kh1",
    "g9mb3ic18ih7oc36kh3ph1",
    "g3mb1ic12ih5iw70oc24kh1kw30pw9",  # a row of more taps than registers
    "mb5ic12ih1oc20kh1",
    "mb2ic4ih1oc6kh3ph1",
    "mb1ic2ih2iw700oc5kh1kw3pw1",  # rows that are cut
    "mb9ic70ih3oc9kh3ph1",  # several images a chunk
    # Depthwise, with rows of several vectors: inner columns, steps of several rows, taps that share loads or none.
    "g6mb2ic6ih9iw52oc6kh3kw3ph1pw1",
    "g5mb3ic5ih21iw75oc5kh5kw3sh2sw2ph2pw0",
    "g18mb1ic18ih14iw37oc18kh3kw4sh3sw2ph0pw3dh1dw2",
)
SAME = (("NCHW", "NCHW"), ("acbd", "NCHW"), ("NCHW4", "NCHW4"), ("acBd4b", "NCHW4"), ("ABcd2a4b", "NCHW4"))


def read(descriptor: str) -> Conv2dBackwardWeightsProblem:
    p = Conv2dBackwardWeightsProblem.from_descriptor(descriptor)
    assert isinstance(p, Conv2dBackwardWeightsProblem)
    return p


def rows(problem: Conv2dBackwardWeightsProblem, src: str, dst: str, types: Types) -> list[Row]:
    found = selection.decisions("conv2d_backward_weights", Request(problem, Layout(src), Layout(dst), types))
    return [row for row, one in found.items() if not isinstance(one, str)]


def arrays(problem: Conv2dBackwardWeightsProblem, types: Types, kind: str = "integers") -> tuple[Any, Any]:
    rng = np.random.default_rng(7)
    shapes = problem.src_shape, problem.dst_shape
    if kind == "integers":
        x, grad = (rng.integers(-3, 4, shape).astype(types.src.dtype) for shape in shapes)
    else:
        x, grad = (rng.standard_normal(shape).astype(types.src.dtype) for shape in shapes)
    return x, grad


def run(
    row: Row, problem: Conv2dBackwardWeightsProblem, src: str, dst: str, given: tuple[Any, Any], types: Types,
    threads: int = 2, memory: Memory | None = None, weights: str = "abcd",
) -> tuple[Any, Any]:  # fmt: skip
    """The gradients of weights and bias that a row writes. The tails of the arrays hold NaN."""
    memory = Canaried() if memory is None else memory
    primitive = row.prepare(problem, Layout(src), Layout(dst), types, threads, weights=Layout(weights), bias=True)
    x, grad = (
        _placed(memory, "input", stored(given[0], src, np.nan)),
        _placed(memory, "grad", stored(given[1], dst, np.nan)),
    )
    out = _placed(memory, "weights", np.full(math.prod(problem.wei_shape), np.nan, types.dst.dtype))
    bias = _placed(memory, "bias", np.full(problem.oc, np.nan, types.dst.dtype))
    workspace = _placed(memory, "workspace", np.full(sum(primitive.workspace) // 4, np.nan, np.float32))
    program = runtime.Program(primitive.launches())
    scratch = _scratch_in(memory, program, threads)
    at = runtime.address_of
    try:
        program.run((at(x), at(grad), at(out), at(bias), at(workspace)), threads)
        assert scratch is None or runtime.launcher._scratch.memory is scratch
    finally:
        runtime.launcher._scratch.keep(np.empty(0, np.uint8))
    assert not memory.touched(), f"{row.name} {src} {dst} {problem.descriptor()}: wrote past {memory.touched()}"
    outer = Layout(weights).outer
    return out.reshape([problem.wei_shape[d] for d in outer]).transpose(np.argsort(outer)), bias


def check_all(problem: Conv2dBackwardWeightsProblem, pairs: Any, types: Types, **how: Any) -> None:
    x, grad = arrays(problem, types)
    wanted = conv_oracle.conv2d_backward_weights(x, problem.wei_shape, grad, **parameters(problem))
    of_bias = grad.astype(np.float64).sum((0, 2, 3))
    for k, (src, dst) in enumerate(pairs):
        for row in rows(problem, src, dst, types):
            where = f"{row.name} {src} {dst} {problem.descriptor()} {types}"
            weights = "acdb" if k % 2 else "abcd"
            found, bias = run(row, problem, src, dst, (x, grad), types, 1 + k % 3, weights=weights, **how)
            assert np.array_equal(found, wanted), f"{where}: {np.argwhere(found != wanted)[0]}"
            assert np.array_equal(bias, of_bias), where


@pytest.fixture(params=["as they are", "small"])
def pieces(request, monkeypatch) -> None:
    """Chunks and shares as they are, and such that small problems are cut as large ones are."""
    if request.param == "small":
        for name, value in (("SPLIT_FLOPS", 1), ("CHUNK_STEPS", 37), ("LINES", 20)):
            monkeypatch.setattr(weights_blocking, name, value)
    weights_blocking.weights_blocking.cache_clear()
    yield
    weights_blocking.weights_blocking.cache_clear()


@pytest.mark.parametrize("descriptor", PROBLEMS)
@pytest.mark.sampled(12)
def test_every_row(descriptor: str, pieces: None) -> None:
    check_all(read(descriptor), (*ROUND, *SAME), Types.all("float32"))


@pytest.mark.slow
@pytest.mark.parametrize("types", [Types.all("float64"), Types.converted("bfloat16", "float32"),
                                   Types.converted("float16", "float32")], ids=str)  # fmt: skip
@pytest.mark.sampled(3)
def test_types(types: Types, pieces: None) -> None:
    for descriptor in (PROBLEMS[0], PROBLEMS[3], PROBLEMS[7]):
        check_all(read(descriptor), (*ROUND[::2], *SAME[::2]), types)


# Rows of an odd number of pixels, of one, cut ones, with strides and with dilation.
PAIRED = (*(PROBLEMS[k] for k in (0, 1, 2, 4, 5, 13)), "mb2ic9ih11iw2oc8kh3kw2pw1", "mb2ic3ih2iw1401oc5kh1kw4sw2")
BRAIN = Types.converted("bfloat16", "float32")


@pytest.fixture(params=["", "emulated", "widened"])
def dot(request, monkeypatch) -> None:
    """The multiply-accumulate of bfloat16: that of the target, and what stands for it elsewhere."""
    if request.param:
        found = WIDENED if request.param == "widened" else emulated.BRAIN["vdpbf16ps, emulated"]
        monkeypatch.setattr(weights_blocking, "dot_for", lambda types, isa: found)


@pytest.mark.parametrize("descriptor", PAIRED)
@pytest.mark.sampled(6)
def test_pairs_of_pixels(descriptor: str, dot: None, pieces: None) -> None:
    check_all(read(descriptor), (*ROUND[1::3], *SAME[:2]), BRAIN)


@pytest.mark.isa
def test_what_is_no_number_reaches_the_sums_of_its_pixels_alone(pieces: None) -> None:
    """A row's last pixel has no second, but for the taps before it the same column is one of a pair."""
    for descriptor in ("mb1ic2ih2iw7oc3kh1kw3", "mb1ic2ih2iw75oc3kh1kw3"):
        p = read(descriptor)
        for column in range(p.iw):
            x, grad = arrays(p, BRAIN)
            grad[grad == 0] = 1
            x[0, 1, 1, column] = np.inf if column % 2 else np.nan
            wanted = conv_oracle.conv2d_backward_weights(x, p.wei_shape, grad, **parameters(p))
            for row in rows(p, "NCHW", "NCHW", BRAIN):
                found, _ = run(row, p, "NCHW", "NCHW", (x, grad), BRAIN)
                assert np.array_equal(found, wanted, equal_nan=True), (descriptor, column)


@pytest.mark.parametrize("descriptor", PROBLEMS)
def test_the_oracle_agrees_with_torch(descriptor: str) -> None:
    torch = pytest.importorskip("torch")
    p = read(descriptor)
    x, grad = arrays(p, Types.all("float64"), "floats")
    given = torch.from_numpy(x), p.wei_shape, torch.from_numpy(grad)
    wanted = torch.nn.grad.conv2d_weight(*given, (p.sh, p.sw), (p.ph, p.pw), (p.dh, p.dw), p.g)
    found = conv_oracle.conv2d_backward_weights(x, p.wei_shape, grad, **parameters(p))
    assert conv_oracle.error(found, wanted.numpy()) < 1e-13


@st.composite
def problems(draw: st.DrawFn) -> Conv2dBackwardWeightsProblem:
    g = draw(st.sampled_from((1, 1, 1, 2, 3, 8, 30)))
    channels = st.sampled_from((1, 2, 3, 4, 5, 8, 16, 17, 33) if g < 8 else (1, 2, 4))
    kernel, stride, dilation = (draw(st.tuples(*[st.integers(1, most)] * 2)) for most in (5, 3, 3))
    sizes = draw(st.integers(1, 4)), g * draw(channels), draw(st.integers(1, 14)), draw(st.integers(1, 40))
    try:
        windows = *kernel, *stride, *draw(st.tuples(*[st.integers(0, 4)] * 4)), *dilation
        return Conv2dBackwardWeightsProblem(*sizes, g * draw(channels), *windows, g)
    except ArgumentError:  # smaller than its kernel
        assume(False)
        raise


@pytest.mark.slow
@settings(max_examples=cases(100), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    problem=problems(), src=st.sampled_from(LAYOUTS), dst=st.sampled_from(LAYOUTS),
    dtype=st.sampled_from(("float32",) * 4 + ("float64", "bfloat16")),
)  # fmt: skip
def test_random_problems(problem, src, dst, dtype) -> None:
    types = Types.converted(dtype, "float32") if dtype == "bfloat16" else Types.all(dtype)
    check_all(problem, [(src, dst)], types)


@pytest.mark.parametrize("layout", ["NCHW", "NCHW4"])
def test_depthwise_gradients_take_no_tiles_of_packed_pixels(layout: str) -> None:
    """Vectors along pixels were measured to be 1.4 to 2.5 times as fast in NCHW, 7 times in NCHW4."""
    given = Layout(layout), Layout(layout), Types.all("float32")
    for descriptor in ("g32mb1ic32ih112oc32kh3ph1", "g144mb1ic144ih56oc144kh3sh2ph1", "g384mb1ic384ih14oc384kh3ph1"):
        row = selection.choose("conv2d_backward_weights", read(descriptor), *given)
        assert row.name.startswith("depthwise_"), (descriptor, row.name)


def test_the_same_bits_for_any_number_of_threads(pieces: None) -> None:
    for descriptor, types, *pair in (
        (PROBLEMS[0], Types.all("float32"), "NHWC", "NCHW16"),
        (PROBLEMS[0], BRAIN, "NHWC", "NCHW16"),
        (PROBLEMS[7], Types.all("float32"), "NHWC", "NCHW16"),
        (PROBLEMS[7], Types.all("float32"), *SAME[0]),
        ("g9mb3ic18ih7oc36kh3ph1", Types.all("float32"), "NHWC", "NHWC"),
    ):
        p = read(descriptor)
        given = arrays(p, types, "floats")
        for row in rows(p, *pair, types):
            first = run(row, p, *pair, given, types, threads=1)
            for threads in (2, 3, 4):
                again = run(row, p, *pair, given, types, threads=threads)
                assert all(map(np.array_equal, first, again))


@pytest.mark.parametrize("on_machine", MACHINES, indirect=True)
def test_two_threads_have_as_much_to_do(on_machine: str) -> None:
    """Of each layer of ResNet-50, one image: a worker takes the next task when it is done with one."""
    layers = read_shape_file(SHAPES / "conv_shapes_resnet_50_v1_5.txt", "conv2d")
    descriptors = {dataclasses.replace(p, n=1, name="").descriptor() for p in layers}
    assert len(descriptors) > 20
    for descriptor in sorted(descriptors):
        p, layout = read(descriptor), Layout("NHWC")
        at = weights_blocking.weights_blocking(Request(p, layout, layout, Types.all("float32")))
        assert not isinstance(at, str)
        ocbs, icbs = -(-p.oc // at.width), -(-p.ic // at.cb)
        splits, shares = (
            np.diff(units * np.arange(count + 1) // count)
            for units, count in ((math.prod(at.chunks(p)), at.splits), (ocbs, at.oc_tasks))
        )
        busy = [0, 0]
        for work in np.multiply.outer(np.repeat(splits, icbs), shares).reshape(-1):
            busy[busy.index(min(busy))] += int(work)
        assert sum(busy) >= 1.8 * max(busy), (descriptor, at)


@pytest.mark.parametrize("on_machine", MACHINES, indirect=True)
def test_small_groups_share_what_they_read(on_machine: str) -> None:
    """An input channel is packed once, and read once for all taps of a row. A vector has no idle lanes."""
    layout, types = Layout("NHWC"), Types.all("float32")
    for channels in (2, 4, 8):
        p = read(f"g32mb1ic{32 * channels}ih28oc{32 * channels}kh3ph1")
        request = Request(p, layout, layout, types)
        at = weights_blocking.weights_blocking(request)
        assert not isinstance(at, str)
        if channels <= at.lanes:
            assert at.taps == 3
            assert at.pixels > 1
            assert at.width == at.together * channels
        assert at.packed_ic <= weights_blocking.WIDE * at.width


def test_sums_of_all_splits_keep_to_their_memory() -> None:
    for descriptor in (
        "mb64ic512ih14oc512kh3ph1",
        "mb64ic64ih56oc64kh3ph1",
        "mb32ic1024ih14oc2048kh1",
        "mb64ic3ih224oc64kh7sh2ph3",
    ):
        p = read(descriptor)
        request = Request(p, Layout("NHWC"), Layout("NHWC"), Types.all("float32"))
        primitives = [row.decide(request) for row in rows(p, "NHWC", "NHWC", request.types)]
        assert primitives
        assert all(
            sum(found.workspace) <= weights_blocking.WORKSPACE for found in primitives if not isinstance(found, str)
        )
    assert "conv_backward_weights" in bc.explain(p, "NHWC")


@pytest.mark.slow
@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
def test_no_access_past_any_buffer(run_python) -> None:
    assert guarded.last_line(run_python, [__file__]) == "clean"


def run_guarded() -> None:
    for descriptor in PROBLEMS:
        for pair in (*ROUND, *SAME[:3]):
            for where in ("end", "start"):
                print(descriptor, *pair, where, flush=True)
                check_all(read(descriptor), [pair], Types.all("float32"), memory=Paged(where))
                if descriptor in PAIRED:
                    check_all(read(descriptor), [pair], BRAIN, memory=Paged(where))
    print("clean")


if __name__ == "__main__":
    sys.exit(run_guarded())
