"""Convolution with vectors along pixels: which pairs of layouts it takes, what it computes, when it is chosen."""

from __future__ import annotations

from dataclasses import fields

import pytest
from conv_lab import check, data, rows
from conv_problems import ALONG_PIXELS, PLANES, pairs
from machines import MACHINES, stand_in

import blockconv as bc
from blockconv.core import target
from blockconv.core.layout import Layout
from blockconv.core.problem import Conv2dBackwardDataProblem, Conv2dProblem
from blockconv.core.types import Types, element
from blockconv.dispatch import selection
from blockconv.kernels.common.request import Request
from blockconv.kernels.conv import pixel_blocking
from blockconv.kernels.conv.rows import PIXELS

FLOAT32 = element("float32")
IMAGES_INSIDE = {"bcda", "cdba", "cbda"}


def read(descriptor: str) -> Conv2dProblem:
    return Conv2dProblem.from_descriptor(descriptor)


def taken(descriptor: str, dtype: str = "float32") -> list[tuple[str, str]]:
    p = read(descriptor)
    return [pair for pair in pairs(descriptor) if PIXELS in rows(p, *pair, dtype)]


# ---------------------------------------------------------------- what it takes


def test_it_takes_layouts_whose_neighbouring_pixels_or_images_lie_together():
    """Both of which have the images inside a pixel, or both not. HWCN of one image has the channels together."""
    every = {(src, dst) for src in PLANES for dst in PLANES}
    many = {(src, dst) for src, dst in every if (src in IMAGES_INSIDE) == (dst in IMAGES_INSIDE)}
    single = {pair for pair in every if "cdba" not in pair}
    for descriptor, wanted in (("mb1ic40ih40oc50kh1", single), ("mb64ic4ih32oc9kh1", many)):
        p = read(descriptor)
        assert {pair for pair in every if PIXELS in rows(p, *pair)} == wanted


@pytest.mark.parametrize(
    ("descriptor", "src", "dst", "why"),
    [
        ("mb1ic8ih20oc9kh1", "NHWC", "NCHW", "unlike NHWC"),
        ("mb1ic8ih20oc9kh1", "NCHW", "NCHW4", "unlike NCHW4"),
        ("g8mb1ic8ih20oc8kh1", "NCHW", "NCHW4", "unlike NCHW4"),
        ("mb1ic8ih1oc8kh1", "NCHW", "NCHW", "rows of at least"),
        ("mb1ic8ih20oc8kh3sh20ph1", "NCHW", "NCHW", "rows of at least"),
        ("g8mb1ic8ih20oc16kh3ph1", "NCHW", "NCHW", "groups of at least"),
    ],
)
def test_it_says_what_it_is_not_for(descriptor, src, dst, why):
    assert why in PIXELS.rejects(read(descriptor), Layout(src), Layout(dst), Types.all("float32"))


# ---------------------------------------------------------------- what it computes


def each(descriptor, kind, dtype="float32", **options):
    given = data(read(descriptor), kind, dtype, **options)
    found = taken(descriptor, dtype)
    assert found
    for k, (src, dst) in enumerate(found):
        check(PIXELS, read(descriptor), src, dst, given, options.get("act"), kind == "integers", threads=1 + k % 4)


@pytest.mark.isa
@pytest.mark.parametrize(
    ("descriptor", "dtype"), [*((d, "float32") for d in ALONG_PIXELS), *((d, "float64") for d in ALONG_PIXELS[::2])]
)
@pytest.mark.sampled(6)
def test_on_all_pairs(descriptor, dtype):
    """Exact on small integers; canaries round every buffer. NaN and infinity go where the definition sends them."""
    each(descriptor, "integers", dtype, residual=True)
    if dtype == "float32":
        each(descriptor, "floats", dtype, specials=True)


FEW = (
    "mb1ic5ih40oc1kh1sh2",
    "mb1ic20ih18oc2kh3ph1",
    "mb2ic7ih21iw41oc1kh5kw3sh2sw2ph1pw0",
    "mb2ic9ih9iw17oc2kh1kw1",
    "mb1ic6ih19oc7kh3ph1",  # taken with vectors of 16
)
ANY = ("NCHW", "NHWC", "NCHW4", "NCHW8", "NCHW64", "HWCN", "NHCW4", "ABcd2a8b")


