"""The gradient of a convolution's input, by every row of the table, against its definition."""

from __future__ import annotations

import functools
import itertools
import math
import sys

import conv_oracle
import guarded
import numpy as np
import pytest
from conv_lab import NAMES, ROUND, Paged, check, data, parameters, rows, run
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from random_cases import cases

import blockconv as bc
from blockconv.core import target
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dBackwardDataProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.kernels import TABLE, backward_data
from blockconv.kernels.common.interleaved_planes import InterleaveArgs, InterleavedPlanes, interleave_rows
from blockconv.runtime import OWN_TABLE, Buffer, Launch, Program, address_of

LAYOUTS = (*NAMES, "abdc", "cdba", "bcda", "adcb", "aBcd24b", "aBcd5b", "acBd4b", "ABcd2a4b", "ABcd16a16b")

PROBLEMS = (
    "mb2ic17ih9iw20oc12kh3kw3ph1pw1",
    "mb2ic3ih20oc18kh7sh2ph3",  # a first layer
    "mb1ic20ih7oc33kh1",
    "mb2ic20ih7iw9oc12kh1kw1sh2sw2",  # three of four pixels are reached by no tap
    "mb2ic6ih9iw10oc5kh2kw2sh3sw3",  # so are rows and columns
    "mb1ic9ih11oc8kh3sh2ph1dh1",  # dilation and stride have a divisor: odd pixels have no tap
    "mb1ic9ih13oc8kh4sh3ph2dh1",
    "mb2ic8ih6oc8kh3ph5",  # more padding than the kernel is large: the gradient is cropped
    "mb1ic16ih8oc16kh6sh2ph2",  # windows of 3x3 for each remainder
    "g9mb1ic9ih9oc9kh3sh2ph1",
    "g8mb2ic8ih11iw75oc8kh5kw3sh3sw2ph2pw1dw1",  # several vectors of columns
    "g8mb1ic8ih17oc8kh3ph1",
    "g4mb2ic16ih7oc24kh3ph1",
    "g3mb2ic15ih9oc6kh3sh2ph1",
    "mb5ic12ih1oc20kh1",
    "mb2ic4ih1oc6kh3ph1",
)


def read(descriptor: str) -> Conv2dBackwardDataProblem:
    p = Conv2dBackwardDataProblem.from_descriptor(descriptor)
    assert isinstance(p, Conv2dBackwardDataProblem)
    return p


@pytest.mark.slow
@pytest.mark.parametrize("descriptor", PROBLEMS)
@pytest.mark.sampled(4)
def test_every_row(descriptor: str) -> None:
    """Exact on small integers; bias and activation included, also where no tap reaches."""
    p = read(descriptor)
    wanted = data(p, act="relu")
    for k, (src, dst) in enumerate(ROUND):
        for row in rows(p, src, dst):
            if not row.reference or k == 0:
                check(row, p, src, dst, wanted, "relu", exact=True, threads=1 + k % 3)


@pytest.mark.isa
@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.sampled(2)
def test_neighbouring_pixels_of_depthwise_convolutions(dtype: str) -> None:
    """Of one channel or of a few, at every remainder of padding, rows of all lengths round a vector's."""
    row = next(row for row in TABLE if row.name == "conv_backward_data_depthwise_pixels")
    bits, takes_halves = {"avx512": (512, True), "avx2": (256, False)}.get(target.isa().name, (0, False))
    few = (
        "ih14kh3sh2ph1",
        "ih5iw37kh4kw4sh2sw2ph2pw2",
        "ih9iw75kh5kw3sh3sw2ph2pw0dw1",
        "ih6iw64kh1kw1sh2sw4",
        "ih4iw3kh3kw3sh2sw2ph2pw2",
    )
    for k, text in enumerate(few):
        p, act = read(f"g8mb2ic8{text}oc8"), (None, "relu", "relu" if dtype == "bfloat16" else "silu")[k % 3]
        kind, dst = "floats" if act == "silu" else "integers", "float32" if dtype == "bfloat16" else None
        wanted = data(p, kind, dtype=dtype, dst=dst, act=act)
        for layout, unit in (("NCHW", 1), ("NCHW4", 4), ("NCHW8", 8)):
            is_taken = row.rejects(p, Layout(layout), Layout(layout), wanted.types) is None
            fits = 16 * unit * wanted.types.acc.itemsize <= bits and (takes_halves or dtype != "bfloat16")
            assert is_taken == fits, (p, layout)
            for where in ("start", "end") if is_taken else ():
                check(row, p, layout, layout, wanted, act, act != "silu", threads=1 + k, memory=Paged(where))


