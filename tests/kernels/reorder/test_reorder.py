"""Every kernel of the table that says it can do a reorder does it, bit for bit, and touches nothing else.

What the destination has to hold, padding included, comes from the formulas of layout_oracle. Sources have
garbage in their padding. Both lie against pages that cannot be read or written, once at their end and once at
their start, with canaries on the other side.
"""

from __future__ import annotations

import functools
import itertools
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
from guarded import Guarded, available
from hypothesis import example, given, settings
from hypothesis import strategies as st
from layout_oracle import ACTIVATIONS
from storage_oracle import Array, Shape, by_the_rule, garbage, logical_bits, places, stored

from blockconv import Layout, ReorderProblem, SlowPathWarning, known_layouts, to_layout, weights_for
from blockconv.core.types import Types
from blockconv.dispatch.array import BlockedArray
from blockconv.kernels import TABLE, Row
from blockconv.runtime import Program, address_of

pytestmark = [
    pytest.mark.filterwarnings("error::blockconv.SlowPathWarning"),
    pytest.mark.skipif(not available(), reason="pages cannot be protected here"),
]

ROWS = [row for row in TABLE if row.op == "reorder" and row.takes(Types.bits(4))]
NAMES = [name for name in ACTIVATIONS if Layout(name).ndim == 4]
ISA = {"NCHW", "NHWC", "NCHW4", "NCHW16", "CHWN4", "bsv16_fsv16", "width-major image"}
# Every two of: N of 1, 3, 17; C of 1, 3, 15, 16, 17, 33; maps of 1x1, 2x2, 3x5 - and bigger maps.
SHAPES = [(1, 1, 1, 1), (3, 1, 2, 2), (17, 1, 3, 5), (3, 3, 1, 1), (17, 3, 2, 2), (1, 3, 3, 5)]
SHAPES += [(17, 15, 1, 1), (1, 15, 2, 2), (3, 15, 3, 5), (1, 16, 1, 1), (3, 16, 2, 2), (17, 16, 3, 5)]
SHAPES += [(3, 17, 1, 1), (17, 17, 2, 2), (1, 17, 3, 5), (17, 33, 1, 1), (1, 33, 2, 2), (3, 33, 3, 5)]
SHAPES += [(1, 1, 1, 15), (1, 15, 1, 1), (1, 16, 7, 7), (1, 33, 7, 7), (1, 3, 14, 14), (3, 17, 14, 14)]
FILL = 0x77
SIZES = (1, 2, 4, 8)


class Arenas:
    """Two guarded pieces of memory, for a source and a destination."""

    def __init__(self, size: int) -> None:
        self.src, self.dst = Guarded(size), Guarded(size)


@pytest.fixture(scope="module")
def arenas() -> Arenas:
    return Arenas(1 << 22)


@functools.lru_cache(maxsize=256)
def source(layout: str, shape: Shape, itemsize: int) -> Array:
    return stored(logical_bits(shape, itemsize), layout, garbage(places(layout, shape)[1], itemsize)).view(np.uint8)


@functools.lru_cache(maxsize=2048)
def expected(layout: str, shape: Shape, itemsize: int) -> Array:
    return stored(logical_bits(shape, itemsize), layout, FILL).view(np.uint8)


def cases(src: str, dst: str, shape: Shape, itemsize: int) -> Iterator[tuple[Row, bool, Program]]:
    """The kernels that say they can, each with ordinary and with streaming stores."""
    problem = ReorderProblem(shape, src, dst, itemsize)
    taken = [row for row in ROWS if row.rejects(problem, Layout(src), Layout(dst), Types.bits(itemsize)) is None]
    assert any(row.name == "reorder_copy" for row in taken)
    for row, stream in itertools.product(taken, (False, True)):
        yield (
            row,
            stream,
            Program(
                row.prepare(
                    problem, Layout(src), Layout(dst), Types.bits(problem.itemsize), fill=FILL, stream=stream
                ).launches()
            ),
        )


