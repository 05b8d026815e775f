"""Layouts against the hand-written formulas of layout_oracle, their names and their errors."""

from __future__ import annotations

import copy
import math
import pickle
import re
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise, product
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from layout_oracle import ACTIVATIONS, DENSE, GROUPED, Row

from blockconv.core.errors import LayoutError
from blockconv.core.layout import NATIVE, Layout, known_layouts, register_layout
from blockconv.core.layout_weights import convolution_mode, weights_for

# Section 3 of the page of layouts that the library follows: the oracle's rows for dense, grouped, depthwise.
WEIGHTS = {
    ("megengine", "NCHW"): ("OIHW", "GOIHW", "[C][1][1][H][W]"),
    ("megengine", "NHWC"): ("OHWI", "GOHWI", None),
    ("megengine", "NCHW4"): ("[O][I/4][H][W][4i]", "[G][O][I/4][H][W][4i]", "[C/4][1][1][H][W][4]"),
    ("megengine", "NCHW8"): ("[O][I/8][H][W][8i]", "[G][O][I/8][H][W][8i]", None),
    ("megengine", "NCHW32"): ("[O][I/32][H][W][32i]", "[G][O][I/32][H][W][32i]", None),
    ("megengine", "NCHW64"): ("[O][I/64][H][W][64i]", "[G][O][I/64][H][W][64i]", None),
    ("megengine", "NCHW44"): (
        "[O/4][I/4][H][W][4i][4o]",
        "[G][O/4][I/4][H][W][4i][4o]",
        "[C/4][1][1][H][W][4]",
    ),
    ("megengine", "NCHW88"): (
        "[O/8][I/8][H][W][8i][8o]",
        "[G][O/8][I/8][H][W][8i][8o]",
        "[C/8][1][1][H][W][8]",
    ),
    ("megengine", "NCHW44_DOT"): ("[O/4][I/4][H][W][4o][4i]", "[G][O/4][I/4][H][W][4o][4i]", None),
    ("megengine", "CHWN4"): ("[I/4][H][W][O][4i]", "[G][I/4][H][W][O][4i]", None),
    ("megengine", "NHWCD4"): ("convolution filter", "[G][O/4][H][W][I][4o]", "[C/4][1][1][H][W][4]"),
    ("megengine", "NHWCD4-dot"): ("[O/4][H][W][I/4][4o][4i]", "[G][O/4][H][W][I/4][4o][4i]", None),
    ("mace", "NHCW4"): ("convolution filter", None, "depthwise filter"),
    ("onednn", "NCHW"): ("[O/16][H][W][I][16o]", None, None),
    ("onednn", "NHWC"): (
        "[O/16][I/16][H][W][4i][16o][4i]",
        "[G][O/16][I/16][H][W][4i][16o][4i]",
        "[G/16][O][I][H][W][16g]",
    ),
    ("onednn", "NCHW8"): ("[O/8][I/8][H][W][8i][8o]", "[G][O/8][I/8][H][W][8i][8o]", None),
    ("onednn", "NCHW16"): (
        "[O/16][I/16][H][W][16i][16o]",
        "[G][O/16][I/16][H][W][16i][16o]",
        "[G/16][O][I][H][W][16g]",
    ),
    ("openvino", "NCHW16"): (
        "[O/16][I/16][H][W][16i][16o]",
        "[G][O/16][I/16][H][W][16i][16o]",
        "[G/16][O][I][H][W][16g]",
    ),
    ("openvino", "bsv16_fsv16"): ("[I/16][O/16][H][W][16i][16o]", None, None),
}
KINDS = ("dense", "grouped", "depthwise")

# What is to be checked element by element: (name of the oracle's row, layout).
CASES = dict.fromkeys((name, Layout(name)) for name in ACTIVATIONS) | dict.fromkeys(
    (formula, weights_for(activation, kind, library))
    for (library, activation), formulas in WEIGHTS.items()
    for kind, formula in zip(KINDS, formulas, strict=True)
    if formula
)
ORACLE = ACTIVATIONS | DENSE | GROUPED


