"""Problems: their sizes against PyTorch's, their rules, and benchdnn's descriptors both ways."""

from __future__ import annotations

import dataclasses
import pickle
import re
from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from bench.shape_files import read_shape_file
from blockconv.core.errors import ArgumentError, UnsupportedError
from blockconv.core.problem import Conv2dProblem, Pool2dProblem, PoolKind, ReorderProblem

SHAPES = Path(__file__).parents[2] / "bench" / "shapes"
FIELDS = ("ih", "iw", "kh", "kw", "sh", "sw", "ph", "pw", "ph_r", "pw_r", "dh", "dw", "oh", "ow")


def conv_lines() -> list[tuple[str, str]]:
    return [(path.name, line) for path in sorted(SHAPES.glob("*.txt")) for line in descriptors(path)]


def descriptors(path: Path) -> list[str]:
    """Every descriptor in a file, those that are commented out too."""
    lines = (line.lstrip("# ") for line in path.read_text(encoding="utf-8").splitlines())
    found = [match[0] for line in lines if (match := re.match(r'(mb|g|ic)[0-9]+[a-z0-9_]*n"[^"]*"', line))]
    return [line for line in found if "X" not in line.partition("n")[0]]


def reader(file_name: str):
    return Pool2dProblem.from_descriptor if file_name.startswith("pool") else Conv2dProblem.from_descriptor


def geometry(problem: Conv2dProblem | Pool2dProblem) -> dict[str, int]:
    return {name: getattr(problem, name) for name in FIELDS}


# Descriptors


def test_the_shape_files_are_all_there():
    names = {path.name for path in SHAPES.glob("*.txt")}
    assert {"peers.txt", "conv_shapes_resnet_50_v1_5.txt", "pool_shapes_basic.txt"} <= names
    assert len(conv_lines()) > 250
    assert "Apache" in (SHAPES / "README.md").read_text()


@pytest.mark.parametrize(("file_name", "line"), conv_lines())
def test_every_line_of_the_shape_files_round_trips(file_name, line):
    read = reader(file_name)
    if "id" in re.split(r"[0-9]+_?", line.partition("n")[0]):
        with pytest.raises(UnsupportedError, match="depth"):
            read(line)
        return
    problem = read(line)
    again = read(problem.descriptor())
    assert again == problem
    assert again.name == problem.name == line.split('"')[1]
    assert geometry(again) == geometry(problem)
    assert again.descriptor() == problem.descriptor()
    assert len(problem.descriptor()) <= len(line)
    for key in ("mb", "ic", "ih", "iw", "oh", "ow", "kh", "sh", "ph"):
        written = re.search(rf"(?<![a-z]){key}([0-9]+)", line.partition('n"')[0])
        assert written is None or getattr(problem, {"mb": "n"}.get(key, key)) == int(written[1])


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        # Nothing but sizes: batch 2, no padding, output by the floor rule, width as height.
        ("ic3ih8oc4kh3", {"n": 2, "iw": 8, "kw": 3, "oh": 6, "ow": 6, "ph": 0, "ph_r": 0, "dh": 1, "g": 1}),
        # Padding from the output: total 5, of which C's division puts 2 at the top and 3 at the bottom.
        ("ic3ih224oc64oh112kh7sh2", {"oh": 112, "ph": 2, "ph_r": 3, "pw": 2, "pw_r": 3}),
        # Both given: the end gets what is left, which may be less than nothing.
        ("ic1ih20oc1oh9kh3sh2ph0", {"oh": 9, "ph_r": -1}),
        ("ic1ih20oc1oh11kh3sh2ph0", {"oh": 11, "ph_r": 3}),
        # A total of -1 is halved to 0, not to -1.
        ("ic256ih56oc512oh28kh1sh2", {"oh": 28, "ph": 0, "ph_r": -1}),
        # Dilation counts from nought: dh1 is PyTorch's 2.
        ("ic1ih7oc1kh3dh1", {"dh": 2, "dw": 2, "oh": 3, "ow": 3}),
        # A width of its own, with defaults of its own.
        ("ic1ih9oc1kh3sh2ph1_iw7kw1", {"oh": 5, "sh": 2, "ow": 7, "sw": 1, "pw": 0}),
        # Defaults written out for the width do not make it one.
        ("ic1ih9oc1kh3sh2ph1_sw1pw0dw0", {"ow": 5, "sw": 2, "pw": 1}),
        # 1-D: a height of one.
        ("ic1oc1_iw9ow5kw3sw2pw1", {"ih": 1, "oh": 1, "kh": 1, "ph": 0, "ow": 5, "pw_r": 1}),
        # The last of a repeated key wins.
        ("mb1mb7ic1ic5ih4oc2kh1kh3", {"n": 7, "ic": 5, "kh": 3}),
        ("g32mb1ic64ih4oc32kh1", {"g": 32, "ic": 64, "oc": 32}),
        ("mb0ic1ih4oc2kh1", {"n": 0}),
    ],
)
def test_hand_checked_descriptors(line, expected):
    problem = Conv2dProblem.from_descriptor(line)
    assert {name: getattr(problem, name) for name in expected} == expected
    assert Conv2dProblem.from_descriptor(problem.descriptor()) == problem


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (Conv2dProblem(2, 3, 8, 8, 4, 3, 3), "ic3ih8oc4kh3"),
        (Conv2dProblem(1, 3, 8, 8, 4, 3, 3, ph=1, pw=1), "mb1ic3ih8oc4kh3ph1"),
        (Conv2dProblem(1, 3, 8, 9, 4, 3, 3), "mb1ic3ih8iw9oc4kh3kw3"),
        (Conv2dProblem(1, 3, 8, 8, 4, 3, 3, ph_r=1, pw_r=1), "mb1ic3ih8oc4oh7kh3"),
        (Conv2dProblem(1, 3, 1, 8, 4, 1, 3, dw=2, name="x"), 'mb1ic3iw8oc4kw3dw1n"x"'),
        (Conv2dProblem(1, 4, 1, 1, 4, 1, 1, g=4), "g4mb1ic4ih1oc4kh1"),
    ],
)
def test_descriptors_are_short(problem, text):
    assert problem.descriptor() == text
    assert Conv2dProblem.from_descriptor(text) == problem


