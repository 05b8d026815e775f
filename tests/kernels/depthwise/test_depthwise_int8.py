"""The depthwise row of 8-bit integers: every layout and way of cutting, against the oracle, bit for bit."""

from __future__ import annotations

import functools
import sys

import guarded
import numpy as np
import pytest
from conv_lab import NAMES, Paged
from quantized_lab import _check, case, finished, has_dot, rows
from quantized_oracle import Steps

from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import INT8, Types
from blockconv.dispatch import selection
from blockconv.kernels.common.dot import DOTS
from blockconv.kernels.common.request import Request
from blockconv.kernels.common.unpacked import permutes_bytes
from blockconv.kernels.depthwise import blocking as cut
from blockconv.kernels.depthwise.blocking import row_edges

ROW = "conv_depthwise"
# Source, destination, and what comes between.
KINDS = (
    {"src": "uint8", "dst": "uint8", "act": "relu"},
    {"src": "int8", "dst": "int8", "residual": "int8"},
    {"src": "uint8", "dst": "int32"},
    {"src": "int8", "dst": "float32", "residual": "float32", "act": ("clip", -1.0, 0.75)},
    {"src": "int8", "dst": "uint8", "residual": "uint8", "away": True},
    {
        "src": "int8",
        "dst": "int8",
        "residual": "uint8",
        "act": ("clip", -0.5, 2.0),
        "sum_scale": 0.03,
        "sum_zero_point": -5,
    },
    {"src": "uint8", "dst": "uint8", "act": "relu", "sum_scale": 0.03, "sum_zero_point": 117, "affine": True},
    {"src": "int8", "dst": "int8", "residual": "int8", "affine": True},
)
WIDE = "g80mb1ic80ih9iw11oc80kh3kw3ph1pw1"
SMALL = "g17mb2ic17ih9iw11oc17kh3kw3ph1pw1"
SAME = tuple((name, name) for name in NAMES)
CHANGED = (("NHWC", "NCHW16"), ("NCHW16", "NHWC"), ("NHWC", "NCHW"), ("NCHW32", "NCHW4"), ("NCHW64", "CHWN4"))
PLAIN = (("NHWC", "NHWC"), ("NCHW", "NCHW"), ("NCHW4", "NCHW4"))
FAR = "rows far apart that share vectors"  # further than 16 bytes reach, within which most processors shuffle
# Each on pairs of layouts, from the kind of this number on.
PROBLEMS = {
    "3x3": (SMALL, (*SAME, *CHANGED[:1]), 0),
    "3x3 to other layouts": (SMALL, CHANGED[1:], 1),
    "3x3 of whole vectors": (WIDE, PLAIN, 1),
    "3x3 s2": ("g24mb1ic24ih13iw31oc24kh3kw3sh2sw2ph1pw1", PLAIN, 0),
    "rows that share vectors": ("g3mb2ic3ih14oc3kh3sh2ph1", (("NCHW", "NCHW"),) * len(KINDS), 0),
    FAR: ("g2mb1ic2ih8iw50oc2kh1kw4sh1sw15", (("NCHW", "NCHW"),), 1),
    "5x5, two outputs a channel": ("g20mb3ic20ih8iw13oc40kh5kw5ph2pw2", PLAIN[:2], 0),
    "three outputs a channel": ("g35mb2ic35ih6iw5oc105kh3kw3ph1pw1", (("NHWC", "NCHW16"), ("NCHW8", "NCHW8")), 1),
    "7x7": ("g19mb1ic19ih9iw31oc19kh7kw7ph3pw3", PLAIN[:1], 1),
    "dilated": ("g18mb1ic18ih15iw17oc18kh3kw3ph2pw3dh1dw2", PLAIN[:2], 0),
    "large": ("g16mb1ic16ih9iw16oc16kh13kw13ph6pw6", PLAIN[:2], 1),
    "even, strides that differ": ("g6mb5ic6ih14iw9oc6kh2kw4sh3sw2ph1pw1", (("NHWC", "NHWC"), ("CHWN4", "CHWN4")), 0),
    "more padding than image": ("g9mb1ic9ih2iw3oc9kh5kw5ph4pw4", PLAIN[:1], 1),
}
AS_OTHERS = ("3x3 s2", "rows that share vectors", "5x5, two outputs a channel")