def disagreement(layout: Layout, row: Row) -> str:
    """Where a layout differs from an oracle's row, or nothing."""
    for shape in row.shapes():
        size = row.size(*shape)
        if layout.size(shape) != size:
            return f"{shape}: size {layout.size(shape)}, not {size}"
        offsets = row.offsets(shape)
        at = {offset: index for index, offset in offsets.items()}
        if len(at) != len(offsets):
            return f"{shape}: the oracle puts two elements in one place"
        for index, offset in offsets.items():
            if layout.offset(shape, index) != offset:
                return f"{shape}: {index} at {layout.offset(shape, index)}, not {offset}"
        for offset in range(size):
            if layout.index(shape, offset) != at.get(offset):
                return f"{shape}: {layout.index(shape, offset)} at {offset}, not {at.get(offset)}"
    return ""


@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda value: str(value))
@pytest.mark.sampled(3)
def test_every_element_is_where_the_system_puts_it(name: str, layout: Layout) -> None:
    assert disagreement(layout, ORACLE[name]) == ""


def perturbed(layout: Layout, row: Row) -> list[str]:
    """Tags that are one step from a layout's: neighbours exchanged, blocks of another size."""
    letters = re.findall("[A-Za-z]", layout.tag)[: layout.ndim]
    blocks = [f"{size}{'abcdef'[dim]}" for dim, size in layout.inner]
    tags = []
    for i, j in pairwise(range(layout.ndim)):
        if all(max(row.sizes[layout.outer[k]]) > 1 for k in (i, j)):  # a dimension of 1 may stand anywhere
            tags.append([*letters[:i], letters[j], letters[i], *letters[j + 1 :], *blocks])
    for i, j in pairwise(range(len(blocks))):
        tags.append([*letters, *blocks[:i], blocks[j], blocks[i], *blocks[j + 1 :]])
    for i, (dim, size) in enumerate(layout.inner):
        tags.append([*letters, *blocks[:i], f"{size * 2}{'abcdef'[dim]}", *blocks[i + 1 :]])
    if not blocks:
        tags.append([letter.upper() if letter == "b" else letter for letter in letters] + ["2b"])
    return ["".join(tag) for tag in tags]


@pytest.mark.parametrize(("name", "layout"), CASES, ids=lambda value: str(value))
@pytest.mark.sampled(3)
def test_the_oracle_rejects_a_layout_that_is_slightly_wrong(name: str, layout: Layout) -> None:
    wrong = perturbed(layout, ORACLE[name])
    assert wrong
    for tag in wrong:
        assert tag != layout.tag
        assert disagreement(Layout(tag), ORACLE[name]), f"{tag} passes for {layout.tag}"


def test_the_oracle_and_the_table_know_the_same_layouts() -> None:
    assert set(ACTIVATIONS) == {row.name for row in known_layouts()}
    assert {name for name, _ in CASES} == set(ORACLE)


# --- Examples that the systems' own documents print ---


def stored(layout: str, shape: tuple[int, ...], offsets: range) -> list[Any]:
    return [Layout(layout).index(shape, offset) for offset in offsets]


def test_the_elements_that_openvino_lists_for_fsv16() -> None:
    # (b, f, y, x) of shape (2, 2, 2, 2); its page misprints f in some lines
    assert Layout("b_fs_yx_fsv16").size((2, 2, 2, 2)) == 128
    assert stored("b_fs_yx_fsv16", (2, 2, 2, 2), range(3)) == [(0, 0, 0, 0), (0, 1, 0, 0), None]
    listed = {16: (0, 0, 0, 1), 17: (0, 1, 0, 1), 32: (0, 0, 1, 0), 48: (0, 0, 1, 1), 64: (1, 0, 0, 0)}
    for offset, index in (listed | {81: (1, 1, 0, 1), 112: (1, 0, 1, 1)}).items():
        assert Layout("b_fs_yx_fsv16").index((2, 2, 2, 2), offset) == index
    assert Layout("b_fs_yx_fsv16").index((2, 2, 2, 2), 18) is None


@pytest.mark.parametrize(
    ("name", "first"),
    [
        ("NCHW", [0, 1, 2, 3, 4, 5, 6, 7, 8, 9]),
        ("NHWC", [0, 9, 18, 27]),
        ("NCHW4", [0, 9, 18, 27, 1, 10, 19, 28, 2]),
        ("CHWN4", [0, 9, 18, 27, 576, 585, 594, 603, 1, 10]),
    ],
)
def test_the_elements_that_megengine_draws(name: str, first: list[int]) -> None:
    # N=2, C=64, H=W=3, elements numbered in NCHW order
    shape = (2, 64, 3, 3)
    for offset, number in enumerate(first):
        assert Layout("NCHW").index(shape, number) == Layout(name).index(shape, offset)