def check(arenas: Arenas, src: str, dst: str, shape: Shape, itemsize: int, threads: int = 1) -> set[str]:
    """Run them all; the names of those that ran."""
    before, after = source(src, shape, itemsize), expected(dst, shape, itemsize)
    names = set()
    for (row, stream, program), where in itertools.product(cases(src, dst, shape, itemsize), ("end", "start")):
        from_, to = arenas.src.take(before.nbytes, where), arenas.dst.take(after.nbytes, where)
        if stream and address_of(to) % 64:
            continue  # who streams sees to it that lines are whole
        from_[:], to[:] = before, 0x33
        program.run([address_of(from_), address_of(to)], threads)
        case = f"{row.name} of {src} to {dst}, {shape}, {itemsize} bytes, stream={stream}, against the {where}"
        assert np.array_equal(to, after), f"{case}: {_first(to, after, dst, shape, itemsize)}"
        assert arenas.dst.intact(), f"{case}: wrote outside"
        assert np.array_equal(from_, before), f"{case}: wrote to its source"
        names.add(row.name)
    return names


def _first(found: Array, wanted: Array, layout: str, shape: Shape, itemsize: int) -> str:
    offset = int(np.flatnonzero(found != wanted)[0]) // itemsize
    index = Layout(layout).index(shape, offset)
    return f"element {offset} ({'padding' if index is None else index}) is wrong"


def marked(name: str, other: str) -> Any:
    """A pair of layouts. Each is tested with NCHW by everyone; among themselves they go through the same kernels."""
    slow = [] if "NCHW" in (name, other) else [pytest.mark.slow]
    return pytest.param(name, other, marks=[pytest.mark.isa] if {name, other} <= ISA else slow)


