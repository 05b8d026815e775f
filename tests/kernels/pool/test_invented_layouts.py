"""Pooling in layouts that nobody built a kernel for: it goes by their geometry, and not by their names.

Each problem runs with every kernel that takes it, one of which is no reference, and the destination is compared whole;
sources have NaN in the channels that do not exist. (Scratch within the second-level cache is asserted by `check`.)
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from guarded import available
from pool_lab import LAYOUTS, ROWS, a_type, check, check_indices

import blockconv as bc
from blockconv import AdaptivePool2dProblem, Layout, Pool2dProblem

pytestmark = pytest.mark.skipif(not available(), reason="pages cannot be protected here")

INVENTED = {
    "NCHW24": "aBcd24b",
    "NCHW2": "aBcd2b",
    "NCHW12": "aBcd12b",
    "NCHW40": "aBcd40b",
    "NCHW5": "aBcd5b",
    "CHWN8": "Bcda8b",
    "CHWN24": "Bcda24b",
    "HWCN": "cdba",
    "HWCN4": "cdBa4b",
    "CHWN": "bcda",
    "NHCW4": "acBd4b",
    "CHNW4": "Bcad4b",
    "fs_b_yx_fsv32": "Bacd32b",
    "HCWN16": "cBda16b",
    "NWHC": "adcb",
    "NCWH": "abdc",
    "a user's own": "caBd24b",
    "bsv4_fsv8": "ABcd4a8b",
}
H_INSIDE_W = {"NWHC", "NCWH"}
bc.register_layout("a user's own pooling layout", INVENTED["a user's own"])

EXCLUDE, INCLUDE = "avg_exclude_padding", "avg_include_padding"
PROBLEMS: dict[str, Any] = {
    "strides": Pool2dProblem("max", n=2, ic=30, ih=9, iw=11, kh=3, kw=3, sh=2, sw=2, ph=1, pw=1),
    "averages": Pool2dProblem(INCLUDE, n=3, ic=14, ih=8, iw=7, kh=3, kw=3, sh=2, sw=2, ph=1, pw=1),
    "runs": Pool2dProblem(EXCLUDE, n=5, ic=26, ih=6, iw=7, kh=3, kw=3, ph=1, pw=1),
    "many images": Pool2dProblem("max", n=17, ic=9, ih=5, iw=6, kh=2, kw=2, sh=2, sw=2),
    "one image": Pool2dProblem("max", n=1, ic=41, ih=5, iw=6, kh=2, kw=2, sh=2, sw=2),
    "global": Pool2dProblem(EXCLUDE, n=2, ic=30, ih=4, iw=8, kh=4, kw=8),
    "one row": Pool2dProblem("max", n=3, ic=26, ih=1, iw=9, kh=1, kw=3, sw=2, pw=1),
    "one column": Pool2dProblem("max", n=3, ic=26, ih=9, iw=1, kh=3, kw=1, sh=2, ph=1),
    "one pixel": Pool2dProblem("max", n=2, ic=7, ih=1, iw=1, kh=3, kw=3, ph=1, pw=1),
    "one pixel grows": Pool2dProblem("max", n=2, ic=7, ih=1, iw=1, kh=1, kw=1, ph=0, pw=0, ph_r=1, pw_r=2),
    "large": Pool2dProblem("max", n=2, ic=13, ih=12, iw=14, kh=9, kw=7, ph=4, pw=3),
    "adaptive": AdaptivePool2dProblem(2, 27, 7, 8, 3, 5),
}


@pytest.mark.sampled(6)
@pytest.mark.slow
@pytest.mark.parametrize(("number", "problem"), [*enumerate(PROBLEMS)])
def test_pools(number: int, problem: str) -> None:
    for name, tag in list(INVENTED.items())[number % 2 :: 2]:  # six problems each, as kernels are compiled for most
        if (name, problem) != ("CHNW4", "one column"):  # images are between its pixels: the reference takes it
            check(PROBLEMS[problem], tag, "float32", threads=2)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["NCHW12", "HWCN", "NHCW4", "HCWN16"])
def test_other_elements(name: str) -> None:
    for dtype in ("float64", "int8"):
        check(PROBLEMS["strides"], INVENTED[name], dtype)


def test_indices_are_those_of_the_logical_image() -> None:
    """h * W + w, in layouts that have h inside w too."""
    for problem, (name, tag) in itertools.product(("strides", "one column", "many images"), INVENTED.items()):
        ran = check_indices(PROBLEMS[problem], tag, "float32", special=True)
        assert len(ran) > 1 or name in H_INSIDE_W, (problem, name)


def test_pairs_are_left_to_the_reference() -> None:
    """No other kernel changes the layout; a sentence says so."""
    pairs = list(itertools.permutations([*INVENTED.values(), *LAYOUTS], 2))
    for src, dst in pairs[::9]:
        for row in ROWS:
            reason = row.rejects(PROBLEMS["strides"], Layout(src), Layout(dst), a_type(row))
            assert reason is None if row.reference else "layout" in reason, (row.name, src, dst)
    for src, dst in (("aBcd24b", "abdc"), ("acBd4b", "cdba"), ("aBcd5b", "Bacd32b")):
        check(PROBLEMS["strides"], src, "float32", other=dst)
