"""The depthwise rows on problems of their own: all eight layouts, every way of cutting, against the oracle.

The grid, the guard pages and the search of test_conv2d_*.py run them too, as they run every row of the table.
"""

from __future__ import annotations

import dataclasses
import itertools
import os
import sys

import guarded
import numpy as np
import pytest
from conv_lab import NAMES, Paged, check, data, rows
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from machines import MACHINES
from random_cases import cases

import blockconv as bc
from blockconv.core import target
from blockconv.core.activation import ActivationKind
from blockconv.core.errors import ArgumentError
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.dispatch import selection
from blockconv.jit.families import collecting
from blockconv.kernels.common.request import Request
from blockconv.kernels.depthwise.blocking import DepthwiseBlocking, blocking
from blockconv.kernels.depthwise.columns import Columns
from blockconv.kernels.table import Epilogue
from blockconv.machine.profile import profile

SAME = tuple((name, name) for name in NAMES)
CHANGED = (("NHWC", "NCHW16"), ("NCHW16", "NHWC"), ("NHWC", "NCHW"), ("NCHW32", "NCHW4"), ("NCHW64", "CHWN4"))

MANY = "more channels than a first-level cache holds of a window"
PROBLEMS = {
    "3x3": "g17mb2ic17ih9iw11oc17kh3kw3ph1pw1",
    "3x3, one tile": "g20mb1ic20ih7iw7oc20kh3kw3ph1pw1",
    "3x3 s2": "g24mb1ic24ih13iw31oc24kh3kw3sh2sw2ph1pw1",
    "5x5, two outputs a channel": "g20mb3ic20ih18iw23oc40kh5kw5ph2pw2",
    "3x3, three outputs a channel": "g35mb2ic35ih16iw5oc105kh3kw3ph1pw1",
    "7x7, rows of many vectors": "g19mb1ic19ih20iw170oc19kh7kw7ph3pw3",
    "dilated": "g18mb1ic18ih15iw17oc18kh3kw3ph2pw3dh1dw2",
    "large": "g16mb1ic16ih20iw16oc16kh13kw13ph6pw6",
    "even, strides that differ, five images": "g6mb5ic6ih14iw9oc6kh2kw4sh3sw2ph1pw1",
    "3x3 s2, rows of many vectors": "g3mb1ic3ih5iw500oc3kh3kw3sh2sw2ph1pw1",
    "a row": "g3mb2ic3ih1iw40oc3kh1kw4ph0pw2",
    "more padding than image": "g9mb1ic9ih2iw3oc9kh5kw5ph4pw4",
    "no padding": "g33mb1ic33ih12iw19oc33kh3kw3",
    MANY: "g400mb2ic400ih9iw14oc400kh3kw3ph1pw1",
    "5x5 s2, rows of more vectors than are permuted": "g24mb1ic24ih9iw45oc24kh5kw5sh2sw2ph2pw2",
}
AS_OTHERS = ("3x3", "3x3 s2", "5x5, two outputs a channel", "dilated", MANY)


def read(name: str) -> Conv2dProblem:
    return Conv2dProblem.from_descriptor(PROBLEMS[name])


def depthwise(problem, src, dst, dtype="float32"):
    """The depthwise row, where it takes the problem."""
    return [row for row in rows(problem, src, dst, dtype) if row.name == "conv_depthwise"]


# ---------------------------------------------------------------- results


@pytest.mark.parametrize("name", [pytest.param(n, marks=pytest.mark.isa) if n in AS_OTHERS else n for n in PROBLEMS])
@pytest.mark.sampled(10)
def test_float32(name):
    """Exact on small integers; NaN and infinities in source and weights go where the definition sends them."""
    p = read(name)
    integers, floats = data(p, residual=True), data(p, "floats", specials=True)
    taken, turn = 0, list(PROBLEMS).index(name) % 2
    pairs = (*SAME, *CHANGED) if name == "3x3" else SAME if name in AS_OTHERS else SAME[turn::2]
    for k, (src, dst) in enumerate(pairs):
        for row in depthwise(p, src, dst):
            check(row, p, src, dst, integers, exact=True, threads=1 + k % 4)
            check(row, p, src, dst, floats, threads=1 + k % 3)
            taken += 1
    assert taken >= len(pairs) / 2