@pytest.mark.isa
@pytest.mark.parametrize(("descriptor", "dtype"), [*((d, "float32") for d in FEW), (FEW[0], "float64")])
@pytest.mark.sampled(3)
def test_few_output_channels_in_any_layout(descriptor, dtype):
    """Pixels are transposed while a window is packed, with padding, tails of channels and of pixels; dirty tails."""
    p = read(descriptor)
    given = [data(p, "integers", dtype, residual=True), data(p, "floats", dtype, specials=True)]
    asked = [(src, dst) for k, src in enumerate(ANY) for dst in (src, ANY[(k + 1) % 8], ANY[(3 * k + 2) % 8])]
    taken = [pair for pair in asked if PIXELS in rows(p, *pair, dtype)]
    is_few = p.oc <= target.isa().vector_bytes // given[0].x.itemsize // 2
    assert len(taken) >= len(asked) // 2 * is_few, "but where images are inside a pixel"
    for k, pair in enumerate(taken):
        check(PIXELS, p, *pair, given[0], None, True, threads=1 + k % 4)
        if dtype == "float32" and k % 3 == 0:
            check(PIXELS, p, *pair, given[1], None, False)


@pytest.mark.isa
@pytest.mark.parametrize("act", ["relu", "gelu"])
@pytest.mark.parametrize("descriptor", [ALONG_PIXELS[0], ALONG_PIXELS[2], ALONG_PIXELS[4]])
@pytest.mark.sampled(3)
def test_activations(descriptor, act):
    """Of whole tiles, and of the channels of tiles that are not whole, which are finished one by one."""
    each(descriptor, "floats", act=act, residual=True)


@pytest.mark.parametrize("descriptor", ALONG_PIXELS[::3])
def test_cut_into_many_tasks(descriptor, monkeypatch):
    """As on a machine with a second-level cache of 2 KiB."""
    monkeypatch.setattr(target, "second_level_cache", lambda: 2 << 10)
    each(descriptor, "integers", residual=True)


def test_any_number_of_threads_gives_the_same_bits():
    p, layout = read("mb1ic40ih20oc50kh1"), Layout("NCHW")
    cut = {
        threads: pixel_blocking.blocking(Request(p, layout, layout, Types.all("float32"), threads))
        for threads in (1, 2, 5, 16)
    }
    assert len({(at.rows, at.pixels, at.vectors, at.pixel_lanes) for at in cut.values()}) == 1
    assert len({(at.task_cols, at.splits) for at in cut.values()}) > 1


# ---------------------------------------------------------------- how it is cut, when it is chosen

EVERY_MACHINE = pytest.mark.parametrize("on_machine", MACHINES, indirect=True)
LAYERS = (
    "mb1ic64ih56oc256kh1", "mb1ic256ih56oc64kh1", "mb1ic128ih28oc512kh1", "mb1ic512ih28oc128kh1",
    "mb1ic1024ih14oc256kh1", "mb1ic96ih14oc576kh1", "mb1ic2048ih7oc512kh1",
)  # fmt: skip