@pytest.mark.parametrize("descriptor", PROBLEMS)
def test_the_oracle_agrees_with_torch(descriptor: str) -> None:
    torch = pytest.importorskip("torch")
    p = read(descriptor)
    rng = np.random.default_rng(5)
    w, grad = rng.standard_normal(p.wei_shape), rng.standard_normal(p.src_shape)
    wanted = torch.nn.grad.conv2d_input(
        p.dst_shape, torch.from_numpy(w), torch.from_numpy(grad), (p.sh, p.sw), (p.ph, p.pw), (p.dh, p.dw), p.g
    )
    found = conv_oracle.conv2d_backward_data(p.dst_shape, w, grad, **parameters(p))
    assert conv_oracle.error(found, wanted.numpy()) < 1e-13


@st.composite
def problems(draw: st.DrawFn) -> Conv2dBackwardDataProblem:
    g = draw(st.sampled_from((1, 1, 1, 2, 3, 8)))
    channels = st.sampled_from((1, 2, 3, 4, 5, 8, 16, 17, 33))
    kernel, stride, pads = draw(
        st.one_of(
            st.just(((3, 3), (1, 1), (1, 1, 1, 1))),
            st.tuples(
                st.tuples(*[st.integers(1, 5)] * 2), st.tuples(*[st.integers(1, 4)] * 2),
                st.tuples(*[st.integers(0, 4)] * 4),
            ),
        )
    )  # fmt: skip
    sizes = draw(st.integers(1, 3)), g * draw(channels), draw(st.integers(1, 12)), draw(st.integers(1, 40))
    dilation = draw(st.sampled_from(((1, 1), (1, 1), (2, 1), (1, 3), (2, 2), (4, 2))))
    try:
        windows = *kernel, *stride, *pads, *dilation
        return Conv2dBackwardDataProblem(*sizes, g * draw(channels), *windows, g)
    except ArgumentError:  # smaller than its kernel
        assume(False)
        raise


@pytest.mark.slow
@settings(max_examples=cases(40), deadline=None, suppress_health_check=list(HealthCheck))
@given(
    problem=problems(), src=st.sampled_from(LAYOUTS), dst=st.sampled_from((None, *LAYOUTS)),
    dtype=st.sampled_from(("float32",) * 4 + ("float64", "bfloat16")), threads=st.integers(1, 3),
)  # fmt: skip
def test_random_problems(problem, src, dst, dtype, threads) -> None:
    dst = src if dst is None else dst
    wanted = data(problem, dtype=dtype, dst="float32" if dtype == "bfloat16" else None)
    for row in rows(problem, src, dst, wanted.types):
        check(row, problem, src, dst, wanted, exact=True, threads=threads)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "float64", "bfloat16"])
@pytest.mark.sampled(8)
def test_planes_are_interleaved_some_images_at_a_time(dtype: str, monkeypatch) -> None:
    """Where a row's pixels are contiguous, also if the row ends anywhere, and no matter what is around images."""
    monkeypatch.setattr(backward_data, "WORKSPACE", 40000)
    pairs = ("NCHW", "NCHW"), ("NHWC", "bacd"), ("NCHW8", "acbd")
    some = "mb6ic9ih9iw41oc8kh3kw3sh2sw2ph1pw1", "mb4ic5ih7iw80oc6kh2kw3sh3sw3", PROBLEMS[3], PROBLEMS[4]
    for k, descriptor in enumerate(some):
        p = read(descriptor)
        wanted = data(p, dtype=dtype, dst="float32" if dtype == "bfloat16" else None)
        for src, dst in pairs if k == 0 else pairs[k % 3 :][:1]:
            for row in rows(p, src, dst, wanted.types):
                primitive = row.prepare(p, Layout(src), Layout(dst), wanted.types)
                one = math.prod(p.dst_shape[1:]) * wanted.types.dst.itemsize
                assert 0 < sum(primitive.workspace) <= max(40000, one) + 128 * p.sh * p.sw
                check(row, p, src, dst, wanted, exact=True)