@pytest.mark.parametrize("name", ["3x3", "5x5, two outputs a channel", "dilated"])
@pytest.mark.parametrize("turn", [0, 1])
@pytest.mark.sampled(6)
def test_float64(name, turn):
    p = read(name)
    floats = data(p, "floats", "float64", residual=True, specials=True)
    for src, dst in SAME[turn::2]:
        for row in depthwise(p, src, dst, "float64"):
            check(row, p, src, dst, floats)


@pytest.mark.slow
@pytest.mark.parametrize("act", ["relu6", "sigmoid", "hardsigmoid"])
@pytest.mark.sampled(2)
def test_activations(act):
    """hardsigmoid(0) is not 0: what pads the channels has to be."""
    p = read("3x3")
    floats = data(p, "floats", act=act, residual=True)
    for layout in ("NCHW", "NHWC", "NCHW4", "NCHW32"):
        (row,) = depthwise(p, layout, layout)
        check(row, p, layout, layout, floats, act)


def test_any_number_of_threads_gives_the_same_bits():
    p = read("7x7, rows of many vectors")
    given = data(p, "floats")
    x = {name: bc.to_layout(given.x, name) for name in ("NCHW", "NHWC", "NCHW16")}
    conv = bc.Conv2d(given.w, given.bias, padding=3, groups=p.g)
    before = bc.get_num_threads()
    try:
        for name, source in x.items():
            found = []
            for threads in (1, 2, 3):
                bc.set_num_threads(threads)
                found.append(conv(source).storage.tobytes())
            assert len(set(found)) == 1, name
    finally:
        bc.set_num_threads(before)


# ---------------------------------------------------------------- what is chosen


@pytest.mark.parametrize("name", PROBLEMS)
def test_the_row_is_chosen_and_its_reasons_are_sentences(name):
    p = read(name)
    for src in NAMES:
        for dst in NAMES:
            found = selection.decisions("conv2d", Request(p, Layout(src), Layout(dst), Types.all("float32")))
            mine = next(row for row in found if row.name == "conv_depthwise" and "float32" in row.dtypes)
            taken = not isinstance(found[mine], str)
            assert taken or found[mine]
            # Where a destination is mostly padding, which this row computes too, or lanes are permuted, as several
            # outputs read a channel, another may be the cheaper.
            if taken and Layout(dst).padded_shape(p.dst_shape)[1] < 2 * p.oc and p.oc == p.ic:
                assert selection.choose("conv2d", p, Layout(src), Layout(dst), Types.all("float32")) is mine


@pytest.mark.parametrize("on_machine", ["avx512, 1 MiB", "avx2, 1 MiB"], indirect=True)
def test_every_way_of_cutting_is_among_the_problems(on_machine):
    """Else the tests above would pass on less than they say. (Vectors of 128 bits are no longer than any block.)"""
    cuts = [
        c
        for name in PROBLEMS
        for src in NAMES
        if isinstance(
            c := blocking(Request(read(name), Layout(src), Layout(src), Types.all("float32"))), DepthwiseBlocking
        )
    ]
    assert {0, 2, 3, 5, 7} <= {c.taps for c in cuts}
    assert {0, 1, 2} <= {c.columns for c in cuts}
    assert {c.loops > 1 for c in cuts} == {False, True}
    along = [c for c in cuts if c.columns]
    assert {(c.whole, c.columns > 1) for c in along} == set(itertools.product((False, True), repeat=2))
    assert {c.batched for c in cuts} == {False, True}
    assert any(c.masked for c in cuts)


@pytest.mark.parametrize("on_machine", MACHINES, indirect=True)
def test_a_task_takes_channels_whose_window_stays_in_the_first_level_cache(on_machine):
    """Of pixels of many channels, all of whose window it does not hold; elsewhere it takes a pixel's channels."""

    def cut(descriptor):
        at = blocking(
            Request(Conv2dProblem.from_descriptor(descriptor), Layout("NHWC"), Layout("NHWC"), Types.all("float32"))
        )
        assert isinstance(at, DepthwiseBlocking)
        return at

    at, cache = cut(PROBLEMS[MANY]), profile().caches["L1"]
    if target.isa().vector_bytes >= 32:
        window = 3 * 14 * at.together * at.entry_bytes
        assert at.together < len(at.runs)
        assert at.together * at.entry_bytes >= 256
        assert window <= cache / 2 or (at.together * at.entry_bytes == 256 and window <= 3 * cache / 4)
    else:
        assert at.together == len(at.runs)
    few, once = "g24mb1ic24ih9iw14oc24kh3kw3ph1pw1", "g400mb1ic400ih9iw14oc400kh1kw3ph0pw1"
    for other in (few, once, "g400mb1ic400ih99oc400kh3ph1"):
        at = cut(other)  # few channels; rows that are read once; a source beyond the second-level cache
        assert at.together == len(at.runs)