@pytest.mark.parametrize("descriptor", LAYERS)
@EVERY_MACHINE
def test_panels_are_in_the_second_level_cache_and_tiles_fill_the_registers(descriptor, on_machine):
    p, layout, machine = read(descriptor), Layout("NCHW"), MACHINES[on_machine]
    for threads in (1, 2, 16):
        at = pixel_blocking.blocking(Request(p, layout, layout, Types.all("float32"), threads))
        assert at.scratch <= machine.second_level_cache // 2
        held = at.pixels // at.pixel_lanes * at.width
        assert 0.6 * (machine.isa.registers - 4) <= held <= machine.isa.registers - 3
        computed = -(-p.oh * p.ow // at.pixels) * at.pixels * at.ocbs * at.width
        least = {7: 0.75, 14: 0.85}.get(p.oh, 0.92)  # of few pixels, tiles of 16 or 8 leave many idle
        assert p.oh * p.ow * p.oc >= least * computed


@EVERY_MACHINE
def test_it_is_chosen_where_it_was_measured_to_be_faster(on_machine):
    """By 1.1 or more: 64 to 256 channels on every machine, 512 to 128 with narrow vectors alone."""
    chosen = {}
    for descriptor in ("mb1ic64ih56oc256kh1", "mb1ic512ih28oc128kh1"):
        for name in ("NCHW", "NHWC"):
            layout = Layout(name)
            row = selection.choose("conv2d", read(descriptor), layout, layout, Types.all("float32"))
            chosen[descriptor, name] = row.name
    narrow = MACHINES[on_machine].isa.name in ("avx2", "sse")
    assert chosen["mb1ic64ih56oc256kh1", "NCHW"] == "conv_pixels"
    assert not narrow or chosen["mb1ic512ih28oc128kh1", "NCHW"] == "conv_pixels"
    assert {name for (_, layout), name in chosen.items() if layout == "NHWC"} == {"conv_direct"}


@EVERY_MACHINE
def test_the_gradient_of_a_first_layers_input_takes_it_in_every_layout(on_machine):
    """Vectors of channels would be idle but for three lanes. It was measured to be 1.7 to 2.6 times as fast."""
    for p in (Conv2dProblem(1, 3, 224, 224, 64, 7, 7, 2, 2, 3, 3), Conv2dProblem(1, 3, 224, 224, 32, 3, 3, 2, 2, 1, 1)):
        gradient = Conv2dBackwardDataProblem(
            **{field.name: getattr(p, field.name) for field in fields(p) if field.init}
        )
        for layout in map(Layout, ("NCHW", "NHWC", "NCHW4", "NCHW16")):
            row = selection.choose("conv2d_backward_data", gradient, layout, layout, Types.all("float32"))
            is_wide = MACHINES[on_machine].isa.vector_bytes > 16  # else three of four lanes are used
            assert (row.name == "conv_backward_data_pixels") >= is_wide, (p, layout)


def test_few_output_channels_in_blocks_are_priced_as_measured():
    """Along pixels, 64 channels to 3 were measured to be 1.2 to 1.5 times as fast as Winograd, 128 to 4 0.9 times."""
    for descriptor, name, wanted in (
        ("mb1ic64ih56oc3kh3ph1", "NCHW16", "conv_pixels"),
        ("mb1ic64ih56oc3kh3ph1", "NCHW8", "conv_pixels"),
        ("mb1ic128ih56oc4kh3ph1", "NCHW16", "conv_winograd_f4"),
    ):
        with stand_in(MACHINES["avx512, 1 MiB"]):
            row = selection.choose("conv2d", read(descriptor), Layout(name), Layout(name), Types.all("float32"))
        assert row.name == wanted, (descriptor, name)


ZEN_4 = "amd-epyc-zen-4-family-25-model-17-avx512"
MEASURED = (  # microseconds on that machine
    ("mb1ic3ih112oc8kh3ph1", "NCHW", 54.4), ("mb1ic3ih112oc8kh3ph1", "NHWC", 62.3),
    ("mb1ic3ih112oc8kh3sh2ph1", "NCHW", 20.1), ("mb1ic3ih112oc8kh3sh2ph1", "NHWC", 28.7),
    ("mb1ic4ih112oc8kh3ph1", "NHWC", 72.6), ("mb1ic8ih112oc8kh3sh2ph1", "NHWC", 54.9),
    ("mb1ic16ih112oc8kh3ph1", "NHWC", 285.9), ("mb1ic16ih112oc8kh3sh2ph1", "NCHW", 105.5),
    ("mb1ic64ih56oc256kh1", "NCHW", 941.0), ("mb1ic16ih56oc64kh1", "NCHW", 69.5),
    ("mb1ic128ih56oc256kh1sh2", "NCHW", 507.0), ("mb1ic32ih56oc32kh3sh2ph1", "NCHW", 166.0),
)  # fmt: skip


@pytest.mark.parametrize(("descriptor", "src", "microseconds"), MEASURED)
def test_packing_is_priced_as_measured(descriptor, src, microseconds):
    """From few channels of NHWC the price was a third of the time once, and from planes with strides 1.7 times."""
    explained = bc.explain(read(descriptor), src, "NCHW", machine=ZEN_4)
    (seconds,) = [its["seconds"] for its in explained.candidates if its["kernel"] == "conv_pixels"]
    assert 0.8 < seconds * bc.get_num_threads() * 1e6 / microseconds < 1.25


def test_as_many_channels_are_transposed_at_once_as_exist():
    """The square of a vector by a vector has mostly nothing in it where a pixel has three channels."""
    for ic, name, wanted in ((1, "NHWC", 1), (3, "NHWC", 4), (12, "NHWC", 16), (64, "NHWC", 16), (3, "NCHW8", 4),
                             (64, "NCHW8", 8), (3, "NCHW", 0)):  # fmt: skip
        p, layout = read(f"mb1ic{ic}ih20oc4kh3ph1"), Layout(name)
        request = Request(p, layout, layout, Types.all("float32"))
        at = pixel_blocking.space_of(request)
        assert pixel_blocking.packed_channels(request.source, at, 4, 16, ic) == wanted


@EVERY_MACHINE
def test_blocks_of_padding_alone_cost_winograd_no_products(on_machine):
    """Products take most of the time of few output channels, in narrow blocks and in wide ones."""
    for oc in (3, 20):
        seconds = {}
        for name in ("NHWC", "NCHW16", "NCHW64"):
            request = Request(read(f"mb1ic64ih56oc{oc}kh3ph1"), Layout(name), Layout(name), Types.all("float32"))
            found = selection.decisions("conv2d", request)
            (seconds[name],) = (one.seconds for row, one in found.items() if row.name == "conv_winograd_f4")
        assert seconds["NCHW64"] < 2 * seconds["NHWC"], seconds
        assert seconds["NCHW16"] < 1.3 * seconds["NHWC"], seconds