@pytest.mark.parametrize(
    ("name", "shape", "height", "width"),
    [
        ("NHWCD4", (2, 5, 3, 7), 2 * 3, 2 * 7),
        ("IN_OUT_HEIGHT", (2, 5, 3, 7), 2 * 1, 5 * 7),
        ("IN_OUT_WIDTH", (2, 5, 3, 7), 2 * 3, 5 * 2),
        ("CONV2D_FILTER", (9, 5, 3, 2), 3 * 3 * 2, 5),
        ("DW_CONV2D_FILTER", (1, 5, 3, 2), 2, 3 * 2),
        ("ARGUMENT", (9,), 1, 3),
        ("NHWCD4", (0, 5, 3, 7), 0, 2 * 7),
    ],
)
def test_image_shape(name: str, shape: tuple[int, ...], height: int, width: int) -> None:
    assert Layout(name).image_shape(shape) == (height, width)
    assert Layout(name).size(shape) == height * width * 4


# --- Names ---

TAGS = {
    "abcd": "NCHW nchw bfyx contiguous_format OIHW oihw oiyx KCRS b_f_y_x ABCD",
    "acdb": "NHWC nhwc byxf channels_last OHWI ohwi oyxi KRSC b_yx_f",
    "bcda": "CHWN chwn fyxb IHWO ihwo iyxo",
    "cdba": "HWCN yxfb HWIO hwio yxio",
    "aBcd4b": "NCHW4 nChw4c b_fs_yx_fsv4 fsv4 NCHW4c NCHWc4 NCHW44 NCHW44_DOT oIhw4i o_is_yx_isv4 KCRSc4",
    "aBcd8b": "NCHW8 nChw8c b_fs_yx_fsv8 fsv8 NCHW8c NCHW88",
    "aBcd16b": "NCHW16 nChw16c b_fs_yx_fsv16 fsv16 NCHW16c NCHWc16 b_fs_y_x_fsv16",
    "aBcd32b": "NCHW32 nChw32c b_fs_yx_fsv32 fsv32 NCHW32c",
    "aBcd64b": "NCHW64 nChw64c b_fs_yx_fsv64 NCHW64c oIhw64i",
    "Bcda4b": "CHWN4 Chwn4c CHWNc4 fs_yx_b_fsv4 Ihwo4i IHWO4i",
    "acBd4b": "NHCW4 NHWCD4 nhCw4c NHCW4c IN_OUT_CHANNEL b_y_fs_x_fsv4",
    "aCbd4c": "IN_OUT_HEIGHT nHcw4h",
    "acbD4d": "IN_OUT_WIDTH nhcW4w",
    "ABcd16a16b": "bsv16_fsv16 NChw16n16c bs_fs_yx_bsv16_fsv16 NCHW16n16c",
    "ABcd32a32b": "bsv32_fsv32 NChw32n32c bs_fs_yx_bsv32_fsv32",
    "ABcd32a16b": "bsv32_fsv16 NChw32n16c bs_fs_yx_bsv32_fsv16",
    "ABcd8a4b": "bsv8_fsv4 bs_fs_yx_bsv8_fsv4",
    "Bacd32b": "fs_b_yx_fsv32 Cnhw32c",
    "A4a": "argument ARGUMENT X4x",
    # Weights
    "ABcd16b16a": "OIhw16i16o OIHW16i16o os_is_yx_isv16_osv16",
    "BAcd16b16a": "IOhw16i16o is_os_yx_isv16_osv16",
    "ABcd8b8a": "OIhw8i8o KCRSc8k8 os_is_yx_isv8_osv8",
    "ABcd4b4a": "OIhw4i4o KCRSc4k4",
    "ABcd4a4b": "OIhw4o4i KCRSk4c4",
    "ABcd4b16a4b": "OIhw4i16o4i OIHW4i16o4i os_is_yx_isa4_osv16_isv4",
    "ABcd4a8b8a4b": "os_is_yx_osa4_isa8_osv8_isv4",
    "Acdb4a": "CONV2D_FILTER Ohwi4o KRSCk4 os_yx_i_osv4",
    "Acdb16a": "Ohwi16o OHWI16o os_yxi_osv16",
    "AcdB4a4b": "OhwI4o4i KRSCk4c4",
    "aBCde16c16b": "gOIhw16i16o GOIHW16i16o g_os_is_yx_isv16_osv16",
    "aBCde4c4b": "gOIhw4i4o GKCRSc4k4",
    "aBCde4b4c": "gOIhw4o4i GKCRSk4c4",
    "aBCde4c16b4c": "gOIhw4i16o4i",
    "aBdec4b": "gOhwi4o GKRSCk4",
    "aCdeb4c": "gIhwo4i",
    "abCde4c": "goIhw4i GKCRSc4 g_o_is_yx_isv4",
    "Abcde16a": "Goihw16g GOIHW16g gs_oiyx_gsv16",
    "Abcde4a": "Goihw4g C11RSc4 C1RSc4",
    "Abcde8a": "Goihw8g C11RSc8",
    "abcde": "GOIHW goihw goiyx C11HW C11RS ncdhw NCDHW oidhw bfzyx oizyx",
    "abdec": "GOHWI gohwi GKRSC",
    "decab": "hwigo",
    # Other numbers of dimensions
    "a": "x X A",
    "ab": "nc NC oi bf",
    "ba": "cn io fb",
    "abc": "ncw NCW oiw goi",
    "acb": "nwc NWC owi",
    "aBc16b": "nCw16c NCW16c",
    "AB16b16a": "OI16i16o os_is_isv16_osv16",
    "AB8b16a": "bs_fs_fsv8_bsv16",
    "aBcde16b": "nCdhw16c NCDHW16c b_fs_zyx_fsv16",
    "aBCdef16c16b": "gOIdhw16i16o g_os_is_zyx_isv16_osv16",
    "abcdef": "goidhw bfwzyx goizyx",
}