def marked(name):
    marks = [pytest.mark.isa] if name in AS_OTHERS else []
    if name == FAR:
        marks.append(pytest.mark.skipif(not permutes_bytes(target.isa()), reason="permutes no bytes of a whole vector"))
    return pytest.param(name, marks=marks)


@functools.lru_cache(maxsize=32)
def made_of(descriptor, kind, **options):
    return case(descriptor, **KINDS[kind % len(KINDS)], **options)


def check(made, src, dst, threads=2, memory=None):
    (row,) = [row for row in rows(made, src, dst) if row.name == ROW]
    _check(row, made, src, dst, threads, memory)


@pytest.mark.sampled(16)
@pytest.mark.slow
@pytest.mark.parametrize("name", [marked(name) for name in PROBLEMS])
def test_every_way_of_cutting(name):
    descriptor, pairs, first = PROBLEMS[name]
    for k, (src, dst) in enumerate(pairs):
        check(made_of(descriptor, first + k), src, dst, threads=1 + k % 3)


@pytest.mark.isa
@pytest.mark.parametrize("src", ["uint8", "int8"])
def test_zero_points_and_values_at_the_ends(src):
    """Sources and weights of nothing but the ends of their ranges, -128 on -128 among them."""
    for zero_point in (np.iinfo(src).min, np.iinfo(src).max):
        made = case("g24mb1ic24ih5oc24kh3ph1", src, "int32", zero_point=int(zero_point), ends=True)
        assert made.w.min() == -128
        assert made.x.min() == np.iinfo(src).min
        for layout in ("NHWC", "NCHW4", "NCHW"):
            check(made, layout, layout)


@pytest.mark.parametrize("away", [False, True])
@pytest.mark.parametrize("dst", ["uint8", "int8"])
@pytest.mark.sampled(3)
def test_ties_saturation_and_bounds(away, dst):
    """Sums in halves, so that many results are ties; activations that bound inside and outside the type's range."""
    limits = np.iinfo(dst)
    made = case("g32mb1ic32ih1iw256oc32kh1kw1", "uint8", dst, zero_point=0)
    made.x[:] = np.arange(256, dtype=np.uint8)
    made.w[:] = np.resize(np.array([1, -1, 3, -3, 2], np.int8), made.w.shape)
    made.bias[:] = np.resize([0, 0, -301, 300, -255], made.bias.shape)
    for act in (None, "relu", ("clip", -3.25, 70.5), ("clip", 900.0, 1000.0), ("clip", -1000.0, -900.0)):
        for zero_point in (limits.min, limits.max, 1, 2):
            steps = Steps(dst, 0.25, 2.0, 1.0, dst_zero_point=zero_point, activation=act, away=away)
            check(finished(type(made)(**{**vars(made), "steps": steps})), "NHWC", "NHWC")


@pytest.mark.sampled(3)
@pytest.mark.isa
@pytest.mark.parametrize("name", [name for name in DOTS if "emulated" in name or name == "vpmaddubsw"])
def test_other_multiply_accumulates(name, monkeypatch):
    if not has_dot(name):
        pytest.skip(f"{target.isa().name} has no {name}")
    monkeypatch.setattr(cut, "dot_for", lambda types, isa: DOTS[name])
    cut.blocking.cache_clear()
    try:
        for layout in ("NHWC", "NCHW"):
            check(made_of("g32mb1ic32ih5oc32kh3ph1", 1, narrow=name == "vpmaddubsw"), layout, layout)
    finally:
        cut.blocking.cache_clear()


def test_any_number_of_threads_gives_the_same():
    for threads in (1, 2, 3, 4):
        check(made_of(SMALL, 0), "NCHW", "NCHW", threads=threads)