@pytest.mark.parametrize(
    ("tail", "name", "count"),
    [
        ('n"conv1*4"', "conv1*4", 4),
        ("nconv1*12", "conv1*12", 12),
        ('_n"a b # c"', "a b # c", 1),
        ('n"conv*1x"', "conv*1x", 1),
        ("n", "", 1),
        ('n""', "", 1),
        ('n say "hi" ', 'say "hi"', 1),
        ("nn1ic7", "n1ic7", 1),
    ],
)
def test_names_and_counts(tail, name, count):
    problem = Conv2dProblem.from_descriptor("ic3ih8oc4kh3" + tail)
    assert (problem.name, problem.count) == (name, count)
    assert Conv2dProblem.from_descriptor(problem.descriptor()).name == name
    assert Pool2dProblem.from_descriptor("ic3ih8kh3" + tail).count == count


def test_one_dimensional_pools_have_a_height_of_one():
    pool = Pool2dProblem.from_descriptor('ic5_iw15ow14kw3sw1pw1_n"only_pad_l"')
    assert pool.src_shape == (2, 5, 1, 15)
    assert pool.dst_shape == (2, 5, 1, 14)
    assert (pool.pw, pool.pw_r) == (1, 0)


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        ("", "lacks ic"),
        ("ic3oc4", "lacks ih and kh"),
        ("ih8oc4kh3", "lacks ic"),
        ("ic3ih8kh3", "lacks oc"),
        ("ic3ih8oc4", "lacks kh"),
        ("ic3oc4kh3", "lacks ih"),
        ("ic3ih8oc4kh3iw8", "lacks kw"),
        ("ic3ih8oc4kh3sw2", "lacks iw"),
        ("ic3ih8oc4kh3xx5", "'xx5' starts with no key"),
        ("ic3ih8oc4kh3 sh2", "' sh2' starts with no key"),
        ("ic3ih8oc4kh3__sh2", "'_sh2' starts with no key"),
        ("ic3ih-8oc4kh3", "'ih-8oc4k' starts with no key"),
        ("icih8oc4kh3", "starts with no key"),
        ("ic3ih8oc4kh3sh0", "sh=0: must be at least 1"),
        ("ic0ih8oc4kh3", "ic=0: must be at least 1"),
        ("ic3ih8oc4kh9", "smaller than the dilated kernel"),
        ("ic3ih8oc4oh2kh1sh1", "ph=-3: must be at least 0"),
        ("g2ic3ih8oc4kh3", "ic=3: must be divisible by g=2"),
    ],
)
def test_bad_descriptors_say_what_is_wrong(line, complaint):
    with pytest.raises(ArgumentError, match=re.escape(complaint)) as error:
        Conv2dProblem.from_descriptor(line)
    assert str(error.value).startswith("conv2d: ")