@pytest.mark.parametrize(("tag", "name"), [(tag, name) for tag, names in TAGS.items() for name in names.split()])
def test_a_name_is_its_tag(tag: str, name: str) -> None:
    layout = Layout(name)
    assert layout.tag == tag
    assert layout == Layout(tag)
    assert hash(layout) == hash(Layout(tag))
    assert Layout(layout.name) == Layout(str(layout)) == layout


def test_names_and_aliases_of_the_table_are_read_and_kept() -> None:
    for row in known_layouts():
        for name in (row.name, row.tag, *row.aliases):
            layout = Layout(name)
            assert (layout.tag, layout.name, str(layout)) == (row.tag, row.name, row.name)
            assert repr(layout) == f"Layout({row.name!r})"


def test_the_native_layouts() -> None:
    names = ["NCHW", "NHWC", "NCHW4", "NCHW8", "NCHW16", "NCHW32", "NCHW64", "CHWN4"]
    assert [layout.name for layout in NATIVE] == names


def test_attributes() -> None:
    layout = Layout("OIhw4i16o4i")
    assert (layout.ndim, layout.outer, layout.inner) == (4, (0, 1, 2, 3), ((1, 4), (0, 16), (1, 4)))
    assert (layout.blocks, layout.is_blocked, layout.name) == ((16, 16, 1, 1), True, "ABcd4b16a4b")
    assert not Layout("NHWC").is_blocked
    assert Layout("NHWC").outer == (0, 2, 3, 1)


def test_shapes_strides_and_axes() -> None:
    layout, shape = Layout("NCHW16"), (2, 17, 3, 5)
    assert layout.padded_shape(shape) == (2, 32, 3, 5)
    assert layout.storage_shape(shape) == (2, 2, 3, 5, 16)
    assert layout.strides(shape) == (480, 240, 80, 16, 1)
    assert layout.axes(shape) == (
        (0, 1, 2, 480),
        (1, 16, 2, 240),
        (2, 1, 3, 80),
        (3, 1, 5, 16),
        (1, 1, 16, 1),
    )
    steps = [(axis.dim, axis.step, axis.size) for axis in Layout("OIhw4i16o4i").axes((16, 20, 1, 1))]
    assert steps == [(0, 16, 1), (1, 16, 2), (2, 1, 1), (3, 1, 1), (1, 4, 4), (0, 1, 16), (1, 1, 4)]


def test_shapes_are_taken_from_arrays_and_lists() -> None:
    shape = np.array([2, 17, 3, 5])
    assert Layout("NCHW16").storage_shape(shape) == (2, 2, 3, 5, 16)  # type: ignore[arg-type]
    assert Layout("NCHW16").offset([2, 17, 3, 5], [np.int64(1), 16, 2, 4]) == 480 + 240 + 160 + 64


def test_a_layout_of_nothing() -> None:
    layout = Layout("NCHW16")
    assert layout.size((0, 17, 3, 5)) == 0
    assert layout.storage_shape((0, 17, 3, 5)) == (0, 2, 3, 5, 16)
    with pytest.raises(LayoutError, match="offset=0"):
        layout.index((0, 17, 3, 5), 0)