def test_columns_are_interleaved_whatever_their_number() -> None:
    """By vectors, halves of them, and so on to single elements; rows of a channel are shared by tasks."""
    for width, itemsize in itertools.product((1, 2, 3, 16, 37, 62, 63), (2, 4)):
        rows, parts, channels = 7, 1 + width % 3, 3
        whole = np.arange(1, 1 + channels * rows * width).reshape(channels, rows, width).astype(f"u{itemsize}")
        table, planes, at = [], [], 0
        for rest, w in itertools.product(range(2), repeat=2):
            plane = np.ascontiguousarray(whole[:, rest::2, w::2])
            sizes = plane.strides[0], plane.strides[1]
            table.append(InterleavedPlanes(at=at, n=0, channel=sizes[0], row=sizes[1], first=w, size=plane.shape[2]))
            planes.append(plane.reshape(-1))
            at += plane.nbytes
        found = np.zeros_like(whole)
        args = InterleaveArgs(
            src=Buffer(0), dst=Buffer(1), planes=OWN_TABLE, channels=channels, parts=parts, rows=rows, n=0,
            channel=whole.strides[0], row=whole.strides[1], sh=2, sw=2, begins=2, columns=2,
        )  # fmt: skip
        lanes = target.isa().vector_bytes // itemsize
        op = Launch(
            interleave_rows(itemsize, lanes), args, channels * parts, table=np.array(table, np.int64).reshape(-1)
        )
        source = np.concatenate(planes)
        Program([op]).run((address_of(source), address_of(found)), 1)
        assert np.array_equal(found, whole), (width, itemsize)


@pytest.mark.parametrize(("groups", "layout", "columns"), [(1, "NCHW", 1), (8, "NCHW", 2), (8, "NCHW8", 2)])
def test_a_stride_may_be_far_longer_than_the_image(groups: int, layout: str, columns: int) -> None:
    """Work and memory follow the pixels that there are, and not the stride."""
    x = bc.to_layout(np.arange(8 * 9, dtype=np.float32).reshape(1, 8, 3, 3), layout)
    grad = bc.to_layout(x.numpy()[:, :, :1, :columns], layout)
    weight = np.arange(8 * 9 * 8 // groups, dtype=np.float32).reshape(8, 8 // groups, 3, 3) % 7
    for call in (
        functools.partial(bc.conv2d, x, weight, padding=1),
        functools.partial(bc.conv_transpose2d, grad, weight),
        functools.partial(bc.conv2d_backward_data, x.shape, weight, grad, padding=1),
        functools.partial(bc.conv2d_backward_weights, x, weight.shape, grad, padding=1),
    ):
        strides = [(size, 2 if columns == 2 else size) for size in (5, 2**31)]
        near, far = (call(stride=stride, groups=groups) for stride in strides)
        assert np.array_equal(*(y.numpy() if isinstance(y, bc.BlockedArray) else y for y in (near, far)))


def test_there_is_a_row_of_each_kernel_of_floats() -> None:
    """But of regions, which need weights that are known to be finite. And explain() says which is taken."""
    forward = {row.name.replace("conv_", "", 1) for row in TABLE if row.op == "conv2d"}
    names = {row.name.replace("conv_backward_data_", "", 1) for row in TABLE if row.op == "conv2d_backward_data"}
    own = {"depthwise_pixels"}
    assert names - own == forward - {"regions"} - {name for name in forward if name.endswith("_int8")}
    text = bc.explain(read("mb1ic64ih56oc64kh3ph1"), "NHWC")
    assert "conv_backward_data_winograd_f4" in text
    assert "taken" in text


@pytest.mark.parametrize("descriptor", PROBLEMS)
def test_nothing_is_reordered(descriptor: str) -> None:
    """A row that is no reference takes every problem in every native layout."""
    p = read(descriptor)
    for src, dst in ROUND:
        assert not selection.choose("conv2d_backward_data", p, Layout(src), Layout(dst), Types.all("float32")).reference


def test_the_same_bits_for_any_number_of_threads() -> None:
    p = read("mb2ic24ih30oc40kh3sh2ph1")
    wanted = data(p, "floats")
    for row in rows(p, "NHWC", "NCHW16"):
        first = run(row, p, "NHWC", "NCHW16", wanted, threads=1)
        for threads in (2, 3, 4):
            assert np.array_equal(first, run(row, p, "NHWC", "NCHW16", wanted, threads=threads))


@pytest.mark.slow
@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("third", range(3))
@pytest.mark.sampled(3)
def test_no_access_past_any_buffer(run_python, third: int) -> None:
    assert guarded.last_line(run_python, [__file__, str(third)]) == "clean"


def run_guarded(third: int) -> None:
    for descriptor in PROBLEMS[third::3]:
        p = read(descriptor)
        wanted = data(p)
        for k, (src, dst) in enumerate(ROUND):
            for row in rows(p, src, dst):
                for where in ("end", "start"):
                    if not row.reference:
                        print(row.name, descriptor, src, dst, where, flush=True)
                        check(row, p, src, dst, wanted, exact=True, threads=1 + k % 3, memory=Paged(where))
    print("clean")


def test_it_is_decided_for_another_machine_too() -> None:
    assert "taken" in bc.explain(read(PROBLEMS[0]), "NCHW8", machine="znver3")


if __name__ == "__main__":
    sys.exit(run_guarded(int(sys.argv[1])))