@pytest.mark.parametrize("on_machine", ["avx512, 1 MiB"], indirect=True)
@pytest.mark.parametrize(
    ("layout", "descriptor", "tile"),
    [
        ("NHWC", "g400mb1ic400ih98oc400kh3ph1", (7, 2)),  # two rows fetch fewer lines than one
        ("NHWC", PROBLEMS[MANY], (7, 2)),  # where a part stays too
        ("NHWC", "g400mb1ic400ih3iw98oc400kh3kw3ph0", (14, 1)),  # there is one
        ("NCHW8", "g16mb1ic16ih56oc16kh3ph1", (7, 2)),  # half as many streams, of two vectors
        ("NCHW8", "g16mb1ic16ih56oc16kh7ph3", (7, 2)),  # for windows as high too
        ("NHWC", "g16mb1ic16ih10oc16kh3ph1", (7, 2)),  # fewer outputs than the most
    ],
)
def test_tiles_are_as_high_as_what_they_read_asks_for(layout, descriptor, tile, on_machine):
    at = blocking(
        Request(Conv2dProblem.from_descriptor(descriptor), Layout(layout), Layout(layout), Types.all("float32"))
    )
    assert isinstance(at, DepthwiseBlocking)
    assert (at.unrolled, at.loops) == tile


@pytest.mark.parametrize("on_machine", ["avx512, 1 MiB"], indirect=True)
def test_tiles_that_are_stored_in_planes_have_one_row(on_machine):
    """A plane's row is stored at once: two rows of seven take 1.25 of the time."""
    problem = Conv2dProblem.from_descriptor("g128ic128ih56oc128kh3ph1")
    at = blocking(Request(problem, Layout("NCHW16"), Layout("NCHW"), Types.all("float32")))
    assert isinstance(at, DepthwiseBlocking)
    assert (at.unrolled, at.loops) == (14, 1)


@pytest.mark.parametrize("on_machine", ["avx512, 1 MiB", "avx512, halves, 1 MiB"], indirect=True)
def test_blocks_of_half_a_vector_are_computed_by_themselves_where_that_takes_less(on_machine):
    """Everywhere on processors of half vectors; on others where strides are in rows too long to be permuted."""
    nchw8 = Layout("NCHW8")
    for descriptor, less in (
        ("g24mb1ic24ih9iw45oc24kh5kw5sh2sw2ph2pw2", True),
        ("g24mb1ic24ih9iw112oc24kh3kw3sh2sw2ph1pw1", True),
        ("g24mb1ic24ih9iw28oc24kh3kw3sh2sw2ph1pw1", False),
        ("g24mb1ic24ih9iw45oc24kh3kw3ph1pw1", False),
    ):
        at = blocking(Request(Conv2dProblem.from_descriptor(descriptor), nchw8, nchw8, Types.all("float32")))
        assert isinstance(at, DepthwiseBlocking)
        assert at.lanes == (8 if less or target.isa().halves else 16)