def test_a_layout_of_a_layout_is_itself() -> None:
    layout = Layout("fsv16")
    assert Layout(layout) is layout
    assert layout != "NCHW16"  # type: ignore[comparison-overlap]
    assert len({Layout("fsv16"), Layout("NCHW16c"), Layout("NCHW8")}) == 2


def test_copies_and_pickles_are_equal() -> None:
    for row in known_layouts():
        layout = Layout(row.name)
        for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
            assert pickle.loads(pickle.dumps(layout, protocol)) == layout
        assert copy.deepcopy(layout) == copy.copy(layout) == layout


def test_a_layout_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        Layout("NCHW16").tag = "abcd"  # type: ignore[misc]
    assert Layout("NCHW16").tag == "aBcd16b"


# --- Errors ---

NO_LAYOUTS = [
    ("os_is_yx_osa4_isa8_osv8_isv4_swizzled_by_4", "'swizzled_by_4' reorders elements"),
    ("os_iyx_osv32__ai32", "'__ai32' aligns"),
    ("iy_xs_os_xsv2_osv16__ao32", "'__ao32' aligns"),
    ("image_2d_rgba", "'image_2d_rgba' is an OpenCL image"),
    ("image_2d_weights_c4_fyx_b", "'image_2d_weights_c4_fyx_b' is an OpenCL image"),
    ("winograd_2x3_s1_data", "'winograd_2x3_s1_data' holds transformed values"),
    ("i_yxs_os_yxsv2_osv16", "'yxs' is neither"),
    ("b_fs_yx_fsv", "'fsv' is neither"),
    ("b_fs_yx_16fsv", "'16fsv' is neither"),
    ("NCHW_16", "'NCHW' is neither"),
    ("b__fs_yx_fsv4", "'' is neither"),
    ("b_fs_fsv16_yx", "'yx' follows a slice vector"),
    ("b_fs_yx", "'F' is marked as blocked (C, fs), but has no block"),
    ("b_f_yx_fsv16", "'f' has a block, but is not marked"),
    ("isv16_osv16", "'16i' has a letter that is not among 'bfyx'"),
    ("bs_fs_bsv16_fsv16_x", "'x' follows"),
    ("nchh", "the letter 'h' occurs twice"),
    ("NCHHW", "the letter 'h' occurs twice"),
    ("nhw", "the letter 'c' of 'nchw' is missing"),
    ("acd", "the letter 'b' of 'abcd' is missing"),
    ("gihw", "the letter 'o' of 'goihw' is missing"),
    ("b_fs_x_fsv16", "the letter 'y' of 'bfyx' is missing"),
    ("nchq", "the letter 'q' names no dimension"),
    ("nchwo", "the letters 'nchwo' belong to different"),
    ("abcdefn", "the letters 'abcdefn' belong to different"),
    ("nChw", "'C' is marked as blocked"),
    ("nCHw16c", "'H' is marked as blocked"),
    ("ABcd16b", "'A' is marked as blocked"),
    ("nchw16c", "'c' has a block, but is not marked"),
    ("aBcd16b4a", "'a' has a block, but is not marked"),
    ("aBcd16e", "'16e' has a letter that is not among 'abcd'"),
    ("NCHW16o", "'16o' has a letter that is not among 'nchw'"),
    ("nChw0c", "'0c' must have a size of at least 2"),
    ("nChw1c", "'1c' must have a size of at least 2"),
    ("b_fs_yx_fsv1", "'1f' must have a size of at least 2"),
    ("NCHW1", "'1c' must have a size of at least 2"),
    ("NHWC16", "'16' is no block"),
    ("NCHW٣", "'٣' is no block"),
    ("NCHW16C", "'16C' is no block"),
    ("nChw16c4", "'4' follows a block"),
    ("NC16cHW", "'HW' follows a block"),
    ("n c h w", "' c h w' is no block"),
    ("NCHW²c", "'²c' is no block"),
    ("16c", "'16c' does not begin with the letter"),
    ("", "'' does not begin with the letter"),
    ("NCHW\n", "'\\n' is no block"),
]


@pytest.mark.parametrize(("name", "part"), NO_LAYOUTS)
def test_a_name_that_is_no_layout(name: str, part: str) -> None:
    with pytest.raises(LayoutError) as caught:
        Layout(name)
    assert part in str(caught.value)
    assert repr(name) in str(caught.value)
    assert (caught.value.op, caught.value.argument, caught.value.value) == ("Layout", "name", name)
    assert caught.value.remedy