# All with NCHW and all that run as other machines; of the others a third, which between them have every layout.
PAIRS = [
    marked(src, dst)
    for k, (src, dst) in enumerate(itertools.product(NAMES, NAMES))
    if "NCHW" in (src, dst) or {src, dst} <= ISA or (k + k // len(NAMES)) % 3 == 0
]


@pytest.mark.sampled(36)
@pytest.mark.slow
@pytest.mark.parametrize(("src", "dst"), PAIRS)
def test_every_kernel_moves_every_element_and_fills_the_padding(arenas: Arenas, src: str, dst: str) -> None:
    for k, shape in enumerate(SHAPES):
        for itemsize in {4, SIZES[k % len(SIZES)]}:
            check(arenas, src, dst, shape, itemsize)


@pytest.mark.slow
def test_the_argument_layout(arenas: Arenas) -> None:
    for width, itemsize, (src, dst) in itertools.product(
        (1, 3, 4, 5, 17, 4099), SIZES, itertools.product(("a", "argument"), repeat=2)
    ):
        check(arenas, src, dst, (width,), itemsize)


def test_each_kernel_of_the_table_is_reached(arenas: Arenas) -> None:
    """Lest the tests above pass because one kernel alone says that it can."""
    pairs = [("NCHW", "NHWC"), ("NHWC", "NCHW16"), ("NCHW16", "NCHW4"), ("NCHW", "NCHW64"), ("aBcd6b", "NCHW4")]
    found = [check(arenas, src, dst, (3, 17, 3, 5), 4) for src, dst in pairs]
    assert set().union(*found) == {row.name for row in ROWS}


# What makes kernels take other paths than small maps do: long runs that are cut, whole lines, many tasks.
LONG = [
    ("NCHW", "NHWC", (1, 64, 40, 40)),
    ("NHWC", "NCHW", (1, 64, 40, 40)),
    ("NCHW", "NCHW", (1, 5, 100, 101)),
    ("NCHW", "CHWN", (1, 7, 91, 91)),
    ("NCHW", "NCHW16", (2, 33, 31, 37)),
    ("NCHW16", "NCHW", (2, 33, 31, 37)),
    ("NHWC", "NCHW16", (2, 33, 31, 37)),
    ("NCHW32", "NHWC", (1, 65, 19, 23)),
    ("NCHW", "CHWN4", (16, 9, 13, 17)),
    ("CHWN4", "NCHW4", (16, 9, 13, 17)),
    ("NHWC", "HWCN", (33, 33, 5, 7)),
    ("NCHW8", "bsv16_fsv16", (33, 33, 5, 7)),
    ("NCHW", "NCHW64", (1, 130, 29, 31)),
    ("height-major image", "width-major image", (2, 9, 37, 41)),
    ("abcde", "abdec", (2, 17, 33, 3, 3)),
    ("a", "a", (40_001,)),
    ("ab", "ba", (301, 257)),
]


@pytest.mark.isa
@pytest.mark.parametrize(("src", "dst", "shape"), LONG, ids=str)
@pytest.mark.sampled(6)
def test_bigger_maps_on_several_threads(arenas: Arenas, src: str, dst: str, shape: Shape) -> None:
    for itemsize, threads in itertools.product(SIZES, (1, 2, 4)):
        check(arenas, src, dst, shape, itemsize, threads)


KINDS = ("dense", "grouped", "depthwise")
SECTION_3 = {
    "megengine": "NCHW NHWC NCHW4 NCHW8 NCHW32 NCHW64 NCHW44 NCHW88 NCHW44_DOT CHWN4 NHWCD4 NHWCD4-dot",
    "mace": "NHCW4",
    "onednn": "NCHW NHWC NCHW8 NCHW16",
    "openvino": "NCHW16 bsv16_fsv16",
}


def weight_tags() -> list[str]:
    tags = []
    for library, activations in SECTION_3.items():
        for activation, kind in itertools.product(activations.split(), KINDS):
            try:
                tags.append(weights_for(activation, kind, library).tag)
            except ValueError:
                continue  # the library has none of that kind
    return sorted(set(tags), key=lambda tag: (len(tag), tag))


@pytest.mark.parametrize("tag", weight_tags())
@pytest.mark.sampled(11)
def test_weights(arenas: Arenas, tag: str) -> None:
    plain = [t for t in ("abcd", "acdb", "cdba", "abcde", "abdec") if Layout(t).ndim == Layout(tag).ndim]
    shapes: list[Shape] = [(1, 1, 3, 3), (17, 3, 3, 3), (16, 16, 1, 1), (33, 65, 2, 1), (5, 20, 1, 2)]
    if Layout(tag).ndim == 5:
        shapes = [(g, *shape) for shape in shapes[:4] for g in (1, 3)] + [(33, 1, 1, 3, 3), (17, 2, 1, 1, 1)]
    for k, (shape, other) in enumerate(itertools.product(shapes, plain)):
        check(arenas, other, tag, shape, (1, 4)[k % 2])
        check(arenas, tag, other, shape, (4, 1)[k % 2])


BLOCKED_WEIGHTS = ("ABcd16b16a", "ABcd4b16a4b", "aBcd4b", "Acdb16a", "BAcd16b16a", "ABcd8b8a")


@pytest.mark.parametrize(("src", "dst"), list(itertools.permutations(BLOCKED_WEIGHTS, 2)))
@pytest.mark.sampled(6)
def test_between_blocked_weights(arenas: Arenas, src: str, dst: str) -> None:
    for shape, itemsize in itertools.product([(17, 3, 1, 1), (33, 20, 3, 2)], (2, 4)):
        check(arenas, src, dst, shape, itemsize)


@pytest.mark.parametrize(
    ("src", "dst"), [("aBcd6b", "aBcd4b"), ("aBcd24b", "acBd16b"), ("ABcd6a3b", "aBcd5b"), ("aBcd3b", "ABcd2a4b")]
)
def test_blocks_that_do_not_nest(arenas: Arenas, src: str, dst: str) -> None:
    """Blocks of channels and images are moved in parts that both layouts have contiguous."""
    for shape, itemsize in itertools.product([(1, 1, 1, 1), (3, 5, 2, 3), (7, 13, 1, 4), (2, 24, 2, 2)], SIZES):
        assert check(arenas, src, dst, shape, itemsize) == {"reorder_copy"}


@pytest.mark.parametrize("shape", [(0, 3, 2, 2), (2, 0, 2, 2), (2, 3, 0, 2), (0, 0, 0, 0)])
def test_nothing_is_written_where_there_is_nothing(arenas: Arenas, shape: Shape) -> None:
    for src, dst in itertools.product(NAMES, ("NCHW", "NHWC", "NCHW16", "CHWN4", "bsv16_fsv16", "width-major image")):
        check(arenas, src, dst, shape, 4)


# ---------------------------------------------------------------- layouts that no one has thought of


@st.composite
def tags(draw: st.DrawFn, ndim: int) -> str:
    """Any permutation of dimensions, each cut by up to two blocks."""
    order = draw(st.permutations(range(ndim)))
    blocks = draw(
        st.lists(st.tuples(st.integers(0, ndim - 1), st.sampled_from((2, 3, 4, 8, 16))), max_size=3).filter(
            lambda found: all(sum(d == dim for d, _ in found) < 3 for dim in range(ndim))
        )
    )
    blocked = {dim for dim, _ in blocks}
    letters = "".join("abcdef"[d].upper() if d in blocked else "abcdef"[d] for d in order)
    return letters + "".join(f"{size}{'abcdef'[dim]}" for dim, size in blocks)


@st.composite
def reorders(draw: st.DrawFn) -> tuple[list[str], Shape]:
    ndim = draw(st.integers(1, 5))
    chain = draw(st.lists(tags(ndim), min_size=2, max_size=4))
    top = {1: 200, 2: 40, 3: 17, 4: 9, 5: 5}[ndim]
    return chain, draw(st.tuples(*[st.integers(1, top)] * ndim))


BIG = Arenas(1 << 24) if available() else None


@pytest.mark.slow
@given(reorders(), st.sampled_from(SIZES))
@settings(max_examples=60, deadline=None)
@example((["abcd", "ABcd16a16b"], (1, 1, 1, 1)), 1)  # read past its source
@example((["abcd", "acbD4d"], (1, 15, 1, 1)), 2)  # streamed to an odd address
def test_any_two_layouts(case: tuple[list[str], Shape], itemsize: int) -> None:
    (src, dst, *_), shape = case
    assert BIG is not None
    if max(places(tag, shape)[1] for tag in (src, dst)) * itemsize <= BIG.src.size:
        check(BIG, src, dst, shape, itemsize)


@pytest.mark.slow
@given(reorders(), st.sampled_from(SIZES), st.data())
@settings(max_examples=60, deadline=None)
def test_a_chain_of_reorders_comes_back_bit_for_bit(
    case: tuple[list[str], Shape], itemsize: int, data: st.DataObject
) -> None:
    chain, shape = case
    first = chain[0]
    logical = logical_bits(shape, itemsize, data.draw(st.integers(0, 9)))
    flat = stored(logical, first, 0)
    start = BlockedArray(flat.reshape(Layout(first).storage_shape(shape)), first, shape)
    held = start
    for tag in (*chain[1:], first):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", SlowPathWarning)
            held = to_layout(held, tag)
        assert held.layout == Layout(tag)
        assert np.array_equal(held.storage.reshape(-1), stored(logical, tag))
    assert np.array_equal(held.storage, start.storage)


@given(st.data())
@settings(max_examples=100, deadline=None)
def test_the_rule_and_the_formulas_agree(data: st.DataObject) -> None:
    row = data.draw(st.sampled_from([row for row in known_layouts() if row.name != "argument"]))
    shape = data.draw(st.tuples(*[st.integers(1, 20)] * 2, *[st.integers(1, 6)] * 2))
    by_formula, size = places(row.name, shape)
    by_rule, size_too = by_the_rule(row.tag, shape)
    assert size == size_too
    assert np.array_equal(by_formula, by_rule)