def test_a_descriptor_is_of_one_operation():
    with pytest.raises(ArgumentError, match="'oc4kh3' starts with no key"):
        Pool2dProblem.from_descriptor("ic3ih8oc4kh3")
    with pytest.raises(ArgumentError, match="'g1ic3ih8' starts with no key"):
        Pool2dProblem.from_descriptor("g1ic3ih8kh3")
    with pytest.raises(ArgumentError, match="must be a string"):
        Conv2dProblem.from_descriptor(3)
    with pytest.raises(UnsupportedError, match="depth"):
        Conv2dProblem.from_descriptor("ic3id4ih8oc4kd3kh3")


def test_shape_files_are_read_without_comments_and_blank_lines(tmp_path):
    path = tmp_path / "shapes.txt"
    path.write_text('# title\n\n  ic3ih8oc4kh3n"a # b*3"  # ic4\nic5ih8oc4kh3 # plain\n#ic1ih1oc1kh1\n')
    problems = read_shape_file(path, "conv2d")
    assert [(p.ic, p.name, p.count) for p in problems] == [(3, "a # b*3", 3), (5, "", 1)]

    path.write_text("\nic3ih8oc4\n")
    with pytest.raises(ArgumentError, match=r"lacks kh \(shapes.txt, line 2\)"):
        read_shape_file(path, "conv2d")
    with pytest.raises(ArgumentError, match="has to be one of conv2d, pool2d"):
        read_shape_file(path, "relu")


def test_shape_files_with_three_dimensions():
    path = SHAPES / "pool_shapes_basic.txt"
    with pytest.raises(UnsupportedError, match="depth"):
        read_shape_file(path, "pool2d")
    problems = read_shape_file(path, "pool2d", skip_unsupported=True)
    assert len(problems) > 20
    assert {p.kind for p in problems} == {"max"}