@pytest.mark.parametrize("wrong", [None, 4, b"NCHW", ["NCHW"], ("n", "c")])
def test_what_is_no_name(wrong: Any) -> None:
    with pytest.raises(LayoutError, match=type(wrong).__name__):
        Layout(wrong)


SHAPE = (2, 17, 3, 5)


@pytest.mark.parametrize(
    ("method", "arguments", "message"),
    [
        ("size", ((2, 17, 3),), "Layout.size: shape=(2, 17, 3): must have 4 dimensions for NCHW16, not 3"),
        ("axes", ((2, 17, -1, 5),), "Layout.axes: shape=(2, 17, -1, 5): must hold sizes of at least 0"),
        ("strides", ((2, 17, 3.0, 5),), "Layout.strides: shape=(2, 17, 3.0, 5): must hold integers"),
        ("storage_shape", (7,), "Layout.storage_shape: shape=7: must hold integers"),
        ("padded_shape", (None,), "Layout.padded_shape: shape=None: must hold integers"),
        (
            "offset",
            (SHAPE, (0, 17, 0, 0)),
            "Layout.offset: index=(0, 17, 0, 0): must hold ",
        ),
        (
            "offset",
            (SHAPE, (0, -1, 0, 0)),
            "index=(0, -1, 0, 0): must hold 4 numbers of at least 0, and less than (2, 17, 3, 5)",
        ),
        ("offset", (SHAPE, (0, 0, 0)), "Layout.offset: index=(0, 0, 0): must hold 4 numbers"),
        ("offset", (SHAPE, "abcd"), "Layout.offset: index='abcd': must hold integers"),
        ("index", (SHAPE, 960), "Layout.index: offset=960: must be 0 or more and less than 960"),
        ("index", (SHAPE, -1), "Layout.index: offset=-1: must be"),
        ("index", (SHAPE, 0.5), "Layout.index: offset=(0.5,): must hold integers"),
        ("forward_index", ((0, 17, 0, 0), SHAPE), "Layout.forward_index: index=(0, 17, 0, 0)"),
        (
            "backward_index",
            ((0, 2, 0, 0, 0), SHAPE),
            "storage_index=(0, 2, 0, 0, 0): must hold ",
        ),
        ("backward_index", ((0, 0, 0, 0), SHAPE), "Layout.backward_index: storage_index=(0, 0, 0, 0)"),
        ("image_shape", (SHAPE,), "layout='NCHW16': is no MACE image; these are: NHCW4, height-major image"),
    ],
)
def test_arguments_that_do_not_fit(method: str, arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        getattr(Layout("NCHW16"), method)(*arguments)
    assert message in str(caught.value)


def test_a_depthwise_image_has_one_multiplier() -> None:
    with pytest.raises(LayoutError, match="M=1"):
        Layout("DW_CONV2D_FILTER").image_shape((2, 5, 3, 3))


# --- Weights ---


@pytest.mark.parametrize(("library", "activation"), WEIGHTS)
def test_weights_that_a_library_does_not_have(library: str, activation: str) -> None:
    for kind, formula in zip(KINDS, WEIGHTS[library, activation], strict=True):
        if formula is None:
            with pytest.raises(LayoutError, match=f"has no {kind} weights in {library}") as caught:
                weights_for(activation, kind, library)
            assert caught.value.value == activation


@pytest.mark.parametrize(
    ("arguments", "weights"),
    [
        (("NCHW4",), "aBcd4b"),
        (("nChw4c", "dense"), "aBcd4b"),  # the plain mode of these bytes, not NCHW44
        ((Layout("NCHW44"),), "aBcd4b"),  # the layout, which is NCHW4; a mode is given by name
        (("NCHW44",), "ABcd4b4a"),
        (("channels_last", "dense", "onednn"), "ABcd4b16a4b"),
        (("acBd4b", "grouped"), "aBdec4b"),
        (("NHWCD4", "depthwise", "mace"), "aBcd4b"),
        (("fsv16", "depthwise", "openvino"), "Abcde16a"),
    ],
)
def test_weights_by_any_name(arguments: tuple[Any, ...], weights: str) -> None:
    assert weights_for(*arguments).tag == weights


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("NCHW16",), "activation='NCHW16': has no dense weights in megengine; give one of NCHW, NHWC"),
        (("NCHW4", "sparse"), "kind='sparse': must be a kind of weights; give one of dense, grouped, depthwise"),
        (("NCHW4", "activation"), "kind='activation': must be a kind"),
        (
            ("NCHW4", "dense", "tvm"),
            "library='tvm': must be a library with weight layouts; give one of megengine",
        ),
        (("NHWC65",), "weights_for: activation='NHWC65'"),
        ((["NCHW"],), "weights_for: activation=['NCHW']"),
    ],
)
def test_weights_that_are_not_known(arguments: tuple[Any, ...], message: str) -> None:
    with pytest.raises(LayoutError) as caught:
        weights_for(*arguments)
    assert message in str(caught.value)


