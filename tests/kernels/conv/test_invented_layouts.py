"""Layouts that nobody built a kernel for: convolution runs in them natively, by their geometry and not their names.

Native means: a row of the table takes the problem, and is no reference; its scratch is within the second-level cache.
(No op has other memory than its arrays and its scratch.)
"""

from __future__ import annotations

import itertools
import random

import pytest
from conv_lab import Paged, check, data, rows

import blockconv as bc
from blockconv import Layout
from blockconv.core import target
from blockconv.core.problem import Conv2dProblem
from blockconv.core.types import Types
from blockconv.kernels.conv.rows import DIRECT, GROUPED, PIXELS, REFERENCE

OWN = bc.register_layout("convolution's own", "caBd24b")
INVENTED = (
    "aBcd24b",
    "aBcd2b",
    "aBcd12b",
    "aBcd40b",
    "aBcd5b",
    "Bcda8b",  # CHWN8
    "cdba",  # HWCN
    "bcda",  # CHWN
    "acBd4b",  # NHCW4
    "Bacd32b",  # fs_b_yx_fsv32
    "cBda16b",  # HCWN16
    "adcb",  # NWHC
    "abdc",  # NCWH
    OWN.tag,
    "ABcd16a16b",  # bsv16_fsv16
    "ABcd32a16b",
    "ABcd32a32b",
    "Acdb4a",
)
NATIVE = tuple(layout.tag for layout in bc.NATIVE)
FLOATS = Types.all("float32")

PROBLEMS = (
    "mb1ic24oc40ih9kh3ph1",
    "mb3ic20oc12ih6iw11kh3kw3sh2sw2ph1pw1",
    "mb17ic10oc24ih5iw4kh3kw3ph1pw1",  # more images than a vector has lanes
    "mb2ic64oc96ih7kh1",
    "mb18ic20oc40ih3kh1",
    "mb5ic3oc16ih8kh3",
    "mb2ic30oc50ih5iw4kh1kw1sh2sw2",
    "mb2ic7oc9ih8kh2dh1",
    "mb2ic26oc30ih1iw9kh1kw3ph0pw1",  # one row
    "mb3ic26oc30ih9iw1kh3kw1ph1",  # one column
    "mb4ic33oc70ih1kh1",  # one pixel
    "mb2g2ic48oc32ih6kh3ph1",
    "mb3g5ic30oc20ih5kh1",
    "mb2g4ic16oc16ih6kh3ph1",  # groups that share a vector
    "mb2g8ic64oc64ih6kh3ph1",
)


def sampled(count: int, text: str) -> list[tuple[str, str]]:
    """Pairs of source and destination: some layouts to themselves, and others at random, native ones among them."""
    pick = random.Random(text)
    others = [pair for pair in itertools.permutations(INVENTED + NATIVE, 2) if set(pair) & set(INVENTED)]
    return [(name, name) for name in pick.sample(INVENTED, count)] + pick.sample(others, count)


def check_all(text: str, pairs: list[tuple[str, str]], at: str | None = None) -> None:
    """at: the end of buffers that a page follows, or precedes, which no one may touch."""
    problem = Conv2dProblem.from_descriptor(text)
    given = data(problem, act="relu", residual=True)
    for src, dst in pairs:
        taken = [row for row in rows(problem, src, dst) if row in (DIRECT, GROUPED, PIXELS)]
        assert DIRECT in taken
        for row in taken:
            primitive = row.prepare(problem, Layout(src), Layout(dst), FLOATS, threads=2)
            for op in primitive.launches():
                assert op.scratch <= target.second_level_cache(), f"{row.name}: {op.scratch} bytes of scratch"
            check(row, problem, src, dst, given, "relu", exact=True, memory=None if at is None else Paged(at))


# One of each kind of source and destination; each takes seconds, as it compiles a tile or two.
FEW = (
    (PROBLEMS[0], "aBcd24b", "aBcd40b"),  # stored in parts
    (PROBLEMS[1], "abdc", "caBd24b"),
    (PROBLEMS[2], "cdba", "cdba"),  # rows of images
    (PROBLEMS[4], "cdba", "bcda"),
    (PROBLEMS[5], "Bcda8b", "aBcd12b"),
    (PROBLEMS[6], "aBcd2b", "aBcd5b"),  # scattered
    (PROBLEMS[9], "Bacd32b", "cBda16b"),
    (PROBLEMS[12], "aBcd24b", "acBd4b"),
    (PROBLEMS[13], "aBcd12b", "aBcd24b"),
    ("mb6ic20oc16ih4kh1", "ABcd4a16b", "bcda"),  # six images, in parts of two
    ("mb48ic20oc40ih3kh1", "ABcd32a16b", "ABcd16a16b"),  # in parts of a block
    (PROBLEMS[1], "Bacd32b", "ABcd32a32b"),  # in a part of a block
)


@pytest.mark.slow
@pytest.mark.isa
@pytest.mark.parametrize(("text", "src", "dst"), FEW)
@pytest.mark.sampled(3)
def test_from_and_to_them(text: str, src: str, dst: str) -> None:
    check_all(text, [(src, dst)])


@pytest.mark.parametrize("at", ["end", "start"])
@pytest.mark.sampled(2)
def test_parts_of_blocks_of_images_end_where_their_arrays_do(at: str) -> None:
    inside = ("mb8ic6oc8ih2kh1", "ABcd8a2b", "ABcd4a16b")  # the last part ends with the source's last block
    for text, src, dst in (*FEW[-3:], inside):
        check_all(text, [(src, dst)], at)


@pytest.mark.slow
@pytest.mark.parametrize("text", PROBLEMS)
@pytest.mark.sampled(15)
def test_from_and_to_all_of_them(text: str) -> None:
    check_all(text, [(name, name) for name in INVENTED] + sampled(14, "more " + text))


@pytest.mark.parametrize("text", ["mb3g2ic14oc26ih3iw5kh3kw3ph1pw1", "mb1ic9oc7ih4iw1kh3kw1ph1"])
def test_the_reference_takes_them_too(text: str) -> None:
    problem = Conv2dProblem.from_descriptor(text)
    given = data(problem, act="sigmoid", residual=True)
    for src, dst in zip(INVENTED, INVENTED[3:] + INVENTED[:3], strict=True):
        check(REFERENCE, problem, src, dst, given, "sigmoid")


def test_layouts_that_strides_and_a_block_do_not_say() -> None:
    problem = Conv2dProblem.from_descriptor("mb1ic8oc8ih4kh3ph1")
    for tag in ("aCbd4c", "acbD4d", "aBcd4b4b", "aBcd128b", "BAcd16a16b", "ABcd16b16a", "ABcd128a16b"):
        for row in (DIRECT, REFERENCE):
            reason = row.rejects(problem, Layout("NCHW"), Layout(tag), FLOATS)
            assert reason is not None
            assert "at most one block" in reason