def test_known_layers():
    layers = {p.name: p for p in read_shape_file(SHAPES / "peers.txt", "conv2d")}
    assert len(layers) == 17
    conv1 = layers["conv1 3-64 7x7 s2 224"]
    assert conv1.dst_shape == (1, 64, 112, 112)
    assert conv1.macs == 112 * 112 * 64 * 3 * 49
    assert layers["64-64 3x3 56"].flops == 2 * 56 * 56 * 64 * 64 * 9
    assert layers["128-128 g32 3x3 56"].wei_shape == (128, 4, 3, 3)
    assert sum(p.is_depthwise for p in layers.values()) == 4
    resnet = read_shape_file(SHAPES / "conv_shapes_resnet_50_v1_5.txt", "conv2d")
    assert sum(p.count for p in resnet) == 53  # its convolutions
    assert sum(p.count * p.macs // p.n for p in resnet) == pytest.approx(4.09e9, rel=0.01)


# Any problem

small = st.integers(1, 9)


@st.composite
def axes(draw) -> dict[str, int]:
    fields = {}
    square = draw(st.booleans())
    for x in "hw":
        if x == "w" and square:
            fields |= {name.replace("h", "w"): value for name, value in fields.items()}
            continue
        fields[f"i{x}"], fields[f"k{x}"] = draw(st.integers(1, 40)), draw(st.integers(1, 7))
        fields[f"s{x}"], fields[f"d{x}"] = draw(st.integers(1, 4)), draw(st.integers(1, 3))
        fields[f"p{x}"] = draw(st.integers(0, 4))
        if draw(st.booleans()):
            fields[f"p{x}_r"] = draw(st.integers(-3, 6))
    return fields


names = st.text(st.characters(exclude_categories=["Cs", "Cc", "Zl", "Zp"]), max_size=12)


@given(axes(), st.integers(0, 5), small, small, small, names)
def test_any_convolution_round_trips(axis, n, g, icg, ocg, name):
    problem = built(Conv2dProblem, n=n, ic=g * icg, oc=g * ocg, g=g, name=name, **axis)
    again = Conv2dProblem.from_descriptor(problem.descriptor())
    assert again == problem
    assert hash(again) == hash(problem)
    assert again.name == name
    # What is read back reaches exactly as far as the windows do: never further than was asked for.
    assert again.ph_r <= problem.ph_r
    assert again.pw_r <= problem.pw_r
    assert pickle.loads(pickle.dumps(problem)) == problem
    assert dataclasses.replace(problem, n=3).dst_shape == (3, *problem.dst_shape[1:])


@given(axes(), small, st.sampled_from(get_args(PoolKind)), st.booleans(), names)
def test_any_pooling_round_trips(axis, ic, kind, ceil_mode, name):
    problem = built(Pool2dProblem, kind=kind, n=1, ic=ic, ceil_mode=ceil_mode, name=name, **axis)
    again = Pool2dProblem.from_descriptor(problem.descriptor(), kind)
    assert again.dst_shape == problem.dst_shape
    overhangs = any(
        (getattr(problem, f"o{x}") - 1) * getattr(problem, f"s{x}")
        + (getattr(problem, f"k{x}") - 1) * getattr(problem, f"d{x}")
        + 1
        > getattr(problem, f"i{x}") + getattr(problem, f"p{x}") + getattr(problem, f"p{x}_r")
        for x in "hw"
    )
    assert (again == problem) == (not (overhangs and kind == "avg_include_padding"))


def built(cls, **fields):
    """The problem, or another try where its windows do not fit."""
    try:
        return cls(**fields)
    except ArgumentError as error:
        assume("smaller than the dilated kernel" not in str(error))
        raise


@settings(deadline=None)  # the first example imports torch
@given(axes(), small)
def test_convolution_sizes_are_those_of_torch(axis, ic):
    torch = pytest.importorskip("torch")
    axis = {name: value for name, value in axis.items() if not name.endswith("_r")}
    geometry = [(axis[a + "h"], axis[a + "w"]) for a in "spd"]
    src, wei = torch.empty(1, ic, axis["ih"], axis["iw"]), torch.empty(5, ic, axis["kh"], axis["kw"])
    try:
        dst = torch.nn.functional.conv2d(src.to("meta"), wei.to("meta"), None, *geometry)
    except RuntimeError:
        with pytest.raises(ArgumentError, match="smaller than the dilated kernel"):
            Conv2dProblem(n=1, ic=ic, oc=5, **axis)
        return
    assert Conv2dProblem(n=1, ic=ic, oc=5, **axis).dst_shape == tuple(dst.shape)


@settings(deadline=None)
@given(axes(), st.booleans())
def test_pooling_sizes_are_those_of_torch(axis, ceil_mode):
    torch = pytest.importorskip("torch")
    axis = {name: value for name, value in axis.items() if not name.endswith("_r")}
    assume(all(2 * axis["p" + x] <= axis["k" + x] for x in "hw"))
    kernel, stride, padding, dilation = [(axis[a + "h"], axis[a + "w"]) for a in "kspd"]
    src = torch.empty(1, 2, axis["ih"], axis["iw"])
    try:
        dst = torch.nn.functional.max_pool2d(src, kernel, stride, padding, dilation, ceil_mode)
    except RuntimeError:
        with pytest.raises(ArgumentError, match="smaller than the dilated kernel"):
            Pool2dProblem("max", n=1, ic=2, ceil_mode=ceil_mode, **axis)
        return
    assert Pool2dProblem("max", n=1, ic=2, ceil_mode=ceil_mode, **axis).dst_shape == tuple(dst.shape)


# Rules and equality

CONV = {"n": 1, "ic": 8, "ih": 9, "iw": 9, "oc": 8, "kh": 3, "kw": 3}


@pytest.mark.parametrize(
    ("field", "value", "rule"),
    [
        *(
            (name, 0, "must be at least 1")
            for name in ["ic", "ih", "iw", "oc", "kh", "kw", "sh", "sw", "dh", "dw", "g"]
        ),
        *((name, -1, "must be at least 0") for name in ("n", "ph", "pw")),
        *((name, 1.5, "must be a whole number") for name in ("n", "ic", "ih", "sw", "ph", "ph_r", "g")),
        ("ic", 7, "must be divisible by g=4"),
        ("oc", 6, "must be divisible by g=4"),
        ("kh", 10, "smaller than the dilated kernel of 10"),
        ("dw", 5, "smaller than the dilated kernel of 11"),
        ("ph_r", -7, "with padding of 0 and -7"),
        ("name", "two\nlines", "must be a string of one line"),
        ("name", None, "must be a string of one line"),
    ],
)
def test_the_rules_of_convolution(field, value, rule):
    fields = CONV | {"g": 4} | {field: value}
    with pytest.raises(ArgumentError, match=re.escape(rule)) as error:
        Conv2dProblem(**fields)
    assert error.value.op == "conv2d"
    assert error.value.argument in {field, "ih", "iw"}


@pytest.mark.parametrize(
    ("fields", "rule"),
    [
        ({"kind": "median"}, "has to be one of max"),
        ({"kind": "max", "divisor": 3}, "is for averages"),
        ({"kind": "avg_exclude_padding", "divisor": 0}, "must not be zero"),
        ({"kind": "max", "ic": 0}, "must be at least 1"),
        ({"kind": "max", "ph": -1}, "must be at least 0"),
        ({"kind": "max", "kh": 12}, "smaller than the dilated kernel"),
    ],
)
def test_the_rules_of_pooling(fields, rule):
    with pytest.raises(ArgumentError, match=rule):
        Pool2dProblem(**{"n": 1, "ic": 8, "ih": 9, "iw": 9, "kh": 3, "kw": 3} | fields)


def test_the_rules_of_reorders():
    problem = ReorderProblem((np.int64(2), 3, 4), "NCHW", "NHWC", 4)
    assert (problem.shape, problem.elements, problem.bytes) == ((2, 3, 4), 24, 192)
    assert ReorderProblem((0, 3), "a", "b", 4).bytes == 0
    shapes = [((2, -1), "a", "b", 4), ((2.5,), "a", "b", 4), (3, "a", "b", 4)]
    for wrong in [*shapes, ((2,), "", "b", 4), ((2,), "a", None, 4), ((2,), "a", "b", 0)]:
        with pytest.raises(ArgumentError, match="to_layout: "):
            ReorderProblem(*wrong)


def test_problems_are_equal_if_they_compute_the_same():
    base = Conv2dProblem(**CONV, sh=2, sw=2)
    assert base == Conv2dProblem(**CONV, sh=2, sw=2, name="other", ph_r=1)  # a row that no window reaches
    assert base != Conv2dProblem(**CONV, sh=2, sw=2, ph_r=2)
    assert base != Conv2dProblem(**CONV, sh=2, sw=2, dh=2)
    assert base.ph_r == 0
    assert Conv2dProblem(**CONV, ph=1).ph_r == 1  # by default as much as at the begin

    pool = {"n": 1, "ic": 1, "ih": 6, "iw": 6, "kh": 3, "kw": 3, "sh": 2, "sw": 2, "ph": 1, "pw": 1}
    hanging = {"ceil_mode": True}
    reaching = {"ph_r": 2, "pw_r": 2}
    assert Pool2dProblem("max", **pool, **hanging) == Pool2dProblem("max", **pool, **reaching)
    # Here the last window's number of elements differs: clipped to the padding, or not.
    kind = "avg_include_padding"
    assert Pool2dProblem(kind, **pool, **hanging) != Pool2dProblem(kind, **pool, **reaching)
    pool["divisor"] = 9
    assert Pool2dProblem(kind, **pool, **hanging) == Pool2dProblem(kind, **pool, **reaching)


def test_problems_take_numpy_integers_and_stay_frozen():
    problem = Conv2dProblem(*(np.int32(value) for value in CONV.values()))
    assert type(problem.ih) is int
    with pytest.raises(dataclasses.FrozenInstanceError):
        problem.n = 3