def test_convolution_modes() -> None:
    mode = convolution_mode("NCHW44_DOT")
    assert mode == (Layout("NCHW4"), Layout("OIhw4o4i"), Layout("gOIhw4o4i"), None)
    assert convolution_mode("NHWCD4").activation == Layout("NHCW4")
    assert convolution_mode("NCHW88").depthwise == Layout("Goihw8g")
    for library, name in WEIGHTS:
        if library == "megengine":
            assert convolution_mode(name).activation == Layout(name)
    with pytest.raises(LayoutError, match="'NCHW16': must be a convolution mode of MegEngine; give one of NCHW, NHWC"):
        convolution_mode("NCHW16")


# --- Registering ---


def test_a_registered_name() -> None:
    assert register_layout("my layout", "aBcd7b") == Layout("my layout") == Layout("nChw7c")
    assert Layout("NCHW7c").name == "my layout"
    assert repr(Layout("NCHW7c")) == "Layout('my layout')"
    assert register_layout("my layout", "NCHW7c") == Layout("my layout")  # again
    assert pickle.loads(pickle.dumps(Layout("my layout"))) == Layout("my layout")
    assert b"my layout" not in pickle.dumps(Layout("my layout"))
    with pytest.raises(LayoutError, match="already names aBcd7b, and cannot name aBcd5b; take another name"):
        register_layout("my layout", "aBcd5b")
    assert Layout("my layout").tag == "aBcd7b"