@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("where", [pytest.param("start", marks=pytest.mark.slow), "end"])
@pytest.mark.slow
def test_nothing_is_touched_beyond_the_arrays(where):
    for name in ("3x3", "3x3 of whole vectors", "3x3 s2"):
        descriptor, pairs, first = PROBLEMS[name]
        for k, (src, dst) in enumerate(pairs):  # which others compile
            check(made_of(descriptor, first + k), src, dst, memory=Paged(where))


@pytest.mark.isa
@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("where", ["end", "start"])
@pytest.mark.sampled(2)
def test_rows_that_share_vectors_are_read_and_written_inside_the_arrays(where):
    descriptor, pairs, _ = PROBLEMS["rows that share vectors"]
    for k, (src, dst) in enumerate(pairs):
        check(made_of(descriptor, k), src, dst, memory=Paged(where))


@pytest.mark.skipif(not target.is_x86(), reason="shuffles as x86 does")
@pytest.mark.parametrize("on_machine", ["avx512, 1 MiB", "avx2, 1 MiB"], indirect=True)
def test_whole_rows_of_every_kind_are_among_the_problems(on_machine):
    """Else the tests above would pass on less than they say."""
    cuts, types = [], Types.quantized("uint8", "uint8")
    for descriptor, _, _ in PROBLEMS.values():
        made = cut.blocking(Request(Conv2dProblem.from_descriptor(descriptor), Layout("NCHW"), Layout("NCHW"), types))
        if isinstance(made, cut.DepthwiseBlocking) and made.whole:
            cuts.append((made, Conv2dProblem.from_descriptor(descriptor)))
    assert {(row_edges(p, at.unrolled) or ())[2] for at, p in cuts} == {0, 1}
    assert {p.ow < at.lanes // 4 for at, p in cuts} == {False, True}
    assert {p.sw > 1 for _, p in cuts} == {p.dw > 1 for _, p in cuts} == {p.oc > p.ic for _, p in cuts} == {False, True}
    assert {p.kw > 4 for _, p in cuts} == {False, True}


@pytest.mark.parametrize("types", sorted(INT8, key=str), ids=str)
def test_the_row_is_chosen(types):
    for descriptor in ("g144mb1ic144ih56oc144kh3ph1", "g192mb1ic192ih28oc192kh3sh2ph1", "g672mb1ic672ih14oc672kh5ph2"):
        problem = Conv2dProblem.from_descriptor(descriptor)
        for name in NAMES:
            layout = Layout(name)
            assert selection.choose("conv2d", problem, layout, layout, types).name == ROW


def test_what_is_not_taken_is_said():
    types = Types.quantized("uint8", "uint8")
    dense = Conv2dProblem.from_descriptor("ic16ih5oc16kh3ph1")
    found = selection.decisions("conv2d", Request(dense, Layout("NHWC"), Layout("NHWC"), types))
    (why,) = (one for row, one in found.items() if row.name == ROW)
    assert why == "needs groups of one input channel, not of 16"


@pytest.mark.skipif(not target.is_x86(), reason="names x86's instructions")
def test_taps_are_multiplied_together_in_whole_vectors():
    made, layout = made_of(WIDE, 0), Layout("NHWC")
    (row,) = [row for row in rows(made, "NHWC", "NHWC") if row.name == ROW]
    (op,) = row.prepare(made.problem, layout, layout, made.types).launches()
    family, _, numbers = op.kernel.name.partition("__")
    kernel = getattr(sys.modules["blockconv.kernels.depthwise.rows"], family).compile(*map(int, numbers.split("_")))
    wide = {64: ("zmm", "ymm"), 32: ("ymm",), 16: ("xmm",)}[target.isa().vector_bytes]
    wanted = "vpdpbusd" if target.isa().vnni else "pmaddwd"
    products = [line for line in kernel.code.asm().splitlines() if wanted in line]
    assert products
    assert all(any(name in line for name in wide) for line in products)