@pytest.mark.parametrize("on_machine", ["avx2, 1 MiB"], indirect=True)
@pytest.mark.parametrize("layout", ["NCHW8", "NHWC"])
@pytest.mark.parametrize(("taps", "stride"), [(3, 1), (3, 2), (5, 1), (5, 2)])
def test_few_kernels_serve_many_sizes(layout, taps, stride, on_machine):
    """Where tiles end, and whether there are several, is no constant of their code: only how many outputs they have."""
    made = set()
    with collecting():
        for size in range(12, 80):
            pads = dict.fromkeys(("ph", "ph_r", "pw", "pw_r"), taps // 2)
            p = Conv2dProblem(n=1, ic=96, oc=96, g=96, ih=size, iw=size, kh=taps, kw=taps, sh=stride, sw=stride, **pads)
            (row,) = depthwise(p, layout, layout)
            (op,) = row.prepare(p, Layout(layout), Layout(layout), Types.all("float32")).launches()
            made.add(op.kernel.name)
    assert len(made) <= 5


@pytest.mark.parametrize("layout", ["NCHW", "NCHW16", "NHWC"])
def test_one_kernel_serves_all_activations(layout):
    """What a kernel of floats does after its sums is no constant of its code."""
    p = Conv2dProblem.from_descriptor("g96mb1ic96ih14oc96kh3ph1")
    (row,) = depthwise(p, layout, layout)
    made = row.prepare(p, Layout(layout), Layout(layout), Types.all("float32"))
    kinds = ActivationKind.NONE, ActivationKind.CLIP, ActivationKind.OTHER
    with collecting():
        names = {op.kernel.name for kind in kinds for op in made.launches(Epilogue(kind))}
    assert len(names) == 1


def test_the_cost_ranks():
    """Less work costs less, and the depthwise row less than the dense one."""
    small, large = (Conv2dProblem.from_descriptor(f"g96mb1ic96ih{n}oc96kh3ph1") for n in (14, 56))
    for layout in (Layout(name) for name in NAMES):
        costs = {
            (row.name, p.ih): one.seconds
            for p in (small, large)
            for row, one in selection.decisions("conv2d", Request(p, layout, layout, Types.all("float32"))).items()
            if not isinstance(one, str)
        }
        assert costs["conv_depthwise", 14] < costs["conv_depthwise", 56] < costs["conv_direct", 56]


# ---------------------------------------------------------------- memory


@pytest.mark.isa
@settings(deadline=None)
@given(st.data())
def test_the_vectors_of_a_phase_hold_all_that_outputs_read(data):
    """A pixel may be more than a vector, and the last one of a phase at the end of a row."""
    draw = data.draw
    pixel, lanes = draw(st.sampled_from([1, 2, 4, 8, 16])), draw(st.sampled_from([4, 8, 16]))
    width, stride, taps, dilation = (draw(st.integers(1, most)) for most in (40, 4, 5, 3))
    pad = draw(st.integers(0, (taps - 1) * dilation))
    assume(width + pad > (taps - 1) * dilation)
    out = (width + pad - (taps - 1) * dilation - 1) // stride + 1
    columns = Columns(width * pixel, out * pixel, pixel, taps, stride, dilation, pad)
    for tap in range(taps):
        vectors = range(columns.phase_vectors(lanes))
        held = {at for k in vectors for at in columns.phase_elements(columns.phase(tap), k, lanes)}
        assert {columns.element(output, tap) for output in range(columns.dst)} - {None} <= held


def test_nothing_beside_an_output_is_written():
    """A row's last vector may be stored over the row that follows it, but over nothing that follows the last one."""
    p = read("3x3, one tile")
    given, size = data(p), p.oc * p.oh * p.ow
    memory = np.full(size + 64, np.nan, np.float32)
    out = memory[32 : 32 + size].reshape(p.dst_shape)
    bc.conv2d(given.x.astype(np.float32), given.w.astype(np.float32), padding=1, groups=p.g, out=out)
    assert np.isfinite(out).all()
    assert np.isnan(memory[:32]).all()
    assert np.isnan(memory[32 + size :]).all()


@pytest.mark.slow
@pytest.mark.skipif(not guarded.available(), reason="needs mmap and mprotect")
@pytest.mark.parametrize("third", range(3))
@pytest.mark.sampled(3)
def test_no_access_past_any_buffer(run_python, third):
    assert guarded.last_line(run_python, [__file__, str(third)]).startswith("clean: ")


def run_guarded(third: int) -> None:
    runs = 0
    for name in [*PROBLEMS][third::3]:
        p = read(name)
        given = data(p, residual=True)
        for src, dst in SAME:
            for row in depthwise(p, src, dst):
                for where in ("end", "start"):
                    print(name, src, dst, where, flush=True)
                    check(row, p, src, dst, given, exact=True, threads=2, memory=Paged(where))
                    runs += 1
    print(f"clean: {runs} runs")


# ---------------------------------------------------------------- search

EXAMPLES = int(os.environ.get("BLOCKCONV_SEARCH", cases(12)))
few = st.integers(1, 3)


@st.composite
def problems(draw: st.DrawFn) -> Conv2dProblem:
    """Few kernels, strides and dilations, since each is compiled; any channels, sizes and padding."""
    g, m = draw(st.integers(2, 40)), draw(st.sampled_from((1, 1, 2, 3)))
    kh, kw = draw(st.sampled_from(((3, 3), (3, 3), (5, 5), (1, 3))))
    stride, dilation = draw(st.sampled_from((1, 1, 2))), draw(st.sampled_from((1, 1, 1, 2)))
    try:
        return Conv2dProblem(
            n=draw(few), ic=g, oc=g * m, g=g, ih=draw(st.integers(1, 17)), iw=draw(st.sampled_from((1, 7, 14, 23, 33))),
            kh=kh, kw=kw, sh=stride, sw=stride, dh=dilation, dw=dilation,
            **{pad: draw(st.integers(0, 3)) for pad in ("ph", "ph_r", "pw", "pw_r")},
        )  # fmt: skip
    except ArgumentError:
        assume(False)
        raise


@pytest.mark.slow
@settings(
    max_examples=EXAMPLES, deadline=None, derandomize=bool(os.environ.get("CI")), print_blob=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)  # fmt: skip
@given(problem=problems(), pair=st.sampled_from((*SAME, *CHANGED)), threads=st.integers(1, 4))
def test_random_problems(problem, pair, threads):
    wanted = data(problem, residual=True)
    for row in depthwise(problem, *pair):
        check(row, problem, *pair, wanted, exact=True, threads=threads)


@pytest.mark.isa
@pytest.mark.parametrize("layout", ["NHWC", "NCHW", "NCHW16", "NCHW4", "CHWN4"])
def test_the_tile_of_a_plan_computes_other_sizes(layout):
    """With whole tiles and remainders, and where images are smaller than a remainder of the plan's own tile."""
    for own in ("g20mb2ic20ih28oc20kh3ph1", "g20mb2ic20ih28oc20kh5sh2ph2"):
        anchor = Conv2dProblem.from_descriptor(own)
        for ih, iw in ((2, 3), (7, 12), (15, 30), (23, 20), (43, 61)):
            problem = dataclasses.replace(anchor, ih=ih, iw=iw)
            for row in depthwise(problem, layout, layout):
                given, where = data(problem, residual=True), Paged("end")
                check(with_anchor(row, anchor), problem, layout, layout, given, exact=True, memory=where)


def with_anchor(row, anchor):
    """The row as a plan that was made for the size of `anchor` asks it."""
    return dataclasses.replace(row, make=lambda request: row.make(dataclasses.replace(request, anchor=anchor)))


# ---------------------------------------------------------------- other machines


def test_no_kernel_takes_the_gil_and_vectors_are_whole():
    p = read("3x3")
    wide = {64: "zmm", 32: "ymm", 16: "xmm"}[target.isa().vector_bytes]
    for layout in ("NHWC", "NCHW"):
        (row,) = depthwise(p, layout, layout)
        (op,) = row.prepare(p, Layout(layout), Layout(layout), Types.all("float32")).launches()
        family, _, numbers = op.kernel.name.partition("__")
        kernel = getattr(sys.modules["blockconv.kernels.depthwise.rows"], family).compile(*map(int, numbers.split("_")))
        assembly = kernel.code.asm()  # compiling asserts that nothing takes the GIL
        assert any(wide in line for line in assembly.splitlines() if "mul" in line or "fmadd" in line)


if __name__ == "__main__":
    run_guarded(int(sys.argv[1]))


@pytest.mark.parametrize("on_machine", MACHINES, indirect=True)
def test_sizes_that_a_plan_was_not_made_for_share_its_tile(on_machine):
    anchor = Conv2dProblem.from_descriptor("g64mb1ic64ih56oc64kh3ph1")
    for layout in ("NHWC", "NCHW"):
        tiles = set()
        for size in range(7, 300):
            problem = Conv2dProblem.from_descriptor(f"g64mb1ic64ih{size}oc64kh3ph1")
            at = blocking(Request(problem, Layout(layout), Layout(layout), Types.all("float32"), anchor=anchor))
            assert isinstance(at, DepthwiseBlocking)
            tiles.add((at.unrolled, at.loops))
        assert len(tiles) == 1, layout