@pytest.mark.parametrize("block", [2, 12, 24, 48, 65])
def test_channels_in_blocks_of_any_size_have_a_short_name(block: int) -> None:
    layout = Layout(f"NCHW{block}")
    assert layout == Layout(f"NCHW{block}c")
    assert layout.is_native == (block <= 64)
    assert layout.storage_shape((2, 50, 3, 5)) == (2, -(-50 // block), 3, 5, block)


def test_a_name_of_the_library_keeps_its_meaning() -> None:
    assert register_layout("NCHW16", "nChw16c").name == "NCHW16"
    for name in ("NCHW16", "channels_last", "nChw2c", "abcd"):
        with pytest.raises(LayoutError, match="already names"):
            register_layout(name, "aBcd3b")
    register_layout("my NCHW16", "fsv16")
    assert Layout("my NCHW16").name == "NCHW16"


@pytest.mark.parametrize("name", ["", None, 3])
def test_what_cannot_be_registered(name: Any) -> None:
    with pytest.raises(LayoutError, match="register_layout: name="):
        register_layout(name, "aBcd3b")
    with pytest.raises(LayoutError, match="register_layout: tag='NHWC65'"):
        register_layout("my other layout", "NHWC65")


def test_one_of_many_threads_gives_a_name_its_meaning() -> None:
    tags = [f"aBcd{n}b" for n in range(70, 90)]
    start = threading.Barrier(len(tags))

    def register(tag: str) -> list[str]:
        won = []
        for attempt in range(50):
            start.wait()
            try:
                won.append(register_layout(f"raced {attempt}", tag).tag)
            except LayoutError:
                won.append("")
        return won

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # without the lock this then fails
    try:
        with ThreadPoolExecutor(len(tags)) as pool:
            outcomes = list(pool.map(register, tags))
    finally:
        sys.setswitchinterval(interval)
    for attempt, won in enumerate(zip(*outcomes, strict=True)):
        assert [tag for tag in won if tag] == [Layout(f"raced {attempt}").tag]


# --- Any layout ---


@st.composite
def permutations_with_blocks(draw: st.DrawFn, ndims: st.SearchStrategy[int]) -> tuple[list[int], list[tuple[int, int]]]:
    ndim = draw(ndims)
    outer = draw(st.permutations(range(ndim)))
    inner = draw(st.lists(st.tuples(st.integers(0, ndim - 1), st.integers(2, 5)), max_size=4))
    return list(outer), inner


def spelt(outer: list[int], inner: list[tuple[int, int]], letters: str) -> str:
    blocked = {dim for dim, _ in inner}
    order = "".join(letters[dim].upper() if dim in blocked else letters[dim] for dim in outer)
    return order + "".join(f"{size}{letters[dim]}" for dim, size in inner)


def by_the_rule(layout: Layout, shape: tuple[int, ...], index: tuple[int, ...]) -> int:
    """The general rule as oneDNN has it: take the inner blocks off, innermost first; the rest has strides."""
    position, offset, stride = list(index), 0, 1
    for dim, block in reversed(layout.inner):
        offset += position[dim] % block * stride
        position[dim] //= block
        stride *= block
    for dim in reversed(layout.outer):
        offset += position[dim] * stride
        stride *= -(-shape[dim] // layout.blocks[dim])
    return offset


@given(st.data())
@settings(max_examples=400, deadline=None)
def test_index_maps_of_any_layout(data: st.DataObject) -> None:
    outer, inner = data.draw(permutations_with_blocks(st.integers(1, 6)))
    tag = spelt(outer, inner, "abcdef")
    layout = Layout(tag)
    assert (layout.tag, list(layout.outer), list(layout.inner)) == (tag, outer, inner)

    shape = data.draw(st.tuples(*[st.integers(1, 9)] * layout.ndim))
    storage_shape, axes, size = layout.storage_shape(shape), layout.axes(shape), layout.size(shape)
    assert math.prod(storage_shape) == size == math.prod(layout.padded_shape(shape))
    assert layout.strides(shape) == tuple(axis.stride for axis in axes)
    for real, padded, block in zip(shape, layout.padded_shape(shape), layout.blocks, strict=True):
        assert real <= padded < real + block
        assert padded % block == 0

    index = data.draw(st.tuples(*[st.integers(0, size - 1) for size in shape]))
    offset, place = layout.offset(shape, index), layout.forward_index(index, shape)
    assert offset == by_the_rule(layout, shape, index)
    assert offset == sum(index[a.dim] // a.step % a.size * a.stride for a in axes)
    assert offset == np.ravel_multi_index(place, storage_shape)
    assert layout.index(shape, offset) == layout.backward_index(place, shape) == index

    offset = data.draw(st.integers(0, size - 1))
    place = tuple(map(int, np.unravel_index(offset, storage_shape)))
    there, found = layout.backward_index(place, shape), layout.index(shape, offset)
    assert all(i < bound for i, bound in zip(there, layout.padded_shape(shape), strict=True))
    if all(i < bound for i, bound in zip(there, shape, strict=True)):
        assert found == there
        assert layout.offset(shape, there) == offset
    else:
        assert found is None


@given(permutations_with_blocks(st.integers(1, 4)), st.data())
@settings(max_examples=100, deadline=None)
def test_no_two_elements_share_a_place(case: tuple[list[int], list[tuple[int, int]]], data: st.DataObject) -> None:
    layout = Layout(spelt(*case, "abcdef"))
    shape = data.draw(st.tuples(*[st.integers(0, 5)] * layout.ndim))
    indices = list(product(*map(range, shape)))
    offsets = {layout.offset(shape, index) for index in indices}
    assert len(offsets) == len(indices)
    assert all(0 <= offset < layout.size(shape) for offset in offsets)


@given(permutations_with_blocks(st.just(4)))
@settings(max_examples=200, deadline=None)
def test_the_four_grammars_agree(case: tuple[list[int], list[tuple[int, int]]]) -> None:
    outer, inner = case
    blocked = {dim for dim, _ in inner}
    layout = Layout(spelt(outer, inner, "abcd"))
    for letters in ("nchw", "oihw", "kcrs", "bfyx", "oiyx"):
        assert Layout(spelt(outer, inner, letters)) == layout  # oneDNN
        order = "".join(letters[dim] for dim in outer).upper()
        assert Layout(order + "".join(f"{size}{letters[dim]}" for dim, size in inner)) == layout  # TVM
        assert Layout(order + "".join(f"{letters[dim]}{size}" for dim, size in inner)) == layout  # MegEngine
    for letters in ("bfyx", "oiyx"):
        tokens = [letters[dim] + "s" * (dim in blocked) for dim in outer]
        tokens += [f"{letters[dim]}sv{size}" for dim, size in inner]
        assert Layout("_".join(tokens)) == layout  # OpenVINO
